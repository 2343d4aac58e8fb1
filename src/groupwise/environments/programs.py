"""Starting the programs of a harness: each in a fork of a worker process, which is killed with all
that it has started.

An agent in a sandbox has a network of its own.  Its connections to the endpoint are passed on here.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO, Any

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


def run_agent(
    command: Sequence[str], request: Mapping[str, Any], address: tuple[str, int] | None
) -> dict[str, Any]:
    """Run an agent in its sandbox; return the answer of `sandbox.agent_runner`.

    address: of the endpoint, which the agent reaches at a port of its own network.
    Raises RuntimeError where the sandbox ends without an answer.
    """
    pipe = subprocess.PIPE
    here, there = socket.socketpair()
    with here:
        with there:
            control = there.fileno()
            program = subprocess.Popen(
                command,
                env={},
                start_new_session=True,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                pass_fds=[control],
            )
        if address is not None:
            threads.begin(partial(_pass_on, here, address), "connections of an agent")
        sent = json.dumps({**request, "control": control}).encode()
        answer, errors = program.communicate(sent)
    try:
        return json.loads(answer)
    except ValueError:
        words = errors.decode(errors="replace").strip()[-2000:]
        raise RuntimeError(f"the agent's sandbox gave no answer: {words}") from None


def _pass_on(control: socket.socket, address: tuple[str, int]) -> None:
    """Take the socket that listens in the sandbox, and connect whoever comes with an address."""
    _, files, _, _ = socket.recv_fds(control, 1, 1)
    for file in files:  # none, where there is no network of its own
        listening = socket.socket(fileno=file)
        while True:
            client, _ = listening.accept()
            threads.begin(partial(_connect, client, address), "a connection of an agent")


def _connect(client: socket.socket, address: tuple[str, int]) -> None:
    with client, socket.create_connection(address) as server:
        sending = threads.begin(partial(_copy, client, server), "requests of an agent")
        _copy(server, client)
        sending.result()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Send on what comes, to its end."""
    with contextlib.suppress(OSError):  # one of them is gone: so is the connection
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
