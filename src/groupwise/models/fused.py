"""Fewer passes over the activations of known blocks: the same functions as transformers' modules, to rounding.

Between its matrix products a block reads and writes activations many times: a rotary RMSNorm model spends 15 % of an update there,
GPT-2 as much in its composed GELU.  While `fused_modules` is open, modules of known classes run the forms below, which save less
for the backward pass (of an MLP a third less: what is between its products is made again) and, under autocast, hand the products
their lower precision at once.  Where there are compiled kernels (groupwise/kernels) they do it in one pass.  Parameters, classes
and names stay as they are; modules of other classes, and whatever has a `forward` of its own already, are left alone.

T positions of a stream   D width   H heads   W head width   I inner width of an MLP
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation, SiLUActivation
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralDecoderLayer, MistralMLP, MistralRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralAttention, MixtralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm
from transformers.pytorch_utils import Conv1D

from groupwise.kernels import cpu
from groupwise.kernels.matrices import add_product, product
from groupwise.models.attention import NAME, packed_attention
from groupwise.objective.inplace import gradient_of

BLOCK_NUMBERS = 1 << 16
"""Activations that are worked on at a time between products."""


_lowered: ContextVar[dict[tuple[Any, ...], tuple[Tensor, Tensor]] | None] = ContextVar("lowered", default=None)
"""Weights by their place in memory, with their copies in the products' type."""


@contextmanager
def fused_modules(model: PreTrainedModel, *, keep: bool = True) -> Iterator[None]:
    """Run known modules in their fused forms while inside; recomputation in a backward pass must be inside too.

    The weights must not change inside: under autocast each is copied into its lower precision once.
    keep: keep these copies; else they are made for every product, which takes no memory.
    """
    before = _lowered.set({} if keep else None)
    last = getattr(model.base_model, "norm", None)
    changed = []
    for module in model.modules():
        forward = _FORMS.get(type(module))
        if forward is not None and "forward" not in vars(module):
            module.forward = MethodType(_last_norm if module is last and forward is _norm else forward, module)
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward
        _lowered.reset(before)


class RMSNorm(torch.autograd.Function):
    """`weight * x / sqrt(mean(x^2) + eps)` in float32, rounded to `dtype` where transformers rounds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        x_TD = x.flatten(0, -2)
        if _one_pass(x_TD, weight_D, dtype):
            _, out_TD, scale_T = cpu.rms_norm(x_TD, weight_D, eps, dtype)
            ctx.save_for_backward(x_TD, weight_D, scale_T)
            return out_TD.view_as(x)
        scale_T = x_TD.new_empty(x_TD.shape[0], 1, dtype=torch.promote_types(x.dtype, torch.float32))
        out_TD = torch.empty_like(x_TD, dtype=dtype)
        for rows in _blocks(x_TD):
            wide_TD = x_TD[rows].to(scale_T.dtype)
            length_T = torch.linalg.vector_norm(wide_TD, dim=-1, keepdim=True)
            scale_T[rows] = length_T.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            # bfloat16 weights multiply what has been rounded already; float32 weights come first.
            if dtype == wide_TD.dtype:
                torch.mul(wide_TD, scale_T[rows], out=out_TD[rows]).mul_(weight_D)
            else:
                out_TD[rows] = (wide_TD * scale_T[rows]).to(x.dtype).mul_(weight_D)
        ctx.save_for_backward(x_TD, weight_D, scale_T)
        return out_TD.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_D, scale_T = ctx.saved_tensors
        slope_TD, wide_D = grads[0].flatten(0, -2), weight_D.to(scale_T.dtype)
        if scale_T.ndim == 1:  # made by the compiled norm
            grad_x_TD, _, grad_weight_D = cpu.rms_norm_backward(slope_TD.contiguous(), x_TD, weight_D, scale_T)
            return grad_x_TD.view_as(grads[0]), grad_weight_D, None, None
        grad_x_TD, grad_weight_D = torch.empty_like(x_TD), torch.zeros_like(wide_D)
        for rows in _blocks(x_TD):
            grad_TD = slope_TD[rows].to(scale_T.dtype)
            unit_TD = x_TD[rows] * scale_T[rows]
            along_TD = unit_TD * grad_TD
            grad_weight_D += along_TD.sum(0)
            share_T = (along_TD @ wide_D).div_(-x_TD.shape[-1])[..., None]
            grad_x_TD[rows] = torch.mul(grad_TD, wide_D, out=along_TD).addcmul_(unit_TD, share_T).mul_(scale_T[rows])
        return grad_x_TD.view_as(grads[0]), grad_weight_D.to(weight_D.dtype), None, None


class AddNorm(torch.autograd.Function):
    """The stream x + add, or x alone, and its RMSNorm: read once; and back, where the two meet, once.  Compiled kernels only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, add: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        total, out, scale_T = cpu.rms_norm(x, weight_D, eps, dtype, add)
        ctx.save_for_backward(total, weight_D, scale_T)
        ctx.added, ctx.dtype = add is not None, dtype
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight_D, scale_T = ctx.saved_tensors
        more, slope = grads
        if slope is None:  # nobody has read the norm
            slope = torch.zeros_like(total, dtype=ctx.dtype)
        more = None if more is None else more.contiguous()
        grad_x, grad_add, grad_weight_D = cpu.rms_norm_backward(slope.contiguous(), total, weight_D, scale_T, more)
        return grad_x, grad_add if ctx.added else None, grad_weight_D, None, None


def _one_pass(x_TD: Tensor, weight_D: Tensor, dtype: torch.dtype) -> bool:
    """True if the compiled norm rounds where transformers does: a weight in bfloat16 multiplies what has been rounded already."""
    return weight_D.dtype == torch.float32 and dtype in cpu.TYPES and x_TD.is_contiguous() and cpu.fits(x_TD, weight_D)


class Rotary(torch.autograd.Function):
    """Rotate pairs (i, i + W/2) by the position's angles: `x * cos + rotate_half(x) * sin`, rounded once, to x's type."""

    @staticmethod
    def forward(ctx: Any, x_HTW: Tensor, cos_TW: Tensor, sin_TW: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TW, sin_TW)
        if _turns_at_once(x_HTW, cos_TW):
            return _turned(x_HTW, cos_TW, sin_TW, 1.0)
        half = x_HTW.shape[-1] // 2
        # Widened first: products of two types at once are slow.
        wide_HTW = x_HTW.to(torch.promote_types(x_HTW.dtype, cos_TW.dtype))
        out_HTW = wide_HTW * cos_TW
        out_HTW[..., :half].addcmul_(wide_HTW[..., half:], sin_TW[..., :half], value=-1)
        out_HTW[..., half:].addcmul_(wide_HTW[..., :half], sin_TW[..., half:])
        return out_HTW.to(x_HTW.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_TW, sin_TW = ctx.saved_tensors
        grad_HTW = grads[0]
        if _turns_at_once(grad_HTW, cos_TW):
            return _turned(grad_HTW, cos_TW, sin_TW, -1.0), None, None
        half = grad_HTW.shape[-1] // 2
        wide_HTW = grad_HTW.to(torch.promote_types(grad_HTW.dtype, cos_TW.dtype))
        out_HTW = wide_HTW * cos_TW
        out_HTW[..., :half].addcmul_(wide_HTW[..., half:], sin_TW[..., half:])
        out_HTW[..., half:].addcmul_(wide_HTW[..., :half], sin_TW[..., :half], value=-1)
        return out_HTW.to(grad_HTW.dtype), None, None


def _turns_at_once(x_1HTW: Tensor, cos_11TW: Tensor) -> bool:
    return x_1HTW.shape[0] == 1 and cos_11TW.dtype == torch.float32 and cpu.fits(x_1HTW, cos_11TW, width=x_1HTW.shape[-1] // 2)


def _turned(x_1HTW: Tensor, cos_11TW: Tensor, sin_11TW: Tensor, sign: float) -> Tensor:
    cos_TW, sin_TW = (table.contiguous().view(-1, table.shape[-1]) for table in (cos_11TW, sin_11TW))
    return cpu.rotate(x_1HTW[0].transpose(0, 1), cos_TW, sin_TW, sign).transpose(0, 1)[None]


class LastProduct(torch.autograd.Function):
    """An MLP's last product, in place of what the MLP has promised: its gradient is the promise's.

    A block that is computed again stops where it has saved all that the backward pass reads.  The MLP saves when it promises, and
    this saves nothing: so this product is not computed again.
    """

    @staticmethod
    def forward(ctx: Any, promised_TD: Tensor, x_TI: Tensor, weight: Tensor, bias_D: Tensor | None, turned: bool) -> Tensor:
        return _times(x_TI, weight, bias_D, turned)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None


class GatedMLP(torch.autograd.Function):
    """`down(silu(gate x) * up x)`: its promise, and what is left to multiply with `down`.

    Saves x and the two products; the activations are made again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gate_ID: Tensor, up_ID: Tensor, down_DI: Tensor) -> tuple[Tensor, Tensor]:
        gate_TI, up_TI = product(x_TD, _like(gate_ID, x_TD).T), product(x_TD, _like(up_ID, x_TD).T)
        ctx.save_for_backward(x_TD, gate_TI, up_TI)
        ctx.weights = gate_ID, up_ID, down_DI
        if cpu.fits(gate_TI):
            inner_TI = cpu.gated(gate_TI, up_TI)
        else:
            inner_TI = torch.empty_like(gate_TI)
            for rows in _blocks(gate_TI):
                torch.mul(F.silu(gate_TI[rows]), up_TI[rows], out=inner_TI[rows])
        ctx.mark_non_differentiable(inner_TI)
        ctx.set_materialize_grads(False)
        return x_TD.new_empty(1).expand_as(x_TD), inner_TI

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, gate_TI, up_TI = ctx.saved_tensors
        gate_ID, up_ID, down_DI = ctx.weights
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad
        grad_TD = grads[0]
        grad_gate_TI = product(grad_TD, _like(down_DI, x_TD))  # of the inner activations; turned into the gate's below
        if cpu.fits(gate_TI):
            inner_TI, grad_up_TI = cpu.gated_backward(grad_gate_TI, gate_TI, up_TI)
        else:
            inner_TI, grad_up_TI = _gate_backward(grad_gate_TI, gate_TI, up_TI)
        grad_down_DI = _slope(grad_TD, inner_TI, down_DI) if needs_down else None
        del inner_TI
        grad_x_TD = product(grad_gate_TI, _like(gate_ID, x_TD)) if needs_x else None
        if grad_x_TD is not None:
            add_product(grad_x_TD, grad_up_TI, _like(up_ID, x_TD), fresh=False)
        grad_gate_ID = _slope(grad_gate_TI, x_TD, gate_ID) if needs_gate else None
        return grad_x_TD, grad_gate_ID, _slope(grad_up_TI, x_TD, up_ID) if needs_up else None, grad_down_DI


def _gate_backward(grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor) -> tuple[Tensor, Tensor]:
    """`kernels.cpu.gated_backward` in torch's operations."""
    inner_TI, grad_up_TI = torch.empty_like(gate_TI), torch.empty_like(gate_TI)
    for rows in _blocks(gate_TI):
        gate, up, grad = gate_TI[rows], up_TI[rows], grad_TI[rows]
        opened = F.silu(gate)
        torch.mul(opened, up, out=inner_TI[rows])
        torch.mul(opened, grad, out=grad_up_TI[rows])
        _silu_backward(grad.mul_(up), gate, grad_input=grad)
    return inner_TI, grad_up_TI


_silu_backward = torch.ops.aten.silu_backward.grad_input


def _blocks(x_TI: Tensor) -> list[slice]:
    """Rows of which a few tensors stay in a core's cache between operations; on a GPU all of them."""
    count, width = x_TI.shape
    size = count if x_TI.is_cuda else max(1, BLOCK_NUMBERS // width)
    return [slice(start, start + size) for start in range(0, count, size)]


class PlainMLP(torch.autograd.Function):
    """`gelu(x A + a) B + b` with GELU's tanh form (GPT-2): its promise, and what is left to multiply with B.

    Saves x and the first product.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, in_DI: Tensor, in_I: Tensor, out_ID: Tensor, out_D: Tensor) -> tuple[Tensor, Tensor]:
        inner_TI = product(x_TD, _like(in_DI, x_TD), _like(in_I, x_TD))
        ctx.save_for_backward(x_TD, inner_TI)
        ctx.weights = in_DI, in_I, out_ID, out_D
        opened_TI = cpu.gelu(inner_TI) if cpu.fits(inner_TI) else F.gelu(inner_TI, approximate="tanh")
        ctx.mark_non_differentiable(opened_TI)
        ctx.set_materialize_grads(False)
        return x_TD.new_empty(1).expand_as(x_TD), opened_TI

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, inner_TI = ctx.saved_tensors
        in_DI, in_I, out_ID, out_D = ctx.weights
        needs_x, needs_in, needs_in_bias, needs_out, needs_out_bias = ctx.needs_input_grad
        grad_TD = grads[0]
        grad_TI = product(grad_TD, _like(out_ID, x_TD).T)
        if cpu.fits(inner_TI):
            opened_TI = cpu.gelu_backward(grad_TI, inner_TI)
        else:
            opened_TI = F.gelu(inner_TI, approximate="tanh") if needs_out else None
            grad_TI = torch.ops.aten.gelu_backward(grad_TI, inner_TI, approximate="tanh")
        grad_out_ID = _slope(opened_TI, grad_TD, out_ID) if needs_out and opened_TI is not None else None
        del opened_TI
        return (
            product(grad_TI, _like(in_DI, x_TD).T) if needs_x else None,
            _slope(x_TD, grad_TI, in_DI) if needs_in else None,
            grad_TI.sum(0).to(in_I.dtype) if needs_in_bias else None,
            grad_out_ID,
            grad_TD.sum(0).to(out_D.dtype) if needs_out_bias else None,
        )


class Linear(torch.autograd.Function):
    """`x W^T + b`, or `x W + b` with the weight the other way round (`turned`), as GPT-2 keeps it."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight: Tensor, bias_O: Tensor | None, turned: bool) -> Tensor:
        # Under an adapter the weight is frozen, and then nobody needs its inputs again.
        ctx.save_for_backward(x_TI if ctx.needs_input_grad[1] else None)
        ctx.weight, ctx.turned, ctx.bias_type = weight, turned, None if bias_O is None else bias_O.dtype
        return _times(x_TI, weight, bias_O, turned)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI,), weight = ctx.saved_tensors, ctx.weight
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        grad_TO = grads[0]
        grad_weight = None
        if x_TI is not None:
            grad_weight = _slope(x_TI, grad_TO, weight) if ctx.turned else _slope(grad_TO, x_TI, weight)
        weight_OI = _like(weight, grad_TO).T if ctx.turned else _like(weight, grad_TO)
        return (
            product(grad_TO, weight_OI) if needs_x else None,
            grad_weight,
            grad_TO.sum(0).to(ctx.bias_type) if needs_bias else None,
            None,
        )


def _times(x_TI: Tensor, weight: Tensor, bias_O: Tensor | None, turned: bool) -> Tensor:
    weight_IO = _like(weight, x_TI) if turned else _like(weight, x_TI).T
    return product(x_TI, weight_IO, None if bias_O is None else _like(bias_O, x_TI))


class Rows(torch.autograd.Function):
    """Rows of an embedding.  Of its gradient only the rows that were read are touched, where it is summed in place.

    still: an id whose row gets no gradient from here (an embedding's `padding_idx`); -1: none.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VD: Tensor, still: int) -> Tensor:
        ctx.save_for_backward(ids, weight_VD)
        ctx.still = still
        return F.embedding(ids, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight_VD = ctx.saved_tensors
        total_VD, fresh = gradient_of(weight_VD)
        if total_VD is None:
            return None, torch.ops.aten.embedding_dense_backward(grads[0], ids, weight_VD.shape[0], ctx.still, False), None
        if fresh:
            total_VD.zero_()
        grad_TD = grads[0].masked_fill((ids == ctx.still)[..., None], 0.0).flatten(0, -2)
        total_VD.index_add_(0, ids.flatten(), grad_TD.to(total_VD.dtype))
        return None, None, None


def _like(weight: Tensor, x: Tensor) -> Tensor:
    """A weight in the type of what it multiplies."""
    copies = _lowered.get()
    if weight.dtype == x.dtype or copies is None:
        return weight.to(x.dtype)
    key = (weight.data_ptr(), weight.shape, weight.stride(), x.dtype)
    if key not in copies:
        copies[key] = weight, weight.to(x.dtype)  # with the weight itself, so that its memory cannot become another's
    return copies[key][1]


def _slope(left_TN: Tensor, right_TM: Tensor, weight_NM: Tensor) -> Tensor | None:
    """Gradient of a weight, in its own type; None where it was added to the weight's `.grad` itself."""
    total_NM, fresh = gradient_of(weight_NM)
    if total_NM is None:
        return product(left_TN.T, right_TM).to(weight_NM.dtype)
    add_product(total_NM, left_TN.T, right_TM, fresh=fresh)
    return None


def _lower(hidden_states: Tensor) -> torch.dtype:
    """The type that products run in."""
    device = hidden_states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype


def _flat(hidden_states: Tensor) -> Tensor:
    """(T, D) in the type that products run in."""
    return hidden_states.reshape(-1, hidden_states.shape[-1]).to(_lower(hidden_states))


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    return RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon, _lower(hidden_states))  # type: ignore[return-value]


def _last_norm(self: Any, hidden_states: Tensor) -> Tensor:
    # It feeds heads of any precision, so it does not round for a product.
    return RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon, hidden_states.dtype)  # type: ignore[return-value]


def _rotary_block(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or kwargs.get("past_key_values") is not None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    if self.gradient_checkpointing and self.training:
        return self._gradient_checkpointing_func(partial(_rotary_block_once, self, **kwargs), hidden_states)
    return _rotary_block_once(self, hidden_states, **kwargs)


def _rotary_block_once(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    stream, normed = _stream_and_norm(self.input_layernorm, hidden_states, None)
    added, _ = self.self_attn(hidden_states=normed, **kwargs)
    stream, normed = _stream_and_norm(self.post_attention_layernorm, stream, added)
    return stream + self.mlp(normed)


def _stream_and_norm(norm: Any, x: Tensor, add: Tensor | None) -> tuple[Tensor, Tensor]:
    """The stream with what is added to it, and its norm."""
    lower = _lower(x)
    fused = getattr(vars(norm).get("forward"), "__func__", None) is _norm
    hooks = norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks
    heard = any(hooks) or nn.modules.module._has_any_global_hook()
    fits = _one_pass(x, norm.weight, lower) and (add is None or (add.dtype == lower and add.is_contiguous()))
    if fused and not heard and fits:
        return AddNorm.apply(x, add, norm.weight, norm.variance_epsilon, lower)  # type: ignore[return-value]
    stream = x if add is None else x + add
    return stream, norm(stream)


def _gated_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    projections = (self.gate_proj, self.up_proj, self.down_proj)
    plain = all(type(linear) is nn.Linear and linear.bias is None and not linear._forward_hooks for linear in projections)
    if not plain or type(self.act_fn) not in (nn.SiLU, SiLUActivation):
        return type(self).forward(self, hidden_states)
    gate_ID, up_ID, down_DI = (linear.weight for linear in projections)
    promised_TD, inner_TI = GatedMLP.apply(_flat(hidden_states), gate_ID, up_ID, down_DI)  # type: ignore[misc]
    return LastProduct.apply(promised_TD, inner_TI, down_DI, None, False).view_as(hidden_states)  # type: ignore[union-attr]


def _plain_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    products = (self.c_fc, self.c_proj)
    plain = all(type(product) is Conv1D and not product._forward_hooks for product in products)
    if not plain or type(self.act) is not NewGELUActivation:
        return type(self).forward(self, hidden_states)
    in_DI, in_I, out_ID, out_D = (parameter for product in products for parameter in (product.weight, product.bias))
    promised_TD, opened_TI = PlainMLP.apply(_flat(hidden_states), in_DI, in_I, out_ID, out_D)  # type: ignore[misc]
    out_TD = LastProduct.apply(promised_TD, opened_TI, out_ID, out_D, True)
    return self.dropout(out_TD.view_as(hidden_states))  # type: ignore[union-attr]


def _linear(self: Any, input: Tensor) -> Tensor:
    if min(self.weight.shape) < cpu.LEAST_SIDE:
        return F.linear(input, self.weight, self.bias)
    out_TO = Linear.apply(_flat(input), self.weight, self.bias, False)
    return out_TO.view(*input.shape[:-1], self.weight.shape[0])  # type: ignore[union-attr]


def _conv1d(self: Any, x: Tensor) -> Tensor:
    if min(self.weight.shape) < cpu.LEAST_SIDE:
        return Conv1D.forward(self, x)
    return Linear.apply(_flat(x), self.weight, self.bias, True).view(*x.shape[:-1], self.nf)  # type: ignore[union-attr]


def _gelu(self: Any, input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")


def _embedding(self: Any, input: Tensor) -> Tensor:
    if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
        return nn.Embedding.forward(self, input)
    return Rows.apply(input, self.weight, -1 if self.padding_idx is None else self.padding_idx)  # type: ignore[return-value]


def _rotary_attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if self.config._attn_implementation != NAME or past_key_values is not None:
        return type(self).forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
    stream = hidden_states.shape[:-1]
    query, key, value = (
        project(hidden_states).view(*stream, -1, self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
    cos, sin = (table.unsqueeze(1) for table in position_embeddings)
    query, key = (Rotary.apply(x.transpose(1, 2), cos, sin) for x in (query, key))
    window = getattr(self, "sliding_window", None)
    out, _ = packed_attention(
        self, query, key, value.transpose(1, 2), attention_mask, scaling=self.scaling, sliding_window=window, **kwargs
    )
    return self.o_proj(out.reshape(*stream, -1)), None


_FORMS: dict[type[nn.Module], Callable[..., Any]] = {
    **dict.fromkeys((LlamaRMSNorm, MistralRMSNorm, MixtralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm), _norm),
    **dict.fromkeys((LlamaAttention, MistralAttention, MixtralAttention, Qwen2Attention, Qwen3Attention), _rotary_attention),
    **dict.fromkeys((LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer), _rotary_block),
    **dict.fromkeys((LlamaMLP, MistralMLP, Qwen2MLP, Qwen3MLP), _gated_mlp),
    nn.Embedding: _embedding,
    nn.Linear: _linear,
    Conv1D: _conv1d,
    GPT2MLP: _plain_mlp,
    NewGELUActivation: _gelu,
}
