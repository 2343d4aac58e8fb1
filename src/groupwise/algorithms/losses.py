"""Per-token policy losses and the other losses of post-training.  Pure functions of tensors: no model, no setting, no collective.

Everything is minimised, unweighted, and free of device synchronisation; log-probabilities are in nats.  A loss is made of a
ratio level (how far the policy has moved from the one that sampled), a surrogate (what is done with ratio and advantage), and a
KL estimator (`kl_estimators.py`).

M trained tokens of one micro-batch   S its completions   R pairs or completions   l log-prob under the policy
b the same under the behaviour policy, which sampled   ref the same under the reference   rho = exp(l - b)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor
from torch.nn.functional import logsigmoid

from groupwise.algorithms.parts import declares

LIMIT = 20.0
"""Nats beyond which an exponential continues as its tangent, so that neither a value nor a gradient overflows in float32."""
FLOOR = math.log(1e-8)
"""VESPO's lower bound of a sequence's log-ratio, nats."""

NotNegative = Annotated[float, Ge(0.0)]
Positive = Annotated[float, Gt(0.0)]
AboveOne = Annotated[float, Gt(1.0)]


class Mismatch(NamedTuple):
    """How likely the trainer finds what another engine sampled: constants that correct the loss (see `mismatch`)."""

    weight_M: Tensor
    """Factor of each token's loss."""
    log_weight_S: Tensor
    """Log of each completion's factor, nats, for surrogates that weigh whole completions."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Terms:
    """What a loss sees.  Completions never straddle micro-batches, so sums over a segment are sums over a completion."""

    logp_M: Tensor
    """l, differentiable."""
    behavior_logp_M: Tensor
    """b."""
    advantage_M: Tensor
    segment_M: Tensor
    """int64, the completion of each token, 0 .. segments - 1."""
    segments: int
    """S."""
    log_ratio_M: Tensor = None  # type: ignore[assignment]
    """Log of the importance ratio at the algorithm's level, differentiable.  Default: the token's own, `l - b`."""
    reference_logp_M: Tensor | None = None
    """ref: only with a KL in the loss."""
    entropy_M: Tensor | None = None
    """Differentiable; only with an entropy bonus."""
    forking_M: Tensor | None = None
    """bool: the tokens that a high-entropy mask keeps, only with one (`forking`)."""
    sampler_logp_M: Tensor | None = None
    """The log-probs of the engine that sampled.  None: they are b."""
    mismatch: Mismatch | None = None
    """Only then: what corrects for it."""

    def __post_init__(self) -> None:
        if self.log_ratio_M is None:
            object.__setattr__(self, "log_ratio_M", self.logp_M - self.behavior_logp_M)


RatioLevel = Callable[[Tensor, Tensor, Tensor, int], Tensor]
Surrogate = Callable[..., Tensor]


# ---- ratio levels: (logp_M, behavior_logp_M, segment_M, segments) -> log_ratio_M ---------------------------------------------


@declares(per_token=True)
def token(logp_M: Tensor, behavior_logp_M: Tensor, segment_M: Tensor, segments: int) -> Tensor:
    """`l - b`: every token has its own ratio (GRPO, PPO)."""
    return logp_M - behavior_logp_M


def sequence_mean(logp_M: Tensor, behavior_logp_M: Tensor, segment_M: Tensor, segments: int) -> Tensor:
    """`sum_t (l - b) / n`: the geometric mean of a completion's token ratios, for all its tokens (GSPO, 2507.18071)."""
    return segment_mean(logp_M - behavior_logp_M, segment_M, segments)[segment_M]


def sequence_sum(logp_M: Tensor, behavior_logp_M: Tensor, segment_M: Tensor, segments: int) -> Tensor:
    """`sum_t (l - b)`: the ratio of the whole completion (RLOO, VESPO)."""
    return segment_sum(logp_M - behavior_logp_M, segment_M, segments)[segment_M]


def sequence_token(logp_M: Tensor, behavior_logp_M: Tensor, segment_M: Tensor, segments: int) -> Tensor:
    """Value of `sequence_mean`, gradient of `token`: `sg[s] exp(l - sg[l])` (GSPO-token)."""
    return sequence_mean(logp_M.detach(), behavior_logp_M, segment_M, segments) + logp_M - logp_M.detach()


# ---- surrogates: (terms, settings) -> loss_M ---------------------------------------------------------------------------------


@declares(per_token=True)
def clipped(
    terms: Terms,
    *,
    low: Annotated[float, Ge(0.0), Lt(1.0)] = 0.2,
    high: NotNegative = 0.2,
    delta: AboveOne | None = None,
    dual: AboveOne | None = None,
) -> Tensor:
    """PPO's pessimistic bound: `-min(rho A, clip(rho, 1 - low, 1 + high) A)` (1707.06347, eq. 7).

    Where A < 0 the ratio itself has no bound: `delta` caps it (two-sided clipping, 2505.07291), and `dual` caps what it can
    cost, `-max(., dual A)` (dual clip, 1912.09729).
    """
    ratio_M = guarded_exp(terms.log_ratio_M)
    bounded_M = ratio_M.clamp(1 - low, 1 + high)
    if delta is not None:
        ratio_M = ratio_M.clamp(max=delta)
    gain_M = torch.minimum(ratio_M * terms.advantage_M, bounded_M * terms.advantage_M)
    if dual is not None:
        gain_M = torch.where(terms.advantage_M < 0, torch.maximum(gain_M, dual * terms.advantage_M), gain_M)
    return -gain_M


@declares(per_token=True)
def cispo(terms: Terms, *, cap: AboveOne = 5.0) -> Tensor:
    """`-sg[min(rho, cap)] A l`: the weight is capped, the gradient of no token is dropped (MiniMax-M1, 2506.13585).

    `cap` bounds the ratio itself; it is not an excess over 1.
    """
    return -guarded_exp(terms.log_ratio_M.detach()).clamp(max=cap) * terms.advantage_M * terms.logp_M


@declares(per_token=True)
def sapo(terms: Terms, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05) -> Tensor:
    """`-(4 / tau) sigmoid(tau (rho - 1)) A`: a soft trust region, tau by the sign of A (SAPO, 2511.20347)."""
    tau_M = torch.full_like(terms.logp_M, tau_neg).masked_fill(terms.advantage_M > 0, tau_pos)
    return -4 / tau_M * torch.sigmoid(tau_M * (guarded_exp(terms.log_ratio_M) - 1)) * terms.advantage_M


@declares(ratio_level="sequence_sum", folds_mismatch=True)
def vespo(
    terms: Terms,
    *,
    k_pos: NotNegative = 2.0,
    lam_pos: Positive = 3.0,
    k_neg: NotNegative = 3.0,
    lam_neg: Positive = 2.0,
) -> Tensor:
    """`-phi A l` with `vespo_weight` phi, (k, lam) by the sign of A (VESPO, 2602.10693)."""
    gain_M = terms.advantage_M >= 0
    k_M = torch.full_like(terms.logp_M, k_neg).masked_fill(gain_M, k_pos)
    lam_M = torch.full_like(terms.logp_M, lam_neg).masked_fill(gain_M, lam_pos)
    return -vespo_weight(terms, k_M, lam_M) * terms.advantage_M * terms.logp_M


def vespo_weight(terms: Terms, k_M: Tensor, lam_M: Tensor) -> Tensor:
    """`phi = exp(lam + k s - lam exp(s))`, a constant, 1 at s = 0; s = log-ratio of the completion, sampler mismatch included."""
    log_ratio_M = (terms.logp_M.detach() - terms.behavior_logp_M).clamp(-LIMIT, LIMIT)
    total_S = segment_sum(log_ratio_M, terms.segment_M, terms.segments)
    if terms.mismatch is not None:
        total_S = total_S + terms.mismatch.log_weight_S
    s_M = total_S.clamp(FLOOR, LIMIT)[terms.segment_M]
    return (lam_M + k_M * s_M - lam_M * s_M.exp()).exp().nan_to_num(nan=0.0, posinf=0.0)


@declares(ratio_level="token")
def geometric(terms: Terms, *, clip: Positive = 0.4) -> Tensor:
    """`-A x geometric mean of the token ratios`, each clipped on the side that A pushes it to (GMPO, 2507.20673).

    `clip` is in nats: ratios between e^-clip and e^clip.  An outlier among n tokens moves the mean by its n-th root only.
    """
    log_ratio_M = terms.logp_M - terms.behavior_logp_M
    log_ratio_M = torch.where(terms.advantage_M > 0, log_ratio_M.clamp(max=clip), log_ratio_M.clamp(min=-clip))
    return -guarded_exp(segment_mean(log_ratio_M, terms.segment_M, terms.segments))[terms.segment_M] * terms.advantage_M


@declares(per_token=True, ratio_level="token")
def reinforce(terms: Terms) -> Tensor:
    """`-A l`: the plain policy gradient, no importance ratio."""
    return -terms.advantage_M * terms.logp_M


@declares(per_token=True)
def importance(terms: Terms, *, drop: Annotated[float, Gt(0.0), Le(1.0)] = 0.2) -> Tensor:
    """`-rho A`, dropped where the token's probability has fallen by more than `drop` since it was drawn: too stale to teach.

    The unbiased policy gradient from samples of another distribution, and its staleness bound (prime-rl's distillation loss).
    """
    fresh_M = terms.logp_M.detach().exp() - terms.behavior_logp_M.exp() >= -drop
    return -guarded_exp(terms.log_ratio_M) * terms.advantage_M * fresh_M


@declares(per_token=True, ratio_level="token", reads_logp=False)
def silent(terms: Terms) -> Tensor:
    """0: nothing is learnt from advantages."""
    return 0.0 * terms.logp_M


# ---- masks and corrections: constants that multiply the surrogate ------------------------------------------------------------


def off_policy_keep(terms: Terms, *, delta: float) -> Tensor:
    """bool (M,): False where A < 0 and the completion's mean of `b - l` exceeds `delta` nats (DeepSeek-V3.2, 2512.02556).

    Pushing down further what the policy has already left teaches nothing and destabilises.  b is the sampler's own log-prob.
    """
    sampler_M = terms.behavior_logp_M if terms.sampler_logp_M is None else terms.sampler_logp_M
    drift_S = segment_mean(sampler_M - terms.logp_M.detach(), terms.segment_M, terms.segments)
    return (terms.advantage_M >= 0) | (drift_S <= delta)[terms.segment_M]


def entropy_threshold(entropy_N: Tensor, quantile: float) -> Tensor:
    """Scalar: the linear-interpolated `quantile` of all trained tokens' entropies, nats; infinite if there are none.

    `torch.quantile` does the same for at most 16 million tokens.
    """
    if entropy_N.numel() == 0:
        return entropy_N.new_tensor(math.inf)
    sorted_N = entropy_N.detach().sort().values
    place = quantile * (entropy_N.numel() - 1)
    below, above = sorted_N[math.floor(place)], sorted_N[math.ceil(place)]
    return torch.lerp(below, above, place - math.floor(place))


TIE, TIE_SHARE = 1e-5, 1e-3
"""Nats, and the share of an entropy, within which two entropies count as equal; the smaller of both.  So much is float32's
rounding; bfloat16's is more, and tears ties apart that lie at the threshold."""


def forking(entropy_N: Tensor, quantile: float) -> Tensor:
    """bool (N,): the tokens whose entropy is at or above the `quantile` of them all (2506.01939).

    Decide it over the whole optimizer step, once: a threshold for each micro-batch would make the update depend on the cut.  Ties
    are the rule: the first tokens of a group have one distribution, and so have all tokens of equal completions.  They are kept or
    left together, though each is rounded in its own way: what lies below by no more than rounding does is kept too.
    """
    threshold = entropy_threshold(entropy_N, quantile)
    return entropy_N.detach() >= threshold - (threshold * TIE_SHARE).clamp(0.0, TIE)


def mismatch(
    behavior_logp_M: Tensor,
    sampler_logp_M: Tensor,
    segment_M: Tensor,
    segments: int,
    *,
    level: Literal["token", "sequence_sum", "sequence_mean"] = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    low: NotNegative = 0.0,
    high: Positive = 2.0,
) -> Mismatch:
    """`w = exp(b - sampler)`: corrects for an engine that computes other probabilities than the trainer.

    Per token, or per completion (product, or geometric mean, of its token ratios).  `truncate` bounds w to [low, high], `mask`
    makes it 0 outside: the dropped share is to be logged (`diagnostics.dropped`).
    """
    levels = {"token": token, "sequence_sum": sequence_sum, "sequence_mean": sequence_mean}
    weight_M = guarded_exp(levels[level](behavior_logp_M, sampler_logp_M, segment_M, segments)).detach()
    if mode == "truncate":
        weight_M = weight_M.clamp(low, high)
    else:
        weight_M = torch.where((weight_M >= low) & (weight_M <= high), weight_M, 0.0)
    if level == "token":
        return token_mismatch(weight_M, segment_M, segments)
    return Mismatch(weight_M, segment_mean(_log_weight(weight_M), segment_M, segments))


def token_mismatch(weight_M: Tensor, segment_M: Tensor, segments: int) -> Mismatch:
    """The mismatch of token weights that are already known; a completion's weight is their product."""
    return Mismatch(weight_M, segment_sum(_log_weight(weight_M), segment_M, segments))


# ---- value function ----------------------------------------------------------------------------------------------------------


def clipped_value(value_M: Tensor, before_M: Tensor, return_M: Tensor, *, clip: NotNegative | None = 0.2) -> Tensor:
    """`0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)`: the value moves at most `clip` from where it was (PPO).

    The pessimistic bound of the policy's surrogate, as in OpenAI's baselines and TRL.  None: `0.5 (V - R)^2`.
    """
    error_M = (value_M - return_M).square()
    if clip is not None:
        bounded_M = torch.minimum(torch.maximum(value_M, before_M - clip), before_M + clip)
        error_M = torch.maximum(error_M, (bounded_M - return_M).square())
    return 0.5 * error_M


# ---- entropy bonus -----------------------------------------------------------------------------------------------------------


def mean_entropy(entropy_M: Tensor, tokens: Tensor | float, keep_M: Tensor | None = None) -> Tensor:
    """Scalar `sum(H) / tokens`, nats: this micro-batch's part of the step's mean entropy.

    `tokens` counts the whole step's trained tokens, or those of them that a high-entropy mask `keep_M` keeps.
    """
    return (entropy_M if keep_M is None else entropy_M * keep_M).sum() / tokens


# ---- reward model, preferences -----------------------------------------------------------------------------------------------


def bradley_terry(chosen_R: Tensor, rejected_R: Tensor, margin_R: Tensor | None = None, *, centering: float = 0.0) -> Tensor:
    """`-log sigmoid(s_c - s_r - margin) + centering (s_c + s_r)^2` per pair of scores.

    Pairs: 1706.03741; margin: 2307.09288, eq. 2; centering, which pins the scores' free constant: 2312.09244.
    """
    gap_R = chosen_R - rejected_R if margin_R is None else chosen_R - rejected_R - margin_R
    return -logsigmoid(gap_R) + centering * (chosen_R + rejected_R).square()


def dpo(chosen_R: Tensor, rejected_R: Tensor, chosen_reference_R: Tensor, rejected_reference_R: Tensor, *, beta: float) -> Tensor:
    """`-log sigmoid(beta [(l_c - ref_c) - (l_r - ref_r)])` per pair, on sums over completion tokens (DPO, 2305.18290, eq. 7)."""
    return -logsigmoid(beta * ((chosen_R - chosen_reference_R) - (rejected_R - rejected_reference_R)))


def ipo(chosen_R: Tensor, rejected_R: Tensor, chosen_reference_R: Tensor, rejected_reference_R: Tensor, *, beta: float) -> Tensor:
    """`([(l_c - ref_c) - (l_r - ref_r)] - 1 / (2 beta))^2` per pair (IPO, 2310.12036, eq. 17).

    The target is a constant gap in nats, so the arguments are means over the completion's tokens: sums would ask long pairs for
    smaller gaps per token (the normalisation that IPO's authors used, and TRL uses).
    """
    return ((chosen_R - chosen_reference_R) - (rejected_R - rejected_reference_R) - 1 / (2 * beta)).square()


# ---- building blocks ---------------------------------------------------------------------------------------------------------


def guarded_exp(x: Tensor) -> Tensor:
    """exp(x) up to `LIMIT`, its tangent above: value and gradient stay finite, monotone and continuous.

    `exp` alone overflows float32 at 89 nats, and then a clipped token's gradient is 0 x inf = NaN.
    """
    return x.clamp(max=LIMIT).exp() * (1 + torch.relu(x - LIMIT))


def segment_sum(x_M: Tensor, segment_M: Tensor, segments: int) -> Tensor:
    """(S,): the sum over each completion's tokens; 0 for one without tokens."""
    return x_M.new_zeros(segments).index_add(0, segment_M, x_M)


def segment_mean(x_M: Tensor, segment_M: Tensor, segments: int) -> Tensor:
    """(S,): the mean over each completion's tokens; 0 for one without tokens."""
    return segment_sum(x_M, segment_M, segments) / segment_sum(torch.ones_like(x_M), segment_M, segments).clamp(min=1.0)


def _log_weight(weight_M: Tensor) -> Tensor:
    return weight_M.log().clamp(FLOOR, LIMIT)
