"""Launch budgets: what a GPU is asked for a layer, a chunk of the head and an update, counted on the stand-in.

The counts are exact and the same on every machine.  Whoever makes one smaller lowers its number here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.ops.operations import absence

BUDGETS: dict[str, dict[str, int]] = {
    "layer of Qwen2": {"forward": 61, "forward bytes": 34_046, "backward": 70, "backward bytes": 55_682},
    "layer of Qwen3": {"forward": 80, "forward bytes": 40_469, "backward": 88, "backward bytes": 67_985},
    "layer of Qwen3 computed again": {"forward": 80, "forward bytes": 40_469, "backward": 159, "backward bytes": 99_711},
    "layer of Qwen3 with an adapter": {"forward": 108, "forward bytes": 47_044, "backward": 106, "backward bytes": 75_828},
    "decoded token, layer of Qwen2": {"launches": 37, "crossings": 0},
    "decoded token, layer of Qwen3": {"launches": 42, "crossings": 0},
    "chunk of the head": {"launches": 35, "bytes a logit": 122},
    "update": {"micro-batches": 3, "to the device in passes": 0, "to the device": 30, "to the host": 2},
}
"""Launches, and bytes a position of the stream or a logit, of what `launch_counts.py` builds (width 128)."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(absence() is not None, reason="counts the fused forms")]


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    fixtures = Path(__file__).parents[1] / "fixtures"
    path = os.pathsep.join([str(fixtures), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    program = [sys.executable, str(fixtures / "launch_counts.py")]
    ran = subprocess.run(program, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


@pytest.mark.parametrize("part", BUDGETS)
def test_a_gpu_is_asked_for_as_much_as_the_budget_says(part: str, counts: dict[str, Any]) -> None:
    """A budget above the count would let the next change spend the difference."""
    assert {name: counts[part][name] for name in BUDGETS[part]} == BUDGETS[part], counts[part].get("places")
