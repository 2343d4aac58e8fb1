"""Checks of what a reward function returned, and the message about a call that did not return.

It imports little: worker processes start with it.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from groupwise.errors import RewardError
from groupwise.rewards.step_rewards import checked_steps

if TYPE_CHECKING:
    from groupwise.rewards.calls import Outcome
    from groupwise.rewards.user_functions import Reward

LARGEST = (2.0 - 2.0**-23) * 2.0**127
"""A reward beyond this is taken for an accident: single precision cannot hold it."""


def describe_failure(name: str, labels: Sequence[str], outcome: Outcome) -> str:
    r"""The message of a call that did not end with a value: function, what happened, where, on which completions.

    It may quote a completion: control characters are shown as escapes.

    >>> from groupwise.rewards.calls import Outcome
    >>> describe_failure("f", ["0#0"], Outcome(failure="error", kind="ValueError", message="\x1b[31mred"))
    "the reward function 'f' raised ValueError: \\x1b[31mred; on 0#0"
    """
    if outcome.kind == "RewardError":
        return printable(outcome.message)
    raised = f"raised {outcome.kind}: {outcome.message}" + (f" ({outcome.where})" if outcome.where else "")
    happened = {"error": raised, "died": f"did not return: {outcome.message}"}
    on = described([outcome.label] if outcome.label else labels)
    return printable(f"the reward function {name!r} {happened[outcome.failure or 'error']}; on {on}")


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


# ----------------------------------------------------------------------------------------------------------- checking


def validated(reward: Reward, values: Any, labels: Sequence[str]) -> list[Any]:
    """What a function returned, checked: numbers, or steps of a process reward.  Raises RewardError."""
    return (checked_steps if reward.signature.process else checked)(reward.name, values, labels)


def checked(name: str, values: Any, labels: Sequence[str]) -> list[float | None]:
    """What a reward function returned, as one float or None per completion.

    Lists, tuples and one-dimensional numpy arrays and torch tensors of numbers and bools are taken; all else raises RewardError.

    >>> import numpy as np
    >>> checked("f", np.array([True, False]), ["0#0", "0#1"])
    [1.0, 0.0]
    """
    expected = f"expected a list of {len(labels)} numbers or None, one per completion"
    values, np = _array(values), _numpy()
    array = np is not None and isinstance(values, np.ndarray)
    if array and values.ndim != 1:
        raise RewardError(f"the reward function {name!r} returned an array of shape {values.shape}, {expected}")
    if not array and not isinstance(values, list | tuple):
        hint = "; is it an async function? declare it with async def" if isinstance(values, Awaitable) else ""
        if inspect.iscoroutine(values):
            values.close()
        raise RewardError(f"the reward function {name!r} returned {_kind(values)}, {expected}{hint}")
    if len(values) != len(labels):
        raise RewardError(f"the reward function {name!r} returned {len(values)} rewards for {len(labels)} completions, {expected}")
    return [as_reward(name, value, label) for value, label in zip(values, labels, strict=True)]


def as_reward(name: str, value: Any, label: str) -> float | None:
    """One reward as a float.  Raises RewardError for what is not a number, and for a number that is not finite."""
    if value is None:
        return None
    number, np = isinstance(value, bool | int | float), _numpy()
    if np is not None and not number:
        if isinstance(value, np.ndarray) or type(value).__module__ == "torch":
            array = np.asarray(_array(value))
            value = array.item() if array.ndim == 0 else value
        number = isinstance(value, bool | int | float | np.number | np.bool_) and not isinstance(value, np.complexfloating)
    if not number:
        raise RewardError(f"the reward function {name!r} returned {_kind(value)} for completion {label}, expected a number or None")
    reward = float(value)
    if not math.isfinite(reward) or abs(reward) > LARGEST:
        raise RewardError(
            f"the reward function {name!r} returned {reward:g} for completion {label}: a reward is finite "
            "(within single precision); return None where it does not apply"
        )
    return reward


def _numpy() -> Any:
    """numpy, if it or torch has been imported.  Else None: nothing can be of their types, and a worker's start would take twice as
    long."""
    if "numpy" not in sys.modules and "torch" not in sys.modules:
        return None
    import numpy

    return numpy


def _array(values: Any) -> Any:
    """A torch tensor as a numpy array, without importing torch; anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        return values.detach().cpu().double().numpy()
    return values


def _kind(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else ""
    return f"{type(value).__name__} {text[:60]}".strip() if value is not None else "None"
