"""The completions that a run recorded: a Parquet file for every step, one row per completion.

    rollouts/000312.parquet     `rollout_table.table_of`'s columns and `run`; evaluations/ of the
    held-out prompts, of the same form
    images/DIGEST.png           a small copy of an image of a prompt

Importing this file does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.data.images import Picture, small_png
from groupwise.errors import DataError, RunError
from groupwise.records import Step
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.rollout_table import (
    bounded_table,
    check_values,
    columns_of,
    family,
    groups_of,
    known_columns,
    table_of,
)
from groupwise.runs.run_files import RunFiles

TOKENS = "tokens.parquet"
ROLLOUTS, EVALUATIONS = "rollouts", "evaluations"
"""The folders of a run's rollouts, and of held-out completions."""
IMAGES = "images"
"""The folder of small copies of prompts' images, by digest."""
IMAGE_SIDE = 256
"""Pixels of the longer side of such a copy, at most."""
LARGEST = 1 << 32
"""Bytes of a step's file."""

_STEP = re.compile(r"(\d{6}|[1-9]\d{6,11})\.parquet")
_TOGETHER = re.compile(r"\d+-\d+-\d+\.parquet")


def write(run: RunFiles, kind: str, step: Step, name: str) -> None:
    """Write the completions of a step.  kind: the folder.  name: the run's, a column for those who
    join runs.  Raises OSError.
    """
    table = table_of(step)
    table = table.append_column(
        "run", pa.array([name] * len(table), pa.string()).dictionary_encode()
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=max(len(table), 1))
    _write_images(run, step)
    (run.folder / kind).mkdir(exist_ok=True)
    run.write(f"{kind}/{step.number:06d}.parquet", sink.getvalue().to_pybytes())


def _write_images(run: RunFiles, step: Step) -> None:
    """Write a small copy of each image of a step's prompts, for the viewer, unless it is there."""
    pictures: dict[str, Picture] = {}
    for group in step.groups:
        if group.prompt.images is not None:
            for picture in group.prompt.images.pictures:
                pictures[picture.digest] = picture
    for digest, picture in pictures.items():
        name = image_name(digest)
        if picture.data and not run.has(name):
            (run.folder / IMAGES).mkdir(exist_ok=True)
            run.write(name, small_png(picture, IMAGE_SIDE))


def image_name(digest: str) -> str:
    """The file of an image's small copy."""
    return f"{IMAGES}/{digest}.png"


def steps(run: RunFiles, kind: str = ROLLOUTS) -> tuple[dict[int, str], list[str]]:
    """Every recorded step and the name of its file, in order; and what lies there and is none.
    Raises RunError.
    """
    numbered, wrong = {}, []
    for name in run.names(kind):
        if _STEP.fullmatch(name):
            numbered[int(name.partition(".")[0])] = f"{kind}/{name}"
        elif _TOGETHER.fullmatch(name):
            wrong.append(
                f"{run.folder / kind / name[:80]} holds several steps, as version 0.2 wrote them,"
                " and is not read any more"
            )
        elif name.endswith(".parquet") and not name.startswith("."):
            wrong.append(f"{run.folder / kind / name[:80]} is not named by a step, and is not read")
    return dict(sorted(numbered.items())), wrong


def table(
    run: RunFiles, step: int, columns: Sequence[str] | None = None, kind: str = ROLLOUTS
) -> pa.Table:
    """The completions of a recorded step, or those of `columns` that it has (`rewards/`: all of the
    family).

    Raises DataError if they are not there, RunError if they are damaged.
    """
    name = f"{kind}/{step:06d}.parquet"
    if not run.has(name):
        known, wrong = steps(run, kind)
        have = f"it holds steps {min(known)} to {max(known)}" if known else "it holds none"
        raise DataError(
            "; ".join(
                [
                    f"the completions of step {step} are not in {run.folder / kind} ({have})",
                    *wrong[:1],
                ]
            )
        )

    def choose(schema: pa.Schema) -> list[str]:
        return [
            name
            for name in known_columns(schema)
            if columns is None or name in columns or family(name) in columns
        ]

    try:
        rows = bounded_table(run.read(name, LARGEST), choose)
        check_values(rows)
    except ValueError as error:
        raise RunError(f"{run.folder / name} is damaged: {error}") from error
    if "step" in rows.column_names and set(rows.column("step").to_pylist()) != {step}:
        raise RunError(f"{run.folder / name} holds the completions of another step")
    return rows


def cut(run: RunFiles, kind: str, done: int) -> None:
    """Take away the steps behind `done`: they are taken again."""
    for step, name in steps(run, kind)[0].items():
        if step > done:
            (run.folder / name).unlink()


# ---------------------------------------------------------------- for others


def list_rollouts(folder: Path) -> list[int]:
    """The steps whose completions were written, in order."""
    return list(steps(RunFiles(folder))[0])


def read_step(folder: Path, step: int) -> Step:
    """A recorded step as the record it was: the same ids, log-probs, rewards, advantages, metrics.

    Raises DataError if it is not there, RunError if its file is not what the run wrote.
    """
    run = RunFiles(folder)
    rows = table(run, step)
    try:
        groups, advantages, current = groups_of(rows)
        columns = columns_of(rows)
    except KeyError as error:
        raise RunError(
            f"step {step} of {folder}: the recorded completions have no column {error.args[0]!r}"
        ) from error
    except (TypeError, ValueError, AttributeError, AssertionError, RecursionError) as error:
        raise RunError(
            f"step {step} of {folder}: the recorded completions are damaged: {error}"
        ) from error
    lines = {line["step"]: line for line in read_metrics(folder)}
    flat = {
        name: value for name, value in lines.get(step, {}).items() if name not in ("step", "wall")
    }
    timings = {
        name.removeprefix("time/"): flat.pop(name)
        for name in list(flat)
        if name.startswith("time/")
    }
    evaluation = {name: flat.pop(name) for name in list(flat) if name.startswith("eval/")}
    return Step(
        number=step,
        metrics=flat,
        timings=timings,
        groups=tuple(groups),
        advantages=tuple(advantages) if any(advantages) else (),
        current_logp=tuple(current) if any(current) else (),
        columns=columns,
        evaluation=evaluation or None,
    )
