"""Refusals of models that processes cannot split between them, before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from torch import nn

from groupwise.config.settings import ParallelSettings
from groupwise.errors import ConfigError
from groupwise.models.recurrence import PLACE
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
        _demand_heads(config, "tensor", parallel.tensor, INSTEAD)
    if parallel.expert > 1:
        _demand_experts(config, parallel.expert)
    if parallel.context > 1:
        _demand_attention(config)
        _demand_heads(config, "context", parallel.context, "leave parallel.context out")


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


def _demand_heads(config: Mapping[str, Any], key: str, count: int, instead: str) -> None:
    """Raise ConfigError for heads that so many processes cannot share."""
    shape = Shape.of(config, 0, dtype="float32")
    heads = {"attention": shape.heads}
    if key == "tensor":  # for a context keys and values are repeated
        heads["key-value"] = shape.kv_heads
    for what, number in heads.items():
        if number % count:
            raise ConfigError(
                f"parallel.{key}: {count} processes cannot share {number} {what} heads evenly:"
                f" take a divisor of {number}, or {instead}"
            )


def _demand_attention(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a model with layers that are known to be recurrent."""
    part = language_part(config)
    for kind in getattr(read_fields(part), "layer_types", None) or ():
        if not kind.endswith("attention") or kind == "linear_attention":
            raise _recurrent(f"a {part.get('model_type')!r} model has layers of {kind!r}")


def demand_no_recurrence(model: nn.Module) -> None:
    """Refuse a model whose recurrent layers would have to hand states on.  Raises ConfigError."""
    for module in model.modules():
        if PLACE in vars(module):
            raise _recurrent(f"{type(module).__name__} is a recurrent layer")


def _recurrent(what: str) -> ConfigError:
    return ConfigError(
        f"parallel.context: {what}, whose states processes do not hand on to one another: leave"
        " context out (model.gradient_checkpointing: true saves activations)"
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
