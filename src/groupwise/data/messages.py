"""Chat messages as rows hold them -> messages whose content is text, or the reason for which they
cannot be used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from groupwise.data.images import is_image_part, text_of
from groupwise.data.sources import BadRow, too_deep
from groupwise.errors import DataError
from groupwise.utils.terminal import escaped

Messages = list[dict[str, Any]]
Content = str | Messages
"""What a row asks, before any chat template: a plain string, or chat messages."""

BESIDE = ("tool_calls", "reasoning_content", "reasoning", "thinking", "function_call", "refusal")
"""What a message of the assistant may say beside its content."""
OPENING = ("system", "developer")
TEXTS = ("text", "input_text", "output_text")
"""Kinds of parts that hold text."""
VARIABLES = "chat_template_kwargs"
"""The column with the chat template's variables."""
ARGUMENTS = (
    "messages",
    "conversation",
    "conversations",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_assistant_tokens_mask",
)
"""Arguments of the renderer, which rows and the library set."""
SWITCHES = ("true", "false", "yes", "no", "on", "off")
"""Texts that stand for a switch; YAML and columnar files make texts of switches."""
NO_VARIABLES = "with chat_template_kwargs that cannot be used"
NO_CALLS = "with tool_calls that are no list of calls"
NO_TEXT = "with content that is no text"
IN_SEQUENCE = "with two turns of the assistant in sequence"
CONTRADICTS = "whose prompt is another than that of its conversation"


def checked(value: object, column: str, where: str, *, images: bool = False) -> Content:
    """A string as it is; messages with their content as text, the parts of a content joined.

    images: a content with parts that are images stays a list of parts.
    Raises BadRow, naming column and `where`, for what is neither, and for content that is no text
    (images, unknown parts)."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        kind = f"{value!r:.60} ({type(value).__name__})"
        if value is None:
            kind = "empty (null)"
        raise DataError(f"{where}: {column} is {kind}: expected a string or a list of messages")
    return [_message(message, column, where, images) for message in value] or ""


def _message(message: object, column: str, where: str, images: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(
            f"{where}: a message in {column} needs role and content, got {message!r:.80}"
        )
    calls = message.get("tool_calls")
    if calls is not None and not _is_list_of_objects(calls):
        raise BadRow(
            NO_CALLS,
            f"{where}: tool_calls of a message in {column} is {calls!r:.60}: expected a list of"
            " calls",
        )
    content = message.get("content")
    if (
        content is None
        and message["role"] in ("assistant", "tool", "function")
        and ("content" in message or beside(message))
    ):
        return {**message, "content": ""}
    if "content" not in message:
        raise DataError(
            f"{where}: a message in {column} needs role and content, got {message!r:.80}"
        )
    if isinstance(content, list):
        if images and any(map(is_image_part, content)):
            return {**message, "content": _parts(content, column, where)}
        return {**message, "content": "".join(_part(part, column, where) for part in content)}
    if not isinstance(content, str):
        kind = f"{content!r:.60} ({type(content).__name__})"
        if content is None:
            kind = "null"
        raise DataError(f"{where}: the content of a message in {column} is {kind}: expected text")
    return dict(message)


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(inner, Mapping) for inner in value)


def _parts(content: list[Any], column: str, where: str) -> list[Any]:
    """Parts of a content: images as they are, texts with nothing beside."""
    parts = []
    for part in content:
        if not is_image_part(part):
            part = {"type": "text", "text": _part(part, column, where)}
        parts.append(part)
    return parts


def _part(part: object, column: str, where: str) -> str:
    kind = f"{part!r:.40}"
    if isinstance(part, Mapping):
        named, text = part.get("type"), part.get("text")
        if (named is None or named in TEXTS) and isinstance(text, str):
            return text
        if named is not None:
            kind = f"of type {named!r:.40}"
    raise BadRow(
        NO_TEXT,
        f"{where}: {column} holds a part of content {escaped(kind)}: only text can be read here",
    )


def beside(message: Mapping[str, Any]) -> list[str]:
    """What a message says beside its content.

    >>> beside({"role": "assistant", "content": "", "tool_calls": [{}], "reasoning_content": None})
    ['tool_calls']
    """
    return [key for key in BESIDE if message.get(key)]


def is_blank(content: Content) -> bool:
    """True for an empty prompt or answer: a string of white space, or messages whose last one has
    no text and calls nothing.
    """
    if isinstance(content, str):
        return not content.strip()
    spoken = [message for message in content if message["role"] not in OPENING]
    if not spoken:
        return True
    last = spoken[-1]
    return says_nothing(last["content"]) and not (
        last.get("tool_calls") or last.get("function_call")
    )


def says_nothing(content: Any) -> bool:
    """True for a message's content without a text: None, white space, or parts that hold no more.

    >>> says_nothing([{"type": "text", "text": " "}]), says_nothing([{"type": "image"}])
    (True, False)
    """
    if isinstance(content, list):
        return all(says_nothing(part) for part in content)
    if isinstance(content, Mapping):
        return content.get("type", "text") in TEXTS and says_nothing(content.get("text"))
    return not str(content or "").strip()


def before_the_answer(messages: Messages, column: str, where: str) -> Messages:
    """A conversation without a last turn of the assistant.  Raises BadRow if that follows another
    one of the assistant.
    """
    if messages[-1]["role"] != "assistant":
        return messages
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise BadRow(
            IN_SEQUENCE,
            f"{where}: {column} ends with two turns of the assistant in sequence: join them, or"
            " leave one out",
        )
    return messages[:-1]


def openings(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """The messages of the system and of the developer."""
    return [dict(message) for message in messages if message["role"] in OPENING]


def asks(content: Content, column: str, where: str) -> Content:
    """`content` if an answer can follow it.  Raises BadRow if it ends with a call: its result is
    missing.
    """
    if (
        not isinstance(content, str)
        and content[-1]["role"] == "assistant"
        and calls_of(content[-1:])
    ):
        raise BadRow(
            "whose prompt ends with a call",
            f"{where}: {column} ends with a call, and its result is missing",
        )
    return content


def calls_of(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The functions that messages call, with their arguments."""
    calls: list[Mapping[str, Any]] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call, Mapping):
                calls.append(_function_of(call))
    return calls


def _function_of(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool or call, which stands under `function` or is the whole."""
    function = described.get("function")
    return function if isinstance(function, Mapping) else described


def from_json(value: Any) -> Any:
    """What a JSON text stands for; a text that is none, and any other value, as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def with_arguments(
    messages: Sequence[Mapping[str, Any]], *, as_text: bool
) -> Sequence[Mapping[str, Any]]:
    """The same messages; the arguments of calls are JSON text, or what the text stands for."""
    converted: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [_with_arguments(call, as_text=as_text) for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        converted.append(message)
    return converted


def _with_arguments(call: Any, *, as_text: bool) -> Any:
    """A call with its arguments as JSON text, or as what the text stands for."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], as_text=as_text)}
    arguments = call.get("arguments")
    if as_text:
        if isinstance(arguments, Mapping):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return call
    read = from_json(arguments)
    if isinstance(read, dict) and not too_deep(read):
        return {**call, "arguments": read}
    return call


def garbled(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """True if arguments stand in a rendering as no JSON object: as a string of JSON, or as Python
    writes a dictionary.
    """
    for call in calls_of(messages):
        arguments = call.get("arguments")
        if isinstance(arguments, str) and arguments.strip().startswith("{"):
            if '"' in arguments and any(written in text for written in _as_json(arguments)):
                return True
        elif isinstance(arguments, Mapping) and arguments and str(dict(arguments)) in text:
            return True
    return False


def unwritten(messages: Messages, text: str) -> bool:
    """True if a rendering lacks what a message says that is not the assistant's."""
    for message in messages:
        words = text_of(message["content"]).strip()
        if message["role"] == "assistant" or words in text:
            continue
        if not any(written[1:-1] in text for written in _as_json(words)):
            return True
    return False


def _as_json(text: str) -> tuple[str, str]:
    """A text as JSON writes it: with escapes alone, and with all characters."""
    return json.dumps(text), json.dumps(text, ensure_ascii=False)


def tools_in(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The JSON schemas in a row's column `tools`, a list or its JSON text; None if they cannot be
    read.

    >>> tools_in({"tools": '[{"name": "now"}]'}), tools_in({"tools": None})
    ([{'name': 'now'}], [])
    >>> print(tools_in({"tools": ["now"]}))
    None
    """
    tools = from_json(row.get("tools"))
    if not tools:
        return []
    if not _is_list_of_objects(tools) or too_deep(tools) or not all(names_of(tools)):
        return None
    return [dict(tool) for tool in tools]


def variables_in(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The chat template's variables in a row's column `chat_template_kwargs`, an object or its JSON
    text.

    Raises BadRow for what is neither, and for a name that is no variable of a template.

    >>> variables_in({"chat_template_kwargs": '{"enable_thinking": false}'}, "row 1")
    {'enable_thinking': False}
    """
    variables = from_json(row.get(VARIABLES))
    if not variables:
        return {}
    if not isinstance(variables, Mapping) or too_deep(variables):
        raise BadRow(
            NO_VARIABLES,
            f"{where}: {VARIABLES} is {variables!r:.60}: expected an object of the chat template's"
            " variables",
        )
    for name in ARGUMENTS:
        if name in variables:
            raise BadRow(
                NO_VARIABLES,
                f"{where}: {VARIABLES} sets {name!r}, which is no variable of the chat template:"
                " leave it out",
            )
    if remedy := switch_as_text(variables):
        raise BadRow(NO_VARIABLES, f"{where}: {VARIABLES}: {remedy}")
    return variables


def switch_as_text(variables: Mapping[str, Any]) -> str:
    """What is wrong with a switch that is set to a text, which every template takes as true; empty
    where none is.

    >>> switch_as_text({"enable_thinking": "no"})[:52]
    "enable_thinking is the text 'no', which a template t"
    """
    for name, value in variables.items():
        if isinstance(value, str) and value.strip().lower() in SWITCHES:
            return (
                f"{name} is the text {value!r}, which a template takes as true: write true or"
                " false, without quotes"
            )
    return ""


def names_of(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    """The name of each tool or call, on its own or under `function`; empty where it has none."""
    names = []
    for described in functions:
        name = _function_of(described).get("name")
        names.append(name if isinstance(name, str) else "")
    return names


def names_missing(functions: Sequence[Mapping[str, Any]], text: str) -> bool:
    """True if the name of a tool or call does not stand in a rendering as a word.

    >>> names_missing([{"name": "now"}], 'know <call>{"name": "now"}')
    False
    >>> names_missing([{"name": "now"}], "know")
    True
    """
    names = {re.escape(name) for name in names_of(functions) if name}
    return any(re.search(rf"(?<!\w){name}(?!\w)", text) is None for name in names)


def joined(
    prompt: Messages, turns: Messages, column: str, where: str, answer: str = ""
) -> Messages:
    """The conversation of a prompt and of turns that repeat it, or its end, or follow it.

    answer: what the assistant says behind the turns.
    A system message that one of them holds is kept; an open turn of the assistant is continued.
    Where the turns and the answer repeat a prompt together with its open turn, and say more in that
    turn, the prompt ends before it.
    Raises BadRow if the turns begin otherwise than the prompt.

    >>> question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    >>> joined([question], [question, answer], "chosen", "row 1") == [question, answer]
    True
    >>> joined([question], [answer], "chosen", "row 1") == [question, answer]
    True
    """
    opening, question = _opening(prompt), prompt[_opening(prompt) :]
    if not turns or _same(prompt[-len(turns) :], turns):
        return prompt
    spoken = turns[_opening(turns) :]
    again = bool(question) and _same(spoken[:1], question[:1])
    if (
        not question
        or _same(spoken[: len(question)], question)
        or (again and _fills([*spoken, {"role": "assistant", "content": answer}], question))
    ):
        if _opening(turns) == 0:
            return prompt[:opening] + turns
        if opening == 0 or _same(turns[:opening], prompt[:opening]):
            return turns
    elif not again and (
        turns[0]["role"] not in ("user", *OPENING) or question[-1]["role"] == "assistant"
    ):
        if question[-1]["role"] == turns[0]["role"] == "assistant":
            last = {
                **prompt[-1],
                **turns[0],
                "content": prompt[-1]["content"] + turns[0]["content"],
            }
            return [*prompt[:-1], last, *turns[1:]]
        if turns[0]["role"] not in OPENING:
            return prompt + turns
    raise BadRow(CONTRADICTS, f"{where}: {column} begins otherwise than the prompt")


def _opening(messages: Messages) -> int:
    """How many messages stand before the first that is not the system's."""
    count = 0
    for message in messages:
        if message["role"] not in OPENING:
            break
        count += 1
    return count


def _fills(spoken: Messages, question: Messages) -> bool:
    """True if a conversation repeats a prompt that ends with an open turn of the assistant, and
    says more in that turn.
    """
    last = len(question) - 1
    if (
        question[last]["role"] != "assistant"
        or len(spoken) <= last
        or not _same(spoken[:last], question[:last])
    ):
        return False
    begun = str(question[last]["content"]).strip()
    whole = str(spoken[last]["content"]).strip()
    return bool(spoken[last]["role"] == "assistant") and whole.startswith(begun)


def _same(some: Messages, others: Messages) -> bool:
    return [_turn_of(message) for message in some] == [_turn_of(message) for message in others]


def _turn_of(message: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        message["role"],
        str(message["content"]).strip(),
        [message[key] for key in beside(message)],
    )
