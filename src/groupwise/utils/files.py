"""Files and folders that are whole or are not there: written beside their place, brought to the
disk, then given their name.

A process may be killed, or a machine lose its power, at any moment: a reader finds what was there
before or what is new, never a part of either.  Everything that Groupwise writes into a run folder
goes through here, except the lines of a log that is appended to.  What the operating system says
about a disk is told in words (`storing`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import xxhash
from safetensors import SafetensorError

from groupwise.errors import StorageError

CHUNK = 1 << 20
"""Bytes that are read at a time."""
NEW, OLD = ".new-", ".old-"
"""Prefixes of a folder that has not got its name yet, and of one that lost it."""
FULL = (errno.ENOSPC, errno.EDQUOT)


# ---------------------------------------------------------------- writing


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write a file to; on leaving it is on the disk and has the name
    `path`.

    After an exception what `path` held before is still there, and nothing else.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, data: bytes) -> None:
    """Replace a file as a whole: a reader sees the old content or the new, never a part.  Raises
    OSError.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Bring a folder and everything in it to the disk.  Who may read the folder may read its files:
    safetensors writes them for their owner alone."""
    readable = folder.stat().st_mode & 0o444
    for path in [folder, *folder.rglob("*")]:
        mode = path.stat().st_mode
        if (
            readable & ~mode
        ):  # a mounted folder of which modes cannot be set has one for all its files
            path.chmod(mode | readable)
        sync(path)


def new_folder(final: Path) -> Path:
    """An empty folder beside `final`, to be filled and then given its name by `place`; what was
    left of an earlier one goes.

    The folder above is there: a run that was moved away while it writes is not begun anew in its
    old place.
    """
    temporary = final.with_name(f"{NEW}{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    return temporary


def rename_into(temporary: Path, final: Path) -> None:
    """Give a folder, already on the disk, its name.  A folder that has this name goes only then;
    `recover` finds it until then.
    """
    aside = final.with_name(f"{OLD}{final.name}")
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
    os.rename(temporary, final)
    sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def recover(final: Path) -> None:
    """Give a folder its name back that a process lost between the two renames of `place`."""
    aside = final.with_name(f"{OLD}{final.name}")
    if aside.is_dir() and not final.exists():
        os.rename(aside, final)


def remove(folder: Path) -> None:
    """Rename, then delete: a half-deleted folder has no name that a reader would look at."""
    doomed = folder.with_name(f"{OLD}{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def sweep(root: Path) -> None:
    """Delete what a killed process left half-written or half-deleted."""
    for prefix in (NEW, OLD):
        for path in root.glob(f"{prefix}*"):
            shutil.rmtree(path)


def temporary_folder(kind: str) -> Path:
    """A new folder of this process among the temporary ones; those that killed processes have left
    go.   kind: part of its name.

    It is locked while this process lives, so that no other one takes it for left.   Raises
    StorageError.
    """
    with storing(Path(os.environ.get("TMPDIR", "/tmp")), "temporary files"):
        root = Path(tempfile.gettempdir())
        for left in root.glob(f"groupwise-{kind}-*"):
            with suppress(OSError):  # another user's, or locked
                if left.is_dir() and left.stat().st_uid == os.getuid():
                    os.close(_locked(left))
                    shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f".groupwise-{kind}-"))
        _LOCKS.append(_locked(folder))
        named = folder.with_name(folder.name[1:])
        folder.rename(named)
    return named


_LOCKS: list[int] = []
"""Descriptors of this process's temporary folders, open until it ends."""


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder's lock.  Raises OSError if another process holds it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened


# ---------------------------------------------------------------- reading


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path that a user named, `~` and `~name` replaced by a home folder; that of nobody (`~5.0
    points`) stays as it is.
    """
    try:
        return Path(os.path.expanduser(path))
    except ValueError:  # a NUL in it: whoever opens the path says so
        return Path(path)


def digest(path: Path) -> str:
    """xxh3-128 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return digest_of(file)


def digest_of(content: bytes | IO[bytes]) -> str:
    """Return the xxh3-128 of bytes or of an open file's content, in hexadecimal."""
    if isinstance(content, bytes):
        return xxhash.xxh3_128_hexdigest(content)
    hasher = xxhash.xxh3_128()
    while chunk := content.read(CHUNK):
        hasher.update(chunk)
    return hasher.hexdigest()


def fingerprint(path: Path) -> dict[str, Any]:
    """What a manifest says of a file: its size in bytes and its digest.  Read back from the disk,
    once it is there.
    """
    sync(path)
    return {"size": path.stat().st_size, "xxh3_128": digest(path)}


def altered(path: Path, expected: Mapping[str, Any]) -> str | None:
    """How a file differs from its `fingerprint`, in words that follow its name; None if every byte
    is as it was.
    """
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != expected["size"]:
        return f"has {size} bytes, {expected['size']} were written"
    return (
        "is not what was written (its checksum differs)"
        if digest(path) != expected["xxh3_128"]
        else None
    )


# ---------------------------------------------------------------- what disks say


@contextmanager
def storing(path: Path, what: str) -> Iterator[None]:
    """Say in words what the operating system says of a disk: raises StorageError with the path and
    the remedy instead of OSError.

    path: the file or folder that is written.   what: it is, for the message ("the log").
    """
    try:
        yield
    except OSError as error:
        raise StorageError(trouble(error, path, what)) from error
    except SafetensorError as error:
        raise StorageError(
            trouble(told_in_text(error) or OSError(0, str(error)), path, what)
        ) from error
    except Exception as error:  # tokenizers raise the bare class
        told = told_in_text(error)
        if told is None:
            raise
        raise StorageError(trouble(told, path, what)) from error


def told_in_text(error: Exception) -> OSError | None:
    """The operating system's error that an extension in Rust tells in its text alone; None if it
    tells none.
    """
    match = re.search(r"os error (\d+)", str(error))
    if match is None:
        return None
    number = int(match[1])
    return OSError(number, os.strerror(number))


def trouble(error: OSError, path: Path, what: str) -> str:
    """Say why `what` could not be written at `path`: the disk is full, or what the system says."""
    if error.errno in FULL:
        place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(place).free / 1e6
        return f"disk full while writing {what} to {path} ({free:.0f} MB free): make room there"
    words = error.strerror or str(error)
    if error.filename is not None and Path(os.fsdecode(error.filename)) != path:
        words += f": {os.fsdecode(error.filename)}"
    return f"cannot write {what} to {path}: {words}"


def disk_failed(error: BaseException) -> bool:
    """True for what the operating system says of a full, read-only, failing or vanished disk,
    wherever it was raised.
    """
    return isinstance(error, OSError) and error.errno in (
        *FULL,
        errno.EFBIG,
        errno.EROFS,
        errno.ESTALE,
        errno.EIO,
        errno.ENODEV,
    )
