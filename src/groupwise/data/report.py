"""How many rows were read, kept and dropped, with a reason for each dropped one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from groupwise.data.sources import SourceRows


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Counts of one set of rows.  `rows` = `kept` + everything in `dropped`.

    >>> print(Report(source="a.jsonl", rows=3, kept=2, dropped={"empty": 1}, mean_tokens=4.5, max_tokens=8))
    a.jsonl: 2 of 3 rows, 4.5 tokens on average, at most 8; dropped: 1 empty
    """

    source: str
    rows: int
    kept: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""
    noted: Mapping[str, int] = field(default_factory=dict)
    """Kept rows with a remark (`duplicate`, `truncated ...`), counted by the remark."""
    first: Mapping[str, str] = field(default_factory=dict)
    """Where the first row with a reason or a remark stands, where that is known."""
    warnings: tuple[str, ...] = ()
    """Warnings, shown before training."""
    mean_tokens: float = 0.0
    max_tokens: int = 0

    def __post_init__(self) -> None:
        assert self.rows == self.kept + sum(self.dropped.values()), (self.rows, self.kept, dict(self.dropped))

    def __str__(self) -> str:
        text = (
            f"{self.source}: {self.kept} of {self.rows} rows, {self.mean_tokens:.1f} tokens on average, at most {self.max_tokens}"
        )
        for label, counts in (("dropped", self.dropped), ("kept", self.noted)):
            if counts:
                text += f"; {label}: {self._listed(counts)}"
        return text

    @property
    def left_out(self) -> str:
        """How many rows were dropped, and why; empty if none was."""
        lost = self.rows - self.kept
        return f"{lost} of {self.rows} rows of {self.source} are left out: {self._listed(self.dropped)}" if lost else ""

    def _listed(self, counts: Mapping[str, int]) -> str:
        return ", ".join(f"{count} {reason}{self._first(reason)}" for reason, count in counts.items())

    def _first(self, reason: str) -> str:
        return f" (first: {self.first[reason]})" if reason in self.first else ""


class Tally:
    """Counts rows while they are read; `report` closes it."""

    def __init__(self, source: str, rows: int) -> None:
        self.source, self.rows = source, rows
        self._dropped: Counter[str] = Counter()
        self._noted: Counter[str] = Counter()
        self._kept: set[object] = set()
        self._first: dict[str, str] = {}
        self._warnings: list[str] = []

    @classmethod
    def of(cls, rows: SourceRows) -> Tally:
        """Of a source; its rows that were left out are dropped ones."""
        tally = cls(rows.name, len(rows) + len(rows.left_out))
        for left in rows.left_out:
            tally.drop(left.reason, first=left.where)
        return tally

    def drop(self, reason: str, *, first: str | None = None) -> None:
        """Count a row that is left out.  first: where it is, or what is wrong with it; kept for the first row with this reason."""
        self._dropped[reason] += 1
        if first is not None:
            self._first.setdefault(reason, first)

    def note(self, remark: str, *, first: str | None = None) -> None:
        """A row that stays."""
        self._noted[remark] += 1
        if first is not None:
            self._first.setdefault(remark, first)

    def warn(self, text: str) -> None:
        """Add a warning, shown before training."""
        self._warnings.append(text)

    def keep(self, key: object) -> None:
        """A row that stays; it is a duplicate if a row with this key stayed before."""
        if key in self._kept:
            self.note("duplicate")
        self._kept.add(key)

    def report(self, lengths: Sequence[int]) -> Report:
        """`lengths`: tokens of each row that was kept."""
        return Report(
            source=self.source,
            rows=self.rows,
            kept=len(lengths),
            dropped={reason: count for reason, count in self._dropped.items() if count},
            noted={remark: count for remark, count in self._noted.items() if count},
            first=dict(self._first),
            warnings=tuple(self._warnings),
            mean_tokens=float(np.mean(lengths)) if len(lengths) else 0.0,
            max_tokens=max(lengths, default=0),
        )
