"""JSON as text that every reader can take: one line, and no half characters."""

from __future__ import annotations

import json
import math
import re
from typing import Any


def half_character(value: Any) -> str | None:
    r"""The first half of a character that stands alone in plain values, as an escape; None: none
    does.

    JSON can escape one, and Python reads it, but no tokenizer and no file can hold it.

    >>> half_character({"a": ["\ud83d!"]}), half_character("\u00e9")
    ("'\\ud83d'", None)
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return ascii(error.object[error.start])
    return None


def finite(digits: str) -> float:
    """Read a number of JSON.  Raises ValueError for one that is too large for a float.

    >>> finite("1e3")
    1000.0
    """
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is no number that can be read")
    return number


def no_number(name: str) -> None:
    """Raise ValueError for NaN and Infinity, which Python reads and JSON lacks."""
    raise ValueError(f"{name} is no number in JSON")


_BARE = re.compile(
    "[\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u180e\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def json_line(value: Any) -> str:
    r"""A value as one line of JSON that reads the same and steers no terminal; letters of any
    language stand as they are.

    >>> json_line({"é": "\x1b \u202e"})
    '{"é": "\\u001b \\u202e"}\n'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _BARE.sub(lambda match: f"\\u{ord(match.group()):04x}", text) + "\n"
