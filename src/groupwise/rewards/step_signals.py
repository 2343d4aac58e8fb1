"""Step rewards as a signal over the tokens of a completion: those of functions, and those of environments.

n tokens of one completion
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from groupwise.errors import RewardError
from groupwise.records import Scored
from groupwise.rewards.step_rewards import Steps


def step_signal(name: str, steps: Steps, length: int, label: str) -> np.ndarray:
    """float64 (n,): each step's reward at its last token, NaN elsewhere.  Raises RewardError for an end outside the completion.

    >>> step_signal("f", [(0, 1.0), (2, 0.5)], 4, "0#0")
    array([1. , nan, 0.5, nan])
    """
    signal = np.full(length, np.nan)
    for end, reward in steps:
        if end >= length:
            raise RewardError(
                f"the process reward function {name!r} ends a step of completion {label} at token {end}; it has {length} tokens"
            )
        signal[end] = reward
    return signal


def with_turns(group: Scored) -> Scored:
    """The group with the rewards that environments gave for turns: each stands in the signal `process` at the turn's last token,
    beside what functions reward.  Unchanged if no completion is an episode."""
    if all(rollout.episode is None for rollout in group.rollouts):
        return group
    columns = [np.full(len(rollout), np.nan) for rollout in group.rollouts]
    if "process" in group.signals:
        columns = [np.array(column, np.float64) for column in group.signals["process"]]
    for rollout, column in zip(group.rollouts, columns, strict=True):
        for turn in () if rollout.episode is None else rollout.episode.turns:
            if turn.end > turn.begin and turn.reward is not None:
                column[turn.end - 1] = np.nansum([column[turn.end - 1], turn.reward])
    return replace(group, signals={**group.signals, "process": tuple(columns)})
