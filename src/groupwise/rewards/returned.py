"""Checks of what a reward function returned, and names in messages about it.

It imports little: worker processes start with it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from groupwise.errors import RewardError
from groupwise.rewards.step_rewards import checked_steps

if TYPE_CHECKING:
    from groupwise.rewards.user_functions import Reward

LARGEST = (2.0 - 2.0**-23) * 2.0**127
"""A reward beyond this is taken for an accident: single precision cannot hold it."""


def printable(text: str) -> str:
    r"""The text on one line, control and invisible characters as escapes.

    >>> printable("a\x1b[31mred\n")
    'a\\x1b[31mred\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def described(labels: Sequence[str]) -> str:
    """Completions in a message.

    >>> described(["0#0", "0#1", "1#0", "1#1"])
    '0#0, 0#1, 1#0 ... (4 completions)'
    """
    return ", ".join(labels[:3]) + (f" ... ({len(labels)} completions)" if len(labels) > 3 else "")


def validated(reward: Reward, values: Any, labels: Sequence[str]) -> list[Any]:
    """What a function returned, checked: numbers, or steps of a process reward.  Raises RewardError."""
    return (checked_steps if reward.signature.process else checked)(reward.name, values, labels)


def checked(name: str, values: Any, labels: Sequence[str]) -> list[float | None]:
    """What a reward function returned, as one float or None per completion.

    Lists, tuples, and one-dimensional arrays and tensors of numbers and bools are taken; all else raises RewardError.

    >>> import numpy as np
    >>> checked("f", np.array([True, False]), ["0#0", "0#1"])
    [1.0, 0.0]
    """
    expected = f"expected a list of {len(labels)} numbers or None, one per completion"
    if _is_array(values):
        if values.ndim != 1:
            raise RewardError(f"the reward function {name!r} returned an array of shape {tuple(values.shape)}, {expected}")
        values = values.tolist()
    if not isinstance(values, list | tuple):
        hint = "; is it an async function? declare it with async def" if isinstance(values, Awaitable) else ""
        if inspect.iscoroutine(values):
            values.close()
        raise RewardError(f"the reward function {name!r} returned {_kind(values)}, {expected}{hint}")
    if len(values) != len(labels):
        raise RewardError(f"the reward function {name!r} returned {len(values)} rewards for {len(labels)} completions, {expected}")
    return [as_reward(name, value, label) for value, label in zip(values, labels, strict=True)]


def as_reward(name: str, value: Any, label: str) -> float | None:
    """One reward as a float.  Raises RewardError for what is not a number, and for a number that is not finite."""
    number = value.tolist() if _is_array(value) else value
    if number is None:
        return None
    if not isinstance(number, bool | int | float):
        raise RewardError(f"the reward function {name!r} returned {_kind(value)} for completion {label}, expected a number or None")
    reward = float(number)
    if not math.isfinite(reward) or abs(reward) > LARGEST:
        raise RewardError(
            f"the reward function {name!r} returned {reward:g} for completion {label}: a reward is finite "
            "(within single precision); return None where it does not apply"
        )
    return reward


def _is_array(value: Any) -> bool:
    """Whether it is an array, a tensor or a number of theirs; to import numpy would make a worker's start twice as long."""
    return hasattr(value, "ndim") and hasattr(value, "tolist")


def _kind(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else ""
    return f"{type(value).__name__} {text[:60]}".strip() if value is not None else "None"
