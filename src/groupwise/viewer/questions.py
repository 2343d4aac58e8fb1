"""Questions about a run: which completions hold a text, whether the reward is being hacked, how two
steps differ.

Every answer names completions by step, group and index, so that whatever is claimed is one click
away from what was written."""

from __future__ import annotations

import re
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from groupwise.errors import DataError
from groupwise.rewards.registry import GOLD_COLUMNS
from groupwise.viewer.comparison import pair, verdict
from groupwise.viewer.groups import (
    PROMPT,
    Json,
    excerpt,
    groups_in,
    key_of,
    lengths_of,
    loaded,
    mean,
    numbers,
    plain,
    prompt_of,
    prompts_in,
    reward_names,
)
from groupwise.viewer.index import Entry, Index
from groupwise.viewer.sources import HELD_OUT, TRAINING, CompletionSource

SEARCH_SECONDS = 0.15
"""Seconds of a search's one answer; where they do not suffice, it says where to go on."""
PAGE = 60
"""Completions of an answer."""
STEPS = 12
"""Steps of a stretch whose completions are looked at."""
SCATTER = 2000
"""Completions of a picture."""
READ = 600
"""Characters of a completion in which repetitions are counted."""
AROUND = 80
"""Characters on each side of what is looked for."""

_WORD = re.compile(r"\w+|[^\w\s]")


# ---------------------------------------------------------------- search


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchQuery:
    """What a search looks for; what is left empty matches everything."""

    text: str = ""
    """Part of a completion, in upper or lower case."""
    prompt: str = ""
    """Part of its prompt."""
    function: str = ""
    """The reward function that `low` and `high` are about; empty: the combined reward."""
    low: float | None = None
    high: float | None = None
    finish: str = ""
    first: int | None = None
    """First and last step."""
    last: int | None = None
    kind: str = TRAINING

    @property
    def ranged(self) -> bool:
        """True if rewards outside of a range are left out."""
        return self.low is not None or self.high is not None


def search(
    source: CompletionSource,
    index: Index,
    query: SearchQuery,
    *,
    cursor: int | None = None,
    seconds: float = SEARCH_SECONDS,
) -> Json:
    """Completions that match a query, newest step first; whole steps at a time.

    cursor: the step to go on with.   `next`: the same for the next call, None at the end.   `seen`
        counts the steps looked at."""
    steps = []
    for step in reversed(source.steps(query.kind)):
        if _between(step, query.first, query.last) and (cursor is None or step <= cursor):
            steps.append(step)
    began = time.monotonic()
    matches: list[Json] = []
    for seen, step in enumerate(steps):
        spent = time.monotonic() - began
        if seen and (len(matches) >= PAGE or spent > seconds):
            return {"matches": matches, "next": step, "seen": seen, "left": len(steps) - seen}
        entry = index.entry(step) if query.kind == TRAINING else None
        if entry is None or _can_match(entry, query):
            matches += _matches(source, step, query)
    return {"matches": matches, "next": None, "seen": len(steps), "left": 0}


def _between(step: int, first: int | None, last: int | None) -> bool:
    return (first is None or step >= first) and (last is None or step <= last)


def _can_match(entry: Entry, query: SearchQuery) -> bool:
    """Return whether a step may hold what a query looks for, by what the index knows of it."""
    if query.finish and query.finish not in entry.finish:
        return False
    if query.function or not query.ranged:
        return True
    return bool(_within(entry.reward, query.low, query.high).any())


def _matches(source: CompletionSource, step: int, query: SearchQuery) -> list[Json]:
    graded = f"rewards/{query.function}" if query.function else "reward"
    names = {"group", "index", *PROMPT, "completion_text", "reward", "finish", "trained", "row"}
    try:
        table = source.table(step, sorted(names | {graded}), query.kind)
    except DataError:
        return []
    chosen = np.ones(len(table), bool)
    if query.ranged:
        chosen &= _within(numbers(table, graded), query.low, query.high)
    if query.finish:
        finish = table.column("finish").to_pylist()
        chosen &= np.array([value == query.finish for value in finish], bool)
    if query.text and chosen.any():
        chosen &= _holds(table.column("completion_text"), query.text)
    if query.prompt and chosen.any():
        chosen &= _holds(prompts_in(table), query.prompt)
    places = np.flatnonzero(chosen)
    rows = table.take(pa.array(places, pa.int64())).to_pylist()
    lengths, values = lengths_of(table)[places], plain(numbers(table, graded)[places])
    rewards = plain(numbers(table, "reward")[places])
    matches = []
    for n, row in enumerate(rows):
        text = row["completion_text"] or ""
        match = {
            "step": step,
            "group": row["group"],
            "index": row["index"],
            "reward": rewards[n],
            "value": values[n],
            "finish": row.get("finish") or "",
            "length": int(lengths[n]),
            "excerpt": _around(text, query.text),
            "digest": zlib.crc32(text.encode("utf-8", "surrogatepass")),  # equal texts are one row
            "prompt": excerpt(prompt_of(row).text),
            "answer": _gold(row.get("row")),
        }
        matches.append(match)
    return matches


def _holds(texts: pa.ChunkedArray | pa.Array, wanted: str) -> np.ndarray:
    """Return where a text holds `wanted`, in upper or lower case; a text that is null does not."""
    hits = pc.match_substring(texts, wanted, ignore_case=True)  # type: ignore[attr-defined]
    return np.array(pc.fill_null(hits, False).to_pylist(), bool)  # type: ignore[attr-defined]


def _gold(row: str | None) -> str:
    """The answer in a row of the data; empty where it has none."""
    columns = loaded(row)
    if not isinstance(columns, dict):
        return ""
    for name in GOLD_COLUMNS:
        if columns.get(name) is not None:
            return excerpt(str(columns[name]))
    return ""


def _within(values: np.ndarray, low: float | None, high: float | None) -> np.ndarray:
    least = -np.inf if low is None else low - 1e-9
    most = np.inf if high is None else high + 1e-9
    return (values >= least) & (values <= most)


def _around(text: str, wanted: str) -> str:
    place = max(text.lower().find(wanted.lower()), 0) if wanted else 0
    begin = max(0, place - AROUND)
    end = begin + 2 * AROUND + len(wanted)
    return ("\u2026" if begin else "") + text[begin:end] + ("\u2026" if end < len(text) else "")


# ---------------------------------------------------------------- signs of reward hacking


def lenses(source: CompletionSource, first: int, last: int) -> Json:
    """Signs of reward hacking over a stretch of steps.

    `points`: reward, length, repetition and every function of a sample of completions, with their
    places. `conflicts`: pairs of functions of which one is satisfied (above its middle) where the
    other is not, and where. `duplicates`: groups with the fewest different answers.
    `correlations` of the reward.
    """
    steps = [step for step in source.steps() if first <= step <= last]
    if not steps:
        raise DataError(f"no completions of steps {first} to {last} are recorded")
    spread_out = np.linspace(0, len(steps) - 1, min(len(steps), STEPS)).astype(int)
    chosen = [steps[i] for i in np.unique(spread_out)]
    tables = []
    for step in chosen:
        with suppress(DataError):
            table = source.table(
                step,
                ("group", "index", "completion_text", "reward", "finish", "trained", "rewards/"),
            )
            table = table.slice(0, SCATTER // len(chosen))
            tables.append(table.append_column("at", pa.array([step] * len(table))))
    if not tables:
        raise DataError(f"no completions of steps {first} to {last} can be read")
    table = pa.concat_tables(tables, promote_options="permissive")
    texts = [text or "" for text in table.column("completion_text").to_pylist()]
    reward, length = numbers(table, "reward"), lengths_of(table).astype(float)
    repeated = np.array([repetition(text) for text in texts])
    functions = {}
    for name in reward_names(table.column_names):
        functions[name] = numbers(table, f"rewards/{name}")
    place = {name: numbers(table, name).astype(int) for name in ("at", "group", "index")}
    points = {
        "step": place["at"].tolist(),
        "group": place["group"].tolist(),
        "index": place["index"].tolist(),
        "reward": plain(reward),
        "length": length.tolist(),
        "repetition": [round(float(value), 3) for value in repeated],
        "functions": {name: plain(values) for name, values in functions.items()},
    }
    columns = {"length": length, "repetition": repeated, **functions}
    return {
        "first": chosen[0],
        "last": chosen[-1],
        "points": points,
        "correlations": {name: correlation(values, reward) for name, values in columns.items()},
        "conflicts": _conflicts(functions, place),
        "duplicates": _duplicates(place, texts, reward),
        "unit": "tokens" if "trained" in table.column_names else "characters",
    }


def correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's, over what is known; None where one of them is constant."""
    known = np.isfinite(x) & np.isfinite(y)
    if known.sum() < 3 or x[known].std() == 0.0 or y[known].std() == 0.0:
        return None
    return float(np.corrcoef(x[known], y[known])[0, 1])


def repetition(text: str) -> float:
    """Share of a text's three-word sequences that stand in it more than once already.

    >>> repetition("one two three four"), repetition("no no no no no no")
    (0.0, 0.75)
    """
    words = _WORD.findall(text[:READ])
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return 1.0 - len(set(triples)) / len(triples) if triples else 0.0


def _conflicts(functions: dict[str, np.ndarray], place: dict[str, np.ndarray]) -> list[Json]:
    """Find pairs of functions of which one is satisfied where the other is not."""
    conflicts = []
    for high, low in permutations(functions, 2):
        values, against = functions[high], functions[low]
        if not np.isfinite(values).any() or not np.isfinite(against).any():
            continue
        here = (values > _middle(values)) & (against <= _middle(against))
        if not here.any():
            continue
        places = []
        for i in np.flatnonzero(here)[:5]:
            places.append([int(place[key][i]) for key in ("at", "group", "index")])
        share = float(here.mean())
        conflicts.append({"high": high, "low": low, "share": share, "places": places})
    return sorted(conflicts, key=lambda conflict: -conflict["share"])[:12]


def _middle(values: np.ndarray) -> float:
    return float((np.nanmin(values) + np.nanmax(values)) / 2)


def _duplicates(
    place: dict[str, np.ndarray], texts: Sequence[str], reward: np.ndarray
) -> list[Json]:
    groups: dict[tuple[int, int], list[int]] = {}
    for i, key in enumerate(zip(place["at"].tolist(), place["group"].tolist(), strict=True)):
        groups.setdefault(key, []).append(i)
    duplicates = []
    for (step, group), rows in groups.items():
        different = len({texts[i] for i in rows})
        if len(rows) > 1 and different < len(rows):
            shares = {"distinct": different, "size": len(rows), "reward": mean(reward[rows])}
            duplicates.append({"step": step, "group": group, **shares})
    return sorted(
        duplicates, key=lambda group: (group["distinct"] / group["size"], -group["step"])
    )[:12]


# ---------------------------------------------------------------- two steps side by side


def compare(
    left: tuple[CompletionSource, int], right: tuple[CompletionSource, int], kind: str = TRAINING
) -> Json:
    """Pair the groups of two steps (of one run or of two) by their prompt.

    `pairs`: the one whose mean reward moved most first.   `difference`: sentences about the mean
        reward of both sides on the shared prompts; none where no prompt has a reward on both sides.
    """
    lefts, rights = (_groups_of(source, step, kind) for source, step in (left, right))
    pairs = []
    for key, group in lefts.items():
        if key in rights:
            pair = {"key": key, "prompt": group["prompt"], "left": group, "right": rights[key]}
            pairs.append(pair)
    pairs.sort(key=_moved, reverse=True)
    return {
        "pairs": pairs,
        "left": len(lefts),
        "right": len(rights),
        "difference": _difference(
            lefts,
            rights,
            (left[1], right[1]),
            held_out=kind == HELD_OUT,
            same_run=left[0] is right[0],
        ),
    }


def _moved(pair: Json) -> float:
    """Return by how much a prompt's mean reward differs; 0 where it is not known."""
    return abs((pair["right"]["mean"] or 0.0) - (pair["left"]["mean"] or 0.0))


def _difference(
    lefts: dict[str, Json],
    rights: dict[str, Json],
    steps: tuple[int, int],
    *,
    held_out: bool,
    same_run: bool,
) -> list[str]:
    """Say what the mean rewards of the prompts that both sides answered show."""
    known = []
    for side in (lefts, rights):
        means = {key: group["mean"] for key, group in side.items() if group["mean"] is not None}
        known.append(means)
    left, right = known
    paired = pair([left], [right], steps, held_out=held_out, same_run=same_run)
    return [] if paired is None else verdict(paired, "Left", "Right")


def _groups_of(source: CompletionSource, step: int, kind: str) -> dict[str, Json]:
    table = source.table(step, ("group", *PROMPT, "reward"), kind)
    reward = numbers(table, "reward")
    groups = {}
    for group, rows, prompt in groups_in(table):
        groups[key_of(prompt)] = {
            "group": group,
            "prompt": excerpt(prompt),
            "mean": mean(reward[rows]),
            "rewards": plain(reward[rows]),
        }
    return groups


def shared_steps(index: Index, step: int) -> list[Any]:
    """Other steps that saw prompts of this one, and how many: those worth comparing it with."""
    entry = index.entry(step)
    if entry is None:
        return []
    count: Counter[int] = Counter()
    for key in entry.prompts.values():
        for visit, _, _ in index.visits(key):
            count[visit] += 1
    del count[step]
    pairs = [[visit, times] for visit, times in count.most_common(12)]
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
