"""How many rows were read, kept and dropped, with a reason for each dropped one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from groupwise.data.sources import SourceRows
from groupwise.utils.spelling import counted


@dataclass(kw_only=True, slots=True)
class Report:
    """Counts of one set of rows, while they are read and afterwards.

    >>> report = Report(source="a.jsonl", lengths=[4, 5])
    >>> report.drop("empty")
    >>> print(report)
    a.jsonl: 2 of 3 rows, 4.5 tokens on average, at most 5; dropped: 1 empty
    """

    source: str
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows left out, by reason."""
    noted: Counter[str] = field(default_factory=Counter)
    """Kept rows with a remark (`duplicate`, `cut to ...`), counted by the remark."""
    first: dict[str, str] = field(default_factory=dict)
    """Where the first row with a reason or a remark stands, or what is wrong with it, where that is
    known.
    """
    warnings: list[str] = field(default_factory=list)
    """Shown before training."""
    lengths: list[int] = field(default_factory=list, repr=False)
    """Tokens of each row that is kept."""

    @classmethod
    def of(cls, rows: SourceRows) -> Report:
        """Begin the report of a source; its rows that were left out are dropped ones."""
        report = cls(source=rows.name)
        for left in rows.left_out:
            report.drop(left.reason, left.where)
        return report

    def drop(self, reason: str, first: str | None = None) -> None:
        """Count a row that is left out."""
        self._count(self.dropped, reason, first)

    def note(self, remark: str, first: str | None = None) -> None:
        """Count a row that stays, with a remark."""
        self._count(self.noted, remark, first)

    def _count(self, counts: Counter[str], reason: str, first: str | None) -> None:
        counts[reason] += 1
        if first is not None:
            self.first.setdefault(reason, first)

    @property
    def kept(self) -> int:
        """Rows that stay."""
        return len(self.lengths)

    @property
    def rows(self) -> int:
        """All rows."""
        return self.kept + self.dropped.total()

    def __str__(self) -> str:
        text = f"{self.source}: {self.kept:,} of {counted(self.rows, 'row')}"
        if self.lengths:
            text += (
                f", {sum(self.lengths) / self.kept:.1f} tokens on average, at most"
                f" {max(self.lengths)}"
            )
        for label, counts in (("dropped", self.dropped), ("kept", self.noted)):
            if counts:
                text += f"; {label}: {self._listed(counts)}"
        return text

    @property
    def left_out(self) -> str:
        """How many rows were dropped, and why; empty if none was."""
        lost = self.dropped.total()
        return (
            f"{lost:,} of {self.rows:,} rows of {self.source} are left out:"
            f" {self._listed(self.dropped)}"
            if lost
            else ""
        )

    def _listed(self, counts: Mapping[str, int]) -> str:
        places = {reason: f" (first: {place})" for reason, place in self.first.items()}
        return ", ".join(
            f"{count:,} {reason}{places.get(reason, '')}" for reason, count in counts.items()
        )
