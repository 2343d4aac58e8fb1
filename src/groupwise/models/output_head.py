"""Where a model's backbone ends: the model without its head, and what its last matrix is given."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


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


def head_input(model: PreTrainedModel, tokens_BT: Tensor) -> Tensor | None:
    """What a pass of the whole model gives to its last matrix (B, T, D), differentiable; None if it
    calls no such module once.
    """
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Module):
        return None
    read: list[Tensor] = []
    hook = output.register_forward_pre_hook(lambda _, arguments: read.extend(arguments[:1]))
    try:
        model(input_ids=tokens_BT, use_cache=False)
    finally:
        hook.remove()
    return read[0] if len(read) == 1 else None
