"""A judge that is a model: SmolLM2 behind `groupwise serve` judges the completions of a tiny policy."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import groupwise as gw
from groupwise.config.packaged_models import is_fetched

from .conftest import wait_for


@pytest.fixture(scope="module")
def judge_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of SmolLM2."""
    if not is_fetched("smollm2"):
        pytest.skip("SmolLM2 is not on this machine: groupwise get smollm2")
    log = tmp_path_factory.mktemp("judge") / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "groupwise", "serve", "smollm2", "--port", str(port), "--", "--max-model-len", "2048"]
    with log.open("wb") as file:
        process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(port, process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_tiny_policy_trains_against_a_served_judge(judge_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    judge = {"url": judge_url, "model": "policy", "mode": "pairs", "seconds": 240, "max_tokens": 64, "cache": "judge.sqlite"}
    recipe = {
        "objective": "grpo",
        "model": {"scratch": {"hidden": 64, "layers": 2, "heads": 4, "context": 96, "tokenizer": "arithmetic"}},
        "data": {"task": "addition", "limit": 64, "eval_limit": 4},
        "rewards": [{"function": "judge", "args": judge}, {"function": "accuracy", "weight": 0}],
        "rollout": {"max_new_tokens": 6},
        "group": {"prompts_per_step": 2, "group_size": 3},
        "eval": {"every": 0, "at_start": False},
        "steps": 2,
    }
    steps = list(gw.train(**recipe, name="first"))
    assert len(steps) == 2
    for step in steps:
        metrics = step.metrics
        assert metrics["log/judge_failed"] == 0.0 and metrics["log/judge_calls"] > 0.0
        assert metrics["log/judge_tokens"] > 100 * metrics["log/judge_calls"]
        for group in step.groups:
            assert all(0.0 <= reward <= 1.0 for reward in group.reward)
            assert float(sum(group.reward)) > 0.0, "of each pair one wins"
    again = list(gw.train(**recipe, name="second"))
    assert sum(step.metrics["log/judge_calls"] for step in again) == 0.0, "the file of answers is read"
