"""The paired difference of two groups of runs on held-out prompts, and what it shows.

The rewards of a prompt are its mean over completions.  Two groups are compared on the prompts that
all of their runs answered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.errors import ConfigError, DataError
from groupwise.utils import statistics
from groupwise.utils.spelling import counted, nearest
from groupwise.utils.statistics import Estimate
from groupwise.viewer.curves import EVALUATED
from groupwise.viewer.groups import PROMPT, groups_in, key_of, mean, numbers
from groupwise.viewer.seeds import RunGroup
from groupwise.viewer.sources import HELD_OUT, CompletionSource

PREFERRED = ("eval/greedy", "eval/sampled", "eval/reward", "eval/loss", "reward", "loss")
"""The metric that is compared where none is named: the first that every run has."""
AGREEING = 6
"""So many prompts that differ all by the same amount show a difference: by a sign test, five could
agree by chance in more than 5 % of cases."""


@dataclass(frozen=True)
class PairedDifference:
    """The mean rewards of two sides on the prompts that both answered.

    steps: of the left and the right side.  prompts: their number.  left, right: mean reward.
    runs: of each side; of a run that is compared with itself there is one, and `same_run` is true.
    over_prompts: right less left, with the interval that prompts alone give: these runs on other
        prompts.
    over_seeds: the same, with the interval that seeds alone give: other seeds on these prompts;
        None unless both sides have two runs.
    """

    steps: tuple[int, int]
    prompts: int
    runs: tuple[int, int]
    left: float
    right: float
    over_prompts: Estimate
    over_seeds: Estimate | None
    held_out: bool = True
    same_run: bool = False

    @property
    def shown(self) -> bool:
        """Whether each interval that is known leaves out zero."""
        if math.isnan(self.over_prompts.half):
            by_prompts = self.prompts >= AGREEING and self.over_prompts.mean != 0.0
        else:
            by_prompts = abs(self.over_prompts.mean) > self.over_prompts.half
        if self.over_seeds is None:
            return by_prompts
        # Without a half width all runs of a side agree.
        half = 0.0 if math.isnan(self.over_seeds.half) else self.over_seeds.half
        return by_prompts and abs(self.over_seeds.mean) > half


def paired_difference(left: RunGroup, right: RunGroup) -> PairedDifference:
    """Compare two groups at the newest step that all of their runs evaluated.

    Raises DataError, with a sentence for whoever compares, where nothing can be paired.
    """
    evaluated = []
    for source in (*left.sources, *right.sources):
        steps = set(source.steps(HELD_OUT))
        if not steps:
            raise DataError(
                f"no held-out prompts are paired: {source.path} has no evaluations; hold prompts"
                " back (data.eval_fraction or data.eval_path)"
            )
        evaluated.append(steps)
    shared = set.intersection(*evaluated)
    if not shared:
        raise DataError(
            f"no held-out prompts are paired: the runs of {left.label} and {right.label} have no"
            " evaluated step in common; give both the same eval.every"
        )
    step = max(shared)
    lefts = [rewards_by_prompt(source, step, HELD_OUT) for source in left.sources]
    rights = [rewards_by_prompt(source, step, HELD_OUT) for source in right.sources]
    paired = pair(lefts, rights, (step, step))
    if paired is None:
        raise DataError(
            f"no held-out prompts are paired: {left.label} and {right.label} share none; give both"
            " the same held-out data"
        )
    return paired


def pair(
    lefts: Sequence[Mapping[str, float]],
    rights: Sequence[Mapping[str, float]],
    steps: tuple[int, int],
    *,
    held_out: bool = True,
    same_run: bool = False,
) -> PairedDifference | None:
    """Compare two sides, each a list of runs with the reward of each prompt by its key.

    Returns None where no prompt has a reward in every run.
    """
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
        steps=steps,
        prompts=len(prompts),
        runs=(len(lefts), len(rights)),
        left=float(left_RP.mean()),
        right=float(right_RP.mean()),
        over_prompts=statistics.mean(difference_P.tolist()),
        over_seeds=over_seeds,
        held_out=held_out,
        same_run=same_run,
    )


def _table(runs: Sequence[Mapping[str, float]], prompts: Sequence[str]) -> np.ndarray:
    """Return rewards with one row per run and one column per prompt."""
    rows = []
    for run in runs:
        rows.append([run[prompt] for prompt in prompts])
    return np.array(rows)


def rewards_by_prompt(source: CompletionSource, step: int, kind: str) -> dict[str, float]:
    """Return the mean reward of each prompt of a step, by the prompt's key."""
    rows = source.table(step, ("group", *PROMPT, "reward"), kind)
    reward = numbers(rows, "reward")
    rewards = {}
    for _, places, prompt in groups_in(rows):
        average = mean(reward[places])
        if average is not None:
            rewards[key_of(prompt)] = average
    return rewards


def differences(groups: Sequence[RunGroup]) -> list[str]:
    """Say how each group differs from the first, A, on the held-out prompts that both answered."""
    first, *others = groups
    lines = []
    for number, group in enumerate(others, 2):
        try:
            lines += verdict(paired_difference(first, group), "A", letter(number))
        except DataError as error:
            reason = str(error)
            lines.append(f"{reason[0].upper()}{reason[1:]}.")
    return lines


def verdict(paired: PairedDifference, left: str, right: str) -> list[str]:
    """Say what a paired difference shows, in sentences.   left, right: names of the sides."""
    by, (first, second) = paired.over_prompts, paired.steps
    prompts = counted(paired.prompts, "held-out prompt" if paired.held_out else "prompt")
    when = f" at step {first}"
    if first != second:
        when = f" ({left} at step {first}, {right} at step {second})"
    which = "this run" if paired.same_run else "these runs"
    lines = [
        f"Mean reward on the {prompts} that both answered{when}: {left} {paired.left:.3f},"
        f" {right} {paired.right:.3f}.",
        f"{right} - {left}, paired by prompt: {by.mean:+.3f}{half_of(by)} ({which},"
        " other prompts).",
    ]
    if paired.over_seeds is not None:
        over = paired.over_seeds
        lines.append(
            f"{right} - {left}, over seeds: {over.mean:+.3f}{half_of(over)} (other seeds, these"
            " prompts)."
        )
    higher = right if by.mean > 0 else left
    if not paired.shown:
        lines.append(f"These data show no difference between {left} and {right}.")
    elif paired.over_seeds is None and not paired.same_run:
        lines.append(f"Of these very runs {higher} has the higher reward.")
    else:
        lines.append(f"These data show that {higher} has the higher reward.")
    if not paired.same_run:
        lines += _of_single_runs(paired, left, right)
    return lines


def half_of(estimate: Estimate) -> str:
    """Write half of an interval behind its mean; nothing where it is not known."""
    return "" if math.isnan(estimate.half) else f" ±{estimate.half:.3g}"


def _of_single_runs(paired: PairedDifference, left: str, right: str) -> list[str]:
    """Say of sides with one run that nothing is known of other seeds."""
    sides = zip((left, right), paired.runs, strict=True)
    single = [name for name, runs in sides if runs == 1]
    if not single:
        return []
    are = "is a single run" if len(single) == 1 else "are single runs"
    return [
        f"{' and '.join(single)} {are}: how much another seed changes is not known. Compare at"
        " least two runs with two (`groupwise train RECIPE --seeds 3`)."
    ]


def choose_metric(groups: Sequence[RunGroup], wanted: str | None) -> str:
    """Return the metric to compare.  Raises ConfigError if not every run has it."""
    logged = []
    for group in groups:
        for source in group.sources:
            logged.append(source.metrics().values.keys() - {"wall"})
    shared = set.intersection(*logged)
    if wanted is not None and wanted in shared:
        return wanted
    if wanted is not None:
        near = nearest(wanted, sorted(shared))
        hint = f"all have {_listed(shared)}"
        if near is not None:
            hint = f"did you mean {near}?"
        raise ConfigError(f"not every run has the metric {wanted!r}; {hint}")
    for name in PREFERRED:
        if name in shared:
            return name
    raise ConfigError(f"the runs share no metric of {', '.join(PREFERRED)}: name one with --metric")


def _listed(names: set[str]) -> str:
    held_out = sorted(name for name in names if name.startswith(EVALUATED))
    return ", ".join((held_out or sorted(names))[:12])


def letter(number: int) -> str:
    """Return A, B, C ... for the groups of a comparison, and G27 from the 27th on.

    >>> letter(1), letter(27)
    ('A', 'G27')
    """
    return chr(ord("A") + number - 1) if number <= 26 else f"G{number}"
