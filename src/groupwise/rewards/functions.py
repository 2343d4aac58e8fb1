"""The worker process's part of reward functions: it imports, describes and calls them, and checks what they returned.

A function is called on the main thread, with its own copy of every argument for each completion: changing one alters neither the
data, nor the record, nor the arguments of another completion.

It imports little: worker processes start with it.  What few functions need is imported with the first of them.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError
from groupwise.rewards.returned import validated
from groupwise.rewards.step_rewards import ProcessReward
from groupwise.rewards.trainer_state import RUN_PARAMETERS, Notes, TrainerState
from groupwise.rewards.user_functions import Reward, find_named, read_signature
from groupwise.utils.process_main import described

if TYPE_CHECKING:
    from groupwise.rewards.asynchronous import SideBySide

ATOMS = (str, bytes, int, float, complex, bool, type(None))
"""What cannot be changed and needs no copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardCall:
    """One call of a reward function: on one completion, or on all of them."""

    reward: Reward
    labels: Sequence[str]
    pickled: bytes
    """Pickle of the keyword arguments: values of the one completion, or lists with an entry per completion."""
    state: TrainerState = field(default_factory=TrainerState)

    @property
    def single(self) -> bool:
        """True: on one completion."""
        return self.reward.signature.single

    def notes(self) -> Notes:
        """What it logs into."""
        return Notes(len(self.labels), single=self.single)

    def keywords(self, notes: Notes) -> dict[str, Any]:
        """Keyword arguments, nothing in them shared between completions; fixed arguments are copies."""
        columns, fixed = pickle.loads(self.pickled), copy.deepcopy(dict(self.reward.arguments))
        if not self.single:
            columns = {name: unshared(values) for name, values in columns.items()}
        asks = [name for name in self.reward.signature.asks if name in RUN_PARAMETERS and name not in fixed]
        return columns | fixed | notes.parameters(asks, self.state)

    def ended(self, returned: Any, notes: Notes, began: float) -> dict[str, Any]:
        """The answer of a call that has come to its end.  Raises RewardError for what is no reward."""
        values = validated(self.reward, [returned] if self.single else returned, self.labels)
        return {"values": values, "notes": notes.as_json(), "seconds": time.monotonic() - began}


def unshared(values: list[Any]) -> list[Any]:
    """The same values; of an object that stands in several places, each gets a copy.

    >>> first, second = unshared([[1]] * 2)
    >>> first.append(2)
    >>> second
    [1]
    """
    seen: set[int] = set()
    apart = []
    for value in values:
        apart.append(copy.deepcopy(value) if id(value) in seen and not isinstance(value, ATOMS) else value)
        seen.add(id(value))
    return apart


def worker(specs: Sequence[str]) -> Callable[..., Any]:
    """In a worker: what answers its requests.  `specs`: functions to import now, so that no call waits for it."""
    functions = Functions()
    for spec in specs:
        functions.find(spec)
    return functions.answer


class Functions:
    """Reward functions by name, and calls of them.

    The answer to a call has `values`, `notes` and `seconds`; or `late`, of an asynchronous one that ran out of time; or it is an
    exception in words (`process_main.described`).  After a failure those that have not ended have none.
    """

    def __init__(self, live: Mapping[str, Any] | None = None) -> None:
        """live: functions that are given and not found by name."""
        self._functions: dict[str, Any] = dict(live or {})
        self._side_by_side: SideBySide | None = None

    def find(self, spec: str) -> Any:
        """The function behind a name.  Raises ConfigError."""
        if spec not in self._functions:
            self._functions[spec] = find_named(spec, "reward function") if ":" in spec else _builtin(spec)
        return self._functions[spec]

    def answer(self, what: str, *request: Any) -> Any:
        """`describe`: a function, arguments and columns in, its signature or what is wrong with it out.  `call`: calls in."""
        return self._describe(*request) if what == "describe" else self.run(request)

    def _describe(self, spec: str, name: str, arguments: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
        try:
            return asdict(read_signature(self.find(spec), name, arguments, columns))
        except ConfigError as error:
            return {"wrong": str(error)}

    def run(self, calls: Sequence[RewardCall]) -> Iterator[dict[str, Any] | None]:
        """The answers to calls: the asynchronous ones are made side by side, then the others in order."""
        waiting = [call for call in calls if call.reward.signature.asynchronous]
        if waiting and self._side_by_side is None:
            from groupwise.rewards.asynchronous import SideBySide  # most workers call no asynchronous function

            self._side_by_side = SideBySide(self._inner)
        together = self._side_by_side.run(waiting) if waiting and self._side_by_side is not None else []
        failed, known = any(answer is not None and "error" in answer for answer in together), iter(together)
        for call in calls:
            answer = next(known) if call.reward.signature.asynchronous else None if failed else self._plain(call)
            failed = failed or (answer is not None and "error" in answer)
            yield answer

    def _inner(self, call: RewardCall) -> Callable[..., Any]:
        function = self.find(call.reward.spec)
        return function.function if isinstance(function, ProcessReward) else function

    def _plain(self, call: RewardCall) -> dict[str, Any]:
        began, notes = time.monotonic(), call.notes()
        try:
            return call.ended(self._inner(call)(**call.keywords(notes)), notes, began)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: nobody but the function can have raised them here
            return described(error)


def _builtin(name: str) -> Callable[..., Any]:
    from groupwise.rewards.find import builtin_function  # a worker is given one only if it has a timeout

    return builtin_function(name)
