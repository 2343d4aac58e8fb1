"""From arguments of TRL's to keys of a recipe: the converters that the rows of `trl.TABLE` name.

A converter reads a `Configuration` and says what it comes to: keys to `Write`, a `Note` on an argument whose fate depends on its
value, and what the recipe `Need`s to be told.  Several rows that are read together name the same converter, which runs once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.config.settings import DATA_SUFFIXES, REWARDS
from groupwise.config.trl_arguments import KINDS, Configuration, Fate, RewardModel, mapping_of, short
from groupwise.utils.spelling import closest

DASHBOARDS = ("tensorboard", "wandb", "mlflow", "trackio")
ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_xla", "paged_adamw_32bit", "paged_adamw")
PRESETS = ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
"""Losses of TRL's that are presets of the same name here; its `dapo` is bnpo."""
SURROGATES = {
    "sapo": {"tau_pos": "sapo_temperature_pos", "tau_neg": "sapo_temperature_neg"},
    "vespo": {"k_pos": "vespo_k_pos", "lam_pos": "vespo_lambda_pos", "k_neg": "vespo_k_neg", "lam_neg": "vespo_lambda_neg"},
}
"""Surrogates with keywords of their own: ours -> TRL's argument."""
LIBRARIES = ("trl", "open_r1")
"""Packages in which these names mean what is built in here."""
REWARD_NAMES = {
    "accuracy": "accuracy", "accuracy_reward": "accuracy", "think_format_reward": "think_format", "format": "think_format",
    "format_reward": "think_format", "tag_count": "tags", "tag_count_reward": "tags",
}  # fmt: skip
"""Reward functions of TRL and of well-known scripts that are built in here."""
OVERLONG = ("get_soft_overlong_punishment", "soft_overlong_punishment")
"""The same for `soft_overlong`, whose arguments TRL's script sets to 1280 and 256."""
SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}  # fmt: skip


class Write(NamedTuple):
    """A key of the recipe."""

    key: str
    value: Any
    names: tuple[str, ...]
    """The arguments that it is from; of those that the user did not write it is TRL's default."""
    says: str = ""
    fate: Fate | None = None
    """What becomes of those arguments, where their value decides; else what the table says."""


class Note(NamedTuple):
    """What becomes of an argument that no key is from, where its value decides."""

    name: str
    fate: Fate
    says: str


class Need(NamedTuple):
    """What the recipe still has to say, because the configuration does not."""

    says: str


Outcomes = Iterator[Write | Note | Need]


# ---------------------------------------------------------------- one argument


class Value(NamedTuple):
    """The converter of an argument that is one key."""

    kind: Callable[[Any], Any]
    """From its value to the key's."""
    when: Callable[[Any], bool] = lambda value: value is not None
    """Whether a value is written."""
    always: bool = False
    """TRL's default is written too, because ours differs, or may come to."""


def to_folder_name(trl: Configuration, _: str) -> Outcomes:
    """`name`."""
    source = "output_dir" if trl.written("output_dir") else "run_name"
    folder = trl.written(source)
    if isinstance(folder, str) and (name := re.sub(r"[^\w.+-]+", "-", Path(folder).name).strip("-.")):
        yield Write("name", name, (source,))


# ---------------------------------------------------------------- the model


def to_model_path(trl: Configuration, _: str) -> Outcomes:
    """`model.path`."""
    model = trl.written("model_name_or_path")
    if model is not None:
        yield Write("model.path", model, ("model_name_or_path",))
    else:
        yield Note("model_name_or_path", "missing", "a loaded model: give its folder or hub name as model.path")
        yield Need("model.path: a checkpoint's folder or hub name")


def to_optimizer(trl: Configuration, name: str) -> Outcomes:
    """No key: the optimizer is AdamW."""
    if (kind := str(trl.written(name, "adamw_torch"))) not in ADAMW:
        fate: Fate = "changed" if kind.startswith(("adamw", "paged_adamw")) else "missing"
        yield Note(name, fate, f"{kind}: AdamW with float32 state takes its place")


def boards(report: Any) -> list[str]:
    """The dashboards of `report_to` that there are."""
    return [board for board in (report if isinstance(report, list) else [report]) if board in DASHBOARDS]


def to_model_dtype(trl: Configuration, _: str) -> Outcomes:
    """`model.dtype`, of the weights' type and of the products'."""
    options = trl.written("model_init_kwargs")
    option = options.get("dtype", options.get("torch_dtype")) if isinstance(options, Mapping) else None
    named = next((name for name in ("dtype", "torch_dtype") if name in trl.arguments), None)
    dtype = str(option or trl.get(named or "dtype")).removeprefix("torch.")
    half = bool(trl.get("fp16")) or trl.get("bf16") is not False
    wanted = "bfloat16" if dtype == "bfloat16" else "autocast" if half or dtype == "float16" else "float32"
    names = ("bf16", "fp16", "dtype", "torch_dtype", *(["model_init_kwargs"] if option else []))
    yield Write("model.dtype", wanted, names, "float32 weights, bfloat16 products" if wanted == "autocast" else "")


def to_checkpointing(trl: Configuration, _: str) -> Outcomes:
    """`model.gradient_checkpointing`."""
    name = "gradient_checkpointing" if trl.written("activation_checkpointing") is None else "activation_checkpointing"
    yield Write("model.gradient_checkpointing", bool(trl.get(name)), (name,))


def to_lora(trl: Configuration, _: str) -> Outcomes:
    """`model.lora`."""
    if not trl.written("use_peft"):
        return
    targets = trl.written("lora_target_modules")
    rank, alpha = int(trl.written("lora_r", 16)), float(trl.written("lora_alpha", 32))
    alpha *= math.sqrt(rank) if trl.written("use_rslora") else 1.0
    adapter: dict[str, Any] = {"rank": rank, "alpha": int(alpha) if alpha.is_integer() else alpha}
    adapter["targets"] = "all-linear" if targets in (None, "all-linear") else targets
    says = "TRL leaves the choice of layers to peft, which takes fewer" if targets is None else ""
    yield Write("model.lora", adapter, ("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "use_rslora"), says)


def to_parallel(trl: Configuration, _: str) -> Outcomes:
    """`parallel`, of a configuration of DeepSpeed, FSDP or accelerate, or of the file that is named."""
    option = next((name for name in ("deepspeed", "fsdp", "config_file") if trl.written(name)), None)
    if option is None:
        return
    value = trl.arguments[option]
    if isinstance(value, str):
        files = (trl.file.parent / value, Path(value)) if trl.file is not None else (Path(value),)
        if (file := next((one for one in files if one.is_file()), None)) is not None:
            value = mapping_of(file.read_text(encoding="utf-8"), file)
    both = {option: value} | ({"fsdp_config": trl.arguments["fsdp_config"]} if trl.written("fsdp_config") else {})
    yield Write("parallel", parallel_of(both), tuple(both))


def parallel_of(launcher: object) -> str | dict[str, Any]:
    """`parallel` for a configuration of DeepSpeed, of FSDP, or of accelerate, or for the name of its file."""
    text = json.dumps(launcher, default=str).lower()
    whole = "fsdp" in text and not re.search(r"grad_op|fsdp_reshard_after_forward\": false", text)
    name = "zero3"
    if not whole and not re.search(r'zero_?3|stage_?3|stage": 3|full_shard', text):
        name = "zero2" if re.search(r'zero_?2|stage_?2|stage": 2|grad_op|fsdp', text) else "ddp" if "multi_gpu" in text else "auto"
    return {"name": name, "offload": True} if name in ("zero2", "zero3") and OFFLOADED.search(text) else name


OFFLOADED = re.compile(r'offload\w*": (\{[^{}]*"device": )?("cpu"|"nvme"|true)|fsdp": "[^"]*\boffload\b')
"""What keeps parameters or the optimizer's state in host memory, in JSON."""


# ---------------------------------------------------------------- data


def to_data_path(trl: Configuration, _: str) -> Outcomes:
    """`data.path` and `data.eval_path` with their splits."""
    name, config = trl.written("dataset_name", trl.written("train_dataset")), trl.written("dataset_config")
    split, part = trl.written("dataset_train_split") or "train", trl.written("dataset_test_split") or "test"
    if name is None:
        yield Need("data.path: a file or hub name")
    else:
        name = f"{name}:{config}" if config else name
        yield Write("data.path", name, ("dataset_name", "dataset_config", "train_dataset"))
        if split != "train":
            yield Write("data.split", split, ("dataset_train_split",))
    strategy = trl.written("evaluation_strategy") or trl.get("eval_strategy")
    if trl.file is None or trl.file.suffix == ".py":  # rows are handed over
        held = trl.written("eval_dataset")
    else:  # TRL's command takes another split of the same data set
        held = name if strategy not in ("no", None) else None
    if held is not None and not isinstance(held, str):
        yield Write("data.eval_path", held, ("eval_dataset",))
    elif held is not None and (held != name or (part != split and not held.endswith(DATA_SUFFIXES))):
        yield Write("data.eval_path", held, ("eval_dataset", "dataset_name"), "for evaluation")
        if part != "test":
            yield Write("data.eval_split", part, ("dataset_test_split",))
    elif held is not None:
        yield Need(f"data.eval_path, or data.eval_fraction: a part of {held} to evaluate on, and not to train on")


def to_system_prompt(trl: Configuration, name: str) -> Outcomes:
    """`data.system`; strings become chat messages."""
    if isinstance(system := trl.written(name), str):
        yield Write("data.chat", True, (name,), "strings become messages of the user")
        yield Write("data.system", system, (name,))


def to_shuffle(trl: Configuration, name: str) -> Outcomes:
    """`data.shuffle`, whose default is TRL's but in SFT."""
    if trl.kind == "SFTConfig" or trl.written(name) is False:
        yield Write("data.shuffle", bool(trl.get(name)), (name,))


def to_prompt_length(trl: Configuration, name: str) -> Outcomes:
    """`data.max_prompt_tokens`."""
    if isinstance(limit := trl.written(name), int) and trl.online:
        yield Write("data.max_prompt_tokens", limit, (name,))
        yield Write("data.too_long", "truncate_left", (name,), "TRL keeps the end of a longer prompt")


# ---------------------------------------------------------------- the optimizer, and how long it goes


def to_schedule(trl: Configuration, _: str) -> Outcomes:
    """`optimizer.schedule` and `optimizer.min_lr_ratio`."""
    kind, options = str(trl.get("lr_scheduler_type")), trl.written("lr_scheduler_kwargs")
    says = "" if kind in SCHEDULES else f"the nearest to {kind}, which is not there"
    yield Write("optimizer.schedule", SCHEDULES.get(kind, "cosine"), ("lr_scheduler_type",), says, "missing" if says else None)
    if not isinstance(options, Mapping) or not options:
        return
    lr = float(trl.get("learning_rate"))
    least = options.get("min_lr_rate", options["min_lr"] / lr if "min_lr" in options and lr else None)
    if least is not None and kind == "cosine_with_min_lr":
        yield Write("optimizer.min_lr_ratio", float(least), ("lr_scheduler_kwargs",))
    else:
        yield Note("lr_scheduler_kwargs", "missing", "only min_lr and min_lr_rate of cosine_with_min_lr are")


def to_betas(trl: Configuration, _: str) -> Outcomes:
    """`optimizer.betas`."""
    names = ("adam_beta1", "adam_beta2")
    if any(name in trl.arguments for name in names):
        yield Write(
            "optimizer.betas", [float(trl.written(name, usual)) for name, usual in zip(names, (0.9, 0.999), strict=True)], names
        )


def to_batch(trl: Configuration, _: str) -> Outcomes:
    """`batch_size`, or how a rollout is made up and cut."""
    rows, (per_rollout, pieces) = trl.rows_per_pass, trl.passes
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if not trl.online:
        says = f"{rows // trl.devices} x {trl.devices} device{'s' if trl.devices > 1 else ''} x {pieces} steps"
        yield Write("batch_size", rows * pieces, names, says)
        return
    size, completions = int(trl.get("num_generations")), trl.completions
    fate: Fate | None = "changed" if completions % size else None
    yield Write("group.group_size", size, ("num_generations",), "", fate)
    says = f"{completions} completions of a rollout / {size}" + (f" is {Fraction(completions, size)}: rounded" if fate else "")
    yield Write("group.prompts_per_step", trl.prompts, (*names, "generation_batch_size"), says)
    if per_rollout != pieces:
        names = ("steps_per_generation", "generation_batch_size")
        yield Write("group.minibatches", trl.minibatches, names, f"{per_rollout} / {pieces}")
    if int(trl.get("num_iterations")) > 1:
        yield Write("group.updates_per_rollout", int(trl.get("num_iterations")), ("num_iterations",))


def to_length(trl: Configuration, _: str) -> Outcomes:
    """`steps` or `epochs`."""
    most, epochs = trl.get("max_steps"), float(trl.get("num_train_epochs"))
    if isinstance(most, int | float) and most > 0:
        says = f"{trl.updates} optimizer steps each" if trl.updates > 1 else ""
        yield Write("steps", math.ceil(most / trl.updates), ("max_steps",), says)
        yield Note("num_train_epochs", "unneeded", "max_steps takes its place")
    elif not trl.online:
        yield Write("epochs", epochs, ("num_train_epochs",))
    elif trl.steps is not None:
        yield Write("steps", trl.steps, ("num_train_epochs",), f"{epochs:g} x {trl.rows} rows / {trl.prompts} prompts")
    else:
        yield Note("num_train_epochs", "changed", "steps counts rollouts, and how many rows there are is not known here")
        yield Need(f"steps: {epochs:g} epochs are {epochs:g} x rows of the data / {trl.prompts} prompts")


def to_warm_up(trl: Configuration, _: str) -> Outcomes:
    """`optimizer.warmup_steps`, of a number or of a share."""
    name = "warmup_ratio" if trl.written("warmup_ratio") else "warmup_steps"
    warmup = trl.written(name)
    if not warmup:
        return
    if warmup >= 1:
        yield Write("optimizer.warmup_steps", int(warmup), (name,))
    elif trl.updates_in_all is not None:
        share = math.ceil(warmup * trl.updates_in_all)
        yield Write("optimizer.warmup_steps", share, (name,), f"{warmup:g} of all optimizer steps")
    else:
        yield Note(name, "changed", "optimizer.warmup_steps counts optimizer steps, and how many there are is not known here")
        yield Need(f"optimizer.warmup_steps: {warmup:g} of all optimizer steps")


def to_evaluation(trl: Configuration, _: str) -> Outcomes:
    """`eval.at_start` and `eval.every`."""
    yield Write("eval.at_start", bool(trl.get("eval_on_start")), ("eval_on_start",))
    if (trl.written("evaluation_strategy") or trl.get("eval_strategy")) != "steps":
        return
    every = trl.our_steps(trl.written("eval_steps", trl.written("logging_steps", 10)), trl.steps)  # as often as TRL logs
    if every is not None:
        yield Write("eval.every", every, ("eval_steps", "eval_strategy", "evaluation_strategy"))
    else:
        yield Note("eval_steps", "changed", "eval.every counts steps, and how many there are is not known here")


def to_saving(trl: Configuration, _: str) -> Outcomes:
    """`save.every`."""
    strategy = str(trl.get("save_strategy"))
    if strategy != "steps":
        yield Write("save.every", 0, ("save_strategy",), strategy)
    elif (every := trl.our_steps(trl.get("save_steps"), trl.steps)) is not None:
        yield Write("save.every", every, ("save_steps",))
    else:
        yield Note("save_steps", "changed", "save.every counts steps, and how many there are is not known here")


def to_checkpoints(trl: Configuration, name: str) -> Outcomes:
    """`save.keep`."""
    keep = trl.written(name)
    if isinstance(keep, int) and not isinstance(keep, bool):
        few = keep < 2
        says = "at least 2: the newest is verified before older ones go" if few else ""
        yield Write("save.keep", max(2, keep), (name,), says, "changed" if few else None)


# ---------------------------------------------------------------- what is learnt


def preset_of(trl: Configuration) -> str:
    """The objective that TRL's loss is."""
    if trl.kind != "GRPOConfig":
        return KINDS[trl.kind]
    if trl.get("multi_objective_aggregation") == "normalize_then_sum":
        return "gdpo"
    loss = str(trl.get("loss_type"))
    return loss if loss in PRESETS else "bnpo"


def to_objective(trl: Configuration, _: str) -> Outcomes:
    """`objective`, and of pairs `pairs.loss`."""
    loss = trl.get("loss_type")
    if trl.kind == "DPOConfig":
        loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
        known = loss in ("sigmoid", "ipo")
        says = "" if known else f"{short(loss)} is not there"
        yield Write("pairs.loss", loss if known else "sigmoid", ("loss_type",), says, "same" if known else "missing")
    elif trl.kind == "GRPOConfig":
        preset = preset_of(trl)
        unknown = loss not in ("dapo", *PRESETS) and preset != "gdpo"
        says = f"TRL 1.16 knows {', '.join(('dapo', *PRESETS))}{closest(str(loss), PRESETS)}" if unknown else ""
        says = "TRL's dapo is a mean over tokens" if loss == "dapo" and preset != "gdpo" else says
        names = ("multi_objective_aggregation",) if preset == "gdpo" else ("loss_type",)
        yield Write("objective", preset, names, says, "missing" if unknown else None)


def to_credit(trl: Configuration, _: str) -> Outcomes:
    """`group.credit`, where the preset's differs."""
    if trl.kind == "RLOOConfig" and trl.get("normalize_advantages"):
        yield Write("group.credit", {"name": "leave_one_out", "scale": "batch"}, ("normalize_advantages",))
    scale, preset = trl.get("scale_rewards"), preset_of(trl)
    scale = {True: "group", False: "none", "True": "group", "False": "none"}.get(scale, scale)
    if trl.kind == "GRPOConfig" and preset != "gdpo" and scale != ("none" if preset == "dr_grpo" else "group"):
        says = "TRL's loss_type dr_grpo leaves it to scale_rewards" if preset == "dr_grpo" else ""
        yield Write("group.credit", {"name": "standardized", "scale": str(scale)}, ("scale_rewards",), says)


def to_ratio(trl: Configuration, name: str) -> Outcomes:
    """The level of the importance ratio."""
    if preset_of(trl) in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo") and trl.get(name) == "sequence":
        yield Write("group.ratio", "sequence_mean", (name,))


def to_kl(trl: Configuration, _: str) -> Outcomes:
    """`group.beta` and `group.kl`, or `pairs.beta`."""
    beta = float(trl.get("beta") or 0.0)
    if trl.kind == "DPOConfig":
        yield Write("pairs.beta", beta, ("beta",))
    elif trl.kind == "RLOOConfig":
        yield Write("group.beta", beta, ("beta",), "of the KL in the reward")
    elif trl.kind == "GRPOConfig" and beta:
        yield Write("group.beta", beta, ("beta",))
        yield Write("group.kl", "k3_ratio" if trl.get("use_bias_correction_kl") else "k3", ("use_bias_correction_kl",))


def to_moving_reference(trl: Configuration, _: str) -> Outcomes:
    """`group.reference_refresh` and `group.reference_mix`."""
    if not trl.written("sync_ref_model"):
        return
    if trl.kind == "DPOConfig":
        yield Note("sync_ref_model", "missing", "the reference of pairs does not move")
        return
    names = ("ref_model_sync_steps", "sync_ref_model")
    yield Write("group.reference_refresh", trl.our_steps(trl.get("ref_model_sync_steps"), None) or 1, names)
    yield Write("group.reference_mix", float(trl.get("ref_model_mixup_alpha")), ("ref_model_mixup_alpha",))


def to_entropy(trl: Configuration, _: str) -> Outcomes:
    """`group.entropy_bonus`, constant or adaptive."""
    if trl.written("use_adaptive_entropy"):
        for name, key in (("entropy_target", "target"), ("entropy_coef_max", "bonus"), ("entropy_coef_delta", "step")):
            yield Write(f"group.entropy_{key}", float(trl.get(name)), (name, "use_adaptive_entropy"))
        yield Note("entropy_coef", "changed", "an adaptive coefficient begins at 0")
        return
    for name in ("entropy_target", "entropy_coef_max", "entropy_coef_min", "entropy_coef_delta"):
        yield Note(name, "unneeded", "of use_adaptive_entropy, which is off")
    if bonus := trl.written("entropy_coef"):
        yield Write("group.entropy_bonus", float(bonus), ("entropy_coef",))


def to_surrogate(trl: Configuration, _: str) -> Outcomes:
    """`group.surrogate`, where its bounds are not the preset's."""
    preset, low, high, delta = preset_of(trl), trl.get("epsilon"), trl.written("epsilon_high"), trl.written("delta")
    if preset == "cispo":
        if high is not None:
            yield Write("group.surrogate", {"name": "cispo", "cap": float(high)}, ("epsilon_high",))
    elif preset in SURROGATES:
        keywords = {ours: float(trl.arguments[theirs]) for ours, theirs in SURROGATES[preset].items() if theirs in trl.arguments}
        if keywords:
            yield Write("group.surrogate", {"name": preset, **keywords}, tuple(SURROGATES[preset].values()))
    elif trl.online and (preset == "luspo" or (low, high, delta) != (0.2, None, None)):
        clipped = {"name": "clipped", "low": float(low), "high": float(low if high is None else high)}
        clipped |= {} if delta is None else {"delta": float(delta)}
        yield Write("group.surrogate", clipped, ("epsilon", "epsilon_high", "delta"))


# ---------------------------------------------------------------- sampling


def to_generation(trl: Configuration, name: str) -> Outcomes:
    """`rollout.stop`."""
    options = trl.written(name)
    if isinstance(options, Mapping) and options.get("stop"):
        stop = options["stop"]
        yield Write("rollout.stop", [stop] if isinstance(stop, str) else list(stop), (name,))


def to_engine(trl: Configuration, _: str) -> Outcomes:
    """`rollout.engine`."""
    if not trl.written("use_vllm"):
        return
    url, device = trl.written("vllm_server_base_url"), trl.written("vllm_device")
    vllm: dict[str, Any] = {"name": "vllm"}
    if url is not None:
        vllm["servers"] = [str(url)]
    elif device is None and trl.get("vllm_mode") == "colocate":
        vllm["colocated"] = True
    elif device is None:
        host = str(trl.get("vllm_server_host"))
        vllm["servers"] = [f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{trl.get('vllm_server_port')}"]
    if not trl.get("vllm_importance_sampling_correction"):
        vllm["correct"] = None
    else:
        level, _, mode = str(trl.get("vllm_importance_sampling_mode")).partition("_")
        high = trl.written("vllm_importance_sampling_cap") or trl.get("vllm_importance_sampling_clip_max")
        low = trl.written("vllm_importance_sampling_clip_min")
        vllm["correct"] = {"level": "token" if level == "token" else "sequence_sum", "mode": mode or "mask"}
        vllm["correct"] |= {name: float(bound) for name, bound in (("high", high), ("low", low)) if bound is not None}
    names = ("use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_device")
    yield Write("rollout.engine", vllm, (*names, *(name for name in trl.arguments if name.startswith("vllm_importance"))))


# ---------------------------------------------------------------- rewards, tools, environments


def to_rewards(trl: Configuration, _: str) -> Outcomes:
    """`rewards`, with their weights."""
    if not trl.online:
        return
    functions = trl.written("reward_funcs")
    functions = list(functions) if isinstance(functions, list | tuple) else [functions] if functions is not None else []
    if isinstance(judge := trl.written("reward_model_name_or_path"), str):
        functions.insert(0, RewardModel(judge))  # TRL's scripts put it before the functions
    if not functions:
        yield Need("rewards: a list of {function: module:function or file.py:function, weight: ...}")
        yield Note("reward_weights", "changed", "rewards.N.weight, one in each entry of rewards")
        return
    weights = trl.written("reward_weights") or [None] * len(functions)
    if len(weights) != len(functions):
        raise ValueError(f"{len(weights)} weights for {len(functions)} reward functions")
    entries: list[dict[str, Any]] = []
    guessed: list[str] = []
    for place, (function, weight) in enumerate(zip(functions, weights, strict=True)):
        entry = _reward(trl, function)
        if type(function) is str and entry["function"] == f"rewards.py:{function}":
            guessed.append(function)
        taken, name = [one.get("name", _called(one["function"])) for one in entries], _called(entry["function"])
        if name in taken and name != "<lambda>":  # names tell rewards apart
            source = str(function) if isinstance(function, str) and ":" not in function else name
            entry["name"] = source if source not in taken else f"{source}_{place + 1}"
        entries.append(entry | ({} if weight is None else {"weight": float(weight)}))
    yield Write("rewards", entries, ("reward_funcs", "reward_weights", "reward_model_name_or_path"))
    if guessed:
        yield Need(f"rewards: where {', '.join(guessed)} {'are' if len(guessed) > 1 else 'is'} (rewards.py is a guess)")


def _reward(trl: Configuration, function: Any) -> dict[str, Any]:
    """An entry of `rewards`.  A function of the user's own is never taken for a built-in one of the same name."""
    if isinstance(function, RewardModel):
        return {"function": "model", "args": {"path": str(function)}}
    if not isinstance(function, str):  # the function itself
        name = getattr(function, "__name__", "")
        return {"function": built_in(str(getattr(function, "__module__", "")), name) or function}
    if function in OVERLONG:
        most, cache = trl.written("max_completion_len", 1280), trl.written("soft_punish_cache", 256)
        return {"function": "soft_overlong", "args": {"max_tokens": int(most), "cache": int(cache)}}
    if function in REWARD_NAMES or function in REWARDS or ":" in function:  # a name of TRL's registry, not of a script
        return {"function": REWARD_NAMES.get(function, function)}
    return {"function": ":".join(function.rsplit(".", 1)) if "." in function else f"rewards.py:{function}"}


def built_in(module: str, name: str) -> str | None:
    """What a reward function of TRL's, or of a well-known script, is called here."""
    return REWARD_NAMES.get(name) if module.partition(".")[0] in LIBRARIES else None


def _called(function: Any) -> str:
    """The name that a reward gets."""
    return function.rpartition(":")[2] if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)


def to_environment(trl: Configuration, _: str) -> Outcomes:
    """`environment.tools`, `environment.factory` and `environment.max_turns`."""
    tools, factory = trl.written("tools"), trl.written("environment_factory")
    factory = factory[0] if isinstance(factory, list) and factory else factory
    if tools:
        yield Write("environment.tools", tools, ("tools",))
    if factory:
        yield Write("environment.factory", factory, ("environment_factory",))
    turns, name = trl.written("max_tool_calling_iterations"), "max_tool_calling_iterations"
    if turns and (tools or factory):
        yield Write("environment.max_turns", int(turns) + 1, (name,), "turns, one more than rounds")
    elif turns:
        yield Note(name, "changed", f"environment.max_turns: {int(turns) + 1}, with an environment")
