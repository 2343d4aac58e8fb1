"""From a row to the text and the token ids that a model reads: the one place that knows chat
templates and BOS.

A prompt's ids are the encoding of its text, with one exception that is part of the tokenizer's own
convention: tokens that it puts before plain strings (BOS) are added once.  A chat template writes
all of its special tokens itself, so nothing is added to its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from groupwise.config.settings import ControlTokens, DataSettings
from groupwise.data.images import NO_MODEL, ImageEncoder, NoImages, PromptImages, text_of
from groupwise.data.messages import (
    ARGUMENTS,
    Content,
    Messages,
    beside,
    calls_of,
    checked,
    garbled,
    names_missing,
    switch_as_text,
    tools_in,
    with_arguments,
)
from groupwise.data.rendering import Chat, Refusal, render_chats, shown_template, unmentioned
from groupwise.data.sources import BadRow, Row
from groupwise.data.wording import ReadRow, Wording
from groupwise.errors import ConfigError, DataError
from groupwise.utils.spelling import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schemas = Sequence[Mapping[str, Any]]
"""JSON schemas of tools."""
Tools = Callable[[Mapping[str, Any]], Schemas | None]
"""From a row to the tools that its prompt shows."""

OPEN, CLOSE = "\U000ffffc", "\U000ffffd"
"""Marks around control tokens that are text, while they pass through a chat template: two
characters that nobody uses.
"""

AT_ONCE = 1_000
"""Texts that the tokenizer encodes at a time: what it makes of one is many times as large as its
ids, and would fill the memory.
"""
THINK, THINK_END = "<think>", "</think>"
MARK = "zq7mark"
"""Stands for an answer where the template is looked at."""


@dataclass(frozen=True, kw_only=True)
class Template(Wording):
    """How rows become prompts and completions for one tokenizer.

    >>> from groupwise.data.tokenizers import arithmetic_tokenizer
    >>> template = Template(tokenizer=arithmetic_tokenizer(), chat=True)
    >>> template.ask([template.read({"prompt": "12+34"})])[0].text
    '<|user|>12+34<|end|><|assistant|>'
    """

    tokenizer: PreTrainedTokenizerBase
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template in every conversation; a row's own go over them."""
    control_tokens: ControlTokens = "warn"
    """What becomes of the tokenizer's control tokens where a row's messages hold their text: see
    `DataSettings.control_tokens`.
    """
    tools: Tools | None = None
    """Gives the JSON schemas that the prompt of a row shows to the model; without it those in the
    column `tools` are shown.
    """

    @classmethod
    def build(
        cls,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        tools: Tools | None = None,
        images: ImageEncoder | NoImages = NO_MODEL,
    ) -> Template:
        """The template that the settings describe.  Raises ConfigError for variables that the chat
        template does not mention.
        """
        check_variables(settings.chat_template_kwargs, tokenizer)
        return cls(
            tokenizer=tokenizer,
            chat=settings.chat,
            system=settings.system,
            format=settings.template,
            variables=settings.chat_template_kwargs,
            control_tokens=settings.control_tokens,
            tools=tools,
            images=images,
        )

    def ask(self, examples: Sequence[ReadRow]) -> list[Question]:
        """Texts and ids of rows that have been read.

        A string is its text; messages go through the chat template up to where the assistant
        starts.  A last message of the assistant is continued, not closed.
        Raises DataError if the tokenizer has no chat template, or its template refuses the
        messages.
        """
        return [_accepted(question) for question in self.try_ask(examples)]

    def try_ask(self, examples: Sequence[ReadRow]) -> list[Question | Refusal]:
        """Ask, with a `Refusal` instead of an error for messages that the chat template refuses."""
        extras = [self._extras(example) for example in examples]
        chats: list[str | Chat | Refusal] = []
        for example, extra in zip(examples, extras, strict=True):
            content = self.marked(example.content) if extra.control else example.content
            chats.append(_prompt_chat(content, example.where, extra.tools, extra.variables))
        texts = self._rendered(chats)
        written = [self._with_placeholders(*pair) for pair in zip(examples, texts, strict=True)]
        encoded = self._ids(written, [isinstance(example.content, str) for example in examples])
        questions: list[Question | Refusal] = []
        columns = zip(examples, texts, written, encoded, extras, strict=True)
        for example, text, whole, ids, extra in columns:
            if isinstance(text, Refusal):
                questions.append(text)
                continue
            if isinstance(whole, Refusal):
                questions.append(whole)
                continue
            question = Question(
                example=example,
                text=unmarked(text),
                tokens=np.array(ids, np.int64),
                control=extra.control,
                tools=extra.tools,
                variables=extra.variables,
                unread_tools=extra.unread_tools,
                unknown=self._unknown_in(text, ids),
            )
            questions.append(question)
        return questions

    def _with_placeholders(self, example: ReadRow, text: str | Refusal) -> str | Refusal:
        """A rendered prompt with the placeholders of its images."""
        if isinstance(text, Refusal) or not example.pictures:
            return text
        assert isinstance(self.images, ImageEncoder)
        try:
            return self.images.written(text, example.pictures, example.where)
        except BadRow as error:
            return Refusal(example.where, str(error), error.reason)

    def encode(self, texts: Sequence[str], *, plain: Sequence[bool]) -> list[np.ndarray]:
        """int64 ids of prompts.  `plain` texts get what the tokenizer puts before a string, unless
        they begin with it already.

        What a tokenizer puts *behind* a string (EOS) is never added: the policy continues there.
        """
        return [np.array(ids, np.int64) for ids in self._ids(texts, plain)]

    def _ids(self, texts: Sequence[str | Refusal], plain: Sequence[bool]) -> list[list[int]]:
        """`encode` as lists; a refusal has no ids."""
        encoded = self._plainly(["" if isinstance(text, Refusal) else text for text in texts])
        lead = self._lead
        for i, text in enumerate(texts):
            if self.control_tokens == "plain" and isinstance(text, str) and OPEN in text:
                encoded[i] = self._encode_marked(text)
            if plain[i] and encoded[i][: len(lead)] != lead:
                encoded[i] = lead + encoded[i]
        return encoded

    def _plainly(self, texts: list[str]) -> list[list[int]]:
        """The tokenizer's ids of texts, without special tokens around them."""
        if not texts:
            return []
        core = self._core
        if core is None:
            return self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        core.no_truncation()
        core.no_padding()
        core.encode_special_tokens = bool(self.tokenizer.split_special_tokens)
        encoded: list[list[int]] = []
        for start in range(0, len(texts), AT_ONCE):
            batch = texts[start : start + AT_ONCE]
            encodings = core.encode_batch_fast(batch, add_special_tokens=False)
            encoded += [encoding.ids for encoding in encodings]
        return encoded

    @cached_property
    def _core(self) -> Any:
        """The core of a fast tokenizer, which it calls itself and wraps in columns that nobody here
        reads; None for others.
        """
        from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

        if not isinstance(self.tokenizer, PreTrainedTokenizerFast):
            return None
        kind = type(self.tokenizer)
        if kind.__call__ is not PreTrainedTokenizerBase.__call__:
            return None
        if kind._encode_plus is not PreTrainedTokenizerFast._encode_plus:
            return None
        return self.tokenizer.backend_tokenizer

    def complete(
        self, questions: Sequence[Question], answers: Sequence[Content], eos_ids: Sequence[int]
    ) -> list[EncodedAnswer]:
        """Each answer behind its question, as the policy would have sampled it: the last id is an
        EOS id.

        A question's ids are kept as they are in generation.  Where the tokenizer would merge across
        the border, or the chat template renders an answered prompt differently, the answer is
        encoded on its own and `stable` is False.
        So it is where the template leaves out a part of the answer's text.
        An answer that is more than one text (calls, reasoning, several turns) is what the template
        writes behind the prompt.
        Raises DataError if the chat template refuses an answered prompt, leaves out a part of such
        an answer, or writes its prompt otherwise.
        """
        completions = self.try_complete(questions, answers, eos_ids)
        return [_accepted(completion) for completion in completions]

    def try_complete(
        self, questions: Sequence[Question], answers: Sequence[Content], eos_ids: Sequence[int]
    ) -> list[EncodedAnswer | Refusal]:
        """Complete, with a `Refusal` instead of an error for conversations that the chat template
        refuses.
        """
        marks = self.end_marks(eos_ids)
        turns: list[Messages] = []
        chats: list[str | Chat | Refusal] = []
        for question, answer in zip(questions, answers, strict=True):
            spoken = _between_marks(question, _turns(answer), marks)
            turns.append(spoken)
            chats.append(self._answered(question, spoken))
        whole = self._complete_ones(questions, turns, self._rendered(chats))
        written: list[str | Refusal] = []
        for question, text in zip(questions, whole, strict=True):
            written.append(self._with_placeholders(question.example, text))
        joint = self._ids(written, [question.plain for question in questions])
        completions: list[EncodedAnswer | Refusal] = []
        columns = zip(questions, turns, whole, written, joint, strict=True)
        for question, spoken, rendered, with_images, ids in columns:
            if isinstance(rendered, Refusal):
                completions.append(rendered)
            elif isinstance(with_images, Refusal):
                completions.append(with_images)
            else:
                text = unmarked(rendered)
                completions.append(self._completion(question, spoken, text, ids, eos_ids))
        return completions

    def _completion(
        self,
        question: Question,
        spoken: Messages,
        whole: str,
        ids: list[int],
        eos_ids: Sequence[int],
    ) -> EncodedAnswer:
        """Take an answer out of the rendering of its conversation.

        whole, ids: the rendered conversation.
        """
        behind = whole[len(question.text) :]
        text = str(spoken[0]["content"]) if _is_text(spoken) else behind
        # Some templates cut reasoning out of an answer's text.
        shown = _squeezed(text) in _squeezed(behind)
        size = question.tokens.size
        stable = shown and ids[:size] == question.tokens.tolist()
        closing = ""
        if stable:
            answer = ids[size:]
        elif shown and whole.startswith(question.text):
            answer = self._ids([behind], [False])[0]
        else:
            closing = closing_of(question, text)
            answer = self._ids([closing + text], [False])[0]
        return EncodedAnswer(
            ended(answer, self._ends(question, eos_ids), self.tokenizer),
            text,
            stable,
            unknown=self._unknown_in(text, answer),
            closed=closing != "",
        )

    def _ends(self, question: Question, eos_ids: Sequence[int]) -> Sequence[int]:
        """EOS ids; first stands what ends an answer that brings no end.

        Behind a chat prompt that is what the chat template writes behind an answer, behind a string
        the tokenizer's.
        """
        if question.plain:
            return eos_ids
        return sorted(eos_ids, key=lambda token: token != self._turn_end_id)

    def try_in_steps(
        self, questions: Sequence[Question], separator: str, eos_ids: Sequence[int]
    ) -> list[EncodedAnswer | Refusal]:
        """The answers of questions whose steps are encoded one by one, so that tokens end with
        them.

        What the chat template writes around an answer belongs to the first and the last step.
        separator: stands behind all steps but the last.
        """
        marks = self.end_marks(eos_ids)
        solved: list[list[str]] = []
        chats: list[str | Chat | Refusal] = []
        for question in questions:
            texts = [f"{step}{separator}" for step in question.example.steps]
            texts[0] = behind_opening(question.text, texts[0])
            texts[-1] = before_end(texts[-1].removesuffix(separator), marks)
            solved.append(texts)
            spoken = {"role": "assistant", "content": "".join(texts)}
            chats.append(self._answered(question, [spoken]))
        answers: list[EncodedAnswer | Refusal] = []
        for question, texts, rendered in zip(questions, solved, self._rendered(chats), strict=True):
            if isinstance(rendered, Refusal):
                answers.append(rendered)
            else:
                answers.append(self._in_steps(question, texts, unmarked(rendered), eos_ids))
        return answers

    def _in_steps(
        self, question: Question, texts: list[str], whole: str, eos_ids: Sequence[int]
    ) -> EncodedAnswer:
        """An answer in steps, with what stands around it in the rendering of its conversation."""
        behind = whole[len(question.text) :] if whole.startswith(question.text) else ""
        if "".join(texts) not in behind:
            # Some templates strip an answer.
            texts[0], texts[-1] = texts[0].lstrip(), texts[-1].rstrip()
        answer = "".join(texts)
        before, found, after = behind.partition(answer)
        closing = ""
        if not found:
            before = closing = closing_of(question, answer)
        texts[0] = before + texts[0]
        texts[-1] += after
        parts = self._ids(texts, [False] * len(texts))
        joined = [token for part in parts for token in part]
        tokens = ended(joined, self._ends(question, eos_ids), self.tokenizer)
        ends = np.cumsum([len(part) for part in parts]) - 1
        ends[-1] = tokens.size - 1
        unknown = any(map(self._unknown_in, texts, parts))
        return EncodedAnswer(
            tokens, answer, stable=True, unknown=unknown, ends=ends, closed=closing != ""
        )

    def end_marks(self, eos_ids: Sequence[int]) -> tuple[str, ...]:
        """The marks that end a turn or a completion."""
        ends = [str(self.tokenizer.convert_ids_to_tokens(token)) for token in eos_ids]
        return tuple(mark for mark in (*ends, self._turn_end) if mark)

    @cached_property
    def _turn_end(self) -> str:
        """The control token that the chat template writes behind an answer; empty if it writes
        none.
        """
        if not self.tokenizer.chat_template:
            return ""
        chat = Chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}])
        (text,) = self._rendered([chat])
        if isinstance(text, Refusal):
            return ""
        mark = self.control_pattern.match(text.rpartition(MARK)[2].lstrip())
        return mark[0] if mark else ""

    @cached_property
    def _turn_end_id(self) -> int | None:
        """The id of the token that the chat template writes behind an answer; None if it writes
        none.
        """
        token = self.tokenizer.convert_tokens_to_ids(self._turn_end) if self._turn_end else None
        return token if isinstance(token, int) else None

    def _complete_ones(
        self,
        questions: Sequence[Question],
        turns: Sequence[Messages],
        whole: Sequence[str | Refusal],
    ) -> list[str | Refusal]:
        """The renderings of answered prompts that hold the prompt as it was asked and all of the
        answer; refusals of the others.
        """
        texts = list(whole)
        keys: list[tuple[int, str]] = []
        chats: list[str | Chat | Refusal] = []
        for i, (question, answer, rendered) in enumerate(zip(questions, turns, whole, strict=True)):
            if isinstance(rendered, Refusal) or _is_text(answer):
                continue
            if refusal := _lost(question, answer, unmarked(rendered)):
                texts[i] = refusal
                continue
            for place, message in enumerate(answer):
                for key in beside(message):
                    bare = {name: value for name, value in message.items() if name != key}
                    without = [*answer[:place], bare, *answer[place + 1 :]]
                    chats.append(self._answered(question, without))
                    keys.append((i, key))
        for (i, key), rendered in zip(keys, self._rendered(chats), strict=True):
            if rendered == whole[i] and not isinstance(texts[i], Refusal):
                why = f"it does not write the {key} of an answer"
                reason = f"whose {key} the chat template does not write"
                texts[i] = Refusal(questions[i].where, why, reason)
        return texts

    def is_stable(self, row: Row, answer: str, where: str = "row") -> bool:
        """True if the ids of the row's prompt are a prefix of the ids of the prompt answered with
        `answer`.

        False means that the text of a whole conversation is tokenised otherwise than the policy
        wrote it.
        """
        question = self.ask([self.read(row, where)])[0]
        return self.complete([question], [answer], ())[0].stable

    def _extras(self, example: ReadRow) -> Extras:
        """What a row brings into its prompt.

        Control tokens are those whose text stands in messages, tools and variables, once each.
        Plain strings and the assistant's messages are not searched: both may hold the model's own
        format on purpose.
        """
        content, variables = example.content, example.variables
        own_tools = self.tools is None
        tools = tools_in(example.row) if self.tools is None else self.tools(example.row) or ()
        control: dict[str, None] = {}
        if not isinstance(content, str):
            foreign = self._foreign(content)
            if tools or variables or not all(map(_is_bare, foreign)):
                texts = _texts_of([foreign, tools if own_tools else None, variables])
            else:
                texts = [text_of(message["content"]) for message in foreign]
            for text in texts:
                control.update(dict.fromkeys(self.typed_pattern.findall(text)))
        shown = tools
        if tools and own_tools and self.control_tokens == "plain":
            shown = self.shielded(tools)
        return Extras(
            control=tuple(control),
            tools=shown or None,
            variables=self.with_own(variables),
            unread_tools=tools is None,
        )

    def with_own(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Further variables of the chat template: of all conversations, and those of a row."""
        if not variables:
            return self.variables
        if self.control_tokens == "plain":
            variables = self.shielded(variables)
        return {**self.variables, **variables}

    def unshown(self, question: Question) -> list[str]:
        """What the prompt of a question lacks: `tool` and `call` where the name of one is not
        written.
        """
        calls = [] if isinstance(question.content, str) else calls_of(question.content)
        functions = {"tool": question.tools or (), "call": calls}
        return [kind for kind, some in functions.items() if names_missing(some, question.text)]

    def _unknown_in(self, text: str, ids: list[int]) -> bool:
        """True if the tokenizer cannot write some character of `text`: decoding would lose it."""
        return self._unknown in ids and str(self.tokenizer.unk_token) not in text

    @cached_property
    def _unknown(self) -> int:
        """The id of unknown characters; -1 if there is none."""
        unknown = self.tokenizer.unk_token_id
        return unknown if isinstance(unknown, int) else -1

    @cached_property
    def bos_id(self) -> int | None:
        """The tokenizer's BOS id, if it has one."""
        token = self.tokenizer.bos_token_id
        return token if isinstance(token, int) else None

    @cached_property
    def _lead(self) -> list[int]:
        """The ids that the tokenizer puts before a plain string."""
        bare = self.tokenizer("0", add_special_tokens=False)["input_ids"]
        full = self.tokenizer("0", add_special_tokens=True)["input_ids"]
        for place in range(len(full)):
            if full[place : place + len(bare)] == bare:
                return list(full[:place])
        return []

    def _foreign(self, messages: Messages) -> Messages:
        """Messages that neither the recipe nor the assistant wrote."""
        return [message for message in self.unopened(messages) if message["role"] != "assistant"]

    def marked(self, content: Content) -> Content:
        """Messages whose control tokens stand between marks, where they are to be encoded as text;
        others as they are.
        """
        if isinstance(content, str) or self.control_tokens != "plain":
            return content
        foreign = {id(message) for message in self._foreign(content)}
        marked = list(content)
        for place, message in enumerate(content):
            if id(message) in foreign:
                marked[place] = self.shielded(message)
        return marked

    def shielded(self, value: Value) -> Value:
        """A message, tools or variables whose control tokens stand between marks: `encode` makes
        plain text of them (`control_tokens` is `plain`)."""
        return _map_texts(value, self._mark)

    def _mark(self, text: str) -> str:
        return self.typed_pattern.sub(rf"{OPEN}\g<0>{CLOSE}", unmarked(text))

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Finds special tokens in a text, the longest first: they end turns and begin them."""
        return any_of(self._special)

    @cached_property
    def typed_pattern(self) -> re.Pattern[str]:
        """Finds what nobody but the model and its template should write: special tokens, and marks
        like `<tool_call>`.

        Qwen3's vocabulary holds `<tool_call>` and `</think>` as added tokens that are not special.
        """
        return any_of(self._control)

    @cached_property
    def _special(self) -> frozenset[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special}
        return frozenset(special | set(self.tokenizer.all_special_tokens))

    @cached_property
    def _control(self) -> frozenset[str]:
        added = map(str, self.tokenizer.added_tokens_decoder.values())
        return self._special | {token for token in added if _is_mark(token)}

    @cached_property
    def _plain_core(self) -> Any:
        """A copy of a fast tokenizer's core to which control tokens are text.

        None for a slow tokenizer.
        """
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        if core is None:
            return None
        described = json.loads(core.to_str())
        for token in described.get("added_tokens") or ():
            token["special"] = token["content"] in self._control
        copied = type(core).from_str(json.dumps(described))
        copied.no_truncation()
        copied.no_padding()
        copied.encode_special_tokens = True
        return copied

    def _encode_as_text(self, text: str) -> list[int]:
        """Ids of a text in which no control token is one."""
        if self._plain_core is not None:
            return list(self._plain_core.encode(text, add_special_tokens=False).ids)
        # A token that is cut behind its first character is none.
        cuts = [match.start() + 1 for match in self.typed_pattern.finditer(text)]
        encoded: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            piece = text[start:end]
            ids = self.tokenizer(piece, add_special_tokens=False, split_special_tokens=True)
            encoded += ids["input_ids"]
        return encoded

    def _encode_marked(self, text: str) -> list[int]:
        """Ids of a text with marks: between two control tokens of the template everything is text,
        if a mark stands there.

        Added tokens cut a text before it is tokenised; so the ids of the other stretches are those
        of the whole.
        """
        pattern = re.compile(rf"{OPEN}.*?{CLOSE}|{self.typed_pattern.pattern}|\Z", re.DOTALL)
        ids, whole, start = list[int](), "", 0
        for match in pattern.finditer(text):
            if match[0].startswith(OPEN):
                continue
            stretch, start = text[start : match.start()], match.end()
            if OPEN in stretch or CLOSE in stretch:
                ids += self._plainly([whole])[0] + self._encode_as_text(unmarked(stretch))
                whole = match[0]
            else:
                whole += stretch + match[0]
        return ids + self._plainly([whole])[0]

    def _rendered(self, chats: Sequence[str | Chat | Refusal]) -> list[str | Refusal]:
        """Texts; strings are texts already, and a refusal stays one."""
        places = [i for i, chat in enumerate(chats) if isinstance(chat, Chat)]
        conversations = [chat for chat in chats if isinstance(chat, Chat)]
        texts: list[Any] = list(chats)
        for i, (_, text) in zip(places, self.shown(conversations), strict=True):
            texts[i] = text
        return texts

    def shown(self, chats: Sequence[Chat]) -> list[tuple[Chat, str | Refusal]]:
        """Each chat as the template can show it, and its text.

        Some templates want the arguments of calls as JSON text, some as what the text stands for.
        """
        rendered = list(zip(chats, render_chats(self.tokenizer, chats), strict=True))
        for as_text in (False, True):
            again = [i for i, (chat, text) in enumerate(rendered) if _is_garbled(chat, text)]
            changed: list[Chat] = []
            for i in again:
                messages = with_arguments(chats[i].messages, as_text=as_text)
                changed.append(replace(chats[i], messages=messages))
            texts = render_chats(self.tokenizer, changed)
            for i, chat, text in zip(again, changed, texts, strict=True):
                if not _is_garbled(chat, text):
                    rendered[i] = chat, text
        return rendered

    def _answered(self, question: Question, answer: Messages) -> str | Chat | Refusal:
        """Question and answer together."""
        content = self.marked(question.content) if question.control else question.content
        if isinstance(content, str):
            if _is_text(answer):
                return content + str(answer[0]["content"])
            why = (
                "its prompt is a string, which no template turns into a conversation: set"
                " data.chat: true"
            )
            reason = "whose answer is more than text, behind a prompt that is a string"
            return Refusal(question.where, why, reason)
        begun, first = content[-1], answer[0]
        if begun["role"] == first["role"] == "assistant":
            text = str(begun["content"]) + str(first["content"])
            content, answer = content[:-1], [{**begun, **first, "content": text}, *answer[1:]]
        return Chat(
            [*content, *answer], question.where, tools=question.tools, variables=question.variables
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a row brings into its prompt beside what it asks."""

    control: tuple[str, ...]
    """Control tokens whose text stands in it."""
    tools: Schemas | None
    """JSON schemas that the prompt shows."""
    variables: Mapping[str, Any]
    """Variables of the chat template."""
    unread_tools: bool
    """True if the row holds tools that cannot be read."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A prompt on its way from a row to a record."""

    example: ReadRow
    """The row, as it was read."""
    text: str
    tokens: np.ndarray
    """int64 (m,)."""
    control: tuple[str, ...] = ()
    """Special tokens whose text stands in its messages."""
    tools: Schemas | None = None
    """JSON schemas that its prompt shows."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    unread_tools: bool = False
    """True if its row holds tools that cannot be read, and that it should show."""
    unknown: bool = False
    """True if it holds a character that the tokenizer cannot write."""
    cut: int = 0
    """Tokens that were cut from its beginning."""

    @property
    def where(self) -> str:
        """The row, for messages."""
        return self.example.where

    @property
    def content(self) -> Content:
        """What it asks."""
        return self.example.content

    @property
    def images(self) -> PromptImages | None:
        """The images among its tokens; None if there are none."""
        if not self.example.pictures:
            return None
        return PromptImages(self.example.pictures, self.tokens)

    @property
    def plain(self) -> bool:
        """True if no chat template wrote the text."""
        return isinstance(self.content, str)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedAnswer:
    """An answer as the policy would have sampled it."""

    tokens: np.ndarray
    """int64 (n,); the last is an EOS id."""
    text: str
    stable: bool
    """False if the answer had to be encoded apart from its prompt."""
    unknown: bool = False
    """True if it holds a character that the tokenizer cannot write."""
    ends: np.ndarray | None = None
    """The place of each step's last token, where the answer has steps."""
    closed: bool = False
    """True if the reasoning that its prompt opens was closed before it."""


Answer = TypeVar("Answer", Question, EncodedAnswer)
Value = TypeVar("Value")


def _accepted(answer: Answer | Refusal) -> Answer:
    """The answer.  Raises DataError for a refusal."""
    if isinstance(answer, Refusal):
        raise DataError(str(answer))
    return answer


def check_variables(variables: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError for variables of a recipe that change nothing: the chat template does not
    mention them.
    """
    key = "data.chat_template_kwargs"
    for name in variables:
        if name in ARGUMENTS:
            raise ConfigError(f"{key}: {name!r} is no variable of the chat template: leave it out")
    if remedy := switch_as_text(variables):
        raise ConfigError(f"{key}: {remedy}")
    for name in unmentioned(variables, tokenizer):
        template = shown_template(tokenizer, tools=False)
        if not template:
            raise ConfigError(
                f"{key}: the tokenizer has no chat template: leave it out, or set"
                " model.chat_template"
            )
        near = nearest(name, re.findall(r"[A-Za-z_]\w+", template))
        meant = f" (did you mean {near}?)" if near else ""
        raise ConfigError(
            f"{key}: the chat template does not mention {name!r}{meant}, so it changes nothing:"
            " leave it out"
        )


def _prompt_chat(
    content: Content, where: str, tools: Schemas | None, variables: Mapping[str, Any]
) -> str | Chat:
    """What is rendered of a prompt: up to where the assistant starts, or continues."""
    if isinstance(content, str):
        return content
    continued = content[-1]["role"] == "assistant"
    return Chat(
        content,
        where,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        tools=tools,
        variables=variables,
    )


def _turns(answer: Content) -> Messages:
    """An answer as messages whose content is text."""
    turns = checked(answer, "completion", "an answer")
    return [{"role": "assistant", "content": turns}] if isinstance(turns, str) else turns


def behind_opening(prompt: str, answer: str) -> str:
    r"""An answer that repeats the `<think>` with which its prompt ends, without it.

    >>> behind_opening("1+1=<think>\n", "<think>\n2</think>")
    '2</think>'
    >>> behind_opening("1+1=", "<think>2</think>")
    '<think>2</think>'
    """
    bare = answer.lstrip()
    if not prompt.rstrip().endswith(THINK) or not bare.startswith(THINK):
        return answer
    opening = prompt[prompt.rfind(THINK) :]
    if bare.startswith(opening):
        return bare.removeprefix(opening)
    return bare.removeprefix(THINK)


def closing_of(question: Question, answer: str) -> str:
    """What closes the reasoning that a chat prompt opens, where an answer has none."""
    if question.plain or not question.text.rstrip().endswith(THINK) or THINK_END in answer:
        return ""
    return f"\n{THINK_END}\n\n"


def _between_marks(question: Question, answer: Messages, marks: tuple[str, ...]) -> Messages:
    """An answer without the marks that its template writes around it; behind a plain prompt it ends
    itself.
    """
    turns = [{**message, "content": str(message["content"])} for message in answer]
    turns[0]["content"] = behind_opening(question.text, turns[0]["content"])
    if not question.plain:
        turns[-1]["content"] = before_end(turns[-1]["content"], marks)
    return turns


def before_end(text: str, marks: tuple[str, ...]) -> str:
    """An answer without the mark at its end that ends a turn or a completion: one is written behind
    every answer.
    """
    while text.rstrip().endswith(marks):
        text = text.rstrip()
        for mark in marks:
            text = text.removesuffix(mark)
    return text


def _lost(question: Question, answer: Messages, text: str) -> Refusal | None:
    """The reason for which a rendering is not the prompt as it was asked with the texts and calls
    of its answer behind it.
    """
    if not text.startswith(question.text):
        why = "it writes the prompt otherwise once it is answered"
        return Refusal(
            question.where,
            why,
            "whose prompt the chat template writes otherwise once it is answered",
        )
    behind = text[len(question.text) :]
    shown = _squeezed(behind)
    for message in answer:
        if message["role"] == "assistant" and _squeezed(str(message["content"])) not in shown:
            why = "it does not write the content of an answer beside the rest"
            return Refusal(question.where, why, "whose content the chat template does not write")
    if names_missing(calls_of(answer), behind):
        why = "it does not write every call of an answer"
        return Refusal(question.where, why, "whose tool_calls the chat template does not write")
    return None


def _squeezed(text: str) -> str:
    """Without white space, which templates change."""
    return "".join(text.split())


def _is_garbled(chat: Chat, text: str | Refusal) -> bool:
    """True if the arguments of calls are refused, or are no JSON in the rendering."""
    if isinstance(text, Refusal):
        return any(message.get("tool_calls") for message in chat.messages)
    return garbled(chat.messages, text)


def _is_text(answer: Messages) -> bool:
    """True of an answer that is one text."""
    return len(answer) == 1 and not beside(answer[0])


def _texts_of(value: object) -> list[str]:
    """Every string inside of a value, keys too."""
    texts: list[str] = []

    def kept(text: str) -> str:
        texts.append(text)
        return text

    _map_texts(value, kept)
    return texts


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same with every string changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        mapped = {}
        for key, inner in value.items():
            if not _is_name(key, inner):
                inner = _map_texts(inner, change)
            mapped[_map_texts(key, change)] = inner
        return mapped
    if isinstance(value, list | tuple):
        return [_map_texts(inner, change) for inner in value]
    return value


def _is_bare(message: Mapping[str, Any]) -> bool:
    """True for a message with nothing beside a role that is a name, and its content: only that is
    to be searched.
    """
    return len(message) == 2 and "content" in message and _is_name("role", message["role"])


def _is_name(key: object, value: object) -> bool:
    """True for a role or a kind of part, which templates compare: it stays, also where a token has
    its name.
    """
    return key in ("role", "type") and isinstance(value, str) and value.isidentifier()


_MARK = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_HTML = re.compile(
    r"</?(table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup"
    r"|code|a|br|ul|ol|li|p|div|span)>"
)


def _is_mark(token: str) -> bool:
    r"""True if a token that is added to a vocabulary is a mark of the format, and neither white
    space, a word nor HTML.

    GPT-NeoX and Phi add runs of spaces, Gemma adds HTML's tags.

    >>> _is_mark("<tool_call>"), _is_mark("[TOOL_CALLS]")
    (True, True)
    >>> _is_mark("    "), _is_mark("\\boxed{"), _is_mark("<table>")
    (False, False, False)
    """
    return _MARK.fullmatch(token.strip()) is not None and _HTML.fullmatch(token.strip()) is None


def unmarked(text: str) -> str:
    """A text without the marks around control tokens."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def ended(ids: list[int], eos_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Ends the ids with EOS: white space behind the last EOS is cut (templates write a newline
    there), a missing one is added.
    """
    size = len(ids)
    while size and ids[size - 1] not in eos_ids:
        size -= 1
    behind = ids[size:]
    if size and (not behind or not str(tokenizer.decode(behind)).strip()):
        ids = ids[:size]
    else:
        ids = [*ids, *eos_ids[:1]]
    return np.asarray(ids, dtype=np.int64)


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds each of these, the longest first.  Tokens share their beginnings: Gemma has 6,200 that
    begin with `<`.

    >>> any_of(["<a>", "<ab>", "[X]", "<a>>"]).findall("<ab><a>>[X]<a> <b>")
    ['<ab>', '<a>>', '[X]', '<a>']
    """
    return re.compile(_alternatives(sorted(set(tokens) - {""})) or r"\A(?!)")


def _alternatives(tokens: Sequence[str]) -> str:
    """A pattern of sorted texts, as a tree of their beginnings."""
    branches = []
    for _, group in groupby(tokens, key=itemgetter(slice(0, 1))):
        alike = list(group)
        size = 0
        for first, last in zip(alike[0], alike[-1], strict=False):
            if first != last:
                break
            size += 1
        shared = alike[0][:size]
        rest = [token.removeprefix(shared) for token in alike if token != shared]
        branch = re.escape(shared)
        if rest:
            branch += f"(?:{_alternatives(rest)})"
            if shared in alike:
                branch += "?"
        branches.append(branch)
    return "|".join(branches)
