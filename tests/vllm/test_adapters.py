"""Adapters alone on a real vLLM server: each version has a name and a folder of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.config.settings import LoraSettings
from groupwise.models.attention import plain_attention
from groupwise.models.lora import adapt
from groupwise.models.policy import Policy, without_adapter
from groupwise.models.saving import save
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.published import Published, VersionedServer, answer_of, request_of
from groupwise.rollout.vllm.publisher import AdapterPublisher, Publisher

from .conftest import SHAPE, start_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
PROMPT = list(range(5, 50))
"""Longer than a block of the prefix cache."""
VERSIONS = 20


@dataclass
class Adapted:
    """A policy with an adapter, what publishes it, and a server for it."""

    policy: Policy
    base: Publisher
    adapters: AdapterPublisher
    server: VersionedServer
    folder: Path

    def send(self, version: int) -> Any:
        """Publish the adapter as it is, and bring the server to it."""
        manifest = self.adapters.publish(self.policy, version)
        weights = Published(0, "run.base:0", str(self.base.folder))
        return self.server.go_to(Published(version, manifest.label, str(self.adapters.folder), base=weights), keep=False)

    def move(self) -> None:
        """Change the adapter so far that its completions are others."""
        assert self.policy.adapter is not None
        with torch.no_grad():
            for name, parameter in self.policy.model.named_parameters():
                if name in self.policy.adapter.trained:
                    parameter.copy_(0.15 * torch.randn_like(parameter))


@pytest.fixture(scope="module")
def adapted(tiny_policy: Callable[..., Policy], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    """The server begins with other weights than those under the adapter."""
    folder = tmp_path_factory.mktemp("adapted")
    policy = tiny_policy("llama", scale=4.0, **SHAPE)
    save(tiny_policy("llama", seed=7, **SHAPE), folder / "served")
    policy = adapt(policy, LoraSettings(rank=4, alpha=8.0), base="")
    base = Publisher(folder / "base", "run.base", torch.float32)
    base.publish(without_adapter(policy), 0)
    with start_server(folder / "served", folder / "log", "--lora-rank", "4") as (url, _):
        yield Adapted(
            policy, base, AdapterPublisher(folder / "adapters", "run", torch.float32), VersionedServer(Client(url)), folder
        )


def complete(client: Client, name: str) -> dict[str, Any]:
    """The likeliest continuation by an adapter, from its server's answer."""
    sampling = {"temperature": 0.0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    body = request_of({"token_ids": PROMPT, "sampling_params": sampling}, name)
    (choice,) = answer_of(client.post("/inference/v1/generate", body, timeout=600), name)["choices"]
    return choice


def logp_of(choice: dict[str, Any]) -> np.ndarray:
    return np.array([entry["logprob"] for entry in choice["logprobs"]["content"]])


def scored(policy: Policy, tokens: list[int]) -> np.ndarray:
    """The trainer's log-probs of a continuation."""
    with plain_attention(policy.model) as model, torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + tokens]), use_cache=False).logits[0]
    logp = torch.log_softmax(logits[len(PROMPT) - 1 : -1].double(), -1)
    return logp[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()


def test_twenty_versions_answer_as_a_server_that_was_started_with_them(adapted: Adapted) -> None:
    """By tokens, and by log-probs to rounding, which are the trainer's too.  Two adapters stay on the server."""
    answers = {}
    for version in range(VERSIONS):
        adapted.move()
        adapted.send(version)
        label = f"run:{version}"
        assert adapted.server.version() == label
        assert adapted.server.adapters("run") == [f"run:{one}" for one in (version - 1, version) if one >= 0]
        choice = answers[label] = complete(adapted.server.client, label)
        assert choice["weight_versions"] == [{"version": label, "start": 0, "end": 12}]
        tokens = choice["token_ids"]
        assert np.abs(logp_of(choice) - scored(adapted.policy, tokens)).max() < 1e-3
    assert len({tuple(choice["token_ids"]) for choice in answers.values()}) > VERSIONS / 2, "they are all alike"
    save(without_adapter(adapted.policy), adapted.folder / "base-model")
    modules = [f"run:{version}={adapted.adapters.folder}/v{version:06d}" for version in range(VERSIONS)]
    options = ["--lora-modules", *modules]
    with start_server(adapted.folder / "base-model", adapted.folder / "fresh", "--lora-rank", "4", "--", *options) as (url, _):
        for label, choice in answers.items():
            fresh = complete(Client(url), label)
            assert fresh["token_ids"] == choice["token_ids"], label
            assert np.abs(logp_of(fresh) - logp_of(choice)).max() < 1e-3


def test_another_adapter_in_the_same_place_is_answered_for_from_the_old_ones_cache(adapted: Adapted) -> None:
    """The trap that names and folders of their own avoid: vLLM takes the new weights, and the keys and values of the old ones."""
    client, folder = adapted.server.client, adapted.folder / "same-place"
    adapted.move()
    adapted.send(100)
    shutil.copytree(adapted.adapters.folder / "v000100", folder)
    client.tell("/v1/load_lora_adapter", {"lora_name": "same", "lora_path": str(folder)}, timeout=600)
    assert complete(client, "same")["token_ids"] == complete(client, "run:100")["token_ids"]
    adapted.move()
    adapted.send(101)
    shutil.rmtree(folder)
    shutil.copytree(adapted.adapters.folder / "v000101", folder)
    client.tell("/v1/load_lora_adapter", {"lora_name": "same", "lora_path": str(folder), "load_inplace": True}, timeout=600)
    stale, right = complete(client, "same"), complete(client, "run:101")
    assert np.abs(logp_of(right) - scored(adapted.policy, right["token_ids"])).max() < 1e-3
    gap = np.abs(logp_of(stale) - scored(adapted.policy, stale["token_ids"])).max()
    assert gap > 1e-2, "vLLM has mended it: a name for each version costs the prefix cache for nothing"
    client.tell("/v1/unload_lora_adapter", {"lora_name": "same"}, timeout=600)
