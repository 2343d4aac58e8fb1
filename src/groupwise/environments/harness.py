"""Agent harnesses, and how they are run: Python functions, programs, or processes that somebody else has started.

A harness drives its own loop against an episode's base URL, as any OpenAI client would, and says in the end what the episode was
worth.  It knows nothing of training.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import queue
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from groupwise.environments.requests import Refused
from groupwise.errors import ConfigError
from groupwise.utils import threads
from groupwise.utils.event_loop import EventLoop
from groupwise.utils.process_main import described
from groupwise.utils.processes import Died, Raised, WorkerProcess
from groupwise.utils.secrets import environment_of_others

Ending = tuple[float | None, str, Mapping[str, tuple[str, float | None]]]
"""How an episode ended: its reward, None if none can be given; what went wrong, or nothing; and, where the agents of an episode are
rewarded apart, the agent and the reward of each session (the header X-Session-ID of its requests)."""
Finished = Callable[[float | None, str, Mapping[str, tuple[str, float | None]]], None]
"""Called once, with the ending, when a harness has ended."""
FOREVER = 1e6
"""Seconds; the episode's own limit comes before."""
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


class Harness(Protocol):
    """Runs a program or function that drives an episode, one for each.  It may be used by several threads at once."""

    episodes: OutsideHarness | None
    """Where processes that somebody else has started ask for episodes."""

    def start(self, request: EpisodeRequest, finished: Finished) -> Callable[[], None]:
        """Begin an episode and return at once; `finished` may be called before that.  Returns what breaks it off."""
        ...

    def close(self) -> None:
        """End everything that it has started."""
        ...


class LoopHarness:
    """A harness whose episodes are tasks of one event loop, which starts with the first of them."""

    episodes: OutsideHarness | None = None

    def __init__(
        self, name: str, around: Callable[[], AbstractAsyncContextManager[Any]] = contextlib.nullcontext, *, seconds: float
    ) -> None:
        """As of `EventLoop`."""
        self._make = partial(EventLoop, name, around, seconds=seconds)
        self._loop: EventLoop | None = None
        self._lock = threading.Lock()

    def play(self, episode: Coroutine[Any, Any, Ending], finished: Finished) -> Callable[[], None]:
        """Let an episode run beside the others.  Returns what breaks it off."""
        with self._lock:
            loop = self._loop = self._loop or self._make()
        task = loop.begin(self._played(episode, finished))
        return lambda: void(task.cancel())

    async def _played(self, episode: Coroutine[Any, Any, Ending], finished: Finished) -> None:
        try:
            ending = await episode
        except asyncio.CancelledError:
            finished(None, "it was broken off", {})
            raise
        except BaseException as error:  # whatever it is, it is this episode's
            finished(None, str(Raised(described(error))), {})
        else:
            finished(*ending)

    def close(self) -> None:
        """Stop the event loop; what still runs is broken off, and has a moment to clean up."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


class FunctionHarness(LoopHarness):
    """A function `harness(row, base_url, ...) -> reward`, sync or async.

    It gets those of `row`, `base_url`, `api_key`, `model`, `index` and `seed` that it names.  Async ones share an event loop; a
    sync one has a thread.  A thread cannot be killed: one that hangs is left behind, and its requests are refused.
    """

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
            and one.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            and one.name not in known
        ]
        if foreign or "base_url" not in self._names:
            wrong = f"asks for {', '.join(foreign)}" if foreign else "does not take base_url"
            raise ConfigError(f"the harness {getattr(function, '__name__', function)!r} {wrong}: it may name {', '.join(known)}")
        self.function = function

    def start(self, request: EpisodeRequest, finished: Finished) -> Callable[[], None]:
        """Call the function: an asynchronous one as a task of the event loop, any other in a thread."""
        arguments = {name: getattr(request, name) for name in self._names}
        if inspect.iscoroutinefunction(self.function):
            return self.play(self._awaited(arguments), finished)

        def run() -> None:
            try:
                reward = reward_of(self.function(**arguments))
            except BaseException as error:  # whatever it is, it is this episode's
                finished(None, str(Raised(described(error))), {})
            else:
                finished(reward, "", {})

        threads.begin(run, f"harness-{request.id}")
        return lambda: None

    async def _awaited(self, arguments: Mapping[str, Any]) -> Ending:
        return reward_of(await self.function(**arguments)), "", {}


class ProgramHarness:
    """A program, started for each episode.

    The row is on its standard input, as JSON; OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are set.  The last line that it
    prints is the reward, a number or null.  It is ended with all that it has started, also where this process is killed.
    """

    episodes: OutsideHarness | None = None

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._lock = threading.Lock()
        self._process = self._start()

    @staticmethod
    def _start() -> WorkerProcess:
        """The process whose forks start programs, and end with it."""
        return WorkerProcess("groupwise.environments.programs:serve_programs")

    def start(self, request: EpisodeRequest, finished: Finished) -> Callable[[], None]:
        """Start the program and wait for its end in a thread."""
        names = {"OPENAI_BASE_URL": request.base_url, "OPENAI_API_KEY": request.api_key, "OPENAI_MODEL": request.model}
        environment, row = environment_of_others() | names, json.dumps(request.row, default=str)
        with self._lock:
            if not self._process.alive():
                self._process = self._start()
            fork = self._process.fork()

        def run() -> None:
            reward, failure = None, ""
            try:
                status, printed, errors = fork.call(self.command, environment, row, seconds=FOREVER)
                if status != 0:
                    failure = f"it ended with status {status}: {errors.strip()[-2000:]}"
                else:
                    reward = reward_of(json.loads(_last_line(printed)))
            except (Died, Raised, TimeoutError) as error:
                failure = str(error)
            except BaseException as error:  # whatever it is, it is this episode's
                failure = f"its last line is no reward: {error}"
            finally:
                fork.kill()
            finished(reward, failure, {})

        threads.begin(run, f"harness-{request.id}")
        return fork.kill

    def close(self) -> None:
        """Kill every program that runs."""
        self._process.kill()


class OutsideHarness:
    """Processes that somebody else has started fetch episodes: `POST /episodes`, and tell of the end: `POST /episodes/ID/end`.

    They may have packages of their own, and run on another machine.
    """

    def __init__(self) -> None:
        self.episodes: OutsideHarness | None = self
        self._free: queue.Queue[EpisodeRequest] = queue.Queue()
        self._lock = threading.Lock()
        self._known: dict[str, Finished] = {}

    def start(self, request: EpisodeRequest, finished: Finished) -> Callable[[], None]:
        """Queue the episode until a process claims it."""
        with self._lock:
            self._known[request.id] = finished
        self._free.put(request)
        return lambda: self._forget(request.id)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._known.pop(name, None)

    def claim(self, seconds: float, there: Callable[[], bool]) -> Mapping[str, Any] | None:
        """The next queued episode, as JSON; None if none comes within so many seconds, or whoever wanted it has hung up.

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
            with self._lock:
                if request.id in self._known:  # it has not been broken off meanwhile
                    return json.loads(json.dumps(asdict(request), default=str))

    def report(self, episode: str, reward: float | None, failure: str) -> None:
        """Finish the episode with a reward or a failure.  Raises Refused for one that is over or unknown."""
        with self._lock:
            finished = self._known.pop(episode, None)
        if finished is None:
            raise Refused("there is no such episode: it is over, or never was one", HTTPStatus.NOT_FOUND, code="episode_over")
        finished(reward, failure, {})

    def close(self) -> None:
        """Forget the episodes: later reports are refused."""
        with self._lock:
            self._known.clear()


def void(_: object) -> None:
    """Discard a value."""


def reward_of(returned: Any) -> float | None:
    """The reward that a harness returned, as a float or None.  Raises TypeError for anything that is not a number."""
    if returned is None:
        return None
    if isinstance(returned, int | float) or hasattr(returned, "__float__"):  # numpy's and torch's numbers too
        reward = float(returned)
        if math.isnan(reward):
            raise TypeError("the reward is NaN: return None where none can be given")
        return reward
    raise TypeError(f"a harness returns its reward, a number or None; got {returned!r:.80} ({type(returned).__name__})")


def _last_line(printed: str) -> str:
    return next((line.strip() for line in reversed(printed.split("\n")) if line.strip()), "")
