"""Faults: each test injects one and says how the run must end.  `@pytest.mark.fault(case, injected, outcome)` names it.

After the tests a table is printed: case, what was injected, the exit code, the outcome, and whether it came.  With
`--fault-page FILE` it becomes the first table of that page, if all tests ran and passed; the rest of the page is kept.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from groupwise import errors
from groupwise.config.recipes import load_recipe
from groupwise.runs.run import train

JUDGE = """
import pathlib
def judge(completion_ids, **_):
    mark = pathlib.Path("raise")
    if mark.exists():
        raise eval(mark.read_text())
    return [float(sum(ids) % 5) for ids in completion_ids]
"""

OWN: dict[str, Any] = {"runs": "runs", "save": {"every": 0}, "data": {"limit": 32}}


@pytest.fixture
def recipe(write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`recipe(name, **changes)`: a GRPO run of 4 steps, saved after the last only; its reward raises what a file `raise` holds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGE)
    return lambda name, **changes: write_recipe(tmp_path, name, **(OWN | changes))


@pytest.fixture(scope="session")
def trained(write_recipe: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`trained(steps, stop)`: where `runs/r` is that run, to its end or saved after step `stop`; one for all tests."""

    @cache
    def of(steps: int, stop: int | None = None) -> Path:
        folder = tmp_path_factory.mktemp("trained")
        (folder / "judges.py").write_text(JUDGE)
        save = {} if stop is None else {"save": {"every": 1}}
        path = write_recipe(folder, "r", **(OWN | {"steps": steps} | save))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for step in train(load_recipe(path)):
                if step.number == stop:
                    break
        return folder

    return of


@pytest.fixture
def finished_run(recipe: Callable[..., Path], trained: Callable[..., Path], tmp_path: Path) -> Callable[[int], Path]:
    """`finished_run(steps)`: the recipe of a run `r` that has been trained to its end."""

    def copied(steps: int) -> Path:
        shutil.copytree(trained(steps) / "runs", tmp_path / "runs")
        return recipe("r", steps=steps)

    return copied


@pytest.fixture
def begun_run(recipe: Callable[..., Path], trained: Callable[..., Path], tmp_path: Path) -> Callable[[int], Path]:
    """`begun_run(steps)`: the recipe of a run `r` of which all steps but the last have been taken, each of them saved."""

    def copied(steps: int) -> Path:
        shutil.copytree(trained(steps, steps - 1) / "runs", tmp_path / "runs")
        return recipe("r", steps=steps, save={"every": 1})

    return copied


@pytest.fixture
def straight(trained: Callable[..., Path]) -> Path:
    """The folder of a run to the end of its four steps, to which nothing happened."""
    return trained(4) / "runs" / "r"


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


def passed(item: pytest.Item) -> bool:
    """True if a test was run, and every part of it went well."""
    reports = getattr(item, "fault_reports", [])
    return bool(reports) and all(report.passed for report in reports)


def rows_of(session: pytest.Session) -> list[Row]:
    """One row a fault; several tests of one fault are one row."""
    found: dict[tuple[str, str], Row] = {}
    for item in getattr(session, "items", ()):  # with xdist the workers have them
        if (mark := item.get_closest_marker("fault")) is None:
            continue
        case, injected, outcome = (*mark.args, *("",) * 3)[:3]
        good, status = passed(item), status_of(outcome, dict(item.user_properties))
        before = found.get((case, injected))
        if before is not None:
            good, status = good and before.passed, before.status if before.status != "-" else status
        found[case, injected] = Row(case, injected, outcome, status, good)
    return list(found.values())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    outcome = yield
    item.__dict__.setdefault("fault_reports", []).append(outcome.get_result())


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    rows, write = rows_of(terminalreporter._session), terminalreporter.write_line
    if rows:
        wide = max(len(row.case) for row in rows)
        terminalreporter.section("faults")
        for row in rows:
            write(f"{row.case:{wide}}  {row.injected} -> exit {row.status}: {row.outcome}{'' if row.passed else '  [NOT SO]'}")
        write(f"{sum(row.passed for row in rows)} of {len(rows)} faults end as they must")
    if (place := config.getoption("--fault-page")) is not None:
        if exitstatus or not all(row.passed for row in rows):
            write(f"{place} was not written: not all ended as they must")
        else:
            page = Path(__file__).with_name("outcomes.md").read_text(encoding="utf-8")
            Path(place).write_text(page_of(page, rows), encoding="utf-8")
            write(f"{place}: written")


def page_of(page: str, rows: list[Row]) -> str:
    """outcomes.md with these rows in its first table."""
    rule = "|---|---|---|---|\n"
    head, _, rest = page.partition(rule)
    behind = rest.partition("\n\n")[2]
    lines = [f"| {row.case} | {cell(row.injected)} | {row.status} | {cell(row.outcome)} |\n" for row in rows]
    return f"{head}{rule}{''.join(lines)}\n{behind}"


def cell(text: str) -> str:
    """Text inside a table of Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;")
