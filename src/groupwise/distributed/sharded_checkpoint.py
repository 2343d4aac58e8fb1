"""Sharded tensors in files: written by all processes at once, read by any number of them
(torch.distributed.checkpoint).

Its index, `.metadata`, is a pickle.  It is read by an unpickler that knows the index's own classes
and nothing else, and only from a checkpoint whose every byte was found to be what was written
(`checkpoint.latest`).  Tensors are read with `weights_only`."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from groupwise.errors import CheckpointError, StorageError

SHARDS = "shards"
"""Folder of them inside a checkpoint's `trainer`."""
METADATA = "torch.distributed.checkpoint.metadata"
KNOWN = {
    *(
        (METADATA, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "StorageMeta",
        )
    ),
    *((METADATA, name) for name in ("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
"""Everything that an index of tensors is made of, beside torch's types of numbers.
`BytesStorageMetadata` is not among them: what it announces would be unpickled."""


class Staged:
    """A copy of this process's parts in host memory, on its way to the disk."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """folder: must not be there yet, and be seen by all processes."""
        self.writer = FileSystemWriter(folder, sync_files=True)
        self.tensors: Any = self.writer.stage(dict(tensors))

    def write(self, group: Any) -> None:
        """Write, together with the other processes: all call it, each in a thread of its own.
        Raises StorageError on all.

        group: the process group of those threads (`comm.open_aside`).
        """
        try:
            save(
                self.tensors, storage_writer=self.writer, process_group=group, no_dist=group is None
            )
        except CheckpointException as error:
            causes = {f"process {rank}: {cause[0]}" for rank, cause in error.failures.items()}
            raise StorageError(
                f"cannot write {self.writer.path}: {'; '.join(sorted(causes))[:500]}"
            ) from error


def read(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors from those that lie there, by name, however many processes wrote them; each
    reads what it holds itself.

    Raises CheckpointError if one is missing or has another shape.
    """
    known = index(folder).state_dict_metadata
    for name, tensor in into.items():
        there = known.get(name)
        if not isinstance(there, TensorStorageMetadata) or tuple(there.size) != tuple(tensor.shape):
            raise CheckpointError(
                f"{folder} holds no {name} of shape {tuple(tensor.shape)}: it is of another model"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled"
        )  # each process reads for itself
        load(dict(into), storage_reader=_TensorReader(folder), no_dist=True)


def index(folder: Path) -> Metadata:
    """The index of a folder.  Raises CheckpointError if it holds anything that an index of tensors
    does not.
    """
    try:
        metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(f"{folder / '.metadata'} is no index of tensors: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(
            f"{folder / '.metadata'} is no index of tensors but a {type(metadata).__name__}"
        )
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        number = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not number and (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class _TensorReader(FileSystemReader):
    """torch's reader, with that unpickler."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        metadata = index(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
