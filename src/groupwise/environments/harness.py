"""Agent harnesses, and how they are run: Python functions, programs, or processes that somebody
else has started.

A harness drives its own loop against an episode's base URL, as any OpenAI client would, and says in
the end what the episode was worth.  It knows nothing of training.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import queue
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from groupwise.environments.programs import run_program
from groupwise.errors import ConfigError, EnvironmentFailure
from groupwise.utils import threads
from groupwise.utils.event_loop import EventLoop
from groupwise.utils.http import Refused
from groupwise.utils.process_main import described, shortened
from groupwise.utils.processes import Died, Raised, WorkerProcess
from groupwise.utils.secrets import environment_of_others

FOREVER = 1e6
"""Seconds; the episode's own limit comes before."""
LONGEST_FAILURE = 2000
"""Characters of the words for a failure: they stand in the log and in the record."""
CLEANUP = 5.0
"""Seconds that asynchronous functions have to clean up in when everything is closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRequest:
    """An episode as a harness gets it: the data row, and where to ask for the policy's turns."""

    id: str
    row: Mapping[str, Any]
    """The data row."""
    base_url: str
    """For an OpenAI client; it is this episode's own."""
    api_key: str
    model: str
    index: int
    """The episode's place in its group."""
    seed: int


@dataclass(frozen=True, slots=True)
class Ending:
    """What a harness says at its end.  Raises EnvironmentFailure for a reward that is no finite
    number.
    """

    reward: float | None = None
    """None where it can give none."""
    state: Mapping[str, Any] | None = None
    """What rewards see of the episode, as JSON: `Episode.state`."""
    failure: str = ""
    """What it has failed with, where its state is known all the same."""

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise EnvironmentFailure(
                f"its reward is {self.reward}: return a finite number, or None where there is none"
            )


@dataclass(frozen=True, slots=True)
class HarnessRun:
    """A harness at work in one episode."""

    ending: Future[Ending]
    """The ending of the episode, or what the harness has failed with."""
    stop: Callable[[], object] = lambda: None
    """Breaks it off."""


class Harness(Protocol):
    """Runs a program or function that drives an episode, one for each.  It may be used by several
    threads at once.
    """

    def start(self, request: EpisodeRequest) -> HarnessRun:
        """Begin an episode and return at once."""
        ...

    def close(self) -> None:
        """End everything that it has started."""
        ...


def failure_of(error: BaseException) -> str:
    """Say what a harness has failed with, in at most `LONGEST_FAILURE` characters."""
    if isinstance(error, CancelledError):
        return "it was broken off"
    words = str(error) if isinstance(error, EnvironmentFailure) else str(Raised(described(error)))
    return shortened(words, LONGEST_FAILURE)


class LoopHarness:
    """A harness whose episodes are tasks of one event loop, which starts with the first of them."""

    def __init__(
        self,
        name: str,
        around: Callable[[], AbstractAsyncContextManager[Any]] = contextlib.nullcontext,
        *,
        seconds: float,
    ) -> None:
        """Take the arguments of `EventLoop`."""
        self._make = partial(EventLoop, name, around, seconds=seconds)
        self._loop: EventLoop | None = None
        self._lock = threading.Lock()

    def play(self, episode: Coroutine[Any, Any, Ending]) -> HarnessRun:
        """Let an episode run beside the others."""
        with self._lock:
            loop = self._loop = self._loop or self._make()
        ending = loop.begin(_contained(episode))
        return HarnessRun(ending, ending.cancel)

    def close(self) -> None:
        """Stop the event loop; what still runs is broken off, and has a moment to clean up."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


async def _contained(episode: Coroutine[Any, Any, Ending]) -> Ending:
    """The ending; an exception that would end the loop, and with it every episode, is a failure
    like others.
    """
    try:
        return await episode
    except (SystemExit, KeyboardInterrupt) as error:
        raise EnvironmentFailure(failure_of(error)) from error


class FunctionHarness(LoopHarness):
    """A function `harness(row, base_url, ...) -> reward`, sync or async.

    It gets those of `row`, `base_url`, `api_key`, `model`, `index` and `seed` that it names.  Async
    ones share an event loop; a sync one has a thread.  A thread cannot be killed: one that hangs is
    left behind, and its requests are refused."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises ConfigError for a function that cannot be called so."""
        super().__init__("harnesses", seconds=CLEANUP)
        known = [name for name in EpisodeRequest.__dataclass_fields__ if name != "id"]
        parameters = inspect.signature(function).parameters.values()
        every = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
        self._names = known if every else [one.name for one in parameters if one.name in known]
        foreign = [
            one.name
            for one in parameters
            if one.default is inspect.Parameter.empty
            and one.kind
            in (
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                inspect.Parameter.KEYWORD_ONLY,
            )
            and one.name not in known
        ]
        if foreign or "base_url" not in self._names:
            wrong = f"asks for {', '.join(foreign)}" if foreign else "does not take base_url"
            raise ConfigError(
                f"the harness {getattr(function, '__name__', function)!r} {wrong}: it may name"
                f" {', '.join(known)}"
            )
        self.function = function

    def start(self, request: EpisodeRequest) -> HarnessRun:
        """Call the function: an asynchronous one as a task of the event loop, any other in a
        thread.
        """
        arguments = {name: getattr(request, name) for name in self._names}
        if inspect.iscoroutinefunction(self.function):
            return self.play(self._awaited(arguments))
        return HarnessRun(
            threads.begin(
                lambda: Ending(reward_of(self.function(**arguments))), f"harness-{request.id}"
            )
        )

    async def _awaited(self, arguments: Mapping[str, Any]) -> Ending:
        return Ending(reward_of(await self.function(**arguments)))


class ForkedPrograms:
    """A process whose forks start programs.  It ends with all of them, also where this process is
    killed.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        """run: what a fork does, with the arguments of `call`."""
        self._run = run
        self._lock = threading.Lock()
        self._process = self._start()

    def _start(self) -> WorkerProcess:
        return WorkerProcess("functools:partial", self._run)

    def fork(self) -> WorkerProcess:
        """Return a fork, which is killed alone."""
        with self._lock:
            if not self._process.alive():
                self._process = self._start()
            return self._process.fork()

    def call(self, fork: WorkerProcess, *arguments: Any) -> Any:
        """Return what a fork answers, and end it.

        Raises EnvironmentFailure where it ends before.
        """
        try:
            return fork.call(*arguments, seconds=FOREVER)
        except (Died, Raised, TimeoutError) as error:
            raise EnvironmentFailure(str(error)) from error
        finally:
            fork.kill()

    def close(self) -> None:
        """Kill every program that runs."""
        self._process.kill()


class ProgramHarness:
    """A program, started for each episode.

    The row is on its standard input, as JSON; OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are
    set.  The last line that it prints is the reward, a number or null.  It is ended with all that
    it has started, also where this process is killed."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._programs = ForkedPrograms(run_program)

    def start(self, request: EpisodeRequest) -> HarnessRun:
        """Start the program and wait for its end in a thread."""
        fork = self._programs.fork()
        return HarnessRun(
            threads.begin(lambda: self._run(request, fork), f"harness-{request.id}"), fork.kill
        )

    def _run(self, request: EpisodeRequest, fork: WorkerProcess) -> Ending:
        names = {
            "OPENAI_BASE_URL": request.base_url,
            "OPENAI_API_KEY": request.api_key,
            "OPENAI_MODEL": request.model,
        }
        row = json.dumps(request.row, default=str)
        status, printed, errors = self._programs.call(
            fork, self.command, environment_of_others() | names, row
        )
        if status != 0:
            raise EnvironmentFailure(f"it ended with status {status}: {errors.strip()[-2000:]}")
        last = next((line.strip() for line in reversed(printed.split("\n")) if line.strip()), "")
        try:
            return Ending(reward_of(json.loads(last)))
        except (ValueError, TypeError, RecursionError) as error:
            raise EnvironmentFailure(f"its last line is no reward: {error}") from error

    def close(self) -> None:
        """Kill every program that runs."""
        self._programs.close()


class OutsideHarness:
    """Processes that somebody else has started fetch episodes: `POST /episodes`, and tell of the
    end: `POST /episodes/ID/end`.

    They may have packages of their own, and run on another machine.
    """

    def __init__(self) -> None:
        self._free: queue.Queue[EpisodeRequest] = queue.Queue()
        self._open: dict[str, Future[Ending]] = {}

    def start(self, request: EpisodeRequest) -> HarnessRun:
        """Queue the episode until a process claims it."""
        ending = self._open[request.id] = Future()
        self._free.put(request)
        return HarnessRun(ending, lambda: self._open.pop(request.id, None))

    def claim(self, seconds: float, there: Callable[[], bool]) -> Mapping[str, Any] | None:
        """The next queued episode, as JSON; None if none comes within so many seconds, or whoever
        wanted it has hung up.

        there: False once it has.
        """
        while True:
            try:
                request = self._free.get(timeout=seconds)
            except queue.Empty:
                return None
            if not there():
                self._free.put(request)
                return None
            if request.id in self._open:  # it has not been broken off meanwhile
                return json.loads(json.dumps(asdict(request), default=str))

    def report(self, episode: str, ending: Ending | EnvironmentFailure) -> None:
        """Finish the episode.  Raises Refused for one that is over or unknown."""
        future = self._open.pop(episode, None)
        if future is None:
            raise Refused(
                "there is no such episode: it is over, or never was one",
                HTTPStatus.NOT_FOUND,
                code="episode_over",
            )
        if isinstance(ending, Ending):
            future.set_result(ending)
        else:
            future.set_exception(ending)

    def close(self) -> None:
        """Forget the episodes: later reports are refused."""
        self._open.clear()


def reward_of(returned: Any) -> float | None:
    """The reward that a harness returned, as a float or None.  Raises TypeError for anything that
    is not a number.
    """
    if returned is None:
        return None
    if not hasattr(returned, "__float__"):  # numpy's and torch's numbers have it too
        raise TypeError(
            f"a harness returns its reward, a number or None; got {returned!r:.80}"
            f" ({type(returned).__name__})"
        )
    try:
        return float(returned)
    except OverflowError:
        return math.inf
