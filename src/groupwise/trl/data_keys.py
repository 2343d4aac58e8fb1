"""Keys for the data of a recipe: files, splits, lengths, order, and what is trained of a row."""

from __future__ import annotations

from typing import Any

from groupwise.config.settings import DATA_SUFFIXES
from groupwise.trl.configuration import Configuration
from groupwise.trl.values import mapping_of, mappings_of

MIXED = {"dataset_name": "path", "dataset_config": "name", "dataset_train_split": "split"}
"""The arguments that an entry of `datasets` stands for."""


def write_paths(trl: Configuration) -> None:
    """Write the data that is trained on and the data that is held out."""
    arguments = {**trl.arguments, **one_of_the_mixture(trl)}
    name = arguments.get("dataset_name", arguments.get("train_dataset"))
    split = arguments.get("dataset_train_split") or "train"
    if name is None:
        trl.need("data.path: a file or hub name")
    else:
        if arguments.get("dataset_config"):
            name = f"{name}:{arguments['dataset_config']}"
        sources = ("dataset_name", "dataset_config", "train_dataset", "datasets")
        trl.write("data.path", name, *sources)
        if split != "train":
            trl.write("data.split", split, "dataset_train_split", "datasets")
    share = arguments.get("test_split_size")
    if isinstance(share, float) and 0 < share < 1:
        if arguments.get("eval_dataset") is None:
            detail = "by a hash of the prompt, not at random"
            trl.write("data.eval_fraction", share, "test_split_size", detail=detail)
            return
        lost = "beside data.eval_path nothing is held out: these rows are trained too"
        trl.note("test_split_size", "missing", lost)
    write_held_out(trl, name, split)


def write_held_out(trl: Configuration, name: Any, split: str) -> None:
    """Write the rows that are evaluated on.   name, split: of those that are trained on."""
    part = trl.arguments.get("dataset_test_split") or "test"
    if trl.file is None or trl.file.suffix == ".py":  # rows are handed over
        held = trl.arguments.get("eval_dataset")
    elif evaluation_strategy(trl) in ("no", None):
        held = None
    else:  # TRL's command takes another split of the same data set
        held = name
    if held is None:
        trl.unused("nothing is evaluated", "dataset_test_split")
    elif not isinstance(held, str):
        trl.write("data.eval_path", held, "eval_dataset")
    elif held != name or (part != split and not held.endswith(DATA_SUFFIXES)):
        sources = ("eval_dataset", "dataset_name")
        trl.write("data.eval_path", held, *sources, detail="for evaluation")
        if part != "test":
            trl.write("data.eval_split", part, "dataset_test_split")
    else:
        lacking = f"a part of {held} to evaluate on, and not to train on"
        trl.need(f"data.eval_path, or data.eval_fraction: {lacking}")
        trl.note("eval_dataset", "missing", "what is trained on is not held out")


def evaluation_strategy(trl: Configuration) -> Any:
    """When TRL evaluates."""
    return trl.arguments.get("evaluation_strategy") or trl.get("eval_strategy")


def one_of_the_mixture(trl: Configuration) -> dict[str, Any]:
    """The one data set of `datasets` under the names of TRL's arguments, which it goes before."""
    mixed = trl.made("datasets", mappings_of, trl.arguments.get("datasets") or [])
    if not mixed:
        return {}
    if len(mixed) == 1 and mixed[0].keys() <= {*MIXED.values(), "columns"}:
        return {name: mixed[0].get(key) for name, key in MIXED.items()}
    lost = "data.path is one file or hub name: write the rows of all of them into one file"
    trl.note("datasets", "missing", lost)
    return dict.fromkeys(MIXED)


def write_columns(trl: Configuration) -> None:
    """Write the columns, system prompt and options that prompts are made of."""
    for name, column in (("dataset_prompt_column", "prompt"), ("dataset_text_field", "text")):
        value = trl.arguments.get(name)
        if value == column:
            trl.note(name, "same", "data.columns: its default")
        elif isinstance(value, str):
            trl.write("data.columns", {column: value}, name)
    system = trl.arguments.get("system_prompt")
    if isinstance(system, str):
        detail = "strings become messages of the user"
        trl.write("data.chat", True, "system_prompt", detail=detail)
        trl.write("data.system", system, "system_prompt")
    options = trl.arguments.get("chat_template_kwargs")
    if options is not None:
        name = "chat_template_kwargs"
        trl.write(f"data.{name}", trl.made(name, mapping_of, options), name)


def write_order(trl: Configuration) -> None:
    """Write where rows are taken in their order; trainers without completions leave it to the
    sampler, whatever they shuffle before.
    """
    shuffled, sampling = "shuffle_dataset", "train_sampling_strategy"
    if trl.online:
        if trl.arguments.get(shuffled) is False:
            trl.write("data.shuffle", False, shuffled)
        trl.unused("TRL has a sampler of its own here", sampling)
    elif trl.arguments.get(sampling) == "sequential" and not trl.arguments.get(shuffled):
        trl.write("data.shuffle", False, sampling)
    else:
        trl.note(shuffled, "same", "data.shuffle: its default")
        if trl.arguments.get(sampling) == "sequential":
            trl.note(sampling, "same", "data.shuffle: its default, as shuffle_dataset is true")


def write_lengths(trl: Configuration) -> None:
    """Write the longest prompt, or the longest row to learn from."""
    name = "max_prompt_length"
    if trl.online and trl.arguments.get(name) is not None:
        detail = "TRL keeps the end of a longer prompt"
        trl.write("data.max_prompt_tokens", trl.whole(name, 1), name)
        trl.write("data.too_long", "truncate_left", name, detail=detail)
    name = longest_row(trl)
    if trl.online or trl.get(name) is None:
        return
    detail = "longer rows are dropped, TRL cuts their ends"
    if trl.get("truncation_mode") == "keep_end":
        trl.write("data.too_long", "truncate_left", "truncation_mode")
        detail = ""
    if trl.kind == "RewardConfig":
        detail = ""
    trl.write("data.max_tokens", trl.whole(name, 1), name, detail=detail)


def longest_row(trl: Configuration) -> str:
    """The name of the argument for the length of rows."""
    return "max_seq_length" if "max_seq_length" in trl.arguments else "max_length"


def write_trained_part(trl: Configuration) -> None:
    """Write what of a row is trained: TRL's default depends on the rows."""
    name = "completion_only_loss"
    if trl.kind != "SFTConfig":
        return
    if trl.get("assistant_only_loss"):
        only = "data.train_on: completion, the last answer; TRL trains all turns of the assistant"
        trl.note("assistant_only_loss", "changed", only)
        trl.unused("assistant_only_loss takes its place", name)
    elif trl.get(name):
        trl.note(name, "same", "data.train_on: its default")
    elif trl.get(name) is False:
        trl.write("data.train_on", "all", name)
    elif trl.columns is None:
        every = "TRL trains every token of those, Groupwise the last answer"
        trl.need(f"data.train_on: all, if rows are messages: {every}")
    elif not {"prompt", "completion"} <= trl.columns:
        detail = "TRL trains every token of rows without prompt and completion"
        trl.write("data.train_on", "all", name, detail=detail)


CONVERTERS = (write_paths, write_columns, write_order, write_lengths, write_trained_part)
