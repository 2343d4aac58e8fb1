"""What a run computes equals the model's own pass, for families that a sweep over all architectures once found wrong.

The faults, and the tests that fail with them:

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
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from planted import SHAPE, DividesItsStates, built, randomise
from sample_texts import TOKENIZER, texts
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AfmoeConfig,
    AfmoeForCausalLM,
    AutoConfig,
    BioGptConfig,
    BioGptForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
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
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from groupwise.config.settings import ModelSettings
from groupwise.data.packing import pack
from groupwise.errors import ConfigError
from groupwise.models.attention import plain_attention
from groupwise.models.backbone import checkpointing
from groupwise.models.loading import load_policy, make_policy, read_blueprint
from groupwise.models.moe import balanced
from groupwise.models.output_head import form_of
from groupwise.models.passes import forward
from groupwise.models.policy import Policy
from groupwise.models.shape import Shape
from groupwise.ops.linear_cross_entropy import chosen_logprobs
from groupwise.ops.operations import operations
from groupwise.proof.passes import take_gradients
from groupwise.proof.prove import prove
from groupwise.proof.texts import NATIVE
from groupwise.records import Prompt, Sample, Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.transformers import TransformersEngine
from groupwise.runs.run_models import parameter_count

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 16,
}


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
    return found, take_gradients(policy)


def by_run(policy: Policy, samples: list[Sample], *, again: bool = False) -> tuple[list[np.ndarray], dict[str, Tensor]]:
    """The same as training computes it: packed together, prompts shared, fused."""
    found = [np.zeros(sample.completion.size) for sample in samples]
    policy.model.zero_grad(set_to_none=True)
    with checkpointing(policy, True) if again else nullcontext(), operations().fused_modules(policy.model):
        for batch in pack(samples, 10_000, alike=getattr(policy, "alike", None), share=policy.attention == "shared"):
            rows = batch.trained_M
            hidden = forward(policy, batch).hidden_PD[rows]
            logp, _ = chosen_logprobs(hidden, policy.head, batch.target_P[rows], batch.temperature_P[rows])
            (batch.weight_P[rows] * logp.square()).sum().backward()
            for s, index in enumerate(batch.samples):
                if index >= 0:
                    end = batch.layout.start[s] + batch.layout.length[s]
                    inside = (rows >= end - samples[index].completion.size) & (rows < end)
                    found[index] = logp[inside].detach().numpy()
    return found, take_gradients(policy)


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
    for options in (
        {"max_tokens_per_microbatch": 10_000},
        {"max_tokens_per_microbatch": 25},
        {"max_tokens_per_microbatch": 1},
        {"max_tokens_per_microbatch": 60, "share": False, "fill": True},
    ):
        total = 0.0
        for batch in balanced(policy, pack(samples, **options)):  # type: ignore[arg-type]
            loss = forward(policy, batch).router_loss
            loss.backward()  # type: ignore[union-attr]
            total += float(loss)
        found.append(([np.array([total])], take_gradients(policy)))
    rows = [np.concatenate([sample.prompt, sample.completion[:-1]]) for sample in samples]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with plain_attention(policy.model) as model:
        loss = 0.5 * model(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True).aux_loss
    loss.backward()
    expected = [loss.detach().numpy()[None]], take_gradients(policy)
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
}  # fmt: skip  # fmt: skip


@pytest.mark.parametrize("family", UNTIDY)
def test_families_that_left_a_bad_state_are_proven_correct(family: str) -> None:
    kind, config, changes = UNTIDY[family]
    policy = make_policy(built(kind, config, **changes), TOKENIZER)
    samples = texts((3, 4), (3, 20), (12, 9), (12, 2))
    assert_equal(by_run(policy, samples), own(policy, samples))
    assert "sampling" in prove(policy, longest=64, sampler=NATIVE).paths


@pytest.mark.slow
def test_a_family_that_works_on_its_masks_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"Doge.* cannot be asked what its attention sees .* set model.attention to 'single'"):
        make_policy(built(DogeForCausalLM, DogeConfig), TOKENIZER)


def test_a_window_of_one_token_is_right() -> None:
    policy = make_policy(built(MistralForCausalLM, MistralConfig, sliding_window=1), TOKENIZER)
    samples = texts((3, 4), (3, 20), (12, 2))
    assert_equal(by_run(policy, samples), own(policy, samples))


@pytest.mark.parametrize("family", ["bert", "modernbert-decoder"])
def test_a_head_of_several_layers_is_right_one_sequence_at_a_time(family: str) -> None:
    """What the last matrix is given are the states; transformers' BERT has a transform between it and its backbone."""
    shape = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 0) | {"eos_token_id": 1}
    config: Any = AutoConfig.for_model(family, num_hidden_layers=2, is_decoder=True, **shape, **special)
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    randomise(model)
    policy = make_policy(model, TOKENIZER, ModelSettings(attention="single", gradient_checkpointing=True))
    assert policy.deep_head
    samples = texts((3, 4), (3, 20), (12, 2))
    assert_equal(by_run(policy, samples), own(policy, samples))
    assert_equal(by_run(policy, samples, again=True), own(policy, samples))


@pytest.mark.parametrize("base", [64, 128, 256])
def test_a_width_of_reference_is_a_factor(base: int) -> None:
    """MiniCPM divides its states by the quotient of its width and it."""
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16}
    config = MiniCPM3Config(**SHAPE | ranks | {"hidden_size": 512, "dim_model_base": base, "num_key_value_heads": 4})
    assert form_of(config) == (base / 512, None)


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
