"""Rows -> demonstrations: a prompt and the completion to imitate, for SFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from groupwise.data.messages import Content, before_the_answer, checked, is_blank, joined, openings
from groupwise.data.prompts import UNKNOWN, TooLong, ask_contents, cut_left
from groupwise.data.rendering import Refusal
from groupwise.data.report import Report, Tally
from groupwise.data.sources import BadRow, SourceRows, first_of, missing_column
from groupwise.data.templates import Question, Template, Wording
from groupwise.errors import DataError

SEVERAL = "with several turns beside data.template"
WEIGHT = "whose answer has another weight than 1"
UNTRAINED = "with an earlier turn of weight 1, which is not trained"
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


def encode_demonstrations(
    rows: SourceRows, template: Template, *, context: int, eos_ids: Sequence[int], too_long: TooLong = "drop"
) -> tuple[list[Demonstration], Report]:
    """Demonstrations of rows with `completion`, with `messages` whose last turn is the assistant's, or with Alpaca's `output`.

    Dropped and counted: rows that cannot be read or that the chat template refuses, empty prompts or completions, unknown
    characters, sequences over `context` (`truncate_left` cuts the prompt).
    Of a conversation the last turn is the completion; earlier assistant turns are part of the prompt.
    Raises DataError if no row is left.
    """
    rows = rows.sifted(partial(read_demonstration, wording=template))
    tally = Tally.of(rows)
    read = [read_demonstration(row, rows.where(i), wording=template) for i, row in enumerate(rows)]
    answered = []
    for i, question in ask_contents(rows, [prompt for prompt, _ in read], template, tally):
        answer = read[i][1]
        if is_blank(answer):
            tally.drop("with an empty completion")
        else:
            answered.append((i, question, answer))
    questions = [question for _, question, _ in answered]
    completions = template.try_complete(questions, [answer for _, _, answer in answered], eos_ids)
    demonstrations = []
    for (i, question, _), completion in zip(answered, completions, strict=True):
        if isinstance(completion, Refusal):
            tally.drop(completion.reason, first=str(completion))
            continue
        if template.unknown(completion.text, completion.tokens):
            tally.drop(UNKNOWN)
            continue
        prompt = fit_prompt(question, completion.tokens.size, context, too_long, tally, template.bos_id)
        if prompt is None:
            continue
        if not completion.stable:
            tally.note("with the completion encoded apart from its prompt")
        if question.plain and openings(_turns_in(rows[i].get(str(_answer_in(rows[i]))))[:-1]):
            tally.note(UNSAID, first=question.where)
        elif len(_turns_in(rows[i].get("completion"))) > 1:
            tally.note("with earlier turns of the completion in the prompt", first=question.where)
        if any(turn.get("weight") == 1 for turn in _turns_in(question.content) if turn["role"] == "assistant"):
            tally.note(UNTRAINED, first=question.where)
        tally.keep(template.key(question.content))
        demonstrations.append(Demonstration(id=str(i), prompt=prompt, completion=completion.tokens))
    report = tally.report([len(demonstration) for demonstration in demonstrations])
    if not demonstrations:
        raise DataError(f"no demonstration is left: {report}")
    return demonstrations, report


def read_demonstration(row: Mapping[str, Any], where: str, *, wording: Wording) -> tuple[Content, Content]:
    """What a row asks, and the answer to imitate: a string, or a message of the assistant.

    Turns before the last one are part of the prompt; where `wording.format` writes it as messages, those of the system stand before
    it.  Raises DataError if the row has no answer, or asks nothing readable.
    """
    column = _answer_in(row)
    if column is None:
        raise DataError(missing_column("completion", row, where))
    answer = checked_turns(row[column], column, where)
    if isinstance(answer, str):
        return wording.content(row, where), answer
    before = before_the_answer(answer, column, where)
    asked = wording.own_content(row, where)
    if wording.format is not None and len(before) - len(openings(before)) <= (column == "messages"):
        return wording.opened(asked if isinstance(asked, str) else [*openings(before), *asked]), answer[-1:]
    if before and isinstance(asked, str):
        if wording.format is not None:
            raise BadRow(SEVERAL, f"{where}: data.template writes one prompt, and {column} holds several turns")
        asked = [{"role": "user", "content": asked}] if asked.strip() else []
    if before and not isinstance(asked, str):
        asked = joined(asked, before, column, where, str(answer[-1]["content"]))
    return wording.opened(asked), answer[-1:]


def checked_turns(value: object, column: str, where: str) -> Content:
    """`value` if it ends with an answer: a string, or messages of which the last is the assistant's.

    Raises DataError otherwise.
    """
    if not isinstance(value, str | list) or (isinstance(value, list) and not all(isinstance(turn, Mapping) for turn in value)):
        raise DataError(f"{where}: {column} is {value!r:.60} ({type(value).__name__}): expected a string or messages")
    found = checked(value, column, where)
    if isinstance(value, list) and (isinstance(found, str) or found[-1]["role"] != "assistant"):
        raise DataError(f"{where}: {column} must end with a message of the assistant")
    weight = None if isinstance(found, str) else found[-1].get("weight")
    if weight not in (None, 1):
        said = f"the last message of {column} has weight {weight!r:.40}"
        raise BadRow(WEIGHT, f"{where}: {said}: the last turn is what is trained, with weight 1 or none")
    return found


def checked_answer(value: object, column: str, where: str) -> Content:
    """The last turn of `checked_turns`."""
    found = checked_turns(value, column, where)
    return found if isinstance(found, str) else found[-1:]


def _answer_in(row: Mapping[str, Any]) -> str | None:
    """The column with the answer, if there is one."""
    return first_of(row, ("completion", "messages", "output"))


def _turns_in(value: object) -> Sequence[Mapping[str, Any]]:
    return value if isinstance(value, list) else ()


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
