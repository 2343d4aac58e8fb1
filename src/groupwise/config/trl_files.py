"""Files of TRL users: the class of the configuration and its arguments, read without running anything.

YAML, JSON, a Python script that makes a configuration, or a shell script that starts TRL.  A script is read as text: of its keyword
arguments those that are written out are known, or that are names of such values.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config.strict_yaml import parse, parse_value
from groupwise.config.trl import TABLE, Fate
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
SHELL_SCRIPTS = (".sh", ".bash")


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


def read_arguments(text: str, file: Path, kind: str | None) -> tuple[str, dict[str, Any], list[Line]]:
    """TRL's class, the arguments that could be read, by name, and those that could not.

    text: of the file, whose ending says what it is.   kind: the class; None: the one that the file makes or names, or whose
    arguments it holds.   Raises ConfigError for a file that holds no configuration, or several.
    """
    if file.suffix == ".py":
        return _of_script(text, file, kind)
    if file.suffix in SHELL_SCRIPTS:
        return _of_command(text, file, kind)
    given = mapping_of(text, file)
    return kind or _kind_of(given, file), given, []


def short(value: Any) -> str:
    """A value in one line of 60 characters at most."""
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def mapping_of(text: str, file: Path) -> dict[str, Any]:
    """The arguments of a YAML or JSON file by name.  Raises ConfigError."""
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
            f"{file} says how the weights are sharded, not what is trained: import the arguments of the trainer, "
            f"write `parallel: {parallel_of(given)}` into the recipe{start}"
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
        given = mapping_of(known.read_text(encoding="utf-8"), known) | given
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


def parallel_of(given: object) -> str:
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
        given["reward_funcs"] = [Unguarded(name) if isinstance(name, Function) else name for name in functions]
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


class Function(str):
    """The name of a function of a script."""


class RewardModel(str):
    """The folder or hub name of a reward model in the place of a function."""


class Unguarded(Function):
    """The name of a function of a script that trains when it is imported."""


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
            found.append(RewardModel(one.value))
        elif isinstance(one, ast.Name):
            found.append(Function(one.id))
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
