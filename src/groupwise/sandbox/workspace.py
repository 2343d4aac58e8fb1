"""A sandbox with a folder that stays: what one call writes, the next call reads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from groupwise.sandbox import runner, workspace_runner
from groupwise.sandbox.isolation import Isolation
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.server import (
    END_SECONDS,
    LIMITS,
    Isolated,
    ProgramEnded,
    SandboxFailed,
    source_of,
)

RUNNER_MEMORY = 256 << 20
"""Bytes of address space of the runner itself, where the limit on memory counts it."""
ESCAPED = 6
"""Bytes of JSON for a byte of output."""
FRAME = 1024
"""Bytes of an answer beside the output."""
_START = """
import sys, types
parent, package = types.ModuleType("groupwise"), types.ModuleType("groupwise.sandbox")
package.runner = types.ModuleType("groupwise.sandbox.runner")
exec({runner!r}, package.runner.__dict__)
sys.modules.update({{"groupwise": parent, "groupwise.sandbox": package}})
exec({workspace!r}, {{"__name__": "__main__"}})
"""
"""Imports one text in another: inside, no file of this library can be read."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a call printed."""

    output: str
    """Standard output and standard error, in the order of their writing."""
    left_out: int
    """Bytes that were printed beyond the limit."""
    ended: str
    """`0`, the exit code, the signal that ended it, or the words of a limit (`LIMITS`)."""


class EpisodeSandbox(Isolated):
    """Runs Python and shells in one folder.  All processes of a call end with it.

    The folder is on a disk of the sandbox's own (bubblewrap), or of this machine (sandlock), and
    ends with the sandbox: at `kill`, and with this process.
    """

    def __init__(self, isolation: Isolation, limits: Limits) -> None:
        super().__init__(isolation, limits)
        self._memory = limits.memory + RUNNER_MEMORY

    def call(
        self, tool: Literal["python", "shell"], source: str, limits: Limits | None = None
    ) -> Shown:
        """Run Python or a command.   limits: of this call, instead of the sandbox's.

        Raises SandboxFailed where the sandbox itself ends.
        """
        return self._run(tool, source, limits or self.limits, writes=True)

    def read(self, source: str, limits: Limits) -> Shown:
        """Run Python of this library's that writes nothing, also in a folder that is beyond its
        limits.

        Raises SandboxFailed where the sandbox itself ends.
        """
        return self._run("python", source, limits, writes=False)

    def _run(self, tool: str, source: str, held: Limits, *, writes: bool) -> Shown:
        sent = held.as_json() | {"own_disk": not self.isolation.needs_folder, "writes": writes}
        self._start()
        deadline = time.monotonic() + held.seconds + END_SECONDS
        request = {"tool": tool, "source": source, "limits": sent}
        try:
            answer = self._exchange(request, deadline, ESCAPED * held.output + FRAME)
        except ProgramEnded as error:
            raise SandboxFailed(
                f"the {self.isolation.name} sandbox gave no answer: {error}"
            ) from None
        ended = str(answer["ended"])
        ended = LIMITS.get(ended, ended)
        return Shown(answer["output"], answer["left_out"], ended)

    def _program(self) -> str:
        return _START.format(runner=source_of(runner), workspace=source_of(workspace_runner))
