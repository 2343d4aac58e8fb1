"""Evaluation on held-out prompts: greedy accuracy, sampled accuracy, mean reward, pass@k, each with
its 95 % interval.

A completion is right when the recipe's verdict gives it 1 (`records.RolloutGroup.right`).  Rates
are over the completions that it graded, and the others are counted; without a verdict there are no
accuracies, only rewards.  Evaluation has its own sampling settings and its own random streams; it
leaves training exactly as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from groupwise.distributed import comm
from groupwise.protocols import Grader
from groupwise.records import Prompt, Rollout, RolloutGroup, Sampling
from groupwise.rollout.engine import Engine
from groupwise.utils.spelling import counted
from groupwise.utils.statistics import Estimate, mean, proportion


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Evaluation:
    """Results of a policy on held-out prompts."""

    prompts: int
    k: int
    verdict: str | None
    """The reward function that says what is right; None: there is none."""
    greedy: Estimate
    """Share of graded greedy completions that are right; NaN without a verdict."""
    sampled: Estimate
    """Share of graded samples that are right, averaged over prompts; NaN without a verdict."""
    pass_at_k: Estimate
    """Probability that at least one of k samples is right (unbiased estimator of 2107.03374,
    equation 1), averaged over the prompts with at least k graded samples; NaN without a verdict."""
    greedy_reward: Estimate
    """Mean combined reward of the greedy completions."""
    reward: Estimate
    """Mean combined reward of the sampled completions."""
    length: float
    """Mean completion length of the samples, tokens."""
    truncated: float
    """Share of samples that hit the length limit."""
    by_function: Mapping[str, Estimate]
    """Mean of each reward function over the sampled completions, also of functions with weight 0.
    """
    none: Mapping[str, float]
    """Share of the samples that a reward function left out (None), of those functions that left any
    out.
    """
    by_column: Mapping[str, Mapping[str, float]]
    """Greedy accuracy by the values of a task's breakdown columns."""
    groups: tuple[RolloutGroup, ...] = ()
    """The sampled completions."""
    answers: tuple[RolloutGroup, ...] = ()
    """The greedy completions, one to a group."""

    def __repr__(self) -> str:
        """One line: the completions are not printed."""
        figures = ", ".join(f"{label} {text}" for label, text in self.summary().items())
        return f"Evaluation({counted(self.prompts, 'prompt')}: {figures})"

    def metrics(self) -> dict[str, float]:
        """Flat names, as the log keeps them under `eval/`.  What could not be computed has none."""
        named = {"greedy_reward": self.greedy_reward}
        if self.verdict is not None:
            named = {"greedy": self.greedy, "sampled": self.sampled}
            named[f"pass@{self.k}"] = self.pass_at_k
        named["reward"] = self.reward
        for name, estimate in self.by_function.items():
            named[f"rewards/{name}"] = estimate
        flat = {name: estimate.mean for name, estimate in named.items()}
        for name, estimate in named.items():
            flat[f"{name}/half_width"] = estimate.half
        flat["completions/mean_length"] = self.length
        flat["completions/clipped_ratio"] = self.truncated
        for name, share in self.none.items():
            flat[f"rewards/{name}/none"] = share
        for column, shares in self.by_column.items():
            for value, share in shares.items():
                flat[f"greedy/{column}={value}"] = share
        return {name: value for name, value in flat.items() if not math.isnan(value)}

    def summary(self) -> dict[str, str]:
        """Label -> text, for tables."""
        estimates = {"greedy reward": self.greedy_reward}
        if self.verdict is not None:
            estimates = {"greedy accuracy": self.greedy, "sampled accuracy": self.sampled}
            estimates[f"pass@{self.k}"] = self.pass_at_k
        estimates["mean reward"] = self.reward
        if len(self.by_function) > 1:
            estimates |= self.by_function
        summary = {label: str(estimate) for label, estimate in estimates.items()}
        for name, share in self.none.items():
            summary[f"{name}: None"] = f"{share:.1%} of the samples"
        summary["tokens"] = f"{self.length:.1f}"
        return summary


def pass_at(right: int, count: int, k: int) -> float:
    """Unbiased estimate of pass@k from `count` samples of which `right` are right (2107.03374,
    equation 1).

    >>> pass_at(1, 4, 2)
    0.5
    """
    if count - right < k:
        return 1.0
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def evaluate(
    engine: Engine,
    rewards: Grader,
    prompts: Sequence[Prompt],
    *,
    k: int,
    sampling: Sampling,
    seed: int = 0,
    columns: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Greedy and sampled completions of held-out prompts, scored.

    sampling: of the sampled completions; the greedy ones use its length limit and stop strings.
    columns: data columns whose values get their own greedy accuracy.
    progress: called with the number of groups that this process has sampled and of all that it
        samples.
    """
    greedy_sampling = replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    answers = _complete(engine, rewards, prompts, 1, greedy_sampling, seed, progress)
    groups = _complete(engine, rewards, prompts, k, sampling, seed, progress)
    verdict = groups[0].verdict if groups else None
    greedy_right = [float(answer.right[0]) for answer in answers]
    graded = [value for value in greedy_right if not math.isnan(value)]
    sampled, pass_at_k = _sampled_right(groups, k)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    length = truncated = math.nan
    if rollouts:
        length = float(np.mean([int(rollout.trained.sum()) for rollout in rollouts]))
        truncated = float(np.mean([rollout.truncated for rollout in rollouts]))
    by_function, none = {}, {}
    for place, name in enumerate(rewards.names):
        means = [_mean(group.rewards[:, place]) for group in groups]
        by_function[name] = mean(means, shares=name == verdict)
        share = _share_of_none(groups, place)
        if share > 0.0:
            none[name] = share
    by_column = {}
    if graded:
        by_column = {column: _by(column, prompts, greedy_right) for column in columns}
    return Evaluation(
        prompts=len(prompts),
        k=k,
        verdict=verdict,
        greedy=proportion(sum(graded), len(graded)),
        sampled=mean(sampled, shares=True),
        pass_at_k=mean(pass_at_k, shares=True),
        greedy_reward=mean([float(answer.reward[0]) for answer in answers]),
        reward=mean([_mean(group.reward) for group in groups]),
        length=length,
        truncated=truncated,
        by_function=by_function,
        none=none,
        by_column=by_column,
        groups=tuple(groups),
        answers=tuple(answers),
    )


def _sampled_right(groups: Sequence[RolloutGroup], k: int) -> tuple[list[float], list[float]]:
    """Return for each prompt the share of its graded samples that are right, and pass@k where at
    least k are graded.
    """
    shares, pass_at_k = [], []
    for group in groups:
        right = group.right[~np.isnan(group.right)]
        if right.size:
            shares.append(float(right.mean()))
        if right.size >= k:
            pass_at_k.append(pass_at(int(right.sum()), right.size, k))
    return shares, pass_at_k


def _share_of_none(groups: Sequence[RolloutGroup], place: int) -> float:
    """Return the share of the samples that a reward function did not score."""
    if not groups:
        return 0.0
    return float(np.isnan(np.concatenate([group.rewards[:, place] for group in groups])).mean())


def _complete(
    engine: Engine,
    rewards: Grader,
    prompts: Sequence[Prompt],
    size: int,
    sampling: Sampling,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> list[RolloutGroup]:
    own = comm.share(prompts)

    def sampled() -> Iterator[tuple[Rollout, ...]]:
        for done, group in enumerate(
            engine.generate(own, group_size=size, sampling=sampling, seed=seed), 1
        ):
            if progress is not None:
                progress(done, len(own))
            yield group

    groups = comm.together(lambda: rewards.score(list(sampled())))
    by_prompt = {group.prompt.id: group for group in groups}
    return [by_prompt[prompt.id] for prompt in prompts]


def _mean(values: np.ndarray) -> float:
    """Mean of what is known; NaN if nothing is."""
    if np.isnan(values).all():
        return math.nan
    return float(np.nanmean(values))


def _by(column: str, prompts: Sequence[Prompt], right: Sequence[float]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for prompt, hit in zip(prompts, right, strict=True):
        if not math.isnan(hit):
            values.setdefault(str(prompt.row[column]), []).append(hit)
    return {value: float(np.mean(hits)) for value, hits in sorted(values.items())}
