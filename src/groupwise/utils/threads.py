"""Work in threads beside: its result, or what it raised, belongs to whoever waits for it.

The threads are daemons: what never returns must not keep a process from its end.
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

_first: list[Callable[[], object]] = []
os.register_at_fork(after_in_child=_first.clear)  # a fork cannot use a GPU of its parent


def before_work(prepare: Callable[[], object]) -> None:
    """Have threads call this before whatever they are given from now on."""
    _first.append(prepare)


def begin(work: Callable[[], Result], name: str) -> Future[Result]:
    """Do this at once, in a thread; `result()` of what is returned waits for it, and raises what it
    raised.   name: for its stack.

    An interpreter that ends (Python 3.12 and newer) starts no thread: then the work is done here.

    Raises GroupwiseError where the system allows no further thread: whoever waits for the work must
    not go on without it."""
    future: Future[Result] = Future()
    try:
        threading.Thread(target=_run, args=(future, work), name=name, daemon=True).start()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise GroupwiseError(
                f"no thread can be started ({error}): raise the limit of processes and threads"
                " (`ulimit -u`, the container's limit of pids), or let fewer programs run"
            ) from error
        _run(future, work)
    return future


class Thread:
    """One thread that does what it is given, in order; or several that share the work.

    >>> thread = Thread("sums")
    >>> thread.begin(lambda: 6 * 7).result()
    42
    >>> thread.close()
    """

    def __init__(self, name: str, count: int = 1) -> None:
        """name: for its stack.   Raises RuntimeError where none can be started."""
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._count = count
        for _ in range(count):
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    def begin(self, work: Callable[[], Result]) -> Future[Result]:
        """Do this when what was given before is done."""
        future: Future[Result] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        """End it when it has finished."""
        for _ in range(self._count):
            self._work.put(None)

    def _serve(self) -> None:
        while (task := self._work.get()) is not None:
            _run(*task)
            del task  # a thread that waits keeps nothing alive


def _run(future: Future[Result], work: Callable[[], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        for prepare in _first:
            prepare()
        result = work()
    except BaseException as error:  # whatever it is, it belongs to the thread that waits
        future.set_exception(error)
    else:
        future.set_result(result)
