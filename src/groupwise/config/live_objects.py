"""Objects of the running program where a recipe has names: a loaded model, rows in memory, a
function.

A recipe is a file, so it holds names only.  `Live` is a name that also holds its object.  Only the
name is written to a file; read back it is a plain string, and the code that needs the object raises
an error that it is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
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


def short_digest(parts: Iterable[bytes]) -> str:
    """Eight hexadecimal digits that tell contents apart."""
    digest = hashlib.blake2b(digest_size=4)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
