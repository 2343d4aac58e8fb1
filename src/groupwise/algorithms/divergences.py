"""Divergences of the policy's next token from a teacher's (`group.divergence`), over the whole vocabulary.

Importing this file does not import torch.

C rows   V vocabulary   q the student's distribution, p the teacher's
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Le

from groupwise.utils.imports import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

Divergence = Callable[..., Any]
"""(log q (C, V), log p (C, V)) -> divergence of each row (C,), nats."""


def jsd(
    log_q_CV: Tensor,
    log_p_CV: Tensor,
    *,
    beta: Annotated[float, Ge(0.0), Le(1.0)] = 1.0,
    top_k: Annotated[int, Gt(0)] | None = None,
) -> Tensor:
    """`beta KL(p || m) + (1 - beta) KL(q || m)`, `m = (1 - beta) q + beta p`: the generalised Jensen-Shannon divergence
    (GKD, 2306.13649, eq. 1).

    At its ends, where that is 0, it is what it tends to per unit: `beta` 0 is the forward KL(p || q) (the student covers what the
    teacher does: Qwen3), 1 the reverse KL(q || p) (it seeks what the teacher finds likely: MiniLLM, DeepSeek-V4).
    `top_k`: over the k tokens that are likeliest to the student and one more for all others, so that no mass can leave.
    """
    if top_k is not None and top_k < log_q_CV.shape[1]:
        top_CK = log_q_CV.detach().topk(top_k, -1).indices
        log_q_CV, log_p_CV = (with_tail(log_CV.gather(1, top_CK)) for log_CV in (log_q_CV, log_p_CV))
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
    kept_C1 = torch.logsumexp(log_CK, -1, keepdim=True).clamp(max=-1e-7)  # rounded, it may hold more than everything
    return torch.cat([log_CK, torch.log(-torch.expm1(kept_C1))], -1)
