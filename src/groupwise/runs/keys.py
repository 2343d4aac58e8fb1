"""The sections of a recipe as `gw.train` takes them: a type for each, so that an editor completes and checks their keys.

Made from `config/settings.py` by `make docs`; what the keys mean stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from groupwise.config.settings import (
    ControlTokens,
    CorrectionSettings,
    DemonstrationSettings,
    EngineSettings,
    LoraSettings,
    Part,
    ReplaySettings,
    RewardSettings,
    ScratchSettings,
)
from groupwise.rewards.find import LiveReward

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

    from groupwise.models.policy import Policy

ModelGiven: TypeAlias = "str | PathLike[str] | PreTrainedModel | Policy"
"""A checkpoint's folder or hub name, or a loaded model."""
RowsGiven: TypeAlias = "str | PathLike[str] | Sequence[Mapping[str, Any]] | Dataset"
"""A file or hub name, or the rows themselves."""
RewardGiven: TypeAlias = "str | Callable[..., Any] | LiveReward | RewardKeys | RewardSettings"
"""A reward function by name, itself, or with its weight, name, arguments and timeout."""
EnvironmentGiven: TypeAlias = "str | Callable[..., Any]"
EnvironmentsGiven: TypeAlias = "EnvironmentGiven | Mapping[str, EnvironmentGiven]"
"""What makes an environment: a class or a function by name, or itself."""


class ScratchKeys(TypedDict, total=False):
    """Keys of `settings.ScratchSettings`."""

    family: Literal["llama", "qwen2", "qwen3", "gpt2", "gemma2", "mixtral"]
    hidden: int
    layers: int
    heads: int
    kv_heads: int | None
    context: int
    tokenizer: str


class LoraKeys(TypedDict, total=False):
    """Keys of `settings.LoraSettings`."""

    rank: int
    alpha: float
    targets: str | Sequence[str]


class ModelKeys(TypedDict, total=False):
    """Keys of `settings.ModelSettings`."""

    path: ModelGiven | None
    scratch: ScratchKeys | ScratchSettings | None
    dtype: Literal["float32", "bfloat16", "autocast"]
    device: Literal["auto", "cpu", "cuda"]
    attention: Literal["shared", "packed", "single"]
    gradient_checkpointing: bool
    dropout: bool
    lora: LoraKeys | LoraSettings | None
    chat_template: str | None
    trust_remote_code: bool


class DataKeys(TypedDict, total=False):
    """Keys of `settings.DataSettings`."""

    path: RowsGiven | None
    split: str
    task: str | None
    task_args: Mapping[str, Any]
    columns: Mapping[str, str]
    system: str | None
    chat: bool
    template: str | None
    limit: int | None
    control_tokens: ControlTokens
    max_prompt_tokens: int | None
    too_long: Literal["drop", "truncate_left", "error"]
    retire: int
    curriculum: float
    shuffle: bool
    eval_path: RowsGiven | None
    eval_split: str
    eval_fraction: float | Mapping[str, float]
    eval_limit: int | None
    train_on: Literal["completion", "all"]


class RewardKeys(TypedDict, total=False):
    """Keys of `settings.RewardSettings`."""

    function: str | Callable[..., Any]
    weight: float
    name: str | None
    args: Mapping[str, Any]
    timeout: float | None


class CorrectionKeys(TypedDict, total=False):
    """Keys of `settings.CorrectionSettings`."""

    level: Literal["token", "sequence_sum", "sequence_mean"]
    mode: Literal["truncate", "mask"]
    low: float
    high: float


class EngineKeys(TypedDict, total=False):
    """Keys of `settings.EngineSettings`."""

    name: str
    servers: Sequence[str]
    colocated: bool
    dtype: Literal["float32", "bfloat16"] | None
    ahead: int
    correct: CorrectionKeys | CorrectionSettings | None
    args: Mapping[str, Any]


class RolloutKeys(TypedDict, total=False):
    """Keys of `settings.RolloutSettings`."""

    engine: str | EngineKeys | EngineKeys | EngineSettings
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int
    stop: Sequence[str]
    max_rows: int
    keep_special_tokens: bool


class EnvironmentKeys(TypedDict, total=False):
    """Keys of `settings.EnvironmentSettings`."""

    tools: Sequence[str | Callable[..., Any]]
    factory: EnvironmentsGiven | None
    args: Mapping[str, Any]
    interface: Literal["tools", "step"] | None
    reasoning_gym: str | None
    openenv: str | None
    harness: str | Sequence[str] | None
    verifiers: str | None
    listen: str
    at_once: int
    max_turns: int
    tool_timeout: float
    episode_timeout: float
    max_observation_tokens: int
    max_observation_bytes: int
    past: Literal["keep", "split"]
    runs: Literal["process", "thread"] | None


class GroupKeys(TypedDict, total=False):
    """Keys of `settings.GroupSettings`."""

    prompts_per_step: int
    group_size: int
    updates_per_rollout: int
    minibatches: int
    beta: float | None
    kl: Literal["k1", "k2", "k3", "k3_ratio"] | None
    credit: Part | None
    ratio: Part | None
    surrogate: Part | None
    weights: Part | None
    divergence: Part | None
    mix: float | None
    dead_groups: Literal["exact", "drop", "refill"] | None
    filter: Part | None
    max_refills: int
    truncated: Literal["keep", "mask"] | None
    entropy_bonus: float
    entropy_target: float | None
    entropy_step: float
    entropy_quantile: float
    off_policy_delta: float | None
    reference_refresh: int
    reference_mix: float


class CriticKeys(TypedDict, total=False):
    """Keys of `settings.CriticSettings`."""

    path: str | None
    lr: float
    coefficient: float
    clip: float | None
    pretrain: int


class DemonstrationKeys(TypedDict, total=False):
    """Keys of `settings.DemonstrationSettings`."""

    path: str
    rows: int
    lm: float
    divergence: float


class TeacherKeys(TypedDict, total=False):
    """Keys of `settings.TeacherSettings`."""

    path: str | None
    servers: Sequence[str]
    ema: float
    hint: str | None
    demonstrations: DemonstrationKeys | DemonstrationSettings | None


class OptimizerKeys(TypedDict, total=False):
    """Keys of `settings.OptimizerSettings`."""

    lr: float
    schedule: Literal["constant", "linear", "cosine"]
    min_lr_ratio: float
    warmup_steps: int
    betas: Sequence[float]
    eps: float
    weight_decay: float
    clip_norm: float | None
    tokens_per_microbatch: int | None
    max_nonfinite_steps: int


class EvalKeys(TypedDict, total=False):
    """Keys of `settings.EvalSettings`."""

    every: int
    at_start: bool
    prompts: int | None
    k: int
    temperature: float
    max_new_tokens: int | None
    batches: int | None


class SaveKeys(TypedDict, total=False):
    """Keys of `settings.SaveSettings`."""

    every: int
    keep: int
    rollouts_every: int
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...]


class ReplayKeys(TypedDict, total=False):
    """Keys of `settings.ReplaySettings`."""

    path: str | None
    task: str | None
    share: float


class RewardModelKeys(TypedDict, total=False):
    """Keys of `settings.RewardModelSettings`."""

    pooling: Literal["last", "mean", "sum"]
    centering: float
    lm_coefficient: float
    replay: ReplayKeys | ReplaySettings | None


class PairKeys(TypedDict, total=False):
    """Keys of `settings.PairSettings`."""

    beta: float
    loss: Literal["sigmoid", "ipo"]


class ParallelKeys(TypedDict, total=False):
    """Keys of `settings.ParallelSettings`."""

    name: Literal["auto", "ddp", "zero2", "zero3"]
    shards: int | None
    offload: bool
