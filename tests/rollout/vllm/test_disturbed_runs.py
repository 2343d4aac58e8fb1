"""Whole runs, of which each part is lost once: no step is lost, no completion counted twice, no token too old."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from disturbed_run import DisturbedRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ROUTER = os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router")


@pytest.fixture(params=["file", "router"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DisturbedRun]:
    if request.param == "router" and ROUTER is None:
        pytest.skip("no vllm-router: pip install it anywhere, and name its command in VLLM_ROUTER")
    made = DisturbedRun(tmp_path, steps=100_000, router=ROUTER if request.param == "router" else None)
    yield made
    made.close()


def test_a_run_outlives_each_of_its_parts(run: DisturbedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.wait_for_step(2)
    for name in run.disturbances():
        run.disturb(name)
        run.wait_for_step(run.done() + 3)
    run.end()
    found = run.verify()
    assert found["disturbances"] == dict.fromkeys(run.disturbances(), 1)
    assert found["servers"] >= 2
    lines = run.steps_done()
    monkeypatch.setattr(run, "steps_done", lambda: [lines[0], *lines[2:]])
    with pytest.raises(AssertionError, match="steps lost: 1"):
        run.verify()
    monkeypatch.setattr(run, "steps_done", lambda: [*lines, lines[-1]])
    with pytest.raises(AssertionError, match="steps counted twice: 1"):
        run.verify()
