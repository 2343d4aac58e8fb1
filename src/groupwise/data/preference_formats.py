"""Preference data as they are published -> rows with `prompt`, `chosen` and `rejected`.

| columns | known from | the pair |
|---|---|---|
| `chosen`, `rejected`, `prompt` in any form | TRL, UltraFeedback (binarized) | as it stands |
| `chosen`, `rejected`: messages, the prompt repeated in both | UltraFeedback (binarized) | the last
turns |
| `chosen`, `rejected`: strings `\\n\\nHuman: ... \\n\\nAssistant: ...` | hh_rlhf | the last turns |

Scores, ratings and labels become pairs in a few lines with `datasets`: docs/preferences.md.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from groupwise.data.messages import (
    CONTRADICTS,
    Content,
    Messages,
    before_the_answer,
    is_blank,
    joined,
    openings,
)
from groupwise.data.sources import BadRow, Row, SourceRows, missing_column
from groupwise.data.wording import SEVERAL, Wording, checked_turns
from groupwise.errors import DataError

ASKED_IN = ("prompt", "messages", "instruction")
"""Columns in which a prompt may stand."""
SIDES = ("chosen", "rejected")
ANSWER = "\n\nAssistant:"
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
DIVERGING = "whose conversations differ before the last turn"


def as_pairs(rows: SourceRows, wording: Wording) -> SourceRows:
    """Read the pairs of a source.  Rows that hold none are in `left_out`, with the reason.

    Where `wording.chat` says so, strings that hold several turns become messages.
    Raises DataError, naming the column that is missing, if no row has `chosen` and `rejected`, or a
    prompt.
    """
    if not len(rows):
        return rows
    columns = {column for row in rows for column in row}
    for side in SIDES:
        if side not in columns:
            remedy = "docs/preferences.md makes pairs of scores, ratings and labels"
            raise DataError(f"{missing_column(side, rows[0], rows.where(0))}; {remedy}")
    has_prompt = wording.format is not None or not columns.isdisjoint(ASKED_IN)
    if not has_prompt and not _holds_its_prompt(rows):
        raise DataError(missing_column("prompt", rows[0], rows.where(0)))

    def pair(row: Row, where: str) -> Row:
        return _with_one_prompt(_pair_of(row, where, wording), where, wording)

    return rows.mapped(pair)


def _holds_its_prompt(rows: SourceRows) -> bool:
    """True if some `chosen` is a conversation: messages, or a string with turns."""
    for row in rows:
        chosen = row.get("chosen")
        if isinstance(chosen, list) or _turns_of(chosen):
            return True
    return False


def _pair_of(row: Row, where: str, wording: Wording) -> Row:
    """The pair of a row; hh_rlhf's strings are cut into turns.  Raises BadRow."""
    for side in SIDES:
        if side not in row:
            raise BadRow(f"without {side}", where)
    row = _with_turns(row) if wording.chat else row
    chosen, rejected = row["chosen"], row["rejected"]
    spoken = [_turns_of(chosen), _turns_of(rejected)]
    if not all(spoken):
        both_texts = isinstance(chosen, str) and isinstance(rejected, str)
        has_prompt = not row.keys().isdisjoint(ASKED_IN)
        if any(spoken) and both_texts and not has_prompt:
            raise BadRow("in which one side is no conversation", where)
        return row
    if any(turns[-1]["role"] != "assistant" for turns in spoken):
        raise BadRow("that do not end with a turn of the assistant", where)
    if wording.chat:
        return {**row, "chosen": spoken[0], "rejected": spoken[1]}
    prompt, answer = _cut(chosen)
    rejected_prompt, rejected_answer = _cut(rejected)
    if prompt != rejected_prompt:
        raise BadRow(DIVERGING, where)
    if not _agrees(row.get("prompt"), prompt):
        raise BadRow(CONTRADICTS, where)
    return {**row, "prompt": prompt, "chosen": answer, "rejected": rejected_answer}


def _with_turns(row: Row) -> Row:
    """A row whose prompt, a string in hh_rlhf's form, is messages; an empty last turn is left
    out.
    """
    turns = _turns_of(row.get("prompt"))
    if not turns:
        return row
    last = turns[-1]
    if last["role"] == "assistant" and not last["content"]:
        turns = turns[:-1]
    return {**row, "prompt": turns}


def _cut(text: str) -> tuple[str, str]:
    """A conversation in hh_rlhf's form up to its last answer, and the answer."""
    place = text.rindex(ANSWER) + len(ANSWER)
    return text[:place], text[place:]


def _agrees(prompt: object, conversation: str) -> bool:
    """True if a row's prompt is the conversation, its beginning, or its first turn."""
    if not isinstance(prompt, str) or conversation.startswith(prompt):
        return True
    turns = _turns_of(conversation)
    return turns[:-1] == _turns_of(prompt) or turns[0]["content"] == prompt.strip()


def _with_one_prompt(row: Row, where: str, wording: Wording) -> Row:
    """The pair whose prompt holds all that was said before the last turns of its sides.

    Sides may repeat the prompt or go on from it.  Where `wording.format` writes the prompt, they
    keep messages of the system.
    Raises DataError for what is no conversation, BadRow for sides of different prompts.
    """
    if not any(isinstance(row[side], list) and len(row[side]) > 1 for side in SIDES):
        return row
    sides: list[Messages] = []
    for side in SIDES:
        turns = checked_turns(row[side], side, where, images=wording.keeps_images)
        sides.append(_as_messages(turns))
    chosen, rejected = sides
    before_chosen = before_the_answer(chosen, "chosen", where)
    before_rejected = before_the_answer(rejected, "rejected", where)
    if wording.format is None:
        asked = _prompt_of(row, where, wording)
        prompt = _joined(asked, before_chosen, chosen, "chosen", where)
        if not prompt or prompt != _joined(asked, before_rejected, rejected, "rejected", where):
            raise BadRow(DIVERGING, where)
        return {**row, "prompt": prompt, "chosen": chosen[-1:], "rejected": rejected[-1:]}
    system = openings(before_chosen)
    for before in (before_chosen, before_rejected):
        if len(before) - len(openings(before)) > 1:
            raise BadRow(
                SEVERAL,
                f"{where}: data.template writes one prompt, and chosen and rejected hold several"
                " turns",
            )
    if before_chosen != before_rejected:
        raise BadRow(DIVERGING, where)
    return {**row, "chosen": [*system, chosen[-1]], "rejected": [*system, rejected[-1]]}


def _as_messages(turns: Content) -> Messages:
    """A side as messages; a text is what the assistant says."""
    return [{"role": "assistant", "content": turns}] if isinstance(turns, str) else turns


def _joined(asked: Messages, before: Messages, turns: Messages, side: str, where: str) -> Messages:
    """The prompt of a row and the turns of a side before its answer, as one conversation."""
    return joined(asked, before, side, where, str(turns[-1]["content"]))


def _prompt_of(row: Row, where: str, wording: Wording) -> Messages:
    """What the row's own column asks, as messages; none if it asks nothing."""
    if all(row.get(column) is None for column in ASKED_IN):
        return []
    columns = {
        column: value
        for column, value in row.items()
        if column not in ASKED_IN or value is not None
    }
    content = replace(wording, chat=True).unopened_content(columns, where)
    return [] if isinstance(content, str) or is_blank(content) else content


def _turns_of(text: object) -> list[dict[str, Any]]:
    r"""The messages of a string in hh_rlhf's form; none if it is in another.

    >>> _turns_of("\n\nHuman: Hi\n\nAssistant: Hello")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if not isinstance(text, str) or not _HH_TURN.match(text):
        return []
    parts = _HH_TURN.split(text)[1:]
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": SPEAKERS[speaker], "content": words.strip()} for speaker, words in turns]
