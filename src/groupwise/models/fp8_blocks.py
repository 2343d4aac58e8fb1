"""Linear layers of a policy's blocks whose products run in FP8, as torchao makes them
(`model.fp8`).

Packed passes, which updates and scores make, run each layer by its twin: torchao's `Float8Linear`
over the same weight and bias.  The model itself is not changed: its own pass, sampling,
checkpoints and what servers get have the weights as they are.  A token's scale is its own, so that
its log-prob does not depend on its neighbours in a stream: for that reason torchao's scales of
whole tensors are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from groupwise.errors import ConfigError
from groupwise.models.backbone import blocks, replaced_forwards
from groupwise.models.policy import Policy
from groupwise.models.shape import names_experts
from groupwise.ops.operations import operations

SIDE = 16
"""The sides of a matrix are multiples of it: a demand of FP8 units."""
FIRST_CAPABILITY = (9, 0)
"""The first GPUs whose kernels multiply in FP8 with a scale for each row."""


@cache
def torchao() -> Any:
    """Import `torchao.float8`.  Raises ConfigError where it is not installed."""
    try:
        import torchao.float8  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            f"model.fp8 is computed by torchao, which cannot be imported ({error}):"
            " pip install torchao"
        ) from error
    return torchao.float8


def converted(layer: nn.Linear, recipe: str) -> nn.Linear:
    """Return torchao's FP8 layer over the weight and the bias of a layer, which is not changed.

    recipe: torchao's name.
    """
    float8 = torchao()
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    # The gradient of a weight is a sum over the tokens of a stream, whatever their number.
    config = replace(config, emulate=emulates(layer.weight.device), pad_inner_dim=True)
    return float8.convert_to_float8_training(layer, config=config)


def emulates(device: torch.device) -> bool:
    """True if a device has no FP8 units: products of rounded numbers are made in float32."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) < FIRST_CAPABILITY


class Fp8Blocks:
    """Runs linear layers of a policy and of its copies in FP8 in packed passes."""

    def __init__(self, policy: Policy, recipe: str) -> None:
        """recipe: torchao's name, `model.fp8`.  Raises ConfigError for what cannot run in FP8."""
        if policy.adapter is not None:
            raise refusal("the weights under an adapter (model.lora) are frozen")
        if policy.attention == "single":
            raise refusal("model.attention is 'single', which runs no packed streams")
        if policy.vision is not None:
            raise refusal("the model reads images")
        spread = policy.sharded or policy.context_group is not None
        demand_fp8(policy.model, spread=spread)
        self.recipe = recipe
        names, others = linear_layers(policy.model)
        self.names = names
        """The layers that run in FP8."""
        self.others = others
        """Linear layers of blocks with sides that FP8 units do not take."""
        self._twins: dict[nn.Linear, nn.Linear] = {}

    def layers(self, policy: Policy) -> dict[str, nn.Linear]:
        """Return the layers of a policy that run in FP8, by name."""
        found: dict[str, nn.Linear] = {}
        for name in self.names:
            layer = policy.model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            found[name] = layer
        return found

    def twin(self, layer: nn.Linear) -> nn.Linear:
        """Return what computes in a layer's place; it is made once."""
        if layer not in self._twins:
            self._twins[layer] = converted(layer, self.recipe)
        return self._twins[layer]

    @contextmanager
    def fused_modules(self, policy: Policy) -> Iterator[None]:
        """Run a policy's layers in FP8 while inside, and what lies between them fused.

        Backward passes must be inside too.
        """
        forwards = dict[nn.Module, Callable[..., Any]]()
        for layer in self.layers(policy).values():
            forwards[layer] = self.twin(layer).forward
        # Fused forms call a module that has a `forward` of its own.
        with replaced_forwards(forwards), operations().fused_modules(policy.model):
            yield


def linear_layers(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the names of linear layers of a model's blocks: those that can run in FP8, and those
    with sides that FP8 units do not take.

    The model may be without weights.
    """
    inside = set[nn.Module]()
    for block in blocks(model):
        inside.update(block.modules())
    fit, others = list[str](), list[str]()
    for name, layer in model.named_modules():
        if type(layer) is not nn.Linear or layer not in inside:
            continue
        if not layer.weight.requires_grad:  # of a part that reads images
            continue
        if layer.in_features % SIDE or layer.out_features % SIDE:
            others.append(name)
        else:
            fit.append(name)
    return fit, others


def demand_fp8(model: PreTrainedModel, *, spread: bool) -> None:
    """Refuse a model that cannot run in FP8, as far as it is known before its weights are read.
    Raises ConfigError, also without torchao.

    model: it may be without weights.   spread: several processes hold the weights or the streams
    together.
    """
    if spread:
        raise refusal("weights or streams are spread over processes (parallel)")
    if names_experts(model.config.to_dict()):
        raise refusal("the matrices of experts are no linear layers")
    fit, _ = linear_layers(model)
    if not fit:
        name = type(model).__name__
        raise refusal(f"no block of {name} has a linear layer whose sides are multiples of {SIDE}")
    torchao()


def refusal(reason: str) -> ConfigError:
    """Return the error for what cannot run in FP8."""
    return ConfigError(f"model.fp8: {reason}; leave model.fp8 out", key="model.fp8")


def in_fp8(policy: Policy, recipe: str | None) -> Policy:
    """Return the policy with its blocks in FP8.   recipe: `model.fp8`; None: as it is.

    Raises ConfigError for what cannot run in FP8.
    """
    if recipe is None:
        return policy
    return replace(policy, blocks=Fp8Blocks(policy, recipe))
