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
from groupwise.engines import agreeing, closing_of, engine_lines, make_engine, sampled_elsewhere
from groupwise.errors import ConfigError
from groupwise.evaluate import Evaluation, evaluate
from groupwise.models.lora import AdaptedPolicy, adapter_size, bare
from groupwise.models.policy import Blueprint, Policy, make_policy, read_blueprint
from groupwise.models.scratch import scratch_model
from groupwise.models.sharded import shard
from groupwise.objective.credit import process
from groupwise.objectives import OBJECTIVES, language_model
from groupwise.offline import Validation, train_offline, validate
from groupwise.online import train_online
from groupwise.optim import Optimizer
from groupwise.plan import Lines, Shape, memory, memory_lines, offline_plan, online_plan, scoring_memory
from groupwise.records import Prompt, Sampling, Step
from groupwise.rewards.compose import Rewards, build_rewards
from groupwise.rewards.registry import MAKERS
from groupwise.rollout.engine import Engine
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
    """Evaluates on what is held out: all of it if True, else as much as `eval` says, of the validation part where there is one.
    None if nothing is held out."""
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

    resume: a policy folder to continue with instead of the recipe's model; of an adapter only what was trained is there.
    reference: the folder with the weights that the policy had before its first step, where the algorithm needs them.
    Raises ConfigError, DataError or Diverged before the first step.
    """
    blueprint = blueprint_of(recipe, resume if recipe.model.lora is None else None)
    maker = _online_job if recipe.objective in ALGORITHMS else _dataset_job
    return maker(recipe, blueprint, reference, resume)


def plan_of(recipe: Recipe, scorers: Sequence[Recipe] = ()) -> Lines:
    """The plan of a run, without loading its weights.

    scorers: recipes of reward models that it will use and that do not exist yet; `recipe.rewards` then leaves them out.
    """
    return _Prepared.of(recipe, blueprint_of(recipe, None), [blueprint_of(scorer, None) for scorer in scorers]).plan


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
        algorithm = sampled_elsewhere(algorithm, recipe.rollout)
        prompts = _prompts(recipe, blueprint)
        lines = online_plan(recipe, len(prompts.train), len(prompts.held_out), len(prompts.validation))
        lines.insert(0, ("algorithm", algorithm_line(algorithm)))
        group = recipe.group
        prompt_tokens = max(prompt.tokens.size for prompt in prompts.train)
        step_tokens = group.prompts_per_step * (prompt_tokens + group.group_size * recipe.rollout.max_new_tokens)
        shape = Shape.of(blueprint.config, parameter_count(blueprint), dtype=recipe.model.dtype)
        found = memory(
            shape,
            microbatch=min(recipe.optimizer.tokens_per_microbatch, step_tokens),
            rows=min(recipe.rollout.max_rows, group.prompts_per_step * group.group_size),
            prompts=group.prompts_per_step,
            prompt_tokens=prompt_tokens,
            completion_tokens=recipe.rollout.max_new_tokens,
            reference=algorithm.needs_reference,
            recompute=recipe.model.gradient_checkpointing,
            adapter=adapter_count(recipe, blueprint),
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
            plan=[*lines, *adapter_lines(recipe, blueprint), *memory_lines(found), ("dropped", str(prompts.report))],
        )

    @classmethod
    def _dataset(cls, recipe: Recipe, blueprint: Blueprint) -> _Prepared:
        kind = OBJECTIVES[recipe.objective]
        rows = kind.load(recipe, blueprint)
        tokens = sum(len(row) for row in rows.train) / max(len(rows.train), 1)
        prompts = _prompts(recipe, blueprint) if recipe.rewards and kind.samples else None
        judged = prompts or rows
        lines, steps = offline_plan(recipe, len(rows.train), len(judged.held_out), tokens, len(judged.validation))
        shape = Shape.of(blueprint.config, parameter_count(blueprint), dtype=recipe.model.dtype)
        microbatch = min(recipe.optimizer.tokens_per_microbatch, int(recipe.batch_size * tokens * 1.2))
        adapter = adapter_count(recipe, blueprint)
        found = memory(shape, microbatch=microbatch, recompute=recipe.model.gradient_checkpointing, adapter=adapter)
        columns = list(prompts.held_out[0].row) if prompts is not None and prompts.held_out else []
        rewards = build_rewards(recipe.rewards, columns=columns, tokenizer=blueprint.tokenizer) if columns else None
        lines = [("objective", kind.title), *lines, *adapter_lines(recipe, blueprint)]
        plan = [*lines, *memory_lines(found), ("dropped", str(rows.report))]
        return cls(prompts=prompts, rows=rows, rewards=rewards, algorithm=None, steps=steps, plan=plan)


def _scorers(recipe: Recipe, planned: Sequence[Blueprint]) -> Iterator[tuple[Shape, int]]:
    """Shape and micro-batch of every reward model of a recipe."""
    for reward in recipe.rewards:
        if reward.function in MAKERS:
            blueprint = read_blueprint(ModelSettings(path=str(reward.args.get("path"))))
            size = int(reward.args.get("tokens_per_microbatch", recipe.optimizer.tokens_per_microbatch))
            yield Shape.of(blueprint.config, parameter_count(blueprint), dtype=str(reward.args.get("dtype", "float32"))), size
    for blueprint in planned:
        shape = Shape.of(blueprint.config, parameter_count(blueprint), dtype="float32")
        yield shape, recipe.optimizer.tokens_per_microbatch


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
    return sum(parameter.numel() for parameter in _weightless(blueprint).parameters())


def adapter_count(recipe: Recipe, blueprint: Blueprint) -> int:
    """Parameters of the adapter that a recipe trains, counted without weights; 0 if it trains none."""
    return 0 if recipe.model.lora is None else adapter_size(_weightless(blueprint), recipe.model.lora)


def _weightless(blueprint: Blueprint) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    kept = {key: value for key, value in blueprint.config.items() if key != "model_type"}
    config = AutoConfig.for_model(blueprint.config["model_type"], **kept)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


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


def _prompts(recipe: Recipe, blueprint: Blueprint) -> Data[Prompt]:
    return load_data(
        recipe.data,
        blueprint.tokenizer,
        context=blueprint.context,
        max_new_tokens=recipe.rollout.max_new_tokens,
        seed=recipe.seed,
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
        if not judged or rewards is None:
            return None
        return evaluate(engine, rewards, judged, k=settings.k, sampling=sampling, seed=recipe.seed)

    return judge


def _online_job(recipe: Recipe, blueprint: Blueprint, reference: Path | None, resume: Path | None) -> Job:
    prepared = _Prepared.of(recipe, blueprint)
    algorithm, prompts, rewards = prepared.algorithm, prepared.prompts, prepared.rewards
    assert algorithm is not None and prompts is not None and rewards is not None
    policy = _resumed(language_model(recipe, blueprint), resume)
    anchor = None
    if algorithm.needs_reference and recipe.model.lora is None:
        anchor = spread(_reference(recipe.model, policy, reference), recipe.parallel)
    policy = spread(policy, recipe.parallel)
    if algorithm.needs_reference and anchor is None:
        anchor = bare(policy)
    engine = make_engine(policy, recipe.rollout)
    updates = prepared.steps * recipe.group.updates_per_rollout * recipe.group.minibatches
    optimizer = Optimizer(policy.model, recipe.optimizer, updates)
    order = Order(len(prompts.train), recipe.seed, recipe.data.shuffle)

    def loop(done: int) -> Iterator[Step]:
        engine.set_version(optimizer.taken)
        steps = train_online(
            policy,
            algorithm,
            engine=engine,
            rewards=rewards,
            draw=lambda k: [visit(prompts.train[row], epoch) for epoch, row in order.take(k)],
            optimizer=optimizer,
            group=recipe.group,
            sampling=sampling_of(recipe.rollout),
            budget=recipe.optimizer.tokens_per_microbatch,
            steps=prepared.steps,
            done=done,
            reference=anchor,
            checkpointing=recipe.model.gradient_checkpointing,
            seed=recipe.seed,
        )
        return agreeing(steps, engine)

    return Job(
        recipe=recipe,
        plan=[*prepared.plan, *process_lines(policy), *engine_lines(engine)],
        steps=prepared.steps,
        policy=policy,
        optimizer=optimizer,
        order=order,
        loop=loop,
        judge=_judge(recipe, engine, prepared),
        reference=anchor,
        engine=engine,
        closing=[rewards.close, *closing_of(engine)],
    )


def _resumed(policy: Policy, folder: Path | None) -> Policy:
    """The policy, whose adapter, where it has one, goes on from a checkpoint's; other policies are read from there."""
    if folder is not None and isinstance(policy, AdaptedPolicy):
        policy.restore(folder)
    return policy


def _reference(settings: ModelSettings, policy: Policy, folder: Path | None) -> Policy:
    """The weights before the first step: a copy of the policy, or on resume what was saved then.  Never loaded by name."""
    if folder is None or not folder.exists():
        return policy.frozen_copy()
    blueprint = read_blueprint(replace(settings, path=str(folder), scratch=None))
    kept = make_policy(blueprint.load(), blueprint.tokenizer, settings, probe=False)
    kept.model.requires_grad_(False)
    return kept


def _dataset_job(recipe: Recipe, blueprint: Blueprint, reference: Path | None, resume: Path | None) -> Job:
    kind, prepared = OBJECTIVES[recipe.objective], _Prepared.of(recipe, blueprint)
    policy = _resumed(kind.model(recipe, blueprint), resume)
    objective, budget = kind.objective(recipe), recipe.optimizer.tokens_per_microbatch
    rows, held_out, watched = prepared.rows.train, prepared.rows.held_out, prepared.rows.watched
    anchor = None
    if kind.anchor is not None:  # on resume by the weights that were saved then; until the first step they are the policy's
        anchor = policy if reference is None or not reference.exists() else _reference(recipe.model, policy, reference)
        anchor = bare(policy) if recipe.model.lora is not None else anchor
        rows, held_out, watched = (tuple(kind.anchor(recipe, anchor, part)) for part in (rows, held_out, watched))
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
        if not whole:
            limit = None if recipe.eval.batches is None else recipe.eval.batches * batch_size
            return validate(policy, objective, watched[:limit], budget=budget)
        rules = kind.rules(policy, rows, held_out) if kind.rules is not None else None
        return validate(policy, objective, held_out, budget=budget, beside=rules)

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
        closing=[*([prepared.rewards.close] if prepared.rewards is not None else []), *closing_of(engine)],
    )
