"""A tokenizer with a template that shows tools, and an engine that plays a script: it holds conversations as the engines do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from groupwise.data.tokenizers import byte_tokenizer
from groupwise.environments.chat_tokens import Speech
from groupwise.environments.harness import FunctionHarness
from groupwise.environments.harness_episodes import CapturedWorld, Limits
from groupwise.records import Branch, Episode, Finish, Prompt, Sampling

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>\n"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Everything as it was said, as Qwen 2.5's."""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
WAIT = 60.0
"""Seconds after which something hangs."""


@dataclass(frozen=True)
class Played:
    """What an engine makes of an episode."""

    tokens: list[int]
    trained: list[bool]
    finish: Finish
    episode: Episode
    sampled: list[list[int]]
    """The ids of each turn."""
    behind: list[list[int]]
    """What each turn was drawn behind."""
    limits: list[int | None]


def play(world, prompt: Prompt, script: Callable[[int], tuple[Sequence[int], Finish]], *, index: int = 0) -> Played:
    """Hold a conversation: turn k is `script(k)`; its tokens have the log-probs -0.5, -1.5, ... by their place in the turn."""
    conversation = world.begin(prompt, index, seed=7)
    behind, tokens, trained = list(map(int, prompt.tokens)), [], []
    sampled, contexts, limits, branches = [], [], [], []
    reply = conversation.open().result(WAIT)
    while reply.finish is None:
        tokens += map(int, reply.tokens)
        trained += [False] * reply.tokens.size
        behind = behind + list(map(int, reply.tokens)) if reply.context is None else list(map(int, reply.context))
        branches += [] if reply.context is None else [Branch(begin=len(tokens), context=reply.context)]
        turn, finish = script(len(sampled))
        contexts.append(behind)
        limits.append(reply.limit)
        sampled.append(list(turn))
        tokens, trained, behind = tokens + list(turn), trained + [True] * len(turn), behind + list(turn)
        logp = [-0.5 - place for place in range(len(turn))]
        reply = conversation.answer(turn, finish, logp=logp, version=3).result(WAIT)
    episode = replace(conversation.close(reply.finish), branches=tuple(branches))
    return Played(tokens, trained, reply.finish, episode, sampled, contexts, limits)


@pytest.fixture(scope="session")
def chat_tokenizer():
    """Bytes, a template with tools, and ends as Qwen's."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def end_id(chat_tokenizer) -> int:
    return int(chat_tokenizer.convert_tokens_to_ids("<|im_end|>"))


@pytest.fixture
def worlds(chat_tokenizer, end_id) -> Iterable[Callable[..., CapturedWorld]]:
    """`worlds(harness, **limits)`: a world of a function, or of any harness; closed with the test."""
    made = []

    def make(harness, *, sampling: Sampling | None = None, context: int = 8192, token=None, host="127.0.0.1", **limits):
        harness = FunctionHarness(harness) if callable(harness) else harness
        given = Limits(
            sampling=sampling or Sampling(max_new_tokens=4096), context=context, vocabulary=len(chat_tokenizer), **limits
        )
        made.append(CapturedWorld(harness, Speech(chat_tokenizer, (end_id,)), given, name="own", token=token, host=host))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def says(chat_tokenizer, end_id):
    """`says("a", "b")`: a script of turns, each ended by EOS; `says(..., cut={1})`: but for those."""

    def script(*texts: str, cut: Iterable[int] = ()):
        def turn(k: int):
            ids = chat_tokenizer(texts[k], add_special_tokens=False)["input_ids"]
            return (ids, Finish.LENGTH) if k in set(cut) else ([*ids, end_id], Finish.EOS)

        return turn

    return script


@pytest.fixture
def a_prompt(chat_tokenizer) -> Prompt:
    return Prompt(id="0/7", tokens=np.array(chat_tokenizer("Q")["input_ids"]), text="Q", row={"question": "2+3", "answer": 5})
