"""The user's cache of what is made once for a machine: models in another format."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

from groupwise.utils import files


def cache_folder() -> Path:
    """A folder that only the user can write: the key by which runs are trusted lies there."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "groupwise"
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        info = home.stat()
        if os.access(home, os.W_OK) and info.st_uid == os.getuid() and not info.st_mode & 0o022:
            return home
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        pass
    return _own_folder()


@cache
def _own_folder() -> Path:
    """Where the cache cannot be written: a folder for this process.  It is inside of the temporary
    one, whose lock is taken.
    """
    temporary = files.temporary_folder("cache")
    import atexit

    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    folder = temporary / "groupwise"
    folder.mkdir(mode=0o700)
    return folder
