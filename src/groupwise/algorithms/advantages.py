"""Rewards of a group -> advantage of every completion token.

Every function takes the groups of a whole rollout and returns, per group and completion, a float64 array (n,).  Statistics are
float64.  Two rules hold everywhere: rewards that are all equal (max == min) give exactly 0, because the floating-point standard
deviation of eight times 0.1 is not 0; and an unscorable completion (reward NaN) enters no statistic and gets exactly 0.

G completions of a group   n tokens of a completion   K reward functions
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from groupwise.algorithms.kl_estimators import k3_numbers
from groupwise.errors import ConfigError
from groupwise.records import Rollout, Scored

Advantages = list[list[np.ndarray]]
Freedom = Literal[0, 1]
"""ddof of a standard deviation: 1 divides by n - 1 (TRL), 0 by n (the paper)."""
NotNegative = Annotated[float, Ge(0.0)]
Share = Annotated[float, Ge(0.0), Le(1.0)]


def standardized(
    groups: Sequence[Scored],
    *,
    ddof: Freedom = 1,
    eps: NotNegative = 1e-4,
    scale: Literal["group", "batch", "none"] = "group",
) -> Advantages:
    """`A_i = (r_i - mean) / (std + eps)`, mean and std over the completions of the prompt (GRPO, 2402.03300).

    `scale="batch"` divides by the std of all rewards of the batch (the mean stays the group's), `"none"` by nothing.
    For the rewards [1, 0, 0.5] the default gives +-0.9998, and `ddof=0, eps=0` gives +-1.2247.
    """
    deviations = [_deviation(_float64(group.reward)) for group in groups]
    if scale == "none":
        return _spread(groups, deviations)
    if scale == "batch":
        spreads = [_std(np.concatenate([_float64(group.reward) for group in groups]), ddof)] * len(groups)
    else:
        spreads = [_std(_float64(group.reward), ddof) for group in groups]
    return _spread(groups, [_over(deviation, std, eps) for deviation, std in zip(deviations, spreads, strict=True)])


def centered(groups: Sequence[Scored]) -> Advantages:
    """`A_i = r_i - mean` (Dr. GRPO, 2503.20783): dividing by the std would favour prompts that are too easy or too hard."""
    return standardized(groups, scale="none")


def leave_one_out(
    groups: Sequence[Scored],
    *,
    beta: NotNegative = 0.0,
    scale: Literal["none", "batch"] = "none",
    ddof: Freedom = 1,
    eps: NotNegative = 1e-4,
) -> Advantages:
    """`A_i = r_i - mean of the others` (RLOO, 2402.14740): a baseline that does not depend on the completion it judges.

    `beta` puts the KL into the reward: `r_i - beta sum_t (b - ref)_t` over trained tokens (signal `reference_logp`).
    `scale="batch"` divides by the std of all advantages of the batch.
    """
    advantages = []
    for group in groups:
        reward_G = _float64(group.reward)
        if beta:
            reward_G = reward_G - beta * np.array([kl_n.sum() for kl_n in _reference_gap(group)])
        known = np.count_nonzero(~np.isnan(reward_G))
        advantages.append(_deviation(reward_G) * (known / max(known - 1, 1)))  # r - mean of others = n / (n - 1) (r - mean)
    if scale == "batch":
        std = _std(np.concatenate(advantages), ddof)
        advantages = [_over(advantage_G, std, eps) for advantage_G in advantages]
    return _spread(groups, advantages)


def maxrl(groups: Sequence[Scored]) -> Advantages:
    """`A_i = (r_i - mean) / mean`: the gradient of log p(success), not of p(success), to the order that G samples allow (MaxRL,
    2602.02710).

    A prompt that is rarely solved counts for as much as one that often is.  For rewards from 0; a group of zeros teaches nothing.
    """
    advantages = []
    for group in groups:
        reward_G = _float64(group.reward)
        mean = float(np.nanmean(reward_G)) if not np.isnan(reward_G).all() else 0.0
        advantages.append(_deviation(reward_G) / mean if mean > 0.0 else np.zeros(reward_G.size))
    return _spread(groups, advantages)


def batch_centered(groups: Sequence[Scored]) -> Advantages:
    """`A_i = r_i - mean over the batch`: REINFORCE's baseline (Williams 1992), which asks for no siblings."""
    sizes = np.cumsum([group.reward.size for group in groups])[:-1]
    return _spread(groups, np.split(_deviation(np.concatenate([_float64(group.reward) for group in groups])), sizes))


def decoupled(groups: Sequence[Scored], *, ddof: Freedom = 1, eps: NotNegative = 1e-4) -> Advantages:
    """Standardize each reward function within the group, add them up weighted, divide by the batch's std (GDPO, 2601.05242).

    Adding first would let different reward vectors with the same sum look alike.  The sums have mean 0 over every group, so
    nothing is left to subtract.
    """
    sums = []
    for group in groups:
        reward_GK = _float64(group.rewards)
        scores_KG = [_over(_deviation(reward_G), _std(reward_G, ddof), eps) for reward_G in reward_GK.T]
        total_G = np.nansum(np.array(group.weights)[:, None] * scores_KG, axis=0)
        sums.append(np.where(np.isnan(reward_GK).all(axis=1), np.nan, total_G))
    std = _std(np.concatenate(sums), ddof)
    return _spread(groups, [_over(sum_G, std, eps) for sum_G in sums])


def whitened(
    groups: Sequence[Scored],
    *,
    beta: NotNegative = 0.0,
    baseline: bool = False,
    ddof: Freedom = 0,
    eps: NotNegative = 1e-8,
) -> Advantages:
    """`A_t = r - beta sum_{s >= t} (b - ref)_s`, whitened over all trained tokens of the batch (REINFORCE++, 2501.03262).

    `baseline=True` takes the group's mean from r first (REINFORCE++-baseline); a group of equal rewards then stays at exactly 0.
    """
    values: list[list[np.ndarray]] = []
    for group in groups:
        reward_G = _float64(group.reward)
        start_G = _deviation(reward_G) if baseline else reward_G
        future = [np.cumsum(kl_n[::-1])[::-1] for kl_n in _reference_gap(group)] if beta else [0.0] * len(reward_G)
        values.append([start + np.zeros(len(o)) - beta * kl for start, kl, o in zip(start_G, future, group.rollouts, strict=True)])
    silent = [baseline and not any(np.nan_to_num(value).any() for value in completions) for completions in values]
    return [
        [np.zeros(value.size) if zero else value for value in completions]
        for completions, zero in zip(_whiten(groups, values, ddof, eps), silent, strict=True)
    ]


def gae(
    groups: Sequence[Scored],
    *,
    beta: NotNegative = 0.0,
    kl: Literal["k1", "k3"] = "k1",
    gamma: Share = 1.0,
    lam: Share = 0.95,
    value_lam: Share | None = None,
    whiten: bool = True,
    ddof: Freedom = 1,
    eps: NotNegative = 1e-8,
) -> Advantages:
    """`A_t = sum_k (gamma lam)^k delta_{t+k}`, `delta_t = r_t + gamma V_{t+1} - V_t` (GAE 1506.02438, eq. 16; PPO 1707.06347).

    V is the signal `value`, read before the token is drawn; behind the last token it is 0, also where the length limit ended the
    completion.  The completion's reward stands at its last trained token, and every trained token pays `beta` times its KL
    estimate of `b` and `ref`.  Tokens that the policy did not write are passed over.  `whiten` subtracts the mean over all trained
    tokens of the rollout and divides by their standard deviation.  `value_lam`: the lambda of what the value function learns
    (`returns`), if it is to be another one (1: what was really earned, VC-PPO 2503.01491).
    """
    advantages = []
    for group in groups:
        gaps = _reference_gap(group) if beta else [np.zeros(len(rollout)) for rollout in group.rollouts]
        columns = zip(group.rollouts, _float64(group.reward), _signal(group, "value"), gaps, strict=True)
        advantages.append(
            [
                _discounted(rollout, reward, _float64(value_n), beta * (gap_n if kl == "k1" else k3_numbers(gap_n)), gamma, lam)
                for rollout, reward, value_n, gap_n in columns
            ]
        )
    if whiten:
        advantages = _whiten(groups, advantages, ddof, eps)
    return [[np.nan_to_num(advantage_n) for advantage_n in completions] for completions in advantages]


def _discounted(rollout: Rollout, reward: float, value_n: np.ndarray, price_n: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """The advantages of one completion before whitening; NaN where there is none: at tokens that are not trained, or at all."""
    advantage_n = np.full(len(rollout), np.nan)
    later, value_after, earned = 0.0, 0.0, reward
    for t in np.flatnonzero(rollout.trained)[::-1]:
        later = earned - price_n[t] + gamma * value_after - value_n[t] + gamma * lam * later
        advantage_n[t], value_after, earned = later, value_n[t], 0.0
    return advantage_n


def returns(groups: Sequence[Scored], credit: Callable[..., Advantages]) -> Advantages:
    """What a value function should have said of every token: `V_t + A_t` by `credit`, not whitened, at its `value_lam`.

    NaN where nothing is to be learnt: at tokens that are not trained, and in a completion without a reward.
    """
    other = credit.keywords.get("value_lam") if isinstance(credit, partial) else None
    found = credit(groups, whiten=False, **({} if other is None else {"lam": other}))
    return [
        [
            np.where(rollout.trained & ~np.isnan(reward), _float64(value_n) + advantage_n, np.nan)
            for rollout, reward, value_n, advantage_n in zip(
                group.rollouts, group.reward, _signal(group, "value"), advantages, strict=True
            )
        ]
        for group, advantages in zip(groups, found, strict=True)
    ]


def process(groups: Sequence[Scored], *, ddof: Freedom = 1, eps: NotNegative = 1e-4) -> Advantages:
    """`A_it = sum of the standardized rewards of the steps that end at or after t` (DeepSeekMath 2402.03300, 4.1.3).

    Step rewards are the signal `process`: the reward at a step's last token, NaN at all others.  They are standardized over all
    steps of all completions of the group.  With one step per completion this is `standardized`.
    """
    advantages = []
    for group in groups:
        steps = [_float64(step_n) for step_n in _signal(group, "process")]
        pool = np.concatenate(steps)
        score = np.nan_to_num(_over(_deviation(pool), _std(pool, ddof), eps))
        parts = np.split(score, np.cumsum([step_n.size for step_n in steps])[:-1])
        advantages.append([np.cumsum(part[::-1])[::-1] for part in parts])
    return advantages


def reverse_kl(groups: Sequence[Scored], *, gamma: Share = 1.0, own: bool = True, normalize: bool = False) -> Advantages:
    """`A_t = sum_{s >= t} gamma^(s - t) R_s`, `R = log p - log q`: the policy gradient of KL(student q || teacher p), the rewards'
    place taken by a teacher (signal `teacher_logp`).

    With `gamma` 0 it is the token's own log-ratio: on-policy distillation by sampled tokens.  `own` False begins behind the token,
    and `normalize` divides by the sum of the powers of gamma: the long part of MiniLLM (2306.08543, eq. 4 and 6), of which a last
    token has none.  q is what the policy said before its first update: `scored_logp` where another engine or a teacher helped to
    sample, else `b`.  Tokens that the policy did not write are passed over.
    """
    advantages = []
    for group in groups:
        teacher = _signal(group, "teacher_logp")
        student = group.signals.get("scored_logp") or tuple(rollout.behavior_logp for rollout in group.rollouts)
        found = []
        for rollout, p_n, q_n in zip(group.rollouts, teacher, student, strict=True):
            places = np.flatnonzero(rollout.trained)
            ratio_k = (_float64(p_n) - _float64(q_n))[places]
            advantage_n, total, powers = np.zeros(len(rollout)), 0.0, 0.0
            for k in range(places.size - 1, -1, -1):
                with_own = ratio_k[k] + gamma * total, 1.0 + gamma * powers
                total_here, powers_here = with_own if own else (total, powers)
                advantage_n[places[k]] = total_here / powers_here if normalize and powers_here else total_here
                total, powers = with_own
            found.append(advantage_n)
        advantages.append(found)
    return advantages


def nothing(groups: Sequence[Scored]) -> Advantages:
    """0 everywhere: what is learnt comes from a teacher's distributions, not from what was drawn."""
    return [[np.zeros(len(rollout)) for rollout in group.rollouts] for group in groups]


def is_dead(advantages: Sequence[np.ndarray]) -> bool:
    """True if the policy gradient of a group is exactly zero, whatever the surrogate: all its advantages are 0."""
    return not any(np.any(advantage_n) for advantage_n in advantages)


def compares_siblings(credit: Callable) -> bool:
    """True if a group of one completion would get no advantage from `credit` (a function of this file, or a partial of one)."""
    function, keywords = (credit.func, credit.keywords) if isinstance(credit, partial) else (credit, {})
    return function in _COMPARES_SIBLINGS or bool(keywords.get("baseline"))


def needs_value(credit: Callable) -> bool:
    """True if `credit` (a function of this file, or a partial of one) reads the signal `value`: a critic must be trained."""
    return (credit.func if isinstance(credit, partial) else credit) in VALUE_BASED


VALUE_BASED: set[Callable] = {gae}
"""Credits that read the signal `value` and take the keyword `whiten`.  Add your own if that holds for it."""


def needs_teacher(credit: Callable) -> bool:
    """True if `credit` reads the signal `teacher_logp`."""
    return (credit.func if isinstance(credit, partial) else credit) is reverse_kl


def needs_steps(credit: Callable) -> bool:
    """True if `credit` reads the signal `process`: rewards of steps, or of an episode's turns."""
    return (credit.func if isinstance(credit, partial) else credit) is process


def needs_reward(credit: Callable) -> bool:
    """False if `credit` never looks at a reward."""
    return (credit.func if isinstance(credit, partial) else credit) not in (reverse_kl, nothing)


_COMPARES_SIBLINGS = {standardized, centered, leave_one_out, decoupled, maxrl}


def _float64(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def _deviation(values: np.ndarray) -> np.ndarray:
    """values - mean of what is known; exactly 0 where all known values are equal; NaN stays NaN."""
    known = values[~np.isnan(values)]
    if known.size == 0 or known.max() == known.min():
        return np.where(np.isnan(values), np.nan, 0.0)
    return values - known.mean()


def _std(values: np.ndarray, ddof: int) -> float:
    """Standard deviation of what is known; exactly 0 if all of it is equal."""
    known = values[~np.isnan(values)]
    constant = known.size == 0 or known.max() == known.min()
    return 0.0 if constant else float(known.std(ddof=ddof))


def _over(deviation: np.ndarray, std: float, eps: float) -> np.ndarray:
    return deviation / (std + eps) if std > 0.0 else np.where(np.isnan(deviation), np.nan, 0.0)


def _whiten(groups: Sequence[Scored], values: Advantages, ddof: int, eps: float) -> Advantages:
    """Values less their mean, over their standard deviation, over all trained tokens; exactly 0 if all are equal; NaN -> 0."""
    trained = [v[o.trained] for group, vs in zip(groups, values, strict=True) for v, o in zip(vs, group.rollouts, strict=True)]
    pool = np.concatenate(trained)
    pool = pool[~np.isnan(pool)]
    mean, std = (pool.mean(), _std(pool, ddof)) if pool.size else (0.0, 0.0)
    if std == 0.0:
        return [[np.zeros(value.size) for value in completions] for completions in values]
    return [[np.nan_to_num((value - mean) / (std + eps)) for value in completions] for completions in values]


def _spread(groups: Sequence[Scored], advantages: Sequence[np.ndarray]) -> Advantages:
    """One advantage per completion -> the same one at each of its tokens; NaN -> 0."""
    return [
        [np.full(len(rollout), np.nan_to_num(a)) for rollout, a in zip(group.rollouts, advantage_G, strict=True)]
        for group, advantage_G in zip(groups, advantages, strict=True)
    ]


def _reference_gap(group: Scored) -> list[np.ndarray]:
    """b - ref of every token, nats; 0 at tokens that the policy did not write."""
    reference = _signal(group, "reference_logp")
    return [
        np.where(rollout.trained, _float64(rollout.behavior_logp) - _float64(reference_n), 0.0)
        for rollout, reference_n in zip(group.rollouts, reference, strict=True)
    ]


def _signal(group: Scored, name: str) -> tuple[np.ndarray, ...]:
    if name not in group.signals:
        raise ConfigError(f"this credit needs the signal {name!r} of every group, got only {sorted(group.signals)}")
    return group.signals[name]
