"""metrics.jsonl: the figures of a run, to which lines are only ever appended.

    {"step": 3, "reward": 0.5, "time/rollout": 1.2, "wall": ...}   a step
    {"step": 3, "eval/reward": 0.6}                                more figures of the same step
    {"step": 3, "resumed": 1795844413.9}                           the run resumed after step 3

Readers merge the lines of a step (`merged`).  Behind a line with `resumed` they ignore earlier
lines of larger steps.  A complete line that is no JSON with a step is left out, and reported once.

Importing this file does not import torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import RunError
from groupwise.runs.run_files import RunFiles, bounded_json
from groupwise.utils import files
from groupwise.utils.json_text import json_line
from groupwise.utils.terminal import logger

log = logger("groupwise")

METRICS = "metrics.jsonl"
RESUMED = "resumed"
"""Key of the line that stands where a run went on: the time at which it did."""
LARGEST_LOG, MOST_PROBLEMS = 1 << 30, 20
"""Bytes of metrics.jsonl; bad lines of it that are named."""
TAIL = 1 << 16
"""Bytes at the end of the log in which its last step is looked for."""


# ---------------------------------------------------------------- reading


class LogReader:
    """Reads metrics.jsonl, and on as it grows.

    A whole line that is none is left out, and named in `problems`.  A last one that is not whole
    (the run is writing it, or died there) is left for later.
    """

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        self._begin()

    def _begin(self) -> None:
        self._file: tuple[int, int] | None = None
        self._offset = self._number = 0
        self.problems: list[str] = []
        self.restarted = True
        """True if the last `read` began at the first line: what was read before holds no more."""

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that came since the last call; all of them where the file was replaced.

        Raises RunError.
        """
        self.restarted = False
        if not self._run.has(METRICS):
            return []
        with self._run.open(METRICS) as file:
            status = os.fstat(file.fileno())
            identity = status.st_dev, status.st_ino
            if self._file != identity or status.st_size < self._offset:
                self._begin()
                self._file = identity
            if status.st_size > LARGEST_LOG:
                raise RunError(f"{self._run.folder / METRICS} has more than {LARGEST_LOG:,} bytes")
            file.seek(self._offset)
            fresh = file.read()
        *lines, tail = fresh.split(b"\n")
        # The last byte should be a newline.  Another character ends a complete line, too.
        if _is_line(tail[:-1]):
            lines.append(tail)
            tail = b""
        self._offset += len(fresh) - len(tail)
        entries = []
        for line in lines:
            self._number += 1
            try:
                entries.append(_entry(line))
            except ValueError as error:
                self._name(error)
        return entries

    def _name(self, error: ValueError) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            place = f"{self._run.folder / METRICS}:{self._number}"
            self.problems.append(f"{place}: not a line of metrics ({error})")


def merged(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join the lines of each step into one, without the steps that were taken again.

    The viewer keeps the same rule in columns (`viewer.metric_columns.Metrics.add`).

    >>> merged([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 1, "resumed": 5.0}])
    [{'step': 1, 'loss': 2.0}]
    >>> merged([{"step": 1, "loss": 2.0}, {"step": 1, "eval/loss": 3.0}])
    [{'step': 1, 'loss': 2.0, 'eval/loss': 3.0}]
    """
    lines: dict[int, dict[str, Any]] = {}
    for entry in entries:
        step = entry["step"]
        if RESUMED in entry:
            lines = {number: line for number, line in lines.items() if number <= step}
        else:
            lines[step] = {**lines.get(step, {}), **entry}
    return list(lines.values())


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the steps of metrics.jsonl in order, each as one mapping; none if there is no log.

    A warning names lines that are left out.  Raises RunError.
    """
    reader = LogReader(RunFiles(folder))
    lines = merged(reader.read())
    for problem in reader.problems:
        log.warning("%s: it is left out", problem)
    return lines


def last_metrics(run: RunFiles) -> dict[str, Any]:
    """Return the last step of metrics.jsonl; empty if there is none.

    Raises RunError if the last line is no line of metrics.
    """
    if not run.has(METRICS):
        return {}
    with run.open(METRICS) as file:
        start = max(0, os.fstat(file.fileno()).st_size - TAIL)
        file.seek(start)
        whole, end, _ = file.read(TAIL).rpartition(b"\n")
    if not end:
        return {}
    lines = whole.split(b"\n")
    try:
        last = _entry(lines[-1])
    except ValueError as error:
        place = run.folder / METRICS
        raise RunError(f"{place}: its last line is not one of metrics ({error})") from error
    entries = [_entry(line) for line in lines if _is_line(line)]
    steps = {line["step"]: line for line in merged(entries)}
    return steps.get(last["step"], {})


def _entry(line: bytes) -> dict[str, Any]:
    """Read a line of metrics.jsonl.  Raises ValueError."""
    values = bounded_json(line.decode("utf-8"))
    step = values.get("step") if isinstance(values, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
        raise ValueError("no step in it")
    return {name: _number(value) for name, value in values.items()}


def _is_line(line: bytes) -> bool:
    try:
        _entry(line)
    except ValueError:
        return False
    return True


def _number(value: Any) -> Any:
    if value in ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity"):
        return float(value)
    return value


# ---------------------------------------------------------------- writing


class LogWriter:
    """Appends lines to metrics.jsonl.  Every method raises OSError if the disk fails."""

    def __init__(self, folder: Path, done: int) -> None:
        """done: steps that a run resumed with; 0 begins a new log."""
        self._path = folder / METRICS
        if done:
            _end_last_line(self._path)
        else:
            files.write(self._path, b"")
        self._file = open(self._path, "ab")  # noqa: SIM115 - held until `close`
        if done:
            self.append({"step": done, RESUMED: time.time()})

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line; it is there for readers at once."""
        self._file.write(json_line(line).encode())
        self._file.flush()

    def is_moved(self) -> bool:
        """Return whether another file stands in the place of the one that was opened."""
        return not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))

    def sync(self) -> None:
        """Bring what was written to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file.  Safe to call twice."""
        self._file.close()


def _end_last_line(path: Path) -> None:
    """Let a log end with a newline: half a line, which a process died in, is cut off."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - TAIL)
        file.seek(start)
        before, newline, last = file.read().rpartition(b"\n")
        if not last:
            return
        if _is_line(last):
            file.write(b"\n")
        elif newline or start == 0:
            file.truncate(start + len(before) + len(newline))
