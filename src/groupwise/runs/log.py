"""The log of a run, written step by step: a line in metrics.jsonl, the completions where they are
due, and what dashboards get.

`recorded.py` reads it.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from groupwise.config.recipes import dump
from groupwise.config.settings import Recipe
from groupwise.data import vocabulary
from groupwise.records import RolloutGroup, Step
from groupwise.runs import recorded
from groupwise.runs.dashboards import Dashboards
from groupwise.runs.folder import CONFIG, DONE, add_start
from groupwise.runs.recorded import METRICS, ROLLOUTS, TOKENS, LogReader
from groupwise.runs.rollout_table import jsonable
from groupwise.runs.run_files import RunFiles
from groupwise.utils import files
from groupwise.utils.terminal import json_line, logger

log = logger("groupwise")

EVALUATED = "eval/"
"""Prefix of an evaluation's figures in the log."""


class RunLog:
    """Writes the run folder, step by step.

    done: steps that the run resumed with; what was written of later ones is taken away, because
        they are taken again, and so is the evaluation before the first step if there is none.
    started: the time of this start, for `environment.json`; None: now.
        Every method raises StorageError if the disk fails.
    """

    def __init__(
        self, folder: Path, recipe: Recipe, *, done: int = 0, started: float | None = None
    ) -> None:
        self.folder = Path(folder)
        self.files = RunFiles(self.folder)
        self._every = recipe.save.rollouts_every
        with files.storing(self.folder, "the run"):
            (self.folder / ROLLOUTS).mkdir(exist_ok=True)
            for kind in (recorded.ROLLOUTS, recorded.EVALUATIONS):
                recorded.cut(self.files, kind, done)
            (self.folder / DONE).unlink(missing_ok=True)
            before = self._lines_before() if done else []
            self.files.begin(without=(METRICS,))
            self.files.write(CONFIG, dump(recipe).encode())
            add_start(self.files, done, started)
            self.lines = {line["step"]: line for line in before if line["step"] <= done}
            """What stands in the log, by step."""
            self.files.note_lines(METRICS, (_line(line).encode() for line in self.lines.values()))
            self._write_lines()
            self._run = recipe.name
            sent = max((line["step"] for line in before), default=-1)
            self._dashboards = Dashboards(self.folder, recipe, list(self.lines.values()), sent)
            self._finished = False

    def _lines_before(self) -> list[dict[str, Any]]:
        """What stood in the log; a damaged one is put aside, and goes on without its bad lines."""
        reader = LogReader(self.files)
        lines = reader.read()
        if reader.problems:
            aside = self.folder / "metrics.damaged.jsonl"
            os.replace(self.folder / METRICS, aside)
            log.warning(
                "%s; the log goes on without (as it was: %s)",
                "; ".join(reader.problems),
                aside.name,
            )
        return lines

    def _write_lines(self) -> None:
        files.write(
            self.folder / METRICS, b"".join(_line(line).encode() for line in self.lines.values())
        )
        self._file = open(self.folder / METRICS, "ab")  # noqa: SIM115 - held until `close`

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
                    recorded.write(self.files, ROLLOUTS, step, self._run)
                self._dashboards.table(step)
        finally:  # the step was taken, whatever becomes of its completions
            self._write_line(line)

    def _check_place(self) -> None:
        """Raises StorageError if the folder is not the one that the run began in: half of the run
        would stand in another.
        """
        with files.storing(self.folder / METRICS, "the log"):
            if not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.folder / METRICS)):
                raise FileNotFoundError(
                    errno.ENOENT, "it was moved or replaced while the run went on; move it back"
                )

    def _write_line(self, line: dict[str, Any]) -> None:
        with files.storing(self.folder / METRICS, "the log"):
            written = _line(line).encode()
            self.files.note_lines(METRICS, [written])
            self._file.write(written)
            self._file.flush()
        self._dashboards.write(line)
        self.lines[line["step"]] = line

    def evaluated(self, step: int) -> bool:
        """True if the log holds an evaluation after `step` steps."""
        return any(name.startswith(EVALUATED) for name in self.lines.get(step, ()))

    def amend(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Add the evaluation after a step whose line stands there already."""
        before = self.lines.get(step)
        self.lines[step] = (before or {"step": step}) | _evaluated(evaluation)
        with files.storing(self.folder / METRICS, "the log"):
            self.files.note_lines(METRICS, [_line(self.lines[step]).encode()])
            # the log is on the disk when it is replaced, and must not be there before its digest
            self.files.sync()
            self._file.close()
            self._write_lines()
            if before is not None:
                self.files.note_replaced(METRICS, _line(before).encode())
        self._dashboards.write(
            {"step": step, "wall": time.time()} | _evaluated(evaluation), again=True
        )

    def held_out(self, number: int, groups: Sequence[RolloutGroup]) -> None:
        """Record completions of held-out prompts after step `number`."""
        if self._every and groups:
            with files.storing(self.folder / recorded.EVALUATIONS, "held-out completions"):
                recorded.write(
                    self.files,
                    recorded.EVALUATIONS,
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
            self._file.flush()
            os.fsync(self._file.fileno())
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
            self._file.close()
        self._dashboards.close(self._finished)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _evaluated(evaluation: Mapping[str, float]) -> dict[str, float]:
    return {EVALUATED + name.removeprefix(EVALUATED): value for name, value in evaluation.items()}


def _line(values: Mapping[str, Any]) -> str:
    return json_line(jsonable(values))
