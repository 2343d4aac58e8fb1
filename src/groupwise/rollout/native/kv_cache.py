"""The KV cache of the native engine: keys, values and recurrent states of what is decoded.

A cache holds entries of one kind: prompts, or completions.  Each layer has two slabs, one of keys
and one of values, whose live entries stand densely at the front, so that attention reads plain
views.  When an entry ends, the last one is moved into its place: one copy of one entry, where every
step reads all of them.  Slabs grow by doubling, so memory follows the longest living completion,
not the longest allowed.  Recurrent layers have one state of an entry in the place of keys and
values.

R rows (completions being decoded)   N entries   K key-value heads   D head width
T own tokens, or an entry's capacity   M prompt tokens   E entries of a slab
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.ops.attention import ALIGNED
from groupwise.ops.operations import BlockedAttention

ALIGNS = ("cuda",)
"""Devices on whose memory-efficient kernel capacities are whole numbers of `ALIGNED`."""


def whole(tokens: int) -> int:
    """Tokens rounded up to what the GPU's kernel reads at once."""
    return -(-tokens // ALIGNED) * ALIGNED


def on_aligned_device(device: torch.device) -> bool:
    """True for a device on which capacities are whole numbers of `ALIGNED`."""
    return device.type in ALIGNS


class LayerCache:
    """Keys and values of one layer: (E, K, T, D) each, entry by entry, head by head, tokens in a
    row; widths may differ.

    What a `BlockedAttention` reads lies block by block, (E, K, T / block, block x D), and inside a
    block in an order of its own.
    """

    def __init__(
        self,
        entries: int,
        tokens: int,
        like: Tensor,
        blocked: BlockedAttention | None = None,
        like_value: Tensor | None = None,
    ) -> None:
        """like: keys (..., K, D) whose heads, width, type and device the slab takes.   blocked: the
        attention that reads it, where it lies block by block.   like_value: values, where they
        differ.
        """
        if like_value is None:
            like_value = like
        self.blocked = blocked
        self.block = 1
        if blocked is not None:
            self.block = blocked.block
        self.like = _without_entries(like)
        self.like_value = _without_entries(like_value)
        self.key_EKTD = self._slab(self.like, entries, tokens)
        self.value_EKTD = self._slab(self.like_value, entries, tokens)

    def _slab(self, like: Tensor, entries: int, tokens: int) -> Tensor:
        """Zeros, not whatever memory held: a hidden key has weight 0, but 0 x NaN is NaN."""
        _, heads, width = like.shape
        blocks = self.blocks(tokens)
        return like.new_zeros(entries, heads, blocks, self.block * width)

    @property
    def slab(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they lie."""
        return self.key_EKTD, self.value_EKTD

    @property
    def bytes(self) -> int:
        """Memory of the slabs."""
        return self.key_EKTD.nbytes + self.value_EKTD.nbytes

    def blocks(self, tokens: int) -> int:
        """Blocks that so many tokens fill."""
        return -(-tokens // self.block)

    def grow(self, entries: int, tokens: int) -> None:
        """Raise the capacity; what is there stays."""
        old_entries, _, old_blocks, _ = self.key_EKTD.shape
        blocks = self.blocks(tokens)
        if entries <= old_entries and blocks <= old_blocks:
            return
        entries = max(entries, old_entries)
        blocks = max(blocks, old_blocks)
        self.key_EKTD = _larger(self.key_EKTD, entries, blocks)
        self.value_EKTD = _larger(self.value_EKTD, entries, blocks)

    def write(self, first: int, key_NMKD: Tensor, value_NMKD: Tensor) -> None:
        """Whole prompts: N entries from `first` on get tokens 0 .. M - 1."""
        if self.blocked is not None:
            self.blocked.keep_entries(key_NMKD, value_NMKD, self.slab, first)
            return
        count, length = key_NMKD.shape[:2]
        key_NKTD = self.key_EKTD[first : first + count]
        value_NKTD = self.value_EKTD[first : first + count]
        key_NKTD[:, :, :length] = key_NMKD.transpose(1, 2)
        value_NKTD[:, :, :length] = value_NMKD.transpose(1, 2)

    def append(self, place: int | Tensor, key_RKD: Tensor, value_RKD: Tensor) -> None:
        """One token for each of the first R entries: at the same place in all, or at `place[r]`
        (int64 (R,)).
        """
        rows = key_RKD.shape[0]
        if isinstance(place, int):
            self.key_EKTD[:rows, :, place] = key_RKD
            self.value_EKTD[:rows, :, place] = value_RKD
        else:
            row_R = torch.arange(rows, device=place.device)
            self.key_EKTD[row_R, :, place] = key_RKD
            self.value_EKTD[row_R, :, place] = value_RKD

    def extend(self, entry: int, first: int, key_TKD: Tensor, value_TKD: Tensor) -> None:
        """Tokens of one entry from its place `first` on; not of a slab that lies block by block."""
        end = first + key_TKD.shape[0]
        places = slice(first, end)
        self.key_EKTD[entry, :, places] = key_TKD.transpose(0, 1)
        self.value_EKTD[entry, :, places] = value_TKD.transpose(0, 1)

    def move(self, moves: Sequence[tuple[int, int]], tokens: int) -> None:
        """Copy the first `tokens` tokens of entries to other entries' places, (source, target) by
        pair.
        """
        blocks = self.blocks(tokens)
        for slab in (self.key_EKTD, self.value_EKTD):
            for source, target in moves:
                slab[target, :, :blocks] = slab[source, :, :blocks]

    def view(self, entries: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first entries, (entries, K, tokens, D); no copy."""
        key_EKTD = self.key_EKTD[:entries, :, :tokens]
        value_EKTD = self.value_EKTD[:entries, :, :tokens]
        return key_EKTD, value_EKTD

    def entry(self, entry: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of an entry's first tokens, (K, tokens, D); no copy.

        It is not for a slab that lies block by block.
        """
        key_KTD = self.key_EKTD[entry, :, :tokens]
        value_KTD = self.value_EKTD[entry, :, :tokens]
        return key_KTD, value_KTD


def _without_entries(like: Tensor) -> Tensor:
    """Return (0, K, D) with the heads, width, type and device of keys or values (..., K, D)."""
    heads, width = like.shape[-2:]
    return like.new_empty(0, heads, width)


def _larger(slab: Tensor, entries: int, blocks: int) -> Tensor:
    """Return a slab with so many entries and blocks, behind those that it has zeros."""
    old_entries, heads, old_blocks, width = slab.shape
    larger = slab.new_zeros(entries, heads, blocks, width)
    larger[:old_entries, :, :old_blocks] = slab
    return larger


Place = tuple[int, int]
"""Names a recurrent layer's state: see `ops.recurrence.Recurrence`."""


class SavedEntry(NamedTuple):
    """A copy of one entry, for a sequence that waits without a place."""

    layers: dict[int, tuple[Tensor, Tensor]]
    """Keys and values by layer, as they lie in its slabs."""
    states: dict[Place, Tensor]


class KVCache:
    """Keys and values of all layers for one kind of entry (prompts, or completions), and how many
    of them live.
    """

    def __init__(self, entries: int, tokens: int, *, most_tokens: int) -> None:
        """For `entries` of `tokens` at first; growing stops at `most_tokens`."""
        self.capacity = [entries, tokens]
        self.most_tokens = most_tokens
        self.live = 0
        self.layers: dict[int, LayerCache] = {}
        self.states: dict[Place, Tensor] = {}
        """The entries' states (E, ...) of recurrent layers."""

    def layer(
        self,
        layer: int,
        like: Tensor,
        blocked: BlockedAttention | None = None,
        like_value: Tensor | None = None,
    ) -> LayerCache:
        """The slab of a layer, made when its first keys and values (..., K, D) arrive: layers may
        differ in shape, and in who reads them."""
        slab = self.layers.get(layer)
        if slab is None:
            entries, tokens = self.capacity
            slab = LayerCache(entries, tokens, like, blocked, like_value)
            self.layers[layer] = slab
        return slab

    def state(self, place: Place, like: Tensor) -> Tensor:
        """The states of all entries, made when the first one arrives.   like: states (..., of an
        entry).
        """
        if place not in self.states:
            entries = self.capacity[0]
            shape = like.shape[1:]
            self.states[place] = like.new_zeros(entries, *shape)
        return self.states[place]

    @property
    def bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(slab.bytes for slab in self.layers.values())

    def clear(self) -> None:
        """Drop all entries.  The slabs stay; states are made anew."""
        self.live = 0
        self.states = {}

    def use_again(self, needed: KVCache) -> None:
        """Be at least as large as a cache that is needed."""
        self.most_tokens = max(self.most_tokens, needed.most_tokens)
        self.reserve(*needed.capacity)

    def reserve(self, entries: int, tokens: int) -> None:
        """Grow, by doubling, to hold so much."""
        assert tokens <= self.most_tokens
        while self.capacity[0] < entries:
            self.capacity[0] *= 2
        while self.capacity[1] < tokens:
            doubled = 2 * self.capacity[1]
            self.capacity[1] = min(doubled, self.most_tokens)
        for slab in self.layers.values():
            slab.grow(*self.capacity)
        for place, old in self.states.items():
            missing = self.capacity[0] - old.shape[0]
            if missing > 0:
                shape = old.shape[1:]
                zeros = old.new_zeros(missing, *shape)
                self.states[place] = torch.cat([old, zeros])

    def take(self, entry: int, tokens: int) -> SavedEntry:
        """A copy of an entry's first tokens, by layer."""
        saved = SavedEntry({}, {})
        for place, state_EX in self.states.items():
            saved.states[place] = state_EX[entry].clone()
        for layer, slab in self.layers.items():
            blocks = slab.blocks(tokens)
            key_KTD = slab.key_EKTD[entry, :, :blocks].clone()
            value_KTD = slab.value_EKTD[entry, :, :blocks].clone()
            saved.layers[layer] = (key_KTD, value_KTD)
        return saved

    def put(self, entry: int, saved: SavedEntry) -> None:
        """What `take` has copied becomes an entry's first tokens, which are within its capacity."""
        for layer, (key_KTD, value_KTD) in saved.layers.items():
            slab = self.layers[layer]
            blocks = key_KTD.shape[1]
            slab.key_EKTD[entry, :, :blocks] = key_KTD
            slab.value_EKTD[entry, :, :blocks] = value_KTD
        for place, state in saved.states.items():
            self.states[place][entry] = state

    def drop(self, ended: Sequence[int], tokens: int) -> list[int]:
        """Remove entries.  Returns the new order: entry i is what was entry `order[i]`; `tokens`:
        longest that is kept.
        """
        order = dense_order(self.live, ended)
        moved = []
        for target, source in enumerate(order):
            if source != target:
                moved.append((source, target))
        self.live = len(order)
        for slab in self.layers.values():
            slab.move(moved, tokens)
        for states in self.states.values():
            for source, target in moved:
                states[target] = states[source]
        return order


def dense_order(count: int, ended: Sequence[int]) -> list[int]:
    """The entries that stay, last ones moved into the gaps.

    >>> dense_order(6, [1, 4])
    [0, 5, 2, 3]
    """
    gone = set(ended)
    staying = count - len(gone)
    order = list(range(staying))
    movers = [entry for entry in range(staying, count) if entry not in gone]
    gaps = [entry for entry in range(staying) if entry in gone]
    for gap, mover in zip(gaps, movers, strict=True):
        order[gap] = mover
    return order
