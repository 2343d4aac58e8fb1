"""The run that a path belongs to: a run folder, or a model, checkpoint or file inside of one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from groupwise.config.recipes import parse_recorded
from groupwise.config.settings import Recipe
from groupwise.config.strict_yaml import parse
from groupwise.errors import ConfigError, RunError
from groupwise.runs.folder import CONFIG, LARGEST_CONFIG
from groupwise.runs.metrics_log import METRICS, read_metrics
from groupwise.runs.run_files import RunFiles
from groupwise.runs.starts import ENVIRONMENT, at_moment, moment_of
from groupwise.utils.files import expanded
from groupwise.utils.spelling import near_path

HEIGHT = 3
"""From runs/x/checkpoints/000100/policy up to runs/x."""
LISTED = 12
"""Runs that are named of a folder that holds more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A run, known by its folder."""

    folder: Path
    recipe: Recipe
    config: str
    """The text that the recipe was read from: the run's `config.yaml`."""

    @property
    def step(self) -> int:
        """The last step in its log; 0 if there is none."""
        return max((line["step"] for line in read_metrics(self.folder)), default=0)

    @property
    def dated(self) -> Recipe:
        """The recipe whose chat templates write the date of the run's first start."""
        return at_moment(self.recipe, moment_of(self.folder, time.time()))


def overridden(origin: Origin, overrides: Sequence[str]) -> Origin:
    """The run with overrides of its recipe.  Raises ConfigError, RunError."""
    if not overrides:
        return origin
    place = str(origin.folder / CONFIG)
    return replace(origin, recipe=parse_recorded(origin.config, place, overrides))


def origin_of(path: str | Path) -> Origin | None:
    """The run of a run folder, or of a model, checkpoint, rollouts or file inside of one; None if
    no run made it.

    Of a run of several stages the stage that was written last is meant.  Data, models and reward
    functions that the recipe names need not be there any more.  Raises RunError or ConfigError if
    the run's `config.yaml` cannot be read, ConfigError for a folder of several runs.
    """
    place = expanded(path)
    if not place.exists():
        return None
    place = place.resolve()
    for folder in (place, *list(place.parents)[:HEIGHT]):
        if _is_run(folder):
            shown = expanded(path) if folder == place else folder
            return _read(shown)
    if not place.is_dir():
        return None
    logs = sorted(place.glob(f"*/{METRICS}"), key=lambda log: log.stat().st_mtime)
    if not logs or not _is_run(logs[-1].parent):
        return None
    newest = _read(expanded(path) / logs[-1].parent.name)
    if "/" not in newest.recipe.name:  # a stage is called RUN/STAGE
        runs = sorted(log.parent.name for log in logs)
        listed = ", ".join(runs[:LISTED])
        if len(runs) > LISTED:
            listed += ", ..."
        raise ConfigError(f"{path} holds runs and is none itself: name one of them ({listed})")
    return newest


def is_config_of(path: str | Path, origin: Origin) -> bool:
    """Return whether a path is the `config.yaml` of a run, and not a recipe that has this name."""
    begun = RunFiles(origin.folder).has(METRICS) or RunFiles(origin.folder).has(ENVIRONMENT)
    return begun and expanded(path).resolve() == (origin.folder / CONFIG).resolve()


def run_of(path: str | Path, otherwise: str = "") -> Origin:
    """`origin_of` what must be a run's.   otherwise: the end of the message where it is none.
    Raises ConfigError, RunError.
    """
    if (origin := origin_of(path)) is None:
        if not os.path.exists(expanded(path)):
            raise ConfigError(f"no such folder {str(path)!r}{near_path(expanded(path))}{otherwise}")
        raise ConfigError(f"{path} is no run folder: it has no {CONFIG}{otherwise}")
    return origin


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


def _read(folder: Path) -> Origin:
    text = RunFiles(folder).text(CONFIG, LARGEST_CONFIG)
    return Origin(folder=folder, recipe=parse_recorded(text, str(folder / CONFIG)), config=text)
