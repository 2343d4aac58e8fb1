"""Imports: what `module:NAME` or `file.py:NAME` in a recipe names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from groupwise.errors import ConfigError, GroupwiseError
from groupwise.utils.spelling import nearest


def imported(what: str, spec: str, *, callable_only: bool = False) -> Any:
    """The object behind `module:NAME` or `path/to/file.py:NAME`.

    what: the key of the recipe, or the object's kind, for messages.   callable_only: an object that
        cannot be called is refused. Modules are installed ones, or lie in the working directory;
        files lie in the working directory (a recipe from elsewhere cannot name code from anywhere).
        Raises ConfigError.

    >>> imported("objective", "math:tau")
    6.283185307179586
    """
    place, _, name = spec.rpartition(":")
    module = _file(what, place) if place.endswith(".py") else _module(what, place)
    thing = getattr(module, name, _NOTHING)
    if thing is _NOTHING or (callable_only and not callable(thing)):
        names = [
            key
            for key, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value))
            and value.__module__ == module.__name__
        ]
        near = nearest(name, names)
        hint = (
            f"did you mean {near!r}?"
            if near is not None
            else f"there are: {', '.join(names) or 'none'}"
        )
        raise ConfigError(
            f"{what}: {place} has no {'function ' if callable_only else ''}{name!r}; {hint}"
        )
    return thing


_NOTHING = object()


@contextmanager
def own_code(what: str) -> Iterator[None]:
    """While a user's code runs: an exception of it becomes a ConfigError with its place.   what:
    the code, for the message.
    """
    try:
        yield
    except GroupwiseError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{what} raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        ) from error


def demand_attributes(what: str, thing: object, names: Sequence[str]) -> None:
    """Raises ConfigError unless an object has these methods and attributes.   what: the object, for
    the message.
    """
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise ConfigError(
            f"{what} is an object of {type(thing).__name__} without {', '.join(missing)}: it needs"
            f" {', '.join(names)}"
        )


def _module(what: str, place: str) -> ModuleType:
    here = os.getcwd()
    _look_in(here)
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(
            f"{what}: cannot import {place!r} ({error}); looked for among the installed modules and"
            f" in {here}"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(_unimportable(what, place, error)) from error


def _look_in(*folders: str) -> None:
    """Have modules of these folders found; last, so that a file there cannot stand in for an
    installed module.
    """
    sys.path += [folder for folder in folders if folder not in sys.path]


def _file(what: str, place: str) -> ModuleType:
    here, path = Path.cwd().resolve(), Path(place).resolve()
    if not path.is_relative_to(here):
        raise ConfigError(f"{what}: the file must lie in the working directory, {here}")
    if not path.is_file():
        raise ConfigError(
            f"{what}: there is no file {path.relative_to(here)} in the working directory, {here}"
        )
    name = (  # one per file, whatever the working directory
        f"groupwise_user_{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"
    )
    if name in sys.modules:
        return sys.modules[name]
    description = importlib.util.spec_from_file_location(name, path)
    assert description is not None and description.loader is not None
    module = importlib.util.module_from_spec(description)
    _look_in(str(here), str(path.parent))  # it may import its neighbours
    sys.modules[name] = module  # dataclasses and pickles of the file look it up there
    try:
        description.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise ConfigError(_unimportable(what, place, error)) from error
        raise
    return module


def _unimportable(what: str, place: str, error: BaseException) -> str:
    """What happened while a user's module ran for the first time, and the last line of it that was
    reached.
    """
    stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    reached = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).stem == stem
    ]
    line = f" (line {reached[-1].lineno})" if reached else ""
    return f"{what}: {place} cannot be imported: {type(error).__name__}: {error}{line}"
