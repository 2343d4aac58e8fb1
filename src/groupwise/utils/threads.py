"""Work in threads beside: its result, or what it raised, belongs to whoever waits for it.

The threads are daemons: what never returns must not keep a process from its end.  One that has finished takes the next work.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from groupwise.errors import GroupwiseError

Result = TypeVar("Result")
IDLE_SECONDS = 30.0
"""After which a thread without work ends."""


class Thread:
    """One thread that does what it is given, in order.

    >>> thread = Thread("sums")
    >>> thread.begin(lambda: 6 * 7).result()
    42
    >>> thread.close()
    """

    def __init__(self, name: str, *, seconds: float | None = None) -> None:
        """name: for its stack.   seconds: it ends after so many without work, if it is among those that are idle.

        Raises RuntimeError where none can be started.
        """
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(seconds,), name=name, daemon=True).start()

    def begin(self, work: Callable[[], Result], name: str = "") -> Future[Result]:
        """Do this when what was given before is done."""
        future: Future[Result] = Future()
        self._work.put((future, work, name))
        return future

    def close(self) -> None:
        """End it when it has finished."""
        self._work.put(None)

    def _serve(self, seconds: float | None) -> None:
        while True:
            try:
                task = self._work.get(timeout=seconds)
            except queue.Empty:
                with _lock:
                    if self not in _idle:  # it was taken just now: work is on its way
                        continue
                    _idle.remove(self)
                return
            if task is None:
                return
            future, work, name = task
            del task
            threading.current_thread().name = name or threading.current_thread().name
            _run(future, work)
            del future, work  # an idle thread keeps nothing alive
            if seconds is not None:
                with _lock:
                    _idle.append(self)


_idle: list[Thread] = []
_lock = threading.Lock()


def _forget() -> None:
    """In a fork there is none of these threads."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)


def begin(work: Callable[[], Result], name: str) -> Future[Result]:
    """Do this at once, in a thread; `result()` of what is returned waits for it, and raises what it raised.   name: for its stack.

    An interpreter that ends (Python 3.12 and newer) starts no thread: then the work is done here.

    Raises GroupwiseError where the system allows no further thread: whoever waits for the work must not go on without it.
    """
    with _lock:
        thread = _idle.pop() if _idle else None
    if thread is None:
        try:
            thread = Thread(name, seconds=IDLE_SECONDS)
        except RuntimeError as error:
            if "interpreter shutdown" not in str(error):
                raise GroupwiseError(
                    f"no thread can be started ({error}): raise the limit of processes and threads (`ulimit -u`, the container's "
                    "limit of pids), or let fewer programs run"
                ) from error
            future: Future[Result] = Future()
            _run(future, work)
            return future
    return thread.begin(work, name)


def _run(future: Future[Result], work: Callable[[], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # whatever it is, it belongs to the thread that waits
        future.set_exception(error)
    else:
        future.set_result(result)
