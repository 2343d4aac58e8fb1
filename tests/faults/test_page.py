"""docs/reliability.md says of each fault what its test says."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent


def test_the_page_has_every_fault() -> None:
    page = (HERE.parents[1] / "docs" / "reliability.md").read_text(encoding="utf-8")
    found = []
    for file in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fault":
                found.append(tuple(ast.literal_eval(argument) for argument in node.args))
    assert len(found) > 20
    missing = [
        case
        for case, injected, _ in found
        if f"| {case} | {injected.replace('|', chr(92) + '|').replace('<', '&lt;')} |" not in page
    ]
    assert not missing, f"docs/reliability.md lacks {missing}: make test-faults"
