"""The conversations of completions, which every engine shares whose turns a world answers.

An engine draws a turn and hands it over (`Conversations.turn`); when the world has answered, `Conversations.hear` puts the reply
into the completion's stream: more tokens before the next turn, another context, or the end of the episode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, wait

import numpy as np

from groupwise.environments.conversation import NOTHING, Conversation, EpisodeWorld, Reply, Stream
from groupwise.errors import EngineError
from groupwise.models.policy import Policy
from groupwise.records import Finish, Rollout, Sampling
from groupwise.rollout.engine import make_rollout, sequence_room

CONVERSATIONS_PER_ROW = 4
"""Most conversations that have been begun and are not over, for each completion that an engine decodes at a time: what it keeps of
the others takes memory."""


class Conversations:
    """Those of one call of `generate`, as a context manager: all that were begun are closed when it is left."""

    def __init__(
        self, policy: Policy, world: EpisodeWorld | None, sampling: Sampling, seed: int, *, keep_special_tokens: bool = False
    ) -> None:
        self.policy, self.world, self.sampling, self.seed = policy, world, sampling, seed
        self.keep_special_tokens = keep_special_tokens
        self._open: dict[Stream, Conversation] = {}

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

    def begin(self, one: Stream) -> None:
        """Begin the conversation of a completion; its `reply` will say what stands before the first turn."""
        assert self.world is not None and one.conversation is None
        one.conversation = self._open[one] = self.world.begin(one, seed=self.seed)
        one.reply = one.conversation.open()

    def turn(self, one: Stream, finish: Finish) -> None:
        """The turn has ended; the completion's `reply` will say how it continues."""
        assert one.conversation is not None and one.reply is None
        one.end_turn(finish)
        one.reply = one.conversation.answer()

    def hear(self, one: Stream, version: int) -> Rollout | None:
        """Take the reply, which must be there; the record of a completion that is over with it, None of one that continues.

        version: of the weights at the moment.   Raises what the world failed with, and EngineError for a reply behind which nothing
        can be drawn.
        """
        assert one.reply is not None
        reply, one.reply = one.reply.result(), None
        finish = self._take(one, reply, version)
        return None if finish is None else self.end(one, finish)

    def _take(self, one: Stream, reply: Reply, version: int) -> Finish | None:
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
        limit = one.limit
        if reply.context is not None:
            if reply.tokens.size or not reply.context.size:
                raise EngineError(f"{name} has a context of {reply.context.size} ids and {reply.tokens.size} tokens behind it: "
                                  "what the next turn is drawn behind belongs into the context")  # fmt: skip
            limit = min(self.sampling.max_new_tokens, have + sequence_room(self.policy, reply.context.size))
        if have + reply.tokens.size >= limit:
            return Finish.LENGTH
        one.take(reply, version, limit=limit, support=self.sampling.truncates)
        return None

    def end(self, one: Stream, finish: Finish) -> Rollout:
        """The record of a completion that is over."""
        episode = None
        if one.conversation is not None:
            del self._open[one]
            episode = one.conversation.close(finish)
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
            trained=one.trained(),
            episode=episode,
        )


def await_one(waiting: Iterable[Stream]) -> None:
    """Return when the reply to one of these is there."""
    wait([one.reply for one in waiting if one.reply is not None], return_when=FIRST_COMPLETED)
