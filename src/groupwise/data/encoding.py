"""From rows that have been read to records with token ids: the one encoder of prompts, demonstrations, pairs and solutions.

It asks what each row asks through the chat template, puts its answers behind it, makes both fit, and counts every row that it
leaves out.  What a kind of record is made from, and how, a `RecordKind` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np

from groupwise.data.messages import is_blank, unwritten
from groupwise.data.rendering import Refusal, unmentioned
from groupwise.data.report import Report, Tally
from groupwise.data.sources import SourceRows
from groupwise.data.templates import EncodedAnswer, Question, Template
from groupwise.data.wording import ReadRow, Wording
from groupwise.errors import DataError
from groupwise.utils.terminal import escaped

Item = TypeVar("Item")
TooLong = Literal["drop", "truncate_left", "error"]
Answered = Sequence[Sequence["EncodedAnswer | Refusal"]]

SILENT = "of which the chat template writes nothing"
UNKNOWN = "with characters unknown to the tokenizer"
UNWRITTEN = "with a message that the chat template does not write"
UNREAD_TOOLS = "with tools that cannot be read"
UNREAD_VARIABLES = "with chat_template_kwargs that the chat template does not mention"
CONTROL = "with control tokens in their messages"


def whole_answers(template: Template, examples: Sequence[tuple[ReadRow, Question]], eos_ids: Sequence[int]) -> Answered:
    """The answers of each example behind its question; no answers of a prompt."""
    questions = [question for _, question in examples]
    sides = zip(*(example.answers for example, _ in examples), strict=True)
    completions = [template.try_complete(questions, answers, eos_ids) for answers in sides]
    return list(zip(*completions, strict=True)) if completions else [()] * len(examples)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordKind(Generic[Item]):
    """A kind of record that rows become."""

    name: str
    """What one is called: `pair`."""
    read: Callable[[SourceRows, Wording], SourceRows[ReadRow]]
    """Rows, read; those that are not of this kind are left out."""
    make: Callable[..., Item]
    """(id, example, question, ids of the prompt, *completions) -> the record."""
    answers: Callable[[Template, Sequence[tuple[ReadRow, Question]], Sequence[int]], Answered] = whole_answers
    """(template, examples with their questions, EOS ids) -> the completions of each."""


def encode(
    rows: SourceRows[ReadRow],
    template: Template,
    kind: RecordKind[Item],
    *,
    limit: int,
    eos_ids: Sequence[int] = (),
    too_long: TooLong = "drop",
) -> tuple[list[Item], Report]:
    """The records of rows that have been read.   limit: tokens of a prompt and the longest of its completions.

    Dropped and counted: rows that ask or answer nothing, hold characters that the tokenizer does not know, are refused by the chat
    template, are too long (unless `truncate_left`, which keeps the prompt's end), or have two completions that are the same.
    Duplicates are kept; of the rows that stay they are counted.
    Raises DataError if no record is left, if one is too long and `too_long` is `error`, and for control tokens where that is the
    template's `control_tokens`.
    """
    tally = Tally.of(rows)
    places = ask(rows, template, tally)
    answered = kind.answers(template, [(rows[i], question) for i, question in places], eos_ids)
    items, lengths = [], []
    for (i, question), answers in zip(places, answered, strict=True):
        example: ReadRow = rows[i]
        completions = [one for one in answers if not isinstance(one, Refusal)]
        reason, first = _wrong(answers, completions) if answers else ("", None)
        if reason:
            tally.drop(reason, first=first)
            continue
        tokens = _fitted(question, completions, limit, too_long, tally, template.bos_id)
        if tokens is None:
            continue
        if answers and not all(one.stable for one in completions):
            tally.note("with a completion encoded apart from its prompt")
        for note in example.notes:
            tally.note(note, first=question.where)
        tally.keep(template.key(example.content))
        lengths.append(tokens.size + sum(one.tokens.size for one in completions))
        items.append(kind.make(str(i), example, question, tokens, *completions))
    report = tally.report(lengths)
    if not items:
        long = any(reason.startswith("longer") for reason in report.dropped)
        remedy = "; set data.too_long to truncate_left to keep the ends of prompts" if long else ""
        raise DataError(f"no {kind.name} is left: {report}{remedy}")
    return items, report


def _wrong(answers: Sequence[EncodedAnswer | Refusal], completions: Sequence[EncodedAnswer]) -> tuple[str, str | None]:
    """Why a row with these completions is left out, and what is wrong with it; no reason if it stays."""
    refusal = next((one for one in answers if isinstance(one, Refusal)), None)
    if refusal is not None:
        return refusal.reason, str(refusal)
    if len(completions) == 2 and np.array_equal(completions[0].tokens, completions[1].tokens):
        return "with chosen = rejected", None
    return UNKNOWN if any(one.unknown for one in completions) else "", None


def ask(rows: SourceRows[ReadRow], template: Template, tally: Tally) -> list[tuple[int, Question]]:
    """(place, question) of the rows that ask something the tokenizer can write; the others are counted in `tally`."""
    places = []
    for i, example in enumerate(rows):
        if is_blank(example.content):
            tally.drop("empty")
        elif example.answers and any(map(is_blank, example.answers)):
            tally.drop("with an empty completion")
        else:
            places.append(i)
    examples = [rows[i] for i in places]
    contents, wheres = [example.content for example in examples], [rows.where(i) for i in places]
    asking: list[tuple[int, Question]] = []
    for i, question in zip(places, template.try_ask(contents, wheres, [example.row for example in examples]), strict=True):
        if isinstance(question, Refusal):
            tally.drop(question.reason, first=f"{question}; change the messages, or set model.chat_template")
        elif not question.tokens.size:
            tally.drop("empty" if question.plain else SILENT, first=f"{question.where}; set model.chat_template")
        elif question.unknown:
            tally.drop(UNKNOWN)
        elif question.control and template.control_tokens == "drop":
            tally.drop(CONTROL, first=question.where)
        else:
            asking.append((i, question))
    questions = [question for _, question in asking]
    _tell_control([question for question in questions if question.control], template, tally)
    lost = [one for one in questions if not isinstance(one.content, str) and unwritten(one.content, one.text)]
    messages = [message for question in lost[:1] for message in question.content if isinstance(message, dict)]
    roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
    what = f"the chat template does not write what one of its messages says (roles: {escaped(roles)})"
    remedy = "set model.chat_template, or change the messages"
    _tell(lost, UNWRITTEN, f"{what}, and the policy does not see it; {remedy}", tally)
    remedy = "give a list of JSON schemas, each with a name, or its JSON text; or rename the column"
    unread = [question for question in questions if question.unread_tools]
    _tell(unread, UNREAD_TOOLS, f"the column tools cannot be read, and the policy does not see it; {remedy}", tally)
    names = {name for question in questions for name in question.variables}
    idle = set(unmentioned(sorted(names), template.tokenizer))
    ignored = [question for question in questions if idle & question.variables.keys() and not question.plain]
    what = f"the chat template does not mention {', '.join(map(repr, sorted(idle)))}, which chat_template_kwargs sets"
    _tell(ignored, UNREAD_VARIABLES, f"{escaped(what)}: it changes nothing; correct its name, or leave it out", tally)
    unshown = template.unshown(questions)
    for what in ("tool", "call"):
        without = [question for question, lacks in zip(questions, unshown, strict=True) if what in lacks]
        missing = f"its prompt does not show a {what}, and the policy does not see it; set model.chat_template to one that shows it"
        _tell(without, f"with a {what} that the chat template does not write", missing, tally)
    return asking


def _tell(questions: Sequence[Question], remark: str, what: str, tally: Tally) -> None:
    """Count questions with a remark, and warn about the first."""
    for question in questions:
        tally.note(remark, first=question.where)
    if questions:
        more = f" ({len(questions)} such rows)" if len(questions) > 1 else ""
        tally.warn(f"{questions[0].where}{more}: {what}")


def _tell_control(questions: Sequence[Question], template: Template, tally: Tally) -> None:
    """Count questions with control tokens in their messages; say what becomes of them, or raise DataError."""
    if not questions:
        return
    first = questions[0]
    kind = "which is a control token" if len(first.control) == 1 else "which are control tokens"
    what = escaped(f"its messages hold {', '.join(map(repr, first.control))}, {kind} of the tokenizer")
    remedy = "data.control_tokens: plain encodes them as text, drop leaves such rows out"
    if template.control_tokens == "error":
        raise DataError(f"{first.where}: {what}; {remedy}")
    if template.control_tokens != "plain":
        _tell(questions, CONTROL, f"{what}: they can end a turn or begin another, or pass for a call; {remedy}", tally)
        return
    for question in questions:
        tally.note(f"{CONTROL}, encoded as text", first=question.where)


def cut_left(ids: np.ndarray, room: int, bos_id: int | None) -> np.ndarray:
    """The last `room` ids; a BOS at the head stays there."""
    if room > 1 and bos_id is not None and ids[0] == bos_id:
        return np.concatenate([ids[:1], ids[ids.size - room + 1 :]])
    return ids[ids.size - room :]


def _fitted(
    question: Question, completions: Sequence[EncodedAnswer], limit: int, too_long: TooLong, tally: Tally, bos_id: int | None
) -> np.ndarray | None:
    """The prompt's ids if they fit beside the longest of its completions, cut where the recipe says so; None: it is dropped.

    Raises DataError if `too_long` is `error`.
    """
    completion = max(one.tokens.size for one in completions) if completions else 0
    total, room = question.tokens.size + completion, limit - completion
    if total <= limit:
        return question.tokens
    length = f"the context of {limit} tokens" if completion else f"{limit} tokens"
    if too_long == "error":
        both = f"prompt and completion have {total} tokens and the model's context is {limit}"
        what = both if completion else f"the prompt has {total} tokens and the limit is {limit}"
        raise DataError(f"{question.where}: {what}; set data.too_long to drop or truncate_left")
    if too_long == "drop" or room < 1:
        tally.drop(f"longer than {length}")
        return None
    tally.note(f"truncated to {length}")
    return cut_left(question.tokens, room, bos_id)
