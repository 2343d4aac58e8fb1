"""Weights & Biases, online or with `WANDB_MODE=offline`; its files lie in the run folder, below `wandb/`.

Project, entity and mode come from its own environment variables (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE).  What it would collect
by itself (command line, environment, git, console, code) is switched off: an override may hold a secret.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.runs.dashboards.base import PROJECT, About

REMEDY = "log in (wandb login), or set WANDB_MODE=offline"


def begin(about: About) -> WandbBoard:
    """Begin or continue a run; imports wandb."""
    import wandb  # type: ignore[reportMissingImports]

    return WandbBoard(wandb, about)


class WandbBoard:
    """One run, whose x axis is the step."""

    def __init__(self, wandb: Any, about: About) -> None:
        self._table = wandb.Table
        identity = about.identity or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=about.name,
            id=identity,
            resume="allow",
            dir=str(about.folder),
            config=dict(about.config),
            settings=wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                disable_job_creation=True,
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.identity: str | None = identity
        url = None if self._run.offline else self._run.url
        self.address = url or f"wandb sync {Path(self._run.dir).parent}"

    def write(self, step: int, wall: float, values: Mapping[str, float]) -> None:
        """Log the metrics with their step."""
        self._run.log({"step": step, **values})

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the group as a table."""
        columns = list(rows[0])
        table = self._table(columns=columns, data=[[row[column] for column in columns] for row in rows])
        self._run.log({"step": step, "group": table})

    def close(self, finished: bool) -> None:
        """End the run; its exit code is 1 if steps are left."""
        self._run.finish(exit_code=0 if finished else 1)
