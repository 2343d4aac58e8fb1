"""Faults: each test injects one and says how the run must end.  `@pytest.mark.fault(case, injected, outcome)` names it.

After the tests their table is printed: case, what was injected, the exit code, the outcome, and whether it came.  With
`--fault-page FILE` the table, and beside it what TRL does under 38 faults, become that page, if all tests ran and passed.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from groupwise import errors

JUDGE = """
import pathlib
def judge(completion_ids, **_):
    mark = pathlib.Path("raise")
    if mark.exists():
        raise eval(mark.read_text())
    return [float(sum(ids) % 5) for ids in completion_ids]
"""


@pytest.fixture
def recipe(write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`recipe(name, **changes)`: a GRPO run of 4 steps, saved after the last only; its reward raises what a file `raise` holds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGE)
    own: dict[str, Any] = {"runs": "runs", "save": {"every": 0}, "data": {"limit": 32}}
    return lambda name, **changes: write_recipe(tmp_path, name, **(own | changes))


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Row:
    """A fault and how it ended."""

    case: str
    injected: str
    outcome: str
    status: str
    """Exit code of the command; a dash where the run continues to its end, or no command is involved."""
    passed: bool


def status_of(outcome: str, seen: dict[str, Any]) -> str:
    """The exit code that a test saw, else that of the error class which the outcome names."""
    if "exit" in seen:
        return str(seen["exit"])
    named = re.search(r"\b[A-Z]\w+Error\b|\bDiverged\b|\bEnded\b", outcome)
    code = getattr(getattr(errors, named[0], None), "exit_code", None) if named else None
    return "-" if code is None else str(code)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-page", metavar="FILE", help="write the table of faults there, if all of them ended as they must")


def rows_of(session: pytest.Session) -> list[Row]:
    """One row a fault; several tests of one fault are one row."""
    found: dict[tuple[str, str], Row] = {}
    for item in getattr(session, "items", ()):  # with xdist the workers have them
        if (mark := item.get_closest_marker("fault")) is None:
            continue
        case, injected, outcome = (*mark.args, *("",) * 3)[:3]
        reports = getattr(item, "fault_reports", [])
        passed = bool(reports) and all(report.passed for report in reports)
        status = status_of(outcome, dict(item.user_properties))
        before = found.get((case, injected))
        if before is not None:
            passed, status = passed and before.passed, before.status if before.status != "-" else status
        found[case, injected] = Row(case, injected, outcome, status, passed)
    return list(found.values())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    outcome = yield
    item.__dict__.setdefault("fault_reports", []).append(outcome.get_result())


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    session = terminalreporter._session
    rows = rows_of(session)
    if not rows:
        return
    write = terminalreporter.write_line
    wide = max(len(row.case) for row in rows)
    terminalreporter.section("faults")
    for row in rows:
        write(f"{row.case:{wide}}  {row.injected} -> exit {row.status}: {row.outcome}{'' if row.passed else '  [NOT SO]'}")
    good = sum(row.passed for row in rows)
    write(f"{good} of {len(rows)} faults end as they must; of TRL's 38 see docs/reliability.md")
    if (page := config.getoption("--fault-page")) is not None:
        if exitstatus or good < len(rows):
            write(f"{page} was not written: not all ended as they must")
        else:
            found = importlib.util.spec_from_file_location("fault_page", Path(__file__).with_name("page.py"))
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
            Path(page).write_text(module.page_of(rows), encoding="utf-8")
            write(f"{page}: written")
