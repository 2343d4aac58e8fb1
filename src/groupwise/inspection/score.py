"""`groupwise score`: run reward functions over completions that exist, before compute is spent.

N rows   K reward functions
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from groupwise.config.settings import VERDICTS, RewardSettings
from groupwise.data.sources import SourceRows, read_rows
from groupwise.errors import ConfigError, DataError, RunError
from groupwise.rewards.completions import as_messages
from groupwise.rewards.compose import Rewards, build_rewards, combine
from groupwise.rewards.registry import GOLD_COLUMNS
from groupwise.rewards.user_functions import NO_COLUMN, Completions
from groupwise.runs import rollout_files
from groupwise.runs.origin import Origin, origin_of
from groupwise.runs.run_files import RunFiles
from groupwise.utils.files import expanded
from groupwise.utils.spelling import counted

TOKEN_COLUMNS = ("prompt_ids", "completion_ids", "finish_reason")
"""Columns of recorded runs that functions are given beside those of the data (the last as
`finish_reasons`).
"""
RECORDED = {"prompt_text", "completion_text", "row", "finish"}
"""Columns by which a recorded step is known."""
BARS = 40
"""Width of a histogram in characters."""
SLOWEST = 3
"""Calls that are named because they took long ..."""
SLOW = 0.01
"""... if they took so many seconds."""


class TimedCall(NamedTuple):
    """One call of a function; rows of one prompt, side by side in the file, are one call."""

    function: str
    row: int
    """The first of its rows."""
    count: int
    seconds: float
    """Seconds of the function: a worker process that has to start first does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreReport:
    """What the functions said of each row."""

    names: tuple[str, ...]
    """K."""
    rewards: np.ndarray
    """float64 (N, K), NaN where a function says None."""
    reward: np.ndarray
    """float64 (N,): the weighted sum."""
    rows: tuple[str, ...]
    """N names of the rows, as `file:row`."""
    texts: tuple[str, ...]
    """N completions."""
    prompts: tuple[str, ...] = ()
    """N prompts, the last message of each."""
    golds: tuple[str, ...] = ()
    """N gold answers, where a function compares with one."""
    groups: tuple[tuple[int, int], ...] = ()
    """First row, and row behind the last, of neighbours with one prompt."""
    source: str
    """Where the rows are from, and which steps of a run."""
    calls: tuple[TimedCall, ...]
    """Every call of every function."""

    def render(self, *, rows: int = 10) -> str:
        """Write plain text: a summary and a histogram of each function, the first `rows` rows, and
        the slowest calls.

        Control characters of completions are shown as escapes: what a model wrote must not steer a
        terminal.
        """
        lines = [f"{counted(len(self.rows), 'completion')} of {self.source}"]
        for name, column in zip(self.names, self.rewards.T, strict=True):
            lines += ["", *_summary(name, column)]
        if len(self.names) > 1:
            lines += ["", *_summary("reward (weighted sum)", self.reward)]
        if self.groups:
            lines += ["", self._differing()]
        if rows:
            lines += ["", *self._table(rows)]
        slow = self._slow()
        if slow:
            lines += ["", *slow]
        return "\n".join(lines)

    def _table(self, rows: int) -> list[str]:
        """Write the first rows: their rewards, and as much of their texts as has room."""
        texts: list[tuple[str, Sequence[str], int]] = []
        if self.prompts:
            texts.append(("prompt", self.prompts, 24))
        if self.golds:
            texts.append(("gold", self.golds, 16))
        texts.append(("completion", self.texts, 60))
        head = [f"{visible(name, 12):>12}" for name in self.names]
        head += [title.ljust(_least(width)) for title, _, width in texts]
        lines = ["row  " + "  ".join(head)]
        for n in range(min(rows, len(self.rows))):
            cells = []
            for value in self.rewards[n]:
                cells.append("None".rjust(12) if math.isnan(value) else f"{value:>12.4g}")
            for _, column, width in texts:
                cells.append(visible(column[n], width).ljust(_least(width)))
            lines.append(f"{n + 1:<5}" + "  ".join(cells))
        return lines

    def _differing(self) -> str:
        """Say for how many prompts the completions get different rewards: only these teach."""
        several = differ = 0
        for begin, end in self.groups:
            if end - begin > 1:
                several += 1
                reward = self.reward[begin:end]
                if len(np.unique(reward[~np.isnan(reward)])) > 1:
                    differ += 1
        if not several:
            return (
                "one completion for each prompt: whether rewards differ within a prompt is not to"
                " be seen"
            )
        return (
            f"{differ} of {counted(several, 'prompt')} with several completions have"
            " different rewards; the others teach nothing"
        )

    def _slow(self) -> list[str]:
        """Name the slowest calls."""
        lines = []
        for call in sorted(self.calls, key=_negative_seconds)[:SLOWEST]:
            if call.seconds < SLOW:
                break
            name, text = visible(call.function, 60), visible(self.texts[call.row], 60)
            rows = self.rows[call.row]
            if call.count > 1:
                rows += f" and {call.count - 1} more of its prompt"
            lines.append(f"slow: {name} took {call.seconds:.2f} s on {rows}: {text}")
        return lines


def _least(width: int) -> int:
    """Return the width that a column is filled up to: long texts are not."""
    return width if width <= 24 else 0


def _negative_seconds(call: TimedCall) -> float:
    return -call.seconds


def score_file(
    functions: Sequence[str | RewardSettings],
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    steps: Sequence[range] | None = None,
) -> ScoreReport:
    """Run reward functions, by name or with their settings, over the rows of a JSONL, JSON or
    Parquet file, or over the completions that a run recorded (its folder: the newest step, or those
    in `steps`; or one of its `rollouts/*.parquet`).

    A row has `prompt` (a string or messages), `completion` (a string or one assistant message) and
    the columns that the functions ask for; `columns` renames them, ours: theirs.  Columns
    `prompt_ids`, `completion_ids` and `finish_reason` are passed on under the names that functions
    know.  Neighbouring rows with the same prompt are scored in one call, like a group in training.

    Raises DataError for a bad file or row, ConfigError for functions that the columns cannot serve,
    RewardError for bad results."""
    completions = _read(expanded(path), steps)
    table = completions.rows.renamed(columns or {}).first(limit)
    rows = list(table)
    names = [table.where(i) for i in range(len(table))]
    for name, row in zip(names, rows, strict=True):
        _check(name, row)
    present: dict[str, None] = {}
    for row in rows:
        present |= dict.fromkeys(row)
    settings = [RewardSettings(function=one) if isinstance(one, str) else one for one in functions]
    scorer, known = _built(settings, list(present), completions)
    groups = _groups(rows)
    rewards: list[np.ndarray] = []
    calls: list[TimedCall] = []
    with scorer:
        for begin, end in groups:
            batch = _completions(rows[begin:end], names[begin:end], known)
            rewards.append(scorer.matrix(scorer.call(batch)))
            for name, seconds in scorer.seconds.items():
                calls.append(TimedCall(name, begin, end - begin, seconds))
        matrix = np.concatenate(rewards)
        gold = next(iter(scorer.golds.values()), None)
        golds = []
        if gold is not None:
            golds = [str(row.get(gold, "")) for row in rows]
        return ScoreReport(
            names=scorer.names,
            source=completions.source,
            rewards=matrix,
            reward=combine(matrix, scorer.weights),
            rows=tuple(names),
            texts=tuple(_text(row["completion"]) for row in rows),
            prompts=tuple(_text(row["prompt"]) for row in rows),
            golds=tuple(golds),
            groups=tuple(groups),
            calls=tuple(calls),
        )


def _built(
    settings: Sequence[RewardSettings], present: list[str], completions: ReadCompletions
) -> tuple[Rewards, list[str]]:
    """Build the functions, and return the columns that they may ask for.

    Those are the rows' columns, and where they do not suffice those of the run's other rows too.
    """
    try:
        return _build(settings, present), present
    except ConfigError as error:
        if NO_COLUMN not in str(error):
            raise
        known = list(dict.fromkeys([*present, *completions.further_columns()]))
        if known == present:
            raise
        return _build(settings, known), known


def _build(settings: Sequence[RewardSettings], columns: list[str]) -> Rewards:
    return build_rewards(settings, columns=[one for one in columns if one not in TOKEN_COLUMNS])


def visible(text: str, width: int) -> str:
    r"""A text on one line, at most `width` characters, control and invisible characters as escapes.

    >>> visible("a\x1b[31mred\n", 20)
    'a\\x1b[31mred\\n'
    """
    shown = ""
    for character in text[: width + 1]:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        shown += character
    if len(shown) > width:
        shown = shown[: width - 3] + "..."
    return shown


def _summary(name: str, column: np.ndarray) -> list[str]:
    """Summarise a function's rewards in a line and a histogram."""
    title = visible(name, 60)
    values = column[~np.isnan(column)]
    none = f"None {np.isnan(column).mean():.1%}"
    if not values.size:
        return [f"{title}: {none}"]
    distinct = np.unique(values)
    if distinct.size == 1 and values.size > 1:
        return [f"{title}: {values[0]:.4g} for every completion, {none}: it teaches nothing here"]
    lines = [
        f"{title}: mean {values.mean():.4g}, std {values.std():.4g}, min {values.min():.4g}, max"
        f" {values.max():.4g}, {none}"
    ]
    bins = _bins(values)
    width = max(len(label) for label, _ in bins)
    for label, count in bins:
        bar = "#" * math.ceil(BARS * count / values.size)
        lines.append(f"  {label:>{width}}  {count:>6}  {bar}")
    return lines


def _bins(values: np.ndarray) -> list[tuple[str, int]]:
    """Count values: each of at most ten different ones, else in ten ranges."""
    distinct, counts = np.unique(values, return_counts=True)
    bins = []
    if distinct.size <= 10:
        for value, count in zip(distinct, counts, strict=True):
            bins.append((f"{value:.4g}", int(count)))
        return bins
    counts, edges = np.histogram(values, bins=10)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bins.append((f"{low:.3g} .. {high:.3g}", int(count)))
    return bins


@dataclass(frozen=True, slots=True)
class ReadCompletions:
    """Completions of a file or a run."""

    rows: SourceRows
    source: str
    """Names what was read."""
    origin: Origin | None = None
    """The run that the rows are of."""
    run: RunFiles | None = None
    """The run's files, where the rows are some of its recorded steps."""

    def further_columns(self) -> list[str]:
        """Return columns that the run's rows may have, although those that were read lack them."""
        columns = _golds_of(self.origin)
        if self.run is None:
            return columns
        texts: set[str] = set()
        for step in rollout_files.steps(self.run)[0]:
            texts |= set(rollout_files.table(self.run, step, ["row"]).column("row").to_pylist())
        for text in sorted(texts):
            columns += json.loads(text)
        return list(dict.fromkeys(columns))


def _read(path: Path, steps: Sequence[range] | None) -> ReadCompletions:
    """Read the rows of a file; of a run folder, or of one of its recorded steps, the completions as
    they were sampled.

    Raises ConfigError for steps of what is no run, or that it did not record.
    """
    if not path.is_dir():
        return _read_file(path, steps)
    home = origin_of(path)
    run = RunFiles(path if home is None else home.folder)
    have, wrong = rollout_files.steps(run)
    if not have and wrong:
        raise RunError(wrong[0])
    if not have and home is not None:
        raise ConfigError(
            f"{path} is a run without recorded completions: save.rollouts_every says which steps"
            " record theirs"
        )
    if not have:
        return _read_file(path, steps)
    chosen = [max(have)]
    if steps is not None:
        chosen = [step for step in have if _in_any(step, steps)]
    span = f"recorded are {counted(len(have), 'step')} from {min(have)} to {max(have)}"
    if not chosen:
        raise ConfigError(f"{run.folder} has no such step; {span}")
    rows: list[Any] = []
    for step in chosen:
        table = SourceRows(
            name=str(run.folder / have[step]), rows=rollout_files.table(run, step).to_pylist()
        )
        rows += list(table)
    name, which = str(run.folder / have[chosen[0]]), f"step {chosen[0]}"
    if len(chosen) > 1:
        name = str(run.folder / rollout_files.ROLLOUTS)
        which = f"{len(chosen)} steps from {chosen[0]} to {chosen[-1]}"
    return ReadCompletions(
        _recorded(SourceRows(name=name, rows=rows)),
        f"{run.folder}, {which} ({span}; --steps chooses)",
        home,
        run,
    )


def _in_any(step: int, parts: Sequence[range]) -> bool:
    return any(step in part for part in parts)


def _read_file(path: Path, steps: Sequence[range] | None) -> ReadCompletions:
    if steps is not None:
        raise ConfigError(f"--steps are those of a run, and {path} is none that has recorded any")
    rows = read_rows(str(path))
    if not len(rows) or not set(rows[0]) >= RECORDED:
        return ReadCompletions(rows, str(path))
    return ReadCompletions(_recorded(rows), str(path), origin_of(path))


def _golds_of(origin: Origin | None) -> list[str]:
    """Name the columns that a run's own functions compare with.

    The rows that it recorded may all lack them.
    """
    if origin is None:
        return []
    columns = []
    for one in origin.recipe.rewards:
        if one.function in VERDICTS:
            columns.append(str(one.args.get("column", GOLD_COLUMNS[0])))
    return columns


def _recorded(rows: SourceRows) -> SourceRows:
    """Turn a run's record into rows of data: the columns of the data row, and what was asked and
    answered under the usual names.
    """
    named = []
    for row in rows:
        data = json.loads(row["row"])
        data |= {"prompt": _prompt_of(row), "completion": row["completion_text"]}
        data |= {"prompt_ids": row["prompt_ids"], "completion_ids": row["completion_ids"]}
        data["finish_reason"] = row["finish"]
        named.append(data)
    return replace(rows, rows=named)


def _prompt_of(row: Mapping[str, Any]) -> Any:
    """The prompt as the run's reward functions saw it; of a record without its messages, what
    stands in the data row.
    """
    if row.get("prompt_messages") is None:
        return json.loads(row["row"]).get("prompt", row["prompt_text"])
    messages = json.loads(row["prompt_messages"])
    return messages[-1]["content"] if row.get("prompt_wrapped") else messages


def _check(name: str, row: Any) -> None:
    """Raise DataError for a row that cannot be scored."""
    if not isinstance(row, dict):
        raise DataError(
            f"{name}: a row is an object with prompt and completion, not a {type(row).__name__}"
        )
    for column in ("prompt", "completion"):
        if column not in row:
            raise DataError(
                f"{name}: no {column!r}; columns: {', '.join(map(repr, row))}; name yours by"
                f" --column {column}=YOURS"
            )
        if not isinstance(row[column], str) and not _is_messages(row[column]):
            raise DataError(
                f"{name}: {column!r} is {visible(repr(row[column]), 60)}, expected a string or"
                " messages with a content"
            )


def _is_messages(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(message, dict) and isinstance(message.get("content"), str) for message in value
    )


def _text(value: str | list[dict[str, str]]) -> str:
    return value if isinstance(value, str) else value[-1]["content"]


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the first row, and the row behind the last, of neighbours with one prompt."""
    starts = []
    for n, row in enumerate(rows):
        if n == 0 or row["prompt"] != rows[n - 1]["prompt"]:
            starts.append(n)
    return list(zip(starts, [*starts[1:], len(rows)], strict=True))


def _completions(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], present: Sequence[str]
) -> Completions:
    """Make the batch of a group, as reward functions get it."""
    columns: dict[str, list[Any]] = {}
    for column in present:
        columns[column] = [row.get(column) for row in rows]
    texts = [_text(row["completion"]) for row in rows]
    completions: list[Any] = []
    for row, text in zip(rows, texts, strict=True):
        chat = isinstance(row["prompt"], list)
        completions.append(as_messages(text) if chat else text)
    return Completions(
        labels=names,
        prompts=[row["prompt"] for row in rows],
        prompt_texts=[_text(row["prompt"]) for row in rows],
        completions=completions,
        texts=texts,
        columns=columns,
        prompt_ids=columns.get("prompt_ids"),
        completion_ids=columns.get("completion_ids"),
        finish_reasons=columns.get("finish_reason"),
    )
