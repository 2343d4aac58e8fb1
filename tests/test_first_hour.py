"""The first hour: its page is what the script writes, and its commands work."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_hour", ROOT / "docs" / "first_hour.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["first_hour"] = found
    spec.loader.exec_module(found)
    return found


@pytest.mark.slow
def test_the_commands_of_the_page_work(script: ModuleType, tmp_path: Path, forked: Any) -> None:
    """By processes that are forked; that the command is installed where pip puts it is shown by the wheel's test."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = (
        files.stdout.split("\0") if files.returncode == 0 else [str(one.relative_to(ROOT)) for one in (ROOT / "recipes").iterdir()]
    )
    folder = tmp_path / "clone"
    for name in filter(None, names):
        if name.startswith("recipes/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    environment = {**os.environ, **script.fast_environment(folder), "OMP_NUM_THREADS": "1"}
    (folder / ".shims" / "groupwise").write_text(f'#!/bin/sh\nexec {forked.command} "$@"\n', encoding="utf-8")
    page = script.transcript(folder, environment, fast=True)
    assert (folder / "report.html").stat().st_size > 50_000
    assert (folder / "runs/mine/final/model.safetensors").exists()
    assert "nothing is wrong" in page
    assert "sampled accuracy" in page


def test_a_command_that_fails_ends_the_script(script: ModuleType, tmp_path: Path) -> None:
    shell = script.Shell(tmp_path, dict(os.environ), fast=False)
    with pytest.raises(RuntimeError, match="'exit 3' ended with 3"):
        shell.run(script.Run("exit 3"))


def test_long_outputs_are_shortened(script: ModuleType) -> None:
    text = "\n".join(str(i) for i in range(10))
    assert script.shortened(text, (2, 1)) == "0\n1\n...\n9"
    assert script.shortened(text, (0, 2)) == "...\n8\n9"
    assert script.shortened(text, (5, 5)) == text


def test_of_steps_those_that_were_evaluated_are_shown(script: ModuleType) -> None:
    steps = [f"step {n}/7  reward 0.{n}" + ("  eval greedy 1.000" if n in (4, 7) else "") for n in range(1, 8)]
    shown = script.shortened("\n".join(["plan", *steps, "done"]), (20, 20)).splitlines()
    assert shown == ["plan", steps[0], "...", steps[3], "...", steps[6], "done"]
