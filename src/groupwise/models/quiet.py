"""Keeps transformers' own messages harmless while it reads and writes models."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from groupwise.utils.terminal import Harmless

_STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Unstyled(Harmless):
    """`Harmless` for loggers of others, which write bold and colours: those are left out."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true; the record's text is changed."""
        record.msg, record.args = _STYLE.sub("", record.getMessage()), ()
        return super().filter(record)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Have transformers show no progress bars inside, and nothing that steers a terminal."""
    from transformers.utils import logging as its

    bars = its.is_progress_bar_enabled()
    handlers = list(its.get_logger("transformers").handlers)
    harmless = Unstyled()
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
