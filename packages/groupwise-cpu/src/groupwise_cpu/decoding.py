"""Decoding by the compiled kernels: products with packed weights, norms, rotary embeddings,
attention over blocked keys, draws, and a whole model in one call.

Weights are packed, and slabs and streams are changed in place.

T positions of a stream   R rows   P prompts   D model width   H heads   K key-value heads
W head width   V vocabulary   O, I sides of a matrix
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from groupwise.ops.decoding import (
    DecodeOperations,
    Drawn,
    PreparedLayer,
    PreparedNorm,
    PreparedRotary,
    Slab,
    joined_bias,
)
from groupwise.ops.query import Query
from groupwise_cpu import compiled
from groupwise_cpu.compiled import operations

ROWS_AT_ONCE = 16
"""Rows of a prompt that one thread works on (blocks.cpp's ROWS_OF_PART): more would leave other
threads without work.
"""
BLOCK = 32
"""Tokens by which the capacity of a slab grows (bindings.cpp's BLOCK)."""


class PackedProduct:
    """x W^T + b for few rows, with the weight packed in the order in which it is read
    (products.cpp).
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        """dtype: the type of x, of the packed weight and of the result.  The weight may have
        another type.

        In bfloat16 subnormal numbers and results may count as zeros.
        """
        self.outputs, self.inputs = weight_OI.shape
        self.bias_O = None if bias_O is None else bias_O.detach().float().contiguous()
        weight_OI = weight_OI.detach()
        if weight_OI.dtype not in compiled.TYPES:
            weight_OI = weight_OI.float()
        if 1 not in weight_OI.stride():
            weight_OI = weight_OI.contiguous()
        self.packed = operations.pack_weight(weight_OI, dtype)

    def __call__(self, x_RI: Tensor) -> Tensor:
        """(R, I) -> (R, O)."""
        return operations.linear(x_RI.contiguous(), self.packed, self.bias_O, self.outputs)


class RowsOfPrompts:
    """Which rows belong to which prompt, as the kernel reads it."""

    def __init__(self, rows_P: Sequence[Sequence[int]], prompt_length_P: Sequence[int]) -> None:
        """rows_P: the rows of each prompt.   prompt_length_P: tokens of prompts."""
        parts: list[tuple[int, int, int]] = []
        order: list[int] = []
        for entry, rows in enumerate(rows_P):
            start, end = len(order), len(order) + len(rows)
            for first in range(start, end, ROWS_AT_ONCE):
                parts.append((entry, first, min(first + ROWS_AT_ONCE, end)))
            order += rows
        self.part_N3 = torch.tensor(parts, dtype=torch.int64).view(len(parts), 3)
        self.prompt_length_P = torch.tensor(prompt_length_P, dtype=torch.int64)
        self.order_R = torch.tensor(order, dtype=torch.int64)


class CompiledBlockedAttention:
    """Attention of decoded tokens by the compiled kernel, without caps and sinks."""

    block = BLOCK

    def keep_entries(self, key_NMKW: Tensor, value_NMKW: Tensor, slab: Slab, first: int) -> None:
        """Write tokens 0 .. M - 1 of N entries from `first` on, in the kernel's order."""
        operations.keep_entries(key_NMKW, value_NMKW, *slab, first)

    def rows(self, rows_P: Sequence[Sequence[int]], prompt_length_P: Sequence[int]) -> RowsOfPrompts:
        """Describe which rows belong to which prompt."""
        return RowsOfPrompts(rows_P, prompt_length_P)

    def decode(self, query: Query, own: Slab, prompt: Slab, rows: RowsOfPrompts, length_R: Tensor) -> Tensor:
        """Attend with one new token per row -> (R, H, W).

        In bfloat16 weights are rounded too, and subnormal numbers may count as zeros.
        """
        return operations.decode_attention(
            query.query_THD,
            query.key_TKD,
            query.value_TKE,
            *own,
            *prompt,
            rows.part_N3,
            rows.prompt_length_P,
            rows.order_R,
            length_R,
            query.scale,
            query.reach.window or 0,
        )


def draw_tokens(logits_RV: Tensor, uniform_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample one token of each row (int64) and its log-probability (nats, float32)."""
    return operations.draw_tokens(logits_RV.contiguous(), uniform_R.contiguous(), temperature)


class CompiledNorm:
    """An RMSNorm, or with a bias a layer norm, behind a residual sum; with weights (H, W) RMSNorms
    of heads, each by its own.
    """

    def __init__(self, weight: Tensor, eps: float, bias: Tensor | None, *, dtype: torch.dtype) -> None:
        """dtype: the type of the result."""
        self.weight = weight.detach().float().contiguous()
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Add `add` to `x` in place, then return the norm of it; heads are changed in place."""
        if x.ndim == 3:
            operations.head_norm(x, self.weight, self.eps)
            return x
        if self.bias is None:
            return operations.add_rms_norm(x, add, self.weight, self.eps, self.dtype)
        return operations.add_layer_norm(x, add, self.weight, self.eps, self.bias, self.dtype)


class CompiledRotary:
    """PreparedRotary embeddings that pair number i of a head with number i + W/2, as transformers does."""

    def __init__(self, cos_PW: Tensor, sin_PW: Tensor) -> None:
        """Take float32 tables of all positions."""
        self.cos_PW, self.sin_PW = cos_PW, sin_PW
        self.order_W = torch.arange(cos_PW.shape[1], device=cos_PW.device)

    def at(self, position_T: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the rotary embedding of these positions."""
        cos_TW = self.cos_PW.index_select(0, position_T)
        sin_TW = self.sin_PW.index_select(0, position_T)
        return lambda heads_THW: operations.rotary(heads_THW, cos_TW, sin_TW)


class PackedOperations(DecodeOperations):
    """Products with packed weights; everything between them in torch's operations."""

    def product(self, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor | None]) -> PackedProduct:
        """Make a product with these weights, their outputs side by side.  Packing casts them."""
        weight_OI = weights_OI[0] if len(weights_OI) == 1 else torch.cat(list(weights_OI))
        return PackedProduct(weight_OI, joined_bias(biases_O), self.dtype)


class CompiledOperations(PackedOperations):
    """All operations compiled, so that one call can draw many tokens."""

    def norm(self, weight: Tensor, eps: float, bias: Tensor | None = None) -> CompiledNorm:
        """Make a norm behind a residual sum, or of heads."""
        return CompiledNorm(weight, eps, bias, dtype=self.dtype)

    def rotary(self, cos_PW: Tensor, sin_PW: Tensor) -> CompiledRotary:
        """Make rotary embeddings from tables of all positions."""
        return CompiledRotary(cos_PW.float(), sin_PW.float())

    def gated(self, inner_TI: Tensor) -> Tensor:
        """Return silu(gate) * up of a gate beside up."""
        return operations.gated(*inner_TI.chunk(2, -1))

    def gelu(self, inner_TI: Tensor) -> Tensor:
        """Return GELU's tanh form."""
        return operations.gelu(inner_TI)

    def decoder(
        self,
        layers: Sequence[PreparedLayer],
        norm: PreparedNorm,
        head: PackedProduct,
        embedding_VD: Tensor,
        positions: PreparedRotary | Tensor,
        heads: tuple[int, int, int],
    ) -> CompiledDecoder:
        """Make a decoder of all of the model."""
        return CompiledDecoder(layers, norm, head, embedding_VD, positions, heads)


NONE = torch.empty(0)
"""An absent weight, as the kernel reads it."""


class CompiledDecoder:
    """A model like Llama or GPT-2 that draws several tokens for each row in one call
    (blocks.cpp).
    """

    def __init__(
        self,
        layers: Sequence[PreparedLayer],
        norm: PreparedNorm,
        head: PackedProduct,
        embedding_VD: Tensor,
        positions: PreparedRotary | Tensor,
        heads: tuple[int, int, int],
    ) -> None:
        """Gather the weights.   norm: the last.   positions: rotary embeddings, or learnt ones
        (P, D).   heads: H, K, W.
        """
        self.heads = heads
        self.norm = norm
        self.head = head
        self.inner = layers[0].down.inputs
        self.gates = layers[0].up.outputs > self.inner
        weights: list[Tensor | None] = []
        numbers: list[tuple[float, ...]] = []
        for layer in layers:
            weights += _weights_of(layer)
            head_eps = 0.0 if layer.head_norm is None else layer.head_norm.eps
            window = layer.reach.window or 0
            numbers.append((layer.norm.eps, head_eps, layer.mlp_norm.eps, layer.scale, window))
        self.weights = _present(weights)
        self.numbers = torch.tensor(numbers, dtype=torch.float64)
        if isinstance(positions, Tensor):
            tables = (NONE, NONE, positions.contiguous())
        else:
            tables = (positions.cos_PW.contiguous(), positions.sin_PW.contiguous(), NONE)
        self.ends = _present([norm.weight, norm.bias, head.packed, head.bias_O, embedding_VD.contiguous(), *tables])

    def __call__(
        self,
        newest_R: Tensor,
        kept_R: Tensor,
        limit_R: Tensor,
        prompt_R: Tensor,
        prompt_length_P: Tensor,
        uniform_RT: Tensor,
        slabs: Sequence[tuple[Slab, Slab]],
        steps: int,
        *,
        temperature: float,
        ending: Sequence[int],
        until_one_ends: bool,
        rows_at_once: int,
    ) -> Drawn:
        """Draw up to `steps` tokens for each row; see `groupwise.ops.decoding.Decoder`."""
        rows = [
            newest_R.clone(memory_format=torch.contiguous_format),
            kept_R.clone(memory_format=torch.contiguous_format),
            limit_R.contiguous(),
            prompt_R.contiguous(),
            prompt_length_P.contiguous(),
            uniform_RT.contiguous(),
            torch.tensor(ending or [-1]),
        ]
        caches = []
        for own, prompt in slabs:
            caches += [*own, *prompt]
        query_heads, key_heads, _ = self.heads
        drawn = operations.decode_tokens(
            self.weights,
            self.numbers,
            self.ends,
            self.norm.eps,
            caches,
            rows,
            query_heads,
            key_heads,
            self.inner,
            self.gates,
            self.head.outputs,
            steps,
            temperature,
            until_one_ends,
            rows_at_once,
        )
        return Drawn(*drawn)


def _weights_of(layer: PreparedLayer) -> list[Tensor | None]:
    """The weights of a layer in the kernel's order."""
    weights: list[Tensor | None] = [
        layer.norm.weight,
        layer.norm.bias,
        None if layer.head_norm is None else layer.head_norm.weight,
        layer.mlp_norm.weight,
        layer.mlp_norm.bias,
    ]
    for product in (layer.qkv, layer.out, layer.up, layer.down):
        weights += [product.packed, product.bias_O]
    return weights


def _present(weights: Sequence[Tensor | None]) -> list[Tensor]:
    """The weights, with an empty tensor in the place of an absent one."""
    return [NONE if weight is None else weight for weight in weights]
