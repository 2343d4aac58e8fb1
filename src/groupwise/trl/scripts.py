"""A Python script that makes one of TRL's configurations, read as text: nothing of it runs.

The arguments of the configuration and of the trainer are known if they are written out, or are
names of such values; for every other one a line holds what becomes of it.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.trl.configuration import KINDS, OPEN, Configuration, Line
from groupwise.trl.model_keys import ADAPTER, ADAPTERS, LORA, NO_MATTER, adapter_arguments
from groupwise.trl.rollout_keys import OVERLONG, RewardEntry, RewardModel, built_in, soft_overlong
from groupwise.trl.table import CALLS, TABLE

OBJECTS = {"reward_funcs": "rewards", "tools": "tools", "environment_factory": "environment"}
"""Arguments that hold functions and classes; the file in which those go that cannot stay in the
script.
"""
_GROUPS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
_ROWS = ("args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
ORDER = {
    "GRPOConfig": _GROUPS,
    "RLOOConfig": _GROUPS,
    "SFTConfig": ("model", *_ROWS),
    "RewardConfig": ("model", *_ROWS),
    "DPOConfig": ("model", "ref_model", *_ROWS),
}
"""Arguments of the trainers in the order of their places."""
SPLITS = {"train_dataset": "dataset_train_split", "eval_dataset": "dataset_test_split"}
"""The argument of TRL's command for the split of a data set."""
HALVES = {"train_dataset": "train", "eval_dataset": "test"}
"""The part of `train_test_split` for each."""
LOADING = (
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "trust_remote_code",
    "quantization_config",
)
"""What matters of a model's `from_pretrained`."""
FILES = ("json", "parquet", "csv", "text", "arrow")
"""What `load_dataset` takes in place of a data set's name where the rows are files."""
MOVES = ("to", "cuda", "eval", "train")
"""Methods that give a loaded model back."""
DEPTH = 20
"""Names of names, and expressions in expressions, that are followed."""
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
HIDDEN = "arguments that are not known: write them into the recipe"
"""What becomes of arguments behind two stars."""


class Unknown(Exception):
    """An expression would have to be run to know its value."""


def read_script(file: Path, text: str, kind: str | None, devices: int) -> Configuration:
    """TRL's class and its arguments.

    kind: the class, where the script makes several.
    Raises ConfigError.
    """
    try:
        script = Script(ast.parse(text), file)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no Python that can be read: {error}") from error
    name = script.read_all(kind)
    return Configuration(
        kind=name,
        arguments=script.known,
        devices=devices,
        file=file,
        unread=script.unread_lines,
        needed=script.needed,
    )


def called(call: ast.AST) -> str:
    """The last name of what is called; empty for what is no call."""
    if not isinstance(call, ast.Call):
        return ""
    if isinstance(call.func, ast.Name):
        return call.func.id
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return ""


class Script:
    """The names and calls of a script, and the arguments that are read of it."""

    def __init__(self, tree: ast.Module, file: Path) -> None:
        self.file = file
        nodes = list(ast.walk(tree))
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.constants = constants_of(nodes)
        """Names that are assigned once in the whole script, and what to."""
        self.definitions = {node.name for node in tree.body if isinstance(node, DEFINITIONS)}
        every = {node.name for node in nodes if isinstance(node, DEFINITIONS)}
        self.nested = every - self.definitions
        self.imported = imports_of(nodes)
        """Local name -> module and the name in it; the name is empty for a module."""
        self.trains = trains_when_imported(tree)
        self.known: dict[str, Any] = {}
        self.unread_lines: list[Line] = []
        self.needed: list[str] = []

    def read_all(self, kind: str | None) -> str:
        """Read the arguments; TRL's class."""
        name, call = self.configuration(kind)
        if call.args:
            self.read("output_dir", call.args[0])
        for node in call.args[1:]:
            self.unread("an argument without a name", node, "write it into the recipe")
        for argument, node in self.keywords(call):
            self.read(argument, node)
        trainer = name.replace("Config", "Trainer")
        for other in self.calls:
            if called(other) == trainer:
                self.read_trainer(name, other)
            elif called(other) in ADAPTERS:
                self.read_adapter(other)
            elif self.is_method_of(trainer, other):
                self.read_method(other)
        return name

    def configuration(self, kind: str | None) -> tuple[str, ast.Call]:
        """The class and the call that makes the configuration.  Raises ConfigError."""
        wanted = KINDS if kind is None else (kind,)
        made = [call for call in self.calls if called(call) in wanted]
        if not made:
            remedy = ""
            if any(called(call) in ("TrlParser", "HfArgumentParser") for call in self.calls):
                remedy = (
                    " itself, and reads it from its command line: import the YAML file behind its"
                    " --config, or write the arguments into one"
                )
            raise ConfigError(f"{self.file} makes no {kind or ', '.join(KINDS)}{remedy}")
        if len(made) > 1:
            places = ", ".join(f"{called(call)} in line {call.lineno}" for call in made)
            raise ConfigError(
                f"{self.file} makes {len(made)} configurations ({places}): keep one of them in a"
                " file of its own"
            )
        return called(made[0]), made[0]

    def keywords(self, call: ast.Call, depth: int = 0) -> Iterator[tuple[str, ast.expr]]:
        """The arguments of a call by name, those of a `**` that is written out among them."""
        for keyword in call.keywords:
            inner = self.followed(keyword.value)
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
            elif isinstance(inner, ast.Call) and _is_plain_dict(inner) and depth < DEPTH:
                yield from self.keywords(inner, depth + 1)
            elif isinstance(inner, ast.Dict) and _has_plain_keys(inner):
                for key, value in zip(inner.keys, inner.values, strict=True):
                    assert isinstance(key, ast.Constant)
                    yield str(key.value), value
            else:
                yield OPEN, keyword.value

    def read(self, name: str, node: ast.expr) -> None:
        """Add an argument to those that are known; a line where its value is not known."""
        if name == OPEN:
            self.unread(name, node, HIDDEN)
            return
        row = TABLE.get(name)
        try:
            if name in OBJECTS:
                self.known[name] = self.objects(OBJECTS[name], node)
            else:
                self.known[name] = self.value(node)
        except Unknown:
            if row is not None and row.key is None:
                self.unread_lines.append(Line(name, ast.unparse(node), row.fate, row.detail))
            else:
                self.unread(name, node, "an expression: write its value into the recipe")

    def unread(self, name: str, node: ast.expr, reason: str) -> None:
        """Add a line for an argument that is not known."""
        self.unread_lines.append(Line(name, ast.unparse(node), None, reason))

    def is_method_of(self, trainer: str, call: ast.Call) -> bool:
        """True for `trainer.train()` and its like."""
        return isinstance(call.func, ast.Attribute) and (
            called(self.followed(call.func.value)) == trainer
        )

    def read_method(self, call: ast.Call) -> None:
        """Add a line for what a script calls of the trainer."""
        nodes = (*call.args, *[keyword.value for keyword in call.keywords])
        values = ", ".join(ast.unparse(node) for node in nodes)
        name = called(call)
        if name == "train" and not values:
            return
        row = CALLS.get(name)
        if row is None:
            self.unread_lines.append(Line(f"{name}()", values, None, "not known"))
        else:
            self.unread_lines.append(Line(f"{name}()", values, row.fate, row.detail))

    def read_adapter(self, call: ast.Call) -> None:
        """Add the arguments of a call that describes an adapter, and its defaults for the rest."""
        keywords = dict(self.keywords(call))
        peft = called(call) == "LoraConfig"
        self.known.setdefault("use_peft", True)
        if not peft and not keywords.keys() & LORA.keys():
            return  # peft's function of that name takes a LoraConfig
        values = {} if OPEN in keywords else dict(ADAPTERS[called(call)])
        for name, node in keywords.items():
            if name in NO_MATTER or (name not in LORA and (not peft or name == OPEN)):
                continue
            try:
                values[name] = self.value(node)
            except Unknown:
                values.pop(name, None)
                self.read(LORA.get(name, ADAPTER + name), node)
        self.known |= adapter_arguments(values)

    def read_trainer(self, kind: str, call: ast.Call) -> None:
        """Add the arguments of the call that makes the trainer."""
        arguments = dict(zip(ORDER[kind], call.args, strict=False)) | dict(self.keywords(call))
        adapted = any(called(other) in ADAPTERS for other in self.calls)  # read where it is made
        for name, node in arguments.items():
            empty = isinstance(node, ast.Constant) and node.value is None
            if name == "args" or empty or (name == "peft_config" and adapted):
                continue
            if name == OPEN:
                self.unread(f"{called(call)}({OPEN})", node, HIDDEN)
            elif name == "model":
                self.read_model(node)
            elif name in SPLITS:
                self.read_rows(name, node)
            elif name == "callbacks":
                self.read_callbacks(node)
            elif name == "ref_model" and self.same_model(node, arguments.get("model")):
                same = "the reference is the policy before its first step"
                self.unread_lines.append(Line(name, ast.unparse(node), "unneeded", same))
            else:
                self.read(name, node)

    def read_callbacks(self, node: ast.expr) -> None:
        """Add the patience of `EarlyStoppingCallback`; a line for other callbacks."""
        listed = self.followed(node)
        callbacks = listed.elts if isinstance(listed, ast.List | ast.Tuple) else [listed]
        for callback in callbacks:
            made = self.followed(callback)
            if not isinstance(made, ast.Call) or called(made) != "EarlyStoppingCallback":
                self.read("callbacks", callback)
                continue
            given = {word.arg: word.value for word in made.keywords}
            patience = made.args[0] if made.args else given.get("early_stopping_patience")
            if patience is None:
                self.known["early_stopping_patience"] = 1
            else:
                self.read("early_stopping_patience", patience)

    def read_model(self, node: ast.expr) -> None:
        """Add a model's path, also that of `AutoModelForCausalLM.from_pretrained(PATH, ...)`."""
        loaded = self.loaded(node)
        if not isinstance(loaded, ast.Call) or not _is_from_pretrained(loaded):
            self.read("model_name_or_path", node)
            return
        if "model_name_or_path" not in self.known:
            self.read("model_name_or_path", loaded.args[0])
        for keyword in loaded.keywords:
            if keyword.arg in LOADING and keyword.arg not in self.known:
                self.read(keyword.arg, keyword.value)

    def loaded(self, node: ast.expr) -> ast.expr:
        """A model without what moves it to a device."""
        loaded = self.followed(node)
        while isinstance(loaded, ast.Call) and called(loaded) in MOVES:
            if not isinstance(loaded.func, ast.Attribute):
                break
            loaded = self.followed(loaded.func.value)
        return loaded

    def same_model(self, node: ast.expr, other: ast.expr | None) -> bool:
        """True if two models are loaded from the same folder or hub name."""
        return other is not None and self.checkpoint(node) == self.checkpoint(other) is not None

    def checkpoint(self, node: ast.expr) -> str | None:
        """The folder or hub name of a model; None if it is not written out."""
        loaded = self.loaded(node)
        if isinstance(loaded, ast.Call) and _is_from_pretrained(loaded):
            loaded = loaded.args[0]
        try:
            name = self.value(loaded)
        except Unknown:
            return None
        return name if isinstance(name, str) else None

    # ------------------------------------------------------------ rows

    def read_rows(self, which: str, node: ast.expr) -> None:
        """Add the data set of `load_dataset("name", split="train")` behind a trainer's argument."""
        split, inner = None, self.followed(node)
        if isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant):
            split, inner = str(inner.slice.value), self.followed(inner.value)
        if isinstance(inner, ast.Call) and called(inner) == "train_test_split":
            self.read_half(which, inner, split)
            return
        try:
            path, split = self.data_set(inner, split)
        except Unknown:
            rows = "rows that the script makes: write them with dataset.to_json(...), and give the"
            self.unread(which, node, f"{rows} file as {TABLE[which].key}")
            return
        self.known[which] = path
        if split:
            self.known[SPLITS[which]] = split

    def read_half(self, which: str, call: ast.Call, split: str | None) -> None:
        """Add the data set of `rows.train_test_split(test_size=0.1)`; one half is taken."""
        share = None
        for keyword in call.keywords:
            if keyword.arg == "test_size" and isinstance(keyword.value, ast.Constant):
                share = keyword.value.value
        if not isinstance(share, float) or split != HALVES[which]:
            raised = "a part of rows that the script splits: write it with dataset.to_json(...)"
            self.unread(which, call, f"{raised}, and give the file as {TABLE[which].key}")
            return
        self.known["test_split_size"] = share
        if which == "train_dataset" and isinstance(call.func, ast.Attribute):
            self.read_rows(which, call.func.value)

    def data_set(self, node: ast.expr, split: str | None) -> tuple[str, str | None]:
        """The name or file of a data set, and its split.  Raises Unknown."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value, split
        if not (isinstance(node, ast.Call) and called(node) == "load_dataset" and node.args):
            raise Unknown
        path = self.value(node.args[0])
        keywords = {one.arg: one.value for one in node.keywords}
        if "split" in keywords:
            written = self.optional(keywords["split"])
            split = written if isinstance(written, str) else None
        if path in FILES:  # a format: the file is what `split` names in `data_files`
            path = self.value(keywords["data_files"]) if "data_files" in keywords else None
            if isinstance(path, dict):
                path = path.get(split or "train")
            split = None
        else:
            part = keywords.get("name")
            if len(node.args) > 1:
                part = node.args[1]
            name = None if part is None else self.optional(part)
            if isinstance(name, str) and name:
                path = f"{path}:{name}"
        if not isinstance(path, str):
            raise Unknown
        return path, split

    # ------------------------------------------------------------ values

    def followed(self, node: ast.expr) -> ast.expr:
        """What a name stands for."""
        for _ in range(DEPTH):
            if not isinstance(node, ast.Name) or node.id in self.definitions:
                break
            node = self.constants.get(node.id, node)
        return node

    def optional(self, node: ast.expr) -> Any:
        """The value of an expression, or None."""
        try:
            return self.value(node)
        except Unknown:
            return None

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """The value of an expression.  Raises Unknown."""
        if depth == DEPTH:
            raise Unknown
        node = self.followed(node)
        match node:
            case ast.Constant():
                return node.value
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [self.value(element, depth + 1) for element in elements]
            case ast.Dict(keys=keys, values=values):
                return self.mapping(keys, values, depth)
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                names = [ast.Constant(one.arg) if one.arg else None for one in keywords]
                return self.mapping(names, [one.value for one in keywords], depth)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.computed(operator.sub, ast.Constant(0), operand, depth)
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in OPERATORS:
                return self.computed(OPERATORS[type(kind)], left, right, depth)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return name
        raise Unknown

    def mapping(
        self, keys: Sequence[ast.expr | None], values: Sequence[ast.expr], depth: int
    ) -> dict[str, Any]:
        """The value of a mapping.  Raises Unknown."""
        result = {}
        for key, value in zip(keys, values, strict=True):
            if key is None:  # **
                raise Unknown
            result[str(self.value(key, depth + 1))] = self.value(value, depth + 1)
        return result

    def computed(self, operation: Any, left: ast.expr, right: ast.expr, depth: int) -> Any:
        """A sum, a product and so on of two numbers.  Raises Unknown."""
        numbers = [self.value(node, depth + 1) for node in (left, right)]
        if not all(isinstance(number, int | float) for number in numbers):
            raise Unknown
        try:
            return operation(*numbers)
        except ArithmeticError:
            raise Unknown from None

    # ------------------------------------------------------------ functions and classes

    def objects(self, file: str, node: ast.expr) -> list[Any]:
        """Functions and classes as a recipe names them, and the folders of reward models.  Raises
        Unknown if none is named.

        One without a name beside others keeps its place, which its weight may go with.
        """
        node = self.followed(node)
        elements = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        if any(isinstance(element, ast.Starred) for element in elements):
            raise Unknown
        elements = [self.followed(element) for element in elements]
        named = [self.named(file, element) for element in elements]
        if not any(named):
            raise Unknown
        for place, element in enumerate(elements):
            if named[place] is None:
                name = f"number_{place + 1}"
                self.need(file, f"write `{name} = {ast.unparse(element)}` into {file}.py")
                named[place] = f"{file}.py:{name}"
        return named

    def need(self, file: str, text: str) -> None:
        """Record what must be done before functions or classes can be named."""
        self.needed.append(f"{file}: {text}")

    def named(self, file: str, element: ast.expr) -> str | RewardEntry | None:
        """One function, class or reward model as a recipe names it; None for one without a name."""
        value = self.optional(element)
        if isinstance(value, str):
            return RewardModel(value)
        if file == "rewards" and called(element) in OVERLONG:
            return self.overlong(element)
        return self.object(file, element)

    def overlong(self, call: ast.expr) -> RewardEntry | None:
        """An entry of `rewards` for a call that makes TRL's punishment of long completions; None
        where its arguments are not written out.
        """
        assert isinstance(call, ast.Call)
        names = ("max_completion_len", "soft_punish_cache")
        nodes = dict(zip(names, call.args, strict=False)) | dict(self.keywords(call))
        arguments = {name: self.optional(node) for name, node in nodes.items()}
        if not all(isinstance(value, int) for value in arguments.values()):
            return None
        return soft_overlong(arguments)

    def object(self, file: str, node: ast.expr) -> str | None:
        """A function or a class as a recipe names it; None for what is no name, or one that nothing
        in the script has.
        """
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        *inside, name = ast.unparse(node).split(".")
        if not inside and name in self.definitions | self.nested:
            return self.defined(file, name)
        module, attribute = self.imported.get(inside[0] if inside else name, ("", ""))
        if not module or not (inside or attribute):
            return None
        if inside:
            parts = [module, attribute, *inside[1:]]
            module, attribute = ".".join(filter(None, parts)), name
        ours = built_in(module, attribute) if file == "rewards" else None
        return ours or f"{self.place(module)}:{attribute}"

    def defined(self, file: str, name: str) -> str:
        """A function or a class of the script: where it stands, or has to move to."""
        if name in self.definitions and not self.trains:
            return f"{shown_path(self.file)}:{name}"
        if name in self.definitions:
            reason = f"{self.file.name} would train when it is imported"
        else:
            reason = f"in {self.file.name} it stands inside of a function or a class"
        self.need(file, f"move {name} into {file}.py: {reason}")
        return f"{file}.py:{name}"

    def place(self, module: str) -> str:
        """A module, or its file if that lies beside the script."""
        name = module.lstrip(".")
        above = [".."] * (len(module) - len(name) - 1)
        beside = self.file.parent.joinpath(*above, *name.split(".")).with_suffix(".py")
        return shown_path(beside) if name and beside.is_file() else name


def _is_plain_dict(call: ast.Call) -> bool:
    return called(call) == "dict" and not call.args


def _is_from_pretrained(call: ast.Call) -> bool:
    return called(call) == "from_pretrained" and bool(call.args)


def _has_plain_keys(node: ast.Dict) -> bool:
    return all(isinstance(key, ast.Constant) for key in node.keys)


def constants_of(nodes: Sequence[ast.AST]) -> dict[str, ast.expr]:
    """Names that are assigned once in the whole script, and what to."""
    stored = Counter()
    assigned: dict[str, ast.expr] = {}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored[node.id] += 1
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned[target.id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            assigned[node.target.id] = node.value
    return {name: value for name, value in assigned.items() if stored[name] == 1}


def imports_of(nodes: Sequence[ast.AST]) -> dict[str, tuple[str, str]]:
    """Local name -> module and the name in it; the name is empty for a module."""
    imported: dict[str, tuple[str, str]] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                imported[alias.asname or top] = (alias.name if alias.asname else top, "")
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                imported[alias.asname or alias.name] = (module, alias.name)
    return imported


def shown_path(file: Path) -> str:
    """A path from the working directory, if the file lies there."""
    path, here = file.resolve(), Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file.name


def trains_when_imported(tree: ast.Module) -> bool:
    """True if a trainer is made or run outside of functions and of `if __name__ == "__main__"`."""
    for statement in tree.body:
        if isinstance(statement, DEFINITIONS) or _guards(statement):
            continue
        for node in ast.walk(statement):
            if called(node) == "train" or called(node).endswith("Trainer"):
                return True
    return False


def _guards(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.If):
        return False
    names = [node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)]
    return "__name__" in names
