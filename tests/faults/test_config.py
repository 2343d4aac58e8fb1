"""Recipes that cannot be run: everything that is wrong with one stands in one list, before a folder is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest

from groupwise.algorithms.registry import PARTS, _parameters
from groupwise.cli.commands import main
from groupwise.config import settings
from groupwise.config.recipes import load_recipe
from groupwise.errors import ConfigError
from groupwise.runs.run import Run, train

WRONG = """\
objective: grpo
steps: 4
model: {scratch: {hidden: 32}}
data: {task: addition}
rewards: [{function: accuracy}]
rollout:
  temperature: -1
group:
  group_size: 1
  beta: -0.5
  surrogate:
    name: clipped
    low: -3
    hgih: 0.3
  credit: {name: standardized, eps: -1, beta: 0.1}
optimizer:
  lr: .nan
  betas: [2, 0.9]
"""


@pytest.mark.fault(
    "T35/K4", "epsilon -3, temperature -1, group_size 1, lr nan and five more in one recipe", "ConfigError: one list, by line"
)
def test_k4_everything_wrong_in_one_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(WRONG)
    assert main(["train", "r.yaml"]) == ConfigError.exit_code
    told = capsys.readouterr().err
    assert "9 problems in r.yaml" in told
    for line, says in {
        7: "rollout.temperature must be",
        9: "group.group_size must be at least 2",
        10: "group.beta must be",
        13: "group.surrogate.low: input should be greater than or equal to 0, got -3",
        14: "group.surrogate.hgih: clipped has no such keyword (it takes low, high, delta, dual) (did you mean high?)",
        17: "optimizer.lr must be",
        18: "optimizer.betas",
    }.items():
        assert f"r.yaml:{line}: {says}" in told, told
    assert "r.yaml:15: group.credit.eps: input should be greater" in told
    assert "r.yaml:15: group.credit: beta is a setting of its own, group.beta; got 0.1 here" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.yaml"]


def test_what_parts_take_is_what_the_table_says() -> None:
    """`settings.PART_OPTIONS` is there so that torch need not be; it must say what the functions do."""
    for place, functions in PARTS.items():
        for name, function in functions.items():
            if place == "kl":
                continue
            hints = get_type_hints(function, include_extras=True)
            takes = {key: hints[key] for key in _parameters(function) if not (place == "credit" and key == "beta")}
            assert dict(settings.PART_OPTIONS.get(name, {})) == takes, name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": {"limit": 2}}, "prompts_per_step is 3"),
        ({"rewards": [{"function": "accuracy", "args": {"column": "gold"}}]}, "gold"),
        ({"group": {"surrogate": "nosuch:function"}}, "nosuch"),
        ({"rewards": [{"function": "judges.py:nosuch"}]}, "nosuch"),
    ],
)
@pytest.mark.fault(
    "K4b", "a recipe that is refused only once its data and functions are read", "ConfigError; no folder is left behind"
)
def test_refused_recipes_leave_no_folder(changes: dict, says: str, recipe: Callable) -> None:
    path = recipe("refused", runs="somewhere/new", **changes)
    with pytest.raises(ConfigError, match=says):
        next(iter(train(load_recipe(path))))
    assert not Path("somewhere").exists()


def test_a_folder_that_was_there_stays(recipe: Callable) -> None:
    path = recipe("refused", data={"limit": 2})
    kept = Path("runs/refused")
    kept.mkdir(parents=True)
    with pytest.raises(ConfigError):
        Run(load_recipe(path), kept)
    assert kept.is_dir()
    (kept / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError):
        Run(load_recipe(path), kept)
    assert (kept / "notes.txt").read_text() == "mine"
