"""A Python script that makes one of TRL's configurations, read as text: nothing of it runs.

Of the arguments of the configuration and of the trainer those are known that are written out, or
that are names of such values; of every other one a line says what becomes of it.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from groupwise.config.trl import CALLS, OVERLONG, TABLE, built_in, soft_overlong
from groupwise.config.trl_arguments import (
    ADAPTER,
    ADAPTERS,
    KINDS,
    LORA,
    NO_MATTER,
    OPEN,
    Configuration,
    Line,
    RewardEntry,
    RewardModel,
    adapter_arguments,
)
from groupwise.errors import ConfigError

OBJECTS = {"reward_funcs": "rewards", "tools": "tools", "environment_factory": "environment"}
"""Arguments that hold functions and classes; the file in which those go that cannot stay in the
script.
"""
ORDER = {
    "GRPOConfig": (
        "model",
        "reward_funcs",
        "args",
        "train_dataset",
        "eval_dataset",
        "processing_class",
    ),
    "SFTConfig": (
        "model",
        "args",
        "data_collator",
        "train_dataset",
        "eval_dataset",
        "processing_class",
    ),
    "DPOConfig": (
        "model",
        "ref_model",
        "args",
        "data_collator",
        "train_dataset",
        "eval_dataset",
        "processing_class",
    ),
}
"""Arguments of the trainers in the order of their places."""
ORDER |= {"RLOOConfig": ORDER["GRPOConfig"], "RewardConfig": ORDER["SFTConfig"]}
SPLITS = {"train_dataset": "dataset_train_split", "eval_dataset": "dataset_test_split"}
"""The argument of TRL's command that says which split of a data set is taken."""
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
UNKNOWN = object()
"""The value of an expression that would have to be run."""
DEPTH = 20
"""Names of names, and expressions in expressions, that are followed."""
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv}  # fmt: skip
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def read_script(file: Path, text: str, kind: str | None, devices: int) -> Configuration:
    """TRL's class and its arguments.   kind: the class, where the script makes several.   Raises
    ConfigError.
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
    function = call.func if isinstance(call, ast.Call) else None
    return (
        function.id
        if isinstance(function, ast.Name)
        else function.attr
        if isinstance(function, ast.Attribute)
        else ""
    )


class Script:
    """The names and calls of a script, and the arguments that are read of it."""

    def __init__(self, tree: ast.Module, file: Path) -> None:
        self.file, nodes = file, list(ast.walk(tree))
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        names = Counter(
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        self.constants = {
            target.id: node.value
            for node in nodes
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and names[target.id] == 1
        }
        """Names that are assigned once in the whole script, and what to."""
        self.definitions = {node.name for node in tree.body if isinstance(node, DEFINITIONS)}
        self.nested = {
            node.name for node in nodes if isinstance(node, DEFINITIONS)
        } - self.definitions
        self.imported: dict[str, tuple[str, str]] = {}
        """Local name -> module and the name in it; the name is empty for a module."""
        for node in nodes:
            if isinstance(node, ast.Import):
                modules = (
                    (one.asname, one.name if one.asname else one.name.partition(".")[0])
                    for one in node.names
                )
                self.imported |= {name or module: (module, "") for name, module in modules}
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                self.imported |= {one.asname or one.name: (module, one.name) for one in node.names}
        self.trains = trains_when_imported(tree)
        self.known: dict[str, Any] = {}
        self.unread_lines: list[Line] = []
        self.needed: list[str] = []

    def read_all(self, kind: str | None) -> str:
        """Read what the script says; TRL's class."""
        made = [
            (name, call)
            for call in self.calls
            if (name := called(call)) in KINDS and kind in (None, name)
        ]
        if not made:
            remedy = (
                " of its own, but reads it from its command line: import the shell script (.sh)"
                " that starts it, or the file "
            )
            parsed = any(called(call) in ("TrlParser", "HfArgumentParser") for call in self.calls)
            remedy = f"{remedy}behind its --config" if parsed else ""
            raise ConfigError(f"{self.file} makes no {kind or ', '.join(KINDS)}{remedy}")
        if len(made) > 1:
            places = ", ".join(f"{name} in line {call.lineno}" for name, call in made)
            raise ConfigError(
                f"{self.file} makes {len(made)} configurations ({places}): keep one of them in a"
                " file of its own"
            )
        name, call = made[0]
        for argument, node in [
            *(("output_dir", one) for one in call.args[:1]),
            *self.keywords(call),
        ]:
            self.read(argument, node)
        for node in call.args[1:]:
            self.unread("an argument without a name", node, "set it in the recipe")
        trainer = name.replace("Config", "Trainer")
        for other in self.calls:
            if called(other) == trainer:
                self.read_trainer(name, other)
            elif called(other) in ADAPTERS:
                self.read_adapter(other)
            elif (
                isinstance(other.func, ast.Attribute)
                and called(self.followed(other.func.value)) == trainer
            ):
                values, row = (
                    ", ".join(
                        map(ast.unparse, (*other.args, *(one.value for one in other.keywords)))
                    ),
                    CALLS.get(called(other)),
                )
                if called(other) != "train" or values:
                    self.unread_lines.append(
                        Line(
                            f"{called(other)}()",
                            values,
                            row and row.fate,
                            row.says if row else "not known",
                        )
                    )
        return name

    def keywords(self, call: ast.Call, depth: int = 0) -> Iterator[tuple[str, ast.expr]]:
        """The arguments of a call by name, those of a `**` that is written out among them."""
        for keyword in call.keywords:
            inner = self.followed(keyword.value)
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
            elif isinstance(inner, ast.Dict) and all(
                isinstance(key, ast.Constant) for key in inner.keys
            ):
                yield from (
                    (str(self.value(key)), value)
                    for key, value in zip(inner.keys, inner.values, strict=True)
                    if key
                )
            elif (
                isinstance(inner, ast.Call)
                and called(inner) == "dict"
                and not inner.args
                and depth < DEPTH
            ):
                yield from self.keywords(inner, depth + 1)
            else:
                yield OPEN, keyword.value

    def read(self, name: str, node: ast.expr) -> None:
        """Add an argument to those that are known; a line where its value is not known."""
        if name == OPEN:
            self.unread(name, node, "arguments that are not known: say them in the recipe")
            return
        value, row = (
            (self.objects(OBJECTS[name], node) if name in OBJECTS else self.value(node)),
            TABLE.get(name),
        )
        if value is not UNKNOWN:
            self.known[name] = value
        elif row is not None and row.convert is None:
            self.unread_lines.append(Line(name, ast.unparse(node), row.fate, row.says))
        else:
            self.unread(name, node, "an expression: set it in the recipe")

    def unread(self, name: str, node: ast.expr, says: str) -> None:
        """Add a line for an argument that is not known."""
        self.unread_lines.append(Line(name, ast.unparse(node), None, says))

    def read_adapter(self, call: ast.Call) -> None:
        """Add what a call that describes an adapter says, and its defaults for the rest."""
        keywords = dict(self.keywords(call))
        peft = called(call) == "LoraConfig"
        self.known.setdefault("use_peft", True)
        if not peft and not keywords.keys() & LORA.keys():
            return  # peft's function of that name takes a LoraConfig
        values = {} if OPEN in keywords else dict(ADAPTERS[called(call)])
        for name, node in keywords.items():
            if name in NO_MATTER or (name not in LORA and (not peft or name == OPEN)):
                continue
            values[name] = self.value(node)
            if values[name] is UNKNOWN:
                self.read(LORA.get(name, ADAPTER + name), node)
                del values[name]
        self.known |= adapter_arguments(values)

    def read_trainer(self, kind: str, call: ast.Call) -> None:
        """Add what the call that makes the trainer says."""
        arguments = dict(zip(ORDER[kind], call.args, strict=False)) | dict(self.keywords(call))
        for name, node in arguments.items():
            if name == "args" or (isinstance(node, ast.Constant) and node.value is None):
                continue
            if name == OPEN:
                self.unread(
                    f"{called(call)}({OPEN})",
                    node,
                    "arguments that are not known: say them in the recipe",
                )
            elif name == "model":
                self.read_model(node)
            elif name in SPLITS:
                self.read_rows(name, node)
            elif (
                name == "ref_model"
                and self.checkpoint(node)
                == self.checkpoint(arguments.get("model", node))
                is not None
            ):
                self.unread_lines.append(
                    Line(
                        name,
                        ast.unparse(node),
                        "unneeded",
                        "the reference is the policy before its first step",
                    )
                )
            elif name != "peft_config" or not any(
                called(one) in ADAPTERS for one in self.calls
            ):  # read where it is made
                self.read(name, node)

    def read_model(self, node: ast.expr) -> None:
        """Add a model's path, also that of `AutoModelForCausalLM.from_pretrained(PATH, ...)`."""
        loaded = self.loaded(node)
        if not (
            isinstance(loaded, ast.Call) and called(loaded) == "from_pretrained" and loaded.args
        ):
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
        while (
            isinstance(loaded, ast.Call)
            and isinstance(loaded.func, ast.Attribute)
            and called(loaded) in MOVES
        ):
            loaded = self.followed(loaded.func.value)
        return loaded

    def checkpoint(self, node: ast.expr) -> str | None:
        """The folder or hub name of a model; None if it is not written out."""
        loaded = self.loaded(node)
        if isinstance(loaded, ast.Call) and called(loaded) == "from_pretrained" and loaded.args:
            loaded = loaded.args[0]
        return name if isinstance(name := self.value(loaded), str) else None

    def read_rows(self, which: str, node: ast.expr) -> None:
        """Add what `load_dataset("name", split="train")` behind a trainer's argument says."""
        split, inner = None, self.followed(node)
        if isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant):
            split, inner = str(inner.slice.value), self.followed(inner.value)
        if (
            isinstance(inner, ast.Call)
            and called(inner) == "train_test_split"
            and isinstance(inner.func, ast.Attribute)
        ):
            share = {one.arg: self.value(one.value) for one in inner.keywords}.get("test_size")
            if (
                isinstance(share, float)
                and split == {"train_dataset": "train", "eval_dataset": "test"}[which]
            ):
                self.known["test_split_size"] = share
                if which == "train_dataset":
                    self.read_rows(which, inner.func.value)
                return
        path: Any = inner.value if isinstance(inner, ast.Constant) else UNKNOWN
        if isinstance(inner, ast.Call) and called(inner) == "load_dataset" and inner.args:
            keywords = {one.arg: self.value(one.value) for one in inner.keywords}
            path, split = self.value(inner.args[0]), keywords.get("split", split)
            split = split if isinstance(split, str) else None
            part = self.value(inner.args[1]) if len(inner.args) > 1 else keywords.get("name")
            if (
                path in FILES
            ):  # a format, and not a data set: the file is what `split` names in `data_files`
                files = keywords.get("data_files", UNKNOWN)
                path, split = (
                    (files.get(split or "train") if isinstance(files, dict) else files),
                    None,
                )
            elif isinstance(part, str) and part:
                path = f"{path}:{part}"
        if isinstance(path, str):
            self.known |= {which: path} | ({SPLITS[which]: split} if split else {})
        else:
            key = TABLE[which].key
            self.unread(
                which,
                node,
                "rows that the script makes: write them with dataset.to_json(...), and give the"
                f" file as {key}",
            )

    # ------------------------------------------------------------ values

    def followed(self, node: ast.expr) -> ast.expr:
        """What a name stands for."""
        seen = set()
        while (
            isinstance(node, ast.Name)
            and node.id in self.constants
            and node.id not in seen | self.definitions
        ):
            seen.add(node.id)
            node = self.constants[node.id]
        return node

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """The value of an expression, or UNKNOWN."""

        def values(nodes: list[Any]) -> list[Any]:
            return [self.value(one, depth + 1) for one in nodes]

        if depth == DEPTH:
            return UNKNOWN
        node = self.followed(node)
        match node:
            case ast.Constant():
                return node.value
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                inside = values(elements)
                return UNKNOWN if UNKNOWN in inside else inside
            case ast.Dict(keys=keys, values=nodes) if all(keys):
                inside = dict(zip(map(str, values(keys)), values(nodes), strict=True))
                return UNKNOWN if str(UNKNOWN) in inside or UNKNOWN in inside.values() else inside
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords) if all(
                one.arg for one in keywords
            ):
                inside = dict(
                    zip(
                        [one.arg for one in keywords],
                        values([one.value for one in keywords]),
                        strict=True,
                    )
                )
                return UNKNOWN if UNKNOWN in inside.values() else inside
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.computed(operator.sub, 0, *values([operand]))
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in OPERATORS:
                return self.computed(OPERATORS[type(kind)], *values([left, right]))
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return name
        return UNKNOWN

    @staticmethod
    def computed(operation: Any, left: Any, right: Any) -> Any:
        """A sum, a product and so on of two numbers, or UNKNOWN."""
        try:
            return (
                operation(left, right)
                if isinstance(left, int | float) and isinstance(right, int | float)
                else UNKNOWN
            )
        except ArithmeticError:
            return UNKNOWN

    # ------------------------------------------------------------ functions and classes

    def objects(self, file: str, node: ast.expr) -> Any:
        """Functions and classes as a recipe names them, and the folders of reward models, as a
        list; UNKNOWN if none is named.

        One without a name beside others keeps its place, which its weight may go with.
        """
        node = self.followed(node)
        elements = [
            self.followed(element)
            for element in (node.elts if isinstance(node, ast.List | ast.Tuple) else [node])
        ]
        things: list[str | RewardEntry | None] = []
        for element in elements:
            value = self.value(element)
            made = self.overlong(element) if file == "rewards" else None
            things.append(
                RewardModel(value) if isinstance(value, str) else made or self.object(file, element)
            )
        if not any(things) or any(isinstance(element, ast.Starred) for element in elements):
            return UNKNOWN
        for place, element in enumerate(elements):
            if things[place] is None:
                name = f"number_{place + 1}"
                self.needed.append(
                    f"{file}: write `{name} = {ast.unparse(element)}` into {file}.py"
                )
                things[place] = f"{file}.py:{name}"
        return things

    def overlong(self, node: ast.expr) -> RewardEntry | None:
        """An entry of `rewards` for a call that makes TRL's punishment of long completions; None
        for anything else.
        """
        if called(node) not in OVERLONG or not isinstance(node, ast.Call):
            return None
        arguments = dict(
            zip(
                ("max_completion_len", "soft_punish_cache"),
                map(self.value, node.args),
                strict=False,
            )
        )
        arguments |= {name: self.value(one) for name, one in self.keywords(node)}
        return (
            soft_overlong(arguments)
            if all(isinstance(value, int) for value in arguments.values())
            else None
        )

    def object(self, file: str, node: ast.expr) -> str | None:
        """A function or a class as a recipe names it; None for what is no name, or one that nothing
        in the script has.
        """
        *inside, name = (
            ast.unparse(node).split(".") if isinstance(node, ast.Name | ast.Attribute) else [""]
        )
        if not inside and name in self.definitions and not self.trains:
            return f"{shown_path(self.file)}:{name}"
        if not inside and name in self.definitions | self.nested:
            stands = f"in {self.file.name} it stands inside of a function or a class"
            why = (
                f"{self.file.name} would train when it is imported"
                if name in self.definitions
                else stands
            )
            self.needed.append(f"{file}: move {name} into {file}.py: {why}")
            return f"{file}.py:{name}"
        module, attribute = self.imported.get(inside[0] if inside else name, ("", ""))
        if not module or not (inside or attribute):
            return None
        if inside:
            module, attribute = ".".join(filter(None, (module, attribute, *inside[1:]))), name
        ours = built_in(module, attribute) if file == "rewards" else None
        return ours or f"{self.place(module)}:{attribute}"

    def place(self, module: str) -> str:
        """A module, or its file if that lies beside the script."""
        name = module.lstrip(".")
        beside = self.file.parent.joinpath(
            *[".."] * (len(module) - len(name) - 1), *name.split(".")
        ).with_suffix(".py")
        return shown_path(beside) if name and beside.is_file() else name


def shown_path(file: Path) -> str:
    """A path from the working directory, if the file lies there."""
    path, here = file.resolve(), Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file.name


def trains_when_imported(tree: ast.Module) -> bool:
    """True if a trainer is made or run outside of functions and of `if __name__ == "__main__"`."""

    def guards(node: ast.stmt) -> bool:
        names = ast.walk(node.test) if isinstance(node, ast.If) else ()
        return any(isinstance(part, ast.Name) and part.id == "__name__" for part in names)

    run = [node for node in tree.body if not isinstance(node, DEFINITIONS) and not guards(node)]
    return any(
        called(call) == "train" or called(call).endswith("Trainer")
        for part in run
        for call in ast.walk(part)
    )
