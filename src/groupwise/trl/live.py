"""A run from TRL's own objects: what a script hands to one of TRL's trainers, exactly.

    training = gw.from_trl(
        GRPOConfig(...), model="my/model", reward_funcs=[check], train_dataset=rows
    )
    print(training.summary())
    for step in training: ...

Every argument has its value, TRL's defaults included, and functions, rows and loaded models are the
objects themselves.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping
from typing import Any

from groupwise.api.train import Training, train
from groupwise.errors import ConfigError
from groupwise.trl.configuration import KINDS, Configuration
from groupwise.trl.model_keys import LORA, adapter_arguments
from groupwise.trl.recipe import Imported, translated
from groupwise.trl.rollout_keys import RewardModel
from groupwise.utils.spelling import counted
from groupwise.utils.terminal import logger

log = logger(__name__)


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
    model: a checkpoint's folder or hub name, or a loaded transformers model with its tokenizer or
        processor (`processing_class`).
    trainer: the trainer's other arguments: `reward_funcs`, `train_dataset`, `eval_dataset`,
        `tools`, `environment_factory`, `peft_config` (a LoraConfig) and so on.   fresh,
        accept_changes: as in `train`.

    Unsupported arguments cause a warning; `summary` reports every argument.
    Raises ConfigError or DataError for an argument that cannot be translated, or that is missing.
    """
    kind = kind_of(args)
    loaded = model is not None and not isinstance(model, str | os.PathLike)
    values = values_of(args)
    arguments = changed_of(args, values)
    if not loaded:
        trainer["processing_class"] = processing_class
    arguments |= trainer_arguments(trainer)
    if model is not None:
        arguments["model_name_or_path"] = model if loaded else os.fspath(model)
        values["dtype"] = _plain(getattr(model, "dtype", "float32"))
    rows = arguments.get("train_dataset")
    for name in ("train_dataset", "eval_dataset"):
        if name in arguments and not isinstance(arguments[name], str):
            arguments[name] = UnshownRows(arguments[name])
    known = hasattr(rows, "__len__") and not isinstance(rows, str)
    imported = translated(
        Configuration(
            kind=kind,
            arguments=arguments,
            values=values,
            devices=int(getattr(args, "world_size", 1)) * max(1, int(getattr(args, "n_gpu", 1))),
            rows=len(rows) if known else None,  # type: ignore[arg-type]
            columns=columns_of(rows) if known else None,
        )
    )
    warn(imported)
    keys = imported.tree()
    for name, value in keys.get("data", {}).items():
        if isinstance(value, UnshownRows):
            keys["data"][name] = value.rows
    tokenizer = processing_class if loaded else None
    training = train(**keys, tokenizer=tokenizer, fresh=fresh, accept_changes=accept_changes)
    result = TrlTraining(training.recipe, accept_changes=accept_changes)
    result.imported = imported
    return result


def warn(imported: Imported) -> None:
    """Log what is lost, and what is still to set."""
    lost = [str(line) for line in imported.lines if line.fate in ("missing", None)]
    if lost:
        log.warning("of TRL's arguments these are not carried over: %s", "; ".join(lost))
    if imported.needed:
        log.warning("still to set, beside TRL's arguments: %s", "; ".join(imported.needed))


def kind_of(args: Any) -> str:
    """TRL's class of an object.  Raises ConfigError."""
    for parent in type(args).__mro__:
        if parent.__name__ in KINDS:
            return parent.__name__
    wanted = ", ".join(KINDS)
    raise ConfigError(f"args is one of TRL's {wanted}; got an object of {type(args).__name__}")


def trainer_arguments(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a trainer beside its configuration, without those that are None."""
    arguments: dict[str, Any] = {}
    for name, value in trainer.items():
        if value is None or value == (None, None):
            continue
        if name == "peft_config":
            arguments |= adapter_of(value)
        elif name in ("reward_funcs", "tools"):
            arguments[name] = functions_of(value)
        else:
            arguments[name] = value
    return arguments


def columns_of(rows: Any) -> set[str] | None:
    """The columns of the first row, which is the one that TRL goes by."""
    first = next(iter(rows), None)
    return set(first) if isinstance(first, Mapping) else None


@dataclasses.dataclass(frozen=True, slots=True)
class UnshownRows:
    """Rows, which no line shows."""

    rows: Any

    def __str__(self) -> str:
        if hasattr(self.rows, "__len__"):
            return counted(len(self.rows), "row")
        return type(self.rows).__name__


def adapter_of(config: Any) -> dict[str, Any]:
    """The arguments of a LoraConfig under the names of TRL's ModelConfig."""
    values = values_of(config)
    changed = changed_of(config, values)
    changed |= {name: value for name, value in values.items() if name in LORA}
    targets = changed.get("target_modules")
    if isinstance(targets, set):
        changed["target_modules"] = sorted(targets)
    return adapter_arguments(changed)


def values_of(config: Any) -> dict[str, Any]:
    """The arguments of a configuration with their values.  Raises ConfigError."""
    if not dataclasses.is_dataclass(config):
        raise ConfigError(
            f"an object of {type(config).__name__} is no configuration of TRL's or peft's"
        )
    names = [field.name for field in dataclasses.fields(config)]
    return {name: _plain(getattr(config, name)) for name in names if not name.startswith("_")}


def changed_of(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are neither their defaults nor nothing."""
    filled = filled_in(config)
    changed = {}
    for field in dataclasses.fields(config):
        if field.name not in values:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        usual = (_plain(default), filled.get(field.name, _plain(default)), None, [], {}, "")
        if values[field.name] not in usual:
            changed[field.name] = values[field.name]
    return changed


def filled_in(config: Any) -> dict[str, Any]:
    """What TRL's classes fill in themselves (`__post_init__`) where the user sets nothing: the
    field's default is another.
    """
    if not hasattr(config, "per_device_train_batch_size"):  # a LoraConfig
        return {}
    steps = config.gradient_accumulation_steps
    world = getattr(config, "world_size", 1)
    return {
        "bf16": not config.fp16,
        "activation_checkpointing": config.gradient_checkpointing,
        "dataloader_pin_memory": not config.use_cpu,
        "disable_tqdm": config.disable_tqdm,
        "accelerator_config": _plain(type(config.accelerator_config)()),
        "steps_per_generation": steps,
        "generation_batch_size": config.per_device_train_batch_size * world * steps,
    }


def _plain(value: Any) -> Any:
    """A value as a file of TRL's has it."""
    if isinstance(value, enum.Enum):
        return value.value
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def functions_of(value: Any) -> list[Any]:
    """Functions as a list; the name of a reward model in their place is marked as one."""
    functions = list(value) if isinstance(value, list | tuple) else [value]
    for place, function in enumerate(functions):
        if hasattr(function, "config") and hasattr(function, "named_parameters"):
            raise ConfigError(
                "a loaded reward model cannot be handed over: give the folder or hub name of its"
                " checkpoint"
            )
        if isinstance(function, str):
            functions[place] = RewardModel(function)
    return functions
