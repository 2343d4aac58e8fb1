"""YAML with nothing surprising in it, read into plain values and the place of each.

Differences from `yaml.safe_load`: duplicate keys are errors; scalars follow YAML 1.2 (`1e-5` is a
number; `yes`, `on`, `1:30` and dates are text); tags other than the plain ones are errors; anchors
may not blow a file up.  All mistakes of a file are collected, except for a syntax error, behind
which nothing can be read.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

MOST_VALUES = 10_000
"""Values in one file after anchors are expanded: recipes have a hundred, a "billion laughs" file
has 10^9.
"""

TAG = "tag:yaml.org,2002:"


def _null(_: str) -> None:
    return None


def _bool(text: str) -> bool:
    return text.lower() == "true"


def _int(text: str) -> int:
    base = 0 if text[1:2] in "xo" else 10
    return int(text, base)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", _null),
    "bool": (r"true|True|TRUE|false|False|FALSE", _bool),
    "int": (
        r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+",
        _int,
    ),
    "float": (
        r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        _float,
    ),
    "str": (r"(?s:.*)", str),
}
"""Kind -> how it is written, and its value."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2, of which the composer alone is used."""

    yaml_implicit_resolvers: dict = {}


class Dumper(yaml.SafeDumper):
    """Writes what `parse` reads back as the same value: text that any YAML would take for a number
    or a word is quoted.
    """

    def ignore_aliases(self, data: Any) -> bool:
        """Repeats values instead of naming them by anchors."""
        return True


for _name, (_pattern, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(TAG + _name, re.compile(f"^(?:{_pattern})$"), None)


def _represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    plain = (True, False)
    readers = {
        _READER.resolve(yaml.ScalarNode, text, plain),
        dumper.resolve(yaml.ScalarNode, text, plain),
    }
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

    def get(self, path: Path, default: Any = None) -> Any:
        """The value at `path`."""
        here: Any = self.values
        for key in path:
            match here:
                case dict() if key in here:
                    here = here[key]
                case list() if isinstance(key, int) and key < len(here):
                    here = here[key]
                case _:
                    return default
        return here

    def holds(self, path: Path) -> bool:
        """True if there is a value at `path`."""
        return self.get(path, self) is not self

    def place(self, path: Path) -> Place:
        """The place of the value at `path`, or of the innermost one around it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return Place("")

    def part(self, path: Path) -> Document:
        """The value at `path` as a document."""
        part = Document(self.get(path))
        for place in self.places_in(path):
            part.places[place[len(path) :]] = self.places[place]
        return part

    def put(self, path: Path, part: Document) -> None:
        """Set the value at `path`; what holds it is there."""
        for place in self.places_in(path):
            del self.places[place]
        for place, text in part.places.items():
            self.places[(*path, *place)] = text
        self.get(path[:-1])[path[-1]] = copy.deepcopy(part.values)

    def drop(self, path: Path) -> None:
        """Take a key of a mapping away; what is no key there is left alone."""
        holder = self.get(path[:-1])
        if isinstance(holder, dict):
            holder.pop(path[-1], None)
        for place in self.places_in(path):
            del self.places[place]

    def places_in(self, path: Path) -> list[Path]:
        """The paths of all values in the one at `path`, and its own."""
        return [place for place in self.places if place[: len(path)] == path]


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
        document = Document(None)
        document.values = _value(
            root, (), root.start_mark.line, name, document.places, problems, []
        )
        return document, problems
    except yaml.MarkedYAMLError as error:
        where, message = name, f"not YAML: {error.problem or error.context}"
        mark = error.problem_mark or error.context_mark
        if mark is not None:
            where = f"{name}:{mark.line + 1}"
            snippet = mark.get_snippet(indent=4)
            if snippet:
                message += f"\n{snippet}"
    except yaml.reader.ReaderError as error:
        where = name
        message = f"not text: character {error.character!r} at position {error.position}"
    except RecursionError:
        where, message = name, "nested too deeply"
    return Document({}, {(): Place(where)}), [Problem(where, message)]


def parse_value(text: str, where: str) -> tuple[Document, list[Problem]]:
    """One value, as it stands behind `key=` on a command line; every value in it has the same
    place.
    """
    document, problems = parse(text, where)
    if not text.strip():
        document.values = None
    document.places = {path: Place(where, place.text) for path, place in document.places.items()}
    return document, [Problem(where, problem.message) for problem in problems]


def _value(
    node: yaml.Node,
    path: Path,
    line: int,
    name: str,
    places: dict[Path, Place],
    problems: list[Problem],
    around: list[yaml.Node],
) -> Any:
    """The value of one of YAML's nodes; adds the places of what is in it, and the mistakes.

    line: of its key, from 0.   around: the nodes that it lies in.
    """
    if len(places) >= MOST_VALUES or node in around:
        problem = f"more than {MOST_VALUES} values once its anchors are expanded"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    text = ""
    if isinstance(node, yaml.ScalarNode):
        text = node.value
    places[path] = Place(f"{name}:{line + 1}", text)

    def refuse(wrong: yaml.Node, message: str) -> None:
        problems.append(Problem(f"{name}:{wrong.start_mark.line + 1}", message))

    def inside(inner: yaml.Node, key: str | int, line: int) -> Any:
        return _value(inner, (*path, key), line, name, places, problems, [*around, node])

    kind = node.tag.removeprefix(TAG)
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        items = []
        for place, inner in enumerate(node.value):
            items.append(inside(inner, place, inner.start_mark.line))
        return items
    if isinstance(node, yaml.ScalarNode) and kind in _SCALARS:
        pattern, read = _SCALARS[kind]
        if re.fullmatch(pattern, text):
            with contextlib.suppress(ValueError):  # thousands of digits
                return read(text)
    if not isinstance(node, yaml.MappingNode) or kind != "map":
        refuse(node, f"the tag {node.tag} is not allowed")
    if not isinstance(node, yaml.MappingNode):
        return None
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = key_node.value, key_node.start_mark.line
        if not isinstance(key_node, yaml.ScalarNode):
            refuse(key_node, "a key must be a word")
        elif key_node.tag == TAG + "merge" or key == "<<":
            refuse(
                key_node,
                "merge keys (<<) are not allowed: say what is shared at the top, and use `stages`",
            )
        elif key in values:
            refuse(key_node, f"{key!r} stands here twice (first on line {lines[key] + 1})")
        else:
            values[key], lines[key] = inside(value_node, key, line), line
    return values


def dump(data: Mapping[str, Any]) -> str:
    """A document that `parse` reads back as the same data, keys in the order given.

    >>> print(dump({"name": "1e-5", "lr": 1e-5, "stop": ["yes"]}), end="")
    name: "1e-5"
    lr: 1.0e-05
    stop:
    - "yes"
    """
    return yaml.dump(
        dict(data),
        Dumper=Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=10**9,
        default_flow_style=False,
    )
