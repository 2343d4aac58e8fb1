"""Proof of blocks in FP8 (`model.fp8`): each layer is torchao's own to the bit, and all of them
together drift from the model without FP8 by no more than a bound.

Equality with the model's own pass cannot be asked: FP8 keeps three bits behind a number's first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.models.backbone import checkpointing
from groupwise.models.fp8_blocks import Fp8Blocks, converted, emulates, refusal
from groupwise.models.policy import Policy
from groupwise.proof.passes import run_pass, some_gradients
from groupwise.proof.prove import kept_gradients
from groupwise.proof.texts import Size, prompts_of
from groupwise.records import Prompt, Sample, Sampling
from groupwise.rollout.native.engine import NativeEngine

DRIFT = 0.1
"""Largest mean difference, in nats, of the log-probs of sampled tokens with FP8 and without: the
bound of a step's mismatch too."""
DIRECTION = 0.8
"""Smallest cosine of the angle between the gradients with FP8 and without."""
PROMPTS = 8
"""Prompts that the drift is measured on."""
SAMPLED = 24
"""Tokens that are sampled of each."""
UNKNOWN = Size(prompts=(8,) * PROMPTS, group=1, rows=PROMPTS, tokens=SAMPLED, far=0)
"""Random prompts, where a run's are not known."""
TOKENS = 16
"""Rows of the input that each layer is given."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far a policy with FP8 is from the same one without."""

    mean: float
    """The mean difference of a sampled token's log-prob, nats."""
    largest: float
    """The largest difference of one."""
    cosine: float
    """The cosine of the angle between the gradients."""


def prove_fp8(
    policy: Policy, *, longest: int, recompute: bool = False, prompts: Sequence[np.ndarray] = ()
) -> tuple[str, str]:
    """Compare a policy's blocks in FP8 with torchao's layers, and with the blocks without FP8,
    which are proven before.  Return label and text for the plan.

    longest, recompute: see `prove`.   prompts: token ids of the run's prompts; none: random ones
    are taken.  Raises ConfigError for a layer that differs and for a drift beyond the
    bounds.
    """
    blocks: Fp8Blocks = policy.blocks
    for name, layer in blocks.layers(policy).items():
        compare_layer(name, blocks.twin(layer), layer, blocks.recipe)
    prompts = prompts or prompts_of(policy, UNKNOWN, longest, seed=0)
    drift = measured_drift(policy, prompts, recompute)
    if not drift.mean <= DRIFT:
        raise refusal(
            f"log-probs of sampled tokens differ by {drift.mean:.2g} nats on average from those"
            f" without FP8 (one by {drift.largest:.2g}), more than {DRIFT:g}: this model cannot be"
            " trained in FP8"
        )
    if not drift.cosine >= DIRECTION:
        raise refusal(
            f"the cosine between the gradients with FP8 and without is {drift.cosine:.2g}, less"
            f" than {DIRECTION:g}: this model cannot be trained in FP8"
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
        f" {drift.largest:.2g} at most, the gradient by a cosine of {drift.cosine:.3f}"
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


def measured_drift(policy: Policy, prompts: Sequence[np.ndarray], recompute: bool = False) -> Drift:
    """Measure how far FP8 moves log-probs and gradients, of tokens that the policy samples without
    it.

    prompts: their token ids.   recompute: as in updates.
    """
    plain = replace(policy, blocks=None)
    texts = sampled(plain, prompts)
    again = checkpointing(policy, True) if recompute else nullcontext()
    with some_gradients(policy), kept_gradients(policy), again:
        exact = run_pass(plain, texts, gradients=True)
        rounded = run_pass(policy, texts, gradients=True)
    gap_N = np.abs(np.concatenate(rounded.values) - np.concatenate(exact.values))
    product, size, size_rounded = 0.0, 0.0, 0.0
    for name, gradient in exact.gradient.items():
        one, other = gradient.double(), rounded.gradient[name].double()
        product += float((one * other).sum())
        size += float(one.square().sum())
        size_rounded += float(other.square().sum())
    cosine = product / math.sqrt(size * size_rounded)
    return Drift(float(gap_N.mean()), float(gap_N.max()), cosine)


def first_that_fit(prompts: Iterable[np.ndarray], positions: int) -> list[np.ndarray]:
    """Return the first `PROMPTS` prompts, fewer where they and their answers are more than
    `positions` together, and at least one.
    """
    chosen: list[np.ndarray] = []
    size = 0
    for ids in prompts:
        size += ids.size + SAMPLED
        if chosen and size > positions:
            break
        chosen.append(ids)
        if len(chosen) == PROMPTS:
            break
    return chosen


def sampled(policy: Policy, prompts: Sequence[np.ndarray]) -> list[Sample]:
    """Sample a completion of each prompt by the native engine; all of its tokens have a weight."""
    asked = []
    for place, ids in enumerate(prompts):
        asked.append(Prompt(id=str(place), tokens=ids, text=""))
    sampling = Sampling(max_new_tokens=SAMPLED)
    engine = NativeEngine(policy, max_rows=len(asked))
    texts = []
    for (rollout,) in engine.generate(asked, group_size=1, sampling=sampling, seed=0):
        texts.append(
            Sample(
                group=rollout.prompt.id,
                prompt=rollout.prompt.tokens,
                completion=rollout.tokens,
                weight=np.ones(rollout.tokens.size),
            )
        )
    return texts
