"""What decoding computes with: small-batch products, norms behind residual sums, rotary embeddings,
attention, draws.

Where there are compiled kernels for a model (`Operations` looks once, because weights are laid out
for them) an operation is one of them, else a few of torch's; `Decoder` has them all in one call.
Weights are packed, and slabs and streams are changed in place.

T positions of a stream   R rows   P prompts   D model width   H heads   K key-value heads   W head
width   V vocabulary O, I sides of a matrix
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from groupwise.ops import kernels
from groupwise.ops.attention import Reach
from groupwise.ops.kernels import draws, multiplies, operations
from groupwise.ops.onednn_shapes import filled, tiled

__all__ = [
    "BLOCK", "Decoder", "Drawn", "Filler", "Operations", "PreparedLayer", "PreparedNorm", "PreparedRotary", "Product",
    "Rows", "decode_attention", "draw_tokens", "draws", "keep_entries", "product", "tokens_per_block",
]  # fmt: skip

# ---------------------------------------------------------------- products

LARGE = 1 << 20
"""Numbers of a large float32 matrix."""
FEW_ROWS = 8
"""The rows that oneDNN's layout is chosen for (unsaid, it is 10 % slower in bfloat16)."""
FEW = 4
"""Large float32 matrices meet whole multiples of so many rows: oneDNN keeps 0.6 MB of machine code
for every number of them.
"""


class Product:
    """x W^T + b for few rows, with the weight packed in the order in which it is read
    (products.cpp).
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        """dtype: of x, of the packed weight and of the result.  The weight may be of another type.

        In bfloat16 subnormal numbers and results may count as zeros.
        """
        self.outputs, self.inputs = weight_OI.shape
        self.bias_O = None if bias_O is None else bias_O.detach().float().contiguous()
        weight_OI = (
            weight_OI.detach() if weight_OI.dtype in kernels.TYPES else weight_OI.detach().float()
        )
        self.packed = operations.pack_weight(
            weight_OI if 1 in weight_OI.stride() else weight_OI.contiguous(), dtype
        )

    def __call__(self, x_RI: Tensor) -> Tensor:
        """(R, I) -> (R, O)."""
        return operations.linear(x_RI.contiguous(), self.packed, self.bias_O, self.outputs)


def product(
    weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """x -> x W^T + b in `dtype`, with the weight in the layout that few-row products on this
    machine run fastest in.

    The compiled kernels' own, which reads weights once and in order.  Without them in float32 MKL's
    for small matrices (1.1 to 2.7 times as fast as `F.linear` at 3 to 64 rows on Intel's
    processors, 0.9 to 1.2 on AMD's Zen 3), oneDNN's for large ones (1.05 to 1.3 times as fast as
    MKL's at 4 to 24 rows; as `F.linear` on Zen 3, 1.2 to 2.2 at 4 to 64), in bfloat16 oneDNN's (1.3
    to 1.7 times).  These are private operations of torch: it has no public one that multiplies by a
    packed weight.  On a GPU `F.linear`."""
    on_cpu = weight_OI.device.type == "cpu"
    if on_cpu and multiplies(dtype):
        return Product(weight_OI, bias_O, dtype)
    weight_OI = weight_OI.detach().to(dtype).contiguous()
    bias_O = None if bias_O is None else bias_O.detach().to(dtype)
    if not on_cpu:
        return lambda x: F.linear(x, weight_OI, bias_O)
    large = (
        dtype == torch.float32
        and weight_OI.numel() >= LARGE
        and torch.backends.mkldnn.is_available()
    )
    if large or tiled(dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, FEW_ROWS)
        onednn = torch.ops.mkldnn._linear_pointwise
        if not large:
            return lambda x: onednn(x, packed, bias_O, "none", [], "")
        return lambda x: onednn(
            F.pad(x, (0, 0, 0, -x.shape[0] % FEW)), packed, bias_O, "none", [], ""
        )[: x.shape[0]]
    if dtype == torch.float32 and torch.backends.mkl.is_available():
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight_OI, 1024)
        # The unpacked weight is read only for its shape, so a shape is all that is kept.
        shape_OI = weight_OI.new_zeros(1, 1).expand(weight_OI.shape)
        mkl = torch.ops.mkl._mkl_linear
        return lambda x: mkl(x, packed, shape_OI, bias_O, x.shape[0])
    return lambda x: F.linear(x, weight_OI, bias_O)


class Filler:
    """The rows that fill a stream up to a whole number of oneDNN's tiles; none where products need
    no filling.
    """

    def __init__(self, stream: Tensor, dtype: torch.dtype) -> None:
        """stream: (count, ...), of which only length and device are looked at.   dtype: of the
        products.
        """
        fills = stream.device.type == "cpu" and tiled(dtype) and not multiplies(dtype)
        self.count = stream.shape[0]
        self.rows = filled(self.count) - self.count if fills else 0

    def add(self, x: Tensor) -> Tensor:
        """`x` (count, ...) with rows of zeros behind."""
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, self.rows)) if self.rows else x

    def drop(self, x: Tensor) -> Tensor:
        """The first `count` rows."""
        return x[: self.count] if self.rows else x


# ---------------------------------------------------------------- attention and draws

ROWS_AT_ONCE = 16
"""Rows of a prompt that one thread works on (blocks.cpp's ROWS_OF_PART): more would leave other
threads without work.
"""
BLOCK = 32
"""Tokens by which the capacity of a slab grows (bindings.cpp's BLOCK)."""
Slab = tuple[Tensor, Tensor]
"""Keys and values, (entries, K, blocks, BLOCK x W) each, in an order of the kernels' own."""


class Rows:
    """Which rows belong to which prompt, as `decoding.cpp` reads it."""

    def __init__(self, entry_R: Sequence[int], prompt_length_P: Sequence[int]) -> None:
        """entry_R: the prompt of each row.   prompt_length_P: tokens of prompts."""
        self.rows_P: list[list[int]] = [[] for _ in prompt_length_P]
        for row, entry in enumerate(entry_R):
            self.rows_P[entry].append(row)
        order = [row for rows in self.rows_P for row in rows]
        parts, start = [], 0
        for entry, rows in enumerate(self.rows_P):
            for first in range(start, start + len(rows), ROWS_AT_ONCE):
                parts.append((entry, first, min(first + ROWS_AT_ONCE, start + len(rows))))
            start += len(rows)
        self.part_N3 = torch.tensor(parts, dtype=torch.int64).view(len(parts), 3)
        self.prompt_length_P = torch.tensor(prompt_length_P, dtype=torch.int64)
        self.order_R = torch.tensor(order, dtype=torch.int64)


def tokens_per_block(key_TKW: Tensor) -> int:
    """How many tokens of such keys, and of values like them, lie together in a slab that
    `decode_attention` reads; 1 if it reads none, and tokens lie one by one."""
    return BLOCK if kernels.fits(key_TKW) else 1


def keep_entries(key_NMKW: Tensor, value_NMKW: Tensor, slab: Slab, first: int) -> None:
    """N entries from `first` on get tokens 0 .. M - 1, in the order in which `decode_attention`
    meets them.
    """
    operations.keep_entries(key_NMKW, value_NMKW, *slab, first)


def decode_attention(
    query_RHW: Tensor,
    key_RKW: Tensor,
    value_RKW: Tensor,
    own: Slab,
    prompt: Slab,
    rows: Rows,
    length_R: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """One new token per row -> (R, H, W).  Its key and value are written into `own`.

    Before its first token an entry may hold anything.   length_R: own tokens, the new one included
    (int64).  In bfloat16 weights are rounded too, and subnormal numbers may count as zeros.
    """
    belonging = rows.part_N3, rows.prompt_length_P, rows.order_R
    return operations.decode_attention(
        query_RHW, key_RKW, value_RKW, *own, *prompt, *belonging, length_R, scale, window or 0
    )


def draw_tokens(logits_RV: Tensor, uniform_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One token of each row (int64) and its log-probability (nats, float32) at this temperature, of
    logits that `draws` takes.

    The first token at which the cumulative probability passes `uniform_R` (float64, in [0, 1)):
    never one of probability 0.  At temperature 0 the likeliest (the first of several), and its
    log-probability at temperature 1.
    """
    return operations.draw_tokens(logits_RV.contiguous(), uniform_R.contiguous(), temperature)


# ---------------------------------------------------------------- what lies between products


class PreparedNorm:
    """An RMSNorm, or with a bias a layer norm, behind a residual sum; with weights (H, W) RMSNorms
    of heads, each by its own.
    """

    def __init__(
        self, weight: Tensor, eps: float, bias: Tensor | None, *, dtype: torch.dtype, compiled: bool
    ) -> None:
        """dtype: of the result."""
        self.eps, self.dtype, self.compiled = eps, dtype, compiled
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        if compiled:
            self.weight, self.bias = (
                None if x is None else x.float().contiguous() for x in (self.weight, self.bias)
            )
        elif bias is None:
            width = weight.shape[-1]
            self.gain = weight.detach().float() * width**0.5
            self.floor = torch.tensor((width * eps) ** 0.5, device=weight.device)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`x += add` in place, then the norm of it, in float32 but for a layer norm of torch's.
        Heads may be changed in place.
        """
        if self.compiled and x.ndim == 3:
            operations.head_norm(x, self.weight, self.eps)
            return x
        if self.compiled and self.bias is None:
            return operations.add_rms_norm(x, add, self.weight, self.eps, self.dtype)
        if self.compiled:
            return operations.add_layer_norm(x, add, self.weight, self.eps, self.bias, self.dtype)
        if add is not None:
            x += add
        if self.bias is not None:
            return F.layer_norm(x, self.bias.shape, self.weight, self.bias, self.eps).to(self.dtype)
        # Four operations where `F.rms_norm` is nine.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self.floor)).mul_(self.gain).to(self.dtype)


class PreparedRotary:
    """Rotary embeddings.  The kernel pairs number i of a head with number i + W/2, as transformers
    does; in torch's operations the two of a pair lie side by side, for one complex product.
    Queries and keys may be reordered together, their products stay."""

    def __init__(self, cos_PW: Tensor, sin_PW: Tensor, *, compiled: bool) -> None:
        """Tables (float32) of all positions."""
        self.cos_PW, self.sin_PW, self.compiled = cos_PW, sin_PW, compiled
        self.order_W = torch.arange(cos_PW.shape[1], device=cos_PW.device)
        if not compiled:
            half = slice(0, cos_PW.shape[1] // 2)
            self.rotation_PW = torch.complex(cos_PW[:, half], sin_PW[:, half])
            self.order_W = self.order_W.view(2, -1).T.flatten()

    def at(self, position_T: Tensor) -> Callable[[Tensor], Tensor]:
        """The rotary embedding of these positions: a function of heads (T, H, W), which it may
        change in place.
        """
        if self.compiled:
            cos_TW, sin_TW = (
                self.cos_PW.index_select(0, position_T),
                self.sin_PW.index_select(0, position_T),
            )
            return lambda heads_THW: operations.rotary(heads_THW, cos_TW, sin_TW)
        rotation_T1W = self.rotation_PW.index_select(0, position_T)[:, None]

        def rotate(heads_THW: Tensor) -> Tensor:
            pairs = torch.view_as_complex(heads_THW.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs.mul_(rotation_T1W)).flatten(-2).to(heads_THW.dtype)

        return rotate


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedLayer:
    """A decoder layer as it is decoded with; its operations are made by `Operations`."""

    norm: PreparedNorm
    qkv: Any
    """Query, key and value heads side by side; rotary query and key heads in the order of
    `PreparedRotary.order_W`.  This and other
    products: x -> x W^T + b."""
    head_norm: PreparedNorm | None
    """Norms of query and key heads (Qwen3)."""
    out: Any
    mlp_norm: PreparedNorm
    up: Any
    """The MLP's first product: gate beside up, or up alone."""
    down: Any
    scale: float
    reach: Reach


class Operations:
    """Makes the operations that one model is decoded with.

    What lies between products is either all compiled or all torch's: one draw of many tokens
    (`decoder`) needs all of it."""

    def __init__(
        self, tables: Sequence[Tensor], widths: Sequence[int], *, dtype: torch.dtype
    ) -> None:
        """tables: embeddings, of the weights' type and on their device.   widths: of other rows: an
        MLP's inner ones, heads, or where positions are rotary half a head.   dtype: of the
        products."""
        first, self.dtype = tables[0], dtype
        self.compiled = (
            first.dtype == torch.float32
            and kernels.fits(*tables)
            and all(kernels.fits(first, width=width) for width in widths)
        )

    def product(
        self, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor | None]
    ) -> Callable[[Tensor], Tensor]:
        """`product` with these weights, their outputs side by side; all have a bias, or none."""
        bias_O = biases_O[0]
        if len(weights_OI) == 1:
            return product(weights_OI[0], bias_O, self.dtype)
        if weights_OI[0].device.type != "cpu" or not multiplies(self.dtype):
            # Before they are joined: half the memory traffic in bfloat16.  A compiled `Product`
            # casts as it packs.
            weights_OI = [weight_OI.to(self.dtype) for weight_OI in weights_OI]
        bias_O = (
            None
            if bias_O is None
            else torch.cat([bias_O for bias_O in biases_O if bias_O is not None])
        )
        return product(torch.cat(list(weights_OI)), bias_O, self.dtype)

    def norm(self, weight: Tensor, eps: float, bias: Tensor | None = None) -> PreparedNorm:
        """A norm behind a residual sum, or of heads."""
        return PreparedNorm(weight, eps, bias, dtype=self.dtype, compiled=self.compiled)

    def rotary(self, cos_PW: Tensor, sin_PW: Tensor) -> PreparedRotary:
        """Rotary embeddings, from tables of all positions."""
        return PreparedRotary(cos_PW.float(), sin_PW.float(), compiled=self.compiled)

    def gated(self, inner_TI: Tensor) -> Tensor:
        """silu(gate) * up of a gate beside up, I = twice the result's."""
        gate_TI, up_TI = inner_TI.chunk(2, -1)
        return operations.gated(gate_TI, up_TI) if self.compiled else F.silu(gate_TI).mul_(up_TI)

    def gelu(self, inner_TI: Tensor) -> Tensor:
        """GELU's tanh form."""
        return operations.gelu(inner_TI) if self.compiled else F.gelu(inner_TI, approximate="tanh")


# ---------------------------------------------------------------- many tokens in one call


class Drawn(NamedTuple):
    """Tokens that rows have drawn: the first `count_R[r]` of row r, and their log-probabilities
    (nats, float32).
    """

    token_RN: Tensor
    logp_RN: Tensor
    count_R: Tensor


class Decoder:
    """A model like Llama or GPT-2, all of it compiled, that draws several tokens for each row in
    one call (blocks.cpp).
    """

    def __init__(
        self,
        layers: Sequence[PreparedLayer],
        norm: PreparedNorm,
        head: Any,
        embedding_VD: Tensor,
        positions: PreparedRotary | Tensor,
        heads: tuple[int, int, int],
    ) -> None:
        """norm: the last.   positions: rotary embeddings, or learnt ones (P, D).   heads: H, K, W."""
        none, up = torch.empty(0), layers[0].up
        rotary, learnt = (None, positions) if isinstance(positions, Tensor) else (positions, none)
        self.heads, self.inner, self.norm, self.head = heads, layers[0].down.inputs, norm, head
        self.gates = up.outputs > self.inner
        parts: list[tuple[Tensor | None, ...]] = [
            (
                *(
                    layer.norm.weight,
                    layer.norm.bias,
                    None if layer.head_norm is None else layer.head_norm.weight,
                ),
                *(layer.mlp_norm.weight, layer.mlp_norm.bias),
                *(
                    x
                    for part in (layer.qkv, layer.out, layer.up, layer.down)
                    for x in (part.packed, part.bias_O)
                ),
            )
            for layer in layers
        ]
        self.weights = [none if x is None else x for layer in parts for x in layer]
        eps = [
            (
                layer.norm.eps,
                0.0 if layer.head_norm is None else layer.head_norm.eps,
                layer.mlp_norm.eps,
            )
            for layer in layers
        ]
        numbers = [
            (*some, layer.scale, layer.reach.window or 0)
            for some, layer in zip(eps, layers, strict=True)
        ]
        self.numbers = torch.tensor(numbers, dtype=torch.float64)
        tables = (
            embedding_VD,
            *((none, none) if rotary is None else (rotary.cos_PW, rotary.sin_PW)),
            learnt,
        )
        ends = (
            norm.weight,
            norm.bias,
            head.packed,
            head.bias_O,
            *(table.contiguous() for table in tables),
        )
        self.ends = [none if x is None else x for x in ends]

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
        """Draw up to `steps` tokens for each row.

        newest_R: the newest token of each.   kept_R: own tokens whose keys and values are kept: all
            but the newest.
        limit_R: the most own tokens.   prompt_R: which of the prompts each is behind.
            prompt_length_P: tokens of prompts.
        uniform_RT: float64, one for each own token; all others int64.   slabs: of each layer own
            keys and values, and prompts'. A row stops behind a token of `ending` and at its limit.
            until_one_ends: then all rows stop, so that another can take its place.  rows_at_once:
            whose logits exist at the same time.
        """
        changed = (
            tensor.clone(memory_format=torch.contiguous_format) for tensor in (newest_R, kept_R)
        )
        rows = [
            *changed,
            *(tensor.contiguous() for tensor in (limit_R, prompt_R, prompt_length_P, uniform_RT)),
        ]
        return Drawn(
            *operations.decode_tokens(
                *(
                    self.weights,
                    self.numbers,
                    self.ends,
                    self.norm.eps,
                    [x for pair in slabs for slab in pair for x in slab],
                ),
                *(
                    [*rows, torch.tensor(ending or [-1])],
                    *self.heads[:2],
                    self.inner,
                    self.gates,
                    self.head.outputs,
                ),
                *(steps, temperature, until_one_ends, rows_at_once),
            )
        )
