"""Training from Python: what a recipe says, as keyword arguments, with objects where a recipe has names.

    import groupwise as gw

    training = gw.train(
        objective="grpo",
        model=model, tokenizer=tokenizer,
        data=[{"prompt": "2+2=", "answer": "4"}, ...],
        rewards=[lambda completion, answer: float(answer in completion)],
        steps=100, group={"group_size": 8}, name="mine",
    )
    for step in training: ...       # or training.run(): the plan, the progress line and the closing table of the command

It is the same run as from a file: the same checks, plan, run folder and resume.  Objects stand in the folder's config.yaml by name
(`live:...`, with a digest of their content); the same call resumes the run.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import numpy as np
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.config import settings
from groupwise.config.live_objects import Live
from groupwise.config.recipes import make_recipe, run_folder
from groupwise.config.settings import DataSettings, EnvironmentSettings, ModelSettings, Recipe, RewardSettings
from groupwise.data.sources import kind_of, live_rows
from groupwise.distributed import comm
from groupwise.errors import ConfigError, DataError
from groupwise.models.loading import live_model
from groupwise.models.policy import Policy
from groupwise.records import Step
from groupwise.rewards.find import LiveReward
from groupwise.runs import keys as typed
from groupwise.runs.folder import anew, choose_folder, finished
from groupwise.runs.plan import Lines
from groupwise.runs.prepare import plan_of
from groupwise.runs.progress import make_console
from groupwise.runs.run import Outcome, Run, join, train_stage
from groupwise.runs.run import train as train_recipe
from groupwise.utils.terminal import logger

log = logger(__name__)


class Training:
    """A run that has been checked and is ready to go: iterate over it for its steps, or let it `run`."""

    def __init__(self, recipe: Recipe, *, accept_changes: bool = False) -> None:
        """Use `train`."""
        self.recipe, self.accept_changes = recipe, accept_changes

    @property
    def folder(self) -> Path:
        """The run folder, `runs`/`name`."""
        return run_folder(self.recipe)

    def __iter__(self) -> Iterator[Step]:
        """Train, and yield every `Step`; one numbered 0 carries the evaluation before training.

        Leaving the loop saves a checkpoint; iterating again, or the same call in another process, resumes there.

        Raises ConfigError, DataError, RewardError, EngineError, CheckpointError, StorageError, Diverged.
        """
        self._say_if_finished()
        return train_recipe(self.recipe, accept_changes=self.accept_changes)

    def _say_if_finished(self) -> None:
        """Warn that no step will come, as the command says it."""
        step = finished(self.folder)
        if step is not None and (self.recipe.steps is None or self.recipe.steps <= step) and comm.world().first:
            said = "%s finished at step %d: nothing is left to train; fresh=True starts anew, more steps continue it"
            log.warning(said, self.folder, step)

    def plan(self) -> Lines:
        """What will happen, as label and text, without loading weights from a file or training."""
        return plan_of(self.recipe)

    def run(self, *, quiet: bool = False, console: Console | None = None) -> Outcome:
        """Train to the end as the command does: the plan, one progress line, a closing table.  Returns what the run came to.

        quiet: print warnings and the closing table only.   Raises what iterating raises.
        """
        here = join(self.recipe)
        self._say_if_finished()
        folder = comm.from_first(lambda: choose_folder(self.recipe))
        with Run(self.recipe, folder, accept_changes=self.accept_changes) as run, comm.peers():
            return train_stage(run, self.recipe.name, console or make_console(quiet=not here.first), quiet)

    def __repr__(self) -> str:
        return f"Training({self.recipe.objective!r}, folder={str(self.folder)!r})"


def train(
    recipe: str | os.PathLike[str] | Recipe | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tools: Sequence[str | Callable[..., Any]] | None = None,
    fresh: bool = False,
    accept_changes: bool = False,
    # made from config/settings.py by make docs
    objective: str | None = None,
    name: str | None = None,
    runs: str | None = None,
    seed: int | None = None,
    threads: int | None = None,
    parallel: str | typed.ParallelKeys | settings.ParallelSettings | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    model: typed.ModelGiven | typed.ModelKeys | settings.ModelSettings | None = None,
    data: typed.RowsGiven | typed.DataKeys | settings.DataSettings | None = None,
    rewards: typed.RewardGiven | Sequence[typed.RewardGiven] | None = None,
    rollout: typed.RolloutKeys | settings.RolloutSettings | None = None,
    environment: typed.EnvironmentsGiven | typed.EnvironmentKeys | settings.EnvironmentSettings | None = None,
    group: typed.GroupKeys | settings.GroupSettings | None = None,
    reward_model: typed.RewardModelKeys | settings.RewardModelSettings | None = None,
    pairs: typed.PairKeys | settings.PairSettings | None = None,
    optimizer: typed.OptimizerKeys | settings.OptimizerSettings | None = None,
    critic: typed.CriticKeys | settings.CriticSettings | None = None,
    teacher: typed.TeacherKeys | settings.TeacherSettings | None = None,
    eval: typed.EvalKeys | settings.EvalSettings | None = None,
    save: typed.SaveKeys | settings.SaveSettings | None = None,
    # end
    **unknown: Never,
) -> Training:
    """A run, checked and ready to go: iterate over it for its `Step`s, or call its `run`.  The same call again resumes it.

    recipe: a file, the name of a bundled recipe, or a `Recipe`; keywords are laid over it.  Without it they are the recipe.
    model: a checkpoint's folder or hub name, a loaded transformers model (with `tokenizer`), a `Policy`, or a mapping of the keys
    of `model`, whose `path` may be any of these.  A loaded model is copied: it is the start of the run, and stays as it is.
    data: a file or hub name, a list of mappings, a `datasets.Dataset`, or a mapping of the keys of `data`, whose `path` and
    `eval_path` may be any of these.  Rows are copied by this call.
    rewards: one or several of: the name of a function as in a recipe, the function itself, a `LiveReward`, a mapping of the keys of
    an entry of `rewards`, whose `function` may be the function itself.
    tools: functions that the policy may call, or their names as in a recipe.
    environment: an environment's class, its name, a mapping of names to such, or a mapping of the keys of `environment`, whose
    `factory`, `tools` and `harness` may be objects.
    fresh: start anew, under the first of NAME, NAME-2, NAME-3 ... that has not run.
    accept_changes: resume although data files, functions or models' weights have changed since the run began.
    The other keywords are the keys of a recipe (`groupwise config` lists them); a section is a mapping: `optimizer={"lr": 1e-5}`.

    Raises ConfigError or DataError with everything that is wrong, before anything is loaded.

    >>> training = train(objective="sft", model={"scratch": {"hidden": 32}}, data=[{"prompt": "1+1=", "completion": "2"}], steps=1)
    >>> training.recipe.data.path
    'live:1 row (eeebffb9)'
    """
    given = {key: value for key, value in locals().items() if key not in _OWN}
    keys = {key: value for key, value in (given | unknown).items() if value is not None}
    if not isinstance(recipe, str | os.PathLike | Recipe | None):
        remedy = ": give a mapping's keys as keywords, train(**mapping)" if isinstance(recipe, Mapping) else ""
        raise ConfigError(f"a recipe is a file's path, the name of a bundled one or a Recipe, got {kind_of(recipe)}{remedy}")
    if "model" in keys:
        keys["model"] = _model(keys["model"], tokenizer)
    elif tokenizer is not None:
        raise ConfigError("tokenizer belongs to a loaded model: say model=... too")
    if "data" in keys:
        keys["data"] = _data(keys["data"])
    if "rewards" in keys:
        keys["rewards"] = _rewards(keys["rewards"])
    if tools is not None or "environment" in keys:
        keys["environment"] = _environment(keys.get("environment"), tools)
    keys = {key: _plain(value, key) for key, value in keys.items()}
    made = (
        recipe
        if isinstance(recipe, Recipe) and not keys
        else make_recipe(keys, os.fspath(recipe) if isinstance(recipe, os.PathLike) else recipe)
    )
    if fresh:
        stages = {made.objective: made}
        made = comm.from_first(lambda: anew(stages))[made.objective]
    return Training(made, accept_changes=accept_changes)


_OWN = ("recipe", "tokenizer", "tools", "fresh", "accept_changes", "unknown")
"""Parameters of `train` that are no keys of a recipe."""


# ---------------------------------------------------------------- objects in, keys out


def _model(given: object, tokenizer: PreTrainedTokenizerBase | None) -> object:
    """The keys of `model`; `path` is a `Live` name where a loaded model was given."""
    keys = _keys(given)
    if keys is None:
        keys = {"path": given}
    model = keys.get("path")
    if isinstance(model, Policy):
        if tokenizer is not None:
            raise ConfigError("a Policy has its tokenizer: leave tokenizer out")
        model, tokenizer = model.model, model.tokenizer
    if isinstance(model, PreTrainedModel):
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ConfigError(
                f"a loaded model needs its tokenizer: tokenizer=AutoTokenizer.from_pretrained(...), got {kind_of(tokenizer)}"
            )
        return {**_own_dtype(model, keys), **keys, "path": live_model(model, tokenizer)}
    if model is not None and not isinstance(model, str | os.PathLike):
        hint = ""
        if hasattr(model, "merge_and_unload"):
            hint = ": merge its adapter first, or give the model under it with model={'path': model, 'lora': {'rank': 16}}"
        wanted = "a checkpoint's folder or hub name, a loaded transformers model, a Policy, or a mapping of the keys of `model`"
        raise ConfigError(f"model is {wanted}, got {kind_of(model)}{hint}")
    if tokenizer is not None:
        raise ConfigError(f"tokenizer belongs to a loaded model, and model is {kind_of(model)}; a checkpoint brings its own")
    return keys


def _own_dtype(model: PreTrainedModel, keys: Mapping[str, Any]) -> dict[str, str]:
    """`dtype` as the model was loaded, where the keys do not say it."""
    dtype = str(model.dtype).removeprefix("torch.")
    if "dtype" not in keys and dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"the model's weights are {dtype}: say in which type to train them, model={{'path': model, 'dtype': 'float32'}}, or "
            "load it with dtype=torch.float32 or torch.bfloat16"
        )
    return {"dtype": dtype}


def _data(given: object) -> object:
    """The keys of `data`; `path` and `eval_path` are `Live` names where rows were given."""
    keys = _keys(given)
    if keys is None:
        keys = {"path": given}
    elif keys and not set(keys) & set(_DATA) and all(isinstance(value, list | tuple | np.ndarray) for value in keys.values()):
        named = ", ".join(map(repr, keys))
        raise DataError(f"data is {kind_of(given)} with the columns {named}: give rows, datasets.Dataset.from_dict(data).to_list()")
    for key, name in (("path", "data"), ("eval_path", "eval_data")):
        if key in keys and not isinstance(keys[key], str | os.PathLike | None):
            keys[key] = live_rows(keys[key], name)
    return keys


def _rewards(given: object) -> list[object]:
    """The entries of `rewards`; a function itself is a `Live` name."""
    single = isinstance(given, str | Mapping | LiveReward | RewardSettings) or callable(given)
    if not single and not isinstance(given, Sequence):
        raise ConfigError(f"rewards is a function, its name, or a list of them, got {kind_of(given)}")
    entries = [given] if single else list(given)  # type: ignore[call-overload]
    return [_reward(entry, place) for place, entry in enumerate(entries)]


def _reward(given: Any, place: int) -> object:
    """One entry of `rewards`."""
    if isinstance(given, str):
        return {"function": given}
    others: dict[str, Any] = {}
    if isinstance(given, LiveReward):
        live = given
    else:
        keys = _keys(given)
        function: Any = given if keys is None else keys.get("function")
        if isinstance(function, LiveReward):
            raise ConfigError(f"rewards.{place}.function is a LiveReward: give it as the entry itself")
        if keys is not None and not callable(function):
            return keys  # by name
        live, others = LiveReward(function=function), dict(keys or {})
    if isinstance(live.function, type):
        raise ConfigError(f"rewards.{place} is the class {live.function.__name__}: give an instance of it")
    if not callable(live.function):
        wanted = "a function, the name of one, a LiveReward, or a mapping with `function`"
        raise ConfigError(f"rewards.{place} is {wanted}, got {kind_of(live.function)}")
    others = {key: value for key, value in others.items() if key != "function" and value is not None}
    if getattr(live.function, "__name__", "") == "<lambda>":
        others.setdefault("name", live.name or f"reward_{place + 1}")
    written = live.settings()
    keys = dataclasses.asdict(written) | others
    return keys | {"function": Live(str(keys["name"]), live)}


def _environment(given: object, tools: Sequence[object] | None) -> dict[str, Any]:
    """The keys of `environment`; functions and classes are `Live` names."""
    section = isinstance(given, EnvironmentSettings) or (isinstance(given, Mapping) and bool(set(given) & set(_ENVIRONMENT)))
    keys: dict[str, Any] = {"factory": given} if given is not None and not section else dict(_keys(given) or {})
    if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):
        raise ConfigError(f"tools is a list of functions or their names, got {kind_of(tools)}")
    named = [*(keys.get("tools") or ()), *(tools or ())]
    keys["tools"] = [_callable(tool, f"tools.{place}") for place, tool in enumerate(named)]
    factory = keys.get("factory")
    if isinstance(factory, Mapping):
        keys["factory"] = {str(name): _callable(one, f"environment.factory.{name}") for name, one in factory.items()}
    elif factory is not None:
        keys["factory"] = _callable(factory, "environment.factory")
    if callable(keys.get("harness")):
        keys["harness"] = _callable(keys["harness"], "environment.harness")
    return {key: value for key, value in keys.items() if value is not None}


def _callable(given: object, where: str) -> str:
    """The name of a tool or of what makes an environment; with the object where one was given."""
    if isinstance(given, str):
        return given
    if not callable(given):
        raise ConfigError(f"{where} is a function or a class, or the name of one, got {kind_of(given)}")
    inner = given
    while isinstance(inner, functools.partial):
        inner = inner.func
    return Live(str(getattr(inner, "__name__", type(inner).__name__)), given)


_DATA = tuple(field.name for field in dataclasses.fields(DataSettings))
_ENVIRONMENT = tuple(field.name for field in dataclasses.fields(EnvironmentSettings))


def _keys(given: object) -> dict[str, Any] | None:
    """The keys of a section that was given as a mapping or as its dataclass; None if it is neither."""
    if isinstance(given, ModelSettings | DataSettings | RewardSettings | EnvironmentSettings):
        return dataclasses.asdict(given)
    splits = type(given).__module__.partition(".")[0] == "datasets"  # a DatasetDict is a mapping, too
    return {str(key): value for key, value in given.items()} if isinstance(given, Mapping) and not splits else None


def _plain(value: object, key: str) -> object:
    """A value as a file could hold it: dataclasses become mappings, numpy's numbers Python's.  Raises ConfigError for an object."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case os.PathLike():
            return os.fspath(value)
        case np.generic():
            return value.item()
        case Mapping():
            return {str(name): _plain(inner, f"{key}.{name}") for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner, f"{key}.{place}") for place, inner in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value), key)
    raise ConfigError(
        f"{key} is {kind_of(value)}, which no recipe can hold: {_REMEDY.get(key.partition('.')[0], 'give plain values')}"
    )


_REMEDY = {"rewards": "give the function itself an object by a closure or functools.partial"}
