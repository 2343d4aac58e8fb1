"""A checkpoint behind the endpoint: what is served are the policy's own log-probs, whoever else asks."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import torch

from groupwise.environments.requests import Asked
from groupwise.records import Finish, Prompt, Rollout, Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.serving import Served, Serving


@pytest.fixture
def served(policy_of):
    with Served(policy_of("llama", context=64), name="tiny", rows=4) as found:
        yield found


def generate(served: Served, ids: list[int], **drawn) -> list[dict]:
    body = {"model": "tiny", "token_ids": ids, "sampling_params": drawn}
    answer = httpx.post(f"{served.endpoint.url}/inference/v1/generate", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.slow
def test_log_probs_are_those_of_a_forward_pass(served, scored, policy_of):
    rng = np.random.default_rng(0)
    asked = [
        (rng.integers(3, 40, size=int(n)).tolist(), float(t)) for n, t in zip(rng.integers(1, 30, 12), [1.0, 0.7] * 6, strict=True)
    ]
    with ThreadPoolExecutor(12) as pool:  # together, so that they share batches
        found = list(pool.map(lambda one: generate(served, one[0], temperature=one[1], max_tokens=9, n=2), asked))
    policy = policy_of("llama", context=64)
    for (ids, temperature), choices in zip(asked, found, strict=True):
        assert [choice["index"] for choice in choices] == [0, 1]
        for choice in choices:
            tokens = np.array(choice["token_ids"])
            logp = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]])
            ended = tokens[-1] == 1
            assert choice["finish_reason"] == ("stop" if ended else "length")
            rollout = Rollout(
                prompt=Prompt(id="x", tokens=np.array(ids), text=""), index=0, tokens=tokens, behavior_logp=logp,
                finish=Finish.EOS if ended else Finish.LENGTH, eos_ids=(1,), sampling=Sampling(temperature=temperature), text="",
            )  # fmt: skip
            assert np.abs(scored(policy, rollout) - logp).max() < 1e-10


@pytest.mark.slow
def test_a_seed_gives_the_same_whoever_else_asks(served):
    once = generate(served, [5, 6, 7], seed=3, max_tokens=20)
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda i: generate(served, [5, 6, 7] if i % 2 else [8 + i], seed=3, max_tokens=20), range(8)))
    assert all(found[0]["token_ids"] == once[0]["token_ids"] for found in again[1::2])
    drawn = {tuple(generate(served, [5, 6, 7], max_tokens=20)[0]["token_ids"]) for _ in range(4)}
    assert len(drawn) > 1


def test_limits_of_a_batch_are_each_ones_own(served):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: generate(served, [9, 9], max_tokens=n)[0], range(1, 9)))
    assert all(len(choice["token_ids"]) <= n for n, choice in enumerate(found, 1))
    assert all(len(choice["token_ids"]) == n for n, choice in enumerate(found, 1) if choice["finish_reason"] == "length")


def test_requests_that_cannot_be_served_are_refused(served):
    root = served.endpoint.url
    for body, code in (
        ({"token_ids": [5] * 64}, "context_length_exceeded"),
        ({"token_ids": [5], "sampling_params": {"top_p": 0}}, None),
    ):
        answer = httpx.post(f"{root}/inference/v1/generate", json=body, trust_env=False)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{root}/v1/chat/completions", json=chat, trust_env=False)
    assert answer.status_code == 400
    assert "chat template" in answer.json()["error"]["message"]
    assert generate(served, [5])[0]["token_ids"]


@pytest.mark.parametrize("stops", [["d"], ["zz", "d", "q", "w", "k", "v"]])
def test_the_text_ends_before_the_stop_string_and_its_tokens_do_not(tiny_policy, stops):
    with Served(tiny_policy("llama"), name="tiny", rows=4) as served:
        chat = {"messages": [{"role": "user", "content": "x"}], "n": 3, "max_tokens": 60, "logprobs": True, "seed": 3}
        url = f"{served.endpoint.url}/v1/chat/completions"
        plain, cut = (httpx.post(url, json=chat | more, timeout=60, trust_env=False).json() for more in ({}, {"stop": stops}))
    hits = 0
    assert [choice["index"] for choice in cut["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in plain["choices"]}) > 1
    assert cut["usage"]["completion_tokens"] == sum(len(choice["logprobs"]["content"]) for choice in cut["choices"])
    for whole, choice in zip(plain["choices"], cut["choices"], strict=True):
        text, sampled = choice["message"]["content"], "".join(entry["token"] for entry in choice["logprobs"]["content"])
        assert not any(stop in text for stop in stops)
        assert whole["message"]["content"].startswith(text)
        if any(stop in sampled for stop in stops):
            hits += 1
            assert choice["finish_reason"] == "stop" and len(text) < len(sampled)
    assert hits


def test_an_engine_that_fails_answers(served, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no more memory")

    monkeypatch.setattr(NativeEngine, "generate", broken)
    answer = httpx.post(f"{served.endpoint.url}/inference/v1/generate", json={"token_ids": [5]}, trust_env=False)
    assert answer.status_code == 500
    assert "no more memory" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_checkpoint_is_served_by_the_command(tiny_policy, forked, tmp_path):
    policy = tiny_policy("llama", dtype=torch.float32)
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = forked.start("serve", "--native", tmp_path / "model", "--port", str(port), GROUPWISE_TOKEN="sesame")
    try:
        while process.poll() is None and not (shown := re.search(r"^http://\S+(?=\s)", process.said, re.MULTILINE)):
            time.sleep(0.02)
        url = shown[0]  # type: ignore[index]
        ask = openai.OpenAI(base_url=url, api_key="sesame", max_retries=0).chat.completions.create
        messages = [{"role": "user", "content": "1+1"}]
        found = ask(model=str(tmp_path / "model"), messages=messages, temperature=0, max_tokens=5, logprobs=True)
        prompt = policy.tokenizer("<|user|>1+1<|end|><|assistant|>")["input_ids"]
        greedy = Sampling(temperature=0.0, max_new_tokens=5)
        ((own,),) = NativeEngine(policy, max_rows=1).generate(
            [Prompt(id="0", tokens=np.array(prompt), text="")], group_size=1, sampling=greedy, seed=0
        )
        assert found.usage.prompt_tokens == len(prompt)
        assert found.choices[0].message.content == own.text
        assert [entry.logprob for entry in found.choices[0].logprobs.content] == pytest.approx(own.behavior_logp, abs=1e-5)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="other", max_retries=0).models.list()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.parametrize(("more", "said"), [(["--host", "0.0.0.0"], "token"), (["--cache", "1G"], "vLLM"), (["--", "--x"], "vLLM")])
def test_the_serve_command_refuses_bad_arguments(tiny_policy, tmp_path, more, said, monkeypatch, capsys):
    from groupwise.cli.commands import main

    monkeypatch.delenv("GROUPWISE_TOKEN", raising=False)
    policy = tiny_policy("llama")
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    assert main(["serve", str(tmp_path), "--native", "--port", "1", *more]) == 2
    assert said in capsys.readouterr().err


def test_every_request_is_answered_or_cancelled_when_serving_ends(policy_of, monkeypatch):
    begun, go_on, generate = threading.Event(), threading.Event(), NativeEngine.generate

    def held(*given, **how):
        begun.set()
        assert go_on.wait(60)
        return generate(*given, **how)

    monkeypatch.setattr(NativeEngine, "generate", held)
    serving = Serving(policy_of("llama", context=64))
    running = serving.draw(np.array([5, 6]), Asked(max_tokens=2))
    assert begun.wait(60)
    beside = serving.draw(np.array([7]), Asked(max_tokens=1, temperature=0.5))  # read together with the word that ends it
    closing = ThreadPoolExecutor(1).submit(serving.close)
    while not serving.draw(np.array([8]), Asked(max_tokens=1)).cancelled():  # refused from when it is closed
        time.sleep(0.001)
    go_on.set()
    closing.result(60)
    assert len(running.result(0)) == 1
    assert beside.cancelled()
