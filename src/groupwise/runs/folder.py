"""The run folder: everything about a run that is kept, in files that others can read while it
trains (by `run_files`).

    config.yaml               resolved recipe, secrets redacted
    environment.json          one entry per start: versions, command, hardware, why it ended
    metrics.jsonl             one line a step
    rollouts/000012.parquet   one row per completion of that step
    evaluations/              the same of the held-out prompts, where there were evaluations
    tokens.parquet            the text of every token id
    tensorboard/ wandb/       the same metrics for dashboards (`save.report_to`)
    dashboards.json           what those call the run
    parts/NAME.py             source of the functions of a loss that were given as objects
    inputs.json               data and reward files: what they held when the run began
    done.json                 written when the last step is taken: the files of the final model
    checksums.txt             of all of these, but for the dashboards'
    .lock                     held by the process that writes here

Importing this file does not import torch: `groupwise runs` and `groupwise score` read run folders
through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise.config.recipes import changes, run_folder
from groupwise.config.settings import Recipe
from groupwise.errors import ConfigError, RunError
from groupwise.runs.lock import in_use
from groupwise.runs.run_files import RunFiles
from groupwise.runs.starts import attempts_of

CONFIG, DONE = "config.yaml", "done.json"
LARGEST_CONFIG = 1 << 17
"""Bytes of `config.yaml`: YAML is slow to read."""
FINAL = "final"
"""Folder of the trained model."""
PARTS = "parts"
"""Folder with the source of functions that a loss was given as objects."""
REFERENCE = "reference"
"""Folder with the weights before the first step, where a reference is needed."""


def anew(stages: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The same stages under the first name of NAME, NAME-2, NAME-3 ... under which none of them has
    run.

    They move together, so that a later one still builds on the earlier ones' models.
    """
    number, renamed = 1, dict(stages)
    while any((run_folder(recipe) / CONFIG).exists() for recipe in renamed.values()):
        number += 1
        for stage, recipe in stages.items():
            root = recipe.name.removesuffix(f"/{stage}")
            renamed[stage] = replace(recipe, name=f"{root}-{number}{recipe.name[len(root) :]}")
    return renamed


def choose_folder(recipe: Recipe) -> Path:
    """The folder in which a recipe runs; `Lock` makes it.

    Running the same recipe again resumes it.  Raises ConfigError with the differences if the folder
    holds a run of another recipe."""
    folder = run_folder(recipe)
    run = RunFiles(folder)
    if run.has(CONFIG):
        try:
            different = changes(run.text(CONFIG, LARGEST_CONFIG), recipe)
        except (RunError, ConfigError) as error:
            raise ConfigError(
                f"{folder / CONFIG} is damaged, so that nobody knows whether it is the same run"
                f" ({error}): restore it, delete it to continue with the recipe as it is now, or"
                " start anew with fresh=True"
            ) from error
        if different:
            lines = "\n".join(f"  {line}" for line in different)
            if (
                all(line.startswith(("steps:", "epochs:")) for line in different)
                and recipe.optimizer.schedule != "constant"
            ):
                lines += (
                    f"\n  (with optimizer.schedule: {recipe.optimizer.schedule} every step's"
                    " learning rate depends on the last one, so that a longer run is another run;"
                    f" to train its model further: model.path={folder / FINAL} name=...)"
                )
            remedy = "undo the change, choose another name=..., or start anew with fresh=True"
            raise ConfigError(f"{folder} holds a run of another configuration; {remedy}:\n{lines}")
    return folder


def finished(folder: Path) -> int | None:
    """The step after which a run finished, or None."""
    step = _ended(folder).get("step")
    return step if isinstance(step, int) else None


def stopped_early(folder: Path) -> bool:
    """True if a run finished before its last step, by `eval.stop_after`."""
    return "stopped" in _ended(folder)


def _ended(folder: Path) -> Mapping[str, Any]:
    """What `RunLog.finish` wrote; empty if it did not, or if that is damaged."""
    try:
        ended = RunFiles(folder).json(DONE)
    except RunError:
        return {}
    return ended if isinstance(ended, dict) else {}


def standing(run: RunFiles) -> tuple[str, str]:
    """`finished`, `live`, `failed` or `stopped`; and why it failed, else nothing."""
    if finished(run.folder) is not None:
        return "finished", ""
    if in_use(run.folder):
        return "live", ""
    with suppress(RunError):
        attempts = attempts_of(run)
        why = attempts[-1].get("ended") if attempts else None
        if isinstance(why, str):
            return "failed", why
    return "stopped", ""


def list_runs(root: Path) -> list[Path]:
    """The run folders under `root` (runs, and the stages of runs), sorted by name."""
    recipes = [*Path(root).glob(f"*/{CONFIG}"), *Path(root).glob(f"*/*/{CONFIG}")]
    return sorted(path.parent for path in recipes)
