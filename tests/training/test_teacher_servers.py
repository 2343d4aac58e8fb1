"""A teacher on servers, over the wire: a server in this process scores with a policy, and lies where a test wants it to.

What vLLM itself answers is tested with a real server: tests/vllm/test_server.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from groupwise.algorithms.table import ALGORITHMS
from groupwise.config.recipes import load_recipe
from groupwise.config.settings import ModelSettings
from groupwise.errors import ConfigError, EngineError, PeerError
from groupwise.models.loading import load_policy
from groupwise.models.policy import Policy
from groupwise.records import Prompt, Sample, Sampling
from groupwise.rewards.compose import unjudged
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.vllm.scoring import ScoringServers
from groupwise.runs.run import train
from groupwise.training.passes import score
from groupwise.training.signals import add_signals
from groupwise.training.teachers import Teacher


class FakeServer:
    """Answers `/v1/models`, `/detokenize` and `/v1/completions` as vLLM does, by a policy's own log-probs."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.requests, self.lock = policy, list[dict[str, Any]](), threading.Lock()
        self.spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.context = policy.context
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or a body waits until its headers have been acknowledged: 40 ms

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.answer({"data": [{"id": "the-teacher", "max_model_len": fake.context}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert body["model"] == "the-teacher"
                if self.path == "/detokenize":
                    self.answer({"prompt": fake.policy.tokenizer.decode(body["tokens"])})
                else:
                    assert self.path == "/v1/completions"
                    with fake.lock:
                        fake.requests.append(body)
                        self.answer(fake.spoil({"choices": [{"prompt_logprobs": fake.logprobs(body["prompt"])}]}))

            def answer(self, found: Any) -> None:
                text = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def logprobs(self, ids: list[int]) -> list[dict[str, Any] | None]:
        rest = np.array(ids[1:])
        ones = np.ones(rest.size)
        sample = Sample(group="a", prompt=np.array(ids[:1]), completion=rest, weight=ones, advantage=ones, behavior_logp=0 * ones)
        (logp,) = score(self.policy, [sample], max_tokens_per_microbatch=1000).logp
        told = [{str(id): {"logprob": float(value), "rank": 1, "decoded_token": "?"}} for id, value in zip(rest, logp, strict=True)]
        return [None, *told]


@pytest.fixture
def serve() -> Iterator[Callable[[Policy], FakeServer]]:
    started: list[FakeServer] = []

    def start(policy: Policy) -> FakeServer:
        started.append(FakeServer(policy))
        return started[-1]

    yield start
    for one in started:
        one.server.shutdown()
        one.server.server_close()


def greeted(policy: Policy, *servers: FakeServer) -> ScoringServers:
    found = ScoringServers([server.url for server in servers])
    found.connect(policy.tokenizer)
    return found


@pytest.mark.slow
def test_servers_say_what_the_checkpoint_says(tiny_policy: Callable, serve: Callable) -> None:
    policy, other = tiny_policy(scale=2.0), tiny_policy(scale=2.0, seed=3)
    prompts = [Prompt(id=f"0/{i}", tokens=np.arange(6, 9 + i), text="") for i in range(4)]
    drawn = NativeEngine(policy, max_rows=16).generate(prompts, group_size=3, sampling=Sampling(max_new_tokens=8), seed=0)
    groups = [unjudged(rollouts) for rollouts in drawn]
    one, two = serve(other), serve(other)
    hint = lambda prompt: np.array([7, 8])  # noqa: E731
    for options in ({}, {"hint": hint}):
        remote = Teacher(policy=policy, servers=greeted(policy, one, two), **options).with_hints(groups)
        here = Teacher(policy=other, **options).with_hints(groups)
        found, expected = (
            add_signals(groups, ALGORITHMS["distill_sampled"], teacher=teacher, max_tokens_per_microbatch=200)
            for teacher in (remote, here)
        )
        for ours, theirs in zip(found, expected, strict=True):
            for a, b in zip(ours.signals["teacher_logp"], theirs.signals["teacher_logp"], strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
    assert len(one.requests) == len(two.requests) == 12, "the servers share the work"
    body = one.requests[0]
    assert {name: body[name] for name in ("max_tokens", "temperature", "prompt_logprobs")} == {
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }


def test_an_empty_completion_asks_for_nothing(tiny_policy: Callable, serve: Callable) -> None:
    policy = tiny_policy()
    server = serve(policy)
    assert greeted(policy, server).logp([(np.array([5]), np.zeros(0, np.int64))])[0].shape == (0,)
    assert not server.requests


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda answer: {}, "cannot be read"),
        (lambda answer: {"choices": [{"prompt_logprobs": None}]}, "cannot be read"),
        (lambda answer: {"choices": [{"prompt_logprobs": answer["choices"][0]["prompt_logprobs"][:-1]}]}, "cannot be read"),
        (lambda answer: {"choices": [{"prompt_logprobs": [None, *[{"1": {"logprob": -1.0}}] * 3]}]}, "cannot be read"),
        (lambda answer: {"choices": [{"prompt_logprobs": [None, *[{"9": {"logprob": 0.5}}] * 3]}]}, "log-prob of 0.5"),
        (lambda answer: {"choices": [{"prompt_logprobs": [None, *[{"9": {"logprob": float("nan")}}] * 3]}]}, "log-prob of nan"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(tiny_policy: Callable, serve: Callable, spoil: Callable, said: str) -> None:
    policy = tiny_policy()
    server = serve(policy)
    servers = greeted(policy, server)
    server.spoil = spoil
    with pytest.raises(EngineError, match=said):
        servers.logp([(np.array([5]), np.array([9, 9, 9]))])


def test_an_answer_that_is_nested_without_end_is_refused(tiny_policy: Callable, serve: Callable) -> None:
    policy = tiny_policy()
    server = serve(policy)
    servers = greeted(policy, server)
    server.spoil = lambda _: b"[" * 100_000
    with pytest.raises(EngineError, match=f"{server.url} answers /v1/completions with what is not JSON"):
        servers.logp([(np.array([5]), np.array([9]))])


def test_a_sequence_that_is_too_long_is_refused_with_the_remedy(tiny_policy: Callable, serve: Callable) -> None:
    policy = tiny_policy()
    server = serve(policy)
    server.context = 4
    servers = greeted(policy, server)
    with pytest.raises(EngineError, match=r"have 4 tokens, .* --max-model-len 5"):
        servers.logp([(np.array([5]), np.array([9, 9, 9]))])
    assert servers.logp([(np.array([5]), np.array([9, 9]))])[0].shape == (2,)


def test_a_server_that_is_gone_is_named(tiny_policy: Callable, serve: Callable) -> None:
    policy = tiny_policy()
    server = serve(policy)
    servers = greeted(policy, server)
    server.server.shutdown()
    server.server.server_close()
    with pytest.raises(PeerError, match=server.url):
        servers.logp([(np.array([5]), np.array([9]))])
    with pytest.raises(PeerError, match="refused"):
        greeted(policy, server)


def test_a_model_with_other_tokens_is_refused_with_the_text_that_differs(tiny_policy: Callable, serve: Callable) -> None:
    from groupwise.data.tokenizers import make_tokenizer

    with pytest.raises(ConfigError, match=r"the same ids mean '.*' to the policy and '.*' to the server"):
        greeted(tiny_policy(), serve(tiny_policy(tokenizer=make_tokenizer("bytes"))))


TREE = {
    "objective": "distill_sampled",
    "steps": 2,
    "rewards": [],
    "group": {"prompts_per_step": 3, "group_size": 2, "updates_per_rollout": 2},
}


@pytest.mark.slow
def test_a_run_learns_from_servers_what_it_learns_from_the_checkpoint(
    tmp_path: Path, write_recipe: Callable, serve: Callable
) -> None:
    model = {"scratch": {"hidden": 48, "layers": 2, "heads": 4, "context": 128, "tokenizer": "arithmetic"}}
    list(train(load_recipe(write_recipe(tmp_path, "larger", steps=1, model=model, rewards=[{"function": "accuracy"}]))))
    folder = str(tmp_path / "runs" / "larger" / "final")
    server = serve(load_policy(ModelSettings(path=folder)))
    here = list(train(load_recipe(write_recipe(tmp_path, "here", **TREE, teacher={"path": folder}))))
    there = list(train(load_recipe(write_recipe(tmp_path, "there", **TREE, teacher={"servers": [server.url]}))))
    assert server.requests
    for one, other in zip(here, there, strict=True):
        assert other.metrics["teacher/kl"] == pytest.approx(one.metrics["teacher/kl"], rel=1e-3)
        assert other.metrics["grad_norm"] == pytest.approx(one.metrics["grad_norm"], rel=1e-2)
