"""The requests of one call of `generate`, on their way to the servers of a pool."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

from groupwise.errors import EngineError, GroupwiseError
from groupwise.rollout.vllm.pool import ServerPool
from groupwise.rollout.vllm.request import Answer, Answers, Request


class RequestPool:
    """Requests on their way, each to a server that the pool chooses.

    Iterate over the answers in a `with` block; leaving it hangs up, and the servers drop what they
    were still sampling.  A request has one answer, however often it was sent.
    """

    def __init__(self, pool: ServerPool, oldest: int) -> None:
        """oldest: the version that no token may be older than."""
        self._pool, self._oldest = pool, oldest
        self._answers: Answers = queue.SimpleQueue()
        self._open: dict[str, Request] = {}
        """The requests that are not answered."""
        self._sent: dict[str, Request] = {}
        """The last request of each conversation that is not over."""

    def __enter__(self) -> RequestPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.withdraw(self._open.values())
        for name in list(self._sent):
            self.finish(name)

    def cancel(self) -> None:
        """Make the thread that iterates raise an EngineError; another thread calls this."""
        self._answers.put(EngineError("sampling was broken off: the engine was closed"))

    def put(self, name: str, body: Any) -> None:
        """Send a request.   name: of the conversation; those of the same name go to one server."""
        rows = int(body["sampling_params"]["n"])
        request = Request(name, body, rows, self._oldest, self._answers)
        self._open[name] = self._sent[name] = request
        self._pool.ask(request)

    def again(self, name: str, error: GroupwiseError) -> None:
        """Send a request again whose answer other weights have drawn.  Raises `error` if that has
        happened too often.
        """
        request = self._open[name] = self._sent[name]
        self._pool.ask_again(request, error)

    def finish(self, name: str) -> None:
        """Note that a conversation is over."""
        del self._sent[name]
        self._pool.finish(name)

    def wake(self) -> None:
        """Let `take` return, with nobody's answer.  From any thread."""
        self._answers.put(("", "", None))

    def __iter__(self) -> Iterator[Answer]:
        while self._open:
            yield self.take()

    def take(self) -> Answer:
        """Wait for the next answer, or for `wake`.  Raises EngineError for an answer that cannot
        be, PeerError if no server is left.
        """
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        self._open.pop(answer[1], None)
        return answer
