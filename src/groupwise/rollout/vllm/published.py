"""A published version of the weights, and a server that is brought to it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from groupwise.errors import EngineError, PeerError
from groupwise.rollout.vllm.client import Client, RefusedRequest
from groupwise.rollout.vllm.server import ADAPTERS

UPDATE_SECONDS = 120.0
"""A part of an update of the weights that takes longer has failed."""
ANSWER_SECONDS = 8.0
"""Seconds within which a server says what it has, unless it computes something long."""
BASE = ".base"
"""End of the run's name in the label of the weights under adapters."""
FOLDERS = 8
"""Folders of adapters that a server keeps: a completion that has begun with one goes on with it,
and vLLM may read it again.
"""
STILL_SECONDS = 600.0
"""A server that has read nothing of a version for so long has failed to fetch it.  Digests of all
weights are computed in this time: 1.8 GB/s.
"""
OPEN_UPDATE = "weight update is already active"
"""What vLLM says of an update that begins while another one is open."""
SHORTEST_WAIT, LONGEST_WAIT = 0.002, 0.1
"""Seconds between two questions whether a version has been fetched."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version of the weights that lies where servers can fetch it."""

    version: int
    label: str
    """The name of the version among all runs, `RUN:VERSION`: every token that it draws carries it.
    """
    source: str = ""
    """The folder of all versions, or the address of the trainer that hands them out."""
    token: str = ""
    """The secret that the address asks for; empty for a folder."""
    base: Published | None = None
    """The weights under an adapter, which alone is the version; None: the version is the weights.
    """
    whole: bool = False
    """True if it can be read without a version before it."""


@dataclass(frozen=True, slots=True)
class FetchReport:
    """How a server came to a version."""

    read_bytes: int
    full: bool
    """True if it read the whole weights, and not patches alone."""
    healed: str = ""
    """Why it could not use patches that should have been there; empty if nothing was wrong."""
    seconds: float = 0.0
    """Time that it took to fetch, apply and check them, while sampling went on."""
    folder: str = ""
    """The server's folder of an adapter."""


class VersionUnreadable(EngineError):
    """A server could read neither the patches to a version nor the last full one before it."""

    def __init__(self, message: str, *, whole: bool) -> None:
        """whole: the version itself is a full one."""
        super().__init__(message)
        self.whole = whole


class VersionedServer:
    """One server, and the version of the weights that it samples with."""

    def __init__(self, client: Client) -> None:
        """client: to the server; one thread at a time uses it."""
        self.client = client
        self._folders: list[str] = []
        """Labels of the adapters whose folders the server has, the oldest first."""

    def version(self) -> str | None:
        """Return the label of the weights that the server has now, or of its newest adapter over
        base weights; None where it has base weights alone.

        Raises PeerError if the server is gone or silent.
        """
        label = self.client.get("/weight_info", timeout=ANSWER_SECONDS)["weight_version"]
        run, _, _ = str(label).rpartition(":")
        if not run.endswith(BASE):
            return label
        adapters = self.adapters(run.removesuffix(BASE))
        return adapters[-1] if adapters else None

    def adapters(self, run: str) -> list[str]:
        """Return the labels of the adapters of a run that the server has, the oldest first."""
        served = self.client.get("/v1/models", timeout=ANSWER_SECONDS)["data"]
        versions = []
        for model in served:
            name, _, version = str(model["id"]).rpartition(":")
            if name == run:
                versions.append(int(version))
        return [f"{run}:{version}" for version in sorted(versions)]

    def go_to(self, published: Published, *, keep: bool) -> FetchReport:
        """Bring the server to a published version, from whatever version it has; blocks until it
        samples with it.

        Safe to call for a server that is late, new or was started anew, in a thread of its own, and
        again after a failure.  The version is fetched while sampling goes on; then the server
        pauses, and forgets the keys and values that it keeps.
        keep: completions that are on their way go on with the new weights; else they are aborted.
        Raises PeerError if the server is gone or silent, VersionUnreadable if it cannot read the
        version, EngineError if it does not take it.
        """
        if published.base is not None:
            return self._add_adapter(published, published.base, keep=keep)
        delivery = self._fetch(published)
        self._post(f"/pause?mode={'keep' if keep else 'abort'}")
        self._post("/reset_prefix_cache")
        self._begin_update()
        self._post("/update_weights", {"update_info": {"label": published.label}})
        self._post("/finish_weight_update", {"weight_version": published.label})
        self.resume()
        return delivery

    def _begin_update(self) -> None:
        """Begin an update.  One that a trainer has left open, because it was killed in it, is ended
        first, by weights that the server does not have.
        """
        try:
            self._post("/start_weight_update")
        except RefusedRequest as error:
            if OPEN_UPDATE not in str(error):
                raise
            with suppress(RefusedRequest):
                self._post("/update_weights", {"update_info": {"label": ""}})
            self._post("/start_weight_update")

    def resume(self) -> None:
        """Let the server compute; harmless where it does.  Raises as `go_to`."""
        self._post("/resume")

    def _add_adapter(self, published: Published, base: Published, *, keep: bool) -> FetchReport:
        """Add an adapter beside those that the server has, and remove old ones.

        Each has a name and a folder of its own: an adapter that is loaded in the place of another
        one is answered for from the keys and values of the old one.
        """
        if self.client.get("/weight_info", timeout=UPDATE_SECONDS)["weight_version"] != base.label:
            self.go_to(base, keep=keep)
        delivery = self._fetch(published)
        run, _, _ = published.label.rpartition(":")
        known = self.adapters(run)
        if published.label not in known:
            folder = delivery.folder
            body = {"lora_name": published.label, "lora_path": folder}
            self.client.tell("/v1/load_lora_adapter", body, timeout=UPDATE_SECONDS)
        for label in [*known, published.label][:-ADAPTERS]:
            body = {"lora_name": label}
            self.client.tell("/v1/unload_lora_adapter", body, timeout=UPDATE_SECONDS)
        if published.label not in self._folders:
            self._folders.append(published.label)
        while len(self._folders) > FOLDERS:
            self._call("groupwise_drop_adapter", {"label": self._folders.pop(0)})
        return delivery

    def _fetch(self, published: Published) -> FetchReport:
        """Have the server fetch a version beside its sampling, and wait until it has.

        Raises VersionUnreadable if it cannot, PeerError if it reads nothing for STILL_SECONDS.
        """
        arguments = {
            "source": published.source,
            "token": published.token,
            "version": published.version,
            "adapter": published.base is not None,
        }
        self._call("groupwise_fetch", arguments)
        wait = SHORTEST_WAIT
        read, since = -1, time.monotonic()
        while True:
            workers = self._call("groupwise_fetched", {})
            for worker in workers:
                if worker["error"]:
                    raise VersionUnreadable(
                        f"{self.client.name} cannot take version {published.version} of the"
                        f" weights: {worker['error']}",
                        whole=published.whole,
                    )
            if all(worker["done"] for worker in workers):
                break
            before, read = read, sum(int(worker["read_bytes"]) for worker in workers)
            if read != before:
                since = time.monotonic()
            elif time.monotonic() - since > STILL_SECONDS:
                raise PeerError(
                    f"{self.client.name} has read {read} bytes of version {published.version} of"
                    f" the weights, and no more for {STILL_SECONDS:g} s: its fetch hangs"
                )
            time.sleep(wait)
            wait = min(2.0 * wait, LONGEST_WAIT)
        first = workers[0]
        return FetchReport(
            read_bytes=sum(int(worker["read_bytes"]) for worker in workers),
            full=bool(first["full"]),
            healed=str(first["healed"]),
            seconds=float(first["seconds"]),
            folder=str(first["folder"]),
        )

    def _call(self, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Call a method of our plug-in on all workers of the server."""
        return self._post("/collective_rpc", {"method": method, "kwargs": arguments})["results"]

    def _post(self, path: str, body: Any = None) -> Any:
        return self.client.post(path, body, timeout=UPDATE_SECONDS)


def request_of(body: Mapping[str, Any], label: str) -> dict[str, Any]:
    """A request for completions by an adapter."""
    return {**body, "model": label}


def answer_of(answer: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The answer to `request_of`: its tokens carry the label of the adapter.

    A server says the version of the weights under it.  Where that is no base of the adapter's run
    the tokens keep it, and are refused as foreign.
    """
    run, _, _ = label.rpartition(":")
    choices = []
    for choice in answer["choices"]:
        spans = []
        for span in choice["weight_versions"] or ():
            under = str(span["version"]).rpartition(":")[0]
            name = label if under == run + BASE else span["version"]
            spans.append({**span, "version": name})
        choices.append({**choice, "weight_versions": spans})
    return {**answer, "choices": choices}
