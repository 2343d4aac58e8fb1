"""Anthropic's Messages API (`POST /v1/messages`): from its body to the one inner request, and from
a turn to its answer, its events and its errors.

| Messages | chat |
|---|---|
| `system`, blocks of type `text` | the first message; blocks are joined |
| `thinking` | `reasoning_content`; signatures are dropped |
| `tool_use`, `tool_result` | `tool_calls`, a message of the role `tool` |
| `stop_sequences`, `tool_choice: {type: any}` | `stop`, `tool_choice: required` |
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from http import HTTPStatus
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
        "cache_control",
        "context_management",
        "metadata",
        "output_config",
        "service_tier",
        "thinking",
    )
)
"""Keys that change neither what the policy sees nor what it is drawn from."""
BILLING = "x-anthropic-billing-header"
"""How a block of Claude Code's system prompt begins that differs in every request."""
SIGNATURE = "groupwise"
"""The signature of a thinking block; clients want one that is not empty."""
STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
ERRORS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
}
"""Anthropic's names of errors; any other is an `invalid_request_error`."""


def read_messages_request(body: Mapping[str, Any]) -> ChatRequest:
    """Read the body of `POST /v1/messages` or of `POST /v1/messages/count_tokens`.

    Raises Refused for what cannot be done as it is requested."""
    output = body.get("output_config")
    if isinstance(output, Mapping) and output.get("format") is not None:
        raise Refused(
            "output_config.format cannot be served here: leave it out",
            param="output_config.format",
        )
    translated = HARMLESS | {"system", "stop_sequences", "tools", "tool_choice"}
    chat = {key: value for key, value in body.items() if key not in translated}
    chat["stop"] = body.get("stop_sequences")
    chat["messages"] = _messages(body)
    wishes: list[str] = []
    chat["tools"] = _tools(body, wishes)
    chat |= _tool_choice(body.get("tool_choice"))
    return read_chat_request(chat, wishes=wishes, client_names={"stop": "stop_sequences"})


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages in the form of chat completions, the system prompt first."""
    messages = []
    system = _system_text(body.get("system") or "", "system")
    if system:
        messages.append({"role": "system", "content": system})
    given = objects_in(body.get("messages"), "messages")
    if not given:
        raise Refused("messages must hold at least one entry", param="messages")
    for place, message in enumerate(given):
        name = f"messages[{place}]"
        role, content = message.get("role"), message.get("content") or ""
        if role == "system":
            messages.append({"role": "system", "content": _system_text(content, f"{name}.content")})
        elif isinstance(content, str) or role not in ("user", "assistant"):
            messages.append({"role": role, "content": content})  # an unknown role is refused later
        elif role == "assistant":
            messages.append(_assistant(objects_in(content, f"{name}.content"), name))
        else:
            messages += _user(objects_in(content, f"{name}.content"), name)
    return messages


def _system_text(content: Any, name: str) -> str:
    """The text of a system prompt without what the client says to its biller."""
    if isinstance(content, list):
        content = [
            block
            for block in objects_in(content, name)
            if not str(block.get("text")).startswith(BILLING)
        ]
    return text_in(content, name)


def _user(blocks: list[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """The results of tools, then what the user says."""
    messages, text = [], ""
    for place, block in enumerate(blocks):
        where = f"{name}.content[{place}]"
        if block.get("type") == "tool_result":
            call = string_in(block, "tool_use_id", where)
            result = text_in(block.get("content") or "", f"{where}.content")
            messages.append({"role": "tool", "tool_call_id": call, "content": result})
        else:
            text += text_in([block], where)
    if text or not messages:
        messages.append({"role": "user", "content": text})
    return messages


def _assistant(blocks: list[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """A turn of the policy, or of whoever else spoke as the assistant."""
    text, reasoning, calls = "", "", []
    for place, block in enumerate(blocks):
        where = f"{name}.content[{place}]"
        kind = block.get("type")
        if kind == "thinking":
            reasoning += string_in(block, "thinking", where)
        elif kind == "tool_use":
            function = {
                "name": string_in(block, "name", where),
                "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
            }
            calls.append({"id": string_in(block, "id", where), "function": function})
        elif kind != "redacted_thinking":
            text += text_in([block], where)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tools(body: Mapping[str, Any], wishes: list[str]) -> list[dict[str, Any]]:
    """The client's own tools.  Those that Anthropic runs, or whose schema it alone knows, are noted
    as wishes.
    """
    tools = []
    for place, tool in enumerate(objects_in(body.get("tools") or [], "tools")):
        kind = tool.get("type") or "custom"
        if kind != "custom":
            wishes.append(str(kind))
            continue
        if tool.get("strict"):
            wishes.append("strict")
        tools.append(function_tool(tool, "input_schema", f"tools[{place}]"))
    return tools


def _tool_choice(choice: Any) -> dict[str, Any]:
    """The keys of chat completions that say the same."""
    if choice is None:
        return {}
    if not isinstance(choice, Mapping):
        raise Refused("tool_choice must be an object", param="tool_choice")
    kind = choice.get("type")
    keys: dict[str, Any] = {"tool_choice": choice}  # a named tool is refused by its own words
    if kind in ("auto", "any", "none"):
        keys["tool_choice"] = kind
    if choice.get("disable_parallel_tool_use"):
        keys["parallel_tool_calls"] = False
    return keys


def messages_answer(turn: ServedTurn) -> dict[str, Any]:
    """Return what `POST /v1/messages` answers."""
    message = turn.response.message
    content: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        thinking = message["reasoning_content"]
        content.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
    if message.get("content"):
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        content.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": arguments,
            }
        )
    reason = STOP_REASONS[turn.response.finish_reason]
    stopped = turn.sampled.stopped_at
    if stopped is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": turn.request.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stopped if reason == "stop_sequence" else None,
        "usage": {"input_tokens": turn.context, "output_tokens": len(turn.sampled.tokens)},
    }


def message_events(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events of an answer, in the order in which Anthropic's SDK puts it together."""
    usage = answer["usage"]
    begun = {
        **answer,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(answer["content"]):
        empty, deltas = _in_deltas(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        for delta in deltas:
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    ending = {key: answer[key] for key in ("stop_reason", "stop_sequence")}
    events.append({"type": "message_delta", "delta": ending, "usage": usage})
    events.append({"type": "message_stop"})
    return events


def _in_deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what is added to it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
            signature = {"type": "signature_delta", "signature": block["signature"]}
            return {**block, "thinking": "", "signature": ""}, [thinking, signature]
        case _:
            text = json.dumps(block["input"], ensure_ascii=False)
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def error_body(refused: Refused) -> dict[str, Any]:
    """Return an error as Anthropic's servers write it."""
    kind = ERRORS.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}
