"""From an updated policy to a version that servers can fetch."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.models.policy import Policy
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.plugin.groupwise_versions import Manifest
from groupwise.rollout.vllm.published import Published
from groupwise.rollout.vllm.publisher import FULL_EVERY, Publisher
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

    def publish(self, policy: Policy, version: int, dtype: str) -> None:
        """Publish a version.  All processes must call it.   dtype: of the servers."""
        if self._publisher is None:
            folder = comm.from_first(self._make_folder)
            self._publisher = Publisher(
                folder,
                self.run,
                getattr(torch, dtype),
                full_every=self._transport.full_every,
            )
        before = self._newest
        self._newest = self._publisher.publish(policy, version)
        if before is not None:  # a server may still be on its way to it
            self._publisher.forget(min(before.version, version))

    def publish_full(self) -> None:
        """Add the whole weights to the newest version, for a server that could not read its patch.

        All processes must call it.
        """
        assert self._publisher is not None, "publish first"
        self._newest = self._publisher.publish_full()

    def close(self) -> None:
        """End the HTTP servers, and remove what was published."""
        for server in self._addresses.values():
            server.close()
        if self._publisher is not None:
            self._publisher.close()

    def _make_folder(self) -> Path:
        if self._transport.folder is not None:
            return expanded(self._transport.folder).absolute() / self.run
        return temporary_folder("versions")

    def locate(self, client: Client) -> Published:
        """Return the newest version as a server can reach it.  From any thread."""
        newest = self._newest
        assert self._publisher is not None and newest is not None, "publish first"
        folder = self._publisher.folder
        if self._transport.folder is not None or not self._transport.addressed:
            return Published(newest.version, newest.label, str(folder))
        host = client.own_address()
        with self._lock:
            if host not in self._addresses:
                self._addresses[host] = VersionServer(folder, host).start()
            server = self._addresses[host]
        return Published(newest.version, newest.label, server.url, server.token)
