"""Files of TRL users: the class of the configuration and its arguments, read without running
anything.

YAML, JSON, or a Python script that makes a configuration (`scripts.py`).  A shell script is
answered with the file that it starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.trl.configuration import KINDS, Configuration
from groupwise.trl.model_keys import launcher_file, parallel_of
from groupwise.trl.scripts import read_script
from groupwise.trl.values import arguments_in, flow, text_in

TELLING = {
    "RLOOConfig": ("normalize_advantages", "reward_clip_range"),
    "GRPOConfig": (
        "num_generations",
        "max_completion_length",
        "reward_funcs",
        "reward_weights",
        "num_iterations",
        "scale_rewards",
    ),
    "SFTConfig": (
        "packing",
        "completion_only_loss",
        "assistant_only_loss",
        "dataset_text_field",
        "max_seq_length",
        "use_liger",
    ),
    "RewardConfig": ("center_rewards_coefficient",),
    "DPOConfig": (
        "precompute_ref_log_probs",
        "label_smoothing",
        "f_divergence_type",
        "ld_alpha",
        "beta",
    ),
}
"""Arguments by which a configuration without a class is known; the first class of which one is
there is meant.
"""
BUNDLED = {"single_gpu": 1} | dict.fromkeys(
    ("fsdp1", "fsdp2", "multi_gpu", "zero1", "zero2", "zero3"), 8
)
"""Configurations of accelerate's that come with TRL, for `accelerate_config`: how many processes
each starts.
"""


def read_configuration(file: Path, kind: str | None, devices: int) -> Configuration:
    """What a file holds.

    kind: the class; None: the one that the file makes, or whose arguments it holds.
    devices: on how many TRL ran; a launcher's `num_processes` goes before it.
    Raises ConfigError for a file that holds no configuration, or several.
    """
    if file.suffix == ".py":
        return read_script(file, text_in(file), kind, devices)
    if file.suffix in (".sh", ".bash"):
        raise ConfigError(shell_answer(file, text_in(file)))
    arguments = arguments_in(file)
    return Configuration(
        kind=kind or kind_of(arguments, file),
        arguments=arguments,
        devices=processes(arguments, file) or devices,
        file=file,
    )


def shell_answer(file: Path, text: str) -> str:
    """Which file to import in the place of a shell script, and on how many devices."""
    started = re.search(r"--config[ =]+(\S+\.(?:ya?ml|json))", text) or re.search(
        r"(\S+\.py)\b", text
    )
    count = re.search(r"--(?:num_processes|nproc[-_]per[-_]node|num_gpus)[ =]+(\d+)", text)
    devices = f" --devices {count[1]}" if count else " --devices N"
    if started is None:
        remedy = "write the arguments of its command into a YAML file, and import that"
    else:
        remedy = f"import what it starts: groupwise recipes import-trl {started[1]}{devices}"
    return f"{file} is a shell script, which is not read; {remedy}"


def processes(arguments: Mapping[str, Any], file: Path) -> int | None:
    """How many processes the launcher starts, by its own argument or the configuration that is
    named; None if nothing sets it.
    """
    count = arguments.get("num_processes")
    named = arguments.get("accelerate_config") or arguments.get("config_file")
    if count is None and isinstance(named, str):
        launcher = launcher_file(file, named) or {"num_processes": BUNDLED.get(named)}
        count = launcher.get("num_processes")
        if launcher.get("distributed_type") in ("NO", False):
            count = 1
    return count if isinstance(count, int) and count > 0 else None


def kind_of(arguments: Mapping[str, Any], file: Path) -> str:
    """The class whose arguments these are.  Raises ConfigError."""
    if "distributed_type" in arguments or "zero_optimization" in arguments:
        count = arguments.get("num_processes")
        start = ""
        if isinstance(count, int):
            start = f" and start it with `groupwise train RECIPE --nproc {count}`"
        parallel = flow(parallel_of(arguments))
        raise ConfigError(
            f"{file} says how the weights are sharded, not what is trained: import the arguments of"
            f" the trainer, write `parallel: {parallel}` into the recipe{start}"
        )
    for kind, names in TELLING.items():
        if any(name in arguments for name in names):
            return kind
    raise ConfigError(
        f"{file}: none of its arguments tells which class it is for (there are {', '.join(KINDS)});"
        f" give it: groupwise recipes import-trl {file} --as GRPOConfig"
    )
