"""The one place that waits for code that may never return: worker processes that are killed on time, and an asyncio loop.

A worker is a fresh Python process that talks over a socket: it inherits no thread, no GPU handle and no lock, works from any
thread of the parent, needs no `if __name__ == "__main__"` in the user's script, and dies by SIGKILL.  Requests travel as pickles
towards the worker only; answers come back as JSON, so that nothing a worker says can run code in the parent.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.errors import RewardError

START_SECONDS = 120.0
"""Deadline for a worker's start: imports on a loaded machine with a cold disk."""
START = "from groupwise.rewards.workers import serve; serve()"
LONGEST_ANSWER = 1 << 28
"""Bytes; a worker that announces more is taken for broken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a call ended: with a value, or in one of three ways that are not a value."""

    value: Any = None
    failure: Literal["error", "timeout", "died"] | None = None
    """`error`: it raised.  `timeout`: it was killed at the deadline.  `died`: its process ended by itself (a crash, no memory)."""
    message: str = ""
    kind: str = ""
    """Name of the exception's type, for `error`."""
    where: str = ""
    """For `error`: file, line and source where it was raised."""
    cause: BaseException | None = None
    """For `error` in this process: the exception itself."""
    late: tuple[int, ...] = ()
    """Of a value with an entry per row: the rows whose own deadline passed; their entry is empty."""
    seconds: float = 0.0


class Pool:
    """Worker processes that run one function, each call under a deadline of its own.

    `target` is `module:factory`; every worker calls `factory(*setup)` once and then what that returned for each call, so imports
    and warm-up are not counted in a deadline.  Workers start when first needed and are replaced when they die.

    >>> with Pool("operator:attrgetter", setup=("real",), size=1, seconds=5.0) as pool:
    ...     [outcome.value for outcome in pool.map([(3,), (True,)])]
    [3, 1]
    """

    def __init__(
        self,
        target: str,
        *,
        setup: tuple[Any, ...] = (),
        size: int,
        seconds: float,
        cpu_seconds: float | None = None,
        memory: int | None = None,
        max_calls: int | None = None,
        quiet: bool = False,
    ) -> None:
        """`seconds`: wall-clock deadline of a call.  `cpu_seconds`: a second deadline in processor time, which a loaded machine
        does not shorten.  `memory`: address space of a worker in bytes (RLIMIT_AS).  `max_calls`: a worker retires after so many.
        `quiet`: what workers print is dropped instead of going to the parent's standard error.
        """
        self.target, self.setup, self.size, self.seconds = target, setup, size, seconds
        self.cpu_seconds, self.memory, self.max_calls, self.quiet = cpu_seconds, memory, max_calls, quiet
        self._reset()
        atexit.register(self.close)

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._idle: list[_Worker] = []
        self._busy = set[_Worker]()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self.size)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, *arguments: Any) -> Outcome:
        """Call the function in a worker.  Returns within the deadline (plus, at times, a worker's start), whatever it does."""
        if self._owner != os.getpid():
            self._reset()  # a fork of the parent must not talk to the parent's workers
        with self._slots:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is not None and not worker.alive():
                worker.kill()
                worker = None
            if worker is None:
                worker = _Worker(self)
            self._busy.add(worker)
            try:
                outcome, usable = worker.call(arguments, self.seconds)
            finally:
                self._busy.discard(worker)
            if usable and (self.max_calls is None or worker.calls < self.max_calls):
                with self._lock:
                    self._idle.append(worker)
            else:
                worker.kill()
            return outcome

    def map(self, calls: Sequence[tuple[Any, ...]]) -> list[Outcome]:
        """Many calls on all workers; outcomes in the order of the calls."""
        if len(calls) <= 1 or self.size == 1:
            return [self.run(*call) for call in calls]
        with ThreadPoolExecutor(max_workers=min(self.size, len(calls))) as threads:
            return list(threads.map(lambda call: self.run(*call), calls))

    def close(self) -> None:
        """Kill the workers; a call that another thread waits for has died.  The pool may be used again."""
        if self._owner != os.getpid():
            return
        with self._lock:
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.kill()
        for worker in list(self._busy):  # who waits for it clears it away
            worker.end()


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, pool: Pool) -> None:
        self.calls = 0
        self._socket, child = socket.socketpair()
        options = {"seconds": pool.seconds, "cpu_seconds": pool.cpu_seconds, "memory": pool.memory}
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        out = subprocess.DEVNULL if pool.quiet else 2
        with child:
            # -P: the folder of this file must not come first on the path.  A session of its own: Ctrl-C reaches the parent only,
            # and the kill takes along what the function started.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(child.fileno()), pool.target, json.dumps(options)],
                pass_fds=(child.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )
        started, _ = self.call(pool.setup, START_SECONDS)
        self.calls = 0
        if started.failure:
            self.kill()
            raise RewardError(f"the worker process of {pool.target} could not start: {started.message}")

    def alive(self) -> bool:
        """False once its end of the socket is closed, which is how every death shows, without reaping it yet."""
        self._socket.settimeout(0.0)
        try:
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def call(self, arguments: tuple[Any, ...], seconds: float) -> tuple[Outcome, bool]:
        """Send, wait, receive.  Returns the outcome and whether the worker can be used again."""
        self.calls += 1
        start = time.monotonic()
        payload = pickle.dumps(arguments)  # raises in the caller's face if an argument cannot travel
        try:
            _send(self._socket, payload, start + seconds)
            reply = json.loads(_receive(self._socket, start + seconds))
        except TimeoutError:
            self.kill()
            took = time.monotonic() - start
            return Outcome(failure="timeout", message=f"no result within {seconds:g} s", seconds=took), False
        except (OSError, EOFError, ValueError):
            return self._obituary(time.monotonic() - start), False
        except BaseException:  # Ctrl-C in the parent: the worker is in the middle of a call
            self.kill()
            raise
        took = time.monotonic() - start
        if "error" in reply:
            # A worker that ran out of memory may be left with a heap full of holes.
            usable = reply["kind"] != "MemoryError"
            failed = Outcome(failure="error", message=reply["error"], kind=reply["kind"], where=reply["where"], seconds=took)
            return failed, usable
        return Outcome(value=reply["value"], seconds=took), True

    def _obituary(self, took: float) -> Outcome:
        self.kill()
        code = self._process.returncode
        if code in (-signal.SIGPROF, -signal.SIGALRM):  # the worker's own timers, see _arm
            return Outcome(failure="timeout", message=f"no result within the processor time allowed ({took:.1f} s)", seconds=took)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Outcome(failure="died", message=f"worker died ({how})", seconds=took)

    def kill(self) -> None:
        """SIGKILL the worker and what it started, and reap it: no zombie stays."""
        self._socket.close()
        if self._process.returncode is None:
            self.end()
            self._process.wait()

    def end(self) -> None:
        """SIGKILL, without clearing anything away."""
        if self._process.returncode is None:  # once reaped, its number may belong to somebody else
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
                os.killpg(self._process.pid, signal.SIGKILL)


def serve() -> None:
    """Life of a worker process: limits, set-up, then one call after the other until the parent closes the socket."""
    descriptor, target, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    parent = socket.socket(fileno=descriptor)
    if options["memory"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (options["memory"], options["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    function: Callable[..., Any] | None = None
    while True:
        try:
            request = _receive(parent, None)
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone; skip the clean-up of whatever the function left behind
        try:
            if function is None:
                module, _, name = target.partition(":")
                function = getattr(importlib.import_module(module), name)(*pickle.loads(request))
                reply: dict[str, Any] = {"value": None}
            else:
                arguments = pickle.loads(request)
                _arm(options["seconds"] + 1.0, options["cpu_seconds"])
                try:
                    reply = {"value": function(*arguments)}
                finally:
                    _arm(0.0, 0.0)
            message = json.dumps(reply).encode()
        except BaseException as error:  # whatever it is (SystemExit, math-verify's BaseException), it is this call's outcome
            reply = {"error": _describe(error), "kind": type(error).__name__, "where": raised_at(error)}
            message = json.dumps(reply).encode()
        _send(parent, message, None)


def _arm(wall: float, cpu: float | None) -> None:
    """Let the kernel end this process even if the parent no longer can.  No handler: the default action needs no interpreter."""
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM, signal.SIGPROF))
    signal.setitimer(signal.ITIMER_REAL, wall)
    if cpu is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu)


def _describe(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception of somebody else whose message cannot be made
        return ""


def _send(channel: socket.socket, payload: bytes, deadline: float | None) -> None:
    channel.settimeout(_left(deadline))
    channel.sendall(struct.pack("!Q", len(payload)) + payload)


def _receive(channel: socket.socket, deadline: float | None) -> bytes:
    (size,) = struct.unpack("!Q", _exactly(channel, 8, deadline))
    if deadline is not None and size > LONGEST_ANSWER:
        raise ValueError(f"an answer of {size} bytes")
    return _exactly(channel, size, deadline)


def _exactly(channel: socket.socket, size: int, deadline: float | None) -> bytes:
    chunks = bytearray()
    while len(chunks) < size:
        channel.settimeout(_left(deadline))
        chunk = channel.recv(min(size - len(chunks), 1 << 20))
        if not chunk:
            raise EOFError
        chunks += chunk
    return bytes(chunks)


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0.0:
        raise TimeoutError
    return left


def failed(error: BaseException, start: float) -> Outcome:
    """The outcome of a call in this process, begun at `start` (time.monotonic), that raised."""
    return Outcome(
        failure="error",
        message=_describe(error),
        kind=type(error).__name__,
        where=raised_at(error),
        cause=error,
        seconds=time.monotonic() - start,
    )


def raised_at(error: BaseException) -> str:
    """File, line and source of where it was raised; empty where that is not known."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{frames[0].filename}, line {frames[0].lineno}: {frames[0].line}" if frames else ""


class Loop:
    """One asyncio loop in a thread of its own, kept between calls so that a function's sessions and locks stay valid."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner = 0

    def submit(self, coroutine: Coroutine[Any, Any, Any], seconds: float | None) -> Callable[[], Outcome]:
        """Start a coroutine.  Calling what this returns waits for it, at most `seconds` from its start; then it is cancelled."""
        if self._loop is None or self._owner != os.getpid():
            self._loop, self._owner = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=self._loop.run_forever, name="groupwise-rewards", daemon=True).start()
        start = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)

        def wait() -> Outcome:
            try:
                left = None if seconds is None else max(0.0, start + seconds - time.monotonic())
                return Outcome(value=future.result(left), seconds=time.monotonic() - start)
            except TimeoutError as error:
                if future.done() and not future.cancelled():  # the function's own TimeoutError
                    return failed(error, start)
                future.cancel()
                took = time.monotonic() - start
                return Outcome(failure="timeout", message=f"no result within {seconds:g} s", seconds=took)
            except Exception as error:  # whatever a user's function raises is an outcome, judged in one place
                return failed(error, start)
            except BaseException:
                future.cancel()
                raise

        return wait

    def close(self) -> None:
        """End the thread."""
        if self._loop is not None and self._owner == os.getpid():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = None
