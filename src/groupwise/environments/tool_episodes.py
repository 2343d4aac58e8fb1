"""Episodes: the policy's turns go to tools and environments, and their answers come back as token
ids before the next turn.

A turn with tool calls gets their results; in an environment with `step` any other turn goes there;
else such a turn ends the episode.  What is trained is never tokenised again: an answer's ids are
the chat template's suffix (`data/turns.py`).  Where the template rewrites earlier turns and the
recipe says `split`, the next turn is drawn behind the whole conversation as the template writes it,
encoded anew; it is context and not trained.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from groupwise.config.settings import EnvironmentSettings
from groupwise.data.encoding import cut_left
from groupwise.data.messages import Messages, variables_in
from groupwise.data.rendering import shown_template
from groupwise.data.templates import Template, unmarked
from groupwise.environments.chat_codec import ChatCodec, recorded
from groupwise.environments.conversation import NOTHING, Reply, Stream
from groupwise.environments.runtime import (
    EnvironmentBroken,
    EnvironmentKind,
    ToolResult,
    ToolRuntime,
    error_text,
)
from groupwise.environments.schemas import WrongArguments, name_of, typed
from groupwise.environments.tool_calls import (
    BrokenCall,
    ParsedCall,
    ParsedTurn,
    form_of,
    opens_thinking,
)
from groupwise.errors import ConfigError, DataError, EnvironmentFailure
from groupwise.records import Episode, Finish, ToolCall
from groupwise.utils import threads
from groupwise.utils.spelling import nearest
from groupwise.utils.terminal import logger

log = logger(__name__)

BROKEN_SHARE = 0.1
"""An environment that fails in more of its episodes than this, and more than once, cannot be
trained in.
"""


class ToolEnvironment:
    """An `Environment` of tools and environments, for one tokenizer."""

    def __init__(
        self,
        runtime: ToolRuntime,
        settings: EnvironmentSettings,
        template: Template,
        eos_ids: tuple[int, ...],
    ) -> None:
        """template: of the prompts.   Raises ConfigError if the chat template shows no calls in a
        form that is known.
        """
        self.runtime, self.settings, self.prompts = runtime, settings, template
        self.codec = ChatCodec(template.tokenizer, eos_ids)
        """Rows are encoded as the recipe says; results and observations are never more than text.
        """
        shown = shown_template(template.tokenizer, tools=True)
        if any(kind.schemas for kind in runtime.kinds.values()) and form_of(shown) is None:
            raise ConfigError(
                "the chat template shows tool calls in no form that is known (<tool_call> with JSON"
                " or with <function=...>, Llama's bare JSON, gpt-oss's channels): take a model that"
                " was made for tools, or set model.chat_template to a template with <tool_call>"
            )
        self._begun, self._broken, self._lock = 0, 0, threading.Lock()

    def begin(self, stream: Stream, *, seed: int) -> ToolEpisode:
        """The episode of one completion.  Raises DataError for a row that names no environment, or
        whose prompt is no chat.
        """
        prompt = stream.prompt
        kind = self.runtime.kind_of(prompt.row, prompt.place)
        with self._lock:
            self._begun += 1
        return ToolEpisode(self, stream, kind, zlib.crc32(f"{seed}/{prompt.id}".encode()))

    def broken(self, why: str) -> None:
        """Count an episode whose environment failed.  Raises EnvironmentFailure if there are too
        many.
        """
        with self._lock:
            self._broken += 1
            message = (
                f"{self._broken} of {self._begun} episodes were broken off because their"
                f" environment failed; the last: {why}"
            )
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

    calls: Sequence[ToolCall] = ()
    texts: Sequence[str] = ()
    """The answer: a result for each call, or an observation."""
    reward: float | None = None
    finish: Finish | None = None
    """Why the episode is over; None: it continues."""
    failure: str = ""
    """Why the environment can be asked nothing more."""


class ToolEpisode:
    """One episode: a `Conversation`."""

    def __init__(
        self, environment: ToolEnvironment, stream: Stream, kind: EnvironmentKind, seed: int
    ) -> None:
        """Use `ToolEnvironment.begin`."""
        self._environment, self._stream, self._kind, self._seed = environment, stream, kind, seed
        self._prompt = stream.prompt
        self._instance = environment.runtime.make(kind)
        self._schemas = {name_of(schema): schema for schema in kind.schemas}
        self._tools = kind.schemas or None
        self._variables = environment.prompts.with_own(variables_in(stream.prompt.row, "row"))
        self._written: Messages = []
        """The whole conversation, with marks around what is encoded as text."""
        self._text = stream.prompt.text
        """Text that the next turn is drawn behind: all of it where the past is split, else its end.
        """
        self._opening = self._prompt_text = ""
        """Text of `reset`, and the prompt with it."""
        self._messages: list[Mapping[str, Any]] = []
        """Messages behind the prompt."""
        self._ended, self._failed = False, False
        """Whether the environment has been ended, and whether because it failed."""
        self._reward: float | None = None
        self._state: Mapping[str, Any] | None = None
        self._broken_off = False
        """True if it was ended from outside: what fails then is no failure."""
        self._unused, self._deadline = environment.settings.episode_timeout, 0.0
        """Seconds that the environment has left, and when they end; while the policy samples the
        clock stands still.
        """
        self._pending: Future[Reply] | None = None

    def open(self) -> Future[Reply]:
        """Reset the environment in a thread; its observation ends the prompt."""
        self._pending = threads.begin(partial(self._timed, self._open), "episode")
        return self._pending

    def answer(self) -> Future[Reply]:
        """Carry out the calls of the turn, or `step`, in a thread."""
        self._pending = threads.begin(partial(self._timed, self._answer), "episode")
        return self._pending

    def close(self, finish: Finish) -> Episode:
        """End the environment, and the episode as a record.  Kills what still runs where sampling
        was broken off.
        """
        if self._pending is not None and not self._pending.done():
            self._broken_off = True
            self._instance.kill()
        elif not self._ended:
            self._end(judged=finish is not Finish.ERROR)
        reward = self._reward
        if reward is None and self._kind.steps and not self._failed and finish is not Finish.ERROR:
            reward = 0.0  # an episode may be over before anything was worth something
            for turn in self._stream.turns:
                reward += turn.reward or 0.0
        title = self._kind.title if self._kind.resets else ""
        return Episode(
            turns=tuple(self._stream.turns),
            messages=tuple(self._messages),
            branches=tuple(self._stream.branches),
            reward=reward,
            environment=self._kind.name or title,
            opening=self._opening,
            prompt_text=self._prompt_text,
            state=self._state,
        )

    # ---- inside

    @property
    def _left(self) -> float:
        """Seconds that a call may take."""
        until_the_end = max(0.0, self._deadline - time.monotonic())
        return min(self._environment.settings.tool_timeout, until_the_end)

    def _timed(self, stage: Callable[[], Reply]) -> Reply:
        self._deadline = time.monotonic() + self._unused
        reply = stage()
        self._unused = self._deadline - time.monotonic()
        return reply

    def _open(self) -> Reply:
        codec = self._environment.codec
        if self._prompt.messages is None:
            raise EnvironmentFailure(
                "conversations are chat messages, and the prompt is a plain string: set data.chat:"
                " true"
            )
        content = self._environment.prompts.marked(
            [dict(message) for message in self._prompt.messages]
        )
        assert not isinstance(content, str)
        self._written = content
        try:
            observation = self._instance.reset(
                self._prompt.row, seed=self._seed, seconds=self._left
            )
        except EnvironmentBroken as broken:
            return self._over(broken.finish, str(broken))
        if not observation:
            return Reply(NOTHING)
        (self._opening,), _ = self._cut([observation])
        self._written = _appended(content, self._opening, codec.template)
        text = codec.written(self._written, self._tools, self._variables)
        context = codec.encode(text)
        self._text = self._prompt_text = unmarked(text)
        if self._prompt.cut:
            context = cut_left(context, self._prompt.tokens.size, codec.template.bos_id)
            self._prompt_text = codec.decode(context)
        if np.array_equal(context, self._prompt.tokens):
            return Reply(NOTHING)
        return Reply(NOTHING, context=context)

    def _answer(self) -> Reply:
        began = time.monotonic()
        turn = self._stream.turns[-1]
        tokens = self._stream.tokens[turn.begin : turn.end]
        parsed = self._environment.codec.parse(
            tokens, self._tools, thinking=opens_thinking(self._text)
        )
        message = parsed.message()
        self._messages.append(message)
        self._written.append(message)
        outcome = self._outcome(parsed, turn.finish)
        texts, cut = self._cut(outcome.texts)
        over = outcome.finish
        if over is None and len(self._stream.turns) >= self._environment.settings.max_turns:
            over = Finish.TURNS
        if over is None and self._deadline <= time.monotonic():
            over = Finish.DEADLINE
        finish = turn.finish
        if parsed.calls and finish is not Finish.LENGTH:
            finish = Finish.TOOL_CALLS
        results = zip(outcome.calls, texts, strict=False)  # an observation is of no call
        self._stream.turns[-1] = replace(
            turn,
            finish=finish,
            calls=tuple(replace(call, result=text) for call, text in results),
            answer="\n".join(texts) if over is None else "",
            seconds=time.monotonic() - began,
            truncated=cut,
            reward=outcome.reward,
        )
        if over is not None:
            return self._over(over, outcome.failure)
        if not outcome.calls:
            return self._continue([{"role": "user", "content": text} for text in texts])
        answers = []
        for call, text in zip(parsed.calls, texts, strict=True):
            name = call.name if isinstance(call, ParsedCall) else "error"
            answers.append({"role": "tool", "name": name, "tool_call_id": call.id, "content": text})
        return self._continue(answers)

    def _outcome(self, parsed: ParsedTurn, finish: Finish) -> _Outcome:
        """What comes of a turn: results of its calls, an observation, or the end of the episode."""
        if finish is Finish.LENGTH:
            return _Outcome(finish=Finish.LENGTH)
        if self._left <= 0:
            return _Outcome(finish=Finish.DEADLINE)
        if parsed.calls:
            return self._carry_out(parsed.calls)
        if not self._kind.steps:
            return _Outcome(finish=finish)
        try:
            observation, reward, done = self._instance.step(parsed.content, seconds=self._left)
        except EnvironmentBroken as broken:
            return _Outcome(finish=broken.finish, failure=str(broken))
        return _Outcome(texts=[observation], reward=reward, finish=Finish.DONE if done else None)

    def _carry_out(self, calls: Sequence[ParsedCall | BrokenCall]) -> _Outcome:
        """The calls' results, in their order; those that cannot be carried out are told why."""
        results: list[ToolResult | None] = []
        possible: list[tuple[str, Mapping[str, Any]]] = []
        for call in calls:
            checked = self._checked(call)
            if isinstance(checked, ToolResult):
                results.append(checked)
            else:
                results.append(None)
                possible.append(checked)
        carried_out, over = self._called(possible)
        rest = iter(carried_out)
        records, texts = [], []
        for call, refused in zip(calls, results, strict=True):
            result = refused or next(rest)
            records.append(recorded(call, result.text, result.seconds, result.failure))
            texts.append(result.text)
        failure = "" if over is None else "a call took the environment with it"
        return _Outcome(calls=records, texts=texts, finish=over, failure=failure)

    def _checked(self, call: ParsedCall | BrokenCall) -> tuple[str, Mapping[str, Any]] | ToolResult:
        """The tool, and the arguments as it wants them; the result of a call that cannot be carried
        out.
        """
        if isinstance(call, BrokenCall):
            return ToolResult(text=error_text(call.why), failure="unreadable")
        if call.name not in self._schemas:
            hint = f"there are: {', '.join(self._schemas)}"
            close = nearest(call.name, self._schemas)
            if close:
                hint = f"did you mean {close}?"
            return ToolResult(
                text=error_text(f"there is no tool {call.name!r}; {hint}"), failure="unknown"
            )
        try:
            return call.name, typed(self._schemas[call.name], call.arguments)
        except WrongArguments as wrong:
            return ToolResult(text=error_text(str(wrong)), failure="arguments")

    def _called(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> tuple[list[ToolResult], Finish | None]:
        """The calls' results.  Each call has a limit of its own, and several, one after the other,
        have the episode's, too.
        """
        if len(calls) < 2:
            return self._instance.call(calls, seconds=self._left)
        late = threading.Event()
        end = threading.Timer(self._deadline - time.monotonic(), self._stop, [late])
        end.daemon = True
        end.start()
        try:
            results, over = self._instance.call(calls, seconds=self._left)
        finally:
            end.cancel()
            end.join()
        return results, Finish.DEADLINE if late.is_set() else over

    def _stop(self, late: threading.Event) -> None:
        late.set()
        self._instance.kill()

    def _continue(self, answers: Messages) -> Reply:
        """The reply after which the next turn is drawn."""
        codec, turn, tokens = self._environment.codec, self._stream.turns[-1], self._stream.tokens
        self._messages += answers
        self._written += [codec.template.shielded(answer) for answer in answers]
        last_token = tokens[-1] if turn.end > turn.begin else -1
        suffix = codec.after(last_token, answers, self._tools, self._variables)
        if self._environment.settings.past == "keep":
            self._text = suffix.text
            return Reply(suffix.tokens)
        # With the token before: some tokenizers begin a text otherwise than they go on.
        ids = self._stream.ids()[turn.begin - turn.end - 1 :]
        self._text += codec.decode(ids).removeprefix(codec.decode(ids[:1])) + suffix.text
        context = self._rewritten()
        if context is None:
            return Reply(suffix.tokens)
        return Reply(NOTHING, context=context)

    def _rewritten(self) -> np.ndarray | None:
        """The whole conversation as the template writes it; None where that is the text of the
        stream, or it refuses.
        """
        codec = self._environment.codec
        try:
            text = codec.written(self._written, self._tools, self._variables)
        except DataError as refused:
            # A result without a call that can be read: there is no inference to be like.
            log.debug("%s: kept as it was sampled: %s", self._prompt.id, refused)
            return None
        if unmarked(text) == self._text:
            return None
        ids, self._text = codec.encode(text), unmarked(text)
        if not self._prompt.cut:
            return ids
        return cut_left(ids, max(1, ids.size - self._prompt.cut), codec.template.bos_id)

    def _over(self, finish: Finish, why: str = "") -> Reply:
        """The episode ends: its environment is asked for its reward, and closed.   why: it has
        failed, and cannot be asked.
        """
        if why:
            self._break(why, counts=finish is Finish.ERROR)
        elif not self._end(judged=True):
            finish = Finish.ERROR
        return Reply(NOTHING, finish=finish)

    def _end(self, *, judged: bool) -> bool:
        """Ask the environment for its reward, and close it; False if it failed."""
        self._ended = True
        try:
            self._reward, self._state = self._instance.end(
                judged, seconds=self._environment.settings.tool_timeout
            )
        except EnvironmentBroken as broken:
            self._break(str(broken), counts=judged)
        return not self._failed

    def _break(self, why: str, *, counts: bool) -> None:
        """The environment has failed.  Raises EnvironmentFailure if too many have."""
        self._ended = self._failed = True
        self._instance.kill()
        if counts and not self._broken_off:
            self._environment.broken(why)

    def _cut(self, texts: Sequence[str]) -> tuple[list[str], bool]:
        """Texts within the budget of one answer, and whether something is missing.  They share it
        evenly if it is too small.
        """
        settings, count = self._environment.settings, self._environment.codec.count
        # Half of a character has no ids.
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
        most_bytes, most_tokens = settings.max_observation_bytes, settings.max_observation_tokens
        size = sum(len(text.encode()) for text in texts)
        if size <= most_bytes and sum(map(count, texts)) <= most_tokens:
            return texts, False
        bytes_each, tokens_each = most_bytes // len(texts), most_tokens // len(texts)
        return [truncated(text, bytes_each, tokens_each, count) for text in texts], True


def truncated(text: str, most_bytes: int, most_tokens: int, tokens: Any) -> str:
    """The beginning of a text that is too long, with a mark that says how much is missing.

    >>> truncated("abcdefghijklmnopqrstuvwxyz" * 4, 60, 60, len)
    'abcdefghijklmnopqrstuvwxyzabcdefghi\\n[69 characters left out]'
    """

    def fits(length: int) -> bool:
        shown = _marked(text, length)
        return len(shown.encode()) <= most_bytes and tokens(shown) <= most_tokens

    if fits(len(text)):
        return text
    low, high = 0, min(len(text), most_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return _marked(text, low)


def _marked(text: str, length: int) -> str:
    if length >= len(text):
        return text
    return f"{text[:length]}\n[{len(text) - length:,} characters left out]"


def _appended(messages: Messages, observation: str, template: Template) -> Messages:
    """Append an observation to the text of the last message; it is never more than text."""
    last = messages[-1]
    shown = template.shielded({"role": "user", "content": observation})["content"]
    content = last["content"]
    if isinstance(content, list):
        return [*messages[:-1], {**last, "content": [*content, {"type": "text", "text": shown}]}]
    return [*messages[:-1], {**last, "content": f"{content or ''}{shown}"}]
