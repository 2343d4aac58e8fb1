"""One optimizer step: samples with their final weights -> packed micro-batches -> forward, backward, step.

`assess` is the same without learning: what validation reports is what training minimises.  The same function serves every objective; what differs is the loss of a batch, which the objective brings.  `token_loss` is that
of all objectives that are a sum over tokens (GRPO's family, SFT).

P positions and M trained positions of a micro-batch   D width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from groupwise.models.policy import Policy
from groupwise.objective.logprobs import TokenLoss, chosen_logprobs, fused_loss
from groupwise.optim import Optimizer, Taken
from groupwise.packing import pack, unpack
from groupwise.records import Batch, Sample
from groupwise.scoring import support_of

BatchLoss = Callable[[Policy, Batch], tuple[Tensor, Tensor]]
"""(policy, batch) -> (weighted loss of the batch, a differentiable scalar; a number for each trained position (M,), for the log)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assessment:
    """What a loss says of samples."""

    samples: list[Sample]
    seen: list[np.ndarray]
    """Per sample (n_i,): what the loss reported of its tokens (log-probs, scores), before the step where there is one."""
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Update(Assessment):
    """One optimizer step: what was trained and what was seen on the way."""

    taken: Taken


def update(
    policy: Policy, loss: BatchLoss, samples: Sequence[Sample], optimizer: Optimizer, *, budget: int, whole_groups: bool = False
) -> Update:
    """Forward and backward over the samples, at most `budget` positions at a time, and one optimizer step.

    The weights of the samples are final, so neither the budget nor the order can change the step.
    whole_groups: never cut a group (pairs are compared with each other).
    """
    value, seen = _visit(policy, loss, samples, budget, whole_groups, learn=True)
    return Update(samples=list(samples), seen=seen, loss=value, taken=optimizer.step())


@torch.no_grad()
def assess(policy: Policy, loss: BatchLoss, samples: Sequence[Sample], *, budget: int, whole_groups: bool = False) -> Assessment:
    """The same loss of the same kind of samples, without a gradient or a step."""
    value, seen = _visit(policy, loss, samples, budget, whole_groups, learn=False)
    return Assessment(samples=list(samples), seen=seen, loss=value)


def _visit(
    policy: Policy, loss: BatchLoss, samples: Sequence[Sample], budget: int, whole_groups: bool, *, learn: bool
) -> tuple[float, list[np.ndarray]]:
    seen = [np.zeros(sample.completion.size) for sample in samples]
    dtype = torch.promote_types(policy.dtype, torch.float32)
    total = torch.zeros((), dtype=dtype, device=policy.device)
    for batch in pack(
        samples, budget, share=policy.attention == "shared", whole_groups=whole_groups, device=policy.device, dtype=dtype
    ):
        value, seen_M = loss(policy, batch)
        if learn:
            value.backward()
        total += value.detach()
        seen_P = seen_M.new_zeros(batch.layout.total)
        seen_P[batch.trained_M] = seen_M.detach()
        for index, values in unpack(batch, seen_P, samples):
            seen[index] = values
    return float(total), seen


def token_loss(policy: Policy, batch: Batch, loss: TokenLoss, *, separable: bool, entropy: bool = False) -> tuple[Tensor, Tensor]:
    """`loss` of a batch's trained tokens, differentiable with respect to the policy, and their log-probs (M,).

    loss: (log-probs, entropies or None, which of the M) -> its weighted part, a scalar.
    separable: a token's loss depends on no other token; the head's gradient is then taken while its logits are at hand.
    entropy: the loss reads entropies.
    """
    rows_M = batch.trained_M
    outputs = policy.forward(batch)
    inputs = (outputs.hidden_PD[rows_M], policy.head, batch.target_P[rows_M], batch.temperature_P[rows_M])
    with policy.precision():
        if separable:
            value, logp_M, _ = fused_loss(*inputs, loss, support_of(batch), entropy=entropy)
        else:
            logp_M, entropy_M = chosen_logprobs(*inputs, support_of(batch), entropy=entropy)
            value = loss(logp_M, entropy_M, slice(0, rows_M.shape[0]))
    return value + outputs.router_loss, logp_M
