"""Running tools and environments: in forks of a worker process, each of which can be killed alone, or in threads of this process.

A worker process imports the files once (`worker_process.fork_server`).  Every environment gets a fork of it, in about a
millisecond, with memory of its own: what one episode changes, no other sees.  Tools that are functions have no state of an episode:
their fork is kept for the next calls, as long as nothing had to be stopped in it.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from groupwise.environments.environment import Broken, Ended, Environment, Kind, Result, Stepped
from groupwise.environments.worker_process import Instance, Missing, fork_server
from groupwise.errors import ConfigError, EnvironmentFailure, RewardError
from groupwise.records import Finish
from groupwise.rewards.user_functions import find_named
from groupwise.rewards.worker_process import receive, send, told
from groupwise.rewards.workers import Failed, Worker, WorkerGone
from groupwise.utils.terminal import logger

log = logger(__name__)

FORK_SECONDS = 60.0
"""Longest time that a fork may take: it waits for nothing but the machine."""
DESCRIBE_SECONDS = 120.0
"""Making an environment once, to ask for its tools, on a loaded machine."""
GRACE = 2.0
"""Seconds beyond its deadline that an asynchronous call has to be cancelled in."""


class Lost(Exception):
    """Raised where an instance's process or thread has ended, or was ended; `late` if because a deadline passed."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class Raised(Exception):
    """Raised for an exception in an instance's process or thread, in words (`worker_process.told`)."""

    def __init__(self, said: Mapping[str, str]) -> None:
        super().__init__(f"{said['kind']}: {said['error']}" + (f" ({said['where']})" if said["where"] else ""))
        self.kind, self.error = said["kind"], said["error"]


class Place(Protocol):
    """The process or thread that an `Instance` runs in."""

    def ask(self, request: tuple[Any, ...], seconds: float, answers: int = 1) -> Iterator[Any]:
        """Send a request and yield its answers, each within `seconds` of the one before.  Raises Lost, Raised."""
        ...

    def waits(self) -> bool:
        """True if it is there and has answered everything."""
        ...

    def leave(self) -> None:
        """End it, whatever it is doing; harmless if called again."""
        ...


class ProcessPlace:
    """An instance in a process of its own, forked from a worker that has imported everything (`ForkServer`)."""

    def __init__(self, channel: socket.socket, reap: Callable[[], None]) -> None:
        self._channel = channel
        self._end = weakref.finalize(self, _leave, channel, reap)

    def ask(self, request: tuple[Any, ...], seconds: float, answers: int = 1) -> Iterator[Any]:
        """Send the request to the process and yield its answers.  A process that is late is killed."""
        try:
            send(self._channel, pickle.dumps(request), time.monotonic() + FORK_SECONDS)
            for _ in range(answers):
                reply = json.loads(receive(self._channel, time.monotonic() + seconds))
                if "error" in reply:
                    raise Raised(reply)
                yield reply["value"]
        except TimeoutError:
            self.leave()
            raise Lost(f"no result within {seconds:g} s", late=True) from None
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            self.leave()
            raise Lost("its process has ended") from None

    def waits(self) -> bool:
        """False if the process has ended, by itself or with the worker."""
        try:
            self._channel.settimeout(0.0)
            self._channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def leave(self) -> None:
        """Kill the process."""
        self._end()


def _leave(channel: socket.socket, reap: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)  # whoever waits for an answer sees its end
    reap()
    channel.close()


class ForkServer:
    """This process's end of a worker that forks (`worker_process.fork_server`): started when first needed, again if it dies."""

    def __init__(
        self, tools: Sequence[str], factories: Mapping[str, str], args: Mapping[str, Any], given: Mapping[str, Any]
    ) -> None:
        self._setup = (tuple(map(str, tools)), {name: str(spec) for name, spec in factories.items()}, dict(args))
        self._given = dict(given)
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._folder: str | None = None
        self._listener: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Import what is named.  Raises ConfigError."""
        with self._lock:
            self._started()

    def fork(self, name: str, seed: int) -> ProcessPlace:
        """Fork a process for the environment `name` (empty: tools alone).  Raises EnvironmentFailure, ConfigError."""
        deadline = time.monotonic() + FORK_SECONDS
        with self._lock:
            worker = self._started()
            try:
                worker.request(pickle.dumps(("fork", name, seed)), deadline)
                child = worker.receive(deadline)
                assert self._listener is not None
                self._listener.settimeout(FORK_SECONDS)
                channel, _ = self._listener.accept()
            except (WorkerGone, Failed) as gone:
                raise EnvironmentFailure(f"the worker process of the environment has ended: {gone.outcome.message}") from None
            except OSError as error:
                raise self._cannot_fork(worker, error) from None
        try:  # others may be forked meanwhile
            send(channel, pickle.dumps(()), deadline)
            receive(channel, deadline)  # it has been built
        except (OSError, EOFError) as error:
            channel.close()
            with self._lock:
                raise self._cannot_fork(worker, error) from None
        return ProcessPlace(channel, lambda: self._reap(worker, child))

    def _cannot_fork(self, worker: Worker, error: Exception) -> EnvironmentFailure:
        """A worker whose forks do not answer is ended."""
        worker.kill()
        return EnvironmentFailure(f"the worker process of the environment cannot fork: {error}")

    def _reap(self, worker: Worker, child: int) -> None:
        with self._lock, contextlib.suppress(WorkerGone, Failed):
            if worker is self._worker:
                deadline = time.monotonic() + FORK_SECONDS
                worker.request(pickle.dumps(("reap", child)), deadline)
                worker.receive(deadline)

    def _started(self) -> Worker:
        if self._closed:  # a conversation that was ended, too, has waited for the lock until now
            raise EnvironmentFailure("the environments of this run have been closed")
        if self._worker is not None and not self._worker.alive():
            self._worker.kill()
            self._worker = None
        if self._worker is None:
            if self._listener is None:
                self._folder = tempfile.mkdtemp(prefix="groupwise-")  # nobody else may enter it
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    listener.bind(str(Path(self._folder) / "forks"))
                except OSError as error:  # a socket's path has 107 characters at most
                    listener.close()
                    raise ConfigError(f"no socket can be made in {self._folder} ({error}): set TMPDIR to a shorter path") from error
                listener.listen(64)
                self._listener = listener
            address, given = str(Path(str(self._folder)) / "forks"), self._given
            if given:  # objects of this program: the worker is a fork of it
                self._worker = Worker(partial(fork_server, given=given), (address, *self._setup))
            else:
                self._worker = Worker("groupwise.environments.worker_process:fork_server", (address, *self._setup))
        try:
            self._worker.ready()
        except RewardError as error:
            self._worker = None
            said = str(error)
            raise ConfigError(said.partition("could not start: ")[2] or said) from error.__cause__
        return self._worker

    def close(self) -> None:
        """Kill the worker and all forks; there are no others after that."""
        with self._lock:
            self._closed = True
            if self._worker is not None:
                self._worker.kill()
                self._worker = None
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None


class ThreadPlace:
    """A thread of this process, always the same one for an instance.  It cannot be ended: one that hangs is left behind."""

    def __init__(self, instance: Instance) -> None:
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._gone = False
        threading.Thread(target=self._serve, args=(instance,), name="groupwise-environment", daemon=True).start()

    def ask(self, request: tuple[Any, ...], seconds: float, answers: int = 1) -> Iterator[Any]:
        """Hand the request to the thread and yield its answers.  A thread that is late is left behind."""
        if self._gone:
            raise Lost("it has been ended")
        self._asked.put(request)
        for _ in range(answers):
            try:
                kind, value = self._answers.get(timeout=max(0.0, seconds))
            except queue.Empty:
                self.leave()
                raise Lost(f"no result within {seconds:g} s", late=True) from None
            except BaseException:
                self.leave()  # the answer is nobody else's
                raise
            if kind == "gone":
                raise Lost("it has been ended")
            if kind == "error":
                raise Raised(value)
            yield value

    def waits(self) -> bool:
        """False if it was left."""
        return not self._gone

    def leave(self) -> None:
        """Take no further answer; a thread that hangs cannot be ended."""
        if not self._gone:
            self._gone = True
            self._answers.put(("gone", None))
            self._asked.put(None)

    def _serve(self, instance: Instance) -> None:
        while (request := self._asked.get()) is not None:
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
        self._fork_server = ForkServer(tools, factories, args, given) if runs == "process" else None
        self._functions: dict[str, Callable[..., Any]] = {}
        self._factories: dict[str, Callable[..., Any]] = {}
        if self._fork_server is None:
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
            return next(iter(place.ask(("describe", name or "environment", interface), DESCRIBE_SECONDS)))
        except Raised as error:
            if error.kind == ConfigError.__name__:
                raise ConfigError(error.error) from None
            raise ConfigError(f"the environment {name or 'of the recipe'} cannot be made: {error}") from None
        except Lost as lost:
            raise ConfigError(f"the environment {name or 'of the recipe'} cannot be made: {lost}") from None
        finally:
            place.leave()

    def _kind(self, name: str, facts: Mapping[str, Any]) -> Kind:
        self.asynchronous |= set(facts["asynchronous"])
        return Kind(
            name=name,
            title=facts["class"],
            schemas=tuple(facts["tools"]),
            steps=facts["steps"],
            resets="resets" in facts,
            rewarded=facts["rewarded"],
        )

    def place(self, name: str, seed: int) -> Place:
        """A new process or thread for an environment, or (empty name, no factory) for tools alone."""
        if self._fork_server is not None:
            return self._fork_server.fork(name, seed)
        return ThreadPlace(Instance(self._functions, self._factories.get(name), self._args if name in self._factories else {}))

    def borrow(self) -> Place:
        """A process or thread for calls of functions: one that is idle, else a new one."""
        while True:
            with self._lock:
                place = self._idle.pop() if self._idle else None
            if place is None:
                return self.place("", 0)
            if place.waits():
                return place
            place.leave()

    def give_back(self, place: Place) -> None:
        """Keep a process or thread that has answered everything for the next calls."""
        with self._lock:
            if not self._closed:
                self._idle.append(place)
                return
        place.leave()

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
            self._closed = True
            idle, self._idle = self._idle, []
        if self._fork_server is not None:
            self._fork_server.close()
        for place in idle:
            place.leave()


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
        return self._ask(("reset", dict(row), seed), seconds, "reset()")["observation"]

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
                for said in place.ask(("call", rest, seconds), patience, len(rest)):
                    results.append(_result(said, time.monotonic() - began, seconds))
                    began = time.monotonic()
                if not self._kind.resets:
                    self._give_back(place)
            except (Lost, Raised) as lost:
                late = isinstance(lost, Lost) and lost.late
                if not self._kind.resets:
                    place.leave()
                    self._place = None
                text = f"no result within {seconds:g} s: it was stopped" if late else f"the call failed: {lost}"
                taken = time.monotonic() - began
                results.append(Result(text=error_text(text), seconds=taken, failure="timeout" if late else "exception"))
                if self._kind.resets or self._killed:
                    never = error_text("not carried out: the call before it was stopped")
                    results += [Result(text=never, failure="exception") for _ in calls[len(results) :]]
                    return results, Finish.DEADLINE if late else Finish.ERROR
        return results, None

    def step(self, text: str, *, seconds: float) -> Stepped:
        """Call `step` there."""
        return Stepped(**self._ask(("step", text), seconds, "step()"))

    def end(self, judged: bool, *, seconds: float) -> Ended:
        """Ask for reward and attributes, then end the process or thread."""
        if self._place is None:
            return Ended()
        try:
            ended = self._ask(("end", judged), seconds, "get_reward() or close()")
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
            place.leave()

    def _take(self, place: Place) -> None:
        with self._lock:
            self._place = place
        if self._killed:
            place.leave()

    def _give_back(self, place: Place) -> None:
        """Let the next conversation have it; but one that was ended with this one is nobody's."""
        with self._lock:
            self._place = None
            if not self._killed:
                self._rooms.give_back(place)

    def _ask(self, request: tuple[Any, ...], seconds: float, what: str) -> Any:
        assert self._place is not None
        try:
            return next(iter(self._place.ask(request, seconds)))
        except Lost as lost:
            raise Broken(f"{what} of {self._kind.title}: {lost}", Finish.DEADLINE if lost.late else Finish.ERROR) from None
        except Raised as error:
            if error.kind == Missing.__name__:
                raise ConfigError(f"the environment {self._kind.title}: {error.error}") from None
            if error.kind == EnvironmentFailure.__name__:  # it says all in words
                raise Broken(f"{what} of {self._kind.title}: {error.error}") from None
            raise Broken(f"{what} of {self._kind.title} raised {error}") from None


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
