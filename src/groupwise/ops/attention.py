"""Causal attention of packed streams whose prompts stand once per group: one dispatch, by device, type and length.

On a CPU: the compiled kernel, or torch's flash kernel once per stretch of the stream, merged by log-sum-exp.  In both a prompt's
keys are read once for all its completions and never copied.  On CUDA: FlexAttention with a block mask.  No mask of T x T is made.
The compiled kernel is the operation `groupwise::attention` of `torch.library`.

T positions of the stream   H query heads   K key-value heads   W head width
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.ops.autograd import first_derivative
from groupwise.ops.cpu import kernels
from groupwise.records import Layout


class StreamAttention:
    """Attention inside each segment of a stream, and from each segment to the whole of its prefix."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.families = tuple(_families(layout))
        before = [layout.length[prefix] if prefix >= 0 else 0 for prefix in layout.prefix]
        self.longest = max((own + prefix for own, prefix in zip(layout.length, before, strict=True)), default=0)
        """The most keys that a query sees."""
        self.stretches = kernels.Families([family.stretches for family in self.families])
        self._flex: Any = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Queries (1, H, T, W), keys and values (1, K, T, W) -> outputs (1, T, H, W)."""
        if query.is_cuda:
            return self._flex_attention(query, key, value, scale)
        if kernels.worth_attention(self.longest, query, key, value):
            out, _ = kernels.attention(query, key, value, *self.stretches.tensors, scale)
            return out.transpose(1, 2)
        return _Shared.apply(query, key, value, self.families, scale)  # type: ignore[return-value]

    def _flex_attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self._flex is None:
            self._flex = flex_block_mask(self.layout, query.device)
        attend = _compiled_flex() if query.is_cuda else _plain_flex()
        out = attend(query, key, value, block_mask=self._flex, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        return out.transpose(1, 2)


# ---------------------------------------------------------------- by stretches, in torch's operations


@dataclass(frozen=True, slots=True)
class Family:
    """A prefix and its members, one behind the other in the stream; or a single segment."""

    causal: tuple[tuple[int, int], ...]
    """Stretches (from, to) that look at themselves alone.  A prefix and its first member are one: a text as it was written."""
    prefix: tuple[int, int]
    rest: tuple[int, int]
    """The other members, which look at the prefix too."""

    @property
    def stretches(self) -> list[tuple[int, int, int, int]]:
        """(from, to, prefix from, prefix to), member by member."""
        (first, *others), prefix = self.causal, self.prefix
        return [(*first, 0, 0), *((*other, *prefix) for other in others)]


def _families(layout: Layout) -> Iterator[Family]:
    ends = [start + length for start, length in zip(layout.start, layout.length, strict=True)]
    s = 0
    while s < layout.segments:
        last = s + 1
        while last < layout.segments and layout.prefix[last] == s:
            last += 1
        first = min(s + 1, last - 1)
        others = range(first + 1, last)
        yield Family(
            causal=((layout.start[s], ends[first]), *((layout.start[c], ends[c]) for c in others)),
            prefix=(layout.start[s], ends[s]),
            rest=(ends[first], ends[last - 1]),
        )
        s = last


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FLOAT_KEYS = 384
"""Over fewer keys the backward kernel is 2 to 5 times faster in float32 than in bfloat16, conversions included."""


class _Shared(torch.autograd.Function):
    """Flash attention by stretches.

    A member's attention is over two sets of keys, its prefix and itself.  Softmax over their union follows from the two
    partial results and their log-sum-exps (as in ring attention); the backward pass needs only the union's output and
    log-sum-exp, because p = exp(score - logsumexp) and rowsum(dO * O) are the same for every key set.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, families: tuple[Family, ...], scale: float) -> Tensor:
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)
        lse = torch.zeros(query.shape[:3], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
        for family in families:
            for a, b in family.causal:
                out[:, :, a:b], lse[:, :, a:b] = _flash(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], 0.0, True, scale=scale)
            (p0, p1), (a, b) = family.prefix, family.rest
            if b > a:
                over_prefix, lse_prefix = _flash(query[:, :, a:b], key[:, :, p0:p1], value[:, :, p0:p1], 0.0, False, scale=scale)
                lse_own = lse[:, :, a:b]
                lse_union = torch.logaddexp(lse_own, lse_prefix)
                out[:, :, a:b] = (
                    out[:, :, a:b] * (lse_own - lse_union).exp()[..., None]
                    + over_prefix * (lse_prefix - lse_union).exp()[..., None]
                ).to(out.dtype)
                lse[:, :, a:b] = lse_union
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.families, ctx.scale = families, scale
        return out.transpose(1, 2)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad_out = grads[0].transpose(1, 2)
        # Sums of several stretches, in float32 whatever the products are in.
        sums = torch.promote_types(query.dtype, torch.float32)
        grad_query, grad_key, grad_value = (torch.empty_like(tensor, dtype=sums) for tensor in (query, key, value))

        def back(a: int, b: int, k0: int, k1: int, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            tensors = (grad_out[:, :, a:b], query[:, :, a:b], key[:, :, k0:k1], value[:, :, k0:k1], out[:, :, a:b])
            if k1 - k0 <= FLOAT_KEYS:
                tensors = tuple(tensor.to(sums) for tensor in tensors)
            return _flash_backward(*tensors, lse[:, :, a:b], 0.0, causal, scale=ctx.scale)

        end = 0
        for family in ctx.families:
            for a, b in family.causal:
                grad_query[:, :, a:b], grad_key[:, :, a:b], grad_value[:, :, a:b] = back(a, b, a, b, True)
                end = b
            (p0, p1), (a, b) = family.prefix, family.rest
            if b > a:
                over_query, over_key, over_value = back(a, b, p0, p1, False)
                grad_query[:, :, a:b] += over_query
                grad_key[:, :, p0:p1] += over_key
                grad_value[:, :, p0:p1] += over_value
        found = (grad_query, grad_key, grad_value)
        for grad in found:
            grad[:, :, end:] = 0.0  # filler
        return *(grad.to(query.dtype) for grad in found), None, None


# ---------------------------------------------------------------- on CUDA


FLEX_BLOCK = 128
"""Tokens to a side of FlexAttention's blocks."""


def flex_block_mask(layout: Layout, device: torch.device) -> Any:
    """FlexAttention's block mask of a layout: the same rule as `explicit_attention`, said position by position."""
    from torch.nn.attention.flex_attention import BlockMask

    segment_T = torch.full((layout.total,), -1, dtype=torch.int64)
    prefix_T = torch.full((layout.total,), -2, dtype=torch.int64)
    for s, (start, length, prefix) in enumerate(zip(layout.start, layout.length, layout.prefix, strict=True)):
        segment_T[start : start + length] = s
        prefix_T[start : start + length] = prefix if prefix >= 0 else -2
    segment_T, prefix_T = segment_T.to(device), prefix_T.to(device)

    def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # Filler attends to filler before it, so that its softmax has at least one key; nothing reads it.
        own = (segment_T[q] == segment_T[k]) & (q >= k)
        return own | (prefix_T[q] == segment_T[k])

    some_QK, all_QK = blocks_seen(layout)
    # Blocks to be looked at pair by pair, and those to be taken whole: how many for each row, and which, in order.
    columns = []
    for blocks_QK in (some_QK & ~all_QK, all_QK):
        columns += [blocks_QK.sum(-1), blocks_QK.int().argsort(dim=-1, descending=True, stable=True)]
    columns = [column[None, None].to(device, torch.int32) for column in columns]
    return BlockMask.from_kv_blocks(*columns, BLOCK_SIZE=FLEX_BLOCK, mask_mod=seen, seq_lengths=(layout.total, layout.total))


def blocks_seen(layout: Layout) -> tuple[Tensor, Tensor]:
    """(Q, K) on the host: where some query of a block sees some key of another, and where all see all, without a mask of pairs."""
    end = layout.start[-1] + layout.length[-1] if layout.segments else 0
    segments = list(zip(layout.start, layout.length, layout.prefix, strict=True))
    if layout.total > end:
        segments.append((end, layout.total - end, -1))
    size = -(-layout.total // FLEX_BLOCK)
    some_QK, whole_QK = torch.zeros(size, size, dtype=torch.bool), torch.zeros(size, size, dtype=torch.int64)
    for start, length, prefix in segments:
        # A prefix that stands right before is one stretch of keys with what follows it.
        first, last = (layout.start[prefix], layout.start[prefix] + layout.length[prefix]) if prefix >= 0 else (start, start)
        for q in range(start // FLEX_BLOCK, -(-(start + length) // FLEX_BLOCK)):
            a, b = max(start, q * FLEX_BLOCK), min(start + length, (q + 1) * FLEX_BLOCK)
            for from_, to in [(first, b)] if last == start else [(first, last), (start, b)]:  # what the last of them sees
                some_QK[q, from_ // FLEX_BLOCK : -(-to // FLEX_BLOCK)] = True
            for from_, to in [(first, a + 1)] if last == start else [(first, last), (start, a + 1)]:  # what the first does
                whole_QK[q, -(-from_ // FLEX_BLOCK) : to // FLEX_BLOCK] += b - a
    return some_QK, whole_QK == FLEX_BLOCK


def _plain_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


_compiled: Any = None


def _compiled_flex() -> Any:
    """Compiled once per process; packed streams have a new length every time, hence dynamic shapes."""
    global _compiled
    if _compiled is None:
        _compiled = torch.compile(_plain_flex(), dynamic=True)
    return _compiled
