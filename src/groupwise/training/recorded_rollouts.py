"""Recorded groups as a loop trains on them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from groupwise.records import RolloutGroup
from groupwise.training.groups import Collected

COMPUTED = ("reference_logp", "scored_logp", "teacher_logp", "value", "old_value", "return")
"""Signals that training computes."""


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


def _without_computed(group: RolloutGroup) -> RolloutGroup:
    """Return a group without the signals that training computes."""
    signals = {name: column for name, column in group.signals.items() if name not in COMPUTED}
    return replace(group, signals=signals)
