"""The order in which rows are visited: seeded, shuffled anew each epoch, and resumable at any
point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from groupwise.errors import CheckpointError, DataError


class Order:
    """An endless sequence of (epoch, row) in which every epoch visits each of `n` rows exactly
    once.

    Its state is four small numbers and no stored permutation: epoch e's order is a function of
    (seed, e).

    >>> order = Order(3, seed=0)
    >>> first = order.take(4)
    >>> [epoch for epoch, row in first], sorted(row for epoch, row in first[:3])
    ([0, 0, 0, 1], [0, 1, 2])
    """

    def __init__(self, n: int, seed: int, shuffle: bool = True) -> None:
        if n < 1:
            raise DataError("there are no rows to visit")
        self.n, self.seed, self.shuffle = n, seed, shuffle
        self._drawn = 0
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    @property
    def drawn(self) -> int:
        """Rows drawn so far, over all epochs."""
        return self._drawn

    def take(self, k: int) -> list[tuple[int, int]]:
        """The next `k` visits as (epoch, row); they may cross into the next epoch."""
        visits = [self._visit(place) for place in range(self._drawn, self._drawn + k)]
        self._drawn += k
        return visits

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores, in JSON's types."""
        return {"drawn": self._drawn, "rows": self.n, "seed": self.seed, "shuffle": self.shuffle}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.  Raises CheckpointError if it belongs to other rows or
        another order.
        """
        mine = self.state()
        if set(state) != set(mine):
            raise CheckpointError(
                f"a data order has the fields {sorted(mine)}, the checkpoint has {sorted(state)}"
            )
        for name in ("rows", "seed", "shuffle"):
            if state[name] != mine[name]:
                raise CheckpointError(
                    f"the data order was saved with {name} = {state[name]} and is now {mine[name]}:"
                    " resume with the data and seed of the run, or start a new run"
                )
        self._drawn = int(state["drawn"])

    def _visit(self, place: int) -> tuple[int, int]:
        epoch, within = divmod(place, self.n)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self._order_of(epoch)
        return epoch, int(self._permutation[within])

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.n)
        # RandomState's streams are frozen for good; those of numpy's newer generators may change
        # with a release.
        return np.random.RandomState([self.seed & 0xFFFFFFFF, self.seed >> 32, epoch]).permutation(
            self.n
        )
