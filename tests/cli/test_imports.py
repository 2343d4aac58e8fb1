"""A file of the working folder is the user's: no import of a library finds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHADOWS = ("random", "queue", "numpy", "yaml", "argparse", "socket")


@pytest.fixture
def shadowed(tmp_path: Path) -> Path:
    """A working folder with files that are called like modules; each ends the program."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working folder was imported')\n")
    return tmp_path


@pytest.mark.slow
def test_a_file_called_like_a_module_is_imported_by_nothing(shadowed: Path) -> None:
    command = [sys.executable, "-m", "groupwise", "config", "group.group_size"]
    found = subprocess.run(command, cwd=shadowed, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": ""})
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.slow
def test_a_file_called_like_a_module_is_imported_by_no_launcher_and_no_rank(shadowed: Path) -> None:
    """As far as the data, which are not there: both processes have imported everything by then."""
    scratch = "{scratch: {hidden: 32, layers: 1, heads: 2, tokenizer: bytes}}"
    recipe = f"objective: grpo\nname: x\nsteps: 1\nmodel: {scratch}\ndata: {{path: none.jsonl}}\nrewards: accuracy\n"
    (shadowed / "r.yaml").write_text(recipe)
    command = [sys.executable, "-P", "-m", "groupwise", "train", "r.yaml", "--nproc", "2"]
    found = subprocess.run(command, cwd=shadowed, capture_output=True, text=True, timeout=300)
    assert "working folder" not in found.stdout + found.stderr
    assert found.stderr.count("none.jsonl") >= 1, found.stderr
