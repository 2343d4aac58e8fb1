"""Calls of reward functions that live in worker processes: each is answered alone, under its
deadline.

One process serves the functions of a file (or module): they share its variables, as in any Python
program.  The plain ones are called in the order of the recipe, then the asynchronous ones side by
side, in one event loop that stands still between calls.  A plain function with a `timeout` has a
process to itself, so that its end costs no other's variables.  Training, evaluation, `check` and
`score` call them in the same way.  All calls on a batch go to a process in one request, and each is
answered on its own: a request for each row took ten times as long on a busy machine.  A process
that was killed starts again from the file.  Processes
work side by side: each has a thread of this program that waits for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from groupwise.config.live_objects import LIVE
from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.functions import RewardCall
from groupwise.rewards.trainer_state import joined
from groupwise.rewards.user_functions import Reward, Signature
from groupwise.utils.process_main import Function
from groupwise.utils.processes import Died, NotStarted, Raised, Traceback, WorkerProcess
from groupwise.utils.terminal import escaped

DEFAULT_SECONDS = 600.0
"""Without a timeout a call that takes longer has failed: a function that hangs must not hold a run
for ever.
"""
SECONDS_EACH = 10.0
"""... or longer than this for each completion of the call, if that is more: an evaluation scores
thousands at once.
"""
GRACE = 5.0
"""Seconds beyond its timeout that an asynchronous function has to be cancelled in, before its
process is killed.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What calls of a function gave."""

    values: list[Any]
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the function logged: see `trainer_state.Notes`."""
    seconds: float
    late: tuple[int, ...] = ()
    """The completions whose call had no result within the function's own timeout; their value is
    empty.
    """


def described(labels: Sequence[str]) -> str:
    """Completions in a message.

    >>> described(["0 of row 5", "1 of row 5"]), described(["0 of row 5"] * 4)
    ('completions 0 of row 5, 1 of row 5', 'completions 0 of row 5, 0 of row 5, 0 of row 5 ... (4 in all)')
    """
    more = f" ... ({len(labels)} in all)" if len(labels) > 3 else ""
    return f"completion{'s' * (len(labels) > 1)} {', '.join(labels[:3])}{more}"


Texts = tuple[str, str]
"""The end of a prompt and the beginning of a completion."""


def raised(
    reward: Reward, labels: Sequence[str], words: Mapping[str, str], texts: Texts | None = None
) -> RewardError:
    """The error of a call that raised.   words: of `process_main.described`."""
    if words["kind"] == "RewardError":
        return failure(reward, words["error"], texts)
    where = f" ({words['where']})" if words["where"] else ""
    on = (
        "on" if texts is None or reward.signature.single else "probably on"
    )  # by variables, which outlive their loop
    happened = f"raised {words['kind']}: {words['error']}{where}"
    return failure(
        reward, f"the reward function {reward.name!r} {happened}; {on} {described(labels)}", texts
    )


def failure(reward: Reward, message: str, texts: Texts | None) -> RewardError:
    """The error of a call that did not end with a value.   texts: of the one completion, to be
    quoted.
    """
    quoted = "" if texts is None else f"; the completion: {texts[1]!r}, the prompt: {texts[0]!r}"
    error = RewardError(escaped(message, keep="") + quoted)
    error.of_file = not reward.spec.startswith(LIVE)
    return error


def outcomes_of(
    calls: Sequence[RewardCall], answers: Sequence[Mapping[str, Any] | None]
) -> list[Outcome]:
    """What answers of `functions.Functions` say.  Raises RewardError for one that says what went
    wrong.
    """
    outcomes = []
    for call, answer in zip(calls, answers, strict=False):
        if answer is None:
            continue  # after another one's failure
        if "error" in answer:
            place: int | None = answer["index"]
            labels = call.labels if place is None else [call.labels[place]]
            error = raised(
                call.reward, labels, answer, None if place is None else call.texts[place]
            )
            raise error from (Traceback(answer["trace"]) if answer["trace"] else None)
        outcomes.append(
            out_of_time(call, answer["late"], [call]) if "late" in answer else Outcome(**answer)
        )
    return outcomes


def out_of_time(call: RewardCall, seconds: float, late: Sequence[RewardCall]) -> Outcome:
    """The outcome of a call without a result in time.   late: all such calls.

    Raises RewardError unless it is the function's own timeout.
    """
    if call.reward.timeout is not None:
        values: list[Any] = [[] if call.reward.signature.process else None for _ in call.labels]
        return Outcome(values=values, late=tuple(range(len(values))), seconds=seconds)
    labels = [label for one in late if one.reward == call.reward for label in one.labels]
    raise RewardError(
        f"the reward function {call.reward.name!r} gave no result within {time_limit(call):g} s and"
        f" was stopped; on {described(labels)}; if it may take so long, say how long by timeout:"
        " (calls without a result then count as None as long as they are few)"
    )


def all_together(ended: Sequence[tuple[RewardCall, Outcome]]) -> Outcome:
    """The outcome of all calls of one function."""
    counts, seconds = [len(call.labels) for call, _ in ended], [one.seconds for _, one in ended]
    begins = accumulate(counts, initial=0)
    return Outcome(
        values=[value for _, one in ended for value in one.values],
        late=tuple(
            begin + n for begin, (_, one) in zip(begins, ended, strict=False) for n in one.late
        ),
        notes=joined([one.notes for _, one in ended], counts),
        seconds=max(seconds, default=0.0) if ended and ended[0][0].asynchronous else sum(seconds),
    )


def order_of(call: RewardCall) -> tuple[bool, float]:
    """By which calls of a process are sorted: plain ones come first, asynchronous ones are answered
    by their deadlines.
    """
    return (call.asynchronous, time_limit(call) if call.asynchronous else 0.0)


def time_limit(call: RewardCall) -> float:
    """Seconds that a call may take."""
    if call.reward.timeout is not None:
        return call.reward.timeout
    return DEFAULT_SECONDS if call.single else max(DEFAULT_SECONDS, SECONDS_EACH * len(call.labels))


class Host:
    """A worker process for functions of one file.  It starts when it is first needed, and again
    after its end.
    """

    def __init__(self, live: Callable[..., Function] | None = None) -> None:
        """live: makes what answers requests, in a fork of this process.  Default: functions found
        by name, in a fresh one.
        """
        self.live = live
        self.specs: list[str] = []
        """Functions that are imported while it starts."""
        self.folder = os.getcwd()
        self.worker: WorkerProcess | None = None

    def start(self) -> WorkerProcess:
        """Begin to start, if it does not run."""
        if self.worker is None or not self.worker.alive():
            self.kill()
            setup = () if self.live is not None else (self.specs,)
            self.worker = WorkerProcess(
                self.live or "groupwise.rewards.functions:worker", *setup, folder=self.folder
            )
        return self.worker

    def ready(self) -> WorkerProcess:
        """Start, and wait until it is.  Raises RewardError."""
        try:
            worker = self.start()
            worker.ready()
        except NotStarted as error:
            serves = (
                "a function of this process"
                if self.live is not None
                else ", ".join(self.specs) or "reward functions"
            )
            raise RewardError(
                f"the worker process of {serves} could not start: {error}"
            ) from error.__cause__
        return worker

    def describe(
        self, spec: str, name: str, arguments: Mapping[str, Any], columns: Sequence[str]
    ) -> Signature:
        """Import a function.   name: in the log.

        Raises ConfigError for one that cannot be imported or whose signature the data cannot
        satisfy.
        """
        try:
            return Signature(
                **self.ready().call(
                    "describe", spec, name, dict(arguments), columns, seconds=DEFAULT_SECONDS
                )
            )
        except TimeoutError:
            why = f"it did not end within {DEFAULT_SECONDS:g} s"
        except (Died, Raised) as error:
            if isinstance(error, Raised) and error.kind == "ConfigError":
                raise ConfigError(error.message) from None
            why = str(error)
        self.kill()
        raise ConfigError(f"reward function {spec!r}: cannot be imported: {why}")

    def run(self, calls: Sequence[RewardCall], stop: threading.Event) -> list[Outcome]:
        """Make calls until one fails or `stop` is set.   calls: sorted by `order_of`.   Raises
        RewardError.
        """
        outcomes: list[Outcome] = []
        while len(outcomes) < len(calls) and not stop.is_set():
            left, answers, late = calls[len(outcomes) :], list[Any](), list[RewardCall]()
            try:
                worker = self.ready()
                worker.request("call", *left)
                began = time.monotonic()
                for call in left:
                    answers.append(
                        worker.receive(
                            began + time_limit(call) + (GRACE if call.asynchronous else 0.0)
                        )
                    )
                    began = began if call.asynchronous else time.monotonic()
            except TimeoutError:
                self.kill()
                late = left[len(answers) :]
                late = (
                    [call for call in late if order_of(call) == order_of(late[0])]
                    if late[0].asynchronous
                    else late[:1]
                )
            except (Died, Raised) as error:
                self.kill()
                call, *others = left[len(answers) :]
                labels, texts = [*call.labels], call.texts[0] if call.single else None
                if call.asynchronous:  # on any of those that it had begun
                    labels, texts = (
                        labels
                        + [
                            label
                            for one in others
                            if one.reward == call.reward
                            for label in one.labels
                        ],
                        None,
                    )
                message = (
                    f"the reward function {call.reward.name!r} did not return: {error}; on"
                    f" {described(labels)}"
                )
                raise failure(call.reward, message, texts) from None
            outcomes += outcomes_of(left, answers)
            outcomes += [out_of_time(call, time_limit(call), late) for call in late]
        return outcomes

    def kill(self) -> None:
        """Kill the worker, if there is one; a thread that waits for it sees its end."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.kill()
