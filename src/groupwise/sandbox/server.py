"""The outer end of a sandbox: it starts, is asked through pipes, and ends with all in it."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from groupwise.errors import GroupwiseError
from groupwise.sandbox import runner
from groupwise.sandbox.isolation import Isolation, python
from groupwise.sandbox.limits import Limits

START_SECONDS = 30.0
"""Seconds that a sandbox has to start in, on a busy machine."""
END_SECONDS = 5.0
"""Seconds that the runner has to clean up after a program, and at its end."""
PREFIX = "groupwise-sandbox-"
"""The beginning of the names of sandboxes' folders."""
ABANDONED_SECONDS = 60.0
"""The age of a folder that may be abandoned."""
LOOK = 0.2
"""Seconds between two looks whether a sandbox that is waited for was stopped."""

LIMITS = {
    "seconds": "out of time",
    "SIGXCPU": "out of processor time",
    "output": "too much output",
    "disk": "too many files",
    "memory": "out of memory",
}
"""How the end of a program at a limit is called."""


_running: set[Isolated] = set()
"""All of this program: a fork of it must not keep them alive by holding their pipes."""


def _let_go() -> None:
    for sandbox in list(_running):
        sandbox.forget()


os.register_at_fork(after_in_child=_let_go)


class SandboxFailed(GroupwiseError):
    """The sandbox itself failed: nothing is known of the program."""


class ProgramEnded(Exception):
    """A program ended before it answered, or was ended."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A program that ran as a script."""

    output: bytes
    ended: str
    """`0`, the exit code, the signal that ended it, or the words of a limit (`LIMITS`)."""


class Isolated(ABC):
    """A process in isolation, and its three pipes.

    It starts when it is first needed, and again after its end.  It serves one thread.  Where the
    process itself ends every method raises SandboxFailed: that says nothing of a program.
    """

    _memory = 0
    """Bytes of all processes together; 0: each has a limit of its own."""

    def __init__(self, isolation: Isolation, limits: Limits) -> None:
        self.isolation, self.limits = isolation, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._lines = b""
        """What the runner wrote on its control pipe and nobody has read."""
        self._ended = ""
        """How the last program ended."""
        self._stopped = False

    def stop(self) -> None:
        """Take no further program.  Any thread may call it; whoever waits gets SandboxFailed."""
        self._stopped = True

    def forget(self) -> None:
        """Close the pipes of a sandbox that belongs to the process that this one is a fork of."""
        process, self._process, self._folder = self._process, None, None
        _running.discard(self)
        if process is not None:
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()

    def kill(self) -> None:
        """End the sandbox and all in it, and remove its folder.

        The runner ends when its requests do, and first ends its program: one that is still running
        could write into a folder that is being removed.
        """
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        _running.discard(self)
        if process is not None:
            assert process.stdin and process.stdout and process.stderr
            process.stdin.close()
            process.stdout.close()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stderr.close()
        if folder is not None and folder.exists():
            runner.remove(str(folder))

    @abstractmethod
    def _program(self) -> str:
        """Return the source of what runs inside."""

    def _exchange(self, message: Any, deadline: float, longest: int) -> Any:
        try:
            if message is not None:
                self._send(message, deadline)
            (length,) = runner.LENGTH.unpack(self._receive(runner.LENGTH.size, deadline))
            if length > longest:
                raise ProgramEnded(LIMITS["output"])
            return json.loads(self._receive(length, deadline))
        except (ValueError, RecursionError):
            self.kill()
            raise ProgramEnded("an answer of another form") from None
        except ProgramEnded:
            self.kill()
            raise

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        if self._stopped:
            raise SandboxFailed(f"the {self.isolation.name} sandbox was closed")
        folder = Path("/")
        lock = None
        if self.isolation.needs_folder:
            remove_abandoned()
            self._folder = folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_SH)
        interpreter, _ = python()
        place = self.isolation.place(folder)
        argv = [interpreter, "-I", "-S", "-B", "-c", self._program(), place]
        command = self.isolation.command(argv, folder, self.limits, memory=self._memory)
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command,
                env={},
                cwd=folder,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is the trainer's
                pass_fds=() if lock is None else (lock,),
            )
        except OSError as error:
            self.kill()
            raise SandboxFailed(f"{self.isolation.name} does not start: {error}") from None
        finally:
            if lock is not None:
                os.close(lock)
        _running.add(self)
        for end in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert end is not None
            os.set_blocking(end.fileno(), False)
        self._lines = b""
        words = []
        deadline = time.monotonic() + START_SECONDS
        try:
            line = self._control(deadline)
            while line != "ready":
                words.append(line)
                line = self._control(deadline)
        except (ProgramEnded, SandboxFailed) as error:
            self.kill()
            said = " ".join([*words, self._lines.decode(errors="replace")]).strip()
            raise SandboxFailed(
                f"{self.isolation.name} does not start here: {said[-300:] or error}"
            ) from None

    def _ends(self) -> tuple[int, int, int]:
        process = self._process
        assert process is not None and process.stdin and process.stdout and process.stderr
        return process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()

    def _send(self, message: Any, deadline: float) -> None:
        data = json.dumps(message).encode()
        left = memoryview(runner.LENGTH.pack(len(data)) + data)
        requests, _, control = self._ends()
        while left:
            ready = self._wait([control], deadline, writing=requests)
            if control in ready and self._has_ended():
                raise ProgramEnded("ended")
            if requests in ready:
                try:
                    left = left[os.write(requests, left[:65536]) :]
                except BrokenPipeError:
                    raise self._failed() from None

    def _receive(self, count: int, deadline: float) -> bytes:
        """Return so many bytes of a program's answer."""
        _, answers, control = self._ends()
        data = bytearray()
        while len(data) < count:
            ready = self._wait([answers, control], deadline)
            if answers in ready:
                part = os.read(answers, min(count - len(data), 1 << 20))
                if not part:
                    raise self._failed()
                data += part
            elif control in ready and self._has_ended():
                raise ProgramEnded(self._ended)
        return bytes(data)

    def _has_ended(self) -> bool:
        """Read the control pipe; return True if a program ended."""
        line = self._control(time.monotonic() + END_SECONDS)
        if line.startswith("failed "):
            self.kill()
            raise SandboxFailed(f"{self.isolation.name}: a program could not be confined: {line}")
        ended = line.removeprefix("ended ")
        self._ended = LIMITS.get(ended, ended)
        return line.startswith("ended ")

    def _control(self, deadline: float) -> str:
        """Return the runner's next line."""
        *_, control = self._ends()
        while b"\n" not in self._lines:
            self._wait([control], deadline)
            part = os.read(control, 4096)
            if not part:
                raise self._failed()
            self._lines += part
        line, _, self._lines = self._lines.partition(b"\n")
        return line.decode(errors="replace")

    def _wait(self, reading: list[int], deadline: float, writing: int | None = None) -> set[int]:
        """Wait until a pipe can be read or written, and return those that can.

        Raises ProgramEnded behind the deadline.
        """
        pipes = select.poll()
        for pipe in reading:
            pipes.register(pipe, select.POLLIN)
        if writing is not None:
            pipes.register(writing, select.POLLOUT)
        ready: list[tuple[int, int]] = []
        while not ready:
            if self._stopped:
                self.kill()
                raise SandboxFailed(f"the {self.isolation.name} sandbox was closed")
            ready = pipes.poll(1000 * min(LOOK, _left(deadline)))
        return {pipe for pipe, _ in ready}

    def _failed(self) -> SandboxFailed:
        """Clean up after the sandbox's own end, and return what is to be raised."""
        self.kill()
        return SandboxFailed(f"the {self.isolation.name} sandbox ended")


class Sandbox(Isolated):
    """A sandbox that runs programs one after another, each in a process and a folder of its own."""

    def run(self, source: str, text: str = "") -> Ran:
        """Run a program as a script.   text: its standard input.   Raises SandboxFailed."""
        deadline = self._begin({"do": "run", "source": source, "stdin": text})
        output = bytearray()
        try:
            ended = self._collect(output, deadline)
        except ProgramEnded as error:
            self.kill()
            return Ran(bytes(output), str(error))
        return Ran(bytes(output), ended)

    def open(self, request: dict[str, Any]) -> None:
        """Begin a program that answers messages.   request: `do` and what the runner needs for it.

        Raises SandboxFailed.
        """
        self._begin(request)

    def ask(self, message: Any = None) -> Any:
        """Send a message, if there is one, and return the program's next one.

        Raises ProgramEnded if it ended, took too long, or answered with something else.
        """
        deadline = time.monotonic() + self.limits.seconds
        return self._exchange(message, deadline, self.limits.output)

    def finish(self) -> None:
        """End the program that was begun; the sandbox stays for the next one."""
        if self._process is None:
            return
        try:
            deadline = time.monotonic() + END_SECONDS
            self._send({"do": "stop"}, deadline)
            while not self._control(deadline).startswith("ended"):
                pass
            self._drain()
        except (ProgramEnded, SandboxFailed):  # the program has given its answers
            self.kill()

    def _program(self) -> str:
        return source_of(runner)

    def _begin(self, request: dict[str, Any]) -> float:
        """Fork a process for a program, and return its deadline.  Raises SandboxFailed."""
        self._start()
        deadline = time.monotonic() + self.limits.seconds
        try:
            self._send(self.limits.as_json(), deadline)
            self._send(request, deadline)
        except ProgramEnded as error:
            self.kill()
            raise SandboxFailed(
                f"the {self.isolation.name} sandbox took no program: {error}"
            ) from None
        return deadline

    def _collect(self, output: bytearray, deadline: float) -> str:
        """Add what a program prints to `output`, and return how it ended."""
        _, answers, control = self._ends()
        while True:
            ready = self._wait([answers, control], deadline)
            if answers in ready:
                part = os.read(answers, 1 << 16)
                if not part:
                    raise self._failed()
                output += part
                if len(output) > self.limits.output:
                    raise ProgramEnded(LIMITS["output"])
            elif control in ready and self._has_ended():
                return self._ended

    def _drain(self) -> None:
        """Forget what an ended program sent that nobody asked for."""
        _, answers, _ = self._ends()
        try:
            while os.read(answers, 1 << 16):
                pass
        except BlockingIOError:
            return


def remove_abandoned() -> None:
    """Remove folders of sandboxes that were killed before they could do it themselves.

    Who runs a sandbox holds a lock on its folder; the age leaves time for taking it.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if time.time() - folder.lstat().st_mtime < ABANDONED_SECONDS:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # somebody else's, or gone by now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            runner.remove(str(folder))
        except OSError:  # it is in use, or gone by now
            continue
        finally:
            os.close(lock)


def source_of(module: ModuleType) -> str:
    """Return the text of a module."""
    assert module.__file__ is not None
    return Path(module.__file__).read_text("utf-8")


def _left(deadline: float) -> float:
    """Return the seconds until a deadline.  Raises ProgramEnded behind it."""
    seconds = deadline - time.monotonic()
    if seconds <= 0.0:
        raise ProgramEnded(LIMITS["seconds"])
    return seconds
