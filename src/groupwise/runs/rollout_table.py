"""Steps as tables, written and read: the format of a run's Parquet files, and of groups in its
checkpoints.

Importing this file does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from groupwise.records import (
    Branch,
    Episode,
    Finish,
    Prompt,
    Rollout,
    RolloutGroup,
    Sampling,
    Step,
    Turn,
)

UNPACKED, RATIO = 1 << 28, 200
"""A Parquet file may unpack to so many bytes, or so many times its own: a step has log-probs, which
do not shrink.
"""

PER_TOKEN = pa.list_(pa.float64())
"""The type of a column with a number per token, or the same in float32."""
_IDS = pa.list_(pa.int64())


class _Place(NamedTuple):
    """A completion of a step."""

    step: Step
    group: int
    index: int

    @property
    def scored(self) -> RolloutGroup:
        return self.step.groups[self.group]

    @property
    def rollout(self) -> Rollout:
        return self.scored.rollouts[self.index]

    @property
    def prompt(self) -> Prompt:
        return self.scored.prompt

    def of(self, columns: Sequence[Sequence[np.ndarray]]) -> np.ndarray | None:
        """Return its numbers in columns, which may end before it."""
        groups = columns[self.group : self.group + 1]
        return groups[0][self.index] if groups and self.index < len(groups[0]) else None

    def part(
        self,
        columns: Mapping[str, Sequence[Any]],
        name: str,
        change: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        """What a column of its group holds of it; None where the group has no such column."""
        return change(columns[name][self.index]) if name in columns else None


_VALUES: dict[str, tuple[pa.DataType, Callable[[_Place], Any]]] = {
    "step": (pa.int64(), lambda at: at.step.number),
    "group": (pa.int64(), lambda at: at.group),
    "prompt_id": (pa.string(), lambda at: at.prompt.id),
    "prompt_text": (pa.string(), lambda at: _encodable(at.prompt.text)),
    "prompt_ids": (_IDS, lambda at: at.prompt.tokens),
    "prompt_messages": (
        pa.string(),
        lambda at: None if at.prompt.messages is None else _json(at.prompt.messages),
    ),
    "prompt_wrapped": (pa.bool_(), lambda at: at.prompt.wrapped),
    "prompt_cut": (pa.int64(), lambda at: at.prompt.cut),
    "row": (pa.string(), lambda at: _json(at.prompt.row)),
    "index": (pa.int64(), lambda at: at.rollout.index),
    "completion_text": (pa.string(), lambda at: _encodable(at.rollout.text)),
    "completion_ids": (_IDS, lambda at: at.rollout.tokens),
    "behavior_logp": (PER_TOKEN, lambda at: at.rollout.behavior_logp),
    "current_logp": (PER_TOKEN, lambda at: at.of(at.step.current_logp)),
    "advantages": (PER_TOKEN, lambda at: at.of(at.step.advantages)),
    "trained": (pa.list_(pa.bool_()), lambda at: at.rollout.trained),
    "version": (_IDS, lambda at: at.rollout.version),
    "finish": (pa.string(), lambda at: str(at.rollout.finish)),
    "eos_ids": (_IDS, lambda at: list(at.rollout.eos_ids)),
    "sampling": (
        pa.string(),
        lambda at: json.dumps(asdict(at.rollout.sampling)),
    ),
    "support": (
        pa.list_(_IDS),
        lambda at: None if at.rollout.support is None else list(at.rollout.support),
    ),
    "episode": (
        pa.string(),
        lambda at: None if at.rollout.episode is None else _episode_text(at.rollout.episode),
    ),
}
"""The columns that every table has: their types, and what stands there of a completion."""
COLUMNS = {name: kind for name, (kind, _) in _VALUES.items()} | {
    "reward": pa.float64(),
    "logged": pa.string(),
    "run": pa.string(),
}
"""All columns without a prefix, and their types.  `run` is added by who reads several runs."""
FAMILIES = {
    "rewards/": pa.float64(),
    "extra/": pa.string(),
    "signals/": PER_TOKEN,
    "update/": PER_TOKEN,
}
"""The types of columns with such a prefix."""
_OF_TOKENS = (
    "completion_ids",
    "behavior_logp",
    "current_logp",
    "advantages",
    "trained",
    "version",
    "signals/",
    "update/",
)
_ALWAYS = (
    "group",
    "index",
    "prompt_text",
    "completion_text",
    "completion_ids",
    "behavior_logp",
    "trained",
    "finish",
    "reward",
)
_NEVER_NULL = (
    "group",
    "index",
    "completion_text",
    "completion_ids",
    "behavior_logp",
    "trained",
    "version",
    "finish",
)

Columns = list[list[np.ndarray]]
"""A number per token, for each group and each of its completions."""


def groups_to_bytes(groups: Sequence[RolloutGroup]) -> bytes:
    """RolloutGroup groups as the bytes of a Parquet file, for `groups_from_bytes`."""
    sink = pa.BufferOutputStream()
    pq.write_table(table_of(Step(number=0, metrics={}, groups=groups)), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def groups_from_bytes(data: bytes) -> list[RolloutGroup]:
    """The groups that `groups_to_bytes` wrote, as they were."""
    return groups_of(pq.read_table(pa.BufferReader(data)))[0]


def state_to_bytes(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a rollout that was begun (`PendingRollout.state`) with its groups as bytes."""
    saved = dict(state)
    if "groups" in saved:
        saved["groups"] = groups_to_bytes(saved["groups"])
    return saved


def state_from_bytes(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state that `state_to_bytes` wrote."""
    state = dict(saved)
    if "groups" in state:
        state["groups"] = groups_from_bytes(state["groups"])
    return state


def table_of(step: Step) -> pa.Table:
    """One row per completion of a step: text, ids, log-probs, rewards, advantages, everything that
    a `Step` is made from.

    Columns: step, group, prompt_id, prompt_text, prompt_ids, prompt_messages (JSON, null: a text),
        prompt_wrapped, prompt_cut (as in `Prompt`), row (JSON), index, completion_text,
        completion_ids, behavior_logp,
    current_logp, advantages, trained, version, finish, eos_ids, sampling (JSON), support, episode
    (JSON, where there is one), `rewards/NAME` per function, reward, `extra/NAME` (JSON) per column
    that reward functions logged and `logged` (JSON), what they logged as metrics, `signals/NAME`
    per token signal (reference_logp ...), `update/NAME` per column of the step (weight ...). Lists
    have one entry per completion token; null: was not computed.
    """
    names, weights, verdict = (), (), None
    if step.groups:
        first = step.groups[0]
        names, weights, verdict = first.names, first.weights, first.verdict
    assert all(group.names == names for group in step.groups), (
        "the groups of a step share their reward functions"
    )
    assert not {name for name in step.columns if "/" in name}, "a column's name is one word"
    places = [
        _Place(step, group, i)
        for group, scored in enumerate(step.groups)
        for i in range(len(scored.rollouts))
    ]
    columns: dict[str, pa.Array] = {}

    def add(name: str, values: Callable[[_Place], Any], kind: pa.DataType) -> None:
        listed = [values(at) for at in places]
        if kind is PER_TOKEN and all(
            one.dtype == np.float32 for one in listed if one is not None and one.size
        ):
            kind = pa.list_(pa.float32())
        columns[name] = pa.array(listed, kind)

    for name, (kind, values) in _VALUES.items():
        add(name, values, kind)
    for k, name in enumerate(names):
        add(f"rewards/{name}", lambda at, k=k: float(at.scored.rewards[at.index][k]), pa.float64())
    add("reward", lambda at: float(at.scored.reward[at.index]), pa.float64())
    for name in sorted({name for group in step.groups for name in group.extra}):
        add(
            f"extra/{name}",
            lambda at, name=name: at.part(at.scored.extra, name, json.dumps),
            pa.string(),
        )
    if any(group.logged for group in step.groups):
        add("logged", _logged, pa.string())
    for name in sorted({name for group in step.groups for name in group.signals}):
        add(f"signals/{name}", lambda at, name=name: at.part(at.scored.signals, name), PER_TOKEN)
    for name, column in sorted(step.columns.items()):
        add(
            f"update/{name}",
            lambda at, column=column: (
                values if (values := column[at.group][at.index]).size else None
            ),
            PER_TOKEN,
        )
    about = {"reward_names": list(names), "reward_weights": list(weights), "verdict": verdict}
    return pa.table(
        columns, metadata={f"groupwise.{key}": json.dumps(value) for key, value in about.items()}
    )


def known_columns(schema: pa.Schema) -> list[str]:
    """The columns of a table that `table_of` may have made; others are left out.

    Raises ValueError for one that is missing or of another type.
    """
    known = []
    if missing := [name for name in _ALWAYS if name not in schema.names]:
        raise ValueError(f"it has no column {missing[0]}")
    for field in schema:
        expected = COLUMNS.get(field.name) or FAMILIES.get(family(field.name))
        if expected is None:
            continue
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        real = pa.types.is_list(kind) and pa.types.is_floating(kind.value_type)
        if not (real if expected is PER_TOKEN else kind == expected):
            raise ValueError(f"its column {field.name} is of type {field.type}")
        if schema.get_all_field_indices(field.name)[1:]:
            raise ValueError(f"it has two columns {field.name}")
        known.append(field.name)
    return known


def check_values(table: pa.Table) -> None:
    """Raises ValueError for columns of a table whose values `table_of` cannot have made: what reads
    them need not ask again.
    """
    if not len(table):
        raise ValueError("it holds no completions")
    lengths: tuple[str, pa.ChunkedArray] | None = None
    for name in table.column_names:
        column, kind = table.column(name), family(name)
        if name in _NEVER_NULL and column.null_count:
            raise ValueError(f"its column {name} has gaps")
        if name in ("group", "index"):
            bounds = pc.min_max(column).as_py()  # type: ignore[attr-defined]
            if bounds["min"] < 0 or bounds["max"] >= 1 << 31:
                raise ValueError(f"its column {name} goes from {bounds['min']} to {bounds['max']}")
        if (name == "reward" or kind == "rewards/") and pc.any(pc.is_inf(column)).as_py():  # type: ignore[attr-defined]
            raise ValueError(f"its column {name} has infinite numbers")
        if name in _OF_TOKENS or kind in _OF_TOKENS:
            count = pc.list_value_length(column)  # type: ignore[attr-defined]
            other = None if lengths is None else pc.not_equal(count, lengths[1])  # type: ignore[attr-defined]
            if (
                other is not None and name not in _NEVER_NULL
            ):  # what was not computed has no numbers
                other = pc.and_(other, pc.greater(count, 0))  # type: ignore[attr-defined]
            if lengths is not None and pc.any(other).as_py():  # type: ignore[attr-defined]
                raise ValueError(
                    f"its columns {lengths[0]} and {name} have other numbers of tokens"
                )
            lengths = lengths or ((name, count) if name in _NEVER_NULL else None)


def bounded_table(
    data: bytes, choose: Callable[[pa.Schema], list[str]] = lambda schema: schema.names
) -> pa.Table:
    """A Parquet file that does not unpack to much more than it is.  Raises ValueError.

    choose: the columns to read, of the file's schema.
    A column of text is read as the texts that differ, because one of them may stand for millions of
    rows.
    """
    room = max(UNPACKED, RATIO * len(data))
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as plain:
            schema, about = plain.schema_arrow, plain.metadata
            names = choose(schema)
            texts = [
                field.name
                for field in schema
                if pa.types.is_string(field.type) and field.name in names
            ]
            groups = [about.row_group(place) for place in range(about.num_row_groups)]
        chunks = [group.column(place) for group in groups for place in range(about.num_columns)]
        size = sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks)
        if max(size, about.num_rows) > room:
            raise ValueError(f"it unpacks to more than {room:,} bytes")
        with pq.ParquetFile(pa.BufferReader(data), read_dictionary=texts) as file:
            table = file.read(names, use_threads=False)
        if sum(_text_bytes(column) for column in table.columns) > room:
            raise ValueError(f"it unpacks to more than {room:,} bytes")
        return table.cast(
            pa.schema([schema.field(name) for name in names], metadata=schema.metadata)
        )
    except (pa.ArrowException, OSError, OverflowError, KeyError) as error:
        raise ValueError(str(error)) from error


def _text_bytes(column: pa.ChunkedArray) -> int:
    """Bytes of a column's texts, each as often as it stands there."""
    total = 0
    for chunk in (
        column.chunks
        if pa.types.is_dictionary(column.type) and pa.types.is_string(column.type.value_type)
        else ()
    ):
        lengths = pc.binary_length(chunk.dictionary).cast(pa.int64())  # type: ignore[attr-defined]
        total += pc.sum(lengths.take(chunk.indices)).as_py() or 0  # type: ignore[attr-defined]
    return total


def family(name: str) -> str:
    """The prefix of a column's name, `rewards/`; nothing for one without.

    >>> family("rewards/accuracy"), family("reward")
    ('rewards/', '')
    """
    return name.partition("/")[0] + "/" if "/" in name else ""


def _logged(at: _Place) -> str:
    return json.dumps(
        {name: value if np.isfinite(value) else None for name, value in at.scored.logged.items()}
    )


def _json(value: Any) -> str:
    return json.dumps(jsonable(value), default=str)


def _encodable(text: str) -> str:
    """Lone surrogates, which UTF-8 cannot hold, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def groups_of(table: pa.Table) -> tuple[list[RolloutGroup], Columns, Columns]:
    """The groups of a table, their advantages and their current log-probs."""
    about = {
        key.decode(): json.loads(value)
        for key, value in (table.schema.metadata or {}).items()
        if key.startswith(b"groupwise.")
    }
    names, weights = (
        tuple(about["groupwise.reward_names"]),
        tuple(about["groupwise.reward_weights"]),
    )
    kinds = {
        field.name: field.type.value_type.to_pandas_dtype()
        for field in table.schema
        if pa.types.is_list(field.type)
    }
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        groups.setdefault(row["group"], []).append(row)
    signals = [field.name for field in table.schema if field.name.startswith("signals/")]
    scored, advantages, current = [], [], []
    for rows in groups.values():
        scored.append(
            replace(
                _scored(rows, names, weights, signals, kinds),
                verdict=about.get("groupwise.verdict"),
            )
        )
        advantages.append(
            [
                np.array(row["advantages"], kinds["advantages"])
                for row in rows
                if row["advantages"] is not None
            ]
        )
        current.append(
            [
                np.array(row["current_logp"], kinds["current_logp"])
                for row in rows
                if row["current_logp"] is not None
            ]
        )
    return scored, advantages, current


def columns_of(table: pa.Table) -> dict[str, Columns]:
    """The further columns of a table's step, by name; empty lists of numbers where nothing was
    computed.
    """
    by_name: dict[str, Columns] = {}
    groups = table.column("group").to_pylist()
    for field in table.schema:
        if field.name.startswith("update/"):
            columns: dict[int, list[np.ndarray]] = {}
            kind = field.type.value_type.to_pandas_dtype()
            for group, values in zip(groups, table.column(field.name).to_pylist(), strict=True):
                columns.setdefault(group, []).append(
                    np.array(values if values is not None else [], kind)
                )
            by_name[field.name.removeprefix("update/")] = list(columns.values())
    return by_name


def _scored(
    rows: Sequence[Mapping[str, Any]],
    names: tuple[str, ...],
    weights: tuple[float, ...],
    signals: Sequence[str],
    kinds: Mapping[str, Any],
) -> RolloutGroup:
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
    return RolloutGroup(
        rollouts=tuple(_rollout(row, prompt, kinds) for row in rows),
        names=names,
        rewards=np.array(
            [[row[f"rewards/{name}"] for name in names] for row in rows], np.float64
        ).reshape(len(rows), len(names)),
        reward=np.array([row["reward"] for row in rows], np.float64),
        weights=weights,
        signals={
            name.removeprefix("signals/"): tuple(np.array(row[name], kinds[name]) for row in rows)
            for name in signals
            if first[name] is not None
        },
        logged={
            name: np.nan if value is None else value
            for name, value in json.loads(first.get("logged") or "{}").items()
        },
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
        support=(
            None
            if row["support"] is None
            else tuple(np.array(ids, np.int64) for ids in row["support"])
        ),
        episode=_episode(row.get("episode")),  # older tables have no such column
    )


def _episode_text(episode: Episode) -> str:
    """An episode as JSON, for `_episode`."""
    fields = {"turns": [asdict(turn) for turn in episode.turns], "messages": episode.messages}
    fields |= {
        "branches": [
            {"begin": branch.begin, "context": branch.context} for branch in episode.branches
        ]
    }
    fields |= {"reward": episode.reward, "environment": episode.environment}
    fields |= {"opening": episode.opening, "prompt_text": episode.prompt_text}
    return _encodable(_json(fields))


_TURNS = TypeAdapter(tuple[Turn, ...])


def _episode(text: str | None) -> Episode | None:
    """What `_episode_text` wrote."""
    if text is None:
        return None
    fields = json.loads(text)
    return Episode(
        turns=_TURNS.validate_python(fields["turns"]),
        messages=tuple(fields["messages"]),
        branches=tuple(
            Branch(begin=one["begin"], context=np.array(one["context"], np.int64))
            for one in fields["branches"]
        ),
        reward=None if fields["reward"] is None else float(fields["reward"]),
        environment=fields["environment"],
        opening=fields.get("opening", ""),  # older tables have neither
        prompt_text=fields.get("prompt_text", ""),
    )


def jsonable(value: Any) -> Any:
    """Numbers that JSON does not know become the text that `float()` reads back; numpy's become
    Python's.
    """
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
