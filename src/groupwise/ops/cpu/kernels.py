"""The compiled kernels as operations of `torch.library` (`operation`).  Every caller asks `fits` first and has the same in torch's.

T tokens of a stream   D width of the model   H query heads   K key-value heads   W head width
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.ops.autograd import first_derivative
from groupwise.ops.cpu.library import call, half, has_gemm, has_tiles, library
from groupwise.ops.cpu.registered import LIBRARY, operation, require

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


def _steps(*tensors: Tensor) -> tuple[tuple[int, int], ...]:
    """Numbers from head to head and from token to token, of tensors (1, heads, T, W)."""
    return tuple((tensor.stride(1), tensor.stride(2)) for tensor in tensors)


HEADS = "heads (1, H, T, W) of one type, float32 or bfloat16, W whole vectors"


@operation()
def attention(
    query: Tensor, key: Tensor, value: Tensor, first_F: Tensor, stretch_N4: Tensor, end: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(1, H, T, W) and twice (1, K, T, W) -> outputs (1, H, T, W), tokens first in memory, and log-sum-exps (1, H, T).

    first_F, stretch_N4, end: see `Families`.
    """
    require(fit_as_one(query, key, value), HEADS, query, key, value)
    _, heads, tokens, width = query.shape
    out = query.new_empty(1, tokens, heads, width).transpose(1, 2)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    out[:, :, end:] = 0.0  # filler
    lse[:, :, end:] = 0.0
    call(
        "attention_forward",
        half(query), query, key, value, out, lse, _steps(query, key, value, out), tokens, heads, key.shape[1],
        width, scale, first_F, stretch_N4, first_F.shape[0] - 1, torch.get_num_threads(),
    )  # fmt: skip
    return out, lse


@operation()
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
    require(fit_as_one(query, key, value, out, grad_out), HEADS, query, key, value, out, grad_out)
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
        first_F, stretch_N4, first_F.shape[0] - 1, torch.get_num_threads(),
    )  # fmt: skip
    return grad_query, grad_key, grad_value


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.end, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


@first_derivative
def _attention_gradients(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, first_F, stretch_N4, out, lse = ctx.saved_tensors
    if grad_out.stride(-1) != 1 or grad_out.dtype != query.dtype:
        grad_out = grad_out.to(query.dtype).contiguous()
    return *attention_backward(grad_out, query, key, value, out, lse, first_F, stretch_N4, ctx.end, ctx.scale), *(None,) * 4


torch.library.register_autograd("groupwise::attention", _attention_gradients, setup_context=_keep_attention, lib=LIBRARY)

ROWS = "contiguous rows of float32 or bfloat16, of whole vectors, and float32 weights"


def _are_rows(weight_D: Tensor, *rows: Tensor | None) -> bool:
    """Cheaper than `fits`: the types are checked where the kernel is called."""
    width = weight_D.shape[0]
    if width % WIDTHS or not weight_D.is_contiguous():
        return False
    return all(x is None or (x.is_contiguous() and x.shape[-1] == width) for x in rows)


@operation("x_RD")
def add_rms_norm(x_RD: Tensor, add_RD: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x += add in place, and the norm of the sum, `weight * x / sqrt(mean(x^2) + eps)`, in `dtype`."""
    require(_are_rows(weight_D, x_RD, add_RD), ROWS, x_RD, weight_D)
    out_RD = torch.empty_like(x_RD, dtype=dtype)
    _add_rms_norm(x_RD, add_RD, x_RD, weight_D, out_RD, None, eps)
    return out_RD


@operation("x_RD")
def add_layer_norm(x_RD: Tensor, add_RD: Tensor | None, weight_D: Tensor, eps: float, bias_D: Tensor, dtype: torch.dtype) -> Tensor:
    """x += add in place, and the layer norm of the sum in `dtype`, of which `add` is; all else is float32."""
    require(_are_rows(weight_D, bias_D, x_RD, add_RD), ROWS, x_RD, weight_D, bias_D)
    out_RD = torch.empty_like(x_RD, dtype=dtype)
    call(
        "add_layer_norm",
        half(out_RD), x_RD, add_RD, weight_D, bias_D, out_RD, x_RD.shape[0], x_RD.shape[1], eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return out_RD


@operation()
def rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The norm `weight * x / sqrt(mean(x^2) + eps)` in `dtype`, and the factors 1 / sqrt(...) (T,).

    x: contiguous rows (..., D), T of them.  The weight is float32.
    """
    require(_are_rows(weight_D, x), ROWS, x, weight_D)
    out, scale_T = torch.empty_like(x, dtype=dtype), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    _add_rms_norm(x, None, x, weight_D, out, scale_T, eps)
    return out, scale_T


@operation()
def rms_norm_of_sum(x: Tensor, add: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x + add, and of this what `rms_norm` gives."""
    require(_are_rows(weight_D, x, add) and x.shape == add.shape, ROWS, x, add, weight_D)
    total, out = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    scale_T = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
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


@operation()
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight_D: Tensor, scale_T: Tensor, more: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of `rms_norm`'s weight, and of x once more in `grad`'s type: empty where both are of one type.

    more: a gradient that x has from elsewhere, in its type, which is added.
    """
    require(_are_rows(weight_D, x, grad, more) and x.shape == grad.shape, ROWS, x, grad, weight_D)
    grad_x, grad_weight_D = torch.empty_like(x), torch.zeros_like(weight_D)
    copy = torch.empty_like(grad) if grad.dtype != x.dtype else None
    call(
        "rms_norm_backward",
        half(x), half(grad), x, grad, weight_D, scale_T, more, grad_x, copy, grad_weight_D,
        x.numel() // x.shape[-1], x.shape[-1],
    )  # fmt: skip
    return grad_x, grad_weight_D, grad.new_empty(0) if copy is None else copy


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


@first_derivative
def _norm_gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *rms_norm_backward(grad.contiguous(), *ctx.saved_tensors)[:2], None, None


torch.library.register_autograd("groupwise::rms_norm", _norm_gradients, setup_context=_keep_norm, lib=LIBRARY)


@operation("x_THW")
def head_norm(x_THW: Tensor, weight_HW: Tensor, eps: float) -> None:
    """Norms of heads in place, each with its own weight (float32); heads lie side by side."""
    tokens, heads, width = x_THW.shape
    side_by_side = x_THW.stride()[1:] == (width, 1) and weight_HW.shape == (heads, width) and weight_HW.is_contiguous()
    require(side_by_side and width % WIDTHS == 0, "heads (T, H, W) side by side and weights of each", x_THW, weight_HW)
    call("head_norm", half(x_THW), x_THW, x_THW.stride(0), weight_HW, tokens, heads, width, eps, torch.get_num_threads())


@operation()
def rotary(x_THW: Tensor, cos_TW: Tensor, sin_TW: Tensor, sign: float = 1.0) -> Tensor:
    """Rotary embedding: pairs (i, i + W/2) rotated by their position's angles, sign -1: back.  (T, heads, W); tables float32."""
    tokens, heads, width = x_THW.shape
    tables = cos_TW.shape == sin_TW.shape == (tokens, width) and cos_TW.is_contiguous() and sin_TW.is_contiguous()
    whole = x_THW.stride(2) == 1 and width // 2 % WIDTHS == 0
    takes = "heads (T, H, W) of float32 or bfloat16, W / 2 whole vectors, and tables (T, W)"
    require(whole and tables, takes, x_THW, cos_TW, sin_TW)
    out_THW = x_THW.new_empty(tokens, heads, width)
    call(
        "rotate",
        half(x_THW), x_THW, x_THW.stride(0), x_THW.stride(1), cos_TW, sin_TW, out_THW, tokens, heads, width, sign,
        torch.get_num_threads(),
    )  # fmt: skip
    return out_THW


def _keep_tables(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos_TW, sin_TW, ctx.sign = inputs
    ctx.save_for_backward(cos_TW, sin_TW)


@first_derivative
def _rotary_gradient(ctx: Any, grad_THW: Tensor) -> tuple[Tensor | None, ...]:
    grad_THW = grad_THW if grad_THW.stride(-1) == 1 else grad_THW.contiguous()
    cos_TW, sin_TW = ctx.saved_tensors
    return rotary(grad_THW, cos_TW, sin_TW, -ctx.sign), None, None, None


torch.library.register_autograd("groupwise::rotary", _rotary_gradient, setup_context=_keep_tables, lib=LIBRARY)


@operation()
def gated(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """silu(gate) * up, of rows equally far apart in both."""
    equal = gate_TI.shape == up_TI.shape and gate_TI.stride() == up_TI.stride()
    whole = gate_TI.dtype == up_TI.dtype and gate_TI.stride(1) == 1 and gate_TI.shape[1] % WIDTHS == 0
    require(equal and whole, "two matrices equal in all but numbers, of whole vectors", gate_TI, up_TI)
    rows, width = gate_TI.shape
    out_TI = gate_TI.new_empty(rows, width)
    call("gated", half(gate_TI), gate_TI, up_TI, out_TI, rows, width, gate_TI.stride(0), width, torch.get_num_threads())
    return out_TI


ALIKE = "contiguous tensors of one type, float32 or bfloat16, and one shape, rows of whole vectors"


def _are_alike(*tensors: Tensor) -> bool:
    shape, dtype = tensors[0].shape, tensors[0].dtype
    return shape[-1] % WIDTHS == 0 and all(x.is_contiguous() and x.shape == shape and x.dtype == dtype for x in tensors)


@operation("grad_TI")
def gated_backward(grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Of `gated`: its result again and the gradient of `up_TI`; `grad_TI` becomes the gradient of `gate_TI`.  All contiguous."""
    require(_are_alike(grad_TI, gate_TI, up_TI), ALIKE, grad_TI, gate_TI, up_TI)
    inner_TI, grad_up_TI = torch.empty_like(gate_TI), torch.empty_like(gate_TI)
    call(
        "gated_backward",
        half(gate_TI), gate_TI, up_TI, grad_TI, inner_TI, grad_up_TI, gate_TI.numel(), torch.get_num_threads(),
    )  # fmt: skip
    return inner_TI, grad_up_TI


@operation()
def gelu(x_TI: Tensor) -> Tensor:
    """GELU's tanh form, of a contiguous tensor."""
    require(_are_alike(x_TI), ALIKE, x_TI)
    out_TI = torch.empty_like(x_TI)
    call("gelu", half(x_TI), x_TI, out_TI, x_TI.numel(), torch.get_num_threads())
    return out_TI


@operation("grad_TI")
def gelu_backward(grad_TI: Tensor, x_TI: Tensor) -> Tensor:
    """Of `gelu`: its result again; `grad_TI` becomes the gradient of `x_TI`.  All contiguous."""
    require(_are_alike(grad_TI, x_TI), ALIKE, grad_TI, x_TI)
    out_TI = torch.empty_like(x_TI)
    call("gelu_backward", half(x_TI), x_TI, grad_TI, out_TI, x_TI.numel(), torch.get_num_threads())
    return out_TI


LOGITS = "contiguous logits (C, V) and a number of each row"


def _are_logits(raw_CV: Tensor, *each: Tensor | None) -> bool:
    rows = raw_CV.shape[:1]
    return raw_CV.is_contiguous() and all(x.shape == rows and x.is_contiguous() for x in each if x is not None)


@operation("lse_C", "logp_C", "entropy_C")
def read_logits(raw_CV: Tensor, scale_C: Tensor, target_C: Tensor, lse_C: Tensor, logp_C: Tensor, entropy_C: Tensor | None) -> None:
    """Of rows of logits z = raw * scale, in nats: log sum exp z, log-probs of the targets, and entropies if there is room for them.

    All is contiguous, and float32 but for the logits and the targets (int64, each below V: nothing here looks).
    """
    require(_are_logits(raw_CV, scale_C, target_C, lse_C, logp_C, entropy_C), LOGITS, raw_CV, scale_C, target_C)
    call(
        "read_logits",
        half(raw_CV), raw_CV, scale_C, target_C, lse_C, logp_C, entropy_C, raw_CV.shape[0], raw_CV.shape[1],
        torch.get_num_threads(),
    )  # fmt: skip


@operation("raw_CV")
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
    each = scale_C, target_C, lse_C, entropy_C, in_logp_C, in_entropy_C
    require(_are_logits(raw_CV, *each), LOGITS, raw_CV, scale_C, target_C)
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


@operation("out_MN")
def gemm(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, *, bias_N: Tensor | None = None, add: bool = False) -> None:
    """out = a b + bias, or out += a b, of matrices that are `worth_gemm`; `out` and `bias` are float32, rows of `out` are whole.

    Two float32 matrices are multiplied as such.  On matrix tiles each number is the sum of three in bfloat16, nothing of it lost;
    above 3.39e38, where bfloat16 ends, the result is not a number, and below 1e-30 it has fewer digits.  Subnormal bfloat16 numbers
    are zeros to tiles and to AVX-512's products of them.
    """
    (rows, depth), columns = a_MK.shape, b_KN.shape[1]
    fit = b_KN.shape[0] == depth and out_MN.shape == (rows, columns) and a_MK.dtype == b_KN.dtype
    near = out_MN.stride(1) == 1 and 1 in a_MK.stride() and 1 in b_KN.stride()
    require(fit and near, "matrices that fit together, whose rows or columns are whole", a_MK, b_KN, out_MN)
    call(
        "gemm",
        half(a_MK), a_MK, a_MK.stride(0), a_MK.stride(1), b_KN, b_KN.stride(0), b_KN.stride(1), out_MN,
        out_MN.stride(0), rows, columns, depth, bias_N, int(add), torch.get_num_threads(),
    )  # fmt: skip
