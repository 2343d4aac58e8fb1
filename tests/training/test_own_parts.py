"""Parts from a user's file in whole runs: a row of one's own, a credit that has groups replaced, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from groupwise.config.recipes import load_recipe
from groupwise.errors import ConfigError
from groupwise.runs.run import train

PARTS = """
from dataclasses import replace

from groupwise.algorithms.table import ALGORITHMS

looked_at = []


def not_the_first(groups):
    # 0 for the first two prompts
    advantages = []
    for group in groups:
        looked_at.append(group.prompt.id)
        refused = group.prompt.id in list(dict.fromkeys(looked_at))[:2]
        advantages.append([0.0 if refused else reward - 1.5 for reward in group.reward])
    return advantages


def surrogate(terms, *, width: float = 0.5):
    return -terms.advantage_M * terms.logp_M + terms.log_ratio_M.square() / width


MINE = replace(ALGORITHMS["grpo"], name="mine", surrogate=surrogate)
VALUED = replace(ALGORITHMS["ppo"], name="valued", truncated="mask")
NOT_ONE = {}
"""
JUDGE = "def judge(completions, **_):\n    return [float(len(text) % 3) for text in completions]\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_recipe: Callable) -> Callable[..., list]:
    """`recipe(name, **changes)` -> the steps of a run beside files of one's own; the module has a name that no test had before."""
    monkeypatch.chdir(tmp_path)
    module = f"parts_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(PARTS)
    (tmp_path / "judges.py").write_text(JUDGE)

    names = iter("abc")

    def run(**changes: object) -> list:
        text = write_recipe(tmp_path, next(names), steps=2, **changes).read_text().replace("PARTS", module)
        (tmp_path / "run.yaml").write_text(text)
        return list(train(load_recipe(tmp_path / "run.yaml")))

    return run


@pytest.mark.slow
def test_a_row_of_one_s_own_is_trained(recipe: Callable) -> None:
    own, same = recipe(objective="PARTS:MINE"), recipe(group={"surrogate": "PARTS:surrogate"})
    assert [step.metrics["loss"] for step in own] == [step.metrics["loss"] for step in same]
    assert [step.metrics["grad_norm"] for step in own] == [step.metrics["grad_norm"] for step in same]


def test_a_program_that_has_switched_gradients_off_trains_all_the_same(recipe: Callable) -> None:
    with torch.set_grad_enabled(False):
        steps = recipe(objective="ppo", group={"group_size": 2, "beta": 0.1})
        assert not torch.is_grad_enabled()
    assert all(step.metrics["grad_norm"] > 0 for step in steps)


@pytest.mark.slow
def test_a_row_of_one_s_own_gets_its_critic(recipe: Callable) -> None:
    assert all("value/mean" in step.metrics for step in recipe(objective="PARTS:VALUED", group={"group_size": 1}))


@pytest.mark.slow
def test_a_credit_decides_which_groups_are_replaced(recipe: Callable) -> None:
    """The first two prompts are refused, so the first step draws two more; from then on everything is kept."""
    first, second = recipe(group={"dead_groups": "refill", "credit": "PARTS:not_the_first"})
    assert (first.metrics["prompts"], second.metrics["prompts"]) == (5, 3)
    assert len(first.groups) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": "PARTS:NOT_ONE"}, "is not an Algorithm but dict"),
        ({"objective": "PARTS:MISSING"}, "has no 'MISSING'; there are: not_the_first, surrogate"),
    ],
)
def test_what_cannot_be_used_is_refused(changes: dict, said: str, recipe: Callable) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(**changes)
