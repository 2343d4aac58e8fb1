"""What a user of TRL wrote, with TRL's defaults, and the recipe that is made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from groupwise.errors import ConfigError
from groupwise.trl.values import Needed, number_of, short, whole_of
from groupwise.utils.terminal import escaped

Fate = Literal["same", "changed", "unneeded", "elsewhere", "missing"]

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
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "bf16": None,
    "fp16": False,
    "dtype": "float32",
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "logging_steps": 10,
    "gradient_checkpointing": True,
    "seed": 42,
    "model_revision": "main",
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "train_sampling_strategy": "random",
}
"""Defaults of TRL 1.16 that matter here; those of single classes are in OWN_DEFAULTS."""
_ROLLED_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-6,
    "max_completion_length": 512,
    "num_iterations": 1,
    "epsilon": 0.2,
    "repetition_penalty": 1.0,
    "vllm_mode": "colocate",
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "ref_model_sync_steps": 512,
    "ref_model_mixup_alpha": 0.6,
    "shuffle_dataset": True,
}
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "GRPOConfig": _ROLLED_DEFAULTS
    | {
        "num_generations": 8,
        "loss_type": "dapo",
        "beta": 0.0,
        "scale_rewards": "group",
        "entropy_target": 0.2,
        "entropy_coef_max": 1.0,
        "entropy_coef_delta": 0.005,
        "importance_sampling_level": "token",
        "use_bias_correction_kl": True,
        "top_entropy_quantile": 1.0,
        "multi_objective_aggregation": "sum_then_normalize",
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
    },
    "RLOOConfig": _ROLLED_DEFAULTS
    | {"num_generations": 2, "beta": 0.05, "normalize_advantages": False},
    "SFTConfig": {
        "learning_rate": 2e-5,
        "loss_type": "nll",
        "max_length": 1024,
        "truncation_mode": "keep_start",
        "dataset_text_field": "text",
    },
    "RewardConfig": {"learning_rate": 1e-4, "max_length": 1024, "disable_dropout": True},
    "DPOConfig": {
        "disable_dropout": True,
        "learning_rate": 1e-6,
        "beta": 0.1,
        "loss_type": "sigmoid",
        "max_length": 1024,
        "truncation_mode": "keep_start",
    },
}
OPEN = "**"
"""The name of a line for arguments that are not even known by name."""
NUMBERS: Mapping[Callable[[Any], Any], Callable[[Any], Any]] = {int: whole_of, float: number_of}
"""How numbers are read, by their type."""


@dataclass(frozen=True, slots=True)
class Line:
    """One argument, and what became of it."""

    name: str
    value: Any
    fate: Fate | None
    """None: TRL has no such argument, or its value could not be read."""
    detail: str

    def __str__(self) -> str:
        detail = f"  ({self.detail})" if self.detail else ""
        return escaped(f"{self.name}: {short(self.value)}{detail}", keep="")


class Written(NamedTuple):
    """A key of the recipe."""

    value: Any
    names: tuple[str, ...]
    """The arguments that it is from; of TRL's default the first that sets it."""
    default: bool
    """True if the user wrote none of them."""
    detail: str
    fate: Fate | None
    """What becomes of those arguments, where their value decides; else the table does."""

    @property
    def comment(self) -> str:
        """Where it is from."""
        source = ", ".join(self.names)
        if self.default and self.names:
            source = f"TRL's default {self.names[0]}"
        return f"{source}: {self.detail}" if self.detail else source


class BatchCount(NamedTuple):
    """How many rows TRL takes at a time, and how they are cut."""

    rows: int
    """Rows, or completions, of one forward pass on all devices."""
    pieces: int
    """Forward passes of an optimizer step."""
    passes: int
    """Forward passes over one rollout."""
    completions: int
    """Completions of one rollout."""
    size: int
    """Completions of one prompt."""

    @property
    def prompts(self) -> int:
        """Prompts of one rollout."""
        return max(1, round(self.completions / self.size))

    @property
    def minibatches(self) -> int:
        """Optimizer steps of one pass over a rollout."""
        return max(1, round(self.passes / self.pieces))


@dataclass(kw_only=True)
class Configuration:
    """The arguments of one of TRL's classes and of what goes with it, and the recipe that is made
    of them.

    The functions that write keys read values by `get` and `number`, and call `write`, `note` and
    `need` with the result.
    """

    kind: str
    arguments: Mapping[str, Any]
    """What the user wrote, by name."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Every argument's value, where it comes from an object."""
    devices: int = 1
    """The number of devices that TRL runs on, which makes its batches larger."""
    file: Path | None = None
    unread: Sequence[Line] = ()
    """Lines of the file that could not be read, and that are no arguments."""
    rows: int | None = None
    """Rows of the training data, where they are known."""
    columns: Set[str] | None = None
    """Columns of the training data, where they are known."""
    keys: dict[str, Written] = field(default_factory=dict)
    """The recipe by dotted key."""
    notes: dict[str, tuple[Fate, str]] = field(default_factory=dict)
    """Argument -> what becomes of it, where no key is from it and its value decides."""
    needed: list[str] = field(default_factory=list)
    """What must be done to a script, and what the recipe still lacks."""

    @property
    def online(self) -> bool:
        """True if completions are sampled."""
        return self.kind in ROLLED

    @property
    def objective(self) -> str:
        """The objective of TRL's class."""
        return KINDS[self.kind]

    def default(self, name: str) -> Any:
        """TRL's default of an argument; None where it does not matter here."""
        return OWN_DEFAULTS[self.kind].get(name, DEFAULTS.get(name))

    def get(self, name: str) -> Any:
        """An argument's value: what the user wrote, else the object's value, else TRL's default."""
        if name in self.arguments:
            return self.arguments[name]
        return self.values.get(name, self.default(name))

    def number(
        self, name: str, least: float = -math.inf, null: float | None = None, kind: type = float
    ) -> Any:
        """An argument's value as a number.   null: what null means; None: it is refused."""
        value = self.get(name)
        if value is None and null is not None:
            return null
        return self.made(name, kind, value, least)

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
            noun = "a whole number" if kind is int else "a number"
            self.refuse(name, f"{noun} is needed{limit}")
        return result

    def refuse(self, name: str, reason: str) -> NoReturn:
        """Raises ConfigError for an argument's value."""
        raise ConfigError(f"{name}={self.get(name)!r}: no value that TRL takes ({reason})")

    @property
    def lost(self) -> set[str]:
        """Arguments that stand in the file and could not be read."""
        return {line.name for line in self.unread if line.fate is None}

    def write(
        self, key: str, value: Any, *names: str, detail: str = "", fate: Fate | None = None
    ) -> None:
        """Set a key, if runs of TRL's class have it.

        names: the arguments that it is from.
        detail: what differs from TRL.
        fate: what becomes of the arguments, where it is not what the table holds.
        """
        section = key.partition(".")[0]
        if self.kind not in SECTIONS.get(section, (self.kind,)):
            return
        known = self.arguments.keys() | self.lost
        sources = tuple(name for name in names if name in known)
        self.keys[key] = Written(value, sources or names[:1], not sources, detail, fate)

    def note(self, name: str, fate: Fate, detail: str) -> None:
        """Record what becomes of an argument."""
        self.notes[name] = (fate, detail)

    def unused(self, reason: str, *names: str) -> None:
        """Record that TRL does not read arguments either."""
        for name in names:
            self.note(name, "unneeded", reason)

    def need(self, text: str) -> None:
        """Record what the recipe still lacks."""
        self.needed.append(text)

    # ------------------------------------------------------------ how many

    @cached_property
    def batch(self) -> BatchCount:
        """How many rows are taken at a time."""
        name = "per_device_train_batch_size"
        if "per_gpu_train_batch_size" in self.arguments:
            name = "per_gpu_train_batch_size"
        rows = self.whole(name, 1, null=8) * self.devices
        pieces = self.whole("gradient_accumulation_steps", 1)
        size = self.whole("num_generations", 1) if self.online else 1
        completions = self.whole("generation_batch_size", null=0)
        if completions:
            passes = max(1, completions // rows)
        else:
            passes = self.whole("steps_per_generation", null=0) or pieces
        return BatchCount(rows, pieces, passes, completions or rows * passes, size)

    @property
    def microbatches(self) -> int:
        """Pieces of an optimizer step, of which TRL takes some means by themselves."""
        return self.batch.pieces * self.devices

    @property
    def updates(self) -> int:
        """Optimizer steps of one of our steps."""
        if not self.online:
            return 1
        return self.batch.minibatches * max(1, self.whole("num_iterations"))

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
        rollouts = max(1, self.rows // self.batch.prompts)
        return max(1, math.ceil(self.number("num_train_epochs") * rollouts))

    def our_steps(self, name: str, total: int | None) -> int | None:
        """An argument's optimizer steps as steps of ours; a share below 1 is one of all steps."""
        count = self.number(name, 0)
        if not 0 < count < 1:
            return math.ceil(count / self.updates)
        if total is None:
            return None
        return max(1, math.ceil(count * total))
