"""The numbers of a model that its memory and its time depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.models.policy import Policy

INTERMEDIATE = (
    "intermediate_size",
    "n_inner",
    "decoder_ffn_dim",
    "ffn_dim",
    "ffn_hidden_size",
    "moe_intermediate_size",
)
"""Names of the width of an MLP."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts."""


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a transformers config (a dictionary) that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def names_experts(config: Mapping[str, Any]) -> bool:
    """True if a config (a dictionary) is a mixture of experts'."""
    part = language_part(config)
    return any(part.get(name) for name in EXPERTS)


def read_fields(config: Mapping[str, Any]) -> Any:
    """Make an object of a config in which every family has transformers' common names.

    A config.json may have names of its own (`d_model`) or leave out what follows from others (the
    number of layers); transformers' class of the family knows them.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return SimpleNamespace(**config)
    fields: Any = CONFIG_MAPPING[kind].from_dict(dict(config))
    fields.allow_global_per_layer_attribute_access = True  # where layers differ, most of them
    return getattr(fields, "global_config", fields)  # BLT's, the one between its coders of bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The numbers of a model that memory and time depend on."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    """Attention heads; 0 in a model without attention."""
    kv_heads: int
    head_width: int
    vocabulary: int
    gated: bool = True
    """False for an MLP of two matrices, as GPT-2's."""
    bytes_per_weight: int = 4
    bytes_per_product: int = 4
    """Bytes of activations, keys and values: 2 where products run in bfloat16."""
    tied: bool = False
    """True if the head is the embedding."""
    experts: int = 0
    """Parameters of a mixture's experts, where they were counted."""

    @property
    def outside(self) -> int:
        """Parameters outside of the blocks: embedding, last norm and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int, *, dtype: str) -> Shape:
        """Read the shape off a transformers config (a dictionary); `dtype` as in `model.dtype`.

        The language model counts where a model has further parts.   Raises ConfigError for a config
        that names no width or depth.
        """
        part = language_part(config)
        fields = read_fields(part)
        hidden = int(_first(fields, "hidden_size", "n_embd"))
        layers = int(_first(fields, "num_hidden_layers", "n_layer"))
        if not hidden or not layers:
            raise ConfigError(
                f"model.path: the config of a {config.get('model_type')!r} model names no"
                " hidden_size or num_hidden_layers: add them, or take another checkpoint"
            )
        heads = int(_first(fields, "num_attention_heads", "n_head"))
        width = 0
        if heads:
            width = int(_first(fields, "head_dim")) or hidden // heads
        intermediate = _first(fields, *INTERMEDIATE) or 4 * hidden
        if isinstance(intermediate, (list, tuple)):  # layers differ
            intermediate = max(intermediate)
        return cls(
            parameters=parameters,
            layers=layers,
            hidden=hidden,
            intermediate=int(intermediate),
            heads=heads,
            kv_heads=int(_first(fields, "num_key_value_heads") or heads),
            head_width=width,
            vocabulary=int(part.get("vocab_size") or config["vocab_size"]),
            gated="n_embd" not in part,
            bytes_per_weight=2 if dtype == "bfloat16" else 4,
            bytes_per_product=4 if dtype == "float32" else 2,
            tied=bool(config.get("tie_word_embeddings", True)),
        )

    @classmethod
    def of_policy(cls, policy: Policy) -> Shape:
        """Read the shape of a model that is loaded."""
        from groupwise.models.quantized import count_numbers

        lower = "float32"
        if "bfloat16" in str(policy.dtype):
            lower = "bfloat16"
        parameters = count_numbers(policy.model)
        return cls.of(
            policy.model.config.to_dict(),
            parameters,
            dtype="autocast" if policy.autocast else lower,
        )


def _first(fields: Any, *names: str) -> Any:
    """The first of these fields that is set, or 0."""
    for name in names:
        value = getattr(fields, name, None)
        if value:
            return value
    return 0
