"""Calling functions that live in worker processes: requests out to all of them at once, messages in, each under its deadline.

One process serves the functions of a file (or module) that are not asynchronous and have no `timeout`: they share its state, as in
any Python program, and are called in the order of the recipe.  A function with a `timeout` has a process to itself, so that its end
costs no other's state.  The asynchronous functions of a file share another process, side by side in one event loop that stands
still between calls, while the others are called: they share variables with each other, and with no function that is not
asynchronous.  Training, evaluation, `check` and `score` call them in the same way.  A process that was killed starts again from the
file.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards import timeouts
from groupwise.rewards.functions import Unit
from groupwise.rewards.outcomes import Outcome
from groupwise.rewards.trainer_state import joined
from groupwise.utils.process_main import Function
from groupwise.utils.processes import SEND_SECONDS, Died, NotStarted, Process, Raised, Traceback


class Host:
    """A worker process for functions of one file.  It starts when it is first needed, and again after its end."""

    def __init__(self, live: Callable[..., Function] | None = None) -> None:
        """live: makes what answers requests, in a fork of this process.  Default: functions found by name, in a fresh one."""
        self.live = live
        self.specs: tuple[str, ...] = ()
        """Functions that are imported while it starts."""
        self.folder = os.getcwd()
        self.worker: Process | None = None
        self._owner = os.getpid()

    def start(self) -> Process:
        """Begin to start, if it does not run."""
        if self._owner != os.getpid():  # a fork of the parent must not talk to the parent's workers
            self.worker, self._owner = None, os.getpid()
        if self.worker is not None and not self.worker.alive():
            self.kill()
        if self.worker is None:
            if self.live is None:
                self.worker = Process("groupwise.rewards.functions:worker", self.specs, folder=self.folder)
            else:
                self.worker = Process(self.live, folder=self.folder)
        return self.worker

    def ready(self) -> Process:
        """Start, and wait until it is.  Raises RewardError."""
        worker = self.start()
        try:
            worker.ready()
        except NotStarted as error:
            raise RewardError(f"the worker process of {self.named} could not start: {error}") from error.__cause__
        return worker

    @property
    def named(self) -> str:
        """What it serves, for messages."""
        return "a function of this process" if self.live is not None else ", ".join(self.specs) or "reward functions"

    def describe(self, functions: Sequence[tuple[str, str, dict[str, Any], Sequence[str]]]) -> list[dict[str, Any]]:
        """Import functions, given as name, name in the log, arguments and columns; signatures, or what is wrong with them.

        Raises ConfigError if the process ends meanwhile, or does not come to an end.
        """
        specs = ", ".join(repr(one[0]) for one in functions)
        try:
            return self.ready().call("describe", *functions, seconds=timeouts.DEFAULT_SECONDS)
        except TimeoutError:
            ended = f"it did not end within {timeouts.DEFAULT_SECONDS:g} s"
            raise ConfigError(f"reward function {specs}: cannot be imported: {ended}") from None
        except Died as died:
            raise ConfigError(f"reward function {specs}: cannot be imported: {died}") from None
        except Raised as error:
            raise ConfigError(f"reward function {specs}: cannot be imported: {error.kind}: {error.message}") from error.__cause__

    def kill(self) -> None:
        """Kill the worker, if there is one."""
        if self.worker is not None and self._owner == os.getpid():
            self.worker.kill()
        self.worker = None

    def end(self) -> None:
        """Have the worker killed; a thread that waits for it sees its end."""
        worker = self.worker
        if worker is not None and self._owner == os.getpid():
            worker.end()


class Answers:
    """Collects the messages of a worker (`functions.Functions`) until each call has an outcome."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        self.outcomes: list[Outcome | None] = [None if unit.labels else Outcome(value=[]) for unit in units]
        self._rows: list[list[Any]] = [[] for _ in units]
        self._late: list[list[int]] = [[] for _ in units]
        self._notes: list[list[dict[str, Any]]] = [[] for _ in units]
        self._seconds = [0.0 for _ in units]

    @property
    def done(self) -> bool:
        """True if every call has ended."""
        return all(outcome is not None for outcome in self.outcomes)

    @property
    def failed(self) -> bool:
        """True if a call failed in a way that ends the run."""
        return any(
            o is not None and (o.failure in ("error", "died") or (o.failure == "timeout" and unit.timeout is None))
            for o, unit in zip(self.outcomes, self.units, strict=True)
        )

    def take(self, n: int, kind: str, what: Any) -> None:
        """Take in a message of unit n."""
        if kind == "row":
            self._seconds[n] += what[1]
            self._add(n, what[0], what[2])
        elif kind == "values":
            values, late, seconds, notes = what
            self.outcomes[n] = Outcome(value=values, late=tuple(late), seconds=seconds, notes=notes)
        else:
            cause = Traceback(what["trace"]) if what["trace"] else None
            self.outcomes[n] = Outcome(
                failure="error",
                message=what["error"],
                kind=what["kind"],
                where=what["where"],
                label=what["label"],
                cause=cause,
                seconds=self._seconds[n],
            )

    def late(self, n: int) -> None:
        """Record that unit n was killed at its deadline.

        A function of one completion loses the call that was running, any other function all results.
        """
        unit = self.units[n]
        self._seconds[n] += timeouts.time_limit(unit)
        if unit.single and unit.timeout is not None and not unit.asynchronous:
            self._late[n].append(len(self._rows[n]))
            self._add(n, [] if unit.process else None)
        else:
            self._end(n, "timeout", f"no result within {timeouts.time_limit(unit):g} s")

    def _add(self, n: int, value: Any, notes: dict[str, Any] | None = None) -> None:
        self._rows[n].append(value)
        self._notes[n].append(notes or {})
        if len(self._rows[n]) == len(self.units[n].labels):
            logged = joined(self._notes[n], [1] * len(self._rows[n]))
            self.outcomes[n] = Outcome(value=self._rows[n], late=tuple(self._late[n]), seconds=self._seconds[n], notes=logged)

    def _end(self, n: int, how: Literal["timeout", "died"], message: str) -> None:
        unit = self.units[n]
        label = unit.labels[len(self._rows[n])] if unit.single and not unit.asynchronous else ""
        self.outcomes[n] = Outcome(failure=how, message=message, label=label, seconds=self._seconds[n])


class Task(Answers):
    """Functions that are being called in one host."""

    def __init__(self, host: Host, units: Sequence[Unit]) -> None:
        super().__init__(units)
        self.host, self.deadline = host, 0.0
        self._sent: list[int] = []

    def begin(self) -> None:
        """Send what has not ended yet."""
        self._sent = self._running(range(len(self.units)))
        if not self._sent:
            return
        worker = self.host.ready()
        units = [self.units[n].after(len(self._rows[n])) if self._rows[n] else self.units[n] for n in self._sent]
        with self._watched():
            worker.request(pickle.dumps(("call", *units)))
        self._wait()

    def read(self) -> None:
        """Take in one message that has come."""
        worker = self.host.worker
        assert worker is not None
        with self._watched():
            n, kind, what = worker.receive(time.monotonic() + SEND_SECONDS)
            self.take(self._sent[n], kind, what)
            self._wait()

    def expire(self) -> None:
        """The deadline has passed: kill the worker and continue with the remaining calls."""
        self.host.kill()
        running = self._running(self._sent)
        for n in running if self.units[running[0]].asynchronous else running[:1]:
            self.late(n)
        if not self.failed:
            self.begin()

    def _running(self, among: Iterable[int]) -> list[int]:
        return [n for n in among if self.outcomes[n] is None]

    def _wait(self) -> None:
        """Set the deadline of the next message."""
        running = [self.units[n] for n in self._running(self._sent)]
        if running:
            both = [timeouts.time_limit(unit) for unit in running if unit.asynchronous]
            self.deadline = time.monotonic() + (max(both) + timeouts.GRACE if both else timeouts.time_limit(running[0]))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """While inside, the death of the worker is recorded as the outcome of the call."""
        try:
            yield
        except (TimeoutError, Died, Raised) as error:
            self.host.kill()
            why = "its process does not answer" if isinstance(error, TimeoutError) else str(error)
            self._end(self._running(self._sent)[0], "died", why)


def finish(tasks: Sequence[Task]) -> None:
    """Wait until every call has ended, or one has failed: then the others are killed, and have no outcome."""
    selector, registered = selectors.DefaultSelector(), dict[Task, Process | None]()
    try:
        while not any(task.failed for task in tasks):
            waiting = {task: task.host.worker for task in tasks if not task.done}
            if not waiting:
                return
            if waiting != registered:  # a process has ended, or taken another's place
                selector.close()
                selector, registered = selectors.DefaultSelector(), waiting
                for task, worker in waiting.items():
                    assert worker is not None
                    selector.register(worker, selectors.EVENT_READ, task)
            left = min(task.deadline for task in waiting) - time.monotonic()
            ready = {key.data for key, _ in selector.select(max(0.0, left))}
            for task in ready:
                task.read()
            now = time.monotonic()
            for task in waiting:
                if task not in ready and not task.done and task.deadline <= now:
                    task.expire()
    finally:
        selector.close()
        for task in tasks:
            if not task.done:
                task.host.kill()
