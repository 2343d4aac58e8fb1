"""Schemas of tools: those that transformers makes, without importing it."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from groupwise.environments.schemas import schema_of, typed
from groupwise.errors import ConfigError

WRITTEN = """Take one thing.

    Args:
        value: What is taken.
    """


class Colour(enum.Enum):
    """Texts and numbers."""

    RED = "red"
    SEVEN = 7
    NONE = None


class Empty(enum.Enum):
    """Offers nothing."""


class Odd(enum.Enum):
    """Values that JSON does not hold."""

    PAIR = (1, 2)


class Order(enum.IntEnum):
    """A number that is an enumeration."""

    FIRST = 1


def tool(hint: Any, documentation: str = WRITTEN, **default: Any) -> Callable[..., Any]:
    """A function of one parameter with this hint."""

    def function(value: Any) -> Any:
        return value

    function.__annotations__ = {"value": hint}
    function.__doc__ = documentation
    function.__defaults__ = tuple(default.values()) or None
    return function


def same(function: Callable[..., Any]) -> None:
    """The same schema to the order of its keys, which templates write out; or both say that there is none."""
    try:
        expected = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError, TypeError):
        with pytest.raises(ConfigError):
            schema_of(function, "it")
        return
    assert json.dumps(schema_of(function, function.__name__)) == json.dumps(expected)


BASIC: list[Any] = [int, float, str, bool, None, Any, list, tuple, dict, Colour, Order, Literal["a", 2, None, True], Literal[1.5]]
BASIC += [tuple[()], Literal["a", "b"]]
REFUSED: list[Any] = [
    Empty,
    Odd,
    bytes,
    object,
    set[int],
    tuple[int],
    tuple[int, ...],
    complex,
    Literal[b"x"],
    Callable[[int], int],
]


@pytest.mark.parametrize("hint", [*BASIC, *REFUSED], ids=repr)
def test_every_hint_alone(hint: Any) -> None:
    same(tool(hint))
    same(tool(hint, default=None))
    if hint in REFUSED:
        with pytest.raises(ConfigError, match=r"the tool 'it': .*([Tt]ype hint|Enum|literals|Tuple)"):
            schema_of(tool(hint), "it")


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        inner.map(lambda one: list[one]),
        inner.map(lambda one: dict[str, one]),
        inner.map(lambda one: Optional[one]),  # noqa: UP045
        st.lists(inner, min_size=1, max_size=3).map(lambda some: tuple[tuple(some)]),
        st.lists(inner, min_size=2, max_size=3).map(lambda some: Union[tuple(some)]),  # noqa: UP007
    )


@given(st.recursive(st.sampled_from(BASIC + REFUSED[:4]), nested, max_leaves=5))
def test_hints_in_hints(hint: Any) -> None:
    same(tool(hint))


def everything(
    words: list[str], counts: dict[str, int], *, mode: Literal["up", "down"] = "up", limit: int | None = None, size: str = "big"
) -> list[str] | None:
    """
    Take arguments of many kinds.

    In several paragraphs: of
    several lines.

    Args:
        words: Some,
            which go on: further in
            x: like this

        counts: By word.
      mode: Which way.
        limit:
            The most.
        size: How big (Choices: ["small ", "big"])
        another (int): of no parameter

    Returns:
        What was kept,
        in order.

    Raises:
        ValueError: Never.
    """
    return [*words, *counts, mode, str(limit), size]


class Bound:
    """A method has no `self` to be described."""

    def take(self, value: int) -> Bound:
        """Take it.  Args: of a kind.

        Args:
            value: What.

        Returns:
            Itself.
        """
        return self

    def ask(self) -> str:
        """Ask.

        Returns:
            What was said.
        Raises:
            OSError: At times.
        """
        return ""


@pytest.mark.parametrize("function", [everything, Bound().take, Bound().ask], ids=["everything", "take", "ask"])
def test_docstrings_of_every_form(function: Callable[..., Any]) -> None:
    same(function)


class Sized:
    """Callable.

    Args:
        size: Of something else.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, value: int) -> int:
        """Take it.

        Args:
            value: What.
        """
        return value


class Silent:
    """Its `__call__` says nothing."""

    def __call__(self) -> None:
        pass


def three(first: int, second: int, last: object) -> int:
    """Take three.

    Args:
        first: What is taken first.
        second: What is taken then.
    """
    return first + second


def test_objects_and_partials_are_what_they_call() -> None:
    """Without what is set already; what is not documented is not described by Python's own words."""
    one = schema_of(Sized(3), "one")["function"]
    assert (one["name"], one["description"], list(one["parameters"]["properties"])) == ("one", "Take it.", ["value"])
    assert schema_of(partial(Sized(3)), "one")["function"] == one
    some = schema_of(partial(three, 1, last=object()), "some")["function"]
    assert (some["name"], some["description"], some["parameters"]["required"]) == ("some", "Take three.", ["second"])
    assert list(some["parameters"]["properties"]) == ["second"]
    with pytest.raises(ConfigError, match="the tool 'it' has no docstring"):
        schema_of(Silent(), "it")


LINES = st.sampled_from([
    "Do it.", "", "    value: What.", "        more of it", "      value: further in", "  value: less far", "\tvalue: tab",
    "    value:x (choices: [1, \"a \"])", "    value: x (choices: 1", "    other: One", "value: at the margin",
    "Returns:", "    It.", "Raises:",
])  # fmt: skip


@given(st.lists(LINES, max_size=8).map("\n".join))
def test_docstrings_of_any_form(documentation: str) -> None:
    same(tool(int, f"It.\n\nArgs:\n{documentation}"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (tool(int, "Take."), r"the tool 'it': .* the docstring has no description for the argument 'value'"),
        (lambda value: value, "the tool 'it' has no docstring"),
        (tool("Nowhere"), "the tool 'it' cannot be described: NameError: name 'Nowhere'"),
        (tool(int, WRITTEN.replace("taken.", "taken (choices: [1, )")), "cannot be described: JSONDecodeError"),
    ],
)
def test_a_missing_hint_or_description_is_named(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schema_of(function, "it")


def test_a_process_that_calls_tools_imports_neither_torch_nor_transformers() -> None:
    """They would be most of what it takes to start; they describe tools, in a process that ends with that."""
    code = (
        "import sys\nfrom groupwise.environments import instance\nfrom groupwise.environments.playground import calculate\n"
        "made = instance.Instance({'calculate': calculate}, None, {})\n"
        "print(*made.call([('calculate', {'expression': '1+2'})], 60.0))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert said.stdout == "{'result': '3'}\n[]\n", said.stderr


def test_whole_numbers_are_integers_wherever_one_is_asked_for() -> None:
    """Also where a schema that others wrote says less than was given."""
    number, integer = {"type": "number"}, {"type": "integer"}
    parameters = {
        "plain": integer, "either": {"type": ["integer", "null"]}, "both": {"type": ["integer", "number"]}, "float": number,
        "any": {"anyOf": [{"type": "string"}, integer]}, "first": {"prefixItems": [integer, number]}, "all": {"items": integer},
        "by_name": {"additionalProperties": integer}, "inside": {"properties": {"n": integer}},
    }  # fmt: skip
    given = {
        "plain": 2.0, "either": 2.0, "both": 2.0, "float": 2.0, "any": 2.0, "first": [1.0, 2.0], "all": [1.0],
        "by_name": {"a": 3.0}, "inside": {"n": 4.0, "m": 5.0},
    }  # fmt: skip
    found = typed({"function": {"name": "f", "parameters": {"properties": parameters}}}, given)
    assert repr(found) == repr(
        {
            "plain": 2, "either": 2, "both": 2.0, "float": 2.0, "any": 2, "first": [1, 2.0], "all": [1],
            "by_name": {"a": 3}, "inside": {"n": 4, "m": 5.0},
        }
    )  # fmt: skip
