"""Turns the metadata of a GGUF file into a config of transformers.

`KEYS` lists what is read of each architecture, `NEUTRAL` what is accepted with the one value under
which it changes nothing, and `REFUSED` gives the reason for well-known keys that change the model
and are not computed here.  Any other key of the architecture is refused too.  Where a file leaves
something out, llama.cpp's rule holds (src/llama-model.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from groupwise.errors import ConfigError
from groupwise.models.gguf_header import Header

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
"""GGUF's names of architectures, and transformers' `model_type`."""
GEMMAS = ("gemma", "gemma2", "gemma3")


@dataclass(frozen=True, slots=True)
class Key:
    """A metadata key that is read; its name stands behind the architecture's."""

    name: str
    meaning: str
    """Field of transformers' config, or what it is compared with."""
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)


ROPE_SCALED = ("llama", "qwen2", "qwen3", "gemma3", "phi3")

KEYS = (
    Key("block_count", "num_hidden_layers; the file must hold just these blocks"),
    Key("context_length", "max_position_embeddings"),
    Key("embedding_length", "hidden_size"),
    Key("feed_forward_length", "intermediate_size"),
    Key("vocab_size", "must be the rows of the embedding"),
    Key("attention.head_count", "num_attention_heads"),
    Key("attention.head_count_kv", "num_key_value_heads"),
    Key("attention.key_length", "head_dim"),
    Key("attention.value_length", "must be head_dim"),
    Key("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    Key("attention.sliding_window", "sliding_window", ("gemma2", "gemma3", "phi3")),
    Key("attention.sliding_window_pattern", "layer_types", ("gemma3",)),
    Key("attn_logit_softcapping", "attn_logit_softcapping", ("gemma2",)),
    Key("final_logit_softcapping", "final_logit_softcapping", ("gemma2", "gemma3")),
    Key("rope.dimension_count", "must be head_dim; phi3: partial_rotary_factor"),
    Key("rope.freq_base", "rope_theta"),
    Key("rope.freq_base_swa", "rope_theta of sliding attention", ("gemma3",)),
    Key("rope.scaling.type", "rope_type: none, linear, yarn; phi3: longrope", ROPE_SCALED),
    Key("rope.scaling.factor", "factor", ROPE_SCALED),
    Key("rope.scale_linear", "factor, as older files name it", ROPE_SCALED),
    Key(
        "rope.scaling.original_context_length",
        "original_max_position_embeddings",
        ROPE_SCALED,
    ),
    Key("rope.scaling.attn_factor", "attention_factor", ROPE_SCALED),
    Key("rope.scaling.yarn_beta_fast", "beta_fast", ROPE_SCALED),
    Key("rope.scaling.yarn_beta_slow", "beta_slow", ROPE_SCALED),
)

NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "use_parallel_residual": False,
}
"""Keys that are accepted with the value under which they change nothing."""
NOTES = ("rope.scaling.finetuned",)
"""Keys that say how a model came about, whatever their value."""

REFUSED = {
    "attention.scale": "scores of attention are scaled by another number",
    "attention.sliding_window": "this architecture's attention is computed without a window",
    "attention.temperature_scale": "attention is scaled by the position",
    "embedding_scale": "embeddings are scaled",
    "expert_count": "it is a mixture of experts",
    "logit_scale": "logits are scaled",
    "nextn_predict_layers": "it has blocks that predict further tokens",
    "residual_scale": "residuals are scaled",
    "rope.dimension_sections": "positions have several axes",
    "rope.scaling.alpha": "rotary frequencies are scaled by alpha",
    "rope.scaling.yarn_log_multiplier": "YaRN scales attention by another rule",
}
"""Keys that change the model, and why they are refused."""

GEMMA2_27B_BLOCKS, GEMMA3_27B_BLOCKS = 46, 62
"""Blocks by which llama.cpp tells the two models whose attention is scaled by hidden_size over
heads; a file does not state it."""


class Metadata:
    """The metadata of one architecture, read by type."""

    def __init__(self, header: Header) -> None:
        self.header = header
        architecture = header.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            self.refuse(
                f"its general.architecture is {architecture!r}; files of"
                f" {', '.join(ARCHITECTURES)} are read"
            )
        self.architecture: str = architecture
        kind = header.metadata.get("general.type", "model")
        if kind != "model":
            self.refuse(f"its general.type is {kind!r}, not 'model'")
        self.check_keys()

    def refuse(self, reason: str) -> NoReturn:
        """Raise ConfigError for a file that cannot be converted."""
        raise ConfigError(
            f"model.path: {str(self.header.file)!r} cannot be converted: {reason:.300}; take the"
            " model's safetensors checkpoint instead"
        )

    def check_keys(self) -> None:
        """Refuse each key that changes the model and is not read.

        A key of another architecture's name counts too if this architecture knows the rest of it:
        it is misspelt.
        """
        read = {key.name for key in KEYS if self.architecture in key.architectures}
        for key, value in self.header.metadata.items():
            prefix, _, name = key.partition(".")
            if prefix != self.architecture:
                known = name in read or name in NEUTRAL or name in REFUSED
                if known and prefix not in ("general", "tokenizer"):
                    self.refuse(f"it is a {self.architecture} and holds {key!r}")
                continue
            if name in read or name in NOTES:
                continue
            if name in NEUTRAL and value == NEUTRAL[name]:
                continue
            reason = REFUSED.get(name, "what it means is not known here")
            self.refuse(f"it sets {key} to {_shown(value)} ({reason})")

    def has(self, name: str) -> bool:
        """True if the file holds the architecture's key."""
        return f"{self.architecture}.{name}" in self.header.metadata

    def value(self, name: str) -> Any:
        """Look up the architecture's key, which must be there."""
        key = f"{self.architecture}.{name}"
        if key not in self.header.metadata:
            self.refuse(f"it holds no {key}")
        return self.header.metadata[key]

    def integer(self, name: str, default: int | None = None) -> int:
        """Look up a whole number from 1 on; a list of equal numbers (one a block) counts as one."""
        if default is not None and not self.has(name):
            return default
        value = self.value(name)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if type(value) is not int or not 1 <= value < 1 << 31:
            self.refuse(f"its {self.architecture}.{name} is {_shown(value)}, not a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Look up a finite number above 0."""
        if default is not None and not self.has(name):
            return default
        value = self.value(name)
        if type(value) not in (int, float) or not 0.0 < value < math.inf:
            self.refuse(f"its {self.architecture}.{name} is {_shown(value)}, not a number above 0")
        return float(value)

    def text(self, name: str, default: str) -> str:
        """Look up a string."""
        if not self.has(name):
            return default
        value = self.value(name)
        if not isinstance(value, str):
            self.refuse(f"its {self.architecture}.{name} is {_shown(value)}, not a text")
        return value


def read_config(header: Header) -> dict[str, Any]:
    """Describe the model of a GGUF file as a config of transformers, without its tokens.

    Raises ConfigError for an architecture, a key or a number that cannot be converted.
    """
    metadata = Metadata(header)
    architecture = metadata.architecture
    blocks = metadata.integer("block_count")
    _check_blocks(metadata, blocks)
    hidden = metadata.integer("embedding_length")
    heads = metadata.integer("attention.head_count")
    kv_heads = metadata.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        metadata.refuse(f"{heads} attention heads cannot share {kv_heads} keys and values evenly")
    head_dim = metadata.integer("attention.key_length", max(hidden // heads, 1))
    value_length = metadata.integer("attention.value_length", head_dim)
    if value_length != head_dim:
        metadata.refuse(f"its keys have the length {head_dim} and its values {value_length}")
    config = {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": _vocabulary(metadata),
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "pad_token_id": None,
        "rope_parameters": _rope(metadata, head_dim),
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    if architecture == "phi3":
        _add_phi3(metadata, config)
    if architecture == "gemma2":
        _add_gemma2(metadata, config)
    if architecture == "gemma3":
        _add_gemma3(metadata, config)
    return config


def _check_blocks(metadata: Metadata, blocks: int) -> None:
    """Refuse a file whose tensors are of other blocks than it states."""
    held = set()
    for name in metadata.header.tensors:
        parts = name.split(".")
        if parts[0] == "blk" and len(parts) > 1 and parts[1].isdecimal():
            held.add(int(parts[1]))
    if len(held) != blocks or (held and max(held) != blocks - 1):
        metadata.refuse(
            f"its {metadata.architecture}.block_count is {blocks:,} and it holds the tensors of"
            f" {len(held)} blocks"
        )


def _vocabulary(metadata: Metadata) -> int:
    """Rows of the embedding."""
    embedding = metadata.header.tensors.get("token_embd.weight")
    if embedding is None:
        metadata.refuse("it holds no tensor token_embd.weight")
    rows = embedding.shape[0]
    stated = metadata.integer("vocab_size", rows)
    if stated != rows:
        metadata.refuse(f"its vocab_size is {stated:,} and its embedding has {rows:,} rows")
    return rows


def _rope(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Rotary frequencies, as transformers' `rope_parameters`."""
    theta = metadata.number("rope.freq_base", 10000.0)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    width = metadata.integer("rope.dimension_count", head_dim)
    if metadata.architecture == "phi3":
        parameters["partial_rotary_factor"] = width / head_dim
    elif width != head_dim:
        metadata.refuse(f"it rotates {width} of the {head_dim} numbers of a head")
    if metadata.architecture not in ROPE_SCALED:
        return parameters

    factor = metadata.number("rope.scale_linear", 1.0)
    factor = metadata.number("rope.scaling.factor", factor)
    kind = metadata.text("rope.scaling.type", "linear")
    attention = metadata.number("rope.scaling.attn_factor", 1.0)
    frequencies = "rope_freqs.weight" in metadata.header.tensors
    if "rope_factors_long.weight" in metadata.header.tensors:
        return parameters | _longrope(metadata, width, attention)
    if kind not in ("none", "linear", "yarn"):
        metadata.refuse(f"its rope.scaling.type is {kind!r}")
    if kind == "none":
        factor = 1.0
    if kind != "yarn" and attention != 1.0:
        metadata.refuse(f"its rope.scaling.attn_factor is {attention} without YaRN")
    if frequencies and factor != 1.0:
        metadata.refuse("it scales its rotary frequencies both by rope_freqs.weight and a factor")
    if frequencies:
        return parameters | _llama3(metadata, width, theta)
    if kind == "yarn":
        return parameters | _yarn(metadata, factor, attention)
    if factor != 1.0:
        return parameters | {"rope_type": "linear", "factor": factor}
    return parameters


def _yarn(metadata: Metadata, factor: float, attention: float) -> dict[str, Any]:
    """YaRN (2309.00071) as llama.cpp computes it: `attention` comes on top of the paper's."""
    own = 1.0
    if factor > 1.0:
        own = 0.1 * math.log(factor) + 1.0
    original = metadata.integer("context_length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": attention * own,
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length", original
        ),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _longrope(metadata: Metadata, width: int, attention: float) -> dict[str, Any]:
    """Phi-3's factors of frequencies, for texts up to the original context and for longer ones."""
    return {
        "rope_type": "longrope",
        "long_factor": _factors(metadata, "rope_factors_long.weight", width).tolist(),
        "short_factor": _factors(metadata, "rope_factors_short.weight", width).tolist(),
        "attention_factor": attention,
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length"
        ),
    }


def _factors(metadata: Metadata, name: str, width: int) -> np.ndarray:
    """Numbers that the rotary wave lengths are multiplied by, one for each pair of a head."""
    info = metadata.header.tensors.get(name)
    if info is None:
        metadata.refuse(f"it holds no tensor {name}")
    if info.kind.name != "F32" or info.shape != (width // 2,):
        metadata.refuse(
            f"the tensor {name} is {info.kind.name} of {info.shape}, not F32 of ({width // 2},)"
        )
    factors = metadata.header.read_bytes(name).view("<f4")
    if not np.isfinite(factors).all() or (factors <= 0.0).any():
        metadata.refuse(f"the tensor {name} holds numbers that are not above 0")
    return factors


LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""What every published Llama 3.1, 3.2 and 3.3 has; a file holds their result alone."""


def _llama3(metadata: Metadata, width: int, theta: float) -> dict[str, Any]:
    """The settings of Llama 3's rule that give the factors of rope_freqs.weight.

    The rule: waves longer than the original context are stretched by `factor`, waves shorter than
    a fourth of it not at all, and in between by a mixture.
    """
    factors = _factors(metadata, "rope_freqs.weight", width).astype(np.float64)
    factor = round(float(factors.max()), 4)
    if factor <= 1.0 + 1e-6:
        if np.abs(factors - 1.0).max() > 1e-6:
            metadata.refuse("its rope_freqs.weight is not Llama 3's rule")
        return {}
    waves = 2.0 * math.pi * theta ** (np.arange(0, width, 2) / width)
    stretched = factors > 1.001
    mixed = stretched & (factors < 0.999 * factor)
    contexts = [LLAMA3_CONTEXT, math.floor(waves[stretched].min())]
    if mixed.any():
        share = (1.0 / factors[mixed] - 1.0 / factor) / (1.0 - 1.0 / factor)
        rotations = share * (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR) + LOW_FREQ_FACTOR
        contexts.append(round(float(np.median(waves[mixed] * rotations))))
    fitting = []
    for context in contexts:
        expected = llama3_factors(waves, factor, context)
        if np.abs(expected / factors - 1.0).max() < 1e-4:
            fitting.append(context)
    if not fitting:
        metadata.refuse(
            "its rope_freqs.weight is not what Llama 3's rule gives with the factors"
            f" {LOW_FREQ_FACTOR:g} and {HIGH_FREQ_FACTOR:g}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": fitting[0],
    }


def llama3_factors(waves: np.ndarray, factor: float, context: float) -> np.ndarray:
    """Return what Llama 3's rule multiplies each wave length by."""
    share = (context / waves - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)
    share = share.clip(0.0, 1.0)
    return 1.0 / ((1.0 - share) / factor + share)


def _add_phi3(metadata: Metadata, config: dict[str, Any]) -> None:
    """Add what is special about Phi-3: a window, and the context that it was first trained with."""
    if metadata.has("attention.sliding_window"):
        config["sliding_window"] = metadata.integer("attention.sliding_window")
    original = config["rope_parameters"].get("original_max_position_embeddings")
    if original is not None:
        config["original_max_position_embeddings"] = original
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        metadata.refuse("the heads of a phi3 must have the width of its hidden states together")
    kind = config["rope_parameters"]["rope_type"]
    if kind not in ("default", "longrope"):
        metadata.refuse(f"transformers computes no {kind} frequencies in a phi3")


def _attention_scalar(config: Mapping[str, Any], blocks: int) -> int:
    """Number whose root scores of attention are divided by; `blocks`: those of the 27B model."""
    if config["num_hidden_layers"] == blocks:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _add_gemma2(metadata: Metadata, config: dict[str, Any]) -> None:
    """Add what is special about Gemma 2: soft caps, and a window in every other block."""
    config["attn_logit_softcapping"] = metadata.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = metadata.number("final_logit_softcapping", 30.0)
    config["sliding_window"] = metadata.integer("attention.sliding_window", 4096)
    config["query_pre_attn_scalar"] = _attention_scalar(config, GEMMA2_27B_BLOCKS)
    config["layer_types"] = _layer_types(config["num_hidden_layers"], 2)


def _add_gemma3(metadata: Metadata, config: dict[str, Any]) -> None:
    """Add what is special about Gemma 3: windows, with a rotary base of their own."""
    if metadata.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    config["sliding_window"] = metadata.integer("attention.sliding_window")
    config["query_pre_attn_scalar"] = _attention_scalar(config, GEMMA3_27B_BLOCKS)
    period = metadata.integer("attention.sliding_window_pattern", 6)
    config["layer_types"] = _layer_types(config["num_hidden_layers"], period)
    local = metadata.number("rope.freq_base_swa", 10000.0)
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _layer_types(blocks: int, period: int) -> list[str]:
    """Kinds of attention: the last of every `period` blocks sees all tokens."""
    kinds = []
    for block in range(blocks):
        if (block + 1) % period:
            kinds.append("sliding_attention")
        else:
            kinds.append("full_attention")
    return kinds


def _shown(value: Any) -> str:
    """Write a value for a message, shortened."""
    text = repr(value)
    if len(text) > 60:
        return f"{text[:60]}..."
    return text
