"""Which run a server works for.  Trainer and server both import this file."""

from __future__ import annotations

import time


class Lease:
    """A server works for one run at a time.

    The run asks for the server again and again.  A run that was killed asks no more, and after some
    seconds another one may have the server.
    """

    def __init__(self) -> None:
        self._run = ""
        self._until = 0.0

    def ask(self, run: str, seconds: float) -> str:
        """Give the server to a run for some seconds, unless another one has it; return who has it.

        >>> lease = Lease()
        >>> lease.ask("first", 60.0), lease.ask("second", 60.0)
        ('first', 'first')
        """
        now = time.monotonic()
        if run == self._run or now >= self._until:
            self._run, self._until = run, now + seconds
        return self._run

    def end(self, run: str) -> None:
        """Let a run have the server no longer."""
        if run == self._run:
            self._until = 0.0
