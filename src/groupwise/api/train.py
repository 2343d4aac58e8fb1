"""Training from Python: what a recipe says, as keyword arguments, with objects where a recipe has
names.

    import groupwise as gw

    training = gw.train(
        objective="grpo",
        model=model, tokenizer=tokenizer,
        data=[{"prompt": "2+2=", "answer": "4"}, ...],
        rewards=[lambda completion, answer: float(answer in completion)],
        steps=100, group={"group_size": 8}, name="mine",
    )
    for step in training: ...       # or training.run(): the plan, the progress line and the closing
        table of the command

It is the same run as from a file: the same checks, plan, run folder and resume.  Objects stand in
the folder's config.yaml by name (`live:...`, with a digest of their content); the same call resumes
the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from groupwise.api import objects
from groupwise.api.progress import aligned, make_console
from groupwise.api.stages import closing_table, train_stage
from groupwise.config import settings
from groupwise.config.recipes import make_recipe, run_folder
from groupwise.config.settings import Recipe
from groupwise.data.sources import kind_of
from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.records import Step
from groupwise.runs.folder import anew, choose_folder, finished, stopped_early
from groupwise.runs.prepared import plan_of
from groupwise.runs.run import Run, RunResult, join
from groupwise.runs.run import train as train_recipe
from groupwise.runs.trust import demand_trust_in_recipe
from groupwise.utils.terminal import escaped, logger

log = logger(__name__)


class RunPlan(list[tuple[str, str]]):
    """The lines of a plan, label and text; it shows itself as the command prints it."""

    def __repr__(self) -> str:
        return escaped("\n".join(aligned(self)))


class Training:
    """A checked run.  Iterate over it for its steps, or call `run`."""

    def __init__(self, recipe: Recipe, *, accept_changes: bool = False) -> None:
        """Use `train`."""
        self.recipe, self.accept_changes = recipe, accept_changes

    @property
    def folder(self) -> Path:
        """The run folder, `runs`/`name`."""
        return run_folder(self.recipe)

    def __iter__(self) -> Iterator[Step]:
        """Train, and yield every `Step`; one numbered 0 carries the evaluation before training.

        Leaving the loop saves a checkpoint; iterating again, or the same call in another process,
        resumes there.

        Raises ConfigError, DataError, RewardError, EngineError, CheckpointError, StorageError,
        Diverged.
        """
        self._say_if_finished()
        return train_recipe(self.recipe, accept_changes=self.accept_changes)

    def _say_if_finished(self) -> None:
        """Warn that no step will come, as the command says it."""
        step = finished(self.folder)
        if step is None or not comm.world().first:
            return
        if stopped_early(self.folder):
            message = (
                "%s finished at step %d by eval.stop_after: nothing is left to train; fresh=True"
                " starts anew"
            )
            log.warning(message, self.folder, step)
        elif self.recipe.steps is None or self.recipe.steps <= step:
            message = (
                "%s finished at step %d: nothing is left to train; fresh=True starts anew, more"
                " steps continue it"
            )
            log.warning(message, self.folder, step)

    def plan(self) -> RunPlan:
        """The plan, as label and text of each line.  It loads no weights and trains nothing."""
        return RunPlan(plan_of(self.recipe))

    def run(self, *, quiet: bool = False, console: Console | None = None) -> RunResult:
        """Train to the end and print what the command prints: plan, progress line, closing tables.
        Returns the outcome.

        quiet: print only warnings and the closing table.   Raises what iterating raises.
        """
        here = join(self.recipe)
        self._say_if_finished()
        folder = comm.from_first(lambda: choose_folder(self.recipe))
        with Run(self.recipe, folder, accept_changes=self.accept_changes) as run, comm.peers():
            console = console or make_console(quiet=not here.first)
            result = train_stage(run, self.recipe.name, console, quiet)
        closing_table(
            {self.recipe.objective: result}, {self.recipe.objective: self.recipe}, console
        )
        return result

    def __repr__(self) -> str:
        return f"Training({self.recipe.objective!r}, folder={str(self.folder)!r})"


class RecipeKeys(TypedDict, total=False):
    """The keys of a recipe as keywords of `train`; a section is a mapping or its dataclass."""

    objective: str | None
    name: str | None
    runs: objects.Path | None
    seed: int | None
    threads: int | None
    parallel: str | objects.Section | settings.ParallelSettings | None
    steps: int | None
    epochs: float | None
    batch_size: int | None
    model: objects.Model | settings.ModelSettings | None
    data: objects.Path | objects.Rows | objects.Section | settings.DataSettings | None
    rewards: objects.Reward | Sequence[objects.Reward] | None
    verdict: str | None
    rollout: objects.Section | settings.RolloutSettings | None
    environment: objects.Environment | objects.Section | settings.EnvironmentSettings | None
    group: objects.Section | settings.GroupSettings | None
    reward_model: objects.Section | settings.RewardModelSettings | None
    pairs: objects.Section | settings.PairSettings | None
    optimizer: objects.Section | settings.OptimizerSettings | None
    critic: objects.Section | settings.CriticSettings | None
    teacher: objects.Section | settings.TeacherSettings | None
    eval: objects.Section | settings.EvalSettings | None
    save: objects.Section | settings.SaveSettings | None


def train(
    recipe: str | os.PathLike[str] | Recipe | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tools: Sequence[str | Callable[..., Any]] | None = None,
    fresh: bool = False,
    accept_changes: bool = False,
    **keys: Unpack[RecipeKeys],
) -> Training:
    """A checked run.  Iterate over it for its `Step`s, or call its `run`.  The same call resumes
    it.

    recipe: a file, the name of a bundled recipe, or a `Recipe`, which keywords override.  Without
        it the keywords are the recipe.
    model: a checkpoint's folder or hub name, a loaded transformers model (with `tokenizer`, or its
        processor there where prompts have images), a `Policy`, or a mapping of the keys of `model`,
        whose `path` may be any of these.  A loaded model is copied and stays unchanged.
    data: a file or hub name, a list of mappings, a `datasets.Dataset`, or a mapping of the keys of
        `data`, whose `path` and `eval_path` may be any of these.  This call copies rows.
    rewards: one or several of: the name of a function as in a recipe, a function, a `LiveReward`, a
        mapping of the keys of an entry of `rewards`, whose `function` may be a function.
    tools: functions that the policy can call, or their names as in a recipe.
    environment: an environment's class, its name, a mapping of names to classes, or a mapping of
        the keys of `environment`, whose `factory`, `tools` and `harness` may be objects.
    fresh: start anew, under the first name of NAME, NAME-2, NAME-3 ... without a run.
    accept_changes: resume although data files, functions or models' weights changed since the run
        began.
    The other keywords are the keys of a recipe (`groupwise config` lists them); a section is a
    mapping, `optimizer={"lr": 1e-5}`, or its dataclass,
    `optimizer=gw.settings.OptimizerSettings(lr=1e-5)`.

    Raises ConfigError or DataError with all mistakes, before anything is loaded.

    >>> rows = [{"prompt": "1+1=", "completion": "2"}]
    >>> training = train(objective="sft", model={"scratch": {"hidden": 32}}, data=rows, steps=1)
    >>> training.recipe.data.path
    'live:1 row (eeebffb9)'
    """
    if not isinstance(recipe, str | os.PathLike | Recipe | None):
        remedy = (
            ": give a mapping's keys as keywords, train(**mapping)"
            if isinstance(recipe, Mapping)
            else ""
        )
        raise ConfigError(
            "a recipe is a file's path, the name of a bundled one or a Recipe, got"
            f" {kind_of(recipe)}{remedy}"
        )
    known, unknown = {}, {}
    for key, value in keys.items():
        if key not in RecipeKeys.__annotations__:
            unknown[key] = kind_of(value)  # refused with what may have been meant
        elif value is not None:
            known[key] = value
    values = objects.recipe_keys(known, tokenizer, tools) | unknown
    if isinstance(recipe, os.PathLike):
        recipe = os.fspath(recipe)
    if isinstance(recipe, str):
        demand_trust_in_recipe(recipe)
    if not isinstance(recipe, Recipe) or values:
        recipe = make_recipe(values, recipe)
    if fresh:
        stages = {recipe.objective: recipe}
        recipe = comm.from_first(lambda: anew(stages))[recipe.objective]
    return Training(recipe, accept_changes=accept_changes)
