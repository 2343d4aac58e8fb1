"""SIGKILL at random moments.  A few here; as many as one likes by `python tests/faults/kill_runs.py --kills 200`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.fault("C2", "kill -9 at random moments, half of them inside a save", "resumed by itself to the same bits")
@pytest.mark.parametrize("kinds", ["grpo,dpo", "sharded"])
def test_c2_killed_runs_come_to_the_same_bits(kinds: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_runs.py")
    command = [sys.executable, str(script), "--kills", "4", "--kinds", kinds, "--folder", str(tmp_path / "killed")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "every run came to the same bits" in ended.stdout
