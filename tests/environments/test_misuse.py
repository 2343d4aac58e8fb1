"""What users get wrong, and what models make of tools: an observation or an error that names it, and nothing hangs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.live_objects import Live
from groupwise.errors import ConfigError, EnvironmentFailure
from groupwise.records import Finish

from .conftest import call

BOTH = pytest.mark.parametrize("runs", ["process", "thread"])
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def results(at: Any, *said: str) -> Any:
    """The calls of a turn as they were recorded, and what the policy is told of them."""
    talk, _ = at.begin()
    reply = at.say(talk, "".join(said))
    episode = talk.close(Finish.LENGTH)
    return episode.turns[0].calls, at.text(reply.tokens), episode


@BOTH
@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("bytes", r"b'caf\xc3\xa9'"),
        ("none", "None"),
        ("nan", "nan"),
        ("nested", "{'a': [1, {'b': None}]}"),
        ("zero", "a\0b"),
        ("printed", "{'stdout': '<function f at 0x7f2a10>'}"),
    ],
)
def test_whatever_a_tool_returns_is_shown_as_text(table: Callable[..., Any], runs: str, what: str, shown: str) -> None:
    (one,), told, _ = results(table(tools=("odd_tools.py:give",), runs=runs), call("give", what=what))
    assert (one.result, one.failure) == (shown, "")
    assert shown in told


@BOTH
def test_a_huge_result_is_cut_and_says_so(table: Callable[..., Any], runs: str) -> None:
    (one,), told, episode = results(table(tools=("odd_tools.py:give",), runs=runs), call("give", what="huge"))
    assert one.result.startswith("xxx") and one.result.endswith("characters left out]")
    assert len(told) < 100_000 and episode.turns[0].truncated


@BOTH
def test_half_a_character_is_never_recorded(table: Callable[..., Any], runs: str) -> None:
    """A tool that reads bytes as text may return one, and the policy may write one as JSON's escape."""
    at = table(tools=("odd_tools.py:give", "my_tools.py:echo"), runs=runs)
    escaped = '<tool_call>{"name": "echo", "arguments": {"value": "\\ud800"}}</tool_call>'
    (given, said), told, episode = results(at, call("give", what="surrogate"), escaped)
    assert given.result == "bad ? end"
    assert "bad ? end" in told
    assert (given.failure, said.failure) == ("", "unreadable")
    assert json.loads(said.result) == {"error": "the call cannot be read: '\\ud800' is half of a character"}
    for text in (
        given.result,
        said.result,
        said.arguments,
        episode.turns[0].answer,
        json.dumps(episode.messages, ensure_ascii=False),
    ):
        text.encode()


@BOTH
def test_what_cannot_be_shown_or_exits_is_told_to_the_policy(table: Callable[..., Any], runs: str) -> None:
    at = table(tools=("odd_tools.py:give", "odd_tools.py:cancelled", "odd_tools.py:leave", "my_tools.py:add"), runs=runs)
    said = (call("give", what="unprintable"), call("cancelled", text="enough"), call("leave", status=3), call("add", a=1, b=2))
    found, _, _ = results(at, *said)
    assert [one.failure for one in found] == ["exception", "exception", "exception", ""]
    assert [json.loads(one.result)["error"] if one.failure else one.result for one in found] == [
        "no words for it",
        "enough",
        "3",
        "3",
    ]


@BOTH
def test_what_has_no_text_is_told_and_what_is_to_be_awaited_is(table: Callable[..., Any], runs: str) -> None:
    """The address of an object would be another text in every run."""
    at = table(tools=("odd_tools.py:give", "odd_tools.py:later"), runs=runs)
    said = call("give", what="generator"), call("give", what="object"), call("later", text="so")
    (generator, made, later), told, _ = results(at, *said)
    assert (generator.failure, made.failure, later.failure) == ("exception", "exception", "")
    assert json.loads(generator.result) == {"error": "a generator has no text: return text, numbers, or lists and mappings of them"}
    assert later.result == "so"
    assert " at 0x" not in told


@pytest.mark.parametrize(
    ("name", "message"),
    [("bit_by_bit", "yields its result bit by bit"), ("several", r"arguments by name, which '\*values' does not take")],
)
def test_tools_that_no_call_by_name_fits_are_refused(table: Callable[..., Any], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table(tools=(f"odd_tools.py:{name}",), runs="thread")


def test_a_tool_that_changes_the_directory_changes_nobody_elses(table: Callable[..., Any], tmp_path: Path) -> None:
    """Not even that of the next call, which may get the same process."""
    before = os.getcwd()
    at = table(tools=("odd_tools.py:move", "odd_tools.py:here"), runs="process")
    (moved,), _, _ = results(at, call("move", folder=str(tmp_path)))
    (here,), _, _ = results(at, call("here"))
    assert (moved.result, here.result, os.getcwd()) == (str(tmp_path), before, before)


@BOTH
def test_two_tools_of_one_name_are_refused(table: Callable[..., Any], runs: str) -> None:
    with pytest.raises(ConfigError, match=r"two tools are called 'add': my_tools\.py:add and odd_tools\.py:add"):
        table(tools=("my_tools.py:add", "odd_tools.py:add"), runs=runs)
    live = (Live("add", lambda a: a), Live("add", lambda b: b))
    with pytest.raises(ConfigError, match=r"two tools are called 'add': live:add and live:add"):
        table(tools=live, runs=runs)


@BOTH
def test_a_tool_is_called_what_it_is_given_as(table: Callable[..., Any], runs: str) -> None:
    """Whatever its function calls itself."""
    tools = tuple(f"odd_tools.py:{name}" for name in ("minus", "less", "twice", "subtract"))
    said = call("minus", a=5, b=2), call("less", a=5), call("twice", a=5), call("subtract", a=4)
    found, _, _ = results(table(tools=tools, runs=runs), *said)
    assert [one.result for one in found] == ["3", "4", "10", "6"]


@BOTH
def test_methods_of_every_kind_are_tools(table: Callable[..., Any], runs: str) -> None:
    at = table(factory="odd_tools.py:Desk", runs=runs)
    assert [schema["function"]["name"] for schema in at.environment.runtime.kinds[""].schemas] == [
        "again", "named", "redone", "twice", "undone",
    ]  # fmt: skip
    found, _, _ = results(at, call("again", a=1), call("named"), call("redone", a=2), call("twice", a=3))
    assert [one.result for one in found] == ["2", "Desk", "2", "6"]


def test_arguments_that_json_cannot_hold_are_refused(table: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"the tool 'place'.*Point"):
        table(tools=("odd_tools.py:place",), runs="thread")


def test_an_enum_offers_its_values_and_one_of_them_arrives(table: Callable[..., Any]) -> None:
    """As in TRL: not the member."""
    at = table(tools=("odd_tools.py:paint",), runs="thread")
    right, wrong = results(at, call("paint", colour="red"), call("paint", colour="RED"))[0]
    assert (right.result, right.failure) == ("'red'", "")
    assert json.loads(wrong.result) == {"error": 'the argument colour is "RED", expected one of "red", "blue"'}


def test_arguments_of_many_kinds(table: Callable[..., Any]) -> None:
    at = table(tools=("odd_tools.py:every",), runs="thread")
    right = [{"words": ["a"], "counts": {"a": 1.0}}, {"words": [], "counts": {}, "mode": "down", "limit": None}]
    wrong = [
        ({"words": [1], "counts": {}}, "the argument words is [1], expected array of string"),
        ({"words": [], "counts": {"a": "1"}}, 'the argument counts is {"a": "1"}, expected object of integer'),
        ({"words": [], "counts": {}, "mode": "left"}, 'the argument mode is "left", expected one of "up", "down"'),
        ({"words": [], "counts": {}, "limit": "9"}, 'the argument limit is "9", expected integer or null'),
    ]
    found, _, _ = results(at, *(call("every", **one) for one in [*right, *(given for given, _ in wrong)]))
    assert [one.failure for one in found] == ["", "", *["arguments"] * 4]
    assert found[0].result == "(['a'], {'a': 1}, 'up', None)"
    assert [json.loads(one.result)["error"] for one in found[2:]] == [why for _, why in wrong]


def test_a_key_that_is_given_twice_is_no_call(table: Callable[..., Any]) -> None:
    at = table(tools=("my_tools.py:add",), runs="thread")
    twice = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2, "a": 3}}</tool_call>'
    (one,), _, _ = results(at, twice)
    assert one.failure == "unreadable"
    assert "'a' is given twice" in json.loads(one.result)["error"]


@BOTH
def test_fifty_parallel_calls(table: Callable[..., Any], runs: str) -> None:
    at = table(tools=("my_tools.py:add", "my_tools.py:later"), runs=runs)
    said = [call("later", text=f"<{i}>", seconds=0.0) if i % 2 else call("add", a=i, b=1000) for i in range(50)]
    found, _, episode = results(at, *said)
    assert [one.result for one in found] == [f"<{i}>" if i % 2 else str(i + 1000) for i in range(50)]
    assert [message["tool_call_id"] for message in episode.messages if message["role"] == "tool"] == [
        f"call_{i}" for i in range(50)
    ]


def test_a_call_that_is_never_closed(table: Callable[..., Any]) -> None:
    at = table(tools=("my_tools.py:add",), runs="thread")
    (one,), _, _ = results(at, '<tool_call>{"name": "add", "arguments": ' + '{"a": ' * 3000)
    assert one.failure == "unreadable"


@BOTH
def test_an_environment_that_changes_its_row_changes_nobody_elses(table: Callable[..., Any], runs: str) -> None:
    at = table(factory="odd_tools.py:Deck", runs=runs)
    decks = [[7, 8, 9]]
    for index in range(2):
        talk, _ = at.begin(index, decks=decks)
        at.say(talk, "x")
        assert talk.close(Finish.DONE).state == {"card": 7}
    assert decks == [[7, 8, 9]]


@BOTH
def test_a_reset_that_asks_for_one_column_gets_it_or_is_refused(table: Callable[..., Any], runs: str) -> None:
    """Only what is called `row` gets all of them."""
    at = table(factory="odd_tools.py:Secret", runs=runs)
    talk, _ = at.begin(secret=3)
    at.say(talk, "x")
    assert talk.close(Finish.DONE).state == {"card": 3}
    missing = r"^the environment Secret: reset\(\) asks for 'secret', which .* columns: prompt, secrt \(row: all of them\)$"
    with pytest.raises(ConfigError, match=missing):
        at.begin(1, secrt=3)


@BOTH
def test_a_close_that_raises_costs_no_reward_and_is_told_once(
    table: Callable[..., Any], runs: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it refuse the environment where it is made to be described, and never reset."""
    at = table(factory="odd_tools.py:Deck", runs=runs)
    with caplog.at_level(logging.WARNING):
        for index in range(3):
            talk, _ = at.begin(index, decks=[[7]])
            assert at.say(talk, "x").finish is Finish.DONE
            assert talk.close(Finish.DONE).reward == 1.0
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("close() of Deck raised OSError: the table of 7 is gone (") and "odd_tools.py, line" in said


@BOTH
def test_an_environment_whose_reset_has_a_bug_is_named_with_the_line(table: Callable[..., Any], runs: str) -> None:
    at = table(factory="odd_tools.py:BadReset", runs=runs)
    why = r"reset\(\) of BadReset raised AttributeError: 'BadReset' object has no attribute 'questions' .*odd_tools\.py, line \d+"
    at.begin(0, number=0)  # one may fail
    with pytest.raises(EnvironmentFailure, match=why):
        at.begin(1, number=0)
