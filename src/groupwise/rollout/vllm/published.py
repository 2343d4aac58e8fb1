"""A published version of the weights, and what a server is asked about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Published:
    """A version of the weights that lies where servers can fetch it."""

    version: int
    label: str
    """The name of the version among all runs, `RUN:VERSION`: every token that it draws carries it.
    """
    source: str = ""
    """The folder or address of the version."""
    token: str = ""
    """The secret that the address asks for; empty for a folder."""


class VersionedServer(Protocol):
    """One server, and the version of the weights that it samples with."""

    def version(self) -> str | None:
        """Return the label of the weights that the server has now.

        Raises PeerError if the server is gone or silent.
        """
        ...

    def go_to(self, published: Published, *, keep: bool) -> None:
        """Bring the server to a published version, from whatever version it has; blocks until it
        samples with it.

        Safe to call for a server that is late, new or was started anew, in a thread of its own, and
        again after a failure.
        keep: completions that are on their way go on with the new weights; else they are aborted.
        Raises PeerError if the server is gone or silent, EngineError if it does not take them.
        """
        ...
