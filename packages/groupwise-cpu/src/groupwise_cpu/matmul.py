"""Products of large matrices, each by the way that is fastest on its device: torch's, or our own on
some CPUs.

In float32 ours (gemm.cpp) take two thirds of the time of torch's on processors with matrix tiles,
and half of it on AMD's with AVX-512 of full width, which MKL uses by half; they are as exact.
Elsewhere they stay off: on a core of AMD's Zen 3 (AVX2) torch's reach 80 to 87 GFLOP/s and ours 45
to 75, on Zen 4 (AVX-512 in halves) torch's 86 to 96 and ours 81 to 92.  In bfloat16 oneDNN's are
faster than ours where the result is bfloat16, too; results in float32, which gradients of float32
weights are, it does not know.

M, N sides of the result   K what is summed over
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.ops.operations import Operations
from groupwise_cpu import compiled

_by_torch = Operations()


def product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """a b + bias, of matrices of one type and in it."""
    if a_MK.dtype == torch.float32 and compiled.worth_gemm(a_MK, b_KN, out, bias_N):
        out = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]) if out is None else out
        compiled.operations.gemm(a_MK, b_KN, out, bias_N)
        return out
    return torch.mm(a_MK, b_KN, out=out) if bias_N is None else torch.addmm(bias_N, a_MK, b_KN, out=out)


def add_product(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, fresh: bool) -> None:
    """total += a b, or total = a b where it is `fresh`: not written yet.  Its type may be wider
    than that of the factors.
    """
    if compiled.worth_gemm(a_MK, b_KN, total_MN):
        compiled.operations.gemm(a_MK, b_KN, total_MN, add=not fresh)
    else:
        _by_torch.add_product(total_MN, a_MK, b_KN, fresh=fresh)
