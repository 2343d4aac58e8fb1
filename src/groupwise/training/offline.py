"""The data-set loop: rows -> samples with weights -> packed updates -> a `Step`.  Instruction
tuning, and all else from rows.

An objective says how rows become samples, what the loss of a packed batch is, and what to measure;
the loop is the same for all. `SFT` is here; objectives with heads or pairs have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from groupwise.algorithms.loss_weights import TokenMean
from groupwise.data.encoding import Demonstration
from groupwise.distributed import comm
from groupwise.models import backbone
from groupwise.models.policy import Policy
from groupwise.records import Sample, Step
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import (
    Assessment,
    BatchLoss,
    BatchPass,
    assess,
    balance,
    seen_by,
    update,
)
from groupwise.utils.clock import Clock
from groupwise.utils.statistics import Estimate

Row = TypeVar("Row")


def _no_metrics(rows: Sequence[Any], assessment: Assessment) -> Mapping[str, float]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective(Generic[Row]):
    """One row of the table of data-set objectives."""

    samples: Callable[[Sequence[Row]], list[Sample]]
    """The rows of one optimizer step -> their samples, weights final."""
    loss: BatchLoss
    measure: Callable[[Sequence[Row], Assessment], Mapping[str, float]]
    """(rows, numbers of an update or of validation) -> metrics for the log."""
    examine: Callable[[Sequence[Row], Assessment], Mapping[str, float]] = _no_metrics
    """(rows, numbers of validation) -> further metrics of validation alone."""
    headlines: Mapping[str, str] = field(default_factory=lambda: {"held-out loss": "loss"})
    """Label -> metric, for people; a metric's `/half_width` is shown with it."""
    whole_groups: bool = False
    """True if the samples of a group are compared with each other and must share a micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """An objective's results on held-out rows: the training loss, in its own units, and its further
    measures.
    """

    rows: int
    figures: Mapping[str, float]
    shown: Mapping[str, str]

    def metrics(self) -> dict[str, float]:
        """Flat names, as the log keeps them under `eval/`."""
        return dict(self.figures)

    def summary(self) -> dict[str, str]:
        """Label -> text, for tables."""
        return dict(self.shown)


def validate(
    policy: Policy,
    objective: Objective[Row],
    rows: Sequence[Row],
    *,
    max_tokens_per_microbatch: int,
) -> Validation:
    """Return the objective's own loss and measures on rows, no gradient."""
    assessment = assess(
        policy,
        objective.loss,
        objective.samples(rows),
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        whole_groups=objective.whole_groups,
    )
    figures = {
        "loss": assessment.loss,
        **objective.measure(rows, assessment),
        **objective.examine(rows, assessment),
    }
    shown = {}
    for label, name in objective.headlines.items():
        half_width = figures.get(f"{name}/half_width")
        if half_width is None:
            shown[label] = f"{figures[name]:.4g}"
        else:
            shown[label] = str(Estimate(figures[name], half_width))
    return Validation(rows=len(rows), figures=figures, shown=shown)


def train_offline(
    policy: Policy,
    objective: Objective[Row],
    *,
    draw: Callable[[int], Sequence[Row]],
    optimizer: Optimizer,
    max_tokens_per_microbatch: int,
    batch_size: int,
    steps: int,
    done: int = 0,
    checkpointing: bool = False,
) -> Iterator[Step]:
    """Train `policy` in place on rows; yield a `Step` after every optimizer step.

    draw: the next k rows of the data's order.   batch_size: rows per optimizer step.
    max_tokens_per_microbatch: packed positions per forward and backward pass; it cannot change an
        update.
    done: steps taken before (a resumed run); steps: the last step's number.
    """
    for number in range(done + 1, steps + 1):
        clock = Clock()
        with clock.phase("data"):
            rows = draw(batch_size)
            samples = objective.samples(rows)
        with clock.phase("update"), backbone.checkpointing(policy, checkpointing):
            step = update(
                policy,
                objective.loss,
                samples,
                optimizer,
                max_tokens_per_microbatch=max_tokens_per_microbatch,
                whole_groups=objective.whole_groups,
            )
            max_tokens_per_microbatch = step.max_tokens_per_microbatch
        tokens = sum(sample.completion.size for sample in samples)
        metrics: dict[str, float] = {
            "loss": step.loss,
            "grad_norm": step.stats.grad_norm,
            "lr": step.stats.lr,
            "skipped_updates": float(step.stats.skipped),
            "tokens/trained": float(sum(np.count_nonzero(sample.weight) for sample in samples)),
            "tokens/per_second": tokens / max(sum(clock.seconds.values()), 1e-9),
        }
        metrics |= balance([step]) | dict(objective.measure(rows, step))
        yield Step(number=number, metrics=metrics, timings=clock.seconds | comm.waiting())


def demonstration_samples(rows: Sequence[Demonstration]) -> list[Sample]:
    """Demonstrations as samples: every completion token of the step weighs the same (`token_mean`),
    EOS included.
    """
    tokens_R = np.array([row.completion.size for row in rows], dtype=np.int64)
    weight_R = TokenMean()(tokens_R, np.arange(len(rows)))
    samples = []
    for i, (row, weight) in enumerate(zip(rows, weight_R, strict=True)):
        samples.append(
            Sample(
                group=f"{row.id}#{i}",
                images=row.images,
                prompt=row.prompt,
                completion=row.completion,
                weight=np.full(row.completion.size, weight),
            )
        )
    return samples


def token_nll(passed: BatchPass) -> tuple[Tensor, Tensor]:
    """`-log p` of every completion token."""
    with passed.precision():
        head = passed.head(fused=True)
        for chunk in head:
            chunk.loss = -(passed.batch.weight_P[passed.rows_M[chunk.rows]] * chunk.logp_C).sum()
    return head.total() + passed.router_loss, seen_by(head)


SFT: Objective[Demonstration] = Objective(
    samples=demonstration_samples,
    loss=token_nll,
    measure=lambda rows, assessment: {
        "nll": assessment.loss,
        "perplexity": float(np.exp(min(assessment.loss, 50.0))),
    },
    headlines={"held-out nll": "nll", "perplexity": "perplexity"},
)
"""Supervised fine-tuning on demonstrations."""
