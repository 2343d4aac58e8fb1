"""RMSNorm, with the residual sum before it or of heads, and its gradients.

`weight * x / sqrt(mean(x^2) + eps)` over the last dimension (Zhang and Sennrich 2019).  Torch's
operations launch 6 to 9 kernels for what is one here.

T rows   D width   H heads   P programs of a backward pass
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.ops.triton.launch import power_of_two, quotient, warps_of

PROGRAMS = 512
"""Most programs of a backward pass: each sums a gradient of the weight of its own, of 4 D bytes."""


@triton.jit
def forward_kernel(
    x,
    add,
    weight,
    out,
    scale,
    heads,
    width,
    x_row,
    x_head,
    out_row,
    out_head,
    eps,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise one head of one row.

    ADD: add a row of `add` to `x` first, in place.   KEEP: write `1 / sqrt(...)` into `scale`.
    ROUND: round to the type of `x` before the weight multiplies.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // heads
    head = program % heads
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * x_row + head * x_head + column
    number = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        number += tl.load(add + row * width + column, mask=inside, other=0.0).to(tl.float32)
        total = number.to(x.dtype.element_ty)
        tl.store(x + place, total, mask=inside)
        number = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(number * number, 0) / width + eps)
    unit = number * rstd
    if ROUND:
        unit = unit.to(x.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + head * width + column, mask=inside, other=0.0).to(tl.float32)
    result = (unit * gain).to(out.dtype.element_ty)
    tl.store(out + row * out_row + head * out_head + column, result, mask=inside)
    if KEEP:
        tl.store(scale + program, rstd)


@triton.jit
def backward_kernel(
    grad,
    x,
    weight,
    scale,
    grad_x,
    grad_weight,
    rows,
    width,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of `ROWS` rows, and the sum of their gradients of the weight.

    With u = x * rstd and g = grad * weight:  dx = (g - u * mean(g * u)) * rstd,  dw = grad * u.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(ROWS):
        row = program * ROWS + step
        there = inside & (row < rows)
        place = row * width + column
        number = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
        grad_out = tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
        rstd = tl.load(scale + row, mask=row < rows, other=0.0)
        unit = number * rstd
        if WEIGHT:
            total += grad_out * unit
        along = grad_out * gain
        share = tl.sum(along * unit, 0) / width
        result = ((along - unit * share) * rstd).to(grad_x.dtype.element_ty)
        tl.store(grad_x + place, result, mask=there)
    if WEIGHT:
        tl.store(grad_weight + program * width + column, total, mask=inside)


def _launch(
    x_THD: Tensor,
    add: Tensor | None,
    weight: Tensor,
    eps: float,
    out_THD: Tensor,
    scale: Tensor | None,
    *,
    rounded: bool,
) -> None:
    """Launch one program for each head of each row."""
    rows, heads, width = x_THD.shape
    block = power_of_two(width)
    forward_kernel[(rows * heads,)](
        x_THD,
        add,
        weight,
        out_THD,
        scale,
        heads,
        width,
        *x_THD.stride()[:2],
        *out_THD.stride()[:2],
        eps,
        ADD=add is not None,
        KEEP=scale is not None,
        ROUND=rounded,
        BLOCK=block,
        num_warps=warps_of(block),
    )


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the norm of contiguous rows (..., D) in `dtype`, and `1 / sqrt(...)` of each (T, 1).

    A weight in a lower precision multiplies what has been rounded to the type of `x`, as
    transformers does.
    """
    width = x.shape[-1]
    x_TD = x.view(-1, width)
    out = torch.empty_like(x, dtype=dtype)
    scale_T = x.new_empty(x_TD.shape[0], 1, dtype=torch.float32)
    rounded = weight_D.dtype != torch.float32 and x.dtype != torch.float32
    out_TD = out.view(-1, width)
    _launch(x_TD[:, None], None, weight_D, eps, out_TD[:, None], scale_T, rounded=rounded)
    return out, scale_T


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight_D: Tensor, scale_T: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `x`, and of the weight if it is needed; all rows are contiguous."""
    width = x.shape[-1]
    rows = x.numel() // width
    rows_of_program = power_of_two(quotient(rows, PROGRAMS))
    programs = quotient(rows, rows_of_program)
    grad_x = torch.empty_like(x)
    grad_weight_PD: Any = None
    if needs_weight:
        grad_weight_PD = x.new_empty(programs, width, dtype=torch.float32)
    block = power_of_two(width)
    backward_kernel[(programs,)](
        grad,
        x,
        weight_D,
        scale_T,
        grad_x,
        grad_weight_PD,
        rows,
        width,
        WEIGHT=needs_weight,
        ROWS=rows_of_program,
        BLOCK=block,
        num_warps=warps_of(block),
    )
    if grad_weight_PD is None:
        return grad_x, None
    return grad_x, grad_weight_PD.sum(0).to(weight_D.dtype)


class TritonNorm:
    """An RMSNorm behind a residual sum; with weights (H, W) RMSNorms of heads, each by its own."""

    def __init__(self, weight: Tensor, eps: float, *, dtype: torch.dtype) -> None:
        """dtype: the type of the result."""
        self.weight = weight.detach().float().contiguous()
        self.bias: Tensor | None = None
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Add `add` to `x` (T, D) in place, then return its norm; heads (T, H, W) are changed in
        place.
        """
        if x.ndim == 3:
            _launch(x, None, self.weight, self.eps, x, None, rounded=False)
            return x
        out_TD = torch.empty_like(x, dtype=self.dtype, memory_format=torch.contiguous_format)
        if add is not None:
            add = add.contiguous()
        _launch(x[:, None], add, self.weight, self.eps, out_TD[:, None], None, rounded=False)
        return out_TD
