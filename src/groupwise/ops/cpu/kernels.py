"""Which tensors the compiled kernels take, and where they are worth it; every caller has the same in torch's operations.

The kernels are the operations `torch.ops.groupwise.NAME`: `bindings.cpp` says what each takes and gives.  They are there once
`library` has been called, which all that asks here does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.ops.cpu.library import has_gemm, has_tiles, library

operations: Any = torch.ops.groupwise
"""The kernels, by name.  They have no gradients: autograd Functions call them."""
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


def worth_attention(keys: int, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if there is an `attention` for these that is worth it.  keys: the most that a query sees."""
    if not (query.dtype == key.dtype == value.dtype and fits(query, key, value)):
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


def draws(logits_RV: Tensor) -> bool:
    """True if `draw_tokens` takes these."""
    return logits_RV.device.type == "cpu" and logits_RV.dtype in TYPES and logits_RV.numel() > 0 and library() is not None


def multiplies(dtype: torch.dtype) -> bool:
    """True if there are packed weights of this type, and `linear` for them."""
    return dtype in TYPES and library() is not None


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
