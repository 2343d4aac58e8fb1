"""Signals: numbers for every token that credit and loss read beside rewards, computed by models
before a step's first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from groupwise.algorithms.algorithm import Algorithm
from groupwise.config.settings import GroupSettings
from groupwise.models.policy import Policy
from groupwise.records import RolloutGroup
from groupwise.training.critics import Critic
from groupwise.training.passes import assess, score
from groupwise.training.samples import minibatches, sample_of
from groupwise.training.teachers import Teacher


def add_signals(
    groups: Sequence[RolloutGroup],
    algorithm: Algorithm,
    *,
    reference: Policy | None = None,
    scorer: Policy | None = None,
    teacher: Teacher | None = None,
    critic: Critic | None = None,
    max_tokens_per_microbatch: int,
) -> list[RolloutGroup]:
    """Return the groups with a column of each model that is there, computed packed with shared
    prompts (`records.RolloutGroup.signals`).

    reference: `reference_logp`.   teacher: `teacher_logp`, after its own prompts, where the
        algorithm reads it.
    scorer: `scored_logp`, of the policy before its first update (`scores_first`).
    critic: `value`, which the credit reads, and `return`, its regression target.  Then a new head's
        bias is moved, for the passes that follow; `old_value` is the value with that bias.
    """
    samples = [sample_of(rollout) for group in groups for rollout in group.rollouts]
    groups = list(groups)
    if reference is not None:
        logp = score(reference, samples, max_tokens_per_microbatch=max_tokens_per_microbatch).logp
        groups = with_signal(groups, "reference_logp", logp)
    if scorer is not None:
        logp = score(scorer, samples, max_tokens_per_microbatch=max_tokens_per_microbatch).logp
        groups = with_signal(groups, "scored_logp", logp)
    if teacher is not None and algorithm.needs.teacher_logp:
        groups = with_signal(
            groups, "teacher_logp", teacher.logp(samples, max_tokens_per_microbatch)
        )
    if critic is not None:
        read = assess(
            critic.policy, critic.read, samples, max_tokens_per_microbatch=max_tokens_per_microbatch
        )
        groups = with_signal(groups, "value", read.seen)
        targets = [target_n for of_group in algorithm.returns(groups) for target_n in of_group]
        groups = critic.centre(with_signal(groups, "return", targets))
    return groups


def with_signal(
    groups: Sequence[RolloutGroup], name: str, columns: Sequence[np.ndarray]
) -> list[RolloutGroup]:
    """Return the groups with a signal: columns (n,) of all completions, in the groups' order."""
    begin, added = 0, []
    for group in groups:
        end = begin + len(group.rollouts)
        added.append(replace(group, signals={**group.signals, name: tuple(columns[begin:end])}))
        begin = end
    return added


def scores_first(
    algorithm: Algorithm, groups: Sequence[RolloutGroup], group: GroupSettings, policy: Policy
) -> bool:
    """Return True if the policy must score the completions before its first update, which else
    computes their log-probs itself.

    That is so where another engine has sampled and several updates follow, or the credit compares
    log-probs with a reference's or a teacher's.  In bfloat16 a sampler's log-prob and a reference's
    differ by more than a KL does, although the weights are the same: both are then taken from one
    computation.
    """
    if algorithm.reward_beta > 0.0 and (policy.autocast or policy.dtype == torch.bfloat16):
        return True
    if algorithm.correction is None:
        return False
    several_updates = group.updates_per_rollout * len(minibatches(groups, group)) > 1
    return several_updates or algorithm.reward_beta > 0.0 or algorithm.needs.teacher_logp
