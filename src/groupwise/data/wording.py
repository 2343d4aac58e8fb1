"""From a row to what it asks and answers, before any tokenizer.  A row is read here, once, by the
reader of its kind of record.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from groupwise.config.settings import DataSettings
from groupwise.data.images import (
    NO_MODEL,
    NO_READER,
    ImageEncoder,
    NoImages,
    Picture,
    holds_images,
    parts_with_images,
    read_images,
)
from groupwise.data.messages import (
    OPENING,
    Content,
    Messages,
    asks,
    before_the_answer,
    checked,
    joined,
    openings,
    says_nothing,
    variables_in,
)
from groupwise.data.sources import BadRow, Row, first_of, missing_column
from groupwise.errors import ConfigError, DataError
from groupwise.utils.spelling import counted

ANSWERED_IN = ("completion", "messages", "output")
"""Columns in which an answer may stand."""
NOTHING = "with nothing in a column that data.template reads"
SEVERAL = "with several turns beside data.template"
WEIGHT = "whose answer has another weight than 1"
WEIGHTS = ("weight", "loss_weight", "loss_scale")
"""Keys of a message that weigh its tokens in the loss."""
SWITCHED_OFF = "whose answer is switched off"
TRAINED: Mapping[str, bool] = {
    **dict.fromkeys(WEIGHTS, True),
    "train": True,
    "training": True,
    "trainable": True,
    "loss": True,
    "loss_mask": True,
    "train_on": True,
    "masked": False,
    "is_masked": False,
}
"""Keys of a message that say whether its tokens are trained, each with the value that says so.

`weight`: OpenAI, TRL; `train`, `training`: Axolotl, open-instruct; `loss`, `loss_scale`: ms-swift,
LLaMA-Factory; `loss_mask`: verl; `masked`: torchtune.
"""
UNCLEAR = "with a mask that may mean trained or left out"
UNTRAINED = "with an earlier turn that is to be trained, which is not"
EARLIER = "with earlier turns of the completion in the prompt"
UNSAID = "whose system message data.template does not write"
TEXT_ALONE = "of which the column text alone is read"
BRACES = "write columns in {braces}; a literal brace is doubled"
ALPACA = """Below is an instruction that describes a task{with_input}. \
Write a response that appropriately completes the request.

### Instruction:
{instruction}{input_block}

### Response:
"""
_KEYS = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=str)


@dataclass(frozen=True, slots=True, eq=False)
class ReadRow:
    """A row that has been read: what it asks and what it answers.  Nothing looks into its columns
    for these again.
    """

    row: Row
    where: str
    """Names the row in messages."""
    content: Content
    answers: tuple[Content, ...] = ()
    """The completion of a demonstration, or the chosen and the rejected one of a pair; a prompt has
    none.
    """
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, as the row sets them."""
    wrapped: bool = False
    """True if the row asks in one text, of which `chat` made a message."""
    steps: Sequence[str] = ()
    """The steps of a solution."""
    notes: tuple[str, ...] = ()
    """Remarks about the row, for the report."""
    extra: Any = None
    """What its kind alone has: a pair its margin, a solution the labels of its steps."""
    pictures: tuple[Picture, ...] = ()
    """The images of what it asks, in their order."""
    text_alone: bool = False
    """True of a demonstration that is one text, all of which is learnt: it is what the row asks,
    and the answer is empty.
    """


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How a row becomes a prompt (a string or messages), before any tokenizer.

    >>> Wording(format="Reverse: {word}").content({"word": "abc"})
    'Reverse: abc'
    """

    chat: bool = False
    """Strings become messages of the user."""
    system: str | None = None
    """Put before messages that bring no system message of their own."""
    format: str | None = None
    """Makes the prompt from the row's columns; `alpaca` names the usual one for instruction/input
    rows.
    """
    images: ImageEncoder | NoImages = NO_MODEL
    """Writes images into prompts, or says why none is read."""

    @classmethod
    def of(cls, settings: DataSettings) -> Wording:
        """The wording that the settings describe."""
        return Wording(chat=settings.chat, system=settings.system, format=settings.template)

    def content(self, row: Row, where: str = "row") -> Content:
        """What `row` asks: from `format`, or the columns `prompt`, `messages` (all but a last
        assistant turn), or `instruction`.

        Raises DataError, naming `where`, if the columns are missing or hold neither text nor
        messages.
        """
        return self.read(row, where).content

    def read(self, row: Row, where: str = "row") -> ReadRow:
        """`row` as a prompt.  Raises DataError as `content`."""
        variables = variables_in(row, where)
        bare = self._bare_content(row, where, images=True)
        content, pictures = self._in_chat(bare), ()
        if isinstance(self.images, ImageEncoder):
            content, pictures, row = read_images(row, content, where)
        elif holds_images(row) or parts_with_images(content):
            raise BadRow(NO_READER, f"{where}: the prompt has images, and {self.images.reason}")
        return ReadRow(
            row,
            where,
            self.opened(content),
            variables=variables,
            wrapped=self.chat and isinstance(bare, str),
            pictures=pictures,
        )

    def unopened_content(self, row: Row, where: str = "row") -> Content:
        """`content` without the system message of the settings.

        Where images are read, their parts stay in the messages.  Raises BadRow for a row with
        images where none is read.
        """
        if self.reads_images:
            return self._in_chat(self._bare_content(row, where, images=True))
        if holds_images(row):
            assert isinstance(self.images, NoImages)
            raise BadRow(NO_READER, f"{where}: the row has images, and {self.images.reason}")
        return self._in_chat(self._bare_content(row, where))

    @property
    def reads_images(self) -> bool:
        """True if images are written into prompts."""
        return isinstance(self.images, ImageEncoder)

    @property
    def keeps_images(self) -> bool:
        """True if images may stand in the turns before an answer: a `format` writes the prompt
        without these turns.
        """
        return self.reads_images and self.format is None

    def column_of(self, row: Row) -> str | None:
        """The column that a row asks in; None if it has none, or if `format` says what it asks."""
        return first_of(row, ("prompt", "messages", "instruction")) if self.format is None else None

    def _in_chat(self, content: Content) -> Content:
        if self.chat and isinstance(content, str):
            return [{"role": "user", "content": content}]
        return content

    def opened(self, content: Content) -> Content:
        """What a row asks, behind the system message of the settings, or behind its own if it opens
        with one that is not empty.

        Raises ConfigError if the settings' cannot stand there.
        """
        if self.system is None:
            return content
        if isinstance(content, str):
            raise ConfigError(
                "data.system needs chat messages: set data.chat: true, or put the text into"
                " data.template"
            )
        if not content or content[0]["role"] not in OPENING:
            return [self._opening, *content]
        return [self._opening, *content[1:]] if says_nothing(content[0]["content"]) else content

    @property
    def _opening(self) -> dict[str, Any]:
        """The settings' message."""
        return {"role": "system", "content": self.system}

    def unopened(self, messages: Messages) -> Messages:
        """Messages without the one that the settings put before them."""
        if self.system is not None and messages[:1] == [self._opening]:
            return messages[1:]
        return messages

    def key(self, content: Content) -> str:
        """Names a prompt for the held-out split and for duplicates: its own text, whatever the chat
        template or `system`.

        A single user message is the same prompt as its string.
        """
        if isinstance(content, str):
            return content
        bare = self.unopened(content)
        if len(bare) == 1 and bare[0]["role"] == "user" and isinstance(bare[0]["content"], str):
            return bare[0]["content"]
        return _KEYS.encode(bare)

    def _bare_content(self, row: Row, where: str, *, images: bool = False) -> Content:
        """`unopened_content` before `chat` makes a message of a text.   images: see `checked`."""
        if self.format == "alpaca":
            return _alpaca(row, where)
        if self.format is not None:
            return formatted(self.format, row, where)
        column = self.column_of(row)
        if column == "prompt":
            asked = checked(row["prompt"], "prompt", where, images=images)
            return asks(asked, "prompt", where)
        if column == "messages":
            messages = checked(row["messages"], "messages", where, images=images)
            if isinstance(messages, str):
                return messages
            return before_the_answer(messages, "messages", where)
        if column is None:
            raise DataError(missing_column("prompt", row, where))
        if not self.chat:
            raise ConfigError(
                f"{where} has instruction/input columns: set data.template: alpaca, or data.chat:"
                " true"
            )
        instruction = _string(row, "instruction", where)
        context = _string(row, "input", where, default="")
        if context.strip() and instruction.strip():
            return f"{instruction}\n\n{context}"
        return instruction


def checked_turns(value: object, column: str, where: str, *, images: bool = False) -> Content:
    """`value` if it ends with an answer: a string, or messages of which the last is the
    assistant's.

    images: see `checked`; the answer has none.
    Raises DataError otherwise.
    """
    if not isinstance(value, str | list) or (
        isinstance(value, list) and not all(isinstance(turn, Mapping) for turn in value)
    ):
        raise DataError(
            f"{where}: {column} is {value!r:.60} ({type(value).__name__}): expected a string or"
            " messages"
        )
    turns = checked(value, column, where, images=images)
    if isinstance(value, list) and (isinstance(turns, str) or turns[-1]["role"] != "assistant"):
        raise DataError(f"{where}: {column} must end with a message of the assistant")
    if isinstance(turns, str):
        return turns
    for turn in turns:
        if turn["role"] == "assistant" and turn.get("mask") is not None:
            raise BadRow(
                UNCLEAR,
                f"{where}: a message of {column} has mask {turn['mask']!r:.40}, which may mean"
                " trained or left out: write train, true or false, in its place",
            )
    (last,) = checked(turns[-1:], column, where)
    assert isinstance(last, dict)
    for key, trained in TRAINED.items():
        if last.get(key) is not None and _switch(last[key]) != trained:
            reason = WEIGHT if key in WEIGHTS else SWITCHED_OFF
            raise BadRow(
                reason,
                f"{where}: the last message of {column} has {key} {last[key]!r:.40}: the last turn"
                f" is what is trained, with {key} {trained:d} or none",
            )
    return turns


def _switch(value: object) -> object:
    """A switch of a message as a truth value, where a text or a number stands for one."""
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.lower(), value)
    return value


def _is_to_be_trained(turn: Mapping[str, Any]) -> bool:
    """True for a message that a switch marks as one to be trained."""
    return any(key in turn and _switch(turn[key]) == value for key, value in TRAINED.items())


def read_demonstration(row: Row, where: str, wording: Wording) -> ReadRow:
    """What a row asks, and the answer to imitate: a string, or a message of the assistant.

    The answer stands in `completion`, in `messages` whose last turn is the assistant's, or in
    Alpaca's `output`.  Turns before the last one are part of the prompt; where `wording.format`
    writes it as messages, those of the system stand before it. A row without these, and without a
    prompt, may have a `text`.
    Raises DataError if the row has no answer, or asks nothing readable.
    """
    if _is_text_alone(row, wording):
        if wording.system is not None:
            raise ConfigError(
                f"{where} is a text alone, which has no messages: leave data.system out, or write"
                " it into the text"
            )
        alone = ReadRow(row, where, row["text"], ("",), text_alone=True)
        for other, value in row.items():
            if other != "text" and value is not None:
                return replace(alone, notes=(TEXT_ALONE,))
        return alone
    column = first_of(row, ANSWERED_IN)
    if column is None:
        raise DataError(missing_column("completion", row, where))
    variables = variables_in(row, where)
    answer = checked_turns(row[column], column, where, images=wording.keeps_images)
    notes: tuple[str, ...] = ()
    if isinstance(answer, str):
        prompt = wording.unopened_content(row, where)
    else:
        before = before_the_answer(answer, column, where)
        answer = answer[-1:]
        if column == "messages" == wording.column_of(row):
            prompt = before
        else:
            prompt = _behind_turns(wording, row, before, answer, column, where)
            if isinstance(prompt, str) and openings(before):
                notes = (UNSAID,)
            elif before and column == "completion":
                notes = (EARLIER,)
    pictures: tuple[Picture, ...] = ()
    if wording.reads_images:
        prompt, pictures, row = read_images(row, prompt, where)
    content = wording.opened(prompt)
    if not isinstance(content, str):
        earlier = [turn for turn in content if turn["role"] == "assistant"]
        if any(map(_is_to_be_trained, earlier)):
            notes += (UNTRAINED,)
    return ReadRow(row, where, content, (answer,), variables, notes=notes, pictures=pictures)


def _is_text_alone(row: Row, wording: Wording) -> bool:
    """True if the other columns that are read are not there, or null, as in files of several kinds
    of rows.
    """
    others = (first_of(row, ANSWERED_IN), wording.column_of(row))
    unfilled = all(column is None or row[column] is None for column in others)
    return wording.format is None and unfilled and isinstance(row.get("text"), str)


def _behind_turns(
    wording: Wording, row: Row, before: Messages, answer: Messages, column: str, where: str
) -> Content:
    """The prompt of a row whose answer stands behind turns that may repeat the prompt or go on from
    it.
    """
    prompt = wording.unopened_content(row, where)
    # Of a whole conversation one turn stands before the answer: the question, which is the prompt.
    repeated = 1 if column == "messages" else 0
    if wording.format is not None and len(before) - len(openings(before)) <= repeated:
        if isinstance(prompt, str):
            return prompt
        return [*openings(before), *prompt]
    if before and isinstance(prompt, str):
        if wording.format is not None:
            raise BadRow(
                SEVERAL,
                f"{where}: data.template writes one prompt, and {column} holds several turns",
            )
        prompt = [{"role": "user", "content": prompt}] if prompt.strip() else []
    if before and not isinstance(prompt, str):
        return joined(prompt, before, column, where, str(answer[-1]["content"]))
    return prompt


def read_answered_or_not(row: Row, where: str, wording: Wording) -> ReadRow:
    """A row as a demonstration; one without an answer as a prompt."""
    answered = first_of(row, ANSWERED_IN) is not None or _is_text_alone(row, wording)
    if answered:
        return read_demonstration(row, where, wording)
    return wording.read(row, where)


def read_pair(row: Row, where: str, wording: Wording) -> ReadRow:
    """A pair with a prompt, `chosen` and `rejected`, and perhaps the `margin` by which the scores
    of both should differ.

    Where `wording.format` writes the prompt as messages, those of the system stand before it.
    """
    system: Messages = []
    if isinstance(row["chosen"], list):
        system = openings(row["chosen"][:-1])
    prompt = wording.unopened_content(row, where)
    if not isinstance(prompt, str):
        prompt = [*system, *prompt]
    pictures: tuple[Picture, ...] = ()
    if wording.reads_images:
        prompt, pictures, row = read_images(row, prompt, where)
    content = wording.opened(prompt)
    answers = []
    for side in ("chosen", "rejected"):
        turns = checked_turns(row[side], side, where)
        answers.append(turns if isinstance(turns, str) else turns[-1:])
    margin = row.get("margin")
    if margin is not None and (
        isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < 1e300
    ):
        raise DataError(f"{where}: margin is {margin!r:.40}: expected a number")
    notes = (UNSAID,) if system and isinstance(content, str) else ()
    return ReadRow(
        row,
        where,
        content,
        tuple(answers),
        variables_in(row, where),
        notes=notes,
        extra=float(margin or 0.0),
        pictures=pictures,
    )


def read_solution(row: Row, where: str, wording: Wording) -> ReadRow:
    """A prompt with `completions` (the steps, strings) and `labels` (true or false, or a
    probability, for each).

    Raises DataError, also for a row without steps or with an empty one.
    """
    prompt = wording.read(row, where)
    for column in ("completions", "labels"):
        if column not in row:
            raise DataError(missing_column(column, row, where))
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise DataError(
            f"{where}: completions must be a list of strings, one per step, got {steps!r:.80}"
        )
    if not isinstance(labels, list) or len(labels) != len(steps):
        count = f"the labels {labels!r:.80}"
        if isinstance(labels, list):
            count = counted(len(labels), "label")
        raise DataError(
            f"{where}: there are {counted(len(steps), 'completion')} and {count}; each step has one"
        )
    if not all(isinstance(label, int | float) and 0 <= label <= 1 for label in labels):
        raise DataError(f"{where}: labels are true or false, or probabilities, got {labels!r:.80}")
    if not steps or not all(step.strip() for step in steps):
        raise BadRow(
            "with no step or an empty one", f"{where}: completions holds no step, or an empty one"
        )
    return replace(prompt, steps=steps, extra=np.array(labels, dtype=np.float64))


def _string(row: Row, column: str, where: str, default: str | None = None) -> str:
    if column not in row and default is None:
        raise DataError(missing_column(column, row, where))
    value = row.get(column, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {column} is {value!r:.60} ({type(value).__name__}): expected a string"
        )
    return value


def _alpaca(row: Row, where: str) -> str:
    instruction = _string(row, "instruction", where)
    context = _string(row, "input", where, default="")
    if not instruction.strip():
        return ""
    if not context.strip():
        return ALPACA.format(with_input="", instruction=instruction, input_block="")
    further = ", paired with an input that provides further context"
    return ALPACA.format(
        with_input=further, instruction=instruction, input_block=f"\n\n### Input:\n{context}"
    )


def formatted(template: str, row: Row, where: str) -> str:
    """A format string filled in with a row's columns.

    Raises ConfigError for what is no format string, DataError or BadRow for a row that it cannot
    write.
    """
    try:
        for field in _fields(template):
            _refuse_unwritten(field, row, where)
    except ValueError as error:
        raise ConfigError(
            f"data.template cannot be filled in at {where} ({error}): {BRACES}"
        ) from None
    try:
        return template.format_map(row)
    except (ValueError, TypeError, OverflowError) as error:  # `{n:d}` of a text
        raise BadRow(
            "with a value that data.template cannot write",
            f"{where}: data.template: {error}; {BRACES}",
        ) from None


def _fields(template: str) -> Iterator[str]:
    """What a format string reads, also inside of format specs.  Raises ValueError for what is none,
    and for places (`{0}`).

    >>> list(_fields("{q:{width}} {info[hint]} {{x}}"))
    ['q', 'width', 'info[hint]']
    """
    for _, read, spec, _ in string.Formatter().parse(template):
        if read is not None:
            if not _column(read) or _column(read).isdecimal():
                raise ValueError(f"{{{read}}} names no column")
            yield read
            yield from _fields(spec or "")


def _column(field: str) -> str:
    """The column that a field of a format string begins with."""
    return re.split(r"[.\[]", field)[0]


def _refuse_unwritten(field: str, row: Row, where: str) -> None:
    """Raises BadRow for a value that is not there, or that a format string would write as Python
    does: None, or messages.
    """
    column = _column(field)
    if column not in row:
        raise DataError(missing_column(column, row, f"{where} (data.template)"))
    if row[column] is None:
        raise BadRow(NOTHING, f"{where}: {column} is null, and data.template reads it")
    try:
        value, _ = string.Formatter().get_field(field, (), row)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        why = f"no key {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        remedy = f"{{{column}[key]}} reads a key, {{{column}[0]}} the first item"
        raise BadRow(
            "without a part of a column that data.template reads",
            f"{where}: {column} lacks what {{{field}}} reads: {why}; {remedy}",
        ) from None
    if value is None:
        raise BadRow(NOTHING, f"{where}: {field} is null, and data.template reads it")
    is_message = isinstance(value, Mapping) and "role" in value
    if is_message or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value)):
        raise BadRow(
            "with messages where data.template reads a text",
            f"{where}: {field} holds messages, and data.template writes texts",
        )
