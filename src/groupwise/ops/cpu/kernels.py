"""The compiled kernels as functions of tensors.  Every caller asks `fits` first and has the same in torch's operations.

T tokens of a stream   D width of the model   H query heads   K key-value heads   W head width
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.ops.cpu.interface import Stretch, Strides, array
from groupwise.ops.cpu.library import call, half, has_gemm, has_tiles, library

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
    return keys <= (MOST_KEYS_ON_TILES if has_tiles() else MOST_KEYS[query.dtype])


def _steps(*tensors: Tensor) -> Any:
    """Numbers from head to head and from token to token, of tensors (1, heads, T, W)."""
    found = [step for tensor in tensors for step in (tensor.stride(1), tensor.stride(2))]
    return array(Strides, list(zip(found[::2], found[1::2], strict=True)))


class Families:
    """Stretches of a stream, family by family, as `attention.cpp` reads them, in two tensors (int64)."""

    def __init__(self, families: Sequence[Sequence[tuple[int, int, int, int]]]) -> None:
        """A family's stretches: tokens from..to, which see themselves causally and the tokens prompt from..prompt to."""
        first = [0]
        for family in families:
            first.append(first[-1] + len(family))
        self.first_F = torch.tensor(first, dtype=torch.int64)
        """Where each family's stretches begin, and where the last one's end (F + 1)."""
        self.stretch_N4 = torch.tensor([stretch for family in families for stretch in family], dtype=torch.int64).view(-1, 4)
        self.end = max((family[-1][1] for family in families), default=0)
        """Tokens of the stream; what follows is filler."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, int]:
        """As `attention` takes them."""
        return self.first_F, self.stretch_N4, self.end


def _families(first_F: Tensor, stretch_N4: Tensor) -> tuple[Any, ...]:
    """The last arguments of both functions."""
    stretches = (Stretch * stretch_N4.shape[0]).from_address(stretch_N4.data_ptr())
    return first_F, stretches, first_F.shape[0] - 1, torch.get_num_threads()


def attention(
    query: Tensor, key: Tensor, value: Tensor, first_F: Tensor, stretch_N4: Tensor, end: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(1, H, T, W) and twice (1, K, T, W) -> outputs (1, H, T, W), tokens first in memory, and log-sum-exps (1, H, T).

    first_F, stretch_N4, end: see `Families`.
    """
    _, heads, tokens, width = query.shape
    out = query.new_empty(1, tokens, heads, width).transpose(1, 2)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    out[:, :, end:] = 0.0  # filler
    lse[:, :, end:] = 0.0
    call(
        "attention_forward",
        half(query), query, key, value, out, lse, _steps(query, key, value, out), tokens, heads, key.shape[1],
        width, scale, *_families(first_F, stretch_N4),
    )  # fmt: skip
    return out, lse


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    first_F: Tensor,
    stretch_N4: Tensor,
    end: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their type."""
    _, heads, tokens, width = query.shape
    found = grad_query, grad_key, grad_value = tuple(
        x.new_empty(1, tokens, x.shape[1], width).transpose(1, 2) for x in (query, key, value)
    )
    for grad in found:
        grad[:, :, end:] = 0.0
    call(
        "attention_backward",
        half(query), query, key, value, out, lse, grad_out, *found,
        _steps(query, key, value, out, grad_out, *found), tokens, heads, key.shape[1], width, scale,
        *_families(first_F, stretch_N4),
    )  # fmt: skip
    return grad_query, grad_key, grad_value


def add_rms_norm(x_RD: Tensor, add_RD: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x += add in place, and the norm of the sum, `weight * x / sqrt(mean(x^2) + eps)`, in `dtype`."""
    out_RD = torch.empty_like(x_RD, dtype=dtype)
    _add_rms_norm(x_RD, add_RD, x_RD, weight_D, out_RD, None, eps)
    return out_RD


def add_layer_norm(x_RD: Tensor, add_RD: Tensor | None, weight_D: Tensor, eps: float, bias_D: Tensor, dtype: torch.dtype) -> Tensor:
    """x += add in place, and the layer norm of the sum in `dtype`, of which `add` is; all else is float32."""
    out_RD = torch.empty_like(x_RD, dtype=dtype)
    call(
        "add_layer_norm",
        half(out_RD), x_RD, add_RD, weight_D, bias_D, out_RD, x_RD.shape[0], x_RD.shape[1], eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return out_RD


def rms_norm(
    x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype, add: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x + add (or x itself), its norm `weight * x / sqrt(mean(x^2) + eps)` in `dtype`, and the factors 1 / sqrt(...) (T,).

    x, add: contiguous rows (..., D), T of them.  The weight is float32.
    """
    total = x if add is None else torch.empty_like(x)
    out, scale_T = torch.empty_like(x, dtype=dtype), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    _add_rms_norm(x, add, total, weight_D, out, scale_T, eps)
    return total, out, scale_T


def _add_rms_norm(
    x: Tensor, add: Tensor | None, total: Tensor, weight_D: Tensor, out: Tensor, scale_T: Tensor | None, eps: float
) -> None:
    call(
        "add_rms_norm",
        half(x), 0 if add is None else half(add), half(out), x, add, total, weight_D, out, scale_T,
        x.numel() // x.shape[-1], x.shape[-1], eps, torch.get_num_threads(),
    )  # fmt: skip


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight_D: Tensor, scale_T: Tensor, more: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `rms_norm`'s sum x, in its type and in `grad`'s, and of its weight.  more: x's own gradient, in its type."""
    grad_x, grad_weight_D = torch.empty_like(x), torch.zeros_like(weight_D)
    copy = torch.empty_like(grad) if grad.dtype != x.dtype else None
    call(
        "rms_norm_backward",
        half(x), half(grad), x, grad, weight_D, scale_T, more, grad_x, copy, grad_weight_D,
        x.numel() // x.shape[-1], x.shape[-1],
    )  # fmt: skip
    return grad_x, grad_x if copy is None else copy, grad_weight_D


def head_norm(x_THW: Tensor, weight_HW: Tensor, eps: float) -> None:
    """Norms of heads in place, each with its own weight (float32); heads lie side by side."""
    tokens, heads, width = x_THW.shape
    call("head_norm", half(x_THW), x_THW, x_THW.stride(0), weight_HW, tokens, heads, width, eps, torch.get_num_threads())


def rotate(x_THW: Tensor, cos_TW: Tensor, sin_TW: Tensor, sign: float = 1.0) -> Tensor:
    """Rotary embedding: pairs (i, i + W/2) rotated by their position's angles, sign -1: back.  (T, heads, W); tables float32."""
    tokens, heads, width = x_THW.shape
    out_THW = x_THW.new_empty(tokens, heads, width)
    call(
        "rotate",
        half(x_THW), x_THW, x_THW.stride(0), x_THW.stride(1), cos_TW, sin_TW, out_THW, tokens, heads, width, sign,
        torch.get_num_threads(),
    )  # fmt: skip
    return out_THW


def gated(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """silu(gate) * up, of rows equally far apart in both."""
    rows, width = gate_TI.shape
    out_TI = gate_TI.new_empty(rows, width)
    call("gated", half(gate_TI), gate_TI, up_TI, out_TI, rows, width, gate_TI.stride(0), width, torch.get_num_threads())
    return out_TI


def gated_backward(grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Of `gated`: its result again and the gradient of `up_TI`; `grad_TI` becomes the gradient of `gate_TI`.  All contiguous."""
    inner_TI, grad_up_TI = torch.empty_like(gate_TI), torch.empty_like(gate_TI)
    call(
        "gated_backward",
        half(gate_TI), gate_TI, up_TI, grad_TI, inner_TI, grad_up_TI, gate_TI.numel(), torch.get_num_threads(),
    )  # fmt: skip
    return inner_TI, grad_up_TI


def gelu(x_TI: Tensor) -> Tensor:
    """GELU's tanh form, of a contiguous tensor."""
    out_TI = torch.empty_like(x_TI)
    call("gelu", half(x_TI), x_TI, out_TI, x_TI.numel(), torch.get_num_threads())
    return out_TI


def gelu_backward(grad_TI: Tensor, x_TI: Tensor) -> Tensor:
    """Of `gelu`: its result again; `grad_TI` becomes the gradient of `x_TI`.  All contiguous."""
    out_TI = torch.empty_like(x_TI)
    call("gelu_backward", half(x_TI), x_TI, grad_TI, out_TI, x_TI.numel(), torch.get_num_threads())
    return out_TI


def read_logits(raw_CV: Tensor, scale_C: Tensor, target_C: Tensor, lse_C: Tensor, logp_C: Tensor, entropy_C: Tensor | None) -> None:
    """Of rows of logits z = raw * scale, in nats: log sum exp z, log-probs of the targets, and entropies if there is room for them.

    All is contiguous, and float32 but for the logits and the targets (int64, each below V: nothing here looks).
    """
    call(
        "read_logits",
        half(raw_CV), raw_CV, scale_C, target_C, lse_C, logp_C, entropy_C, raw_CV.shape[0], raw_CV.shape[1],
        torch.get_num_threads(),
    )  # fmt: skip


def logits_gradient(
    raw_CV: Tensor,
    scale_C: Tensor,
    target_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    in_logp_C: Tensor,
    in_entropy_C: Tensor | None,
) -> None:
    """`raw_CV` becomes the gradient with respect to itself of a loss with these gradients in what `read_logits` has found.

    d logp / d raw = scale (onehot - p), d entropy / d raw = -scale p (log p + entropy); types as there.
    """
    call(
        "logits_gradient",
        half(raw_CV), raw_CV, scale_C, target_C, lse_C, entropy_C, in_logp_C, in_entropy_C, raw_CV.shape[0],
        raw_CV.shape[1], torch.get_num_threads(),
    )  # fmt: skip


LEAST_SIDE = 96
"""Matrices with a shorter side are not worth packing."""


def worth_gemm(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor | None = None, bias_N: Tensor | None = None) -> bool:
    """True if there is a `gemm` for these that is worth it; see `library.has_gemm`.

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
    return has_gemm()


def gemm(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, *, bias_N: Tensor | None = None, add: bool = False) -> None:
    """out = a b + bias, or out += a b, of matrices that are `worth_gemm`; `out` and `bias` are float32, rows of `out` are whole.

    Two float32 matrices are multiplied as such.  On matrix tiles each number is the sum of three in bfloat16, nothing of it lost;
    above 3.39e38, where bfloat16 ends, the result is not a number, and below 1e-30 it has fewer digits.  Subnormal bfloat16 numbers
    are zeros to tiles and to AVX-512's products of them.
    """
    (rows, depth), columns = a_MK.shape, b_KN.shape[1]
    call(
        "gemm",
        half(a_MK), a_MK, a_MK.stride(0), a_MK.stride(1), b_KN, b_KN.stride(0), b_KN.stride(1), out_MN,
        out_MN.stride(0), rows, columns, depth, bias_N, int(add), torch.get_num_threads(),
    )  # fmt: skip
