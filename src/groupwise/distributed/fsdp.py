"""FSDP2: weights, gradients and optimizer state of a model, sharded over the processes block by
block.

`models/sharded.py` says which blocks of a policy, and makes it whole again to sample and to be
saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from groupwise.config.settings import ParallelSettings
from groupwise.distributed import comm
from groupwise.errors import ConfigError

SHARDED_FROM = 1_000_000_000
"""Parameters from which `parallel: auto` shards a model."""


def decided(parallel: ParallelSettings, parameters: int, size: int) -> ParallelSettings:
    """`auto` decided by the number of parameters, for so many processes.  Raises ConfigError if
    they do not divide.
    """
    shards = parallel.shards or size
    if size % shards:
        raise ConfigError(
            f"parallel.shards is {shards}, which does not divide the {size} processes: copies would"
            " be of different sizes"
        )
    large = "zero3" if parameters >= SHARDED_FROM else "ddp"
    return replace(
        parallel, name=large if parallel.name == "auto" else parallel.name, shards=shards
    )


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    method: str,
    parallel: ParallelSettings,
    device: torch.device,
) -> None:
    """Spread the weights, gradients and optimizer state of a model over the processes, block by
    block.

    A block's weights are gathered while it computes; `zero3` lets go of them between forward and
    backward (less memory, one more gather), `zero2` keeps them.  The rest of the model (embedding,
    last norm, head) stays whole from the first forward to the end of the backward pass, so that the
    head's weight is a plain tensor wherever it is read.  With fewer `shards` than processes there
    are several copies (HSDP): weights travel inside one, gradients then between them.
    method: a method of the model to call instead of its forward; weights are gathered for it in the
        same way.
    parallel: decided.   device: what computes.  Gradients are summed over the processes, in at
        least float32.
    """
    weight = next(model.parameters())
    lower = weight.dtype in (torch.bfloat16, torch.float16)
    spread = partial(
        fully_shard,
        mesh=_mesh(device.type, parallel.shards or comm.world().size),
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32 if lower else None),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=device.type == "cuda")
            if parallel.offload
            else OffloadPolicy()
        ),
    )
    with comm.peers():
        for block in blocks:
            spread(block, reshard_after_forward=parallel.name == "zero3")
        spread(model, reshard_after_forward=False)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
    register_fsdp_forward_method(model, method)


@cache
def _mesh(kind: str, shards: int) -> DeviceMesh:
    """All processes, or the copies of a model times the processes of one, which are neighbours (a
    node's).
    """
    copies = comm.world().size // shards
    if copies == 1:
        return init_device_mesh(kind, (shards,))
    return init_device_mesh(kind, (copies, shards), mesh_dim_names=("copies", "shards"))


def reshard(model: nn.Module) -> None:
    """Let go of gathered weights: after a forward pass without a backward one, and before
    parameters are read.
    """
    for module in _sharded(model):
        module.reshard()


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, gathered (every process must call it); another tensor as it is."""
    with comm.peers():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(tensor: Tensor) -> Tensor:
    """This process's shard of a sharded tensor, in the same memory; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: Tensor) -> slice:
    """Which rows of the whole tensor `own` holds."""
    if not isinstance(tensor, DTensor):
        return slice(0, tensor.shape[0])
    (place,) = (place for place, how in enumerate(tensor.placements) if how.is_shard())
    shards = tensor.device_mesh.size(place)
    begin = tensor.device_mesh.get_local_rank(place) * -(-tensor.shape[0] // shards)
    begin = min(begin, tensor.shape[0])
    return slice(begin, begin + tensor.to_local().shape[0])
