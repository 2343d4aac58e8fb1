"""Groups of runs compared: mean and 95 % interval over seeds, and the paired difference on held-out
prompts that both groups answered.

Importing this file does not import torch.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from groupwise.errors import ConfigError, DataError
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.origin import origin_of
from groupwise.runs.rollout_files import EVALUATIONS, steps, table
from groupwise.runs.run_files import RunFiles
from groupwise.utils import statistics
from groupwise.utils.spelling import counted, nearest
from groupwise.utils.statistics import Estimate
from groupwise.viewer.groups import PROMPT, groups_in, key_of, mean, numbers

EVALUATED = "eval/"
PREFERRED = ("eval/greedy", "eval/sampled", "eval/reward", "eval/loss")
"""The metric that is compared where none is named: the first that every run has."""
REWARDS = ("eval/reward", "eval/sampled")
"""Metrics that are means over the completions whose rewards are paired."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ by their seed.

    label: what was typed.  metrics: of each run, step -> metric -> value.
    """

    label: str
    folders: tuple[Path, ...]
    metrics: tuple[Mapping[int, Mapping[str, float]], ...]

    def values(self, step: int, metric: str) -> list[float]:
        """Return a metric's values at a step, one for each run that has it."""
        return [run[step][metric] for run in self.metrics if metric in run.get(step, {})]

    def steps(self, metric: str) -> list[int]:
        """List the steps at which every run has the metric."""
        return [step for step in self.metrics[0] if len(self.values(step, metric)) == self.size]

    @property
    def size(self) -> int:
        """The number of runs."""
        return len(self.folders)


@dataclass(frozen=True)
class PairedDifference:
    """The mean rewards of two groups of runs on the held-out prompts that both answered.

    step: at which.  prompts: their number.  left, right: mean reward.
    runs: of each group.
    over_prompts: right less left, with the interval that prompts alone give: these runs on other
        prompts.
    over_seeds: the same, with the interval that seeds alone give: other seeds on these prompts;
        None unless both groups have two runs.
    """

    step: int
    prompts: int
    runs: tuple[int, int]
    left: float
    right: float
    over_prompts: Estimate
    over_seeds: Estimate | None

    @property
    def shown(self) -> bool:
        """Whether each interval that is known leaves out zero."""
        known = [self.over_prompts]
        if self.over_seeds is not None:
            known.append(self.over_seeds)
        return all(_excludes_zero(estimate) for estimate in known)


def _excludes_zero(estimate: Estimate) -> bool:
    return not math.isnan(estimate.half) and abs(estimate.mean) > estimate.half


def read_group(pattern: str) -> RunGroup:
    """Read the runs of a pattern (`runs/a-*`) or of a folder.  Raises ConfigError, RunError."""
    folders: dict[Path, Path] = {}
    for path in sorted(glob.glob(pattern)):
        origin = origin_of(path) if Path(path).is_dir() else None
        if origin is not None:
            folders[origin.folder.resolve()] = origin.folder
    if not folders:
        raise ConfigError(
            f"no run folder is called {pattern!r}; a pattern with * stands in quotes: 'runs/mine-*'"
        )
    metrics = []
    for folder in folders.values():
        lines = {line["step"]: _numbers(line) for line in read_metrics(folder)}
        if not lines:
            raise DataError(f"{folder} has no metrics: leave it out of {pattern!r}")
        metrics.append(lines)
    return RunGroup(pattern, tuple(folders.values()), tuple(metrics))


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line that are numbers."""
    found = {}
    for name, value in line.items():
        if isinstance(value, (int, float)) and not math.isnan(value):
            found[name] = float(value)
    return found


def check_apart(groups: Sequence[RunGroup]) -> None:
    """Raise ConfigError if a run stands in two groups: they would not be independent."""
    seen: dict[Path, str] = {}
    for group in groups:
        for folder in group.folders:
            place = folder.resolve()
            if place in seen:
                raise ConfigError(
                    f"{folder} is among both {seen[place]!r} and {group.label!r}: a run is compared"
                    " with others, not with itself"
                )
            seen[place] = group.label


def choose_metric(groups: Sequence[RunGroup], wanted: str | None) -> str:
    """Return the metric to compare.  Raises ConfigError if not every run has it."""
    logged = []
    for group in groups:
        for run in group.metrics:
            logged.append(set().union(*run.values()))
    shared = set.intersection(*logged)
    if wanted is not None and wanted in shared:
        return wanted
    if wanted is not None:
        near = nearest(wanted, sorted(shared))
        hint = f"all have {_listed(shared)}"
        if near is not None:
            hint = f"did you mean {near}?"
        raise ConfigError(f"not every run has the metric {wanted!r}; {hint}")
    for name in (*PREFERRED, "reward", "loss"):
        if name in shared:
            return name
    raise ConfigError(f"the runs share no metric of {', '.join(PREFERRED)}: name one with --metric")


def _listed(names: set[str]) -> str:
    held_out = sorted(name for name in names if name.startswith(EVALUATED))
    return ", ".join((held_out or sorted(names))[:12])


def paired_difference(left: RunGroup, right: RunGroup) -> PairedDifference | None:
    """Compare two groups at the newest step that all of their runs evaluated.

    Returns None where there is no such step, or no prompt with a reward on both sides.
    """
    evaluated = []
    for folder in (*left.folders, *right.folders):
        evaluated.append(set(steps(RunFiles(folder), EVALUATIONS)[0]))
    shared = set.intersection(*evaluated)
    if not shared:
        return None
    step = max(shared)
    lefts = [_rewards_of(folder, step) for folder in left.folders]
    rights = [_rewards_of(folder, step) for folder in right.folders]
    prompts = sorted(set.intersection(*map(set, [*lefts, *rights])))
    if not prompts:
        return None
    left_RP = _table(lefts, prompts)
    right_RP = _table(rights, prompts)
    difference_P = right_RP.mean(axis=0) - left_RP.mean(axis=0)
    over_seeds = None
    if len(left_RP) > 1 and len(right_RP) > 1:
        over_seeds = statistics.difference(
            left_RP.mean(axis=1).tolist(), right_RP.mean(axis=1).tolist()
        )
    return PairedDifference(
        step=step,
        prompts=len(prompts),
        runs=(len(lefts), len(rights)),
        left=float(left_RP.mean()),
        right=float(right_RP.mean()),
        over_prompts=statistics.mean(difference_P.tolist()),
        over_seeds=over_seeds,
    )


def _table(runs: Sequence[Mapping[str, float]], prompts: Sequence[str]) -> np.ndarray:
    """Return rewards with one row per run and one column per prompt."""
    rows = []
    for run in runs:
        rows.append([run[prompt] for prompt in prompts])
    return np.array(rows)


def _rewards_of(folder: Path, step: int) -> dict[str, float]:
    """Return the mean reward of each held-out prompt, by the prompt's key."""
    rows = table(RunFiles(folder), step, ("group", *PROMPT, "reward"), EVALUATIONS)
    reward = numbers(rows, "reward")
    found = {}
    for _, places, prompt in groups_in(rows):
        average = mean(reward[places])
        if average is not None:
            found[key_of(prompt)] = average
    return found


def compare(groups: Sequence[RunGroup], metric: str, console: Console) -> None:
    """Print a table of the metric by step, and how each group differs from the first."""
    first, *others = groups
    shared = set.intersection(*[set(group.steps(metric)) for group in groups])
    if not shared:
        raise DataError(f"there is no step at which all runs have {metric}")
    columns, differences = [], []
    for number, group in enumerate(groups, 1):
        text = f"{_name(number)}  {group.label}: {counted(group.size, 'run')}"
        console.print(text, highlight=False, markup=False)
        columns.append(f"{_name(number)} {metric}")
        if number > 1:
            differences.append(f"{_name(number)} - A")
    console.print()
    shown = Table("step", *columns, *differences, box=None, pad_edge=False)
    for step in sorted(shared):
        cells = []
        for group in groups:
            average = statistics.mean_of_runs(group.values(step, metric))
            cells.append(f"{average.mean:.4g}{_half(average)}")
        for group in others:
            difference = statistics.difference(
                first.values(step, metric), group.values(step, metric)
            )
            cells.append(f"{difference.mean:+.4g}{_half(difference)}")
        shown.add_row(str(step), *cells)
    console.print(shown)
    console.print("(± is half of a 95 % interval over runs)\n", style="dim", highlight=False)
    if metric not in REWARDS:
        console.print(f"The sentences are about the reward, the table about {metric}.\n")
    for number, group in enumerate(others, 2):
        for line in verdict(paired_difference(first, group), "A", _name(number)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _name(number: int) -> str:
    """Return A, B, C ... and G27 from the 27th on."""
    if number > 26:
        return f"G{number}"
    return chr(ord("A") + number - 1)


def _half(estimate: Estimate) -> str:
    return "" if math.isnan(estimate.half) else f" ±{estimate.half:.3g}"


def verdict(paired: PairedDifference | None, left: str, right: str) -> list[str]:
    """Return what a paired difference shows, in sentences."""
    if paired is None:
        return [f"{left} and {right} share no evaluated prompts, so nothing is paired."]
    by = paired.over_prompts
    lines = [
        f"Mean reward on the {counted(paired.prompts, 'held-out prompt')} that both answered at"
        f" step {paired.step}: {left} {paired.left:.3f}, {right} {paired.right:.3f}.",
        f"{right} - {left}, paired by prompt: {by.mean:+.3f}{_half(by)} (these runs,"
        " other prompts).",
    ]
    if paired.over_seeds is not None:
        over = paired.over_seeds
        lines.append(
            f"{right} - {left}, over seeds: {over.mean:+.3f}{_half(over)} (other seeds, these"
            " prompts)."
        )
    higher = right if by.mean > 0 else left
    if not paired.shown:
        lines.append(f"These data show no difference between {left} and {right}.")
    elif paired.over_seeds is None:
        lines.append(f"Of these very runs {higher} has the higher reward.")
    else:
        lines.append(f"These data show that {higher} has the higher reward.")
    single = [name for name, runs in zip((left, right), paired.runs, strict=True) if runs == 1]
    if single:
        are = "is a single run" if len(single) == 1 else "are single runs"
        lines.append(
            f"{' and '.join(single)} {are}: how much another seed changes is not known. Compare at"
            " least two runs with two (`groupwise train RECIPE --seeds 3`)."
        )
    return lines
