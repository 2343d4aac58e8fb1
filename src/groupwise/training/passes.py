"""A packed pass: samples with their final weights -> packed micro-batches -> a function of each, and its numbers per token.

`update` takes one optimizer step, `assess` computes the same loss without learning (what validation reports is what training
minimises), and `score` reads log-probs.  The pass is the same for every objective; the loss of a batch differs (`training.loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from groupwise.data.packing import unpack
from groupwise.distributed import comm
from groupwise.errors import MemoryExceeded, out_of_memory
from groupwise.models.fused import fused_modules
from groupwise.models.moe import balanced
from groupwise.models.passes import forward, packed_for, reshard
from groupwise.models.policy import Policy
from groupwise.ops.in_place_gradients import summed_in_place
from groupwise.ops.linear_cross_entropy import PositionSupport, chosen_logprobs
from groupwise.records import Batch, Rollout, Sample
from groupwise.training.optimizer import StepStats
from groupwise.training.samples import sample_of
from groupwise.utils.terminal import logger

log = logger(__name__)


UNMOVED = StepStats(grad_norm=0.0, lr=0.0, skipped=False)
BatchLoss = Callable[[Policy, Batch], tuple[Tensor, Tensor]]
"""(policy, batch) -> (weighted loss of the batch, a differentiable scalar; a number per trained position (M,), for the log, or two
(M, 2): log-probs and entropies)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assessment:
    """A loss over samples, and its numbers per token."""

    samples: list[Sample]
    seen: list[np.ndarray]
    """Per sample (n_i,): what the loss reported of its tokens (log-probs, scores), before the step where there is one."""
    entropy: list[np.ndarray]
    """Per sample (n_i,): the policy's entropy at its tokens, nats; 0 where the loss did not report it."""
    loss: float
    positions: list[int]
    """Packed positions that each process worked on."""
    stats: StepStats = UNMOVED
    """Of the optimizer step, where one was taken."""
    budget: int = 0
    """Packed positions at a time that fitted into memory."""


class Stepper(Protocol):
    """The part of an optimizer that a step uses."""

    def clear(self) -> None:
        """Forget the gradients."""
        ...

    def step(self) -> StepStats:
        """Take one optimizer step with the gradients that are there."""
        ...


@torch.enable_grad()  # whatever the program around has set
def update(
    policy: Policy, loss: BatchLoss, samples: Sequence[Sample], optimizer: Stepper, *, budget: int, whole_groups: bool = False
) -> Assessment:
    """Forward and backward over the samples, at most `budget` positions at a time, and one optimizer step.

    Sample weights are final, so the budget, the order and the number of processes do not change the step: each process computes its
    part of the packed positions, and the optimizer takes the sum of their gradients.
    whole_groups: never cut a group (pairs are compared with each other).

    Where memory does not suffice, the same step is computed anew with half the budget, down to one sample at a time.
    """
    lengths = [sample.prompt.size + sample.completion.size for sample in samples]
    while True:
        optimizer.clear()  # of what a pass that was interrupted, or did not fit, has left
        try:
            assessed = packed_pass(policy, loss, samples, budget, whole_groups=whole_groups, learn=True)
            break
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            smaller = min(budget, sum(lengths)) // 2
            if comm.world().size > 1 or smaller < max(lengths):
                raise MemoryExceeded(
                    f"{budget} packed positions at a time do not fit into memory ({str(error).splitlines()[0]}); lower "
                    "optimizer.tokens_per_microbatch, or set model.gradient_checkpointing: true"
                ) from error
        # Out of the handler, which would keep the failed pass alive through its traceback.
        if policy.device.type == "cuda":
            torch.cuda.empty_cache()
        log.warning("%d packed positions at a time do not fit into memory: going on with %d, to the same result", budget, smaller)
        budget = smaller
    # The step is not tried twice: it changes weights as it goes.
    return replace(assessed, stats=optimizer.step(), budget=budget)


@torch.no_grad()
def assess(policy: Policy, loss: BatchLoss, samples: Sequence[Sample], *, budget: int, whole_groups: bool = False) -> Assessment:
    """The same loss of the same kind of samples, without a gradient or a step."""
    return replace(packed_pass(policy, loss, samples, budget, whole_groups=whole_groups), budget=budget)


def packed_pass(
    policy: Policy, loss: BatchLoss, samples: Sequence[Sample], budget: int, *, whole_groups: bool = False, learn: bool = False
) -> Assessment:
    """One pass over the samples.  Every process computes its part of them; the results are gathered on all.

    learn: leave the gradients of the loss in the parameters.
    """
    seen = [np.zeros(sample.completion.size) for sample in samples]
    entropy = list(seen)
    mine: list[tuple[int, np.ndarray]] = []
    positions = 0
    total = torch.zeros((), dtype=torch.promote_types(policy.dtype, torch.float32), device=policy.device)
    with fused_modules(policy.model, keep=not policy.sharded), summed_in_place(learn and not policy.sharded):
        batches = batches_of(policy, samples, budget, whole_groups=whole_groups)
        for batch in balanced(policy, batches) if learn else batches:
            value, seen_M = loss(policy, batch)
            if learn:
                value.backward()
            total += value.detach()
            seen_P = seen_M.new_zeros(batch.layout.total, *seen_M.shape[1:])
            seen_P[batch.trained_M] = seen_M.detach()
            mine += unpack(batch, seen_P, samples)
            positions += sum(batch.layout.length)
    reshard(policy)
    parts = comm.gather([(float(total), positions, mine)])
    for index, values in (pair for _, _, pairs in parts for pair in pairs):
        seen[index] = values
        if values.ndim == 2:
            seen[index], entropy[index] = values.T
    return Assessment(
        samples=list(samples),
        seen=seen,
        entropy=entropy,
        loss=sum(value for value, _, _ in parts),
        positions=[load for _, load, _ in parts],
    )


def batches_of(policy: Policy, samples: Sequence[Sample], budget: int, *, whole_groups: bool = False) -> list[Batch]:
    """Batches of this process's part of the samples, which all processes hold, packed as the policy needs; see `packing.pack`."""
    return packed_for(policy, samples, budget, whole_groups=whole_groups, world=comm.world(), even=policy.sharded)


def support_of(batch: Batch) -> PositionSupport | None:
    """The support of a batch's trained rows, if any rollout of it was truncated by top-k, top-p or min-p."""
    return None if batch.support is None else PositionSupport(ids_E=batch.support[0], begin_M=batch.support[1])


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs and entropies per sample and token (n_i,), nats; 0 for tokens with weight 0."""

    logp: list[np.ndarray]
    entropy: list[np.ndarray]


def score(policy: Policy, samples: Sequence[Sample], *, budget: int, entropy: bool = False) -> Scores:
    """Log-probs (and entropies) of every completion token, at the temperature and over the support it was sampled with.

    Packed with shared prompts, `budget` positions at a time; no gradient.  Entropies are zeros unless `entropy` is set.
    Of several processes each computes its part, and each gets the whole.
    """
    assessed = assess(policy, partial(_read, entropy=entropy), samples, budget=budget)
    return Scores(assessed.seen, assessed.entropy)


def _read(policy: Policy, batch: Batch, *, entropy: bool) -> tuple[Tensor, Tensor]:
    """No loss, and the log-probs (M,) of a batch's trained tokens, or with their entropies (M, 2)."""
    rows_M = batch.trained_M
    hidden_MD = forward(policy, batch).hidden_PD[rows_M]
    with policy.precision():
        logp_M, entropy_M = chosen_logprobs(
            hidden_MD, policy.head, batch.target_P[rows_M], batch.temperature_P[rows_M], support_of(batch), entropy=entropy
        )
    return logp_M.new_zeros(()), logp_M if entropy_M is None else torch.stack([logp_M, entropy_M], 1)


def score_rollouts(policy: Policy, rollouts: Sequence[Rollout], *, budget: int) -> list[np.ndarray]:
    """Per rollout (n,): the policy's log-probs, each token's behind what it was drawn behind; see `score`."""
    return score(policy, [sample_of(rollout) for rollout in rollouts], budget=budget).logp


def balance(updates: Sequence[Assessment]) -> dict[str, float]:
    """How evenly the packed positions of updates lie over processes: the fullest one's over the mean, and each one's idle share.

    Empty for a single process.
    """
    total = np.sum([step.positions for step in updates], axis=0)
    if total.size < 2 or not total.any():
        return {}
    idle = {f"ranks/idle/{rank}": 1.0 - float(load) / float(total.max()) for rank, load in enumerate(total)}
    return {"ranks/imbalance": float(total.max() / total.mean()), **idle}
