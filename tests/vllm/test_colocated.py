"""vLLM in the trainer's own process: a run by the Python of vLLM's environment.  On a CPU it cannot sleep, and is not told to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from groupwise.cli import commands
from groupwise.runs.metrics_log import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture
def recipe(write_vllm_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    rollout = {"engine": {"name": "vllm", "colocated": True}, "top_k": 20}
    return str(write_vllm_recipe(tmp_path, "run", steps=6, rollout=rollout, optimizer={"lr": 3e-3}, eval={"at_start": True}))


def test_what_is_sampled_in_the_same_process_is_what_is_scored(recipe: str, environment: Path, tmp_path: Path) -> None:
    """Six updates of a policy that moves; then the same command has nothing left to do, and no server has ever been there."""
    python = str(environment / "bin" / "python")
    installed = tmp_path / "groupwise-0.dist-info"  # what `pip install groupwise` would leave beside the source
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: groupwise\nVersion: 0\n")
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([SOURCE, str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    missing = subprocess.run([python, "-c", "import groupwise.runs.run"], env=variables, capture_output=True, text=True)
    if missing.returncode:
        pytest.skip(f"the environment of vLLM does not hold what the trainer needs: {missing.stderr.strip().splitlines()[-1]}")
    command = [python, "-m", "groupwise", "train", recipe, "--quiet"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_metrics(tmp_path / "runs" / "run")
    found = [line for line in found if line["step"]]
    assert [line["step"] for line in found] == list(range(1, 7))
    assert max(line["mismatch/max"] for line in found) < 1e-4
    assert found[-1]["reward"] > found[0]["reward"] + 0.05, "the policy has not moved"
    assert (
        subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.count("finished at step 6") == 1
    )


def test_without_vllm_beside_the_trainer_it_says_what_to_do(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["train", recipe, "--quiet"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"colocated needs vLLM in the environment of the trainer ({sys.executable}), but No module named 'vllm'" in said
    assert "leave colocated out" in said
