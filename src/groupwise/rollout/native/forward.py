"""A shorter way through models whose every step is known: the same parameters and mathematics, without the modules.

Decoding a few rows through a small or medium model is bound by how fast matrices are read and by the work around the products.
Here the weights are prepared once per `generate` in the layout that few-row products run fastest in (see `ops.decoding.product`),
projections of the same input are joined, and a layer is 10 operations instead of 80 (25 without the compiled kernels).  Where all
of it is compiled, one call draws several tokens of all rows.
Nothing can be stale: what was prepared is dropped with the call, and prepared again when the engine's version changes.

Only what is exactly known runs here; anything else (another class, adapters, hooks, other activations) takes the modules.

T positions of a stream   D model width   H query heads   K key-value heads   W head width   V vocabulary   O, I sides of a matrix
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.activations import NewGELUActivation, SiLUActivation

from groupwise.models.masks import reach_of
from groupwise.models.policy import Policy
from groupwise.ops import decoding, kernels
from groupwise.ops.decoding import (
    CompiledHeadNorm,
    CompiledLayerNorm,
    CompiledNorm,
    CompiledRotary,
    Filler,
    Norm,
    PlainLayerNorm,
    PlainNorm,
    PlainRotary,
    product,
)

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary tables that depend on the position alone, not on the length of the sequence."""


class RowAttention(Protocol):
    """Attention over rows instead of heads first; see `attention.Decode.rows`."""

    def rows(
        self,
        layer: int,
        query_THW: Tensor,
        key_TKW: Tensor,
        value_TKW: Tensor,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """(T, H, W) queries, (T, K, W) keys and values -> (T, H, W)."""
        ...


class RolloutForward(Protocol):
    """A forward pass as rollouts need it: tokens in, hidden states and logits out."""

    decoder: decoding.Decoder | None
    """Draws several tokens in one call, where there is one."""
    recordable: bool
    """True if nothing is read back within a token, so that a GPU's operations can be recorded."""

    def hidden(self, tokens_T: Tensor, position_T: Tensor, attend: Any) -> Tensor:
        """Final hidden states (T, D) of a flat stream.   attend: a `RowAttention`; through the modules, an `Attend`."""
        ...

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits (R, V)."""
        ...


def is_known(policy: Policy) -> bool:
    """True if the policy is exactly one whose every step is known here.

    float64 is left to the modules: transformers normalises in float32 there, and to copy that would help nobody.
    """
    model, head = policy.model, policy.head
    if policy.device.type not in ("cpu", "cuda") or policy.dtype not in (torch.float32, torch.bfloat16):
        return False
    if head.scale != 1.0 or head.softcap is not None:
        return False
    if any(_altered(module, policy.dtype, policy.device) for module in model.modules()):
        return False
    return type(model) in _FORWARDS and _as_configured(model) and _FORWARDS[type(model)][1](model)


def specialised_forward(policy: Policy, positions: int) -> RolloutForward:
    """The specialised forward pass of a policy that `is_known`: of its weights as they are now, for up to `positions` tokens."""
    return _FORWARDS[type(policy.model)][0](policy, positions)


def _altered(module: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """True for a module that does more than its class says, or holds parameters of another type, on another device, or that are
    not plain tensors (sharded, quantised)."""
    hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return bool(hooks) or any(
        type(parameter) is not nn.Parameter or parameter.dtype != dtype or parameter.device != device
        for parameter in module._parameters.values()
        if parameter is not None
    )


NUMBERS = (
    *("eps", "variance_epsilon", "scaling", "attention_scaling", "max_norm", "sliding_window", "nf", "in_features", "out_features"),
    *("head_dim", "num_heads", "num_key_value_groups", "embed_dim", "split_size"),
)
"""What forward passes of the known families read of their modules."""


def _as_configured(model: Any) -> bool:
    """True if the model is what its class makes of its config: modules, their numbers, the shapes of parameters.

    Pruned layers are not, nor modules of other classes in place of the usual ones, nor a bias more or less.
    """
    says = model.config.to_dict()
    if model not in _CONFIGURED or _CONFIGURED[model][0] != says:
        _CONFIGURED[model] = says, _configured(model)
    return _CONFIGURED[model][1] == _described(model)


_CONFIGURED: WeakKeyDictionary[nn.Module, tuple[dict[str, Any], list[Any] | None]] = WeakKeyDictionary()
"""The configs of models, and what they make, as `_described`."""


def _configured(model: Any) -> list[Any] | None:
    """What the model's config makes, as `_described`; None if nothing."""
    config = deepcopy(model.config)
    config.pad_token_id = None  # may lie outside of what is left of an embedding, and nothing here is padded
    config._attn_implementation = "eager"
    try:
        with torch.device("meta"):
            return _described(type(model)(config))
    except Exception:  # a config that was changed later may make no model at all
        return None


def _described(model: nn.Module) -> list[Any]:
    """Classes and numbers of all modules, and shapes of all parameters, by name; what stands in two places, twice."""
    modules = [
        (name, type(module), [vars(module).get(key) for key in NUMBERS])
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    return [*modules, *((name, parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False))]


def _known_rotary(model: Any) -> bool:
    base = model.model
    return (
        all(type(layer.mlp.act_fn) in (nn.SiLU, SiLUActivation) for layer in base.layers)
        and base.rotary_emb.rope_type in STATIC_ROPE
        and all(reach_of(layer.self_attn).chunk is None for layer in base.layers)
        and 2 * base.rotary_emb.inv_freq.shape[0] == base.layers[0].self_attn.head_dim
    )


def _known_gpt2(model: Any) -> bool:
    return (
        all(type(block.mlp.act) is NewGELUActivation for block in model.transformer.h)
        and model.config.scale_attn_weights
        and not model.config.scale_attn_by_inverse_layer_idx
        and not model.config.add_cross_attention
    )


def _mlp(layer: Any) -> tuple[Any, Any, Any]:
    return layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj


def _projections(layer: Any) -> tuple[Any, Any, Any, Any]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.o_proj


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Layer:
    norm: Norm
    qkv: Callable[[Tensor], Tensor]
    """Query, key and value heads side by side; rotary query and key heads in the order that their turn wants."""
    head_norm: Callable[[Tensor], Tensor] | None = None
    """Qwen3's norms of query and key heads."""
    out: Callable[[Tensor], Tensor]
    mlp_norm: Norm
    up: Callable[[Tensor], Tensor]
    """The MLP's first product: gate beside up, or up alone."""
    down: Callable[[Tensor], Tensor]
    scale: float
    window: int | None = None


class _Specialised:
    """What the families share."""

    recordable = True
    dtype: torch.dtype
    compiled: bool
    """True if there are kernels for all that lies between products."""
    layers: list[_Layer]
    norm: Norm
    head: Callable[[Tensor], Tensor]
    heads: int
    shared: int
    width: int

    def _blocks(self) -> decoding.Blocks | None:
        """The layers as the compiled kernels know them, if all that is in them is compiled."""
        if not self.compiled or not decoding.multiplies(self.dtype):
            return None
        layers: Any = self.layers
        blocks = [
            decoding.Block(
                norm=layer.norm.norm,
                qkv=layer.qkv,
                head_norm=None if layer.head_norm is None else layer.head_norm.norm,
                out=layer.out,
                mlp_norm=layer.mlp_norm.norm,
                up=layer.up,
                down=layer.down,
                scale=layer.scale,
                window=layer.window,
            )
            for layer in layers
        ]
        return decoding.Blocks(blocks, self.heads, self.shared, self.width)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `RolloutForward`."""
        filler = Filler(hidden_RD, self.dtype)
        return filler.drop(self.head(filler.add(hidden_RD)))


class RotaryForward(_Specialised):
    """Llama, Mistral, Qwen2, Qwen3."""

    def __init__(self, policy: Policy, positions: int) -> None:
        model: Any = policy.model
        base = model.model
        self.dtype = torch.bfloat16 if policy.autocast else policy.dtype
        self.product = partial(product, dtype=self.dtype)
        self.embedding_VD = base.embed_tokens.weight.detach()
        self.kind = type(policy.model)
        attention = base.layers[0].self_attn
        self.width = attention.head_dim
        self.shared = attention.k_proj.out_features // self.width
        self.heads = attention.q_proj.out_features // self.width
        cos, sin = base.rotary_emb(self.embedding_VD[:1], torch.arange(positions, device=self.embedding_VD.device)[None])
        self.compiled = (
            policy.dtype == torch.float32
            and kernels.fits(self.embedding_VD)
            and kernels.fits(cos, width=self.width // 2)
            and kernels.fits(cos, width=base.layers[0].mlp.gate_proj.out_features)
        )
        self.turn = (CompiledRotary if self.compiled else PlainRotary)(cos[0].float(), sin[0].float())
        self.layers = [self._layer(layer) for layer in base.layers]
        self.blocks = self._blocks()
        self.norm = self._norm(base.norm)
        self.head = self.product(policy.head.weight_VD, policy.head.bias_V)
        self.decoder = self._decoder()

    def _layer(self, layer: Any) -> _Layer:
        attention = layer.self_attn

        def head_rows(column: Tensor) -> Tensor:
            return column.view(-1, self.width, *column.shape[1:])[:, self.turn.order_W].flatten(0, 1)

        def cast(weight: Tensor) -> Tensor:
            """Before they are joined: half the memory traffic in bfloat16.  The compiled kernels cast as they pack."""
            return weight if weight.device.type == "cpu" and decoding.multiplies(self.dtype) else weight.to(self.dtype)

        q, k, v, out = _projections(layer)
        weight = torch.cat([head_rows(cast(q.weight)), head_rows(cast(k.weight)), cast(v.weight)])
        bias = None if q.bias is None else torch.cat([head_rows(q.bias), head_rows(k.bias), v.bias])
        gate, up, down = _mlp(layer)
        return _Layer(
            norm=self._norm(layer.input_layernorm),
            qkv=self.product(weight, bias),
            head_norm=self._head_norm(attention) if self.kind is Qwen3ForCausalLM else None,
            out=self.product(out.weight, out.bias),
            mlp_norm=self._norm(layer.post_attention_layernorm),
            up=self.product(
                torch.cat([cast(gate.weight), cast(up.weight)]),
                None if gate.bias is None else torch.cat([gate.bias, up.bias]),
            ),
            down=self.product(down.weight, down.bias),
            scale=attention.scaling,
            window=reach_of(attention).window,
        )

    def _norm(self, norm: Any) -> Norm:
        return (CompiledNorm if self.compiled else PlainNorm)(norm.weight, norm.variance_epsilon, self.dtype)

    def _head_norm(self, attention: Any) -> Callable[[Tensor], Tensor]:
        query, key = attention.q_norm, attention.k_norm
        weight_HW = torch.cat([query.weight.expand(self.heads, -1), key.weight.expand(self.shared, -1)])[:, self.turn.order_W]
        return (CompiledHeadNorm if self.compiled else PlainNorm)(weight_HW, query.variance_epsilon, self.dtype)

    def _decoder(self) -> decoding.Decoder | None:
        """All of it as the compiled kernels know it, if they do."""
        if self.blocks is None:
            return None
        assert (
            isinstance(self.turn, CompiledRotary)
            and isinstance(self.norm, CompiledNorm)
            and isinstance(self.head, decoding.Product)
        )
        rotary_PW = (self.turn.cos_PW, self.turn.sin_PW)
        return decoding.Decoder(self.blocks, self.norm.norm, self.head, self.embedding_VD, rotary_PW=rotary_PW)

    def hidden(self, tokens_T: Tensor, position_T: Tensor, attend: RowAttention) -> Tensor:
        """See `RolloutForward`."""
        count, heads, both, width = tokens_T.shape[0], self.heads, self.heads + self.shared, self.width
        filler = Filler(tokens_T, self.dtype)
        x_TD, add_TD = F.embedding(filler.add(tokens_T), self.embedding_VD), None
        turn = self.turn.at(position_T)
        for i, layer in enumerate(self.layers):
            qkv = filler.drop(layer.qkv(layer.norm(x_TD, add_TD))).view(count, -1, width)
            qk = qkv[:, :both]
            if layer.head_norm is not None:
                qk = layer.head_norm(qk)
            qk = turn(qk)
            seen = attend.rows(i, qk[:, :heads], qk[:, heads:], qkv[:, both:], layer.scale, None, layer.window)
            add_TD = layer.out(filler.add(seen.reshape(count, heads * width)))
            gate, up = layer.up(layer.mlp_norm(x_TD, add_TD)).chunk(2, -1)
            add_TD = layer.down(decoding.gated(gate, up, compiled=self.compiled))
        return filler.drop(self.norm(x_TD, add_TD))


class GPT2Forward(_Specialised):
    """GPT-2: learned positions, layer norms, joined projections already."""

    def __init__(self, policy: Policy, positions: int) -> None:
        model: Any = policy.model
        base = model.transformer
        self.dtype = torch.bfloat16 if policy.autocast else policy.dtype
        self.product = partial(product, dtype=self.dtype)
        self.token_VD, self.position_PD = base.wte.weight.detach(), base.wpe.weight.detach()
        self.heads = self.shared = base.h[0].attn.num_heads
        self.width = base.h[0].attn.head_dim
        self.compiled = (
            policy.dtype == torch.float32
            and kernels.fits(self.token_VD, self.position_PD)
            and kernels.fits(self.token_VD, width=self.width)
            and kernels.fits(base.h[0].mlp.c_fc.weight)
        )
        self.layers = [self._layer(block) for block in base.h]
        self.blocks = self._blocks()
        self.norm = self._norm(base.ln_f)
        self.head = self.product(policy.head.weight_VD, policy.head.bias_V)
        self.decoder = self._decoder()

    def _layer(self, block: Any) -> _Layer:
        def joined(linear: Any) -> Callable[[Tensor], Tensor]:
            return self.product(linear.weight.T, linear.bias)

        return _Layer(
            norm=self._norm(block.ln_1),
            qkv=joined(block.attn.c_attn),
            out=joined(block.attn.c_proj),
            mlp_norm=self._norm(block.ln_2),
            up=joined(block.mlp.c_fc),
            down=joined(block.mlp.c_proj),
            scale=self.width**-0.5,
        )

    def _norm(self, norm: Any) -> Norm:
        return (CompiledLayerNorm if self.compiled else PlainLayerNorm)(norm, self.dtype)

    def _decoder(self) -> decoding.Decoder | None:
        """All of it as the compiled kernels know it, if they do."""
        if self.blocks is None:
            return None
        assert isinstance(self.norm, CompiledLayerNorm) and isinstance(self.head, decoding.Product)
        return decoding.Decoder(self.blocks, self.norm.norm, self.head, self.token_VD, position_PD=self.position_PD)

    def hidden(self, tokens_T: Tensor, position_T: Tensor, attend: RowAttention) -> Tensor:
        """See `RolloutForward`."""
        filler = Filler(tokens_T, self.dtype)
        x_TD, add_TD = F.embedding(filler.add(tokens_T), self.token_VD), None
        x_TD += F.embedding(filler.add(position_T), self.position_PD)
        for i, layer in enumerate(self.layers):
            qkv = filler.drop(layer.qkv(layer.norm(x_TD, add_TD)))
            query, key, value = qkv.view(filler.count, 3, self.heads, self.width).unbind(1)
            add_TD = layer.out(filler.add(attend.rows(i, query, key, value, layer.scale).flatten(1)))
            inner = layer.up(layer.mlp_norm(x_TD, add_TD))
            add_TD = layer.down(decoding.gelu(inner, compiled=self.compiled))
        return filler.drop(self.norm(x_TD, add_TD))


_FORWARDS: dict[type, tuple[Callable[[Policy, int], Any], Callable[[Any], bool]]] = {
    LlamaForCausalLM: (RotaryForward, _known_rotary),
    MistralForCausalLM: (RotaryForward, _known_rotary),
    Qwen2ForCausalLM: (RotaryForward, _known_rotary),
    Qwen3ForCausalLM: (RotaryForward, _known_rotary),
    GPT2LMHeadModel: (GPT2Forward, _known_gpt2),
}
