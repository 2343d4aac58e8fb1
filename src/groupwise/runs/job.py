"""A recipe becomes a job: policy, engine, optimizer and the loop over them, made of what was
prepared (`prepared.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from groupwise.algorithms.algorithm import Algorithm
from groupwise.config.settings import Recipe, positions_of
from groupwise.data.curriculum import Curriculum, Visits
from groupwise.data.order import Order
from groupwise.data.tasks import breakdown_of
from groupwise.distributed import comm
from groupwise.models.loading import Blueprint
from groupwise.models.policy import Policy, without_adapter
from groupwise.models.shape import Shape
from groupwise.proof.fp8 import first_that_fit
from groupwise.proof.prove import prove
from groupwise.records import Prompt, Sampling, Step
from groupwise.rewards.compose import Rewards
from groupwise.rollout.engine import Engine
from groupwise.runs.compiling import with_blocks
from groupwise.runs.engines import (
    check_agreement,
    demand_colocated,
    engine_lines,
    engine_metrics,
    make_ahead,
    make_engine,
    sampler_of,
)
from groupwise.runs.images import check_models
from groupwise.runs.plan import Lines
from groupwise.runs.prepared import Prepared, eval_sampling, longest_of, sampling_of
from groupwise.runs.rollout_table import state_from_bytes, state_to_bytes
from groupwise.runs.run_models import blueprint_of, critic_of, hold, reference_of, teacher_of
from groupwise.training.critics import Critic
from groupwise.training.evaluate import Evaluation, evaluate
from groupwise.training.groups import PendingRollout, PrefetchedRollouts, SampledRollouts
from groupwise.training.objectives import OBJECTIVES, Kind, language_model
from groupwise.training.offline import Validation, train_offline, validate
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.stored_state import STATES
from groupwise.training.teachers import Teacher
from groupwise.training.work import Meter, has_experts

Judged = Evaluation | Validation
"""What a policy does on held-out prompts, or what an objective says of held-out rows."""
Place = tuple[Mapping[str, Any], tuple[PendingRollout, ...]]
"""The state of the data's order, and what was drawn from it and not yet trained on."""


@dataclass(kw_only=True, slots=True, eq=False)
class Learner:
    """What an optimizer step changes, and the models that it reads."""

    recipe: Recipe
    policy: Policy
    optimizer: Optimizer
    reference: Policy | None = None
    critic: Critic | None = None
    teacher: Teacher | None = None

    def optimizers(self) -> dict[str, tuple[str, Optimizer]]:
        """Return each optimizer and what the names of its tensors begin with, by its key in
        `numbers`.
        """
        optimizers = {"optimizer": ("", self.optimizer)}
        if self.critic is not None:
            optimizers["critic"] = ("critic_optimizer.", self.critic.optimizer)
        return optimizers

    def moving(self) -> dict[str, Module]:
        """Models beside the policy whose weights change and which only a checkpoint holds."""
        models: dict[str, Module] = {}
        if self.reference is not None and self.recipe.group.reference_refresh > 0:
            models["reference"] = self.reference.model
        if self.critic is not None:
            models["critic"] = self.critic.module
        if (
            self.teacher is not None
            and self.recipe.teacher.path is None
            and self.teacher.policy.model is not self.policy.model
        ):
            models["teacher"] = self.teacher.policy.model
        return models

    def weights(self) -> dict[str, Tensor]:
        """The weights of `moving`."""
        weights = {}
        for key, model in self.moving().items():
            for name, parameter in model.named_parameters():
                weights[f"{key}.{name}"] = parameter.detach()
        return weights

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside the policy: the optimizers' tensors, and `weights`;
        sharded or whole, as they are here.
        """
        tensors = {}
        for prefix, optimizer in self.optimizers().values():
            for name, tensor in optimizer.tensors().items():
                tensors[f"{prefix}{name}"] = tensor
        return tensors | self.weights()

    def restore(
        self, numbers: Mapping[str, Any], read: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        """Continue from a job's `numbers()` and `tensors()`, which `read` fills in; the policy's
        weights are loaded with it.
        """
        for key, (prefix, optimizer) in self.optimizers().items():
            optimizer.restore(
                numbers[key],
                lambda tensors, prefix=prefix: read(
                    {f"{prefix}{name}": one for name, one in tensors.items()}
                ),
            )
        with torch.no_grad():
            read(self.weights())


@dataclass(kw_only=True, slots=True, eq=False)
class Job(Learner):
    """A run that is ready to go."""

    prepared: Prepared
    lines: Lines = field(default_factory=list)
    """What the plan says beside what was prepared: engines, proofs."""
    order: Order
    engine: Engine | None = None
    """What samples, where the objective or its evaluation does."""
    ahead: PrefetchedRollouts = field(default_factory=PrefetchedRollouts)
    """What has been sampled, or begun to be, for steps to come."""
    watch: Callable[[int, int], None] | None = None
    """Called with the prompts that an evaluation has sampled, and with all of them."""

    def loop(self, done: int) -> Iterator[Step]:
        """Train, and yield the steps that are left behind `done` ones."""
        raise NotImplementedError

    def judge(self, whole: bool) -> Judged | None:
        """Evaluate on what is held out; None if nothing is.

        whole: on all of it, else on as much as `eval` says, of the validation part where there is
            one.
        """
        raise NotImplementedError

    @property
    def sampler(self) -> Engine:
        """The engine of a run that samples."""
        assert self.engine is not None
        return self.engine

    def _judge_completions(self, whole: bool) -> Evaluation | None:
        self.sampler.send_weights(self.optimizer.taken)
        prompts = self.prepared.prompts
        if prompts is None:
            return None
        asked = prompts.held_out
        if not whole:
            asked = prompts.watched[: self.recipe.eval.prompts]
        rewards = self.prepared.rewards
        if not asked or rewards is None or not rewards.names:
            return None
        recipe = self.prepared.recipe
        sampling = eval_sampling(recipe)
        return evaluate_prompts(recipe, rewards, self.sampler, asked, sampling, self.watch)

    @property
    def plan(self) -> Lines:
        """What will happen, as label and text."""
        return [*self.prepared.plan, *self.lines]

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.prepared.steps

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """What an online objective draws from."""
        prompts = self.prepared.prompts if self.prepared.algorithm is not None else None
        return () if prompts is None else prompts.train

    def data_state(self) -> Place:
        """Where the run stands in its data."""
        return self.order.state(), self.ahead.pending()

    @property
    def taken(self) -> int:
        """Optimizer steps of everything that is trained: if it is another number, weights have
        changed.
        """
        return sum(optimizer.taken for _, optimizer in self.optimizers().values())

    @property
    def exchanging(self) -> bool:
        """True while gradients of anything that is trained are summed over the processes
        (`Optimizer.exchanging`).
        """
        return any(optimizer.exchanging for _, optimizer in self.optimizers().values())

    def numbers(self, place: Place | None = None) -> dict[str, Any]:
        """What the next step depends on beside the weights and `tensors`.  place: if not the
        present one.
        """
        order, pending = place or self.data_state()
        trained = {key: optimizer.numbers() for key, (_, optimizer) in self.optimizers().items()}
        return trained | {
            "order": order,
            "ahead": [state_to_bytes(begun.state()) for begun in pending],
        }

    def restore(
        self, numbers: Mapping[str, Any], read: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        """`Learner.restore`, and where the run stands in its data."""
        Learner.restore(self, numbers, read)
        self.order.restore(numbers["order"])
        self.ahead.restore([state_from_bytes(state) for state in numbers.get("ahead", ())])

    @property
    def maker(self) -> Callable[[Recipe, Blueprint], Policy]:
        """What makes the model that is trained."""
        return language_model

    def go_back(
        self,
        folder: Path,
        numbers: Mapping[str, Any],
        read: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        """Take weights and optimizers back to those of a checkpoint; the data stays where it is.

        folder: of the policy.   numbers, read: see `restore`.   It holds the policy twice for a
        moment.
        """
        resume = folder if self.recipe.model.lora is None else None
        held = hold(self.recipe, blueprint_of(self.recipe, resume), self.maker, folder)
        weights = self.policy.model.state_dict()
        with torch.no_grad():
            for name, tensor in held.model.state_dict().items():
                weights[name].copy_(tensor)
        Learner.restore(self, numbers, read)

    def close(self) -> None:
        """End reward workers and what samples; each of them, also if another one raises."""
        self.prepared.close()


@dataclass(kw_only=True, slots=True, eq=False)
class OnlineJob(Job):
    """A run that learns from its own completions."""

    algorithm: Algorithm
    rewards: Rewards
    visits: Visits
    meter: Meter

    def loop(self, done: int) -> Iterator[Step]:
        """See `Job.loop`."""
        recipe, last = self.recipe, self.prepared.steps
        self.sampler.send_weights(self.optimizer.taken)
        self.rewards.reach(done, last)
        steps = train_online(
            self.policy,
            self.algorithm,
            self._rollouts(range(done + 1, last + 1)),
            self.optimizer,
            pretrain=0 if self.critic is None else self.critic.settings.pretrain,
            group=recipe.group,
            max_tokens_per_microbatch=positions_of(recipe),
            reference=self.reference,
            critic=self.critic,
            teacher=self.teacher,
            checkpointing=recipe.model.gradient_checkpointing,
        )
        for step in steps:
            self.rewards.reach(step.number, last)
            yield self._finish(step)

    def judge(self, whole: bool) -> Judged | None:
        """See `Job.judge`."""
        return self._judge_completions(whole)

    def _rollouts(self, numbers: range) -> SampledRollouts:
        return SampledRollouts(
            algorithm=self.algorithm,
            engine=self.sampler,
            rewards=self.rewards,
            draw=self.visits,
            group=self.recipe.group,
            sampling=sampling_of(self.recipe.rollout),
            steps=self.prepared.steps,
            numbers=numbers,
            ahead=self.ahead,
            seed=self.recipe.seed,
        )

    def _finish(self, step: Step) -> Step:
        """Check a step, and add its work and what was sampled for it and thrown away."""
        check_agreement(step, self.sampler, fp8=self.recipe.model.fp8 is not None)
        measured = self.meter.read(step)
        added = self.visits.account(step.groups) | engine_metrics(self.sampler)
        return replace(measured, metrics={**measured.metrics, **added})


@dataclass(kw_only=True, slots=True, eq=False)
class DatasetJob(Job):
    """A run that learns from the rows of a data set."""

    objective: Any
    """What `Kind.objective` makes."""
    kind: Kind
    rows: Sequence[Any]
    held_out: Sequence[Any]
    watched: Sequence[Any]
    """What is held out for evaluations during training."""

    @property
    def maker(self) -> Callable[[Recipe, Blueprint], Policy]:
        """See `Job.maker`."""
        return self.kind.model

    @property
    def batch_size(self) -> int:
        """Rows of a step."""
        return min(self.recipe.batch_size, len(self.rows))

    def loop(self, done: int) -> Iterator[Step]:
        """See `Job.loop`."""
        return train_offline(
            self.policy,
            self.objective,
            draw=self._draw,
            optimizer=self.optimizer,
            max_tokens_per_microbatch=positions_of(self.recipe),
            batch_size=self.batch_size,
            steps=self.prepared.steps,
            done=done,
            checkpointing=self.recipe.model.gradient_checkpointing,
        )

    def _draw(self, count: int) -> list[Any]:
        return [self.rows[row] for _, row in self.order.take(count)]

    def judge(self, whole: bool) -> Judged | None:
        """See `Job.judge`."""
        if self.engine is not None and self.prepared.rewards is not None:
            return self._judge_completions(whole)
        if not self.held_out:
            return None
        budget = positions_of(self.recipe)
        if whole:
            return validate(
                self.policy,
                self.objective,
                self.held_out,
                max_tokens_per_microbatch=budget,
            )
        watched = self.watched
        if self.recipe.eval.batches is not None:
            watched = watched[: self.recipe.eval.batches * self.batch_size]
        return validate(self.policy, self.objective, watched, max_tokens_per_microbatch=budget)


def make_job(recipe: Recipe, *, resume: Path | None = None, reference: Path | None = None) -> Job:
    """Put a recipe together.

    resume: a policy folder to continue with instead of the recipe's model; of an adapter only what
        was trained is there.
    reference: the folder with the weights that the policy had before its first step, where the
        algorithm needs them.
    Raises ConfigError, DataError or Diverged before the first step.
    """
    prepared = Prepared.of(recipe, resume=resume)
    try:
        if prepared.prompts is not None:
            demand_colocated(prepared.recipe.rollout.engine)
        maker = _dataset_job if prepared.algorithm is None else _online_job
        return maker(prepared, reference, resume)
    except BaseException:
        prepared.close()
        raise


def _engine(prepared: Prepared, policy: Policy) -> Engine:
    """What samples; it is closed with the rest of the job."""
    engine = make_engine(policy, prepared.recipe.rollout, prepared.environment)
    prepared.started.callback(engine.close)
    return engine


def make_learner(
    recipe: Recipe,
    blueprint: Blueprint,
    algorithm: Algorithm,
    *,
    reference: Path | None = None,
    resume: Path | None = None,
) -> Learner:
    """Policy, reference and optimizer of an online recipe.   reference, resume: see `make_job`."""
    policy = hold(recipe, blueprint, language_model, resume)
    anchor = None
    if algorithm.needs.reference:
        if recipe.model.lora is not None:
            anchor = without_adapter(policy)
        else:
            anchor = reference_of(recipe, policy, reference)
    assert recipe.steps is not None
    learning = recipe.steps - (recipe.critic.pretrain if algorithm.needs.critic else 0)
    updates = learning * recipe.group.updates_per_rollout * recipe.group.minibatches
    return Learner(
        recipe=recipe,
        policy=policy,
        optimizer=Optimizer(
            policy.model, recipe.optimizer, updates, STATES[recipe.optimizer.state]
        ),
        reference=anchor,
    )


def evaluate_prompts(
    recipe: Recipe,
    rewards: Rewards,
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    progress: Callable[[int, int], None] | None,
) -> Evaluation:
    """Evaluate a policy on prompts as the section `eval` of a recipe says.

    progress: see `evaluate`.
    """
    return evaluate(
        engine,
        rewards,
        prompts,
        k=recipe.eval.k,
        sampling=sampling,
        seed=recipe.seed,
        columns=breakdown_of(recipe.data.task),
        progress=progress,
    )


def _order(recipe: Recipe, rows: int) -> Order:
    """The order of an online run's prompts."""
    data = recipe.data
    if data.retire or data.curriculum:
        return Curriculum(
            rows, recipe.seed, data.shuffle, retire=data.retire, strength=data.curriculum
        )
    return Order(rows, recipe.seed, data.shuffle)


def _meter(
    recipe: Recipe,
    algorithm: Algorithm,
    policy: Policy,
    critic: Critic | None,
    teacher: Teacher | None,
) -> Meter:
    of_critic = of_teacher = None
    if critic is not None and not critic.shared:
        of_critic = Shape.of_policy(critic.policy)
    if teacher is not None and teacher.servers is None:
        of_teacher = Shape.of_policy(teacher.policy)
    return Meter(
        policy=Shape.of_policy(policy),
        critic=of_critic,
        values=critic is not None and critic.shared,
        teacher=of_teacher,
        updates=recipe.group.updates_per_rollout,
        diverging=algorithm.divergence is not None,
        recompute=recipe.model.gradient_checkpointing,
        threshold=algorithm.needs.forking,
        processes=comm.world().size,
        experts=has_experts(policy),
    )


def _online_job(prepared: Prepared, reference: Path | None, resume: Path | None) -> Job:
    recipe, algorithm = prepared.recipe, prepared.algorithm
    assert algorithm is not None
    assert prepared.prompts is not None
    assert prepared.rewards is not None
    learner = make_learner(
        recipe, prepared.blueprint, algorithm, reference=reference, resume=resume
    )
    policy, critic, teacher = learner.policy, None, None
    if algorithm.needs.critic:
        per_step = recipe.group.updates_per_rollout * recipe.group.minibatches
        critic = critic_of(recipe, policy, prepared.steps * per_step)
    if algorithm.needs.teacher:
        teacher = teacher_of(recipe, policy)
    check_models(
        prepared.blueprint.images,
        model=policy,
        critic=None if critic is None else critic.policy,
        teacher=None if teacher is None else teacher.policy,
    )
    policy, proofs = _proven(prepared, policy, critic, teacher)
    engine = _engine(prepared, policy)
    train = prepared.prompts.train
    order = _order(recipe, len(train))
    ahead = make_ahead(recipe.rollout, train)
    return OnlineJob(
        recipe=recipe,
        prepared=prepared,
        lines=[*engine_lines(engine, ahead), *proofs],
        policy=policy,
        optimizer=learner.optimizer,
        reference=learner.reference,
        critic=critic,
        teacher=teacher,
        algorithm=algorithm,
        rewards=prepared.rewards,
        engine=engine,
        order=order,
        ahead=ahead,
        visits=Visits(train, order, ahead=ahead.steps > 0),
        meter=_meter(recipe, algorithm, policy, critic, teacher),
    )


def _proven(
    prepared: Prepared, policy: Policy, critic: Critic | None, teacher: Teacher | None
) -> tuple[Policy, Lines]:
    """Prove what an online run computes with each of its models -> the policy as it is trained, and
    lines of the plan.

    Raises ConfigError.
    """
    recipe = prepared.recipe
    assert prepared.prompts is not None
    longest, again = longest_of(recipe, prepared.prompts), recipe.model.gradient_checkpointing
    sampler = sampler_of(recipe.rollout, conversations=prepared.environment is not None)
    exact = replace(policy, blocks=None)
    proofs = [("policy", prove(exact, longest=longest, sampler=sampler, recompute=again))]
    if critic is not None and not critic.shared:
        proofs.append(("critic", prove(critic.policy, longest=longest, recompute=again)))
    if teacher is not None and recipe.teacher.path is not None:
        proofs.append(("teacher", prove(teacher.policy, longest=longest, train=False)))
    asked = (prompt.tokens for prompt in prepared.prompts.train)
    prompts = first_that_fit(asked, positions_of(recipe))
    policy, compiling = with_blocks(
        policy, recipe.model.compile, longest=longest, recompute=again, prompts=prompts
    )
    if len(proofs) == 1:
        return policy, [proofs[0][1].line, *compiling]
    lines = Lines()
    for whose, proof in proofs:
        label, text = proof.line
        lines.append((label, f"{whose} {text}"))
    return policy, [*lines, *compiling]


def _dataset_job(prepared: Prepared, reference: Path | None, resume: Path | None) -> Job:
    recipe, kind = prepared.recipe, OBJECTIVES[prepared.recipe.objective]
    policy = hold(recipe, prepared.blueprint, kind.model, resume)
    check_models(prepared.blueprint.images, model=policy)
    rows, held_out, watched = prepared.rows.train, prepared.rows.held_out, prepared.rows.watched
    anchor = None
    if kind.anchor is not None:
        anchor = _anchor(recipe, policy, reference)
        rows = tuple(kind.anchor(recipe, anchor, rows))
        held_out = tuple(kind.anchor(recipe, anchor, held_out))
        watched = tuple(kind.anchor(recipe, anchor, watched))
    lengths = [len(row) for row in rows] + [len(row) for row in held_out]
    sampler, longest = None, max(lengths, default=1)
    if kind.samples and prepared.prompts is not None:
        sampler = sampler_of(recipe.rollout, conversations=prepared.environment is not None)
        longest = max(longest, longest_of(recipe, prepared.prompts))
    again = recipe.model.gradient_checkpointing
    exact = replace(policy, blocks=None)
    proof = prove(exact, longest=longest, sampler=sampler, recompute=again)
    asked = (row.prompt for row in prepared.rows.train)
    prompts = first_that_fit(asked, positions_of(recipe))
    policy, compiling = with_blocks(
        policy, recipe.model.compile, longest=longest, recompute=again, prompts=prompts
    )
    return DatasetJob(
        recipe=recipe,
        prepared=prepared,
        lines=[proof.line, *compiling],
        policy=policy,
        optimizer=Optimizer(
            policy.model, recipe.optimizer, prepared.steps, STATES[recipe.optimizer.state]
        ),
        reference=anchor,
        objective=kind.objective(recipe),
        kind=kind,
        rows=rows,
        held_out=held_out,
        watched=watched,
        order=Order(len(rows), recipe.seed, recipe.data.shuffle),
        engine=_engine(prepared, policy) if kind.samples else None,
    )


def _anchor(recipe: Recipe, policy: Policy, reference: Path | None) -> Policy:
    """Return the weights that rows are compared with: the policy's before its first step, which a
    resumed run has saved.
    """
    if recipe.model.lora is not None:
        return without_adapter(policy)
    if reference is None or not reference.exists():
        return policy
    return reference_of(recipe, policy, reference)
