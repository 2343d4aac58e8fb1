"""The data-set loop: rows -> samples with weights -> packed updates -> a `Step`.  Instruction tuning, and whatever learns from rows.

An objective says how rows become samples, what the loss of a packed batch is, and what to measure; the loop does not know which
it is.  `SFT` is here; objectives with heads or pairs have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from groupwise.clock import Clock
from groupwise.data.demonstrations import Demonstration
from groupwise.models.policy import Policy
from groupwise.objective.weights import token_mean
from groupwise.optim import Optimizer
from groupwise.records import Batch, Sample, Step
from groupwise.updating import BatchLoss, Update, token_loss, update

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective(Generic[Row]):
    """One row of the table of data-set objectives."""

    name: str
    samples: Callable[[Sequence[Row]], list[Sample]]
    """The rows of one optimizer step -> their samples, weights final."""
    loss: BatchLoss
    measure: Callable[[Sequence[Row], Update], Mapping[str, float]]
    """What is worth logging of an update."""
    whole_groups: bool = False
    """True if the samples of a group are compared with each other and must share a micro-batch."""


def train_offline(
    policy: Policy,
    objective: Objective[Row],
    *,
    draw: Callable[[int], Sequence[Row]],
    optimizer: Optimizer,
    budget: int,
    batch_size: int,
    steps: int,
    done: int = 0,
    checkpointing: bool = False,
) -> Iterator[Step]:
    """Train `policy` in place on rows; yield a `Step` after every optimizer step.

    draw: the next k rows of the data's order.   batch_size: rows per optimizer step.
    budget: packed positions per forward and backward pass; it cannot change an update.
    done: steps taken before (a resumed run); steps: the last step's number.
    """
    for number in range(done + 1, steps + 1):
        clock = Clock()
        with clock.phase("data"):
            rows = draw(batch_size)
            samples = objective.samples(rows)
        with clock.phase("update"), policy.checkpointing(checkpointing):
            taken = update(policy, objective.loss, samples, optimizer, budget=budget, whole_groups=objective.whole_groups)
        tokens = sum(sample.completion.size for sample in samples)
        metrics: dict[str, float] = {
            "loss": taken.loss,
            "grad_norm": taken.taken.grad_norm,
            "lr": taken.taken.lr,
            "skipped_updates": float(taken.taken.skipped),
            "tokens/trained": float(sum(np.count_nonzero(sample.weight) for sample in samples)),
            "tokens/per_second": tokens / max(sum(clock.seconds.values()), 1e-9),
        }
        yield Step(number=number, metrics={**metrics, **objective.measure(rows, taken)}, timings=clock.seconds)


def whole_text(row: Demonstration) -> Demonstration:
    """The same text with every token but the first to be learnt, the prompt's too (`data.train_on: all`)."""
    text = np.concatenate([row.prompt, row.completion])
    return replace(row, prompt=text[:1], completion=text[1:])


def demonstration_samples(rows: Sequence[Demonstration]) -> list[Sample]:
    """Demonstrations as samples: every completion token of the step weighs the same (`token_mean`), EOS included."""
    tokens_R = np.array([row.completion.size for row in rows], dtype=np.int64)
    weight_R = token_mean(tokens_R, np.arange(len(rows)))
    return [
        Sample(
            group=f"{row.id}#{i}",
            prompt=row.prompt,
            completion=row.completion,
            weight=np.full(row.completion.size, weight),
            advantage=np.ones(row.completion.size),
            behavior_logp=np.zeros(row.completion.size),
        )
        for i, (row, weight) in enumerate(zip(rows, weight_R, strict=True))
    ]


def demonstration_loss(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """`-log p` of every completion token."""
    weight_M = batch.weight_P[batch.trained_M]
    return token_loss(policy, batch, lambda logp, _entropy, part: -(weight_M[part] * logp).sum(), separable=True)


SFT: Objective[Demonstration] = Objective(
    name="sft",
    samples=demonstration_samples,
    loss=demonstration_loss,
    measure=lambda rows, update: {"nll": update.loss, "perplexity": float(np.exp(min(update.loss, 50.0)))},
)
"""Supervised fine-tuning on demonstrations."""
