"""A step and a group of it as they are shown: rewards, finish, and every token with everything that is known of it.

Numbers per token, by name, with `rho` the ratio of the policy's probability to the sampler's as the step's last update saw it:

    push       advantage x rho: which way, and how hard, the update pushed the token; `clipped` says where its gradient was cut
    logp       log-prob under the policy before the update (where it was not scored: the sampler's), nats
    entropy    of the policy at the token, nats
    kl         log-prob under the policy minus that under the reference, nats: positive where the policy likes the token more
    mismatch   log-prob by the trainer minus that by the sampler, nats: rounding, unless something is wrong
    gradient   weight x |push|, 0 where clipped, as a share of the group's sum; the KL's part is not in it.  Only of runs whose
               surrogate has this gradient (`clip_of`): of others, and with the KL, a replay says it (`replays.py`)
    version    optimizer steps that the weights which drew it had taken

A quantity that was not recorded has no column.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from groupwise.config.engines import engine_traits
from groupwise.data.vocabulary import Vocabulary
from groupwise.errors import DataError
from groupwise.viewer.sources import TRAINING, Source

TOKENS, CHARACTERS = 1500, 6000
"""What one answer holds of a completion; the rest is asked for as it is scrolled to."""
CROWD = 256
"""Completions of a group that are answered at once."""
EXCERPT = 160
"""Characters of a prompt in a list."""

Json = dict[str, Any]

_SYMMETRIC = ("grpo", "dr_grpo", "bnpo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "gdpo", "ppo")
CLIPPED: dict[str, tuple[float, float]] = dict.fromkeys(_SYMMETRIC, (0.2, 0.2)) | {"dapo": (0.2, 0.28)}
"""Objectives whose surrogate is PPO's clipped ratio of tokens, with their low and high (a test asks the table)."""

OVERVIEW = ("group", "prompt_text", "index", "completion_text", "reward", "finish", "trained")
QUANTITIES = ("push", "logp", "entropy", "kl", "mismatch", "gradient", "version")


def reward_names(columns: Sequence[str]) -> list[str]:
    """The reward functions that a step was scored by."""
    return [name.removeprefix("rewards/") for name in columns if name.startswith("rewards/")]


def key_of(prompt: str) -> str:
    """The key by which a prompt is found in other steps and runs."""
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def clip_of(config: Mapping[str, Any]) -> tuple[float, float] | None:
    """Low and high of a recipe whose surrogate is the clipped ratio of tokens; None for any other.  config: its keys, with dots.

    Its gradient is weight x advantage x ratio, and 0 where the ratio is out of range on the side that the advantage pushes it to.

    >>> clip_of({"objective": "dapo"}), clip_of({"objective": "gspo"})
    ((0.2, 0.28), None)
    """

    def part(name: str) -> Any:
        return config.get(f"group.{name}") or config.get(f"group.{name}.name")

    others = ("surrogate.delta", "surrogate.dual", "off_policy_delta", "entropy_quantile", "divergence", "divergence.name", "mix")
    engine = str(config.get("rollout.engine") or config.get("rollout.engine.name") or "native")
    corrected = not engine_traits(engine).own_weights or config.get("rollout.engine.ahead")
    if any(config.get(f"group.{name}") for name in others) or corrected:
        return None
    preset = CLIPPED.get(str(config.get("objective")))
    if part("ratio") not in ("token", None) or (part("ratio") is None and preset is None):
        return None
    if part("surrogate") is None:
        return preset
    if part("surrogate") != "clipped":
        return None
    return float(config.get("group.surrogate.low", 0.2)), float(config.get("group.surrogate.high", 0.2))


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


def overview(source: Source, step: int, kind: str = TRAINING) -> Json:
    """A step's groups, the most informative first: rewards, finish, lengths, how many different answers."""
    names = reward_names(source.columns(step, kind))
    table = source.table(step, [*OVERVIEW, *(f"rewards/{name}" for name in names)], kind)
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
                "prompt": excerpt(prompt),
                "rewards": plain(reward[rows]),
                "lengths": length[rows].tolist(),
                "finish": finish[rows],
                "spread": spread(reward[rows]),
                "mean": mean(reward[rows]),
                "distinct": len(set(texts.slice(int(start), int(end - start)).to_pylist())),
            }
        )
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


def group(source: Source, step: int, place: int, kind: str = TRAINING) -> Json:
    """A group with its completions, tokens and all; of long completions the beginning."""
    table = source.table(step, None, kind)
    table = table.filter(pc.equal(table.column("group"), place))  # type: ignore[attr-defined]
    if not len(table):
        raise DataError(f"{source.name} holds no group {place} in step {step}")
    names = reward_names(table.column_names)
    rows = table.slice(0, CROWD).to_pylist()
    first = rows[0]
    prompt = first.get("prompt_text") or ""
    clip = clip_of(source.config())
    shares = _gradient_total(rows, clip)
    vocabulary = source.vocabulary()
    row = first.get("row")
    return {
        "step": step,
        "kind": kind,
        "group": place,
        "key": key_of(prompt),
        "prompt": prompt[:CHARACTERS],
        "prompt_length": len(prompt),
        "row": _loaded(row),
        "sampling": _loaded(first.get("sampling")),
        "functions": names,
        "size": len(table),
        "completions": [_completion(row, names, vocabulary, (shares, clip), 0) for row in rows],
        "quantities": _present(rows, (shares, clip)),
    }


def more(source: Source, step: int, place: int, index: int, begin: int, kind: str = TRAINING) -> Json:
    """A completion from its token (or character) `begin` on."""
    table = source.table(step, None, kind)
    table = table.filter(pc.equal(table.column("group"), place))  # type: ignore[attr-defined]
    rows = table.to_pylist()
    matching = [row for row in rows if row["index"] == index]
    clip = clip_of(source.config())
    if not matching:
        raise DataError(f"{source.name} holds no completion {index} in group {place} of step {step}")
    names, scale = reward_names(table.column_names), (_gradient_total(rows, clip), clip)
    return _completion(matching[0], names, source.vocabulary(), scale, begin)


def _completion(row: Mapping[str, Any], names: Sequence[str], known: Vocabulary | None, scale: GroupGradient, begin: int) -> Json:
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
        shown["messages"] = _loaded(row["messages"])
    episode = _loaded(row.get("episode"))
    if isinstance(episode, dict):
        shown["episode"] = _episode(episode)
    if ids is None or known is None:
        if isinstance(episode, dict) and episode.get("messages"):
            shown["messages"] = episode["messages"]
        return {**shown, "length": len(text), "unit": "characters", "text": text[begin : begin + CHARACTERS]}
    end = begin + TOKENS
    columns = {name: values[begin:end] for name, values in token_columns(row, scale).items()}
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


GroupGradient = tuple[float, tuple[float, float] | None]
"""The sum of `_gradient` over a group, and the clip range that it was taken with."""


def token_columns(row: Mapping[str, Any], scale: GroupGradient = (math.nan, None)) -> dict[str, np.ndarray]:
    """The quantities of a completion's tokens (n,), as far as they were recorded; without it all but the gradient."""

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
    gradient = _gradient(row, scale[1])
    if gradient is not None and scale[0] > 0.0:
        columns["gradient"] = gradient / scale[0]
    version = column("version")
    columns |= {"version": version, "behavior": behavior}
    return {name: values for name, values in columns.items() if values is not None and values.size == len(row["completion_ids"])}


def _gradient(row: Mapping[str, Any], clip: tuple[float, float] | None) -> np.ndarray | None:
    """(n,): |d loss / d log-prob| by the clipped surrogate at the last update; None without a clip range, or a weight."""
    weight = row.get("update/weight")
    if clip is None or not weight or not row.get("advantages"):
        return None
    behavior, advantage = np.asarray(row["behavior_logp"], np.float64), np.asarray(row["advantages"], np.float64)
    seen = np.asarray(row.get("update/last_logp") or row.get("current_logp") or behavior, np.float64)
    ratio = np.exp(np.clip(seen - behavior, -20.0, 20.0))
    cut = ((advantage > 0.0) & (ratio > 1.0 + clip[1])) | ((advantage < 0.0) & (ratio < 1.0 - clip[0]))
    return np.where(cut, 0.0, np.asarray(weight) * np.abs(advantage) * ratio)


def _gradient_total(rows: Sequence[Mapping[str, Any]], clip: tuple[float, float] | None) -> float:
    parts = [_gradient(row, clip) for row in rows]
    return float(sum(part.sum() for part in parts if part is not None))


def _present(rows: Sequence[Mapping[str, Any]], scale: GroupGradient) -> dict[str, list[float]]:
    """The quantities that the group has, each with the range of its scale: symmetric around 0 where it has a sign."""
    columns = [token_columns(row, scale) for row in rows if row.get("completion_ids")]
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


def _loaded(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except ValueError:
        return None
