"""Requests are promises: the SDK sends one, is told its id, and asks for the result until it is
there.

One thread does the work.  The requests of a model are done in the order of their numbers, in
whatever order they arrive; one that arrives twice is done once.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from http import HTTPStatus
from typing import Any, TypeVar

from groupwise.errors import GroupwiseError
from groupwise.utils.http import Refused
from groupwise.utils.terminal import logger
from groupwise.utils.threads import Thread

log = logger(__name__)

Value = TypeVar("Value")
Answer = bytes | dict[str, Any]
"""A message of protocol buffers, or an object of JSON."""
KEPT = 8192
"""Requests and samplers that are known at a time; the oldest go first."""
TOLD = 64
"""Results that a client has already, and are held in case it asks again."""
REMEMBERED = 4096
"""Requests of a model whose repetition is recognised."""


class Promise:
    """One request, and its result once it is there."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(12)
        self._future: Future[Answer] = Future()

    def fulfil(self, work: Callable[[], Answer]) -> None:
        """Do the work, and give its result to whoever asks for it."""
        self.settle(attempt(work))

    def settle(self, answer: Answer) -> None:
        """Give the result to whoever asks for it."""
        self._future.set_result(answer)

    @property
    def settled(self) -> bool:
        """True if the result is there."""
        return self._future.done()

    def result(self, seconds: float) -> Answer | None:
        """Wait so long for the result; None if it is not there yet."""
        try:
            return self._future.result(timeout=seconds)
        except NotYet:
            return None


def attempt(work: Callable[[], Any]) -> Any:
    """Do the work and return what it gives.  What it raises becomes an answer that the SDK shows to
    its user.
    """
    try:
        return work()
    except (Refused, GroupwiseError) as error:
        return {"error": str(error), "category": "user"}
    except Exception as error:  # one request must not take the server away
        log.exception("a request failed")
        return {"error": f"{type(error).__name__}: {error}", "category": "server"}


class Table(OrderedDict[str, Value]):
    """The newest `KEPT` things, by name.  Threads may share it."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def note(self, name: str, value: Value) -> None:
        """Put in a thing; the oldest goes."""
        with self._lock:
            self[name] = value
            while len(self) > KEPT:
                self.popitem(last=False)


class Promises:
    """The promises that the server knows, by their ids."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: OrderedDict[str, Promise] = OrderedDict()
        self._told: OrderedDict[str, None] = OrderedDict()

    def make(self) -> Promise:
        """Make a promise that can be found; the oldest settled ones are forgotten."""
        promise = Promise()
        with self._lock:
            self._all[promise.id] = promise
            while len(self._all) > KEPT:
                oldest = next(iter(self._all.values()))
                if not oldest.settled:
                    break
                del self._all[oldest.id]
        return promise

    def result(self, name: str, seconds: float) -> Answer | None:
        """Wait so long for the result of a promise; None if it is not there yet.

        Raises Refused where there is no such promise.
        """
        with self._lock:
            promise = self._all.get(name)
        if promise is None:
            raise Refused(
                f"there is no request {name[:80]!r}: the server was started anew, or it is long"
                " answered",
                HTTPStatus.NOT_FOUND,
            )
        answer = promise.result(seconds)
        if answer is not None:
            self._note_told(name)
        return answer

    def _note_told(self, name: str) -> None:
        """Note that a client has its result; only the newest of these are held."""
        with self._lock:
            self._told[name] = None
            self._told.move_to_end(name)
            while len(self._told) > TOLD:
                oldest, _ = self._told.popitem(last=False)
                self._all.pop(oldest, None)


class ModelTurns:
    """The requests of one model, each when those of lower numbers are done."""

    def __init__(self, promises: Promises, worker: Thread) -> None:
        self._promises, self._worker = promises, worker
        self._lock = threading.Lock()
        self._next = 1
        self._known: OrderedDict[int, str] = OrderedDict()
        self._waiting: dict[int, Callable[[], None]] = {}

    def submit(self, number: int, work: Callable[[], Answer]) -> str:
        """Do the work when it is its turn, and return the id of its promise; a number that is known
        has one already.

        Raises Refused for a number that is long done.
        """
        with self._lock:
            if number in self._known:
                return self._known[number]
            if number < self._next:
                raise Refused(f"request {number} of the model is long done")
            promise = self._promises.make()
            self._known[number] = promise.id
            self._waiting[number] = lambda: promise.fulfil(work)
            self._begin()
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return promise.id

    def skip(self, number: int) -> None:
        """Leave out a request that was refused: those behind it do not wait for it."""
        with self._lock:
            if number >= self._next and number not in self._known:
                self._waiting[number] = _nothing
                self._begin()

    def _begin(self) -> None:
        """Hand on what is next in turn."""
        while self._next in self._waiting:
            self._worker.begin(self._waiting.pop(self._next))
            self._next += 1


def _nothing() -> None:
    """Stand for a request that was refused."""
