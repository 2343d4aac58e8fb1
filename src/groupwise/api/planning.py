"""`groupwise train --dry-run`: the plan of every stage of a recipe, before anything is loaded."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from groupwise.api.progress import Progress, duration, make_console
from groupwise.config.recipes import changes, load_stages, run_folder, with_lines
from groupwise.config.settings import Recipe
from groupwise.config.validation import STAGE
from groupwise.data.tokenizers import byte_tokenizer
from groupwise.distributed import comm, process_group
from groupwise.errors import ConfigError, RunError
from groupwise.runs.folder import CONFIG, LARGEST_CONFIG, anew
from groupwise.runs.metrics_log import LogReader, merged
from groupwise.runs.plan import Lines
from groupwise.runs.prepared import Prepared
from groupwise.runs.run_files import RunFiles
from groupwise.runs.step_time import StepTime, step_time
from groupwise.runs.trust import demand_trust_in_recipe
from groupwise.utils import files
from groupwise.utils.spelling import counted

RECENT = 20
"""Steps at the end of a log whose times say how long a step takes."""
MEASURED = "-measured"
"""What is added to a run's name for the two steps that measure its time."""
FEW_HELD_OUT = "data.eval_limit=8"
"""Keeps the evaluations of these two steps short."""
SET_TO_MEASURE = ("steps=", "name=", "data.eval_limit=")
NOT_OF_A_STEP = ("steps:", "epochs:", "data.eval_limit:")
"""Changes of a recipe that change no step's time."""


def plan_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    fresh: bool = False,
    world: int | None = None,
    model_config: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> int:
    """Print the plan of every stage of a recipe, and return the exit status.

    fresh: plan for a run under the next name.   world: so many processes.
    model_config: the configuration of another model; where the recipe's own is not at hand, a
        tokenizer of bytes takes the place of its tokenizer.
    Raises ConfigError, DataError.
    """
    demand_trust_in_recipe(path)
    with ExitStack() as open_until_planned:
        notes = Lines()
        if model_config is not None and not _can_load(path, overrides):
            stand_in = open_until_planned.enter_context(_model_of_bytes(model_config))
            overrides = [*overrides, f"model.path={stand_in}", "data.chat_template_kwargs={}"]
            notes = [
                ("tokenizer", "bytes: the recipe's model is not at hand; its prompts are shorter")
            ]
        stages = load_stages(path, overrides)
        here = process_group.join(process_group.TIMEOUT, cuda=False)
        console = console or make_console(quiet=not here.first)
        if fresh:
            stages = comm.from_first(lambda: anew(stages))
        elsewhere = world is not None or model_config is not None
        for number, (stage, recipe) in enumerate(stages.items(), 1):
            title = recipe.name
            if len(stages) > 1:
                title += f" ({number} of {len(stages)})"
            with (
                with_lines(path, overrides, stage),
                Progress(recipe.steps or 1, title, console=console) as progress,
            ):
                plan, estimate = _plan_from_beginning(recipe, stages, world, model_config)
                times = time_lines(recipe, path, overrides, estimate, elsewhere=elsewhere)
                progress.plan([*plan, *notes, *times])
    process_group.leave()
    return 0


def _can_load(path: str | Path, overrides: Sequence[str]) -> bool:
    try:
        load_stages(path, overrides)
    except ConfigError:
        return False
    return True


@contextmanager
def _model_of_bytes(config: Mapping[str, Any]) -> Iterator[str]:
    """Make a folder with a model's configuration and a tokenizer of bytes, for as long as the
    context lasts.
    """
    with TemporaryDirectory() as folder:
        byte_tokenizer().save_pretrained(folder)
        text = json.dumps(dict(config), default=str)
        files.write(Path(folder) / "config.json", text.encode())
        yield folder


def _plan_from_beginning(
    recipe: Recipe,
    stages: Mapping[str, Recipe],
    world: int | None,
    config: Mapping[str, Any] | None,
) -> tuple[Lines, StepTime | None]:
    """Plan a stage before the stages it builds on exist: their models have the shape of what those
    start from.  With an estimate of a step's seconds, where there is one.
    """
    if (recipe.data.path or "").startswith(STAGE):
        sampled = f"pairs of what {recipe.data.path} will have sampled; not there yet"
        return [("objective", recipe.objective), ("data", sampled)], None
    known, scorers = [], []
    for reward in recipe.rewards:
        path = str(reward.args.get("path"))
        if path.startswith(STAGE):
            scorers.append(_from_beginning(stages[path.removeprefix(STAGE)], stages))
        else:
            known.append(reward)
    begun = _from_beginning(replace(recipe, rewards=tuple(known)), stages)
    prepared = Prepared.of(begun, scorers=scorers, world=world, config=config)
    prepared.close()
    return prepared.plan, step_time(prepared)


def _from_beginning(recipe: Recipe, stages: Mapping[str, Recipe]) -> Recipe:
    """Return the recipe with the model that its first stage starts from: the same shape, and it
    exists before anything was trained.

    Data that are sampled on the way are replaced by those of the stage before.
    """
    while recipe.model.path is not None and recipe.model.path.startswith(STAGE):
        earlier = stages[recipe.model.path.removeprefix(STAGE)]
        model = replace(recipe.model, path=earlier.model.path, scratch=earlier.model.scratch)
        recipe = replace(recipe, model=model)
        if (recipe.data.path or "").startswith(STAGE):
            recipe = replace(recipe, data=earlier.data)
    return recipe


# ---------------------------------------------------------------- how long it takes


def time_lines(
    recipe: Recipe,
    path: str | Path,
    overrides: Sequence[str],
    estimate: StepTime | None = None,
    *,
    elsewhere: bool = False,
) -> Lines:
    """Say how long the steps take, by what a run of the same recipe has recorded; else by what was
    measured on such a device, with the command that measures it here.

    elsewhere: the plan is for other processes or another model, which nothing here has measured.
    """
    root, slash, stage = recipe.name.partition("/")
    measuring = replace(recipe, name=f"{root}{MEASURED}{slash}{stage}")
    measured = () if elsewhere else (recipe, measuring)
    for run in measured:
        folder = run_folder(run)
        seconds = _recorded_seconds(folder, recipe)
        if seconds:
            source = f"steps {min(seconds)} to {max(seconds)} in {folder}"
            text = _range(recipe, min(seconds.values()), max(seconds.values()), source)
            return [("time", text)]
    others = [one for one in overrides if not one.startswith(SET_TO_MEASURE)]
    arguments = [str(path), *others, "steps=2", FEW_HELD_OUT, f"name={root}{MEASURED}"]
    command = shlex.join(["groupwise", "train", *arguments])
    where = "there" if elsewhere else "then plan again"
    lines = [("time", f"not measured yet: `{command}` trains two steps, {where}")]
    if estimate is not None and not elsewhere:
        text = _range(recipe, estimate.least, estimate.most, estimate.source)
        lines.insert(0, ("estimate", text))
    return lines


def _range(recipe: Recipe, least: float, most: float, source: str) -> str:
    """Seconds of a step and of all steps, and where they are from."""
    text = f"{least:.2g} to {most:.2g} s a step ({source})"
    if recipe.steps is None:
        return text
    whole = f"{duration(least * recipe.steps)} to {duration(most * recipe.steps)}"
    return f"{text}: {counted(recipe.steps, 'step')} take {whole}, without evaluations"


def _recorded_seconds(folder: Path, recipe: Recipe) -> dict[int, float]:
    """Read the seconds of the newest steps of a run, if it is one of this recipe, whatever its
    number of steps.
    """
    run = RunFiles(folder)
    if not run.has(CONFIG):
        return {}
    try:
        different = changes(run.text(CONFIG, LARGEST_CONFIG), recipe)
        lines = merged(LogReader(run).read())
    except (RunError, ConfigError):
        return {}
    if any(not line.startswith(NOT_OF_A_STEP) for line in different):
        return {}
    seconds = {}
    for line in lines[-RECENT:]:
        phases = [
            value
            for name, value in line.items()
            if name.startswith("time/") and name.count("/") == 1
        ]
        if phases:
            seconds[line["step"]] = sum(phases)
    return seconds
