"""Worker processes for code that may never return: each call has a deadline, at which its process
is killed.

A process is a fresh Python interpreter that is spoken to over a socket: it inherits no thread, no
GPU handle and no lock, can be used from any thread of the parent, needs no `if __name__ ==
"__main__"` in the user's script, and is ended by SIGKILL, together with everything that it started.
(Objects of the running program have no name by which an interpreter could find them: for these a
process is a fork of the program.)  It calls functions on its main thread, where signals and
`signal.alarm` work.  It ignores the terminal's Ctrl-C, and it ends when its parent ends, however
that happens (`process_main.py`).  Requests go to it as pickles; answers come back as JSON, so that
no answer can run code in the parent.  It is no sandbox: its code has the user's rights, files and
network.
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
from types import MappingProxyType
from typing import Any

from groupwise.utils.process_main import Function, receive, send, supervise_worker
from groupwise.utils.secrets import TOKEN, environment_of_others

START_SECONDS = 600.0
"""Deadline for a start: imports of somebody else's file on a loaded machine with a cold disk."""
END_SECONDS = 10.0
"""How long a supervisor may take to end what it watches over."""
SEND_SECONDS = 60.0
"""How long a request may take to be sent."""
START = "from groupwise.utils.process_main import main; main()"
_ends: set[socket.socket] = set()
"""The parent's ends of all connections: a fork of the parent must not keep processes alive by
holding them too.
"""
_starting = threading.RLock()
"""While it is held, no fork of the parent inherits a child's end."""


def _let_go() -> None:
    global _starting
    _starting = threading.RLock()
    for end in list(_ends):
        end.close()
    _ends.clear()


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
        with _starting, _within_limits():
            (self._lifeline, lifeline), (self._channel, channel) = (
                socket.socketpair(),
                socket.socketpair(),
            )
            _ends.update((self._lifeline, self._channel))
            with lifeline, channel, contextlib.ExitStack() as failed:
                failed.callback(_close, self._lifeline, self._channel)
                if isinstance(target, str):
                    descriptors, out = (
                        (lifeline.fileno(), channel.fileno()),
                        (subprocess.DEVNULL if quiet else 2),
                    )
                    search = {
                        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)
                    }
                    # -P: the folder of this file must not come first on the path.  A session of its
                    # own: Ctrl-C reaches the parent.
                    process: Any = subprocess.Popen(
                        [
                            sys.executable,
                            "-P",
                            "-c",
                            START,
                            *map(str, descriptors),
                            target,
                            json.dumps(options),
                        ],
                        pass_fds=descriptors,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        env=environment_of_others() | search | dict(variables),
                        cwd=folder,
                        start_new_session=True,
                    )
                else:
                    process = _Forked(
                        lambda: supervise_worker(lifeline, channel, target, options), folder
                    )
                failed.pop_all()
        self._process: Any = process
        self._asking = threading.RLock()
        weakref.finalize(self, _end, os.getpid(), process, self._lifeline, self._channel)
        self._begun: float | None = time.monotonic()
        with contextlib.suppress(OSError):  # whoever asks it hears of it
            send(self._channel, payload, self._begun + START_SECONDS)

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
        """A copy of the process as it is now, which is killed alone; it ends with this one."""
        self.ready()
        fork = object.__new__(WorkerProcess)
        with (
            self._asking,
            _starting,  # in this order: who waits for an answer holds up no other start
            _within_limits(),
        ):
            (fork._lifeline, lifeline), (fork._channel, channel) = (
                socket.socketpair(),
                socket.socketpair(),
            )
            _ends.update((fork._lifeline, fork._channel))
            weakref.finalize(fork, _end, os.getpid(), None, fork._lifeline, fork._channel)
            with lifeline, channel, self._watched():
                send(self._channel, b"", time.monotonic() + SEND_SECONDS, [lifeline, channel])
        fork._process, fork._begun, fork._asking = None, None, threading.RLock()
        return fork

    def call(self, *request: Any, seconds: float) -> Any:
        """What it answers."""
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
        except (
            BaseException
        ):  # an interrupt, say: what is left must not become an answer to the next request
            if left:
                self.kill()
            raise

    def request(self, *arguments: Any) -> None:
        """Send it a request."""
        payload = pickle.dumps(
            arguments
        )  # raises in the caller's face if an argument cannot travel
        self.ready()
        with self._watched():
            send(self._channel, payload, time.monotonic() + SEND_SECONDS)

    def receive(self, deadline: float) -> Any:
        """Return the next answer."""
        with self._watched():
            reply = json.loads(receive(self._channel, deadline)[0])
            if "error" not in reply:
                return reply["value"]
        raise Raised(reply)

    def kill(self) -> None:
        """SIGKILL the process and what it started, and wait for their end; harmless if called
        again, and by any thread.
        """
        _terminate(self._process, self._lifeline, self._channel)
        if self._asking.acquire(
            blocking=False
        ):  # else whoever waits there has woken, and does the same
            _close(self._lifeline, self._channel)
            self._asking.release()

    def alive(self) -> bool:
        """False once its end of the socket is closed, which is how every death shows."""
        try:
            look = select.poll()
            look.register(self._channel, select.POLLIN)
            return not look.poll(0) or self._channel.recv(1, socket.MSG_PEEK) != b""
        except (OSError, ValueError):
            return False

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        with self._asking:
            try:
                yield
            except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
                self.kill()
                raise error if isinstance(error, TimeoutError) else self._died() from None
            except BaseException:  # Ctrl-C in the parent: the process is in the middle of a call
                self.kill()
                raise

    def _died(self) -> Died:
        code = None if self._process is None else self._process.returncode
        if (
            code is None
        ):  # a fork, whose status nobody hears of, or one that another thread is ending
            return Died("its process has ended")
        if code == -signal.SIGPROF:  # the worker's own timer
            return Died("no result within the processor time allowed", cpu=True)
        return Died(
            f"worker died (signal {-code})" if code < 0 else f"worker died (exit code {code})"
        )


def _terminate(process: Any, lifeline: socket.socket, channel: socket.socket) -> None:
    for end in (lifeline, channel):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    if (
        process is None or lifeline.fileno() < 0
    ):  # closed: it has ended, or this is a fork of the parent
        return
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _close(*ends: socket.socket) -> None:
    """Not while a thread waits there, or is about to: it would come to wait for whatever has the
    descriptor then.
    """
    for end in ends:
        _ends.discard(end)
        end.close()


def _end(owner: int, process: Any, lifeline: socket.socket, channel: socket.socket) -> None:
    """Nobody holds it any more."""
    if owner == os.getpid():
        _terminate(process, lifeline, channel)
        _close(lifeline, channel)


class _Forked:
    """A fork of this process, handled like a `subprocess.Popen`."""

    def __init__(self, work: Callable[[], Any], folder: str | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError, OSError):
                stream.flush()
        self.returncode: int | None = None
        self._waiting = threading.Lock()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # that there are other threads: see `LiveReward`
            self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.environ.pop(TOKEN, None)
                with open(os.devnull, "rb") as nothing:
                    os.dup2(nothing.fileno(), 0)
                os.dup2(2, 1)
                sys.stdout = sys.stderr = os.fdopen(
                    2, "w", buffering=1, errors="backslashreplace", closefd=False
                )
                os.chdir(folder or ".")
                if (torch := sys.modules.get("torch")) is not None:
                    torch.set_num_threads(1)  # the pool of threads did not come along
                work()
            finally:
                os._exit(70)

    def wait(self, timeout: float = float("inf")) -> None:
        deadline = time.monotonic() + timeout
        while True:
            with self._waiting:
                if self.returncode is None:
                    try:
                        pid, status = os.waitpid(self.pid, os.WNOHANG)
                    except (
                        ChildProcessError
                    ):  # this program ignores SIGCHLD: nobody hears how it ended
                        pid, status = self.pid, 0
                    self.returncode = os.waitstatus_to_exitcode(status) if pid else None
                if self.returncode is not None:
                    return
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout)
            time.sleep(0.001)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


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
        self._make = lambda: WorkerProcess(target, *setup, **options)
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
            except (
                BaseException
            ):  # an interrupt, say: its answer to this call must not become that to the next
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
