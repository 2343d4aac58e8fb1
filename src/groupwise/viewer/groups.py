"""A step and a group of it as they are shown: rewards, finish, and every token with everything that is known of it.

Numbers per token, by name, with `rho` the ratio of the policy's probability to the sampler's as the step's last update saw it:

    push       advantage x rho: which way, and how hard, the update pushed the token; `clipped` says where its gradient was cut
    logp       log-prob under the policy before the update (where it was not scored: the sampler's), nats
    entropy    of the policy at the token, nats
    kl         log-prob under the policy minus that under the reference, nats: positive where the policy likes the token more
    mismatch   log-prob by the trainer minus that by the sampler, nats: rounding, unless something is wrong
    gradient   |d loss / d log-prob| at the step's last update, as a share of the group's sum
    version    optimizer steps that the weights which drew it had taken

A quantity that was not recorded has no column.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
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

OVERVIEW = ("group", "prompt_text", "index", "completion_text", "reward", "finish", "trained", "rewards/")
QUANTITIES = ("push", "logp", "entropy", "kl", "mismatch", "gradient", "version")


def reward_names(columns: Sequence[str]) -> list[str]:
    """The reward functions that a step was scored by."""
    return [name.removeprefix("rewards/") for name in columns if name.startswith("rewards/")]


def key_of(prompt: str) -> str:
    """The key by which a prompt is found in other steps and runs."""
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def lengths_of(table: pa.Table) -> np.ndarray:
    """Tokens of each completion; characters where there are no tokens."""
    if "trained" in table.column_names:
        return pc.fill_null(pc.list_value_length(table.column("trained")), 0).to_numpy()  # type: ignore[attr-defined]
    return pc.fill_null(pc.utf8_length(table.column("completion_text")), 0).to_numpy()  # type: ignore[attr-defined]


def numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column as float64, NaN where it is null."""
    if name not in table.column_names:
        return np.full(len(table), np.nan)
    return pc.fill_null(table.column(name).cast(pa.float64()), math.nan).to_numpy()  # type: ignore[attr-defined]


def overview(source: CompletionSource, step: int, kind: str = TRAINING) -> Json:
    """A step's groups, the most informative first: rewards, finish, lengths, how many different answers."""
    table = source.table(step, OVERVIEW, kind)
    names = reward_names(table.column_names)
    place, reward, length = numbers(table, "group").astype(np.int64), numbers(table, "reward"), lengths_of(table)
    finish = _finish(table)
    prompts, texts = table.column("prompt_text"), table.column("completion_text")
    groups = []
    starts = np.flatnonzero(np.r_[True, place[1:] != place[:-1]]) if len(place) else np.zeros(0, np.int64)
    for start, end in zip(starts, np.r_[starts[1:], len(place)], strict=True) if len(place) else ():
        rows = slice(int(start), int(end))
        prompt = prompts[int(start)].as_py() or ""
        groups.append(
            {
                "group": int(place[start]),
                "key": key_of(prompt),
                "prompt": prompt,
                "rewards": plain(reward[rows]),
                "lengths": length[rows].tolist(),
                "finish": finish[rows],
                "spread": spread(reward[rows]),
                "mean": mean(reward[rows]),
                "distinct": len(set(texts.slice(int(start), int(end - start)).to_pylist())),
            }
        )
    for one, prompt in zip(groups, without_shared_lines([one["prompt"] for one in groups]), strict=True):
        one["prompt"] = excerpt(prompt)
    groups.sort(key=lambda group: (-(group["spread"] or 0.0), -group["distinct"], group["group"]))
    by_function = {name: mean(numbers(table, f"rewards/{name}")) for name in names}
    return {
        "step": step,
        "kind": kind,
        "groups": groups,
        "functions": by_function,
        "reward": mean(reward),
        "completions": len(place),
    }


def group(source: CompletionSource, step: int, place: int, kind: str = TRAINING) -> Json:
    """A group with its completions, tokens and all; of long completions the beginning."""
    table = source.table(step, None, kind)
    table = table.filter(pc.equal(table.column("group"), place))  # type: ignore[attr-defined]
    if not len(table):
        raise DataError(f"{source.name} holds no group {place} in step {step}")
    names = reward_names(table.column_names)
    rows = table.slice(0, CROWD).to_pylist()
    first = rows[0]
    prompt = first.get("prompt_text") or ""
    total = _gradient_total(rows)
    vocabulary = source.vocabulary()
    row = first.get("row")
    return {
        "step": step,
        "kind": kind,
        "group": place,
        "key": key_of(prompt),
        "prompt": prompt[:CHARACTERS],
        "prompt_length": len(prompt),
        "row": loaded(row),
        "sampling": loaded(first.get("sampling")),
        "functions": names,
        "size": len(table),
        "completions": [_completion(row, names, vocabulary, total, 0) for row in rows],
        "quantities": _present(rows, total),
    }


def more(source: CompletionSource, step: int, place: int, index: int, begin: int, kind: str = TRAINING) -> Json:
    """A completion from its token (or character) `begin` on."""
    table = source.table(step, None, kind)
    table = table.filter(pc.equal(table.column("group"), place))  # type: ignore[attr-defined]
    rows = table.to_pylist()
    matching = [row for row in rows if row["index"] == index]
    if not matching:
        raise DataError(f"{source.name} holds no completion {index} in group {place} of step {step}")
    names = reward_names(table.column_names)
    return _completion(matching[0], names, source.vocabulary(), _gradient_total(rows), begin)


def _completion(row: Mapping[str, Any], names: Sequence[str], known: Vocabulary | None, total: float, begin: int) -> Json:
    ids, text = row.get("completion_ids"), row.get("completion_text") or ""
    advantages = row.get("advantages") or []
    shown: Json = {
        "index": row["index"],
        "reward": _finite(row.get("reward")),
        "rewards": {name: _finite(row.get(f"rewards/{name}")) for name in names},
        "finish": row.get("finish") or "",
        "advantage": _finite(advantages[0]) if advantages and len(set(advantages)) == 1 else None,
        "begin": begin,
    }
    if row.get("messages"):
        shown["messages"] = loaded(row["messages"])
    episode = loaded(row.get("episode"))
    if isinstance(episode, dict):
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # of another form than a run writes
            shown["episode"] = _episode(episode)
    if ids is None or known is None:
        if isinstance(episode, dict) and isinstance(episode.get("messages"), list):
            shown["messages"] = episode["messages"]
        return {**shown, "length": len(text), "unit": "characters", "text": text[begin : begin + CHARACTERS]}
    end = begin + TOKENS
    columns = {name: values[begin:end] for name, values in token_columns(row, total).items()}
    return {
        **shown,
        "length": len(ids),
        "unit": "tokens",
        "tokens": known.texts(ids)[begin:end],
        "ids": ids[begin:end],
        "special": [i for i, token in enumerate(ids[begin:end]) if token in known.special],
        "untrained": [i for i, trained in enumerate(row["trained"][begin:end]) if not trained],
        "columns": {name: _rounded(values) for name, values in columns.items()},
    }


def _episode(episode: Mapping[str, Any]) -> Json:
    """An episode (`records.Episode`) as it is shown: of long texts the beginning, of other contexts their lengths."""
    turns = []
    for turn in episode.get("turns") or ():
        calls = [
            {
                "name": _text(call.get("name")),
                "arguments": _text(call.get("arguments")),
                "result": _text(call.get("result")),
                "seconds": _finite(call.get("seconds")),
                "failure": _text(call.get("failure")),
            }
            for call in turn.get("calls") or ()
        ]
        turns.append(
            {
                "begin": int(turn["begin"]),
                "end": int(turn["end"]),
                "finish": _text(turn.get("finish")),
                "calls": calls,
                "answer": _text(turn.get("answer")),
                "seconds": _finite(turn.get("seconds")),
                "truncated": bool(turn.get("truncated")),
                "reward": _finite(turn.get("reward")),
            }
        )
    branches = [{"begin": int(b["begin"]), "context": len(b.get("context") or ())} for b in episode.get("branches") or ()]
    about = {"reward": _finite(episode.get("reward")), "environment": _text(episode.get("environment"))}
    return {"turns": turns, "branches": branches, **about}


def _text(value: Any) -> str:
    return str(value or "")[:CHARACTERS]


def token_columns(row: Mapping[str, Any], total: float = math.nan) -> dict[str, np.ndarray]:
    """The quantities of a completion's tokens (n,), as far as they were recorded.   total: the group's sum of |gradients|."""

    def column(name: str) -> np.ndarray | None:
        values = row.get(name)
        return np.asarray(values, np.float64) if values else None

    behavior, current, advantage = column("behavior_logp"), column("current_logp"), column("advantages")
    last, reference, clipped = column("update/last_logp"), column("signals/reference_logp"), column("update/clipped")
    columns: dict[str, np.ndarray | None] = {
        "logp": current if current is not None else behavior,
        "entropy": column("update/entropy"),
    }
    if advantage is not None and behavior is not None:
        seen = last if last is not None else current
        ratio = np.exp(np.clip(seen - behavior, -20.0, 20.0)) if seen is not None else np.ones_like(behavior)
        columns |= {"push": advantage * ratio, "ratio": ratio, "clipped": clipped, "advantage": advantage}
    if reference is not None and columns["logp"] is not None:
        columns["kl"] = columns["logp"] - reference
    if current is not None and behavior is not None:
        columns["mismatch"] = current - behavior
    gradient = column("update/gradient")
    if gradient is not None and total > 0.0:
        columns["gradient"] = gradient / total
    version = column("version")
    columns |= {"version": version, "behavior": behavior}
    return {name: values for name, values in columns.items() if values is not None and values.size == len(row["completion_ids"])}


def _gradient_total(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(np.sum(row.get("update/gradient") or ()) for row in rows))


def _present(rows: Sequence[Mapping[str, Any]], total: float) -> dict[str, list[float]]:
    """The quantities that the group has, each with the range of its scale: symmetric around 0 where it has a sign."""
    columns = [token_columns(row, total) for row in rows if row.get("completion_ids")]
    ranges: dict[str, list[float]] = {}
    for name in QUANTITIES:
        parts = [values[name] for values in columns if name in values]
        flat = np.concatenate(parts) if parts else np.zeros(0)
        flat = flat[np.isfinite(flat)]
        if not flat.size:
            continue
        # A single outlier must not turn everything else pale.
        high, low = float(np.quantile(flat, 0.98)), float(np.quantile(flat, 0.02))
        if name in ("push", "kl", "mismatch"):
            bound = max(abs(high), abs(low)) or (1.0 if name == "push" else 1e-6)
            ranges[name] = [-bound, bound]
        elif name == "logp":
            ranges[name] = [min(low, -1.0), 0.0]
        elif name == "version":
            ranges[name] = [float(flat.min()), float(flat.max())]
        else:
            ranges[name] = [0.0, max(high, 1e-9)]
    return ranges


# ---------------------------------------------------------------- small change


def _finish(table: pa.Table) -> list[str]:
    return [value or "" for value in table.column("finish").to_pylist()] if "finish" in table.column_names else [""] * len(table)


def without_shared_lines(prompts: Sequence[str]) -> list[str]:
    """Prompts without the lines that all of them begin and end with: chat templates repeat those.

    >>> without_shared_lines(["Be brief.\\n2+2?\\nAnswer:", "Be brief.\\n3+4?\\nAnswer:"])
    ['2+2?', '3+4?']
    """
    lines = [prompt.split("\n") for prompt in prompts]
    most = min((len(one) for one in lines), default=1) - 1
    first = next((place for place in range(most) if len({one[place] for one in lines}) > 1), most)
    last = next((place for place in range(most - first) if len({one[-1 - place] for one in lines}) > 1), most - first)
    return ["\n".join(one[first : len(one) - last]) for one in lines]


def excerpt(text: str, limit: int = EXCERPT) -> str:
    """The end of a prompt, where it says what is asked; chat templates repeat its beginning."""
    text = text.strip()
    return text if len(text) <= limit else "\u2026" + text[-limit:]


def spread(values: np.ndarray) -> float | None:
    """Standard deviation of the rewards that are known."""
    known = values[~np.isnan(values)]
    return float(known.std()) if known.size else None


def mean(values: np.ndarray) -> float | None:
    """Mean of what is known; None if nothing is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else None


def plain(values: np.ndarray) -> list[float | None]:
    """Numbers as JSON has them: NaN and infinities are null."""
    return [float(value) if math.isfinite(value) else None for value in values]


def _rounded(values: np.ndarray) -> list[float | None]:
    """Four significant digits: as many as are shown."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values.tolist()]


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def loaded(text: Any) -> Any:
    """A JSON text; None for what is none, or too large to be shown."""
    try:
        return bounded_json(text) if isinstance(text, str) and len(text) <= LARGEST_JSON else None
    except ValueError:
        return None
