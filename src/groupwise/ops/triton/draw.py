"""One token of every row from its logits, in one kernel: two reads, of which the second is of one
block.

R rows   V vocabulary   B blocks of the vocabulary
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.ops.triton.launch import power_of_two, quotient

BLOCK = 4096
"""Most logits of a row that a program holds at once."""
WARPS = 8


@triton.jit
def draw_kernel(
    logits,
    uniform,
    token,
    logp,
    logits_row,
    temperature,
    VOCABULARY: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Draw a token of one row: the first at which the cumulative probability passes `uniform`.

    First the largest logit of each block and its sum of exponentials relative to it, then the
    block that holds the token, then the token in that block.  Cumulative sums are in float64, and a
    target lies strictly below the total, so that a token of probability 0 is never drawn.
    GREEDY: the likeliest token, the first of several; its log-prob is that at temperature 1.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    block = tl.arange(0, BLOCKS)
    start = logits + row * logits_row
    top_B = tl.full([BLOCKS], -float("inf"), tl.float32)
    sum_B = tl.zeros([BLOCKS], tl.float32)
    for number in range(BLOCKS):
        place = number * BLOCK + column
        z = tl.load(start + place, mask=place < VOCABULARY, other=-float("inf")).to(tl.float32)
        z = z / temperature
        highest = tl.max(z, 0)
        shift = tl.where(highest == -float("inf"), 0.0, highest)
        top_B = tl.where(block == number, highest, top_B)
        sum_B = tl.where(block == number, tl.sum(tl.exp(z - shift), 0), sum_B)
    top = tl.max(top_B, 0)
    total_B = sum_B.to(tl.float64) * tl.exp(top_B - top).to(tl.float64)
    total = tl.sum(total_B, 0)
    cumulative_B = tl.cumsum(total_B, 0)
    if GREEDY:
        chosen = tl.min(tl.where(top_B == top, block, BLOCKS), 0)
        below = 0.0
    else:
        highest_B = tl.max(cumulative_B, 0)
        target = tl.minimum(tl.load(uniform + row) * highest_B, highest_B * (1.0 - 1e-15))
        chosen = tl.min(tl.where(cumulative_B > target, block, BLOCKS), 0)
        below = target - tl.max(tl.where(block < chosen, cumulative_B, 0.0), 0)
    place = chosen * BLOCK + column
    z = tl.load(start + place, mask=place < VOCABULARY, other=-float("inf")).to(tl.float32)
    z = z / temperature
    if GREEDY:
        inside = tl.min(tl.where(z == top, column, BLOCK), 0)
    else:
        cumulative = tl.cumsum(tl.exp(z - top).to(tl.float64), 0)
        all_of_block = tl.max(cumulative, 0)
        target = tl.minimum(below, all_of_block * (1.0 - 1e-15))
        inside = tl.min(tl.where(cumulative > target, column, BLOCK), 0)
    z_of_token = tl.max(tl.where(column == inside, z, -float("inf")), 0)
    # Logits that are not numbers pass no target: an id behind the vocabulary would end the process.
    drawn = tl.minimum(chosen * BLOCK + inside, VOCABULARY - 1)
    tl.store(token + row, drawn.to(tl.int64))
    tl.store(logp + row, z_of_token - top - tl.log(total.to(tl.float32)))


def draw_tokens(logits_RV: Tensor, uniform_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample one token of each row (int64) and its log-probability (nats, float32)."""
    rows, vocabulary = logits_RV.shape
    token_R = uniform_R.new_empty(rows, dtype=torch.int64)
    logp_R = uniform_R.new_empty(rows, dtype=torch.float32)
    block = min(BLOCK, power_of_two(vocabulary))
    draw_kernel[(rows,)](
        logits_RV,
        uniform_R,
        token_R,
        logp_R,
        logits_RV.stride(0),
        temperature or 1.0,
        VOCABULARY=vocabulary,
        GREEDY=temperature == 0.0,
        BLOCK=block,
        BLOCKS=power_of_two(quotient(vocabulary, block)),
        num_warps=WARPS,
    )
    return token_R, logp_R
