"""What a query of an attention layer sees of the tokens before it, as `masks.note_reach` has noted
it on the layer's module.
"""

from __future__ import annotations

from torch import nn

from groupwise.errors import ConfigError
from groupwise.ops.query import Reach

ATTRIBUTE = "groupwise_reach"
"""Attribute of an attention module that holds its `Reach`."""
REMEDY = "set model.attention to 'single' and rollout.engine to 'transformers'"


def reach_of(module: nn.Module) -> Reach:
    """What `note_reach` has noted on an attention module.

    Raises ConfigError if it has not met it.
    """
    reach = getattr(module, ATTRIBUTE, None)
    if reach is None:
        raise ConfigError(
            f"{type(module).__name__} was not met when the model's masks were read: it is not known"
            f" which tokens it sees; {REMEDY}"
        )
    return reach


def copy_reach(source: nn.Module, target: nn.Module) -> None:
    """Write what was noted on the modules of one model to those of the same names in another."""
    noted = {
        name: vars(module)[ATTRIBUTE]
        for name, module in source.named_modules()
        if ATTRIBUTE in vars(module)
    }
    for name, module in target.named_modules():
        if name in noted:
            setattr(module, ATTRIBUTE, noted[name])
