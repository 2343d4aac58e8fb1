"""The operations of `models/fused.py`: transformers' functions to rounding, with their gradients
written out.

Each saves less for the backward pass than a composition of torch's operations does (of an MLP a
third less: what is between its products is made again), and makes fewer passes over the
activations: one, where there are kernels (`Operations.block_kernels`).

Each is an autograd Function that computes by kernels where they take its tensors, else by
torch's operations: the same on every device.  Gradients of weights are added to `.grad` in place,
and the down projection of an MLP is deferred behind what it saves (`LastProduct`).

T positions of a stream   D width   H heads   W head width   I inner width of an MLP
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from groupwise.ops.autograd import first_derivative, unchanged, version
from groupwise.ops.in_place_gradients import gradient_of, summing
from groupwise.ops.operations import operations

BLOCK_NUMBERS = 1 << 16
"""Activations that are worked on at a time between products."""
NORM_TYPES = (torch.float32, torch.bfloat16)
"""Types that kernels of norms round to."""
LEAST_SIDE = 96
"""A linear layer with a shorter side is not worth what `Linear` does around its product."""


class Copies(dict[tuple[Any, ...], tuple[tuple[Tensor, ...], Tensor]]):
    """Copies of weights in the type of the products, each with its weights, so that their memory
    cannot become another's.

    Several weights have one copy, one behind the other, where they are one product.
    """

    def __init__(self, groups: Sequence[tuple[Tensor, ...]]) -> None:
        """groups: weights that are copied when the first copy is asked for, all at once."""
        super().__init__()
        self.groups = groups
        self.closed = False

    def joined(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return the copy of weights in a type that is not theirs."""
        key = _key(parts, dtype)
        if key not in self and self.groups:
            self._copy_groups(dtype)
        if key not in self:
            lower = [part.to(dtype) for part in parts]
            self[key] = parts, lower[0] if len(lower) == 1 else torch.cat(lower)
        return self[key][1]

    def _copy_groups(self, dtype: torch.dtype) -> None:
        """Copy all groups in one operation."""
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for parts in self.groups:
            if parts[0].dtype == dtype:
                continue
            rows = [part.shape[0] for part in parts]
            copy = parts[0].new_empty(sum(rows), *parts[0].shape[1:], dtype=dtype)
            sources += parts
            targets += copy.split(rows)
            self[_key(parts, dtype)] = parts, copy
        self.groups = ()
        if targets:
            torch._foreach_copy_(targets, sources)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Free the copies and cache no more: an autograd graph that is still alive would otherwise
        keep them in memory.
        """
        self.closed = True
        self.groups = ()
        self.clear()


def _key(parts: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """What a copy is known by: where its weights lie and how, and its type."""
    return dtype, *[(part.data_ptr(), part.shape, part.stride()) for part in parts]


_copies: ContextVar[Copies | None] = ContextVar("copies", default=None)


def open_copies() -> Copies | None:
    """Return the copies that are kept; asked in a forward pass."""
    return _copies.get()


@contextmanager
def copies_of_weights(keep: bool, groups: Sequence[tuple[Tensor, ...]] = ()) -> Iterator[None]:
    """While inside, whichever thread runs the backward pass, a weight is copied into a lower
    precision once (`keep`).

    groups: see `Copies`.
    """
    copies = Copies(groups) if keep else None
    before = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(before)
        if copies is not None:
            copies.close()


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension in float32, rounded to `dtype`
    where transformers rounds it.
    """
    return RMSNorm.apply(x.contiguous(), weight_D, eps, dtype)  # type: ignore[return-value]


class RMSNorm(torch.autograd.Function):
    """`rms_norm` of contiguous rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.kernels = norm_kernels(x, weight_D, dtype)
        if ctx.kernels is not None:
            out, scale_T = ctx.kernels.rms_norm(x, weight_D, eps, dtype)
            ctx.save_for_backward(x, weight_D, scale_T)
            return out
        # What is returned is no view, for those who get it may change it in place.
        x_TD = x.flatten(0, -2)
        wide = torch.promote_types(x.dtype, torch.float32)
        scale_T = x_TD.new_empty(x_TD.shape[0], 1, dtype=wide)
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
        needs_weight = ctx.needs_input_grad[1]  # a norm under an adapter is frozen
        if ctx.kernels is not None:
            saved = x_TD, weight_D, scale_T
            inputs = ctx.kernels.rms_norm_backward(grads[0].contiguous(), *saved, needs_weight)
            return (*inputs, None, None)
        grad_out_TD, wide_D = grads[0].flatten(0, -2), weight_D.to(scale_T.dtype)
        grad_x_TD, grad_weight_D = torch.empty_like(x_TD), None
        if needs_weight:
            grad_weight_D = torch.zeros_like(wide_D)
        for rows in blocks(x_TD):
            grad_TD = grad_out_TD[rows].to(scale_T.dtype)
            unit_TD = x_TD[rows] * scale_T[rows]
            along_TD = unit_TD * grad_TD
            if grad_weight_D is not None:
                grad_weight_D += along_TD.sum(0)
            share_T = (along_TD @ wide_D).div_(-x_TD.shape[-1])[..., None]
            torch.mul(grad_TD, wide_D, out=along_TD).addcmul_(unit_TD, share_T)
            grad_x_TD[rows] = along_TD.mul_(scale_T[rows])
        if grad_weight_D is not None:
            grad_weight_D = grad_weight_D.to(weight_D.dtype)
        return grad_x_TD.view_as(grads[0]), grad_weight_D, None, None


def norm_kernels(x_TD: Tensor, weight_D: Tensor, dtype: torch.dtype) -> Any:
    """Return kernels whose norm rounds where transformers does, or None: a weight in a lower
    precision multiplies what has been rounded already.
    """
    if dtype not in NORM_TYPES or not x_TD.is_contiguous():
        return None
    kernels = operations().block_kernels(x_TD, weight_D)
    if kernels is None or weight_D.dtype == torch.float32 or kernels.rounds_first:
        return kernels
    return None


def rotary(x_HTW: Tensor, cos_TW: Tensor, sin_TW: Tensor) -> Tensor:
    """Rotate pairs (i, i + W/2) by the position's angles: `x * cos + rotate_half(x) * sin`, rounded
    once, to x's type.

    Both halves of a table are alike.
    """
    return Rotary.apply(x_HTW, cos_TW, sin_TW)  # type: ignore[return-value]


class Rotary(torch.autograd.Function):
    """`rotary`."""

    @staticmethod
    def forward(ctx: Any, x_HTW: Tensor, cos_TW: Tensor, sin_TW: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TW, sin_TW)
        return _rotated(x_HTW, cos_TW, sin_TW, 1.0)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_TW, sin_TW = ctx.saved_tensors
        grad_HTW = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        return _rotated(grad_HTW, cos_TW, sin_TW, -1.0), None, None


def _rotated(x_HTW: Tensor, cos_TW: Tensor, sin_TW: Tensor, sign: float) -> Tensor:
    """sign: -1 rotates back.   The kernel takes one stream, float32 angles, and halves of heads of
    whole vectors.
    """
    half = x_HTW.shape[-1] // 2
    kernels = None
    if x_HTW.shape[0] == 1 and cos_TW.dtype == torch.float32:
        kernels = operations().block_kernels(x_HTW, cos_TW, width=half)
    if kernels is not None:
        tables = (table.contiguous().view(-1, 2 * half) for table in (cos_TW, sin_TW))
        return kernels.rotary(x_HTW[0].transpose(0, 1), *tables, sign).transpose(0, 1)[None]
    # Widened first: products of two types at once are slow.
    wide_HTW = x_HTW.to(torch.promote_types(x_HTW.dtype, cos_TW.dtype))
    out_HTW = wide_HTW * cos_TW
    out_HTW[..., :half].addcmul_(wide_HTW[..., half:], sin_TW[..., :half], value=-sign)
    out_HTW[..., half:].addcmul_(wide_HTW[..., :half], sin_TW[..., half:], value=sign)
    return out_HTW.to(x_HTW.dtype)


Affine = tuple[Tensor, Tensor | None]
"""Weight and bias of a linear layer."""


def mlp(x_TD: Tensor, first: Sequence[Affine], last: Affine, *, turned: bool) -> Tensor:
    """`last(silu(gate x) * up x)` of two first layers, `last(gelu(up x))` with GELU's tanh form of
    one.

    turned: weights lie the other way round, (I, O).
    """
    parameters = chain(*first, last)
    placeholder_TD, *inner = FirstProducts.apply(x_TD, turned, *parameters)  # type: ignore[misc]
    opened = partial(_open, *inner)
    return LastProduct.apply(placeholder_TD, opened, *last, turned)  # type: ignore[return-value]


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


class LastProduct(torch.autograd.Function):
    """The deferred last product of an MLP: its gradient is that of the placeholder, which
    `FirstProducts` made.

    A block that is computed again stops where it has saved all that the backward pass reads.  The
    placeholder saves, and this saves nothing: so none of this is computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        placeholder_TD: Tensor,
        opened: Callable[[], Tensor],
        weight: Tensor,
        bias_D: Tensor | None,
        turned: bool,
    ) -> Tensor:
        return times(opened(), weight, bias_D, turned, _copies.get())

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None


class FirstProducts(torch.autograd.Function):
    """The placeholder of `mlp`, and its first products, which are saved; the activations are made
    again.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, turned: bool, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        """parameters: weight and bias of the first layers and of the last."""
        hold(ctx, *parameters)
        inner = []
        for weight, bias_I in pairs(parameters[:-2]):
            inner.append(times(x_TD, weight, bias_I, turned, ctx.copies))
        ctx.save_for_backward(x_TD, *inner)
        ctx.turned = turned
        ctx.mark_non_differentiable(*inner)
        ctx.set_materialize_grads(False)
        return x_TD.new_empty(1).expand_as(x_TD), *inner

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, *inner = ctx.saved_tensors
        *first, last = pairs(held(ctx))
        needs_x, _, *needs = ctx.needs_input_grad
        *needs_first, needs_last = pairs(needs)
        grad_TD = grads[0]
        opened_TI, inner_grads = _open_backward(back(ctx, grad_TD, last[0]), *inner)
        last_grads = affine_grads(ctx, opened_TI, grad_TD, last, needs_last)
        del opened_TI
        grad_x_TD = None
        for (weight, _), grad_TI in zip(first, inner_grads, strict=True):
            if needs_x and grad_x_TD is None:
                grad_x_TD = back(ctx, grad_TI, weight)
            elif grad_x_TD is not None:
                matrix = _turned(ctx.copies, weight, grad_TI, not ctx.turned)
                operations().add_product(grad_x_TD, grad_TI, matrix, fresh=False)
        first_grads: list[Tensor | None] = []
        for layer, grad_TI, needed in zip(first, inner_grads, needs_first, strict=True):
            first_grads += affine_grads(ctx, x_TD, grad_TI, layer, needed)
        return (grad_x_TD, None, *first_grads, *last_grads)


def pairs(parameters: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pair up weights and biases that follow one another."""
    return list(zip(parameters[::2], parameters[1::2], strict=True))


def _open(*inner: Tensor) -> Tensor:
    """What an MLP's last product multiplies, of its first products."""
    return _gated(*inner) if len(inner) == 2 else _gelu(*inner)


def _open_backward(grad_TI: Tensor, *inner: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same again, and its gradients.   grad_TI: may become one of them."""
    if len(inner) == 2:
        opened_TI, grad_up_TI = _gate_gradients(grad_TI, *inner)
        return opened_TI, (grad_TI, grad_up_TI)
    kernels = operations().block_kernels(*inner)
    if kernels is not None:
        return kernels.gelu_backward(grad_TI, *inner), (grad_TI,)
    return _gelu(*inner), (torch.ops.aten.gelu_backward(grad_TI, *inner, approximate="tanh"),)


def _gated(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    kernels = operations().block_kernels(gate_TI, up_TI)
    if kernels is not None:
        return kernels.gated(gate_TI, up_TI)
    inner_TI = torch.empty_like(gate_TI)
    for rows in blocks(gate_TI):
        torch.mul(F.silu(gate_TI[rows]), up_TI[rows], out=inner_TI[rows])
    return inner_TI


def _gate_gradients(grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor) -> tuple[Tensor, Tensor]:
    """`silu(gate) * up` again, and the gradient of `up`; `grad` becomes the gradient of `gate`."""
    kernels = operations().block_kernels(gate_TI, up_TI)
    if kernels is not None:
        return kernels.gated_backward(grad_TI, gate_TI, up_TI)
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
    """Rows of which a few tensors stay in a core's cache between operations; all on a GPU."""
    count, width = x_TI.shape
    size = count if x_TI.is_cuda else max(1, BLOCK_NUMBERS // width)
    return [slice(start, start + size) for start in range(0, count, size)]


def _gelu(inner_TI: Tensor) -> Tensor:
    kernels = operations().block_kernels(inner_TI)
    return F.gelu(inner_TI, approximate="tanh") if kernels is None else kernels.gelu(inner_TI)


def worth_linear(weight: Tensor) -> bool:
    """True if `Linear` can be faster than torch's: smaller matrices are not worth what it does
    around the product.
    """
    return min(weight.shape) >= LEAST_SIDE


class Linear(torch.autograd.Function):
    """`x W^T + b`; with the weight the other way round (`turned`), as GPT-2 keeps it, `x W + b`."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight: Tensor, bias_O: Tensor | None, turned: bool
    ) -> Tensor:
        # Under an adapter the weight is frozen, and then nobody needs its inputs again.
        ctx.save_for_backward(x_TI if ctx.needs_input_grad[1] else None)
        ctx.turned, ctx.bias_type = turned, None if bias_O is None else bias_O.dtype
        hold(ctx, weight)
        return times(x_TI, weight, bias_O, turned, ctx.copies)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI,), (weight,) = ctx.saved_tensors, held(ctx)
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        grad_TO = grads[0]
        return (
            back(ctx, grad_TO, weight) if needs_x else None,
            None if x_TI is None else weight_grad(ctx, x_TI, grad_TO, weight),
            grad_TO.sum(0).to(ctx.bias_type) if needs_bias else None,
            None,
        )


def times(
    x_TI: Tensor, weight: Tensor, bias_O: Tensor | None, turned: bool, copies: Copies | None
) -> Tensor:
    """Return what a linear layer gives, in the type of its input."""
    return operations().product(
        x_TI,
        _turned(copies, weight, x_TI, turned),
        None if bias_O is None else like(bias_O, x_TI, copies),
    )


def back(ctx: Any, grad_TO: Tensor, weight: Tensor) -> Tensor:
    """The gradient of what a linear layer is given."""
    return operations().product(grad_TO, _turned(ctx.copies, weight, grad_TO, not ctx.turned))


def _turned(copies: Copies | None, weight: Tensor, x: Tensor, as_is: bool) -> Tensor:
    weight = like(weight, x, copies)
    return weight if as_is else weight.T


class EmbeddingRows(torch.autograd.Function):
    """Rows of an embedding.  Of its gradient only the rows that were read are touched, where it is
    summed in place.

    still: an id whose row gets no gradient from here (an embedding's `padding_idx`); -1: none.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VD: Tensor, still: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.still = still
        hold(ctx, weight_VD)
        return F.embedding(ids, weight_VD)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), (weight_VD,) = ctx.saved_tensors, ctx.weights  # of which no number is read
        total_VD, fresh = gradient_of(weight_VD, ctx.summing)
        if total_VD is None:
            rows = weight_VD.shape[0]
            return None, _embedding_backward(grads[0], ids, rows, ctx.still, False), None
        if fresh:
            total_VD.zero_()
        grad_TD = grads[0].masked_fill((ids == ctx.still)[..., None], 0.0).flatten(0, -2)
        total_VD.index_add_(0, ids.flatten(), grad_TD.to(total_VD.dtype))
        return None, None, None


_embedding_backward = torch.ops.aten.embedding_dense_backward


def hold(ctx: Any, *weights: Tensor | None) -> None:
    """Keep on `ctx` what the backward pass needs: the weights, their versions, the cached copies,
    and whether gradients are summed in place.

    The last two are context variables, which the threads of a backward pass do not see (on a GPU
    they are torch's own).  The weights are not saved tensors: activation checkpointing would return
    those as other tensor objects, without the parameter's `.grad`.
    """
    ctx.weights, ctx.copies, ctx.summing = weights, _copies.get(), summing()
    ctx.versions = [version(weight) for weight in weights]


def held(ctx: Any) -> tuple[Any, ...]:
    """Return the weights that `hold` was given.  Raises RuntimeError if one has changed since."""
    unchanged(ctx.weights, ctx.versions)
    return ctx.weights


def like(weight: Tensor, x: Tensor, copies: Copies | None) -> Tensor:
    """A weight in the type of what it multiplies."""
    if weight.dtype == x.dtype or copies is None or copies.closed:
        return weight.to(x.dtype)
    return copies.joined((weight,), x.dtype)


def affine_grads(
    ctx: Any,
    x_TI: Tensor,
    grad_TO: Tensor,
    layer: tuple[Tensor, Tensor | None],
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a linear layer's weight and bias, where they are needed."""
    (weight, bias_O), (needs_weight, needs_bias) = layer, needed
    grad_weight, grad_bias_O = None, None
    if needs_weight:
        grad_weight = weight_grad(ctx, x_TI, grad_TO, weight)
    if needs_bias:
        assert bias_O is not None
        grad_bias_O = grad_TO.sum(0).to(bias_O.dtype)
    return grad_weight, grad_bias_O


def weight_grad(ctx: Any, x_TI: Tensor, grad_TO: Tensor, weight: Tensor) -> Tensor | None:
    """Gradient of a weight, in its own type; None where it was added to the weight's `.grad`
    itself.
    """
    left, right = (x_TI, grad_TO) if ctx.turned else (grad_TO, x_TI)
    total, fresh = gradient_of(weight, ctx.summing)
    if total is None:
        return operations().product(left.T, right).to(weight.dtype)
    operations().add_product(total, left.T, right, fresh=fresh)
    return None
