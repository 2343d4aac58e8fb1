"""More than one process: who I am, what the others have, and gradients that are summed over them.

Every process runs the same program on the same recipe and draws the same prompts.  It samples and
scores its share; the records are gathered, so that credit and weights are computed everywhere from
the whole step; it works on its share of the packed tokens; the gradients are summed.  So nothing
that is learnt depends on the number of processes.  With one process every function here is the
identity, and no process group exists.

Processes are started by torchrun (or by anything that sets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT)."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, groupby
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from groupwise import errors
from groupwise.distributed.heartbeat import SILENCE, Watch, say
from groupwise.errors import GroupwiseError, PeerError, StorageError
from groupwise.utils.batching import batch_by_size

Item = TypeVar("Item")

TIMEOUT = 1800.0
"""Seconds that a process waits for the others: longer than the slowest share of a rollout."""
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


@dataclass(slots=True)
class _Talk:
    """How processes exchange host objects, and how long this one has waited for the others."""

    group: Any = None
    aside: Any = None
    """The same, for a thread that writes while another one trains."""
    timeout: timedelta = timedelta(0)
    waited: float = 0.0
    watch: Watch | None = None
    advice: str = "the same command begins anew"


_talk = _Talk()


def world() -> World:
    """This process's place; World(0, 1) unless `join` found others."""
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ALONE


def launched() -> int:
    """How many processes the launcher says there are; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def join(timeout: float, *, cuda: bool) -> World:
    """Meet the other processes that torchrun started; does nothing for a single one, or the second
    time.

    timeout: seconds that one process waits for another before it counts as lost.
    cuda: tensors travel by NCCL between GPUs, each process on its own; else by gloo.
    Raises PeerError if they do not meet.  From then on a process that sends no heartbeat, and a
    SIGTERM (torchrun's, once another one has failed), end this one with a last line.
    """
    if dist.is_initialized() or launched() == 1:
        return world()
    _talk.timeout = timedelta(seconds=timeout)
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with peers():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_talk.timeout)
        # Records are host objects and must not travel over the GPUs; gloo also knows which rank is
        # missing.
        _talk.group = (
            dist.new_group(backend="gloo", timeout=_talk.timeout) if cuda else dist.group.WORLD
        )
        _talk.watch = Watch(_store(), dist.get_rank(), dist.get_world_size(), lambda: _talk.advice)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _ended)
    return world()


def _store() -> Any:
    """A connection of its own to the store where the processes met; a call on it gives up after
    some seconds.
    """
    place, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    seconds = timedelta(seconds=SILENCE)
    stores: Any = dist
    store = stores.TCPStore(place, port, is_master=False, wait_for_workers=False, timeout=seconds)
    attempt = (
        f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    )
    return dist.PrefixStore(f"groupwise/{attempt}", store)  # type: ignore[reportPrivateImportUsage]


def _ended(*_: object) -> NoReturn:
    say(
        world().rank,
        "ended from outside (SIGTERM), as a launcher does when another process has failed;"
        f" {_talk.advice}",
    )
    os._exit(128 + signal.SIGTERM)


def set_failure_hint(text: str) -> None:
    """What to do should the run end now, for the last message of a process that is ended: where the
    last checkpoint is.
    """
    _talk.advice = text


def advice() -> str:
    """What was last advised."""
    return _talk.advice


def last_words(seconds: float = 10.0) -> None:
    """Wait, no longer than `seconds`, until every process has come to the same place: behind its
    message on an error that all of them raise (the command does; a program of your own may).  A
    launcher ends the others as soon as the first one is gone, and the message that names the cause
    is theirs.
    """
    if dist.is_initialized():
        with suppress(RuntimeError):  # one that does not come has nothing more to say
            dist.monitored_barrier(_talk.group, timeout=timedelta(seconds=seconds))


def leave() -> None:
    """Part in order, when all are done.  A process that fails just ends: the others notice."""
    if dist.is_initialized():
        wait()  # the first one to go may take the meeting point with it
        if _talk.watch is not None:
            _talk.watch.stop()
        dist.destroy_process_group()
        # gloo's threads end with the last reference.  One that lives on, and lets go of the last
        # exchange's tensors while Python is being taken down, asks for the interpreter then: that
        # aborts the process.
        _talk.group = _talk.aside = _talk.watch = None


@contextmanager
def peers() -> Iterator[None]:
    """Says in our words that another process is gone or does not answer.  Raises PeerError."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or any(word in str(error) for word in LOST)):
            raise
        raise PeerError(
            "the other processes are lost: one of them ended, or did not answer within"
            f" {_talk.timeout.total_seconds():.0f} s (--timeout); its own message names the cause. "
            f" torch says: {str(error).strip().splitlines()[0][:300]}"
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
            dist.monitored_barrier(_talk.group, timeout=_talk.timeout, wait_all_ranks=True)
            _talk.waited += time.perf_counter() - begin
        dist.all_gather_object(parts, mine, group=_talk.aside if aside else _talk.group)
    return [item for part in parts for item in part]


def open_aside() -> Any:
    """The process group of the threads that write, made at the first call (all must make it, in
    their main threads).
    """
    if _talk.aside is None and world().size > 1:
        with peers():
            _talk.aside = dist.new_group(backend="gloo", timeout=_talk.timeout)
    return _talk.aside


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
    waited = gather([_talk.waited])
    _talk.waited = 0.0
    return {f"waiting/rank{rank}": seconds for rank, seconds in enumerate(waited)}


# ---------------------------------------------------------------- gradients


def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace the gradients of plain parameters by their sums over all processes; those of sharded
    ones are sums already.

    A parameter that has no gradient anywhere keeps none, as with one process.  The result has the
    same bits on every rank."""
    plain = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    if world().size == 1 or not plain:
        return
    with peers():
        present = torch.tensor(
            [p.grad is not None for p in plain], dtype=torch.uint8, device=plain[0].device
        )
        dist.all_reduce(present, op=dist.ReduceOp.MAX)
        used = [parameter for parameter, flag in zip(plain, present.tolist(), strict=True) if flag]
        buckets = (
            batch_by_size(alike, Tensor.numel, BUCKET_NUMBERS)
            for _, alike in groupby(used, lambda p: p.dtype)
        )
        for bucket in chain.from_iterable(buckets):
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat)
            for parameter, total in zip(
                bucket, flat.split([p.numel() for p in bucket]), strict=True
            ):
                parameter.grad = total.view_as(parameter)


# ---------------------------------------------------------------- processes that are not of the run


class BroadcastGroup:
    """Processes outside of the run, such as an engine's workers, that receive what this one
    broadcasts to them.
    """

    def __init__(self, host: str, size: int, *, cuda: bool, timeout: float) -> None:
        """Opens the place to meet, `host`:`port`.  size: how many will come.   cuda: by NCCL; else
        by gloo.   timeout: seconds.
        """
        self.size, self.cuda, self.timeout = size, cuda, timedelta(seconds=timeout)
        self.host = host
        self._group: Any = None
        listener = socket.create_server(
            (host, 0)
        )  # on this address alone, where torch would listen on all
        self.port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[reportPrivateImportUsage]
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=self.timeout,
            master_listen_fd=listener.detach(),
        )

    def meet(self) -> None:
        """Wait until all have come.  They must be on their way: this blocks."""
        if self.cuda:
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            self._group = dist.ProcessGroupNCCL(self._store, 0, self.size + 1, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.host)]
            options._timeout = self.timeout
            gloo: Any = dist.ProcessGroupGloo
            self._group = gloo(self._store, 0, self.size + 1, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor to all of them; blocks until it has left."""
        assert self._group is not None, "nobody has been met"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
