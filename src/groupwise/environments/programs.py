"""Starting the programs of a harness: each in a fork of a worker process, which is killed with all that it has started."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

KEPT = 1 << 16
"""Bytes that are kept of the end of what a program prints."""


def serve_programs() -> Callable[..., Any]:
    """In a process: runs the program that a request names."""
    return run_program


def run_program(command: Sequence[str], environment: Mapping[str, str], text: str) -> tuple[int, str, str]:
    """Its exit status, and the ends of what it has printed to its standard output and error.   text: its standard input."""
    pipe = subprocess.PIPE
    program = subprocess.Popen(command, env=environment, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe)
    assert program.stdin is not None
    ends = [_End(stream) for stream in (program.stdout, program.stderr) if stream is not None]
    with contextlib.suppress(BrokenPipeError):  # it does not read all of it
        program.stdin.write(text.encode())
        program.stdin.close()
    status = program.wait()
    for end in ends:
        end.join(1.0)  # something that it has started may still hold the pipe
    printed, errors = (bytes(end.data).decode(errors="replace") for end in ends)
    return status, printed, errors


class _End(threading.Thread):
    """Reads a stream and keeps its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._stream, self.data = stream, bytearray()
        self.start()

    def run(self) -> None:
        while data := self._stream.read1(1 << 16):  # type: ignore[attr-defined]
            self.data += data
            del self.data[:-KEPT]
