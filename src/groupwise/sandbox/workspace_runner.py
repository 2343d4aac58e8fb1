"""The process inside the sandbox of an episode: it runs Python and shells in one folder that stays.

This file is given to Python as text, behind that of `runner`.  Each call is a frame on the pipe of
requests, and a frame of what was printed on the pipe of answers.  A call ends with its first
process: all others that it has left are killed before the answer is sent.
"""

from __future__ import annotations

import ast
import contextlib
import math
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
import traceback
from typing import Any

from groupwise.sandbox import runner

SUBREAPER = 36
"""The option of `prctl` by which a process becomes the parent of orphans below it."""
PIECE = 1 << 16
BOMB = 64
"""A call that prints so many times its limit is ended; below that, what is too much is dropped."""
ENTRIES = 10_000
"""Files and folders that a folder with a size of its own may hold."""
RETRIES = 50
"""Times that a fork is tried again: sandlock counts a killed process for some milliseconds more."""
PAGE = resource.getpagesize()
TICK = os.sysconf("SC_CLK_TCK")


class Call:
    """One call: its first process, what it prints, and the limits that it is held to."""

    def __init__(self, folder: str, request: dict[str, Any]) -> None:
        self._folder, self._request = folder, request
        self._limits: dict[str, Any] = request["limits"]
        self._kept = bytearray()
        self._printed = 0
        self._spent = _spent_by_ended()
        self._own_disk: bool = self._limits["own_disk"]
        self._forks = -1
        """The file on which calls that make processes wait."""
        if self._own_disk:
            self._most_files = max(ENTRIES, _files_on_disk(folder))
        else:
            used, _ = runner.used_by(folder)
            self._most_bytes = self._limits["disk"]
            if math.isfinite(used):  # a full folder can still be read
                self._most_bytes = max(self._most_bytes, used)

    def run(self) -> dict[str, Any]:
        """Run it to its end: {output, left_out, ended}."""
        os.chmod(self._folder, stat.S_IRWXU)  # a call may have locked it
        reading, writing = os.pipe()
        here, there = socket.socketpair()
        child = _fork()
        if child == 0:
            _confined(self._folder, self._request, writing, there)
        os.close(writing)
        there.close()
        os.set_blocking(reading, False)
        ended = self._watch(child, reading, here)
        if not ended:
            _, status = os.waitpid(child, 0)
            ended = runner.how_it_ended(status)
        end_all()
        # Not before: where nobody can answer any more, what is left would be told, and would print,
        # that the system knows no fork.
        here.close()
        if self._forks != -1:
            os.close(self._forks)
        while self._read(reading):
            pass
        os.close(reading)
        output = bytes(self._kept).decode(errors="replace")
        return {"output": output, "left_out": self._printed - len(self._kept), "ended": ended}

    def _watch(self, child: int, reading: int, socket_of_child: socket.socket) -> str:
        """Wait for the first process; return the limit that it, or one below it, broke."""
        deadline = time.monotonic() + self._limits["seconds"]
        end = os.pidfd_open(child)
        watched = select.poll()
        watched.register(runner.REQUESTS, 0)
        watched.register(end, select.POLLIN)
        watched.register(reading, select.POLLIN)
        watched.register(socket_of_child, select.POLLIN)
        next_look = time.monotonic()
        try:
            while True:
                events = dict(watched.poll(1000 * runner.LOOK))
                if reading in events and not self._read(reading):
                    watched.unregister(reading)
                if end in events:
                    return ""
                if socket_of_child.fileno() in events:
                    watched.unregister(socket_of_child)
                    _, files, _, _ = socket.recv_fds(socket_of_child, 1, 1)
                    if files:
                        self._forks = files[0]
                        watched.register(self._forks, select.POLLIN)
                if self._forks in events:
                    runner.answer_fork(self._forks, len(_processes()) < self._limits["processes"])
                if runner.REQUESTS in events:
                    return "gone"
                if self._printed > BOMB * self._limits["output"]:
                    return "output"
                now = time.monotonic()
                if now > deadline:
                    return "seconds"
                if now < next_look:
                    continue
                broken = self._broken_limit()
                if broken:
                    return broken
                next_look = now + runner.LOOK
        finally:
            os.close(end)

    def _read(self, pipe: int) -> bool:
        """Read what was printed, and keep its beginning; return False where there is no more."""
        try:
            data = os.read(pipe, PIECE)
        except BlockingIOError:
            return False
        room = self._limits["output"] - len(self._kept)
        self._printed += len(data)
        self._kept += data[:room]
        return bool(data)

    def _broken_limit(self) -> str:
        """Return the limit that all processes of the call together are beyond, if there is one."""
        if self._limits["writes"] and self._is_full():
            return "disk"
        memory, seconds = _usage(_processes())
        if memory > self._limits["memory"]:
            return "memory"
        if seconds + _spent_by_ended() - self._spent > self._limits["cpu_seconds"]:
            return "SIGXCPU"
        return ""

    def _is_full(self) -> bool:
        if self._own_disk:
            return _files_on_disk(self._folder) > self._most_files
        return runner.is_full(self._folder, self._most_bytes)


def _fork() -> int:
    for _ in range(RETRIES):
        with contextlib.suppress(BlockingIOError):
            return os.fork()
        time.sleep(runner.LOOK)
    return os.fork()


def _processes() -> list[str]:
    """Return the processes below this one.

    It reads /proc, which sandlock hides: there sandlock holds the limits.
    """
    try:
        names = os.listdir("/proc")
    except PermissionError:
        return []
    return [name for name in names if name.isdigit() and int(name) not in (1, os.getpid())]


def _usage(processes: list[str]) -> tuple[int, float]:
    """Return the bytes and the processor seconds of processes."""
    memory, seconds = 0, 0.0
    for name in processes:
        try:
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        seconds += sum(map(int, fields[11:15])) / TICK
        memory += int(fields[21]) * PAGE
    return memory, seconds


def _spent_by_ended() -> float:
    """Return the processor seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _files_on_disk(folder: str) -> int:
    disk = os.statvfs(folder)
    return disk.f_files - disk.f_ffree


def end_all() -> None:
    """End every process but this one, and wait until none is left.

    No process outside of the sandbox can be reached from here: `main` has made sure of it.
    """
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return


def _confined(folder: str, request: dict[str, Any], writing: int, parent: socket.socket) -> None:
    """Give up all rights in a new process, and run the call in it.  It never returns."""
    status = 1
    try:
        runner.prctl(runner.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        shell = request["tool"] == "shell"
        try:
            os.chdir(folder)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, runner.REQUESTS)
            os.dup2(writing, runner.ANSWERS)
            if not shell:
                runner.set_limits(request["limits"])
            runner.drop_privileges()
            own_disk = request["limits"]["own_disk"]
            runner.landlock(folder, removes=own_disk)
            if shell:  # sandlock counts processes itself
                listener = runner.filter_calls_of_a_shell(asks=own_disk)
                if listener is not None:
                    socket.send_fds(parent, [b"f"], [listener])
                # The limit on files counts those that all of the user's processes are sending.
                runner.set_limits(request["limits"])
            else:
                runner.filter_calls()
        except BaseException as error:  # what is not confined does not run
            os.write(runner.CONTROL, f"failed {error!r}\n".encode())
            return
        os.dup2(writing, runner.CONTROL)
        os.closerange(runner.CONTROL + 1, 64)
        if shell:
            _shell(request["source"], folder)
        else:
            _python(request["source"])
        sys.stdout.flush()
        status = 0
    except SystemExit as error:
        sys.stdout.flush()
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # whatever a program raises is shown as Python shows it
        sys.stdout.flush()
        _show(error)
    finally:
        os._exit(status & 0xFF)


def _shell(command: str, folder: str) -> None:
    """Become a shell that runs a command."""
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    programs = os.path.dirname(sys.executable)
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"}
    os.execve(shell, [shell, "-c", command], variables)


def _python(source: str) -> None:
    """Run a program; the value of an expression in its last line is printed, as in a notebook."""
    sys.setrecursionlimit(10_000)
    sys.argv = ["python"]
    sys.path.insert(0, "")
    variables = runner.namespace("__main__")
    tree = ast.parse(source, "python")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "python", "exec"), variables)
    if last is not None:
        exec(compile(ast.Interactive([last]), "python", "single"), variables)


def _show(error: BaseException) -> None:
    """Print what a program raised, without the lines of this file."""
    places = error.__traceback__
    while places is not None and places.tb_frame.f_code.co_filename != "python":
        places = places.tb_next
    error.__traceback__ = places
    traceback.print_exception(error)


def main(place: str) -> None:
    """Serve calls until the pipe closes.   place: the folder that stays."""
    runner.hide()
    runner.prctl(SUBREAPER, 1, 0, 0, 0)
    _make_sure_of_the_sandbox()
    os.write(runner.CONTROL, b"ready\n")
    while True:
        try:
            request = runner.read_frame(runner.REQUESTS)
        except EOFError:
            return
        runner.write_frame(runner.ANSWERS, Call(place, request).run())


def _make_sure_of_the_sandbox() -> None:
    """Raise an error where `end_all` would reach processes outside of the sandbox."""
    if (os.getpid(), os.getppid()) == (2, 1):  # alone in a namespace, with its first process
        return
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return
    raise RuntimeError("processes outside of the sandbox can be signalled")


if __name__ == "__main__":
    main(sys.argv[1])
