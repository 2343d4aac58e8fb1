"""Answers in three APIs as vLLM gives them, and as the endpoint does: field by field, event by event.

`message_forms.json` holds what vLLM 0.32 answered; `tests/vllm` asks a real server for it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import message_forms as forms
import numpy as np
import pytest
from message_forms import CHAT, COUNT, MESSAGES, RESPONSES

from groupwise.config.settings import EnvironmentSettings
from groupwise.environments.chat_codec import ChatCodec
from groupwise.environments.conversation import Stream
from groupwise.environments.harness import FunctionHarness
from groupwise.environments.harness_episodes import HarnessEnvironment
from groupwise.records import Finish, Prompt, Sampling

pytestmark = pytest.mark.slow
WAIT = 60.0
RECORDED: dict[str, Any] = json.loads(forms.RECORDED.read_text(encoding="utf-8"))


class ScriptedPolicy:
    """Draws what the scripted model would draw."""

    def __init__(self) -> None:
        self.tokenizer = forms.scripted_tokenizer()
        self.end = int(self.tokenizer.eos_token_id)
        self.following = forms.successors(self.tokenizer)

    def turn(self, last: int, limit: int) -> tuple[list[int], Finish]:
        """A turn behind an id."""
        ids: list[int] = []
        while len(ids) < limit:
            last = self.following[last]
            ids.append(last)
            if last == self.end:
                return ids, Finish.EOS
        return ids, Finish.LENGTH

    def play(self, environment: HarnessEnvironment, prompt: Prompt) -> None:
        """Answer the turns of one episode."""
        stream = Stream(prompt, 0, 1 << 20)
        conversation = environment.begin(stream, seed=1)
        reply = conversation.open().result(WAIT)
        while reply.finish is None:
            stream.take(reply, 0, limit=1 << 20)
            ids, finish = self.turn(int(stream.ids()[-1]), reply.limit or forms.CONTEXT)
            stream.add(ids, [0.0] * len(ids), 0)
            stream.end_turn(finish)
            reply = conversation.answer().result(WAIT)
        conversation.close(reply.finish)


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What the endpoint answers, by the names of the cases."""
    return asked()


def asked() -> dict[str, Any]:
    """What the endpoint answers, by the names of the cases; each is an episode of its own."""
    policy, found = ScriptedPolicy(), {}
    cases = dict(forms.cases())

    def harness(row: Mapping[str, Any], base_url: str) -> None:
        found[row["name"]] = cases[row["name"]].asked(base_url.removesuffix("/v1"), "policy")

    environment = HarnessEnvironment(
        FunctionHarness(harness),
        ChatCodec(policy.tokenizer, (policy.end,)),
        EnvironmentSettings(verifiers="own"),
        Sampling(max_new_tokens=1 << 20),
        context=forms.CONTEXT,
        vocabulary=len(policy.tokenizer),
        token=forms.SECRET,
    )
    try:
        for name in cases:
            policy.play(environment, Prompt(id=name, tokens=np.array([5]), text="Q", row={"name": name}))
    finally:
        environment.close()
    return found


def differences(ours: Any, reference: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The places at which two answers differ, and what stands there."""
    if isinstance(ours, Mapping) and isinstance(reference, Mapping):
        for key in {**ours, **reference}:
            yield from differences(ours.get(key), reference.get(key), f"{where}.{key}" if where else key)
    elif isinstance(ours, list) and isinstance(reference, list) and len(ours) == len(reference):
        for one, other in zip(ours, reference, strict=True):
            yield from differences(one, other, f"{where}[]")
    elif ours != reference:
        yield where, ours, reference


TRIMMED = "the white space around reasoning and behind text belongs to the chat template"
DEEPSEEKS = "DeepSeek's name, which chat templates read; in requests both are read"
TAGS = "vLLM leaves out the tags"
OWN = "a field of vLLM's alone"
DEFAULT = "left out: it is the run's"
UNREAD = "vLLM shows the policy `strict`, which nothing enforces here"
KNOWN: dict[str, dict[str, str]] = {
    CHAT: {
        "choices[].message.content": TRIMMED,
        "choices[].message.reasoning": DEEPSEEKS,
        "choices[].message.reasoning_content": DEEPSEEKS,
        "choices[].stop_reason": OWN,
        "message.content": TRIMMED,
        "message.reasoning": DEEPSEEKS,
        "message.reasoning_content": DEEPSEEKS,
        "usage.completion_tokens_details.reasoning_tokens": TAGS,
        "fields": OWN,
    },
    MESSAGES: {
        "content": "no block for no text, in a stream as well as without",
        "content[].text": TRIMMED,
        "content[].thinking": TRIMMED,
        "[].delta.text": TRIMMED,
        "[].delta.thinking": TRIMMED,
        "[].content_block.signature": "empty when the block begins",
    },
    RESPONSES: {
        "background": DEFAULT,
        "frequency_penalty": DEFAULT,
        "presence_penalty": DEFAULT,
        "service_tier": DEFAULT,
        "temperature": DEFAULT,
        "top_p": DEFAULT,
        "truncation": DEFAULT,
        "tool_choice": "auto without tools too, the API's default",
        "metadata": "an object, as the API has it",
        "output": "an item for no text: clients repeat it, and the conversation is recognised",
        "output[].status": "incomplete where the turn was cut off",
        "output[].content": "a list when reasoning begins",
        "output[].content[].text": TRIMMED,
        "output[].content[].logprobs": "a list, as the API has it",
        "[].delta": TRIMMED,
        "[].text": TRIMMED,
        "usage.input_tokens": UNREAD,
        "usage.total_tokens": UNREAD,
        "usage.input_tokens_details.cache_write_tokens": OWN,
        "usage.input_tokens_details.cached_tokens_per_turn": OWN,
        "usage.input_tokens_details.input_tokens_per_turn": OWN,
        "usage.output_tokens_details.output_tokens_per_turn": OWN,
        "usage.output_tokens_details.reasoning_tokens": TAGS,
        "usage.output_tokens_details.tool_output_tokens": OWN,
        "usage.output_tokens_details.tool_output_tokens_per_turn": OWN,
    },
    COUNT: {"context_management": "nothing is left out of the conversation"},
}
"""Fields in which the endpoint's answers are others, and why."""
PLACES = {"body.": "", "[].response.": "", "[].item.": "output[].", "[].part.": "output[].content[]."}
"""Where a stream has the parts of an answer."""
CALLS_AS_TEXT = ("a call that is cut off, streamed", "a call that cannot be read, streamed")
"""vLLM has sent the beginning of such a call before it knows; the endpoint knows, and sends text."""
OTHER_EVENTS = (*CALLS_AS_TEXT, f"{RESPONSES}: silence, streamed")


def compared(path: str) -> list[str]:
    """Names of the cases of a path that are compared field by field."""
    names = []
    for name, case in forms.cases().items():
        if case.path == path and name.removesuffix(", streamed") in forms.answered() and not name.endswith(OTHER_EVENTS):
            names.append(name)
    return names


@pytest.mark.parametrize("path", KNOWN)
def test_answers_differ_from_vllms_where_the_table_says(answers: dict[str, Any], path: str) -> None:
    """Field by field, and event by event in their order."""
    found: dict[str, tuple[str, Any, Any]] = {}
    for name in compared(path):
        for where, ours, reference in differences(answers[name], RECORDED[name]):
            for begin, place in PLACES.items():
                where = where.replace(begin, place) if where.startswith(begin) else where
            found[where] = (name, ours, reference)
    unknown = {where: case for where, case in found.items() if where not in KNOWN[path]}
    assert not unknown
    assert sorted(found) == sorted(KNOWN[path])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("case", CALLS_AS_TEXT)
def test_a_call_that_cannot_be_read_is_text_in_a_stream_too(answers: dict[str, Any], path: str, case: str) -> None:
    name = f"{path}: {case}"
    assert '"arguments": {"a": ' in json.dumps(answers[name]).replace("\\", "")
    for word in ("tool_use", "function_call", '"tool_calls"'):
        assert word not in json.dumps(answers[name])


LENIENT = {
    f"{CHAT}: an unknown role": (400, 200),
    f"{COUNT}: too long": (200, 400),
} | {f"{path}: another model": (200, 404) for path in (CHAT, MESSAGES, RESPONSES, COUNT)}
"""Requests that one of the two answers: the status here, and vLLM's.  Whoever counts tokens needs no room for a turn.  An episode
has one policy, which answers to any name: an agent's side conversations name models of their own."""
ANTHROPIC_TYPES = {400: "invalid_request_error", 401: "authentication_error"}


@pytest.mark.parametrize("name", forms.refused())
def test_what_vllm_refuses_is_refused_with_its_status(answers: dict[str, Any], name: str) -> None:
    """In the form of the API, which vLLM's errors do not always have."""
    ours, reference = answers[name], RECORDED[name]
    assert (ours["status"], reference["status"]) == LENIENT.get(name, (reference["status"],) * 2)
    if ours["status"] == 200:
        return
    error = ours["body"]["error"]
    assert error["message"] == "WORDS"
    if forms.cases()[name].path in (MESSAGES, COUNT):
        assert ours["body"]["type"] == "error"
        assert error.keys() == {"type", "message"}
        assert error["type"] == ANTHROPIC_TYPES[ours["status"]]
    else:
        assert error.keys() <= {"type", "message", "param", "code"}
        assert error["type"] == "invalid_request_error"
