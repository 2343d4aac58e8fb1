"""What a family's own forward pass does behind its backbone, found out by trying: a factor and a soft cap on its logits, and layers
before the last matrix.

A configuration may name a factor that the family ignores, or multiplies by where another divides.  So the forms that it could mean
are tried on a small copy, and the one that gives the model's own logits is taken.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from groupwise.errors import ConfigError
from groupwise.models.small_copy import backbone_of, small_model

FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier")
CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
Form = tuple[float, float | None]
"""A factor, and a soft cap or None."""


def forms(config: Any) -> list[Form]:
    """What a configuration could mean, the simplest first."""
    factors, caps = [1.0], [None]
    for section in {id(part): part for part in (config, config.get_text_config())}.values():
        given = section.to_dict()
        values = [float(given[key]) for key in FACTORS if given.get(key)]
        if given.get("dim_model_base") and given.get("hidden_size"):  # MiniCPM's width of reference
            values.append(given["hidden_size"] / given["dim_model_base"])
        for value in values:
            factors += [value, 1.0 / value]
        caps += [float(given[key]) for key in CAPS if given.get(key)]
    return list(product(factors, caps))


@torch.no_grad()
def read_form(model: PreTrainedModel, kind: type[PreTrainedModel]) -> Form:
    """The form of a model's logits.   kind: the language model's class.  Raises ConfigError if none fits."""
    meant = forms(model.config)
    if len(meant) == 1:
        return meant[0]
    small = small_model(kind, model.config)
    tokens, output = torch.arange(2, 9)[None], small.get_output_embeddings()
    assert isinstance(output, nn.Linear)
    own = small(input_ids=tokens, use_cache=False).logits
    # Between the backbone and the matrix may lie a factor, which is one of the forms, or layers, behind which the states are taken.
    for hidden in (backbone_of(small)(input_ids=tokens, use_cache=False).last_hidden_state, head_input(small, tokens)):
        if hidden is None or hidden.shape[-1] != output.in_features:
            continue
        linear = output(hidden)
        for place, (factor, cap) in enumerate(forms(small.config)):
            tried = linear * factor
            tried = tried if cap is None else cap * torch.tanh(tried / cap)
            if bool((tried - own).abs().max() <= 1e-5 * own.abs().max()):
                return meant[place]
    raise ConfigError(f"{kind.__name__} does more with its logits than a factor and a soft cap: its head is not supported")


def head_input(model: PreTrainedModel, tokens_BT: Tensor) -> Tensor | None:
    """What a pass of the whole model gives to its last matrix (B, T, D), differentiable; None if it calls no such module once."""
    output, found = model.get_output_embeddings(), list[Tensor]()
    if not isinstance(output, nn.Module):
        return None
    hook = output.register_forward_pre_hook(lambda _, inputs: found.extend(inputs[:1]))
    try:
        model(input_ids=tokens_BT, use_cache=False)
    finally:
        hook.remove()
    return found[0] if len(found) == 1 else None


@torch.no_grad()
def has_deep_head(model: PreTrainedModel, kind: type[PreTrainedModel]) -> bool:
    """True if between a model's backbone and its last matrix lies more than one of its `forms`, as the transform of BERT's head.

    kind: the language model's class.   A family that cannot be asked has none: whatever it does is held against its own pass later.
    """
    tokens = torch.arange(2, 9)[None]
    try:
        small = small_model(kind, model.config)
        given, hidden = head_input(small, tokens), backbone_of(small)(input_ids=tokens, use_cache=False).last_hidden_state
    except Exception:  # a model's own code
        return False
    if given is None:
        return False
    if given.shape != hidden.shape:
        return True
    factors = {factor for factor, _ in forms(small.config)}  # of which `read_form` took one; any other is a layer to it
    return not any(bool((given - factor * hidden).abs().max() <= 1e-5 * given.abs().max()) for factor in factors)
