"""Recorded steps: what is written is read back, and what is none is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from groupwise.errors import DataError, RunError
from groupwise.records import Finish, Prompt, Rollout, RolloutGroup, Sampling, Step
from groupwise.runs import rollout_files
from groupwise.runs.rollout_table import columns_of, groups_of
from groupwise.runs.run_files import RunFiles


def step(number: int, *, signal: bool = False) -> Step:
    prompt = Prompt(id=f"0/{number}", tokens=np.array([1, 2]), text=f"prompt {number}", row={})
    rollouts = tuple(
        Rollout(
            prompt=prompt,
            index=i,
            tokens=np.array([5, number]),
            behavior_logp=np.array([-1.0, -number], np.float32),
            finish=Finish.LENGTH,
            eos_ids=(0,),
            sampling=Sampling(),
            text=f"{number} {i}",
            trained=np.ones(2, bool),
            version=np.full(2, number),
        )
        for i in range(2)
    )
    rewards = np.array([[0.0], [float(number)]])
    signals = {"reference_logp": tuple(-np.ones(2, np.float32) for _ in rollouts)} if signal else {}
    group = RolloutGroup(
        rollouts=rollouts, names=("judge",), rewards=rewards, reward=rewards[:, 0], weights=(1.0,), signals=signals
    )
    return Step(
        number=number,
        metrics={},
        groups=[group],
        advantages=[[np.zeros(2), np.ones(2)]],
        current_logp=[[np.zeros(0), np.full(2, -0.5, np.float32)]],
        columns={"entropy": [[np.zeros(0), np.array([0.25, number], np.float32)]], "weight": [[np.zeros(0), np.array([0.5, 0.0])]]},
    )


def fill(run: RunFiles, numbers: range, **keywords: bool) -> None:
    for number in numbers:
        rollout_files.write(run, "rollouts", step(number, **keywords), "a run")


def test_the_columns_of_the_updates_are_read_back(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    rollout_files.write(run, "rollouts", step(3), "a run")
    table = rollout_files.table(run, 3)
    assert table.column("run").to_pylist() == ["a run", "a run"]
    assert table.column("step").to_pylist() == [3, 3]
    found = columns_of(table)
    assert found["entropy"][0][0].size == 0
    np.testing.assert_array_equal(found["entropy"][0][1], np.array([0.25, 3], np.float32))
    assert found["entropy"][0][1].dtype == np.float32
    np.testing.assert_array_equal(found["weight"][0][1], [0.5, 0.0])
    assert groups_of(table)[0][0].rollouts[1].text == "3 1"


def test_columns_can_be_asked_for_and_a_missing_one_is_left_out(tmp_path: Path) -> None:
    fill(RunFiles(tmp_path), range(1, 3))
    assert rollout_files.table(RunFiles(tmp_path), 2, ["reward", "nothing"]).column_names == ["reward"]


def test_steps_behind_one_are_taken_away(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    fill(run, range(1, 8))
    rollout_files.cut(run, "rollouts", 4)
    assert rollout_files.steps(run) == ({n: f"rollouts/{n:06d}.parquet" for n in range(1, 5)}, [])
    rollout_files.cut(run, "evaluations", 4)
    assert rollout_files.steps(run, "evaluations") == ({}, [])


def test_steps_that_share_a_file_are_refused_in_words(tmp_path: Path) -> None:
    """Version 0.2 put old steps together."""
    run = RunFiles(tmp_path)
    fill(run, range(101, 103))
    (tmp_path / "rollouts" / "000001-000100-1.parquet").write_bytes(b"")
    assert list(rollout_files.steps(run)[0]) == [101, 102]
    with pytest.raises(DataError, match=r"step 7 are not in .*holds steps 101 to 102\); .*000001-000100-1.parquet.* version 0.2"):
        rollout_files.table(run, 7)


def test_a_file_of_another_step_is_named(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    fill(run, range(1, 3))
    (tmp_path / "checksums.txt").unlink()
    (tmp_path / "rollouts" / "000001.parquet").rename(tmp_path / "rollouts" / "000005.parquet")
    with pytest.raises(RunError, match=r"000005.parquet holds the completions of another step"):
        rollout_files.table(run, 5)
