"""What is known of a run before weights are loaded: model, data, reward functions and the plan.

Everything cheap comes first, so that a recipe which cannot run fails before anything large is
loaded.  `plan_of` is all that `groupwise train --dry-run` needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.parts import fact
from groupwise.config.findings import Findings
from groupwise.config.resolve import resolve
from groupwise.config.settings import (
    CriticSettings,
    Recipe,
    RewardSettings,
    RolloutSettings,
    TeacherSettings,
)
from groupwise.config.texts import demand_values
from groupwise.config.validation import beyond_servers, demand_processes, without_teacher
from groupwise.data.encoding import columns_of, prompt_limit
from groupwise.data.load import Data, load_data
from groupwise.data.sources import read_rows
from groupwise.distributed import comm, layout
from groupwise.environments.conversation import Environment
from groupwise.environments.runtime import ToolRuntime
from groupwise.errors import ConfigError, DataError
from groupwise.models.fp8_blocks import demand_fp8
from groupwise.models.loading import Blueprint, context_length, resolve_device
from groupwise.records import Prompt, Sampling
from groupwise.rewards.compose import Rewards, build_rewards, no_rewards
from groupwise.rewards.registry import GOLD_COLUMNS, MODEL
from groupwise.rewards.user_functions import NO_COLUMN
from groupwise.runs.engines import demand_model, sampled_elsewhere
from groupwise.runs.environments import (
    environment_lines,
    make_environment,
    make_runtime,
    tools_of,
    with_environment_data,
    with_own_reward,
)
from groupwise.runs.images import check_settings, images_needed
from groupwise.runs.plan import (
    Lines,
    Load,
    algorithm_line,
    fitted,
    load_of,
    mean_length,
    model_lines,
    offline_plan,
    online_plan,
)
from groupwise.runs.run_models import (
    blueprint_of,
    demand_parts,
    hint_of,
    planned_quantization,
    shape_of,
    shared_out,
    weightless,
)
from groupwise.training.objectives import OBJECTIVES, Kind


def plan_of(
    recipe: Recipe,
    scorers: Sequence[Recipe] = (),
    *,
    world: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Lines:
    """The plan of a run, without loading its weights.

    scorers: recipes of reward models that it will use and that do not exist yet; `recipe.rewards`
        then leaves them out.
    world: so many processes instead of those that are running.   config: of another model
        (transformers', as a mapping)."""
    prepared = Prepared.of(recipe, scorers=scorers, world=world, config=config)
    prepared.close()
    return prepared.plan


def modelled(
    recipe: Recipe,
    resume: Path | None = None,
    *,
    shared: bool = True,
    config: Mapping[str, Any] | None = None,
) -> tuple[Recipe, Blueprint]:
    """How to load the model of a recipe, and the recipe with the sharding and the micro-batches
    that this model needs.

    resume: a policy folder to continue with instead of the recipe's model; of an adapter only what
        was trained is there.
    shared: decide the sharding for the processes that are running.   config: see `plan_of`.
    """
    blueprint = blueprint_of(recipe, resume if recipe.model.lora is None else None)
    if config is not None:
        blueprint = replace(blueprint, config=dict(config), context=context_length(dict(config)))
    demand_parts(blueprint, recipe.parallel)
    recipe = shared_out(recipe, blueprint) if shared else recipe
    demand_state(recipe)
    if recipe.model.fp8 is not None:
        several = shared and comm.world().size > 1
        demand_fp8(weightless(blueprint), spread=several and layout.spreads(recipe.parallel))
    shape = shape_of(blueprint, recipe.model.dtype)
    return fitted(recipe, shape, planned_quantization(recipe, blueprint)), blueprint


def demand_state(recipe: Recipe) -> None:
    """Refuse a form of the optimizer's state that the run cannot keep.  Raises ConfigError."""
    state, key = recipe.optimizer.state, "optimizer.state"
    if state is None:
        return
    if recipe.parallel.name in ("zero2", "zero3") or layout.splits(recipe.parallel):
        remedy = f"leave {key} out, or set parallel: ddp"
        if state == "host":
            remedy = "set parallel={name: zero3, offload: true}, which keeps shards on the host"
        raise ConfigError(
            f"{key}: {state} is kept for weights that a process has whole, and parallel shards"
            f" them: {remedy}",
            key=key,
        )
    device = recipe.model.device
    if state == "host" and device != "cuda" and resolve_device(recipe.model).type == "cpu":
        raise ConfigError(
            f"{key}: on a CPU the state lies in the host's memory already: leave it out, or set it"
            " to 8bit",
            key=key,
        )


def sampling_of(settings: RolloutSettings) -> Sampling:
    """The sampling of a recipe's rollouts."""
    return Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        max_new_tokens=settings.max_new_tokens,
        stop=settings.stop,
    )


def eval_sampling(recipe: Recipe) -> Sampling:
    """Return the sampling of a recipe's evaluations: at temperature 1, nothing truncated."""
    length = recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens
    return Sampling(max_new_tokens=length, stop=recipe.rollout.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a job knows before weights are loaded."""

    recipe: Recipe
    """With what its environment brings, its sharding and its micro-batches."""
    blueprint: Blueprint
    prompts: Data[Prompt] | None
    """The prompts of an online objective, or of a data-set objective whose model is judged by what
    it samples.
    """
    rows: Data[Any]
    """What is trained on: the prompts, or rows of a data set."""
    rewards: Rewards | None
    algorithm: Algorithm | None
    """None of a data-set objective."""
    steps: int
    load: Load
    """The work of a step."""
    plan: Lines
    environment: Environment | None
    started: ExitStack
    """Closes reward workers, the environment, and what a job adds."""

    @property
    def warnings(self) -> list[str]:
        """What to know before training, for whoever does not read the plan."""
        lost = self.rows.report.left_out
        warnings = [lost] if lost else []
        return warnings + [text for label, text in self.plan if label == "warning"]

    def close(self) -> None:
        """End everything that was started; each of it, also if another one raises."""
        self.started.close()

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        *,
        resume: Path | None = None,
        scorers: Sequence[Recipe] = (),
        world: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Prepared:
        """Read model, data and environment, make the reward functions and write the plan.

        Whoever calls it calls `close`.   resume: see `modelled`.   scorers, world, config: see
        `plan_of`.   Raises ConfigError, DataError.
        """
        demand_values(recipe)
        demand_processes(recipe, comm.world().size if world is None else world)
        recipe, blueprint = modelled(
            with_environment_data(recipe), resume, shared=world is None, config=config
        )
        with ExitStack() as started:
            runtime = _start_runtime(recipe, started)
            recipe = with_own_reward(recipe, runtime)
            kind = OBJECTIVES.get(recipe.objective)
            algorithm, hints = None, Lines()
            if kind is None:
                algorithm, prompts, plan, hints = _read_online(recipe, blueprint, runtime)
                rows, steps = prompts, recipe.steps or 0
            else:
                rows, prompts, plan, steps = _read_dataset(recipe, blueprint, runtime, kind)
            blueprint = replace(blueprint, images=images_needed(blueprint.images, rows, prompts))
            check_settings(recipe, blueprint.images)
            others = [blueprint_of(scorer, None) for scorer in scorers]
            load = load_of(recipe, blueprint, algorithm, rows, others)
            if prompts is not None:
                demand_model(recipe.rollout.engine, blueprint.config, cpu=load.cpu)
            plan += model_lines(recipe, blueprint, load, world)
            rewards = _make_rewards(recipe, blueprint, algorithm, prompts, awaited=bool(scorers))
            if rewards is not None:
                started.callback(rewards.close)
                _check_credit(algorithm, rewards, runtime)
                plan += [("reward", line) for line in rewards.plan()]
            plan.append(("read", str(rows.report)))
            plan += [("warning", text) for text in rows.report.warnings]
            plan += hints
            plan += environment_lines(recipe, runtime)
            return cls(
                recipe=recipe,
                blueprint=blueprint,
                prompts=prompts,
                rows=rows,
                rewards=rewards,
                algorithm=algorithm,
                steps=steps,
                load=load,
                plan=plan,
                environment=_start_environment(recipe, blueprint, runtime, started),
                started=started.pop_all(),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedEvaluation:
    """What the evaluation of a model knows before its weights are loaded."""

    blueprint: Blueprint
    prompts: Sequence[Prompt]
    rewards: Rewards
    environment: Environment | None
    longest: int
    """Tokens of the longest text of prompt and completion."""
    started: ExitStack
    """Closes reward workers and the environment."""

    @classmethod
    def of(cls, recipe: Recipe) -> PreparedEvaluation:
        """Read model, held-out prompts and environment of a recipe, and make its reward functions.

        It reads the sections `model`, `data`, `rewards`, `environment`, `rollout` and `eval`.
        Whoever calls it calls `started.close`.   Raises ConfigError, DataError.
        """
        demand_values(recipe)
        recipe = with_environment_data(recipe)
        blueprint = blueprint_of(recipe, None)
        with ExitStack() as started:
            runtime = _start_runtime(recipe, started)
            prompts = load_prompts(recipe, blueprint, runtime, train=False)
            blueprint = replace(blueprint, images=images_needed(blueprint.images, prompts))
            check_settings(recipe, blueprint.images)
            recipe = _with_judge(with_own_reward(recipe, runtime), prompts)
            rewards = build_rewards(
                recipe.rewards,
                columns=columns_of(prompts.held_out),
                tokenizer=blueprint.tokenizer,
                verdict=recipe.verdict,
            )
            started.callback(rewards.close)
            return cls(
                blueprint=blueprint,
                prompts=prompts.held_out,
                rewards=rewards,
                environment=_start_environment(recipe, blueprint, runtime, started),
                longest=longest_of(recipe, prompts),
                started=started.pop_all(),
            )


def _start_runtime(recipe: Recipe, started: ExitStack) -> ToolRuntime | None:
    """Start what makes the environments of a recipe; None if nobody answers."""
    runtime = make_runtime(recipe.environment)
    if runtime is not None:
        started.callback(runtime.close)
    return runtime


def _start_environment(
    recipe: Recipe, blueprint: Blueprint, runtime: ToolRuntime | None, started: ExitStack
) -> Environment | None:
    """Start what answers the policy's turns; None if nobody does."""
    sampling = sampling_of(recipe.rollout)
    environment = make_environment(recipe.environment, recipe.data, blueprint, runtime, sampling)
    if environment is not None:
        started.callback(environment.close)
    return environment


# ---------------------------------------------------------------- data and rewards


def algorithm_of(recipe: Recipe) -> Algorithm:
    """The algorithm of an online recipe, as its engine's samples need it.  Raises ConfigError."""
    algorithm = resolve(recipe.objective, recipe.group, recipe.rollout.max_new_tokens)
    return sampled_elsewhere(algorithm, recipe.rollout, fp8=recipe.model.fp8 is not None)


def load_prompts(
    recipe: Recipe, blueprint: Blueprint, runtime: ToolRuntime | None, *, train: bool = True
) -> Data[Prompt]:
    """The prompts of a recipe.   train: False leaves out those to train on."""
    return load_data(
        recipe.data,
        blueprint.tokenizer,
        context=blueprint.context,
        max_new_tokens=recipe.rollout.max_new_tokens,
        seed=recipe.seed,
        tools=tools_of(runtime),
        images=blueprint.images,
        train=train,
    )


def _read_online(
    recipe: Recipe, blueprint: Blueprint, runtime: ToolRuntime | None
) -> tuple[Algorithm, Data[Prompt], Lines, Lines]:
    """Algorithm and prompts, the first lines of the plan, and those about hints.

    Raises everything that is wrong with the recipe at once, its reward functions included.
    """
    wrong = Findings()
    algorithm, prompts, lines, hints = None, None, [], []
    with wrong.of("objective"):
        algorithm = algorithm_of(recipe)
    if algorithm is not None:
        _check_sections(recipe, algorithm, wrong)
    with wrong.of(_data_key(recipe)):
        prompts = load_prompts(_with_room(recipe, blueprint, wrong), blueprint, runtime)
    if prompts is not None:
        with wrong.of("group.prompts_per_step"):
            counts = len(prompts.train), len(prompts.held_out), len(prompts.validation)
            lines = online_plan(recipe, *counts, prompts.report.left_out)
        with wrong.of("teacher.hint"):
            hints = hint_lines(recipe.teacher.hint, prompts.train)
    if wrong.errors:
        _try_rewards(recipe, prompts, blueprint, wrong)
    wrong.settle()
    assert algorithm is not None
    assert prompts is not None
    return algorithm, prompts, [("algorithm", algorithm_line(algorithm)), *lines], hints


def _read_dataset(
    recipe: Recipe, blueprint: Blueprint, runtime: ToolRuntime | None, kind: Kind
) -> tuple[Data[Any], Data[Prompt] | None, Lines, int]:
    """Rows, held-out prompts where rewards judge the model, the first lines of the plan, and the
    number of steps.
    """
    wrong, rows = Findings(), None
    with wrong.of(_data_key(recipe)):
        rows = kind.load(recipe, blueprint, tools_of(runtime))
    if wrong.errors and kind.samples:
        _try_rewards(recipe, None, blueprint, wrong)
    wrong.settle()
    assert rows is not None
    prompts = None
    if recipe.rewards and kind.samples:
        prompts = load_prompts(recipe, blueprint, runtime, train=False)
    judged, tokens = prompts or rows, mean_length(rows)
    counts = len(judged.held_out), tokens, len(judged.validation)
    lines, steps = offline_plan(recipe, len(rows.train), *counts, rows.report.left_out)
    return rows, prompts, [("objective", kind.title), *lines], steps


def _data_key(recipe: Recipe) -> str:
    if recipe.data.path is not None:
        return "data.path"
    return "data" if recipe.data.task is None else "data.task"


def _with_room(recipe: Recipe, blueprint: Blueprint, wrong: Findings) -> Recipe:
    """The recipe.  Where prompt and completion cannot fit into the context, note that, and return
    one whose data can be read.
    """
    context, settings = blueprint.context, recipe.rollout
    with wrong.of("rollout.max_new_tokens"):
        prompt_limit(context, settings.max_new_tokens, recipe.data.max_prompt_tokens)
        return recipe
    return replace(recipe, rollout=replace(settings, max_new_tokens=max(1, context // 2)))


def _check_sections(recipe: Recipe, algorithm: Algorithm, wrong: Findings) -> None:
    """Note sections of the recipe that the algorithm does not read, and a teacher that cannot say
    what it reads of one.
    """
    for section, plain, needed in (
        ("critic", CriticSettings(), algorithm.needs.critic),
        ("teacher", TeacherSettings(), algorithm.needs.teacher),
    ):
        with wrong.of(section):
            if not needed and getattr(recipe, section) != plain:
                raise ConfigError(
                    f"{section}: nothing that is learnt from reads one: leave the section out"
                )
    with wrong.of("teacher.path"):
        if algorithm.needs.teacher and (message := without_teacher(recipe.teacher)):
            raise ConfigError(message)
    with wrong.of("teacher.servers"):
        if recipe.teacher.servers and (message := beyond_servers(algorithm)):
            raise ConfigError(message)


def _try_rewards(
    recipe: Recipe, prompts: Data[Prompt] | None, blueprint: Blueprint, wrong: Findings
) -> None:
    """Find what is wrong with the reward functions too of a recipe that is refused anyway.  Reward
    models are not loaded for it.
    """
    columns: list[str] | None = None if prompts is None else columns_of(prompts.train)
    if columns is None and recipe.data.path is not None:
        with suppress(ConfigError, DataError, OSError):
            data = recipe.data
            ours = {theirs: ours for ours, theirs in data.columns.items()}
            rows = read_rows(recipe.data.path, data.split, limit=data.limit)
            names = dict.fromkeys(str(name) for row in rows for name in row)
            columns = [ours.get(name, name) for name in names]
    functions = {
        place: reward for place, reward in enumerate(recipe.rewards) if reward.function != MODEL
    }
    if not functions:
        return
    further = Findings()
    with further.of("rewards"):
        build_rewards(
            list(functions.values()), columns=columns or (), tokenizer=blueprint.tokenizer
        ).close()
    for error in further.errors:
        first, _, rest = error.key.removeprefix("rewards.").partition(".")
        if first.isdigit():
            error.key = f"rewards.{list(functions)[int(first)]}.{rest}"
        if columns is not None or NO_COLUMN not in str(error):
            wrong.errors.append(error)


def _with_judge(recipe: Recipe, prompts: Data[Prompt]) -> Recipe:
    """The recipe of an evaluation: judged by the built-in accuracy where it names no reward, and
    the data have answers.
    """
    if not prompts.held_out:
        raise ConfigError("no held-out prompt is left to evaluate on: give data=FILE or task=NAME")
    if recipe.rewards:
        return recipe
    if not {*GOLD_COLUMNS} & {*columns_of(prompts.held_out)}:
        raise ConfigError("nothing says what is right: the data hold no answer; give rewards=NAME")
    return replace(recipe, rewards=(RewardSettings(function="accuracy"),))


def _make_rewards(
    recipe: Recipe,
    blueprint: Blueprint,
    algorithm: Algorithm | None,
    prompts: Data[Prompt] | None,
    *,
    awaited: bool,
) -> Rewards | None:
    """The reward functions; None where nothing is judged.   awaited: reward models are still to be
    trained.
    """
    if algorithm is not None and not recipe.rewards and not algorithm.needs.reward:
        return no_rewards()
    if prompts is None or (algorithm is not None and awaited and not recipe.rewards):
        return None
    columns = columns_of(prompts.held_out if algorithm is None else prompts.train)
    if algorithm is None and not columns:
        return None
    return build_rewards(
        recipe.rewards, columns=columns, tokenizer=blueprint.tokenizer, verdict=recipe.verdict
    )


def _check_credit(
    algorithm: Algorithm | None, rewards: Rewards, runtime: ToolRuntime | None
) -> None:
    """Raises ConfigError if a part reads rewards of steps and there are none: of functions, or of
    an environment's turns.
    """
    if algorithm is not None and algorithm.needs.steps and not rewards.process and runtime is None:
        by = (
            "group.credit"
            if "process" in fact(algorithm.credit, "reads")
            else "a further term of the loss"
        )
        raise ConfigError(
            f"{by} reads rewards of steps, but none of the rewards ({', '.join(rewards.names)})"
            " rewards any: use a function marked with @process_reward, the reward model with args:"
            " {steps: newline}, or an environment that rewards turns"
        )


def hint_lines(text: str | None, prompts: Sequence[Prompt]) -> Lines:
    """For the plan: the rows that get no hint.  Raises ConfigError if none gets one."""
    if text is None:
        return []
    without = [prompt.id for prompt in prompts if not hint_of(text, prompt.row)]
    if len(without) == len(prompts):
        columns = ", ".join(columns_of(prompts)) or "none"
        raise ConfigError(
            f"teacher.hint: {text!r} does not fit the rows, whose columns are {columns}"
        )
    if not without:
        return []
    return [
        (
            "warning",
            (
                f"{len(without)} of {len(prompts)} rows (first: {without[0]}) lack what"
                " teacher.hint reads: no hint there"
            ),
        )
    ]


def longest_of(recipe: Recipe, prompts: Data[Prompt]) -> int:
    """Tokens of the longest text of prompt and completion."""
    every = [*prompts.train, *prompts.held_out, *prompts.validation]
    longest = max((prompt.tokens.size for prompt in every), default=1)
    return longest + max(recipe.rollout.max_new_tokens, recipe.eval.max_new_tokens or 0)
