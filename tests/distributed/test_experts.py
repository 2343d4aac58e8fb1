"""Mixtures whose experts are divided between processes: the update is that of one process, and a fault in the exchange is found."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from groupwise.config.recipes import load_recipe
from groupwise.models.saving import save
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.run import train

pytestmark = pytest.mark.slow  # several processes, each with a start of seconds

spec = importlib.util.spec_from_file_location("expert_cases", Path(__file__).with_name("cases.py"))
assert spec is not None and spec.loader is not None
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)


@cache
def alone(family: str) -> dict[str, Any]:
    """The same in this process, without the others."""
    return cases.online(family=family, dtype="float32", steps=3, minibatches=2)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("size", "mode"),
    [
        (2, {"expert": 2}),
        (2, {"expert": 2, "name": "zero3"}),
        (4, {"expert": 2}),
        (4, {"expert": 2, "name": "zero3"}),
        (4, {"expert": 4}),
        (2, {"expert": 2, "tensor": 2}),
        (4, {"expert": 4, "tensor": 2}),
        (4, {"expert": 2, "tensor": 2, "name": "zero3"}),
    ],
)
def test_steps_of_divided_experts_are_those_of_one_process(family: str, size: int, mode: Any, ranks: Callable) -> None:
    """Losses, clipped gradients and weights of three steps of two updates."""
    found = ranks(size).run("online", family=family, dtype="float32", steps=3, minibatches=2, mode=mode)
    expected = alone(family)
    for step, (ours, theirs) in enumerate(zip(found[0]["gradients"], expected["gradients"], strict=True)):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs) > 0, step
    for ours, theirs in zip(found[0]["steps"], expected["steps"], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for name in ("reward", "loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5, nan_ok=True), name
    for one in found:
        for name, weight in expected["weights"].items():
            np.testing.assert_allclose(one["weights"][name], weight, atol=1e-5)
            assert np.array_equal(one["weights"][name], found[0]["weights"][name])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("size", "mode"),
    [(2, {"expert": 2}), (2, {"expert": 2, "name": "zero3"}), (4, {"expert": 2, "name": "zero3"}), (4, {"expert": 4, "tensor": 2})],
)
def test_divided_experts_are_proven_on_each_rank_against_the_whole_model(
    family: str, size: int, mode: Any, ranks: Callable
) -> None:
    for said in ranks(size).run("proven", mode=mode, family=family):
        assert re.search(r"scoring, training equal its own pass on cpu in float32", said), said


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("tokens turned", "scoring does not equal"),
        ("experts silent", "scoring does not equal"),
        ("experts twice", "the gradient of model.layers.0.mlp.experts.down_proj differs"),
    ],
)
def test_planted_faults_are_found_by_the_proof(fault: str, found: str, ranks: Callable) -> None:
    said = ranks(2).run("proven", mode={"expert": 2}, family="qwen3_moe", fault=fault)
    assert all(re.search(f"^refused: .*{found}", one) for one in said), said


@pytest.fixture
def recipe(write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a recipe and returns its path."""
    monkeypatch.chdir(Path(__file__).parent)
    save(cases.make("qwen3_moe", "float32"), tmp_path / "base")
    common = {
        "model": {"path": str(tmp_path / "base"), "scratch": None},
        "rewards": [{"function": "repetition", "args": {"n": 1}}],
        "group": {"beta": 0.05},
        "steps": 3,
    }
    return lambda name, **changes: str(write_recipe(tmp_path, name, **(common | changes)))


def test_a_run_goes_on_in_other_layouts(recipe: Callable, ranks: Callable, tmp_path: Path) -> None:
    """Two divide the experts, then one process, then two that divide them and shard the others."""
    for _ in train(load_recipe(recipe("straight", save={"every": 0}))):
        pass
    ranks(2).run("whole_run", path=recipe("moved", parallel={"expert": 2}), stop=1)
    for step in train(load_recipe(recipe("moved"))):
        assert step.number == 2  # it went on, and did not begin anew
        break
    ranks(2).run("whole_run", path=recipe("moved", parallel={"expert": 2, "name": "zero3"}))
    folders = [tmp_path / "runs" / name / "final" for name in ("straight", "moved")]
    expected, found = (dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()) for folder in folders)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=0)
    assert [line["step"] for line in read_metrics(tmp_path / "runs" / "moved")] == [1, 2, 3]
    names = [set(load_file(folder / "model.safetensors")) for folder in folders]
    assert names[0] == names[1], "a checkpoint of divided experts has other tensors"
