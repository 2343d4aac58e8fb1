"""Signals that end a run: it saves its last whole step and ends, at once where that is possible,
else after the step.

They are Ctrl-C (SIGINT), a scheduler's (SIGTERM, SIGUSR1, SIGXCPU) and a terminal's (SIGHUP,
SIGQUIT).

A signal interrupts sampling, scoring and backward passes, which may take minutes; it waits only
while weights change, or something is written.  Processes that each hold all weights end one by one,
and the first of them saves.  Sharded weights can only be saved by all processes together, so these
end after the same step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from groupwise.distributed import comm
from groupwise.errors import Ended, PeerError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FURTHER = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGXCPU)
"""Signals that are left alone where the program, or what started it (`nohup`), has decided about
them.
"""
TWICE = 2.0
"""Seconds after which a further signal is meant as one: launchers pass on what the processes were
sent, too.
"""

_open: list[Callable[[int, object], None]] = []
"""Signal handlers, one for each run in this process; runs may end in any order."""
_before: dict[int, Any] = {}
"""The handlers from before the first run, put back when the last one ends."""
_later: list[int] = []
"""See `end_later`."""


def end_later(number: int) -> None:
    """End the run that is there, or begins next, after its step, as a signal would have.  The other
    processes need not know.
    """
    _later.append(number)


def _hear(number: int, frame: object) -> None:
    """Pass a signal on to the run that began last."""
    _open[-1](number, frame)


@contextmanager
def endings(may: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """Inside, SIGINT raises KeyboardInterrupt and the others raise Ended: at once where `may` says
    so, else where the function that is given is called (by all processes).  A second signal does
    not wait.  If others are lost when this one has been told to end,
    it ends as told: a launcher tells all of them, and some are faster.

    Outside of the main thread signals are left as they are.
    """
    noted: list[tuple[int, float]] = []

    def hear(number: int, _: object) -> None:
        now = time.monotonic()
        ends = may() if not noted else now - noted[0][1] > TWICE and comm.world().size == 1
        noted.append(
            (number, now)
        )  # stays: where Python or somebody's code drops what is raised, it is told again
        if ends:
            _raise(number)

    def due() -> None:
        heard = comm.gather([*(number for number, _ in noted), *_later])
        if heard:
            _raise(max(heard))

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    for number in (*SIGNALS, *FURTHER):
        handler = signal.getsignal(number)
        if handler is not _hear and (number in SIGNALS or handler is signal.SIG_DFL):
            _before[number] = handler
            signal.signal(number, _hear)
    _open.append(hear)
    try:
        yield due
    except PeerError as lost:
        if noted:
            _raise(max(number for number, _ in noted), lost)
        raise
    finally:
        _open.remove(hear)
        _later.clear()
        if not _open:
            for number, handler in _before.items():
                signal.signal(number, handler)
            _before.clear()


def _raise(number: int, cause: Exception | None = None) -> NoReturn:
    raise (KeyboardInterrupt() if number == signal.SIGINT else Ended(number)) from cause
