"""How the processes of a run share its models and its batches: meshes, FSDP2, tensor parallelism.

`parallel` says the sizes.  Processes that split a model between them (`tensor`) compute the same
batches and are one worker; workers compute batches of their own (data parallelism).  FSDP2
(`zero2`, `zero3`) shards weights, gradients and optimizer state over workers, block by block.

The splitting itself is that of transformers: the plan of a model's config, and the styles behind
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from groupwise.config.settings import ParallelSettings
from groupwise.distributed import comm, fsdp
from groupwise.errors import ConfigError

SHARDED_FROM = 1_000_000_000
"""Parameters of a process from which `parallel: auto` shards a model."""


TOGETHER = {"tensor": "hold a model", "expert": "hold the experts", "context": "compute a batch"}
"""What so many processes do together."""


def decided(parallel: ParallelSettings, parameters: int, size: int) -> ParallelSettings:
    """`auto` decided by the number of parameters, for so many processes.  Raises ConfigError if
    they do not divide.
    """
    for key, what in TOGETHER.items():
        count = getattr(parallel, key)
        if size % count:
            raise ConfigError(
                f"parallel.{key}: {count} processes {what} together, and the run has {size}: start"
                f" a multiple of {count} (--nproc), or leave {key} out"
            )
    copies = size // parallel.tensor
    shards = parallel.shards or copies
    if copies % shards:
        raise ConfigError(
            f"parallel.shards is {shards}, which does not divide the {size} processes: copies would"
            " be of different sizes"
        )
    name = parallel.name
    if name == "auto":
        large = parameters // parallel.tensor >= SHARDED_FROM
        name = "zero3" if large else "ddp"
    if copies == 1 and parallel.tensor > 1:
        name = "ddp"  # there is nobody to share a process's part with
    return replace(parallel, name=name, shards=shards)


def spreads(parallel: ParallelSettings) -> bool:
    """True if a process holds less than a whole model.   parallel: decided."""
    return parallel.name != "ddp" or splits(parallel)


def splits(parallel: ParallelSettings) -> bool:
    """True if processes compute parts of a model and exchange what comes of them."""
    return parallel.tensor > 1 or parallel.expert > 1


@dataclass(frozen=True, slots=True)
class SplitGrid(comm.Grid):
    """Processes that split models or streams between them.

    Ranks that follow one another are one worker: a node's, whose links are fast.
    """

    together: int
    """Processes of a worker."""
    summing: Any
    """The process group that has the parts of a gradient; None for all."""
    copies: Any
    """The process group whose processes have the same experts."""

    def workers(self) -> comm.World:
        """See `comm.Grid`."""
        here = comm.world()
        return comm.World(here.rank // self.together, here.size // self.together)

    def leads(self) -> bool:
        """See `comm.Grid`."""
        return comm.world().rank % self.together == 0

    def summed(self, parameters: Sequence[Tensor]) -> list[tuple[list[Tensor], Any]]:
        """See `comm.Grid`: every part, and what each process holds whole, over the workers; experts
        over those who have them, to whom all workers' tokens have come.
        """
        fsdp.align_gradients(list(parameters))
        held, experts = list[Tensor](), list[Tensor]()
        for parameter in parameters:
            match axes_of(parameter):
                case () | ("tensor",):
                    held.append(parameter)
                case ("expert",):
                    experts.append(parameter)
        return [(held, self.summing), (experts, self.copies)]


def axes_of(tensor: Tensor) -> tuple[str, ...]:
    """Return the names of the mesh that a tensor lies on: () if it is whole; ("tensor",) or
    ("expert",) if it is split; others are those of FSDP2, which sums gradients itself.
    """
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(tensor.device_mesh.mesh_dim_names or ("shards",))


def summed_already(parameter: Tensor, parallel: ParallelSettings) -> int:
    """Return over how many workers a backward pass has summed a parameter's gradient."""
    match axes_of(parameter):
        case () | ("tensor",):
            return 1
        case ("expert",):
            return parallel.expert // parallel.tensor
    return comm.workers().size


def use(parallel: ParallelSettings, device: torch.device) -> None:
    """Have the processes share batches as they share models.   parallel: decided."""
    comm.CHANNELS.grid = comm.Grid()
    if splits(parallel):
        workers = mesh_of(parallel, device)["data"].get_group()
        copies = experts_mesh(parallel, device)["copies"].get_group()
        comm.CHANNELS.grid = SplitGrid(parallel.tensor, workers, copies)
    if parallel.context > 1:
        comm.CHANNELS.grid = SplitGrid(parallel.context, None, None)


def mesh_of(parallel: ParallelSettings, device: torch.device) -> DeviceMesh:
    """Return the mesh of workers and of the processes of one: (data, tensor) or (data, context)."""
    if parallel.context > 1:
        return _mesh(device.type, parallel.context, ("data", "context"))
    return _mesh(device.type, parallel.tensor, ("data", "tensor"))


def experts_mesh(parallel: ParallelSettings, device: torch.device) -> DeviceMesh:
    """Return the mesh of the processes that hold all experts together, and of their copies."""
    return _mesh(device.type, parallel.expert, ("copies", "expert"))


@cache
def _mesh(kind: str, count: int, names: tuple[str, str]) -> DeviceMesh:
    with comm.peers():
        shape = (comm.world().size // count, count)
        return init_device_mesh(kind, shape, mesh_dim_names=names)


def split(model: Any, parallel: ParallelSettings, device: torch.device) -> None:
    """Leave each process its part of a model's matrices and its experts, and have them exchange
    what they need.

    model: of transformers, with weights that are the same on every process, or without.
    parallel: decided.
    """
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    output: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    tied = getattr(output, "weight", None) is embedding.weight
    if tied:  # transformers splits a parameter by its name, of which a shared one has two
        output.weight = nn.Parameter(output.weight.detach(), output.weight.requires_grad)
    config = DistributedConfig(
        tp_size=parallel.tensor,
        fsdp_size=comm.world().size // parallel.tensor,
        ep_size=parallel.expert,
    )
    plan, of_experts, _ = model._resolve_parallel_plans(config)
    partial_names = [name for name, style in plan.items() if style == PARTIAL]
    for name in partial_names:
        del plan[name]
    mesh = mesh_of(parallel, device)["tensor"]
    apply_tensor_parallelism(model, mesh, plan)
    modules = dict(model.named_modules())
    for name in partial_names:
        if name in modules:
            module = modules[name]
            module.forward = _SummedWeights(module, mesh.get_group())
    if parallel.expert > 1:
        experts = experts_mesh(parallel, device)["expert"]
        apply_expert_parallelism(model, experts, mesh, of_experts, "all_to_all")
    if tied:
        output.weight = embedding.weight


PARTIAL = "replicated_with_grad_allreduce"
"""The style of weights that are whole, and are applied to a part of the heads by each process.
transformers sums what `grad` holds after every backward pass: of several micro-batches it would
count the first ones again."""


class _SummedWeights:
    """The `forward` of a module whose gradient is in parts: each backward pass sums its own."""

    def __init__(self, module: nn.Module, group: Any) -> None:
        self.module, self.group, self.compute = module, group, module.forward
        self.hooked: dict[str, Tensor] = {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Call the module's own forward."""
        for name, parameter in self.module.named_parameters(recurse=False):
            # FSDP puts gathered weights in the place of its parts.
            fresh = self.hooked.get(name) is not parameter
            if fresh and parameter.requires_grad and torch.is_grad_enabled():
                parameter.register_hook(self.sum)
                self.hooked[name] = parameter
        return self.compute(*inputs, **named)

    def sum(self, gradient: Tensor) -> Tensor:
        """Return the sum of a gradient's parts."""
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    method: str,
    parallel: ParallelSettings,
    device: torch.device,
) -> None:
    """Spread the weights, gradients and optimizer state of a model over the workers, block by
    block.

    A block's weights are gathered while it computes; `zero3` lets go of them between forward and
    backward (less memory, one more gather), `zero2` keeps them.  The rest of the model (embedding,
    last norm, head) stays whole from the first forward to the end of the backward pass, so that the
    head's weight is a plain tensor wherever it is read.  With fewer `shards` than workers there
    are several copies (HSDP): weights travel inside one, gradients then between them.
    method: a method of the model to call instead of its forward; weights are gathered for it in the
        same way.
    parallel: decided.   device: what computes.  Gradients are summed over the workers, in at
        least float32.
    """
    weight = next(model.parameters())
    lower = weight.dtype in (torch.bfloat16, torch.float16)
    if splits(parallel):
        mesh = mesh_of(parallel, device)["data"]
    else:
        mesh = _copies(device.type, parallel.shards or comm.world().size)
    spread = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32 if lower else None),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=device.type == "cuda")
            if parallel.offload
            else OffloadPolicy()
        ),
    )
    with comm.peers():
        for experts in _holders_of_experts(model):
            copies = experts_mesh(parallel, device)["copies"]
            spread(experts, mesh=copies, reshard_after_forward=parallel.name == "zero3")
        for block in blocks:
            spread(block, reshard_after_forward=parallel.name == "zero3")
        spread(model, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
    register_fsdp_forward_method(model, method)


def _holders_of_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose own parameters are experts that are split."""
    holders = []
    for module in model.modules():
        if any(axes_of(one) == ("expert",) for one in module.parameters(recurse=False)):
            holders.append(module)
    return holders


@cache
def _copies(kind: str, shards: int) -> DeviceMesh:
    """All processes, or the copies of a model times the processes of one, which are neighbours (a
    node's).
    """
    copies = comm.world().size // shards
    if copies == 1:
        return init_device_mesh(kind, (shards,))
    return init_device_mesh(kind, (copies, shards), mesh_dim_names=("copies", "shards"))


def part_of(rows: Callable[[slice], Tensor], tensor: Tensor) -> Tensor:
    """This process's part of a whole tensor.

    rows: reads rows of the whole.   tensor: says by its own layout what the part is.
    """
    if not isinstance(tensor, DTensor):
        return rows(slice(0, tensor.shape[0] if tensor.ndim else 1))
    spread = [how for how in tensor.placements if not how.is_replicate()]
    if spread == [Shard(0)]:
        return rows(own_rows(tensor))
    full = rows(slice(0, tensor.shape[0]))
    return distribute_tensor(
        full, tensor.device_mesh, tensor.placements, src_data_rank=None
    ).to_local()


def own_rows(tensor: Tensor) -> slice:
    """Which rows of the whole tensor this process holds, where FSDP2 alone shards it."""
    if not isinstance(tensor, DTensor):
        return slice(0, tensor.shape[0])
    (place,) = (place for place, how in enumerate(tensor.placements) if how.is_shard())
    shards = tensor.device_mesh.size(place)
    begin = tensor.device_mesh.get_local_rank(place) * -(-tensor.shape[0] // shards)
    begin = min(begin, tensor.shape[0])
    return slice(begin, begin + tensor.to_local().shape[0])


def is_first_copy(tensor: Tensor) -> bool:
    """Return True unless another process with a lower rank holds the same shard of FSDP2, or the
    same whole tensor.
    """
    if not isinstance(tensor, DTensor):
        return comm.world().first
    places = tensor.device_mesh.get_coordinate()
    assert places is not None, "a process outside of the mesh holds no shard"
    for place, how in zip(places, tensor.placements, strict=True):
        if place > 0 and not how.is_shard():
            return False
    return True
