"""Work in a thread beside: its result, or what it raised, belongs to whoever waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from groupwise.errors import GroupwiseError

Found = TypeVar("Found")


def begin(work: Callable[[], Found], name: str) -> Future[Found]:
    """Run `work` in a thread of its own; `result()` of what is returned waits for it, and raises what it raised.

    The thread is a daemon: what never returns must not keep a process from its end.   name: of the thread, for its stack.
    An interpreter that ends (Python 3.12 and newer) starts no thread: then the work is done here.

    Raises GroupwiseError where the system allows no further thread: whoever waits for the work must not go on without it.
    """
    future: Future[Found] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whatever it is, it belongs to the thread that waits
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise GroupwiseError(
                f"no thread can be started ({error}): raise the limit of processes and threads (`ulimit -u`, the container's limit "
                "of pids), or let fewer programs run"
            ) from error
        run()
    return future
