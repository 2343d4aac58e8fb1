"""Worker processes for code that may never return: each call has a deadline, at which its process is killed.

A worker is a process that is spoken to over a socket: a fresh Python process, which inherits no thread, no GPU handle and no lock,
or, for a function of the running program, a fork of it (`find.LiveReward`).  It can be used from any thread of the parent, needs no
`if __name__ == "__main__"` in the user's script, and is ended by SIGKILL, together with everything that it started.  It calls
functions on its main thread, where signals and `signal.alarm` work.  It ignores the terminal's Ctrl-C, and it ends when its parent
ends, however that happens (`worker_process.py`).  Requests go to the worker as pickles; answers come back as JSON, so that no
answer can run code in the parent.  It is no sandbox: its code has the user's rights, files and network.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from groupwise.errors import RewardError
from groupwise.rewards.worker_process import Function, message_of, raised_at, receive, send, supervise
from groupwise.utils.secrets import TOKEN, environment_of_others

START_SECONDS = 600.0
"""Deadline for a worker's start: imports of somebody else's file on a loaded machine with a cold disk."""
END_SECONDS = 10.0
"""How long a supervisor may take to end what it watches over."""
START = "from groupwise.rewards.worker_process import main; main()"
_ends: set[socket.socket] = set()
"""The parent's ends of all connections: a fork of the parent must not keep workers alive by holding them too."""
_starting = threading.RLock()


def _let_go() -> None:
    global _starting
    _starting = threading.RLock()
    for end in list(_ends):
        end.close()
    _ends.clear()


os.register_at_fork(after_in_child=_let_go)


class Traceback(Exception):
    """Where an exception was raised in a worker: the cause of what is raised for it in the parent."""

    def __str__(self) -> str:
        return f"\n\nin a worker process:\n{self.args[0]}"


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
    """For `error`: the exception itself, of a worker its traceback."""
    label: str = ""
    """The completion on which it failed, where that is known."""
    late: tuple[int, ...] = ()
    """Of a value with an entry per row: the rows whose own deadline passed; their entry is empty."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What a reward function logged: see `trainer_state.Notes.told`."""
    seconds: float = 0.0


class WorkerGone(Exception):
    """Raised where a worker has ended, by itself or at a deadline; `outcome` says how."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


class Worker:
    """The parent's end of one worker process.  Its start continues beside the parent's own work until `ready` is asked for."""

    def __init__(
        self,
        target: str | Callable[..., Function],
        setup: tuple[Any, ...] = (),
        *,
        memory: int | None = None,
        cpu_seconds: float | None = None,
        quiet: bool = False,
        folder: str | None = None,
    ) -> None:
        """`target`: `module:factory` for a fresh process, or a factory of this process for a fork of it.  The worker calls it with
        `setup` once; what it returns is what answers requests.  `folder`: its working directory.  The rest as of `Pool`.
        """
        self.name = target if isinstance(target, str) else "a function of this process"
        self.calls, self._ready = 0, False
        options = {"cpu_seconds": cpu_seconds, "memory": memory}
        payload = pickle.dumps(setup)
        with _starting:  # no other start may inherit the child's ends
            self._lifeline, lifeline = socket.socketpair()
            self._channel, channel = socket.socketpair()
            _ends.update((self._lifeline, self._channel))
            with lifeline, channel:
                if isinstance(target, str):
                    self._process: Any = _spawn(lifeline, channel, target, options, quiet, folder)
                else:
                    self._process = _Forked(lambda: supervise(lifeline, channel, target, options), folder)
        self._end = weakref.finalize(self, _terminate, os.getpid(), self._process, self._lifeline, self._channel)
        self.begun = time.monotonic()
        with contextlib.suppress(OSError):  # who asks whether it is ready is told
            send(self._channel, payload, self.begun + START_SECONDS)

    def ready(self) -> None:
        """Wait for the end of its start.  Raises RewardError if it failed."""
        if self._ready:
            return
        try:
            self.receive(self.begun + START_SECONDS)
        except WorkerGone as gone:
            raise RewardError(f"the worker process of {self.name} could not start: {gone.outcome.message}") from None
        except Failed as failed:
            self.kill()
            raise RewardError(
                f"the worker process of {self.name} could not start: {failed.outcome.message}"
            ) from failed.outcome.cause
        self._ready = True

    def fileno(self) -> int:
        """For `select`: readable when an answer has come or it has ended."""
        return self._channel.fileno()

    def alive(self) -> bool:
        """False once its end of the socket is closed, which is how every death shows, without reaping it yet."""
        try:
            self._channel.settimeout(0.0)
            return self._channel.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def request(self, payload: bytes, deadline: float) -> None:
        """Send a pickle of the arguments.  Raises WorkerGone."""
        self.calls += 1
        with self._watched(deadline):
            send(self._channel, payload, deadline)

    def receive(self, deadline: float) -> Any:
        """The next value that it answers with.  Raises Failed if the function raised, WorkerGone if it is no more."""
        with self._watched(deadline):
            reply = json.loads(receive(self._channel, deadline))
            if reply["request"] != self.calls:
                raise ValueError(f"an answer to request {reply['request']} after request {self.calls}")
            if "error" not in reply:
                return reply["value"]
            cause = Traceback(reply["trace"]) if reply["trace"] else None
            said = Outcome(failure="error", message=reply["error"], kind=reply["kind"], where=reply["where"], cause=cause)
        raise Failed(said)

    @contextlib.contextmanager
    def _watched(self, deadline: float) -> Any:
        try:
            yield
        except TimeoutError:
            self.kill()
            raise WorkerGone(Outcome(failure="timeout")) from None  # who set the deadline says it
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            raise WorkerGone(self._exit_outcome()) from None
        except BaseException:  # Ctrl-C in the parent: the worker is in the middle of a call
            self.kill()
            raise

    def _exit_outcome(self) -> Outcome:
        self.kill()
        code = self._process.returncode
        if code == -signal.SIGPROF:  # the worker's own timer
            return Outcome(failure="timeout", message="no result within the processor time allowed")
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Outcome(failure="died", message=f"worker died ({how})")

    def kill(self) -> None:
        """SIGKILL the worker and what it started, and reap it: no zombie stays.  So it is too when nobody holds it any more."""
        self._end()

    def end(self) -> None:
        """Tell its supervisor to SIGKILL it, without clearing anything away."""
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_RDWR)


def _terminate(owner: int, process: Any, lifeline: socket.socket, channel: socket.socket) -> None:
    if owner != os.getpid():
        return
    with contextlib.suppress(OSError):
        lifeline.shutdown(socket.SHUT_RDWR)
    for end in (lifeline, channel):
        _ends.discard(end)
        end.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Failed(Exception):
    """Raised where a worker's function raised; `outcome` says what.  The worker itself continues."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def _spawn(
    lifeline: socket.socket, channel: socket.socket, target: str, options: dict[str, Any], quiet: bool, folder: str | None
) -> subprocess.Popen:
    environment = environment_of_others() | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    out = subprocess.DEVNULL if quiet else 2
    descriptors = (lifeline.fileno(), channel.fileno())
    # -P: the folder of this file must not come first on the path.  A session of its own: Ctrl-C reaches the parent only.
    return subprocess.Popen(
        [sys.executable, "-P", "-c", START, *map(str, descriptors), target, json.dumps(options)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )


class _Forked:
    """A fork of this process, handled like a `subprocess.Popen`."""

    def __init__(self, work: Callable[[], Any], folder: str | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError, OSError):
                stream.flush()
        self.returncode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are other threads: see `LiveReward`
            self.pid = os.fork()
        if self.pid == 0:
            try:
                self._prepare_child(folder)
                work()
            finally:
                os._exit(70)

    @staticmethod
    def _prepare_child(folder: str | None) -> None:
        os.setsid()
        os.environ.pop(TOKEN, None)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        if folder is not None:
            os.chdir(folder)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # the pool of threads did not come along

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            else:
                time.sleep(0.001)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Starts:
    """Wall-clock seconds that calls have waited for workers of pools to start; they are no part of a call's own time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting, self._since, self._seconds = 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Of this process so far."""
        return self._seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While a call waits; what several threads wait at the same time counts once."""
        with self._lock:
            self._since = self._since if self._waiting else time.monotonic()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                self._seconds += 0.0 if self._waiting else time.monotonic() - self._since


STARTS = Starts()


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
        self.max_calls = max_calls
        self._options: dict[str, Any] = {"cpu_seconds": cpu_seconds, "memory": memory, "quiet": quiet}
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._idle: list[Worker] = []
        self._busy = set[Worker]()
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
        payload = pickle.dumps(arguments)  # raises in the caller's face if an argument cannot travel
        with self._slots:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is not None and not worker.alive():
                worker.kill()
                worker = None
            if worker is None:
                worker = Worker(self.target, self.setup, **self._options)
            self._busy.add(worker)
            try:
                with STARTS.waiting():
                    worker.ready()
                outcome, usable = self._call(worker, payload)
            finally:
                self._busy.discard(worker)
            if usable and (self.max_calls is None or worker.calls < self.max_calls):
                with self._lock:
                    self._idle.append(worker)
            else:
                worker.kill()
            return outcome

    def _call(self, worker: Worker, payload: bytes) -> tuple[Outcome, bool]:
        """The outcome, and whether the worker can be used again."""
        start = time.monotonic()
        try:
            worker.request(payload, start + self.seconds)
            value = worker.receive(start + self.seconds)
            return Outcome(value=value, seconds=time.monotonic() - start), True
        except Failed as failed:
            # A worker that ran out of memory may be left with a heap full of holes.
            return timed(failed.outcome, start), failed.outcome.kind != "MemoryError"
        except WorkerGone as gone:
            outcome = timed(gone.outcome, start)
            if outcome.failure == "timeout" and not outcome.message:
                outcome = replace(outcome, message=f"no result within {self.seconds:g} s")
            return outcome, False

    def map(self, calls: Sequence[tuple[Any, ...]]) -> list[Outcome]:
        """Many calls on all workers; outcomes in the order of the calls."""
        if len(calls) <= 1 or self.size == 1:
            return [self.run(*call) for call in calls]
        threads = ThreadPoolExecutor(max_workers=min(self.size, len(calls)))
        try:
            return list(threads.map(lambda call: self.run(*call), calls))
        except BaseException:  # Ctrl-C: what waits is not begun, what runs is ended
            threads.shutdown(wait=False, cancel_futures=True)
            self.close()
            raise
        finally:
            threads.shutdown()

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


def timed(outcome: Outcome, start: float) -> Outcome:
    """The outcome of a call that began at `start` (time.monotonic) and has just ended."""
    return replace(outcome, seconds=time.monotonic() - start)


def failed(error: BaseException, start: float) -> Outcome:
    """The outcome of a call in this process, begun at `start` (time.monotonic), that raised."""
    return Outcome(
        failure="error",
        message=message_of(error),
        kind=type(error).__name__,
        where=raised_at(error),
        cause=error,
        seconds=time.monotonic() - start,
    )
