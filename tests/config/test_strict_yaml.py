"""The YAML reader: what it refuses, what it takes for a number, and that what is written is read back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config.strict_yaml import MOST_VALUES, dump, parse, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("3.", 3.0),
        (".inf", math.inf),
        ("1_000", "1_000"),
        ("2024_", "2024_"),
        ("1_0.5", "1_0.5"),
        ("007", 7),
        ("0x1f", 31),
        ("yes", "yes"),
        ("on", "on"),
        ("No", "No"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("true", True),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("v1.0", "v1.0"),
        ("[1, {a: b}]", [1, {"a": "b"}]),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    document, problems = parse_value(text, "here")
    assert not problems
    assert document.values == value
    assert type(document.values) is type(value)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@pytest.mark.slow
@given(st.dictionaries(st.text(min_size=1), VALUES))
def test_what_is_written_is_read_back(data: dict) -> None:
    data.pop("<<", None)
    for key in list(data):
        if "<<" in repr(data[key]):
            del data[key]
    document, problems = parse(dump(data), "x")
    assert not problems
    assert repr(document.values) == repr(data)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a: 1\nb: 2\na: 3\n", ["x:3: 'a' stands here twice (first on line 1)"]),
        (
            "a:\n  b: 1\n  b: 2\nc: 1\nc: 1\n",
            ["x:3: 'b' stands here twice (first on line 2)", "x:5: 'c' stands here twice (first on line 4)"],
        ),
        ("a: &b {c: 1}\nd:\n  <<: *b\n", ["x:3: merge keys (<<) are not allowed: say what is shared at the top, and use `stages`"]),
        (
            "a: !!python/object/apply:os.system [ls]\n",
            ["x:1: the tag tag:yaml.org,2002:python/object/apply:os.system is not allowed"],
        ),
        ("a: !!binary aGk=\n", ["x:1: the tag tag:yaml.org,2002:binary is not allowed"]),
        ("a: !mine {b: 1}\n", ["x:1: the tag !mine is not allowed"]),
        ("? [1]\n: 2\n", ["x:1: a key must be a word"]),
    ],
)
def test_k6_what_is_refused(text: str, lines: list[str]) -> None:
    assert [str(problem) for problem in parse(text, "x")[1]] == lines


def test_k7_a_syntax_error_has_a_line_and_a_caret() -> None:
    (problem,) = parse("a: 1\nb: [1, 2\nc: 3\n", "x")[1]
    assert problem.where == "x:3"
    assert problem.message.startswith("not YAML: expected ',' or ']'")
    assert problem.message.splitlines()[-1].strip() == "^"


@pytest.mark.parametrize("text", ["[" * 100_000, "a: &a [*a]", "a: b: c", "\x00", "a: *nowhere", "--- 1\n--- 2", "a: 'x"])
def test_broken_files_are_one_problem(text: str) -> None:
    assert len(parse(text, "x")[1]) == 1


def test_x11_anchors_cannot_blow_a_file_up() -> None:
    laughs = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    laughs += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
    (problem,) = parse(laughs, "x")[1]
    assert f"more than {MOST_VALUES} values" in problem.message
    document, problems = parse("a: &a [1, 2]\nb: *a\n", "x")
    assert not problems
    assert document.values == {"a": [1, 2], "b": [1, 2]}


def test_every_value_knows_its_line() -> None:
    document, _ = parse("a:\n  b: 1\n  c:\n  - x: 1\n  - x: 2\n", "f.yaml")
    assert document.place(("a", "b")).where == "f.yaml:2"
    assert document.place(("a", "c", 1, "x")).where == "f.yaml:5"
    assert document.place(("a", "nothing", "here")).where == "f.yaml:1"
