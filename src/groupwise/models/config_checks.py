"""Checks that a model can be computed with the numbers of its config, before weights are read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from groupwise.errors import ConfigError, DataError
from groupwise.models.shape import language_part

WINDOWS = (
    "sliding_window",
    "window_size",
    "attention_window",
    "attention_window_size",
    "sliding_window_size",
    "local_attention",
)
"""Fields that say how many tokens a window has."""
SOFT_CAPS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "router_logit_softcapping",
    "logits_soft_cap",
)
"""Fields that say what scores are capped at."""
COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "num_kv_heads",
    "head_dim",
    "hidden_size",
    "n_embd",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "n_positions",
)
"""Fields of a configuration that count something of which there is at least one."""


def check_config(config: Mapping[str, Any]) -> None:
    """Check the numbers of a transformers config (a dictionary) of a language model.

    Raises ConfigError, with the field and what to put there, for one that no model can be computed
    with.
    """
    fields = language_part(config)
    for name, value in _numbers(fields):
        _check_number(name, value, fields)
    rope = fields.get("rope_parameters")
    if isinstance(rope, Mapping):
        for part in (rope, *rope.values()):
            if isinstance(part, Mapping):
                for name, value in _numbers(part):
                    _check_number(name, value, part)
    heads, shared = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise _refusal(
            "num_key_value_heads",
            shared,
            f"its {heads} attention heads cannot share them evenly; take a divisor",
        )


def _numbers(fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Fields that are numbers, and not truth values."""
    for name, value in fields.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def _check_number(name: str, value: float, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError if a field cannot have this value beside the others."""
    if name == "rope_theta" and not 0.0 < value < math.inf:
        raise _refusal(
            name,
            value,
            "positions have no frequencies; take the checkpoint's own, 10000 in most",
        )
    if not math.isfinite(value):
        raise _refusal(name, value, "it must be a finite number; take the checkpoint's own")
    if name in COUNTS and value < 1:
        raise _refusal(
            name,
            value,
            "it must be at least 1; take the number that the checkpoint was published with",
        )
    if name in WINDOWS and value < 1 and fields.get("use_sliding_window") is not False:
        raise _refusal(
            name,
            value,
            "no token would see even itself; set it to null for no window, or to its tokens",
        )
    if name in SOFT_CAPS and value <= 0.0:
        raise _refusal(name, value, "scores cannot be capped at it; set it to null for no cap")


def _refusal(name: str, value: float, reason: str) -> ConfigError:
    """Make the error for a number."""
    return ConfigError(f"model.path: its config.json sets {name} to {value}: {reason}")


def check_vocabulary(tokens: int, rows: int | None) -> None:
    """Raise DataError if the tokenizer makes ids that the model has no embedding for.

    rows: of the embedding; None where that is not known yet.
    """
    if rows is not None and tokens > rows:
        raise DataError(
            f"the tokenizer has {tokens} tokens but the model's vocabulary has only {rows}: "
            "use the tokenizer that belongs to the checkpoint, or resize the model's embeddings"
        )
