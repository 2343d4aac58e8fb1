"""What an attention layer asks, and how a packed stream is divided: records that all ways of
attending read.

T positions of the stream   H query heads   K key-value heads   D head width   E width of values
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from groupwise.records import Layout


@dataclass(frozen=True, slots=True)
class Reach:
    """The tokens that a query sees of those before it, and itself: all, the last `window`, or those
    in its chunk of `chunk` tokens.
    """

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int | Tensor) -> int | Tensor:
        """The first position that a query at `position` sees; it may be below 0.

        >>> Reach().first(9), Reach(window=4).first(9), Reach(chunk=4).first(9)
        (0, 6, 8)
        """
        if self.window is not None:
            return position - self.window + 1
        return position * 0 if self.chunk is None else position // self.chunk * self.chunk

    def within(self, longest: int) -> Reach:
        """The same over sequences of up to `longest` tokens: a window or chunk that hides none of
        them is none.
        """
        return EVERYTHING if longest <= (self.window or self.chunk or longest) else self


EVERYTHING = Reach()


class Query(NamedTuple):
    """What an attention layer asks: rows of a stream, token by token; queries and keys are rotated
    already.
    """

    layer: int
    query_THD: Tensor
    key_TKD: Tensor
    value_TKE: Tensor
    scale: float
    cap: float | None = None
    """Scores s become `cap * tanh(s / cap)`."""
    reach: Reach = EVERYTHING
    sinks_H: Tensor | None = None
    """Score of a key beside all others, which has no value (gpt-oss)."""

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (1, H, T, D), keys (1, K, T, D) and values (1, K, T, E)."""
        query, key, value = (
            x.transpose(0, 1).unsqueeze(0) for x in (self.query_THD, self.key_TKD, self.value_TKE)
        )
        return query, key, value


@dataclass(frozen=True, slots=True)
class Family:
    """A prefix and its members, one behind the other in the stream; or a single segment."""

    causal: tuple[tuple[int, int], ...]
    """Spans (from, to) in which attention is causal.  A prefix and its first member are one span: a
    text as it was written.
    """
    prefix: tuple[int, int]
    rest: tuple[int, int]
    """The other members, which look at the prefix too."""


def families_of(layout: Layout) -> Iterator[Family]:
    """Yield the families of a packed stream, in its order."""
    ends = [start + length for start, length in zip(layout.start, layout.length, strict=True)]
    s = 0
    while s < layout.segments:
        last = s + 1
        while last < layout.segments and layout.prefix[last] == s:
            last += 1
        first = min(s + 1, last - 1)
        others = range(first + 1, last)
        yield Family(
            causal=((layout.start[s], ends[first]), *((layout.start[c], ends[c]) for c in others)),
            prefix=(layout.start[s], ends[s]),
            rest=(ends[first], ends[last - 1]),
        )
        s = last


class PackedStream(Protocol):
    """A packed stream, as a package's attention reads it."""

    layout: Layout
    families: tuple[Family, ...]
    longest: int
    """The most keys that a query sees."""
    prepared: Any
    """What the kernels of a package, or of a device, prepare once for the stream."""
