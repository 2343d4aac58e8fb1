"""Dashboards: each library, without a network, holds every step once, the groups, and no secret; none of them can end a run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import math
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from groupwise.config.recipes import parse_stages
from groupwise.config.settings import Recipe, SaveSettings
from groupwise.errors import ConfigError
from groupwise.records import Episode, Finish, Prompt, Rollout, RolloutGroup, Sampling, Step, Turn
from groupwise.runs import dashboards
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.run_log import RunLog

SECRET = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"


def a_recipe(*names: str) -> Recipe:
    text = (
        "{objective: grpo, name: demo/grpo, steps: 9, model: {scratch: {}}, data: {task: addition}, "
        f"rewards: [{{function: accuracy, args: {{api_key: {SECRET}}}}}]}}"
    )
    recipe = parse_stages(text, "r.yaml")["grpo"]
    return dataclasses.replace(recipe, save=SaveSettings(report_to=names))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "runs" / "demo" / "grpo"


def group_of(number: int, place: int, rewards: tuple[float, ...]) -> RolloutGroup:
    prompt = Prompt(id=f"{number}/{place}", tokens=np.array([5, 6]), text=f"What is {number} + {place}?")
    rollouts = tuple(
        Rollout(
            prompt=prompt, index=i, tokens=np.array([7, 1]), behavior_logp=np.zeros(2, np.float32), finish=Finish.EOS,
            eos_ids=(1,), sampling=Sampling(), text=f"<b>![x](y)</b> ``` {number} {i}",
        )
        for i in range(len(rewards))
    )  # fmt: skip
    column = np.array(rewards)
    return RolloutGroup(rollouts=rollouts, names=("accuracy",), rewards=column[:, None], reward=column)


def make_step(number: int) -> Step:
    """A dead group, and one whose rewards differ."""
    groups = [group_of(number, 0, (1.0, 1.0)), group_of(number, 1, (0.0, 1.0))]
    metrics = {"reward": number / 10, "rewards/<lambda>/mean": 0.25, "kl": math.nan}
    return Step(number=number, metrics=metrics, timings={"rollout": 1.5}, groups=groups)


def written(folder: Path, recipe: Recipe, numbers: range, done: int = 0, finish: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)  # as the lock does
    with RunLog(folder, recipe, done=done) as log:
        for number in numbers:
            log.write(make_step(number))
        if finish:
            log.finish(numbers[-1])


def in_two_parts(folder: Path, name: str) -> None:
    """Steps 1 to 5, a kill, and 4 to 6 after a resume from step 3."""
    written(folder, a_recipe(name), range(1, 6))
    written(folder, a_recipe(name), range(4, 7), done=3, finish=True)


EXPECTED = [(number, round(number / 10, 4)) for number in range(1, 7)]


# ---------------------------------------------------------------- what they share


def test_the_group_whose_rewards_differ_most_is_sent_best_first() -> None:
    groups = [group_of(1, 0, (1.0, 1.0)), group_of(1, 1, (0.0, math.nan, 1.0)), group_of(1, 2, (0.4, 0.6))]
    found = dashboards.most_telling(groups)
    assert found is groups[1]
    rows = dashboards.rows_of(found)
    assert [row["reward"] for row in rows[:2]] == [1.0, 0.0]
    assert math.isnan(rows[2]["reward"])
    assert rows[0]["rewards/accuracy"] == 1.0
    assert (rows[0]["finish"], rows[0]["tokens"]) == ("eos", 2)
    turn = Turn(begin=0, end=len(found.rollouts[0]), finish=Finish.EOS)
    episode = Episode(turns=(turn,), opening=" Go.", prompt_text="Play. Go.")
    prompted = replace(found.rollouts[0], episode=episode)
    rows = dashboards.rows_of(replace(found, rollouts=(prompted, *found.rollouts[1:])))
    assert [row["prompt"] for row in rows].count("Play. Go.") == 1, "the prompt as the policy saw it"
    assert dashboards.most_telling([group_of(1, 0, (math.nan, math.nan))]) is None
    assert dashboards.most_telling([]) is None


def test_a_missing_library_is_named_with_the_line_that_installs_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else there(name, *rest))
    with pytest.raises(ConfigError, match=r"wandb is not installed: pip install wandb"):
        written(folder, a_recipe("wandb"), range(1, 2))


class Broken:
    """A dashboard whose server goes away at step 2."""

    identity, address = None, "nowhere"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, step: int, wall: float, values: dict[str, float]) -> None:
        if step == 2:
            raise ConnectionError("gone")
        self.steps.append(step)

    def table(self, step: int, rows: Any) -> None:
        pass

    def close(self, finished: bool) -> None:
        raise AssertionError("it was taken away")


def test_a_dashboard_that_fails_is_named_once_and_the_run_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    broken = Broken()
    monkeypatch.setitem(dashboards.BOARDS, "tensorboard", (lambda about: broken, "it goes away"))
    with caplog.at_level(logging.WARNING):
        written(folder, a_recipe("tensorboard"), range(1, 5))
    assert broken.steps == [1]
    assert [record.getMessage() for record in caplog.records if "gone" in record.getMessage()] == [
        "tensorboard failed (ConnectionError: gone) and gets nothing more from this process; metrics.jsonl has everything"
    ]
    assert [line["step"] for line in read_metrics(folder)] == [1, 2, 3, 4]


def test_nothing_is_imported_that_is_not_asked_for(tmp_path: Path) -> None:
    code = (
        "import sys, groupwise.runs.run_log; print([m for m in ('tensorboard', 'wandb', 'mlflow', 'trackio') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# ---------------------------------------------------------------- each library


def test_tensorboard_holds_each_step_once(folder: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    in_two_parts(folder, "tensorboard")
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    assert [(event.step, round(event.value, 4)) for event in board.Scalars("reward")] == EXPECTED
    assert [event.value for event in board.Scalars("time/rollout")] == [1.5] * 6


def test_wandb_offline_holds_each_step_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install -e '.[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["groupwise", f"key={SECRET}"])
    in_two_parts(folder, "wandb")
    identity = json.loads((folder / "dashboards.json").read_text())["wandb"]
    parts = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert all(part.name.endswith(identity) for part in parts)
    records = [record for part in parts for record in wandb_records(next(part.glob("*.wandb")))]
    history = [
        {(".".join(item.nested_key) or item.key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(line["step"], round(line["reward"], 4)) for line in history if "reward" in line] == EXPECTED
    tables = {line["step"]: line for line in history if any(key.startswith("group") for key in line)}
    assert sorted(tables) == [1, 2, 3, 4, 5, 6]
    files = sorted((folder / "wandb").glob("**/media/table/*.json"))
    assert len(files) == 6
    table = json.loads(files[0].read_text())
    assert table["columns"] == ["prompt", "completion", "reward", "rewards/accuracy", "finish", "tokens"]
    assert [row[2] for row in table["data"]] == [1.0, 0.0]
    everything = b"".join(path.read_bytes() for path in (folder / "wandb").rglob("*") if path.is_file())
    assert SECRET.encode() not in everything
    assert b"accuracy" in everything


def wandb_records(path: Path) -> list[Any]:
    """The records of one of wandb's transaction logs: LevelDB's format, blocks of 32 KiB, behind 7 bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # too little for a header
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            found.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return found


def test_mlflow_in_a_local_store_holds_each_step_once(folder: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install -e '.[mlflow]'")
    in_two_parts(folder, "mlflow")
    root = folder.parents[1]
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("groupwise")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo/grpo", "FINISHED")
    assert [(one.step, round(one.value, 4)) for one in client.get_metric_history(run.info.run_id, "reward")] == EXPECTED
    assert len(client.get_metric_history(run.info.run_id, "rewards/_lambda_/mean")) == 6
    assert run.data.params["steps"] == "9"
    assert SECRET not in json.dumps(run.data.params)
    assert [item.path for item in client.list_artifacts(run.info.run_id, "groups")] == [f"groups/{n:06d}.json" for n in range(1, 7)]
    (table,) = (root / "mlflow").glob("**/groups/000003.json")
    assert json.loads(table.read_text())["columns"][:3] == ["prompt", "completion", "reward"]


def test_mlflow_says_that_a_run_was_broken_off(folder: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install -e '.[mlflow]'")
    written(folder, a_recipe("mlflow"), range(1, 3))
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.parents[1] / 'mlflow.db'}")
    identity = json.loads((folder / "dashboards.json").read_text())["mlflow"]
    assert client.get_run(identity).info.status == "KILLED"


def test_a_server_that_does_not_answer_is_refused_with_the_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install -e '.[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"save\.report_to: mlflow could not begin .*MLFLOW_TRACKING_URI"):
        written(folder, a_recipe("mlflow"), range(1, 2))


@pytest.fixture
def in_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Runs Python in a process of its own whose Trackio writes below `tmp_path`: it reads TRACKIO_DIR when it is imported."""
    pytest.importorskip("trackio", reason="trackio is not installed: pip install -e '.[trackio]'")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))

    def run(code: str) -> str:
        head = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_dashboards import *\n"
        found = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        return found.stdout

    return run


def test_trackio_in_its_local_store_holds_each_step_once(folder: Path, tmp_path: Path, in_trackio: Callable[[str], str]) -> None:
    printed = in_trackio(
        f"written(Path({str(folder)!r}), a_recipe('trackio'), range(1, 6))\n"
        f"written(Path({str(folder)!r}), a_recipe('trackio'), range(4, 7), done=3, finish=True)\n"
    )
    assert printed == ""
    (file,) = (tmp_path / "trackio").glob("groupwise*.db")
    with sqlite3.connect(file) as store:
        rows = store.execute("select step, run_name, metrics from metrics order by step, id").fetchall()
    identity = json.loads((folder / "dashboards.json").read_text())["trackio"]
    assert {name for _, name, _ in rows} == {identity}
    lines = [(step, json.loads(text)) for step, _, text in rows]
    assert [(step, round(line["reward"], 4)) for step, line in lines if "reward" in line] == EXPECTED
    tables = [line["group"] for _, line in lines if "group" in line]
    assert len(tables) == 6
    assert "````" in json.dumps(tables[0])
    assert SECRET.encode() not in file.read_bytes()
