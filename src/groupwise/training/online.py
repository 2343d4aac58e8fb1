"""The reinforcement-learning loop: prompts -> rollouts -> rewards -> credit -> weights -> packed
updates -> a `Step`.

`train_online` is the whole algorithm on one screen; every stage it calls is an ordinary function
that a loop of your own can call too.  It logs and saves nothing: it yields a `Step` after every
rollout, and the caller logs, saves and stops.  A critic that is trained before the policy has a
loop of its own, `pretrain_critic`.

R completions of an optimizer step   N their trained tokens   M trained positions of a micro-batch
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from groupwise.algorithms.advantages import Advantages
from groupwise.algorithms.table import Algorithm
from groupwise.config.settings import GroupSettings
from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.models import backbone
from groupwise.models.passes import reshard
from groupwise.models.policy import Policy
from groupwise.records import RolloutGroup, Sample, Step
from groupwise.training.critics import Critic
from groupwise.training.groups import Collected, Rollouts
from groupwise.training.loss import step_loss, update_critic
from groupwise.training.metrics import by_completion, measure, token_columns
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import Assessment, assess, update
from groupwise.training.samples import minibatches, weigh
from groupwise.training.signals import add_signals, scores_first
from groupwise.training.teachers import Teacher
from groupwise.utils.clock import Clock


def train_online(
    policy: Policy,
    algorithm: Algorithm,
    rollouts: Rollouts,
    optimizer: Optimizer,
    *,
    group: GroupSettings,
    max_tokens_per_microbatch: int,
    reference: Policy | None = None,
    critic: Critic | None = None,
    teacher: Teacher | None = None,
    checkpointing: bool = False,
) -> Iterator[Step]:
    """Train `policy` in place on groups; yield a `Step` after every rollout and its updates.

    docs/grpo_in_one_file.py does the same without the library and without packing; `groupwise
    explain` shows one step in numbers.
    rollouts: the groups of each step: sampled (`groups.SampledRollouts`), recorded, or yours.
    max_tokens_per_microbatch: packed positions per forward and backward pass; it cannot change an update.
    reference, critic, teacher: exactly those that the algorithm needs (`Algorithm.needs`).  The
    reference is frozen. A critic on the policy's backbone is trained in the policy's pass, a
    separate critic in a pass after it.
    Raises ConfigError for a model that is missing or not needed; Diverged, RewardError,
    EngineError.
    """
    check_models(algorithm, reference=reference, critic=critic, teacher=teacher)
    optimizers = (
        [optimizer] if critic is None or not critic.shared else [optimizer, critic.optimizer]
    )
    for clock, number, (groups, drawn) in timed(rollouts):
        version = optimizer.taken
        with clock.phase("signals"):
            hinted = None if teacher is None else teacher.with_hints(groups)
            scorer = policy if scores_first(algorithm, groups, group, policy) else None
            groups = add_signals(
                groups,
                algorithm,
                reference=reference,
                scorer=scorer,
                teacher=hinted,
                critic=critic,
                max_tokens_per_microbatch=max_tokens_per_microbatch,
            )
        advantages, one_pass = algorithm.advantages(groups), minibatches(groups, group)
        updates: list[Assessment] = []
        with clock.phase("update"), recomputing(policy, critic, checkpointing):
            for minibatch in one_pass * group.updates_per_rollout:
                samples = weigh(
                    [groups[i] for i in minibatch], [advantages[i] for i in minibatch], algorithm
                )
                now = with_entropy_bonus(algorithm, optimizer, samples)
                loss = step_loss(
                    policy,
                    now,
                    samples,
                    critic=critic,
                    teacher=hinted,
                    number=optimizer.taken,
                    max_tokens_per_microbatch=max_tokens_per_microbatch,
                )
                updates.append(
                    update(
                        policy,
                        loss,
                        loss.samples,
                        *optimizers,
                        max_tokens_per_microbatch=max_tokens_per_microbatch,
                    )
                )
                max_tokens_per_microbatch = updates[-1].max_tokens_per_microbatch
                if critic is not None and not critic.shared:
                    max_tokens_per_microbatch = update_critic(
                        critic, loss, max_tokens_per_microbatch=max_tokens_per_microbatch
                    )
        with clock.phase("sync"):
            rollouts.sync(optimizer.taken)
            follow(number, group, policy, reference, teacher)
        yield step_of(
            number,
            groups,
            advantages,
            updates,
            algorithm,
            drawn,
            clock,
            first=len(one_pass),
            version=version,
        )


def pretrain_critic(
    policy: Policy,
    algorithm: Algorithm,
    rollouts: Rollouts,
    *,
    critic: Critic,
    group: GroupSettings,
    max_tokens_per_microbatch: int,
    reference: Policy | None = None,
    teacher: Teacher | None = None,
    checkpointing: bool = False,
) -> Iterator[Step]:
    """Train a critic alone, on the returns of a policy that stays as it is; yield a `Step` after
    every rollout.

    It comes before `train_online`, whose arguments it has but for the optimizer.  The loss in its
    metrics is the policy's."""
    check_models(algorithm, reference=reference, critic=critic, teacher=teacher)
    for clock, number, (groups, drawn) in timed(rollouts):
        with clock.phase("signals"):
            hinted = None if teacher is None else teacher.with_hints(groups)
            scorer = policy if scores_first(algorithm, groups, group, policy) else None
            groups = add_signals(
                groups,
                algorithm,
                reference=reference,
                scorer=scorer,
                teacher=hinted,
                critic=critic,
                max_tokens_per_microbatch=max_tokens_per_microbatch,
            )
        advantages, one_pass = algorithm.advantages(groups), minibatches(groups, group)
        seen: list[Assessment] = []
        with clock.phase("update"), recomputing(policy, critic, checkpointing):
            for minibatch in one_pass * group.updates_per_rollout:
                samples = weigh(
                    [groups[i] for i in minibatch], [advantages[i] for i in minibatch], algorithm
                )
                loss = step_loss(
                    policy,
                    algorithm,
                    samples,
                    teacher=hinted,
                    max_tokens_per_microbatch=max_tokens_per_microbatch,
                )
                seen.append(
                    assess(
                        policy,
                        loss,
                        loss.samples,
                        max_tokens_per_microbatch=max_tokens_per_microbatch,
                    )
                )
                max_tokens_per_microbatch = update_critic(
                    critic, loss, max_tokens_per_microbatch=seen[-1].max_tokens_per_microbatch
                )
        if teacher is not None:
            reshard(teacher.policy)
        yield step_of(
            number, groups, advantages, seen, algorithm, drawn, clock, first=len(one_pass)
        )


def check_models(algorithm: Algorithm, **models: object) -> None:
    """Raises ConfigError for a model (reference, critic, teacher) that the algorithm needs and that
    is None, or the reverse.
    """
    for (name, model), needed in zip(models.items(), algorithm.needs, strict=True):
        if (model is None) == needed:
            remedy = (
                f"needs a {name}: pass {name}="
                if needed
                else f"has no use for a {name}: leave {name}= out"
            )
            raise ConfigError(f"the algorithm {algorithm.name} {remedy}")


@contextmanager
def recomputing(policy: Policy, critic: Critic | None, on: bool) -> Iterator[None]:
    """The region in which policy and critic recompute activations in the backward pass, if `on`."""
    with (
        backbone.checkpointing(policy, on),
        backbone.checkpointing(policy if critic is None else critic.policy, on),
    ):
        yield


def timed(rollouts: Rollouts) -> Iterator[tuple[Clock, int, Collected]]:
    """The groups of each step, with a clock that has counted the time until they were there."""
    source = iter(rollouts)
    while True:
        clock = Clock()
        with clock.phase("rollout"):
            taken = next(source, None)
        if taken is None:
            return
        yield clock, *taken


def with_entropy_bonus(
    algorithm: Algorithm, optimizer: Optimizer, samples: Sequence[Sample]
) -> Algorithm:
    """The algorithm with the entropy bonus of this step, by the sampled entropy (mean of -log p) of
    its trained tokens.
    """
    if algorithm.entropy_target is None:
        return algorithm
    drawn = [-sample.behavior_logp[sample.weight != 0] for sample in samples]
    if not any(map(len, drawn)):  # nothing is trained: the coefficient stays
        return replace(algorithm, entropy_bonus=0.0)
    algorithm, optimizer.entropy_bonus = algorithm.with_bonus(
        optimizer.entropy_bonus, float(np.concatenate(drawn).mean())
    )
    return algorithm


def follow(
    number: int,
    group: GroupSettings,
    policy: Policy,
    reference: Policy | None,
    teacher: Teacher | None,
) -> None:
    """After step `number`: move the reference, if it is due, and a teacher that follows the policy."""
    if teacher is not None:
        reshard(teacher.policy)
    if reference is not None and group.reference_refresh and number % group.reference_refresh == 0:
        refresh(reference, policy, group.reference_mix)
    if teacher is not None and teacher.ema and teacher.policy.model is not policy.model:
        refresh(teacher.policy, policy, teacher.ema)


def refresh(reference: Policy, policy: Policy, share: float) -> None:
    """Move the reference to the policy: `ref = share x theta + (1 - share) x ref` (TR-DPO,
    2404.09656).
    """
    with torch.no_grad():
        for frozen, trained in zip(
            reference.model.parameters(), policy.model.parameters(), strict=True
        ):
            frozen.lerp_(trained.to(frozen.dtype), share)


def step_of(
    number: int,
    groups: Sequence[RolloutGroup],
    advantages: Advantages,
    updates: Sequence[Assessment],
    algorithm: Algorithm,
    drawn: int,
    clock: Clock,
    *,
    first: int,
    version: int | None = None,
) -> Step:
    """The record of a step.   first: optimizer steps of the first pass.   version: see `measure`."""
    return Step(
        number=number,
        metrics=measure(
            groups,
            updates,
            algorithm,
            drawn,
            minibatches=first,
            seconds=clock.seconds,
            version=version,
        ),
        timings=clock.seconds | comm.waiting(),
        groups=groups,
        advantages=advantages,
        current_logp=first_pass(groups, updates[:first]),
        columns=token_columns(groups, updates, algorithm, minibatches=first),
    )


def first_pass(
    groups: Sequence[RolloutGroup], updates: Sequence[Assessment]
) -> list[list[np.ndarray]]:
    """Per group and completion (n_i,): the log-probs that its first update saw; empty where nothing
    was computed.
    """
    return by_completion(
        groups,
        [
            (sample, logp)
            for one in updates
            for sample, logp in zip(one.samples, one.seen, strict=True)
        ],
    )
