"""What runs in a worker process (`processes.py`): a worker that answers requests on its main
thread, under a supervisor.

The supervisor runs no user code.  It waits until the worker ends or the parent closes the lifeline
(which every death of the parent does), then kills the worker and all its descendants, also those in
sessions of their own, and reports over the lifeline how the worker ended.  Only Linux can adopt
orphans; elsewhere the worker's process group is killed.  A fork of a worker has a supervisor of its
own.

What workers print goes through the supervisor to standard error, control characters as escapes.

This file imports little: it is what every worker starts with.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
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
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

LONGEST_ANSWER = 1 << 28
"""Bytes; a worker that announces more is taken for broken."""
LONGEST_MESSAGE = 10_000
"""Characters of an exception's message."""
NOTICED = 1000
"""Milliseconds within which a supervisor notices the end of a worker that nobody waits for; the
parent sees it at once.
"""
SENT_TO_ALL = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGXCPU,
)
"""Signals that launchers, schedulers and terminals send to every process of a run: the parent
decides what becomes of the run (`runs.interrupts`).
"""
LINUX = sys.platform.startswith("linux")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
Function = Callable[..., Any]
channel_of_this: socket.socket | None = None
"""The worker's end of its connection: a process that it forks lets go of it."""


def _let_go() -> None:
    """A child that returns from somebody's function, where it should have ended, must not answer in
    its parent's place.
    """
    if channel_of_this is not None:
        channel_of_this.close()


os.register_at_fork(after_in_child=_let_go)


def main() -> NoReturn:
    """Supervise a worker in a fresh interpreter, whose command line ends with `lifeline channel
    target options`.
    """
    lifeline, channel = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    module, _, name = sys.argv[3].partition(":")

    def build(*setup: Any) -> Function:
        return getattr(importlib.import_module(module), name)(*setup)

    supervise_worker(lifeline, channel, build, json.loads(sys.argv[4]))


def supervise_fork(
    lifeline: socket.socket,
    channel: socket.socket,
    build: Callable[..., Function],
    options: Mapping[str, Any],
    folder: str | None,
    without: str,
) -> NoReturn:
    """Supervise a worker in a fork of the program, which has the surroundings of a fresh
    interpreter.

    without: environment variable that it must not have.
    """
    os.setsid()
    os.environ.pop(without, None)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    if options["quiet"]:
        os.dup2(nothing, 2)
    os.dup2(2, 1)
    os.close(nothing)
    sys.stdout = sys.stderr = os.fdopen(
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    os.chdir(folder or ".")
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # the pool of threads did not come along
    supervise_worker(lifeline, channel, build, options)


def supervise_worker(
    lifeline: socket.socket,
    channel: socket.socket,
    build: Callable[..., Function],
    options: Mapping[str, Any],
) -> NoReturn:
    """A worker that calls `build` with the first request; what that returns answers the others.
    options: see `WorkerProcess`.
    """
    output = None if options["quiet"] else Output(2)
    supervise(lifeline, channel, partial(serve, channel, build, options), output)


def fork(run: Callable[[], Any]) -> int:
    """Fork this process: the copy runs this, and ends.  Return the copy's process id."""
    process = os.fork()
    if process == 0:
        try:
            # No collection in the copy takes apart what came along: a destructor may wait for a
            # thread that did not (a process group of gloo's does), and pages would be copied.
            gc.freeze()
            run()
        except BaseException:  # whatever it is, it ends the copy: nobody else would print it
            traceback.print_exc()
        finally:
            os._exit(70)
    return process


def supervise(
    lifeline: socket.socket,
    channel: socket.socket,
    work: Callable[[], NoReturn],
    output: Output | None = None,
) -> NoReturn:
    """Fork a process that works, wait for its end or the parent's, kill what is left, and report
    how it ended.

    channel: the worker's alone.   output: takes what it prints.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in SENT_TO_ALL:
        signal.signal(number, _nothing)
    # Who has inherited that it is ignored hears of no child's end.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker = fork(partial(_be_a_worker, os.getpid(), lifeline, work, output))
    channel.close()
    waiting = select.poll()
    waiting.register(lifeline, select.POLLIN)
    if output is not None:
        waiting.register(output.open(), select.POLLIN)
    status, children, parent_ended = None, True, False
    while status is None and not parent_ended:
        ready = {descriptor for descriptor, _ in waiting.poll(NOTICED)}
        if output is not None and output.reader in ready and not output.pass_on():
            waiting.unregister(output.reader)
        status, children = _reap(worker)
        parent_ended = lifeline.fileno() in ready  # nothing is ever sent: this is its end
    if not LINUX:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
    give_up = time.monotonic() + 10.0
    # To look through all processes of a machine takes milliseconds: the worker may be alone.
    alone = [worker] if status is None else []
    while children and time.monotonic() < give_up:
        for process in alone or descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.001)
        alone = []
        ended, children = _reap(worker)
        status = ended if status is None else status
    if output is not None:
        output.close()
    exit_code = os.waitstatus_to_exitcode(signal.SIGKILL if status is None else status)
    with contextlib.suppress(OSError):  # the parent has ended
        lifeline.sendall(str(exit_code).encode())
    os._exit(0)


class Output:
    """A pipe into which a worker and its descendants print, and what passes from it to a file.

    Control characters pass as escapes: what a model wrote must not steer a terminal.  What the file
    cannot take at the moment is left out, so that a terminal that stands still holds nobody up.
    """

    def __init__(self, file: int) -> None:
        """file: descriptor of the file."""
        self.reader, self._writer = os.pipe()
        self._file, self._writable = file, select.poll()
        self._writable.register(file, select.POLLOUT)
        utf8 = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=True)

    def become(self) -> None:
        """Make the pipe the standard output and error of the worker, which calls this."""
        for number in (1, 2):
            os.dup2(self._writer, number)
        os.close(self.reader)
        os.close(self._writer)

    def open(self) -> int:
        """Return the end to read from, for the supervisor, which calls this."""
        os.close(self._writer)
        os.set_blocking(self.reader, False)
        return self.reader

    def pass_on(self) -> bool:
        """Take what has been printed; False at its end."""
        try:
            data = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return True
        self._write(data)
        return data != b""

    def close(self) -> None:
        """Take what is left."""
        end = time.monotonic() + 1.0
        with contextlib.suppress(OSError):
            while (
                select.select([self.reader], [], [], 0.0)[0]
                and self.pass_on()
                and time.monotonic() < end
            ):
                pass
        self._write(b"")

    def _write(self, data: bytes) -> None:
        from groupwise.utils.terminal import escaped  # here, beside the worker's own start

        text = self._decoder.decode(data, final=not data)
        shown, done = escaped(text, keep="\n\t").encode(), 0
        with contextlib.suppress(OSError):
            while done < len(shown) and self._writable.poll(0):
                done += os.write(self._file, shown[done : done + select.PIPE_BUF])


def _nothing(*_: object) -> None:
    """A handler, and not SIG_IGN, which programs that the worker starts would inherit."""


def _prctl(option: int, value: int) -> None:
    if LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent(parent: int, by: int = signal.SIGKILL) -> None:
    """Have this process signalled when its parent ends, however that happens (Linux; elsewhere
    nothing).   parent: its process id.   by: the signal.
    """
    _prctl(PR_SET_PDEATHSIG, by)
    if LINUX and os.getppid() != parent:  # it ended before this could be asked for
        os._exit(1)


def _be_a_worker(
    supervisor: int, lifeline: socket.socket, work: Callable[[], NoReturn], output: Output | None
) -> NoReturn:
    lifeline.close()
    if output is not None:
        output.become()
    end_with_parent(supervisor)  # should it be killed
    os.setpgid(0, 0)
    for number in SENT_TO_ALL:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        os.register_at_fork(after_in_child=partial(signal.signal, number, usual))
    work()


def _reap(worker: int) -> tuple[int | None, bool]:
    """Clear away the children that have ended: the worker's status if it is one of them, and
    whether any child is left.
    """
    status = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == worker else status
    except ChildProcessError:
        return status, False
    return status, True


def descendants(root: int) -> list[int]:
    """The processes below one (Linux; elsewhere none)."""
    if not LINUX:
        return []
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with (
                contextlib.suppress(OSError, ValueError, IndexError),
                open(f"/proc/{name}/stat", "rb") as stat,
            ):
                children.setdefault(int(stat.read().rsplit(b")", 1)[1].split()[1]), []).append(
                    int(name)
                )
    below = list(children.get(root, ()))
    for process in below:
        below += children.get(process, ())
    return below


# serving


def serve(
    channel: socket.socket, build: Callable[..., Function], options: Mapping[str, Any]
) -> NoReturn:
    """Set-up, limits, then one request after the other until the parent closes the channel.

    The first request is what the function is built from.  A function that returns a generator
    answers a request with one message for each of its values, any other with one.  A request that
    comes with two sockets is for a fork: its lifeline and its channel."""
    with contextlib.suppress(AttributeError, ValueError):
        # What is printed before a kill is seen.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        setup, _ = receive(channel, None)
    except (EOFError, OSError):
        os._exit(0)
    try:
        function = build(*pickle.loads(setup))
    except BaseException as error:  # whatever it is, it is why there is no worker
        _answer(channel, described(error))
        os._exit(1)
    _limit_memory(options.get("memory"))
    _answer(channel, {"value": None})
    answer_requests(channel, function, options.get("cpu_seconds"))


def answer_requests(
    channel: socket.socket, function: Function, cpu_seconds: float | None
) -> NoReturn:
    """One request after the other."""
    global channel_of_this
    channel_of_this, forks = channel, set[int]()
    while True:
        try:
            request, ends = receive(channel, None)
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone; no clean-up of whatever the function left behind
        if ends:
            forks = {process for process in forks if not os.waitpid(process, os.WNOHANG)[0]}
            run = partial(_copy_of_worker, os.getpid(), *ends, function, cpu_seconds)
            # There are no more processes: the parent sees the end of the channel.
            with contextlib.suppress(OSError):
                forks.add(fork(run))
            for end in ends:
                end.close()
            continue
        try:
            for value in _values(function, pickle.loads(request), cpu_seconds):
                _answer(channel, {"value": value})
        except BaseException as error:
            # Whatever it is (SystemExit, KeyboardInterrupt), it is this call's outcome.
            _answer(channel, described(error))


def _values(
    function: Function, arguments: tuple[Any, ...], cpu_seconds: float | None
) -> Iterator[Any]:
    """The answers to a request, each within so much processor time."""
    answer = _timed(cpu_seconds, function, *arguments)
    if not inspect.isgenerator(answer):
        yield answer
        return
    end = object()
    while (value := _timed(cpu_seconds, next, answer, end)) is not end:
        yield value


def _timed(seconds: float | None, function: Function, *arguments: Any) -> Any:
    """Call a function; the kernel ends this process after so much processor time.  No handler: the
    default action needs no interpreter."""
    if seconds is None:  # the function's own signals and timers are left alone
        return function(*arguments)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF,))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return function(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _limit_memory(room: int | None) -> None:
    """Let the address space grow by so many bytes and no more, where the system says how large it
    is.
    """
    statm = Path("/proc/self/statm")
    if room is not None and statm.exists():
        import resource

        most = int(statm.read_text().split()[0]) * resource.getpagesize() + room
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _copy_of_worker(
    worker: int,
    lifeline: socket.socket,
    channel: socket.socket,
    function: Function,
    cpu_seconds: float | None,
) -> NoReturn:
    """Supervise a fork of a worker, which answers at a channel of its own."""
    end_with_parent(worker)
    supervise(lifeline, channel, partial(answer_requests, channel, function, cpu_seconds))


def _answer(channel: socket.socket, message: Mapping[str, Any]) -> None:
    payload = json.dumps(message).encode()
    try:
        send(channel, payload, None)
    except OSError:
        os._exit(0)  # nobody listens any more


def described(error: BaseException) -> dict[str, str]:
    """An exception in words: message, type, place, traceback."""
    trace = (
        "".join(traceback.format_exception(error, limit=-50))
        if error.__traceback__ is not None
        else ""
    )
    return {
        "error": message_of(error),
        "kind": type(error).__name__,
        "where": raised_at(error),
        "trace": trace[-20_000:],
    }


def message_of(error: BaseException) -> str:
    """Return the message of an exception, shortened; empty where its code cannot make one."""
    try:
        return shortened(str(error), LONGEST_MESSAGE)
    except Exception:  # its __str__ is somebody else's code
        return ""


def shortened(text: str, most: int) -> str:
    """Return a text of at most so many characters, and how many were left out behind it.

    >>> shortened("abcdef", 4)
    'abcd [2 characters left out]'
    """
    if len(text) <= most:
        return text
    return f"{text[:most]} [{len(text) - most:,} characters left out]"


def raised_at(error: BaseException) -> str:
    """File, line and source of where it was raised; empty where that is not known."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{frames[0].filename}, line {frames[0].lineno}: {frames[0].line}" if frames else ""


# messages


def send(
    channel: socket.socket,
    payload: bytes,
    deadline: float | None,
    pass_on: list[socket.socket] | None = None,
) -> None:
    """One message, perhaps with sockets; `deadline` is a time of `time.monotonic`.  Raises
    TimeoutError, OSError.
    """
    channel.settimeout(_left(deadline))
    head = struct.pack("!Q", len(payload))
    if pass_on:
        socket.send_fds(channel, [head], [one.fileno() for one in pass_on])
        channel.sendall(payload)
    else:
        channel.sendall(head + payload)


def receive(channel: socket.socket, deadline: float | None) -> tuple[bytes, list[socket.socket]]:
    """The next message, and the sockets that came with it.

    Raises TimeoutError, OSError, EOFError at the end, ValueError for one that cannot be.
    """
    channel.settimeout(_left(deadline))
    head, numbers, _, _ = socket.recv_fds(channel, 8, 2)
    if not head:
        raise EOFError
    for number in numbers:
        os.set_inheritable(number, False)
    (size,) = struct.unpack("!Q", head + _exactly(channel, 8 - len(head), deadline))
    if deadline is not None and size > LONGEST_ANSWER:
        raise ValueError(f"an answer of {size} bytes")
    return _exactly(channel, size, deadline), [socket.socket(fileno=number) for number in numbers]


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
    return min(left, 1e6)  # a socket can be told of 24 days at most
