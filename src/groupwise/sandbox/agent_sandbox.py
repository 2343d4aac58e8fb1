"""The sandbox of an agent: it reads the system and the agent's own files, writes in two folders of
its own, and reaches one address.

The address is a port of the sandbox's own network.  The socket that listens there is handed to a
process outside, which passes on what comes (`environments.programs`): nothing else of any network
can be reached.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from groupwise.errors import ConfigError
from groupwise.sandbox import agent_runner
from groupwise.sandbox.attacks import proved_isolation
from groupwise.sandbox.isolation import TEMPORARY, Bubblewrap, python
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.server import source_of
from groupwise.sandbox.tools import SandboxLimits

OF_THE_SYSTEM = (
    "/etc/alternatives",
    "/etc/group",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/passwd",
    "/etc/ssl",
)
"""What programs expect to read beside `isolation.SYSTEM`; none of it is a secret."""
ASKS = "environment.agent"


@dataclass(frozen=True, kw_only=True)
class AgentSandboxSettings(SandboxLimits):
    """Where an agent runs, and the limits on all its processes together."""

    isolations: ClassVar[tuple[str, ...]] = ("auto", "bubblewrap", "none")
    cpu_seconds: float = 600.0
    memory_mb: int = 4096
    disk_mb: int = 512
    output_kb: int = 64
    processes: int = 256

    def limits(self) -> Limits:
        """Return the limits on an episode's agent."""
        return Limits(
            cpu_seconds=self.cpu_seconds,
            memory=self.memory_mb << 20,
            disk=self.disk_mb << 20,
            output=self.output_kb << 10,
            processes=self.processes,
        )

    def proved(self) -> Bubblewrap | None:
        """Return the isolation, after attacks on it; None where the recipe wants none.

        Raises ConfigError where bubblewrap does not hold on this machine.
        """
        if self.isolation == "none":
            return None
        try:
            proved_isolation("bubblewrap", tools=True, asks=ASKS)
        except ConfigError as error:
            raise ConfigError(
                f"{ASKS}: {error}.  In a container that nobody will miss, environment.sandbox:"
                " {isolation: none} lets the agent run with the rights of this user"
            ) from None
        return Bubblewrap()


class AgentSandbox:
    """Makes the command that runs one agent in its sandbox."""

    def __init__(self, isolation: Bubblewrap | None, limits: Limits, program: str) -> None:
        """isolation: None: the agent runs with this user's rights.   program: the agent's path."""
        self.isolation, self.limits = isolation, limits
        self._readable = folders_of(program)
        for path in OF_THE_SYSTEM:
            if os.path.exists(path):
                self._readable.append(path)

    def root(self, folder: Path) -> str:
        """Return where the agent sees its folders `home` and `work`.

        folder: an empty one of this machine, for an agent without isolation.
        """
        return str(folder) if self.isolation is None else TEMPORARY

    def command(self, folder: Path) -> list[str]:
        """Return the command that reads a request and runs the agent (`agent_runner`)."""
        interpreter, _ = python()
        argv = [interpreter, "-I", "-S", "-c", source_of(agent_runner)]
        if self.isolation is None:
            return argv
        return self.isolation.command(argv, folder, self.limits, readable=self._readable)


def folders_of(program: str) -> list[str]:
    """Return the files and folders that an installed program needs, beside those of the system.

    It knows packages of npm, virtual environments of Python, and single files.
    """
    real = Path(os.path.realpath(program))
    folders = [str(Path(program).parent), str(_installation(real))]
    environment = Path(program).parent.parent / "pyvenv.cfg"
    if environment.is_file():
        folders += [str(environment.parent), *_base_of(environment)]
    node = shutil.which("node")
    if node is not None and real.suffix in (".js", ".mjs", ".cjs"):
        folders.append(str(Path(os.path.realpath(node)).parents[1]))
    return [folder for folder in dict.fromkeys(folders) if not folder.startswith("/usr")]


def _installation(real: Path) -> Path:
    """Return the outermost folder `node_modules` around a file; else the file."""
    for folder in reversed(real.parents):
        if folder.name == "node_modules":
            return folder
    return real


def _base_of(environment: Path) -> list[str]:
    """Return the folder of the Python below a virtual environment."""
    for line in environment.read_text("utf-8").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            return [str(Path(os.path.realpath(value.strip())).parent)]
    return []


def search_path(program: str) -> str:
    """Return the folders in which an agent finds programs: its own, this Python's, the system's."""
    node = shutil.which("node")
    interpreter, _ = python()
    folders = [str(Path(program).parent), os.path.dirname(interpreter)]
    if node is not None:
        folders.append(str(Path(node).parent))
    return os.pathsep.join([*dict.fromkeys(folders), "/usr/local/bin", "/usr/bin", "/bin"])
