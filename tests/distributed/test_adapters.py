"""Adapters that a run goes on with (`model.lora.start`), on several processes and where servers sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import block_checkpoint
from safetensors.torch import load_file
from scripted_vllm import Process

from groupwise.config.recipes import load_recipe
from groupwise.models.saving import save
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.run import train

pytestmark = pytest.mark.slow  # several processes, each with a start of seconds

ONCE = {"save": {"every": 0}}
"""For runs that nothing interrupts."""


@pytest.fixture
def recipe(write_recipe: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    """Writes a recipe of three steps and returns its path.   `model` is merged into its model's settings."""

    def write(name: str, model: dict[str, Any], **changes: Any) -> str:
        changes = {
            "model": {"scratch": None} | model,
            "steps": 3,
            "group": {"beta": 0.05},
            "rewards": [{"function": "repetition", "args": {"n": 1}}],
        } | changes
        return str(write_recipe(tmp_path, name, **changes))

    return write


def run_alone(path: str) -> None:
    """A whole run on one process."""
    for _ in train(load_recipe(path)):
        pass


def start_of(folder: Path, recipe: Callable[..., str], model: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model that goes on with an adapter, which a run trains first."""
    run_alone(recipe("first", model, optimizer={"lr": 3e-2}, **ONCE))
    return model | {"lora": model["lora"] | {"start": str(folder / "runs/first/final")}}


def final(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "runs" / name / "final" / "model.safetensors")


def equal_to_rounding(folder: Path, name: str, other: str) -> None:
    """Two runs trained the same, from an adapter: the KL to the base without it is there in the first step."""
    for one, two in zip(read_metrics(folder / "runs" / name), read_metrics(folder / "runs" / other), strict=True):
        assert one["kl"] > 1e-4
        for key in ("kl", "reward", "grad_norm"):
            assert one[key] == pytest.approx(two[key], rel=1e-3), key
    weights = final(folder, other)
    for key, weight in final(folder, name).items():
        torch.testing.assert_close(weight, weights[key], atol=2e-4, rtol=0)
        assert (weight - weights[key]).abs().mean() < 1e-6, key


@pytest.mark.parametrize(("mode", "quantize"), [("zero2", None), ("zero3", None), ("zero3", "int8")])
def test_two_processes_go_on_with_an_adapter_as_one_does(
    mode: str, quantize: str | None, recipe: Callable[..., str], ranks: Callable, tmp_path: Path
) -> None:
    """In one go, and broken off: then what was trained counts, and not what it began with."""
    base = {"path": str(block_checkpoint(tmp_path / "base")), "quantize": quantize, "lora": {"rank": 4}}
    model = start_of(tmp_path, recipe, base)
    run_alone(recipe("alone", model, **ONCE))
    ranks(2).run("whole_run", path=recipe("straight", model, parallel=mode, **ONCE))
    broken = recipe("broken", model, parallel=mode)
    for stop in (2, None):
        ranks(2).run("whole_run", path=broken, stop=stop)
    equal_to_rounding(tmp_path, "straight", "alone")
    found = final(tmp_path, "broken")
    assert all(torch.equal(found[name], weight) for name, weight in final(tmp_path, "straight").items())


@pytest.fixture
def server_of(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a scripted vLLM server, whose log-probs are those of the weights that it gets; returns its address."""
    started: list[Process] = []

    def start(**options: Any) -> str:
        started.append(Process(rows=16, context=96, **options))
        return started[-1].wait().url

    yield start
    for server in started:
        server.close()


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_a_server_samples_from_an_adapter_that_goes_on(
    mode: str, recipe: Callable[..., str], server_of: Callable[..., str], ranks: Callable, tiny_policy: Callable, tmp_path: Path
) -> None:
    """Its tokens are drawn by the request alone: runs on one and on two processes learn from the same ones."""
    policy = tiny_policy(heads=1, kv_heads=1)  # of vLLM on a CPU the smallest head has 32 numbers
    save(policy, tmp_path / "base")
    model = start_of(tmp_path, recipe, {"path": str(tmp_path / "base"), "lora": {"rank": 4}})
    options = {"model": tmp_path / "base", "vocabulary": policy.model.config.vocab_size}
    for name in ("alone", "spread"):
        engine = {"name": "vllm", "servers": [server_of(**options)]}
        path = recipe(name, model, rollout={"engine": engine}, parallel="ddp" if name == "alone" else mode, **ONCE)
        if name == "alone":
            run_alone(path)
        else:
            ranks(2).run("whole_run", path=path)
        for step in read_metrics(tmp_path / "runs" / name):
            assert step["mismatch/max"] < 1e-3
    equal_to_rounding(tmp_path, "spread", "alone")
