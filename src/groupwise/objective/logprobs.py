"""Log-probabilities and entropies of chosen tokens from hidden states, a chunk of rows at a time: (M, V) never exists.

The head's logits are by far the largest tensor of a training step (M x V; a vocabulary of 150,000 makes 0.6 MB per token in
float32).  Here they live for one chunk only.  `chosen_logprobs` recomputes them in its backward pass (4 products with the head
per row); `fused_loss` asks for the loss of the chunk while its logits are at hand and takes the gradient in the same visit
(3 products), which is possible whenever a token's loss depends on no other token.

M rows   D width   V vocabulary   C rows of a chunk   E ids of all supports
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_NUMBERS = 1 << 24
"""Logits of a chunk (rows x vocabulary): 64 MB in float32.  Every chunk reads the head twice and its gradient once, so a large
vocabulary needs many rows to a chunk (50,257: 333 rows; at 83 rows the products in bfloat16 run at a third of their speed)."""
MIN_ROWS = 32
"""A product with fewer rows is bound by reading the head."""
NOTHING = -1e30
"""Stands for -inf where it is multiplied by its probability 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Head:
    """The map from hidden states to logits: `softcap * tanh(scale * (W h + b) / softcap)`.

    `weight_VD` holds the vocabulary's rows only: embedding rows that pad a checkpoint's matrix are never sampled or scored.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Support:
    """Ids that could have been drawn, per row: `ids_E[begin_M[i]:begin_M[i + 1]]`; an empty stretch means all of them."""

    ids_E: Tensor
    begin_M: Tensor
    """(M + 1,) on the host."""


def head_logits(hidden_CD: Tensor, head: Head) -> Tensor:
    """Logits (C, V) in the compute type of the head's product, before temperature."""
    logits_CV = F.linear(hidden_CD, head.weight_VD, head.bias_V)
    if head.scale != 1.0:
        logits_CV = logits_CV * head.scale
    if head.softcap is not None:
        logits_CV = head.softcap * torch.tanh(logits_CV / head.softcap)
    return logits_CV


def reference_logprobs(
    hidden_MD: Tensor, head: Head, target_M: Tensor, temperature_M: Tensor, support: Support | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, with all logits at once and autograd's own backward: what the chunked forms are tested against.

    Returns log-probabilities (M,) and entropies (M,), nats.
    """
    z_MV = head_logits(hidden_MD, head)
    z_MV = z_MV.to(torch.promote_types(z_MV.dtype, torch.float32)) / temperature_M[:, None]
    if support is not None:
        z_MV = z_MV.masked_fill(_outside(support, 0, z_MV.shape[0], z_MV.shape[1], z_MV.device), -torch.inf)
    logp_MV = torch.log_softmax(z_MV, -1)
    entropy_M = -(logp_MV.exp() * logp_MV.clamp_min(NOTHING)).sum(-1)
    return logp_MV.gather(1, target_M[:, None])[:, 0], entropy_M


def chosen_logprobs(
    hidden_MD: Tensor,
    head: Head,
    target_M: Tensor,
    temperature_M: Tensor,
    support: Support | None = None,
    *,
    entropy: bool = False,
    chunk_numbers: int = CHUNK_NUMBERS,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[target] of every row (M,), and its entropy (M,) if asked for; nats, differentiable.

    With a support the softmax is over the ids of the row's support only (what top-k, top-p and min-p sampled from).
    """
    logp_M, entropy_M = _Chosen.apply(
        hidden_MD, head.weight_VD, head.bias_V, head, target_M, temperature_M, support, entropy, chunk_numbers
    )  # type: ignore[misc]
    return logp_M, entropy_M if entropy else None


TokenLoss = Callable[[Tensor, Tensor | None, slice], Tensor]
"""(log-probs of a chunk (C,), entropies (C,) or None, which rows) -> weighted sum of their losses, a scalar."""


def fused_loss(
    hidden_MD: Tensor,
    head: Head,
    target_M: Tensor,
    temperature_M: Tensor,
    loss: TokenLoss,
    support: Support | None = None,
    *,
    entropy: bool = False,
    chunk_numbers: int = CHUNK_NUMBERS,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sum of token losses, with the gradient taken in the forward visit.

    Returns the scalar loss (differentiable with respect to hidden states and head), the log-probs (M,) and, if asked for, the
    entropies (M,), both detached.
    """
    total, logp_M, entropy_M = _Fused.apply(
        hidden_MD, head.weight_VD, head.bias_V, head, target_M, temperature_M, support, loss, entropy, chunk_numbers
    )  # type: ignore[misc]
    return total, logp_M, entropy_M if entropy else None


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: Head,
        target_M: Tensor,
        temperature_M: Tensor,
        support: Support | None,
        entropy: bool,
        chunk_numbers: int,
    ) -> tuple[Tensor, Tensor]:
        visits = _Visits(hidden_MD, head, target_M, temperature_M, support, chunk_numbers)
        logp_M, entropy_M = visits.new_column(), visits.new_column()
        for rows in visits.chunks:
            z_CV, _ = visits.logits(rows)
            _, logp_M[rows], entropy_M[rows] = visits.measure(z_CV, rows, entropy)
        ctx.save_for_backward(hidden_MD)
        ctx.visits, ctx.entropy, ctx.entropy_M = visits, entropy, entropy_M
        return logp_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logp_M, grad_entropy_M = grads
        visits: _Visits = ctx.visits
        sums = _Gradients(visits, ctx.needs_input_grad)
        for rows in visits.chunks:
            z_CV, slope_CV = visits.logits(rows)
            logp_CV, _, entropy_C = visits.measure(z_CV, rows, ctx.entropy)
            del z_CV
            sums.add(rows, logp_CV, slope_CV, grad_logp_M[rows], grad_entropy_M[rows] if ctx.entropy else None, entropy_C)
        return sums.hidden_MD, sums.weight_VD, sums.bias_V, None, None, None, None, None, None


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: Head,
        target_M: Tensor,
        temperature_M: Tensor,
        support: Support | None,
        loss: TokenLoss,
        entropy: bool,
        chunk_numbers: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        visits = _Visits(hidden_MD, head, target_M, temperature_M, support, chunk_numbers)
        logp_M, entropy_M = visits.new_column(), visits.new_column()
        total = visits.new_column().new_zeros(())
        sums = _Gradients(visits, ctx.needs_input_grad)
        for rows in visits.chunks:
            z_CV, slope_CV = visits.logits(rows)
            logp_CV, logp_M[rows], entropy_M[rows] = visits.measure(z_CV, rows, entropy)
            del z_CV
            with torch.enable_grad():
                leaf_C = logp_M[rows].clone().requires_grad_()
                entropy_C = entropy_M[rows].clone().requires_grad_() if entropy else None
                value = loss(leaf_C, entropy_C, rows)
                leaves = (leaf_C,) if entropy_C is None else (leaf_C, entropy_C)
                slopes = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else (None, None)
            total += value.detach()
            grad_logp_C = torch.zeros_like(leaf_C) if slopes[0] is None else slopes[0]
            grad_entropy_C = slopes[1] if entropy else None
            sums.add(rows, logp_CV, slope_CV, grad_logp_C, grad_entropy_C, entropy_M[rows])
        ctx.sums = sums
        ctx.mark_non_differentiable(logp_M, entropy_M)
        return total, logp_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, sums = grads[0], ctx.sums
        found = [sums.hidden_MD, sums.weight_VD, sums.bias_V]
        # The weight's gradient is as large as the head: the pass over it is left out where asking costs nothing.
        if scale.is_cuda or float(scale) != 1.0:
            found = [None if grad is None else grad.mul_(scale) for grad in found]
        return (*found, None, None, None, None, None, None, None)


class _Visits:
    """The rows of a batch, chunk by chunk: tempered logits and what is read off them."""

    def __init__(
        self, hidden_MD: Tensor, head: Head, target_M: Tensor, temperature_M: Tensor, support: Support | None, numbers: int
    ) -> None:
        self.hidden_MD, self.head, self.target_M, self.support = hidden_MD.detach(), head, target_M, support
        self.weight_VD = head.weight_VD.detach()
        if torch.is_autocast_enabled(hidden_MD.device.type):
            lower = torch.get_autocast_dtype(hidden_MD.device.type)
            self.hidden_MD, self.weight_VD = self.hidden_MD.to(lower), self.weight_VD.to(lower)
        self.precision = torch.promote_types(self.weight_VD.dtype, torch.float32)
        self.temperature_M = temperature_M.to(self.precision)
        size = max(MIN_ROWS, numbers // head.weight_VD.shape[0])
        count = target_M.shape[0]
        self.chunks = [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def new_column(self) -> Tensor:
        """Zeros (M,) in float32 (float64 for float64 models)."""
        return torch.zeros(self.target_M.shape[0], dtype=self.precision, device=self.target_M.device)

    def logits(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Tempered logits (C, V), -inf outside the support, and the soft cap's slope where there is one."""
        head = self.head
        z_CV = F.linear(self.hidden_MD[rows], self.weight_VD, None if head.bias_V is None else head.bias_V.to(self.weight_VD.dtype))
        z_CV = z_CV.to(self.precision)
        if head.scale != 1.0:
            z_CV.mul_(head.scale)
        slope_CV = None
        if head.softcap is not None:
            z_CV = z_CV.div_(head.softcap).tanh_()
            slope_CV = 1.0 - z_CV.square()
            z_CV = z_CV.mul_(head.softcap)
        z_CV.div_(self.temperature_M[rows, None])
        if self.support is not None:
            z_CV.masked_fill_(_outside(self.support, rows.start, z_CV.shape[0], z_CV.shape[1], z_CV.device), -torch.inf)
        return z_CV, slope_CV

    def measure(self, z_CV: Tensor, rows: slice, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        """log softmax (C, V), and of it the targets' (C,) and the entropies (C,), zeros unless asked for."""
        logp_CV = torch.log_softmax(z_CV, -1)
        logp_C = logp_CV.gather(1, self.target_M[rows, None])[:, 0]
        if not entropy:
            return logp_CV, logp_C, torch.zeros_like(logp_C)
        plogp_CV = logp_CV.exp().mul_(logp_CV if self.support is None else logp_CV.clamp_min(NOTHING))
        return logp_CV, logp_C, plogp_CV.sum(-1).neg_()


class _Gradients:
    """Sums of gradients with respect to hidden states and head over the chunks of a batch."""

    def __init__(self, visits: _Visits, needs: tuple[bool, ...]) -> None:
        self.visits = visits
        head, hidden_MD = visits.head, visits.hidden_MD
        # The first chunk writes them, so nothing is cleared before; without any chunk there is nothing to write.
        make = torch.empty_like if visits.chunks else torch.zeros_like
        self.hidden_MD = make(hidden_MD) if needs[0] else None
        self.weight_VD = make(visits.weight_VD, dtype=head.weight_VD.dtype) if needs[1] else None
        self.bias_V = torch.zeros_like(head.bias_V) if needs[2] and head.bias_V is not None else None

    def add(
        self,
        rows: slice,
        logp_CV: Tensor,
        slope_CV: Tensor | None,
        grad_logp_C: Tensor,
        grad_entropy_C: Tensor | None,
        entropy_C: Tensor,
    ) -> None:
        """d logp / dz = onehot - p;  dH / dz = -p (log p + H).  `logp_CV` is overwritten by the logits' gradient."""
        visits = self.visits
        factor_C = visits.head.scale / visits.temperature_M[rows]
        grad_logp_C = grad_logp_C * factor_C
        if grad_entropy_C is None:
            grad_CV = logp_CV.exp_().mul_(-grad_logp_C[:, None])
        else:
            factor_CV = logp_CV.clamp_min(NOTHING).add_(entropy_C[:, None])
            factor_CV.mul_((grad_entropy_C * factor_C)[:, None]).add_(grad_logp_C[:, None])
            grad_CV = logp_CV.exp_().mul_(factor_CV).neg_()
        index_C = torch.arange(grad_CV.shape[0], device=grad_CV.device)
        grad_CV[index_C, visits.target_M[rows]] += grad_logp_C
        if slope_CV is not None:
            grad_CV.mul_(slope_CV)
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0)
        grad_CV = grad_CV.to(visits.weight_VD.dtype)
        if self.hidden_MD is not None:
            torch.mm(grad_CV, visits.weight_VD, out=self.hidden_MD[rows])
        if self.weight_VD is not None:
            self._add_weight(rows.start == 0, grad_CV, visits.hidden_MD[rows])

    def _add_weight(self, first: bool, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """Summed in the weight's own type: the products of chunks may be in a lower one."""
        total_VD = self.weight_VD
        assert total_VD is not None
        if total_VD.dtype != grad_CV.dtype:
            part_VD = grad_CV.T @ hidden_CD
            total_VD.copy_(part_VD) if first else total_VD.add_(part_VD)
        elif first:
            torch.mm(grad_CV.T, hidden_CD, out=total_VD)
        else:
            total_VD.addmm_(grad_CV.T, hidden_CD)


def _outside(support: Support, start: int, rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """(C, V) True where a row's support does not reach; rows with an empty stretch have none."""
    begin = support.begin_M[start : start + rows + 1]
    lengths = begin.diff()
    row = torch.repeat_interleave(torch.arange(rows), lengths).to(device)
    outside = (lengths > 0).to(device)[:, None].expand(rows, vocabulary).clone()
    outside[row, support.ids_E[int(begin[0]) : int(begin[-1])]] = False
    return outside
