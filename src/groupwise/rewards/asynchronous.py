"""Asynchronous reward functions: their calls go on side by side, in one event loop that stands still between requests.

A file of its own, imported when the first of them is called: asyncio is as much to import as the rest of a worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from groupwise.utils.process_main import described

if TYPE_CHECKING:
    from groupwise.rewards.functions import RewardCall

CLEANED_UP = 1.0
"""Seconds that a call which is cancelled has to clean up."""


class SideBySide:
    """Calls asynchronous functions; answers as `functions.Functions` has them."""

    def __init__(self, find: Callable[[RewardCall], Callable[..., Any]]) -> None:
        """find: gives the function that is called."""
        self._find = find
        self._loop = asyncio.new_event_loop()  # kept, so that sessions, locks and semaphores stay valid

    def run(self, calls: Sequence[RewardCall]) -> list[dict[str, Any] | None]:
        """The answers to all calls.  After a failure the others are cancelled: they are not left to run into the next request."""
        return self._loop.run_until_complete(self._together(calls))

    async def _together(self, calls: Sequence[RewardCall]) -> list[dict[str, Any] | None]:
        tasks = [asyncio.ensure_future(self._answer(call)) for call in calls]
        running = set(tasks)
        while running:
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if any("error" in task.result() for task in ended):
                break
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return [None if task in running else task.result() for task in tasks]

    async def _answer(self, call: RewardCall) -> dict[str, Any]:
        began, notes = time.monotonic(), call.notes()
        try:
            task = asyncio.ensure_future(_contained(self._find(call), call.keywords(notes)))
            if not await _in_time(task, call.reward.timeout):
                return {"late": True, "seconds": time.monotonic() - began}
            return call.ended(task.result(), notes, began)
        except (Exception, asyncio.CancelledError) as error:  # whatever a function raises is an answer, judged in one place
            return described(error)


async def _in_time(task: asyncio.Task, seconds: float | None) -> bool:
    """True if the task ends in time.  Else it is cancelled; so it is, too, if whoever waits here is cancelled."""
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=CLEANED_UP)
    return bool(done)


async def _contained(function: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
    """What the function returns; an exception that would end the loop is an error like others."""
    try:
        return await function(**keywords)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from error
