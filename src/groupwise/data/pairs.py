"""Rows -> preference pairs: a prompt with a chosen and a rejected completion, for reward models and DPO."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from groupwise.data.demonstrations import UNSAID, checked_turns
from groupwise.data.encoding import RecordKind
from groupwise.data.messages import openings
from groupwise.data.preference_formats import as_pairs
from groupwise.data.sources import Row, SourceRows
from groupwise.data.wording import ReadRow, Wording
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


def read_pairs(rows: SourceRows, wording: Wording) -> SourceRows[ReadRow]:
    """The pairs of a source in any published form (`preference_formats`): each with its chosen and its rejected answer."""
    return as_pairs(rows, wording).mapped(partial(_read_pair, wording=wording))


def _read_pair(row: Row, where: str, *, wording: Wording) -> ReadRow:
    """A pair with a prompt, `chosen` and `rejected`.

    Where `wording.format` writes the prompt as messages, those of the system stand before it.
    """
    system = openings(row["chosen"][:-1]) if isinstance(row["chosen"], list) else []
    prompt = wording.own_content(row, where)
    content = wording.opened(prompt if isinstance(prompt, str) else [*system, *prompt])
    sides = [checked_turns(row[side], side, where) for side in ("chosen", "rejected")]
    answers = tuple(side if isinstance(side, str) else side[-1:] for side in sides)
    notes = (UNSAID,) if system and isinstance(content, str) else ()
    return ReadRow(row, content, answers, notes=notes, extra=_margin(row, where))


PAIRS = RecordKind(
    name="pair",
    read=read_pairs,
    make=lambda id, example, _question, prompt, chosen, rejected: Pair(
        id=id, prompt=prompt, chosen=chosen.tokens, rejected=rejected.tokens, margin=example.extra
    ),
)


def _margin(row: Row, where: str) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < 1e300:
        raise DataError(f"{where}: margin is {margin!r:.40}: expected a number")
    return float(margin)
