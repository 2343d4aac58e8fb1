"""Calls of every family, whole, broken, and cut at every character."""

import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.environments.schemas import schema_of, typed
from groupwise.environments.tool_calls import BrokenCall, ParsedCall, ParsedTurn, form_of, read_turn
from groupwise.errors import ConfigError

NESTED = {"text": 'a "quoted" <b> </tool_call> \n ünï 😀', "n": 10000.0, "flag": False, "none": None, "list": [1, {"k": "v"}]}


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def xml(name, arguments):
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def bare(name, arguments):
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def channels(name, arguments):
    body = json.dumps(arguments, ensure_ascii=False)
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}<|call|>"


WRITE = {"json": hermes, "xml": xml, "bare": bare, "channels": channels}
TEXTS = {"text": "ünï 😀 <b> \n two", "other": "}{\"'"}


@pytest.mark.parametrize("form", ["json", "bare", "channels"])
def test_a_call_with_every_kind_of_value(form):
    assert read_turn(WRITE[form]("look", NESTED), form).calls == (ParsedCall("look", NESTED, "call_0"),)


@pytest.mark.parametrize("form", WRITE)
def test_a_call_cut_at_every_character_is_described(form):
    text = ("" if form in ("bare", "channels") else "I look.\n") + WRITE[form]("look", TEXTS)
    assert read_turn(text, form).calls == (ParsedCall("look", TEXTS, "call_0"),)
    described = 0
    for end in range(len(text)):
        said = read_turn(text[:end], form)
        assert not any(isinstance(call, ParsedCall) for call in said.calls), text[:end]
        for call in said.calls:
            assert isinstance(call, BrokenCall) and call.why and call.id == "call_0"
        described += bool(said.calls)
    assert described > len(text) / 2


PIECES = (
    "<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<think>",
    "</think>", '{"name": "f"', ', "arguments": ', ', "parameters": ', "{", "}", "[", "]", '"', "\\", "1", "null", "\n", " ", ";",
    "é", "<|python_tag|>", "<|start|>assistant", "<|channel|>analysis", "<|channel|>final", " to=functions.f", "<|message|>",
    "<|call|>", "<|end|>", "<|",
)  # fmt: skip


@pytest.mark.parametrize("form", WRITE)
@given(text=st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_no_text_is_an_exception(form, text):
    for said in (read_turn(text, form), read_turn(WRITE[form]("f", TEXTS)[:20] + text, form)):
        json.dumps(said.message())


@pytest.mark.parametrize("form", WRITE)
@pytest.mark.parametrize("middle", ["[" * 100_000, "9" * 5000, '"\ud83d"', "NaN", "\x00"])
def test_hostile_json_is_described_or_read(form, middle):
    text = WRITE[form]("look", {"a": "HERE"}).replace('"HERE"', middle).replace("HERE", middle)
    tools = [{"function": {"name": "look", "parameters": {"properties": {"a": {"type": "array"}}}}}]
    (call,) = read_turn(text, form, tools=tools).calls
    assert isinstance(call, ParsedCall) or call.why


def test_several_calls_keep_their_order_and_the_text_around_them():
    text = f"First.\n{hermes('a', {'x': 1})}\n{hermes('b', {})}\nLast."
    said = read_turn(text, "json")
    assert [(call.name, call.id) for call in said.calls] == [("a", "call_0"), ("b", "call_1")]
    assert said.content == "First.\n\n\nLast."
    assert [call["id"] for call in said.message()["tool_calls"]] == ["call_0", "call_1"]
    both = f"{bare('a', {})}; {bare('b', {'x': 1})}"
    assert [call.name for call in read_turn("<|python_tag|>" + both, "bare").calls] == ["a", "b"]


def test_a_broken_call_between_whole_ones_hides_none_of_them():
    text = hermes("a", {}) + "<tool_call>{oops}</tool_call>" + hermes("b", {})
    first, broken, last = read_turn(text, "json").calls
    assert (first.name, last.name, last.id) == ("a", "b", "call_2")
    assert isinstance(broken, BrokenCall) and broken.why.startswith("the call is not JSON: Expecting property name")


@pytest.mark.parametrize(
    ("text", "form", "why"),
    [
        ('<tool_call>["look"]</tool_call>', "json", "not an object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "json", 'no "name"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "json", "are not an object"),
        ('<tool_call>{"name": "f", "arguments": "{1"}</tool_call>', "json", "are not an object"),
        ('<tool_call>{"name": "f", "arguments": {}} trailing</tool_call>', "json", "not closed"),
        ('<tool_call>{"name": "f", "arguments": {}}', "json", "not closed"),
        ("<tool_call>", "json", "cut off"),
        ("<tool_call>look(1)</tool_call>", "xml", "must begin with <function=NAME>"),
        ("<tool_call><function=></function></tool_call>", "xml", "names no function"),
        ("<tool_call><function=f><parameter=a>1</parameter></tool_call>", "xml", "</function> is missing"),
        (xml("f", {"n": "many"}), "xml", "the parameter 'n' is 'many': expected an integer"),
        (xml("f", {"b": "perhaps"}), "xml", "the parameter 'b' is 'perhaps': expected a boolean"),
        (xml("f", {"a": 1}).replace("</function>", "<parameter=a>2</parameter></function>"), "xml", "given twice"),
        ('{"name": "f", "parameters": 1}', "bare", "are not an object"),
        ("<|python_tag|>", "bare", "no call behind"),
        ("<|python_tag|>print(1)", "bare", "not JSON"),
        ("<|channel|>commentary to=functions.f<|message|>{}<|end|>", "channels", "ends with <|end|>: expected <|call|>"),
        ("<|channel|>commentary to=functions.f<|message|>{} {}<|call|>", "channels", "not one JSON object"),
        ("<|channel|>commentary to=functions.f", "channels", "cut off"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text, form, why):
    schema = {"properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}}}
    (call,) = read_turn(text, form, tools=[{"function": {"name": "f", "parameters": schema}}]).calls
    assert isinstance(call, BrokenCall) and why in call.why


def test_xml_values_are_read_by_the_schema_in_either_spelling():
    kinds = {"i": "integer", "x": "number", "b": "boolean", "c": "boolean", "l": "array", "o": "object", "s": "string", "z": "null"}
    written = {"i": "7", "x": "1e5", "b": "False", "c": "true", "l": "[1, 2]", "o": '{"k": null}', "s": "007", "z": "None"}
    tool = {"name": "f", "parameters": {"properties": {key: {"type": kind} for key, kind in kinds.items()}}}
    (call,) = read_turn(xml("f", written), "xml", tools=[tool]).calls
    assert call.arguments == {"i": 7, "x": 1e5, "b": False, "c": True, "l": [1, 2], "o": {"k": None}, "s": "007", "z": None}
    (untyped,) = read_turn(xml("f", written), "xml").calls
    assert untyped.arguments == written


def _unions(
    a: int | float,
    b: int | list[int],
    c: bool | None = None,
    d: str | None = None,
    e: int | str = 0,
    f: Literal[1, "x"] = 1,
    g: dict[str, int] | None = None,
    h: int = 0,
) -> None:
    """Take many.

    Args:
        a: A.
        b: B.
        c: C.
        d: D.
        e: E.
        f: F.
        g: G.
        h: H.
    """


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("a", "5", 5), ("a", "5.5", 5.5), ("b", "5", 5), ("b", "[5, 6]", [5, 6]), ("c", "True", True), ("c", "None", None),
        ("d", "null", None), ("d", "5", "5"), ("d", "true", "true"), ("e", "5", 5), ("e", "five", "five"), ("e", "007", "007"),
        ("f", "1", 1), ("f", "x", "x"), ("g", '{"k": 1}', {"k": 1}), ("g", "None", None), ("h", "2.0", 2.0),
    ],
)  # fmt: skip
def test_an_xml_value_of_a_union_is_read_as_a_tool_takes_it(key, text, value):
    schema = schema_of(_unions, "f")
    (call,) = read_turn(xml("f", {"a": "1", "b": "1", key: text}), "xml", tools=[schema]).calls
    assert call.arguments[key] == value and type(call.arguments[key]) is type(value)
    assert typed(schema, call.arguments) == call.arguments


def test_an_xml_value_of_a_schema_of_pydantic_is_read():
    """As clients of the endpoint send them: alternatives, references, constants."""
    kinds = {
        "a": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "b": {"oneOf": [{"$ref": "#/$defs/Point"}]},
        "c": {"const": 3},
        "d": {"allOf": [{"$ref": "#/$defs/Color"}]},
        "e": {"$ref": "#/$defs/Missing"},
    }
    points = {"Point": {"type": "object"}, "Color": {"enum": ["red", "1"], "type": "string"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": kinds, "$defs": points}}}
    written = {"a": "None", "b": '{"x": 1}', "c": "3", "d": "1", "e": "4"}
    (call,) = read_turn(xml("f", written), "xml", tools=[tool]).calls
    assert call.arguments == {"a": None, "b": {"x": 1}, "c": 3, "d": "1", "e": "4"}


@pytest.mark.parametrize(
    "values",
    ["<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n", "<parameter=a>1<parameter=b>2</parameter>", "<parameter=a>\n1\n"],
)
def test_an_xml_value_without_its_end_is_no_call_and_hides_none(values):
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}}}
    text = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>" + xml("f", {"a": "x"})
    broken, whole = read_turn(text, "xml", tools=[tool]).calls
    assert isinstance(broken, BrokenCall) and broken.why == "the value of the parameter 'a' has no </parameter>"
    assert whole == ParsedCall("f", {"a": "x"}, "call_1")


def test_an_xml_value_may_speak_of_its_own_tags_and_of_lines():
    value = "one\n</parameter> two\n\n  three"
    (call,) = read_turn(xml("f", {"code": value, "next": "x"}), "xml").calls
    assert call.arguments == {"code": value, "next": "x"}


def test_what_cannot_be_read_is_written_whole_and_where_it_stands():
    long = "<tool_call>look" + "(1)" * 100 + "</tool_call>"
    for form, broken in (("json", '<tool_call>{"name": "f", "arg'), ("xml", long), ("json", long)):
        said = read_turn(f"First.\n{WRITE[form]('a', {})}{broken}", form)
        assert (said.content, said.written) == ("First.", f"First.\n{broken}")
        assert said.calls[1].text == broken
    said = read_turn(f"{long} and then", "json")
    assert (said.content, said.written) == (" and then", f"{long} and then")
    cut = '{"name": "f", "parameters": {"a": 1'
    assert read_turn(cut, "bare").written == cut
    assert read_turn("<|channel|>commentary to=functions.f<|message|>{1", "channels").written == "{1"


def test_a_call_in_a_thought_is_a_thought():
    text = f"<think>\nI could {hermes('a', {})}\n</think>\n\n{hermes('b', {})}"
    said = read_turn(text, "json")
    assert [call.name for call in said.calls] == ["b"] and "I could" in said.reasoning and said.content == ""
    assert read_turn(text.removeprefix("<think>"), "json", thinking=True) == said
    cut = read_turn("hm " + hermes("a", {}), "json", thinking=True)
    assert cut.calls == () and cut.content == "" and "hm" in cut.reasoning


def test_a_turn_of_gpt_oss_with_all_its_channels():
    text = (
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
        '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"q": "x"}<|call|>'
    )
    said = read_turn(text, "channels")
    assert (said.reasoning, said.content) == ("Need it.", "Looking.")
    assert said.calls == (ParsedCall("look", {"q": "x"}, "call_0"),)
    final = read_turn("<|channel|>final<|message|>Done <b>.<|return|>", "channels")
    assert (final.content, final.calls, final.reasoning) == ("Done <b>.", (), None)


NO_CALLS = [
    '{"answer": 3}', "{not a call}", "plain", "", '{"', "{}", '{"name": "Alice", "age": 7}', '{"name": "Alice"}', '{"name": "A',
    '{"function": "sin", "x": 1}', '["name", "parameters"]', '{"name": "Alice", "age": 7} {"name": "f", "parameters": {}}',
]  # fmt: skip


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_of_llama_is_content(text):
    assert read_turn(text, "bare") == ParsedTurn(text, None, (), text)


@pytest.mark.parametrize("text", ['{"type": "function", "name": "f", "parameters": {}}', '{"parameters": {}, "name": "f"}',
                                  '<|python_tag|>{"name": "f"}', '{"name": "f", "arguments": {}}'])  # fmt: skip
def test_a_call_of_llama_in_any_order(text):
    assert read_turn(text, "bare").calls == (ParsedCall("f", {}, "call_0"),)


def test_the_form_is_read_off_the_template():
    assert form_of('{{ \'<tool_call>\\n{"name": "\' }}, "arguments": ') == "json"
    assert form_of("{{ '<tool_call>\\n<function=' + tool_call.name }}") == "xml"
    assert form_of('{"name": function name, "parameters": {} } <|start_header_id|>ipython') == "bare"
    assert form_of("<|channel|>commentary json<|message|> <|call|>") == "channels"
    with pytest.raises(ConfigError, match="no form of calls 'yaml'; there are: json, xml, bare, channels"):
        read_turn("", "yaml")
