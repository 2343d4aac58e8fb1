"""A replay as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from groupwise.inspection.replay import TIMES, Figure, Replay, ReplayedStep
from groupwise.records import Rollout
from groupwise.runs.plan import algorithm_line
from groupwise.utils.spelling import counted

SHOWN = (
    *(
        "rewards, added up",
        "advantages",
        "loss, closed form",
        "log-probs",
        "reference_logp",
        "scored_logp",
        "loss",
        "grad_norm",
    ),
    *("kl", "weights after the step", "optimizer after the step"),
)
"""Figures that are always printed; of the others, those that differ."""
MOST = 3
"""Groups that are named."""


def render(replayed: Replay) -> str:
    """A replay in words and tables."""
    groups, again, changed = replayed.recorded.groups, replayed.again, replayed.changed
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = sum(int(rollout.trained.sum()) for rollout in rollouts)
    lines = [
        (
            f"step {replayed.number} of {replayed.folder}: {counted(len(rollouts), 'completion')}"
            f" of {counted(len(groups), 'prompt')}, {counted(tokens, 'token')}"
        ),
        algorithm_line(again.algorithm),
        _beginning(replayed),
        (
            "compared bit for bit"
            if replayed.apart is None
            else f"compared within a tolerance: {replayed.apart}"
        ),
        "",
    ]
    shown = [figure for figure in replayed.figures if figure.name in SHOWN or not figure.same]
    lines += _table(
        ["", "recorded", "replayed", "largest difference"], [_row(figure) for figure in shown]
    )
    if others := len(replayed.figures) - len(shown):
        lines.append(f"other metrics that are the same: {others}")
    lines += ["", *_gradient("gradient by log-prob", again)]
    if changed is not None:
        lines += ["", f"changed: {algorithm_line(changed.algorithm)}"]
        lines += [f"not computed of the change: {changed.without}"] if changed.without else []
        pairs = compared(again, changed).items()
        lines += _table(
            ["", "recorded", "changed"],
            [[name, _number(one), _number(other)] for name, (one, other) in pairs],
        )
        if changed.parts and again.parts:
            lines += _gradient("changed gradient by log-prob", changed)
            lines.append(
                "  tokens:"
                f" {', '.join(f'{count} {name}' for name, count in pushes(again, changed).items())}"
            )
    lines += ["", *(f"not computed: {note}" for note in replayed.notes)] if replayed.notes else []
    lines += ["", replayed.mismatch] if replayed.mismatch is not None else []
    wrong = [figure.name for figure in replayed.figures if not figure.same]
    whole = "the recorded step computed again is the same" + (
        ", as far as it was computed" if replayed.notes else ""
    )
    return "\n".join([*lines, "", f"NOT the same: {', '.join(wrong)}" if wrong else whole])


def _beginning(replayed: Replay) -> str:
    if replayed.begun is None:
        return "without a model: from the recorded log-probs"
    way = replayed.number - 1 - replayed.begun
    begin = (
        f"checkpoint {replayed.begun}" if replayed.begun else "the model that the run began with"
    )
    return f"from {begin}" + (f", by way of {counted(way, 'recorded step')}" if way else "")


def _row(figure: Figure) -> list[str]:
    limit = "" if figure.same or not figure.limit else f" (at most {figure.limit:.2g})"
    difference = "0" if figure.difference == 0.0 else f"{figure.difference:.2g}"
    return [
        figure.name,
        _number(figure.recorded),
        _number(figure.replayed),
        difference + limit + ("" if figure.same else "  <--"),
    ]


def _gradient(title: str, outcome: ReplayedStep) -> list[str]:
    """How large a gradient is, and the groups with the largest shares."""
    if not outcome.parts:
        return []
    total = sum(outcome.gradient)
    largest = sorted(enumerate(outcome.gradient), key=lambda pair: -pair[1])[:MOST]
    shares = ", ".join(f"{place}: {size / total:.1%}" for place, size in largest if size > 0.0)
    return [
        f"{title}: sum of |dLoss/dlog-prob| {_number(total)}",
        *([f"  largest groups: {shares}"] if shares else []),
    ]


def compared(again: ReplayedStep, changed: ReplayedStep) -> dict[str, tuple[float, float]]:
    """What both make of the completions, by name: loss and gradient, and where there was a model
    the metrics that differ.
    """
    figures = {"mean |advantage|": (_size(again.advantages), _size(changed.advantages))}
    if again.parts and changed.parts:
        figures[f"loss, {again.which} pass"] = (again.loss, changed.loss)
        figures["sum of |dLoss/dlog-prob|"] = (sum(again.gradient), sum(changed.gradient))
    if again.step is not None and changed.step is not None:
        one, other = again.step.metrics, changed.step.metrics
        for name in sorted(one.keys() | other.keys()):
            pair = one.get(name, math.nan), other.get(name, math.nan)
            if pair[0] != pair[1] and not all(map(math.isnan, pair)) and not name.startswith(TIMES):
                figures[name] = pair
    return figures


def pushes(again: ReplayedStep, changed: ReplayedStep) -> dict[str, int]:
    """How many tokens both push the same way, the other way, or only one of them."""
    both = [[column for row in _gradients(step) for column in row] for step in (again, changed)]
    one, other = (np.concatenate([np.zeros(0), *columns]) for columns in both)
    return {
        "pushed the same way": int(((one != 0) & (np.sign(one) == np.sign(other))).sum()),
        "pushed the other way": int((one * other < 0).sum()),
        "only by the recorded": int(((one != 0) & (other == 0)).sum()),
        "only by the changed": int(((one == 0) & (other != 0)).sum()),
        "by neither": int(((one == 0) & (other == 0)).sum()),
    }


def _gradients(outcome: ReplayedStep) -> list[list[np.ndarray]]:
    """Of each group and completion: dLoss/dlog-prob of its tokens, 0 at those of completions that
    were not trained.
    """

    def whole(column: np.ndarray, rollout: Rollout) -> np.ndarray:
        return column if column.size else np.zeros(len(rollout))

    rows = zip(outcome.column("gradient"), outcome.groups, strict=True)
    return [[whole(*pair) for pair in zip(row, group.rollouts, strict=True)] for row, group in rows]


def _size(advantages: Sequence[Sequence[np.ndarray]]) -> float:
    values = np.concatenate([np.zeros(0), *(column for group in advantages for column in group)])
    return float(np.abs(values).mean()) if values.size else math.nan


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.6g}"


def _table(head: list[str], rows: Sequence[list[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in [head, *rows]
    ]


# ---------------------------------------------------------------- as JSON


def as_dict(replayed: Replay) -> dict[str, Any]:
    """A replay as JSON has it; numbers that are not finite are null."""
    again, changed = replayed.again, replayed.changed
    figures = [
        {
            "name": figure.name,
            "recorded": _json(figure.recorded),
            "replayed": _json(figure.replayed),
            "difference": _json(figure.difference),
            "limit": figure.limit,
            "same": figure.same,
        }
        for figure in replayed.figures
    ]
    return {
        "run": str(replayed.folder),
        "step": replayed.number,
        "same": replayed.same,
        "begun": replayed.begun,
        "apart": replayed.apart,
        "figures": figures,
        "recorded": _outcome(again),
        "changed": None if changed is None else _outcome(changed),
        "pushes": (
            pushes(again, changed)
            if changed is not None and changed.parts and again.parts
            else None
        ),
        "pass": again.which,
        "mismatch": replayed.mismatch,
        "notes": replayed.notes,
    }


def token_gradients(replayed: Replay) -> list[list[dict[str, Any]]]:
    """Of each group and completion: dLoss/dlog-prob of its tokens, recorded and changed; null if
    there is none.

    0 at the tokens of completions that were not trained.
    """

    def columns(outcome: ReplayedStep | None) -> list[list[list[float] | None]]:
        if outcome is None or not outcome.parts:
            return [[None] * len(group.rollouts) for group in replayed.recorded.groups]
        return [
            [[float(f"{value:.6g}") for value in column] for column in row]
            for row in _gradients(outcome)
        ]

    both = zip(
        replayed.recorded.groups, columns(replayed.again), columns(replayed.changed), strict=True
    )
    return [
        [
            {"index": rollout.index, "recorded": one, "changed": other}
            for rollout, one, other in zip(group.rollouts, recorded, changed, strict=True)
        ]
        for group, recorded, changed in both
    ]


def _outcome(outcome: ReplayedStep) -> dict[str, Any]:
    return {
        "algorithm": algorithm_line(outcome.algorithm),
        "loss": _json(outcome.loss),
        "without": outcome.without,
        "metrics": {
            name: _json(value)
            for name, value in (outcome.step.metrics if outcome.step is not None else {}).items()
        },
        "gradient": outcome.gradient if outcome.parts else None,
    }


def _json(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
