"""Teachers: another model, or the policy itself with a hint or as a moving average, whose distributions the policy learns from.

A teacher reads the policy's own packed stream, so a prompt is computed once for it too.  With a hint its prompts are longer: the
same completions are then packed again behind them, and its rows are put into the order of the policy's.

M trained positions of a batch   E the teacher's width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.algorithms.losses import guarded_exp
from groupwise.algorithms.registry import Algorithm
from groupwise.data.demonstrations import Demonstration
from groupwise.data.packing import pack
from groupwise.errors import ConfigError
from groupwise.models.fused import fused_modules
from groupwise.models.policy import Policy
from groupwise.ops.divergence import head_divergence
from groupwise.records import Batch, Prompt, Sample, Scored
from groupwise.training.scoring import joined, samples_of, score, stretches

UNBOUNDED = 1 << 60
"""Positions: everything in one batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demonstrations:
    """Rows that are mixed into every optimizer step."""

    rows: Sequence[Demonstration]
    count: int
    """Of a step."""
    lm: float
    """Weight of their language-model loss, a mean over their tokens."""
    divergence: float
    """Weight of the distance from the teacher on them, a mean over their tokens."""
    seed: int = 0

    def of(self, update: int) -> list[Sample]:
        """Those of an optimizer step, by its number: a seeded order, another one in each pass over the rows."""
        places = range(update * self.count, (update + 1) * self.count)
        chosen = [self.rows[self._order(place // len(self.rows))[place % len(self.rows)]] for place in places]
        weight = 1.0 / sum(row.completion.size for row in chosen)
        found = []
        for i, row in enumerate(chosen):
            ones = np.ones(row.completion.size)
            extra = {"lm": self.lm * ones, "taught": self.divergence * ones}
            columns = {"weight": weight * ones, "advantage": 0.0 * ones, "behavior_logp": 0.0 * ones, "extra": extra}
            found.append(Sample(group=f"shown/{update}/{i}", index=-1, prompt=row.prompt, completion=row.completion, **columns))
        return found

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Teacher:
    """Who teaches."""

    policy: Policy
    hint: Callable[[Prompt], np.ndarray] | None = None
    """Token ids that only the teacher reads, before a prompt."""
    ema: float = 0.0
    """Share of the policy that moves into the teacher after every step."""
    demonstrations: Demonstrations | None = None
    hints: Mapping[str, np.ndarray] = field(default_factory=dict)
    """By group, what it reads before the policy's prompts."""

    def before(self, groups: Sequence[Scored]) -> Teacher:
        """The teacher as it reads these groups.  Raises ConfigError if a hint leaves no room for a completion."""
        if self.hint is None:
            return self
        hints = {}
        for group in groups:
            prompt = group.prompt
            hints[prompt.id] = self.hint(prompt)
            behind = [context.size + end - begin for rollout in group.rollouts for begin, end, context in stretches(rollout)]
            longest = hints[prompt.id].size + max(behind)
            if longest > self.policy.context:
                raise ConfigError(
                    f"teacher.hint: with it prompt {prompt.id} and its longest completion have {longest} tokens, more than the "
                    f"teacher's context of {self.policy.context}: shorten it, or lower rollout.max_new_tokens"
                )
        return replace(self, hints=hints)

    def read(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the prompts that the teacher reads."""
        return [
            replace(sample, prompt=np.concatenate([self.hints[sample.group], sample.prompt]))
            if sample.group in self.hints
            else sample
            for sample in samples
        ]

    @torch.no_grad()
    def states(self, batch: Batch, samples: Sequence[Sample]) -> Tensor:
        """Its hidden states (M, E) at the trained rows of a batch, which was packed from `samples`."""
        policy, own = self.policy, [index for index in batch.samples if index >= 0]
        if not any(samples[index].group in self.hints for index in own):
            with self._fused():
                return policy.forward(batch).hidden_PD[batch.trained_M]
        how: dict[str, Any] = {"share": policy.attention == "shared", "device": policy.device, "dtype": batch.weight_P.dtype}
        (other,) = pack(self.read([samples[index] for index in own]), UNBOUNDED, **how)
        with self._fused():
            hidden_PE = policy.forward(other).hidden_PD
        rows = {}
        for s, place in enumerate(other.samples):
            if place >= 0:
                sample = samples[own[place]]
                end = other.layout.start[s] + other.layout.length[s]
                rows[place] = end - sample.completion.size + np.flatnonzero(sample.weight)
        return hidden_PE[torch.from_numpy(np.concatenate([rows[place] for place in range(len(own))])).to(policy.device)]

    def _fused(self) -> Any:
        model = self.policy.model
        busy = any("forward" in vars(module) for module in model.modules())  # it is the policy, which is being trained
        return nullcontext() if busy else fused_modules(model, keep=not self.policy.sharded)

    def loss(
        self, policy: Policy, algorithm: Algorithm, batch: Batch, samples: Sequence[Sample], hidden_MD: Tensor, logp_M: Tensor
    ) -> Tensor:
        """The weighted divergence of a batch's trained rows, differentiable with respect to the policy's hidden states and head.

        With `algorithm.importance` a row counts by `sg[exp(l - b)]`: how likely the policy finds the token, over how likely it was
        drawn.
        """
        assert algorithm.divergence is not None
        rows_M = batch.trained_M
        with policy.precision():
            found_M = head_divergence(
                hidden_MD,
                policy.head,
                self.states(batch, samples),
                self.policy.head,
                batch.temperature_P[rows_M],
                algorithm.divergence,
            )
        weight_M = batch.weight_P[rows_M]
        if algorithm.importance:
            weight_M = weight_M * guarded_exp(logp_M.detach() - batch.behavior_logp_P[rows_M])
        if "taught" in batch.extra_P:
            weight_M = weight_M * batch.extra_P["taught"][rows_M]
        return (weight_M * found_M).sum()


def with_teacher(groups: Sequence[Scored], teacher: Teacher | None, budget: int) -> list[Scored]:
    """Add the signal `teacher_logp`: what the teacher, after its own prompts, gives to the tokens that were drawn."""
    if teacher is None:
        return list(groups)
    samples = teacher.read([sample for group in groups for rollout in group.rollouts for sample in samples_of(rollout)])
    scored = score(teacher.policy, samples, budget=budget).logp
    logp = (values for _, values in joined(zip(samples, scored, strict=True)))
    return [
        replace(group, signals={**group.signals, "teacher_logp": tuple(next(logp) for _ in group.rollouts)}) for group in groups
    ]


def with_demonstrations(samples: Sequence[Sample], shown: Sequence[Sample]) -> list[Sample]:
    """Samples of rollouts and of demonstrations, with the same columns."""
    if not shown:
        return list(samples)
    names = {name for sample in samples for name in sample.extra}
    own = [
        replace(sample, extra={**sample.extra, "lm": np.zeros(len(sample.weight)), "taught": np.ones(len(sample.weight))})
        for sample in samples
    ]
    others = [replace(sample, extra={**{name: np.zeros(len(sample.weight)) for name in names}, **sample.extra}) for sample in shown]
    return [*own, *others]
