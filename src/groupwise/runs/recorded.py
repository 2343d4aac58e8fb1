"""The completions of a run's steps on disk: a Parquet file for every step, and the older ones together.

    rollouts/000312.parquet             one step, one row per completion: `rollout_table.table_of`'s columns and `run`
    rollouts/000001-000100-1.parquet    steps 1, 2 ... 100 (first, last, stride), each a row group

Every file appears whole, under its final name, by a rename; a step is in the new file before its old one goes.  So whatever
moment a process is killed at, each step that was written can be read, and a step that stands twice says the same twice.

Importing this file does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.data.rollout_table import table_of
from groupwise.errors import DataError
from groupwise.records import Step
from groupwise.utils import files
from groupwise.utils.terminal import logger

log = logger(__name__)

ROLLOUTS = "rollouts"
"""The folder of a run's rollouts; evaluations have one of their own, of the same form."""
EVALUATIONS = "evaluations"
PACK = 100
"""Steps that are put together: 10,000 files are slow to list, and a step's table of contents is as large as a small step."""

_SINGLE = re.compile(r"(\d+)\.parquet")
_PACK = re.compile(r"(\d+)-(\d+)-(\d+)\.parquet")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step lies."""

    path: Path
    row_group: int | None
    """None: the whole file."""


def write(folder: Path, step: Step, run: str) -> None:
    """Write the completions of a step; `folder` is the one of rollouts.  run: whose they are, a column for those who join runs."""
    table = table_of(step)
    table = table.append_column("run", pa.array([run] * len(table), pa.string()).dictionary_encode())
    folder.mkdir(parents=True, exist_ok=True)
    with files.replacing(folder / f"{step.number:06d}.parquet") as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=max(len(table), 1))


def places(folder: Path) -> dict[int, Place]:
    """Every recorded step and where it lies, in order."""
    found: dict[int, Place] = {}
    singles: dict[int, Place] = {}
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if match := _SINGLE.fullmatch(entry.name):
            singles[int(match[1])] = Place(folder / entry.name, None)
        elif match := _PACK.fullmatch(entry.name):
            path = folder / entry.name
            found |= {step: Place(path, i) for i, step in enumerate(_steps_of(entry.name))}
    return dict(sorted((found | singles).items()))


def table(folder: Path, step: int, columns: Sequence[str] | None = None) -> pa.Table:
    """The completions of a recorded step, or some of their columns.  Raises DataError if they are not there or damaged.

    A running process may put a step elsewhere between looking and reading: then it is looked for again.
    """
    for attempt in (1, 2):
        known = places(folder)
        if step not in known:
            have = f"it holds steps {min(known)} to {max(known)}" if known else "it holds none"
            raise DataError(f"the completions of step {step} are not in {folder} ({have})")
        place = known[step]
        try:
            with pq.ParquetFile(place.path) as file:
                return file.read(columns) if place.row_group is None else file.read_row_group(place.row_group, columns)
        except FileNotFoundError as error:
            if attempt == 2:
                raise DataError(f"{place.path} went away") from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{place.path} is damaged: {error}") from error
    raise AssertionError


def cut(folder: Path, done: int) -> None:
    """Take away the steps behind `done`: they are taken again."""
    for entry in sorted(folder.glob("*.parquet")) if folder.is_dir() else ():
        if (match := _SINGLE.fullmatch(entry.name)) and int(match[1]) > done:
            entry.unlink()
        elif _PACK.fullmatch(entry.name) and (steps := _steps_of(entry.name))[-1] > done:
            kept = [step for step in steps if step <= done]
            if kept:
                with pq.ParquetFile(entry) as file:
                    _write_pack(folder, kept, (file.read_row_group(i) for i in range(len(kept))), file.schema_arrow)
            entry.unlink()


def pack(folder: Path, size: int = PACK) -> None:
    """Put the oldest `size` steps that have files of their own together, once there are twice as many; else do nothing.

    The newer half stays as it is, because a run that resumes takes the newest steps away.  Steps whose columns differ (a signal
    came or went) are never put together.
    """
    singles = sorted(int(match[1]) for entry in os.scandir(folder) if (match := _SINGLE.fullmatch(entry.name)))
    if len(singles) < 2 * size:
        return
    for steps in _alike(folder, singles[:size]):
        if len(steps) > 1:
            schema = _schema(folder, steps[0])
            _write_pack(folder, steps, (pq.ParquetFile(folder / f"{step:06d}.parquet").read() for step in steps), schema)
            for step in steps:
                (folder / f"{step:06d}.parquet").unlink()


def _alike(folder: Path, steps: Sequence[int]) -> Iterator[list[int]]:
    """Stretches of steps an equal distance apart, with the same columns."""
    current: list[int] = []
    for step in steps:
        if current:
            stride = current[1] - current[0] if len(current) > 1 else step - current[-1]
            if step - current[-1] != stride or not _schema(folder, step).equals(_schema(folder, current[0]), check_metadata=True):
                yield current
                current = []
        current.append(step)
    if current:
        yield current


def _schema(folder: Path, step: int) -> pa.Schema:
    return pq.read_schema(folder / f"{step:06d}.parquet")


def _steps_of(name: str) -> range:
    match = _PACK.fullmatch(name)
    assert match is not None
    first, last, stride = map(int, match.groups())
    return range(first, last + 1, max(stride, 1))


def _write_pack(folder: Path, steps: Sequence[int], tables: Iterator[pa.Table], schema: pa.Schema) -> None:
    stride = steps[1] - steps[0] if len(steps) > 1 else 1
    with (
        files.replacing(folder / f"{steps[0]:06d}-{steps[-1]:06d}-{stride}.parquet") as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        for found in tables:
            writer.write_table(found, row_group_size=max(len(found), 1))
