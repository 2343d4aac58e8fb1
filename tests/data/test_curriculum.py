"""The order that leaves out what is solved: what comes, how often, and the same after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from groupwise.config.recipes import load_recipe
from groupwise.data.curriculum import Curriculum, Visits
from groupwise.data.order import Order
from groupwise.errors import ConfigError
from groupwise.records import Prompt, RolloutGroup
from groupwise.runs.run import train


def test_a_row_is_retired_behind_so_many_solved_visits_in_a_row() -> None:
    order = Curriculum(4, seed=0, retire=2)
    for rate in (1.0, 0.5, 1.0):
        order.learn(2, rate)
    assert order.retired == 0
    order.learn(2, 1.0)
    assert order.retired == 1
    assert {row for _, row in order.take(30)} == {0, 1, 3}
    assert order.skipped >= 9
    order.learn(2, float("nan"))
    assert order.retired == 1, "a group that could not be scored says nothing"


@pytest.mark.slow
def test_a_row_comes_as_often_as_it_is_not_solved() -> None:
    order = Curriculum(3, seed=5, strength=0.8)
    for row, rate in enumerate((0.0, 0.5, 1.0)):
        order.learn(row, rate)
    epochs: dict[int, int] = {}
    counts = np.zeros(3)
    while order.drawn < 3 * 3000:
        ((epoch, row),) = order.take(1)
        counts[row] += 1
        epochs[epoch] = epochs.get(epoch, 0) + 1
    np.testing.assert_allclose(counts / 3000, [1.0, 1 - 0.4, 1 - 0.8], atol=5 * np.sqrt(0.25 / 3000))
    assert max(epochs.values()) <= 3, "never twice in an epoch"


def test_without_anything_learnt_it_is_the_plain_order() -> None:
    assert Curriculum(7, seed=3, retire=1, strength=1.0).take(30) == Order(7, seed=3).take(30)


def test_when_every_row_is_retired_all_return() -> None:
    order = Curriculum(3, seed=0, retire=1)
    for row in range(3):
        order.learn(row, 1.0)
    assert {row for _, row in order.take(3)} == {0, 1, 2}
    assert order.retired == 0


def test_a_curriculum_continues_from_its_saved_state() -> None:
    def watched(order: Curriculum, k: int) -> list[tuple[int, int]]:
        found = []
        for _ in range(k):
            ((epoch, row),) = order.take(1)
            order.learn(row, 1.0 if row % 3 == 0 else (row % 3) / 3)
            found.append((epoch, row))
        return found

    straight = Curriculum(11, seed=4, retire=2, strength=0.7)
    expected = watched(straight, 60)
    broken = Curriculum(11, seed=4, retire=2, strength=0.7)
    first = watched(broken, 23)
    resumed = Curriculum(11, seed=4, retire=2, strength=0.7)
    resumed.restore(json.loads(json.dumps(broken.state())))
    assert first + watched(resumed, 37) == expected
    assert resumed.state() == straight.state()


def judged(group: RolloutGroup) -> RolloutGroup:
    """The group, its reward being the verdict."""
    return replace(group, verdict="r")


def test_groups_that_refill_drops_are_counted_and_learnt_from(scored_group: Callable) -> None:
    prompts = [Prompt(id=str(row), tokens=np.array([5]), text="") for row in range(3)]
    visits = Visits(prompts, Curriculum(3, seed=0, retire=1))
    dead, live = judged(scored_group([1.0, 1.0], [2, 3], id="0/1")), judged(scored_group([1.0, 0.0], [4, 4], id="0/2"))
    visits.seen([dead])
    visits.seen([live])
    assert visits.account([live]) == {"tokens/discarded": 5.0, "prompts/skipped": 0.0, "prompts/retired": 1.0}
    assert visits.account([]) == {"prompts/skipped": 0.0, "prompts/retired": 1.0}
    assert {row for _, row in visits.order.take(10)} == {0, 2}


def test_a_completion_without_a_reward_is_not_a_solved_one(scored_group: Callable) -> None:
    prompts = [Prompt(id=str(row), tokens=np.array([5]), text="") for row in range(2)]
    visits = Visits(prompts, Curriculum(2, seed=0, retire=1))
    visits.seen([judged(scored_group([1.0, None, None, None], id="0/0")), judged(scored_group([1.0, 1.0], id="0/1"))])
    assert visits.account([])["prompts/retired"] == 1.0
    assert {row for _, row in visits.order.take(6)} == {0}


TREE = {
    "objective": "dapo",
    "steps": 6,
    "data": {"task": "addition", "limit": 8, "eval_limit": 2, "curriculum": 0.9, "retire": 1},
    "rewards": [{"function": "regex", "args": {"pattern": "[0-4]"}}],
    "verdict": "regex",
    "group": {"prompts_per_step": 3, "group_size": 2},
    "rollout": {"max_new_tokens": 4},
}


@pytest.mark.slow
def test_a_run_that_is_broken_off_draws_the_same_prompts(tmp_path: Path, write_recipe: Callable) -> None:
    whole = list(train(load_recipe(write_recipe(tmp_path, "whole", **TREE))))
    assert whole[-1].metrics["prompts/skipped"] > 0
    assert any(step.metrics.get("tokens/discarded", 0) > 0 for step in whole)
    path = write_recipe(tmp_path, "broken", **TREE)
    for step in (steps := train(load_recipe(path))):
        if step.number == 3:
            steps.close()
            break
    rest = list(train(load_recipe(path)))
    for one, other in zip(whole[3:], rest, strict=True):
        assert [group.prompt.id for group in other.groups] == [group.prompt.id for group in one.groups]
        for name in ("prompts", "prompts/skipped", "prompts/retired", "tokens/discarded"):
            assert other.metrics.get(name) == one.metrics.get(name), name
    ours, theirs = (load_file(tmp_path / "runs" / name / "final" / "model.safetensors") for name in ("broken", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_curriculum_needs_rewards_to_go_by(tmp_path: Path, write_recipe: Callable) -> None:
    data = {"task": "addition", "limit": 8, "retire": 2}
    with pytest.raises(ConfigError, match="go by the verdict of sampled completions"):
        load_recipe(write_recipe(tmp_path, "run", objective="sft", data=data, rewards=[], group={}))
    with pytest.raises(ConfigError, match="the reward whose 1 says that a completion is right: name it, verdict: NAME"):
        load_recipe(write_recipe(tmp_path, "run", **(TREE | {"verdict": None})))
