"""Episodes that a harness drives: it asks the endpoint for the policy's turns, and its requests
become a conversation.

The engine uses it like any other `Environment`; `open` and `answer` are done when the harness asks
for its next turn.  A request whose ids begin with exactly the ids of the stream continues the
stream. Any other begins a branch: the harness changed or dropped the past, or several agents share
the episode.  The episode is over when the harness has ended.

What the policy wrote is never tokenised again: an assistant's message that a client repeats is
recognised and replaced by the ids that were sampled; the messages since then are appended as the
chat template's suffix (`data.turns`).  A conversation that repeats nothing, or changes what it
repeats, is rendered from where it differs.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import numpy as np

from groupwise.config.settings import EnvironmentSettings
from groupwise.environments.chat_codec import ChatCodec, ChatResponse, recorded
from groupwise.environments.conversation import NOTHING, Reply, Stream
from groupwise.environments.endpoint import Endpoint
from groupwise.environments.harness import (
    Ending,
    EpisodeRequest,
    Harness,
    HarnessRun,
    OutsideHarness,
    failure_of,
)
from groupwise.environments.requests import (
    ChatRequest,
    SampledTokens,
    TurnRequest,
    message_key,
)
from groupwise.environments.tool_calls import opens_thinking
from groupwise.errors import DataError, EnvironmentFailure
from groupwise.records import Episode, Finish, Sampling, Turn
from groupwise.utils import threads
from groupwise.utils.http import Refused
from groupwise.utils.secrets import scrubbed
from groupwise.utils.spelling import counted
from groupwise.utils.terminal import logger

log = logger(__name__)

MODEL = "policy"
"""The model's name, for clients; requests may name any."""
TICK = 0.2
"""Seconds between two looks at the deadlines."""
HOPELESS = 16
"""Episodes that fail before one succeeds, after which the harness counts as broken."""


SideRule = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], object]
"""A function of the messages and tools of a request: true if it is served and not trained."""


def no_side(messages: Sequence[Mapping[str, Any]], tools: object) -> bool:
    """Return False: every conversation is trained."""
    return False


UNKNOWN = Ending()
"""The ending of an episode of which nobody knows what it was worth."""


class HarnessEnvironment:
    """Implements `conversation.Environment`: one endpoint, and a harness for each episode."""

    def __init__(
        self,
        harness: Harness,
        codec: ChatCodec,
        settings: EnvironmentSettings,
        sampling: Sampling,
        *,
        context: int,
        vocabulary: int,
        token: str | None = None,
        is_side: SideRule | None = None,
    ) -> None:
        """sampling: of the run; requests that ask for something else are refused.   context: most
        tokens of a sequence.
        token: see `Endpoint`.   is_side: True for a conversation that is served and not trained;
            None: those without tools, in an episode in which another has tools.
        """
        self.is_side = is_side
        self.harness, self.codec, self.settings, self.sampling, self.context = (
            harness,
            codec,
            settings,
            sampling,
            context,
        )
        self._changed = threading.Condition()
        self._live: dict[str, HarnessEpisode] = {}
        self._queue: deque[HarnessEpisode] = deque()
        """Episodes whose harness waits for its start."""
        self._running: set[HarnessEpisode] = set()
        self._succeeded, self._failed = 0, 0
        self._closed = False
        host, _, port = settings.listen.rpartition(":")
        outside = harness if isinstance(harness, OutsideHarness) else None
        self.endpoint = Endpoint(
            self._live.get,
            name=MODEL,
            context=context,
            vocabulary=vocabulary,
            host=host.strip("[]"),
            port=int(port),
            token=token,
            episodes=outside,
        )
        self.endpoint.start()
        threads.begin(self._run, "episodes")

    def begin(self, stream: Stream, *, seed: int) -> HarnessEpisode:
        """An episode; its harness starts when the engine opens it."""
        episode = HarnessEpisode(self, stream, seed)
        self._live[episode.id] = episode
        return episode

    def close(self) -> None:
        """Break off every episode, then stop the endpoint."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
        for episode in list(self._live.values()):
            episode.end(Finish.ERROR, "the run was closed")
        self.harness.close()
        self.endpoint.close()

    def want(self, episode: HarnessEpisode) -> None:
        """Start the harness of an episode, now or when fewer than the limit run."""
        with self._changed:
            self._queue.append(episode)
            self._changed.notify()

    def ended(self, episode: HarnessEpisode, failure: str | None) -> None:
        """The episode needs no harness any more.   failure: empty where it succeeded, None where
        nobody knows.
        """
        with self._changed:
            if episode in self._running:
                self._running.remove(episode)
                self._succeeded, self._failed = (
                    self._succeeded + (failure == ""),
                    self._failed + bool(failure),
                )
                self._changed.notify()
            elif episode in self._queue:
                self._queue.remove(episode)
        if failure and not self._closed:
            log.warning("an episode of %s failed: %s", episode.stream.prompt.id, failure)

    def forget(self, episode: HarnessEpisode) -> None:
        """Remove a closed episode: requests for it are refused from now on."""
        self._live.pop(episode.id, None)

    def hopeless(self) -> bool:
        """True if so many episodes have failed, and none succeeded, that the run has to end."""
        return self._failed >= HOPELESS and not self._succeeded

    def _run(self) -> None:
        """Start the harnesses that wait, and look at the clocks of those that run."""
        before = time.monotonic()
        while True:
            with self._changed:
                if not self._queue or len(self._running) >= self.settings.at_once:
                    self._changed.wait(TICK)
                if self._closed:
                    return
                running = list(self._running)
                free = min(self.settings.at_once - len(running), len(self._queue))
                starting = [self._queue.popleft() for _ in range(free)]
                self._running.update(starting)
            now = time.monotonic()
            for episode in running:
                episode.tick(now - before)
            before = now
            for episode in starting:
                episode.start(self.harness)


@dataclass(slots=True, eq=False)
class _DrawnTurn:
    """A turn that was drawn, beside its record in the stream."""

    at: float
    """When, by `time.monotonic`."""
    call_ids: Sequence[str] = ()
    """Ids of the turn's calls, as the client got them."""
    keys: tuple[str, ...] = ()
    """Keys of the messages up to the turn's own, as the client will repeat them; none of a turn
    that was requested by token ids.
    """
    setting: str = ""
    """Tools, variables and agent of the request."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation with this turn."""
    tools_shown: bool | None = None
    """False for a conversation without tools; None for a turn that was requested by token ids."""
    side: bool = False
    """True if the conversation is served and not trained."""


class HarnessEpisode:
    """One episode; implements `conversation.Conversation` for the engine, and answers the
    endpoint's requests.

    At any time either the harness is at work, or its requests wait, or the engine draws a turn for
    one of them.  Threads of the engine, of the endpoint and of the harness use it at once; all that
    changes it holds its lock.
    """

    def __init__(self, environment: HarnessEnvironment, stream: Stream, seed: int) -> None:
        self.environment, self.stream, self.seed = environment, stream, seed
        self.id = secrets.token_urlsafe(18)
        self.codec = environment.codec
        self._lock = threading.RLock()
        self._next: Future[Reply] | None = None
        """What the engine waits for; None while it draws."""
        self._waiting: deque[TurnRequest] = deque()
        self._drawing: TurnRequest | None = None
        self._drawn: list[_DrawnTurn] = []
        """One of each turn of the stream."""
        self._agents: dict[str, int] = {}
        """Numbers of the agents by the sessions that they name."""
        self._stop: Callable[[], object] = lambda: None
        self._spent = 0.0
        """Seconds that the harness was at work."""
        self._full: Finish | None = None
        """Why a turn was refused: LENGTH, TURNS."""
        self._over: Finish | None = None
        """Why the episode is over; what follows says how."""
        self._ending = Ending()
        self.failure = ""
        """What the harness has failed with."""

    # ---- for the engine

    def open(self) -> Future[Reply]:
        """Start the harness; done when it asks for its first turn."""
        with self._lock:
            first = self._next = Future()
        self.environment.want(self)
        return first

    def answer(self) -> Future[Reply]:
        """Give the turn to the request that waits for it; done when the harness asks for its next
        one.
        """
        with self._lock:
            stream, turn, request = self.stream, self.stream.turns[-1], self._drawing
            assert request is not None
            version = stream.version[-1] if turn.end > turn.begin else 0
            turn, stopped_at = self._stopped(turn, request.sampling.stop)
            tokens, logp = stream.tokens[turn.begin : turn.end], stream.logp[turn.begin : turn.end]
            request.sampled.set_result(
                SampledTokens(tokens, logp, turn.finish, version, len(self._drawn), stopped_at)
            )
            self._drawn.append(_DrawnTurn(time.monotonic()))
            self._drawing, self._next = None, (following := Future())
            self._advance()
        return following

    def _stopped(self, turn: Turn, stop: Sequence[str]) -> tuple[Turn, str | None]:
        """The turn up to the first stop string of its request, and that string.

        The engine knows the run's stop strings alone, so a turn may have tokens behind those of the
        request.  They are not trained, and the next turn is not drawn behind them."""
        stopped = self.codec.stop_in(self.stream.tokens[turn.begin : turn.end], stop)
        if stopped is None:
            return turn, None
        count, stopped_at = stopped
        end = turn.begin + count
        if end < turn.end:
            self.stream.untrained.append((end, turn.end))
            turn = self.stream.turns[-1] = replace(turn, end=end, finish=Finish.STOP)
        return turn, stopped_at

    def close(self, finish: Finish) -> Episode:
        """Break the harness off and refuse what it still asks for; the episode as a record."""
        self.end(finish, None)
        self.environment.forget(self)
        with self._lock:
            if self._drawing is not None:
                self._drawing.sampled.set_exception(self._refusal())
            self._drawing, self._next, turns = None, None, self.stream.turns
            self._set_side_calls_aside()
            if self.failure and turns and not turns[-1].answer:
                turns[-1] = replace(turns[-1], answer=self.failure)
            return Episode(
                turns=tuple(turns),
                messages=self._messages(),
                branches=tuple(self.stream.branches),
                reward=self._ending.reward,
                environment=self.environment.settings.verifiers or "",
                prompt_text=self._prompt_text(),
                state=self._ending.state,
            )

    def _set_side_calls_aside(self) -> None:
        """Mark the turns of side conversations: their tokens are not trained."""
        turns = self.stream.turns
        with_tools = [drawn.keys for drawn in self._drawn if drawn.tools_shown]
        for number, drawn in enumerate(self._drawn):
            if self.environment.is_side is None and with_tools and drawn.tools_shown is False:
                # a conversation that goes on with tools is none beside them
                length = len(drawn.keys)
                drawn.side = all(keys[:length] != drawn.keys for keys in with_tools)
            if drawn.side:
                turn = turns[number] = replace(turns[number], side=True)
                self.stream.untrained.append((turn.begin, turn.end))

    def _messages(self) -> tuple[Mapping[str, Any], ...]:
        """The messages of the conversation that was continued last, of those that are trained."""
        for drawn in reversed(self._drawn):
            if drawn.messages and not drawn.side:
                return drawn.messages
        return ()

    def _prompt_text(self) -> str:
        """The context that the first trained conversation began with; empty where it is the
        prompt.
        """
        branches = self.stream.branches
        for turn in self.stream.turns:
            if not turn.side and branches and branches[0].begin <= turn.begin:
                return self.codec.decode(self.stream.through(turn)[: turn.begin - turn.end])
        return ""

    # ---- for the harness

    def start(self, harness: Harness) -> None:
        """Let the harness run, unless the episode is over by now."""
        if self._over is not None:
            return
        request = EpisodeRequest(
            id=self.id,
            row=self.stream.prompt.row,
            base_url=f"{self.environment.endpoint.url}/episodes/{self.id}/v1",
            api_key=self.id,
            model=MODEL,
            index=self.stream.index,
            seed=self.seed,
        )
        try:
            run = harness.start(request)
        except Exception as error:  # somebody else's code
            run = HarnessRun(Future())
            run.ending.set_exception(error)
        with self._lock:
            self._stop, over = run.stop, self._over is not None
        if over:
            run.stop()
        run.ending.add_done_callback(self._ended)

    def _ended(self, future: Future[Ending]) -> None:
        """The harness has ended."""
        ending, failure = Ending(), ""
        try:
            ending = future.result()
        except BaseException as error:  # whatever it is, it is this episode's
            failure = failure_of(error)
        failure = failure or ending.failure
        with self._lock:
            full, turns = self._full, self.stream.turns
            if (
                full is None
                and turns
                and turns[-1].finish is Finish.LENGTH
                and self._room(self.stream.size) < 1
            ):
                full = Finish.LENGTH
        self.end(
            full or (Finish.ERROR if failure else Finish.DONE), "" if full else failure, ending
        )

    def end(self, finish: Finish, failure: str | None, ending: Ending = UNKNOWN) -> None:
        """The episode is over, and its harness is broken off; only the first call counts.

        failure: what the harness has failed with; None: nobody knows, the engine has no use for it.
        """
        with self._lock:
            if self._over is not None:
                return
            self._over, self.failure, self._ending = finish, scrubbed(failure or ""), ending
            if finish in (Finish.LENGTH, Finish.TURNS):
                self._full = finish
            for request in self._waiting:
                if request.sampled.set_running_or_notify_cancel():
                    request.sampled.set_exception(self._refusal())
            self._waiting.clear()
            stop = self._stop
        stop()
        self.environment.ended(self, failure and self.failure)
        with self._lock:
            self._advance()

    def tick(self, seconds: float) -> None:
        """So much time has gone by: end the episode if the harness has taken too long."""
        with self._lock:
            if self._drawing is None and not self._waiting:
                self._spent += seconds
        if self._spent > self.environment.settings.episode_timeout:
            self.end(
                Finish.DEADLINE,
                f"the harness took more than {self.environment.settings.episode_timeout:g} s",
            )

    # ---- for the endpoint

    def render(self, request: ChatRequest) -> TurnRequest:
        """The turn that a chat request asks for.

        Raises Refused for sampling that differs from the run's, for a conversation that no context
        can hold, and where the chat template has no text for it."""
        request.check_against(self.environment.sampling)
        self._check_size(request)
        after = self._recognised(request)
        if after is not None:
            new, ids = (
                request.messages[len(self._drawn[after].keys) :],
                self.stream.through(self.stream.turns[after]),
            )
            try:
                tokens, text = self.codec.follow(request, int(ids[-1]), new)
            # messages that no suffix begins with; what is wrong with others, the whole conversation
            # tells
            except DataError:
                pass
            else:
                ids = np.concatenate([ids, tokens])
                if self.environment.settings.past == "split":
                    whole, text = self.codec.render(request)
                    ids = ids if text == self.codec.decode(ids) else whole
                return TurnRequest(ids, request, opens_thinking(text), new, after)
        tokens, text = self.codec.render(request)
        return TurnRequest(tokens, request, opens_thinking(text), request.messages)

    def _check_size(self, request: ChatRequest) -> None:
        """Raise Refused for more text than a context has room for.

        All episodes share one tokenizer and its lock: such a text must not be rendered.
        """
        most = self.environment.context * self.codec.longest_token
        if request.size <= most:
            return
        with self._lock:
            self._full = Finish.LENGTH
        raise Refused(
            f"no room for a turn: the request has {request.size} characters, and a context of"
            f" {self.environment.context} tokens holds at most {most}",
            code="context_length_exceeded",
        )

    def _recognised(self, request: ChatRequest) -> int | None:
        """The turn that reaches furthest into the request, with messages behind it; of equal ones
        the latest.
        """
        reach, best = 1, None
        for number, drawn in enumerate(list(self._drawn)):
            length = len(drawn.keys)
            fits = (
                length < len(request.keys)
                and drawn.setting == request.setting
                and request.keys[:length] == drawn.keys
            )
            if fits and length >= reach:
                reach, best = length, number
        return best

    def draw(self, request: TurnRequest) -> Future[SampledTokens]:
        """Queue a request for the engine; its turn, which may fail with Refused.

        Raises Refused for other sampling than the run's, or an episode that is over.
        """
        request.sampling.check_against(self.environment.sampling)
        with self._lock:
            if self._over is not None:
                raise self._refusal()
            self._waiting.append(request)
            self._advance()
        return request.sampled

    def respond(self, request: ChatRequest, thinking: bool, sampled: SampledTokens) -> ChatResponse:
        """The turn as a message, which is from now on recognised, with its calls noted for the
        record.
        """
        stop = request.stop or self.environment.sampling.stop
        response = self.codec.read(sampled, request, thinking, stop)
        with self._lock:
            turn, drawn = self.stream.turns[sampled.turn], self._drawn[sampled.turn]
            drawn.call_ids, drawn.setting = [call.id for call in response.calls], request.setting
            drawn.keys = (*request.keys, message_key(response.message))
            drawn.messages = (*request.messages, response.message)
            drawn.tools_shown = request.tools is not None
            if self.environment.is_side is not None:
                drawn.side = bool(self.environment.is_side(request.messages, request.tools))
            self.stream.turns[sampled.turn] = replace(
                turn,
                finish=(
                    Finish.TOOL_CALLS
                    if response.calls and turn.finish is not Finish.LENGTH
                    else turn.finish
                ),
                calls=tuple(map(recorded, response.calls)),
                agent=self._agents.setdefault(request.agent, len(self._agents)),
                wishes=request.wishes,
            )
        return response

    # ---- inside; the lock is held

    def _advance(self) -> None:
        """Answer the engine, if it waits and there is something to continue with."""
        if self._next is None:
            return
        if self._over is not None:
            following, self._next = self._next, None
            if self.failure and self.environment.hopeless():
                why = f"the first {HOPELESS} episodes failed, the last one so: {self.failure}"
                following.set_exception(EnvironmentFailure(why))
            else:
                following.set_result(Reply(NOTHING, finish=self._over))
        while self._next is not None and self._waiting:
            request = self._waiting.popleft()
            if not request.sampled.set_running_or_notify_cancel():
                continue
            try:
                reply = self._reply(request)
            except Refused as refused:
                request.sampled.set_exception(refused)
                continue
            self._drawing, following, self._next = request, self._next, None
            following.set_result(reply)

    def _reply(self, request: TurnRequest) -> Reply:
        """The reply with which the engine continues for a request.  Raises Refused where there is
        no room for a turn.
        """
        context = request.context
        stream = self.stream.ids()
        environment = self.environment
        first = not self.stream.turns
        follows = context.size >= stream.size and np.array_equal(context[: stream.size], stream)
        # Before the first turn nothing is appended: what the harness begins with is context, not
        # part of the completion.
        follows = follows and (context.size == stream.size or not first)
        new = context[stream.size :] if follows else NOTHING
        room = self._room(context.size, new.size)
        if len(self.stream.turns) >= environment.settings.max_turns:
            self._full = Finish.TURNS
            raise self._refusal()
        if room < 1:
            self._full = Finish.LENGTH
            raise Refused(
                f"no room for a turn: its context has {context.size} tokens of"
                f" {environment.context}, and the episode {len(self.stream.tokens) + new.size} of"
                f" {environment.sampling.max_new_tokens}",
                code="context_length_exceeded",
            )
        self._note_answer(request, new)
        limit = request.sampling.max_tokens
        return Reply(
            new,
            context=None if follows else context,
            limit=limit if limit is not None and limit < room else None,
        )

    def _room(self, context: int, new: int = 0) -> int:
        """Tokens that the next turn may have behind a context, of which so many are new."""
        return min(
            self.environment.sampling.max_new_tokens - len(self.stream.tokens) - new,
            self.environment.context - context,
        )

    def _note_answer(self, request: TurnRequest, new: np.ndarray) -> None:
        """Record the messages that answered the last turn."""
        messages, turns = request.new_messages, self.stream.turns
        which = len(turns) - 1 if messages is None else request.after
        if (
            which is None or which < 0 or turns[which].answer
        ):  # the harness continues from it a second time
            return
        turn, drawn = turns[which], self._drawn[which]
        seconds = time.monotonic() - drawn.at
        texts = {message.get("tool_call_id"): str(message["content"]) for message in messages or ()}
        share = seconds / max(1, len(turn.calls))  # when each has ended the harness alone knows
        turns[which] = replace(
            turn,
            seconds=seconds,
            answer=(
                self.codec.decode(new)
                if messages is None
                else "\n".join(str(message["content"]) for message in messages)
            ),
            calls=tuple(
                replace(call, result=texts.get(name, call.result), seconds=share)
                for name, call in zip(drawn.call_ids, turn.calls, strict=True)
            ),
        )

    def _refusal(self) -> Refused:
        if self._full is Finish.TURNS:
            turns = counted(self.environment.settings.max_turns, "turn")
            return Refused(
                f"the episode has had {turns} (environment.max_turns)", code="too_many_turns"
            )
        if self._full is Finish.LENGTH:
            return Refused(
                "the episode has no room for another turn", code="context_length_exceeded"
            )
        return Refused(f"the episode is over: {self._over}", HTTPStatus.GONE, code="episode_over")
