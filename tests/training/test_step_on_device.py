"""The optimizer's step on a GPU, which clips and decides on the device: the same step as on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS = """
import json

import torch
from stand_in_device import stand_in
from torch import nn

from groupwise.config.settings import OptimizerSettings
from groupwise.ops.operations import Operations
from groupwise.training.optimizer import Optimizer


def taken(device, clip, dtype):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype).to(device)
    optimizer = Optimizer(model, OptimizerSettings(lr=0.1, clip_norm=clip), 4)
    norms = []
    for number, factor in enumerate((1.0, 100.0, float("nan"), 1.0)):
        generator = torch.Generator().manual_seed(number)
        for parameter, master in zip(model.parameters(), optimizer.masters):
            gradient = factor * torch.randn(parameter.shape, generator=generator)
            master.grad = gradient.to(device)
        stats = optimizer.step()
        norms.append([str(stats.grad_norm)[:7], stats.skipped, optimizer.nonfinite, optimizer.numbers()["adam_steps"]])
    weights = torch.cat([parameter.detach().float().cpu().flatten() for parameter in model.parameters()])
    return {"norms": norms, "weights": [round(weight, 4) for weight in weights.tolist()]}


with stand_in() as device:
    torch.manual_seed(0)
    cases = [(clip, dtype) for clip in (1.0, None) for dtype in (torch.float32, torch.bfloat16)]
    print(json.dumps([[taken(place, *case) for place in (device, "cpu")] for case in cases]))
    a, b = torch.randn(64, 300).bfloat16(), torch.randn(300, 8).bfloat16()
    exact, errors = a.double() @ b.double(), []
    for fresh in (True, False):
        total = torch.zeros(64, 8).to(device)
        Operations().add_product(total, a.to(device), b.to(device), fresh=fresh)
        errors.append(float((total.cpu().double() - exact).abs().max()))
    print(json.dumps(errors))
"""


@pytest.fixture(scope="module")
def lines() -> list[Any]:
    fixtures = str(Path(__file__).parents[1] / "fixtures")
    path = os.pathsep.join([fixtures, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    ran = subprocess.run([sys.executable, "-c", STEPS], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.slow
def test_a_step_on_a_gpu_is_that_of_a_cpu(lines: list[Any]) -> None:
    """Clipped and not, with masters and without; a gradient that is not finite changes nothing, not even the count of steps."""
    for there, here in lines[0]:
        assert there == here
        assert [step[1:] for step in there["norms"]] == [[False, 0, 1], [False, 0, 2], [True, 1, 2], [False, 0, 3]]


@pytest.mark.slow
def test_a_weight_gradient_is_not_rounded_to_the_type_of_its_factors(lines: list[Any]) -> None:
    """bfloat16 would be off by 0.1."""
    assert all(error < 1e-4 for error in lines[1])
