"""The files of a run folder: the only way in which they are written and read.

A run folder may come from elsewhere, and disks flip bits.  So only regular files inside of the
folder are opened, up to a size. JSON is bounded in depth, Parquet in what it unpacks to
(`rollout_table`).  What the run wrote is compared with the checksum that it took.  Whatever is
wrong is a RunError that names the file.

    checksums.txt   a line for every file that the run wrote as a whole: CRC-32 of the rest of the
                    line, xxh3-128 of the content, name.  A name stands there again when its file
                    is replaced.

A digest is written before what it is of, so that a reader never meets a file that is newer than its
digest.  A file without one (of an older version, or put there by somebody) is read unchecked.

Importing this file does not import torch.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from groupwise.errors import RunError
from groupwise.utils import files

CHECKSUMS = "checksums.txt"
OF_LINES = ("metrics.jsonl", "- metrics.jsonl")
"""Names under which version 0.3 wrote the digests of single lines: they are not read any more."""
LARGEST, LARGEST_CHECKSUMS = 1 << 24, 1 << 28
"""Bytes of a file, where its reader does not say, and of the checksums."""
DEPTH = 100
"""Lists and mappings inside of one another in a JSON file."""


class RunFiles:
    """The files of one run folder, by their names relative to it."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._digests: dict[str, dict[str, None]] = {}
        self._read: tuple[int, int, int] | None = None
        """Inode, size and time of the checksums that were read."""
        self.doubtful: list[str] = []
        """What is wrong with the checksums themselves."""

    # ------------------------------------------------------------ reading

    def has(self, name: str) -> bool:
        """True if there is something of this name, whatever it is."""
        return os.path.lexists(self.folder / name)

    def changed(self, name: str) -> int | None:
        """When a file or folder was changed, in nanoseconds; None if there is none, 0 if that
        cannot be found out.
        """
        try:
            return os.stat(self.folder / name).st_mtime_ns
        except (OSError, ValueError):
            return 0 if self.has(name) else None

    def names(self, folder: str) -> list[str]:
        """What lies in a folder of the run, sorted; nothing if there is none.  Raises RunError for
        what is no folder inside.
        """
        if not self.has(folder):
            return []
        place = self._inside(folder)
        try:
            return sorted(os.listdir(place))
        except NotADirectoryError:
            raise RunError(f"{self.folder / folder} is no folder: move it away") from None
        except OSError as error:
            raise RunError(f"{self.folder / folder} cannot be read: {error.strerror}") from error

    def _inside(self, name: str) -> Path:
        """The place of a file, links followed.  Raises RunError if that is outside of the run's
        folder, or not there.
        """
        try:
            place, root = (
                (self.folder / name).resolve(strict=True),
                self.folder.resolve(strict=True),
            )
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # a link that leads nowhere, or in a circle; a NUL in the name
            raise RunError(
                f"{self.folder / name} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error
        if not place.is_relative_to(root):
            raise RunError(
                f"{self.folder / name} is a link out of the run's folder, and is not followed"
            )
        return place

    def open(self, name: str) -> BinaryIO:
        """A regular file inside of the run's folder, open for reading.  Raises RunError."""
        place = self._inside(name)
        try:
            if not stat.S_ISREG(
                os.stat(place).st_mode
            ):  # opening a device may do things, opening a FIFO waits
                raise RunError(f"{self.folder / name} is no regular file")
            return os.fdopen(os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        except OSError as error:
            raise RunError(f"{self.folder / name} cannot be read: {error.strerror}") from error

    def read(self, name: str, largest: int = LARGEST) -> bytes:
        """The content of a file, as the run wrote it.  Raises RunError."""
        with self.open(name) as file:
            if (size := os.fstat(file.fileno()).st_size) > largest:
                raise RunError(
                    f"{self.folder / name} has {size:,} bytes, more than the {largest:,} that are"
                    " read"
                )
            try:
                data = file.read(size)
            except OSError as error:
                raise RunError(f"{self.folder / name} cannot be read: {error.strerror}") from error
        self._compare(name, files.digest_of(data))
        return data

    def verify(self, name: str) -> None:
        """Compare a file of any size with what the run wrote.  Raises RunError."""
        with self.open(name) as file:
            self._compare(name, files.digest_of(file))

    def verify_folder(self, folder: str) -> None:
        """Compare everything that the run wrote below one of its folders.  Raises RunError for the
        first that is not so.
        """
        for name in self.known(f"{folder}/"):
            if not self.has(name):
                raise RunError(f"{self.folder / name} is missing")
            self.verify(name)

    def _compare(self, name: str, digest: str) -> None:
        known = self.digests(name)
        if known and digest not in known:
            raise RunError(
                f"{self.folder / name} is not what the run wrote (its checksum differs): restore"
                f" it, or delete {CHECKSUMS} if you changed it"
            )

    def text(self, name: str, largest: int = LARGEST) -> str:
        """A file as text.  Raises RunError."""
        try:
            return self.read(name, largest).decode("utf-8")
        except UnicodeDecodeError as error:
            raise RunError(
                f"{self.folder / name} is no text: byte {error.start} is no UTF-8"
            ) from error

    def json(self, name: str, largest: int = LARGEST) -> Any:
        """A JSON file; NaN and infinities as text.  Raises RunError."""
        try:
            return bounded_json(self.text(name, largest))
        except ValueError as error:
            raise RunError(f"{self.folder / name} is no JSON: {error}") from error

    # ------------------------------------------------------------ checksums

    def digests(self, name: str) -> dict[str, None]:
        """Every digest that the run took of a name, the newest last; empty if it took none."""
        self._refresh()
        return self._digests.get(name, {})

    def known(self, prefix: str) -> list[str]:
        """The names that the run took digests of, and that begin so."""
        self._refresh()
        return sorted(name for name in self._digests if name.startswith(prefix))

    def _refresh(self) -> None:
        if not self.has(CHECKSUMS):
            self._digests, self._read, self.doubtful = {}, None, []
            return
        try:
            with self.open(CHECKSUMS) as file:
                status = os.fstat(file.fileno())
                now = status.st_ino, status.st_size, status.st_mtime_ns
                if now == self._read:
                    return
                self._digests, self._read, self.doubtful = {}, now, []
                if status.st_size > LARGEST_CHECKSUMS:
                    raise RunError(f"{self.folder / CHECKSUMS} is too large to be read")
                lines = file.read().split(b"\n")
        except RunError as error:
            self._digests, self.doubtful = {}, [str(error)]
            return
        for number, line in enumerate(lines[:-1], 1):
            check, _, rest = line.partition(b" ")
            digest, _, name = rest.partition(b" ")
            if check != b"%08x" % zlib.crc32(rest):
                self.doubtful.append(
                    f"{self.folder / CHECKSUMS}:{number} is damaged: what it is of is read"
                    " unchecked"
                )
            else:
                self._remember(name.decode("utf-8", "replace"), digest.decode("ascii", "replace"))

    def _remember(self, name: str, digest: str) -> None:
        if name in OF_LINES:
            return
        known = self._digests.setdefault(name, {})
        known.pop(digest, None)
        known[digest] = None

    # ------------------------------------------------------------ writing

    def write(self, name: str, data: bytes) -> None:
        """Replace a file as a whole, and keep its checksum.  Raises OSError."""
        self.note([(name, files.digest_of(data))])
        files.write(self.folder / name, data)

    def note(self, digests: Iterable[tuple[str, str]]) -> None:
        """Keep the checksums of what is about to get its name.  Raises OSError."""
        with open(self.folder / CHECKSUMS, "ab", buffering=0) as file:
            file.write(b"".join(_lines(digests)))

    def begin(self) -> None:
        """Write the checksums anew: of files that are there.  Raises OSError."""
        self._refresh()
        there = {name: known for name, known in self._digests.items() if self.has(name)}
        digests = [(name, digest) for name, known in there.items() for digest in known]
        files.write(self.folder / CHECKSUMS, b"".join(_lines(digests)))

    def sync(self) -> None:
        """Bring the checksums to the disk.  Raises OSError."""
        files.sync(self.folder / CHECKSUMS)


def _lines(digests: Iterable[tuple[str, str]]) -> Iterator[bytes]:
    for name, digest in digests:
        rest = f"{digest} {name}".encode()
        yield b"%08x %s\n" % (zlib.crc32(rest), rest)


def bounded_json(text: str) -> Any:
    """JSON whose nesting is bounded; NaN and infinities as text.  Raises ValueError.

    >>> bounded_json('[NaN, {"a": 1}]')
    ['NaN', {'a': 1}]
    """
    try:
        value = json.loads(text, parse_constant=str)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level: list[Any] = [value]
    for _ in range(DEPTH):
        inside = [
            list(one.values()) if isinstance(one, dict) else one
            for one in level
            if isinstance(one, dict | list)
        ]
        if not inside:
            return value
        level = [one for several in inside for one in several]
    raise ValueError("it is nested too deeply")
