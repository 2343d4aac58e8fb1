"""Other people's dashboards: TensorBoard, Weights & Biases, MLflow and Trackio get a run's metrics
and its most telling groups.

    every step    the numbers of its line in metrics.jsonl, against the step
    its table     the group whose rewards differ most: prompt, completions, reward, rewards by
                  function, finish, tokens; where the step's completions are recorded
                  (`save.rollouts_every`), and the library has tables
    once          the resolved recipe, with secrets redacted

A resumed run continues in the dashboards' run that it began: `dashboards.json` holds what each
library called it.  Steps that were sent and are taken again are the same steps, and are not sent
twice.  A dashboard that fails is named in a warning and left alone: the run continues, and its
folder holds everything.

Importing this file imports no dashboard's library, and not torch.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from groupwise.config.recipes import dump
from groupwise.config.settings import Recipe
from groupwise.config.strict_yaml import parse
from groupwise.errors import ConfigError
from groupwise.records import RolloutGroup, Step
from groupwise.utils import files
from groupwise.utils.terminal import logger

log = logger("groupwise")

IDENTITIES = "dashboards.json"
"""What each library calls this run, in the run folder."""
PROJECT = "groupwise"
"""Where runs are put together, unless the library's own environment variable names another project.
"""
LONGEST = 4000
"""Characters of a text in a table: the prompt's last, the completion's first."""
Rows = Sequence[Mapping[str, Any]]
"""A group as a table: a row per completion (`rows_of`)."""


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
    """One library's run.  Whatever a method raises, `Dashboards` takes the dashboard away and the
    run continues.
    """

    identity: str | None
    """What the library calls the run, by which it is found again; None where it is made anew at
    every start.
    """
    address: str
    """Where a person finds it."""

    def write(self, step: int, wall: float, values: Mapping[str, float]) -> None:
        """The metrics of a step.  wall: seconds since the epoch."""

    def table(self, step: int, rows: Rows) -> None:
        """A group of a step; nothing where the library has no tables."""

    def close(self, finished: bool) -> None:
        """The process ends.  finished: False if steps are left, which another process may take."""


def check(names: Iterable[str]) -> None:
    """Raises ConfigError with the line that installs what is missing: a dashboard and its package
    have one name.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"save.report_to: {', '.join(missing)} is not installed: pip install"
            f" {' '.join(missing)}, or take it out (metrics.jsonl is always written)"
        )


class Dashboards:
    """Sends the lines of a run to the dashboards that its recipe names."""

    def __init__(
        self, folder: Path, recipe: Recipe, lines: Sequence[Mapping[str, Any]], sent: int
    ) -> None:
        """lines: what stands in metrics.jsonl now.   sent: the last step that stood there before
        the run was resumed.

        Raises ConfigError for a library that is missing or refuses to begin.
        """
        check(recipe.save.report_to)
        self._open: dict[str, Dashboard] = {}
        self._sent: dict[str, int] = {}
        known = _identities(folder / IDENTITIES) if lines else {}
        document, _ = parse(dump(recipe), "config.yaml")
        for name in recipe.save.report_to:
            begin, remedy = BOARDS[name]
            about = About(
                folder=folder, name=recipe.name, config=document.values, identity=known.get(name)
            )
            try:
                board = begin(about)
            except Exception as error:  # each library has errors of its own
                raise ConfigError(
                    f"save.report_to: {name} could not begin ({type(error).__name__}: {error});"
                    f" {remedy}, or take it out"
                ) from error
            self._open[name] = board
            self._sent[name] = sent if name in known else -1
            log.info("%s: %s", name, board.address)
        identities = {}
        for name, board in self._open.items():
            if board.identity is not None:
                identities[name] = board.identity
        if identities or known:
            files.write(folder / IDENTITIES, json.dumps(identities, indent=1).encode())
        for line in lines:
            self.write(line)

    def write(self, line: Mapping[str, Any], *, again: bool = False) -> None:
        """Send a line of the log.   again: also if its step was sent, because it has more to say
        now.
        """
        step, values = int(line["step"]), numbers(line)
        self._each(
            lambda board: board.write(step, float(line.get("wall", 0.0)), values),
            after=-1 if again else step,
        )

    def table(self, step: Step) -> None:
        """Send the most telling group of a step."""
        group = most_telling(step.groups)
        if group is not None:
            rows = rows_of(group)
            self._each(lambda board: board.table(step.number, rows), after=step.number)

    def close(self, finished: bool) -> None:
        """Send what is left.  Safe to call twice."""
        self._each(lambda board: board.close(finished))
        self._open = {}

    def _each(self, call: Callable[[Dashboard], None], *, after: int = -1) -> None:
        """Call every dashboard; those alone that were not sent step `after`, where it is one."""
        for name, board in list(self._open.items()):
            if 0 <= after <= self._sent[name]:
                continue
            try:
                call(board)
            except Exception as error:
                # A server that is gone, a full disk: what counts is in the run folder.
                log.warning(
                    "%s failed (%s: %s) and gets nothing more from this process; metrics.jsonl has"
                    " everything",
                    name,
                    type(error).__name__,
                    error,
                )
                del self._open[name]


def _identities(path: Path) -> dict[str, str]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(held, dict):
        return {}
    return {name: value for name, value in held.items() if isinstance(value, str)}


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line: all of its numbers but the step and the time of day.

    >>> numbers({"step": 3, "wall": 1.7e9, "reward": 0.5, "note": "x"})
    {'reward': 0.5}
    """
    values = {}
    for name, value in line.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and name not in ("step", "wall"):
            values[name] = float(value)
    return values


def most_telling(groups: Sequence[RolloutGroup]) -> RolloutGroup | None:
    """The group whose rewards differ most (the first of equals); None if there is none with a
    reward.
    """
    rewarded = [group for group in groups if np.isfinite(group.reward).any()]
    return max(rewarded, key=lambda group: float(np.nanstd(group.reward)), default=None)


def rows_of(group: RolloutGroup) -> list[dict[str, Any]]:
    """A group as rows of a table, the best completion first."""
    rows = []
    # Those without a reward stand last: NaN sorts behind all numbers.
    for i in np.argsort(-group.reward, kind="stable"):
        rollout = group.rollouts[i]
        row: dict[str, Any] = {
            "prompt": rollout.prompt_text[-LONGEST:],
            "completion": rollout.text[:LONGEST],
            "reward": float(group.reward[i]),
        }
        for k, name in enumerate(group.names):
            row[f"rewards/{name}"] = float(group.rewards[i, k])
        row |= {"finish": str(rollout.finish), "tokens": len(rollout)}
        rows.append(row)
    return rows


# ---------------------------------------------------------------- TensorBoard


class TensorboardBoard:
    """An event file in the run folder, made anew from the log at every start.  It has no tables."""

    identity: str | None = None

    def __init__(self, about: About) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        folder = about.folder / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = EventFileWriter(str(folder))
        self.address = f"tensorboard --logdir {folder}"

    def write(self, step: int, wall: float, values: Mapping[str, float]) -> None:
        """Append the metrics to the event file."""
        summary = self._summary()
        for name, value in values.items():
            summary.value.add(tag=name, simple_value=value)
        self._writer.add_event(self._event(step=step, wall_time=wall, summary=summary))
        self._writer.flush()

    def table(self, step: int, rows: Rows) -> None:
        """Nothing: it has no tables."""

    def close(self, finished: bool) -> None:
        """Close the event file."""
        self._writer.close()


# ---------------------------------------------------------------- Weights & Biases


class WandbBoard:
    """A run of Weights & Biases, online or with `WANDB_MODE=offline`, whose x axis is the step; its
    files lie in the run folder.

    Project, entity and mode come from its own environment variables (WANDB_PROJECT, WANDB_ENTITY,
    WANDB_MODE).  What it would collect by itself (command line, environment, git, console, code) is
    switched off: an override may hold a secret."""

    def __init__(self, about: About) -> None:
        import wandb  # type: ignore[reportMissingImports]

        self._table = wandb.Table
        self.identity: str | None = about.identity or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=about.name,
            id=self.identity,
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
        url = None if self._run.offline else self._run.url
        self.address = url or f"wandb sync {Path(self._run.dir).parent}"

    def write(self, step: int, wall: float, values: Mapping[str, float]) -> None:
        """Log the metrics with their step."""
        self._run.log({"step": step, **values})

    def table(self, step: int, rows: Rows) -> None:
        """Log the group as a table."""
        data = [list(row.values()) for row in rows]
        table = self._table(columns=list(rows[0]), data=data)
        self._run.log({"step": step, "group": table})

    def close(self, finished: bool) -> None:
        """End the run; its exit code is 1 if steps are left."""
        self._run.finish(exit_code=0 if finished else 1)


# ---------------------------------------------------------------- MLflow


UNKNOWN = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow takes in no name; each becomes an underscore."""
AT_ONCE, LONGEST_VALUE = 100, 500
"""Parameters of one request, and characters of a parameter's value, that every version and store
takes.
"""
BEHIND = 50
"""Steps that may be on their way."""


class MlflowBoard:
    """A run of an MLflow experiment; groups are tables of their own, `groups/000012.json`.

    MLFLOW_TRACKING_URI names the server, else it is a SQLite file beside the runs
    (`runs/mlflow.db`).  The experiment is MLFLOW_EXPERIMENT_NAME, else `groupwise`.  Numbers are
    sent in the background, so that a slow server does not slow the run down. Nothing is collected
    that is not sent here: no command line, no environment.
    """

    def __init__(self, about: About) -> None:
        import mlflow  # type: ignore[reportMissingImports]

        self._mlflow = mlflow
        uri, place = os.environ.get("MLFLOW_TRACKING_URI"), None
        if uri is None:
            depth = len(Path(about.name).parts)
            root = about.folder.resolve().parents[depth - 1]  # runs/NAME -> runs
            uri, place = f"sqlite:///{root / 'mlflow.db'}", (root / "mlflow").as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        if about.identity is None:
            self._run: str = self._client.create_run(
                self._experiment(place), run_name=about.name
            ).info.run_id
            params = []
            for key, value in flat(about.config):
                params.append(mlflow.entities.Param(_name(key), value[:LONGEST_VALUE]))
            for start in range(0, len(params), AT_ONCE):
                self._client.log_batch(self._run, params=params[start : start + AT_ONCE])
        else:
            self._run = self._client.get_run(about.identity).info.run_id
            self._client.update_run(self._run, status="RUNNING")
        self.identity: str | None = self._run
        self._sent: list[Any] = []
        self.address = f"run {self._run} of {uri}"

    def _experiment(self, place: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            return known.experiment_id
        try:
            return self._client.create_experiment(name, artifact_location=place)
        except self._mlflow.exceptions.MlflowException:  # another run has just made it
            known = self._client.get_experiment_by_name(name)
            if known is None:
                raise
            return known.experiment_id

    def write(self, step: int, wall: float, values: Mapping[str, float]) -> None:
        """Send the metrics in the background.  Raises what an earlier batch raised."""
        metrics = []
        for name, value in values.items():
            milliseconds = round(1000 * wall)
            metric = self._mlflow.entities.Metric(_name(name), value, milliseconds, step)
            metrics.append(metric)
        self._sent.append(self._client.log_batch(self._run, metrics=metrics, synchronous=False))
        if len(self._sent) > BEHIND:
            self._sent.pop(0).wait()  # raises what went wrong with it

    def table(self, step: int, rows: Rows) -> None:
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

    >>> flat({"group": {"beta": 0.0, "ratio": None}, "rewards": [{"function": "accuracy"}]})
    [('group.beta', '0.0'), ('group.ratio', 'null'), ('rewards.0.function', 'accuracy')]
    """
    if isinstance(config, list) and config:
        config = dict(enumerate(config))
    if isinstance(config, Mapping) and config:
        pairs = []
        for key, inner in config.items():
            pairs += flat(inner, f"{prefix}.{key}".lstrip("."))
        return pairs
    return [(prefix, config if isinstance(config, str) else json.dumps(config))]


# ---------------------------------------------------------------- Trackio


class TrackioBoard:
    """A run of Trackio, known by its name, in a local data base (below TRACKIO_DIR); `trackio show`
    shows it.

    It speaks to no other machine unless told to.  The project is TRACKIO_PROJECT, else `groupwise`.
    """

    def __init__(self, about: About) -> None:
        import trackio  # type: ignore[reportMissingImports]

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

    def table(self, step: int, rows: Rows) -> None:
        """Log the group as a table, its texts fenced."""
        data = []
        for row in rows:
            texts = {name: fenced(value) for name, value in row.items() if isinstance(value, str)}
            data.append({**row, **texts})
        self._run.log({"group": self._trackio.Table(data=data)}, step=step)

    def close(self, finished: bool) -> None:
        """End the run."""
        with redirect_stdout(io.StringIO()):
            # the run's own method would be called, and print, once more at the end of the process
            self._trackio.finish()


def fenced(text: str) -> str:
    """Text that Markdown shows as it is: Trackio reads texts in tables as Markdown, and what a
    model writes may load an image.

    >>> fenced("a ``` b")
    '````\\na ``` b\\n````'
    """
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


BOARDS: dict[str, tuple[Callable[[About], Dashboard], str]] = {
    "tensorboard": (TensorboardBoard, "see that its folder can be written"),
    "wandb": (WandbBoard, "log in (wandb login), or set WANDB_MODE=offline"),
    "mlflow": (
        MlflowBoard,
        "see that MLFLOW_TRACKING_URI names a server that answers, or a folder that can be written",
    ),
    "trackio": (TrackioBoard, "see that TRACKIO_DIR can be written"),
}
"""What `save.report_to` may name, and what to do where it does not begin."""
