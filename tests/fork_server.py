"""Processes forked from one that has imported everything: a start costs a tenth of a second, and not six of processor time.

A test that kills, stops or signals a run needs a process of its own, and not the start of an interpreter.  `ForkServer` keeps one
that has imported torch, transformers and Groupwise, in one thread; `start` has it fork, and the child becomes `python -m groupwise`
or a script, with its own working directory, environment and output.  What only a fresh interpreter shows (what imports cost, what
is read while it starts) is tested with one.

With `forks` that goes for what it starts, too: torchrun, and the processes that torchrun launches, are forks of forks.

Run as a script: `fork_server.py serve SOCKET` is the server; `fork_server.py run SOCKET ARGUMENTS` is the command, for shells.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import inspect
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import dropwhile
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

IMPORTED = (
    "groupwise.cli.train",
    "groupwise.runs.run",
    "groupwise.viewer.report",
    "groupwise.viewer.server",
    "datasets",
    "transformers.models.llama.modeling_llama",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
)
"""What a run imports; the rest comes with it."""


def ask(path: str, request: dict[str, Any], descriptors: list[int]) -> socket.socket:
    """Ask the server at `path` for a process with these as stdin, stdout and stderr.  The line on which it answers; see `told`."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    socket.send_fds(line, [b"x"], descriptors)
    line.sendall(json.dumps(request).encode() + b"\n")
    return line


def told(line: socket.socket) -> int:
    """The next answer: the process's id, then its exit code, or minus the signal that ended it."""
    answer = line.recv(8)
    assert answer, "the fork server has ended"
    return int.from_bytes(answer, "little", signed=True)


def tell(line: socket.socket, answer: int) -> None:
    with suppress(OSError):  # nobody waits for it
        line.sendall(answer.to_bytes(8, "little", signed=True))


class Forked:
    """A process, by what `subprocess.Popen` says of it: `pid`, `returncode`, `poll`, `wait`, `send_signal`, `kill`."""

    def __init__(self, path: str, request: dict[str, Any], stdin: int | None, stdout: int | None) -> None:
        self.returncode: int | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        with open(os.devnull) as nothing:
            said = self._said.fileno()
            given = [nothing.fileno() if stdin is None else stdin, said if stdout is None else stdout, said]
            self._line = ask(path, request, given)
        self.pid = told(self._line)

    @property
    def said(self) -> str:
        """What it has written so far, to stdout (if that is not given) and to stderr."""
        file = self._said.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None else self._end(0.0)

    def wait(self, timeout: float = 240.0) -> int:
        """Its exit code, or minus the signal that ended it.  Raises TimeoutError with what it said."""
        found = self.returncode if self.returncode is not None else self._end(timeout)
        if found is None:
            raise TimeoutError(f"process {self.pid} has not ended after {timeout:g} s; it said:\n{self.said}")
        return found

    def _end(self, timeout: float) -> int | None:
        self._line.settimeout(timeout)
        with suppress(TimeoutError, BlockingIOError):
            self.returncode = told(self._line)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it if it has not ended."""
        self.kill()
        self.wait()
        self._line.close()
        self._said.close()


class ForkServer:
    """The process that forks.  Its children end with it."""

    def __init__(self, meeting: Path | None = None) -> None:
        """meeting: a folder in which several processes find the same server; it ends when the last of them has closed it."""
        self.started: list[Forked] = []
        with locked(meeting):
            note = None if meeting is None else meeting / "fork_server"
            if note is not None and note.exists() and Path(note.read_text()).is_dir():
                self.folder = Path(note.read_text())
                self.held = os.open(self.folder / "held", os.O_WRONLY)
            else:
                self.folder = Path(tempfile.mkdtemp(prefix="fork"))
                self._begin()
                if note is not None:
                    note.write_text(str(self.folder))
        self.path = str(self.folder / "s")

    def _begin(self) -> None:
        """Start the server.  Its standard input is a pipe with a name: it comes to its end when nobody holds it any more."""
        os.mkfifo(self.folder / "held")
        end = os.open(self.folder / "held", os.O_RDONLY | os.O_NONBLOCK)
        self.held = os.open(self.folder / "held", os.O_WRONLY)
        command = [sys.executable, __file__, "serve", str(self.folder / "s")]
        self.process = subprocess.Popen(command, stdin=end, stdout=subprocess.PIPE)
        os.close(end)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", "the fork server did not start; its error is above"

    def start(
        self,
        *arguments: str | Path,
        code: str | None = None,
        cwd: Path | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        lasting: bool = False,
        forks: bool = False,
        first: str = "",
        **environment: str,
    ) -> Forked:
        """`python -m groupwise ARGUMENTS`, or with `code` `python -c CODE ARGUMENTS`, in this process's environment, with changes.

        lasting: it outlives the test that starts it.   forks: where it would start `python -m MODULE`, it forks
        (`fork_interpreters`).   first: code that it runs before, and so does what it forks in this way.
        """
        request = {
            "arguments": [str(one) for one in arguments],
            "module": "groupwise",
            "code": code,
            "forks": forks,
            "first": first,
            "cwd": str(cwd or Path.cwd()),
            "environment": os.environ | environment,
        }
        process = Forked(self.path, request, stdin, stdout)
        if not lasting:
            self.started.append(process)
        return process

    def start_two(self, *arguments: str | Path, **options: Any) -> list[Forked]:
        """`start` both processes of a run that no launcher watches."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [self.start(*arguments, **options, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]

    @property
    def command(self) -> str:
        """What a shell types for `groupwise`."""
        return f"'{sys.executable}' -I -S '{__file__}' run '{self.path}'"

    def run(self, *arguments: str | Path, **options: Any) -> Forked:
        """`start`, to its end."""
        process = self.start(*arguments, **options)
        process.wait()
        return process

    def end_all(self) -> None:
        """Kill what has not ended and does not last."""
        while self.started:
            self.started.pop().close()

    def close(self) -> None:
        os.close(self.held)


@contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """No other process is in here for this folder."""
    if folder is None:
        yield
        return
    with open(folder / "fork_server.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- the server


def import_all() -> None:
    """What most tests' processes need."""
    for name in IMPORTED:
        importlib.import_module(name)


def serve(path: str) -> dict[str, Any] | None:
    """Fork a child for every connection, until stdin ends.  Returns the request in a child, None in the server.

    A child is told on its connection as `pid`, then as its exit code; whose connection is closed before is killed.
    """
    import_all()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    handlers = {signal.SIGCHLD: lambda *_: None, signal.SIGINT: signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    signal.set_wakeup_fd(wake)
    running: dict[int, socket.socket] = {}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    waiting = selectors.DefaultSelector()
    for what in (listener, sys.stdin.buffer, woken):
        waiting.register(what, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is listener:
                connection = listener.accept()[0]
                descriptors = socket.recv_fds(connection, 1, 3)[1]
                with connection.makefile() as lines:
                    request = json.loads(lines.readline())
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    for number, handler in before.items():
                        signal.signal(number, handler)
                    for number, descriptor in enumerate(descriptors):
                        os.dup2(descriptor, number)
                    for one in (*running.values(), connection, listener):
                        one.close()
                    for descriptor in (*descriptors, woken, wake):
                        os.close(descriptor)
                    waiting.close()
                    return request
                for descriptor in descriptors:
                    os.close(descriptor)
                running[pid] = connection
                tell(connection, pid)
                waiting.register(connection, selectors.EVENT_READ, pid)
            elif key.fileobj == woken:
                os.read(woken, 4096)
                _tell_ends(running, waiting)
            elif key.data in running:  # closed by who asked for it
                os.kill(key.data, signal.SIGKILL)
                waiting.unregister(key.fileobj)
            elif key.fileobj is sys.stdin.buffer:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                shutil.rmtree(Path(path).parent)
                return None


def _tell_ends(running: dict[int, socket.socket], waiting: selectors.BaseSelector) -> None:
    """Say how those ended that have."""
    for pid in list(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            connection = running.pop(pid)
            with suppress(KeyError):
                waiting.unregister(connection)
            tell(connection, os.waitstatus_to_exitcode(status))
            connection.close()


def become(request: dict[str, Any]) -> None:
    """Be the process that was asked for."""
    import numpy as np
    import torch

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if threads := os.environ.get("OMP_NUM_THREADS"):  # torch has read the server's
        torch.set_num_threads(int(threads))
    random.seed()
    np.random.seed()
    sys.path[0] = os.getcwd()
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.stderr.reconfigure(line_buffering=True)
    if request["forks"]:
        fork_interpreters(request)
    if request["first"]:
        exec(request["first"], {})
    if request["code"] is None:
        be_module(request["module"], request["arguments"])
    else:
        sys.argv = ["-c", *request["arguments"]]
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(request["code"], "<string>", "exec", dont_inherit=True), module.__dict__)


def be_module(name: str, arguments: list[str]) -> None:
    """As `python -m NAME ARGUMENTS`."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


# ---------------------------------------------------------------- forks of forks


def fork_interpreters(request: dict[str, Any]) -> None:
    """From now on `python -m MODULE` is no new interpreter here: in this process's place (`os.execv`) it is this one, beside it
    (`subprocess`) a fork of it.

    request: what this process was asked for; its forks are asked for the same, with a module and an environment of their own.
    """
    execute, execute_child = os.execv, subprocess.Popen._execute_child  # type: ignore[attr-defined]
    named = inspect.signature(execute_child)

    def in_place(path: str, arguments: list[str]) -> None:
        if not (asked := module_of(arguments)):
            execute(path, arguments)
        end_with(lambda: be_module(asked[0], asked[1:]))

    def beside(process: Any, *given: Any, **more: Any) -> None:
        asked = named.bind(process, *given, **more).arguments
        if not (module := module_of(asked["args"])):
            return execute_child(process, *given, **more)
        assert asked["p2cread"] == asked["c2pwrite"] == asked["errwrite"] == -1, "a fork writes where this process does"
        process.pid = os.fork()
        if process.pid:
            process._child_created = True
            return None
        if asked["start_new_session"]:
            os.setsid()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        gc.freeze()  # what holds a descriptor may not close it again
        atexit._clear()  # what is due at the end of this process's parent
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        own = {"module": module[0], "arguments": module[1:], "code": None, "cwd": os.getcwd(), "environment": environment}
        return end_with(lambda: become(request | own | {"forks": False}))  # it forks already

    os.execv = in_place  # type: ignore[assignment]
    subprocess.Popen._execute_child = beside  # type: ignore[attr-defined]


def module_of(command: Any) -> list[str]:
    """The name and the arguments of `python [-P] [-u] -m NAME ARGUMENTS`; nothing of any other command."""
    words = [] if isinstance(command, str) else [str(word) for word in command]
    behind = list(dropwhile(lambda word: word in ("-P", "-u"), words[1:]))
    return behind[1:] if words[:1] == [sys.executable] and behind[:1] == ["-m"] else []


def end_with(work: Callable[[], None]) -> NoReturn:
    """Work, then end as an interpreter does, whatever called this."""
    status: Any = 0
    try:
        work()
    except SystemExit as ended:
        status = ended.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(path: str, arguments: list[str]) -> int:
    """The command, by the server at `path`, with what this process was given."""
    what = {"arguments": arguments, "module": "groupwise", "code": None, "forks": False, "first": ""}
    request = what | {"cwd": os.getcwd(), "environment": dict(os.environ)}
    line = ask(path, request, [0, 1, 2])
    told(line)
    return told(line)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run(sys.argv[2], sys.argv[3:]))
    asked = serve(sys.argv[2])
    if asked is not None:
        become(asked)
