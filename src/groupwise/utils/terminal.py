"""Text that others wrote, made harmless for a terminal and for the log."""

from __future__ import annotations

import logging
import sys
import traceback
import unicodedata
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
