"""A recipe becomes a job: data, policy, rewards, engine, optimizer and the loop over them, put together in one place.

Everything cheap comes first (tokenizer, data, reward functions, plan), weights last, so that a recipe which cannot run fails before
anything large is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from groupwise import parallel
from groupwise.algorithms import ALGORITHMS, Algorithm, describe, resolve
from groupwise.data.load import Data, load_data, load_texts
from groupwise.data.order import Order
from groupwise.data.prompts import visit
from groupwise.data.tokenizers import make_tokenizer
from groupwise.errors import ConfigError
from groupwise.evaluate import Evaluation, evaluate
from groupwise.models.policy import Blueprint, Policy, make_policy, read_blueprint
from groupwise.models.scratch import scratch_model
from groupwise.models.sharded import GatheredEngine, ShardedPolicy, shard
from groupwise.objective.credit import process
from groupwise.objectives import OBJECTIVES, language_model
from groupwise.offline import Validation, train_offline, validate
from groupwise.online import train_online
from groupwise.optim import Optimizer
from groupwise.plan import Lines, Shape, fitted, memory, memory_lines, offline_plan, online_plan, positions_of, scoring_memory
from groupwise.records import Prompt, Sampling, Step
from groupwise.rewards.compose import Rewards, build_rewards
from groupwise.rewards.registry import MAKERS
from groupwise.rollout.engine import Engine
from groupwise.rollout.native import NativeEngine
from groupwise.rollout.transformers import TransformersEngine
from groupwise.settings import ModelSettings, Recipe, RolloutSettings

Judged = Evaluation | Validation
"""What a policy does on held-out prompts, or what an objective says of held-out rows."""


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """A run that is ready to go."""

    recipe: Recipe
    plan: Lines
    """What will happen, as label and text."""
    steps: int
    policy: Policy
    optimizer: Optimizer
    order: Order
    loop: Callable[[int], Iterator[Step]]
    """Steps done before -> the steps that are left."""
    judge: Callable[[bool], Judged | None]
    """Evaluates on what is held out: all of it if True, else as much as `eval` says; None if nothing is."""
    reference: Policy | None = None
    engine: Engine | None = None
    """What samples, where the objective or its evaluation does."""
    closing: list[Callable[[], None]] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Everything but the weights that the next step depends on."""
        moved = self.reference is not None and self.recipe.group.reference_refresh > 0
        reference = dict(self.reference.model.named_parameters()) if moved and self.reference is not None else {}
        return {
            "optimizer": self.optimizer.state(),
            "order": self.order.state(),
            "reference": {name: parallel.whole(parameter.detach()) for name, parameter in reference.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; the policy's weights are loaded with the policy."""
        self.optimizer.restore(state["optimizer"])
        self.order.restore(state["order"])
        if state["reference"]:
            assert self.reference is not None
            with torch.no_grad():
                for name, parameter in self.reference.model.named_parameters():
                    parameter.copy_(parallel.part_like(state["reference"][name], parameter))

    def close(self) -> None:
        """End reward workers."""
        for close in self.closing:
            close()


def make_job(recipe: Recipe, *, resume: Path | None = None, reference: Path | None = None) -> Job:
    """Put a recipe together.

    resume: a policy folder to continue with instead of the recipe's model.
    reference: the folder with the weights that the policy had before its first step, where the algorithm needs them.
    Raises ConfigError, DataError or Diverged before the first step.
    """
    blueprint = blueprint_of(recipe, resume)
    maker = _online_job if recipe.objective in ALGORITHMS else _dataset_job
    return maker(fitted(recipe, shape_of(recipe, blueprint)), blueprint, reference)


def plan_of(recipe: Recipe, scorers: Sequence[Recipe] = ()) -> Lines:
    """The plan of a run, without loading its weights.

    scorers: recipes of reward models that it will use and that do not exist yet; `recipe.rewards` then leaves them out.
    """
    blueprint = blueprint_of(recipe, None)
    recipe = fitted(recipe, shape_of(recipe, blueprint))
    return _Prepared.of(recipe, blueprint, [blueprint_of(scorer, None) for scorer in scorers]).plan


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


def make_engine(policy: Policy, settings: RolloutSettings) -> Engine:
    """The rollout engine that a recipe names."""
    if isinstance(policy, ShardedPolicy):
        return GatheredEngine(policy, lambda plain: make_engine(plain, settings))
    engines = {"native": NativeEngine, "transformers": TransformersEngine}
    return engines[settings.engine](policy, max_rows=settings.max_rows, keep_special_tokens=settings.keep_special_tokens)


SHARDED_FROM = 1_000_000_000
"""Parameters from which `parallel: auto` spreads a model over processes."""


def spread(policy: Policy, mode: str) -> Policy:
    """The policy as the processes of this run hold it, by `Recipe.parallel`.  A policy that is sharded is used up."""
    if mode == "auto":
        large = sum(parameter.numel() for parameter in policy.model.parameters()) >= SHARDED_FROM
        mode = "zero3" if large else "ddp"
    if parallel.world().size == 1 or mode == "ddp":
        return policy
    return shard(policy, reshard=mode == "zero3")


def process_lines(policy: Policy) -> Lines:
    """How many processes there are and what each holds, for the plan; nothing for a single one."""
    count = parallel.world().size
    held = "weights and optimizer state spread over them (FSDP2)" if policy.sharded else "all weights on each"
    return [("processes", f"{count}, {held}; gradients are summed")] if count > 1 else []


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """What a job knows before weights are loaded."""

    prompts: Data[Prompt] | None
    rows: Data[Any]
    rewards: Rewards | None
    algorithm: Algorithm | None
    steps: int
    plan: Lines

    @classmethod
    def of(cls, recipe: Recipe, blueprint: Blueprint, scorers: Sequence[Blueprint] = ()) -> _Prepared:
        if recipe.objective in ALGORITHMS:
            return cls._online(recipe, blueprint, scorers)
        return cls._dataset(recipe, blueprint)

    @classmethod
    def _online(cls, recipe: Recipe, blueprint: Blueprint, scorers: Sequence[Blueprint]) -> _Prepared:
        algorithm = resolve(recipe.objective, recipe.group, recipe.rollout.max_new_tokens)
        prompts = _prompts(recipe, blueprint)
        lines = online_plan(recipe, len(prompts.train), len(prompts.held_out))
        lines.insert(0, ("algorithm", algorithm_line(algorithm)))
        group = recipe.group
        prompt_tokens = max(prompt.tokens.size for prompt in prompts.train)
        step_tokens = group.prompts_per_step * (prompt_tokens + group.group_size * recipe.rollout.max_new_tokens)
        shape = shape_of(recipe, blueprint)
        found = memory(
            shape,
            microbatch=min(positions_of(recipe), step_tokens),
            rows=min(recipe.rollout.max_rows, group.prompts_per_step * group.group_size),
            prompts=group.prompts_per_step,
            prompt_tokens=prompt_tokens,
            completion_tokens=recipe.rollout.max_new_tokens,
            reference=algorithm.needs_reference,
            recompute=recipe.model.gradient_checkpointing,
            rewards=sum(scoring_memory(*one) for one in _scorers(recipe, scorers)),
        )
        rewards = None
        if recipe.rewards or not scorers:
            rewards = build_rewards(recipe.rewards, columns=list(prompts.train[0].row), tokenizer=blueprint.tokenizer)
            _check_credit(algorithm, rewards)
        assert recipe.steps is not None
        return cls(
            prompts=prompts,
            rows=prompts,
            rewards=rewards,
            algorithm=algorithm,
            steps=recipe.steps,
            plan=[*lines, *memory_lines(found, positions_of(recipe)), ("dropped", str(prompts.report))],
        )

    @classmethod
    def _dataset(cls, recipe: Recipe, blueprint: Blueprint) -> _Prepared:
        kind = OBJECTIVES[recipe.objective]
        rows = kind.load(recipe, blueprint)
        tokens = sum(len(row) for row in rows.train) / max(len(rows.train), 1)
        prompts = _prompts(recipe, blueprint) if recipe.rewards and kind.samples else None
        held_out = len(prompts.held_out) if prompts is not None else len(rows.held_out)
        lines, steps = offline_plan(recipe, len(rows.train), held_out, tokens)
        shape = shape_of(recipe, blueprint)
        microbatch = min(positions_of(recipe), int(recipe.batch_size * tokens * 1.2))
        found = memory(shape, microbatch=microbatch, recompute=recipe.model.gradient_checkpointing)
        columns = list(prompts.held_out[0].row) if prompts is not None and prompts.held_out else []
        rewards = build_rewards(recipe.rewards, columns=columns, tokenizer=blueprint.tokenizer) if columns else None
        plan = [("objective", kind.title), *lines, *memory_lines(found, positions_of(recipe)), ("dropped", str(rows.report))]
        return cls(prompts=prompts, rows=rows, rewards=rewards, algorithm=None, steps=steps, plan=plan)


def _scorers(recipe: Recipe, planned: Sequence[Blueprint]) -> Iterator[tuple[Shape, int]]:
    """Shape and micro-batch of every reward model of a recipe."""
    for reward in recipe.rewards:
        if reward.function in MAKERS:
            blueprint = read_blueprint(ModelSettings(path=str(reward.args.get("path"))))
            size = int(reward.args.get("tokens_per_microbatch", positions_of(recipe)))
            yield Shape.of(blueprint.config, parameter_count(blueprint), dtype=str(reward.args.get("dtype", "float32"))), size
    for blueprint in planned:
        shape = Shape.of(blueprint.config, parameter_count(blueprint), dtype="float32")
        yield shape, positions_of(recipe)


def _check_credit(algorithm: Algorithm, rewards: Rewards) -> None:
    """Raises ConfigError if a credit of steps has no step rewards to give out."""
    function = algorithm.credit.func if isinstance(algorithm.credit, partial) else algorithm.credit
    if function is process and not rewards.process:
        raise ConfigError(
            f"group.credit is process, but none of the rewards ({', '.join(rewards.names)}) rewards steps: use a function marked "
            "with @process_reward, or the reward model with args: {steps: newline}"
        )


def algorithm_line(algorithm: Algorithm) -> str:
    """An algorithm as its four parts."""
    parts = [describe(part) for part in (algorithm.credit, algorithm.ratio, algorithm.surrogate, algorithm.weights)]
    kl = f", KL {algorithm.kl.__name__} x {algorithm.beta} in the {algorithm.kl_place}" if algorithm.needs_reference else ", no KL"
    return f"{algorithm.name}: {' x '.join(parts)}{kl}; dead groups {algorithm.dead_groups}, truncated {algorithm.truncated}"


def parameter_count(blueprint: Blueprint) -> int:
    """Parameters of a model, counted without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kept = {key: value for key, value in blueprint.config.items() if key != "model_type"}
    config = AutoConfig.for_model(blueprint.config["model_type"], **kept)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


def _prompts(recipe: Recipe, blueprint: Blueprint) -> Data[Prompt]:
    return load_data(
        recipe.data,
        blueprint.tokenizer,
        context=blueprint.context,
        max_new_tokens=recipe.rollout.max_new_tokens,
        seed=recipe.seed,
    )


def _judge(recipe: Recipe, engine: Engine, prepared: _Prepared) -> Callable[[bool], Judged | None]:
    prompts: Sequence[Prompt] = prepared.prompts.held_out if prepared.prompts is not None else ()
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
        if not prompts or rewards is None:
            return None
        return evaluate(
            engine, rewards, prompts[: None if whole else settings.prompts], k=settings.k, sampling=sampling, seed=recipe.seed
        )

    return judge


def _online_job(recipe: Recipe, blueprint: Blueprint, reference: Path | None) -> Job:
    prepared = _Prepared.of(recipe, blueprint)
    algorithm, prompts, rewards = prepared.algorithm, prepared.prompts, prepared.rewards
    assert algorithm is not None and prompts is not None and rewards is not None
    policy = language_model(recipe, blueprint)
    anchor = _reference(recipe.model, policy, reference) if algorithm.needs_reference else None
    anchor = None if anchor is None else spread(anchor, recipe.parallel)
    policy = spread(policy, recipe.parallel)
    engine = make_engine(policy, recipe.rollout)
    updates = prepared.steps * recipe.group.updates_per_rollout * recipe.group.minibatches
    optimizer = Optimizer(policy.model, recipe.optimizer, updates)
    order = Order(len(prompts.train), recipe.seed, recipe.data.shuffle)

    def loop(done: int) -> Iterator[Step]:
        engine.set_version(optimizer.taken)
        return train_online(
            policy,
            algorithm,
            engine=engine,
            rewards=rewards,
            draw=lambda k: [visit(prompts.train[row], epoch) for epoch, row in order.take(k)],
            optimizer=optimizer,
            group=recipe.group,
            sampling=sampling_of(recipe.rollout),
            budget=positions_of(recipe),
            steps=prepared.steps,
            done=done,
            reference=anchor,
            checkpointing=recipe.model.gradient_checkpointing,
            seed=recipe.seed,
        )

    return Job(
        recipe=recipe,
        plan=[*prepared.plan, *process_lines(policy)],
        steps=prepared.steps,
        policy=policy,
        optimizer=optimizer,
        order=order,
        loop=loop,
        judge=_judge(recipe, engine, prepared),
        reference=anchor,
        engine=engine,
        closing=[rewards.close],
    )


def _reference(settings: ModelSettings, policy: Policy, folder: Path | None) -> Policy:
    """The weights before the first step: a copy of the policy, or on resume what was saved then.  Never loaded by name."""
    if folder is None or not folder.exists():
        return policy.frozen_copy()
    blueprint = read_blueprint(replace(settings, path=str(folder), scratch=None))
    kept = make_policy(blueprint.load(), blueprint.tokenizer, settings, probe=False)
    kept.model.requires_grad_(False)
    return kept


def _dataset_job(recipe: Recipe, blueprint: Blueprint, reference: Path | None) -> Job:
    kind, prepared = OBJECTIVES[recipe.objective], _Prepared.of(recipe, blueprint)
    policy = kind.model(recipe, blueprint)
    objective, budget = kind.objective(recipe), positions_of(recipe)
    rows, held_out = prepared.rows.train, prepared.rows.held_out
    anchor = None
    if kind.anchor is not None:  # on resume by the weights that were saved then; until the first step they are the policy's
        anchor = policy if reference is None or not reference.exists() else _reference(recipe.model, policy, reference)
        rows, held_out = (tuple(kind.anchor(recipe, anchor, part)) for part in (rows, held_out))
    same = anchor is policy
    policy = spread(policy, recipe.parallel)
    anchor = policy if same else anchor
    optimizer = Optimizer(policy.model, recipe.optimizer, prepared.steps)
    order = Order(len(rows), recipe.seed, recipe.data.shuffle)
    batch_size = min(recipe.batch_size, len(rows))
    engine = make_engine(policy, recipe.rollout) if kind.samples else None

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
        rules = kind.rules(policy, rows, held_out) if whole and kind.rules is not None else None
        limit = None if whole or recipe.eval.batches is None else recipe.eval.batches * batch_size
        return validate(policy, objective, held_out[:limit], budget=budget, beside=rules)

    return Job(
        recipe=recipe,
        plan=[*prepared.plan, *process_lines(policy)],
        steps=prepared.steps,
        policy=policy,
        optimizer=optimizer,
        order=order,
        loop=loop,
        judge=judge,
        reference=anchor,
        engine=engine,
        closing=[prepared.rewards.close] if prepared.rewards is not None else [],
    )
