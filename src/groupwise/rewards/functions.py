"""The worker process's part of reward functions: it imports, describes and calls them, and checks
what they returned.

A function is called on the main thread, with its own copy of every argument for each completion:
changing one alters neither the data, nor the record, nor the arguments of another completion.

It imports little: worker processes start with it.  What few functions need is imported with the
    first of them.
"""

from __future__ import annotations

import copy
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from groupwise.rewards.step_rewards import ProcessReward
from groupwise.rewards.trainer_state import RUN_PARAMETERS, Notes, TrainerState
from groupwise.rewards.user_functions import Reward, read_signature
from groupwise.utils.imports import imported
from groupwise.utils.process_main import described

if TYPE_CHECKING:
    import asyncio

CLEANED_UP = 1.0
"""Seconds that an asynchronous call which is cancelled has to clean up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardCall:
    """One call of a reward function: on one completion, or on all of them."""

    reward: Reward
    labels: Sequence[str]
    pickled: Sequence[bytes]
    """For each completion a pickle of the keyword arguments."""
    state: TrainerState
    texts: Sequence[tuple[str, str]]
    """For each completion the end of its prompt and the beginning of its text, for messages."""

    @property
    def single(self) -> bool:
        """True: on one completion."""
        return self.reward.signature.single

    @property
    def asynchronous(self) -> bool:
        """True: it is made beside others."""
        return self.reward.signature.asynchronous

    def notes(self) -> Notes:
        """What it logs into."""
        return Notes(len(self.labels), single=self.single)

    def keywords(self, notes: Notes) -> dict[str, Any]:
        """Keyword arguments, nothing in them shared between completions; fixed arguments are
        copies.
        """
        rows = [pickle.loads(row) for row in self.pickled]
        columns = (
            rows[0] if self.single else {name: [row[name] for row in rows] for name in rows[0]}
        )
        asks = [name for name in self.reward.signature.asks if name in RUN_PARAMETERS]
        return (
            columns
            | copy.deepcopy(dict(self.reward.arguments))
            | notes.parameters(asks, self.state)
        )

    def ended(self, returned: Any, notes: Notes, began: float) -> dict[str, Any]:
        """The answer of a call that has come to its end.  Raises RewardError for what is no reward."""
        values = self.reward.checked([returned] if self.single else returned, self.labels)
        return {"values": values, "notes": notes.as_json(), "seconds": time.monotonic() - began}

    def raised(self, error: BaseException, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of a call that raised.   keywords: what it was called with."""
        columns = [
            self.labels,
            *(
                keywords[name]
                for name in self.reward.signature.asks
                if name in keywords and name not in RUN_PARAMETERS
            ),
        ]
        return described(error) | {"index": 0 if self.single else handled(error, columns)}


def handled(error: BaseException, columns: Sequence[Sequence[Any]]) -> int | None:
    """Which completion a function of many was at work on when it raised, by the variables of its
    frames; None: they do not show it.

    columns: objects that belong to the completions, an entry each.
    """

    def unique(
        one: object,
    ) -> (
        bool
    ):  # Python has one object for all equal small numbers, and for equal texts of one character
        return isinstance(one, list | dict) or (isinstance(one, str) and len(one) > 1)

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        variables = {id(value) for value in frame.f_locals.values()}
        places = {
            n
            for column in columns
            for n, one in enumerate(column)
            if unique(one) and id(one) in variables
        }
        if places:
            return places.pop() if len(places) == 1 else None
    return None


def worker(specs: Sequence[str]) -> Callable[..., Any]:
    """In a worker: what answers its requests.  `specs`: functions to import now, so that no call
    waits for it.
    """
    functions = Functions()
    for spec in specs:
        functions.find(spec)
    return functions.answer


class Functions:
    """Reward functions by name, and calls of them.

    The answer to a call has `values`, `notes` and `seconds`; or `late`, of an asynchronous one that
    ran out of time; or it is an exception in words (`process_main.described`).  After a failure
    those that have not ended have none.
    """

    def __init__(self, live: Mapping[str, Any] | None = None) -> None:
        """live: functions that are given and not found by name."""
        self._functions: dict[str, Any] = dict(live or {})
        self._loop: asyncio.AbstractEventLoop | None = None
        """Kept between requests, so that sessions, locks and semaphores stay valid."""

    def find(self, spec: str) -> Any:
        """The function behind a name.  Raises ConfigError."""
        if spec not in self._functions:
            what = f"reward function {spec!r}"
            self._functions[spec] = (
                imported(what, spec, callable_only=True) if ":" in spec else _builtin(spec)
            )
        return self._functions[spec]

    def answer(self, what: str, *request: Any) -> Any:
        """`describe`: a function, arguments and columns in, its signature out.  `call`: calls in,
        their answers out.
        """
        return self._describe(*request) if what == "describe" else self.run(request)

    def _describe(
        self, spec: str, name: str, arguments: Mapping[str, Any], columns: Sequence[str]
    ) -> dict[str, Any]:
        return asdict(read_signature(self.find(spec), name, arguments, columns))

    def run(self, calls: Sequence[RewardCall]) -> Iterator[dict[str, Any] | None]:
        """The answers to calls: plain ones, made in order, then asynchronous ones, made side by
        side.
        """
        failed = False
        for call in calls:
            if not call.asynchronous:
                answer = None if failed else self._plain(call)
                failed = failed or (answer is not None and "error" in answer)
                yield answer
        together = [call for call in calls if call.asynchronous]
        if together:
            yield from [None for _ in together] if failed else self._side_by_side(together)

    def _inner(self, call: RewardCall) -> Callable[..., Any]:
        function = self.find(call.reward.spec)
        return function.function if isinstance(function, ProcessReward) else function

    def _plain(self, call: RewardCall) -> dict[str, Any]:
        began, notes, keywords = time.monotonic(), call.notes(), dict[str, Any]()
        try:
            keywords = call.keywords(notes)
            return call.ended(self._inner(call)(**keywords), notes, began)
        # SystemExit and KeyboardInterrupt too: nobody but the function can have raised them here
        except BaseException as error:
            return call.raised(error, keywords)

    def _side_by_side(self, calls: Sequence[RewardCall]) -> Iterator[dict[str, Any] | None]:
        """The answers to asynchronous calls.  After a failure the others are cancelled: none runs
        into the next request.
        """
        # as much to import as the rest of a worker, and most workers call no asynchronous function
        import asyncio

        async def in_time(call: RewardCall, keywords: dict[str, Any]) -> asyncio.Task[Any] | None:
            """A task that has ended; None: it was out of time, and has been cancelled, as it is if
            this is cancelled.
            """
            task = asyncio.ensure_future(_contained(self._inner(call), keywords))
            try:
                done, _ = await asyncio.wait([task], timeout=call.reward.timeout)
            finally:
                task.cancel()
                await asyncio.wait([task], timeout=CLEANED_UP)
            return task if done else None

        async def answer(call: RewardCall) -> dict[str, Any]:
            began, notes, keywords = time.monotonic(), call.notes(), dict[str, Any]()
            try:
                keywords = call.keywords(notes)
                task = await in_time(call, keywords)
                return (
                    {"late": time.monotonic() - began}
                    if task is None
                    else call.ended(task.result(), notes, began)
                )
            except (
                Exception,
                asyncio.CancelledError,
            ) as error:  # whatever a function raises is an answer, judged in one place
                return call.raised(error, keywords)

        loop = self._loop = self._loop or asyncio.new_event_loop()
        tasks = [loop.create_task(answer(call)) for call in calls]
        running, cancelled = set(tasks), set[asyncio.Task[Any]]()
        for task in tasks:
            while task in running:
                ended, running = loop.run_until_complete(
                    asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                )
                if running and any("error" in job.result() for job in ended):
                    cancelled, running = running, set()
                    for job in cancelled:
                        job.cancel()
                    loop.run_until_complete(asyncio.wait(cancelled))
            yield None if task in cancelled else task.result()


async def _contained(function: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
    """What the function returns; an exception that would end the loop is an error like others."""
    try:
        return await function(**keywords)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(
            error.__traceback__
        ) from error


def _builtin(name: str) -> Callable[..., Any]:
    from groupwise.rewards.registry import (
        builtin_function,
    )  # a worker is given one only if it has a timeout

    return builtin_function(name)
