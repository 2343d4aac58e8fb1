"""Linear layers over one input as one product: queries, keys and values, and an MLP's gate and up.

On a GPU one large product is faster than several, and the host asks once.  The lower precision of
weights is made for a step anyway; here it is made side by side.  Parameters stay apart: their
gradients are parts of one matrix, which the product writes in their own precision.

T positions   D width   I inner width of an MLP   J = 2 I   O widths of all layers   W head width
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from groupwise.ops.autograd import first_derivative
from groupwise.ops.functional import (
    Affine,
    Copies,
    LastProduct,
    affine_grads,
    back,
    held,
    hold,
    open_copies,
    pairs,
    weight_grad,
)
from groupwise.ops.in_place_gradients import is_summed
from groupwise.ops.operations import operations


def joins(x_TD: Tensor, layers: Sequence[Affine]) -> bool:
    """True if such layers are computed as one product: on a GPU, where copies of the weights in
    the type of their input are made for a step.

    All of them have a bias, or none.
    """
    if open_copies() is None or operations().gpu_kernels(x_TD) is None:
        return False
    biases = [bias_O is None for _, bias_O in layers]
    lower = [weight.dtype != x_TD.dtype for weight, _ in layers]
    return all(lower) and len(set(biases)) == 1


def gated_mlp(x_TD: Tensor, first: Sequence[Affine], last: Affine) -> Tensor:
    """`last(silu(gate x) * up x)`, with gate and up as one product."""
    placeholder_TD, joined_TJ = _JoinedGate.apply(x_TD, *chain(*first, last))  # type: ignore[misc]
    opened = partial(_opened, joined_TJ)
    return LastProduct.apply(placeholder_TD, opened, *last, False)  # type: ignore[return-value]


def _opened(joined_TJ: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return operations().gpu_kernels(joined_TJ).gated(*joined_TJ.chunk(2, -1))


class _JoinedGate(torch.autograd.Function):
    """The placeholder of `gated_mlp`, and gate beside up, which is saved."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        """parameters: weight and bias of gate, up and the last layer."""
        hold(ctx, *parameters)
        joined_TJ = _product(x_TD, pairs(parameters[:-2]), ctx.copies)
        ctx.save_for_backward(x_TD, joined_TJ)
        ctx.turned = False
        ctx.mark_non_differentiable(joined_TJ)
        ctx.set_materialize_grads(False)
        return x_TD.new_empty(1).expand_as(x_TD), joined_TJ

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, joined_TJ = ctx.saved_tensors
        *first, last = pairs(held(ctx))
        needs_x, *needs = ctx.needs_input_grad
        *_, needs_last = pairs(needs)
        grad_TD = grads[0]
        kernels = operations().gpu_kernels(joined_TJ)
        opened_TI, grad_TJ = kernels.joined_gate_backward(back(ctx, grad_TD, last[0]), joined_TJ)
        last_grads = affine_grads(ctx, opened_TI, grad_TD, last, needs_last)
        del opened_TI
        grad_x_TD = _back(grad_TJ, first, ctx.copies) if needs_x else None
        first_grads = _gradients(ctx, x_TD, grad_TJ, first, needs[:-2])
        return (grad_x_TD, *first_grads, *last_grads)


def attention_heads(
    x_TD: Tensor,
    layers: Sequence[Affine],
    counts: tuple[int, int],
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries and keys, and values, (T, heads, W).

    layers: to queries, keys and values.   counts: heads of queries and of keys.   tables: cosines
    and sines of the positions, (T, W) float32.   norms: weights of RMSNorms of the heads.
    """
    gains = (None, None) if norms is None else norms
    given = counts, eps, *tables, *gains, *chain(*layers)
    return _JoinedHeads.apply(x_TD, *given)  # type: ignore[return-value]


class _JoinedHeads(torch.autograd.Function):
    """`attention_heads`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        counts: tuple[int, int],
        eps: float,
        cos_TW: Tensor,
        sin_TW: Tensor,
        query_gain_W: Tensor | None,
        key_gain_W: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """parameters: weight and bias of three layers."""
        hold(ctx, query_gain_W, key_gain_W, *parameters)
        gains = None if query_gain_W is None else (query_gain_W, key_gain_W)
        joined_TO = _product(x_TD, pairs(parameters), ctx.copies)
        queries, keys = counts
        tables = {"cos_TW": cos_TW, "sin_TW": sin_TW}
        kernels = operations().gpu_kernels(x_TD)
        ctx.turned = False
        ctx.heads = kernels.heads(queries=queries, keys=keys, gains=gains, eps=eps, **tables)
        # Without norms the product is rotated in place, and not read again.
        ctx.save_for_backward(x_TD, None if gains is None else joined_TO)
        return ctx.heads.forward(joined_TO)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, joined_TO = ctx.saved_tensors
        _, *layers = pairs(held(ctx))
        needs_x, _, _, _, _, needs_query_gain, needs_key_gain, *needs = ctx.needs_input_grad
        grad_TO, grad_gain_2W = ctx.heads.backward(grads, joined_TO)
        grad_x_TD = _back(grad_TO, layers, ctx.copies) if needs_x else None
        gain_grads: list[Tensor | None] = [None, None]
        if needs_query_gain:
            gain_grads[0] = grad_gain_2W[0].to(ctx.heads.gains[0].dtype)
        if needs_key_gain:
            gain_grads[1] = grad_gain_2W[1].to(ctx.heads.gains[1].dtype)
        layer_grads = _gradients(ctx, x_TD, grad_TO, layers, needs)
        return (grad_x_TD, None, None, None, None, *gain_grads, *layer_grads)


def _product(x_TD: Tensor, layers: Sequence[Affine], copies: Copies | None) -> Tensor:
    """Return the outputs of layers side by side."""
    weights, biases_O = zip(*layers, strict=True)
    weight_OD, bias_O = _copy(weights, x_TD, copies), None
    if biases_O[0] is not None:
        bias_O = _copy(biases_O, x_TD, copies)
    return operations().product(x_TD, weight_OD.T, bias_O)


def _back(grad_TO: Tensor, layers: Sequence[Affine], copies: Copies | None) -> Tensor:
    """Return the gradient of the input of layers."""
    weights, _ = zip(*layers, strict=True)
    return operations().product(grad_TO, _copy(weights, grad_TO, copies))


def _copy(parts: tuple[Tensor, ...], x: Tensor, copies: Copies | None) -> Tensor:
    """Return weights one behind the other, in the type of what they multiply."""
    if copies is None or copies.closed:
        return torch.cat([part.to(x.dtype) for part in parts])
    return copies.joined(parts, x.dtype)


def _gradients(
    ctx: Any, x_TD: Tensor, grad_TO: Tensor, layers: Sequence[Affine], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return gradients of weights and biases, where they are needed and not summed in place."""
    weights, biases_O = zip(*layers, strict=True)
    weight_grads = _weight_gradients(ctx, x_TD, grad_TO, weights, needs[::2])
    bias_grads: list[Tensor | None] = [None] * len(layers)
    if biases_O[0] is not None:
        bias_grads = _bias_gradients(ctx, grad_TO, biases_O, needs[1::2])
    return list(chain(*zip(weight_grads, bias_grads, strict=True)))


def _weight_gradients(
    ctx: Any, x_TD: Tensor, grad_TO: Tensor, weights: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return gradients of weights; one product makes all of them where they are summed in place."""
    gradients: list[Tensor | None] = [None] * len(weights)
    total_OD, fresh = gradient_of_all(weights, ctx.summing)
    if total_OD is not None:
        operations().add_product(total_OD, grad_TO.T, x_TD, fresh=fresh)
        return gradients
    grads = grad_TO.split([weight.shape[0] for weight in weights], 1)
    for number, weight in enumerate(weights):
        if needs[number]:
            gradients[number] = weight_grad(ctx, x_TD, grads[number], weight)
    return gradients


def _bias_gradients(
    ctx: Any, grad_TO: Tensor, biases_O: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return gradients of biases, by one sum over positions."""
    gradients: list[Tensor | None] = [None] * len(biases_O)
    total_O, fresh = gradient_of_all(biases_O, ctx.summing)
    if total_O is None:
        parts = grad_TO.sum(0, dtype=biases_O[0].dtype).split([len(bias_O) for bias_O in biases_O])
        for number, needed in enumerate(needs):
            gradients[number] = parts[number] if needed else None
    elif fresh:
        torch.sum(grad_TO, 0, dtype=total_O.dtype, out=total_O)
    else:
        total_O += grad_TO.sum(0, dtype=total_O.dtype)
    return gradients


def gradient_of_all(weights: Sequence[Tensor], on: bool) -> tuple[Tensor | None, bool]:
    """Return the sum that gradients of all weights, one behind the other, may be added to, or None;
    and whether it holds nothing but noise.

    Their `.grad` are its parts.   on: what `summing` said in the forward pass.
    """
    if not all(is_summed(weight, on) for weight in weights):
        return None, False
    parts = [weight.grad for weight in weights]
    rows = [weight.shape[0] for weight in weights]
    if all(part is None for part in parts):
        total = weights[0].new_empty(sum(rows), *weights[0].shape[1:])
        for weight, part in zip(weights, total.split(rows), strict=True):
            weight.grad = part
        return total, True
    total = None if parts[0] is None else parts[0]._base
    if total is None or total.shape[0] != sum(rows):
        return None, False
    if any(part is None or part._base is not total for part in parts):
        return None, False
    return total, False
