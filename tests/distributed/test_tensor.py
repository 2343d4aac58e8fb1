"""Models split by tensor parallelism: the update is that of one process, and a fault in the exchange is found."""

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
from groupwise.distributed.layout import decided
from groupwise.models.saving import save
from groupwise.models.shape import Shape
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.plan import Load, process_memory
from groupwise.runs.run import train

pytestmark = pytest.mark.slow  # several processes, each with a start of seconds

spec = importlib.util.spec_from_file_location("tensor_cases", Path(__file__).with_name("cases.py"))
assert spec is not None and spec.loader is not None
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)

PLANS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "beta": 0.05, "minibatches": 2, "reference_refresh": 1},
    "qwen3": {"family": "qwen3", "recompute": True},
}


@cache
def alone(plan: str, **changes: Any) -> dict[str, Any]:
    """The same in this process, without the others."""
    return cases.online(**{"steps": 3} | PLANS[plan] | changes)


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Every step's gradient after it is clipped, its loss and norm, and the last weights."""
    assert len(found["gradients"]) == len(expected["gradients"]) > 0
    for step, (ours, theirs) in enumerate(zip(found["gradients"], expected["gradients"], strict=True)):
        assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs), step
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for name in ("reward", "loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance, nan_ok=True), name
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], weight, atol=tolerance)


@pytest.mark.parametrize(
    ("plan", "size", "mode"),
    [
        ("llama", 2, {"tensor": 2}),
        ("qwen3", 2, {"tensor": 2}),
        ("llama", 4, {"tensor": 2, "name": "ddp"}),
        ("qwen3", 4, {"tensor": 2, "name": "zero3"}),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_steps_of_a_split_model_are_those_of_one_process(plan: str, size: int, mode: Any, dtype: str, ranks: Callable) -> None:
    """Losses, clipped gradients and weights of three steps; all ranks end with the same bits."""
    found = ranks(size).run("online", **PLANS[plan] | {"mode": mode, "steps": 3, "dtype": dtype})
    expected = alone(plan, dtype=dtype)
    assert any(step["grad_norm"] > 0.5 for step in expected["steps"]), "no gradient was clipped"
    assert_same(found[0], expected, 1e-5 if dtype == "float32" else 1e-9)
    for other in found[1:]:
        assert all(np.array_equal(other["weights"][n], w) for n, w in found[0]["weights"].items())


@pytest.mark.parametrize(("size", "mode"), [(2, {"tensor": 2}), (4, {"tensor": 2, "name": "zero3"})])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_each_process_holds_its_part_of_a_checkpoint(family: str, size: int, mode: Any, ranks: Callable, tmp_path: Path) -> None:
    """Gathered they are the checkpoint's weights, and the reference is a copy of the parts."""
    save(cases.make(family, "float32"), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    bytes_of = sum(p.nbytes for p in model.parameters())
    logits = model(input_ids=torch.tensor([[5, 6, 7, 8, 9, 10]])).logits[0].detach().numpy()
    for one in ranks(size).run("loaded", folder=str(tmp_path / "model"), mode=mode):
        assert one["own"] < bytes_of * (0.52 if size == 2 else 0.27)
        assert one["reference"]
        assert all(np.array_equal(one["weights"][name], weight) for name, weight in expected.items())
        np.testing.assert_allclose(one["logits"], logits[:, : one["logits"].shape[1]], atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral", "qwen3_5"])
def test_a_split_model_is_proven_on_each_rank_against_the_whole_one(family: str, ranks: Callable) -> None:
    for said in ranks(2).run("proven", mode={"tensor": 2}, family=family):
        assert re.search(r"scoring, training equal its own pass on cpu in float32", said), said


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["autocast", "bfloat16"])
def test_a_split_model_is_proven_in_a_lower_type(family: str, dtype: str, ranks: Callable) -> None:
    for said in ranks(2).run("proven", mode={"tensor": 2}, family=family, dtype=dtype):
        assert re.search(rf"scoring, training equal its own pass on cpu in {dtype}", said), said


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("without all-reduce", "scoring does not equal"),
        ("heads exchanged", "scoring does not equal"),
        ("gradient twice", "the gradient of model.layers.0.input_layernorm.weight differs"),
        ("gradient in part", "the gradient of model.layers.0.self_attn.q_norm.weight differs"),
    ],
)
def test_planted_faults_are_found_by_the_proof(fault: str, found: str, ranks: Callable) -> None:
    for said in ranks(2).run("proven", mode={"tensor": 2}, family="qwen3", fault=fault):
        assert said.startswith("refused") and found in said, said


@pytest.mark.parametrize(("size", "mode"), [(2, {"tensor": 2}), (4, {"tensor": 2, "name": "zero3"})])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_of_memory_is_what_is_counted(size: int, mode: Any, dtype: str, ranks: Callable) -> None:
    """Every part of a process's memory that is made of parameters, but for norms, which all hold."""
    shape = Shape.of(cases.make("llama", dtype).model.config.to_dict(), 26784, dtype=dtype)
    load = Load(prompts=size, group=1, prompt_tokens=6, completion_tokens=0, max_tokens_per_microbatch=100)
    planned = process_memory(shape, load, decided(cases.parallel_of(mode), 0, size), prompts=1, world=size)
    for one in ranks(size).run("held", mode=mode, dtype=dtype):
        assert one["parameters"] == shape.parameters
        for part in ("weights", "gradients", "optimizer"):
            assert one[part] == pytest.approx(getattr(planned, part), rel=0.02), part
        assert one["whole"] == planned.whole


@pytest.fixture
def recipe(write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a recipe and returns its path."""
    monkeypatch.chdir(Path(__file__).parent)
    rewards = {"rewards": [{"function": "repetition", "args": {"n": 1}}]}
    return lambda name, **changes: str(write_recipe(tmp_path, name, **({"group": {"beta": 0.05}, "steps": 3} | rewards | changes)))


def final(tmp_path: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(tmp_path / "runs" / name / "final" / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_in_other_layouts(dtype: str, recipe: Callable, ranks: Callable, tmp_path: Path) -> None:
    """Split by two, then one process, then two with all weights each; sampled by the native engine."""
    changes = {"model": {"dtype": dtype}}
    for _ in train(load_recipe(recipe("straight", save={"every": 0}, **changes))):
        pass
    ranks(2).run("whole_run", path=recipe("moved", **changes, parallel={"tensor": 2}), stop=1)
    for step in train(load_recipe(recipe("moved", **changes))):
        assert step.number == 2  # it went on, and did not begin anew
        break
    ranks(2).run("whole_run", path=recipe("moved", **changes, parallel="ddp"))
    compare(tmp_path, 2e-5 if dtype == "float32" else 1e-2)


def test_a_run_goes_on_from_one_process_to_a_split_and_sharded_model(recipe: Callable, ranks: Callable, tmp_path: Path) -> None:
    """One process, then two workers of two, then two that split it."""
    for _ in train(load_recipe(recipe("straight", save={"every": 0}))):
        pass
    for _ in train(load_recipe(recipe("moved"))):
        break
    ranks(4).run("whole_run", path=recipe("moved", parallel={"name": "zero3", "tensor": 2}), stop=2)
    ranks(2).run("whole_run", path=recipe("moved", parallel={"tensor": 2}))
    compare(tmp_path, 2e-5)


def compare(tmp_path: Path, tolerance: float) -> None:
    expected, found = final(tmp_path, "straight"), final(tmp_path, "moved")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=tolerance, rtol=0)
    logs = [read_metrics(tmp_path / "runs" / name) for name in ("moved", "straight")]
    assert [line["step"] for line in logs[0]] == [1, 2, 3]
    if tolerance < 1e-4:
        for ours, theirs in zip(*logs, strict=True):
            assert ours["reward"] == pytest.approx(theirs["reward"])
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_interrupted_equals_straight_bit_for_bit_in_the_same_layout(recipe: Callable, ranks: Callable, tmp_path: Path) -> None:
    split = {"parallel": {"tensor": 2}}
    ranks(2).run("whole_run", path=recipe("straight", save={"every": 0}, **split))
    path = recipe("broken", **split)
    ranks(2).run("whole_run", path=path, stop=2)
    ranks(2).run("whole_run", path=path)
    expected, found = final(tmp_path, "straight"), final(tmp_path, "broken")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
