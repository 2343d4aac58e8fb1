"""Refusals of models that processes cannot split between them, before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from groupwise.config.settings import ParallelSettings
from groupwise.errors import ConfigError
from groupwise.models.shape import Shape, language_part, read_fields

NEEDED = (5, 23)
"""The first transformers whose plans split a model that is there."""
INSTEAD = "leave parallel.tensor out (parallel: zero3 shards any model)"


def demand_split(config: Mapping[str, Any], parallel: ParallelSettings) -> None:
    """Refuse a model that cannot be split as `parallel` says.  Raises ConfigError.

    config: transformers' config as a dictionary.
    """
    count = parallel.tensor
    if count == 1:
        return
    part = language_part(config)
    fields, family = read_fields(part), part.get("model_type")
    _demand_transformers()
    plan = getattr(fields, "base_model_tp_plan", None)
    if not plan or not any(name.endswith("q_proj") for name in plan):
        raise ConfigError(
            f"parallel.tensor: transformers has no plan to split the attention of a {family!r}"
            f" model (base_model_tp_plan); {INSTEAD}"
        )
    shape = Shape.of(config, 0, dtype="float32")
    for heads, what in ((shape.heads, "attention"), (shape.kv_heads, "key-value")):
        if heads % count:
            raise ConfigError(
                f"parallel.tensor: {count} processes cannot share {heads} {what} heads evenly:"
                f" take a divisor of {heads}, or {INSTEAD}"
            )


def _demand_transformers() -> None:
    """Raise ConfigError for a transformers that cannot split a model."""
    installed = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if installed < NEEDED:
        wanted = ".".join(map(str, NEEDED))
        raise ConfigError(
            f"parallel.tensor needs transformers {wanted} or newer, and {transformers.__version__}"
            f" is installed: pip install 'transformers>={wanted}', or {INSTEAD}"
        )
