"""A recorded optimizer step computed again from its log-probs, without a model: the loss, its
gradient with respect to every log-prob, and its importance ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.algorithms.algorithm import Algorithm
from groupwise.errors import DataError
from groupwise.records import Sample, place_of
from groupwise.training.recorded_loss import RecordedLoss
from groupwise.training.samples import entropy_tokens, with_forking, with_gradient

Tokens = Mapping[tuple[str, int], np.ndarray]
"""A number per token (n,), by group and index of a completion."""


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
        """Sum of |loss| and all |gradients|: the loss's rounding errors are proportional to it."""
        gradients = float(sum(np.abs(values).sum() for values in self.gradient.values()))
        return abs(self.loss) + gradients


def closed_form(
    algorithm: Algorithm, samples: Sequence[Sample], logp: Tokens, entropy: Tokens | None = None
) -> ClosedForm:
    """Return the step on `samples`, whose weights are final, by a policy that gives their tokens
    `logp` (and `entropy`), nats.

    Raises DataError for a completion of which a log-prob is missing, for missing entropies where
    the loss reads them, and for an adaptive entropy bonus.
    """
    if algorithm.needs.entropy and entropy is None:
        raise DataError("the loss reads entropies, and none were recorded: there is no closed form")
    if algorithm.entropy_target is not None:
        raise DataError(
            "the coefficient of an adaptive entropy bonus is the run's own state: there is no"
            " closed form"
        )
    entropy = entropy or {}
    _check_recorded("log-probs", logp, with_gradient(algorithm, samples))
    if algorithm.needs.forking:  # of all samples: the quantile is the step's
        _check_recorded("entropies", entropy, samples)
        samples = with_forking(algorithm, samples, _of_samples(entropy, samples))
    tokens, computed = entropy_tokens(algorithm, samples), with_gradient(algorithm, samples)
    if not computed:
        return ClosedForm(loss=0.0, gradient={}, ratio={})
    entropies = _of_samples(entropy, computed) if algorithm.needs.entropy else []
    recorded = RecordedLoss(algorithm, computed, _of_samples(logp, computed), entropies)
    loss, gradient_N = recorded.gradient()
    if algorithm.entropy_bonus != 0.0:
        loss -= float(algorithm.bonus(recorded.terms, tokens))
    ratio_N = algorithm.log_ratio(recorded.terms).exp()
    return ClosedForm(
        loss=loss,
        gradient=_by_completion(recorded.by_sample(gradient_N)),
        ratio=_by_completion(recorded.by_sample(ratio_N, elsewhere=1.0)),
    )


def _by_completion(columns: Sequence[tuple[Sample, np.ndarray]]) -> Tokens:
    return {(sample.group, sample.index): values for sample, values in columns}


def _check_recorded(noun: str, tokens: Tokens, samples: Sequence[Sample]) -> None:
    """Raise DataError if a sample lacks numbers."""
    lack = []
    for sample, values_n in zip(samples, _of_samples(tokens, samples), strict=True):
        place = place_of(sample.group, sample.index)
        if values_n.size != sample.completion.size and place not in lack:
            lack.append(place)
    if lack:
        others = f" and {len(lack) - 1:,} more" if len(lack) > 1 else ""
        raise DataError(
            f"the {noun} of completion {lack[0]}{others} were not recorded, because the run did not"
            " train them: only a model can say them"
        )


def _of_samples(tokens: Tokens, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Return the numbers of each sample; none where they are not known."""
    nothing = np.zeros(0)
    return [tokens.get((sample.group, sample.index), nothing) for sample in samples]
