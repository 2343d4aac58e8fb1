"""What messages hold besides plain text: calls, tools, roles that a template does not know."""

import json

import pytest

from groupwise.data.demonstrations import encode_demonstrations
from groupwise.data.messages import CONTRADICTS, joined
from groupwise.data.sources import BadRow, SourceRows
from groupwise.data.templates import Template
from groupwise.data.tokenizers import byte_tokenizer
from groupwise.errors import DataError

QWEN_LIKE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'tool') or (m.role == 'system' and loop.first) %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ ARGUMENTS }}</tool_call>{% endfor %}<|end|>{% endif %}{% endfor %}"
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
    shown = '<tool_call>{"x": "y"}</tool_call>'
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
    assert "f row 2: the chat template does not write" in warning and "developer, user" in warning and "2 such rows" in warning


@pytest.mark.slow
def test_the_tools_of_a_row_stand_in_its_prompt():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    row = {"messages": [user("q"), assistant("a")]}
    built, _ = told({**row, "tools": [tool]}, row, {**row, "tools": json.dumps([tool])}, {**row, "tools": ["f"]})
    bare = "<|user|>q<|end|><|assistant|>"
    assert [prompt for prompt, _ in built][1::2] == [bare, bare]
    assert [prompt for prompt, _ in built][::2] == [f"<|system|>{json.dumps([tool])}<|end|>{bare}"] * 2


def test_a_prompt_cannot_end_with_a_call():
    with pytest.raises(DataError, match=r"1 whose prompt ends with a call .*its result is missing"):
        told({"prompt": [user("q"), call({})], "completion": "a"})


def test_turns_that_go_on_otherwise_than_the_prompt():
    with pytest.raises(BadRow) as error:
        joined([user("q")], [user("r")], "completion", "f row 3")
    assert error.value.reason == CONTRADICTS and str(error.value) == "f row 3: completion begins otherwise than the prompt"
