"""The texts that a proof compares: short ones beside each other, on both sides of every length at
which the model changes.

Where an engine samples, they are what it draws, so that one pass of the model judges both the
sampler and the scorer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from groupwise.data.images import PromptImages
from groupwise.environments.conversation import Reply, Stream
from groupwise.models import recurrence, rope_tables
from groupwise.models.config_checks import WINDOWS
from groupwise.models.policy import Policy
from groupwise.models.reach import ATTRIBUTE, Reach
from groupwise.models.reward_head import readout, reads_tokens
from groupwise.records import Episode, Finish, Prompt, Rollout, Sample, Sampling
from groupwise.rollout.engine import Engine
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.transformers import TransformersEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenSampler:
    """What samples in a run."""

    make: Callable[..., Engine]
    """(policy, max_rows=..., environment=...) -> engine."""
    name: str
    remedy: str
    """What to do if it differs."""
    path: str = "sampling"
    conversations: bool = False
    """An environment answers its turns."""


NATIVE = ProvenSampler(
    make=NativeEngine, name="native", remedy="set rollout.engine to 'transformers'"
)
TRANSFORMERS = ProvenSampler(
    make=TransformersEngine,
    name="transformers",
    remedy="sample it with rollout.engine 'vllm', or train it on data (sft, dpo)",
)

NEAR = 96
"""Tokens of the longest text whose gradients are compared."""
ACROSS = 8192
"""Tokens of the longest text that lies behind a length at which the model changes: in single
operations attention is quadratic.
"""
FEW = 6
"""Tokens left for a completion behind the longest prompt."""
FIRST, LAST = 2, 12
"""Tokens that are compared of the first completion of a group and of the last."""


class Size(NamedTuple):
    """How many texts, and how long."""

    prompts: tuple[int, ...]
    """Tokens of those that are always there."""
    group: int
    rows: int
    """Completions that are decoded at a time, fewer than all, so that some wait."""
    tokens: int
    """Longest completion of all; with 70 the capacity of a row grows."""
    far: int
    """Tokens of the longest text, if the run reaches them."""


# Prompts of one length, and of a single token.
FULL = Size(prompts=(1, 9, 9), group=8, rows=24, tokens=70, far=1040)
SMALL = Size(prompts=(5, 5), group=2, rows=3, tokens=4, far=0)
"""On a CPU, of a model of more than `LARGE` parameters.  The lengths of a group differ, so that its
stream is another when it is turned round.  Far texts are left out, but those that lie behind a
length at which the model changes."""
WHOLE = 2
"""The last completion of the second prompt."""
LARGE = 5_000_000


def is_large(policy: Policy) -> bool:
    """True if a token costs much."""
    return (
        policy.device.type == "cpu"
        and sum(parameter.numel() for parameter in policy.model.parameters()) > LARGE
    )


def length_of(sample: Sample) -> int:
    """Tokens of a text that are computed: the last one is predicted alone."""
    return sample.prompt.size + sample.completion.size - 1


def switches(model: nn.Module, longest: int) -> tuple[int, ...]:
    """Lengths below `longest` above which the model computes otherwise: windows and chunks,
    convolutions, frequencies, steps of a temperature."""
    sizes = {at for at, _ in rope_tables.switches(model)} | recurrence.changes(model)
    for module in model.modules():
        reach: Reach = vars(module).get(ATTRIBUTE, Reach())
        sizes |= {reach.window, reach.chunk}
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    names = (*WINDOWS, "attention_chunk_size", "floor_scale", "original_max_position_embeddings")
    sizes |= {getattr(text, name, None) for name in names}
    return tuple(
        sorted(size for size in sizes if isinstance(size, int) and 0 < size < min(longest, ACROSS))
    )


def prompts_of(policy: Policy, size: Size, longest: int, seed: int) -> list[np.ndarray]:
    """Random ones for texts of at most `longest` tokens."""
    rng, changes = np.random.default_rng(seed), switches(policy.model, longest)
    near = [max(min(length, longest - 2), 1) for length in size.prompts]
    across = [min(longest, size.far) - FEW]
    for at in changes:
        if size.far:
            across += [at - 2, at + 1]
        else:
            across.append(at - 1)
        if 2 * at < size.far:
            across.append(2 * at - 2)
    far = {length for length in across if 0 < length < longest}
    return [_ids(policy, rng, length) for length in (*near, *sorted(far))]


def _ids(policy: Policy, rng: np.random.Generator, n: int) -> np.ndarray:
    """n random ids; transformers finds the end of what a scoring model reads by its padding, so
    there is none in it.
    """
    ids = rng.integers(0, policy.vocabulary, size=n)
    if not reads_tokens(policy):
        return ids
    return np.where(ids == policy.model.config.pad_token_id, (ids + 1) % policy.vocabulary, ids)


def written(policy: Policy, size: Size, longest: int, seed: int = 0) -> list[Sample]:
    """Texts that no engine drew."""
    rng, texts = np.random.default_rng(seed), list[Sample]()
    prompts = prompts_of(policy, size, longest, seed)
    for place, prompt in enumerate(prompts):
        begin, lengths = FEW, [LAST]
        if place == 1:
            lengths = [size.tokens]
        if prompt.size <= NEAR:
            begin = prompt.size
            if place > 0:
                lengths.insert(0, FIRST)
        for n in lengths:
            completion = _ids(policy, rng, min(n, size.tokens, longest - prompt.size))
            text = np.concatenate([prompt, completion])
            texts.append(_sample(policy, str(place), text[:begin], text[begin:]))
    for name, prompt in prompts_with_images(policy, seed).items():
        for n in (FIRST, LAST):
            completion = _ids(policy, rng, n)
            completion = np.where(completion == policy.vision.token, 0, completion)
            text = _sample(policy, name, prompt.tokens, completion)
            texts.append(replace(text, images=prompt))
    return texts


def prompts_with_images(policy: Policy, seed: int) -> dict[str, PromptImages]:
    """Prompts with images of a policy that reads them, neighbours that are alike but for their
    images; without those that leave no room for a completion.
    """
    if policy.vision is None:
        return {}
    rng, prompts = np.random.default_rng(seed), {}
    for place, prompt in enumerate(policy.vision.examples(policy, rng)):
        if prompt.tokens.size + LAST <= policy.context:
            prompts[f"image {place}"] = prompt
    return prompts


def drawn(
    policy: Policy, sampler: ProvenSampler, size: Size, longest: int, seed: int = 0
) -> list[Sample]:
    """What an engine draws, in turns where an environment answers."""
    no_text: Any = SimpleNamespace(decode=lambda ids, **_: "")
    with_images = {} if sampler.conversations else prompts_with_images(policy, seed)
    most = max([longest, *(images.tokens.size + LAST for images in with_images.values())])
    endless = replace(policy, eos_ids=(), context=most, tokenizer=no_text)
    environment, tokens = None, min(LAST, size.tokens)
    if sampler.conversations:
        environment = SimpleNamespace(begin=partial(_RandomReplies, policy.vocabulary))
        tokens = LAST
    engine = sampler.make(endless, max_rows=size.rows, environment=environment)
    sampling = Sampling(max_new_tokens=tokens)
    columns = prompts_of(policy, size, longest, seed)
    prompts = []
    for place, ids in enumerate(columns):
        prompts.append(Prompt(id=f"{place:04}", tokens=ids, text="", row={}))
    for name, images in with_images.items():
        prompts.append(Prompt(id=name, tokens=images.tokens, text="", images=images))
    groups: dict[str, Sequence[Rollout]] = {}
    for group in engine.generate(prompts, group_size=size.group, sampling=sampling, seed=seed):
        groups[group[0].prompt.id] = group
    texts, behind = [], []
    for place, prompt in enumerate(prompts):
        rollouts = groups[prompt.id]
        if prompt.images is not None:
            for rollout, n in ((rollouts[0], FIRST), (rollouts[-1], LAST)):
                n = _before_placeholder(policy, rollout.tokens[:n])
                if n:
                    behind.append(replace(_drawn(policy, rollout, n), images=prompt.images))
            continue
        near = prompt.tokens.size <= NEAR
        if near and place > 0:
            texts.append(_drawn(policy, rollouts[0], FIRST))
        texts.append(_drawn(policy, rollouts[-1], LAST))
    if size is FULL:  # one that is decoded alone; of a small size the last has waited for all
        prompt = replace(prompts[1], id="alone")
        sampling = replace(sampling, max_new_tokens=size.tokens)
        (alone,) = engine.generate([prompt], group_size=1, sampling=sampling, seed=seed)
        texts.append(_drawn(policy, alone[0], size.tokens))
    return [*texts, *behind]


def _before_placeholder(policy: Policy, tokens: np.ndarray) -> int:
    """How many tokens stand before the first placeholder: the model's own pass would ask for an
    image there.
    """
    places = np.flatnonzero(tokens == policy.vision.token)
    return int(places[0]) if places.size else tokens.size


def fewer_tokens(texts: Sequence[Sample]) -> list[Sample]:
    """The texts, of which all but `WHOLE` have a weight for one token only: products with the head
    are most of what they cost.
    """
    fewer = []
    for place, text in enumerate(texts):
        if place == WHOLE:
            fewer.append(text)
            continue
        last, weight = np.flatnonzero(text.weight)[-1], np.zeros_like(text.weight)
        weight[last] = text.weight[last]
        fewer.append(replace(text, weight=weight))
    return fewer


def _drawn(policy: Policy, rollout: Rollout, n: int) -> Sample:
    """The first n tokens of a rollout."""
    sample = _sample(policy, rollout.prompt.id, rollout.prompt.tokens, rollout.tokens[:n])
    weight = np.where(rollout.trained[:n], sample.weight, 0.0)
    return replace(sample, weight=weight, behavior_logp=rollout.behavior_logp[:n])


def _sample(policy: Policy, group: str, prompt: np.ndarray, completion: np.ndarray) -> Sample:
    weight = np.random.default_rng(prompt.size).random(completion.size) + 0.1
    if reads_tokens(policy):  # what is read is the state behind the last token
        return readout(group, prompt, completion, np.append(np.zeros(completion.size), weight[-1]))
    return Sample(group=group, prompt=prompt, completion=completion, weight=weight)


class _RandomReplies:
    """A conversation whose turns are mostly short, each answered by a few random tokens until none
    remain.
    """

    def __init__(self, vocabulary: int, stream: Stream, *, seed: int) -> None:
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
        reply.set_result(
            Reply(
                tokens=self.rng.integers(0, self.vocabulary, size=n),
                limit=int(self.rng.choice((1, 2, 3, 20))),
            )
        )
        return reply
