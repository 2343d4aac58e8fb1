"""Sums learnt through the Tinker SDK: a script with its own loop, as the SDK's cookbook has it, against `groupwise serve --tinker`.

    groupwise serve smollm2 --tinker --port 8100
    TINKER_API_KEY=tml-any python benchmarks/tinker_arithmetic.py --url http://127.0.0.1:8100 --out curve.json

It needs the package `tinker`, and of this library nothing: the loop is that of any script.  Each step samples several completions
of each sum from the newest weights, gives 1 for the right number, takes the group's mean off, and trains on `importance_sampling`.
The right answers of 100 other sums, greedily, are counted before and after.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import tinker
from tinker import types

EXAMPLES = "12 + 35 = 47\n60 + 8 = 68\n"


def sums(rng: random.Random, count: int, largest: int) -> list[tuple[str, str]]:
    """Prompts and their answers."""
    pairs = [(rng.randint(0, largest), rng.randint(0, largest)) for _ in range(count)]
    return [(f"{EXAMPLES}{one} + {other} =", str(one + other)) for one, other in pairs]


def is_right(text: str, answer: str) -> bool:
    """True if the line of a completion is the answer."""
    return text.partition("\n")[0].strip() == answer


def trained_datum(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """A completion with its advantage on each of its tokens; the prompt has none."""
    before = [0.0] * (len(prompt) - 1)
    sequence = prompt + tokens
    return types.Datum(
        model_input=types.ModelInput.from_ints(sequence[:-1]),
        loss_fn_inputs={
            "target_tokens": sequence[1:],
            "logprobs": before + logprobs,
            "advantages": before + [advantage] * len(tokens),
        },
    )


class Script:
    """The loop of a user's script."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        service = tinker.ServiceClient(base_url=options.url)
        model = service.get_server_capabilities().supported_models[0].model_name
        self.client = service.create_lora_training_client(base_model=model, rank=options.rank, seed=options.seed).result()
        self.tokenizer: Any = self.client.get_tokenizer()
        self.rng = random.Random(options.seed)
        self.held_out = sums(random.Random(10_000), 100, options.largest)

    def sampled(self, sampler: Any, problems: list[tuple[str, str]], count: int, temperature: float) -> list[Any]:
        """The completions of each problem, all asked for at once."""
        params = types.SamplingParams(max_tokens=6, temperature=temperature, stop=["\n"])
        futures = []
        for prompt, _ in problems:
            tokens = self.tokenizer.encode(prompt)
            futures.append((tokens, sampler.sample(types.ModelInput.from_ints(tokens), count, params)))
        return [(tokens, future.result().sequences) for tokens, future in futures]

    def accuracy(self, sampler: Any) -> float:
        """The share of right answers to sums that are not trained on, greedily."""
        right = 0
        drawn = self.sampled(sampler, self.held_out, 1, 0.0)
        for (_, answer), (_, sequences) in zip(self.held_out, drawn, strict=True):
            right += is_right(self.tokenizer.decode(sequences[0].tokens), answer)
        return right / len(self.held_out)

    def step(self) -> dict[str, float]:
        """Sample, reward, train."""
        options, begun = self.options, time.perf_counter()
        sampler = self.client.save_weights_and_get_sampling_client()
        problems = sums(self.rng, options.prompts, options.largest)
        drawn = self.sampled(sampler, problems, options.group, 1.0)
        sampling = time.perf_counter() - begun
        data, rewards = [], []
        for (_, answer), (prompt, sequences) in zip(problems, drawn, strict=True):
            group = [float(is_right(self.tokenizer.decode(one.tokens), answer)) for one in sequences]
            rewards += group
            mean = sum(group) / len(group)
            for one, reward in zip(sequences, group, strict=True):
                if reward != mean:
                    data.append(trained_datum(prompt, one.tokens, one.logprobs, reward - mean))
        if data:
            batch = self.client.forward_backward(data, "importance_sampling")
            step = self.client.optim_step(types.AdamParams(learning_rate=options.lr))
            batch.result()
            step.result()
        return {
            "reward": sum(rewards) / len(rewards),
            "trained": len(data),
            "sampling_seconds": round(sampling, 2),
            "seconds": round(time.perf_counter() - begun, 2),
        }

    def run(self) -> dict[str, Any]:
        """Train, and count right answers before and after."""
        begun = time.perf_counter()
        before = self.accuracy(self.client.save_weights_and_get_sampling_client())
        print(f"before: {before:.2f}", flush=True)
        curve = []
        for number in range(self.options.steps):
            curve.append(self.step())
            print(number, curve[-1], flush=True)
        after = self.accuracy(self.client.save_weights_and_get_sampling_client())
        seconds = round(time.perf_counter() - begun, 1)
        print(f"after: {after:.2f} in {seconds:.0f} s", flush=True)
        settings = {name: value for name, value in vars(self.options).items() if name not in ("url", "out")}
        return {
            "sdk": tinker.__version__,
            "settings": settings,
            "before": before,
            "after": after,
            "seconds": seconds,
            "curve": curve,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--largest", type=int, default=99)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = Script(options).run()
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
