"""The log of a run, written step by step: lines of metrics.jsonl, the completions where they are
due, and what dashboards get.

`metrics_log.py` and `rollout_files.py` read it.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from groupwise.config.recipes import dump
from groupwise.config.settings import Recipe
from groupwise.data import vocabulary
from groupwise.records import RolloutGroup, Step
from groupwise.runs import rollout_files
from groupwise.runs.dashboards import Dashboards
from groupwise.runs.folder import CONFIG, DONE
from groupwise.runs.metrics_log import METRICS, LogWriter, read_metrics
from groupwise.runs.rollout_files import ROLLOUTS, TOKENS
from groupwise.runs.rollout_table import jsonable
from groupwise.runs.run_files import RunFiles
from groupwise.runs.starts import add_start
from groupwise.utils import files
from groupwise.utils.spelling import counted
from groupwise.utils.terminal import logger

EVALUATED = "eval/"
"""Prefix of an evaluation's figures in the log."""


class RunLog:
    """Writes the run folder, step by step.

    Every method raises StorageError if the disk fails.

    done: steps that the run resumed with.  Later steps are taken again: the files of their
        completions are deleted, their lines of metrics stay and readers leave them out
        (`metrics_log.merged`).  0: a new log begins, and no evaluation stays.
    started: the time of this start, for `environment.json`; None: now.
    """

    def __init__(
        self, folder: Path, recipe: Recipe, *, done: int = 0, started: float | None = None
    ) -> None:
        self.folder = Path(folder)
        self.files = RunFiles(self.folder)
        self._every = recipe.save.rollouts_every
        with files.storing(self.folder, "the run"):
            (self.folder / ROLLOUTS).mkdir(exist_ok=True)
            for kind in (rollout_files.ROLLOUTS, rollout_files.EVALUATIONS):
                rollout_files.cut(self.files, kind, done)
            (self.folder / DONE).unlink(missing_ok=True)
            before = read_metrics(self.folder) if done else []
            self.files.begin()
            self.files.write(CONFIG, dump(recipe).encode())
            add_start(self.files, done, started)
            self.lines = {line["step"]: line for line in before if line["step"] <= done}
            """What stands in the log, by step."""
            _warn_of_missing(self.folder, self.lines, done)
            self._log = LogWriter(self.folder, done)
            self._run = recipe.name
            sent = max((line["step"] for line in before), default=-1)
            self._dashboards = Dashboards(self.folder, recipe, list(self.lines.values()), sent)
            self._finished = False

    def write(self, step: Step) -> None:
        """Record a step: its line at once, and its completions where they are due."""
        line: dict[str, Any] = {"step": step.number, **step.metrics}
        line |= {f"time/{phase}": seconds for phase, seconds in step.timings.items()}
        line |= _evaluated(step.evaluation or {})
        line["wall"] = time.time()
        self._check_place()
        try:
            if self._every and step.groups and step.number % self._every == 0:
                with files.storing(
                    self.folder / ROLLOUTS / f"{step.number:06d}.parquet",
                    "the completions of a step",
                ):
                    rollout_files.write(self.files, ROLLOUTS, step, self._run)
                self._dashboards.table(step)
        finally:  # the step was taken, whatever becomes of its completions
            self._write_line(line)

    def _check_place(self) -> None:
        """Raises StorageError if the folder is not the one that the run began in: half of the run
        would stand in another.
        """
        with files.storing(self.folder / METRICS, "the log"):
            if self._log.is_moved():
                raise FileNotFoundError(
                    errno.ENOENT, "it was moved or replaced while the run went on; move it back"
                )

    def _write_line(self, line: dict[str, Any]) -> None:
        with files.storing(self.folder / METRICS, "the log"):
            self._log.append(jsonable(line))
        self._dashboards.write(line)
        self.lines[line["step"]] = line

    def evaluated(self, step: int) -> bool:
        """True if the log holds an evaluation after `step` steps."""
        return any(name.startswith(EVALUATED) for name in self.lines.get(step, ()))

    def amend(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Add the evaluation after a step whose line stands there already."""
        figures = _evaluated(evaluation)
        self.lines[step] = {"step": step, **self.lines.get(step, {}), **figures}
        with files.storing(self.folder / METRICS, "the log"):
            self._log.append(jsonable({"step": step, **figures}))
        self._dashboards.write({"step": step, "wall": time.time(), **figures}, again=True)

    def held_out(self, number: int, groups: Sequence[RolloutGroup]) -> None:
        """Record completions of held-out prompts after step `number`."""
        if self._every and groups:
            with files.storing(self.folder / rollout_files.EVALUATIONS, "held-out completions"):
                rollout_files.write(
                    self.files,
                    rollout_files.EVALUATIONS,
                    Step(number=number, metrics={}, groups=groups),
                    self._run,
                )

    def tokens(self, tokenizer: Any) -> None:
        """Record the text of every token id once, so that readers of the run need no tokenizer."""
        if not (self.folder / TOKENS).exists():
            with files.storing(self.folder / TOKENS, "the vocabulary"):
                self.files.write(TOKENS, vocabulary.to_bytes(vocabulary.of(tokenizer)))

    def sync(self) -> None:
        """Make what was written survive a power cut; call it before a checkpoint."""
        with files.storing(self.folder / METRICS, "the log"):
            self._log.sync()
            self.files.sync()

    def finish(self, step: int, summary: Mapping[str, Any] | None = None) -> None:
        """Mark the run as finished after `step` steps."""
        ended: dict[str, Any] = {"step": step, "time": time.time(), **(summary or {})}
        with files.storing(self.folder / DONE, "the end of the run"):
            self.files.write(DONE, json.dumps(jsonable(ended), indent=1).encode())
        self._finished = True

    def close(self) -> None:
        """Close the files.  Safe to call twice."""
        with suppress(OSError):  # a full disk has been told of when the line was written
            self._log.close()
        self._dashboards.close(self._finished)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _warn_of_missing(folder: Path, lines: Mapping[int, Any], done: int) -> None:
    """Name the steps that a resumed run has taken and its log does not hold."""
    missing = [step for step in range(1, done + 1) if step not in lines]
    if missing:
        warning = "%s lacks %s, from step %d to %d: figures and evaluations of them are lost"
        count = counted(len(missing), "step")
        logger("groupwise").warning(warning, folder / METRICS, count, missing[0], missing[-1])


def _evaluated(evaluation: Mapping[str, float]) -> dict[str, float]:
    return {EVALUATED + name.removeprefix(EVALUATED): value for name, value in evaluation.items()}
