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
from typing import Any

from groupwise.config.live_objects import LIVE
from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.functions import Excerpt, RewardCall
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
    """Name completions in a message.

    >>> described(["0 of row 5", "1 of row 5"])
    'completions 0 of row 5, 1 of row 5'
    >>> described(["0 of row 5"] * 4)
    'completions 0 of row 5, 0 of row 5, 0 of row 5 ... (4 in all)'
    """
    if len(labels) == 1:
        return f"completion {labels[0]}"
    named = f"completions {', '.join(labels[:3])}"
    if len(labels) <= 3:
        return named
    return f"{named} ... ({len(labels)} in all)"


def raised(
    reward: Reward,
    labels: Sequence[str],
    words: Mapping[str, str],
    excerpts: Sequence[Excerpt] = (),
) -> RewardError:
    """Return the error of a call that raised.

    words: of `process_main.described`, with `hint`.   excerpts: of the call's completions.
    """
    if words["kind"] == "RewardError":
        return failure(reward, words["error"], excerpts)
    message = f"the reward function {reward.name!r} raised {words['kind']}: {words['error']}"
    if words["where"]:
        message += f" ({words['where']})"
    message += f"; on {described(labels)}"
    if words.get("hint"):
        message += f"; {words['hint']}"
    return failure(reward, message, excerpts)


def failure(reward: Reward, message: str, excerpts: Sequence[Excerpt]) -> RewardError:
    """Return the error of a call that did not end with a value.

    excerpts: of the call's completions; that of a single one is quoted.
    """
    message = escaped(message, keep="")
    if len(excerpts) == 1:
        quoted = excerpts[0]
        message += f"; the completion: {quoted.completion!r}, the prompt: {quoted.prompt!r}"
    error = RewardError(message)
    error.of_file = not reward.spec.startswith(LIVE)
    return error


def outcomes_of(
    calls: Sequence[RewardCall], answers: Sequence[Mapping[str, Any] | None]
) -> list[Outcome]:
    """Read the answers of `functions.Functions`.  Raises RewardError for a call that failed."""
    outcomes = []
    for call, answer in zip(calls, answers, strict=False):
        if answer is None:
            continue  # after another one's failure
        if "error" in answer:
            error = raised(call.reward, call.labels, answer, call.excerpts)
            raise error from (Traceback(answer["trace"]) if answer["trace"] else None)
        if "late" in answer:
            outcomes.append(out_of_time(call, answer["late"], [call]))
        else:
            outcomes.append(Outcome(**answer))
    return outcomes


def out_of_time(call: RewardCall, seconds: float, late: Sequence[RewardCall]) -> Outcome:
    """Return the outcome of a call without a result in time.   late: all such calls.

    Raises RewardError unless it is the function's own timeout.
    """
    if call.reward.timeout is not None:
        empty: Any = [] if call.reward.signature.process else None
        count = len(call.labels)
        return Outcome(values=[empty] * count, late=tuple(range(count)), seconds=seconds)
    raise RewardError(
        f"the reward function {call.reward.name!r} gave no result within {time_limit(call):g} s and"
        f" was stopped; on {described(_labels(call.reward, late))}; if it may take so long, say how"
        " long by timeout: (calls without a result then count as None as long as they are few)"
    )


def _labels(reward: Reward, calls: Sequence[RewardCall]) -> list[str]:
    """Return the completions of those calls that are of one function."""
    labels: list[str] = []
    for call in calls:
        if call.reward == reward:
            labels += call.labels
    return labels


def all_together(ended: Sequence[tuple[RewardCall, Outcome]]) -> Outcome:
    """Join the outcomes of all calls of one function."""
    values: list[Any] = []
    late: list[int] = []
    seconds = [0.0]
    side_by_side = False
    for call, outcome in ended:
        late += [len(values) + place for place in outcome.late]
        values += outcome.values
        seconds.append(outcome.seconds)
        side_by_side = call.asynchronous
    counts = [len(call.labels) for call, _ in ended]
    return Outcome(
        values=values,
        late=tuple(late),
        notes=joined([outcome.notes for _, outcome in ended], counts),
        seconds=max(seconds) if side_by_side else sum(seconds),
    )


def order_of(call: RewardCall) -> tuple[bool, float]:
    """Return the key by which calls of a process are sorted: plain ones come first, asynchronous
    ones are answered by their deadlines.
    """
    if not call.asynchronous:
        return False, 0.0
    return True, time_limit(call)


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
            serves = ", ".join(self.specs) or "reward functions"
            if self.live is not None:
                serves = "a function of this process"
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
            outcomes += self._run(calls[len(outcomes) :])
        return outcomes

    def _run(self, calls: Sequence[RewardCall]) -> list[Outcome]:
        """Make calls until all have ended, or one runs out of time.  Raises RewardError."""
        answers: list[Any] = []
        try:
            self._take_answers(calls, answers)
        except TimeoutError:
            self.kill()
            late = _late(calls[len(answers) :])
            outcomes = outcomes_of(calls, answers)
            return outcomes + [out_of_time(call, time_limit(call), late) for call in late]
        except (Died, Raised) as error:
            self.kill()
            raise _without_return(calls[len(answers) :], error) from None
        return outcomes_of(calls, answers)

    def _take_answers(self, calls: Sequence[RewardCall], answers: list[Any]) -> None:
        worker = self.ready()
        worker.request("call", *calls)
        began = time.monotonic()
        for call in calls:
            if call.asynchronous:  # all of them have begun at once
                answers.append(worker.receive(began + time_limit(call) + GRACE))
            else:
                answers.append(worker.receive(began + time_limit(call)))
                began = time.monotonic()

    def kill(self) -> None:
        """Kill the worker, if there is one; a thread that waits for it sees its end."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.kill()


def _late(left: Sequence[RewardCall]) -> Sequence[RewardCall]:
    """Return those of the calls left without an answer that ran out of time."""
    first = left[0]
    if not first.asynchronous:
        return left[:1]
    return [call for call in left if order_of(call) == order_of(first)]


def _without_return(left: Sequence[RewardCall], error: Exception) -> RewardError:
    """Return the error of a call that ended its process.   left: calls without an answer."""
    call, reward = left[0], left[0].reward
    labels, excerpts = call.labels, call.excerpts
    if call.asynchronous:  # any of those that had begun
        labels, excerpts = _labels(reward, left), ()
    message = f"the reward function {reward.name!r} did not return: {error}; on {described(labels)}"
    return failure(reward, message, excerpts)
