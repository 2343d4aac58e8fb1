"""The lock of a run folder: one process writes there at a time.

.lock     held by the process that writes; it names the process and the host
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from groupwise.errors import ConfigError, RunError, StorageError
from groupwise.runs.run_files import RunFiles, bounded_json
from groupwise.utils import files

LOCK = ".lock"


class Lock:
    """Keeps a second process out of a run folder, which it makes if need be, while this one writes
    there.

    Held through the operating system, so it ends with the process however that dies; the file says
    who holds it.  Where the file system cannot lock, the process id and host in the file decide.

    Raises ConfigError if a live process holds it, StorageError if nothing can be written there.
    """

    _held: set[str] = set()  # POSIX locks do not keep a process out of its own files

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder).resolve() / LOCK
        if str(self.path) in self._held:
            raise ConfigError(f"{folder} is in use by this process already")
        self._made = [
            path for path in (self.path.parent, *self.path.parent.parents) if not path.exists()
        ]
        with files.storing(Path(folder), "the run"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # held until `release`
            self._file: IO[str] = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115
        self._file.seek(0)
        holder = _holder(self._file.read())
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            cannot_lock = error.errno not in (errno.EACCES, errno.EAGAIN)
            if not cannot_lock or _alive(holder):
                self._file.close()
                who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
                raise ConfigError(
                    f"{folder} is in use by {who}; wait for it, end it, or choose another name=..."
                ) from error
        self._held.add(str(self.path))
        try:
            with files.storing(Path(folder), "the run"):
                self._file.seek(0)
                self._file.truncate()
                self._file.write(
                    json.dumps(
                        {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
                    )
                )
                self._file.flush()
        except StorageError:
            self.release()
            raise

    def release(self, *, undo: bool = False) -> None:
        """Let others in.  Safe to call twice.   undo: also delete the folders that it made, where
        nothing was written into them.
        """
        if self._file.closed:
            return
        with suppress(OSError):  # a full disk, which may have been the reason
            self._file.seek(0)
            self._file.truncate()
        if undo and self._made:
            # Another process's file: the folder is in use after all; or it was moved away.
            with suppress(OSError):
                self._remove_folders()
        with suppress(OSError):
            self._file.close()
        self._held.discard(str(self.path))

    def _remove_folders(self) -> None:
        """Delete the folders that the lock made, where nothing was written into them."""
        if os.listdir(self.path.parent) == [LOCK]:
            self.path.unlink()
            for folder in self._made:
                folder.rmdir()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _holder(text: str) -> dict[str, Any]:
    try:
        holder = bounded_json(text)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _alive(holder: Mapping[str, Any]) -> bool:
    """True unless the holder is known to be gone; a process of another host counts as alive."""
    if not isinstance(pid := holder.get("pid"), int):
        return False
    if holder.get("host") != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def in_use(folder: Path) -> bool:
    """True if a live process of this host writes there; for display only.

    The file of a lock that this process holds is not opened: to close it again would give the lock
    up.
    """
    if str(Path(folder).resolve() / LOCK) in Lock._held:
        return True
    try:
        return _alive(_holder(RunFiles(folder).text(LOCK)))
    except RunError:
        return False
