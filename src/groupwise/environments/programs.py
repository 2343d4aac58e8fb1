"""Starting the programs of a harness: each in a fork of a worker process, which is killed with all
that it has started.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from groupwise.utils import threads

KEPT = 1 << 16
"""Bytes that are kept of the end of what a program prints."""


def run_program(
    command: Sequence[str], environment: Mapping[str, str], text: str
) -> tuple[int, str, str]:
    """Run a program; return its exit status and the ends of what it printed to output and error.
    text: its standard input.
    """
    pipe = subprocess.PIPE
    program = subprocess.Popen(
        command, env=environment, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe
    )
    assert program.stdin is not None
    ends = [
        (bytearray(), stream) for stream in (program.stdout, program.stderr) if stream is not None
    ]
    reading = [threads.begin(lambda end=end: _read(*end), "output of a program") for end in ends]
    with contextlib.suppress(BrokenPipeError):  # it does not read all of it
        program.stdin.write(text.encode())
        program.stdin.close()
    status = program.wait()
    for reader in reading:
        with contextlib.suppress(
            TimeoutError
        ):  # something that it has started may still hold the pipe
            reader.exception(1.0)
    printed, errors = (bytes(end).decode(errors="replace") for end, _ in ends)
    return status, printed, errors


def _read(end: bytearray, stream: IO[bytes]) -> None:
    """Read a stream, and keep its end."""
    while data := stream.read1(1 << 16):  # type: ignore[attr-defined]
        end += data
        del end[:-KEPT]
