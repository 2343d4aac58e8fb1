"""The files of somebody's own code: that of `module:NAME` or `file.py:NAME`, and those that it imports, read without running it.

Own code is what is not installed: no module of Python's, of a package in site-packages, or of Groupwise.  What it imports is read
from the source, so an import counts wherever it stands; one whose name is put together at run time is not seen.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import groupwise
from groupwise.utils.files import expanded


def file_of(function: str) -> Path | None:
    """The file of `file.py:function` or `module:function`, installed or not; None if the text names none.

    >>> file_of("json.decoder:JSONDecoder").name, file_of("ws://host:1"), file_of("accuracy")
    ('decoder.py', None, None)
    """
    place, colon, _ = function.rpartition(":")
    if not colon:
        return None
    if place.endswith(".py"):
        return _readable(expanded(place))
    if not all(part.isidentifier() for part in place.split(".")):
        return None
    loaded = getattr(sys.modules.get(place), "__file__", None)
    if loaded is not None and (found := _readable(Path(loaded))):
        return found
    *_, last = [None, *_files(place.split("."), ())]
    return last


def imported_files(file: Path) -> dict[str, Path]:
    """The own files that a source file imports, and those that they import: by their path from the working directory."""
    found: dict[Path, None] = {}
    waiting = [file.resolve()]
    while waiting:
        here = waiting.pop()
        if here in found:
            continue
        found[here] = None
        waiting += [path.resolve() for path in _imports(here) if path.suffix == ".py" and is_own(path.resolve())]
    del found[file.resolve()]
    return {_shown(path): path for path in sorted(found)}


def _imports(file: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # whoever imports it says what is wrong
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield from _files(alias.name.split("."), (file.parent,))
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = module.split(".") if module else []
                for alias in names:  # a module inside of a package, or a name of it
                    if level:
                        yield from _below([file.parent, *file.parents[1:]][level - 1 : level], [*parts, alias.name])
                    else:
                        yield from _files([*parts, alias.name], (file.parent,))
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"), args=[first, *_]):
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield from _files(first.value.split("."), (file.parent,))


def _files(parts: Sequence[str], beside: Sequence[Path]) -> Iterator[Path]:
    """The files of a module and of the packages around it.   beside: folders where it may lie, if it is found nowhere else."""
    try:  # the modules of the working directory come last, as where they are imported
        described = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError, AttributeError):
        described = None
    if described is None:
        for folder in (Path(os.getcwd()), *beside):
            if found := list(_below([folder], parts)):
                yield from found
                return
        return
    if described.origin is not None and (file := _readable(Path(described.origin))):
        yield file
    yield from _below([Path(place) for place in described.submodule_search_locations or ()], parts[1:])


def _below(folders: Sequence[Path], parts: Sequence[str]) -> Iterator[Path]:
    """The files of a module inside of a package's folders, and of the packages on the way to it."""
    for part in parts:
        packages = [folder / part for folder in folders if (folder / part).is_dir()]
        for file in (*(package / "__init__.py" for package in packages), *(folder / f"{part}.py" for folder in folders)):
            if found := _readable(file):
                yield found
                break
        folders = packages


def _readable(file: Path) -> Path | None:
    try:
        return file if file.is_file() else None
    except (OSError, ValueError):
        return None


def is_own(file: Path) -> bool:
    """False of a file of Python's, of an installed package, or of this library."""
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    if {"site-packages", "dist-packages"}.intersection(file.parts):
        return False
    return not any(file.is_relative_to(Path(folder).resolve()) for folder in (*installed, *groupwise.__path__))


def _shown(file: Path) -> str:
    here = Path.cwd().resolve()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)
