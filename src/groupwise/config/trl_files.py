"""Files of TRL users: the class of the configuration and its arguments, read without running
anything.

YAML, JSON, a shell script that starts TRL, or a Python script that makes a configuration
(`trl_scripts.py`).
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.config.strict_yaml import parse_value
from groupwise.config.trl import parallel_of
from groupwise.config.trl_arguments import KINDS, Configuration, Line, flow, mapping_of
from groupwise.config.trl_scripts import read_script
from groupwise.errors import ConfigError

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
COMMANDS = {objective: kind for kind, objective in KINDS.items()}
"""Subcommands of `trl`, and what its scripts are called by, with the class of each."""
SHELL = re.compile(r"[|&;]+|\d*>.*|<.*")
"""What ends the arguments of a command: pipes, redirections, the next command."""
NODES = "nnodes"
"""Machines, on each of which torchrun and deepspeed start as many processes; accelerate's number is
that of all machines.
"""
LAUNCHER = (
    dict.fromkeys(("num_processes", "nproc_per_node", "num_gpus"), "num_processes")
    | dict.fromkeys(("nnodes", "num_nodes"), NODES)
    | {"config_file": "config_file"}
)
"""Options of accelerate, torchrun and deepspeed before the script that matter, by accelerate's
names.
"""
BUNDLED = {"single_gpu": 1} | dict.fromkeys(
    ("fsdp1", "fsdp2", "multi_gpu", "zero1", "zero2", "zero3"), 8
)
"""Configurations of accelerate's that come with TRL, for `--accelerate_config`: how many processes
each starts.
"""


def read_configuration(file: Path, kind: str | None, devices: int) -> Configuration:
    """What a file says.   kind: the class; None: the one that the file makes or names, or whose
    arguments it holds.

    devices: on how many TRL ran; a launcher's `--num_processes` goes before it.
    Raises ConfigError for a file that holds no configuration, or several.
    """
    if file.suffix not in (".py", ".sh", ".bash"):
        arguments = mapping_of(file)
        kind, devices = kind or _kind_of(arguments, file), _processes(arguments, file) or devices
        return Configuration(kind=kind, arguments=arguments, devices=devices, file=file)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    return (
        read_script(file, text, kind, devices)
        if file.suffix == ".py"
        else _read_command(file, text, kind, devices)
    )


def _processes(arguments: Mapping[str, Any], file: Path) -> int | None:
    """How many processes the launcher starts, by its own argument or the configuration that is
    named; None if nothing says it.
    """
    processes, named = (
        arguments.get("num_processes"),
        arguments.get("accelerate_config") or arguments.get("config_file"),
    )
    if processes is None and isinstance(named, str):
        there = next((path for path in (file.parent / named, Path(named)) if path.is_file()), None)
        launcher = {"num_processes": BUNDLED.get(named)} if there is None else mapping_of(there)
        processes = (
            1
            if launcher.get("distributed_type") in ("NO", False)
            else launcher.get("num_processes")
        )
    return processes if isinstance(processes, int) and processes > 0 else None


def _kind_of(arguments: Mapping[str, Any], file: Path) -> str:
    if "distributed_type" in arguments or "zero_optimization" in arguments:
        processes = arguments.get("num_processes")
        start = (
            f" and start it with `groupwise train RECIPE --nproc {processes}`"
            if isinstance(processes, int)
            else ""
        )
        raise ConfigError(
            f"{file} says how the weights are sharded, not what is trained: import the arguments of"
            f" the trainer, write `parallel: {flow(parallel_of(arguments))}` into the recipe{start}"
        )
    for kind, names in TELLING.items():
        if any(name in arguments for name in names):
            return kind
    raise ConfigError(
        f"{file}: none of its arguments tells which class it is for; say it: groupwise recipes"
        f" import-trl {file} --as GRPOConfig"
    )


def _read_command(file: Path, text: str, kind: str | None, devices: int) -> Configuration:
    """The arguments of `trl grpo --...` or of a script that a shell script starts.

    A YAML file behind `--config` is read too; what the command says itself goes before it.
    """
    try:
        lines = [
            shlex.split(line, comments=True) for line in re.sub(r"\\\r?\n", " ", text).splitlines()
        ]
    except ValueError as error:
        raise ConfigError(f"{file} is no shell script that can be read: {error}") from error
    settings = [words[words[:1] == ["export"] :] for words in lines]
    variables = {
        name: value
        for words in settings
        if len(words) == 1
        for name, value in re.findall(r"(?s)^(\w+)=(.*)$", words[0])
    }
    started = [(words, place) for words in lines if (place := _program(words)) is not None]
    if len(started) != 1:
        raise ConfigError(
            f"{file} starts {len(started)} scripts with arguments, and one is needed: keep it in a"
            " file of its own"
        )
    words, place = started[0]
    words = [
        re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), word)
        for word in words
    ]
    arguments = _options(words[place + 1 :])
    if (config := arguments.pop("config", None)) is not None:
        known = next(
            (path for path in (file.parent / str(config), Path(str(config))) if path.is_file()),
            None,
        )
        if known is None:
            raise ConfigError(f"{file}: no such file {str(config)!r}, which --config names")
        arguments = mapping_of(known) | arguments
    options = {name: value for name, value in _options(words[:place]).items() if name in LAUNCHER}
    launcher, lines = {LAUNCHER[name]: value for name, value in options.items()}, []
    nodes, each = launcher.pop(NODES, 1), launcher.pop("num_processes", None)
    if isinstance(nodes, int) and isinstance(each, int):
        launcher["num_processes"] = nodes * each
    else:
        counts = [
            name
            for name, value in options.items()
            if LAUNCHER[name] in (NODES, "num_processes") and value != 1
        ]
        lines = [
            Line(
                name,
                options[name],
                None,
                "how many processes it starts is not known: --devices says it",
            )
            for name in counts
        ]
    arguments = launcher | arguments
    unread = {name: value for name, value in arguments.items() if "$" in str(value)}
    program = re.split(r"[^a-z]+", Path(words[place]).stem)
    return Configuration(
        kind=kind
        or next((one for name, one in COMMANDS.items() if name in program), None)
        or _kind_of(arguments, file),
        arguments={name: value for name, value in arguments.items() if name not in unread},
        devices=_processes(arguments, file) or devices,
        file=file,
        unread=lines
        + [
            Line(name, value, None, "a variable of the shell: set it in the recipe")
            for name, value in unread.items()
        ],
    )


def _program(words: Sequence[str]) -> int | None:
    """Where the script, or TRL's subcommand, stands in a command with arguments."""
    if not any(word.startswith("--") for word in words):
        return None
    for place, word in enumerate(words):
        if word.endswith(".py") or (word in COMMANDS and place and words[place - 1] == "trl"):
            return place
    return None


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Arguments as transformers' parser has them: `--name value`, `--name=value`, several values,
    or none for true.
    """
    options: dict[str, list[Any]] = {}
    name = None
    for word in itertools.takewhile(lambda word: not SHELL.fullmatch(word), words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            options[name] = [_plain(value)] if equals else []
        elif name is not None:
            options[name].append(_plain(word))
    return {
        name: True if not values else values[0] if len(values) == 1 else values
        for name, values in options.items()
    }


def _plain(word: str) -> Any:
    """A word of a command as a value: a number, true, a mapping in braces, or itself."""
    document, problems = parse_value(word, "")
    return word if problems else document.values
