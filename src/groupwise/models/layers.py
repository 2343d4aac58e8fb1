"""What the decoder layers of known families are made of, read off their modules here for training and for decoding.

`describe` says of a module which norm, attention, MLP or layer it is: where its parts are, and their numbers.  `fused.py` computes
modules in its own way by these descriptions, one at a time; `stack_of` describes a whole model, of which decoding prepares the
weights (`rollout/native/forward.py`).  A module of another class, or one that computes something else than its description could
say, has no description.  Weights are read when they are used: sharding puts others in their place.

D model width   O, I sides of a matrix
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.activations import NewGELUActivation, SiLUActivation
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralDecoderLayer, MistralMLP, MistralRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralAttention, MixtralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm
from transformers.pytorch_utils import Conv1D

from groupwise.models.masks import reach_of

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary tables that depend on the position alone, not on the length of the sequence."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Norm:
    """An RMSNorm, or a layer norm."""

    module: Any
    eps: float
    rms: bool

    @property
    def weight_D(self) -> Tensor:
        """Its weight."""
        return self.module.weight

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
    """Of queries."""
    shared: int
    """Of keys and values."""
    width: int
    """Of a head."""
    scale: float
    rotary: bool
    """True if queries and keys are rotated by their positions; else positions are learnt, and added to the embedding."""


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
        """Its linear layers."""
        return (*self.inputs, self.output)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layer:
    """x += attention(norm(x)); x += mlp(mlp_norm(x)).   The modules may be of any class: `describe` them."""

    norm: nn.Module
    attention: nn.Module
    mlp_norm: nn.Module
    mlp: nn.Module


def matrix_of(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight (O, I) and bias (O,) of a linear layer; GPT-2's lie the other way round."""
    return linear.weight.T if type(linear) is Conv1D else linear.weight, linear.bias


def describe(module: nn.Module) -> Norm | Attention | MLP | Layer | None:
    """What a module is, or None."""
    reader = _READERS.get(type(module))
    return None if reader is None else reader(module)


def _rms_norm(module: Any) -> Norm:
    return Norm(module=module, eps=module.variance_epsilon, rms=True)


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
    )


def _gpt2_attention(module: Any) -> Attention | None:
    if module.is_cross_attention or not module.scale_attn_weights or module.scale_attn_by_inverse_layer_idx:
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


def _rotary_layer(module: Any) -> Layer:
    return Layer(norm=module.input_layernorm, attention=module.self_attn, mlp_norm=module.post_attention_layernorm, mlp=module.mlp)


def _gpt2_layer(module: Any) -> Layer | None:
    if hasattr(module, "crossattention"):
        return None
    return Layer(norm=module.ln_1, attention=module.attn, mlp_norm=module.ln_2, mlp=module.mlp)


_READERS: dict[type[nn.Module], Callable[[Any], Norm | Attention | MLP | Layer | None]] = {
    **dict.fromkeys((LlamaRMSNorm, MistralRMSNorm, MixtralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm), _rms_norm),
    **dict.fromkeys((LlamaAttention, MistralAttention, MixtralAttention, Qwen2Attention, Qwen3Attention), _rotary_attention),
    **dict.fromkeys((LlamaMLP, MistralMLP, Qwen2MLP, Qwen3MLP), _gated_mlp),
    **dict.fromkeys((LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer), _rotary_layer),
    nn.LayerNorm: _layer_norm,
    GPT2Attention: _gpt2_attention,
    GPT2MLP: _gpt2_mlp,
    GPT2Block: _gpt2_layer,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stack:
    """A model without its head."""

    embedding_VD: Tensor
    position_PD: Tensor | None
    """Learnt positions, which are added to the embedding."""
    rotary: Any
    """Its `forward` makes the tables of rotary positions; None where positions are learnt."""
    layers: tuple[tuple[Norm, Attention, Norm, MLP], ...]
    """Of each layer the norm before attention, attention, the norm before the MLP, and the MLP."""
    norm: Norm
    """The last."""


ROTARY_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
MODELS = (*ROTARY_MODELS, GPT2LMHeadModel)
"""Models that may have a description."""


def stack_of(model: Any) -> Stack | None:
    """What one of `MODELS` is, whose modules are those that its config makes; None if a description could not say all of it."""
    rotary = type(model) in ROTARY_MODELS
    base = model.model if rotary else model.transformer
    layers: Any = [_parts(module) for module in (base.layers if rotary else base.h)]
    if any(None in parts or reach_of(parts[1].module).chunk is not None for parts in layers):
        return None
    if rotary and (base.rotary_emb.rope_type not in STATIC_ROPE or 2 * base.rotary_emb.inv_freq.shape[0] != layers[0][1].width):
        return None
    last: Any = describe(base.norm if rotary else base.ln_f)
    return Stack(
        embedding_VD=(base.embed_tokens if rotary else base.wte).weight.detach(),
        position_PD=None if rotary else base.wpe.weight.detach(),
        rotary=base.rotary_emb if rotary else None,
        layers=tuple(layers),
        norm=last,
    )


def _parts(module: nn.Module) -> tuple[Any, ...]:
    """The parts of a layer, None in place of one without description."""
    layer = describe(module)
    return tuple(map(describe, (layer.norm, layer.attention, layer.mlp_norm, layer.mlp))) if isinstance(layer, Layer) else (None,)
