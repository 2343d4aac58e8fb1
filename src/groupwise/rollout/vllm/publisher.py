"""Versions of a policy's weights, written into a folder from which servers fetch them.

After an update every process compares the ranges that it holds bit by bit with what it published
last, and writes what differs.  Nothing is gathered, and nothing waits for a server.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from groupwise.distributed import comm, fsdp
from groupwise.models.lora import write_adapter
from groupwise.models.policy import Policy
from groupwise.rollout.vllm.plugin.groupwise_versions import (
    MANIFEST,
    Block,
    File,
    Manifest,
    Range,
    digest,
    encode_patch,
    folder_name,
)
from groupwise.rollout.vllm.weight_ranges import WeightRange, own_ranges
from groupwise.utils import files

Item = TypeVar("Item")

FULL_EVERY = 10
"""Versions from one full one to the next."""


@dataclass(slots=True)
class Snapshot:
    """A range as it was published last, in host memory."""

    range: Range
    bits: np.ndarray


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """What one process has written of a version."""

    shapes: dict[str, tuple[int, ...]]
    ranges: list[Range]
    patch: File | None
    full: File | None = None


@dataclass(slots=True)
class Publisher:
    """Publishes versions of a policy's weights; all processes of the run call it together."""

    folder: Path
    """All processes see it; servers see it too, or ask the first process for its files."""
    run: str
    """The name of the run, which is a part of every version's label."""
    dtype: torch.dtype
    """The type in which the servers compute: the weights are rounded to it."""
    full_every: int = FULL_EVERY
    last: Manifest | None = field(default=None, init=False)
    """The newest version."""
    _base: int | None = field(default=None, init=False)
    """The version before the newest one."""
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False)
    _snapshots: list[Snapshot] = field(default_factory=list, init=False)
    _full_versions: list[int] = field(default_factory=list, init=False)
    _patch: File | None = field(default=None, init=False)
    """This process's patch to the newest version."""

    def publish(self, policy: Policy, version: int) -> Manifest:
        """Write a version of the weights: a patch to the one before it, and the first time and
        every `full_every` versions the whole weights too.

        All processes must call it.   version: higher than the last one.  Raises StorageError on all
        of them.
        """
        _demand_new(self.last, version)
        self._base = None if self.last is None else self.last.version
        full = self.last is None or version >= self._full_versions[-1] + self.full_every
        with own_ranges(policy) as ranges:
            parts = self._together(lambda: [self._write(ranges, version, full=full)])
        return self._place(parts, version)

    def publish_full(self) -> Manifest:
        """Add the whole weights to the newest version, for a server that could not read its patch.

        All processes must call it.  Raises StorageError on all of them.
        """
        assert self.last is not None, "publish first"
        version = self.last.version
        return self._place(self._together(lambda: [self._written(version, full=True)]), version)

    def forget(self, oldest: int) -> None:
        """Remove the versions that no server can need any more.   oldest: the oldest version that
        a server may still be told to go to.
        """
        full = [version for version in self._full_versions if version <= oldest]
        if not full or not comm.world().first:
            return
        for folder in self.folder.glob("v*"):
            if int(folder.name[1:]) < full[-1]:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all versions."""
        if comm.world().first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _together(self, write: Callable[[], list[Item]]) -> list[Item]:
        """Return what all processes have written.  Raises StorageError on all of them."""

        def store() -> list[Item]:
            with files.storing(self.folder, "a version of the weights"):
                return write()

        return comm.together(store)

    def _write(self, ranges: Iterator[WeightRange], version: int, *, full: bool) -> WrittenPart:
        """Write this process's files of a version, and remember what they hold."""
        first = self.last is None
        patch = BlockFile(self._folder(version), "patch")
        for index, one in enumerate(ranges):
            bits = one.bits(self.dtype)
            if first:
                self._shapes[one.name] = one.shape
                self._snapshots.append(_snapshot(one, bits))
                continue
            snapshot = self._snapshots[index]
            block, count = encode_patch(snapshot.bits, bits)
            if count:
                patch.add(block, index, count)
                snapshot.bits[:] = bits
                snapshot.range = replace(snapshot.range, digest=digest(bits))
        self._patch = patch.close()
        return self._written(version, full=full)

    def _written(self, version: int, *, full: bool) -> WrittenPart:
        """What this process has written of a version; with `full` it now writes all it holds."""
        whole = None
        if full:
            file = BlockFile(self._folder(version), "full")
            for index, snapshot in enumerate(self._snapshots):
                file.add(snapshot.bits.tobytes(), index, snapshot.bits.size)
            whole = file.close()
        ranges = [snapshot.range for snapshot in self._snapshots]
        return WrittenPart(dict(self._shapes), ranges, self._patch, whole)

    def _folder(self, version: int) -> Path:
        folder = self.folder / folder_name(version)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _place(self, parts: list[WrittenPart], version: int) -> Manifest:
        """Write the manifest of a version whose files are complete: now it is published."""
        shapes: dict[str, tuple[int, ...]] = {}
        ranges: list[Range] = []
        patch: list[File] = []
        full: list[File] = []
        for part in parts:
            if part.patch is not None:
                patch.append(_moved(part.patch, len(ranges)))
            if part.full is not None:
                full.append(_moved(part.full, len(ranges)))
            shapes |= part.shapes
            ranges += part.ranges
        manifest = Manifest(
            run=self.run,
            version=version,
            dtype=str(self.dtype).removeprefix("torch."),
            base=self._base,
            shapes=shapes,
            ranges=tuple(ranges),
            patch=tuple(patch),
            full=tuple(full),
        )
        self._together(lambda: self._write_manifest(manifest))
        if full:
            self._full_versions.append(version)
        self.last = manifest
        return manifest

    def _write_manifest(self, manifest: Manifest) -> list[None]:
        if comm.world().first:
            path = self._folder(manifest.version) / MANIFEST
            files.write(path, manifest.to_json().encode())
        return []


@dataclass(slots=True)
class AdapterPublisher:
    """Publishes adapters alone, in peft's own form; all processes of the run call it together."""

    folder: Path
    """All processes see it; see `Publisher.folder`."""
    run: str
    dtype: torch.dtype
    """The type in which the servers compute, to which vLLM would round an adapter anyway."""
    last: Manifest | None = field(default=None, init=False)
    """The newest version."""

    def publish(self, policy: Policy, version: int) -> Manifest:
        """Write the adapter as a version.

        All processes must call it.   version: higher than the last one.  Raises StorageError on all
        of them.
        """
        assert policy.adapter is not None
        _demand_new(self.last, version)
        trained = {}
        for name, parameter in policy.model.named_parameters():
            if name in policy.adapter.trained:
                trained[name] = fsdp.whole(parameter.detach()).to(self.dtype)
        self.last = comm.from_first(lambda: self._write(policy, version, trained))
        return self.last

    def _write(self, policy: Policy, version: int, trained: dict[str, Tensor]) -> Manifest:
        folder = self.folder / folder_name(version)
        with files.storing(folder, "an adapter"):
            folder.mkdir(parents=True, exist_ok=True)
            write_adapter(policy, folder, trained)
            written = []
            for path in sorted(folder.iterdir()):
                data = np.frombuffer(path.read_bytes(), np.uint8)
                written.append(File(path.name, data.size, digest(data)))
            manifest = Manifest(run=self.run, version=version, adapter=tuple(written))
            files.write(folder / MANIFEST, manifest.to_json().encode())
        return manifest

    def forget(self, oldest: int) -> None:
        """Remove the adapters before a version."""
        if not comm.world().first:
            return
        for folder in self.folder.glob("v*"):
            if int(folder.name[1:]) < oldest:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all adapters."""
        if comm.world().first:
            shutil.rmtree(self.folder, ignore_errors=True)


class BlockFile:
    """A file of blocks that this process writes; it is made with its first block.

    It gets its name when it is whole: a server may be reading an earlier one of this name.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        """kind: `patch` or `full`."""
        self._path = folder / f"{kind}-{comm.world().rank:05d}.bin"
        self._new = self._path.with_suffix(".new")
        self._new.unlink(missing_ok=True)
        self._blocks: list[Block] = []

    def add(self, data: bytes, index: int, count: int) -> None:
        """Append a block.   index: of its range.   count: numbers in it."""
        with self._new.open("ab") as file:
            file.write(data)
        self._blocks.append(Block(index, len(data), count))

    def close(self) -> File | None:
        """The file with its blocks; None if there are none."""
        if not self._blocks:
            return None
        self._new.replace(self._path)
        size = sum(block.size for block in self._blocks)
        return File(self._path.name, size, blocks=tuple(self._blocks))


def _demand_new(last: Manifest | None, version: int) -> None:
    """A version that a server may have read never changes: whoever goes back publishes under
    another name of the run.
    """
    if last is not None:
        assert version > last.version, f"version {version} of {last.run} was published before"


def _snapshot(one: WeightRange, bits: np.ndarray) -> Snapshot:
    """A range as it is now, in memory of its own."""
    stop = one.start + bits.size
    return Snapshot(Range(one.name, one.start, stop, digest(bits)), bits.copy())


def _moved(file: File, by: int) -> File:
    """A file of one process, with its ranges counted behind those of the processes before it."""
    blocks = [replace(block, range=block.range + by) for block in file.blocks]
    return replace(file, blocks=tuple(blocks))
