"""Objects where a recipe has names: what Python code gives, as the keys of a recipe whose names
hold the objects (`Live`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.config import settings
from groupwise.config.live_objects import Live, live_part
from groupwise.config.settings import (
    DataSettings,
    EnvironmentSettings,
    ModelSettings,
    RewardSettings,
)
from groupwise.data.sources import kind_of, live_rows
from groupwise.errors import ConfigError, DataError
from groupwise.models.loading import live_model
from groupwise.models.policy import Policy
from groupwise.rewards.compose import LiveReward

if TYPE_CHECKING:
    from datasets import Dataset

LOSS_PARTS = ("credit", "ratio", "surrogate", "weights", "kl", "divergence")
"""Keys of `group` that name a function or an object."""
Section: TypeAlias = Mapping[str, Any]
"""A section of a recipe by its keys."""
Path: TypeAlias = str | os.PathLike[str]
Model: TypeAlias = Path | PreTrainedModel | Policy | Section
"""A checkpoint by its place, a loaded model, or the keys of `model`."""
Rows: TypeAlias = "Sequence[Mapping[str, Any]] | Dataset"
Reward: TypeAlias = str | Callable[..., Any] | LiveReward | RewardSettings | Section
"""A reward function by name, itself, or with its weight, name, arguments and timeout."""
Environment: TypeAlias = str | Callable[..., Any]
"""What makes an environment: a class or a function by name, or itself."""


def recipe_keys(
    keywords: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    tools: Sequence[object] | None,
) -> dict[str, Any]:
    """The keys of a recipe that keywords of `train` mean, as a file could hold them.   Raises
    ConfigError, DataError.
    """
    keys = dict(keywords)
    if "model" in keys:
        keys["model"] = model_keys(keys["model"], tokenizer)
    elif tokenizer is not None:
        raise ConfigError("tokenizer belongs to a loaded model: say model=... too")
    if "data" in keys:
        keys["data"] = data_keys(keys["data"])
    if "rewards" in keys:
        keys["rewards"] = reward_entries(keys["rewards"])
    if isinstance(keys.get("group"), Mapping):
        keys["group"] = group_keys(keys["group"])
    if tools is not None or "environment" in keys:
        keys["environment"] = environment_keys(keys.get("environment"), tools)
    return {key: plain(value, key) for key, value in keys.items()}


def model_keys(value: object, tokenizer: Any) -> dict[str, Any]:
    """The keys of `model`; `path` is a `Live` name where a loaded model was given.   Raises
    ConfigError.

    tokenizer: of a loaded model, or its processor.
    """
    keys = _keys(value)
    if keys is None:
        keys = {"path": value}
    model = keys.get("path")
    image_files: Mapping[str, bytes] = {}
    if isinstance(model, Policy):
        if tokenizer is not None:
            raise ConfigError("a Policy has its tokenizer: leave tokenizer out")
        image_files = model.image_files
        model, tokenizer = model.model, model.tokenizer
    if isinstance(model, PreTrainedModel):
        if hasattr(tokenizer, "image_processor"):
            image_files = files_of(tokenizer)
            keys = _template_of(tokenizer) | keys
            tokenizer = tokenizer.tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ConfigError(
                "a loaded model needs its tokenizer: tokenizer=AutoTokenizer.from_pretrained(...),"
                " or its processor, AutoProcessor.from_pretrained(...), where prompts have images;"
                f" got {kind_of(tokenizer)}"
            )
        path = live_model(model, tokenizer, image_files)
        return {**_own_dtype(model, keys), **keys, "path": path}
    if model is not None and not isinstance(model, str | os.PathLike):
        hint = ""
        if hasattr(model, "merge_and_unload"):
            hint = (
                ": merge its adapter first, or give the model under it with model={'path': model,"
                " 'lora': {'rank': 16}}"
            )
        wanted = (
            "a checkpoint's folder or hub name, a loaded transformers model, a Policy, or a mapping"
            " of the keys of `model`"
        )
        raise ConfigError(f"model is {wanted}, got {kind_of(model)}{hint}")
    if tokenizer is not None:
        raise ConfigError(
            f"tokenizer belongs to a loaded model, and model is {kind_of(model)}; a checkpoint"
            " brings its own"
        )
    return keys


def files_of(processor: Any) -> dict[str, bytes]:
    """What says how a processor of transformers prepares images, as files of a checkpoint."""
    return {"preprocessor_config.json": processor.image_processor.to_json_string().encode()}


def _template_of(processor: Any) -> dict[str, str]:
    """The chat template of a processor whose tokenizer has none."""
    if processor.tokenizer.chat_template is None and processor.chat_template is not None:
        return {"chat_template": processor.chat_template}
    return {}


def _own_dtype(model: PreTrainedModel, keys: Mapping[str, Any]) -> dict[str, str]:
    """`dtype` as the model was loaded, where the keys do not say it."""
    dtype = str(model.dtype).removeprefix("torch.")
    if "dtype" not in keys and dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"the model's weights are {dtype}: say in which type to train them, model={{'path':"
            " model, 'dtype': 'float32'}, or load it with dtype=torch.float32 or torch.bfloat16"
        )
    return {"dtype": dtype}


def data_keys(section: object) -> dict[str, Any]:
    """The keys of `data`; `path` and `eval_path` are `Live` names where rows were given.   Raises
    DataError.
    """
    keys = _keys(section)
    if keys is None:
        keys = {"path": section}
    elif (
        keys
        and not set(keys) & set(_DATA)
        and all(isinstance(value, list | tuple | np.ndarray) for value in keys.values())
    ):
        named = ", ".join(map(repr, keys))
        raise DataError(
            f"data is {kind_of(section)} with the columns {named}: give rows,"
            " datasets.Dataset.from_dict(data).to_list()"
        )
    for key, name in (("path", "data"), ("eval_path", "eval_data")):
        if key in keys and not isinstance(keys[key], str | os.PathLike | None):
            keys[key] = live_rows(keys[key], name)
    return keys


def reward_entries(value: object) -> list[dict[str, Any]]:
    """The entries of `rewards`; a function itself is a `Live` name.   Raises ConfigError."""
    single = isinstance(value, str | Mapping | LiveReward | RewardSettings) or callable(value)
    if not single and not isinstance(value, Sequence):
        raise ConfigError(
            f"rewards is a function, its name, or a list of them, got {kind_of(value)}"
        )
    entries = [value] if single else list(value)  # type: ignore[call-overload]
    return [_reward(entry, place) for place, entry in enumerate(entries)]


def _reward(entry: Any, place: int) -> dict[str, Any]:
    """One entry of `rewards`."""
    if isinstance(entry, str):
        return {"function": entry}
    others: dict[str, Any] = {}
    if isinstance(entry, LiveReward):
        live = entry
    else:
        keys = _keys(entry)
        function: Any = entry if keys is None else keys.get("function")
        if isinstance(function, LiveReward):
            raise ConfigError(
                f"rewards.{place}.function is a LiveReward: give it as the entry itself"
            )
        if keys is not None and not callable(function):
            return keys  # by name
        live, others = LiveReward(function=function), dict(keys or {})
    if isinstance(live.function, type):
        raise ConfigError(
            f"rewards.{place} is the class {live.function.__name__}: give an instance of it"
        )
    if not callable(live.function):
        wanted = "a function, the name of one, a LiveReward, or a mapping with `function`"
        raise ConfigError(f"rewards.{place} is {wanted}, got {kind_of(live.function)}")
    others = {
        key: value for key, value in others.items() if key != "function" and value is not None
    }
    if getattr(live.function, "__name__", "") == "<lambda>":
        others.setdefault("name", live.name or f"reward_{place + 1}")
    written = live.settings()
    keys = dataclasses.asdict(written) | others
    return keys | {"function": Live(str(keys["name"]), live)}


def group_keys(section: Section) -> dict[str, Any]:
    """The keys of `group`; a part of the loss that was given itself is a `Live` name."""
    keys = dict(section)
    for kind in LOSS_PARTS:
        part = keys.get(kind)
        if isinstance(part, Mapping) and callable(part.get("name")):
            keys[kind] = {**part, "name": live_part(kind, part["name"])}
        elif callable(part):
            keys[kind] = live_part(kind, part)
    return keys


def environment_keys(environment: object, tools: Sequence[object] | None) -> dict[str, Any]:
    """The keys of `environment`; functions and classes are `Live` names.   Raises ConfigError."""
    section = isinstance(environment, EnvironmentSettings)
    if isinstance(environment, Mapping):  # an empty one: no environment
        section = not environment or not set(environment).isdisjoint(_ENVIRONMENT)
    keys: dict[str, Any] = (
        {"factory": environment}
        if environment is not None and not section
        else dict(_keys(environment) or {})
    )
    if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):
        raise ConfigError(f"tools is a list of functions or their names, got {kind_of(tools)}")
    named = [*(keys.get("tools") or ()), *(tools or ())]
    keys["tools"] = [_callable(tool, f"tools.{place}") for place, tool in enumerate(named)]
    factory = keys.get("factory")
    if isinstance(factory, Mapping):
        keys["factory"] = {
            str(name): _callable(one, f"environment.factory.{name}")
            for name, one in factory.items()
        }
    elif factory is not None:
        keys["factory"] = _callable(factory, "environment.factory")
    if callable(keys.get("harness")):
        keys["harness"] = _callable(keys["harness"], "environment.harness")
    if callable(keys.get("side_calls")):
        keys["side_calls"] = _callable(keys["side_calls"], "environment.side_calls")
    return {key: value for key, value in keys.items() if value is not None}


def _callable(value: object, where: str) -> str:
    """The name of a tool or of what makes an environment; with the object where one was given."""
    if isinstance(value, str):
        return value
    if not callable(value):
        raise ConfigError(
            f"{where} is a function or a class, or the name of one, got {kind_of(value)}"
        )
    inner = value
    while isinstance(inner, functools.partial):
        inner = inner.func
    return Live(str(getattr(inner, "__name__", type(inner).__name__)), value)


_DATA = tuple(field.name for field in dataclasses.fields(DataSettings))
_ENVIRONMENT = tuple(field.name for field in dataclasses.fields(EnvironmentSettings))


def _keys(section: object) -> dict[str, Any] | None:
    """Return the keys of a section, a mapping or its dataclass; None if it is neither."""
    if isinstance(section, ModelSettings | DataSettings | RewardSettings | EnvironmentSettings):
        return dataclasses.asdict(section)
    splits = (
        type(section).__module__.partition(".")[0] == "datasets"
    )  # a DatasetDict is a mapping, too
    return (
        {str(key): value for key, value in section.items()}
        if isinstance(section, Mapping) and not splits
        else None
    )


def plain(value: object, key: str) -> object:
    """A value as a file could hold it: dataclasses become mappings, numpy's numbers Python's.
    Raises ConfigError for an object.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case os.PathLike():
            return os.fspath(value)
        case np.generic():
            return value.item()
        case Mapping():
            return {str(name): plain(inner, f"{key}.{name}") for name, inner in value.items()}
        case list() | tuple():
            return [plain(inner, f"{key}.{place}") for place, inner in enumerate(value)]
    if dataclasses.is_dataclass(value) and type(value).__module__ == settings.__name__:
        return plain(dataclasses.asdict(value), key)  # type: ignore[call-overload]
    raise ConfigError(
        f"{key} is {kind_of(value)}, which no recipe can hold:"
        f" {_REMEDY.get(key.partition('.')[0], 'give plain values')}"
    )


_REMEDY = {
    "rewards": "give the function itself an object by a closure or functools.partial",
    "model": "give plain values, e.g. model={'path': ..., 'lora': {'rank': 16, 'alpha': 32}}",
}
