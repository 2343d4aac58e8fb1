"""Episodes: the policy's turns go to tools and environments, and their answers come back as token ids before the next turn.

A turn with tool calls gets their results; in an environment with `step` any other turn goes there; else such a turn ends the
episode.  What is trained is never tokenised again: an answer's ids are the chat template's suffix (`data/turns.py`).  Where the
template rewrites earlier turns and the recipe says `split`, the next turn is drawn behind the whole conversation as the template
writes it, encoded anew; it is context and not trained.
"""

from __future__ import annotations

import copy
import json
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from groupwise.config.settings import EnvironmentSettings
from groupwise.data.encoding import cut_left
from groupwise.data.messages import Messages
from groupwise.data.rendering import Chat, Refusal, shown_template
from groupwise.data.templates import Template, unmarked
from groupwise.data.turns import Turns
from groupwise.environments.conversation import Reply
from groupwise.environments.environment import Broken, Ended, Environment, Kind, Result, Source
from groupwise.environments.schemas import name_of, typed, wrong_arguments
from groupwise.environments.tool_calls import BrokenCall, Call, CallForm, Said, form_of, read_turn, split_thinking
from groupwise.environments.workers import error_text
from groupwise.errors import ConfigError, DataError, EnvironmentFailure
from groupwise.records import Episode, Finish, Prompt, ToolCall, Turn
from groupwise.utils import threads
from groupwise.utils.spelling import nearest
from groupwise.utils.terminal import logger

log = logger(__name__)

BROKEN_SHARE = 0.1
"""An environment that fails in more of its episodes than this, and more than once, cannot be trained in."""
NOTHING = np.zeros(0, dtype=np.int64)


class EpisodeWorld:
    """A `World` of one source of environments, for one tokenizer."""

    def __init__(self, source: Source, settings: EnvironmentSettings, template: Template, eos_ids: tuple[int, ...]) -> None:
        """template: of the prompts.   Raises ConfigError if the chat template shows no calls in a form that is known."""
        tokenizer = copy.deepcopy(template.tokenizer)  # encoding has settings of its own: the engine's is left alone
        self.source, self.settings = source, settings
        self.prompts = replace(template, tokenizer=tokenizer)
        """What rows bring is encoded as the recipe says; what the world says (`template`) is never more than text."""
        self.template = replace(self.prompts, control_tokens="plain")
        self.text_lock = threading.Lock()
        self.turns = {
            name: Turns(tokenizer=tokenizer, eos_ids=eos_ids, tools=kind.schemas or None) for name, kind in source.kinds.items()
        }
        self._turns: dict[str, Turns] = {}
        self.form: CallForm | None = None
        if any(kind.schemas for kind in source.kinds.values()):
            self.form = call_form(template)
        self._begun, self._broken, self._lock = 0, 0, threading.Lock()

    def begin(self, prompt: Prompt, index: int, *, seed: int) -> Talk:
        """The episode of one completion.  Raises DataError for a row that names no environment, or whose prompt is no chat."""
        kind = kind_of(self.source, prompt.row, f"prompt {prompt.id}")
        with self._lock:
            self._begun += 1
        return Talk(self, prompt, kind, zlib.crc32(f"{seed}/{prompt.id}".encode()))

    def turns_of(self, kind: Kind, row: Mapping[str, Any]) -> Turns:
        """What continues the conversations of a kind, with the template's variables of a row."""
        variables = self.prompts.variables_of(row)
        key = json.dumps([kind.name, variables], sort_keys=True, default=str)
        with self._lock:
            return self._turns.setdefault(key, replace(self.turns[kind.name], variables=variables))

    def broken(self, why: str) -> None:
        """Count an episode whose environment failed.  Raises EnvironmentFailure if there are too many."""
        with self._lock:
            self._broken += 1
            said = f"{self._broken} of {self._begun} episodes were broken off because their environment failed; the last: {why}"
            many = self._broken > max(1.0, BROKEN_SHARE * self._begun)
        if many:
            raise EnvironmentFailure(said)
        log.warning("%s", said)

    def close(self) -> None:
        """Close the source."""
        self.source.close()


def kind_of(source: Source, row: Mapping[str, Any], where: str) -> Kind:
    """The kind of environment that a row asks for.  Raises DataError."""
    if set(source.kinds) == {""}:
        return source.kinds[""]
    name = row.get("environment")
    if not isinstance(name, str) or name not in source.kinds:
        got = "has no column 'environment'" if "environment" not in row else f"asks for the environment {name!r:.60}"
        raise DataError(f"{where} {got}; environment.factory has: {', '.join(source.kinds)}")
    return source.kinds[name]


def call_form(template: Template) -> CallForm:
    """The form of calls in the tokenizer's chat template.  Raises ConfigError."""
    if (form := form_of(shown_template(template.tokenizer, tools=True))) is None:
        raise ConfigError(
            "the chat template shows tool calls in no form that is known (<tool_call> with JSON or with <function=...>, Llama's "
            "bare JSON, gpt-oss's channels): take a model that was made for tools, or set model.chat_template to a template with "
            "<tool_call>"
        )
    return form


@dataclass(frozen=True, slots=True)
class _Carried:
    """A call of a turn with its result."""

    call: Call | BrokenCall
    result: Result


class Talk:
    """One episode: a `Conversation`."""

    def __init__(self, world: EpisodeWorld, prompt: Prompt, kind: Kind, seed: int) -> None:
        """Use `EpisodeWorld.begin`."""
        self._world, self._prompt, self._kind, self._seed = world, prompt, kind, seed
        self._environment: Environment = world.source.make(kind)
        self._turns_of = world.turns_of(kind, prompt.row)
        self._written: Messages = []
        """The whole conversation, with marks around what is encoded as text."""
        self._context = prompt.tokens
        """Ids that the present turn is drawn behind."""
        self._shown = prompt.text
        """Text that the present turn continues."""
        self._length = 0
        """Of the completion so far."""
        self._turns: list[Turn] = []
        self._messages: list[Mapping[str, Any]] = []
        """What was said behind the prompt."""
        self._rewards: list[float] = []
        self._ended: Ended | None = None
        self._failed = False
        self._broken_off = False
        """True if it was ended from outside: what fails then is no failure."""
        self._deadline = 0.0
        self._pending: Future[Reply] | None = None

    def open(self) -> Future[Reply]:
        """Reset the environment in a thread; its observation ends the prompt."""
        return self._begin(self._open)

    def answer(self, tokens: Sequence[int], finish: Finish, *, logp: Sequence[float], version: int) -> Future[Reply]:
        """Carry out the calls of the turn, or `step`, in a thread."""
        del logp, version
        own = list(tokens)
        return self._begin(lambda: self._answer(own, finish))

    def close(self, finish: Finish) -> Episode:
        """End the environment, and the episode as a record.  Kills what still runs where sampling was broken off."""
        if self._pending is not None and not self._pending.done():
            self._broken_off = True
            self._environment.kill()
        elif self._ended is None:
            self._end(judged=finish is not Finish.ERROR)
        ended = self._ended or Ended()
        reward = ended.reward
        if reward is None and self._kind.steps and not self._failed and finish is not Finish.ERROR:
            reward = sum(self._rewards)  # 0 of an episode that was over before anything was worth something
        return Episode(
            turns=tuple(self._turns),
            messages=tuple(self._messages),
            reward=reward,
            environment=self._kind.name or (self._kind.title if self._kind.resets else ""),
            state=ended.state,
        )

    # ---- inside --------------------------------------------------------------------------------------------------------------

    def _begin(self, work: Any) -> Future[Reply]:
        self._pending = threads.begin(work, "episode")
        return self._pending

    @property
    def _left(self) -> float:
        """Seconds that a call may take."""
        return max(0.0, min(self._world.settings.tool_timeout, self._deadline - time.monotonic()))

    def _open(self) -> Reply:
        settings, template = self._world.settings, self._world.template
        self._deadline = time.monotonic() + settings.episode_timeout
        if self._prompt.messages is None:
            raise EnvironmentFailure("conversations are chat messages, and the prompt is a plain string: set data.chat: true")
        content = self._world.prompts.marked([dict(message) for message in self._prompt.messages])
        assert not isinstance(content, str)
        self._written = content
        try:
            observation = self._environment.reset(self._prompt.row, seed=self._seed, seconds=self._left)
        except Broken as broken:
            return self._over(broken.finish, str(broken))
        if observation:
            (observation,), _ = self._cut([observation])
            self._written = _appended(content, observation, template)
            continued = self._written[-1]["role"] == "assistant"
            context, self._shown = self._rendered(add_generation_prompt=not continued, continue_final_message=continued)
            if self._prompt.cut:
                context = cut_left(context, self._prompt.tokens.size, template.bos_id)
            if not np.array_equal(context, self._context):
                self._context = context
                return Reply(NOTHING, context=context)
        return Reply(NOTHING)

    def _rendered(self, **options: bool) -> tuple[np.ndarray, str]:
        """Ids and text of the whole conversation as the template writes it.  Raises DataError where it refuses."""
        turns, template = self._turns_of, self._world.template
        chat = Chat(self._written, "the conversation", tools=turns.tools, variables=turns.variables, **options)
        with self._world.text_lock:
            ((_, text),) = template.shown([chat])
            if isinstance(text, Refusal):
                raise DataError(str(text))
            return template.encode([text], plain=[False])[0], unmarked(text)

    def _answer(self, tokens: list[int], finish: Finish) -> Reply:
        began, begin = time.monotonic(), self._length
        self._length += len(tokens)
        said = self._read(tokens, finish)
        acted = finish is not Finish.LENGTH
        asked = bool(said.calls) and acted
        turn = Turn(begin=begin, end=self._length, finish=Finish.TOOL_CALLS if asked else finish)
        self._messages.append(_message(said))
        self._written.append(_message(said))
        self._context = np.concatenate([self._context, np.asarray(tokens, dtype=np.int64)])
        carried, over, why = [], None, ""
        answers: list[dict[str, Any]] = []
        if not acted:
            over = Finish.LENGTH
        elif self._left <= 0:
            over = Finish.DEADLINE
        elif said.calls:
            carried, over = self._carry_out(said.calls)
            why = "a call took the environment with it" if over is not None else ""
            answers = [
                {"role": "tool", "name": _name(one.call), "tool_call_id": one.call.id, "content": one.result.text}
                for one in carried
            ]
        elif self._kind.steps:
            try:
                stepped = self._environment.step(said.content, seconds=self._left)
                turn = replace(turn, reward=stepped.reward)
                self._rewards += [] if stepped.reward is None else [stepped.reward]
                over = Finish.DONE if stepped.done else None
                answers = [{"role": "user", "content": stepped.observation}]
            except Broken as broken:
                over, why = broken.finish, str(broken)
        else:
            over = finish
        cut = False
        if answers:
            texts, cut = self._cut([message["content"] for message in answers])
            answers = [{**message, "content": text} for message, text in zip(answers, texts, strict=True)]
        if over is None and len(self._turns) + 1 >= self._world.settings.max_turns:
            over = Finish.TURNS
        if over is None and self._deadline <= time.monotonic():
            over = Finish.DEADLINE
        records = tuple(_record(one, message["content"]) for one, message in zip(carried, answers, strict=False))
        turn = replace(turn, calls=records, truncated=cut, seconds=time.monotonic() - began)
        self._turns.append(turn)
        if over is not None:
            return self._over(over, why)
        self._turns[-1] = replace(turn, answer="\n".join(message["content"] for message in answers))
        return self._continue(tokens[-1] if tokens else -1, answers)

    def _continue(self, last: int, answers: Messages) -> Reply:
        """The reply after which the next turn is drawn."""
        self._messages += answers
        self._written += [self._world.template.shielded(answer) for answer in answers]
        with self._world.text_lock:
            suffix = self._turns_of.after(last, answers)
        stream = np.concatenate([self._context, suffix.tokens])
        self._shown += suffix.text
        context = None if self._world.settings.past == "keep" else self._rewritten(stream)
        if context is None:
            self._context = stream
            self._length += suffix.tokens.size
            return Reply(suffix.tokens)
        self._context, self._shown = context
        return Reply(NOTHING, context=self._context)

    def _rewritten(self, stream: np.ndarray) -> tuple[np.ndarray, str] | None:
        """Ids and text of the whole conversation as the template writes it; None where that is the stream, or it refuses."""
        try:
            ids, text = self._rendered(add_generation_prompt=True)
        except DataError as refused:  # a result without a call that can be read: there is no inference to be like
            log.debug("%s: kept as it was sampled: %s", self._prompt.id, refused)
            return None
        if self._prompt.cut:
            ids = cut_left(ids, max(1, ids.size - self._prompt.cut), self._world.template.bos_id)
        with self._world.text_lock:
            same = self._decoded(ids) == self._decoded(stream)
        return None if same else (ids, text)

    def _decoded(self, ids: np.ndarray) -> str:
        return str(self._world.template.tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def _over(self, finish: Finish, why: str = "") -> Reply:
        """The episode ends: its environment is asked for its reward, and closed.   why: it has failed, and cannot be asked."""
        if why:
            self._ended, self._failed = Ended(), True
            self._environment.kill()
            if finish is Finish.ERROR and not self._broken_off:
                self._world.broken(why)
        elif not self._end(judged=True):
            finish = Finish.ERROR
        return Reply(NOTHING, finish=finish)

    def _end(self, *, judged: bool) -> bool:
        """False if the environment failed."""
        self._ended = Ended()
        try:
            self._ended = self._environment.end(judged, seconds=self._world.settings.tool_timeout)
        except Broken as broken:
            self._environment.kill()
            if judged and not self._broken_off:
                self._world.broken(str(broken))
            self._failed = True
            return False
        return True

    def _read(self, tokens: list[int], finish: Finish) -> Said:
        """The turn taken apart."""
        tokenizer, form = self._world.template.tokenizer, self._world.form if self._kind.schemas else None
        body = tokens if form == "channels" or finish is not Finish.EOS else tokens[:-1]
        tail = self._shown.rpartition("<think>")
        thinking = bool(tail[1]) and not tail[2].strip()
        if form is None:
            reasoning, content = split_thinking(str(tokenizer.decode(body, skip_special_tokens=True)), thinking)
            content = content.strip("\n") if reasoning is not None else content
            return Said(content, reasoning, (), content)
        text = str(tokenizer.decode(body, skip_special_tokens=False))
        return read_turn(text, form, thinking=thinking, tools=self._kind.schemas)

    def _carry_out(self, calls: Sequence[Call | BrokenCall]) -> tuple[list[_Carried], Finish | None]:
        """The result of each call, in their order, and why the episode cannot continue, if it cannot."""
        refused = {place: self._refusal(call) for place, call in enumerate(calls)}
        wanted = [call for place, call in enumerate(calls) if refused[place] is None and isinstance(call, Call)]
        known = {name_of(schema): schema for schema in self._kind.schemas}
        asked = [(call.name, typed(known[call.name], call.arguments)) for call in wanted]
        results, over = self._called(asked)
        found = iter(results)
        return [_Carried(call, refused[place] or next(found)) for place, call in enumerate(calls)], over

    def _called(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[Result], Finish | None]:
        """The calls' results.  Each call has a limit of its own, and several, one after the other, have the episode's, too."""
        if len(asked) < 2:
            return self._environment.call(asked, seconds=self._left)
        late = threading.Event()
        end = threading.Timer(self._deadline - time.monotonic(), lambda: (late.set(), self._environment.kill()))
        end.daemon = True
        end.start()
        try:
            results, over = self._environment.call(asked, seconds=self._left)
        finally:
            end.cancel()
            end.join()
        return results, Finish.DEADLINE if late.is_set() else over

    def _refusal(self, call: Call | BrokenCall) -> Result | None:
        """Why a call is not carried out; None if it is."""
        if isinstance(call, BrokenCall):
            return Result(text=error_text(call.why), failure="unreadable")
        known = {name_of(schema): schema for schema in self._kind.schemas}
        if call.name not in known:
            close = nearest(call.name, known)
            hint = f"did you mean {close}?" if close else f"there are: {', '.join(known)}"
            return Result(text=error_text(f"there is no tool {call.name!r}; {hint}"), failure="unknown")
        wrong = wrong_arguments(known[call.name], call.arguments)
        return None if wrong is None else Result(text=error_text(wrong), failure="arguments")

    def _cut(self, texts: Sequence[str]) -> tuple[list[str], bool]:
        """Texts within the budget of one answer, and whether something is missing.  They share it evenly if it is too small."""
        settings, tokenizer = self._world.settings, self._world.template.tokenizer

        def tokens(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False)["input_ids"])

        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # half of a character has no ids
        with self._world.text_lock:
            size = sum(len(text.encode()) for text in texts)
            short = size <= settings.max_observation_bytes
            if short and sum(map(tokens, texts)) <= settings.max_observation_tokens:
                return list(texts), False
            most, length = settings.max_observation_tokens // len(texts), settings.max_observation_bytes // len(texts)
            return [truncated(text, length, most, tokens) for text in texts], True


def truncated(text: str, most_bytes: int, most_tokens: int, tokens: Any) -> str:
    """The beginning of a text that is too long, with a mark that says how much is missing.

    >>> truncated("abcdefghijklmnopqrstuvwxyz" * 4, 60, 60, len)
    'abcdefghijklmnopqrstuvwxyzabcdefghi\\n[69 characters left out]'
    """

    def fits(kept: int) -> bool:
        shown = _marked(text, kept)
        return len(shown.encode()) <= most_bytes and tokens(shown) <= most_tokens

    low, high = 0, min(len(text), most_bytes)
    if fits(len(text)):
        return text
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return _marked(text, low)


def _marked(text: str, kept: int) -> str:
    return text if kept >= len(text) else f"{text[:kept]}\n[{len(text) - kept:,} characters left out]"


def _appended(messages: Messages, observation: str, template: Template) -> Messages:
    """Messages with an observation behind the text of the last one, which is never more than text."""
    last = messages[-1]
    shown = template.shielded({"role": "user", "content": observation})["content"]
    content = last["content"]
    if isinstance(content, list):
        return [*messages[:-1], {**last, "content": [*content, {"type": "text", "text": shown}]}]
    return [*messages[:-1], {**last, "content": f"{content or ''}{shown}"}]


def _message(said: Said) -> dict[str, Any]:
    """A turn as a chat message; what was meant as a call and is none stays in its text."""
    message = said.message()
    broken = "".join(call.text for call in said.calls if isinstance(call, BrokenCall))
    return message if not broken else {**message, "content": f"{message['content']}{broken}"}


def _name(call: Call | BrokenCall) -> str:
    return call.name if isinstance(call, Call) else "error"


def _record(one: _Carried, shown: str) -> ToolCall:
    call = one.call
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False) if isinstance(call, Call) else call.text
    return ToolCall(
        name=call.name if isinstance(call, Call) else "",
        arguments=arguments,
        result=shown,
        seconds=one.result.seconds,
        failure=one.result.failure,
    )
