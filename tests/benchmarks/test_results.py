"""Results of benchmarks: a file for each kind of processor, and the page that is made of them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import _machine

    yield _machine
    for name in ("_machine", "report"):
        sys.modules.pop(name, None)


def test_a_result_takes_the_place_of_the_older_one_of_its_name(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "describe", lambda device: {"features": ["avx2"] if device == "cpu" else []})
    for name, value in (("b", 1), ("a", 2), ("b", 3)):
        assert benchmark.save(name, {"value": value}, results=tmp_path) == tmp_path / "avx2.json"
    benchmark.save("b", {"workload": {"device": "cuda"}}, results=tmp_path)
    held = json.loads((tmp_path / "avx2.json").read_text())
    assert [(name, one["value"]) for name, one in held.items()] == [("a", 2), ("b", 3)]
    assert list(json.loads((tmp_path / "gpu.json").read_text())) == ["b"]


def test_kernels_of_the_page_are_those_of_the_library(benchmark: ModuleType) -> None:
    """In the labels and in what is shown: a kernel that gets another name gets it there too."""
    import report

    declared = (FOLDER.parent / "packages" / "groupwise-cpu" / "kernels" / "kernels.h").read_text(encoding="utf-8")
    named = set(re.findall(r"kernels::(\w+)", "\n".join([*report.WHY, report.page()])))
    assert named
    assert named <= set(re.findall(r"^(?:int|void) (\w+)\(", declared, re.MULTILINE))


def test_the_page_of_performance_is_made_of_them(benchmark: ModuleType) -> None:
    import report

    assert report.page() == (FOLDER / "figures.md").read_text(encoding="utf-8")
    assert {path.name for path in (FOLDER / "results").iterdir()} <= {f"{kind}.json" for kind in report.KINDS}
