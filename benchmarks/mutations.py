"""Plants faults in a copy of the library, one at a time, and looks which of the fast tests notice.

    python benchmarks/mutations.py                     # four in each package
    python benchmarks/mutations.py --only data:2       # one of them again
    python benchmarks/mutations.py --wide              # what survives meets all tests that import the module

A fault is one change of one expression: another comparison, another operation, a condition turned round, a number that is off by
one, a statement that is left out.  Messages, annotations and assertions are left alone.  The tests of a module are its own examples
and the files that import it, first the one of its name.  Some faults change nothing that can be seen: look at what survives.
Processes are forked from one that has imported torch and transformers.  `benchmarks/mutations.md` has the last table.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = Path("src", "groupwise")
PARTS = ("benchmarks", "docs", "packages", "recipes", "src", "tests", "typings", "README.md", "SECURITY.md", "pyproject.toml")
"""Of the repository: what the tests read."""
PACKAGES = (
    "algorithms", "api", "cli", "config", "data", "distributed", "environments", "inspection", "models", "ops", "proof", "rewards",
    "rollout", "runs", "training", "trl", "utils", "viewer",
)  # fmt: skip
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATIONS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
PASSED_OVER = (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign, ast.Import, ast.ImportFrom)
NARROW = 3
"""Test files that a fault meets first."""


@dataclass(frozen=True)
class Fault:
    """A change of one stretch of a source file."""

    name: str
    file: Path
    line: int
    begin: int
    end: int
    before: str
    after: str


def changed(node: ast.AST) -> str | None:
    """The source of a node with a fault in it; None for a node that takes none."""
    match node:
        case ast.Compare(ops=[operation]) if type(operation) in COMPARISONS:
            return ast.unparse(ast.Compare(node.left, [COMPARISONS[type(operation)]()], node.comparators))
        case ast.BinOp() if type(node.op) in OPERATIONS and not isinstance(node.left, (ast.Constant, ast.JoinedStr)):
            return f"({ast.unparse(ast.BinOp(node.left, OPERATIONS[type(node.op)](), node.right))})"
        case ast.BoolOp():
            return f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))})"
        case ast.UnaryOp(op=ast.Not()):
            return f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            return str(not node.value)
        case ast.Constant(value=int()) if node.value < 1000:
            return str(node.value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return "pass"
    return None


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes inside functions, but for messages, annotations, defaults and `__repr__`."""

    def inside(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (*PASSED_OVER, ast.arguments)) and child is not getattr(node, "returns", None):
                yield child
                yield from inside(child)

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name != "__repr__":
            for statement in node.body:
                if not isinstance(statement, PASSED_OVER):
                    yield statement
                    yield from inside(statement)


def faults(package: str, count: int, seed: int) -> list[Fault]:
    """`count` faults in as many modules of a package as there are, the same for the same source and seed."""
    chance = random.Random(f"{package}{seed}")
    modules = [path for path in sorted((ROOT / SOURCE / package).rglob("*.py")) if "plugin" not in path.parts]
    chance.shuffle(modules)
    found: list[Fault] = []
    for path in [*modules, *modules]:
        text = path.read_text(encoding="utf-8")
        lines = text.encode().splitlines(keepends=True)
        begins = [0]
        for line in lines:
            begins.append(begins[-1] + len(line))
        places = {}
        for node in nodes(ast.parse(text)):
            if (after := changed(node)) is not None:
                begin, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
                places[begin, end] = (node.lineno, after)
        if len(found) < count and places:
            begin, end = chance.choice(sorted(places))
            line, after = places[begin, end]
            before = text.encode()[begin:end].decode()
            found.append(Fault(f"{package}:{len(found) + 1}", path.relative_to(ROOT), line, begin, end, before, after))
    return found


def tests_of(root: Path, file: Path) -> list[Path]:
    """Test files of a copy that import the module, that of its name first, then those of its package, then the shortest."""
    module = ".".join(file.relative_to("src").with_suffix("").parts).removesuffix(".__init__")
    package, _, name = module.rpartition(".")
    imported = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    files = [path for path in sorted((root / "tests").rglob("test_*.py")) if "vllm" not in path.parts[-2:-1]]
    beside = root / "tests" / Path(*file.relative_to(SOURCE).parent.parts)
    wanted = [path for path in files if imported.search(path.read_text(encoding="utf-8")) or path.parent == beside]
    wanted.sort(key=lambda path: (path.stem != f"test_{file.stem}", not imported.search(path.read_text(encoding="utf-8")),
                                  path.parent != beside, path.stat().st_size))  # fmt: skip
    return [path.relative_to(root) for path in wanted]


def verdict(copy: Path, tests: list[Path] | list[str], limit: int) -> str:
    """`survives`, or the test that failed, of a child that runs the tests of the copy."""
    said = copy / "said.txt"
    child = os.fork()
    if child == 0:
        os.setsid()
        with said.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            os.chdir(copy)
            os.environ["PYTHONPATH"] = str(copy / "src")
            sys.path.insert(0, str(copy / "src"))
            import pytest

            arguments = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "--timeout", "120", "-o", "addopts="]
            arguments.append("--doctest-modules")
            code = pytest.main([*arguments, "--import-mode=importlib", *map(str, tests)])
            out.flush()
            os._exit(code)
    begin = time.monotonic()
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() - begin > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "took too long"
        time.sleep(0.2)
    text = said.read_text(errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, flags=re.MULTILINE)
    code = os.waitstatus_to_exitcode(done[1])
    if code in (0, 5):
        return "survives"
    return failed[0].rpartition("/")[2] if failed else f"ended with {code}"


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="other faults (default: 0)")
    parser.add_argument("--count", type=int, default=4, help="in each package (default: 4)")
    parser.add_argument("--only", nargs="+", default=[], help="packages, or faults by name")
    parser.add_argument("--wide", action="store_true", help="run all test files that import the module")
    parser.add_argument("--tests", nargs="+", help="run these, slow ones too")
    parser.add_argument("--list", action="store_true", help="show the faults and run nothing")
    parser.add_argument("--limit", type=int, default=600, help="seconds for the tests of a fault (default: 600)")
    options = parser.parse_args()
    planted = [fault for package in PACKAGES for fault in faults(package, options.count, options.seed)]
    planted = [one for one in planted if not options.only or {one.name, one.name.split(":")[0]} & set(options.only)]
    if not options.list:
        import torch
        import transformers  # noqa: F401

        torch.set_num_threads(1)
    print("| fault | place | before | after | noticed by |\n|---|---|---|---|---|")
    survived = 0
    with tempfile.TemporaryDirectory(prefix="groupwise-faults-") as scratch:
        copy = Path(scratch, "copy")
        copy.mkdir()
        if not options.list:
            for name in PARTS:
                (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(ROOT / name, copy / name)
        for fault in planted:
            noticed = ""
            if not options.list:
                tests, whole = tests_of(copy, fault.file), (copy / fault.file).read_bytes()
                (copy / fault.file).write_bytes(whole[: fault.begin] + fault.after.encode() + whole[fault.end :])
                chosen = tests if options.wide else tests[:NARROW]
                chosen = [*options.tests, "-m", "slow or not slow"] if options.tests else chosen
                noticed = verdict(copy, [fault.file, *chosen], options.limit)
                (copy / fault.file).write_bytes(whole)
            survived += noticed == "survives"
            before, after = (" ".join(text.replace("|", "\\|").split())[:90] for text in (fault.before, fault.after))
            place = f"{fault.file.relative_to(SOURCE)}:{fault.line}"
            print(f"| {fault.name} | {place} | `{before}` | `{after}` | {noticed} |", flush=True)
    print(f"\n{len(planted)} faults, {survived} survive")


if __name__ == "__main__":
    main()
