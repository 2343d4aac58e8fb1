"""A step and a group of it as they are shown: rewards, finish, and every token with everything that
is known of it.

Numbers per token, by name, with `rho` the ratio of the policy's probability to the sampler's as the
step's last update saw it:

    push       advantage x rho: which way, and how hard, the update pushed the token; `clipped` says
    where its gradient was cut
    logp       log-prob under the policy before the update (where it was not scored: the sampler's),
    nats
    entropy    of the policy at the token, nats
    kl         log-prob under the policy minus that under the reference, nats: positive where the
    policy likes the token more
    mismatch   log-prob by the trainer minus that by the sampler, nats: rounding, unless something
    is wrong
    gradient   |d loss / d log-prob| at the step's last update, as a share of the group's sum
    version    optimizer steps that the weights which drew it had taken

A quantity that was not recorded has no column.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from groupwise.data.vocabulary import Vocabulary
from groupwise.errors import DataError
from groupwise.runs.run_files import bounded_json
from groupwise.viewer.sources import TRAINING, CompletionSource

TOKENS, CHARACTERS = 1500, 6000
"""What one answer holds of a completion; the rest is asked for as it is scrolled to."""
CROWD = 256
"""Completions of a group that are answered at once."""
LARGEST_JSON = 1 << 22
"""Characters of a row, of messages or of an episode; a longer one is not shown."""
EXCERPT = 160
"""Characters of a prompt in a list."""

Json = dict[str, Any]

PROMPT = ("prompt_text", "episode")
"""Columns that say what prompt the policy saw."""
OVERVIEW = (
    "group",
    *PROMPT,
    "index",
    "completion_text",
    "reward",
    "finish",
    "trained",
    "rewards/",
)
QUANTITIES = ("push", "logp", "entropy", "kl", "mismatch", "gradient", "version")
SIGNED = {"push": 1.0, "kl": 1e-6, "mismatch": 1e-6}
"""Quantities with a sign, and the bound of their scale where all of them are 0."""


def reward_names(columns: Sequence[str]) -> list[str]:
    """The reward functions that a step was scored by."""
    return [name.removeprefix("rewards/") for name in columns if name.startswith("rewards/")]


def key_of(prompt: str) -> str:
    """The key by which a prompt is found in other steps and runs."""
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def lengths_of(table: pa.Table) -> np.ndarray:
    """Tokens of each completion; characters where there are no tokens."""
    if "trained" in table.column_names:
        lengths = pc.list_value_length(table.column("trained"))  # type: ignore[attr-defined]
    else:
        lengths = pc.utf8_length(table.column("completion_text"))  # type: ignore[attr-defined]
    return pc.fill_null(lengths, 0).to_numpy()  # type: ignore[attr-defined]


def numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column as float64, NaN where it is null."""
    if name not in table.column_names:
        return np.full(len(table), np.nan)
    column = table.column(name).cast(pa.float64())
    return pc.fill_null(column, math.nan).to_numpy()  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class PromptParts:
    """A prompt as the policy saw it, with what the environment's `reset` added to it."""

    before: str
    added: str = ""
    behind: str = ""

    @property
    def text(self) -> str:
        """The whole prompt."""
        return self.before + self.added + self.behind


def prompt_of(row: Mapping[str, Any]) -> PromptParts:
    """Return the prompt that a completion was drawn behind: the episode's, else the data's."""
    episode = loaded(row.get("episode"))
    if not isinstance(episode, dict):
        episode = {}
    text = episode.get("prompt_text")
    if not text or not isinstance(text, str):
        return PromptParts(row.get("prompt_text") or "")
    opening = str(episode.get("opening") or "")
    if opening not in text:  # chat templates take the blanks around a message away
        opening = opening.strip()
    if not opening or opening not in text:
        return PromptParts(text)
    return PromptParts(*text.rpartition(opening))


def prompts_in(table: pa.Table) -> pa.ChunkedArray | pa.Array:
    """Return the prompt of every completion as the policy saw it."""
    if "episode" not in table.column_names or table.column("episode").null_count == len(table):
        return table.column("prompt_text")
    rows = table.select(PROMPT).to_pylist()
    return pa.array([prompt_of(row).text for row in rows], pa.string())


def groups_in(table: pa.Table) -> Iterator[tuple[int, slice, str]]:
    """Number and rows of each group of a step, and the prompt of its first completion."""
    place = numbers(table, "group").astype(np.int64)
    starts = np.flatnonzero(np.diff(place, prepend=-1)).tolist()
    columns = [name for name in PROMPT if name in table.column_names]
    firsts = table.select(columns).take(pa.array(starts, pa.int64())).to_pylist()
    for start, end, row in zip(starts, [*starts[1:], len(place)], firsts, strict=True):
        yield int(place[start]), slice(start, end), prompt_of(row).text


def overview(source: CompletionSource, step: int, kind: str = TRAINING) -> Json:
    """A step's groups, the most informative first: rewards, finish, lengths, how many different
    answers.
    """
    table = source.table(step, OVERVIEW, kind)
    reward, length = numbers(table, "reward"), lengths_of(table)
    texts = table.column("completion_text").to_pylist()
    finish = [""] * len(table)
    if "finish" in table.column_names:
        finish = pc.fill_null(table.column("finish"), "").to_pylist()  # type: ignore[attr-defined]
    groups: list[Json] = []
    prompts: list[str] = []
    for place, rows, prompt in groups_in(table):
        prompts.append(prompt)
        fields = {
            "group": place,
            "key": key_of(prompt),
            "rewards": plain(reward[rows]),
            "lengths": length[rows].tolist(),
            "finish": finish[rows],
            "spread": spread(reward[rows]),
            "mean": mean(reward[rows]),
            "distinct": len(set(texts[rows])),
        }
        groups.append(fields)
    for fields, prompt in zip(groups, without_shared_lines(prompts), strict=True):
        fields["prompt"] = excerpt(prompt)
    groups.sort(key=_rank)
    functions = {}
    for name in reward_names(table.column_names):
        functions[name] = mean(numbers(table, f"rewards/{name}"))
    return {
        "step": step,
        "kind": kind,
        "groups": groups,
        "functions": functions,
        "reward": mean(reward),
        "completions": len(table),
    }


def _rank(group: Json) -> tuple[float, int, int]:
    """Order groups by the spread of their rewards, then by how many answers differ."""
    return -(group["spread"] or 0.0), -group["distinct"], group["group"]


def group(source: CompletionSource, step: int, place: int, kind: str = TRAINING) -> Json:
    """A group with its completions, tokens and all; of long completions the beginning."""
    rows, names = _rows(source, step, place, kind)
    shown, first, total = rows[:CROWD], rows[0], _gradient_total(rows)
    vocabulary = source.vocabulary()
    prompt = prompt_of(first)
    completions = []
    for row in shown:
        completion = _completion(row, names, vocabulary, total, 0)
        seen = prompt_of(row)
        if seen != prompt:
            completion["opening"] = seen.added[:CHARACTERS]
        completions.append(completion)
    return {
        "step": step,
        "kind": kind,
        "group": place,
        "key": key_of(prompt.text),
        "prompt": [part[:CHARACTERS] for part in (prompt.before, prompt.added, prompt.behind)],
        "prompt_length": len(prompt.text),
        "images": _images(source, first.get("prompt_images")),
        "row": loaded(first.get("row")),
        "sampling": loaded(first.get("sampling")),
        "functions": names,
        "size": len(rows),
        "completions": completions,
        "quantities": _present(shown, total),
    }


def _images(source: CompletionSource, digests: object) -> list[str | None]:
    """The images of a prompt as `data:` URLs; None for one that is not there."""
    if not isinstance(digests, list):
        return []
    urls: list[str | None] = []
    for digest in digests:
        data = source.image(str(digest))
        if data is None:
            urls.append(None)
        else:
            urls.append(f"data:image/png;base64,{base64.b64encode(data).decode()}")
    return urls[:IMAGES]


IMAGES = 16
"""Images of a prompt that are shown."""


def more(
    source: CompletionSource, step: int, place: int, index: int, begin: int, kind: str = TRAINING
) -> Json:
    """A completion from its token (or character) `begin` on."""
    rows, names = _rows(source, step, place, kind)
    for row in rows:
        if row["index"] == index:
            return _completion(row, names, source.vocabulary(), _gradient_total(rows), begin)
    raise DataError(f"{source.name} holds no completion {index} in group {place} of step {step}")


def _rows(
    source: CompletionSource, step: int, place: int, kind: str
) -> tuple[list[Json], list[str]]:
    """The completions of a group, and the reward functions that they were scored by.  Raises
    DataError if there are none.
    """
    table = source.table(step, None, kind)
    here = pc.equal(table.column("group"), place)  # type: ignore[attr-defined]
    rows = table.filter(here).to_pylist()
    if not rows:
        raise DataError(f"{source.name} holds no group {place} in step {step}")
    return rows, reward_names(table.column_names)


def _completion(
    row: Mapping[str, Any], names: Sequence[str], known: Vocabulary | None, total: float, begin: int
) -> Json:
    ids, text = row.get("completion_ids"), row.get("completion_text") or ""
    advantages = set(row.get("advantages") or ())
    shown: Json = {
        "index": row["index"],
        "reward": _finite(row.get("reward")),
        "rewards": {name: _finite(row.get(f"rewards/{name}")) for name in names},
        "finish": row.get("finish") or "",
        "advantage": None,
        "begin": begin,
    }
    if len(advantages) == 1:
        shown["advantage"] = _finite(advantages.pop())
    if row.get("messages"):
        shown["messages"] = loaded(row["messages"])
    episode = loaded(row.get("episode"))
    if isinstance(episode, dict):
        # One of another form than a run writes is left out.
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            shown["episode"] = _episode(episode, known)
    if ids is None or known is None:
        if isinstance(episode, dict) and isinstance(episode.get("messages"), list):
            shown["messages"] = episode["messages"]
        text_shown = text[begin : begin + CHARACTERS]
        return shown | {"length": len(text), "unit": "characters", "text": text_shown}
    end = begin + TOKENS
    columns = {}
    for name, values in token_columns(row, total).items():
        columns[name] = _rounded(values[begin:end])
    special, untrained = [], []
    for i, token in enumerate(ids[begin:end]):
        if token in known.special:
            special.append(i)
        if not row["trained"][begin + i]:
            untrained.append(i)
    return shown | {
        "length": len(ids),
        "unit": "tokens",
        "tokens": known.texts(ids)[begin:end],
        "ids": ids[begin:end],
        "special": special,
        "untrained": untrained,
        "columns": columns,
    }


def _text(value: Any) -> str:
    return str(value or "")[:CHARACTERS]


def _texts(values: Any) -> list[str]:
    return [_text(value) for value in values or ()]


def _number(value: Any) -> int:
    return int(value or 0)


def _finite(value: Any) -> float | None:
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


CALL = {"name": _text, "arguments": _text, "result": _text, "seconds": _finite, "failure": _text}
TURN = {
    "begin": int,
    "end": int,
    "finish": _text,
    "answer": _text,
    "seconds": _finite,
    "truncated": bool,
    "reward": _finite,
    "side": bool,
    "agent": _number,
    "wishes": _texts,
}
"""What is shown of a call and of a turn, and how it is read: of long texts the beginning."""


def _episode(episode: Mapping[str, Any], known: Vocabulary | None) -> Json:
    """Return an episode (`records.Episode`) as it is shown: contexts as text, where the vocabulary
    is known, and not as ids.
    """
    turns = []
    for turn in episode.get("turns") or ():
        calls = [_fields(CALL, call) for call in turn.get("calls") or ()]
        turns.append(_fields(TURN, turn) | {"calls": calls})
    branches = []
    for branch in episode.get("branches") or ():
        # A context of the first token is the prompt that is shown: nothing was split.  The prompt
        # of a side conversation is not.
        if int(branch["begin"]) > 0 or (turns and turns[0]["side"]):
            context = branch.get("context") or ()
            text = "" if known is None else "".join(known.texts(context[-CHARACTERS:]))
            branches.append({"begin": int(branch["begin"]), "context": len(context), "text": text})
    whole = _fields({"reward": _finite, "environment": _text}, episode)
    left = episode.get("left")
    if isinstance(left, Mapping):
        files = []
        for name, text in (left.get("files") or {}).items():
            files.append([_text(name), None if text is None else _text(text)])
        whole["left"] = {"files": files, "output": str(left.get("output") or "")[-CHARACTERS:]}
    return {"turns": turns, "branches": branches, **whole}


def _fields(known: Mapping[str, Callable[[Any], Any]], values: Mapping[str, Any]) -> Json:
    return {name: read(values.get(name)) for name, read in known.items()}


def token_columns(row: Mapping[str, Any], total: float = math.nan) -> dict[str, np.ndarray]:
    """The quantities of a completion's tokens (n,), as far as they were recorded.

    total: the group's sum of |gradients|.
    """
    behavior, current = _column(row, "behavior_logp"), _column(row, "current_logp")
    advantage, reference = _column(row, "advantages"), _column(row, "signals/reference_logp")
    last, gradient = _column(row, "update/last_logp"), _column(row, "update/gradient")
    logp = _either(current, behavior)
    columns = {
        "logp": logp,
        "entropy": _column(row, "update/entropy"),
        "version": _column(row, "version"),
        "behavior": behavior,
    }
    if advantage is not None and behavior is not None:
        seen = _either(last, current)
        ratio = np.ones_like(behavior)
        if seen is not None:
            ratio = np.exp(np.clip(seen - behavior, -20.0, 20.0))
        columns["push"] = advantage * ratio
        columns["ratio"] = ratio
        columns["clipped"] = _column(row, "update/clipped")
        columns["advantage"] = advantage
    if reference is not None and logp is not None:
        columns["kl"] = logp - reference
    if current is not None and behavior is not None:
        columns["mismatch"] = current - behavior
    if gradient is not None and total > 0.0:
        columns["gradient"] = gradient / total
    tokens = len(row["completion_ids"])
    known = {}
    for name, values in columns.items():
        if values is not None and values.size == tokens:
            known[name] = values
    return known


def _column(row: Mapping[str, Any], name: str) -> np.ndarray | None:
    values = row.get(name)
    if not values:
        return None
    return np.asarray(values, np.float64)


def _either(one: np.ndarray | None, otherwise: np.ndarray | None) -> np.ndarray | None:
    """Return the first column if it was recorded, else the other."""
    return otherwise if one is None else one


def _gradient_total(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(np.sum(row.get("update/gradient") or ()) for row in rows))


def _present(rows: Sequence[Mapping[str, Any]], total: float) -> dict[str, list[float]]:
    """The quantities that the group has, each with the range of its scale: symmetric around 0 where
    it has a sign.
    """
    columns = [token_columns(row, total) for row in rows if row.get("completion_ids")]
    ranges: dict[str, list[float]] = {}
    for name in QUANTITIES:
        flat = np.concatenate([np.zeros(0), *(values.get(name, ()) for values in columns)])
        flat = flat[np.isfinite(flat)]
        if not flat.size:
            continue
        # A single outlier must not turn everything else pale.
        high, low = float(np.quantile(flat, 0.98)), float(np.quantile(flat, 0.02))
        if name in SIGNED:
            bound = max(abs(high), abs(low)) or SIGNED[name]
            ranges[name] = [-bound, bound]
        elif name == "logp":
            ranges[name] = [min(low, -1.0), 0.0]
        elif name == "version":
            ranges[name] = [float(flat.min()), float(flat.max())]
        else:
            ranges[name] = [0.0, max(high, 1e-9)]
    return ranges


# ---------------------------------------------------------------- small change


def without_shared_lines(prompts: Sequence[str]) -> list[str]:
    """Prompts without the lines that all of them begin and end with: chat templates repeat those.

    >>> without_shared_lines(["Be brief.\\n2+2?\\nAnswer:", "Be brief.\\n3+4?\\nAnswer:"])
    ['2+2?', '3+4?']
    """
    lines = [prompt.split("\n") for prompt in prompts]
    most = min(map(len, lines), default=1) - 1
    first = 0
    while first < most and _same(lines, first):
        first += 1
    last = 0
    while last < most - first and _same(lines, -1 - last):
        last += 1
    return ["\n".join(one[first : len(one) - last]) for one in lines]


def _same(lines: Sequence[Sequence[str]], place: int) -> bool:
    """Return whether all texts have the same line at a place."""
    return len({one[place] for one in lines}) == 1


def excerpt(text: str, limit: int = EXCERPT) -> str:
    """The end of a prompt, where it says what is asked; chat templates repeat its beginning."""
    text = text.strip()
    if len(text) > limit:
        text = "\u2026" + text[-limit:]
    return text


def spread(values: np.ndarray) -> float | None:
    """Standard deviation of the rewards that are known."""
    known = values[~np.isnan(values)]
    return float(known.std()) if known.size else None


def mean(values: np.ndarray) -> float | None:
    """Mean of what is known; None if nothing is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else None


def plain(values: Iterable[float]) -> list[float | None]:
    """Numbers as JSON has them: NaN and infinities are null."""
    return [_finite(float(value)) for value in values]


def _rounded(values: np.ndarray) -> list[float | None]:
    """Four significant digits: as many as are shown."""
    return plain(float(f"{value:.4g}") for value in values.tolist())


def loaded(text: Any) -> Any:
    """A JSON text; None for what is none, or too large to be shown."""
    if not isinstance(text, str) or len(text) > LARGEST_JSON:
        return None
    try:
        return bounded_json(text)
    except ValueError:
        return None
