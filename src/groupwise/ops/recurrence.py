"""Convolutions and recurrent states of packed streams whose prompts stand once per group.

A run is a stretch of a stream that a state passes through: it begins with zeros, or with a state that is given.  `StreamRecurrence`
makes two passes over a stream: over the segments without a prefix, then over the others, each of which begins with its prefix's
last state.  So the state behind a shared prompt is computed once, and its gradient is the sum over all that begin with it.

Two operations know this form.  A short causal convolution: its state is the last inputs.  The gated rule, with a state S (K, V) per
head, which is what a gated DeltaNet (with `beta`) and Mamba-2 (without) compute at each position:

    S := exp(decay) S;   S := S + key (beta (value - key S));   output := query S         without beta: S := S + key value

It is computed chunk by chunk: inside of chunks by products over all of them, between them step by step.

T positions of the stream   N runs   R positions of all runs   D channels   W width of the convolution   H heads   K key width
V value width   M chunks   C positions of a chunk
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groupwise.ops.autograd import Gradients, first_derivative
from groupwise.records import Layout

CHUNK = 64
"""Positions of a chunk; shorter ones where no run is as long."""
LEAST_CHUNK = 16


class Places(NamedTuple):
    """Which row of a column each row of another is taken from, on a device."""

    index: Tensor
    empty: Tensor
    """Rows that are taken from none: they are 0."""


class Move(NamedTuple):
    """Rows of one column to their places in another, each at most once; and back."""

    forth: Places
    back: Places

    @classmethod
    def of(cls, index: np.ndarray, total: int, device: torch.device) -> Move:
        """index: for each new row the old one, or -1 for none.   total: old rows."""
        back = np.full(total, -1)
        back[index[index >= 0]] = np.flatnonzero(index >= 0)
        return cls(*(_places(one, device) for one in (index, back)))


def _places(index: np.ndarray, device: torch.device) -> Places:
    return Places(*(torch.from_numpy(x).to(device) for x in (np.maximum(index, 0), np.flatnonzero(index < 0))))


class _Moved(torch.autograd.Function):
    """Rows at their new places.  The gradient is taken back the same way, for no row has two places."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: Move) -> Tensor:
        ctx.back = move.back
        return _taken(rows, move.forth)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        (grad,) = grads
        assert grad is not None
        return _taken(grad, ctx.back), None


def _taken(rows: Tensor, places: Places) -> Tensor:
    found = rows.index_select(0, places.index)
    return found.index_fill_(0, places.empty, 0) if places.empty.numel() else found


def moved(rows: Tensor, move: Move) -> Tensor:
    """Rows at their new places; differentiable."""
    return _Moved.apply(rows, move)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Runs cut into chunks: the first chunk of every run, then the second of those that have one ... ; longest runs first."""

    move: Move
    """Positions of the stream to positions of chunks, whose ends may be empty."""
    filled_MC: Tensor
    """1 where a position is filled, else 0."""
    counts: tuple[int, ...]
    """How many runs have a first chunk, a second ..."""
    order_N: Tensor
    """The runs by length."""
    rank_N: Tensor
    """Of each run its place in that order."""
    out: Move
    """Positions of chunks to positions of the runs."""


class Runs:
    """Stretches of a stream, each of which a state passes through by itself."""

    def __init__(self, start: Sequence[int], length: Sequence[int], total: int) -> None:
        """total: T."""
        self.start, self.length, self.total = np.array(start, np.int64), np.array(length, np.int64), total
        self.begin = np.cumsum(self.length) - self.length
        """Of each run its first row among the runs' rows."""
        self.rows = int(self.length.sum())
        self.longest = int(self.length.max())
        self._made: dict[Any, Any] = {}

    def _once(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        """What holds for all layers of a pass is made by the first."""
        if (name, key) not in self._made:
            self._made[name, key] = make()
        return self._made[name, key]

    @property
    def positions(self) -> np.ndarray:
        """(R,): of all runs, one behind the other."""
        return np.arange(self.rows) + np.repeat(self.start - self.begin, self.length)

    def single(self, x_T: Tensor) -> Tensor:
        """The rows (N, ...) of runs of one position each."""
        return x_T if self.rows == self.total else x_T[torch.from_numpy(self.start).to(x_T.device)]

    def stretched(self, before: int, device: torch.device) -> tuple[Move, Move, Tensor]:
        """Runs behind `before` rows each, which are taken from behind the stream, run by run: where their rows come from, where the
        runs' own rows are, and where each run's last `before` rows are."""

        def make() -> tuple[Move, Move, Tensor]:
            n, owners = len(self.length), np.repeat(np.arange(len(self.length)), self.length)
            own = np.arange(self.rows) + (owners + 1) * before
            state = (self.begin[:, None] + np.arange(n)[:, None] * before + np.arange(before)).ravel()
            index = np.empty(self.rows + n * before, np.int64)
            index[own], index[state] = self.positions, self.total + np.arange(n * before)
            last = (state.reshape(n, before) + self.length[:, None]).ravel()
            # A convolution's outputs lie `before` rows ahead of its inputs.
            outputs = Move.of(own - before, index.size - before, device)
            return Move.of(index, self.total + n * before, device), outputs, torch.from_numpy(last).to(device)

        return self._once("stretched", (before, device), make)

    def chunks(self, device: torch.device) -> tuple[Chunks, int]:
        """Chunks, and their size."""
        size = LEAST_CHUNK
        while size < min(self.longest, CHUNK):
            size *= 2
        return self._once("chunks", (size, device), lambda: self._chunks(size, device)), size

    def _chunks(self, size: int, device: torch.device) -> Chunks:
        order = np.argsort(-self.length, kind="stable")
        parts = -(-self.length // size)
        counts = [int((parts > i).sum()) for i in range(int(parts.max()))]
        index = np.full((sum(counts), size), -1)
        place, rows = 0, np.empty(self.rows, np.int64)
        for i, count in enumerate(counts):
            for run in order[:count]:
                n = min(size, int(self.length[run]) - i * size)
                index[place, :n] = self.start[run] + i * size + np.arange(n)
                first = int(self.begin[run]) + i * size
                rows[first : first + n] = place * size + np.arange(n)
                place += 1
        return Chunks(
            move=Move.of(index.ravel(), self.total, device),
            filled_MC=torch.from_numpy(index >= 0).to(device, torch.float32),
            counts=tuple(counts),
            order_N=torch.from_numpy(order).to(device),
            rank_N=torch.from_numpy(np.argsort(order)).to(device),
            out=Move.of(rows, index.size, device),
        )


# ---------------------------------------------------------------- convolution


class _Taps(torch.autograd.Function):
    """y[t] = sum over j of x[t + j] w[j], channel by channel: rows (E, D) -> (E - W + 1, D)."""

    @staticmethod
    def forward(ctx: Any, x_ED: Tensor, weight_DW: Tensor) -> Tensor:
        ctx.save_for_backward(x_ED, weight_DW)
        width = weight_DW.shape[1]
        count = x_ED.shape[0] - width + 1
        y = x_ED[:count] * weight_DW[:, 0]
        for j in range(1, width):
            y.addcmul_(x_ED[j : j + count], weight_DW[:, j])
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        (grad,) = grads
        assert grad is not None
        x_ED, weight_DW = ctx.saved_tensors
        width, count = weight_DW.shape[1], grad.shape[0]
        x_grad, weight_grad = torch.zeros_like(x_ED), torch.empty_like(weight_DW)
        for j in range(width):
            x_grad[j : j + count].addcmul_(grad, weight_DW[:, j])
            weight_grad[:, j] = (grad * x_ED[j : j + count]).sum(0)
        return x_grad, weight_grad


def convolve(
    x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, runs: Runs, state_NUD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A causal convolution over each run, channel by channel -> outputs (R, D), and the last W - 1 inputs of each run.

    state_NUD: the W - 1 inputs before each run; None: zeros.
    """
    before = weight_DW.shape[1] - 1
    if runs.longest == 1 and state_NUD is not None:
        x_NWD = torch.cat([state_NUD.to(x_TD.dtype), runs.single(x_TD)[:, None]], 1)
        y_ND = (x_NWD * weight_DW.T).sum(1)
        return y_ND if bias_D is None else y_ND + bias_D, x_NWD[:, 1:]
    rows, outputs, last = runs.stretched(before, x_TD.device)
    if state_NUD is None:
        state_NUD = x_TD.new_zeros(len(runs.length), before, x_TD.shape[1])
    x_ED = moved(torch.cat([x_TD, state_NUD.flatten(0, 1).to(x_TD.dtype)]), rows)
    y_RD = moved(_Taps.apply(x_ED, weight_DW), outputs)  # type: ignore[arg-type]
    return y_RD if bias_D is None else y_RD + bias_D, x_ED.index_select(0, last).view(state_NUD.shape)


# ---------------------------------------------------------------- the gated rule


def gated_rule(
    query_THK: Tensor,
    key_THK: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor | None,
    runs: Runs,
    state_NHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated rule over each run -> outputs (R, H, V), and the last state of each run, which is never narrower than float32.

    decay_TH: logarithms, at most 0.   beta_TH: the delta rule's; None: Mamba-2.   state_NHKV: before each run; None: zeros.
    """
    wide = torch.promote_types(value_THV.dtype, torch.float32)
    columns = [query_THK, key_THK, value_THV, decay_TH, *([] if beta_TH is None else [beta_TH])]
    with torch.autocast(value_THV.device.type, enabled=False):
        columns = [x.to(wide) for x in columns]
        if runs.longest == 1 and state_NHKV is not None:
            return one_position([runs.single(x) for x in columns], state_NHKV.to(wide))
        state_NHKV = None if state_NHKV is None else state_NHKV.to(wide)
        if not torch.is_grad_enabled():
            return _by_chunks(columns, runs, state_NHKV)
        # What the chunks are made of takes ten times the memory of the columns: it is made again in the backward pass.
        return checkpoint(_by_chunks, columns, runs, state_NHKV, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]


def one_position(columns: Sequence[Tensor], state_NHKV: Tensor) -> tuple[Tensor, Tensor]:
    """The rule itself, for one position of every run."""
    query_NHK, key_NHK, value_NHV, decay_NH, *beta_NH = columns
    state_NHKV = state_NHKV * decay_NH.exp()[..., None, None]
    if beta_NH:
        value_NHV = beta_NH[0][..., None] * (value_NHV - (key_NHK[:, :, None] @ state_NHKV)[:, :, 0])
    state_NHKV = state_NHKV + key_NHK[..., None] * value_NHV[:, :, None]
    return (query_NHK[:, :, None] @ state_NHKV)[:, :, 0], state_NHKV


def _by_chunks(columns: Sequence[Tensor], runs: Runs, state_NHKV: Tensor | None) -> tuple[Tensor, Tensor]:
    chunks, size = runs.chunks(columns[0].device)

    def cut(x: Tensor) -> Tensor:
        """(T, H, ...) -> (M, H, C, ...)"""
        return moved(x.flatten(1), chunks.move).view(-1, size, *x.shape[1:]).transpose(1, 2)

    # Empty positions are 0: they decay nothing, and add nothing.
    query, key, value, decay, *beta = map(cut, columns)
    total_MHC = decay.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    between = (total_MHC[..., :, None] - total_MHC[..., None, :]).masked_fill(later, -torch.inf).exp()
    inside = query @ key.transpose(-1, -2) * between
    faded = total_MHC.exp()[..., None]
    key_width = key.shape[-1]
    if beta:
        # What each position adds depends on what those before it in the chunk add: a triangular system, for the values, and for
        # what the state before the chunk already says of them.
        beta_key = key * beta[0][..., None]
        system = beta_key @ key.transpose(-1, -2) * between
        both = torch.cat([beta_key * faded, value * beta[0][..., None]], -1)
        both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        known, value = both[..., :key_width], both[..., key_width:]
    else:
        known = None
    query = query * faded
    key = (key * (total_MHC[..., -1:] - total_MHC).exp()[..., None]).transpose(-1, -2)
    kept = total_MHC[..., -1].exp()[..., None, None]
    state = None if state_NHKV is None else state_NHKV.index_select(0, chunks.order_N)
    outputs, ended = list[Tensor](), list[Tensor]()
    steps = zip(*(x.split(chunks.counts) for x in (query, key, value, inside, kept)), strict=True)
    knowns = [None] * len(chunks.counts) if known is None else known.split(chunks.counts)
    for (query_i, key_i, value_i, inside_i, kept_i), known_i in zip(steps, knowns, strict=True):
        count = query_i.shape[0]
        if state is None:
            outputs.append(inside_i @ value_i)
            state = key_i @ value_i
        else:
            if count < state.shape[0]:
                ended.append(state[count:])
                state = state[:count]
            if known_i is not None:
                value_i = value_i - known_i @ state
            outputs.append(query_i @ state + inside_i @ value_i)
            state = state * kept_i + key_i @ value_i
    assert state is not None
    state = torch.cat([state, *reversed(ended)]).index_select(0, chunks.rank_N)
    out = torch.cat(outputs).transpose(1, 2)
    return moved(out.flatten(2).flatten(0, 1), chunks.out).view(runs.rows, *out.shape[2:]), state


@cache
def fla_kernel() -> Callable[..., Any] | None:
    """The gated delta rule of the package fla (flash-linear-attention), on GPUs; None where it is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
    except ImportError:
        return None
    return chunk_gated_delta_rule


def by_fla(
    query_THK: Tensor,
    key_THK: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor | None,
    runs: Runs,
    state_NHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gated_rule` by fla's kernel, which keeps runs apart by their boundaries.  It takes numbers of 16 bits, and a `beta`."""
    kernel = fla_kernel()
    assert kernel is not None and beta_TH is not None
    device = value_THV.device
    move = Move.of(runs.positions, runs.total, device)
    columns = [moved(x.flatten(1), move).view(runs.rows, *x.shape[1:])[None] for x in (query_THK, key_THK, value_THV)]
    bounds = torch.from_numpy(np.append(runs.begin, runs.rows)).to(device)
    out, state = kernel(
        *(x.to(value_THV.dtype) for x in columns),
        g=moved(decay_TH, move)[None].float(),
        beta=moved(beta_TH, move)[None].to(value_THV.dtype),
        scale=1.0,
        initial_state=None if state_NHKV is None else state_NHKV.float(),
        output_final_state=True,
        cu_seqlens=bounds,
    )
    return out[0], state


def rule_for(value: Tensor, beta: Tensor | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """`gated_rule`, or fla's kernel where it takes the numbers."""
    narrow = value.dtype in (torch.bfloat16, torch.float16)
    return by_fla if value.is_cuda and narrow and beta is not None and fla_kernel() is not None else gated_rule


# ---------------------------------------------------------------- streams


class StreamRecurrence:
    """States pass through each segment of a stream, and from each prefix into all segments that begin with it."""

    def __init__(self, layout: Layout) -> None:
        if not layout.segments:  # filler alone, which nobody reads
            layout = Layout(start=(0,), length=(layout.total,), prefix=(-1,), total=layout.total)
        roots = [s for s, prefix in enumerate(layout.prefix) if prefix < 0]
        members = [s for s, prefix in enumerate(layout.prefix) if prefix >= 0]
        self.roots = _runs(layout, roots)
        self.members = _runs(layout, members) if members else None
        rank = {s: place for place, s in enumerate(roots)}
        self.parent = torch.tensor([rank[layout.prefix[s]] for s in members], dtype=torch.int64)
        positions = np.concatenate([runs.positions for runs in (self.roots, self.members) if runs is not None])
        self._order = np.full(layout.total, -1)
        self._order[positions] = np.arange(positions.size)
        self._back: Move | None = None

    def convolve(self, place: tuple[int, int], x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor | None) -> Tensor:
        """See `models.recurrence.Recurrent`."""
        return self._through(lambda runs, state: convolve(x_TD, weight_DW, bias_D, runs, state))

    def rule(self, place: tuple[int, int], *columns: Tensor | None) -> Tensor:
        """See `models.recurrence.Recurrent`."""
        rule = rule_for(columns[2], columns[4])  # type: ignore[arg-type]
        return self._through(lambda runs, state: rule(*columns, runs, state))

    def _through(self, operation: Callable[[Runs, Tensor | None], tuple[Tensor, Tensor]]) -> Tensor:
        out, state = operation(self.roots, None)
        if self.members is not None:
            if self.parent.device != state.device:
                self.parent = self.parent.to(state.device)
            out = torch.cat([out, operation(self.members, state.index_select(0, self.parent))[0]])
        if self._back is None:
            self._back = Move.of(self._order, out.shape[0], out.device)
        return moved(out.flatten(1), self._back).view(-1, *out.shape[1:])


def _runs(layout: Layout, segments: Sequence[int]) -> Runs:
    return Runs([layout.start[s] for s in segments], [layout.length[s] for s in segments], layout.total)
