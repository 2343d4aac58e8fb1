"""Linear layers with a low-rank adapter beside them (LoRA, 2106.09685).

`x W^T + b + s (x A^T) B^T` is three products here: the scale is a factor of the second, and the
third is added to the first.

T positions   I, O sides of a layer   N rank of the adapter
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from groupwise.ops.autograd import first_derivative
from groupwise.ops.functional import (
    Copies,
    gated,
    held,
    hold,
    like,
    weight_grad,
)
from groupwise.ops.operations import operations

MakeMatrix = Callable[[torch.dtype], Tensor]
"""Makes a frozen weight (O, I) in a type, as a quantised layer does."""


def adapted_linear(
    x_TI: Tensor,
    layer: tuple[Tensor | MakeMatrix, Tensor | None],
    adapter: tuple[Tensor, Tensor],
    scale: float,
    gate_up: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return what a linear layer and its adapter give, (T, O), differentiable once.

    layer: weight and bias.   adapter: A (N, I) and B (O, N).
    gate_up: gate and up (T, I) of an MLP, if the input is `gated` of them.  They are kept anyway,
        and the input is made of them again.
    """
    weight, bias_O = layer
    weight_OI, make = (weight, None) if isinstance(weight, Tensor) else (None, weight)
    kept = (x_TI,) if gate_up is None else gate_up
    given = weight_OI, bias_O, *adapter, scale, make, *kept
    return AdaptedLinear.apply(x_TI, *given)  # type: ignore[return-value]


class AdaptedLinear(torch.autograd.Function):
    """`adapted_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: Tensor | None,
        bias_O: Tensor | None,
        a_NI: Tensor,
        b_ON: Tensor,
        scale: float,
        make: MakeMatrix | None,
        *kept: Tensor,
    ) -> Tensor:
        hold(ctx, weight_OI, a_NI, b_ON)
        ctx.turned, ctx.scale, ctx.make = False, scale, make
        ctx.bias_type = None if bias_O is None else bias_O.dtype
        bias_O = None if bias_O is None else like(bias_O, x_TI, ctx.copies)
        matrix_OI = _matrix(weight_OI, make, x_TI, ctx.copies)
        out_TO = operations().product(x_TI, matrix_OI.T, bias_O)
        inner_TN = _scaled_product(x_TI, like(a_NI, x_TI, ctx.copies).T, scale)
        out_TO.addmm_(inner_TN, like(b_ON, x_TI, ctx.copies).T)
        # A CPU makes it again: what is small and kept lies where large tensors were, and the next
        # of these find no room there.
        on_gpu = operations().gpu_kernels(x_TI) is not None
        ctx.save_for_backward(inner_TN if on_gpu else None, *kept)
        return out_TO

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inner_TN, *kept = ctx.saved_tensors
        weight_OI, a_NI, b_ON = held(ctx)
        needs_x, needs_weight, needs_bias, needs_a, needs_b, *others = ctx.needs_input_grad
        grad_TO = grads[0]
        grad_x_TI, grad_weight, grad_bias_O, grad_a, grad_b = [None] * 5
        if needs_x:
            matrix_OI = _matrix(weight_OI, ctx.make, grad_TO, ctx.copies)
            grad_x_TI = operations().product(grad_TO, matrix_OI)
        grad_TN = _scaled_product(grad_TO, like(b_ON, grad_TO, ctx.copies), ctx.scale)
        if grad_x_TI is not None:
            grad_x_TI.addmm_(grad_TN, like(a_NI, grad_TN, ctx.copies))
        x_TI = kept[0] if len(kept) == 1 else gated(*kept)
        if needs_weight:
            grad_weight = weight_grad(ctx, x_TI, grad_TO, weight_OI)
        if needs_bias:
            grad_bias_O = grad_TO.sum(0).to(ctx.bias_type)
        if needs_a:
            grad_a = weight_grad(ctx, x_TI, grad_TN, a_NI)
        if needs_b:
            if inner_TN is None:
                inner_TN = _scaled_product(x_TI, like(a_NI, x_TI, ctx.copies).T, ctx.scale)
            grad_b = weight_grad(ctx, inner_TN, grad_TO, b_ON)
        nothing = [None] * len(others)
        return grad_x_TI, grad_weight, grad_bias_O, grad_a, grad_b, *nothing


def _matrix(
    weight_OI: Tensor | None, make: MakeMatrix | None, x: Tensor, copies: Copies | None
) -> Tensor:
    """Return a layer's weight in the type of what it multiplies."""
    if make is not None:
        return make(x.dtype)
    assert weight_OI is not None
    return like(weight_OI, x, copies)


def _scaled_product(a_MK: Tensor, b_KN: Tensor, scale: float) -> Tensor:
    """Return `scale * a b` by one operation, which reads nothing of its first argument."""
    return torch.addmm(a_MK.new_empty(b_KN.shape[1]), a_MK, b_KN, beta=0.0, alpha=scale)
