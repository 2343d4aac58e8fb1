"""The probe at load finds what a run would do otherwise than the model itself; and what it once found is right now.

Faults that a sweep over all architectures found once, and the tests that fail with them:

D1, D4  windows that a family keeps in its configuration or only in its masks (Mistral, Mixtral, PhiMoE):
        test_windows_hold_in_training_wherever_a_family_keeps_them
D2      frequencies that depend on the length (Phi-3, dynamic NTK): test_frequencies_are_those_of_each_sequences_own_length,
        test_what_is_sampled_does_not_depend_on_a_long_neighbour_and_stays_within_its_frequencies
D3      dropout in layers that are computed again (OPT, BioGPT): test_nothing_is_dropped_however_a_family_spells_it
D5      the loss that balances experts: test_the_loss_that_balances_experts_does_not_depend_on_how_a_step_is_cut
D6      views that are changed in place, without the kernels: test_fused.py, test_who_listens_to_a_norm_hears_it
D7      hh_rlhf as published: tests/faults/test_data.py, marked D7, and tests/data/test_preference_formats.py
D8      untidy ends: test_families_that_left_a_bad_state_are_proven_correct,
        test_a_family_that_works_on_its_masks_is_refused_in_words; the length cap's warning: tests/runs/test_progress.py,
        test_more_than_half_of_the_completions_cut_off_is_said
D9      the off-policy mask where the sampler is not the trainer: tests/training/test_correction.py,
        test_the_off_policy_mask_compares_with_the_engine_that_sampled
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sample_texts import TOKENIZER, texts
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AfmoeConfig,
    AfmoeForCausalLM,
    AutoConfig,
    BioGptConfig,
    BioGptForCausalLM,
    DeepseekV3Config,
    DogeConfig,
    DogeForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from groupwise.config.settings import ModelSettings, RolloutSettings
from groupwise.data.packing import pack
from groupwise.errors import ConfigError, DataError
from groupwise.models import probe
from groupwise.models import small_copy as small_copies
from groupwise.models.attention import NAME, PackedAttention, attended, plain_attention
from groupwise.models.fused import fused_modules
from groupwise.models.loading import load_policy, make_policy, read_blueprint
from groupwise.models.logit_scale import read_form
from groupwise.models.masks import Reach, reach_of
from groupwise.models.policy import Policy
from groupwise.models.shape import Shape
from groupwise.models.small_copy import randomise, small_copy, small_model
from groupwise.ops.linear_cross_entropy import chosen_logprobs
from groupwise.records import Prompt, Sample, Sampling
from groupwise.rollout.native.attention import Decode, Extend, Prefill
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.probe import prove, prove_engine
from groupwise.rollout.transformers import TransformersEngine
from groupwise.runs.engines import mixed_engine
from groupwise.runs.policies import parameter_count

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": len(TOKENIZER),
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 16,
}


def built(kind: type[PreTrainedModel], config: type, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind(config(**SHAPE | changes)).eval()
    randomise(model)
    return model


def own(policy: Policy, samples: list[Sample]) -> tuple[list[np.ndarray], dict[str, Tensor]]:
    """Log-probs and gradients by the model's own forward pass, one sequence at a time, each by a fresh copy of the model."""
    found = []
    policy.model.zero_grad(set_to_none=True)
    for sample in samples:
        config = copy.deepcopy(policy.model.config)
        config._attn_implementation = "eager"
        model: Any = type(policy.model)(config).eval()
        model.load_state_dict(policy.model.state_dict())
        ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion[:-1]]))[None]
        logp = model(input_ids=ids, use_cache=False).logits[0, sample.prompt.size - 1 :, : policy.vocabulary].log_softmax(-1)
        logp_N = logp.gather(1, torch.from_numpy(sample.completion)[:, None])[:, 0]
        (torch.from_numpy(sample.weight).to(logp_N) * logp_N.square()).sum().backward()
        found.append(logp_N.detach().numpy())
        for ours, theirs in zip(policy.model.parameters(), model.parameters(), strict=True):
            if theirs.grad is not None:
                ours.grad = theirs.grad if ours.grad is None else ours.grad + theirs.grad
    return found, probe.taken(policy.model)


def by_run(policy: Policy, samples: list[Sample], *, again: bool = False) -> tuple[list[np.ndarray], dict[str, Tensor]]:
    """The same as training computes it: packed together, prompts shared, fused."""
    found = [np.zeros(sample.completion.size) for sample in samples]
    policy.model.zero_grad(set_to_none=True)
    with policy.checkpointing(True) if again else nullcontext(), fused_modules(policy.model):
        for batch in pack(samples, 10_000, alike=getattr(policy, "alike", None), share=policy.attention == "shared"):
            rows = batch.trained_M
            hidden = policy.forward(batch).hidden_PD[rows]
            logp, _ = chosen_logprobs(hidden, policy.head, batch.target_P[rows], batch.temperature_P[rows])
            (batch.weight_P[rows] * logp.square()).sum().backward()
            for s, index in enumerate(batch.samples):
                if index >= 0:
                    end = batch.layout.start[s] + batch.layout.length[s]
                    inside = (rows >= end - samples[index].completion.size) & (rows < end)
                    found[index] = logp[inside].detach().numpy()
    return found, probe.taken(policy.model)


def assert_equal(found: tuple[list[np.ndarray], dict[str, Tensor]], expected: tuple[list[np.ndarray], dict[str, Tensor]]) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    size = max(float(gradient.norm()) for gradient in expected[1].values())
    for name, theirs in expected[1].items():
        assert float((found[1][name] - theirs).norm()) <= 2e-3 * float(theirs.norm()) + 1e-5 * size, name


WINDOWED = {
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"sliding_window": 8, "num_local_experts": 4}),
    "phimoe": (PhimoeForCausalLM, PhimoeConfig, {"sliding_window": 8, "num_local_experts": 4}),
}


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_hold_in_training_wherever_a_family_keeps_them(family: str) -> None:
    kind, config, changes = WINDOWED[family]
    policy = make_policy(built(kind, config, **changes), TOKENIZER)
    samples = texts((3, 4), (3, 20), (12, 9), (12, 2))
    assert_equal(by_run(policy, samples), own(policy, samples))


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "longrope of llama"])
def test_frequencies_are_those_of_each_sequences_own_length(kind: str) -> None:
    if kind == "longrope":
        model = built(Phi3ForCausalLM, Phi3Config, rope_parameters=LONG, original_max_position_embeddings=16)
    elif kind == "dynamic":
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        model = built(LlamaForCausalLM, LlamaConfig, rope_parameters=rope, max_position_embeddings=16)
    else:
        model = built(LlamaForCausalLM, LlamaConfig, rope_parameters=LONG)
    policy = make_policy(model, TOKENIZER)
    samples = texts((3, 4), (3, 30), (3, 13), (3, 14), (3, 15), (20, 9), (20, 2))
    assert_equal(by_run(policy, samples), own(policy, samples))


@pytest.mark.parametrize("engine", [NativeEngine, TransformersEngine])
def test_what_is_sampled_does_not_depend_on_a_long_neighbour_and_stays_within_its_frequencies(engine: Any) -> None:
    policy = make_policy(built(Phi3ForCausalLM, Phi3Config, rope_parameters=LONG, original_max_position_embeddings=16), TOKENIZER)
    policy = replace(policy, eos_ids=())
    rng = np.random.default_rng(0)
    prompts = [Prompt(id=str(n), tokens=rng.integers(0, 20, size=n), text="") for n in (4, 30)]
    sampling = Sampling(max_new_tokens=40)
    for group in engine(policy, max_rows=8).generate(prompts, group_size=2, sampling=sampling, seed=0):
        for rollout in group:
            assert len(rollout) == {4: 13, 30: 40}[rollout.prompt.tokens.size]
            sample = replace(texts((4, len(rollout)))[0], prompt=rollout.prompt.tokens, completion=rollout.tokens)
            np.testing.assert_allclose(rollout.behavior_logp, own(policy, [sample])[0][0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["opt", "biogpt"])
@pytest.mark.parametrize("attention", ["shared", "single"])
def test_nothing_is_dropped_however_a_family_spells_it(family: str, attention: str) -> None:
    kind, config = {"opt": (OPTForCausalLM, OPTConfig), "biogpt": (BioGptForCausalLM, BioGptConfig)}[family]
    changes = {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.5}
    model = built(kind, config, **changes | {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3})
    policy = make_policy(model, TOKENIZER, ModelSettings(attention=attention))  # type: ignore[arg-type]
    samples = texts((3, 5), (9, 4)) if attention == "single" else texts((3, 5), (3, 9), (9, 4))
    expected = own(policy, samples)
    policy.model.train()
    assert_equal(by_run(policy, samples, again=True), expected)
    assert_equal(by_run(policy, samples), expected)


@pytest.mark.parametrize(("kind", "config"), [(MixtralForCausalLM, MixtralConfig), (Qwen2MoeForCausalLM, Qwen2MoeConfig)])
def test_the_loss_that_balances_experts_does_not_depend_on_how_a_step_is_cut(kind: type, config: type) -> None:
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_local_experts": 4, "num_experts": 4}
    policy = make_policy(built(kind, config, num_experts_per_tok=2, moe_intermediate_size=32, **changes), TOKENIZER)
    samples = texts((3, 4), (3, 20), (12, 9), (12, 2), (5, 7))
    found = []
    for options in ({"budget": 10_000}, {"budget": 25}, {"budget": 1}, {"budget": 60, "share": False, "fill": True}):
        total = 0.0
        for batch in policy.balanced(pack(samples, **options)):  # type: ignore[arg-type]
            loss = policy.forward(batch).router_loss
            loss.backward()  # type: ignore[union-attr]
            total += float(loss)
        found.append(([np.array([total])], probe.taken(policy.model)))
    rows = [np.concatenate([sample.prompt, sample.completion[:-1]]) for sample in samples]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with plain_attention(policy.model) as model:
        loss = 0.5 * model(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True).aux_loss
    loss.backward()
    expected = [loss.detach().numpy()[None]], probe.taken(policy.model)
    for each in found:
        assert_equal(each, expected)


UNTIDY = {
    "llama4_text": (Llama4ForCausalLM, Llama4TextConfig, {"attention_chunk_size": 8, "floor_scale": 4, "no_rope_layers": [1, 0],
                    "intermediate_size_mlp": 64, "num_local_experts": 4, "head_dim": 8}),
    "afmoe": (AfmoeForCausalLM, AfmoeConfig, {"sliding_window": 8, "num_experts": 4, "num_experts_per_tok": 2,
              "moe_intermediate_size": 32, "head_dim": 8}),
    "stablelm": (StableLmForCausalLM, StableLmConfig, {}),
    "nemotron": (NemotronForCausalLM, NemotronConfig, {}),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, {"sliding_window": 8, "num_local_experts": 4, "head_dim": 8}),
}  # fmt: skip


@pytest.mark.parametrize("family", UNTIDY)
def test_families_that_left_a_bad_state_are_proven_correct(family: str) -> None:
    kind, config, changes = UNTIDY[family]
    policy = make_policy(built(kind, config, **changes), TOKENIZER)
    samples = texts((3, 4), (3, 20), (12, 9), (12, 2))
    assert_equal(by_run(policy, samples), own(policy, samples))
    assert "sampling" in prove(policy.model, paths=("sampling",)).paths


@pytest.mark.slow
def test_a_family_that_works_on_its_masks_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"Doge.* cannot be asked what its attention sees .* set model.attention to 'single'"):
        make_policy(built(DogeForCausalLM, DogeConfig), TOKENIZER)


# Planted faults: right in a forward pass of their own, wrong in a packed stream.


def packed(module: Any) -> bool:
    return module.config._attn_implementation == NAME


class IgnoresItsWindow(MistralForCausalLM):
    """Its masks have the window, its packed attention has not."""

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn_implementation(*args, **kwargs)
        for layer in self.model.layers:
            if packed(self) and hasattr(layer.self_attn, "groupwise_reach"):
                layer.self_attn.groupwise_reach = Reach()


class ShiftsPositions(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.register_forward_pre_hook(self._shift, with_kwargs=True)

    def _shift(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if packed(self) and kwargs.get("position_ids") is not None:
            where = kwargs["position_ids"]
            kwargs["position_ids"] = where + (where > 6).long()  # from some place on, so that not all move together
        return args, kwargs


class DropsInScoring(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, args, out: F.dropout(out, 0.1, packed(self)))


class TiesTheWrongHead(LlamaForCausalLM):
    def get_output_embeddings(self) -> nn.Module:
        return self.model.embed_tokens if packed(self) else self.lm_head


class ForgetsItsCap(Gemma2ForCausalLM):
    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn_implementation(*args, **kwargs)
        for layer in self.model.layers:
            layer.self_attn.attn_logit_softcapping = None if packed(self) else self.config.attn_logit_softcapping


class LongestRotary(LlamaRotaryEmbedding):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(x, position_ids)
        factor = 1.0 + 0.01 * float(position_ids.max()) * packed(self)
        return cos * factor, sin * factor


class UsesTheLongestPosition(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.rotary_emb = LongestRotary(config)


class MixingAttention(LlamaAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(hidden_states, *args, **kwargs)
        if packed(self) and out.shape[1] > 6:
            out = torch.cat([out[:, :6], out[:, 6:] + 0.1 * out[:, :1]], 1)
        return out, weights


class MixesNeighbours(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = MixingAttention(config, i)


class ForgetsAGradient(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out.detach() if packed(self) else out)


class KeepsTables(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kept: dict[Any, Any] = {}
        self.model.rotary_emb.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, out: Any) -> Any:
        return self.kept.setdefault(out[0].shape, out) if packed(self) else out


class NarrowsADeepLayer(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[-1].mlp.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return torch.cat([out[:, :60], 0.5 * out[:, 60:]], 1) if packed(self) else out


class LearnsWhatItDoesNotHold(LlamaForCausalLM):
    """Packed, a parameter gets a gradient that the model's own pass withholds."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(self._hook)
        self.scale = nn.Parameter(torch.zeros(()))

    def _hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * (1.0 + (self.scale if packed(self) else self.scale.detach()))


class DropsWhenComputedAgain(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.calls = 0
        self.model.layers[0].input_layernorm.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        inside = torch.is_grad_enabled() and self.model.layers[0].gradient_checkpointing and packed(self)
        self.calls += inside
        return out * (1.1 if inside and self.calls % 2 == 0 else 1.0)


FAULTS: dict[type[PreTrainedModel], tuple[type, dict[str, Any], str]] = {
    IgnoresItsWindow: (MistralConfig, {"sliding_window": 4096}, "scoring"),
    ShiftsPositions: (LlamaConfig, {}, "scoring"),
    DropsInScoring: (LlamaConfig, {}, "scoring"),
    TiesTheWrongHead: (LlamaConfig, {}, "scoring"),
    ForgetsItsCap: (Gemma2Config, {"head_dim": 8}, "scoring"),
    UsesTheLongestPosition: (LlamaConfig, {}, "scoring"),
    MixesNeighbours: (LlamaConfig, {}, "scoring"),
    KeepsTables: (LlamaConfig, {}, "scoring"),
    NarrowsADeepLayer: (LlamaConfig, {"num_hidden_layers": 6}, "scoring"),
    ForgetsAGradient: (LlamaConfig, {}, "training does not equal .*gets no gradient"),
    LearnsWhatItDoesNotHold: (LlamaConfig, {}, "training does not equal .*gradient of scale is none of the model's own"),
    DropsWhenComputedAgain: (LlamaConfig, {}, "recompute"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_planted_faults_are_found_at_load(kind: type[PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """By texts of 100 tokens, a part of what users' models are asked."""
    monkeypatch.setattr(probe, "FAR", 100)
    config, changes, said = FAULTS[kind]
    sound = kind.__mro__[1]
    settings = ModelSettings(gradient_checkpointing=True)
    make_policy(built(sound, config, **changes), TOKENIZER, settings)
    with pytest.raises(ConfigError, match=rf"{kind.__name__} cannot be trained like this: {said}.*; set "):
        make_policy(built(kind, config, **changes), TOKENIZER, settings)


class SamplesWithOldKeys(LlamaForCausalLM):
    """What it decodes token by token is not what it computes over a text."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, args, out: out * 1.1 if out.shape[1] <= 3 and packed(self) else out)


def test_a_fault_in_decoding_is_found_before_anything_is_sampled() -> None:
    policy = make_policy(built(SamplesWithOldKeys, LlamaConfig), TOKENIZER)
    with pytest.raises(ConfigError, match=r"SamplesWithOldKeys cannot .*: sampling .*rollout.engine to 'transformers'"):
        prove_engine(policy, NativeEngine)


class DecodesWronglyFarOn(MistralForCausalLM):
    """Right until its window has wrapped twice."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.register_forward_pre_hook(self._note, with_kwargs=True)
        self.model.norm.register_forward_hook(self._spoil)
        self.position = 0

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        if (position := kwargs.get("position_ids")) is not None:
            self.position = int(position.max())

    def _spoil(self, module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * 1.1 if isinstance(attended(), Decode) and self.position >= 2 * self.config.sliding_window else out


@pytest.mark.parametrize("conversations", [False, True])
def test_a_fault_behind_a_windows_second_wrap_is_found(conversations: bool) -> None:
    policy = make_policy(built(DecodesWronglyFarOn, MistralConfig, sliding_window=8), TOKENIZER)
    with pytest.raises(ConfigError, match=r"DecodesWronglyFarOn cannot .*: sampling .*rollout.engine to 'transformers'"):
        prove_engine(policy, NativeEngine, conversations=conversations)


class Spoilt(LlamaForCausalLM):
    """What its last norm gives is changed where `wrong` says so."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.register_forward_pre_hook(self._note, with_kwargs=True)
        self.model.norm.register_forward_hook(lambda module, args, out: out * 1.1 if self.wrong(out.shape[1]) else out)
        self.position = 0

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        if (position := kwargs.get("position_ids")) is not None:
            self.position = int(position.max())

    def wrong(self, rows: int) -> bool:
        raise NotImplementedError


class DecodesWronglyBehindHundred(Spoilt):
    def wrong(self, rows: int) -> bool:
        return isinstance(attended(), Decode) and self.position >= 100


class PrefillsWronglyBehindHundred(Spoilt):
    def wrong(self, rows: int) -> bool:
        return isinstance(attended(), Prefill) and self.position >= 100


class DecodesManyRowsWrongly(Spoilt):
    def wrong(self, rows: int) -> bool:
        return isinstance(attended(), Decode) and rows > 12


class DecodesTheLastRowsWrongly(LlamaForCausalLM):
    """Where a tile of rows is not full."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(self._hook)

    def _hook(self, module: Any, args: Any, out: Tensor) -> Tensor:
        if not isinstance(attended(), Decode) or out.shape[1] <= 20:
            return out
        return torch.cat([out[:, :20], out[:, 20:] * 1.1], 1)


class TakesAnothersPrefill(LlamaForCausalLM):
    """Prompts of one length are taken for one prompt."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(self._hook)

    def _hook(self, module: Any, args: Any, out: Tensor) -> Tensor:
        prefill = attended()
        if not isinstance(prefill, Prefill):
            return out
        first = [prefill.lengths.index(length) for length in prefill.lengths]
        spans = [slice(prefill.starts[i], prefill.starts[i + 1]) for i in first]
        return torch.cat([out[:, span] for span in spans], 1)


class DecodesFromRoundedAngles(LlamaForCausalLM):
    """In bfloat16, and while it samples: angles are products in that type."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.rotary_emb.register_forward_hook(self._hook, with_kwargs=True)

    def _hook(self, module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        if not lower(args[0]) or not isinstance(attended(), (Prefill, Decode)):
            return out
        where = args[1] if len(args) > 1 else kwargs["position_ids"]
        angle = where[..., None].bfloat16() * module.inv_freq.bfloat16()
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(out[0].dtype), angle.sin().to(out[1].dtype)


@pytest.mark.parametrize(
    "kind",
    [
        DecodesWronglyBehindHundred,
        PrefillsWronglyBehindHundred,
        DecodesManyRowsWrongly,
        DecodesTheLastRowsWrongly,
        TakesAnothersPrefill,
    ],
)
def test_faults_of_long_texts_many_rows_and_prompts_alike_are_found(kind: type[PreTrainedModel]) -> None:
    policy = make_policy(built(kind, LlamaConfig), TOKENIZER)
    with pytest.raises(ConfigError, match=rf"{kind.__name__} cannot .*: sampling .*rollout.engine to 'transformers'"):
        prove_engine(policy, NativeEngine)


class HearsAnswersWrongly(LlamaForCausalLM):
    """Right in prefill and in decoding; wrong where several tokens are put behind what a sequence has."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, args, out: out * 1.1 if isinstance(attended(), Extend) else out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 8}])
def test_a_fault_in_what_follows_an_answer_is_found_where_a_world_answers(changes: dict[str, Any], dtype: Any) -> None:
    family, config = (MistralForCausalLM, MistralConfig) if changes else (LlamaForCausalLM, LlamaConfig)
    to, settings = (torch.bfloat16 if dtype == "bfloat16" else torch.float32), ModelSettings(dtype=dtype)
    sound = prove_engine(
        make_policy(built(family, config, **changes).to(to), TOKENIZER, settings), NativeEngine, conversations=True
    )
    assert sound.paths == ("sampling", "conversations")
    policy = make_policy(built(HearsAnswersWrongly, LlamaConfig).to(to), TOKENIZER, settings)
    prove_engine(policy, NativeEngine)
    with pytest.raises(ConfigError, match=r"HearsAnswersWrongly cannot .*: conversations .*rollout.engine to 'transformers'"):
        prove_engine(policy, NativeEngine, conversations=True)


@pytest.mark.parametrize("attention", ["shared", "single"])
def test_turns_by_transformers_generate_are_proven_too(attention: Any) -> None:
    policy = make_policy(built(Phi3ForCausalLM, Phi3Config, rope_parameters=LONG), TOKENIZER, ModelSettings(attention=attention))
    assert "conversations" in prove_engine(policy, TransformersEngine, conversations=True).paths


class SeesAhead(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + 0.1 * out.logits[:, -1:]
        return out


def test_a_model_that_sees_what_comes_after_is_no_language_model() -> None:
    with pytest.raises(ConfigError, match="SeesAhead lets tokens see what comes after them"):
        make_policy(built(SeesAhead, LlamaConfig), TOKENIZER, ModelSettings(attention="single"))


class OwnHead(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.tanh()
        return out


@pytest.mark.parametrize("attention", ["shared", "single"])
def test_a_head_that_does_more_than_it_says_is_refused(attention: str) -> None:
    with pytest.raises(ConfigError, match=r"OwnHead cannot be trained like this: scoring"):
        make_policy(built(OwnHead, LlamaConfig), TOKENIZER, ModelSettings(attention=attention))  # type: ignore[arg-type]


def test_a_fault_of_the_weights_alone_is_found_in_the_checkpoint() -> None:
    """The class is sound; somebody has put another module into this one model."""
    model = built(LlamaForCausalLM, LlamaConfig)
    model.model.layers[1].self_attn = MixingAttention(model.config, 1).eval()
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot .*: scoring .*logits differ"):
        make_policy(model, TOKENIZER)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_is_not_a_small_difference(place: int) -> None:
    right = probe.Truth([np.zeros(3) for _ in range(3)], {"a": torch.ones(2)})
    wrong = probe.Truth([np.zeros(3) for _ in range(3)], {"a": torch.ones(2)})
    wrong.logp[place][1] = np.nan
    with pytest.raises(ConfigError, match=r"scoring .*a log-prob of a completion of 3 tokens is not finite"):
        probe.compare("Some", "scoring", wrong, right, "do something else")
    with pytest.raises(ConfigError, match=r"Some's own forward pass .* log-probs that are not finite.*config.json"):
        probe.compare("Some", "scoring", right, wrong, "do something else")
    with pytest.raises(ConfigError, match=r"the gradient of a is not finite"):
        probe.compare("Some", "training", replace(right, gradient={"a": torch.tensor([1.0, torch.nan])}), right, "")


class NotANumber(nn.Module):
    def __init__(self, norm: nn.Module, model: Any) -> None:
        super().__init__()
        self.norm, self.model = norm, [model]

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(x)
        return out * torch.nan if packed(self.model[0]) else out


def test_a_checkpoint_that_gives_no_numbers_in_packed_streams_is_refused() -> None:
    model = built(LlamaForCausalLM, LlamaConfig)
    model.model.norm = NotANumber(model.model.norm, model)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot .*: scoring .*logits are not finite"):
        make_policy(model, TOKENIZER)


def test_memory_that_does_not_suffice_is_no_fault_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = small_model(LlamaForCausalLM, LlamaConfig(**SHAPE))
    monkeypatch.setattr(probe, "by_policy", exhausted)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(torch.OutOfMemoryError):
            probe.prove(model, paths=("scoring",), dtype=dtype)


def test_a_class_that_stands_in_no_file_is_proven_too() -> None:
    """One that was typed into a notebook."""
    kind = type("Typed", (LlamaForCausalLM,), {"__module__": "nowhere"})
    assert make_policy(built(kind, LlamaConfig), TOKENIZER).attention == "shared"


NONSENSE: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any], str]] = {
    "window 0": (MistralForCausalLM, MistralConfig, {"sliding_window": 0}, "sets sliding_window to 0: .* null for no window"),
    "window -4": (MistralForCausalLM, MistralConfig, {"sliding_window": -4}, "sets sliding_window to -4: "),
    "score cap 0": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 8, "attn_logit_softcapping": 0.0}, "sets attn_logit_soft"),
    "logit cap 0": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 0.0}, "to 0.0: .* null for no cap"),
    "base 0": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}},
        "rope_theta to 0.0",
    ),
    "positions 0": (LlamaForCausalLM, LlamaConfig, {"max_position_embeddings": 0}, "max_position_embeddings to 0: .* at least 1"),
}


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.parametrize("attention", ["shared", "single"])
def test_a_number_that_nothing_can_be_computed_with_is_named(name: str, attention: Any, tmp_path: Any) -> None:
    """Of a model that is loaded, and of a folder before its weights are read."""
    kind, config, changes, said = NONSENSE[name]
    sound = {key: value for key, value in changes.items() if key == "head_dim"}
    model = built(kind, config, **sound)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    for field, value in changes.items():
        setattr(model.config, field, value)
    settings = ModelSettings(attention=attention)
    with pytest.raises(ConfigError, match=said):
        make_policy(model, TOKENIZER, settings)
    with pytest.raises(ConfigError, match=said):
        load_policy(replace(settings, path=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": 0}, "sets head_dim to 0: it must be at least 1"),
        ({"num_key_value_heads": 3}, "sets num_key_value_heads to 3: its 4 attention heads .* a divisor"),
        ({"num_key_value_heads": 0}, "sets num_key_value_heads to 0"),
        ({"num_attention_heads": 0}, "sets num_attention_heads to 0: it must be at least 1"),
        ({"vocab_size": 9}, "the tokenizer has .* tokens but the model's vocabulary has only 9"),
    ],
)
def test_a_shape_that_cannot_be_is_named_before_weights_are_read(changes: dict[str, Any], said: str, tmp_path: Any) -> None:
    built(LlamaForCausalLM, LlamaConfig).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises((ConfigError, DataError), match=said):
        load_policy(ModelSettings(path=str(tmp_path)))


def test_a_window_of_one_token_is_right() -> None:
    policy = make_policy(built(MistralForCausalLM, MistralConfig, sliding_window=1), TOKENIZER)
    samples = texts((3, 4), (3, 20), (12, 2))
    assert_equal(by_run(policy, samples), own(policy, samples))


def test_a_small_copy_has_every_type_of_layer_and_switches_that_are_near() -> None:
    config = GptOssConfig(num_hidden_layers=24)
    small = small_copy(config)
    assert small.layer_types == ["sliding_attention", "full_attention", "sliding_attention"] and small.num_hidden_layers == 3
    assert small_copy(LlamaConfig(num_hidden_layers=24)).num_hidden_layers == 2, "a last layer that is not the first"
    assert small.sliding_window == 12 and small.num_local_experts == 4 and small.vocab_size <= 160
    assert config.num_hidden_layers == 24, "the original is left alone"
    model = small_model(GptOssForCausalLM, config)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    proof = probe.prove(model, paths=("scoring",))
    assert proof.switches == (12,) and min(proof.lengths) < 12 < max(proof.lengths)
    assert [reach_of(layer.self_attn) for layer in model.model.layers] == [Reach(window=12), Reach(), Reach(window=12)]


def test_a_narrow_copy_is_what_a_long_text_needs() -> None:
    small = small_copy(GptOssConfig(num_hidden_layers=24))
    narrow = small_copy(small, narrow=True)
    assert narrow.layer_types == ["sliding_attention", "full_attention"] and narrow.head_dim == 16
    same = ("sliding_window", "max_position_embeddings", "vocab_size", "num_attention_heads", "rope_parameters")
    assert [getattr(narrow, key) for key in same] == [getattr(small, key) for key in same]
    latent = small_copy(small_copy(DeepseekV3Config()), narrow=True)
    assert latent.qk_head_dim == latent.qk_nope_head_dim + latent.qk_rope_head_dim == 32


def test_a_long_text_is_asked_of_a_narrow_copy_and_of_the_model_where_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = small_model(LlamaForCausalLM, LlamaConfig()), list[int]()
    by_policy = probe.by_policy

    def wrong(policy: Policy, samples: Any, **options: Any) -> probe.Truth:
        asked.append(policy.model.config.head_dim)
        found = by_policy(policy, samples, **options)
        return found if policy.model is model else probe.Truth([logp + 1.0 for logp in found.logp], found.gradient)

    monkeypatch.setattr(probe, "by_policy", wrong)
    proof = probe.prove(model, paths=("scoring",))
    assert asked[:2] == [16, 128], "what a narrow copy finds decides nothing against a model"
    assert max(proof.lengths) == probe.FAR - 1


def default(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **changes)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        pytest.param(default("jamba"), 5, id="jamba"),
        pytest.param(default("bamba", attn_layer_indices=[9, 18, 27]), 3, id="bamba"),
        pytest.param(default("qwen3_moe", decoder_sparse_step=4), 4, id="qwen3_moe"),
        pytest.param(default("qwen2_moe", decoder_sparse_step=4), 4, id="qwen2_moe"),
        pytest.param(default("qwen3_moe", decoder_sparse_step=40), 3, id="a period that is cut"),
        pytest.param(default("ernie4_5_moe", moe_layer_interval=4, moe_layer_start_index=5), 4, id="ernie4_5_moe"),
        pytest.param(default("deepseek_v3"), 3, id="deepseek_v3"),
        pytest.param(default("gemma3n_text"), 8, id="gemma3n_text"),
        pytest.param(default("llama4_text"), 4, id="llama4_text"),
    ],
)
def test_a_small_copy_has_every_type_of_layer_however_the_configuration_spells_it(config: Any, most: int) -> None:
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    small = small_copy(config, kind)
    with torch.device("meta"):
        classes, own = ({type(module) for module in kind(each).modules()} for each in (small, config))
    assert classes == own and small.num_hidden_layers <= most


def test_layers_that_differ_in_a_flag_alone_are_types_of_their_own() -> None:
    """Every fourth layer without rotary embeddings, as a setting of the module says and no list does."""

    class Fourth(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for i, layer in enumerate(self.model.layers):
                layer.self_attn.rotary = (i + 1) % 4 != 0

    assert small_copy(LlamaConfig(**SHAPE | {"num_hidden_layers": 12}), Fourth).num_hidden_layers == 4


def test_a_fault_in_experts_that_begin_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Qwen3MoeSparseMoeBlock.forward

    def forgets(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = right(self, hidden, *args, **kwargs)
        return torch.cat([out[:, :12], 0.0 * out[:, 12:]], 1)

    monkeypatch.setattr(Qwen3MoeSparseMoeBlock, "forward", forgets)
    shape = {"num_hidden_layers": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM cannot be trained like this: scoring does not equal"):
        make_policy(built(Qwen3MoeForCausalLM, Qwen3MoeConfig, decoder_sparse_step=4, **shape), TOKENIZER)


def test_a_copy_without_a_class_of_module_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    config = default("jamba")
    keep = small_copies._keep
    monkeypatch.setattr(
        small_copies,
        "_shallow",
        lambda found, *_: small_copies._with(found, lambda text: keep(text, "num_hidden_layers", [0, 1, 2])),
    )
    monkeypatch.setattr(small_copies, "_MADE", {})
    with pytest.raises(ConfigError, match="it would be without JambaAttention, JambaAttentionDecoderLayer"):
        small_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def test_a_proof_is_kept_for_the_same_code_and_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probe, "_PROVEN", {})
    asked: list[PreTrainedModel] = []

    def run(small: PreTrainedModel) -> probe.Proof:
        asked.append(small)
        return probe.prove(small, paths=("scoring",))

    model = built(LlamaForCausalLM, LlamaConfig)
    proof = probe.proven_before(model, ("a",), run)
    assert probe.proven_before(model, ("a",), run) == proof and len(asked) == 1
    monkeypatch.setattr(probe, "_PROVEN", {})
    assert probe.proven_before(model, ("a",), run) == proof and len(asked) == 1, "read from the user's cache"
    probe.proven_before(model, ("b",), run)
    probe.proven_before(built(LlamaForCausalLM, LlamaConfig, rms_norm_eps=1e-3), ("a",), run)
    assert len(asked) == 3
    for file in (tmp_path / "groupwise" / "proofs").iterdir():
        file.write_text("{")
    monkeypatch.setattr(probe, "_PROVEN", {})
    assert probe.proven_before(model, ("a",), run) == proof and len(asked) == 4, "a broken file is no proof"


def test_a_proof_depends_on_what_the_adapter_is_made_by(monkeypatch: pytest.MonkeyPatch) -> None:
    before = probe._code(None)
    monkeypatch.setattr(probe, "version", lambda package: "0.0.1")
    assert probe._code.__wrapped__(None) != before


def test_what_was_proven_is_told_whether_now_or_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for said in ("proven", "proven before"):
        monkeypatch.setattr(probe, "_PROVEN", {})
        policy = make_policy(built(LlamaForCausalLM, LlamaConfig), TOKENIZER)
        ((label, line),) = probe.proofs_of(policy.model)
        assert label == said and line.startswith("LlamaForCausalLM: scoring, training equal its own forward pass at ")
        prove_engine(policy, NativeEngine)
        assert [label for label, _ in probe.proofs_of(policy.model)] == [said, said]


@pytest.mark.parametrize("path", ["x" * 5000, "a/" + "x" * 5000, "name\0"])
def test_a_path_that_no_file_can_have_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=r"no such folder|cannot be looked for"):
        load_policy(ModelSettings(path=path))


class ForgetsTheTeachersPast(LlamaForCausalLM):
    """What is decoded alone, and not prefilled, is wrong beyond 20 tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.register_forward_hook(self._hook, with_kwargs=True)

    def _hook(self, module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        cache = kwargs.get("past_key_values")
        late = cache is not None and cache.get_seq_length() > 20 and out[0].shape[1] == 1
        return (out[0] * 1.5, *out[1:]) if late else out


def test_a_mixture_with_a_teacher_is_proven_for_both() -> None:
    right, wrong = (make_policy(built(kind, LlamaConfig), TOKENIZER) for kind in (LlamaForCausalLM, ForgetsTheTeachersPast))
    settings = RolloutSettings()
    assert mixed_engine(right, right, 0.4, settings).where is None
    for policy, teacher in ((right, wrong), (wrong, right)):
        with pytest.raises(ConfigError, match=r"sampling does not equal .*; set group.mix to 0"):
            mixed_engine(policy, teacher, 0.4, settings)


@pytest.mark.parametrize("family", ["bert", "modernbert-decoder"])
def test_a_head_of_several_layers_is_right_one_sequence_at_a_time(family: str) -> None:
    """What the last matrix is given are the states; transformers' BERT has a transform between it and its backbone."""
    shape = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 0) | {"eos_token_id": 1}
    config = default(family, num_hidden_layers=2, is_decoder=True, **shape, **special)
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    randomise(model)
    policy = make_policy(model, TOKENIZER, ModelSettings(attention="single", gradient_checkpointing=True))
    assert policy.deep_head
    samples = texts((3, 4), (3, 20), (12, 2))
    assert_equal(by_run(policy, samples), own(policy, samples))
    assert_equal(by_run(policy, samples, again=True), own(policy, samples))


@pytest.mark.parametrize("base", [64, 128, 256])
def test_a_width_of_reference_is_no_other_in_a_small_copy(base: int) -> None:
    """MiniCPM divides its states by the quotient of its width and it; a copy of that width divided by nothing."""
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16}
    config = MiniCPM3Config(**SHAPE | ranks | {"hidden_size": 512, "dim_model_base": base, "num_key_value_heads": 4})
    assert read_form(MiniCPM3ForCausalLM(config), MiniCPM3ForCausalLM) == (base / 512, None)


class DividesItsStates(LlamaForCausalLM):
    """By a number that no name of its configuration tells, as Inkling's `logits_mup_width_multiplier`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 24,))


def test_a_factor_before_the_head_that_no_name_tells_is_right_one_sequence_at_a_time() -> None:
    policy = make_policy(built(DividesItsStates, LlamaConfig), TOKENIZER, ModelSettings(attention="single"))
    assert policy.deep_head
    samples = texts((3, 4), (3, 20), (12, 2))
    assert_equal(by_run(policy, samples), own(policy, samples))


def test_the_text_part_of_a_model_that_reads_images_is_loaded_and_proven(tmp_path: Any) -> None:
    """transformers has no causal class for it; positions of text are the same in all three sections of its frequencies."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(text_config=SHAPE | {"rope_parameters": rope, "max_position_embeddings": 77}, vision_config=vision)
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    randomise(model)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    policy = load_policy(ModelSettings(path=str(tmp_path), device="cpu"))
    assert type(policy.model) is Qwen2_5_VLForConditionalGeneration and policy.context == 77
    samples = texts((3, 4), (3, 20), (12, 2))
    assert_equal(by_run(policy, samples), own(policy, samples))
    blueprint = read_blueprint(ModelSettings(path=str(tmp_path)))
    shape = Shape.of(blueprint.config, parameter_count(blueprint), dtype="float32")
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.hidden, shape.layers, shape.vocabulary) == (32, 2, len(TOKENIZER))


def test_the_plan_line_says_what_was_compared(tiny_policy: Callable) -> None:
    line = prove(built(MistralForCausalLM, MistralConfig, sliding_window=8)).line
    assert line.startswith("MistralForCausalLM: scoring, training, recompute, adapter, sampling equal its own forward pass at ")
    assert ", across 8 (log-probs to" in line


# Faults that only show where products run in bfloat16.


def lower(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")


class CoarseRotary(LlamaRotaryEmbedding):
    """Angles are products of positions and frequencies in bfloat16."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if not (packed(self) and lower(x)):
            return super().forward(x, position_ids)
        angle = position_ids[..., None].bfloat16() * self.inv_freq.bfloat16()
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class RotaryInBfloat16(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.rotary_emb = CoarseRotary(config)


class CoarseNorm(nn.Module):
    """An RMSNorm whose every operation rounds to bfloat16."""

    def __init__(self, norm: Any, model: Any) -> None:
        super().__init__()
        self.weight, self.norm, self.model = norm.weight, norm, [model]

    def forward(self, x: Tensor) -> Tensor:
        if not (packed(self.model[0]) and lower(x)):
            return self.norm(x)
        y = x.bfloat16()
        squares = torch.zeros_like(y[..., 0])
        for column in y.unbind(-1):  # a sum in bfloat16, as a kernel makes it that does not widen
            squares = squares + column * column
        scale = (squares / y.shape[-1] + self.norm.variance_epsilon).rsqrt()
        return (self.weight.bfloat16() * (y * scale[..., None])).to(x.dtype)


class NormsInBfloat16(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.input_layernorm = CoarseNorm(layer.input_layernorm, self)
            layer.post_attention_layernorm = CoarseNorm(layer.post_attention_layernorm, self)
        self.model.norm = CoarseNorm(self.model.norm, self)


class ScalesAGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 0.5 * grads[0]


class LosesHalfOfAGradientInBfloat16(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[-1].mlp.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return ScalesAGradient.apply(out) if packed(self) and lower(args[0]) else out  # type: ignore[return-value]


class ForgetsAGradientInBfloat16(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].mlp.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out.detach() if packed(self) and lower(args[0]) else out


class RoundsShortTextsInBfloat16(LlamaForCausalLM):
    """Four bits are left of what the head is given, unless the stream is long."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if not (packed(self) and lower(out)) or out.shape[1] > 400:
            return out
        mantissa, exponent = torch.frexp(out.float())
        return out + (torch.ldexp(torch.round(mantissa * 16) / 16, exponent).to(out.dtype) - out).detach()


LOWER_FAULTS = {
    RotaryInBfloat16: "scoring",
    NormsInBfloat16: "scoring",
    LosesHalfOfAGradientInBfloat16: "training",
    ForgetsAGradientInBfloat16: "training",
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["autocast", "bfloat16"])
@pytest.mark.parametrize("kind", LOWER_FAULTS, ids=lambda kind: kind.__name__)
def test_faults_that_show_only_in_bfloat16_are_found_at_load(kind: type[PreTrainedModel], dtype: Any) -> None:
    make_policy(built(kind, LlamaConfig), TOKENIZER)  # in float32 it is right
    model = built(LlamaForCausalLM, LlamaConfig).to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    make_policy(model, TOKENIZER, ModelSettings(dtype=dtype))
    model = built(kind, LlamaConfig).to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    with pytest.raises(ConfigError, match=rf"cannot be trained like this: {LOWER_FAULTS[kind]} .*in {dtype} .* from float32"):
        make_policy(model, TOKENIZER, ModelSettings(dtype=dtype))


def test_a_fault_of_short_texts_alone_is_found() -> None:
    """Beside a text of hundreds of tokens they are few; a gradient shows no fault as small as this."""
    make_policy(built(LlamaForCausalLM, LlamaConfig).bfloat16(), TOKENIZER, ModelSettings(dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"log-probs of short texts lie .* nats from float32"):
        make_policy(built(RoundsShortTextsInBfloat16, LlamaConfig).bfloat16(), TOKENIZER, ModelSettings(dtype="bfloat16"))


class RefusesBfloat16(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(self._hook)

    @staticmethod
    def _hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if out.shape[1] > 2:
            torch.linalg.inv(out[0, :1, :1])
        return out


def test_a_class_that_fails_in_bfloat16_alone_may_be_trained_in_float32() -> None:
    make_policy(built(RefusesBfloat16, LlamaConfig), TOKENIZER)
    with pytest.raises(ConfigError, match=r"^RefusesBfloat16 .*: it fails in bfloat16 \(.*\); set model.dtype to float32$"):
        make_policy(built(RefusesBfloat16, LlamaConfig).bfloat16(), TOKENIZER, ModelSettings(dtype="bfloat16"))


# Sizes as they are published: what is small in the copy must not change what is equal.
PUBLISHED: dict[str, tuple[type[PreTrainedModel], PretrainedConfig]] = {
    "gemma-3-4b": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(hidden_size=2560, num_hidden_layers=34, num_attention_heads=8, num_key_value_heads=4, sliding_window=1024),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(sliding_window=4096)),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_right_in_bfloat16(name: str) -> None:
    kind, config = PUBLISHED[name]
    assert "bfloat16" in probe.prove(small_model(kind, config), paths=("scoring",), dtype="bfloat16").paths


class SamplesWithCoarseNorms(LlamaForCausalLM):
    """Only while it decodes token by token, and only in bfloat16."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        decodes = packed(self) and lower(args[0]) and not isinstance(attended(), PackedAttention)
        return out.to(torch.float8_e4m3fn).to(out.dtype) if decodes else out


@pytest.mark.parametrize("dtype", ["autocast", "bfloat16"])
def test_sampling_in_bfloat16_is_held_against_float32(dtype: Any) -> None:
    kinds = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    prove_engine(make_policy(built(LlamaForCausalLM, LlamaConfig).to(kinds), TOKENIZER, ModelSettings(dtype=dtype)), NativeEngine)
    policy = make_policy(built(SamplesWithCoarseNorms, LlamaConfig).to(kinds), TOKENIZER, ModelSettings(dtype=dtype))
    with pytest.raises(ConfigError, match=rf"sampling does not equal .*in {dtype} log-probs lie .* nats from float32"):
        prove_engine(policy, NativeEngine)


@pytest.mark.parametrize("dtype", ["autocast", "bfloat16"])
def test_angles_that_are_rounded_while_sampling_are_found(dtype: Any) -> None:
    kinds = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    policy = make_policy(built(DecodesFromRoundedAngles, LlamaConfig).to(kinds), TOKENIZER, ModelSettings(dtype=dtype))
    with pytest.raises(ConfigError, match=rf"sampling does not equal .*in {dtype} log-probs lie .* nats from float32"):
        prove_engine(policy, NativeEngine)


def test_a_structure_that_was_broken_off_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C or too little memory says nothing of a model; and no thread but this one is left with weights that nobody filled."""

    class Broken(LlamaForCausalLM):
        ends: type[BaseException] | None = None

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if self.ends is not None:
                raise self.ends

    whole = small_copy(LlamaConfig(**SHAPE | {"num_hidden_layers": 12}), Broken).num_hidden_layers
    for ends in (KeyboardInterrupt, MemoryError):
        monkeypatch.setattr(small_copies, "_MADE", {})
        monkeypatch.setattr(small_copies, "_STRUCTURES", {})
        monkeypatch.setattr(Broken, "ends", ends)
        with pytest.raises(ends):
            small_copy(LlamaConfig(**SHAPE | {"num_hidden_layers": 12}), Broken)
        monkeypatch.setattr(Broken, "ends", None)
        assert small_copy(LlamaConfig(**SHAPE | {"num_hidden_layers": 12}), Broken).num_hidden_layers == whole == 2
    assert torch.nn.Linear(8, 8).weight.detach().std() > 0.0


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_frequencies_that_no_length_changes_are_asked_far_on(kind: str) -> None:
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8192, **bounds}
    model = small_model(LlamaForCausalLM, LlamaConfig(max_position_embeddings=65536, rope_parameters=rope))
    assert max(probe.prove(model, paths=("scoring",)).lengths) == probe.FAR - 1
