"""A packed pass: samples with their final weights -> packed micro-batches -> a function of each,
and its numbers per token.

`update` makes the pass and takes one optimizer step, `assess` makes it without learning (what
validation reports is what training minimises), and `score` reads log-probs.  The pass is the same
for every objective; the loss of a batch differs (`training.loss`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.data.packing import unpack
from groupwise.distributed import comm
from groupwise.errors import MemoryExceeded, out_of_memory
from groupwise.models.moe import balanced
from groupwise.models.passes import ForwardOutput, forward, packed_for, reshard
from groupwise.models.policy import Policy
from groupwise.ops.in_place_gradients import summed_in_place
from groupwise.ops.linear_cross_entropy import (
    FusedLoss,
    PositionSupport,
    WholeLoss,
    chosen_logprobs,
)
from groupwise.ops.operations import operations
from groupwise.records import Batch, Sample
from groupwise.training.optimizer import Optimizer, StepStats
from groupwise.utils.terminal import logger

log = logger(__name__)


UNMOVED = StepStats(grad_norm=0.0, lr=0.0, skipped=False)


class BatchPass:
    """A packed batch on its way through a policy: what a loss reads of it.

    M trained positions   D width
    """

    def __init__(self, policy: Policy, batch: Batch) -> None:
        self.policy, self.batch = policy, batch
        self.rows_M = batch.trained_M

    @cached_property
    def outputs(self) -> ForwardOutput:
        """What the model gives for all positions."""
        return forward(self.policy, self.batch)

    @cached_property
    def hidden_MD(self) -> Tensor:
        """Final hidden states at the trained positions."""
        return self.outputs.hidden_PD[self.rows_M]

    @property
    def router_loss(self) -> Tensor | float:
        """`ForwardOutput.router_loss`."""
        return self.outputs.router_loss

    def precision(self) -> AbstractContextManager[Any]:
        """The region in which the products of model and head run."""
        return self.policy.precision()

    def head(self, *, fused: bool, entropy: bool = False) -> FusedLoss | WholeLoss:
        """The log-probs (and entropies) of the trained tokens, chunk by chunk; each chunk is to be
        given its loss.

        fused: a token's loss depends on no other token, so that the head's gradient is taken while
            its logits are at hand.  The loss is differentiated as it is returned, multiplied by
            nothing: an update then sums one gradient of the head in place."""
        batch, rows_M = self.batch, self.rows_M
        inputs = (
            self.hidden_MD,
            self.policy.head,
            batch.target_P[rows_M],
            batch.temperature_P[rows_M],
            support_of(batch),
        )
        with self.precision():
            if fused and torch.is_grad_enabled():
                return FusedLoss(*inputs, entropy=entropy, as_is=True)
            return WholeLoss(*chosen_logprobs(*inputs, entropy=entropy))


BatchLoss = Callable[[BatchPass], tuple[Tensor, Tensor]]
"""Gives the weighted loss of a batch, a differentiable scalar, and for the log a number per trained
position (M,), or two (M, 2): log-probs and entropies."""


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
    while True:
        for optimizer in optimizers:
            optimizer.clear()  # of what a pass that was interrupted, or did not fit, has left
        columns: list[tuple[Batch, Tensor]] = []
        positions = 0
        total = torch.zeros(
            (), dtype=torch.promote_types(policy.dtype, torch.float32), device=policy.device
        )
        try:
            with (
                torch.set_grad_enabled(learn),  # whatever the program around has set
                operations().fused_modules(policy.model, keep=not policy.sharded),
                summed_in_place(learn and not policy.sharded),
            ):
                batches = batches_of(
                    policy, samples, max_tokens_per_microbatch, whole_groups=whole_groups
                )
                for batch in balanced(policy, batches) if learn else batches:
                    value, seen_M = loss(BatchPass(policy, batch))
                    if learn:
                        value.backward()
                    total += value.detach()
                    seen_P = seen_M.new_zeros(batch.layout.total, *seen_M.shape[1:])
                    seen_P[batch.trained_M] = seen_M.detach()
                    columns.append((batch, seen_P))
                    positions += sum(batch.layout.length)
            break
        except RuntimeError as error:
            smaller = _smaller(error, samples, max_tokens_per_microbatch)
        # Out of the handler, which would keep the failed pass alive through its traceback.
        value = seen_M = seen_P = batch = batches = None
        columns.clear()
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
    parts = comm.gather([(*_read_back(total, columns, samples), positions)])
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


def _read_back(
    total: Tensor, columns: Sequence[tuple[Batch, Tensor]], samples: Sequence[Sample]
) -> tuple[float, list[tuple[int, np.ndarray]]]:
    """Return the loss of a pass, and by the index of its sample what was seen of each completion.

    One copy reads all of it, so that a GPU is waited for once.
    """
    flat = torch.cat([total[None], *(seen_P.flatten() for _, seen_P in columns)]).cpu()
    seen: list[tuple[int, np.ndarray]] = []
    place = 1
    for batch, seen_P in columns:
        seen += unpack(batch, flat[place : place + seen_P.numel()].view(seen_P.shape), samples)
        place += seen_P.numel()
    return float(flat[0]), seen


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
    """Batches of this process's part of the samples, which all processes hold, packed as the policy
    needs; see `packing.pack`.
    """
    return packed_for(
        policy,
        samples,
        max_tokens_per_microbatch,
        whole_groups=whole_groups,
        world=comm.world(),
        even=policy.sharded,
    )


def support_of(batch: Batch) -> PositionSupport | None:
    """The support of a batch's trained rows, if any rollout of it was truncated by top-k, top-p or
    min-p.
    """
    return (
        None
        if batch.support is None
        else PositionSupport(ids_E=batch.support[0], begin_M=batch.support[1])
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
