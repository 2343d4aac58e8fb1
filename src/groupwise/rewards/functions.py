"""The worker process's part of reward functions: it imports, describes and calls them.

`calls.py` is the trainer's part.  `user_functions.py` knows, for both, what a signature asks for
and which values a function may return.

A function is called on the main thread, with its own copy of every argument for each completion:
changing one alters neither the data, nor the record, nor the arguments of another completion.

It imports little: worker processes start with it.  Modules that few functions need are imported
with the first of them.
"""

from __future__ import annotations

import copy
import pickle
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from groupwise.rewards.step_rewards import ProcessReward
from groupwise.rewards.trainer_state import RUN_PARAMETERS, Notes, TrainerState
from groupwise.rewards.user_functions import Reward, read_signature
from groupwise.utils.imports import imported
from groupwise.utils.process_main import described, message_of

if TYPE_CHECKING:
    import asyncio

CLEANED_UP = 1.0
"""Seconds that an asynchronous call which is cancelled has to clean up."""


TEXT_OF_TEXT = "prompts of text give completions of text, prompts of messages give messages"
_TEXTS_TAKEN_FOR_MESSAGES = re.compile(
    r"string indices must be integers|'str' object has no attribute '(?:get|content|role)'"
)
_MESSAGES_TAKEN_FOR_TEXTS = re.compile(
    r"expected string or bytes-like object, got 'list'|'list' object has no attribute '\w+'"
)
"""Messages of Python's own exceptions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Excerpt:
    """The end of a prompt and the beginning of its completion, for messages."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardCall:
    """One call of a reward function: on one completion, or on all of them."""

    reward: Reward
    labels: Sequence[str]
    pickled: Sequence[bytes]
    """For each completion a pickle of the keyword arguments."""
    state: TrainerState
    excerpts: Sequence[Excerpt]
    """For each completion the texts that a message quotes."""
    chat: bool
    """True: completions are messages, as their prompts are."""

    @property
    def single(self) -> bool:
        """Return True for a call on one completion."""
        return self.reward.signature.single

    @property
    def asynchronous(self) -> bool:
        """Return True for a call that is made beside others."""
        return self.reward.signature.asynchronous

    def notes(self) -> Notes:
        """Return an empty record of what the call logs."""
        return Notes(len(self.labels), single=self.single)

    def keywords(self, notes: Notes) -> dict[str, Any]:
        """Return the keyword arguments.  Completions share nothing; fixed arguments are copies."""
        rows = [pickle.loads(row) for row in self.pickled]
        keywords = rows[0]
        if not self.single:
            keywords = {name: [row[name] for row in rows] for name in rows[0]}
        keywords |= copy.deepcopy(dict(self.reward.arguments))
        asks = [name for name in self.reward.signature.asks if name in RUN_PARAMETERS]
        return keywords | notes.parameters(asks, self.state)

    def ended(self, returned: Any, notes: Notes, began: float) -> dict[str, Any]:
        """Return the answer of a call that has ended.  Raises RewardError for what is no reward."""
        values = self.reward.checked([returned] if self.single else returned, self.labels)
        return {"values": values, "notes": notes.as_json(), "seconds": time.monotonic() - began}

    def raised(self, error: BaseException) -> dict[str, Any]:
        """Return the answer of a call that raised."""
        return described(error) | {"hint": self._hint(error)}

    def _hint(self, error: BaseException) -> str:
        """Name the commonest mistake: a completion has the form of its prompt, text or messages."""
        if isinstance(error, IndexError):
            # An empty text has no first character.
            taken = not self.chat and _reads_content(error)
            return TEXT_OF_TEXT if taken else ""
        if not isinstance(error, TypeError | AttributeError):
            return ""
        if not self.chat and _TEXTS_TAKEN_FOR_MESSAGES.search(message_of(error)):
            return TEXT_OF_TEXT
        if self.chat and _MESSAGES_TAKEN_FOR_TEXTS.search(message_of(error)):
            return (
                "prompts of messages give completions of messages: the text is"
                ' completion[0]["content"]'
            )
        return ""


def _reads_content(error: BaseException) -> bool:
    """Return whether the code that raised an error reads the key `content`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and "content" in frames[-1].f_code.co_consts


def worker(specs: Sequence[str]) -> Callable[..., Any]:
    """Make what answers the requests of a worker.

    specs: functions to import now, so that no call waits for it.
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
        """Return the function behind a name.  Raises ConfigError."""
        if spec in self._functions:
            return self._functions[spec]
        if ":" in spec:
            function = imported(f"reward function {spec!r}", spec, callable_only=True)
        else:
            function = _builtin(spec)
        self._functions[spec] = function
        return function

    def answer(self, request: str, *arguments: Any) -> Any:
        """Answer a request: `describe` gives a signature, `call` the answers of calls."""
        if request == "describe":
            return self._describe(*arguments)
        return self.run(arguments)

    def _describe(
        self, spec: str, name: str, arguments: Mapping[str, Any], columns: Sequence[str]
    ) -> dict[str, Any]:
        return asdict(read_signature(self.find(spec), name, arguments, columns))

    def run(self, calls: Sequence[RewardCall]) -> Iterator[dict[str, Any] | None]:
        """Yield the answers of plain calls, made in order, then those of asynchronous ones, made
        side by side.
        """
        failed = False
        for call in calls:
            if call.asynchronous:
                continue
            answer = None if failed else self._plain(call)
            failed = failed or (answer is not None and "error" in answer)
            yield answer
        together = [call for call in calls if call.asynchronous]
        if failed:
            yield from [None] * len(together)
        elif together:
            yield from self._side_by_side(together)

    def _inner(self, call: RewardCall) -> Callable[..., Any]:
        function = self.find(call.reward.spec)
        return function.function if isinstance(function, ProcessReward) else function

    def _plain(self, call: RewardCall) -> dict[str, Any]:
        began, notes = time.monotonic(), call.notes()
        try:
            keywords = call.keywords(notes)
            returned = self._inner(call)(**keywords)
            return call.ended(returned, notes, began)
        # SystemExit and KeyboardInterrupt too: nobody but the function can have raised them here
        except BaseException as error:
            return call.raised(error)

    def _side_by_side(self, calls: Sequence[RewardCall]) -> Iterator[dict[str, Any] | None]:
        """Yield the answers of asynchronous calls.  After a failure the others are cancelled: none
        runs into the next request.
        """
        # as much to import as the rest of a worker, and most workers call no asynchronous function
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        loop = self._loop
        tasks = [loop.create_task(self._awaited(call)) for call in calls]
        running, cancelled = set(tasks), set[asyncio.Task[Any]]()
        for task in tasks:
            while task in running:
                first = asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ended, running = loop.run_until_complete(first)
                failed = any("error" in one.result() for one in ended)
                if failed and running:
                    cancelled, running = running, set()
                    for one in cancelled:
                        one.cancel()
                    loop.run_until_complete(asyncio.wait(cancelled))
            yield None if task in cancelled else task.result()

    async def _awaited(self, call: RewardCall) -> dict[str, Any]:
        """Return the answer of an asynchronous call."""
        import asyncio

        began, notes = time.monotonic(), call.notes()
        try:
            keywords = call.keywords(notes)
            task = asyncio.ensure_future(_contained(self._inner(call), keywords))
            if not await _in_time(task, call.reward.timeout):
                return {"late": time.monotonic() - began}
            return call.ended(task.result(), notes, began)
        # whatever a function raises is an answer, judged in one place
        except (Exception, asyncio.CancelledError) as error:
            return call.raised(error)


async def _in_time(task: asyncio.Task[Any], seconds: float | None) -> bool:
    """Return True if the task ended in time; else cancel it, as it is with its waiter."""
    import asyncio

    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=CLEANED_UP)
    return bool(done)


async def _contained(function: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
    """Return what the function returns; an exception that would end the loop is an error like
    others.
    """
    try:
        return await function(**keywords)
    except (SystemExit, KeyboardInterrupt) as error:
        failed = RuntimeError(f"{type(error).__name__}: {error}")
        raise failed.with_traceback(error.__traceback__) from error


def _builtin(name: str) -> Callable[..., Any]:
    # a worker is given one only if it has a timeout
    from groupwise.rewards.registry import builtin_function

    return builtin_function(name)
