"""What a GPU keeps between two calls of `NativeEngine.generate`: prepared weights, caches, and the
CUDA graphs that read them.

To record a graph takes as long as to draw several tokens, and an update changes numbers, not
places.  So new weights are copied to where the old ones were, and the caches are as long as the
longest completion from the beginning where that fits.  Memory that is kept is missing in the
update: nothing stays that is larger than a share of the device's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from groupwise.ops.decoding import Buffers
from groupwise.records import Sampling
from groupwise.rollout.native.cuda.ahead import AheadScheduler
from groupwise.rollout.native.cuda.cuda_graphs import CudaGraphs
from groupwise.rollout.native.cuda.recorded_decode import RecordedDecode
from groupwise.rollout.native.forward import DecodedWeights, PlainWeights, SpecialisedForward
from groupwise.rollout.native.kv_cache import KVCache
from groupwise.rollout.native.scheduler import Scheduler

SHARE = 8
"""The kept memory is at most this part of the device's."""


def most_bytes(device: torch.device) -> int:
    """Most memory that is kept."""
    return torch.cuda.get_device_properties(device).total_memory // SHARE


class Workspace:
    """Implements `scheduler.DeviceMemory`: one call of `generate` at a time uses it."""

    scheduler: type[Scheduler] = AheadScheduler
    weights: PlainWeights
    """The weights of the call that uses it; behind the call only copies of them are held."""
    prompts: KVCache
    own: KVCache

    def __init__(self, weights: PlainWeights) -> None:
        """Begin empty, for weights like these."""
        self.device = weights.policy.device
        self.most_bytes = most_bytes(self.device)
        self.buffers = Buffers(copy_all=bool(weights.adapters))
        self.graphs: CudaGraphs | None = None
        self._positions = 0

    def prepared(self, positions: int) -> SpecialisedForward:
        """Prepare the weights as they are now, for at least so many positions.

        The number of positions grows by doubling, for tables of all of them stay too.  Where the
        frequencies of rotary embeddings change with it, it is as it is.
        """
        if self.weights.policy.switches:
            self._positions = positions
        elif positions > self._positions:
            self._positions = 1 << (positions - 1).bit_length()
        return SpecialisedForward(
            self.weights.policy,
            self._positions,
            buffers=self.buffers,
            matrix=self.weights.matrix,
        )

    def caches(self, prompts: KVCache, own: KVCache) -> tuple[KVCache, KVCache]:
        """Return the kept caches without an entry, at least as large as these; at first, these."""
        if self.graphs is None:
            self.prompts, self.own = prompts, own
            self.graphs = CudaGraphs(prompts, own, self.device)
        else:
            self.prompts.use_again(prompts)
            self.own.use_again(own)
        return self.prompts, self.own

    def decode(
        self, forward: SpecialisedForward, sampling: Sampling, *, vocabulary: int
    ) -> RecordedDecode:
        """Return what draws by these weights.  Completions get their longest length at once where
        that fits.
        """
        assert self.graphs is not None, "caches first"
        longest = self.own.most_tokens
        if self.own.capacity[0] * longest * forward.cache_bytes <= self.most_bytes:
            self.own.reserve(1, longest)
        self.graphs.read_from(self.buffers.addresses)
        return RecordedDecode(forward, sampling, self.graphs, vocabulary=vocabulary)

    def rest(self) -> None:
        """Drop what no later call uses."""
        del self.weights
        if self.graphs is not None:
            self.prompts.clear()
            self.own.clear()

    @property
    def bytes(self) -> int:
        """Memory of the weights and the caches."""
        held = self.buffers.bytes
        if self.graphs is not None:  # a process without prompts makes no caches
            held += self.prompts.bytes + self.own.bytes
        return held

    @property
    def may_stay(self) -> bool:
        """True if its memory is little enough to be kept during an update."""
        return self.bytes <= self.most_bytes


class KeptWorkspace:
    """Implements `engine.GpuMemory`: the workspace between two calls of `generate`."""

    def __init__(self, weights: DecodedWeights) -> None:
        """Begin without one."""
        self.weights = weights
        self._lock = threading.Lock()
        self._workspace: Workspace | None = None

    @contextmanager
    def lent(self) -> Iterator[Workspace | None]:
        """Lend the workspace to one call of `generate`, or a new one; None where the model's steps
        are not known.

        It is kept if its memory is little enough.
        """
        weights = self.weights.known()
        if weights is None:
            yield None
            return
        with self._lock:
            workspace, self._workspace = self._workspace, None
        if workspace is None:
            workspace = Workspace(weights)
        workspace.weights = weights
        yield workspace
        workspace.rest()
        if workspace.may_stay:
            self._workspace = workspace

    def free(self) -> None:
        """Free the memory that was kept."""
        self._workspace = None
