"""A policy whose weights are spread over processes, and how it becomes whole again to sample and to be saved.

The sharded model computes packed batches like any other.  To sample through it would gather every block for every token, so the
weights are gathered once per rollout into `plain`: the same modules, whose parameters hold numbers only in the meantime.  All that
reads weights directly (the engines' fast paths, `save_pretrained`) sees ordinary tensors there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise import parallel
from groupwise.errors import ConfigError
from groupwise.models.policy import Policy
from groupwise.records import Prompt, Rollout, Sampling
from groupwise.rollout.engine import Engine

METHOD = "run_backbone"
"""Attribute of a sharded model that runs its backbone with weights gathered."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardedPolicy(Policy):
    """A policy spread over all processes; `gathered` and the passes over batches are for all of them together."""

    plain: Policy
    """The same modules; their parameters have no numbers outside of `gathered`."""

    @property
    def sharded(self) -> bool:
        """See `Policy`."""
        return True

    @property
    def backbone(self) -> Callable[..., Any]:
        """See `Policy`."""
        return getattr(self.model, METHOD)

    @contextmanager
    def gathered(self) -> Iterator[Policy]:
        """See `Policy`: every process holds all weights while inside."""
        parallel.reshard(self.model)
        places = _places(self.plain.model)
        try:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    full = parallel.whole(parameter.detach())
                    for module, key in places[name]:
                        module._parameters[key] = nn.Parameter(full, requires_grad=False)
            # Modules that share a parameter must share it here too.
            self.plain.model.tie_weights()
            yield self.plain
        finally:
            for found in places.values():
                for module, key in found:
                    module._parameters[key] = _empty(module._parameters[key])

    def settle(self) -> None:
        """See `Policy`."""
        parallel.reshard(self.model)


def shard(policy: Policy, *, reshard: bool) -> ShardedPolicy:
    """Spread a policy, which is the same on every process and is used up by it.  Raises ConfigError if it cannot be.

    reshard: gather a block's weights for the forward and again for the backward pass, or keep them in between.
    """
    if policy.attention == "single":
        raise ConfigError(
            "model.attention 'single' runs a forward pass per sequence, so processes would gather weights at different times; "
            "use parallel: ddp"
        )
    model = policy.model
    # Parameters are replaced on the way, everything else (buffers, config) is copied.
    empty = {id(parameter): _empty(parameter) for parameter in model.parameters()}
    plain = replace(policy, model=copy.deepcopy(model, empty))
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    setattr(model, METHOD, lambda **inputs: model.base_model(**inputs))
    parallel.shard(model, blocks, METHOD, reshard=reshard)
    fields = {name: getattr(policy, name) for name in Policy.__dataclass_fields__}
    return ShardedPolicy(**fields, plain=plain)


class GatheredEngine:
    """Implements `engine.Engine` for a sharded policy: one gather of the weights per call of `generate`."""

    def __init__(self, policy: ShardedPolicy, make: Callable[[Policy], Engine]) -> None:
        """make: the engine to sample with, given a plain policy."""
        self.policy, self.inner = policy, make(policy.plain)
        self.version = self.inner.version

    def set_version(self, version: int) -> None:
        """See `engine.Engine`."""
        self.version = version
        self.inner.set_version(version)

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        """See `engine.Engine`; every process must call it, also one that has no prompts."""
        with self.policy.gathered():
            yield from self.inner.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)


def _empty(parameter: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where every parameter hangs, by the name that `named_parameters` gives it; several places if it is shared."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((module, key))
    return places
