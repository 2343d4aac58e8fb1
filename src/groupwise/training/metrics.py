"""The metrics of a reinforcement-learning step, computed from its records; nothing is changed.

Names that users know from TRL keep their meaning: `reward`, `reward_std`,
`completions/mean_length`, `completions/clipped_ratio`, `entropy`, `kl`.  A quantity that was not
computed has no key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from groupwise.algorithms import diagnostics
from groupwise.algorithms.advantages import old_logp
from groupwise.algorithms.kl_estimators import ESTIMATORS, K1
from groupwise.algorithms.losses import Correction, off_policy_keep
from groupwise.algorithms.parts import fact, options
from groupwise.records import Finish, Rollout, RolloutGroup, Sample
from groupwise.training.passes import Assessment, balance
from groupwise.training.recorded_loss import RecordedLoss, RecordedStep

Metrics = dict[str, float]


def measure(
    groups: Sequence[RolloutGroup],
    recorded: RecordedStep,
    drawn: int,
    *,
    seconds: Mapping[str, float],
    version: int | None = None,
) -> Metrics:
    """Return all metrics of a step: rewards, completions, ratios over every update, KL and sampler
    mismatch at the first pass.

    drawn: prompts that were drawn for the step.   seconds: by phase.
    version: optimizer steps taken before this one; what older weights have drawn is left out of the
        mismatch and counted as stale.
    """
    updates = recorded.updates
    metrics = reward_metrics(groups, drawn)
    metrics |= completion_metrics(groups)
    metrics |= episode_metrics(groups)
    if groups[0].names:
        metrics |= dead_metrics(updates, drawn)
    if version is not None:
        metrics |= staleness_metrics(groups, version)
    metrics |= token_metrics(groups, updates, seconds)
    metrics |= optimizer_metrics(updates)
    if recorded.algorithm.entropy_target is not None:
        metrics["entropy_bonus"] = updates[-1].stats.entropy_bonus
    metrics |= balance(updates)
    metrics |= value_metrics(groups)
    metrics |= logged_metrics(groups)
    metrics |= ratio_metrics(recorded.all_losses)
    metrics |= term_metrics(recorded.all_losses, len(updates))
    metrics |= kl_metrics(recorded.first_pass_loss)
    metrics |= teacher_metrics(groups)
    # Later minibatches of the first pass see a policy that has already moved; only the first must
    # match the sampler.
    metrics |= mismatch_metrics(recorded.first_update_loss, groups, version)
    return metrics


def token_metrics(
    groups: Sequence[RolloutGroup], updates: Sequence[Assessment], seconds: Mapping[str, float]
) -> Metrics:
    """Return how many tokens were sampled and trained, and how many were sampled in a second."""
    sampled = sum(int(rollout.trained.sum()) for rollout in _rollouts(groups))
    trained = 0
    for update in updates:
        trained += sum(np.count_nonzero(sample.weight) for sample in update.samples)
    return {
        "tokens/sampled": float(sampled),
        "tokens/trained": float(trained),
        "tokens/per_second": sampled / max(sum(seconds.values()), 1e-9),
    }


def optimizer_metrics(updates: Sequence[Assessment]) -> Metrics:
    """Return the loss, the gradient's norm and the learning rate: means over the updates that were
    taken.
    """
    norms = [update.stats.grad_norm for update in updates if not update.stats.skipped]
    return {
        "loss": float(np.mean([update.loss for update in updates])),
        "grad_norm": float(np.mean(norms)) if norms else math.nan,
        "lr": updates[-1].stats.lr,
        "skipped_updates": float(sum(update.stats.skipped for update in updates)),
    }


def reward_metrics(groups: Sequence[RolloutGroup], drawn: int) -> Metrics:
    """Return mean rewards, and their standard deviation within groups."""
    names = groups[0].names
    if not names:
        return {"prompts": float(drawn)}
    spreads = []
    for group in groups:
        if np.count_nonzero(~np.isnan(group.reward)) > 1:
            spreads.append(float(np.nanstd(group.reward, ddof=1)))
    metrics = {
        "reward": _mean(np.concatenate([group.reward for group in groups])),
        "reward_std": float(np.mean(spreads)) if spreads else 0.0,
        "prompts": float(drawn),
    }
    metrics |= solved_metrics(groups)
    for place, name in enumerate(names):
        column = np.concatenate([group.rewards[:, place] for group in groups])
        metrics[f"rewards/{name}/mean"] = _mean(column)
        if np.isnan(column).any():
            metrics[f"rewards/{name}/none"] = float(np.isnan(column).mean())
    return metrics


def dead_metrics(updates: Sequence[Assessment], drawn: int) -> Metrics:
    """Return `groups/dead`: the share of the prompts drawn whose groups taught nothing, all their
    advantages being 0, or masked.
    """
    live = set()
    for update in updates:
        for sample in update.samples:
            if (sample.advantage * sample.weight).any():
                live.add(sample.group)
    return {"groups/dead": 1.0 - len(live) / drawn}


def solved_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """Return the shares of the groups whose completions are all right, and all wrong, by the
    verdict; nothing without one.

    None is no verdict, so not right, and a group without any is not counted.  Groups that were
    drawn and dropped (`dead_groups: refill`) are not seen.
    """
    graded = [group.right for group in groups if not np.isnan(group.right).all()]
    if not graded:
        return {}
    solved = [(right_G == 1.0).all() for right_G in graded]
    failed = [not (right_G == 1.0).any() for right_G in graded]
    return {"groups/solved": float(np.mean(solved)), "groups/failed": float(np.mean(failed))}


def completion_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """Return lengths in tokens that the policy wrote, the truncated share, and the sampled estimate
    of the entropy (-log p, nats).
    """
    rollouts = _rollouts(groups)
    lengths = np.array([int(rollout.trained.sum()) for rollout in rollouts])
    ended = np.array([not rollout.truncated for rollout in rollouts])
    behavior = np.concatenate([rollout.behavior_logp[rollout.trained] for rollout in rollouts])
    distinct = {(rollout.prompt.id, rollout.tokens.tobytes()) for rollout in rollouts}
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1.0 - ended.mean()),
        "completions/duplicates": 1.0 - len(distinct) / len(rollouts),
        "entropy": _mean(-behavior),
    }
    if ended.any():
        metrics["completions/mean_terminated_length"] = float(lengths[ended].mean())
    return metrics


def logged_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """Return `log/NAME`: what reward functions logged, the mean over the groups of whose call it
    was logged.
    """
    logged: dict[str, list[float]] = {}
    for group in groups:
        for name, value in group.logged.items():
            logged.setdefault(name, []).append(value)
    return {f"log/{name}": _mean(np.array(values)) for name, values in logged.items()}


def episode_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """Return metrics of episodes, means over episodes unless the name says otherwise: turns,
    branches, tool calls and the share of them that failed, by kind, the shares of episodes that a
    limit ended and that failed, and tokens of the answers.

    Nothing where there are no episodes.
    """
    rollouts = [rollout for rollout in _rollouts(groups) if rollout.episode is not None]
    if not rollouts:
        return {}
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    turns = list(chain.from_iterable(episode.turns for episode in episodes))
    calls = list(chain.from_iterable(turn.calls for turn in turns))
    wishes = list(chain.from_iterable(turn.wishes for turn in turns))
    branches = chain.from_iterable(episode.branches for episode in episodes)
    answered = sum(map(len, rollouts)) - sum(turn.end - turn.begin for turn in turns)
    totals = {
        "turns": len(turns),
        "side_calls": sum(turn.side for turn in turns),
        "splits": sum(branch.begin > 0 for branch in branches),
        "tool_calls": len(calls),
        "truncated": sum(rollout.truncated for rollout in rollouts),
        "errors": sum(rollout.finish is Finish.ERROR for rollout in rollouts),
        "answer_tokens": answered,
    }
    metrics = {f"episodes/{name}": total / len(rollouts) for name, total in totals.items()}
    metrics |= _shares("episodes/wishes", wishes, len(rollouts))
    if calls:
        failures = [call.failure for call in calls if call.failure]
        metrics["episodes/tool_failures"] = len(failures) / len(calls)
        metrics |= _shares("episodes/tool_failures", failures, len(calls))
    return metrics


def _shares(prefix: str, names: Sequence[str], count: int) -> Metrics:
    """Return how often each name occurs, divided by `count`."""
    return {f"{prefix}/{name}": names.count(name) / count for name in sorted(set(names))}


def staleness_metrics(groups: Sequence[RolloutGroup], version: int) -> Metrics:
    """Return the age, in optimizer steps, of the tokens that weights of `version` train on, and how
    many versions drew a completion.

    Nothing if all are new, as they are unless rollouts run ahead of training.
    """
    versions = [rollout.version for rollout in _rollouts(groups) if len(rollout)]
    ages = version - np.concatenate(versions) if versions else np.zeros(0)
    if not ages.any():
        return {}
    counts = [float(np.unique(version_n).size) for version_n in versions]
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/versions": float(np.mean(counts)),
        "staleness/versions_max": max(counts),
    }


def value_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """Return the critic before this step: its mean, its loss without clipping, and the share of the
    returns' variance that it explains.

    `value/explained` is 1 - Var(return - value) / Var(return), and has no key where all returns are
    equal.  Nothing without a critic.
    """
    if "value" not in groups[0].signals:
        return {}
    value_N, return_N = _signal(groups, "value"), _signal(groups, "return")
    known_N = ~np.isnan(return_N)
    value_N, return_N = value_N[known_N], return_N[known_N]
    gap_N = return_N - value_N
    metrics = {
        "value/mean": _mean(value_N),
        "value/return": _mean(return_N),
        "value/loss": 0.5 * _mean(np.square(gap_N)),
    }
    if return_N.size and return_N.max() > return_N.min():
        metrics["value/explained"] = 1.0 - float(gap_N.var() / return_N.var())
    return metrics


def _signal(groups: Sequence[RolloutGroup], name: str) -> np.ndarray:
    """Return a signal of all tokens of all completions, float64."""
    columns = [column_n for group in groups for column_n in group.signals[name]]
    return np.concatenate(columns).astype(np.float64)


def teacher_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """Return `teacher/kl`: the mean of log q - log p over the tokens that were drawn, which
    estimates KL(policy || teacher).  Nothing where a teacher is not asked for them.
    """
    if "teacher_logp" not in groups[0].signals:
        return {}
    gaps = []
    for group in groups:
        columns = zip(group.rollouts, old_logp(group), group.signals["teacher_logp"], strict=True)
        for rollout, policy_n, teacher_n in columns:
            gaps.append((policy_n - teacher_n)[rollout.trained])
    return {"teacher/kl": _mean(np.concatenate(gaps))}


def ratio_metrics(recorded: RecordedLoss) -> Metrics:
    """Return importance ratios at the algorithm's level over all updates of the step, the tokens
    without a gradient, and `progress`.
    """
    if not recorded.samples:
        return {}
    algorithm, terms = recorded.algorithm, recorded.terms
    metrics = diagnostics.ratio(algorithm.log_ratio(terms), recorded.cut_N)
    if algorithm.off_policy_delta is not None:
        keep_N = off_policy_keep(terms, delta=algorithm.off_policy_delta)
        metrics["off_policy/dropped"] = diagnostics.dropped(keep_N)
    return metrics | diagnostics.progress(terms.logp_M, terms.advantage_M)


def term_metrics(recorded: RecordedLoss, updates: int) -> Metrics:
    """Return `loss/TERM`: what each extra term of log-probs adds to `loss`, mean over so many
    updates.
    """
    if not recorded.samples:
        return {}
    metrics = {}
    for name, loss_N in recorded.extra_losses(recorded.terms).items():
        metrics[f"loss/{name}"] = float((recorded.weight_N * loss_N).sum()) / updates
    return metrics


def kl_metrics(recorded: RecordedLoss) -> Metrics:
    """Return the KL to the reference by the estimator that the loss adds or the reward loses;
    nothing without a reference.
    """
    algorithm = recorded.algorithm
    if not algorithm.needs.reference or not recorded.samples:
        return {}
    terms = recorded.terms
    assert terms.reference_logp_M is not None
    estimator = algorithm.kl
    if algorithm.kl_place == "reward":
        name = options(algorithm.credit).get("kl", "k1")  # a credit without the option takes k1
        estimator = ESTIMATORS.get(name, K1)()
    kl_N = estimator(terms.logp_M, terms.reference_logp_M, terms.logp_M - terms.old_logp_M)
    return diagnostics.reference_kl(kl_N, terms.logp_M, terms.reference_logp_M)


def mismatch_metrics(
    recorded: RecordedLoss, groups: Sequence[RolloutGroup], version: int | None
) -> Metrics:
    """Return sampled against scored log-probs of tokens that weights of `version` drew (None: of
    all tokens); and of all tokens the share whose importance weight the correction bounds or drops.
    """
    if not recorded.samples:
        return {}
    terms, correction = recorded.terms, recorded.algorithm.correction
    logp_N, sampler_N, segment_N = terms.logp_M, terms.behavior_logp_M, terms.segment_M
    fresh = {}
    for rollout in _rollouts(groups):
        fresh_n = (rollout.version == version) | (version is None)
        fresh[rollout.prompt.id, rollout.index] = fresh_n
    columns = [fresh[sample.group, sample.index] for sample in recorded.samples]
    fresh_N = recorded.at_trained(columns) > 0
    metrics = diagnostics.mismatch(logp_N[fresh_N], sampler_N[fresh_N])
    if correction is not None and logp_N.numel():
        unbounded = Correction(level=correction.level, high=math.inf)
        full_N = unbounded(logp_N, sampler_N, segment_N, terms.segments).weight_M
        used_N = correction(logp_N, sampler_N, segment_N, terms.segments).weight_M
        metrics["mismatch/bounded"] = float((used_N != full_N).double().mean())
    return metrics


TokenColumn = list[list[np.ndarray]]
"""Numbers (n,) of each completion of each group."""


def token_columns(groups: Sequence[RolloutGroup], recorded: RecordedStep) -> dict[str, TokenColumn]:
    """Return the columns of `Step` with numbers per token: weight, entropy, clipped share,
    gradient, log-prob at the last update.

    `clipped` is the share of the updates that trained a token in which its gradient was cut: what
    `clip/low` and `clip/high` count. `gradient` is |dLoss / dlog-prob| at the last update, without
    an entropy bonus; it is left out where a teacher's distributions have a gradient too.
    `last_logp` is left out where there was but one pass over the rollout, because it would say what
    `current_logp` says.
    """
    weights, entropies = [], []
    for update in recorded.first_pass:
        weights += [(sample, sample.weight) for sample in update.samples]
        entropies += zip(update.samples, update.entropy, strict=True)
    columns = {
        "weight": by_completion(groups, weights),
        "entropy": by_completion(groups, entropies),
    }
    if len(recorded.updates) > recorded.minibatches:
        columns["last_logp"] = logp_column(groups, recorded.last_pass)
    passes = np.float32(len(recorded.updates) // recorded.minibatches)
    cuts = []
    if recorded.all_losses.samples:
        for sample, cut_n in recorded.all_losses.by_sample(recorded.all_losses.cut_N.float()):
            cuts.append((sample, cut_n / passes))
    columns["clipped"] = by_completion(groups, cuts)
    if any("teacher" in fact(term, "reads") for term in recorded.algorithm.extra):
        return columns
    gradients = []
    if recorded.last_pass_loss.samples:
        _, gradient_N = recorded.last_pass_loss.gradient()
        gradients = recorded.last_pass_loss.by_sample(gradient_N.abs().float())
    columns["gradient"] = by_completion(groups, gradients)
    return columns


def logp_column(groups: Sequence[RolloutGroup], updates: Sequence[Assessment]) -> TokenColumn:
    """Return the log-probs that one pass over the groups saw; empty where nothing was computed."""
    pairs: list[tuple[Sample, np.ndarray]] = []
    for update in updates:
        pairs += zip(update.samples, update.seen, strict=True)
    return by_completion(groups, pairs)


def by_completion(
    groups: Sequence[RolloutGroup], pairs: Iterable[tuple[Sample, np.ndarray]]
) -> TokenColumn:
    """Return numbers per token of samples, added up for each completion, in the order of the
    groups; empty where there are none.
    """
    numbers: dict[tuple[str, int], np.ndarray] = {}
    for sample, values in pairs:
        key = sample.group, sample.index
        numbers[key] = numbers[key] + values if key in numbers else values
    nothing, columns = np.zeros(0), []
    for group in groups:
        keys = [(group.prompt.id, rollout.index) for rollout in group.rollouts]
        columns.append([numbers.get(key, nothing) for key in keys])
    return columns


def _rollouts(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def _mean(values: np.ndarray) -> float:
    """Return the mean of what is known; NaN if nothing is."""
    return float(np.nanmean(values)) if values.size and not np.isnan(values).all() else math.nan
