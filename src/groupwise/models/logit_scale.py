"""What a model computes behind its backbone: a factor and a soft cap on its logits, and layers
before the last matrix.

A configuration may name a factor that the family ignores, or multiplies by where another divides.
So the model is asked: its last matrix is given random states, and the form that gives the model's
own logits is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from groupwise.errors import ConfigError

FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier")
CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
Form = tuple[float, float | None]
"""A factor, and a soft cap or None."""
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-5}
"""Largest difference of a number that is the same, relative to the largest number; of other types
`ROUNDED`.
"""
ROUNDED = 0.03
"""In bfloat16; factors and caps of real models differ by more."""


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head.

    It is `base_model`, but for a few families whose `base_model_prefix` names no attribute: there
    it is the part that holds the embedding.  In Llama 4 it is a language model with the head
    inside.
    """
    backbone: Any = model.base_model
    if backbone is model and model.get_output_embeddings() is not None:
        embedding = model.get_input_embeddings()
        parts = (part for part in model.children() if isinstance(part, PreTrainedModel))
        backbone = next((part for part in parts if part.get_input_embeddings() is embedding), model)
    has_head = (
        isinstance(backbone, PreTrainedModel)
        and backbone is not model
        and backbone.get_output_embeddings() is not None
    )
    return backbone_of(backbone) if has_head else backbone


def forms(config: Any) -> list[Form]:
    """What a configuration could mean, the simplest first."""
    factors, caps = [1.0], [None]
    for section in {id(part): part for part in (config, config.get_text_config())}.values():
        keys = section.to_dict()
        values = [float(keys[key]) for key in FACTORS if keys.get(key)]
        if keys.get("dim_model_base") and keys.get("hidden_size"):  # MiniCPM's width of reference
            values.append(keys["hidden_size"] / keys["dim_model_base"])
        for value in values:
            factors += [value, 1.0 / value]
        caps += [float(keys[key]) for key in CAPS if keys.get(key)]
    return list(product(factors, caps))


@torch.no_grad()
def read_form(
    model: PreTrainedModel,
    *,
    backbone: Callable[..., Any] | None = None,
    device: torch.device | None = None,
) -> Form:
    """The form of a model's logits.  Raises ConfigError if none fits.

    backbone, device: what runs the model's backbone, and where, of a sharded model.
    """
    meant = forms(model.config)
    if len(meant) == 1:
        return meant[0]
    model = _with_head(model)
    tokens, output = (
        torch.arange(2, 9, device=device or model.device)[None],
        model.get_output_embeddings(),
    )
    assert isinstance(output, nn.Linear)
    caps = [cap for _, cap in meant if cap is not None]
    hidden = (backbone or backbone_of(model))(input_ids=tokens, use_cache=False).last_hidden_state
    inputs = head_input(model, tokens)
    if inputs is None:  # the matrix is read, and not called
        own, states = model(input_ids=tokens, use_cache=False).logits, [hidden]
    else:
        # Random states whose logits a cap changes: those of a fresh model are so small that it does
        # not.
        drawn = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0)).to(inputs)
        size = 2.0 * max(caps, default=1.0) / float(output(drawn).float().std())
        hook = output.register_forward_pre_hook(lambda _, inputs: (drawn * size,))
        try:
            own = model(input_ids=tokens, use_cache=False).logits
        finally:
            hook.remove()
        # Between backbone and matrix may lie a factor, which is one of the forms, or layers, behind
        # which the states are taken.
        states = [drawn * size / factor for factor in _before(inputs, hidden, meant)] or [
            drawn * size
        ]
    for tried_BTD in states:
        linear = output(tried_BTD)
        for factor, cap in meant:
            tried = linear * factor
            tried = tried if cap is None else cap * torch.tanh(tried / cap)
            if tried.shape == own.shape and _close(tried, own):
                return factor, cap
    raise ConfigError(
        f"{type(model).__name__} does more with its logits than a factor and a soft cap: its head"
        " is not supported"
    )


def _before(inputs: Tensor, hidden: Tensor, meant: list[Form]) -> list[float]:
    """The factor between what a backbone gives and what the last matrix is given, if it is one of
    the forms'.
    """
    if inputs.shape != hidden.shape:
        return []
    return [factor for factor in dict(meant) if _close(inputs, factor * hidden)][:1]


def _close(ours: Tensor, theirs: Tensor) -> bool:
    bound = CLOSE.get(theirs.dtype, ROUNDED)
    return bool((ours.float() - theirs.float()).abs().max() <= bound * theirs.float().abs().max())


def _with_head(model: PreTrainedModel) -> PreTrainedModel:
    """A scoring model's backbone under the language model's head of its family; another model
    itself.
    """
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None)
    if model.get_output_embeddings() is not None or kind is None or isinstance(kind, tuple):
        return model
    with torch.device("meta"):
        made: Any = kind(model.config)
    setattr(made, made.base_model_prefix, backbone_of(model))
    made.get_output_embeddings().weight = model.get_input_embeddings().weight
    return made.eval()


def head_input(model: PreTrainedModel, tokens_BT: Tensor) -> Tensor | None:
    """What a pass of the whole model gives to its last matrix (B, T, D), differentiable; None if it
    calls no such module once.
    """
    output, read = model.get_output_embeddings(), list[Tensor]()
    if not isinstance(output, nn.Module):
        return None
    hook = output.register_forward_pre_hook(lambda _, arguments: read.extend(arguments[:1]))
    try:
        model(input_ids=tokens_BT, use_cache=False)
    finally:
        hook.remove()
    return read[0] if len(read) == 1 else None


@torch.no_grad()
def has_deep_head(model: PreTrainedModel) -> bool:
    """True if between a model's backbone and its last matrix lies more than one of its `forms`, as
    the transform of BERT's head.

    A family that cannot be asked has none: whatever it does is held against its own pass later.
    """
    tokens = torch.arange(2, 9, device=model.device)[None]
    try:
        inputs, hidden = (
            head_input(model, tokens),
            backbone_of(model)(input_ids=tokens, use_cache=False).last_hidden_state,
        )
    except Exception:  # a model's own code
        return False
    # `read_form` took one of the factors; any other is a layer to it.
    return inputs is not None and not _before(inputs, hidden, forms(model.config))
