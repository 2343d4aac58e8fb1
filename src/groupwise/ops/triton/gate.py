"""Activations of an MLP, and their gradients: silu(gate) * up, and GELU's tanh form.

Gradients come with the activations themselves, made again: a backward pass needs both, and they
are in registers already.

T rows   I inner width
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.ops.triton.launch import quotient

BLOCK = 1024


@triton.jit
def gated_kernel(gate, up, out, width, gate_row, up_row, BLOCK: tl.constexpr):
    """Write silu(gate) * up of one block of a row; rows of gate and up may lie apart."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    opening = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    number = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    result = opening * tl.sigmoid(opening) * number
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_kernel(
    grad,
    gate,
    up,
    inner,
    grad_gate,
    grad_up,
    width,
    gate_row,
    up_row,
    grad_row,
    BLOCK: tl.constexpr,
):
    """Write silu(gate) * up again and the gradients of both, of one block of a row.

    gate_row, up_row, grad_row: from one row of gate, of up or of their gradients to the next.
    `grad_gate` may be `grad`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    kind = inner.dtype.element_ty
    place = row * width + column
    target = row * grad_row + column
    grad_inner = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    number = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(opening)
    opened = opening * share
    slope = share + opened * (1.0 - share)
    tl.store(inner + place, (opened * number).to(kind), mask=inside)
    tl.store(grad_up + target, (grad_inner * opened).to(kind), mask=inside)
    tl.store(grad_gate + target, (grad_inner * number * slope).to(kind), mask=inside)


@triton.jit
def gelu_kernel(x, grad, out, numbers, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    """Write GELU's tanh form, which is x * sigmoid(2 y) with y = sqrt(2 / pi) (x + 0.044715 x^3).

    GRAD: `grad` becomes the gradient of x.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    kind = out.dtype.element_ty
    number = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    square = number * number
    share = tl.sigmoid(1.5957691216057308 * number * (1.0 + 0.044715 * square))
    tl.store(out + place, (number * share).to(kind), mask=inside)
    if GRAD:
        inner_slope = 1.5957691216057308 * (1.0 + 0.134145 * square)
        slope = share + number * share * (1.0 - share) * inner_slope
        grad_out = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad + place, (grad_out * slope).to(kind), mask=inside)


def gated(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous; rows of gate and up may lie apart."""
    rows, width = gate_TI.shape
    out_TI = torch.empty_like(gate_TI, memory_format=torch.contiguous_format)
    gated_kernel[(rows, quotient(width, BLOCK))](
        gate_TI, up_TI, out_TI, width, gate_TI.stride(0), up_TI.stride(0), BLOCK=BLOCK
    )
    return out_TI


def gated_backward(grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up and the gradient of up; `grad` becomes the gradient of gate.

    Rows of gate and up may lie apart; `grad` is contiguous.
    """
    grad_up_TI = torch.empty_like(up_TI, memory_format=torch.contiguous_format)
    return _gated_backward(grad_TI, gate_TI, up_TI, grad_TI, grad_up_TI), grad_up_TI


def joined_gate_backward(grad_TI: Tensor, joined_TJ: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up and the gradient of gate beside up, J = 2 I; all are contiguous."""
    grad_TJ = torch.empty_like(joined_TJ)
    (gate_TI, up_TI), (grad_gate_TI, grad_up_TI) = joined_TJ.chunk(2, -1), grad_TJ.chunk(2, -1)
    return _gated_backward(grad_TI, gate_TI, up_TI, grad_gate_TI, grad_up_TI), grad_TJ


def _gated_backward(
    grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor, grad_gate_TI: Tensor, grad_up_TI: Tensor
) -> Tensor:
    """Launch the kernel; return silu(gate) * up."""
    rows, width = grad_TI.shape
    inner_TI = torch.empty_like(grad_TI)
    gated_backward_kernel[(rows, quotient(width, BLOCK))](
        grad_TI,
        gate_TI,
        up_TI,
        inner_TI,
        grad_gate_TI,
        grad_up_TI,
        width,
        gate_TI.stride(0),
        up_TI.stride(0),
        grad_up_TI.stride(0),
        BLOCK=BLOCK,
    )
    return inner_TI


def _gelu(x_TI: Tensor, grad_TI: Any) -> Tensor:
    """Launch the kernel over all numbers, which follow one another in memory."""
    x_TI = x_TI.contiguous()
    out_TI = torch.empty_like(x_TI)
    numbers = x_TI.numel()
    grid = (quotient(numbers, BLOCK),)
    gelu_kernel[grid](x_TI, grad_TI, out_TI, numbers, GRAD=grad_TI is not None, BLOCK=BLOCK)
    return out_TI


def gelu(x_TI: Tensor) -> Tensor:
    """Return GELU's tanh form, contiguous."""
    return _gelu(x_TI, None)


def gelu_backward(grad_TI: Tensor, x_TI: Tensor) -> Tensor:
    """Return GELU's tanh form again; `grad`, which is contiguous, becomes the gradient of x."""
    return _gelu(x_TI, grad_TI)
