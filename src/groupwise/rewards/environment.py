"""The reward that an environment itself gives."""

from __future__ import annotations

from collections.abc import Sequence


def environment(completions: Sequence[str], environment_rewards: Sequence[float | None]) -> list[float | None]:
    """What the environment gave for the episode: `get_reward()`, or the sum of what `step` gave; None if it gave nothing.

    >>> environment(["5"], [0.5])
    [0.5]
    """
    return list(environment_rewards) or [None for _ in completions]
