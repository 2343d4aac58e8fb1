"""The union of two parts of an attention, from outputs and log-sum-exps of each.

T tokens   H heads   W head width
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from groupwise.ops.triton.launch import power_of_two, warps_of


@triton.jit
def merge_parts_kernel(
    out,
    lse,
    add,
    add_lse,
    heads,
    width,
    out_row,
    out_head,
    add_row,
    add_head,
    lse_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Merge the heads of one token into `out` and `lse`.

    A log-sum-exp of +inf says that the second part has no keys.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (head[:, None] < heads) & (column < width)
    at_sum = head * lse_head + row
    first = tl.load(lse + at_sum, mask=head < heads, other=0.0)
    second = tl.load(add_lse + at_sum, mask=head < heads, other=0.0)
    second = tl.where(second == float("inf"), float("-inf"), second)
    largest = tl.maximum(first, second)
    union = largest + tl.log(tl.exp(first - largest) + tl.exp(second - largest))
    at_head = head[:, None].to(tl.int64)
    target = out + row * out_row + at_head * out_head + column
    number = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    total = number * tl.exp(first - union)[:, None]
    source = add + row * add_row + at_head * add_head + column
    number = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    total += number * tl.exp(second - union)[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + at_sum, union, mask=head < heads)


def merge_parts(
    out_THW: Tensor, lse_HT: Tensor, add_THW: Tensor, add_lse_HT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs and log-sum-exps (float32) over the keys of both parts, in place of the first.

    Outputs lie as the queries did: token by token, or head by head where a model rotates a part
    of each head.  Tokens of a head's log-sum-exps follow one another in memory.
    """
    rows, heads, width = out_THW.shape
    block_heads, block_width = power_of_two(heads), power_of_two(width)
    merge_parts_kernel[(rows,)](
        out_THW,
        lse_HT,
        add_THW,
        add_lse_HT,
        heads,
        width,
        *out_THW.stride()[:2],
        *add_THW.stride()[:2],
        lse_HT.stride(0),
        HEADS=block_heads,
        WIDTH=block_width,
        num_warps=warps_of(block_heads * block_width),
    )
    return out_THW, lse_HT
