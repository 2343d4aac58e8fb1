import pytest
import torch
from transformers import AutoModelForCausalLM

from groupwise.config.settings import ScratchSettings
from groupwise.errors import ConfigError, MemoryExceeded
from groupwise.models.scratch import scratch_model

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_5", "qwen3_vl", "gpt2", "gemma2", "mixtral"]
IMAGE_IDS = {"vision_start_token_id": 46, "vision_end_token_id": 47, "image_token_id": 48, "video_token_id": 49}


def tiny(family: str = "llama", kv_heads: int | None = None, **changes):
    settings = ScratchSettings(**({"family": family, "hidden": 32, "layers": 2, "heads": 4, "context": 64} | changes))
    ids = IMAGE_IDS if family == "qwen3_vl" else None
    return scratch_model(settings, vocabulary=50, bos_id=None, eos_ids=(2, 3), pad_id=0, seed=7, kv_heads=kv_heads, image_ids=ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_with_its_shape_and_tied_embeddings(family):
    model = tiny(family)
    logits = model(input_ids=torch.arange(1, 9)[None]).logits
    assert logits.shape == (1, 8, 50)
    assert torch.isfinite(logits).all()
    assert model.config.model_type == {"qwen3_5": "qwen3_5_text"}.get(family, family)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.get_text_config().max_position_embeddings == 64
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_training_mode_and_evaluation_mode_agree(family):
    model, tokens = tiny(family), torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(model.train()(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_5", "qwen3_vl", "gemma2", "mixtral"])
def test_grouped_key_value_heads(family):
    model = tiny(family, kv_heads=2)
    assert model.config.get_text_config().num_key_value_heads == 2
    text = getattr(model.model, "language_model", model.model)
    assert text.layers[-1].self_attn.k_proj.out_features == 2 * 8


def test_the_seed_decides_the_weights_and_the_global_generator_is_left_alone():
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, second = tiny().state_dict(), tiny().state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    settings = ScratchSettings(hidden=32, context=64)
    other = scratch_model(settings, vocabulary=50, eos_ids=(2,), pad_id=0, seed=8).state_dict()
    assert not torch.equal(first["model.layers.0.self_attn.q_proj.weight"], other["model.layers.0.self_attn.q_proj.weight"])


def test_all_eos_ids_survive_saving(tmp_path):
    model = tiny()
    assert model.generation_config.eos_token_id == [2, 3]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.eos_token_id == [2, 3]
    assert loaded.generation_config.pad_token_id == 0
    tokens = torch.arange(1, 9)[None]
    assert torch.equal(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_the_default_model_has_the_size_of_the_addition_recipe():
    model = scratch_model(ScratchSettings(), vocabulary=64, eos_ids=(1,), pad_id=0)
    assert 0.40e6 < sum(weight.numel() for weight in model.parameters()) < 0.42e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, r"hidden \(32\) must be a multiple of heads \(5\)"),
        ({"heads": 32}, "even head width"),
        ({"heads": 16, "family": "qwen3_vl"}, r"positions in images need a head width that is a multiple of 4, got 32 / 16"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**changes)


def test_ids_outside_the_vocabulary_and_missing_eos_are_refused():
    with pytest.raises(ConfigError, match="pad id 50 lies outside the vocabulary of 50 tokens"):
        scratch_model(ScratchSettings(), vocabulary=50, eos_ids=(1,), pad_id=50)
    with pytest.raises(ConfigError, match="at least one EOS id"):
        scratch_model(ScratchSettings(), vocabulary=50, eos_ids=(), pad_id=0)


def test_a_model_beyond_all_memory_is_refused_with_the_remedy():
    with pytest.raises(
        MemoryExceeded, match=r"2 layers that are 4000000000000 wide does not fit into memory: lower model\.scratch"
    ):
        tiny(hidden=4 * 10**12)
