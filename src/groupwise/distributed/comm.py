"""More than one process: who I am, what the others have, and gradients that are summed over them.

Every process runs the same program on the same recipe and draws the same prompts.  It samples and
scores its share; the records are gathered, so that credit and weights are computed everywhere from
the whole step; it works on its share of the packed tokens; the gradients are summed.  So nothing
that is learnt depends on the number of processes.  With one process every function here is the
identity, and no process group exists.

How processes meet and part is in `process_group.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from groupwise import errors
from groupwise.errors import GroupwiseError, PeerError, StorageError
from groupwise.utils.batching import batch_by_size

Item = TypeVar("Item")

BUCKET_NUMBERS = 1 << 24
"""Gradient numbers that travel together: 64 MB in float32."""
LOST = ("gloo/", "NCCL", "Connection reset", "Connection closed", "Broken pipe", "monitoredBarrier")
"""What torch's messages say when another process is gone."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """True for the one process that writes files and the terminal."""
        return self.rank == 0


ALONE = World()


class Grid:
    """Which processes compute the same batches: here none, each is a worker of its own."""

    def workers(self) -> World:
        """Return the place of this process's worker among the workers of the run."""
        return world()

    def leads(self) -> bool:
        """Return True for the one process that speaks for its worker."""
        return True

    def summed(self, parameters: Sequence[Tensor]) -> list[tuple[list[Tensor], Any]]:
        """Return parameters whose gradients are to be summed, and the process group that has the
        parts; those that FSDP sums itself are left out.
        """
        return [([one for one in parameters if not isinstance(one, DTensor)], None)]


@dataclass(slots=True)
class Channels:
    """The process groups by which host objects travel, and the seconds spent waiting for others."""

    group: Any = None
    aside: Any = None
    """The group of a thread that writes while another one trains."""
    timeout: timedelta = timedelta(0)
    waited: float = 0.0
    grid: Grid = field(default_factory=Grid)


CHANNELS = Channels()
"""The channels of this process; `process_group.join` opens them."""


def world() -> World:
    """This process's place; World(0, 1) unless `join` found others."""
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ALONE


def workers() -> World:
    """The place of this process's worker: processes that split a model between them are one."""
    return CHANNELS.grid.workers()


@contextmanager
def peers() -> Iterator[None]:
    """Says in our words that another process is gone or does not answer.  Raises PeerError."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or any(word in str(error) for word in LOST)):
            raise
        seconds = CHANNELS.timeout.total_seconds()
        raise PeerError(
            "the other processes are lost: one of them ended, or did not answer within"
            f" {seconds:.0f} s (--timeout); its own message names the cause.  torch says:"
            f" {str(error).strip().splitlines()[0][:300]}"
        ) from error


# ---------------------------------------------------------------- host objects


def share(items: Sequence[Item]) -> list[Item]:
    """This process's part of what all of them have: every size-th item, beginning with its own
    rank.
    """
    here = world()
    return list(items[here.rank :: here.size])


def gather(items: Iterable[Item], *, aside: bool = False) -> list[Item]:
    """Every process's items, in the order of ranks, on every process.  All must call it.

    aside: in a thread that writes while another one trains (`open_aside`).
    """
    mine = list(items)
    here = world()
    if here.size == 1:
        return mine
    parts: list[list[Item]] = [[]] * here.size
    with peers():
        if not aside:
            begin = time.perf_counter()
            dist.monitored_barrier(CHANNELS.group, timeout=CHANNELS.timeout, wait_all_ranks=True)
            CHANNELS.waited += time.perf_counter() - begin
        dist.all_gather_object(parts, mine, group=CHANNELS.aside if aside else CHANNELS.group)
    return [item for part in parts for item in part]


def gather_work(items: Iterable[Item]) -> list[Item]:
    """`gather` of what each worker has computed, which its processes all have."""
    return gather(items if CHANNELS.grid.leads() else ())


def open_aside() -> Any:
    """The process group of the threads that write, made at the first call (all must make it, in
    their main threads).
    """
    if CHANNELS.aside is None and world().size > 1:
        with peers():
            CHANNELS.aside = dist.new_group(backend="gloo", timeout=CHANNELS.timeout)
    return CHANNELS.aside


def from_first(function: Callable[[], Item]) -> Item:
    """What `function` returns on the first rank, on every rank; it runs nowhere else.  Its
    GroupwiseError is raised everywhere.
    """
    here = world()
    if here.size == 1:
        return function()
    return together(lambda: [function()] if here.first else [])[0]


def together(work: Callable[[], Iterable[Item]]) -> list[Item]:
    """`gather` of what `work` gives on each process.  What goes wrong on one is raised on all, so
    that they stay in step.

    Its own GroupwiseError, or an OSError as StorageError, is raised by the process itself, the same
    with its rank by the others; anything else ends the process, which the others notice
    (PeerError).
    """
    if world().size == 1:
        return list(work())
    mine: list[Item] = []
    failure: GroupwiseError | None = None
    try:
        mine = list(work())
    except GroupwiseError as error:
        failure = error
    except OSError as error:
        failure = StorageError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
    # By name and text: an error may hold what cannot travel.
    wrong = None if failure is None else (type(failure).__name__, str(failure))
    outcomes = gather([(mine, wrong)])
    for rank, (_, wrong) in enumerate(outcomes):
        if wrong is not None:
            raised = failure or getattr(errors, wrong[0], PeerError)(f"on rank {rank}: {wrong[1]}")
            raised.everywhere = True
            raise raised
    return [item for items, _ in outcomes for item in items]


def wait() -> None:
    """Go on when every process is here."""
    gather([])


def waiting() -> dict[str, float]:
    """Seconds that each rank spent waiting for the slowest since the last call; empty for a single
    process.
    """
    if world().size == 1:
        return {}
    waited = gather([CHANNELS.waited])
    CHANNELS.waited = 0.0
    return {f"waiting/rank{rank}": seconds for rank, seconds in enumerate(waited)}


# ---------------------------------------------------------------- gradients


def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace gradients by their sums over all workers; those that FSDP shards are sums already.

    A parameter that has no gradient anywhere keeps none, as with one process.  The result has the
    same bits on every rank."""
    if world().size == 1:
        return
    with peers():
        for members, group in CHANNELS.grid.summed(parameters):
            _sum(members, group)


def _sum(parameters: Sequence[Tensor], group: Any) -> None:
    """Sum gradients over a process group; of sharded ones each process's part."""
    if not parameters:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    present = present.to(parameters[0].device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    used = []
    for parameter, flag in zip(parameters, present.tolist(), strict=True):
        if flag:
            used.append(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    buckets = (
        batch_by_size(alike, Tensor.numel, BUCKET_NUMBERS)
        for _, alike in groupby(used, lambda p: p.dtype)
    )
    for bucket in chain.from_iterable(buckets):
        parts = [_local(p.grad) for p in bucket]
        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat, group=group)
        totals = flat.split([part.numel() for part in parts])
        for part, total in zip(parts, totals, strict=True):
            part.copy_(total.view_as(part))


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
