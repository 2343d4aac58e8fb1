"""Worker processes for code that may never return: each call has a deadline, at which its process
is killed.

Each worker runs under a supervisor (`process_main.py`) that this program reaches over two sockets.
The lifeline tells the supervisor of this program's end, and this program how the worker ended; over
the channel go requests and answers.  A supervisor is a fresh Python interpreter: it inherits no
thread, no GPU handle and no lock, can be used from any thread of the parent, needs no `if __name__
== "__main__"` in the user's script, and is ended by SIGKILL, together with everything that it
started.  (Objects of the running program have no name by which an interpreter could find them: for
these it is a fork of the program.  A fork of a worker has a supervisor of its own.)  The worker
calls functions on its main thread, where signals and `signal.alarm` work.  It ignores the
terminal's Ctrl-C, and it ends when its parent ends, however that happens.  Requests go to it as
pickles; answers come back as JSON, so that no answer can run code in the parent.  It is no sandbox:
its code has the user's rights, files and network.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any

from groupwise.utils.process_main import Function, fork, receive, send, supervise_fork
from groupwise.utils.secrets import TOKEN, environment_of_others

START_SECONDS = 600.0
"""Deadline for a start: imports of somebody else's file on a loaded machine with a cold disk."""
END_SECONDS = 10.0
"""How long a supervisor may take to end what it watches over."""
SEND_SECONDS = 60.0
"""How long a request may take to be sent."""
REPORT_BYTES = 16
"""More than a supervisor's report has: an exit code, or minus a signal."""
START = "from groupwise.utils.process_main import main; main()"
_connections: set[_Connection] = set()
"""All of this program: a fork of it must not keep processes alive by holding them too."""
_starting = threading.RLock()
"""While it is held, no fork of the parent inherits a worker's end of a connection."""


def _let_go() -> None:
    global _starting
    _starting = threading.RLock()
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_let_go)


class Traceback(Exception):
    """The place of an exception in a process: the cause of what the parent raises for it."""

    def __str__(self) -> str:
        return f"\n\nin a worker process:\n{self.args[0]}"


class NotStarted(Exception):
    """Raised where a process could not start, or did not end its start in time."""


LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN)


@contextlib.contextmanager
def _within_limits() -> Iterator[None]:
    """Raise NotStarted where the system allows no further process or open file."""
    try:
        yield
    except OSError as error:
        if error.errno not in LIMITS:
            raise
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise NotStarted(
            f"no further process can be started ({error.strerror}): raise the limits of open files"
            f" (`ulimit -n`, {files} now) and of processes (`ulimit -u`), or let fewer run at once"
        ) from error


class Died(Exception):
    """Raised where a process has ended by itself (a crash, no memory), or was killed by another
    thread.
    """

    def __init__(self, message: str, cpu: bool = False) -> None:
        """cpu: the processor time of a request was over."""
        super().__init__(message)
        self.cpu = cpu


class Raised(Exception):
    """Raised where the code in a process raised: `kind` is the exception's type, `where` file, line
    and source.

    The process continues.
    """

    def __init__(self, words: Mapping[str, str]) -> None:
        """words: of `process_main.described`."""
        self.kind, self.message, self.where = words["kind"], words["error"], words["where"]
        super().__init__(
            f"{self.kind}: {self.message}" + (f" ({self.where})" if self.where else "")
        )
        self.__cause__ = Traceback(words["trace"]) if words["trace"] else None


class _ForkOfProgram:
    """A child that is a fork of this program, held like a `subprocess.Popen`."""

    def __init__(self, run: Callable[[], Any]) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError, OSError):
                stream.flush()
        with warnings.catch_warnings():
            # That there are other threads: no fork of live objects can do without.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = fork(run)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        with contextlib.suppress(ChildProcessError):  # this program ignores SIGCHLD
            os.waitpid(self.pid, 0)


class _Connection:
    """This program's ends of the sockets to a supervisor and its worker."""

    def __init__(self, lifeline: socket.socket, channel: socket.socket) -> None:
        self.lifeline, self.channel = lifeline, channel
        self.child: subprocess.Popen[bytes] | _ForkOfProgram | None = None
        """The supervisor, unless a worker has forked it."""
        self.exit_code: int | None = None
        """How the worker ended; None as long as it runs, or where nobody could tell."""
        self._ended = False
        self._lock = threading.RLock()
        _connections.add(self)

    def end(self) -> None:
        """Kill the worker and what it started, and wait for their end; harmless if called again,
        and by any thread.
        """
        if self.lifeline.fileno() < 0:  # it was ended, or this is a fork of the program
            return
        with self._lock:
            if self._ended:
                return
            with contextlib.suppress(OSError):
                self.channel.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                self.lifeline.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                self.lifeline.settimeout(END_SECONDS)
                if report := self.lifeline.recv(REPORT_BYTES):
                    self.exit_code = int(report)
            if self.child is not None:
                self.child.kill()  # it has reported, or it hangs
                self.child.wait()
            self._ended = True

    def close(self) -> None:
        """Close the sockets, after `end`.

        Not while a thread waits there, or is about to: it would come to wait for whatever has the
        descriptor then.
        """
        _connections.discard(self)
        self.lifeline.close()
        self.channel.close()

    def release(self) -> None:
        """End the worker that nobody holds any more."""
        self.end()
        self.close()


@contextlib.contextmanager
def _connected() -> Iterator[tuple[_Connection, socket.socket, socket.socket]]:
    """Yield a connection for a worker that is about to start, and the worker's ends: lifeline and
    channel.
    """
    with _starting, _within_limits():
        lifeline, lifeline_there = socket.socketpair()
        channel, channel_there = socket.socketpair()
        connection = _Connection(lifeline, channel)
        with lifeline_there, channel_there:
            try:
                yield connection, lifeline_there, channel_there
            except BaseException:
                connection.close()
                raise


def _interpreter(
    lifeline: socket.socket,
    channel: socket.socket,
    target: str,
    options: Mapping[str, Any],
    folder: str | None,
    variables: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter as supervisor.  Its session is its own: Ctrl-C reaches the
    parent.
    """
    descriptors = (lifeline.fileno(), channel.fileno())
    output = subprocess.DEVNULL if options["quiet"] else 2
    search = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    # -P: the folder of this file must not come first on the path.
    command = [sys.executable, "-P", "-c", START]
    return subprocess.Popen(
        [*command, *map(str, descriptors), target, json.dumps(options)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment_of_others() | search | dict(variables),
        cwd=folder,
        start_new_session=True,
    )


class WorkerProcess:
    """The parent's end of one worker process.  Its start continues beside the parent's own work
    until it is first asked.

    One thread at a time may ask; any may `fork` and `kill`.   Whatever asks raises NotStarted,
    TimeoutError at its deadline (the process is then killed), Died, or Raised.
    """

    def __init__(
        self,
        target: str | Callable[..., Function],
        *setup: Any,
        memory: int | None = None,
        cpu_seconds: float | None = None,
        quiet: bool = False,
        folder: str | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`target`: `module:factory` for a fresh process, or a factory of this process for a fork
        of it.  The process calls it with `setup` once; what it returns answers requests.  `memory`:
        bytes that its address space may grow by after the set-up (RLIMIT_AS).  `cpu_seconds`: of
        one answer, a second deadline, in processor time, which a loaded machine does not shorten.
        `quiet`: what it prints is dropped; else it goes to the parent's standard error, as far as
        there is not too much of it. `folder`: its working directory.  `variables`: of a fresh
        process's environment, beside the parent's.
        """
        options = {"cpu_seconds": cpu_seconds, "memory": memory, "quiet": quiet}
        payload = pickle.dumps(setup)
        with _connected() as (connection, lifeline, channel):
            if isinstance(target, str):
                connection.child = _interpreter(
                    lifeline, channel, target, options, folder, variables
                )
            else:
                run = partial(supervise_fork, lifeline, channel, target, options, folder, TOKEN)
                connection.child = _ForkOfProgram(run)
        self._begun: float | None = time.monotonic()
        self._hold(connection)
        with contextlib.suppress(OSError):  # whoever asks it hears of it
            send(connection.channel, payload, self._begun + START_SECONDS)

    def _hold(self, connection: _Connection) -> None:
        self._connection = connection
        self._asking = threading.RLock()
        weakref.finalize(self, connection.release)

    def ready(self) -> None:
        """Wait for the end of its start.  Raises NotStarted."""
        if self._begun is not None:
            deadline, self._begun = self._begun + START_SECONDS, None
            try:
                self.receive(deadline)
            except (Died, Raised) as error:
                self.kill()
                why = error.message if isinstance(error, Raised) else str(error)
                raise NotStarted(why) from error.__cause__
            except TimeoutError:
                raise NotStarted(f"it did not start within {START_SECONDS:g} s") from None

    def fork(self) -> WorkerProcess:
        """Return a copy of the process as it is now, which is killed alone; it ends with this
        one.
        """
        self.ready()
        copy = object.__new__(WorkerProcess)
        copy._begun = None
        # In this order: who waits for an answer holds up no other start.
        with self._asking, _connected() as (connection, lifeline, channel), self._watched():
            deadline = time.monotonic() + SEND_SECONDS
            send(self._connection.channel, b"", deadline, [lifeline, channel])
        copy._hold(connection)
        return copy

    def call(self, *request: Any, seconds: float) -> Any:
        """Return the answer to a request."""
        return next(self.ask(*request, seconds=seconds))

    def ask(self, *request: Any, seconds: float, answers: int = 1) -> Generator[Any, None, None]:
        """Yield the answers to one request, each within `seconds` of the one before.  Closed before
        the last, it kills the process.
        """
        left = answers
        try:
            self.request(*request)
            while left:
                answer = self.receive(time.monotonic() + seconds)
                left -= 1
                yield answer
        except Raised:  # no answer follows
            raise
        except BaseException:
            # An interrupt, say: what is left must not become an answer to the next request.
            if left:
                self.kill()
            raise

    def request(self, *arguments: Any) -> None:
        """Send it a request."""
        payload = pickle.dumps(arguments)
        self.ready()
        with self._watched():
            send(self._connection.channel, payload, time.monotonic() + SEND_SECONDS)

    def receive(self, deadline: float) -> Any:
        """Return the next answer."""
        with self._watched():
            reply = json.loads(receive(self._connection.channel, deadline)[0])
            if "error" not in reply:
                return reply["value"]
        raise Raised(reply)

    def kill(self) -> None:
        """SIGKILL the process and what it started, and wait for their end; harmless if called
        again, and by any thread.
        """
        self._connection.end()
        # Else whoever waits there has woken, and does the same.
        if self._asking.acquire(blocking=False):
            self._connection.close()
            self._asking.release()

    def alive(self) -> bool:
        """False once its end of the socket is closed, which is how every death shows."""
        try:
            channel = self._connection.channel
            look = select.poll()
            look.register(channel, select.POLLIN)
            return not look.poll(0) or channel.recv(1, socket.MSG_PEEK) != b""
        except (OSError, ValueError):
            return False

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        with self._asking:
            try:
                yield
            except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
                self.kill()
                if isinstance(error, TimeoutError):
                    raise error from None
                raise self._died() from None
            except BaseException:  # Ctrl-C in the parent: the process is in the middle of a call
                self.kill()
                raise

    def _died(self) -> Died:
        exit_code = self._connection.exit_code
        if exit_code is None:  # its supervisor was killed, or another thread is ending it
            return Died("its process has ended")
        if exit_code == -signal.SIGPROF:  # the worker's own timer
            return Died("no result within the processor time allowed", cpu=True)
        if exit_code < 0:
            return Died(f"worker died (signal {-exit_code})")
        return Died(f"worker died (exit code {exit_code})")


class Pool:
    """At most `size` processes that answer the same requests, each under a deadline of its own.

    They start when first needed, and are replaced when they die: imports and warm-up are not
    counted in a deadline.

    >>> with Pool("operator:attrgetter", "real", size=1, seconds=5.0) as pool:
    ...     pool.map([(3,), (True,)])
    [3, 1]
    """

    starting = 0.0
    """Seconds in which calls of any pool have waited for a process to start; they are no part of a
    call's own time.
    """
    _counted = 0.0
    """Until when: what several threads wait at the same time counts once."""

    def __init__(
        self,
        target: str,
        *setup: Any,
        size: int,
        seconds: float,
        max_calls: int | None = None,
        **options: Any,
    ) -> None:
        """`seconds`: wall-clock deadline of a call.  `max_calls`: a process retires after so many.
        options: `WorkerProcess`'s.
        """
        self.size, self.seconds, self.max_calls = size, seconds, max_calls
        self._make = partial(WorkerProcess, target, *setup, **options)
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._idle: list[tuple[WorkerProcess, int]] = []
        self._busy = set[WorkerProcess]()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self.size)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, *arguments: Any) -> Any:
        """What the function returns, within the deadline (plus, at times, a start).

        Raises NotStarted, TimeoutError, Died, Raised.
        """
        if self._owner != os.getpid():
            self._reset()  # a fork of the parent must not talk to the parent's processes
        with self._slots:
            with self._lock:
                process, calls = self._idle.pop() if self._idle else (None, 0)
            if process is None or not process.alive():
                process, calls = self._make(), 0
            self._busy.add(process)
            try:
                self._wait_for(process)
                process.request(*arguments)
                return process.receive(time.monotonic() + self.seconds)
            except Raised as error:
                if error.kind == "MemoryError":  # it may be left with a heap full of holes
                    process.kill()
                raise
            except BaseException:
                # An interrupt, say: its answer to this call must not become that to the next.
                process.kill()
                raise
            finally:
                self._busy.discard(process)
                if process.alive() and (self.max_calls is None or calls + 1 < self.max_calls):
                    with self._lock:
                        self._idle.append((process, calls + 1))
                else:
                    process.kill()

    @staticmethod
    def _wait_for(process: WorkerProcess) -> None:
        began = time.monotonic()
        try:
            process.ready()
        finally:
            ended = time.monotonic()
            Pool.starting += max(0.0, ended - max(began, Pool._counted))
            Pool._counted = max(ended, Pool._counted)

    def map(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What the function returns for many calls, on all processes; in the place of a value, what
        `call` raised.
        """
        threads = ThreadPoolExecutor(max_workers=max(1, min(self.size, len(calls))))
        try:
            return list(threads.map(self._outcome, calls))
        except BaseException:  # Ctrl-C: what waits is not begun, what runs is ended
            threads.shutdown(wait=False, cancel_futures=True)
            self.close()
            raise
        finally:
            threads.shutdown()

    def _outcome(self, call: tuple[Any, ...]) -> Any:
        try:
            return self.call(*call)
        except (TimeoutError, Died, Raised) as error:
            return error

    def close(self) -> None:
        """Kill the processes; a call that another thread waits for has died.  The pool may be used
        again.
        """
        if self._owner == os.getpid():
            with self._lock:
                idle, self._idle = self._idle, []
            for process in [*self._busy, *(process for process, _ in idle)]:
                process.kill()
