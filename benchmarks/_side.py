"""A process that runs one side of a comparison and answers commands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

SECONDS = 1.0
"""How often it is asked whether a process lives that does not answer."""


class SideEnded(SystemExit):
    """A side's process has ended although an answer was expected."""


class Side:
    """Starts a process and talks to it over a pipe."""

    def __init__(self, name: str, serve: Callable[..., None], *arguments: Any) -> None:
        """serve: called in the process with its end of the pipe and the arguments; it sends `ready` first."""
        context = get_context("spawn")
        self.name = name
        self.connection, far_end = context.Pipe()
        self.process = context.Process(target=serve, args=(far_end, *arguments), daemon=True)
        self.process.start()
        far_end.close()

    def receive(self) -> Any:
        """Wait for the next answer.  Raises SideEnded if the process ends before."""
        alive = True
        # Not its sentinel: a child of the process, which outlives it, would hold that open.
        while alive and not self.connection.poll(SECONDS):
            alive = self.process.is_alive()
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
        raise SideEnded(f"the process of {self.name} has ended with exit code {self.process.exitcode}")

    def ask(self, command: Any) -> Any:
        """Send a command and wait for its result.  Raises SideEnded."""
        with suppress(ConnectionError):  # `receive` tells why
            self.connection.send(command)
        return self.receive()

    def end(self) -> None:
        """Let the process go."""
        self.connection.send("end")
        self.process.join(30)
