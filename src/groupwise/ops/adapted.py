"""Linear layers with a low-rank adapter beside them (LoRA, 2106.09685), for a GPU.

`x W^T + b + s (x A^T) B^T` is three products here: the scale is a factor of the second, and the
third is added to the first.

T positions   I, O sides of a layer   N rank of the adapter
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from groupwise.ops.autograd import first_derivative
from groupwise.ops.functional import Affine, back, held, hold, like, times, weight_grad


def adapted_linear(
    x_TI: Tensor, layer: Affine, adapter: tuple[Tensor, Tensor], scale: float
) -> Tensor:
    """Return what a linear layer and its adapter give, (T, O), differentiable once.

    adapter: A (N, I) and B (O, N).
    """
    return AdaptedLinear.apply(x_TI, *layer, *adapter, scale)  # type: ignore[return-value]


class AdaptedLinear(torch.autograd.Function):
    """`adapted_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_NI: Tensor,
        b_ON: Tensor,
        scale: float,
    ) -> Tensor:
        hold(ctx, weight_OI, a_NI, b_ON)
        ctx.turned, ctx.scale = False, scale
        ctx.bias_type = None if bias_O is None else bias_O.dtype
        inner_TN = _scaled_product(x_TI, like(a_NI, x_TI, ctx.copies).T, scale)
        out_TO = times(x_TI, weight_OI, bias_O, False, ctx.copies)
        out_TO.addmm_(inner_TN, like(b_ON, x_TI, ctx.copies).T)
        ctx.save_for_backward(x_TI, inner_TN)
        return out_TO

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, inner_TN = ctx.saved_tensors
        weight_OI, a_NI, b_ON = held(ctx)
        needs_x, needs_weight, needs_bias, needs_a, needs_b, _ = ctx.needs_input_grad
        grad_TO = grads[0]
        grad_TN = _scaled_product(grad_TO, like(b_ON, grad_TO, ctx.copies), ctx.scale)
        grad_x_TI, grad_weight, grad_bias_O, grad_a, grad_b = [None] * 5
        if needs_x:
            grad_x_TI = back(ctx, grad_TO, weight_OI)
            grad_x_TI.addmm_(grad_TN, like(a_NI, grad_TN, ctx.copies))
        if needs_weight:
            grad_weight = weight_grad(ctx, x_TI, grad_TO, weight_OI)
        if needs_bias:
            grad_bias_O = grad_TO.sum(0).to(ctx.bias_type)
        if needs_a:
            grad_a = weight_grad(ctx, x_TI, grad_TN, a_NI)
        if needs_b:
            grad_b = weight_grad(ctx, inner_TN, grad_TO, b_ON)
        return grad_x_TI, grad_weight, grad_bias_O, grad_a, grad_b, None


def _scaled_product(a_MK: Tensor, b_KN: Tensor, scale: float) -> Tensor:
    """Return `scale * a b` by one operation, which reads nothing of its first argument."""
    return torch.addmm(a_MK.new_empty(b_KN.shape[1]), a_MK, b_KN, beta=0.0, alpha=scale)
