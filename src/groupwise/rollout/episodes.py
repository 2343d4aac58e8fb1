"""Completions of several turns as they grow, and the conversations that they are: what every engine shares that talks with a world.

An engine draws a turn and hands it over (`Conversations.turn`); later, when the world has answered, it hears what comes next
(`Conversations.hear`): more tokens before the next turn, another context, or that the episode is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace

import numpy as np

from groupwise.environments.conversation import Conversation, Reply, World
from groupwise.errors import EngineError
from groupwise.models.policy import Policy
from groupwise.records import Branch, Finish, Prompt, Rollout, Sampling
from groupwise.rollout.engine import make_rollout, sequence_room

CONVERSATIONS_PER_ROW = 4
"""Most conversations that have been begun and are not over, for each completion that an engine decodes at a time: what it keeps of
the others takes memory."""
NOTHING = np.zeros(0, np.int64)
"""The support of a token that was not drawn."""


@dataclass(slots=True, eq=False)
class Completion:
    """A completion being drawn, of one turn or of several."""

    prompt: Prompt
    index: int
    limit: int
    """The most tokens it may have, answers included."""
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    support: list[np.ndarray] = field(default_factory=list)
    turn: int = 0
    """Place of the first token of the turn that is being drawn, or of the next one."""
    end: int = -1
    """The most tokens that it may have at the end of that turn: its limit, or what the world has said of the turn."""
    context: np.ndarray | None = None
    """What it is drawn behind since `begin`; None: its prompt."""
    begin: int = 0
    """Place of the first token that was drawn behind `context`."""
    answers: list[tuple[int, int]] = field(default_factory=list)
    """Stretches of tokens that the policy did not write."""
    branches: list[Branch] = field(default_factory=list)
    conversation: Conversation | None = None
    reply: Future[Reply] | None = None
    """What the world will say, while it is waited for."""

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

    def add(self, tokens: Sequence[int], logp: Sequence[float], version: int | Sequence[int]) -> None:
        """Tokens that the policy has drawn.   version: of all of them, or of each."""
        self.tokens += tokens
        self.logp += logp
        self.version += [version] * len(tokens) if isinstance(version, int) else version

    def ids(self) -> np.ndarray:
        """int64: all that the next token is drawn behind."""
        return np.concatenate([self.behind, np.array(self.tokens[self.begin :], np.int64)])


class Conversations:
    """Those of one call of `generate`, as a context manager: all that were begun are closed when it is left."""

    def __init__(
        self, policy: Policy, world: World | None, sampling: Sampling, seed: int, *, keep_special_tokens: bool = False
    ) -> None:
        self.policy, self.world, self.sampling, self.seed = policy, world, sampling, seed
        self.keep_special_tokens = keep_special_tokens
        self._open: dict[Completion, Conversation] = {}

    def __enter__(self) -> Conversations:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for conversation in self._open.values():
                stack.callback(conversation.close, Finish.ERROR)
            self._open.clear()

    @property
    def open(self) -> int:
        """How many have been begun and are not over."""
        return len(self._open)

    def begin(self, one: Completion) -> None:
        """Begin the conversation of a completion; its `reply` will say what stands before the first turn."""
        assert self.world is not None and one.conversation is None
        one.conversation = self._open[one] = self.world.begin(one.prompt, one.index, seed=self.seed)
        one.reply = one.conversation.open()

    def turn(self, one: Completion, finish: Finish) -> None:
        """The turn has ended; the completion's `reply` will say how it continues."""
        assert one.conversation is not None and one.reply is None
        one.reply = one.conversation.answer(list(one.written), finish, logp=one.logp[one.turn :], version=one.version[-1])

    def hear(self, one: Completion, version: int) -> Rollout | None:
        """Take the reply, which must be there; the record of a completion that is over with it, None of one that continues.

        version: of the weights at the moment.   Raises what the world failed with, and EngineError for a reply behind which nothing
        can be drawn.
        """
        assert one.reply is not None
        reply, one.reply = one.reply.result(), None
        finish = self._take(one, reply, version)
        return None if finish is None else self.end(one, finish)

    def _take(self, one: Completion, reply: Reply, version: int) -> Finish | None:
        """Go on as the reply says; or why it is over."""
        if reply.finish is not None:
            return reply.finish
        have, name = len(one.tokens), f"the world's reply to completion {one.index} of prompt {one.prompt.id}"
        for ids in (reply.tokens, NOTHING if reply.context is None else reply.context):
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.policy.vocabulary:
                raise EngineError(
                    f"{name} holds an id outside the vocabulary of {self.policy.vocabulary} tokens ({ids.min()} .. {ids.max()}): "
                    "it was encoded with another tokenizer"
                )
        if reply.limit is not None and reply.limit < 1:
            raise EngineError(f"{name} lets the next turn have {reply.limit} tokens: it needs at least 1; end the episode instead")
        if reply.context is None:
            if have + reply.tokens.size >= one.limit:
                return Finish.LENGTH
            self._append(one, reply.tokens, version)
        else:
            if reply.tokens.size or not reply.context.size:
                raise EngineError(f"{name} has a context of {reply.context.size} ids and {reply.tokens.size} tokens behind it: "
                                  "what the next turn is drawn behind belongs into the context")  # fmt: skip
            limit = min(self.sampling.max_new_tokens, have + sequence_room(self.policy, reply.context.size))
            if have >= limit:
                return Finish.LENGTH
            one.context, one.begin, one.limit = reply.context, have, limit
            one.branches.append(Branch(begin=have, context=reply.context))
        one.turn = len(one.tokens)
        one.end = one.limit if reply.limit is None else min(one.limit, one.turn + reply.limit)
        return None

    def _append(self, one: Completion, tokens: np.ndarray, version: int) -> None:
        """Tokens that the policy did not write."""
        if not tokens.size:
            return
        one.answers.append((len(one.tokens), len(one.tokens) + tokens.size))
        one.add(tokens.tolist(), [0.0] * tokens.size, version)
        if self.sampling.truncates:
            one.support += [NOTHING] * tokens.size

    def end(self, one: Completion, finish: Finish) -> Rollout:
        """The record of a completion that is over."""
        episode = None
        if one.conversation is not None:
            del self._open[one]
            # What was drawn behind what, the engine knows best.
            episode = replace(one.conversation.close(finish), branches=tuple(one.branches))
        trained = np.ones(len(one.tokens), dtype=bool)
        for begin, end in one.answers:
            trained[begin:end] = False
        return make_rollout(
            self.policy,
            one.prompt,
            one.index,
            one.tokens,
            one.logp,
            finish,
            self.sampling,
            version=np.array(one.version, np.int64),
            support=tuple(one.support) if self.sampling.truncates else None,
            keep_special_tokens=self.keep_special_tokens,
            trained=trained,
            episode=episode,
        )


def await_one(waiting: Iterable[Completion]) -> None:
    """Return when the reply to one of these is there."""
    wait([one.reply for one in waiting if one.reply is not None], return_when=FIRST_COMPLETED)
