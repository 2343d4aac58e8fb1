"""A request on its way to a server, and where its answer goes."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Any

from groupwise.rollout.vllm.member import Member

Answer = tuple[str, str, Any]
"""Who answers, name of the request, what was answered."""
Answers = queue.SimpleQueue[Answer | Exception]


@dataclass(eq=False, slots=True)
class Request:
    """Completions that are asked for; at any time at most one server has the request."""

    name: str
    """It names the conversation too: the turns of one have the same name."""
    body: Any
    rows: int
    """Completions in it."""
    oldest: int
    """The version that none of its tokens may be older than."""
    answers: Answers
    member: Member | None = None
    """The server that it was sent to last."""
    label: str = ""
    """The version that the server had then."""
    refused: float = 0.0
    """When a server refused it first."""
    stale: int = 0
    """Answers to it that other weights have drawn."""
    withdrawn: bool = False
    """Nobody waits for the answer."""

    def answer(self, who: str, answer: Any) -> None:
        """Hand the answer to who waits for it."""
        if not self.withdrawn:
            self.answers.put((who, self.name, answer))

    def fail(self, error: Exception) -> None:
        """Raise an error where the answer is waited for."""
        if not self.withdrawn:
            self.answers.put(error)
