"""Convolutions and recurrent states of packed streams whose prompts stand once per group.

A state passes through each segment of a stream.  It begins with zeros, with the last state of the
segment's prefix, or with one that the caller has.  So the state behind a shared prompt is computed
once, and its gradient is the sum over all that begin with it.

Two operations know this form.  A short causal convolution: its state is the last inputs.  The gated
rule, with a state S (K, V) per head, which is what a gated DeltaNet (with `beta`) and Mamba-2
(without) compute at each position:

    S := exp(decay) S;   S := S + key (beta (value - key S));   output := query S         without
    beta: S := S + key value

It is computed chunk by chunk: inside of chunks by products over all of them, between them step by
step.

T positions of the stream   N segments   D channels   W width of the convolution
F segments' first W - 1 positions   H heads   K key width   V value width   M chunks
C positions of a chunk   X sides of a chunk: queries, with beta also its keys"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from groupwise.records import Layout

CHUNK = {"cpu": 32, "cuda": 64}
"""Positions of a chunk, on a CPU and on any other device; fewer where no segment is as long.
Longer chunks have more products inside, shorter ones more steps between."""
LEAST_CHUNK = 16


def chunk_size(device: torch.device) -> int:
    """Positions of a chunk."""
    return CHUNK["cpu" if device.type == "cpu" else "cuda"]


class Places(NamedTuple):
    """Which row of a column each row of another is taken from, on a device."""

    index: Tensor
    empty: Tensor
    """Rows that are taken from none: they are 0."""

    @classmethod
    def of(cls, index: np.ndarray, device: torch.device) -> Places:
        """index: for each new row the old one, or -1 for none."""
        index = index.ravel()
        taken = torch.from_numpy(np.maximum(index, 0)).to(device)
        empty = torch.from_numpy(np.flatnonzero(index < 0)).to(device)
        return cls(taken, empty)


def _taken(rows: Tensor, places: Places) -> Tensor:
    taken = rows.index_select(0, places.index)
    return taken.index_fill_(0, places.empty, 0) if places.empty.numel() else taken


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """A stream in which every segment stands behind the inputs before it, as a convolution reads
    them.
    """

    rows_E: Places
    """Rows of the stream, and behind them of states."""
    place_T: Tensor
    """Where each row of the stream stands, counted without the first segment's inputs before it."""
    last_NU: Places
    """The last W - 1 inputs of each segment."""


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Segments without a prefix, or those with one: first chunks of all, then second ones ... ;
    longest segments first.
    """

    counts: tuple[int, ...]
    """How many segments have a first chunk, a second ..."""
    order_N: Tensor
    """The segments of the level by length."""
    rank_N: Tensor
    """The place of each segment in that order."""
    prefix_N: Tensor | None
    """The place of each segment's prefix, both ordered by length; None without prefixes."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """A stream cut into chunks, level by level."""

    size: int
    rows_MC: Places
    """Positions of the stream, in chunks, whose ends may be empty."""
    place_T: Places
    """The way back."""
    levels: tuple[Level, ...]


class Segments:
    """Segments of a stream, each of which a state passes through by itself; a prefix has none."""

    def __init__(
        self,
        start: Sequence[int],
        length: Sequence[int],
        total: int,
        prefix: Sequence[int] | None = None,
    ) -> None:
        """total: T."""
        self.start = np.array(start, np.int64)
        self.length = np.array(length, np.int64)
        self.total = total
        if prefix is None:
            prefix = [-1] * len(start)
        self.prefix = np.array(prefix, np.int64)
        levels = (np.flatnonzero(self.prefix < 0), np.flatnonzero(self.prefix >= 0))
        self.levels = [level for level in levels if level.size]
        self.longest = int(self.length.max())
        self._made: dict[Any, Any] = {}

    @classmethod
    def of(cls, layout: Layout) -> Segments:
        """Make the segments of a layout; filler alone is one segment, which nobody reads."""
        if not layout.segments:
            return cls([0], [layout.total], layout.total)
        return cls(layout.start, layout.length, layout.total, layout.prefix)

    def once(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        """What holds for all layers of a pass is made by the first."""
        if (name, key) not in self._made:
            self._made[name, key] = make()
        return self._made[name, key]

    def positions(self, level: np.ndarray) -> np.ndarray:
        """Positions of the segments of a level, one segment behind the other."""
        return np.concatenate([self.start[s] + np.arange(int(self.length[s])) for s in level])

    def windows(self, width: int, device: torch.device, *, states: bool) -> Windows:
        """For a convolution of W = `width` taps.   states: rows of states, W - 1 of each segment,
        stand behind the stream's.
        """
        return self.once(
            "windows", (width, states, device), lambda: self._windows(width - 1, device, states)
        )

    def _windows(self, before: int, device: torch.device, states: bool) -> Windows:
        count, history, last = self.start.size, list[np.ndarray](), list[np.ndarray]()
        order, place, end = list[np.ndarray](), np.zeros(self.total, np.int64), 0
        for s in range(count):  # a prefix stands before those that begin with it
            none = self.total + s * before + np.arange(before) if states else np.full(before, -1)
            history.append(last[self.prefix[s]] if self.prefix[s] >= 0 else none)
            rows = np.arange(self.start[s], self.start[s] + self.length[s])
            order.append(np.append(history[s], rows))
            last.append(order[s][len(rows) :])
            place[rows] = end + np.arange(len(rows))
            end += len(order[s])
        return Windows(
            rows_E=Places.of(np.concatenate(order), device),
            place_T=torch.from_numpy(place).to(device),
            last_NU=Places.of(np.array(last, np.int64), device),
        )

    def chunks(self, device: torch.device) -> Chunks:
        """Chunks of up to `CHUNK` positions."""
        size = LEAST_CHUNK
        while size < min(self.longest, chunk_size(device)):
            size *= 2
        return self.once("chunks", (size, device), lambda: self._chunks(size, device))

    def _chunks(self, size: int, device: torch.device) -> Chunks:
        cut, levels, rank = list[np.ndarray](), list[Level](), np.zeros(self.start.size, np.int64)
        for segments in self.levels:
            order = segments[np.argsort(-self.length[segments], kind="stable")]
            rank[order] = np.arange(order.size)
            counts = [
                int((self.length[segments] > first).sum())
                for first in range(0, int(self.length[segments].max()), size)
            ]
            for i, count in enumerate(counts):
                for s in order[:count]:
                    rows = self.start[s] + np.arange(
                        i * size, min(int(self.length[s]), (i + 1) * size)
                    )
                    cut.append(np.pad(rows, (0, size - rows.size), constant_values=-1))
            prefix = self.prefix[order]
            ranks = (rank[segments], *([rank[prefix]] if prefix[0] >= 0 else []))
            order_N, rank_N, *prefix_N = (
                torch.from_numpy(x).to(device) for x in (np.argsort(ranks[0]), *ranks)
            )
            levels.append(Level(tuple(counts), order_N, rank_N, prefix_N[0] if prefix_N else None))
        index, place = np.concatenate(cut), np.full(self.total, -1)
        place[index[index >= 0]] = np.flatnonzero(index >= 0)
        return Chunks(size, Places.of(index, device), Places.of(place, device), tuple(levels))


# ---------------------------------------------------------------- convolution


def convolve(
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    segments: Segments,
    state_NUD: Tensor | None = None,
    *,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """A causal convolution over each segment, channel by channel -> outputs (T, D), and the last W
    - 1 inputs of each segment.

    state_NUD: the W - 1 inputs before each segment, where none has a prefix; None: its prefix's, or
        zeros.   silu: of the outputs."""
    before, one_each = weight_DW.shape[1] - 1, segments.longest == 1 and state_NUD is not None
    if one_each:
        x_NWD = torch.cat([state_NUD.to(x_TD.dtype), x_TD[:, None]], 1)  # type: ignore[union-attr]
        y_ND = (x_NWD * weight_DW.T).sum(1)
        y_ND = y_ND if bias_D is None else y_ND + bias_D
        return F.silu(y_ND) if silu else y_ND, x_NWD[:, 1:]
    windows = segments.windows(before + 1, x_TD.device, states=state_NUD is not None)
    x_TD = x_TD if state_NUD is None else torch.cat([x_TD, state_NUD.flatten(0, 1).to(x_TD.dtype)])
    x_ED = _taken(x_TD, windows.rows_E)
    y_ED = x_ED[before:] * weight_DW[:, -1]
    for back in range(1, before + 1):
        y_ED = torch.addcmul(y_ED, x_ED[before - back : len(x_ED) - back], weight_DW[:, -1 - back])
    y_TD = y_ED.index_select(0, windows.place_T)
    y_TD = y_TD if bias_D is None else y_TD + bias_D
    return F.silu(y_TD) if silu else y_TD, _taken(x_TD.detach(), windows.last_NU).unflatten(
        0, (-1, before)
    )


# ---------------------------------------------------------------- the gated rule


def gated_rule(
    columns: Sequence[Tensor], segments: Segments, state_NHKV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gated rule over each segment -> outputs (T, H, V), and the last state of each segment,
    those without a prefix first.

    columns: query and key (T, J, K), J divides H: each serves as many heads of value (T, H, V);
        decay (T, H) as logarithms, at most 0; the delta rule's beta (T, H), for Mamba-2 none.
    state_NHKV: before each segment, where none has a prefix; None: its prefix's, or zeros.
    States are never narrower than float32.   A stream of one position for each segment changes them
    in place, where no gradient is wanted.
    """
    query, key, value, *rates = columns
    served = value.shape[1] // query.shape[1]
    if served > 1:
        query, key = query.repeat_interleave(served, 1), key.repeat_interleave(served, 1)
    columns = (query, key, value, *rates)
    if segments.longest == 1 and state_NHKV is not None:
        with _exact(value):
            return _one_position([_wide(x) for x in columns], state_NHKV.to(_wide(value).dtype))
    if (
        value.is_cuda
        and value.dtype in (torch.bfloat16, torch.float16)
        and len(columns) == 5
        and fla_kernel() is not None
    ):
        return _by_fla(columns, segments, state_NHKV)
    # What the chunks are made of takes ten times the memory of the columns: it is made again in the
    # backward pass.
    return checkpoint(
        _by_chunks, segments, state_NHKV, *columns, use_reentrant=False, preserve_rng_state=False
    )


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _exact(like: Tensor) -> AbstractContextManager[Any]:
    """States are not for the products of autocast."""
    return torch.autocast(like.device.type, enabled=False)


def _one_position(columns: Sequence[Tensor], state_NHKV: Tensor) -> tuple[Tensor, Tensor]:
    """The rule itself, for one position of every segment."""
    query_NHK, key_NHK, value_NHV, decay_NH, *beta_NH = columns
    into = None if torch.is_grad_enabled() else state_NHKV
    fading_NH11 = decay_NH.exp()[..., None, None]
    # One pass reads what the state says of key and query; others change it.
    of_key, of_query = (
        (torch.stack([key_NHK, query_NHK], 2) @ state_NHKV).mul(fading_NH11).unbind(2)
    )
    if beta_NH:
        value_NHV = beta_NH[0][..., None] * (value_NHV - of_key)
    state_NHKV = torch.mul(state_NHKV, fading_NH11, out=into)
    state_NHKV = torch.addcmul(state_NHKV, key_NHK[..., None], value_NHV[:, :, None], out=into)
    return of_query + (query_NHK * key_NHK).sum(-1, keepdim=True) * value_NHV, state_NHKV


class _Parts:
    """What chunks are made of before a state passes through them.  Empty positions decay nothing
    and add nothing.
    """

    def __init__(self, columns: Sequence[Tensor], chunks: Chunks) -> None:
        self.chunks = chunks
        self.query, self.key, self.value, decay, *beta = map(self.cut, columns)
        self.beta = beta[0][..., None] if beta else None
        total = decay.cumsum(-1)
        later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=decay.device).triu(1)
        between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
        self.between = between[:, :, None]
        self.faded, self.rest = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
        self.kept = total[..., -1].exp()[..., None, None]
        sides = [self.query] if self.beta is None else [self.query, self.key * self.beta]
        self.side = torch.stack(sides, 2)
        """(M, H, X, C, K)"""
        self.faded_side = (self.side * self.faded[:, :, None]).flatten(2, 3)
        marks = (self.side.flatten(2, 3) @ self.key.transpose(-1, -2)).unflatten(
            2, (-1, chunks.size)
        )
        self.marks = marks * self.between
        """(M, H, X, C, C): of queries what positions read of what each before them adds; of keys
        what the state says already.
        """
        self.rest_key = self.key * self.rest
        self.added = self.value
        """What positions add to the state, but for what it says of them already."""
        self.solver = None
        if self.beta is not None:
            # What each position adds depends on what those before it in the chunk add: a triangular
            # system.
            one = torch.eye(chunks.size, dtype=decay.dtype, device=decay.device).expand_as(between)
            self.solver = torch.linalg.solve_triangular(
                self.marks[:, :, 1], one, upper=False, unitriangular=True
            )
            self.added = self.value * self.beta

    def cut(self, x: Tensor) -> Tensor:
        """(T, H, ...) -> (M, H, C, ...)"""
        x_MC = _taken(x.flatten(1), self.chunks.rows_MC).view(-1, self.chunks.size, *x.shape[1:])
        return _wide(x_MC.transpose(1, 2)).contiguous()

    def joined(self, x: Tensor) -> Tensor:
        """The way back."""
        return _taken(x.transpose(1, 2).flatten(0, 1).flatten(1), self.chunks.place_T).unflatten(
            1, (x.shape[1], *x.shape[3:])
        )

    def passed(self, state: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Let states pass -> outputs, and last states by level."""
        outputs, ends, size = list[Tensor](), list[Tensor](), self.chunks.size
        counts = [count for level in self.chunks.levels for count in level.counts]
        # Split at once: a slice's gradient is as large as what it was taken from, and there is one
        # for each step.
        columns = [self.added, self.marks[:, :, 0], self.faded_side, self.rest_key, self.kept]
        columns += [] if self.solver is None else [self.solver]
        steps = zip(*(column.split(counts) for column in columns), strict=True)
        for level in self.chunks.levels:
            if level.prefix_N is not None:
                state = ends[-1].index_select(0, level.prefix_N)
            elif state is not None:
                state = state.index_select(0, level.order_N).to(self.value.dtype)
            ended = list[Tensor]()
            for count in level.counts:
                added, inside, faded_side, rest_key, kept, *solver = next(steps)
                if state is not None and count < state.shape[0]:
                    ended.append(state[count:])
                    state = state[:count]
                read = None if state is None else faded_side @ state
                if solver:
                    added = solver[0] @ (added if read is None else added - read[:, :, size:])
                outputs.append(
                    inside @ added if read is None else inside @ added + read[:, :, :size]
                )
                new = rest_key.transpose(-1, -2) @ added
                state = new if state is None else torch.addcmul(new, state, kept)
            assert state is not None
            ends.append(torch.cat([state, *reversed(ended)]))
        return torch.cat(outputs), ends


def _by_chunks(segments: Segments, state: Tensor | None, *columns: Tensor) -> tuple[Tensor, Tensor]:
    """`gated_rule` in torch's operations."""
    with _exact(columns[2]):
        chunks = segments.chunks(columns[0].device)
        parts = _Parts(columns, chunks)
        out, ends = parts.passed(state)
        last = [
            end.index_select(0, level.rank_N)
            for end, level in zip(ends, chunks.levels, strict=True)
        ]
        return parts.joined(out), torch.cat(last)


@cache
def fla_kernel() -> Callable[..., Any] | None:
    """The gated delta rule of the package fla (flash-linear-attention), on GPUs; None where it is
    not installed.
    """
    try:
        import fla.ops.gated_delta_rule as fla_rules  # type: ignore[import-not-found]
    except ImportError:
        return None
    return fla_rules.chunk_gated_delta_rule


def _by_fla(
    columns: Sequence[Tensor], segments: Segments, state_NHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`gated_rule` by fla's kernel, which keeps segments apart by their boundaries.  It takes
    numbers of 16 bits, and a beta.
    """
    kernel = fla_kernel()
    assert kernel is not None
    value = columns[2]
    types, out, last = (
        (value.dtype, value.dtype, value.dtype, torch.float32, value.dtype),
        torch.zeros_like(value),
        list[Tensor](),
    )
    for level in segments.levels:
        rows_R, bounds, prefix = segments.once(
            "fla",
            (len(last), value.device),
            lambda level=level: _runs(segments, level, value.device),
        )
        query, key, values, decay, beta = (
            x.index_select(0, rows_R).to(kind)[None] for x, kind in zip(columns, types, strict=True)
        )
        if last:
            state_NHKV = last[0].index_select(0, prefix)
        out_RHV, end_NHKV = kernel(
            query,
            key,
            values,
            g=decay,
            beta=beta,
            scale=1.0,
            initial_state=None if state_NHKV is None else state_NHKV.float(),
            output_final_state=True,
            cu_seqlens=bounds,
        )
        out = out.index_copy(0, rows_R, out_RHV[0])
        last.append(end_NHKV)
    return out, torch.cat(last)


def _runs(segments: Segments, level: np.ndarray, device: torch.device) -> tuple[Tensor, ...]:
    """Positions of a level's segments, where each begins and the last ends, and its prefix's place
    in the first level.
    """
    bounds = np.append(0, np.cumsum(segments.length[level]))
    prefix = np.searchsorted(segments.levels[0], segments.prefix[level])
    return tuple(
        torch.from_numpy(x).to(device) for x in (segments.positions(level), bounds, prefix)
    )


# ---------------------------------------------------------------- streams


class Recurrence:
    """What recurrent layers ask in one forward pass: states pass through each segment, and from
    each prefix into all that begin with it.

    place: which state it is: the layer's number, and which of the layer's operations.
    """

    def __init__(
        self,
        segments: Segments,
        read: Callable[[tuple[int, int]], Tensor | None] = lambda _: None,
        keep: Callable[[tuple[int, int], Tensor], None] = lambda *_: None,
    ) -> None:
        """read: the segments' states before this pass; None: zeros.   keep: takes the states behind
        it.
        """
        self.segments, self.read, self.keep = segments, read, keep

    def convolve(
        self,
        place: tuple[int, int],
        x_TD: Tensor,
        weight_DW: Tensor,
        bias_D: Tensor | None,
        *,
        silu: bool,
    ) -> Tensor:
        """See `convolve` -> (T, D)."""
        out, state = convolve(x_TD, weight_DW, bias_D, self.segments, self.read(place), silu=silu)
        self.keep(place, state)
        return out

    def rule(self, place: tuple[int, int], *columns: Tensor) -> Tensor:
        """See `gated_rule` -> (T, H, V)."""
        out, state = gated_rule(columns, self.segments, self.read(place))
        self.keep(place, state)
        return out
