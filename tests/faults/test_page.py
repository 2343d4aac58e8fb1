"""tests/faults/outcomes.md says of each fault what its test says."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

HERE = Path(__file__).parent
found = importlib.util.spec_from_file_location("fault_page", HERE / "page.py")
assert found is not None and found.loader is not None
module = importlib.util.module_from_spec(found)
found.loader.exec_module(module)
TRL = module.TRL


def marks(name: str) -> list[tuple]:
    """The arguments of every mark of this name in these tests."""
    found = []
    for file in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                found.append(tuple(ast.literal_eval(argument) for argument in node.args))
    return found


def test_the_page_has_every_fault() -> None:
    page = (HERE / "outcomes.md").read_text(encoding="utf-8")
    found = marks("fault")
    assert len(found) > 20
    missing = [
        case
        for case, injected, _ in found
        if f"| {case} | {injected.replace('|', chr(92) + '|').replace('<', '&lt;')} |" not in page
    ]
    assert not missing, f"tests/faults/outcomes.md lacks {missing}: make test-faults"


def test_each_of_trls_faults_has_a_test_and_a_row() -> None:
    page, faults = (HERE / "outcomes.md").read_text(encoding="utf-8"), TRL
    outcomes = {number: text for number, *outcome in marks("trl") for text in outcome}
    assert sorted(outcomes) == list(range(1, len(faults) + 1))
    assert {number for number, *_ in marks("trl")} == set(outcomes)
    missing = [
        number
        for number, (injected, theirs) in enumerate(faults, start=1)
        if f"| {number} | {injected} | {theirs} | {outcomes[number]} |" not in page
    ]
    assert not missing, f"tests/faults/outcomes.md lacks {missing} of TRL's: make test-faults"
