"""Proof of blocks in FP8 (`model.fp8`): each layer is torchao's own to the bit, and all of them
together drift from the model without FP8 by no more than a bound.

Equality with the model's own pass cannot be asked: FP8 keeps three bits behind a number's first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.models.fp8_blocks import Fp8Blocks, converted, emulates, refusal
from groupwise.models.policy import Policy
from groupwise.proof.passes import run_pass, some_gradients
from groupwise.proof.prove import kept_gradients
from groupwise.proof.texts import NATIVE, Size, drawn

DRIFT = 0.1
"""Largest mean difference, in nats, of the log-probs of sampled tokens with FP8 and without: the
bound of a step's mismatch too."""
GRADIENT_DRIFT = 0.35
"""Largest difference of the gradient with FP8, relative to the norm of that without."""
TEXTS = Size(prompts=(8,) * 8, group=2, rows=8, tokens=12, far=0)
"""What is sampled to measure the drift."""
TOKENS = 16
"""Rows of the input that each layer is given."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far a policy with FP8 is from the same one without."""

    mean: float
    """The mean difference of a sampled token's log-prob, nats."""
    largest: float
    """The largest difference of one."""
    gradient: float
    """The norm of the gradient's difference, relative to the gradient's."""


def prove_fp8(policy: Policy, *, longest: int) -> tuple[str, str]:
    """Compare a policy's blocks in FP8 with torchao's layers, and with the blocks without FP8,
    which are proven before.  Return label and text for the plan.

    longest: tokens of the run's longest text.  Raises ConfigError for a layer that differs and for
    a drift beyond the bounds.
    """
    blocks: Fp8Blocks = policy.blocks
    for name, layer in blocks.layers(policy).items():
        compare_layer(name, blocks.twin(layer), layer, blocks.recipe)
    drift = measured_drift(policy, longest)
    if not drift.mean <= DRIFT:
        raise refusal(
            f"log-probs of sampled tokens differ by {drift.mean:.2g} nats on average from those"
            f" without FP8 (one by {drift.largest:.2g}), more than {DRIFT:g}: this model cannot be"
            " trained in FP8"
        )
    if not drift.gradient <= GRADIENT_DRIFT:
        raise refusal(
            f"the gradient differs by {drift.gradient:.2g} of its norm from that without FP8, more"
            f" than {GRADIENT_DRIFT:g}: this model cannot be trained in FP8"
        )
    units = "in FP8"
    if emulates(policy.device):
        units = "in emulated FP8, which is slower than without, for this device has no units"
    stay = ""
    if blocks.others:
        stay = f" ({len(blocks.others)} stay: their sides are no multiples of 16)"
    text = (
        f"{blocks.recipe}: {len(blocks.names)} linear layers{stay} {units}, each equal to"
        f" torchao's; log-probs drift by {drift.mean:.2g} nats on average, by"
        f" {drift.largest:.2g} at most, the gradient by {drift.gradient:.2g} of its norm"
    )
    return "fp8", text


def compare_layer(name: str, twin: nn.Linear, layer: nn.Linear, recipe: str) -> None:
    """Raise ConfigError unless a layer in FP8 gives what torchao's gives that is made of it now,
    forward and backward, to the bit.
    """
    device, dtype = layer.weight.device, layer.weight.dtype
    generator = torch.Generator().manual_seed(0)
    x_TI = torch.randn(TOKENS, layer.in_features, generator=generator).to(device, dtype)
    gradient_TO = torch.randn(TOKENS, layer.out_features, generator=generator).to(device, dtype)
    ours = _products(twin, x_TI, gradient_TO)
    theirs = _products(converted(layer, recipe), x_TI, gradient_TO)
    kinds = ("products", "gradients of inputs", "gradients of weights")
    for kind, one, other in zip(kinds, ours, theirs, strict=True):
        if not torch.equal(one, other):
            raise refusal(
                f"{kind} of {name} are not those of torchao's own layer: this is a fault of"
                " Groupwise or of torchao's version"
            )


def _products(layer: nn.Linear, x_TI: Tensor, gradient_TO: Tensor) -> tuple[Tensor, ...]:
    """What a layer gives, and the gradients of its input and its weight."""
    x_TI = x_TI.clone().requires_grad_()
    with torch.enable_grad():
        out_TO = layer(x_TI)
        gradients = torch.autograd.grad(out_TO, (x_TI, layer.weight), gradient_TO)
    return out_TO.detach(), *gradients


def measured_drift(policy: Policy, longest: int) -> Drift:
    """Measure how far FP8 moves log-probs and gradients, of tokens that the policy samples without
    it.
    """
    plain = replace(policy, blocks=None)
    texts = drawn(plain, NATIVE, TEXTS, max(min(policy.context, longest), 4))
    with some_gradients(policy), kept_gradients(policy):
        exact = run_pass(plain, texts, gradients=True)
        rounded = run_pass(policy, texts, gradients=True)
    gap_N = np.abs(np.concatenate(rounded.values) - np.concatenate(exact.values))
    distance, size = 0.0, 0.0
    for name, gradient in exact.gradient.items():
        distance += float((rounded.gradient[name] - gradient).float().norm()) ** 2
        size += float(gradient.float().norm()) ** 2
    return Drift(float(gap_N.mean()), float(gap_N.max()), (distance / size) ** 0.5)
