"""vLLM in the trainer's own process: a run by the Python of vLLM's environment.  On a CPU it cannot sleep, and is not told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from groupwise import cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SOURCE = str(Path(__file__).parents[2] / "src")
REWARD = "def low(completion_ids, **_):\n    return [-sum(ids) / 60 / len(ids) for ids in completion_ids]\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges.py").write_text(REWARD)
    tree: dict[str, Any] = {
        "name": "run",
        "runs": str(tmp_path / "runs"),
        "seed": 3,
        "objective": "grpo",
        "steps": 6,
        "model": {"scratch": {"hidden": 64, "layers": 2, "heads": 2, "context": 96, "tokenizer": "arithmetic"}},
        "data": {"task": "addition", "limit": 64, "eval_limit": 4},
        "rewards": [{"function": "judges.py:low"}],
        "rollout": {
            "max_new_tokens": 40, "engine": {"name": "vllm", "colocated": True}, "temperature": 0.8, "top_k": 20, "max_rows": 16
        },
        "group": {"prompts_per_step": 4, "group_size": 4},
        "optimizer": {"lr": 3e-3},
        "eval": {"k": 2, "at_start": True},
        "save": {"every": 5},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    return str(tmp_path / "run.yaml")


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
    missing = subprocess.run([python, "-c", "import groupwise.run"], env=variables, capture_output=True, text=True)
    if missing.returncode:
        pytest.skip(f"the environment of vLLM does not hold what the trainer needs: {missing.stderr.strip().splitlines()[-1]}")
    command = [python, "-m", "groupwise", "train", recipe, "--quiet"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in found if line["step"]]
    assert [line["step"] for line in found] == list(range(1, 7))
    assert max(line["mismatch/max"] for line in found) < 1e-4
    assert found[-1]["reward"] > found[0]["reward"] + 0.05, "the policy has not moved"
    assert (
        subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.count("finished at step 6") == 1
    )


def test_without_vllm_beside_the_trainer_it_says_what_to_do(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", recipe, "--quiet"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"colocated needs vLLM in the environment of the trainer ({sys.executable}), but No module named 'vllm'" in said
    assert "leave colocated out" in said
