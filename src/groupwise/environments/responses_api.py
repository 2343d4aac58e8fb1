"""OpenAI's Responses API (`POST /v1/responses`): from its body to the one inner request, and from a
turn to its answer and its events.

| Responses | chat |
|---|---|
| `instructions` | the first message |
| `reasoning`, `function_call`, the assistant's `message` in sequence | one message of it |
| `function_call_output` | a message of the role `tool` |
| `max_output_tokens` | `max_tokens` |

The whole conversation stands in every request: nothing is remembered for `previous_response_id`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from groupwise.environments.chat_codec import ServedTurn
from groupwise.environments.requests import (
    ChatRequest,
    function_tool,
    objects_in,
    read_chat_request,
    string_in,
    text_in,
)
from groupwise.utils.http import Refused

HARMLESS = frozenset(
    (
        "client_metadata",
        "include",
        "reasoning",
        "text",
        "truncation",
    )
)
"""Keys that change neither what the policy sees nor what it is drawn from."""
REMEMBERED = ("previous_response_id", "conversation", "prompt")
"""Keys that name what a server remembers."""
TEXTS = ("input_text", "output_text", "text")
REASONS = ("reasoning_text",)


def read_responses_request(body: Mapping[str, Any]) -> ChatRequest:
    """Read the body of `POST /v1/responses`.  Raises Refused for what cannot be done as it is
    requested.
    """
    for key in REMEMBERED:
        if body.get(key) is not None:
            raise Refused(
                f"{key} cannot be served here, nothing is remembered: send the whole conversation"
                " as input",
                param=key,
            )
    if body.get("background"):
        raise Refused("background cannot be served here: leave it out", param="background")
    written = body.get("text")
    form = written.get("format") if isinstance(written, Mapping) else None
    if form not in (None, {"type": "text"}):
        raise Refused("text.format cannot be served here: leave it out", param="text.format")
    translated = HARMLESS | {"input", "instructions", "tools", "max_output_tokens", "background"}
    chat = {key: value for key, value in body.items() if key not in translated}
    chat["max_tokens"] = body.get("max_output_tokens")
    chat["messages"] = _messages(body)
    wishes: list[str] = []
    chat["tools"] = _tools(body, wishes)
    names = {"max_tokens": "max_output_tokens"}
    return read_chat_request(chat, wishes=wishes, client_names=names)


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation in the form of chat completions."""
    messages = []
    instructions = body.get("instructions")
    if instructions:
        messages.append({"role": "system", "content": text_in(instructions, "instructions")})
    items = body.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    turn: dict[str, Any] | None = None
    for place, item in enumerate(objects_in(items, "input")):
        name = f"input[{place}]"
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            turn = None
            call = string_in(item, "call_id", name)
            result = text_in(item.get("output") or "", f"{name}.output", TEXTS)
            messages.append({"role": "tool", "tool_call_id": call, "content": result})
        elif kind == "message" and item.get("role") != "assistant":
            turn = None
            text = text_in(item.get("content"), f"{name}.content", TEXTS)
            messages.append({"role": item.get("role"), "content": text})
        else:
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add_item(turn, kind, item, name)
    if not messages:
        raise Refused("input must hold at least one entry", param="input")
    return messages


def _add_item(turn: dict[str, Any], kind: str, item: Mapping[str, Any], name: str) -> None:
    """Add an item of the assistant's to its message."""
    if kind == "message":
        turn["content"] += text_in(item.get("content"), f"{name}.content", TEXTS)
    elif kind == "reasoning":
        reasons = text_in(item.get("content") or [], f"{name}.content", REASONS)
        if reasons:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + reasons
    elif kind == "function_call":
        function = {key: string_in(item, key, name) for key in ("name", "arguments")}
        call = {"id": string_in(item, "call_id", name), "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        raise Refused(f"{name} is of type {kind!r:.40}, which cannot be read here", param=name)


def _tools(body: Mapping[str, Any], wishes: list[str]) -> list[dict[str, Any]]:
    """The client's functions.  Any other kind of tool is noted as a wish."""
    tools = []
    for place, tool in enumerate(objects_in(body.get("tools") or [], "tools")):
        kind = string_in(tool, "type", f"tools[{place}]")
        if kind != "function":
            wishes.append(kind)
            continue
        if tool.get("strict"):
            wishes.append("strict")
        tools.append(function_tool(tool, "parameters", f"tools[{place}]"))
    return tools


def responses_answer(turn: ServedTurn, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `POST /v1/responses` answers.  body: of the request."""
    cut = turn.response.finish_reason == "length"
    written = len(turn.sampled.tokens)
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": turn.request.model,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "output": _items(turn, "incomplete" if cut else "completed"),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "max_output_tokens": body.get("max_output_tokens"),
        "previous_response_id": None,
        "usage": {
            "input_tokens": turn.context,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": turn.reasoning},
            "total_tokens": turn.context + written,
        },
    }


def _items(turn: ServedTurn, status: str) -> list[dict[str, Any]]:
    """The items of a turn: its reasoning, its text, its calls."""
    message = turn.response.message
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        reasons = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append(_item("reasoning", "rs", status, summary=[], content=reasons))
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        part = {**EMPTY_TEXT, "text": message.get("content") or ""}
        items.append(_item("message", "msg", status, role="assistant", content=[part]))
    for call in calls:
        function = call["function"]
        items.append(_item("function_call", "fc", status, call_id=call["id"], **function))
    return items


EMPTY_TEXT = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _item(kind: str, prefix: str, status: str, **fields: Any) -> dict[str, Any]:
    name = f"{prefix}_{secrets.token_hex(12)}"
    return {"type": kind, "id": name, "status": status, **fields}


def response_events(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events of an answer, in the order in which OpenAI's SDK puts it together.

    The last is `response.completed` for an answer that was cut off as well: the SDK waits for it,
    and reads the status in it."""
    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(answer["output"]):
        where = {"item_id": item["id"], "output_index": index}
        empty = _begun(item)
        events.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        match item["type"]:
            case "message":
                events += _text_events(item["content"][0], where)
            case "reasoning":
                events += _reasoning_events(item["content"][0], where)
            case _:
                events += _arguments_events(item, where)
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": answer})
    return [{**event, "sequence_number": place} for place, event in enumerate(events)]


def _begun(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item before anything of it is written."""
    if item["type"] == "function_call":
        return {**item, "status": "in_progress", "arguments": ""}
    return {**item, "status": "in_progress", "content": []}


def _text_events(part: Mapping[str, Any], where: Mapping[str, Any]) -> list[dict[str, Any]]:
    place = {**where, "content_index": 0}
    delta = {"delta": part["text"], "logprobs": []}
    done = {"text": part["text"], "logprobs": []}
    return [
        {"type": "response.content_part.added", **place, "part": EMPTY_TEXT},
        {"type": "response.output_text.delta", **place, **delta},
        {"type": "response.output_text.done", **place, **done},
        {"type": "response.content_part.done", **place, "part": part},
    ]


def _reasoning_events(part: Mapping[str, Any], where: Mapping[str, Any]) -> list[dict[str, Any]]:
    place = {**where, "content_index": 0}
    return [
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        {"type": "response.reasoning_text.delta", **place, "delta": part["text"]},
        {"type": "response.reasoning_text.done", **place, "text": part["text"]},
        {"type": "response.content_part.done", **place, "part": part},
    ]


def _arguments_events(item: Mapping[str, Any], where: Mapping[str, Any]) -> list[dict[str, Any]]:
    name, arguments = item["name"], item["arguments"]
    return [
        {"type": "response.function_call_arguments.delta", **where, "delta": arguments},
        {
            "type": "response.function_call_arguments.done",
            **where,
            "name": name,
            "arguments": arguments,
        },
    ]
