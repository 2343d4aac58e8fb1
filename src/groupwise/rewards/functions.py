"""The worker process's part of reward functions: it imports, describes and calls them, and checks what they returned.

A function is called on the main thread, with its own copy of every argument for each completion: changing one alters neither the
data, nor the record, nor the arguments of another completion.
"""

from __future__ import annotations

import asyncio
import copy
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.errors import ConfigError
from groupwise.rewards.find import find_function, read_signature
from groupwise.rewards.returned import validated
from groupwise.rewards.step_rewards import ProcessReward
from groupwise.rewards.trainer_state import Notes, TrainerState, joined
from groupwise.rewards.worker_process import told

ATOMS = (str, bytes, int, float, complex, bool, type(None))
"""What cannot be changed and needs no copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One function, and the completions that it is to be called on."""

    spec: str
    name: str
    arguments: Mapping[str, Any]
    single: bool
    asynchronous: bool
    process: bool
    timeout: float | None
    """Seconds that an asynchronous call may take before it is cancelled; calls of others are ended from outside."""
    labels: Sequence[str]
    given: bytes
    """Pickle of the keyword arguments: lists with an entry per completion."""
    asks: tuple[str, ...] = ()
    """Of `trainer_state.TOLD`."""
    state: TrainerState = field(default_factory=TrainerState)

    def keywords(self) -> dict[str, list[Any]]:
        """Keyword arguments, nothing in them shared between completions."""
        return {name: unshared(values) for name, values in pickle.loads(self.given).items()}

    def rows(self) -> list[dict[str, Any]]:
        """For a function of one completion: the keyword arguments of each call."""
        given = self.keywords()
        return [{name: values[n] for name, values in given.items()} for n in range(len(self.labels))]

    def notes(self) -> Notes:
        """What its next call logs into."""
        return Notes(1 if self.single else len(self.labels), single=self.single)

    def after(self, done: int) -> Unit:
        """The same for the completions from number `done` on."""
        given = {name: values[done:] for name, values in pickle.loads(self.given).items()}
        return replace(self, labels=self.labels[done:], given=pickle.dumps(given))


def unshared(values: list[Any]) -> list[Any]:
    """The same values; of an object that stands in several places, each gets a copy.

    >>> first, second = unshared([[1]] * 2)
    >>> first.append(2)
    >>> second
    [1]
    """
    seen: set[int] = set()
    found = []
    for value in values:
        found.append(copy.deepcopy(value) if id(value) in seen and not isinstance(value, ATOMS) else value)
        seen.add(id(value))
    return found


def worker(specs: Sequence[str]) -> Callable[..., Any]:
    """In a worker: what answers its requests.  `specs`: functions to import now, so that no call waits for it."""
    functions = Functions()
    for spec in specs:
        functions.find(spec)
    return functions.answer


class Functions:
    """Reward functions by name.  Messages are lists `[unit, kind, what]`:

    `row`: value of the next completion, its seconds, and what it logged (`notes.Notes.told`).  `values`: of all completions, those
    that were late, seconds, and what was logged.
    `failed`: an exception in words (`worker_process.told`), with the completion's label where it is known; ends the unit.
    """

    def __init__(self, live: Mapping[str, Any] | None = None) -> None:
        """live: functions that are given and not found by name."""
        self._found: dict[str, Any] = dict(live or {})
        self._loop: asyncio.AbstractEventLoop | None = None

    def find(self, spec: str) -> Any:
        """The function behind a name.  Raises ConfigError."""
        if spec not in self._found:
            self._found[spec], _ = find_function(spec)
        return self._found[spec]

    def answer(self, what: str, *request: Any) -> Any:
        """`describe`: functions with arguments and columns in, signatures or what is wrong with them out.  `call`: units in."""
        return [self._describe(*one) for one in request] if what == "describe" else self.run(request)

    def _describe(self, spec: str, name: str, arguments: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
        try:
            return read_signature(self.find(spec), name, arguments, columns).as_dict()
        except ConfigError as error:
            return {"wrong": str(error)}

    def run(self, units: Sequence[Unit]) -> Iterator[list[Any]]:
        """Call the functions of all units: the asynchronous ones side by side, then the others in order."""
        waiting = [(n, unit) for n, unit in enumerate(units) if unit.asynchronous]
        if waiting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()  # kept, so that sessions, locks and semaphores stay valid
            yield from self._loop.run_until_complete(self._together(waiting))
        for n, unit in enumerate(units):
            if not unit.asynchronous:
                yield from ([n, *message] for message in self._plain(unit))

    def _inner(self, unit: Unit) -> Callable[..., Any]:
        function = self.find(unit.spec)
        return function.function if isinstance(function, ProcessReward) else function

    def _plain(self, unit: Unit) -> Iterator[tuple[str, Any]]:
        label, began = "", time.monotonic()
        try:
            function = self._inner(unit)
            if not unit.single:
                notes = unit.notes()
                found = function(**unit.keywords(), **unit.arguments, **notes.given(unit.asks, unit.state))
                values = validated(unit.name, found, unit.labels, unit.process)
                yield "values", [values, [], time.monotonic() - began, notes.told()]
                return
            for label, row in zip(unit.labels, unit.rows(), strict=True):
                began, notes = time.monotonic(), unit.notes()
                found = function(**row, **unit.arguments, **notes.given(unit.asks, unit.state))
                (value,) = validated(unit.name, [found], [label], unit.process)
                yield "row", [value, time.monotonic() - began, notes.told()]
        except GeneratorExit:
            raise
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: nobody but the function can have raised them here
            yield "failed", told(error) | {"label": label}

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
                given = unit.keywords() | dict(unit.arguments) | every[0].given(unit.asks, unit.state)
                task = asyncio.ensure_future(_contained(self._inner(unit), given))
                found = await _in_time(task, unit.timeout)
                late = list(range(len(unit.labels))) if found is _LATE else []
                found = [nothing for _ in late] if late else found
            values = validated(unit.name, found, unit.labels, unit.process)
            logged = joined([notes.told() for notes in every], [notes.count for notes in every])
            return [n, "values", [values, late, time.monotonic() - began, logged]]
        except _On as located:
            return [n, "failed", told(located.error) | {"label": located.label}]
        except Exception as error:  # whatever a user's function raises is an outcome, judged in one place
            return [n, "failed", told(error) | {"label": ""}]

    async def _each(self, unit: Unit, every: Sequence[Notes]) -> list[Any]:
        function = self._inner(unit)

        async def one(label: str, row: dict[str, Any], notes: Notes) -> Any:
            given = row | dict(unit.arguments) | notes.given(unit.asks, unit.state)
            task = asyncio.ensure_future(_contained(function, given))
            try:
                return await _in_time(task, unit.timeout)
            except Exception as error:
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
    """The task's result, `_LATE` if it has none in time: then it is cancelled, and has a moment to clean up."""
    await asyncio.wait([task], timeout=seconds)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait([task], timeout=1.0)
    return _LATE


async def _contained(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """What the function returns; an exception that would end the loop is an error like others."""
    try:
        return await function(**given)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from error


class _On(Exception):
    """What a function of one completion raised, and on which."""

    def __init__(self, label: str, error: Exception) -> None:
        super().__init__(label)
        self.label, self.error = label, error


_LATE: Any = object()


class Thread:
    """Calls functions in this process, in one thread that is always the same: never in the main one, whoever asks.

    So a function that needs the main thread fails in a check as it would in training.  It cannot be ended; Ctrl-C in the thread
    that waits for it is not held up as long as the function lets go of the interpreter.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, functions: Functions, units: Sequence[Unit]) -> Callable[[], list[list[Any]]]:
        """Begin; calling what this returns waits for the messages."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="groupwise-rewards", daemon=True)
            self._thread.start()
        answer: Future[list[list[Any]]] = Future()
        self._asked.put((answer, functions, units))
        return answer.result

    def _serve(self) -> None:
        while True:
            asked = self._asked.get()
            if asked is None:
                return
            answer, functions, units = asked
            try:
                answer.set_result(list(functions.run(units)))
            except BaseException as error:  # whatever it is, it belongs to the thread that waits
                answer.set_exception(error)

    def close(self) -> None:
        """End the thread when it is idle."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread = None
