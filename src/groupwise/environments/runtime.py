"""Running tools and environments: in forks of a worker process, each of which can be killed alone,
or in threads of this process.

A process imports the files once.  Every environment gets a fork of it, in about ten milliseconds,
with memory of its own: what one episode changes, no other sees.  Tools that are functions have no
state of an episode: their fork is kept for the next calls, as long as nothing had to be stopped in
it.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from groupwise.environments.instance import Instance, Instances, MissingColumn, serve_environments
from groupwise.environments.schemas import Schema
from groupwise.errors import ConfigError, DataError, EnvironmentFailure
from groupwise.records import Finish
from groupwise.utils import threads
from groupwise.utils.process_main import described
from groupwise.utils.processes import Died, NotStarted, Raised, WorkerProcess
from groupwise.utils.terminal import logger

log = logger(__name__)

FORK_SECONDS = 60.0
"""Longest time that a fork may take: it waits for nothing but the machine."""
DESCRIBE_SECONDS = 120.0
"""Making an environment once, to ask for its tools, on a loaded machine."""
GRACE = 2.0
"""Seconds beyond its deadline that an asynchronous call has to be cancelled in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentKind:
    """One kind of environment: its tools, whether it has `reset` and `step`, and whether it gives
    rewards.
    """

    name: str
    """The value of the column `environment` that asks for it; empty where there is only one."""
    title: str
    """Name of the environment's class, for messages."""
    schemas: Sequence[Schema] = ()
    """Tools that the policy may call."""
    steps: bool = False
    """True if a turn without a call goes to `step`; else such a turn ends the episode."""
    resets: bool = False
    """True if an episode begins with `reset`; tools alone need none."""
    rewarded: bool = False
    """True if it gives rewards of its own."""
    asynchronous: Sequence[str] = ()
    """Tools whose calls are cancelled where they run, at their deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """The result of one tool call."""

    text: str
    """What the policy reads."""
    seconds: float = 0.0
    failure: str = ""
    """Kind of the failure, as in `records.ToolCall`."""


class EnvironmentBroken(Exception):
    """Raised where an environment cannot continue.  `finish`: DEADLINE if it ran out of time, ERROR
    for any other failure.
    """

    def __init__(self, why: str, finish: Finish = Finish.ERROR) -> None:
        super().__init__(why)
        self.finish = finish


class WorkerThread:
    """A thread of this process, always the same one for an instance.  It cannot be ended: one that
    hangs is left behind.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance, self._thread = instance, threads.Thread("groupwise-environment")
        self._ended: Future[None] = Future()

    def ask(self, *request: Any, seconds: float, answers: int = 1) -> Iterator[Any]:
        """Yield the answers to a request, each within `seconds` of the one before.

        Raises TimeoutError, Died, Raised.
        """
        answer = self._done(partial(self._instance.answer, *request), seconds)
        if request[0] != "call":
            yield answer
            return
        for _ in range(answers):
            yield self._done(partial(next, answer), seconds)

    def _done(self, work: Callable[[], Any], seconds: float) -> Any:
        if self._ended.done():
            raise Died("it has been ended")
        future = self._thread.begin(work)
        try:
            done, _ = wait([future, self._ended], seconds, FIRST_COMPLETED)
        except BaseException:
            self.kill()  # the answer is nobody else's
            raise
        if self._ended in done:
            raise Died("it has been ended")
        if not done:
            self.kill()
            raise TimeoutError
        if (error := future.exception()) is not None:  # somebody else's code, judged by who asked
            raise Raised(described(error))
        return future.result()

    def alive(self) -> bool:
        """False if it was left."""
        return not self._ended.done()

    def kill(self) -> None:
        """Take no further answer; a thread that hangs cannot be ended."""
        with contextlib.suppress(InvalidStateError):  # it was left before
            self._ended.set_result(None)
            self._thread.begin(partial(self._instance.end, False))
            self._thread.close()


Worker = WorkerProcess | WorkerThread
"""What an `Instance` runs in."""


class ToolRuntime:
    """Makes the tools and environments of a run, by name or as objects."""

    def __init__(
        self,
        tools: Sequence[str],
        factories: Mapping[str, str],
        args: Mapping[str, Any],
        *,
        sandbox: Mapping[str, Any] | None = None,
        runs: str = "process",
        objects: Mapping[str, Any] | None = None,
    ) -> None:
        """tools, factories: by name.   objects: those of the names that name no file.   Raises
        ConfigError.
        """
        named: dict[str, str] = {}
        for spec in tools:
            if (name := spec.rpartition(":")[2]) in named:
                raise ConfigError(
                    f"two tools are called {name!r}: {named[name]} and {spec}; the policy tells"
                    " them apart by name"
                )
            named[name] = spec
        self._setup = (
            tuple(map(str, tools)),
            {name: str(spec) for name, spec in factories.items()},
            dict(args),
            dict(sandbox or {}),
        )
        self._objects = dict(objects or {})
        self._instances = (
            Instances(*self._setup, objects=self._objects) if runs == "thread" else None
        )
        self._process: WorkerProcess | None = None
        self._starting = threading.Lock()
        self._idle: list[Worker] = []
        self._closed = False
        self._unclosed: set[str] = set()
        self._lock = threading.Lock()
        try:
            self.kinds: Mapping[str, EnvironmentKind] = {
                name: self._describe(name) for name in factories or {"": ""}
            }
        except BaseException:
            self.close()
            raise

    def _describe(self, name: str) -> EnvironmentKind:
        """What a fresh one says of itself.  Raises ConfigError."""
        worker, what = (
            self.start(name, 0),
            f"the environment {name or 'of the recipe'} cannot be made",
        )
        try:
            facts = next(worker.ask("describe", name or "environment", seconds=DESCRIBE_SECONDS))
        except Raised as error:
            raise ConfigError(
                error.message if error.kind == ConfigError.__name__ else f"{what}: {error}"
            ) from None
        except (TimeoutError, Died) as error:
            raise ConfigError(f"{what}: {_why(error, DESCRIBE_SECONDS)}") from None
        finally:
            worker.kill()
        return EnvironmentKind(name=name, **facts)

    def kind_of(self, row: Mapping[str, Any], where: str) -> EnvironmentKind:
        """The kind of environment that a row asks for.  Raises DataError."""
        if set(self.kinds) == {""}:
            return self.kinds[""]
        name = row.get("environment")
        if not isinstance(name, str) or name not in self.kinds:
            got = (
                "has no column 'environment'"
                if "environment" not in row
                else f"asks for the environment {name!r:.60}"
            )
            raise DataError(f"{where} {got}; environment.factory has: {', '.join(self.kinds)}")
        return self.kinds[name]

    def make(self, kind: EnvironmentKind) -> WorkerEnvironment:
        """An environment that gets its process or thread when its episode begins.  Several threads
        may ask at once.
        """
        return WorkerEnvironment(self, kind)

    def start(self, name: str, seed: int) -> Worker:
        """A new process or thread for an environment, or (empty name, no factory) for tools alone.

        Raises EnvironmentFailure, ConfigError.
        """
        if self._instances is not None:
            return WorkerThread(self._instances.make(name))
        try:
            with self._starting:
                if (
                    self._closed
                ):  # a conversation that was ended, too, has waited for the lock until now
                    raise EnvironmentFailure("the environments of this run have been closed")
                if self._process is None or not self._process.alive():
                    # Objects of this program are those of a fork of it.
                    target = "groupwise.environments.instance:serve_environments"
                    forked = (
                        partial(serve_environments, objects=self._objects)
                        if self._objects
                        else None
                    )
                    self._process = WorkerProcess(forked or target, *self._setup)
                fork = self._process.fork()
            fork.call("begin", name, seed, seconds=FORK_SECONDS)
        except NotStarted as error:
            raise ConfigError(str(error)) from error.__cause__
        except (TimeoutError, Died, Raised) as error:
            raise EnvironmentFailure(
                f"the worker process of the environment cannot fork: {_why(error, FORK_SECONDS)}"
            ) from None
        return fork

    def borrow(self) -> Worker:
        """A process or thread for calls of functions: one that is idle, else a new one."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return self.start("", 0)
            if worker.alive():
                return worker
            worker.kill()

    def give_back(self, worker: Worker) -> None:
        """Hold a process or thread that has answered everything for the next calls."""
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.kill()

    def unclosed(self, title: str, why: str) -> None:
        """Warn that `close` of an environment raises: once for each class."""
        with self._lock:
            known = title in self._unclosed
            self._unclosed.add(title)
        if not known:
            log.warning(
                "close() of %s raised %s; its rewards are kept, and this is not said again",
                title,
                why,
            )

    def close(self) -> None:
        """End the worker process, its forks and idle threads; harmless if called again."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._closed = True
        for worker in idle:
            worker.kill()
        with self._starting:
            process, self._process = self._process, None
        if process is not None:
            process.kill()


class WorkerEnvironment:
    """The surroundings of one episode, in a process or thread of their own.

    Used by one thread at a time, which may wait in it; `kill` may come from another one meanwhile.
    """

    def __init__(self, runtime: ToolRuntime, kind: EnvironmentKind) -> None:
        self._runtime, self._kind = runtime, kind
        self._worker: Worker | None = None
        self._killed = False
        self._lock = threading.Lock()

    def reset(self, row: Mapping[str, Any], *, seed: int, seconds: float) -> str | None:
        """Get a process or thread, and call `reset` there; its text is added to the prompt's last
        message.  None for tools alone.

        seed: the same for all completions of a prompt.   Raises EnvironmentBroken.
        """
        if not self._kind.resets:
            return None
        self._take(self._runtime.start(self._kind.name, seed))
        return self._ask("reset", dict(row), seed, seconds=seconds, what="reset()")

    def call(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], *, seconds: float
    ) -> tuple[list[ToolResult], Finish | None]:
        """Carry the calls out, each for at most `seconds`; a result for each, in their order.

        Tools alone get a new process after one that was stopped.  An environment ends with it: then
        also why the episode is over."""
        results: list[ToolResult] = []
        while len(results) < len(calls):
            if not self._kind.resets:
                self._take(self._runtime.borrow())
            worker = self._worker
            assert worker is not None, "a call before reset"
            began = time.monotonic()
            try:
                rest = list(calls[len(results) :])
                patience = seconds + (
                    GRACE if any(name in self._kind.asynchronous for name, _ in rest) else 0.0
                )
                for answer in worker.ask(
                    "call", rest, seconds, seconds=patience, answers=len(rest)
                ):
                    results.append(_result(answer, time.monotonic() - began, seconds))
                    began = time.monotonic()
                if not self._kind.resets:
                    self._give_back(worker)
            except (TimeoutError, Died, Raised) as error:
                taken = time.monotonic() - began
                if late := isinstance(error, TimeoutError):
                    results.append(_result({"late": True}, taken, seconds))
                else:
                    results.append(_result({"error": f"the call failed: {error}"}, taken, seconds))
                if self._kind.resets or self._killed:
                    never = _result(
                        {"error": "not carried out: the call before it was stopped"}, 0.0, seconds
                    )
                    results += [never] * (len(calls) - len(results))
                    return results, Finish.DEADLINE if late else Finish.ERROR
                worker.kill()
                self._worker = None
        return results, None

    def step(self, text: str, *, seconds: float) -> tuple[str, float | None, bool]:
        """Call `step` with what the policy wrote: observation, reward, whether the episode is over.
        Raises EnvironmentBroken.
        """
        observation, reward, done = self._ask("step", text, seconds=seconds, what="step()")
        return observation, reward, done

    def end(self, judged: bool, *, seconds: float) -> tuple[float | None, Mapping[str, Any] | None]:
        """The episode is over: its reward and the environment's public attributes, if `judged`; the
        process or thread ends.

        Raises EnvironmentBroken.
        """
        if self._worker is None:
            return None, None
        try:
            reward, state, raised = self._ask(
                "end", judged, seconds=seconds, what="get_reward() or close()"
            )
        finally:
            self.kill()
        if raised is not None:
            self._runtime.unclosed(self._kind.title, str(Raised(raised)))
        return reward, state

    def kill(self) -> None:
        """End the process or thread, now or as soon as there is one."""
        with self._lock:
            self._killed, worker = True, self._worker
        if worker is not None:
            worker.kill()

    def _take(self, worker: Worker) -> None:
        with self._lock:
            self._worker = worker
        if self._killed:
            worker.kill()

    def _give_back(self, worker: Worker) -> None:
        """Lend it to the next conversation; one that was killed with this one is lent no more."""
        with self._lock:
            self._worker = None
            if not self._killed:
                self._runtime.give_back(worker)

    def _ask(self, *request: Any, seconds: float, what: str) -> Any:
        assert self._worker is not None
        what = f"{what} of {self._kind.title}"
        try:
            return next(self._worker.ask(*request, seconds=seconds))
        except (TimeoutError, Died) as error:
            finish = Finish.DEADLINE if isinstance(error, TimeoutError) else Finish.ERROR
            raise EnvironmentBroken(f"{what}: {_why(error, seconds)}", finish) from None
        except Raised as error:
            if error.kind == MissingColumn.__name__:
                raise ConfigError(f"the environment {self._kind.title}: {error.message}") from None
            if error.kind == EnvironmentFailure.__name__:  # it says all in words
                raise EnvironmentBroken(f"{what}: {error.message}") from None
            raise EnvironmentBroken(f"{what} raised {error}") from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            why = f"{what} gets a value that cannot be sent to a process ({error})"
            raise ConfigError(f"{why}; set environment.runs: thread") from error


def _why(error: Exception, seconds: float) -> str:
    return f"no result within {seconds:g} s" if isinstance(error, TimeoutError) else str(error)


def error_text(why: str) -> str:
    """The text that the policy gets for a call that gave no result.

    >>> error_text("no such tool")
    '{"error": "no such tool"}'
    """
    return json.dumps({"error": why}, ensure_ascii=False)


def _result(answer: Mapping[str, Any], taken: float, limit: float) -> ToolResult:
    if "result" in answer:
        return ToolResult(text=answer["result"], seconds=taken)
    late = answer.get("late", False)
    why = (
        f"no result within {limit:g} s: it was stopped"
        if late
        else answer["error"] or answer["kind"]
    )
    return ToolResult(
        text=error_text(why), seconds=taken, failure="timeout" if late else "exception"
    )
