"""What is read off a chunk of logits, in one pass over them, and their gradient, in place.

Torch's operations move about 122 bytes for each logit in bfloat16; these read 2 bytes, then read
and write 2 each.

C rows of a chunk   V vocabulary
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from groupwise.ops.triton.launch import power_of_two, quotient

BLOCK = 4096
"""Most logits of a row that a program holds at once."""
WARPS = 8
ROWS = 2048
"""Rows of a chunk: its logits in bfloat16 are 0.6 GB with 150,000 ids.  A chunk reads the head
twice and its gradient once, so fewer rows would spend their time on that.
"""


@triton.jit
def read_kernel(
    raw,
    factor,
    target,
    lse,
    logp,
    entropy,
    VOCABULARY: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read one row: log-sum-exp and log-prob of the target of z = factor * raw, and the entropy.

    Sums are kept relative to the largest logit so far (Milakov and Gimelshein 2018).
    """
    row = tl.program_id(0).to(tl.int64)
    tempered = tl.load(factor + row)
    column = tl.arange(0, BLOCK)
    top = -1e30
    total = 0.0
    weighted = 0.0
    for begin in range(0, VOCABULARY, BLOCK):
        inside = begin + column < VOCABULARY
        place = raw + row * VOCABULARY + begin + column
        z = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32) * tempered
        highest = tl.maximum(top, tl.max(z, 0))
        e = tl.exp(z - highest)
        shrink = tl.exp(top - highest)
        total = total * shrink + tl.sum(e, 0)
        if ENTROPY:
            weighted = weighted * shrink + tl.sum(tl.where(e > 0.0, z * e, 0.0), 0)
        top = highest
    log_total = top + tl.log(total)
    chosen = tl.load(raw + row * VOCABULARY + tl.load(target + row)).to(tl.float32) * tempered
    tl.store(lse + row, log_total)
    tl.store(logp + row, chosen - log_total)
    if ENTROPY:
        tl.store(entropy + row, log_total - weighted / total)


@triton.jit
def gradient_kernel(
    raw,
    factor,
    target,
    lse,
    entropy,
    grad_logp,
    grad_entropy,
    vocabulary,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite one block of a row: d logp / dz = onehot - p, d entropy / dz = -p (log p + H)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    tempered = tl.load(factor + row)
    slope = tl.load(grad_logp + row) * tempered
    place = raw + row * vocabulary + column
    z = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32) * tempered
    log_p = z - tl.load(lse + row)
    p = tl.exp(log_p)
    grad = -p * slope
    if ENTROPY:
        entropy_slope = tl.load(grad_entropy + row) * tempered
        from_mean = log_p + tl.load(entropy + row)
        grad -= tl.where(p > 0.0, p * from_mean, 0.0) * entropy_slope
    grad = tl.where(column == tl.load(target + row), grad + slope, grad)
    tl.store(place, grad.to(raw.dtype.element_ty), mask=inside)


class TritonLogitsReader:
    """Reads a chunk of contiguous logits (C, V)."""

    least_rows = ROWS

    def measure(
        self,
        raw_CV: Tensor,
        factor_C: Tensor,
        target_C: Tensor,
        lse_C: Tensor,
        logp_C: Tensor,
        entropy_C: Tensor | None,
    ) -> None:
        """Fill log-sum-exps, log-probs of the targets and entropies (nats) of `factor * raw`."""
        rows, vocabulary = raw_CV.shape
        read_kernel[(rows,)](
            raw_CV,
            factor_C,
            target_C,
            lse_C,
            logp_C,
            entropy_C,
            VOCABULARY=vocabulary,
            ENTROPY=entropy_C is not None,
            BLOCK=min(BLOCK, power_of_two(vocabulary)),
            num_warps=WARPS,
        )

    def gradient(
        self,
        raw_CV: Tensor,
        factor_C: Tensor,
        target_C: Tensor,
        lse_C: Tensor,
        entropy_C: Tensor,
        grad_logp_C: Tensor,
        grad_entropy_C: Tensor | None,
    ) -> None:
        """Overwrite the logits with their gradient."""
        rows, vocabulary = raw_CV.shape
        block = min(BLOCK, power_of_two(vocabulary))
        grads: list[Any] = [grad_logp_C.contiguous(), None]
        if grad_entropy_C is not None:
            grads[1] = grad_entropy_C.contiguous()
        gradient_kernel[(rows, quotient(vocabulary, block))](
            raw_CV,
            factor_C,
            target_C,
            lse_C,
            entropy_C,
            *grads,
            vocabulary,
            ENTROPY=grad_entropy_C is not None,
            BLOCK=block,
            num_warps=WARPS,
        )
