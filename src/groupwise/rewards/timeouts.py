"""How long a reward function may take: its own `timeout`, else a default; and when calls without a result are too many.

A deadline is held by `hosts.py`, which kills the worker process; what a call without a result means is decided in `compose.py`.
"""

from __future__ import annotations

from groupwise.rewards.functions import Unit

DEFAULT_SECONDS = 600.0
"""Without a timeout a call that takes longer has failed: a function that hangs must not hold a run for ever."""
SECONDS_EACH = 10.0
"""... or longer than this for each completion of the call, if that is more: an evaluation scores thousands at once."""
GRACE = 5.0
"""Seconds beyond its timeout that an asynchronous function has to be cancelled in, before its process is killed."""
LATE_SHARE = 0.1
"""A function that runs out of time in more of its calls than this, and more than once, is broken."""


def time_limit(unit: Unit) -> float:
    """Seconds that one call of the function may take."""
    if unit.timeout is not None:
        return unit.timeout
    return DEFAULT_SECONDS if unit.single else max(DEFAULT_SECONDS, SECONDS_EACH * len(unit.labels))


def too_late(late: int, calls: int) -> bool:
    """True if a function has run out of time in too many of its calls to go on."""
    return late > max(1.0, LATE_SHARE * calls)
