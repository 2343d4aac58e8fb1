"""Values of TRL's arguments: how each kind is read, and how one is shown in a line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from groupwise.config.settings import BoardName
from groupwise.config.strict_yaml import dump, parse
from groupwise.errors import ConfigError
from groupwise.utils.terminal import escaped

LARGEST_FILE = 1_000_000
"""Bytes of a file.  More is no configuration, and YAML takes a second for 200,000 bytes."""


class Needed(Exception):
    """What a value must be, and is not: `a mapping is needed`."""


def number_of(value: Any) -> float:
    """Read a number.  Raises Needed, also for true and false: a flag without its value is none."""
    if isinstance(value, bool):
        raise Needed("a number is needed")
    try:
        return float(value)
    except (TypeError, ValueError, ArithmeticError):
        raise Needed("a number is needed") from None


def whole_of(value: Any) -> int:
    """Read a whole number.  Raises Needed, also for a fraction."""
    try:
        number = number_of(value)
    except Needed:
        raise Needed("a whole number is needed") from None
    if number % 1 != 0:  # also what is not finite
        raise Needed("a whole number is needed")
    return int(number)


def optional_limit(value: Any) -> float | None:
    """Read a limit of which 0 and null mean none."""
    if value is None:
        return None
    return number_of(value) or None


def text_of(value: Any) -> str:
    """Read a text."""
    if not isinstance(value, str):
        raise Needed("text is needed")
    return value


def texts_of(value: Any) -> list[str]:
    """Read a text, or a list of them, as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple):
        raise Needed("text, or a list of texts, is needed")
    return [str(element) for element in value]


def numbers_of(value: Any) -> list[Any]:
    """Read a number, or a list of them, as a list."""
    if isinstance(value, list | tuple):
        return list(value)
    return [number_of(value)]


def mapping_of(value: Any) -> dict[str, Any]:
    """Read a mapping."""
    if not isinstance(value, Mapping):
        raise Needed("a mapping is needed")
    return dict(value)


def mappings_of(value: Any) -> list[dict[str, Any]]:
    """Read a list of mappings."""
    if not isinstance(value, list | tuple):
        raise Needed("a list of mappings is needed")
    for element in value:
        if not isinstance(element, Mapping):
            raise Needed("a list of mappings is needed")
    return [dict(element) for element in value]


def boards_of(value: Any) -> list[str]:
    """Read the dashboards of `report_to` that there are here."""
    return [board for board in texts_of(value or []) if board in get_args(BoardName)]


def short(value: Any) -> str:
    """Show a value in one line of 60 characters at most, which cannot steer a terminal."""
    if isinstance(value, str):
        written = value
    else:
        written = json.dumps(value, ensure_ascii=False, default=_shown)
    text = escaped(" ".join(written.split()), keep="")
    if len(text) > 60:
        return f"{text[:57]}..."
    return text


def _shown(value: Any) -> str:
    """Show an object that no file holds."""
    return str(getattr(value, "__name__", value))


def flow(value: Any) -> str:
    """Show a value in one line of YAML."""
    if isinstance(value, Mapping):
        pairs = [f"{key}: {flow(element)}" for key, element in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z][\w./-]*(:[A-Za-z]\w*)?", value)
        if plain and dump({"a": value}) == f"a: {value}\n":
            return value
        return escaped(json.dumps(value, ensure_ascii=False), keep="")  # YAML reads the escapes
    if isinstance(value, bool | int | float | None):
        return dump({"a": value}).removeprefix("a: ").strip()
    return _shown(value)


def text_in(file: Path) -> str:
    """Read a file, with or without a byte order mark.  Raises ConfigError."""
    try:
        size = file.stat().st_size
        if size > LARGEST_FILE:
            raise ConfigError(f"{file} has {size:,} bytes: no configuration of TRL is that long")
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error


def arguments_in(file: Path) -> dict[str, Any]:
    """Read the arguments of a YAML or JSON file by name.  Raises ConfigError."""
    document, problems = parse(text_in(file), file.name)  # JSON is YAML
    if problems:
        raise ConfigError(str(problems[0]))
    if not isinstance(document.values, dict) or not document.values:
        raise ConfigError(
            f"{file} holds no arguments by name: a mapping such as `learning_rate: 1e-6` is needed"
        )
    return document.values
