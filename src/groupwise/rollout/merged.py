"""The native engine of a policy whose adapter lies on a quantised base, on a CPU.

The modules would make every matrix anew for every token.  Here each is made once per `generate`,
with its adapter merged, and laid out for decoding (`native/forward.py`).  On a GPU the native
engine does so itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from groupwise.models.layers import matrix_of
from groupwise.models.policy import Policy
from groupwise.models.reach import copy_reach
from groupwise.rollout.native.engine import ModuleForward, NativeEngine
from groupwise.rollout.native.forward import (
    RolloutForward,
    SpecialisedForward,
    is_hooked,
    is_known,
)
from groupwise.rollout.native.scheduler import DeviceMemory


@dataclass(frozen=True, slots=True, eq=False)
class PlainPolicy:
    """A policy without its adapter and without quantised layers."""

    policy: Policy
    first: Tensor
    """The first parameter of the policy that it was made of."""
    weights: Mapping[nn.Module, Callable[[], Tensor]]
    """Functions that make the weights of layers whose own are zeros, or what is added to them."""

    @classmethod
    def of(cls, policy: Policy) -> PlainPolicy:
        """Take a policy with an adapter apart."""
        assert policy.adapter is not None
        model = policy.adapter.plain_model(policy.model, on=True).requires_grad_(False)
        copy_reach(policy.model, model)
        weights: dict[nn.Module, Callable[[], Tensor]] = {}
        for name, weight in policy.adapter.added_weights(policy.model).items():
            weights[model.get_submodule(name)] = weight
        plain = replace(policy, model=model, adapter=None)
        return cls(plain, next(policy.model.parameters()), weights)

    def matrix(self, linear: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return the weight (O, I) and the bias (O,) of a linear layer, its adapter merged."""
        weight_OI, bias_O = matrix_of(linear)
        if linear in self.weights:
            weight_OI = weight_OI + self.weights[linear]()
        return weight_OI, bias_O


class MergedEngine(NativeEngine):
    """Implements `engine.Engine` for a policy with an adapter that is on."""

    _apart: PlainPolicy | None = None

    def _plain(self) -> PlainPolicy:
        """Return the plain policy, made anew where a gather has put other tensors in the model."""
        first = next(self.policy.model.parameters())
        if self._apart is None or self._apart.first is not first:
            self._apart = PlainPolicy.of(self.policy)
        return self._apart

    @property
    def path(self) -> str:
        """See `NativeEngine.path`."""
        if self.policy.switches or any(map(is_hooked, self.policy.model.modules())):
            return "module"
        return "specialised" if is_known(self._plain().policy) else "module"

    def prepared(self, positions: int, memory: DeviceMemory | None = None) -> RolloutForward:
        """See `NativeEngine.prepared`."""
        if self.path == "module":
            return ModuleForward(self.policy)
        plain = self._plain()
        return SpecialisedForward(plain.policy, positions, matrix=plain.matrix)
