"""How far a student's distribution of the next token is from a teacher's, over the whole vocabulary, a chunk of rows at a time.

Both sides are given as hidden states and a head.  Logits of a chunk exist while it is looked at, in the forward pass and once more
in the backward pass; two matrices (M, V) never do.

M rows   D, E widths of student and teacher   V vocabulary   C rows of a chunk   q student, p teacher
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor
from torch.nn import functional as F

from groupwise.ops.autograd import first_derivative
from groupwise.ops.linear_cross_entropy import CHUNK_NUMBERS, Head, chunk_rows, head_logits, shaped, slices

Divergence = Callable[[Tensor, Tensor], Tensor]
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
    """The divergence of every row's distributions, both at the row's temperature (M,); differentiable in the student alone.

    At least float32; float64 for float64 models.
    """
    teacher = (teacher_ME.detach(), teacher_head)
    return _Divergence.apply(hidden_MD, head.weight_VD, head.bias_V, head, *teacher, temperature_M, divergence, chunk_numbers)  # type: ignore[return-value]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: Head,
        teacher_ME: Tensor,
        teacher_head: Head,
        temperature_M: Tensor,
        divergence: Divergence,
        chunk_numbers: int,
    ) -> Tensor:
        precision = torch.promote_types(weight_VD.dtype, torch.float32)
        found_M = torch.zeros(hidden_MD.shape[0], dtype=precision, device=hidden_MD.device)
        rows = chunk_rows(weight_VD.shape[0], precision.itemsize, weight_VD.shape[1], chunk_numbers)
        ctx.chunks = slices(0, hidden_MD.shape[0], rows)
        for chunk in ctx.chunks:
            sides = ((hidden_MD, head), (teacher_ME, teacher_head))
            found_M[chunk] = divergence(*(_log_probs(head_logits(h[chunk], side), temperature_M[chunk]) for h, side in sides))
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, teacher_ME, teacher_head.weight_VD, temperature_M)
        ctx.head, ctx.teacher_head, ctx.divergence = head, teacher_head, divergence
        ctx.lower = torch.get_autocast_dtype(hidden_MD.device.type) if torch.is_autocast_enabled(hidden_MD.device.type) else None
        return found_M

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, bias_V, teacher_ME, _, temperature_M = ctx.saved_tensors
        needs = ctx.needs_input_grad
        hidden_grad_MD = torch.zeros_like(hidden_MD) if needs[0] else None
        weight_grad_VD = torch.zeros_like(weight_VD) if needs[1] else None
        bias_grad_V = torch.zeros_like(bias_V) if needs[2] else None
        with torch.autocast(hidden_MD.device.type, ctx.lower, enabled=ctx.lower is not None):
            for chunk in ctx.chunks:
                log_p_CV = _log_probs(head_logits(teacher_ME[chunk], ctx.teacher_head), temperature_M[chunk])
                plain_CV = F.linear(hidden_MD[chunk], weight_VD, bias_V)
                with torch.enable_grad():
                    leaf_CV = plain_CV.detach().requires_grad_()
                    log_q_CV = _log_probs(shaped(leaf_CV, ctx.head), temperature_M[chunk])
                    (grad_CV,) = torch.autograd.grad(ctx.divergence(log_q_CV, log_p_CV), leaf_CV, grads[0][chunk])
                del log_p_CV, log_q_CV, leaf_CV
                if hidden_grad_MD is not None:
                    hidden_grad_MD[chunk] = grad_CV @ weight_VD.to(grad_CV.dtype)
                if weight_grad_VD is not None:
                    weight_grad_VD += grad_CV.T @ hidden_MD[chunk].to(grad_CV.dtype)
                if bias_grad_V is not None:
                    bias_grad_V += grad_CV.sum(0)
        return hidden_grad_MD, weight_grad_VD, bias_grad_V, *([None] * 6)


def _log_probs(logits_CV: Tensor, temperature_C: Tensor) -> Tensor:
    """Log-probs (C, V) at the rows' temperatures, at least float32."""
    precision = torch.promote_types(logits_CV.dtype, torch.float32)
    return torch.log_softmax(logits_CV.to(precision) / temperature_C[:, None].to(precision), -1)
