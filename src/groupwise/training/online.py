"""The reinforcement-learning loop: prompts -> rollouts -> rewards -> credit -> weights -> packed
updates -> a `Step`.

`train_online` is the whole algorithm on one screen; every stage it calls is an ordinary function
that a loop of your own can call too.  It logs and saves nothing: it yields a `Step` after every
rollout, and the caller logs, saves and stops.

R completions of an optimizer step   N their trained tokens   M trained positions of a micro-batch
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from groupwise.algorithms.advantages import Advantages
from groupwise.algorithms.algorithm import Algorithm
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
from groupwise.training.metrics import logp_column, measure, token_columns
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import Assessment, update
from groupwise.training.recorded_loss import RecordedStep
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
    pretrain: int = 0,
    checkpointing: bool = False,
) -> Iterator[Step]:
    """Train `policy` in place on groups; yield a `Step` after every rollout and its updates.

    docs/grpo_in_one_file.py does the same without the library and without packing; `groupwise
    explain` shows one step in numbers.
    rollouts: the groups of each step: sampled (`groups.SampledRollouts`), recorded, or yours.
    max_tokens_per_microbatch: packed positions per forward and backward pass; it cannot change an
        update.
    reference, critic, teacher: exactly those that the algorithm needs (`Algorithm.needs`).  The
        reference is frozen.  A critic on the policy's backbone is trained in the policy's pass, a
        separate critic in a pass after it.
    pretrain: steps 1 to `pretrain` train only the critic; the policy is frozen.  The loss in their
        metrics is still the policy's.
    Raises ConfigError for a model that is missing or not needed; Diverged, RewardError,
    EngineError.
    """
    check_models(algorithm, reference=reference, critic=critic, teacher=teacher)
    optimizers = [optimizer]
    if critic is not None and critic.shared:
        optimizers.append(critic.optimizer)
    for clock, number, (groups, drawn) in timed(rollouts):
        learns = number > pretrain  # else the critic alone
        version = optimizer.taken
        with clock.phase("signals"):
            hinted = None if teacher is None else teacher.with_hints(groups)
            groups = add_signals(
                groups,
                algorithm,
                reference=reference,
                scorer=policy if scores_first(algorithm, groups, group, policy) else None,
                teacher=hinted,
                critic=critic,
                max_tokens_per_microbatch=max_tokens_per_microbatch,
            )
        advantages = algorithm.advantages(groups)
        steps_of_a_pass = minibatches(groups, group)
        updates: list[Assessment] = []
        with clock.phase("update"), recomputing(policy, critic, checkpointing):
            for places in steps_of_a_pass * group.updates_per_rollout:
                samples = weigh(
                    [groups[i] for i in places], [advantages[i] for i in places], algorithm
                )
                now = with_entropy_bonus(algorithm, optimizer, samples) if learns else algorithm
                loss = step_loss(
                    policy,
                    now,
                    samples,
                    critic=critic if learns else None,
                    teacher=hinted,
                    max_tokens_per_microbatch=max_tokens_per_microbatch,
                )
                updated = update(
                    policy,
                    loss,
                    loss.samples,
                    *(optimizers if learns else ()),
                    max_tokens_per_microbatch=max_tokens_per_microbatch,
                )
                updates.append(updated)
                max_tokens_per_microbatch = updated.max_tokens_per_microbatch
                trained_with_policy = learns and critic is not None and critic.shared
                if critic is not None and not trained_with_policy:
                    max_tokens_per_microbatch = update_critic(
                        critic, loss, max_tokens_per_microbatch=max_tokens_per_microbatch
                    )
        with clock.phase("sync"):
            if teacher is not None:
                reshard(teacher.policy)
            if learns:
                rollouts.sync(optimizer.taken)
                refresh_reference(number, group, policy, reference)
        yield step_of(
            number,
            groups,
            advantages,
            RecordedStep(algorithm, updates, len(steps_of_a_pass)),
            drawn,
            clock,
            version=version if learns else None,
        )


def check_models(
    algorithm: Algorithm,
    *,
    reference: Policy | None,
    critic: Critic | None,
    teacher: Teacher | None,
) -> None:
    """Raise ConfigError for a model that the algorithm needs and that is None, or the reverse."""
    needs = algorithm.needs
    for name, model, needed in (
        ("reference", reference, needs.reference),
        ("critic", critic, needs.critic),
        ("teacher", teacher, needs.teacher),
    ):
        if needed and model is None:
            raise ConfigError(f"the algorithm {algorithm.name} needs a {name}: pass {name}=")
        if model is not None and not needed:
            raise ConfigError(
                f"the algorithm {algorithm.name} has no use for a {name}: leave {name}= out"
            )


@contextmanager
def recomputing(policy: Policy, critic: Critic | None, on: bool) -> Iterator[None]:
    """Make policy and critic recompute activations in the backward pass, if `on`."""
    separate = policy if critic is None else critic.policy
    with backbone.checkpointing(policy, on), backbone.checkpointing(separate, on):
        yield


def timed(rollouts: Rollouts) -> Iterator[tuple[Clock, int, Collected]]:
    """Yield the groups of each step, with a clock that has timed their rollout."""
    source = iter(rollouts)
    while True:
        clock = Clock()
        with clock.phase("rollout"):
            taken = next(source, None)
        if taken is None:
            return
        number, collected = taken
        yield clock, number, collected


def with_entropy_bonus(
    algorithm: Algorithm, optimizer: Optimizer, samples: Sequence[Sample]
) -> Algorithm:
    """Return the algorithm with the entropy bonus of this step, by the sampled entropy (mean of
    -log p) of its trained tokens.
    """
    if algorithm.entropy_target is None:
        return algorithm
    drawn = [-sample.behavior_logp[sample.weight != 0] for sample in samples]
    if not any(map(len, drawn)):  # nothing is trained: the coefficient stays
        return replace(algorithm, entropy_bonus=0.0)
    entropy = float(np.concatenate(drawn).mean())
    algorithm, optimizer.entropy_bonus = algorithm.with_bonus(optimizer.entropy_bonus, entropy)
    return algorithm


def refresh_reference(
    number: int, group: GroupSettings, policy: Policy, reference: Policy | None
) -> None:
    """Move the reference to the policy after step `number`, if it is due."""
    if reference is None or not group.reference_refresh:
        return
    if number % group.reference_refresh == 0:
        refresh(reference, policy, group.reference_mix)


def refresh(reference: Policy, policy: Policy, share: float) -> None:
    """Move the reference to the policy: `ref = share x theta + (1 - share) x ref` (TR-DPO,
    2404.09656).
    """
    pairs = zip(reference.model.parameters(), policy.model.parameters(), strict=True)
    with torch.no_grad():
        for frozen, trained in pairs:
            frozen.lerp_(trained.to(frozen.dtype), share)


def step_of(
    number: int,
    groups: Sequence[RolloutGroup],
    advantages: Advantages,
    recorded: RecordedStep,
    drawn: int,
    clock: Clock,
    *,
    version: int | None = None,
) -> Step:
    """Return the record of a step.   drawn, version: see `measure`."""
    return Step(
        number=number,
        metrics=measure(groups, recorded, drawn, seconds=clock.seconds, version=version),
        timings=clock.seconds | comm.waiting(),
        groups=groups,
        advantages=advantages,
        current_logp=logp_column(groups, recorded.first_pass),
        columns=token_columns(groups, recorded),
    )
