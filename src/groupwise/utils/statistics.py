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


T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 0.975 quantile of Student's t with 1, 2, ... 30 degrees of freedom."""


def _t_975(freedom: float) -> float:
    """Return the 0.975 quantile of Student's t, with the degrees of freedom rounded down."""
    place = max(int(freedom), 1)
    if place <= len(T_975):
        return T_975[place - 1]
    return 1.959964 + 2.46 / place  # within 0.002 from 31 on


def means_of_runs(value_RS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over a few runs at each step, and half the widths of Student's 95 % intervals.

    value_RS: a row for each of the R runs, a column for each of the S steps.  The half widths of a
        single run are NaN.
    """
    runs = len(value_RS)
    mean_S = value_RS.mean(axis=0)
    if runs < 2:
        return mean_S, np.full_like(mean_S, math.nan)
    error_S = value_RS.std(axis=0, ddof=1) / math.sqrt(runs)
    return mean_S, _t_975(runs - 1) * error_S


def mean_of_runs(values: Sequence[float]) -> Estimate:
    """Mean over a few runs with Student's 95 % interval.

    >>> str(mean_of_runs([0.5, 0.6, 0.7])), str(mean_of_runs([0.5]))
    ('0.600 ±0.248', '0.500')
    """
    mean_S, half_S = means_of_runs(np.asarray(values, dtype=float)[:, np.newaxis])
    return Estimate(float(mean_S[0]), float(half_S[0]))


def difference(left: Sequence[float], right: Sequence[float]) -> Estimate:
    """Mean of `right` less that of `left`, with Welch's 95 % interval (1947); NaN for its half if
    a side has a single value.

    >>> str(difference([0.5, 0.6, 0.7], [0.7, 0.8, 0.9]))
    '0.200 ±0.227'
    """
    lefts, rights = np.asarray(left), np.asarray(right)
    gap = float(rights.mean() - lefts.mean())
    if lefts.size < 2 or rights.size < 2:
        return Estimate(gap, math.nan)
    left_error = float(lefts.var(ddof=1)) / lefts.size
    right_error = float(rights.var(ddof=1)) / rights.size
    both = left_error + right_error
    if both == 0.0:
        return Estimate(gap, math.nan)
    freedom = both**2 / (left_error**2 / (lefts.size - 1) + right_error**2 / (rights.size - 1))
    return Estimate(gap, _t_975(freedom) * math.sqrt(both))
