"""Fewer passes over the activations of known blocks: the same functions as transformers' modules, to rounding.

Between its matrix products a block reads and writes activations many times: a rotary RMSNorm model spends 15 % of an update there,
GPT-2 as much in its composed GELU.  While `fused_modules` is open, modules of known classes run the forms below, which are made of
the operations in `ops/functional.py` and, under autocast, hand the products their lower precision at once.  Parameters, classes and
names stay as they are; modules of other classes, and whatever has a `forward` of its own already, are left alone.

T positions of a stream   D width   I inner width of an MLP   O width of what a linear layer gives
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation, SiLUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralDecoderLayer, MistralMLP, MistralRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralAttention, MixtralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm
from transformers.pytorch_utils import Conv1D

from groupwise.models.attention import NAME, packed_attention
from groupwise.ops.functional import (
    AddNorm,
    Linear,
    Rows,
    copies_of_weights,
    gated_mlp,
    one_pass,
    plain_mlp,
    rms_norm,
    rotary,
    worth_linear,
)

_CALL_RECOMPUTES = "__call__" in vars(GradientCheckpointingLayer)
"""Before transformers 5.23 a block's `__call__` has it computed again, since then its `forward`."""


@contextmanager
def fused_modules(model: PreTrainedModel, *, keep: bool = True) -> Iterator[None]:
    """Run known modules in their fused forms while inside; recomputation in a backward pass must be inside too.

    The weights must not change inside: under autocast each is copied into its lower precision once.
    keep: keep these copies; else they are made for every product, which takes no memory.
    """
    last = getattr(model.base_model, "norm", None)
    changed = []
    for module in model.modules():
        forward = _FORMS.get(type(module))
        if forward is not None and "forward" not in vars(module):
            module.forward = MethodType(_last_norm if module is last and forward is _norm else forward, module)
            changed.append(module)
    try:
        with copies_of_weights(keep):
            yield
    finally:
        for module in changed:
            del module.forward


def _lower(hidden_states: Tensor) -> torch.dtype:
    """The type that products run in."""
    device = hidden_states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype


def _flat(hidden_states: Tensor) -> Tensor:
    """(T, D) in the type that products run in."""
    return hidden_states.reshape(-1, hidden_states.shape[-1]).to(_lower(hidden_states))


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon, _lower(hidden_states))


def _last_norm(self: Any, hidden_states: Tensor) -> Tensor:
    # It feeds heads of any precision, so it does not round for a product.
    return rms_norm(hidden_states, self.weight, self.variance_epsilon, hidden_states.dtype)


def _rotary_block(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or kwargs.get("past_key_values") is not None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    # The class's own forward, which is not used, would see to it that the block is computed again.
    if self.gradient_checkpointing and self.training and not _CALL_RECOMPUTES:
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
    fits = one_pass(x, norm.weight, lower) and (add is None or (add.dtype == lower and add.is_contiguous()))
    if fused and fits and not _heard(norm):
        return AddNorm.apply(x, add, norm.weight, norm.variance_epsilon, lower)  # type: ignore[return-value]
    stream = x if add is None else x + add
    return stream, norm(stream)


def _heard(module: nn.Module) -> bool:
    """True if somebody listens to it, who would hear nothing of a form that leaves it out."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or bool(nn.modules.module._has_any_global_hook())


def _gated_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    projections = (self.gate_proj, self.up_proj, self.down_proj)
    plain = all(type(linear) is nn.Linear and linear.bias is None and not _heard(linear) for linear in projections)
    if not plain or type(self.act_fn) not in (nn.SiLU, SiLUActivation) or _heard(self.act_fn):
        return type(self).forward(self, hidden_states)
    gate_ID, up_ID, down_DI = (linear.weight for linear in projections)
    return gated_mlp(_flat(hidden_states), gate_ID, up_ID, down_DI).view_as(hidden_states)


def _plain_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    products = (self.c_fc, self.c_proj)
    plain = all(type(product) is Conv1D and not _heard(product) for product in products)
    if not plain or type(self.act) is not NewGELUActivation or _heard(self.act):
        return type(self).forward(self, hidden_states)
    in_DI, in_I, out_ID, out_D = (parameter for product in products for parameter in (product.weight, product.bias))
    return self.dropout(plain_mlp(_flat(hidden_states), in_DI, in_I, out_ID, out_D).view_as(hidden_states))


def _linear(self: Any, input: Tensor) -> Tensor:
    if not worth_linear(self.weight):
        return F.linear(input, self.weight, self.bias)
    out_TO = Linear.apply(_flat(input), self.weight, self.bias, False)
    return out_TO.view(*input.shape[:-1], self.weight.shape[0])  # type: ignore[union-attr]


def _conv1d(self: Any, x: Tensor) -> Tensor:
    if not worth_linear(self.weight):
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
    query, key = (rotary(x.transpose(1, 2), cos, sin) for x in (query, key))
    dropout = self.attention_dropout if self.training else 0.0
    value = value.transpose(1, 2)
    out, _ = packed_attention(self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs)
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
