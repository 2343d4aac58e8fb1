"""One server of a pool: what it is, what it computes, and which version it samples with."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from groupwise.errors import EngineError, PeerError
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.published import VersionedServer

ANSWER_SECONDS = 8.0
"""Seconds within which a healthy server answers a short question."""
LOST = 2
"""Short questions in a row that a server may leave unanswered."""
STALLED, STARTING = 60.0, 600.0
"""Seconds without a computed token after which a server that has work counts as stalled; and until
its very first one, for which it may have to compile.
"""
COUNTERS = {
    "computed": r"(?:prompt|generation)_tokens_total",
    "hits": "prefix_cache_hits_total",
    "queries": "prefix_cache_queries_total",
    "running": "num_requests_running",
}
"""What is read of a server, and vLLM's names of it in `/metrics`."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What a server has counted since it was started, tokens, and its requests now."""

    computed: float = 0.0
    """Tokens of prompts and of completions."""
    queries: float = 0.0
    """Tokens of prompts that were looked up in the prefix cache."""
    hits: float = 0.0
    """Tokens of prompts that it held."""
    running: float = 0.0

    def since(self, before: Counters) -> Counters:
        """Return what was counted since `before`; all of it where the server was started anew."""
        if self.queries < before.queries:
            return self
        return Counters(
            queries=self.queries - before.queries, hits=max(0.0, self.hits - before.hits)
        )


def read_counters(client: Client) -> Counters:
    """Ask a server what it has counted.  Raises EngineError if it does not count tokens."""
    text = client.text("/metrics", timeout=ANSWER_SECONDS)
    sums = {}
    for name, pattern in COUNTERS.items():
        values = re.findall(rf"^vllm:{pattern}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        if not values and name == "computed":
            raise EngineError(
                f"{client.name} does not say what it computes: start it without --disable-log-stats"
            )
        sums[name] = sum(map(float, values))
    return Counters(**sums)


@dataclass(eq=False, slots=True)
class Member:
    """One server of a pool.  `ServerPool` has one thread for each, which visits it."""

    client: Client
    """The connection of the thread that visits it."""
    served: VersionedServer
    joins: bool = False
    """It is named since the run has begun; what makes it unfit does not end the run."""
    facts: Mapping[str, Any] | None = None
    """What it is; None while it is not there."""
    version: int | None = None
    """The version that it samples with; None while it gets no requests."""
    trouble: str = "has not answered yet"
    """Why it gets no requests."""
    visited: bool = False
    """It was asked at least once."""
    sampled: bool = False
    """It has been given requests."""
    busy: int = 0
    """Completions that were asked of it and have not come back."""
    load: int = 0
    """Completions of the conversations that it holds."""
    counters: Counters = field(default_factory=Counters)
    reported: Counters = field(default_factory=Counters)
    """The counters at the last step."""
    suspect: bool = False
    """A request to it has failed since it was visited."""
    left: bool = False
    """It is no longer named."""
    out: bool = False
    """This run has taken it out of its router."""
    move: Future[None] | None = None
    """The way to another version."""
    failures: int = 0
    """Ways to another version in a row that have failed."""
    resumed: bool = False
    """It was told to compute since it was met: before that it may have been lost in a pause."""
    woken: threading.Event = field(default_factory=threading.Event)
    watch: Future[None] | None = None
    """The thread that visits it."""
    awaited: float = 0.0
    """Since when another run has it; 0: none has."""
    _unanswered: int = 0
    _standing: tuple[float, float] = (-1.0, 0.0)
    """Computed tokens, and since when there are so many."""

    @property
    def url(self) -> str:
        """The address of the server."""
        return self.client.url

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self.client.name

    @property
    def rows(self) -> int:
        """Completions that it decodes at the same time."""
        return 0 if self.facts is None else int(self.facts["rows"])

    @property
    def moving(self) -> bool:
        """True while it goes to another version."""
        return self.move is not None and not self.move.done()

    @property
    def arriving(self) -> bool:
        """True while it goes to another version, and nothing speaks against its coming there."""
        return self.moving and not self.failures

    def is_fresh(self, oldest: int) -> bool:
        """True if it may draw tokens of which none may be older than the version `oldest`."""
        return self.version is not None and self.version >= oldest

    def hold(self, run: str, seconds: float) -> str:
        """Ask for the server for so many seconds; return the run that has it."""
        return str(self._call("groupwise_hold", {"run": run, "seconds": seconds})[0])

    def let_go(self, run: str) -> None:
        """Tell the server that a run has ended."""
        self._call("groupwise_let_go", {"run": run})

    def _call(self, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Call a method of our plug-in on all workers of the server."""
        body = {"method": method, "kwargs": arguments}
        return self.client.post("/collective_rpc", body, timeout=ANSWER_SECONDS)["results"]

    def inspect(self, works: bool) -> bool:
        """Ask whether it is there and computes; False if it has been silent, which may pass.

        works: it has requests.
        Raises PeerError if it is gone, has been silent LOST times, or stands still.
        """
        try:
            self.client.get("/health", timeout=ANSWER_SECONDS)
            self.counters = read_counters(self.client)
        except PeerError as error:
            self._unanswered += 1
            if isinstance(error.__cause__, TimeoutError) and self._unanswered < LOST:
                return False
            raise
        self._unanswered = 0
        tokens, now = self.counters.computed, time.monotonic()
        before, since = self._standing
        if tokens != before or not works:
            self._standing = tokens, now
            return True
        if now - since > (STALLED if tokens else STARTING):
            raise PeerError(
                f"{self.name} answers, but has computed nothing for {now - since:.0f} s: it hangs"
            )
        return True
