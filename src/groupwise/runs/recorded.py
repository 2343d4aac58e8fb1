"""What a run recorded of its steps: the lines of metrics.jsonl, and a Parquet file for every step,
one row per completion.

    rollouts/000312.parquet     `rollout_table.table_of`'s columns and `run`; evaluations/ of the
    held-out prompts, of the same form

Importing this file does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.errors import DataError, RunError
from groupwise.records import Step
from groupwise.runs.rollout_table import (
    bounded_table,
    check_values,
    columns_of,
    family,
    groups_of,
    known_columns,
    table_of,
)
from groupwise.runs.run_files import RunFiles, bounded_json
from groupwise.utils import files
from groupwise.utils.terminal import logger

log = logger("groupwise")

METRICS, TOKENS = "metrics.jsonl", "tokens.parquet"
ROLLOUTS, EVALUATIONS = "rollouts", "evaluations"
"""The folders of a run's rollouts, and of held-out completions."""
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
    (run.folder / kind).mkdir(exist_ok=True)
    run.write(f"{kind}/{step.number:06d}.parquet", sink.getvalue().to_pybytes())


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


# ---------------------------------------------------------------- the log


LARGEST_LOG, MOST_PROBLEMS = 1 << 30, 20
"""Bytes of metrics.jsonl; bad lines of it that are named."""


class LogReader:
    """Reads metrics.jsonl, and on as it grows.

    A line that a run did not write is left out, and named in `problems`.  So is a whole line that
    is none; a last one that is not whole (the run is writing it, or died there) is left for later.
    """

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        self._clear()

    def _clear(self) -> None:
        self._file: tuple[int, int] | None = None
        self._offset = self._number = 0
        self._matched: set[str] = set()
        self.problems: list[str] = []
        self.restarted = True
        """True if the last `read` began at the first line: what was read before holds no more."""

    def read(self) -> list[dict[str, Any]]:
        """The lines that came since the last call; all of them where the file was replaced (a
        resumed run).  Raises RunError.
        """
        self.restarted = False
        if not self._run.has(METRICS):
            return []
        with self._run.open(METRICS) as file:
            status = os.fstat(file.fileno())
            if self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset:
                self._clear()
                self._file = status.st_dev, status.st_ino
            if status.st_size > LARGEST_LOG:
                raise RunError(f"{self._run.folder / METRICS} has more than {LARGEST_LOG:,} bytes")
            file.seek(self._offset)
            fresh = file.read()
        known = self._run.digests(METRICS).keys()
        *lines, tail = fresh.split(b"\n")
        if (
            known and files.digest_of(tail[:-1]) in known
        ):  # a whole line, whose end is something else
            lines.append(tail)
            tail = b""
        self._offset += len(fresh) - len(tail)
        digests = [files.digest_of(line) for line in lines] if known else []
        self._matched.update(known & set(digests))
        # A digest that no line has is that of a line which was written otherwise.  Without one, the
        # power went before the digests of the last lines were on the disk.
        altered = bool(known - self._matched)
        entries = []
        for place, line in enumerate(lines):
            self._number += 1
            try:
                if altered and digests[place] not in known:
                    raise ValueError("it is not what the run wrote, its checksum differs")
                entries.append(_entry(line))
            except ValueError as error:
                if len(self.problems) < MOST_PROBLEMS:
                    self.problems.append(
                        f"{self._run.folder / METRICS}:{self._number}: not a line of metrics"
                        f" ({error})"
                    )
        return entries


def _entry(line: bytes) -> dict[str, Any]:
    """A line of metrics.jsonl.  Raises ValueError."""
    values = bounded_json(line.decode("utf-8"))
    step = values.get("step") if isinstance(values, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
        raise ValueError("no step in it")
    return {name: _number(value) for name, value in values.items()}


def _number(value: Any) -> Any:
    return (
        float(value) if value in ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity") else value
    )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl as dicts, in order; empty if there is none yet.  A warning names
    lines that are left out.
    """
    reader = LogReader(RunFiles(folder))
    lines = reader.read()
    for problem in reader.problems:
        log.warning("%s: it is left out", problem)
    return lines


TAIL = 1 << 16
"""Bytes at the end of the log in which its last line is looked for."""


def last_metrics(run: RunFiles) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; empty if there is none.  Raises RunError if it is no
    line of metrics.
    """
    if not run.has(METRICS):
        return {}
    with run.open(METRICS) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        whole, end, _ = file.read(TAIL).rpartition(b"\n")
    if not end:
        return {}
    try:
        return _entry(whole.rpartition(b"\n")[2])
    except ValueError as error:
        raise RunError(
            f"{run.folder / METRICS}: its last line is not one of metrics ({error})"
        ) from error


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
