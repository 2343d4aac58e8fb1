"""Batches of a bounded size: what passes, buffers and messages take at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def batch_by_size(
    items: Iterable[Item], size: Callable[[Item], int], limit: int
) -> Iterator[list[Item]]:
    """Yield neighbours in batches whose sizes add up to `limit` at most.

    An item that is larger than the limit is a batch by itself.

    >>> list(batch_by_size([3, 4, 9, 1], lambda n: n, 7))
    [[3, 4], [9], [1]]
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        if batch and total + size(item) > limit:
            yield batch
            batch = []
            total = 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch
