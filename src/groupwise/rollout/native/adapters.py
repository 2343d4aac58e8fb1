"""Policies with adapters as a GPU decodes them: a plain model, to whose weights the adapter is
added when they are prepared.

The plain model shares the weights under the adapter, which nobody trains, so it is made once.  What
the adapter adds is computed layer by layer at every preparation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from groupwise.models.layers import matrix_of
from groupwise.models.masks import copy_reach
from groupwise.models.policy import Policy


@dataclass(frozen=True, slots=True, eq=False)
class PlainWeights:
    """A policy without an adapter, and what is added to its weights."""

    policy: Policy
    adapters: Mapping[nn.Module, Callable[[], Tensor]]
    """Functions that compute what an adapter adds to the weight of a linear layer."""

    def matrices(self, linears: Sequence[nn.Module]) -> tuple[list[Tensor], list[Tensor | None]]:
        """The weights (O, I) and biases of linear layers, adapters merged."""
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        for linear in linears:
            weight_OI, bias_O = matrix_of(linear)
            if linear in self.adapters:
                added = self.adapters[linear]()
                if type(linear) is Conv1D:
                    added = added.T
                weight_OI = (weight_OI + added).to(weight_OI.dtype)
            weights.append(weight_OI)
            biases.append(bias_O)
        return weights, biases


def plain_weights(policy: Policy) -> PlainWeights:
    """Take a policy with an adapter apart into a plain one and the adapter's layers, if it is
    on.
    """
    assert policy.adapter is not None
    model = policy.adapter.plain_model(policy.model).requires_grad_(False)
    copy_reach(policy.model, model)
    adapters: dict[nn.Module, Callable[[], Tensor]] = {}
    if policy.adapter_on:
        for name, added_weight in policy.adapter.added_weights(policy.model).items():
            adapters[model.get_submodule(name)] = added_weight
    return PlainWeights(replace(policy, model=model, adapter=None), adapters)
