"""Rewards of a group -> advantage of every completion token.

Every credit takes the groups of a whole rollout and gives, per group and completion, a float64
array (n,).  Statistics are float64.  Three rules hold everywhere.  Rewards that differ by no more
than rounding (`records.alike`) give exactly 0: the floating-point standard deviation of eight times
0.1 is not 0, and 0.1 + 0.2 is not 0.3.  A KL that is no more than the rounding of log-probs
(`LOGP_ROUNDING`) is 0.  An unscorable completion (reward NaN) enters no statistic and gets exactly
0.

G completions of a group   n tokens of a completion   K reward functions
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from groupwise.algorithms.kl_estimators import k3_numbers
from groupwise.algorithms.parts import (
    Credit,
    MaybeShare,
    NotNegative,
    Share,
    options,
    with_options,
)
from groupwise.errors import ConfigError
from groupwise.records import TIE, Rollout, RolloutGroup, alike

Advantages = list[list[np.ndarray]]
Freedom = Literal[0, 1]
"""ddof of a standard deviation: 1 divides by n - 1 (TRL), 0 by n (the paper)."""
LOGP_ROUNDING = 1e-5
"""Nats, root mean square over tokens: two computations of one log-prob in float32 lie no further
apart.
"""


@dataclass(frozen=True)
class Standardized(Credit):
    """`A_i = (r_i - mean) / (std + eps)`, mean and std over the completions of the prompt (GRPO,
    2402.03300).

    `scale="batch"` divides by the std of all rewards of the batch (the mean stays the group's),
    `"none"` by nothing. For the rewards [1, 0, 0.5] the default gives +-0.9998, and `ddof=0, eps=0`
    gives +-1.2247.
    """

    ddof: Freedom = 1
    eps: NotNegative = 1e-4
    scale: Literal["group", "batch", "none"] = "group"
    compares_siblings = True

    def __call__(self, groups: Sequence[RolloutGroup]) -> Advantages:
        deviations = [_deviation(_rewards(group)) for group in groups]
        if self.scale == "none":
            return _spread(groups, deviations)
        if self.scale == "batch":
            spreads = [
                _std(np.concatenate([_rewards(group) for group in groups]), self.ddof)
            ] * len(groups)
        else:
            spreads = [_std(_rewards(group), self.ddof) for group in groups]
        return _spread(
            groups,
            [
                _over(deviation, std, self.eps)
                for deviation, std in zip(deviations, spreads, strict=True)
            ],
        )


@dataclass(frozen=True)
class Centered(Credit):
    """`A_i = r_i - mean` (Dr. GRPO, 2503.20783): dividing by the std would favour prompts that are
    too easy or too hard.
    """

    compares_siblings = True

    def __call__(self, groups: Sequence[RolloutGroup]) -> Advantages:
        return Standardized(scale="none")(groups)


@dataclass(frozen=True)
class LeaveOneOut(Credit):
    """`A_i = r_i - mean of the others` (RLOO, 2402.14740): the baseline does not depend on the
    completion.

    `beta` puts the KL into the reward: `r_i - beta sum_t (old - ref)_t` over trained tokens (signal
    `reference_logp`). `scale="batch"` divides by the std of all advantages of the batch.
    """

    beta: NotNegative = 0.0
    scale: Literal["none", "batch"] = "none"
    ddof: Freedom = 1
    eps: NotNegative = 1e-4
    compares_siblings = True

    def __call__(self, groups: Sequence[RolloutGroup]) -> Advantages:
        advantages = []
        for group, gaps in zip(groups, _reference_gaps(groups, self.beta), strict=True):
            reward_G = _rewards(group) - self.beta * np.array([gap_n.sum() for gap_n in gaps])
            known = np.count_nonzero(~np.isnan(reward_G))
            advantages.append(
                _deviation(reward_G) * (known / max(known - 1, 1))
            )  # r - mean of others = n / (n - 1) (r - mean)
        if self.scale == "batch":
            std = _std(np.concatenate(advantages), self.ddof)
            advantages = [_over(advantage_G, std, self.eps) for advantage_G in advantages]
        return _spread(groups, advantages)


@dataclass(frozen=True)
class Maxrl(Credit):
    """`A_i = (r_i - mean) / mean`: the gradient of log p(success), not of p(success), to the order
    that G samples allow (MaxRL, 2602.02710).

    A prompt that is rarely solved counts for as much as one that often is.  For rewards from 0; a
    group of zeros teaches nothing."""

    compares_siblings = True

    def __call__(self, groups: Sequence[RolloutGroup]) -> Advantages:
        advantages = []
        for group in groups:
            reward_G = _rewards(group)
            mean = float(np.nanmean(reward_G)) if not np.isnan(reward_G).all() else 0.0
            advantages.append(
                _deviation(reward_G) / mean if mean > 0.0 else np.zeros(reward_G.size)
            )
        return _spread(groups, advantages)


@dataclass(frozen=True)
class BatchCentered(Credit):
    """`A_i = r_i - mean over the batch`: REINFORCE's baseline (Williams 1992), which needs no
    group.
    """

    def __call__(self, groups: Sequence[RolloutGroup]) -> Advantages:
        sizes = np.cumsum([group.reward.size for group in groups])[:-1]
        return _spread(
            groups,
            np.split(_deviation(np.concatenate([_rewards(group) for group in groups])), sizes),
        )


@dataclass(frozen=True)
class Decoupled(Credit):
    """Standardize each reward function within the group, add them up weighted, divide by the
    batch's std (GDPO, 2601.05242).

    Adding first would let different reward vectors with the same sum look alike.  The sums have
    mean 0 over every group, so nothing is left to subtract.
    """

    ddof: Freedom = 1
    eps: NotNegative = 1e-4
    compares_siblings = True

    def __call__(self, groups: Sequence[RolloutGroup]) -> Advantages:
        sums = []
        for group in groups:
            reward_GK = _float64(group.rewards)
            scores_KG = [
                _over(_deviation(reward_G), _std(reward_G, self.ddof), self.eps)
                for reward_G in reward_GK.T
            ]
            weight_K = np.array(group.weights)
            unjudged_G = np.isnan(reward_GK[:, weight_K != 0.0]).all(axis=1)
            total_G = np.nansum(weight_K[:, None] * scores_KG, axis=0)
            sums.append(np.where(unjudged_G, np.nan, total_G))
        std = _std(np.concatenate(sums), self.ddof)
        return _spread(groups, [_over(sum_G, std, self.eps) for sum_G in sums])


@dataclass(frozen=True)
class Whitened(Credit):
    """`A_t = r - beta sum_{s >= t} (old - ref)_s`, whitened over all trained tokens of the batch
    (REINFORCE++, 2501.03262).

    `baseline=True` takes the group's mean from r first (REINFORCE++-baseline); a group of equal
    rewards then stays at exactly 0."""

    beta: NotNegative = 0.0
    baseline: bool = False
    ddof: Freedom = 0
    eps: NotNegative = 1e-8

    @property
    def compares_siblings(self) -> bool:  # type: ignore[override]
        """With the group's mean as baseline."""
        return self.baseline

    def __call__(self, groups: Sequence[RolloutGroup]) -> Advantages:
        """Return every token's reward less the KL behind it, whitened over all trained tokens."""
        values: list[list[np.ndarray]] = []
        for group, gaps in zip(groups, _reference_gaps(groups, self.beta), strict=True):
            start_G = _rewards(group)
            if self.baseline:
                start_G = _deviation(start_G)
            returns: list[np.ndarray] = []
            for start, gap_n in zip(start_G, gaps, strict=True):
                kl_behind_n = np.cumsum(gap_n[::-1])[::-1]
                returns.append(start - self.beta * kl_behind_n)
            values.append(returns)
        whitened = _whiten(groups, values, self.ddof, self.eps)
        if not self.baseline:
            return whitened
        advantages: list[list[np.ndarray]] = []
        for completions, value_G in zip(whitened, values, strict=True):
            if any(np.nan_to_num(value).any() for value in value_G):
                advantages.append(list(completions))
            else:
                advantages.append([np.zeros(value.size) for value in value_G])
        return advantages


@dataclass(frozen=True)
class Gae(Credit):
    """`A_t = sum_k (gamma lam)^k delta_{t+k}`, `delta_t = r_t + gamma V_{t+1} - V_t` (GAE
    1506.02438, eq. 16; PPO 1707.06347).

    V is the signal `value`, read before the token is drawn; behind the last token it is 0, also
    where the length limit ended the completion.  The completion's reward stands at its last trained
    token, and every trained token pays `beta` times its KL estimate of old and ref.  Tokens that
    the policy did not write are passed over.  `whiten` subtracts the mean over all trained tokens
    of the rollout and divides by their standard deviation.  `value_lam`: the lambda of what the
    value function learns (`returns`), if it is to be another one (1: what was really earned, VC-PPO
    2503.01491).
    """

    beta: NotNegative = 0.0
    kl: Literal["k1", "k3"] = "k1"
    gamma: Share = 1.0
    lam: Share = 0.95
    value_lam: MaybeShare = None
    whiten: bool = True
    ddof: Freedom = 1
    eps: NotNegative = 1e-8
    reads = ("value",)

    def __call__(self, groups: Sequence[RolloutGroup]) -> Advantages:
        advantages = []
        for group, gaps in zip(groups, _reference_gaps(groups, self.beta), strict=True):
            columns = zip(
                group.rollouts, _rewards(group), _signal(group, "value"), gaps, strict=True
            )
            advantages.append(
                [
                    self._discounted(
                        rollout,
                        reward,
                        _float64(value_n),
                        gap_n if self.kl == "k1" else k3_numbers(gap_n),
                    )
                    for rollout, reward, value_n, gap_n in columns
                ]
            )
        if self.whiten:
            values = [
                np.abs(value_n).max(initial=0.0)
                for group in groups
                for value_n in _signal(group, "value")
            ]
            advantages = _whiten(
                groups, advantages, self.ddof, self.eps, size=max(values, default=0.0)
            )
        return [
            [np.nan_to_num(advantage_n) for advantage_n in completions]
            for completions in advantages
        ]

    def _discounted(
        self, rollout: Rollout, reward: float, value_n: np.ndarray, gap_n: np.ndarray
    ) -> np.ndarray:
        """The advantages of one completion before whitening; NaN where there is none: at tokens
        that are not trained, or at all.
        """
        advantage_n, price_n = np.full(len(rollout), np.nan), self.beta * gap_n
        later, value_after, earned = 0.0, 0.0, reward
        for t in np.flatnonzero(rollout.trained)[::-1]:
            later = (
                earned
                - price_n[t]
                + self.gamma * value_after
                - value_n[t]
                + self.gamma * self.lam * later
            )
            advantage_n[t], value_after, earned = later, value_n[t], 0.0
        return advantage_n


def returns(groups: Sequence[RolloutGroup], credit: Callable[..., Advantages]) -> Advantages:
    """What a value function should have said of every token: `V_t + A_t` by `credit`, not whitened,
    at its `value_lam`.

    `credit`: reads the signal `value`; where it has the options `whiten` and `lam`, these are set
    so.
    NaN where nothing is to be learnt: at tokens that are not trained, and in a completion without a
    reward.
    """
    known, changed = options(credit), {}
    if "whiten" in known:
        changed["whiten"] = False
    if known.get("value_lam") is not None:
        changed["lam"] = known["value_lam"]
    unwhitened = with_options(credit, changed)(groups)
    targets = []
    for group, advantages in zip(groups, unwhitened, strict=True):
        columns = zip(
            group.rollouts, group.reward, _signal(group, "value"), advantages, strict=True
        )
        of_group = []
        for rollout, reward, value_n, advantage_n in columns:
            known_n = rollout.trained & ~np.isnan(reward)
            of_group.append(np.where(known_n, _float64(value_n) + advantage_n, np.nan))
        targets.append(of_group)
    return targets


@dataclass(frozen=True)
class Process(Credit):
    """`A_it = sum of the standardized rewards of the steps that end at or after t` (DeepSeekMath
    2402.03300, 4.1.3).

    Step rewards are the signal `process`: the reward at a step's last token, NaN at all others.
    They are standardized over all steps of all completions of the group.  With one step per
    completion this is `standardized`.
    """

    ddof: Freedom = 1
    eps: NotNegative = 1e-4
    reads = ("process",)

    def __call__(self, groups: Sequence[RolloutGroup]) -> Advantages:
        advantages = []
        for group in groups:
            steps = [_float64(step_n) for step_n in _signal(group, "process")]
            pool = np.concatenate(steps)
            score = np.nan_to_num(_over(_deviation(pool), _std(pool, self.ddof), self.eps))
            parts = np.split(score, np.cumsum([step_n.size for step_n in steps])[:-1])
            advantages.append([np.cumsum(part[::-1])[::-1] for part in parts])
        return advantages


@dataclass(frozen=True)
class ReverseKl(Credit):
    """`A_t = sum_{s >= t} gamma^(s - t) R_s`, `R = log p - log q`: the policy gradient of
    KL(student q || teacher p), the rewards' place taken by a teacher (signal `teacher_logp`).

    With `gamma` 0 it is the token's own log-ratio: on-policy distillation by sampled tokens.  `own`
    False begins behind the token, and `normalize` divides by the sum of the powers of gamma: the
    long part of MiniLLM (2306.08543, eq. 4 and 6), of which a last token has none.  q is the old
    policy's, also where another engine or a teacher helped to sample.  Tokens that the policy did
    not write are passed over.
    """

    gamma: Share = 1.0
    own: bool = True
    normalize: bool = False
    reads = ("teacher_logp",)
    needs_reward = False

    def __call__(self, groups: Sequence[RolloutGroup]) -> Advantages:
        advantages = []
        for group in groups:
            teacher = _signal(group, "teacher_logp")
            of_group = []
            for rollout, p_n, q_n in zip(group.rollouts, teacher, old_logp(group), strict=True):
                places = np.flatnonzero(rollout.trained)
                ratio_k = (_float64(p_n) - _float64(q_n))[places]
                advantage_n, total, powers = np.zeros(len(rollout)), 0.0, 0.0
                for k in range(places.size - 1, -1, -1):
                    with_own = ratio_k[k] + self.gamma * total, 1.0 + self.gamma * powers
                    total_here, powers_here = with_own if self.own else (total, powers)
                    advantage_n[places[k]] = (
                        total_here / powers_here if self.normalize and powers_here else total_here
                    )
                    total, powers = with_own
                of_group.append(advantage_n)
            advantages.append(of_group)
        return advantages


@dataclass(frozen=True)
class Nothing(Credit):
    """0: only the teacher's distributions train the policy."""

    needs_reward = False

    def __call__(self, groups: Sequence[RolloutGroup]) -> Advantages:
        return [[np.zeros(len(rollout)) for rollout in group.rollouts] for group in groups]


def is_dead(advantages: Sequence[np.ndarray]) -> bool:
    """True if the policy gradient of a group is exactly zero, whatever the surrogate: all its
    advantages are 0.
    """
    return not any(np.any(advantage_n) for advantage_n in advantages)


def _float64(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def _rewards(group: RolloutGroup) -> np.ndarray:
    """The group's rewards (G,), float64; those of a dead group, whose sums may differ by rounding,
    are one number.
    """
    reward_G = _float64(group.reward)
    if not group.equal_rewards or np.isnan(reward_G).all():
        return reward_G
    return np.where(np.isnan(reward_G), np.nan, reward_G[~np.isnan(reward_G)][0])


def _deviation(values: np.ndarray) -> np.ndarray:
    """values - mean of what is known; exactly 0 where all known values are alike; NaN stays NaN."""
    if alike(values):
        return np.where(np.isnan(values), np.nan, 0.0)
    return values - values[~np.isnan(values)].mean()


def _std(values: np.ndarray, ddof: int) -> float:
    """Standard deviation of what is known; exactly 0 if all of it is alike."""
    return 0.0 if alike(values) else float(values[~np.isnan(values)].std(ddof=ddof))


def _over(deviation: np.ndarray, std: float, eps: float) -> np.ndarray:
    return deviation / (std + eps) if std > 0.0 else np.where(np.isnan(deviation), np.nan, 0.0)


def _whiten(
    groups: Sequence[RolloutGroup], values: Advantages, ddof: int, eps: float, size: float = 0.0
) -> Advantages:
    """Values less their mean, over their standard deviation, over all trained tokens; exactly 0 if
    all are alike; NaN -> 0.

    size: of the largest number that the values are differences of; a spread within its rounding is
        none.
    """
    trained = [
        v[o.trained]
        for group, vs in zip(groups, values, strict=True)
        for v, o in zip(vs, group.rollouts, strict=True)
    ]
    pool = np.concatenate(trained)
    pool = pool[~np.isnan(pool)]
    mean, std = (pool.mean(), _std(pool, ddof)) if pool.size else (0.0, 0.0)
    if std <= TIE * size:
        return [[np.zeros(value.size) for value in completions] for completions in values]
    return [
        [np.nan_to_num((value - mean) / (std + eps)) for value in completions]
        for completions in values
    ]


def _spread(groups: Sequence[RolloutGroup], advantages: Sequence[np.ndarray]) -> Advantages:
    """One advantage per completion -> the same one at each of its tokens; NaN -> 0."""
    return [
        [
            np.full(len(rollout), np.nan_to_num(a))
            for rollout, a in zip(group.rollouts, advantage_G, strict=True)
        ]
        for group, advantage_G in zip(groups, advantages, strict=True)
    ]


def _reference_gaps(groups: Sequence[RolloutGroup], beta: float) -> Advantages:
    """old - ref of every token, nats; 0 at tokens that the policy did not write, and everywhere if
    `beta` is 0.

    If the two differ by no more than rounding (`LOGP_ROUNDING`), they are the same: whitening would
    make a full step of the rest."""
    if not beta:
        return [[np.zeros(len(rollout)) for rollout in group.rollouts] for group in groups]
    gaps = [
        [
            np.where(rollout.trained, _float64(old_n) - _float64(reference_n), 0.0)
            for rollout, old_n, reference_n in zip(
                group.rollouts, old_logp(group), _signal(group, "reference_logp"), strict=True
            )
        ]
        for group in groups
    ]
    squares = sum(float(np.square(gap_n).sum()) for completions in gaps for gap_n in completions)
    tokens = sum(int(rollout.trained.sum()) for group in groups for rollout in group.rollouts)
    return gaps if squares > LOGP_ROUNDING**2 * tokens else _reference_gaps(groups, 0.0)


def old_logp(group: RolloutGroup) -> tuple[np.ndarray, ...]:
    """old: log-probs of the policy before the step, `scored_logp` where the trainer has computed
    them, else the sampler's.
    """
    return group.signals.get("scored_logp") or tuple(
        rollout.behavior_logp for rollout in group.rollouts
    )


def _signal(group: RolloutGroup, name: str) -> tuple[np.ndarray, ...]:
    if name not in group.signals:
        raise ConfigError(
            f"this credit needs the signal {name!r} of every group, got only"
            f" {sorted(group.signals)}"
        )
    return group.signals[name]
