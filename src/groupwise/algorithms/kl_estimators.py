"""Estimators of the KL to the reference (`group.kl`): k1, k2, k3, and k3 times the ratio.

Each takes log-probs under the policy and the reference, and the token's log-ratio to the old
policy, and gives the estimate per token.

M trained tokens   n tokens of a completion   l log-prob under the policy
old the same under the old policy, before the step   ref the same under the reference
rho = exp(l - old)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from groupwise.algorithms.losses import LIMIT, guarded_exp
from groupwise.algorithms.parts import Kl

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class K1(Kl):
    """`l - ref`: unbiased as a number; its own gradient is 0 on average, so it belongs in the
    reward, not in the loss.
    """

    def __call__(self, logp_M: Tensor, reference_logp_M: Tensor, log_ratio_M: Tensor) -> Tensor:
        return logp_M - reference_logp_M


@dataclass(frozen=True)
class K2(Kl):
    """`(l - ref)^2 / 2`: on-policy its gradient is that of the true KL."""

    def __call__(self, logp_M: Tensor, reference_logp_M: Tensor, log_ratio_M: Tensor) -> Tensor:
        return 0.5 * (logp_M - reference_logp_M).square()


@dataclass(frozen=True)
class K3(Kl):
    """`exp(ref - l) - (ref - l) - 1`: never negative, low variance (Schulman,
    joschu.net/blog/kl-approx.html; GRPO, eq. 4).

    Beyond `LIMIT` it continues as its tangent: a gap of 100 nats stays finite, and still pulls the
    policy the right way."""

    def __call__(self, logp_M: Tensor, reference_logp_M: Tensor, log_ratio_M: Tensor) -> Tensor:
        gap_M = reference_logp_M - logp_M
        inside_M = gap_M.clamp(max=LIMIT)
        return inside_M.expm1() - inside_M + math.expm1(LIMIT) * (gap_M - LIMIT).relu()


@dataclass(frozen=True)
class K3Ratio(Kl):
    """`rho k3`, rho differentiable: unbiased in value and gradient off-policy too (DeepSeek-V3.2,
    2512.02556; TRL's default).

    rho is the token's, whatever the level of the policy ratio: the KL is a sum over tokens.
    Multiplied out it is `exp(ref - old) - rho (1 + ref - l)`, whose first term is a constant: the
    gradient is `rho (l - ref)`, which no gap can overflow.
    """

    def __call__(self, logp_M: Tensor, reference_logp_M: Tensor, log_ratio_M: Tensor) -> Tensor:
        gap_M = reference_logp_M - logp_M
        return guarded_exp((gap_M + log_ratio_M).detach()) - guarded_exp(log_ratio_M) * (1 + gap_M)


ESTIMATORS: dict[str, type[Kl]] = {kind.name: kind for kind in (K1, K2, K3, K3Ratio)}
"""The estimators by name."""


def k3_numbers(gap_n: np.ndarray) -> np.ndarray:
    """`k3` of numbers: of `old - ref`, for a KL in the reward."""
    inside_n = np.minimum(-gap_n, LIMIT)
    return np.expm1(inside_n) - inside_n + np.expm1(LIMIT) * np.maximum(-gap_n - LIMIT, 0.0)
