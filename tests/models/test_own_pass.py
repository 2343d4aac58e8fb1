"""What a run computes equals the model's own pass, for families that a sweep over all architectures once found wrong.

The rest of that sweep is `test_families.py`: windows wherever a family keeps them, frequencies of each sequence's own length,
the loss that balances experts, heads of several layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from own_pass import Found, own, packed
from planted import SHAPE, DividesItsStates, built, randomise
from sample_texts import TOKENIZER, texts
from transformers import (
    BioGptConfig,
    BioGptForCausalLM,
    LlamaConfig,
    MiniCPM3Config,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from groupwise.config.settings import ModelSettings
from groupwise.models.head_form import form_of
from groupwise.models.loading import load_policy, make_policy, read_blueprint
from groupwise.models.policy import Policy
from groupwise.models.shape import Shape
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


def trained_pass(policy: Policy, samples: list[Sample], *, again: bool = False) -> Found:
    alike = getattr(policy, "alike", None)
    return packed(policy, samples, again=again, fused=True, alike=alike, share=policy.attention == "shared")


def assert_equal(found: Found, expected: Found) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    size = max(float(gradient.norm()) for gradient in expected[1].values())
    for name, theirs in expected[1].items():
        assert float((found[1][name] - theirs).norm()) <= 2e-3 * float(theirs.norm()) + 1e-5 * size, name


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
    assert_equal(trained_pass(policy, samples, again=True), expected)
    assert_equal(trained_pass(policy, samples), expected)


def test_a_window_of_one_token_is_right() -> None:
    policy = make_policy(built(MistralForCausalLM, MistralConfig, sliding_window=1), TOKENIZER)
    samples = texts((3, 4), (3, 20), (12, 2))
    assert_equal(trained_pass(policy, samples), own(policy, samples))


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
    assert_equal(trained_pass(policy, samples), own(policy, samples))


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
    assert_equal(trained_pass(policy, samples), own(policy, samples))
    blueprint = read_blueprint(ModelSettings(path=str(tmp_path)))
    shape = Shape.of(blueprint.config, parameter_count(blueprint), dtype="float32")
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.hidden, shape.layers, shape.vocabulary) == (32, 2, len(TOKENIZER))
