"""The packed pass of a policy: scoring, training, reward models, teachers and the proof make it.

P positions   M trained ones   T positions of a segment   D width
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.data.packing import pack, unpack
from groupwise.distributed import comm, fsdp
from groupwise.errors import ConfigError
from groupwise.models.attention import PackedAttention
from groupwise.models.backbone import computing, hidden
from groupwise.models.moe import BALANCE, balance_pass, router_coefficient
from groupwise.models.output_head import head_input
from groupwise.models.policy import Policy
from groupwise.ops.in_place_gradients import summed_in_place
from groupwise.ops.linear_cross_entropy import (
    FusedLoss,
    PositionSupport,
    WholeLoss,
    chosen_logprobs,
)
from groupwise.records import Batch, Layout, Sample


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """What a forward pass over a packed batch gives."""

    hidden_PD: Tensor
    """Final hidden states, before the head."""
    router_loss: Tensor | float
    """A mixture of experts' load-balancing loss, times its coefficient: the batch's part of the
    step's; else 0.
    """


def forward(policy: Policy, batch: Batch) -> ForwardOutput:
    """A packed batch through the model, by whatever attention the policy is set to; differentiable,
    but not below an adapter.
    """
    with contextlib.nullcontext() if policy.adapter_on else torch.no_grad():
        balances = torch.is_grad_enabled() and router_coefficient(policy) > 0.0
        if policy.attention == "single":
            if balances:
                raise ConfigError(
                    "model.attention 'single' does not know the loss that balances experts;"
                    f" {BALANCE}"
                )
            return ForwardOutput(_one_by_one(policy, batch.tokens_P, batch.layout), 0.0)
        if balances:
            return ForwardOutput(*balance_pass(policy, batch))
        attend = PackedAttention(batch.layout, batch.prepared)
        columns = (batch.tokens_P, batch.position_P, attend, batch.images)
        return ForwardOutput(hidden(policy, *columns), 0.0)


def _one_by_one(policy: Policy, tokens_P: Tensor, layout: Layout) -> Tensor:
    """Every segment in a forward pass of its own, with the model's own attention: for models that
    cannot be packed.
    """
    assert set(layout.prefix) <= {-1}, "segments that are computed one by one hold their own prompt"
    parts = []
    with computing(policy):
        for start, length in zip(layout.start, layout.length, strict=True):
            tokens_1T = tokens_P[None, start : start + length]
            states = head_input(policy.model, tokens_1T) if policy.deep_head else None
            if states is None:
                states = policy.backbone(input_ids=tokens_1T, use_cache=False).last_hidden_state
            parts.append(states[0])
    filler = layout.total - sum(layout.length)
    return torch.cat([*parts, parts[0].new_zeros(filler, parts[0].shape[1])])


def support_of(batch: Batch) -> PositionSupport | None:
    """The support of a batch's trained rows, if any rollout of it was truncated by top-k, top-p or
    min-p.
    """
    if batch.support is None:
        return None
    ids_E, begin_M = batch.support
    return PositionSupport(ids_E=ids_E, begin_M=begin_M)


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


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """The loss of a packed pass and its numbers per position."""

    loss: Tensor
    """The sum over batches, a scalar."""
    columns: list[tuple[Batch, Tensor]]
    """Each batch, and what its loss reported: (P,), or (P, 2); 0 at positions that are not trained.
    """

    def read(self, samples: Sequence[Sample]) -> tuple[float, list[tuple[int, np.ndarray]]]:
        """Return the loss, and by the index of its sample what was reported of each completion.

        One copy reads all of it, so that a GPU is waited for once.
        """
        parts = [self.loss[None]]
        for _, seen_P in self.columns:
            parts.append(seen_P.flatten())
        flat = torch.cat(parts).cpu()
        seen: list[tuple[int, np.ndarray]] = []
        place = 1
        for batch, seen_P in self.columns:
            end = place + seen_P.numel()
            seen += unpack(batch, flat[place:end].view(seen_P.shape), samples)
            place = end
        return float(flat[0]), seen


def packed_pass(
    policy: Policy, loss: BatchLoss, batches: Iterable[Batch], *, learn: bool = False
) -> PassResult:
    """Compute a loss of each batch in this process, with the model's modules fused.

    learn: also make the backward pass; gradients of head and embedding are summed in place.
    """
    total = torch.zeros(
        (), dtype=torch.promote_types(policy.dtype, torch.float32), device=policy.device
    )
    columns: list[tuple[Batch, Tensor]] = []
    with (
        torch.set_grad_enabled(learn),  # whatever the program around has set
        policy.fused_modules(),
        summed_in_place(learn and not policy.sharded and policy.context_group is None),
    ):
        for batch in batches:
            value, seen_M = loss(BatchPass(policy, batch))
            if learn:
                share = value
                if policy.context_group is not None:
                    share = policy.context_group.own_share(value)
                share.backward()
            total += value.detach()
            seen_P = seen_M.new_zeros(batch.layout.total, *seen_M.shape[1:])
            seen_P[batch.trained_M] = seen_M.detach()
            columns.append((batch, seen_P))
    return PassResult(total, columns)


def packed_for(
    policy: Policy,
    samples: Sequence[Sample],
    max_tokens_per_microbatch: int,
    *,
    whole_groups: bool = False,
    world: comm.World = comm.ALONE,
    even: bool = False,
) -> list[Batch]:
    """Samples packed as the policy takes them; see `packing.pack`."""
    return pack(
        samples,
        max_tokens_per_microbatch,
        share=policy.attention == "shared",
        alike=policy.alike,
        whole_groups=whole_groups,
        fill=policy.tiled,
        device=policy.device,
        dtype=torch.promote_types(policy.dtype, torch.float32),
        world=world,
        even=even,
    )


def reshard(policy: Policy) -> None:
    """End a series of passes: a sharded policy lets go of what it gathered."""
    if policy.shards is not None:
        fsdp.reshard(policy.model)
