"""Requests of the endpoint's clients, read from JSON and checked: a parameter that changes what is drawn is never ignored.

Two forms: token ids (`POST /inference/v1/generate`, vLLM's) and chat messages (`POST /v1/chat/completions`, OpenAI's).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import numpy as np

from groupwise.records import Finish, Sampling

ROLES = ("system", "developer", "user", "assistant", "tool")
HARMLESS = frozenset(
    ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "seed", "service_tier", "store", "user")
)
"""Parameters of chat requests that do not change which distribution is drawn from.  A run draws by its own seed."""
CHAT = frozenset(("chat_template_kwargs", "logprobs", "max_completion_tokens", "max_tokens", "messages", "min_p", "model", "n",
                  "stop", "stream", "stream_options", "temperature", "tools", "top_k", "top_p"))  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
}
"""Parameters that are understood at these values only, which are the same as leaving them out."""
TEMPERATURES = (0.001, 1000.0)
"""Beside 0: what single precision can divide logits by."""
SMALLEST = 1e-6
"""Of `top_p`: single precision cannot tell less from 0."""
DRAWN = frozenset(("ignore_eos", "logprobs", "max_tokens", "min_p", "n", "seed", "skip_special_tokens", "stop", "stop_token_ids",
                   "temperature", "top_k", "top_p", "allowed_token_ids", "detokenize", "routed_experts_prompt_start"))  # fmt: skip
DRAWN_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "include_stop_str_in_output": (True,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (0,),
    "repetition_penalty": (1,),
    "spaces_between_special_tokens": (True, False),
}


TOKENS = frozenset(
    ("cache_salt", "features", "model", "priority", "request_id", "return_token_ids", "sampling_params", "stream", "token_ids")
)
"""Keys of a request for token ids."""


class Refused(Exception):
    """A request that is answered with an error.  Codes from 400 on that OpenAI's client does not send again by itself."""

    def __init__(
        self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST, *, param: str | None = None, code: str = ""
    ) -> None:
        """param: the parameter that is wrong.   code: for programs."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """As OpenAI's servers write it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code or None}}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRequest:
    """The sampling parameters of a request; None: as the run samples."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    session: str = ""
    """Which of an episode's agents sent it, where several share it."""

    def check_against(self, sampling: Sampling) -> None:
        """Raises Refused if it asks for another distribution than the run samples from: what was sampled is what is scored."""
        for name in ("temperature", "top_k", "top_p", "min_p"):
            wanted, ours = getattr(self, name), getattr(sampling, name)
            if wanted is not None and wanted != ours:
                raise Refused(
                    f"{name} is {wanted:g}, but this run samples with {name} {ours:g}: leave it out, or set rollout.{name} in the "
                    "recipe",
                    param=name,
                )
        if self.stop and self.stop != sampling.stop:
            raise Refused(
                f"stop is {list(self.stop)}, but this run stops at {list(sampling.stop)}: leave it out, or set rollout.stop in the "
                "recipe",
                param="stop",
            )


@dataclass(frozen=True, slots=True, eq=False)
class TokenRequest:
    """Completions behind token ids."""

    context: np.ndarray
    """int64 (c,), c >= 1."""
    sampling: SamplingRequest


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatRequest:
    """The next turn of a conversation."""

    messages: tuple[Mapping[str, Any], ...]
    """As a chat template takes them: text in `content`, arguments of calls as objects."""
    keys: tuple[str, ...]
    """What tells the messages apart, one for each; see `message_key`."""
    sampling: SamplingRequest
    model: str
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    logprobs: bool = False
    stream: bool = False
    usage: bool = True
    """Of a stream: whether its last event tells how many tokens there were."""

    @property
    def setting(self) -> str:
        """Names tools and variables: conversations that differ there do not go on from each other."""
        return json.dumps([self.tools, self.variables], sort_keys=True)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A turn of an episode, as it was sampled."""

    tokens: Sequence[int]
    logp: Sequence[float]
    """Of each token, nats."""
    finish: Finish
    """EOS, STOP or LENGTH."""
    version: int
    """Optimizer steps that the policy had taken."""
    turn: int = 0
    """Its number in the episode."""


# ---- token ids ---------------------------------------------------------------------------------------------------------------


def read_token_request(body: Mapping[str, Any], *, vocabulary: int, eos_ids: Sequence[int], session: str = "") -> TokenRequest:
    """The body of `POST /inference/v1/generate`.  Raises Refused for what cannot be done exactly as it is asked for."""
    _no_others(body, TOKENS)
    if body.get("features") or body.get("stream"):
        name = "features" if body.get("features") else "stream"
        raise Refused(f"{name} cannot be served here: leave it out", param=name)
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < vocabulary for one in ids):
        raise Refused(f"token_ids must be a list of at least one id from 0 to {vocabulary - 1}", param="token_ids")
    drawn = body.get("sampling_params") or {}
    if not isinstance(drawn, Mapping):
        raise Refused("sampling_params must be an object", param="sampling_params")
    _no_others(drawn, DRAWN, DRAWN_NEUTRAL)
    ends = drawn.get("stop_token_ids") or []
    if not isinstance(ends, list) or not set(map(str, ends)) <= set(map(str, eos_ids)):
        raise Refused(f"stop_token_ids is {ends}, but completions end at {list(eos_ids)} and nowhere else", param="stop_token_ids")
    if drawn.get("ignore_eos") and not set(eos_ids) <= set(ends):
        raise Refused(f"completions end at {list(eos_ids)}: leave ignore_eos out", param="ignore_eos")
    if drawn.get("allowed_token_ids") not in (None, list(range(vocabulary))):
        raise Refused("all tokens of the vocabulary are drawn from: leave allowed_token_ids out", param="allowed_token_ids")
    _integer(drawn, "logprobs", 0, 1)  # of the drawn token; no others are known
    return TokenRequest(np.asarray(ids, dtype=np.int64), _sampling(drawn, drawn.get("max_tokens"), "max_tokens", session))


def token_answer(name: str, sampled: SampledTokens) -> dict[str, Any]:
    """What `POST /inference/v1/generate` answers.  name: of the request."""
    choice = {
        "index": 0,
        "token_ids": [int(token) for token in sampled.tokens],
        "finish_reason": "length" if sampled.finish is Finish.LENGTH else "stop",
        "stop_reason": None,
        "logprobs": {
            "content": [
                {"token": f"token_id:{int(token)}", "logprob": float(logp), "token_id": int(token), "top_logprobs": []}
                for token, logp in zip(sampled.tokens, sampled.logp, strict=True)
            ]
        },
        "weight_versions": [{"version": str(sampled.version), "start": 0, "end": len(sampled.tokens)}],
    }
    return {"request_id": name, "choices": [choice]}


# ---- messages ----------------------------------------------------------------------------------------------------------------


def read_chat_request(body: Mapping[str, Any], *, session: str = "") -> ChatRequest:
    """The body of `POST /v1/chat/completions`.  Raises Refused for what cannot be done as it is asked for."""
    _no_others(body, CHAT | HARMLESS, NEUTRAL)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list of at least one message", param="messages")
    read = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    keys = tuple(message_key(message) for message in read)
    names = {call["id"]: call["function"]["name"] for message in read for call in message.get("tool_calls", ())}
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    options = body.get("stream_options") or {}
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping) or not isinstance(options, Mapping):
        raise Refused("chat_template_kwargs and stream_options must be objects")
    return ChatRequest(
        messages=tuple(_for_template(message, names) for message in read),
        keys=keys,
        sampling=_sampling(body, body.get(limit), limit, session),
        model=str(body.get("model") or ""),
        tools=_tools(body.get("tools")),
        variables=variables,
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")),
    )


def message_key(message: Mapping[str, Any]) -> str:
    """What makes a message the same as one that was served: role, text, and calls by id, name and arguments.

    Reasoning is no part of it: clients drop it when they repeat the assistant's message.  Arguments are compared as JSON: clients
    write it anew.
    """
    calls = [
        [call["id"], call["function"]["name"], _object(call["function"]["arguments"])] for call in message.get("tool_calls") or ()
    ]
    return json.dumps([message["role"], message.get("content") or "", calls, message.get("tool_call_id")], sort_keys=True)


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message whose content is text, and whose calls have their arguments as the client wrote them."""
    if not isinstance(message, Mapping):
        raise Refused(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise Refused(f"{where}.role is {role!r}: expected one of {', '.join(ROLES)}", param=where)
    read: dict[str, Any] = {"role": role, "content": _text(message.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise Refused(f"{where}.{name} must be a string", param=where)
            read[name] = message[name]
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise Refused(f"{where}.tool_calls must be a list, in a message of the assistant", param=where)
        read["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    return read


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not isinstance(call.get("id"), str):
        raise Refused(f"{where} needs an id and a function with a name and arguments", param=where)
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        raise Refused(f"{where}.function.arguments must be a string of JSON", param=where)
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _text(content: Any, where: str) -> str:
    """Text, or the text of parts that hold nothing else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(f"{where}.content must be a string or a list of parts", param=where)
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Refused(f"{where}.content holds a part of type {kind!r}: only text can be read here", param=where)
        texts.append(part["text"])
    return "".join(texts)


def _for_template(message: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A message as chat templates want it: arguments as objects, and with a tool's result the tool's name."""
    shown = dict(message)
    if "tool_calls" in shown:
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
            for call in shown["tool_calls"]
        ]
    if shown["role"] == "tool" and "name" not in shown and (name := names.get(shown.get("tool_call_id", ""))) is not None:
        shown["name"] = name
    return shown


def _object(arguments: str) -> Any:
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Refused("tools must be a list", param="tools")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function" or not isinstance(function.get("name"), str):
            raise Refused(f'tools[{place}] must be {{"type": "function", "function": {{"name": ...}}}}', param="tools")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise Refused(f"tools[{place}].function.parameters must be a JSON schema", param="tools")
    return [dict(tool) for tool in tools]


# ---- both --------------------------------------------------------------------------------------------------------------------


def _no_others(
    body: Mapping[str, Any], known: frozenset[str] | set[str], neutral: Mapping[str, tuple[Any, ...]] | None = None
) -> None:
    """Raises Refused for a parameter that nobody reads.  One that is null is not there."""
    for name, value in body.items():
        if value is None or name in known:
            continue
        if neutral is None or name not in neutral:
            raise Refused(f"unknown parameter {name!r}", param=name)
        if value not in neutral[name]:
            raise Refused(f"{name} is {json.dumps(value)[:80]}, which cannot be served here: leave it out", param=name)


def _sampling(body: Mapping[str, Any], limit: Any, named: str, session: str) -> SamplingRequest:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise Refused("stop must be a string or a list of strings, none of them empty", param="stop")
    top_k, _ = _integer(body, "top_k", -1), _integer(body, "seed", -(1 << 63), (1 << 64) - 1)
    if (_integer(body, "n", 1, 1024) or 1) > 1:
        raise Refused(f"n is {body['n']}: an episode has one next turn", param="n")
    return SamplingRequest(
        temperature=_number(body, "temperature", *TEMPERATURES, zero=True),
        top_k=0 if top_k == -1 else top_k,  # vLLM writes -1 for all
        top_p=_number(body, "top_p", SMALLEST, 1.0),
        min_p=_number(body, "min_p", 0.0, 1.0),
        max_tokens=_integer({named: limit}, named, 1),
        stop=tuple(stops),
        session=session,
    )


def _number(body: Mapping[str, Any], name: str, least: float, most: float, *, zero: bool = False) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (least <= value <= most or (zero and value == 0)):
        raise Refused(f"{name} must be {'0, or ' if zero else ''}a number from {least:g} to {most:g}", param=name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < least or (most is not None and value > most):
        raise Refused(f"{name} must be a whole number from {least}" + (f" to {most}" if most is not None else ""), param=name)
    return value
