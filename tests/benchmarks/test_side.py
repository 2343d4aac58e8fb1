"""The process of one side of a benchmark: it answers, and nobody waits for one that has ended."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def answers(connection: Any) -> None:
    connection.send("ready")
    while (command := connection.recv()) != "end":
        connection.send(2 * command)


def ends_at_once(connection: Any) -> None:
    os._exit(3)


def ends_later(connection: Any) -> None:
    connection.send("ready")
    connection.recv()
    os._exit(3)


def leaves_a_child(connection: Any, file: str) -> None:
    """Its child, as a worker of a data loader does, holds the pipe open."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
    else:
        Path(file).write_text(str(child))
    os._exit(3)


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("_side")
    del sys.modules["_side"]


@pytest.mark.slow
def test_a_side_answers_and_ends(side: Any) -> None:
    one = side.Side("ours", answers)
    assert (one.receive(), one.ask(4), one.ask(5)) == ("ready", 8, 10)
    one.end()
    assert one.process.exitcode == 0
    with pytest.raises(side.SideEnded, match="process of ours has ended with exit code 0"):
        one.ask(4)


@pytest.mark.slow
@pytest.mark.parametrize("serve", [ends_at_once, ends_later])
def test_nobody_waits_for_a_side_that_has_ended(serve: Callable[[Any], None], side: Any) -> None:
    one = side.Side("ours", serve)
    if serve is ends_later:
        assert one.receive() == "ready"
    with pytest.raises(side.SideEnded, match="process of ours has ended with exit code 3"):
        one.ask("step")
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_nobody_waits_for_the_children_of_a_side_that_has_ended(side: Any, tmp_path: Path) -> None:
    one = side.Side("ours", leaves_a_child, str(tmp_path / "child"))
    with pytest.raises(side.SideEnded, match="exit code 3"):
        one.receive()
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # it is still there
