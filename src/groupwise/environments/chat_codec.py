"""Chat messages to token ids and back: for tools and environments, and for clients that repeat the
whole conversation with every request.
"""

from __future__ import annotations

import copy
import json
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from groupwise.data.messages import with_arguments
from groupwise.data.rendering import Chat, Refusal, shown_template
from groupwise.data.templates import Schemas, Template, unmarked
from groupwise.data.turns import Suffix, Turns
from groupwise.environments.requests import ChatRequest, SampledTokens
from groupwise.environments.tool_calls import (
    BrokenCall,
    ParsedCall,
    ParsedTurn,
    form_of,
    read_turn,
    split_thinking,
)
from groupwise.errors import DataError
from groupwise.records import Finish, ToolCall
from groupwise.utils.http import Refused
from groupwise.utils.terminal import logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """A turn of the policy as the message that a client gets."""

    message: Mapping[str, Any]
    """With arguments of calls as JSON text, as OpenAI has them."""
    calls: Sequence[ParsedCall | BrokenCall]
    finish_reason: str
    """`stop`, `tool_calls` or `length`."""


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """A turn with the request that it answers."""

    request: ChatRequest
    context: int
    """Tokens that it was drawn behind."""
    sampled: SampledTokens
    response: ChatResponse
    reasoning: int
    """Tokens up to the end of its reasoning."""


REASONING_ENDS = ("</think>", "<|end|>")
"""What ends a turn's reasoning in the forms of all families."""
PROBE = "zq7system"
"""Stands for a system message where the template is asked what it does with one."""


class ChatCodec:
    """One tokenizer's chat template, in both directions.  It may be used by several threads at
    once.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int],
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """variables: of the chat template, in every conversation; a conversation's own go over
        them.
        """
        self.variables = variables
        # A copy of its own, and a lock: a fast tokenizer cannot encode in two threads at the same
        # time.
        self.tokenizer = copy.deepcopy(tokenizer)
        self.eos_ids = tuple(eos_ids)
        self.longest_token = max(16, *map(len, self.tokenizer.get_vocab()))
        """Characters of the longest token, at least 16."""
        self.template = Template(tokenizer=self.tokenizer, chat=True, control_tokens="plain")
        """What is `shielded` by it is never more than text."""
        self._lock = threading.RLock()
        self._turns = Turns(tokenizer=self.tokenizer, eos_ids=self.eos_ids)

    def written(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Schemas | None,
        variables: Mapping[str, Any],
    ) -> str:
        """A conversation as the template writes it, up to where the assistant starts or continues,
        with marks around what is text.

        Raises DataError where the template refuses it.
        """
        continued = messages[-1]["role"] == "assistant"
        chat = Chat(
            messages,
            "the conversation",
            add_generation_prompt=not continued,
            continue_final_message=continued,
            tools=tools,
            variables={**self.variables, **variables},
        )
        with self._lock:
            ((_, text),) = self.template.shown([chat])
        if isinstance(text, Refusal):
            raise DataError(str(text))
        return text

    def encode(self, text: str) -> np.ndarray:
        """int64 ids of what the template wrote."""
        with self._lock:
            return self.template.encode([text], plain=[False])[0]

    def after(
        self,
        last: int,
        messages: Sequence[Mapping[str, Any]],
        tools: Schemas | None,
        variables: Mapping[str, Any],
    ) -> Suffix:
        """What stands behind a turn whose last id is `last`.  Raises DataError where the template
        has no suffix.
        """
        with self._lock:
            return self._turns.after(last, messages, tools, {**self.variables, **variables})

    def decode(self, tokens: Sequence[int] | np.ndarray, *, special: bool = True) -> str:
        """Text of ids.  special: with that of special tokens."""
        with self._lock:
            ids = np.array(tokens, np.int64)  # the tokenizer looks through a list twice
            return str(self.tokenizer.decode(ids, skip_special_tokens=not special))

    def count(self, text: str) -> int:
        """Tokens of a text."""
        with self._lock:
            return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def parse(
        self,
        tokens: Sequence[int],
        tools: Schemas | None,
        *,
        thinking: bool,
        stopped_at: Sequence[str] = (),
    ) -> ParsedTurn:
        """A turn taken apart.   tools: that it could call.   thinking: it continues a think block.
        stopped_at: strings, at the first of which it ends."""
        form = form_of(shown_template(self.tokenizer, tools=bool(tools)))
        form = form if tools or form == "channels" else None  # without tools nothing is a call
        body = (
            tokens[:-1] if tokens and tokens[-1] in self.eos_ids and form != "channels" else tokens
        )
        text = self.decode(body, special=form is not None)
        end = len(text)
        for one in stopped_at:
            place = text.find(one)
            if 0 <= place < end:
                end = place
        text = text[:end]
        if form is not None:
            return read_turn(text, form, thinking=thinking, tools=tools)
        reasoning, content = split_thinking(text, thinking)
        content = content if reasoning is None else content.strip("\n")
        return ParsedTurn(content, reasoning, (), content)

    def stop_in(self, tokens: Sequence[int], stop: Sequence[str]) -> tuple[int, str] | None:
        """Return how many tokens it takes until their text holds a stop string, and that string;
        None if it holds none.
        """
        if not stop or self._first_stop(tokens, stop) is None:
            return None
        counts = range(1, len(tokens) + 1)
        least = bisect_left(
            counts, True, key=lambda count: self._first_stop(tokens[:count], stop) is not None
        )
        found = self._first_stop(tokens[: counts[least]], stop)
        assert found is not None
        return counts[least], found

    def _first_stop(self, tokens: Sequence[int], stop: Sequence[str]) -> str | None:
        """The stop string that stands first in the text of the tokens."""
        text = self.decode(tokens)
        places = {text.find(one): one for one in stop}
        places.pop(-1, None)
        return places[min(places)] if places else None

    # ---- requests of the endpoint's clients

    def render(self, request: ChatRequest) -> tuple[np.ndarray, str]:
        """Ids and text of a whole conversation.  Raises Refused."""
        shielded = self.template.shielded
        first, *later = request.messages
        messages = [self._shown(first, "system")]
        messages += [self._shown(message, self._later_system) for message in later]
        try:
            text = self.written(
                list(map(shielded, messages)),
                shielded(request.tools),
                shielded(request.variables),
            )
        except DataError as error:
            raise Refused(str(error), param="messages") from error
        return self.encode(text), unmarked(text)

    def _shown(self, message: Mapping[str, Any], system: str) -> Mapping[str, Any]:
        """A message in a role that the template shows.  system: its role for system messages."""
        role = message["role"]
        if role == "developer" and "developer" not in str(self.tokenizer.chat_template):
            role = "system"
        return {**message, "role": system if role == "system" else role}

    @cached_property
    def _later_system(self) -> str:
        """The role in which the template shows a system message that is not the first message: the
        user's, where it refuses or drops such a message.
        """
        user = {"role": "user", "content": "a"}
        spoken = [user, {"role": "assistant", "content": "b"}]
        try:
            text = self.written([*spoken, {"role": "system", "content": PROBE}, user], None, {})
        except DataError:
            text = ""
        if PROBE in text:
            return "system"
        log.warning(
            "the chat template shows no system message behind the first message: such messages of"
            " clients are shown as the user's"
        )
        return "user"

    def follow(
        self, request: ChatRequest, last: int, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[np.ndarray, str]:
        """Ids and text of what stands behind a turn whose last id is `last`.  Raises DataError
        where the template has no suffix.
        """
        suffix = self.after(
            last,
            [self._shown(message, self._later_system) for message in messages],
            self.template.shielded(request.tools),
            self.template.shielded(request.variables),
        )
        return suffix.tokens, suffix.text

    def read(
        self, sampled: SampledTokens, request: ChatRequest, thinking: bool, stop: Sequence[str]
    ) -> ChatResponse:
        """A turn as a message, up to the first of the strings at which it stopped.  Calls that
        cannot be read stay text.
        """
        ends = stop if sampled.finish is Finish.STOP else ()
        parsed = self.parse(sampled.tokens, request.tools, thinking=thinking, stopped_at=ends)
        # Clients look results up by id, so ids differ between turns.
        parsed = replace(
            parsed,
            calls=tuple(
                replace(one, id=f"call_{sampled.turn}_{i}") for i, one in enumerate(parsed.calls)
            ),
        )
        calls = any(isinstance(call, ParsedCall) for call in parsed.calls)
        (message,) = with_arguments([parsed.message()], as_text=True)
        message = {**message, "content": parsed.written or (None if calls else "")}
        reason = "tool_calls" if calls else "length" if sampled.finish is Finish.LENGTH else "stop"
        return ChatResponse(message, parsed.calls, reason)

    def reasoning_tokens(self, sampled: SampledTokens, response: ChatResponse) -> int:
        """Return how many tokens a turn has up to the end of its reasoning."""
        if not response.message.get("reasoning_content"):
            return 0
        ended = self.stop_in(sampled.tokens, REASONING_ENDS)
        return len(sampled.tokens) if ended is None else ended[0]


def recorded(
    call: ParsedCall | BrokenCall, result: str = "", seconds: float = 0.0, failure: str = ""
) -> ToolCall:
    """A call for the record of its episode."""
    if isinstance(call, BrokenCall):
        return ToolCall(
            name="", arguments=call.text, result=result, seconds=seconds, failure="unreadable"
        )
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return ToolCall(
        name=call.name, arguments=arguments, result=result, seconds=seconds, failure=failure
    )
