"""Where the gradient of a step comes from: shares of |dLoss / dlog-prob| by completion, group, side of the clip range and length.

Only looked at, never part of a loss.  Numbers are numpy's; importing this file does not import torch.

n tokens of one completion
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Columns = Sequence[Sequence[np.ndarray]]
"""Of each group and each of its completions a number per token (n,); empty where nothing was computed."""

SIDES = ("below", "inside", "above")
"""Where a token's ratio lies: below the clip range, in it, above it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step's tokens."""

    name: str
    tokens: int
    """Tokens that were computed."""
    silent: int
    """Those of them whose gradient is exactly 0: cut by the surrogate, masked, or without an advantage."""
    gradient: float
    """Sum of |dLoss / dlog-prob| over them."""
    share: float
    """Of the step's sum; 0 where the whole step has no gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """A step's gradient, cut in several ways; the parts of each cut add up to `total`."""

    total: float
    """Sum of |dLoss / dlog-prob| over all tokens of the step."""
    raised: float
    """Share of the tokens that a step down the gradient makes likelier."""
    groups: tuple[Part, ...]
    """In the order of the step; named by their place."""
    completions: tuple[Part, ...]
    """Named `group/index`, both by place."""
    lengths: tuple[Part, ...]
    """By the tokens of the completion, in doublings: `1`, `2-3`, `4-7` ...; empty ones are left out."""
    sides: tuple[Part, ...]
    """`SIDES`; empty for a loss without a clip range."""


def account(gradient: Columns, *, ratio: Columns = (), clip_range: tuple[float, float] | None = None) -> Accounting:
    """Cut a step's gradient into parts.

    gradient: dLoss / dlog-prob of every token.   ratio: importance ratios at the algorithm's level, for the sides of `clip_range`.

    >>> found = account([[np.array([-3.0, 1.0]), np.array([0.0])], [np.zeros(0), np.array([4.0, 0.0])]])
    >>> found.total, found.raised, [(part.name, part.share) for part in found.groups]
    (8.0, 0.375, [('0', 0.5), ('1', 0.5)])
    >>> [(part.name, part.tokens, part.silent, part.gradient) for part in found.lengths]
    [('1', 1, 1, 0.0), ('2-3', 4, 1, 8.0)]
    """
    flat = [(place, i, np.asarray(column, np.float64)) for place, group in enumerate(gradient) for i, column in enumerate(group)]
    every = np.concatenate([column for _, _, column in flat]) if flat else np.zeros(0)
    total = float(np.abs(every).sum())

    def part(name: str, columns: Sequence[np.ndarray]) -> Part:
        values = np.concatenate(columns) if columns else np.zeros(0)
        found = float(np.abs(values).sum())
        return Part(name, values.size, int(np.count_nonzero(values == 0.0)), found, found / total if total > 0.0 else 0.0)

    doublings = sorted({column.size.bit_length() for _, _, column in flat if column.size})
    sides: tuple[Part, ...] = ()
    if clip_range is not None and len(ratio):
        ratios = np.concatenate([np.asarray(column, np.float64) for group in ratio for column in group])
        outside = (ratios < clip_range[0], ratios > clip_range[1])
        chosen = (outside[0], ~(outside[0] | outside[1]), outside[1])
        sides = tuple(part(name, [every[rows]]) for name, rows in zip(SIDES, chosen, strict=True))
    return Accounting(
        total=total,
        raised=float(-every[every < 0.0].sum() / total) if total > 0.0 else 0.0,
        groups=tuple(part(str(place), [column for at, _, column in flat if at == place]) for place in range(len(gradient))),
        completions=tuple(part(f"{place}/{i}", [column]) for place, i, column in flat),
        lengths=tuple(part(_bucket(k), [c for _, _, c in flat if c.size.bit_length() == k]) for k in doublings),
        sides=sides,
    )


def _bucket(doubling: int) -> str:
    first, last = 1 << (doubling - 1), (1 << doubling) - 1
    return str(first) if first == last else f"{first}-{last}"
