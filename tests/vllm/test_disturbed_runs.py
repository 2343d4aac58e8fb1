"""A run on two real vLLM servers, of which each part is lost once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from disturbed_run import DisturbedRun
from scripted_vllm import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class RealServer:
    """`groupwise serve`, which may be killed, frozen and started anew at the same address."""

    def __init__(self, model: Path) -> None:
        self.port, self._model = free_port(), model
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        line = [sys.executable, "-m", "groupwise", "serve", str(self._model), "--port", str(self.port), "--rows", "16"]
        line += ["--cache", "64M", "--", "--load-format", "dummy", "--max-model-len", "96"]
        with (self._model.parent / f"server-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> RealServer:
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return self
            except OSError:
                assert self.process.poll() is None
                time.sleep(0.5)

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()


def test_a_run_outlives_each_of_its_parts(tmp_path: Path) -> None:
    run = DisturbedRun(tmp_path, steps=100_000, serve=RealServer)
    try:
        run.wait_for_step(2, seconds=3000)
        for name in run.disturbances():
            run.disturb(name)
            run.wait_for_step(run.done() + 3, seconds=3000)
        until_joined(run)
        run.end()
    finally:
        run.close()
    found = run.verify()
    assert found["disturbances"] == dict.fromkeys(run.disturbances(), 1)
    assert found["servers"] == 3
    print(found)


def until_joined(run: DisturbedRun) -> None:
    """Wait until the server that has joined samples: a real one takes its time to start."""
    end = time.monotonic() + 3000
    while run.steps_done()[-1]["servers/alive"] < 3:
        assert time.monotonic() < end
        run.wait_for_step(run.done() + 1)
