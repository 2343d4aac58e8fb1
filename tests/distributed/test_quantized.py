"""Bases in few bits whose codes and scales are sharded over processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from block_models import block_checkpoint
from safetensors.torch import load_file

from groupwise.config.recipes import load_recipe
from groupwise.runs.run import train

pytestmark = pytest.mark.slow  # several processes, each with a start of seconds


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_sharded_base_goes_on_to_the_bit_and_trains_as_one_process_does(
    kind: str, write_recipe: Callable[..., Path], ranks: Callable, tmp_path: Path
) -> None:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes", reason="NF4 is computed by bitsandbytes, which is not installed")
    model = {"path": str(block_checkpoint(tmp_path / "base")), "scratch": None, "quantize": kind, "lora": {"rank": 4}}
    changes = {
        "model": model,
        "parallel": "zero3",
        "steps": 3,
        "group": {"beta": 0.05},
        "rewards": [{"function": "repetition", "args": {"n": 1}}],
    }

    def final(name: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / "runs" / name / "final" / "model.safetensors")

    for _ in train(load_recipe(write_recipe(tmp_path, "alone", **changes, save={"every": 0}))):
        pass
    ranks(2).run("whole_run", path=str(write_recipe(tmp_path, "straight", **changes, save={"every": 0})))
    broken = str(write_recipe(tmp_path, "broken", **changes))
    for stop in (2, None):
        ranks(2).run("whole_run", path=broken, stop=stop)
    expected, found, alone = final("straight"), final("broken"), final("alone")
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
        torch.testing.assert_close(weight, alone[name], atol=2e-4, rtol=0)
        assert (weight - alone[name]).abs().mean() < 1e-6, name
