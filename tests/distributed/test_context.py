"""Streams whose positions are split over processes: the update is that of one process, and a fault in the exchange is found."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from groupwise.config.recipes import load_recipe
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.run import train

pytestmark = pytest.mark.slow  # several processes, each with a start of seconds

spec = importlib.util.spec_from_file_location("context_cases", Path(__file__).with_name("cases.py"))
assert spec is not None and spec.loader is not None
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)

PLANS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "beta": 0.05, "minibatches": 2, "reference_refresh": 1},
    "llama in float32": {"family": "llama", "minibatches": 2, "dtype": "float32"},
    "qwen3": {"family": "qwen3", "recompute": True},
    "gemma2": {"family": "gemma2", "dtype": "float32"},
    "gspo": {"objective": "gspo", "family": "gpt2", "beta": 0.05},
    "ppo": {"objective": "ppo", "critic": "head"},
    "distill": {"objective": "distill", "minibatches": 2},
    "lora": {"lora": True, "beta": 0.1},
    "qwen3_5": {"family": "qwen3_5", "dtype": "float32", "recompute": True, "beta": 0.05},
    "mixture": {"family": "balanced mixtral", "dtype": "float32"},
}


@cache
def alone(plan: str, **changes: Any) -> dict[str, Any]:
    """The same in this process, without the others."""
    return cases.online(**{"steps": 3} | PLANS[plan] | changes)


@pytest.mark.parametrize(
    ("plan", "size", "mode"),
    [
        ("llama", 2, {"context": 2}),
        ("llama", 4, {"context": 4}),
        ("llama", 4, {"context": 2, "name": "ddp"}),
        ("qwen3", 2, {"context": 2}),
        ("qwen3", 4, {"context": 2, "name": "zero3"}),
        ("qwen3", 4, {"context": 2, "name": "zero2", "shards": 2}),
        ("llama in float32", 2, {"context": 2}),
        ("gemma2", 2, {"context": 2}),
        ("gspo", 2, {"context": 2}),
        ("ppo", 2, {"context": 2}),
        ("distill", 2, {"context": 2, "name": "ddp"}),
        ("lora", 2, {"context": 2}),
        ("lora", 4, {"context": 2, "name": "zero3"}),
        ("qwen3_5", 2, {"context": 2}),
        ("qwen3_5", 4, {"context": 2}),
        ("qwen3_5", 4, {"context": 4, "name": "zero3"}),
        ("mixture", 2, {"context": 2}),
    ],
)
def test_steps_of_split_streams_are_those_of_one_process(plan: str, size: int, mode: Any, ranks: Callable) -> None:
    """Losses, clipped gradients and weights of three steps; with four processes two key-value heads are repeated."""
    found = ranks(size).run("online", **PLANS[plan] | {"mode": mode, "steps": 3})
    expected = alone(plan)
    tolerance = 1e-5 if PLANS[plan].get("dtype") == "float32" else 1e-8
    for step, (ours, theirs) in enumerate(zip(found[0]["gradients"], expected["gradients"], strict=True)):
        assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs) > 0, step
    for ours, theirs in zip(found[0]["steps"], expected["steps"], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for name in ("reward", "loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance, nan_ok=True), name
    for one in found:
        for name, weight in expected["weights"].items():
            np.testing.assert_allclose(one["weights"][name], weight, atol=tolerance)
            assert np.array_equal(one["weights"][name], found[0]["weights"][name])


ODD_HEADS = {
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_value_head_dim": 5,
}
"""Heads and channels that no two processes share evenly."""


@pytest.mark.parametrize(
    ("family", "size", "options"),
    [
        ("qwen3_5", 2, {"recompute": True}),
        ("qwen3_5", 4, {}),
        ("qwen3_5", 4, {"mode": {"context": 2}}),
        ("qwen3_5", 4, {"mode": {"context": 2, "name": "zero3"}, "recompute": True}),
        ("qwen3_5", 2, ODD_HEADS),
        ("qwen3_5", 4, ODD_HEADS),
        ("qwen3_5", 4, {"longest": 3}),
        ("qwen3_next", 2, {}),
        ("olmo_hybrid", 2, {}),
        ("lfm2", 2, {}),
        ("lfm2", 4, {"longest": 3}),
        ("granite4", 2, {}),
        ("bamba", 2, {}),
        ("nemotron_h", 4, {}),
        ("falcon_h1", 2, {}),
        ("sinks and windows", 4, {}),
        ("sinks and windows", 2, {"num_attention_heads": 3, "num_key_value_heads": 1}),
        ("caps and windows", 4, {}),
        ("chunks and temperatures", 4, {}),
        ("frequencies by length", 4, {}),
        ("values of another width", 4, {}),
    ],
)
def test_split_streams_are_the_own_pass_in_float64(family: str, size: int, options: dict[str, Any], ranks: Callable) -> None:
    """Log-probs and gradients of ragged texts with shared prompts, the longest of which may have fewer tokens than processes."""
    for values, gradients in ranks(size).run("split_apart", family=family, **{"mode": {"context": size}} | options):
        assert values < 1e-11 and gradients < 1e-10


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral", "balanced mixtral", "qwen3_5"])
@pytest.mark.parametrize("mode", [{"context": 2}, {"context": 2, "name": "zero3"}])
def test_split_streams_are_proven_on_each_rank(family: str, mode: Any, ranks: Callable) -> None:
    for said in ranks(2).run("proven", mode=mode, family=family):
        assert re.search(r"scoring, training(, router)? equal its own pass on cpu in float32", said), said


def test_the_loss_that_balances_experts_is_proven_on_shards(ranks: Callable) -> None:
    for said in ranks(2).run("proven", mode="zero3", family="balanced mixtral"):
        assert "scoring, training, router equal its own pass" in said, said


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("dtype", ["autocast", "bfloat16"])
def test_split_streams_are_proven_in_a_lower_type(dtype: str, family: str, ranks: Callable) -> None:
    for said in ranks(2).run("proven", mode={"context": 2}, family=family, dtype=dtype):
        assert re.search(rf"scoring, training equal its own pass on cpu in float32 and {dtype}", said), said


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("no exchange", "scoring does not equal"),
        ("heads turned", "scoring does not equal"),
        ("positions off", "scoring does not equal"),
        ("counted twice", r"the gradient of \S+ differs by (1|0.99)"),
        ("not summed", r"the gradient of \S+ differs"),
    ],
)
def test_planted_faults_are_found_by_the_proof(fault: str, found: str, ranks: Callable) -> None:
    for said in ranks(2).run("proven", mode={"context": 2}, family="llama", fault=fault):
        assert re.search(f"^refused: .*{found}", said), said


@pytest.mark.parametrize(
    "fault", ["state dropped", "state of the neighbour", "ranks reversed", "tail dropped", "channels of the neighbour"]
)
def test_planted_faults_of_states_are_found_by_the_proof(fault: str, ranks: Callable) -> None:
    for said in ranks(2).run("proven", mode={"context": 2}, family="qwen3_5", fault=fault):
        assert re.search("^refused: .*scoring does not equal", said), said


SCRATCH = {"hidden": 32, "layers": 2, "heads": 4, "context": 96, "tokenizer": "arithmetic"}


@pytest.fixture
def recipe(write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a recipe and returns its path."""
    monkeypatch.chdir(Path(__file__).parent)
    rewards = {"rewards": [{"function": "repetition", "args": {"n": 1}}]}
    return lambda name, **changes: str(write_recipe(tmp_path, name, **({"group": {"beta": 0.05}, "steps": 3} | rewards | changes)))


OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {},
    "reward": {"reward_model": {"lm_coefficient": 0.1, "centering": 0.01}},
    "prm": {},
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_data_set_objectives_of_split_streams_are_those_of_one_process(
    objective: str, recipe: Callable, ranks: Callable, tmp_path: Path
) -> None:
    rows = []
    for i in range(24):
        row = {"prompt": f"{i}+{i}=", "completion": "1" * (i % 5 + 1), "chosen": "12" * (i % 4 + 1), "rejected": "3"}
        if objective == "prm":
            row = {"prompt": f"{i}+{i}=", "completions": ["12" * (i % 3 + 1), "3"], "labels": [i % 2 == 0, True]}
        rows.append(row)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = OBJECTIVES[objective] | {
        "objective": objective,
        "steps": 2,
        "batch_size": 5,
        "data": {"task": None, "path": str(tmp_path / "rows.jsonl"), "eval_fraction": 0.2, "eval_limit": None},
        "model": {"scratch": SCRATCH | {"family": "qwen3_5"}},
        "rewards": [],
        "save": {"every": 0},
        "group": {},
    }
    for _ in train(load_recipe(recipe("alone", **common))):
        pass
    ranks(2).run("whole_run", path=recipe("split", **common, parallel={"context": 2}))
    alone, split = (tmp_path / "runs" / name for name in ("alone", "split"))
    expected, found = (load_file(run / "final" / "model.safetensors") for run in (alone, split))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=0)
    for ours, theirs in zip(read_metrics(split), read_metrics(alone), strict=True):
        assert ours["tokens/trained"] == theirs["tokens/trained"]
        compared = {"loss", "grad_norm", "accuracy", "eval/loss"} & theirs.keys()
        if objective == "dpo":  # its first step is the reference's: which reward is above the other is rounding
            compared.discard("accuracy")
        for name in compared:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


@pytest.mark.parametrize(
    ("family", "dtype", "last"),
    [("llama", "float32", {"tensor": 2}), ("llama", "bfloat16", {"tensor": 2}), ("qwen3_5", "float32", {"name": "zero3"})],
)
def test_a_run_goes_on_in_other_layouts(
    family: str, dtype: str, last: dict[str, Any], recipe: Callable, ranks: Callable, tmp_path: Path
) -> None:
    """Two split the streams, then one process, then two split or shard the weights."""
    changes = {"model": {"dtype": dtype, "scratch": SCRATCH | {"family": family}}}
    for _ in train(load_recipe(recipe("straight", save={"every": 0}, **changes))):
        pass
    ranks(2).run("whole_run", path=recipe("moved", **changes, parallel={"context": 2}), stop=1)
    for step in train(load_recipe(recipe("moved", **changes))):
        assert step.number == 2  # it went on, and did not begin anew
        break
    ranks(2).run("whole_run", path=recipe("moved", **changes, parallel=last))
    files = [tmp_path / "runs" / name / "final" / "model.safetensors" for name in ("straight", "moved")]
    expected, found = map(load_file, files)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5 if dtype == "float32" else 1e-2, rtol=0)
    assert [line["step"] for line in read_metrics(tmp_path / "runs" / "moved")] == [1, 2, 3]
