"""The vLLM servers that sample for a policy: whether they can, and how they come to its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from groupwise.errors import ConfigError, EngineError, PeerError
from groupwise.models.lora import is_untied
from groupwise.models.policy import Policy
from groupwise.models.saving import merged
from groupwise.models.shape import Shape
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.plugin.groupwise_versions import FORMAT
from groupwise.rollout.vllm.published import (
    UPDATE_SECONDS,
    Delivery,
    Published,
    VersionedServer,
)
from groupwise.utils import threads
from groupwise.utils.batching import batch_by_size

Item = TypeVar("Item")
Alive = Callable[[], None]
"""Raises if a server is known to have ended; it knows better than a broken connection what
happened.
"""
Facts = Mapping[str, Any]
"""What `groupwise_vllm.Extension.groupwise_facts` says of a server."""
Answer = tuple[str, str, Any]
"""Who answers, name of the request, what was answered."""

PATIENCE = 8.0
"""Seconds within which a healthy server answers a short question."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head widths that vLLM's attention knows on a CPU; with another it dies at the first completion.
"""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What configs call the number of experts.  Mixtral on vLLM 0.32's CPU build: after an update
log-probs were off by a nat.
"""
BUCKET_BYTES = 1 << 28
"""Weights that travel together."""


class Servers:
    """Running servers that share the weights of one policy."""

    asleep = False
    """They keep their weights."""

    def __init__(self, urls: Sequence[str], alive: Alive | None = None) -> None:
        """alive: of servers that this process has started.   Raises ConfigError for what is no
        address, or named twice.
        """
        self.clients = [Client(url) for url in urls]
        if len({client.url for client in self.clients}) < len(self.clients):
            raise ConfigError(
                f"a server is named twice: {' and '.join(client.url for client in self.clients)}"
            )
        self.alive = alive
        self.facts: list[Facts] = []

    @property
    def names(self) -> list[str]:
        """What the servers are called in messages."""
        return [client.name for client in self.clients]

    def dealt(self, rooms: Sequence[int]) -> list[str]:
        """Addresses for connections, dealt out in turn to the servers.   rooms: connections to
        each.
        """
        urls = []
        for place in range(max(rooms)):
            for client, room in zip(self.clients, rooms, strict=True):
                if place < room:
                    urls.append(client.url)
        return urls

    def close(self) -> None:
        """Hang up."""
        for client in self.clients:
            client.close()

    def connect(self, policy: Policy, patience: float = PATIENCE) -> None:
        """Wait until all answer, and see that each can sample for this policy.

        patience: seconds that a server may take to appear.  Raises PeerError for one that does not,
            EngineError for an unfit one."""
        self.facts = [
            self._connect(client, policy, time.monotonic() + patience) for client in self.clients
        ]
        types = sorted({str(one["dtype"]) for one in self.facts})
        if len(types) > 1:
            raise EngineError(f"the vLLM servers differ in dtype: {types}; start them alike")

    def _connect(self, client: Client, policy: Policy, deadline: float) -> Facts:
        while True:
            if self.alive is not None:
                self.alive()
            try:
                client.get("/health", timeout=PATIENCE)
                break
            except PeerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        try:
            facts = _facts(client)
        except EngineError as error:
            raise EngineError(
                f"the server at {client.url} runs without Groupwise's plug-in for vLLM: start it"
                " with `groupwise serve MODEL`"
            ) from error
        if facts.get("format") != FORMAT:
            raise EngineError(
                f"{client.name} was started by another version of Groupwise: start it anew with"
                " `groupwise serve MODEL`"
            )
        if wrong := unfit(facts, policy):
            raise EngineError(f"{client.name} cannot sample for this policy: {wrong}")
        return facts

    def go_to(self, published: Sequence[Published], *, keep: bool = False) -> list[Delivery]:
        """Bring all servers to a version at the same time; from now on every token that they draw
        carries its label.

        published: the version, for each server as it can reach it.
        keep: see `VersionedServer.go_to`, which also says what is raised.
        """
        tasks = []
        for client, one in zip(self.clients, published, strict=True):
            tasks.append(partial(VersionedServer(client).go_to, one, keep=keep))
        return together(tasks, self.alive)


def _facts(client: Client) -> Facts:
    body = {"method": "groupwise_facts"}
    return client.post("/collective_rpc", body, timeout=UPDATE_SECONDS)["results"][0]


def unfit(facts: Facts, policy: Policy) -> str | None:
    """Why a server cannot sample for a policy, or None."""
    rows = policy.model.config.get_text_config().vocab_size
    if facts["device"] == "cpu" and (wrong := unfit_on_cpu(policy.model.config.to_dict())):
        return wrong
    if facts["logprobs"] != "processed_logprobs":
        return (
            f"it reports {facts['logprobs']}, which know no temperature; start it with"
            " --logprobs-mode processed_logprobs"
        )
    if facts["vocabulary"] != rows:
        return (
            f"its model has a vocabulary of {facts['vocabulary']}, the policy one of {rows}; start"
            " it with the policy's model"
        )
    if policy.adapter is not None and is_untied(policy.model):
        return (
            "its model has one matrix for embedding and head, of which"
            " model.lora.modules_to_save trains a copy; leave it out, or set rollout.engine to"
            " native"
        )
    return None


def unfit_on_cpu(config: dict[str, Any]) -> str | None:
    """Why vLLM cannot sample for a model on a CPU, or None.   config: transformers'."""
    width = Shape.of(config, 0, dtype="float32").head_width
    if width not in CPU_HEADS:
        return (
            f"its attention on a CPU knows heads of {', '.join(map(str, CPU_HEADS))} numbers, the"
            f" policy's have {width}"
        )
    if any(config.get(name) for name in EXPERTS):
        return "on a CPU the new weights of a mixture of experts do not all reach its experts"
    return None


def buckets(
    policy: Policy, dtype: torch.dtype, limit: int = BUCKET_BYTES
) -> Iterator[tuple[list[str], list[list[int]], Tensor]]:
    """A policy's weights by their checkpoint's names, in runs of up to `limit` bytes: (names,
    shapes, all of them as uint8).

    Adapters are merged into them; a tied head is sent as the embedding that it is.
    """
    model = merged(policy)
    weights = revert_weight_conversion(
        model, {name: parameter.detach() for name, parameter in model.named_parameters()}
    )
    for bucket in batch_by_size(
        weights.items(), lambda named: named[1].numel() * dtype.itemsize, limit
    ):
        names, parts = zip(*bucket, strict=True)
        flat = torch.cat([part.to(dtype).reshape(-1) for part in parts])
        yield list(names), [list(part.shape) for part in parts], flat.view(torch.uint8)


def together(tasks: Sequence[Callable[[], Item]], alive: Alive | None) -> list[Item]:
    """Run all at the same time, and return what they return, in order; the first failure ends the
    wait, whatever the others still wait for.
    """
    begun = [threads.begin(task, "servers") for task in tasks]
    for done in as_completed(begun):
        failure = done.exception()
        if isinstance(failure, Exception):
            raise_cause(failure, alive)
        if failure is not None:
            raise failure
    return [done.result() for done in begun]


def raise_cause(failure: Exception, alive: Alive | None) -> NoReturn:
    """Raise a failure of a server by its cause."""
    if alive is not None:
        for _ in range(20):  # a server that ends breaks its connections before it is gone
            alive()
            time.sleep(0.1)
    raise failure
