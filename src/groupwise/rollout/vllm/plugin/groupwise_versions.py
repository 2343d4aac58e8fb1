"""Versions of a policy's weights in a folder: their format, and a mirror that follows them.

A version is a folder `v000123` with a manifest and files of blocks, one file per rank of the
trainer.  A block holds a range of one tensor: all of it in a full file, or in a patch only the
numbers that differ from the version before.  The manifest has a digest of every range as it is
after the version.  A mirror is a copy of the checkpoint in host memory; it is brought from version
to version while the engine samples, and the engine loads from it afterwards.

What is read here was written by another machine.  No pickle is read, every size is checked before
memory is taken for it, and what is wrong raises `WrongVersion`.

The trainer and vLLM's workers both import this file: it needs numpy and the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

FORMAT = 2
"""The number of this format; a reader refuses any other."""
MANIFEST = "manifest.json"
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the names of the types that servers compute in."""
LONGEST_MANIFEST = 256 << 20
"""Bytes of the longest manifest that is read."""
CHUNK = 4 << 20
"""Bytes that are read at a time."""
ESCAPE = 255
"""A byte of a gap that says: go on by 255 and add the next byte."""
DEFLATED, DEFLATE_HEAD = 2, 64
"""Deflated bytes are at most so many times the bytes before, and so many more: above the bound of
every zlib.
"""
ALIGNED = 64
"""Tensors of the mirror begin at multiples of it, bytes."""
SECONDS = 60.0
"""A source that sends nothing for so long has failed."""


class WrongVersion(Exception):
    """A version that is missing, cannot be read, or is not what its manifest says."""


def folder_name(version: int) -> str:
    """The folder of a version in its source.

    >>> folder_name(123)
    'v000123'
    """
    return f"v{version:06d}"


def digest(numbers: np.ndarray) -> str:
    """The SHA-256 of an array's bytes, the first half of it in hexadecimal.

    SHA-256 has instructions of its own on current CPUs: measured 1.8 GB/s on one core, where
    BLAKE2b took 0.93 GB/s.
    """
    return hashlib.sha256(numbers.view(np.uint8).data).hexdigest()[:32]


# ---------------------------------------------------------------- patches


def encode_patch(before: np.ndarray, after: np.ndarray) -> tuple[bytes, int]:
    """Encode the numbers in which two arrays differ: (block, how many they are).

    before, after: (n,) uint16 or uint32, the bits of the numbers.

    Small steps of an optimizer change a number by few units in its last place.  So the block holds
    gaps between changed places, and differences of the bits as integers, byte by byte, deflated at
    level 1.  In bfloat16 at a learning rate of 1e-6 that took a third of the bytes of gaps of 32
    bits and values; higher levels took 2 to 20 times as long for a tenth fewer bytes.
    """
    places = np.flatnonzero(before != after)
    gaps = np.diff(places, prepend=0)
    ends = np.cumsum(gaps // ESCAPE + 1)
    total = int(ends[-1]) if places.size else 0
    stream = np.full(total, ESCAPE, np.uint8)
    stream[ends - 1] = gaps % ESCAPE
    differences = _zigzag(after[places] - before[places])
    planes = differences.view(np.uint8).reshape(places.size, before.itemsize).T
    return zlib.compress(stream.tobytes() + planes.tobytes(), 1), places.size


def longest_patch(size: int, count: int, width: int) -> int:
    """Bytes of the longest patch, inflated.   size: numbers of the range.   count: those that
    change.   width: bytes of a number.
    """
    return size // ESCAPE + count + count * width


def apply_patch(block: bytes, count: int, numbers: np.ndarray) -> None:
    """Change an array, in place, by a block of `encode_patch`.  Raises WrongVersion.

    count: numbers that the block changes, as the manifest says.
    """
    if not 0 <= count <= numbers.size:
        raise WrongVersion(f"a block changes {count} of {numbers.size} numbers")
    width = numbers.itemsize
    longest = longest_patch(numbers.size, count, width)
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(block, max(longest, 1))
    except zlib.error as error:
        raise WrongVersion(f"a block cannot be inflated ({error})") from None
    if not inflater.eof or inflater.unused_data or len(data) < count * (1 + width):
        raise WrongVersion(f"a block of {len(block)} bytes does not inflate to {count} changes")
    split = len(data) - count * width
    stream = np.frombuffer(data, np.uint8, split)
    ends = stream != ESCAPE
    places = np.cumsum(stream, dtype=np.int64)[ends]
    if places.size != count or (count and not ends[-1]):
        raise WrongVersion(f"a block has {places.size} places for {count} changes")
    if count and (places[-1] >= numbers.size or not (np.diff(places) > 0).all()):
        raise WrongVersion(f"a block's places do not rise inside of {numbers.size} numbers")
    planes = np.frombuffer(data, np.uint8, count * width, split).reshape(width, count)
    differences = np.ascontiguousarray(planes.T).view(numbers.dtype).reshape(count)
    numbers[places] += _unzigzag(differences)


def _zigzag(differences: np.ndarray) -> np.ndarray:
    """Signed differences as unsigned numbers that are small where the difference is."""
    signed = differences.view(f"i{differences.itemsize}")
    sign = signed >> (8 * differences.itemsize - 1)
    return ((signed << 1) ^ sign).view(differences.dtype)


def _unzigzag(numbers: np.ndarray) -> np.ndarray:
    """The inverse of `_zigzag`."""
    negative = (numbers & 1).astype(numbers.dtype)
    return (numbers >> 1) ^ (np.zeros_like(negative) - negative)


# ---------------------------------------------------------------- manifests


@dataclass(frozen=True, slots=True)
class Range:
    """A part of a tensor, flat, as one rank of the trainer holds it."""

    tensor: str
    start: int
    stop: int
    digest: str
    """Digest of the numbers after the version."""


@dataclass(frozen=True, slots=True)
class Block:
    """A range in a file."""

    range: int
    """Index into the manifest's ranges."""
    size: int
    """Bytes.  Blocks lie behind one another in their file."""
    count: int
    """Numbers that it changes; in a full file all of the range."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of blocks, or of an adapter."""

    name: str
    size: int
    digest: str = ""
    """Digest of a file of an adapter; blocks are checked by their results."""
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version consists of."""

    run: str
    version: int
    dtype: str = ""
    base: int | None = None
    """The version that the patch starts from; None: there is no patch."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ranges: tuple[Range, ...] = ()
    patch: tuple[File, ...] = ()
    full: tuple[File, ...] = ()
    """Files of the whole weights; empty for a version that has a patch alone."""
    adapter: tuple[File, ...] = ()
    """Files of an adapter, which is the whole version."""

    @property
    def label(self) -> str:
        """The name of the version among all runs, which tokens drawn by it carry."""
        return f"{self.run}:{self.version}"

    def to_json(self) -> str:
        """The manifest as it is written."""
        ranges = [[one.tensor, one.start, one.stop, one.digest] for one in self.ranges]
        return json.dumps(
            {
                "format": FORMAT,
                "run": self.run,
                "version": self.version,
                "dtype": self.dtype,
                "base": self.base,
                "shapes": self.shapes,
                "ranges": ranges,
                "patch": _files_to_json(self.patch),
                "full": _files_to_json(self.full),
                "adapter": _files_to_json(self.adapter),
            }
        )


def _files_to_json(files: tuple[File, ...]) -> list[dict[str, Any]]:
    written = []
    for file in files:
        blocks = [[one.range, one.size, one.count] for one in file.blocks]
        written.append(
            {"name": file.name, "size": file.size, "digest": file.digest, "blocks": blocks}
        )
    return written


def read_manifest(text: bytes, version: int) -> Manifest:
    """A manifest from its JSON, with everything in it checked.  Raises WrongVersion."""
    where = f"the manifest of version {version}"
    try:
        stored = json.loads(text)
        number = stored["format"]
        manifest = Manifest(
            run=str(stored["run"]),
            version=_whole(stored["version"]),
            dtype=str(stored["dtype"]),
            base=None if stored["base"] is None else _whole(stored["base"]),
            shapes={name: tuple(map(_whole, shape)) for name, shape in stored["shapes"].items()},
            ranges=tuple(
                Range(str(name), _whole(start), _whole(stop), str(result))
                for name, start, stop, result in stored["ranges"]
            ),
            patch=_read_files(stored["patch"]),
            full=_read_files(stored["full"]),
            adapter=_read_files(stored["adapter"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise WrongVersion(f"{where} cannot be read ({type(error).__name__}: {error})") from None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.]{0,63}", manifest.run):
        raise WrongVersion(f"{where} is of a run called {manifest.run!r}")
    if number != FORMAT:
        raise WrongVersion(f"{where} has format {number}; this plug-in reads {FORMAT}")
    if manifest.version != version:
        raise WrongVersion(f"{where} says that it is of version {manifest.version}")
    if manifest.base is not None and manifest.base >= version:
        raise WrongVersion(f"{where} patches version {manifest.base}, which is not before it")
    if not manifest.adapter:
        _check_ranges(manifest, where)
    _check_blocks(manifest.full, manifest, where, whole=True)
    _check_blocks(manifest.patch, manifest, where, whole=False)
    return manifest


def _whole(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 48:
        raise ValueError(f"{number!r} is no size")
    return number


def _read_files(stored: list[dict[str, Any]]) -> tuple[File, ...]:
    files = []
    for one in stored:
        blocks = [Block(*map(_whole, block)) for block in one["blocks"]]
        name = str(one["name"])
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
            raise ValueError(f"{name!r} is no name of a file")
        files.append(File(name, _whole(one["size"]), str(one["digest"]), tuple(blocks)))
    return tuple(files)


def _check_ranges(manifest: Manifest, where: str) -> None:
    """Raise WrongVersion unless the ranges cover every tensor once."""
    if manifest.dtype not in WIDTHS:
        raise WrongVersion(f"{where} has numbers of type {manifest.dtype!r}")
    covered = dict.fromkeys(manifest.shapes, 0)
    for one in sorted(manifest.ranges, key=lambda one: (one.tensor, one.start)):
        if one.start != covered.get(one.tensor) or one.stop < one.start:
            raise WrongVersion(f"{where} has a gap or an overlap in {one.tensor!r}")
        covered[one.tensor] = one.stop
    for name, shape in manifest.shapes.items():
        if covered[name] != _numel(shape):
            raise WrongVersion(f"{where} does not cover {name!r} of shape {list(shape)}")


def _check_blocks(files: tuple[File, ...], manifest: Manifest, where: str, *, whole: bool) -> None:
    """Raise WrongVersion for blocks that do not fill their file, of no range, two of one range, or
    of another size than their range can have.

    So a reader takes no more memory and reads no more bytes than the ranges say.
    whole: the blocks are whole ranges, and not patches.
    """
    filled = set()
    for file in files:
        if sum(block.size for block in file.blocks) != file.size:
            raise WrongVersion(f"{where} has blocks that do not fill {file.name}")
        for block in file.blocks:
            if block.range >= len(manifest.ranges):
                raise WrongVersion(f"{where} has a block of no range in {file.name}")
            part = manifest.ranges[block.range]
            if block.range in filled:
                raise WrongVersion(f"{where} has two blocks for a range of {part.tensor!r}")
            filled.add(block.range)
            _check_size(block, part, WIDTHS[manifest.dtype], where, whole=whole)


def _check_size(block: Block, part: Range, width: int, where: str, *, whole: bool) -> None:
    """Raise WrongVersion for a block of another size than its range can have."""
    count = part.stop - part.start
    if whole and (block.count != count or block.size != count * width):
        raise WrongVersion(
            f"{where} has {block.size} bytes for the {count} numbers of {part.tensor!r}"
        )
    if block.count > count:
        raise WrongVersion(f"{where} changes {block.count} of {count} numbers of {part.tensor!r}")
    longest = DEFLATED * longest_patch(count, block.count, width) + DEFLATE_HEAD
    if not whole and block.size > longest:
        raise WrongVersion(
            f"{where} has a patch of {block.size} bytes for {block.count} changes in"
            f" {part.tensor!r}"
        )


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


# ---------------------------------------------------------------- sources


class VersionSource:
    """Where versions lie: a folder, or the address of a trainer."""

    def __init__(self, place: str, token: str = "") -> None:
        """place: a folder, or `http://host:port`.   token: the secret that an address asks for."""
        self.place, self._token = place, token
        self._web = place.startswith("http://")
        # A proxy of the environment is for the world outside, not for a trainer.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.read_bytes = 0
        """Bytes that have been read from it."""

    def manifest(self, version: int) -> Manifest:
        """The manifest of a version.  Raises WrongVersion if there is none."""
        with self.open(version, MANIFEST) as stream:
            text = stream.read(LONGEST_MANIFEST + 1)
        if len(text) > LONGEST_MANIFEST:
            raise WrongVersion(f"the manifest of version {version} has no end")
        self.read_bytes += len(text)
        return read_manifest(text, version)

    @contextlib.contextmanager
    def open(self, version: int, name: str) -> Iterator[BinaryIO]:
        """A file of a version, to read.  What fails inside raises WrongVersion too."""
        path = f"{self.place}/{folder_name(version)}/{name}"
        try:
            if self._web:
                headers = {"Authorization": f"Bearer {self._token}"}
                request = urllib.request.Request(path, headers=headers)
                with self._opener.open(request, timeout=SECONDS) as answer:
                    yield answer
            else:
                with Path(path).open("rb") as file:
                    yield file
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise WrongVersion(f"{path} cannot be read ({error})") from None

    def read(self, stream: BinaryIO, size: int, name: str) -> bytes:
        """Exactly so many bytes.  Raises WrongVersion if there are fewer."""
        parts = []
        while size > 0:
            part = stream.read(min(size, CHUNK))
            if not part:
                raise WrongVersion(f"{name} ends {size} bytes too early")
            size -= len(part)
            self.read_bytes += len(part)
            parts.append(part)
        return b"".join(parts)


# ---------------------------------------------------------------- the mirror


@dataclass(frozen=True, slots=True)
class Fetched:
    """How a mirror came to a version."""

    version: int
    read_bytes: int
    full: bool
    """True if the whole weights were read."""
    healed: str = ""
    """Why patches could not be used, where some should have been."""


class Mirror:
    """A copy of a checkpoint in a folder of host memory, which several processes may map."""

    def __init__(self, folder: Path) -> None:
        """folder: on /dev/shm; it is made where it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._numbers: np.ndarray | None = None
        """All tensors behind one another, mapped from the file."""
        self._inode = 0

    @contextlib.contextmanager
    def locked(self, *, write: bool) -> Iterator[None]:
        """Inside, no other process or thread writes; with `write` none reads either."""
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
            yield

    def manifest(self) -> Manifest | None:
        """The manifest of the version that the mirror holds; None while it holds none."""
        path = self.folder / MANIFEST
        if not path.exists():
            return None
        text = path.read_bytes()
        return read_manifest(text, int(json.loads(text)["version"]))

    def go_to(self, source: VersionSource, version: int) -> Fetched:
        """Fetch, apply and check until the mirror holds a version.

        Patches are read where the mirror holds a version before it, else the last full version and
        the patches behind that.  A gap in the sequence or a wrong digest falls back to the last
        full version.   Raises WrongVersion where that cannot be read either; the mirror then
        holds nothing.
        """
        with self.locked(write=True):
            before = source.read_bytes
            goal = source.manifest(version)
            held = self.manifest()
            if held is not None and held.label == goal.label and held.ranges == goal.ranges:
                return Fetched(version, source.read_bytes - before, full=False)
            steps = _steps_from(held, goal, source)
            healed = ""
            if steps is not None:
                assert held is not None
                try:
                    self._follow(steps, held, source)
                    return Fetched(version, source.read_bytes - before, full=False)
                except WrongVersion as error:
                    healed = str(error)
            elif held is not None and held.run == goal.run:
                healed = f"no patches lead from version {held.version} to {version}"
            first, *steps = _steps_from_full(goal, source)
            self._read_full(first, source)
            self._follow(steps, first, source)
            return Fetched(version, source.read_bytes - before, full=True, healed=healed)

    def _follow(self, steps: list[Manifest], held: Manifest, source: VersionSource) -> None:
        for step in steps:
            self._apply(step, held, source)
            held = step

    def tensors(self, manifest: Manifest) -> dict[str, np.ndarray]:
        """The bits of every tensor, flat, in the mirror's own memory."""
        width = WIDTHS[manifest.dtype]
        places, total = _layout(manifest)
        numbers = self._map(total).view(f"u{width}")
        found = {}
        for name, shape in manifest.shapes.items():
            begin = places[name] // width
            found[name] = numbers[begin : begin + _numel(shape)]
        return found

    def adapter(self, source: VersionSource, version: int) -> Path:
        """Fetch the adapter of a version into a folder of its own.  Raises WrongVersion."""
        manifest = source.manifest(version)
        if not manifest.adapter:
            raise WrongVersion(f"version {version} is no adapter")
        folder = self._adapter_folder(manifest.label)
        with self.locked(write=True):
            if folder.exists():
                return folder
            temporary = self.folder / "adapter-new"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            _check_room(sum(file.size for file in manifest.adapter), self.folder)
            for file in manifest.adapter:
                with source.open(version, file.name) as stream:
                    data = source.read(stream, file.size, file.name)
                if digest(np.frombuffer(data, np.uint8)) != file.digest:
                    raise WrongVersion(f"{file.name} of version {version} has another digest")
                _write(temporary / file.name, data)
            temporary.rename(folder)
        return folder

    def drop_adapter(self, label: str) -> None:
        """Remove an adapter that was fetched."""
        shutil.rmtree(self._adapter_folder(label), ignore_errors=True)

    def _adapter_folder(self, label: str) -> Path:
        return self.folder / f"adapter-{label.replace('/', '')}"

    def _read_full(self, manifest: Manifest, source: VersionSource) -> None:
        """Replace all that the mirror holds by a full version."""
        self._forget()
        _, total = _layout(manifest)
        weights = self.folder / "weights"
        # A file of this size is written over: while it is mapped its memory cannot be had again.
        if not weights.exists() or weights.stat().st_size != total:
            self._numbers = None
            weights.unlink(missing_ok=True)
            _reserve(weights, total)
        tensors = self.tensors(manifest)
        for file in manifest.full:
            with source.open(manifest.version, file.name) as stream:
                for block in file.blocks:
                    part = manifest.ranges[block.range]
                    target = tensors[part.tensor][part.start : part.stop]
                    data = source.read(stream, block.size, file.name)
                    target[:] = np.frombuffer(data, target.dtype)
        self._check(manifest, tensors, {})
        self._remember(manifest)

    def _apply(self, manifest: Manifest, held: Manifest, source: VersionSource) -> None:
        """Bring the mirror from the version that it holds to the next one."""
        if manifest.shapes != held.shapes or manifest.dtype != held.dtype:
            raise WrongVersion(f"version {manifest.version} is of another model than the mirror")
        self._forget()
        tensors = self.tensors(manifest)
        for file in manifest.patch:
            with source.open(manifest.version, file.name) as stream:
                for block in file.blocks:
                    part = manifest.ranges[block.range]
                    data = source.read(stream, block.size, file.name)
                    apply_patch(data, block.count, tensors[part.tensor][part.start : part.stop])
        known = {(one.tensor, one.start, one.stop): one.digest for one in held.ranges}
        self._check(manifest, tensors, known)
        self._remember(manifest)

    def _check(
        self, manifest: Manifest, tensors: dict[str, np.ndarray], known: dict[Any, Any]
    ) -> None:
        """Raise WrongVersion for a range whose digest is not the manifest's.

        known: digests of ranges before; one that stays the same was not patched.
        """
        patched = {block.range for file in manifest.patch for block in file.blocks}
        for index, one in enumerate(manifest.ranges):
            same = known.get((one.tensor, one.start, one.stop)) == one.digest
            if same and index not in patched:
                continue
            if digest(tensors[one.tensor][one.start : one.stop]) != one.digest:
                raise WrongVersion(
                    f"{one.tensor}[{one.start}:{one.stop}] of version {manifest.version} has"
                    " another digest than its manifest says: the version was damaged on its way"
                )

    def _forget(self) -> None:
        """Hold nothing, until what is being written is complete."""
        (self.folder / MANIFEST).unlink(missing_ok=True)

    def _remember(self, manifest: Manifest) -> None:
        temporary = self.folder / f"{MANIFEST}.new"
        _write(temporary, manifest.to_json().encode())
        temporary.rename(self.folder / MANIFEST)

    def _map(self, total: int) -> np.ndarray:
        """The file of weights in memory; mapped anew where another process has replaced it."""
        path = self.folder / "weights"
        inode = path.stat().st_ino
        if self._numbers is None or self._inode != inode or self._numbers.size != total:
            self._numbers = np.memmap(path, np.uint8, "r+", shape=(total,))
            self._inode = inode
        return self._numbers


def _layout(manifest: Manifest) -> tuple[dict[str, int], int]:
    """Where each tensor begins in the mirror, and the size of all, bytes."""
    places = {}
    total = 0
    for name, shape in manifest.shapes.items():
        places[name] = total
        size = _numel(shape) * WIDTHS[manifest.dtype]
        total += -(-size // ALIGNED) * ALIGNED
    return places, max(total, ALIGNED)


def _reserve(path: Path, size: int) -> None:
    """Make a file that has all its memory.  Raises WrongVersion where there is too little.

    A file without it would end the process by SIGBUS when others have filled the memory by the
    time that it is written to.
    """
    _check_room(size, path.parent)
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _no_room(size, path.parent, error.strerror) from error


def _check_room(size: int, folder: Path) -> None:
    """Raise WrongVersion for more bytes than the folder's file system has."""
    if size > shutil.disk_usage(folder).free:
        raise _no_room(size, folder, "too few")


def _no_room(size: int, folder: Path, why: str | None) -> WrongVersion:
    free = shutil.disk_usage(folder).free
    return WrongVersion(
        f"the version takes {size / 1e9:.2f} GB, and {folder} has {free / 1e9:.2f} GB free ({why}):"
        " make /dev/shm larger (docker run --shm-size)"
    )


def _write(path: Path, data: bytes) -> None:
    """Write a file.  Raises WrongVersion where there is too little memory."""
    try:
        path.write_bytes(data)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _no_room(len(data), path.parent, error.strerror) from error


def _steps_from(
    held: Manifest | None, goal: Manifest, source: VersionSource
) -> list[Manifest] | None:
    """The patches from a version to another, in order; None where no sequence of patches is there.

    The way back ends at the second full version: whoever is that late reads a full one.
    """
    if held is None or held.run != goal.run or held.version >= goal.version:
        return None
    steps = [goal]
    full = 0
    while steps[0].base != held.version:
        full += bool(steps[0].full)
        if steps[0].base is None or full == 2:
            return None
        try:
            steps.insert(0, source.manifest(steps[0].base))
        except WrongVersion:
            return None
    return steps


def _steps_from_full(goal: Manifest, source: VersionSource) -> list[Manifest]:
    """The last full version up to a version, and the patches behind it.  Raises WrongVersion."""
    steps = [goal]
    while not steps[0].full:
        if steps[0].base is None:
            raise WrongVersion(f"version {steps[0].version} has neither a patch nor all weights")
        steps.insert(0, source.manifest(steps[0].base))
    return steps
