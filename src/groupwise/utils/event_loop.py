"""An event loop in a thread, for whoever is not asynchronous."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from groupwise.utils import threads


class EventLoop:
    """Runs coroutines side by side, until it is closed: what still runs then is broken off, and has
    a moment to clean up.
    """

    def __init__(
        self,
        name: str,
        around: Callable[[], AbstractAsyncContextManager[Any]] = contextlib.nullcontext,
        *,
        seconds: float = 60.0,
    ) -> None:
        """name: of its thread.   around: what is open while it runs.   seconds: in which that is
        opened, and in which it is closed.

        Raises what `around` raises, and TimeoutError.
        """
        self._seconds, self._loop, self._stop = seconds, asyncio.new_event_loop(), asyncio.Event()
        opened: Future[None] = Future()
        self._served = threads.begin(lambda: self._run(around, opened), name)
        opened.result(seconds)

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine; its future can be cancelled."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Break off what runs; harmless if called again."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._stop.set)
        with contextlib.suppress(TimeoutError):
            self._served.exception(self._seconds)

    def _run(
        self, around: Callable[[], AbstractAsyncContextManager[Any]], opened: Future[None]
    ) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(around, opened))

    async def _serve(
        self, around: Callable[[], AbstractAsyncContextManager[Any]], opened: Future[None]
    ) -> None:
        try:
            async with around():
                opened.set_result(None)
                await self._stop.wait()
                tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
                for task in tasks:
                    if not task.cancelling():  # else it is cleaning up already
                        task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)
