"""SIGKILL at random moments.  A few here; as many as one likes by `python tests/faults/kill_runs.py --kills 200`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import ConfigError
from groupwise.rewards.code import proved_isolation
from groupwise.runs.metrics_log import read_metrics


@pytest.mark.slow
@pytest.mark.fault("C2", "kill -9 at random moments, half of them inside a save", "resumed by itself to the same bits")
@pytest.mark.parametrize(("kinds", "kills"), [("grpo,dpo", "4"), ("sharded", "2")])
def test_c2_killed_runs_come_to_the_same_bits(kinds: str, kills: str, tmp_path: Path, forked: Any) -> None:
    """Twice each, once of them inside a save."""
    script = Path(__file__).with_name("kill_runs.py").read_text(encoding="utf-8")
    ended = forked.run("--kills", kills, "--steps", "8", "--kinds", kinds, "--folder", tmp_path / "killed", code=script)
    assert ended.returncode == 0, ended.said
    assert "every run came to the same bits" in ended.said


@pytest.mark.slow
def test_c2_a_killed_run_with_programs_comes_to_the_same_bits(tmp_path: Path, forked: Any) -> None:
    try:
        proved_isolation()
    except ConfigError as error:
        pytest.skip(str(error))
    script = Path(__file__).with_name("kill_runs.py").read_text(encoding="utf-8")
    ended = forked.run("--kills", "3", "--steps", "200", "--kinds", "programs", "--folder", tmp_path / "killed", code=script)
    assert ended.returncode == 0, ended.said
    assert "every run came to the same bits" in ended.said
    worth = [line["rewards/code/mean"] for line in read_metrics(tmp_path / "killed/runs/programs-straight")]
    assert len(worth) == 200 and max(worth) > 0.0 and min(worth) < 1.0, "the programs differ in their worth"


@pytest.mark.slow
def test_c2_a_killed_run_with_a_judge_comes_to_the_same_bits(tmp_path: Path, forked: Any) -> None:
    script = Path(__file__).with_name("kill_runs.py").read_text(encoding="utf-8")
    fixtures = Path(__file__).parents[1] / "fixtures"
    first = f"import sys; sys.path.append({str(fixtures)!r})"
    told = ("--kills", "3", "--steps", "30", "--kinds", "judge", "--folder", tmp_path / "killed")
    ended = forked.run(*told, code=script, first=first)
    assert ended.returncode == 0, ended.said
    assert "every run came to the same bits" in ended.said
    for name in ("judge-straight", "judge-killed"):
        lines = read_metrics(tmp_path / "killed/runs" / name)
        assert len(lines) == 30
        for line in lines:
            assert line["log/judge_calls"] == 1.0 and line["log/judge_failed"] == 0.0
            assert 0.0 < line["rewards/judge/mean"] < 1.0, "the completions differ in their worth"
