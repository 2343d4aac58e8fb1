"""Processes that stay up between tests: starting one costs seconds, a case a fraction of one."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that share the processes of `ranks` on one worker of xdist: two would each start their own."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


class Ranks:
    """`size` processes in one process group; `run` calls a function of cases.py on all of them."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self.folder, self.calls = size, folder, 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "worker.py")],
                env=os.environ
                | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                | {"PYTHONFAULTHANDLER": "1"},  # one that crashes says where
                cwd=HERE,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def run(self, case: str, **arguments: Any) -> list[Any]:
        """What the function returned, by rank.  The test fails if it failed on any of them."""
        self.calls += 1
        outs = [self.folder / f"{self.size}-{self.calls}-{rank}" for rank in range(self.size)]
        for process, out in zip(self.processes, outs, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps({"case": case, "arguments": arguments, "out": str(out)}) + "\n")
            process.stdin.flush()
        answers = [self._answer(process, out) for process, out in zip(self.processes, outs, strict=True)]
        if not all(good for good, _ in answers):
            self.close()
            told = "\n".join(f"rank {rank} {'returned' if good else value}" for rank, (good, value) in enumerate(answers))
            pytest.fail(f"{case} on {self.size} processes:\n{told}")
        return [value for _, value in answers]

    def _answer(self, process: subprocess.Popen[str], out: Path) -> tuple[bool, Any]:
        """Whether it went well, and what the function returned or what became of it."""
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line.strip() != "done":
            pass
        return pickle.loads(out.read_bytes()) if out.exists() else (False, f"ended with exit code {process.wait(60)}")

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """`ranks(n)`: n processes; the same ones for every test."""
    pools: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in pools or not pools[size].alive:
            pools[size] = Ranks(size, tmp_path_factory.mktemp(f"ranks{size}"))
        return pools[size]

    yield of
    for pool in pools.values():
        pool.close()
