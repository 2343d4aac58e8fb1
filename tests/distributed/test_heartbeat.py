"""Heartbeats: which process is named as lost, which is ended, and which is left alone."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import pytest

from groupwise.distributed import heartbeat
from groupwise.distributed.heartbeat import Watch
from groupwise.errors import PeerError

FAR = "node-b|77|4026531836|123"


class Memory:
    """A store in this process."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.well: dict[str, threading.Event] = {}
        """Heartbeats that are one more whenever they are looked at, until the event."""
        self.broken = False

    def set(self, key: str, value: str, /) -> None:
        if self.broken:
            raise RuntimeError("Connection reset")
        self.kept[key] = value

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        for key in keys:
            if key in self.well and not self.well[key].is_set():
                self.kept[key] = str(int(self.kept[key]) + 1)
        return [self.kept[key].encode() for key in keys]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.kept for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        assert expected == ""
        return self.kept.setdefault(key, desired).encode()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int | None, str]]]:
    """`ended(watch, within)`: with which status its process would have ended, and its last words."""
    codes: list[int] = []
    words: list[str] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit  # ends the watching thread alone

    monkeypatch.setattr(heartbeat, "SILENCE", 0.4)
    monkeypatch.setattr(heartbeat.os, "_exit", leave)
    monkeypatch.setattr(heartbeat, "say", lambda rank, text: words.append(f"rank {rank}: {text}"))
    started: list[Watch] = []

    def wait(one: Watch, within: float = 60.0) -> tuple[int | None, str]:
        started.append(one)
        futures.wait([one._looking], timeout=within)
        return (codes[0] if codes else None), "\n".join(words)

    yield wait
    for one in started:
        one.stop()


def beating(store: Memory, rank: int, stop: threading.Event) -> None:
    """The heartbeats of a process that is well."""
    store.kept |= {f"place/{rank}": FAR, f"pulse/{rank}": "0"}
    store.well[f"pulse/{rank}"] = stop


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_p07_the_silent_one_is_named_and_all_end(ended: Callable, stop: threading.Event) -> None:
    store = Memory()
    beating(store, 1, stop)
    store.kept |= {"place/2": FAR, "pulse/2": "5"}
    code, said = ended(Watch(store, 0, 3, lambda: "go on like this", beat=0.02))
    assert code == PeerError.exit_code
    assert said.startswith("rank 0: PeerError: rank 2 (process 77 on node-b) has sent no heartbeat for 0 s")
    assert said.endswith("; go on like this")
    assert store.kept["verdict"] == "2"
    # The others follow, and print nothing themselves.
    code, more = ended(Watch(store, 1, 3, lambda: "", beat=0.02))
    assert (code, more) == (PeerError.exit_code, said)


def test_p07_the_first_one_is_watched_by_the_others(ended: Callable) -> None:
    store = Memory()
    store.kept |= {"place/0": FAR, "pulse/0": "5"}
    _, said = ended(Watch(store, 2, 3, lambda: "", beat=0.02))
    assert said.startswith("rank 2: PeerError: rank 0 (process 77 on node-b)")


@pytest.mark.parametrize("same", [True, False])
def test_p08_a_silent_process_in_reach_is_ended_but_no_other_with_its_number(same: bool, ended: Callable) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        place = heartbeat._place(process.pid)
        store = Memory()
        store.kept |= {"place/1": place if same else place.rpartition("|")[0] + "|1", "pulse/1": "5"}
        ended(Watch(store, 0, 2, lambda: "", beat=0.02))
        if same:
            assert process.wait(60) == -signal.SIGKILL
        else:
            assert process.poll() is None
        process.kill()


def test_a_process_that_left_is_not_reported_as_lost(ended: Callable, stop: threading.Event) -> None:
    store = Memory()
    beating(store, 1, stop)
    first = Watch(store, 0, 2, lambda: "", beat=0.02)
    stop.set()
    store.kept["pulse/1"] = "gone"
    assert ended(first, within=1.0) == (None, "")
    first.stop()
    assert store.kept["pulse/0"] == "gone"


def test_a_process_that_was_paused_itself_names_no_other_as_lost(ended: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that slept, a process that was stopped and goes on: everybody else's counter looks old."""
    store, clock = Memory(), [0.0]
    store.kept |= {"place/1": FAR, "pulse/1": "5"}

    def jump() -> float:
        clock[0] += 10.0
        return clock[0]

    monkeypatch.setattr(heartbeat.time, "monotonic", jump)
    one: Any = Watch(store, 0, 2, lambda: "", beat=0.02)
    assert ended(one, within=0.6) == (None, "")


def test_a_store_that_is_gone_ends_the_process(ended: Callable, stop: threading.Event) -> None:
    store = Memory()
    beating(store, 1, stop)
    one = Watch(store, 0, 2, lambda: "", beat=0.02)
    store.broken = True
    code, said = ended(one)
    assert code == PeerError.exit_code
    assert "the meeting point of the processes is out of reach, its machine or the launcher is gone (Connection reset)" in said
