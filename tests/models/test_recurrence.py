"""Hybrids: packed, shared and one by one are transformers' own forward pass, in float64; what leaks is found at load."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from own_pass import apart, own, packed
from planted import randomise
from sample_texts import TOKENIZER
from steps import score_rollouts
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from groupwise.data.packing import pack
from groupwise.environments.conversation import Reply, Stream
from groupwise.errors import ConfigError
from groupwise.models.attention import plain_attention
from groupwise.models.loading import make_policy
from groupwise.models.passes import forward
from groupwise.models.policy import Policy
from groupwise.models.recurrence import changes, recurrent_layers
from groupwise.models.sharded import frozen_copy
from groupwise.ops import recurrence
from groupwise.ops.recurrence import Chunks, Recurrence, Segments
from groupwise.proof.prove import prove
from groupwise.proof.texts import NATIVE
from groupwise.records import Episode, Finish, Prompt, Sample, Sampling
from groupwise.rollout.native import scheduler
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.native.kv_cache import KVCache

SMALL = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "head_dim": 8,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MIXED = ["linear_attention", "full_attention", "linear_attention"]
HYBRIDS: dict[str, Any] = {
    "qwen3_5": lambda: Qwen3_5TextConfig(**SMALL, **DELTA, layer_types=MIXED),
    "qwen3_next": lambda: Qwen3NextConfig(**SMALL, **DELTA, **EXPERTS, layer_types=MIXED),
    "olmo_hybrid": lambda: OlmoHybridConfig(**SMALL, **DELTA, layer_types=MIXED),
    "lfm2": lambda: Lfm2Config(**SMALL, layer_types=["conv", "full_attention", "conv"]),
    "granite4": lambda: GraniteMoeHybridConfig(
        **SMALL, **MAMBA, layer_types=MIXED, num_local_experts=0, shared_intermediate_size=48
    ),
    "bamba": lambda: BambaConfig(**SMALL, **MAMBA, attn_layer_indices=[1]),
    "nemotron_h": lambda: NemotronHConfig(
        **SMALL,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
        head_dim=8,
    ),
    "falcon_h1": lambda: FalconH1Config(**SMALL, **MAMBA | {"mamba_d_head": 8}, mamba_d_ssm=32),
}

TALKING = replace(NATIVE, conversations=True)
EACH = [pytest.param(name, marks=() if name in ("qwen3_5", "lfm2", "granite4") else pytest.mark.slow) for name in HYBRIDS]


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HYBRIDS[name](), dtype=torch.float32, experts_implementation="eager").eval()
    randomise(model)
    for module in recurrent_layers(model):
        for part, parameter in module.named_parameters(recurse=False):
            if part == "A_log":  # decays that are neither all nor nothing
                nn.init.uniform_(parameter, -3.0, 0.5)
    return model


class _In64Bits:
    """In place of `torch` in a modeling file: float32, by both of its names, is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Policy]:
    """A policy of a family, whose own code also computes in float64 what it otherwise always computes in float32."""

    def made(name: str) -> Policy:
        model = model_of(name).double()
        files = {type(module).__module__ for module in model.modules() if ".models." in type(module).__module__}
        for file in files:
            monkeypatch.setattr(sys.modules[file], "torch", _In64Bits())
        monkeypatch.setattr(Tensor, "float", Tensor.double)
        return make_policy(model, TOKENIZER)

    return made


LENGTHS = ((1, (2, 1)), (2, (3, 5)), (4, (1, 66, 2)), (66, (64, 7)), (130, (3,)))
"""Prompt and completions of each group: on both sides of convolutions of 3 and 4 tokens, and of chunks of 16 and 64."""


def samples_of(seed: int = 0) -> list[Sample]:
    rng, samples = np.random.default_rng(seed), list[Sample]()
    for group, (prompt, completions) in enumerate(LENGTHS):
        text = rng.integers(0, len(TOKENIZER), prompt)
        for n in completions:
            nothing = np.zeros(n)
            completion = rng.integers(0, len(TOKENIZER), n)
            weight = rng.random(n) + 0.1
            samples.append(
                Sample(
                    group=str(group), prompt=text, completion=completion, weight=weight, advantage=nothing, behavior_logp=nothing
                )
            )
    return samples


@pytest.mark.parametrize("name", EACH)
def test_packed_shared_and_alone_are_the_own_pass_of_a_hybrid(name: str, double: Callable[[str], Policy]) -> None:
    policy, samples = double(name), samples_of()
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
    model = model_of("qwen3_5")
    ids = torch.arange(5, 30)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    policy = make_policy(copy.deepcopy(model), TOKENIZER)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    with plain_attention(policy.model) as ours, torch.no_grad():
        generated = ours.generate(ids, max_new_tokens=4, do_sample=False)  # by its cache
        assert torch.equal(ours(input_ids=ids, use_cache=False).logits, expected)
    assert generated.shape[1] > ids.shape[1]


def test_a_frozen_copy_follows_the_segments_too() -> None:
    policy = make_policy(model_of("qwen3_5"), TOKENIZER)
    (batch,) = pack(samples_of(), 10_000)
    with torch.no_grad():
        assert torch.equal(forward(frozen_copy(policy), batch).hidden_PD, forward(policy, batch).hidden_PD)


def test_lengths_at_which_hybrids_change_are_those_of_convolutions_and_chunks() -> None:
    assert changes(model_of("qwen3_5")) == {4, recurrence.CHUNK["cpu"]} and changes(model_of("lfm2")) == {3}


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
    policy = make_policy(model_of(name), TOKENIZER)
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

    policy = make_policy(model_of("qwen3_5"), TOKENIZER)
    monkeypatch.setattr(Decode, "_states", wrong)
    with pytest.raises(ConfigError, match="sampling does not equal the model's own forward pass"):
        prove(policy, longest=24, sampler=NATIVE, train=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "granite4"])
@pytest.mark.parametrize("tokens", sorted(set(scheduler.TOKENS_PER_SYNC.values())))
def test_conversations_go_on_from_the_states_that_were_laid_aside(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows of other models draw several tokens before the host looks: a state holds none behind a turn's end."""
    monkeypatch.setitem(scheduler.TOKENS_PER_SYNC, "cpu", tokens)
    policy = make_policy(model_of(name), TOKENIZER)
    assert prove(policy, longest=60, sampler=TALKING, train=False).paths[-1] == "conversations"


@pytest.mark.slow
def test_a_state_that_is_not_laid_aside_is_found_where_a_world_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    take = KVCache.take
    monkeypatch.setattr(KVCache, "take", lambda self, entry, tokens: take(self, entry, tokens)._replace(states={}))
    policy = make_policy(model_of("qwen3_5"), TOKENIZER)
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
    policy = replace(make_policy(model_of("qwen3_5"), TOKENIZER), eos_ids=tuple(range(0, len(TOKENIZER), 2)))
    prompts = [Prompt(id=str(i), tokens=np.arange(3, 6 + i), text="") for i in range(3)]
    found = NativeEngine(policy, max_rows=4, environment=Parrots()).generate(
        prompts, group_size=4, sampling=Sampling(max_new_tokens=40), seed=0
    )
    rollouts = [rollout for group in found for rollout in group]
    assert sum(len(rollout.episode.turns) > 2 for rollout in rollouts if rollout.episode) > 3
    for rollout, logp in zip(rollouts, score_rollouts(policy, rollouts, max_tokens_per_microbatch=1000), strict=True):
        np.testing.assert_allclose(rollout.behavior_logp[rollout.trained], logp[rollout.trained], atol=1e-4)
