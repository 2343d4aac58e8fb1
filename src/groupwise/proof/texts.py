"""The texts that a proof compares: short ones beside each other, on both sides of every length at which the model changes.

Where an engine samples, they are what it draws, so that one pass of the model judges both the sampler and the scorer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

from groupwise.environments.conversation import Reply, Stream
from groupwise.models import recurrence, rope
from groupwise.models.loading import WINDOWS
from groupwise.models.masks import ATTRIBUTE, Reach
from groupwise.models.policy import Policy
from groupwise.models.reward_head import readout, reads_tokens
from groupwise.records import Episode, Finish, Prompt, Rollout, Sample, Sampling
from groupwise.rollout.engine import Engine
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.transformers import TransformersEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """What samples in a run."""

    make: Callable[..., Engine]
    """(policy, max_rows=..., world=...) -> engine."""
    name: str
    remedy: str
    """What to do if it differs."""
    path: str = "sampling"
    sampling: Sampling = field(default_factory=Sampling)
    """As the run draws."""
    conversations: bool = False
    """A world answers its turns."""


NATIVE = Sampler(make=NativeEngine, name="native", remedy="set rollout.engine to 'transformers'")
TRANSFORMERS = Sampler(
    make=TransformersEngine,
    name="transformers",
    remedy="sample it with rollout.engine 'vllm', or train it on data (sft, dpo)",
)


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A prompt and a completion."""

    sample: Sample
    rollout: Rollout | None = None
    """What an engine drew, of which the sample has the first tokens or all."""

    @property
    def size(self) -> int:
        """Tokens that are computed: the last one of a text is predicted alone."""
        return self.sample.prompt.size + self.sample.completion.size - 1

    @property
    def drawn(self) -> np.ndarray:
        """The log-probs that an engine drew the tokens of the policy's turns with, nats."""
        assert self.rollout is not None
        count = self.sample.completion.size
        return self.rollout.behavior_logp[:count][self.rollout.trained[:count]]


NEAR = 96
"""Tokens of the longest text whose gradients are compared."""
ACROSS = 8192
"""Tokens of the longest text that lies behind a length at which the model changes: in single operations attention is quadratic."""
FEW = 6
"""Tokens left for a completion behind the longest prompt."""
Cuts = tuple[int, ...]
"""Tokens of the completions behind a prompt that are compared: of the first of a group and the last, or of the last alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How many texts, and how long."""

    prompts: tuple[tuple[int, Cuts], ...]
    """Tokens of those that are always there, and what is compared behind them."""
    others: Cuts
    """Behind other prompts of at most `NEAR` tokens; behind longer ones the last of it."""
    beside: tuple[int, ...]
    """Where prompts end, from a length at which the model changes."""
    group: int
    rows: int
    """Completions that are decoded at a time, fewer than all, so that some wait."""
    tokens: int
    """Longest completion; with 70 the capacity of a row grows."""
    talk: int
    """Longest conversation behind its prompt."""
    far: int
    """Tokens of the longest text, if the run reaches them."""


FULL = Size(  # prompts of one length, and of a single token
    prompts=((1, (2, 7)), (9, (2, 7)), (9, (2, 70))), others=(2, 7), beside=(-2, 1), group=8, rows=24, tokens=70, talk=70, far=1040
)
SMALL = Size(prompts=((5, (4,)), (6, (1, 3))), others=(4,), beside=(-1,), group=2, rows=3, tokens=4, talk=12, far=0)
"""On a CPU, of a model of more than `LARGE` parameters: a pass takes long there, and texts of one length take one.  The lengths of
a group differ, so that its stream is another when it is turned round.  Far texts are left out, but those that lie behind a length
at which the model changes."""
LARGE = 5_000_000


def size_of(policy: Policy) -> Size:
    """By what a token costs."""
    large = sum(parameter.numel() for parameter in policy.model.parameters()) > LARGE
    return SMALL if large and policy.device.type == "cpu" else FULL


def switches(model: nn.Module, longest: int) -> tuple[int, ...]:
    """Lengths below `longest` above which the model computes otherwise: windows and chunks, convolutions, frequencies, steps of a
    temperature."""
    sizes = {at for at, _ in rope.switches(model)} | recurrence.changes(model)
    for module in model.modules():
        reach: Reach = vars(module).get(ATTRIBUTE, Reach())
        sizes |= {reach.window, reach.chunk}
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    names = (*WINDOWS, "attention_chunk_size", "floor_scale", "original_max_position_embeddings")
    sizes |= {getattr(text, name, None) for name in names}
    return tuple(sorted(size for size in sizes if isinstance(size, int) and 0 < size < min(longest, ACROSS)))


def prompts_of(policy: Policy, size: Size, longest: int, seed: int) -> list[tuple[np.ndarray, Cuts]]:
    """Random ones for texts of at most `longest` tokens, and what is compared behind each."""
    rng, changes = np.random.default_rng(seed), switches(policy.model, longest)
    near = [(max(min(length, longest - 2), 1), cuts) for length, cuts in size.prompts]
    across = [at + step for at in changes for step in size.beside]
    across += [2 * at - 2 for at in changes if 2 * at < size.far]
    far = {length for length in (*across, min(longest, size.far) - FEW) if 0 < length < longest}
    beyond = [(length, size.others if length <= NEAR else size.others[-1:]) for length in sorted(far)]
    return [(_ids(policy, rng, length), cuts) for length, cuts in [*near, *beyond]]


def _ids(policy: Policy, rng: np.random.Generator, n: int) -> np.ndarray:
    """n random ids; transformers finds the end of what a scoring model reads by its padding, so there is none in it."""
    ids = rng.integers(0, policy.vocabulary, size=n)
    if not reads_tokens(policy):
        return ids
    return np.where(ids == policy.model.config.pad_token_id, (ids + 1) % policy.vocabulary, ids)


def written(policy: Policy, size: Size, longest: int, seed: int = 0) -> list[Text]:
    """Texts that no engine drew."""
    rng, texts = np.random.default_rng(seed), list[Text]()
    for place, (prompt, cuts) in enumerate(prompts_of(policy, size, longest, seed)):
        begin = prompt.size if prompt.size <= NEAR else FEW
        for n in cuts:
            text = np.concatenate([prompt, _ids(policy, rng, min(n, longest - prompt.size))])
            texts.append(Text(_sample(policy, str(place), text[:begin], text[begin:])))
    return texts


def drawn(policy: Policy, sampler: Sampler, size: Size, longest: int, seed: int = 0, *, talks: bool = False) -> list[Text]:
    """What an engine draws.   talks: in turns."""
    no_text: Any = SimpleNamespace(decode=lambda ids, **_: "")
    endless = replace(policy, eos_ids=(), context=longest, tokenizer=no_text)
    world = SimpleNamespace(begin=lambda stream, *, seed: _RandomReplies(policy.vocabulary, stream, seed)) if talks else None
    engine = sampler.make(endless, max_rows=size.rows, world=world)
    sampling = replace(
        sampler.sampling,
        max_new_tokens=size.talk if talks else size.tokens,
        stop=(),
        temperature=sampler.sampling.temperature or 1.0,
    )
    columns = prompts_of(policy, size, longest, seed)
    prompts = [Prompt(id=f"{place:04}", tokens=ids, text="", row={}) for place, (ids, _) in enumerate(columns)]
    cuts = {prompt.id: (size.talk,) if talks else cuts for prompt, (_, cuts) in zip(prompts, columns, strict=True)}
    groups: list[Sequence[Rollout]] = list(engine.generate(prompts, group_size=size.group, sampling=sampling, seed=seed))
    if size is FULL and not talks:  # one that is decoded alone; a small size has one that has waited for all others
        groups += engine.generate([replace(prompts[1], id="alone")], group_size=1, sampling=sampling, seed=seed)
    texts = []
    for group in groups:
        lengths = cuts.get(group[0].prompt.id, size.others[-1:])
        for rollout, n in zip((group[0], group[-1])[-len(lengths) :], lengths, strict=True):
            texts.append(Text(_sample(policy, rollout.prompt.id, rollout.prompt.tokens, rollout.tokens[:n]), rollout))
    return sorted(texts, key=lambda text: text.sample.group)


def _sample(policy: Policy, group: str, prompt: np.ndarray, completion: np.ndarray) -> Sample:
    weight = np.random.default_rng(prompt.size).random(completion.size) + 0.1
    if reads_tokens(policy):  # what is read is the state behind the last token
        return readout(group, prompt, completion, np.append(np.zeros(completion.size), weight[-1]))
    return Sample(group=group, prompt=prompt, completion=completion, weight=weight)


class _RandomReplies:
    """A conversation whose turns are short, each answered by a few random tokens until none remain."""

    def __init__(self, vocabulary: int, stream: Stream, seed: int) -> None:
        self.vocabulary, self.stream = vocabulary, stream
        self.rng = np.random.default_rng((stream.prompt.tokens.size, stream.index, seed))

    def open(self) -> Future[Reply]:
        """No tokens before the first turn."""
        return self._reply(0)

    def answer(self) -> Future[Reply]:
        """Up to four random tokens."""
        return self._reply(int(self.rng.integers(0, 5)))

    def close(self, finish: Finish) -> Episode:
        """The turns as they were drawn."""
        return Episode(turns=tuple(self.stream.turns))

    def _reply(self, n: int) -> Future[Reply]:
        reply: Future[Reply] = Future()
        reply.set_result(Reply(tokens=self.rng.integers(0, self.vocabulary, size=n), limit=int(self.rng.integers(1, 4))))
        return reply
