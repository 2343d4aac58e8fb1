"""Python and a shell as tools that a model calls."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import PurePosixPath
from typing import Any, ClassVar, Literal, Self

from groupwise.errors import ConfigError, EnvironmentFailure
from groupwise.sandbox.attacks import proved_isolation
from groupwise.sandbox.isolation import ISOLATIONS, Isolation
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.server import LIMITS, SandboxFailed
from groupwise.sandbox.workspace import FRAME, EpisodeSandbox, Shown
from groupwise.utils.built_in import built_in
from groupwise.utils.spelling import nearest

ISOLATION_NAMES = ("auto", *(isolation.name for isolation in ISOLATIONS))

SANDBOX_TOOLS = ("python", "shell")
FILES_BYTES = 1 << 20
"""Bytes that are read of a row's files together; more where they were longer at the beginning."""
FILE_BYTES = 1 << 16
"""Bytes that are read of a file."""
_WRITE = """
import os
for path, text in {files!r}.items():
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)
"""
_READ = """
import json, os, stat
left, texts = {most}, []
for path in {paths!r}:
    text = None
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(file).st_mode):
            with open(file, "rb") as opened:
                text = opened.read(min(left, {each}))
            left -= len(text)
    except OSError:
        pass
    texts.append(None if text is None else text.hex())
print(json.dumps(texts))
"""
"""Only a regular file is read: a pipe would be waited for."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What the key `environment.sandbox` can set."""

    isolations: ClassVar[tuple[str, ...]] = ISOLATION_NAMES
    isolation: str = "auto"
    """`auto`: the first that no attack of ours breaks on this machine."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Self:
        """Return the settings of a recipe.  Raises ConfigError for a wrong key or value."""
        at, known = "environment.sandbox", {field.name: field.default for field in fields(cls)}
        for key, value in keys.items():
            if key not in known:
                near = nearest(key, known)
                hint = "" if near is None else f" (did you mean {near}?)"
                raise ConfigError(f"{at} has no key {key!r}{hint}; it has {', '.join(known)}")
            if key == "isolation":
                if value not in cls.isolations:
                    names = ", ".join(cls.isolations)
                    raise ConfigError(f"{at}.isolation must be one of {names}, got {value!r}")
                continue
            whole = isinstance(known[key], int)
            is_number = type(value) is int or (type(value) is float and not whole)
            if not is_number or not 0 < value < math.inf:
                kind = "a whole number" if whole else "a number"
                raise ConfigError(f"{at}.{key} must be {kind} above 0, got {value!r}")
        return cls(**keys)


@dataclass(frozen=True, kw_only=True)
class SandboxSettings(SandboxLimits):
    """Where tools run, and the limits on each call."""

    seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_mb: int = 512
    disk_mb: int = 64
    output_kb: int = 16
    processes: int = 64

    def proved(self) -> Isolation:
        """Return the isolation, after attacks on it.  Raises ConfigError where none holds."""
        return proved_isolation(self.isolation, tools=True, asks="environment.sandbox")

    def limits(self) -> Limits:
        """Return the limits on a call."""
        return Limits(
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
            memory=self.memory_mb << 20,
            disk=self.disk_mb << 20,
            output=self.output_kb << 10,
            processes=self.processes,
        )


@built_in("python", "shell")
class SandboxTools:
    """The tools of one episode: they share a folder, which `close` ends."""

    def __init__(self, isolation: Isolation, limits: Limits) -> None:
        self._sandbox = EpisodeSandbox(isolation, limits)
        self._limits = limits
        self._files: dict[str, str] = {}
        self._written = False

    def python(self, code: str) -> str:
        """Run Python and return what it prints.

        Args:
            code: The program.
        """
        return self._call("python", code)

    def shell(self, command: str) -> str:
        """Run a command in a shell and return what it prints.

        Args:
            command: The command.
        """
        return self._call("shell", command)

    def place(self, files: Mapping[str, str | None]) -> None:
        """Put files, text by path, into the folder before the first call.

        Raises EnvironmentFailure for a path that leads out of the folder, and for what is no text.
        """
        self._files |= folder_files(files)

    def files(self) -> dict[str, str]:
        """Return the files of `place` as the calls have left them.

        What is gone, and what is no file any more, is not there.
        """
        if not self._written:
            return dict(self._files)
        paths = list(self._files)
        most = max(FILES_BYTES, 8 * sum(map(len, self._files.values())))
        program = _READ.format(paths=paths, most=most, each=FILE_BYTES)
        digits = 2 * most + FRAME * (1 + len(paths))
        shown = self._sandbox.read(program, replace(self._limits, output=digits))
        if shown.ended != "0" or shown.left_out:
            raise SandboxFailed(f"the files cannot be read: {shown.ended} {shown.output[-300:]}")
        files = {}
        for path, text in zip(paths, json.loads(shown.output), strict=True):
            if text is not None:
                files[path] = bytes.fromhex(text).decode(errors="replace")
        return files

    def close(self) -> None:
        """End all processes, and remove the folder."""
        self._sandbox.kill()
        self._written = False

    def _call(self, tool: Literal["python", "shell"], source: str) -> str:
        if self._files and not self._written:
            shown = self._sandbox.call("python", _WRITE.format(files=self._files))
            if shown.ended != "0":
                raise SandboxFailed(f"the files cannot be written: {shown.ended} {shown.output}")
            self._written = True
        return result_text(self._sandbox.call(tool, source), self._limits)


def folder_files(files: Mapping[str, str | None]) -> dict[str, str]:
    """Return the files of a row, text by path.

    Raises EnvironmentFailure for a path that leads out of the folder, and for what is no text.

    >>> folder_files({"solution.py": "x = 1", "other.py": None})
    {'solution.py': 'x = 1'}
    """
    texts = {}
    for path, text in files.items():
        if text is None:  # a table has each column in each row
            continue
        if not isinstance(text, str):
            raise EnvironmentFailure(f"the file {path!r} of a row is no text: {text!r:.60}")
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
            raise EnvironmentFailure(
                f"a row's file {path!r} is not in its folder: use a relative path without '..'"
            )
        texts[path] = text
    return texts


def result_text(printed: Shown, limits: Limits) -> str:
    """Return what a model reads of a call.

    >>> result_text(Shown("42\\n", 0, "0"), Limits())
    '42'
    >>> result_text(Shown("", 0, "1"), Limits())
    '[exit code 1]'
    """
    lines = [printed.output.rstrip("\n")] if printed.output.strip() else []
    if printed.left_out:
        lines.append(f"[{printed.left_out:,} bytes of output left out]")
    if printed.ended == LIMITS["seconds"]:
        lines.append(f"[stopped after {limits.seconds:g} seconds]")
    elif not printed.ended.isdecimal():
        lines.append(f"[stopped: {printed.ended}]")
    elif printed.ended != "0":
        lines.append(f"[exit code {printed.ended}]")
    return "\n".join(lines) or "[no output]"
