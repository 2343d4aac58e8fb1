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
    The name has a digest of the source, the values of the object's fields and what a function
    holds from around it, so that a changed part is another configuration.
    """
    inner = _inner(part)
    name = getattr(inner, "__name__", type(inner).__name__)
    if name == "<lambda>":
        name = kind
    text = source_of(part)
    if text is None:
        code = getattr(inner, "__code__", None) or type(inner).__call__.__code__
        content = code.co_code + repr(code.co_names).encode()
    else:
        content = text.encode()
    return Live(f"{name}-{short_digest([content, _values(part).encode()])}", part)


def source_of(part: Callable[..., Any]) -> str | None:
    """The source of a function, or of an object's class; None where Python has none."""
    inner = _inner(part)
    described = inner if inspect.isfunction(inner) or isinstance(inner, type) else type(inner)
    try:
        return textwrap.dedent(inspect.getsource(described))
    except (OSError, TypeError):
        return None


def _inner(part: Any) -> Any:
    """The function behind what `functools.partial` fixes."""
    while isinstance(part, functools.partial):
        part = part.func
    return part


def _values(part: Any) -> str:
    """The plain values that a part computes with beside its source."""
    values: dict[str, Any] = {}
    inner = part
    while isinstance(inner, functools.partial):
        values |= {f"argument {place}": value for place, value in enumerate(inner.args)}
        values |= inner.keywords
        inner = inner.func
    if inspect.isfunction(inner):
        values |= inspect.getclosurevars(inner).nonlocals
    elif not isinstance(inner, type):
        values |= getattr(inner, "__dict__", {})
        if dataclasses.is_dataclass(inner):
            values |= {field.name: getattr(inner, field.name) for field in fields(inner)}
    plain = bool | int | float | str | tuple | None
    return repr(sorted((name, one) for name, one in values.items() if isinstance(one, plain)))


def short_digest(parts: Iterable[bytes]) -> str:
    """Eight hexadecimal digits that tell contents apart."""
    digest = hashlib.blake2b(digest_size=4)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
