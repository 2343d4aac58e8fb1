"""Means and shares with their 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and half the width of its 95 % interval; NaN where so few or so equal
    values say nothing of it.
    """

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if math.isnan(self.half) else f"{self.mean:.3f} ±{self.half:.3f}"


def proportion(successes: float, count: int) -> Estimate:
    """Share of successes with Wilson's 95 % interval, given as the larger distance from the share
    to an end.

    >>> str(proportion(45, 50))
    '0.900 ±0.114'
    """
    if count == 0:
        return Estimate(math.nan, math.nan)
    z, share = 1.959964, successes / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z
        / (1 + z * z / count)
        * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    )
    return Estimate(share, max(centre + half - share, share - centre + half))


def mean(values: Sequence[float], *, shares: bool = False) -> Estimate:
    """Mean of one number per prompt with its normal 95 % interval (prompts are independent, their
    samples are not).

    shares: the numbers are shares.  Where all are 0, or all 1, the interval is Wilson's: that they
        agree does not make the mean certain.

    >>> str(mean([1.0] * 50, shares=True)), str(mean([0.25, 0.75])), str(mean([1.0] * 50))
    ('1.000 ±0.071', '0.500 ±0.490', '1.000')
    """
    numbers = np.asarray([value for value in values if not math.isnan(value)])
    if numbers.size == 0:
        return Estimate(math.nan, math.nan)
    if (numbers == numbers[0]).all():
        extreme = shares and numbers[0] in (0.0, 1.0)  # a verdict may be another number too
        return (
            proportion(float(numbers.sum()), numbers.size)
            if extreme
            else Estimate(float(numbers[0]), math.nan)
        )
    return Estimate(
        float(numbers.mean()), 1.959964 * float(numbers.std(ddof=1)) / math.sqrt(numbers.size)
    )
