"""Heads of queries, keys and values side by side, as one product gives them: normed and rotated.

Rotary embeddings are those of `rotary.py`, norms of heads RMSNorms with one weight for all query
heads and one for all key heads (Qwen3).  One kernel does both, and another both backwards.

T positions   H query heads   K key heads, and as many of values   W head width
O = (H + 2 K) W: what a position has   P programs of a backward pass
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.ops.triton.launch import power_of_two, quotient, warps_of
from groupwise.ops.triton.norm import PROGRAMS

NUMBERS = 1024
"""Most pairs of numbers that a program holds: of more, a backward pass with norms would keep some
in the card's memory.
"""


@triton.jit
def heads_kernel(
    x,
    cosine,
    sine,
    query_gain,
    key_gain,
    out,
    queries,
    heads,
    half,
    x_row,
    out_row,
    eps,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rotate `HEADS` query and key heads of one position.

    NORM: each head is normed first.   `out` may be `x`.
    """
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    paired = pair < half
    inside = (head < heads) & paired
    cos = tl.load(cosine + row * 2 * half + pair, mask=paired, other=0.0).to(tl.float32)
    sin = tl.load(sine + row * 2 * half + pair, mask=paired, other=0.0).to(tl.float32)
    place = row * x_row + head * 2 * half + pair
    first = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + place + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        rstd = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        of_query = inside & (head < queries)
        of_key = inside & (head >= queries)
        gain = tl.load(query_gain + pair, mask=of_query, other=0.0).to(tl.float32)
        gain += tl.load(key_gain + pair, mask=of_key, other=0.0).to(tl.float32)
        first = first * rstd * gain
        gain = tl.load(query_gain + half + pair, mask=of_query, other=0.0).to(tl.float32)
        gain += tl.load(key_gain + half + pair, mask=of_key, other=0.0).to(tl.float32)
        second = second * rstd * gain
    kind = out.dtype.element_ty
    target = out + row * out_row + head * 2 * half + pair
    tl.store(target, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(target + half, (second * cos + first * sin).to(kind), mask=inside)


@triton.jit
def heads_backward_kernel(
    grad_query,
    grad_key,
    grad_value,
    x,
    cosine,
    sine,
    query_gain,
    key_gain,
    grad_x,
    grad_gain,
    rows,
    queries,
    keys,
    half,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    x_row,
    eps,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Write the gradients of `HEADS` heads of `ROWS` positions side by side.

    NORM: also the sum of their gradients of both weights, (2, W).
    """
    program = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    paired = pair < half
    is_query = head < queries
    is_key = (head >= queries) & (head < queries + keys)
    is_value = (head >= queries + keys) & (head < queries + 2 * keys)
    kind = grad_x.dtype.element_ty
    query_first = tl.zeros([HALF], tl.float32)
    query_second = tl.zeros([HALF], tl.float32)
    key_first = tl.zeros([HALF], tl.float32)
    key_second = tl.zeros([HALF], tl.float32)
    for step in range(ROWS):
        row = program * ROWS + step
        there = paired & (row < rows)
        of_query = there & is_query
        of_key = there & is_key
        of_value = there & is_value
        inside = of_query | of_key | of_value
        cos = tl.load(cosine + row * 2 * half + pair, mask=there, other=0.0).to(tl.float32)
        sin = tl.load(sine + row * 2 * half + pair, mask=there, other=0.0).to(tl.float32)
        at_query = grad_query + row * query_row + head * query_head + pair
        at_key = grad_key + row * key_row + (head - queries) * key_head + pair
        value = head - queries - keys
        at_value = grad_value + row * value_row + value * value_head + pair
        first = tl.load(at_query, mask=of_query, other=0.0).to(tl.float32)
        first += tl.load(at_key, mask=of_key, other=0.0).to(tl.float32)
        second = tl.load(at_query + half, mask=of_query, other=0.0).to(tl.float32)
        second += tl.load(at_key + half, mask=of_key, other=0.0).to(tl.float32)
        grad_first = first * cos + second * sin
        grad_second = second * cos - first * sin
        place = row * x_row + head * 2 * half + pair
        if NORM:
            first = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(x + place + half, mask=inside, other=0.0).to(tl.float32)
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            rstd = tl.rsqrt(squares / (2 * half) + eps)[:, None]
            first *= rstd
            second *= rstd
            share = grad_first * first
            query_first += tl.sum(tl.where(is_query, share, 0.0), 0)
            key_first += tl.sum(tl.where(is_key, share, 0.0), 0)
            share = grad_second * second
            query_second += tl.sum(tl.where(is_query, share, 0.0), 0)
            key_second += tl.sum(tl.where(is_key, share, 0.0), 0)
            gain = tl.load(query_gain + pair, mask=of_query, other=0.0).to(tl.float32)
            gain += tl.load(key_gain + pair, mask=of_key, other=0.0).to(tl.float32)
            grad_first *= gain
            gain = tl.load(query_gain + half + pair, mask=of_query, other=0.0).to(tl.float32)
            gain += tl.load(key_gain + half + pair, mask=of_key, other=0.0).to(tl.float32)
            grad_second *= gain
            along = tl.sum(grad_first * first, 1) + tl.sum(grad_second * second, 1)
            mean = (along / (2 * half))[:, None]
            grad_first = (grad_first - first * mean) * rstd
            grad_second = (grad_second - second * mean) * rstd
        # Heads of values, whose gradients are 0 so far.
        grad_first += tl.load(at_value, mask=of_value, other=0.0).to(tl.float32)
        grad_second += tl.load(at_value + half, mask=of_value, other=0.0).to(tl.float32)
        tl.store(grad_x + place, grad_first.to(kind), mask=inside)
        tl.store(grad_x + place + half, grad_second.to(kind), mask=inside)
    if NORM:
        column = tl.arange(0, HALF)
        part = program * tl.num_programs(1) + tl.program_id(1)
        target = grad_gain + part * 4 * half + column
        tl.store(target, query_first, mask=column < half)
        tl.store(target + half, query_second, mask=column < half)
        tl.store(target + 2 * half, key_first, mask=column < half)
        tl.store(target + 3 * half, key_second, mask=column < half)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Heads:
    """What is done to the heads of a layer."""

    queries: int
    keys: int
    """Heads of keys, and as many of values."""
    cos_TW: Tensor
    """Tables of the positions, contiguous; both halves of a row are alike."""
    sin_TW: Tensor
    gains: tuple[Tensor, Tensor] | None
    """Weights of the norms of query and key heads."""
    eps: float

    @property
    def width(self) -> int:
        """Numbers of a head."""
        return self.cos_TW.shape[1]

    @property
    def _gains(self) -> Any:
        """The weights as a kernel is given them."""
        return (None, None) if self.gains is None else self.gains

    def _block(self, heads: int) -> tuple[int, int]:
        """Return how many heads a program takes, and half of a head, as powers of two."""
        half = power_of_two(self.width // 2)
        return min(power_of_two(heads), max(1, NUMBERS // half)), half

    def forward(self, x_TO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (T, heads, W).

        Without norms they are `x_TO`, rotated in place.   x_TO: contiguous.
        """
        rows, rotated = x_TO.shape[0], self.queries + self.keys
        x_TAW = x_TO.view(rows, -1, self.width)
        out_TRW = x_TAW
        if self.gains is not None:
            out_TRW = x_TO.new_empty(rows, rotated, self.width)
        block_heads, block_half = self._block(rotated)
        heads_kernel[(rows, quotient(rotated, block_heads))](
            x_TO,
            self.cos_TW,
            self.sin_TW,
            *self._gains,
            out_TRW,
            self.queries,
            rotated,
            self.width // 2,
            x_TO.shape[1],
            out_TRW.stride(0),
            self.eps,
            NORM=self.gains is not None,
            HEADS=block_heads,
            HALF=block_half,
            num_warps=warps_of(2 * block_heads * block_half),
        )
        query, key = out_TRW[:, : self.queries], out_TRW[:, self.queries : rotated]
        return query, key, x_TAW[:, rotated:]

    def backward(
        self, grads: Sequence[Tensor], x_TO: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of what `forward` was given, and of the weights, (2, W) float32.

        grads: of queries, keys and values.   x_TO: what `forward` was given, if there are norms.
        """
        parts = []
        for grad in grads:
            parts.append(grad if grad.stride(-1) == 1 else grad.contiguous())
        rows = parts[0].shape[0]
        rotated = self.queries + self.keys
        grad_x_TO = parts[0].new_empty(rows, (rotated + self.keys) * self.width)
        block_heads, block_half = self._block(rotated + self.keys)
        blocks = quotient(rotated + self.keys, block_heads)
        rows_of_program, grad_gain_P2W = 1, None
        if self.gains is not None:
            rows_of_program = power_of_two(quotient(rows * blocks, PROGRAMS))
            shape = (quotient(rows, rows_of_program) * blocks, 2, self.width)
            grad_gain_P2W = parts[0].new_empty(shape, dtype=torch.float32)
        heads_backward_kernel[(quotient(rows, rows_of_program), blocks)](
            *parts,
            x_TO,
            self.cos_TW,
            self.sin_TW,
            *self._gains,
            grad_x_TO,
            grad_gain_P2W,
            rows,
            self.queries,
            self.keys,
            self.width // 2,
            *parts[0].stride()[:2],
            *parts[1].stride()[:2],
            *parts[2].stride()[:2],
            grad_x_TO.shape[1],
            self.eps,
            NORM=self.gains is not None,
            ROWS=rows_of_program,
            HEADS=block_heads,
            HALF=block_half,
            num_warps=warps_of(2 * block_heads * block_half),
        )
        if grad_gain_P2W is None:
            return grad_x_TO, None
        return grad_x_TO, grad_gain_P2W.sum(0)
