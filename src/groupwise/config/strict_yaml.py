"""YAML with nothing surprising in it, read into plain values and the place of each.

Differences from `yaml.safe_load`: duplicate keys are errors; scalars follow YAML 1.2 (`1e-5` is a number; `yes`, `on`, `1:30` and
dates are text); tags other than the plain ones are errors; anchors may not blow a file up.  All mistakes of a file are collected,
except for a syntax error, behind which nothing can be read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

MOST_VALUES = 10_000
"""Values in one file after anchors are expanded: recipes have a hundred, a "billion laughs" file has 10^9."""

TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "int": (r"^(?:[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+)$", list("-+0123456789")),
    "float": (
        r"^(?:[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
}


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2; only its composer is used, its constructors are not."""

    yaml_implicit_resolvers: dict = {}


class Dumper(yaml.SafeDumper):
    """Writes what `parse` reads back as the same value: text that any YAML would take for a number or a word is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        """Repeats values instead of naming them by anchors."""
        return True


for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(TAG + _name, re.compile(_pattern), _first)


def _represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    plain = (True, False)
    readers = {_READER.resolve(yaml.ScalarNode, text, plain), dumper.resolve(yaml.ScalarNode, text, plain)}
    style = None
    if readers != {TAG + "str"} or not text.replace("\n", "").isprintable():
        style = '"'
    elif "\n" in text:
        style = "|"
    return dumper.represent_scalar(TAG + "str", text, style=style)


_READER = _Loader("")
Dumper.add_representer(str, _represent_text)


Path = tuple[str | int, ...]
"""Where a value stands in nested mappings and lists."""


class Place(NamedTuple):
    """Where a value stands in a file: `recipe.yaml:12`."""

    where: str
    text: str = ""
    """A scalar as it is written."""


@dataclass(slots=True)
class Document:
    """Plain values, and the place of each."""

    values: Any
    places: dict[Path, Place] = field(default_factory=dict)

    def get(self, path: Path) -> Any:
        """The value at `path`; None if there is none."""
        return self._find(path)[0]

    def holds(self, path: Path) -> bool:
        """True if there is a value at `path`."""
        return self._find(path)[1]

    def _find(self, path: Path) -> tuple[Any, bool]:
        here: Any = self.values
        for key in path:
            match here:
                case dict() if key in here:
                    here = here[key]
                case list() if isinstance(key, int) and key < len(here):
                    here = here[key]
                case _:
                    return None, False
        return here, True

    def place(self, path: Path) -> Place:
        """The place of the value at `path`, or of the innermost one around it."""
        around = (path[:length] for length in range(len(path), -1, -1))
        return next((self.places[one] for one in around if one in self.places), Place(""))

    def part(self, path: Path) -> Document:
        """The value at `path` as a document."""
        start = len(path)
        return Document(self.get(path), {one[start:]: place for one, place in self.places.items() if one[:start] == path})

    def put(self, path: Path, part: Document) -> None:
        """Set the value at `path`; what holds it is there."""
        if self.holds(path):
            self.drop(path)
        self.get(path[:-1])[path[-1]] = copy.deepcopy(part.values)
        self.places |= {(*path, *one): place for one, place in part.places.items()}

    def drop(self, path: Path) -> None:
        """Take a key of a mapping away; what is no key there is left alone."""
        if isinstance(holder := self.get(path[:-1]), dict):
            holder.pop(path[-1], None)
        self.places = {one: place for one, place in self.places.items() if one[: len(path)] != path}


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake and where it stands."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


def parse(text: str, name: str) -> tuple[Document, list[Problem]]:
    """The values of a document with their places, and the mistakes in it.

    name: what stands before the line number in every place.

    >>> document, problems = parse("lr: 1e-5\\nlr: 2", "a.yaml")
    >>> document.values, [str(problem) for problem in problems]
    ({'lr': 1e-05}, ["a.yaml:2: 'lr' stands here twice (first on line 1)"])
    """
    problems: list[Problem] = []
    try:
        root = _Loader(text).get_single_node()
        if root is None:
            return Document({}, {(): Place(f"{name}:1")}), problems
        builder = _Builder(name, problems)
        return Document(builder.build(root, (), root.start_mark.line), builder.places), problems
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        snippet = mark.get_snippet(indent=4) if mark else None
        message = f"not YAML: {error.problem or error.context}" + (f"\n{snippet}" if snippet else "")
    except yaml.reader.ReaderError as error:
        where, message = name, f"not text: character {error.character!r} at position {error.position}"
    except RecursionError:
        where, message = name, "nested too deeply"
    return Document({}, {(): Place(where)}), [Problem(where, message)]


def parse_value(text: str, where: str) -> tuple[Document, list[Problem]]:
    """One value, as it stands behind `key=` on a command line; every value in it has the same place."""
    document, problems = parse(text, where)
    places = {path: Place(where, place.text) for path, place in document.places.items()}
    return Document(document.values if text.strip() else None, places), [Problem(where, problem.message) for problem in problems]


class _Builder:
    """YAML's own nodes -> plain values and their places."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.name = name
        self.problems = problems
        self.places: dict[Path, Place] = {}
        self.values = 0
        self.open: set[int] = set()

    def build(self, node: yaml.Node, path: Path, line: int) -> Any:
        """The value of a node.   line: of its key, from 0."""
        self.values += 1
        if self.values > MOST_VALUES or id(node) in self.open:
            problem = f"more than {MOST_VALUES} values once its anchors are expanded"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        self.open.add(id(node))
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        self.places[path] = Place(f"{self.name}:{line + 1}", text)
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
                return [self.build(item, (*path, place), item.start_mark.line) for place, item in enumerate(node.value)]
            return self.scalar(node)
        finally:
            self.open.discard(id(node))

    def refuse(self, node: yaml.Node, message: str) -> None:
        self.problems.append(Problem(f"{self.name}:{node.start_mark.line + 1}", message))

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        if node.tag != TAG + "map":
            self.refuse(node, f"the tag {node.tag} is not allowed")
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value if isinstance(key_node, yaml.ScalarNode) else None, key_node.start_mark.line
            if key is None:
                self.refuse(key_node, "a key must be a word")
            elif key_node.tag == TAG + "merge" or key == "<<":
                self.refuse(key_node, "merge keys (<<) are not allowed: say what is shared at the top, and use `stages`")
            elif key in values:
                self.refuse(key_node, f"{key!r} stands here twice (first on line {lines[key] + 1})")
            else:
                values[key], lines[key] = self.build(value_node, (*path, key), line), line
        return values

    def scalar(self, node: yaml.Node) -> str | int | float | bool | None:
        text, kind = node.value, node.tag.removeprefix(TAG)
        match kind:
            case "str":
                return text
            case "null":
                return None
            case "bool" if text.lower() in ("true", "false"):
                return text.lower() == "true"
        try:
            if kind == "int":
                return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
            if kind == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            pass
        self.refuse(node, f"the tag {node.tag} is not allowed")
        return None


def dump(data: Mapping[str, Any]) -> str:
    """A document that `parse` reads back as the same data, keys in the order given.

    >>> print(dump({"name": "1e-5", "lr": 1e-5, "stop": ["yes"]}), end="")
    name: "1e-5"
    lr: 1.0e-05
    stop:
    - "yes"
    """
    return yaml.dump(dict(data), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10**9, default_flow_style=False)
