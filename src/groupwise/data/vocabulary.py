"""The text of every token id, as bytes, with which a completion is shown token by token without a
tokenizer.

A token of a byte-level vocabulary may be a part of a character, so a piece is bytes;
`Vocabulary.texts` puts them together.

Importing this file does not import torch.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.errors import DataError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every token by its id, and which tokens are special."""

    pieces: Sequence[bytes | None]
    """None: no token has this id."""
    special: frozenset[int]
    """Ids of tokens that are left out of a completion's text."""

    def texts(self, ids: Iterable[int]) -> list[str]:
        """The text of each token in its place.  A character of several tokens is the text of the
        last of them.

        >>> pieces = [b"a", "é".encode()[:1], "é".encode()[1:]]
        >>> Vocabulary(pieces, frozenset()).texts([0, 1, 2, 7])
        ['a', '', 'é', '<7>']
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        parts: list[str] = []
        for token in ids:
            piece = None
            if 0 <= token < len(self.pieces):
                piece = self.pieces[token]
            if piece is None:
                parts.append(decoder.decode(b"", True) + f"<{token}>")
            else:
                parts.append(decoder.decode(piece))
        if parts:
            parts[-1] += decoder.decode(b"", True)
        return parts


def of(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a Hugging Face tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return from_json(json.loads(backend.to_str()))
    special = frozenset(tokenizer.all_special_ids)
    pieces: list[bytes | None] = []
    for name in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))):
        pieces.append(None if name is None else _sentence_piece(name))
    return Vocabulary(pieces, special)


MOST_TOKENS = 1 << 24
"""Ids of a vocabulary; of a larger one somebody has written a wrong number."""


def from_json(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a parsed tokenizer.json.  Raises DataError for one without a vocabulary."""
    try:
        vocab = tokenizer["model"]["vocab"]
        if isinstance(vocab, dict):
            named = {int(i): name for name, i in vocab.items()}
        else:
            named = {i: entry[0] for i, entry in enumerate(vocab)}
        added: dict[int, str] = {}
        special: set[int] = set()
        for token in tokenizer.get("added_tokens") or ():
            added[int(token["id"])] = token["content"]
            if token.get("special"):
                special.add(int(token["id"]))
        kinds = json.dumps([tokenizer.get("decoder"), tokenizer.get("pre_tokenizer")])
        bytes_of = _plain
        if '"ByteLevel"' in kinds:
            bytes_of = _byte_level
        elif "\\u2581" in kinds or "ByteFallback" in kinds:
            bytes_of = _sentence_piece
        ids = [*named, *added]
        if min(ids, default=0) < 0 or max(ids, default=0) >= MOST_TOKENS:
            raise ValueError(f"ids go from {min(ids)} to {max(ids)}")
        pieces: list[bytes | None] = [None] * (max(ids, default=-1) + 1)
        for i, name in named.items():
            pieces[i] = bytes_of(name)
        for i, name in added.items():
            pieces[i] = _plain(name)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise DataError(
            f"a tokenizer.json without a vocabulary ({type(error).__name__}: {error})"
        ) from error
    return Vocabulary(pieces, frozenset(special))


def to_bytes(vocabulary: Vocabulary) -> bytes:
    """Write a Parquet file with a row per id: `piece` (binary, null: no token), `special`."""
    special = [i in vocabulary.special for i in range(len(vocabulary.pieces))]
    table = pa.table(
        {
            "piece": pa.array(vocabulary.pieces, pa.binary()),
            "special": pa.array(special, pa.bool_()),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def from_table(table: pa.Table) -> Vocabulary:
    """The vocabulary of the table that `to_bytes` wrote.  Raises DataError."""
    names, types = table.schema.names, table.schema.types
    if names != ["piece", "special"] or types != [pa.binary(), pa.bool_()]:
        raise DataError(f"no vocabulary: its columns are {names}")
    special = np.flatnonzero(table.column("special").to_numpy())
    return Vocabulary(table.column("piece").to_pylist(), frozenset(special.tolist()))


def _byte_table() -> dict[str, int]:
    """The printable characters that byte-level vocabularies write bytes with (GPT-2's table)."""
    shown = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table: dict[str, int] = {}
    hidden = 0
    for byte in range(256):
        if byte in shown:
            table[chr(byte)] = byte
        else:
            table[chr(256 + hidden)] = byte
            hidden += 1
    return table


_BYTES = _byte_table()


def _plain(name: str) -> bytes:
    return name.encode("utf-8", "backslashreplace")


def _byte_level(name: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in name])
    except KeyError:
        return _plain(name)


def _sentence_piece(name: str) -> bytes:
    match = _BYTE.fullmatch(name)
    if match is not None:
        return bytes([int(match[1], 16)])
    return _plain(name.replace("\u2581", " "))
