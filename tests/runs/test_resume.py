"""A run that was broken off goes on to the bits of one that was not: runs of every kind, in one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from finished import final_weights, untimed_metrics

from groupwise.config.recipes import load_recipe
from groupwise.runs.run import train

RULES = [{"function": "accuracy"}, {"function": "repetition", "args": {"n": 1}}]
TWICE = {"prompts_per_step": 4, "updates_per_rollout": 2, "minibatches": 2}
PPO = {"objective": "ppo", "steps": 4, "rewards": RULES, "group": {**TWICE, "group_size": 2, "beta": 0.05, "kl": "k3"}}
TAUGHT = {"objective": "distill", "steps": 4, "rewards": [], "group": {"group_size": 2, "updates_per_rollout": 2}}
PAIRS = {"path": "PAIRS", "task": None, "limit": None, "eval_limit": None, "eval_fraction": 0.25}
RANKED = {"steps": 4, "batch_size": 8, "rewards": [], "data": PAIRS, "eval": {"every": 2, "batches": 1, "k": 1}}
VALUES = ("value/mean", "value/loss", "value/return")


@dataclass(frozen=True)
class Case:
    """A run: its recipe, the steps behind which it is broken off, and what must be seen of it, lest it is another run."""

    changes: dict[str, Any]
    stops: Sequence[int]
    logs: Sequence[str] = ()
    signals: Sequence[str] | None = None
    pretrained: int = 0
    staleness: Sequence[float] | None = None


CASES = {
    "two epochs": Case({"steps": 6, "rewards": RULES, "data": {"limit": 8}, "group": TWICE}, range(1, 6), logs=["reward"]),
    "moving reference": Case(
        {"steps": 5, "rewards": RULES, "group": {"beta": 0.1, "reference_refresh": 2, "reference_mix": 0.5}}, [1, 3], logs=["kl"]
    ),
    "rollouts ahead": Case(
        {"steps": 6, "rewards": RULES, "data": {"limit": 8}, "group": {**TWICE, "beta": 0.1},
         "rollout": {"engine": {"name": "native", "ahead": 2}}},
        range(1, 6),
        staleness=[0.0, 4.0, 8.0, 8.0, 8.0, 8.0],
    ),
    **{f"sft, {dtype}": Case({"objective": "sft", "steps": 3, "batch_size": 4, "rewards": [], "model": {"dtype": dtype}}, [1, 2])
       for dtype in ("float32", "bfloat16", "autocast")},
    **{f"grpo, {dtype}": Case({"steps": 3, "rewards": RULES, "model": {"dtype": dtype}}, [1, 2])
       for dtype in ("bfloat16", "autocast")},
    "reward": Case(RANKED | {"objective": "reward", "reward_model": {"pooling": "mean"}}, [2]),
    "dpo": Case(RANKED | {"objective": "dpo"}, [2]),
    "teacher": Case(TAUGHT | {"teacher": {"path": "LARGER"}}, [2]),
    "minillm": Case(TAUGHT | {"objective": "minillm", "teacher": {"path": "LARGER"}}, [2], logs=["teacher/kl"]),
    "hint": Case(TAUGHT | {"teacher": {"hint": "{answer} "}}, [2]),
    "distill_sampled": Case(
        TAUGHT | {"objective": "distill_sampled", "teacher": {"path": "LARGER"}, "rewards": RULES[:1]}, [2],
        logs=["teacher/kl", "reward"],
    ),
    "critic on the policy": Case(
        PPO | {"critic": {"lr": 1e-3, "pretrain": 1}}, [1, 2], logs=VALUES, pretrained=1,
        signals=["reference_logp", "value", "old_value", "return"],
    ),
    "critic of its own": Case(
        PPO | {"critic": {"lr": 1e-3, "pretrain": 2, "path": "LARGER"}}, [1, 2], logs=VALUES, pretrained=2,
        signals=["reference_logp", "value", "old_value", "return"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory, write_recipe: Callable) -> str:
    """A trained model of another size."""
    folder = tmp_path_factory.mktemp("larger")
    model = {"scratch": {"hidden": 48, "layers": 2, "heads": 4, "context": 128, "tokenizer": "arithmetic"}}
    list(train(load_recipe(write_recipe(folder, "larger", steps=1, model=model, rewards=RULES[:1]))))
    return str(folder / "runs" / "larger" / "final")


def trained(path: Path, stops: Sequence[int] = ()) -> list[Any]:
    """The steps of the last start of a run; each of the others is closed behind a step, as by Ctrl-C."""
    for stop in stops:
        for step in train(load_recipe(path)):
            if step.number == stop:
                break
    return list(train(load_recipe(path)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_p43_p44_interrupted_equals_straight_bit_for_bit(name: str, larger: str, tmp_path: Path, write_recipe: Callable) -> None:
    case = CASES[name]
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n + 2)} for n in range(60)]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    text = json.dumps(case.changes).replace("LARGER", larger).replace("PAIRS", str(tmp_path / "pairs.json"))
    straight, broken = (write_recipe(tmp_path, run, **json.loads(text)) for run in ("straight", "broken"))
    whole, rest = trained(straight), trained(broken, case.stops)
    assert [step.number for step in rest] == [step.number for step in whole if step.number > case.stops[-1]]
    one, other = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"
    assert untimed_metrics(one) == untimed_metrics(other)
    expected, found = (final_weights(folder) for folder in (one, other))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    lines = untimed_metrics(one)
    assert any(step.metrics["grad_norm"] > 0 for step in whole)
    assert all(step.metrics.keys() >= set(case.logs) for step in whole)
    assert [step.metrics["lr"] > 0 for step in whole] == [step.number > case.pretrained for step in whole]
    if case.signals is not None:
        assert all(set(group.signals) == set(case.signals) for step in whole for group in step.groups)
        assert not any("critic" in key or "score" in key for key in expected)
    if case.staleness is not None:
        assert [line.get("staleness/max", 0.0) for line in lines] == case.staleness
