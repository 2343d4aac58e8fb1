"""Where the servers of a run are: addresses, a file that is read again, or a running vllm-router.

In a recipe (`rollout.engine.servers`): `[http://a:8000, http://b:8000]`, `servers.txt` with one
address a line, or `{router: http://c:8080}`.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Protocol

from groupwise.errors import ConfigError, EngineError, PeerError
from groupwise.rollout.vllm.client import Client, RefusedRequest
from groupwise.utils.files import expanded
from groupwise.utils.terminal import logger

log = logger(__name__)

ANSWER_SECONDS = 8.0
"""Seconds within which a router answers a short question."""

Servers = str | Mapping[str, str] | Sequence[str]
"""The value of `rollout.engine.servers`."""


class Addresses(Protocol):
    """Says where the servers are now."""

    @property
    def router(self) -> Router | None:
        """The router that requests go through; None: they go to the servers."""
        ...

    def read(self) -> tuple[str, ...]:
        """Return the servers' addresses.  Raises PeerError if the router is gone or silent."""
        ...


class AddressList:
    """Addresses that a recipe names."""

    router: Router | None = None

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises ConfigError for what is no address, or named twice."""
        self._urls = unique(urls)

    def read(self) -> tuple[str, ...]:
        """Return the addresses."""
        return self._urls


class AddressFile:
    """A file with one address a line; empty lines and lines that begin with # are left out.

    The run reads it again, so servers may join and leave.  Another content counts when it has been
    read twice in a row: one that is being written may end in the middle of an address.
    """

    router: Router | None = None

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that is not there, or a line that is no address."""
        self._path = expanded(path)
        self._urls = self._read_last = self._parse()

    def _parse(self) -> tuple[str, ...]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"rollout.engine.servers: {self._path} cannot be read ({error}); it is a file with"
                " the address of one server a line",
                key="rollout.engine.servers",
            ) from error
        lines = [line.strip() for line in text.splitlines()]
        return unique([line for line in lines if line and not line.startswith("#")])

    def read(self) -> tuple[str, ...]:
        """Return the addresses in the file.

        Where it cannot be read now, or is empty as one that is being written, those before stay,
        the former with a warning.
        """
        try:
            urls = self._parse() or self._urls
        except ConfigError as error:
            log.warning("the servers stay as they are: %s", error)
            return self._urls
        if urls == self._read_last:
            self._urls = urls
        self._read_last = urls
        return self._urls


class Router:
    """A running vllm-router, which knows the servers and passes requests on.

    It forwards every other path to one arbitrary server, so weights and pauses never go through it.
    """

    def __init__(self, url: str) -> None:
        """url: `http://host:port`.  Raises ConfigError for anything else."""
        self.url = Client(url).url
        self.name = f"the vllm-router at {self.url}"

    @property
    def router(self) -> Router:
        """Itself."""
        return self

    def read(self) -> tuple[str, ...]:
        """Return the addresses of its servers, healthy or not.  Raises PeerError if it is gone or
        silent, EngineError if it is no vllm-router.
        """
        client = Client(self.url)
        try:
            listed = client.get("/workers", timeout=ANSWER_SECONDS)["workers"]
            return unique([str(worker["url"]) for worker in listed])
        except (RefusedRequest, KeyError, TypeError) as error:
            if isinstance(error, RefusedRequest) and error.passing:
                raise PeerError(str(error)) from error
            raise EngineError(
                f"{self.name} does not list its servers at /workers ({error}): name a running"
                " vllm-router, or the servers themselves"
            ) from error
        finally:
            client.close()

    def is_ready(self) -> bool:
        """Return whether it has a healthy server.  Raises PeerError if it is gone or silent."""
        client = Client(self.url)
        try:
            client.text("/readiness", timeout=ANSWER_SECONDS)
        except RefusedRequest:
            return False
        finally:
            client.close()
        return True

    def remove(self, url: str) -> None:
        """Take a server out: it gets no requests.  Raises as `Client.post`."""
        self._order("remove_worker", "url", url)

    def add(self, url: str) -> None:
        """Put a server in.  Raises as `Client.post`."""
        self._order("add_worker", "url", url)

    def finish(self, session: str) -> None:
        """Forget the server of a session.  Raises as `Client.post`."""
        self._order("finish_session", "session_id", session)

    def _order(self, route: str, key: str, value: str) -> None:
        client = Client(self.url)
        query = urllib.parse.urlencode({key: value})
        try:
            client.order(f"/{route}?{query}", timeout=ANSWER_SECONDS)
        finally:
            client.close()


def addresses_of(servers: Servers) -> Addresses:
    """Read the value of `rollout.engine.servers`.  Raises ConfigError for a file that is not there
    or what is no address.
    """
    if isinstance(servers, str):
        return AddressFile(servers)
    if isinstance(servers, Mapping):
        return Router(servers["router"])
    return AddressList(servers)


def unique(urls: Sequence[str]) -> tuple[str, ...]:
    """Return addresses as `Client` writes them.  Raises ConfigError for what is no address, or is
    there twice.
    """
    written = [Client(url).url for url in urls]
    if len(set(written)) < len(written):
        raise ConfigError(f"a server is named twice: {' and '.join(written)}")
    return tuple(written)
