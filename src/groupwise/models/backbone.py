"""Running a policy's model without its head over a flat stream, and which of its blocks are
computed again.

T positions of a stream   D width
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise.errors import ConfigError
from groupwise.models.attention import Attend, attending
from groupwise.models.policy import Policy
from groupwise.records import ImageSpan


def hidden(
    policy: Policy,
    tokens_T: Tensor,
    position_T: Tensor,
    attend: Attend,
    images: Sequence[ImageSpan] = (),
) -> Tensor:
    """Final hidden states (T, D) of a flat stream, before the head.   images: see `Batch`."""
    return run_backbone(policy, tokens_T, position_T, attend, images).last_hidden_state[0]


def run_backbone(
    policy: Policy,
    tokens_T: Tensor,
    position_T: Tensor,
    attend: Attend,
    images: Sequence[ImageSpan] = (),
    **options: Any,
) -> Any:
    """What the model without its head gives for a flat stream."""
    if policy.context_group is not None:
        part = policy.context_group.part(tokens_T, position_T, attend)
        alone = replace(policy, context_group=None)
        return part.whole(
            run_backbone(alone, part.tokens_T, part.position_T, part.attend, **options)
        )
    run, inputs = policy.backbone, {"input_ids": tokens_T[None], "position_ids": position_T[None]}
    with computing(policy):
        if images:
            stream = (tokens_T, position_T, attend, images)
            run, inputs, attend = policy.vision.spliced(policy, *stream)
        with attending(attend, position_T):
            return run(**inputs, use_cache=False, **options)


@contextlib.contextmanager
def computing(policy: Policy) -> Iterator[None]:
    """The policy's precision and its adapter, on or off, while inside; in eval mode, whatever
    somebody has set.
    """
    if policy.model.training:
        policy.model.eval()
    with policy.precision(), policy.adapter_state():
        yield


def layers(policy: Policy) -> list[GradientCheckpointingLayer]:
    """The blocks of a policy's model that can be computed again."""
    return blocks(policy.model)


def blocks(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The blocks of a model that can be computed again."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def can_recompute(policy: Policy) -> bool:
    """True if the model has layers whose activations can be computed again."""
    return policy.model.supports_gradient_checkpointing and bool(layers(policy))


@contextlib.contextmanager
def checkpointing(policy: Policy, on: bool) -> Iterator[None]:
    """Recompute the blocks' activations in the backward pass while inside, but the last one's: its
    turn comes at once.

    transformers recomputes only in layers that are in training mode, in which some families drop
    units.  So their `forward` is wrapped here, and everything stays in eval mode.
    """
    if on and not can_recompute(policy):
        name = type(policy.model).__name__
        raise ConfigError(
            f"{name} has no layers that can recompute; set model.gradient_checkpointing to false"
        )
    blocks = layers(policy)
    forwards = dict[nn.Module, Callable[..., Any]]()
    for block in blocks:
        forward: Any = block.forward
        if getattr(forward, "func", None) is _recomputed:
            forward = forward.args[0]
        if on and block is not blocks[-1]:
            forward = partial(_recomputed, forward)
        forwards[block] = forward
    with replaced_forwards(forwards):
        yield


@contextlib.contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules another `forward` while inside."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _recomputed(compute: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Call `compute(*inputs)`, and again in the backward pass, in the same context whichever thread
    runs it.

    Nothing is drawn in eval mode, so that no state of a generator is kept.
    """
    run = copy_context().run
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(run, compute, *inputs, **options, **named)
