"""Rewards of a completion's tokens: how many there are, and how many are said again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from groupwise.errors import ConfigError
from groupwise.rewards.accuracy import accuracy
from groupwise.utils.built_in import built_in


@built_in("soft_overlong")
def soft_overlong(
    completion_ids: Sequence[Sequence[int]], *, max_tokens: int, cache: int
) -> list[float]:
    """For n tokens: 0 up to L - c, `((L - c) - n) / c` from there to L, -1 above (L `max_tokens`, c
    `cache`; DAPO 2503.14476, eq. 13).

    Raises ConfigError unless 0 < cache <= max_tokens.

    >>> soft_overlong([[1] * 80, [1] * 90, [1] * 100, [1] * 101], max_tokens=100, cache=20)
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < cache <= max_tokens:
        raise ConfigError(
            f"the reward 'soft_overlong' needs 0 < cache <= max_tokens, got cache {cache},"
            f" max_tokens {max_tokens}"
        )
    return [min(0.0, max(-1.0, (max_tokens - cache - len(ids)) / cache)) for ids in completion_ids]


@built_in("cosine_length")
def cosine_length(
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    gold: Sequence[Any],
    prompts: Sequence[str] | None = None,
    finish_reasons: Sequence[str] | None = None,
    *,
    max_tokens: int,
    right: Sequence[float] = (0.5, 1.0),
    wrong: Sequence[float] = (-1.0, -0.5),
) -> list[float | None]:
    """`lo + (hi - lo) / 2 (1 + cos(pi min(n / L, 1)))`: a right answer is worth `right[1]` at n = 0
    and `right[0]` at L tokens and above, a wrong one `wrong[0]` at n = 0 and `wrong[1]` at L
    (2502.03373, appendix C.1).  Right and wrong as in `accuracy`; None if the gold cannot be read.
    n counts the completion's tokens, EOS included.

    Raises ConfigError unless max_tokens > 0 and each pair is (low, high).

    >>> cosine_length(["#### 4", "#### 5"], [[1] * 50, [1] * 50], ["4", "4"], max_tokens=100)
    [0.75, -0.75]
    """
    if max_tokens <= 0:
        raise ConfigError(f"the reward 'cosine_length' needs max_tokens > 0, got {max_tokens}")
    for name, bounds in (("right", right), ("wrong", wrong)):
        if len(bounds) != 2 or not bounds[0] <= bounds[1]:
            raise ConfigError(
                f"the reward 'cosine_length' needs {name} = [low, high], got {list(bounds)}"
            )
    rewards: list[float | None] = []
    for verdict, ids in zip(
        accuracy(completions, gold, prompts, finish_reasons), completion_ids, strict=True
    ):
        short, long = (right[1], right[0]) if verdict else (wrong[0], wrong[1])
        cosine = math.cos(math.pi * min(len(ids) / max_tokens, 1.0))
        rewards.append(None if verdict is None else long + (short - long) / 2.0 * (1.0 + cosine))
    return rewards


@built_in("repetition")
def repetition(
    completion_ids: Sequence[Sequence[int]], *, n: int = 3, penalty: float = -1.0
) -> list[float]:
    """`(1 - unique n-grams / n-grams) penalty` over token ids; 0 for fewer than n tokens
    (2502.03373, appendix C.2).

    Raises ConfigError unless n >= 1 and penalty < 0.

    >>> repetition([[1, 2, 3, 4], [5, 5, 5, 5, 5], [5]], n=2)
    [0.0, -0.75, 0.0]
    """
    if n < 1 or not penalty < 0.0:
        raise ConfigError(
            f"the reward 'repetition' needs n >= 1 and penalty < 0, got n {n}, penalty {penalty}"
        )
    rewards = []
    for ids in completion_ids:
        grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
        repeated = len(grams) - len(set(grams))
        rewards.append(repeated / len(grams) * penalty if repeated else 0.0)
    return rewards
