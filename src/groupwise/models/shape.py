"""The numbers of a model that its memory and its time depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.models.policy import Policy


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a transformers config as a dictionary: what describes the language model, where it stands
    in a section of its own.
    """
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The numbers of a model that memory and time depend on."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    gated: bool = True
    """An MLP of three matrices; GPT-2's has two."""
    bytes_per_weight: int = 4
    bytes_per_product: int = 4
    """Of activations and keys and values: 2 where products run in bfloat16."""
    tied: bool = False
    """The head is the embedding."""

    @property
    def outside(self) -> int:
        """Parameters outside of the blocks: embedding, last norm and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int, *, dtype: str) -> Shape:
        """From a transformers config as a dictionary; `dtype` as in `model.dtype`.

        Of a model that reads images too the language model counts.   Raises ConfigError for a model
        without attention."""
        tied = config.get("tie_word_embeddings", True)
        config = language_part(config)
        for names in (
            ("hidden_size", "n_embd"),
            ("num_attention_heads", "n_head"),
            ("num_hidden_layers", "n_layer"),
        ):
            if not any(config.get(name) for name in names):
                raise ConfigError(
                    f"model.path: the config of a {config.get('model_type')!r} model names no"
                    f" {names[0]}; what can be trained is a causal language model with attention"
                )
        hidden = int(config.get("hidden_size") or config["n_embd"])
        heads = int(config.get("num_attention_heads") or config["n_head"])
        return cls(
            parameters=parameters,
            layers=int(config.get("num_hidden_layers") or config["n_layer"]),
            hidden=hidden,
            intermediate=int(
                config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
            ),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            gated="n_embd" not in config,
            bytes_per_weight=2 if dtype == "bfloat16" else 4,
            bytes_per_product=4 if dtype == "float32" else 2,
            tied=bool(tied),
        )

    @classmethod
    def of_policy(cls, policy: Policy) -> Shape:
        """Of a model that is loaded."""
        lower = "bfloat16" if "bfloat16" in str(policy.dtype) else "float32"
        parameters = sum(parameter.numel() for parameter in policy.model.parameters())
        return cls.of(
            policy.model.config.to_dict(),
            parameters,
            dtype="autocast" if policy.autocast else lower,
        )
