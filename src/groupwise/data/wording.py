"""From a row to what it asks: a string or chat messages, before any tokenizer.  A row is read here, once."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.config.settings import DataSettings
from groupwise.data.messages import OPENING, Content, Messages, asks, before_the_answer, checked, says_nothing, variables_in
from groupwise.data.sources import BadRow, Row, first_of, missing_column
from groupwise.errors import ConfigError, DataError

NOTHING = "with nothing in a column that data.template reads"
BRACES = "write columns in {braces}; a literal brace is doubled"
ALPACA = """Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the request.

### Instruction:
{instruction}{input_block}

### Response:
"""


@dataclass(frozen=True, slots=True, eq=False)
class ReadRow:
    """A row that has been read: what it asks and what it answers.  Nothing looks into its columns for these again."""

    row: Row
    content: Content
    answers: tuple[Content, ...] = ()
    """Of a demonstration the completion; of a pair the chosen and the rejected one; none of a prompt."""
    wrapped: bool = False
    """True if the row asks in one text, of which `chat` made a message."""
    notes: tuple[str, ...] = ()
    """Remarks about the row, for the report."""
    extra: Any = None
    """What its kind alone has: a pair its margin, a solution its steps with their labels."""


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
    """Makes the prompt from the row's columns; `alpaca` names the usual one for instruction/input rows."""

    @classmethod
    def of(cls, settings: DataSettings) -> Wording:
        """The wording that the settings describe."""
        return Wording(chat=settings.chat, system=settings.system, format=settings.template)

    def content(self, row: Row, where: str = "row") -> Content:
        """What `row` asks: from `format`, or the columns `prompt`, `messages` (all but a last assistant turn), or `instruction`.

        Raises DataError, naming `where`, if the columns are missing or hold neither text nor messages.
        """
        return self.read(row, where).content

    def read(self, row: Row, where: str = "row") -> ReadRow:
        """`row` as a prompt.  Raises DataError as `content`."""
        bare = self._asked(row, where)
        content = self.opened(self._in_chat(bare))
        return ReadRow(row, content, wrapped=isinstance(bare, str) and not isinstance(content, str))

    def own_content(self, row: Row, where: str = "row") -> Content:
        """`content` without the system message of the settings."""
        return self._in_chat(self._asked(row, where))

    def column_of(self, row: Row) -> str | None:
        """The column that a row asks in; None if it has none, or if `format` says what it asks."""
        return first_of(row, ("prompt", "messages", "instruction")) if self.format is None else None

    def _in_chat(self, content: Content) -> Content:
        return [{"role": "user", "content": content}] if self.chat and isinstance(content, str) else content

    def opened(self, content: Content) -> Content:
        """What a row asks, behind the system message of the settings, or behind its own if it opens with one that is not empty.

        Raises ConfigError if the settings' cannot stand there.
        """
        if self.system is None:
            return content
        if isinstance(content, str):
            raise ConfigError("data.system needs chat messages: set data.chat: true, or put the text into data.template")
        if not content or content[0]["role"] not in OPENING:
            return [self._opening, *content]
        return [self._opening, *content[1:]] if says_nothing(content[0]["content"]) else content

    @property
    def _opening(self) -> dict[str, Any]:
        """The settings' message."""
        return {"role": "system", "content": self.system}

    def brought(self, messages: Messages) -> Messages:
        """Messages without the one that the settings put before them."""
        return messages[1:] if self.system is not None and messages[:1] == [self._opening] else messages

    def key(self, content: Content) -> str:
        """Names a prompt for the held-out split and for duplicates: its own text, whatever the chat template or `system`.

        A single user message is the same prompt as its string.
        """
        if isinstance(content, str):
            return content
        brought = self.brought(content)
        if len(brought) == 1 and brought[0]["role"] == "user" and isinstance(brought[0]["content"], str):
            return brought[0]["content"]
        return json.dumps(brought, sort_keys=True, ensure_ascii=False, default=str)

    def _asked(self, row: Row, where: str) -> Content:
        """`own_content` before `chat` makes a message of a text."""
        variables_in(row, where)  # refuses those that cannot be used
        if self.format == "alpaca":
            return _alpaca(row, where)
        if self.format is not None:
            return formatted(self.format, row, where)
        column = self.column_of(row)
        if column == "prompt":
            return asks(checked(row["prompt"], "prompt", where), "prompt", where)
        if column == "messages":
            messages = checked(row["messages"], "messages", where)
            return messages if isinstance(messages, str) else before_the_answer(messages, "messages", where)
        if column is None:
            raise DataError(missing_column("prompt", row, where))
        if not self.chat:
            raise ConfigError(f"{where} has instruction/input columns: set data.template: alpaca, or data.chat: true")
        instruction, context = _string(row, "instruction", where), _string(row, "input", where, default="")
        return f"{instruction}\n\n{context}" if context.strip() and instruction.strip() else instruction


def _string(row: Row, column: str, where: str, default: str | None = None) -> str:
    if column not in row and default is None:
        raise DataError(missing_column(column, row, where))
    value = row.get(column, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise DataError(f"{where}: {column} is {value!r:.60} ({type(value).__name__}): expected a string")
    return value


def _alpaca(row: Row, where: str) -> str:
    instruction, context = _string(row, "instruction", where), _string(row, "input", where, default="")
    if not instruction.strip():
        return ""
    if not context.strip():
        return ALPACA.format(with_input="", instruction=instruction, input_block="")
    further = ", paired with an input that provides further context"
    return ALPACA.format(with_input=further, instruction=instruction, input_block=f"\n\n### Input:\n{context}")


def formatted(template: str, row: Row, where: str) -> str:
    """A format string filled in with a row's columns.

    Raises ConfigError for what is no format string, DataError or BadRow for a row that it cannot write.
    """
    try:
        for field in _fields(template):
            _refuse_unwritten(field, row, where)
    except ValueError as error:
        raise ConfigError(f"data.template cannot be filled in at {where} ({error}): {BRACES}") from None
    try:
        return template.format_map(row)
    except (ValueError, TypeError, OverflowError) as error:  # `{n:d}` of a text
        raise BadRow("with a value that data.template cannot write", f"{where}: data.template: {error}; {BRACES}") from None


def _fields(template: str) -> Iterator[str]:
    """What a format string reads, also inside of format specs.  Raises ValueError for what is none, and for places (`{0}`).

    >>> list(_fields("{q:{width}} {info[hint]} {{x}}"))
    ['q', 'width', 'info[hint]']
    """
    for _, field, spec, _ in string.Formatter().parse(template):
        if field is not None:
            if not _column(field) or _column(field).isdecimal():
                raise ValueError(f"{{{field}}} names no column")
            yield field
            yield from _fields(spec or "")


def _column(field: str) -> str:
    """The column that a field of a format string begins with."""
    return re.split(r"[.\[]", field)[0]


def _refuse_unwritten(field: str, row: Row, where: str) -> None:
    """Raises BadRow for a value that is not there, or that a format string would write as Python does: None, or messages."""
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
            "with messages where data.template reads a text", f"{where}: {field} holds messages, and data.template writes texts"
        )
