"""What a user of TRL wrote: the arguments of one of TRL's classes, with TRL's defaults and what follows from their values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from groupwise.config.strict_yaml import dump, parse
from groupwise.errors import ConfigError

Fate = Literal["same", "changed", "unneeded", "missing"]

KINDS = {"GRPOConfig": "grpo", "RLOOConfig": "rloo", "SFTConfig": "sft", "RewardConfig": "reward", "DPOConfig": "dpo"}
"""TRL's classes and the objective of each."""
ROLLED = ("GRPOConfig", "RLOOConfig")
"""Classes of runs that sample their own completions."""
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "max_steps": -1,
    "lr_scheduler_type": "linear", "warmup_steps": 0, "bf16": None, "fp16": False, "dtype": "float32", "save_strategy": "steps",
    "save_steps": 500, "eval_strategy": "no", "gradient_checkpointing": True, "seed": 42,
}  # fmt: skip
"""Of TRL 1.16, where they matter here; those of single classes below."""
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "GRPOConfig": {
        "learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "num_iterations": 1, "loss_type": "dapo",
        "beta": 0.0, "scale_rewards": "group",
        "entropy_target": 0.2, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005,
        "epsilon": 0.2, "importance_sampling_level": "token", "use_bias_correction_kl": True,
        "vllm_mode": "colocate", "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
        "multi_objective_aggregation": "sum_then_normalize", "ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    },
    "RLOOConfig": {
        "learning_rate": 1e-6, "num_generations": 2, "max_completion_length": 512, "num_iterations": 1, "beta": 0.05,
        "epsilon": 0.2, "normalize_advantages": False, "vllm_mode": "colocate",
        "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
        "ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6,
    },
    "SFTConfig": {"learning_rate": 2e-5, "shuffle_dataset": False},
    "RewardConfig": {"learning_rate": 1e-4},
    "DPOConfig": {"learning_rate": 1e-6, "beta": 0.1, "loss_type": "sigmoid"},
}  # fmt: skip


ADAPTERS = {"LoraConfig": {"r": 8, "lora_alpha": 8}, "get_peft_model": {"r": 16, "lora_alpha": 16}}
"""What describes an adapter, peft's configuration or unsloth's function with the same keywords, with its defaults."""
LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
        "use_rslora": "use_rslora"}  # fmt: skip
"""Arguments of peft's LoraConfig, as TRL's ModelConfig calls them."""
NO_MATTER = ("task_type", "peft_type", "inference_mode", "peft_version", "base_model_name_or_path", "auto_mapping")
"""Of a LoraConfig: what does not change what is trained."""
ADAPTER = "peft_config."
"""Prefix of a LoraConfig's other arguments."""
ADAPTER_HAS = "an adapter has rank, alpha and targets"
"""What becomes of them."""


def adapter_arguments(described: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a LoraConfig under the names of TRL's ModelConfig, those that it lacks behind `peft_config.`."""
    used = {name: value for name, value in described.items() if value not in (None, False, "none", [], {})}
    return {"use_peft": True} | {LORA.get(name, ADAPTER + name): value for name, value in used.items() if name not in NO_MATTER}


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


class RewardModel(str):
    """The folder or hub name of a reward model in the place of a function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """The arguments of one of TRL's classes and of what goes with it."""

    kind: str
    arguments: Mapping[str, Any]
    """What the user wrote, by name."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Of a configuration object: every argument's value."""
    devices: int = 1
    """On how many TRL runs, which makes its batches larger."""
    file: Path | None = None
    rows: int | None = None
    """Of the training data, where they are known."""
    reads: list[str] = field(default_factory=list)
    """Names of the arguments that were read, in their order."""

    @property
    def online(self) -> bool:
        """True if completions are sampled."""
        return self.kind in ROLLED

    def get(self, name: str) -> Any:
        """An argument's value: what the user wrote, else the object's value, else TRL's default."""
        self.reads.append(name)
        return self._value(name)

    def _value(self, name: str) -> Any:
        return self.arguments[name] if name in self.arguments else self.values.get(name, self._defaults.get(name))

    @property
    def _defaults(self) -> dict[str, Any]:
        return DEFAULTS | OWN_DEFAULTS[self.kind]

    @property
    def last_set(self) -> str:
        """Of the arguments that were read the last one with another value than TRL's default: what an error is about."""
        return next((name for name in reversed(self.reads) if self._value(name) != self._defaults.get(name)), self.reads[-1])

    def written(self, name: str, default: Any = None) -> Any:
        """What the user wrote; `default` where he wrote nothing."""
        self.reads.append(name)
        return self.arguments.get(name, default)

    @property
    def completions(self) -> int:
        """Completions of one rollout."""
        rows, pieces = self.rows_per_pass, int(self.get("gradient_accumulation_steps"))
        return int(self.written("generation_batch_size") or rows * int(self.written("steps_per_generation") or pieces))

    @property
    def rows_per_pass(self) -> int:
        """Rows, or completions, of one forward pass on all devices."""
        return int(self.get("per_device_train_batch_size") or self.written("per_gpu_train_batch_size", 8)) * self.devices

    @property
    def prompts(self) -> int:
        """Prompts of one rollout."""
        return max(1, round(self.completions / int(self.get("num_generations"))))

    @property
    def passes(self) -> tuple[int, int]:
        """Forward passes over one rollout, and how many of them an optimizer step takes."""
        pieces = int(self.get("gradient_accumulation_steps"))
        if self.written("generation_batch_size"):
            return max(1, self.completions // self.rows_per_pass), pieces
        return int(self.written("steps_per_generation") or pieces), pieces

    @property
    def minibatches(self) -> int:
        """Optimizer steps of one pass over a rollout."""
        per_rollout, pieces = self.passes
        return max(1, round(per_rollout / pieces))

    @property
    def updates(self) -> int:
        """Optimizer steps of one of our steps."""
        return self.minibatches * max(1, int(self.get("num_iterations"))) if self.online else 1

    @property
    def updates_in_all(self) -> int | None:
        """Optimizer steps of the run, where they are known."""
        most = self.get("max_steps")
        if isinstance(most, int | float) and most > 0:
            return int(most)
        return None if self.steps is None else self.steps * self.updates

    @property
    def steps(self) -> int | None:
        """Our steps of the run, where they are known."""
        most = self.get("max_steps")
        if isinstance(most, int | float) and most > 0:
            return math.ceil(most / self.updates)
        if self.rows is None or not self.online:
            return None
        return max(1, math.ceil(float(self.get("num_train_epochs")) * max(1, self.rows // self.prompts)))

    def our_steps(self, count: Any, total: int | None) -> int | None:
        """Optimizer steps of TRL's as steps of ours; a share below 1 is one of all steps."""
        if not isinstance(count, int | float) or isinstance(count, bool) or count < 0:
            return None
        if 0 < count < 1:
            return None if total is None else max(1, math.ceil(count * total))
        return math.ceil(count / self.updates)


# ---------------------------------------------------------------- values in words


def short(value: Any) -> str:
    """A value in one line of 60 characters at most."""
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_shown)
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
        plain = re.fullmatch(r"[A-Za-z][\w./-]*(:[A-Za-z]\w*)?", value) and dump({"a": value}) == f"a: {value}\n"
        return value if plain else json.dumps(value, ensure_ascii=False)
    return dump({"a": value}).removeprefix("a: ").strip() if isinstance(value, bool | int | float | None) else _shown(value)


def mapping_of(text: str, file: Path) -> dict[str, Any]:
    """The arguments of a YAML or JSON file by name.  Raises ConfigError."""
    document, problems = parse(text, file.name)  # JSON is YAML
    if problems:
        raise ConfigError(str(problems[0]))
    if not isinstance(document.values, dict) or not document.values:
        raise ConfigError(f"{file} holds no arguments by name: a mapping such as `learning_rate: 1e-6` is needed")
    return document.values
