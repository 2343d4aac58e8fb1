"""Learning, side by side: TRL and Groupwise train SmolLM2 on the same sums with the same reward, seed, rate and batch.

    python benchmarks/learning.py              # seeds 0, 1 and 2 of each side that have no result yet, one after the other
    python benchmarks/learning.py trl 0        # one of them
    python benchmarks/learning.py --table

Accuracy is measured by one evaluator on the same 64 held-out prompts, before training and after every 10 steps.  Seconds are
processor seconds of one thread in training steps: loading and evaluation are not counted.  TRL's trainer is used as its
documentation shows it, without a server, with its sequence-mean loss (`loss_type="grpo"`), which is what Groupwise's `grpo`
computes.  The two draw different completions, so one seed says little: compare the means over seeds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from real_model import COMPLETIONS, SEEDS, STEPS, interval, store, stored

import groupwise as gw
from groupwise.data.tasks.chat import ChatSums, same_number

EVERY, SIZE, LENGTH, RATE = 10, 8, 24, 1e-5
ROWS = 2000


def accuracy(model: str) -> dict[str, float]:
    """Greedy and sampled accuracy of a model's folder on the held-out sums."""
    report = gw.evaluate(
        model,
        task="chat_sums",
        chat=True,
        rewards=[same_number],
        verdict="same_number",
        limit=64,
        k=8,
        max_new_tokens=LENGTH,
        seed=0,
    ).evaluation
    return {"greedy": report.greedy.mean, "sampled": report.sampled.mean, "pass@8": report.pass_at_k.mean}


def with_groupwise(seed: int, folder: Path) -> list[dict[str, float]]:
    """The bundled recipe.  A step that is followed by an evaluation takes the median of the others."""
    points: list[dict[str, float]] = []
    seconds: list[float] = []
    start = time.process_time()
    overrides: dict[str, Any] = {"runs": str(folder), "name": "run", "threads": 1, "seed": seed, "eval": {"every": EVERY, "k": 8}}
    for step in gw.train(str(Path(__file__).parents[1] / "recipes/smollm2-sums.yaml"), **overrides):
        now = time.process_time()
        found = step.evaluation
        if step.number > 0:
            seconds.append(now - start if found is None else statistics.median(seconds))
        if found is not None:
            accuracies = {name: found[name] for name in ("greedy", "sampled", "pass@8")}
            points.append({"step": step.number, "seconds": sum(seconds), **accuracies})
        start = time.process_time()
    return points


def with_trl(seed: int, folder: Path) -> list[dict[str, float]]:
    """`GRPOTrainer`, held before each step and asked for its accuracy."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from groupwise.config.packaged_models import packaged_folder

    torch.set_num_threads(1)
    path = str(packaged_folder("smollm2"))
    points: list[dict[str, float]] = []
    seconds = 0.0

    class Clock(TrainerCallback):
        """Counts the processor's seconds between the beginning and the end of steps."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Before sampling."""
            if state.global_step == 0:
                self.judge(0)
            self.start = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """After the optimizer."""
            nonlocal seconds
            seconds += time.process_time() - self.start
            if state.global_step % EVERY == 0:
                self.judge(state.global_step)

        def judge(self, step: int) -> None:
            """Save the model and evaluate the folder."""
            trainer.model.save_pretrained(folder / "model")
            tokenizer.save_pretrained(folder / "model")
            points.append({"step": step, "seconds": seconds, **accuracy(str(folder / "model"))})

    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = ChatSums().prompts(ROWS, seed)
    data = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    config = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=COMPLETIONS, num_generations=SIZE, max_completion_length=LENGTH,
        loss_type="grpo", beta=0.0, temperature=1.0, learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0,
        max_grad_norm=1.0, max_steps=STEPS, seed=seed, bf16=False, gradient_checkpointing=False, use_cpu=True, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=path, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(data), processing_class=tokenizer,
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    return points


END = 2
"""The id of SmolLM2's `<|im_end|>`."""


def reward(completions: list[Any], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The recipe's reward, with TRL's arguments."""
    reasons = ["eos" if ids[-1] == END else "length" for ids in completion_ids]
    return same_number(completions, answer, reasons)


SIDES = {"groupwise": with_groupwise, "trl": with_trl}


def table() -> str:
    """Means over seeds with 95 % intervals, by steps."""
    lines = ["| steps | | seeds | processor seconds | greedy | sampled | pass@8 |", "|---|---|---|---|---|---|---|"]
    for step in range(0, STEPS + 1, EVERY):
        for side in SIDES:
            curves = [result["curve"] for name, result in stored().items() if name.startswith(f"learning/{side}/")]
            rows = [point for curve in curves for point in curve if point["step"] == step]
            if rows:
                cells = [interval([row[key] for row in rows]) for key in ("greedy", "sampled", "pass@8")]
                seconds = statistics.mean(row["seconds"] for row in rows)
                lines.append(f"| {step} | {side} | {len(rows)} | {seconds:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", nargs="?", choices=list(SIDES))
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    for seed in SEEDS if options.seed is None else (options.seed,):
        for side in SIDES if options.side is None else (options.side,):
            name = f"learning/{side}/{seed}"
            if name not in stored():
                with tempfile.TemporaryDirectory(prefix="groupwise-learning-") as folder:
                    points = SIDES[side](seed, Path(folder))
                store(name, {"curve": [{key: round(value, 4) for key, value in point.items()} for point in points]})
                print(name, points, flush=True)


if __name__ == "__main__":
    main()
