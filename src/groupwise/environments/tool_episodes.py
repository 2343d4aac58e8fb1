"""Episodes: the policy's turns go to tools and environments, and their answers come back as token ids before the next turn.

A turn with tool calls gets their results; in an environment with `step` any other turn goes there; else such a turn ends the
episode.  What is trained is never tokenised again: an answer's ids are the chat template's suffix (`data/turns.py`).  Where the
template rewrites earlier turns and the recipe says `split`, the next turn is drawn behind the whole conversation as the template
writes it, encoded anew; it is context and not trained.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from groupwise.config.settings import EnvironmentSettings
from groupwise.data.encoding import cut_left
from groupwise.data.messages import Messages
from groupwise.data.rendering import shown_template
from groupwise.data.templates import Template, unmarked
from groupwise.environments.chat_codec import ChatCodec, recorded
from groupwise.environments.conversation import NOTHING, Reply, Stream
from groupwise.environments.runtime import (
    EnvironmentBroken,
    EnvironmentEnd,
    EnvironmentKind,
    ToolResult,
    ToolRuntime,
    error_text,
)
from groupwise.environments.schemas import name_of, typed, wrong_arguments
from groupwise.environments.tool_calls import BrokenCall, ParsedCall, ParsedTurn, form_of, opens_thinking
from groupwise.errors import ConfigError, DataError, EnvironmentFailure
from groupwise.records import Episode, Finish
from groupwise.utils import threads
from groupwise.utils.spelling import nearest
from groupwise.utils.terminal import logger

log = logger(__name__)

BROKEN_SHARE = 0.1
"""An environment that fails in more of its episodes than this, and more than once, cannot be trained in."""


class ToolWorld:
    """An `EpisodeWorld` of tools and environments, for one tokenizer."""

    def __init__(self, runtime: ToolRuntime, settings: EnvironmentSettings, template: Template, eos_ids: tuple[int, ...]) -> None:
        """template: of the prompts.   Raises ConfigError if the chat template shows no calls in a form that is known."""
        self.runtime, self.settings, self.prompts = runtime, settings, template
        self.codec = ChatCodec(template.tokenizer, eos_ids)
        """Rows are encoded as the recipe says; results and observations are never more than text."""
        shown = shown_template(template.tokenizer, tools=True)
        if any(kind.schemas for kind in runtime.kinds.values()) and form_of(shown) is None:
            raise ConfigError(
                "the chat template shows tool calls in no form that is known (<tool_call> with JSON or with <function=...>, "
                "Llama's bare JSON, gpt-oss's channels): take a model that was made for tools, or set model.chat_template to a "
                "template with <tool_call>"
            )
        self._begun, self._broken, self._lock = 0, 0, threading.Lock()

    def begin(self, stream: Stream, *, seed: int) -> ToolEpisode:
        """The episode of one completion.  Raises DataError for a row that names no environment, or whose prompt is no chat."""
        prompt = stream.prompt
        kind = self.runtime.kind_of(prompt.row, f"prompt {prompt.id}")
        with self._lock:
            self._begun += 1
        return ToolEpisode(self, stream, kind, zlib.crc32(f"{seed}/{prompt.id}".encode()))

    def broken(self, why: str) -> None:
        """Count an episode whose environment failed.  Raises EnvironmentFailure if there are too many."""
        with self._lock:
            self._broken += 1
            message = f"{self._broken} of {self._begun} episodes were broken off because their environment failed; the last: {why}"
            many = self._broken > max(1.0, BROKEN_SHARE * self._begun)
        if many:
            raise EnvironmentFailure(message)
        log.warning("%s", message)

    def close(self) -> None:
        """Close the runtime."""
        self.runtime.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What came of a turn."""

    calls: Sequence[ParsedCall | BrokenCall] = ()
    results: Sequence[ToolResult] = ()
    """One of each call."""
    answers: Messages = field(default_factory=list)
    reward: float | None = None
    finish: Finish | None = None
    """Why the episode is over; None: it continues."""
    failure: str = ""
    """Why the environment can be asked nothing more."""


class ToolEpisode:
    """One episode: a `Conversation`."""

    def __init__(self, world: ToolWorld, stream: Stream, kind: EnvironmentKind, seed: int) -> None:
        """Use `ToolWorld.begin`."""
        self._world, self._stream, self._kind, self._seed = world, stream, kind, seed
        self._prompt = stream.prompt
        self._environment = world.runtime.make(kind)
        self._tools, self._variables = kind.schemas or None, world.prompts.variables_of(stream.prompt.row)
        self._written: Messages = []
        """The whole conversation, with marks around what is encoded as text."""
        self._text = stream.prompt.text
        """Of what the next turn is drawn behind: all of it where the past is split, else its end."""
        self._messages: list[Mapping[str, Any]] = []
        """Those behind the prompt."""
        self._end: EnvironmentEnd | None = None
        self._failed = False
        self._broken_off = False
        """True if it was ended from outside: what fails then is no failure."""
        self._deadline = 0.0
        self._pending: Future[Reply] | None = None

    def open(self) -> Future[Reply]:
        """Reset the environment in a thread; its observation ends the prompt."""
        return self._begin(self._open)

    def answer(self) -> Future[Reply]:
        """Carry out the calls of the turn, or `step`, in a thread."""
        return self._begin(self._answer)

    def close(self, finish: Finish) -> Episode:
        """End the environment, and the episode as a record.  Kills what still runs where sampling was broken off."""
        if self._pending is not None and not self._pending.done():
            self._broken_off = True
            self._environment.kill()
        elif self._end is None:
            self._end_environment(judged=finish is not Finish.ERROR)
        end, turns = self._end or EnvironmentEnd(), tuple(self._stream.turns)
        reward = end.reward
        if reward is None and self._kind.steps and not self._failed and finish is not Finish.ERROR:
            reward = sum(turn.reward or 0.0 for turn in turns)  # 0 of an episode that was over before anything was worth something
        return Episode(
            turns=turns,
            messages=tuple(self._messages),
            branches=tuple(self._stream.branches),
            reward=reward,
            environment=self._kind.name or (self._kind.title if self._kind.resets else ""),
            state=end.state,
        )

    # ---- inside --------------------------------------------------------------------------------------------------------------

    def _begin(self, work: Callable[[], Reply]) -> Future[Reply]:
        self._pending = threads.begin(work, "episode")
        return self._pending

    @property
    def _left(self) -> float:
        """Seconds that a call may take."""
        return max(0.0, min(self._world.settings.tool_timeout, self._deadline - time.monotonic()))

    def _open(self) -> Reply:
        codec = self._world.codec
        self._deadline = time.monotonic() + self._world.settings.episode_timeout
        if self._prompt.messages is None:
            raise EnvironmentFailure("conversations are chat messages, and the prompt is a plain string: set data.chat: true")
        content = self._world.prompts.marked([dict(message) for message in self._prompt.messages])
        assert not isinstance(content, str)
        self._written = content
        try:
            observation = self._environment.reset(self._prompt.row, seed=self._seed, seconds=self._left)
        except EnvironmentBroken as broken:
            return self._over(broken.finish, str(broken))
        if not observation:
            return Reply(NOTHING)
        (observation,), _ = self._cut([observation])
        self._written = _appended(content, observation, codec.template)
        text = codec.written(self._written, self._tools, self._variables)
        context, self._text = codec.encode(text), unmarked(text)
        if self._prompt.cut:
            context = cut_left(context, self._prompt.tokens.size, codec.template.bos_id)
        return Reply(NOTHING, context=None if np.array_equal(context, self._prompt.tokens) else context)

    def _answer(self) -> Reply:
        began, turn = time.monotonic(), self._stream.turns[-1]
        tokens = self._stream.tokens[turn.begin : turn.end]
        parsed = self._world.codec.parse(tokens, self._tools, thinking=opens_thinking(self._text))
        message = parsed.message()
        self._messages.append(message)
        self._written.append(message)
        outcome = self._outcome(parsed, turn.finish)
        answers, over, cut = outcome.answers, outcome.finish, False
        if answers:
            texts, cut = self._cut([answer["content"] for answer in answers])
            answers = [{**answer, "content": text} for answer, text in zip(answers, texts, strict=True)]
        if over is None and len(self._stream.turns) >= self._world.settings.max_turns:
            over = Finish.TURNS
        if over is None and self._deadline <= time.monotonic():
            over = Finish.DEADLINE
        self._stream.turns[-1] = replace(
            turn,
            finish=Finish.TOOL_CALLS if parsed.calls and turn.finish is not Finish.LENGTH else turn.finish,
            calls=tuple(
                recorded(call, answer["content"], result.seconds, result.failure)
                for call, result, answer in zip(outcome.calls, outcome.results, answers, strict=False)
            ),
            answer="\n".join(answer["content"] for answer in answers) if over is None else "",
            seconds=time.monotonic() - began,
            truncated=cut,
            reward=outcome.reward,
        )
        return self._continue(answers) if over is None else self._over(over, outcome.failure)

    def _outcome(self, parsed: ParsedTurn, finish: Finish) -> _Outcome:
        """What comes of a turn: results of its calls, an observation, or the end of the episode."""
        if finish is Finish.LENGTH:
            return _Outcome(finish=Finish.LENGTH)
        if self._left <= 0:
            return _Outcome(finish=Finish.DEADLINE)
        if parsed.calls:
            results, over = self._carry_out(parsed.calls)
            answers = [
                {"role": "tool", "name": _name(call), "tool_call_id": call.id, "content": result.text}
                for call, result in zip(parsed.calls, results, strict=True)
            ]
            why = "a call took the environment with it" if over is not None else ""
            return _Outcome(calls=parsed.calls, results=results, answers=answers, finish=over, failure=why)
        if not self._kind.steps:
            return _Outcome(finish=finish)
        try:
            step = self._environment.step(parsed.content, seconds=self._left)
        except EnvironmentBroken as broken:
            return _Outcome(finish=broken.finish, failure=str(broken))
        answer = {"role": "user", "content": step.observation}
        return _Outcome(answers=[answer], reward=step.reward, finish=Finish.DONE if step.done else None)

    def _continue(self, answers: Messages) -> Reply:
        """The reply after which the next turn is drawn."""
        codec, turn, tokens = self._world.codec, self._stream.turns[-1], self._stream.tokens
        self._messages += answers
        self._written += [codec.template.shielded(answer) for answer in answers]
        suffix = codec.after(tokens[-1] if turn.end > turn.begin else -1, answers, self._tools, self._variables)
        if self._world.settings.past == "keep":
            self._text = suffix.text
            return Reply(suffix.tokens)
        ids = self._stream.ids()[turn.begin - turn.end - 1 :]  # some tokenizers begin a text otherwise than they go on
        self._text += codec.decode(ids).removeprefix(codec.decode(ids[:1])) + suffix.text
        context = self._rewritten()
        return Reply(suffix.tokens) if context is None else Reply(NOTHING, context=context)

    def _rewritten(self) -> np.ndarray | None:
        """The whole conversation as the template writes it; None where that is the text of the stream, or it refuses."""
        codec = self._world.codec
        try:
            text = codec.written(self._written, self._tools, self._variables)
        except DataError as refused:  # a result without a call that can be read: there is no inference to be like
            log.debug("%s: kept as it was sampled: %s", self._prompt.id, refused)
            return None
        if unmarked(text) == self._text:
            return None
        ids, self._text = codec.encode(text), unmarked(text)
        return cut_left(ids, max(1, ids.size - self._prompt.cut), codec.template.bos_id) if self._prompt.cut else ids

    def _over(self, finish: Finish, why: str = "") -> Reply:
        """The episode ends: its environment is asked for its reward, and closed.   why: it has failed, and cannot be asked."""
        if why:
            self._end, self._failed = EnvironmentEnd(), True
            self._environment.kill()
            if finish is Finish.ERROR and not self._broken_off:
                self._world.broken(why)
        elif not self._end_environment(judged=True):
            finish = Finish.ERROR
        return Reply(NOTHING, finish=finish)

    def _end_environment(self, *, judged: bool) -> bool:
        """False if the environment failed."""
        self._end = EnvironmentEnd()
        try:
            self._end = self._environment.end(judged, seconds=self._world.settings.tool_timeout)
        except EnvironmentBroken as broken:
            self._environment.kill()
            if judged and not self._broken_off:
                self._world.broken(str(broken))
            self._failed = True
            return False
        return True

    def _carry_out(self, calls: Sequence[ParsedCall | BrokenCall]) -> tuple[list[ToolResult], Finish | None]:
        """The result of each call, in their order, and why the episode cannot continue, if it cannot."""
        known = {name_of(schema): schema for schema in self._kind.schemas}
        refused = [_refusal(call, known) for call in calls]
        wanted = [call for call, no in zip(calls, refused, strict=True) if no is None and isinstance(call, ParsedCall)]
        results, over = self._called([(call.name, typed(known[call.name], call.arguments)) for call in wanted])
        carried = iter(results)
        return [no or next(carried) for no in refused], over

    def _called(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[ToolResult], Finish | None]:
        """The calls' results.  Each call has a limit of its own, and several, one after the other, have the episode's, too."""
        if len(calls) < 2:
            return self._environment.call(calls, seconds=self._left)
        late = threading.Event()
        end = threading.Timer(self._deadline - time.monotonic(), lambda: (late.set(), self._environment.kill()))
        end.daemon = True
        end.start()
        try:
            results, over = self._environment.call(calls, seconds=self._left)
        finally:
            end.cancel()
            end.join()
        return results, Finish.DEADLINE if late.is_set() else over

    def _cut(self, texts: Sequence[str]) -> tuple[list[str], bool]:
        """Texts within the budget of one answer, and whether something is missing.  They share it evenly if it is too small."""
        settings, count = self._world.settings, self._world.codec.count
        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # half of a character has no ids
        size = sum(len(text.encode()) for text in texts)
        if size <= settings.max_observation_bytes and sum(map(count, texts)) <= settings.max_observation_tokens:
            return list(texts), False
        most, length = settings.max_observation_tokens // len(texts), settings.max_observation_bytes // len(texts)
        return [truncated(text, length, most, count) for text in texts], True


def _refusal(call: ParsedCall | BrokenCall, known: Mapping[str, Mapping[str, Any]]) -> ToolResult | None:
    """Why a call is not carried out; None if it is.   known: the tools by name."""
    if isinstance(call, BrokenCall):
        return ToolResult(text=error_text(call.why), failure="unreadable")
    if call.name not in known:
        close = nearest(call.name, known)
        hint = f"did you mean {close}?" if close else f"there are: {', '.join(known)}"
        return ToolResult(text=error_text(f"there is no tool {call.name!r}; {hint}"), failure="unknown")
    wrong = wrong_arguments(known[call.name], call.arguments)
    return None if wrong is None else ToolResult(text=error_text(wrong), failure="arguments")


def truncated(text: str, most_bytes: int, most_tokens: int, tokens: Any) -> str:
    """The beginning of a text that is too long, with a mark that says how much is missing.

    >>> truncated("abcdefghijklmnopqrstuvwxyz" * 4, 60, 60, len)
    'abcdefghijklmnopqrstuvwxyzabcdefghi\\n[69 characters left out]'
    """

    def fits(length: int) -> bool:
        shown = _marked(text, length)
        return len(shown.encode()) <= most_bytes and tokens(shown) <= most_tokens

    low, high = 0, min(len(text), most_bytes)
    if fits(len(text)):
        return text
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return _marked(text, low)


def _marked(text: str, length: int) -> str:
    return text if length >= len(text) else f"{text[:length]}\n[{len(text) - length:,} characters left out]"


def _appended(messages: Messages, observation: str, template: Template) -> Messages:
    """Messages with an observation behind the text of the last one, which is never more than text."""
    last = messages[-1]
    shown = template.shielded({"role": "user", "content": observation})["content"]
    content = last["content"]
    if isinstance(content, list):
        return [*messages[:-1], {**last, "content": [*content, {"type": "text", "text": shown}]}]
    return [*messages[:-1], {**last, "content": f"{content or ''}{shown}"}]


def _name(call: ParsedCall | BrokenCall) -> str:
    return call.name if isinstance(call, ParsedCall) else "error"
