"""`groupwise launch --on local`: real processes, that end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
RECIPE = """\
objective: grpo
steps: {steps}
name: tiny
model: {{scratch: {{hidden: 32, layers: 1, context: 64}}, device: cpu}}
data: {{task: sums, eval_limit: 4}}
rewards: [{reward}]
rollout: {{max_new_tokens: 8}}
group: {{prompts_per_step: 4, group_size: 4}}
cluster:
  trainers: {{gpus: 0, processes: 2}}
"""

pytestmark = pytest.mark.slow


def begin(folder: Path, *words: str, steps: int = 3, reward: str = "accuracy") -> subprocess.Popen[str]:
    (folder / "my.yaml").write_text(RECIPE.format(steps=steps, reward=reward))
    (folder / "random.py").write_text("raise SystemExit('the working folder was imported')\n")
    variables = os.environ | {"PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "groupwise", "launch", "my.yaml", "--on", "local", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=variables, text=True, **pipes)


def steps_of(folder: Path) -> list[int]:
    log = folder / "runs" / "tiny" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def wait_for_a_step(folder: Path, process: subprocess.Popen[str]) -> None:
    while max(steps_of(folder), default=0) < 1:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def test_two_trainers_sample_and_train(tmp_path: Path) -> None:
    said, errors = (process := begin(tmp_path)).communicate(timeout=300)
    assert process.returncode == 0, errors
    assert said.startswith("torchrun --standalone --nproc-per-node=2")
    assert max(steps_of(tmp_path)) == 3
    starts = json.loads((tmp_path / "runs" / "tiny" / "environment.json").read_text())["attempts"]
    assert len(starts) == 1 and "my.yaml" in starts[0]["command"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_saves_the_run_and_ends_all(number: signal.Signals, tmp_path: Path) -> None:
    process = begin(tmp_path, steps=10_000)
    wait_for_a_step(tmp_path, process)
    process.send_signal(number)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, errors
    assert "the same command continues from there" in errors + said
    assert any((tmp_path / "runs" / "tiny" / "checkpoints").iterdir())


FAILING = """\
import os

def fails(completions):
    if os.path.exists("fail"):
        raise ValueError("a reward that fails")
    return [0.0] * len(completions)
"""


def test_a_trainer_that_fails_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    process = begin(tmp_path, steps=10_000, reward="{function: 'failing.py:fails'}")
    wait_for_a_step(tmp_path, process)
    (tmp_path / "fail").touch()
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "a reward that fails" in errors + said


def test_a_server_that_ends_takes_the_trainers_with_it(tmp_path: Path) -> None:
    """The message names it and shows the end of its log; here there is no vLLM at all."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    words = ["model={path: model, device: cpu}", "cluster.samplers={nodes: 1, gpus: 0}"]
    process = begin(tmp_path, *words)
    said, errors = process.communicate(timeout=120)
    assert process.returncode not in (0, None), said
    assert "server 0 ended with status 2, and the trainers with it" in errors
    assert "no environment with vLLM in it" in errors
