"""The loss of an optimizer step and its gradient with respect to every log-prob, computed from recorded log-probs without a model.

The loss is the one that training differentiates (`loss.Loss`); only the gradient of the log-probs with respect to the
weights is left out.  Computed in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.algorithms.table import Algorithm
from groupwise.data.packing import pack, unpack
from groupwise.errors import DataError
from groupwise.models.passes import ForwardOutput
from groupwise.ops.linear_cross_entropy import WholeLoss
from groupwise.records import Batch, Sample
from groupwise.training.loss import Loss, entropy_tokens, with_forking, with_gradient
from groupwise.training.passes import BatchPass

Tokens = Mapping[tuple[str, int], np.ndarray]
"""By group and index of a completion: a number per token (n,)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClosedForm:
    """One optimizer step's loss as a function of log-probs."""

    loss: float
    gradient: Tokens
    """dLoss / dlog-prob; 0 at tokens that are not trained.  An entropy bonus, which no log-prob decides, is not in it."""
    ratio: Tokens
    """Importance ratio at the algorithm's level; 1 at tokens that are not trained."""

    @property
    def scale(self) -> float:
        """|loss| + the sum of all |gradients|: rounding errors of the loss are proportional to it."""
        return abs(self.loss) + float(sum(np.abs(values).sum() for values in self.gradient.values()))


class RecordedPass(BatchPass):
    """A batch whose log-probs (M,), and entropies where the loss reads them, are known: no model computes anything."""

    def __init__(self, batch: Batch, logp_M: Tensor, entropy_M: Tensor | None) -> None:
        self.batch, self.rows_M = batch, batch.trained_M
        self._head = WholeLoss(logp_M, entropy_M)

    def precision(self) -> AbstractContextManager[Any]:
        """As the numbers are."""
        return nullcontext()

    @cached_property
    def outputs(self) -> ForwardOutput:
        """Nothing."""
        return ForwardOutput(torch.zeros(self.batch.layout.total, 0), 0.0)

    def head(self, *, fused: bool, entropy: bool = False) -> WholeLoss:
        """The numbers."""
        return self._head


def closed_form(algorithm: Algorithm, samples: Sequence[Sample], logp: Tokens, entropy: Tokens | None = None) -> ClosedForm:
    """The step on `samples`, whose weights are final, by a policy that gives their tokens `logp` (and `entropy`), nats.

    Raises DataError for a completion of which a log-prob is missing, for missing entropies where the loss reads them, and for an
    adaptive entropy bonus.
    """
    if algorithm.needs_entropy and entropy is None:
        raise DataError("the loss reads entropies, and none were recorded: there is no closed form")
    if algorithm.entropy_target is not None:
        raise DataError("the coefficient of an adaptive entropy bonus is the run's own state: there is no closed form")
    computed = with_gradient(algorithm, samples)
    _check_recorded("log-probs", logp, computed)
    if algorithm.needs_forking:  # of all samples: the quantile is the step's
        _check_recorded("entropies", entropy or {}, samples)
        samples = with_forking(algorithm, samples, [_of(entropy or {}, sample) for sample in samples])
    tokens, computed = entropy_tokens(algorithm, samples), with_gradient(algorithm, samples)
    columns = [
        replace(sample, extra={**sample.extra, "logp": _of(logp, sample), "entropy": _of(entropy or {}, sample)})
        if algorithm.needs_entropy
        else replace(sample, extra={**sample.extra, "logp": _of(logp, sample)})
        for sample in computed
    ]
    positions = sum(sample.prompt.size + sample.completion.size for sample in columns)
    loss, loss_of = 0.0, Loss(algorithm=algorithm, entropy_tokens=tokens)
    gradient, ratio = dict[int, np.ndarray](), dict[int, np.ndarray]()
    for batch in pack(columns, max(positions, 1), dtype=torch.float64):
        rows_M = batch.trained_M
        logp_M = batch.extra_P["logp"][rows_M].requires_grad_()
        entropy_M = batch.extra_P["entropy"][rows_M] if algorithm.needs_entropy else None
        value, _ = loss_of(RecordedPass(batch, logp_M, entropy_M))
        (gradient_M,) = torch.autograd.grad(value, logp_M)
        log_ratio_M = algorithm.log_ratio(loss_of.terms(batch, logp_M.detach(), entropy_M, rows_M))
        loss += float(value.detach())
        for found, values_M in ((gradient, gradient_M), (ratio, log_ratio_M.exp())):
            values_P = torch.zeros(batch.layout.total, dtype=torch.float64)
            values_P[rows_M] = values_M
            found |= unpack(batch, values_P, columns)
    keys = [(sample.group, sample.index) for sample in columns]
    return ClosedForm(
        loss=loss,
        gradient={keys[i]: values for i, values in gradient.items()},
        ratio={keys[i]: np.where(columns[i].weight != 0, values, 1.0) for i, values in ratio.items()},
    )


def _check_recorded(what: str, tokens: Tokens, samples: Sequence[Sample]) -> None:
    lack = list(dict.fromkeys(_label(sample) for sample in samples if _of(tokens, sample).size != sample.completion.size))
    if lack:
        raise DataError(
            f"the {what} of {len(lack)} completions, the first of them {lack[0]}, were not recorded, because the run "
            "did not train them: only a model can say them"
        )


def _of(tokens: Tokens, sample: Sample) -> np.ndarray:
    return tokens.get((sample.group, sample.index), np.zeros(0))


def _label(sample: Sample) -> str:
    return f"{sample.group}#{sample.index}"
