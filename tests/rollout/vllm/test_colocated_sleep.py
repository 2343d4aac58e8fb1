"""A vLLM in the trainer's process sleeps while the trainer computes: here what it is told, in which order, without a vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from groupwise.rollout.vllm.colocated import Colocated


class Recorder:
    """Stands for vLLM's `LLM`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.llm_engine = SimpleNamespace(add_request=lambda *_: None, step=self._step, abort_request=lambda _: None)

    def _step(self) -> list[Any]:
        self.calls.append("sample")
        return [SimpleNamespace(finished=True, request_id="a", outputs=[])]

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"wake {tags}")

    def reset_prefix_cache(self) -> None:
        pass

    def collective_rpc(self, what: Any) -> None:
        if what == "finish_weight_update":
            self.calls.append("weights")


@pytest.fixture
def asleep(tiny_policy: Callable, monkeypatch: pytest.MonkeyPatch) -> tuple[Colocated, Recorder]:
    """A colocated vLLM whose platform can sleep, once it has sampled."""
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
    policy, recorder = tiny_policy("llama"), Recorder()
    colocated = Colocated(lambda folder: None, policy, 4, "float32", 1 << 20)
    colocated._llm, colocated._sleeps, colocated.facts = recorder, True, [{"dtype": "float32"}]  # type: ignore[assignment]
    colocated.send(policy, "0")
    list(colocated.answers({"a": {"sampling_params": {}, "token_ids": [1]}}))
    assert recorder.calls == ["weights", "sample", "sleep 2"]
    recorder.calls.clear()
    return colocated, recorder


def test_weights_are_made_room_for_before_the_cache(asleep: tuple[Colocated, Recorder], tiny_policy: Callable) -> None:
    colocated, recorder = asleep
    colocated.send(tiny_policy("llama"), "1")
    assert recorder.calls == ["wake ['weights']", "weights", "wake ['kv_cache']"]


def test_weights_that_were_given_up_are_sent_again_before_anything_is_sampled(asleep: tuple[Colocated, Recorder]) -> None:
    """An evaluation follows a rollout of the same version: nobody sends weights between them."""
    colocated, recorder = asleep
    list(colocated.answers({"a": {"sampling_params": {}, "token_ids": [1]}}))
    assert recorder.calls == ["wake ['weights']", "weights", "wake ['kv_cache']", "sample", "sleep 2"]
    assert colocated._label == "0"
