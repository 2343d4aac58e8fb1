"""Groups of runs compared: means over seeds, a figure of them, and what held-out prompts show.

Importing this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from groupwise.errors import ConfigError, DataError
from groupwise.utils import files, statistics
from groupwise.utils.spelling import counted
from groupwise.viewer.comparison import choose_metric, differences, half_of, letter
from groupwise.viewer.curves import EVALUATED, Curve, curve_of
from groupwise.viewer.figures import CurveFigure, DrawnCurve
from groupwise.viewer.seeds import RunGroup, check_apart, read_group

if TYPE_CHECKING:
    import pandas

REWARDS = ("eval/reward", "eval/sampled")
"""Metrics that are means over the completions whose rewards are paired."""


def compare(*runs: str | Path, metric: str | None = None) -> Comparison:
    """Compare groups of runs, such as `compare("runs/a-*", "runs/b-*")`.

    runs: run folders, or patterns that mean the runs of one setting.  metric: what the table and
        the figure show; by default the first of eval/greedy, eval/sampled, eval/reward, eval/loss,
        reward, loss that every run has.
    `print(comparison)` says what the held-out prompts show; `comparison.table()` is a table for
    pandas; `comparison.save("figure.svg")` writes the figure.  Raises ConfigError, DataError,
    RunError.
    """
    if len(runs) < 2:
        only = ", ".join(map(str, runs))
        raise ConfigError(
            f"compare takes two groups of runs or more, got only {only}: give a second folder or"
            " pattern, such as 'runs/a-*' 'runs/b-*', each in quotes"
        )
    groups = tuple(read_group(str(pattern)) for pattern in runs)
    check_apart(groups)
    return Comparison(groups, choose_metric(groups, metric))


@dataclass(frozen=True)
class Comparison:
    """Groups of runs and the metric that is compared.  A notebook shows its figure."""

    groups: tuple[RunGroup, ...]
    metric: str

    def curves(self) -> list[Curve]:
        """Return the mean of each group with its 95 % interval over runs, by step."""
        return [curve_of(group, self.metric) for group in self.groups]

    def table(self) -> pandas.DataFrame:
        """Return a row for each group and step: series, runs, step, value, low, high.

        The value is the mean over runs; low and high are the ends of its 95 % interval.
        """
        import pandas

        tables = []
        for curve in self.curves():
            columns = {
                "series": curve.label,
                "runs": curve.runs,
                "step": curve.step_S,
                "value": curve.value_S,
                "low": curve.value_S - curve.half_S,
                "high": curve.value_S + curve.half_S,
            }
            tables.append(pandas.DataFrame(columns))
        return pandas.concat(tables, ignore_index=True)

    def sentences(self) -> list[str]:
        """Say how each group differs from the first, A, on the held-out prompts that both have."""
        return differences(self.groups)

    def legend(self) -> list[str]:
        """Say which group is called A, which B, and how many runs each has."""
        lines = []
        for number, group in enumerate(self.groups, 1):
            lines.append(f"{letter(number)}  {group.label}: {counted(len(group.sources), 'run')}")
        return lines

    def __str__(self) -> str:
        return "\n".join([*self.legend(), "", *self.sentences()])

    def figure(self) -> CurveFigure:
        """Return the curves as a figure."""
        curves = [DrawnCurve(curve, number) for number, curve in enumerate(self.curves())]
        return CurveFigure(self.metric, curves)

    def _repr_svg_(self) -> str:
        return self.figure().svg()

    def save(self, file: str | Path) -> Path:
        """Write the figure (`.svg`) or its points (`.csv`).  Raises ConfigError, StorageError."""
        path = files.expanded(file)
        if path.suffix == ".svg":
            text = self.figure().svg()
        elif path.suffix == ".csv":
            text = self.figure().csv()
        else:
            raise ConfigError(f"a figure ends in .svg, its points in .csv, got {str(file)!r}")
        with files.storing(path, "the figure"):
            files.write(path, text.encode())
        return path

    def print(self, console: Console) -> None:
        """Print a table of the metric by step, and how each group differs from the first."""
        for line in self.legend():
            console.print(line, highlight=False, markup=False)
        console.print()
        console.print(self._by_step())
        console.print("(± is half of a 95 % interval over runs)\n", style="dim", highlight=False)
        if self.metric.startswith(EVALUATED) and self.metric not in REWARDS:
            console.print(f"The sentences are about the reward, the table about {self.metric}.\n")
        for line in self.sentences():
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _by_step(self) -> Table:
        """Lay out the steps that all groups have, and how each group differs from the first."""
        curves = self.curves()
        shared_S = curves[0].step_S
        for curve in curves[1:]:
            shared_S = np.intersect1d(shared_S, curve.step_S)
        if not len(shared_S):
            raise DataError(f"there is no step at which all runs have {self.metric}")
        letters = [letter(number) for number in range(1, len(curves) + 1)]
        means = [f"{name} {self.metric}" for name in letters]
        differences = [f"{name} - A" for name in letters[1:]]
        table = Table("step", *means, *differences, box=None, pad_edge=False)
        for step in shared_S.tolist():
            values = [_values_at(curve, step) for curve in curves]
            cells = []
            for runs in values:
                average = statistics.mean_of_runs(runs)
                cells.append(f"{average.mean:.4g}{half_of(average)}")
            for runs in values[1:]:
                difference = statistics.difference(values[0], runs)
                cells.append(f"{difference.mean:+.4g}{half_of(difference)}")
            table.add_row(str(step), *cells)
        return table


def _values_at(curve: Curve, step: int) -> Sequence[float]:
    """Return the value of each run of a group at a step."""
    (place,) = np.flatnonzero(curve.step_S == step)
    return curve.value_RS[:, place].tolist()
