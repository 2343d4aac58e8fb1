"""The reinforcement-learning loop: prompts -> rollouts -> rewards -> credit -> weights -> packed updates -> a `Step`.

`train_online` is the whole algorithm on one screen; every stage it calls is an ordinary function that a loop of your own can call
too.  It logs and saves nothing: it yields a `Step` after every rollout, and the caller logs, saves and stops.

R completions of an optimizer step   N their trained tokens   M trained positions of a micro-batch
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from groupwise.algorithms.table import Algorithm
from groupwise.config.settings import GroupSettings
from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.models import backbone
from groupwise.models.passes import reshard
from groupwise.models.policy import Policy
from groupwise.records import Sample, Scored, Step
from groupwise.training.critics import Critic
from groupwise.training.groups import Collected, Rollouts
from groupwise.training.loss import CriticLoss, step_loss
from groupwise.training.metrics import by_completion, measure, token_columns
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import Assessment, update
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
    budget: int,
    reference: Policy | None = None,
    critic: Critic | None = None,
    teacher: Teacher | None = None,
    checkpointing: bool = False,
) -> Iterator[Step]:
    """Train `policy` in place on groups; yield a `Step` after every rollout and its updates.

    The same from scratch and without packing: docs/grpo_in_one_file.py; one step in numbers: `groupwise explain`.
    rollouts: the groups of each step: sampled (`groups.SampledRollouts`), recorded, or yours.
    budget: packed positions per forward and backward pass; it cannot change an update.
    reference, critic, teacher: those that the algorithm needs (`Algorithm.needs`), and no others.  The reference is frozen.
    A critic on the policy's backbone learns in the policy's pass.  With another backbone, and in its first `pretrain` steps, in
    which the policy stays as it is, it learns in a separate pass.
    Raises ConfigError for a model that is missing or not needed; Diverged, RewardError, EngineError.
    """
    models = {"reference": reference, "critic": critic, "teacher": teacher}
    for (name, model), needed in zip(models.items(), algorithm.needs, strict=True):
        if (model is None) == needed:
            remedy = f"needs a {name}: pass {name}=" if needed else f"has no use for a {name}: leave {name}= out"
            raise ConfigError(f"the algorithm {algorithm.name} {remedy}")
    for clock, number, (groups, drawn) in timed(rollouts):
        version = optimizer.taken
        with clock.phase("reference"):
            hinted = None if teacher is None else teacher.with_hints(groups)
            groups = add_signals(
                groups,
                algorithm,
                reference=reference,
                scorer=policy if scores_first(algorithm, groups, group, policy) else None,
                teacher=hinted if algorithm.reads_teacher else None,
                critic=critic,
                budget=budget,
            )
        advantages, one_pass = algorithm.advantages(groups), minibatches(groups, group)
        updates: list[Assessment] = []
        pretraining = critic is not None and number <= critic.settings.pretrain
        in_pass = critic if critic is not None and critic.shared and not pretraining else None
        with (
            clock.phase("update"),
            backbone.checkpointing(policy, checkpointing),
            backbone.checkpointing(policy if critic is None else critic.policy, checkpointing),
        ):
            for minibatch in one_pass * group.updates_per_rollout:
                samples = weigh([groups[i] for i in minibatch], [advantages[i] for i in minibatch], algorithm)
                now = algorithm if pretraining else steered(algorithm, optimizer, samples)
                loss = step_loss(policy, now, samples, critic=in_pass, teacher=hinted, number=optimizer.taken, budget=budget)
                optimizers = [] if pretraining else [optimizer] if in_pass is None else [optimizer, in_pass.optimizer]
                updates.append(update(policy, loss, loss.samples, *optimizers, budget=budget))
                budget = updates[-1].budget
                if critic is not None and in_pass is None:
                    alone = CriticLoss(loss, critic)
                    budget = update(critic.policy, alone, loss.samples, critic.optimizer, budget=budget).budget
        with clock.phase("sync"):
            rollouts.sync(optimizer.taken)
            follow(number, group, policy, reference, teacher)
        yield Step(
            number=number,
            metrics=measure(groups, updates, algorithm, drawn, minibatches=len(one_pass), seconds=clock.seconds, version=version),
            timings=clock.seconds | comm.waiting(),
            groups=groups,
            advantages=advantages,
            current_logp=first_pass(groups, updates[: len(one_pass)]),
            columns=token_columns(groups, updates, algorithm, minibatches=len(one_pass)),
        )


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


def steered(algorithm: Algorithm, optimizer: Optimizer, samples: Sequence[Sample]) -> Algorithm:
    """The algorithm with the entropy bonus of this step, by the sampled entropy (mean of -log p) of its trained tokens."""
    if algorithm.entropy_target is None:
        return algorithm
    drawn = [-sample.behavior_logp[sample.weight != 0] for sample in samples]
    if not any(map(len, drawn)):  # nothing is trained: the coefficient stays
        return replace(algorithm, entropy_bonus=0.0)
    algorithm, optimizer.entropy_bonus = algorithm.with_bonus(optimizer.entropy_bonus, float(np.concatenate(drawn).mean()))
    return algorithm


def follow(number: int, group: GroupSettings, policy: Policy, reference: Policy | None, teacher: Teacher | None) -> None:
    """After step `number`: move the reference, if it is due, and a teacher that follows the policy."""
    if teacher is not None:
        reshard(teacher.policy)
    if reference is not None and group.reference_refresh and number % group.reference_refresh == 0:
        refresh(reference, policy, group.reference_mix)
    if teacher is not None and teacher.ema and teacher.policy.model is not policy.model:
        refresh(teacher.policy, policy, teacher.ema)


def refresh(reference: Policy, policy: Policy, share: float) -> None:
    """Move the reference to the policy: `ref = share x theta + (1 - share) x ref` (TR-DPO, 2404.09656)."""
    with torch.no_grad():
        for frozen, trained in zip(reference.model.parameters(), policy.model.parameters(), strict=True):
            frozen.lerp_(trained.to(frozen.dtype), share)


def first_pass(groups: Sequence[Scored], updates: Sequence[Assessment]) -> list[list[np.ndarray]]:
    """Per group and completion (n_i,): the log-probs that its first update saw; empty where nothing was computed."""
    return by_completion(groups, [(sample, logp) for one in updates for sample, logp in zip(one.samples, one.seen, strict=True)])
