"""The native engine: samples in the trainer's process, on the training weights, with every prompt
computed once.

- `engine.py` is what a trainer calls; it prepares the weights (`forward.py`).
- `scheduler.py` says which sequences decode next, and ends them.
- `sequences.py` holds the sequences and the prompt cache; `kv_cache.py` their keys and values.
- `decode.py` draws tokens; `decode_attention.py` attends.
- `cuda/` holds what only a GPU does: graphs of a draw, and memory kept between two calls.
  `NativeEngine._gpu` is the one way into it.

All live rows go through the model as one flat stream: its linear layers see (R, D), whatever
prompts and lengths the rows have.

R rows (completions being decoded)   V vocabulary   D model width   T tokens
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from groupwise.environments.conversation import Environment
from groupwise.errors import EngineError
from groupwise.models.attention import Attend
from groupwise.models.backbone import hidden
from groupwise.models.policy import Policy
from groupwise.ops.decoding import Decoder
from groupwise.ops.linear_cross_entropy import head_logits
from groupwise.records import ImageSpan, Prompt, Rollout, Sampling
from groupwise.rollout.engine import InProcess, check_request, completion_limit, fitting
from groupwise.rollout.native.forward import (
    DecodedWeights,
    RolloutForward,
    SpecialisedForward,
)
from groupwise.rollout.native.scheduler import DeviceMemory, Scheduler

GPUS = ("cuda",)
"""Devices that keep memory between two calls, and repeat recorded operations."""


class GpuMemory(Protocol):
    """What a GPU does for an engine: `cuda.workspace.KeptWorkspace`."""

    def lent(self) -> contextlib.AbstractContextManager[DeviceMemory | None]:
        """Lend the memory to one call of `generate`."""
        ...

    def free(self) -> None:
        """Free the memory that was kept."""
        ...


class ModuleForward:
    """Through the Hugging Face modules: any family, any precision."""

    decoder: Decoder | None = None

    def __init__(self, policy: Policy) -> None:
        self.policy, self.head = policy, policy.head

    def hidden(
        self, tokens_T: Tensor, position_T: Tensor, attend: Attend, images: Sequence[ImageSpan] = ()
    ) -> Tensor:
        """See `RolloutForward`."""
        return hidden(self.policy, tokens_T, position_T, attend, images)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `RolloutForward`."""
        with self.policy.precision():
            return head_logits(hidden_RD, self.head)


class NativeEngine(InProcess):
    """Implements `engine.Engine`.  A completion depends on (weights, seed, prompt, index, sampling)
    only, whatever runs beside it (up to rounding: products over different numbers of rows may
    differ in the last bit)."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int,
        environment: Environment | None = None,
    ) -> None:
        """max_rows: completions decoded at the same time.   environment: that answers their turns;
        the caller closes it.

        Raises EngineError for a policy that cannot run packed streams.
        """
        if max_rows < 1:
            raise EngineError(f"max_rows must be at least 1, got {max_rows}")
        if policy.attention == "single":
            raise EngineError(
                "the native engine needs packed streams, but model.attention is 'single'; set"
                " rollout.engine to 'transformers'"
            )
        self.policy = policy
        self.max_rows = max_rows
        self.environment = environment

    @cached_property
    def _weights(self) -> DecodedWeights:
        """The weights that decode; an adapter is merged into them."""
        return DecodedWeights(self.policy)

    @cached_property
    def _gpu(self) -> GpuMemory | None:
        """What the policy's GPU does for the engine; None on a CPU."""
        if self.policy.device.type not in GPUS:
            return None
        from groupwise.rollout.native.cuda.workspace import KeptWorkspace

        return KeptWorkspace(self._weights)

    @property
    def path(self) -> str:
        """`specialised` where `forward.py` knows every step of the model, else `module`."""
        return "module" if self._weights.known() is None else "specialised"

    def prepared(self, positions: int, memory: DeviceMemory | None = None) -> RolloutForward:
        """A way through the weights as they are now, for sequences of up to `positions` tokens.

        memory: where they lie, on a device that keeps them.
        """
        weights = self._weights.known()
        if weights is None:
            return ModuleForward(self.policy)
        if memory is None:
            return SpecialisedForward(weights.policy, positions, matrix=weights.matrix)
        return memory.prepared(positions)

    def close(self) -> None:
        """Free the memory that was kept, and hold no tensor of the weights."""
        self._weights.drop()
        if self._gpu is not None:
            self._gpu.free()

    def limit(self, prompt: Prompt, index: int, sampling: Sampling) -> int:
        """Longest completion of one row in tokens.  Benchmarks override it to fix a schedule of
        lengths.
        """
        return completion_limit(self.policy, prompt, sampling)

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        """See `engine.Engine`.

        Weights that change between two groups are those of all tokens drawn from then on; other
        completions may have drawn a few tokens more than the group's last.
        """
        check_request(self.policy, prompts, group_size, sampling)
        lent = contextlib.nullcontext() if self._gpu is None else self._gpu.lent()
        with lent as memory:
            with fitting(self.max_rows):
                kind = Scheduler if memory is None else memory.scheduler
                scheduler = kind(self, prompts, group_size, sampling, seed, memory)
            with scheduler.conversations:
                while scheduler.unfinished:
                    with fitting(self.max_rows), self._sampling():
                        finished = scheduler.advance()
                    # Outside: whoever receives the group computes in its own mode.
                    yield from finished

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        """Dropout off, no autograd; the model's modes are restored afterwards."""
        training = [module for module in self.policy.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with torch.inference_mode():
                yield
        finally:
            for module in training:
                module.training = True
