"""Passes of a policy over packed batches.

P positions   T positions of a segment   D width
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.data.packing import pack
from groupwise.distributed import comm, fsdp
from groupwise.errors import ConfigError
from groupwise.models.attention import PackedAttention
from groupwise.models.backbone import computing, hidden
from groupwise.models.moe import BALANCE, balance_pass, router_coefficient
from groupwise.models.output_head import head_input
from groupwise.models.policy import Policy
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
        return ForwardOutput(hidden(policy, batch.tokens_P, batch.position_P, attend), 0.0)


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
