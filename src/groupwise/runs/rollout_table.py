"""Steps as tables, written and read: the format of a run's Parquet files, and of groups in its
checkpoints.

Importing this file does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from groupwise.data.images import Picture, PromptImages
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


COLUMNS: dict[str, pa.DataType] = {
    "step": pa.int64(),
    "group": pa.int64(),
    "prompt_id": pa.string(),
    "prompt_text": pa.string(),
    "prompt_ids": _IDS,
    "prompt_messages": pa.string(),
    "prompt_wrapped": pa.bool_(),
    "prompt_cut": pa.int64(),
    "prompt_images": pa.list_(pa.string()),
    "row": pa.string(),
    "index": pa.int64(),
    "completion_text": pa.string(),
    "completion_ids": _IDS,
    "behavior_logp": PER_TOKEN,
    "current_logp": PER_TOKEN,
    "advantages": PER_TOKEN,
    "trained": pa.list_(pa.bool_()),
    "version": _IDS,
    "finish": pa.string(),
    "eos_ids": _IDS,
    "sampling": pa.string(),
    "support": pa.list_(_IDS),
    "episode": pa.string(),
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
MOST_FILES, LONGEST_FILE = 20, 4000
"""How many files of an episode's end are recorded, and how many characters of each."""
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
"""A number per token of each completion of each group."""


def groups_to_bytes(groups: Sequence[RolloutGroup]) -> bytes:
    """Return groups as the bytes of a Parquet file, for `groups_from_bytes`."""
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
        prompt_wrapped, prompt_cut (as in `Prompt`), prompt_images (digests, where a prompt has
        images), row (JSON), index, completion_text,
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
    rows: list[dict[str, Any]] = []
    for place, group in enumerate(step.groups):
        for index in range(len(group.rollouts)):
            row = _completion_values(step, place, index)
            row |= _reward_values(group, index)
            row |= _signal_values(group, index)
            for name, column in step.columns.items():
                values = column[place][index]
                row[f"update/{name}"] = values if values.size else None
            rows.append(row)
    columns: dict[str, pa.Array] = {}
    for name in _names_of_columns(step, names):
        columns[name] = _column([row.get(name) for row in rows], _type_of(name))
    about = {"reward_names": list(names), "reward_weights": list(weights), "verdict": verdict}
    metadata = {f"groupwise.{key}": json.dumps(value) for key, value in about.items()}
    return pa.table(columns, metadata=metadata)


def _names_of_columns(step: Step, rewards: Sequence[str]) -> list[str]:
    """Return the names of a step's columns, in the order of its table."""
    extra, signals, logged, images = set(), set(), False, False
    for group in step.groups:
        images = images or group.prompt.images is not None
        extra.update(group.extra)
        signals.update(group.signals)
        logged = logged or bool(group.logged)
    absent = {"reward", "logged", "run"} if images else {"reward", "logged", "run", "prompt_images"}
    names = [name for name in COLUMNS if name not in absent]
    names += [f"rewards/{name}" for name in rewards]
    names.append("reward")
    names += [f"extra/{name}" for name in sorted(extra)]
    if logged:
        names.append("logged")
    names += [f"signals/{name}" for name in sorted(signals)]
    names += [f"update/{name}" for name in sorted(step.columns)]
    return names


def _type_of(name: str) -> pa.DataType:
    """Return the type of a column."""
    return COLUMNS[name] if name in COLUMNS else FAMILIES[family(name)]


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return a column; numbers per token that are all float32 stay so."""
    if kind is PER_TOKEN:
        known = [one for one in values if one is not None and one.size]
        if all(one.dtype == np.float32 for one in known):
            kind = pa.list_(pa.float32())
    return pa.array(values, kind)


def _completion_values(step: Step, place: int, index: int) -> dict[str, Any]:
    """Return what the columns without a prefix hold of a completion, but its rewards."""
    group = step.groups[place]
    rollout, prompt = group.rollouts[index], group.prompt
    values: dict[str, Any] = {
        "step": step.number,
        "group": place,
        "prompt_id": prompt.id,
        "prompt_text": _encodable(prompt.text),
        "prompt_ids": prompt.tokens,
        "prompt_wrapped": prompt.wrapped,
        "prompt_cut": prompt.cut,
        "row": _json(prompt.row),
        "index": rollout.index,
        "completion_text": _encodable(rollout.text),
        "completion_ids": rollout.tokens,
        "behavior_logp": rollout.behavior_logp,
        "current_logp": _known_at(step.current_logp, place, index),
        "advantages": _known_at(step.advantages, place, index),
        "trained": rollout.trained,
        "version": rollout.version,
        "finish": str(rollout.finish),
        "eos_ids": list(rollout.eos_ids),
        "sampling": json.dumps(asdict(rollout.sampling)),
    }
    if prompt.messages is not None:
        values["prompt_messages"] = _json(prompt.messages)
    if prompt.images is not None:
        values["prompt_images"] = list(prompt.images.key)
    if rollout.support is not None:
        values["support"] = list(rollout.support)
    if rollout.episode is not None:
        values["episode"] = _episode_text(rollout.episode, prompt.row)
    return values


def _known_at(columns: Sequence[Sequence[np.ndarray]], place: int, index: int) -> np.ndarray | None:
    """Return a completion's numbers in columns that may end before it."""
    if place >= len(columns) or index >= len(columns[place]):
        return None
    return columns[place][index]


def _reward_values(group: RolloutGroup, index: int) -> dict[str, Any]:
    """Return what the columns of rewards hold of a completion."""
    values: dict[str, Any] = {"reward": float(group.reward[index]), "logged": _logged(group)}
    for k, name in enumerate(group.names):
        values[f"rewards/{name}"] = float(group.rewards[index][k])
    for name, column in group.extra.items():
        values[f"extra/{name}"] = json.dumps(column[index])
    return values


def _signal_values(group: RolloutGroup, index: int) -> dict[str, Any]:
    """Return what the columns of signals hold of a completion."""
    return {f"signals/{name}": column[index] for name, column in group.signals.items()}


def known_columns(schema: pa.Schema) -> list[str]:
    """The columns of a table that `table_of` may have made; others are left out.

    Raises ValueError for one that is missing or of another type.
    """
    known = []
    for name in _ALWAYS:
        if name not in schema.names:
            raise ValueError(f"it has no column {name}")
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
        if name == "reward" or kind == "rewards/":
            infinite = pc.any(pc.is_inf(column))  # type: ignore[attr-defined]
            if infinite.as_py():
                raise ValueError(f"its column {name} has infinite numbers")
        if name in _OF_TOKENS or kind in _OF_TOKENS:
            count = pc.list_value_length(column)  # type: ignore[attr-defined]
            if lengths is not None:
                first_name, first_count = lengths
                differs = pc.not_equal(count, first_count)  # type: ignore[attr-defined]
                if name not in _NEVER_NULL:  # what was not computed has no numbers
                    differs = pc.and_(differs, pc.greater(count, 0))  # type: ignore[attr-defined]
                if pc.any(differs).as_py():  # type: ignore[attr-defined]
                    raise ValueError(
                        f"its columns {first_name} and {name} have other numbers of tokens"
                    )
            elif name in _NEVER_NULL:
                lengths = (name, count)


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
            texts = [name for name in names if pa.types.is_string(schema.field(name).type)]
        size = 0
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            for place in range(about.num_columns):
                chunk = group.column(place)
                size += max(chunk.total_uncompressed_size, 8 * chunk.num_values)
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
    if not pa.types.is_dictionary(column.type) or not pa.types.is_string(column.type.value_type):
        return total
    for chunk in column.chunks:
        lengths = pc.binary_length(chunk.dictionary).cast(pa.int64())  # type: ignore[attr-defined]
        total += pc.sum(lengths.take(chunk.indices)).as_py() or 0  # type: ignore[attr-defined]
    return total


def family(name: str) -> str:
    """The prefix of a column's name, `rewards/`; nothing for one without.

    >>> family("rewards/accuracy"), family("reward")
    ('rewards/', '')
    """
    prefix, slash, _ = name.partition("/")
    return prefix + slash if slash else ""


def _logged(group: RolloutGroup) -> str:
    """Return what the reward functions of a group logged; null is not finite."""
    logged = {}
    for name, value in group.logged.items():
        logged[name] = value if np.isfinite(value) else None
    return json.dumps(logged)


def _json(value: Any) -> str:
    return json.dumps(jsonable(value), default=str)


def _encodable(text: str) -> str:
    """Lone surrogates, which UTF-8 cannot hold, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def groups_of(table: pa.Table) -> tuple[list[RolloutGroup], Columns, Columns]:
    """The groups of a table, their advantages and their current log-probs."""
    about: dict[str, Any] = {}
    for key, value in (table.schema.metadata or {}).items():
        if key.startswith(b"groupwise."):
            about[key.decode().removeprefix("groupwise.")] = json.loads(value)
    kinds, signals = {}, []
    for field in table.schema:
        if pa.types.is_list(field.type):
            kinds[field.name] = field.type.value_type.to_pandas_dtype()
        if field.name.startswith("signals/"):
            signals.append(field.name)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        groups.setdefault(row["group"], []).append(row)
    names, weights = tuple(about["reward_names"]), tuple(about["reward_weights"])
    scored, advantages, current = [], [], []
    for rows in groups.values():
        group = _scored(rows, names, weights, signals, kinds)
        scored.append(replace(group, verdict=about.get("verdict")))
        advantages.append(_arrays(rows, "advantages", kinds))
        current.append(_arrays(rows, "current_logp", kinds))
    return scored, advantages, current


def _arrays(
    rows: Sequence[Mapping[str, Any]], name: str, kinds: Mapping[str, Any]
) -> list[np.ndarray]:
    """Return the numbers per token of a column; completions without any are left out."""
    known = [row[name] for row in rows if row[name] is not None]
    return [np.array(values, kinds[name]) for values in known]


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
                columns.setdefault(group, []).append(np.array(values or (), kind))
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
    images = None
    if first.get("prompt_images"):
        pictures = tuple(Picture(b"", digest) for digest in first["prompt_images"])
        images = PromptImages(pictures, tokens)
    prompt = Prompt(
        id=first["prompt_id"],
        tokens=tokens,
        text=first["prompt_text"],
        row=json.loads(first["row"]),
        messages=None if messages is None else tuple(json.loads(messages)),
        wrapped=bool(first.get("prompt_wrapped")),
        cut=first.get("prompt_cut") or 0,
        images=images,
    )
    rewards = [[row[f"rewards/{name}"] for name in names] for row in rows]
    columns: dict[str, tuple[np.ndarray, ...]] = {}
    for name in signals:
        if first[name] is not None:
            columns[name.removeprefix("signals/")] = tuple(_arrays(rows, name, kinds))
    logged = {}
    for name, value in json.loads(first.get("logged") or "{}").items():
        logged[name] = np.nan if value is None else value
    extra = {}
    for name in first:
        if name.startswith("extra/") and first[name] is not None:
            extra[name.removeprefix("extra/")] = tuple(json.loads(row[name]) for row in rows)
    return RolloutGroup(
        rollouts=tuple(_rollout(row, prompt, kinds) for row in rows),
        names=names,
        rewards=np.array(rewards, np.float64).reshape(len(rows), len(names)),
        reward=np.array([row["reward"] for row in rows], np.float64),
        weights=weights,
        signals=columns,
        logged=logged,
        extra=extra,
    )


def _rollout(row: Mapping[str, Any], prompt: Prompt, kinds: Mapping[str, Any]) -> Rollout:
    sampling = json.loads(row["sampling"])
    sampling["stop"] = tuple(sampling["stop"])
    support = None
    if row["support"] is not None:
        support = tuple(np.array(ids, np.int64) for ids in row["support"])
    return Rollout(
        prompt=prompt,
        index=row["index"],
        tokens=np.array(row["completion_ids"], np.int64),
        behavior_logp=np.array(row["behavior_logp"], kinds["behavior_logp"]),
        finish=Finish(row["finish"]),
        eos_ids=tuple(row["eos_ids"]),
        sampling=Sampling(**sampling),
        text=row["completion_text"],
        trained=np.array(row["trained"], bool),
        version=np.array(row["version"], np.int64),
        support=support,
        episode=_episode(row.get("episode")),  # older tables have no such column
    )


def _episode_text(episode: Episode, row: Mapping[str, Any]) -> str:
    """An episode as JSON, for `_episode`.   row: of the data."""
    fields: dict[str, Any] = {
        "turns": [asdict(turn) for turn in episode.turns],
        "messages": episode.messages,
        "branches": [asdict(branch) for branch in episode.branches],
        "reward": episode.reward,
        "environment": episode.environment,
        "opening": episode.opening,
        "prompt_text": episode.prompt_text,
    }
    left = _left_behind(episode, row)
    if left:
        fields["left"] = left
    return _encodable(_json(fields))


def _left_behind(episode: Episode, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a person reads of an episode's end: the files that are not as the row gave them,
    and the end of what was printed.
    """
    state = episode.state or {}
    left: dict[str, Any] = {}
    files, given = state.get("files"), row.get("files")
    if isinstance(files, Mapping):
        left["files"] = _changed(files, given if isinstance(given, Mapping) else {})
    output = state.get("output")
    if isinstance(output, str) and output:
        left["output"] = output[-LONGEST_FILE:]
    return left


def _changed(files: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the beginning of each file that is not as it was given; None for one that is gone."""
    changed: dict[str, str | None] = {}
    for name in sorted({*files, *given}):
        text = files.get(name)
        if text == given.get(name) or len(changed) == MOST_FILES:
            continue
        if text is None:
            changed[name] = None
        elif isinstance(text, str):
            changed[name] = text[:LONGEST_FILE]
    return changed


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
