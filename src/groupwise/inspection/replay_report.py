"""Write a replay as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from groupwise.inspection.replay import TIMES, Figure, Replay, ReplayedStep, flat, joined
from groupwise.runs.plan import algorithm_line
from groupwise.utils.spelling import counted

SHOWN = (
    "rewards, added up",
    "advantages",
    "loss, closed form",
    "log-probs",
    "reference_logp",
    "scored_logp",
    "loss",
    "grad_norm",
    "kl",
    "weights after the step",
    "optimizer after the step",
)
"""Figures that are always printed; of the others, those that differ."""
MOST = 3
"""Groups that are named."""


def render(replayed: Replay) -> str:
    """Write a replay in words and tables."""
    again, changed = replayed.again, replayed.changed
    lines = [*_head(replayed), ""]
    shown = [figure for figure in replayed.figures if figure.name in SHOWN or not figure.same]
    head = ["", "recorded", "replayed", "largest difference"]
    lines += _table(head, [_row(figure) for figure in shown])
    if len(shown) < len(replayed.figures):
        lines.append(f"other metrics that are the same: {len(replayed.figures) - len(shown)}")
    lines += ["", *_gradient("gradient by log-prob", again)]
    if changed is not None:
        lines += ["", *_changed(again, changed)]
    if replayed.notes:
        lines.append("")
    for note in replayed.notes:
        lines.append(f"not computed: {note}")
    if replayed.mismatch is not None:
        lines += ["", replayed.mismatch]
    return "\n".join([*lines, "", _verdict(replayed)])


def _head(replayed: Replay) -> list[str]:
    groups = replayed.recorded.groups
    completions, tokens = 0, 0
    for group in groups:
        completions += len(group.rollouts)
        for rollout in group.rollouts:
            tokens += int(rollout.trained.sum())
    size = f"{counted(completions, 'completion')} of {counted(len(groups), 'prompt')}"
    compared_how = "compared bit for bit"
    if replayed.apart is not None:
        compared_how = f"compared within a tolerance: {replayed.apart}"
    return [
        f"step {replayed.number} of {replayed.folder}: {size}, {counted(tokens, 'token')}",
        algorithm_line(replayed.again.algorithm),
        _beginning(replayed),
        compared_how,
    ]


def _beginning(replayed: Replay) -> str:
    if replayed.begun is None:
        return "without a model: from the recorded log-probs"
    text = "from the model that the run began with"
    if replayed.begun:
        text = f"from checkpoint {replayed.begun}"
    way = replayed.number - 1 - replayed.begun
    if way:
        text += f", by way of {counted(way, 'recorded step')}"
    return text


def _row(figure: Figure) -> list[str]:
    difference = "0"
    if figure.difference != 0.0:
        difference = f"{figure.difference:.2g}"
    if not figure.same:
        if figure.limit:
            difference += f" (at most {figure.limit:.2g})"
        difference += "  <--"
    return [figure.name, _number(figure.recorded), _number(figure.replayed), difference]


def _gradient(title: str, outcome: ReplayedStep) -> list[str]:
    """Say how large a gradient is, and which groups have the largest shares."""
    if not outcome.parts:
        return []
    total = sum(outcome.gradient)
    lines = [f"{title}: sum of |dLoss/dlog-prob| {_number(total)}"]
    largest = np.argsort(-np.array(outcome.gradient), kind="stable")[:MOST]
    shares = []
    for place in largest:
        size = outcome.gradient[place]
        if size > 0.0:
            shares.append(f"{place}: {size / total:.1%}")
    if shares:
        lines.append(f"  largest groups: {', '.join(shares)}")
    return lines


def _changed(again: ReplayedStep, changed: ReplayedStep) -> list[str]:
    lines = [f"changed: {algorithm_line(changed.algorithm)}"]
    if changed.without:
        lines.append(f"not computed of the change: {changed.without}")
    rows = []
    for name, (recorded, other) in compared(again, changed).items():
        rows.append([name, _number(recorded), _number(other)])
    lines += _table(["", "recorded", "changed"], rows)
    if changed.parts and again.parts:
        lines += _gradient("changed gradient by log-prob", changed)
        counts = [f"{count} {name}" for name, count in pushes(again, changed).items()]
        lines.append(f"  tokens: {', '.join(counts)}")
    return lines


def _verdict(replayed: Replay) -> str:
    wrong = [figure.name for figure in replayed.figures if not figure.same]
    if wrong:
        return f"NOT the same: {', '.join(wrong)}"
    text = "the recorded step computed again is the same"
    if replayed.notes:
        text += ", as far as it was computed"
    return text


def compared(again: ReplayedStep, changed: ReplayedStep) -> dict[str, tuple[float, float]]:
    """Compare what both make of the completions, by name.

    These are loss and gradient, and where there was a model the metrics that differ.
    """
    figures = {"mean |advantage|": (_size(again.advantages), _size(changed.advantages))}
    if again.parts and changed.parts:
        figures[f"loss, {again.which} pass"] = (again.loss, changed.loss)
        figures["sum of |dLoss/dlog-prob|"] = (sum(again.gradient), sum(changed.gradient))
    if again.step is None or changed.step is None:
        return figures
    before, after = again.step.metrics, changed.step.metrics
    for name in sorted(before.keys() | after.keys()):
        pair = before.get(name, math.nan), after.get(name, math.nan)
        unknown = math.isnan(pair[0]) and math.isnan(pair[1])
        if pair[0] != pair[1] and not unknown and not name.startswith(TIMES):
            figures[name] = pair
    return figures


def pushes(again: ReplayedStep, changed: ReplayedStep) -> dict[str, int]:
    """Count the tokens that both push the same way, the other way, or only one of them pushes."""
    recorded_N, changed_N = joined(flat(_gradients(again))), joined(flat(_gradients(changed)))
    same_N = (recorded_N != 0) & (np.sign(recorded_N) == np.sign(changed_N))
    return {
        "pushed the same way": int(same_N.sum()),
        "pushed the other way": int((recorded_N * changed_N < 0).sum()),
        "only by the recorded": int(((recorded_N != 0) & (changed_N == 0)).sum()),
        "only by the changed": int(((recorded_N == 0) & (changed_N != 0)).sum()),
        "by neither": int(((recorded_N == 0) & (changed_N == 0)).sum()),
    }


def _gradients(outcome: ReplayedStep) -> list[list[np.ndarray]]:
    """Return dLoss/dlog-prob of the tokens of each group and completion.

    It is 0 at the tokens of completions that were not trained.
    """
    gradients = []
    for columns, group in zip(outcome.column("gradient"), outcome.groups, strict=True):
        row = []
        for column, rollout in zip(columns, group.rollouts, strict=True):
            row.append(column if column.size else np.zeros(len(rollout)))
        gradients.append(row)
    return gradients


def _size(advantages: Sequence[Sequence[np.ndarray]]) -> float:
    """Return the mean size of the advantages."""
    values_N = joined(flat(advantages))
    return float(np.abs(values_N).mean()) if values_N.size else math.nan


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.6g}"


def _table(head: list[str], rows: Sequence[list[str]]) -> list[str]:
    """Align columns: the first to the left, the others to the right."""
    widths = []
    for cells in zip(head, *rows, strict=True):
        widths.append(max(map(len, cells)))
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


# ---------------------------------------------------------------- as JSON


def as_dict(replayed: Replay) -> dict[str, Any]:
    """Return a replay as JSON has it; numbers that are not finite are null."""
    again, changed = replayed.again, replayed.changed
    figures = []
    for figure in replayed.figures:
        fields = {
            "name": figure.name,
            "recorded": _json(figure.recorded),
            "replayed": _json(figure.replayed),
            "difference": _json(figure.difference),
            "limit": figure.limit,
            "same": figure.same,
        }
        figures.append(fields)
    answer: dict[str, Any] = {
        "run": str(replayed.folder),
        "step": replayed.number,
        "same": replayed.same,
        "begun": replayed.begun,
        "apart": replayed.apart,
        "figures": figures,
        "recorded": _outcome(again),
        "changed": None,
        "pushes": None,
        "pass": again.which,
        "mismatch": replayed.mismatch,
        "notes": replayed.notes,
    }
    if changed is not None:
        answer["changed"] = _outcome(changed)
        if changed.parts and again.parts:
            answer["pushes"] = pushes(again, changed)
    return answer


def token_gradients(replayed: Replay) -> list[list[dict[str, Any]]]:
    """Return dLoss/dlog-prob of the tokens of each group and completion, recorded and changed.

    Null where there is none, 0 at the tokens of completions that were not trained.
    """
    recorded, changed = _columns(replayed, replayed.again), _columns(replayed, replayed.changed)
    answer = []
    for g, group in enumerate(replayed.recorded.groups):
        rows = []
        for i, rollout in enumerate(group.rollouts):
            row = {
                "index": rollout.index,
                "recorded": recorded[g][i],
                "changed": changed[g][i],
            }
            rows.append(row)
        answer.append(rows)
    return answer


def _columns(replayed: Replay, outcome: ReplayedStep | None) -> list[list[list[float] | None]]:
    """Return gradients as JSON has them, with six significant digits."""
    if outcome is None or not outcome.parts:
        return [[None] * len(group.rollouts) for group in replayed.recorded.groups]
    rows: list[list[list[float] | None]] = []
    for columns in _gradients(outcome):
        row: list[list[float] | None] = []
        for column in columns:
            row.append([float(f"{value:.6g}") for value in column])
        rows.append(row)
    return rows


def _outcome(outcome: ReplayedStep) -> dict[str, Any]:
    metrics = {} if outcome.step is None else outcome.step.metrics
    answer = {
        "algorithm": algorithm_line(outcome.algorithm),
        "loss": _json(outcome.loss),
        "without": outcome.without,
        "metrics": {name: _json(value) for name, value in metrics.items()},
        "gradient": None,
    }
    if outcome.parts:
        answer["gradient"] = outcome.gradient
    return answer


def _json(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
