"""Messages and Responses as vLLM answers them, and as the endpoint does: field by field, event by event."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from groupwise.environments.chat_codec import ChatCodec, ChatResponse
from groupwise.environments.endpoint import Endpoint
from groupwise.environments.requests import ChatRequest, SampledTokens, TurnRequest
from groupwise.records import Finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HI = [{"role": "user", "content": "1+1"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"max_tokens": 4, "messages": HI},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses": {"max_output_tokens": 4, "input": HI},
}
OURS_ALONE = {"stop_sequence", "metadata", "logprobs"}
"""Fields that vLLM leaves out where they are null or empty; the APIs have them."""


class Fixed:
    """An episode whose turns are four tokens."""

    def __init__(self, codec: ChatCodec) -> None:
        self.codec = codec

    def render(self, request: ChatRequest) -> TurnRequest:
        ids, _ = self.codec.render(request)
        return TurnRequest(ids, request)

    def draw(self, request: TurnRequest) -> Future[SampledTokens]:
        done: Future[SampledTokens] = Future()
        done.set_result(SampledTokens([7, 8, 9, 7], [-0.1] * 4, Finish.LENGTH, 0))
        return done

    def respond(self, request: ChatRequest, thinking: bool, sampled: SampledTokens) -> ChatResponse:
        return self.codec.read(sampled, request, thinking, ())


@pytest.fixture(scope="module")
def addresses(serving: Any) -> Iterator[tuple[str, str]]:
    """Where we answer, and where vLLM does."""
    policy = serving.policy
    codec = ChatCodec(policy.tokenizer, policy.eos_ids)
    episodes = {"known": Fixed(codec)}
    endpoint = Endpoint(episodes.get, name="m", context=policy.context, vocabulary=policy.vocabulary)
    with endpoint:
        yield f"{endpoint.url}/episodes/known", serving.url


def ask(address: str, path: str, **more: Any) -> httpx.Response:
    name = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{address}{path}", json={"model": name, **BODIES[path], **more}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, a text that came in several pieces as one."""
    found: list[dict[str, Any]] = []
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if not found or found[-1]["type"] != event["type"] or "delta" not in event["type"]:
            found.append(event)
    return found


def kinds(value: Any) -> Any:
    """The types of a JSON value's parts."""
    if isinstance(value, Mapping):
        return {key: kinds(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [kinds(one) for one in value[:1]]
    return "number" if isinstance(value, int | float) else type(value).__name__


def assert_within(ours: Any, reference: Any, where: str) -> None:
    """Every field of ours is one of the reference's, of the same type."""
    if isinstance(ours, Mapping):
        assert isinstance(reference, Mapping), where
        for key, value in ours.items():
            if key not in OURS_ALONE:
                assert key in reference, f"{where}.{key} is not in {sorted(reference)}"
                assert_within(value, reference[key], f"{where}.{key}")
    elif isinstance(ours, list):
        if ours and reference:
            assert_within(ours[0], reference[0], f"{where}[0]")
    else:
        assert ours == reference, where


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_has_the_fields_of_vllms(addresses: tuple[str, str], path: str) -> None:
    ours, reference = (ask(address, path).json() for address in addresses)
    if path.endswith("count_tokens"):
        assert ours == {"input_tokens": reference["input_tokens"]}
        return
    assert_within(kinds(ours), kinds(reference), path)
    for key in ("type", "role", "object", "stop_reason", "status", "incomplete_details"):
        assert ours.get(key) == reference.get(key), key
    assert ours["usage"]["input_tokens"] == reference["usage"]["input_tokens"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_events_come_in_the_order_of_vllms(addresses: tuple[str, str], path: str) -> None:
    ours, reference = (events(ask(address, path, stream=True)) for address in addresses)
    assert [event["type"] for event in ours] == [event["type"] for event in reference]
    for one, other in zip(ours, reference, strict=True):
        assert_within(kinds(one), kinds(other), one["type"])
