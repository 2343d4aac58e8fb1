"""Recorded steps: what is written is read back, old steps share files, and no crash at any moment loses one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from groupwise.data.rollout_table import columns_of, groups_of
from groupwise.errors import DataError
from groupwise.records import Finish, Prompt, Rollout, Sampling, Scored, Step
from groupwise.runs import recorded


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
    group = Scored(rollouts=rollouts, names=("judge",), rewards=rewards, reward=rewards[:, 0], weights=(1.0,), signals=signals)
    return Step(
        number=number,
        metrics={},
        groups=[group],
        advantages=[[np.zeros(2), np.ones(2)]],
        current_logp=[[np.zeros(0), np.full(2, -0.5, np.float32)]],
        columns={"entropy": [[np.zeros(0), np.array([0.25, number], np.float32)]], "weight": [[np.zeros(0), np.array([0.5, 0.0])]]},
    )


def fill(folder: Path, numbers: range, **keywords: bool) -> None:
    for number in numbers:
        recorded.write(folder, step(number, **keywords), "a run")


def said(folder: Path) -> dict[int, list[str]]:
    return {number: recorded.table(folder, number).column("completion_text").to_pylist() for number in recorded.places(folder)}


def expected(numbers: range) -> dict[int, list[str]]:
    return {number: [f"{number} 0", f"{number} 1"] for number in numbers}


def test_the_columns_of_the_updates_are_read_back(tmp_path: Path) -> None:
    recorded.write(tmp_path, step(3), "a run")
    table = recorded.table(tmp_path, 3)
    assert table.column("run").to_pylist() == ["a run", "a run"]
    assert table.column("step").to_pylist() == [3, 3]
    found = columns_of(table)
    assert found["entropy"][0][0].size == 0
    np.testing.assert_array_equal(found["entropy"][0][1], np.array([0.25, 3], np.float32))
    assert found["entropy"][0][1].dtype == np.float32
    np.testing.assert_array_equal(found["weight"][0][1], [0.5, 0.0])
    assert groups_of(table)[0][0].rollouts[1].text == "3 1"


def test_columns_can_be_asked_for_and_a_missing_one_is_left_out(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 9))
    recorded.pack(tmp_path, 4)
    for number in (2, 8):
        assert recorded.table(tmp_path, number, ["reward"]).column_names == ["reward"]


def test_old_steps_share_a_file_and_new_ones_do_not(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 8))
    recorded.pack(tmp_path, 4)
    assert len(list(tmp_path.iterdir())) == 7, "fewer than twice as many: nothing is to be done"
    fill(tmp_path, range(8, 10))
    recorded.pack(tmp_path, 4)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000001-000004-1.parquet", *(f"{n:06d}.parquet" for n in range(5, 10))]
    assert said(tmp_path) == expected(range(1, 10))
    assert pq.ParquetFile(tmp_path / names[0]).num_row_groups == 4


def test_steps_at_a_distance_keep_their_numbers(tmp_path: Path) -> None:
    for number in (5, 10, 15, 20, 25, 30):
        recorded.write(tmp_path, step(number), "a run")
    recorded.pack(tmp_path, 3)
    assert (tmp_path / "000005-000015-5.parquet").exists()
    assert list(recorded.places(tmp_path)) == [5, 10, 15, 20, 25, 30]
    assert recorded.table(tmp_path, 10).column("step").to_pylist() == [10, 10]


def test_steps_with_other_columns_are_not_put_together(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 4))
    fill(tmp_path, range(4, 7), signal=True)
    fill(tmp_path, range(7, 13))
    recorded.pack(tmp_path, 6)
    assert {path.name for path in tmp_path.iterdir()} >= {"000001-000003-1.parquet", "000004-000006-1.parquet"}
    assert said(tmp_path) == expected(range(1, 13))
    assert "signals/reference_logp" in recorded.table(tmp_path, 5).column_names
    assert "signals/reference_logp" not in recorded.table(tmp_path, 2).column_names


@pytest.mark.parametrize("done", [0, 2, 4, 6, 9])
def test_what_was_written_behind_a_checkpoint_is_taken_away(tmp_path: Path, done: int) -> None:
    fill(tmp_path, range(1, 9))
    recorded.pack(tmp_path, 4)
    recorded.cut(tmp_path, done)
    assert said(tmp_path) == expected(range(1, min(done, 8) + 1))
    fill(tmp_path, range(done + 1, 14))
    recorded.pack(tmp_path, 4)
    assert list(said(tmp_path)) == list(range(1, 14)) if done < 9 else True


class Killed(BaseException):
    """What a kill at this point would look like to the code that is cut off."""


def crashes() -> Iterator[int]:
    """The calls that change a folder, one after the other: a crash before each of them."""
    yield from range(12)


@pytest.mark.parametrize("at", crashes())
@pytest.mark.parametrize("work", ["pack", "cut"])
def test_no_crash_loses_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, work: str) -> None:
    """Before each rename and each removal, the process dies; what was to stay is whole, and doing it again finishes it."""
    fill(tmp_path, range(1, 9))
    if work == "cut":
        recorded.pack(tmp_path, 4)
    left, real_replace, real_unlink = [at], os.replace, Path.unlink

    def dying(real):
        def call(*given, **keywords):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return real(*given, **keywords)

        return call

    died = False
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", dying(real_replace))
        patched.setattr(Path, "unlink", dying(real_unlink))
        try:
            recorded.pack(tmp_path, 4) if work == "pack" else recorded.cut(tmp_path, 2)
        except Killed:
            died = True
    kept = range(1, 9) if work == "pack" else range(1, 3)
    found = said(tmp_path)
    assert {number: found[number] for number in kept} == expected(kept)
    assert all(found[number] == expected(range(1, 9))[number] for number in found), "nothing is there in part"
    if work == "pack":
        recorded.pack(tmp_path, 4)
        fill(tmp_path, range(9, 17))
        recorded.pack(tmp_path, 4)
        assert said(tmp_path) == expected(range(1, 17))
    else:
        recorded.cut(tmp_path, 2)
        assert said(tmp_path) == expected(range(1, 3))
    assert died or at >= 6


def test_what_a_crash_left_under_a_temporary_name_is_no_step(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 3))
    (tmp_path / ".000003.parquet.77").write_bytes(b"PAR1 half")
    (tmp_path / "notes.txt").write_text("mine")
    assert list(recorded.places(tmp_path)) == [1, 2]


def test_a_step_that_is_not_there_and_one_that_is_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds none"):
        recorded.table(tmp_path, 1)
    fill(tmp_path, range(1, 3))
    with pytest.raises(DataError, match=r"step 9 .* holds steps 1 to 2"):
        recorded.table(tmp_path, 9)
    (tmp_path / "000002.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="damaged"):
        recorded.table(tmp_path, 2)
