"""What is asynchronous in an episode: tools that go on side by side, and methods of environments.

A file of its own: to import asyncio takes as long as the rest of a worker's start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from groupwise.rewards.worker_process import told


class Loop:
    """The event loop of an `Instance`: kept, so that sessions, locks and semaphores stay valid."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, value: Awaitable[Any]) -> Any:
        """What it comes to."""

        async def wait() -> Any:
            return await value

        return self._loop.run_until_complete(wait())

    def side_by_side(self, calls: Sequence[Callable[[], Awaitable[dict[str, Any]]]], seconds: float) -> list[dict[str, Any]]:
        """The answers of all calls; of one that takes more than `seconds`, that it was late."""
        return self._loop.run_until_complete(_together(calls, seconds))


async def _together(calls: Sequence[Callable[[], Awaitable[dict[str, Any]]]], seconds: float) -> list[dict[str, Any]]:
    return await asyncio.gather(*(_one(call, seconds) for call in calls))


async def _one(call: Callable[[], Awaitable[dict[str, Any]]], seconds: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call()
    except BaseException as error:  # whatever a tool raises is something that the policy is told
        if isinstance(error, TimeoutError) and limit.expired():
            return {"late": True}
        return told(error)
