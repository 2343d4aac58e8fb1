"""Imports: what `module:NAME` in a recipe names, and large libraries without the garbage collector in between."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from groupwise.errors import ConfigError


def imported(key: str, name: str) -> Any:
    """What `module:NAME` names, from an installed module or a file of the working directory.

    key: of the recipe, for the message.   Raises ConfigError if there is no such module or name, or if the module fails.

    >>> imported("objective", "math:tau")
    6.283185307179586
    """
    module, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that a file here cannot stand in for an installed module
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        looked = f"looked for among the installed modules and in {here}"
        raise ConfigError(f"{key}: cannot import {name!r} ({error}); {looked}") from error


@contextmanager
def uncollected() -> Iterator[None]:
    """Import here without garbage collections; what is there afterwards is never looked through again.

    torch and transformers make a million objects, all of which stay: collecting while they are made takes a fifth of the time that
    importing takes, and each later full collection would look at every one of them.
    """
    if not gc.isenabled():
        yield
        return
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        gc.enable()
