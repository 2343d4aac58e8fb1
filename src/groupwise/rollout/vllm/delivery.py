"""From an updated policy to servers that sample with it: publish a version, have them fetch it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.models.policy import Policy
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.plugin.groupwise_versions import Manifest
from groupwise.rollout.vllm.published import Delivery, Published, VersionUnreadable
from groupwise.rollout.vllm.publisher import FULL_EVERY, Publisher
from groupwise.rollout.vllm.version_server import VersionServer
from groupwise.rollout.vllm.weight_sync import Servers
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
    """Brings servers to the versions of a policy; all processes of a run call it together."""

    def __init__(self, servers: Servers, run: str, transport: Transport) -> None:
        """run: the name of the run in the labels of versions.

        Raises ConfigError where processes on several machines have no folder in common.
        """
        self.servers, self.run, self._transport = servers, run, transport
        self._publisher: Publisher | None = None
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

    def send(self, policy: Policy, version: int, *, keep: bool) -> list[Delivery]:
        """Publish a version, and return when all servers sample with it: how each came to it.

        All processes must call it, after `Servers.connect`.
        keep: see `VersionedServer.go_to`, which also says what is raised.
        """
        publisher = self._publisher
        if publisher is None:
            publisher = self._publisher = self._make_publisher()
        manifest = publisher.publish(policy, version)
        deliveries = comm.from_first(lambda: self._try(manifest, keep=keep))
        if deliveries is None:
            manifest = publisher.publish_full()
            deliveries = comm.from_first(lambda: self._deliver(manifest, keep=keep))
        publisher.forget(version)
        return deliveries

    def close(self) -> None:
        """End the HTTP servers, and remove what was published."""
        for server in self._addresses.values():
            server.close()
        if self._publisher is not None:
            self._publisher.close()

    def _make_publisher(self) -> Publisher:
        folder, dtype = comm.from_first(
            lambda: (self._make_folder(), str(self.servers.facts[0]["dtype"]))
        )
        return Publisher(
            folder, self.run, getattr(torch, dtype), full_every=self._transport.full_every
        )

    def _make_folder(self) -> Path:
        if self._transport.folder is not None:
            return expanded(self._transport.folder).absolute() / self.run
        return temporary_folder("versions")

    def _try(self, manifest: Manifest, *, keep: bool) -> list[Delivery] | None:
        """How all servers came to a version; None if one cannot read it."""
        try:
            return self._deliver(manifest, keep=keep)
        except VersionUnreadable as error:
            log.warning("%s; it gets all weights", error)
            return None

    def _deliver(self, manifest: Manifest, *, keep: bool) -> list[Delivery]:
        published = [self._published(manifest, client) for client in self.servers.clients]
        deliveries = self.servers.go_to(published, keep=keep)
        for name, delivery in zip(self.servers.names, deliveries, strict=True):
            if delivery.healed:
                log.warning("%s has read all weights again: %s", name, delivery.healed)
        return deliveries

    def _published(self, manifest: Manifest, client: Client) -> Published:
        """A version as a server can reach it."""
        assert self._publisher is not None
        folder = self._publisher.folder
        if self._transport.folder is not None or not self._transport.addressed:
            return Published(manifest.version, manifest.label, str(folder))
        host = client.own_address()
        if host not in self._addresses:
            self._addresses[host] = VersionServer(folder, host).start()
        server = self._addresses[host]
        return Published(manifest.version, manifest.label, server.url, server.token)
