"""From a row to the text and the token ids that a model reads: the one place that knows chat templates and BOS.

A prompt's ids are the encoding of its text, with one exception that is part of the tokenizer's own convention: tokens that it
puts before plain strings (BOS) are added once.  A chat template writes all of its special tokens itself, so nothing is added to
its text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from groupwise.config.settings import DataSettings
from groupwise.data.sources import missing_column
from groupwise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
Content = str | Messages
"""What a row asks, before any chat template: a plain string, or chat messages."""

ALPACA = """Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the request.

### Instruction:
{instruction}{input_block}

### Response:
"""


@dataclass(frozen=True, kw_only=True)
class Wording:
    """What rows ask, before any tokenizer.

    >>> Wording(format="Reverse: {word}").content({"word": "abc"})
    'Reverse: abc'
    """

    chat: bool = False
    """Strings become messages of the user."""
    system: str | None = None
    """Put before the messages."""
    format: str | None = None
    """Makes the prompt from the row's columns; `alpaca` names the usual one for instruction/input rows."""

    @classmethod
    def of(cls, settings: DataSettings) -> Wording:
        """The wording that the settings describe."""
        return Wording(chat=settings.chat, system=settings.system, format=settings.template)

    def content(self, row: Mapping[str, Any], where: str = "row") -> Content:
        """What `row` asks: from `format`, or the columns `prompt`, `messages` (all but a last assistant turn), or `instruction`.

        Raises DataError, naming `where`, if the columns are missing or hold neither text nor messages.
        """
        content = self._without_system(row, where)
        if isinstance(content, str) and self.chat:
            content = [{"role": "user", "content": content}]
        if self.system is None:
            return content
        if isinstance(content, str):
            raise ConfigError("data.system needs chat messages: set data.chat: true, or put the text into data.template")
        return [{"role": "system", "content": self.system}, *content]

    def key(self, content: Content) -> str:
        """Names a prompt for the held-out split and for duplicates: its own text, whatever the chat template or `system`.

        A single user message is the same prompt as its string.
        """
        if isinstance(content, str):
            return content
        own = content[1:] if self.system is not None else content
        if len(own) == 1 and own[0]["role"] == "user" and isinstance(own[0]["content"], str):
            return own[0]["content"]
        return json.dumps(own, sort_keys=True, ensure_ascii=False, default=str)

    def _without_system(self, row: Mapping[str, Any], where: str) -> Content:
        if self.format == "alpaca":
            return _alpaca(row, where)
        if self.format is not None:
            return _formatted(self.format, row, where)
        if "prompt" in row:
            return _checked(row["prompt"], "prompt", where)
        if "messages" in row:
            return _before_the_answer(_checked(row["messages"], "messages", where))
        if "instruction" not in row:
            raise DataError(missing_column("prompt", row, where))
        if not self.chat:
            raise ConfigError(f"{where} has instruction/input columns: set data.template: alpaca, or data.chat: true")
        instruction, given = _string(row, "instruction", where), _string(row, "input", where, default="")
        return f"{instruction}\n\n{given}" if given.strip() and instruction.strip() else instruction


@dataclass(frozen=True, kw_only=True)
class Template(Wording):
    """How rows become prompts and completions for one tokenizer.

    >>> from groupwise.data.tokenizers import arithmetic_tokenizer
    >>> template = Template(tokenizer=arithmetic_tokenizer(), chat=True)
    >>> template.text(template.content({"prompt": "12+34"}))
    '<|user|>12+34<|end|><|assistant|>'
    """

    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def build(cls, settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> Template:
        """The template that the settings describe."""
        return cls(tokenizer=tokenizer, chat=settings.chat, system=settings.system, format=settings.template)

    def text(self, content: Content, where: str = "row") -> str:
        """The prompt's text: a string as it is, messages through the chat template up to where the assistant starts.

        A last message of the assistant is continued, not closed.
        Raises DataError if the tokenizer has no chat template, or its template refuses the messages.
        """
        if isinstance(content, str):
            return content
        continued = content[-1]["role"] == "assistant"
        return self._chat(content, where, add_generation_prompt=not continued, continue_final_message=continued)

    def ask(self, contents: Sequence[Content], wheres: Sequence[str]) -> list[Question]:
        """Texts and ids of contents; `wheres` names their rows in messages."""
        plain = [isinstance(content, str) for content in contents]
        texts = [self.text(content, where) for content, where in zip(contents, wheres, strict=True)]
        encoded = self.encode(texts, plain=plain)
        return [Question(*fields) for fields in zip(wheres, contents, texts, encoded, strict=True)]

    def encode(self, texts: Sequence[str], *, plain: Sequence[bool]) -> list[np.ndarray]:
        """int64 ids of prompts.  `plain` texts get what the tokenizer puts before a string, unless they begin with it already.

        What a tokenizer puts *behind* a string (EOS) is never added: the policy continues there.
        """
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        lead = self._lead
        rows = [lead + ids if bare and ids[: len(lead)] != lead else ids for ids, bare in zip(encoded, plain, strict=True)]
        return [np.asarray(ids, dtype=np.int64) for ids in rows]

    def complete(self, questions: Sequence[Question], answers: Sequence[Content], eos_ids: Sequence[int]) -> list[Completion]:
        """Each answer behind its question, as the policy would have sampled it: the last id is an EOS id.

        A question's ids are kept as they are in generation.  Where the tokenizer would merge across the border, or the chat
        template renders an answered prompt differently, the answer is encoded on its own and `stable` is False.
        """
        spoken = [answer if isinstance(answer, str) else str(answer[-1]["content"] or "") for answer in answers]
        whole = [self._answered(question, text) for question, text in zip(questions, spoken, strict=True)]
        joint = self.encode(whole, plain=[question.plain for question in questions])
        completions = []
        for question, text, ids in zip(questions, spoken, joint, strict=True):
            m = question.tokens.size
            stable = np.array_equal(ids[:m], question.tokens)
            if not stable:
                ids = np.concatenate([question.tokens, self.encode([text], plain=[False])[0]])
            completions.append(Completion(_ended(ids[m:], eos_ids, self.tokenizer), text, bool(stable)))
        return completions

    def is_stable(self, row: Mapping[str, Any], answer: str, where: str = "row") -> bool:
        """True if the ids of the row's prompt are a prefix of the ids of the prompt answered with `answer`.

        False means that the text of a whole conversation is tokenised otherwise than the policy wrote it.
        """
        question = self.ask([self.content(row, where)], [where])[0]
        return self.complete([question], [answer], ())[0].stable

    def unknown(self, text: str, ids: np.ndarray) -> bool:
        """True if the tokenizer cannot write some character of `text`: decoding would lose it."""
        unknown = self.tokenizer.unk_token_id
        return unknown is not None and bool((ids == unknown).any()) and str(self.tokenizer.unk_token) not in text

    @property
    def bos_id(self) -> int | None:
        """The tokenizer's BOS id, if it has one."""
        token = self.tokenizer.bos_token_id
        return token if isinstance(token, int) else None

    @cached_property
    def _lead(self) -> list[int]:
        """The ids that the tokenizer puts before a plain string."""
        bare = self.tokenizer("0", add_special_tokens=False)["input_ids"]
        full = self.tokenizer("0", add_special_tokens=True)["input_ids"]
        starts = [i for i in range(len(full)) if full[i : i + len(bare)] == bare]
        return list(full[: starts[0]]) if starts else []

    def _chat(self, messages: Messages, where: str, **options: Any) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(
                "the prompts are chat messages but the tokenizer has no chat template: set model.chat_template, "
                "or use string prompts without data.chat"
            )
        import jinja2

        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{where}: the chat template refuses these messages: {error}") from error

    def _answered(self, question: Question, spoken: str) -> str:
        """The text of question and answer together."""
        content = question.content
        if isinstance(content, str):
            return content + spoken
        if content[-1]["role"] == "assistant":
            last = {**content[-1], "content": str(content[-1]["content"]) + spoken}
            return self._chat([*content[:-1], last], question.where, add_generation_prompt=False)
        turn = {"role": "assistant", "content": spoken}
        return self._chat([*content, turn], question.where, add_generation_prompt=False)


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A prompt on its way from a row to a record."""

    where: str
    """Its row, for messages."""
    content: Content
    text: str
    tokens: np.ndarray
    """int64 (m,)."""

    @property
    def plain(self) -> bool:
        """True if no chat template wrote the text."""
        return isinstance(self.content, str)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """An answer as the policy would have sampled it."""

    tokens: np.ndarray
    """int64 (n,); the last is an EOS id."""
    text: str
    stable: bool
    """False if the answer had to be encoded apart from its prompt."""


def is_blank(content: Content) -> bool:
    """True if nothing is asked: an empty or white string, or a last message without text."""
    if isinstance(content, str):
        return not content.strip()
    spoken = [message for message in content if message["role"] != "system"]
    return not spoken or not str(spoken[-1]["content"] or "").strip()


def _ended(ids: np.ndarray, eos_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Ends the ids with EOS: white space behind the last EOS is cut (templates write a newline there), a missing one is added."""
    if ids.size and int(ids[-1]) in eos_ids:
        return ids
    places = np.flatnonzero(np.isin(ids, np.asarray(eos_ids, dtype=np.int64)))
    if places.size and not str(tokenizer.decode(ids[places[-1] + 1 :].tolist())).strip():
        return ids[: places[-1] + 1]
    return np.append(ids, np.asarray(eos_ids[:1], dtype=np.int64))


def _checked(value: object, column: str, where: str) -> Content:
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        kind = "empty (null)" if value is None else f"{value!r} ({type(value).__name__})"
        raise DataError(f"{where}: {column} is {kind}: expected a string or a list of messages")
    if not value:
        return ""
    for message in value:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise DataError(f"{where}: a message in {column} needs role and content, got {message!r:.80}")
    return [dict(message) for message in value]


def _before_the_answer(messages: Content) -> Content:
    if isinstance(messages, str) or messages[-1]["role"] != "assistant":
        return messages
    return messages[:-1]


def _string(row: Mapping[str, Any], column: str, where: str, default: str | None = None) -> str:
    if column not in row and default is None:
        raise DataError(missing_column(column, row, where))
    value = row.get(column, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise DataError(f"{where}: {column} is {value!r} ({type(value).__name__}): expected a string")
    return value


def _alpaca(row: Mapping[str, Any], where: str) -> str:
    instruction, given = _string(row, "instruction", where), _string(row, "input", where, default="")
    if not instruction.strip():
        return ""
    if not given.strip():
        return ALPACA.format(with_input="", instruction=instruction, input_block="")
    further = ", paired with an input that provides further context"
    return ALPACA.format(with_input=further, instruction=instruction, input_block=f"\n\n### Input:\n{given}")


def _formatted(template: str, row: Mapping[str, Any], where: str) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        raise DataError(missing_column(str(error.args[0]), row, f"{where} (data.template)")) from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        remedy = "write columns in {braces}; a literal brace is doubled"
        raise ConfigError(f"data.template cannot be filled in ({error}): {remedy}") from None
