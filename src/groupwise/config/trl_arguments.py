"""What a user of TRL wrote, with TRL's defaults, and the recipe that the table in `trl.py` makes of
it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from groupwise.config.strict_yaml import dump, parse
from groupwise.errors import ConfigError

Fate = Literal["same", "changed", "unneeded", "missing"]

KINDS = {
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "SFTConfig": "sft",
    "RewardConfig": "reward",
    "DPOConfig": "dpo",
}
"""TRL's classes and the objective of each."""
ROLLED = ("GRPOConfig", "RLOOConfig")
"""Classes of runs that sample their own completions."""
SECTIONS = {
    **dict.fromkeys(("rollout", "group", "rewards", "environment"), ROLLED),
    "reward_model": ("RewardConfig",),
    "pairs": ("DPOConfig",),
}
"""Sections of a recipe that only these of TRL's classes have."""
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "max_steps": -1,
    "lr_scheduler_type": "linear", "warmup_steps": 0, "bf16": None, "fp16": False, "dtype": "float32", "save_strategy": "steps",
    "save_steps": 500, "eval_strategy": "no", "logging_steps": 10, "gradient_checkpointing": True, "seed": 42,
    "model_revision": "main",
}  # fmt: skip
"""Of TRL 1.16, where they matter here; those of single classes below."""
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "GRPOConfig": {
        "learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "num_iterations": 1, "loss_type": "dapo",
        "beta": 0.0, "scale_rewards": "group", "repetition_penalty": 1.0,
        "entropy_target": 0.2, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005,
        "epsilon": 0.2, "importance_sampling_level": "token", "use_bias_correction_kl": True, "top_entropy_quantile": 1.0,
        "vllm_mode": "colocate", "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
        "multi_objective_aggregation": "sum_then_normalize", "ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    },
    "RLOOConfig": {
        "learning_rate": 1e-6, "num_generations": 2, "max_completion_length": 512, "num_iterations": 1, "beta": 0.05,
        "epsilon": 0.2, "normalize_advantages": False, "vllm_mode": "colocate", "repetition_penalty": 1.0,
        "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
        "ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6,
    },
    "SFTConfig": {"learning_rate": 2e-5, "loss_type": "nll", "max_length": 1024},
    "RewardConfig": {"learning_rate": 1e-4, "max_length": 1024},
    "DPOConfig": {"learning_rate": 1e-6, "beta": 0.1, "loss_type": "sigmoid", "max_length": 1024},
}  # fmt: skip

ADAPTERS = {"LoraConfig": {"r": 8, "lora_alpha": 8}, "get_peft_model": {"r": 16, "lora_alpha": 16}}
"""What describes an adapter, peft's configuration or unsloth's function with the same keywords,
with its defaults.
"""
LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
        "use_rslora": "use_rslora"}  # fmt: skip
"""Arguments of peft's LoraConfig, as TRL's ModelConfig calls them."""
NO_MATTER = (
    "task_type",
    "peft_type",
    "inference_mode",
    "peft_version",
    "base_model_name_or_path",
    "auto_mapping",
)
"""Of a LoraConfig: what does not change what is trained."""
ADAPTER = "peft_config."
"""Prefix of a LoraConfig's other arguments."""


def adapter_arguments(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a LoraConfig under the names of TRL's ModelConfig, those that it lacks
    behind `peft_config.`.
    """
    used = {
        name: value for name, value in adapter.items() if value not in (None, False, "none", [], {})
    }
    return {"use_peft": True} | {
        LORA.get(name, ADAPTER + name): value
        for name, value in used.items()
        if name not in NO_MATTER
    }


class RewardModel(str):
    """The folder or hub name of a reward model in the place of a function."""


class RewardEntry(dict[str, Any]):
    """An entry of `rewards` in the place of a function."""


OPEN = "**"
"""The name of a line for arguments that are not even known by name."""


@dataclass(frozen=True, slots=True)
class Line:
    """One argument, and what became of it."""

    name: str
    value: Any
    fate: Fate | None
    """None: TRL has no such argument, or its value could not be read."""
    says: str

    def __str__(self) -> str:
        return f"{self.name}: {short(self.value)}" + (f"  ({self.says})" if self.says else "")


class Written(NamedTuple):
    """A key of the recipe."""

    value: Any
    names: tuple[str, ...]
    """The arguments that it is from; of TRL's default the first that may say it."""
    default: bool
    """True if the user wrote none of them."""
    says: str
    fate: Fate | None
    """What becomes of those arguments, where their value decides; else what the table says."""

    @property
    def comment(self) -> str:
        """Where it is from."""
        source = (
            f"TRL's default {self.names[0]}"
            if self.default and self.names
            else ", ".join(self.names)
        )
        return f"{source}: {self.says}" if self.says else source


class Needed(Exception):
    """What a value must be, and is not: `a mapping is needed`."""


def number_of(value: Any) -> float:
    """A value as a number.  Raises Needed, also for true and false: a flag without its value is no
    number.
    """
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError, ArithmeticError):
        pass
    raise Needed("a number is needed")


def whole_of(value: Any) -> int:
    """A value as a whole number.  Raises Needed, also for a fraction."""
    try:
        if (number := number_of(value)) % 1 == 0:
            return int(number)
    except Needed:
        pass
    raise Needed("a whole number is needed")


NUMBERS: Mapping[Callable[[Any], Any], Callable[[Any], Any]] = {int: whole_of, float: number_of}
"""How numbers are read, by their type."""


class BatchCount(NamedTuple):
    """How many rows TRL takes at a time, and how they are cut."""

    rows: int
    """Rows, or completions, of one forward pass on all devices."""
    pieces: int
    """Forward passes of an optimizer step."""
    passes: int
    """Forward passes over one rollout."""
    completions: int
    """Of one rollout."""
    size: int
    """Completions of one prompt."""

    @property
    def prompts(self) -> int:
        """Of one rollout."""
        return max(1, round(self.completions / self.size))

    @property
    def minibatches(self) -> int:
        """Optimizer steps of one pass over a rollout."""
        return max(1, round(self.passes / self.pieces))


@dataclass(kw_only=True)
class Configuration:
    """The arguments of one of TRL's classes and of what goes with it, and the recipe that is made
    of them.

    The converters of the table read values by `get` and `number`, and say what they come to by
    `write`, `note` and `need`."""

    kind: str
    arguments: Mapping[str, Any]
    """What the user wrote, by name."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Of a configuration object: every argument's value."""
    devices: int = 1
    """On how many TRL runs, which makes its batches larger."""
    file: Path | None = None
    unread: Sequence[Line] = ()
    """What the file says that could not be read, and what else it says."""
    rows: int | None = None
    """Of the training data, where they are known."""
    columns: Set[str] | None = None
    """Of the training data, where they are known."""
    keys: dict[str, Written] = field(default_factory=dict)
    """The recipe by dotted key."""
    notes: dict[str, tuple[Fate, str]] = field(default_factory=dict)
    """Argument -> what becomes of it, where no key is from it and its value decides."""
    needed: list[str] = field(default_factory=list)
    """What must be done to a script, and what the recipe still has to say, because the
    configuration does not.
    """

    @property
    def online(self) -> bool:
        """True if completions are sampled."""
        return self.kind in ROLLED

    def default(self, name: str) -> Any:
        """TRL's default of an argument; None where it does not matter here."""
        return OWN_DEFAULTS[self.kind].get(name, DEFAULTS.get(name))

    def get(self, name: str) -> Any:
        """An argument's value: what the user wrote, else the object's value, else TRL's default."""
        return (
            self.arguments[name]
            if name in self.arguments
            else self.values.get(name, self.default(name))
        )

    def number(
        self, name: str, least: float = -math.inf, null: float | None = None, kind: type = float
    ) -> Any:
        """An argument's value as a number.   null: what null means; None: it is refused."""
        value = self.get(name)
        return null if value is None and null is not None else self.made(name, kind, value, least)

    def whole(self, name: str, least: int = 0, null: int | None = None) -> int:
        """An argument's value as a whole number."""
        return self.number(name, least, null, int)

    def made(
        self, name: str, kind: Callable[[Any], Any], value: Any, least: float = -math.inf
    ) -> Any:
        """A value as `kind` makes it.  Raises ConfigError for a value of another type than TRL has
        there.
        """
        limit = f", at least {least:g}" if math.isfinite(least) else ""
        try:
            result = NUMBERS.get(kind, kind)(value)
        except Needed as error:
            self.refuse(name, f"{error}{limit}")
        if kind in NUMBERS and not result >= least:
            self.refuse(name, f"a {'whole ' if kind is int else ''}number is needed{limit}")
        return result

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raises ConfigError for an argument's value."""
        raise ConfigError(f"{name}={self.get(name)!r}: no value that TRL takes ({why})")

    @property
    def lost(self) -> set[str]:
        """Arguments that stand in the file and could not be read."""
        return {line.name for line in self.unread if line.fate is None}

    def write(
        self, key: str, value: Any, *names: str, says: str = "", fate: Fate | None = None
    ) -> None:
        """Set a key, if runs of TRL's class have it.   names: the arguments that it is from."""
        if self.kind in SECTIONS.get(key.partition(".")[0], (self.kind,)):
            sources = tuple(name for name in names if name in self.arguments or name in self.lost)
            self.keys[key] = Written(value, sources or names[:1], not sources, says, fate)

    def note(self, name: str, fate: Fate, says: str) -> None:
        """Say what becomes of an argument."""
        self.notes[name] = (fate, says)

    def need(self, says: str) -> None:
        """Say what the recipe still lacks."""
        self.needed.append(says)

    # ------------------------------------------------------------ how many

    @cached_property
    def batch(self) -> BatchCount:
        """How many rows are taken at a time."""
        old = "per_gpu_train_batch_size"
        rows = (
            self.whole(old if old in self.arguments else "per_device_train_batch_size", 1, null=8)
            * self.devices
        )
        pieces, size = (
            self.whole("gradient_accumulation_steps", 1),
            (self.whole("num_generations", 1) if self.online else 1),
        )
        completions = self.whole("generation_batch_size", null=0)
        passes = (
            max(1, completions // rows)
            if completions
            else self.whole("steps_per_generation", null=0) or pieces
        )
        return BatchCount(rows, pieces, passes, completions or rows * passes, size)

    @property
    def microbatches(self) -> int:
        """Pieces of an optimizer step, of which TRL takes some means by themselves."""
        return self.batch.pieces * self.devices

    @property
    def updates(self) -> int:
        """Optimizer steps of one of our steps."""
        return self.batch.minibatches * max(1, self.whole("num_iterations")) if self.online else 1

    @property
    def most_updates(self) -> int | None:
        """`max_steps`, if it is used."""
        most = self.made("max_steps", int, self.get("max_steps") or 0)
        return most if most > 0 else None

    @property
    def steps(self) -> int | None:
        """Our steps of the run, where they are known."""
        if self.most_updates is not None:
            return math.ceil(self.most_updates / self.updates)
        if self.rows is None or not self.online:
            return None
        return max(
            1, math.ceil(self.number("num_train_epochs") * max(1, self.rows // self.batch.prompts))
        )

    def our_steps(self, name: str, total: int | None) -> int | None:
        """An argument's optimizer steps as steps of ours; a share below 1 is one of all steps."""
        count = self.number(name, 0)
        if 0 < count < 1:
            return None if total is None else max(1, math.ceil(count * total))
        return math.ceil(count / self.updates)


# ---------------------------------------------------------------- values in words


def short(value: Any) -> str:
    """A value in one line of 60 characters at most."""
    written = (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_shown)
    )
    text = " ".join(written.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _shown(value: Any) -> str:
    """An object that no file holds."""
    return str(getattr(value, "__name__", value))


def flow(value: Any) -> str:
    """A value in one line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        plain = (
            re.fullmatch(r"[A-Za-z][\w./-]*(:[A-Za-z]\w*)?", value)
            and dump({"a": value}) == f"a: {value}\n"
        )
        return value if plain else json.dumps(value, ensure_ascii=False)
    return (
        dump({"a": value}).removeprefix("a: ").strip()
        if isinstance(value, bool | int | float | None)
        else _shown(value)
    )


def mapping_of(file: Path) -> dict[str, Any]:
    """The arguments of a YAML or JSON file by name.  Raises ConfigError."""
    try:
        document, problems = parse(file.read_text(encoding="utf-8"), file.name)  # JSON is YAML
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if problems:
        raise ConfigError(str(problems[0]))
    if not isinstance(document.values, dict) or not document.values:
        raise ConfigError(
            f"{file} holds no arguments by name: a mapping such as `learning_rate: 1e-6` is needed"
        )
    return document.values
