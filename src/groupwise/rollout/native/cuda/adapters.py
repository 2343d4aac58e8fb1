"""Policies with adapters as a GPU decodes them: a plain model, to whose weights the adapter is
added when they are prepared.

The plain model shares the weights under the adapter, which nobody trains, so it is made once.  What
the adapter adds is computed layer by layer at every preparation.

O, I sides of a matrix
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from groupwise.models.layers import matrix_of
from groupwise.models.policy import Policy
from groupwise.models.reach import copy_reach


@dataclass(frozen=True, slots=True, eq=False)
class PlainWeights:
    """A policy without an adapter, and what is added to its weights."""

    policy: Policy
    adapters: Mapping[nn.Module, Callable[[], Tensor]]
    """Functions that compute what an adapter adds to the weight of a linear layer."""

    def matrix(self, linear: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return the weight (O, I) and the bias (O,) of a linear layer, its adapter merged."""
        weight_OI, bias_O = matrix_of(linear)
        if linear not in self.adapters:
            return weight_OI, bias_O
        added = self.adapters[linear]()
        if type(linear) is Conv1D:
            added = added.T
        merged_OI = weight_OI + added
        return merged_OI.to(weight_OI.dtype), bias_O


def plain_weights(policy: Policy) -> PlainWeights:
    """Take a policy with an adapter apart into a plain one and the adapter's layers, if it is
    on.
    """
    assert policy.adapter is not None
    adapter = policy.adapter
    model = adapter.plain_model(policy.model, on=policy.adapter_on)
    model.requires_grad_(False)
    copy_reach(policy.model, model)
    adapters: dict[nn.Module, Callable[[], Tensor]] = {}
    if policy.adapter_on:
        added = adapter.added_weights(policy.model)
        for name, added_weight in added.items():
            linear = model.get_submodule(name)
            adapters[linear] = added_weight
    plain = replace(policy, model=model, adapter=None)
    return PlainWeights(plain, adapters)
