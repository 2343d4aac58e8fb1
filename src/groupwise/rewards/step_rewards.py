"""Rewards of single steps: how a completion is cut into steps, what process reward functions
return, and the signal that they are over the tokens of a completion.

n tokens of one completion

It imports little: worker processes start with it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from groupwise.errors import ConfigError, RewardError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class ProcessReward:
    """Marks a reward function as one of steps; use it as a decorator.

    The function has the signature of any reward function and returns, per completion, a list of
    (index of the step's last token, reward) in rising order.  It feeds the credit `process`
    (DeepSeekMath 2402.03300, 4.1.3) through `RolloutGroup.signals["process"]`; its column in
    `RolloutGroup.rewards` is the sum of its step rewards, None for a completion without steps.

    >>> @ProcessReward
    ... def shorter(completion_ids):
    ...     return [[(len(ids) - 1, -float(len(ids)))] if ids else [] for ids in completion_ids]
    >>> shorter(completion_ids=[[5, 6, 7], []])
    [[(2, -3.0)], []]
    """

    function: Callable[..., Any]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function itself."""
        return self.function(*arguments, **keywords)


process_reward = ProcessReward

Steps = list[tuple[int, float]]


def checked_steps(name: str, values: Any, labels: Sequence[str]) -> list[Steps]:
    """What a process reward function returned, as lists of (end token, reward).  Raises
    RewardError.

    >>> checked_steps("f", [[(1, 1), (3, 0.5)], []], ["0#0", "0#1"])
    [[(1, 1.0), (3, 0.5)], []]
    """
    function = f"the process reward function {name!r} returned"
    expected = f"expected {len(labels)} lists of (end token, reward)"
    if not isinstance(values, list | tuple):
        raise RewardError(f"{function} {type(values).__name__}, {expected}, one per completion")
    odd = {type(steps).__name__ for steps in values if not isinstance(steps, list | tuple)}
    if odd:
        raise RewardError(
            f"{function} {type(values).__name__} of {', '.join(sorted(odd))}, {expected}, one per"
            " completion"
        )
    if len(values) != len(labels):
        raise RewardError(f"{function} {len(values)} lists, {expected}, one per completion")
    checked: list[Steps] = []
    for label, steps in zip(labels, values, strict=True):
        checked.append([])
        for step in steps:
            try:
                end, reward = step
                end, reward = int(end), float(reward)
            except (TypeError, ValueError) as error:
                raise RewardError(
                    f"{function} the step {repr(step)[:60]} for completion {label}, expected"
                    " (end token, reward)"
                ) from error
            if not math.isfinite(reward):
                raise RewardError(
                    f"{function} the reward {reward:g} for a step of completion {label}"
                )
            earlier = [place for place, _ in checked[-1]]
            if end < 0 or (earlier and end <= earlier[-1]):
                raise RewardError(
                    f"{function} the end tokens {[*earlier[-5:], end]} for completion {label}:"
                    " they rise from 0"
                )
            checked[-1].append((end, reward))
    return checked


def segment_steps(
    tokens: Sequence[int],
    texts: Callable[[Sequence[int]], Sequence[str]],
    *,
    by: Literal["newline", "regex", "tokens"] = "newline",
    pattern: str | None = None,
    ends: Sequence[int] = (),
) -> list[int]:
    r"""Cut a completion into steps; returns the index of each step's last token.  Every token
    belongs to exactly one step.

    `newline`: a step ends with the token that completes a line with text in it.  `regex`: with the
    token that completes a match of `pattern`.  `tokens`: with each token in `ends`.  What remains
    behind the last such end is a step too.

    texts: gives the text of each token in its place (`data.vocabulary.Vocabulary.texts`).

    Raises ConfigError for an unknown `by`, a missing or bad pattern, or missing ends.

    >>> segment_steps([65, 10, 10, 66, 67, 10, 68], lambda ids: list(map(chr, ids)))
    [1, 5, 6]
    >>> segment_steps([65, 46, 32, 66], lambda ids: list(map(chr, ids)), by="regex", pattern=r"\. ")
    [2, 3]
    >>> segment_steps([7, 1, 7, 7], lambda ids: list(map(chr, ids)), by="tokens", ends=[1])
    [1, 3]
    """
    if by == "tokens":
        if not ends:
            raise ConfigError("steps by tokens need the ids that end a step")
        places = [index for index, token in enumerate(tokens) if token in ends]
    else:
        step, written = _pattern(by, pattern), texts(tokens)
        reach = list(accumulate(map(len, written)))
        places = []
        for match in step.finditer("".join(written)):
            place = bisect_left(reach, match.end())
            if match.end() > match.start() and place not in places[-1:]:
                places.append(place)
    last = len(tokens) - 1
    if last >= 0 and last not in places[-1:]:
        places.append(last)
    return places


def _pattern(by: str, pattern: str | None) -> re.Pattern[str]:
    if by == "newline":
        return re.compile(r"[^\n]*\S[^\n]*\n")
    if by != "regex":
        raise ConfigError(f"steps are cut by 'newline', 'regex' or 'tokens', got {by!r}")
    try:
        return re.compile(pattern or "")
    except re.error as error:
        raise ConfigError(f"steps by regex: cannot compile {pattern!r}: {error}") from error


def step_signal(name: str, steps: Steps, length: int, label: str) -> np.ndarray:
    """float64 (n,): each step's reward at its last token, NaN elsewhere.  Raises RewardError for an
    end outside the completion.

    >>> step_signal("f", [(0, 1.0), (2, 0.5)], 4, "0#0")
    array([1. , nan, 0.5, nan])
    """
    import numpy as np

    signal = np.full(length, np.nan)
    for end, reward in steps:
        if end >= length:
            raise RewardError(
                f"the process reward function {name!r} ends a step of completion {label} at token"
                f" {end}; it has {length} tokens"
            )
        signal[end] = reward
    return signal
