"""Trackio: a local data base (below TRACKIO_DIR), shown by `trackio show`; it speaks to no other machine unless told to.

The project is TRACKIO_PROJECT, else `groupwise`.
"""

from __future__ import annotations

import io
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from groupwise.runs.dashboards.base import PROJECT, About

REMEDY = "see that TRACKIO_DIR can be written"


def begin(about: About) -> TrackioBoard:
    """Begin or continue a run; imports trackio."""
    import trackio  # type: ignore[reportMissingImports]

    return TrackioBoard(trackio, about)


class TrackioBoard:
    """One run of a project, known by its name."""

    def __init__(self, trackio: Any, about: About) -> None:
        self._trackio = trackio
        self.identity: str | None = about.identity or f"{about.name}-{secrets.token_hex(3)}"
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        with redirect_stdout(io.StringIO()):  # it prints how it is shown
            self._run = trackio.init(
                project=project,
                name=self.identity,
                config=dict(about.config),
                resume="never" if about.identity is None else "must",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self.address = f"trackio show --project {project}"

    def write(self, step: int, wall: float, values: Mapping[str, float]) -> None:
        """Log the metrics."""
        self._run.log(dict(values), step=step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the group as a table, its texts fenced."""
        data = [{name: fenced(value) if isinstance(value, str) else value for name, value in row.items()} for row in rows]
        self._run.log({"group": self._trackio.Table(data=data)}, step=step)

    def close(self, finished: bool) -> None:
        """End the run."""
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()  # the run's own method would be called, and print, once more at the end of the process


def fenced(text: str) -> str:
    """Text that Markdown shows as it is: Trackio reads texts in tables as Markdown, and what a model writes may load an image.

    >>> fenced("a ``` b")
    '````\\na ``` b\\n````'
    """
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"
