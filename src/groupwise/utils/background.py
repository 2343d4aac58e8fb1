"""Work in a thread beside: its result, or what it raised, belongs to whoever waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Found = TypeVar("Found")


def begin(work: Callable[[], Found], name: str) -> Future[Found]:
    """Run `work` in a thread of its own; `result()` of what is returned waits for it, and raises what it raised.

    The thread is a daemon: what never returns must not keep a process from its end.   name: of the thread, for its stack.
    Where an interpreter that ends starts no thread any more, the work is done here.
    """
    future: Future[Found] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whatever it is, it belongs to the thread that waits
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        run()
    return future
