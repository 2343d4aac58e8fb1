"""The completions of one call of `generate`: the conversations whose turns an environment answers,
which every engine shares, and groups.

An engine begins conversations (`Conversations.begin`), draws a turn and hands it over (`turn`).
When the environment has answered, `heard` puts the reply into the completion's stream: more tokens
before the next turn, another context, or the end of the episode."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Generic, TypeVar

import numpy as np

from groupwise.environments.conversation import NOTHING, Conversation, Environment, Reply, Stream
from groupwise.errors import EngineError
from groupwise.models.policy import Policy
from groupwise.records import Finish, Rollout, Sampling
from groupwise.rollout.engine import make_rollout, sequence_room

CONVERSATIONS_PER_ROW = 4
"""Most conversations that have been begun and are not over, for each completion that an engine
decodes at a time: what it keeps of the others takes memory."""
One = TypeVar("One", bound=Stream)


class Groups:
    """Completions that have ended, until their groups are whole."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ended: dict[str, dict[int, Rollout]] = {}

    def add(self, rollout: Rollout) -> list[tuple[Rollout, ...]]:
        """Add a completion; return its group, ordered by index, if it was the last of it."""
        group = self._ended.setdefault(rollout.prompt.id, {})
        group[rollout.index] = rollout
        if len(group) < self.size:
            return []
        del self._ended[rollout.prompt.id]
        return [tuple(group[index] for index in range(self.size))]


class Conversations(Generic[One]):
    """The conversations of one call of `generate`: a context manager that closes all when it
    is left.
    """

    def __init__(
        self,
        policy: Policy,
        environment: Environment | None,
        sampling: Sampling,
        seed: int,
        streams: Iterable[One] = (),
        *,
        rows: int,
        replied: Callable[[], None] = lambda: None,
    ) -> None:
        """streams: the completions that an environment answers.   rows: completions that the engine
        decodes at a time.

        replied: called, in any thread, when a reply is there.
        """
        self.policy, self.environment = policy, environment
        self.sampling, self.seed = sampling, seed
        self.rows, self._replied = rows, replied
        self.unbegun = deque(streams)
        """Completions whose conversations have not been begun."""
        self.listening: list[One] = []
        """Completions that wait for the environment."""
        self._open: dict[Stream, Conversation] = {}

    def __enter__(self) -> Conversations[One]:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for conversation in self._open.values():
                stack.callback(conversation.close, Finish.ERROR)
            self._open.clear()

    @property
    def unfinished(self) -> bool:
        """True while a conversation has not been begun or is not over."""
        return bool(self.unbegun or self._open)

    def begin(self, most: float = math.inf) -> None:
        """Begin at most so many conversations, as many as may be open; the environment says what
        stands before their first turns.
        """
        assert self.environment is not None
        while self.unbegun and most > 0 and len(self._open) < CONVERSATIONS_PER_ROW * self.rows:
            stream = self.unbegun.popleft()
            stream.conversation = self._open[stream] = self.environment.begin(
                stream, seed=self.seed
            )
            self._listen(stream, stream.conversation.open())
            most -= 1

    def turn(self, stream: One, finish: Finish) -> None:
        """The turn has ended; the environment says how the completion continues."""
        assert stream.conversation is not None and stream.reply is None
        stream.end_turn(finish)
        self._listen(stream, stream.conversation.answer())

    def _listen(self, stream: One, reply: futures.Future[Reply]) -> None:
        stream.reply = reply
        self.listening.append(stream)
        reply.add_done_callback(lambda _: self._replied())

    def heard(self, version: int, *, wait: bool = False) -> Iterator[tuple[One, Rollout | None]]:
        """Take the replies that are there: completions, with the record of one that is over and
        None of one that continues.

        version: of the weights at the moment.   wait: until a reply is there.
        Raises what the environment failed with, and EngineError for a reply behind which nothing
        can be drawn.
        """
        if wait:
            await_one(self.listening)
        there = [stream.reply is not None and stream.reply.done() for stream in self.listening]
        replied = list(itertools.compress(self.listening, there))
        self.listening = [
            stream for stream, done in zip(self.listening, there, strict=True) if not done
        ]
        for stream in replied:
            assert stream.reply is not None
            reply, stream.reply = stream.reply.result(), None
            finish = self._take(stream, reply, version)
            yield stream, None if finish is None else self.end(stream, finish)

    def _take(self, stream: Stream, reply: Reply, version: int) -> Finish | None:
        """Go on as the reply says; or why it is over."""
        if reply.finish is not None:
            return reply.finish
        have = len(stream.tokens)
        name = f"the environment's reply to completion {stream.index} of {stream.prompt.place}"
        for ids in (reply.tokens, NOTHING if reply.context is None else reply.context):
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.policy.vocabulary:
                raise EngineError(
                    f"{name} holds an id outside the vocabulary of {self.policy.vocabulary} tokens"
                    f" ({ids.min()} .. {ids.max()}): it was encoded with another tokenizer"
                )
        if reply.limit is not None and reply.limit < 1:
            raise EngineError(
                f"{name} lets the next turn have {reply.limit} tokens: it needs at least 1; end the"
                " episode instead"
            )
        limit = stream.limit
        if reply.context is not None:
            if reply.tokens.size or not reply.context.size:
                raise EngineError(
                    f"{name} has a context of {reply.context.size} ids and {reply.tokens.size}"
                    " tokens behind it: what the next turn is drawn behind belongs into the context"
                )
            limit = min(
                self.sampling.max_new_tokens, have + sequence_room(self.policy, reply.context.size)
            )
        if have + reply.tokens.size >= limit:
            return Finish.LENGTH
        stream.take(reply, version, limit=limit, support=self.sampling.restricts)
        return None

    def end(self, stream: Stream, finish: Finish) -> Rollout:
        """The record of a completion that is over."""
        episode = None
        if stream.conversation is not None:
            del self._open[stream]
            episode = stream.conversation.close(finish)
        return make_rollout(
            self.policy,
            stream.prompt,
            stream.index,
            stream.tokens,
            stream.logp,
            finish,
            self.sampling,
            version=np.array(stream.version, np.int64),
            support=tuple(stream.support) if self.sampling.restricts else None,
            trained=stream.trained(),
            episode=episode,
        )


def await_one(waiting: Iterable[Stream]) -> None:
    """Return when the reply to one of these is there."""
    futures.wait(
        [stream.reply for stream in waiting if stream.reply is not None],
        return_when=futures.FIRST_COMPLETED,
    )
