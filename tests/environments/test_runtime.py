"""Processes and threads that answer one conversation after the other: what is ended, or has ended, answers none."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.environments import runtime
from groupwise.errors import EnvironmentFailure
from groupwise.utils.processes import WorkerProcess


def whoami() -> str:
    """Say which process this is."""
    return str(os.getpid())


CALL = [("whoami", {})]


@pytest.fixture
def rooms() -> Iterator[runtime.ToolRuntime]:
    """One tool, in processes."""
    made = runtime.ToolRuntime(("live:whoami",), {}, {}, objects={"live:whoami": whoami})
    yield made
    made.close()


class Watched:
    """A place, with what happens after its answers and before it is ended."""

    def __init__(self, place: runtime.Worker, answered: Callable[[], Any], ending: Callable[[], Any]) -> None:
        self.place, self.answered, self.ending = place, answered, ending

    def ask(self, *request: Any, seconds: float, answers: int = 1) -> Iterator[Any]:
        yield from self.place.ask(*request, seconds=seconds, answers=answers)
        self.answered()

    def alive(self) -> bool:
        return self.place.alive()

    def kill(self) -> None:
        self.ending()
        self.place.kill()


def test_a_place_that_is_about_to_be_ended_is_given_to_nobody_else(rooms: runtime.ToolRuntime) -> None:
    """`kill` has read which place to end, and before it ends it the place has answered and would be given back and lent again."""
    ended, taken = rooms.make(rooms.kinds[""]), []
    calls = threading.Thread(target=lambda: ended.call(CALL, seconds=60.0))
    answered, killed = threading.Event(), threading.Event()

    def meanwhile() -> None:
        killed.set()
        calls.join(60.0)
        taken.append(rooms.borrow())

    rooms.give_back(place := Watched(rooms.borrow(), lambda: (answered.set(), killed.wait(60.0)), meanwhile))
    calls.start()
    assert answered.wait(60.0)
    ended.kill()
    ended.kill()
    assert not calls.is_alive()
    assert [one.alive() for one in (place, *taken)] == [False, True]
    taken[0].kill()


def test_a_process_that_has_ended_while_it_was_idle_is_replaced(rooms: runtime.ToolRuntime) -> None:
    ((there,), _) = rooms.make(rooms.kinds[""]).call(CALL, seconds=60.0)
    (place,) = rooms._idle
    assert isinstance(place, WorkerProcess)
    os.kill(int(there.text), signal.SIGKILL)
    place._connection.channel.settimeout(60.0)
    assert place._connection.channel.recv(1, socket.MSG_PEEK) == b""
    ((result,), finish) = rooms.make(rooms.kinds[""]).call(CALL, seconds=60.0)
    assert (result.failure, finish) == ("", None)
    assert result.text != there.text


def test_nothing_is_forked_after_the_end(rooms: runtime.ToolRuntime) -> None:
    """As by a conversation that was ended while it waited for its process: the worker would start again, and stay."""
    rooms.close()
    with pytest.raises(EnvironmentFailure, match="closed"):
        rooms.borrow()
    assert rooms._process is None


def test_the_folder_for_temporary_files_may_have_a_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a socket has 107 characters at most; no socket has a path here."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    rooms = runtime.ToolRuntime(("live:whoami",), {}, {}, objects={"live:whoami": whoami})
    rooms.close()
    assert not list(deep.iterdir())
