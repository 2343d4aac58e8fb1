"""Steps as tables, written and read: the format of a run's Parquet files, and of groups sent between processes.

Importing this file does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.records import Branch, Episode, Finish, Prompt, Rollout, Sampling, Scored, Step, ToolCall, Turn

Columns = list[list[np.ndarray]]
"""Of each group and each of its completions, a number per token."""


def groups_to_bytes(groups: Sequence[Scored]) -> bytes:
    """Scored groups as the bytes of a Parquet file, for `groups_from_bytes`."""
    sink = pa.BufferOutputStream()
    pq.write_table(table_of(Step(number=0, metrics={}, groups=groups)), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def groups_from_bytes(data: bytes) -> list[Scored]:
    """The groups that `groups_to_bytes` wrote, as they were."""
    return groups_of(pq.read_table(pa.BufferReader(data)))[0]


def table_of(step: Step) -> pa.Table:
    """One row per completion of a step: text, ids, log-probs, rewards, advantages, everything that a `Step` is made from.

    Columns: step, group, prompt_id, prompt_text, prompt_ids, prompt_messages (JSON, null: a text), prompt_wrapped, prompt_cut
    (as in `Prompt`), row (JSON), index, completion_text, completion_ids, behavior_logp,
    current_logp, advantages, trained, version, finish, eos_ids, sampling (JSON), support, episode (JSON, where there is one),
    `rewards/NAME` per function, reward, `extra/NAME` (JSON) per column that reward functions logged and `logged` (JSON), what they
    logged as metrics, `signals/NAME` per token signal (reference_logp ...), `update/NAME` per column of the step (weight ...).
    Lists have one entry per completion token; null: was not computed.
    """
    names = step.groups[0].names if step.groups else ()
    assert all(group.names == names for group in step.groups), "the groups of a step share their reward functions"
    signals = sorted({name for group in step.groups for name in group.signals})
    assert not {name for name in step.columns if "/" in name}, "a column's name is one word"
    rows = [_row(step, place, i, names, signals) for place, group in enumerate(step.groups) for i in range(len(group.rollouts))]
    return pa.Table.from_pylist(rows, schema=_schema(names, signals, step))


def _schema(names: Sequence[str], signals: Sequence[str], step: Step) -> pa.Schema:
    def per_token(columns: Iterator[np.ndarray]) -> pa.DataType:
        return pa.list_(pa.float32() if all(column.dtype == np.float32 for column in columns) else pa.float64())

    rollouts = [rollout for group in step.groups for rollout in group.rollouts]
    fields: list[tuple[str, pa.DataType]] = [
        ("step", pa.int64()),
        ("group", pa.int64()),
        ("prompt_id", pa.string()),
        ("prompt_text", pa.string()),
        ("prompt_ids", pa.list_(pa.int64())),
        ("prompt_messages", pa.string()),
        ("prompt_wrapped", pa.bool_()),
        ("prompt_cut", pa.int64()),
        ("row", pa.string()),
        ("index", pa.int64()),
        ("completion_text", pa.string()),
        ("completion_ids", pa.list_(pa.int64())),
        ("behavior_logp", per_token(rollout.behavior_logp for rollout in rollouts)),
        ("current_logp", per_token(column for group in step.current_logp for column in group if column.size)),
        ("advantages", per_token(column for group in step.advantages for column in group)),
        ("trained", pa.list_(pa.bool_())),
        ("version", pa.list_(pa.int64())),
        ("finish", pa.string()),
        ("eos_ids", pa.list_(pa.int64())),
        ("sampling", pa.string()),
        ("support", pa.list_(pa.list_(pa.int64()))),
        ("episode", pa.string()),
        *((f"rewards/{name}", pa.float64()) for name in names),
        ("reward", pa.float64()),
    ]
    fields += [(f"extra/{name}", pa.string()) for name in _extras(step)]
    fields += [("logged", pa.string())] if any(group.logged for group in step.groups) else []
    for name in signals:
        fields.append((f"signals/{name}", per_token(column for group in step.groups for column in group.signals.get(name, ()))))
    for name, column in sorted(step.columns.items()):
        fields.append((f"update/{name}", per_token(values for group in column for values in group if values.size)))
    weights = step.groups[0].weights if step.groups else ()
    verdict = step.groups[0].verdict if step.groups else None
    about = {
        "reward_names": json.dumps(list(names)),
        "reward_weights": json.dumps(list(weights)),
        "verdict": json.dumps(verdict),
    }
    return pa.schema(fields, metadata={f"groupwise.{key}": value for key, value in about.items()})


def _row(step: Step, place: int, i: int, names: Sequence[str], signals: Sequence[str]) -> dict[str, Any]:
    group = step.groups[place]
    rollout, prompt = group.rollouts[i], group.prompt
    current = step.current_logp[place][i] if place < len(step.current_logp) and i < len(step.current_logp[place]) else None
    sampling = {name: getattr(rollout.sampling, name) for name in Sampling.__dataclass_fields__}
    return {
        "step": step.number,
        "group": place,
        "prompt_id": prompt.id,
        "prompt_text": _encodable(prompt.text),
        "prompt_ids": prompt.tokens,
        "prompt_messages": None if prompt.messages is None else json.dumps(jsonable(prompt.messages), default=str),
        "prompt_wrapped": prompt.wrapped,
        "prompt_cut": prompt.cut,
        "row": json.dumps(jsonable(prompt.row), default=str),
        "index": rollout.index,
        "completion_text": _encodable(rollout.text),
        "completion_ids": rollout.tokens,
        "behavior_logp": rollout.behavior_logp,
        "current_logp": current,
        "advantages": step.advantages[place][i] if place < len(step.advantages) else None,
        "trained": rollout.trained,
        "version": rollout.version,
        "finish": str(rollout.finish),
        "eos_ids": list(rollout.eos_ids),
        "sampling": json.dumps(sampling),
        "support": None if rollout.support is None else list(rollout.support),
        "episode": None if rollout.episode is None else _episode_text(rollout.episode),
        **{f"rewards/{name}": float(value) for name, value in zip(names, group.rewards[i], strict=True)},
        "reward": float(group.reward[i]),
        **{f"extra/{name}": json.dumps(group.extra[name][i]) if name in group.extra else None for name in _extras(step)},
        "logged": json.dumps(dict(group.logged)),
        **{f"signals/{name}": group.signals[name][i] if name in group.signals else None for name in signals},
        **{f"update/{name}": column[place][i] if column[place][i].size else None for name, column in step.columns.items()},
    }


def _extras(step: Step) -> list[str]:
    """Names of what reward functions logged of completions."""
    return sorted({name for group in step.groups for name in group.extra})


def _encodable(text: str) -> str:
    """Lone surrogates, which UTF-8 cannot hold, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def groups_of(table: pa.Table) -> tuple[list[Scored], Columns, Columns]:
    """The groups of a table, their advantages and their current log-probs."""
    about = {
        key.decode(): json.loads(value) for key, value in (table.schema.metadata or {}).items() if key.startswith(b"groupwise.")
    }
    names, weights = tuple(about["groupwise.reward_names"]), tuple(about["groupwise.reward_weights"])
    kinds = {field.name: field.type.value_type.to_pandas_dtype() for field in table.schema if pa.types.is_list(field.type)}
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        groups.setdefault(row["group"], []).append(row)
    signals = [field.name for field in table.schema if field.name.startswith("signals/")]
    scored, advantages, current = [], [], []
    for rows in groups.values():
        scored.append(replace(_scored(rows, names, weights, signals, kinds), verdict=about.get("groupwise.verdict")))
        advantages.append([np.array(row["advantages"], kinds["advantages"]) for row in rows if row["advantages"] is not None])
        current.append([np.array(row["current_logp"], kinds["current_logp"]) for row in rows if row["current_logp"] is not None])
    return scored, advantages, current


def columns_of(table: pa.Table) -> dict[str, Columns]:
    """The further columns of a table's step, by name; empty lists of numbers where nothing was computed."""
    found: dict[str, Columns] = {}
    groups = table.column("group").to_pylist()
    for field in table.schema:
        if field.name.startswith("update/"):
            columns: dict[int, list[np.ndarray]] = {}
            kind = field.type.value_type.to_pandas_dtype()
            for group, values in zip(groups, table.column(field.name).to_pylist(), strict=True):
                columns.setdefault(group, []).append(np.array(values if values is not None else [], kind))
            found[field.name.removeprefix("update/")] = list(columns.values())
    return found


def _scored(
    rows: Sequence[Mapping[str, Any]],
    names: tuple[str, ...],
    weights: tuple[float, ...],
    signals: Sequence[str],
    kinds: Mapping[str, Any],
) -> Scored:
    first = rows[0]
    tokens = np.array(first["prompt_ids"], np.int64)
    messages = first.get("prompt_messages")  # older tables have none of the next three
    prompt = Prompt(
        id=first["prompt_id"],
        tokens=tokens,
        text=first["prompt_text"],
        row=json.loads(first["row"]),
        messages=None if messages is None else tuple(json.loads(messages)),
        wrapped=bool(first.get("prompt_wrapped")),
        cut=first.get("prompt_cut") or 0,
    )
    return Scored(
        rollouts=tuple(_rollout(row, prompt, kinds) for row in rows),
        names=names,
        rewards=np.array([[row[f"rewards/{name}"] for name in names] for row in rows], np.float64).reshape(len(rows), len(names)),
        reward=np.array([row["reward"] for row in rows], np.float64),
        weights=weights,
        signals={
            name.removeprefix("signals/"): tuple(np.array(row[name], kinds[name]) for row in rows)
            for name in signals
            if first[name] is not None
        },
        logged=json.loads(first.get("logged") or "{}"),
        extra={
            name.removeprefix("extra/"): tuple(json.loads(row[name]) for row in rows)
            for name in first
            if name.startswith("extra/") and first[name] is not None
        },
    )


def _rollout(row: Mapping[str, Any], prompt: Prompt, kinds: Mapping[str, Any]) -> Rollout:
    sampling = json.loads(row["sampling"])
    return Rollout(
        prompt=prompt,
        index=row["index"],
        tokens=np.array(row["completion_ids"], np.int64),
        behavior_logp=np.array(row["behavior_logp"], kinds["behavior_logp"]),
        finish=Finish(row["finish"]),
        eos_ids=tuple(row["eos_ids"]),
        sampling=Sampling(**{**sampling, "stop": tuple(sampling["stop"])}),
        text=row["completion_text"],
        trained=np.array(row["trained"], bool),
        version=np.array(row["version"], np.int64),
        support=None if row["support"] is None else tuple(np.array(ids, np.int64) for ids in row["support"]),
        episode=_episode(row.get("episode")),  # older tables have no such column
    )


def _episode_text(episode: Episode) -> str:
    """An episode as JSON, for `_episode`."""
    told = {"turns": [asdict(turn) for turn in episode.turns], "messages": episode.messages}
    told |= {"branches": [{"begin": branch.begin, "context": branch.context} for branch in episode.branches]}
    told |= {"reward": episode.reward, "environment": episode.environment}
    return _encodable(json.dumps(jsonable(told), default=str))


def _episode(text: str | None) -> Episode | None:
    """What `_episode_text` wrote."""
    if text is None:
        return None
    found = json.loads(text)
    turns = tuple(
        Turn(
            **{
                **turn,
                "finish": Finish(turn["finish"]),
                "calls": tuple(ToolCall(**{**call, "seconds": float(call["seconds"])}) for call in turn["calls"]),
                "seconds": float(turn["seconds"]),
                "reward": None if turn["reward"] is None else float(turn["reward"]),
            }
        )
        for turn in found["turns"]
    )
    branches = tuple(Branch(begin=one["begin"], context=np.array(one["context"], np.int64)) for one in found["branches"])
    reward = None if found["reward"] is None else float(found["reward"])
    messages = tuple(found["messages"])
    return Episode(turns=turns, messages=messages, branches=branches, reward=reward, environment=found["environment"])


def jsonable(value: Any) -> Any:
    """Numbers that JSON does not know become the text that `float()` reads back; numpy's become Python's."""
    match value:
        case Mapping():
            return {str(key): jsonable(inner) for key, inner in value.items()}
        case list() | tuple():
            return [jsonable(inner) for inner in value]
        case np.generic() | np.ndarray():
            return jsonable(value.tolist())
        case float() if not math.isfinite(value):
            return str(value)
    return value
