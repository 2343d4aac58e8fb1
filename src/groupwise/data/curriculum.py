"""Which prompts are visited again: those that are always solved are retired, those that are mostly
solved come less often.

A prompt's pass rate is the share of its last group's completions that are right by the verdict
(`records.RolloutGroup.right`); one that it did not judge is not right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupwise.data.encoding import visit
from groupwise.data.order import Order
from groupwise.records import Prompt, RolloutGroup


class Curriculum(Order):
    """An order of visits that leaves rows out by their pass rates.

    >>> order = Curriculum(3, seed=0, retire=1)
    >>> rows = [row for _, row in order.take(3)]
    >>> order.learn(rows[0], 1.0)
    >>> sorted(row for _, row in order.take(2)) == sorted(rows[1:]), order.retired, order.skipped
    (True, 1, 1)
    """

    def __init__(
        self, n: int, seed: int, shuffle: bool = True, *, retire: int = 0, strength: float = 0.0
    ) -> None:
        """retire: after this many visits in a row with a pass rate of 1 a row is never visited
        again; 0: no row is retired.

        strength: a row with pass rate p is left out of an epoch with probability `strength x p`.
        """
        super().__init__(n, seed, shuffle)
        self.retire, self.strength = retire, strength
        self.skipped = 0
        """Visits that were left out so far."""
        self._rates: dict[int, float] = {}
        self._solved: dict[int, int] = {}
        """Visits in sequence with a pass rate of 1, by row."""

    @property
    def retired(self) -> int:
        """Rows that do not come again."""
        return len([row for row in self._solved if self._is_retired(row)])

    def _is_retired(self, row: int) -> bool:
        return self.retire > 0 and self._solved.get(row, 0) >= self.retire

    def learn(self, row: int, rate: float) -> None:
        """Record the pass rate of a visit; NaN (no verdict) changes nothing."""
        if np.isnan(rate):
            return
        self._rates[row] = rate
        if rate >= 1.0:
            self._solved[row] = self._solved.get(row, 0) + 1
        else:
            self._solved.pop(row, None)

    def take(self, k: int) -> list[tuple[int, int]]:
        """The next `k` visits of rows that are not left out.  Where no row would be left, all pass
        rates are forgotten.
        """
        visits: list[tuple[int, int]] = []
        missed = 0
        while len(visits) < k:
            (visited,) = super().take(1)
            if self._leaves_out(*visited):
                self.skipped, missed = self.skipped + 1, missed + 1
                if missed >= 2 * self.n:
                    self._rates, self._solved = {}, {}
            else:
                missed = 0
                visits.append(visited)
        return visits

    def _leaves_out(self, epoch: int, row: int) -> bool:
        if self._is_retired(row):
            return True
        chance = self.strength * self._rates.get(row, 0.0)
        if chance <= 0.0:
            return False
        seed = [self.seed & 0xFFFFFFFF, self.seed >> 32, epoch, row]
        return bool(np.random.RandomState(seed).rand() < chance)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores: the order, pass rates and solved visits."""
        rates = {str(row): rate for row, rate in self._rates.items()}
        solved = {str(row): count for row, count in self._solved.items()}
        return {**super().state(), "skipped": self.skipped, "rates": rates, "solved": solved}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        super().restore(state)
        self.skipped = int(state["skipped"])
        self._rates = {int(row): float(rate) for row, rate in state["rates"].items()}
        self._solved = {int(row): int(count) for row, count in state["solved"].items()}


class Visits:
    """Draws prompts in an order, and records the pass rates of their groups, also of groups that
    `refill` drops.
    """

    def __init__(self, prompts: Sequence[Prompt], order: Order, *, ahead: bool = False) -> None:
        """ahead: rollouts may begin before the step that they belong to."""
        self.prompts, self.order, self.ahead = prompts, order, ahead
        self._rows = {prompt.id: row for row, prompt in enumerate(prompts)}
        self._sampled = 0

    def __call__(self, k: int) -> list[Prompt]:
        """The next k prompts."""
        return [visit(self.prompts[row], epoch) for epoch, row in self.order.take(k)]

    def seen(self, groups: Sequence[RolloutGroup]) -> None:
        """Record the pass rates of scored groups."""
        for group in groups:
            self._sampled += _tokens(group)
            if not isinstance(self.order, Curriculum) or not group.names:
                continue
            if not np.isnan(group.right).all():
                rate = float((group.right == 1.0).mean())
                self.order.learn(self._rows[group.prompt.id.partition("/")[2]], rate)

    def account(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Metrics of a step that keeps some of the groups that were sampled for it.

        Where rollouts run ahead, groups of later steps have been recorded too, so the dropped ones
        are not counted."""
        discarded, self._sampled = self._sampled, 0
        for group in groups:
            discarded -= _tokens(group)
        metrics = {}
        if discarded > 0 and not self.ahead:
            metrics["tokens/discarded"] = float(discarded)
        if isinstance(self.order, Curriculum):
            metrics |= {
                "prompts/skipped": float(self.order.skipped),
                "prompts/retired": float(self.order.retired),
            }
        return metrics


def _tokens(group: RolloutGroup) -> int:
    return sum(map(len, group.rollouts))
