"""Files of completions, written by any program: their rows under the names of columns that the
viewer knows.

Whatever is read was written by others, perhaps by a model: it is never executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import DataError
from groupwise.runs.rollout_table import bounded_table
from groupwise.runs.run_files import bounded_json
from groupwise.utils.terminal import logger

LARGEST_STEP = 1 << 53
"""A step of a file is smaller: a larger number is no longer exact in a browser."""
LARGEST_JSONL = 512 << 20
"""Bytes of a JSONL file; it is read as a whole."""
LARGEST_NUMBER = 1e300
"""Size from which on a number is left out."""

Row = dict[str, Any]

NAMES: Mapping[str, tuple[str, ...]] = {
    "completion": (
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
    "prompt": ("prompt_text", "prompt", "question", "input", "instruction", "problem"),
    "reward": ("reward", "score", "rewards", "total_reward"),
    "step": ("step", "global_step", "training_step", "iteration"),
    "group": ("group", "example_id", "group_id", "prompt_id", "uid", "idx"),
    "finish": ("finish", "finish_reason", "stop_reason", "stop_condition", "stop"),
}
"""The names that columns have."""


def completions_by_step(path: Path) -> dict[int, list[Row]]:
    """Read the completions of a Parquet or JSONL file, by step in order.

    Rows that share a prompt (or an example) are a group; they stand side by side.  Raises DataError
    if nothing can be read.
    """
    columns: Row = {}
    groups_of: dict[int, dict[str, list[Row]]] = {}
    for row in _rows_of(path):
        completion = _completion(row)
        columns |= dict.fromkeys(completion)
        key = completion["prompt_text"]
        name = _first(row, "group")
        if name is not None:
            key = _text(name)
        groups = groups_of.setdefault(completion["step"], {})
        groups.setdefault(key, []).append(completion)
    steps: dict[int, list[Row]] = {}
    for step in sorted(groups_of):
        steps[step] = []
        for place, (key, group) in enumerate(groups_of[step].items()):
            for index, completion in enumerate(group):
                where = {"group": place, "index": index, "prompt_id": key}
                steps[step].append(columns | completion | where)
    return steps


def _rows_of(path: Path) -> list[Row]:
    """Read the rows that hold a completion.  Raises DataError if there are none."""
    try:
        rows = _read(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise DataError(f"{path} holds no rows")
    usable = []
    for row in rows:
        if isinstance(row, dict) and _first(row, "completion") is not None:
            usable.append(row)
    if not usable:
        has = "its rows are no JSON objects"
        if isinstance(rows[0], dict):
            has = f"it has {', '.join(rows[0])}"
        raise DataError(
            f"{path} has no column that could be a completion ({', '.join(NAMES['completion'])});"
            f" {has}"
        )
    lost = len(rows) - len(usable)
    if lost:
        logger(__name__).warning(
            "%s: %d of %d rows hold no completion, and are left out", path, lost, len(rows)
        )
    return usable


def _read(path: Path) -> list[Any]:
    """Raises OSError, ValueError, DataError."""
    ending = path.suffix.lower()
    if ending == ".parquet":
        return bounded_table(path.read_bytes()).to_pylist()
    if path.stat().st_size > LARGEST_JSONL:
        raise DataError(
            f"{path} has {path.stat().st_size >> 20} MiB: convert it to Parquet, or cut it to"
            f" {LARGEST_JSONL >> 20}"
        )
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    return _read_json(path, text) if ending == ".json" else _read_lines(path, text)


def _read_json(path: Path, text: str) -> list[Any]:
    try:
        data = bounded_json(text)
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    if isinstance(data, dict):
        data = data.get("rows") or data.get("results") or data
    return data if isinstance(data, list) else [data]


def _read_lines(path: Path, text: str) -> list[Any]:
    rows = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                rows.append(bounded_json(line))
        except ValueError as error:
            if number < len(lines):  # the last line may be one that is being written
                raise DataError(f"{path}:{number}: no JSON: {error}") from error
    return rows


def _first(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column under the first of its names that a row has."""
    for name in NAMES[column]:
        if row.get(name) is not None:
            return row[name]
    return None


def _completion(row: Mapping[str, Any]) -> Row:
    """Return a row under the names of our columns."""
    completion = _first(row, "completion")
    rewards = _rewards(row)
    reward = number_of(_first(row, "reward"))
    if reward is None and rewards:
        reward = sum(filter(None, rewards.values()))
    finish = _text(_first(row, "finish"))
    if row.get("is_truncated") is True:
        finish = "length"
    fields: Row = {
        "step": _step(_first(row, "step")),
        "prompt_text": _text(_first(row, "prompt")),
        "completion_text": _text(completion),
        "reward": reward,
        "finish": finish,
        **rewards,
    }
    if isinstance(completion, list):
        fields["messages"] = json.dumps(completion, default=str)
    return fields


def _rewards(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of the reward functions by column."""
    rewards: Row = {}
    reward, metrics = _first(row, "reward"), row.get("metrics")
    if isinstance(reward, Mapping):
        rewards |= reward
    if isinstance(metrics, Mapping):
        rewards |= {name: one for name, one in metrics.items() if number_of(one) is not None}
    for name, value in row.items():
        if name.startswith("rewards/"):
            rewards[name.removeprefix("rewards/")] = value
    return {f"rewards/{_text(name)}": number_of(value) for name, value in rewards.items()}


def _step(value: Any) -> int:
    """Return the number of a step; 0 where there is none.  Raises DataError for one beyond 2^53."""
    if isinstance(value, int | float) and abs(value) >= LARGEST_STEP:
        raise DataError(f"a step is a whole number below 2^53, got {value!r}: correct the file")
    return int(number_of(value) or 0)


def number_of(value: Any) -> float | None:
    """Return a value as a number; None for what is none, or too large."""
    if isinstance(value, (int, float)) and abs(value) < LARGEST_NUMBER:
        return float(value)
    return None


def _text(value: Any) -> str:
    """Return text as it can be stored: lone surrogates as escapes.

    Messages are what was said, one after the other.
    """
    if value is None:
        return ""
    if isinstance(value, list):
        value = "\n".join(_contents(value))
    elif isinstance(value, Mapping):
        value = _text(value.get("content") or value.get("text") or json.dumps(value, default=str))
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def _contents(messages: Iterable[Any]) -> list[str]:
    texts = []
    for message in messages:
        content = message
        if isinstance(message, Mapping):
            content = message.get("content")
        texts.append(_text(content))
    return texts
