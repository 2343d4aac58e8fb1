"""Critics: value functions for credits that need one (`gae`).

A critic computes V, one number per state, from hidden states: either of the policy's backbone,
which then learns from both losses in one backward pass, or of a backbone of its own with a score
head, as reward models have (`models/reward_head.py`).  V of token t is computed at the position
that predicts token t, the same row of the packed stream.

M trained positions of a batch   D width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from groupwise.config.settings import CriticSettings, OptimizerSettings
from groupwise.models.passes import BatchPass
from groupwise.models.policy import Policy
from groupwise.records import RolloutGroup
from groupwise.training.optimizer import AdamW, Optimizer

NEW_HEAD, BACKBONE = 5e-3, 1e-5
"""Default learning rates of a new head, and of a backbone of its own."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Critic:
    """A value function and what trains it."""

    policy: Policy
    """Whose hidden states it reads: the policy that is trained, or a model with a score head of its
    own.
    """
    head: Any
    """A module, D -> 1."""
    optimizer: Optimizer
    """The optimizer of the critic's parameters: its head, and a backbone of its own."""
    settings: CriticSettings
    """The algorithm has its `clip` and `coefficient` too, in its value loss: give `resolve` the
    same settings.
    """
    shared: bool
    """True if it reads the policy's own hidden states."""

    @classmethod
    def on(
        cls, policy: Policy, settings: CriticSettings, optimizer: OptimizerSettings, updates: int
    ) -> Critic:
        """A new head on the policy's backbone; its values are 0 at first.   updates: of the run,
        for the schedule.

        It reads states of length 1, so that a learning rate means the same for every model.  Its
        bias is not learnt by gradients but moved in each step, after its values were read
        (`centre`): learnt with the weights, the mean of the returns would pass through every
        feature, and values would differ from token to token by nothing that is about the reward.
        """
        width, precision = (
            policy.head.weight_VD.shape[1],
            torch.promote_types(policy.dtype, torch.float32),
        )
        head = nn.Linear(width, 1, device=policy.device, dtype=precision)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        head.bias.requires_grad_(False)
        own = Optimizer(
            head, replace(optimizer, lr=NEW_HEAD if settings.lr is None else settings.lr), updates
        )
        return cls(policy=policy, head=head, optimizer=own, settings=settings, shared=True)

    @classmethod
    def of(
        cls,
        scorer: Policy,
        settings: CriticSettings,
        optimizer: OptimizerSettings,
        updates: int,
        adamw: type[AdamW] = AdamW,
    ) -> Critic:
        """A scoring model (`models.reward_head.make_scorer`) as the critic, all of it trained."""
        own = Optimizer(
            scorer.model,
            replace(optimizer, lr=BACKBONE if settings.lr is None else settings.lr),
            updates,
            adamw,
        )
        head: Any = scorer.model.score
        return cls(policy=scorer, head=head, optimizer=own, settings=settings, shared=False)

    @property
    def module(self) -> nn.Module:
        """The critic's own modules: its head, and a backbone of its own."""
        return self.head if self.shared else self.policy.model

    def values(self, hidden_MD: Tensor) -> Tensor:
        """V of each state (M,), at least float32, differentiable."""
        hidden_MD = hidden_MD.to(next(self.head.parameters()).dtype)
        with self.policy.precision():
            if self.shared:
                hidden_MD = normalize(hidden_MD, dim=-1)
            value_M = self.head(hidden_MD)[:, 0]
        return value_M.to(torch.promote_types(value_M.dtype, torch.float32))

    def read(self, passed: BatchPass) -> tuple[Tensor, Tensor]:
        """No loss, and V of each trained position (M,)."""
        value_M = self.values(passed.hidden_MD)
        return value_M.new_zeros(()), value_M

    @torch.no_grad()
    def centre(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Move the values of a new head to where they and their targets have one mean; the groups
        with `old_value`, V after that.

        The value loss bounds how far V moves from `old_value`: measured from `value`, the bias
        alone could use up the bound."""
        gaps = []
        for group in groups:
            columns = zip(group.signals["return"], group.signals["value"], strict=True)
            for return_n, value_n in columns:
                gaps.append(return_n - value_n)
        gap_N = np.concatenate(gaps)
        known_N = gap_N[~np.isnan(gap_N)]
        shift = 0.0
        if self.shared and known_N.size:
            shift = float(known_N.mean())
            self.head.bias += shift
        centred = []
        for group in groups:
            old_value = tuple(value_n + shift for value_n in group.signals["value"])
            centred.append(replace(group, signals={**group.signals, "old_value": old_value}))
        return centred
