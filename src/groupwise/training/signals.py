"""Signals: numbers for every token that credit and loss read beside rewards, computed by models
before a step's first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from groupwise.algorithms.table import Algorithm
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
    """The groups with a column of each model that is there, computed packed with shared prompts
    (`records.RolloutGroup.signals`).

    reference: `reference_logp`.   teacher: `teacher_logp`, after its own prompts, where the
        algorithm reads it.
    scorer: `scored_logp`, of the policy before its first update (`scores_first`).
    critic: `value`, which the credit reads, and `return`, its regression target.  Then a new head's
        bias is moved, for the passes that follow; `old_value` is the value with that bias.
    """
    samples = [sample_of(rollout) for group in groups for rollout in group.rollouts]
    columns = {
        name: score(policy, samples, max_tokens_per_microbatch=max_tokens_per_microbatch).logp
        for name, policy in (("reference_logp", reference), ("scored_logp", scorer))
        if policy is not None
    }
    if teacher is not None and algorithm.reads_teacher:
        columns["teacher_logp"] = teacher.logp(samples, max_tokens_per_microbatch)
    if critic is not None:
        columns["value"] = assess(
            critic.policy, critic.read, samples, max_tokens_per_microbatch=max_tokens_per_microbatch
        ).seen
    groups = list(groups)
    for name, column in columns.items():
        values = iter(column)
        groups = [
            replace(one, signals={**one.signals, name: tuple(next(values) for _ in one.rollouts)})
            for one in groups
        ]
    if critic is not None:
        targets = zip(groups, algorithm.returns(groups), strict=True)
        groups = [
            replace(one, signals={**one.signals, "return": tuple(target)})
            for one, target in targets
        ]
        groups = critic.centre(groups)
    return groups


def scores_first(
    algorithm: Algorithm, groups: Sequence[RolloutGroup], group: GroupSettings, policy: Policy
) -> bool:
    """True if the policy must score the completions before its first update, which else computes
    their log-probs itself.

    That is so where a teacher has helped to sample, and where another engine has sampled and
    several updates follow, or the credit compares log-probs with a reference's or a teacher's.  In
    bfloat16 a sampler's log-prob and a reference's differ by more than a KL does, although the
    weights are the same: both are then taken from one computation.
    """
    several = group.updates_per_rollout * len(minibatches(groups, group)) > 1
    in_reward = algorithm.needs_reference and algorithm.kl_place == "reward"
    low = policy.autocast or policy.dtype == torch.bfloat16
    elsewhere = algorithm.correction is not None
    return (
        algorithm.mix > 0.0
        or (in_reward and low)
        or (elsewhere and (several or in_reward or algorithm.reads_teacher))
    )
