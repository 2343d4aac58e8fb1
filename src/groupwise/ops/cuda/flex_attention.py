"""FlexAttention of packed streams: windows, chunks, soft caps, and types that flash attention does
not take.

T positions of the stream   H query heads   K key-value heads   D head width   E width of values
Q, K of a mask: blocks of queries and of keys
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest

from groupwise.ops.query import EVERYTHING, Reach
from groupwise.records import Layout

FLEX_BLOCK = 128
"""Tokens to a side of FlexAttention's blocks."""
FLEX_WIDTH = 16
"""The narrowest heads that FlexAttention takes on a GPU."""


def flex_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    cap: float | None,
    block_mask: Any,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attend where the block mask lets it, (1, H, T, E).

    query (1, H, T, D), key (1, K, T, D), value (1, K, T, E).   cap, sinks_H: see `Query`.
    """
    attend = _compiled_flex() if query.is_cuda else _plain_flex()
    width = value.shape[-1]
    query, key, value = _wide_enough(query), _wide_enough(key), _wide_enough(value)
    # Outside of autocast: its state would compile the same kernel a second time.
    with torch.autocast(query.device.type, enabled=False):
        out, aux = attend(
            query,
            key,
            value,
            score_mod=None if cap is None else _capped(cap, query.device),
            block_mask=block_mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
            # The kernel for short queries has no gradients.
            kernel_options={"BACKEND": "TRITON"},
        )
    out = out[..., :width]
    if sinks_H is None:
        return out
    share = torch.sigmoid(aux.lse - sinks_H.to(aux.lse.dtype)[:, None])
    return out * share[..., None].to(out.dtype)


def _wide_enough(x: Tensor) -> Tensor:
    """Put zeros behind heads that are too narrow for the kernel: they add nothing."""
    missing = FLEX_WIDTH - x.shape[-1]
    return F.pad(x, (0, missing)) if missing > 0 else x


def flex_block_mask(layout: Layout, device: torch.device, reach: Reach = EVERYTHING) -> Any:
    """FlexAttention's block mask of a layout: which pairs of a query and a key it computes."""
    from torch.nn.attention.flex_attention import BlockMask

    segment_T = torch.full((layout.total,), -1, dtype=torch.int64)
    prefix_T = torch.full((layout.total,), -2, dtype=torch.int64)
    position_T = torch.zeros(layout.total, dtype=torch.int64)
    for s, (start, length, prefix) in enumerate(
        zip(layout.start, layout.length, layout.prefix, strict=True)
    ):
        segment_T[start : start + length] = s
        prefix_T[start : start + length] = prefix if prefix >= 0 else -2
        before = layout.length[prefix] if prefix >= 0 else 0
        position_T[start : start + length] = torch.arange(before, before + length)
    first_T = torch.as_tensor(reach.first(position_T))
    segment_T, prefix_T, position_T, first_T = (
        x.to(device) for x in (segment_T, prefix_T, position_T, first_T)
    )

    def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # Filler attends to filler before it, so that its softmax has at least one key; nothing
        # reads it.
        own = (segment_T[q] == segment_T[k]) & (q >= k)
        return (own | (prefix_T[q] == segment_T[k])) & (position_T[k] >= first_T[q])

    some_QK, all_QK = blocks_seen(layout, reach)
    # Blocks to be looked at pair by pair, and those to be taken whole: how many for each row, and
    # which, in order.
    columns = []
    for blocks_QK in (some_QK & ~all_QK, all_QK):
        columns += [
            blocks_QK.sum(-1),
            blocks_QK.int().argsort(dim=-1, descending=True, stable=True),
        ]
    columns = [column[None, None].to(device, torch.int32) for column in columns]
    return BlockMask.from_kv_blocks(
        *columns, BLOCK_SIZE=FLEX_BLOCK, mask_mod=seen, seq_lengths=(layout.total, layout.total)
    )


def blocks_seen(layout: Layout, reach: Reach = EVERYTHING) -> tuple[Tensor, Tensor]:
    """(Q, K) on the host: where some query of a block sees some key of another, and where all see
    all, without a mask of pairs.
    """
    end = layout.start[-1] + layout.length[-1] if layout.segments else 0
    segments = [
        (*segment, reach)
        for segment in zip(layout.start, layout.length, layout.prefix, strict=True)
    ]
    if layout.total > end:
        segments.append(
            (end, layout.total - end, -1, EVERYTHING)
        )  # filler is at position 0, and hides nothing of itself
    size = -(-layout.total // FLEX_BLOCK)
    some_QK, whole_QK = (
        torch.zeros(size, size, dtype=torch.bool),
        torch.zeros(size, size, dtype=torch.int64),
    )
    for start, length, prefix, sees in segments:
        begin, before = (layout.start[prefix], layout.length[prefix]) if prefix >= 0 else (start, 0)

        def spans(
            low: int, high: int, start: int = start, begin: int = begin, before: int = before
        ) -> list[tuple[int, int]]:
            """Where the positions low..high of a sequence lie in the stream."""
            if begin + before == start:
                return [(begin + low, begin + high)]
            return [
                (begin + low, begin + min(high, before)),
                (start + max(low, before) - before, start + high - before),
            ]

        for q in range(start // FLEX_BLOCK, -(-(start + length) // FLEX_BLOCK)):
            a, b = max(start, q * FLEX_BLOCK), min(start + length, (q + 1) * FLEX_BLOCK)
            first, last = before + a - start, before + b - start - 1
            for from_, to in spans(
                max(int(sees.first(first)), 0), last + 1
            ):  # what one of them sees
                if to > from_:
                    some_QK[q, from_ // FLEX_BLOCK : -(-to // FLEX_BLOCK)] = True
            for from_, to in spans(max(int(sees.first(last)), 0), first + 1):  # what all do
                if to > from_:
                    whole_QK[q, -(-from_ // FLEX_BLOCK) : to // FLEX_BLOCK] += b - a
    return some_QK, whole_QK == FLEX_BLOCK


@cache
def _capped(cap: float, device: torch.device) -> Callable[..., Tensor]:
    """What FlexAttention does to a score: one function for each cap, which reads it from the
    device.

    A number of Python's would be compiled as one that may change, and dynamo takes no such number
    here.
    """
    with torch.inference_mode(False):
        cap_ = torch.tensor(cap, device=device)

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap_ * torch.tanh(score / cap_)

    return capped


def _plain_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex() -> Any:
    """Compiled once per process; packed streams have a new length every time, hence dynamic shapes.

    It is compiled again for each type, for passes with and without gradients, and for each cap.
    """
    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, 64
    )  # else torch runs the rest uncompiled
    return torch.compile(_plain_flex(), dynamic=True, fullgraph=True)
