"""Rotary embeddings of whole heads (Su et al. 2021): number i of a head is paired with i + W/2.

T positions   H heads   W head width   P positions of a table
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.ops.triton.launch import power_of_two, warps_of


@triton.jit
def rotary_kernel(
    x,
    cosine,
    sine,
    position,
    out,
    heads,
    half,
    x_row,
    x_head,
    out_row,
    out_head,
    sign,
    GATHER: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rotate all heads of one position.

    GATHER: the table's row is `position[t]`, else t.   sign: -1 rotates back.
    """
    row = tl.program_id(0).to(tl.int64)
    angle = row
    if GATHER:
        angle = tl.load(position + row)
    pair = tl.arange(0, HALF)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    paired = pair < half
    inside = (head < heads) & paired
    at_angle = angle * 2 * half + pair
    cos = tl.load(cosine + at_angle, mask=paired, other=0.0).to(tl.float32)
    sin = tl.load(sine + at_angle, mask=paired, other=0.0).to(tl.float32) * sign
    place = row * x_row + head * x_head + pair
    first = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + place + half, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    target = out + row * out_row + head * out_head + pair
    tl.store(target, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(target + half, (second * cos + first * sin).to(kind), mask=inside)


def _launch(
    x_THW: Tensor,
    cos_PW: Tensor,
    sin_PW: Tensor,
    position_T: Tensor | None,
    out_THW: Tensor,
    sign: float,
) -> Tensor:
    """Launch one program for each position; `out_THW` may be `x_THW`."""
    positions, heads, width = x_THW.shape
    block_heads, block_half = power_of_two(heads), power_of_two(width // 2)
    rotary_kernel[(positions,)](
        x_THW,
        cos_PW,
        sin_PW,
        position_T,
        out_THW,
        heads,
        width // 2,
        *x_THW.stride()[:2],
        *out_THW.stride()[:2],
        sign,
        GATHER=position_T is not None,
        HEADS=block_heads,
        HALF=block_half,
        num_warps=warps_of(block_heads * block_half),
    )
    return out_THW


def rotary(x_THW: Tensor, cos_TW: Tensor, sin_TW: Tensor, sign: float) -> Tensor:
    """Return heads rotated by the angles of their positions, in their type; -1 rotates back.

    Both halves of a row of a table are alike.
    """
    out_THW = torch.empty_like(x_THW, memory_format=torch.contiguous_format)
    return _launch(x_THW, cos_TW, sin_TW, None, out_THW, sign)


class TritonRotary:
    """Rotary embeddings that read the tables of all positions, and change heads in place."""

    def __init__(self, cos_PW: Tensor, sin_PW: Tensor) -> None:
        """Take float32 tables, which pair number i of a head with i + W/2."""
        self.cos_PW = cos_PW.contiguous()
        self.sin_PW = sin_PW.contiguous()
        self.order_W = torch.arange(cos_PW.shape[1], device=cos_PW.device)

    def at(self, position_T: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the rotary embedding of these positions."""
        return partial(self._rotated, position_T)

    def _rotated(self, position_T: Tensor, heads_THW: Tensor) -> Tensor:
        """Rotate heads in place."""
        return _launch(heads_THW, self.cos_PW, self.sin_PW, position_T, heads_THW, 1.0)
