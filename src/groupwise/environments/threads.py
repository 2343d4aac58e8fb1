"""Daemon threads that wait for tools: one for each call that runs; none delays the end of the program."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Runs functions at once, each in a thread of its own; a thread that has finished takes the next function.

    They are daemons: `concurrent.futures` would wait at exit for one that never returns.

    >>> Threads().submit(lambda: 6 * 7).result()
    42
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Any]] = []
        self._closed = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Begin; what it raises is the future's."""
        future: Future[T] = Future()
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name="groupwise-episodes", daemon=True).start()
        inbox.put((future, work))
        return future

    def _serve(self, inbox: queue.SimpleQueue[Any]) -> None:
        while (job := inbox.get()) is not None:
            future, work = job
            del job
            try:
                result = work()
            except BaseException as error:  # it belongs to whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            del future, work  # an idle thread keeps nothing alive
            with self._lock:
                if self._closed:
                    return
                self._idle.append(inbox)

    def close(self) -> None:
        """End the threads that are idle, and each of the others when it has finished."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)
