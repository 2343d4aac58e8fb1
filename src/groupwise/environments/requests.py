"""Requests of the endpoint's clients, read from JSON and checked: a parameter that changes what is
drawn is never ignored.

Two forms: token ids (`POST /inference/v1/generate`, vLLM's) and chat messages (`POST
/v1/chat/completions`, OpenAI's).  A parameter that is null is not there.  One that nobody knows is
refused with token ids; with messages it is noted, because agents add some every month.  The modules
`messages_api` and `responses_api` turn two further forms into chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from groupwise.data.messages import ARGUMENTS, from_json, switch_as_text
from groupwise.data.sources import too_deep
from groupwise.records import Finish, Sampling
from groupwise.utils.http import Refused


def error_body(refused: Refused) -> dict[str, Any]:
    """Return an error as OpenAI's servers write it."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {
        "error": {
            "message": str(refused),
            "type": kind,
            "param": refused.param,
            "code": refused.code or None,
        }
    }


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A turn of an episode, as it was sampled."""

    tokens: Sequence[int]
    logp: Sequence[float]
    """Log-probability of each token, nats."""
    finish: Finish
    """EOS, STOP or LENGTH."""
    version: int
    """Optimizer steps that the policy had taken."""
    turn: int = 0
    """Number of the turn in the episode."""
    stopped_at: str | None = None
    """The stop string of the request that ended it."""


# ---- the forms of bodies


def _wrong(words: str) -> PydanticCustomError:
    """What is wrong with a value, in words that follow its name."""
    return PydanticCustomError("wrong", "{words}", {"words": words})


def _temperature(value: float) -> float:
    """0, or what single precision can divide logits by."""
    if value != 0 and not 0.001 <= value <= 1000.0:
        raise _wrong("must be 0, or a number from 0.001 to 1000")
    return value


def _text(content: Any) -> Any:
    """Text, or the text of parts that hold nothing else."""
    if not isinstance(content, list):
        return content
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise _wrong(f"holds a part of type {kind!r}: only text can be read here")
    return "".join(part["text"] for part in content)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the client wrote it: templates show its keys in their order."""
    function = tool.get("function")
    if (
        not isinstance(function, Mapping)
        or tool.get("type") != "function"
        or not isinstance(function.get("name"), str)
    ):
        raise _wrong('must be {"type": "function", "function": {"name": ...}}')
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise _wrong("has function.parameters that are no JSON schema")
    return tool


def _variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Variables of the chat template, held against what a template can be given."""
    for name in ARGUMENTS:
        if name in variables:
            raise _wrong(f"sets {name!r}, which is no variable of the chat template: leave it out")
    if remedy := switch_as_text(variables):
        raise _wrong(f"is wrong: {remedy}")
    return variables


class _Body(BaseModel):
    """JSON of a client's.  Nothing is converted, a key that is null is not there, and any other
    must be one that is known.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Keys that do not change which distribution is drawn from."""
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Keys that are understood at these values only, which leave the distribution as it is."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        for key, values in cls.neutral.items():
            if body.get(key) is not None and body[key] not in values:
                raise PydanticCustomError(
                    "key",
                    "{key}",
                    {
                        "key": key,
                        "words": (
                            f"is {json.dumps(body[key])[:80]}, which cannot be served here: leave"
                            " it out"
                        ),
                    },
                )
        idle = cls.harmless | cls.neutral.keys()
        return {key: value for key, value in body.items() if value is not None and key not in idle}


class _Part(_Body):
    """An object inside of a body, which may hold more: clients repeat the whole of an answer."""

    model_config = ConfigDict(extra="ignore")


class SamplingRequest(_Body):
    """The sampling parameters of a request; None: as the run samples."""

    harmless = frozenset(("seed",))  # a run draws by its own
    neutral = {
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "n": (1,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
    }

    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(lambda one: [one] if isinstance(one, str) else one),
    ] = []
    temperature: Annotated[float, AfterValidator(_temperature)] | None = None
    # vLLM writes -1 for all
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31), AfterValidator(lambda k: max(k, 0))] | None = (
        None
    )
    top_p: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    """Single precision cannot tell less from 0."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    def check_against(self, sampling: Sampling) -> None:
        """Raises Refused if it asks for another distribution than the run samples from: what was
        sampled is what is scored.
        """
        for name in ("temperature", "top_k", "top_p", "min_p"):
            wanted, ours = getattr(self, name), getattr(sampling, name)
            if wanted is not None and wanted != ours:
                raise Refused(
                    f"{name} is {wanted:g}, but this run samples with {name} {ours:g}: leave it"
                    f" out, or set rollout.{name} in the recipe",
                    param=name,
                )
        if self.stop and not set(sampling.stop) <= set(self.stop):
            raise Refused(
                f"the stop strings are {str(self.stop)[:80]}, but this run stops at"
                f" {list(sampling.stop)} as well: leave them out, or set rollout.stop in the"
                " recipe",
                param="stop",
            )


class _DrawnBody(SamplingRequest):
    """vLLM's `sampling_params`."""

    harmless = SamplingRequest.harmless | {
        "detokenize",
        "routed_experts_prompt_start",
        "skip_special_tokens",
    }
    neutral = SamplingRequest.neutral | {
        "include_stop_str_in_output": (True,),
        "min_tokens": (0,),
        "prompt_logprobs": (0,),
        "spaces_between_special_tokens": (True, False),
    }

    allowed_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=1)] = 0
    """Whether the log-probability of the drawn token is wanted; no others are known."""
    stop_token_ids: list[int] = []


class _TokenBody(_Body):
    harmless = frozenset(("cache_salt", "model", "priority", "request_id", "return_token_ids"))
    neutral = {"features": ({}, []), "stream": (False,)}

    token_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: _DrawnBody = _DrawnBody()


class _FunctionPart(_Part):
    name: str
    arguments: str = "{}"
    """JSON, as the client wrote it."""


class _CallPart(_Part):
    id: str
    type: Literal["function"] = "function"
    function: _FunctionPart


class _MessagePart(_Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text)] = ""
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: Annotated[
        str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))
    ] = None
    tool_calls: list[_CallPart] | None = None

    @model_validator(mode="after")
    def _calls_are_the_assistants(self) -> _MessagePart:
        if self.tool_calls and self.role != "assistant":
            raise _wrong("has tool_calls, which belong into a message of the assistant")
        return self


class _StreamPart(_Part):
    include_usage: bool = False


NEVER: tuple[Any, ...] = ()
"""The values at which a key is understood that cannot be served at all."""


class ChatRequest(SamplingRequest):
    """The next turn of a conversation: the body of `POST /v1/chat/completions`, and what the bodies
    of the other APIs with messages become.
    """

    harmless = SamplingRequest.harmless | {
        *(
            "metadata",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        )
    }
    neutral = SamplingRequest.neutral | {
        "allowed_token_ids": NEVER,
        "bad_words": ([],),
        "best_of": (1,),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "guided_choice": NEVER,
        "guided_grammar": NEVER,
        "guided_json": NEVER,
        "guided_regex": NEVER,
        "ignore_eos": (False,),
        "length_penalty": (1,),
        "min_tokens": (0,),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},),
        "stop_token_ids": ([],),
        "structured_outputs": NEVER,
        "tool_choice": ("auto", "required", "any"),
        "top_logprobs": (0,),
        "use_beam_search": (False,),
    }
    wished: ClassVar[dict[str, tuple[Any, ...]]] = {
        "parallel_tool_calls": (False,),
        "tool_choice": ("required", "any"),
    }
    """Keys whose values say how the client would like the turn, and that change nothing."""

    parts: Annotated[list[_MessagePart], Field(alias="messages", min_length=1)]
    tools: list[Annotated[dict[str, Any], AfterValidator(_tool)]] | None = None
    variables: Annotated[
        dict[str, Any], Field(alias="chat_template_kwargs"), AfterValidator(_variables)
    ] = {}
    """Further variables of the chat template."""
    logprobs: bool = False
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    model: Annotated[str, BeforeValidator(str)] = ""
    stream: bool = False
    stream_options: _StreamPart = _StreamPart()
    wishes: tuple[str, ...] = ()
    """What the client asks for and does not get: kinds of tools that are not shown to the policy,
    and keys of `wished`.
    """
    unknown: tuple[str, ...] = ()
    """Keys of the body that nobody knows."""
    agent: str = ""
    """The session that the client names, where several agents share an episode."""

    @classmethod
    def keys_of_body(cls) -> frozenset[str]:
        """Return the keys that a client's body may have and that are understood."""
        names = {field.alias or name for name, field in cls.model_fields.items()}
        return cls.harmless | cls.neutral.keys() | (names - {"wishes", "unknown", "agent"})

    @model_validator(mode="after")
    def _in_one_form(self) -> ChatRequest:
        self.max_tokens = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        self.tools = self.tools or None
        return self

    @cached_property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """Return the messages as chat templates want them: text in `content`, arguments of calls as
        objects, with a tool's result the tool's name.
        """
        messages = [part.model_dump(exclude_none=True) for part in self.parts]
        names: dict[str, str] = {}
        for message in messages:
            for call in message.get("tool_calls", ()):
                names[call["id"]] = call["function"]["name"]
                call["function"]["arguments"] = _object(call["function"]["arguments"])
        for message in messages:
            if (
                message["role"] == "tool"
                and "name" not in message
                and (call := message.get("tool_call_id")) in names
            ):
                message["name"] = names[call]
        return tuple(messages)

    @property
    def size(self) -> int:
        """Return the characters of its messages, tools and variables."""
        size = len(json.dumps([self.tools, self.variables], ensure_ascii=False))
        for part in self.parts:
            size += len(part.content) + len(part.reasoning_content or "")
            size += sum(len(call.function.arguments) for call in part.tool_calls or ())
        return size

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """What tells the messages apart, one for each; see `message_key`."""
        return tuple(map(message_key, self.messages))

    @property
    def setting(self) -> str:
        """Name tools, variables and agent: conversations that differ there do not continue each
        other.
        """
        return json.dumps([self.tools, self.variables, self.agent], sort_keys=True)


Form = TypeVar("Form", bound=_Body)


SENTENCES = {
    "missing": "is missing",
    "too_short": "must hold at least one entry",
    "string_too_short": "must not be empty",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
}
"""Sentences in place of pydantic's, which speak of Python, by the type of its error."""


def _read(
    form: type[Form],
    body: Mapping[str, Any],
    client_names: Mapping[str, str] = MappingProxyType({}),
) -> Form:
    """The body in its form.  Raises Refused for the first thing that is wrong.

    client_names: keys of the form that the client calls otherwise."""
    try:
        return form.model_validate(body)
    except ValidationError as invalid:
        error = invalid.errors(include_url=False)[0]
    keys = error["loc"] if error["type"] != "key" else (*error["loc"], error["msg"])
    keys = [client_names.get(str(keys[0]), keys[0]), *keys[1:]]
    name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(
        "."
    )
    kind, value = error["type"], json.dumps(error["input"], default=str)[:80]
    if kind == "extra_forbidden":
        raise Refused(f"unknown parameter {name!r}", param=name)
    if kind in ("key", "wrong"):
        words = error.get("ctx", {})["words"]
    elif kind in SENTENCES:
        words = SENTENCES[kind]
    else:
        words = f"must be {error['msg'].removeprefix('Input should be ')}, got {value}"
    raise Refused(f"{name} {words}", param=name)


@dataclass(slots=True, eq=False)
class TurnRequest:
    """A turn that a client waits for."""

    context: np.ndarray
    """int64 (c,): what it is drawn behind."""
    sampling: SamplingRequest
    thinking: bool = False
    """True if its context ends inside a think block."""
    new_messages: tuple[Mapping[str, Any], ...] | None = None
    """Messages of a chat request behind the last one that was recognised; all, where none was.
    """
    after: int | None = None
    """Number of the turn that was recognised."""
    sampled: Future[SampledTokens] = field(default_factory=Future)


# ---- token ids


def read_token_request(
    body: Mapping[str, Any], *, vocabulary: int, eos_ids: Sequence[int]
) -> tuple[np.ndarray, SamplingRequest]:
    """The body of `POST /inference/v1/generate`: ids (c,), c >= 1, and how to sample behind them.

    Raises Refused for what cannot be done exactly as it is requested.
    """
    read = _read(_TokenBody, body)
    drawn, ids = read.sampling_params, read.token_ids
    if not all(0 <= token < vocabulary for token in ids):
        raise Refused(f"token_ids must be ids from 0 to {vocabulary - 1}", param="token_ids")
    ends = drawn.stop_token_ids
    if not set(ends) <= set(eos_ids):
        raise Refused(
            f"stop_token_ids is {str(ends)[:80]}, but completions end at {list(eos_ids)} and"
            " nowhere else",
            param="stop_token_ids",
        )
    if drawn.ignore_eos and not set(eos_ids) <= set(ends):
        raise Refused(
            f"completions end at {list(eos_ids)}: leave ignore_eos out", param="ignore_eos"
        )
    if drawn.allowed_token_ids not in (None, list(range(vocabulary))):
        raise Refused(
            "all tokens of the vocabulary are drawn from: leave allowed_token_ids out",
            param="allowed_token_ids",
        )
    return np.asarray(ids, dtype=np.int64), drawn


def token_answer(name: str, sampled: SampledTokens) -> dict[str, Any]:
    """What `POST /inference/v1/generate` answers.  name: of the request."""
    choice = {
        "index": 0,
        "token_ids": [int(token) for token in sampled.tokens],
        "finish_reason": "length" if sampled.finish is Finish.LENGTH else "stop",
        "stop_reason": None,
        "logprobs": {
            "content": [
                {
                    "token": f"token_id:{int(token)}",
                    "logprob": float(logp),
                    "token_id": int(token),
                    "top_logprobs": [],
                }
                for token, logp in zip(sampled.tokens, sampled.logp, strict=True)
            ]
        },
        "weight_versions": [
            {"version": str(sampled.version), "start": 0, "end": len(sampled.tokens)}
        ],
    }
    return {"request_id": name, "choices": [choice]}


# ---- messages


def read_chat_request(
    body: Mapping[str, Any],
    *,
    wishes: Sequence[str] = (),
    client_names: Mapping[str, str] = MappingProxyType({}),
) -> ChatRequest:
    """Read the body of `POST /v1/chat/completions`, or of another API in its form.

    wishes: what the client asks for and the body leaves out.   client_names: keys that the client
    calls otherwise.
    Raises Refused for what cannot be done as it is requested.
    """
    known = ChatRequest.keys_of_body()
    read = {key: value for key, value in body.items() if key in known}
    if read.get("tool_choice") == "none":
        del read["tool_choice"]
        read.pop("tools", None)
    noted = list(wishes)
    for key, values in ChatRequest.wished.items():
        if read.get(key) in values:
            noted.append(key)
    unknown = [key for key, value in body.items() if key not in known and value is not None]
    read |= {"wishes": tuple(noted), "unknown": tuple(unknown)}
    return _read(ChatRequest, read, client_names)


def objects_in(value: Any, name: str) -> list[Mapping[str, Any]]:
    """Return the objects of a list.  name: the parameter's.   Raises Refused for what is none."""
    if not isinstance(value, list):
        raise Refused(f"{name} must be a list", param=name)
    for place, one in enumerate(value):
        if not isinstance(one, Mapping):
            raise Refused(f"{name}[{place}] must be an object", param=f"{name}[{place}]")
    return value


def text_in(content: Any, name: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return a text, or the text of parts of these kinds, joined.

    Raises Refused, naming the parameter, for parts that hold anything else."""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(objects_in(content, name)):
        text = part.get("text")
        if part.get("type") not in kinds or not isinstance(text, str):
            where = f"{name}[{place}]"
            raise Refused(
                f"{where} is of type {part.get('type')!r:.40}: only text can be read here",
                param=where,
            )
        texts.append(text)
    return "".join(texts)


def string_in(holder: Mapping[str, Any], key: str, name: str) -> str:
    """Return the string that an object has under a key.  Raises Refused where it has none."""
    value = holder.get(key)
    if not isinstance(value, str):
        raise Refused(f"{name}.{key} must be a string", param=f"{name}.{key}")
    return value


def function_tool(tool: Mapping[str, Any], parameters: str, name: str) -> dict[str, Any]:
    """Return a tool in the form of chat completions.

    parameters: the key of its JSON schema.   name: of the tool's place in the body.
    Raises Refused for a tool without a name."""
    function: dict[str, Any] = {"name": string_in(tool, "name", name)}
    if tool.get("description"):
        function["description"] = tool["description"]
    function["parameters"] = tool.get(parameters) or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def event_stream(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Return events as server-sent events, each named by its `type`."""
    lines = []
    for event in events:
        lines.append(f"event: {event['type']}\ndata: {json.dumps(event, allow_nan=False)}\n\n")
    return "".join(lines).encode()


def message_key(message: Mapping[str, Any]) -> str:
    """What makes a message the same as one that was served: role, text, and calls by id, name and
    arguments.

    Reasoning is no part of it: clients drop it when they repeat the assistant's message.  Arguments
    are compared as JSON: clients write it anew.  Space around the assistant's text is no part of
    it: clients cut it off.
    """
    calls = [
        [call["id"], call["function"]["name"], _object(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    text = message.get("content") or ""
    if message["role"] == "assistant":
        text = text.strip()
    return json.dumps([message["role"], text, calls, message.get("tool_call_id")], sort_keys=True)


def _object(arguments: Any) -> Any:
    """Arguments of a call as an object; as they are, if they are the JSON of none, or nested so
    deep that a template could not write it."""
    value = from_json(arguments)
    if isinstance(value, dict) and not too_deep(value):
        return value
    return arguments
