"""Refusals of models that processes cannot split between them, before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedModel

from groupwise.config.settings import ParallelSettings
from groupwise.errors import ConfigError
from groupwise.models.recurrence import unfollowed_layers
from groupwise.models.shape import EXPERTS, Shape, language_part, read_fields

NEEDED = (5, 23)
"""The first transformers whose plans split a model that is there."""
INSTEAD = "leave parallel.tensor out (parallel: zero3 shards any model)"


def demand_split(config: Mapping[str, Any], parallel: ParallelSettings) -> None:
    """Refuse a model that cannot be split as `parallel` says.  Raises ConfigError.

    config: transformers' config as a dictionary.
    """
    if parallel.tensor > 1:
        _demand_plan(config)
        _demand_heads(config, parallel.tensor)
    if parallel.expert > 1:
        _demand_experts(config, parallel.expert)


def _demand_plan(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a model that transformers does not split."""
    _demand_transformers()
    part = language_part(config)
    fields, family = read_fields(part), part.get("model_type")
    plan = getattr(fields, "base_model_tp_plan", None)
    if not plan or not any(name.endswith("q_proj") for name in plan):
        raise ConfigError(
            f"parallel.tensor: transformers has no plan to split the attention of a {family!r}"
            f" model (base_model_tp_plan); {INSTEAD}"
        )


def _demand_experts(config: Mapping[str, Any], count: int) -> None:
    """Raise ConfigError for a model whose experts so many processes cannot divide."""
    _demand_transformers()
    part = language_part(config)
    fields, family = read_fields(part), part.get("model_type")
    plan = getattr(fields, "base_model_ep_plan", None) or {}
    if "ep_dispatch_experts" not in plan.values():
        raise ConfigError(
            f"parallel.expert: transformers has no plan to divide experts of a {family!r} model"
            " (base_model_ep_plan); leave parallel.expert out"
        )
    experts = 0
    for name in EXPERTS:
        experts = experts or getattr(fields, name, None) or 0
    if experts % count:
        raise ConfigError(
            f"parallel.expert: {count} processes cannot divide {experts} experts evenly: take a"
            f" divisor of {experts}, or leave parallel.expert out"
        )


def _demand_heads(config: Mapping[str, Any], count: int) -> None:
    """Raise ConfigError for heads that so many processes cannot share."""
    shape = Shape.of(config, 0, dtype="float32")
    for what, number in (("attention", shape.heads), ("key-value", shape.kv_heads)):
        if number % count:
            raise ConfigError(
                f"parallel.tensor: {count} processes cannot share {number} {what} heads evenly:"
                f" take a divisor of {number}, or {INSTEAD}"
            )


def demand_followed(model: PreTrainedModel) -> None:
    """Refuse a model with a layer whose states processes cannot share.  Raises ConfigError.

    model: with or without weights, its towers frozen.
    """
    for layer in unfollowed_layers(model):
        raise ConfigError(
            f"parallel.context: {type(layer).__name__} of a {model.config.model_type!r} model"
            " passes a state from position to position by code of its own, whose heads processes do"
            " not exchange: leave context out (model.gradient_checkpointing: true saves"
            " activations)"
        )


def _demand_transformers() -> None:
    """Raise ConfigError for a transformers that cannot split a model."""
    installed = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if installed < NEEDED:
        wanted = ".".join(map(str, NEEDED))
        raise ConfigError(
            f"parallel: tensor and expert need transformers {wanted} or newer, and"
            f" {transformers.__version__} is installed: pip install 'transformers>={wanted}', or"
            " leave them out (zero3 shards any model)"
        )
