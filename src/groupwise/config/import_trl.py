"""A configuration of TRL as a recipe: read line by line, and of every line it is said what becomes of it.

    found = import_trl("grpo.yaml")         # YAML, JSON, a script with GRPOConfig(...) in it, or a shell script that starts TRL
    print(found.render())                   # the recipe, each key with the argument that it is from

What the file says is read by `trl_files.py`, which runs nothing.  TRL's defaults that differ from ours are written into the recipe,
so that it means what the configuration meant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from groupwise.config.schema import closest
from groupwise.config.settings import REWARDS
from groupwise.config.trl import FATES, TABLE, Fate
from groupwise.config.trl_files import (
    KINDS,
    OPEN,
    ROLLED,
    SHELL_SCRIPTS,
    Line,
    Named,
    RewardModel,
    flow,
    mapping_of,
    parallel_of,
    read_arguments,
    short,
)
from groupwise.config.validation import DATA_SUFFIXES
from groupwise.errors import ConfigError
from groupwise.utils.files import expanded

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
WRITTEN = ("learning_rate", "num_generations", "max_completion_length", "gradient_checkpointing", "seed")
"""Defaults that are carried over where the configuration does not say them, because ours differ, or may come to."""
DEFAULT = "TRL's default"
"""How the comment of a key begins that no argument says."""
DASHBOARDS = ("tensorboard", "wandb", "mlflow", "trackio")
ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_xla", "paged_adamw_32bit", "paged_adamw")
PRESETS = ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
"""Losses of TRL's that are presets of the same name here; its `dapo` is bnpo."""
REWARD_NAMES = {
    "accuracy": "accuracy", "accuracy_reward": "accuracy", "think_format_reward": "think_format", "format": "think_format",
    "format_reward": "think_format", "tag_count": "tags", "tag_count_reward": "tags",
}  # fmt: skip
"""Reward functions of TRL and of well-known scripts that are built in here."""

LIBRARIES = ("trl", "open_r1")
"""Packages in which these names mean what is built in here."""

OVERLONG = ("get_soft_overlong_punishment", "soft_overlong_punishment")
"""The same for `soft_overlong`, whose arguments TRL's script sets to 1280 and 256."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """A configuration of TRL as a recipe."""

    source: str
    kind: str
    """TRL's class."""
    lines: tuple[Line, ...]
    """Every argument that was given, in its order."""
    keys: Mapping[str, Any]
    """The recipe: dotted key -> value."""
    comments: Mapping[str, str]
    """Dotted key -> where it is from."""
    needed: tuple[str, ...]
    """What the recipe still has to say, because the configuration does not."""

    def tree(self) -> dict[str, Any]:
        """The recipe as nested mappings."""
        root: dict[str, Any] = {}
        for key, value in self.keys.items():
            *sections, last = key.split(".")
            here = root
            for section in sections:
                here = here.setdefault(section, {})
            here[last] = value
        return root

    def by_fate(self) -> dict[str, list[Line]]:
        """The lines by what became of them, in words."""
        titles = {**FATES, None: "not read"}
        return {title: here for fate, title in titles.items() if (here := [line for line in self.lines if line.fate == fate])}

    def summary(self) -> str:
        """How many lines came to what, and each line that is lost or means something else."""
        fates = self.by_fate()
        lines = [
            f"{self.source}: {self.kind}, {len(self.lines)} arguments: " + ", ".join(f"{len(v)} {k}" for k, v in fates.items())
        ]
        for title in (FATES["changed"], FATES["missing"], "not read"):
            lines += [f"  {title}: {line}" for line in fates.get(title, ())]
        return "\n".join([*lines, *(f"  still to say: {one}" for one in self.needed)])

    def render(self) -> str:
        """The recipe as YAML: at its head what became of each argument, behind each key where it is from."""
        lines = [f"# From TRL's {self.kind} in {Path(self.source).name}, by `groupwise recipes import-trl`."]
        for title, here in self.by_fate().items():
            lines += [f"# {title}:", *(f"#   {_one_line(line)}" for line in here)]
        lines += ["# still to say:", *(f"#   {one}" for one in self.needed)] if self.needed else []
        return "\n".join([*lines, *self._rendered(self.tree(), "")]) + "\n"

    def _rendered(self, tree: Mapping[str, Any], prefix: str, indent: str = "") -> Iterator[str]:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and key not in self.keys:
                yield f"{indent}{name}:"
                yield from self._rendered(value, f"{key}.", f"{indent}  ")
            else:
                comment = self.comments.get(key, "")
                yield f"{indent}{name}: {flow(value)}" + (f"  # {_one_line(comment)}" if comment else "")


def import_trl(path: str | Path, *, devices: int = 1, kind: str | None = None) -> Imported:
    """Read a configuration: YAML or JSON with arguments by name, a Python script that makes one of the classes, or a shell script
    (.sh) with the command that starts TRL.

    devices: on how many TRL ran, which makes its batches larger; a launcher's `--num_processes` goes before it.
    kind: TRL's class; default: the one that a script makes, that a command names, or whose arguments a file holds.
    Raises ConfigError for a file that cannot be read, or that holds no configuration.
    """
    file = expanded(path)
    if devices < 1:
        raise ConfigError(f"the number of devices is at least 1, got {devices}")
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"TRL's class is one of {', '.join(KINDS)}; got {kind!r}{closest(kind, list(KINDS))}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    try:
        name, given, unread = read_arguments(text, file, kind)
        if isinstance(processes := given.get("num_processes"), int) and processes > 0 and file.suffix in SHELL_SCRIPTS:
            devices = processes
        return _Translation(source=str(file), kind=name, given=given, devices=devices).made(unread)
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:  # a value of another type than TRL has there
        raise ConfigError(f"{file}: a value in it is none that TRL takes ({type(error).__name__}: {error})") from error


# ---------------------------------------------------------------- translating


@dataclass(kw_only=True)
class _Translation:
    source: str
    kind: str
    given: dict[str, Any]
    devices: int
    keys: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    notes: dict[str, tuple[Fate, str]] = field(default_factory=dict)
    """Arguments whose fate depends on their value."""
    written: dict[str, list[str]] = field(default_factory=dict)
    """Argument -> the keys that were written from it."""
    needed: list[str] = field(default_factory=list)

    @property
    def online(self) -> bool:
        return self.kind in ROLLED

    def get(self, name: str) -> Any:
        """An argument as given, else TRL's default."""
        own = OWN_DEFAULTS[self.kind]
        return self.given.get(name, own[name] if name in own else DEFAULTS.get(name))

    def put(self, key: str, value: Any, *names: str, says: str = "") -> None:
        """A key of the recipe, from arguments of these names."""
        said = [name for name in names if name in self.given]
        source = ", ".join(said) or f"{DEFAULT} {names[0]}"
        self.keys[key], self.comments[key] = value, f"{source}: {says}" if says else source
        for name in said:
            self.written.setdefault(name, []).append(key)

    def note(self, name: str, fate: Fate, says: str) -> None:
        """What became of an argument, where its value decides."""
        if name in self.given:
            self.notes[name] = (fate, says)

    def made(self, unread: Sequence[Line]) -> Imported:
        """The recipe."""
        self.keys["objective"] = KINDS[self.kind]
        self._names()
        for part in (self._model, self._data, self._length, self._optimizer, self._batch, self._evaluation, self._saving):
            part()
        if self.online:
            for part in (
                self._objective if self.kind == "GRPOConfig" else self._rloo,
                self._surrogate,
                self._sampling,
                self._rewards,
                self._environment,
            ):
                part()
        elif self.kind == "DPOConfig":
            self._pairs()
        elif self.kind == "RewardConfig" and self.given.get("center_rewards_coefficient"):
            self.put("reward_model.centering", float(self.given["center_rewards_coefficient"]), "center_rewards_coefficient")
        if any(line.name == OPEN for line in unread):
            self._leave_defaults_open()
        lines = [self._line(name, value) for name, value in self.given.items()]
        order = ["objective", "name", "seed", "steps", "epochs", "batch_size", "parallel"]
        ranked = sorted(self.keys, key=lambda key: (order.index(key) if key in order else len(order), 0))
        return Imported(
            source=self.source,
            kind=self.kind,
            lines=(*lines, *unread),
            keys={key: self.keys[key] for key in ranked},
            comments=self.comments,
            needed=tuple(self.needed),
        )

    def _leave_defaults_open(self) -> None:
        """Take out what stands in the recipe only because TRL's default is so: arguments that are not known may say otherwise."""
        default = [key for key in self.keys if self.comments.get(key, "").startswith(DEFAULT)]
        values = ", ".join(f"{key} {flow(self.keys.pop(key))}" for key in default)
        if values:
            self.needed.append(f"what {OPEN} sets of these, which are TRL's where it sets nothing: {values}")

    def _line(self, name: str, value: Any) -> Line:
        if name in self.notes:
            return Line(name, value, *self.notes[name])
        argument = TABLE.get(name)
        if argument is None:
            near = closest(name, list(TABLE))
            return Line(name, value, None, f"no argument of TRL 1.16{near}")
        if argument.fate == "missing" and value in (None, False, 0, 0.0, "no", ""):
            return Line(name, value, "unneeded", "it is off")
        if argument.key is None or argument.fate == "missing":
            return Line(name, value, argument.fate, argument.says)
        keys = self.written.get(name, [])
        written = ", ".join(f"{key}: {short(flow(self.keys[key]))}" for key in dict.fromkeys(keys))
        return Line(name, value, argument.fate, written or f"{argument.key}: nothing to write, it is so here")

    # ------------------------------------------------------------ parts

    def _names(self) -> None:
        folder = self.given.get("output_dir") or self.given.get("run_name")
        if isinstance(folder, str) and (name := re.sub(r"[^\w.+-]+", "-", Path(folder).name).strip("-.")):
            self.put("name", name, "output_dir" if self.given.get("output_dir") else "run_name")
        self.put("seed", int(self.get("seed")), "seed")

    def _model(self) -> None:
        path = self.given.get("model_name_or_path")
        if self.given.get("model_revision") == "main":
            self.note("model_revision", "unneeded", "main is the newest")
        if isinstance(path, str):
            self.put("model.path", path, "model_name_or_path")
        else:
            self.note("model_name_or_path", "missing", "a loaded model: give its folder or hub name as model.path")
            self.needed.append("model.path: a checkpoint's folder or hub name")
        options = self.given.get("model_init_kwargs")
        own = options.get("dtype", options.get("torch_dtype")) if isinstance(options, Mapping) else None
        named = next((name for name in ("dtype", "torch_dtype") if name in self.given), None)
        dtype = str(own or (self.given[named] if named else self.get("dtype"))).removeprefix("torch.")
        half = bool(self.given.get("fp16")) or (self.get("bf16") is not False)
        wanted = "bfloat16" if dtype == "bfloat16" else "autocast" if half or dtype == "float16" else "float32"
        source = ("model_init_kwargs",) if own else ((named,) if named and wanted == "bfloat16" else ("bf16",))
        self.put("model.dtype", wanted, *source)
        if named is not None and wanted == "autocast":
            self.note(named, "changed", "float32 weights with bf16: model.dtype: autocast")
        if "bf16" in self.given and wanted == "bfloat16":
            self.note("bf16", "unneeded", "the weights themselves are bfloat16")
        if "attn_implementation" in self.given:
            self.note("attn_implementation", "unneeded", "the device chooses the kernel; attention is packed")
        if dtype == "float16":
            self.note(
                named or "model_init_kwargs",
                "changed",
                "model.dtype: autocast: float32 weights and bfloat16 products; there is no float16",
            )
        checkpointing = self.given.get("activation_checkpointing")
        if checkpointing is None:
            self.put("model.gradient_checkpointing", bool(self.get("gradient_checkpointing")), "gradient_checkpointing")
        else:
            self.put("model.gradient_checkpointing", bool(checkpointing), "activation_checkpointing")
        for name in ("chat_template_path", "chat_template"):
            if isinstance(self.given.get(name), str):
                self.put("model.chat_template", self.given[name], name)
        if self.given.get("trust_remote_code"):
            self.put("model.trust_remote_code", True, "trust_remote_code")
        if self.given.get("use_cpu"):
            self.put("model.device", "cpu", "use_cpu")
        if self.given.get("use_peft"):
            lora = {"rank": int(self.given.get("lora_r", 16)), "alpha": int(self.given.get("lora_alpha", 32))}
            targets = self.given.get("lora_target_modules")
            lora |= {"targets": "all-linear" if targets in (None, "all-linear") else targets}
            self.put("model.lora", lora, "use_peft", "lora_r", "lora_alpha", "lora_target_modules")
        self._spread()

    def _spread(self) -> None:
        option = next((name for name in ("deepspeed", "fsdp", "config_file") if self.given.get(name)), None)
        if option is None:
            return
        given = self.given[option]
        if isinstance(given, str):
            for file in (Path(self.source).parent / given, Path(given)):
                if file.is_file():
                    given = mapping_of(file.read_text(encoding="utf-8"), file)
                    break
        both = {option: given} | ({"fsdp_config": self.given["fsdp_config"]} if self.given.get("fsdp_config") else {})
        self.put("parallel", parallel_of(both), *both)

    def _data(self) -> None:
        name, config = self.given.get("dataset_name"), self.given.get("dataset_config")
        split, part = self.given.get("dataset_train_split") or "train", self.given.get("dataset_test_split") or "test"
        if isinstance(name, str):
            name = f"{name}:{config}" if config else name
            self.put("data.path", name, "dataset_name", "dataset_config")
            if split != "train":
                self.put("data.split", split, "dataset_train_split")
        else:
            self.needed.append("data.path: a file or hub name")
        # A script hands the rows over; TRL's command takes another split of the same data set.
        held = self.given.get("eval_dataset_name") if self.source.endswith(".py") else name if self._evaluates() else None
        if isinstance(held, str) and (held != name or (part != split and not held.endswith(DATA_SUFFIXES))):
            self.put("data.eval_path", held, "eval_dataset_name", "dataset_name", says="for evaluation")
            if part != "test":
                self.put("data.eval_split", part, "dataset_test_split")
        elif isinstance(held, str):
            self.needed.append(f"data.eval_path, or data.eval_fraction: a part of {held} to evaluate on, and not to train on")
        if "eval_dataset_name" in self.given:
            self.note("eval_dataset_name", "same", "data.eval_path")
        if isinstance(column := self.given.get("dataset_prompt_column"), str) and column != "prompt":
            self.put("data.columns", {"prompt": column}, "dataset_prompt_column")
        if isinstance(system := self.given.get("system_prompt"), str):
            self.put("data.chat", True, "system_prompt", says="strings become messages of the user")
            self.put("data.system", system, "system_prompt")
        if self.kind == "SFTConfig":
            if self.given.get("completion_only_loss") is False:
                self.put("data.train_on", "all", "completion_only_loss")
            self.put("data.shuffle", bool(self.get("shuffle_dataset")), "shuffle_dataset")
        elif self.given.get("shuffle_dataset") is False:
            self.put("data.shuffle", False, "shuffle_dataset")
        if isinstance(limit := self.given.get("max_prompt_length"), int) and self.online:
            self.put("data.max_prompt_tokens", limit, "max_prompt_length")
            self.put("data.too_long", "truncate_left", "max_prompt_length", says="TRL keeps the end of a longer prompt")

    def _evaluates(self) -> bool:
        return (self.given.get("evaluation_strategy") or self.get("eval_strategy")) not in ("no", None)

    def _optimizer(self) -> None:
        self.put("optimizer.lr", float(self.get("learning_rate")), "learning_rate")
        kind, options = str(self.get("lr_scheduler_type")), self.given.get("lr_scheduler_kwargs")
        options = options if isinstance(options, Mapping) else {}
        schedules = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
                     "cosine_with_min_lr": "cosine"}  # fmt: skip
        if kind in schedules:
            self.put("optimizer.schedule", schedules[kind], "lr_scheduler_type")
        else:
            self.put("optimizer.schedule", "cosine", "lr_scheduler_type", says=f"the nearest to {kind}")
            self.note("lr_scheduler_type", "missing", f"{kind}: constant, linear and cosine are there; cosine is written")
        lr = float(self.get("learning_rate"))
        least = options.get("min_lr_rate", options["min_lr"] / lr if "min_lr" in options and lr else None)
        if least is not None and kind == "cosine_with_min_lr":
            self.put("optimizer.min_lr_ratio", float(least), "lr_scheduler_kwargs")
        elif options:
            self.note("lr_scheduler_kwargs", "missing", "only min_lr and min_lr_rate of cosine_with_min_lr are")
        if "adam_beta1" in self.given or "adam_beta2" in self.given:
            betas = [float(self.given.get("adam_beta1", 0.9)), float(self.given.get("adam_beta2", 0.999))]
            self.put("optimizer.betas", betas, "adam_beta1", "adam_beta2")
        for name, key in (("adam_epsilon", "optimizer.eps"), ("weight_decay", "optimizer.weight_decay")):
            if name in self.given:
                self.put(key, float(self.given[name]), name)
        if "max_grad_norm" in self.given:
            norm = float(self.given["max_grad_norm"] or 0.0)
            self.put("optimizer.clip_norm", norm or None, "max_grad_norm")
        kind = str(self.given.get("optim", "adamw_torch"))
        if kind not in ADAMW:
            self.note("optim", "missing" if not kind.startswith(("adamw", "paged_adamw")) else "changed",
                      f"{kind}: AdamW with float32 state takes its place")  # fmt: skip

    def _batch(self) -> None:
        rows = int(self.get("per_device_train_batch_size") or self.given.get("per_gpu_train_batch_size", 8)) * self.devices
        pieces = int(self.get("gradient_accumulation_steps"))
        says = f"{rows // self.devices} x {self.devices} device{'s' * (self.devices > 1)} x {pieces} steps"
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        if not self.online:
            self.put("batch_size", rows * pieces, *names, says=says)
            return
        size = int(self.get("num_generations"))
        per_rollout = int(self.given.get("steps_per_generation") or pieces)
        completions = int(self.given.get("generation_batch_size") or rows * per_rollout)
        if self.given.get("generation_batch_size"):
            per_rollout = max(1, completions // rows)
        self.put("group.group_size", size, "num_generations")
        says = f"{completions} completions of a rollout / {size}"
        if completions % size:
            says += f" is {Fraction(completions, size)}: rounded"
            self.note("num_generations", "changed", f"group.group_size; {completions} completions are no whole number of groups")
        self.put("group.prompts_per_step", max(1, round(completions / size)), *names, "generation_batch_size", says=says)
        updates, rest = divmod(per_rollout, pieces)
        if updates > 1 or rest:
            self.put("group.minibatches", max(1, round(per_rollout / pieces)), "steps_per_generation", "generation_batch_size",
                     says=f"{per_rollout} / {pieces}")  # fmt: skip
        if int(self.get("num_iterations")) > 1:
            self.put("group.updates_per_rollout", int(self.get("num_iterations")), "num_iterations")

    @property
    def _updates(self) -> int:
        """Optimizer steps of one of our steps."""
        return self.keys.get("group.updates_per_rollout", 1) * self.keys.get("group.minibatches", 1) if self.online else 1

    def _steps_of(self, count: Any, total: int | None) -> int | None:
        """Optimizer steps of TRL's as steps of ours; a share below 1 is one of all steps."""
        if not isinstance(count, int | float) or isinstance(count, bool) or count < 0:
            return None
        if 0 < count < 1:
            return None if total is None else max(1, math.ceil(count * total))
        return math.ceil(count / self._updates)

    def _length(self) -> None:
        if self.online:
            self._batch()  # how many optimizer steps a step has is needed first
        most = self.get("max_steps")
        epochs = float(self.get("num_train_epochs"))
        if isinstance(most, int | float) and most > 0:
            self.put(
                "steps",
                math.ceil(most / self._updates),
                "max_steps",
                says=f"{self._updates} optimizer steps each" * (self._updates > 1),
            )
            self.note("num_train_epochs", "unneeded", "max_steps takes its place")
        elif self.online:
            self.note("max_steps", "unneeded", "it is off: num_train_epochs counts")
            prompts = self.keys["group.prompts_per_step"]
            self.note("num_train_epochs", "changed", "steps counts rollouts, and how many rows there are is not known here")
            self.needed.append(f"steps: {epochs:g} epochs are {epochs:g} x rows of the data / {prompts} prompts")
        else:
            self.note("max_steps", "unneeded", "it is off: num_train_epochs counts")
            self.put("epochs", epochs, "num_train_epochs")
        self._warm_up(self.keys.get("steps"))

    def _warm_up(self, steps: int | None) -> None:
        given = self.given.get("warmup_ratio") or self.given.get("warmup_steps")
        name = "warmup_ratio" if self.given.get("warmup_ratio") else "warmup_steps"
        if not given:
            return
        if given >= 1:
            self.put("optimizer.warmup_steps", int(given), name)
        elif steps is not None:
            most = self.get("max_steps")
            total = int(most) if isinstance(most, int | float) and most > 0 else steps * self._updates
            self.put("optimizer.warmup_steps", math.ceil(given * total), name, says=f"{given:g} of all optimizer steps")
        else:
            self.note(name, "changed", "optimizer.warmup_steps counts optimizer steps, and how many there are is not known here")
            self.needed.append(f"optimizer.warmup_steps: {given:g} of all optimizer steps")

    def _evaluation(self) -> None:
        self.put("eval.at_start", bool(self.given.get("eval_on_start", False)), "eval_on_start")
        strategy = self.given.get("evaluation_strategy") or self.get("eval_strategy")
        if strategy == "steps":
            every = self._steps_of(self.given.get("eval_steps", self.get_logging()), self.keys.get("steps"))
            if every is not None:
                self.put("eval.every", every, "eval_steps", "eval_strategy", "evaluation_strategy")
            else:
                self.note("eval_steps", "changed", "eval.every counts steps, and how many there are is not known here")
        if self.given.get("num_generations_eval"):
            self.put("eval.k", int(self.given["num_generations_eval"]), "num_generations_eval")

    def get_logging(self) -> Any:
        """TRL evaluates as often as it logs, where nothing else is said."""
        return self.given.get("logging_steps", 10)

    def _saving(self) -> None:
        strategy = str(self.get("save_strategy"))
        every = self._steps_of(self.get("save_steps"), self.keys.get("steps")) if strategy == "steps" else 0
        if every is not None:
            self.put(
                "save.every",
                every,
                "save_strategy" if strategy != "steps" else "save_steps",
                says=f"{strategy}" * (strategy != "steps"),
            )
        else:
            self.note("save_steps", "changed", "save.every counts steps, and how many there are is not known here")
        keep = self.given.get("save_total_limit")
        if isinstance(keep, int) and not isinstance(keep, bool):
            self.put("save.keep", max(2, keep), "save_total_limit", says="at least 2" * (keep < 2))
            if keep < 2:
                self.note("save_total_limit", "changed", "save.keep is at least 2: the newest is verified before older ones go")
        report = self.given.get("report_to")
        boards = [name for name in (report if isinstance(report, list) else [report]) if name in DASHBOARDS]
        if boards:
            self.put("save.report_to", boards, "report_to")

    def _objective(self) -> None:
        loss = str(self.get("loss_type"))
        preset = "bnpo" if loss == "dapo" else loss
        if self.given.get("multi_objective_aggregation") == "normalize_then_sum":
            preset = "gdpo"
        if preset not in (*PRESETS, "gdpo"):
            self.note("loss_type", "missing", f"{loss}: TRL 1.16 knows {', '.join(('dapo', *PRESETS))}{closest(loss, PRESETS)}")
            preset = "bnpo"
        self.put("objective", preset, "loss_type", says="TRL's dapo is a mean over tokens" * (loss == "dapo"))
        scale = self.get("scale_rewards")
        scale = {True: "group", False: "none", "True": "group", "False": "none"}.get(scale, scale)
        if preset != "gdpo" and (preset == "dr_grpo") != (scale == "none"):
            self.put("group.credit", {"name": "standardized", "scale": str(scale)}, "scale_rewards",
                     says="TRL's loss_type dr_grpo leaves it to scale_rewards" * (preset == "dr_grpo"))  # fmt: skip
        elif preset not in ("gdpo", "dr_grpo") and scale != "group":
            self.put("group.credit", {"name": "standardized", "scale": str(scale)}, "scale_rewards")
        if preset in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo") and self.get("importance_sampling_level") == "sequence":
            self.put("group.ratio", "sequence_mean", "importance_sampling_level")
        beta = float(self.get("beta") or 0.0)
        if beta:
            self.put("group.beta", beta, "beta")
            self.put("group.kl", "k3_ratio" if self.get("use_bias_correction_kl") else "k3", "use_bias_correction_kl")
        if self.given.get("mask_truncated_completions"):
            self.put("group.truncated", "mask", "mask_truncated_completions")
        upper = float(self.given.get("top_entropy_quantile", 1.0))
        if upper < 1.0:
            self.put("group.entropy_quantile", round(1.0 - upper, 12), "top_entropy_quantile")
        if self.given.get("use_adaptive_entropy"):
            self.put("group.entropy_target", float(self.get("entropy_target")), "entropy_target", "use_adaptive_entropy")
            self.put("group.entropy_bonus", float(self.get("entropy_coef_max")), "entropy_coef_max", "use_adaptive_entropy")
            self.put("group.entropy_step", float(self.get("entropy_coef_delta")), "entropy_coef_delta", "use_adaptive_entropy")
            self.note("entropy_coef", "changed", "an adaptive coefficient begins at 0")
        else:
            for name in ("entropy_target", "entropy_coef_max", "entropy_coef_min", "entropy_coef_delta", "use_adaptive_entropy"):
                self.note(name, "unneeded", "of use_adaptive_entropy, which is off")
            if self.given.get("entropy_coef"):
                self.put("group.entropy_bonus", float(self.given["entropy_coef"]), "entropy_coef")
        if self.given.get("off_policy_mask_threshold"):
            self.put("group.off_policy_delta", float(self.given["off_policy_mask_threshold"]), "off_policy_mask_threshold")
        self._moving_reference()
        if "beta" not in self.given:
            return
        self.note("beta", "same", "group.beta" if beta else "0 is the preset's default")

    def _rloo(self) -> None:
        self.put("group.beta", float(self.get("beta") or 0.0), "beta", says="of the KL in the reward")
        if self.get("normalize_advantages"):
            self.put("group.credit", {"name": "leave_one_out", "scale": "batch"}, "normalize_advantages")
        if self.given.get("mask_truncated_completions"):
            self.put("group.truncated", "mask", "mask_truncated_completions")
        self._moving_reference()

    def _moving_reference(self) -> None:
        if self.given.get("sync_ref_model"):
            self.put("group.reference_refresh", self._steps_of(self.get("ref_model_sync_steps"), None) or 1, "ref_model_sync_steps")
            self.put("group.reference_mix", float(self.get("ref_model_mixup_alpha")), "ref_model_mixup_alpha")

    def _surrogate(self) -> None:
        preset = self.keys["objective"]
        low, high, delta = float(self.get("epsilon")), self.given.get("epsilon_high"), self.given.get("delta")
        if preset == "cispo":
            if high is not None:
                self.put("group.surrogate", {"name": "cispo", "cap": float(high)}, "epsilon_high")
        elif preset == "sapo":
            self._named("sapo", {"tau_pos": "sapo_temperature_pos", "tau_neg": "sapo_temperature_neg"})
        elif preset == "vespo":
            self._named("vespo", {"k_pos": "vespo_k_pos", "lam_pos": "vespo_lambda_pos", "k_neg": "vespo_k_neg",
                                  "lam_neg": "vespo_lambda_neg"})  # fmt: skip
        elif preset == "luspo" or (low, high, delta) != (0.2, None, None):
            upper = low if high is None else float(high)
            clipped = {"name": "clipped", "low": low, "high": upper} | ({} if delta is None else {"delta": float(delta)})
            self.put("group.surrogate", clipped, "epsilon", "epsilon_high", "delta")

    def _named(self, name: str, arguments: Mapping[str, str]) -> None:
        said = {ours: float(self.given[theirs]) for ours, theirs in arguments.items() if theirs in self.given}
        if said:
            self.put("group.surrogate", {"name": name, **said}, *arguments.values())

    def _sampling(self) -> None:
        self.put("rollout.max_new_tokens", int(self.get("max_completion_length")), "max_completion_length")
        for name, kind in (("temperature", float), ("top_p", float), ("top_k", int), ("min_p", float)):
            value = self.given.get(name)
            if value is not None:
                self.put(f"rollout.{name}", max(kind(value), 0), name)
        if self.given.get("repetition_penalty", 1.0) == 1.0:
            self.note("repetition_penalty", "unneeded", "1 is none")
        options = self.given.get("generation_kwargs")
        if isinstance(options, Mapping) and options.get("stop"):
            stop = options["stop"]
            self.put("rollout.stop", [stop] if isinstance(stop, str) else list(stop), "generation_kwargs")
        if not self.given.get("use_vllm"):
            return
        engine: dict[str, Any] = {"name": "vllm"}
        names = ["use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_device"]
        if self.get("vllm_mode") == "colocate" and "vllm_server_base_url" not in self.given and "vllm_device" not in self.given:
            engine["colocated"] = True
        elif "vllm_server_base_url" in self.given:
            engine["servers"] = [str(self.given["vllm_server_base_url"])]
        elif "vllm_device" not in self.given:
            host = str(self.get("vllm_server_host"))
            engine["servers"] = [f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self.get('vllm_server_port')}"]
        if not self.get("vllm_importance_sampling_correction"):
            engine["correct"] = None
        elif any(name.startswith("vllm_importance_sampling") for name in self.given):
            level, _, mode = str(self.get("vllm_importance_sampling_mode")).partition("_")
            high = self.given.get("vllm_importance_sampling_cap", self.get("vllm_importance_sampling_clip_max"))
            low = self.given.get("vllm_importance_sampling_clip_min")
            engine["correct"] = {"level": "token" if level == "token" else "sequence_sum", "mode": mode or "mask"}
            engine["correct"] |= {name: float(bound) for name, bound in (("high", high), ("low", low)) if bound is not None}
        self.put("rollout.engine", engine, *names, *(name for name in self.given if name.startswith("vllm_importance")))

    def _rewards(self) -> None:
        functions = self.given.get("reward_funcs")
        functions = [functions] if isinstance(functions, str) else functions
        judge = self.given.get("reward_model_name_or_path")
        if isinstance(judge, str):  # TRL's scripts put it before the functions
            functions = [RewardModel(judge), *(functions if isinstance(functions, list) else [])]
        weights = self.given.get("reward_weights")
        if not isinstance(functions, list) or not functions:
            self.needed.append("rewards: a list of {function: module:function or file.py:function, weight: ...}")
            self.note("reward_weights", "changed", "rewards.N.weight, one in each entry of rewards")
            return
        known: list[dict[str, Any]] = []
        own: list[str] = []
        for place, name in enumerate(functions):
            entry: dict[str, Any]
            if isinstance(name, RewardModel):
                entry = {"function": "model", "args": {"path": str(name)}}
            elif isinstance(name, Named):
                ours = name.place.partition(".")[0] in LIBRARIES and REWARD_NAMES.get(name.name)
                entry = {"function": ours or self._function(name, "rewards")}
            elif name in OVERLONG:
                length, cache = self.given.get("max_completion_len", 1280), self.given.get("soft_punish_cache", 256)
                entry = {"function": "soft_overlong", "args": {"max_tokens": int(length), "cache": int(cache)}}
            elif name in REWARD_NAMES or name in REWARDS or ":" in name:
                entry = {"function": REWARD_NAMES.get(name, name)}
            elif "." in name:  # TRL's dotted path
                entry = {"function": ":".join(name.rsplit(".", 1))}
            else:
                entry = {"function": f"rewards.py:{name}"}
                own.append(name)
            weight = weights[place] if isinstance(weights, list) and place < len(weights) else None
            taken = [one.get("name", one["function"].rpartition(":")[2]) for one in known]
            if entry["function"].rpartition(":")[2] in taken:  # names tell rewards apart
                entry["name"] = str(name) if str(name) not in taken else f"{name}_{place + 1}"
            known.append(entry | ({} if weight is None else {"weight": float(weight)}))
        self.put("rewards", known, "reward_funcs", "reward_weights", "reward_model_name_or_path")
        if own:
            self.needed.append(f"rewards: where {', '.join(own)} {'are' if len(own) > 1 else 'is'} (rewards.py is a guess)")

    def _function(self, named: Named, kind: str) -> str:
        """`module:name` or `file.py:name`; in a file that is still to be written, where a script cannot be imported."""
        if not named.moved:
            return f"{named.place}:{named.name}"
        self.needed.append(f"{kind}: move {named} into {kind}.py: {named.moved}")
        return f"{kind}.py:{named.name}"

    def _environment(self) -> None:
        tools, factory = self.given.get("tools"), self.given.get("environment_factory")
        if tools:
            self.put("environment.tools", [self._function(tool, "tools") for tool in tools], "tools")
        if factory:
            self.put("environment.factory", self._function(factory[0], "environment"), "environment_factory")
        if turns := self.given.get("max_tool_calling_iterations"):
            if tools or factory:
                self.put("environment.max_turns", int(turns) + 1, "max_tool_calling_iterations", says="turns, one more than rounds")
            else:
                says = f"environment.max_turns: {int(turns) + 1}, with an environment"
                self.note("max_tool_calling_iterations", "changed", says)

    def _pairs(self) -> None:
        self.put("pairs.beta", float(self.get("beta")), "beta")
        self.note("beta", "same", "pairs.beta")
        loss = self.get("loss_type")
        loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
        if loss in ("sigmoid", "ipo"):
            self.put("pairs.loss", loss, "loss_type")
            self.note("loss_type", "same", "pairs.loss")
        else:
            self.put("pairs.loss", "sigmoid", "loss_type", says=f"{short(loss)} is not there")
            self.note("loss_type", "missing", f"{short(loss)}: pairs.loss is sigmoid or ipo; sigmoid is written")
        if self.given.get("sync_ref_model"):
            self.note("sync_ref_model", "missing", "the reference of pairs does not move")


# ---------------------------------------------------------------- writing


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
