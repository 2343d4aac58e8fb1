"""The health of a run: its flags (`runs/flags.py`), the few figures that say most, and its metrics by subject.

Units and subjects of metrics come from the metric table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from groupwise.runs.flags import RECENT, raised
from groupwise.training.metric_table import METRICS, find

SHOWN = 10
"""Files that a warning names."""

FIGURES = (
    ("reward", "Reward", "mean of the step's completions"),
    ("groups/dead", "Dead groups", "share of prompts whose groups teach nothing: equal rewards, or all masked"),
    ("entropy", "Entropy", "nats per sampled token; falls slowly, not to 0"),
    ("completions/mean_length", "Length", "tokens of a completion, on average"),
    ("completions/clipped_ratio", "Cut off", "share of completions that hit the length limit"),
    ("kl", "KL to reference", "nats; grows slowly"),
    ("grad_norm", "Gradient norm", "before clipping; no spikes"),
    ("ratio/kl", "Off-policy KL", "from the policy that sampled to the one trained, nats; 0 on-policy, below 0.05 else"),
    ("mismatch/max", "Sampler mismatch", "largest gap between sampled and scored log-probs, nats; rounding only"),
    ("eval/greedy", "Held out, greedy", "share of held-out prompts answered rightly"),
    ("eval/sampled", "Held out, sampled", "share of sampled held-out completions that are right"),
    ("accuracy", "Accuracy", "share of pairs or steps judged right"),
    ("loss", "Loss", "says nothing in reinforcement learning: look at the reward"),
)
"""Metric, what it is called, what it means; those that a run does not have are left out, and the loss where there is a reward."""


def flags(history: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """The warnings of the last steps in plain words; empty if there are none.

    >>> flags([{"groups/dead": 0.9, "entropy": 0.5}])[0]["title"]
    'Most groups are dead'
    """
    return [
        {"metric": flag.metric, "title": flag.title, "meaning": flag.said(value), "remedy": flag.remedy}
        for flag, value in raised(history)
    ]


def unread(problems: Sequence[str]) -> list[dict[str, str]]:
    """A warning that names the files of a run that could not be read; none if there are none."""
    if not problems:
        return []
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return [
        {
            "metric": "",
            "title": "Some files cannot be read",
            "meaning": "; ".join(problems[:SHOWN]) + more,
            "remedy": "Everything else is shown. Copy these files anew from where the run was made.",
        }
    ]


def figures(names: Iterable[str]) -> list[dict[str, Any]]:
    """The figures that stand first, of those that the run has."""
    known = set(names)
    chosen = [figure for figure in FIGURES if figure[0] in known and not (figure[0] == "loss" and "reward" in known)]
    return [{"metric": metric, "label": label, "unit": _unit(metric), "meaning": meaning} for metric, label, meaning in chosen]


def _unit(metric: str) -> str:
    row = find(metric)
    return "" if row is None else row.unit


def first(names: Iterable[str]) -> list[str]:
    """The metrics of the figures, and held-out reward, of those that the run has: what the first page draws."""
    known = set(names)
    return [*(figure["metric"] for figure in figures(known)), *(["eval/reward"] if "eval/reward" in known else [])]


HELD_OUT, OTHERS = "Held-out prompts", "Others"


def families(names: Iterable[str]) -> list[dict[str, Any]]:
    """The metrics of a run by subject, in the order of the metric table: first those that stand first, last those without a row.

    >>> [(family["title"], family["names"]) for family in families(["mine", "lr", "eval/nll", "reward"])]
    [('The run', ['reward']), ('The step', ['lr']), ('Held-out prompts', ['eval/nll']), ('Others', ['mine'])]
    """
    known = sorted(name for name in set(names) if not name.endswith("/half_width"))
    leading = [figure["metric"] for figure in figures(known)]
    found: dict[str, list[str]] = {"The run": leading, **{section.title: [] for section in METRICS}, OTHERS: []}
    for name in sorted(known, key=_place):
        if name not in leading:
            title = OTHERS if find(name) is None else HELD_OUT if name.startswith("eval/") else METRICS[_place(name)[0]].title
            found[title].append(name)
    return [{"title": title, "names": inside} for title, inside in found.items() if inside]


@cache
def _place(name: str) -> tuple[int, int, str]:
    """Section and row of a metric in the table, then its name."""
    row = find(name)
    rows = [(i, k, name) for i, section in enumerate(METRICS) for k, one in enumerate(section.metrics) if one is row]
    return rows[0] if rows else (len(METRICS), 0, name)


WORK = (
    ("tokens/sampled", "Tokens sampled", "tokens", "completion tokens of a step"),
    ("tokens/trained", "Tokens trained", "tokens", "with a weight in the loss, over all updates of the step"),
    ("tokens/shared", "Tokens shared", "tokens", "prompt tokens that siblings did not compute again"),
    ("tokens/dead", "Tokens dead", "tokens", "of completions that no update trained: no difference of rewards, or masked"),
    ("tokens/recomputed", "Tokens recomputed", "tokens", "of forward passes that had been made before"),
    (
        "flops/per_second",
        "FLOPs per second",
        "FLOP/s",
        "of the models in this process; divided by the device's peak: its utilisation",
    ),
)
"""Metric, what it is called, its unit, what it means."""
WITHIN = "time/waiting/"
"""Seconds that are a part of others: how long each process waited."""


def work(history: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """The work of a step, on average over the last ones: tokens by use, and seconds by phase with their share of the whole step.

    >>> [row["share"] for row in work([{"time/rollout": 3.0, "time/update": 1.0}])]
    [0.75, 0.25]
    """

    def mean_of(name: str) -> float | None:
        values = [line[name] for line in history[-RECENT:] if name in line and math.isfinite(line[name])]
        return sum(values) / len(values) if values else None

    rows: list[dict[str, Any]] = [
        {"metric": metric, "label": label, "unit": unit, "value": value, "meaning": meaning}
        for metric, label, unit, meaning in WORK
        if (value := mean_of(metric)) is not None
    ]
    names = sorted({name for line in history[-RECENT:] for name in line if name.startswith("time/")})
    phases = {name: mean_of(name) or 0.0 for name in names if not name.startswith(WITHIN)}
    total = sum(phases.values())
    for name, seconds in sorted(phases.items(), key=lambda phase: -phase[1]):
        label = f"Seconds: {name.removeprefix('time/')}"
        rows.append(
            {"metric": name, "label": label, "unit": "seconds", "value": seconds, "meaning": "", "share": seconds / (total or 1.0)}
        )
    return rows
