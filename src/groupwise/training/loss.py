"""The loss of a packed batch: one object with one call, the sum of terms, each with a weight for every token.

`HeadLoss` is any loss of log-probs (SFT, DPO); `Loss` is an online algorithm's: surrogate and KL, entropy bonus, and the extra
terms of its row, each `sum(weight x term)`.  For plain GRPO, with rho = exp(log-prob now - log-prob when sampled) and A the
completion's advantage, it is `sum over tokens of weight x (-min(rho A, clip(rho, 1 - e, 1 + e) A) + beta KL)`.

M trained positions of a micro-batch   C those of a chunk of it   D width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.algorithms.losses import Mismatch, Terms
from groupwise.algorithms.parts import called, checked_loss, fact, name_of
from groupwise.algorithms.table import Algorithm
from groupwise.models.passes import forward
from groupwise.models.policy import Policy
from groupwise.ops.linear_cross_entropy import chosen_logprobs, fused_loss
from groupwise.records import Batch, Sample
from groupwise.training.critics import Critic
from groupwise.training.passes import support_of
from groupwise.training.samples import POLICY, SIGNALS, WEIGHT
from groupwise.training.teachers import Teacher


class HeadLoss:
    """A loss of a batch that reads the log-probs of its trained tokens."""

    separable = False
    """True if a token's loss depends on no other token; the head's gradient is then taken while its logits are at hand."""
    entropy = False
    """True if `tokens` reads entropies, or they are to be reported."""

    def tokens(self, batch: Batch, logp_C: Tensor, entropy_C: Tensor | None, part: slice) -> Tensor:
        """The weighted loss, a scalar, of a part of the batch's trained tokens, by their log-probs and entropies (C,)."""
        raise NotImplementedError

    def states(self, policy: Policy, batch: Batch, hidden_MD: Tensor, logp_M: Tensor) -> Tensor | float:
        """What the loss reads from hidden states beside, a scalar; log-probs are constants there."""
        return 0.0

    def learns(self, batch: Batch) -> bool:
        """False where `tokens` has no gradient: log-probs are then computed for the log alone."""
        return True

    def __call__(self, policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, differentiable, and the log-probs (M,) of the trained tokens; with `entropy` also their entropies, (M, 2).

        It is differentiated as it is returned, multiplied by nothing: an update then sums one gradient of the head in place.
        """
        rows_M = batch.trained_M
        outputs = forward(policy, batch)
        inputs = (outputs.hidden_PD[rows_M], policy.head, batch.target_P[rows_M], batch.temperature_P[rows_M])
        learns, support, tokens = self.learns(batch), support_of(batch), partial(self.tokens, batch)
        with policy.precision():
            if self.separable and learns and torch.is_grad_enabled():
                value, logp_M, entropy_M = fused_loss(*inputs, tokens, support, entropy=self.entropy, as_is=True)
            else:
                with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
                    logp_M, entropy_M = chosen_logprobs(*inputs, support, entropy=self.entropy)
                    value = tokens(logp_M, entropy_M, slice(0, rows_M.shape[0]))
        value = value + self.states(policy, batch, inputs[0], logp_M)
        seen = logp_M if entropy_M is None else torch.stack([logp_M.detach(), entropy_M.detach()], 1)
        return value + outputs.router_loss, seen


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss(HeadLoss):
    """An online algorithm's loss of one optimizer step."""

    algorithm: Algorithm
    entropy_tokens: float = 1.0
    """Tokens of the whole step over which an entropy bonus is a mean (`online.entropy_tokens`)."""
    samples: Sequence[Sample] = ()
    """That batches are packed from."""
    critic: Critic | None = None
    """On the policy's own backbone."""
    teacher: Teacher | None = None
    entropy = True

    @property
    def separable(self) -> bool:  # type: ignore[override]
        """`Algorithm.token_level`."""
        return self.algorithm.token_level

    def learns(self, batch: Batch) -> bool:
        """False where the loss is a divergence alone, and no term of the batch reads log-probs."""
        return self.algorithm.reads_tokens or WEIGHT + POLICY in batch.extra_P

    def tokens(self, batch: Batch, logp_C: Tensor, entropy_C: Tensor | None, part: slice) -> Tensor:
        """Surrogate, KL and entropy bonus, and the extra terms that read log-probs."""
        rows_C = batch.trained_M[part]
        terms = self.terms(batch, logp_C, entropy_C, rows_C)
        value = self.algorithm.total(terms, weight(batch, POLICY, rows_C), self.entropy_tokens)
        for term in self.algorithm.of_tokens:
            if terms.sampled_M is not None or not fact(term, "of_demonstrations"):
                value = value + self.weighted(batch, term, terms, rows_C)
        return value

    def states(self, policy: Policy, batch: Batch, hidden_MD: Tensor, logp_M: Tensor) -> Tensor | float:
        """The extra terms that read values or the teacher's distributions, as far as the loss has a critic and a teacher."""
        has = {"value": self.critic is not None, "teacher": self.teacher is not None}
        read = [term for term in self.algorithm.of_states if all(has.get(name, True) for name in fact(term, "reads"))]
        if not read:
            return 0.0
        rows_M = batch.trained_M
        terms = replace(
            self.terms(batch, logp_M.detach(), None, rows_M),
            value_M=None if self.critic is None else self.critic.values(hidden_MD),
            divergence=None if self.teacher is None else partial(self.teacher.divergence, policy, batch, self.samples, hidden_MD),
        )
        value = hidden_MD.new_zeros((), dtype=logp_M.dtype)
        for term in read:
            value = value + self.weighted(batch, term, terms, rows_M)
        return value

    def weighted(self, batch: Batch, term: Callable[..., Any], terms: Terms, rows_C: Tensor) -> Tensor:
        """An extra term's part of the loss: `sum(weight x term)`, by the term's column of weights."""
        loss_C = checked_loss("extra", term, called("extra", term, terms), terms.logp_M)
        return (weight(batch, name_of(term), rows_C) * loss_C).sum()

    def terms(self, batch: Batch, logp_C: Tensor, entropy_C: Tensor | None, rows_C: Tensor) -> Terms:
        """What the loss sees of some rows of a batch."""
        reference_P, forking_P, policy_P = batch.reference_logp_P, batch.extra_P.get("forking"), batch.extra_P.get(WEIGHT + POLICY)
        sampled_C = None if policy_P is None else policy_P[rows_C] != 0
        if self.algorithm.needs_forking and forking_P is None:  # of demonstrations alone
            forking_P = torch.zeros_like(batch.weight_P)
        behavior_C, mismatch = behavior(self.algorithm, batch, rows_C, logp_C)
        return Terms(
            logp_M=logp_C,
            behavior_logp_M=behavior_C,
            sampler_logp_M=batch.behavior_logp_P[rows_C],
            mismatch=mismatch,
            advantage_M=batch.advantage_P[rows_C],
            segment_M=batch.sequence_P[rows_C],
            segments=batch.layout.segments,
            reference_logp_M=None if reference_P is None else reference_P[rows_C],
            # No part of the algorithm is about tokens that nobody sampled.
            entropy_M=entropy_C if entropy_C is None or sampled_C is None else entropy_C * sampled_C,
            forking_M=forking_P[rows_C] > 0 if forking_P is not None and self.algorithm.needs_forking else None,
            sampled_M=sampled_C,
            signals={name: batch.extra_P[name][rows_C] for name in SIGNALS if name in batch.extra_P},
        )


@dataclass(frozen=True, eq=False)
class CriticLoss:
    """The terms of an algorithm's loss that read values, for a pass of the critic alone: with a backbone of its own, or on a policy
    that stays as it is."""

    loss: Loss

    def __call__(self, policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, differentiable with respect to the critic, and its values (M,)."""
        critic, rows_M = self.loss.critic, batch.trained_M
        assert critic is not None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not critic.shared):
            outputs = forward(policy, batch)
        value_M = critic.values(outputs.hidden_PD[rows_M])
        terms = replace(self.loss.terms(batch, batch.behavior_logp_P[rows_M], None, rows_M), value_M=value_M)
        read = [term for term in self.loss.algorithm.of_states if "value" in fact(term, "reads")]
        value = torch.stack([self.loss.weighted(batch, term, terms, rows_M) for term in read]).sum()
        return value + (0.0 if critic.shared else outputs.router_loss), value_M


def weight(batch: Batch, name: str, rows_C: Tensor) -> Tensor:
    """The weights (C,) of a term's loss: its own column where demonstrations are mixed in, else the samples' weights."""
    return batch.extra_P.get(WEIGHT + name, batch.weight_P)[rows_C]


def behavior(algorithm: Algorithm, batch: Batch, rows_C: Tensor, logp_C: Tensor) -> tuple[Tensor, Mismatch | None]:
    """The log-probs (C,) that ratios are taken against, and what corrects them where the sampler is not the policy before the step.

    Without a correction they are the sampler's own.  With one (another engine, older weights) they are the trainer's before the
    step: scored beforehand, or in the first pass the current ones; the correction weighs tokens by trainer over sampler.
    """
    sampler_C = batch.behavior_logp_P[rows_C]
    if algorithm.correction is None:
        return sampler_C, None
    scored_P = batch.extra_P.get("scored_logp")
    before_C = logp_C.detach() if scored_P is None else scored_P[rows_C]
    return before_C, algorithm.correction(before_C, sampler_C, batch.sequence_P[rows_C], batch.layout.segments)
