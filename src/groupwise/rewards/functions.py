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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError
from groupwise.rewards.returned import validated
from groupwise.rewards.step_rewards import ProcessReward
from groupwise.rewards.trainer_state import Notes, TrainerState
from groupwise.rewards.user_functions import find_named, read_signature
from groupwise.utils.process_main import told

if TYPE_CHECKING:
    from groupwise.rewards.asynchronous import SideBySide

ATOMS = (str, bytes, int, float, complex, bool, type(None))
"""What cannot be changed and needs no copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One function, and the completions that it is to be called on."""

    spec: str
    name: str
    arguments: Mapping[str, Any]
    single: bool
    asynchronous: bool
    process: bool
    timeout: float | None
    """Seconds that an asynchronous call may take before it is cancelled; calls of others are ended from outside."""
    labels: Sequence[str]
    given: bytes
    """Pickle of the keyword arguments: lists with an entry per completion."""
    asks: tuple[str, ...] = ()
    """Of `trainer_state.TOLD`."""
    state: TrainerState = field(default_factory=TrainerState)

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments, nothing in them shared between completions; fixed arguments are copies."""
        return self._columns() | copy.deepcopy(dict(self.arguments))

    def rows(self) -> list[dict[str, Any]]:
        """For a function of one completion: the keyword arguments of each call."""
        given = self._columns()
        return [
            {name: values[n] for name, values in given.items()} | copy.deepcopy(dict(self.arguments))
            for n in range(len(self.labels))
        ]

    def _columns(self) -> dict[str, list[Any]]:
        return {name: unshared(values) for name, values in pickle.loads(self.given).items()}

    def notes(self) -> Notes:
        """What its next call logs into."""
        return Notes(1 if self.single else len(self.labels), single=self.single)

    def after(self, done: int) -> Unit:
        """The same for the completions from number `done` on."""
        given = {name: values[done:] for name, values in pickle.loads(self.given).items()}
        return replace(self, labels=self.labels[done:], given=pickle.dumps(given))


def unshared(values: list[Any]) -> list[Any]:
    """The same values; of an object that stands in several places, each gets a copy.

    >>> first, second = unshared([[1]] * 2)
    >>> first.append(2)
    >>> second
    [1]
    """
    seen: set[int] = set()
    found = []
    for value in values:
        found.append(copy.deepcopy(value) if id(value) in seen and not isinstance(value, ATOMS) else value)
        seen.add(id(value))
    return found


def worker(specs: Sequence[str]) -> Callable[..., Any]:
    """In a worker: what answers its requests.  `specs`: functions to import now, so that no call waits for it."""
    functions = Functions()
    for spec in specs:
        functions.find(spec)
    return functions.answer


class Functions:
    """Reward functions by name.  Messages are lists `[unit, kind, what]`:

    `row`: value of the next completion, its seconds, and what it logged (`trainer_state.Notes.told`).  `values`: of all
    completions, those that were late, seconds, and what was logged.  `failed`: an exception in words (`process_main.told`), with
    the completion's label where it is known; ends the unit.
    """

    def __init__(self, live: Mapping[str, Any] | None = None) -> None:
        """live: functions that are given and not found by name."""
        self._found: dict[str, Any] = dict(live or {})
        self._side_by_side: SideBySide | None = None

    def find(self, spec: str) -> Any:
        """The function behind a name.  Raises ConfigError."""
        if spec not in self._found:
            self._found[spec] = find_named(spec, "reward function") if ":" in spec else _builtin(spec)
        return self._found[spec]

    def answer(self, what: str, *request: Any) -> Any:
        """`describe`: functions with arguments and columns in, signatures or what is wrong with them out.  `call`: units in."""
        return [self._describe(*one) for one in request] if what == "describe" else self.run(request)

    def _describe(self, spec: str, name: str, arguments: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
        try:
            return read_signature(self.find(spec), name, arguments, columns).as_dict()
        except ConfigError as error:
            return {"wrong": str(error)}

    def run(self, units: Sequence[Unit]) -> Iterator[list[Any]]:
        """Call the functions of all units: the asynchronous ones side by side, then the others in order."""
        waiting = [(n, unit) for n, unit in enumerate(units) if unit.asynchronous]
        if waiting:
            if self._side_by_side is None:
                from groupwise.rewards.asynchronous import SideBySide  # most workers call no asynchronous function

                self._side_by_side = SideBySide(self._inner)
            yield from self._side_by_side.run(waiting)
        for n, unit in enumerate(units):
            if not unit.asynchronous:
                yield from ([n, *message] for message in self._plain(unit))

    def _inner(self, unit: Unit) -> Callable[..., Any]:
        function = self.find(unit.spec)
        return function.function if isinstance(function, ProcessReward) else function

    def _plain(self, unit: Unit) -> Iterator[tuple[str, Any]]:
        label, began = "", time.monotonic()
        try:
            function = self._inner(unit)
            if not unit.single:
                notes = unit.notes()
                found = function(**unit.keywords(), **notes.given(unit.asks, unit.state))
                values = validated(unit.name, found, unit.labels, unit.process)
                yield "values", [values, [], time.monotonic() - began, notes.told()]
                return
            for label, row in zip(unit.labels, unit.rows(), strict=True):
                began, notes = time.monotonic(), unit.notes()
                found = function(**row, **notes.given(unit.asks, unit.state))
                (value,) = validated(unit.name, [found], [label], unit.process)
                yield "row", [value, time.monotonic() - began, notes.told()]
        except GeneratorExit:
            raise
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: nobody but the function can have raised them here
            yield "failed", told(error) | {"label": label}


def _builtin(name: str) -> Callable[..., Any]:
    from groupwise.rewards.find import builtin_function  # a worker is given one only if it has a timeout

    return builtin_function(name)
