"""Evaluation of a trained model on held-out prompts: a run knows its data and rewards, for any other model they are given.

gw.evaluate("runs/mine")                                         # as the run evaluated itself
gw.evaluate("my/model", data="test.jsonl", rewards="accuracy")   # another model, on rows of a file
gw.evaluate("runs/mine", data=rows, rewards=[right])             # rows and functions of the program
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from groupwise.api import objects
from groupwise.api.loaded_policy import model_folder, settings_of
from groupwise.config.live_objects import LIVE, Live
from groupwise.config.recipes import demand_values
from groupwise.config.settings import CriticSettings, DataSettings, ModelSettings, Recipe, RewardSettings, TeacherSettings
from groupwise.config.validation import STAGE, wrong_model
from groupwise.data.load import load_data
from groupwise.data.prompts import columns_of
from groupwise.data.tasks import breakdown_of
from groupwise.data.templates import Tools
from groupwise.errors import ConfigError
from groupwise.models.loading import Blueprint, load_policy
from groupwise.models.policy import Policy
from groupwise.proof.prove import prove
from groupwise.proof.texts import NATIVE
from groupwise.records import Prompt, Sampling
from groupwise.rewards.compose import build_rewards
from groupwise.rewards.registry import GOLD_COLUMNS
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.checkpoint import step_of
from groupwise.runs.environments import (
    environment_of,
    make_runtime,
    make_world,
    recipe_of_environment,
    tools_of,
    with_environment_data,
    with_own_reward,
)
from groupwise.runs.origin import Origin, origin_of, overridden
from groupwise.runs.policies import fit_threads
from groupwise.runs.prepare import eval_sampling
from groupwise.runs.stage_outputs import resolved
from groupwise.runs.trust import demand_trust
from groupwise.training import evaluate as judging
from groupwise.training.evaluate import Evaluation
from groupwise.utils.files import expanded

JUDGES = ("reward", "prm")
"""Objectives whose models write no completions."""
LENGTH, SAMPLES, ROWS = 256, 8, 256
"""Of a model that no run made: longest completion in tokens, samples per prompt; completions decoded at the same time."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The results of an evaluation, as text and as JSON."""

    checkpoint: str
    about: str
    """Data, rewards and length of the evaluation, and which of these the run gave."""
    evaluation: Evaluation

    def render(self) -> str:
        """Plain text."""
        found = self.evaluation
        lines = [
            f"{self.checkpoint}: {found.prompts} prompts, {found.k} samples each (± is half of a 95 % interval)",
            f"  {self.about}",
            *(f"  {label:16}  {text}" for label, text in found.summary().items() if label != "tokens"),
            f"  mean length       {found.length:.1f} tokens, {found.truncated:.1%} truncated",
        ]
        for column, shares in found.by_column.items():
            lines.append(f"  greedy by {column}: " + ", ".join(f"{value} {share:.3f}" for value, share in shares.items()))
        return "\n".join(lines)

    def to_json(self) -> str:
        """One JSON object."""
        found = {"checkpoint": self.checkpoint, "prompts": self.evaluation.prompts, "k": self.evaluation.k}
        return json.dumps(found | self.evaluation.metrics(), indent=1)


def evaluate(
    path: str | os.PathLike[str],
    *,
    data: objects.Path | objects.Rows | None = None,
    task: str | None = None,
    task_args: Mapping[str, Any] | None = None,
    split: str | None = None,
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    chat: bool | None = None,
    system: str | None = None,
    rewards: objects.Reward | Sequence[objects.Reward] | None = None,
    verdict: str | None = None,
    environment: objects.Environment | objects.Section | None = None,
    k: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    limit: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Greedy accuracy, sampled accuracy and pass@k of a run, a checkpoint, a model folder or a hub name; rewards alone where no
    reward function says what is right.

    A run's model is evaluated as the run evaluated itself: on what it held out, with its reward functions, environment, template,
    length and samples.  What is given replaces that.  Of a model that no run made data (or task) must be given.
    data: a file or hub name, or rows, all of which are used; of the rows that a run was trained on, those that it held out.
    task: a built-in task, whose held-out prompts are used.
    rewards: functions that judge, as in `train`.
    verdict: the name of the one whose 1 says that a completion is right; default: the run's, else the first that is the built-in
    accuracy, exact or number.
    environment: as in `train`; an empty mapping: none.
    k: samples per prompt.   max_new_tokens: longest completion.   limit: first prompts only.   seed: of the samples.
    overrides: of the run's recipe, `KEY=VALUE`, e.g. of a secret that its config.yaml does not hold.
    progress: called with the prompts that are sampled and all that there are, first of the greedy completions, then of the samples.
    Raises ConfigError, DataError, RewardError, EnvironmentFailure, CheckpointError.
    """
    path = os.fspath(path)
    if data is not None and task is not None:
        raise ConfigError(f"say what to evaluate on: data or task ({task!r}), not both")
    rows = None if data is None else objects.data_keys({"path": data})["path"]
    keys = None if environment is None else objects.environment_keys(environment, None)
    parts = (*(("data",) if data is None and task is None else ()), *(("rewards",) if rewards is None else ()))
    origin = _origin(path, overrides, keys, parts)
    recipe = _plain_recipe(keys) if origin is None else origin.recipe
    if recipe.objective in JUDGES:
        raise ConfigError(f"{path} holds a model of the objective {recipe.objective!r}, which writes no completions to evaluate")
    settings = _data_of(path, origin, rows if isinstance(rows, str | None) else os.fspath(rows), task, task_args, split)
    settings = _with(settings, columns=columns, template=template, chat=chat, system=system, eval_limit=limit)
    demand_values(settings, "data")
    recipe = replace(recipe, data=settings, eval=_with(recipe.eval, k=k, temperature=temperature, max_new_tokens=max_new_tokens))
    recipe = replace(_with(recipe, seed=seed), verdict=verdict or (recipe.verdict if rewards is None else None))
    return _evaluated(path, origin, recipe, rewards, progress)


def _with(settings: Any, **changes: Any) -> Any:
    """Settings with the changes that are not None."""
    return replace(settings, **{key: value for key, value in changes.items() if value is not None})


def _plain_recipe(environment: Mapping[str, Any] | None) -> Recipe:
    """How a model that no run made is evaluated."""
    plain = recipe_of_environment(environment or {})
    rollout = replace(plain.rollout, max_new_tokens=LENGTH, max_rows=ROWS)
    return replace(plain, rewards=(), rollout=rollout, eval=replace(plain.eval, k=SAMPLES))


def _evaluated(
    path: str,
    origin: Origin | None,
    recipe: Recipe,
    rewards: objects.Reward | Sequence[objects.Reward] | None,
    progress: Callable[[int, int], None] | None,
) -> EvalReport:
    """Load the model at a path and evaluate it by a recipe, with `rewards` in place of the recipe's if there are any."""
    model, sampling = model_folder(path), eval_sampling(recipe)
    policy = load_policy(ModelSettings(path=model) if origin is None else settings_of(recipe.model, model))
    with ExitStack() as ends:
        ends.callback(torch.set_num_threads, torch.get_num_threads())
        fit_threads(policy, recipe.threads)
        source = make_runtime(recipe.environment)
        if source is not None:
            ends.callback(source.close)
        prompts = _prompts(path, policy, recipe, tools_of(source))
        columns = columns_of(prompts)
        functions = _rewards_of(path, origin and with_own_reward(recipe, source), rewards, columns)
        world = make_world(recipe, Blueprint.of(policy), source, sampling)
        if world is not None:
            ends.callback(world.close)
        sampler = replace(NATIVE, sampling=sampling, conversations=world is not None)
        longest = max(prompt.tokens.size for prompt in prompts) + sampling.max_new_tokens
        prove(policy, longest=longest, sampler=sampler, train=False)
        engine = NativeEngine(policy, max_rows=recipe.rollout.max_rows, world=world)
        judge = build_rewards(functions, columns=columns, tokenizer=policy.tokenizer, verdict=recipe.verdict)
        ends.callback(judge.close)
        found = judging.evaluate(
            engine, judge, prompts, k=recipe.eval.k, sampling=sampling, seed=recipe.seed, columns=breakdown_of(recipe.data.task),
            progress=progress,
        )  # fmt: skip
        return EvalReport(path, _unfinished(path, model) + _about(origin, recipe.data, judge.names, sampling), found)


def _origin(path: str, overrides: Sequence[str], environment: Mapping[str, Any] | None, parts: Sequence[str]) -> Origin | None:
    """Where a model comes from, its recipe changed as asked and its environment ready to be made; None if no run made it.

    parts: of the recipe, whose code would run.
    """
    origin = origin_of(path)
    if origin is None:
        if overrides:
            raise ConfigError(f"{path} is no run, so there is no recipe to override: {overrides[0]}")
        return None
    origin = overridden(origin, overrides)
    demand_trust(origin, ("model", *parts, *(("environment",) if environment is None else ())))
    recipe = origin.recipe if environment is None else replace(origin.recipe, environment=environment_of(environment))
    demand_values(recipe.environment, "environment")
    return replace(origin, recipe=with_environment_data(recipe))


def _data_of(
    path: str, origin: Origin | None, data: str | None, task: str | None, task_args: Mapping[str, Any] | None, split: str | None
) -> DataSettings:
    """What to evaluate on: what is given, else what the run held out."""
    if origin is not None and isinstance(data, Live) and data == origin.recipe.data.path and origin.recipe.data.parts:
        return replace(origin.recipe.data, path=data)
    if data is not None or task is not None:
        # All rows of a file are asked: as held-out rows beside a training row that nobody looks at.
        known = DataSettings() if origin is None else origin.recipe.data
        source = {"eval_path": data, "path": data} if data is not None else {"eval_path": None, "path": None}
        alone = replace(known, task=task, task_args=task_args or {}, eval_fraction=0.0, eval_limit=None, **source)
        return replace(alone, split=split or "test", eval_split=split or "test", limit=1 if task is not None else None)
    if origin is None:
        if wrong := wrong_model(path):
            raise ConfigError(wrong)
        raise ConfigError(f"no run made {path}, so nothing says what to evaluate it on: give data=FILE or task=NAME")
    held = origin.recipe.data
    for name in (held.path, held.eval_path):
        if name is not None and name.startswith(LIVE) and not isinstance(name, Live):
            raise ConfigError(f"{path} was evaluated on rows of the program that trained it ({name}): give data=ROWS")
    if held.task is None and held.eval_path is None and not held.parts:
        raise ConfigError(f"{path} held nothing out of {held.path}, on which it was trained: give data=FILE or task=NAME")
    return held if task_args is None else replace(held, task_args=task_args)


def _prompts(path: str, policy: Policy, recipe: Recipe, tools: Tools | None) -> tuple[Prompt, ...]:
    settings, length = recipe.data, eval_sampling(recipe).max_new_tokens
    if settings.task is None and settings.path == settings.eval_path:
        found = _every_row(settings, policy, length, tools)
    else:
        data = load_data(settings, policy.tokenizer, context=policy.context, max_new_tokens=length, seed=recipe.seed, tools=tools)
        found = data.held_out
    if not found:
        raise ConfigError(f"{path}: no held-out prompt is left to evaluate on: give data=FILE or task=NAME")
    return found


def _every_row(settings: DataSettings, policy: Policy, length: int, tools: Tools | None) -> tuple[Prompt, ...]:
    """The prompts of all rows of a file."""
    plain = replace(settings, eval_path=None, split=settings.eval_split, limit=settings.eval_limit)
    data = load_data(plain, policy.tokenizer, context=policy.context, max_new_tokens=length, seed=0, tools=tools)
    return tuple(replace(prompt, id=f"eval/{prompt.id}") for prompt in data.train)


def _rewards_of(
    path: str, recipe: Recipe | None, named: objects.Reward | Sequence[objects.Reward] | None, columns: Collection[str]
) -> list[RewardSettings]:
    """The functions that judge: those that are named, else the run's, else `accuracy` where there is something to compare with."""
    if named is not None:
        return [RewardSettings(**entry) for entry in objects.reward_entries(named)]
    if recipe is None or not recipe.rewards:
        if any(column in columns for column in GOLD_COLUMNS):
            return [RewardSettings(function="accuracy")]
        raise ConfigError(f"nothing says what is right: {path} was trained without a reward function; give rewards=NAME")
    for one in recipe.rewards:
        if one.function.startswith(LIVE) and not isinstance(one.function, Live):
            raise ConfigError(
                f"{path} was judged by a function of the program that trained it ({one.function}): give rewards=[FUNCTION]"
            )
    if any(isinstance(value, str) and value.startswith(STAGE) for one in recipe.rewards for value in one.args.values()):
        alone = replace(
            recipe, model=ModelSettings(), data=DataSettings(), critic=CriticSettings(), teacher=TeacherSettings()
        )  # only the rewards' own stages need be there
        return list(resolved(alone).rewards)
    return list(recipe.rewards)


def _unfinished(path: str, model: str) -> str:
    """Which checkpoint it is, where a run that has not finished was named."""
    folder, named = Path(model).resolve(), expanded(path).resolve()
    if folder.name != "policy" or named in (folder, folder.parent):
        return ""
    return f"the checkpoint of step {step_of(folder.parent)}, the run has not finished; "


def _about(origin: Origin | None, settings: DataSettings, rewards: Sequence[str], sampling: Sampling) -> str:
    """What was asked, in one line."""
    source = settings.eval_path or settings.path or f"task {settings.task}"
    held = "" if settings.eval_path or settings.task else ", held out"
    parts = [f"data {source}{held}", f"rewards {', '.join(rewards)}", f"at most {sampling.max_new_tokens} tokens"]
    parts += ["chat template"] if settings.chat else []
    parts += [f"template {settings.template!r}"] if settings.template else []
    parts += [f"temperature {sampling.temperature:g}"] if sampling.temperature != 1.0 else []
    return "; ".join(parts) + ("" if origin is None else f" (the recipe is {Path(origin.folder) / 'config.yaml'})")
