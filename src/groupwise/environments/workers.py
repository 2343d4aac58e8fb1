"""Running tools and environments: in forks of a worker process, each of which can be killed alone, or in threads of this process.

A process imports the files once.  Every environment gets a fork of it, in about ten milliseconds, with memory of its own: what one
episode changes, no other sees.  Tools that are functions have no state of an episode: their fork is kept for the next calls, as
long as nothing had to be stopped in it.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from groupwise.environments.environment import Broken, Ended, Environment, Kind, Result, Stepped
from groupwise.environments.worker_process import Instance, Missing, serve_environments
from groupwise.errors import ConfigError, EnvironmentFailure
from groupwise.records import Finish
from groupwise.rewards.user_functions import find_named
from groupwise.utils import threads
from groupwise.utils.process_main import told
from groupwise.utils.processes import Died, NotStarted, Process, Raised
from groupwise.utils.terminal import logger

log = logger(__name__)

FORK_SECONDS = 60.0
"""Longest time that a fork may take: it waits for nothing but the machine."""
DESCRIBE_SECONDS = 120.0
"""Making an environment once, to ask for its tools, on a loaded machine."""
GRACE = 2.0
"""Seconds beyond its deadline that an asynchronous call has to be cancelled in."""


class Place(Protocol):
    """The process or thread that an `Instance` runs in (`processes.Process`, `Thread`)."""

    def ask(self, *request: Any, seconds: float, answers: int = 1) -> Iterator[Any]:
        """Its answers to a request, each within `seconds` of the one before.  Raises TimeoutError, Died, Raised."""
        ...

    def alive(self) -> bool:
        """True if it is there and has answered everything."""
        ...

    def kill(self) -> Any:
        """End it, whatever it is doing; harmless if called again."""
        ...


class Thread:
    """A thread of this process, always the same one for an instance.  It cannot be ended: one that hangs is left behind."""

    def __init__(self, instance: Instance) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = False
        threads.begin(partial(self._serve, instance), "groupwise-environment")

    def ask(self, *request: Any, seconds: float, answers: int = 1) -> Iterator[Any]:
        """Hand the request to the thread and yield its answers.  A thread that is late is left behind."""
        if self._ended:
            raise Died("it has been ended")
        self._requests.put(request)
        for _ in range(answers):
            try:
                kind, value = self._answers.get(timeout=max(0.0, seconds))
            except queue.Empty:
                self.kill()
                raise TimeoutError from None
            except BaseException:
                self.kill()  # the answer is nobody else's
                raise
            if kind == "ended":
                raise Died("it has been ended")
            if kind == "error":
                raise Raised(value)
            yield value

    def alive(self) -> bool:
        """False if it was left."""
        return not self._ended

    def kill(self) -> None:
        """Take no further answer; a thread that hangs cannot be ended."""
        if not self._ended:
            self._ended = True
            self._answers.put(("ended", None))
            self._requests.put(None)

    def _serve(self, instance: Instance) -> None:
        while (request := self._requests.get()) is not None:
            try:
                answer = instance.answer(*request)
                for value in answer if request[0] == "call" else (answer,):
                    self._answers.put(("value", value))
            except BaseException as error:  # somebody else's code, judged by who asked
                self._answers.put(("error", told(error)))
        with contextlib.suppress(BaseException):  # nobody is left to be told
            instance.end(False)


class Rooms:
    """A `Source` of tools and environments that run here: given by name or as objects."""

    def __init__(
        self,
        tools: Sequence[str],
        factories: Mapping[str, str],
        args: Mapping[str, Any],
        *,
        interface: str | None = None,
        runs: str = "process",
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """tools, factories: by name.   given: objects for those names that name no file.   Raises ConfigError."""
        named: dict[str, str] = {}
        for spec in tools:
            if (name := spec.rpartition(":")[2]) in named:
                raise ConfigError(f"two tools are called {name!r}: {named[name]} and {spec}; the policy tells them apart by name")
            named[name] = spec
        self._args, self._runs, given = dict(args), runs, dict(given or {})
        self._setup = (tuple(map(str, tools)), {name: str(spec) for name, spec in factories.items()}, self._args)
        self._given = given
        self._process: Process | None = None
        self._starting = threading.Lock()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._factories: dict[str, Callable[..., Any]] = {}
        if runs == "thread":
            self._functions = {spec.rpartition(":")[2]: find_named(spec, "tool", given) for spec in tools}
            self._factories = {name: find_named(spec, "environment", given) for name, spec in factories.items()}
        self.asynchronous: set[str] = set()
        """Tools that are cancelled where they live, at their deadline."""
        self._idle: list[Place] = []
        self._closed = False
        self._unclosed: set[str] = set()
        self._lock = threading.Lock()
        try:
            described = {name: self._describe(name, interface) for name in factories or {"": ""}}
            self.kinds: Mapping[str, Kind] = {name: self._kind(name, found) for name, found in described.items()}
        except BaseException:
            self.close()
            raise

    def _describe(self, name: str, interface: str | None) -> dict[str, Any]:
        place = self.place(name, 0)
        try:
            return next(place.ask("describe", name or "environment", interface, seconds=DESCRIBE_SECONDS))
        except Raised as error:
            if error.kind == ConfigError.__name__:
                raise ConfigError(error.message) from None
            raise ConfigError(f"the environment {name or 'of the recipe'} cannot be made: {error}") from None
        except (TimeoutError, Died) as error:
            why = _why(error, DESCRIBE_SECONDS)
            raise ConfigError(f"the environment {name or 'of the recipe'} cannot be made: {why}") from None
        finally:
            place.kill()

    def _kind(self, name: str, facts: Mapping[str, Any]) -> Kind:
        self.asynchronous |= set(facts["asynchronous"])
        return Kind(
            name=name,
            title=facts["class"],
            schemas=tuple(facts["tools"]),
            steps=facts["steps"],
            resets=facts["resets"],
            rewarded=facts["rewarded"],
        )

    def place(self, name: str, seed: int) -> Place:
        """A new process or thread for an environment, or (empty name, no factory) for tools alone.

        Raises EnvironmentFailure, ConfigError.
        """
        if self._runs == "thread":
            return Thread(Instance(self._functions, self._factories.get(name), self._args if name in self._factories else {}))
        try:
            with self._starting:
                if self._closed:  # a conversation that was ended, too, has waited for the lock until now
                    raise EnvironmentFailure("the environments of this run have been closed")
                if self._process is None or not self._process.alive():
                    self._process = self._start()
                fork = self._process.fork()
            fork.call("begin", name, seed, seconds=FORK_SECONDS)
        except NotStarted as error:
            raise ConfigError(str(error)) from error.__cause__
        except (TimeoutError, Died, Raised) as error:
            raise EnvironmentFailure(f"the worker process of the environment cannot fork: {_why(error, FORK_SECONDS)}") from None
        return fork

    def _start(self) -> Process:
        """The process that imports what is named; objects of this program it has as a fork of it."""
        if self._given:
            return Process(partial(serve_environments, given=self._given), *self._setup)
        return Process("groupwise.environments.worker_process:serve_environments", *self._setup)

    def borrow(self) -> Place:
        """A process or thread for calls of functions: one that is idle, else a new one."""
        while True:
            with self._lock:
                place = self._idle.pop() if self._idle else None
            if place is None:
                return self.place("", 0)
            if place.alive():
                return place
            place.kill()

    def give_back(self, place: Place) -> None:
        """Keep a process or thread that has answered everything for the next calls."""
        with self._lock:
            if not self._closed:
                self._idle.append(place)
                return
        place.kill()

    def unclosed(self, title: str, why: str) -> None:
        """Say that `close` of an environment raises: once of each class."""
        with self._lock:
            known = title in self._unclosed
            self._unclosed.add(title)
        if not known:
            log.warning("close() of %s raised %s; its rewards are kept, and this is not said again", title, why)

    def make(self, kind: Kind) -> Environment:
        """An environment that gets its process or thread when its episode begins."""
        return Housed(self, kind)

    def close(self) -> None:
        """End the worker process, its forks and idle threads."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._closed = True
        for place in idle:
            place.kill()
        with self._starting:
            process, self._process = self._process, None
        if process is not None:
            process.kill()


class Housed:
    """An `Environment` that runs in a process or thread of its own."""

    def __init__(self, rooms: Rooms, kind: Kind) -> None:
        self._rooms, self._kind = rooms, kind
        self._place: Place | None = None
        self._killed = False
        self._lock = threading.Lock()  # another thread may kill at any time

    def reset(self, row: Mapping[str, Any], *, seed: int, seconds: float) -> str | None:
        """Get a process or thread, and call `reset` there; None for tools alone."""
        if not self._kind.resets:
            return None
        self._take(self._rooms.place(self._kind.name, seed))
        return self._ask("reset", dict(row), seed, seconds=seconds, what="reset()")["observation"]

    def call(self, calls: Sequence[tuple[str, Mapping[str, Any]]], *, seconds: float) -> tuple[list[Result], Finish | None]:
        """Carry the calls out in order.  Tools alone get a new process after one that was stopped; an environment ends with it."""
        results: list[Result] = []
        while len(results) < len(calls):
            if not self._kind.resets:
                self._take(self._rooms.borrow())
            place = self._place
            assert place is not None, "a call before reset"
            began = time.monotonic()
            try:
                rest = list(calls[len(results) :])
                patience = seconds + (GRACE if any(name in self._rooms.asynchronous for name, _ in rest) else 0.0)
                for said in place.ask("call", rest, seconds, seconds=patience, answers=len(rest)):
                    results.append(_result(said, time.monotonic() - began, seconds))
                    began = time.monotonic()
                if not self._kind.resets:
                    self._give_back(place)
            except (TimeoutError, Died, Raised) as error:
                late = isinstance(error, TimeoutError)
                if not self._kind.resets:
                    place.kill()
                    self._place = None
                text = f"{_why(error, seconds)}: it was stopped" if late else f"the call failed: {error}"
                taken = time.monotonic() - began
                results.append(Result(text=error_text(text), seconds=taken, failure="timeout" if late else "exception"))
                if self._kind.resets or self._killed:
                    never = error_text("not carried out: the call before it was stopped")
                    results += [Result(text=never, failure="exception") for _ in calls[len(results) :]]
                    return results, Finish.DEADLINE if late else Finish.ERROR
        return results, None

    def step(self, text: str, *, seconds: float) -> Stepped:
        """Call `step` there."""
        return Stepped(**self._ask("step", text, seconds=seconds, what="step()"))

    def end(self, judged: bool, *, seconds: float) -> Ended:
        """Ask for reward and attributes, then end the process or thread."""
        if self._place is None:
            return Ended()
        try:
            ended = self._ask("end", judged, seconds=seconds, what="get_reward() or close()")
        finally:
            self.kill()
        if (raised := ended.pop("unclosed")) is not None:
            self._rooms.unclosed(self._kind.title, str(Raised(raised)))
        return Ended(**ended)

    def kill(self) -> None:
        """End the process or thread, now or as soon as there is one."""
        with self._lock:
            self._killed, place = True, self._place
        if place is not None:
            place.kill()

    def _take(self, place: Place) -> None:
        with self._lock:
            self._place = place
        if self._killed:
            place.kill()

    def _give_back(self, place: Place) -> None:
        """Let the next conversation have it; but one that was ended with this one is nobody's."""
        with self._lock:
            self._place = None
            if not self._killed:
                self._rooms.give_back(place)

    def _ask(self, *request: Any, seconds: float, what: str) -> Any:
        assert self._place is not None
        try:
            return next(self._place.ask(*request, seconds=seconds))
        except (TimeoutError, Died) as error:
            late = isinstance(error, TimeoutError)
            why = f"{what} of {self._kind.title}: {_why(error, seconds)}"
            raise Broken(why, Finish.DEADLINE if late else Finish.ERROR) from None
        except Raised as error:
            if error.kind == Missing.__name__:
                raise ConfigError(f"the environment {self._kind.title}: {error.message}") from None
            if error.kind == EnvironmentFailure.__name__:  # it says all in words
                raise Broken(f"{what} of {self._kind.title}: {error.message}") from None
            raise Broken(f"{what} of {self._kind.title} raised {error}") from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            why = f"{what} of {self._kind.title} gets a value that cannot be sent to a process ({error})"
            raise ConfigError(f"{why}; set environment.runs: thread") from error


def _why(error: Exception, seconds: float) -> str:
    return f"no result within {seconds:g} s" if isinstance(error, TimeoutError) else str(error)


def error_text(why: str) -> str:
    """The text that the policy gets for a call that gave no result.

    >>> error_text("no such tool")
    '{"error": "no such tool"}'
    """
    return json.dumps({"error": why}, ensure_ascii=False)


def _result(said: Mapping[str, Any], taken: float, limit: float) -> Result:
    if "result" in said:
        return Result(text=said["result"], seconds=taken)
    if said.get("late"):
        return Result(text=error_text(f"no result within {limit:g} s: it was stopped"), seconds=taken, failure="timeout")
    why = said["error"] if said["error"] else said["kind"]
    return Result(text=error_text(why), seconds=taken, failure="exception")
