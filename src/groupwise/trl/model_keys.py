"""Keys for the model of a recipe: its path, precision, adapter, and how it is sharded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.config.trl_names import LORA_LACKING
from groupwise.trl.configuration import Configuration
from groupwise.trl.values import arguments_in, text_of

ADAPTERS = {
    "LoraConfig": {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0},
    "get_peft_model": {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0},
}
"""What describes an adapter, peft's configuration or unsloth's function with the same keywords,
with its defaults.
"""
LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "use_rslora": "use_rslora",
    "modules_to_save": "lora_modules_to_save",
}
"""Arguments of peft's LoraConfig, as TRL's ModelConfig calls them."""
NO_MATTER = (
    "task_type",
    "peft_type",
    "inference_mode",
    "peft_version",
    "base_model_name_or_path",
    "auto_mapping",
)
"""Arguments of a LoraConfig that do not change what is trained."""
ADAPTER = "peft_config."
"""Prefix of a LoraConfig's remaining arguments."""
DROPOUT = 0.05
"""`lora_dropout` of TRL's ModelConfig; peft's LoraConfig has none."""
CARRIED = {
    "layers_to_transform": "layers",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
}
"""Remaining arguments of a LoraConfig -> keys of `model.lora`."""
LOADED = {"dtype", "torch_dtype", "attn_implementation", "device_map", "use_cache"}
"""Arguments of `from_pretrained` that are read, or that change nothing here."""
LAUNCHERS = ("deepspeed", "fsdp", "config_file", "accelerate_config")
"""Arguments that hold or name a configuration of DeepSpeed, FSDP or accelerate."""
OFFLOADED = re.compile(
    r'offload\w*": (\{[^{}]*"device": )?("cpu"|"nvme"|true)|fsdp": "[^"]*\boffload\b'
)
"""What keeps parameters or the optimizer's state in host memory, in JSON."""


def adapter_arguments(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a LoraConfig under the names of TRL's ModelConfig, those that it lacks
    behind `peft_config.`.
    """
    arguments: dict[str, Any] = {"use_peft": True}
    for name, value in adapter.items():
        off = value in (None, False, "none", [], {}) and name != "lora_dropout"
        if name not in NO_MATTER and not off:
            arguments[LORA.get(name, ADAPTER + name)] = value
    return arguments


def write_run_name(trl: Configuration) -> None:
    """Write the name of the run folder."""
    names = {}
    for argument in ("output_dir", "run_name"):
        value = trl.arguments.get(argument)
        if isinstance(value, str):
            names[argument] = re.sub(r"[^\w.+-]+", "-", Path(value).name).strip("-.")
    name = names.get("output_dir") or names.get("run_name")
    if not name:
        return
    trl.write("name", name, *[argument for argument in names if names[argument] == name])
    if names.get("run_name", name) != name:
        trl.note("run_name", "missing", f"output_dir names the run, and its dashboards: {name}")


def write_model_path(trl: Configuration) -> None:
    """Write where the model is."""
    name = "model_name_or_path"
    if trl.arguments.get(name) is not None:
        trl.write("model.path", trl.arguments[name], name)
    else:
        trl.note(name, "missing", "a loaded model: give its folder or hub name as model.path")
        trl.need("model.path: a checkpoint's folder or hub name")


def write_model_options(trl: Configuration) -> None:
    """Write what loading a model depends on."""
    for name in ("chat_template_path", "chat_template"):
        if isinstance(trl.arguments.get(name), str):
            trl.write("model.chat_template", text_of(trl.arguments[name]), name)
    if trl.arguments.get("trust_remote_code"):
        trl.write("model.trust_remote_code", True, "trust_remote_code")
    if trl.arguments.get("use_cpu"):
        trl.write("model.device", "cpu", "use_cpu")
    name = "gradient_checkpointing"
    if "activation_checkpointing" in trl.arguments:
        name = "activation_checkpointing"
    trl.write("model.gradient_checkpointing", bool(trl.get(name)), name)


def write_precision(trl: Configuration) -> None:
    """Write the type of the weights and of the products."""
    options = trl.get("model_init_kwargs")
    chosen = None
    if isinstance(options, Mapping):
        chosen = options.get("dtype", options.get("torch_dtype"))
        lost = sorted(set(options) - LOADED)
        if lost:
            trl.note("model_init_kwargs", "missing", f"not passed on: {', '.join(lost)}")
        elif chosen is None:
            trl.unused("what it holds is decided by the device", "model_init_kwargs")
    name = "dtype"
    if "torch_dtype" in trl.arguments and "dtype" not in trl.arguments:
        name = "torch_dtype"
    dtype = str(chosen or trl.get(name)).removeprefix("torch.")
    names = ["bf16", "fp16", "dtype", "torch_dtype"]
    if chosen:
        names.append("model_init_kwargs")
    half = bool(trl.get("fp16")) or trl.get("bf16") is not False or dtype == "float16"
    if dtype == "bfloat16":
        trl.write("model.dtype", "bfloat16", *names)
    elif half:
        detail = "float32 weights, bfloat16 products"
        trl.write("model.dtype", "autocast", *names, detail=detail)
    else:
        trl.write("model.dtype", "float32", *names)


def write_adapter(trl: Configuration) -> None:
    """Write the adapter."""
    arguments = trl.arguments
    if not arguments.get("use_peft"):
        trl.unused("without use_peft there is no adapter", *LORA.values())
        return
    rank = trl.whole("lora_r", 1) if "lora_r" in arguments else 16
    alpha = trl.number("lora_alpha") if "lora_alpha" in arguments else 32.0
    targets = arguments.get("lora_target_modules")
    if targets == ["all-linear"]:
        targets = "all-linear"
    detail = ""
    if targets is None:
        detail = "TRL leaves the choice of layers to peft, which takes fewer"
    value: dict[str, Any] = {
        "rank": rank,
        "alpha": int(alpha) if alpha.is_integer() else alpha,
        "targets": targets or "all-linear",
    }
    names = ["use_peft", "lora_r", "lora_alpha", "lora_target_modules"]
    if arguments.get("use_rslora"):
        value["rslora"] = True
        names.append("use_rslora")
    dropout = trl.number("lora_dropout", 0.0) if "lora_dropout" in arguments else DROPOUT
    if trl.get("disable_dropout"):
        trl.unused("dropout is off: disable_dropout", "lora_dropout", "disable_dropout")
    elif dropout:
        value["dropout"] = dropout
        names.append("lora_dropout")
    else:
        trl.unused("it is off", "lora_dropout")
    whole = _names_of(arguments.get("lora_modules_to_save"))
    if trl.kind == "RewardConfig" and "score" in whole:
        whole.remove("score")
        if not whole:
            reason = "the head of a reward model is trained beside its adapter"
            trl.unused(reason, "lora_modules_to_save")
    if whole:
        value["modules_to_save"] = whole
        names.append("lora_modules_to_save")
    _carry_options(trl, value)
    trl.write("model.lora", value, *names, detail=detail)


def _names_of(value: Any) -> list[str]:
    """Names of modules as a list of its own."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _carry_options(trl: Configuration, value: dict[str, Any]) -> None:
    """Add the remaining arguments of a LoraConfig to `model.lora`; note what becomes of each."""
    for name, argument in trl.arguments.items():
        option = name.removeprefix(ADAPTER)
        if option == name:
            continue
        key = CARRIED.get(option)
        if key is None:
            reason = LORA_LACKING.get(option, "model.lora has no such key")
            trl.note(name, "missing", reason)
            continue
        value[key] = [argument] if isinstance(argument, int) else argument
        trl.note(name, "same", f"model.lora.{key}")


def write_sharding(trl: Configuration) -> None:
    """Write `parallel` for a configuration of a launcher, or for the file that is named."""
    for name in LAUNCHERS:
        value = trl.arguments.get(name)
        if not value:
            continue
        if isinstance(value, str):
            value = launcher_file(trl.file, value) or value
        launcher = {name: value}
        if trl.arguments.get("fsdp_config"):
            launcher["fsdp_config"] = trl.arguments["fsdp_config"]
        trl.write("parallel", parallel_of(launcher), *launcher)
        return


def launcher_file(beside: Path | None, name: str) -> dict[str, Any] | None:
    """What a launcher's file holds, beside another file or in the working directory; None where it
    is not there.
    """
    folder = beside.parent if beside is not None else Path()
    for file in (folder / name, Path(name)):
        if file.is_file():
            return arguments_in(file)
    return None


def parallel_of(launcher: object) -> str | dict[str, Any]:
    """`parallel` for a configuration of DeepSpeed, of FSDP, or of accelerate, or for the name of
    its file.
    """
    text = json.dumps(launcher, default=str).lower()
    whole = "fsdp" in text and not re.search(r"grad_op|fsdp_reshard_after_forward\": false", text)
    if whole or re.search(r'zero_?3|stage_?3|stage": 3|full_shard', text):
        name = "zero3"
    elif re.search(r'zero_?2|stage_?2|stage": 2|grad_op|fsdp', text):
        name = "zero2"
    elif "multi_gpu" in text:
        return "ddp"
    else:
        return "auto"
    return {"name": name, "offload": True} if OFFLOADED.search(text) else name


CONVERTERS = (
    write_run_name,
    write_model_path,
    write_model_options,
    write_precision,
    write_adapter,
    write_sharding,
)
