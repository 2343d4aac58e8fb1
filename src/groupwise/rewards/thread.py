"""The thread of this process in which functions of the running program are called, where they run `here`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.rewards.functions import Functions, Unit


class Thread:
    """Calls functions in this process, in one thread that is always the same: never in the main one, whoever asks.

    So a function that needs the main thread fails in a check as it would in training.  It cannot be ended; Ctrl-C in the thread
    that waits for it is not held up as long as the function lets go of the interpreter.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] | None = None

    def run(self, functions: Functions, units: Sequence[Unit]) -> Callable[[], list[list[Any]]]:
        """Begin; calling what this returns waits for the messages."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="groupwise-rewards", daemon=True).start()
        answer: Future[list[list[Any]]] = Future()
        self._calls.put((answer, functions, units))
        return answer.result

    def close(self) -> None:
        """End the thread when it is idle; a later call has another one, and does not wait for a function that hangs."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    """Each thread has a queue to itself: it cannot take what is meant for its successor."""
    while (call := calls.get()) is not None:
        answer, functions, units = call
        try:
            answer.set_result(list(functions.run(units)))
        except BaseException as error:  # whatever it is, it belongs to the thread that waits
            answer.set_exception(error)
