"""Log-probs of samples under any policy: the current one's or the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from groupwise.data.packing import unpack
from groupwise.distributed import comm
from groupwise.models.fused import fused_modules
from groupwise.models.policy import Policy
from groupwise.ops.linear_cross_entropy import PositionSupport, chosen_logprobs
from groupwise.records import Batch, Rollout, Sample
from groupwise.training.samples import joined, samples_of


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs and entropies per sample and token (n_i,), nats; 0 for tokens with weight 0."""

    logp: list[np.ndarray]
    entropy: list[np.ndarray]


def support_of(batch: Batch) -> PositionSupport | None:
    """The support of a batch's trained rows, if any rollout of it was truncated by top-k, top-p or min-p."""
    return None if batch.support is None else PositionSupport(ids_E=batch.support[0], begin_M=batch.support[1])


def batches_of(policy: Policy, samples: Sequence[Sample], budget: int, *, whole_groups: bool = False) -> list[Batch]:
    """Batches of this process's part of the samples, which all processes hold, packed as the policy needs; see `packing.pack`."""
    return policy.packed(samples, budget, whole_groups=whole_groups, world=comm.world(), even=policy.sharded)


def score_rollouts(policy: Policy, rollouts: Sequence[Rollout], *, budget: int) -> list[np.ndarray]:
    """Per rollout (n,): the policy's log-probs, each token's behind what it was drawn behind; see `score`."""
    samples = [sample for rollout in rollouts for sample in samples_of(rollout)]
    return [logp for _, logp in joined(zip(samples, score(policy, samples, budget=budget).logp, strict=True))]


@torch.no_grad()
def score(policy: Policy, samples: Sequence[Sample], *, budget: int, entropy: bool = False) -> Scores:
    """Log-probs (and entropies) of every completion token, at the temperature and over the support it was sampled with.

    Packed with shared prompts, `budget` positions at a time; no gradient.  Entropies are zeros unless asked for.
    Of several processes each computes its part, and each gets the whole.
    """
    logp = [np.zeros(sample.completion.size) for sample in samples]
    entropies = [np.zeros(sample.completion.size) for sample in samples]
    found: list[tuple[bool, int, np.ndarray]] = []
    with fused_modules(policy.model, keep=not policy.sharded):
        for batch in batches_of(policy, samples, budget):
            hidden = policy.forward(batch).hidden_PD[batch.trained_M]
            with policy.precision():
                logp_M, entropy_M = chosen_logprobs(
                    hidden,
                    policy.head,
                    batch.target_P[batch.trained_M],
                    batch.temperature_P[batch.trained_M],
                    support_of(batch),
                    entropy=entropy,
                )
            for values_M, of_entropy in ((logp_M, False), (entropy_M, True)):
                if values_M is not None:
                    values_P = values_M.new_zeros(batch.layout.total)
                    values_P[batch.trained_M] = values_M
                    found += [(of_entropy, index, values) for index, values in unpack(batch, values_P, samples)]
    policy.reshard()
    for of_entropy, index, values in comm.gather(found):
        (entropies if of_entropy else logp)[index] = values
    return Scores(logp, entropies)
