"""The settings as data: names, meanings, ranges, TRL's names."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from groupwise.config import objectives, settings
from groupwise.config.schema import describe, knobs, lookup, reference, settings_table, suggestion
from groupwise.config.trl_names import TRL_KEYS
from groupwise.data.tasks import TASKS, task_class
from groupwise.errors import ConfigError


def test_the_settings_are_these_and_no_others() -> None:
    """A new setting must earn its place: it is added to the list by hand."""
    frozen = (Path(__file__).parent / "settings_names.txt").read_text(encoding="utf-8").split()
    assert knobs() == frozen


def test_every_setting_says_what_it_means_and_what_it_takes() -> None:
    for key, setting in settings_table().items():
        assert setting.meaning.endswith((".", ")", ":")) or setting.section, key
        assert len(setting.meaning) > 10, key
        assert setting.expected, key
        assert setting.section or describe(key).startswith(key)


def test_defaults_are_those_of_the_dataclasses() -> None:
    for name, section in {"rollout": settings.RolloutSettings, "optimizer": settings.OptimizerSettings}.items():
        for field in dataclasses.fields(section):
            assert settings_table()[f"{name}.{field.name}"].default == getattr(section(), field.name)


def test_old_pairs_come_from_the_tasks_that_have_pairs() -> None:
    paired = [name for name in TASKS if hasattr(task_class(name), "pairs")]
    meaning = settings_table()["reward_model.replay.task"].meaning
    assert [name for name in TASKS if f"`{name}`" in meaning] == paired
    assert "Built in" not in meaning


def test_trl_names_lead_to_settings_that_exist() -> None:
    for name, key in TRL_KEYS.items():
        assert key in settings_table(), name
        assert describe(name)


def test_describe_says_all() -> None:
    said = describe("group.group_size").splitlines()
    assert said == [
        "group.group_size",
        "  Completions per prompt (G).",
        "  value    a whole number at least 1 and at most 1000000",
        "  default  8",
        "  TRL      num_generations",
    ]
    assert "one of constant, linear, cosine" in describe("optimizer.schedule")
    assert "none, it must be said" in describe("objective")
    assert "greater than 0 and less than 1" in describe("optimizer.lr")
    assert "rollout.temperature" in describe("rollout")
    assert describe("rewards.3.weight").startswith("rewards.N.weight")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("group.num_generations", "group.group_size"),
        ("learning_rate", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("optimizer.lerning_rate", "optimizer.lr"),
        ("group.grup_size", "group.group_size"),
        ("rollout.temprature", "rollout.temperature"),
        ("modle", "model"),
        ("groupsize", "group.group_size"),
        ("rewards.0.wieght", "rewards.N.weight"),
    ],
)
def test_suggestions(typed: str, meant: str) -> None:
    assert meant in suggestion(typed)
    with pytest.raises(ConfigError, match="there is no setting"):
        describe(typed if "." in typed else f"group.{typed}")


def test_where_nothing_is_near_the_list_is_named() -> None:
    assert suggestion("qqqqqq") == " (`groupwise config` lists all keys)"
    assert suggestion("rewards.0.qqqqqq") == " (`groupwise config rewards` lists the keys)"


def test_lookup_reaches_into_free_mappings() -> None:
    assert lookup("data.task_args.digits.deep") == settings_table()["data.task_args"]
    assert lookup("group.surrogate.low") == settings_table()["group.surrogate"]
    assert lookup("optimizer.lr.x") is None
    assert lookup("environment.tools.0") == settings_table()["environment.tools"]
    assert lookup("optimizer.lr.0") is None


def test_choices_are_the_words_of_a_setting() -> None:
    assert settings_table()["group.kl"].choices == ("k1", "k2", "k3", "k3_ratio")
    assert settings_table()["name"].choices == ()


def test_names_that_recipes_may_use_are_those_of_the_tables() -> None:
    from groupwise.algorithms.losses import Correction
    from groupwise.algorithms.table import PARTS
    from groupwise.runs.dashboards import BOARDS
    from groupwise.runs.engines import ENGINES
    from groupwise.training.objectives import OBJECTIVES

    correction = typing.get_type_hints(Correction)
    for name in ("level", "mode"):
        assert settings_table()[f"rollout.engine.correct.{name}"].choices == typing.get_args(correction[name])
    assert set(settings_table()["group.kl"].choices) == set(PARTS["kl"])
    assert set(typing.get_args(settings.BoardName)) == set(BOARDS)
    assert set(settings.ENGINE_TRAITS) == set(ENGINES)
    assert set(objectives.DATASET) == set(OBJECTIVES)


def test_reference_page_names_every_setting() -> None:
    page = reference()
    assert all(f"| `{key}` |" in page for key in knobs())
    for line in page.splitlines():
        assert not line.startswith("|") or line.replace("\\|", "").count("|") == 4, line
