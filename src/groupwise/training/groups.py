"""What an online loop trains on, step after step: scored groups that are sampled now, or ahead of training, or were recorded.

The loop cannot tell which: it iterates, and says after each step how many optimizer steps the policy has taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from groupwise.errors import RewardError
from groupwise.records import Scored
from groupwise.rollout.asynchronous import PrefetchedRollouts
from groupwise.rollout.dynamic_sampling import Collected, GroupSampler

COMPUTED = ("reference_logp", "scored_logp", "teacher_logp", "value", "return")
"""Signals that training computes."""


class Rollouts(Protocol):
    """Groups to train on."""

    def __iter__(self) -> Iterator[tuple[int, Collected]]:
        """The number of each step, and its groups with the number of prompts drawn for them."""
        ...

    def sync(self, version: int) -> None:
        """The policy has taken so many optimizer steps: what is sampled from now on is sampled with its weights."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRollouts(GroupSampler):
    """Groups that are sampled for steps `done` + 1 to `steps`, when it is their turn or ahead of it."""

    steps: int
    """The last step's number."""
    done: int = 0
    """Steps taken before."""
    ahead: PrefetchedRollouts = field(default_factory=PrefetchedRollouts)
    """What has been sampled already."""

    def __iter__(self) -> Iterator[tuple[int, Collected]]:
        """Raises RewardError after IDLE_STEPS steps in a row of which nothing can be learnt, or in a shorter run after all."""
        silent = masked = 0
        most = min(IDLE_STEPS, self.steps)
        for number in range(self.done + 1, self.steps + 1):
            groups, drawn = self.ahead.take(number, self.steps, self)
            unscored = bool(groups[0].names) and all(np.isnan(group.reward).all() for group in groups)
            cut = self.algorithm.truncated == "mask" and all(one.truncated for group in groups for one in group.rollouts)
            silent, masked = silent + 1 if unscored else 0, masked + 1 if cut else 0
            if silent >= IDLE_STEPS:
                raise RewardError(
                    f"the reward functions ({', '.join(groups[0].names)}) said None for every completion of {IDLE_STEPS} steps: "
                    "nothing can be learnt; try them with `groupwise score` on completions that they should reward"
                )
            if masked >= most:
                raise RewardError(
                    f"every completion of {masked} steps was cut off at a limit and left out of the loss (group.truncated: mask): "
                    "nothing can be learnt; raise rollout.max_new_tokens, or set group.truncated: keep"
                )
            yield number, (groups, drawn)

    def sync(self, version: int) -> None:
        """Hand the policy's weights to the engine."""
        self.engine.set_version(version)


@dataclass(frozen=True, slots=True)
class RecordedRollouts:
    """Groups that were recorded, without the signals that training computes again."""

    read: Callable[[int], Collected]
    """The groups of a step."""
    numbers: range

    def __iter__(self) -> Iterator[tuple[int, Collected]]:
        for number in self.numbers:
            groups, drawn = self.read(number)
            yield number, ([_without_computed(group) for group in groups], drawn)

    def sync(self, version: int) -> None:
        """Nothing is sampled."""


def _without_computed(group: Scored) -> Scored:
    return replace(group, signals={name: column for name, column in group.signals.items() if name not in COMPUTED})


IDLE_STEPS = 3
"""Steps in a row without a single reward, or without a single completion that is trained, after which a run ends."""
