"""The tools that isolate a process from this machine: bubblewrap and sandlock.

Both start the runner with no environment, no network, and no file of this machine but Python's own
and the libraries of the system.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from groupwise.sandbox.limits import Limits

SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
"""Folders of programs and libraries, which may be read."""
TEMPORARY = "/tmp"


def python() -> tuple[str, str]:
    """Return the interpreter that programs run with and the folder of its libraries.

    It is the one below a virtual environment: programs see the standard library alone.
    """
    base = os.path.realpath(sys.base_prefix)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return os.path.join(base, "bin", name), base


class Isolation(ABC):
    """A tool that starts a process in isolation."""

    name: str
    remedy: str
    """How it is installed."""
    needs_folder: bool
    """Whether programs write into a folder of this machine."""

    @abstractmethod
    def installed(self) -> bool:
        """Return whether the tool is on this machine."""

    @abstractmethod
    def command(
        self, argv: Sequence[str], folder: Path, limits: Limits, *, memory: int = 0
    ) -> list[str]:
        """Return the command that runs another one in isolation.

        folder: an empty folder of this machine, where the tool needs one.   memory: bytes of all
        processes together, where the tool can limit them; 0: no limit.
        """

    @abstractmethod
    def place(self, folder: Path) -> str:
        """Return the name, inside, of the one folder that can be written."""


class Bubblewrap(Isolation):
    """Namespaces of Linux, by the program `bwrap`.  It needs user namespaces or root's rights."""

    name = "bubblewrap"
    remedy = "install Debian's package bubblewrap"
    needs_folder = False

    def installed(self) -> bool:
        """Return whether `bwrap` is there."""
        return shutil.which("bwrap") is not None

    def place(self, folder: Path) -> str:
        """Return the sandbox's own /tmp."""
        return TEMPORARY

    def command(
        self,
        argv: Sequence[str],
        folder: Path,
        limits: Limits,
        *,
        memory: int = 0,
        readable: Sequence[str] = (),
    ) -> list[str]:
        """Return the call of `bwrap`.   readable: files and folders beside the system's."""
        words = [
            shutil.which("bwrap") or "bwrap",
            *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
            *("--new-session", "--clearenv", "--uid", "65534", "--gid", "65534"),
        ]
        for path in SYSTEM:
            if os.path.islink(path):
                words += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                words += ["--ro-bind", path, path]
        _, base = python()
        if not base.startswith("/usr/"):
            words += ["--ro-bind", base, base]
        words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        words += ["--size", str(limits.disk), "--tmpfs", TEMPORARY, "--chdir", TEMPORARY]
        for path in readable:
            words += ["--ro-bind", path, path]
        return [*words, *argv]


class Sandlock(Isolation):
    """Landlock and seccomp of Linux, by the package `sandlock`.  It needs no rights at all."""

    name = "sandlock"
    remedy = "pip install sandlock==0.9.0 (Linux 6.12 or later)"
    needs_folder = True

    def installed(self) -> bool:
        """Return whether the package is there."""
        return _sandlock() is not None

    def place(self, folder: Path) -> str:
        """Return the folder itself."""
        return str(folder)

    def command(
        self, argv: Sequence[str], folder: Path, limits: Limits, *, memory: int = 0
    ) -> list[str]:
        """Return the call of the launcher, a process that watches the sandbox."""
        launcher = Path(__file__).with_name("sandlock_launcher.py")
        _, base = python()
        readable = [path for path in (*SYSTEM, base) if os.path.isdir(path)]
        return [
            sys.executable,
            str(launcher),
            str(folder),
            _sandlock() or "",
            os.pathsep.join(readable),
            str(limits.processes),
            str(memory),
            *argv,
        ]


def _sandlock() -> str | None:
    """Return the folder that the package is imported from; None without the package."""
    spec = importlib.util.find_spec("sandlock")
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parents[1])


ISOLATIONS: tuple[Isolation, ...] = (Bubblewrap(), Sandlock())
"""The first is tried first."""
