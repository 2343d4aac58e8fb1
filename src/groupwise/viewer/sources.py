"""The sources of completions: run folders, and files of completions written by any program.

Both are read the same way: steps, each a table with one row per completion and the columns of `rollout_table.table_of`, as far as
they are known.  Whatever is read was written by others, perhaps by a model: it is never executed, and a bad part is left out.
"""

from __future__ import annotations

import json
import math
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from groupwise.config.validation import DATA_SUFFIXES
from groupwise.data import vocabulary
from groupwise.data.vocabulary import Vocabulary
from groupwise.errors import DataError
from groupwise.runs import folder as runlog
from groupwise.runs import recorded
from groupwise.utils.spelling import near_path
from groupwise.utils.terminal import logger

TRAINING, HELD_OUT = "training", "evaluation"
"""The two kinds of completions that a run holds."""
LARGEST_JSONL = 512 << 20
"""Bytes of a JSONL file; it is read as a whole."""


class Source(Protocol):
    """A run folder or file with completions."""

    name: str
    path: Path

    def state(self) -> dict[str, Any]:
        """`state` (live, finished, stopped, file) and the last step."""
        ...

    def steps(self, kind: str = TRAINING) -> list[int]:
        """Steps whose completions can be read, in order."""
        ...

    def table(self, step: int, columns: Sequence[str] | None = None, kind: str = TRAINING) -> pa.Table:
        """The completions of a step; columns that are not there are left out.  Raises DataError."""
        ...

    def columns(self, step: int, kind: str = TRAINING) -> list[str]:
        """The columns of a step."""
        ...

    def metrics(self) -> Metrics:
        """The numbers of every step."""
        ...

    def config(self) -> dict[str, Any]:
        """The recipe's keys, with dots."""
        ...

    def environment(self) -> dict[str, Any]:
        """Versions, command and hardware of the last start."""
        ...

    def vocabulary(self) -> Vocabulary | None:
        """The text of token ids, if it is known."""
        ...


class Metrics:
    """metrics.jsonl as columns, read on as the file grows."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._file: tuple[int, int] = (0, 0)
        self._offset = 0
        self.steps = array("q")
        self.values: dict[str, array[float]] = {}

    def refresh(self) -> Metrics:
        """Read what was appended; a file that was replaced (a run that resumed) is read anew."""
        if self._path is None:
            return self
        with self._lock:
            try:
                with open(self._path, "rb") as file:
                    status = os.fstat(file.fileno())
                    if self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset:
                        self._clear()
                        self._file = status.st_dev, status.st_ino
                    file.seek(self._offset)
                    fresh = file.read()
            except OSError:
                return self
            whole = fresh[: fresh.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                self._add(line)
        return self

    def _add(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            step = int(entry["step"])
        except (ValueError, KeyError, TypeError):
            return
        for name, value in entry.items():
            if name == "step":
                continue
            try:
                number = float(value)
            except (TypeError, ValueError):
                continue
            if name not in self.values:
                self.values[name] = array("d", [math.nan]) * len(self.steps)
            self.values[name].append(number)
        self.steps.append(step)
        for column in self.values.values():
            if len(column) < len(self.steps):
                column.append(math.nan)

    def history(self) -> list[dict[str, float]]:
        """The last steps as mappings, for the flags: what was not computed has no key."""
        count = len(self.steps)
        return [
            {name: column[i] for name, column in self.values.items() if not math.isnan(column[i]) or name == "reward"}
            for i in range(max(0, count - 10), count)
            if self.steps[i] > 0
        ]


class Run:
    """A run folder."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or path.name
        self._metrics = Metrics(path / runlog.METRICS)
        self._files = _Files()
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._listed: dict[str, tuple[int, dict[int, recorded.Place]]] = {}
        self._config: tuple[int, dict[str, Any]] = (-1, {})

    def state(self) -> dict[str, Any]:
        """Live while a process holds the run's lock, finished once the run has marked its end, else stopped."""
        steps = self.metrics().steps
        last = steps[-1] if len(steps) else 0
        done = runlog.finished(self.path)
        state = "finished" if done is not None else "live" if runlog.in_use(self.path) else "stopped"
        return {"state": state, "last": last, "planned": self.config().get("steps")}

    def places(self, kind: str = TRAINING) -> dict[int, recorded.Place]:
        """Where each step lies; the folder is listed again when it has changed."""
        folder = self.path / (recorded.ROLLOUTS if kind == TRAINING else recorded.EVALUATIONS)
        try:
            changed = folder.stat().st_mtime_ns
        except OSError:
            return {}
        if kind not in self._listed or self._listed[kind][0] != changed:
            self._listed[kind] = changed, recorded.places(folder)
        return self._listed[kind][1]

    def steps(self, kind: str = TRAINING) -> list[int]:
        """Steps with recorded completions."""
        return list(self.places(kind))

    def table(self, step: int, columns: Sequence[str] | None = None, kind: str = TRAINING) -> pa.Table:
        """Read from the Parquet file of the step."""
        return self._read(step, kind, lambda file, group: _read(file, group, columns))

    def columns(self, step: int, kind: str = TRAINING) -> list[str]:
        """Columns of the Parquet file of the step."""
        return self._read(step, kind, lambda file, _: file.schema_arrow.names)

    def _read(self, step: int, kind: str, read: Callable[[pq.ParquetFile, int | None], Any]) -> Any:
        for attempt in (1, 2):  # between looking and reading, a running process may have put the step elsewhere
            if attempt == 2:
                self._listed.pop(kind, None)
            place = self.places(kind).get(step)
            if place is None and attempt == 1:
                continue
            if place is None:
                raise DataError(f"{self.name} holds no completions of step {step}")
            try:
                return self._files.use(place.path, lambda file, place=place: read(file, place.row_group))
            except FileNotFoundError as error:
                if attempt == 2:
                    raise DataError(f"the completions of step {step} went away") from error
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{place.path.name} is damaged: {error}") from error
        raise AssertionError

    def metrics(self) -> Metrics:
        """The metrics so far; `metrics.jsonl` is read on."""
        return self._metrics.refresh()

    def config(self) -> dict[str, Any]:
        """From `config.yaml`; empty if it cannot be read."""
        path = self.path / runlog.CONFIG
        try:
            changed = path.stat().st_mtime_ns
            if self._config[0] != changed:
                keys = yaml.safe_load(path.read_text(encoding="utf-8"))
                self._config = changed, dict(_flat(keys)) if isinstance(keys, dict) else {}
        except (OSError, yaml.YAMLError, UnicodeDecodeError):
            return {}
        return self._config[1]

    def environment(self) -> dict[str, Any]:
        """The last entry of `environment.json`, and how many starts there were; empty if it cannot be read."""
        try:
            attempts = json.loads((self.path / runlog.ENVIRONMENT).read_text(encoding="utf-8"))["attempts"]
            return {**attempts[-1], "starts": len(attempts)}
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return {}

    def vocabulary(self) -> Vocabulary | None:
        """From `tokens.parquet`, else from a saved tokenizer."""
        with self._lock:
            if self._vocabulary is None:
                places = (self.path / runlog.TOKENS, self.path / "final/tokenizer.json", self.path / "reference/tokenizer.json")
                checkpoints = sorted((self.path / "checkpoints").glob("[0-9]*/policy/tokenizer.json"))
                for place in (*places, *checkpoints):
                    try:
                        self._vocabulary = vocabulary.read(place)
                        break
                    except DataError:
                        continue
            return self._vocabulary


class File:
    """A Parquet or JSONL file of completions, with whatever columns it has.

    Understood: prompt, completion (text or messages), reward or score, metrics or `rewards/NAME`, step, group or example, finish;
    under the names that Groupwise, TRL, verl, verifiers and common evaluation harnesses give them.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or path.name
        self._metrics = Metrics(None)
        self._steps: dict[int, pa.Table] = {}
        for step, rows in sorted(_by_step(_rows_of(path)).items()):
            together = sorted(rows, key=lambda row: (row["group"], row["index"]))
            self._steps[step] = pa.Table.from_pylist(_filled(together))
        self._add_metrics()

    def _add_metrics(self) -> None:
        """What a run would have logged, as far as the completions say it."""
        metrics = self._metrics
        metrics.values = {"reward": array("d"), "completions/mean_length": array("d")}
        for step, table in self._steps.items():
            rewards = [value for value in table.column("reward").to_pylist() if value is not None and not math.isnan(value)]
            lengths = [len(text) for text in table.column("completion_text").to_pylist()]
            metrics.steps.append(step)
            metrics.values["reward"].append(sum(rewards) / len(rewards) if rewards else math.nan)
            metrics.values["completions/mean_length"].append(sum(lengths) / len(lengths))

    def state(self) -> dict[str, Any]:
        """`file`, and its largest step."""
        return {"state": "file", "last": max(self._steps, default=0), "planned": None}

    def steps(self, kind: str = TRAINING) -> list[int]:
        """The steps that its rows name."""
        return list(self._steps) if kind == TRAINING else []

    def table(self, step: int, columns: Sequence[str] | None = None, kind: str = TRAINING) -> pa.Table:
        """Rows of a step, kept in memory."""
        if kind != TRAINING or step not in self._steps:
            raise DataError(f"{self.name} holds no step {step}")
        table = self._steps[step]
        return table if columns is None else table.select([name for name in columns if name in table.column_names])

    def columns(self, step: int, kind: str = TRAINING) -> list[str]:
        """Columns of a step, absent ones of the file filled in."""
        return self.table(step, kind=kind).column_names

    def metrics(self) -> Metrics:
        """Mean reward and mean length in characters by step."""
        return self._metrics

    def config(self) -> dict[str, Any]:
        """Empty: a file holds no recipe."""
        return {}

    def environment(self) -> dict[str, Any]:
        """Empty: a file does not say where it was made."""
        return {}

    def vocabulary(self) -> Vocabulary | None:
        """None: texts of tokens are unknown."""
        return None


def open_source(path: str | Path, name: str | None = None) -> Source:
    """A run folder or a file.  Raises DataError for anything else, with what could be meant."""
    path = Path(path)
    if path.is_dir():
        if (path / runlog.CONFIG).exists() or (path / runlog.METRICS).exists() or (path / recorded.ROLLOUTS).is_dir():
            return Run(path, name)
        inside = sorted(child.parent.name for child in path.glob(f"*/{runlog.CONFIG}"))
        near = f"; there are runs in it: {', '.join(inside[:8])}" if inside else ""
        raise DataError(f"{path} is no run folder (it holds no {runlog.CONFIG}){near}")
    if path.suffix.lower() in DATA_SUFFIXES:
        return File(path, name)
    raise DataError(f"{path} is neither a run folder nor a file that ends in {', '.join(DATA_SUFFIXES)}{near_path(path)}")


def open_sources(paths: Sequence[str | Path]) -> list[Source]:
    """Sources with names that tell them apart.  A folder of stages (`runs/demo`) stands for its stages."""
    opened: list[Path] = []
    for path in map(Path, paths):
        stages = sorted(child.parent for child in path.glob(f"*/{runlog.CONFIG}")) if path.is_dir() else []
        opened += stages if stages and not (path / runlog.CONFIG).exists() else [path]
    names = [path.name for path in opened]
    told = [path.name if names.count(path.name) == 1 else f"{path.absolute().parent.name}/{path.name}" for path in opened]
    return [open_source(path, name) for path, name in zip(opened, told, strict=True)]


class _Files:
    """Open Parquet files: a file of many steps has a long table of contents, which is read once."""

    def __init__(self, size: int = 6) -> None:
        self._size, self._lock = size, threading.Lock()
        self._open: OrderedDict[tuple[Path, int, int], tuple[pq.ParquetFile, threading.Lock]] = OrderedDict()

    def use(self, path: Path, read: Callable[[pq.ParquetFile], Any]) -> Any:
        """What `read` makes of the file; one reader at a time."""
        status = path.stat()
        key = path, status.st_ino, status.st_mtime_ns
        with self._lock:
            if key not in self._open:
                self._open[key] = pq.ParquetFile(path, memory_map=False, pre_buffer=False), threading.Lock()
                while len(self._open) > self._size:
                    self._open.popitem(last=False)
            self._open.move_to_end(key)
            file, own = self._open[key]
        with own:
            return read(file)


def _read(file: pq.ParquetFile, row_group: int | None, columns: Sequence[str] | None) -> pa.Table:
    names = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
    # Threads cost more than they bring for what one page reads, and would stand in the way of the run.
    if row_group is None:
        return file.read(names, use_threads=False)
    return file.read_row_group(row_group, names, use_threads=False)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key; lists of plain values stay whole."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(inner, (Mapping, list)) for inner in value):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{prefix}.{i}")
    else:
        yield prefix, value


# ---------------------------------------------------------------- files of completions

_COMPLETION = ("completion_text", "completion", "response", "output", "generation", "answer_text", "text", "messages", "trajectory")
_PROMPT = ("prompt_text", "prompt", "question", "input", "instruction", "problem")
_REWARD = ("reward", "score", "rewards", "total_reward")
_STEP = ("step", "global_step", "training_step", "iteration")
_GROUP = ("group", "example_id", "group_id", "prompt_id", "uid", "idx")
_FINISH = ("finish", "finish_reason", "stop_reason", "stop_condition", "stop")


def _rows_of(path: Path) -> list[dict[str, Any]]:
    try:
        if path.suffix.lower() == ".parquet":
            return pq.read_table(path).to_pylist()
        if path.stat().st_size > LARGEST_JSONL:
            raise DataError(
                f"{path} has {path.stat().st_size >> 20} MiB: convert it to Parquet, or cut it to {LARGEST_JSONL >> 20}"
            )
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if path.suffix.lower() == ".json":
        try:
            data = json.loads(text)
        except ValueError as error:
            raise DataError(f"{path} is no JSON: {error}") from error
        rows = data if isinstance(data, list) else data.get("rows") or data.get("results") or [data]
    else:
        rows = []
        lines = text.split("\n")
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    if number < len(lines):  # the last line may be one that is being written
                        raise DataError(f"{path}:{number}: no JSON: {error}") from error
    if not rows:
        raise DataError(f"{path} holds no rows")
    found = [row for row in rows if isinstance(row, dict) and _first(row, _COMPLETION) is not None]
    if not found:
        has = f"it has {', '.join(rows[0])}" if isinstance(rows[0], dict) else "its rows are no JSON objects"
        raise DataError(f"{path} has no column that could be a completion ({', '.join(_COMPLETION)}); {has}")
    if len(found) < len(rows):
        lost = len(rows) - len(found)
        logger(__name__).warning("%s: %d of %d rows hold no completion, and are left out", path, lost, len(rows))
    return found


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _by_step(rows: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The rows as completions, by step; rows that share a prompt (or an example) are a group."""
    steps: dict[int, list[dict[str, Any]]] = {}
    groups: dict[int, dict[str, list[int]]] = {}
    for row in rows:
        completion = _completion(row)
        own = groups.setdefault(completion["step"], {})
        name = _first(row, _GROUP)
        key = str(completion["prompt_text"] if name is None else name)
        place = own.setdefault(key, [len(own), 0])
        steps.setdefault(completion["step"], []).append({**completion, "group": place[0], "index": place[1], "prompt_id": key})
        place[1] += 1
    return steps


def _completion(row: Mapping[str, Any]) -> dict[str, Any]:
    completion, prompt = _first(row, _COMPLETION), _first(row, _PROMPT)
    step = _number(_first(row, _STEP))
    reward = _first(row, _REWARD)
    several = {**(reward if isinstance(reward, Mapping) else {}), **_numbers(row.get("metrics"))}
    several |= {name.removeprefix("rewards/"): value for name, value in row.items() if name.startswith("rewards/")}
    single = _number(reward)
    finish = _first(row, _FINISH)
    truncated = row.get("is_truncated") is True
    fields: dict[str, Any] = {
        "step": 0 if step is None else int(step),
        "prompt_text": _text(prompt),
        "completion_text": _text(completion),
        "reward": single if single is not None else sum(filter(None, map(_number, several.values()))) if several else None,
        "finish": "length" if truncated else _text(finish) or "",
        **{f"rewards/{name}": _number(value) for name, value in several.items()},
    }
    if isinstance(completion, list):
        fields["messages"] = json.dumps(completion, default=str)
    return fields


def _filled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in names} for row in rows]


def _numbers(value: Any) -> dict[str, float]:
    return {str(key): float(n) for key, n in value.items() if isinstance(n, (int, float))} if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _text(value: Any) -> str:
    """Text as it can be stored: lone surrogates as escapes; of messages, what was said, one after the other."""
    if value is None:
        return ""
    if isinstance(value, list):
        value = "\n".join(_text(message.get("content") if isinstance(message, Mapping) else message) for message in value)
    elif isinstance(value, Mapping):
        value = _text(value.get("content") or value.get("text") or json.dumps(value, default=str))
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")
