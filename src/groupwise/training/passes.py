"""A packed pass: samples with their final weights -> packed micro-batches -> a function of each,
and its numbers per token.

`update` makes the pass and takes one optimizer step, `assess` makes it without learning (what
validation reports is what training minimises), and `score` reads log-probs.  The pass is the same
for every objective; the loss of a batch differs (`training.loss`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from groupwise.distributed import comm
from groupwise.errors import MemoryExceeded, out_of_memory
from groupwise.models.moe import balanced
from groupwise.models.passes import BatchLoss, BatchPass, packed_for, packed_pass, reshard
from groupwise.models.policy import Policy
from groupwise.ops.linear_cross_entropy import FusedLoss, WholeLoss
from groupwise.records import Batch, Sample
from groupwise.training.optimizer import Optimizer, StepStats

log = logging.getLogger(__name__)


UNMOVED = StepStats(grad_norm=0.0, lr=0.0, skipped=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assessment:
    """A loss over samples, and its numbers per token."""

    samples: list[Sample]
    seen: list[np.ndarray]
    """Per sample (n_i,): what the loss reported of its tokens (log-probs, scores), before the step
    where there is one.
    """
    entropy: list[np.ndarray]
    """Per sample (n_i,): the policy's entropy at its tokens, nats; 0 where the loss did not report
    it.
    """
    loss: float
    positions: list[int]
    """Packed positions that each process worked on."""
    stats: StepStats = UNMOVED
    """Figures of the optimizer step, where one was taken."""
    max_tokens_per_microbatch: int = 0
    """Packed positions at a time that fitted into memory."""


def update(
    policy: Policy,
    loss: BatchLoss,
    samples: Sequence[Sample],
    *optimizers: Optimizer,
    max_tokens_per_microbatch: int,
    whole_groups: bool = False,
) -> Assessment:
    """Make one pass over the samples, at most `max_tokens_per_microbatch` positions at a time,
    backward too, and take one step of each optimizer.

    Sample weights are final, so the budget, the order and the number of processes do not change the
    step: each process computes its part of the packed positions, the results are gathered on all,
    and the optimizers take the sum of their gradients.
    optimizers: of what the loss trains; the first one's step is reported.  None: the same loss
        without a gradient or a step.
    whole_groups: never cut a group (pairs are compared with each other).

    If memory runs out, the pass is repeated with half the budget, down to one sample at a time.
    """
    learn = bool(optimizers)
    if learn and policy.adapter is not None:
        loss = policy.adapter.with_dropout(loss, samples, optimizers[0].taken)
    while True:
        for optimizer in optimizers:
            optimizer.clear()  # of what a pass that was interrupted, or did not fit, has left
        try:
            batches = batches_of(
                policy, samples, max_tokens_per_microbatch, whole_groups=whole_groups
            )
            result = packed_pass(
                policy, loss, balanced(policy, batches) if learn else batches, learn=learn
            )
            break
        except RuntimeError as error:
            smaller = _smaller(error, samples, max_tokens_per_microbatch)
        # Out of the handler, which would keep the failed pass alive through its traceback.
        batches = None
        if policy.device.type == "cuda":
            torch.cuda.empty_cache()
        log.warning(
            "%d packed positions at a time do not fit into memory: going on with %d, to the same"
            " result",
            max_tokens_per_microbatch,
            smaller,
        )
        max_tokens_per_microbatch = smaller
    reshard(policy)
    seen = [np.zeros(sample.completion.size) for sample in samples]
    entropy = list(seen)
    positions = sum(sum(batch.layout.length) for batch, _ in result.columns)
    parts = comm.gather_work([(*result.read(samples), positions)])
    for index, values in (pair for _, pairs, _ in parts for pair in pairs):
        seen[index] = values
        if values.ndim == 2:
            seen[index], entropy[index] = values.T
    # The step is not tried twice: it changes weights as it goes.
    stats = [optimizer.step() for optimizer in optimizers]
    return Assessment(
        samples=list(samples),
        seen=seen,
        entropy=entropy,
        loss=sum(value for value, _, _ in parts),
        positions=[load for _, _, load in parts],
        stats=stats[0] if stats else UNMOVED,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
    )


def _smaller(error: RuntimeError, samples: Sequence[Sample], max_tokens_per_microbatch: int) -> int:
    """The next budget after a pass that failed.  Raises MemoryExceeded where there is none, and an
    error that is not of memory.
    """
    if not out_of_memory(error):
        raise error
    lengths = [sample.prompt.size + sample.completion.size for sample in samples]
    smaller = min(max_tokens_per_microbatch, sum(lengths)) // 2
    if comm.world().size > 1 or smaller < max(lengths):
        raise MemoryExceeded(
            f"{max_tokens_per_microbatch} packed positions at a time do not fit into memory"
            f" ({str(error).splitlines()[0]}); lower optimizer.tokens_per_microbatch, or set"
            " model.gradient_checkpointing: true"
        ) from error
    return smaller


def assess(
    policy: Policy,
    loss: BatchLoss,
    samples: Sequence[Sample],
    *,
    max_tokens_per_microbatch: int,
    whole_groups: bool = False,
) -> Assessment:
    """`update` without a gradient or a step."""
    return update(
        policy,
        loss,
        samples,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        whole_groups=whole_groups,
    )


def batches_of(
    policy: Policy,
    samples: Sequence[Sample],
    max_tokens_per_microbatch: int,
    *,
    whole_groups: bool = False,
) -> list[Batch]:
    """Batches of this worker's part of the samples, which all processes hold, packed as the policy
    needs; see `packing.pack`.
    """
    return packed_for(
        policy,
        samples,
        max_tokens_per_microbatch,
        whole_groups=whole_groups,
        world=comm.workers(),
        even=policy.sharded,
    )


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs and entropies per sample and token (n_i,), nats; 0 for tokens with weight 0."""

    logp: list[np.ndarray]
    entropy: list[np.ndarray]


def score(
    policy: Policy,
    samples: Sequence[Sample],
    *,
    max_tokens_per_microbatch: int,
    entropy: bool = False,
) -> Scores:
    """Log-probs (and entropies) of every completion token, at the temperature and over the support
    it was sampled with.

    Packed with shared prompts, `max_tokens_per_microbatch` positions at a time; no gradient.
    Entropies are zeros unless `entropy` is set.  Of several processes each computes its part, and
    each gets the whole.
    """
    assessed = assess(
        policy,
        partial(_read, entropy=entropy),
        samples,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
    )
    return Scores(assessed.seen, assessed.entropy)


def _read(passed: BatchPass, *, entropy: bool) -> tuple[Tensor, Tensor]:
    """Return no loss, and the log-probs (M,) of a batch's trained tokens, or with their entropies
    (M, 2).
    """
    head = passed.head(fused=False, entropy=entropy)
    return head.logp_M.new_zeros(()), seen_by(head)


def seen_by(head: FusedLoss | WholeLoss) -> Tensor:
    """What a loss of log-probs reports: them (M,), or with their entropies (M, 2)."""
    logp_M, entropy_M = head.logp_M, head.entropy_M
    return logp_M if entropy_M is None else torch.stack([logp_M.detach(), entropy_M.detach()], 1)


def balance(updates: Sequence[Assessment]) -> dict[str, float]:
    """How evenly the packed positions of updates lie over processes: the fullest one's over the
    mean, and each one's idle share.

    Empty for a single process.
    """
    total = np.sum([step.positions for step in updates], axis=0)
    if total.size < 2 or not total.any():
        return {}
    idle = {
        f"ranks/idle/{rank}": 1.0 - float(load) / float(total.max())
        for rank, load in enumerate(total)
    }
    return {"ranks/imbalance": float(total.max() / total.mean()), **idle}
