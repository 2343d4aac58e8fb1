"""Attention: one record of what a layer asks, and one dispatch over packed streams whose prompts
stand once per group.

A `Query` may have a window or chunks (`Reach`), a soft cap on its scores, sinks, and values of
another width than its keys. On a CPU: the compiled kernel where it takes the query, else pieces of
the stream, each by one kernel of torch's, merged by their log-sum-exps.  In both a prompt's keys
are read once for all its completions and never copied.  On CUDA: `ops.cuda`.  No mask of T x T is
made.

T positions of the stream   H query heads   K key-value heads   D head width   E width of values
X rows   M keys   B batch"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from groupwise.ops.autograd import first_derivative
from groupwise.ops.operations import AttentionCall, operations
from groupwise.ops.query import Family, Query, Reach, families_of
from groupwise.records import Layout


class StreamAttention:
    """Attention inside each segment of a packed stream, and from it to the whole of its prefix."""

    def __init__(self, layout: Layout, prepared: Any = None) -> None:
        self.layout = layout
        self.families = tuple(families_of(layout))
        before = [layout.length[prefix] if prefix >= 0 else 0 for prefix in layout.prefix]
        self.longest = max(
            (own + prefix for own, prefix in zip(layout.length, before, strict=True)), default=0
        )
        """The most keys that a query sees."""
        self.prepared: Any = prepared
        """What the kernels of a package, or of a device, prepare once for the stream."""
        self._pieces: dict[tuple[Reach, bool], tuple[Piece, ...]] = {}

    def __call__(self, query: Query) -> Tensor:
        """Attend, (T, H, E), differentiable once."""
        if query.query_THD.is_cuda:
            from groupwise.ops.cuda.stream_attention import attend

            return attend(self, query)
        out = operations().stream_attention(self, query)
        if out is None:
            out = self._in_pieces(query, query.reach.within(self.longest))
        return out.squeeze(0).transpose(0, 1)

    def _in_pieces(self, query: Query, reach: Reach) -> Tensor:
        """Attend piece by piece, each by one kernel of torch's, (1, H, T, E)."""
        heads = of_one_width(*query.heads)
        call = self.pieces_call(heads, query, reach)
        return call.function.apply(*call.arguments)[..., : query.value_TKE.shape[-1]]

    def pieces_call(self, heads: Sequence[Tensor], query: Query, reach: Reach) -> AttentionCall:
        """Return the call that attends piece by piece.   heads: of the query, of one width."""
        pieces = self.pieces(reach, query.cap is not None)
        return AttentionCall(_Pieces, (*heads, query.sinks_H, pieces, query.scale, query.cap))

    def pieces(self, reach: Reach, capped: bool) -> tuple[Piece, ...]:
        """The pieces of the stream in which attention is computed on a CPU.   capped: by products
        that hold all scores.
        """
        if (reach, capped) not in self._pieces:
            rows = CAPPED_ROWS if capped else max(LEAST_ROWS, min(ROWS, reach.window or ROWS))
            self._pieces[reach, capped] = tuple(_cut(self.families, reach, rows, capped))
        return self._pieces[reach, capped]


def of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with zeros behind the narrower numbers: torch's kernels know one width, and zeros
    add nothing.
    """
    more = query.shape[-1] - value.shape[-1]
    if more > 0:
        return query, key, F.pad(value, (0, more))
    return (
        (query, key, value)
        if more == 0
        else (F.pad(query, (0, -more)), F.pad(key, (0, -more)), value)
    )


# ---------------------------------------------------------------- one part of the keys

HIDDEN = -1e30
"""Score of a key that may not be seen: finite, so that a row which sees nothing of one part stays
free of NaN.
"""
LEAST = -80.0
"""Scores further below the largest have no weight that could be seen; a CPU's exponential of them
takes 10 to 150 times as long.
"""
ALIGNED = 8
"""The GPU's memory-efficient kernel reads so many numbers of a key and of the bias at once."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention


def part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    cap: float | None = None,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention to some of the keys: outputs (B, H, X, E) and log-sum-exps of the scores (B, H, X).

    query (B, H, X, D), key (B, K, M, D), value (B, K, M, E).   bias: added to the scores, (..., X,
    M).   causal: row x sees the keys up to x; on a CPU, without a cap.
    """
    same = key.shape[-1] == value.shape[-1]
    if cap is None and same and query.device.type == "cpu":
        return _flash(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    assert not causal
    whole = query.shape[-1] % ALIGNED == 0 and (bias is None or key.shape[2] % ALIGNED == 0)
    if (
        cap is None
        and same
        and whole
        and query.shape[1] == key.shape[1]
        and _has_efficient(query.device, query.dtype)
    ):
        bias = None if bias is None else bias.expand(*query.shape[:3], key.shape[2])
        out, lse, _, _ = _efficient(query, key, value, bias, True, 0.0, False, scale=scale)
        return out, lse[..., : query.shape[2]]  # the kernel fills it up
    scores = _scores(query, key, scale, cap)
    if cap is not None:
        scores.sigmoid_().mul_(2.0 * cap)  # = score + cap, a sixth of tanh's time
    if bias is not None:
        scores += bias
    top = scores.amax(-1, keepdim=True)
    total = scores.sub_(top).clamp_(min=LEAST).exp_().sum(-1, keepdim=True)
    out = (_grouped(scores, key).to(value.dtype) @ value).view(*query.shape[:3], -1)
    lse = (top + total.log())[..., 0]
    return (out / total).to(value.dtype), lse if cap is None else lse - cap


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """(B, H, X, ...) as (B, K, the rows of all query heads that share a key head, ...)."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1])


def _scores(query: Tensor, key: Tensor, scale: float, cap: float | None) -> Tensor:
    """(B, H, X, M), at least float32: the scores, or what their sigmoid is taken of where they are
    capped.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    if query.device.type == "cpu":  # a product in a lower type would round them to it
        query, key = query.to(wide), key.to(wide)
    scores = (_grouped(query, key) @ key.transpose(-1, -2)).view(*query.shape[:3], -1).to(wide)
    return scores.mul_(scale if cap is None else 2.0 * scale / cap)


@cache
def _has_efficient(device: torch.device, dtype: torch.dtype) -> bool:
    """Older GPUs know no bfloat16.  The meta device has every kernel."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type in ("cuda", "meta") and dtype in (torch.float32, torch.bfloat16)


def bias_of(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """`HIDDEN` where a key is hidden, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, HIDDEN)


def behind(query: Query) -> Tensor:
    """What the last X of M positions of one sequence see of it -> (X, H, E); not differentiable.

    Queries are of the last positions alone, keys and values of all.
    """
    heads, rows = query.heads, query.query_THD.shape[0]
    before, device, outputs = query.key_TKD.shape[0] - rows, query.query_THD.device, []
    for a in range(0, rows, ROWS):
        b = min(a + ROWS, rows)
        at_X = torch.arange(before + a, before + b, device=device)
        low = max(int(query.reach.first(before + a)), 0)
        at_M = torch.arange(low, before + b, device=device)
        first_X = torch.as_tensor(query.reach.first(at_X))
        hidden_XM = (at_M > at_X[:, None]) | (at_M < first_X[:, None])
        some = (
            heads[0][:, :, a:b],
            heads[1][:, :, low : before + b],
            heads[2][:, :, low : before + b],
        )
        out, lse = part(*some, query.scale, query.cap, bias_of(hidden_XM, query.query_THD.dtype))
        if query.sinks_H is not None:
            out = out * torch.sigmoid(lse - query.sinks_H.to(lse.dtype)[:, None])[..., None].to(
                out.dtype
            )
        outputs.append(out)
    return torch.cat(outputs, 2)[0].transpose(0, 1)


# ---------------------------------------------------------------- by pieces, in torch's operations

ROWS, LEAST_ROWS, CAPPED_ROWS = 256, 64, 128
"""Most and fewest rows of a piece where a window or chunk hides keys, and most where all scores of
a piece are held.
"""
FLOAT_KEYS = 384
"""Over fewer keys the backward kernel is 2 to 5 times faster in float32 than in bfloat16,
conversions included.
"""


class Piece(NamedTuple):
    """Rows of a stream, and keys that some of them see."""

    rows: slice
    keys: slice
    own: bool
    """The keys are of the rows' own segments, which come before those of their prefix."""
    causal: bool = False
    """Row i sees the keys up to i."""
    seen: tuple[Tensor, Tensor] | None = None
    """The first and the last key that each row sees, counted from the piece's first (X,); None:
    all, or as `causal` says.
    """

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Hides what its rows do not see (X, M)."""
        if self.seen is None:
            return None
        first_X, last_X = self.seen
        at_M = torch.arange(self.keys.stop - self.keys.start)
        return bias_of((at_M < first_X[:, None]) | (at_M > last_X[:, None]), dtype)


def _cut(families: Sequence[Family], reach: Reach, most: int, held: bool) -> Iterator[Piece]:
    """Every pair of a row and a key that it sees, in one piece.   most: rows of a piece that hides
    some keys, or is `held`.
    """
    for family in families:
        (p0, p1), (r0, r1) = family.prefix, family.rest
        for place, (a, b) in enumerate(family.causal):
            yield from _of_its_own(a, b, p1 - p0 if place else 0, reach, most, held)
        if r1 == r0:
            continue
        # Of each row behind the prefix the first place of it that it sees.
        position_X = torch.cat(
            [torch.arange(p1 - p0, p1 - p0 + b - a) for a, b in family.causal[1:]]
        )
        first_X = torch.as_tensor(reach.first(position_X)).clamp(min=0)
        for a, b in _runs(first_X < p1 - p0):
            step = b - a if not held and int(first_X[a:b].max()) == 0 else most
            for c in range(a, b, step):
                rows_X = first_X[c : min(c + step, b)]
                low, high = int(rows_X.min()), int(rows_X.max())
                seen = None if low == high else (rows_X - low, torch.full_like(rows_X, p1 - p0))
                yield Piece(
                    slice(r0 + c, r0 + c + len(rows_X)), slice(p0 + low, p1), False, seen=seen
                )


def _of_its_own(
    a: int, b: int, before: int, reach: Reach, most: int, held: bool
) -> Iterator[Piece]:
    """What the rows a..b of a segment see of it.   before: tokens of its prefix."""
    if not held and reach.first(before + b - a - 1) <= before:
        yield Piece(slice(a, b), slice(a, b), True, causal=True)
        return
    step = b - a if reach.chunk and not held else most
    c = a
    while c < b:
        end = min(c + step, b)
        if reach.chunk:  # to where the next chunk begins
            end = min(end, c + reach.chunk - (before + c - a) % reach.chunk)
        low = max(int(reach.first(before + c - a)) - before, 0) + a
        if low == c and reach.chunk and not held:
            yield Piece(slice(c, end), slice(c, end), True, causal=True)
        else:
            row_X = torch.arange(c, end)
            first_X = torch.as_tensor(reach.first(before + row_X - a)) - before + a - low
            yield Piece(slice(c, end), slice(low, end), True, seen=(first_X, row_X - low))
        c = end


def _runs(chosen_X: Tensor) -> list[tuple[int, int]]:
    """Return the runs of true as (from, to)."""
    edges = torch.diff(F.pad(chosen_X.int(), (1, 1))).nonzero()[:, 0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class _Pieces(torch.autograd.Function):
    """Attention piece by piece.

    A row's attention may be over several sets of keys.  Softmax over their union follows from the
    partial results and their log-sum-exps (as in ring attention); the backward pass needs only the
    union's output and log-sum-exp, because p = exp(score - logsumexp) and rowsum(dO * O) are the
    same for every key set.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None,
        pieces: tuple[Piece, ...],
        scale: float,
        cap: float | None,
    ) -> Tensor:
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)
        lse = torch.zeros(
            query.shape[:3], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32
        )
        for piece in pieces:
            rows, some = (
                piece.rows,
                (
                    query[:, :, piece.rows],
                    key[:, :, piece.keys],
                    value[:, :, piece.keys],
                ),
            )
            part_out, part_lse = part(
                *some, scale, cap, piece.bias(query.dtype), causal=piece.causal
            )
            if piece.own:
                out[:, :, rows], lse[:, :, rows] = part_out, part_lse
                continue
            lse_own = lse[:, :, rows]
            lse_union = torch.logaddexp(lse_own, part_lse)
            out[:, :, rows] = (
                out[:, :, rows] * (lse_own - lse_union).exp()[..., None]
                + part_out * (part_lse - lse_union).exp()[..., None]
            ).to(out.dtype)
            lse[:, :, rows] = lse_union
        if sinks_H is not None:
            lse_union = torch.logaddexp(lse, sinks_H.to(lse.dtype)[:, None])
            out, lse = (out * (lse - lse_union).exp()[..., None]).to(out.dtype), lse_union
        ctx.save_for_backward(query, key, value, out, lse, *([] if sinks_H is None else [sinks_H]))
        ctx.pieces, ctx.scale, ctx.cap = pieces, scale, cap
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *sinks = ctx.saved_tensors
        (grad_out,) = grads
        # Sums of several pieces, in float32 whatever the products are in.
        sums = torch.promote_types(query.dtype, torch.float32)
        totals = [torch.zeros_like(tensor, dtype=sums) for tensor in (query, key, value)]
        for piece in ctx.pieces:
            rows, keys = piece.rows, piece.keys
            tensors = (
                grad_out[:, :, rows],
                query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, rows],
            )
            if ctx.cap is not None:
                added = _capped_backward(
                    *tensors, lse[:, :, rows], ctx.scale, ctx.cap, piece.bias(sums)
                )
            else:
                if keys.stop - keys.start <= FLOAT_KEYS:
                    tensors = tuple(tensor.to(sums) for tensor in tensors)
                bias = piece.bias(tensors[1].dtype)
                added = _flash_backward(
                    *tensors, lse[:, :, rows], 0.0, piece.causal, attn_mask=bias, scale=ctx.scale
                )
            for total, places, more in zip(totals, (rows, keys, keys), added, strict=True):
                total[:, :, places] += more
        grad_sinks = None
        if sinks:
            along = (grad_out.to(sums) * out.to(sums)).sum(-1)
            grad_sinks = (
                -((sinks[0].to(lse.dtype)[:, None] - lse).exp() * along)
                .sum((0, 2))
                .to(sinks[0].dtype)
            )
        return *(total.to(query.dtype) for total in totals), grad_sinks, None, None, None


def _capped_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    cap: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from one piece whose scores are capped: d score / d raw = 1
    - tanh^2 = 4 s (1 - s).
    """
    sigmoid = _scores(query, key, scale, cap).sigmoid_()
    weights = torch.mul(sigmoid, 2.0 * cap).sub_((lse + cap)[..., None])
    if bias is not None:
        weights += bias
    weights.clamp_(min=LEAST).exp_()
    wide = weights.dtype
    query, key, value, grad_out, out = (x.to(wide) for x in (query, key, value, grad_out, out))
    slope = (_grouped(grad_out, key) @ value.transpose(-1, -2)).view_as(weights)
    slope.sub_((grad_out * out).sum(-1, keepdim=True)).mul_(weights)
    slope.mul_(torch.addcmul(sigmoid, sigmoid, sigmoid, value=-1.0)).mul_(4.0 * scale)
    grad_value = _grouped(weights, key).transpose(-1, -2) @ _grouped(grad_out, key)
    grad_key = _grouped(slope, key).transpose(-1, -2) @ _grouped(query, key)
    return (_grouped(slope, key) @ key).view_as(query), grad_key, grad_value
