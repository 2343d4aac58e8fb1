"""Heartbeats: a process that is stopped, hangs or lies behind a broken network is found in seconds,
whatever it is waited for.

Collectives wait as long as the slowest honest share of a rollout may take (`--timeout`, half an
hour); a process that is gone would be missed only then.  So a thread of every process counts up in
a store that all share.  The first process looks at all counters, the others at the first one's.
Whose counter stands still for `SILENCE` seconds is named, and all end: nothing could go on without
it.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any, NoReturn

from groupwise.errors import PeerError
from groupwise.utils import threads
from groupwise.utils.terminal import escaped

BEAT = 1.0
"""Seconds between two heartbeats."""
SILENCE = 15.0
"""Seconds without one after which a process counts as lost: a thread of an honest one gets its turn
sooner.
"""
VERDICT, GONE = "verdict", b"gone"


class Watch:
    """Sends this process's heartbeats and watches those of the others."""

    def __init__(
        self, store: Any, rank: int, size: int, advice: Callable[[], str], *, beat: float = BEAT
    ) -> None:
        """store: of torch, for this thread alone, each of its calls bounded by some seconds.

        advice: what to do next, to say last.
        """
        self.store, self.rank, self.advice, self.beat = store, rank, advice, beat
        self.watched = [other for other in range(size) if other != rank] if rank == 0 else [0]
        self._over = threading.Event()
        store.set(f"place/{rank}", _place())
        store.set(f"pulse/{rank}", "0")
        self._looking = threads.begin(self._look, "watch")
        atexit.register(self.stop)

    def stop(self) -> None:
        """This process is done: nobody need look for it any more."""
        if not self._over.is_set():
            self._over.set()
            wait([self._looking], timeout=5.0)
            atexit.unregister(self.stop)

    def _look(self) -> None:
        try:
            self._watch()
        except Exception as error:  # whatever a store says of itself, it is out of reach
            if not self._over.is_set():
                cause = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
                self._end(
                    "the meeting point of the processes is out of reach, its machine or the"
                    f" launcher is gone ({cause})"
                )

    def _watch(self) -> None:
        seen = {other: (b"", time.monotonic()) for other in self.watched}
        last, beats = time.monotonic(), 0
        while not self._over.wait(self.beat):
            beats += 1
            self.store.set(f"pulse/{self.rank}", str(beats))
            if self.store.check([VERDICT]):
                (verdict,) = self.store.multi_get([VERDICT])
                self._carry_out(int(verdict))
                os._exit(PeerError.exit_code)
            now = time.monotonic()
            paused, last = now - last > SILENCE / 3, now
            for other, count in zip(
                self.watched,
                self.store.multi_get([f"pulse/{o}" for o in self.watched]),
                strict=True,
            ):
                if (
                    paused or count == GONE or count != seen[other][0]
                ):  # after a pause of our own nothing is known
                    seen[other] = (count, now)
                elif now - seen[other][1] > SILENCE:
                    self._accuse(other)
        self.store.set(f"pulse/{self.rank}", GONE.decode())

    def _accuse(self, other: int) -> None:
        if int(self.store.compare_set(VERDICT, "", str(other))) == other:
            where = self._carry_out(other)
            self._end(
                f"rank {other} ({where}) has sent no heartbeat for {SILENCE:.0f} s: it is stopped,"
                " or cut off"
            )

    def _carry_out(self, other: int) -> str:
        """End a silent process where that is in reach, for the launcher would wait for it; where it
        is, in words.
        """
        (place,) = self.store.multi_get([f"place/{other}"])
        machine, pid, _, _ = place.decode().split("|")
        if place.decode() == _place(int(pid)):
            os.kill(int(pid), signal.SIGKILL)
        return f"process {pid} on {machine}"

    def _end(self, cause: str) -> NoReturn:
        say(self.rank, f"PeerError: {cause}; {self.advice()}")
        os._exit(PeerError.exit_code)


def say(rank: int, text: str) -> None:
    """A last line to stderr, from wherever the process is."""
    sys.stderr.write(f"rank {rank}: {escaped(text)}\n")
    sys.stderr.flush()


def _place(pid: int | None = None) -> str:
    """Machine, process, its space of process ids, when it began: the same text means the same
    process.
    """
    pid = os.getpid() if pid is None else pid
    try:
        began = _after_name(f"/proc/{pid}/stat")[19]
        space = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:  # no such process, or a system without /proc
        began, space = "unknown", f"of {os.getpid()}"
    return f"{socket.gethostname()}|{pid}|{space}|{began}"


def _after_name(path: str) -> Sequence[str]:
    """The fields of a `stat` file behind the command's name, which may hold spaces."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
