"""How calls of reward functions ended.

It imports little: worker processes start with it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from groupwise.utils.process_main import message_of, raised_at


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a call ended: with a value, or in one of three ways that are not a value."""

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
    """Of a value with an entry per row: the rows whose own deadline passed; their entry is empty."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What a reward function logged: see `trainer_state.Notes`."""
    seconds: float = 0.0


def failed(error: BaseException, start: float) -> Outcome:
    """The outcome of a call in this process, begun at `start` (time.monotonic), that raised."""
    return Outcome(
        failure="error",
        message=message_of(error),
        kind=type(error).__name__,
        where=raised_at(error),
        cause=error,
        seconds=time.monotonic() - start,
    )
