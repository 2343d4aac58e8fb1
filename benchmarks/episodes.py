"""Episodes a second: 64 episodes at once, each of which calls eight tools of 200 ms, one after the other, in both trainers.

    python benchmarks/episodes.py --pairs 5

Both get the environment of `_shop.py` and a model that knows its part by heart, so that every episode has nine turns of the same
tokens.  Measured is the rollout: generation, tools and rewards.  Nobody can be faster than the larger of two times: the tools of
one episode (8 x 200 ms), and decoding, which is our own rollout with tools that answer at once, measured in the same run.  The
model has 3.3M parameters: of a smaller one, Python around its steps would be measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import _shop
from _machine import median, save, significant
from _memorised import COLD, call, memorised

from groupwise.data.tokenizers import load_tokenizer

HERE = Path(__file__).parent
CALLS = 8
LENGTH = 800
"""Tokens of the longest episode."""
Row = dict[str, Any]


def conversation() -> list[Row]:
    """Eight amounts are rung up, one after the other."""
    messages: list[Row] = [{"role": "user", "content": "Ring up."}]
    for amount in range(1, CALLS + 1):
        messages.append({"role": "assistant", "content": "", "tool_calls": [call("add", amount=amount)]})
        messages.append({"role": "tool", "content": str(amount * (amount + 1) // 2)})
    return [*messages, {"role": "assistant", "content": "Done."}]


def rows(prompts: int, seconds: float) -> list[Row]:
    """One question for all."""
    right = CALLS * (CALLS + 1) // 2
    return [{"prompt": conversation()[:1], "right": right, "seconds": seconds, "greeting": ""} for _ in range(prompts)]


def of_groupwise(folder: Path, scratch: Path, prompts: int, group: int, seconds: float) -> Generator[float, None, None]:
    """Seconds of one rollout after the other."""
    import groupwise as gw

    training = gw.train(
        objective="grpo",
        model={"path": str(folder)},
        data=rows(prompts, seconds),
        environment={"factory": f"{HERE / '_shop.py'}:Shop"},
        rollout={"max_new_tokens": LENGTH, "temperature": COLD},
        group={"prompts_per_step": prompts, "group_size": group},
        optimizer={"lr": 1e-9},
        steps=100,
        runs=str(scratch / "runs"),
        name=f"shop-{seconds}",
    )
    for step in training:
        calls = [sum(len(turn.calls) for turn in one.episode.turns) for g in step.groups for one in g.rollouts if one.episode]
        assert calls == [CALLS] * prompts * group, f"episodes with other numbers of calls: {sorted(set(calls))}"
        assert all(float(reward) == 1.0 for g in step.groups for reward in g.reward)
        yield step.timings["rollout"]


def of_trl(folder: Path, scratch: Path, prompts: int, group: int, seconds: float) -> Generator[float, None, None]:
    """The same of TRL's GRPOTrainer, whose tool loop it is that is measured: the rollout of a step, without its update."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    given = rows(prompts, seconds)
    config = GRPOConfig(
        output_dir=str(scratch / "trl"),
        per_device_train_batch_size=prompts * group,
        num_generations=group,
        max_completion_length=LENGTH,
        temperature=COLD,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=str(folder),
        args=config,
        train_dataset=Dataset.from_list(given),
        processing_class=load_tokenizer(str(folder)),
        environment_factory=_shop.Shop,
    )
    trainer.model.train()
    batch = [row for row in given for _ in range(group)]
    while True:
        begin = time.perf_counter()
        outputs = trainer._generate_and_score_completions(batch)
        took = time.perf_counter() - begin
        assert len(outputs["completion_ids"]) == prompts * group
        counted = trainer._metrics["train"]["tools/call_frequency"][-1]
        assert counted == CALLS, f"TRL's episodes made {counted} calls"
        yield took


def main() -> None:
    """Measure in turn and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="rollouts of each side (default: 5)")
    parser.add_argument("--trl-pairs", type=int, help="of TRL's, which take two minutes each (default: as many)")
    parser.add_argument("--episodes", type=int, default=64, help="at once (default: 64)")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a tool (default: 0.2)")
    options = parser.parse_args()
    group, shop = 8, _shop.Shop()
    prompts = options.episodes // group
    with tempfile.TemporaryDirectory(prefix="groupwise-episodes-") as text:
        scratch = Path(text)
        folder = memorised(scratch / "model", [conversation()], [shop.add, shop.price], hidden=256, layers=4)
        sides = {
            "groupwise": of_groupwise(folder, scratch, prompts, group, options.seconds),
            "decode": of_groupwise(folder, scratch, prompts, group, 0.0),
            "trl": of_trl(folder, scratch, prompts, group, options.seconds),
        }
        taken: dict[str, list[float]] = {name: [] for name in sides}
        warm = of_trl(folder, scratch, prompts, group, 0.0)
        next(warm), next(sides["groupwise"]), next(sides["decode"])
        for pair in range(options.pairs):
            for name, side in sides.items():
                if name != "trl" or pair < (options.trl_pairs or options.pairs):
                    taken[name].append(next(side))
                    print(f"{name} {taken[name][-1]:.3f} s", flush=True)
        for side in sides.values():
            side.close()
    seconds = {name: median(values) for name, values in taken.items()}
    tools = CALLS * options.seconds
    bound = max(tools, seconds["decode"])
    rates = {name: significant(options.episodes / seconds[name]) for name in ("groupwise", "trl")}
    result = {
        "episodes": options.episodes,
        "calls": CALLS,
        "tool_seconds": options.seconds,
        "seconds": seconds,
        "all": taken,
        "tools": tools,
        "bound": bound,
        "over_bound": significant(seconds["groupwise"] / bound),
        "episodes_per_second": rates,
        "ratio": significant(seconds["trl"] / seconds["groupwise"]),
    }
    save("episodes", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
