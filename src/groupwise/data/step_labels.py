"""Rows -> solutions whose steps are labelled right or wrong, for process reward models (PRM800K's form, as TRL reads it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupwise.data.demonstrations import fit_prompt
from groupwise.data.prompts import UNKNOWN, TooLong, ask_rows
from groupwise.data.report import Report, Tally
from groupwise.data.sources import SourceRows, missing_column
from groupwise.data.templates import Template, behind_opening
from groupwise.errors import DataError

SEPARATOR = "\n"
"""Between the steps: a solution reads as the policy writes it, one step a line, and `segment_steps` finds the same ends."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Solution:
    """A completion of a prompt with the label of each of its steps.  It ends with an EOS id, which belongs to the last step."""

    id: str
    prompt: np.ndarray
    """int64 (m,), m >= 1."""
    completion: np.ndarray
    """int64 (n,), EOS last."""
    ends: np.ndarray
    """int64, index of each step's last token, rising; the last is n - 1."""
    labels: np.ndarray
    """float64, 0 .. 1: probability that the step is right."""

    def __post_init__(self) -> None:
        assert self.prompt.size >= 1 and self.ends.shape == self.labels.shape and self.ends.size >= 1
        assert self.ends[-1] == self.completion.size - 1 and bool((np.diff(self.ends) > 0).all())

    def __len__(self) -> int:
        return self.prompt.size + self.completion.size


def encode_solutions(
    rows: SourceRows, template: Template, *, context: int, eos_ids: Sequence[int], too_long: TooLong = "drop"
) -> tuple[list[Solution], Report]:
    """Solutions of rows with `completions` (the steps, strings) and `labels` (true or false, or a probability, for each).

    Dropped and counted: rows that cannot be read, empty prompts, rows without steps or with an empty step, unknown characters,
    sequences over `context`.  Raises DataError if no row is left.
    """

    def check(row: Mapping[str, Any], where: str) -> None:
        template.content(row, where)
        _checked(row, where)

    rows = rows.sifted(check)
    tally = Tally.of(rows)
    checked = [_checked(row, rows.where(i)) for i, row in enumerate(rows)]
    solutions = []
    for i, question in ask_rows(rows, template, tally):
        steps, labels = checked[i]
        if not steps or not all(step.strip() for step in steps):
            tally.drop("with no step or an empty one")
            continue
        steps = [behind_opening(question.text, steps[0]), *steps[1:]]
        texts = [step + SEPARATOR for step in steps[:-1]] + [template.before_end(steps[-1], eos_ids)]
        parts = template.encode(texts, plain=[False] * len(texts))
        if any(template.unknown(text, ids) for text, ids in zip(texts, parts, strict=True)):
            tally.drop(UNKNOWN)
            continue
        completion = np.concatenate([*parts, np.asarray(eos_ids[:1], dtype=np.int64)])
        prompt = fit_prompt(question, completion.size, context, too_long, tally, template.bos_id)
        if prompt is None:
            continue
        ends = np.cumsum([part.size for part in parts]) - 1
        ends[-1] += 1
        tally.keep(template.key(question.content))
        solutions.append(Solution(id=str(i), prompt=prompt, completion=completion, ends=ends, labels=np.array(labels)))
    report = tally.report([len(solution) for solution in solutions])
    if not solutions:
        raise DataError(f"no solution is left: {report}")
    return solutions, report


def _checked(row: Mapping[str, Any], where: str) -> tuple[list[str], list[float]]:
    for column in ("completions", "labels"):
        if column not in row:
            raise DataError(missing_column(column, row, where))
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise DataError(f"{where}: completions must be a list of strings, one per step, got {steps!r:.80}")
    if not isinstance(labels, list) or len(labels) != len(steps):
        count = len(labels) if isinstance(labels, list) else repr(labels)
        raise DataError(f"{where}: there are {len(steps)} completions and {count} labels; each step has one")
    if not all(isinstance(label, int | float) and 0 <= label <= 1 for label in labels):
        raise DataError(f"{where}: labels are true or false, or probabilities, got {labels!r:.80}")
    return steps, [float(label) for label in labels]
