"""The update does not depend on the number of processes: 2, 3 and 4 against 1, whole weights and sharded ones both ways."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # several processes, each with a start of seconds

spec = importlib.util.spec_from_file_location("parallel_cases", Path(__file__).with_name("cases.py"))
assert spec is not None and spec.loader is not None
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)

MODES = ("ddp", "zero3", "zero2")
STEPS = 3
"""Enough for what follows two moves of the reference (`reference_refresh` 1), and for ranks to drift apart."""
PLANS: dict[str, dict[str, Any]] = {
    "grpo": {"objective": "grpo", "minibatches": 2, "beta": 0.1, "reference_refresh": 1, "reference_mix": 0.5},
    "dapo": {"objective": "dapo", "family": "gpt2", "entropy_bonus": 0.01, "entropy_quantile": 0.5, "beta": 0.05},
    "gspo": {"objective": "gspo", "recompute": True, "beta": 0.05},
    "dr_grpo": {"objective": "dr_grpo", "family": "qwen3", "dead_groups": "drop", "beta": 0.05},
    "grpo without KL": {"objective": "grpo", "minibatches": 2},
    "ppo": {"objective": "ppo", "minibatches": 2, "beta": 0.05, "critic": "own"},
    "distill": {"objective": "distill", "minibatches": 2, "family": "gpt2"},
    "minillm": {"objective": "minillm", "updates_per_rollout": 2},
    "recompute": {"objective": "grpo", "minibatches": 2, "family": "gpt2", "recompute": True, "beta": 0.05},
}


@cache
def alone(plan: str, **changes: Any) -> dict[str, Any]:
    """The same in this process, without the others."""
    return cases.online(**{"steps": STEPS} | PLANS[plan] | changes)


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert len(found["gradients"]) == len(expected["gradients"])
    for step, (ours, theirs) in enumerate(zip(found["gradients"], expected["gradients"], strict=True)):
        assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs), step
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for name in ("reward", "loss", "grad_norm", "progress", "ratio/max", "tokens/trained", "groups/dead"):
            assert (name in ours) == (name in theirs)
            if name in theirs:  # a step without signal has no progress
                assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance, nan_ok=True), name
        assert ("kl" in ours) == ("kl" in theirs)
        if "kl" in theirs:
            assert ours["kl"] == pytest.approx(theirs["kl"], rel=tolerance)
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], weight, atol=tolerance)


@pytest.mark.parametrize("plan", PLANS)
def test_the_test_plans_cover_the_hard_cases(plan: str) -> None:
    """Else the test below would compare easier runs than it says."""
    found = alone(plan)
    steps = found["steps"]
    assert len(steps) == STEPS
    assert len({len(row) for step in steps for row in step["tokens"]}) > 3, "lengths are not ragged"
    assert any(step["unscorable"] for step in steps), "every completion was scored"
    dead = "alike" if plan in ("ppo", "minillm") else "groups/dead"  # equal rewards have advantages there: no group is dead
    assert any(step[dead] > 0 for step in steps), "no group was dead, or had equal rewards"
    if PLANS[plan].get("beta"):
        assert all(step["kl"] > 1e-3 for step in steps if "kl" in step)
        assert sum("kl" in step for step in steps) >= STEPS - 1
    else:
        assert not any("kl" in step for step in steps)


# Every plan whole and spread, once on two processes and once on three, which divide nothing: no rows of weights, prompts or groups.
# `zero2` is `zero3` but for weights that stay gathered until the backward pass: it meets recomputation, and a second model.
CASES = [(plan, (3, 2)[place % 2], "ddp") for place, plan in enumerate(PLANS)]
CASES += [(plan, (2, 3)[place % 2], "zero3") for place, plan in enumerate(PLANS)]
CASES += [("gspo", 2, "zero2"), ("ppo", 3, "zero2"), ("recompute", 2, "zero2")]


@pytest.mark.parametrize(("plan", "size", "mode"), CASES)
def test_p50_p51_losses_gradients_and_samples_are_those_of_one_process(plan: str, size: int, mode: str, ranks: Callable) -> None:
    """Three steps with ragged lengths, unscorable rows, dead groups, prompts that do not divide, several micro-batches."""
    found = ranks(size).run("online", **PLANS[plan] | {"mode": mode, "steps": STEPS})
    expected = alone(plan)
    assert any(np.any(gradient) for gradient in expected["gradients"])
    assert_same(found[0], expected, 1e-6)
    for other in found[1:]:  # not a bit may differ between ranks, or they would drift apart
        assert all(np.array_equal(a, b) for a, b in zip(other["gradients"], found[0]["gradients"], strict=True))
        assert all(np.array_equal(other["weights"][n], w) for n, w in found[0]["weights"].items())
        assert [s["loss"] for s in other["steps"]] == [s["loss"] for s in found[0]["steps"]]


def test_a_critic_s_head_on_the_policy_learns_the_same_on_any_number_of_processes(ranks: Callable) -> None:
    plan = {"objective": "ppo", "minibatches": 2, "critic": "head", "steps": STEPS}
    found, expected = ranks(2).run("online", **plan), cases.online(**plan)
    assert_same(found[0], expected, 1e-6)
    assert {name for name in expected["weights"] if name.startswith("critic.")} == {"critic.weight", "critic.bias"}
    assert all(np.array_equal(found[1]["weights"][n], w) for n, w in found[0]["weights"].items())


@pytest.mark.parametrize(
    ("size", "mode"),
    [
        (2, {"name": "zero3", "offload": True}),
        (4, {"name": "zero3", "shards": 2}),
        (4, {"name": "zero2", "shards": 2, "offload": True}),
    ],
)
def test_neither_copies_nor_host_memory_change_the_steps(size: int, mode: dict[str, Any], ranks: Callable) -> None:
    """HSDP: two copies, each shared by two processes; and parts that live in host memory."""
    found = ranks(size).run("online", **PLANS["grpo"] | {"mode": mode, "steps": STEPS})
    assert_same(found[0], alone("grpo"), 1e-6)
    for other in found[1:]:
        assert all(np.array_equal(other["weights"][n], w) for n, w in found[0]["weights"].items())


@pytest.mark.parametrize(("family", "mode"), [*(("llama", mode) for mode in MODES), ("gpt2", "zero3")])
def test_p53_an_adapter_on_spread_weights_takes_the_same_steps(family: str, mode: str, ranks: Callable) -> None:
    """Trained factors beside frozen weights of the same blocks, the reference under them, against one process.  GPT-2's weights lie
    the other way round, which only matters where they are cut."""
    plan = {"objective": "grpo", "beta": 0.1, "lora": True, "family": family, "steps": STEPS}
    found, expected = ranks(2).run("online", **plan | {"mode": mode}), cases.online(**plan)
    assert expected["steps"][0]["kl"] < 1e-12 < expected["steps"][-1]["kl"]
    for rank in found:
        for step, first in zip(rank["steps"], expected["steps"], strict=True):
            assert step["kl"] == pytest.approx(first["kl"], rel=1e-5, abs=1e-12)
        assert_same({**rank, "steps": []}, {**expected, "steps": []}, 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_dropout_and_whole_modules_take_the_same_steps(mode: str, ranks: Callable) -> None:
    """Whoever has a row draws its masks; copies of embedding and head lie beside their originals."""
    plan = {"objective": "grpo", "beta": 0.1, "lora": True, "dropout": 0.3, "family": "qwen3", "steps": STEPS}
    found, expected = ranks(2).run("online", **plan | {"mode": mode}), cases.online(**plan)
    for rank in found:
        for step, first in zip(rank["steps"], expected["steps"], strict=True):
            assert step["kl"] == pytest.approx(first["kl"], rel=1e-5, abs=1e-12)
        assert_same({**rank, "steps": []}, {**expected, "steps": []}, 1e-6)


@pytest.mark.parametrize("mode", ["zero3", "ddp"])
@pytest.mark.parametrize("dtype", ["bfloat16", "autocast"])
def test_p53_an_adapter_in_lower_precision(dtype: str, mode: str, ranks: Callable) -> None:
    plan = {"objective": "grpo", "beta": 0.1, "lora": True, "steps": 2, "dtype": dtype}
    for rank in ranks(2).run("online", **plan | {"mode": mode}):
        assert all(np.isfinite(gradient).all() and gradient.any() for gradient in rank["gradients"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("autocast", 0.05), ("bfloat16", 0.05)])
def test_lower_precisions_take_the_same_first_steps(dtype: str, tolerance: float, mode: str, ranks: Callable) -> None:
    """Gradients of the first steps; in bfloat16 the cut into micro-batches rounds differently in one process too."""
    changes = {"dtype": dtype, "steps": 2, "minibatches": 1, "beta": 0.0}
    found = ranks(2).run("online", **PLANS["grpo"] | {"mode": mode} | changes)[0]
    expected = alone("grpo", **changes)
    ours, theirs = found["gradients"][0], expected["gradients"][0]
    assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs)


@pytest.mark.parametrize("mode", ["ddp", "zero3"])
@pytest.mark.parametrize("plan", [{"prompts_per_step": 1}, {"prompts_per_step": 2, "dead_groups": "drop"}])
def test_more_processes_than_prompts(plan: dict[str, Any], mode: str, ranks: Callable) -> None:
    """Some ranks have nothing to sample, and some nothing to train on."""
    plan = {"objective": "grpo", "group_size": 3, "steps": STEPS, "max_tokens_per_microbatch": 10_000} | plan
    found = ranks(3).run("online", **plan | {"mode": mode})[0]
    assert_same(found, cases.online(**plan), 1e-6)


def test_the_reference_engine_works_on_a_sharded_policy(ranks: Callable) -> None:
    """Its samples depend on what is beside them, so only that it runs and that all ranks hold the same is said."""
    found = ranks(2).run("online", mode="zero3", engine="transformers", dtype="float32", steps=2)
    assert found[0]["steps"][1]["tokens"] == found[1]["steps"][1]["tokens"]
    assert all(np.array_equal(found[1]["weights"][n], w) for n, w in found[0]["weights"].items())
    assert found[0]["steps"][0]["mismatch/max"] < 1e-3


@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(mode: str, ranks: Callable) -> None:
    for found in ranks(2).run("not_finite", mode=mode):
        assert found["skipped"] == [False, True, False]
        assert found["unchanged"] == [False, True, False]
        assert found["nonfinite"] == 0
