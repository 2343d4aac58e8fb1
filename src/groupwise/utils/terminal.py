"""Text that others wrote, made harmless for a terminal and for a line of a log."""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from groupwise.utils.secrets import scrubbed

HARMFUL = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of control, format and bidirectional characters, half characters, and
separators of lines.
"""


def escaped(text: str, keep: str = "\n") -> str:
    r"""A text with control, format and bidirectional characters as escapes, so that it cannot steer
    a terminal.

    >>> escaped("a\x1b[2Jb\u202ec")
    'a\\x1b[2Jb\\u202ec'
    """

    if text.isascii() and text.isprintable():
        return text
    return text.translate(_escapes(keep))


class _Escapes(dict[int, str]):
    """The escapes of characters by their code points, as they are looked up."""

    def __init__(self, keep: str) -> None:
        super().__init__({ord(char): char for char in keep})

    def __missing__(self, code: int) -> str:
        shown = chr(code)
        if unicodedata.category(shown) in HARMFUL:
            shown = _escape(code)
        self[code] = shown
        return shown


def _escape(code: int) -> str:
    if code < 1 << 8:
        return f"\\x{code:02x}"
    if code < 1 << 16:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"


@cache
def _escapes(keep: str) -> _Escapes:
    return _Escapes(keep)


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


class Harmless(logging.Filter):
    """Escapes whatever a log record says, and takes secrets out of it: the message, and the
    traceback below it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true; the record's text is changed."""
        record.msg, record.args = escaped(scrubbed(record.getMessage())), ()
        if record.exc_info and record.exc_info[0] is not None:
            trace = "".join(traceback.format_exception(*record.exc_info)).rstrip()
            record.exc_info, record.exc_text = None, escaped(scrubbed(trace))
        return True


class Unstyled(Harmless):
    """The same for loggers of others, which write bold and colours themselves: those are left out,
    not shown.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true; the record's text is changed."""
        record.msg, record.args = _STYLE.sub("", record.getMessage()), ()
        return super().filter(record)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers inside shows no progress bars, and nothing in its messages steers a terminal."""
    from transformers.utils import logging as its

    bars, handlers, harmless = (
        its.is_progress_bar_enabled(),
        list(its.get_logger("transformers").handlers),
        Unstyled(),
    )
    its.disable_progress_bar()
    for handler in handlers:
        handler.addFilter(harmless)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(harmless)
        if bars:
            its.enable_progress_bar()


_STYLE = re.compile(r"\x1b\[[0-9;]*m")
HARMLESS = Harmless()
"""One filter for a whole process: a logger, or a handler, takes it once."""


def logger(name: str) -> logging.Logger:
    """The logger of a module, which says only what is harmless.

    Python applies a logger's filter to what is logged by that logger itself, not by those below it,
    so every module has its own."""
    log = logging.getLogger(name)
    log.addFilter(HARMLESS)
    return log


class _Stderr(logging.StreamHandler):
    """Writes to what `sys.stderr` is at that time."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, _: Any) -> None: ...


_ON_STDERR = _Stderr(logging.WARNING)
_ON_STDERR.addFilter(HARMLESS)


def log_to_stderr() -> None:
    """Have the warnings of all loggers below `groupwise`, also those of plugins, shown on stderr,
    harmless.  Twice is once.
    """
    logging.getLogger("groupwise").addHandler(_ON_STDERR)
