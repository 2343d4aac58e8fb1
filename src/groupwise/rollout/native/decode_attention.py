"""Attention while sampling: what a token attends to, and which keys and values are kept.

Three kinds of tokens attend: those of prompts (`Prefill`), the next token of every row (`Decode`),
and several at once behind what has been kept (`Extend`).  Recurrent layers read and write states
instead: a completion begins with a copy of its prompt's.

A decoded token attends to its prompt and to its own completion.  A prompt's keys are never copied
per row.  Slabs that lie block by block are read by a `BlockedAttention`, prompt by prompt.
Over others, as on GPUs, the two parts are computed apart and merged by their log-sum-exps, which is
exact: a prompt's keys meet the queries of its whole group in one product, and key-value heads all
the query heads that share them.

R rows (completions being decoded)   P live prompts   N most rows of a prompt   H query heads
K key-value heads   Q query heads of a key-value head   D head width   T own tokens
M prompt tokens   X queries of a prompt and key-value head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.errors import EngineError
from groupwise.models.attention import PackedAttention
from groupwise.ops.attention import ALIGNED, behind, bias_of, part
from groupwise.ops.operations import BlockedAttention, DecodedRows, operations
from groupwise.ops.query import EVERYTHING, Query, Reach
from groupwise.ops.recurrence import Recurrence, Segments
from groupwise.records import Layout
from groupwise.rollout.native.kv_cache import KVCache, LayerCache, Place, on_aligned_device, whole


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
        """Make entries of the store, behind those that live, for prompts of these lengths in one
        stream.
        """
        *starts, total = accumulate(lengths, initial=0)
        self.lengths = lengths
        self.starts = starts
        self.store = store
        self.first = store.live
        self._seen: set[int] = set()
        self._segments = Segments(starts, lengths, total)
        layout = Layout(
            start=tuple(starts),
            length=tuple(lengths),
            prefix=(-1,) * len(lengths),
            total=total,
        )
        self._packed = PackedAttention(layout)

    def __call__(self, query: Query) -> Tensor:
        """The protocol `models.attention.Attend`.  Raises EngineError for the second of two layers
        with one number.
        """
        layer = query.layer
        key_TKD = query.key_TKD
        value_TKE = query.value_TKE
        if layer in self._seen:
            raise EngineError(
                f"two attention layers of the model have the number {layer} (layer_idx), and keys"
                " and values are kept by number: give each its own; a module that stands in two"
                " places has to be copied first"
            )
        self._seen.add(layer)
        blocked = None
        if _plain(query):
            blocked = operations().blocked_attention(key_TKD)
        slab = self.store.layer(layer, key_TKD, blocked, value_TKE)
        first = 0
        for length, prompts in groupby(self.lengths):
            count = len(list(prompts))
            start = self.starts[first]
            end = start + count * length
            tokens = slice(start, end)
            key_NMKD = key_TKD[tokens].unflatten(0, (count, length))
            value_NMKE = value_TKE[tokens].unflatten(0, (count, length))
            entry = self.first + first
            slab.write(entry, key_NMKD, value_NMKE)
            first += count
        return self._packed(query)

    def _states(self, place: Place) -> Tensor | None:
        return None

    def _keep_states(self, place: Place, state_NX: Tensor) -> None:
        states = self.store.state(place, state_NX)
        end = self.first + len(self.lengths)
        states[self.first : end] = state_NX

    def sequence_lengths(self, position_T: Tensor) -> Tensor:
        """See `PackedAttention.sequence_lengths`."""
        return self._packed.sequence_lengths(position_T)


def _plain(query: Query) -> bool:
    """Return True for attention without a soft cap, chunks, sinks or values of another width."""
    if query.cap is not None or query.sinks_H is not None:
        return False
    if query.reach.chunk is not None:
        return False
    return query.key_TKD.shape == query.value_TKE.shape


def rows_by_prompt(entry_R: Sequence[int], prompts: int) -> list[list[int]]:
    """The rows of each prompt entry.

    >>> rows_by_prompt([0, 2, 0], 3)
    [[0, 2], [], [1]]
    """
    rows_P: list[list[int]] = [[] for _ in range(prompts)]
    for row, entry in enumerate(entry_R):
        rows_P[entry].append(row)
    return rows_P


def filled_up(column: Sequence[int], size: int, filler: int) -> list[int]:
    """The numbers of a column, followed by as many fillers as bring it to `size`."""
    missing = size - len(column)
    return [*column, *[filler] * missing]


def sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy whole numbers to a device; the host does not wait for what a GPU does before.

    A GPU copies from pinned memory by itself, from other memory only while the host waits.
    """
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The rows that live: row r belongs to prompt entry `entry_R[r]` and has kept `length_R[r]` own
    tokens.
    """

    prompt_length_P: Sequence[int]
    """Tokens of each prompt entry."""
    entry_R: Sequence[int]
    length_R: Sequence[int]

    @property
    def most_members(self) -> int:
        """Rows of the prompt that has the most."""
        rows_P = rows_by_prompt(self.entry_R, len(self.prompt_length_P))
        return max(len(members) for members in rows_P)

    def after(self, tokens: int) -> LiveRows:
        """Return the same rows, each with so many own tokens more."""
        longer_R = [length + tokens for length in self.length_R]
        return LiveRows(self.prompt_length_P, self.entry_R, longer_R)


class DecodeSize(NamedTuple):
    """The size that the rows of a CUDA graph are filled up to."""

    rows: int
    prompts: int
    members: int
    """Rows of a prompt."""
    prompt_tokens: int = 0
    """Places that are read of a prompt."""
    tokens: int = 0
    """Places that are read of a row."""


class Decode(KeepingAttend):
    """New tokens of rows: a token's key and value are kept, then it attends to its prompt and its
    own completion.

    Who belongs to whom is written to the device once for an arrangement of rows, in one copy.  With
    a fixed size everything that changes between tokens stays at its place, as a CUDA graph needs
    it.
    """

    def __init__(
        self,
        prompts: KVCache,
        own: KVCache,
        device: torch.device,
        size: DecodeSize | None = None,
    ) -> None:
        """size: rows, prompts, rows of a prompt and places that are computed, at least those that
        there are; None: those that there are.
        """
        if on_aligned_device(device):
            assert prompts.most_tokens % ALIGNED == 0 and own.most_tokens % ALIGNED == 0
        self.prompts = prompts
        self.own = own
        self.device = device
        self.size = size
        self._numbers: Tensor | None = None

    def arrange(self, rows: LiveRows) -> None:
        """Take the rows that live from now on.

        Rows behind them, up to a fixed size, write into entries of their own, which nobody reads.
        """
        self.prompt_length_P = list(rows.prompt_length_P)
        self.entry_R = list(rows.entry_R)
        self.length_R = list(rows.length_R)
        prompts = len(self.prompt_length_P)
        self._rows_P = rows_by_prompt(self.entry_R, prompts)
        self._rows: Any = None
        self._write_columns(self._rows_P)
        count = len(self.entry_R)
        ones = [1] * count
        self._segments = Segments(range(count), ones, count)
        if self.size is None:
            longest = max(self.prompt_length_P)
            self.longest_prompt = self._places(longest)
            lengths = set(self.length_R)
            self._uniform = len(lengths) == 1
        else:
            self.longest_prompt = self.size.prompt_tokens
            self._uniform = False
        self._index: dict[int, tuple[Tensor, Tensor]] = {}

    def _write_columns(self, rows_P: Sequence[Sequence[int]]) -> None:
        """Write the arrangement to the device, all columns in one copy.

        rows_P: the rows of each prompt.
        """
        size = self.size
        if size is None:
            most_members = max(len(members) for members in rows_P)
            size = DecodeSize(len(self.entry_R), len(rows_P), most_members)
        place_R = [0] * len(self.entry_R)
        member_PN: list[int] = []
        for members in rows_P:
            for place, row in enumerate(members):
                place_R[row] = place
            member_PN += filled_up(members, size.members, 0)
        position_R = []
        for entry, length in zip(self.entry_R, self.length_R, strict=True):
            position_R.append(self.prompt_length_P[entry] + length - 1)
        columns = (
            filled_up(self.length_R, size.rows, 0),
            filled_up(position_R, size.rows, -1),
            filled_up(self.entry_R, size.rows, 0),
            filled_up(place_R, size.rows, 0),
            filled_up(self.prompt_length_P, size.prompts, 1),
            filled_up(member_PN, size.prompts * size.members, 0),
        )
        numbers = sent(list(chain.from_iterable(columns)), self.device)
        if self.size is None or self._numbers is None:
            self._numbers = numbers
        else:
            self._numbers.copy_(numbers)
        sizes = [len(column) for column in columns]
        views = self._numbers.split(sizes)
        self._length_R, self.position_R = views[0], views[1]
        self._entry_R, self._place_R = views[2], views[3]
        self._end_P = views[4]
        self._member_PN = views[5].view(size.prompts, size.members)

    def _states(self, place: Place) -> Tensor:
        """States of the rows before their new tokens: a row that begins takes its prompt's."""
        prompt = self.prompts.states[place]
        own = self.own.state(place, prompt)
        fresh = [row for row, length in enumerate(self.length_R) if length == 1]
        if fresh:
            entries = [self.entry_R[row] for row in fresh]
            own[fresh] = prompt[entries]
        rows = len(self.entry_R)
        return own[:rows]

    def _keep_states(self, place: Place, state_RX: Tensor) -> None:
        rows = state_RX.shape[0]
        self.own.states[place][:rows] = state_RX

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
            rows = len(self.length_R)
            self.own.reserve(rows, self.places)
        else:  # what a graph repeats reads the same places at every token
            self.longest = self.places = self.size.tokens
            self._index = {}
        self._first: dict[Reach, Tensor | None] = {}
        self._own_bias: dict[Reach, Tensor | None] = {}
        self._prompt_bias: dict[tuple[Reach, int], Tensor | None] = {}
        return self.position_R

    def _places(self, tokens: int) -> int:
        """The places that are read of an entry with so many tokens."""
        return whole(tokens) if on_aligned_device(self.device) else tokens

    @property
    def drawn_R(self) -> Tensor:
        """Which token of its completion each row draws in this step, from 0."""
        return self._length_R

    def __call__(self, query: Query) -> Tensor:
        """See `models.attention.Attend`, row by row: (R, H, E)."""
        query_RHD = query.query_THD
        key_RKD = query.key_TKD
        value_RKE = query.value_TKE
        rows, heads, width = query_RHD.shape
        shared = key_RKD.shape[1]
        longest_sequence = self.longest_prompt + self.longest
        reach = query.reach.within(longest_sequence)
        prompt = self.prompts.layers[query.layer]
        own = self.own.layer(query.layer, key_RKD, prompt.blocked, value_RKE)
        if prompt.blocked is not None:
            if self._rows is None:
                self._rows = prompt.blocked.rows(self._rows_P, self.prompt_length_P)
            within = query._replace(reach=reach)
            return prompt.blocked.decode(within, own.slab, prompt.slab, self._rows, self._length_R)
        attention = operations().decode_attention(query)
        if attention is not None:
            decoded = self._decoded_rows(reach)
            return attention(query, own.slab, prompt.slab, decoded)
        place = self.longest - 1 if self._uniform else self._length_R - 1
        own.append(place, key_RKD, value_RKE)
        queries = heads // shared
        query_RKQD = query_RHD.reshape(rows, shared, queries, width)
        own_RKQD, own_lse_RKQ = self._over_own(query_RKQD, own, query, reach)
        prompt_RKQD, prompt_lse_RKQ = self._over_prompts(query_RKQD, prompt, query, reach)
        # Softmax over the union: each part weighs in with its share of the sum of exponentials.
        share_RKQ = torch.sigmoid(prompt_lse_RKQ - own_lse_RKQ)
        share_RKQ1 = share_RKQ.to(own_RKQD.dtype).unsqueeze(-1)
        out_RKQE = torch.lerp(own_RKQD, prompt_RKQD, share_RKQ1)
        return out_RKQE.reshape(rows, heads, -1)

    def _decoded_rows(self, reach: Reach) -> DecodedRows:
        """Describe the rows for an attention of all tokens that a query sees."""
        if reach not in self._first:
            first_R = None
            if reach != EVERYTHING:
                first_R = torch.as_tensor(reach.first(self.position_R))
            self._first[reach] = first_R
        return DecodedRows(
            length_R=self._length_R,
            position_R=self.position_R,
            first_R=self._first[reach],
            entry_R=self._entry_R,
            place_R=self._place_R,
            member_PN=self._member_PN,
            end_P=self._end_P,
            most_own=self.places,
            most_prompt=self.longest_prompt,
        )

    def _over_own(
        self, query_RKQD: Tensor, own: LayerCache, query: Query, reach: Reach
    ) -> tuple[Tensor, Tensor]:
        """Attention over the rows' own tokens, and its log-sum-exps (R, K, Q)."""
        rows, shared = query_RKQD.shape[:2]
        bias = self._bias_of_own(reach, query_RKQD.dtype)
        key_RKTD, value_RKTE = own.view(rows, self.places)
        out_RKQE, lse_RKQ = part(query_RKQD, key_RKTD, value_RKTE, query.scale, query.cap, bias)
        if query.sinks_H is None:
            return out_RKQE, lse_RKQ
        sinks_H = query.sinks_H.to(lse_RKQ.dtype)
        sinks_KQ = sinks_H.view(shared, -1)
        share_RKQ = torch.sigmoid(lse_RKQ - sinks_KQ)
        share_RKQ1 = share_RKQ.to(out_RKQE.dtype).unsqueeze(-1)
        with_sinks_RKQ = torch.logaddexp(lse_RKQ, sinks_KQ)
        return out_RKQE * share_RKQ1, with_sinks_RKQ

    def _over_prompts(
        self, query_RKQD: Tensor, prompt: LayerCache, query: Query, reach: Reach
    ) -> tuple[Tensor, Tensor]:
        """Attention over the rows' prompts, and its log-sum-exps (R, K, Q): all rows of a prompt in
        one product.
        """
        rows, shared, queries, width = query_RKQD.shape
        to_prompt, from_prompt = self._indices(shared)
        prompts = self._end_P.shape[0]
        by_row = query_RKQD.reshape(rows * shared, -1)
        by_prompt = by_row.index_select(0, to_prompt)
        query_PKXD = by_prompt.view(prompts, shared, -1, width)
        bias = self._bias_of_prompt(reach, queries, query_RKQD.dtype)
        key_PKMD, value_PKME = prompt.view(prompts, self.longest_prompt)
        out_PKXE, lse_PKX = part(query_PKXD, key_PKMD, value_PKME, query.scale, query.cap, bias)
        places = to_prompt.shape[0]
        out = out_PKXE.reshape(places, -1)
        out = out.index_select(0, from_prompt)
        out_RKQE = out.view(rows, shared, queries, -1)
        lse = lse_PKX.reshape(places, -1)
        lse = lse.index_select(0, from_prompt)
        lse_RKQ = lse.view(rows, shared, queries)
        return out_RKQE, lse_RKQ

    def _indices(self, shared: int) -> tuple[Tensor, Tensor]:
        """Rows x heads -> prompts x heads x members, and back.

        A prompt with fewer live rows than others computes some row 0 again; nothing reads that.
        """
        if shared not in self._index:
            head_K = torch.arange(shared, device=self.device)
            row_P1N = self._member_PN.unsqueeze(1) * shared
            to_prompt_PKN = row_P1N + head_K.unsqueeze(1)
            members = self._member_PN.shape[1]
            entry_R1 = self._entry_R.unsqueeze(1)
            member_R1 = self._place_R.unsqueeze(1)
            head_RK = entry_R1 * shared + head_K
            from_prompt_RK = head_RK * members + member_R1
            self._index[shared] = (to_prompt_PKN.flatten(), from_prompt_RK.flatten())
        return self._index[shared]

    def _bias_of_own(self, reach: Reach, dtype: torch.dtype) -> Tensor | None:
        """Return (R, 1, 1, places) that hides places behind completions, and those out of reach."""
        if reach not in self._own_bias:
            bias = None
            full = self._uniform and self.places == self.longest
            if not full or reach != EVERYTHING:
                place_T = torch.arange(self.places, device=self.device)
                hidden_RT = place_T >= self._length_R.unsqueeze(1)
                if reach != EVERYTHING:
                    prompt_R = self.position_R + 1 - self._length_R
                    first_R = reach.first(self.position_R) - prompt_R
                    hidden_RT |= place_T < first_R.unsqueeze(1)
                bias_RT = bias_of(hidden_RT, dtype)
                bias = bias_RT[:, None, None]
            self._own_bias[reach] = bias
        return self._own_bias[reach]

    def _bias_of_prompt(self, reach: Reach, queries: int, dtype: torch.dtype) -> Tensor | None:
        """(P, 1, 1 or N x queries, places): hides the places behind prompts, and those that are out
        of reach.

        queries: heads that share a key.
        """
        if (reach, queries) not in self._prompt_bias:
            bias = None
            shortest = min(self.prompt_length_P)
            full = self.size is None and shortest == self.longest_prompt
            if not full or reach != EVERYTHING:
                place_M = torch.arange(self.longest_prompt, device=self.device)
                hidden_PXM = place_M >= self._end_P[:, None, None]
                if reach != EVERYTHING:
                    position_PN = self.position_R[self._member_PN]
                    first_PN = torch.as_tensor(reach.first(position_PN))
                    out_of_reach_PNM = place_M < first_PN.unsqueeze(-1)
                    hidden_PNM = hidden_PXM | out_of_reach_PNM
                    hidden_PXM = hidden_PNM.repeat_interleave(queries, 1)
                bias_PXM = bias_of(hidden_PXM, dtype)
                bias = bias_PXM.unsqueeze(1)
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
        assert list(count_R) == sorted(count_R, reverse=True)
        assert min(count_R) > 0
        self.prompts = prompts
        self.own = own
        self.first = first
        self.prompt_length_P = prompt_length_P
        self.entry_R = entry_R
        self.kept_R = kept_R
        self.count_R = count_R
        *self.start_R, total = accumulate(count_R, initial=0)
        lengths = [kept + count for kept, count in zip(kept_R, count_R, strict=True)]
        entries = first + len(entry_R)
        own.reserve(entries, max(lengths))
        self._segments = Segments(self.start_R, count_R, total)
        self._one_by_one: list[tuple[Tensor, Any, Tensor]] | None = None

    def _states(self, place: Place) -> Tensor:
        prompt = self.prompts.states[place]
        own = self.own.state(place, prompt)
        states = []
        for r, entry in enumerate(self.entry_R):
            if self.kept_R[r]:
                states.append(own[self.first + r])
            else:
                states.append(prompt[entry])
        return torch.stack(states)

    def _keep_states(self, place: Place, state_RX: Tensor) -> None:
        states = self.own.states[place]
        end = self.first + state_RX.shape[0]
        states[self.first : end] = state_RX

    def __call__(self, query: Query) -> Tensor:
        """See `models.attention.Attend`."""
        key_TKD = query.key_TKD
        value_TKE = query.value_TKE
        prompt = self.prompts.layers[query.layer]
        own = self.own.layer(query.layer, key_TKD, prompt.blocked, value_TKE)
        if prompt.blocked is not None:
            return self._token_by_token(prompt.blocked, own, prompt, query)
        outputs = []
        for r, start in enumerate(self.start_R):
            end = start + self.count_R[r]
            new = slice(start, end)
            kept = self.kept_R[r]
            own_entry = self.first + r
            own.extend(own_entry, kept, key_TKD[new], value_TKE[new])
            prompt_entry = self.entry_R[r]
            prompt_tokens = self.prompt_length_P[prompt_entry]
            own_tokens = kept + self.count_R[r]
            before_key_KMD, before_value_KME = prompt.entry(prompt_entry, prompt_tokens)
            own_key_KTD, own_value_KTE = own.entry(own_entry, own_tokens)
            key_KTD = torch.cat([before_key_KMD, own_key_KTD], 1)
            value_KTE = torch.cat([before_value_KME, own_value_KTE], 1)
            of_row = query._replace(
                query_THD=query.query_THD[new],
                key_TKD=key_KTD.transpose(0, 1),
                value_TKE=value_KTE.transpose(0, 1),
            )
            outputs.append(behind(of_row))
        return torch.cat(outputs)

    def _token_by_token(
        self, blocked: BlockedAttention, own: LayerCache, prompt: LayerCache, query: Query
    ) -> Tensor:
        """Attend over slabs that lie block by block, one token of every row at a time; products are
        over the whole stream.
        """
        own_slab = (own.key_EKTD[self.first :], own.value_EKTD[self.first :])
        out_THD = torch.empty_like(query.query_THD, memory_format=torch.contiguous_format)
        for place_A, rows, length_A in self._turns(blocked):
            of_rows = query._replace(
                query_THD=query.query_THD.index_select(0, place_A),
                key_TKD=query.key_TKD.index_select(0, place_A),
                value_TKE=query.value_TKE.index_select(0, place_A),
            )
            out_THD[place_A] = blocked.decode(of_rows, own_slab, prompt.slab, rows, length_A)
        return out_THD

    def _turns(self, blocked: BlockedAttention) -> list[tuple[Tensor, Any, Tensor]]:
        """For the first, second ... new token of the rows that have one: places in the stream, who
        has which prompt, and own tokens with it.
        """
        if self._one_by_one is None:
            start_R = torch.tensor(self.start_R)
            kept_R = torch.tensor(self.kept_R)
            self._one_by_one = []
            prompts = len(self.prompt_length_P)
            for t in range(self.count_R[0]):
                active = sum(count > t for count in self.count_R)
                entry_A = self.entry_R[:active]
                rows_P = rows_by_prompt(entry_A, prompts)
                rows = blocked.rows(rows_P, self.prompt_length_P)
                place_A = start_R[:active] + t
                length_A = kept_R[:active] + t + 1
                self._one_by_one.append((place_A, rows, length_A))
        return self._one_by_one
