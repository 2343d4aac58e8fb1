"""The process inside the sandbox of an agent: it writes two folders, runs the agent, holds it to
its limits, and reads what became of the files.

This file is given to Python as text.  The request is JSON on standard input, the answer JSON on
standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
LOOK = 0.1
"""Seconds between two looks at the limits."""
PIECE = 1 << 16
FILES_BYTES, FILE_BYTES = 1 << 20, 1 << 16
"""Bytes that are read of all files and of one; more where they were longer at the beginning."""
PAGE = resource.getpagesize()
TICK = os.sysconf("SC_CLK_TCK")


class Agent:
    """The agent's first process, the ends of what it prints, and its limits."""

    def __init__(self, request: dict[str, Any], folder: str) -> None:
        self._limits: dict[str, Any] = request["limits"]
        with open(os.memfd_create("text"), "wb+") as text:
            text.write(request["text"].encode())
            text.seek(0)
            self._process = subprocess.Popen(
                request["command"],
                cwd=folder,
                env=request["variables"],
                stdin=text,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        assert self._process.stdout and self._process.stderr
        self._ends = {
            self._process.stdout.fileno(): bytearray(),
            self._process.stderr.fileno(): bytearray(),
        }

    def run(self) -> dict[str, Any]:
        """Run it to its end: {status, output, errors, stopped}."""
        stopped = self._watch()
        self._process.kill()
        status = self._process.wait()
        end_all()
        for pipe in list(self._ends):
            while self._read(pipe):
                pass
        output, errors = (bytes(end).decode(errors="replace") for end in self._ends.values())
        return {"status": status, "output": output, "errors": errors, "stopped": stopped}

    def _watch(self) -> str:
        """Wait for the first process; return the limit that all together are beyond."""
        poll = select.poll()
        for pipe in self._ends:
            os.set_blocking(pipe, False)
            poll.register(pipe, select.POLLIN)
        next_look = 0.0
        while self._process.poll() is None:
            for pipe, _ in poll.poll(1000 * LOOK):
                if not self._read(pipe):
                    poll.unregister(pipe)
            if time.monotonic() < next_look:
                continue
            broken = self._broken_limit()
            if broken:
                return broken
            next_look = time.monotonic() + LOOK
        return ""

    def _read(self, pipe: int) -> bool:
        """Read what was printed, and keep its end; return False where there is no more."""
        try:
            data = os.read(pipe, PIECE)
        except BlockingIOError:
            return False
        end = self._ends[pipe]
        end += data
        del end[: -self._limits["output"]]
        return bool(data)

    def _broken_limit(self) -> str:
        processes = usage_below(os.getpid())
        memory = sum(used for used, _ in processes.values())
        seconds = sum(spent for _, spent in processes.values())
        if len(processes) > self._limits["processes"]:
            return "processes"
        if memory > self._limits["memory"]:
            return "memory"
        if seconds > self._limits["cpu_seconds"]:
            return "cpu_seconds"
        return ""


def usage_below(root: int) -> dict[int, tuple[int, float]]:
    """Return resident bytes and processor seconds of each process below another one."""
    parents: dict[int, int] = {}
    used: dict[int, tuple[int, float]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(name)] = int(fields[1])
        seconds = sum(map(int, fields[11:15])) / TICK
        used[int(name)] = (int(fields[21]) * PAGE, seconds)
    below = {}
    for pid in used:
        above = parents[pid]
        while above not in (root, 0):
            above = parents.get(above, 0)
        if above == root:
            below[pid] = used[pid]
    return below


def end_all() -> None:
    """Kill every process below this one, and wait until none is left."""
    while True:
        for pid in usage_below(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(LOOK / 10)


def write(folder: str, files: dict[str, str]) -> None:
    """Write texts by relative path."""
    os.makedirs(folder, exist_ok=True)
    for path, text in files.items():
        place = os.path.join(folder, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8", newline="") as file:
            file.write(text)


def read(folder: str, files: dict[str, str]) -> dict[str, str]:
    """Return the files as they are now; what is no regular file in the folder is not there."""
    texts = {}
    left = max(FILES_BYTES, 8 * sum(map(len, files.values())))
    inside = os.path.realpath(folder)
    for path in files:
        place = os.path.realpath(os.path.join(folder, path))
        if not place.startswith(f"{inside}/"):  # a link that leads out
            continue
        try:
            file = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            continue
        with open(file, "rb") as opened:
            if stat.S_ISREG(os.fstat(file).st_mode):
                data = opened.read(min(left, FILE_BYTES))
                left -= len(data)
                texts[path] = data.decode(errors="replace")
    return texts


def serve(port: int, control: int) -> None:
    """Listen on a port of the sandbox's own network, and hand the socket to whoever is outside."""
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    with listening, socket.socket(fileno=control) as there:
        socket.send_fds(there, [b"l"], [listening.fileno()])


def main() -> None:
    """Serve the one request."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    request = json.load(sys.stdin)
    root = request["root"]
    home, work = os.path.join(root, "home"), os.path.join(root, "work")
    write(home, request["home"])
    write(work, request["files"])
    if request["port"]:
        serve(request["port"], request["control"])
    answer = Agent(request, work).run()
    answer["files"] = read(work, request["files"])
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
