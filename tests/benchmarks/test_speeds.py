"""The speeds that plans take are those of the benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.runs.measured_speeds import MEASURED


def test_the_table_of_speeds_is_made_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import speeds

    assert list(MEASURED) == speeds.measured()
