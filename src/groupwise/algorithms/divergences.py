"""Distances of a student's distribution of the next token from a teacher's (`group.divergence`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from groupwise.algorithms.parts import Divergence, MaybeCount, Share

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Jsd(Divergence):
    """`beta KL(p || m) + (1 - beta) KL(q || m)`, `m = (1 - beta) q + beta p`: the generalised Jensen-Shannon divergence
    (GKD, 2306.13649, eq. 1), `ops.distillation.jsd`.
    """

    beta: Share = 1.0
    top_k: MaybeCount = None

    def __call__(self, log_q_CV: Tensor, log_p_CV: Tensor) -> Tensor:
        from groupwise.ops.distillation import jsd

        return jsd(log_q_CV, log_p_CV, beta=self.beta, top_k=self.top_k)
