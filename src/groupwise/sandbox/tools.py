"""Python and a shell as tools that a model calls."""

from __future__ import annotations

from groupwise.sandbox.attacks import proved_isolation
from groupwise.sandbox.isolation import Isolation
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.server import LIMITS
from groupwise.sandbox.workspace import EpisodeSandbox, Shown
from groupwise.utils.built_in import built_in


def isolation_of_tools(name: str) -> Isolation:
    """Return the isolation that tools run in, after attacks on it.  Raises ConfigError."""
    return proved_isolation(name, tools=True, asks="environment.sandbox")


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
