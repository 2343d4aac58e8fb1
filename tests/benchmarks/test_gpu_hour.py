"""The calls that a GPU is lent for run from end to end, here on a CPU with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_hour.py"


@pytest.mark.slow
def test_every_call_writes_its_results_into_the_folder(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "all", "--tiny", "--out", str(tmp_path / "out")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    files = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "out").iterdir()}
    pages = {f"{call}.{kind}" for call in ("host", "update", "decode", "compare") for kind in ("json", "md")}
    assert set(files) == pages | {"compare.txt"}
    results = {call: json.loads(files[f"{call}.json"])["results"] for call in ("host", "update", "decode")}
    phase = results["host"]["tiny step, update"]
    assert {"wall", "kernels", "busy", "launches", "waits", "device allocations", "longest"} <= set(phase)
    assert phase["launches"] > 100 and phase["wall"] > 0
    full, adapter = (results["update"][f"tiny {kind}, 256 positions"] for kind in ("full", "LoRA"))
    assert 1.2 < full["mfu"] * full["seconds"] / (adapter["mfu"] * adapter["seconds"]) < 1.6, "6 FLOPs a weight against 4"
    lanes = [results["update"][f"tiny full, 256 positions, model.compile {compiled}"] for compiled in ("off", "on")]
    assert lanes[0]["seconds"] > 0 and lanes[1].keys() & {"seconds", "failed"}, "with compiled blocks, where there is a compiler"
    assert results["decode"]["tiny, 16 rows"]["tokens a second"] > 0


@pytest.mark.slow
def test_what_no_time_is_left_for_is_left_out_by_name(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "decode", "--tiny", "--minutes", "0", "--out", str(tmp_path)]
    subprocess.run(command, capture_output=True, check=True)
    results = json.loads((tmp_path / "decode.json").read_text(encoding="utf-8"))["results"]
    assert len(results) == 7 and all("left out" in result for result in results.values())
