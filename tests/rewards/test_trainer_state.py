"""What reward functions log comes back with their rewards, from wherever they run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import groupwise as gw
from groupwise.config.settings import RewardSettings
from groupwise.errors import RewardError
from groupwise.records import RolloutGroup, Step
from groupwise.rewards.compose import LiveReward, build_rewards
from groupwise.rewards.trainer_state import Notes, TrainerState
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.rollout_files import read_step
from groupwise.runs.rollout_table import groups_of, table_of

OWN = """\
import numpy as np

def several(completions, log_metric, log_extra, trainer_state):
    log_metric("parsed", np.float32(0.5))
    log_metric("parsed", 1)
    log_extra("length", np.array([len(text) for text in completions]))
    return [float(trainer_state.global_step)] * len(completions)

def one(completion, log_metric, log_extra):
    log_metric("chars", len(completion))
    if completion:
        log_extra("first", completion[0])
    return 0.0

async def waits(completions, log_extra):
    log_extra("seen", completions)
    return [1.0] * len(completions)

async def waits_one(completion, log_metric):
    log_metric("waited", 2.0)
    return 1.0

def plain(completions, **kwargs):
    assert not {"log_metric", "log_extra", "trainer_state"} & set(kwargs)
    return [0.0] * len(completions)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rollouts(scored_group: Callable[..., RolloutGroup]) -> list:
    groups = [scored_group([0.0, 0.0], [2, 3], id="0/0"), scored_group([0.0, 0.0], [4, 5], id="0/1")]
    return [group.rollouts for group in groups]


def scored(names: list, groups: list, step: int = 0) -> list[RolloutGroup]:
    settings = [RewardSettings(function=name) if isinstance(name, str) else name for name in names]
    with build_rewards(settings, columns=[]) as rewards:
        rewards.state = TrainerState(global_step=step, max_steps=9)
        return rewards.score(groups)


def test_workers_send_what_was_logged(own: Path, scored_group: Callable[..., RolloutGroup]) -> None:
    groups = rollouts(scored_group)
    names = ["own.py:several", "own.py:one", "own.py:waits", "own.py:waits_one", "own.py:plain"]
    found = scored(names, groups, step=7)
    texts = [[rollout.text for rollout in group] for group in groups]
    for group, said in zip(found, texts, strict=True):
        assert group.logged == pytest.approx(
            {"parsed": 0.75, "chars": np.mean([len(t) for ts in texts for t in ts]), "waited": 2.0}
        )
        assert group.extra == {
            "length": tuple(len(text) for text in said),
            "first": tuple(text[0] if text else None for text in said),
            "seen": tuple(said),
        }
        assert group.rewards[:, 0].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("runs", ["fork", "here"])
def test_functions_that_are_given_themselves_log_too(runs: str, scored_group: Callable[..., RolloutGroup]) -> None:
    def live(completions: list[str], log_metric: Callable, trainer_state: TrainerState) -> list[float]:
        log_metric("last", trainer_state.max_steps)
        return [0.0] * len(completions)

    found = scored([LiveReward(function=live, runs=runs)], rollouts(scored_group))  # type: ignore[arg-type]
    assert [group.logged for group in found] == [{"last": 9.0}] * 2


def test_a_logged_number_that_is_not_finite_is_left_out_of_the_mean(own: Path, scored_group: Callable[..., RolloutGroup]) -> None:
    text = """
def odd(completions, log_metric):
    for value in (1.0, float("nan"), 2.0, float("inf")):
        log_metric("some", value)
    log_metric("none", float("nan"))
    return [0.0] * len(completions)
"""
    (own / "odd.py").write_text(text)
    found = scored(["odd.py:odd"], rollouts(scored_group))
    for group in (*found, *groups_of(table_of(Step(number=1, metrics={}, groups=found)))[0]):
        assert group.logged["some"] == 1.5
        assert math.isnan(group.logged["none"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("log_metric('a', 'x')", "could not convert"),
        ("log_metric(3, 1.0)", "takes a name, got 3"),
        ("log_extra('a', [1])", "takes 4 values, one for each completion, got 1"),
        ("log_extra('a', 'text')", "takes a list"),
    ],
)
def test_what_cannot_be_logged_ends_the_call(own: Path, scored_group: Callable[..., RolloutGroup], body: str, said: str) -> None:
    (own / "bad.py").write_text(f"def bad(completions, log_metric, log_extra):\n    {body}\n    return [0.0] * len(completions)\n")
    with pytest.raises(RewardError, match=said):
        scored(["bad.py:bad"], rollouts(scored_group))


def test_two_functions_cannot_log_one_column(own: Path, scored_group: Callable[..., RolloutGroup]) -> None:
    text = "def {}(completions, log_extra):\n    log_extra('same', completions)\n    return [0.0] * len(completions)\n"
    (own / "two.py").write_text(text.format("first") + text.format("second"))
    with pytest.raises(RewardError, match="'second' logs the column 'same', which another one logs"):
        scored(["two.py:first", "two.py:second"], rollouts(scored_group))


def test_what_is_logged_survives_the_table(scored_group: Callable[..., RolloutGroup]) -> None:
    import dataclasses

    plain = scored_group([0.0, 1.0], [2, 3], id="0/0")
    noted = dataclasses.replace(plain, logged={"a": 0.5}, extra={"x": ({"b": [1, None]}, "two")})
    (again,), _, _ = groups_of(table_of(Step(number=1, metrics={}, groups=[noted])))
    assert (again.logged, again.extra) == (noted.logged, noted.extra)
    table = table_of(Step(number=1, metrics={}, groups=[noted]))
    assert [json.loads(value) for value in table.column("extra/x").to_pylist()] == list(noted.extra["x"])
    assert not {"logged", "extra/x"} & set(table_of(Step(number=1, metrics={}, groups=[plain])).column_names)


def test_a_single_function_logs_one_value() -> None:
    notes = Notes(1, single=True)
    notes.log_extra("a", "text")
    assert notes.as_json()["columns"] == {"a": ["text"]}


@pytest.mark.slow
def test_a_run_writes_it_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def noted(completions, log_metric, log_extra, trainer_state):  # type: ignore[no-untyped-def]
        log_metric("step", trainer_state.global_step)
        log_extra("chars", [len(text) for text in completions])
        return [float(len(text)) for text in completions]

    training = gw.train(
        objective="grpo", name="noted", steps=3, model={"scratch": {"hidden": 32, "context": 64}}, rewards=noted,
        data=[{"prompt": f"{i}+{i}="} for i in range(6)], group={"prompts_per_step": 2, "group_size": 2},
        rollout={"max_new_tokens": 4}, eval={"at_start": False},
    )  # fmt: skip
    seen = [step.metrics["log/step"] for step in training]
    assert seen == [0.0, 1.0, 2.0]
    assert [line["log/step"] for line in read_metrics(training.folder)] == seen
    table = pq.read_table(training.folder / "rollouts" / "000002.parquet")
    assert table.column("extra/chars").to_pylist() == [str(len(text)) for text in table.column("completion_text").to_pylist()]
    step = read_step(training.folder, 2)
    assert [group.logged for group in step.groups] == [{"step": 1.0}] * 2
    assert not any(math.isnan(value) for value in step.metrics.values())
