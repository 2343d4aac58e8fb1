"""The stream of one completion, and the protocols between an engine, which draws turns, and
environments, which answer them.

An engine with an `Environment` asks it for a `Conversation` per completion.  It waits for `open`,
draws a turn into the completion's `Stream`, calls `answer`, and decodes another completion until
the reply is there; then it appends the reply's ids, which the policy did not write, and draws the
next turn.  Nothing is decoded and encoded again on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from groupwise.records import Branch, Episode, Finish, Prompt, Turn

NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """The environment's answer to a turn, or its text before the first one."""

    tokens: np.ndarray
    """int64 (n,): ids to append before the next turn; empty where the episode is over, and usually
    before the first turn.
    """
    finish: Finish | None = None
    """Why the episode is over; None: it continues."""
    context: np.ndarray | None = None
    """int64 (c,): the next turn is drawn behind these ids instead of behind the stream
    (`records.Branch`); `tokens` is then empty."""
    limit: int | None = None
    """Most tokens of the next turn, where it may have fewer than the completion has room for.  A
    turn that reaches it ends with LENGTH, and the episode continues."""


@dataclass(slots=True, eq=False)
class Stream:
    """The ids of one completion as they grow, of one turn or of several, and what each was drawn
    behind.

    An engine writes it.  Between the end of a turn and the reply nobody does, and the completion's
    conversation reads it.  What the conversation learns of a turn it writes into `turns`.
    """

    prompt: Prompt
    index: int
    """Index in the prompt's group."""
    limit: int
    """The most tokens it may have, answers included."""
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    """Log-probability of each token, nats, as in `Rollout.behavior_logp`."""
    version: list[int] = field(default_factory=list)
    """Version of the weights that drew each token."""
    support: list[np.ndarray] = field(default_factory=list)
    """The ids that each token could have been, where sampling truncates."""
    turn: int = 0
    """Place of the first token of the turn that is being drawn, or of the next one."""
    end: int = -1
    """The most tokens that it may have at the end of that turn: its limit, or what the reply says
    of the turn.
    """
    context: np.ndarray | None = None
    """What it is drawn behind since `begin`; None: its prompt."""
    begin: int = 0
    """Place of the first token that was drawn behind `context`."""
    untrained: list[tuple[int, int]] = field(default_factory=list)
    """Spans of tokens that are not trained: the policy did not write them, or nobody was to learn
    from them.
    """
    branches: list[Branch] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """Turns that have ended, where an environment answers them."""
    conversation: Conversation | None = None
    reply: Future[Reply] | None = None
    """The environment's reply, while it is waited for."""

    def __post_init__(self) -> None:
        self.end = self.limit

    @property
    def behind(self) -> np.ndarray:
        """The ids that stand before token `begin`."""
        return self.prompt.tokens if self.context is None else self.context

    @property
    def own(self) -> int:
        """Tokens behind `behind`."""
        return len(self.tokens) - self.begin

    @property
    def size(self) -> int:
        """Tokens that the next one is drawn behind."""
        return self.behind.size + self.own

    @property
    def written(self) -> list[int]:
        """The tokens of the turn so far."""
        return self.tokens[self.turn :] if self.turn else self.tokens

    @property
    def room(self) -> int:
        """How many tokens the turn may have, those that it has included."""
        return self.end - self.turn

    @property
    def left(self) -> int:
        """How many more tokens the turn may have."""
        return self.end - len(self.tokens)

    def ids(self) -> np.ndarray:
        """int64: all that the next token is drawn behind."""
        return np.concatenate([self.behind, np.array(self.tokens[self.begin :], np.int64)])

    def through(self, turn: Turn) -> np.ndarray:
        """int64: what a turn was drawn behind, and the turn.  Any thread may ask for a turn that
        has ended.
        """
        behind, begin = self.prompt.tokens, 0
        for branch in self.branches:
            if branch.begin <= turn.begin:
                behind, begin = branch.context, branch.begin
        return np.concatenate([behind, np.array(self.tokens[begin : turn.end], np.int64)])

    def add(
        self, tokens: Sequence[int], logp: Sequence[float], version: int | Sequence[int]
    ) -> None:
        """Tokens that the policy has drawn.   version: of all of them, or of each."""
        self.tokens += tokens
        self.logp += logp
        self.version += [version] * len(tokens) if isinstance(version, int) else version

    def end_turn(self, finish: Finish) -> None:
        """The tokens since `turn` are a turn.  finish: EOS, STOP, or LENGTH where the turn has
        reached its end.
        """
        self.turns.append(Turn(begin=self.turn, end=len(self.tokens), finish=finish))

    def take(self, reply: Reply, version: int, *, limit: int, support: bool = False) -> None:
        """Append what a reply says; the next turn begins behind it.

        limit: the most tokens that the completion may have from here on.   version: of the weights
            at the moment.   support: the stream has a support for each token.
        """
        have = len(self.tokens)
        if reply.context is not None:
            self.context, self.begin, self.limit = reply.context, have, limit
            self.branches.append(Branch(begin=have, context=reply.context))
        elif n := reply.tokens.size:
            self.untrained.append((have, have + n))
            self.add(reply.tokens.tolist(), [0.0] * n, version)
            self.support += [NOTHING] * n if support else []
        self.turn = len(self.tokens)
        self.end = self.limit if reply.limit is None else min(self.limit, self.turn + reply.limit)

    def trained(self) -> np.ndarray:
        """bool: the tokens that the policy wrote and that are trained."""
        trained = np.ones(len(self.tokens), dtype=bool)
        for begin, end in self.untrained:
            trained[begin:end] = False
        return trained


class Conversation(Protocol):
    """One episode.  Its futures may fail with EnvironmentFailure, which ends the run."""

    def open(self) -> Future[Reply]:
        """Called once, before the first turn."""
        ...

    def answer(self) -> Future[Reply]:
        """The policy has written a turn: the last of `Stream.turns`."""
        ...

    def close(self, finish: Finish) -> Episode:
        """End the episode and close its environment; the record of what happened in it.

        finish: why it is over: the conversation's own reason, or LENGTH where there is no room for
            a reply.  Called once for every conversation that was begun, also when sampling is
            interrupted."""
        ...


class Environment(Protocol):
    """The episodes of a run: makes a `Conversation` for each completion.  It may be used by several
    threads at once.
    """

    def begin(self, stream: Stream, *, seed: int) -> Conversation:
        """The episode of one completion.   seed: of the sampling."""
        ...

    def close(self) -> None:
        """End everything that it has started; harmless if called again."""
        ...
