"""Asynchronous reward functions: their calls go on side by side, in one event loop that stands still between calls.

A file of its own, imported when the first of them is called: asyncio is as much to import as the rest of a worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from groupwise.rewards.returned import validated
from groupwise.rewards.trainer_state import Notes, joined
from groupwise.utils.process_main import told

if TYPE_CHECKING:
    from groupwise.rewards.functions import Unit


class SideBySide:
    """Calls asynchronous functions, in messages as `functions.Functions` has them."""

    def __init__(self, find: Callable[[Unit], Callable[..., Any]]) -> None:
        """find: gives the function that a unit calls."""
        self._find = find
        self._loop = asyncio.new_event_loop()  # kept, so that sessions, locks and semaphores stay valid

    def run(self, units: Sequence[tuple[int, Unit]]) -> list[list[Any]]:
        """Call the functions of all units, given with their numbers."""
        return self._loop.run_until_complete(self._together(units))

    async def _together(self, waiting: Sequence[tuple[int, Unit]]) -> list[list[Any]]:
        return await asyncio.gather(*(self._message(n, unit) for n, unit in waiting))

    async def _message(self, n: int, unit: Unit) -> list[Any]:
        began, nothing = time.monotonic(), [] if unit.process else None
        every = [unit.notes() for _ in unit.labels] if unit.single else [unit.notes()]
        try:
            if unit.single:
                found = await self._each(unit, every)
                late = [index for index, value in enumerate(found) if value is _LATE]
                found = [nothing if value is _LATE else value for value in found]
            else:
                given = unit.keywords() | every[0].given(unit.asks, unit.state)
                task = asyncio.ensure_future(_contained(self._find(unit), given))
                found = await _in_time(task, unit.timeout)
                late = list(range(len(unit.labels))) if found is _LATE else []
                found = [nothing for _ in late] if late else found
            values = validated(unit.name, found, unit.labels, unit.process)
            logged = joined([notes.told() for notes in every], [notes.count for notes in every])
            return [n, "values", [values, late, time.monotonic() - began, logged]]
        except _On as located:
            return [n, "failed", told(located.error) | {"label": located.label}]
        except (Exception, asyncio.CancelledError) as error:  # whatever a function raises is an outcome, judged in one place
            return [n, "failed", told(error) | {"label": ""}]

    async def _each(self, unit: Unit, every: Sequence[Notes]) -> list[Any]:
        function = self._find(unit)

        async def one(label: str, row: dict[str, Any], notes: Notes) -> Any:
            given = row | notes.given(unit.asks, unit.state)
            task = asyncio.ensure_future(_contained(function, given))
            try:
                return await _in_time(task, unit.timeout)
            except (Exception, asyncio.CancelledError) as error:
                raise _On(label, error) from error

        tasks = [asyncio.ensure_future(one(*each)) for each in zip(unit.labels, unit.rows(), every, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:  # one has failed: the others are not left to run into the next call
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


async def _in_time(task: asyncio.Task, seconds: float | None) -> Any:
    """The task's result, `_LATE` if it has none in time: then it is cancelled, and has a moment to clean up; so it is, too, if who
    waits here is cancelled."""
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
    return task.result() if done else _LATE


async def _contained(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """What the function returns; an exception that would end the loop is an error like others."""
    try:
        return await function(**given)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from error


class _On(Exception):
    """What a function of one completion raised, and on which."""

    def __init__(self, label: str, error: BaseException) -> None:
        super().__init__(label)
        self.label, self.error = label, error


_LATE: Any = object()
