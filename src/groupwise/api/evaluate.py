"""Evaluation of a trained model on held-out prompts: a run knows its data and rewards, for any
other model they are given.

gw.evaluate("runs/mine")   # as the run evaluated itself
gw.evaluate("my/model", data="test.jsonl", rewards="accuracy")   # another model, on rows of a file
gw.evaluate("runs/mine", data=rows, rewards=[right])   # rows and functions of the program
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from groupwise.api import objects
from groupwise.api.loaded_policy import model_folder, settings_of
from groupwise.config.live_objects import LIVE, Live
from groupwise.config.recipes import read_environment
from groupwise.config.settings import (
    CriticSettings,
    DataSettings,
    EngineSettings,
    EvalSettings,
    ModelSettings,
    Recipe,
    RewardSettings,
    RolloutSettings,
    TeacherSettings,
)
from groupwise.config.texts import demand_values
from groupwise.config.validation import wrong_model
from groupwise.errors import ConfigError
from groupwise.models.loading import make_policy
from groupwise.models.vision import seeing
from groupwise.proof.prove import prove
from groupwise.proof.texts import NATIVE
from groupwise.records import Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.checkpoint import step_of
from groupwise.runs.environments import with_environment_data
from groupwise.runs.inputs import inputs_of, resolved, warn_of_changed_inputs
from groupwise.runs.job import evaluate_prompts
from groupwise.runs.origin import Origin, origin_of, overridden
from groupwise.runs.prepared import PreparedEvaluation, eval_sampling
from groupwise.runs.run_models import fit_threads
from groupwise.runs.trust import demand_trust
from groupwise.training.evaluate import Evaluation
from groupwise.utils.files import expanded
from groupwise.utils.spelling import counted

JUDGES = ("reward", "prm")
"""Objectives whose models write no completions."""
LENGTH, SAMPLES, ROWS = 256, 8, 256
"""Defaults for a model that no run made: longest completion in tokens, samples per prompt,
completions decoded at the same time.
"""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The results of an evaluation, as text and as JSON."""

    checkpoint: str
    about: str
    """Data, rewards and length of the evaluation, and which of these the run gave."""
    evaluation: Evaluation

    def render(self) -> str:
        """Plain text."""
        evaluation = self.evaluation
        lines = [
            (
                f"{self.checkpoint}: {counted(evaluation.prompts, 'prompt')},"
                f" {counted(evaluation.k, 'sample')} each (± is half of a 95% interval)"
            ),
            f"  {self.about}",
            *(
                f"  {label:16}  {text}"
                for label, text in evaluation.summary().items()
                if label != "tokens"
            ),
            (
                f"  mean length       {evaluation.length:.1f} tokens, {evaluation.truncated:.1%}"
                " truncated"
            ),
        ]
        for column, shares in evaluation.by_column.items():
            lines.append(
                f"  greedy by {column}: "
                + ", ".join(f"{value} {share:.3f}" for value, share in shares.items())
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """One JSON object."""
        figures = {
            "checkpoint": self.checkpoint,
            "prompts": self.evaluation.prompts,
            "k": self.evaluation.k,
        }
        return json.dumps(figures | self.evaluation.metrics(), indent=1)


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
    top_p: float | None = None,
    max_new_tokens: int | None = None,
    too_long: str | None = None,
    limit: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Greedy accuracy, sampled accuracy and pass@k of a run, a checkpoint, a model folder or a hub
    name.

    Without a verdict there are only rewards.  A run has its own evaluation settings: held-out
    prompts, reward functions, environment, template, length and number of samples.  Arguments
    override them.  A model without a run needs `data` or `task`.
    data: a file or hub name, or rows.  All are used, except that of a run's training rows only the
        held-out ones are.
    task: a built-in task, whose held-out prompts are used.
    rewards: reward functions, as in `train`.
    verdict: name of the reward that is 1 for right completions; default: the run's, else the first
        built-in accuracy, exact or number.
    environment: as in `train`; an empty mapping: none.
    k: samples per prompt.   temperature, top_p: of the samples; 1 by default.
    max_new_tokens: longest completion.   limit: first prompts only.   seed: of the samples.
    too_long: what happens to longer prompts, as in `data.too_long`.
    overrides: `KEY=VALUE` for keys of the run's recipe, e.g. for a secret that its config.yaml does
        not hold.
    progress: called with the number of sampled prompts and of all prompts, first for the greedy
        completions, then for the samples.
    Raises ConfigError, DataError, RewardError, EnvironmentFailure, CheckpointError.
    """
    path = os.fspath(path)
    if data is not None and task is not None:
        raise ConfigError(f"say what to evaluate on: data or task ({task!r}), not both")
    rows = None if data is None else objects.data_keys({"path": data})["path"]
    keys = None if environment is None else objects.environment_keys(environment, None)
    named = None
    if rewards is not None:
        named = tuple(RewardSettings(**entry) for entry in objects.reward_entries(rewards))
    replaced = {
        "data": data is not None or task is not None,
        "rewards": named is not None,
        "environment": keys is not None,
    }
    origin = _origin(path, overrides, [part for part, changed in replaced.items() if not changed])
    if origin is None:
        rollout = RolloutSettings(max_new_tokens=LENGTH, max_rows=ROWS)
        run = Recipe(objective="grpo", rollout=rollout, eval=EvalSettings(k=SAMPLES))
    else:
        run = origin.dated
    if run.objective in JUDGES:
        raise ConfigError(
            f"{path} holds a model of the objective {run.objective!r}, which writes no completions"
            " to evaluate"
        )
    if keys is not None:
        run = replace(run, environment=read_environment(keys))
    demand_values(run.environment, "environment")
    run = with_environment_data(run)
    held_out = _data_of(
        path,
        origin and run,
        rows if isinstance(rows, str | None) else os.fspath(rows),
        task,
        task_args,
        split,
    )
    held_out = _with(
        held_out,
        columns=columns,
        template=template,
        chat=chat,
        system=system,
        too_long=too_long,
        eval_limit=limit,
    )
    model = model_folder(path)
    how = _with(run.eval, k=k, max_new_tokens=max_new_tokens)
    length = how.max_new_tokens or run.rollout.max_new_tokens
    if named is None:
        named, verdict = _judges_of(path, run), verdict or run.verdict
    # Sections that only training reads are left out: what they name need not be there any more.
    recipe = Recipe(
        objective=run.objective,
        seed=run.seed if seed is None else seed,
        threads=run.threads,
        model=settings_of(run.model, model),
        data=held_out,
        rewards=named,
        verdict=verdict,
        environment=run.environment,
        rollout=replace(run.rollout, engine=EngineSettings(), max_new_tokens=length),
        eval=how,
    )
    sampling = _with(eval_sampling(recipe), temperature=temperature, top_p=top_p)
    names, evaluation = _evaluated(recipe, sampling, progress)
    about = _about(origin, recipe, sampling, names)
    return EvalReport(path, _unfinished(path, model) + about, evaluation)


def _with(settings: Any, **changes: Any) -> Any:
    """Settings with the changes that are not None."""
    return replace(settings, **{key: value for key, value in changes.items() if value is not None})


def _evaluated(
    recipe: Recipe, sampling: Sampling, progress: Callable[[int, int], None] | None
) -> tuple[Sequence[str], Evaluation]:
    """Return the names of the reward functions, and the evaluation of a recipe's model."""
    prepared = PreparedEvaluation.of(recipe)
    with prepared.started as ends:
        ends.callback(torch.set_num_threads, torch.get_num_threads())
        policy = make_policy(prepared.blueprint.load(), prepared.blueprint.tokenizer, recipe.model)
        policy = seeing(policy, prepared.blueprint.images)
        fit_threads(policy, recipe.threads)
        sampler = replace(NATIVE, conversations=prepared.environment is not None)
        prove(policy, longest=prepared.longest, sampler=sampler, train=False)
        engine = NativeEngine(
            policy, max_rows=recipe.rollout.max_rows, environment=prepared.environment
        )
        evaluation = evaluate_prompts(
            recipe, prepared.rewards, engine, prepared.prompts, sampling, progress
        )
        return prepared.rewards.names, evaluation


def _origin(path: str, overrides: Sequence[str], parts: Sequence[str]) -> Origin | None:
    """Where a model comes from, its recipe changed as asked; None if no run made it.

    parts: of the recipe, which are used as they are: their code would run, and a change of what
        they name is warned of."""
    origin = origin_of(path)
    if origin is None:
        if overrides:
            raise ConfigError(
                f"{path} is no run, so there is no recipe to override: {overrides[0]}"
            )
        return None
    origin = overridden(origin, overrides)
    demand_trust(origin, ("model", *parts))
    read = replace(
        origin.recipe, model=ModelSettings(), critic=CriticSettings(), teacher=TeacherSettings()
    )
    now = {}
    for key, content in inputs_of(read).items():
        if key.partition(".")[0] in parts:
            now[key] = content
    warn_of_changed_inputs(origin.folder, now)
    return origin


def _data_of(
    path: str,
    run: Recipe | None,
    data: str | None,
    task: str | None,
    task_args: Mapping[str, Any] | None,
    split: str | None,
) -> DataSettings:
    """What to evaluate on: what is given, else what the run held out."""
    if run is not None and isinstance(data, Live) and data == run.data.path and run.data.parts:
        return replace(run.data, path=data)
    if data is not None or task is not None:
        # All rows of a file are held-out rows; the same rows, to train on, are not read.
        known = DataSettings() if run is None else run.data
        alone = replace(
            known,
            task=task,
            task_args=task_args or {},
            eval_fraction=0.0,
            eval_limit=None,
            path=data,
            eval_path=data,
        )
        return replace(
            alone,
            split=split or "test",
            eval_split=split or "test",
            limit=1 if task is not None else None,
        )
    if run is None:
        wrong = wrong_model(path)
        if wrong:
            raise ConfigError(wrong)
        raise ConfigError(
            f"no run made {path}, so nothing says what to evaluate it on: give data=FILE or"
            " task=NAME"
        )
    held = run.data
    for name in (held.path, held.eval_path):
        if name is not None and name.startswith(LIVE) and not isinstance(name, Live):
            raise ConfigError(
                f"{path} was evaluated on rows of the program that trained it ({name}): give"
                " data=ROWS"
            )
    if held.task is None and held.eval_path is None and not held.parts:
        raise ConfigError(
            f"{path} held nothing out of {held.path}, on which it was trained: give data=FILE or"
            " task=NAME"
        )
    return held if task_args is None else replace(held, task_args=task_args)


def _judges_of(path: str, run: Recipe) -> tuple[RewardSettings, ...]:
    """A run's reward functions, which must be there; of stages the folders of their models."""
    for reward in run.rewards:
        if reward.function.startswith(LIVE) and not isinstance(reward.function, Live):
            raise ConfigError(
                f"{path} was judged by a function of the program that trained it"
                f" ({reward.function}): give rewards=[FUNCTION]"
            )
    alone = replace(
        run,
        model=ModelSettings(),
        data=DataSettings(),
        critic=CriticSettings(),
        teacher=TeacherSettings(),
    )
    return resolved(alone).rewards


def _unfinished(path: str, model: str) -> str:
    """Which checkpoint it is, where a run that has not finished was named."""
    folder, named = Path(model).resolve(), expanded(path).resolve()
    if folder.name != "policy" or named in (folder, folder.parent):
        return ""
    return f"the checkpoint of step {step_of(folder.parent)}, the run has not finished; "


def _about(
    origin: Origin | None, recipe: Recipe, sampling: Sampling, rewards: Sequence[str]
) -> str:
    """What was asked, in one line."""
    settings = recipe.data
    source = settings.eval_path or settings.path or f"task {settings.task}"
    held = "" if settings.eval_path or settings.task else ", held out"
    parts = [
        f"data {source}{held}",
        f"rewards {', '.join(rewards)}",
        f"at most {counted(sampling.max_new_tokens, 'token')}",
    ]
    if settings.chat:
        parts.append("chat template")
    if settings.template:
        parts.append(f"template {settings.template!r}")
    if sampling.temperature != 1.0:
        parts.append(f"temperature {sampling.temperature:g}")
    if sampling.top_p != 1.0:
        parts.append(f"top-p {sampling.top_p:g}")
    text = "; ".join(parts)
    if origin is None:
        return text
    return f"{text} (the recipe is {origin.folder / 'config.yaml'})"
