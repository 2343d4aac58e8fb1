"""What a model computes behind its backbone: its last matrix, a factor and a soft cap on the
logits, and layers before that matrix.

Which fields of a config are a factor or a cap stands in tables, with the families that read a field
otherwise.  A family that no table has is held against its own pass when a run begins
(`proof/prove.py`), and refused where it differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.models.output_head import backbone_of, head_input

MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
"""Fields that logits are multiplied by."""
DIVISORS = ("logits_scaling",)
"""Fields that logits are divided by."""
CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
"""Fields that logits are capped at: cap * tanh(logits / cap)."""
MULTIPLIED_BY_DIVISORS = ("hyperclovax",)
"""Families that multiply by what others divide by."""
UNREAD = {
    "mpt": ("logit_scale",),
    "gemma3": ("final_logit_softcapping",),
}
"""Fields that a family's config has and its model does not read."""
Form = tuple[float, float | None]
"""A factor, and a soft cap or None."""
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-5}
"""Largest difference of a number that is the same, relative to the largest number; of other types
`ROUNDED`.
"""
ROUNDED = 0.03
"""The same in bfloat16; factors of real models differ by more."""


def form_of(config: Any) -> Form:
    """Read the factor and the soft cap of a model's logits off its config.

    >>> from transformers import GraniteConfig, Gemma2Config
    >>> form_of(GraniteConfig(logits_scaling=8.0)), form_of(Gemma2Config())
    ((0.125, None), (1.0, 30.0))
    """
    unread = UNREAD.get(config.model_type, ())
    fields: dict[str, Any] = {}
    for section in (config.get_text_config(), config):
        for name, value in section.to_dict().items():
            if value and name not in unread:
                fields[name] = value
    factor = 1.0
    for name in MULTIPLIERS:
        factor *= float(fields.get(name, 1.0))
    for name in DIVISORS:
        divisor = float(fields.get(name, 1.0))
        if config.model_type in MULTIPLIED_BY_DIVISORS:
            factor *= divisor
        else:
            factor /= divisor
    if "dim_model_base" in fields:  # MiniCPM's width of reference
        factor *= fields["dim_model_base"] / fields["hidden_size"]
    caps = [float(fields[name]) for name in CAPS if name in fields]
    return factor, caps[0] if caps else None


@torch.no_grad()
def has_deep_head(model: PreTrainedModel) -> bool:
    """True if between a model's backbone and its last matrix lies more than the factor of its form,
    as the transform of BERT's head.

    A family that cannot be asked has none: whatever it does is held against its own pass later.
    """
    tokens = torch.arange(2, 9, device=model.device)[None]
    try:
        inputs = head_input(model, tokens)
        hidden = backbone_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
    except Exception:  # a model's own code
        return False
    if inputs is None:
        return False
    if inputs.shape != hidden.shape:
        return True
    factor, _ = form_of(model.config)
    return not (_close(inputs, hidden) or _close(inputs, factor * hidden))


def _close(numbers: Tensor, expected: Tensor) -> bool:
    """True if all numbers are those expected, but for rounding."""
    bound = CLOSE.get(expected.dtype, ROUNDED)
    difference = (numbers.float() - expected.float()).abs().max()
    return bool(difference <= bound * expected.float().abs().max())
