"""A penalty for saying the same thing again."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.errors import ConfigError


def repetition(completion_ids: Sequence[Sequence[int]], *, n: int = 3, penalty: float = -1.0) -> list[float]:
    """`(1 - unique n-grams / n-grams) penalty` over token ids; 0 for fewer than n tokens (2502.03373, appendix C.2).

    Raises ConfigError unless n >= 1 and penalty < 0.

    >>> repetition([[1, 2, 3, 4], [5, 5, 5, 5, 5], [5]], n=2)
    [0.0, -0.75, 0.0]
    """
    if n < 1 or not penalty < 0.0:
        raise ConfigError(f"the reward 'repetition' needs n >= 1 and penalty < 0, got n {n}, penalty {penalty}")
    rewards = []
    for ids in completion_ids:
        grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
        repeated = len(grams) - len(set(grams))
        rewards.append(repeated / len(grams) * penalty if repeated else 0.0)
    return rewards
