"""What a recipe's other settings must know of a rollout engine, before it is made.  Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTraits:
    """What an engine can do.  The defaults are those of an engine of one's own."""

    own_weights: bool = False
    """Samples with the very weights that are trained: unless it is ahead of them, there is nothing to correct."""
    packed: bool = False
    """Computes packed streams only."""
    prepares: bool = False
    """Decodes with a copy of the weights that is laid out for it."""
    beside: bool = False
    """Samples while training goes on."""
    takes: tuple[str, ...] = ()
    """Keys of `rollout.engine` that are for it alone."""


ENGINES: Mapping[str, EngineTraits] = {
    "native": EngineTraits(own_weights=True, packed=True, prepares=True),
    "transformers": EngineTraits(own_weights=True),
    "vllm": EngineTraits(beside=True, takes=("servers", "colocated", "dtype")),
}
"""Built-in rollout engines: the rows of `runs.engines.ENGINES` (a test compares them)."""


def engine_traits(name: str) -> EngineTraits:
    """Those of a built-in engine, or of `module:function`."""
    return ENGINES.get(name, EngineTraits())
