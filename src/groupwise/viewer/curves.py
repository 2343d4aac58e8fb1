"""Metrics over steps: of one run, or the mean over runs that differ by their seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from groupwise.utils import statistics
from groupwise.viewer.metric_columns import Metrics
from groupwise.viewer.seeds import RunGroup
from groupwise.viewer.sources import CompletionSource

STEP, TOKENS, TIME = "step", "tokens", "time"
"""What a curve lies over: steps, tokens sampled, seconds since the first step."""
EVALUATED = "eval/"
"""Metrics of held-out prompts begin so."""
FEWEST_SMOOTHED = 20
"""Points of a curve that is smoothed; of fewer the average comes late."""


@dataclass(frozen=True)
class Curve:
    """A metric of a run, or its mean over the runs of a group, at the S steps where it is known.

    label: the run or the group.  x_S: steps, tokens or seconds; means over the
        runs.  half_S: half of the 95 % interval over the runs; NaN for one run.
    value_RS: of each of the R runs.
    """

    label: str
    step_S: np.ndarray
    x_S: np.ndarray
    value_RS: np.ndarray
    value_S: np.ndarray
    half_S: np.ndarray

    @property
    def runs(self) -> int:
        """The number of runs."""
        return len(self.value_RS)

    def thinned(self, points: int) -> Curve:
        """Return at most `points` points: each is the mean of a stretch, at the stretch's end."""
        count = len(self.step_S)
        cut = -(-count // points)
        if cut <= 1:
            return self
        starts = np.arange(0, count, cut)
        sizes = np.diff(np.append(starts, count))
        ends = starts + sizes - 1
        return replace(
            self,
            step_S=self.step_S[ends],
            x_S=self.x_S[ends],
            value_RS=np.add.reduceat(self.value_RS, starts, axis=1) / sizes,
            value_S=np.add.reduceat(self.value_S, starts) / sizes,
            half_S=np.add.reduceat(self.half_S, starts) / sizes,
        )


def curve_of(group: RunGroup, metric: str, *, across: str = STEP, smoothing: float = 0.0) -> Curve:
    """Read a metric of a group at the steps at which every run has it.

    across: `step`, `tokens` or `time`.  smoothing: the weight of the past in a moving average of
        each run, before the mean over runs; held-out metrics and short curves are not smoothed.
    """
    known = [_KnownValues.of(source, metric, across) for source in group.sources]
    step_S = known[0].step_S
    for one in known[1:]:
        step_S = np.intersect1d(step_S, one.step_S)
    x_of_runs, value_of_runs = [], []
    for one in known:
        place_S = np.searchsorted(one.step_S, step_S)
        x_of_runs.append(one.x_S[place_S])
        value_of_runs.append(smoothed(metric, one.value_S, smoothing)[place_S])
    x_S = np.mean(x_of_runs, axis=0)
    value_RS = np.array(value_of_runs)
    mean_S, half_S = statistics.means_of_runs(value_RS)
    return Curve(group.label, step_S, x_S, value_RS, mean_S, half_S)


@dataclass(frozen=True)
class _KnownValues:
    """A metric of one run at the steps where it is known."""

    step_S: np.ndarray
    x_S: np.ndarray
    value_S: np.ndarray

    @classmethod
    def of(cls, source: CompletionSource, metric: str, across: str) -> _KnownValues:
        metrics = source.metrics()
        step_S = np.array(metrics.steps, dtype=np.int64)
        value_S = np.array(metrics.values.get(metric, np.full(len(step_S), np.nan)))
        x_S = places(metrics, across)
        known_S = np.isfinite(value_S) & np.isfinite(x_S)
        return cls(step_S[known_S], x_S[known_S], value_S[known_S])


def places(metrics: Metrics, across: str) -> np.ndarray:
    """Return where each step lies: its number, the tokens or the seconds that had gone by."""
    if across == TOKENS and "tokens/sampled" in metrics.values:
        sampled_S = np.array(metrics.values["tokens/sampled"])
        return np.cumsum(np.nan_to_num(sampled_S, posinf=0.0, neginf=0.0))
    if across == TIME and "wall" in metrics.values:
        wall_S = np.array(metrics.values["wall"])
        known = wall_S[np.isfinite(wall_S)]
        return np.round(wall_S - (known[0] if known.size else 0.0), 1)
    return np.array(metrics.steps, dtype=float)


def is_smoothed(metric: str, points: int, weight: float) -> bool:
    """Return whether a curve is smoothed: held-out metrics and short curves are not."""
    return weight > 0.0 and points >= FEWEST_SMOOTHED and not metric.startswith(EVALUATED)


def smoothed(metric: str, value_S: np.ndarray, weight: float) -> np.ndarray:
    """Average each value with those before it, whose weights fall off by `weight` a step."""
    if not is_smoothed(metric, len(value_S), weight):
        return value_S
    averages = []
    total = weights = 0.0
    for value in value_S.tolist():
        total = weight * total + (1.0 - weight) * value
        weights = weight * weights + (1.0 - weight)
        averages.append(total / weights)
    return np.array(averages)
