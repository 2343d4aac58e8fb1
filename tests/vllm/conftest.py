"""A real vLLM server, started by the project's own command, for tests that need one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.models.policy import Policy
from groupwise.models.saving import save

ROOT = Path(__file__).parents[2]
SHAPE = {"hidden": 64, "heads": 2, "kv_heads": 1}
"""vLLM's attention on a CPU knows no head narrower than 32."""


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[Path]:
    """Where vLLM is: GROUPWISE_VLLM, or `.venv-vllm` in the project.  Without it these tests are skipped."""
    folder = Path(os.environ.get("GROUPWISE_VLLM", ROOT / ".venv-vllm")).absolute()
    if not (folder / "bin" / "python").exists():
        pytest.skip(f"no environment with vLLM in it ({folder}): `make test-vllm` installs one and runs these tests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUPWISE_VLLM", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


REWARD = "def judge(completion_ids, **_):\n    return [-sum(ids) / 60 / len(ids) for ids in completion_ids]\n"


@pytest.fixture(scope="session")
def write_vllm_recipe(write_recipe: Callable[..., Path]) -> Callable[..., Path]:
    """`write_recipe` of a run that samples with vLLM: heads that it knows, and a reward that a policy cannot exhaust."""

    def write(folder: Path, name: str, **changes: Any) -> Path:
        (folder / "judges.py").write_text(REWARD)
        own: dict[str, Any] = {
            "model": {"scratch": {"hidden": 64, "layers": 2, "heads": 2, "context": 96, "tokenizer": "arithmetic"}},
            "group": {"prompts_per_step": 4, "group_size": 4},
            "save": {"every": 5},
        }
        rollout = {"max_new_tokens": 40, "engine": "vllm", "temperature": 0.8, "max_rows": 16} | changes.pop("rollout", {})
        return write_recipe(folder, name, rollout=rollout, **(own | changes))

    return write


@dataclass(frozen=True)
class Serving:
    """A server by its address, and the policy that it was started with."""

    url: str
    policy: Policy
    process: subprocess.Popen[bytes]


@contextmanager
def start_server(model: Path, log: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`groupwise serve` of a model, by its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "groupwise", "serve", str(model), "--port", str(port), "--rows", "16", "--cache", "64M", *options]
    with log.open("wb") as file:
        process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(port, process, log)
        yield f"http://127.0.0.1:{port}", process
    finally:
        print(log.read_text(errors="replace")[-6000:])  # pytest shows it where a test has failed
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(600)
        finally:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until a server listens, which takes it 20 seconds of a core and on a busy machine many minutes."""
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)


@pytest.fixture(scope="module")
def serving(tiny_policy: Callable[..., Policy], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """`groupwise serve` with a tiny model whose head is tied to its embedding."""
    policy = tiny_policy("llama", scale=4.0, **SHAPE)
    assert policy.model.config.tie_word_embeddings
    folder = tmp_path_factory.mktemp("served")
    save(policy, folder / "model")
    with start_server(folder / "model", folder / "log") as (url, process):
        yield Serving(url, policy, process)


@pytest.fixture
def moved() -> Callable[[Policy], None]:
    """Moves a policy's weights far enough that its completions are others."""

    def move(policy: Policy) -> None:
        with torch.no_grad():
            for parameter in policy.model.parameters():
                if parameter.ndim > 1:
                    spread = parameter.std()
                    parameter.add_(0.3 * spread * torch.randn_like(parameter))
                    parameter.mul_(spread / parameter.std())  # however often: logits that grow are rounded more coarsely

    return move
