"""A recipe becomes a job: data, policy, rewards, engine, optimizer and the loop over them, put together in one walk.

Everything cheap comes first (tokenizer, data, reward functions, plan: `Prepared`), weights last (`make_job`), so that a recipe
which cannot run fails before anything large is loaded.  `plan_of` is all that `groupwise train --dry-run` needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from groupwise.algorithms.parts import fact
from groupwise.algorithms.resolve import resolve
from groupwise.algorithms.table import Algorithm
from groupwise.config.recipes import demand_values, run_folder
from groupwise.config.settings import (
    CriticSettings,
    Recipe,
    RewardSettings,
    RolloutSettings,
    TeacherSettings,
    positions_of,
)
from groupwise.config.validation import STAGE, beyond_servers
from groupwise.data.curriculum import Curriculum, Visits
from groupwise.data.encoding import columns_of, prompt_limit
from groupwise.data.load import Data, load_data, load_texts
from groupwise.data.order import Order
from groupwise.data.sources import read_rows
from groupwise.data.tasks import breakdown_of
from groupwise.data.tokenizers import make_tokenizer, with_chat_template
from groupwise.distributed import comm
from groupwise.environments.conversation import EpisodeWorld
from groupwise.environments.runtime import ToolRuntime
from groupwise.errors import ConfigError, DataError, Findings
from groupwise.models.loading import Blueprint, context_length, read_blueprint
from groupwise.models.policy import Policy, without_adapter
from groupwise.models.scratch import scratch_model
from groupwise.models.shape import Shape
from groupwise.proof.prove import prove
from groupwise.records import Prompt, Sampling, Step
from groupwise.rewards.compose import Rewards, build_rewards, no_rewards
from groupwise.rewards.registry import GOLD_COLUMNS, MAKERS
from groupwise.rewards.user_functions import NO_COLUMN
from groupwise.rollout.engine import Engine
from groupwise.runs.engines import (
    agreeing,
    engine_lines,
    make_ahead,
    make_engine,
    mixed_engine,
    mixture,
    sampled_elsewhere,
    sampler_of,
)
from groupwise.runs.environments import make_runtime, make_world, tools_of, with_environment_data, with_own_reward, world_lines
from groupwise.runs.folder import FINAL
from groupwise.runs.plan import Lines, algorithm_line, fitted, load_of, mean_length, model_lines, offline_plan, online_plan
from groupwise.runs.policies import critic_of, hint_of, hold, reference_of, shape_of, shared_out, teacher_of
from groupwise.runs.recorded import list_rollouts, read_step
from groupwise.training.critics import Critic
from groupwise.training.evaluate import Evaluation, evaluate
from groupwise.training.groups import PendingRollout, PrefetchedRollouts, SampledRollouts
from groupwise.training.objectives import OBJECTIVES, Kind, language_model
from groupwise.training.offline import Validation, train_offline, validate
from groupwise.training.online import pretrain_critic, train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.preferences import preference_rows
from groupwise.training.teachers import Teacher
from groupwise.training.work import Meter, has_experts
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
                plan = [*lines, *model_lines(recipe, blueprint, load_of(recipe, blueprint, algorithm, rows, others), world)]
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
    judged, tokens = prompts or rows, mean_length(rows)
    counts = len(judged.held_out), tokens, len(judged.validation)
    lines, steps = offline_plan(recipe, len(rows.train), *counts, rows.report.left_out)
    return rows, prompts, [("objective", kind.title), *lines], steps


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


def hint_lines(text: str | None, prompts: Sequence[Prompt]) -> Lines:
    """For the plan: the rows that get no hint.  Raises ConfigError if none gets one."""
    without = [] if text is None else [prompt.id for prompt in prompts if not hint_of(text, prompt.row)]
    if len(without) == len(prompts):
        columns = ", ".join(columns_of(prompts)) or "none"
        raise ConfigError(f"teacher.hint: {text!r} does not fit the rows, whose columns are {columns}")
    if not without:
        return []
    return [("warning", f"{len(without)} of {len(prompts)} rows (first: {without[0]}) lack what teacher.hint reads: no hint there")]


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


# ---------------------------------------------------------------- the job


Judged = Evaluation | Validation
"""What a policy does on held-out prompts, or what an objective says of held-out rows."""
Place = tuple[Mapping[str, Any], tuple[PendingRollout, ...]]
"""Of the data's order, and what has been drawn from it and not been trained on."""


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
        """By the key that stands for it in `numbers`, each optimizer, and what the names of its tensors begin with."""
        policys = {"optimizer": ("", self.optimizer)}
        return policys if self.critic is None else policys | {"critic": ("critic_optimizer.", self.critic.optimizer)}

    def moving(self) -> dict[str, Module]:
        """Models beside the policy whose weights change, and which no file but a checkpoint holds."""
        models: dict[str, Module] = {}
        if self.reference is not None and self.recipe.group.reference_refresh > 0:
            models["reference"] = self.reference.model
        if self.critic is not None:
            models["critic"] = self.critic.module
        if self.teacher is not None and self.recipe.teacher.path is None and self.teacher.policy.model is not self.policy.model:
            models["teacher"] = self.teacher.policy.model
        return models

    def weights(self) -> dict[str, Tensor]:
        """The weights of `moving`."""
        models = self.moving().items()
        return {f"{key}.{name}": parameter.detach() for key, model in models for name, parameter in model.named_parameters()}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside the policy: the optimizers' tensors, and `weights`; sharded or whole, as they are here."""
        tensors = {f"{prefix}{name}": t for prefix, one in self.optimizers().values() for name, t in one.tensors().items()}
        return tensors | self.weights()

    def restore(self, numbers: Mapping[str, Any], read: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Continue from a job's `numbers()` and `tensors()`, which `read` fills in; the policy's weights are loaded with it."""
        for key, (prefix, optimizer) in self.optimizers().items():
            optimizer.restore(
                numbers[key], lambda tensors, prefix=prefix: read({f"{prefix}{name}": one for name, one in tensors.items()})
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
    loop: Callable[[int], Iterator[Step]]
    """Steps done before -> the steps that are left."""
    judge: Callable[[bool], Judged | None]
    """Evaluates on what is held out: all of it if True, else as much as `eval` says, of the validation part where there is one.
    None if nothing is held out."""
    engine: Engine | None = None
    """What samples, where the objective or its evaluation does."""
    ahead: PrefetchedRollouts = field(default_factory=PrefetchedRollouts)
    """What has been sampled, or begun to be, for steps to come."""

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

    def place(self) -> Place:
        """Where the run stands in its data."""
        return self.order.state(), self.ahead.pending()

    @property
    def taken(self) -> int:
        """Optimizer steps of everything that is trained: if it is another number, weights have changed."""
        return sum(optimizer.taken for _, optimizer in self.optimizers().values())

    @property
    def exchanging(self) -> bool:
        """True while gradients of anything that is trained are summed over the processes (`Optimizer.exchanging`)."""
        return any(optimizer.exchanging for _, optimizer in self.optimizers().values())

    def numbers(self, place: Place | None = None) -> dict[str, Any]:
        """What the next step depends on beside the weights and `tensors`.  place: if not the present one."""
        order, pending = place or self.place()
        trained = {key: optimizer.numbers() for key, (_, optimizer) in self.optimizers().items()}
        return trained | {"order": order, "ahead": [begun.state() for begun in pending]}

    def restore(self, numbers: Mapping[str, Any], read: Callable[[Mapping[str, Tensor]], None]) -> None:
        """`Learner.restore`, and where the run stands in its data."""
        Learner.restore(self, numbers, read)
        self.order.restore(numbers["order"])
        self.ahead.restore(numbers.get("ahead", ()))

    def close(self) -> None:
        """End reward workers and what samples; each of them, also if another one raises."""
        self.prepared.close()


def make_job(recipe: Recipe, *, resume: Path | None = None, reference: Path | None = None) -> Job:
    """Put a recipe together.

    resume: a policy folder to continue with instead of the recipe's model; of an adapter only what was trained is there.
    reference: the folder with the weights that the policy had before its first step, where the algorithm needs them.
    Raises ConfigError, DataError or Diverged before the first step.
    """
    prepared = Prepared.of(recipe, resume=resume)
    try:
        maker = _dataset_job if prepared.algorithm is None else _online_job
        return maker(prepared, reference, resume)
    except BaseException:
        prepared.close()
        raise


def _engine(prepared: Prepared, policy: Policy) -> Engine:
    """What samples; it is closed with the rest of the job."""
    engine = make_engine(policy, prepared.recipe.rollout, prepared.world)
    prepared.started.callback(engine.close)
    return engine


def make_learner(
    recipe: Recipe, blueprint: Blueprint, algorithm: Algorithm, *, reference: Path | None = None, resume: Path | None = None
) -> Learner:
    """Policy, reference and optimizer of an online recipe.   reference, resume: see `make_job`."""
    policy = hold(recipe, blueprint, language_model, resume)
    anchor = None
    if algorithm.needs_reference:
        anchor = without_adapter(policy) if recipe.model.lora is not None else reference_of(recipe, policy, reference)
    assert recipe.steps is not None
    learning = recipe.steps - (recipe.critic.pretrain if algorithm.needs_value else 0)
    updates = learning * recipe.group.updates_per_rollout * recipe.group.minibatches
    return Learner(recipe=recipe, policy=policy, optimizer=Optimizer(policy.model, recipe.optimizer, updates), reference=anchor)


def evaluated(
    prepared: Prepared, engine: Engine, prompts: Sequence[Prompt], progress: Callable[[int, int], None] | None = None
) -> Evaluation | None:
    """What the reward functions say of completions of held-out prompts; None without either.   progress: see `evaluate`."""
    recipe, rewards = prepared.recipe, prepared.rewards
    if not prompts or rewards is None or not rewards.names:
        return None
    return evaluate(
        engine,
        rewards,
        prompts,
        k=recipe.eval.k,
        sampling=eval_sampling(recipe),
        seed=recipe.seed,
        columns=breakdown_of(recipe.data.task),
        progress=progress,
    )


def _judge(prepared: Prepared, engine: Engine, optimizer: Optimizer) -> Callable[[bool], Judged | None]:
    def judge(whole: bool) -> Judged | None:
        engine.set_version(optimizer.taken)  # it is not told where another one samples for training
        prompts = prepared.prompts
        judged = () if prompts is None else prompts.held_out if whole else prompts.watched[: prepared.recipe.eval.prompts]
        return evaluated(prepared, engine, judged)

    return judge


def _order(recipe: Recipe, rows: int) -> Order:
    """The order of an online run's prompts."""
    data = recipe.data
    if data.retire or data.curriculum:
        return Curriculum(rows, recipe.seed, data.shuffle, retire=data.retire, strength=data.curriculum)
    return Order(rows, recipe.seed, data.shuffle)


def _accounted(steps: Iterator[Step], visits: Visits, meter: Meter) -> Iterator[Step]:
    """Steps with their work, and what was sampled for them and thrown away."""
    for step in steps:
        measured = meter.read(step)
        yield replace(measured, metrics={**measured.metrics, **visits.account(step.groups)})


def _meter(recipe: Recipe, algorithm: Algorithm, policy: Policy, critic: Critic | None, teacher: Teacher | None) -> Meter:
    return Meter(
        policy=Shape.of_policy(policy),
        critic=None if critic is None or critic.shared else Shape.of_policy(critic.policy),
        values=critic is not None and critic.shared,
        teacher=None if teacher is None or teacher.servers is not None else Shape.of_policy(teacher.policy),
        updates=recipe.group.updates_per_rollout,
        diverging=algorithm.divergence is not None,
        recompute=recipe.model.gradient_checkpointing,
        threshold=algorithm.needs_forking,
        processes=comm.world().size,
        experts=has_experts(policy),
    )


def _online_job(prepared: Prepared, reference: Path | None, resume: Path | None) -> Job:
    recipe, algorithm, prompts, rewards = prepared.recipe, prepared.algorithm, prepared.prompts, prepared.rewards
    assert algorithm is not None and prompts is not None and rewards is not None
    learner = make_learner(recipe, prepared.blueprint, algorithm, reference=reference, resume=resume)
    policy, optimizer, anchor = learner.policy, learner.optimizer, learner.reference
    per_step = recipe.group.updates_per_rollout * recipe.group.minibatches
    critic = critic_of(recipe, policy, prepared.steps * per_step) if algorithm.needs_value else None
    teacher = teacher_of(recipe, policy) if algorithm.needs_teacher else None
    proofs = _proofs(prepared, policy, critic, teacher, algorithm.mix)
    engine = _engine(prepared, policy)
    sampler = mixed_engine(policy, teacher.policy, algorithm.mix, recipe.rollout) if teacher and algorithm.mix else engine
    order = _order(recipe, len(prompts.train))
    ahead = make_ahead(recipe.rollout, prompts.train)
    visits = Visits(prompts.train, order, ahead=ahead.steps > 0)
    meter = _meter(recipe, algorithm, policy, critic, teacher)

    def sampled(numbers: range) -> SampledRollouts:
        return SampledRollouts(
            algorithm=algorithm,
            engine=sampler,
            rewards=rewards,
            draw=visits,
            group=recipe.group,
            sampling=sampling_of(recipe.rollout),
            steps=prepared.steps,
            numbers=numbers,
            ahead=ahead,
            seed=recipe.seed,
        )

    def loop(done: int) -> Iterator[Step]:
        sampler.set_version(optimizer.taken)
        with_models: dict[str, Any] = {
            "group": recipe.group,
            "budget": positions_of(recipe),
            "reference": anchor,
            "critic": critic,
            "teacher": teacher,
            "checkpointing": recipe.model.gradient_checkpointing,
        }
        before = done if critic is None else max(done, critic.settings.pretrain)
        steps = chain(
            pretrain_critic(policy, algorithm, sampled(range(done + 1, before + 1)), **with_models),
            train_online(policy, algorithm, sampled(range(before + 1, prepared.steps + 1)), optimizer, **with_models),
        )
        return _accounted(agreeing(rewards.counting(steps, done, prepared.steps), engine), visits, meter)

    return Job(
        recipe=recipe,
        prepared=prepared,
        lines=[*engine_lines(engine, ahead), *proofs],
        policy=policy,
        optimizer=optimizer,
        order=order,
        loop=loop,
        judge=_judge(prepared, engine, optimizer),
        reference=anchor,
        critic=critic,
        teacher=teacher,
        engine=engine,
        ahead=ahead,
    )


def _proofs(prepared: Prepared, policy: Policy, critic: Critic | None, teacher: Teacher | None, mix: float) -> Lines:
    """Prove what an online run computes with each of its models, for the plan.  Raises ConfigError."""
    recipe = prepared.recipe
    assert prepared.prompts is not None
    longest, again = longest_of(recipe, prepared.prompts), recipe.model.gradient_checkpointing
    sampler = sampler_of(recipe.rollout, sampling_of(recipe.rollout), conversations=prepared.world is not None)
    proofs = [prove(policy, longest=longest, sampler=sampler, recompute=again)]
    if critic is not None and not critic.shared:
        proofs.append(prove(critic.policy, longest=longest, recompute=again))
    other = teacher is not None and recipe.teacher.path is not None
    if teacher is not None and other:
        proofs.append(prove(teacher.policy, longest=longest, train=False))
    if teacher is not None and mix:
        both = [policy, teacher.policy] if other else [policy]
        proofs += [prove(one, longest=longest, sampler=mixture(mix, recipe.rollout), train=False) for one in both]
    return [proof.line for proof in proofs]


def longest_of(recipe: Recipe, prompts: Data[Prompt]) -> int:
    """Tokens of the longest text of prompt and completion."""
    sizes = (prompt.tokens.size for part in (prompts.train, prompts.held_out, prompts.validation) for prompt in part)
    return max(sizes, default=1) + max(recipe.rollout.max_new_tokens, recipe.eval.max_new_tokens or 0)


def _dataset_job(prepared: Prepared, reference: Path | None, resume: Path | None) -> Job:
    recipe, kind = prepared.recipe, OBJECTIVES[prepared.recipe.objective]
    policy = hold(recipe, prepared.blueprint, kind.model, resume)
    objective, budget = kind.objective(recipe), positions_of(recipe)
    rows, held_out, watched = prepared.rows.train, prepared.rows.held_out, prepared.rows.watched
    anchor = None
    if kind.anchor is not None:  # on resume by the weights that were saved then; until the first step they are the policy's
        anchor = policy if reference is None or not reference.exists() else reference_of(recipe, policy, reference)
        anchor = without_adapter(policy) if recipe.model.lora is not None else anchor
        rows, held_out, watched = (tuple(kind.anchor(recipe, anchor, part)) for part in (rows, held_out, watched))
    optimizer = Optimizer(policy.model, recipe.optimizer, prepared.steps)
    order = Order(len(rows), recipe.seed, recipe.data.shuffle)
    batch_size = min(recipe.batch_size, len(rows))
    sampler, longest = None, max((len(row) for part in (rows, held_out) for row in part), default=1)
    if kind.samples and prepared.prompts is not None:
        sampler = sampler_of(recipe.rollout, sampling_of(recipe.rollout), conversations=prepared.world is not None)
        longest = max(longest, longest_of(recipe, prepared.prompts))
    proof = prove(policy, longest=longest, sampler=sampler, recompute=recipe.model.gradient_checkpointing)
    engine = _engine(prepared, policy) if kind.samples else None

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
            return _judge(prepared, engine, optimizer)(whole)
        if not held_out:
            return None
        if not whole:
            limit = None if recipe.eval.batches is None else recipe.eval.batches * batch_size
            return validate(policy, objective, watched[:limit], budget=budget)
        rules = kind.rules(policy, rows, held_out) if kind.rules is not None else None
        return validate(policy, objective, held_out, budget=budget, beside=rules)

    return Job(
        recipe=recipe,
        prepared=prepared,
        lines=[proof.line],
        policy=policy,
        optimizer=optimizer,
        order=order,
        loop=loop,
        judge=judge,
        reference=anchor,
        engine=engine,
    )
