"""Rotary embeddings whose frequencies depend on the length of the sequence: longrope (Phi-3),
dynamic NTK.

transformers takes the longest position of a forward pass for the length of all that is in it, and
dynamic NTK also remembers the longest of earlier passes.  In a packed stream every sequence has the
frequencies of its own length.  So a prompt can be shared only by completions whose sequences have
the same frequencies (`regime`), and a completion must not leave those that its first token was
drawn with (`remaining`): what is sampled could else not be scored.
"""

from __future__ import annotations

from collections.abc import Hashable


def regime(switches: tuple[tuple[int, bool], ...], length: int) -> Hashable:
    """Sequences of the same regime have the same frequencies.

    >>> [regime(((8, False),), n) for n in (7, 8, 9, 10)]
    [(0,), (0,), (1,), (1,)]
    >>> [regime(((8, True),), n) for n in (8, 9, 10)]
    [(0,), (9,), (10,)]
    """
    regimes = []
    for at, each in switches:
        if length <= at:
            regimes.append(0)
        elif each:
            regimes.append(length)
        else:
            regimes.append(1)
    return tuple(regimes)


def remaining(switches: tuple[tuple[int, bool], ...], prompt: int) -> int | None:
    """Most tokens of a completion that can all be drawn with the same frequencies; None if there is
    no limit.

    The last token of a sequence is drawn, and not computed.

    >>> [remaining(((8, False),), n) for n in (5, 9)], remaining(((8, True),), 9), remaining((), 5)
    ([4, None], 1, None)
    """
    counts = [
        at - prompt + 1 if prompt <= at else 1 for at, each in switches if prompt <= at or each
    ]
    return min(counts, default=None)
