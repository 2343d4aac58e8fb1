"""Items in portions of bounded size: what passes, buffers and messages take at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def portions(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Neighbours, up to `most` together; more only of one alone.

    >>> list(portions([3, 4, 9, 1], lambda n: n, 7))
    [[3, 4], [9], [1]]
    """
    portion, total = list[Item](), 0
    for item in items:
        if portion and total + size(item) > most:
            yield portion
            portion, total = [], 0
        portion.append(item)
        total += size(item)
    if portion:
        yield portion
