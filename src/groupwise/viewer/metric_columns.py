"""The metrics of a run as columns, read on as its log grows."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Mapping
from typing import Any

from groupwise.errors import RunError
from groupwise.runs.metrics_log import RESUMED, LogReader
from groupwise.runs.run_files import RunFiles
from groupwise.training.metric_table import LOOKED_AT
from groupwise.viewer.completion_files import number_of

MOST_NUMBERS = 1 << 26
"""Numbers of a log, every metric at every step; what goes beyond is left out."""


class Metrics:
    """metrics.jsonl as columns: a value for each step, NaN where it was not computed."""

    def __init__(self, files: RunFiles | None) -> None:
        self._reader = None if files is None else LogReader(files)
        self._lock = threading.Lock()
        self.problems: list[str] = []
        self.steps = array("q")
        self.values: dict[str, array[float]] = {}

    def refresh(self) -> Metrics:
        """Read what was appended; a file that was replaced (a run that resumed) is read anew."""
        if self._reader is None:
            return self
        with self._lock:
            try:
                entries = self._reader.read()
            except RunError as error:
                self.problems = [str(error)]
                return self
            if self._reader.restarted:
                self.steps, self.values = array("q"), {}
            whole = True
            for entry in entries:
                whole = self.add(entry) and whole
            self.problems = [*self._reader.problems]
            if not whole:
                self.problems.append(
                    f"metrics.jsonl holds more than {MOST_NUMBERS:,} numbers: some are left out"
                )
        return self

    def add(self, entry: Mapping[str, Any]) -> bool:
        """Add a line, which may be more of the last step; False if something had to be left out.

        It keeps the rule of `runs.metrics_log.merged`.
        """
        step = entry["step"]
        if RESUMED in entry:
            self._cut(step)
            return True
        if self.steps and self.steps[-1] == step:
            entry = self._take_last() | dict(entry)
        whole, count = True, len(self.steps)
        for name, value in entry.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name not in self.values and count * (len(self.values) + 1) > MOST_NUMBERS:
                whole = False
                continue
            number = number_of(value)
            column = self.values.setdefault(name, array("d", [math.nan]) * count)
            column.append(math.nan if number is None else number)
        self.steps.append(step)
        for column in self.values.values():
            column.extend([math.nan] * (len(self.steps) - len(column)))
        return whole

    def _take_last(self) -> dict[str, float]:
        """Take the last step away and return its values."""
        self.steps.pop()
        known = {}
        for name, column in self.values.items():
            value = column.pop()
            if not math.isnan(value):
                known[name] = value
        return known

    def _cut(self, done: int) -> None:
        """Take the steps behind `done` away: they are taken again."""
        count = len([step for step in self.steps if step <= done])
        del self.steps[count:]
        for column in self.values.values():
            del column[count:]

    def history(self) -> list[dict[str, float]]:
        """The steps that decide about the flags, as mappings: what was not computed has no key."""
        lines = []
        for i in range(max(0, len(self.steps) - LOOKED_AT), len(self.steps)):
            if self.steps[i] <= 0:
                continue
            line = {}
            for name, column in self.values.items():
                if name == "reward" or not math.isnan(column[i]):
                    line[name] = column[i]
            lines.append(line)
        return lines
