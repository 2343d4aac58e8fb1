"""What decoding computes with: small-batch products, norms behind residual sums, rotary embeddings, attention, draws.

A form's operations stand here as the compiled kernels have them and in torch's; which one, whoever builds it says, because weights
are laid out for it once.  These change slabs and streams in place and hold packed weights, so they are not functions of their
tensors alone and stay outside of `torch.library`.

T positions of a stream   R rows   D model width   H heads   W head width   V vocabulary   O, I sides of a matrix
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from groupwise.ops.attention import Reach
from groupwise.ops.cpu import decoding, kernels
from groupwise.ops.cpu.decoding import (
    BLOCK,
    Block,
    Blocks,
    Decoder,
    Drawn,
    Live,
    Product,
    Rows,
    decode_attention,
    draw_tokens,
    draws,
    keep_entries,
    multiplies,
)
from groupwise.ops.onednn_shapes import filled, tiled

__all__ = [
    "BLOCK", "Block", "Blocks", "CompiledHeadNorm", "CompiledLayerNorm", "CompiledNorm", "CompiledRotary", "Decoder", "Drawn",
    "Filler", "Live", "Norm", "Operations", "PlainLayerNorm", "PlainNorm", "PlainRotary", "PreparedLayer", "Product", "Rotary",
    "Rows", "decode_attention", "draw_tokens", "draws", "gated", "gelu", "keep_entries", "multiplies", "product",
    "tokens_per_block",
]  # fmt: skip

LARGE, FEW_ROWS = 1 << 20, 8
"""Numbers of a large float32 matrix; the rows that oneDNN's layout is chosen for (unsaid, it is 10 % slower in bfloat16)."""
FEW = 4
"""Large float32 matrices meet whole multiples of so many rows: oneDNN keeps 0.6 MB of machine code for every number of them."""


def product(weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """x -> x W^T + b in `dtype`, with the weight in the layout that few-row products on this machine run fastest in.

    The compiled kernels' own, which reads weights once and in order.  Without them in float32 MKL's for small matrices (1.1 to 2.7
    times as fast as `F.linear` at 3 to 64 rows on Intel's processors, 0.9 to 1.2 on AMD's Zen 3), oneDNN's for large ones (1.05 to
    1.3 times as fast as MKL's at 4 to 24 rows; as `F.linear` on Zen 3, 1.2 to 2.2 at 4 to 64), in bfloat16 oneDNN's (1.3 to 1.7
    times).  These are private operations of torch: it has no public one that multiplies by a packed weight.  On a GPU `F.linear`.
    """
    on_cpu = weight_OI.device.type == "cpu"
    if on_cpu and multiplies(dtype):
        return Product(weight_OI, bias_O, dtype)
    weight_OI = weight_OI.detach().to(dtype).contiguous()
    bias_O = None if bias_O is None else bias_O.detach().to(dtype)
    if not on_cpu:
        return lambda x: F.linear(x, weight_OI, bias_O)
    large = dtype == torch.float32 and weight_OI.numel() >= LARGE and torch.backends.mkldnn.is_available()
    if large or tiled(dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, FEW_ROWS)
        onednn = torch.ops.mkldnn._linear_pointwise
        if not large:
            return lambda x: onednn(x, packed, bias_O, "none", [], "")
        return lambda x: onednn(F.pad(x, (0, 0, 0, -x.shape[0] % FEW)), packed, bias_O, "none", [], "")[: x.shape[0]]
    if dtype == torch.float32 and torch.backends.mkl.is_available():
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight_OI, 1024)
        # The unpacked weight is read only for its shape, so a shape is all that is kept.
        shape_OI = weight_OI.new_zeros(1, 1).expand(weight_OI.shape)
        mkl = torch.ops.mkl._mkl_linear
        return lambda x: mkl(x, packed, shape_OI, bias_O, x.shape[0])
    return lambda x: F.linear(x, weight_OI, bias_O)


class Filler:
    """The rows that fill a stream up to a whole number of oneDNN's tiles; none where products need no filling."""

    def __init__(self, stream: Tensor, dtype: torch.dtype) -> None:
        """stream: (count, ...), of which only length and device are looked at.   dtype: of the products."""
        fills = stream.device.type == "cpu" and tiled(dtype) and not multiplies(dtype)
        self.count = stream.shape[0]
        self.rows = filled(self.count) - self.count if fills else 0

    def add(self, x: Tensor) -> Tensor:
        """`x` (count, ...) with rows of zeros behind."""
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, self.rows)) if self.rows else x

    def drop(self, x: Tensor) -> Tensor:
        """The first `count` rows."""
        return x[: self.count] if self.rows else x


class CompiledRotary:
    """The rotary embedding by the compiled kernel.  As in transformers, number i of a head is paired with number i + W/2."""

    def __init__(self, cos_PW: Tensor, sin_PW: Tensor) -> None:
        """Tables of all positions."""
        self.cos_PW, self.sin_PW = cos_PW, sin_PW
        self.order_W = torch.arange(cos_PW.shape[1])

    def tables(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of these positions."""
        return self.cos_PW.index_select(0, position_T), self.sin_PW.index_select(0, position_T)

    def at(self, position_T: Tensor) -> Callable[[Tensor], Tensor]:
        """The rotary embedding of these positions: a function of heads (T, H, W)."""
        tables = self.tables(position_T)
        return lambda heads_THW: kernels.rotary(heads_THW, *tables)


class PlainRotary:
    """The rotary embedding in torch's operations: one complex product per pair, whose two numbers lie side by side for it."""

    def __init__(self, cos_PW: Tensor, sin_PW: Tensor) -> None:
        """Tables of all positions."""
        half = slice(0, cos_PW.shape[1] // 2)
        self.rotation_PW = torch.complex(cos_PW[:, half], sin_PW[:, half])
        # Queries and keys may be reordered together, their products stay.
        self.order_W = torch.arange(cos_PW.shape[1], device=cos_PW.device).view(2, -1).T.flatten()

    def at(self, position_T: Tensor) -> Callable[[Tensor], Tensor]:
        """The rotary embedding of these positions: a function of heads (T, H, W).  In float32 it changes them in place."""
        rotation_T1W = self.rotation_PW.index_select(0, position_T)[:, None]

        def rotate(heads_THW: Tensor) -> Tensor:
            pairs = torch.view_as_complex(heads_THW.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs.mul_(rotation_T1W)).flatten(-2).to(heads_THW.dtype)

        return rotate


class CompiledNorm:
    """`PlainNorm` in one pass."""

    def __init__(self, weight_D: Tensor, eps: float, dtype: torch.dtype) -> None:
        """dtype: of the result."""
        self.norm, self.dtype = decoding.Norm(weight_D.detach().float().contiguous(), eps), dtype

    def __call__(self, x_TD: Tensor, add_TD: Tensor | None = None) -> Tensor:
        """`x += add` in place, then x / sqrt(mean(x^2) + eps) * weight, in float32."""
        return kernels.add_rms_norm(x_TD, add_TD, *self.norm[:2], self.dtype)


class CompiledHeadNorm:
    """`PlainNorm` of heads, each with its own weight, in place."""

    def __init__(self, weight_HW: Tensor, eps: float, dtype: torch.dtype) -> None:
        """dtype: of the heads."""
        self.norm = decoding.Norm(weight_HW.detach().float().contiguous(), eps)

    def __call__(self, x_THW: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32."""
        kernels.head_norm(x_THW, *self.norm[:2])
        return x_THW


class PlainNorm:
    """An RMSNorm behind a residual sum, in four operations where `F.rms_norm` is nine."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        """dtype: of the result."""
        width = weight.shape[-1]
        self.gain = weight.detach().float() * width**0.5
        self.floor = torch.tensor((width * eps) ** 0.5, device=weight.device)
        self.dtype = dtype

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`x += add` in place, then x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32."""
        if add is not None:
            x += add
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self.floor)).mul_(self.gain).to(self.dtype)


class CompiledLayerNorm:
    """`PlainLayerNorm` in one pass."""

    def __init__(self, norm: Any, dtype: torch.dtype) -> None:
        """dtype: of the result."""
        self.bias_D, self.dtype = norm.bias.detach().float().contiguous(), dtype
        self.norm = decoding.Norm(norm.weight.detach().float().contiguous(), norm.eps, self.bias_D)

    def __call__(self, x_TD: Tensor, add_TD: Tensor | None = None) -> Tensor:
        """`x += add` in place, then the layer norm of it, in float32."""
        return kernels.add_layer_norm(x_TD, add_TD, *self.norm[:2], self.bias_D, self.dtype)


class PlainLayerNorm:
    """A layer norm behind a residual sum."""

    def __init__(self, norm: Any, dtype: torch.dtype) -> None:
        """dtype: of the result."""
        self.weight_D, self.bias_D, self.eps, self.dtype = norm.weight.detach(), norm.bias.detach(), norm.eps, dtype

    def __call__(self, x_TD: Tensor, add_TD: Tensor | None = None) -> Tensor:
        """`x += add` in place, then the layer norm of it."""
        if add_TD is not None:
            x_TD += add_TD
        return F.layer_norm(x_TD, self.weight_D.shape, self.weight_D, self.bias_D, self.eps).to(self.dtype)


Norm = CompiledNorm | PlainNorm | CompiledLayerNorm | PlainLayerNorm


def gated(gate_TI: Tensor, up_TI: Tensor, *, compiled: bool) -> Tensor:
    """silu(gate) * up.   compiled: there is a kernel for them."""
    return kernels.gated(gate_TI, up_TI) if compiled else F.silu(gate_TI).mul_(up_TI)


def gelu(x_TI: Tensor, *, compiled: bool) -> Tensor:
    """GELU's tanh form."""
    return kernels.gelu(x_TI) if compiled else F.gelu(x_TI, approximate="tanh")


Rotary = CompiledRotary | PlainRotary


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedLayer:
    """A decoder layer as it is decoded with; its operations are made by `Operations`."""

    norm: Norm
    qkv: Callable[[Tensor], Tensor]
    """Query, key and value heads side by side; rotary query and key heads in the order of `Rotary.order_W`."""
    head_norm: Callable[[Tensor], Tensor] | None
    """Norms of query and key heads (Qwen3)."""
    out: Callable[[Tensor], Tensor]
    mlp_norm: Norm
    up: Callable[[Tensor], Tensor]
    """The MLP's first product: gate beside up, or up alone."""
    down: Callable[[Tensor], Tensor]
    scale: float
    reach: Reach


class Operations:
    """Makes the operations that one model is decoded with.

    What lies between products is either all compiled or all torch's: one draw of many tokens (`decoder`) needs all of it.
    """

    def __init__(self, tables: Sequence[Tensor], widths: Sequence[int], *, dtype: torch.dtype) -> None:
        """tables: embeddings, of the weights' type and on their device.   widths: of other rows: an MLP's inner ones, heads, or
        where positions are rotary half a head.   dtype: of the products."""
        first, self.dtype = tables[0], dtype
        self._compiled = (
            first.dtype == torch.float32 and kernels.fits(*tables) and all(kernels.fits(first, width=width) for width in widths)
        )

    def product(self, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor | None]) -> Callable[[Tensor], Tensor]:
        """`product` with these weights, their outputs side by side; all have a bias, or none."""
        bias_O = biases_O[0]
        if len(weights_OI) == 1:
            return product(weights_OI[0], bias_O, self.dtype)
        if weights_OI[0].device.type != "cpu" or not multiplies(self.dtype):
            # Before they are joined: half the memory traffic in bfloat16.  A compiled `Product` casts as it packs.
            weights_OI = [weight_OI.to(self.dtype) for weight_OI in weights_OI]
        bias_O = None if bias_O is None else torch.cat([bias_O for bias_O in biases_O if bias_O is not None])
        return product(torch.cat(list(weights_OI)), bias_O, self.dtype)

    def norm(self, weight_D: Tensor, eps: float) -> Norm:
        """An RMSNorm behind a residual sum."""
        return (CompiledNorm if self._compiled else PlainNorm)(weight_D, eps, self.dtype)

    def layer_norm(self, weight_D: Tensor, bias_D: Tensor, eps: float) -> Norm:
        """A layer norm behind a residual sum."""
        norm = decoding.Norm(weight_D, eps, bias_D)
        return (CompiledLayerNorm if self._compiled else PlainLayerNorm)(norm, self.dtype)

    def head_norm(self, weight_HW: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
        """RMSNorms of heads (T, H, W); may change them in place."""
        return (CompiledHeadNorm if self._compiled else PlainNorm)(weight_HW, eps, self.dtype)

    def rotary(self, cos_PW: Tensor, sin_PW: Tensor) -> Rotary:
        """Rotary embeddings, from tables of all positions."""
        return (CompiledRotary if self._compiled else PlainRotary)(cos_PW.float(), sin_PW.float())

    def gated(self, inner_TI: Tensor) -> Tensor:
        """silu(gate) * up of a gate beside up, I = twice the result's."""
        gate_TI, up_TI = inner_TI.chunk(2, -1)
        return gated(gate_TI, up_TI, compiled=self._compiled)

    def gelu(self, inner_TI: Tensor) -> Tensor:
        """GELU's tanh form."""
        return gelu(inner_TI, compiled=self._compiled)

    def decoder(
        self,
        layers: Sequence[PreparedLayer],
        norm: Any,
        head: Any,
        embedding_VD: Tensor,
        positions: Rotary | Tensor,
        heads: tuple[int, int, int],
    ) -> Decoder | None:
        """Draws many tokens in one call; None where not all of the model is compiled.

        norm: the last.   positions: rotary embeddings, or learnt ones (P, D).   heads: H, key-value heads, W.
        """
        if not self._compiled:
            return None
        parts: Any = layers
        blocks = [
            Block(
                norm=layer.norm.norm,
                qkv=layer.qkv,
                head_norm=None if layer.head_norm is None else layer.head_norm.norm,
                out=layer.out,
                mlp_norm=layer.mlp_norm.norm,
                up=layer.up,
                down=layer.down,
                scale=layer.scale,
                window=layer.reach.window,
            )
            for layer in parts
        ]
        rotary_PW = (positions.cos_PW, positions.sin_PW) if isinstance(positions, CompiledRotary) else None
        position_PD = positions if isinstance(positions, Tensor) else None
        return Decoder(Blocks(blocks, *heads), norm.norm, head, embedding_VD, rotary_PW=rotary_PW, position_PD=position_PD)


def tokens_per_block(key_TKW: Tensor) -> int:
    """How many tokens of such keys, and of values like them, lie together in a slab that `decode_attention` reads; 1 if it reads
    none, and tokens lie one by one."""
    return BLOCK if kernels.fits(key_TKW) else 1
