"""How the processes of a run meet, watch each other and part.

Processes are started by torchrun, or by anything that sets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from groupwise.distributed.comm import CHANNELS, World, peers, wait, world
from groupwise.distributed.heartbeat import SILENCE, Watch, say
from groupwise.utils import threads

TIMEOUT = 1800.0
"""Seconds that a process waits for the others: longer than the slowest share of a rollout."""


@dataclass(slots=True)
class _Membership:
    """This process's part in the group."""

    watch: Watch | None = None
    hint: str = "the same command begins anew"


_membership = _Membership()


def launched() -> int:
    """Return how many processes the launcher has started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def join(timeout: float, *, cuda: bool) -> World:
    """Meet the other processes that torchrun started; a single process has none to meet.

    timeout: seconds that one process waits for another before it counts as lost.
    cuda: tensors travel by NCCL between GPUs, each process on its own; else by gloo.
    Raises PeerError if they do not meet.  From then on a process that sends no heartbeat, and a
    SIGTERM (torchrun's, once another one has failed), end this one with a last line.
    """
    if dist.is_initialized() or launched() == 1:
        return world()
    CHANNELS.timeout = timedelta(seconds=timeout)
    if cuda:
        use_gpu(own_gpu())
    with peers():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=CHANNELS.timeout)
        # Records are host objects and must not travel over the GPUs; gloo also knows which rank is
        # missing.
        if cuda:
            CHANNELS.group = dist.new_group(backend="gloo", timeout=CHANNELS.timeout)
        else:
            CHANNELS.group = dist.group.WORLD
        here = world()
        _membership.watch = Watch(_store(), here.rank, here.size, failure_hint)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _ended)
    return world()


def own_gpu() -> int:
    """Return the number of this process's GPU: of all that it sees the one of its rank on the
    machine.  Slurm's `--gpus-per-task=1`, for one, lets each process see its own alone.
    """
    if torch.cuda.device_count() == 1:
        return 0
    return int(os.environ.get("LOCAL_RANK", "0"))


def use_gpu(number: int) -> None:
    """Compute on one of the machine's GPUs, also in threads beside: a new thread has the first."""
    choose = partial(torch.cuda.set_device, number)
    choose()
    threads.before_work(choose)


def _store() -> Any:
    """Connect to the store where the processes met; a call on it gives up after some seconds."""
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
        f" {_membership.hint}",
    )
    os._exit(128 + signal.SIGTERM)


def set_failure_hint(text: str) -> None:
    """Set what the last message of a process that is ended advises."""
    _membership.hint = text


def failure_hint() -> str:
    """Return what `set_failure_hint` has set last."""
    return _membership.hint


def last_words(seconds: float = 10.0) -> None:
    """Wait, no longer than `seconds`, until every process has written its message.

    For an error that all of them raise: a launcher ends the others as soon as the first one is
    gone, and the message that names the cause may be theirs.
    """
    if dist.is_initialized():
        with suppress(RuntimeError):  # one that does not come has nothing more to say
            dist.monitored_barrier(CHANNELS.group, timeout=timedelta(seconds=seconds))


def leave() -> None:
    """Part in order, when all are done.  A process that fails just ends: the others notice."""
    if dist.is_initialized():
        wait()  # the first one to go may take the meeting point with it
        if _membership.watch is not None:
            _membership.watch.stop()
        dist.destroy_process_group()
        # gloo's threads end with the last reference.  One that lives on, and lets go of the last
        # exchange's tensors while Python is being taken down, asks for the interpreter then: that
        # aborts the process.
        CHANNELS.group = CHANNELS.aside = None
        _membership.watch = None
