"""Python and a shell as tools that a model calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from groupwise.errors import ConfigError
from groupwise.sandbox.attacks import proved_isolation
from groupwise.sandbox.isolation import ISOLATIONS, Isolation
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.server import LIMITS
from groupwise.sandbox.workspace import EpisodeSandbox, Shown
from groupwise.utils.built_in import built_in
from groupwise.utils.spelling import nearest

ISOLATION_NAMES = ("auto", *(isolation.name for isolation in ISOLATIONS))


SANDBOX_TOOLS = ("python", "shell")


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSettings:
    """Where tools run, and the limits on each call."""

    isolation: str = "auto"
    """`auto`: the first that no attack of ours breaks on this machine."""
    seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_mb: int = 512
    disk_mb: int = 64
    output_kb: int = 16
    processes: int = 64

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> SandboxSettings:
        """Return the settings of a recipe.  Raises ConfigError for a wrong key or value."""
        at, known = "environment.sandbox", {field.name: field.default for field in fields(cls)}
        for key, value in keys.items():
            if key not in known:
                near = nearest(key, known)
                hint = "" if near is None else f" (did you mean {near}?)"
                raise ConfigError(f"{at} has no key {key!r}{hint}; it has {', '.join(known)}")
            if key == "isolation":
                if value not in ISOLATION_NAMES:
                    names = ", ".join(ISOLATION_NAMES)
                    raise ConfigError(f"{at}.isolation must be one of {names}, got {value!r}")
                continue
            whole = isinstance(known[key], int)
            is_number = type(value) is int or (type(value) is float and not whole)
            if not is_number or not 0 < value < math.inf:
                kind = "a whole number" if whole else "a number"
                raise ConfigError(f"{at}.{key} must be {kind} above 0, got {value!r}")
        return cls(**keys)

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
        self._workspace = EpisodeSandbox(isolation, limits)
        self._limits = limits

    def python(self, code: str) -> str:
        """Run Python and return what it prints.

        Args:
            code: The program.
        """
        return result_text(self._workspace.call("python", code), self._limits)

    def shell(self, command: str) -> str:
        """Run a command in a shell and return what it prints.

        Args:
            command: The command.
        """
        return result_text(self._workspace.call("shell", command), self._limits)

    def close(self) -> None:
        """End all processes, and remove the folder."""
        self._workspace.kill()


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
