"""MLflow: a tracking server named by MLFLOW_TRACKING_URI, else a SQLite file beside the runs (`runs/mlflow.db`).

The experiment is MLFLOW_EXPERIMENT_NAME, else `groupwise`.  Numbers are sent in the background, so that a slow server does not slow
the run down.  Nothing is collected that is not sent here: no command line, no environment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.runs.dashboards.base import PROJECT, About

REMEDY = "see that MLFLOW_TRACKING_URI names a server that answers, or a folder that can be written"
UNKNOWN = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow takes in no name; each becomes an underscore."""
AT_ONCE, LONGEST = 100, 500
"""Parameters of one request, and characters of a parameter's value, that every version and store takes."""
BEHIND = 50
"""Steps that may be on their way."""


def begin(about: About) -> MlflowBoard:
    """Begin or continue a run; imports mlflow."""
    import mlflow  # type: ignore[reportMissingImports]

    return MlflowBoard(mlflow, about)


class MlflowBoard:
    """One run of an experiment; groups are tables of their own, `groups/000012.json`."""

    def __init__(self, mlflow: Any, about: About) -> None:
        self._mlflow = mlflow
        uri, place = os.environ.get("MLFLOW_TRACKING_URI"), None
        if uri is None:
            root = Path(*about.folder.resolve().parts[: -len(Path(about.name).parts)])  # runs/NAME -> runs
            uri, place = f"sqlite:///{root / 'mlflow.db'}", (root / "mlflow").as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        if about.identity is None:
            run = self._client.create_run(self._experiment(place), run_name=about.name)
            self.identity: str | None = run.info.run_id
            params = [mlflow.entities.Param(_name(key), value[:LONGEST]) for key, value in flat(about.config)]
            for start in range(0, len(params), AT_ONCE):
                self._client.log_batch(run.info.run_id, params=params[start : start + AT_ONCE])
        else:
            self.identity = self._client.get_run(about.identity).info.run_id
            self._client.update_run(about.identity, status="RUNNING")
        assert self.identity is not None
        self._run = self.identity
        self._sent: list[Any] = []
        self.address = f"run {self._run} of {uri}"

    def _experiment(self, place: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        try:
            return self._client.create_experiment(name, artifact_location=place)
        except self._mlflow.exceptions.MlflowException:  # another run has just made it
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return found.experiment_id

    def write(self, step: int, wall: float, values: Mapping[str, float]) -> None:
        """Send the metrics in the background.  Raises what an earlier batch raised."""
        metrics = [self._mlflow.entities.Metric(_name(name), value, round(1000 * wall), step) for name, value in values.items()]
        self._sent.append(self._client.log_batch(self._run, metrics=metrics, synchronous=False))
        if len(self._sent) > BEHIND:
            self._sent.pop(0).wait()  # raises what went wrong with it

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the group as a table of its own."""
        columns = {column: [row[column] for row in rows] for column in rows[0]}
        self._client.log_table(self._run, data=columns, artifact_file=f"groups/{step:06d}.json")

    def close(self, finished: bool) -> None:
        """Wait for what is being sent, and end the run."""
        for sent in self._sent:
            sent.wait()
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


def _name(name: str) -> str:
    return UNKNOWN.sub("_", name)


def flat(config: Any, prefix: str = "") -> list[tuple[str, str]]:
    """A recipe as dotted keys and texts.

    >>> flat({"steps": 3, "group": {"beta": 0.0, "ratio": None}, "rewards": [{"function": "accuracy"}]})
    [('steps', '3'), ('group.beta', '0.0'), ('group.ratio', 'null'), ('rewards.0.function', 'accuracy')]
    """
    if isinstance(config, Mapping) and config:
        return [pair for key, inner in config.items() for pair in flat(inner, f"{prefix}.{key}".lstrip("."))]
    if isinstance(config, list) and config:
        return [pair for key, inner in enumerate(config) for pair in flat(inner, f"{prefix}.{key}".lstrip("."))]
    return [(prefix, config if isinstance(config, str) else json.dumps(config))]
