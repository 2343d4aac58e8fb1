"""Rows -> demonstrations: a prompt and the completion to imitate, for SFT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from groupwise.data.encoding import RecordKind
from groupwise.data.messages import Content, before_the_answer, checked, joined, openings, variables_in
from groupwise.data.sources import BadRow, Row, first_of, missing_column
from groupwise.data.wording import ReadRow, Wording
from groupwise.errors import DataError

ANSWERED_IN = ("completion", "messages", "output")
"""Columns in which an answer may stand."""
SEVERAL = "with several turns beside data.template"
WEIGHT = "whose answer has another weight than 1"
UNTRAINED = "with an earlier turn of weight 1, which is not trained"
EARLIER = "with earlier turns of the completion in the prompt"
UNSAID = "whose system message data.template does not write"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demonstration:
    """A prompt and a completion that ends with an EOS id.

    >>> Demonstration(id="7", prompt=np.array([5, 9]), completion=np.array([4, 1])).completion.tolist()
    [4, 1]
    """

    id: str
    prompt: np.ndarray
    """int64 (m,), m >= 1."""
    completion: np.ndarray
    """int64 (n,), n >= 1; EOS last."""

    def __post_init__(self) -> None:
        assert self.prompt.dtype == self.completion.dtype == np.int64
        assert self.prompt.size >= 1, f"demonstration {self.id}: no prompt"
        assert self.completion.size >= 1, f"demonstration {self.id}: no completion"

    def __len__(self) -> int:
        return self.prompt.size + self.completion.size


def checked_turns(value: object, column: str, where: str) -> Content:
    """`value` if it ends with an answer: a string, or messages of which the last is the assistant's.

    Raises DataError otherwise.
    """
    if not isinstance(value, str | list) or (isinstance(value, list) and not all(isinstance(turn, Mapping) for turn in value)):
        raise DataError(f"{where}: {column} is {value!r:.60} ({type(value).__name__}): expected a string or messages")
    turns = checked(value, column, where)
    if isinstance(value, list) and (isinstance(turns, str) or turns[-1]["role"] != "assistant"):
        raise DataError(f"{where}: {column} must end with a message of the assistant")
    weight = None if isinstance(turns, str) else turns[-1].get("weight")
    if weight not in (None, 1):
        what = f"the last message of {column} has weight {weight!r:.40}"
        raise BadRow(WEIGHT, f"{where}: {what}: the last turn is what is trained, with weight 1 or none")
    return turns


def read_demonstration(row: Row, where: str, *, wording: Wording) -> ReadRow:
    """What a row asks, and the answer to imitate: a string, or a message of the assistant.

    The answer stands in `completion`, in `messages` whose last turn is the assistant's, or in Alpaca's `output`.  Turns before the
    last one are part of the prompt; where `wording.format` writes it as messages, those of the system stand before it.
    Raises DataError if the row has no answer, or asks nothing readable.
    """
    column = first_of(row, ANSWERED_IN)
    if column is None:
        raise DataError(missing_column("completion", row, where))
    answer = checked_turns(row[column], column, where)
    if isinstance(answer, str):
        content = wording.content(row, where)
        return ReadRow(row, content, (answer,), notes=_untrained(content))
    before = before_the_answer(answer, column, where)
    if column == "messages" == wording.column_of(row):  # they have been read
        variables_in(row, where)
        content = wording.opened(before)
        return ReadRow(row, content, (answer[-1:],), notes=_untrained(content))
    prompt = wording.own_content(row, where)
    if wording.format is not None and len(before) - len(openings(before)) <= (column == "messages"):
        prompt = prompt if isinstance(prompt, str) else [*openings(before), *prompt]
    elif before:
        if isinstance(prompt, str):
            if wording.format is not None:
                raise BadRow(SEVERAL, f"{where}: data.template writes one prompt, and {column} holds several turns")
            prompt = [{"role": "user", "content": prompt}] if prompt.strip() else []
        prompt = joined(prompt, before, column, where, str(answer[-1]["content"]))
    content = wording.opened(prompt)
    notes: tuple[str, ...] = ()
    if isinstance(content, str) and openings(before):
        notes = (UNSAID,)
    elif before and column == "completion":
        notes = (EARLIER,)
    return ReadRow(row, content, (answer[-1:],), notes=notes + _untrained(content))


def _untrained(content: Content) -> tuple[str, ...]:
    turns = () if isinstance(content, str) else content
    return (UNTRAINED,) * any(turn.get("weight") == 1 for turn in turns if turn["role"] == "assistant")


DEMONSTRATIONS = RecordKind(
    name="demonstration",
    read=lambda rows, wording: rows.mapped(partial(read_demonstration, wording=wording)),
    make=lambda id, _example, _question, prompt, answer: Demonstration(id=id, prompt=prompt, completion=answer.tokens),
)
