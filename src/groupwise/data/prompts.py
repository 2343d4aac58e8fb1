"""Rows -> prompts: the text and ids that end where the policy starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from groupwise.data.encoding import RecordKind
from groupwise.data.templates import Question, Template
from groupwise.data.wording import ReadRow
from groupwise.errors import DataError
from groupwise.records import Prompt


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


def prompt_kind(template: Template) -> RecordKind[Prompt]:
    """The kind of record that a policy is asked.   template: writes the text of a prompt that was cut."""

    def make(id: str, example: ReadRow, question: Question, tokens: np.ndarray) -> Prompt:
        cut = question.tokens.size - tokens.size
        return Prompt(
            id=id,
            tokens=tokens,
            text=str(template.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)) if cut else question.text,
            row=example.row,
            messages=None if isinstance(example.content, str) else tuple(example.content),
            wrapped=example.wrapped,
            cut=cut,
        )

    return RecordKind(name="prompt", read=lambda rows, wording: rows.mapped(wording.read), make=make)


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
