"""Rows -> preference pairs: a prompt with a chosen and a rejected completion, for reward models and DPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupwise.data.demonstrations import UNSAID, checked_answer, fit_prompt
from groupwise.data.messages import is_blank
from groupwise.data.preference_formats import as_pairs, pair_asks, system_beside
from groupwise.data.prompts import UNKNOWN, TooLong, ask_contents
from groupwise.data.rendering import Refusal
from groupwise.data.report import Report, Tally
from groupwise.data.sources import LeftOut, SourceRows
from groupwise.data.templates import Template
from groupwise.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair:
    """Two completions of one prompt, of which the first is preferred.  Both end with an EOS id, and they differ."""

    id: str
    prompt: np.ndarray
    """int64 (m,), m >= 1."""
    chosen: np.ndarray
    """int64 (n,), EOS last."""
    rejected: np.ndarray
    """int64 (n',), EOS last."""
    margin: float = 0.0
    """By how much the score of the chosen completion should exceed the other's; from the column `margin`, if the data have it."""

    def __post_init__(self) -> None:
        assert self.prompt.dtype == self.chosen.dtype == self.rejected.dtype == np.int64
        assert self.prompt.size >= 1, f"pair {self.id}: no prompt"
        assert not np.array_equal(self.chosen, self.rejected), f"pair {self.id}: chosen and rejected are the same"

    def __len__(self) -> int:
        return self.prompt.size + self.chosen.size + self.rejected.size


def encode_pairs(
    rows: SourceRows, template: Template, *, context: int, eos_ids: Sequence[int], too_long: TooLong = "drop"
) -> tuple[list[Pair], Report]:
    """Pairs of rows with `chosen` and `rejected` (strings or messages) and a prompt in any form that prompts may have.

    Other published forms are read too (`preference_formats`).  Dropped and counted: rows that cannot be read, that diverge before
    their last turn or that the chat template refuses, empty prompts, empty completions, identical completions, unknown characters,
    and pairs whose longer side exceeds `context` (`truncate_left` cuts the prompt, the same for both sides).  Raises DataError if a
    column is in no row, or if no pair is left.
    """
    rows = as_pairs(rows, template)
    tally = Tally.of(rows)
    asked = []
    contents = [pair_asks(template, row, rows.where(i)) for i, row in enumerate(rows)]
    for i, question in ask_contents(rows, contents, template, tally):
        try:
            sides = [checked_answer(rows[i][side], side, question.where) for side in ("chosen", "rejected")]
            margin = _margin(rows[i], question.where)
        except DataError as error:
            left = LeftOut.of(error)
            tally.drop(left.reason, first=left.where)
            continue
        if any(is_blank(side) for side in sides):
            tally.drop("with an empty completion")
        else:
            asked.append((i, question, *sides, margin))
    questions = [question for _, question, *_ in asked]
    all_chosen = template.try_complete(questions, [chosen for _, _, chosen, _, _ in asked], eos_ids)
    all_rejected = template.try_complete(questions, [rejected for _, _, _, rejected, _ in asked], eos_ids)
    pairs = []
    for (i, question, _, _, margin), chosen, rejected in zip(asked, all_chosen, all_rejected, strict=True):
        if isinstance(chosen, Refusal) or isinstance(rejected, Refusal):
            refusal = chosen if isinstance(chosen, Refusal) else rejected
            assert isinstance(refusal, Refusal)
            tally.drop(refusal.reason, first=str(refusal))
            continue
        if np.array_equal(chosen.tokens, rejected.tokens):
            tally.drop("with chosen = rejected")
            continue
        if any(template.unknown(side.text, side.tokens) for side in (chosen, rejected)):
            tally.drop(UNKNOWN)
            continue
        longest = max(chosen.tokens.size, rejected.tokens.size)
        prompt = fit_prompt(question, longest, context, too_long, tally, template.bos_id)
        if prompt is None:
            continue
        if not (chosen.stable and rejected.stable):
            tally.note("with a completion encoded apart from its prompt")
        if question.plain and system_beside(rows[i]):
            tally.note(UNSAID, first=question.where)
        tally.keep(template.key(question.content))
        pairs.append(Pair(id=str(i), prompt=prompt, chosen=chosen.tokens, rejected=rejected.tokens, margin=margin))
    report = tally.report([len(pair) for pair in pairs])
    if not pairs:
        raise DataError(f"no pair is left: {report}")
    return pairs, report


def _margin(row: Mapping[str, Any], where: str) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < 1e300:
        raise DataError(f"{where}: margin is {margin!r:.40}: expected a number")
    return float(margin)
