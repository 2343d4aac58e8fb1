"""The run that a path belongs to, and its recipe, read from its `config.yaml`: how its prompts, rewards and data were.

Importing this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from groupwise.config.recipes import parse_recorded
from groupwise.config.settings import Recipe
from groupwise.config.strict_yaml import parse
from groupwise.errors import RunError
from groupwise.runs.folder import CONFIG, LARGEST_CONFIG
from groupwise.runs.recorded import METRICS, read_metrics
from groupwise.runs.run_files import RunFiles
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
    """The run with overrides of its recipe.  Raises ConfigError, RunError."""
    return _read(origin.folder, overrides) if overrides else origin


def origin_of(path: str | Path) -> Origin | None:
    """The run of a run folder, or of a model, checkpoint, rollouts or file inside of one; None if no run made it.

    Of a run of several stages the stage that was written last is meant.  Data, models and reward functions that the recipe names
    need not be there any more.  Raises RunError or ConfigError if the run's `config.yaml` cannot be read.
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
    run = RunFiles(folder)
    if not run.has(CONFIG):
        return False
    try:
        document, problems = parse(run.text(CONFIG, LARGEST_CONFIG), CONFIG)
    except RunError:
        return True  # whoever reads it says what is wrong
    return bool(problems) or (isinstance(document.values, dict) and "objective" in document.values)


def _read(folder: Path, overrides: Sequence[str] = ()) -> Origin:
    text = RunFiles(folder).text(CONFIG, LARGEST_CONFIG)
    return Origin(folder=folder, recipe=parse_recorded(text, str(folder / CONFIG), overrides))
