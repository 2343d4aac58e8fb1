"""Running a policy's model without its head over a flat stream, and which of its blocks are computed again.

T positions of a stream   D width
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise.errors import ConfigError
from groupwise.models.attention import Attend, attending, recomputation
from groupwise.models.lora import adapter_off
from groupwise.models.policy import Policy


def hidden(policy: Policy, tokens_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
    """Final hidden states (T, D) of a flat stream, before the head."""
    return run_backbone(policy, tokens_T, position_T, attend).last_hidden_state[0]


def run_backbone(policy: Policy, tokens_T: Tensor, position_T: Tensor, attend: Attend, **options: Any) -> Any:
    """What the model without its head gives for a flat stream."""
    set_mode(policy)
    with computing(policy), attending(attend, position_T):
        return policy.backbone(input_ids=tokens_T[None], position_ids=position_T[None], use_cache=False, **options)


@contextlib.contextmanager
def computing(policy: Policy) -> Iterator[None]:
    """The policy's precision and its adapter, on or off, while inside."""
    with policy.precision(), contextlib.nullcontext() if policy.adapter_on else adapter_off(policy.model):
        yield


def set_mode(policy: Policy) -> None:
    """Eval mode, whatever somebody has set: nothing is dropped."""
    if policy.model.training:
        _recompute_only(policy, [layer for layer in layers(policy) if layer.gradient_checkpointing])


def layers(policy: Policy) -> list[GradientCheckpointingLayer]:
    """The model's blocks that can be computed again."""
    return [module for module in policy.model.modules() if isinstance(module, GradientCheckpointingLayer)]


def can_recompute(policy: Policy) -> bool:
    """True if the model has layers whose activations can be computed again."""
    return policy.model.supports_gradient_checkpointing and bool(layers(policy))


@contextlib.contextmanager
def checkpointing(policy: Policy, on: bool) -> Iterator[None]:
    """Recompute the blocks' activations in the backward pass while inside, but the last one's: its turn comes at once.

    transformers recomputes only in layers that are in training mode.  That flag is set on the layers alone, and taken back
    while they compute: in some families a layer drops units by its own flag.
    """
    model, blocks = policy.model, layers(policy)
    before = {layer: layer.gradient_checkpointing for layer in blocks}
    if on and not can_recompute(policy):
        name = type(model).__name__
        raise ConfigError(f"{name} has no layers that can recompute; set model.gradient_checkpointing to false")
    if on:
        # transformers 5.23 renamed it; the old name warns there, the new one is missing before.
        renamed = getattr(model, "activation_checkpointing_enable", None)
        (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False, "context_fn": recomputation})
        for layer in blocks:
            # Set by the call above, and nowhere declared.
            recompute: Callable[..., Any] = vars(layer)["_gradient_checkpointing_func"]
            vars(layer)["_gradient_checkpointing_func"] = partial(_in_eval_mode, layer, recompute)
        # It may leave a hook on the embedding, another every time, which only reentrant recomputation has a use for.
        if hasattr(model, "_require_grads_hook"):
            model.disable_input_require_grads()
    _recompute_only(policy, blocks[:-1] if on else ())
    try:
        yield
    finally:
        _recompute_only(policy, [layer for layer, again in before.items() if again])


def _recompute_only(policy: Policy, chosen: Sequence[GradientCheckpointingLayer]) -> None:
    """Let these layers be computed again, and no others."""
    policy.model.eval()
    for layer in layers(policy):
        layer.gradient_checkpointing = layer.training = layer in chosen


def _in_eval_mode(layer: nn.Module, checkpoint: Callable[..., Any], compute: Callable[..., Any], *inputs: Any) -> Any:
    """`checkpoint(compute, *inputs)`, in which the layer drops nothing, also when it is computed again."""

    def in_eval_mode(*inputs: Any) -> Any:
        modes = [(module, module.training) for module in layer.modules()]
        layer.eval()
        try:
            return compute(*inputs)
        finally:
            for module, training in modes:
                module.training = training

    return checkpoint(in_eval_mode, *inputs)
