"""Questions about a run: which completions hold a text, why the reward moved, whether it is being hacked, how two steps differ.

Every answer names completions by step, group and index, so that whatever is claimed is one click away from what was written.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from groupwise.data.vocabulary import Vocabulary
from groupwise.errors import DataError
from groupwise.rewards.registry import GOLD_COLUMNS
from groupwise.viewer.groups import Json, excerpt, key_of, lengths_of, loaded, mean, numbers, plain, reward_names
from groupwise.viewer.index import Index
from groupwise.viewer.sources import TRAINING, CompletionSource

BUDGET = 0.15
"""Seconds of a search's one answer; where they do not suffice, it says where to go on."""
PAGE = 60
"""Completions of an answer."""
SAMPLE = 300
"""Completions that a comparison of two stretches reads of each."""
SCATTER = 2000
"""Completions of a picture."""
READ = 600
"""Characters of a completion in which phrases are counted."""
MOST_PHRASES = 2000
"""Phrases whose relation to the reward is computed, the most frequent first."""
AROUND = 80
"""Characters on each side of what was found."""

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
    source: CompletionSource, index: Index, query: SearchQuery, *, cursor: int | None = None, budget: float = BUDGET
) -> Json:
    """Completions that match a query, newest step first; whole steps at a time.

    cursor: the step to go on with.   `next`: the same for the next call, None at the end.   `seen` counts the steps looked at.
    """
    steps = [
        step
        for step in reversed(source.steps(query.kind))
        if (query.first is None or step >= query.first)
        and (query.last is None or step <= query.last)
        and (cursor is None or step <= cursor)
    ]
    began, found, seen = time.monotonic(), [], 0
    for step in steps:
        if seen and (len(found) >= PAGE or time.monotonic() - began > budget):
            return {"found": found, "next": step, "seen": seen, "left": len(steps) - seen}
        seen += 1
        entry = index.entry(step) if query.kind == TRAINING else None
        if entry is not None:
            if query.finish and query.finish not in entry.finish:
                continue
            if not query.function and query.ranged and not _within(entry.reward, query.low, query.high).any():
                continue
        found += _matches(source, step, query)
    return {"found": found, "next": None, "seen": seen, "left": 0}


def _matches(source: CompletionSource, step: int, query: SearchQuery) -> list[Json]:
    judged = f"rewards/{query.function}" if query.function else "reward"
    names = {"group", "index", "prompt_text", "completion_text", "reward", "finish", "trained", "row", judged}
    try:
        table = source.table(step, sorted(names), query.kind)
    except DataError:
        return []
    kept = np.ones(len(table), bool)
    if query.ranged:
        kept &= _within(numbers(table, judged), query.low, query.high)
    if query.finish:
        kept &= np.array([value == query.finish for value in table.column("finish").to_pylist()], bool)
    for wanted, name in ((query.text, "completion_text"), (query.prompt, "prompt_text")):
        if wanted and kept.any():
            hit = pc.match_substring(table.column(name), wanted, ignore_case=True)  # type: ignore[attr-defined]
            kept &= np.array(hit.to_pylist(), dtype=object) == True  # noqa: E712 - null is not a hit
    places = np.flatnonzero(kept)
    if not places.size:
        return []
    rows = table.take(pa.array(places)).to_pylist()
    lengths, values = lengths_of(table)[places], plain(numbers(table, judged)[places])
    return [
        {
            "step": step,
            "group": row["group"],
            "index": row["index"],
            "reward": plain(np.array([row["reward"]], float))[0],
            "value": value,
            "finish": row.get("finish") or "",
            "length": int(length),
            "excerpt": _around(row["completion_text"] or "", query.text),
            "prompt": excerpt(row["prompt_text"] or ""),
            "answer": _gold(row.get("row")),
        }
        for row, value, length in zip(rows, values, lengths, strict=True)
    ]


def _gold(row: str | None) -> str:
    """The answer in a row of the data; empty where it has none."""
    columns = loaded(row)
    if not isinstance(columns, dict):
        return ""
    return next((excerpt(str(columns[name])) for name in GOLD_COLUMNS if columns.get(name) is not None), "")


def _within(values: np.ndarray, low: float | None, high: float | None) -> np.ndarray:
    return (values >= (-np.inf if low is None else low - 1e-9)) & (values <= (np.inf if high is None else high + 1e-9))


def _around(text: str, wanted: str) -> str:
    place = max(text.lower().find(wanted.lower()), 0) if wanted else 0
    begin = max(0, place - AROUND)
    end = begin + 2 * AROUND + len(wanted)
    return ("\u2026" if begin else "") + text[begin:end] + ("\u2026" if end < len(text) else "")


# ---------------------------------------------------------------- why did the reward move


def jump(steps: Sequence[int], rewards: Sequence[float]) -> tuple[int, int, int, int] | None:
    """The two neighbouring stretches of steps between which the mean reward differs most: (first, last) of each.

    >>> jump(range(1, 9), [0, 0, 0, 0, 1, 1, 1, 1])
    (2, 4, 5, 7)
    """
    known = [(step, reward) for step, reward in zip(steps, rewards, strict=True) if step > 0 and np.isfinite(reward)]
    width = max(3, len(known) // 20)
    if len(known) < 2 * width:
        width = len(known) // 2
    if not width:
        return None
    values = np.array([reward for _, reward in known])
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means = (sums[width:] - sums[:-width]) / width
    place = int(np.argmax(np.abs(means[width:] - means[:-width])))
    number = [step for step, _ in known]
    return number[place], number[place + width - 1], number[place + width], number[place + 2 * width - 1]


def why(source: CompletionSource, before: tuple[int, int], after: tuple[int, int]) -> Json:
    """What changed between two stretches of steps, and how far it goes with the reward.

    `functions`, `finish`, `features`: what each was before and after, and its correlation with the reward over both.
    `phrases`: words and short sequences, ranked by how much more (or less) frequent they became times how strongly they go with
    the reward; `share`s of completions that hold them, and the mean reward of those that do and do not.
    """
    old, new = _gather(source, before), _gather(source, after)
    reward = np.concatenate([old["reward"], new["reward"]])
    late = np.r_[np.zeros(len(old["reward"]), bool), np.ones(len(new["reward"]), bool)]
    features = [
        _feature(name, np.concatenate([old["features"][name], new["features"][name]]), reward, late) for name in old["features"]
    ]
    functions = [
        _feature(
            name,
            np.concatenate([old["functions"].get(name, _nothing(old)), new["functions"].get(name, _nothing(new))]),
            reward,
            late,
        )
        for name in dict.fromkeys([*old["functions"], *new["functions"]])
    ]
    reasons = sorted({*old["finish"], *new["finish"]} - {""})
    ended = np.array([*old["finish"], *new["finish"]])
    finish = [_feature(reason, (ended == reason).astype(float), reward, late) for reason in reasons]
    return {
        "before": [*before],
        "after": [*after],
        "reward": [mean(old["reward"]), mean(new["reward"])],
        "completions": [len(old["reward"]), len(new["reward"])],
        "functions": functions,
        "finish": finish,
        "features": sorted(features, key=lambda feature: -abs(feature["moved"] * (feature["correlation"] or 0.0))),
        "phrases": _phrases([*old["text"], *new["text"]], reward, late),
    }


def _scored(source: CompletionSource, step: int, *more: str) -> pa.Table:
    """The texts and rewards of a step, and `more` columns."""
    return source.table(step, ("group", "index", "completion_text", "reward", "finish", "trained", "rewards/", *more))


def _written(table: pa.Table, vocabulary: Vocabulary | None) -> list[str]:
    """What the policy wrote of each completion: answers of tools and environments are left out, where tokens are known."""
    texts = [text or "" for text in table.column("completion_text").to_pylist()]
    if vocabulary is None or not {"trained", "completion_ids"} <= set(table.column_names):
        return texts
    columns = (table.column(name).to_pylist() for name in ("completion_ids", "trained"))
    for place, (ids, trained) in enumerate(zip(*columns, strict=True)):
        if ids and trained and not all(trained):
            own = [token for token, mine in zip(ids, trained, strict=True) if mine and token not in vocabulary.special]
            texts[place] = "".join(vocabulary.texts(own))
    return texts


def _nothing(part: Json) -> np.ndarray:
    return np.full(len(part["reward"]), np.nan)


def _gather(source: CompletionSource, stretch: tuple[int, int]) -> Json:
    """A sample of the completions of a stretch of steps."""
    steps = [step for step in source.steps() if stretch[0] <= step <= stretch[1]]
    tables: list[pa.Table] = []
    count = 0
    # From the middle of the stretch outwards would favour nothing; evenly spread steps are read until there are enough.
    for step in (steps[i] for i in np.linspace(0, len(steps) - 1, min(len(steps), 12)).astype(int)) if steps else ():
        try:
            table = _scored(source, step, "completion_ids")
        except DataError:
            continue
        table = table.slice(0, max(1, SAMPLE // min(len(steps), 12)))
        tables.append(table)
        count += len(table)
    if not count:
        raise DataError(f"no completions of steps {stretch[0]} to {stretch[1]} are recorded")
    table = pa.concat_tables(tables, promote_options="permissive")
    texts = _written(table, source.vocabulary())
    finish = [value or "" for value in table.column("finish").to_pylist()] if "finish" in table.column_names else [""] * len(table)
    return {
        "reward": numbers(table, "reward"),
        "functions": {name: numbers(table, f"rewards/{name}") for name in reward_names(table.column_names)},
        "finish": finish,
        "text": texts,
        "features": {
            "length": lengths_of(table).astype(float),
            "lines": np.array([text.count("\n") + 1 for text in texts], float),
            "digits": np.array([sum(map(str.isdigit, text[:READ])) / max(len(text[:READ]), 1) for text in texts]),
            "repetition": np.array([repetition(text) for text in texts]),
        },
    }


def _feature(name: str, values: np.ndarray, reward: np.ndarray, late: np.ndarray) -> Json:
    return {
        "name": name,
        "before": mean(values[~late]),
        "after": mean(values[late]),
        "moved": _moved(values, late),
        "correlation": correlation(values, reward),
    }


def _moved(values: np.ndarray, late: np.ndarray) -> float:
    """Difference of the means in standard deviations of all."""
    known = values[np.isfinite(values)]
    scale = float(known.std()) if known.size else 0.0
    if scale == 0.0 or not np.isfinite(values[late]).any() or not np.isfinite(values[~late]).any():
        return 0.0
    return float((np.nanmean(values[late]) - np.nanmean(values[~late])) / scale)


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


def _phrases(texts: Sequence[str], reward: np.ndarray, late: np.ndarray, limit: int = 16) -> list[Json]:
    held = [_grams(text) for text in texts]
    count = Counter(chain.from_iterable(held))
    least = max(3, len(texts) // 50)
    chosen = [gram for gram, times in count.most_common(MOST_PHRASES) if least <= times <= len(texts) - least]
    place = {gram: i for i, gram in enumerate(chosen)}
    has = np.zeros((len(chosen), len(texts)), np.float32)
    for column, grams in enumerate(held):
        has[[place[gram] for gram in grams & place.keys()], column] = 1.0
    before, after = (has[:, part].mean(1) for part in (~late, late))
    known = np.isfinite(reward)
    has, earned = has[:, known].astype(np.float64), reward[known]
    times, among = has.sum(1), max(int(known.sum()), 1)
    with_it = has @ earned
    apart = earned - (earned.mean() if among > 1 else 0.0)
    scale = np.sqrt(times * (1.0 - times / among) * np.square(apart).sum())
    rows = zip(
        chosen,
        before.tolist(),
        after.tolist(),
        times.tolist(),
        with_it.tolist(),
        (has @ apart).tolist(),
        scale.tolist(),
        strict=True,
    )
    phrases = []
    for gram, was, now, n, total, covaries, size in rows:
        related = covaries / size if size > 0.0 and among >= 3 else None
        phrases.append(
            {
                "phrase": gram,
                "before": was,
                "after": now,
                "correlation": related,
                "with": total / n if n else None,
                "without": (float(earned.sum()) - total) / (among - n) if among > n else None,
                "rank": abs(now - was) * (abs(related or 0.0) + 0.05),
            }
        )
    phrases.sort(key=lambda phrase: (-phrase["rank"], -len(phrase["phrase"])))
    different: dict[Any, Json] = {}
    for phrase in phrases:  # of parts of one phrase, whose numbers are the same, the longest stands for all
        different.setdefault((phrase["before"], phrase["after"], phrase["with"], phrase["without"]), phrase)
    return _apart(different.values(), limit)


def _apart(ranked: Iterable[Json], limit: int) -> list[Json]:
    """The best of those that say the same: a phrase that is part of a better one, with the same numbers, is left out."""
    kept: list[Json] = []
    for phrase in ranked:
        same = (
            other for other in kept
            if (phrase["phrase"] in other["phrase"] or other["phrase"] in phrase["phrase"])
            and abs(other["after"] - phrase["after"]) < 0.05 and abs(other["before"] - phrase["before"]) < 0.05
        )  # fmt: skip
        if next(same, None) is None:
            kept.append(phrase)
        if len(kept) == limit:
            break
    return kept


def _grams(text: str) -> set[str]:
    """Words and sequences of two and three of them, as they stand in the text, so that a search finds them."""
    text = text[:READ]
    spans = [match.span() for match in _WORD.finditer(text)]
    return {text[spans[i][0] : spans[i + n - 1][1]] for n in (1, 2, 3) for i in range(len(spans) - n + 1)}


# ---------------------------------------------------------------- signs of reward hacking


def lenses(source: CompletionSource, first: int, last: int) -> Json:
    """Signs of reward hacking over a stretch of steps.

    `points`: reward, length, repetition and every function of a sample of completions, with their places.
    `conflicts`: pairs of functions of which one is satisfied (above its middle) where the other is not, and where.
    `duplicates`: groups with the fewest different answers.   `correlations` of the reward.
    """
    steps = [step for step in source.steps() if first <= step <= last]
    if not steps:
        raise DataError(f"no completions of steps {first} to {last} are recorded")
    chosen = [steps[i] for i in sorted(set(np.linspace(0, len(steps) - 1, min(len(steps), 12)).astype(int).tolist()))]
    tables = []
    for step in chosen:
        try:
            table = _scored(source, step)
        except DataError:
            continue
        tables.append(
            table.slice(0, SCATTER // len(chosen)).append_column("at", pa.array([step] * min(len(table), SCATTER // len(chosen))))
        )
    if not tables:
        raise DataError(f"no completions of steps {first} to {last} can be read")
    table = pa.concat_tables(tables, promote_options="permissive")
    texts = [text or "" for text in table.column("completion_text").to_pylist()]
    reward, length = numbers(table, "reward"), lengths_of(table).astype(float)
    repeated = np.array([repetition(text) for text in texts])
    functions = {name: numbers(table, f"rewards/{name}") for name in reward_names(table.column_names)}
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


def _conflicts(functions: dict[str, np.ndarray], place: dict[str, np.ndarray]) -> list[Json]:
    conflicts = []
    for name, values in functions.items():
        for other, against in functions.items():
            if name != other and np.isfinite(values).any() and np.isfinite(against).any():
                here = (values > _middle(values)) & (against <= _middle(against))
                rows = np.flatnonzero(here)[:5]
                share = float(here.mean())
                if share > 0.0:
                    conflicts.append({"high": name, "low": other, "share": share, "places": _places(place, rows)})
    return sorted(conflicts, key=lambda conflict: -conflict["share"])[:12]


def _middle(values: np.ndarray) -> float:
    return float((np.nanmin(values) + np.nanmax(values)) / 2)


def _duplicates(place: dict[str, np.ndarray], texts: Sequence[str], reward: np.ndarray) -> list[Json]:
    groups: dict[tuple[int, int], list[int]] = {}
    for i, key in enumerate(zip(place["at"].tolist(), place["group"].tolist(), strict=True)):
        groups.setdefault(key, []).append(i)
    duplicates = []
    for (step, group), rows in groups.items():
        different = len({texts[i] for i in rows})
        if len(rows) > 1 and different < len(rows):
            shares = {"distinct": different, "size": len(rows), "reward": mean(reward[rows])}
            duplicates.append({"step": step, "group": group, **shares})
    return sorted(duplicates, key=lambda group: (group["distinct"] / group["size"], -group["step"]))[:12]


def _places(place: dict[str, np.ndarray], rows: np.ndarray) -> list[list[int]]:
    return [[int(place["at"][i]), int(place["group"][i]), int(place["index"][i])] for i in rows]


# ---------------------------------------------------------------- two steps side by side


def compare(left: tuple[CompletionSource, int], right: tuple[CompletionSource, int], kind: str = TRAINING) -> Json:
    """The prompts that two steps (of one run or of two) share, the one whose reward moved most first."""
    sides = [_groups_of(source, step, kind) for source, step in (left, right)]
    shared = [key for key in sides[0] if key in sides[1]]
    pairs = [{"key": key, "prompt": sides[0][key]["prompt"], "left": sides[0][key], "right": sides[1][key]} for key in shared]
    pairs.sort(key=lambda pair: -abs((pair["right"]["mean"] or 0.0) - (pair["left"]["mean"] or 0.0)))
    return {"pairs": pairs, "left": len(sides[0]), "right": len(sides[1])}


def _groups_of(source: CompletionSource, step: int, kind: str) -> dict[str, Json]:
    table = source.table(step, ("group", "prompt_text", "reward"), kind)
    place, reward = numbers(table, "group").astype(int), numbers(table, "reward")
    by_prompt: dict[str, Json] = {}
    for group in np.unique(place).tolist():
        rows = np.flatnonzero(place == group)
        prompt = table.column("prompt_text")[int(rows[0])].as_py() or ""
        by_prompt[key_of(prompt)] = {
            "group": group, "prompt": excerpt(prompt), "mean": mean(reward[rows]), "rewards": plain(reward[rows]),
        }  # fmt: skip
    return by_prompt


def shared_steps(index: Index, step: int) -> list[Any]:
    """Other steps that saw prompts of this one, and how many: those worth comparing it with."""
    entry = index.entry(step)
    if entry is None:
        return []
    count: Counter[int] = Counter()
    for key in entry.prompts.values():
        count.update(other for other, _, _ in index.visits(key) if other != step)
    return sorted(([other, times] for other, times in count.most_common(12)), key=lambda pair: (-pair[1], pair[0]))
