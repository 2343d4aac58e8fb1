"""A shorter way through models whose every step is known: the same parameters and mathematics, without the modules.

Decoding a few rows through a small or medium model is bound by how fast matrices are read and by the work around the products.
Here the weights are prepared once per `generate` in the layout that few-row products run fastest in (see `product`), projections of
the same input are joined, and a layer is 10 operations instead of 80 (25 without the compiled kernels).
Nothing can be stale: what was prepared is dropped with the call, and prepared again when the engine's version changes.

Only what is exactly known runs here; anything else (another class, adapters, hooks, other activations) takes the modules.

T positions of a stream   D model width   H query heads   K key-value heads   W head width   V vocabulary   O, I sides of a matrix
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.activations import NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from groupwise.heap import own_pages
from groupwise.kernels import cpu, decoding
from groupwise.models.policy import Policy
from groupwise.objective.tiles import filled, tiled
from groupwise.rollout.attention import Decode

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary tables that depend on the position alone, not on the length of the sequence."""
LARGE, FEW_ROWS = 1 << 20, 8
"""Numbers of a large float32 matrix; the rows that oneDNN's layout is chosen for (unsaid, it is 10 % slower in bfloat16)."""
FEW = 4
"""Large float32 matrices meet whole multiples of so many rows: oneDNN keeps 0.6 MB of machine code for every number of them."""


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


def is_known(policy: Policy) -> bool:
    """True if the policy is exactly one whose every step is known here.

    float64 is left to the modules: transformers normalises in float32 there, and to copy that would help nobody.  So is CUDA, where
    a second copy of the weights costs more than it brings.
    """
    model, head = policy.model, policy.head
    if policy.device.type != "cpu" or policy.dtype not in (torch.float32, torch.bfloat16):
        return False
    if head.scale != 1.0 or head.softcap is not None or any(_altered(module) for module in model.modules()):
        return False
    return type(model) in _FORWARDS and _FORWARDS[type(model)][1](model)


def lean_forward(policy: Policy, positions: int) -> RotaryForward | GPT2Forward:
    """The short way through a policy that `is_known`, prepared from its weights as they are now, for up to `positions` tokens."""
    return _FORWARDS[type(policy.model)][0](policy, positions)


def _altered(module: nn.Module) -> bool:
    """True for a module that does more than its class says, or holds parameters that are not plain tensors (sharded, quantised)."""
    hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return bool(hooks) or any(
        type(parameter) is not nn.Parameter for parameter in module._parameters.values() if parameter is not None
    )


def _known_rotary(model: Any) -> bool:
    base = model.model
    layers = [(*_projections(layer), *_mlp(layer)) for layer in base.layers]
    return (
        all(type(linear) is nn.Linear for linears in layers for linear in linears)
        # Pruned layers may differ.
        and all(a.weight.shape == b.weight.shape for linears in layers for a, b in zip(linears, layers[0], strict=True))
        and all(type(layer.mlp.act_fn) in (nn.SiLU, SiLUActivation) for layer in base.layers)
        and base.rotary_emb.rope_type in STATIC_ROPE
        and 2 * base.rotary_emb.inv_freq.shape[0] == base.layers[0].self_attn.head_dim
    )


def _known_gpt2(model: Any) -> bool:
    blocks = model.transformer.h
    return (
        all(
            type(module) is Conv1D
            for block in blocks
            for module in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)
        )
        and all(isinstance(block.mlp.act, NewGELUActivation) for block in blocks)
        and model.config.scale_attn_weights
        and not model.config.scale_attn_by_inverse_layer_idx
        and not model.config.add_cross_attention
    )


def _mlp(layer: Any) -> tuple[Any, Any, Any]:
    return layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj


def _projections(layer: Any) -> tuple[Any, Any, Any, Any]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.o_proj


def product(weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """x -> x W^T + b in `dtype`, with the weight in the layout that few-row products on this machine run fastest in.

    The compiled kernels' own, which reads weights once and in order.  Without them in float32 MKL's for small matrices (1.1 to 2.7
    times `F.linear` at 3 to 64 rows) and oneDNN's for large ones (1.05 to 1.3 times MKL's at 4 to 24 rows), in bfloat16 oneDNN's
    (1.3 to 1.7 times).
    """
    if decoding.multiplies(dtype):
        return decoding.Product(weight_OI, bias_O, dtype)
    weight_OI = weight_OI.detach().to(dtype).contiguous()
    bias_O = None if bias_O is None else bias_O.detach().to(dtype)
    large = dtype == torch.float32 and weight_OI.numel() >= LARGE and torch.backends.mkldnn.is_available()
    if large or tiled(dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, FEW_ROWS)
        onednn = torch.ops.mkldnn._linear_pointwise
        if not large:
            return lambda x: onednn(x, packed, bias_O, "none", [], "")
        return lambda x: onednn(F.pad(x, (0, 0, 0, -x.shape[0] % FEW)), packed, bias_O, "none", [], "")[: x.shape[0]]
    if dtype == torch.float32 and torch.backends.mkl.is_available():
        # MKL asks for 8 to 20 MB more than it writes.
        with own_pages(4 << 20):
            packed = torch.ops.mkl._mkl_reorder_linear_weight(weight_OI, 1024)
        # The unpacked weight is read only for its shape, so a shape is all that is kept.
        shape_OI = weight_OI.new_zeros(1, 1).expand(weight_OI.shape)
        mkl = torch.ops.mkl._mkl_linear
        return lambda x: mkl(x, packed, shape_OI, bias_O, x.shape[0])
    return lambda x: F.linear(x, weight_OI, bias_O)


class _Filler:
    """The rows that fill a stream of `count` up to a whole number of oneDNN's tiles; none where products need no filling."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.count, self.rows = count, filled(count) - count if tiled(dtype) and not decoding.multiplies(dtype) else 0

    def add(self, x: Tensor) -> Tensor:
        """`x` (count, ...) with rows of zeros behind."""
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, self.rows)) if self.rows else x

    def drop(self, x: Tensor) -> Tensor:
        """The first `count` rows."""
        return x[: self.count] if self.rows else x


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _RotaryLayer:
    norm: _Norm
    qkv: Callable[[Tensor], Tensor]
    """Query, key and value heads side by side; query and key heads in the order that `_Turn` wants."""
    head_norm: Callable[[Tensor], Tensor] | None
    """Qwen3's norms of query and key heads."""
    out: Callable[[Tensor], Tensor]
    mlp_norm: _Norm
    gate_up: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]
    scale: float
    window: int | None


class RotaryForward:
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
        cos, sin = base.rotary_emb(self.embedding_VD[:1], torch.arange(positions)[None])
        self.compiled = (
            policy.dtype == torch.float32
            and cpu.fits(self.embedding_VD)
            and cpu.fits(cos, width=self.width // 2)
            and cpu.fits(cos, width=base.layers[0].mlp.gate_proj.out_features)
        )
        self.turn = (_CompiledTurn if self.compiled else _PlainTurn)(cos[0].float(), sin[0].float())
        self.layers = [self._layer(layer) for layer in base.layers]
        self.blocks = self._blocks()
        self.norm = self._norm(base.norm)
        self.head = self.product(policy.head.weight_VD, policy.head.bias_V)
        self.decoder = self._decoder()

    def _layer(self, layer: Any) -> _RotaryLayer:
        attention = layer.self_attn

        def head_rows(column: Tensor) -> Tensor:
            return column.view(-1, self.width, *column.shape[1:])[:, self.turn.order_W].flatten(0, 1)

        def cast(weight: Tensor) -> Tensor:
            """Before they are joined: half the memory traffic in bfloat16.  The compiled kernels cast as they pack."""
            return weight if decoding.multiplies(self.dtype) else weight.to(self.dtype)

        q, k, v, out = _projections(layer)
        weight = torch.cat([head_rows(cast(q.weight)), head_rows(cast(k.weight)), cast(v.weight)])
        bias = None if q.bias is None else torch.cat([head_rows(q.bias), head_rows(k.bias), v.bias])
        gate, up, down = _mlp(layer)
        return _RotaryLayer(
            norm=self._norm(layer.input_layernorm),
            qkv=self.product(weight, bias),
            head_norm=self._head_norm(attention) if self.kind is Qwen3ForCausalLM else None,
            out=self.product(out.weight, out.bias),
            mlp_norm=self._norm(layer.post_attention_layernorm),
            gate_up=self.product(
                torch.cat([cast(gate.weight), cast(up.weight)]),
                None if gate.bias is None else torch.cat([gate.bias, up.bias]),
            ),
            down=self.product(down.weight, down.bias),
            scale=attention.scaling,
            window=self._window(attention),
        )

    def _window(self, attention: Any) -> int | None:
        """Llama has none, Mistral's stands in its config, Qwen's in the layers that have one."""
        if self.kind is LlamaForCausalLM:
            return None
        return attention.config.sliding_window if self.kind is MistralForCausalLM else attention.sliding_window

    def _norm(self, norm: Any) -> _Norm:
        return (_CompiledNorm if self.compiled else _PlainNorm)(norm.weight, norm.variance_epsilon, self.dtype)

    def _head_norm(self, attention: Any) -> Callable[[Tensor], Tensor]:
        query, key = attention.q_norm, attention.k_norm
        weight_HW = torch.cat([query.weight.expand(self.heads, -1), key.weight.expand(self.shared, -1)])[:, self.turn.order_W]
        return (_CompiledHeadNorm if self.compiled else _PlainNorm)(weight_HW, query.variance_epsilon, self.dtype)

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
                gate_up=layer.gate_up,
                down=layer.down,
                scale=layer.scale,
                window=layer.window,
            )
            for layer in layers
        ]
        return decoding.Blocks(blocks, self.heads, self.shared, self.width)

    def _decoder(self) -> decoding.Decoder | None:
        """All of it as the compiled kernels know it, if they do."""
        if self.blocks is None or not isinstance(self.turn, _CompiledTurn) or not isinstance(self.norm, _CompiledNorm):
            return None
        assert isinstance(self.head, decoding.Product)
        return decoding.Decoder(self.blocks, self.embedding_VD, (self.turn.cos_PW, self.turn.sin_PW), self.norm.norm, self.head)

    def hidden(self, tokens_T: Tensor, position_T: Tensor, attend: RowAttention) -> Tensor:
        """See `native.Forward`."""
        count, heads, both, width = tokens_T.shape[0], self.heads, self.heads + self.shared, self.width
        filler = _Filler(count, self.dtype)
        x_TD, add_TD = F.embedding(filler.add(tokens_T), self.embedding_VD), None
        if self.blocks is not None and isinstance(self.turn, _CompiledTurn) and isinstance(attend, Decode) and attend.compiled:
            return self.norm(x_TD, attend.through(self.blocks, x_TD, *self.turn.tables(position_T)))
        turn = self.turn.at(position_T)
        for i, layer in enumerate(self.layers):
            qkv = filler.drop(layer.qkv(layer.norm(x_TD, add_TD))).view(count, -1, width)
            qk = qkv[:, :both]
            if layer.head_norm is not None:
                qk = layer.head_norm(qk)
            qk = turn(qk)
            seen = attend.rows(i, qk[:, :heads], qk[:, heads:], qkv[:, both:], layer.scale, None, layer.window)
            add_TD = layer.out(filler.add(seen.reshape(count, heads * width)))
            gate, up = layer.gate_up(layer.mlp_norm(x_TD, add_TD)).chunk(2, -1)
            add_TD = layer.down(cpu.gated(gate, up) if self.compiled else F.silu(gate).mul_(up))
        return filler.drop(self.norm(x_TD, add_TD))

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `native.Forward`."""
        filler = _Filler(hidden_RD.shape[0], self.dtype)
        return filler.drop(self.head(filler.add(hidden_RD)))


class _CompiledTurn:
    """Rotary positions by the compiled kernel: transformers pairs number i of a head with number i + W/2."""

    def __init__(self, cos_PW: Tensor, sin_PW: Tensor) -> None:
        """Tables of all positions."""
        self.cos_PW, self.sin_PW = cos_PW, sin_PW
        self.order_W = torch.arange(cos_PW.shape[1])

    def tables(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of these positions."""
        return self.cos_PW.index_select(0, position_T), self.sin_PW.index_select(0, position_T)

    def at(self, position_T: Tensor) -> Callable[[Tensor], Tensor]:
        """What turns heads (T, H, W) of these positions."""
        tables = self.tables(position_T)
        return lambda heads_THW: cpu.rotate(heads_THW, *tables)


class _PlainTurn:
    """The same in torch: turning a pair is multiplying a complex number, one operation once the pairs lie side by side."""

    def __init__(self, cos_PW: Tensor, sin_PW: Tensor) -> None:
        """Tables of all positions."""
        half = slice(0, cos_PW.shape[1] // 2)
        self.turn_PW = torch.complex(cos_PW[:, half], sin_PW[:, half])
        # Queries and keys may be reordered together, their products stay.
        self.order_W = torch.arange(cos_PW.shape[1]).view(2, -1).T.flatten()

    def at(self, position_T: Tensor) -> Callable[[Tensor], Tensor]:
        """What turns heads (T, H, W) of these positions; float32 in place, bfloat16 by way of float32."""
        turn_T1W = self.turn_PW.index_select(0, position_T)[:, None]

        def turn(heads_THW: Tensor) -> Tensor:
            pairs = torch.view_as_complex(heads_THW.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs.mul_(turn_T1W)).flatten(-2).to(heads_THW.dtype)

        return turn


class _CompiledNorm:
    """`_PlainNorm` in one pass."""

    def __init__(self, weight_D: Tensor, eps: float, dtype: torch.dtype) -> None:
        """dtype: of the result."""
        self.norm, self.dtype = decoding.Norm(weight_D.detach().float(), eps), dtype

    def __call__(self, x_TD: Tensor, add_TD: Tensor | None = None) -> Tensor:
        """`x += add` in place, then x / sqrt(mean(x^2) + eps) * weight, in float32."""
        return cpu.add_rms_norm(x_TD, add_TD, *self.norm, self.dtype)


class _CompiledHeadNorm:
    """`_PlainNorm` of heads, each with its own weight, in place."""

    def __init__(self, weight_HW: Tensor, eps: float, dtype: torch.dtype) -> None:
        """dtype: of the heads."""
        self.norm = decoding.Norm(weight_HW.detach().float().contiguous(), eps)

    def __call__(self, x_THW: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32."""
        cpu.head_norm(x_THW, *self.norm)
        return x_THW


class _PlainNorm:
    """An RMSNorm behind a residual sum, in four operations where `F.rms_norm` is nine."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        """dtype: of the result."""
        width = weight.shape[-1]
        self.gain, self.floor = weight.detach().float() * width**0.5, torch.tensor((width * eps) ** 0.5)
        self.dtype = dtype

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`x += add` in place, then x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32."""
        if add is not None:
            x += add
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self.floor)).mul_(self.gain).to(self.dtype)


_Norm = _CompiledNorm | _PlainNorm


class GPT2Forward:
    """GPT-2: learned positions, layer norms, joined projections already."""

    decoder = None

    def __init__(self, policy: Policy, positions: int) -> None:
        model: Any = policy.model
        base = model.transformer
        self.dtype = torch.bfloat16 if policy.autocast else policy.dtype
        self.product = partial(product, dtype=self.dtype)
        self.token_VD, self.position_PD = base.wte.weight.detach(), base.wpe.weight.detach()
        self.heads = base.h[0].attn.num_heads
        self.layers = [
            (
                _layer_norm(block.ln_1),
                self.product(block.attn.c_attn.weight.T, block.attn.c_attn.bias),
                self.product(block.attn.c_proj.weight.T, block.attn.c_proj.bias),
                _layer_norm(block.ln_2),
                self.product(block.mlp.c_fc.weight.T, block.mlp.c_fc.bias),
                self.product(block.mlp.c_proj.weight.T, block.mlp.c_proj.bias),
            )
            for block in base.h
        ]
        self.norm = _layer_norm(base.ln_f)
        self.head = self.product(policy.head.weight_VD, policy.head.bias_V)

    def hidden(self, tokens_T: Tensor, position_T: Tensor, attend: RowAttention) -> Tensor:
        """See `native.Forward`."""
        filler = _Filler(tokens_T.shape[0], self.dtype)
        x_TD = F.embedding(filler.add(tokens_T), self.token_VD) + F.embedding(filler.add(position_T), self.position_PD)
        scale = (x_TD.shape[1] // self.heads) ** -0.5
        for i, (norm, qkv, out, mlp_norm, up, down) in enumerate(self.layers):
            query, key, value = filler.drop(qkv(norm(x_TD).to(self.dtype))).view(filler.count, 3, self.heads, -1).unbind(1)
            x_TD += out(filler.add(attend.rows(i, query, key, value, scale).flatten(1)))
            inner = up(mlp_norm(x_TD).to(self.dtype))
            x_TD += down(cpu.gelu(inner) if cpu.fits(inner) else F.gelu(inner, approximate="tanh"))
        return filler.drop(self.norm(x_TD).to(self.dtype))

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `native.Forward`."""
        filler = _Filler(hidden_RD.shape[0], self.dtype)
        return filler.drop(self.head(filler.add(hidden_RD)))


def _layer_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    weight_D, bias_D, eps = norm.weight.detach(), norm.bias.detach(), norm.eps
    return lambda x: F.layer_norm(x, weight_D.shape, weight_D, bias_D, eps)


_FORWARDS: dict[type, tuple[Callable[[Policy, int], Any], Callable[[Any], bool]]] = {
    LlamaForCausalLM: (RotaryForward, _known_rotary),
    MistralForCausalLM: (RotaryForward, _known_rotary),
    Qwen2ForCausalLM: (RotaryForward, _known_rotary),
    Qwen3ForCausalLM: (RotaryForward, _known_rotary),
    GPT2LMHeadModel: (GPT2Forward, _known_gpt2),
}
