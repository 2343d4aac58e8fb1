"""The sources of completions: run folders, and files of completions written by any program.

Both are read the same way: steps, each a table with one row per completion and the columns of
`rollout_table.table_of`, as far as they are known.  Whatever is read was written by others, perhaps
by a model: it is never executed, and a bad part is left out."""

from __future__ import annotations

import glob
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import pyarrow as pa

from groupwise.config.settings import DATA_SUFFIXES
from groupwise.config.strict_yaml import parse
from groupwise.data import vocabulary
from groupwise.data.vocabulary import Vocabulary
from groupwise.errors import ConfigError, DataError, RunError
from groupwise.runs import rollout_files
from groupwise.runs.folder import CONFIG, DONE, LARGEST_CONFIG, standing
from groupwise.runs.metrics_log import METRICS, MOST_PROBLEMS, last_metrics
from groupwise.runs.rollout_files import TOKENS, image_name
from groupwise.runs.rollout_table import bounded_table, family, jsonable
from groupwise.runs.run_files import RunFiles
from groupwise.runs.starts import ENVIRONMENT, attempts_of
from groupwise.utils.spelling import near_path
from groupwise.viewer.completion_files import completions_by_step
from groupwise.viewer.metric_columns import Metrics

TRAINING, HELD_OUT = "training", "evaluation"
"""The two kinds of completions that a run holds."""
FOLDERS = {TRAINING: rollout_files.ROLLOUTS, HELD_OUT: rollout_files.EVALUATIONS}
"""Where a run holds them."""


class CompletionSource:
    """Completions step by step, and what is known beside them.  Those of a file are in memory; it
    has no recipe and no machine.
    """

    def __init__(
        self,
        path: Path,
        name: str | None = None,
        *,
        tables: Mapping[int, pa.Table] | None = None,
        files: RunFiles | None = None,
    ) -> None:
        self.path = path
        self.name = name or path.name
        self.pattern: str | None = None
        """What was typed, with a wildcard, that this is one of the runs of."""
        self._metrics, self._tables = Metrics(files), dict(tables or {})

    def state(self) -> dict[str, Any]:
        """`state` (live, finished, failed, stopped, file), why it failed, the last step, and how
        many are planned.
        """
        return {"state": "file", "last": max(self.steps(), default=0), "planned": None}

    def brief(self) -> tuple[dict[str, Any], list[str]]:
        """`state` and the names of the metrics, without reading all of it."""
        return self.state(), list(self.metrics().values)

    def steps(self, kind: str = TRAINING) -> list[int]:
        """Steps whose completions can be read, in order."""
        return list(self._tables) if kind == TRAINING else []

    def table(
        self, step: int, columns: Sequence[str] | None = None, kind: str = TRAINING
    ) -> pa.Table:
        """The completions of a step; columns that are not there are left out, `rewards/` is all of
        them.  Raises DataError.
        """
        if step not in self.steps(kind):
            raise DataError(f"{self.name} holds no step {step}")
        table = self._tables[step]
        if columns is None:
            return table
        wanted = []
        for name in table.column_names:
            if name in columns or family(name) in columns:
                wanted.append(name)
        return table.select(wanted)

    def metrics(self) -> Metrics:
        """The numbers of every step so far."""
        return self._metrics.refresh()

    def config(self) -> dict[str, Any]:
        """The recipe's keys, with dots."""
        return {}

    def environment(self) -> dict[str, Any]:
        """Versions, command and hardware of the last start."""
        return {}

    def vocabulary(self) -> Vocabulary | None:
        """The text of token ids, if it is known."""
        return None

    def image(self, digest: str) -> bytes | None:
        """The small copy of an image (PNG), if it is there."""
        return None

    def problems(self) -> list[str]:
        """What could not be read."""
        return []


Found = TypeVar("Found")
DIGEST = re.compile(r"[0-9a-f]{32}")
PNG = b"\x89PNG\r\n\x1a\n"
LARGEST_IMAGE = 1 << 20
"""Bytes of a small copy."""
PIECE = 1024
"""Bytes of a token that are shown."""


class RunSource(CompletionSource):
    """A run folder.  What is wrong in it is kept in `problems`, by file; the rest is shown."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.files = RunFiles(path)
        super().__init__(path, name, files=self.files)
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._listed: dict[str, tuple[int, dict[int, str]]] = {}
        self._config: tuple[int, dict[str, Any]] = (-1, {})
        self._wrong: dict[str, list[str]] = {}

    def problems(self) -> list[str]:
        """What could not be read so far, each file by its name."""
        problems = [*self.files.doubtful, *self._metrics.problems]
        with self._lock:
            for texts in self._wrong.values():
                problems += texts
        return problems

    def _try(self, name: str, read: Callable[[], Found], otherwise: Found) -> Found:
        """What `read` makes of a file; `otherwise` if that is wrong, which is noted."""
        try:
            found, wrong = read(), []
        except RunError as error:
            found, wrong = otherwise, [str(error)]
        self._note(name, wrong)
        return found

    def _note(self, name: str, wrong: list[str]) -> None:
        with self._lock:
            self._wrong[name] = wrong

    def state(self) -> dict[str, Any]:
        """Live while a process holds the run's lock, finished once the run has marked its end,
        failed by an error, else stopped.
        """
        if self.files.has(DONE):
            self._try(DONE, self._read_end, None)
        state, why = standing(self.files)
        fields = {"state": state, "why": why, "last": 0, "planned": None}
        steps, planned = self.metrics().steps, self.config().get("steps")
        if steps:
            fields["last"] = steps[-1]
        if isinstance(planned, int):
            fields["planned"] = planned
        return fields

    def _read_end(self) -> Any:
        return self.files.json(DONE)

    def brief(self) -> tuple[dict[str, Any], list[str]]:
        """`state`, and the names of the metrics, by the last line of the log alone."""
        line = self._try(METRICS, self._read_last, {})
        names = []
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                names.append(name)
        state, why = standing(self.files)
        return {"state": state, "why": why, "last": line.get("step", 0), "planned": None}, names

    def _read_last(self) -> dict[str, Any]:
        return last_metrics(self.files)

    def _steps(self, kind: str) -> dict[int, str]:
        """The file of each step; the folder is listed again when it has changed."""
        folder = FOLDERS[kind]
        changed = self.files.changed(folder)
        if changed is None:
            return {}
        if kind not in self._listed or self._listed[kind][0] != changed:
            try:
                steps, wrong = rollout_files.steps(self.files, folder)
            except RunError as error:
                steps, wrong = {}, [str(error)]
            self._note(folder, wrong[:MOST_PROBLEMS])
            self._listed[kind] = changed, steps
        return self._listed[kind][1]

    def steps(self, kind: str = TRAINING) -> list[int]:
        """Steps with recorded completions."""
        return list(self._steps(kind))

    def table(
        self, step: int, columns: Sequence[str] | None = None, kind: str = TRAINING
    ) -> pa.Table:
        """Read from the Parquet file of the step."""
        name = self._steps(kind).get(step)
        if name is None:
            raise DataError(f"{self.name} holds no completions of step {step}")
        try:
            found = rollout_files.table(self.files, step, columns, name.partition("/")[0])
        except RunError as error:
            self._note(name, [str(error)])
            raise
        if columns is None:  # other columns may be those that are bad
            self._note(name, [])
        return found

    def config(self) -> dict[str, Any]:
        """From `config.yaml`; empty if it cannot be read."""
        changed = self.files.changed(CONFIG)
        if changed is None:
            return {}
        if self._config[0] != changed:
            self._config = changed, self._try(CONFIG, self._read_config, {})
        return self._config[1]

    def _read_config(self) -> dict[str, Any]:
        document, problems = parse(self.files.text(CONFIG, LARGEST_CONFIG), str(self.path / CONFIG))
        if problems:
            raise RunError(str(problems[0]))
        if not isinstance(document.values, dict):
            return {}
        return dict(_flat(jsonable(document.values)))

    def environment(self) -> dict[str, Any]:
        """The last entry of `environment.json`, and how many starts there were; empty if it cannot
        be read.
        """
        attempts = self._try(ENVIRONMENT, self._read_attempts, [])
        if not attempts:
            return {}
        return {**attempts[-1], "starts": len(attempts)}

    def _read_attempts(self) -> list[dict[str, Any]]:
        return attempts_of(self.files)

    def vocabulary(self) -> Vocabulary | None:
        """From `tokens.parquet`."""
        if self._vocabulary is None and self.files.has(TOKENS):
            self._vocabulary = self._try(TOKENS, self._read_vocabulary, None)
        return self._vocabulary

    def image(self, digest: str) -> bytes | None:
        """From the folder of images; nothing that is no PNG, or has no digest's name."""
        name = image_name(digest)
        if not DIGEST.fullmatch(digest) or not self.files.has(name):
            return None
        data = self._try(name, lambda: self.files.read(name, LARGEST_IMAGE), b"")
        return data if data.startswith(PNG) else None

    def _read_vocabulary(self) -> Vocabulary:
        try:
            known = vocabulary.from_table(bounded_table(self.files.read(TOKENS)))
        except RunError:
            raise
        except (DataError, ValueError) as error:
            raise RunError(f"{self.path / TOKENS}: {error}") from error
        return replace(known, pieces=[piece and piece[:PIECE] for piece in known.pieces])


def open_file(path: Path, name: str | None = None) -> CompletionSource:
    """A Parquet or JSONL file of completions, with whatever columns it has.  Raises DataError.

    Understood: prompt, completion (text or messages), reward or score, metrics or `rewards/NAME`,
        step, group or example, finish; under the names that Groupwise, TRL, verl, verifiers and
        common evaluation harnesses give them.  Its metrics are the mean reward and the mean length
        in characters by step.
    """
    steps = completions_by_step(path)
    tables = {step: pa.Table.from_pylist(rows) for step, rows in steps.items()}
    source = CompletionSource(path, name, tables=tables)
    for step, rows in steps.items():
        rewards, lengths = [], []
        for row in rows:
            lengths.append(len(row["completion_text"]))
            if row["reward"] is not None and not math.isnan(row["reward"]):
                rewards.append(row["reward"])
        line = {"step": step, "reward": math.nan, "completions/mean_length": fmean(lengths)}
        if rewards:
            line["reward"] = fmean(rewards)
        source.metrics().add(line)
    return source


def open_source(path: str | Path, name: str | None = None) -> CompletionSource:
    """A run folder or a file.  Raises DataError for anything else, with what could be meant."""
    path = Path(path)
    if path.is_dir():
        files = RunFiles(path)
        if files.has(CONFIG) or files.has(METRICS) or files.has(rollout_files.ROLLOUTS):
            return RunSource(path, name)
        message = f"{path} is no run folder (it holds no {CONFIG})"
        inside = [folder.name for folder in _runs_in(path)]
        if inside:
            message += f"; there are runs in it: {', '.join(inside[:8])}"
        raise DataError(message)
    if path.suffix.lower() in DATA_SUFFIXES:
        return open_file(path, name)
    if not path.exists():
        raise DataError(f"there is no {path}{near_path(path)}")
    raise DataError(
        f"{path} is neither a run folder nor a file that ends in {', '.join(DATA_SUFFIXES)}"
    )


def matching(typed: str | Path) -> list[Path]:
    """List the run folders and files that a pattern with wildcards means; any other path is itself.

    Raises ConfigError for a pattern that nothing matches.
    """
    text = str(typed)
    if not glob.has_magic(text) or Path(text).exists():
        return [Path(text)]
    found = []
    for path in map(Path, sorted(glob.glob(text))):
        if path.is_dir() or path.suffix.lower() in DATA_SUFFIXES:
            found.append(path)
    if not found:
        raise ConfigError(
            f"no run folder is called {text!r}; a pattern with * stands in quotes: 'runs/mine-*'"
        )
    return found


def open_sources(paths: Sequence[str | Path]) -> list[CompletionSource]:
    """Open runs and files, with names that tell them apart.

    A folder of stages (`runs/demo`) stands for its stages, a pattern (`runs/mine-*`) for the runs
    of one setting.  Raises ConfigError, DataError.
    """
    opened: dict[Path, str | None] = {}
    for typed in paths:
        for path in matching(typed):
            pattern = str(typed) if str(typed) != str(path) else None
            for stage in _stages_of(path):
                inside = "" if stage == path else f"/{stage.name}"
                opened[stage] = None if pattern is None else pattern + inside
    names = [path.name for path in opened]
    sources = []
    for path, pattern in opened.items():
        name = path.name
        if names.count(name) > 1:
            name = f"{path.absolute().parent.name}/{name}"
        source = open_source(path, name)
        source.pattern = pattern
        sources.append(source)
    return sources


def _stages_of(path: Path) -> list[Path]:
    """Return the stages in a folder that is no run itself; for any other path the path itself."""
    if not path.is_dir() or (path / CONFIG).exists():
        return [path]
    return _runs_in(path) or [path]


def _runs_in(folder: Path) -> list[Path]:
    return sorted(place.parent for place in folder.glob(f"*/{CONFIG}"))


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key; lists of plain values stay whole."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(inner, (Mapping, list)) for inner in value):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{prefix}.{i}")
    else:
        yield prefix, tuple(value) if isinstance(value, list) else value
