"""What a stage of a recipe leaves for the stages after it: its final model, and preference pairs of what it sampled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise.config.recipes import run_folder
from groupwise.config.settings import Recipe
from groupwise.config.validation import STAGE
from groupwise.distributed import comm
from groupwise.errors import ConfigError, DataError
from groupwise.runs.folder import FINAL
from groupwise.runs.recorded import list_rollouts, read_step
from groupwise.training.preferences import preference_rows
from groupwise.utils import files


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
