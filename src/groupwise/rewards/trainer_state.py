"""The state of the run that reward functions can read, and the metrics and columns that they can
log.

The names are TRL's: `trainer_state`, `log_metric`, `log_extra`.  A function asks for them by name.
It may run in another
process: what it logs comes back with its rewards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.utils.spelling import counted

RUN_PARAMETERS = ("trainer_state", "log_metric", "log_extra")
"""What a function may ask for by name, and is no list with an entry for each completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """Where the run stands."""

    global_step: int = 0
    """Steps that are completed."""
    max_steps: int | None = None
    """The last step's number; None where no run says it."""


class Notes:
    """The metrics and columns that one call of a reward function logs.

    >>> notes = Notes(2)
    >>> notes.log_metric("parsed", 0.5)
    >>> notes.log_extra("answer", ["4", None])
    >>> notes.as_json()
    {'metrics': {'parsed': [0.5]}, 'columns': {'answer': ['4', None]}}
    """

    def __init__(self, count: int, *, single: bool = False) -> None:
        """count: completions of the call.   single: the function takes one completion, and logs one
        value of it.
        """
        self.count, self.single = count, single
        self.metrics: dict[str, list[float]] = {}
        self.columns: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """A number of this call; it is in the step's metrics as `log/NAME`, the mean where it is
        logged several times.

        What is not finite is left out of the mean; where nothing else was logged the metric is NaN.
        Raises TypeError or ValueError for what is no name or no number.
        """
        self.metrics.setdefault(_name("log_metric", name), []).append(float(value))

    def log_extra(self, column: str, values: Any) -> None:
        """A value for each completion; it is in the table of the step's rollouts as the column
        `extra/COLUMN`, in JSON.

        Raises TypeError or ValueError for what is no name, or no list of as many values as there
        are completions.
        """
        if self.single:
            values = [values]
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
            raise TypeError(
                f"log_extra({column!r}, ...) takes a list with a value for each completion, got a"
                f" {type(values).__name__}"
            )
        if len(values) != self.count:
            wanted = f"{counted(self.count, 'value')}, one for each completion"
            raise ValueError(f"log_extra({column!r}, ...) takes {wanted}, got {len(values)}")
        self.columns[_name("log_extra", column)] = [
            json.loads(json.dumps(value, default=_plain)) for value in values
        ]

    def parameters(self, names: Sequence[str], state: TrainerState) -> dict[str, Any]:
        """The keyword arguments for a function that asks for some of `RUN_PARAMETERS`."""
        every: dict[str, Any] = {
            "trainer_state": state,
            "log_metric": self.log_metric,
            "log_extra": self.log_extra,
        }
        return {name: every[name] for name in names}

    def as_json(self) -> dict[str, Any]:
        """Return the notes as JSON, to be sent from a worker process."""
        return {"metrics": self.metrics, "columns": self.columns}


def _name(function: str, name: object) -> str:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise TypeError(f"{function} takes a name, got {name!r}")
    return name


def _plain(value: Any) -> Any:
    """Return a value that JSON does not know as Python's, or as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def joined(logs: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> dict[str, Any]:
    """The logs of several calls joined into one; completions of a call that logged nothing have
    None.   counts: completions of each.

    >>> joined([{"metrics": {"a": [1.0]}}, {"columns": {"b": [7]}}], [1, 1])
    {'metrics': {'a': [1.0]}, 'columns': {'b': [None, 7]}}
    """
    metrics: dict[str, list[float]] = {}
    columns: dict[str, list[Any]] = {
        column: [] for entry in logs for column in entry.get("columns", {})
    }
    for entry, count in zip(logs, counts, strict=True):
        for name, values in entry.get("metrics", {}).items():
            metrics.setdefault(name, []).extend(values)
        for name, column in columns.items():
            column.extend(entry.get("columns", {}).get(name, [None] * count))
    return {"metrics": metrics, "columns": columns}
