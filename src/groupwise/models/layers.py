"""What the decoder layers of known families are made of, read off their modules here for training
and for decoding.

`describe` says of a module which norm, attention or MLP it is: where its parts are, and their
numbers.  A package of kernels computes modules in its own way by these descriptions;
`stack_of` describes a whole model, of which decoding prepares the weights
(`rollout/native/forward.py`).  A module of another class, or one that computes something else than
its description could say, has no description.  Weights are read when they are used: sharding puts
others in their place.

D model width   O, I sides of a matrix
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from groupwise.models.reach import reach_of

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary tables that depend on the position alone, not on the length of the sequence."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Norm:
    """An RMSNorm, or a layer norm."""

    module: Any
    eps: float
    rms: bool
    around_one: bool = False
    """True if the module's weight is what is added to 1."""

    @property
    def weight_D(self) -> Tensor:
        """The weight of the norm."""
        weight_D = self.module.weight
        return (
            weight_D.to(torch.promote_types(weight_D.dtype, torch.float32)) + 1.0
            if self.around_one
            else weight_D
        )

    @property
    def bias_D(self) -> Tensor | None:
        """A layer norm's bias."""
        return None if self.rms else self.module.bias


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attention:
    """Causal attention, over grouped heads or not."""

    module: Any
    inputs: tuple[Any, ...]
    """Projections to queries, keys and values, or one to all three side by side."""
    output: Any
    head_norms: tuple[Any, Any] | None = None
    """RMSNorms of query and key heads, before they are rotated."""
    heads: int
    """Heads of queries."""
    shared: int
    """Heads of keys and values."""
    width: int
    """Numbers of a head."""
    scale: float
    rotary: bool
    """True if queries and keys are rotated by their positions; else positions are learnt, and added
    to the embedding.
    """
    gated: bool = False
    """True if the first projection gives a gate beside each query head, whose sigmoid the head's
    output is multiplied by.  There rotated may be a head's first numbers alone."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeltaNet:
    """A gated DeltaNet (`ops.recurrence`) behind a short convolution of queries, keys and values
    side by side.
    """

    module: Any
    inputs: tuple[Any, ...]
    """Projections to queries, keys and values; to the gate of the output; to beta and to the decay.
    """
    output: Any
    shared: int
    """Heads of queries and keys."""
    heads: int
    """Heads of values."""
    key_width: int
    width: int
    """Numbers of a head of values."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MLP:
    """silu(gate) * up, or GELU (tanh), between two products."""

    module: Any
    inputs: tuple[Any, ...]
    """Gate and up, or up alone."""
    output: Any
    activation: Any

    @property
    def gated(self) -> bool:
        """True if it has a gate; else it is GELU's."""
        return len(self.inputs) == 2

    @property
    def products(self) -> tuple[Any, ...]:
        """The linear layers of the MLP."""
        return (*self.inputs, self.output)


def matrix_of(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight (O, I) and bias (O,) of a linear layer; GPT-2's lie the other way round."""
    return linear.weight.T if type(linear) is Conv1D else linear.weight, linear.bias


Description = Norm | Attention | DeltaNet | MLP
Reader = Callable[[Any], Description | None]


def describe(module: nn.Module) -> Description | None:
    """What a module is, or None."""
    reader = _READERS.get(class_name(type(module)))
    return None if reader is None else reader(module)


@cache
def class_name(kind: type) -> str:
    """The name of a class with its module: a class that is not imported is known by it.

    A run imports its own family alone.
    """
    return f"{kind.__module__}.{kind.__qualname__}"


def family_class(family: str, part: str) -> str:
    """The `class_name` of a family's class."""
    prefix = SPELLED.get(family, family.capitalize())
    return f"transformers.models.{family}.modeling_{family}.{prefix}{part}"


SPELLED = {"gpt2": "GPT2", "qwen3_vl": "Qwen3VL"}
"""How class names spell a family, where not with a capital alone."""


def _rms_norm(module: Any) -> Norm:
    return Norm(module=module, eps=module.variance_epsilon, rms=True)


def _rms_norm_around_one(module: Any) -> Norm:
    return Norm(module=module, eps=module.eps, rms=True, around_one=True)


def _layer_norm(module: Any) -> Norm:
    return Norm(module=module, eps=module.eps, rms=False)


def _rotary_attention(module: Any) -> Attention:
    heads = module.config.num_attention_heads
    return Attention(
        module=module,
        inputs=(module.q_proj, module.k_proj, module.v_proj),
        output=module.o_proj,
        head_norms=(module.q_norm, module.k_norm) if hasattr(module, "q_norm") else None,
        heads=heads,
        shared=heads // module.num_key_value_groups,
        width=module.head_dim,
        scale=module.scaling,
        rotary=True,
        gated=class_name(type(module)) == family_class("qwen3_5", "Attention"),
    )


def _delta_net(module: Any) -> DeltaNet | None:
    if module.activation != "silu":
        return None
    return DeltaNet(
        module=module,
        inputs=(module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a),
        output=module.out_proj,
        shared=module.num_k_heads,
        heads=module.num_v_heads,
        key_width=module.head_k_dim,
        width=module.head_v_dim,
    )


def _gpt2_attention(module: Any) -> Attention | None:
    if (
        module.is_cross_attention
        or not module.scale_attn_weights
        or module.scale_attn_by_inverse_layer_idx
    ):
        return None
    return Attention(
        module=module,
        inputs=(module.c_attn,),
        output=module.c_proj,
        heads=module.num_heads,
        shared=module.num_heads,
        width=module.head_dim,
        scale=module.head_dim**-0.5,
        rotary=False,
    )


def _gated_mlp(module: Any) -> MLP | None:
    if type(module.act_fn) not in (nn.SiLU, SiLUActivation):
        return None
    gate_and_up = (module.gate_proj, module.up_proj)
    return MLP(module=module, inputs=gate_and_up, output=module.down_proj, activation=module.act_fn)


def _gpt2_mlp(module: Any) -> MLP | None:
    if type(module.act) is not NewGELUActivation:
        return None
    return MLP(module=module, inputs=(module.c_fc,), output=module.c_proj, activation=module.act)


LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
_CLASSES: tuple[tuple[Reader, str, tuple[str, ...]], ...] = (
    (_rms_norm, "RMSNorm", (*LIKE_LLAMA, "mixtral")),
    (_rotary_attention, "Attention", (*LIKE_LLAMA, "mixtral", "qwen3_5")),
    (_gated_mlp, "MLP", (*LIKE_LLAMA, "qwen3_5")),
    (_rms_norm, "TextRMSNorm", ("qwen3_vl",)),
    (_rotary_attention, "TextAttention", ("qwen3_vl",)),
    (_gated_mlp, "TextMLP", ("qwen3_vl",)),
    (_rms_norm_around_one, "RMSNorm", ("qwen3_5",)),
    (_delta_net, "GatedDeltaNet", ("qwen3_5",)),
    (_gpt2_attention, "Attention", ("gpt2",)),
    (_gpt2_mlp, "MLP", ("gpt2",)),
)
_READERS: dict[str, Reader] = {
    class_name(nn.LayerNorm): _layer_norm,
    **{
        family_class(family, part): reader
        for reader, part, families in _CLASSES
        for family in families
    },
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stack:
    """A model without its head."""

    embedding_VD: Tensor
    position_PD: Tensor | None
    """Learnt positions, which are added to the embedding."""
    rotary: Any
    """The module whose `forward` makes the tables of rotary positions; None where positions are
    learnt.
    """
    layers: tuple[tuple[Norm, Attention | DeltaNet, Norm, MLP], ...]
    """Parts of each layer: first norm, attention or a DeltaNet, norm before the MLP, and the MLP.
    """
    attention: Attention
    """Numbers of a head, of the first layer that has it; heads of the others are alike."""
    norm: Norm
    """The last."""


ROTARY_MODELS = (
    *(family_class(family, "ForCausalLM") for family in (*LIKE_LLAMA, "qwen3_5")),
    *(family_class(family, "ForConditionalGeneration") for family in ("qwen3_5", "qwen3_vl")),
)
MODELS = (*ROTARY_MODELS, family_class("gpt2", "LMHeadModel"))
"""Names of the classes of models that may have a description."""


def stack_of(model: Any) -> Stack | None:
    """What one of `MODELS` is, whose modules are those that its config makes; None if a description
    could not say all of it.
    """
    rotary = class_name(type(model)) in ROTARY_MODELS
    base = getattr(model.model, "language_model", model.model) if rotary else model.transformer
    layers: Any = [
        tuple(map(describe, _parts(layer))) for layer in (base.layers if rotary else base.h)
    ]
    if any(None in parts for parts in layers) or getattr(
        model.config, "add_cross_attention", False
    ):
        return None
    attentions = [parts[1] for parts in layers if isinstance(parts[1], Attention)]
    if not attentions or any(
        reach_of(attention.module).chunk is not None for attention in attentions
    ):
        return None
    if rotary:
        rotated, width = 2 * base.rotary_emb.inv_freq.shape[0], attentions[0].width
        if base.rotary_emb.rope_type not in STATIC_ROPE or not (
            rotated == width or (attentions[0].gated and rotated < width)
        ):
            return None
    last: Any = describe(base.norm if rotary else base.ln_f)
    return Stack(
        embedding_VD=(base.embed_tokens if rotary else base.wte).weight.detach(),
        position_PD=None if rotary else base.wpe.weight.detach(),
        rotary=base.rotary_emb if rotary else None,
        layers=tuple(layers),
        attention=attentions[0],
        norm=last,
    )


def _parts(layer: Any) -> tuple[Any, ...]:
    """x += mixer(norm(x)); x += mlp(mlp_norm(x)): norm, mixer (attention or a DeltaNet), mlp_norm,
    mlp; None for what it lacks.
    """
    rotary = (
        "input_layernorm",
        "linear_attn" if hasattr(layer, "linear_attn") else "self_attn",
        "post_attention_layernorm",
        "mlp",
    )
    return tuple(
        getattr(layer, name, None)
        for name in (("ln_1", "attn", "ln_2", "mlp") if hasattr(layer, "ln_1") else rotary)
    )
