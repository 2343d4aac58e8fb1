"""Tables of rotary embeddings by the length of each sequence: see `rope`.

T positions of a stream   W head width
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.models.attention import attended


def follow_lengths(model: nn.Module) -> None:
    """Let the model's rotary embeddings have the frequencies of each sequence's own length, in
    packed streams and outside.
    """
    for module in _changing(model):
        if "forward" not in vars(module):
            module.forward = MethodType(_by_length, module)


def switches(model: nn.Module) -> tuple[tuple[int, bool], ...]:
    """Lengths above which frequencies are others, and whether every length above has its own."""
    lengths = set()
    for module in _changing(model):
        for layer_type, kind in _kinds(module).items():
            if _changes(kind):
                lengths.add((_switch(module, layer_type, kind), "dynamic" in kind))
    return tuple(sorted(lengths))


def _changing(model: nn.Module) -> list[Any]:
    """Rotary embeddings some of whose frequencies depend on the length."""
    return [module for module in model.modules() if any(map(_changes, _kinds(module).values()))]


def _changes(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def _kinds(module: Any) -> dict[str | None, str]:
    """The types of a rotary embedding's tables, by type of layer where layers differ; of other
    modules nothing.
    """
    kinds = vars(module).get("rope_type")
    if isinstance(kinds, dict):
        return {key: str(kind) for key, kind in kinds.items()}
    return {} if kinds is None else {None: str(kinds)}


def _switch(module: Any, layer_type: str | None, kind: str) -> int:
    if "dynamic" in kind:
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    return int(
        (parameters if layer_type is None else parameters[layer_type])[
            "original_max_position_embeddings"
        ]
    )


def _by_length(
    self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """A rotary embedding's `forward`: tables (1, T, W), each sequence's by its own length."""
    layer_type = kwargs.get("layer_type", args[0] if args else None)
    kind, attend = _kinds(self)[layer_type], attended()
    if attend is None or not _changes(kind):
        if "dynamic" in kind:
            _forget(self, layer_type)
        return type(self).forward(self, x, position_ids, *args, **kwargs)

    def table(group: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of a group's positions, by its length."""
        if "dynamic" in kind:
            _forget(self, layer_type)
        own = torch.where(group_T == group, position_ids, 0)
        # transformers goes by the last position, which another process may have.
        last = (group - 1).clamp(min=0).view(1, 1)
        cos, sin = type(self).forward(self, x, torch.cat([own, last], 1), *args, **kwargs)
        return cos[:, :-1], sin[:, :-1]

    length_T = attend.sequence_lengths(position_ids[0])
    at = _switch(self, layer_type, kind)
    group_T = torch.where(length_T > at, length_T if "dynamic" in kind else at + 1, 0)
    groups = group_T.unique()
    cos, sin = table(groups[0])
    for group in groups[1:]:
        chosen_T = (group_T == group)[None, :, None]
        other_cos, other_sin = table(group)
        cos, sin = torch.where(chosen_T, other_cos, cos), torch.where(chosen_T, other_sin, sin)
    return cos, sin


def _forget(module: Any, layer_type: str | None) -> None:
    """Lengths of earlier passes, which dynamic NTK keeps the frequencies of."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    original = getattr(module, f"{prefix}original_inv_freq").to(
        getattr(module, f"{prefix}inv_freq").device
    )
    module.register_buffer(f"{prefix}inv_freq", original, persistent=False)
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
