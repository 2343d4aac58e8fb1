"""What is asynchronous in an episode: tools that go on side by side, and methods of environments.

A file of its own: to import asyncio takes as long as the rest of a worker's start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from groupwise.utils.process_main import described


class CallLoop:
    """The event loop of an `Instance`: kept, so that sessions, locks and semaphores stay valid."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, value: Awaitable[Any]) -> Any:
        """What it comes to."""

        async def wait() -> Any:
            return await value

        return self._loop.run_until_complete(wait())

    def side_by_side(self, calls: Sequence[Callable[[], Awaitable[dict[str, Any]]]], seconds: float) -> Iterator[dict[str, Any]]:
        """The answers of all calls in their order, each as soon as those before it are there: one that cannot be cancelled costs
        none before it.  Of one that takes more than `seconds`, that it was late."""
        for task in [self._loop.create_task(_one(call, seconds)) for call in calls]:
            yield self._loop.run_until_complete(task)


async def _one(call: Callable[[], Awaitable[dict[str, Any]]], seconds: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call()
    except BaseException as error:  # whatever a tool raises is something that the policy is told
        if isinstance(error, TimeoutError) and limit.expired():
            return {"late": True}
        return described(error)
