"""Losses of pairs: reward models and direct preference optimisation.  Pure functions of tensors,
one number for each pair.

R pairs   l sum (IPO: mean) of a completion's log-probs under the policy
ref the same under the reference   c chosen   r rejected"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen_R: Tensor, rejected_R: Tensor, margin_R: Tensor | None = None, *, centering: float = 0.0
) -> Tensor:
    """`-log sigmoid(s_c - s_r - margin) + centering (s_c + s_r)^2` per pair of scores.

    Pairs: 1706.03741; margin: 2307.09288, eq. 2; centering, which pins the scores' free constant:
        2312.09244.
    """
    gap_R = chosen_R - rejected_R if margin_R is None else chosen_R - rejected_R - margin_R
    return -logsigmoid(gap_R) + centering * (chosen_R + rejected_R).square()


def dpo(
    chosen_R: Tensor,
    rejected_R: Tensor,
    chosen_reference_R: Tensor,
    rejected_reference_R: Tensor,
    *,
    beta: float,
) -> Tensor:
    """`-log sigmoid(beta [(l_c - ref_c) - (l_r - ref_r)])` per pair, on sums over completion tokens
    (DPO, 2305.18290, eq. 7).
    """
    return -logsigmoid(
        beta * ((chosen_R - chosen_reference_R) - (rejected_R - rejected_reference_R))
    )


def ipo(
    chosen_R: Tensor,
    rejected_R: Tensor,
    chosen_reference_R: Tensor,
    rejected_reference_R: Tensor,
    *,
    beta: float,
) -> Tensor:
    """`([(l_c - ref_c) - (l_r - ref_r)] - 1 / (2 beta))^2` per pair (IPO, 2310.12036, eq. 17).

    The target is a constant gap in nats, so the arguments are means over the completion's tokens:
    sums would ask long pairs for smaller gaps per token (the normalisation that IPO's authors used,
    and TRL uses).
    """
    return (
        (chosen_R - chosen_reference_R) - (rejected_R - rejected_reference_R) - 1 / (2 * beta)
    ).square()
