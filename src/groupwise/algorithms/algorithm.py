"""What an online algorithm is: credit x ratio level x surrogate x weight, and what is added.

A row of `table.py` is one, and so is your own.  No code compares an algorithm's name.  Importing
this file does not import torch.

M trained tokens of one micro-batch, or of any part of it where `token_level` is true
R completions of the optimizer step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from groupwise.algorithms import advantages as credits
from groupwise.algorithms import kl_estimators, loss_weights, losses
from groupwise.algorithms.parts import fact
from groupwise.records import Rollout, RolloutGroup

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirements:
    """What must be there, or be computed, before an algorithm can learn from a rollout."""

    reward: bool
    """False if nothing is learnt from rewards: none must be given."""
    reference: bool
    """True if log-probs of a reference must be computed."""
    critic: bool
    """True if a critic must say what states are worth, and be trained beside the policy."""
    teacher_states: bool
    """True if the teacher's distributions over the vocabulary are read."""
    teacher_logp: bool
    """True if the teacher's log-probs of what was drawn are read."""
    steps: bool
    """True if the credit reads rewards of steps, or of an episode's turns."""
    entropy: bool
    """True if the loss reads token entropies."""
    forking: bool
    """True if `losses.Terms.forking_M` must be known before the first micro-batch
    (`losses.forking`).
    """

    @property
    def teacher(self) -> bool:
        """True if there is a teacher."""
        return self.teacher_states or self.teacher_logp


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """What an online algorithm is, and nothing about how it is run: one row of the table."""

    name: str
    summary: str
    """What sets it apart, in one sentence."""
    paper: str
    """arXiv number; empty where there is none."""
    equation: str
    """The loss in one line, as it is computed; where the paper's differs,
    `docs/algorithms/notes.yaml` says how.
    """
    credit: Callable[..., Any] = credits.Standardized()  # noqa: RUF009 - frozen
    ratio: Callable[..., Any] = losses.TokenRatio()  # noqa: RUF009 - frozen
    """How far the policy has moved from the old policy.  A surrogate that computes its own ratio
    does not read it."""
    surrogate: Callable[..., Any] = losses.Clipped()  # noqa: RUF009 - frozen
    weights: Callable[..., Any] = loss_weights.SequenceMean()  # noqa: RUF009 - frozen
    dead_groups: Literal["exact", "drop", "refill"] = "exact"
    """What becomes of groups whose advantages are all 0.  `exact`: they count in every mean, and
    have no forward pass unless a KL, a bonus, an extra term or a critic needs one
    (`samples.with_gradient`).  `drop`: the means leave them out (`samples.weigh`). `refill`:
    further prompts are sampled in their place (`groups.SampledRollouts.collect`)."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions that a limit ended.  `mask`: no token of theirs is trained; means over
    completions count them.
    """
    beta: float = 0.0
    """Weight of the KL to the reference; 0: there is no reference."""
    kl: Callable[..., Any] = kl_estimators.K3()  # noqa: RUF009 - frozen
    kl_place: Literal["loss", "reward"] = "loss"
    """Where the KL is.  With `loss` it is added to the loss.  With `reward` the credit subtracts it
    from the reward, by its own estimator (k1, if it has no other); `kl` is not read then, and
    `resolve` gives the credit this `beta`.
    """
    entropy_bonus: float = 0.0
    """Weight of the mean entropy in the loss; with a target the largest one."""
    entropy_target: float | None = None
    """Sampled entropy, nats, below which the bonus grows: `with_bonus`; None: it stays as it is."""
    entropy_step: float = 0.005
    """Change of the bonus after each optimizer step, with a target."""
    entropy_quantile: float = 0.0
    """Share of the trained tokens, those of least entropy, whose surrogate is masked."""
    off_policy_delta: float | None = None
    """Nats of drift beyond which a completion with A < 0 is masked (`losses.off_policy_keep`)."""
    extra: tuple[Callable[..., Any], ...] = ()
    """Further terms of the loss of each token (`losses.Terms` -> loss_M)."""
    correction: losses.Correction | None = None
    """Importance weight for an engine that computes other probabilities than the trainer; None:
    what sampled is what scores.
    """

    @property
    def needs(self) -> Requirements:
        """What must be there, or be computed, before the algorithm can learn from a rollout."""
        signals = set(fact(self.credit, "reads"))
        for term in self.extra:
            signals.update(fact(term, "reads"))
        return Requirements(
            reward=fact(self.credit, "needs_reward"),
            reference=self.beta > 0.0,
            critic="value" in signals,
            teacher_states="teacher" in signals,
            teacher_logp="teacher_logp" in signals,
            steps="process" in signals,
            entropy=self.entropy_bonus != 0.0 or self.entropy_quantile > 0.0,
            forking=self.entropy_quantile > 0.0,
        )

    @property
    def divergence(self) -> Callable[..., Any] | None:
        """The distance of the policy's next token from the teacher's, where a term is about it."""
        for term in self.extra:
            if isinstance(term, losses.TeacherDivergence):
                return term.function
        return None

    @property
    def token_terms(self) -> list[Callable[..., Any]]:
        """The extra terms that read log-probs."""
        return [term for term in self.extra if not _reads_states(term)]

    @property
    def state_terms(self) -> list[Callable[..., Any]]:
        """The extra terms that read a critic's values or a teacher's distributions; log-probs are
        constants to them.
        """
        return [term for term in self.extra if _reads_states(term)]

    @property
    def reads_tokens(self) -> bool:
        """True if the loss of a token depends on its log-prob or its entropy, and not on a
        divergence alone.
        """
        return (
            fact(self.surrogate, "reads_logp")
            or self.loss_beta > 0.0
            or self.entropy_bonus != 0.0
            or bool(self.token_terms)
        )

    @property
    def loss_beta(self) -> float:
        """Weight of the KL in the loss."""
        return self.beta if self.kl_place == "loss" else 0.0

    @property
    def reward_beta(self) -> float:
        """Weight of the KL in the reward."""
        return self.beta if self.kl_place == "reward" else 0.0

    @property
    def skips_dead(self) -> bool:
        """True if a completion whose advantages are all 0 has no gradient: its forward and backward
        can be left out, exactly.
        """
        if self.loss_beta > 0.0 or self.entropy_bonus != 0.0:
            return False
        return not self.extra and not self.needs.critic

    def masks(self, rollout: Rollout) -> bool:
        """Return True if no token of a completion is trained because a limit ended it."""
        return self.truncated == "mask" and rollout.truncated

    def teaches(self, group: RolloutGroup) -> bool:
        """Return False if the group's rewards give an advantage of exactly 0 to every completion,
        or to every one that is not masked.

        The credit decides: GDPO learns from rewards that differ while their sum does not.  Where it
        reads what is not known yet (a KL in the reward, values), the sum does.
        """
        if all(self.masks(rollout) for rollout in group.rollouts):
            return False
        if not self.needs.reward:
            return True
        if self.needs.critic or self.reward_beta > 0.0:
            return not group.equal_rewards
        (trained,) = self._trained([group])
        (advantages,) = self.advantages([group])
        pairs = zip(trained.rollouts, advantages, strict=True)
        return any(advantage_n[rollout.trained].any() for rollout, advantage_n in pairs)

    def advantages(self, groups: Sequence[RolloutGroup]) -> credits.Advantages:
        """Return the advantages of a rollout: per group and completion float64 (n,).

        With `truncated: mask` a completion that a limit ended has no trained token: statistics over
        tokens leave it out.  Raises ConfigError for what a credit of your own gives.
        """
        return self.credit(self._trained(groups))

    def returns(self, groups: Sequence[RolloutGroup]) -> credits.Advantages:
        """Return what a value function should have said of every token (`advantages.returns`)."""
        return credits.returns(self._trained(groups), self.credit)

    def _trained(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups as they are trained: without the completions that are masked."""
        if self.truncated != "mask":
            return list(groups)
        return [masked(group) for group in groups]

    def token_weights(self, tokens_R: np.ndarray, prompt_R: np.ndarray) -> np.ndarray:
        """Return the weight of a token of each completion, float64 (R,); see `loss_weights`."""
        return self.weights(tokens_R, prompt_R)

    @property
    def token_level(self) -> bool:
        """True if a token's loss depends on no other token: `loss` may then be called on any part
        of a micro-batch.
        """
        if self.off_policy_delta is not None:
            return False
        if self.correction is not None and self.correction.level != "token":
            return False
        parts = (self.ratio, self.surrogate, *self.token_terms)
        return all(fact(part, "per_token") for part in parts)

    def old_logp(
        self, before_M: Tensor, sampler_M: Tensor, segment_M: Tensor, segments: int
    ) -> tuple[Tensor, losses.Mismatch | None]:
        """Return the old policy's log-probs (M,), which ratios are taken against, and what corrects
        the loss where another policy sampled.

        before_M: the trainer's before the step, which a correction takes; it weighs tokens by
            trainer over sampler.
        sampler_M: the sampler's, which are the old policy's where nothing is corrected.
        """
        if self.correction is None:
            return sampler_M, None
        return before_M, self.correction(before_M, sampler_M, segment_M, segments)

    def log_ratio(self, terms: losses.Terms) -> Tensor:
        """Return the log of the importance ratio of each token (M,), at the algorithm's level."""
        return self.ratio(terms.logp_M, terms.old_logp_M, terms.segment_M, terms.segments)

    def cut(self, terms: losses.Terms) -> Tensor:
        """Return bool (M,): the tokens with an advantage whose gradient the surrogate makes 0, by
        clipping, a bound, a mask of its own.

        It is read off the gradient itself, so that it holds of every surrogate.

        >>> import torch
        >>> from groupwise.algorithms.table import ALGORITHMS
        >>> now, before = torch.tensor([0.5, 0.1, 0.5]).log(), torch.tensor([0.2, 0.1, 0.2]).log()
        >>> terms = losses.Terms(
        ...     logp_M=now,
        ...     old_logp_M=before,
        ...     advantage_M=torch.tensor([1.0, 1.0, -1.0]),
        ...     segment_M=torch.arange(3),
        ...     segments=3,
        ... )
        >>> ALGORITHMS["grpo"].cut(terms).tolist(), ALGORITHMS["cispo"].cut(terms).tolist()
        ([True, False, False], [False, False, False])
        """
        import torch

        if not fact(self.surrogate, "reads_logp"):
            return torch.zeros_like(terms.advantage_M, dtype=torch.bool)
        with torch.enable_grad():
            logp_M = terms.logp_M.detach().requires_grad_()
            terms = replace(terms, logp_M=logp_M)
            terms = replace(terms, log_ratio_M=self.log_ratio(terms))
            (gradient_M,) = torch.autograd.grad(self.surrogate(terms).sum(), logp_M)
        return (gradient_M == 0.0) & (terms.advantage_M != 0.0)

    def with_bonus(self, coefficient: float, entropy: float) -> tuple[Algorithm, float]:
        """Return the algorithm of an optimizer step whose completions were drawn with a mean
        entropy, and the coefficient after it.

        `c += step if H <= target else -step`, within 0 and `entropy_bonus`; the bonus is c where H
        <= target, else 0 (Skywork-OR1, 2505.22312).

        >>> from groupwise.algorithms.table import ALGORITHMS
        >>> row = replace(
        ...     ALGORITHMS["grpo"], entropy_target=0.5, entropy_step=0.25, entropy_bonus=0.375
        ... )
        >>> for coefficient, entropy in ((0.0, 0.4), (0.25, 0.5), (0.375, 0.6)):
        ...     step, after = row.with_bonus(coefficient, entropy)
        ...     print(step.entropy_bonus, after)
        0.25 0.25
        0.375 0.375
        0.0 0.125
        """
        assert self.entropy_target is not None
        if entropy <= self.entropy_target:
            after = min(max(coefficient + self.entropy_step, 0.0), self.entropy_bonus)
            return replace(self, entropy_bonus=after, entropy_target=None), after
        after = min(max(coefficient - self.entropy_step, 0.0), self.entropy_bonus)
        return replace(self, entropy_bonus=0.0, entropy_target=None), after

    def loss(self, terms: losses.Terms) -> Tensor:
        """Return the loss of each token (M,), unweighted: surrogate x off-policy mask x
        high-entropy mask x mismatch weight + beta KL.

        The KL is never masked: what is not pushed by rewards must still not drift.  Its ratio is
        the token's at every level.
        """
        terms = replace(terms, log_ratio_M=self.log_ratio(terms))
        loss_M = self.surrogate(terms)
        if self.off_policy_delta is not None:
            loss_M = loss_M * losses.off_policy_keep(terms, delta=self.off_policy_delta)
        if self.entropy_quantile > 0.0:
            assert terms.forking_M is not None, (
                "a high-entropy mask is decided before the first micro-batch"
            )
            loss_M = loss_M * terms.forking_M
        if terms.mismatch is not None and not fact(self.surrogate, "folds_mismatch"):
            loss_M = loss_M * terms.mismatch.weight_M
        if self.loss_beta > 0.0:
            assert terms.reference_logp_M is not None, (
                f"{self.name} with beta {self.beta} needs the reference's log-probs"
            )
            token_ratio_M = terms.logp_M - terms.old_logp_M
            kl_M = self.kl(terms.logp_M, terms.reference_logp_M, token_ratio_M)
            loss_M = loss_M + self.loss_beta * kl_M
        return loss_M

    def bonus(self, terms: losses.Terms, tokens: Tensor | float) -> Tensor:
        """Return `entropy_bonus x mean entropy`, a scalar part of the step's, to be subtracted from
        the loss.

        The entropy has a normalisation of its own, the same for every algorithm: `tokens`, the
        number of tokens that it is the mean of, counted over the whole step and all ranks (all
        trained ones, or those that a high-entropy mask keeps).
        """
        assert terms.entropy_M is not None, "an entropy bonus needs entropies"
        kept_M = terms.forking_M if self.entropy_quantile > 0.0 else None
        return self.entropy_bonus * losses.mean_entropy(terms.entropy_M, tokens, kept_M)


def _reads_states(term: Callable[..., Any]) -> bool:
    """Return True if an extra term reads a critic's values or a teacher's distributions."""
    return not {"value", "teacher"}.isdisjoint(fact(term, "reads"))


def masked(group: RolloutGroup) -> RolloutGroup:
    """Return the group, no token trained of completions that a limit ended."""
    rollouts = []
    for rollout in group.rollouts:
        if rollout.truncated:
            rollout = replace(rollout, trained=np.zeros(len(rollout), dtype=bool))
        rollouts.append(rollout)
    return replace(group, rollouts=tuple(rollouts))
