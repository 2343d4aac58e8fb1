"""Processes that stay up between tests: forked once, they run every case."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
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


WORKER = f"import runpy; runpy.run_path({str(HERE / 'worker.py')!r}, run_name='__main__')"


class Ranks:
    """`size` processes in one process group; `run` calls a function of cases.py on all of them."""

    def __init__(self, size: int, folder: Path, server: Any) -> None:
        self.size, self.folder, self.calls = size, folder, 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes, self.asked, self.answers = [], [], []
        for rank in range(size):
            (heard, ask), (answer, said) = os.pipe(), os.pipe()
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(server.start(code=WORKER, cwd=HERE, stdin=heard, stdout=said, lasting=True, **own))
            self.asked.append(os.fdopen(ask, "w"))
            self.answers.append(os.fdopen(answer))
            os.close(heard)
            os.close(said)

    def run(self, case: str, **arguments: Any) -> list[Any]:
        """What the function returned, by rank.  The test fails if it failed on any of them."""
        self.calls += 1
        outs = [self.folder / f"{self.size}-{self.calls}-{rank}" for rank in range(self.size)]
        for asked, out in zip(self.asked, outs, strict=True):
            asked.write(json.dumps({"case": case, "arguments": arguments, "out": str(out)}) + "\n")
            asked.flush()
        answers = [self._answer(rank, out) for rank, out in enumerate(outs)]
        if not all(good for good, _ in answers):
            self.close()
            told = "\n".join(f"rank {rank} {'returned' if good else value}" for rank, (good, value) in enumerate(answers))
            pytest.fail(f"{case} on {self.size} processes:\n{told}")
        return [value for _, value in answers]

    def _answer(self, rank: int, out: Path) -> tuple[bool, Any]:
        """Whether it went well, and what the function returned or what became of it."""
        while (line := self.answers[rank].readline()) and line.strip() != "done":
            pass
        if out.exists():
            return pickle.loads(out.read_bytes())
        return False, f"ended with exit code {self.processes[rank].wait(60)}:\n{self.processes[rank].said}"

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def close(self) -> None:
        for one in (*self.asked, *self.answers, *self.processes):
            with suppress(OSError):  # what was asked of one that has ended
                one.close()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory, fork_server: Any) -> Iterator[Callable[[int], Ranks]]:
    """`ranks(n)`: n processes; the same ones for every test."""
    pools: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in pools or not pools[size].alive:
            pools[size] = Ranks(size, tmp_path_factory.mktemp(f"ranks{size}"), fork_server)
        return pools[size]

    yield of
    for pool in pools.values():
        pool.close()
