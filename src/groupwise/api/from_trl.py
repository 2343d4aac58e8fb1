"""A run from TRL's own objects: what a script hands to one of TRL's trainers, exactly.

    training = gw.from_trl(GRPOConfig(...), model="my/model", reward_funcs=[check],
    train_dataset=rows) print(training.summary())
    for step in training: ...

Every argument has its value, TRL's defaults included, and functions, rows and loaded models are the
objects themselves."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable, Mapping
from typing import Any

from groupwise.api.train import Training, train
from groupwise.config.import_trl import Imported, translated
from groupwise.config.trl_arguments import (
    KINDS,
    LORA,
    Configuration,
    RewardModel,
    adapter_arguments,
)
from groupwise.errors import ConfigError
from groupwise.utils.spelling import counted
from groupwise.utils.terminal import logger

log = logger(__name__)

FILLED: Mapping[str, Callable[[Any], Any]] = {
    "bf16": lambda config: not config.fp16,
    "activation_checkpointing": lambda config: config.gradient_checkpointing,
    "dataloader_pin_memory": lambda config: not config.use_cpu,
    "disable_tqdm": lambda config: config.disable_tqdm,
    "accelerator_config": lambda config: type(config.accelerator_config)(),
    "steps_per_generation": lambda config: config.gradient_accumulation_steps,
    "generation_batch_size": lambda config: (
        config.per_device_train_batch_size
        * getattr(config, "world_size", 1)
        * config.gradient_accumulation_steps
    ),
}
"""What TRL's classes fill in themselves (`__post_init__`) where the user sets nothing: the field's
default does not say it.
"""


class TrlTraining(Training):
    """A run that was made of TRL's objects."""

    imported: Imported

    def summary(self) -> str:
        """What became of the arguments, and each that is lost or means something else."""
        return self.imported.summary()


def from_trl(
    args: Any,
    *,
    model: Any = None,
    processing_class: Any = None,
    fresh: bool = False,
    accept_changes: bool = False,
    **trainer: Any,
) -> TrlTraining:
    """A checked run from the arguments of a TRL trainer.  The same call resumes it.

    args: a GRPOConfig, RLOOConfig, SFTConfig, RewardConfig or DPOConfig.
    model: a checkpoint's folder or hub name, or a loaded transformers model with its tokenizer
        (`processing_class`).
    trainer: the trainer's other arguments: `reward_funcs`, `train_dataset`, `eval_dataset`,
        `tools`, `environment_factory`, `peft_config` (a LoraConfig) and so on.   fresh,
        accept_changes: as in `train`.

    Unsupported arguments cause a warning; `summary` reports every argument.
    Raises ConfigError or DataError for an argument that cannot be translated, or that is missing.
    """
    kind = next(
        (name for name in (one.__name__ for one in type(args).__mro__) if name in KINDS), None
    )
    if kind is None:
        raise ConfigError(
            f"args is one of TRL's {', '.join(KINDS)}; got an object of {type(args).__name__}"
        )
    loaded = model is not None and not isinstance(model, str | os.PathLike)
    values, arguments = _values(args)
    for name, value in {
        **trainer,
        "processing_class": None if loaded else processing_class,
    }.items():
        if name == "peft_config" and value is not None:
            arguments |= _adapter(value)
        elif value is not None and value != (None, None):
            arguments[name] = _functions(value) if name in ("reward_funcs", "tools") else value
    if model is not None:
        arguments["model_name_or_path"] = model if loaded else os.fspath(model)
        values["dtype"] = _plain(getattr(model, "dtype", "float32"))
    rows: Any = arguments.get("train_dataset")
    for name in ("train_dataset", "eval_dataset"):
        if name in arguments and not isinstance(arguments[name], str):
            arguments[name] = _UnshownRows(arguments[name])
    trl = Configuration(
        kind=kind,
        arguments=arguments,
        values=values,
        devices=int(getattr(args, "world_size", 1)) * max(1, int(getattr(args, "n_gpu", 1))),
        rows=len(rows) if hasattr(rows, "__len__") and not isinstance(rows, str) else None,
        columns=_columns(rows),
    )
    imported = translated(trl)
    if lost := [line for line in imported.lines if line.fate in ("missing", None)]:
        log.warning("of TRL's arguments these are not carried over: %s", "; ".join(map(str, lost)))
    if imported.needed:
        log.warning("still to set, beside TRL's arguments: %s", "; ".join(imported.needed))
    keys = imported.tree()
    keys["data"] = {
        key: value.rows if isinstance(value, _UnshownRows) else value
        for key, value in keys.get("data", {}).items()
    }
    training = train(
        **keys,
        tokenizer=processing_class if loaded else None,
        fresh=fresh,
        accept_changes=accept_changes,
    )
    result = TrlTraining(training.recipe, accept_changes=accept_changes)
    result.imported = imported
    return result


def _columns(rows: Any) -> set[str] | None:
    """The columns of the first row, which is the one that TRL goes by; None where rows are not
    here.
    """
    first = (
        next(iter(rows), None) if hasattr(rows, "__len__") and not isinstance(rows, str) else None
    )
    return set(first) if isinstance(first, Mapping) else None


@dataclasses.dataclass(frozen=True, slots=True)
class _UnshownRows:
    """Rows, which no line shows."""

    rows: Any

    def __str__(self) -> str:
        return (
            counted(len(self.rows), "row")
            if hasattr(self.rows, "__len__")
            else type(self.rows).__name__
        )


def _adapter(config: Any) -> dict[str, Any]:
    """The arguments of a LoraConfig under the names of TRL's ModelConfig."""
    values, changed = _values(config)
    changed |= {name: value for name, value in values.items() if name in LORA}
    if isinstance(targets := changed.get("target_modules"), set):
        changed["target_modules"] = sorted(targets)
    return adapter_arguments(changed)


def _values(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a configuration with their values, and those of them that are neither their
    defaults nor nothing.
    """
    if not dataclasses.is_dataclass(config):
        raise ConfigError(
            f"an object of {type(config).__name__} is no configuration of TRL's or peft's"
        )
    values, changed = {}, {}
    for field in dataclasses.fields(config):
        if field.name.startswith("_"):
            continue
        default = (
            field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else field.default
        )
        values[field.name] = value = _plain(getattr(config, field.name))
        filled = _plain(FILLED[field.name](config)) if field.name in FILLED else default
        if value not in (_plain(default), filled, None, [], {}, ""):
            changed[field.name] = value
    return values, changed


def _plain(value: Any) -> Any:
    """A value as a file of TRL's has it."""
    if isinstance(value, enum.Enum):
        return value.value
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _functions(value: Any) -> list[Any]:
    """Functions as a list; the name of a reward model in their place is marked as one."""
    functions = list(value) if isinstance(value, list | tuple) else [value]
    for function in functions:
        if hasattr(function, "config") and hasattr(function, "named_parameters"):
            raise ConfigError(
                "a loaded reward model cannot be handed over: give the folder or hub name of its"
                " checkpoint"
            )
    return [
        RewardModel(function) if isinstance(function, str) else function for function in functions
    ]
