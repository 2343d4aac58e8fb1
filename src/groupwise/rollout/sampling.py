"""How a token is drawn from logits, and where its randomness comes from.

Every completion has its own stream of uniform numbers, a pure function of (seed, prompt id, index
in the group, token): who is decoded next to it, in which order, or how many at a time cannot change
what is drawn.  A token is the inverse of the cumulative distribution at its uniform number; its
log-probability is taken in the distribution that it was drawn from.

R rows   V vocabulary   C candidates, likeliest first   B blocks of the vocabulary
T tokens of a completion
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.ops.operations import operations
from groupwise.records import Sampling

BLOCK = 128
"""The cumulative sum is taken over block totals first and inside one block second: one pass over V
instead of three.
"""
CANDIDATES = 256
"""Top-k, top-p and min-p look at this many likeliest tokens first, and at 8 times as many while
that was not enough.
"""


class RowSupport(NamedTuple):
    """Ids that could have been drawn: the first `size_R[i]` of `ids_RC[i]`, likeliest first."""

    ids_RC: Tensor
    size_R: Tensor


def stream_keys(seed: int, prompt_id: str, indices: Sequence[int]) -> np.ndarray:
    """One key per completion (R,), uint64: names its random stream.

    >>> stream_keys(0, "0/7", [0, 1]).shape
    (2,)
    """
    digest = blake2b(f"{seed}/{prompt_id}".encode(), digest_size=8).digest()
    base = np.frombuffer(digest, dtype=np.uint64)
    return _mixed(base + (np.asarray(indices, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)


def uniforms(keys_R: np.ndarray, tokens: int, first_R: np.ndarray | None = None) -> np.ndarray:
    """Uniform numbers in [0, 1) for tokens 0 .. `tokens` - 1 of each stream: (R, T), float64 with
    53 random bits.

    first_R: where each stream begins, instead of at its token 0.

    SplitMix64 as a counter-based generator (Steele, Lea, Flood 2014): token t of a stream needs
    none of the tokens before it.

    >>> long = uniforms(stream_keys(0, "a", [3]), 8)
    >>> short = uniforms(stream_keys(0, "a", [2, 3]), 5)
    >>> bool((long[0, :5] == short[1]).all())
    True
    >>> bool((uniforms(stream_keys(0, "a", [3]), 5, np.array([3]))[0] == long[0, 3:]).all())
    True
    """
    counter_RT = np.arange(1, tokens + 1, dtype=np.uint64)[None]
    if first_R is not None:
        counter_RT = counter_RT + first_R.astype(np.uint64)[:, None]
    bits_RT = _mixed(keys_R[:, None] + counter_RT * _GOLDEN)
    return (bits_RT >> np.uint64(11)) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; uint64 arithmetic wraps around on purpose."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(
    logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, RowSupport | None]:
    """One token per row -> (token_R, logp_R, support).

    `uniform_R` is float64 in [0, 1).  `logp_R` (nats; float32, float64 for float64 logits) is the
    log-probability under the
    distribution that was sampled from: temperature applied, renormalised over the survivors of
    top-k, top-p and min-p, whose ids are the support (None if nothing was cut).  Greedy rows take
    the likeliest token and report its log-probability at temperature 1.  Only truncation reads back
    from the device (whether the candidates were enough).
    """
    sampler = None if sampling.restricts else operations().token_sampler(logits_RV)
    if sampler is not None:
        token_R, logp_R = sampler(logits_RV, uniform_R, sampling.temperature)
        return token_R, logp_R, None
    z_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    if sampling.greedy:
        token_R1 = z_RV.argmax(-1, keepdim=True)
        logp_R1 = z_RV.gather(1, token_R1) - torch.logsumexp(z_RV, -1, keepdim=True)
        return token_R1[:, 0], logp_R1[:, 0], None
    if sampling.temperature != 1.0:
        z_RV = z_RV / sampling.temperature
    if sampling.restricts:
        return _draw_truncated(z_RV, uniform_R, sampling)
    p_RV = torch.softmax(z_RV, -1)
    token_R = _inverse_cdf(p_RV, uniform_R)
    return token_R, p_RV.gather(1, token_R[:, None])[:, 0].log(), None


def _inverse_cdf(p_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform number: never one of
    probability 0.
    """
    rows, size = p_RV.shape
    blocks = size // BLOCK
    if blocks < 2:
        return _first_above(p_RV.cumsum(-1, dtype=torch.float64), uniform_R)[0]
    total_RB = p_RV[:, : blocks * BLOCK].view(rows, blocks, BLOCK).sum(-1)
    if size % BLOCK:
        total_RB = torch.cat([total_RB, p_RV[:, blocks * BLOCK :].sum(-1, keepdim=True)], 1)
    block_R, below_R = _first_above(total_RB.cumsum(-1, dtype=torch.float64), uniform_R)
    id_RC = block_R[:, None] * BLOCK + torch.arange(BLOCK, device=p_RV.device)
    p_RC = p_RV.gather(1, id_RC.clamp(max=size - 1))
    if size % BLOCK:
        p_RC = p_RC.masked_fill(id_RC >= size, 0.0)
    inside_R, _ = _first_above(p_RC.cumsum(-1, dtype=torch.float64), below_R, scaled=False)
    return (block_R * BLOCK + inside_R).clamp_(max=size - 1)


def _first_above(
    cumulative_RN: Tensor, target_R: Tensor, *, scaled: bool = True
) -> tuple[Tensor, Tensor]:
    """(the first entry above the target, how far the target reaches into that entry); `scaled`: as
    a share of the total.
    """
    total_R1 = cumulative_RN[:, -1:]
    target_R1 = target_R[:, None] * total_R1 if scaled else target_R[:, None]
    # Strictly below the total, whatever was rounded: the entry that is found has positive
    # probability.
    target_R1 = torch.minimum(target_R1, total_R1 * (1.0 - 1e-15))
    index_R1 = torch.searchsorted(cumulative_RN, target_R1, right=True).clamp_(
        max=cumulative_RN.shape[1] - 1
    )
    before_R1 = cumulative_RN.gather(1, (index_R1 - 1).clamp_(min=0)).masked_fill_(
        index_R1 == 0, 0.0
    )
    return index_R1[:, 0], (target_R1 - before_R1)[:, 0]


class TruncatedDraw(NamedTuple):
    """One token per row, drawn from the likeliest candidates."""

    token_R: Tensor
    logp_R: Tensor
    support: RowSupport
    enough_R: Tensor
    """True where the candidates hold all tokens that could be drawn; elsewhere the draw is wrong.
    """


def draw_once(logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling) -> TruncatedDraw:
    """Draw as `draw` with truncation from the first candidates alone; nothing is read back."""
    z_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    if sampling.temperature != 1.0:
        z_RV = z_RV / sampling.temperature
    return _draw_among(_first_candidates(z_RV, sampling), z_RV, uniform_R, sampling)


def _first_candidates(z_RV: Tensor, sampling: Sampling) -> int:
    return min(z_RV.shape[1], max(CANDIDATES, 2 * sampling.top_k))


def _draw_truncated(
    z_RV: Tensor, uniform_R: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, RowSupport]:
    candidates = _first_candidates(z_RV, sampling)
    drawn = _draw_among(candidates, z_RV, uniform_R, sampling)
    while not bool(drawn.enough_R.all()):
        candidates = min(z_RV.shape[1], 8 * candidates)
        drawn = _draw_among(candidates, z_RV, uniform_R, sampling)
    return drawn.token_R, drawn.logp_R, drawn.support


def _draw_among(
    candidates: int, z_RV: Tensor, uniform_R: Tensor, sampling: Sampling
) -> TruncatedDraw:
    z_RC, id_RC = z_RV.topk(candidates, sorted=True)
    keep_RC, enough_R = _survivors(z_RC, z_RV, sampling)
    p_RC = torch.softmax(z_RC.masked_fill(~keep_RC, -torch.inf), -1)
    place_R1 = _first_above(p_RC.cumsum(-1, dtype=torch.float64), uniform_R)[0][:, None]
    token_R = id_RC.gather(1, place_R1)[:, 0]
    logp_R = p_RC.gather(1, place_R1)[:, 0].log()
    return TruncatedDraw(token_R, logp_R, RowSupport(id_RC, keep_RC.sum(-1)), enough_R)


def _survivors(z_RC: Tensor, z_RV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Which candidates can be drawn, and for which rows the candidates hold all that can.

    The rules and their order are those of transformers' warpers: top-k keeps ties with the k-th;
    top-p keeps a token if the tokens above it hold less than p of what top-k left; min-p compares
    with the likeliest.  Each cuts a tail off the candidates, because they are sorted.
    """
    keep_RC = torch.ones_like(z_RC, dtype=torch.bool)
    lse_R1 = None
    if sampling.top_k > 0:
        k = min(sampling.top_k, z_RC.shape[1])
        keep_RC &= z_RC >= z_RC[:, k - 1 : k]
        enough_R = ~keep_RC[:, -1]
        lse_R1 = z_RC.masked_fill(~keep_RC, -torch.inf).logsumexp(-1, keepdim=True)
    if sampling.top_p < 1.0:
        p_RC = (z_RC - (z_RV.logsumexp(-1, keepdim=True) if lse_R1 is None else lse_R1)).exp()
        keep_RC &= p_RC.cumsum(-1) - p_RC < sampling.top_p
    if sampling.min_p > 0.0:
        keep_RC &= z_RC - z_RC[:, :1] >= math.log(sampling.min_p)
    if sampling.top_k == 0:
        enough_R = ~keep_RC[:, -1]
    if z_RC.shape[1] == z_RV.shape[1]:
        enough_R = torch.ones_like(enough_R)
    return keep_RC, enough_R
