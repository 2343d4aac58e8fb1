"""Reward functions over completions that exist already: what `groupwise score` does, before any
compute is spent.

N rows   K reward functions
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from groupwise.runs import recorded
from groupwise.runs.folder import Origin, origin_of
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
    """Of the function: a worker process that has to start first does not count."""


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
    source: str = ""
    """Where the rows are from, and which steps of a run."""
    calls: tuple[TimedCall, ...]
    """Every call of every function."""

    def render(self, *, rows: int = 10) -> str:
        """Plain text: per function mean, spread, share of None and histogram; the first `rows`
        rows; the slowest calls.

        Control characters of completions are shown as escapes: what a model wrote must not steer a
        terminal.
        """
        lines = [f"{counted(len(self.rows), 'completion')}{self.source and f' of {self.source}'}"]
        columns = list(zip(self.names, self.rewards.T, strict=True))
        if len(columns) > 1:
            columns.append(("reward (weighted sum)", self.reward))
        for name, column in columns:
            lines += ["", *_summary(name, column)]
        lines += ["", *self._differing()] if self.groups else []
        shown = [
            ("prompt", self.prompts, 24),
            ("gold", self.golds, 16),
            ("completion", self.texts, 60),
        ]
        shown = [(title, cells[:rows], width) for title, cells, width in shown if cells and rows]
        heads = [f"{visible(name, 12):>12}" for name in self.names]
        heads += [title if width > 24 else f"{title:<{width}}" for title, _, width in shown]
        lines += ["", "row  " + "  ".join(heads)] if rows else []
        for n in range(min(rows, len(self.rows))):
            values = [
                f"{'None' if math.isnan(v) else format(v, '.4g'):>12}" for v in self.rewards[n]
            ]
            cells = [
                visible(cells[n], width) if width > 24 else f"{visible(cells[n], width):<{width}}"
                for _, cells, width in shown
            ]
            lines.append(f"{n + 1:<5}" + "  ".join(values + cells))
        slowest = sorted(self.calls, key=lambda call: -call.seconds)[:SLOWEST]
        slow = [self._described(call) for call in slowest if call.seconds >= SLOW]
        return "\n".join([*lines, "", *slow] if slow else lines)

    def _differing(self) -> Iterator[str]:
        """Of how many prompts the completions get different rewards: only these teach."""
        several = [self.reward[begin:end] for begin, end in self.groups if end - begin > 1]
        if not several:
            yield (
                "one completion for each prompt: whether rewards differ within a prompt is not to"
                " be seen"
            )
            return
        differ = sum(len(np.unique(group[~np.isnan(group)])) > 1 for group in several)
        prompts = counted(len(several), "prompt")
        yield (
            f"{differ} of {prompts} with several completions have different rewards; the others"
            " teach nothing"
        )

    def _described(self, call: TimedCall) -> str:
        others = f" and {call.count - 1} more of its prompt" if call.count > 1 else ""
        took = (
            f"slow: {visible(call.function, 60)} took {call.seconds:.2f} s on"
            f" {self.rows[call.row]}{others}"
        )
        return f"{took}: {visible(self.texts[call.row], 60)}"


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
    read, source, further = _rows(expanded(path), steps)
    table = read.renamed(columns or {}).first(limit)
    rows, names = list(table), [table.where(i) for i in range(len(table))]
    for name, row in zip(names, rows, strict=True):
        _check(name, row)
    present = list(dict.fromkeys(column for row in rows for column in row))
    settings = [RewardSettings(function=one) if isinstance(one, str) else one for one in functions]
    rewards, calls = [], list[TimedCall]()
    scorer, present = _built(settings, present, further)
    with scorer:
        groups = _groups(rows)
        for begin, end in groups:
            batch = _completions(rows[begin:end], names[begin:end], present)
            rewards.append(scorer.matrix(scorer.call(batch)))
            calls += [
                TimedCall(name, begin, end - begin, seconds)
                for name, seconds in scorer.seconds.items()
            ]
        matrix = np.concatenate(rewards)
        gold = next(iter(scorer.golds.values()), None)
        return ScoreReport(
            names=scorer.names,
            source=source,
            rewards=matrix,
            reward=combine(matrix, scorer.weights),
            rows=tuple(names),
            texts=tuple(_text(row["completion"]) for row in rows),
            prompts=tuple(_text(row["prompt"]) for row in rows),
            golds=() if gold is None else tuple(str(row.get(gold, "")) for row in rows),
            groups=tuple(groups),
            calls=tuple(calls),
        )


def _built(
    settings: Sequence[RewardSettings], present: list[str], further: Callable[[], list[str]]
) -> tuple[Rewards, list[str]]:
    """The functions, and the columns that they may ask for: those of the rows, else those of the
    run's other rows too.
    """

    def build(columns: list[str]) -> Rewards:
        return build_rewards(settings, columns=[one for one in columns if one not in TOKEN_COLUMNS])

    try:
        return build(present), present
    except ConfigError as error:
        more = list(dict.fromkeys([*present, *further()])) if NO_COLUMN in str(error) else present
        if more == present:
            raise
        return build(more), more


def visible(text: str, width: int) -> str:
    r"""A text on one line, at most `width` characters, control and invisible characters as escapes.

    >>> visible("a\x1b[31mred\n", 20)
    'a\\x1b[31mred\\n'
    """
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: 4 * width]
    )
    return (
        shown
        if len(shown) <= width and len(text) <= 4 * width
        else shown[: max(0, width - 3)] + "..."
    )


def _summary(name: str, column: np.ndarray) -> list[str]:
    values = column[~np.isnan(column)]
    none = f"None {np.isnan(column).mean():.1%}"
    if not values.size:
        return [f"{visible(name, 60)}: {none}"]
    stats = (
        f"mean {values.mean():.4g}, std {values.std():.4g}, min {values.min():.4g}, max"
        f" {values.max():.4g}, {none}"
    )
    distinct = np.unique(values)
    if distinct.size == 1 and values.size > 1:
        return [
            f"{visible(name, 60)}: {values[0]:.4g} for every completion, {none}: it teaches nothing"
            " here"
        ]
    if distinct.size <= 10:
        bins = [(f"{value:.4g}", int((values == value).sum())) for value in distinct]
    else:
        counts, edges = np.histogram(values, bins=10)
        bins = [
            (f"{low:.3g} .. {high:.3g}", int(c))
            for low, high, c in zip(edges, edges[1:], counts, strict=False)
        ]
    width = max(len(label) for label, _ in bins)
    bars = [
        f"  {label:>{width}}  {count:>6}  {'#' * math.ceil(BARS * count / values.size)}"
        for label, count in bins
    ]
    return [f"{visible(name, 60)}: {stats}", *bars]


def _rows(
    path: Path, steps: Sequence[range] | None
) -> tuple[SourceRows, str, Callable[[], list[str]]]:
    """Rows of a file; of a run folder, or of one of its recorded steps, the completions as they
    were sampled.  And what was read, and a way to the columns of the run's other rows.

    Raises ConfigError for steps of what is no run, or that it did not record.
    """
    home = origin_of(path) if path.is_dir() else None
    run = RunFiles(path if home is None else home.folder)
    have, wrong = recorded.steps(run) if path.is_dir() else ({}, [])
    if not have:
        if wrong:
            raise RunError(wrong[0])
        if home is not None:
            raise ConfigError(
                f"{path} is a run without recorded completions: save.rollouts_every says which"
                " steps record theirs"
            )
        if steps is not None:
            raise ConfigError(
                f"--steps are those of a run, and {path} is none that has recorded any"
            )
        rows = read_rows(str(path))
        if not len(rows) or not set(rows[0]) >= RECORDED:
            return rows, str(path), list
        return _recorded(rows), str(path), lambda: _golds_of(origin_of(path))
    chosen = (
        [max(have)]
        if steps is None
        else [step for step in have if any(step in part for part in steps)]
    )
    all_of = f"recorded are {counted(len(have), 'step')} from {min(have)} to {max(have)}"
    if not chosen:
        raise ConfigError(f"{run.folder} has no such step; {all_of}")
    tables = [
        SourceRows(name=str(run.folder / have[step]), rows=recorded.table(run, step).to_pylist())
        for step in chosen
    ]
    rows = [row for table in tables for row in table]
    name = tables[0].name if len(tables) == 1 else str(run.folder / recorded.ROLLOUTS)
    which = (
        f"step {chosen[0]}"
        if len(chosen) == 1
        else f"{len(chosen)} steps from {chosen[0]} to {chosen[-1]}"
    )

    def further() -> list[str]:
        texts = {
            text
            for step in have
            for text in recorded.table(run, step, ["row"]).column("row").unique().to_pylist()
        }
        return [
            *_golds_of(home),
            *dict.fromkeys(column for text in sorted(texts) for column in json.loads(text)),
        ]

    return (
        _recorded(SourceRows(name=name, rows=rows)),
        f"{run.folder}, {which} ({all_of}; --steps chooses)",
        further,
    )


def _golds_of(origin: Origin | None) -> list[str]:
    """The columns that a run's own functions compare with, which the rows that it recorded may all
    lack.
    """
    named = [
        one
        for one in (origin.recipe.rewards if origin is not None else ())
        if one.function in VERDICTS
    ]
    return [str(one.args.get("column", GOLD_COLUMNS[0])) for one in named]


def _recorded(rows: SourceRows) -> SourceRows:
    """A run's record as rows: the data row's columns, and what was asked and answered under the
    usual names.
    """
    named = [
        {
            **json.loads(row["row"]),
            "prompt": _prompt_of(row),
            "completion": row["completion_text"],
            **{column: row[column] for column in ("prompt_ids", "completion_ids")},
            "finish_reason": row["finish"],
        }
        for row in rows
    ]
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
        value = row[column]
        messages = (
            isinstance(value, list)
            and value
            and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in value)
        )
        if not isinstance(value, str) and not messages:
            raise DataError(
                f"{name}: {column!r} is {visible(repr(value), 60)}, expected a string or messages"
                " with a content"
            )


def _text(value: str | list[dict[str, str]]) -> str:
    return value if isinstance(value, str) else value[-1]["content"]


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    starts = [n for n, row in enumerate(rows) if n == 0 or row["prompt"] != rows[n - 1]["prompt"]]
    return list(zip(starts, [*starts[1:], len(rows)], strict=True))


def _completions(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], present: Sequence[str]
) -> Completions:
    texts = [_text(row["completion"]) for row in rows]

    def tokens(column: str) -> list[Any] | None:
        return [row.get(column) for row in rows] if column in present else None

    return Completions(
        labels=names,
        prompts=[row["prompt"] for row in rows],
        prompt_texts=[_text(row["prompt"]) for row in rows],
        completions=[
            as_messages(t) if isinstance(r["prompt"], list) else t
            for t, r in zip(texts, rows, strict=True)
        ],
        texts=texts,
        columns={column: [row.get(column) for row in rows] for column in present},
        prompt_ids=tokens("prompt_ids"),
        completion_ids=tokens("completion_ids"),
        finish_reasons=tokens("finish_reason"),
    )
