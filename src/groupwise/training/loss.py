"""The loss of a packed batch: one object with one call, a sum over tokens of weight x loss.

For plain GRPO, with rho = exp(log-prob now - log-prob before the step) and A the completion's
advantage, it is `sum over tokens of weight x (-min(rho A, clip(rho, 1 - e, 1 + e) A) + beta KL)`.

- `Algorithm.loss` (`algorithms/algorithm.py`) gives the loss of each token: surrogate, masks,
  mismatch weight and `beta KL`.
- `samples.weigh` has computed the weights, which hold the normalisation.
- `Loss` multiplies the two and adds what else the algorithm's row has: extra terms of log-probs,
  terms of a critic or a teacher, and an entropy bonus, which is a mean over tokens of its own.

M trained positions of a micro-batch   C those of a chunk of it   D width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.parts import fact
from groupwise.models.moe import router_coefficient
from groupwise.models.passes import BatchPass
from groupwise.models.policy import Policy
from groupwise.records import Sample
from groupwise.training.critics import Critic
from groupwise.training.loss_terms import BatchRows, loss_terms
from groupwise.training.passes import score, seen_by, update
from groupwise.training.samples import entropy_tokens, with_forking, with_gradient
from groupwise.training.teachers import Teacher


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss:
    """An online algorithm's loss of one optimizer step."""

    algorithm: Algorithm
    samples: Sequence[Sample] = ()
    """The samples that the pass is made over."""
    entropy_tokens: float = 1.0
    """Tokens of the whole step over which an entropy bonus is a mean (`entropy_tokens`)."""
    critic: Critic | None = None
    """A critic on the policy's own backbone."""
    teacher: Teacher | None = None

    def __call__(self, passed: BatchPass) -> tuple[Tensor, Tensor]:
        """Return the weighted loss of a batch, differentiable, and the log-probs and entropies
        (M, 2) of its trained tokens.
        """
        hidden_MD, algorithm = passed.hidden_MD, self.algorithm
        # If the loss is only a divergence, log-probs need no gradient: the metrics read them.
        learns = algorithm.reads_tokens
        with passed.precision(), torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            head = passed.head(fused=algorithm.token_level and learns, entropy=True)
            for chunk in head:
                rows = BatchRows(passed.batch, passed.rows_M[chunk.rows])
                terms = loss_terms(algorithm, rows, chunk.logp_C, chunk.entropy_C)
                weight_C = passed.batch.weight_P[rows.rows_M]
                loss = (weight_C * algorithm.loss(terms)).sum()
                if algorithm.entropy_bonus != 0.0:
                    loss = loss - algorithm.bonus(terms, self.entropy_tokens)
                for term in algorithm.token_terms:
                    loss = loss + (weight_C * term(terms)).sum()
                # The head differentiates it when the loop asks for the next chunk (`FusedLoss`).
                chunk.loss = loss
        value = head.total() + self.state_loss(passed, hidden_MD, head.logp_M)
        return value + passed.router_loss, seen_by(head)

    def state_loss(self, passed: BatchPass, hidden_MD: Tensor, logp_M: Tensor) -> Tensor | float:
        """Return the weighted sum of the terms that read critic values or teacher distributions.

        Terms whose model is absent are left out.  Log-probs get no gradient.
        """
        read = self._state_terms()
        if not read:
            return 0.0
        rows = BatchRows(passed.batch, passed.rows_M)
        terms = loss_terms(self.algorithm, rows, logp_M.detach(), None)
        if self.critic is not None:
            terms = replace(terms, value_M=self.critic.values(hidden_MD))
        if self.teacher is not None:
            divergence = partial(
                self.teacher.divergence, passed.policy, passed.batch, self.samples, hidden_MD
            )
            terms = replace(terms, divergence=divergence)
        weight_M = passed.batch.weight_P[passed.rows_M]
        value = hidden_MD.new_zeros((), dtype=logp_M.dtype)
        for term in read:
            value = value + (weight_M * term(terms)).sum()
        return value

    def _state_terms(self) -> list[Callable[..., Any]]:
        """Return the terms that read only what the loss has."""
        absent = set()
        if self.critic is None:
            absent.add("value")
        if self.teacher is None:
            absent.add("teacher")
        return [t for t in self.algorithm.state_terms if absent.isdisjoint(fact(t, "reads"))]


@dataclass(frozen=True, eq=False)
class CriticLoss:
    """The terms of an algorithm's loss that read values, for a pass of the critic alone: with a
    backbone of its own, or on a policy that stays as it is.
    """

    loss: Loss
    critic: Critic

    def __call__(self, passed: BatchPass) -> tuple[Tensor, Tensor]:
        """Return the loss, differentiable with respect to the critic, and its values (M,)."""
        critic, rows_M = self.critic, passed.rows_M
        with torch.set_grad_enabled(torch.is_grad_enabled() and not critic.shared):
            hidden_MD = passed.hidden_MD
        value_M = critic.values(hidden_MD)
        rows = BatchRows(passed.batch, rows_M)
        # The terms that read values look at no log-prob: the sampler's stand in for the policy's.
        terms = loss_terms(self.loss.algorithm, rows, passed.batch.behavior_logp_P[rows_M], None)
        terms = replace(terms, value_M=value_M)
        weight_M = passed.batch.weight_P[rows_M]
        parts = []
        for term in self.loss.algorithm.state_terms:
            if "value" in fact(term, "reads"):
                parts.append((weight_M * term(terms)).sum())
        value = torch.stack(parts).sum()
        if not critic.shared:
            value = value + passed.router_loss
        return value, value_M


def step_loss(
    policy: Policy,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    *,
    critic: Critic | None = None,
    teacher: Teacher | None = None,
    max_tokens_per_microbatch: int,
) -> Loss:
    """Return the loss of an optimizer step.  Its `samples` are those to make the pass over: the
    weighted ones that have a gradient.

    critic: its terms are part of the loss where it is on the policy's own backbone (else:
        `update_critic`).
    A high-entropy mask is decided before the first micro-batch, and so needs a pass of its own.
    """
    if algorithm.needs.forking:
        scores = score(
            policy, samples, max_tokens_per_microbatch=max_tokens_per_microbatch, entropy=True
        )
        samples = with_forking(algorithm, samples, scores.entropy)
    tokens = entropy_tokens(algorithm, samples)
    if router_coefficient(policy) == 0.0:
        samples = with_gradient(algorithm, samples)
    return Loss(
        algorithm=algorithm,
        samples=samples,
        entropy_tokens=tokens,
        critic=critic if critic is not None and critic.shared else None,
        teacher=teacher,
    )


def update_critic(critic: Critic, loss: Loss, *, max_tokens_per_microbatch: int) -> int:
    """Take one optimizer step of a critic in a pass of its own, on the samples of a step's loss.

    Returns the positions at a time that fitted into memory.
    """
    updated = update(
        critic.policy,
        CriticLoss(loss, critic),
        loss.samples,
        critic.optimizer,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
    )
    return updated.max_tokens_per_microbatch
