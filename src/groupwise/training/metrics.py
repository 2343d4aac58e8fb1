"""The metrics of a reinforcement-learning step, computed from its records; nothing is changed.

Names that users know from TRL keep their meaning: `reward`, `reward_std`,
`completions/mean_length`, `completions/clipped_ratio`, `entropy`, `kl`.  A quantity that was not
computed has no key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from groupwise.algorithms import diagnostics
from groupwise.algorithms.advantages import old_logp
from groupwise.algorithms.kl_estimators import K1
from groupwise.algorithms.losses import Correction, off_policy_keep
from groupwise.algorithms.parts import fact, options
from groupwise.algorithms.table import PARTS, Algorithm
from groupwise.records import Finish, RolloutGroup, Sample
from groupwise.training.closed_form import RecordedLoss
from groupwise.training.passes import Assessment, balance


def measure(
    groups: Sequence[RolloutGroup],
    updates: Sequence[Assessment],
    algorithm: Algorithm,
    drawn: int,
    *,
    minibatches: int,
    seconds: Mapping[str, float],
    version: int | None = None,
) -> dict[str, float]:
    """All metrics of a step: rewards, completions, ratios over every update, KL and sampler
    mismatch at the first pass.

    version: optimizer steps taken before this one; what older weights have drawn is left out of the
        mismatch and counted as stale."""
    metrics = reward_metrics(groups, drawn) | completion_metrics(groups) | episode_metrics(groups)
    metrics |= dead_metrics(updates, drawn) if groups[0].names else {}
    metrics |= {} if version is None else staleness_metrics(groups, version)
    tokens = sum(int(rollout.trained.sum()) for group in groups for rollout in group.rollouts)
    metrics["tokens/sampled"] = float(tokens)
    metrics["tokens/trained"] = float(
        sum(np.count_nonzero(sample.weight) for one in updates for sample in one.samples)
    )
    metrics["tokens/per_second"] = tokens / max(sum(seconds.values()), 1e-9)
    metrics["loss"] = float(np.mean([one.loss for one in updates]))
    norms = [one.stats.grad_norm for one in updates if not one.stats.skipped]
    metrics["grad_norm"] = float(np.mean(norms)) if norms else math.nan
    metrics["lr"] = updates[-1].stats.lr
    metrics |= (
        {}
        if algorithm.entropy_target is None
        else {"entropy_bonus": updates[-1].stats.entropy_bonus}
    )
    metrics["skipped_updates"] = float(sum(one.stats.skipped for one in updates))
    metrics |= balance(updates) | value_metrics(groups) | logged_metrics(groups)
    every = RecordedLoss.of(algorithm, updates)
    metrics |= ratio_metrics(every) | term_metrics(every, len(updates))
    # Later minibatches of the first pass see a policy that has already moved; only the first must
    # match the sampler.
    metrics |= kl_metrics(RecordedLoss.of(algorithm, updates[:minibatches])) | teacher_metrics(
        groups
    )
    if algorithm.mix > 0.0:  # what sampled is not the policy, and is not meant to be
        return metrics
    return metrics | mismatch_metrics(RecordedLoss.of(algorithm, updates[:1]), groups, version)


def reward_metrics(groups: Sequence[RolloutGroup], drawn: int) -> dict[str, float]:
    """Mean rewards, and their standard deviation within groups."""
    rewards = np.concatenate([group.reward for group in groups])
    spreads = [
        float(np.nanstd(group.reward, ddof=1))
        for group in groups
        if np.count_nonzero(~np.isnan(group.reward)) > 1
    ]
    if not groups[0].names:
        return {"prompts": float(drawn)}
    metrics = {
        "reward": _mean(rewards),
        "reward_std": float(np.mean(spreads)) if spreads else 0.0,
        "prompts": float(drawn),
    }
    metrics |= solved_metrics(groups)
    for k, name in enumerate(groups[0].names):
        column = np.concatenate([group.rewards[:, k] for group in groups])
        metrics[f"rewards/{name}/mean"] = _mean(column)
        if np.isnan(column).any():
            metrics[f"rewards/{name}/none"] = float(np.isnan(column).mean())
    return metrics


def dead_metrics(updates: Sequence[Assessment], drawn: int) -> dict[str, float]:
    """`groups/dead`: share of the prompts drawn whose groups taught nothing, all their advantages
    being 0, or masked.
    """
    live = {
        s.group
        for one in updates
        for s in one.samples
        if s.index >= 0 and (s.advantage * s.weight).any()
    }
    return {"groups/dead": 1.0 - len(live) / drawn}


def solved_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Shares of the groups whose completions are all right, and all wrong, by the verdict; empty
    without one.

    None is no verdict, so not right, and a group without any is not counted.  Groups that were
    drawn and dropped (`dead_groups: refill`) are not seen.
    """
    graded = [group.right for group in groups if not np.isnan(group.right).all()]
    if not graded:
        return {}
    return {
        "groups/solved": float(np.mean([(right_G == 1.0).all() for right_G in graded])),
        "groups/failed": float(np.mean([not (right_G == 1.0).any() for right_G in graded])),
    }


def completion_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Lengths in tokens that the policy wrote, the truncated share, and the sampled estimate of the
    entropy (-log p, nats).
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = np.array([int(rollout.trained.sum()) for rollout in rollouts])
    ended = np.array([not rollout.truncated for rollout in rollouts])
    behavior = np.concatenate([rollout.behavior_logp[rollout.trained] for rollout in rollouts])
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1.0 - ended.mean()),
        "completions/duplicates": (
            1.0 - len({(r.prompt.id, r.tokens.tobytes()) for r in rollouts}) / len(rollouts)
        ),
        "entropy": _mean(-behavior),
    }
    if ended.any():
        metrics["completions/mean_terminated_length"] = float(lengths[ended].mean())
    return metrics


def logged_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """`log/NAME`: what reward functions logged, the mean over the groups of whose call it was
    logged.
    """
    names = dict.fromkeys(name for group in groups for name in group.logged)
    return {
        f"log/{name}": _mean(
            np.array([group.logged[name] for group in groups if name in group.logged])
        )
        for name in names
    }


def episode_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Metrics of episodes, means over episodes unless the name says otherwise: turns, branches,
    tool calls and the share of them that failed, by kind, the shares of episodes that a limit ended
    and that failed, and tokens of the answers.

    Empty where there are none.
    """
    rollouts = [
        rollout for group in groups for rollout in group.rollouts if rollout.episode is not None
    ]
    if not rollouts:
        return {}
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    calls = [call for episode in episodes for turn in episode.turns for call in turn.calls]
    metrics = {
        "episodes/turns": float(np.mean([len(episode.turns) for episode in episodes])),
        "episodes/splits": float(
            np.mean([sum(branch.begin > 0 for branch in episode.branches) for episode in episodes])
        ),
        "episodes/tool_calls": len(calls) / len(episodes),
        "episodes/truncated": float(np.mean([rollout.truncated for rollout in rollouts])),
        "episodes/errors": (
            sum(rollout.finish is Finish.ERROR for rollout in rollouts) / len(rollouts)
        ),
        "episodes/answer_tokens": float(
            np.mean([np.count_nonzero(~rollout.trained) for rollout in rollouts])
        ),
    }
    if calls:
        metrics["episodes/tool_failures"] = sum(bool(call.failure) for call in calls) / len(calls)
        for kind in sorted({call.failure for call in calls if call.failure}):
            metrics[f"episodes/tool_failures/{kind}"] = sum(
                call.failure == kind for call in calls
            ) / len(calls)
    return metrics


def staleness_metrics(groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
    """Age, in optimizer steps, of the tokens that weights of `version` train on, and how many
    versions drew a completion.

    Empty if all are new, as they are unless rollouts run ahead of training.
    """
    drawn = [rollout.version for group in groups for rollout in group.rollouts if len(rollout)]
    ages = version - np.concatenate(drawn) if drawn else np.zeros(0)
    if not ages.any():
        return {}
    several = [float(np.unique(versions).size) for versions in drawn]
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/versions": float(np.mean(several)),
        "staleness/versions_max": max(several),
    }


def value_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """The critic before this step: its mean, its loss without clipping, and the share of the
    returns' variance that it explains.

    `value/explained` is 1 - Var(return - value) / Var(return), and has no key where all returns are
    equal.  Empty without a critic."""
    if "value" not in groups[0].signals:
        return {}
    every = (
        np.concatenate([column for group in groups for column in group.signals[name]])
        for name in ("value", "return")
    )
    value_N, return_N = (column.astype(np.float64) for column in every)
    value_N, return_N = value_N[~np.isnan(return_N)], return_N[~np.isnan(return_N)]
    gap_N = return_N - value_N
    metrics = {
        "value/mean": _mean(value_N),
        "value/return": _mean(return_N),
        "value/loss": 0.5 * _mean(np.square(gap_N)),
    }
    if return_N.size and return_N.max() > return_N.min():
        metrics["value/explained"] = 1.0 - float(gap_N.var() / return_N.var())
    return metrics


def teacher_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """`teacher/kl`: mean of log q - log p over the tokens that were drawn, which estimates
    KL(policy || teacher) where the policy drew them.  Empty where a teacher is not asked for them.
    """
    if "teacher_logp" not in groups[0].signals:
        return {}
    gaps = [
        (own - theirs)[rollout.trained]
        for group in groups
        for rollout, own, theirs in zip(
            group.rollouts, old_logp(group), group.signals["teacher_logp"], strict=True
        )
    ]
    return {"teacher/kl": _mean(np.concatenate(gaps))}


def ratio_metrics(recorded: RecordedLoss) -> dict[str, float]:
    """Importance ratios at the algorithm's level over all updates of the step, the tokens without a
    gradient, and `progress`.
    """
    if not recorded.samples:
        return {}
    algorithm, terms = recorded.algorithm, recorded.terms
    metrics = diagnostics.ratio(algorithm.log_ratio(terms), algorithm.cut(terms))
    if algorithm.off_policy_delta is not None:
        metrics["off_policy/dropped"] = diagnostics.dropped(
            off_policy_keep(terms, delta=algorithm.off_policy_delta)
        )
    return metrics | diagnostics.progress(terms.logp_M, terms.advantage_M)


def term_metrics(recorded: RecordedLoss, updates: int) -> dict[str, float]:
    """`loss/TERM`: what each extra term of log-probs adds to `loss`, mean over so many updates."""
    if not recorded.samples:
        return {}
    weight_N = recorded.weight_N
    return {
        f"loss/{name}": float((weight_N * loss_N).sum()) / updates
        for name, loss_N in recorded.added(recorded.terms)
    }


def kl_metrics(recorded: RecordedLoss) -> dict[str, float]:
    """KL to the reference by the estimator that the loss adds or the reward loses; empty without a
    reference.
    """
    algorithm = recorded.algorithm
    if not algorithm.needs_reference or not recorded.samples:
        return {}
    terms = recorded.terms
    assert terms.reference_logp_M is not None
    named = options(algorithm.credit).get("kl", "k1")  # a credit without the option takes k1
    estimator = algorithm.kl if algorithm.kl_place == "loss" else PARTS["kl"].get(named, K1)()
    kl_N = estimator(terms.logp_M, terms.reference_logp_M, terms.logp_M - terms.old_logp_M)
    return diagnostics.reference_kl(kl_N, terms.logp_M, terms.reference_logp_M)


def mismatch_metrics(
    recorded: RecordedLoss, groups: Sequence[RolloutGroup], version: int | None
) -> dict[str, float]:
    """Sampled against scored log-probs of tokens that weights of `version` drew (None: of all
    tokens); and of all tokens the share whose importance weight the correction bounds or drops."""
    if not recorded.samples:
        return {}
    terms, correction = recorded.terms, recorded.algorithm.correction
    logp_N, sampler_N, segment_N = terms.logp_M, terms.sampler_logp_M, terms.segment_M
    fresh = {
        (group.prompt.id, r.index): (r.version == version) | (version is None)
        for group in groups
        for r in group.rollouts
    }
    fresh_N = (
        recorded.column([fresh[sample.group, sample.index] for sample in recorded.samples]) > 0
    )
    metrics = diagnostics.mismatch(logp_N[fresh_N], sampler_N[fresh_N])
    if correction is not None and logp_N.numel():
        unbounded = Correction(level=correction.level, high=math.inf)
        full_N, used_N = (
            one(logp_N, sampler_N, segment_N, terms.segments).weight_M
            for one in (unbounded, correction)
        )
        metrics["mismatch/bounded"] = float((used_N != full_N).double().mean())
    return metrics


def token_columns(
    groups: Sequence[RolloutGroup],
    updates: Sequence[Assessment],
    algorithm: Algorithm,
    *,
    minibatches: int,
) -> dict[str, list[list[np.ndarray]]]:
    """The columns of `Step` with numbers per token: weight, entropy, clipped share, gradient,
    log-prob at the last update.

    `clipped` is the share of the updates that trained a token in which its gradient was cut: what
    `clip/low` and `clip/high` count. `gradient` is |dLoss / dlog-prob| at the last update, without
    an entropy bonus; it is left out where a teacher's distributions have a gradient too.
    `last_logp` is left out where there was but one pass over the rollout, because it would say what
    `current_logp` says.
    """
    first, last, every = (
        updates[:minibatches],
        updates[-minibatches:],
        RecordedLoss.of(algorithm, updates),
    )
    columns = {
        "weight": by_completion(
            groups, [(sample, sample.weight) for one in first for sample in one.samples]
        ),
        "entropy": by_completion(
            groups, [pair for one in first for pair in zip(one.samples, one.entropy, strict=True)]
        ),
    }
    if len(updates) > minibatches:
        columns["last_logp"] = by_completion(
            groups, [pair for one in last for pair in zip(one.samples, one.seen, strict=True)]
        )
    passes = np.float32(len(updates) // minibatches)
    cut = every.by_sample(algorithm.cut(every.terms).float()) if every.samples else []
    columns["clipped"] = by_completion(
        groups, [(sample, values / passes) for sample, values in cut]
    )
    if not any("teacher" in fact(term, "reads") for term in algorithm.extra):
        recorded = RecordedLoss.of(algorithm, last)
        gradient = (
            recorded.by_sample(recorded.gradient()[1].abs().float()) if recorded.samples else []
        )
        columns["gradient"] = by_completion(groups, gradient)
    return columns


def by_completion(
    groups: Sequence[RolloutGroup], pairs: Iterable[tuple[Sample, np.ndarray]]
) -> list[list[np.ndarray]]:
    """Numbers per token of samples, added up for each completion, in the order of the groups; empty
    where there are none.
    """
    numbers: dict[tuple[str, int], np.ndarray] = {}
    for sample, values in pairs:
        key = sample.group, sample.index
        numbers[key] = numbers[key] + values if key in numbers else values
    nothing = np.zeros(0)
    return [
        [numbers.get((group.prompt.id, rollout.index), nothing) for rollout in group.rollouts]
        for group in groups
    ]


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if values.size and not np.isnan(values).all() else math.nan
