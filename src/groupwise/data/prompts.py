"""Rows -> prompts: the text and ids that end where the policy starts, with a report of every row that was left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from groupwise.data.messages import Content, is_blank, unwritten
from groupwise.data.rendering import Refusal
from groupwise.data.report import Report, Tally
from groupwise.data.sources import SourceRows, printable
from groupwise.data.templates import Question, Template
from groupwise.errors import DataError
from groupwise.records import Prompt

TooLong = Literal["drop", "truncate_left", "error"]
SILENT = "of which the chat template writes nothing"
UNKNOWN = "with characters unknown to the tokenizer"
UNWRITTEN = "with a message that the chat template does not write"
UNREAD_TOOLS = "with tools that cannot be read"
CONTROL = "with control tokens in their messages"


def prompt_limit(context: int, max_new_tokens: int, max_prompt_tokens: int | None) -> int:
    """Longest prompt in tokens: what the context leaves beside the completion, or the smaller one that was asked for.

    Raises DataError, with both numbers, if prompt and completion cannot fit into the context.
    """
    room = context - max_new_tokens
    if room <= 0:
        raise DataError(
            f"max_new_tokens is {max_new_tokens} and the model's context is {context} tokens: no room is left for a prompt; "
            f"lower it below {context}"
        )
    if max_prompt_tokens is not None and max_prompt_tokens > room:
        raise DataError(
            f"max_prompt_tokens ({max_prompt_tokens}) + max_new_tokens ({max_new_tokens}) exceed the model's context of {context} "
            f"tokens: lower one of them, or leave max_prompt_tokens out (it is then {room})"
        )
    return room if max_prompt_tokens is None else max_prompt_tokens


def encode_prompts(
    rows: SourceRows, template: Template, *, max_tokens: int, too_long: TooLong = "drop"
) -> tuple[list[Prompt], Report]:
    """Prompts of the rows that have one.  A prompt's id is its row's number from 0.

    Dropped and counted: rows that cannot be read, empty prompts, prompts with characters that the tokenizer does not know or that
    the chat template refuses, too long ones (unless `truncate_left`, which keeps their end and counts them).  Duplicates are kept;
    of the rows that stay they are counted.
    Raises DataError if no prompt is left, or if one is too long and `too_long` is `error`.
    """
    rows = rows.sifted(template.content)
    tally = Tally.of(rows)
    prompts: list[Prompt] = []
    for i, question in ask_rows(rows, template, tally):
        ids, text, content = question.tokens, question.text, question.content
        if ids.size > max_tokens:
            if not _may_be_cut(question, max_tokens, too_long, tally):
                continue
            ids = cut_left(ids, max_tokens, template.bos_id)
            text = str(template.tokenizer.decode(ids.tolist(), skip_special_tokens=False))
        tally.keep(template.key(content))
        prompts.append(
            Prompt(
                id=str(i),
                tokens=ids,
                text=text,
                row=rows[i],
                messages=None if isinstance(content, str) else tuple(content),
                wrapped=not question.plain and isinstance(template.unwrapped(rows[i]), str),
                cut=question.tokens.size - ids.size,
            )
        )
    report = tally.report([prompt.tokens.size for prompt in prompts])
    if not prompts:
        long = any(reason.startswith("longer") for reason in report.dropped)
        raise DataError(
            f"no prompt is left: {report}" + ("; set data.too_long to truncate_left to keep their ends" if long else "")
        )
    return prompts, report


def visit(prompt: Prompt, epoch: int | str) -> Prompt:
    """The prompt as drawn in one epoch: its id is `epoch/row`, so that each visit of a row is a group of its own."""
    return replace(prompt, id=f"{epoch}/{prompt.id}")


def columns_of(prompts: Iterable[Prompt]) -> list[str]:
    """The columns of all rows: rows of several tasks have different ones.

    >>> prompt = Prompt(id="0", tokens=np.array([5]), text="?")
    >>> columns_of([replace(prompt, row={"answer": "4"}), replace(prompt, row={"answer": "5", "tests": "..."})])
    ['answer', 'tests']
    """
    return list(dict.fromkeys(column for prompt in prompts for column in prompt.row))


def ask_rows(rows: SourceRows, template: Template, tally: Tally) -> list[tuple[int, Question]]:
    """(row number, question) of the rows that ask something the tokenizer can write; the others are counted in `tally`.

    Raises DataError for a row that cannot be read, and for control tokens in messages where the recipe says so.
    """
    return ask_contents(rows, [template.content(row, rows.where(i)) for i, row in enumerate(rows)], template, tally)


def ask_contents(rows: SourceRows, contents: Sequence[Content], template: Template, tally: Tally) -> list[tuple[int, Question]]:
    """`ask_rows` of rows whose contents are known."""
    asked = []
    for i, content in enumerate(contents):
        if is_blank(content):
            tally.drop("empty")
            continue
        asked.append((i, content))
    questions = template.try_ask([content for _, content in asked], [rows.where(i) for i, _ in asked], [rows[i] for i, _ in asked])
    kept, control, lost, unread = [], [], [], []
    for (i, _), question in zip(asked, questions, strict=True):
        if isinstance(question, Refusal):
            tally.drop(question.reason, first=f"{question}; change the messages, or set model.chat_template")
        elif not question.tokens.size:
            tally.drop("empty" if question.plain else SILENT, first=f"{question.where}; set model.chat_template")
        elif template.unknown(question.text, question.tokens):
            tally.drop(UNKNOWN)
        elif question.control and template.control_tokens == "drop":
            tally.drop(CONTROL, first=question.where)
        else:
            kept.append((i, question))
            if not isinstance(question.content, str) and unwritten(question.content, question.text):
                lost.append(question)
            unread += [question] * template.unread_tools(rows[i])
            control += [question] * bool(question.control)
    _tell_control(control, template, tally)
    for question in lost:
        tally.note(UNWRITTEN, first=question.where)
    if lost:
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in lost[0].content if isinstance(message, dict)))
        more = f" ({len(lost)} such rows)" if len(lost) > 1 else ""
        tally.warn(
            f"{lost[0].where}: the chat template does not write what one of its messages says (roles: {printable(roles)}){more}: "
            "the policy does not see it; set model.chat_template, or change the messages"
        )
    remedy = "give a list of JSON schemas, each with a name, or its JSON text; or rename the column"
    _tell(unread, UNREAD_TOOLS, f"the column tools cannot be read, and the policy does not see it; {remedy}", tally)
    questions = [question for _, question in kept]
    unshown = template.unshown(questions)
    for what in ("tool", "call"):
        found = [question for question, lacks in zip(questions, unshown, strict=True) if what in lacks]
        missing = f"its prompt does not show a {what}, and the policy does not see it; set model.chat_template to one that shows it"
        _tell(found, f"with a {what} that the chat template does not write", missing, tally)
    return kept


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
    found = f"{first.where}: its messages hold {', '.join(map(repr, first.control))}, which {{}} of the tokenizer"
    found = found.format("is a control token" if len(first.control) == 1 else "are control tokens")
    remedy = "data.control_tokens: plain encodes them as text, drop leaves such rows out"
    if template.control_tokens == "error":
        raise DataError(f"{printable(found)}; {remedy}")
    plain = template.control_tokens == "plain"
    for question in questions:
        tally.note(f"{CONTROL}, encoded as text" if plain else CONTROL, first=question.where)
    if not plain:
        more = f" ({len(questions)} such rows)" if len(questions) > 1 else ""
        tally.warn(f"{printable(found)}{more}: they can end a turn or begin another, or pass for a call; {remedy}")


def cut_left(ids: np.ndarray, room: int, bos_id: int | None) -> np.ndarray:
    """The last `room` ids; a BOS at the head stays there."""
    if room > 1 and bos_id is not None and ids[0] == bos_id:
        return np.concatenate([ids[:1], ids[ids.size - room + 1 :]])
    return ids[ids.size - room :]


def _may_be_cut(question: Question, max_tokens: int, too_long: TooLong, tally: Tally) -> bool:
    """What `too_long` says about one: counted and dropped, counted and cut, or a DataError."""
    if too_long == "error":
        raise DataError(
            f"{question.where}: the prompt has {question.tokens.size} tokens and the limit is {max_tokens}; "
            "set data.too_long to drop or truncate_left"
        )
    if too_long == "drop":
        tally.drop(f"longer than {max_tokens} tokens")
        return False
    tally.note(f"truncated to {max_tokens} tokens")
    return True
