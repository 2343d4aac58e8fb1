"""Groups of runs that differ by their seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from groupwise.errors import ConfigError, DataError
from groupwise.runs.origin import origin_of
from groupwise.viewer.sources import CompletionSource, RunSource, matching

SEED = re.compile(r"-seed=\d+")
"""What `groupwise train --seeds` puts into the names of run folders."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ by their seed.

    label: the pattern that was typed, or the runs' name without the seed; of one run its name.
    """

    label: str
    sources: tuple[CompletionSource, ...]


def setting_labels(sources: Sequence[CompletionSource]) -> list[str | None]:
    """Return the label of each run's group: its pattern, or its name without the seed.

    None for a run that is the only one of its setting.
    """
    settings = [source.pattern or SEED.sub("", str(source.path.absolute())) for source in sources]
    labels: list[str | None] = []
    for source, setting in zip(sources, settings, strict=True):
        if settings.count(setting) < 2:
            labels.append(None)
        else:
            labels.append(source.pattern or SEED.sub("", source.name))
    return labels


def read_group(pattern: str) -> RunGroup:
    """Read the runs of a pattern (`runs/a-*`) or of a folder; of several stages the newest one.

    Raises ConfigError, DataError, RunError.
    """
    places: dict[Path, Path] = {}
    for path in matching(pattern):
        origin = origin_of(path) if path.is_dir() else None
        if origin is not None:
            places[origin.folder.resolve()] = origin.folder
    if not places:
        raise ConfigError(
            f"no run folder is called {pattern!r}; a pattern with * stands in quotes: 'runs/mine-*'"
        )
    sources = []
    for folder in places.values():
        source = RunSource(folder)
        if not source.metrics().steps:
            raise DataError(f"{folder} has no metrics: leave it out of {pattern!r}")
        for problem in source.problems():
            raise DataError(problem)
        sources.append(source)
    return RunGroup(pattern, tuple(sources))


def check_apart(groups: Sequence[RunGroup]) -> None:
    """Raise ConfigError if a run stands in two groups: they would not be independent."""
    seen: dict[Path, str] = {}
    for group in groups:
        for source in group.sources:
            place = source.path.resolve()
            if place in seen:
                raise ConfigError(
                    f"{source.path} is among both {seen[place]!r} and {group.label!r}: a run is"
                    " compared with others, not with itself"
                )
            seen[place] = group.label
