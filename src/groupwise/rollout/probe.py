"""Proof that what an engine samples is what the model's own forward pass gives: prefill, decoding, truncated sampling.

Prompts lie on both sides of every length at which the model changes something, and completions grow across them, beside others of
other lengths.  The log-prob that a token was drawn with has to be the one that the model's own forward pass over the text gives.
Where a run holds conversations, completions are sampled in turns too, with tokens between them that the policy did not write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.environments.conversation import Reply, World
from groupwise.errors import ConfigError, EngineError
from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.models.probe import (
    DRAWS,
    LONGEST,
    LOWER_PART,
    PATHS,
    VALUES,
    Proof,
    compare_lower,
    dtype_of,
    in_words,
    lowered,
    positions,
    proven_before,
    refusal,
    round_weights,
    switches,
    wrapped,
)
from groupwise.models.probe import prove as prove_training
from groupwise.records import Episode, Finish, Prompt, Rollout, Sampling, Turn
from groupwise.rollout.engine import Engine
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.teacher_mixed import MixedEngine
from groupwise.rollout.transformers import TransformersEngine

PATH, TURNS, MIXTURE = "sampling", "conversations", "sampling from a mixture"
REMEDY = "set rollout.engine to 'transformers'"
UNMIXED = "set group.mix to 0"
OTHERS = "sample it with rollout.engine 'vllm', or train it on data (sft, dpo)"
GROUP, ROWS, BEYOND = 2, 5, 6
"""Completions of a prompt; rows that are decoded at a time, so that some wait; tokens that completions grow beyond a switch."""
FAR, FEW, MANY, LOWER_FAR = 536, 12, 70, 4.0
"""Tokens of prompts that are far longer than any switch (positions lose their last bits in bfloat16 from 256 on); tokens that are
drawn behind them; tokens that are drawn in many rows behind a short one, so that the capacity of a row grows.  In a lower type few
texts lie less evenly from float32 than many: how much further than the model's own pass they may."""


def prove(model: PreTrainedModel, *, attention: str = "shared", paths: Sequence[str] = (*PATHS, PATH), seed: int = 0) -> Proof:
    """`models.probe.prove`, and the engine that belongs to this attention: the native one, or transformers' with `single`."""
    proof = prove_training(model, attention=attention, paths=[path for path in paths if path != PATH], seed=seed)
    if PATH not in paths:
        return proof
    engine: Any = TransformersEngine if attention == "single" else NativeEngine
    remedy = OTHERS if engine is TransformersEngine else REMEDY
    lengths, worst = sampled(wrapped(model, attention), engine, remedy=remedy, seed=seed)
    return replace(
        proof,
        paths=(*proof.paths, PATH),
        lengths=tuple(sorted({*proof.lengths, *lengths})),
        difference=max(proof.difference, worst),
    )


def prove_engine(policy: Policy, make: Callable[..., Engine], *, conversations: bool = False) -> Proof:
    """Prove that an engine of ours samples from policies of this kind, on a small copy; see `models.probe.prove_policy`.

    make: the engine's class.   conversations: a world will answer its turns.   Raises ConfigError.
    """
    remedy, dtype = OTHERS if make is TransformersEngine else REMEDY, dtype_of(policy)
    paths = (PATH, TURNS) if conversations else (PATH,)

    def run(small: PreTrainedModel) -> Proof:
        if dtype == "bfloat16":
            round_weights(small)
        ours = wrapped(small, policy.attention)
        lengths, worst = sampled(ours, make, conversations=conversations, remedy=remedy, dtype=dtype)
        return Proof(family=type(small).__name__, paths=paths, lengths=lengths, switches=switches(small), difference=worst)

    return proven_before(policy.model, (*paths, make.__name__, policy.attention, dtype), run)


def prove_mixed(policy: Policy, mix: float) -> Proof:
    """The same of an engine that draws from a mixture with a teacher, for a model on either side of it.

    A mixture of a model with itself is the model: its log-probs, which two models with caches of their own have computed, must be
    those of the model's own forward pass.   mix: the teacher's share.   Raises ConfigError.
    """

    def mixing(policy: Policy, **settings: Any) -> Engine:
        return MixedEngine(policy, teacher=policy.frozen_copy(), mix=mix, **settings)

    def run(small: PreTrainedModel) -> Proof:
        lengths, worst = sampled(wrapped(small, policy.attention), mixing, remedy=UNMIXED, plain=True)
        return Proof(family=type(small).__name__, paths=(MIXTURE,), lengths=lengths, switches=switches(small), difference=worst)

    return proven_before(policy.model, (MIXTURE, str(mix), policy.attention), run)


@in_words
def sampled(
    policy: Policy,
    make: Callable[..., Engine],
    *,
    conversations: bool = False,
    remedy: str = REMEDY,
    dtype: str = "float32",
    plain: bool = False,
    seed: int = 0,
) -> tuple[tuple[int, ...], float]:
    """Sample, and compare with the model's own forward pass: lengths that were sampled, and the largest difference in nats.

    make: an engine's class.   conversations: sample in turns too.   plain: it knows no truncated sampling.
    dtype: where it is not float32, what is sampled in that type may lie as far from float32 as `models.probe.compare_lower` allows.
    Raises ConfigError if it is too large, or if the engine refuses the model.
    """
    policy = replace(policy, tokenizer=_NoText())
    worst, lengths = 0.0, set[int]()
    for asked in _rounds(policy, conversations, seed):
        if plain and asked.sampling.truncates:
            continue
        drawn = asked.drawn(policy, make, remedy)[:: -asked.every]
        for rollout, together_N in zip(drawn, _truths(policy, drawn), strict=True):
            difference = _apart(rollout, together_N)
            if not difference <= VALUES:  # by a model that a batch is not the same to
                difference = _apart(rollout, _truth(policy, rollout))
            if not difference <= VALUES:
                said = f"a completion of {len(rollout)} tokens behind {rollout.prompt.tokens.size} differs by {difference:.2g} nats"
                raise ConfigError(refusal(type(policy.model).__name__, asked.path, said, remedy))
            worst = max(worst, difference)
            lengths.add(rollout.prompt.tokens.size + len(rollout))
    if dtype != "float32":
        _compare_lower(policy, make, conversations, remedy, dtype, seed)
    return tuple(sorted(lengths)), worst


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What an engine is asked at once."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    context: int
    """Tokens of the longest text."""
    path: str = PATH
    group: int = GROUP
    rows: int = ROWS
    every: int = 1
    """Of how many completions one is compared, from the last one on."""
    world: World | None = None
    lower: float | None = None
    """How many times as far from float32 as the model's own forward pass it may lie in a lower type; None: not asked there."""

    def drawn(self, policy: Policy, make: Callable[..., Engine], remedy: str) -> list[Rollout]:
        """The engine's answer.  Raises ConfigError if it refuses the model."""
        try:
            engine = make(replace(policy, context=self.context), max_rows=self.rows, world=self.world)
            groups = engine.generate(self.prompts, group_size=self.group, sampling=self.sampling, seed=0)
            return [rollout for group in groups for rollout in group]
        except EngineError as error:
            raise ConfigError(refusal(type(policy.model).__name__, self.path, str(error), remedy)) from error


def _rounds(policy: Policy, conversations: bool, seed: int) -> list[Round]:
    """Texts around every switch; truncated support; many rows behind prompts of one length; far on; turns."""
    rng, changes, numbers = np.random.default_rng(seed), switches(policy.model), itertools.count()

    def prompt(size: int) -> Prompt:
        return Prompt(id=str(next(numbers)), tokens=rng.integers(0, policy.vocabulary, size=size), text="", row={})

    longest = min(policy.context, LONGEST, max(changes, default=10) + BEYOND)
    near = min(policy.context, 2 * longest - BEYOND)  # twice the last change: windows wrap again
    sizes = {1, 4, 9, *(at + step for at in changes for step in (-2, 1))}
    prompts = [prompt(size) for size in sorted(size for size in sizes if 0 < size < longest)]
    whole = Sampling(temperature=1.0, max_new_tokens=longest)
    alike = [prompt(min(9, longest - 1)) for _ in range(3)]
    many = replace(whole, max_new_tokens=max(longest, MANY))
    context = positions(policy.model, FAR + FEW)
    far = [prompt(max(context - FEW, 1)) for _ in range(2)]
    rounds = [
        Round(prompts=prompts, sampling=whole, context=near, lower=LOWER_PART),
        Round(prompts=prompts[-2:], sampling=replace(whole, top_k=5, max_new_tokens=4), context=near),
        Round(prompts=alike, sampling=many, context=context, group=8, rows=24, every=7),
        Round(prompts=far, sampling=replace(whole, max_new_tokens=FEW), context=context, group=1, lower=LOWER_FAR),
    ]
    if conversations:
        world = _Talkative(policy.vocabulary)
        rounds.append(Round(prompts=prompts, sampling=whole, context=near, path=TURNS, world=world, lower=LOWER_PART))
    return rounds


def _compare_lower(policy: Policy, make: Callable[..., Engine], conversations: bool, remedy: str, dtype: str, seed: int) -> None:
    """Raises ConfigError for a round that lies too far from float32 in every one of `DRAWS` draws: a near tie between two experts,
    which rounding decides otherwise here than there, lies so in one."""
    lower, family = lowered(policy, dtype), type(policy.model).__name__
    for rounds in zip(*(_rounds(policy, conversations, seed + draw) for draw in range(DRAWS)), strict=True):
        refused = list[ConfigError]()
        for asked in rounds if rounds[0].lower is not None else ():
            rollouts = asked.drawn(lower, make, remedy)
            trained = np.concatenate([rollout.trained for rollout in rollouts])
            exact, own = (np.concatenate([_truth(by, rollout) for rollout in rollouts])[trained] for by in (policy, lower))
            ours = np.concatenate([rollout.behavior_logp for rollout in rollouts])[trained]
            try:
                compare_lower(family, asked.path, f"in {dtype} log-probs lie", ours - exact, own - exact, remedy, asked.lower)
                break
            except ConfigError as error:
                refused.append(error)
        else:
            if refused:
                raise refused[0]


def _apart(rollout: Rollout, truth_N: np.ndarray) -> float:
    """The largest difference of a log-prob, nats."""
    return float(np.abs(rollout.behavior_logp - truth_N)[rollout.trained].max())


def _truths(policy: Policy, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """`_truth` of each; those of one length are passed together."""
    alike: dict[int, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        alike.setdefault(rollout.prompt.tokens.size + len(rollout), []).append(place)
    found = {}
    for places in alike.values():
        logits_BSV = _logits(policy, [rollouts[place] for place in places])
        found |= {place: _chosen(rollouts[place], logits_SV) for place, logits_SV in zip(places, logits_BSV, strict=True)}
    return [found[place] for place in range(len(rollouts))]


def _truth(policy: Policy, rollout: Rollout) -> np.ndarray:
    """Log-probs of a rollout's tokens by the model's own forward pass over its text, over the support it was drawn from."""
    return _chosen(rollout, _logits(policy, [rollout])[0])


@torch.no_grad()
def _logits(policy: Policy, rollouts: Sequence[Rollout]) -> Tensor:
    """(rollouts, tokens, vocabulary), of texts of one length.

    With frequencies that depend on the length: over the text as it is without the token that was only drawn.
    """
    ids_BS = torch.from_numpy(np.stack([np.concatenate([rollout.prompt.tokens, rollout.tokens[:-1]]) for rollout in rollouts]))
    with plain_attention(policy.model) as model, policy.precision():
        return model(input_ids=ids_BS, use_cache=False).logits[..., : policy.vocabulary]


def _chosen(rollout: Rollout, logits_SV: Tensor) -> np.ndarray:
    logits_NV = logits_SV[rollout.prompt.tokens.size - 1 :].double() / (rollout.sampling.temperature or 1.0)
    logp_NV = logits_NV.log_softmax(-1)
    if rollout.support is not None:
        among = [logits_V[torch.from_numpy(ids.astype(np.int64))] for ids, logits_V in zip(rollout.support, logits_NV, strict=True)]
        logp_NV = logits_NV - torch.stack([logits.logsumexp(0) for logits in among])[:, None]
    return logp_NV.gather(1, torch.from_numpy(rollout.tokens.astype(np.int64))[:, None])[:, 0].numpy()


class _NoText:
    """In place of a tokenizer: tokens without a text."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Nothing."""
        return ""


class _Talkative:
    """A world that lets turns be short, and has a few random tokens to say to each, until none remain."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def begin(self, prompt: Prompt, index: int, *, seed: int) -> _Talk:
        """A conversation whose observations are random tokens."""
        return _Talk(self.vocabulary, np.random.default_rng((prompt.tokens.size, index, seed)))

    def close(self) -> None:
        """Nothing was started."""


class _Talk:
    """A conversation with it."""

    def __init__(self, vocabulary: int, rng: np.random.Generator) -> None:
        self.vocabulary, self.rng = vocabulary, rng
        self.turns: list[Turn] = []
        self.tokens = 0

    def open(self) -> Future[Reply]:
        """No tokens before the first turn."""
        return self._said(0)

    def answer(self, tokens: Sequence[int], finish: Finish, *, logp: Sequence[float], version: int) -> Future[Reply]:
        """Up to four random tokens."""
        self.turns.append(Turn(begin=self.tokens, end=self.tokens + len(tokens), finish=finish))
        self.tokens += len(tokens)
        return self._said(int(self.rng.integers(0, 5)))

    def close(self, finish: Finish) -> Episode:
        """The turns as they were drawn."""
        return Episode(turns=tuple(self.turns))

    def _said(self, n: int) -> Future[Reply]:
        self.tokens += n
        reply: Future[Reply] = Future()
        reply.set_result(Reply(tokens=self.rng.integers(0, self.vocabulary, size=n), limit=int(self.rng.integers(1, 4))))
        return reply
