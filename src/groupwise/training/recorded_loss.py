"""The loss of optimizer steps from log-probs that are known, without a model: its terms, what it
cuts, and its gradient with respect to every log-prob.

Metrics and recorded columns are computed so after a step.  The loss is the one that training
differentiates (`loss.Loss`); only the gradient of the log-probs with respect to the weights is left
out.  Computed in float64.

N trained tokens of the samples
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.losses import Terms
from groupwise.algorithms.parts import name_of
from groupwise.records import Sample
from groupwise.training.loss_terms import loss_terms

if TYPE_CHECKING:
    from groupwise.training.passes import Assessment


class RecordedLoss:
    """The loss of samples whose log-probs, and entropies where it reads them, are known."""

    def __init__(
        self,
        algorithm: Algorithm,
        samples: Sequence[Sample],
        logp: Sequence[np.ndarray],
        entropy: Sequence[np.ndarray] = (),
    ) -> None:
        self.algorithm, self.samples = algorithm, samples
        self._logp, self._entropy = logp, entropy

    @classmethod
    def of(cls, algorithm: Algorithm, updates: Sequence[Assessment]) -> RecordedLoss:
        """Build the loss of all samples that updates saw."""
        samples: list[Sample] = []
        logp: list[np.ndarray] = []
        entropy: list[np.ndarray] = []
        for update in updates:
            samples += update.samples
            logp += update.seen
            entropy += update.entropy
        return cls(algorithm, samples, logp, entropy)

    @property
    def segments(self) -> int:
        """The number of samples: each is one segment."""
        return len(self.samples)

    @property
    def segment_M(self) -> Tensor:
        """The sample of each trained token, int64 (N,)."""
        counts = [np.count_nonzero(sample.weight) for sample in self.samples]
        places = torch.arange(len(counts))
        return torch.repeat_interleave(places, torch.tensor(counts, dtype=torch.int64))

    def column(self, name: str) -> Tensor | None:
        """Return a column of the samples at the trained tokens (N,), float64; None where a sample
        lacks it.
        """
        columns = [sample.column(name) for sample in self.samples]
        known = [column for column in columns if column is not None]
        return self.at_trained(known) if len(known) == len(columns) else None

    def at_trained(self, values: Sequence[np.ndarray]) -> Tensor:
        """Return numbers per sample (n,) at the trained tokens (N,), float64."""
        parts = []
        for values_n, sample in zip(values, self.samples, strict=True):
            parts.append(values_n[sample.weight != 0])
        return torch.from_numpy(np.concatenate(parts).astype(np.float64))

    def by_sample(
        self, values_N: Tensor, elsewhere: float = 0.0
    ) -> list[tuple[Sample, np.ndarray]]:
        """Return numbers of the trained tokens as one array (n,) for each sample.

        elsewhere: the number of tokens that are not trained.
        """
        values, begin, columns = values_N.numpy(), 0, []
        for sample in self.samples:
            trained_n = sample.weight != 0
            end = begin + np.count_nonzero(trained_n)
            column = np.full(trained_n.size, elsewhere, values.dtype)
            column[trained_n] = values[begin:end]
            columns.append((sample, column))
            begin = end
        return columns

    @cached_property
    def terms(self) -> Terms:
        """What the loss sees, float64: one segment for a sample."""
        entropy_N = self.at_trained(self._entropy) if self._entropy else None
        return loss_terms(self.algorithm, self, self.at_trained(self._logp), entropy_N)

    @cached_property
    def weight_N(self) -> Tensor:
        """The weight of each token."""
        return self.at_trained([sample.weight for sample in self.samples])

    @cached_property
    def cut_N(self) -> Tensor:
        """bool: the tokens whose gradient the surrogate makes 0 (`Algorithm.cut`)."""
        return self.algorithm.cut(self.terms)

    def extra_losses(self, terms: Terms) -> dict[str, Tensor]:
        """Return the extra terms of log-probs by name: the loss of each token (N,), which may
        depend on entropies alone.
        """
        return {name_of(term): term(terms) for term in self.algorithm.token_terms}

    def gradient(self) -> tuple[float, Tensor]:
        """Return the loss without an entropy bonus, which no log-prob decides, and the derivative
        of it with respect to the log-prob of each token (N,).

        Terms that read a critic's values or a teacher's distributions are no part of it.
        """
        algorithm = self.algorithm
        logp_N = self.terms.logp_M.detach().requires_grad_()
        with torch.set_grad_enabled(algorithm.reads_tokens):
            terms = replace(self.terms, logp_M=logp_N, log_ratio_M=logp_N - self.terms.old_logp_M)
            loss_N = algorithm.loss(terms)
            for extra_N in self.extra_losses(terms).values():
                loss_N = loss_N + extra_N
            loss = (self.weight_N * loss_N).sum()
        if not loss.requires_grad:
            return float(loss), torch.zeros_like(logp_N)
        (gradient_N,) = torch.autograd.grad(loss, logp_N)
        return float(loss.detach()), gradient_N


class RecordedStep:
    """The losses of a step's updates as metrics read them, each built once."""

    def __init__(
        self, algorithm: Algorithm, updates: Sequence[Assessment], minibatches: int
    ) -> None:
        """minibatches: optimizer steps of one pass over the rollout."""
        self.algorithm, self.updates, self.minibatches = algorithm, updates, minibatches

    @property
    def first_pass(self) -> Sequence[Assessment]:
        """The updates of the first pass over the rollout."""
        return self.updates[: self.minibatches]

    @property
    def last_pass(self) -> Sequence[Assessment]:
        """The updates of the last pass over the rollout."""
        return self.updates[-self.minibatches :]

    @cached_property
    def all_losses(self) -> RecordedLoss:
        """The loss of all updates."""
        return RecordedLoss.of(self.algorithm, self.updates)

    @cached_property
    def first_pass_loss(self) -> RecordedLoss:
        """The loss of the first pass."""
        if len(self.updates) == self.minibatches:
            return self.all_losses
        return RecordedLoss.of(self.algorithm, self.first_pass)

    @cached_property
    def last_pass_loss(self) -> RecordedLoss:
        """The loss of the last pass."""
        if len(self.updates) == self.minibatches:
            return self.all_losses
        return RecordedLoss.of(self.algorithm, self.last_pass)

    @cached_property
    def first_update_loss(self) -> RecordedLoss:
        """The loss of the first update: later ones see a policy that has already moved."""
        if self.minibatches == 1:
            return self.first_pass_loss
        return RecordedLoss.of(self.algorithm, self.updates[:1])
