"""The compiled kernels: which tensors they take, and where they are worth it.

They are the operations `torch.ops.groupwise.NAME`; `kernels/bindings.cpp` says what each takes and
gives.  For tensors that they do not take, torch's operations compute the same, to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.ops.query import Family

operations: Any = torch.ops.groupwise
"""The kernels, by name.  They have no gradients: autograd Functions call them."""
TYPES = (torch.float32, torch.bfloat16)
WIDTHS = 16
"""Rows are read in whole vectors: the longest that any processor has."""
MOST_KEYS = {torch.float32: 2048, torch.bfloat16: 1024}
MOST_KEYS_ON_TILES = 8192
"""Over more keys an update's attention (forward and backward) is faster by torch's flash kernel, or
has not been measured.
"""


def has_gemm() -> bool:
    """True if `gemm` is worth it on this processor: it has matrix tiles, or AVX-512 of full width
    and is not Intel's.
    """
    return operations.has_gemm()


def fits(*tensors: Tensor, width: int | None = None) -> bool:
    """True if there are kernels for these tensors: on a CPU, float32 or bfloat16, rows as long as
    each other, of whole vectors.

    width: what has to be whole vectors instead of the rows.
    """
    length = tensors[0].shape[-1]
    if (length if width is None else width) % WIDTHS:
        return False
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.dtype not in TYPES or tensor.stride(-1) != 1 or tensor.shape[-1] != length:
            return False
    return True


def worth_attention(keys: int, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if there is an `attention` for these that is worth it.  keys: the most that a query
    sees.
    """
    if not (query.dtype == key.dtype == value.dtype and fits(query, key, value)):
        return False
    return keys <= (MOST_KEYS_ON_TILES if operations.has_tiles() else MOST_KEYS[query.dtype])


def segments(families: Sequence[Family]) -> tuple[Tensor, Tensor, int]:
    """Return the segments of a stream, family by family, as `attention` takes them.

    A segment is (from, to, prefix from, prefix to): its tokens see themselves causally, and the
    whole prefix.  A family's first segment holds its prefix.

    Out: each family's first segment, and one behind the last (F + 1) int64; the segments (N, 4)
        int64; the tokens of the stream, behind which lies filler.
    """
    rows: list[tuple[int, int, int, int]] = []
    firsts = [0]
    end = 0
    for family in families:
        prefix = (0, 0)
        for begin, end in family.causal:
            rows.append((begin, end, prefix[0], prefix[1]))
            prefix = family.prefix
        firsts.append(len(rows))
    first_F = torch.tensor(firsts, dtype=torch.int64)
    segment_N4 = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
    return first_F, segment_N4, end


def draws(logits_RV: Tensor) -> bool:
    """True if `draw_tokens` takes these."""
    return logits_RV.device.type == "cpu" and logits_RV.dtype in TYPES and logits_RV.numel() > 0


LEAST_SIDE = 96
"""Matrices with a shorter side are not worth packing."""


def worth_gemm(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor | None = None, bias_N: Tensor | None = None) -> bool:
    """True if there is a `gemm` for these that is worth it; see `has_gemm`.

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
