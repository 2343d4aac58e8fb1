"""What messages hold besides plain text: calls, tools, roles that a template does not know."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from encoders import encode_demonstrations

from groupwise.data.messages import CONTRADICTS, joined
from groupwise.data.sources import BadRow, SourceRows, read_rows
from groupwise.data.templates import Template
from groupwise.data.tokenizers import byte_tokenizer
from groupwise.errors import DataError

QWEN_LIKE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'tool') or (m.role == 'system' and loop.first) %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ ARGUMENTS }}</tool_call>{% endfor %}<|end|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WAYS = {"as JSON": "c.function.arguments | tojson", "as they are": "c.function.arguments", "joined": "'' + c.function.arguments"}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments):
    return assistant(None, tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}])


def told(*rows, way="as JSON"):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = QWEN_LIKE.replace("ARGUMENTS", WAYS[way])
    template = Template(tokenizer=tokenizer, chat=True)
    built, report = encode_demonstrations(SourceRows("f", list(rows)), template, context=999, eos_ids=(1,))
    return [(tokenizer.decode(one.prompt), tokenizer.decode(one.completion)) for one in built], report


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arguments", ['{"x": "y"}', {"x": "y"}])
def test_arguments_of_calls_are_json_whatever_the_template_expects(way, arguments):
    shown = '<tool_call>f {"x": "y"}</tool_call>'
    result = {"role": "tool", "content": "r"}
    built, _ = told(
        {"messages": [user("q"), call(arguments)]}, {"messages": [user("q"), call(arguments), result, assistant("a")]}, way=way
    )
    asked = "<|user|>q<|end|><|assistant|>"
    assert built == [(asked, f"{shown}<|end|>"), (f"{asked}{shown}<|end|><|tool|>r<|end|><|assistant|>", "a<|end|>")]


@pytest.mark.slow
def test_a_message_that_the_template_leaves_out_is_said():
    rows = [
        {"prompt": [{"role": role, "content": "be brief"}, user("q")], "completion": "a"}
        for role in ("system", "developer", "alien")
    ]
    built, report = told(*rows)
    assert len(built) == 3 and report.noted["with a message that the chat template does not write"] == 2
    (warning,) = report.warnings
    assert "f row 2 (2 such rows): the chat template does not write" in warning and "developer, user" in warning


@pytest.mark.slow
def test_the_tools_of_a_row_stand_in_its_prompt():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    row = {"messages": [user("q"), assistant("a")]}
    built, report = told({**row, "tools": [tool]}, row, {**row, "tools": json.dumps([tool])}, {**row, "tools": ["f"]})
    bare = "<|user|>q<|end|><|assistant|>"
    assert [prompt for prompt, _ in built][1::2] == [bare, bare]
    assert [prompt for prompt, _ in built][::2] == [f"<|system|>{json.dumps([tool])}<|end|>{bare}"] * 2
    assert report.noted["with tools that cannot be read"] == 1
    (warning,) = report.warnings
    assert "f row 4: the column tools cannot be read" in warning


@pytest.mark.slow
def test_a_tool_without_parameters_is_shown():
    tool = {"type": "function", "function": {"name": "now", "description": "The time."}}
    built, report = told({"messages": [user("q"), assistant("a")], "tools": [tool]})
    assert built[0][0].startswith(f"<|system|>{json.dumps([tool])}<|end|>") and not report.warnings


OPEN_TURN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + OPEN_TURN
TOOL_LOST, CALL_LOST = (f"with a {what} that the chat template does not write" for what in ("tool", "call"))


@pytest.mark.slow
def test_tools_and_calls_that_the_template_does_not_write_are_said():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    row = {"messages": [user("1"), call({}), {"role": "user", "content": "2"}, assistant("3")], "tools": [tool]}
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN
    template = Template(tokenizer=tokenizer, chat=True)
    _, report = encode_demonstrations(SourceRows("f", [row, row]), template, context=999, eos_ids=(1,))
    assert (report.noted[TOOL_LOST], report.noted[CALL_LOST]) == (2, 2)
    for what, warning in zip(("tool", "call"), report.warnings, strict=True):
        assert warning.startswith(f"f row 1 (2 such rows): its prompt does not show a {what}")


def test_a_prompt_cannot_end_with_a_call():
    with pytest.raises(DataError, match=r"1 whose prompt ends with a call .*its result is missing"):
        told({"prompt": [user("q"), call({})], "completion": "a"})


SURE = [user("q"), assistant("Sure: ")]


@pytest.mark.parametrize("opening", [[], [{"role": "system", "content": "s"}]])
@pytest.mark.parametrize(
    ("turns", "answer"),
    [([user("q")], "Sure: x"), ([user("q"), assistant("Sure: x"), user("r")], "y"), ([*SURE, user("r")], "y")],
)
def test_turns_that_repeat_a_prompt_with_its_open_turn(turns, answer, opening):
    assert joined(opening + SURE, turns, "messages", "f row 1", answer) == opening + turns
    assert joined(opening + SURE, opening + turns, "messages", "f row 1", answer) == opening + turns


@pytest.mark.parametrize(
    ("prompt", "turns"),
    [
        (SURE, [user("q")]),
        (SURE, [user("q"), assistant("No"), user("r")]),
        ([user("q"), assistant("a"), *SURE], [user("q")]),
    ],
)
def test_turns_that_break_off_or_answer_otherwise_than_the_prompt(prompt, turns):
    with pytest.raises(BadRow, match="messages begins otherwise than the prompt"):
        joined(prompt, turns, "messages", "f row 1", "x")


def test_a_prompt_is_not_repeated_with_its_open_turn():
    (row,) = told({"prompt": SURE, "messages": [user("q"), assistant("Sure: x")]})[0]
    assert row == ("<|user|>q<|end|><|assistant|>", "Sure: x<|end|>")


def test_the_first_column_that_is_filled_is_read():
    messages = [user("q"), assistant("a")]
    assert told({"prompt": None, "completion": None, "messages": messages})[0] == told({"messages": messages})[0]


@pytest.mark.slow
def test_nulls_of_a_column_s_other_rows_are_no_arguments(tmp_path):
    rows = [{"messages": [user("q"), call(arguments)]} for arguments in ({"x": 1}, {"y": 2})]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "f.parquet")
    built, _ = told(*read_rows(str(tmp_path / "f.parquet")))
    assert [completion for _, completion in built] == [
        f"<tool_call>f {arguments}</tool_call><|end|>" for arguments in ('{"x": 1}', '{"y": 2}')
    ]


def test_turns_that_go_on_otherwise_than_the_prompt():
    with pytest.raises(BadRow) as error:
        joined([user("q")], [user("r")], "completion", "f row 3")
    assert error.value.reason == CONTRADICTS and str(error.value) == "f row 3: completion begins otherwise than the prompt"


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, True, "[{}]", {"a": 1}, ["x"], [None]])
def test_calls_that_are_no_list_of_calls_are_counted(calls):
    result = {"role": "tool", "content": "2"}
    bad = {"messages": [user("1+1"), assistant("", tool_calls=calls), result, assistant("2")]}
    built, report = told(bad, {"messages": [user("q"), assistant("a")]})
    assert [completion for _, completion in built] == ["a<|end|>"]
    assert sum(report.dropped.values()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("depth", [900, 20_000])
def test_tools_that_are_nested_too_deeply_cannot_be_read(depth):
    deep = "[" * depth + "]" * depth
    built, report = told({"messages": [user("q"), assistant("a")], "tools": f'[{{"name": "f", "x": {deep}}}]'})
    assert len(built) == 1 and report.noted["with tools that cannot be read"] == 1
