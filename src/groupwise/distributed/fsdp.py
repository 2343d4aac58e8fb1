"""Tensors that are spread over processes: the part of this one, the whole, their gradients' norm.

`layout.py` spreads models; `models/sharded.py` makes a policy whole again to sample and to be
saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from groupwise.distributed import comm


def reshard(model: nn.Module) -> None:
    """Let go of gathered weights: after a forward pass without a backward one, and before
    parameters are read.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, gathered (every process must call it); another tensor as it is."""
    with comm.peers():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(tensor: Tensor) -> Tensor:
    """This process's shard of a sharded tensor, in the same memory; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def align_gradients(parameters: list[Tensor]) -> None:
    """Lay each gradient out as its parameter is: autograd leaves some of them whole."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the mesh that a tensor lies on and the dimensions that it is spread over; () if it is
    whole.
    """
    if not isinstance(tensor, DTensor):
        return ()
    spread = [place for place, how in enumerate(tensor.placements) if not how.is_replicate()]
    return tensor.device_mesh, *spread


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by `kind_of`: torch computes with those of one mesh in one call."""
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(kind_of(tensor), []).append(tensor)
    return list(kinds.values())


def clip(parameters: list[Tensor], limit: float) -> Tensor:
    """Clip gradients by the norm of all of them, and return the norm before.

    Every number counts once, however many processes hold it.
    """
    groups = by_kind(parameters)
    if len(groups) == 1:
        return whole(nn.utils.clip_grad_norm_(parameters, limit))
    total = own(parameters[0]).new_zeros(())
    gradients = []
    for group in groups:
        parts = [own(parameter.grad) for parameter in group if parameter.grad is not None]
        gradients += parts
        square = torch.stack([part.norm() for part in parts]).square().sum()
        kind = kind_of(group[0])
        for place in kind[1:]:
            dist.all_reduce(square, group=kind[0].get_group(place))
        total += square
    norm = total.sqrt()
    # As `clip_grad_norm_` does.
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm
