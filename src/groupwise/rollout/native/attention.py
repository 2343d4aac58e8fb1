"""The KV cache of the native engine and the attention over it: a prompt's keys and values once for
its whole group, a completion's own beside it.

Three kinds of tokens attend: those of prompts (`Prefill`), the next token of every row (`Decode`),
and several at once behind what has been kept (`Extend`).  Recurrent layers have states in the place
of keys and values, one of an entry: a completion begins with a copy of its prompt's.  Of both each
layer has slabs whose live entries stand densely at the front, so that attention reads plain
views: when an entry ends, the last one is moved into its place (one copy of one entry; every step
    reads all of them).  Slabs grow by doubling, so memory follows the longest living completion,
    not the longest allowed.

A decoded token attends to its prompt and to its own completion; a prompt's keys are never copied
per row.  Slabs that lie block by block are read by `decoding.decode_attention`, prompt by prompt.
Over others, as on GPUs, the two parts are computed apart and merged by their log-sum-exps, which is
exact: a prompt's keys meet the queries of its whole group in one product, and key-value heads all
the query heads that share them.

R rows (completions being decoded)   P live prompts   N most rows of a prompt   H query heads   K
key-value heads   D head width T own tokens, or an entry's capacity   M prompt tokens   E entries
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.errors import EngineError
from groupwise.models.attention import PackedAttention
from groupwise.ops import decoding
from groupwise.ops.attention import ALIGNED, EVERYTHING, Query, Reach, behind, bias_of, part
from groupwise.ops.recurrence import Recurrence, Segments
from groupwise.records import Layout


class LayerCache:
    """Keys and values of one layer: (E, K, T, D) each, entry by entry, head by head, tokens in a
    row; widths may differ.

    What `decoding.decode_attention` reads lies block by block, (E, K, T / block, block x D), and
    inside a block in an order of its own.
    """

    def __init__(
        self,
        entries: int,
        tokens: int,
        like: Tensor,
        block: int = 1,
        like_value: Tensor | None = None,
    ) -> None:
        """like: keys (..., K, D) whose heads, width, type and device the slab takes.   like_value:
        values, where they differ.
        block: tokens that lie together; see `decoding.tokens_per_block`."""
        self.block = block
        self.like, self.like_value = (
            x.new_empty(0, *x.shape[-2:])
            for x in (like, like if like_value is None else like_value)
        )
        # Zeros, not whatever memory held: a hidden key has weight 0, but 0 x NaN is NaN.
        self.key_EKTD, self.value_EKTD = (
            x.new_zeros(entries, x.shape[-2], self.blocks(tokens), block * x.shape[-1])
            for x in (self.like, self.like_value)
        )

    @property
    def blocked(self) -> bool:
        """True if it lies block by block."""
        return self.block > 1

    @property
    def slab(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they lie."""
        return self.key_EKTD, self.value_EKTD

    def blocks(self, tokens: int) -> int:
        """Blocks that so many tokens fill."""
        return -(-tokens // self.block)

    def grow(self, entries: int, tokens: int) -> None:
        """Raise the capacity; what is there stays."""
        old_entries, _, old_blocks, _ = self.key_EKTD.shape
        blocks = self.blocks(tokens)
        if entries <= old_entries and blocks <= old_blocks:
            return
        for name in ("key_EKTD", "value_EKTD"):
            old = getattr(self, name)
            new = old.new_zeros(
                max(entries, old_entries), old.shape[1], max(blocks, old_blocks), old.shape[3]
            )
            new[:old_entries, :, :old_blocks] = old
            setattr(self, name, new)

    def write(self, first: int, key_NMKD: Tensor, value_NMKD: Tensor) -> None:
        """Whole prompts: N entries from `first` on get tokens 0 .. M - 1."""
        count, length = key_NMKD.shape[:2]
        if self.blocked:
            decoding.keep_entries(key_NMKD, value_NMKD, self.slab, first)
        else:
            self.key_EKTD[first : first + count, :, :length] = key_NMKD.transpose(1, 2)
            self.value_EKTD[first : first + count, :, :length] = value_NMKD.transpose(1, 2)

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
        places = slice(first, first + key_TKD.shape[0])
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
        return self.key_EKTD[:entries, :, :tokens], self.value_EKTD[:entries, :, :tokens]


Place = tuple[int, int]
"""Names a recurrent layer's state: see `ops.recurrence.Recurrence`."""


class Kept(NamedTuple):
    """What is kept of one entry."""

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
        """Of recurrent layers: the entries' states (E, ...)."""

    def layer(
        self, layer: int, like: Tensor, block: int = 1, like_value: Tensor | None = None
    ) -> LayerCache:
        """The slab of a layer, made when its first keys and values (..., K, D) arrive: layers may
        differ in shape, and in who reads them."""
        slab = self.layers.get(layer)
        if slab is None:
            slab = self.layers[layer] = LayerCache(
                self.capacity[0], self.capacity[1], like, block, like_value
            )
        return slab

    def state(self, place: Place, like: Tensor) -> Tensor:
        """The states of all entries, made when the first one arrives.   like: states (..., of an
        entry).
        """
        if place not in self.states:
            self.states[place] = like.new_zeros(self.capacity[0], *like.shape[1:])
        return self.states[place]

    def reserve(self, entries: int, tokens: int) -> None:
        """Grow, by doubling, to hold so much."""
        assert tokens <= self.most_tokens
        while self.capacity[0] < entries:
            self.capacity[0] *= 2
        while self.capacity[1] < tokens:
            self.capacity[1] = min(2 * self.capacity[1], self.most_tokens)
        for slab in self.layers.values():
            slab.grow(*self.capacity)
        for place, old in self.states.items():
            if old.shape[0] < self.capacity[0]:
                self.states[place] = torch.cat(
                    [old, old.new_zeros(self.capacity[0] - old.shape[0], *old.shape[1:])]
                )

    def take(self, entry: int, tokens: int) -> Kept:
        """A copy of an entry's first tokens, by layer."""
        kept = Kept({}, {place: slab[entry].clone() for place, slab in self.states.items()})
        for layer, slab in self.layers.items():
            blocks = slab.blocks(tokens)
            kept.layers[layer] = (
                slab.key_EKTD[entry, :, :blocks].clone(),
                slab.value_EKTD[entry, :, :blocks].clone(),
            )
        return kept

    def put(self, entry: int, kept: Kept) -> None:
        """What `take` has copied becomes an entry's first tokens, which are within its capacity."""
        for layer, (key_KTD, value_KTD) in kept.layers.items():
            slab, blocks = self.layers[layer], key_KTD.shape[1]
            slab.key_EKTD[entry, :, :blocks], slab.value_EKTD[entry, :, :blocks] = (
                key_KTD,
                value_KTD,
            )
        for place, state in kept.states.items():
            self.states[place][entry] = state

    def drop(self, ended: Sequence[int], tokens: int) -> list[int]:
        """Remove entries.  Returns the new order: entry i is what was entry `order[i]`; `tokens`:
        longest that is kept.
        """
        order = dense_order(self.live, ended)
        moved = [(source, target) for target, source in enumerate(order) if source != target]
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
    movers = iter([i for i in range(staying, count) if i not in gone])
    return [next(movers) if i in gone else i for i in range(staying)]


class KeepingAttend:
    """The protocol `models.attention.Attend` for sampling: keys, values and states are kept."""

    _segments: Segments

    @property
    def recurrent(self) -> Recurrence:
        """States of the segments, which are kept.  Made anew each time: an attribute would refer
        back here, and hold the stores until garbage is collected."""
        return Recurrence(self._segments, self._states, self._keep_states)

    def _states(self, place: Place) -> Tensor | None:
        """Before the new tokens; None: zeros."""
        raise NotImplementedError

    def _keep_states(self, place: Place, state_NX: Tensor) -> None:
        raise NotImplementedError

    def sequence_lengths(self, position_T: Tensor) -> Tensor:
        """Tokens of each row's sequence so far: who draws a token of it does not know how long it
        will be.
        """
        return position_T + 1


class Prefill(KeepingAttend):
    """Packed prompts attend to themselves; their keys and values are kept."""

    def __init__(self, store: KVCache, lengths: Sequence[int]) -> None:
        """Prompts of these lengths in one stream become the store's entries behind those that live."""
        *starts, total = accumulate(lengths, initial=0)
        self.lengths, self.starts = lengths, starts
        self.store, self.first = store, store.live
        self._seen: set[int] = set()
        self._segments = Segments(starts, lengths, total)
        self._packed = PackedAttention(
            Layout(
                start=tuple(starts), length=tuple(lengths), prefix=(-1,) * len(lengths), total=total
            )
        )

    def __call__(self, query: Query) -> Tensor:
        """The protocol `models.attention.Attend`.  Raises EngineError for the second of two layers
        with one number.
        """
        layer, key_TKD, value_TKE = query.layer, query.key_TKD, query.value_TKE
        if layer in self._seen:
            raise EngineError(
                f"two attention layers of the model have the number {layer} (layer_idx), and keys"
                " and values are kept by number: give each its own; a module that stands in two"
                " places has to be copied first"
            )
        self._seen.add(layer)
        plain = (
            query.cap is None
            and query.reach.chunk is None
            and query.sinks_H is None
            and key_TKD.shape == value_TKE.shape
        )
        slab = self.store.layer(
            layer, key_TKD, decoding.tokens_per_block(key_TKD) if plain else 1, value_TKE
        )
        first = 0
        for length, alike in groupby(self.lengths):
            count, start = len(list(alike)), self.starts[first]
            prompts = (
                x[start : start + count * length].unflatten(0, (count, length))
                for x in (key_TKD, value_TKE)
            )
            slab.write(self.first + first, *prompts)
            first += count
        return self._packed(query)

    def _states(self, place: Place) -> Tensor | None:
        return None

    def _keep_states(self, place: Place, state_NX: Tensor) -> None:
        self.store.state(place, state_NX)[self.first : self.first + len(self.lengths)] = state_NX

    def sequence_lengths(self, position_T: Tensor) -> Tensor:
        """See `PackedAttention.sequence_lengths`."""
        return self._packed.sequence_lengths(position_T)


class Decode(KeepingAttend):
    """New tokens of rows: a token's key and value are kept, then it attends to its prompt and its
    own completion.

    Who belongs to whom is written to the device once for an arrangement of rows, in one copy.  With
    a fixed size everything that changes between tokens stays at its place, as what a CUDA graph
    repeats must.
    """

    def __init__(
        self,
        prompts: KVCache,
        own: KVCache,
        device: torch.device,
        size: tuple[int, int, int] | None = None,
    ) -> None:
        """size: rows R, prompts P and rows of a prompt N that are computed, at least those that
        there are; None: those.
        """
        assert device.type not in ALIGNS or not (
            prompts.most_tokens % ALIGNED or own.most_tokens % ALIGNED
        )
        self.prompts, self.own, self.device, self.size = prompts, own, device, size
        self._numbers: Tensor | None = None

    def arrange(
        self, prompt_length_P: Sequence[int], entry_R: Sequence[int], length_R: Sequence[int]
    ) -> None:
        """The live rows have changed: row r belongs to prompt entry `entry_R[r]` and has kept
        `length_R[r]` own tokens.

        Rows behind them, up to a fixed size, write into entries of their own, which nobody reads.
        """
        self.prompt_length_P, self.entry_R, self.length_R = (
            list(prompt_length_P),
            list(entry_R),
            list(length_R),
        )
        self._rows = decoding.Rows(entry_R, prompt_length_P)
        rows_P = self._rows.rows_P
        places = {row: place for of_prompt in rows_P for place, row in enumerate(of_prompt)}
        place_R = [places[row] for row in range(len(entry_R))]
        position_R = [
            prompt_length_P[entry] + length - 1
            for entry, length in zip(entry_R, length_R, strict=True)
        ]
        rows, entries, members = self.size or (
            len(entry_R),
            len(prompt_length_P),
            max(map(len, rows_P)),
        )
        columns = (
            *(
                (length_R, rows, 0),
                (position_R, rows, -1),
                (entry_R, rows, 0),
                (place_R, rows, 0),
                (prompt_length_P, entries, 1),
            ),
            *((of_prompt, members, 0) for of_prompt in rows_P),
            ([], (entries - len(rows_P)) * members, 0),
        )
        numbers = torch.tensor(
            [
                n
                for column, size, filler in columns
                for n in (*column, *[filler] * (size - len(column)))
            ]
        )
        if self.size is None or self._numbers is None:
            self._numbers = numbers.to(self.device)
        else:
            self._numbers.copy_(numbers)
        counts = (rows, rows, rows, rows, entries, entries * members)
        self._length_R, self.position_R, self._entry_R, self._place_R, self._end_P, member_PN = (
            self._numbers.split(counts)
        )
        self._member_PN = member_PN.view(entries, members)
        self._segments = Segments(range(len(entry_R)), [1] * len(entry_R), len(entry_R))
        self._uniform = self.size is None and len(set(length_R)) == 1
        self.longest_prompt = (
            self.prompts.capacity[1] if self.size else self._places(max(prompt_length_P))
        )
        self._index: dict[int, tuple[Tensor, Tensor]] = {}

    def _states(self, place: Place) -> Tensor:
        """Of the rows, before their new tokens: of a row without any other its prompt's."""
        prompt = self.prompts.states[place]
        own = self.own.state(place, prompt)
        if fresh := [row for row, length in enumerate(self.length_R) if length == 1]:
            own[fresh] = prompt[[self.entry_R[row] for row in fresh]]
        return own[: len(self.entry_R)]

    def _keep_states(self, place: Place, state_RX: Tensor) -> None:
        self.own.states[place][: state_RX.shape[0]] = state_RX

    def next(self) -> Tensor:
        """Begin a step: every row has one token more.  Returns the positions (R,) of the new
        tokens.
        """
        self._length_R += 1
        self.position_R += 1
        if self.size is None:
            self.length_R = [length + 1 for length in self.length_R]
            self.longest = max(self.length_R)
            self.places = self._places(self.longest)
            self.own.reserve(len(self.length_R), self.places)
        else:  # of what a graph repeats the capacity is there, and all of it is read
            self.longest = self.places = self.own.capacity[1]
            self._index = {}
        self._own_bias: dict[Reach, Tensor | None] = {}
        self._prompt_bias: dict[tuple[Reach, int], Tensor | None] = {}
        return self.position_R

    def _places(self, tokens: int) -> int:
        """The places that are read of an entry with so many tokens."""
        return whole(tokens) if self.device.type in ALIGNS else tokens

    @property
    def drawn_R(self) -> Tensor:
        """Which token of its completion each row draws in this step, from 0."""
        return self._length_R

    def __call__(self, query: Query) -> Tensor:
        """See `models.attention.Attend`, row by row: (R, H, E)."""
        query_RHD, key_RKD, value_RKE = query.query_THD, query.key_TKD, query.value_TKE
        (count, heads, width), shared = query_RHD.shape, key_RKD.shape[1]
        reach = query.reach.within(self.longest_prompt + self.longest)
        prompt = self.prompts.layers[query.layer]
        own = self.own.layer(query.layer, key_RKD, prompt.block, value_RKE)
        if prompt.blocked:
            assert query_RHD.dtype == key_RKD.dtype == value_RKE.dtype
            slabs = own.slab, prompt.slab
            rows = self._rows, self._length_R
            return decoding.decode_attention(
                query_RHD, key_RKD, value_RKE, *slabs, *rows, query.scale, reach.window
            )
        own.append(self.longest - 1 if self._uniform else self._length_R - 1, key_RKD, value_RKE)

        query_RKQD, how = (
            query_RHD.reshape(count, shared, heads // shared, width),
            (
                query.scale,
                query.cap,
            ),
        )
        own_RKQD, own_lse_RKQ = part(
            query_RKQD,
            *own.view(count, self.places),
            *how,
            self._bias_of_own(reach, query_RHD.dtype),
        )
        if query.sinks_H is not None:
            sinks_KQ = query.sinks_H.to(own_lse_RKQ.dtype).view(shared, -1)
            own_RKQD = own_RKQD * torch.sigmoid(own_lse_RKQ - sinks_KQ)[..., None].to(
                own_RKQD.dtype
            )
            own_lse_RKQ = torch.logaddexp(own_lse_RKQ, sinks_KQ)
        to_prompt, from_prompt = self._indices(shared)
        prompts, places = self._end_P.shape[0], to_prompt.shape[0]
        query_PKXD = (
            query_RKQD.reshape(count * shared, -1)
            .index_select(0, to_prompt)
            .view(prompts, shared, -1, width)
        )
        bias = self._bias_of_prompt(reach, heads // shared, query_RHD.dtype)
        prompt_PKXD, prompt_lse_PKX = part(
            query_PKXD, *prompt.view(prompts, self.longest_prompt), *how, bias
        )
        prompt_RKQD = (
            prompt_PKXD.reshape(places, -1).index_select(0, from_prompt).view(own_RKQD.shape)
        )
        prompt_lse_RKQ = (
            prompt_lse_PKX.reshape(places, -1).index_select(0, from_prompt).view(own_lse_RKQ.shape)
        )
        # softmax over the union: each part weighs in with its share of the sum of exponentials
        share_RKQ1 = torch.sigmoid(prompt_lse_RKQ - own_lse_RKQ)[..., None].to(own_RKQD.dtype)
        return torch.lerp(own_RKQD, prompt_RKQD, share_RKQ1).reshape(count, heads, -1)

    def _indices(self, shared: int) -> tuple[Tensor, Tensor]:
        """Rows x heads -> prompts x heads x members, and back.

        A prompt with fewer live rows than others computes some row 0 again; nothing reads that.
        """
        if shared not in self._index:
            head_K = torch.arange(shared, device=self.device)
            to_prompt = self._member_PN[:, None, :] * shared + head_K[None, :, None]
            from_prompt = (self._entry_R[:, None] * shared + head_K[None]) * self._member_PN.shape[
                1
            ] + self._place_R[:, None]
            self._index[shared] = (to_prompt.flatten(), from_prompt.flatten())
        return self._index[shared]

    def _bias_of_own(self, reach: Reach, dtype: torch.dtype) -> Tensor | None:
        """(R, 1, 1, places): hides the places behind completions, and those that are out of reach."""
        if reach not in self._own_bias:
            bias = None
            if not (self._uniform and self.places == self.longest and reach == EVERYTHING):
                place_T = torch.arange(self.places, device=self.device)
                hidden_RT = place_T[None] >= self._length_R[:, None]
                if reach != EVERYTHING:
                    prompt_R = self.position_R + 1 - self._length_R
                    hidden_RT |= place_T[None] < (reach.first(self.position_R) - prompt_R)[:, None]
                bias = bias_of(hidden_RT, dtype)[:, None, None, :]
            self._own_bias[reach] = bias
        return self._own_bias[reach]

    def _bias_of_prompt(self, reach: Reach, queries: int, dtype: torch.dtype) -> Tensor | None:
        """(P, 1, 1 or N x queries, places): hides the places behind prompts, and those that are out
        of reach.

        queries: heads that share a key.
        """
        if (reach, queries) not in self._prompt_bias:
            bias = None
            if (
                self.size is not None
                or min(self.prompt_length_P) < self.longest_prompt
                or reach != EVERYTHING
            ):
                place_M = torch.arange(self.longest_prompt, device=self.device)
                hidden_PXM = (place_M[None] >= self._end_P[:, None])[:, None]
                if reach != EVERYTHING:
                    first_PN = torch.as_tensor(reach.first(self.position_R[self._member_PN]))
                    hidden_PXM = (hidden_PXM | (place_M < first_PN[..., None])).repeat_interleave(
                        queries, 1
                    )
                bias = bias_of(hidden_PXM, dtype)[:, None]
            self._prompt_bias[reach, queries] = bias
        return self._prompt_bias[reach, queries]


class Extend(KeepingAttend):
    """Several new tokens of rows at once: their keys and values are kept, and each attends to its
    prompt, to what its row has kept, and to the new tokens before it."""

    def __init__(
        self,
        prompts: KVCache,
        own: KVCache,
        first: int,
        prompt_length_P: Sequence[int],
        entry_R: Sequence[int],
        kept_R: Sequence[int],
        count_R: Sequence[int],
    ) -> None:
        """Row r is the own store's entry `first` + r, behind prompt entry `entry_R[r]`; behind
        `kept_R[r]` own tokens it gets `count_R[r]`, which lie in the stream row by row.  The rows
        with the most new tokens come first.
        """
        assert list(count_R) == sorted(count_R, reverse=True) and min(count_R) > 0
        self.prompts, self.own, self.first = prompts, own, first
        self.prompt_length_P, self.entry_R, self.kept_R, self.count_R = (
            prompt_length_P,
            entry_R,
            kept_R,
            count_R,
        )
        *self.start_R, total = accumulate(count_R, initial=0)
        own.reserve(
            first + len(entry_R),
            max(kept + count for kept, count in zip(kept_R, count_R, strict=True)),
        )
        self._segments = Segments(self.start_R, count_R, total)

    def _states(self, place: Place) -> Tensor:
        prompt = self.prompts.states[place]
        own = self.own.state(place, prompt)
        rows = enumerate(zip(self.kept_R, self.entry_R, strict=True), self.first)
        return torch.stack([own[row] if kept else prompt[entry] for row, (kept, entry) in rows])

    def _keep_states(self, place: Place, state_RX: Tensor) -> None:
        self.own.states[place][self.first : self.first + state_RX.shape[0]] = state_RX

    def __call__(self, query: Query) -> Tensor:
        """See `models.attention.Attend`."""
        key_TKD, value_TKE = query.key_TKD, query.value_TKE
        prompt = self.prompts.layers[query.layer]
        own = self.own.layer(query.layer, key_TKD, prompt.block, value_TKE)
        if prompt.blocked:
            return self._token_by_token(own, prompt, query)
        outputs = []
        for r, (start, count, kept, entry) in enumerate(
            zip(self.start_R, self.count_R, self.kept_R, self.entry_R, strict=True)
        ):
            new = slice(start, start + count)
            own.extend(self.first + r, kept, key_TKD[new], value_TKE[new])
            before = self.prompt_length_P[entry]
            keys, values = (
                torch.cat(
                    [shared[entry, :, :before], mine[self.first + r, :, : kept + count]], 1
                ).transpose(0, 1)
                for shared, mine in (
                    (prompt.key_EKTD, own.key_EKTD),
                    (prompt.value_EKTD, own.value_EKTD),
                )
            )
            outputs.append(
                behind(
                    query._replace(query_THD=query.query_THD[new], key_TKD=keys, value_TKE=values)
                )
            )
        return torch.cat(outputs)

    def _token_by_token(self, own: LayerCache, prompt: LayerCache, query: Query) -> Tensor:
        """Over slabs that lie block by block, one token of every row at a time; products are over
        the whole stream.
        """
        slabs = (own.key_EKTD[self.first :], own.value_EKTD[self.first :]), prompt.slab
        out_THD = torch.empty_like(query.query_THD, memory_format=torch.contiguous_format)
        for place_A, rows, length_A in self._one_by_one:
            new, key, value = (
                x.index_select(0, place_A)
                for x in (query.query_THD, query.key_TKD, query.value_TKE)
            )
            out_THD[place_A] = decoding.decode_attention(
                new, key, value, *slabs, rows, length_A, query.scale, query.reach.window
            )
        return out_THD

    @cached_property
    def _one_by_one(self) -> list[tuple[Tensor, decoding.Rows, Tensor]]:
        """For the first, second ... new token of the rows that have one: places in the stream, who
        has which prompt, and own tokens with it."""
        start_R, kept_R, turns = torch.tensor(self.start_R), torch.tensor(self.kept_R), []
        for t in range(self.count_R[0]):
            active = sum(count > t for count in self.count_R)
            rows = decoding.Rows(self.entry_R[:active], self.prompt_length_P)
            turns.append((start_R[:active] + t, rows, kept_R[:active] + t + 1))
        return turns


ALIGNS = ("cuda",)
"""Devices on whose memory-efficient kernel capacities are whole numbers of `ALIGNED`."""


def whole(tokens: int) -> int:
    """Tokens rounded up to what the GPU's kernel reads at once."""
    return -(-tokens // ALIGNED) * ALIGNED
