"""The best evaluation of a run by one held-out figure (`eval.best`), and the early end that follows
from it (`eval.stop_after`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.config.settings import EvalSettings

MINIMISED = ("loss", "nll", "perplexity", "error")
"""Last parts of the names of figures that are better the smaller they are."""


@dataclass(slots=True)
class BestEvaluation:
    """The best evaluation so far.

    The log holds every evaluation up to a checkpoint, so that a resumed run reads its state there.
    The evaluation before the first step does not count.
    """

    figure: str
    """Name of the figure, without `eval/`."""
    patience: int | None
    """Evaluations without a better one after which the run ends; None: it does not."""
    step: int | None = None
    """The step of the best evaluation; None: no evaluation has had the figure yet."""
    value: float | None = None
    worse: int = 0
    """Evaluations since the best one."""

    @classmethod
    def of(cls, settings: EvalSettings) -> BestEvaluation | None:
        """Return the comparison that a recipe asks for; None if it asks for none."""
        if settings.best is None:
            return None
        return cls(figure=settings.best, patience=settings.stop_after)

    def read(self, lines: Mapping[int, Mapping[str, Any]]) -> BestEvaluation:
        """Add the evaluations that the log holds.   lines: by step."""
        for step, line in sorted(lines.items()):
            if step > 0 and any(name.startswith("eval/") for name in line):
                self.add(step, line.get(f"eval/{self.figure}"))
        return self

    def add(self, step: int, value: float | None) -> bool:
        """Add an evaluation; return True if it is better than all before.

        value: None or NaN where it could not be computed, which is no better.
        """
        if value is not None and not math.isnan(value) and self._is_better(value):
            self.step, self.value, self.worse = step, value, 0
            return True
        self.worse += 1
        return False

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return True
        if self.figure.rpartition("/")[2] in MINIMISED:
            return value < self.value
        return value > self.value

    @property
    def stops(self) -> bool:
        """True if the run ends after this many evaluations without a better one."""
        return self.patience is not None and self.worse >= self.patience

    def describe(self) -> str:
        """Say which model is exported, for the closing table and the model card."""
        if self.step is None:
            return f"the last model: no evaluation had the figure {self.figure}"
        return f"the model of step {self.step}, the best by held-out {self.figure} {self.value:.4g}"

    def why(self) -> str:
        """Say why the run ended early."""
        return f"no better {self.figure} in {self.worse} evaluations (eval.stop_after)"
