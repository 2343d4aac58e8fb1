"""Calls of reward functions that live in worker processes: each is answered alone, under its deadline.

One process serves the functions of a file (or module) that are not asynchronous and have no `timeout`: they share its state, as in
any Python program, and are called in the order of the recipe.  A function with a `timeout` has a process to itself, so that its end
costs no other's state.  The asynchronous functions of a file share another process, side by side in one event loop that stands
still between calls, while the others are called: they share variables with each other, and with no function that is not
asynchronous.  Training, evaluation, `check` and `score` call them in the same way.  A process that was killed starts again from the
file.  Processes work side by side: each has a thread of this program that waits for it.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.functions import RewardCall
from groupwise.rewards.trainer_state import joined
from groupwise.utils import threads
from groupwise.utils.process_main import Function, message_of, raised_at
from groupwise.utils.processes import Died, NotStarted, Raised, Traceback, WorkerProcess

DEFAULT_SECONDS = 600.0
"""Without a timeout a call that takes longer has failed: a function that hangs must not hold a run for ever."""
SECONDS_EACH = 10.0
"""... or longer than this for each completion of the call, if that is more: an evaluation scores thousands at once."""
GRACE = 5.0
"""Seconds beyond its timeout that an asynchronous function has to be cancelled in, before its process is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a call ended: with values, or in one of three ways that are none."""

    value: Any = None
    failure: Literal["error", "timeout", "died"] | None = None
    """`error`: it raised.  `timeout`: it was killed at the deadline.  `died`: its process ended by itself (a crash, no memory)."""
    message: str = ""
    kind: str = ""
    """Name of the exception's type, for `error`."""
    where: str = ""
    """For `error`: file, line and source where it was raised."""
    cause: BaseException | None = None
    """For `error`: the exception itself, of a worker its traceback."""
    label: str = ""
    """The completion on which it failed, where that is known."""
    late: tuple[int, ...] = ()
    """The completions whose call had no result within the function's own timeout; their value is empty."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What a reward function logged: see `trainer_state.Notes`."""
    seconds: float = 0.0


def failed(error: BaseException, start: float) -> Outcome:
    """The outcome of a call in this process, begun at `start` (time.monotonic), that raised."""
    seconds = time.monotonic() - start
    kind = type(error).__name__
    return Outcome(failure="error", message=message_of(error), kind=kind, where=raised_at(error), cause=error, seconds=seconds)


def outcome_of(call: RewardCall, answer: Mapping[str, Any] | None) -> Outcome | None:
    """What an answer of `functions.Functions` says; None where there is none, because another call had failed."""
    if answer is None:
        return None
    label = call.labels[0] if call.single else ""
    if "error" in answer:
        cause = Traceback(answer["trace"]) if answer["trace"] else None
        words = {"message": answer["error"], "kind": answer["kind"], "where": answer["where"]}
        return Outcome(failure="error", label=label, cause=cause, **words)
    if "late" in answer:
        return _late(call, answer["seconds"])
    return Outcome(value=answer["values"], notes=answer["notes"], seconds=answer["seconds"])


def _late(call: RewardCall, seconds: float) -> Outcome:
    """The outcome of a call without a result in time: with the function's own timeout its completions have no value."""
    if call.reward.timeout is None:
        label = call.labels[0] if call.single and not call.reward.signature.asynchronous else ""
        return Outcome(failure="timeout", message=f"no result within {time_limit(call):g} s", label=label, seconds=seconds)
    return Outcome(
        value=[[] if call.reward.signature.process else None for _ in call.labels],
        late=tuple(range(len(call.labels))),
        seconds=seconds,
    )


def all_together(calls: Sequence[RewardCall], outcomes: Sequence[Outcome | None]) -> Outcome | None:
    """The outcome of all calls of one function: the first failure, else the values of all; None if it was stopped."""
    failure = next((one for one in outcomes if one is not None and one.failure is not None), None)
    ended = [one for one in outcomes if one is not None]
    if failure is not None or len(ended) < len(outcomes):
        return failure
    counts, seconds = [len(call.labels) for call in calls], [one.seconds for one in ended]
    begins = accumulate(counts, initial=0)
    return Outcome(
        value=[value for one in ended for value in one.value],
        late=tuple(begin + n for begin, one in zip(begins, ended, strict=False) for n in one.late),
        notes=joined([one.notes for one in ended], counts),
        seconds=max(seconds, default=0.0) if calls and calls[0].reward.signature.asynchronous else sum(seconds),
    )


def time_limit(call: RewardCall) -> float:
    """Seconds that a call may take."""
    if call.reward.timeout is not None:
        return call.reward.timeout
    return DEFAULT_SECONDS if call.single else max(DEFAULT_SECONDS, SECONDS_EACH * len(call.labels))


class Host:
    """A worker process for functions of one file.  It starts when it is first needed, and again after its end."""

    def __init__(self, live: Callable[..., Function] | None = None) -> None:
        """live: makes what answers requests, in a fork of this process.  Default: functions found by name, in a fresh one."""
        self.live = live
        self.specs: tuple[str, ...] = ()
        """Functions that are imported while it starts."""
        self.folder = os.getcwd()
        self.worker: WorkerProcess | None = None
        self._owner = os.getpid()

    def start(self) -> WorkerProcess:
        """Begin to start, if it does not run."""
        if self._owner != os.getpid():  # a fork of the parent must not talk to the parent's workers
            self.worker, self._owner = None, os.getpid()
        if self.worker is not None and not self.worker.alive():
            self.kill()
        if self.worker is None:
            if self.live is None:
                self.worker = WorkerProcess("groupwise.rewards.functions:worker", self.specs, folder=self.folder)
            else:
                self.worker = WorkerProcess(self.live, folder=self.folder)
        return self.worker

    def ready(self) -> WorkerProcess:
        """Start, and wait until it is.  Raises RewardError."""
        worker = self.start()
        try:
            worker.ready()
        except NotStarted as error:
            serves = "a function of this process" if self.live is not None else ", ".join(self.specs) or "reward functions"
            raise RewardError(f"the worker process of {serves} could not start: {error}") from error.__cause__
        return worker

    def describe(self, spec: str, name: str, arguments: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
        """Import a function; its signature, or what is wrong with it.   name: in the log.

        Raises ConfigError if the process ends meanwhile, or does not come to an end.
        """
        try:
            return self.ready().call("describe", spec, name, dict(arguments), columns, seconds=DEFAULT_SECONDS)
        except TimeoutError:
            why, cause = f"it did not end within {DEFAULT_SECONDS:g} s", None
        except Died as died:
            why, cause = str(died), None
        except Raised as error:
            why, cause = f"{error.kind}: {error.message}", error.__cause__
        raise ConfigError(f"reward function {spec!r}: cannot be imported: {why}") from cause

    def run(self, calls: Sequence[RewardCall], stop: threading.Event) -> list[Outcome | None]:
        """Make calls, asynchronous ones side by side, others in order, until one fails or `stop` is set.  Raises RewardError."""
        outcomes: list[Outcome | None] = []
        together = calls[0].reward.signature.asynchronous
        while len(outcomes) < len(calls):
            left = calls[len(outcomes) :]
            if stop.is_set() or (outcomes and (outcomes[-1] is None or outcomes[-1].failure is not None)):
                return outcomes + [None for _ in left]
            try:
                worker = self.ready()
                worker.request(pickle.dumps(("call", *left)))  # on a busy machine a request for each takes ten times as long
                for call in left:
                    answer = worker.receive(time.monotonic() + time_limit(call) + GRACE * together)
                    outcomes.append(outcome_of(call, answer))
            except TimeoutError:
                self.kill()
                late = calls[len(outcomes) :]
                outcomes += [_late(call, time_limit(call)) for call in (late if together else late[:1])]
            except (Died, Raised) as error:
                self.kill()
                call = calls[len(outcomes)]
                label = call.labels[0] if call.single and not together else ""
                outcomes.append(None if stop.is_set() else Outcome(failure="died", message=str(error), label=label))
        return outcomes

    def kill(self) -> None:
        """Kill the worker, if there is one."""
        worker, self.worker = self.worker, None
        if worker is not None and self._owner == os.getpid():
            worker.kill()

    def end(self) -> None:
        """Have the worker killed; a thread that waits for it sees its end."""
        worker = self.worker
        if worker is not None and self._owner == os.getpid():
            worker.end()


class Running:
    """Calls that are being made in hosts, which work side by side."""

    def __init__(self, calls: Mapping[Host, Sequence[RewardCall]]) -> None:
        self._stop = threading.Event()
        self._hosts: dict[Future[list[Outcome | None]], Host] = {}
        for host, some in calls.items():
            self._hosts[threads.begin(partial(host.run, some, self._stop), "groupwise-rewards")] = host

    def outcomes(self) -> dict[Host, list[Outcome | None]]:
        """Wait until every call has ended, or one has failed: then the others are killed, and have none.  Raises RewardError."""
        waiting = set(self._hosts)
        while waiting:
            ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            if any(one is not None and one.failure is not None for future in ended for one in future.result()):
                self._stop.set()
                for future in waiting:
                    self._hosts[future].end()
        return {host: future.result() for future, host in self._hosts.items()}

    def kill(self) -> None:
        """Break everything off: what comes later is not taken for the answer to another call."""
        self._stop.set()
        for host in self._hosts.values():
            host.kill()
