"""One optimizer step: samples with their final weights -> packed micro-batches -> forward, backward, step.

`assess` is the same without learning: what validation reports is what training minimises.  The same function serves every
objective; what differs is the loss of a batch, which the objective brings.  `token_loss` is that of all objectives that are a sum
over tokens (GRPO's family, SFT).

P positions and M trained positions of a micro-batch   D width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from groupwise.data.packing import unpack
from groupwise.distributed import comm
from groupwise.errors import MemoryExceeded, out_of_memory
from groupwise.models.fused import fused_modules
from groupwise.models.policy import Policy
from groupwise.ops.in_place_gradients import summed_in_place
from groupwise.ops.linear_cross_entropy import TokenLoss, chosen_logprobs, fused_loss
from groupwise.records import Batch, Sample
from groupwise.training.optimizer import StepStats
from groupwise.training.scoring import batches_of, support_of
from groupwise.utils.terminal import logger

log = logger(__name__)


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Update(Assessment):
    """One optimizer step: the samples, their log-probs before it, and its statistics."""

    stats: StepStats
    budget: int
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
) -> Update:
    """Forward and backward over the samples, at most `budget` positions at a time, and one optimizer step.

    The weights of the samples are final, so neither the budget nor the order can change the step, nor how many processes share
    it: each works on its part of the packed positions, and the optimizer takes the sum of their gradients.
    whole_groups: never cut a group (pairs are compared with each other).

    Where memory does not suffice, the same step is computed anew with half the budget, down to one sample at a time.
    """
    lengths = [sample.prompt.size + sample.completion.size for sample in samples]
    while True:
        optimizer.clear()  # of what a pass that was interrupted, or did not fit, has left
        try:
            found = _visit(policy, loss, samples, budget, whole_groups, optimizer)
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
    return Update(
        samples=found.samples,
        seen=found.seen,
        entropy=found.entropy,
        loss=found.loss,
        positions=found.positions,
        stats=optimizer.step(),  # not to be tried twice: it changes weights as it goes
        budget=budget,
    )


@torch.no_grad()
def assess(policy: Policy, loss: BatchLoss, samples: Sequence[Sample], *, budget: int, whole_groups: bool = False) -> Assessment:
    """The same loss of the same kind of samples, without a gradient or a step."""
    return _visit(policy, loss, samples, budget, whole_groups, None)


def _visit(
    policy: Policy, loss: BatchLoss, samples: Sequence[Sample], budget: int, whole_groups: bool, optimizer: Stepper | None
) -> Assessment:
    """Every process computes its part of the samples; the results are gathered on all.

    optimizer: whose gradients are taken; None: no gradient is.
    """
    learn = optimizer is not None
    seen = [np.zeros(sample.completion.size) for sample in samples]
    entropy = list(seen)
    own: list[tuple[int, np.ndarray]] = []
    positions = 0
    total = torch.zeros((), dtype=torch.promote_types(policy.dtype, torch.float32), device=policy.device)
    with fused_modules(policy.model, keep=not policy.sharded), summed_in_place(learn and not policy.sharded):
        batches = batches_of(policy, samples, budget, whole_groups=whole_groups)
        for batch in policy.balanced(batches) if learn else batches:
            value, seen_M = loss(policy, batch)
            if learn:
                value.backward()
            total += value.detach()
            seen_P = seen_M.new_zeros(batch.layout.total, *seen_M.shape[1:])
            seen_P[batch.trained_M] = seen_M.detach()
            own += unpack(batch, seen_P, samples)
            positions += sum(batch.layout.length)
    policy.reshard()
    parts = comm.gather([(float(total), positions, own)])
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


def balance(updates: Sequence[Update]) -> dict[str, float]:
    """How evenly the packed positions of updates lie over processes: the fullest one's over the mean, and each one's idle share.

    Empty for a single process.
    """
    total = np.sum([step.positions for step in updates], axis=0)
    if total.size < 2 or not total.any():
        return {}
    idle = {f"ranks/idle/{rank}": 1.0 - float(load) / float(total.max()) for rank, load in enumerate(total)}
    return {"ranks/imbalance": float(total.max() / total.mean()), **idle}


def token_loss(
    policy: Policy,
    batch: Batch,
    loss: TokenLoss,
    *,
    separable: bool,
    entropy: bool = False,
    as_is: bool = False,
    learn: bool = True,
    beside: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`loss` of a batch's trained tokens, differentiable with respect to the policy, and their log-probs (M,); with `entropy` also
    their entropies, (M, 2) in all.

    loss: (log-probs, entropies or None, which of the M) -> its weighted part, a scalar.
    separable: a token's loss depends on no other token; the head's gradient is then taken while its logits are at hand.
    entropy: of every position, given to the loss, too; where nothing is differentiated with respect to it, it is a by-product.
    as_is: what is returned is what is differentiated, multiplied by nothing: `update` then keeps one gradient of the head, not two.
    learn: False where `loss` has no gradient: log-probs are then computed for the log alone.
    beside: of the hidden states (M, D) and the log-probs (M,), another part of the loss.
    """
    rows_M = batch.trained_M
    outputs = policy.forward(batch)
    inputs = (outputs.hidden_PD[rows_M], policy.head, batch.target_P[rows_M], batch.temperature_P[rows_M])
    with policy.precision():
        if not learn:
            with torch.no_grad():
                logp_M, entropy_M = chosen_logprobs(*inputs, support_of(batch), entropy=entropy)
                value = loss(logp_M, entropy_M, slice(0, rows_M.shape[0]))
        elif separable and torch.is_grad_enabled():
            value, logp_M, entropy_M = fused_loss(*inputs, loss, support_of(batch), entropy=entropy, as_is=as_is)
        else:
            logp_M, entropy_M = chosen_logprobs(*inputs, support_of(batch), entropy=entropy)
            value = loss(logp_M, entropy_M, slice(0, rows_M.shape[0]))
    if beside is not None:
        value = value + beside(inputs[0], logp_M)
    seen = logp_M if entropy_M is None else torch.stack([logp_M.detach(), entropy_M.detach()], 1)
    return value + outputs.router_loss, seen
