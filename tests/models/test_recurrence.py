"""Hybrids: packed, shared and one by one are transformers' own forward pass, in float64; what leaks is found at load."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hybrids import HYBRIDS, hybrid, in_64_bits, ragged_texts
from own_pass import apart, own, packed
from sample_texts import TOKENIZER
from steps import score_rollouts
from torch import Tensor

from groupwise.data.packing import pack
from groupwise.environments.conversation import Reply, Stream
from groupwise.errors import ConfigError
from groupwise.models.attention import plain_attention
from groupwise.models.loading import make_policy
from groupwise.models.passes import forward
from groupwise.models.policy import Policy
from groupwise.models.recurrence import changes
from groupwise.models.sharded import frozen_copy
from groupwise.ops import recurrence
from groupwise.ops.recurrence import Chunks, Recurrence, Segments
from groupwise.proof.prove import prove
from groupwise.proof.texts import NATIVE
from groupwise.records import Episode, Finish, Prompt, Sampling
from groupwise.rollout.native import scheduler
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.native.kv_cache import KVCache

TALKING = replace(NATIVE, conversations=True)
EACH = [pytest.param(name, marks=() if name in ("qwen3_5", "lfm2", "granite4") else pytest.mark.slow) for name in HYBRIDS]


@pytest.fixture
def double() -> Iterator[Callable[[str], Policy]]:
    """A policy of a family, whose own code also computes in float64 what it otherwise always computes in float32."""
    with ExitStack() as stack:

        def made(name: str) -> Policy:
            model = hybrid(name).double()
            stack.enter_context(in_64_bits(model))
            return make_policy(model, TOKENIZER)

        yield made


@pytest.mark.parametrize("name", EACH)
def test_packed_shared_and_alone_are_the_own_pass_of_a_hybrid(name: str, double: Callable[[str], Policy]) -> None:
    policy, samples = double(name), ragged_texts()
    expected = own(policy, samples)
    for options in ({}, {"share": False}, {"max_tokens_per_microbatch": 150}):
        assert max(apart(packed(policy, samples, **options), expected)) < 1e-10, options
    assert max(apart(packed(policy, samples[::-1]), (expected[0][::-1], expected[1]))) < 1e-10


@pytest.mark.parametrize("name", EACH)
def test_the_engine_draws_by_a_hybrids_own_pass(name: str, double: Callable[[str], Policy]) -> None:
    """One state per prompt, forked by each completion; rows that end make room for others, and prompts come and go."""
    policy = double(name)
    rng = np.random.default_rng(0)
    lengths = (1, 3, 5, 66)
    prompts = [Prompt(id=str(i), tokens=rng.integers(3, len(TOKENIZER), n), text="") for i, n in enumerate(lengths)]
    groups = list(NativeEngine(policy, max_rows=5).generate(prompts, group_size=4, sampling=Sampling(max_new_tokens=12), seed=0))
    assert len(groups) == len(prompts)
    with torch.no_grad(), plain_attention(policy.model) as model:
        for rollout in (rollout for group in groups for rollout in group):
            ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]))
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, rollout.prompt.tokens.size - 1 :]
            logp = logits.log_softmax(-1).gather(1, ids[rollout.prompt.tokens.size :, None])[:, 0]
            assert np.abs(logp.numpy() - rollout.behavior_logp).max() < 1e-6  # a log-prob is drawn and kept in float32


def test_outside_of_streams_and_in_other_models_a_layer_is_transformers_own() -> None:
    model = hybrid("qwen3_5")
    ids = torch.arange(5, 30)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    policy = make_policy(copy.deepcopy(model), TOKENIZER)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    with plain_attention(policy.model) as ours, torch.no_grad():
        generated = ours.generate(ids, max_new_tokens=4, do_sample=False)  # by its cache
        assert torch.equal(ours(input_ids=ids, use_cache=False).logits, expected)
    assert generated.shape[1] > ids.shape[1]


def test_a_frozen_copy_follows_the_segments_too() -> None:
    policy = make_policy(hybrid("qwen3_5"), TOKENIZER)
    (batch,) = pack(ragged_texts(), 10_000)
    with torch.no_grad():
        assert torch.equal(forward(frozen_copy(policy), batch).hidden_PD, forward(policy, batch).hidden_PD)


def test_lengths_at_which_hybrids_change_are_those_of_convolutions_and_chunks() -> None:
    assert changes(hybrid("qwen3_5")) == {4, recurrence.CHUNK["cpu"]} and changes(hybrid("lfm2")) == {3}


# ---------------------------------------------------------------- faults


def whole(segments: Segments) -> Recurrence:
    """The stream as one text."""
    return Recurrence(Segments([0], [segments.total], segments.total))


class StateLeaks(Recurrence):
    """Into the next segment."""

    def rule(self, place: tuple[int, int], *columns: Tensor) -> Tensor:
        return whole(self.segments).rule(place, *columns)


class ConvolutionSeesTheNeighbour(Recurrence):
    def convolve(self, place: tuple[int, int], *inputs: Any, **options: Any) -> Tensor:
        return whole(self.segments).convolve(place, *inputs, **options)


class ForksLate(Recurrence):
    """Behind the first token of a completion: every member but the first begins with what the first one has read."""

    def __init__(self, segments: Segments) -> None:
        length = segments.length + np.isin(np.arange(segments.length.size), segments.prefix)
        super().__init__(Segments(segments.start.tolist(), length.tolist(), segments.total, segments.prefix.tolist()))


class FilledSegments(Segments):
    """The ends of whose chunks hold the stream's first position instead of nothing."""

    def chunks(self, device: torch.device) -> Chunks:
        found = super().chunks(device)
        return replace(found, rows_MC=found.rows_MC._replace(empty=found.rows_MC.empty[:0]))


class FillsThePadding(Recurrence):
    def __init__(self, segments: Segments) -> None:
        columns = (segments.start.tolist(), segments.length.tolist(), segments.total, segments.prefix.tolist())
        super().__init__(FilledSegments(*columns))


FAULTS = (StateLeaks, ConvolutionSeesTheNeighbour, ForksLate, FillsThePadding)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("granite4", marks=pytest.mark.slow)])
def test_planted_faults_of_states_are_found_at_load(name: str, fault: type[Recurrence], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(hybrid(name), TOKENIZER)
    prove(policy, longest=100)
    monkeypatch.setattr("groupwise.models.attention.Recurrence", fault)
    with pytest.raises(ConfigError, match="scoring does not equal the model's own forward pass"):
        prove(policy, longest=100)


@pytest.mark.parametrize("late", [0, 1], ids=["no fork", "fork of a neighbour"])
def test_planted_faults_of_the_engines_states_are_found_at_load(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from groupwise.rollout.native.decode_attention import Decode

    read = Decode._states

    def wrong(self: Decode, place: tuple[int, int]) -> Tensor:
        state = read(self, place)
        if any(length == 1 for length in self.length_R):
            state = state.roll(1, 0) if late else torch.zeros_like(state)
        return state

    policy = make_policy(hybrid("qwen3_5"), TOKENIZER)
    monkeypatch.setattr(Decode, "_states", wrong)
    with pytest.raises(ConfigError, match="sampling does not equal the model's own forward pass"):
        prove(policy, longest=24, sampler=NATIVE, train=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "granite4"])
@pytest.mark.parametrize("tokens", sorted(set(scheduler.TOKENS_PER_SYNC.values())))
def test_conversations_go_on_from_the_states_that_were_laid_aside(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows of other models draw several tokens before the host looks: a state holds none behind a turn's end."""
    monkeypatch.setitem(scheduler.TOKENS_PER_SYNC, "cpu", tokens)
    policy = make_policy(hybrid(name), TOKENIZER)
    assert prove(policy, longest=60, sampler=TALKING, train=False).paths[-1] == "conversations"


@pytest.mark.slow
def test_a_state_that_is_not_laid_aside_is_found_where_a_world_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    take = KVCache.take
    monkeypatch.setattr(KVCache, "take", lambda self, entry, tokens: take(self, entry, tokens)._replace(states={}))
    policy = make_policy(hybrid("qwen3_5"), TOKENIZER)
    with pytest.raises(ConfigError, match="conversations does not equal the model's own forward pass"):
        prove(policy, longest=60, sampler=TALKING, train=False)


class Parrots:
    """An environment that answers every turn with its last token."""

    def begin(self, stream: Stream, *, seed: int) -> Parrot:
        return Parrot(stream)

    def close(self) -> None:
        pass


class Parrot:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def open(self) -> Future[Reply]:
        return self.answer()

    def answer(self) -> Future[Reply]:
        reply: Future[Reply] = Future()
        reply.set_result(Reply(tokens=np.array(self.stream.tokens[-1:], np.int64)))
        return reply

    def close(self, finish: Finish) -> Episode:
        return Episode(turns=tuple(self.stream.turns))


@pytest.mark.parametrize("tokens", sorted(set(scheduler.TOKENS_PER_SYNC.values())))
def test_a_turn_that_ends_early_leaves_no_later_token_in_a_state(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other models draw several tokens before the host looks, and what lies behind a turn's end is dropped."""
    monkeypatch.setitem(scheduler.TOKENS_PER_SYNC, "cpu", tokens)
    # Turns end with half of all tokens, and so at any place.
    policy = replace(make_policy(hybrid("qwen3_5"), TOKENIZER), eos_ids=tuple(range(0, len(TOKENIZER), 2)))
    prompts = [Prompt(id=str(i), tokens=np.arange(3, 6 + i), text="") for i in range(3)]
    found = NativeEngine(policy, max_rows=4, environment=Parrots()).generate(
        prompts, group_size=4, sampling=Sampling(max_new_tokens=40), seed=0
    )
    rollouts = [rollout for group in found for rollout in group]
    assert sum(len(rollout.episode.turns) > 2 for rollout in rollouts if rollout.episode) > 3
    for rollout, logp in zip(rollouts, score_rollouts(policy, rollouts, max_tokens_per_microbatch=1000), strict=True):
        np.testing.assert_allclose(rollout.behavior_logp[rollout.trained], logp[rollout.trained], atol=1e-4)
