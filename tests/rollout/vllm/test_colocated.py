"""A vLLM in the trainer's process, without a vLLM: what it is told and in which order, its requests, and the turns of episodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.distributed import comm
from groupwise.errors import EngineError
from groupwise.records import Prompt, Sampling
from groupwise.rollout.vllm.colocated import LockstepRequests
from groupwise.rollout.vllm.engine import VllmEngine

BODY = {"sampling_params": {"max_tokens": 3}, "token_ids": [1]}
SAMPLING = Sampling(max_new_tokens=40, stop=("x",))


class FakeLLM:
    """Stands for vLLM's `LLM`.  A completion repeats the last of the ids before it; one request ends in each step."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: list[list[int]] = []
        self.waiting: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.llm_engine = SimpleNamespace(
            add_request=self._add,
            step=self._step,
            abort_request=self.aborted.extend,
            engine_core=SimpleNamespace(shutdown=lambda: None),
        )

    def _add(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert name not in self.waiting
        self.asked.append(prompt["prompt_token_ids"])
        self.waiting[name] = (prompt["prompt_token_ids"], sampling)

    def _step(self) -> list[Any]:
        self.calls.append("sample")
        name = next(iter(self.waiting))
        ids, sampling = self.waiting.pop(name)
        count = min(2, sampling.max_tokens)
        tokens = [ids[-1]] * count
        completions = []
        for index in range(getattr(sampling, "n", 1)):
            logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in tokens]
            reason = "length" if count == sampling.max_tokens else "stop"
            completions.append(
                SimpleNamespace(index=index, token_ids=tokens, logprobs=logprobs, finish_reason=reason, stop_reason="x")
            )
        return [SimpleNamespace(finished=True, request_id=name, prompt_token_ids=ids, outputs=completions)]

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"wake {tags}")

    def reset_prefix_cache(self) -> None:
        pass

    def collective_rpc(self, method: Any) -> None:
        if method == "finish_weight_update":
            self.calls.append("weights")


@pytest.fixture
def colocated(policy_of: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[VllmEngine, FakeLLM]]:
    """An engine on a colocated vLLM, whose platform can sleep."""
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": SimpleNamespace},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=None)},
        "groupwise_vllm": {"Bucket": SimpleNamespace},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(**options: Any) -> tuple[VllmEngine, FakeLLM]:
        policy, llm = policy_of("llama"), FakeLLM()
        engine = VllmEngine(policy, colocated=True, max_rows=4, **options)
        servers: Any = engine.servers
        servers._llm, servers._sleeps = llm, True
        servers.facts = [{"dtype": "float32", "rows": 4, "context": policy.context, "candidates": 8, "device": "cpu"}]
        return engine, llm

    return make


def prompt_of(name: str, *ids: int) -> Prompt:
    return Prompt(id=name, tokens=np.array(ids), text="")


def draw(engine: VllmEngine, *prompts: Prompt, size: int = 2) -> dict[str, Any]:
    groups = engine.generate(prompts, group_size=size, sampling=SAMPLING, seed=0)
    return {group[0].prompt.id: group for group in groups}


def test_weights_are_made_room_for_before_the_cache(colocated: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what torch keeps unused: vLLM takes its memory from the card."""
    engine, llm = colocated(in_flight=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: llm.calls.append("room"))
    engine.send_weights(0)
    with engine.servers.requests():
        pass
    llm.calls.clear()
    engine.send_weights(1)
    assert llm.calls == ["room", "wake ['weights']", "weights", "room", "wake ['kv_cache']"]


def test_weights_that_were_given_up_are_sent_again_before_anything_is_sampled(colocated: Callable) -> None:
    """An evaluation follows a rollout of the same version: nobody sets a version between them."""
    engine, llm = colocated()
    engine.send_weights(3)
    first = draw(engine, prompt_of("p", 5, 6))
    assert [rollout.tokens.tolist() for rollout in first["p"]] == [[6, 6], [6, 6]]
    llm.calls.clear()
    second = draw(engine, prompt_of("p", 5, 7))
    assert {int(version) for rollout in second["p"] for version in rollout.version} == {3}
    assert llm.calls == ["wake ['weights']", "weights", "wake ['kv_cache']", "sample", "sleep 2"]
    assert engine.servers._label.endswith(":3")


def test_requests_that_nobody_waits_for_any_more_are_dropped(colocated: Callable) -> None:
    engine, llm = colocated()
    engine.send_weights(0)
    with engine.servers.requests() as requests:
        requests.put("a", BODY)
        requests.put("b", BODY)
        assert requests.take()[1] == "a"
    assert llm.aborted == ["b"]


def test_closing_the_engine_breaks_off_what_another_thread_waits_for(colocated: Callable) -> None:
    engine, _ = colocated()
    engine.send_weights(0)
    with engine.servers.requests() as requests:
        requests.cancel()
        with pytest.raises(EngineError, match="the engine was closed"):
            requests.take()


def test_every_turn_is_a_request_with_all_ids_so_far(colocated: Callable, scripted_environment: Callable) -> None:
    """And what the environment says is in the stream, and is not trained."""
    environment = scripted_environment(delays=0)
    engine, llm = colocated(environment=environment)
    prompts = prompt_of("p0", 4, 5), prompt_of("p1", 7)
    groups = list(engine.generate(prompts, group_size=3, sampling=SAMPLING, seed=5))
    assert [len(group) for group in groups] == [3, 3]
    asked = []
    for rollout in [rollout for group in groups for rollout in group]:
        assert rollout.episode is not None
        ids = np.concatenate([rollout.prompt.tokens, rollout.tokens])
        drawn = np.zeros(len(rollout), dtype=bool)
        for turn in rollout.episode.turns:
            behind = rollout.prompt.tokens.size + turn.begin
            asked.append(ids[:behind].tolist())
            assert (ids[behind : rollout.prompt.tokens.size + turn.end] == ids[behind - 1]).all()
            drawn[turn.begin : turn.end] = True
        assert rollout.trained.tolist() == drawn.tolist()
    assert sorted(asked) == sorted(llm.asked)
    assert len(asked) > len(groups) * 3, "no episode had a second turn"
    assert llm.calls[-1] == "sleep 2"


def test_a_world_that_waits_does_not_stop_other_turns(colocated: Callable, scripted_environment: Callable) -> None:
    environment = scripted_environment(never=[("p1", 1)], delays=0)
    engine, _ = colocated(environment=environment)
    prompts = prompt_of("p0", 4), prompt_of("p1", 7), prompt_of("p2", 8)
    groups = engine.generate(prompts, group_size=3, sampling=SAMPLING, seed=5)
    assert {next(groups)[0].prompt.id, next(groups)[0].prompt.id} == {"p0", "p2"}
    groups.close()
    assert all(len(conversation.closed) == 1 for conversation in environment.begun.values())


def test_processes_that_hold_a_vllm_together_compute_the_same_requests_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 2 and 3 of four, the second of which has two requests and asks for one answer at a time; each keeps its own."""
    bodies = [{}, {"z": 9}, {"a": 1}, {"a": 2, "b": 3}]
    computed, kept = {}, {}
    monkeypatch.setattr(comm, "gather", lambda own: bodies)
    for rank in (2, 3):
        monkeypatch.setattr(comm, "world", lambda rank=rank: comm.World(rank, 4))
        done: list[tuple[str, int]] = []
        requests = LockstepRequests(None, lambda request: request, lambda: None, 2)

        def put(name: str, body: int, requests: LockstepRequests = requests, done: list[Any] = done) -> None:
            done.append((name, body))
            requests._ended.append(("vLLM", name, body))

        monkeypatch.setattr("groupwise.rollout.vllm.colocated.LocalRequests.put", lambda _, name, body, put=put: put(name, body))
        kept[rank] = [next(iter(requests))] if rank == 2 else list(requests)
        computed[rank] = done
    assert computed[2] == computed[3] == [("2/a", 1), ("3/a", 2), ("3/b", 3)]
    assert kept == {2: [("vLLM", "a", 1)], 3: [("vLLM", "a", 2), ("vLLM", "b", 3)]}
