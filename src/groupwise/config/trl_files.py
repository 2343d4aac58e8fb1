"""Files of TRL users: the class of the configuration and its arguments, read without running anything.

YAML, JSON, a Python script that makes a configuration, or a shell script that starts TRL.  A script is read as text: of its keyword
arguments those that are written out are known, or that are names of such values.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.config.strict_yaml import parse_value
from groupwise.config.trl import CALLS, TABLE, Argument
from groupwise.config.trl_convert import KINDS, Fate, Line, Named, RewardModel, flow, mapping_of, parallel_of
from groupwise.errors import ConfigError

TELLING = {
    "RLOOConfig": ("normalize_advantages", "reward_clip_range"),
    "GRPOConfig": ("num_generations", "max_completion_length", "reward_funcs", "reward_weights", "num_iterations", "scale_rewards"),
    "SFTConfig": ("packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field", "max_seq_length", "use_liger"),
    "RewardConfig": ("center_rewards_coefficient",),
    "DPOConfig": ("precompute_ref_log_probs", "label_smoothing", "f_divergence_type", "ld_alpha", "beta"),
}
"""Arguments by which a configuration without a class is known; the first class of which one is there is meant."""
SHELL_SCRIPTS = (".sh", ".bash")


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


def _kind_of(given: Mapping[str, Any], file: Path) -> str:
    if "distributed_type" in given or "zero_optimization" in given:
        processes, parallel = given.get("num_processes"), parallel_of(given)
        start = f" and start it with `groupwise train RECIPE --nproc {processes}`" if isinstance(processes, int) else ""
        raise ConfigError(
            f"{file} says how the weights are sharded, not what is trained: import the arguments of the trainer, "
            f"write `parallel: {flow(parallel)}` into the recipe{start}"
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
    document, problems = parse_value(word, "")
    return word if problems else document.values


def _of_script(text: str, file: Path, kind: str | None) -> tuple[str, dict[str, Any], list[Line]]:
    """The class, the arguments that could be read, and lines for what else the script says."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no Python that can be read: {error}") from error
    script = _Script(file, tree)
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
    trainer = found.replace("Config", "Trainer")
    given: dict[str, Any] = {}
    lines: list[Line] = []
    for keyword in call.keywords:
        known, value = _value(keyword.value, script.names)
        if keyword.arg is None and known and isinstance(value, dict):  # **{...}
            given |= value
        elif keyword.arg is None:
            lines.append(Line(OPEN, ast.unparse(keyword.value), None, "arguments that are not known: say them in the recipe"))
        else:
            script.read(keyword.arg, keyword.value, given, lines)
    for other in calls:
        name = _called(other)
        if name == trainer:
            _of_trainer(found, other, script, any(_called(one) in ADAPTERS for one in calls), given, lines)
        elif name in ADAPTERS:
            given.setdefault("use_peft", True)
            for keyword in other.keywords:
                if keyword.arg in LORA:
                    script.read(LORA[keyword.arg], keyword.value, given, lines)
        elif isinstance(other.func, ast.Attribute) and script.is_trainer(other.func.value, trainer):
            said = ", ".join(map(ast.unparse, (*other.args, *(keyword.value for keyword in other.keywords))))
            if name != "train" or said:
                lines.append(Line(f"{name}()", said, *(_fate(CALLS[name]) if name in CALLS else (None, "not known"))))
    return found, given, lines


OPEN = "**"
"""The name of a line for arguments that are not even known by name."""
ADAPTERS = ("LoraConfig", "get_peft_model")
"""What describes an adapter: peft's configuration, or unsloth's function with the same keywords."""
LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules"}
"""Arguments of peft's LoraConfig, as TRL's ModelConfig calls them."""
OBJECTS = ("reward_funcs", "tools", "environment_factory")
"""Arguments that hold functions and classes."""


def _of_trainer(kind: str, call: ast.Call, script: _Script, adapted: bool, given: dict[str, Any], lines: list[Line]) -> None:
    """Adds what the call that makes the trainer says.   adapted: the script makes a LoraConfig."""
    order = {"SFTConfig": SFT_ORDER, "RewardConfig": SFT_ORDER, "DPOConfig": DPO_ORDER}.get(kind, GRPO_ORDER)
    said = dict(zip(order, call.args, strict=False)) | {keyword.arg or OPEN: keyword.value for keyword in call.keywords}
    loaded, left = _loaded(said.get("model"), script.names)
    given |= {name: value for name, value in loaded.items() if name not in given}
    lines += left
    for name, node in said.items():
        if name == "args" or (isinstance(node, ast.Constant) and node.value is None):
            continue
        if name == "model":
            if not loaded:
                script.read("model_name_or_path", node, given, lines)
        elif name in OBJECTS:
            script.read(name, node, given, lines)
        elif name in ("train_dataset", "eval_dataset"):
            rows = _dataset(node, script.names, name)
            given |= rows
            lines += [] if rows else [_made_by_the_script(name, node)]
        elif name != "peft_config" or not adapted:  # a LoraConfig is read where it is made
            lines.append(Line(name, ast.unparse(node), *(_fate(TABLE[name]) if name in TABLE else (None, "no argument of TRL's"))))


GRPO_ORDER = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
SFT_ORDER = ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
DPO_ORDER = ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class")


class _Script:
    """The names of a script."""

    def __init__(self, file: Path, tree: ast.Module) -> None:
        self.file, self.names, self._trains = file, _constants(tree), _trains_when_imported(tree)
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        self._own = {node.name for node in tree.body if isinstance(node, kinds)}
        self._inner = {node.name for node in ast.walk(tree) if isinstance(node, kinds)} - self._own
        self._imported: dict[str, tuple[str, str]] = {}
        """Local name -> module and the name in it; the name is empty for a module."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for one in node.names:
                    module = one.name if one.asname else one.name.partition(".")[0]
                    self._imported[one.asname or module] = (module, "")
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                self._imported |= {one.asname or one.name: (module, one.name) for one in node.names}

    def read(self, name: str, node: ast.expr, given: dict[str, Any], lines: list[Line]) -> None:
        """Adds an argument to what is given, or to the lines if its value is not known."""
        known, value = self._objects(node) if name in OBJECTS else _value(node, self.names)
        if known:
            given[name] = value
        else:
            lines.append(Line(name, ast.unparse(node), None, "an expression: say it in the recipe"))

    def is_trainer(self, node: ast.expr, trainer: str) -> bool:
        """True for the call that makes the trainer, and for the variable that holds it."""
        node = self.names.get(node.id, node) if isinstance(node, ast.Name) else node
        return isinstance(node, ast.Call) and _called(node) == trainer

    def _objects(self, node: ast.expr) -> tuple[bool, Any]:
        """Functions and classes, and the folders of reward models: whether all are known, and a list of them."""
        while isinstance(node, ast.Name) and node.id in self.names and node.id not in self._own:
            following = self.names[node.id]
            if following is node or (isinstance(following, ast.Name) and following.id == node.id):
                break
            node = following
        found: list[Named | RewardModel] = []
        for one in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            known, value = _value(one, self.names)
            thing = RewardModel(value) if known and isinstance(value, str) else self._named(one)
            if thing is None:
                return False, None
            found.append(thing)
        return True, found

    def _named(self, node: ast.expr) -> Named | None:
        *inside, name = ast.unparse(node).split(".") if isinstance(node, ast.Name | ast.Attribute) else [""]
        root = inside[0] if inside else name
        if not inside and name in self._own:
            moved = f"{self.file.name} would train when it is imported" if self._trains else ""
            return Named(name, shown_path(self.file), moved)
        if not inside and name in self._inner:
            return Named(name, shown_path(self.file), f"in {self.file.name} it stands inside of a function or a class")
        if root not in self._imported:
            return None
        module, attribute = self._imported[root]
        if inside:
            return Named(name, self._place(".".join(filter(None, (module, attribute, *inside[1:])))))
        return Named(attribute, self._place(module)) if attribute else None

    def _place(self, module: str) -> str:
        """A module, or its file if that lies beside the script."""
        name = module.lstrip(".")
        beside = self.file.parent.joinpath(*[".."] * (len(module) - len(name) - 1), *name.split(".")).with_suffix(".py")
        return shown_path(beside) if name and beside.is_file() else name


def shown_path(file: Path) -> str:
    """A path from the working directory, if the file lies there."""
    path, here = file.resolve(), Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file.name


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
            left.append(Line(keyword.arg, ast.unparse(keyword.value), *_fate(TABLE["load_in_4bit"])))
        elif known and keyword.arg in ("dtype", "torch_dtype", "attn_implementation", "trust_remote_code"):
            given[keyword.arg] = value
    return given, left


def _fate(row: Argument) -> tuple[Fate, str]:
    return row.fate, row.says


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
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=pairs) if all(pair.arg for pair in pairs):
            found = {str(pair.arg): _value(pair.value, names, depth + 1) for pair in pairs}
            return all(known for known, _ in found.values()), {name: value for name, (_, value) in found.items()}
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


def _trains_when_imported(tree: ast.Module) -> bool:
    """True if a trainer is made or run outside of functions and of `if __name__ == "__main__"`."""
    below = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    run = [node for node in tree.body if not isinstance(node, below) and not (isinstance(node, ast.If) and _is_guard(node))]
    calls = [node for part in run for node in ast.walk(part) if isinstance(node, ast.Call)]
    return any(_called(call) == "train" or _called(call).endswith("Trainer") for call in calls)


def _is_guard(node: ast.If) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test))


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
    part = node.args[1] if len(node.args) > 1 else next((k.value for k in node.keywords if k.arg == "name"), None)
    if node.args[0].value not in FILES and isinstance(part, ast.Constant) and part.value:
        name = f"{name}:{part.value}"
    if which == "train_dataset":
        return {"dataset_name": name} | ({"dataset_train_split": split} if split else {})
    return {"eval_dataset_name": name} | ({"dataset_test_split": split} if split else {})
