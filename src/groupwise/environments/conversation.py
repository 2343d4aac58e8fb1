"""The protocols between an engine, which draws the policy's turns, and environments, which answer them.

An engine that is given a `World` asks it for a `Conversation` per completion.  It waits for `open`, draws a turn, passes it to
`answer`, and decodes another completion until the reply is there; then it appends the reply's ids, which the policy did not write,
and draws the next turn.  Nothing is decoded and encoded again on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from groupwise.records import Episode, Finish, Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """The environment's answer to a turn, or its text before the first one."""

    tokens: np.ndarray
    """int64 (n,): ids to append before the next turn; empty where the episode is over, and usually before the first turn."""
    finish: Finish | None = None
    """Why the episode is over; None: it continues."""
    context: np.ndarray | None = None
    """int64 (c,): the next turn is drawn behind these ids instead of behind the prompt and what was said (`records.Branch`);
    `tokens` is then empty."""
    limit: int | None = None
    """Most tokens of the next turn, where it may have fewer than the completion has room for.  A turn that reaches it ends with
    LENGTH, and the episode continues."""


class Conversation(Protocol):
    """One episode.  Its futures may fail with EnvironmentFailure, which ends the run."""

    def open(self) -> Future[Reply]:
        """Called once, before the first turn."""
        ...

    def answer(self, tokens: Sequence[int], finish: Finish, *, logp: Sequence[float], version: int) -> Future[Reply]:
        """The policy has written a turn.

        tokens: the turn's, as sampled.   finish: EOS, STOP, or LENGTH where the completion has no room for more, or the turn
        reached `Reply.limit`.   logp: of each token, nats, as in `Rollout.behavior_logp`.   version: of the weights that drew them;
        where it changed on the way, of the last token's.
        """
        ...

    def close(self, finish: Finish) -> Episode:
        """End the episode and close its environment; the record of what happened in it, without branches: who draws knows them.

        finish: why it is over: the conversation's own reason, or LENGTH where there is no room for a reply.  Called once for every
        conversation that was begun, also when sampling is interrupted."""
        ...


class World(Protocol):
    """The episodes of a run: makes a `Conversation` for each completion.  It may be used by several threads at once."""

    def begin(self, prompt: Prompt, index: int, *, seed: int) -> Conversation:
        """The episode of one completion; `index`: its place in the prompt's group.   seed: of the sampling."""
        ...

    def close(self) -> None:
        """End everything that it has started; harmless if called again."""
        ...
