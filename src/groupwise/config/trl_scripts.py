"""A Python script that makes one of TRL's configurations, read as text: nothing of it runs.

Of the arguments of the configuration and of the trainer those are known that are written out, or that are names of such values;
of every other one a line says what becomes of it.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from pathlib import Path
from typing import Any

from groupwise.config.trl import CALLS, TABLE
from groupwise.config.trl_arguments import ADAPTER, ADAPTERS, KINDS, LORA, Line, RewardModel, adapter_arguments
from groupwise.config.trl_convert import built_in
from groupwise.errors import ConfigError

OPEN = "**"
"""The name of a line for arguments that are not even known by name."""
OBJECTS = {"reward_funcs": "rewards", "tools": "tools", "environment_factory": "environment"}
"""Arguments that hold functions and classes; the file in which those go that cannot stay in the script."""
ORDER = {
    "GRPOConfig": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "SFTConfig": ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    "DPOConfig": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
}
"""Arguments of the trainers in the order of their places."""
ORDER |= {"RLOOConfig": ORDER["GRPOConfig"], "RewardConfig": ORDER["SFTConfig"]}
SPLITS = {"train_dataset": "dataset_train_split", "eval_dataset": "dataset_test_split"}
"""The argument of TRL's command that says which split of a data set is taken."""
LOADING = ("dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "quantization_config")
"""What matters of a model's `from_pretrained`."""
FILES = ("json", "parquet", "csv", "text", "arrow")
"""What `load_dataset` takes in place of a data set's name where the rows are files."""
UNKNOWN = object()
"""The value of an expression that would have to be run."""
DEPTH = 20
"""Names of names, and expressions in expressions, that are followed."""
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv}  # fmt: skip
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def read_script(text: str, file: Path, kind: str | None) -> tuple[str, dict[str, Any], list[Line], list[str]]:
    """TRL's class, the arguments that are known, lines for what else the script says, and what must be done to it.

    Raises ConfigError.
    """
    try:
        script = _Script(ast.parse(text), file)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no Python that can be read: {error}") from error
    return script.arguments(kind)


def called(call: ast.Call) -> str:
    """The last name of what is called."""
    return call.func.id if isinstance(call.func, ast.Name) else call.func.attr if isinstance(call.func, ast.Attribute) else ""


class _Script:
    """The names and calls of a script, and the arguments that were read of it."""

    def __init__(self, tree: ast.Module, file: Path) -> None:
        self.file, nodes = file, list(ast.walk(tree))
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        assigned = [node for node in nodes if isinstance(node, ast.Assign) and len(node.targets) == 1]
        names = Counter(node.targets[0].id for node in assigned if isinstance(node.targets[0], ast.Name))
        self.constants = {
            target.id: node.value for node in assigned if isinstance(target := node.targets[0], ast.Name) and names[target.id] == 1
        }
        """Names that are assigned once in the whole script, and what to."""
        self.definitions = {node.name for node in tree.body if isinstance(node, DEFINITIONS)}
        self.nested = {node.name for node in nodes if isinstance(node, DEFINITIONS)} - self.definitions
        self.imported: dict[str, tuple[str, str]] = {}
        """Local name -> module and the name in it; the name is empty for a module."""
        for node in nodes:
            if isinstance(node, ast.Import):
                for one in node.names:
                    module = one.name if one.asname else one.name.partition(".")[0]
                    self.imported[one.asname or module] = (module, "")
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                self.imported |= {one.asname or one.name: (module, one.name) for one in node.names}
        self.trains = _trains_when_imported(tree)
        self.known: dict[str, Any] = {}
        self.lines: list[Line] = []
        self.needed: list[str] = []

    def arguments(self, kind: str | None) -> tuple[str, dict[str, Any], list[Line], list[str]]:
        """The class, what is known, and lines for the rest."""
        made = [(name, call) for call in self.calls if (name := called(call)) in KINDS and kind in (None, name)]
        if not made:
            parsed = any(called(call) in ("TrlParser", "HfArgumentParser") for call in self.calls)
            remedy = " of its own, but reads it from its command line: import the shell script (.sh) that starts it, or the file "
            raise ConfigError(
                f"{self.file} makes no {kind or ', '.join(KINDS)}" + (f"{remedy}behind its --config" if parsed else "")
            )
        if len(made) > 1:
            places = ", ".join(f"{name} in line {call.lineno}" for name, call in made)
            raise ConfigError(f"{self.file} makes {len(made)} configurations ({places}): keep one of them in a file of its own")
        name, call = made[0]
        for keyword in call.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                self.read(keyword.arg, keyword.value)
            elif isinstance(value, dict):  # **{...}
                self.known |= value
            else:
                says = "arguments that are not known: say them in the recipe"
                self.lines.append(Line(OPEN, ast.unparse(keyword.value), None, says))
        trainer = name.replace("Config", "Trainer")
        for other in self.calls:
            if called(other) == trainer:
                self._trainer(name, other)
            elif called(other) in ADAPTERS:
                self._adapter(other)
            elif isinstance(other.func, ast.Attribute) and self._is(other.func.value, trainer):
                values = ", ".join(map(ast.unparse, (*other.args, *(keyword.value for keyword in other.keywords))))
                if called(other) != "train" or values:
                    row = CALLS.get(called(other))
                    self.lines.append(Line(f"{called(other)}()", values, row and row.fate, row.says if row else "not known"))
        return name, self.known, self.lines, self.needed

    def read(self, name: str, node: ast.expr) -> None:
        """Adds an argument to those that are known; a line where its value is not known, and matters."""
        value, row = self._objects(OBJECTS[name], node) if name in OBJECTS else self.value(node), TABLE.get(name)
        if value is not UNKNOWN:
            self.known[name] = value
        elif row is not None and row.convert is None:
            self.lines.append(Line(name, ast.unparse(node), row.fate, row.says))
        else:
            self.lines.append(Line(name, ast.unparse(node), None, "an expression: say it in the recipe"))

    def _adapter(self, call: ast.Call) -> None:
        """Adds what a call that describes an adapter says, and its defaults for the rest."""
        described = {keyword.arg or OPEN: keyword.value for keyword in call.keywords}
        peft = called(call) == "LoraConfig"
        self.known.setdefault("use_peft", True)
        if not peft and not described.keys() & LORA.keys():
            return  # peft's function of that name takes a LoraConfig
        values = {} if OPEN in described else dict(ADAPTERS[called(call)])
        for name, node in described.items():
            if name not in LORA and not (peft and name != OPEN):
                continue
            values[name] = self.value(node)
            if values[name] is UNKNOWN:
                self.read(LORA.get(name, ADAPTER + name), node)
                del values[name]
        self.known |= adapter_arguments(values)

    def _is(self, node: ast.expr, trainer: str) -> bool:
        """True for the call that makes the trainer, and for the variable that holds it."""
        node = self.followed(node)
        return isinstance(node, ast.Call) and called(node) == trainer

    def _trainer(self, kind: str, call: ast.Call) -> None:
        """Adds what the call that makes the trainer says."""
        arguments = dict(zip(ORDER[kind], call.args, strict=False)) | {one.arg or OPEN: one.value for one in call.keywords}
        for name, node in arguments.items():
            if name == "args" or (isinstance(node, ast.Constant) and node.value is None):
                continue
            if name == "model":
                self._model(node)
            elif name in ("train_dataset", "eval_dataset"):
                self._dataset(name, node)
            elif name != "peft_config" or not any(called(one) in ADAPTERS for one in self.calls):  # read where it is made
                self.read(name, node)

    def _model(self, node: ast.expr) -> None:
        """A model's path, also that of `AutoModelForCausalLM.from_pretrained(PATH, ...)`."""
        loaded = self.followed(node)
        while isinstance(loaded, ast.Call) and isinstance(loaded.func, ast.Attribute) and called(loaded) in _MOVES:
            loaded = self.followed(loaded.func.value)
        if not (isinstance(loaded, ast.Call) and called(loaded) == "from_pretrained" and loaded.args):
            self.read("model_name_or_path", node)
            return
        if "model_name_or_path" not in self.known:
            self.read("model_name_or_path", loaded.args[0])
        for keyword in loaded.keywords:
            if keyword.arg in LOADING and keyword.arg not in self.known:
                self.read(keyword.arg, keyword.value)

    def _dataset(self, which: str, node: ast.expr) -> None:
        """What `load_dataset("name", split="train")` behind a trainer's argument says."""
        split, inner = None, self.followed(node)
        if isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant):
            split, inner = str(inner.slice.value), self.followed(inner.value)
        path: Any = inner.value if isinstance(inner, ast.Constant) and isinstance(inner.value, str) else UNKNOWN
        if isinstance(inner, ast.Call) and called(inner) == "load_dataset" and inner.args:
            keywords = {one.arg: self.value(one.value) for one in inner.keywords}
            path, split = self.value(inner.args[0]), keywords.get("split", split)
            split = split if isinstance(split, str) else None
            part = self.value(inner.args[1]) if len(inner.args) > 1 else keywords.get("name")
            if path in FILES:  # a format, and not a data set: the file is what `split` names in `data_files`
                files = keywords.get("data_files", UNKNOWN)
                path, split = (files.get(split or "train") if isinstance(files, dict) else files), None
            elif isinstance(part, str) and part:
                path = f"{path}:{part}"
        if isinstance(path, str):
            self.known |= {which: path} | ({SPLITS[which]: split} if split else {})
        else:
            says = f"rows that the script makes: write them with dataset.to_json(...), and give the file as {TABLE[which].key}"
            self.lines.append(Line(which, ast.unparse(node), None, says))

    # ------------------------------------------------------------ values

    def followed(self, node: ast.expr) -> ast.expr:
        """What a name stands for."""
        seen = set()
        while isinstance(node, ast.Name) and node.id in self.constants and node.id not in seen | self.definitions:
            seen.add(node.id)
            node = self.constants[node.id]
        return node

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """The value of an expression, or UNKNOWN."""
        if depth > DEPTH:
            return UNKNOWN
        node = self.followed(node)
        match node:
            case ast.Constant():
                return node.value
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                values = [self.value(one, depth + 1) for one in elements]
                return UNKNOWN if UNKNOWN in values else values
            case ast.Dict(keys=keys, values=inside) if all(keys):
                names, values = ([self.value(one, depth + 1) for one in side if one] for side in (keys, inside))
                return UNKNOWN if UNKNOWN in [*names, *values] else dict(zip(map(str, names), values, strict=True))
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords) if all(one.arg for one in keywords):
                named = {str(one.arg): self.value(one.value, depth + 1) for one in keywords}
                return UNKNOWN if UNKNOWN in named.values() else named
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return self._computed(operator.sub, 0, self.value(inner, depth + 1))
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in OPERATORS:
                return self._computed(OPERATORS[type(kind)], self.value(left, depth + 1), self.value(right, depth + 1))
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return name
        return UNKNOWN

    @staticmethod
    def _computed(operation: Any, left: Any, right: Any) -> Any:
        try:
            numbers = isinstance(left, int | float) and isinstance(right, int | float)
            return operation(left, right) if numbers else UNKNOWN
        except ArithmeticError:
            return UNKNOWN

    # ------------------------------------------------------------ functions and classes

    def _objects(self, file: str, node: ast.expr) -> Any:
        """Functions and classes as a recipe names them, and the folders of reward models, as a list; UNKNOWN if one of them is."""
        node = self.followed(node)
        things: list[str | None] = []
        for one in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            value = self.value(one)
            things.append(RewardModel(value) if isinstance(value, str) else self._spec(file, one))
        return UNKNOWN if None in things else things

    def _spec(self, file: str, node: ast.expr) -> str | None:
        """A function or a class as a recipe names it; None for what is no name, or one that nothing in the script has."""
        *inside, name = ast.unparse(node).split(".") if isinstance(node, ast.Name | ast.Attribute) else [""]
        if not inside and name in self.definitions | self.nested:
            if name in self.definitions and not self.trains:
                return f"{shown_path(self.file)}:{name}"
            stands = f"in {self.file.name} it stands inside of a function or a class"
            why = f"{self.file.name} would train when it is imported" if name in self.definitions else stands
            self.needed.append(f"{file}: move {name} into {file}.py: {why}")
            return f"{file}.py:{name}"
        if (root := inside[0] if inside else name) not in self.imported:
            return None
        module, attribute = self.imported[root]
        if inside:
            module = ".".join(filter(None, (module, attribute, *inside[1:])))
        elif not attribute:
            return None
        ours = built_in(module, name if inside else attribute) if file == "rewards" else None
        return ours or f"{self._place(module)}:{name if inside else attribute}"

    def _place(self, module: str) -> str:
        """A module, or its file if that lies beside the script."""
        name = module.lstrip(".")
        beside = self.file.parent.joinpath(*[".."] * (len(module) - len(name) - 1), *name.split(".")).with_suffix(".py")
        return shown_path(beside) if name and beside.is_file() else name


_MOVES = ("to", "cuda", "eval", "train")
"""Methods that give a loaded model back."""


def shown_path(file: Path) -> str:
    """A path from the working directory, if the file lies there."""
    path, here = file.resolve(), Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file.name


def _trains_when_imported(tree: ast.Module) -> bool:
    """True if a trainer is made or run outside of functions and of `if __name__ == "__main__"`."""

    def guards(node: ast.stmt) -> bool:
        names = ast.walk(node.test) if isinstance(node, ast.If) else ()
        return any(isinstance(part, ast.Name) and part.id == "__name__" for part in names)

    run = [node for node in tree.body if not isinstance(node, DEFINITIONS) and not guards(node)]
    calls = [node for part in run for node in ast.walk(part) if isinstance(node, ast.Call)]
    return any(called(call) == "train" or called(call).endswith("Trainer") for call in calls)
