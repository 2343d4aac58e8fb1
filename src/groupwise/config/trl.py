"""What becomes of every argument of TRL 1.16: the table, and the converters that its rows name.

The one table behind `groupwise config OLD_NAME`, docs/from-trl.md, what an unknown key may have
meant, `groupwise recipes import-trl` and `gw.from_trl`.

The arguments are those of GRPOConfig, RLOOConfig, SFTConfig, RewardConfig and DPOConfig, of
transformers' TrainingArguments (5.23) that they inherit, of ModelConfig and ScriptArguments, a few
of trainers (`reward_funcs`) and of accelerate's launcher, and older names that configurations still
hold.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

from groupwise.config.settings import DATA_SUFFIXES, REWARDS, BoardName
from groupwise.config.trl_arguments import (
    ADAPTER,
    KINDS,
    Configuration,
    Fate,
    Needed,
    RewardEntry,
    RewardModel,
    mapping_of,
    number_of,
    short,
)
from groupwise.utils.spelling import closest, counted

FATES: dict[Fate, str] = {
    "same": "carried over",
    "changed": "changed in meaning",
    "unneeded": "not needed",
    "missing": "not supported yet",
}
"""What can become of an argument, in words."""

Converter = Callable[[Configuration], None]
"""Reads arguments that go together and writes the keys that they come to.  Several rows may name
the same one, which runs once.
"""


@dataclass(frozen=True, slots=True)
class Value:
    """The converter of an argument that is one key."""

    kind: Callable[[Any], Any]
    """From its value to the key's."""
    when: Callable[[Any], Any] = lambda value: value is not None
    """Whether a value is written."""
    always: bool = False
    """TRL's default is written too, because ours differs, or may come to."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of TRL's."""

    fate: Fate
    key: str | None = None
    """Our key."""
    says: str = ""
    """What to write, what differs, or why it is not needed."""
    convert: Converter | Value | None = None
    """From its value, and those of arguments that it goes with, to keys of a recipe; None where
    none is written.
    """


def convert(trl: Configuration) -> None:
    """Write the recipe of a configuration into it.  Raises ConfigError for a value of another type
    than TRL has there.
    """
    ran = set()
    for name, row in TABLE.items():
        if isinstance(row.convert, Value) and (row.convert.always or name in trl.arguments):
            value = trl.get(name)
            if trl.made(name, row.convert.when, value):
                trl.write(str(row.key), trl.made(name, row.convert.kind, value), name)
        elif (
            row.convert is not None
            and not isinstance(row.convert, Value)
            and row.convert not in ran
        ):
            ran.add(row.convert)
            row.convert(trl)


# ---------------------------------------------------------------- the model

ADAMW = (
    "adamw",
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_torch_xla",
    "paged_adamw_32bit",
    "paged_adamw",
)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> list[str]:
    """A text, or a list of them, as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple):
        raise Needed("text, or a list of texts, is needed")
    return [str(one) for one in value]


def _mappings(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple) or not all(
        isinstance(inner, Mapping) for inner in value
    ):
        raise Needed("a list of mappings is needed")
    return [dict(inner) for inner in value]


def _limit(norm: Any) -> float | None:
    """A limit of which 0 means none."""
    return None if norm is None else number_of(norm) or None


def _numbers(value: Any) -> list[Any]:
    """A number, or a list of them, as a list."""
    return list(value) if isinstance(value, list | tuple) else [number_of(value)]


def _boards(report: Any) -> list[str]:
    """The dashboards of `report_to` that there are."""
    return [board for board in _texts(report or []) if board in get_args(BoardName)]


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Needed("a mapping is needed")
    return dict(value)


def _folder_name(trl: Configuration) -> None:
    source = "output_dir" if trl.arguments.get("output_dir") else "run_name"
    folder = trl.arguments.get(source)
    if isinstance(folder, str) and (
        name := re.sub(r"[^\w.+-]+", "-", Path(folder).name).strip("-.")
    ):
        trl.write("name", name, source)


def _model_path(trl: Configuration) -> None:
    name = "model_name_or_path"
    if (model := trl.arguments.get(name)) is not None:
        trl.write("model.path", model, name)
    else:
        trl.note(name, "missing", "a loaded model: give its folder or hub name as model.path")
        trl.need("model.path: a checkpoint's folder or hub name")


def _dtype(trl: Configuration) -> None:
    """Of the weights' type and of the products'."""
    options = trl.get("model_init_kwargs")
    option = (
        options.get("dtype", options.get("torch_dtype")) if isinstance(options, Mapping) else None
    )
    named = next((name for name in ("dtype", "torch_dtype") if name in trl.arguments), "dtype")
    dtype = str(option or trl.get(named)).removeprefix("torch.")
    half = bool(trl.get("fp16")) or trl.get("bf16") is not False or dtype == "float16"
    wanted = "bfloat16" if dtype == "bfloat16" else "autocast" if half else "float32"
    names = ("bf16", "fp16", "dtype", "torch_dtype", *(["model_init_kwargs"] if option else []))
    trl.write(
        "model.dtype",
        wanted,
        *names,
        says="float32 weights, bfloat16 products" if wanted == "autocast" else "",
    )


def _checkpointing(trl: Configuration) -> None:
    name = (
        "activation_checkpointing"
        if "activation_checkpointing" in trl.arguments
        else "gradient_checkpointing"
    )
    trl.write("model.gradient_checkpointing", bool(trl.get(name)), name)


def _lora(trl: Configuration) -> None:
    if not trl.arguments.get("use_peft"):
        return
    rank = trl.whole("lora_r", 1) if "lora_r" in trl.arguments else 16
    alpha = trl.number("lora_alpha") if "lora_alpha" in trl.arguments else 32.0
    alpha *= math.sqrt(rank) if trl.arguments.get("use_rslora") else 1.0
    for name in ("lora_modules_to_save", f"{ADAPTER}modules_to_save"):
        if trl.kind == "RewardConfig" and trl.arguments.get(name) in ("score", ["score"]):
            trl.note(
                name,
                "unneeded",
                "the head of a reward model is always trained, and stands in the adapter's file",
            )
    targets = trl.arguments.get("lora_target_modules")
    adapter = {
        "rank": rank,
        "alpha": int(alpha) if alpha.is_integer() else alpha,
        "targets": targets or "all-linear",
    }
    says = "TRL leaves the choice of layers to peft, which takes fewer" if targets is None else ""
    trl.write(
        "model.lora",
        adapter,
        "use_peft",
        "lora_r",
        "lora_alpha",
        "lora_target_modules",
        "use_rslora",
        says=says,
    )


def _parallel(trl: Configuration) -> None:
    """Of a configuration of DeepSpeed, FSDP or accelerate, or of the file that is named."""
    option = next(
        (
            name
            for name in ("deepspeed", "fsdp", "config_file", "accelerate_config")
            if trl.arguments.get(name)
        ),
        None,
    )
    if option is None:
        return
    value = trl.arguments[option]
    if isinstance(value, str):
        beside = trl.file.parent if trl.file is not None else Path()
        value = next(
            (mapping_of(file) for file in (beside / value, Path(value)) if file.is_file()), value
        )
    both = {option: value} | (
        {"fsdp_config": trl.arguments["fsdp_config"]} if trl.arguments.get("fsdp_config") else {}
    )
    trl.write("parallel", parallel_of(both), *both)


OFFLOADED = re.compile(
    r'offload\w*": (\{[^{}]*"device": )?("cpu"|"nvme"|true)|fsdp": "[^"]*\boffload\b'
)
"""What keeps parameters or the optimizer's state in host memory, in JSON."""


def parallel_of(launcher: object) -> str | dict[str, Any]:
    """`parallel` for a configuration of DeepSpeed, of FSDP, or of accelerate, or for the name of
    its file.
    """
    text = json.dumps(launcher, default=str).lower()
    whole = "fsdp" in text and not re.search(r"grad_op|fsdp_reshard_after_forward\": false", text)
    name = "zero3"
    if not whole and not re.search(r'zero_?3|stage_?3|stage": 3|full_shard', text):
        name = (
            "zero2"
            if re.search(r'zero_?2|stage_?2|stage": 2|grad_op|fsdp', text)
            else "ddp"
            if "multi_gpu" in text
            else "auto"
        )
    return (
        {"name": name, "offload": True}
        if name in ("zero2", "zero3") and OFFLOADED.search(text)
        else name
    )


# ---------------------------------------------------------------- data


def _data(trl: Configuration) -> None:
    """`data.path` and `data.eval_path` with their splits."""
    arguments = {**trl.arguments, **_mixture(trl)}
    name = arguments.get("dataset_name", arguments.get("train_dataset"))
    split, part = (
        arguments.get("dataset_train_split") or "train",
        arguments.get("dataset_test_split") or "test",
    )
    if name is None:
        trl.need("data.path: a file or hub name")
    else:
        name = f"{name}:{arguments['dataset_config']}" if arguments.get("dataset_config") else name
        trl.write("data.path", name, "dataset_name", "dataset_config", "train_dataset", "datasets")
        if split != "train":
            trl.write("data.split", split, "dataset_train_split", "datasets")
    if isinstance(share := arguments.get("test_split_size"), float) and 0 < share < 1:
        if arguments.get("eval_dataset") is None:
            trl.write(
                "data.eval_fraction",
                share,
                "test_split_size",
                says="by a hash of the prompt, not at random",
            )
            return
        trl.note(
            "test_split_size",
            "missing",
            "beside data.eval_path nothing is held out: these rows are trained too",
        )
    if trl.file is None or trl.file.suffix == ".py":  # rows are handed over
        held = arguments.get("eval_dataset")
    else:  # TRL's command takes another split of the same data set
        held = (
            name
            if (arguments.get("evaluation_strategy") or trl.get("eval_strategy"))
            not in ("no", None)
            else None
        )
    if held is not None and not isinstance(held, str):
        trl.write("data.eval_path", held, "eval_dataset")
    elif held is not None and (
        held != name or (part != split and not held.endswith(DATA_SUFFIXES))
    ):
        trl.write("data.eval_path", held, "eval_dataset", "dataset_name", says="for evaluation")
        if part != "test":
            trl.write("data.eval_split", part, "dataset_test_split")
    elif held is not None:
        trl.need(
            f"data.eval_path, or data.eval_fraction: a part of {held} to evaluate on, and not to"
            " train on"
        )


def _mixture(trl: Configuration) -> dict[str, Any]:
    """The one data set of `datasets` under the names of TRL's other arguments, which it goes
    before.
    """
    mixed = trl.made("datasets", _mappings, trl.arguments.get("datasets") or [])
    names = {"dataset_name": "path", "dataset_config": "name", "dataset_train_split": "split"}
    if len(mixed) == 1 and mixed[0].keys() <= {*names.values(), "columns"}:
        return {name: mixed[0].get(key) for name, key in names.items()}
    if mixed:
        trl.note(
            "datasets",
            "missing",
            "data.path is one file or hub name: write the rows of all of them into one file",
        )
    return dict.fromkeys(names) if mixed else {}


def _system_prompt(trl: Configuration) -> None:
    if isinstance(system := trl.arguments.get("system_prompt"), str):
        trl.write("data.chat", True, "system_prompt", says="strings become messages of the user")
        trl.write("data.system", system, "system_prompt")


def _shuffle(trl: Configuration) -> None:
    """Where rows are taken in their order: of trainers without completions by the sampler, whatever
    they shuffle before.
    """
    if trl.online:
        if trl.arguments.get("shuffle_dataset") is False:
            trl.write("data.shuffle", False, "shuffle_dataset")
    elif trl.arguments.get("train_sampling_strategy") == "sequential" and not trl.arguments.get(
        "shuffle_dataset"
    ):
        trl.write("data.shuffle", False, "train_sampling_strategy")


def _prompt_length(trl: Configuration) -> None:
    name = "max_prompt_length"
    if trl.online and trl.arguments.get(name) is not None:
        trl.write("data.max_prompt_tokens", trl.whole(name, 1), name)
        trl.write(
            "data.too_long", "truncate_left", name, says="TRL keeps the end of a longer prompt"
        )


def _longest(trl: Configuration) -> str:
    """The name of the argument for the length of rows."""
    return "max_seq_length" if "max_seq_length" in trl.arguments else "max_length"


def _row_length(trl: Configuration) -> None:
    """Of rows to learn from."""
    name = _longest(trl)
    if trl.online or trl.get(name) is None:
        return
    says = "" if trl.kind == "RewardConfig" else "longer rows are dropped, TRL cuts their ends"
    if trl.get("truncation_mode") == "keep_end":
        trl.write("data.too_long", "truncate_left", "truncation_mode")
        says = ""
    trl.write("data.max_tokens", trl.whole(name, 1), name, says=says)


def _train_on(trl: Configuration) -> None:
    """`data.train_on`: TRL's default depends on the rows."""
    name = "completion_only_loss"
    if trl.kind != "SFTConfig" or trl.get(name) or trl.get("assistant_only_loss"):
        return
    if trl.get(name) is False or (
        trl.columns is not None and not {"prompt", "completion"} <= trl.columns
    ):
        says = (
            ""
            if trl.get(name) is False
            else "of rows without prompt and completion TRL trains every token"
        )
        trl.write("data.train_on", "all", name, says=says)
    elif trl.columns is None:
        trl.need(
            "data.train_on: all, if rows are messages: TRL trains every token of those, Groupwise"
            " the last answer"
        )


# ---------------------------------------------------------------- the optimizer, and how long it
# goes

SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}  # fmt: skip


def _optimizer(trl: Configuration) -> None:
    if (kind := str(trl.arguments.get("optim", "adamw_torch"))) not in ADAMW:
        fate: Fate = "changed" if kind.startswith(("adamw", "paged_adamw")) else "missing"
        trl.note("optim", fate, f"{kind}: AdamW with float32 state takes its place")


def _schedule(trl: Configuration) -> None:
    kind, name = str(trl.get("lr_scheduler_type")), "lr_scheduler_kwargs"
    says = "" if kind in SCHEDULES else f"the nearest to {kind}, which is not there"
    schedule, fate = SCHEDULES.get(kind, "cosine"), "missing" if says else None
    trl.write("optimizer.schedule", schedule, "lr_scheduler_type", says=says, fate=fate)
    if not (options := trl.made(name, _mapping, trl.arguments.get(name) or {})):
        return
    lr = trl.number("learning_rate")
    least = options.get("min_lr_rate")
    if "min_lr" in options and least is None and lr:
        least = trl.made(name, float, options["min_lr"]) / lr
    if least is not None and kind == "cosine_with_min_lr":
        trl.write("optimizer.min_lr_ratio", trl.made(name, float, least), name)
    else:
        trl.note(name, "missing", "only min_lr and min_lr_rate of cosine_with_min_lr are")


def _betas(trl: Configuration) -> None:
    usual = {"adam_beta1": 0.9, "adam_beta2": 0.999}
    if usual.keys() & trl.arguments.keys():
        betas = [
            trl.number(name) if name in trl.arguments else beta for name, beta in usual.items()
        ]
        trl.write("optimizer.betas", betas, *usual)


def _batch(trl: Configuration) -> None:
    """`batch_size`, or how a rollout is made up and cut."""
    batch, names = (
        trl.batch,
        (
            "per_device_train_batch_size",
            "per_gpu_train_batch_size",
            "gradient_accumulation_steps",
        ),
    )
    if not trl.online:
        says = (
            f"{batch.rows // trl.devices} x {counted(trl.devices, 'device')} x"
            f" {counted(batch.pieces, 'step')}"
        )
        if trl.kind == "SFTConfig" and trl.arguments.get("packing"):
            longest = f"{trl.whole(_longest(trl), 1):,} tokens"
            says += f" of TRL's packed sequences, {longest} each"
            trl.note(
                "packing",
                "changed",
                f"batch_size counts rows, TRL with packing sequences of {longest}",
            )
            trl.need(
                f"batch_size: {batch.rows * batch.pieces} x {longest} / the mean tokens of a row,"
                " to train on as many a step"
            )
        trl.write("batch_size", batch.rows * batch.pieces, *names, says=says)
        return
    uneven = batch.completions % batch.size
    trl.write("group.group_size", batch.size, "num_generations", fate="changed" if uneven else None)
    says = f"{counted(batch.completions, 'completion')} of a rollout / {batch.size}"
    says += f" is {Fraction(batch.completions, batch.size)}: rounded" if uneven else ""
    trl.write(
        "group.prompts_per_step",
        batch.prompts,
        *names,
        "generation_batch_size",
        *trl.lost & {"num_generations"},
        says=says,
    )
    if batch.passes != batch.pieces:
        names = ("steps_per_generation", "generation_batch_size")
        says = f"{batch.passes} / {batch.pieces}, each of whole groups; TRL shuffles completions"
        trl.write("group.minibatches", batch.minibatches, *names, says=says)
    if (updates := trl.whole("num_iterations")) > 1:
        trl.write("group.updates_per_rollout", updates, "num_iterations")


def _length(trl: Configuration) -> None:
    """`steps` or `epochs`."""
    epochs = trl.number("num_train_epochs")
    if trl.most_updates is not None:
        says = f"{trl.updates} optimizer steps each" if trl.updates > 1 else ""
        trl.write("steps", trl.steps, "max_steps", says=says)
        trl.note("num_train_epochs", "unneeded", "max_steps takes its place")
        return
    trl.note("max_steps", "unneeded", "it is off")
    if not trl.online:
        trl.write("epochs", epochs, "num_train_epochs")
    elif trl.steps is not None:
        says = (
            f"{epochs:g} x {counted(trl.rows or 0, 'row')} / {counted(trl.batch.prompts, 'prompt')}"
        )
        trl.write("steps", trl.steps, "num_train_epochs", says=says)
    else:
        trl.note(
            "num_train_epochs",
            "changed",
            "steps counts rollouts, and how many rows there are is not known here",
        )
        trl.need(
            f"steps: num_train_epochs ({epochs:g}) x rows of the data /"
            f" {counted(trl.batch.prompts, 'prompt')}"
        )


def _warm_up(trl: Configuration) -> None:
    """Of a number of steps or of a share."""
    name = "warmup_ratio" if trl.arguments.get("warmup_ratio") else "warmup_steps"
    warmup = trl.number(name, 0, null=0)
    updates = trl.most_updates or (None if trl.steps is None else trl.steps * trl.updates)
    rises = "the first rate is a step of the rise, TRL's is 0"
    if warmup >= 1:
        trl.write("optimizer.warmup_steps", int(warmup), name, says=rises)
    elif warmup and updates is not None:
        trl.write(
            "optimizer.warmup_steps",
            math.ceil(warmup * updates),
            name,
            says=f"{warmup:g} of all optimizer steps; {rises}",
        )
    elif warmup:
        trl.note(
            name,
            "changed",
            "optimizer.warmup_steps counts optimizer steps, and how many there are is not known"
            " here",
        )
        trl.need(f"optimizer.warmup_steps: {warmup:g} of all optimizer steps")


def _every(trl: Configuration, key: str, steps: str, *names: str) -> None:
    """How often something is done.   steps: the argument that counts optimizer steps."""
    if (every := trl.our_steps(steps, trl.steps)) is not None:
        trl.write(key, every, steps, *names)
    else:
        trl.note(steps, "changed", f"{key} counts steps, and how many there are is not known here")


def _evaluation(trl: Configuration) -> None:
    trl.write("eval.at_start", bool(trl.get("eval_on_start")), "eval_on_start")
    if (trl.arguments.get("evaluation_strategy") or trl.get("eval_strategy")) == "steps":
        steps = (
            "eval_steps" if trl.get("eval_steps") is not None else "logging_steps"
        )  # as often as TRL logs
        _every(trl, "eval.every", steps, "eval_strategy", "evaluation_strategy")


def _saving(trl: Configuration) -> None:
    if (strategy := str(trl.get("save_strategy"))) != "steps":
        trl.write("save.every", 0, "save_strategy", says=strategy)
    else:
        _every(trl, "save.every", "save_steps")


def _checkpoints(trl: Configuration) -> None:
    name = "save_total_limit"
    if trl.arguments.get(name) is not None:
        keep = trl.whole(name)
        says = "at least 2: the newest is verified before older ones go" if keep < 2 else ""
        trl.write("save.keep", max(2, keep), name, says=says, fate="changed" if says else None)


# ---------------------------------------------------------------- what is learnt

PRESETS = ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
"""Losses of TRL's that are presets of the same name here; its `dapo` is bnpo."""
SURROGATES = {
    "sapo": {"tau_pos": "sapo_temperature_pos", "tau_neg": "sapo_temperature_neg"},
    "vespo": {
        "k_pos": "vespo_k_pos",
        "lam_pos": "vespo_lambda_pos",
        "k_neg": "vespo_k_neg",
        "lam_neg": "vespo_lambda_neg",
    },
}
"""Surrogates with keywords of their own: ours -> TRL's argument."""


def _preset(trl: Configuration) -> str:
    """The objective that TRL's loss is."""
    if trl.kind != "GRPOConfig":
        return KINDS[trl.kind]
    loss = str(trl.get("loss_type"))
    return loss if loss in PRESETS else "bnpo"


def _decoupled(trl: Configuration) -> bool:
    """True if TRL standardizes every reward by itself, which is the credit of GDPO."""
    aggregation = trl.get("multi_objective_aggregation")
    return trl.kind == "GRPOConfig" and aggregation == "normalize_then_sum"


def _objective(trl: Configuration) -> None:
    """`objective`, and of pairs `pairs.loss`."""
    loss, preset = trl.get("loss_type"), _preset(trl)
    trl.write("objective", preset)
    if trl.kind == "DPOConfig":
        loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
        known = loss in ("sigmoid", "ipo")
        says = "" if known else f"{short(loss)} is not there"
        trl.write(
            "pairs.loss",
            loss if known else "sigmoid",
            "loss_type",
            says=says,
            fate="same" if known else "missing",
        )
    elif trl.kind == "SFTConfig":
        plain = loss in ("nll", "chunked_nll")
        says = "the loss of sft is the mean over tokens of -log p" + (
            "" if plain else f"; {short(loss)} is not there"
        )
        trl.note("loss_type", "unneeded" if plain else "missing", says)
    elif trl.kind == "GRPOConfig":
        _group_objective(trl, str(loss), preset)


def _group_objective(trl: Configuration, loss: str, preset: str) -> None:
    """Write the objective of GRPOConfig, and what of TRL's loss is otherwise there."""
    known = ("dapo", *PRESETS)
    if loss not in known:
        says = f"TRL 1.16 knows {', '.join(known)}{closest(loss, PRESETS)}"
        trl.write("objective", preset, "loss_type", says=says, fate="missing")
        return
    says = []
    if loss == "dapo":
        says.append("TRL's dapo is a mean over tokens")
    if loss == "bnpo" and trl.microbatches > 1:
        says.append("the mean over the step's tokens; TRL takes one in each micro-batch")
    if loss in ("dapo", "cispo", "vespo") and trl.batch.minibatches > 1:
        says.append("the mean over the minibatch's tokens; TRL divides by the rollout's mean")
    if loss == "cispo" and trl.get("epsilon_high") is None:
        cap = trl.number("epsilon")
        says.append(f"the cap of a ratio is 5; TRL's is epsilon, which weighs every token {cap:g}")
    trl.write("objective", preset, "loss_type", says="; ".join(says))


def _credit(trl: Configuration) -> None:
    """Where the preset's differs."""
    if _decoupled(trl):
        trl.write("group.credit", "decoupled", "multi_objective_aggregation")
        trl.note("scale_rewards", "unneeded", "normalize_then_sum scales by itself")
        return
    if trl.kind == "RLOOConfig" and trl.get("normalize_advantages"):
        trl.write(
            "group.credit", {"name": "leave_one_out", "scale": "batch"}, "normalize_advantages"
        )
    scale, preset = str(trl.get("scale_rewards")), _preset(trl)
    scale = {"True": "group", "False": "none"}.get(scale, scale)
    if trl.kind == "GRPOConfig" and scale != ("none" if preset == "dr_grpo" else "group"):
        says = "TRL's loss_type dr_grpo leaves it to scale_rewards" if preset == "dr_grpo" else ""
        trl.write(
            "group.credit", {"name": "standardized", "scale": scale}, "scale_rewards", says=says
        )


def _ratio(trl: Configuration) -> None:
    name, preset = "importance_sampling_level", _preset(trl)
    if trl.kind != "GRPOConfig":
        return
    if preset == "vespo":
        trl.note(name, "unneeded", "the weight of vespo is the completion's at both levels")
    elif preset == "luspo":
        if trl.get(name) == "token":
            trl.write("group.ratio", "token", name)
    elif trl.get(name) == "sequence":
        says = ""
        if trl.get("beta") and trl.get("use_bias_correction_kl"):
            says = "the KL is weighed by the token's ratio, TRL's by the completion's"
        trl.write("group.ratio", "sequence_mean", name, says=says)


def _kl(trl: Configuration) -> None:
    beta = (
        trl.number("beta", null=0.0)
        if trl.kind in ("DPOConfig", "RLOOConfig", "GRPOConfig")
        else 0.0
    )
    if trl.kind == "DPOConfig":
        trl.write("pairs.beta", beta, "beta")
    elif trl.kind == "RLOOConfig":
        trl.write("group.beta", beta, "beta", says="of the KL in the reward")
    elif beta:
        trl.write("group.beta", beta, "beta")
        trl.write(
            "group.kl",
            "k3_ratio" if trl.get("use_bias_correction_kl") else "k3",
            "use_bias_correction_kl",
        )


def _moving_reference(trl: Configuration) -> None:
    if not trl.arguments.get("sync_ref_model"):
        return
    if trl.kind == "DPOConfig":
        trl.note("sync_ref_model", "missing", "the reference of pairs does not move")
    elif trl.online:
        every = trl.our_steps("ref_model_sync_steps", None) or 1
        trl.write("group.reference_refresh", every, "ref_model_sync_steps", "sync_ref_model")
        trl.write(
            "group.reference_mix", trl.number("ref_model_mixup_alpha"), "ref_model_mixup_alpha"
        )


def _entropy(trl: Configuration) -> None:
    """`group.entropy_bonus`, constant or adaptive."""
    keys = {
        "entropy_target": "entropy_target",
        "entropy_coef_max": "entropy_bonus",
        "entropy_coef_delta": "entropy_step",
    }
    if trl.kind == "GRPOConfig" and trl.arguments.get("use_adaptive_entropy"):
        for name, key in keys.items():
            trl.write(f"group.{key}", trl.number(name), name)
        trl.note(
            "use_adaptive_entropy",
            "changed",
            "the coefficient moves before a step, by the entropy of its completions; TRL's moves"
            " behind it, and its first step has none",
        )
        trl.note("entropy_coef", "changed", "an adaptive coefficient begins at 0")
        return
    for name in (*keys, "entropy_coef_min"):
        trl.note(name, "unneeded", "of use_adaptive_entropy, which is off")
    if trl.arguments.get("entropy_coef"):
        bonus, says = trl.number("entropy_coef"), ""
        if trl.microbatches > 1:
            says = "of the mean over the step's tokens; TRL takes one in each micro-batch"
        fate: Fate | None = "changed" if says else None
        trl.write("group.entropy_bonus", bonus, "entropy_coef", says=says, fate=fate)


def _quantile(trl: Configuration) -> None:
    """The share of tokens that a mask of high entropies leaves out."""
    if trl.kind != "GRPOConfig":
        return
    upper = trl.made("top_entropy_quantile", float, trl.get("top_entropy_quantile"))
    if upper < 1.0:
        says = "of the step's tokens; TRL's of each micro-batch's" if trl.microbatches > 1 else ""
        trl.write(
            "group.entropy_quantile", round(1.0 - upper, 12), "top_entropy_quantile", says=says
        )


def _surrogate(trl: Configuration) -> None:
    """Where its bounds are not the preset's."""
    preset, arguments = _preset(trl), trl.arguments
    if not trl.online:
        return
    if preset == "cispo":
        cap = trl.get("epsilon_high")
        if cap is not None and trl.number("epsilon_high") > 1.0:
            trl.write("group.surrogate", {"name": "cispo", "cap": float(cap)}, "epsilon_high")
        elif cap is not None:
            says = f"a cap is above 1 and stays at 5; TRL's {cap} weighs every token with it"
            trl.note("epsilon_high", "missing", says)
    elif preset in SURROGATES:
        keywords = {
            ours: trl.number(theirs)
            for ours, theirs in SURROGATES[preset].items()
            if theirs in arguments
        }
        if keywords:
            trl.write("group.surrogate", {"name": preset, **keywords}, *SURROGATES[preset].values())
    else:
        low = trl.number("epsilon")
        clipped = {"name": "clipped", "low": low, "high": trl.number("epsilon_high", null=low)}
        if trl.get("delta") is not None:
            clipped["delta"] = trl.number("delta")
        if preset == "luspo" or clipped != {"name": "clipped", "low": 0.2, "high": 0.2}:
            trl.write("group.surrogate", clipped, "epsilon", "epsilon_high", "delta")


# ---------------------------------------------------------------- sampling


def _sampling(trl: Configuration) -> None:
    """What cuts the distribution that is sampled from."""
    says = "the gradient is the cut distribution's, TRL's the whole softmax's"
    if trl.arguments.get("top_k") is not None:
        trl.write("rollout.top_k", max(trl.number("top_k", kind=int), 0), "top_k", says=says)
    for name in ("top_p", "min_p"):
        if trl.arguments.get(name) is not None:
            trl.write(f"rollout.{name}", trl.number(name), name, says=says)


def _generation(trl: Configuration) -> None:
    options = trl.arguments.get("generation_kwargs")
    if isinstance(options, Mapping) and options.get("stop"):
        trl.write(
            "rollout.stop",
            trl.made("generation_kwargs", _texts, options["stop"]),
            "generation_kwargs",
        )


def _engine(trl: Configuration) -> None:
    arguments = trl.arguments
    if not (arguments.get("use_vllm") and trl.online):
        return
    url, device = arguments.get("vllm_server_base_url"), arguments.get("vllm_device")
    vllm: dict[str, Any] = {"name": "vllm"}
    if url is not None:
        vllm["servers"] = [str(url)]
    elif device is None and trl.get("vllm_mode") == "colocate":
        vllm["colocated"] = True
    elif device is None:
        host = str(trl.get("vllm_server_host"))
        vllm["servers"] = [
            f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{trl.get('vllm_server_port')}"
        ]
    if "servers" in vllm:
        trl.need(
            "rollout.engine: start the servers with `groupwise serve MODEL`; those of `trl"
            " vllm-serve` have other routes"
        )
    vllm["correct"] = None
    if trl.get("vllm_importance_sampling_correction"):
        prefix = "vllm_importance_sampling_"
        level, _, mode = str(trl.get(f"{prefix}mode")).partition("_")
        cap = f"{prefix}cap" if arguments.get(f"{prefix}cap") else f"{prefix}clip_max"
        vllm["correct"] = {
            "level": "token" if level == "token" else "sequence_sum",
            "mode": mode or "mask",
        }
        bounds = {"high": cap, "low": f"{prefix}clip_min"}
        vllm["correct"] |= {
            bound: trl.number(name) for bound, name in bounds.items() if trl.get(name) is not None
        }
    names = (
        "use_vllm",
        "vllm_mode",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_device",
    )
    trl.write(
        "rollout.engine",
        vllm,
        *names,
        *(name for name in arguments if name.startswith("vllm_importance")),
    )


# ---------------------------------------------------------------- rewards, tools, environments

LIBRARIES = ("trl", "open_r1")
"""Packages in which these names mean what is built in here."""
REWARD_NAMES = {
    "accuracy": "accuracy", "accuracy_reward": "accuracy", "think_format_reward": "think_format", "format": "think_format",
    "format_reward": "think_format", "tag_count": "tags", "tag_count_reward": "tags",
}  # fmt: skip
"""Reward functions of TRL and of well-known scripts that are built in here."""
OVERLONG = ("get_soft_overlong_punishment", "soft_overlong_punishment")
"""The same for `soft_overlong`, whose arguments TRL's script sets to 1280 and 256."""


def _rewards(trl: Configuration) -> None:
    """`rewards`, with their weights."""
    if not trl.online:
        return
    functions = trl.arguments.get("reward_funcs")
    functions = (
        list(functions)
        if isinstance(functions, list | tuple)
        else [functions]
        if functions is not None
        else []
    )
    if isinstance(judge := trl.arguments.get("reward_model_name_or_path"), str):
        functions.insert(0, RewardModel(judge))  # TRL's scripts put it before the functions
    if not functions:
        trl.need("rewards: a list of {function: module:function or file.py:function, weight: ...}")
        trl.note("reward_weights", "changed", "rewards.N.weight, one in each entry of rewards")
        return
    weights = trl.made(
        "reward_weights", _numbers, trl.arguments.get("reward_weights") or [None] * len(functions)
    )
    if len(weights) != len(functions):
        trl.refuse(
            "reward_weights",
            f"{counted(len(weights), 'weight')} for {counted(len(functions), 'reward function')}",
        )
    entries: list[dict[str, Any]] = []
    guessed: list[str] = []
    for place, (function, weight) in enumerate(zip(functions, weights, strict=True)):
        entry = _reward(trl, function)
        if type(function) is str and entry["function"] == f"rewards.py:{function}":
            guessed.append(function)
        taken, name = (
            [one.get("name", _called(one["function"])) for one in entries],
            _called(entry["function"]),
        )
        if name in taken and name != "<lambda>":  # names tell rewards apart
            source = str(function) if isinstance(function, str) and ":" not in function else name
            entry["name"] = source if source not in taken else f"{source}_{place + 1}"
        entries.append(
            entry
            | ({} if weight is None else {"weight": trl.made("reward_weights", float, weight)})
        )
    trl.write("rewards", entries, "reward_funcs", "reward_weights", "reward_model_name_or_path")
    if guessed:
        trl.need(
            f"rewards: where {', '.join(guessed)} {'are' if len(guessed) > 1 else 'is'} (rewards.py"
            " is a guess)"
        )


def _reward(trl: Configuration, function: Any) -> dict[str, Any]:
    """An entry of `rewards`.  A function of the user's own is never taken for a built-in one of the
    same name.
    """
    if isinstance(function, RewardEntry):
        return dict(function)
    if isinstance(function, RewardModel):
        return {"function": "model", "args": {"path": str(function)}}
    if callable(function):
        name = getattr(function, "__name__", "")
        return {"function": built_in(str(getattr(function, "__module__", "")), name) or function}
    if not isinstance(function, str) or not function:
        trl.refuse(
            "reward_funcs",
            f"functions are needed, by name or themselves; {short(function)} is none",
        )
    if function in OVERLONG:
        return soft_overlong(
            {
                name: trl.whole(name)
                for name in ("max_completion_len", "soft_punish_cache")
                if trl.get(name) is not None
            }
        )
    if (
        function in REWARD_NAMES or function in REWARDS or ":" in function
    ):  # a name of TRL's registry, not of a script
        return {"function": REWARD_NAMES.get(function, function)}
    return {
        "function": (
            ":".join(function.rsplit(".", 1)) if "." in function else f"rewards.py:{function}"
        )
    }


def soft_overlong(arguments: Mapping[str, int]) -> RewardEntry:
    """The entry of `rewards` for TRL's punishment of long completions.   arguments: of the function
    that makes it.
    """
    sizes = {"max_tokens": ("max_completion_len", 1280), "cache": ("soft_punish_cache", 256)}
    arguments = {ours: arguments.get(name, usual) for ours, (name, usual) in sizes.items()}
    return RewardEntry(function="soft_overlong", args=arguments)


def built_in(module: str, name: str) -> str | None:
    """What a reward function of TRL's, or of a well-known script, is called here."""
    return REWARD_NAMES.get(name) if module.partition(".")[0] in LIBRARIES else None


def _called(function: Any) -> str:
    """The name that a reward gets."""
    return (
        function.rpartition(":")[2]
        if isinstance(function, str)
        else getattr(function, "__name__", type(function).__name__)
    )


def _environment(trl: Configuration) -> None:
    tools, factory = trl.arguments.get("tools"), trl.arguments.get("environment_factory")
    factory = factory[0] if isinstance(factory, list) and factory else factory
    if tools:
        trl.write("environment.tools", tools, "tools")
    if factory:
        trl.write("environment.factory", factory, "environment_factory")
    name = "max_tool_calling_iterations"
    turns = trl.whole(name, null=0) + 1
    if turns > 1 and (tools or factory):
        trl.write("environment.max_turns", turns, name, says="turns, one more than rounds")
    elif turns > 1:
        trl.note(name, "changed", f"environment.max_turns: {turns}, with an environment")


# ---------------------------------------------------------------- the table

STEPS = (
    "counts optimizer steps; ours counts rollouts, each of group.updates_per_rollout x"
    " group.minibatches optimizer steps"
)

CUT = (
    "gradients are those of the distribution that is sampled from; TRL samples from the cut one and"
    " takes the gradient of the whole softmax"
)

SAME: Sequence[tuple[Any, ...]] = [
    ("seed", "seed", Value(int, always=True)),
    ("chat_template chat_template_path", "model.chat_template", Value(str, _is_text)),
    ("activation_checkpointing gradient_checkpointing", "model.gradient_checkpointing", _checkpointing),
    ("lora_alpha", "model.lora.alpha", _lora),
    ("lora_r r", "model.lora.rank", _lora),
    ("lora_target_modules target_modules", "model.lora.targets", _lora),
    ("model_name_or_path", "model.path", _model_path),
    ("trust_remote_code", "model.trust_remote_code", Value(bool, bool)),
    ("chat_template_kwargs", "data.chat_template_kwargs", Value(_mapping), "a row's column of the same name goes over them"),
    ("dataset_test_split", "data.eval_split", _data, "with data.eval_path"),
    ("max_prompt_length", "data.max_prompt_tokens", _prompt_length,
     "longer ones are dropped; TRL's cut them: data.too_long: truncate_left"),
    ("dataset_name", "data.path", _data),
    ("shuffle_dataset", "data.shuffle", _shuffle),
    ("dataset_train_split", "data.split", _data),
    ("max_completion_length", "rollout.max_new_tokens", Value(int, always=True)),
    ("stop", "rollout.stop", Value(_texts)),
    ("temperature", "rollout.temperature", float),
    ("beta", "group.beta", _kl, "of DPOConfig: pairs.beta"),
    ("entropy_coef", "group.entropy_bonus", _entropy),
    ("entropy_target", "group.entropy_target", _entropy, "with use_adaptive_entropy"),
    ("num_generations", "group.group_size", _batch),
    ("off_policy_mask_threshold", "group.off_policy_delta", Value(float, bool)),
    ("ref_model_mixup_alpha", "group.reference_mix", _moving_reference),
    ("num_iterations", "group.updates_per_rollout", _batch),
    ("center_rewards_coefficient", "reward_model.centering", Value(float, bool)),
    ("max_grad_norm", "optimizer.clip_norm", Value(_limit, lambda _: True), "null where it is 0"),
    ("adam_epsilon", "optimizer.eps", float),
    ("learning_rate", "optimizer.lr", Value(float, always=True)),
    ("weight_decay", "optimizer.weight_decay", float),
    ("eval_on_start", "eval.at_start", _evaluation),
    ("num_generations_eval", "eval.k", Value(int, bool)),
    ("save_total_limit", "save.keep", _checkpoints, "at least 2"),
]  # fmt: skip
"""Names, our key, a converter or the type of a value that is taken as it is, and perhaps what to
know.
"""
CHANGED: Sequence[tuple[Any, ...]] = [
    ("loss_type", "objective",
     "the preset of that name, but bnpo for dapo; of DPOConfig: pairs.loss", _objective),
    ("multi_objective_aggregation", "group.credit", "decoupled for normalize_then_sum", _credit),
    ("output_dir run_name", "name", "the run folder is runs/NAME", _folder_name),
    ("max_steps", "steps", STEPS, _length),
    ("num_train_epochs", "epochs", "of online objectives steps: epochs x rows / group.prompts_per_step", _length),
    ("accelerate_config config_file", "parallel",
     "of accelerate: zero2, zero3 or ddp; default: auto. Its num_processes multiply batches", _parallel),
    ("deepspeed", "parallel", "zero2 or zero3 (FSDP2), {name: zero3, offload: true}; default: auto", _parallel),
    ("fsdp", "parallel", "zero2 or zero3 (FSDP2); default: auto", _parallel),
    ("fsdp_config", "parallel", "{name: zero3, shards: ..., offload: ...}", _parallel),
    ("parallelism_config", "parallel", "ddp, zero2, zero3 or auto"),
    ("use_cpu", "model.device", "cpu", Value(lambda _: "cpu", bool)),
    ("bf16", "model.dtype", "autocast", _dtype),
    ("dtype torch_dtype", "model.dtype", "float32 or bfloat16; with bf16 and float32 weights autocast", _dtype),
    ("fp16", "model.dtype", "autocast: bfloat16 in the place of float16, which needs no loss scaling", _dtype),
    ("model_init_kwargs", "model.dtype", "its dtype; attn_implementation is not needed; other arguments are not passed on", _dtype),
    ("peft_config", "model.lora", "{rank: ..., alpha: ..., targets: ...}", _lora),
    ("use_peft", "model.lora", "{}, or with rank, alpha and targets", _lora),
    ("use_rslora", "model.lora", "alpha x sqrt(rank): products are scaled by alpha / rank", _lora),
    ("dataset_prompt_column", "data.columns", "{prompt: ...}",
     Value(lambda column: {"prompt": column}, lambda column: _is_text(column) and column != "prompt")),
    ("dataset_text_field", "data.columns", "{text: ...}",
     Value(lambda column: {"text": column}, lambda column: _is_text(column) and column != "text")),
    ("eval_dataset", "data.eval_path", "a file or hub name; in Python data={'path': ..., 'eval_path': rows}", _data),
    ("dataset_config", "data.path", "NAME:CONFIG", _data),
    ("train_dataset", "data.path", "a file or hub name; in Python data=rows", _data),
    ("datasets", "data.path", "one file or hub name: write the rows of several into one", _data),
    ("test_split_size", "data.eval_fraction", "a share; rows are held out by a hash of the prompt", _data),
    ("train_sampling_strategy", "data.shuffle", "false for sequential, of SFT, reward models and DPO", _shuffle),
    ("system_prompt", "data.system", "with data.chat: true", _system_prompt),
    ("max_length max_seq_length", "data.max_tokens", "longer rows are dropped; TRL's SFT and DPO cut them", _row_length),
    ("truncation_mode", "data.too_long", "drop for keep_start, truncate_left for keep_end", _row_length),
    ("assistant_only_loss", "data.train_on", "completion: the last answer of a conversation"),
    ("completion_only_loss", "data.train_on", "completion or all; TRL's default is all for messages", _train_on),
    ("reward_funcs", "rewards", "a list of {function: ..., weight: ...}", _rewards),
    ("reward_model_name_or_path", "rewards", "{function: model, args: {path: ...}}", _rewards),
    ("reward_weights", "rewards.N.weight", "one in each entry of rewards", _rewards),
    ("environment_factory", "environment.factory", "file.py:Class; in Python environment=Class", _environment),
    ("max_tool_calling_iterations", "environment.max_turns", "turns of the policy: one more than rounds of tool calls",
     _environment),
    ("tools", "environment.tools", "[file.py:function, ...]; in Python tools=[function, ...]", _environment),
    ("use_vllm", "rollout.engine", "vllm; the default, native, samples in the trainer's process", _engine),
    ("vllm_device", "rollout.engine", "{name: vllm, colocated: true}, or a server: groupwise serve", _engine),
    ("vllm_dtype", "rollout.engine", "{name: vllm, dtype: ...}"),
    ("vllm_importance_sampling_cap vllm_importance_sampling_clip_max", "rollout.engine", "{name: vllm, correct: {high: ...}}",
     _engine),
    ("vllm_importance_sampling_clip_min", "rollout.engine", "{name: vllm, correct: {low: ...}}", _engine),
    ("vllm_importance_sampling_correction", "rollout.engine", "{name: vllm, correct: {...}}, or correct: null for none", _engine),
    ("vllm_importance_sampling_mode", "rollout.engine",
     "{name: vllm, correct: {level: token or sequence_sum, mode: truncate or mask}}", _engine),
    ("vllm_mode", "rollout.engine", "{name: vllm, colocated: true} for colocate; servers otherwise", _engine),
    ("vllm_server_base_url", "rollout.engine", "{name: vllm, servers: [...]}", _engine),
    ("vllm_server_host vllm_server_port", "rollout.engine", "{name: vllm, servers: [http://HOST:PORT]}", _engine),
    ("normalize_advantages", "group.credit", "{name: leave_one_out, scale: batch}", _credit),
    ("scale_rewards", "group.credit", "{name: standardized, scale: group, batch or none}", _credit),
    ("entropy_coef_max", "group.entropy_bonus", "with use_adaptive_entropy: the most that the coefficient becomes", _entropy),
    ("top_entropy_quantile", "group.entropy_quantile", "1 - top_entropy_quantile, of the step's tokens", _quantile),
    ("entropy_coef_delta", "group.entropy_step", "with use_adaptive_entropy", _entropy),
    ("use_adaptive_entropy", "group.entropy_target", "the target, with group.entropy_step and group.entropy_bonus", _entropy),
    ("use_bias_correction_kl", "group.kl", "k3_ratio where it is true (TRL's default), k3 where it is false", _kl),
    ("steps_per_generation", "group.minibatches", "steps_per_generation / gradient_accumulation_steps: updates per pass", _batch),
    ("generation_batch_size", "group.prompts_per_step", "completions of a rollout: num_generations times the prompts", _batch),
    ("gradient_accumulation_steps", "group.prompts_per_step",
     "prompts per step (rows: batch_size); micro-batches follow from optimizer.tokens_per_microbatch", _batch),
    ("per_device_train_batch_size", "group.prompts_per_step",
     "completions of all devices over num_generations (rows: batch_size)", _batch),
    ("per_gpu_train_batch_size", "group.prompts_per_step", "counts prompts, over all devices (rows: batch_size)", _batch),
    ("importance_sampling_level", "group.ratio", "token, or sequence_mean for sequence", _ratio),
    ("ref_model_sync_steps", "group.reference_refresh", f"with sync_ref_model; {STEPS}", _moving_reference),
    ("sync_ref_model", "group.reference_refresh", "the number of steps; 0 for false", _moving_reference),
    ("delta", "group.surrogate", "{name: clipped, delta: ...}", _surrogate),
    ("epsilon", "group.surrogate", "{name: clipped, low: ..., high: ...}", _surrogate),
    ("epsilon_high", "group.surrogate", "{name: clipped, low: ..., high: ...}; with cispo {name: cispo, cap: ...}", _surrogate),
    ("sapo_temperature_neg sapo_temperature_pos", "group.surrogate", "{name: sapo, tau_neg: ..., tau_pos: ...}", _surrogate),
    ("vespo_k_neg vespo_k_pos", "group.surrogate", "{name: vespo, k_neg: ..., k_pos: ...}", _surrogate),
    ("vespo_lambda_neg vespo_lambda_pos", "group.surrogate", "{name: vespo, lam_neg: ..., lam_pos: ...}", _surrogate),
    ("mask_truncated_completions", "group.truncated", "keep or mask", Value(lambda _: "mask", bool)),
    ("adam_beta1 adam_beta2", "optimizer.betas", "[adam_beta1, adam_beta2]", _betas),
    ("lr_scheduler_kwargs", "optimizer.min_lr_ratio", "min_lr_rate of cosine_with_min_lr", _schedule),
    ("lr_scheduler_type", "optimizer.schedule", "constant, linear or cosine; TRL's default is linear, ours constant", _schedule),
    ("warmup_ratio", "optimizer.warmup_steps", "optimizer steps: the ratio of all of them", _warm_up),
    ("warmup_steps", "optimizer.warmup_steps",
     "optimizer steps (a share below 1 is multiplied out); the first rate is a step of the rise, TRL's is 0", _warm_up),
    ("eval_steps", "eval.every", STEPS, _evaluation),
    ("eval_strategy evaluation_strategy", "eval.every",
     "eval_steps for steps; else before the first step and after the last", _evaluation),
    ("save_steps", "save.every", STEPS, _saving),
    ("save_strategy", "save.every", "save_steps for steps; else 0: after the last step", _saving),
    ("report_to", "save.report_to", "tensorboard, wandb, mlflow, trackio; metrics.jsonl is always written",
     Value(_boards, _boards)),
    ("min_p", "rollout.min_p", CUT, _sampling),
    ("top_k", "rollout.top_k", CUT, _sampling),
    ("top_p", "rollout.top_p", CUT, _sampling),
    ("log_completions", "save.rollouts_every", "completions are written every this many steps; `groupwise view` shows them"),
]  # fmt: skip
"""Names, our key, what to write or what differs, and the converter if a value can be carried over.
"""
UNNEEDED = {
    "processes are started by --nproc or torchrun, and what each holds is `parallel`":
        "accelerator_config ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph "
        "ds3_gather_for_generation ignore_bias_buffers local_rank save_on_each_node",
    "recomputing has no options": "activation_checkpointing_kwargs gradient_checkpointing_kwargs",
    "the arguments of a configuration are keys; `groupwise recipes import-trl` translates a script": "args",
    "the device chooses the kernel; how a batch is computed is model.attention": "attn_implementation",
    "optimizer.tokens_per_microbatch decides how a step is cut, and cannot change the update":
        "auto_find_batch_size eval_accumulation_steps per_device_eval_batch_size precompute_ref_batch_size "
        "torch_empty_cache_steps",
    "every normalisation is over the whole step, whatever the number of processes": "average_tokens_across_devices",
    "held-out figures come in one table with intervals; there are no callbacks for metrics":
        "batch_eval_metrics compute_metrics eval_do_concat_batches eval_use_gather_object include_for_metrics "
        "prediction_loss_only preprocess_logits_for_metrics",
    "evaluation computes as training does": "bf16_full_eval fp16_full_eval",
    "the engine has a KV cache of its own": "cache_implementation",
    "the softmax over the vocabulary is always taken in float32": "cast_lm_head_to_fp32",
    "rows are read once and encoded before the first step: there is no data loader":
        "data_collator dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers "
        "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset_kwargs dataset_num_proc "
        "label_names length_column_name preprocessing_num_workers",
    "one seed decides weights from scratch, order and samples: seed": "data_seed",
    "groupwise train --timeout says it": "ddp_timeout",
    "steps whose loss is not finite are skipped and counted; `groupwise replay` computes one again": "debug",
    "nothing is ever dropped: what is scored is what was sampled": "disable_dropout",
    "every step is a line of metrics.jsonl; dashboards are save.report_to":
        "disable_tqdm log_level log_level_replica log_on_each_node log_unique_prompts logging_dir logging_first_step "
        "logging_steps logging_strategy num_completions_to_print project trackio_bucket_id trackio_space_id "
        "trackio_static_space_id wandb_entity wandb_project",
    "what is held out (data.eval_path, data.eval_fraction) is evaluated": "do_eval",
    "groupwise eval RUN": "do_predict",
    "groupwise train RECIPE": "do_train",
    "SIGTERM and Ctrl-C save the last whole step": "enable_jit_checkpoint",
    "EOS is what generation_config.json and the tokenizer say; `groupwise check` prints it": "eos_token",
    "nothing is ever padded: batches are packed streams": "eval_packing pad_to_multiple_of pad_token padding_free",
    "the same recipe gives the same run; `groupwise replay` checks it": "full_determinism",
    "nothing is uploaded: `final/` is a plain Hugging Face folder":
        "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token log_completions_hub_repo push_to_hub",
    "a resumed run continues where its data stood": "ignore_data_skip",
    "tokens/sampled and tokens/trained are in every step's metrics": "include_num_input_tokens_seen",
    "kernels are built in: packed attention, and logits of trained tokens only, a chunk at a time":
        "liger_kernel_config torch_compile torch_compile_backend torch_compile_mode use_liger use_liger_kernel",
    "there are no images": "log_multimodal",
    "what is not finite is shown, and its update skipped": "logging_nan_inf_filter",
    "it follows from the objective": "lora_task_type",
    "of the launcher: groupwise train --nproc N says it; batches are multiplied by it": "num_processes",
    "the optimizer is AdamW with float32 state": "optim optim_args",
    "the same command resumes the run; --fresh starts anew": "overwrite_output_dir",
    "rows are always packed, and never see one another; batch_size counts rows": "packing packing_strategy",
    "the reference's log-probs of pairs are always computed once, before the first step": "precompute_ref_log_probs",
    "the tokenizer is the checkpoint's; in Python tokenizer=..., beside a loaded model": "processing_class",
    "every column of the data reaches the reward functions that ask for it": "remove_unused_columns",
    "there are no callbacks": "restore_callback_states_from_checkpoint",
    "the same command resumes the run": "resume_from_checkpoint",
    "a reward model's tokenizer is its checkpoint's": "reward_processing_classes",
    "the plan says what a step will need": "skip_memory_metrics",
    "rollout.engine: native batches continuously": "transformers_continuous_batching_config use_transformers_continuous_batching",
    "training has no KV cache, sampling always has one": "use_cache",
    "rollout.engine: native has a cache of its own": "use_transformers_paged",
    "a colocated vLLM always sleeps while weights are trained": "vllm_enable_sleep_mode",
    "the plan shares the memory out; of a server: groupwise serve --cache": "vllm_gpu_memory_utilization",
    "weights travel through the server's own address": "vllm_group_port",
    "the longest prompt and rollout.max_new_tokens say it": "vllm_max_model_len vllm_max_model_length",
    "vLLM's own model is compared with the trainer before the first step": "vllm_model_impl",
    "a run waits for its servers, and says which does not answer": "vllm_server_timeout",
    "of a server: groupwise serve MODEL -- --tensor-parallel-size 2": "vllm_tensor_parallel_size",
}  # fmt: skip
"""Why they are not needed: names."""
LACKING = {
    "activations stay on the device: model.gradient_checkpointing keeps fewer of them": "activation_offloading",
    "weights are float32 or bfloat16":
        "bnb_4bit_quant_storage bnb_4bit_quant_type load_in_4bit load_in_8bit quantization_config use_bnb_nested_quant",
    "a loop of your own over `gw.train(...)` does what callbacks did": "callbacks",
    "a loss of your own is a part: group.surrogate: file.py:function": "compute_loss_func",
    "rows are read once, before the first step": "dataset_streaming streaming",
    "variables of the environment are set before the command": "env",
    "pairs.loss is sigmoid or ipo": "discopop_tau use_weighting",
    "an adaptive coefficient falls to 0": "entropy_coef_min",
    "evaluations begin before the first step, or with the first that eval.every asks for": "eval_delay",
    "pairs are held against the reference by the reverse KL": "f_alpha_divergence_coef f_divergence_type",
    "rows are read as they are: data.template makes the prompt from columns": "formatting_func",
    "only what the scorer reproduces can be sampled: temperature, top_k, top_p, min_p, stop": "generation_kwargs",
    "the last weights are the final model; save.keep keeps the newest checkpoints":
        "greater_is_better load_best_model_at_end metric_for_best_model",
    "pairs.loss is sigmoid or ipo, without smoothing": "label_smoothing",
    "SFT's targets are the tokens themselves": "label_smoothing_factor",
    "every token of a completion counts in pairs.loss": "ld_alpha",
    "adapters have no dropout: what is scored is what was sampled": "lora_dropout",
    "an adapter trains low-rank factors only": "lora_modules_to_save",
    "an adapter lies on linear layers": "lora_target_parameters",
    "pairs.loss is one loss": "loss_weights",
    "the newest revision is loaded; download another one and give its folder": "model_revision",
    "embeddings are trained without noise": "neftune_noise_alpha",
    "the optimizer is AdamW with float32 state": "optim_target_modules optimizer_cls_and_kwargs",
    "the optimizer is AdamW with float32 state, and its schedule optimizer.schedule": "optimizers",
    "the reference is the policy as it was before its first step": "ref_model",
    "the scorer cannot reproduce a penalty: use the reward `repetition`": "repetition_penalty",
    "rewards are taken as they are: clip in the reward function": "reward_clip_range",
    "who samples for itself is a harness: environment.harness": "rollout_func",
    "output_router_logits and router_aux_loss_coef in the model's config.json decide":
        "router_aux_loss_coef",
    "a checkpoint is whole: `groupwise train` resumes from it": "save_only_model",
    "model.dtype: autocast is the fast way": "tf32",
    "adapters are LoRA's": "use_dora",
    "the scorer cannot reproduce constrained decoding": "vllm_structured_outputs_regex",
}  # fmt: skip
"""What there is instead: names."""

KEYLESS = {"optim": _optimizer, "generation_kwargs": _generation}
"""Converters of arguments that have no key of ours."""


def _rows() -> Iterator[tuple[str, Argument]]:
    """Every argument, its names one by one."""
    for names, key, convert, *says in SAME:
        yield (
            names,
            Argument(
                "same", key, "".join(says), Value(convert) if isinstance(convert, type) else convert
            ),
        )
    for names, key, says, *convert in CHANGED:
        yield names, Argument("changed", key, says, next(iter(convert), None))
    for says, names in UNNEEDED.items():
        yield names, Argument("unneeded", None, says)
    for says, names in LACKING.items():
        yield names, Argument("missing", None, says)


TABLE = {
    name: replace(row, convert=KEYLESS[name]) if name in KEYLESS else row
    for names, row in _rows()
    for name in names.split()
}
"""TRL's argument -> what becomes of it."""

CALLS: dict[str, Argument] = {
    "add_callback": TABLE["callbacks"],
    "create_model_card": Argument("unneeded", says="`final/README.md` is one"),
    "evaluate": Argument(
        "unneeded",
        says="what is held out is evaluated after the last step; groupwise eval RUN does it again",
    ),
    "log_metrics": TABLE["logging_steps"],
    "predict": Argument("unneeded", says="groupwise eval RUN"),
    "push_to_hub": TABLE["push_to_hub"],
    "save_metrics": TABLE["logging_steps"],
    "save_model": Argument("unneeded", says="`final/` is the trained model"),
    "save_state": Argument("unneeded", says="every checkpoint is whole"),
    "train": TABLE["resume_from_checkpoint"],
}
"""What a script calls of a trainer -> what becomes of it."""
