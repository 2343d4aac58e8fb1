"""The sources of completions: run folders, and files of completions written by any program.

Both are read the same way: steps, each a table with one row per completion and the columns of
`rollout_table.table_of`, as far as they are known.  Whatever is read was written by others, perhaps
by a model: it is never executed, and a bad part is left out."""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from groupwise.config.settings import DATA_SUFFIXES
from groupwise.config.strict_yaml import parse
from groupwise.data import vocabulary
from groupwise.data.vocabulary import Vocabulary
from groupwise.errors import DataError, RunError
from groupwise.runs import rollout_files
from groupwise.runs.folder import CONFIG, DONE, LARGEST_CONFIG, standing
from groupwise.runs.metrics_log import METRICS, MOST_PROBLEMS, RESUMED, LogReader, last_metrics
from groupwise.runs.rollout_files import TOKENS
from groupwise.runs.rollout_table import bounded_table, family, jsonable
from groupwise.runs.run_files import RunFiles, bounded_json
from groupwise.runs.starts import ENVIRONMENT, attempts_of
from groupwise.training.metric_table import LOOKED_AT
from groupwise.utils.spelling import near_path
from groupwise.utils.terminal import logger

TRAINING, HELD_OUT = "training", "evaluation"
"""The two kinds of completions that a run holds."""
LARGEST_STEP = 1 << 53
"""A step of a file is smaller: a larger number is no longer exact in a browser."""
LARGEST_JSONL = 512 << 20
"""Bytes of a JSONL file; it is read as a whole."""


MOST_NUMBERS = 1 << 26
"""Numbers of a log, every metric at every step; what goes beyond is left out."""


class Metrics:
    """metrics.jsonl as columns, read on as the file grows."""

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
            cut = sum(not self.add(entry) for entry in entries)
            more = (
                [f"metrics.jsonl holds more than {MOST_NUMBERS:,} numbers: some are left out"]
                if cut
                else []
            )
            self.problems = [*self._reader.problems, *more]
        return self

    def add(self, entry: Mapping[str, Any]) -> bool:
        """Add a line, which may be more of the last step; False if something had to be left out."""
        if RESUMED in entry:
            self._cut(entry["step"])
            return True
        if self.steps and self.steps[-1] == entry["step"]:
            return self._amend(entry)
        whole, count = True, len(self.steps)
        for name, value in entry.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name in self.values or count * (len(self.values) + 1) <= MOST_NUMBERS:
                column = self.values.setdefault(name, array("d", [math.nan]) * count)
                column.append(float(value) if abs(value) < 1e300 else math.nan)
            else:
                whole = False
        self.steps.append(entry["step"])
        for column in self.values.values():
            column.extend([math.nan] * (len(self.steps) - len(column)))
        return whole

    def _amend(self, entry: Mapping[str, Any]) -> bool:
        """Take the last step away, and add it again with what a further line says of it."""
        last = {name: column[-1] for name, column in self.values.items()}
        known = {name: value for name, value in last.items() if not math.isnan(value)}
        self.steps.pop()
        for column in self.values.values():
            column.pop()
        return self.add({**known, **entry})

    def _cut(self, done: int) -> None:
        """Take the steps behind `done` away: they are taken again."""
        count = sum(step <= done for step in self.steps)
        del self.steps[count:]
        for column in self.values.values():
            del column[count:]

    def history(self) -> list[dict[str, float]]:
        """The steps that decide about the flags, as mappings: what was not computed has no key."""
        return [
            {
                name: column[i]
                for name, column in self.values.items()
                if not math.isnan(column[i]) or name == "reward"
            }
            for i in range(max(0, len(self.steps) - LOOKED_AT), len(self.steps))
            if self.steps[i] > 0
        ]


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
        return table.select(
            [
                name
                for name in table.column_names
                if columns is None or name in columns or family(name) in columns
            ]
        )

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

    def problems(self) -> list[str]:
        """What could not be read."""
        return []


Found = TypeVar("Found")
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
        with self._lock:
            wrong = [text for texts in self._wrong.values() for text in texts]
        return [*self.files.doubtful, *self._metrics.problems, *wrong]

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
        steps, planned = self.metrics().steps, self.config().get("steps")
        last = steps[-1] if len(steps) else 0
        state, why = standing(self.files)
        if self.files.has(DONE):
            self._try(DONE, lambda: self.files.json(DONE), None)
        return {
            "state": state,
            "why": why,
            "last": last,
            "planned": planned if isinstance(planned, int) else None,
        }

    def brief(self) -> tuple[dict[str, Any], list[str]]:
        """`state`, and the names of the metrics, by the last line of the log alone."""
        line = self._try(METRICS, lambda: last_metrics(self.files), {})
        names = [
            name
            for name, value in line.items()
            if isinstance(value, int | float) and name != "step"
        ]
        state, why = standing(self.files)
        return {"state": state, "why": why, "last": line.get("step", 0), "planned": None}, names

    def _steps(self, kind: str) -> dict[int, str]:
        """The file of each step; the folder is listed again when it has changed."""
        folder = rollout_files.ROLLOUTS if kind == TRAINING else rollout_files.EVALUATIONS
        if (changed := self.files.changed(folder)) is None:
            return {}
        if kind not in self._listed or self._listed[kind][0] != changed:
            steps, wrong = self._try(
                folder, lambda: rollout_files.steps(self.files, folder), ({}, [])
            )
            if wrong:
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
        if (changed := self.files.changed(CONFIG)) is None:
            return {}
        if self._config[0] != changed:
            self._config = changed, self._try(CONFIG, self._read_config, {})
        return self._config[1]

    def _read_config(self) -> dict[str, Any]:
        document, problems = parse(self.files.text(CONFIG, LARGEST_CONFIG), str(self.path / CONFIG))
        if problems:
            raise RunError(str(problems[0]))
        return dict(_flat(jsonable(document.values))) if isinstance(document.values, dict) else {}

    def environment(self) -> dict[str, Any]:
        """The last entry of `environment.json`, and how many starts there were; empty if it cannot
        be read.
        """
        attempts = self._try(ENVIRONMENT, lambda: attempts_of(self.files), [])
        return {**attempts[-1], "starts": len(attempts)} if attempts else {}

    def vocabulary(self) -> Vocabulary | None:
        """From `tokens.parquet`."""
        if self._vocabulary is None and self.files.has(TOKENS):
            self._vocabulary = self._try(TOKENS, self._read_vocabulary, None)
        return self._vocabulary

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
    steps = dict(sorted(_by_step(_rows_of(path)).items()))
    place = itemgetter("group", "index")
    source = CompletionSource(
        path,
        name,
        tables={step: pa.Table.from_pylist(sorted(steps[step], key=place)) for step in steps},
    )
    for step, rows in steps.items():
        rewards = [
            row["reward"]
            for row in rows
            if row["reward"] is not None and not math.isnan(row["reward"])
        ]
        lengths = [len(row["completion_text"]) for row in rows]
        reward, length = (
            sum(rewards) / len(rewards) if rewards else math.nan,
            sum(lengths) / len(lengths),
        )
        source.metrics().add({"step": step, "reward": reward, "completions/mean_length": length})
    return source


def open_source(path: str | Path, name: str | None = None) -> CompletionSource:
    """A run folder or a file.  Raises DataError for anything else, with what could be meant."""
    path = Path(path)
    if path.is_dir():
        if any(RunFiles(path).has(part) for part in (CONFIG, METRICS, rollout_files.ROLLOUTS)):
            return RunSource(path, name)
        inside = sorted(child.parent.name for child in path.glob(f"*/{CONFIG}"))
        near = f"; there are runs in it: {', '.join(inside[:8])}" if inside else ""
        raise DataError(f"{path} is no run folder (it holds no {CONFIG}){near}")
    if path.suffix.lower() in DATA_SUFFIXES:
        return open_file(path, name)
    if not path.exists():
        raise DataError(f"there is no {path}{near_path(path)}")
    raise DataError(
        f"{path} is neither a run folder nor a file that ends in {', '.join(DATA_SUFFIXES)}"
    )


def open_sources(paths: Sequence[str | Path]) -> list[CompletionSource]:
    """Sources with names that tell them apart.  A folder of stages (`runs/demo`) stands for its
    stages.
    """
    opened: list[Path] = []
    for path in map(Path, paths):
        stages = sorted(child.parent for child in path.glob(f"*/{CONFIG}")) if path.is_dir() else []
        opened += stages if stages and not (path / CONFIG).exists() else [path]
    names = [path.name for path in opened]
    shown = [
        path.name if names.count(path.name) == 1 else f"{path.absolute().parent.name}/{path.name}"
        for path in opened
    ]
    return [open_source(path, name) for path, name in zip(opened, shown, strict=True)]


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


# ---------------------------------------------------------------- files of completions

NAMES = {
    "completion": (
        *(
            "completion_text",
            "completion",
            "response",
            "output",
            "generation",
            "answer_text",
            "text",
            "messages",
            "trajectory",
        ),
    ),
    "prompt": ("prompt_text", "prompt", "question", "input", "instruction", "problem"),
    "reward": ("reward", "score", "rewards", "total_reward"),
    "step": ("step", "global_step", "training_step", "iteration"),
    "group": ("group", "example_id", "group_id", "prompt_id", "uid", "idx"),
    "finish": ("finish", "finish_reason", "stop_reason", "stop_condition", "stop"),
}
"""The names that columns have."""


def _rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows that hold a completion.  Raises DataError if there are none."""
    try:
        rows = (
            _json_rows(path)
            if path.suffix.lower() != ".parquet"
            else bounded_table(path.read_bytes()).to_pylist()
        )
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise DataError(f"{path} holds no rows")
    usable = [
        row for row in rows if isinstance(row, dict) and _first(row, "completion") is not None
    ]
    if not usable:
        has = (
            f"it has {', '.join(rows[0])}"
            if isinstance(rows[0], dict)
            else "its rows are no JSON objects"
        )
        raise DataError(
            f"{path} has no column that could be a completion ({', '.join(NAMES['completion'])});"
            f" {has}"
        )
    if lost := len(rows) - len(usable):
        logger(__name__).warning(
            "%s: %d of %d rows hold no completion, and are left out", path, lost, len(rows)
        )
    return usable


def _json_rows(path: Path) -> list[Any]:
    """Raises OSError, DataError."""
    if path.stat().st_size > LARGEST_JSONL:
        raise DataError(
            f"{path} has {path.stat().st_size >> 20} MiB: convert it to Parquet, or cut it to"
            f" {LARGEST_JSONL >> 20}"
        )
    text, rows = path.read_text(encoding="utf-8-sig", errors="replace"), []
    if path.suffix.lower() == ".json":
        try:
            data = bounded_json(text)
        except ValueError as error:
            raise DataError(f"{path} is no JSON: {error}") from error
        rows = (
            (data.get("rows") or data.get("results") or [data]) if isinstance(data, dict) else data
        )
        return rows if isinstance(rows, list) else [rows]
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            rows += [bounded_json(line)] if line.strip() else []
        except ValueError as error:
            if number < len(lines):  # the last line may be one that is being written
                raise DataError(f"{path}:{number}: no JSON: {error}") from error
    return rows


def _first(row: Mapping[str, Any], what: str) -> Any:
    return next((row[name] for name in NAMES[what] if row.get(name) is not None), None)


def _by_step(rows: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The rows as completions, by step; rows that share a prompt (or an example) are a group."""
    steps: dict[int, list[dict[str, Any]]] = {}
    groups: dict[int, dict[str, list[int]]] = {}
    completions = list(map(_completion, rows))
    names = dict.fromkeys(name for completion in completions for name in completion)
    for row, completion in zip(rows, completions, strict=True):
        name = _first(row, "group")
        key = _text(completion["prompt_text"] if name is None else name)
        known = groups.setdefault(completion["step"], {})
        place = known.setdefault(key, [len(known), 0])
        completion |= {"group": place[0], "index": place[1], "prompt_id": key}
        steps.setdefault(completion["step"], []).append(names | completion)
        place[1] += 1
    return steps


def _completion(row: Mapping[str, Any]) -> dict[str, Any]:
    completion, reward = _first(row, "completion"), _first(row, "reward")
    several: dict[str, Any] = dict(reward) if isinstance(reward, Mapping) else {}
    if isinstance(metrics := row.get("metrics"), Mapping):
        several |= {name: value for name, value in metrics.items() if _number(value) is not None}
    several |= {
        name.removeprefix("rewards/"): value
        for name, value in row.items()
        if name.startswith("rewards/")
    }
    rewards = {f"rewards/{_text(name)}": _number(value) for name, value in several.items()}
    single = _number(reward)
    fields: dict[str, Any] = {
        "step": _step(_first(row, "step")),
        "prompt_text": _text(_first(row, "prompt")),
        "completion_text": _text(completion),
        "reward": (
            single if single is not None or not rewards else sum(filter(None, rewards.values()))
        ),
        "finish": "length" if row.get("is_truncated") is True else _text(_first(row, "finish")),
        **rewards,
    }
    if isinstance(completion, list):
        fields["messages"] = json.dumps(completion, default=str)
    return fields


def _step(value: Any) -> int:
    """Return the number of a step; 0 where there is none.  Raises DataError for one beyond 2^53."""
    if isinstance(value, int | float) and abs(value) >= LARGEST_STEP:
        raise DataError(f"a step is a whole number below 2^53, got {value!r}: correct the file")
    return int(_number(value) or 0)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else None


def _text(value: Any) -> str:
    """Text as it can be stored: lone surrogates as escapes; of messages, what was said, one after
    the other.
    """
    if value is None:
        return ""
    if isinstance(value, list):
        value = "\n".join(
            _text(message.get("content") if isinstance(message, Mapping) else message)
            for message in value
        )
    elif isinstance(value, Mapping):
        value = _text(value.get("content") or value.get("text") or json.dumps(value, default=str))
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")
