"""The native engine: samples in the trainer's process, on the training weights, with every prompt
computed once.

- `engine.py` is what a trainer calls; it prepares the weights (`forward.py`).
- `scheduler.py` says which sequences decode next, and ends them.
- `sequences.py` holds the sequences and the prompt cache; `kv_cache.py` their keys and values.
- `decode.py` draws tokens, on a GPU by `cuda_graphs.py`; `decode_attention.py` attends.
- `workspace.py` holds what a GPU keeps between two calls; `adapters.py` merges adapters there.

All live rows go through the model as one flat stream: its linear layers see (R, D), whatever
prompts and lengths the rows have.

R rows (completions being decoded)   V vocabulary   D model width   T tokens
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from groupwise.environments.conversation import Environment
from groupwise.errors import EngineError
from groupwise.models.attention import Attend
from groupwise.models.backbone import hidden
from groupwise.models.policy import Policy
from groupwise.ops.decoding import Decoder
from groupwise.ops.linear_cross_entropy import head_logits
from groupwise.records import Prompt, Rollout, Sampling
from groupwise.rollout.engine import InProcess, check_request, completion_limit, fitting
from groupwise.rollout.native import cuda_graphs
from groupwise.rollout.native.adapters import PlainWeights, plain_weights
from groupwise.rollout.native.forward import (
    RolloutForward,
    SpecialisedForward,
    is_hooked,
    is_known,
)
from groupwise.rollout.native.scheduler import Scheduler
from groupwise.rollout.native.workspace import Workspace


class ModuleForward:
    """Through the Hugging Face modules: any family, any precision."""

    decoder: Decoder | None = None

    def __init__(self, policy: Policy) -> None:
        self.policy, self.head = policy, policy.head

    def hidden(self, tokens_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        """See `RolloutForward`."""
        return hidden(self.policy, tokens_T, position_T, attend)

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
        self._lock = threading.Lock()
        self._workspace: Workspace | None = None
        """What the last call of `generate` has left for the next."""

    @property
    def path(self) -> str:
        """`specialised` where `forward.py` knows every step of the model, else `module`."""
        return "specialised" if self._known_weights() is not None else "module"

    @cached_property
    def _plain_weights(self) -> PlainWeights:
        """The weights and the adapter, taken apart."""
        return plain_weights(self.policy)

    def _known_weights(self) -> PlainWeights | None:
        """The weights of a model whose every step is known, else None."""
        if self.policy.adapter is not None:
            if self.policy.device.type not in cuda_graphs.DEVICES or self.policy.switches:
                return None
            if any(is_hooked(module) for module in self.policy.model.modules()):
                return None
            weights = self._plain_weights
        else:
            weights = PlainWeights(self.policy, {})
        return weights if is_known(weights.policy) else None

    def prepared(self, positions: int, workspace: Workspace | None = None) -> RolloutForward:
        """A way through the weights as they are now, for sequences of up to `positions` tokens.

        workspace: where they lie, on a device that keeps them.
        """
        weights = self._known_weights()
        if weights is None:
            return ModuleForward(self.policy)
        if workspace is None:
            return SpecialisedForward(self.policy, positions)
        return workspace.prepared(positions)

    def _take_workspace(self) -> Workspace | None:
        """The memory that is kept, or new; None on a device that records nothing, and for a model
        whose steps are not known.
        """
        if self.policy.device.type not in cuda_graphs.DEVICES:
            return None
        weights = self._known_weights()
        if weights is None:
            return None
        with self._lock:
            workspace, self._workspace = self._workspace, None
        return Workspace(weights) if workspace is None else workspace

    def close(self) -> None:
        """Free the memory that was kept."""
        self._workspace = None

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
        workspace = self._take_workspace()
        with fitting(self.max_rows):
            scheduler = Scheduler(self, prompts, group_size, sampling, seed, workspace)
        with scheduler.conversations:
            while scheduler.unfinished:
                with fitting(self.max_rows), self._sampling():
                    finished = scheduler.advance()
                # Outside: whoever receives the group computes in its own mode.
                yield from finished
        if workspace is not None and workspace.may_stay:
            self._workspace = workspace

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
