"""What recipes name without a module: functions and classes with the mark `@built_in("NAME")`.

The marks are read off the source, so that a recipe with a wrong name is refused before torch, or
anything that is marked, is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

Marked = TypeVar("Marked")

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"^@built_in\((.+)\)\n(?:@.+\n)*(?:class|(?:async )?def) (\w+)", re.MULTILINE)
"""At the beginning of a line, with the names on that line."""


def built_in(*names: str) -> Callable[[Marked], Marked]:
    """Mark a function or a class of a module as what recipes mean by one of these names."""
    return lambda marked: marked


@cache
def built_ins(place: str) -> dict[str, str]:
    """Name -> `module:NAME` of what is marked in a module, or in the modules of a package, in the
    order of files and lines.

    >>> built_ins("data.sources")[".json"]
    'groupwise.data.sources:_read_json'
    """
    path = ROOT / place.replace(".", "/")
    names = {}
    for file in sorted(path.glob("*.py")) or [path.with_suffix(".py")]:
        module = ".".join(("groupwise", *file.relative_to(ROOT).with_suffix("").parts))
        for arguments, marked in MARK.findall(file.read_text(encoding="utf-8")):
            names |= dict.fromkeys(re.findall('"(.+?)"', arguments), f"{module}:{marked}")
    return names


def find_built_in(place: str, name: str) -> Any:
    """What has a name that `built_ins` lists."""
    module, _, marked = built_ins(place)[name].partition(":")
    return getattr(import_module(module), marked)
