"""The health of a run: its flags, the few figures that say most, and its metrics by subject, as the
metric table has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from groupwise.training.metric_table import METRICS, RECENT, ROWS, find, raised

SHOWN = 10
"""Files that a warning names."""

FIGURES = (
    "reward",
    "groups/dead",
    "entropy",
    "completions/mean_length",
    "completions/clipped_ratio",
    "kl",
    "grad_norm",
    "ratio/kl",
    "mismatch/max",
    "eval/greedy",
    "eval/sampled",
    "accuracy",
    "loss",
)
"""The metrics that say most; those that a run does not have are left out, and the loss where there
is a reward.
"""


def flags(history: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """The warnings of the last steps in plain words; empty if there are none.

    >>> flags([{"groups/dead": 0.9, "entropy": 0.5}])[0]["title"]
    'Most groups are dead'
    """
    return [
        {
            "metric": metric.name,
            "title": flag.title,
            "meaning": flag.said(value),
            "remedy": flag.remedy,
        }
        for metric, flag, value in raised(history)
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
            "remedy": (
                "Everything else is shown. Copy these files anew from where the run was made."
            ),
        }
    ]


def figures(names: Iterable[str]) -> list[dict[str, Any]]:
    """The figures that stand first, of those that the run has."""
    known = set(names)
    if "reward" in known:
        known.discard("loss")
    return [described(name) for name in FIGURES if name in known]


def described(metric: str) -> dict[str, Any]:
    """Label, unit, meaning and usual range of a metric, as the metric table has them."""
    row = ROWS[metric]
    return {
        "metric": metric,
        "label": row.label,
        "unit": row.unit,
        "meaning": f"{row.meaning} Usual: {row.healthy}." if row.healthy else row.meaning,
    }


def first(names: Iterable[str]) -> list[str]:
    """The metrics of the figures, and held-out reward, of those that the run has: what the first
    page draws.
    """
    known = set(names)
    metrics = [figure["metric"] for figure in figures(known)]
    if "eval/reward" in known:
        metrics.append("eval/reward")
    return metrics


HELD_OUT, OTHERS = "Held-out prompts", "Others"


def families(names: Iterable[str]) -> list[dict[str, Any]]:
    """The metrics of a run by subject, in the order of the metric table: first those that stand
    first, last those without a row.

    >>> found = families(["mine", "lr", "reward"])
    >>> [(family["title"], family["names"]) for family in found]
    [('The run', ['reward']), ('The step', ['lr']), ('Others', ['mine'])]
    """
    known = [name for name in set(names) if not name.endswith("/half_width")]
    leading = [figure["metric"] for figure in figures(known)]
    subjects: dict[str, list[str]] = {"The run": leading}
    for section in METRICS:
        subjects[section.title] = []
    subjects[OTHERS] = []
    for name in sorted(known, key=_place):
        if name not in leading:
            subjects[_subject(name)].append(name)
    return [{"title": title, "names": inside} for title, inside in subjects.items() if inside]


def _subject(name: str) -> str:
    """Return the title under which a metric stands."""
    if find(name) is None:
        return OTHERS
    if name.startswith("eval/"):
        return HELD_OUT
    return METRICS[_place(name)[0]].title


@cache
def _place(name: str) -> tuple[int, int, str]:
    """Section and row of a metric in the table, then its name."""
    row = find(name)
    for i, section in enumerate(METRICS):
        for k, one in enumerate(section.metrics):
            if one is row:
                return i, k, name
    return len(METRICS), 0, name


WORK = (
    "tokens/sampled",
    "tokens/trained",
    "tokens/shared",
    "tokens/dead",
    "tokens/recomputed",
    "flops/per_second",
)
"""Metrics of a step's work."""
WITHIN = "time/waiting/"
"""Seconds that are a part of others: how long each process waited."""


def work(history: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """The work of a step, on average over the last ones: tokens by use, and seconds by phase with
    their share of the whole step.

    >>> [row["share"] for row in work([{"time/rollout": 3.0, "time/update": 1.0}])]
    [0.75, 0.25]
    """

    lines = history[-RECENT:]
    rows: list[dict[str, Any]] = []
    for metric in WORK:
        value = _mean(lines, metric)
        if value is not None:
            rows.append({**described(metric), "value": value})
    names: set[str] = set()
    for line in lines:
        names |= {name for name in line if name.startswith("time/")}
    phases = {}
    for name in sorted(names):
        if not name.startswith(WITHIN):
            phases[name] = _mean(lines, name) or 0.0
    total = sum(phases.values()) or 1.0
    for name in sorted(phases, key=phases.__getitem__, reverse=True):
        row = {
            "metric": name,
            "label": f"Seconds: {name.removeprefix('time/')}",
            "unit": "seconds",
            "meaning": "",
            "value": phases[name],
            "share": phases[name] / total,
        }
        rows.append(row)
    return rows


def _mean(lines: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Return the mean of a metric over the lines that have it; None if none has."""
    values = [line[name] for line in lines if math.isfinite(line.get(name, math.nan))]
    return sum(values) / len(values) if values else None
