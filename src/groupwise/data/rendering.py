"""Rendering chat templates, which are programs that come with a checkpoint, in a process of their
own.

They run in transformers' renderer and sandbox with limits of time and memory: a template that never
ends, or takes all memory, becomes an error instead of a run that hangs.  The process starts with
the first conversation (0.6 s) and is kept; a conversation then costs about as much as rendering it
in this process.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from groupwise.data.tokenizers import CHAT_TEMPLATE
from groupwise.errors import DataError
from groupwise.utils.processes import Died, NotStarted, WorkerProcess
from groupwise.utils.terminal import escaped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 2.0
"""Processor time that one conversation may take; usual ones take less than a millisecond."""
WALL_SECONDS = 120.0
"""Time on the clock that one may take: by then something is wrong with the process."""
MEMORY = 1 << 30
"""Bytes that the process may take beyond those with which it starts."""
LENGTH = 1 << 24
"""Characters of one rendered conversation."""
CLOCK = "strftime_now"
"""The function by which a template writes the date.  As a variable of a conversation it is the
moment, a Unix time, that the function gives: a run renders all of its conversations at one moment.
"""
AT_ONCE = 64
"""Conversations of one exchange with the process."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be rendered."""

    messages: Sequence[Mapping[str, Any]]
    where: str = "messages"
    """The row, for messages about it."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    """Leave the last message open, to be continued."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """JSON schemas of the tools that the template shows to the model."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, e.g. `enable_thinking`."""

    @property
    def options(self) -> dict[str, Any]:
        """What the renderer takes beside messages and tools."""
        switches = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        variables = {name: value for name, value in self.variables.items() if name != CLOCK}
        return variables | switches

    @property
    def moment(self) -> float | None:
        """The moment that the template writes as a date; None: when it is rendered."""
        return self.variables.get(CLOCK)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason for which a template refused a conversation."""

    where: str
    why: str
    reason: str = "refused by the chat template"
    """The reason, as the report counts it."""

    def __str__(self) -> str:
        return f"{self.where}: the chat template refuses these messages: {self.why}"


def render_chats(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]) -> list[str | Refusal]:
    """The text of each conversation by the tokenizer's chat template, as `apply_chat_template`
    gives it, or why there is none.

    Raises DataError if the tokenizer has no template, or if its template runs out of time, memory,
    depth or length."""
    if not chats:
        return []
    if _renders_itself(tokenizer):
        return [_at_home(tokenizer, chat) for chat in chats]
    if not tokenizer.chat_template:
        raise DataError(
            "the prompts are chat messages but the tokenizer has no chat template: set"
            " model.chat_template, or use string prompts without data.chat"
        )
    if tokenizer.chat_template == CHAT_TEMPLATE:
        return [_ours(tokenizer, chat) for chat in chats]
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        names = ", ".join(map(repr, sorted(tokenizer.chat_template)))
        raise DataError(
            f"the tokenizer has several chat templates ({names}) and none called default: set"
            " model.chat_template"
        )
    texts: list[str | Refusal] = []
    for start in range(0, len(chats), AT_ONCE):
        texts += _RENDERER.render(tokenizer, chats[start : start + AT_ONCE])
    return texts


def shown_template(tokenizer: PreTrainedTokenizerBase, *, tools: bool) -> str:
    """The text of the chat template that writes conversations, with tools or without; empty if
    there is none.
    """
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        default = template.get("default")
        template = template.get("tool_use", default) if tools else default
    return str(template or "")


def unmentioned(names: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The names of variables that the tokenizer's chat templates do not mention: whatever their
    values, nothing changes.

    Of a tokenizer with a renderer of its own none is known.
    """
    if _renders_itself(tokenizer):
        return []
    template = tokenizer.chat_template
    text = str(template or "")
    if isinstance(template, Mapping):
        text = "\n".join(map(str, template.values()))
    idle = []
    for name in names:
        mentioned = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)
        if name != CLOCK and mentioned is None:
            idle.append(name)
    return idle


def _renders_itself(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the tokenizer's class has a renderer of its own and not transformers' templates."""
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template


def _at_home(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str | Refusal:
    """Rendered in this process."""
    import jinja2

    tools: list[Any] | None = None
    if chat.tools is not None:
        tools = [dict(tool) for tool in chat.tools]
    messages = [dict(message) for message in chat.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **chat.options)
        return str(text)
    except (jinja2.TemplateError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        return Refusal(chat.where, escaped(str(error)))


def _ours(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str | Refusal:
    """Render by `CHAT_TEMPLATE`, which needs no sandbox: what transformers does around a foreign
    template costs more than the template.
    """
    if chat.continue_final_message:
        return _at_home(tokenizer, chat)
    try:
        return _our_template()(chat.messages, chat.tools, chat.add_generation_prompt)
    except Exception:  # _at_home finds out why
        return _at_home(tokenizer, chat)


@cache
def _our_template() -> Callable[..., str]:
    """`CHAT_TEMPLATE` as a macro: a template would make a context for each conversation."""
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    macro = (
        f"{{% macro chat(messages, tools, add_generation_prompt) %}}{CHAT_TEMPLATE}{{% endmacro %}}"
    )
    return environment.from_string(macro).module.chat  # type: ignore[attr-defined]


class _Renderer:
    """The process, started when it is first needed and again whenever it died.

    Threads take turns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None

    def render(
        self, tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]
    ) -> list[str | Refusal]:
        """Texts of conversations that share a tokenizer.  Raises DataError."""
        texts: list[str | Refusal] = []
        broken = -1
        with self._lock:
            while len(texts) < len(chats):
                place = len(texts)
                try:
                    with closing(self._answers(tokenizer, chats[place:])) as answers:
                        for kind, text in answers:
                            chat = chats[len(texts)]
                            if kind == "unusable":
                                raise _unusable(chat, escaped(text))
                            if kind == "refused":
                                texts.append(Refusal(chat.where, escaped(text)))
                            else:
                                texts.append(text)
                except NotStarted as error:
                    raise DataError(
                        f"the process in which chat templates run could not start: {error}"
                    ) from error.__cause__
                except (Died, TimeoutError) as error:
                    place = len(texts)
                    if isinstance(error, Died) and error.cpu:
                        why = f"it ran for {SECONDS:g} seconds on one conversation and was stopped"
                        raise _unusable(chats[place], why) from None
                    if place == broken:
                        why = f"ended: {error}"
                        if isinstance(error, TimeoutError):
                            why = f"gave no text within {WALL_SECONDS:g} s"
                        why = f"the process in which it ran {why}"
                        raise _unusable(chats[place], why) from None
                    broken = place  # something else may have ended it: once more
        return texts

    def _answers(
        self, tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]
    ) -> Generator[tuple[str, str], None, None]:
        if self._process is None or not self._process.alive():
            self._process = WorkerProcess(
                "groupwise.data.rendering:serve_templates",
                memory=MEMORY,
                cpu_seconds=SECONDS,
                quiet=True,
                variables={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        templates = [shown_template(tokenizer, tools=tools) for tools in (False, True)]
        conversations = []
        for chat in chats:
            messages = [_plain(message) for message in chat.messages]
            conversations.append((messages, chat.tools, chat.options, chat.moment))
        text = json.dumps([dict(tokenizer.special_tokens_map), conversations], default=_placeholder)
        return self._process.ask(templates, text, seconds=WALL_SECONDS, answers=len(chats))


def serve_templates() -> Callable[[Sequence[str], str], Iterator[tuple[str, str]]]:
    """Serve, in the process, what renders conversations by two templates, of which the second is
    for those with tools.

    As JSON come the tokenizer's special tokens, and a list of (messages, tools, options, moment).

    There is an answer for each: `("text", text)`, `("refused", why)`, or `("unusable", why)` (the
    template is none, or ran out of memory, depth or length), which is the last one.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils import chat_template_utils
    from transformers.utils.chat_template_utils import render_jinja_template

    # transformers gives templates its own `strftime_now` and takes no other: the clock that it
    # reads is set, in this process, which does nothing else.
    chat_template_utils.datetime = _Clock  # type: ignore[misc]

    def rendered(
        template: str, messages: Any, tools: Any, options: Mapping[str, Any]
    ) -> tuple[str, str]:
        try:
            texts, _ = render_jinja_template(
                conversations=[messages], tools=tools, chat_template=template, **options
            )
        except MemoryError:
            return "unusable", f"it needed more than {MEMORY >> 20} MiB for one conversation"
        except RecursionError:
            return "unusable", "it calls itself without end"
        except (SyntaxError, TemplateSyntaxError) as error:
            return "unusable", f"it is no Jinja template that can be run: {error}"
        except Exception as error:  # whatever a template does: it is not our code
            if type(error).__module__.startswith("jinja2"):
                return "refused", str(error)
            return "refused", f"{type(error).__name__}: {error}"
        if len(texts[0]) > LENGTH:
            return "unusable", f"it wrote {len(texts[0]):,} characters for one conversation"
        return "text", texts[0]

    def answers(templates: Sequence[str], text: str) -> Iterator[tuple[str, str]]:
        special, chats = json.loads(text)
        for messages, tools, options, moment in chats:
            _Clock.moment = moment
            template = templates[0] if tools is None else templates[1]
            answer = rendered(template, messages, tools, special | options)
            yield answer
            if answer[0] == "unusable":
                # nobody reads on: further answers would be taken for those of the next request
                return

    return answers


class _Clock(datetime):
    """A clock that stands at a moment, where there is one."""

    moment: ClassVar[float | None] = None

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> _Clock:
        """The moment, in UTC: a date is the same on every machine that continues a run."""
        if cls.moment is None:
            return super().now(tz)
        return cls.fromtimestamp(cls.moment, tz or UTC)


def _unusable(chat: Chat, why: str) -> DataError:
    return DataError(
        f"{chat.where}: the chat template of the tokenizer cannot be used: {why}; "
        "set model.chat_template to one that works, or take another checkpoint"
    )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without keys that say nothing: templates take `None` for a text, where they handle
    a missing key.
    """
    return {key: value for key, value in message.items() if value is not None}


def _placeholder(value: object) -> str:
    """What a template sees of a value that is no JSON, as in transformers."""
    return f"<{type(value).__name__}>"


_RENDERER = _Renderer()
