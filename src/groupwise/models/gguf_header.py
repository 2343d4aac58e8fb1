"""Reads the header of a GGUF file: its metadata, and the place, type and shape of every tensor.

Each length that the file states is held against the bytes that are left before anything is read or
allocated, so a damaged file is refused after its header at the latest, in memory of the header's
size.  The format: ggml's docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # type: ignore[import-not-found]

from groupwise.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""The format's types of numbers and truth values, as numpy writes them."""
LONGEST_STRING = 1 << 26
"""Bytes.  The longest strings are chat templates and a tokenizer.json, up to some 20 MB."""
LONGEST_ARRAY = 1 << 24
"""Elements.  The longest arrays are merges and vocabularies, up to a million."""
MOST_DIMENSIONS = 4
SMALLEST_ENTRY = 8 + 4 + 1
"""Bytes of a metadata entry with an empty name: length of the name, type, a value of one byte."""
SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
"""Bytes of a tensor's description with an empty name and one dimension."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file, and what its bytes mean."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as torch and numpy have it; the file has it the other way round."""
    kind: GGMLQuantizationType
    start: int
    """Bytes from the beginning of the file."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says before its weights."""

    file: Path
    metadata: dict[str, Any]
    """Numbers, truth values, strings, and lists of one of these."""
    tensors: dict[str, TensorInfo]

    def read_bytes(self, name: str) -> np.ndarray:
        """Map the bytes of a tensor; nothing is read until they are used."""
        info = self.tensors[name]
        return np.memmap(self.file, np.uint8, "r", offset=info.start, shape=(info.size,))


def read_header(file: Path) -> Header:
    """Read the header of a GGUF file.

    Raises ConfigError, which names the file, for one that is damaged, cut off, or of another
    format.
    """
    with file.open("rb") as opened:
        return _Reader(file, opened).read()


class _Reader:
    """Goes through a file from its beginning and never asks for more bytes than are left."""

    def __init__(self, file: Path, opened: BinaryIO) -> None:
        self.file = file
        self.opened = opened
        self.size = os.fstat(opened.fileno()).st_size

    def read(self) -> Header:
        """Read the whole header."""
        if self.size < len(MAGIC) or self.opened.read(len(MAGIC)) != MAGIC:
            raise ConfigError(
                f"model.path: {str(self.file)!r} is no GGUF file (its first bytes are not GGUF):"
                " copy or fetch it again"
            )
        version = self.number("<u4")
        if version not in VERSIONS:
            self.refuse(f"its version is {version}, not {VERSIONS[0]} or {VERSIONS[1]}")
        tensor_count = self.count("tensors", SMALLEST_TENSOR)
        entry_count = self.count("metadata entries", SMALLEST_ENTRY)
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self.string("the name of a metadata entry")
            if key in metadata:
                self.refuse(f"it holds {key!r} twice")
            metadata[key] = self.value(key)
        tensors = self.tensors(tensor_count, self.alignment(metadata))
        return Header(self.file, metadata, tensors)

    def refuse(self, reason: str) -> NoReturn:
        """Raise ConfigError for a damaged file."""
        raise ConfigError(
            f"model.path: {str(self.file)!r} is damaged or cut off: {reason:.300};"
            " copy or fetch it again"
        )

    def take(self, size: int, name: str) -> bytes:
        """Read `size` bytes, which must be left.   name: what they are, for the message."""
        left = self.size - self.opened.tell()
        if size > left:
            self.refuse(f"{name} has {size:,} bytes where {left:,} are left")
        return self.opened.read(size)

    def number(self, dtype: str) -> Any:
        """Read one number of a numpy type."""
        content = self.take(np.dtype(dtype).itemsize, "a number")
        return np.frombuffer(content, dtype)[0].item()

    def count(self, name: str, smallest: int) -> int:
        """Read a count of things of which each has at least `smallest` bytes."""
        count = self.number("<u8")
        left = self.size - self.opened.tell()
        if count * smallest > left:
            self.refuse(f"it states {count:,} {name} where {left:,} bytes are left")
        return count

    def string(self, name: str) -> str:
        """Read one string in UTF-8."""
        length = self.number("<u8")
        if length > LONGEST_STRING:
            self.refuse(f"{name} states a string of {length:,} bytes")
        content = self.take(length, name)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            self.refuse(f"{name} is no UTF-8")

    def value(self, key: str) -> Any:
        """Read the value of a metadata entry."""
        kind = self.number("<u4")
        if kind == STRING:
            return self.string(key)
        if kind == ARRAY:
            return self.array(key)
        return self.numbers(key, kind, 1)[0]

    def array(self, key: str) -> list[Any]:
        """Read an array of strings or numbers."""
        kind = self.number("<u4")
        if kind == ARRAY:
            self.refuse(f"{key!r} is an array of arrays")
        smallest = 8
        if kind in NUMBERS:
            smallest = np.dtype(NUMBERS[kind]).itemsize
        length = self.count(f"elements of {key!r}", smallest)
        if length > LONGEST_ARRAY:
            self.refuse(f"{key!r} states {length:,} elements")
        if kind == STRING:
            return [self.string(key) for _ in range(length)]
        return self.numbers(key, kind, length)

    def numbers(self, key: str, kind: int, length: int) -> list[Any]:
        """Read `length` numbers or truth values of one of the format's types."""
        if kind not in NUMBERS:
            self.refuse(f"{key!r} has the type {kind}, which is none of the format's")
        dtype = np.dtype(NUMBERS[kind])
        values = np.frombuffer(self.take(length * dtype.itemsize, key), dtype)
        if kind != BOOL:
            return values.tolist()
        if (values > 1).any():
            self.refuse(f"{key!r} is neither true nor false")
        return values.astype(bool).tolist()

    def alignment(self, metadata: dict[str, Any]) -> int:
        """Bytes, a multiple of which every tensor's place is."""
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            self.refuse(f"general.alignment is {alignment!r}, not a power of two from 8 on")
        return alignment

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        """Read the descriptions of all tensors, which lie one behind the other."""
        described = [self.description() for _ in range(count)]
        begin = -(-self.opened.tell() // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        end = 0
        for name, shape, kind, offset in described:
            if name in tensors:
                self.refuse(f"it holds the tensor {name!r} twice")
            if offset != end:
                self.refuse(f"the tensor {name!r} lies at {offset:,} and should at {end:,}")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            size = math.prod(shape) // block * block_bytes
            if begin + offset + size > self.size:
                missing = begin + offset + size - self.size
                self.refuse(f"{missing:,} bytes of the tensor {name!r} are missing")
            tensors[name] = TensorInfo(name, shape, kind, begin + offset, size)
            end = -(-(offset + size) // alignment) * alignment
        return tensors

    def description(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        """Read a tensor's name, shape (rows first), type and place."""
        name = self.string("the name of a tensor")
        dimensions = self.number("<u4")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            self.refuse(f"the tensor {name!r} has {dimensions:,} dimensions")
        sizes = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions, "a shape"))
        code = self.number("<u4")
        offset = self.number("<u8")
        if code not in GGMLQuantizationType._value2member_map_:
            self.refuse(f"the tensor {name!r} has the type {code}, which is none of the format's")
        kind = GGMLQuantizationType(code)
        block, _ = GGML_QUANT_SIZES[kind]
        if 0 in sizes or sizes[0] % block:
            self.refuse(f"the tensor {name!r} has the shape {sizes}, which {kind.name} cannot fill")
        return name, tuple(reversed(sizes)), kind, offset
