"""The compiled kernels of decoding as functions of tensors: new tokens for each row, by weights packed for it.

R rows (completions being decoded)   D width of the model   H query heads   K key-value heads   W head width   O outputs   I inputs
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.ops.cpu import interface
from groupwise.ops.cpu.interface import array
from groupwise.ops.cpu.kernels import TYPES
from groupwise.ops.cpu.library import call, half, library
from groupwise.ops.cpu.registered import operation, require

ROWS_AT_ONCE = 16
"""Rows of a prompt that one thread works on (blocks.cpp's ROWS_OF_PART): more would leave other threads without work."""


class Rows:
    """Which rows belong to which prompt, as `decoding.cpp` reads it."""

    def __init__(self, rows_P: Sequence[Sequence[int]], prompt_length_P: Sequence[int]) -> None:
        """rows_P: the rows of each prompt; prompt_length_P: its tokens."""
        order = [row for rows in rows_P for row in rows]
        parts, start = [], 0
        for entry, rows in enumerate(rows_P):
            for first in range(start, start + len(rows), ROWS_AT_ONCE):
                parts.append((entry, first, min(first + ROWS_AT_ONCE, start + len(rows))))
            start += len(rows)
        self.part_N3 = torch.tensor(parts, dtype=torch.int64).view(len(parts), 3)
        self.prompt_length_P = torch.tensor(prompt_length_P, dtype=torch.int64)
        self.order_R = torch.tensor(order, dtype=torch.int64)


BLOCK = 32
"""Tokens by which the capacity of a slab grows."""


def keep_entries(key_NMKW: Tensor, value_NMKW: Tensor, slab: tuple[Tensor, Tensor], first: int) -> None:
    """N entries from `first` on get tokens 0 .. M - 1, in the order in which `decode_attention` meets them."""
    _keep_entries(key_NMKW, value_NMKW, *slab, first)


@operation("keys", "values", name="keep_entries")
def _keep_entries(key_NMKW: Tensor, value_NMKW: Tensor, keys: Tensor, values: Tensor, first: int) -> None:
    """Keys and values of a slab are changed: see `keep_entries`."""
    count, length, shared, width = key_NMKW.shape
    slab = (shared, -(-length // BLOCK), BLOCK * width)
    room = first + count <= keys.shape[0] and (keys.shape[1], min(keys.shape[2], slab[1]), keys.shape[3]) == slab
    same = key_NMKW.dtype == value_NMKW.dtype == keys.dtype == values.dtype and keys.shape == values.shape
    require(room and same, "slabs (entries, K, blocks, BLOCK x W) with room for these", key_NMKW, value_NMKW, keys, values)
    strides = (*key_NMKW.stride()[:3], *value_NMKW.stride()[:3])
    sizes = (keys.shape[2] * BLOCK, first, count, length, shared, width)
    call("keep_entries", half(key_NMKW), key_NMKW, value_NMKW, strides, keys, values, *sizes, torch.get_num_threads())


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: tuple[Tensor, Tensor],
    prompt: tuple[Tensor, Tensor],
    rows: Rows,
    length_R: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """One new token per row: (R, H, W) and twice (R, K, W) -> (R, H, W).  Its key and value are written into `own`.

    own, prompt: slabs (entries, K, blocks, BLOCK x W) of keys and values, in an order of their own; before its first token an entry
    may hold anything.  length_R: own tokens, the new one included (int64).  In bfloat16 weights are rounded too, and subnormal
    numbers may count as zeros.
    """
    belonging = (rows.part_N3, rows.prompt_length_P, rows.order_R)
    return _decode_attention(query, key, value, *own, *prompt, *belonging, length_R, scale, window or 0)


@operation("own_key", "own_value", name="decode_attention")
def _decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    prompt_key: Tensor,
    prompt_value: Tensor,
    part_N3: Tensor,
    prompt_length_P: Tensor,
    order_R: Tensor,
    length_R: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """See `decode_attention`; the slabs, and `Rows`, one by one.   window: 0 for none."""
    count, heads, width = query.shape
    fit = width % PANEL == 0 and query.dtype == key.dtype == value.dtype == own_key.dtype == prompt_key.dtype
    require(fit, "heads (R, H, W) of whole vectors and slabs, of one type", query, key, value, own_key, prompt_key)
    out = query.new_empty(count, heads, width)
    strides = tuple((tensor.stride(1), tensor.stride(0)) for tensor in (query, key, value))
    capacities = [slab.shape[2] * BLOCK for slab in (own_key, prompt_key)]
    call(
        "decode_attention",
        half(query), query, key, value, out, strides, own_key, own_value, capacities[0], prompt_key, prompt_value, capacities[1],
        part_N3, part_N3.shape[0], prompt_length_P, order_R, length_R, None, heads, key.shape[1], width, scale, window,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


PANEL = 16
"""Outputs are packed in whole vectors, of which the longest is the measure."""


def multiplies(dtype: torch.dtype) -> bool:
    """True if there is a `Product` of this type."""
    return dtype in TYPES and library() is not None


class Product:
    """x W^T + b for few rows, with the weight packed in the order in which it is read (ops/cpu/products.cpp)."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        """dtype: of x, of the packed weight and of the result.  The weight may be of another type.

        In bfloat16 subnormal numbers and results may count as zeros.
        """
        self.outputs, self.inputs = weight_OI.shape
        self.half = dtype == torch.bfloat16
        self.bias_O = None if bias_O is None else bias_O.detach().float().contiguous()
        weight_OI = weight_OI.detach() if weight_OI.dtype in TYPES else weight_OI.detach().float()
        self.packed = pack_weight(weight_OI if 1 in weight_OI.stride() else weight_OI.contiguous(), dtype)

    def __call__(self, x_RI: Tensor) -> Tensor:
        """(R, I) -> (R, O)."""
        return linear(x_RI.contiguous(), self.packed, self.bias_O, self.outputs)


def _packed_size(outputs: int, inputs: int, dtype: torch.dtype) -> int:
    """Numbers of a packed weight."""
    return -(-outputs // PANEL) * PANEL * (-(-inputs // 32) * 32 if dtype == torch.bfloat16 else inputs)


@operation()
def pack_weight(weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as `linear` reads it, in `dtype`."""
    require(1 in weight_OI.stride(), "rows or columns whose numbers lie one behind the other", weight_OI)
    outputs, inputs = weight_OI.shape
    packed = weight_OI.new_empty(_packed_size(outputs, inputs, dtype), dtype=dtype)
    call(
        "pack_weight",
        half(packed), half(weight_OI), weight_OI, *weight_OI.stride(), packed, outputs, inputs, torch.get_num_threads(),
    )  # fmt: skip
    return packed


@operation()
def linear(x_RI: Tensor, packed: Tensor, bias_O: Tensor | None, outputs: int) -> Tensor:
    """x W^T + b -> (R, O), with a weight from `pack_weight`, of x's type; the bias is float32."""
    rows, inputs = x_RI.shape
    fit = packed.dtype == x_RI.dtype and packed.numel() == _packed_size(outputs, inputs, packed.dtype)
    require(fit and x_RI.is_contiguous(), "contiguous rows and a packed weight for them", x_RI, packed)
    out_RO = x_RI.new_empty(rows, outputs)
    call("linear", half(x_RI), x_RI, packed, bias_O, out_RO, rows, outputs, inputs, torch.get_num_threads())
    return out_RO


def draws(logits_RV: Tensor) -> bool:
    """True if `draw_tokens` takes these."""
    return logits_RV.device.type == "cpu" and logits_RV.dtype in TYPES and logits_RV.numel() > 0 and library() is not None


@operation()
def draw_tokens(logits_RV: Tensor, uniform_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One token of each row (int64) and its log-probability (nats, float32) at this temperature.

    The first token at which the cumulative probability passes `uniform_R` (float64, in [0, 1)): never one of probability 0.  At
    temperature 0 the likeliest (the first of several), and its log-probability at temperature 1.
    """
    logits_RV, uniform_R = logits_RV.contiguous(), uniform_R.contiguous()
    rows, size = logits_RV.shape
    require(uniform_R.shape == (rows,), "a number of each row", logits_RV, uniform_R)
    token_R, logp_R = uniform_R.new_empty(rows, dtype=torch.int64), uniform_R.new_empty(rows, dtype=torch.float32)
    call(
        "draw_tokens",
        half(logits_RV), logits_RV, temperature, uniform_R, token_R, logp_R, rows, size, torch.get_num_threads(),
    )  # fmt: skip
    return token_R, logp_R


class Norm(NamedTuple):
    """An RMSNorm of a row or of its heads, or with a bias a layer norm of a row; float32."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None


class Block(NamedTuple):
    """A block of a model like Llama or GPT-2: products in one type, queries, keys and values side by side.

    up: gate beside up, or up alone, which GELU (tanh) follows.
    """

    norm: Norm
    qkv: Product
    head_norm: Norm | None
    out: Product
    mlp_norm: Norm
    up: Product
    down: Product
    scale: float
    window: int | None


class Blocks:
    """All blocks of such a model as `decode_tokens` reads them (ops/cpu/blocks.cpp)."""

    def __init__(self, blocks: Sequence[Block], heads: int, shared: int, width: int) -> None:
        """heads of queries; shared: of keys and values; of this width."""
        self.blocks, self.heads, self.shared, self.width = tuple(blocks), heads, shared, width
        self.c_blocks = array(interface.Block, list(map(_block, blocks)))

    def model(self, slabs: Sequence[tuple[_Slab, _Slab]]) -> ctypes.Structure:
        """What the blocks share, over these slabs: of each block own and prompt, as in `decode_attention`."""
        for block, (own, prompt) in zip(self.c_blocks, slabs, strict=True):
            block.own_k, block.own_v, block.prompt_k, block.prompt_v = (x.data_ptr() for x in (*own, *prompt))
        own_capacity, prompt_capacity = (slab[0].shape[2] * BLOCK for slab in slabs[0])
        first = self.blocks[0]
        return interface.Model(
            hidden=first.qkv.inputs,
            inner=first.down.inputs,
            heads=self.heads,
            shared=self.shared,
            width=self.width,
            own_capacity=own_capacity,
            prompt_capacity=prompt_capacity,
        )


class Live(NamedTuple):
    """Completions that are being decoded; int64 if nothing else is said."""

    newest_R: Tensor
    """The newest token of each."""
    kept_R: Tensor
    """Own tokens whose keys and values are kept: all but the newest."""
    limit_R: Tensor
    """The most tokens it may have."""
    prompt_R: Tensor
    """The entry of its prompt among those of `prompt_length_P`."""
    prompt_length_P: Tensor
    """Tokens of each prompt."""
    uniform_RT: Tensor
    """float64: one for each of its tokens."""


class Drawn(NamedTuple):
    """Tokens that rows have drawn: the first `count_R[r]` of row r, and their log-probabilities (nats, float32)."""

    token_RN: Tensor
    logp_RN: Tensor
    count_R: Tensor


class Decoder:
    """Such a model, drawing several tokens for each row in one call (ops/cpu/blocks.cpp).

    No operation of `torch.library`: its arguments are structures that point to a whole model, of which a schema would say nothing.
    """

    def __init__(
        self,
        blocks: Blocks,
        norm: Norm,
        head: Product,
        embedding_VD: Tensor,
        *,
        rotary_PW: tuple[Tensor, Tensor] | None = None,
        position_PD: Tensor | None = None,
    ) -> None:
        """Tables (float32) of all tokens, and of all positions cosines and sines or embeddings."""
        self.blocks, self.head, self.norm = blocks, head, norm
        tables = {"embedding": embedding_VD, "position": position_PD}
        if rotary_PW is not None:
            tables |= {"cosine": rotary_PW[0], "sine": rotary_PW[1]}
        self.tables = {name: table.contiguous() for name, table in tables.items() if table is not None}
        self.ends = interface.Ends(norm=_norm(norm), head=_weight(head), blocks=len(blocks.blocks))
        for name, table in self.tables.items():
            setattr(self.ends, name, table.data_ptr())

    def __call__(
        self,
        live: Live,
        slabs: Sequence[tuple[_Slab, _Slab]],
        steps: int,
        *,
        temperature: float,
        ending: Sequence[int],
        until_one_ends: bool,
        rows_at_once: int,
    ) -> Drawn:
        """Draw up to `steps` tokens for each row.

        A row stops behind a token of `ending` and at its limit.  until_one_ends: then all rows stop, so that another can take its
        place.  rows_at_once: whose logits exist at the same time.
        """
        live = Live(*(tensor.contiguous() for tensor in live))
        newest_R, kept_R = live.newest_R.clone(), live.kept_R.clone()  # they go along
        rows = live.newest_R.shape[0]
        token_RN = live.newest_R.new_empty(rows, steps)
        drawn = Drawn(token_RN, torch.empty(rows, steps, dtype=torch.float32), live.newest_R.new_zeros(rows))
        c_ending = array(c_int64, ending or [-1])
        tokens = interface.Tokens(
            *(x.data_ptr() for x in (newest_R, kept_R, live.limit_R, live.prompt_R, live.prompt_length_P, live.uniform_RT)),
            *(live.uniform_RT.shape[1], ctypes.addressof(c_ending), len(ending), temperature, int(until_one_ends)),
            *(rows, steps, rows_at_once, *(x.data_ptr() for x in drawn)),
        )
        call(
            *("decode_tokens", int(self.blocks.blocks[0].qkv.half), self.blocks.c_blocks, self.ends, self.blocks.model(slabs)),
            *(tokens, torch.get_num_threads()),
        )
        return drawn


_Slab = tuple[Tensor, Tensor]


def _block(block: Block) -> ctypes.Structure:
    norms = (block.norm, block.head_norm, block.mlp_norm)
    products = (block.qkv, block.out, block.up, block.down)
    return interface.Block(*map(_norm, norms), *map(_weight, products), window=block.window or 0, scale=block.scale)


def _norm(norm: Norm | None) -> ctypes.Structure:
    if norm is None:
        return interface.Norm()
    return interface.Norm(norm.weight.data_ptr(), None if norm.bias is None else norm.bias.data_ptr(), norm.eps)


def _weight(product: Product) -> ctypes.Structure:
    bias = None if product.bias_O is None else product.bias_O.data_ptr()
    return interface.Weight(product.packed.data_ptr(), bias, product.outputs)
