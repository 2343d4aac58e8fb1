"""The compiled kernels of decoding as functions of tensors: new tokens for each row, by weights packed for it.

R rows (completions being decoded)   D width of the model   H query heads   K key-value heads   W head width   O outputs   I inputs
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.ops.cpu.kernels import TYPES
from groupwise.ops.cpu.library import address, call, half, library

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
                parts += [entry, first, min(first + ROWS_AT_ONCE, start + len(rows))]
            start += len(rows)
        self.arguments = (
            *((ctypes.c_int64 * len(parts))(*parts), c_long(len(parts) // 3)),
            *((ctypes.c_int64 * len(prompt_length_P))(*prompt_length_P), (ctypes.c_int64 * len(order))(*order)),
        )


BLOCK = 32
"""Tokens for which there is room in a slab at a time."""


def keep_entries(key_NMKW: Tensor, value_NMKW: Tensor, slab: tuple[Tensor, Tensor], first: int) -> None:
    """N entries from `first` on get tokens 0 .. M - 1, in the order in which `decode_attention` meets them."""
    count, length, shared, width = key_NMKW.shape
    steps = [step for tensor in (key_NMKW, value_NMKW) for step in tensor.stride()[:3]]
    call(
        "keep_entries",
        *(
            half(key_NMKW),
            address(key_NMKW),
            address(value_NMKW),
            (c_long * 6)(*steps),
            *map(address, slab),
            c_long(slab[0].shape[2] * BLOCK),
        ),
        *(c_long(first), c_long(count), c_long(length), c_long(shared), c_long(width), torch.get_num_threads()),
    )


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
    count, heads, width = query.shape
    out = query.new_empty(count, heads, width)
    steps = [step for tensor in (query, key, value) for step in (tensor.stride(1), tensor.stride(0))]
    rooms = (c_long(slab[0].shape[2] * BLOCK) for slab in (own, prompt))
    call(
        "decode_attention",
        *(half(query), address(query), address(key), address(value), address(out), (c_long * 6)(*steps)),
        *(address(own[0]), address(own[1]), next(rooms), address(prompt[0]), address(prompt[1]), next(rooms)),
        *(*rows.arguments, address(length_R), address(None), c_long(heads), c_long(key.shape[1]), c_long(width)),
        *(c_float(scale), c_long(window or 0), torch.get_num_threads()),
    )
    return out


PANEL = 16
"""Outputs are packed in whole vectors, of which the longest is the measure."""


def multiplies(dtype: torch.dtype) -> bool:
    """True if there is a `Product` of this type."""
    return dtype in TYPES and library() is not None


class Product:
    """x W^T + b for few rows, with the weight packed in the order in which it is read (kernels/products.cpp)."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        """dtype: of x, of the packed weight and of the result.  The weight may be of another type.

        In bfloat16 subnormal numbers and results may count as zeros.
        """
        self.outputs, self.inputs = weight_OI.shape
        self.half = dtype == torch.bfloat16
        deep = -(-self.inputs // 32) * 32 if self.half else self.inputs
        count = -(-self.outputs // PANEL) * PANEL * deep
        self.packed = torch.empty(count, dtype=dtype)
        self.bias_O = None if bias_O is None else bias_O.detach().float().contiguous()
        weight_OI = weight_OI.detach() if weight_OI.dtype in TYPES else weight_OI.detach().float()
        if 1 not in weight_OI.stride():
            weight_OI = weight_OI.contiguous()
        call(
            "pack_weight",
            *(int(self.half), half(weight_OI), address(weight_OI), c_long(weight_OI.stride(0)), c_long(weight_OI.stride(1))),
            *(address(self.packed), c_long(self.outputs), c_long(self.inputs), torch.get_num_threads()),
        )

    def __call__(self, x_RI: Tensor) -> Tensor:
        """(R, I) -> (R, O)."""
        x_RI = x_RI.contiguous()
        out_RO = x_RI.new_empty(x_RI.shape[0], self.outputs)
        call(
            "product_half" if self.half else "product_float",
            *(address(x_RI), address(self.packed), address(self.bias_O), address(out_RO)),
            *(c_long(x_RI.shape[0]), c_long(self.outputs), c_long(self.inputs), torch.get_num_threads()),
        )
        return out_RO


def draws(logits_RV: Tensor) -> bool:
    """True if `draw_tokens` takes these."""
    return logits_RV.device.type == "cpu" and logits_RV.dtype in TYPES and logits_RV.numel() > 0 and library() is not None


def draw_tokens(logits_RV: Tensor, uniform_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One token of each row (int64) and its log-probability (nats, float32) at this temperature.

    The first token at which the cumulative probability passes `uniform_R` (float64, in [0, 1)): never one of probability 0.  At
    temperature 0 the likeliest (the first of several), and its log-probability at temperature 1.
    """
    logits_RV, uniform_R = logits_RV.contiguous(), uniform_R.contiguous()
    rows, size = logits_RV.shape
    token_R, logp_R = uniform_R.new_empty(rows, dtype=torch.int64), uniform_R.new_empty(rows, dtype=torch.float32)
    call(
        "draw_tokens",
        *(half(logits_RV), address(logits_RV), c_float(temperature), *map(address, (uniform_R, token_R, logp_R))),
        *(c_long(rows), c_long(size), torch.get_num_threads()),
    )
    return token_R, logp_R


class _Weight(ctypes.Structure):
    _fields_ = (("packed", c_void_p), ("bias", c_void_p), ("outputs", c_long))


class _Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float))


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("norm", "head_norm", "mlp_norm")),
        *((name, _Weight) for name in ("qkv", "out", "up", "down")),
        *((name, c_void_p) for name in ("own_k", "own_v", "prompt_k", "prompt_v")),
        *(("window", c_long), ("scale", c_float)),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "last", "cosine", "sine", "parts")),
        ("part_count", c_long),
        *((name, c_void_p) for name in ("prompt_length", "rows_of_parts", "length", "places")),
        *((name, c_long) for name in ("own_room", "prompt_room", "rows", "hidden", "inner", "heads", "shared", "width")),
    )


class _Ends(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "cosine", "sine", "position")),
        *(("norm", _Norm), ("head", _Weight), ("blocks", c_long)),
    )


class _Tokens(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("newest", "kept", "limit", "prompt", "uniform")),
        *(("uniform_step", c_long), ("ending", c_void_p), ("endings", c_long), ("temperature", c_float), ("until_one_ends", c_int)),
        *((name, c_long) for name in ("steps", "at_once")),
        *((name, c_void_p) for name in ("token", "logp", "drawn")),
    )


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
    """All blocks of such a model for one new token per row, in one call (kernels/blocks.cpp)."""

    def __init__(self, blocks: Sequence[Block], heads: int, shared: int, width: int) -> None:
        """heads of queries; shared: of keys and values; of this width."""
        self.blocks, self.sizes = tuple(blocks), {"heads": heads, "shared": shared, "width": width}
        self.c_blocks = (_Block * len(blocks))(*map(_block, blocks))

    def __call__(
        self,
        x_RD: Tensor,
        rotary_RW: tuple[Tensor, Tensor] | None,
        slabs: Sequence[tuple[_Slab, _Slab]],
        rows: Rows,
        length_R: Tensor,
    ) -> Tensor:
        """What the last MLP adds; the others' additions are in x (float32), which changes.

        rotary: cosines and sines of the rows' positions.  slabs: of each block own and prompt, as in `decode_attention`.
        """
        last_RD = x_RD.new_empty(x_RD.shape, dtype=self.blocks[0].qkv.packed.dtype)
        parts, count, prompt_length, order = rows.arguments
        step = self.step(
            slabs,
            x_RD.shape[0],
            x=x_RD.data_ptr(),
            last=last_RD.data_ptr(),
            **({} if rotary_RW is None else {"cosine": rotary_RW[0].data_ptr(), "sine": rotary_RW[1].data_ptr()}),
            parts=ctypes.addressof(parts),
            part_count=count.value,
            prompt_length=ctypes.addressof(prompt_length),
            rows_of_parts=ctypes.addressof(order),
            length=length_R.data_ptr(),
        )
        call("decode_blocks", half(last_RD), self.c_blocks, c_long(len(self.blocks)), ctypes.byref(step), torch.get_num_threads())
        return last_RD

    def step(self, slabs: Sequence[tuple[_Slab, _Slab]], rows: int, **more: int) -> _Step:
        """What `blocks.cpp` calls a step, over these slabs."""
        for block, (own, prompt) in zip(self.c_blocks, slabs, strict=True):
            block.own_k, block.own_v, block.prompt_k, block.prompt_v = (x.data_ptr() for x in (*own, *prompt))
        own_room, prompt_room = (slab[0].shape[2] * BLOCK for slab in slabs[0])
        first = self.blocks[0]
        sizes = {"rows": rows, "hidden": first.qkv.inputs, "inner": first.down.inputs, **self.sizes}
        return _Step(own_room=own_room, prompt_room=prompt_room, **sizes, **more)


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
    """Such a model, drawing several tokens for each row in one call (kernels/blocks.cpp)."""

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
        places = {name: table.data_ptr() for name, table in self.tables.items()}
        self.ends = _Ends(**places, norm=_norm(norm), head=_weight(head), blocks=len(blocks.blocks))

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
        c_ending = (ctypes.c_int64 * max(len(ending), 1))(*ending)
        step = self.blocks.step(slabs, rows, prompt_length=live.prompt_length_P.data_ptr())
        tokens = _Tokens(
            *(x.data_ptr() for x in (newest_R, kept_R, live.limit_R, live.prompt_R, live.uniform_RT)),
            *(live.uniform_RT.shape[1], ctypes.addressof(c_ending), len(ending), temperature, int(until_one_ends)),
            *(steps, rows_at_once, *(x.data_ptr() for x in drawn)),
        )
        what = (self.blocks.c_blocks, ctypes.byref(self.ends), ctypes.byref(step), ctypes.byref(tokens))
        call("decode_tokens", int(self.blocks.blocks[0].qkv.half), *what, torch.get_num_threads())
        return drawn


_Slab = tuple[Tensor, Tensor]


def _block(block: Block) -> _Block:
    norms = (block.norm, block.head_norm, block.mlp_norm)
    products = (block.qkv, block.out, block.up, block.down)
    return _Block(*map(_norm, norms), *map(_weight, products), window=block.window or 0, scale=block.scale)


def _norm(norm: Norm | None) -> _Norm:
    if norm is None:
        return _Norm()
    return _Norm(norm.weight.data_ptr(), None if norm.bias is None else norm.bias.data_ptr(), norm.eps)


def _weight(product: Product) -> _Weight:
    return _Weight(product.packed.data_ptr(), None if product.bias_O is None else product.bias_O.data_ptr(), product.outputs)
