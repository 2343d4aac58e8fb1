"""A tokenizer with a template that shows tools, and an engine that plays a script: it holds conversations as the engines do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from groupwise.config.settings import EnvironmentSettings
from groupwise.data.tokenizers import byte_tokenizer
from groupwise.environments.chat_codec import ChatCodec
from groupwise.environments.conversation import Stream
from groupwise.environments.harness import FunctionHarness
from groupwise.environments.harness_episodes import HarnessEnvironment
from groupwise.records import Episode, Finish, Prompt, Sampling

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


def play(environment, prompt: Prompt, script: Callable[[int], tuple[Sequence[int], Finish]], *, index: int = 0) -> Played:
    """Hold a conversation: turn k is `script(k)`; its tokens have the log-probs -0.5, -1.5, ... by their place in the turn."""
    stream = Stream(prompt, index, 1 << 30)
    conversation = environment.begin(stream, seed=7)
    sampled, behind, limits = [], [], []
    reply = conversation.open().result(WAIT)
    while reply.finish is None:
        stream.take(reply, 3, limit=1 << 30)
        turn, finish = script(len(sampled))
        behind.append(stream.ids().tolist())
        limits.append(reply.limit)
        sampled.append(list(turn))
        stream.add(list(turn), [-0.5 - place for place in range(len(turn))], 3)
        stream.end_turn(finish)
        reply = conversation.answer().result(WAIT)
    episode = conversation.close(reply.finish)
    return Played(stream.tokens, stream.trained().tolist(), reply.finish, episode, sampled, behind, limits)


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
def worlds(chat_tokenizer, end_id) -> Iterable[Callable[..., HarnessEnvironment]]:
    """`worlds(harness, **settings)`: an environment of a function, or of any harness; closed with the test."""
    made = []

    def make(harness, *, sampling: Sampling | None = None, context: int = 8192, token=None, **settings):
        harness = FunctionHarness(harness) if callable(harness) else harness
        sampling, codec = sampling or Sampling(max_new_tokens=4096), ChatCodec(chat_tokenizer, (end_id,))
        chosen = EnvironmentSettings(verifiers="own", **settings)
        size = {"context": context, "vocabulary": len(chat_tokenizer)}
        made.append(HarnessEnvironment(harness, codec, chosen, sampling, **size, token=token))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


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
