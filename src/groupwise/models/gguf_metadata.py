"""Describes a config of transformers as the metadata of a GGUF file: the way back of `gguf_config`.

Nothing is taken on trust.  `check_same` reads the written metadata back and compares every setting
of the model's config: one that the file does not hold is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from groupwise.errors import ConfigError
from groupwise.models.gguf_config import (
    ARCHITECTURES,
    HIGH_FREQ_FACTOR,
    LOW_FREQ_FACTOR,
    llama3_factors,
    read_config,
)
from groupwise.models.gguf_header import Header

WRITTEN = {kind: name for name, kind in ARCHITECTURES.items()} | {"mistral": "llama"}
"""`model_type` of transformers, and GGUF's name of the architecture."""
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Keys of every architecture, and the settings that they hold."""
SPECIAL = {
    "gemma2": {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {
        "attention.sliding_window": "sliding_window",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "phi3": {"attention.sliding_window": "sliding_window"},
}
"""Keys of single architectures; a setting that is None is left out."""
ROPE_SETTINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "original_max_position_embeddings",
    ),
    "longrope": (
        "factor",
        "short_factor",
        "long_factor",
        "attention_factor",
        "original_max_position_embeddings",
    ),
}
"""Kinds of rotary frequencies that can be written, and the settings that each may have."""
ROPE_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
NOT_OF_THE_MODEL = (
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "head_dim",
    "initializer_range",
    "max_window_layers",
    "model_type",
    "original_max_position_embeddings",
    "pad_token_id",
    "pretraining_tp",
    "resid_pdrop",
    "rope_parameters",
    "transformers_version",
    "use_cache",
    "use_sliding_window",
)
"""Settings on which no log-prob depends, or that others repeat (`layer_types` says which blocks
have a window; `rope_parameters` is checked when it is written)."""


def architecture_of(config: PreTrainedConfig) -> str:
    """Name the GGUF architecture of a model.  Raises ConfigError for one that is not known."""
    classes = config.architectures or ["no class"]
    if config.model_type not in WRITTEN or not classes[0].endswith("ForCausalLM"):
        raise ConfigError(
            f"a {classes[0]} ({config.model_type}) cannot be written as GGUF: causal models of"
            f" {', '.join(WRITTEN)} can; llama.cpp's convert_hf_to_gguf.py knows others"
        )
    return WRITTEN[config.model_type]


def metadata_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Describe a config by the keys of its architecture.

    Raises ConfigError for rotary frequencies that cannot be written.
    """
    architecture = architecture_of(config)
    fields = FIELDS | SPECIAL.get(architecture, {})
    head_dim = head_width(config)
    keys: dict[str, Any] = {
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    for key, setting in fields.items():
        value = getattr(config, setting)
        if value is not None:
            keys[key] = value
    rope = dict(config.rope_parameters)
    if architecture == "gemma3":
        keys["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        _check_rope(rope["sliding_attention"], "default")
        rope = dict(rope["full_attention"])
    _check_rope(rope, *ROPE_SETTINGS)
    keys["rope.freq_base"] = float(rope["rope_theta"])
    keys["rope.dimension_count"] = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    keys |= _rope_scaling(config, rope)
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def head_width(config: PreTrainedConfig) -> int:
    """Numbers of an attention head."""
    width = getattr(config, "head_dim", None)
    return width or config.hidden_size // config.num_attention_heads


def _check_rope(rope: Mapping[str, Any], *kinds: str) -> None:
    """Refuse rotary frequencies of another kind, and settings that a file cannot hold."""
    kind = rope["rope_type"]
    if kind not in kinds:
        raise ConfigError(
            f"rotary frequencies of the kind {kind!r} cannot be written as GGUF here:"
            f" {', '.join(kinds)} can"
        )
    for name, value in rope.items():
        if value is not None and name not in (*ROPE_COMMON, *ROPE_SETTINGS[kind]):
            raise ConfigError(
                f"rope_parameters.{name} is {value!r}, which a GGUF file cannot hold for {kind}"
            )


def _rope_scaling(config: PreTrainedConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Describe scaled rotary frequencies, as far as keys hold them."""
    kind = rope["rope_type"]
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind not in ("yarn", "longrope"):
        return {}
    _, attention = ROPE_INIT_FUNCTIONS[kind](config, "cpu", layer_type=_scaled_layers(config))
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    keys: dict[str, Any] = {"rope.scaling.original_context_length": original}
    if kind == "longrope":
        return keys | {"rope.scaling.attn_factor": float(attention)}
    factor = float(rope["factor"])
    paper = 1.0
    if factor > 1.0:
        paper = 0.1 * math.log(factor) + 1.0
    keys["rope.scaling.type"] = "yarn"
    keys["rope.scaling.factor"] = factor
    keys["rope.scaling.attn_factor"] = float(attention) / paper
    for name in ("beta_fast", "beta_slow"):
        if rope.get(name) is not None:
            keys[f"rope.scaling.yarn_{name}"] = float(rope[name])
    return keys


def _scaled_layers(config: PreTrainedConfig) -> str | None:
    """Name the kind of layer whose frequencies are scaled, where kinds have their own."""
    if "full_attention" in config.rope_parameters:
        return "full_attention"
    return None


def rope_tensors(config: PreTrainedConfig) -> dict[str, np.ndarray]:
    """Make the tensors that hold factors of rotary frequencies: of Llama 3's rule and longrope.

    Raises ConfigError for a rule whose settings no published Llama 3 has: llama.cpp would compute
    it, and the file could not be read back here.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type")
    if kind == "longrope":
        return {
            "rope_factors_long.weight": np.array(rope["long_factor"], np.float32),
            "rope_factors_short.weight": np.array(rope["short_factor"], np.float32),
        }
    if kind != "llama3":
        return {}
    limits = (rope["low_freq_factor"], rope["high_freq_factor"])
    if limits != (LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR):
        raise ConfigError(
            f"rope_parameters has the factors {limits}: Llama 3's rule is written with"
            f" {LOW_FREQ_FACTOR:g} and {HIGH_FREQ_FACTOR:g}"
        )
    width = head_width(config)
    waves = 2.0 * math.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    factors = llama3_factors(waves, rope["factor"], rope["original_max_position_embeddings"])
    return {"rope_freqs.weight": factors.astype(np.float32)}


def check_same(config: PreTrainedConfig, header: Header) -> None:
    """Raise ConfigError, by the setting's name, if a written file describes another model."""
    settings = read_config(header)
    read = AutoConfig.for_model(settings.pop("model_type"), **settings).to_dict()
    for name, value in config.to_dict().items():
        if name in NOT_OF_THE_MODEL:
            continue
        if name not in read and value in (None, False):
            continue
        if not _equal(value, read.get(name)):
            raise ConfigError(
                f"the model's {name} is {value!r}, and a GGUF file of a"
                f" {architecture_of(config)} means {read.get(name)!r}: it cannot be written as GGUF"
            )


def _equal(value: Any, read: Any) -> bool:
    """Compare a setting with what was read, which has been a number in single precision."""
    if type(value) is float and type(read) in (int, float):
        return math.isclose(value, read, rel_tol=1e-6)
    return value == read
