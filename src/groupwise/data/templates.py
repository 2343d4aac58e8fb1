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
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from groupwise.config.settings import ControlTokens, DataSettings
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
from groupwise.data.sources import Row
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
    """Of the chat template, in every conversation; a row's own go over them."""
    control_tokens: ControlTokens = "warn"
    """What becomes of the tokenizer's control tokens where a row's messages hold their text: see
    `DataSettings.control_tokens`.
    """
    tools: Tools | None = None
    """Of a row the JSON schemas that its prompt shows to the model; where there is none, those in
    its column `tools` are shown.
    """

    @classmethod
    def build(
        cls, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, tools: Tools | None = None
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
        """`ask`, but messages that the chat template refuses give a `Refusal` instead of an error."""
        extras = [self._extras(example) for example in examples]
        chats = [
            _prompt_chat(
                self.marked(example.content) if control else example.content,
                example.where,
                tools,
                variables,
            )
            for example, (control, tools, variables, _) in zip(examples, extras, strict=True)
        ]
        texts = self._rendered(chats)
        encoded = self._ids(texts, [isinstance(example.content, str) for example in examples])
        return [
            (
                text
                if isinstance(text, Refusal)
                else Question(
                    example,
                    unmarked(text),
                    np.array(ids, np.int64),
                    *one,
                    unknown=self._unknown_in(text, ids),
                )
            )
            for example, text, ids, one in zip(examples, texts, encoded, extras, strict=True)
        ]

    def encode(self, texts: Sequence[str], *, plain: Sequence[bool]) -> list[np.ndarray]:
        """int64 ids of prompts.  `plain` texts get what the tokenizer puts before a string, unless
        they begin with it already.

        What a tokenizer puts *behind* a string (EOS) is never added: the policy continues there.
        """
        return [np.array(ids, np.int64) for ids in self._ids(texts, plain)]

    def _ids(self, texts: Sequence[str | Refusal], plain: Sequence[bool]) -> list[list[int]]:
        """`encode` as lists; of a refusal no ids."""
        encoded = self._plainly([text if isinstance(text, str) else "" for text in texts])
        if self.control_tokens == "plain":
            marked = (isinstance(text, str) and OPEN in text for text in texts)
            encoded = [
                self._encode_marked(str(text)) if mark else ids
                for text, mark, ids in zip(texts, marked, encoded, strict=True)
            ]
        lead = self._lead
        return [
            lead + ids if bare and ids[: len(lead)] != lead else ids
            for ids, bare in zip(encoded, plain, strict=True)
        ]

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

        kind = type(self.tokenizer)
        fast = isinstance(self.tokenizer, PreTrainedTokenizerFast)
        if not fast or kind.__call__ is not PreTrainedTokenizerBase.__call__:
            return None
        return (
            self.tokenizer.backend_tokenizer
            if kind._encode_plus is PreTrainedTokenizerFast._encode_plus
            else None
        )

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
        return [
            _accepted(completion) for completion in self.try_complete(questions, answers, eos_ids)
        ]

    def try_complete(
        self, questions: Sequence[Question], answers: Sequence[Content], eos_ids: Sequence[int]
    ) -> list[EncodedAnswer | Refusal]:
        """`complete`, but conversations that the chat template refuses give a `Refusal` instead of
        an error.
        """
        marks = self.end_marks(eos_ids)
        turns = [
            _between_marks(question, _turns(answer), marks)
            for question, answer in zip(questions, answers, strict=True)
        ]
        chats = [
            self._answered(question, spoken)
            for question, spoken in zip(questions, turns, strict=True)
        ]
        whole = self._complete_ones(questions, turns, self._rendered(chats))
        joint = self._ids(whole, [question.plain for question in questions])
        completions: list[EncodedAnswer | Refusal] = []
        for question, spoken, rendered, ids in zip(questions, turns, whole, joint, strict=True):
            if isinstance(rendered, Refusal):
                completions.append(rendered)
            else:
                written = unmarked(rendered)
                completions.append(self._completion(question, spoken, written, ids, eos_ids))
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
        for question in questions:
            first, *rest = question.example.steps
            steps = [behind_opening(question.text, first), *rest]
            last = before_end(steps[-1], marks)
            solved.append([*(step + separator for step in steps[:-1]), last])
        chats = [
            self._answered(question, [{"role": "assistant", "content": "".join(texts)}])
            for question, texts in zip(questions, solved, strict=True)
        ]
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
        closing = "" if found else closing_of(question, answer)
        texts[0] = (before if found else closing) + texts[0]
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
        chat = Chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}])
        text = self._rendered([chat])[0] if self.tokenizer.chat_template else ""
        behind = text.rpartition(MARK)[2].lstrip() if isinstance(text, str) else ""
        mark = self.control_pattern.match(behind)
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
        texts, without = list(whole), []
        for i, (question, answer, rendered) in enumerate(zip(questions, turns, whole, strict=True)):
            if isinstance(rendered, Refusal) or _is_text(answer):
                continue
            if refusal := _lost(question, answer, unmarked(rendered)):
                texts[i] = refusal
                continue
            for place, message in enumerate(answer):
                for key in beside(message):
                    bare = {name: value for name, value in message.items() if name != key}
                    without.append(
                        (
                            i,
                            key,
                            self._answered(question, [*answer[:place], bare, *answer[place + 1 :]]),
                        )
                    )
        for (i, key, _), rendered in zip(
            without, self._rendered([chat for _, _, chat in without]), strict=True
        ):
            if rendered == whole[i] and not isinstance(texts[i], Refusal):
                why = f"it does not write the {key} of an answer"
                texts[i] = Refusal(
                    questions[i].where, why, f"whose {key} the chat template does not write"
                )
        return texts

    def is_stable(self, row: Row, answer: str, where: str = "row") -> bool:
        """True if the ids of the row's prompt are a prefix of the ids of the prompt answered with
        `answer`.

        False means that the text of a whole conversation is tokenised otherwise than the policy
        wrote it.
        """
        question = self.ask([self.read(row, where)])[0]
        return self.complete([question], [answer], ())[0].stable

    def _extras(
        self, example: ReadRow
    ) -> tuple[tuple[str, ...], Schemas | None, Mapping[str, Any], bool]:
        """What a row brings into its prompt: control tokens, tools, variables, and whether its
        tools cannot be read.

        Control tokens are those whose text stands in messages, tools and variables, once each.
        Plain strings and the assistant's
        messages are not searched: both may hold the model's own format on purpose.
        """
        content, variables = example.content, example.variables
        tools = tools_in(example.row) if self.tools is None else self.tools(example.row) or ()
        control: tuple[str, ...] = ()
        if not isinstance(content, str):
            foreign = self._foreign(content)
            if tools or variables or not all(map(_is_bare, foreign)):
                texts = _texts_of([foreign, tools if self.tools is None else None, variables])
            else:
                texts = [str(message["content"]) for message in foreign]
            control = tuple(
                dict.fromkeys(token for text in texts for token in self.typed_pattern.findall(text))
            )
        if tools and self.tools is None and self.control_tokens == "plain":
            tools = self.shielded(tools)
        return control, tools or None, self.with_own(variables), tools is None

    def with_own(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Further variables of the chat template: of all conversations, and those of a row."""
        if not variables:
            return self.variables
        return {
            **self.variables,
            **(self.shielded(variables) if self.control_tokens == "plain" else variables),
        }

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
        starts = [i for i in range(len(full)) if full[i : i + len(bare)] == bare]
        return list(full[: starts[0]]) if starts else []

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
        return [
            self.shielded(message) if id(message) in foreign else message for message in content
        ]

    def shielded(self, value: Value) -> Value:
        """A message, tools or variables whose control tokens stand between marks: `encode` makes
        plain text of them (`control_tokens` is `plain`)."""
        return _map_texts(value, self._mark)

    def _mark(self, text: str) -> str:
        return self.typed_pattern.sub(lambda token: f"{OPEN}{token[0]}{CLOSE}", unmarked(text))

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
        special = {
            str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special
        }
        return frozenset(special | set(self.tokenizer.all_special_tokens))

    @cached_property
    def _control(self) -> frozenset[str]:
        added = map(str, self.tokenizer.added_tokens_decoder.values())
        return self._special | {token for token in added if _is_mark(token)}

    @cached_property
    def _plain_core(self) -> Any:
        """A copy of a fast tokenizer's core to which control tokens are text; None for a slow one."""
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
        broken = self.typed_pattern.sub(
            lambda mark: f"{mark[0][:1]}{OPEN}{mark[0][1:]}", text
        ).split(OPEN)
        encoded = (
            self.tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            for piece in broken
        )
        return [token for ids in encoded for token in ids]

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
        rendered = iter(self.shown([chat for chat in chats if isinstance(chat, Chat)]))
        return [next(rendered)[1] if isinstance(chat, Chat) else chat for chat in chats]

    def shown(self, chats: Sequence[Chat]) -> list[tuple[Chat, str | Refusal]]:
        """Each chat as the template can show it, and its text.

        Some templates want the arguments of calls as JSON text, some as what the text stands for.
        """
        rendered = list(zip(chats, render_chats(self.tokenizer, chats), strict=True))
        for as_text in (False, True):
            again = [i for i, one in enumerate(rendered) if _is_garbled(*one)]
            others = [
                replace(chats[i], messages=with_arguments(chats[i].messages, as_text=as_text))
                for i in again
            ]
            for i, other, text in zip(
                again, others, render_chats(self.tokenizer, others), strict=True
            ):
                if not _is_garbled(other, text):
                    rendered[i] = other, text
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
            return Refusal(
                question.where,
                why,
                "whose answer is more than text, behind a prompt that is a string",
            )
        if content[-1]["role"] == answer[0]["role"] == "assistant":
            last = {
                **content[-1],
                **answer[0],
                "content": str(content[-1]["content"]) + str(answer[0]["content"]),
            }
            content, answer = content[:-1], [last, *answer[1:]]
        return Chat(
            [*content, *answer], question.where, tools=question.tools, variables=question.variables
        )


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A prompt on its way from a row to a record."""

    example: ReadRow
    """Its row, as it was read."""
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
        """Its row, for messages."""
        return self.example.where

    @property
    def content(self) -> Content:
        """What it asks."""
        return self.example.content

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
    """Of an answer in steps the place of each step's last token."""
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
    turns = answer if isinstance(answer, str) else checked(answer, "completion", "an answer")
    return [{"role": "assistant", "content": turns}] if isinstance(turns, str) else turns


def behind_opening(prompt: str, answer: str) -> str:
    r"""An answer that repeats the `<think>` with which its prompt ends, without it.

    >>> behind_opening("1+1=<think>\n", "<think>\n2</think>"), behind_opening("1+1=", "<think>2</think>")
    ('2</think>', '<think>2</think>')
    """
    opened = prompt[prompt.rfind(THINK) :] if prompt.rstrip().endswith(THINK) else ""
    if not opened or not answer.lstrip().startswith(THINK):
        return answer
    bare = answer.lstrip()
    return bare[len(opened) :] if bare.startswith(opened) else bare.removeprefix(THINK)


def closing_of(question: Question, answer: str) -> str:
    """What closes the reasoning that a chat prompt opens, where an answer has none."""
    if question.plain or not question.text.rstrip().endswith(THINK) or THINK_END in answer:
        return ""
    return f"\n{THINK_END}\n\n"


def _between_marks(question: Question, answer: Messages, marks: tuple[str, ...]) -> Messages:
    """An answer without the marks that its template writes around it; behind a plain prompt it ends
    itself.
    """
    texts = [str(message["content"]) for message in answer]
    texts[0] = behind_opening(question.text, texts[0])
    texts[-1] = texts[-1] if question.plain else before_end(texts[-1], marks)
    return [{**message, "content": text} for message, text in zip(answer, texts, strict=True)]


def before_end(text: str, marks: tuple[str, ...]) -> str:
    """An answer without the mark at its end that ends a turn or a completion: one is written behind
    every answer.
    """
    while (bare := text.rstrip()).endswith(marks):
        text = next(bare.removesuffix(mark) for mark in marks if bare.endswith(mark))
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
    if any(
        _squeezed(str(message["content"])) not in _squeezed(behind)
        for message in answer
        if message["role"] == "assistant"
    ):
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
    _map_texts(value, lambda text: texts.append(text) or text)
    return texts


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same with every string changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            _map_texts(key, change): inner if _is_name(key, inner) else _map_texts(inner, change)
            for key, inner in value.items()
        }
    return (
        [_map_texts(inner, change) for inner in value] if isinstance(value, list | tuple) else value
    )


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
    r"</?(table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup|code|a|br|ul|ol|li|p|div|span)>"
)


def _is_mark(token: str) -> bool:
    r"""True if a token that is added to a vocabulary is a mark of the format, and neither white
    space, a word nor HTML.

    GPT-NeoX and Phi add runs of spaces, Gemma adds HTML's tags.

    >>> [_is_mark(token) for token in ("<tool_call>", "[TOOL_CALLS]", "    ", "\\boxed{", "<table>")]
    [True, True, False, False, False]
    """
    return _MARK.fullmatch(token.strip()) is not None and _HTML.fullmatch(token.strip()) is None


def unmarked(text: str) -> str:
    """A text without the marks around control tokens."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def ended(ids: list[int], eos_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Ends the ids with EOS: white space behind the last EOS is cut (templates write a newline
    there), a missing one is added.
    """
    last = max(
        (len(ids) - 1 - ids[::-1].index(token) for token in eos_ids if token in ids), default=-1
    )
    if last >= 0 and (last + 1 == len(ids) or not str(tokenizer.decode(ids[last + 1 :])).strip()):
        ids = ids[: last + 1]
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
    for _, group in groupby(tokens, key=lambda token: token[:1]):
        alike = list(group)
        first, last = alike[0], alike[-1]
        shared = first[
            : next(
                (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
            )
        ]
        rest = [token[len(shared) :] for token in alike if token != shared]
        behind = f"(?:{_alternatives(rest)})" + "?" * (len(rest) < len(alike)) if rest else ""
        branches.append(re.escape(shared) + behind)
    return "|".join(branches)
