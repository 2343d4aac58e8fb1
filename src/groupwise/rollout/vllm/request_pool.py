"""Requests on their way to vLLM servers, several at a time, and an eye on servers that die, fall
silent or stand still.
"""

from __future__ import annotations

import contextlib
import queue
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from groupwise.errors import EngineError, PeerError
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.weight_sync import PATIENCE, Alive, Answer, raise_cause
from groupwise.utils import threads

STALLED, STARTING = 60.0, 600.0
"""Seconds without a computed token after which a server that has work counts as stalled; and until
its very first one, for which it may have to compile."""
POLL = 2.0
"""Seconds without an answer after which the servers are asked whether they are there, and how much
they have computed.
"""
LOST = 2
"""Short questions in a row that a server may leave unanswered."""


class RequestPool:
    """Requests on their way: a thread and a connection for each; all take from one list, so that a
    faster server gets more.

    Iterate over the answers in a `with` block; leaving it hangs up, and the servers drop what they
    were still sampling."""

    def __init__(
        self, urls: Sequence[str], alive: Alive | None, paused: Callable[[], bool]
    ) -> None:
        """urls: where each connection leads; alive: of servers that this process has started.

        paused: true while the servers may not compute.
        """
        self._clients = [Client(url) for url in urls]
        self._left, self._alive, self._paused = 0, alive, paused
        self._waiting = set[Client]()
        """Connections with a request on its way."""
        self._todo: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._unanswered = 0
        """Short questions in a row that nobody has answered."""
        self._seen: dict[str, tuple[float, float]] = {}
        """Tokens that each server had computed, and since when."""
        self._done: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

    def __enter__(self) -> RequestPool:
        for client in self._clients:
            threads.begin(partial(self._work, client), "rollout-request")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._todo.get_nowait()
        for client in self._clients:
            self._todo.put(None)
            client.close()

    def cancel(self) -> None:
        """Make the thread that iterates raise an EngineError; another thread calls this."""
        self._done.put(EngineError("sampling was broken off: the engine was closed"))

    def _work(self, client: Client) -> None:
        try:
            while (item := self._todo.get()) is not None:
                name, body = item
                self._waiting.add(client)
                answer = client.post("/inference/v1/generate", body, timeout=None)
                self._waiting.discard(client)
                self._done.put((client.name, name, answer))
            client.close()
        except Exception as error:  # any failure belongs to the thread that waits
            self._done.put(error)

    def put(self, name: str, body: Any) -> None:
        """Send one request more."""
        self._left += 1
        self._todo.put((name, body))

    def wake(self) -> None:
        """Let `take` return, with nobody's answer.  From any thread."""
        self._done.put(("", "", None))

    def __iter__(self) -> Iterator[Answer]:
        while self._left:
            yield self.take()

    def take(self) -> Answer:
        """Wait for the next answer, or for `wake`.  Raises PeerError for a server that is gone or
        hangs.
        """
        while True:
            try:
                answer = self._done.get(timeout=POLL)
            except queue.Empty:
                silence = self._silence()
                self._unanswered = self._unanswered + 1 if silence is not None else 0
                if silence is not None and self._unanswered >= LOST:
                    raise silence from None
                continue
            if isinstance(answer, Exception):
                raise_cause(answer, self._alive)
            self._unanswered = 0
            self._seen.clear()
            self._left -= bool(answer[0])
            return answer

    def _silence(self) -> PeerError | None:
        """What is wrong with a server that does not answer a short question; None if all do.

        Raises PeerError for one that stands still.
        """
        if self._alive is not None:
            self._alive()
        for url in dict.fromkeys(client.url for client in self._clients):
            client = Client(url)
            try:
                client.get("/health", timeout=PATIENCE)
                tokens = computed_tokens(client)
            except PeerError as error:
                return error
            finally:
                client.close()
            works = any(other.url == url for other in self._waiting) and not self._paused()
            before, since = self._seen.get(url, (-1.0, 0.0))
            if tokens != before or not works:
                self._seen[url] = tokens, time.monotonic()
            elif (stands := time.monotonic() - since) > (STALLED if tokens else STARTING):
                raise PeerError(
                    f"{client.name} answers, but has computed nothing for {stands:.0f} s: it hangs"
                )
        return None


def computed_tokens(client: Client) -> float:
    """Tokens that a server has computed since it was started, of prompts and of completions.
    Raises EngineError if it does not count them."""
    metrics = client.text("/metrics", timeout=PATIENCE)
    counts = re.findall(
        r"^vllm:(?:prompt|generation)_tokens_total(?:{.*})? (\S+)$", metrics, re.MULTILINE
    )
    if not counts:
        raise EngineError(
            f"{client.name} does not say what it computes: start it without --disable-log-stats"
        )
    return sum(map(float, counts))
