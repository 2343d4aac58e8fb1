"""The next turn of a conversation, as token ids to append: what the policy wrote is never tokenised
again.

A stream is the prompt's ids, the ids that the policy sampled, the ids of the environment's answer,
what the policy sampled next, and so on.  The answer comes from the chat template as a *suffix*: a
dummy conversation, whose assistant turn is a mark, is rendered with the new messages after it; the
text after the mark and after the token that ends the turn is appended.  So the separator after EOS
and the next generation prompt are the template's, whatever it does to earlier turns.

Whether the stream equals what the template would write of the whole conversation depends on the
template: `prove` tests it.  A template `append`s, or it `rewrites` the past (drops old reasoning,
adds an empty think block, ends old turns otherwise).  In the second case the stream keeps what was
sampled, which differs from what the template shows at inference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from groupwise.data.rendering import Chat, Refusal, render_chats
from groupwise.data.templates import MARK, OPEN, Schemas, Template, unmarked
from groupwise.errors import DataError
from groupwise.utils.terminal import escaped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REASONING = "zq7reasons"
"""Stands for reasoning in `prove`."""
QUESTION = {"role": "user", "content": "?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look it up.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "What."}},
            "required": ["text"],
        },
    },
}
"""The tool that `prove` offers where a conversation has none."""

Verdict = Literal["append", "rewrites", "refuses"]


@dataclass(frozen=True, slots=True, eq=False)
class Suffix:
    """What follows a turn of the policy: the rest of that turn, the new messages, and the next
    generation prompt.
    """

    tokens: np.ndarray
    """int64 (n,): ids to append; none of them is the policy's."""
    text: str


@dataclass(frozen=True, slots=True)
class Proof:
    """What the template does to the past in one kind of continuation."""

    case: str
    verdict: Verdict
    why: str = ""
    """The reason of `rewrites` and `refuses`."""

    def __str__(self) -> str:
        reason = f" ({self.why})" if self.why else ""
        return f"{self.case}: {self.verdict}{reason}"


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Continues conversations by one tokenizer's chat template.

    >>> from groupwise.data.tokenizers import arithmetic_tokenizer
    >>> turns = Turns(tokenizer=arithmetic_tokenizer(), eos_ids=(1,))
    >>> turns.after(1, [{"role": "user", "content": "1+1"}]).text
    '<|user|>1+1<|end|><|assistant|>'
    """

    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    """Ids that end a completion."""

    def after(
        self,
        last: int,
        messages: Sequence[Mapping[str, Any]],
        tools: Schemas | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Suffix:
        """What follows a completion whose last id is `last`.   tools, variables: as of `Chat`.

        messages: all that the environment says before the policy continues, in order: the results
            of all calls of the turn (`role: tool`, with `name` and `tool_call_id` where the
            template shows them), then messages of the user, if any.  Text of control tokens in them
            is encoded as text: an observation cannot end a turn or begin another.
        Raises DataError if there is no message, or if the template refuses them.
        """
        if not messages:
            raise DataError(
                "a turn cannot follow without a message: give the tool's result or the user's next"
                " message"
            )
        template = self._template
        shown = [template.shielded(message) for message in messages]
        end, rest = self._split(shown, tools, variables)
        end_id = self._id_of(end)
        closed = last in self.eos_ids or last == end_id
        text = rest if closed else end + rest
        # Encoded behind the turn's end, as in a whole conversation: some tokenizers begin a text
        # otherwise than they go on.
        tokens = template.encode([end + rest], plain=[False])[0]
        if closed and end:
            if tokens[0] != end_id:
                raise DataError(
                    f"the tokenizer does not keep {end!r}, which ends a turn of its chat template,"
                    " in one piece"
                )
            tokens = tokens[1:]
        return Suffix(tokens, unmarked(text))

    def prove(self) -> list[Proof]:
        """Whether the stream equals what the template writes of the whole conversation, for each
        kind of continuation.
        """
        spoken = {"role": "assistant", "content": MARK}
        user = {"role": "user", "content": "Go on."}
        result = {"role": "tool", "name": "look", "content": "Found."}
        return [
            self._prove("tool result", _calling(["look"], {"text": MARK}), result),
            self._prove(
                "tool result after reasoning",
                _calling(["look"], {"text": MARK}),
                result,
                reasoning=True,
            ),
            self._prove("user after an answer", spoken, user),
            self._prove("user after reasoning", spoken, user, reasoning=True),
        ]

    # ---- inside

    @cached_property
    def _template(self) -> Template:
        return Template(tokenizer=self.tokenizer, chat=True, control_tokens="plain")

    def _split(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Schemas | None,
        variables: Mapping[str, Any],
    ) -> tuple[str, str]:
        """The text of the token that ends the assistant's turn before `messages`, and what stands
        behind it.

        The former is empty where the template writes no such token.
        """
        mark = _unused(messages)
        if messages[0]["role"] == "tool":
            results = [message for message in messages if message["role"] == "tool"]
            names = [str(message.get("name") or "look") for message in results]
            # Some templates know one call a turn, and some want arguments as text.
            dummies = [
                _calling(names, {"text": mark}),
                _calling(names[:1], {"text": mark}),
                _calling(names, {"text": mark}, as_text=True),
                _calling(names[:1], {"text": mark}, as_text=True),
            ]
        else:
            dummies = [{"role": "assistant", "content": mark}]
        refused: Refusal | None = None
        for dummy in dummies:
            shown = tools or ([TOOL] if "tool_calls" in dummy else None)
            chats = [
                _chat([QUESTION, dummy], shown, variables),
                _chat([QUESTION, dummy, *messages], shown, variables, gen=True),
            ]
            alone, followed = render_chats(self.tokenizer, chats)
            if isinstance(followed, Refusal):
                refused = refused or followed
                continue
            if isinstance(alone, Refusal):
                refused = refused or alone
                continue
            if mark not in alone or mark not in followed:
                raise DataError(
                    "the chat template does not write what the assistant said: it cannot be"
                    " continued turn by turn"
                )
            return self._end_of_turn(_behind(alone, mark), _behind(followed, mark))
        raise DataError(str(refused))

    def _end_of_turn(self, alone: str, followed: str) -> tuple[str, str]:
        """The token that ends the turn, and the rest, of what stands behind the mark without and
        with further messages.
        """
        first = self._control_from(followed)
        ends = first is not None and self._id_of(first[0]) in self.eos_ids
        if first is not None and (ends or self._control_from(alone)):
            return first[0], followed[first.end() :]
        if alone.strip():
            followed = followed.removeprefix(alone)
        return "", followed

    def _prove(
        self, case: str, spoken: dict[str, Any], answer: dict[str, Any], *, reasoning: bool = False
    ) -> Proof:
        tools = [TOOL] if "tool_calls" in spoken else None
        if reasoning:
            spoken = self._with_reasoning(spoken, tools)
        for arguments in (False, True):
            written = _calls_as_text(spoken) if arguments else spoken
            stages = [_chat([QUESTION], tools, gen=True), _chat([QUESTION, written], tools)]
            texts = render_chats(
                self.tokenizer, [*stages, _chat([QUESTION, written, answer], tools, gen=True)]
            )
            refused = next((one for one in texts if isinstance(one, Refusal)), None)
            if refused is None or not tools:
                break
        if refused is not None:
            return Proof(case, "refuses", refused.why)
        prompt, answered, whole = (str(one) for one in texts)
        if MARK not in answered:
            return Proof(case, "refuses", "the template does not write what the assistant said")
        if not answered.startswith(prompt):
            return Proof(
                case,
                "rewrites",
                "an answered turn begins otherwise than its prompt ends:"
                f" {_difference(prompt, answered)}",
            )
        end, rest = self._split([answer], None, {})
        place = answered.rindex(MARK) + len(MARK)
        end_mark = self._control_from(answered, place)
        stream = answered[: end_mark.end()] if end_mark is not None else answered + end
        if whole == stream + rest:
            return Proof(case, "append")
        return Proof(case, "rewrites", _difference(stream + rest, whole))

    def _with_reasoning(self, spoken: dict[str, Any], tools: Schemas | None) -> dict[str, Any]:
        """The same with reasoning, in the message's own field where the template shows it, else as
        a think block in its text.
        """
        named = {**spoken, "reasoning_content": REASONING}
        (shown,) = render_chats(self.tokenizer, [_chat([QUESTION, named], tools)])
        if isinstance(shown, str) and REASONING in shown:
            return named
        return {**spoken, "content": f"<think>\n{REASONING}\n</think>\n\n{spoken['content']}"}

    def _control_from(self, text: str, place: int = 0) -> re.Match[str] | None:
        """The first control token of the template from a place on; those that messages bring stand
        between marks.
        """
        for token in self._template.control_pattern.finditer(text, place):
            if not text.endswith(OPEN, 0, token.start()):
                return token
        return None

    def _id_of(self, token: str) -> int | None:
        number = self.tokenizer.convert_tokens_to_ids(token) if token else None
        return number if isinstance(number, int) else None


def _chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Schemas | None,
    variables: Mapping[str, Any] = MappingProxyType({}),
    *,
    gen: bool = False,
) -> Chat:
    return Chat(
        messages, "the next turn", add_generation_prompt=gen, tools=tools, variables=variables
    )


def _calling(
    names: Sequence[str], arguments: Mapping[str, Any], as_text: bool = False
) -> dict[str, Any]:
    """A message of the assistant that calls tools."""
    calls = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": name, "arguments": dict(arguments)},
        }
        for i, name in enumerate(names)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    return _calls_as_text(message) if as_text else message


def _calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """The same with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"])
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _unused(messages: Sequence[Mapping[str, Any]]) -> str:
    """A mark that no message holds."""
    text, mark, number = str(messages), MARK, 0
    while mark in text:
        number += 1
        mark = f"{MARK}{number}"
    return mark


def _behind(text: str, mark: str) -> str:
    return text[text.rindex(mark) + len(mark) :]


def _difference(stream: str, whole: str) -> str:
    """Where two texts part, for a reader."""
    place = 0
    for a, b in zip(stream, whole, strict=False):
        if a != b:
            break
        place += 1
    start = max(0, place - 16)
    excerpts = (escaped(repr(text[start : place + 24])) for text in (stream, whole))
    return "{} becomes {}".format(*excerpts)
