"""Distances of a student's distribution of the next token from a teacher's (`group.divergence`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Optional

from annotated_types import Ge, Gt, Le

from groupwise.algorithms.parts import Divergence

if TYPE_CHECKING:
    from torch import Tensor

MaybeCount = Optional[Annotated[int, Gt(0)]]  # noqa: UP045 - `|` of annotated types is for type checkers no value


@dataclass(frozen=True)
class Jsd(Divergence):
    """`beta KL(p || m) + (1 - beta) KL(q || m)`, `m = (1 - beta) q + beta p`: the generalised Jensen-Shannon divergence
    (GKD, 2306.13649, eq. 1), `ops.distillation.jsd`.
    """

    beta: Annotated[float, Ge(0.0), Le(1.0)] = 1.0
    top_k: MaybeCount = None

    def __call__(self, log_q_CV: Tensor, log_p_CV: Tensor) -> Tensor:
        from groupwise.ops.distillation import jsd

        return jsd(log_q_CV, log_p_CV, beta=self.beta, top_k=self.top_k)
