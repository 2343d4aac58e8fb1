"""The compiled kernels as functions of tensors.  Every caller asks `fits` first and has the same in torch's operations.

T tokens of a stream   D width of the model   H query heads   K key-value heads   W head width   R rows (completions being decoded)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_long
from typing import Any

import torch
from torch import Tensor

from groupwise.kernels.library import library

TYPES = (torch.float32, torch.bfloat16)
WIDTHS = 16
"""Rows are read in whole vectors: the longest that any processor has."""
MOST_KEYS = {torch.float32: 2048, torch.bfloat16: 1024}
MOST_KEYS_ON_TILES = 8192
"""Over more keys an update's attention (forward and backward) is faster by torch's flash kernel, or has not been measured."""


def fits(*tensors: Tensor, width: int | None = None) -> bool:
    """True if there are kernels for these tensors: on a CPU, float32 or bfloat16, rows as long as each other, of whole vectors.

    width: what has to be whole vectors instead of the rows.
    """
    length = tensors[0].shape[-1]
    if (length if width is None else width) % WIDTHS:
        return False
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.dtype not in TYPES or tensor.stride(-1) != 1 or tensor.shape[-1] != length:
            return False
    return library() is not None


def fit_as_one(*tensors: Tensor) -> bool:
    """`fits`, for tensors that a kernel reads as one type."""
    return all(tensor.dtype == tensors[0].dtype for tensor in tensors) and fits(*tensors)


def worth_attention(keys: int, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if there is an `attention` for these that is worth it.  keys: the most that a query sees."""
    if not fit_as_one(query, key, value):
        return False
    return keys <= (MOST_KEYS_ON_TILES if multiplies(torch.bfloat16) else MOST_KEYS[query.dtype])


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _half(tensor: Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


def _steps(*tensors: Tensor) -> Any:
    """Numbers from head to head and from token to token, of tensors (1, heads, T, W)."""
    found = [step for tensor in tensors for step in (tensor.stride(1), tensor.stride(2))]
    return (c_long * len(found))(*found)


class Families:
    """Stretches of a stream, family by family, as `attention.cpp` reads them."""

    def __init__(self, families: Sequence[Sequence[tuple[int, int, int, int]]]) -> None:
        """A family's stretches: tokens from..to, which see themselves causally and the tokens prompt from..prompt to."""
        self.first = [0]
        for family in families:
            self.first.append(self.first[-1] + len(family))
        flat = [number for family in families for stretch in family for number in stretch]
        self.longest = max((b - a + d - c for family in families for a, b, c, d in family), default=0)
        self.end = max((family[-1][1] for family in families), default=0)
        self.c_first = (ctypes.c_int64 * len(self.first))(*self.first)
        self.c_stretches = (ctypes.c_int64 * len(flat))(*flat)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The last arguments of both functions."""
        return self.c_first, self.c_stretches, c_long(len(self.first) - 1), torch.get_num_threads()


def attention(query: Tensor, key: Tensor, value: Tensor, families: Families, scale: float) -> tuple[Tensor, Tensor]:
    """(1, H, T, W) and twice (1, K, T, W) -> outputs (1, H, T, W), tokens first in memory, and log-sum-exps (1, H, T)."""
    _, heads, tokens, width = query.shape
    out = query.new_empty(1, tokens, heads, width).transpose(1, 2)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    out[:, :, families.end :] = 0.0  # filler
    _call(
        "attention_forward",
        *(_half(query), _at(query), _at(key), _at(value), _at(out), _at(lse), _steps(query, key, value, out)),
        *(c_long(tokens), c_long(heads), c_long(key.shape[1]), c_long(width), c_float(scale)),
        *families.arguments,
    )
    return out, lse


def attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, families: Families, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their type."""
    _, heads, tokens, width = query.shape
    found = grad_query, grad_key, grad_value = tuple(
        x.new_empty(1, tokens, x.shape[1], width).transpose(1, 2) for x in (query, key, value)
    )
    for grad in found:
        grad[:, :, families.end :] = 0.0
    _call(
        "attention_backward",
        *(_half(query), _at(query), _at(key), _at(value), _at(out), _at(lse), _at(grad_out), *map(_at, found)),
        _steps(query, key, value, out, grad_out, *found),
        *(c_long(tokens), c_long(heads), c_long(key.shape[1]), c_long(width), c_float(scale)),
        *families.arguments,
    )
    return grad_query, grad_key, grad_value


ROWS_AT_ONCE = 16
"""Rows of a prompt that one thread works on: more would leave other threads without work."""


class Rows:
    """Which rows belong to which prompt, as `decoding.cpp` reads it."""

    def __init__(self, entry_R: Sequence[int], prompt_length_P: Sequence[int]) -> None:
        """entry_R: each row's prompt; prompt_length_P: its tokens."""
        rows_P: list[list[int]] = [[] for _ in prompt_length_P]
        for row, entry in enumerate(entry_R):
            rows_P[entry].append(row)
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

    own, prompt: slabs (entries, K, room, W) of keys and values.  length_R: own tokens, the new one included (int64).
    """
    count, heads, width = query.shape
    out = query.new_empty(count, heads, width)
    steps = [step for tensor in (query, key, value) for step in (tensor.stride(1), tensor.stride(0))]
    _call(
        "decode_attention",
        *(_half(query), _at(query), _at(key), _at(value), _at(out), (c_long * 6)(*steps)),
        *(_at(own[0]), _at(own[1]), c_long(own[0].shape[2]), _at(prompt[0]), _at(prompt[1]), c_long(prompt[0].shape[2])),
        *(*rows.arguments, _at(length_R), c_long(heads), c_long(key.shape[1]), c_long(width)),
        *(c_float(scale), c_long(window or 0), torch.get_num_threads()),
    )
    return out


def add_rms_norm(x_RD: Tensor, add_RD: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x += add in place (float32), and the norm of the sum, `weight * x / sqrt(mean(x^2) + eps)`, in `dtype`."""
    out_RD = torch.empty_like(x_RD, dtype=dtype)
    _call(
        "add_rms_norm",
        *(0 if add_RD is None else _half(add_RD), _half(out_RD), _at(x_RD), _at(add_RD), _at(weight_D), _at(out_RD)),
        *(c_long(x_RD.shape[0]), c_long(x_RD.shape[1]), c_float(eps), torch.get_num_threads()),
    )
    return out_RD


def rotate(x_THW: Tensor, cos_TW: Tensor, sin_TW: Tensor, sign: float = 1.0) -> Tensor:
    """Pairs (i, i + W/2) turned by the angles of their position, sign -1: back.  (T, heads, W), any steps; tables float32."""
    tokens, heads, width = x_THW.shape
    out_THW = x_THW.new_empty(tokens, heads, width)
    _call(
        "rotate",
        *(_half(x_THW), _at(x_THW), c_long(x_THW.stride(0)), c_long(x_THW.stride(1)), _at(cos_TW), _at(sin_TW), _at(out_THW)),
        *(c_long(tokens), c_long(heads), c_long(width), c_float(sign), torch.get_num_threads()),
    )
    return out_THW


def gated(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """silu(gate) * up, of rows equally far apart in both."""
    rows, width = gate_TI.shape
    out_TI = gate_TI.new_empty(rows, width)
    _call(
        "gated",
        *(_half(gate_TI), _at(gate_TI), _at(up_TI), _at(out_TI), c_long(rows), c_long(width)),
        *(c_long(gate_TI.stride(0)), c_long(width), torch.get_num_threads()),
    )
    return out_TI


def gated_backward(grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Of `gated`: its result again and the gradient of `up_TI`; `grad_TI` becomes the gradient of `gate_TI`.  All contiguous."""
    inner_TI, grad_up_TI = torch.empty_like(gate_TI), torch.empty_like(gate_TI)
    _call(
        "gated_backward",
        *(_half(gate_TI), _at(gate_TI), _at(up_TI), _at(grad_TI), _at(inner_TI), _at(grad_up_TI)),
        *(c_long(gate_TI.numel()), torch.get_num_threads()),
    )
    return inner_TI, grad_up_TI


def gelu(x_TI: Tensor) -> Tensor:
    """GELU's tanh form, of a contiguous tensor."""
    out_TI = torch.empty_like(x_TI)
    _call("gelu", _half(x_TI), _at(x_TI), _at(out_TI), c_long(x_TI.numel()), torch.get_num_threads())
    return out_TI


def gelu_backward(grad_TI: Tensor, x_TI: Tensor) -> Tensor:
    """Of `gelu`: its result again; `grad_TI` becomes the gradient of `x_TI`.  All contiguous."""
    out_TI = torch.empty_like(x_TI)
    _call("gelu_backward", _half(x_TI), _at(x_TI), _at(grad_TI), _at(out_TI), c_long(x_TI.numel()), torch.get_num_threads())
    return out_TI


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`weight * x / sqrt(mean(x^2) + eps)` in `dtype`, and the factors 1 / sqrt(...) (T,).  The weight is float32."""
    out_TD, scale_T = torch.empty_like(x_TD, dtype=dtype), x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)
    _call(
        "rms_norm",
        *(_half(x_TD), _half(out_TD), _at(x_TD), _at(weight_D), _at(out_TD), _at(scale_T)),
        *(c_long(x_TD.shape[0]), c_long(x_TD.shape[1]), c_float(eps), torch.get_num_threads()),
    )
    return out_TD, scale_T


def rms_norm_backward(grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, scale_T: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`'s x, in its type, and of its weight."""
    grad_x_TD, grad_weight_D = torch.empty_like(x_TD), torch.zeros_like(weight_D)
    _call(
        "rms_norm_backward",
        *(_half(x_TD), _half(grad_TD), _at(x_TD), _at(grad_TD), _at(weight_D), _at(scale_T), _at(grad_x_TD), _at(grad_weight_D)),
        *(c_long(x_TD.shape[0]), c_long(x_TD.shape[1])),
    )
    return grad_x_TD, grad_weight_D


class Product:
    """x W^T + b for few rows, with the weight packed in the order in which it is read (kernels/products.cpp)."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        """dtype: of x, of the packed weight and of the result.  The weight may be float32 or bfloat16."""
        self.outputs, self.inputs = weight_OI.shape
        self.half = dtype == torch.bfloat16
        deep = -(-self.inputs // 32) * 32 if self.half else self.inputs
        self.packed = weight_OI.new_empty(-(-self.outputs // PANEL) * PANEL * deep, dtype=dtype)
        self.bias_O = None if bias_O is None else bias_O.detach().float().contiguous()
        weight_OI = weight_OI.detach().float()
        if 1 not in weight_OI.stride():
            weight_OI = weight_OI.contiguous()
        _call(
            "pack_half" if self.half else "pack_float",
            *(_at(weight_OI), c_long(weight_OI.stride(0)), c_long(weight_OI.stride(1)), _at(self.packed)),
            *(c_long(self.outputs), c_long(self.inputs), torch.get_num_threads()),
        )

    def __call__(self, x_RI: Tensor) -> Tensor:
        """(R, I) -> (R, O)."""
        x_RI = x_RI.contiguous()
        out_RO = x_RI.new_empty(x_RI.shape[0], self.outputs)
        _call(
            "product_half" if self.half else "product_float",
            *(_at(x_RI), _at(self.packed), _at(self.bias_O), _at(out_RO)),
            *(c_long(x_RI.shape[0]), c_long(self.outputs), c_long(self.inputs), torch.get_num_threads()),
        )
        return out_RO


PANEL = 16
"""Outputs are packed in whole vectors, of which the longest is the measure."""


def multiplies(dtype: torch.dtype) -> bool:
    """True if there is a `Product` of this type: in bfloat16 for processors with matrix tiles."""
    found = library()
    return found is not None and (dtype == torch.float32 or (dtype == torch.bfloat16 and bool(found.has_tiles())))


LEAST_SIDE = 96
"""Matrices with a shorter side are not worth cutting into tiles."""


def worth_tiles(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor | None = None, bias_N: Tensor | None = None) -> bool:
    """True if there is a `gemm` for these that is worth it: on a CPU, for processors with matrix tiles.

    What fits together in no way is left to torch, which says so.
    """
    (rows, depth), (deep, columns) = a_MK.shape, b_KN.shape
    if depth != deep or min(rows, depth, columns) < LEAST_SIDE:
        return False
    for matrix in (a_MK, b_KN):
        if not matrix.is_cpu or matrix.dtype not in TYPES or matrix.dtype != a_MK.dtype or 1 not in matrix.stride():
            return False
    for tensor, shape in ((out_MN, (rows, columns)), (bias_N, (columns,))):
        if tensor is None:
            continue
        if not tensor.is_cpu or tensor.dtype != torch.float32 or tensor.shape != shape or tensor.stride(-1) != 1:
            return False
    return multiplies(torch.bfloat16)


def gemm(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, *, bias_N: Tensor | None = None, add: bool = False) -> None:
    """out = a b + bias, or out += a b, of matrices that are `worth_tiles`; `out` and `bias` are float32, rows of `out` are whole.

    Two float32 matrices are multiplied as such: each number is the sum of three in bfloat16, nothing of it lost.  Above 3.39e38,
    where bfloat16 ends, the result is not a number; below 1e-30 it has fewer digits, for tiles take subnormal parts as zeros.
    """
    (rows, depth), columns = a_MK.shape, b_KN.shape[1]
    _call(
        "gemm",
        *(_half(a_MK), _at(a_MK), c_long(a_MK.stride(0)), c_long(a_MK.stride(1))),
        *(_at(b_KN), c_long(b_KN.stride(0)), c_long(b_KN.stride(1)), _at(out_MN), c_long(out_MN.stride(0))),
        *(c_long(rows), c_long(columns), c_long(depth), _at(bias_N), int(add), torch.get_num_threads()),
    )


def _call(name: str, *arguments: Any) -> None:
    getattr(library(), name)(*arguments)
