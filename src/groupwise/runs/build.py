"""A recipe becomes a job: data, policy, rewards, engine, optimizer and the loop over them, put together in one place.

Everything cheap comes first (tokenizer, data, reward functions, plan), weights last, so that a recipe which cannot run fails before
anything large is loaded.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.algorithms.registry import Algorithm, describe, resolve
from groupwise.config.settings import ModelSettings, Recipe, RolloutSettings, is_online, positions_of
from groupwise.config.validation import STAGE
from groupwise.data.curriculum import Curriculum, Visits
from groupwise.data.load import Data, load_data, load_texts
from groupwise.data.order import Order
from groupwise.data.templates import Tools
from groupwise.data.tokenizers import make_tokenizer, with_chat_template
from groupwise.distributed import comm
from groupwise.environments.conversation import World
from groupwise.environments.environment import Source
from groupwise.errors import ConfigError
from groupwise.models.dropout import probabilities
from groupwise.models.lora import adapter_size, bare
from groupwise.models.policy import Blueprint, Policy, context_length, read_blueprint, resolve_device
from groupwise.models.scratch import scratch_model
from groupwise.models.shape import Shape
from groupwise.ops.kernels import absence
from groupwise.records import Prompt, Sampling, Step
from groupwise.rewards.compose import Rewards, build_rewards, no_rewards
from groupwise.rewards.model import POSITIONS
from groupwise.rewards.registry import MAKERS
from groupwise.rollout.asynchronous import PendingRollout, PrefetchedRollouts
from groupwise.rollout.engine import Engine
from groupwise.runs.engines import (
    agreeing,
    engine_lines,
    make_ahead,
    make_engine,
    mixed_engine,
    sampled_elsewhere,
    why_apart,
)
from groupwise.runs.plan import Lines, fitted, memory_lines, offline_plan, online_plan, scoring_memory
from groupwise.runs.policies import (
    critic_of,
    hold,
    largest_model,
    parameter_count,
    reference_of,
    shared_out,
    teacher_of,
    weightless,
)
from groupwise.runs.sizing import H100, Load, rank, rank_lines
from groupwise.runs.worlds import furnished, make_source, make_world, tools_of, with_own_reward, world_lines
from groupwise.training.critics import Critic
from groupwise.training.evaluate import Evaluation, evaluate
from groupwise.training.objectives import OBJECTIVES, Kind, language_model
from groupwise.training.offline import Validation, train_offline, validate
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.teachers import Teacher

Judged = Evaluation | Validation
"""What a policy does on held-out prompts, or what an objective says of held-out rows."""
Place = tuple[Mapping[str, Any], tuple[PendingRollout, ...]]
"""Of the data's order, and what has been drawn from it and not been trained on."""


@dataclass(kw_only=True, slots=True, eq=False)
class Learner:
    """What a step changes, and what it is held against."""

    recipe: Recipe
    policy: Policy
    optimizer: Optimizer
    reference: Policy | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's tensors, and the weights of a reference that moves; as they are held, spread or whole."""
        moved = self.reference is not None and self.recipe.group.reference_refresh > 0
        reference = dict(self.reference.model.named_parameters()) if moved and self.reference is not None else {}
        return self.optimizer.tensors() | {f"reference.{name}": parameter.detach() for name, parameter in reference.items()}

    def restore(self, numbers: Mapping[str, Any], read: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Continue from a job's `numbers()` and `tensors()`, which `read` fills in; the weights are loaded with the policy."""
        self.optimizer.restore(numbers["optimizer"], read)
        with torch.no_grad():
            read({name: tensor for name, tensor in self.tensors().items() if name.startswith("reference.")})


@dataclass(kw_only=True, slots=True, eq=False)
class Job(Learner):
    """A run that is ready to go."""

    plan: Lines
    """What will happen, as label and text."""
    steps: int
    order: Order
    loop: Callable[[int], Iterator[Step]]
    """Steps done before -> the steps that are left."""
    judge: Callable[[bool], Judged | None]
    """Evaluates on what is held out: all of it if True, else as much as `eval` says, of the validation part where there is one.
    None if nothing is held out."""
    prompts: tuple[Prompt, ...] = ()
    """What an online objective draws from."""
    critic: Critic | None = None
    teacher: Teacher | None = None
    engine: Engine | None = None
    """What samples, where the objective or its evaluation does."""
    world: World | None = None
    """Who answers what it samples."""
    ahead: PrefetchedRollouts = field(default_factory=PrefetchedRollouts)
    """What has been sampled, or begun to be, for steps to come."""
    closing: list[Callable[[], None]] = field(default_factory=list)

    def place(self) -> Place:
        """Where the run stands in its data."""
        return self.order.state(), self.ahead.pending()

    @property
    def taken(self) -> int:
        """Optimizer steps of everything that is trained: if it is another number, weights have changed."""
        return self.optimizer.taken + (0 if self.critic is None else self.critic.optimizer.taken)

    def numbers(self, place: Place | None = None) -> dict[str, Any]:
        """What the next step depends on beside the weights and `tensors`.  place: if not the present one."""
        order, pending = place or self.place()
        found = {"optimizer": self.optimizer.numbers(), "order": order, "ahead": [begun.state() for begun in pending]}
        return found if self.critic is None else found | {"critic": self.critic.optimizer.numbers()}

    def tensors(self) -> dict[str, Tensor]:
        """See `Learner`; also the weights of a critic and of a policy's former self."""
        found = Learner.tensors(self) | {f"teacher.{name}": parameter.detach() for name, parameter in self._taught_by_itself()}
        if self.critic is not None:
            found |= {f"critic.{name}": parameter.detach() for name, parameter in self.critic.module.named_parameters()}
            found |= _of_critic(self.critic.optimizer.tensors())
        return found

    def _taught_by_itself(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of a teacher that are the policy's of some time: they are in no checkpoint of their own."""
        teacher = self.teacher
        if teacher is not None and self.recipe.teacher.path is None and teacher.policy.model is not self.policy.model:
            yield from teacher.policy.model.named_parameters()

    def restore(self, numbers: Mapping[str, Any], read: Callable[[Mapping[str, Tensor]], None]) -> None:
        """See `Learner`; also where the run stands in its data."""
        Learner.restore(self, numbers, read)
        self.order.restore(numbers["order"])
        self.ahead.restore(numbers.get("ahead", ()))
        if self.critic is not None:
            self.critic.optimizer.restore(numbers["critic"], lambda tensors: read(_of_critic(tensors)))
        with torch.no_grad():
            read({name: tensor for name, tensor in self.tensors().items() if name.startswith(("critic.", "teacher."))})

    def close(self) -> None:
        """End reward workers and what samples; each of them, also if another one raises."""
        with ExitStack() as stack:
            for close in reversed(self.closing):
                stack.callback(close)


@contextmanager
def _closed_on_error(*closing: Callable[[], None]) -> Iterator[None]:
    """While a job is put together: what has been started ends if it comes to nothing."""
    with ExitStack() as stack:
        for close in closing:
            stack.callback(close)
        yield
        stack.pop_all()


def _of_critic(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a critic's optimizer by names that are nobody else's."""
    return {f"critic_optimizer.{name}": tensor for name, tensor in tensors.items()}


def make_job(recipe: Recipe, *, resume: Path | None = None, reference: Path | None = None) -> Job:
    """Put a recipe together.

    resume: a policy folder to continue with instead of the recipe's model; of an adapter only what was trained is there.
    reference: the folder with the weights that the policy had before its first step, where the algorithm needs them.
    Raises ConfigError, DataError or Diverged before the first step.
    """
    recipe = furnished(recipe)
    blueprint = blueprint_of(recipe, resume if recipe.model.lora is None else None)
    recipe = shared_out(recipe, blueprint)
    maker = _online_job if is_online(recipe.objective) else _dataset_job
    return maker(fitted(recipe, shape_of(recipe, blueprint)), blueprint, reference, resume)


def make_learner(
    recipe: Recipe, blueprint: Blueprint, algorithm: Algorithm, *, reference: Path | None = None, resume: Path | None = None
) -> Learner:
    """Policy, reference and optimizer of an online recipe.   reference, resume: see `make_job`."""
    policy = hold(recipe, blueprint, language_model, resume)
    anchor = None
    if algorithm.needs_reference:
        anchor = bare(policy) if recipe.model.lora is not None else reference_of(recipe, policy, reference)
    assert recipe.steps is not None
    learning = recipe.steps - (recipe.critic.pretrain if algorithm.needs_value else 0)
    updates = learning * recipe.group.updates_per_rollout * recipe.group.minibatches
    return Learner(recipe=recipe, policy=policy, optimizer=Optimizer(policy.model, recipe.optimizer, updates), reference=anchor)


def plan_of(
    recipe: Recipe, scorers: Sequence[Recipe] = (), *, world: int | None = None, config: Mapping[str, Any] | None = None
) -> Lines:
    """The plan of a run, without loading its weights.

    scorers: recipes of reward models that it will use and that do not exist yet; `recipe.rewards` then leaves them out.
    world: so many processes instead of those that are running.   config: of another model (transformers', as a mapping).
    """
    recipe = furnished(recipe)
    blueprint = blueprint_of(recipe, None)
    if config is not None:
        blueprint = replace(blueprint, config=dict(config), context=context_length(dict(config)))
    recipe = fitted(recipe, shape_of(recipe, blueprint))
    prepared = _Prepared.of(recipe, blueprint, [blueprint_of(scorer, None) for scorer in scorers], world)
    for close in prepared.closing:
        close()
    return prepared.plan


def shape_of(recipe: Recipe, blueprint: Blueprint) -> Shape:
    """The sizes of a recipe's model."""
    return Shape.of(blueprint.config, parameter_count(blueprint), dtype=recipe.model.dtype)


def blueprint_of(recipe: Recipe, resume: Path | None) -> Blueprint:
    """Tokenizer, configuration and a way to load the weights, of a checkpoint or of a model from scratch."""
    if resume is not None:
        return read_blueprint(replace(recipe.model, path=str(resume), scratch=None))
    if recipe.model.path is not None:
        return read_blueprint(recipe.model)
    scratch = recipe.model.scratch
    assert scratch is not None
    tokenizer = make_tokenizer(
        scratch.tokenizer, load_texts(recipe.data, recipe.seed) if scratch.tokenizer.startswith("bpe") else ()
    )
    tokenizer = with_chat_template(tokenizer, recipe.model.chat_template)
    model = scratch_model(
        scratch,
        vocabulary=len(tokenizer),
        eos_ids=(tokenizer.eos_token_id,),  # type: ignore[arg-type]
        pad_id=tokenizer.pad_token_id,  # type: ignore[arg-type]
        bos_id=tokenizer.bos_token_id,  # type: ignore[arg-type]
        seed=recipe.seed,
    )
    if recipe.model.dtype == "bfloat16":
        # Parameters only, as from_pretrained does: `model.to` would round the rotary frequencies too.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    eos = (int(tokenizer.eos_token_id),)  # type: ignore[arg-type]
    return Blueprint(tokenizer=tokenizer, config=model.config.to_dict(), eos_ids=eos, context=scratch.context, load=lambda: model)


def sampling_of(settings: RolloutSettings, **changes: Any) -> Sampling:
    """The sampling of a recipe's rollouts."""
    sampling = Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        max_new_tokens=settings.max_new_tokens,
        stop=settings.stop,
    )
    return replace(sampling, **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """What a job knows before weights are loaded."""

    prompts: Data[Prompt] | None
    rows: Data[Any]
    rewards: Rewards | None
    algorithm: Algorithm | None
    steps: int
    plan: Lines
    world: World | None = None

    @property
    def closing(self) -> list[Callable[[], None]]:
        """Ends what it has started."""
        return [one.close for one in (self.rewards, self.world) if one is not None]

    @classmethod
    def of(cls, recipe: Recipe, blueprint: Blueprint, scorers: Sequence[Blueprint] = (), world: int | None = None) -> _Prepared:
        source = make_source(recipe.environment)
        with _closed_on_error(*([] if source is None else [source.close])):
            recipe = with_own_reward(recipe, source)
            if is_online(recipe.objective):
                found = cls._online(recipe, blueprint, scorers, world, source)
            else:
                found = cls._dataset(recipe, blueprint, world, source)
            with _closed_on_error(*found.closing):
                answering = make_world(recipe, blueprint, source, sampling_of(recipe.rollout))
        return replace(found, world=answering, plan=[*found.plan, *world_lines(recipe, source)])

    @classmethod
    def _online(
        cls, recipe: Recipe, blueprint: Blueprint, scorers: Sequence[Blueprint], world: int | None, source: Source | None
    ) -> _Prepared:
        algorithm = resolve(recipe.objective, recipe.group, recipe.rollout.max_new_tokens)
        algorithm = sampled_elsewhere(algorithm, recipe.rollout)
        prompts = _prompts(recipe, blueprint, tools_of(source))
        lines = online_plan(recipe, len(prompts.train), len(prompts.held_out), len(prompts.validation))
        lines.insert(0, ("algorithm", algorithm_line(algorithm)))
        group = recipe.group
        load = Load(
            prompts=group.prompts_per_step,
            group=group.group_size,
            prompt_tokens=max(prompt.tokens.size for prompt in prompts.train),
            completion_tokens=recipe.rollout.max_new_tokens,
            budget=positions_of(recipe),
            rows=recipe.rollout.max_rows,
            passes=group.updates_per_rollout,
            minibatches=group.minibatches,
            reference=algorithm.needs_reference,
            recompute=recipe.model.gradient_checkpointing,
            adapter=adapter_count(recipe, blueprint),
            rewards=sum(scoring_memory(*one) for one in _scorers(recipe, scorers))
            + critic_memory(recipe, algorithm)
            + teacher_memory(recipe, algorithm, shape_of(recipe, blueprint)),
        )
        held = [*adapter_lines(recipe, blueprint), *precision_lines(recipe), *dropout_lines(recipe, blueprint)]
        held += _held(recipe, blueprint, load, world)
        rewards = None
        if not recipe.rewards and not algorithm.needs_reward:
            rewards = no_rewards()
        elif recipe.rewards or not scorers:
            rewards = build_rewards(recipe.rewards, columns=list(prompts.train[0].row), tokenizer=blueprint.tokenizer)
            with _closed_on_error(rewards.close):
                _check_credit(algorithm, rewards, source)
                held += _judges(rewards)
        assert recipe.steps is not None
        return cls(
            prompts=prompts,
            rows=prompts,
            rewards=rewards,
            algorithm=algorithm,
            steps=recipe.steps,
            plan=[
                *lines,
                *held,
                ("read", str(prompts.report)),
                *(("warning", text) for text in prompts.report.warnings),
            ],
        )

    @classmethod
    def _dataset(cls, recipe: Recipe, blueprint: Blueprint, world: int | None, source: Source | None) -> _Prepared:
        kind = OBJECTIVES[recipe.objective]
        rows = kind.load(recipe, blueprint, tools_of(source))
        tokens = sum(len(row) for row in rows.train) / max(len(rows.train), 1)
        prompts = _prompts(recipe, blueprint, tools_of(source), train=False) if recipe.rewards and kind.samples else None
        judged = prompts or rows
        lines, steps = offline_plan(recipe, len(rows.train), len(judged.held_out), tokens, len(judged.validation))
        load = Load(
            prompts=recipe.batch_size,
            group=1,
            prompt_tokens=math.ceil(tokens * 1.2),  # a row that is longer than the mean
            completion_tokens=0,
            budget=positions_of(recipe),
            recompute=recipe.model.gradient_checkpointing,
            adapter=adapter_count(recipe, blueprint),
        )
        lines = [("objective", kind.title), *lines, *adapter_lines(recipe, blueprint), *precision_lines(recipe)]
        lines += dropout_lines(recipe, blueprint)
        lines += _held(recipe, blueprint, load, world)
        columns = list(prompts.held_out[0].row) if prompts is not None and prompts.held_out else []
        rewards = build_rewards(recipe.rewards, columns=columns, tokenizer=blueprint.tokenizer) if columns else None
        if rewards is not None:
            with _closed_on_error(rewards.close):
                lines += _judges(rewards)
        plan = [*lines, ("read", str(rows.report)), *(("warning", text) for text in rows.report.warnings)]
        return cls(prompts=prompts, rows=rows, rewards=rewards, algorithm=None, steps=steps, plan=plan)


def _judges(rewards: Rewards) -> Lines:
    """Where each reward function runs, and what ends a call that does not come back."""
    return [("reward", line) for line in rewards.plan()]


def _held(recipe: Recipe, blueprint: Blueprint, load: Load, world: int | None) -> Lines:
    """What the process, or each of several, holds and does in a step; where `world` is only planned, also how long that takes."""
    shape = shape_of(recipe, blueprint)
    count = comm.world().size if world is None else world
    sharding = comm.ShardingConfig.of(recipe.parallel).decided(largest_model(recipe, blueprint), count)
    if count == 1:
        found = rank(shape, load, world=1, sharded="ddp", shards=1, prompts=load.prompts).memory
        lines = [("micro-batches", f"at most {load.budget:,} packed positions"), *memory_lines(found)]
        if resolve_device(recipe.model).type == "cpu" and (reason := absence()):
            lines.append(("kernels", f"torch's own, more slowly: {reason}"))
        return lines
    return rank_lines(
        shape,
        load,
        world=count,
        sharded=sharding.name,
        shards=sharding.shards or count,
        offload=sharding.offload,
        device=None if world is None else H100,
    )


def _scorers(recipe: Recipe, planned: Sequence[Blueprint]) -> Iterator[tuple[Shape, int]]:
    """Shape and micro-batch of every reward model of a recipe."""
    for reward in recipe.rewards:
        if reward.function in MAKERS:
            blueprint = read_blueprint(ModelSettings(path=str(reward.args.get("path"))))
            size = int(reward.args.get("tokens_per_microbatch", POSITIONS))
            yield Shape.of(blueprint.config, parameter_count(blueprint), dtype=str(reward.args.get("dtype", "float32"))), size
    for blueprint in planned:
        yield Shape.of(blueprint.config, parameter_count(blueprint), dtype="float32"), POSITIONS


def _check_credit(algorithm: Algorithm, rewards: Rewards, source: Source | None) -> None:
    """Raises ConfigError if a credit of steps has no step rewards to give out: of functions, or of an environment's turns."""
    if algorithm.needs_steps and not rewards.process and source is None:
        raise ConfigError(
            f"group.credit is process, but none of the rewards ({', '.join(rewards.names)}) rewards steps: use a function marked "
            "with @process_reward, the reward model with args: {steps: newline}, or an environment that rewards turns"
        )


def algorithm_line(algorithm: Algorithm) -> str:
    """An algorithm as its four parts."""
    parts = [describe(part) for part in (algorithm.credit, algorithm.ratio, algorithm.surrogate, algorithm.weights)]
    kl = f", KL {algorithm.kl.__name__} x {algorithm.beta} in the {algorithm.kl_place}" if algorithm.needs_reference else ", no KL"
    kl += "; a critic" if algorithm.needs_value else ""
    kl += f"; {describe(algorithm.divergence)} from a teacher" if algorithm.divergence is not None else ""
    kl += f"; the teacher's share in sampling {algorithm.mix:g}" if algorithm.mix else ""
    return f"{algorithm.name}: {' x '.join(parts)}{kl}; dead groups {algorithm.dead_groups}, truncated {algorithm.truncated}"


def critic_memory(recipe: Recipe, algorithm: Algorithm) -> int:
    """Bytes of a critic with a backbone of its own: weights, gradients and moments in float32; 0 where there is none yet."""
    path = recipe.critic.path
    if not algorithm.needs_value or path is None or path.startswith(STAGE):
        return 0
    return 16 * parameter_count(read_blueprint(ModelSettings(path=path)))


def teacher_memory(recipe: Recipe, algorithm: Algorithm, shape: Shape) -> int:
    """Bytes of a teacher's weights: of its checkpoint, or of a policy's former self where that is not under an adapter."""
    path, ema = recipe.teacher.path, recipe.teacher.ema
    if not algorithm.needs_teacher or (path or "").startswith(STAGE):
        return 0
    if path is not None:
        shape = shape_of(recipe, read_blueprint(ModelSettings(path=path)))
    elif ema == 1.0 or recipe.model.lora is not None:
        return 0
    return shape.parameters * shape.bytes_per_weight


def adapter_count(recipe: Recipe, blueprint: Blueprint) -> int:
    """Parameters of the adapter that a recipe trains, counted without weights; 0 if it trains none."""
    return 0 if recipe.model.lora is None else adapter_size(weightless(blueprint), recipe.model.lora)


ADAPTER_LR = 1e-5
"""Learning rate below which an adapter hardly moves: ten times as much is usual, where full training takes 1e-6."""


def adapter_lines(recipe: Recipe, blueprint: Blueprint) -> Lines:
    """What is trained where it is not the weights, for the plan, with a warning about a learning rate that belongs to those."""
    if recipe.model.lora is None:
        return []
    count, total, lr = adapter_count(recipe, blueprint), parameter_count(blueprint), recipe.optimizer.lr
    lines = [("adapter", f"{count:,} parameters beside {total:,} that stay as they are ({count / total:.2%})")]
    if lr < ADAPTER_LR:
        lines.append(("warning", f"optimizer.lr {lr:g} is one for training all weights; an adapter learns with about 1e-4"))
    return lines


def precision_lines(recipe: Recipe) -> Lines:
    """A warning where the processor has no products in `model.dtype` and computes them one number at a time."""
    lower, device = recipe.model.dtype != "float32", resolve_device(recipe.model)
    old = platform.machine() in ("x86_64", "AMD64") and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    if not (lower and old and device.type == "cpu"):
        return []
    cost = "an update takes about 19 times as long as in float32 (12.8 s for 0.68 s at 3 million parameters)"
    return [("warning", f"model.dtype {recipe.model.dtype}: this processor has no AVX-512, and {cost}: set model.dtype=float32")]


def dropout_lines(recipe: Recipe, blueprint: Blueprint) -> Lines:
    """What updates drop, and by which path attention is then computed.  Raises ConfigError if that is nothing or would be wrong."""
    if not recipe.model.dropout:
        return []
    found = probabilities(blueprint.config)
    if not found:
        raise ConfigError(
            "model.dropout is true, but the checkpoint's configuration drops nothing: write probabilities into its config.json "
            "(attention_dropout, say), or leave model.dropout out"
        )
    said = "in updates only: " + ", ".join(f"{name} {value:g}" for name, value in found.items())
    if any(name.startswith("att") for name in found) and recipe.model.attention != "single":
        said += "; attention runs in its explicit form, the only one that drops"
    lines = [("dropout", said)]
    if not is_online(recipe.objective):
        return lines
    engine = recipe.rollout.engine
    if engine.name not in ("native", "transformers") or engine.ahead:
        raise ConfigError(
            "model.dropout: where another engine or older weights have sampled, what the policy says of the same tokens corrects "
            "the ratios and tells wrong weights, and dropout changes it: set rollout.engine to native with ahead 0, or leave "
            "model.dropout out"
        )
    lines.append(
        ("warning", "model.dropout: nothing is dropped while sampling, so ratios are not 1 at the first update of a rollout")
    )
    return lines


def _prompts(recipe: Recipe, blueprint: Blueprint, tools: Tools | None, *, train: bool = True) -> Data[Prompt]:
    return load_data(
        recipe.data,
        blueprint.tokenizer,
        context=blueprint.context,
        max_new_tokens=recipe.rollout.max_new_tokens,
        seed=recipe.seed,
        tools=tools,
        train=train,
    )


def _judge(recipe: Recipe, engine: Engine, prepared: _Prepared) -> Callable[[bool], Judged | None]:
    prompts = prepared.prompts
    settings, rewards = recipe.eval, prepared.rewards
    sampling = sampling_of(
        recipe.rollout,
        temperature=settings.temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        max_new_tokens=settings.max_new_tokens or recipe.rollout.max_new_tokens,
    )

    def judge(whole: bool) -> Judged | None:
        judged = () if prompts is None else prompts.held_out if whole else prompts.watched[: settings.prompts]
        if not judged or rewards is None or not rewards.names:
            return None
        return evaluate(engine, rewards, judged, k=settings.k, sampling=sampling, seed=recipe.seed)

    return judge


def _order(recipe: Recipe, rows: int) -> Order:
    """The order of an online run's prompts."""
    data = recipe.data
    if data.retire or data.curriculum:
        return Curriculum(rows, recipe.seed, data.shuffle, retire=data.retire, strength=data.curriculum)
    return Order(rows, recipe.seed, data.shuffle)


def _accounted(steps: Iterator[Step], visits: Visits) -> Iterator[Step]:
    """Steps with what was sampled for them and thrown away."""
    for step in steps:
        yield replace(step, metrics={**step.metrics, **visits.account(step.groups)})


def _online_job(recipe: Recipe, blueprint: Blueprint, reference: Path | None, resume: Path | None) -> Job:
    prepared = _Prepared.of(recipe, blueprint)
    algorithm, prompts, rewards = prepared.algorithm, prepared.prompts, prepared.rewards
    assert algorithm is not None and prompts is not None and rewards is not None
    with _closed_on_error(*prepared.closing):
        learner = make_learner(recipe, blueprint, algorithm, reference=reference, resume=resume)
        policy, optimizer, anchor = learner.policy, learner.optimizer, learner.reference
        per_step = recipe.group.updates_per_rollout * recipe.group.minibatches
        critic = critic_of(recipe, policy, prepared.steps * per_step) if algorithm.needs_value else None
        teacher = teacher_of(recipe, policy) if algorithm.needs_teacher else None
        engine = make_engine(policy, recipe.rollout, prepared.world)
    with _closed_on_error(engine.close, *prepared.closing):
        sampler = mixed_engine(policy, teacher.policy, algorithm.mix, recipe.rollout) if teacher and algorithm.mix else engine
    beside: dict[str, Any] = {"reference": anchor, "critic": critic, "teacher": teacher}
    order = _order(recipe, len(prompts.train))
    ahead = make_ahead(recipe.rollout, prompts.train)
    visits = Visits(prompts.train, order, ahead=ahead.steps > 0)

    def judge(whole: bool) -> Judged | None:
        engine.set_version(optimizer.taken)  # it is not told where another one samples for training
        return _judge(recipe, engine, prepared)(whole)

    def loop(done: int) -> Iterator[Step]:
        sampler.set_version(optimizer.taken)
        steps = train_online(
            policy,
            algorithm,
            engine=sampler,
            rewards=rewards,
            draw=visits,
            optimizer=optimizer,
            group=recipe.group,
            sampling=sampling_of(recipe.rollout),
            budget=positions_of(recipe),
            steps=prepared.steps,
            done=done,
            **beside,
            ahead=ahead,
            checkpointing=recipe.model.gradient_checkpointing,
            seed=recipe.seed,
        )
        counted = rewards.counting(steps, done, prepared.steps)
        return _accounted(agreeing(counted, engine, lambda step: why_apart(step, policy, anchor, positions_of(recipe))), visits)

    return Job(
        recipe=recipe,
        plan=[*prepared.plan, *engine_lines(engine, ahead)],
        steps=prepared.steps,
        policy=policy,
        optimizer=optimizer,
        order=order,
        loop=loop,
        judge=judge,
        prompts=prompts.train,
        **beside,
        engine=engine,
        world=prepared.world,
        ahead=ahead,
        closing=[engine.close, *prepared.closing],
    )


def _dataset_job(recipe: Recipe, blueprint: Blueprint, reference: Path | None, resume: Path | None) -> Job:
    kind, prepared = OBJECTIVES[recipe.objective], _Prepared.of(recipe, blueprint)
    with _closed_on_error(*prepared.closing):
        return _dataset_learner(recipe, blueprint, kind, prepared, reference, resume)


def _dataset_learner(
    recipe: Recipe, blueprint: Blueprint, kind: Kind, prepared: _Prepared, reference: Path | None, resume: Path | None
) -> Job:
    policy = hold(recipe, blueprint, kind.model, resume)
    objective, budget = kind.objective(recipe), positions_of(recipe)
    rows, held_out, watched = prepared.rows.train, prepared.rows.held_out, prepared.rows.watched
    anchor = None
    if kind.anchor is not None:  # on resume by the weights that were saved then; until the first step they are the policy's
        anchor = policy if reference is None or not reference.exists() else reference_of(recipe, policy, reference)
        anchor = bare(policy) if recipe.model.lora is not None else anchor
        rows, held_out, watched = (tuple(kind.anchor(recipe, anchor, part)) for part in (rows, held_out, watched))
    optimizer = Optimizer(policy.model, recipe.optimizer, prepared.steps)
    order = Order(len(rows), recipe.seed, recipe.data.shuffle)
    batch_size = min(recipe.batch_size, len(rows))
    engine = make_engine(policy, recipe.rollout, prepared.world) if kind.samples else None

    def loop(done: int) -> Iterator[Step]:
        return train_offline(
            policy,
            objective,
            draw=lambda k: [rows[row] for _, row in order.take(k)],
            optimizer=optimizer,
            budget=budget,
            batch_size=batch_size,
            steps=prepared.steps,
            done=done,
            checkpointing=recipe.model.gradient_checkpointing,
        )

    def judge(whole: bool) -> Judged | None:
        if engine is not None and prepared.rewards is not None:
            engine.set_version(optimizer.taken)
            return _judge(recipe, engine, prepared)(whole)
        if not held_out:
            return None
        if not whole:
            limit = None if recipe.eval.batches is None else recipe.eval.batches * batch_size
            return validate(policy, objective, watched[:limit], budget=budget)
        rules = kind.rules(policy, rows, held_out) if kind.rules is not None else None
        return validate(policy, objective, held_out, budget=budget, beside=rules)

    return Job(
        recipe=recipe,
        plan=prepared.plan,
        steps=prepared.steps,
        policy=policy,
        optimizer=optimizer,
        order=order,
        loop=loop,
        judge=judge,
        reference=anchor,
        engine=engine,
        world=prepared.world,
        closing=[*([engine.close] if engine is not None else []), *prepared.closing],
    )
