"""Tool calls in what the policy wrote, in the form of its family.  A call that is cut or garbled is
described, never an exception.

| form | families | a call |
|---|---|---|
| `json` | Qwen 2.5, Qwen 3, Hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| `xml` | Qwen 3.5, Qwen3-Coder, Nemotron 3 |
`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>` |
| `bare` | Llama 3.1, 3.2 | the turn is `{"name": ..., "parameters": {...}}`, perhaps behind
`<|python_tag|>` |
| `channels` | gpt-oss | a message `to=functions.NAME` whose body is JSON and which ends with
`<|call|>` |

Texts are decoded with their special tokens, and without the EOS behind them (gpt-oss: with it, it
is `<|call|>`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from groupwise.data.sources import too_deep
from groupwise.environments.schemas import is_kind, kinds_of
from groupwise.errors import ConfigError
from groupwise.utils.json_text import finite, half_character, no_number

CallForm = Literal["json", "xml", "bare", "channels"]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call that can be carried out, if there is such a tool."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """`call_0`, `call_1`, ... in the order in which the turn makes them."""


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """Something that was meant as a call and is none."""

    why: str
    """A sentence for the policy to read."""
    text: str
    """What it wrote there."""
    id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn of the policy, taken apart."""

    content: str
    """What is neither reasoning nor a call."""
    reasoning: str | None
    calls: tuple[ParsedCall | BrokenCall, ...]
    written: str
    """The content with the text of every call that cannot be read, where it stands."""

    def message(self) -> dict[str, Any]:
        """The turn as a chat message, for showing it; the ids of the stream stay those that were
        sampled.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.written}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = []
        for call in self.calls:
            if isinstance(call, ParsedCall):
                function = {"name": call.name, "arguments": dict(call.arguments)}
                calls.append({"id": call.id, "type": "function", "function": function})
        if calls:
            message["tool_calls"] = calls
        return message


def form_of(chat_template: str) -> CallForm | None:
    """The form in which a chat template (Jinja) shows calls; None if it shows none that is known.

    >>> form_of("... <tool_call>\\n<function=' + name + '>' ...")
    'xml'
    """
    if "<function=" in chat_template:
        return "xml"
    if "<tool_call>" in chat_template and '"arguments"' in chat_template:
        return "json"
    if "<|call|>" in chat_template:
        return "channels"
    if "ipython" in chat_template and re.search(r'"parameters\\?"', chat_template):
        return "bare"
    return None


def read_turn(
    text: str,
    form: CallForm,
    *,
    thinking: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> ParsedTurn:
    """Content, reasoning and calls of one turn.

    thinking: the prompt ended inside a think block, which the turn continues with.
    tools: JSON schemas; the form `xml`, whose values are text, reads anything else by them.  Where
        a parameter may be text or something else, text that is the other in JSON is read as that.
    Raises ConfigError for an unknown form; never for anything that `text` may hold.

    >>> read_turn('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "json").calls
    (ParsedCall(name='add', arguments={'a': 1}, id='call_0'),)
    """
    if form not in get_args(CallForm):
        raise ConfigError(f"no form of calls {form!r}; there are: {', '.join(get_args(CallForm))}")
    if form == "channels":
        content, written, reasoning, calls = _channels(text)
    else:
        reasoning, rest = split_thinking(text, thinking)
        if form == "bare":
            content, written, calls = _bare(rest)
        elif form == "json":
            content, written, calls = _tagged(rest, None)
        else:
            content, written, calls = _tagged(rest, _kinds_by_name(tools or ()))
    numbered = tuple(replace(call, id=f"call_{i}") for i, call in enumerate(calls))
    return ParsedTurn(content, reasoning, numbered, written)


# ---- reasoning


def split_thinking(text: str, thinking: bool) -> tuple[str | None, str]:
    """Reasoning, and what follows it.  A call inside a think block is a thought."""
    opened = text.lstrip().startswith("<think>")
    if not (opened or thinking):
        return None, text
    body = text.lstrip().removeprefix("<think>") if opened else text
    reasoning, _, rest = body.partition("</think>")
    return reasoning.strip("\n"), rest


def opens_thinking(text: str) -> bool:
    """True if a prompt ends inside a think block, which the next turn continues."""
    return text.rstrip().endswith("<think>")


class _NotACall(Exception):
    """Why something is no call, in a sentence for the policy."""


_Calls = list[ParsedCall | BrokenCall]
_Kinds = Mapping[str, Sequence[str]]
"""The JSON types that each parameter of a tool may have."""


# ---- <tool_call>

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def _tagged(text: str, kinds: Mapping[str, _Kinds] | None) -> tuple[str, str, _Calls]:
    """Content, the same with broken calls, and calls between tags: JSON objects, or with `kinds`
    functions with parameters.
    """
    content, written, calls, place = "", "", [], 0
    while (start := text.find(OPENING, place)) >= 0:
        content, written = content + text[place:start], written + text[place:start]
        body = start + len(OPENING)
        stop = text.find(CLOSING, body)
        closing, why = None, f"the call is not closed: {CLOSING} is missing behind it"
        try:
            call, end = _json_call(text, body) if kinds is None else _xml_call(text, body, kinds)
            closing = re.compile(rf"\s*{CLOSING}").match(text, end)
        except _NotACall as error:
            why = str(error) if stop >= 0 else f"the call is cut off: there is no {CLOSING}"
        if closing is not None:
            place = closing.end()
        else:  # what follows a call that cannot be read: the next tag, or the end
            place = len(text) if stop < 0 else stop + len(CLOSING)
            call = BrokenCall(why, text[start:place])
            written += call.text
        calls.append(call)
    return (content + text[place:]).strip("\n"), (written + text[place:]).strip("\n"), calls


def _json_call(text: str, place: int) -> tuple[ParsedCall, int]:
    """The call whose JSON begins at `place`, and where it ends.  Raises _NotACall."""
    value, end = _decoded(text, len(text) - len(text[place:].lstrip()))
    return _call_of(value, "arguments"), end


_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_VALUE_END = re.compile(r"</parameter>(?=\s*(<parameter=|</function>))")


def _xml_call(text: str, place: int, kinds: Mapping[str, _Kinds]) -> tuple[ParsedCall, int]:
    """The call whose `<function=...>` begins at `place`, and where it ends.  Raises _NotACall."""
    function = _FUNCTION.match(text, place)
    if function is None:
        raise _NotACall("a call must begin with <function=NAME>")
    name, place = function[1].strip(), function.end()
    if not name:
        raise _NotACall("the call names no function: write <function=NAME>")
    known = kinds.get(name, {})
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, place)) is not None:
        key = parameter[1].strip()
        end = _end_of_value(text, parameter.end())
        if end is None or _holds_another(text[parameter.end() : end], known):
            raise _NotACall(f"the value of the parameter {key!r} has no </parameter>")
        if key in arguments:
            raise _NotACall(f"the parameter {key!r} is given twice")
        value = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[key] = _converted(key, value, known.get(key, ("string",)))
        place = end + len("</parameter>")
    closing = re.compile(r"\s*</function>").match(text, place)
    if closing is None:
        raise _NotACall(f"the call of {name!r} is not closed: </function> is missing")
    return ParsedCall(name, arguments), closing.end()


def _end_of_value(text: str, start: int) -> int | None:
    """Where a value ends: at the `</parameter>` behind which the call continues, so that a value
    may speak of that tag itself.
    """
    closing = _VALUE_END.search(text, start)
    if closing is not None:
        return closing.start()
    end = text.find("</parameter>", start)
    return None if end < 0 else end


def _holds_another(value: str, known: _Kinds) -> bool:
    """Return True if a value holds the next parameter: on a new line, or one that the tool has."""
    for parameter in re.finditer(r"<parameter=([^>\n]*)>", value):
        line = value[: parameter.start()].rpartition("\n")[2]
        if parameter[1].strip() in known or not line.strip():
            return True
    return False


def _converted(key: str, value: str, kinds: Sequence[str]) -> Any:
    """A value in one of the types that its schema allows, text last.  Templates write `False` or
    `false`: both are read.
    """
    text = value.strip()
    if {"boolean", "null"} & set(kinds) and text.lower() in _WORDS:
        text = json.dumps(_WORDS[text.lower()])
    with suppress(_NotACall):
        decoded, end = _decoded(text, 0)
        whole = end == len(text) and not isinstance(decoded, str)
        if whole and any(is_kind(kind, decoded) for kind in kinds):
            return decoded
    if "string" in kinds:
        return value
    wanted = " or ".join(map(_with_article, kinds))
    raise _NotACall(f"the parameter {key!r} is {value[:40]!r}: expected {wanted}")


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aio" else f"a {kind}"


_WORDS = {"true": True, "false": False, "none": None, "null": None}


# ---- a turn that is a call


_MEANT = re.compile(
    r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"(parameters|arguments)"'
)
"""How a call begins; an object that only has a name is an answer in JSON."""


def _bare(text: str) -> tuple[str, str, _Calls]:
    """Llama's calls: the whole turn is one, or several behind one another with `;` or white space
    between them.
    """
    body = text.strip()
    tagged = body.startswith("<|python_tag|>")
    body = body.removeprefix("<|python_tag|>").strip()
    if not tagged and _MEANT.match(body) is None:
        first = None
        with suppress(_NotACall):
            first, _ = _decoded(body, 0)
        if not isinstance(first, dict) or "name" not in first:
            return text, text, []
        if not {"parameters", "arguments"} & first.keys():
            return text, text, []
    calls: _Calls = []
    broken: list[str] = []
    place = 0
    while place < len(body):
        end = len(body)
        try:
            value, end = _decoded(body, place)
            calls.append(_call_of(value, "parameters"))
        except _NotACall as error:
            calls.append(BrokenCall(str(error), body[place:end]))
            broken.append(body[place:end])
        place = re.compile(r"[\s;]*").match(body, end).end()  # type: ignore[union-attr]
    if not calls:
        return "", text, [BrokenCall("there is no call behind <|python_tag|>", text)]
    return "", "\n".join(broken), calls


# ---- channels

_HEADER_END, _BODY_END = "<|message|>", re.compile(r"<\|(end|call|return)\|>")


def _channels(text: str) -> tuple[str, str, str | None, _Calls]:
    """gpt-oss: messages with a channel and perhaps a recipient; the first continues behind
    `<|start|>assistant`.
    """
    content, written, reasoning, calls = [], [], [], []
    for header, body, end in _messages(text):
        channel = re.search(r"<\|channel\|>\s*([a-z]+)", header)
        recipient = re.search(r"to=([^\s<]+)", header)
        if recipient is not None:
            try:
                calls.append(_channel_call(recipient[1].removeprefix("functions."), body, end))
            except _NotACall as error:
                calls.append(BrokenCall(str(error), body or ""))
                written.append(body)
        elif channel is not None and channel[1] == "analysis":
            reasoning.append(body)
        else:
            content.append(body)
            written.append(body)
    return _joined(content), _joined(written), _joined(reasoning) or None, calls


def _joined(texts: Sequence[str | None]) -> str:
    return "\n".join(filter(None, texts))


def _messages(text: str) -> Iterator[tuple[str, str | None, str | None]]:
    """(header, body, how it ends) of each message; None for what was cut off."""
    for part in text.split("<|start|>"):
        header, has_body, rest = part.partition(_HEADER_END)
        if not has_body:
            if "<|" in header or "to=" in header:
                yield header, None, None
            elif header.strip():
                yield "", header, None
            continue
        end = _BODY_END.search(rest)
        if end is None:
            yield header, rest, None
        else:
            yield header, rest[: end.start()], end[1]


def _channel_call(name: str, body: str | None, end: str | None) -> ParsedCall:
    """Raises _NotACall."""
    if body is None or end is None:
        raise _NotACall(f"the call of {name!r} is cut off: there is no <|call|>")
    if end != "call":
        raise _NotACall(f"the call of {name!r} ends with <|{end}|>: expected <|call|>")
    value, stop = _decoded(body, len(body) - len(body.lstrip()))
    if not isinstance(value, dict) or body[stop:].strip():
        raise _NotACall(f"the arguments of {name!r} are not one JSON object")
    return ParsedCall(name, value)


# ---- JSON


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different.  Raises ValueError."""
    value: dict[str, Any] = {}
    for key, member in pairs:
        if key in value:
            raise ValueError(f"{key!r:.60} is given twice")
        value[key] = member
    return value


_DECODER = json.JSONDecoder(
    strict=False, object_pairs_hook=_once, parse_constant=no_number, parse_float=finite
)
"""Line breaks inside strings are read: models write programs as arguments."""


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where it ends.  Raises _NotACall."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        if isinstance(value, list | dict) and too_deep(value):
            raise _NotACall("the call is nested too deeply")
        half = half_character(value) if "\\u" in text[start:end] else None
        if half is None:
            return value, end
        why = f"cannot be read: {half} is half of a character"  # nothing could record it
    except json.JSONDecodeError as error:
        why = f"is not JSON: {error.msg} at character {error.pos - start}"
    except RecursionError:
        why = "is nested too deeply"
    except ValueError as error:
        # A key that is given twice, or a number that Python cannot convert or JSON lacks.
        why = f"cannot be read: {error}"
    raise _NotACall(f"the call {why}")


def _call_of(value: Any, key: str) -> ParsedCall:
    """An object's name and arguments; `key` is the form's own name for the latter, the other one is
    read too.

    Raises _NotACall.
    """
    if not isinstance(value, dict):
        raise _NotACall('the call is not an object with "name" and "' + key + '"')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _NotACall('the call has no "name"')
    arguments: Any = {}
    for spelling in ("parameters", "arguments", key):  # the last one counts
        arguments = value.get(spelling, arguments)
    if isinstance(arguments, str):  # JSON inside JSON, as OpenAI's interface has it
        text, arguments = arguments, None
        with suppress(_NotACall):
            inner, end = _decoded(text, 0)
            if end == len(text):
                arguments = inner
    if not isinstance(arguments, dict):
        raise _NotACall(f"the {key} of {name!r} are not an object")
    return ParsedCall(name, arguments)


def _kinds_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, _Kinds]:
    """Return the JSON types of each tool's parameters; text where a schema names none."""
    by_name: dict[str, _Kinds] = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") or {}
        kinds: dict[str, Sequence[str]] = {}
        for key, schema in (parameters.get("properties") or {}).items():
            kinds[key] = kinds_of(schema, parameters) or ("string",)
        if isinstance(function.get("name"), str):
            by_name[function["name"]] = kinds
    return by_name
