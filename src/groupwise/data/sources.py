"""Rows from files and from the hub, with the place of each row kept for the messages about it."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, TypeVar
from uuid import UUID

from groupwise.config.live_objects import Live, object_of, short_digest
from groupwise.config.validation import ROW, wrong_rows
from groupwise.errors import DataError
from groupwise.utils.built_in import built_in, find_built_in
from groupwise.utils.files import digest, expanded
from groupwise.utils.json_text import half_character
from groupwise.utils.spelling import counted
from groupwise.utils.terminal import escaped

Row = Mapping[str, Any]
Item = TypeVar("Item")
Other = TypeVar("Other")

MAX_DEPTH = 100
"""Lists and objects inside one another in a row; Python's own functions fail beyond some hundreds.
"""


PARQUET_ROWS = 10_000
"""Rows of a Parquet file that are decoded at a time."""
UNREADABLE = "that cannot be read"
NO_JSON = "with messages as text that is no JSON"
DAMAGED = "that are damaged"


class BadRow(DataError):
    """A row that cannot be used, with the reason under which it is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that is not used."""

    reason: str
    """The reason, as the report counts it."""
    where: str
    """Where the row is, or what is wrong with it."""
    number: int = 0
    """What the row is called in its source, as in `SourceRows.numbers`; 0: not known."""

    @classmethod
    def of(cls, error: DataError, number: int = 0) -> LeftOut:
        """The row that this is about."""
        reason = error.reason if isinstance(error, BadRow) else UNREADABLE
        return cls(reason, str(error), number)


@dataclass(frozen=True, slots=True)
class SourceRows(Sequence[Item], Generic[Item]):
    """Rows of one source, or what they were read as.  `where(i)` names row i as its owner would
    look for it: file and line, or data set and row."""

    name: str
    rows: Sequence[Item]
    numbers: Sequence[int] = field(default=(), repr=False)
    """What each row is called in its source, from 1: its line in a JSONL file.  Default: 1, 2, 3
    ...
    """
    unit: str = "row"
    left_out: tuple[LeftOut, ...] = field(default=(), repr=False)
    """Rows of the source that are not among these, for the report; a part of these rows does not
    repeat them.
    """

    def __post_init__(self) -> None:
        if not self.numbers:
            object.__setattr__(self, "numbers", range(1, len(self.rows) + 1))
        assert len(self.numbers) == len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: Any) -> Any:
        return self.rows[i]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.rows)

    def where(self, i: int) -> str:
        """For messages: `train.jsonl line 17`."""
        return f"{self.name} {self.unit} {self.numbers[i]}"

    def first(self, n: int | None) -> SourceRows[Item]:
        """The first `n` rows, and what is left out before the last of them; all if None."""
        if n is None or n > len(self.rows) or not self.rows:
            return self
        left_out = tuple(left for left in self.left_out if left.number <= self.numbers[n - 1])
        return replace(self, rows=self.rows[:n], numbers=self.numbers[:n], left_out=left_out)

    def subset(self, places: Sequence[int]) -> SourceRows[Item]:
        """The rows at `places`, under the names they had."""
        return replace(
            self,
            rows=[self.rows[i] for i in places],
            numbers=[self.numbers[i] for i in places],
            left_out=(),
        )

    def renamed(self: SourceRows[Row], columns: Mapping[str, str]) -> SourceRows[Row]:
        """Columns under our names (`{ours: yours}`), all at once, so that two can be exchanged;
        published forms of rows as ours.

        A row without one that prompts and answers are read from is left out; any other it may lack.
        Raises DataError if every row is left out, or for a column that none has.
        """
        if not columns:
            return self.mapped(in_our_form)
        ours_of = {source: ours for ours, source in columns.items()}
        absent = set(ours_of)
        for row in self.rows:
            absent -= row.keys()
        if absent and self.rows:
            source = min(absent)
            raise DataError(missing_column(source, self.rows[0], self.where(0), ours_of[source]))

        def named(row: Row, where: str) -> Row:
            for source in sorted(ours_of.keys() - row.keys()):
                if ours_of[source] in ROW:
                    missing = missing_column(source, row, where, ours_of[source])
                    raise BadRow(f"without {escaped(source)}", missing)
            renamed = {name: value for name, value in row.items() if name not in ours_of}
            for ours, source in columns.items():
                if source in row:
                    renamed[ours] = row[source]
            return in_our_form(renamed, where)

        return self.mapped(named)

    def mapped(self, change: Callable[[Item, str], Other]) -> SourceRows[Other]:
        """What `change(row, where)` makes of each row; rows for which it raises DataError are left
        out, with what it says.

        Raises DataError, with every reason, if no row is left.
        """
        numbers: list[int] = []
        rows: list[Other] = []
        left_out = list(self.left_out)
        source = f"{self.name} {self.unit}"
        for row, number in zip(self.rows, self.numbers, strict=True):
            try:
                rows.append(change(row, f"{source} {number}"))
            except DataError as error:
                left_out.append(LeftOut.of(error, number))
            else:
                numbers.append(number)
        if self.rows and not rows:
            raise DataError(none_left(self.name, left_out))
        return SourceRows(self.name, rows, numbers, self.unit, tuple(left_out))


def in_our_form(row: Row, where: str) -> Row:
    """A row in one of the published `FORMS`, in our columns.  Raises BadRow."""
    for form in FORMS:
        row = form(row, where)
    return row


def with_messages(row: Row, where: str) -> Row:
    """A row in which a conversation that is stored as JSON text (by CSV, SQL) is a list of
    messages.

    Raises BadRow for a text that begins as messages do, and is no JSON: Python's own form, or one
    that is cut off.

    >>> with_messages({"messages": '[{"role": "user", "content": "Hi"}]'}, "row 1")
    {'messages': [{'role': 'user', 'content': 'Hi'}]}
    """
    for column in ROW:
        value = row.get(column)
        if isinstance(value, str) and "role" in value and _LISTS.match(value):
            row = {**row, column: _messages_in(value, column, where)}
    return row


def shared_conversation(row: Row, where: str) -> Row:
    """A row with the column `conversations`, as ShareGPT has it, with `messages` instead.  Raises
    BadRow.

    >>> shared_conversation({"conversations": [{"from": "human", "value": "Hi"}]}, "row 1")
    {'messages': [{'role': 'user', 'content': 'Hi'}]}
    """
    turns = row.get("conversations")
    if not isinstance(turns, list) or not all(map(_is_spoken, turns)):
        return row
    messages = []
    for turn in turns:
        switches = dict(turn)
        speaker, text = switches.pop("from"), switches.pop("value")
        if speaker not in SPEAKERS:
            remedy = f"the speakers of a conversation are {', '.join(SPEAKERS)}"
            raise BadRow(
                "with a speaker that is not known",
                f"{where}: conversations holds a turn from {speaker!r:.40}: {remedy}",
            )
        messages.append({"role": SPEAKERS[speaker], "content": text, **switches})
    columns = dict(row)
    del columns["conversations"]
    return {**columns, "messages": messages}


def _is_spoken(turn: object) -> bool:
    """True for a turn of ShareGPT's form."""
    return isinstance(turn, Mapping) and {"from", "value"} <= turn.keys()


SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
"""Speakers of `conversations`, with their roles."""
FORMS: tuple[Callable[[Row, str], Row], ...] = (with_messages, shared_conversation)
"""Published forms of rows.  A new one is a function (row, where) -> row here, which gives rows in
other forms back as they are.
"""

_LISTS = re.compile(r"\s*\[\s*\{")
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content)\1\s*:""")


def _messages_in(text: str, column: str, where: str) -> Any:
    """The messages of a text that is nothing else; the text where it is something else."""
    bare = text.strip()
    try:
        messages, end = json.JSONDecoder().raw_decode(bare)
    except (ValueError, RecursionError):
        if _MESSAGES.match(text):
            remedy = "store messages as a list, or as its JSON text"
            raise BadRow(
                NO_JSON,
                f"{where}: {column} holds messages as text that is no JSON: {bare!r:.60}: {remedy}",
            ) from None
        return text
    if end < len(bare) or not all(
        isinstance(message, Mapping) and "role" in message for message in messages
    ):
        return text
    try:
        _check_row({column: messages}, nested=True, halves=_HALF.search(text) is not None)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    return messages


def first_of(row: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """The first of these columns that a row fills; where it fills none, the first that it has.

    >>> first_of({"prompt": None, "messages": []}, ("prompt", "messages"))
    'messages'
    >>> first_of({"prompt": None}, ("prompt", "messages"))
    'prompt'
    """
    empty = None
    for column in columns:
        if row.get(column) is not None:
            return column
        if empty is None and column in row:
            empty = column
    return empty


def missing_column(name: str, row: Mapping[str, Any], where: str, ours: str | None = None) -> str:
    """The message for a column that is not there: it lists those that are.  ours: what
    `data.columns` calls it, where it does.
    """
    names = sorted(map(str, row))
    there = " ".join(escaped(", ".join(names[:20])).split("\n"))[:400] or "none"
    if len(names) > 20:
        there += f" ... ({len(names)} columns)"
    return (
        f"{where}: no column {name!r}; there are: {there} (data.columns: {{{ours or name}: YOURS}}"
        " renames one)"
    )


def none_left(name: str, left_out: Sequence[LeftOut]) -> str:
    """The message for a source none of whose rows can be used: every reason with its count and its
    first row.
    """
    counts = Counter(left.reason for left in left_out)
    first = {left.reason: left.where for left in reversed(left_out)}
    reasons: list[str] = []
    for reason, count in counts.items():
        reasons.append(f"{count} {reason} (first: {first[reason]})")
    return f"{name}: 0 of {counted(len(left_out), 'row')} can be used: {', '.join(reasons)}"


def read_rows(
    path: str, split: str = "train", *, lenient: bool = False, limit: int | None = None
) -> SourceRows:
    """Rows of a JSONL, JSON or Parquet file, or of a hub data set: `owner/name`, or
    `owner/name:config`.

    A name that looks like a path is never looked up on the hub.  Rows in memory are a `Live` name
    (see `live_rows`).
    lenient: of a file of which some row can be read, those that cannot (a line that is cut off,
        half of a character) are left out.
    limit: only so many rows are read, the first.
    Raises DataError naming the file, the line and what was found there, ConfigError for a `live:`
    name without its rows."""
    if (rows := object_of(path, "data.path")) is not None:
        return rows.first(limit)
    if wrong := wrong_rows(path):
        raise DataError(wrong)
    file = expanded(path)
    if not file.exists():
        return _read_hub(path, split, limit)
    if file.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes)")
    rows = find_built_in("data.sources", file.suffix.lower())(file, path, limit)
    if rows.left_out and not lenient:
        raise DataError(rows.left_out[0].where)
    if not rows and rows.left_out:
        raise DataError(none_left(path, rows.left_out))
    if not rows:
        raise DataError(f"{path} holds no rows")
    return rows


def live_rows(source: object, name: str) -> Live:
    """Rows in memory as a name that holds them: a list of mappings, or a `datasets.Dataset`.

    name: what the rows are called in messages, `data` or `eval_data`.   The name in the recipe has
        a digest of their content. Rows are copied: what happens to the given ones later is nobody's
        concern.   Raises DataError with what was given instead."""
    library = type(source).__module__.partition(".")[0]
    if library == "datasets" and isinstance(source, Mapping):
        splits = ", ".join(map(repr, source))
        raise DataError(
            f"{name} is a {type(source).__name__} with the splits {splits}: give one of them, e.g."
            " dataset['train']"
        )
    columnar = library == "datasets" and hasattr(source, "to_list")
    if columnar:
        source = source.to_list()  # type: ignore[attr-defined]
    if not isinstance(source, Sequence) or isinstance(source, str | bytes):
        hint = ""
        if library == "pandas":
            hint = ": give frame.to_dict('records')"
        elif isinstance(source, Iterable):
            hint = ": give list(...)"
        raise DataError(
            f"{name} is a list of mappings or a datasets.Dataset, got {kind_of(source)}{hint}"
        )
    if not source:
        raise DataError(f"{name} holds no rows")
    rows: list[Mapping[str, Any]] = []
    written = []
    copied: dict[int, Any] = {}  # what rows share, their copies share
    for i, row in enumerate(source):
        where = f"{name} row {i + 1}"
        if not isinstance(row, Mapping):
            raise DataError(
                f"{where} is {kind_of(row)}: a row is a mapping of columns to values, e.g."
                " {'prompt': ...}"
            )
        if too_deep(row):
            raise DataError(f"{where}: {_too_deep()}")
        if columnar:
            rows.append(bare_calls(row))
        else:
            row = _copied(row, where, copied)
            rows.append(row)
        try:
            written.append(
                json.dumps(row, sort_keys=True, ensure_ascii=False, default=_digested).encode()
            )
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: half of a character, {error.object[error.start]!a}, stands alone: mend"
                " the text"
            ) from None
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: {error}") from None
    return Live(f"{counted(len(rows), 'row')} ({short_digest(written)})", SourceRows(name, rows))


def _copied(row: Mapping[str, Any], where: str, copied: dict[int, Any]) -> dict[str, Any]:
    """copied: the memo of `copy.deepcopy`.   Raises DataError."""
    try:
        return {key: copy.deepcopy(value, copied) for key, value in row.items()}
    except Exception as error:  # whatever a value's own way to be copied raises
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{where} holds a value that cannot be copied ({why}): give plain values"
        ) from error


def _digested(value: object) -> Any:
    """What stands in a digest for a value that is no JSON: its content where that is the same in
    every process.
    """
    if callable(listed := getattr(value, "tolist", None)):  # arrays and numbers of numpy, tensors
        return listed()
    written: Any = getattr(value, "tobytes", None)
    if callable(written):  # images of PIL
        pixels: Any = written()
        return short_digest([pixels])
    if isinstance(value, bytes | Decimal | UUID | date | time | timedelta):
        return repr(value)
    return type(value).__name__


def kind_of(value: object) -> str:
    """What was given, for a message: its type, and the beginning of a value that is short to write.

    >>> kind_of(3), kind_of(None)
    ('an int: 3', 'None')
    """
    if value is None:
        return "None"
    kind = type(value).__name__
    named = f"an {kind}" if kind[0] in "aeiouAEIOU" else f"a {kind}"
    if not isinstance(value, str | int | float | list | tuple | dict | set | FunctionType):
        return named
    shown = escaped(repr(value))
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return f"{named}: {shown}"


@built_in(".jsonl", ".ndjson")
def _read_jsonl(file: Path, name: str, limit: int | None) -> SourceRows:
    rows, lines, left_out = [], [], []
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            try:
                rows.append(_parse_line(line))
                lines.append(number)
            except DataError as error:
                left_out.append(LeftOut(DAMAGED, f"{name} line {number}: {error}", number))
            if len(rows) == limit:
                break
    return SourceRows(name, rows, lines, unit="line", left_out=tuple(left_out))


def _parse_line(line: bytes) -> Mapping[str, Any]:
    text = _decode(line).rstrip()
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        problem = error.msg
        if error.pos >= len(text) or "Unterminated" in problem:
            problem = "the line is cut off"
        raise DataError(
            f"not JSON: {problem} at column {error.colno}: {_excerpt(text, error.pos)}"
        ) from None
    except (RecursionError, ValueError) as error:
        raise _unfit(error) from None
    nested = text.count("[") + text.count("{") > MAX_DEPTH
    _check_row(row, nested=nested, halves=_HALF.search(text) is not None)
    return row


def _check_row(row: object, *, nested: bool, halves: bool) -> None:
    """Raises DataError for what is no row, or what neither a tokenizer nor a file can hold.

    nested, halves: it may be nested too deeply, or hold half of a character.
    """
    if not isinstance(row, dict):
        raise DataError(f"a row is a JSON object, this is {_kind(row)}")
    if nested and too_deep(row):
        raise _too_deep()
    if halves and (half := half_character(row)):
        raise DataError(
            f"half of a character, {half}, stands alone: mend the text, for example by removing it"
        )


def too_deep(value: object) -> bool:
    """True if lists and objects are inside one another more than `MAX_DEPTH` times."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for outer in level:
            inner += list(outer.values()) if isinstance(outer, Mapping) else outer
        level = [value for value in inner if isinstance(value, list | Mapping)]
        if not level:
            return False
    return True


def _too_deep() -> DataError:
    return DataError(
        f"lists and objects are nested more than {MAX_DEPTH} deep: flatten the row, or store it as"
        " a string"
    )


def _unfit(error: RecursionError | ValueError) -> DataError:
    """JSON that is nested too deeply, or holds a number with more digits than Python writes out
    again.
    """
    if isinstance(error, RecursionError):
        return _too_deep()
    problem = str(error)
    digits = re.search(r"has (\d+) digits", problem)
    if digits:
        problem = f"a whole number of {int(digits[1]):,} digits"
    return DataError(f"{problem}: write it as a string")


def _decode(data: bytes) -> str:
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from None


_HALF = re.compile(r"\\u[dD]")
"""What may be half of a character, in JSON."""


@built_in(".json")
def _read_json(file: Path, name: str, limit: int | None) -> SourceRows:
    try:
        text = _decode(file.read_bytes())
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{name} line {error.lineno}"
        problem = f"{error.msg} at column {error.colno}: {_excerpt(error.doc, error.pos)}"
        if error.msg == "Extra data":
            problem += " (one object per line? then name it .jsonl)"
        raise DataError(f"{place}: not JSON: {problem}") from None
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{name}: {_unfit(error)}") from None
    if not isinstance(rows, list):
        raise DataError(f"{name}: expected a list of objects, found {_kind(rows)}")
    whole, numbers, left_out = [], [], []
    halves = _HALF.search(text) is not None
    for number, row in enumerate(rows, start=1):
        try:
            _check_row(row, nested=True, halves=halves)
            whole.append(row)
            numbers.append(number)
        except DataError as error:
            left_out.append(LeftOut(DAMAGED, f"{name} row {number}: {error}", number))
    return SourceRows(name, whole, numbers, left_out=tuple(left_out)).first(limit)


@built_in(".parquet")
def _read_parquet(file: Path, name: str, limit: int | None) -> SourceRows:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            size = PARQUET_ROWS if limit is None else min(limit, PARQUET_ROWS)
            rows: list[dict[str, Any]] = []
            for batch in parquet.iter_batches(size):
                rows += batch.to_pylist()
                if limit is not None and len(rows) >= limit:
                    break
            return SourceRows(name, _of_columns(rows[:limit], parquet.schema_arrow))
    except (
        UnicodeDecodeError,
        OverflowError,
    ) as error:  # a text that is no UTF-8, a date that Python has no object for
        raise DataError(f"{name}: a value of the Parquet file cannot be read: {error}") from None
    except (pyarrow.ArrowInvalid, OSError) as error:
        with file.open("rb") as stream:
            start = stream.read(8)
        raise DataError(
            f"{name}: not a readable Parquet file (begins with {start!r}):"
            f" {str(error).splitlines()[0]}"
        ) from None


def fingerprint(path: str, split: str = "train") -> dict[str, Any]:
    """A digest of the content of `read_rows(path, split)`: size and xxh3-128 of a file, the
    fingerprint of a hub data set.

    Raises DataError, OSError.
    """
    file = expanded(path)
    if file.exists() or wrong_rows(path):
        return {"size": file.stat().st_size, "xxh3_128": digest(file)}
    return {"fingerprint": str(_load_hub(path, split)._fingerprint)}


def _load_hub(name: str, split: str) -> Any:
    """Through `datasets`, with its cache.  Scripts of a data set are never run: `datasets` no
    longer can.
    """
    import datasets

    path, _, config = name.partition(":")
    try:
        return datasets.load_dataset(path, config or None, split=split)
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # not found, no connection, no such config or split
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(
            f"cannot load {name!r} (split {split!r}) from the hub, and no such file is here:"
            f" {reason}"
        ) from error


def _read_hub(name: str, split: str, limit: int | None) -> SourceRows:
    loaded = _load_hub(name, split)
    if not len(loaded):
        raise DataError(f"{name} (split {split}) holds no rows")
    if limit is not None and limit < len(loaded):
        loaded = loaded.select(range(limit))
    return SourceRows(name, _of_columns(loaded.to_list(), loaded.features))


FUNCTIONS = (
    "tools",
    "tool_calls",
    "function_call",
    "function",
    "parameters",
    "arguments",
    "chat_template_kwargs",
)
"""Columns and keys that hold tools, calls, or the chat template's variables."""


def _of_columns(rows: list[dict[str, Any]], schema: object) -> list[dict[str, Any]]:
    """The rows of a columnar source.

    schema: names all of their columns and the keys in them.
    """
    names = str(schema)
    if not any(name in names for name in FUNCTIONS):
        return rows
    return [bare_calls(row) for row in rows]


def bare_calls(value: Any, *, inside: bool = False) -> Any:
    """The same without nulls in tools and calls: in a columnar source every struct has the fields
    of all of its column.

    >>> call = {"arguments": {"x": 1, "y": None}}
    >>> bare_calls({"answer": None, "messages": [{"content": None, "tool_calls": [call]}]})
    {'answer': None, 'messages': [{'content': None, 'tool_calls': [{'arguments': {'x': 1}}]}]}
    """
    if isinstance(value, list):
        return [bare_calls(one, inside=inside) for one in value]
    if not isinstance(value, Mapping):
        return value
    bare = {}
    for key, one in value.items():
        one = bare_calls(one, inside=inside or key in FUNCTIONS)
        if one is not None or not inside:
            bare[key] = one
    return bare


def _kind(value: object) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")


def _excerpt(text: str, place: int) -> str:
    return repr(text[max(0, place - 20) : place + 20])
