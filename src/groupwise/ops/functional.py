"""The operations of `models/fused`: transformers' functions to rounding, with their gradients written out.

Each saves less for the backward pass than a composition of torch's operations does (of an MLP a third less: what is between its
products is made again), and makes fewer passes over the activations: one, where there are compiled kernels (package groupwise-cpu).

Each is an autograd Function that computes by compiled kernels where they take its tensors, else by torch's operations.  Gradients
of weights are added to `.grad` in place, and the down projection of an MLP is deferred behind what it saves (`LastProduct`).

T positions of a stream   D width   H heads   W head width   I inner width of an MLP
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from groupwise.ops import kernels
from groupwise.ops.autograd import first_derivative, unchanged, version
from groupwise.ops.in_place_gradients import gradient_of, summing
from groupwise.ops.kernels import operations
from groupwise.ops.matmul import add_product, product

BLOCK_NUMBERS = 1 << 16
"""Activations that are worked on at a time between products."""


class Copies(dict[tuple[Any, ...], tuple[Tensor, Tensor]]):
    """Copies of weights in the type of the products: (weight, copy), by the weight's address, shape, strides and the type."""

    closed = False

    def close(self) -> None:
        """Free the copies and cache no more: an autograd graph that is still alive would otherwise keep them in memory."""
        self.closed = True
        self.clear()


_copies: ContextVar[Copies | None] = ContextVar("copies", default=None)


@contextmanager
def copies_of_weights(keep: bool) -> Iterator[None]:
    """While inside, whichever thread runs the backward pass, a weight is copied into a lower precision once (`keep`)."""
    copies = Copies() if keep else None
    try:
        with Again({_copies: copies}):
            yield
    finally:
        if copies is not None:
            copies.close()


def again(*variables: ContextVar[Any]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What to compute a block in, and what to compute it in again, whichever thread does: `context_fn` of torch's checkpoint.

    variables: besides the copies of weights, what has to be then as it is now.
    """
    return nullcontext(), Again({variable: variable.get() for variable in (_copies, *variables)})


class Again(threading.local):
    """Context variables have these values while inside, entered as often as there are backward passes through a block, in any
    thread."""

    def __init__(self, values: Mapping[ContextVar[Any], Any]) -> None:
        self.values = values
        self.before: list[list[tuple[ContextVar[Any], Token[Any]]]] = []

    def __enter__(self) -> None:
        self.before.append([(variable, variable.set(value)) for variable, value in self.values.items()])

    def __exit__(self, *_: object) -> None:
        for variable, token in self.before.pop():
            variable.reset(token)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension in float32, rounded to `dtype` where transformers rounds it."""
    return RMSNorm.apply(x.contiguous(), weight_D, eps, dtype)  # type: ignore[return-value]


class RMSNorm(torch.autograd.Function):
    """`rms_norm` of contiguous rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.compiled = one_pass(x, weight_D, dtype)
        if ctx.compiled:
            out, scale_T = operations.rms_norm(x, weight_D, eps, dtype)
            ctx.save_for_backward(x, weight_D, scale_T)
            return out
        # What is returned is no view, for those who get it may change it in place.
        x_TD = x.flatten(0, -2)
        scale_T = x_TD.new_empty(x_TD.shape[0], 1, dtype=torch.promote_types(x.dtype, torch.float32))
        out = torch.empty_like(x, dtype=dtype)
        out_TD = out.flatten(0, -2)
        for rows in blocks(x_TD):
            wide_TD = x_TD[rows].to(scale_T.dtype)
            length_T = torch.linalg.vector_norm(wide_TD, dim=-1, keepdim=True)
            scale_T[rows] = length_T.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            # bfloat16 weights multiply what has been rounded already; float32 weights come first.
            if dtype == wide_TD.dtype:
                torch.mul(wide_TD, scale_T[rows], out=out_TD[rows]).mul_(weight_D)
            else:
                out_TD[rows] = (wide_TD * scale_T[rows]).to(x.dtype).mul_(weight_D)
        ctx.save_for_backward(x_TD, weight_D, scale_T)
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_D, scale_T = ctx.saved_tensors
        if ctx.compiled:
            return *operations.rms_norm_backward(grads[0].contiguous(), x_TD, weight_D, scale_T), None, None
        grad_out_TD, wide_D = grads[0].flatten(0, -2), weight_D.to(scale_T.dtype)
        grad_x_TD, grad_weight_D = torch.empty_like(x_TD), torch.zeros_like(wide_D)
        for rows in blocks(x_TD):
            grad_TD = grad_out_TD[rows].to(scale_T.dtype)
            unit_TD = x_TD[rows] * scale_T[rows]
            along_TD = unit_TD * grad_TD
            grad_weight_D += along_TD.sum(0)
            share_T = (along_TD @ wide_D).div_(-x_TD.shape[-1])[..., None]
            grad_x_TD[rows] = torch.mul(grad_TD, wide_D, out=along_TD).addcmul_(unit_TD, share_T).mul_(scale_T[rows])
        return grad_x_TD.view_as(grads[0]), grad_weight_D.to(weight_D.dtype), None, None


def one_pass(x_TD: Tensor, weight_D: Tensor, dtype: torch.dtype) -> bool:
    """True if the compiled norm rounds where transformers does: a weight in bfloat16 multiplies what has been rounded already."""
    return weight_D.dtype == torch.float32 and dtype in kernels.TYPES and x_TD.is_contiguous() and kernels.fits(x_TD, weight_D)


def rotary(x_HTW: Tensor, cos_TW: Tensor, sin_TW: Tensor) -> Tensor:
    """Rotate pairs (i, i + W/2) by the position's angles: `x * cos + rotate_half(x) * sin`, rounded once, to x's type."""
    return Rotary.apply(x_HTW, cos_TW, sin_TW)  # type: ignore[return-value]


class Rotary(torch.autograd.Function):
    """`rotary`."""

    @staticmethod
    def forward(ctx: Any, x_HTW: Tensor, cos_TW: Tensor, sin_TW: Tensor) -> Tensor:
        ctx.compiled = _rotates_in_one_pass(x_HTW, cos_TW)
        if ctx.compiled:
            cos_TW, sin_TW = (table.contiguous().view(-1, table.shape[-1]) for table in (cos_TW, sin_TW))
        ctx.save_for_backward(cos_TW, sin_TW)
        if ctx.compiled:
            return operations.rotary(x_HTW[0].transpose(0, 1), cos_TW, sin_TW).transpose(0, 1)[None]
        half = x_HTW.shape[-1] // 2
        # Widened first: products of two types at once are slow.
        wide_HTW = x_HTW.to(torch.promote_types(x_HTW.dtype, cos_TW.dtype))
        out_HTW = wide_HTW * cos_TW
        out_HTW[..., :half].addcmul_(wide_HTW[..., half:], sin_TW[..., :half], value=-1)
        out_HTW[..., half:].addcmul_(wide_HTW[..., :half], sin_TW[..., half:])
        return out_HTW.to(x_HTW.dtype)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_TW, sin_TW = ctx.saved_tensors
        grad_HTW = grads[0]
        if ctx.compiled:
            grad_HTW = grad_HTW if grad_HTW.stride(-1) == 1 else grad_HTW.contiguous()
            return operations.rotary(grad_HTW[0].transpose(0, 1), cos_TW, sin_TW, -1.0).transpose(0, 1)[None], None, None
        half = grad_HTW.shape[-1] // 2
        wide_HTW = grad_HTW.to(torch.promote_types(grad_HTW.dtype, cos_TW.dtype))
        out_HTW = wide_HTW * cos_TW
        out_HTW[..., :half].addcmul_(wide_HTW[..., half:], sin_TW[..., half:])
        out_HTW[..., half:].addcmul_(wide_HTW[..., :half], sin_TW[..., :half], value=-1)
        return out_HTW.to(grad_HTW.dtype), None, None


def _rotates_in_one_pass(x_1HTW: Tensor, cos_11TW: Tensor) -> bool:
    """True if the compiled rotary embedding takes these heads: one stream, float32 angles, halves of heads of whole vectors."""
    return x_1HTW.shape[0] == 1 and cos_11TW.dtype == torch.float32 and kernels.fits(x_1HTW, cos_11TW, width=x_1HTW.shape[-1] // 2)


def gated_mlp(x_TD: Tensor, gate_ID: Tensor, up_ID: Tensor, down_DI: Tensor) -> Tensor:
    """`down(silu(gate x) * up x)`."""
    placeholder_TD, gate_TI, up_TI = GatedMLP.apply(x_TD, gate_ID, up_ID, down_DI)  # type: ignore[misc]
    return LastProduct.apply(placeholder_TD, partial(_gated, gate_TI, up_TI), down_DI, None, False)  # type: ignore[return-value]


def gated(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """`silu(gate) * up` of contiguous rows."""
    return Gated.apply(gate_TI, up_TI)  # type: ignore[return-value]


class Gated(torch.autograd.Function):
    """`gated`."""

    @staticmethod
    def forward(ctx: Any, gate_TI: Tensor, up_TI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TI, up_TI)
        return _gated(gate_TI, up_TI)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_gate_TI = grads[0].clone(memory_format=torch.contiguous_format)
        _, grad_up_TI = _gate_gradients(grad_gate_TI, *ctx.saved_tensors)
        return grad_gate_TI, grad_up_TI


def plain_mlp(x_TD: Tensor, in_DI: Tensor, in_I: Tensor, out_ID: Tensor, out_D: Tensor) -> Tensor:
    """`gelu(x A + a) B + b` with GELU's tanh form, as in GPT-2."""
    placeholder_TD, inner_TI = PlainMLP.apply(x_TD, in_DI, in_I, out_ID, out_D)  # type: ignore[misc]
    return LastProduct.apply(placeholder_TD, partial(_gelu, inner_TI), out_ID, out_D, True)  # type: ignore[return-value]


class LastProduct(torch.autograd.Function):
    """The deferred down projection of an MLP: its gradient is that of the placeholder, which `GatedMLP` or `PlainMLP` made.

    A block that is computed again stops where it has saved all that the backward pass reads.  The placeholder saves, and
    this saves nothing: so none of this is computed again.
    """

    @staticmethod
    def forward(
        ctx: Any, placeholder_TD: Tensor, opened: Callable[[], Tensor], weight: Tensor, bias_D: Tensor | None, turned: bool
    ) -> Tensor:
        return _times(opened(), weight, bias_D, turned)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None


class GatedMLP(torch.autograd.Function):
    """The placeholder of `gated_mlp`, and its two first products, which are saved; the activations are made again."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gate_ID: Tensor, up_ID: Tensor, down_DI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _hold(ctx, gate_ID, up_ID, down_DI)
        gate_TI, up_TI = product(x_TD, _like(gate_ID, x_TD, ctx.copies).T), product(x_TD, _like(up_ID, x_TD, ctx.copies).T)
        ctx.save_for_backward(x_TD, gate_TI, up_TI)
        ctx.mark_non_differentiable(gate_TI, up_TI)
        ctx.set_materialize_grads(False)
        return x_TD.new_empty(1).expand_as(x_TD), gate_TI, up_TI

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, gate_TI, up_TI = ctx.saved_tensors
        gate_ID, up_ID, down_DI = _held(ctx)
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad
        grad_TD = grads[0]
        grad_gate_TI = product(grad_TD, _like(down_DI, x_TD, ctx.copies))  # of the inner activations; turned into the gate's below
        inner_TI, grad_up_TI = _gate_gradients(grad_gate_TI, gate_TI, up_TI)
        grad_down_DI = _weight_grad(ctx, grad_TD, inner_TI, down_DI) if needs_down else None
        del inner_TI
        grad_x_TD = product(grad_gate_TI, _like(gate_ID, x_TD, ctx.copies)) if needs_x else None
        if grad_x_TD is not None:
            add_product(grad_x_TD, grad_up_TI, _like(up_ID, x_TD, ctx.copies), fresh=False)
        grad_gate_ID = _weight_grad(ctx, grad_gate_TI, x_TD, gate_ID) if needs_gate else None
        return grad_x_TD, grad_gate_ID, _weight_grad(ctx, grad_up_TI, x_TD, up_ID) if needs_up else None, grad_down_DI


def _gated(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    if kernels.fits(gate_TI):
        return operations.gated(gate_TI, up_TI)
    inner_TI = torch.empty_like(gate_TI)
    for rows in blocks(gate_TI):
        torch.mul(F.silu(gate_TI[rows]), up_TI[rows], out=inner_TI[rows])
    return inner_TI


def _gate_gradients(grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor) -> tuple[Tensor, Tensor]:
    """`silu(gate) * up` again, and the gradient of `up`; `grad` becomes the gradient of `gate`."""
    if kernels.fits(gate_TI):
        return operations.gated_backward(grad_TI, gate_TI, up_TI)
    inner_TI, grad_up_TI = torch.empty_like(gate_TI), torch.empty_like(gate_TI)
    for rows in blocks(gate_TI):
        gate, up, grad = gate_TI[rows], up_TI[rows], grad_TI[rows]
        opened = F.silu(gate)
        torch.mul(opened, up, out=inner_TI[rows])
        torch.mul(opened, grad, out=grad_up_TI[rows])
        _silu_backward(grad.mul_(up), gate, grad_input=grad)
    return inner_TI, grad_up_TI


_silu_backward = torch.ops.aten.silu_backward.grad_input


def blocks(x_TI: Tensor) -> list[slice]:
    """Rows of which a few tensors stay in a core's cache between operations; on a GPU all of them."""
    count, width = x_TI.shape
    size = count if x_TI.is_cuda else max(1, BLOCK_NUMBERS // width)
    return [slice(start, start + size) for start in range(0, count, size)]


class PlainMLP(torch.autograd.Function):
    """The placeholder of `plain_mlp`, and its first product, which is saved; the activations are made again."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, in_DI: Tensor, in_I: Tensor, out_ID: Tensor, out_D: Tensor) -> tuple[Tensor, Tensor]:
        _hold(ctx, in_DI, in_I, out_ID, out_D)
        inner_TI = product(x_TD, _like(in_DI, x_TD, ctx.copies), _like(in_I, x_TD, ctx.copies))
        ctx.save_for_backward(x_TD, inner_TI)
        ctx.mark_non_differentiable(inner_TI)
        ctx.set_materialize_grads(False)
        return x_TD.new_empty(1).expand_as(x_TD), inner_TI

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, inner_TI = ctx.saved_tensors
        in_DI, in_I, out_ID, out_D = _held(ctx)
        needs_x, needs_in, needs_in_bias, needs_out, needs_out_bias = ctx.needs_input_grad
        grad_TD = grads[0]
        grad_TI = product(grad_TD, _like(out_ID, x_TD, ctx.copies).T)
        if kernels.fits(inner_TI):
            opened_TI = operations.gelu_backward(grad_TI, inner_TI)
        else:
            opened_TI = F.gelu(inner_TI, approximate="tanh") if needs_out else None
            grad_TI = torch.ops.aten.gelu_backward(grad_TI, inner_TI, approximate="tanh")
        grad_out_ID = _weight_grad(ctx, opened_TI, grad_TD, out_ID) if needs_out and opened_TI is not None else None
        del opened_TI
        return (
            product(grad_TI, _like(in_DI, x_TD, ctx.copies).T) if needs_x else None,
            _weight_grad(ctx, x_TD, grad_TI, in_DI) if needs_in else None,
            grad_TI.sum(0).to(in_I.dtype) if needs_in_bias else None,
            grad_out_ID,
            grad_TD.sum(0).to(out_D.dtype) if needs_out_bias else None,
        )


def _gelu(inner_TI: Tensor) -> Tensor:
    return operations.gelu(inner_TI) if kernels.fits(inner_TI) else F.gelu(inner_TI, approximate="tanh")


def worth_linear(weight: Tensor) -> bool:
    """True if `Linear` can be faster than torch's: smaller matrices are not worth what it does around the product."""
    return min(weight.shape) >= kernels.LEAST_SIDE


class Linear(torch.autograd.Function):
    """`x W^T + b`, or `x W + b` with the weight the other way round (`turned`), as GPT-2 keeps it."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight: Tensor, bias_O: Tensor | None, turned: bool) -> Tensor:
        # Under an adapter the weight is frozen, and then nobody needs its inputs again.
        ctx.save_for_backward(x_TI if ctx.needs_input_grad[1] else None)
        ctx.turned, ctx.bias_type = turned, None if bias_O is None else bias_O.dtype
        _hold(ctx, weight)
        return _times(x_TI, weight, bias_O, turned)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI,), (weight,) = ctx.saved_tensors, _held(ctx)
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        grad_TO = grads[0]
        grad_weight = None
        if x_TI is not None:
            grad_weight = _weight_grad(ctx, x_TI, grad_TO, weight) if ctx.turned else _weight_grad(ctx, grad_TO, x_TI, weight)
        weight_OI = _like(weight, grad_TO, ctx.copies).T if ctx.turned else _like(weight, grad_TO, ctx.copies)
        return (
            product(grad_TO, weight_OI) if needs_x else None,
            grad_weight,
            grad_TO.sum(0).to(ctx.bias_type) if needs_bias else None,
            None,
        )


def _times(x_TI: Tensor, weight: Tensor, bias_O: Tensor | None, turned: bool) -> Tensor:
    copies = _copies.get()
    weight_IO = _like(weight, x_TI, copies) if turned else _like(weight, x_TI, copies).T
    return product(x_TI, weight_IO, None if bias_O is None else _like(bias_O, x_TI, copies))


class EmbeddingRows(torch.autograd.Function):
    """Rows of an embedding.  Of its gradient only the rows that were read are touched, where it is summed in place.

    still: an id whose row gets no gradient from here (an embedding's `padding_idx`); -1: none.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VD: Tensor, still: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.still = still
        _hold(ctx, weight_VD)
        return F.embedding(ids, weight_VD)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), (weight_VD,) = ctx.saved_tensors, ctx.weights  # of which no number is read
        total_VD, fresh = gradient_of(weight_VD, ctx.summing)
        if total_VD is None:
            return None, torch.ops.aten.embedding_dense_backward(grads[0], ids, weight_VD.shape[0], ctx.still, False), None
        if fresh:
            total_VD.zero_()
        grad_TD = grads[0].masked_fill((ids == ctx.still)[..., None], 0.0).flatten(0, -2)
        total_VD.index_add_(0, ids.flatten(), grad_TD.to(total_VD.dtype))
        return None, None, None


def _hold(ctx: Any, *weights: Tensor) -> None:
    """Keep on `ctx` what the backward pass needs: the weights, their versions, the cached copies, and whether gradients are summed
    in place.

    The last two are context variables, which the threads of a backward pass do not see (on a GPU they are torch's own).  The
    weights are not saved tensors: activation checkpointing would return those as other tensor objects, without the parameter's
    `.grad`.
    """
    ctx.weights, ctx.copies, ctx.summing = weights, _copies.get(), summing()
    ctx.versions = [version(weight) for weight in weights]


def _held(ctx: Any) -> tuple[Tensor, ...]:
    unchanged(ctx.weights, ctx.versions)
    return ctx.weights


def _like(weight: Tensor, x: Tensor, copies: Copies | None) -> Tensor:
    """A weight in the type of what it multiplies."""
    if weight.dtype == x.dtype or copies is None or copies.closed:
        return weight.to(x.dtype)
    key = (weight.data_ptr(), weight.shape, weight.stride(), x.dtype)
    found = copies.get(key)
    if found is None:
        found = copies[key] = weight, weight.to(x.dtype)  # with the weight itself, so that its memory cannot become another's
    return found[1]


def _weight_grad(ctx: Any, left_TN: Tensor, right_TM: Tensor, weight_NM: Tensor) -> Tensor | None:
    """Gradient of a weight, in its own type; None where it was added to the weight's `.grad` itself."""
    total_NM, fresh = gradient_of(weight_NM, ctx.summing)
    if total_NM is None:
        return product(left_TN.T, right_TM).to(weight_NM.dtype)
    add_product(total_NM, left_TN.T, right_TM, fresh=fresh)
    return None
