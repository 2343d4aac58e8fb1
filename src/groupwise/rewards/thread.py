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
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, functions: Functions, units: Sequence[Unit]) -> Callable[[], list[list[Any]]]:
        """Begin; calling what this returns waits for the messages."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="groupwise-rewards", daemon=True)
            self._thread.start()
        answer: Future[list[list[Any]]] = Future()
        self._asked.put((answer, functions, units))
        return answer.result

    def _serve(self) -> None:
        while True:
            asked = self._asked.get()
            if asked is None:
                return
            answer, functions, units = asked
            try:
                answer.set_result(list(functions.run(units)))
            except BaseException as error:  # whatever it is, it belongs to the thread that waits
                answer.set_exception(error)

    def close(self) -> None:
        """End the thread when it is idle."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread = None
