"""From an updated policy to a version that servers can fetch."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.models.policy import Policy, without_adapter
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.plugin.groupwise_versions import Manifest
from groupwise.rollout.vllm.published import BASE, Published
from groupwise.rollout.vllm.publisher import FULL_EVERY, AdapterPublisher, Publisher
from groupwise.rollout.vllm.version_server import VersionServer
from groupwise.utils.files import expanded, temporary_folder
from groupwise.utils.terminal import logger

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Transport:
    """How versions come from the trainer to its servers."""

    folder: str | None = None
    """A folder that all processes and servers see under this path; None: a temporary one."""
    addressed: bool = True
    """True if servers fetch from a temporary folder through an HTTP server of the first process;
    False if they see the folder themselves.
    """
    full_every: int = FULL_EVERY


class WeightDelivery:
    """Publishes the versions of a policy, and says where a server finds them."""

    def __init__(self, run: str, transport: Transport) -> None:
        """run: the name of the run in the labels of versions.

        All processes must call it.  Raises ConfigError where processes on several machines have no
        folder in common.
        """
        self.run, self._transport = run, transport
        self._publisher: Publisher | None = None
        """Publishes the weights, or those under adapters."""
        self._adapters: AdapterPublisher | None = None
        """Publishes adapters alone, where servers take them."""
        self._newest: Manifest | None = None
        self._lock = threading.Lock()
        self._addresses: dict[str, VersionServer] = {}
        """An HTTP server for each address of this machine by which a server reaches it."""
        self._check_folder()

    def _check_folder(self) -> None:
        machines = set(comm.gather([socket.gethostname()]))
        if len(machines) > 1 and self._transport.folder is None:
            raise ConfigError(
                f"processes on {len(machines)} machines publish the weights together: name a folder"
                " that they and the servers share, rollout.engine.weights_folder",
                key="rollout.engine.weights_folder",
            )

    @property
    def alone(self) -> bool:
        """True if versions are adapters alone."""
        return self._adapters is not None

    def publish(self, policy: Policy, version: int, dtype: str, lora_rank: int = 0) -> None:
        """Publish a version: an adapter alone where servers have room for its rank, else all
        weights.

        All processes must call it.   dtype, lora_rank: of the servers.
        """
        if self._publisher is None:
            self._prepare(policy, dtype, lora_rank)
        assert self._publisher is not None
        publisher = self._adapters or self._publisher
        before = self._newest
        self._newest = publisher.publish(policy, version)
        if before is not None:  # a server may still be on its way to it
            publisher.forget(min(before.version, version))

    def _prepare(self, policy: Policy, dtype: str, lora_rank: int) -> None:
        """Decide how versions are published, and publish the weights under adapters."""
        folder, alone = comm.from_first(
            lambda: (self._make_folder(), 0 < rank_alone(policy) <= lora_rank)
        )
        self._folder = folder
        number, every = getattr(torch, dtype), self._transport.full_every
        if not alone:
            self._publisher = Publisher(folder, self.run, number, full_every=every)
            return
        self._publisher = Publisher(folder / "base", self.run + BASE, number)
        self._publisher.publish(without_adapter(policy), 0)
        self._adapters = AdapterPublisher(folder, self.run, number)

    def publish_full(self) -> None:
        """Add the whole weights to the newest version, for a server that could not read its patch.

        All processes must call it.
        """
        assert self._publisher is not None, "publish first"
        if self._adapters is None:  # an adapter is whole anyway
            self._newest = self._publisher.publish_full()

    def close(self) -> None:
        """End the HTTP servers, and remove what was published."""
        for server in self._addresses.values():
            server.close()
        for publisher in (self._publisher, self._adapters):
            if publisher is not None:
                publisher.close()

    def _make_folder(self) -> Path:
        if self._transport.folder is not None:
            return expanded(self._transport.folder).absolute() / self.run
        return temporary_folder("versions")

    def locate(self, client: Client) -> Published:
        """Return the newest version as a server can reach it.  From any thread."""
        newest = self._newest
        assert self._publisher is not None and newest is not None, "publish first"
        place, token = self._place(client)
        whole = bool(newest.full or newest.adapter)
        published = Published(newest.version, newest.label, place, token, whole=whole)
        if self._adapters is None:
            return published
        weights = self._publisher.last
        assert weights is not None
        base = Published(weights.version, weights.label, f"{place}/base", token, whole=True)
        return replace(published, base=base)

    def _place(self, client: Client) -> tuple[str, str]:
        """The folder or address of versions for a server, and its secret."""
        if self._transport.folder is not None or not self._transport.addressed:
            return str(self._folder), ""
        host = client.own_address()
        with self._lock:
            if host not in self._addresses:
                self._addresses[host] = VersionServer(self._folder, host).start()
            server = self._addresses[host]
        return server.url, server.token


def rank_alone(policy: Policy) -> int:
    """The rank that a server must have room for to take a policy's adapter alone; 0 if the adapter
    has parts that vLLM does not take, or there is none.
    """
    if policy.adapter is None or not policy.adapter_on:
        return 0
    config = policy.adapter.config
    if config.modules_to_save or config.fan_in_fan_out:
        return 0
    return max([config.r, *config.rank_pattern.values()])
