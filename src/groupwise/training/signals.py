"""Signals: numbers for every token that credit and loss read beside rewards, computed by models before a step's first update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from groupwise.algorithms.table import Algorithm
from groupwise.config.settings import GroupSettings
from groupwise.models.policy import Policy
from groupwise.records import Sample, Scored
from groupwise.training.critics import Critic
from groupwise.training.passes import BatchPass, assess, score
from groupwise.training.samples import minibatches, sample_of
from groupwise.training.teachers import Teacher, scored_by_servers


def add_signals(
    groups: Sequence[Scored],
    algorithm: Algorithm,
    group: GroupSettings,
    policy: Policy,
    reference: Policy | None,
    critic: Critic | None,
    teacher: Teacher | None,
    budget: int,
) -> list[Scored]:
    """The groups with every further column that credit and loss read: `records.Scored.signals`."""
    groups = with_reference(groups, reference, budget)
    groups = with_scores(groups, policy, budget) if _scores_first(algorithm, groups, group, policy) else groups
    groups = with_teacher(groups, teacher, budget) if algorithm.reads_teacher else groups
    groups = with_values(groups, critic, algorithm, budget)
    centre(critic, groups)
    return groups


def with_signal(groups: Sequence[Scored], name: str, values: Callable[[list[Sample]], Sequence[np.ndarray]]) -> list[Scored]:
    """Add the signal `name`.   values: per sample (n,), computed once for each rollout, packed with shared prompts."""
    columns = iter(values([sample_of(rollout) for group in groups for rollout in group.rollouts]))
    return [replace(group, signals={**group.signals, name: tuple(next(columns) for _ in group.rollouts)}) for group in groups]


def with_reference(groups: Sequence[Scored], reference: Policy | None, budget: int) -> list[Scored]:
    """Add the signal `reference_logp`.  No reference: unchanged."""
    if reference is None:
        return list(groups)
    return with_signal(groups, "reference_logp", lambda samples: score(reference, samples, budget=budget).logp)


def with_scores(groups: Sequence[Scored], policy: Policy, budget: int) -> list[Scored]:
    """Add the signal `scored_logp`: the log-probs of the policy before its first update, where another engine has sampled.

    Needed from the second update on; the first update computes them in its own forward pass.
    """
    return with_signal(groups, "scored_logp", lambda samples: score(policy, samples, budget=budget).logp)


def with_teacher(groups: Sequence[Scored], teacher: Teacher | None, budget: int) -> list[Scored]:
    """Add the signal `teacher_logp`: what the teacher, after its own prompts, gives to the tokens that were drawn."""
    if teacher is None:
        return list(groups)

    def logp(samples: list[Sample]) -> list[np.ndarray]:
        read = teacher.read(samples)
        if teacher.servers is not None:
            return scored_by_servers(teacher.servers, read)
        return score(teacher.policy, read, budget=budget).logp

    return with_signal(groups, "teacher_logp", logp)


def with_values(groups: Sequence[Scored], critic: Critic | None, algorithm: Algorithm, budget: int) -> list[Scored]:
    """Add the signals `value`, the critic's present value, and `return`, its regression target.  No critic: unchanged."""
    if critic is None:
        return list(groups)
    read = partial(_values, critic)
    groups = with_signal(groups, "value", lambda samples: assess(critic.policy, read, samples, budget=budget).seen)
    targets = algorithm.returns(groups)
    return [
        replace(group, signals={**group.signals, "return": tuple(target)}) for group, target in zip(groups, targets, strict=True)
    ]


def _values(critic: Critic, passed: BatchPass) -> tuple[Tensor, Tensor]:
    value_M = critic.values(passed.hidden_MD)
    return value_M.new_zeros(()), value_M


@torch.no_grad()
def centre(critic: Critic | None, groups: Sequence[Scored]) -> None:
    """Move the values of a critic's new head to where they and their targets have one mean."""
    if critic is not None and critic.shared:
        gaps = [t - v for group in groups for t, v in zip(group.signals["return"], group.signals["value"], strict=True)]
        gap_N = np.concatenate(gaps)
        critic.head.bias += 0.0 if np.isnan(gap_N).all() else float(np.nanmean(gap_N))


def _scores_first(algorithm: Algorithm, groups: Sequence[Scored], group: GroupSettings, policy: Policy) -> bool:
    """True if the policy must score the completions before its first update.

    That is so where a teacher has helped to sample, and where another engine has sampled and several updates follow, or the credit
    compares log-probs with a reference's or a teacher's.  In bfloat16 a sampler's log-prob and a reference's differ by more than a
    KL does, although the weights are the same: both are then taken from one computation.
    """
    several = group.updates_per_rollout * len(minibatches(groups, group)) > 1
    in_reward = algorithm.needs_reference and algorithm.kl_place == "reward"
    low = policy.autocast or policy.dtype == torch.bfloat16
    elsewhere = algorithm.correction is not None
    return algorithm.mix > 0.0 or (in_reward and low) or (elsewhere and (several or in_reward or algorithm.reads_teacher))
