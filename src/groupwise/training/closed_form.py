"""What an optimizer step's loss says of log-probs that are known, without a model: its value, its
ratios, what it cuts, and its gradient with respect to every log-prob.

Metrics and recorded columns are computed so after a step, and all of a replay.  The loss is the one
that training differentiates (`loss.Loss`); only the gradient of the log-probs with respect to the
weights is left out.  Computed in float64.

N trained tokens of the samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from groupwise.algorithms.losses import Terms
from groupwise.algorithms.parts import called, checked_loss, fact, name_of
from groupwise.algorithms.table import Algorithm
from groupwise.errors import DataError
from groupwise.records import Sample, place_of
from groupwise.training.samples import SIGNALS, entropy_tokens, with_forking, with_gradient

if TYPE_CHECKING:
    from groupwise.training.passes import Assessment

Tokens = Mapping[tuple[str, int], np.ndarray]
"""By group and index of a completion: a number per token (n,)."""


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
        """What updates saw of rollouts; demonstrations are left out."""
        every = [
            row
            for one in updates
            for row in zip(one.samples, one.seen, one.entropy, strict=True)
            if row[0].index >= 0
        ]
        return cls(
            algorithm,
            [one for one, _, _ in every],
            [logp for _, logp, _ in every],
            [entropy for _, _, entropy in every],
        )

    def column(self, values: Sequence[np.ndarray]) -> Tensor:
        """Numbers per sample (n,) as those of the trained tokens (N,), float64."""
        return torch.from_numpy(
            np.concatenate(
                [one[s.weight != 0] for one, s in zip(values, self.samples, strict=True)]
            ).astype(np.float64)
        )

    def by_sample(
        self, values_N: Tensor, elsewhere: float = 0.0
    ) -> list[tuple[Sample, np.ndarray]]:
        """Numbers of the trained tokens as one array (n,) for each sample.   elsewhere: that of
        tokens that are not trained.
        """
        ends = np.cumsum([np.count_nonzero(sample.weight) for sample in self.samples])[:-1]
        columns = []
        for sample, values in (
            zip(self.samples, np.split(values_N.numpy(), ends), strict=True) if self.samples else ()
        ):
            column = np.full(sample.completion.size, elsewhere, values.dtype)
            column[sample.weight != 0] = values
            columns.append((sample, column))
        return columns

    @cached_property
    def terms(self) -> Terms:
        """What the loss sees, float64: one segment for a sample."""
        samples, algorithm = self.samples, self.algorithm
        logp_N, sampler_N = (
            self.column(self._logp),
            self.column([sample.behavior_logp for sample in samples]),
        )
        counts = torch.tensor(
            [np.count_nonzero(sample.weight) for sample in samples], dtype=torch.int64
        )
        segment_N = torch.repeat_interleave(torch.arange(len(samples)), counts)
        before = [
            sample.extra.get("scored_logp", logp)
            for sample, logp in zip(samples, self._logp, strict=True)
        ]
        old_N, mismatch = algorithm.old_logp(
            self.column(before), sampler_N, segment_N, len(samples)
        )
        references = [
            sample.reference_logp for sample in samples if sample.reference_logp is not None
        ]
        return Terms(
            logp_M=logp_N,
            old_logp_M=old_N,
            sampler_logp_M=sampler_N,
            mismatch=mismatch,
            advantage_M=self.column([sample.advantage for sample in samples]),
            segment_M=segment_N,
            segments=len(samples),
            reference_logp_M=self.column(references) if references else None,
            entropy_M=self.column(self._entropy) if self._entropy else None,
            forking_M=(
                self.column([one.extra["forking"] for one in samples]) > 0
                if algorithm.needs_forking
                else None
            ),
            signals={
                name: self.column([sample.extra[name] for sample in samples])
                for name in SIGNALS
                if all(name in sample.extra for sample in samples)
            },
        )

    @property
    def weight_N(self) -> Tensor:
        """Of each token."""
        return self.column([sample.weight for sample in self.samples])

    def added(self, terms: Terms) -> list[tuple[str, Tensor]]:
        """The extra terms of log-probs: their names, and the loss of each token (N,), which may
        depend on entropies alone.
        """
        read, logp_N = (
            [term for term in self.algorithm.of_tokens if not fact(term, "of_demonstrations")],
            terms.logp_M.detach(),
        )
        return [
            (name_of(term), checked_loss("extra", term, called("extra", term, terms), logp_N))
            for term in read
        ]

    def gradient(self) -> tuple[float, Tensor]:
        """The loss without an entropy bonus, which no log-prob decides, and dLoss / dlog-prob of
        each token (N,).

        Terms that read a critic's values or a teacher's distributions are no part of it.
        """
        algorithm = self.algorithm
        logp_N = self.terms.logp_M.detach().requires_grad_()
        with torch.set_grad_enabled(algorithm.reads_tokens):
            terms = replace(self.terms, logp_M=logp_N, log_ratio_M=logp_N - self.terms.old_logp_M)
            loss_N = sum((term_N for _, term_N in self.added(terms)), algorithm.loss(terms))
            loss = (self.weight_N * loss_N).sum()
        (gradient_N,) = (
            torch.autograd.grad(loss, logp_N) if loss.requires_grad else (torch.zeros_like(logp_N),)
        )
        return float(loss.detach()), gradient_N


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClosedForm:
    """One optimizer step's loss as a function of log-probs."""

    loss: float
    gradient: Tokens
    """dLoss / dlog-prob; 0 at tokens that are not trained.  An entropy bonus, which no log-prob
    decides, is not in it.
    """
    ratio: Tokens
    """Importance ratio at the algorithm's level; 1 at tokens that are not trained."""

    @property
    def scale(self) -> float:
        """|loss| + the sum of all |gradients|: rounding errors of the loss are proportional to it."""
        return abs(self.loss) + float(
            sum(np.abs(values).sum() for values in self.gradient.values())
        )


def closed_form(
    algorithm: Algorithm, samples: Sequence[Sample], logp: Tokens, entropy: Tokens | None = None
) -> ClosedForm:
    """The step on `samples`, whose weights are final, by a policy that gives their tokens `logp`
    (and `entropy`), nats.

    Raises DataError for a completion of which a log-prob is missing, for missing entropies where
    the loss reads them, and for an adaptive entropy bonus.
    """
    if algorithm.needs_entropy and entropy is None:
        raise DataError("the loss reads entropies, and none were recorded: there is no closed form")
    if algorithm.entropy_target is not None:
        raise DataError(
            "the coefficient of an adaptive entropy bonus is the run's own state: there is no"
            " closed form"
        )
    _check_recorded("log-probs", logp, with_gradient(algorithm, samples))
    if algorithm.needs_forking:  # of all samples: the quantile is the step's
        _check_recorded("entropies", entropy or {}, samples)
        samples = with_forking(
            algorithm, samples, [_of(entropy or {}, sample) for sample in samples]
        )
    tokens, computed = entropy_tokens(algorithm, samples), with_gradient(algorithm, samples)
    if not computed:
        return ClosedForm(loss=0.0, gradient={}, ratio={})
    entropies = (
        [_of(entropy or {}, sample) for sample in computed] if algorithm.needs_entropy else []
    )
    recorded = RecordedLoss(
        algorithm, computed, [_of(logp, sample) for sample in computed], entropies
    )
    loss, gradient_N = recorded.gradient()
    bonus = (
        float(algorithm.bonus(recorded.terms, tokens)) if algorithm.entropy_bonus != 0.0 else 0.0
    )
    ratio_N = algorithm.log_ratio(recorded.terms).exp()
    return ClosedForm(
        loss=loss - bonus,
        gradient={
            (sample.group, sample.index): values
            for sample, values in recorded.by_sample(gradient_N)
        },
        ratio={
            (sample.group, sample.index): values
            for sample, values in recorded.by_sample(ratio_N, elsewhere=1.0)
        },
    )


def _check_recorded(what: str, tokens: Tokens, samples: Sequence[Sample]) -> None:
    lack = list(
        dict.fromkeys(
            place_of(one.group, one.index)
            for one in samples
            if _of(tokens, one).size != one.completion.size
        )
    )
    if lack:
        others = f" and {len(lack) - 1:,} more" if len(lack) > 1 else ""
        raise DataError(
            f"the {what} of completion {lack[0]}{others} were not recorded, because the run did not"
            " train them: only a model can say them"
        )


def _of(tokens: Tokens, sample: Sample) -> np.ndarray:
    return tokens.get((sample.group, sample.index), np.zeros(0))
