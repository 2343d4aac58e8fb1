"""How far a student's distribution of the next token is from a teacher's, over the whole
vocabulary, a chunk of rows at a time.

Both sides are given as hidden states and a head.  Logits of a chunk exist while it is looked at, in
the forward pass and once more in the backward pass; two matrices (M, V) never do.

M rows   D, E widths of student and teacher   V vocabulary   C rows of a chunk
q student, p teacher
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groupwise.ops.linear_cross_entropy import CHUNK_NUMBERS, Head, chunk_rows, head_logits

Divergence = Callable[[Tensor, Tensor], Tensor]
"""(log q (C, V), log p (C, V)) -> divergence of each row (C,), nats."""


def jsd(
    log_q_CV: Tensor,
    log_p_CV: Tensor,
    *,
    beta: Annotated[float, Ge(0.0), Le(1.0)] = 1.0,
    top_k: Annotated[int, Gt(0)] | None = None,
) -> Tensor:
    """`beta KL(p || m) + (1 - beta) KL(q || m)`, `m = (1 - beta) q + beta p`: the generalised
    Jensen-Shannon divergence (GKD, 2306.13649, eq. 1).

    At its ends, where that is 0, it is what it tends to per unit: `beta` 0 is the forward KL(p ||
    q) (the student covers what the
    teacher does: Qwen3), 1 the reverse KL(q || p) (it seeks what the teacher finds likely: MiniLLM,
        DeepSeek-V4). `top_k`: over the k tokens that are likeliest to the student and one more for
        all others, so that no mass can leave."""
    if top_k is not None and top_k < log_q_CV.shape[1]:
        top_CK = log_q_CV.detach().topk(top_k, -1).indices
        log_q_CV, log_p_CV = (
            with_tail(log_CV.gather(1, top_CK)) for log_CV in (log_q_CV, log_p_CV)
        )
    if beta == 0.0:
        return _kl(log_p_CV, log_q_CV)
    if beta == 1.0:
        return _kl(log_q_CV, log_p_CV)
    log_m_CV = torch.logaddexp(log_q_CV + math.log1p(-beta), log_p_CV + math.log(beta))
    return beta * _kl(log_p_CV, log_m_CV) + (1.0 - beta) * _kl(log_q_CV, log_m_CV)


def _kl(log_a_CV: Tensor, log_b_CV: Tensor) -> Tensor:
    """`sum_v a (log a - log b)`."""
    return (log_a_CV.exp() * (log_a_CV - log_b_CV)).sum(-1)


def with_tail(log_CK: Tensor) -> Tensor:
    """Log-probs of some tokens and, last, of all others together (C, K + 1).

    >>> with_tail(torch.tensor([[0.5, 0.25]]).log()).exp().tolist()
    [[0.5, 0.25, 0.25]]
    """
    kept_C1 = torch.logsumexp(log_CK, -1, keepdim=True).clamp(
        max=-1e-7
    )  # rounded, it may hold more than everything
    return torch.cat([log_CK, torch.log(-torch.expm1(kept_C1))], -1)


def head_divergence(
    hidden_MD: Tensor,
    head: Head,
    teacher_ME: Tensor,
    teacher_head: Head,
    temperature_M: Tensor,
    divergence: Divergence = jsd,
    *,
    chunk_numbers: int = CHUNK_NUMBERS,
) -> Tensor:
    """The divergence of every row's distributions, both at the row's temperature (M,);
    differentiable in the student alone.

    At least float32; float64 for float64 models.
    """
    precision = torch.promote_types(head.weight_VD.dtype, torch.float32)
    rows = chunk_rows(
        head.weight_VD.shape[0], precision.itemsize, head.weight_VD.shape[1], chunk_numbers
    )

    def of_chunk(hidden_CD: Tensor, teacher_CE: Tensor, temperature_C: Tensor) -> Tensor:
        with torch.no_grad():  # its head may be the student's own
            log_p_CV = _log_probs(head_logits(teacher_CE, teacher_head), temperature_C)
        return divergence(_log_probs(head_logits(hidden_CD, head), temperature_C), log_p_CV)

    chunks = zip(
        *(x.split(rows) for x in (hidden_MD, teacher_ME.detach(), temperature_M)), strict=True
    )
    return torch.cat(
        [
            checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks
        ]
    )


def _log_probs(logits_CV: Tensor, temperature_C: Tensor) -> Tensor:
    """Log-probs (C, V) at the rows' temperatures, at least float32."""
    precision = torch.promote_types(logits_CV.dtype, torch.float32)
    return torch.log_softmax(logits_CV.to(precision) / temperature_C[:, None].to(precision), -1)
