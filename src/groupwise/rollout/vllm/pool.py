"""The servers of a run: who is there, which version each samples with, and who gets a request.

One thread visits each server, every two seconds and when it is woken: is it there, does it compute,
which weights has it?  A server with other weights than the newest version is told to go there, on
its own; until then it gets only requests whose tokens may be as old as what it has.

A conversation stays with the server that has its beginning in the prefix cache; a new one goes to
the server with the fewest, for the rows that it has.  The requests of a server that is lost go to
others.  With a vllm-router the router chooses; a server that is lost or late is taken out of it,
and put in again when it has the newest version.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import Any

from groupwise.errors import EngineError, GroupwiseError, PeerError
from groupwise.rollout.vllm.addresses import Addresses, Router
from groupwise.rollout.vllm.client import Client, RefusedRequest
from groupwise.rollout.vllm.member import Member
from groupwise.rollout.vllm.published import (
    Published,
    VersionedServer,
    VersionUnreadable,
    answer_of,
    request_of,
)
from groupwise.rollout.vllm.request import Request
from groupwise.utils import threads
from groupwise.utils.terminal import logger

log = logger(__name__)

POLL, SOON = 2.0, 0.05
"""Seconds between two visits of a server: one that has the newest version, and one that has not."""
HELD = 10.0
"""Seconds for which a server stays with a run that does not ask for it again."""
CLOSE_SECONDS = 1.0
"""Seconds that the end of a run waits for servers that are let go."""
RETRY_SECONDS = 0.5
"""Pause before a server that failed is visited."""
RETRIED = (429, 500, 502, 503, 504)
"""What a server answers that cannot work at the moment, and a router whose server is gone."""
STALE_ANSWERS = 3
"""Answers by other weights to one request, before the run ends."""
NO_ADAPTER = 404
"""What a server answers that has no adapter of this name yet, or not any more."""
UNREADABLE = 3
"""Times that a server may fail to read a run's first version."""
AT_LEAST = ("rows", "context", "candidates", "lora_rank")
"""What a server that joins must have as much of as the first one."""
SAMPLE = "/inference/v1/generate"


class ServerPool:
    """The servers that sample for a run."""

    asleep = False
    """They keep their weights."""

    def __init__(
        self,
        addresses: Addresses,
        run: str,
        *,
        serve: Callable[[Client], VersionedServer],
        meet: Callable[[Client], Mapping[str, Any]],
        locate: Callable[[Client], Published],
        leads: bool = True,
        keep: bool = False,
        patience: float,
        alive: Callable[[], None] | None = None,
    ) -> None:
        """run: begins the label of each version.   serve: makes what brings a server to a version.

        meet: says what a server is; raises EngineError for an unfit one.
        locate: says where a server finds the newest version.
        leads: this process brings servers to versions; others only look which they have.
        keep: completions on their way go on with new weights.
        patience: seconds without any server after which the run ends.
        alive: raises if a server that this process has started has ended, which ends the run.
        Nothing is asked before `start`.
        """
        self.addresses, self._run, self._leads = addresses, run, leads
        self._holder = f"{run}, process {os.getpid()} on {socket.gethostname()}"
        self._serve, self._meet, self._locate, self._keep = serve, meet, locate, keep
        self.patience, self._alive = patience, alive
        self._changed = threading.Condition()
        self.members: dict[str, Member] = {}
        self._newest: int | None = None
        """The version that servers go to."""
        self._adapter = False
        self._unreadable = False
        self._queue: deque[Request] = deque()
        """Requests that no server can take yet, the oldest first."""
        self._sessions: dict[str, Member] = {}
        """The server of each conversation."""
        self._waiting: dict[Client, tuple[Member, Request]] = {}
        """The requests on their way, by connection."""
        self._work: queue.SimpleQueue[Callable[[dict[str, Client]], None] | None] = (
            queue.SimpleQueue()
        )
        self._workers = self._idle = 0
        self._front: Member | None = None
        """The router, in the place of a server."""
        self._front_ready = False
        self._failure: Exception | None = None
        self._closed = threading.Event()
        self._served = time.monotonic()
        """When a server was there last."""
        self._retries = 0
        self._has_published = False
        """True from the first version on."""
        self._first: Mapping[str, Any] | None = None
        """What the first server is."""
        if addresses.router is not None:
            client = Client(addresses.router.url)
            client.name = addresses.router.name
            self._front = Member(client, serve(client), facts={"rows": 0})

    # ------------------------------------------------------------ members

    @property
    def present(self) -> list[Member]:
        """The servers that get requests."""
        with self._changed:
            return [member for member in self.members.values() if member.version is not None]

    @property
    def known(self) -> dict[str, Mapping[str, Any]]:
        """What each server is that is there, by its name."""
        with self._changed:
            members = [member for member in self.members.values() if member.facts is not None]
        return {member.name: member.facts for member in members if member.facts is not None}

    @property
    def names(self) -> list[str]:
        """What is asked for completions, in messages."""
        if self.addresses.router is not None:
            return [self.addresses.router.name]
        return [Client(url).name for url in self.addresses.read()]

    @property
    def dtype(self) -> str:
        """The type in which the servers compute."""
        assert self._first is not None, "start first"
        return str(self._first["dtype"])

    @property
    def lora_rank(self) -> int:
        """The highest rank of adapters that all servers take alone; 0: one takes none."""
        return self._least("lora_rank")

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that all servers hold."""
        return self._least("context")

    @property
    def rows(self) -> int:
        """Completions that all servers decode at the same time; of the first where none is there at
        the moment.
        """
        assert self._first is not None, "start first"
        rows = sum(int(facts["rows"]) for facts in self.known.values())
        return rows or int(self._first["rows"])

    def _least(self, name: str) -> int:
        """Return the least of what the first server has of something, and those that are there."""
        assert self._first is not None, "start first"
        found = [self._first, *self.known.values()]
        return min(int(facts[name]) for facts in found)

    def start(self) -> tuple[()]:
        """Wait until a server is there, and all that are named have been asked once.

        Raises EngineError for a server that is unfit, PeerError if none is there for `patience`
        seconds.
        """
        self._served = time.monotonic()
        threads.begin(self._supervise, "servers")
        self._wait(lambda member: member.facts is not None)
        return ()

    def announce(self, version: int, *, adapter: bool = False) -> None:
        """Bring the servers to the newest version, each on its own.  Raises what ended the pool.

        adapter: the version is an adapter alone, which requests name.
        """
        self._adapter = adapter
        self._newest, self._has_published = version, True
        self.wake()
        self.raise_failure()

    def begin_anew(self, run: str) -> None:
        """Let labels of versions begin with another name from now on.

        No request is on its way.
        """
        with self._changed:
            self._run, self._newest = run, None
            for member in self.members.values():
                member.version = None
            self._refresh_front()

    def wait_for_version(self) -> None:
        """Wait until a server has the newest version, or cannot read it.

        Raises as `start`, and EngineError for a server that does not take the first version.
        """
        self._wait(lambda member: member.version == self._newest)

    def take_unreadable(self) -> bool:
        """Return True if a server could not read a version since the last call: it needs the whole
        weights.
        """
        unreadable, self._unreadable = self._unreadable, False
        return unreadable

    def _wait(self, there: Callable[[Member], bool]) -> None:
        with self._changed:
            while self._failure is None and not self._unreadable:
                members = list(self.members.values())
                if any(map(there, members)) and all(member.visited for member in members):
                    return
                self._changed.wait(POLL)
        self.raise_failure()

    def wake(self) -> None:
        """Visit all servers now."""
        with self._changed:
            members = list(self.members.values())
        for member in members:
            member.woken.set()

    def raise_failure(self) -> None:
        """Raise what has ended the pool, if anything has."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Hang up, and let the threads end."""
        self._closed.set()
        self.wake()
        with self._changed:
            clients = list(self._waiting)
            for _ in range(self._workers):
                self._work.put(None)
            watches = [member.watch for member in self.members.values() if member.watch is not None]
        for client in clients:
            client.close()
        wait(watches, CLOSE_SECONDS)

    def _fail(self, error: Exception) -> None:
        """End the pool, and every request with it."""
        with self._changed:
            self._failure = self._failure or error
            stopped = list(self._queue)
            stopped += [request for _, request in self._waiting.values()]
            self._queue.clear()
            self._changed.notify_all()
        for request in stopped:
            request.fail(error)

    def _supervise(self) -> None:
        """Read who is named, again and again, and end the run when none is there for too long."""
        while not self._closed.is_set() and self._failure is None:
            try:
                self._name(self.addresses.read())
                if self.addresses.router is not None:
                    self._look_at_front(self.addresses.router.is_ready())
            except PeerError as error:  # of the router
                self._lose_front(error)
            except GroupwiseError as error:
                self._fail(error)
            self._count_patience()
            self._closed.wait(POLL if self.present else SOON * 4)

    def _name(self, urls: tuple[str, ...]) -> None:
        """Take in servers that are named anew, and let go those that are no longer named."""
        for url in urls:
            member = self.members.get(url)
            if member is not None:
                member.out = False  # a router that was restarted has it again
                continue
            client = Client(url)
            member = Member(client, self._serve(Client(url)), joins=self._has_published)
            with self._changed:
                self.members[url] = member
            member.watch = threads.begin(lambda member=member: self._watch(member), "server")
        for url, member in list(self.members.items()):
            if url not in urls and not member.out:
                member.left = True
                with self._changed:
                    del self.members[url]
                self._part(member, PeerError(f"{member.name} is no longer named"))
                member.woken.set()

    def _count_patience(self) -> None:
        now = time.monotonic()
        there = self._front_ready or self._front is None
        with self._changed:
            arriving = any(member.arriving for member in self.members.values())
        if there and (self.present or arriving):
            self._served = now
        elif now - self._served > self.patience:
            troubles = [f"{member.trouble}" for member in self.members.values()]
            if self._front is not None and not self._front_ready:
                troubles.append(self._front.trouble)
            said = "; ".join(troubles) or "no server is named"
            self._fail(
                PeerError(
                    f"no server has answered for {self.patience:g} s: {said}. Start servers with"
                    " `groupwise serve MODEL` and resume the run; rollout.engine.patience is how"
                    " long it waits"
                )
            )

    # ------------------------------------------------------------ visits

    def _watch(self, member: Member) -> None:
        """Visit one server until it is no longer named, and let go of it."""
        self._visit_again_and_again(member)
        if self._leads and member.facts is not None:
            with suppress(GroupwiseError):  # a server that is gone has forgotten it
                member.let_go(self._holder)

    def _visit_again_and_again(self, member: Member) -> None:
        while not (self._closed.is_set() or member.left or self._failure is not None):
            try:
                self._visit(member)
            except (PeerError, EngineError) as error:
                self._lose(member, error)
            except Exception as error:  # a fault of our own must not leave the run waiting
                self._fail(EngineError(f"{member.name}: {type(error).__name__}: {error}"))
                raise
            with self._changed:
                member.visited = True
                self._changed.notify_all()
            self._keep_out(member)
            member.woken.wait(self._pause(member))
            member.woken.clear()
            if member.suspect:
                member.suspect = False
                self._closed.wait(RETRY_SECONDS)

    def _pause(self, member: Member) -> float:
        """Return the seconds until a server is visited again, unless it is woken."""
        newest = self._newest
        if member.facts is None:
            return RETRY_SECONDS
        if newest is None or member.moving or member.version == newest:
            return POLL
        return SOON

    def _visit(self, member: Member) -> None:
        """See whether a server is there and what it has, and bring it to the newest version.

        Raises PeerError or EngineError for one that is lost.
        """
        if self._alive is not None:
            self._alive()
        front = self._front
        if front is None:
            works = member.busy > 0
        else:
            works = front.busy > 0 and member.counters.running > 0
        if not member.inspect(works and not member.moving):
            return
        if member.facts is None:
            self._admit(member)
        if self._leads and not self._hold(member):
            return
        run, newest = self._run, self._newest
        if member.moving or newest is None:
            return
        if member.move is not None:
            move, member.move = member.move, None
            try:
                move.result()
            except VersionUnreadable as error:
                self._note_unreadable(member, error)
                return
        try:
            version = self._version_of(member)
        except PeerError as error:
            if isinstance(error.__cause__, TimeoutError) and member.version is not None:
                return  # it may compute something long; `inspect` tells it from one that hangs
            raise
        if self._failure is not None:
            return
        self._note(member, version, run)
        if not self._leads:
            return
        if version != newest:
            member.move = threads.begin(partial(self._go, member), "server-version")
            return
        if not member.resumed:
            member.served.resume()
            member.resumed = True
        if member.out:
            self._let_in(member)

    def _admit(self, member: Member) -> None:
        """Ask a server what it is.  Raises EngineError for one that is unfit, or less than those
        that the run began with.
        """
        facts = self._meet(member.client)
        first = self._first = self._first or facts
        if (facts["device"], facts["dtype"]) != (first["device"], first["dtype"]):
            raise EngineError(
                f"{member.name} computes in {facts['dtype']} ({facts['device']}), the others in"
                f" {first['dtype']} ({first['device']}): start them alike"
            )
        if member.joins:
            for name in AT_LEAST:
                if facts[name] < first[name]:
                    raise EngineError(
                        f"{member.name} has {name} {facts[name]}, the first server {first[name]}: a"
                        " server that joins must have as many"
                    )
        with self._changed:
            for other in self.members.values():
                if other is not member and _same_server(other.facts, facts):
                    raise EngineError(
                        f"{member.name} is the one at {other.url}: name each server once"
                    )
            member.facts = facts

    def _hold(self, member: Member) -> bool:
        """Ask for a server again, which works for one run at a time; False if it does not answer,
        which may pass.

        Raises PeerError while another run has it that may have been killed, EngineError where that
        run goes on.
        """
        try:
            holder = member.hold(self._holder, HELD)
        except PeerError as error:
            if isinstance(error.__cause__, TimeoutError) and member.version is not None:
                return False  # as in `_visit`
            raise
        if holder == self._holder:
            member.awaited = 0.0
            return True
        held = f"{member.name} samples for another run ({holder})"
        refused = EngineError(f"{held}: give each run its own servers, or end the other one first")
        if member.sampled:
            self._fail(refused)
        now = time.monotonic()
        member.awaited = member.awaited or now
        if now - member.awaited < 2.0 * HELD:
            raise PeerError(f"{held}, unless that was killed")
        raise refused

    def _go(self, member: Member) -> None:
        """Bring a server to the newest version."""
        run = self._run
        try:
            published = self._locate(member.client)
            delivery = member.served.go_to(published, keep=self._keep)
            if published.base is not None and not member.resumed:
                member.served.resume()  # an adapter comes without a pause that would end
            member.failures, member.resumed = 0, True
            if delivery.healed:
                log.warning("%s has read all weights again: %s", member.name, delivery.healed)
            if not member.left and member.facts is not None:
                self._note(member, published.version, run)
        except GroupwiseError:
            member.failures += 1
            raise
        finally:
            member.woken.set()

    def _note_unreadable(self, member: Member, error: VersionUnreadable) -> None:
        """Let all weights be written for a server that cannot read a version.

        Raises `error` where it cannot read those either, at the start of the run.
        """
        begins = not (member.joins or member.sampled)
        if error.whole and begins and member.failures >= UNREADABLE:
            raise error
        with self._changed:
            member.trouble, member.suspect = str(error), True
            if member.failures == 1:  # what does not help once is not written again
                log.warning("%s; it gets all weights", error)
                self._unreadable = True
            self._changed.notify_all()

    def _version_of(self, member: Member) -> int | None:
        """Return the version of this run that a server has; None: it has none."""
        run, _, version = str(member.served.version()).rpartition(":")
        return int(version) if run == self._run and version.isdigit() else None

    def _note(self, member: Member, version: int | None, run: str) -> None:
        """Note which version a server has, and give it requests.

        run: begins the labels that the version was read from; it may be a name of before.
        """
        with self._changed:
            if run != self._run:
                return
            member.version = version
            if version is not None:
                member.trouble, member.sampled = "", True
            self._refresh_front()
            self._deal()
            self._changed.notify_all()

    def _lose(self, member: Member, error: GroupwiseError) -> None:
        """Take a server out of use until a visit succeeds."""
        if self._alive is not None and (member.sampled or self._has_ended() is not None):
            self._fail(self._cause(error))
            return
        passing = isinstance(error, RefusedRequest) and error.passing
        unfit = isinstance(error, EngineError) and not passing
        if unfit and not member.joins and not member.sampled:
            self._fail(error)
            return
        tell = member.sampled and member.facts is not None
        tell = tell or (unfit and member.trouble != str(error))
        self._part(member, error)
        if tell:
            log.warning("%s; its requests go to others", error)

    def _has_ended(self) -> GroupwiseError | None:
        """Return how a server that this process has started has ended; None: it runs."""
        assert self._alive is not None
        try:
            self._alive()
        except GroupwiseError as error:
            return error
        return None

    def _part(self, member: Member, error: GroupwiseError) -> None:
        """Let go of a server: its requests fail, and are asked elsewhere."""
        with self._changed:
            lost = member.facts is not None
            member.version, member.facts, member.trouble = None, None, str(error)
            member.resumed = False
            self._sessions = {
                session: holder
                for session, holder in self._sessions.items()
                if holder is not member
            }
            member.load = 0
            self._refresh_front()
        if self._front is None:
            self._cut(member)
        elif lost:
            self._keep_out(member)
            self._cut(self._front)  # nobody knows which of them the router has passed to it

    def _keep_out(self, member: Member) -> None:
        """Take a server out of the router that may get no requests, while others do."""
        router = self.addresses.router
        if router is None or not self._leads or member.out or member.left:
            return
        if member.version is not None or not self.present:
            return
        with suppress(PeerError, EngineError):  # the router is gone too, and will be asked again
            router.remove(member.url)
            member.out = True
            self._look_at_front(self._front_ready)

    def _let_in(self, member: Member) -> None:
        """Put a server into the router again."""
        router = self.addresses.router
        assert router is not None
        with suppress(PeerError, EngineError):
            router.add(member.url)
            member.out = False
            self._look_at_front(self._front_ready)

    def _cut(self, target: Member | None) -> None:
        """Break the connections off that wait for a server."""
        with self._changed:
            cut = [client for client, (asked, _) in self._waiting.items() if asked is target]
        for client in cut:
            client.close()

    # ------------------------------------------------------------ the router

    def _look_at_front(self, ready: bool) -> None:
        with self._changed:
            self._front_ready = ready
            assert self._front is not None
            self._front.trouble = "" if ready else f"{self._front.name} has no healthy server"
            self._refresh_front()
            self._deal()

    def _lose_front(self, error: GroupwiseError) -> None:
        with self._changed:
            self._front_ready = False
            assert self._front is not None
            self._front.trouble = str(error)
            self._refresh_front()
        self._cut(self._front)

    def _refresh_front(self) -> None:
        """Work out how old the weights may be behind the router.  The lock is held."""
        if self._front is None:
            return
        behind = [member for member in self.members.values() if not member.out]
        versions = [member.version for member in behind]
        self._front.facts = {"rows": sum(member.rows for member in behind)}
        oldest = None
        if self._front_ready and versions and None not in versions:
            oldest = min(version for version in versions if version is not None)
        self._front.version = oldest

    # ------------------------------------------------------------ requests

    def ask(self, request: Request) -> None:
        """Send a request as soon as a server can take it."""
        with self._changed:
            self.raise_failure()
            self._queue.append(request)
            self._deal()

    def ask_again(self, request: Request, error: GroupwiseError) -> None:
        """Send a request again whose answer other weights have drawn.  Raises `error` after
        STALE_ANSWERS of them.
        """
        request.stale += 1
        if request.stale > STALE_ANSWERS:
            raise error
        with self._changed:
            members = self.members.values() if self._front is not None else [request.member]
            for member in members:
                if member is not None:
                    self._suspect(member)
            self._retries += 1
            self._queue.appendleft(request)

    def finish(self, session: str) -> None:
        """Forget which server holds a conversation that is over."""
        if self.addresses.router is not None:
            self._begin(partial(self._finish, self.addresses.router, self._key(session)))
            return
        with self._changed:
            member = self._sessions.pop(session, None)
            if member is not None:
                member.load -= 1

    def _finish(self, router: Router, key: str, _: dict[str, Client]) -> None:
        with suppress(PeerError, EngineError):  # a router that is gone has forgotten it
            router.finish(key)

    def withdraw(self, requests: Collection[Request]) -> None:
        """Take requests back whose answers nobody waits for."""
        with self._changed:
            for request in requests:
                request.withdrawn = True
            self._queue = deque(one for one in self._queue if not one.withdrawn)
            cut = [client for client, (_, one) in self._waiting.items() if one.withdrawn]
        for client in cut:
            client.close()
        self.wake()

    def _key(self, session: str) -> str:
        """Return the text by which a router knows a conversation of this run."""
        return urllib.parse.quote(f"{self._run}/{session}")

    def _suspect(self, member: Member) -> None:
        """Give a server no requests before it was visited.  The lock is held."""
        member.suspect, member.version = True, None
        self._refresh_front()
        member.woken.set()

    def _deal(self) -> None:
        """Send what a server can take.  The lock is held."""
        while self._queue:
            request = self._queue[0]
            member = self._choose(request)
            if member is None:
                return
            self._queue.popleft()
            if request.name not in self._sessions and self._front is None:
                self._sessions[request.name] = member
                member.load += 1
            member.busy += request.rows
            request.member = member
            request.label = f"{self._run}:{member.version}"
            self._begin(partial(self._send, request, member))

    def _choose(self, request: Request) -> Member | None:
        """Return the server that holds a conversation, else the least loaded one with a free row;
        None: it waits.
        """
        if self._front is not None:
            members = [self._front]
        else:
            held = self._sessions.get(request.name)
            if held is not None and held.is_fresh(request.oldest):
                return held
            members = list(self.members.values())
        free = []
        for member in members:
            if member.is_fresh(request.oldest) and member.busy < member.rows + request.rows:
                free.append(member)
        return min(free, key=lambda member: member.load / member.rows, default=None)

    def _begin(self, work: Callable[[dict[str, Client]], None]) -> None:
        """Let a free thread do something with its connections, or a new one."""
        with self._changed:
            self._idle -= 1
            if self._idle < 0:
                self._idle += 1
                self._workers += 1
                threads.begin(self._do_work, "rollout-request")
        self._work.put(work)

    def _do_work(self) -> None:
        clients: dict[str, Client] = {}
        while (work := self._work.get()) is not None:
            work(clients)
            with self._changed:
                self._idle += 1
        for client in clients.values():
            client.close()

    def _send(self, request: Request, member: Member, clients: dict[str, Client]) -> None:
        """Ask a server, and hand its answer on, or ask another one."""
        client = clients.setdefault(member.url, Client(member.url))
        headers = {}
        if self._front is not None:
            headers["X-Session-ID"] = self._key(request.name)
        with self._changed:
            self._waiting[client] = member, request
        label = request.label
        body = request_of(request.body, label) if self._adapter else request.body
        try:
            answer = client.post(SAMPLE, body, timeout=None, headers=headers)
        except Exception as error:  # any failure belongs to who waits for the answer
            self._failed(request, member, client, error)
            return
        with self._changed:
            self._release(request, member, client)
            self._deal()
        if self._adapter:
            answer = answer_of(answer, label)
        request.answer(member.name, answer)

    def _release(self, request: Request, member: Member, client: Client) -> None:
        """Note that a request is no longer on its way.  The lock is held."""
        del self._waiting[client]
        member.busy -= request.rows

    def _failed(self, request: Request, member: Member, client: Client, error: Exception) -> None:
        """Ask another server, or give up what no server can do."""
        refused = isinstance(error, RefusedRequest)
        passing = isinstance(error, PeerError) or (refused and error.status in self._retried)
        with self._changed:
            self._release(request, member, client)
            if request.withdrawn or self._failure is not None:
                return
            now = time.monotonic()
            request.refused = request.refused or now
            impatient = refused and now - request.refused >= self.patience
            if passing and not impatient and self._alive is None:
                self._retries += 1
                self._queue.appendleft(request)
                if member is not self._front:
                    self._suspect(member)
                else:
                    self._front_ready = False
                    self._refresh_front()
                return
        if self._alive is not None:
            error = self._cause(error)
        request.fail(error)

    @property
    def _retried(self) -> tuple[int, ...]:
        """What a server answers that may answer better later, or another one in its place."""
        return (*RETRIED, NO_ADAPTER) if self._adapter else RETRIED

    def _cause(self, error: Exception) -> Exception:
        """Return how a server of one's own has ended, which it says better than a connection."""
        for _ in range(20):  # a server that ends breaks its connections before it is gone
            ended = self._has_ended()
            if ended is not None:
                return ended
            time.sleep(0.1)
        return error

    # ------------------------------------------------------------ metrics

    def metrics(self) -> dict[str, float]:
        """Return what the servers did since the last call, by the names of the metric table."""
        hits = queries = 0.0
        with self._changed:
            present = [member for member in self.members.values() if member.version is not None]
            metrics = {
                "servers/alive": float(len(present)),
                "servers/retries": float(self._retries),
            }
            self._retries = 0
            for member in present:
                counted = member.counters.since(member.reported)
                member.reported = member.counters
                hits, queries = hits + counted.hits, queries + counted.queries
                name = urllib.parse.urlsplit(member.url).netloc
                metrics[f"servers/version/{name}"] = float(member.version or 0)
        if queries:
            metrics["servers/prefix_hits"] = hits / queries
        return metrics


def _same_server(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    """True for two answers of one server, which has one mirror of the weights."""
    return one is not None and one["mirror"] == other["mirror"]
