"""Fewer passes over the activations of known blocks: the same functions as transformers' modules,
to rounding.

Between its matrix products a block reads and writes activations many times: a rotary RMSNorm model
spends 15 % of an update there, GPT-2 as much in its composed GELU.  While `fused_modules` is open,
modules of known classes run the forms below, which are made of the operations in
`ops/functional.py` and, under autocast, hand the products their lower precision at once.
Parameters, classes and names stay as they are; modules of other classes, and whatever has a
`forward` of its own already, are left alone.

T positions of a stream   D width   I inner width of an MLP   O width of what a linear layer gives
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from groupwise.models.attention import NAME, packed_attention
from groupwise.models.layers import (
    MLP,
    Attention,
    Description,
    Norm,
    class_name,
    describe,
    family_class,
)
from groupwise.ops.adapted import adapted_linear
from groupwise.ops.functional import (
    EmbeddingRows,
    Linear,
    copies_of_weights,
    gated,
    mlp,
    rms_norm,
    rotary,
    worth_linear,
)
from groupwise.ops.joined import attention_heads, gated_mlp, joins
from groupwise.ops.operations import operations


@contextmanager
def fused_modules(
    model: PreTrainedModel, *, keep: bool = True, apart: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Run known modules in their fused forms while inside; recomputation in a backward pass must be
    inside too.

    The weights must not change inside: under autocast each is copied into its lower precision once.
    keep: keep these copies; else they are made for every product, which takes no memory.
    apart: modules that are left alone.
    """
    text = getattr(model.base_model, "language_model", model.base_model)
    last = getattr(text, "norm", None)
    together = operations().gpu_kernels(next(model.parameters())) is not None
    changed = []
    groups: list[tuple[Tensor, ...]] = []
    for module in model.modules():
        if "forward" in vars(module) or module in apart:
            continue
        description = describe(module)
        if together:
            groups += _groups(module, description)
        form = _form(module, description, module is last)
        if form is None:
            form = _form_with_adapters(module, description)
        if form is not None:
            module.forward = form
            changed.append(module)
    try:
        with copies_of_weights(keep, groups):
            yield
    finally:
        for module in changed:
            del module.forward


def _groups(module: Any, description: Description | None) -> list[tuple[Tensor, ...]]:
    """Return the weights of a block whose copies lie one behind the other: those over one input."""
    if _has_adapter(module):
        layers = [*module.lora_A.values(), *module.lora_B.values()]
        if type(module.base_layer) is nn.Linear:
            layers.append(module.base_layer)
        return [(weight,) for layer in layers for weight in layer.parameters()]
    if not isinstance(description, (Attention, MLP)):
        return []
    groups: list[tuple[Tensor, ...]] = []
    for layers in (description.inputs, (description.output,)):
        if not _plain(layers):
            continue
        groups.append(tuple(layer.weight for layer in layers))
        biases = tuple(layer.bias for layer in layers)
        if None not in biases:
            groups.append(biases)
    return groups


def _plain(layers: Sequence[Any]) -> bool:
    """True if all are torch's linear layers, and nobody has put another `forward` in them."""
    return all(type(layer) is nn.Linear and "forward" not in vars(layer) for layer in layers)


def _form(
    module: nn.Module, description: Description | None, last: bool
) -> Callable[..., Any] | None:
    """The `forward` that a module gets.   last: it is the model's last norm."""
    match description:
        case Norm(rms=True) as norm:
            return partial(_norm, norm, last)
        case Attention(rotary=True, gated=False) as attention:
            return partial(_rotary_attention, attention, _plain(attention.inputs))
        case MLP() as mlp:
            return _form_of_mlp(mlp)
    form = _BY_CLASS.get(class_name(type(module)))
    return None if form is None else MethodType(form, module)


def _form_of_mlp(mlp: MLP) -> Callable[..., Any] | None:
    """The `forward` that an MLP gets; None where a part of it is another's, as an adapter's."""
    for part in (*mlp.products, mlp.activation):
        if "forward" in vars(part):
            return None
    kinds = {type(linear) for linear in mlp.products}
    if kinds not in ({nn.Linear}, {Conv1D}):
        return None
    return partial(_mlp, mlp, kinds == {Conv1D})


ADAPTED = "peft.tuners.lora.layer.Linear"
"""The class of linear layers with an adapter, which is imported where there is one."""
QUANTIZED = "groupwise.models.quantized.QuantizedLinear"
"""The class of linear layers of a base in few bits, likewise."""


def _form_with_adapters(
    module: nn.Module, description: Description | None
) -> Callable[..., Any] | None:
    """The `forward` of a linear layer with an adapter, and of an MLP of such layers."""
    if _has_adapter(module):
        return partial(_adapted, module)
    if isinstance(description, MLP) and description.gated:
        parts = (*description.products, description.activation)
        whole = all(map(_has_adapter, description.products))
        if whole and not any("forward" in vars(part) for part in parts):
            return partial(_mlp_of_modules, description)
    return None


def _has_adapter(module: Any) -> bool:
    """True if it is a linear layer with an adapter, on a layer that nobody has changed."""
    if class_name(type(module)) != ADAPTED:
        return False
    base = module.base_layer
    return _plain((base,)) or class_name(type(base)) == QUANTIZED


def _adapted(module: Any, x: Tensor, gate_up: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """What a layer and its adapter give; a layer alone where the adapter is off.

    gate_up: see `adapted_linear`.
    """
    names = list(module.lora_A)
    if module.disable_adapters or module.merged or len(names) != 1:
        return type(module).forward(module, x)
    layer, name = module.base_layer, names[0]
    a, b = module.lora_A[name], module.lora_B[name]
    if type(module.lora_dropout[name]) is not nn.Identity or _hooked(layer, a, b):
        return type(module).forward(module, x)
    x_TI = _flat(x)
    if x_TI.dtype != x.dtype:
        gate_up = None
    weight = layer.weight if type(layer) is nn.Linear else layer.dequantized
    scale = module.scaling[name]
    out_TO = adapted_linear(x_TI, (weight, layer.bias), (a.weight, b.weight), scale, gate_up)
    return out_TO.view(*x.shape[:-1], -1)


def _mlp_of_modules(description: MLP, hidden_states: Tensor) -> Tensor:
    """An MLP whose products are modules with adapters, with its activation in one pass."""
    module, last = description.module, description.output
    if _hooked(description.activation, last):
        return type(module).forward(module, hidden_states)
    gate, up = (project(hidden_states) for project in description.inputs)
    gate_TI, up_TI = gate.flatten(0, -2), up.flatten(0, -2)
    return _adapted(last, gated(gate_TI, up_TI).view_as(gate), (gate_TI, up_TI))


def _lower(hidden_states: Tensor) -> torch.dtype:
    """The type that products run in."""
    device = hidden_states.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden_states.dtype


def _flat(hidden_states: Tensor) -> Tensor:
    """(T, D) in the type that products run in."""
    return hidden_states.reshape(-1, hidden_states.shape[-1]).to(_lower(hidden_states))


def _norm(norm: Norm, last: bool, hidden_states: Tensor) -> Tensor:
    # The last one feeds heads of any precision, so it does not round for a product.
    dtype = hidden_states.dtype if last else _lower(hidden_states)
    return rms_norm(hidden_states, norm.weight_D, norm.eps, dtype)


def _hooked(*modules: nn.Module) -> bool:
    """True if one of them has a hook: a form that does not call the module would not call it."""
    if nn.modules.module._has_any_global_hook():
        return True
    for module in modules:
        forward = module._forward_hooks or module._forward_pre_hooks
        if forward or module._backward_hooks or module._backward_pre_hooks:
            return True
    return False


def _mlp(description: MLP, turned: bool, hidden_states: Tensor) -> Tensor:
    module = description.module
    if _hooked(*description.products, description.activation):
        return type(module).forward(module, hidden_states)
    *first, last = ((linear.weight, linear.bias) for linear in description.products)
    x_TD = _flat(hidden_states)
    if description.gated and not turned and joins(x_TD, first):
        return gated_mlp(x_TD, first, last).view_as(hidden_states)
    return mlp(x_TD, first, last, turned=turned).view_as(hidden_states)


def _linear(self: Any, x: Tensor) -> Tensor:
    if not worth_linear(self.weight):
        return type(self).forward(self, x)
    turned = type(self) is Conv1D
    out_TO = Linear.apply(_flat(x), self.weight, self.bias, turned)
    return out_TO.view(*x.shape[:-1], self.weight.shape[int(turned)])  # type: ignore[union-attr]


def _gelu(self: Any, input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")


def _embedding(self: Any, input: Tensor) -> Tensor:
    if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
        return nn.Embedding.forward(self, input)
    still = -1 if self.padding_idx is None else self.padding_idx
    return EmbeddingRows.apply(input, self.weight, still)  # type: ignore[return-value]


def _rotary_attention(
    attention: Attention,
    plain: bool,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    module = attention.module
    if module.config._attn_implementation != NAME or past_key_values is not None:
        return type(module).forward(
            module, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
        )
    heads = None
    if plain:
        heads = _joined_heads(attention, hidden_states, position_embeddings)
    if heads is None:
        heads = _heads(attention, hidden_states, position_embeddings)
    query, key, value = heads
    out, _ = packed_attention(
        module, query, key, value, attention_mask, scaling=attention.scale, **kwargs
    )
    return attention.output(out.reshape(*hidden_states.shape[:-1], -1)), None


def _heads(
    attention: Attention, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Return rotated queries and keys, and values, (1, heads, T, W)."""
    shape = (*hidden_states.shape[:-1], -1, attention.width)
    query, key, value = (project(hidden_states).view(shape) for project in attention.inputs)
    if attention.head_norms is not None:
        query_norm, key_norm = attention.head_norms
        query, key = query_norm(query), key_norm(key)
    cos, sin = (table.unsqueeze(1) for table in position_embeddings)
    query, key = rotary(query.transpose(1, 2), cos, sin), rotary(key.transpose(1, 2), cos, sin)
    return query, key, value.transpose(1, 2)


def _joined_heads(
    attention: Attention, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...] | None:
    """Return the same by one product and one kernel; None where they do not compute it."""
    norms = attention.head_norms
    if _hooked(*attention.inputs, *(norms or ())) or hidden_states.shape[0] != 1:
        return None
    layers = [(linear.weight, linear.bias) for linear in attention.inputs]
    x_TD = _flat(hidden_states)
    tables = position_embeddings[0][0], position_embeddings[1][0]
    whole = tables[0].dtype == torch.float32 and tables[0].shape[-1] == attention.width
    if not whole or not joins(x_TD, layers):
        return None
    weights, eps = None, 0.0
    if norms is not None:
        weights, eps = (norms[0].weight, norms[1].weight), norms[0].variance_epsilon
    counts = attention.heads, attention.shared
    heads = attention_heads(x_TD, layers, counts, tables, weights, eps)
    return tuple(x_TAW.transpose(0, 1)[None] for x_TAW in heads)


def _gated_norm(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    normed = rms_norm(hidden_states, self.weight, self.variance_epsilon, hidden_states.dtype)
    return gated(gate.to(normed.dtype).contiguous(), normed)


_BY_CLASS: dict[str, Callable[..., Any]] = {
    class_name(nn.Embedding): _embedding,
    class_name(nn.Linear): _linear,
    class_name(Conv1D): _linear,
    class_name(NewGELUActivation): _gelu,
    family_class("qwen3_5", "RMSNormGated"): _gated_norm,
}
