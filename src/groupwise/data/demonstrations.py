"""Rows -> demonstrations: a prompt and the completion to imitate, for SFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupwise.data.prompts import UNKNOWN, TooLong, ask_rows, cut_left
from groupwise.data.report import Report, Tally
from groupwise.data.sources import SourceRows, missing_column
from groupwise.data.templates import Content, Question, Template, is_blank
from groupwise.errors import DataError


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


def encode_demonstrations(
    rows: SourceRows, template: Template, *, context: int, eos_ids: Sequence[int], too_long: TooLong = "drop"
) -> tuple[list[Demonstration], Report]:
    """Demonstrations of rows with `completion`, with `messages` whose last turn is the assistant's, or with Alpaca's `output`.

    Dropped and counted: empty prompts or completions, unknown characters, sequences over
    `context` (`truncate_left` cuts the prompt).
    Of a conversation the last turn is the completion; earlier assistant turns are part of the prompt.
    Raises DataError if a row has no answer, or if no row is left.
    """
    tally = Tally(rows.name, len(rows))
    answered = []
    for i, question in ask_rows(rows, template, tally):
        answer = answer_of(rows[i], question.where)
        if is_blank(answer):
            tally.drop("with an empty completion")
        else:
            answered.append((i, question, answer))
    questions = [question for _, question, _ in answered]
    completions = template.complete(questions, [answer for _, _, answer in answered], eos_ids)
    demonstrations = []
    for (i, question, _), completion in zip(answered, completions, strict=True):
        if template.unknown(completion.text, completion.tokens):
            tally.drop(UNKNOWN)
            continue
        prompt = fit_prompt(question, completion.tokens.size, context, too_long, tally, template.bos_id)
        if prompt is None:
            continue
        if not completion.stable:
            tally.note("with the completion encoded apart from its prompt")
        tally.keep(template.key(question.content))
        demonstrations.append(Demonstration(id=str(i), prompt=prompt, completion=completion.tokens))
    report = tally.report([len(demonstration) for demonstration in demonstrations])
    if not demonstrations:
        raise DataError(f"no demonstration is left: {report}")
    return demonstrations, report


def answer_of(row: Mapping[str, Any], where: str) -> Content:
    """The completion to imitate: a string, or the assistant's messages.  Raises DataError if there is none."""
    for column in ("completion", "messages", "output"):
        if column in row:
            return checked_answer(row[column], column, where)
    raise DataError(missing_column("completion", row, where))


def checked_answer(value: object, column: str, where: str) -> Content:
    """`value` if it is an answer: a string, or messages that end with the assistant's.  Raises DataError otherwise."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) and {"role", "content"} <= set(turn) for turn in value):
        raise DataError(f"{where}: {column} is {value!r:.60} ({type(value).__name__}): expected a string or messages")
    if not value or value[-1]["role"] != "assistant":
        raise DataError(f"{where}: {column} must end with a message of the assistant")
    return [dict(value[-1])]


def fit_prompt(
    question: Question, completion: int, context: int, too_long: TooLong, tally: Tally, bos_id: int | None
) -> np.ndarray | None:
    """The prompt's ids if they fit into `context` beside a completion of that many tokens; None if the row is dropped.

    Raises DataError if `too_long` is `error`.
    """
    total, room = question.tokens.size + completion, context - completion
    if total <= context:
        return question.tokens
    if too_long == "error":
        raise DataError(
            f"{question.where}: prompt and completion have {total} tokens and the model's context is {context}; "
            "set data.too_long to drop or truncate_left"
        )
    if too_long == "drop" or room < 1:
        tally.drop(f"longer than the context of {context} tokens")
        return None
    tally.note(f"truncated to the context of {context} tokens")
    return cut_left(question.tokens, room, bos_id)
