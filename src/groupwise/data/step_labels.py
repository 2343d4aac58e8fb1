"""Rows -> solutions whose steps are labelled right or wrong, for process reward models (PRM800K's form, as TRL reads it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from groupwise.data.encoding import RecordKind
from groupwise.data.sources import BadRow, Row, missing_column
from groupwise.data.templates import EncodedAnswer, Question, Template
from groupwise.data.wording import ReadRow, Wording
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


def read_solution(row: Row, where: str, *, wording: Wording) -> ReadRow:
    """A prompt with `completions` (the steps, strings) and `labels` (true or false, or a probability, for each).

    Raises DataError, also for a row without steps or with an empty one.
    """
    content = wording.content(row, where)
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
    if not steps or not all(step.strip() for step in steps):
        raise BadRow("with no step or an empty one", f"{where}: completions holds no step, or an empty one")
    return ReadRow(row, content, extra=(steps, np.array(labels, dtype=np.float64)))


def _in_steps(
    template: Template, examples: Sequence[tuple[ReadRow, Question]], eos_ids: Sequence[int]
) -> list[tuple[EncodedAnswer]]:
    return [(template.in_steps(question, example.extra[0], SEPARATOR, eos_ids),) for example, question in examples]


SOLUTIONS = RecordKind(
    name="solution",
    read=lambda rows, wording: rows.mapped(partial(read_solution, wording=wording)),
    make=lambda id, example, _question, prompt, solved: Solution(
        id=id, prompt=prompt, completion=solved.tokens, ends=solved.ends, labels=example.extra[1]
    ),
    answers=_in_steps,
)
