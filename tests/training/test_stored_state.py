"""AdamW whose moments lie elsewhere between two steps: the same steps, the bytes of the plan, continued to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from groupwise.config.recipes import load_recipe
from groupwise.config.settings import OptimizerSettings
from groupwise.errors import ConfigError
from groupwise.models.shape import Shape
from groupwise.runs.plan import memory_lines, process_memory
from groupwise.runs.prepared import Prepared, plan_of
from groupwise.runs.run import train
from groupwise.training import stored_state
from groupwise.training.optimizer import AdamW, Optimizer
from groupwise.training.stored_state import EightBitAdamW, HostAdamW, moment_bytes


@pytest.fixture
def eight_bit() -> type[AdamW]:
    pytest.importorskip("bitsandbytes", reason="8-bit state is computed by bitsandbytes, which is not installed")
    return EightBitAdamW


def learner() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64))


def losses(model: nn.Module, step: Callable[[], Any], steps: int = 40) -> list[float]:
    """The curve of a regression."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 128, generator=generator)
    y = torch.randn(256, 128, generator=generator) @ torch.randn(128, 64, generator=generator) / 11
    curve = []
    for _ in range(steps):
        model.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        step()
        curve.append(loss.item())
    return curve


SETTINGS = OptimizerSettings(lr=1e-3, weight_decay=0.01, clip_norm=None)


def curve_of(kind: type[AdamW], settings: OptimizerSettings = SETTINGS) -> list[float]:
    model = learner()
    return losses(model, Optimizer(model, settings, 40, kind).step)


@pytest.mark.parametrize("piece", [1 << 22, 1 << 10])
def test_moments_on_the_host_change_no_bit(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_state, "PIECE", piece)
    assert curve_of(HostAdamW) == curve_of(AdamW)


def test_8_bit_state_is_bitsandbytes_own_and_beside_the_curve_of_float32(
    eight_bit: type[AdamW], monkeypatch: pytest.MonkeyPatch
) -> None:
    import bitsandbytes

    model = learner()
    theirs = losses(model, bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3, weight_decay=0.01).step)
    exact, ours = curve_of(AdamW), curve_of(eight_bit)
    # bitsandbytes decays vectors too.
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        assert mine == pytest.approx(other, abs=1e-4)
        assert mine == pytest.approx(right, abs=1e-2)
    assert exact[0] - exact[-1] > 0.3
    monkeypatch.setattr(stored_state, "PIECE", 1 << 10)
    assert curve_of(eight_bit) == ours


def test_the_numbers_of_8_bit_codes_are_made_once(eight_bit: type[AdamW], monkeypatch: pytest.MonkeyPatch) -> None:
    """For each piece they would cost a GPU more than the rest of its step."""
    library, made = stored_state.bitsandbytes(), []

    def counted(**kwargs: Any) -> torch.Tensor:
        made.append(kwargs)
        return create(**kwargs)

    create = library.create_dynamic_map
    monkeypatch.setattr(library, "create_dynamic_map", counted)
    stored_state._numbers.cache_clear()
    model = learner()
    losses(model, Optimizer(model, SETTINGS, 40, eight_bit).step, steps=3)
    assert made == [{"signed": True}, {"signed": False}]


def test_bytes_of_the_state_are_those_of_the_plan(eight_bit: type[AdamW]) -> None:
    model = learner()
    optimizer = Optimizer(model, SETTINGS, 1, eight_bit)
    losses(model, optimizer.step, 1)
    sizes = [parameter.numel() for parameter in model.parameters()]
    held = sum(tensor.nbytes for tensor in optimizer.tensors().values())
    assert held == moment_bytes("8bit", sizes) < 0.27 * moment_bytes(None, sizes)
    assert moment_bytes("host", sizes) == moment_bytes(None, sizes) == 8 * sum(sizes)


def test_a_gradient_that_is_not_finite_changes_no_moment(eight_bit: type[AdamW]) -> None:
    model = learner()
    optimizer = Optimizer(model, SETTINGS, 3, eight_bit)
    losses(model, optimizer.step, 2)
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    assert optimizer.step().skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.tensors().items())


ON_A_DEVICE = """
import json

import torch
from stand_in_device import stand_in
from torch import nn

from groupwise.config.settings import OptimizerSettings
from groupwise.training.optimizer import AdamW, Optimizer
from groupwise.training.stored_state import HostAdamW


def taken(device, kind):
    torch.manual_seed(0)
    model = nn.Linear(40, 30).to(device)
    optimizer = Optimizer(model, OptimizerSettings(lr=0.1), 4, kind)
    for number, factor in enumerate((1.0, 100.0, float("nan"), 1.0)):
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = (factor * torch.randn(parameter.shape, generator=generator)).to(device)
        optimizer.step()
    places = sorted({tensor.device.type for tensor in optimizer.tensors().values()})
    weights = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    return places, weights.tolist(), optimizer.numbers()["adam_steps"]


with stand_in() as device:
    print(json.dumps([taken(device, kind) for kind in (AdamW, HostAdamW)]))
"""


@pytest.mark.slow
def test_a_gpus_moments_lie_on_the_host_between_two_steps() -> None:
    """With clipping, and a step that is left out on the device: the weights and the count of steps are those without."""
    fixtures = str(Path(__file__).parents[1] / "fixtures")
    path = os.pathsep.join([fixtures, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    ran = subprocess.run([sys.executable, "-c", ON_A_DEVICE], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    there, host = json.loads(ran.stdout.splitlines()[-1])
    assert host[0] == ["cpu"] != there[0]
    assert (host[1], host[2]) == (there[1], there[2])


WIDE = {"hidden": 64, "layers": 1, "heads": 4, "context": 96, "tokenizer": "arithmetic"}
"""A model with matrices of more than 4,096 numbers, and smaller ones."""
REPETITION = {"rewards": [{"function": "repetition", "args": {"n": 1}}]}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_8_bit_state_goes_on_to_the_bit(
    dtype: str, eight_bit: type[AdamW], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    changes = {"optimizer": {"lr": 1e-3, "state": "8bit"}, "model": {"dtype": dtype, "scratch": WIDE}, "steps": 4} | REPETITION
    for _ in train(load_recipe(write_recipe(tmp_path, "straight", **changes))):
        pass
    path = write_recipe(tmp_path, "broken", **changes)
    for step in train(load_recipe(path)):
        if step.number == 2:
            break
    held = load_file(tmp_path / "runs/broken/checkpoints/000002/trainer/tensors.safetensors")
    assert {tensor.dtype for name, tensor in held.items() if name.startswith("exp_avg.")} == {torch.uint8, torch.float32}
    assert [step.number for step in train(load_recipe(path))] == [3, 4]
    expected, found = (load_file(tmp_path / "runs" / name / "final/model.safetensors") for name in ("straight", "broken"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_plan_counts_what_is_held_and_what_a_step_makes(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    def planned(**optimizer: Any) -> Any:
        prepared = Prepared.of(load_recipe(write_recipe(tmp_path, "planned", optimizer=optimizer, **REPETITION)))
        prepared.close()
        return prepared.load

    plain, few = planned(), planned(state="8bit")
    assert plain.moments is None and few.moments is not None
    shape = Shape(parameters=1 << 20, layers=2, hidden=64, intermediate=256, heads=4, kv_heads=4, head_width=16, vocabulary=100)
    need = process_memory(shape, few, prompts=1)
    assert need.optimizer == few.moments < process_memory(shape, plain, prompts=1).optimizer
    assert "moments of a piece in a step 8.0 MiB" in memory_lines(need)[0][1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": {"state": "host"}}, "lies in the host's memory already"),
        ({"optimizer": {"state": "host"}, "parallel": "zero3", "model": {"device": "cuda"}}, "offload: true"),
        (
            {"optimizer": {"state": "8bit"}, "parallel": "zero2"},
            "optimizer.state: 8bit is kept for weights that a process has whole",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(
    changes: dict[str, Any], says: str, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_of(load_recipe(write_recipe(tmp_path, "refused", **changes, **REPETITION)))
