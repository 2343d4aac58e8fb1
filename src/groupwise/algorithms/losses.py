"""Per-token policy losses and the other losses of post-training.  Pure functions of tensors: no
model, no setting, no collective.

Everything is minimised, unweighted, and free of device synchronisation; log-probabilities are in
nats.  In the order of the file: ratio levels (how far the policy has moved from the old policy),
surrogates (what is done with ratio and advantage), extra terms (a critic's loss, a teacher's),
masks and corrections.  `Algorithm.loss` puts them together with a KL (`kl_estimators.py`).

M trained tokens of one micro-batch   S its completions   R pairs or completions
l log-prob under the policy   old the same under the old policy, that of before the step
rho = exp(l - old)   ref the same under the reference
b the same under the behavior policy, which sampled: the old one, unless another engine or older
weights sampled
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le, Lt

from groupwise.algorithms.parts import (
    Divergence,
    MaybeAboveOne,
    MaybeCount,
    MaybeNotNegative,
    NotNegative,
    Positive,
    Ratio,
    Share,
    Surrogate,
    Term,
)

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 20.0
"""Nats beyond which an exponential continues as its tangent, so that neither a value nor a gradient
overflows in float32.
"""
FLOOR = math.log(1e-8)
"""VESPO's lower bound of a sequence's log-ratio, nats."""


class Mismatch(NamedTuple):
    """How likely the trainer finds what another engine sampled: constants that correct the loss
    (see `Correction`).
    """

    weight_M: Tensor
    """Factor of each token's loss."""
    log_weight_S: Tensor
    """Log of each completion's factor, nats, for surrogates that weigh whole completions."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Terms:
    """What a loss sees.  Completions never straddle micro-batches, so sums over a segment are sums
    over a completion.
    """

    logp_M: Tensor
    """l, differentiable."""
    old_logp_M: Tensor
    """old."""
    advantage_M: Tensor
    segment_M: Tensor
    """int64, the completion of each token, 0 .. segments - 1."""
    segments: int
    """S: at least the number of completions; a number that no token has is an empty segment."""
    log_ratio_M: Tensor = None  # type: ignore[assignment]
    """Log of the importance ratio at the algorithm's level, differentiable.  Default: the token's
    own, `l - old`.
    """
    reference_logp_M: Tensor | None = None
    """ref: only with a KL in the loss."""
    entropy_M: Tensor | None = None
    """Differentiable in an update, a constant where its metrics are computed; else only with an
    entropy bonus.
    """
    forking_M: Tensor | None = None
    """bool: the tokens that a high-entropy mask keeps, only with one (`forking`)."""
    behavior_logp_M: Tensor = None  # type: ignore[assignment]
    """b.  Default: `old`."""
    mismatch: Mismatch | None = None
    """What corrects the loss where `behavior_logp_M` is not `old_logp_M`, else None."""
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    """Further columns (M,): `value` and `return` with a critic, and what a term `reads`."""
    value_M: Tensor | None = None
    """The critic's value now, differentiable: for terms that read `value`."""
    divergence: Callable[[Callable[..., Tensor]], Tensor] | None = None
    """Gives a function of the student's and the teacher's log-probs (C, V) for every token (M,):
    for terms that read `teacher`.
    """

    def __post_init__(self) -> None:
        if self.log_ratio_M is None:
            object.__setattr__(self, "log_ratio_M", self.logp_M - self.old_logp_M)
        if self.behavior_logp_M is None:
            object.__setattr__(self, "behavior_logp_M", self.old_logp_M)


# ---- ratio levels: (logp_M, old_logp_M, segment_M, segments) -> log_ratio_M


@dataclass(frozen=True)
class TokenRatio(Ratio):
    """`l - old`: every token has its own ratio (GRPO, PPO)."""

    per_token = True

    def __call__(
        self, logp_M: Tensor, old_logp_M: Tensor, segment_M: Tensor, segments: int
    ) -> Tensor:
        return logp_M - old_logp_M


@dataclass(frozen=True)
class SequenceMeanRatio(Ratio):
    """`sum_t (l - old) / n`: the geometric mean of a completion's token ratios, for all its tokens
    (GSPO, 2507.18071).
    """

    def __call__(
        self, logp_M: Tensor, old_logp_M: Tensor, segment_M: Tensor, segments: int
    ) -> Tensor:
        return segment_mean(logp_M - old_logp_M, segment_M, segments)[segment_M]


@dataclass(frozen=True)
class SequenceSumRatio(Ratio):
    """`sum_t (l - old)`: the ratio of the whole completion (RLOO, VESPO)."""

    def __call__(
        self, logp_M: Tensor, old_logp_M: Tensor, segment_M: Tensor, segments: int
    ) -> Tensor:
        return segment_sum(logp_M - old_logp_M, segment_M, segments)[segment_M]


@dataclass(frozen=True)
class SequenceTokenRatio(Ratio):
    """Value of `sequence_mean`, gradient of `token`: `sg[s] exp(l - sg[l])` (GSPO-token)."""

    def __call__(
        self, logp_M: Tensor, old_logp_M: Tensor, segment_M: Tensor, segments: int
    ) -> Tensor:
        return (
            SequenceMeanRatio()(logp_M.detach(), old_logp_M, segment_M, segments)
            + logp_M
            - logp_M.detach()
        )


# ---- surrogates: terms -> loss_M


@dataclass(frozen=True)
class Clipped(Surrogate):
    """PPO's pessimistic bound: `-min(rho A, clip(rho, 1 - low, 1 + high) A)` (1707.06347, eq. 7).

    Where A < 0 the ratio itself has no bound: `delta` caps it (two-sided clipping, 2505.07291), and
    `dual` caps what it can cost, `-max(., dual A)` (dual clip, 1912.09729).
    """

    low: Annotated[float, Ge(0.0), Lt(1.0)] = 0.2
    high: NotNegative = 0.2
    delta: MaybeAboveOne = None
    dual: MaybeAboveOne = None
    per_token = True

    def __call__(self, terms: Terms) -> Tensor:
        ratio_M = guarded_exp(terms.log_ratio_M)
        bounded_M = ratio_M.clamp(1 - self.low, 1 + self.high)
        if self.delta is not None:
            ratio_M = ratio_M.clamp(max=self.delta)
        gain_M = (ratio_M * terms.advantage_M).minimum(bounded_M * terms.advantage_M)
        if self.dual is not None:
            gain_M = gain_M.maximum(self.dual * terms.advantage_M).where(
                terms.advantage_M < 0, gain_M
            )
        return -gain_M


@dataclass(frozen=True)
class Cispo(Surrogate):
    """`-sg[min(rho, cap)] A l`: the weight is capped, the gradient of no token is dropped
    (MiniMax-M1, 2506.13585).

    `cap` bounds the ratio itself; it is not an excess over 1.
    """

    cap: Annotated[float, Gt(1.0)] = 5.0
    per_token = True

    def __call__(self, terms: Terms) -> Tensor:
        return (
            -guarded_exp(terms.log_ratio_M.detach()).clamp(max=self.cap)
            * terms.advantage_M
            * terms.logp_M
        )


@dataclass(frozen=True)
class Sapo(Surrogate):
    """`-(4 / tau) sigmoid(tau (rho - 1)) A`: a soft trust region, tau by the sign of A (SAPO,
    2511.20347).
    """

    tau_pos: Positive = 1.0
    tau_neg: Positive = 1.05
    per_token = True

    def __call__(self, terms: Terms) -> Tensor:
        tau_M = terms.logp_M.new_full(terms.logp_M.shape, self.tau_neg).masked_fill(
            terms.advantage_M > 0, self.tau_pos
        )
        return (
            -4
            / tau_M
            * (tau_M * (guarded_exp(terms.log_ratio_M) - 1)).sigmoid()
            * terms.advantage_M
        )


@dataclass(frozen=True)
class Vespo(Surrogate):
    """`-phi A l` with `vespo_weight` phi, (k, lam) by the sign of A (VESPO, 2602.10693)."""

    k_pos: NotNegative = 2.0
    lam_pos: Positive = 3.0
    k_neg: NotNegative = 3.0
    lam_neg: Positive = 2.0
    ratio_level = "sequence_sum"
    folds_mismatch = True

    def __call__(self, terms: Terms) -> Tensor:
        gain_M = terms.advantage_M >= 0
        k_M = terms.logp_M.new_full(terms.logp_M.shape, self.k_neg).masked_fill(gain_M, self.k_pos)
        lam_M = terms.logp_M.new_full(terms.logp_M.shape, self.lam_neg).masked_fill(
            gain_M, self.lam_pos
        )
        return -vespo_weight(terms, k_M, lam_M) * terms.advantage_M * terms.logp_M


def vespo_weight(terms: Terms, k_M: Tensor, lam_M: Tensor) -> Tensor:
    """`phi = exp(lam + k s - lam exp(s))`, a constant, 1 at s = 0; s = log-ratio of the completion,
    sampler mismatch included.
    """
    log_ratio_M = (terms.logp_M.detach() - terms.old_logp_M).clamp(-LIMIT, LIMIT)
    total_S = segment_sum(log_ratio_M, terms.segment_M, terms.segments)
    if terms.mismatch is not None:
        total_S = total_S + terms.mismatch.log_weight_S
    s_M = total_S.clamp(FLOOR, LIMIT)[terms.segment_M]
    return (lam_M + k_M * s_M - lam_M * s_M.exp()).exp().nan_to_num(nan=0.0, posinf=0.0)


@dataclass(frozen=True)
class Geometric(Surrogate):
    """`-A x geometric mean of the token ratios`, each clipped on the side that A pushes it to
    (GMPO, 2507.20673).

    `clip` is in nats: ratios between e^-clip and e^clip.  An outlier among n tokens moves the mean
    by its n-th root only."""

    clip: Positive = 0.4
    ratio_level = "token"

    def __call__(self, terms: Terms) -> Tensor:
        log_ratio_M = terms.logp_M - terms.old_logp_M
        log_ratio_M = log_ratio_M.clamp(max=self.clip).where(
            terms.advantage_M > 0, log_ratio_M.clamp(min=-self.clip)
        )
        return (
            -guarded_exp(segment_mean(log_ratio_M, terms.segment_M, terms.segments))[
                terms.segment_M
            ]
            * terms.advantage_M
        )


@dataclass(frozen=True)
class Reinforce(Surrogate):
    """`-A l`: the plain policy gradient, no importance ratio."""

    per_token = True
    ratio_level = "token"

    def __call__(self, terms: Terms) -> Tensor:
        return -terms.advantage_M * terms.logp_M


@dataclass(frozen=True)
class Importance(Surrogate):
    """`-rho A`, dropped where the token's probability lies more than `drop` below the old policy's:
    too stale.

    The unbiased policy gradient from samples of another distribution, and its staleness bound
    (prime-rl's distillation loss)."""

    drop: Annotated[float, Gt(0.0), Le(1.0)] = 0.2
    per_token = True

    def __call__(self, terms: Terms) -> Tensor:
        fresh_M = terms.logp_M.detach().exp() - terms.old_logp_M.exp() >= -self.drop
        return -guarded_exp(terms.log_ratio_M) * terms.advantage_M * fresh_M


@dataclass(frozen=True)
class Silent(Surrogate):
    """0: advantages have no effect."""

    per_token = True
    ratio_level = "token"
    reads_logp = False

    def __call__(self, terms: Terms) -> Tensor:
        return 0.0 * terms.logp_M


# ---- extra terms: terms -> loss_M


@dataclass(frozen=True)
class ValueLoss(Term):
    """`0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)`: what a critic learns.

    V is the value now, V_old the value before the step's first update, after a new head's bias was
    moved, R the return, NaN where nothing is to be learnt.
    """

    clip: MaybeNotNegative = 0.2
    coefficient: NotNegative = 0.1
    reads = ("value",)

    def __call__(self, terms: Terms) -> Tensor:
        assert terms.value_M is not None
        before_M, return_M = terms.signals["old_value"], terms.signals["return"]
        known_M = ~return_M.isnan()
        loss_M = clipped_value(
            terms.value_M, before_M, return_M.where(known_M, before_M), clip=self.clip
        )
        return self.coefficient * (known_M * loss_M)


def clipped_value(
    value_M: Tensor, before_M: Tensor, return_M: Tensor, *, clip: NotNegative | None = 0.2
) -> Tensor:
    """The formula of `ValueLoss`: a value gains nothing by moving further than `clip` from where it
    was.

    It is the pessimistic bound of PPO's surrogate, as in OpenAI's baselines and TRL.  None: `0.5 (V
    - R)^2`.
    """
    error_M = (value_M - return_M).square()
    if clip is not None:
        bounded_M = value_M.maximum(before_M - clip).minimum(before_M + clip)
        error_M = error_M.maximum((bounded_M - return_M).square())
    return 0.5 * error_M


@dataclass(frozen=True)
class Jsd(Divergence):
    """`beta KL(p || m) + (1 - beta) KL(q || m)`, `m = (1 - beta) q + beta p`: the generalised
    Jensen-Shannon divergence (GKD, 2306.13649, eq. 1), `ops.distillation.jsd`.
    """

    beta: Share = 1.0
    top_k: MaybeCount = None

    def __call__(self, log_q_CV: Tensor, log_p_CV: Tensor) -> Tensor:
        from groupwise.ops.distillation import jsd

        return jsd(log_q_CV, log_p_CV, beta=self.beta, top_k=self.top_k)


@dataclass(frozen=True)
class TeacherDivergence(Term):
    """The divergence of the policy's next token from a teacher's, over the whole vocabulary.

    With `importance` a token counts by `sg[exp(l - b)]`: how likely the policy finds it, over how
    likely it was drawn."""

    function: Callable[..., Any] = Jsd()
    importance: bool = False
    reads = ("teacher",)

    def __call__(self, terms: Terms) -> Tensor:
        assert terms.divergence is not None
        loss_M = terms.divergence(self.function)
        if not self.importance:
            return loss_M
        importance_M = guarded_exp(terms.logp_M.detach() - terms.behavior_logp_M)
        return loss_M * importance_M


# ---- masks and corrections: constants that multiply the surrogate


def off_policy_keep(terms: Terms, *, delta: float) -> Tensor:
    """bool (M,): False where A < 0 and the completion's mean of `b - l` exceeds `delta` nats
    (DeepSeek-V3.2, 2512.02556).

    Pushing down further what the policy has already left teaches nothing and destabilises.
    """
    drift_S = segment_mean(
        terms.behavior_logp_M - terms.logp_M.detach(), terms.segment_M, terms.segments
    )
    return (terms.advantage_M >= 0) | (drift_S <= delta)[terms.segment_M]


def entropy_threshold(entropy_N: Tensor, quantile: float) -> Tensor:
    """Scalar: the linear-interpolated `quantile` of all trained tokens' entropies, nats; infinite
    if there are none.

    `torch.quantile` does the same for at most 16 million tokens.
    """
    if entropy_N.numel() == 0:
        return entropy_N.new_tensor(math.inf)
    sorted_N = entropy_N.detach().sort().values
    place = quantile * (entropy_N.numel() - 1)
    below, above = sorted_N[math.floor(place)], sorted_N[math.ceil(place)]
    return below.lerp(above, place - math.floor(place))


TIE, TIE_SHARE = 1e-5, 1e-3
"""Nats, and the share of an entropy, within which two entropies count as equal; the smaller of
both.  So much is float32's rounding; bfloat16's is more, and tears ties apart that lie at the
threshold."""


def forking(entropy_N: Tensor, quantile: float) -> Tensor:
    """bool (N,): the tokens whose entropy is at or above the `quantile` of them all (2506.01939).

    Decide it over the whole optimizer step, once: a threshold for each micro-batch would make the
    update depend on the cut.  Ties are the rule: the first tokens of a group have one distribution,
    and so have all tokens of equal completions.  They are kept or left together, though each is
    rounded in its own way: a token that lies below by no more than rounding is kept, too.
    """
    threshold = entropy_threshold(entropy_N, quantile)
    return entropy_N.detach() >= threshold - (threshold * TIE_SHARE).clamp(0.0, TIE)


@dataclass(frozen=True)
class Correction:
    """`w = exp(old - b)`: corrects for an engine that computes other probabilities than the
    trainer.

    It is a section of a recipe too, `rollout.engine.correct`.  The share that `mask` drops is
    logged (`diagnostics.dropped`)."""

    level: Literal["token", "sequence_sum", "sequence_mean"] = "token"
    """A weight per token, or per completion: its tokens' product or geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Bound the weight to [low, high], or make it 0 outside."""
    low: NotNegative = 0.0
    """Smallest weight."""
    high: Positive = 2.0
    """Largest weight."""

    def __call__(
        self, old_logp_M: Tensor, behavior_logp_M: Tensor, segment_M: Tensor, segments: int
    ) -> Mismatch:
        levels = {
            "token": TokenRatio(),
            "sequence_sum": SequenceSumRatio(),
            "sequence_mean": SequenceMeanRatio(),
        }
        weight_M = guarded_exp(
            levels[self.level](old_logp_M, behavior_logp_M, segment_M, segments)
        ).detach()
        if self.mode == "truncate":
            weight_M = weight_M.clamp(self.low, self.high)
        else:
            weight_M = weight_M.where((weight_M >= self.low) & (weight_M <= self.high), 0.0)
        if self.level == "token":
            return token_mismatch(weight_M, segment_M, segments)
        return Mismatch(weight_M, segment_mean(_log_weight(weight_M), segment_M, segments))


def token_mismatch(weight_M: Tensor, segment_M: Tensor, segments: int) -> Mismatch:
    """Return the mismatch of token weights that are already known; a completion's weight is their
    product.
    """
    return Mismatch(weight_M, segment_sum(_log_weight(weight_M), segment_M, segments))


# ---- entropy bonus


def mean_entropy(entropy_M: Tensor, tokens: Tensor | float, keep_M: Tensor | None = None) -> Tensor:
    """Scalar `sum(H) / tokens`, nats: this micro-batch's part of the step's mean entropy.

    `tokens` counts the whole step's trained tokens, or those of them that a high-entropy mask
    `keep_M` keeps.
    """
    return (entropy_M if keep_M is None else entropy_M * keep_M).sum() / tokens


# ---- building blocks


def guarded_exp(x: Tensor) -> Tensor:
    """exp(x) up to `LIMIT`, its tangent above: value and gradient stay finite, monotone and
    continuous.

    `exp` alone overflows float32 at 89 nats, and then a clipped token's gradient is 0 x inf = NaN.
    """
    return x.clamp(max=LIMIT).exp() * (1 + (x - LIMIT).relu())


def segment_sum(x_M: Tensor, segment_M: Tensor, segments: int) -> Tensor:
    """(S,): the sum over each completion's tokens; 0 for one without tokens."""
    return x_M.new_zeros(segments).index_add(0, segment_M, x_M)


def segment_mean(x_M: Tensor, segment_M: Tensor, segments: int) -> Tensor:
    """(S,): the mean over each completion's tokens; 0 for one without tokens."""
    return segment_sum(x_M, segment_M, segments) / segment_sum(
        x_M.new_ones(x_M.shape), segment_M, segments
    ).clamp(min=1.0)


def _log_weight(weight_M: Tensor) -> Tensor:
    return weight_M.log().clamp(FLOOR, LIMIT)
