"""The code of a worker process: a worker that serves calls on its main thread, and a supervisor above it that ends it.

The supervisor runs no user code.  It waits until the worker ends or the parent closes the lifeline (which every death of the parent
does), then kills the worker and all its descendants, also those in sessions of their own, and exits with the worker's status.  Only
Linux can adopt orphans; elsewhere the worker's process group is killed.

This file imports little: it is what every worker starts with.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

LONGEST_ANSWER = 1 << 28
"""Bytes; a worker that announces more is taken for broken."""
LINUX = sys.platform.startswith("linux")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FOR_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that launchers, schedulers and terminals send to every process of a run."""
Function = Callable[..., Any]
channel_of_this: socket.socket | None = None
"""The worker's end of its connection: a process that it forks lets go of it."""


def _let_go() -> None:
    """A child that returns from somebody's function, where it should have ended, must not answer in its parent's place."""
    if channel_of_this is not None:
        channel_of_this.close()


os.register_at_fork(after_in_child=_let_go)


def main() -> NoReturn:
    """Entry of a spawned process: `lifeline channel target options` on its command line."""
    lifeline, channel = socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))
    module, _, name = sys.argv[3].partition(":")

    def build(*setup: Any) -> Function:
        return getattr(importlib.import_module(module), name)(*setup)

    supervise(lifeline, channel, build, json.loads(sys.argv[4]))


def supervise(
    lifeline: socket.socket, channel: socket.socket, build: Callable[..., Function], options: Mapping[str, Any]
) -> NoReturn:
    """Fork the worker, wait for its end or the parent's, kill what is left, and end as the worker did."""
    adopts = LINUX and _prctl(PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    for number in (*FOR_ALL, signal.SIGCHLD):  # the parent decides
        signal.signal(number, _nothing)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    above = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        os.close(reader)
        os.close(writer)
        lifeline.close()
        _be_a_worker(above)
        serve(channel, build, options)
    channel.close()
    waiting = select.poll()
    waiting.register(lifeline, select.POLLIN)
    waiting.register(reader, select.POLLIN)
    status: int | None = None
    while status is None:
        ready = {descriptor for descriptor, _ in waiting.poll()}
        if reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 4096)
        status = _reap().get(worker)
        if lifeline.fileno() in ready:  # nothing is ever sent: this is its end
            break
    if not adopts:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
    left = _end_all(worker) if adopts or status is None else None
    found = next((one for one in (status, left) if one is not None), int(signal.SIGKILL))
    code = os.waitstatus_to_exitcode(found)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler to take away
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _nothing(*_: object) -> None:
    """A handler, and not SIG_IGN, which programs that the worker starts would inherit."""


def _prctl(option: int, value: int) -> bool:
    try:
        return ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def end_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, however that happens (Linux; elsewhere nothing).   parent: its process id."""
    if LINUX:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before this could be asked for
            os._exit(1)


def _be_a_worker(above: int) -> None:
    end_with_parent(above)  # should the supervisor be killed
    if not LINUX:
        os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in FOR_ALL:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        os.register_at_fork(after_in_child=lambda number=number, usual=usual: signal.signal(number, usual))


def _reap() -> dict[int, int]:
    """Exit statuses of the children that have ended."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                break
            ended[child] = status
    return ended


def _end_all(worker: int) -> int | None:
    """SIGKILL all descendants until none is left (those whose parent ends become children of this process); the worker's status."""
    status, give_up = None, time.monotonic() + 10.0
    while time.monotonic() < give_up:
        try:
            while True:
                child, how = os.waitpid(-1, os.WNOHANG)
                if child == 0:
                    break
                status = how if child == worker else status
        except ChildProcessError:
            return status
        for process in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.001)
    return status


def _descendants(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if LINUX else ():
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as stat:
                children.setdefault(int(stat.read().rsplit(b")", 1)[1].split()[1]), []).append(int(name))
    found = list(children.get(root, ()))
    for process in found:
        found += children.get(process, ())
    yield from found


# ------------------------------------------------------------------------------------------------------------- serving


def serve(channel: socket.socket, build: Callable[..., Function], options: Mapping[str, Any]) -> NoReturn:
    """Limits, set-up, then one request after the other until the parent closes the channel.

    The first request is what the function is built from.  A function that returns an iterator answers a request with one message
    for each of its values, any other with one.  Messages carry the number of their request, from 0.
    """
    import resource

    global channel_of_this
    channel_of_this = channel
    if options.get("memory") is not None:
        resource.setrlimit(resource.RLIMIT_AS, (options["memory"], options["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what is printed before a kill is seen
    function: Function | None = None
    number = -1
    while True:
        number += 1
        try:
            request = receive(channel, None)
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone; skip the clean-up of whatever the function left behind
        try:
            arguments = pickle.loads(request)
            if function is None:
                function = build(*arguments)
                answers: Iterator[Any] = iter((None,))
            else:
                with _within(options.get("cpu_seconds")):
                    answer = function(*arguments)
                answers = answer if inspect.isgenerator(answer) else iter((answer,))
            for value in answers:
                _answer(channel, {"request": number, "value": value})
        except BaseException as error:  # whatever it is (SystemExit, KeyboardInterrupt), it is this call's outcome
            _answer(channel, {"request": number, **told(error)})


def _answer(channel: socket.socket, message: Mapping[str, Any]) -> None:
    payload = json.dumps(message).encode()
    try:
        send(channel, payload, None)
    except OSError:
        os._exit(0)  # nobody listens any more


@contextlib.contextmanager
def _within(seconds: float | None) -> Iterator[None]:
    """Let the kernel end this process after so much processor time.  No handler: the default action needs no interpreter."""
    if seconds is None:  # the function's own signals and timers are left alone
        yield
        return
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF,))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def told(error: BaseException) -> dict[str, str]:
    """An exception in words: message, type, place, traceback."""
    trace = "".join(traceback.format_exception(error, limit=-50)) if error.__traceback__ is not None else ""
    return {"error": message_of(error), "kind": type(error).__name__, "where": raised_at(error), "trace": trace[-20_000:]}


def message_of(error: BaseException) -> str:
    """Its message; empty for one of somebody else whose message cannot be made."""
    try:
        return str(error)
    except Exception:  # its __str__ is somebody else's code
        return ""


def raised_at(error: BaseException) -> str:
    """File, line and source of where it was raised; empty where that is not known."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{frames[0].filename}, line {frames[0].lineno}: {frames[0].line}" if frames else ""


# ------------------------------------------------------------------------------------------------------------ messages


def send(channel: socket.socket, payload: bytes, deadline: float | None) -> None:
    """One message; `deadline` is a time of `time.monotonic`.  Raises TimeoutError, OSError."""
    channel.settimeout(_left(deadline))
    channel.sendall(struct.pack("!Q", len(payload)) + payload)


def receive(channel: socket.socket, deadline: float | None) -> bytes:
    """The next message.  Raises TimeoutError, OSError, EOFError at the end, ValueError for one that cannot be."""
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
