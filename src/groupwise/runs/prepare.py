"""What a run knows before any weights are loaded: its data, its reward functions, its algorithm, and the plan in words.

`plan_of` is all that `groupwise train --dry-run` needs.  `job.py` makes a job of what is prepared here.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from groupwise.algorithms.parts import describe, fact
from groupwise.algorithms.resolve import resolve
from groupwise.algorithms.table import Algorithm
from groupwise.config.engines import engine_traits
from groupwise.config.recipes import demand_values, run_folder
from groupwise.config.settings import (
    CriticSettings,
    ModelSettings,
    Recipe,
    RewardSettings,
    RolloutSettings,
    TeacherSettings,
    positions_of,
)
from groupwise.config.validation import STAGE, beyond_servers
from groupwise.data.encoding import columns_of, prompt_limit
from groupwise.data.load import Data, load_data, load_texts
from groupwise.data.sources import read_rows
from groupwise.data.tokenizers import make_tokenizer, with_chat_template
from groupwise.distributed import comm, fsdp
from groupwise.environments.conversation import EpisodeWorld
from groupwise.environments.runtime import ToolRuntime
from groupwise.errors import ConfigError, DataError, Findings
from groupwise.models.loading import Blueprint, context_length, read_blueprint, resolve_device
from groupwise.models.lora import adapter_size
from groupwise.models.scratch import scratch_model
from groupwise.models.shape import Shape
from groupwise.ops.kernels import absence
from groupwise.records import Prompt, Sampling
from groupwise.rewards.compose import Rewards, build_rewards, no_rewards
from groupwise.rewards.model import POSITIONS
from groupwise.rewards.registry import GOLD_COLUMNS, MAKERS
from groupwise.rewards.user_functions import NO_COLUMN
from groupwise.runs.engines import sampled_elsewhere
from groupwise.runs.environments import make_runtime, make_world, tools_of, with_environment_data, with_own_reward, world_lines
from groupwise.runs.folder import FINAL
from groupwise.runs.plan import (
    Lines,
    Load,
    Sharding,
    fitted,
    memory_lines,
    offline_plan,
    online_plan,
    prepared_weights,
    process_lines,
    process_memory,
    scoring_memory,
)
from groupwise.runs.policies import hint_lines, largest_model, parameter_count, shared_out, weightless
from groupwise.runs.recorded import list_rollouts, read_step
from groupwise.training.objectives import OBJECTIVES, Kind
from groupwise.training.preferences import preference_rows
from groupwise.utils import files


def plan_of(
    recipe: Recipe, scorers: Sequence[Recipe] = (), *, world: int | None = None, config: Mapping[str, Any] | None = None
) -> Lines:
    """The plan of a run, without loading its weights.

    scorers: recipes of reward models that it will use and that do not exist yet; `recipe.rewards` then leaves them out.
    world: so many processes instead of those that are running.   config: of another model (transformers', as a mapping).
    """
    prepared = Prepared.of(recipe, scorers=scorers, world=world, config=config)
    prepared.close()
    return prepared.plan


def modelled(
    recipe: Recipe, resume: Path | None = None, *, shared: bool = True, config: Mapping[str, Any] | None = None
) -> tuple[Recipe, Blueprint]:
    """How to load the model of a recipe, and the recipe with the sharding and the micro-batches that this model needs.

    resume: a policy folder to continue with instead of the recipe's model; of an adapter only what was trained is there.
    shared: decide the sharding for the processes that are running.   config: see `plan_of`.
    """
    blueprint = blueprint_of(recipe, resume if recipe.model.lora is None else None)
    if config is not None:
        blueprint = replace(blueprint, config=dict(config), context=context_length(dict(config)))
    recipe = shared_out(recipe, blueprint) if shared else recipe
    return fitted(recipe, shape_of(blueprint, recipe.model.dtype)), blueprint


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


def shape_of(blueprint: Blueprint, dtype: str = "float32") -> Shape:
    """The sizes of a model."""
    return Shape.of(blueprint.config, parameter_count(blueprint), dtype=dtype)


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
    """The sampling of a recipe's evaluations: nothing is truncated."""
    length = recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens
    return Sampling(temperature=recipe.eval.temperature, max_new_tokens=length, stop=recipe.rollout.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a job knows before weights are loaded."""

    recipe: Recipe
    """With what its environment brings, its sharding and its micro-batches."""
    blueprint: Blueprint
    prompts: Data[Prompt] | None
    """Of an online objective, an evaluation, or a data-set objective whose model is judged by what it samples."""
    rows: Data[Any]
    """What is trained on: the prompts, or rows of a data set."""
    rewards: Rewards | None
    algorithm: Algorithm | None
    """None of a data-set objective and of an evaluation."""
    steps: int
    plan: Lines
    world: EpisodeWorld | None
    started: ExitStack
    """Closes reward workers, the environment, and what a job adds."""

    @property
    def warnings(self) -> list[str]:
        """What to know before training, for whoever does not read the plan."""
        lost = self.rows.report.left_out
        return [*([lost] if lost else []), *(text for label, text in self.plan if label == "warning")]

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
        train: bool = True,
    ) -> Prepared:
        """Read model, data and environment, make the reward functions and write the plan.   resume: see `modelled`.

        scorers, world, config: see `plan_of`.   train: False prepares an evaluation of the recipe's model on what is held out.
        Whoever calls it calls `close`.   Raises ConfigError, DataError.
        """
        demand_values(recipe)
        recipe, blueprint = modelled(with_environment_data(recipe), resume, shared=world is None, config=config)
        with ExitStack() as started:
            if (runtime := make_runtime(recipe.environment)) is not None:
                started.callback(runtime.close)
            recipe = with_own_reward(recipe, runtime)
            kind = OBJECTIVES.get(recipe.objective)
            algorithm, steps, lines, hints = None, 0, Lines(), Lines()
            if not train:
                rows = prompts = load_prompts(recipe, blueprint, runtime, train=False)
                recipe = _with_judge(recipe, prompts)
            elif kind is None:
                algorithm, prompts, lines, hints = _read_online(recipe, blueprint, runtime)
                rows, steps = prompts, recipe.steps or 0
            else:
                rows, prompts, lines, steps = _read_dataset(recipe, blueprint, runtime, kind)
            plan = Lines()
            if train:
                others = [blueprint_of(scorer, None) for scorer in scorers]
                plan = [*lines, *_model_lines(recipe, blueprint, _load(recipe, blueprint, algorithm, rows, others), world)]
            rewards = _make_rewards(recipe, blueprint, algorithm, prompts, awaited=bool(scorers))
            if rewards is not None:
                started.callback(rewards.close)
                _check_credit(algorithm, rewards, runtime)
                plan += [("reward", line) for line in rewards.plan()]
            plan += [("read", str(rows.report)), *(("warning", text) for text in rows.report.warnings), *hints]
            plan += world_lines(recipe, runtime)
            if (answering := make_world(recipe, blueprint, runtime, sampling_of(recipe.rollout))) is not None:
                started.callback(answering.close)
            return cls(
                recipe=recipe,
                blueprint=blueprint,
                prompts=prompts,
                rows=rows,
                rewards=rewards,
                algorithm=algorithm,
                steps=steps,
                plan=plan,
                world=answering,
                started=started.pop_all(),
            )


# ---------------------------------------------------------------- data and rewards


def algorithm_of(recipe: Recipe) -> Algorithm:
    """The algorithm of an online recipe, as its engine's samples need it.  Raises ConfigError."""
    algorithm = resolve(recipe.objective, recipe.group, recipe.rollout.max_new_tokens, recipe.critic)
    return sampled_elsewhere(algorithm, recipe.rollout)


def load_prompts(recipe: Recipe, blueprint: Blueprint, runtime: ToolRuntime | None, *, train: bool = True) -> Data[Prompt]:
    """The prompts of a recipe.   train: False leaves out those to train on."""
    return load_data(
        recipe.data,
        blueprint.tokenizer,
        context=blueprint.context,
        max_new_tokens=recipe.rollout.max_new_tokens,
        seed=recipe.seed,
        tools=tools_of(runtime),
        train=train,
    )


def _read_online(recipe: Recipe, blueprint: Blueprint, runtime: ToolRuntime | None) -> tuple[Algorithm, Data[Prompt], Lines, Lines]:
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
    """Rows, held-out prompts where rewards judge the model, the first lines of the plan, and the number of steps."""
    wrong, rows = Findings(), None
    with wrong.of(_data_key(recipe)):
        rows = kind.load(recipe, blueprint, tools_of(runtime))
    if wrong.errors and kind.samples:
        _try_rewards(recipe, None, blueprint, wrong)
    wrong.settle()
    assert rows is not None
    prompts = load_prompts(recipe, blueprint, runtime, train=False) if recipe.rewards and kind.samples else None
    judged, tokens = prompts or rows, _mean_length(rows)
    counts = len(judged.held_out), tokens, len(judged.validation)
    lines, steps = offline_plan(recipe, len(rows.train), *counts, rows.report.left_out)
    return rows, prompts, [("objective", kind.title), *lines], steps


def _mean_length(rows: Data[Any]) -> float:
    return sum(len(row) for row in rows.train) / max(len(rows.train), 1)


def _data_key(recipe: Recipe) -> str:
    return "data.path" if recipe.data.path is not None else "data.task" if recipe.data.task is not None else "data"


def _with_room(recipe: Recipe, blueprint: Blueprint, wrong: Findings) -> Recipe:
    """The recipe.  Where prompt and completion cannot fit into the context, note that, and return one whose data can be read."""
    context, settings = blueprint.context, recipe.rollout
    with wrong.of("rollout.max_new_tokens"):
        prompt_limit(context, settings.max_new_tokens, recipe.data.max_prompt_tokens)
        return recipe
    return replace(recipe, rollout=replace(settings, max_new_tokens=max(1, context // 2)))


def _check_sections(recipe: Recipe, algorithm: Algorithm, wrong: Findings) -> None:
    """Note sections of the recipe that the algorithm does not read, and servers that cannot say what it reads of a teacher."""
    for section, plain, needed in (
        ("critic", CriticSettings(), algorithm.needs_value),
        ("teacher", TeacherSettings(), algorithm.needs_teacher),
    ):
        with wrong.of(section):
            if not needed and getattr(recipe, section) != plain:
                raise ConfigError(f"{section}: nothing that is learnt from reads one: leave the section out")
    with wrong.of("teacher.servers"):
        if recipe.teacher.servers and (message := beyond_servers(algorithm)):
            raise ConfigError(message)


def _try_rewards(recipe: Recipe, prompts: Data[Prompt] | None, blueprint: Blueprint, wrong: Findings) -> None:
    """Of a recipe that is refused anyway: what is wrong with its reward functions too.  Reward models are not loaded for it."""
    columns: list[str] | None = None if prompts is None else columns_of(prompts.train)
    if columns is None and recipe.data.path is not None:
        with suppress(ConfigError, DataError, OSError):
            ours = {theirs: ours for ours, theirs in recipe.data.columns.items()}
            names = dict.fromkeys(str(name) for row in read_rows(recipe.data.path, recipe.data.split) for name in row)
            columns = [ours.get(name, name) for name in names]
    functions = {place: reward for place, reward in enumerate(recipe.rewards) if reward.function not in MAKERS}
    if not functions:
        return
    further = Findings()
    with further.of("rewards"):
        build_rewards(list(functions.values()), columns=columns or (), tokenizer=blueprint.tokenizer).close()
    for error in further.errors:
        first, _, rest = error.key.removeprefix("rewards.").partition(".")
        if first.isdigit():
            error.key = f"rewards.{list(functions)[int(first)]}.{rest}"
        if columns is not None or NO_COLUMN not in str(error):
            wrong.errors.append(error)


def _with_judge(recipe: Recipe, prompts: Data[Prompt]) -> Recipe:
    """The recipe of an evaluation: judged by the built-in accuracy where it names no reward, and the data have answers."""
    if not prompts.held_out:
        raise ConfigError("no held-out prompt is left to evaluate on: give data=FILE or task=NAME")
    if recipe.rewards:
        return recipe
    if not {*GOLD_COLUMNS} & {*columns_of(prompts.held_out)}:
        raise ConfigError("nothing says what is right: the data hold no answer; give rewards=NAME")
    return replace(recipe, rewards=(RewardSettings(function="accuracy"),))


def _make_rewards(
    recipe: Recipe, blueprint: Blueprint, algorithm: Algorithm | None, prompts: Data[Prompt] | None, *, awaited: bool
) -> Rewards | None:
    """The reward functions; None where nothing is judged.   awaited: reward models are still to be trained."""
    if algorithm is not None and not recipe.rewards and not algorithm.needs_reward:
        return no_rewards()
    columns = [] if prompts is None else columns_of(prompts.held_out if algorithm is None else prompts.train)
    if prompts is None or not (columns if algorithm is None else recipe.rewards or not awaited):
        return None
    return build_rewards(recipe.rewards, columns=columns, tokenizer=blueprint.tokenizer, verdict=recipe.verdict)


def _check_credit(algorithm: Algorithm | None, rewards: Rewards, runtime: ToolRuntime | None) -> None:
    """Raises ConfigError if a part reads rewards of steps and there are none: of functions, or of an environment's turns."""
    if algorithm is not None and algorithm.needs_steps and not rewards.process and runtime is None:
        by = "group.credit" if "process" in fact(algorithm.credit, "reads") else "a further term of the loss"
        raise ConfigError(
            f"{by} reads rewards of steps, but none of the rewards ({', '.join(rewards.names)}) rewards any: use a function marked "
            "with @process_reward, the reward model with args: {steps: newline}, or an environment that rewards turns"
        )


# ---------------------------------------------------------------- the plan


def algorithm_line(algorithm: Algorithm) -> str:
    """An algorithm as its four parts."""
    parts = [describe(part) for part in (algorithm.credit, algorithm.ratio, algorithm.surrogate, algorithm.weights)]
    kl = f", KL {describe(algorithm.kl)} x {algorithm.beta} in the {algorithm.kl_place}" if algorithm.needs_reference else ", no KL"
    kl += "; a critic" if algorithm.needs_value else ""
    kl += f"; {describe(algorithm.divergence)} from a teacher" if algorithm.divergence is not None else ""
    kl += f"; the teacher's share in sampling {algorithm.mix:g}" if algorithm.mix else ""
    return f"{algorithm.name}: {' x '.join(parts)}{kl}; dead groups {algorithm.dead_groups}, truncated {algorithm.truncated}"


def _load(recipe: Recipe, blueprint: Blueprint, algorithm: Algorithm | None, rows: Data[Any], scorers: Sequence[Blueprint]) -> Load:
    """The work of one step, for the memory plan.   scorers: reward models that do not exist yet."""
    group, cpu = recipe.group, resolve_device(recipe.model).type == "cpu"
    load = Load(
        prompts=recipe.batch_size,
        group=1,
        prompt_tokens=0,
        completion_tokens=0,
        budget=positions_of(recipe),
        cpu=cpu,
        recompute=recipe.model.gradient_checkpointing,
        adapter=adapter_count(recipe, blueprint),
    )
    if algorithm is None:
        return replace(load, prompt_tokens=math.ceil(_mean_length(rows) * 1.2))  # a row that is longer than the mean
    shape, engine = shape_of(blueprint, recipe.model.dtype), engine_traits(recipe.rollout.engine.name)
    return replace(
        load,
        prompts=group.prompts_per_step,
        group=group.group_size,
        prompt_tokens=max(prompt.tokens.size for prompt in rows.train),
        completion_tokens=recipe.rollout.max_new_tokens,
        rows=recipe.rollout.max_rows if engine.own_weights else 0,
        prepared=prepared_weights(shape, cpu=cpu) if engine.prepares else 0,
        reference=algorithm.needs_reference,
        rewards=_other_models(recipe, algorithm, shape, scorers),
    )


def _other_models(recipe: Recipe, algorithm: Algorithm, shape: Shape, scorers: Sequence[Blueprint]) -> int:
    """Bytes of reward models, of a critic and of a teacher; those that an earlier stage makes are left out.

    shape: of the policy.
    """
    total = sum(scoring_memory(shape_of(one), POSITIONS) for one in scorers)
    for reward in recipe.rewards:
        if reward.function in MAKERS:
            other = shape_of(_blueprint_at(str(reward.args.get("path"))), str(reward.args.get("dtype", "float32")))
            total += scoring_memory(other, int(reward.args.get("tokens_per_microbatch", POSITIONS)))
    critic, teacher = recipe.critic.path, recipe.teacher
    if algorithm.needs_value and critic is not None and not critic.startswith(STAGE):
        total += 16 * parameter_count(_blueprint_at(critic))  # weights, gradients and moments in float32
    if algorithm.needs_teacher and teacher.path is None and teacher.ema != 1.0 and recipe.model.lora is None:
        total += shape.parameters * shape.bytes_per_weight  # a former self of the policy
    elif algorithm.needs_teacher and teacher.path is not None and not teacher.path.startswith(STAGE):
        other = shape_of(_blueprint_at(teacher.path), recipe.model.dtype)
        total += other.parameters * other.bytes_per_weight
    return total


def _blueprint_at(path: str) -> Blueprint:
    return read_blueprint(ModelSettings(path=path))


def adapter_count(recipe: Recipe, blueprint: Blueprint) -> int:
    """Parameters of the adapter that a recipe trains, counted without weights; 0 if it trains none."""
    return 0 if recipe.model.lora is None else adapter_size(weightless(blueprint), recipe.model.lora)


ADAPTER_LR = 1e-5
"""Learning rate below which an adapter hardly moves: ten times as much is usual, where full training takes 1e-6."""


def _model_lines(recipe: Recipe, blueprint: Blueprint, load: Load, world: int | None) -> Lines:
    """What is trained, and what the process, or each of several, holds and does in a step."""
    shape, count = shape_of(blueprint, recipe.model.dtype), comm.world().size if world is None else world
    lines, lr = Lines(), recipe.optimizer.lr
    if load.adapter:
        share = f"{load.adapter / shape.parameters:.2%}"
        lines.append(("adapter", f"{load.adapter:,} parameters beside {shape.parameters:,} that stay as they are ({share})"))
        if lr < ADAPTER_LR:
            lines.append(("warning", f"optimizer.lr {lr:g} is one for training all weights; an adapter learns with about 1e-4"))
    old = platform.machine() in ("x86_64", "AMD64") and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    if recipe.model.dtype != "float32" and old and load.cpu:
        cost = "an update takes many times as long as in float32"
        remedy = f"this processor has no AVX-512, and {cost}: set model.dtype=float32"
        lines.append(("warning", f"model.dtype {recipe.model.dtype}: {remedy}"))
    sharding = fsdp.ShardingConfig.of(recipe.parallel).decided(largest_model(recipe, blueprint), count)
    if count == 1:
        need = process_memory(shape, load, prompts=load.prompts)
        lines += [("micro-batches", f"at most {load.budget:,} packed positions"), *memory_lines(need)]
        if load.cpu and (reason := absence()):
            lines.append(("kernels", f"torch's own, more slowly: {reason}"))
    else:
        shards = sharding.shards or count
        lines += process_lines(shape, load, Sharding(world=count, name=sharding.name, shards=shards, offload=sharding.offload))
    if load.completion_tokens and not load.rows:
        lines.append(("not counted", f"what {recipe.rollout.engine.name} takes to sample, on this device or another"))
    return lines


# ---------------------------------------------------------------- what an earlier stage leaves


def recorded_pairs(folder: Path, judge: str | None = None) -> Path:
    """Write `preference_rows` of all that a run recorded (`rollouts/`) into a file of the run's folder, which is returned.

    Raises DataError if the run recorded nothing, or nothing with a difference.
    """
    steps = list_rollouts(folder)
    rows = [row for step in steps for row in preference_rows(read_step(folder, step).groups, judge)]
    if not rows:
        raise DataError(
            f"{folder} holds no pair: {len(steps)} steps are recorded there (save.rollouts_every), none with a difference"
        )
    path = folder / f"pairs{'' if judge is None else f'-{judge}'}.jsonl"
    files.write(path, "".join(json.dumps(row, default=str) + "\n" for row in rows).encode())
    return path


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with every `stage:NAME` replaced: by the folder of that stage's final model (the model's, the rewards'), or by a
    file of pairs that are made of what the stage sampled (the data's; `stage:NAME:REWARD` by that reward).

    Raises ConfigError if it is not there.
    """
    path, data = recipe.model.path, recipe.data.path
    if path is not None:
        recipe = replace(recipe, model=replace(recipe.model, path=_folder_of(path, recipe, "model.path")))
    if data is not None and data.startswith(STAGE):
        stage, _, judge = data.removeprefix(STAGE).partition(":")
        folder = Path(_folder_of(f"{STAGE}{stage}", recipe, "data.path")).parent
        pairs = comm.from_first(lambda: str(recorded_pairs(folder, judge or None)))
        recipe = replace(recipe, data=replace(recipe.data, path=pairs))
    critic = replace(recipe.critic, path=_folder_of(recipe.critic.path, recipe, "critic.path"))
    rewards = [
        replace(reward, args={key: _folder_of(value, recipe, f"rewards.{place}.args.{key}") for key, value in reward.args.items()})
        for place, reward in enumerate(recipe.rewards)
    ]
    teacher = replace(recipe.teacher, path=_folder_of(recipe.teacher.path, recipe, "teacher.path"))
    return replace(recipe, rewards=tuple(rewards), critic=critic, teacher=teacher)


def _folder_of(value: Any, recipe: Recipe, key: str) -> Any:
    """A value of a recipe; the folder of a stage's final model where it is `stage:NAME`."""
    if not isinstance(value, str) or not value.startswith(STAGE):
        return value
    stage = value.removeprefix(STAGE)
    folder = run_folder(recipe).parent / stage / FINAL
    if not (folder / "config.json").exists():
        raise ConfigError(f"{key}: the stage {stage!r} has not finished: there is no model in {folder}")
    return str(folder)
