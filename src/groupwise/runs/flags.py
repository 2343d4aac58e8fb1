"""Flags: what the metrics of the last steps warn of, in words for readers who do not know the metric.

One table for the terminal, the viewer and reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.training.metric_table import find

RECENT = 10
"""Steps whose mean a flag looks at."""
MOST = 0.8
"""Share of the groups from which on they are most of them."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A warning: a metric beyond a bound, what that means, and what to do about it."""

    metric: str
    wrong: Callable[[float], bool]
    title: str
    meaning: str
    """With `{share}` or `{value}`: the metric's mean over the last steps."""
    remedy: str
    solved: bool = False
    """It also comes of success: where most groups are solved it says nothing."""

    def said(self, value: float) -> str:
        """`meaning` with the metric's value in it."""
        return self.meaning.format(share=f"{value:.0%}", value="NaN" if math.isnan(value) else f"{value:.3g}")


FLAGS = (
    Flag(
        "groups/solved",
        lambda v: v > MOST,
        "Most groups are solved",
        "Every completion is right in {share} of the groups: there is little left to learn from these prompts.",
        "Stop here, or go on with harder prompts.",
    ),
    Flag(
        "groups/failed",
        lambda v: v > MOST,
        "Most groups hold no right completion",
        "No completion is right in {share} of the groups, so nothing says what would be better.",
        "Easier prompts, a better start (SFT), a larger group.group_size, partial rewards.",
    ),
    Flag(
        "tokens/trained",
        lambda v: v < 1,
        "Nothing is trained",
        "Rewards are equal within every group, or every completion is cut off and masked.",
        "Raise rollout.max_new_tokens, or set group.truncated: keep; else as for dead groups: other prompts, a better start.",
        solved=True,
    ),
    Flag(
        "groups/dead",
        lambda v: v > MOST,
        "Most groups are dead",
        "{share} of the groups teach nothing: all their completions got one reward, or were masked.",
        "Too hard: easier prompts, a better start (SFT), a larger group.group_size, partial rewards. Too easy: harder "
        "prompts. Half of both: objective dapo, or group.dead_groups: refill.",
        solved=True,
    ),
    Flag(
        "completions/clipped_ratio",
        lambda v: v > 0.5,
        "Most completions are cut off",
        "{share} of the completions hit the length limit before they ended.",
        "Raise rollout.max_new_tokens; check that the end token can be sampled (groupwise check); reward stopping (soft_overlong).",
    ),
    Flag(
        "entropy",
        lambda v: v < 0.01,
        "The policy no longer explores",
        "Its entropy is {value} nats: it is sure of nearly every token.",
        "Lower optimizer.lr, stop earlier, clip higher (dapo), or give group.entropy_bonus.",
        solved=True,
    ),
    Flag(
        "mismatch/max",
        lambda v: v > 0.1,
        "What is sampled is not what is scored",
        "The same token under the same weights gets log-probs {value} nats apart; rounding explains 0.00001 to 0.01.",
        "groupwise check RECIPE says where.",
    ),
    Flag(
        "completions/duplicates",
        lambda v: v > 0.8,
        "The group says one thing again and again",
        "{share} of the completions repeat another of their group, token for token.",
        "The policy has collapsed, or rollout.temperature is too low.",
        solved=True,
    ),
    Flag(
        "skipped_updates",
        lambda v: v > 0,
        "Updates were skipped",
        "{value} updates a step were not made, because a loss or a gradient was not finite.",
        "Lower optimizer.lr; look at the rewards' range.",
    ),
    Flag(
        "kl/guarded",
        lambda v: v > 0,
        "Tokens far off the reference",
        "{value} tokens a step lie 20 nats or more from the reference.",
        "Lower optimizer.lr, or raise group.beta.",
    ),
    Flag(
        "value/explained",
        lambda v: v < 0.0,
        "The critic explains nothing",
        "Its values are farther from the returns than their mean is ({value} of the variance explained).",
        "Raise or lower critic.lr, train it first (critic.pretrain), or give it a backbone of its own (critic.path).",
        solved=True,
    ),
    Flag(
        "reward",
        math.isnan,
        "Nothing could be scored",
        "Every reward function said None to every completion.",
        "Try them: groupwise score.",
    ),
)


def flags(history: Sequence[Mapping[str, float]]) -> list[str]:
    """The warnings that the last steps raise, one line each; empty if there are none.

    history: metrics of each step, oldest first.

    >>> flags([{"groups/solved": 0.87, "groups/dead": 0.9, "entropy": 0.001, "completions/duplicates": 0.9}])
    ['groups/solved 87%: most groups are solved. Stop here, or go on with harder prompts.']
    """
    found = []
    for flag, mean in raised(history):
        row = find(flag.metric)
        shown = f"{mean:.0%}" if row is not None and row.unit == "share" else f"{mean:.3g}"
        found.append(f"{flag.metric} {shown}: {flag.title[0].lower()}{flag.title[1:]}. {flag.remedy}")
    return found


def raised(history: Sequence[Mapping[str, float]]) -> list[tuple[Flag, float]]:
    """The flags that the last steps raise, each with its metric's mean over them.

    What success looks like (dead groups, the same texts, no entropy) is no warning where most groups are solved; of flags with one
    cause only the first is raised: nothing trained, all groups failed, dead groups.
    """
    recent = history[-RECENT:]
    means = {}
    for flag in FLAGS:
        values = [metrics[flag.metric] for metrics in recent if flag.metric in metrics]
        if values:
            means[flag.metric] = float(np.mean(values))
    solved, failed = (means.get(f"groups/{name}", 0.0) > MOST for name in ("solved", "failed"))
    found = []
    for flag in FLAGS:
        if flag.metric not in means or not flag.wrong(mean := means[flag.metric]) or (flag.solved and solved):
            continue
        if flag.metric in ("tokens/trained", "groups/dead") and (failed or any(one.metric == "tokens/trained" for one, _ in found)):
            continue
        found.append((flag, mean))
    return found
