"""The reinforcement-learning loop: prompts -> rollouts -> rewards -> credit -> weights -> packed updates -> a `Step`.

`train_online` is the whole algorithm on one screen; every stage it calls is an ordinary function that a loop of your own can call
too.  It logs and saves nothing: it yields a `Step` after every rollout, and the caller logs, saves and stops.

R completions of an optimizer step   N their trained tokens   M trained positions of a micro-batch
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from groupwise.algorithms.losses import Mismatch, Terms, forking
from groupwise.algorithms.table import Algorithm
from groupwise.config.settings import GroupSettings
from groupwise.distributed import comm
from groupwise.errors import RewardError
from groupwise.models.policy import Policy
from groupwise.ops.linear_cross_entropy import TokenLoss
from groupwise.records import Batch, Sample, Sampling, Scored, Step
from groupwise.rewards.compose import Judge
from groupwise.rollout.asynchronous import PrefetchedRollouts
from groupwise.rollout.dynamic_sampling import Draw, GroupSampler
from groupwise.rollout.engine import Engine
from groupwise.training.critics import Critic, Together, with_values
from groupwise.training.metrics import by_completion, measure, token_columns
from groupwise.training.optimizer import Optimizer, StepStats
from groupwise.training.samples import weigh
from groupwise.training.scoring import score, score_rollouts
from groupwise.training.teachers import Teacher, with_demonstrations, with_teacher
from groupwise.training.updating import Update, assess, token_loss, update
from groupwise.utils.clock import Clock


def train_online(
    policy: Policy,
    algorithm: Algorithm,
    *,
    engine: Engine,
    rewards: Judge,
    draw: Draw,
    optimizer: Optimizer,
    group: GroupSettings,
    sampling: Sampling,
    budget: int,
    steps: int,
    done: int = 0,
    reference: Policy | None = None,
    critic: Critic | None = None,
    teacher: Teacher | None = None,
    ahead: PrefetchedRollouts | None = None,
    checkpointing: bool = False,
    seed: int = 0,
) -> Iterator[Step]:
    """Train `policy` in place; yield a `Step` after every rollout and its updates.

    The same from scratch and without packing: docs/grpo_in_one_file.py; one step in numbers: `groupwise explain`.
    budget: packed positions per forward and backward pass; it cannot change an update.   ahead: what has been sampled already.
    steps: the last step's number; done: those taken before.   reference: frozen, given exactly when `algorithm.needs_reference`.
    critic, teacher: given exactly when the algorithm needs them.   Raises Diverged, RewardError, EngineError.
    """
    assert [one is not None for one in (reference, critic, teacher)] == algorithm.needs
    source = GroupSampler(engine=engine, rewards=rewards, draw=draw, algorithm=algorithm, group=group, sampling=sampling, seed=seed)
    ahead, idle = ahead or PrefetchedRollouts(), Idle(algorithm)
    for number in range(done + 1, steps + 1):
        clock, version = Clock(), optimizer.taken
        with clock.phase("rollout"):
            groups, drawn = ahead.take(number, steps, source)
        idle.count(groups)
        with clock.phase("reference"):
            asked = None if teacher is None else teacher.before(groups)
            groups = with_signals(groups, algorithm, group, policy, reference, critic, asked, budget)
        advantages, parts = algorithm.advantages(groups), minibatches(groups, group)
        updates: list[Update] = []
        learn = critic is None or number > critic.settings.pretrain
        with clock.phase("update"), recomputing(checkpointing, policy, critic):
            for _ in range(group.updates_per_rollout):
                for part in parts:
                    samples = weigh([groups[i] for i in part], [advantages[i] for i in part], algorithm)
                    updates.append(improve(policy, algorithm, samples, optimizer, critic, asked, budget=budget, learn=learn))
                    budget = updates[-1].budget
        with clock.phase("sync"):
            engine.set_version(optimizer.taken)
            follow(number, group, policy, reference, teacher)
        yield Step(
            number=number,
            metrics=measure(groups, updates, algorithm, drawn, minibatches=len(parts), seconds=clock.seconds, version=version),
            timings=clock.seconds | comm.waiting(),
            groups=groups,
            advantages=advantages,
            current_logp=first_pass(groups, updates[: len(parts)]),
            columns=token_columns(groups, updates, algorithm, minibatches=len(parts)),
        )


IDLE_STEPS = 3
"""Steps in a row without a single reward, or without a single completion that is trained, after which a run ends."""


class Idle:
    """Counts the steps in a row of which nothing can be learnt."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm, self.silent, self.masked = algorithm, 0, 0

    def count(self, groups: Sequence[Scored]) -> None:
        """Count a step.  Raises RewardError after IDLE_STEPS in a row of which no completion had a reward, or none is trained."""
        silent = bool(groups[0].names) and all(np.isnan(group.reward).all() for group in groups)
        self.silent = self.silent + 1 if silent else 0
        self.masked = self.masked + 1 if all_masked(self.algorithm, groups) else 0
        if self.silent >= IDLE_STEPS:
            raise RewardError(
                f"the reward functions ({', '.join(groups[0].names)}) said None for every completion of {IDLE_STEPS} steps: "
                "nothing can be learnt; try them with `groupwise score` on completions that they should reward"
            )
        if self.masked >= IDLE_STEPS:
            raise only_masked(self.masked)


def all_masked(algorithm: Algorithm, groups: Sequence[Scored]) -> bool:
    """True if a limit ended every completion, and such ones are not trained."""
    return algorithm.truncated == "mask" and all(rollout.truncated for group in groups for rollout in group.rollouts)


def only_masked(steps: int) -> RewardError:
    """The error of a run, or of `steps` of it, without a completion that is trained."""
    return RewardError(
        f"every completion of {steps} steps was cut off at a limit and left out of the loss (group.truncated: mask): nothing can "
        "be learnt; raise rollout.max_new_tokens, or set group.truncated: keep"
    )


def demand_training(steps: Iterator[Step], algorithm: Algorithm) -> Iterator[Step]:
    """The steps of a run; after the last one raises RewardError if all completions of all steps were masked."""
    masked = taken = 0
    for step in steps:
        yield step
        taken, masked = taken + 1, masked + all_masked(algorithm, step.groups)
    if 0 < masked == taken:
        raise only_masked(masked)


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


def with_signals(
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


@torch.no_grad()
def centre(critic: Critic | None, groups: Sequence[Scored]) -> None:
    """Move the values of a critic's new head to where they and their targets have one mean."""
    if critic is not None and critic.shared:
        gaps = [t - v for group in groups for t, v in zip(group.signals["return"], group.signals["value"], strict=True)]
        gap_N = np.concatenate(gaps)
        critic.head.bias += 0.0 if np.isnan(gap_N).all() else float(np.nanmean(gap_N))


@contextmanager
def recomputing(on: bool, policy: Policy, critic: Critic | None) -> Iterator[None]:
    """Recompute activations of all that is trained while inside (`Policy.checkpointing`)."""
    with policy.checkpointing(on), nullcontext() if critic is None else critic.checkpointing(on):
        yield


def with_reference(groups: Sequence[Scored], reference: Policy | None, budget: int) -> list[Scored]:
    """Add the signal `reference_logp`.  No reference: unchanged."""
    return list(groups) if reference is None else _with_logp(groups, "reference_logp", reference, budget)


def with_scores(groups: Sequence[Scored], policy: Policy, budget: int) -> list[Scored]:
    """Add the signal `scored_logp`: the log-probs of the policy before its first update, where another engine has sampled.

    Needed from the second update on; the first update computes them in its own forward pass.
    """
    return _with_logp(groups, "scored_logp", policy, budget)


def _with_logp(groups: Sequence[Scored], name: str, policy: Policy, budget: int) -> list[Scored]:
    """Add a policy's log-probs as the signal `name`, computed once per rollout, packed with shared prompts."""
    logp = iter(score_rollouts(policy, [rollout for group in groups for rollout in group.rollouts], budget=budget))
    return [replace(group, signals={**group.signals, name: tuple(next(logp) for _ in group.rollouts)}) for group in groups]


def minibatches(groups: Sequence[Scored], group: GroupSettings) -> list[np.ndarray]:
    """The groups of each optimizer step of a pass, by place."""
    return np.array_split(np.arange(len(groups)), min(group.minibatches, len(groups)))


def improve(
    policy: Policy,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    optimizer: Optimizer,
    critic: Critic | None = None,
    teacher: Teacher | None = None,
    *,
    budget: int,
    learn: bool = True,
) -> Update:
    """One optimizer step on weighted samples, of the policy and of a critic; a teacher's demonstrations are mixed in.

    learn: False leaves the policy as it is.

    A high-entropy mask is decided before the first micro-batch, and so needs a pass of its own.
    """
    algorithm = steered(algorithm, optimizer, samples) if learn else algorithm
    if algorithm.needs_forking:
        samples = with_forking(algorithm, samples, score(policy, samples, budget=budget, entropy=True).entropy)
    tokens = entropy_tokens(algorithm, samples)  # of rollouts: the algorithm knows nothing of demonstrations
    if teacher is not None and teacher.demonstrations is not None:
        samples = with_demonstrations(samples, teacher.demonstrations.of(optimizer.taken))
    computed = list(samples) if policy.router_coefficient > 0.0 else worked(algorithm, samples)
    joined = critic if critic is not None and critic.shared and learn else None

    def loss(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
        return policy_loss(
            policy,
            algorithm,
            batch,
            entropy_tokens=tokens,
            critic=joined,
            teacher=teacher,
            samples=computed,
        )

    if learn:
        stepper = optimizer if joined is None else Together(optimizer, joined.optimizer)
        found = update(policy, loss, computed, stepper, budget=budget)
    else:
        seen = assess(policy, loss, computed, budget=budget)
        unmoved = StepStats(grad_norm=0.0, lr=0.0, skipped=False)
        found = Update(
            samples=seen.samples,
            seen=seen.seen,
            entropy=seen.entropy,
            loss=seen.loss,
            positions=seen.positions,
            stats=unmoved,
            budget=budget,
        )
    if teacher is not None:
        teacher.policy.reshard()
    if critic is not None and joined is None:
        found = replace(found, budget=critic.improve(samples, found.budget))
    return found


def steered(algorithm: Algorithm, optimizer: Optimizer, samples: Sequence[Sample]) -> Algorithm:
    """The algorithm with the entropy bonus of this step, by the sampled entropy (mean of -log p) of its trained tokens."""
    if algorithm.entropy_target is None:
        return algorithm
    drawn = [-sample.behavior_logp[sample.weight != 0] for sample in samples]
    if not any(map(len, drawn)):  # nothing is trained: the coefficient stays
        return replace(algorithm, entropy_bonus=0.0)
    algorithm, optimizer.entropy_bonus = algorithm.adapted(optimizer.entropy_bonus, float(np.concatenate(drawn).mean()))
    return algorithm


def worked(algorithm: Algorithm, samples: Sequence[Sample]) -> list[Sample]:
    """The samples that a step computes.

    Those whose advantages are all 0 are left out where nothing else gives them a gradient: exactly the same step for less work.
    (A loss that balances experts does, and a caller that has one computes all.)
    Demonstrations have indices below 0.  Of an episode all parts are computed, or none.
    """
    live = {(sample.group, sample.index, sample.part is None) for sample in samples if sample.advantage.any()}
    return [
        sample
        for sample in samples
        if sample.advantage.any()
        or not algorithm.skips_dead
        or sample.index < 0
        or (sample.part is not None and (sample.group, sample.index, False) in live)
    ]


def with_forking(algorithm: Algorithm, samples: Sequence[Sample], entropies: Sequence[np.ndarray]) -> list[Sample]:
    """The samples of a whole step with the column `forking`: 1 for every token that a high-entropy mask keeps, else 0.

    entropies: per sample (n,), nats.
    """
    if not samples:
        return []
    trained = [sample.weight != 0 for sample in samples]
    entropy_N = np.concatenate([values[rows] for values, rows in zip(entropies, trained, strict=True)])
    kept_N = forking(torch.from_numpy(entropy_N), algorithm.entropy_quantile).numpy()
    ends = np.cumsum([np.count_nonzero(rows) for rows in trained])
    found = []
    for sample, rows, kept in zip(samples, trained, np.split(kept_N, ends[:-1]), strict=True):
        column = np.zeros(rows.size)
        column[rows] = kept
        found.append(replace(sample, extra={**sample.extra, "forking": column}))
    return found


def entropy_tokens(algorithm: Algorithm, samples: Sequence[Sample]) -> float:
    """Tokens of a whole step over which an entropy bonus is a mean: the trained ones, or those that a high-entropy mask keeps.  1
    where there are none."""
    columns = [sample.extra["forking"] if algorithm.needs_forking else sample.weight for sample in samples]
    return float(max(sum(map(np.count_nonzero, columns)), 1))


def policy_loss(
    policy: Policy,
    algorithm: Algorithm,
    batch: Batch,
    *,
    entropy_tokens: float,
    critic: Critic | None = None,
    teacher: Teacher | None = None,
    samples: Sequence[Sample] = (),
) -> tuple[Tensor, Tensor]:
    """The algorithm's loss of a packed batch, differentiable, and the log-probs (M,) of its trained tokens.

    For plain GRPO, with rho = exp(log-prob now - log-prob when sampled) and A the completion's advantage:
    `sum over tokens of weight x (-min(rho A, clip(rho, 1 - e, 1 + e) A) + beta KL)`; the parts stand in `algorithms/losses.py`.

    entropy_tokens: see `batch_loss`.   critic: on the policy's own backbone, whose loss is added.
    teacher: with what the batch was packed from, the samples.
    """
    loss = batch_loss(algorithm, batch, entropy_tokens=entropy_tokens)

    def beside(hidden_MD: Tensor, logp_M: Tensor) -> Tensor:
        value = hidden_MD.new_zeros((), dtype=logp_M.dtype)
        if critic is not None:
            value = value + critic.loss(batch, critic.values(hidden_MD))
        if teacher is not None and algorithm.divergence is not None:
            value = value + teacher.loss(policy, algorithm, batch, samples, hidden_MD, logp_M)
        return value

    return token_loss(
        policy,
        batch,
        loss,
        learn=algorithm.reads_tokens or "lm" in batch.extra_P,
        beside=beside if critic or teacher else None,
        separable=algorithm.token_level,
        entropy=True,
        as_is=True,
    )


def batch_loss(algorithm: Algorithm, batch: Batch, *, entropy_tokens: float) -> TokenLoss:
    """The algorithm's loss of a packed batch as a function of the log-probs (and entropies) of its trained tokens.

    entropy_tokens: tokens of the whole step over which the entropy bonus is a mean (the function of that name).
    """
    rows_M, reference_P, lm_P = batch.trained_M, batch.reference_logp_P, batch.extra_P.get("lm")
    demonstrations = lm_P is not None and "forking" not in batch.extra_P
    forking_P = None
    if algorithm.needs_forking:
        forking_P = (torch.zeros_like(batch.weight_P) if demonstrations else batch.extra_P["forking"]) > 0

    def loss(logp_C: Tensor, entropy_C: Tensor | None, part: slice) -> Tensor:
        rows_C = rows_M[part]
        weight_C, shown = batch.weight_P[rows_C], None
        if lm_P is not None:  # nobody sampled demonstrations: no part of the algorithm is about them
            shown = (weight_C * lm_P[rows_C] * logp_C).sum()
            drawn_C = 1.0 - batch.extra_P["shown"][rows_C]
            weight_C = weight_C * drawn_C
            entropy_C = None if entropy_C is None else entropy_C * drawn_C
        behavior_C, mismatch = behavior(algorithm, batch, rows_C, logp_C)
        terms = Terms(
            logp_M=logp_C,
            behavior_logp_M=behavior_C,
            sampler_logp_M=batch.behavior_logp_P[rows_C],
            mismatch=mismatch,
            advantage_M=batch.advantage_P[rows_C],
            segment_M=batch.sequence_P[rows_C],
            segments=batch.layout.segments,
            reference_logp_M=None if reference_P is None else reference_P[rows_C],
            entropy_M=entropy_C,
            forking_M=None if forking_P is None else forking_P[rows_C],
        )
        value = algorithm.total(terms, weight_C, entropy_tokens)
        return value if shown is None else value - shown

    return loss


def behavior(algorithm: Algorithm, batch: Batch, rows_C: Tensor, logp_C: Tensor) -> tuple[Tensor, Mismatch | None]:
    """The log-probs (C,) that ratios are taken against, and what corrects them where the sampler is not the policy before the step.

    Without a correction they are the sampler's own.  With one (another engine, older weights) they are the trainer's before the
    step: scored beforehand, or in the first pass the current ones; the correction weighs tokens by trainer over sampler.
    """
    sampler_C = batch.behavior_logp_P[rows_C]
    if algorithm.correction is None:
        return sampler_C, None
    scored_P = batch.extra_P.get("scored_logp")
    own_C = logp_C.detach() if scored_P is None else scored_P[rows_C]
    return own_C, algorithm.correction(own_C, sampler_C, batch.sequence_P[rows_C], batch.layout.segments)


def follow(number: int, group: GroupSettings, policy: Policy, reference: Policy | None, teacher: Teacher | None) -> None:
    """After step `number`: move the reference, if it is due, and a teacher that follows the policy."""
    if reference is not None and group.reference_refresh and number % group.reference_refresh == 0:
        refresh(reference, policy, group.reference_mix)
    if teacher is not None and teacher.ema and teacher.policy.model is not policy.model:
        refresh(teacher.policy, policy, teacher.ema)


def refresh(reference: Policy, policy: Policy, share: float) -> None:
    """Move the reference to the policy: `ref = share x theta + (1 - share) x ref` (TR-DPO, 2404.09656)."""
    with torch.no_grad():
        for kept, current in zip(reference.model.parameters(), policy.model.parameters(), strict=True):
            kept.lerp_(current.to(kept.dtype), share)


def first_pass(groups: Sequence[Scored], updates: Sequence[Update]) -> list[list[np.ndarray]]:
    """Per group and completion (n_i,): the log-probs that its first update saw; empty where nothing was computed."""
    return by_completion(groups, [(sample, logp) for one in updates for sample, logp in zip(one.samples, one.seen, strict=True)])
