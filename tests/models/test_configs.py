"""Configurations and paths that no model can be made of are named, before any weights are read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from planted import built
from sample_texts import TOKENIZER
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from groupwise.config.settings import ModelSettings
from groupwise.errors import ConfigError, DataError
from groupwise.models.loading import load_policy, make_policy

WINDOWED, CAPPED, LLAMA = (MistralForCausalLM, MistralConfig), (Gemma2ForCausalLM, Gemma2Config), (LlamaForCausalLM, LlamaConfig)
NONSENSE: dict[str, tuple[tuple[type[PreTrainedModel], type], dict[str, Any], str]] = {
    "window 0": (WINDOWED, {"sliding_window": 0}, "sets sliding_window to 0: .* null for no window"),
    "window -4": (WINDOWED, {"sliding_window": -4}, "sets sliding_window to -4: "),
    "score cap 0": (CAPPED, {"head_dim": 8, "attn_logit_softcapping": 0.0}, "sets attn_logit_soft"),
    "logit cap 0": (CAPPED, {"head_dim": 8, "final_logit_softcapping": 0.0}, "to 0.0: .* null for no cap"),
    "base 0": (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "rope_theta to 0.0"),
    "base inf": (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": math.inf}}, "rope_theta to inf"),
    "base nan": (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}}, "rope_theta to nan"),
    "factor inf": (
        LLAMA,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": math.inf}},
        "factor to inf: it must be a finite number",
    ),
    "epsilon nan": (LLAMA, {"rms_norm_eps": math.nan}, "rms_norm_eps to nan"),
    "positions 0": (LLAMA, {"max_position_embeddings": 0}, "max_position_embeddings to 0: .* at least 1"),
}


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.parametrize("attention", ["shared", "single"])
def test_a_number_that_nothing_can_be_computed_with_is_named(name: str, attention: Any, tmp_path: Any) -> None:
    """Of a model that is loaded, and of a folder before its weights are read."""
    (kind, config), changes, said = NONSENSE[name]
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


@pytest.mark.parametrize("path", ["x" * 5000, "a/" + "x" * 5000, "name\0"])
def test_a_path_that_no_file_can_have_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=r"no such folder|cannot be looked for"):
        load_policy(ModelSettings(path=path))


def test_a_name_that_is_neither_a_folder_nor_to_be_had_from_the_hub_comes_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"'nosuch/model' cannot be read: .*looked for on the hub: .*`groupwise get`"):
        load_policy(ModelSettings(path="nosuch/model"))
