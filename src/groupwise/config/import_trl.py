"""A configuration of TRL as a recipe: read line by line, and of every line it is said what becomes of it.

    found = import_trl("grpo.yaml")         # YAML, JSON, a script with GRPOConfig(...) in it, or a shell script that starts TRL
    print(found.render())                   # the recipe, each key with the argument that it is from

A script is read as text and never run: of its keyword arguments those that are written out are known, or that are names of such
values.  TRL's defaults that differ from ours are written into the recipe, so that it means what the configuration meant.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from groupwise.config.schema import closest
from groupwise.config.settings import REWARDS
from groupwise.config.strict_yaml import dump, parse, parse_value
from groupwise.config.trl import FATES, TABLE, Fate
from groupwise.errors import ConfigError

KINDS = {"GRPOConfig": "grpo", "RLOOConfig": "rloo", "SFTConfig": "sft", "RewardConfig": "reward", "DPOConfig": "dpo"}
"""TRL's classes and the objective of each."""
TELLING = {
    "RLOOConfig": ("normalize_advantages", "reward_clip_range"),
    "GRPOConfig": ("num_generations", "max_completion_length", "reward_funcs", "reward_weights", "num_iterations", "scale_rewards"),
    "SFTConfig": ("packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field", "max_seq_length", "use_liger"),
    "RewardConfig": ("center_rewards_coefficient",),
    "DPOConfig": ("precompute_ref_log_probs", "label_smoothing", "f_divergence_type", "ld_alpha", "beta"),
}
"""Arguments by which a configuration without a class is known; the first class of which one is there is meant."""

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "max_steps": -1,
    "lr_scheduler_type": "linear", "warmup_steps": 0, "bf16": None, "fp16": False, "dtype": "float32", "save_strategy": "steps",
    "save_steps": 500, "eval_strategy": "no", "gradient_checkpointing": True, "seed": 42,
}  # fmt: skip
"""Of TRL 1.16, where they matter here; those of single classes below."""
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "GRPOConfig": {
        "learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "num_iterations": 1, "loss_type": "dapo",
        "beta": 0.0, "scale_rewards": "group", "epsilon": 0.2, "importance_sampling_level": "token", "use_bias_correction_kl": True,
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
DASHBOARDS = ("tensorboard", "wandb", "mlflow", "trackio")
ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_xla", "paged_adamw_32bit", "paged_adamw")
PRESETS = ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
"""Losses of TRL's that are presets of the same name here; its `dapo` is bnpo."""
REWARD_NAMES = {
    "accuracy": "accuracy", "accuracy_reward": "accuracy", "think_format_reward": "think_format", "format": "think_format",
    "format_reward": "think_format", "tag_count": "tags", "tag_count_reward": "tags",
}  # fmt: skip
"""Reward functions of TRL and of well-known scripts that are built in here."""

OVERLONG = ("get_soft_overlong_punishment", "soft_overlong_punishment")
"""The same for `soft_overlong`, whose arguments TRL's script sets to 1280 and 256."""


@dataclass(frozen=True, slots=True)
class Line:
    """One argument, and what became of it."""

    name: str
    value: Any
    fate: Fate | None
    """None: TRL has no such argument, or its value could not be read."""
    says: str

    def __str__(self) -> str:
        return f"{self.name}: {_short(self.value)}" + (f"  ({self.says})" if self.says else "")


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
        found: dict[str, Any] = {}
        for key, value in self.keys.items():
            *sections, last = key.split(".")
            here = found
            for section in sections:
                here = here.setdefault(section, {})
            here[last] = value
        return found

    def by_fate(self) -> dict[str, list[Line]]:
        """The lines by what became of them, in words."""
        titles = {**FATES, None: "not read"}
        return {title: here for fate, title in titles.items() if (here := [line for line in self.lines if line.fate == fate])}

    def summary(self) -> str:
        """How many lines came to what, and each line that is lost or means something else."""
        found = self.by_fate()
        lines = [
            f"{self.source}: {self.kind}, {len(self.lines)} arguments: " + ", ".join(f"{len(v)} {k}" for k, v in found.items())
        ]
        for title in (FATES["changed"], FATES["missing"], "not read"):
            lines += [f"  {title}: {line}" for line in found.get(title, ())]
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
                yield f"{indent}{name}: {_flow(value)}" + (f"  # {_one_line(comment)}" if comment else "")


def import_trl(path: str | Path, *, devices: int = 1, kind: str | None = None) -> Imported:
    """Read a configuration: YAML or JSON with arguments by name, a Python script that makes one of the classes, or a shell script
    (.sh) with the command that starts TRL.

    devices: on how many TRL ran, which makes its batches larger; a launcher's `--num_processes` goes before it.
    kind: TRL's class; default: the one that a script makes, that a command names, or whose arguments a file holds.
    Raises ConfigError for a file that cannot be read, or that holds no configuration.
    """
    file = Path(path).expanduser()
    if devices < 1:
        raise ConfigError(f"the number of devices is at least 1, got {devices}")
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"TRL's class is one of {', '.join(KINDS)}; got {kind!r}{closest(kind, list(KINDS))}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    try:
        if file.suffix == ".py":
            found, given, unread = _of_script(text, file, kind)
        elif file.suffix in (".sh", ".bash"):
            found, given, unread = _of_command(text, file, kind)
            if isinstance(processes := given.get("num_processes"), int) and processes > 0:
                devices = processes
        else:
            given, unread = _of_file(text, file), []
            found = kind or _kind_of(given, file)
        return _Translation(source=str(file), kind=found, given=given, devices=devices).made(unread)
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:  # a value of another type than TRL has there
        raise ConfigError(f"{file}: a value in it is none that TRL takes ({type(error).__name__}: {error})") from error


# ---------------------------------------------------------------- reading


def _of_file(text: str, file: Path) -> dict[str, Any]:
    tree, problems = parse(text, file.name)  # JSON is YAML
    if problems:
        raise ConfigError(str(problems[0]))
    plain = tree.plain()
    if not isinstance(plain, dict) or not plain:
        raise ConfigError(f"{file} holds no arguments by name: a mapping such as `learning_rate: 1e-6` is needed")
    return {str(name): value for name, value in plain.items()}


def _kind_of(given: Mapping[str, Any], file: Path) -> str:
    if "distributed_type" in given or "zero_optimization" in given:
        processes = given.get("num_processes")
        start = f" and start it with `groupwise train RECIPE --nproc {processes}`" if isinstance(processes, int) else ""
        raise ConfigError(
            f"{file} says how the weights are spread over processes, not what is trained: import the arguments of the trainer, "
            f"write `parallel: {_parallel(given)}` into the recipe{start}"
        )
    for kind, names in TELLING.items():
        if any(name in given for name in names):
            return kind
    raise ConfigError(
        f"{file}: none of its arguments tells which class it is for; say it: groupwise recipes import-trl {file} --as GRPOConfig"
    )


COMMANDS = {"grpo": "GRPOConfig", "rloo": "RLOOConfig", "sft": "SFTConfig", "dpo": "DPOConfig", "reward": "RewardConfig"}
"""Subcommands of `trl`, and what its scripts are called by, with the class of each."""
SHELL = re.compile(r"[|&;]+|\d*>.*|<.*")
"""What ends the arguments of a command: pipes, redirections, the next command."""
LAUNCHER = ("config_file", "num_processes")
"""Options of accelerate's before the script that matter."""


def _of_command(text: str, file: Path, kind: str | None) -> tuple[str, dict[str, Any], list[Line]]:
    """The class and the arguments of `trl grpo --...` or of a script that a shell script starts; those that could not be read.

    A YAML file behind `--config` is read too; what the command says itself goes before it.
    """
    try:
        lines = [shlex.split(line, comments=True) for line in re.sub(r"\\\r?\n", " ", text).splitlines()]
    except ValueError as error:
        raise ConfigError(f"{file} is no shell script that can be read: {error}") from error
    variables = {name: value for words in lines if len(words) == 1 for name, value in re.findall(r"(?s)^(\w+)=(.*)$", words[0])}
    started = [(words, place) for words in lines if (place := _program(words)) is not None]
    if len(started) != 1:
        raise ConfigError(f"{file} starts {len(started)} scripts with arguments, and one is needed: keep it in a file of its own")
    words, place = started[0]
    words = [re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), word) for word in words]
    launcher = {name: value for name, value in _options(words[:place]).items() if name in LAUNCHER}
    given = _options(words[place + 1 :])
    program = Path(words[place]).stem
    kind = kind or next((found for name, found in COMMANDS.items() if name in re.split(r"[^a-z]+", program)), None)
    if (config := given.pop("config", None)) is not None:
        known = next((path for path in (file.parent / str(config), Path(str(config))) if path.is_file()), None)
        if known is None:
            raise ConfigError(f"{file}: no such file {str(config)!r}, which --config names")
        given = _of_file(known.read_text(encoding="utf-8"), known) | given
    given = launcher | given
    unread = [
        Line(name, value, None, "a variable of the shell: say it in the recipe")
        for name, value in given.items()
        if "$" in str(value)
    ]
    given = {name: value for name, value in given.items() if "$" not in str(value)}
    return kind or _kind_of(given, file), given, unread


def _program(words: Sequence[str]) -> int | None:
    """Where the script, or TRL's subcommand, stands in a command with arguments."""
    if not any(word.startswith("--") for word in words):
        return None
    for place, word in enumerate(words):
        if word.endswith(".py") or (word in COMMANDS and place and words[place - 1] == "trl"):
            return place
    return None


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Arguments as transformers' parser has them: `--name value`, `--name=value`, several values, or none for true."""
    found: dict[str, list[Any]] = {}
    name = None
    for word in itertools.takewhile(lambda word: not SHELL.fullmatch(word), words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [_plain(value)] if equals else []
        elif name is not None:
            found[name].append(_plain(word))
    return {name: True if not values else values[0] if len(values) == 1 else values for name, values in found.items()}


def _plain(word: str) -> Any:
    """A word of a command as a value: a number, true, a mapping in braces, or itself."""
    tree, problems = parse_value(word, "")
    return word if problems else tree.plain()


def _parallel(given: object) -> str:
    """`parallel` for a configuration of DeepSpeed, of FSDP, or of accelerate, or for the name of its file."""
    text = json.dumps(given, default=str).lower()
    if re.search(r'zero_?3|stage_?3|stage": 3|full_shard', text):
        return "zero3"
    if "fsdp" in text and not re.search(r"grad_op|fsdp_reshard_after_forward\": false", text):
        return "zero3"
    return "zero2" if re.search(r'zero_?2|stage_?2|stage": 2|grad_op|fsdp', text) else "ddp" if "multi_gpu" in text else "auto"


def _of_script(text: str, file: Path, kind: str | None) -> tuple[str, dict[str, Any], list[Line]]:
    """The class, the arguments that could be read, and those that could not."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no Python that can be read: {error}") from error
    names = _constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [(name, call) for call in calls if (name := _called(call)) in KINDS and (kind is None or name == kind)]
    if not made:
        made_none = f"{file} makes no {kind or ', '.join(KINDS)}"
        if any(_called(call) in ("TrlParser", "HfArgumentParser") for call in calls):
            made_none += (
                " of its own, but reads it from its command line: import the shell script (.sh) that starts it, or the file behind "
                "its --config"
            )
        raise ConfigError(made_none)
    if len(made) > 1:
        places = ", ".join(f"{name} in line {call.lineno}" for name, call in made)
        raise ConfigError(f"{file} makes {len(made)} configurations ({places}): keep one of them in a file of its own")
    found, call = made[0]
    given: dict[str, Any] = {}
    unread: list[Line] = []

    def read(node: ast.Call, renamed: Mapping[str, str]) -> None:
        for keyword in node.keywords:
            if renamed and keyword.arg not in renamed:
                continue
            name = renamed[str(keyword.arg)] if renamed else keyword.arg or "**"
            known, value = _functions(keyword.value, names) if name == "reward_funcs" else _value(keyword.value, names)
            if known and keyword.arg is not None:
                given[name] = value
            else:
                unread.append(Line(name, ast.unparse(keyword.value), None, "an expression: say it in the recipe"))

    read(call, {})
    trainer = found.replace("Config", "Trainer")
    for other in calls:
        name = _called(other)
        if name == trainer:
            said = [*zip(("model", "reward_funcs"), other.args, strict=False)] if found in ROLLED else [("model", *other.args[:1])]
            other.keywords += [ast.keyword(arg=pair[0], value=pair[1]) for pair in said if len(pair) == 2]
            model = next((keyword.value for keyword in other.keywords if keyword.arg == "model"), None)
            loaded, left = _loaded(model, names)
            given |= {name: value for name, value in loaded.items() if name not in given}
            unread += left
            read(other, {"reward_funcs": "reward_funcs"} | ({} if loaded else {"model": "model_name_or_path"}))
            for keyword in other.keywords:
                if keyword.arg in ("train_dataset", "eval_dataset"):
                    rows = _dataset(keyword.value, names, keyword.arg)
                    given |= rows
                    unread += [] if rows else [_made_by_the_script(keyword.arg, keyword.value)]
        elif name == "LoraConfig":
            given.setdefault("use_peft", True)
            read(other, {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
                         "target_modules": "lora_target_modules"})  # fmt: skip
    if isinstance(functions := given.get("reward_funcs"), list) and _trains_when_imported(tree):
        given["reward_funcs"] = [_Unguarded(name) if isinstance(name, _Function) else name for name in functions]
    return found, given, unread


ROLLED = ("GRPOConfig", "RLOOConfig")
"""Classes of runs that sample their own completions."""


def _loaded(node: ast.expr | None, names: Mapping[str, ast.expr]) -> tuple[dict[str, Any], list[Line]]:
    """What `AutoModelForCausalLM.from_pretrained(PATH, ...)` behind a trainer's `model` says, and what of it is lost."""
    while isinstance(node, ast.Name) and node.id in names:
        node, names = names[node.id], {name: value for name, value in names.items() if name != node.id}
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda", "eval", "train"):
        node = node.func.value
    if not (isinstance(node, ast.Call) and _called(node) == "from_pretrained" and node.args):
        return {}, []
    known, path = _value(node.args[0], names)
    if not known:
        return {}, []
    given, left = {"model_name_or_path": path}, []
    for keyword in node.keywords:
        known, value = _value(keyword.value, names)
        if keyword.arg == "quantization_config":
            left.append(Line(keyword.arg, ast.unparse(keyword.value), *_fate("load_in_4bit")))
        elif known and keyword.arg in ("dtype", "torch_dtype", "attn_implementation", "trust_remote_code"):
            given[keyword.arg] = value
    return given, left


def _fate(name: str) -> tuple[Fate, str]:
    return TABLE[name].fate, TABLE[name].says


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that are assigned once in the whole script, and what to."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


DEPTH = 20
"""Names of names, and expressions in expressions, that are followed."""


def _value(node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> tuple[bool, Any]:
    """Whether a value is known without running anything, and the value."""
    if depth > DEPTH:
        return False, None
    match node:
        case ast.Constant():
            return True, node.value
        case ast.Name(id=name) if name in names:
            return _value(names[name], names, depth + 1)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            found = [_value(one, names, depth + 1) for one in elements]
            return all(known for known, _ in found), [value for _, value in found]
        case ast.Dict(keys=keys, values=values):
            pairs = [(_value(k, names, depth + 1), _value(v, names, depth + 1)) for k, v in zip(keys, values, strict=True) if k]
            return len(pairs) == len(keys) and all(k[0] and v[0] for k, v in pairs), {str(k[1]): v[1] for k, v in pairs}
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            known, value = _value(inner, names, depth + 1)
            return known and isinstance(value, int | float), -value if isinstance(value, int | float) else None
        case ast.BinOp(left=left, op=operator, right=right):
            (a_known, a), (b_known, b) = _value(left, names, depth + 1), _value(right, names, depth + 1)
            if a_known and b_known and isinstance(a, int | float) and isinstance(b, int | float):
                return _computed(a, operator, b)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return True, name
    return False, None


class _Function(str):
    """The name of a function of a script."""


class _RewardModel(str):
    """The folder or hub name of a reward model in the place of a function."""


class _Unguarded(_Function):
    """Of a script that trains when it is imported."""


def _trains_when_imported(tree: ast.Module) -> bool:
    """True if a trainer is made or run outside of functions and of `if __name__ == "__main__"`."""
    below = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    run = [node for node in tree.body if not isinstance(node, below) and not (isinstance(node, ast.If) and _is_guard(node))]
    calls = [node for part in run for node in ast.walk(part) if isinstance(node, ast.Call)]
    return any(_called(call) == "train" or _called(call).endswith("Trainer") for call in calls)


def _is_guard(node: ast.If) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test))


def _functions(node: ast.expr, names: Mapping[str, ast.expr]) -> tuple[bool, Any]:
    """Reward functions: names of the script's own, or of what it imports."""
    if isinstance(node, ast.Name) and node.id in names:
        return _functions(names[node.id], {name: value for name, value in names.items() if name != node.id})
    elements = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    found: list[str] = []
    for one in elements:
        if isinstance(one, ast.Name) and isinstance(known := names.get(one.id), ast.Constant):
            one = known
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            found.append(_RewardModel(one.value))
        elif isinstance(one, ast.Name):
            found.append(_Function(one.id))
        else:
            return False, None
    return True, found


def _computed(a: float, operator: ast.operator, b: float) -> tuple[bool, Any]:
    match operator:
        case ast.Add():
            return True, a + b
        case ast.Sub():
            return True, a - b
        case ast.Mult():
            return True, a * b
        case ast.Div() if b:
            return True, a / b
        case ast.FloorDiv() if b:
            return True, a // b
    return False, None


FILES = ("json", "parquet", "csv", "text", "arrow")
"""What `load_dataset` is told in place of a data set's name where the rows are files."""


def _made_by_the_script(which: str, node: ast.expr) -> Line:
    key = "data.path" if which == "train_dataset" else "data.eval_path"
    says = f"rows that the script makes: write them with dataset.to_json(...), and give the file as {key}"
    return Line(which, ast.unparse(node), None, says)


def _dataset(node: ast.expr, names: Mapping[str, ast.expr], which: str) -> dict[str, Any]:
    """What `load_dataset("name", split="train")` behind a trainer's argument says."""
    subscript = None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        node, subscript = node.value, str(node.slice.value)
    while isinstance(node, ast.Name) and node.id in names:
        node, names = names[node.id], {name: value for name, value in names.items() if name != node.id}
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            node, subscript = node.value, str(node.slice.value)
    if not (
        isinstance(node, ast.Call) and _called(node) == "load_dataset" and node.args and isinstance(node.args[0], ast.Constant)
    ):
        return {}
    split = next((k.value.value for k in node.keywords if k.arg == "split" and isinstance(k.value, ast.Constant)), subscript)
    name = node.args[0].value
    if name in FILES:  # a format, and not a data set: the file is what `split` names in `data_files`
        given = next((k.value for k in node.keywords if k.arg == "data_files"), node)
        known, files = _value(given, names)
        name = files.get(split or "train") if isinstance(files, dict) else files
        if not known or not isinstance(name, str):
            return {}
        split = None
    if which == "train_dataset":
        part = node.args[1] if len(node.args) > 1 else next((k.value for k in node.keywords if k.arg == "name"), None)
        config = {"dataset_config": part.value} if isinstance(part, ast.Constant) and part.value else {}
        return {"dataset_name": name} | config | ({"dataset_train_split": split} if split else {})
    return {"eval_dataset_name": name} | ({"dataset_test_split": split} if split else {})


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
        source = ", ".join(said) or f"TRL's default {names[0]}"
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
            ):
                part()
        elif self.kind == "DPOConfig":
            self._pairs()
        elif self.kind == "RewardConfig" and self.given.get("center_rewards_coefficient"):
            self.put("reward_model.centering", float(self.given["center_rewards_coefficient"]), "center_rewards_coefficient")
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

    def _line(self, name: str, value: Any) -> Line:
        if name in self.notes:
            return Line(name, value, *self.notes[name])
        found = TABLE.get(name)
        if found is None:
            near = closest(name, list(TABLE))
            return Line(name, value, None, f"no argument of TRL 1.16{near}")
        if found.fate == "missing" and value in (None, False, 0, 0.0, "no", ""):
            return Line(name, value, "unneeded", "it is off")
        if found.key is None or found.fate == "missing":
            return Line(name, value, found.fate, found.says)
        keys = self.written.get(name, [])
        written = ", ".join(f"{key}: {_short(_flow(self.keys[key]))}" for key in dict.fromkeys(keys))
        return Line(name, value, found.fate, written or f"{found.key}: nothing to write, it is so here")

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
        found = next((name for name in ("deepspeed", "fsdp", "config_file") if self.given.get(name)), None)
        if found is None:
            return
        given = self.given[found]
        if isinstance(given, str):
            for file in (Path(self.source).parent / given, Path(given)):
                if file.is_file():
                    given = _of_file(file.read_text(encoding="utf-8"), file)
                    break
        self.put("parallel", _parallel({found: given}), found)

    def _data(self) -> None:
        name = self.given.get("dataset_name")
        if isinstance(name, str):
            self.put("data.path", name, "dataset_name")
            split = self.given.get("dataset_train_split")
            if isinstance(split, str) and split != "train":
                self.put("data.split", split, "dataset_train_split")
        else:
            self.needed.append("data.path: a file or hub name")
        held = self.given.get("eval_dataset_name") or (name if self._evaluates() else None)
        if isinstance(held, str):
            self.put("data.eval_path", held, "dataset_name", "eval_dataset_name", says="for evaluation")
            if isinstance(split := self.given.get("dataset_test_split"), str) and split != "test":
                self.put("data.eval_split", split, "dataset_test_split")
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
        if self.given.get("max_tool_calling_iterations"):
            turns = int(self.given["max_tool_calling_iterations"]) + 1
            self.note("max_tool_calling_iterations", "changed", f"environment.max_turns: {turns}, with an environment")

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
        for name, key in (("entropy_coef", "group.entropy_bonus"), ("off_policy_mask_threshold", "group.off_policy_delta")):
            if self.given.get(name):
                self.put(key, float(self.given[name]), name)
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
            functions = [_RewardModel(judge), *(functions if isinstance(functions, list) else [])]
        weights = self.given.get("reward_weights")
        if not isinstance(functions, list) or not functions:
            self.needed.append("rewards: a list of {function: module:function or file.py:function, weight: ...}")
            self.note("reward_weights", "changed", "rewards.N.weight, one in each entry of rewards")
            return
        known, own, unguarded = [], [], []
        for place, name in enumerate(functions):
            arguments: dict[str, Any] = {}
            if isinstance(name, _RewardModel):
                function, arguments = "model", {"args": {"path": str(name)}}
            elif name in OVERLONG:
                length, cache = self.given.get("max_completion_len", 1280), self.given.get("soft_punish_cache", 256)
                function, arguments = "soft_overlong", {"args": {"max_tokens": int(length), "cache": int(cache)}}
            elif name in REWARD_NAMES or name in REWARDS:
                function = REWARD_NAMES.get(name, name)
            elif isinstance(name, str) and ":" in name:
                function = str(name)
            elif isinstance(name, _Unguarded):
                function = f"rewards.py:{name}"
                unguarded.append(str(name))
            elif isinstance(name, _Function) or not isinstance(name, str):
                function = f"{Path(self.source).name}:{name}"
            elif "." in name:  # TRL's dotted path
                function = ":".join(name.rsplit(".", 1))
            else:
                function = f"rewards.py:{name}"
                own.append(str(name))
            weight = weights[place] if isinstance(weights, list) and place < len(weights) else None
            known.append({"function": function} | arguments | ({} if weight is None else {"weight": float(weight)}))
        self.put("rewards", known, "reward_funcs", "reward_weights", "reward_model_name_or_path")
        if unguarded:
            script = Path(self.source).name
            self.needed.append(f"rewards: move {', '.join(unguarded)} into rewards.py: {script} would train when it is imported")
        if own:
            self.needed.append(f"rewards: where {', '.join(own)} {'are' if len(own) > 1 else 'is'} (rewards.py is a guess)")

    def _pairs(self) -> None:
        self.put("pairs.beta", float(self.get("beta")), "beta")
        self.note("beta", "same", "pairs.beta")
        loss = self.get("loss_type")
        loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
        if loss in ("sigmoid", "ipo"):
            self.put("pairs.loss", loss, "loss_type")
            self.note("loss_type", "same", "pairs.loss")
        else:
            self.put("pairs.loss", "sigmoid", "loss_type", says=f"{_short(loss)} is not there")
            self.note("loss_type", "missing", f"{_short(loss)}: pairs.loss is sigmoid or ipo; sigmoid is written")
        if self.given.get("sync_ref_model"):
            self.note("sync_ref_model", "missing", "the reference of pairs does not move")


# ---------------------------------------------------------------- writing


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


def _flow(value: Any) -> str:
    """A value in one line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z][\w./-]*(:[A-Za-z]\w*)?", value) and dump({"a": value}) == f"a: {value}\n"
        return value if plain else json.dumps(value, ensure_ascii=False)
    return dump({"a": value}).removeprefix("a: ").strip()
