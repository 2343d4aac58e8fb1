"""What all dashboards share: which of them a run reports to, what is sent, and that none of them can end a run.

    every step    the numbers of its line in metrics.jsonl, against the step
    its table     the group whose rewards differ most: prompt, completions, reward, rewards by function, finish, tokens; where the
                  step's completions are recorded (`save.rollouts_every`), and the library has tables
    once          the resolved recipe, with secrets redacted

A resumed run continues in the dashboards' run that it began, whose name each library gave stands in `dashboards.json`.  Steps
that were sent and are taken again are the same steps, and are not sent twice.

Importing this file imports no dashboard's library, and not torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from groupwise.config.recipes import dump
from groupwise.config.settings import Recipe
from groupwise.config.strict_yaml import parse
from groupwise.errors import ConfigError
from groupwise.records import Scored, Step
from groupwise.utils import files
from groupwise.utils.terminal import logger

log = logger("groupwise")

IDENTITIES = "dashboards.json"
"""What each library calls this run, in the run folder."""
PROJECT = "groupwise"
"""Where runs are put together, unless the library's own environment variable names another project."""
LONGEST = 4000
"""Characters of a text in a table: the prompt's last, the completion's first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a dashboard is told of a run when it begins."""

    folder: Path
    """The run folder."""
    name: str
    config: Mapping[str, Any]
    """The resolved recipe, secrets redacted."""
    identity: str | None
    """What the library called the run when it began; None: it begins now."""


class Dashboard(Protocol):
    """One library's run.  Whatever a method raises, `Dashboards` takes the dashboard away and the run continues."""

    identity: str | None
    """What the library calls the run, by which it is found again; None where it is made anew at every start."""
    address: str
    """Where a person finds it."""

    def write(self, step: int, wall: float, values: Mapping[str, float]) -> None:
        """The metrics of a step.  wall: seconds since the epoch."""

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A group of a step, one row per completion (`rows_of`); nothing where the library has no tables."""

    def close(self, finished: bool) -> None:
        """The process ends.  finished: False if steps are left, which another process may take."""


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""Dashboard and the package that it needs, which is also the name of Groupwise's extra."""


def check(names: Iterable[str]) -> None:
    """Raises ConfigError with the line that installs what is missing."""
    missing = [name for name in names if importlib.util.find_spec(PACKAGES[name]) is None]
    if missing:
        raise ConfigError(
            f"save.report_to: {', '.join(missing)} is not installed: pip install 'groupwise[{','.join(missing)}]', or take it out "
            "(metrics.jsonl is always written)"
        )


class Dashboards:
    """Those that a recipe names, of a run that has written `lines` and may have sent the steps up to `sent`."""

    def __init__(self, folder: Path, recipe: Recipe, lines: Sequence[Mapping[str, Any]], sent: int) -> None:
        """lines: what stands in metrics.jsonl now.   sent: the last step that stood there before the run was resumed.

        Raises ConfigError for a library that is missing or refuses to begin.
        """
        check(recipe.save.report_to)
        self._open: dict[str, Dashboard] = {}
        self._sent: dict[str, int] = {}
        known = _identities(folder / IDENTITIES) if lines else {}
        document, _ = parse(dump(recipe), "config.yaml")
        for name in recipe.save.report_to:
            about = About(folder=folder, name=recipe.name, config=document.values, identity=known.get(name))
            module = importlib.import_module(f"groupwise.runs.dashboards.to_{name}")
            try:
                found: Dashboard = module.begin(about)
            except Exception as error:  # each library has errors of its own
                raise ConfigError(
                    f"save.report_to: {name} could not begin ({type(error).__name__}: {error}); {module.REMEDY}, or take it out"
                ) from error
            self._open[name] = found
            self._sent[name] = sent if name in known else -1
            log.info("%s: %s", name, found.address)
        identities = {name: board.identity for name, board in self._open.items() if board.identity is not None}
        if identities or known:
            files.write(folder / IDENTITIES, json.dumps(identities, indent=1).encode())
        for line in lines:
            self.write(line)

    def write(self, line: Mapping[str, Any], *, again: bool = False) -> None:
        """Send a line of the log.   again: also if its step was sent, because it has more to say now."""
        step, values = int(line["step"]), numbers(line)
        for name in list(self._open):
            if again or step > self._sent[name]:
                self._each(name, lambda board: board.write(step, float(line.get("wall", 0.0)), values))

    def table(self, step: Step) -> None:
        """Send the most telling group of a step."""
        group = most_telling(step.groups)
        if group is None:
            return
        rows = rows_of(group)
        for name in list(self._open):
            if step.number > self._sent[name]:
                self._each(name, lambda board: board.table(step.number, rows))

    def close(self, finished: bool) -> None:
        """Send what is left.  Safe to call twice."""
        for name in list(self._open):
            self._each(name, lambda board: board.close(finished))
        self._open = {}

    def _each(self, name: str, call: Callable[[Dashboard], None]) -> None:
        try:
            call(self._open[name])
        except Exception as error:  # a server that is gone, a full disk: what counts is in the run folder
            log.warning(
                "%s failed (%s: %s) and gets nothing more from this process; metrics.jsonl has everything",
                name,
                type(error).__name__,
                error,
            )
            del self._open[name]


def _identities(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(name): value for name, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line: all of its numbers but the step and the time of day.

    >>> numbers({"step": 3, "wall": 1.7e9, "reward": 0.5, "note": "x"})
    {'reward': 0.5}
    """
    kept = {name: value for name, value in line.items() if name not in ("step", "wall")}
    return {name: float(value) for name, value in kept.items() if isinstance(value, int | float) and not isinstance(value, bool)}


def most_telling(groups: Sequence[Scored]) -> Scored | None:
    """The group whose rewards differ most (the first of equals); None if there is none with a reward."""
    spreads = [float(np.nanstd(g.reward)) if np.isfinite(g.reward).any() else -1.0 for g in groups]
    return groups[int(np.argmax(spreads))] if spreads and max(spreads) >= 0.0 else None


def rows_of(group: Scored) -> list[dict[str, Any]]:
    """A group as rows of a table, the best completion first."""
    prompt = group.prompt.text
    found = [
        {
            "prompt": prompt[-LONGEST:],
            "completion": rollout.text[:LONGEST],
            "reward": float(group.reward[i]),
            **{f"rewards/{name}": float(group.rewards[i, k]) for k, name in enumerate(group.names)},
            "finish": str(rollout.finish),
            "tokens": len(rollout),
        }
        for i, rollout in enumerate(group.rollouts)
    ]
    return sorted(found, key=lambda row: -row["reward"] if row["reward"] == row["reward"] else float("inf"))
