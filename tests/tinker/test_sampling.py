"""Samplers: fixed weights, log-probs that training agrees with, requests that are drawn together and apart to the same result."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from groupwise.tinker import samplers

from .conftest import TinkerClient

PROMPT = [5, 9, 2]


def datum(prompt: list[int], drawn: list[int]) -> dict[str, Any]:
    tokens = [*prompt, *drawn]
    return {"tokens": tokens[:-1], "target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}


@pytest.mark.parametrize("rank", [4, None], ids=["adapter", "all weights"])
def test_log_probs_are_those_of_the_forward_pass(client: TinkerClient, rank: int | None) -> None:
    """Of what was drawn, and of the prompt; after a step, so that the adapter is not 0."""
    model = client.model(rank)
    client.forward(model, "cross_entropy", [datum(PROMPT, [4, 4, 4])])
    client.step(model)
    sampler = client.sampler(model)
    completions, prompt_logp = client.sample(sampler, PROMPT, 3, prompt_logprobs=True)
    for tokens, logp, _ in completions:
        (expected,), _ = client.forward(model, "cross_entropy", [datum(PROMPT, tokens)], forward_only=True)
        np.testing.assert_allclose(logp, expected[len(PROMPT) - 1 :], atol=1e-5)
        assert np.isnan(prompt_logp[0])
        np.testing.assert_allclose(prompt_logp[1:], expected[: len(PROMPT) - 1], atol=1e-5)


def test_log_probs_of_the_last_tokens_alone(client: TinkerClient) -> None:
    sampler = client.sampler_of()
    _, every = client.sample(sampler, PROMPT, prompt_logprobs=True)
    _, last = client.sample(sampler, PROMPT, prompt_logprobs=True, prompt_logprobs_last_n=1)
    assert np.isnan(last[:2]).all()
    assert last[2] == pytest.approx(every[2], abs=1e-6)
    _, single = client.sample(sampler, [4], prompt_logprobs=True)
    assert np.isnan(single).tolist() == [True]
    assert client.sample(sampler, PROMPT)[1].size == 0


def test_a_snapshot_does_not_move_with_the_model(client: TinkerClient) -> None:
    for rank in (4, None):
        model = client.model(rank)
        sampler, data = client.sampler(model), [datum(PROMPT, [4, 7, 1])]
        _, before = client.sample(sampler, PROMPT, prompt_logprobs=True)
        client.forward(model, "cross_entropy", data)
        client.step(model, learning_rate=0.1)
        _, after = client.sample(sampler, PROMPT, prompt_logprobs=True)
        _, now = client.sample(client.sampler(model), PROMPT, prompt_logprobs=True)
        np.testing.assert_array_equal(before, after)
        assert np.abs(now[1:] - before[1:]).max() > 0.01


def test_a_seed_gives_the_same_completions_again(client: TinkerClient) -> None:
    sampler = client.sampler_of()

    def texts(**changes: Any) -> list[list[int]]:
        return [tokens for tokens, _, _ in client.sample(sampler, PROMPT, 4, **changes)[0]]

    assert texts(seed=7) == texts(seed=7) != texts(seed=8)
    assert len({tuple(tokens) for tokens in texts(seed=7)}) > 1
    assert texts() != texts()
    assert texts(temperature=0.0) == texts(temperature=0.0, seed=1)


def test_requests_drawn_together_are_as_drawn_alone(client: TinkerClient) -> None:
    """Many at once, of several prompts, seeds and lengths, two of them equal."""
    sampler = client.sampler_of()
    wanted = [(prompt, seed, length) for prompt in ([5, 9], [3], [7, 7, 2]) for seed in (1, 2) for length in (4, 9)]
    wanted.append(wanted[0])
    alone = [client.sample(sampler, prompt, 2, seed=seed, max_tokens=length)[0] for prompt, seed, length in wanted]
    bodies = [client.sample_body(sampler, prompt, 2, seed=seed, max_tokens=length) for prompt, seed, length in wanted]
    with ThreadPoolExecutor(len(bodies)) as threads:
        together = list(threads.map(lambda body: client.drawn(client.done("asample", body))[0], bodies))
    for one, other in zip(alone, together, strict=True):
        assert [tokens for tokens, _, _ in one] == [tokens for tokens, _, _ in other]
        for (_, logp, _), (_, same, _) in zip(one, other, strict=True):
            np.testing.assert_allclose(logp, same, atol=1e-5)


def test_where_a_completion_stops(client: TinkerClient) -> None:
    sampler = client.sampler_of()
    ((tokens, _, truncated),), _ = client.sample(sampler, PROMPT, seed=3, max_tokens=30, stop=[])
    assert (len(tokens), truncated) == (30, True)
    ((stopped, _, truncated),), _ = client.sample(sampler, PROMPT, seed=3, max_tokens=30, stop=[tokens[2]])
    end = tokens.index(tokens[2]) + 1
    assert (stopped, truncated) == (tokens[:end], False)
    ((short, _, truncated),), _ = client.sample(sampler, PROMPT, seed=3, max_tokens=2)
    assert (short, truncated) == (tokens[:2], True)
    text = client.server.service.samplers._base.policy.decode([tokens[1]])
    ((by_text, _, truncated),), _ = client.sample(sampler, PROMPT, seed=3, max_tokens=30, stop=text)
    assert truncated is False
    assert len(by_text) <= 2


def test_a_request_for_samples_that_arrives_twice_is_drawn_once(client: TinkerClient) -> None:
    body = client.sample_body(client.sampler_of(), PROMPT, 2)
    first, again = client.post("asample", body)[1], client.post("asample", body)[1]
    assert first == again
    assert len(set(first["sample_sequence_ids"])) == 2
    assert client.result(first["request_id"]) == client.result(again["request_id"])


def test_a_sampler_of_a_checkpoint_has_its_weights(client: TinkerClient) -> None:
    model = client.model()
    client.forward(model, "cross_entropy", [datum(PROMPT, [4, 7, 1])])
    client.step(model, learning_rate=0.1)
    _, now = client.sample(client.sampler(model), PROMPT, prompt_logprobs=True)
    body = {"model_id": model, "seq_id": client.number(model), "path": "final", "kind": "snapshot"}
    named = client.done("save_weights_for_sampler", body)["path"]
    for path in (named, client.save(model, "state")):
        sampler = client.sampler_of(path)
        _, saved = client.sample(sampler, PROMPT, prompt_logprobs=True)
        np.testing.assert_allclose(saved[1:], now[1:], atol=1e-5)
        status, kind, answer = client.ask("GET", f"/api/v1/samplers/{sampler}", b"")
        assert (status, kind, path.encode() in answer) == (200, "application/json", True)


def test_the_oldest_snapshot_goes_and_says_so(client: TinkerClient) -> None:
    model = client.model()
    first = client.sampler(model)
    client.sample(first, PROMPT)
    for _ in range(samplers.SNAPSHOTS):
        client.sampler(model)
    gone = client.result(client.begin("asample", client.sample_body(first, PROMPT)))
    assert gone["category"] == "user"
    assert "save weights that are to stay under a name" in gone["error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topk_sample_logprobs": 3}, "topk_sample_logprobs is not offered"),
        ({"topk_prompt_logprobs": 3}, "topk_prompt_logprobs is not offered"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "target_prompt_logprobs is not offered"),
        ({"record_stability_info": True}, "record_stability_info is not offered"),
        ({"temperature": -1.0}, "sampling_params.temperature"),
        ({"top_p": 0.0}, "sampling_params.top_p"),
        ({"max_tokens": 0}, "sampling_params.max_tokens"),
        ({"surprise": 1}, "unknown parameter 'sampling_params.surprise'"),
    ],
)
def test_what_no_sampler_does_is_refused_by_name(client: TinkerClient, change: dict[str, Any], words: str) -> None:
    status, answer = client.post("asample", client.sample_body(client.sampler_of(), PROMPT, **change))
    assert status == 400
    assert words in answer["detail"]


@pytest.mark.parametrize(
    ("prompt", "change", "words"),
    [
        ([10_000], {}, "outside the vocabulary"),
        ([5] * 96, {}, "no room for a completion"),
        (PROMPT, {"stop": [""]}, "empty stop string"),
    ],
)
def test_what_cannot_be_drawn_fails_alone(client: TinkerClient, prompt: list[int], change: dict[str, Any], words: str) -> None:
    sampler = client.sampler_of()
    failed = client.result(client.begin("asample", client.sample_body(sampler, prompt, **change)))
    assert failed["category"] == "user"
    assert words in failed["error"]
    assert client.sample(sampler, PROMPT)[0]


@pytest.mark.parametrize(
    ("chunks", "words"),
    [([], "the prompt is empty"), ([{"type": "image", "data": "", "format": "png"}], "a chunk of type 'image'")],
)
def test_a_prompt_that_is_no_text_is_refused(client: TinkerClient, chunks: list[dict[str, Any]], words: str) -> None:
    body = client.sample_body(client.sampler_of(), PROMPT) | {"prompt": {"chunks": chunks}}
    status, answer = client.post("asample", body)
    assert status == 400
    assert words in answer["detail"]
