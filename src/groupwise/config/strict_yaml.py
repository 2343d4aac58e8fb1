"""YAML with nothing surprising in it, read into a tree that remembers where every value stood.

Differences from `yaml.safe_load`: duplicate keys are errors; scalars follow YAML 1.2 (`1e-5` is a number; `yes`, `on`, `1:30` and
dates are text); tags other than the plain ones are errors; anchors may not blow a file up.  All mistakes of a file are collected,
except for a syntax error, behind which nothing can be read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(slots=True)
class Node:
    """A value of a file, and where it stands: `recipe.yaml:12`.  Inside are Nodes again."""

    value: dict[str, Node] | list[Node] | str | int | float | bool | None
    where: str
    text: str = ""
    """A scalar as it is written."""

    def plain(self) -> Any:
        """The value alone, as dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def find(self, path: tuple[str | int, ...]) -> Node:
        """The node at `path`, or the deepest one on the way to it."""
        node = self
        for key in path:
            if isinstance(node.value, dict) and key in node.value:
                node = node.value[str(key)]
            elif isinstance(node.value, list) and isinstance(key, int) and key < len(node.value):
                node = node.value[key]
            else:
                break
        return node

    def copy(self) -> Node:
        """A tree of its own."""
        if isinstance(self.value, dict):
            return Node({key: node.copy() for key, node in self.value.items()}, self.where)
        if isinstance(self.value, list):
            return Node([node.copy() for node in self.value], self.where)
        return Node(self.value, self.where, self.text)


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake and where it stands."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


def parse(text: str, name: str) -> tuple[Node, list[Problem]]:
    """The tree of a document and the mistakes in it.

    name: what stands before the line number in every `where`.

    >>> tree, problems = parse("lr: 1e-5\\nlr: 2", "a.yaml")
    >>> tree.plain(), [str(problem) for problem in problems]
    ({'lr': 1e-05}, ["a.yaml:2: 'lr' stands here twice (first on line 1)"])
    """
    problems: list[Problem] = []
    try:
        root = _Loader(text).get_single_node()
        if root is None:
            return Node({}, f"{name}:1"), problems
        return _Builder(name, problems).build(root, f"{name}:{root.start_mark.line + 1}"), problems
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        snippet = mark.get_snippet(indent=4) if mark else None
        message = f"not YAML: {error.problem or error.context}" + (f"\n{snippet}" if snippet else "")
        return Node({}, where), [Problem(where, message)]
    except yaml.reader.ReaderError as error:
        return Node({}, name), [Problem(name, f"not text: character {error.character!r} at position {error.position}")]
    except RecursionError:
        return Node({}, name), [Problem(name, "nested too deeply")]


def parse_value(text: str, where: str) -> tuple[Node, list[Problem]]:
    """One value, as it stands behind `key=` on a command line; every node of it gets the same `where`."""
    tree, problems = parse(text, where)
    if not text.strip():
        tree = Node(None, where)

    def relabel(node: Node) -> Node:
        if isinstance(node.value, dict):
            return Node({key: relabel(inner) for key, inner in node.value.items()}, where)
        if isinstance(node.value, list):
            return Node([relabel(inner) for inner in node.value], where)
        return Node(node.value, where, node.text)

    return relabel(tree), [Problem(where, problem.message) for problem in problems]


class _TooLarge(yaml.MarkedYAMLError):
    pass


class _Builder:
    """YAML's own nodes -> ours."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.name = name
        self.problems = problems
        self.seen = 0
        self.open: set[int] = set()

    def build(self, node: yaml.Node, where: str) -> Node:
        self.seen += 1
        if self.seen > MOST_VALUES or id(node) in self.open:
            raise _TooLarge(problem=f"more than {MOST_VALUES} values once its anchors are expanded", problem_mark=node.start_mark)
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return Node(self.mapping(node), where)
            if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
                return Node([self.build(item, self.place(item)) for item in node.value], where)
            return Node(self.scalar(node), where, node.value)
        finally:
            self.open.discard(id(node))

    def place(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        if node.tag != TAG + "map":
            self.problems.append(Problem(self.place(node), f"the tag {node.tag} is not allowed"))
        found: dict[str, Node] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            where, line = self.place(key_node), key_node.start_mark.line + 1
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                self.problems.append(Problem(where, "a key must be a word"))
            elif key_node.tag == TAG + "merge" or key == "<<":
                self.problems.append(
                    Problem(where, "merge keys (<<) are not allowed: say what is shared at the top, and use `stages`")
                )
            elif key in found:
                self.problems.append(Problem(where, f"{key!r} stands here twice (first on line {lines[key]})"))
            else:
                found[key], lines[key] = self.build(value_node, where), line
        return found

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
        self.problems.append(Problem(self.place(node), f"the tag {node.tag} is not allowed"))
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
