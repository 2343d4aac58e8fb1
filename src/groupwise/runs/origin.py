"""The run that a path belongs to, and its recipe, read from its `config.yaml`: how its prompts, rewards and data were.

Importing this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from groupwise.config.recipes import parse_recorded
from groupwise.config.settings import Recipe
from groupwise.config.strict_yaml import parse
from groupwise.errors import ConfigError
from groupwise.runs.folder import CONFIG, METRICS, read_metrics
from groupwise.utils.files import expanded

HEIGHT = 3
"""From runs/x/checkpoints/000100/policy up to runs/x."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A run, known by its folder."""

    folder: Path
    recipe: Recipe

    @property
    def step(self) -> int:
        """The last step in its log; 0 if there is none."""
        return max((line["step"] for line in read_metrics(self.folder)), default=0)


def overridden(origin: Origin, overrides: Sequence[str]) -> Origin:
    """The run with overrides of its recipe.  Raises ConfigError."""
    file = origin.folder / CONFIG
    return replace(origin, recipe=parse_recorded(file.read_text(encoding="utf-8"), str(file), overrides)) if overrides else origin


def origin_of(path: str | Path) -> Origin | None:
    """The run of a run folder, or of a model, checkpoint, rollouts or file inside of one; None if no run made it.

    Of a run of several stages the stage that was written last is meant.  Data, models and reward functions that the recipe names
    need not be there any more.  Raises ConfigError if the run's `config.yaml` cannot be read.
    """
    place = expanded(path)
    if not place.exists():
        return None
    place = place.resolve()
    for folder in (place, *list(place.parents)[:HEIGHT]):
        if _is_run(folder):
            shown = expanded(path) if folder == place else folder
            return _read(shown)
    stages = sorted(place.glob(f"*/{METRICS}"), key=lambda log: log.stat().st_mtime) if place.is_dir() else []
    return _read(expanded(path) / stages[-1].parent.name) if stages and _is_run(stages[-1].parent) else None


def _is_run(folder: Path) -> bool:
    """True for a folder with a recipe in it."""
    try:
        tree, problems = parse((folder / CONFIG).read_text(encoding="utf-8"), CONFIG)
    except (OSError, UnicodeDecodeError):
        return False
    return bool(problems) or (isinstance(tree.value, dict) and "objective" in tree.value)


def _read(folder: Path) -> Origin:
    try:
        return Origin(folder=folder, recipe=parse_recorded((folder / CONFIG).read_text(encoding="utf-8"), str(folder / CONFIG)))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder / CONFIG} cannot be read: {error}") from error
