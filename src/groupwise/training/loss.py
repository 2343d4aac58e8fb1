"""The loss of a packed batch: one object with one call, the sum of terms, each with a weight for
every token.

`Loss` is an online algorithm's: surrogate, KL and the extra terms of its row, each `sum(weight x
term)`, and an entropy bonus, which is a mean over tokens of its own.  For plain GRPO, with rho =
exp(log-prob now - log-prob before the step) and A the completion's advantage, it is `sum over
tokens of weight x (-min(rho A, clip(rho, 1 - e, 1 + e) A) + beta KL)`.

M trained positions of a micro-batch   C those of a chunk of it   D width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.algorithms.losses import Terms
from groupwise.algorithms.parts import called, checked_loss, fact, name_of
from groupwise.algorithms.table import Algorithm
from groupwise.models.moe import router_coefficient
from groupwise.models.policy import Policy
from groupwise.records import Batch, Sample
from groupwise.training.critics import Critic
from groupwise.training.passes import BatchPass, score, seen_by, update
from groupwise.training.samples import (
    POLICY,
    SIGNALS,
    WEIGHT,
    entropy_tokens,
    with_forking,
    with_gradient,
)
from groupwise.training.teachers import Teacher, with_demonstrations


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss:
    """An online algorithm's loss of one optimizer step."""

    algorithm: Algorithm
    samples: Sequence[Sample] = ()
    """Those that the pass is made over."""
    entropy_tokens: float = 1.0
    """Tokens of the whole step over which an entropy bonus is a mean (`entropy_tokens`)."""
    critic: Critic | None = None
    """On the policy's own backbone."""
    teacher: Teacher | None = None

    def __call__(self, passed: BatchPass) -> tuple[Tensor, Tensor]:
        """The weighted loss of a batch, differentiable; the log-probs and entropies (M, 2) of its
        trained tokens.
        """
        algorithm, batch, hidden_MD = self.algorithm, passed.batch, passed.hidden_MD
        demonstrations = WEIGHT + POLICY in batch.extra_P
        # A divergence alone reads no log-probs: they are then computed for the log.
        learns = algorithm.reads_tokens or demonstrations
        with passed.precision(), torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            head = passed.head(fused=algorithm.token_level and learns, entropy=True)
            for chunk in head:
                rows_C = passed.rows_M[chunk.rows]
                terms = self.terms(batch, chunk.logp_C, chunk.entropy_C, rows_C)
                loss = (weight(batch, POLICY, rows_C) * algorithm.loss(terms)).sum()
                if algorithm.entropy_bonus != 0.0:
                    loss = loss - algorithm.bonus(terms, self.entropy_tokens)
                for term in algorithm.of_tokens:
                    if terms.sampled_M is not None or not fact(term, "of_demonstrations"):
                        loss = loss + self.term_loss(batch, term, terms, rows_C)
                chunk.loss = loss
        value = head.total() + self.state_terms(passed, hidden_MD, head.logp_M)
        return value + passed.router_loss, seen_by(head)

    def state_terms(self, passed: BatchPass, hidden_MD: Tensor, logp_M: Tensor) -> Tensor | float:
        """The extra terms that read values or the teacher's distributions, as far as the loss has a
        critic and a teacher; log-probs are constants to them."""
        lacking = {
            name for name, one in (("value", self.critic), ("teacher", self.teacher)) if one is None
        }
        read = [
            term for term in self.algorithm.of_states if lacking.isdisjoint(fact(term, "reads"))
        ]
        if not read:
            return 0.0
        batch, rows_M = passed.batch, passed.rows_M
        terms = replace(
            self.terms(batch, logp_M.detach(), None, rows_M),
            value_M=None if self.critic is None else self.critic.values(hidden_MD),
            divergence=(
                None
                if self.teacher is None
                else partial(self.teacher.divergence, passed.policy, batch, self.samples, hidden_MD)
            ),
        )
        value = hidden_MD.new_zeros((), dtype=logp_M.dtype)
        for term in read:
            value = value + self.term_loss(batch, term, terms, rows_M)
        return value

    def term_loss(
        self, batch: Batch, term: Callable[..., Any], terms: Terms, rows_C: Tensor
    ) -> Tensor:
        """An extra term's part of the loss: `sum(weight x term)`, by the term's column of weights."""
        values_C = terms.value_M if "value" in fact(term, "reads") else None
        loss_C = checked_loss(
            "extra", term, called("extra", term, terms), terms.logp_M, critic_M=values_C
        )
        return (weight(batch, name_of(term), rows_C) * loss_C).sum()

    def terms(
        self, batch: Batch, logp_C: Tensor, entropy_C: Tensor | None, rows_C: Tensor
    ) -> Terms:
        """What the loss sees of some rows of a batch."""
        reference_P, forking_P, policy_P = (
            batch.reference_logp_P,
            batch.extra_P.get("forking"),
            batch.extra_P.get(WEIGHT + POLICY),
        )
        sampled_C = None if policy_P is None else policy_P[rows_C] != 0
        if self.algorithm.needs_forking and forking_P is None:  # of demonstrations alone
            forking_P = torch.zeros_like(batch.weight_P)
        scored_P, sampler_C, segment_C = (
            batch.extra_P.get("scored_logp"),
            batch.behavior_logp_P[rows_C],
            batch.sequence_P[rows_C],
        )
        # Not scored beforehand: in the first pass these are the current ones.
        before_C = logp_C.detach() if scored_P is None else scored_P[rows_C]
        old_C, mismatch = self.algorithm.old_logp(
            before_C, sampler_C, segment_C, batch.layout.segments
        )
        return Terms(
            logp_M=logp_C,
            old_logp_M=old_C,
            sampler_logp_M=sampler_C,
            mismatch=mismatch,
            advantage_M=batch.advantage_P[rows_C],
            segment_M=segment_C,
            segments=batch.layout.segments,
            reference_logp_M=None if reference_P is None else reference_P[rows_C],
            # No part of the algorithm is about tokens that nobody sampled.
            entropy_M=(
                entropy_C if entropy_C is None or sampled_C is None else entropy_C * sampled_C
            ),
            forking_M=(
                forking_P[rows_C] > 0
                if forking_P is not None and self.algorithm.needs_forking
                else None
            ),
            sampled_M=sampled_C,
            signals={
                name: batch.extra_P[name][rows_C] for name in SIGNALS if name in batch.extra_P
            },
        )


@dataclass(frozen=True, eq=False)
class CriticLoss:
    """The terms of an algorithm's loss that read values, for a pass of the critic alone: with a
    backbone of its own, or on a policy that stays as it is."""

    loss: Loss
    critic: Critic

    def __call__(self, passed: BatchPass) -> tuple[Tensor, Tensor]:
        """The loss, differentiable with respect to the critic, and its values (M,)."""
        critic, rows_M = self.critic, passed.rows_M
        with torch.set_grad_enabled(torch.is_grad_enabled() and not critic.shared):
            hidden_MD = passed.hidden_MD
        value_M = critic.values(hidden_MD)
        terms = replace(
            self.loss.terms(passed.batch, passed.batch.behavior_logp_P[rows_M], None, rows_M),
            value_M=value_M,
        )
        read = [term for term in self.loss.algorithm.of_states if "value" in fact(term, "reads")]
        value = torch.stack(
            [self.loss.term_loss(passed.batch, term, terms, rows_M) for term in read]
        ).sum()
        return value + (0.0 if critic.shared else passed.router_loss), value_M


def step_loss(
    policy: Policy,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    *,
    critic: Critic | None = None,
    teacher: Teacher | None = None,
    number: int = 0,
    max_tokens_per_microbatch: int,
) -> Loss:
    """The loss of an optimizer step.  Its `samples` are those to make the pass over: the weighted
    ones that have a gradient, and a teacher's demonstrations.

    critic: its terms are part of the loss where it is on the policy's own backbone (else:
        `update_critic`).
    number: optimizer steps taken before, which choose the demonstrations.
    A high-entropy mask is decided before the first micro-batch, and so needs a pass of its own.
    """
    if algorithm.needs_forking:
        samples = with_forking(
            algorithm,
            samples,
            score(
                policy, samples, max_tokens_per_microbatch=max_tokens_per_microbatch, entropy=True
            ).entropy,
        )
    tokens = entropy_tokens(
        algorithm, samples
    )  # of rollouts: the algorithm knows nothing of demonstrations
    if teacher is not None and teacher.demonstrations is not None:
        samples = with_demonstrations(algorithm, samples, teacher.demonstrations.of(number))
    computed = (
        list(samples) if router_coefficient(policy) > 0.0 else with_gradient(algorithm, samples)
    )
    shared = critic if critic is not None and critic.shared else None
    return Loss(
        algorithm=algorithm, samples=computed, entropy_tokens=tokens, critic=shared, teacher=teacher
    )


def update_critic(critic: Critic, loss: Loss, *, max_tokens_per_microbatch: int) -> int:
    """One optimizer step of a critic in a pass of its own, on the samples of a step's loss.  Gives
    the budget that fitted.
    """
    return update(
        critic.policy,
        CriticLoss(loss, critic),
        loss.samples,
        critic.optimizer,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
    ).max_tokens_per_microbatch


def weight(batch: Batch, name: str, rows_C: Tensor) -> Tensor:
    """The weights (C,) of a term's loss: its own column where demonstrations are mixed in, else the
    samples' weights.
    """
    return batch.extra_P.get(WEIGHT + name, batch.weight_P)[rows_C]
