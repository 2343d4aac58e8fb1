"""Tests of programs as data sets write them, as one form: cases.

[{input, output}]                     standard input and what is to be printed
[{call, args, expected}]              calls of functions
{inputs, outputs, fn_name}            APPS: either of the two
[{input, output, testtype}]           LiveCodeBench: either of the two, in JSON
"def check(candidate): assert ..."    HumanEval: Python that calls functions
["assert f(1) == 2"]                  MBPP
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Printed:
    """The program is run as a script."""

    text: str
    """Standard input."""
    expected: str
    """Standard output."""


@dataclass(frozen=True, slots=True)
class Called:
    """A function of the program is called."""

    name: str
    args: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True, slots=True)
class Checked:
    """Python code with assertions, each of which is a case."""

    test: str
    """The code; an assertion is a call of `case_`."""
    entry: str | None
    """The function that `check(candidate)` is called with; None: the code calls it by name."""
    names: tuple[str, ...]
    """The functions of the program that the code calls by name."""
    cases: int
    """Assertions in the code."""
    apart: bool
    """Whether the program's functions are only called: the code then runs where the program does
    not."""

    @property
    def check(self) -> bool:
        """Return whether the code is a function `check(candidate)`."""
        return self.entry is not None

    @property
    def gameable(self) -> bool:
        """Return whether a program can pass without solving it: it runs beside the assertions, or
        defines another function that they call.
        """
        return not self.apart or len(self.names) + self.check > 1


Tests = tuple[Printed | Called, ...] | Checked


def read_tests(cell: Any, entry: str | None = None) -> Tests:
    """Read the tests of a row.   entry: the name of the function that is tested, where the row says
    it.

    Raises ValueError for what is none of the forms.

    >>> read_tests([{"input": "1 2", "output": "3"}])
    (Printed(text='1 2', expected='3'),)
    >>> read_tests(["assert add(1, 2) == 3"]).names
    ('add',)
    """
    if isinstance(cell, str):
        return _read_text(cell, entry)
    if isinstance(cell, Mapping):
        return _read_apps(cell, entry)
    if not isinstance(cell, Sequence) or not cell:
        raise ValueError(f"tests are a list, a mapping or a text, got {type(cell).__name__}")
    if all(isinstance(case, str) for case in cell):
        return read_code("\n".join(cell), entry)
    return tuple(_read_case(case, entry) for case in cell)


def _read_text(text: str, entry: str | None) -> Tests:
    try:
        cell = json.loads(text)
    except ValueError:
        return read_code(text, entry)
    if isinstance(cell, str):
        raise ValueError("tests are a list, a mapping or Python code, got a JSON string")
    return read_tests(cell, entry)


def _read_apps(cell: Mapping[str, Any], entry: str | None) -> Tests:
    if "inputs" not in cell or "outputs" not in cell:
        raise ValueError(f"tests need inputs and outputs; got {', '.join(map(str, cell))}")
    name = cell.get("fn_name") or entry
    cases: list[Printed | Called] = []
    for given, expected in zip(cell["inputs"], cell["outputs"], strict=True):
        if name is None:
            cases.append(Printed(_joined(given), _joined(expected)))
            continue
        if isinstance(expected, list) and len(expected) == 1:  # APPS wraps the value in a list
            expected = expected[0]
        cases.append(Called(name, tuple(given), expected))
    if not cases:
        raise ValueError("tests have no case")
    return tuple(cases)


def _joined(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)


def _read_case(case: Any, entry: str | None) -> Printed | Called:
    if not isinstance(case, Mapping):
        raise ValueError(f"a case is a mapping, got {type(case).__name__}")
    if "expected" in case:
        name = case.get("call") or entry
        if name is None:
            raise ValueError("a case with expected needs call: the name of a function")
        return Called(str(name), tuple(case.get("args", ())), case["expected"])
    if "input" not in case or "output" not in case:
        raise ValueError(f"a case needs input and output; got {', '.join(map(str, case))}")
    if case.get("testtype") != "functional":
        return Printed(_joined(case["input"]), _joined(case["output"]))
    if entry is None:
        raise ValueError("a functional case needs the name of the function, in a column func_name")
    lines = str(case["input"]).splitlines()
    arguments = tuple(json.loads(line) for line in lines if line.strip())
    return Called(entry, arguments, json.loads(case["output"]))


def read_code(text: str, entry: str | None = None) -> Checked:
    """Read tests that are Python code.  Raises ValueError for code that does not parse, or has no
    assertion.

    >>> read_code("def check(f):\\n    assert f(2) == 4", "double").gameable
    False
    >>> read_code("assert Point(1).x == 1").apart  # an object of a class does not cross
    False
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the test is no Python: {error}") from None
    candidate = _parameter_of_check(tree)
    if candidate is not None and entry is None:
        raise ValueError("a test with check(candidate) needs a column entry_point")
    names = _free_names(tree)
    functions = names if candidate is None else {*names, candidate}
    apart = _only_called(tree, functions)
    counted = _Cases()
    tree = ast.fix_missing_locations(counted.visit(tree))
    if counted.cases == 0:
        raise ValueError("the test has no assertion")
    return Checked(
        test=ast.unparse(tree),
        entry=None if candidate is None else entry,
        names=tuple(sorted(names)),
        cases=counted.cases,
        apart=apart and bool(functions),
    )


def _parameter_of_check(tree: ast.Module) -> str | None:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            return node.args.args[0].arg if len(node.args.args) == 1 else None
    return None


def _free_names(tree: ast.Module) -> set[str]:
    """Return the names that code reads and does not define."""
    read: set[str] = set()
    bound: set[str] = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return read - bound


def _only_called(tree: ast.Module, names: set[str]) -> bool:
    """Return whether names stand nowhere but before the arguments of a call.

    A name with a capital letter is a class: its objects do not cross.
    """
    if any(name[0].isupper() for name in names):
        return False
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names and id(node) not in called:
            return False
    return True


class _Cases(ast.NodeTransformer):
    """Write `assert x` as `case_(lambda: x)`, so that one that fails does not end the others."""

    def __init__(self) -> None:
        self.cases = 0

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """Write one assertion."""
        self.cases += 1
        nothing = ast.arguments([], [], None, [], [], None, [])
        holds = ast.Lambda(nothing, node.test)
        return ast.Expr(ast.Call(ast.Name("case_", ast.Load()), [holds], []))
