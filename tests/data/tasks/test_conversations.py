"""The tasks of conversations: their demonstrators speak with the tool and the game that the recipes use."""

from __future__ import annotations

import json

import pytest

from groupwise.data.tasks import make_task
from groupwise.environments.playground import Guess, calculate
from groupwise.errors import ConfigError


def test_a_calculators_demonstrations_are_calls_and_what_the_tool_says() -> None:
    rows = make_task("calculator", {"digits": 2, "blurt": 0.3, "slip": 0.5}).demonstrations(400, seed=0)
    calls = [row for row in rows if row["completion"].startswith("<tool_call>")]
    read = [row for row in rows if len(row["prompt"]) == 3]
    assert 0.1 < len(calls) / 400 < 0.6
    assert abs(len(calls) - len(read)) <= 1
    for row in read:
        _, called, told = row["prompt"]
        call = json.loads(called["content"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert call["name"] == "calculate"
        assert told["content"] == calculate(**call["arguments"])
        assert row["completion"] == f"\\boxed{{{told['content']}}}"
    right = [row["completion"] == f"\\boxed{{{row['answer']}}}" for row in read]
    assert 0.4 < sum(right) / len(right) < 0.8, "some digits are typed wrong"
    assert len(make_task("calculator").held_out(5)) == 5


def test_a_guessers_demonstrations_agree_with_what_he_was_told() -> None:
    task = make_task("guessing", {"highest": 14})
    rows = task.demonstrations(300, seed=1)
    for row in rows:
        game = Guess()
        game.reset(row)
        said = row["prompt"][1:]
        for guess, told in zip(said[::2], said[1::2], strict=True):
            assert game.step(guess["content"])[0] == told["content"]
    assert [row["secret"] for row in task.held_out(99)] == list(range(15))
    assert sorted(row["secret"] for row in task.prompts(15, seed=3)) == list(range(15))
    with pytest.raises(ConfigError, match="highest"):
        make_task("guessing", {"highest": 0})


def test_the_game_ends_with_the_number_or_with_what_is_none() -> None:
    game = Guess()
    game.reset({"secret": 7})
    assert game.step("3") == ("higher", 0.0, False)
    assert game.step("9") == ("lower", 0.0, False)
    assert game.step("7") == ("right", 1.0, True)
    assert game.step("seven")[2]
