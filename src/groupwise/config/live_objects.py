"""Objects of the running program where a recipe has names: a loaded model, rows in memory, a
function.

A recipe is a file, so it holds names only.  `Live` is a name that also holds its object.  Only the
name is written to a file; read back it is a plain string, and the code that needs the object raises
an error that it is missing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import fields
from types import CodeType
from typing import Any, Self

from groupwise.errors import ConfigError

LIVE = "live:"
"""Prefix of the name of an object."""


class Live(str):
    """The name of an object, `live:...`, with the object itself.

    It is equal to its text: a run that is resumed with an object of the same name is the same run.
    So a name says enough to tell objects apart (see `short_digest`).

    >>> rows = Live("2 rows", [{"prompt": "1+1"}, {"prompt": "2+2"}])
    >>> rows, len(rows.value)
    ('live:2 rows', 2)
    """

    value: Any

    def __new__(cls, name: str, value: Any) -> Self:
        live = super().__new__(cls, LIVE + name)
        live.value = value
        return live

    def __deepcopy__(self, memo: object) -> Self:
        """The same object: copies of a recipe share what its names hold."""
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle the name alone, without its object."""
        return str, (str(self),)


def object_of(name: str, key: str) -> Any:
    """The object that a name holds; None for a name of something else.   key: where the recipe has
    it.

    Raises ConfigError for the name of an object without it, as the file of a run has it.
    """
    if isinstance(name, Live):
        return name.value
    if not name.startswith(LIVE):
        return None
    keyword = key.partition(".")[0]
    raise ConfigError(
        f"{key} {name!r} stands for an object of the program that began this run, and no file holds"
        f" it: run that program again, or call gw.train with the same object as {keyword}=..."
    )


def live_part(kind: str, part: Callable[..., Any]) -> Live:
    """A part of a loss as a name that holds it.

    kind: which part, the name of a lambda.   part: a function, or an object that can be called.
    The name has a digest of the source, the values of the object's fields, the defaults of
    parameters and what a function holds from around it, so that a changed part is another
    configuration.
    """
    inner = _inner(part)
    name = getattr(inner, "__name__", type(inner).__name__)
    if name == "<lambda>":
        name = kind
    return Live(f"{name}-{short_digest([_content(part), _values(part).encode()])}", part)


def source_of(part: Callable[..., Any]) -> str | None:
    """The source of a function, or of an object's class; None where Python has none."""
    described = _holder(_inner(part))
    if not inspect.isfunction(described) and not isinstance(described, type):
        described = type(described)
    try:
        return textwrap.dedent(inspect.getsource(described))
    except (OSError, TypeError):
        return None


def _inner(part: Any) -> Any:
    """The function behind what `functools.partial` fixes, or `functools.cache` keeps."""
    while isinstance(part, functools.partial):
        part = part.func
    if inspect.isfunction(part):
        return part
    return getattr(part, "__wrapped__", part)


def _holder(inner: Any) -> Any:
    """The object of a bound method; anything else is its own."""
    return inner.__self__ if inspect.ismethod(inner) else inner


def _content(part: Any) -> bytes:
    """What a part computes: its source, else its instructions; a part written in C is its name."""
    text = source_of(part)
    if text is not None:
        return text.encode()
    inner = _inner(part)
    for described in (inner, type(inner).__call__):
        code = getattr(described, "__code__", None)
        if code is not None:
            return _compiled(code)
    return repr(getattr(inner, "__qualname__", type(inner).__qualname__)).encode()


def _compiled(code: CodeType) -> bytes:
    """What a function without a source computes: its instructions, names and constants."""
    content = code.co_code + repr(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            content += _compiled(constant)
        else:
            content += _plain(constant).encode()
    return content


def _values(part: Any) -> str:
    """The plain values that a part computes with beside its source."""
    values: dict[str, Any] = {}
    inner = part
    while isinstance(inner, functools.partial):
        values |= {f"argument {place}": value for place, value in enumerate(inner.args)}
        values |= inner.keywords
        inner = inner.func
    inner = _inner(inner)
    function = getattr(inner, "__func__", inner)
    if inspect.isfunction(function):
        values["defaults"] = function.__defaults__
        values |= function.__kwdefaults__ or {}
        values |= inspect.getclosurevars(function).nonlocals
    holder = _holder(inner)
    if not inspect.isfunction(holder) and not isinstance(holder, type):
        values |= getattr(holder, "__dict__", {})
        if dataclasses.is_dataclass(holder):
            values |= {field.name: getattr(holder, field.name) for field in fields(holder)}
    return _plain(tuple((name, values[name]) for name in sorted(values)))


def _plain(value: Any) -> str:
    """A value as text that is the same in every process; of other objects their class alone.

    What can change in place, as lists and mappings, may be the state of a part and is one of these.
    """
    if isinstance(value, bool | int | float | str | bytes | None):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join([_plain(one) for one in value])})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(_plain(one) for one in value))}}}"
    return type(value).__name__


def short_digest(parts: Iterable[bytes]) -> str:
    """Eight hexadecimal digits that tell contents apart."""
    digest = hashlib.blake2b(digest_size=4)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
