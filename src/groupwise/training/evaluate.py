"""Evaluation on held-out prompts: greedy accuracy, sampled accuracy, mean reward, pass@k, each with its 95 % interval.

A completion is right when the first reward function of the recipe gives it 1.  Evaluation has its own sampling settings and its
own random streams; it leaves training exactly as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from groupwise.data.curriculum import RIGHT
from groupwise.distributed import comm
from groupwise.records import Prompt, Sampling, Scored
from groupwise.rewards.compose import Judge
from groupwise.rollout.engine import Engine
from groupwise.utils.statistics import Estimate, mean, proportion


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Results of a policy on held-out prompts."""

    prompts: int
    k: int
    greedy: Estimate
    """Share of prompts whose greedy completion is right."""
    sampled: Estimate
    """Share of sampled completions that are right, averaged over prompts."""
    pass_at_k: Estimate
    """Probability that at least one of k samples is right (unbiased estimator of 2107.03374, equation 1, for k of k)."""
    reward: Estimate
    """Mean combined reward of the sampled completions."""
    length: float
    """Mean completion length of the samples, tokens."""
    truncated: float
    """Share of samples that hit the length limit."""
    by_function: Mapping[str, Estimate]
    """Mean of each reward function over the sampled completions, also of functions with weight 0."""
    by_column: Mapping[str, Mapping[str, float]]
    """Greedy accuracy by the values of the data's breakdown columns (`operator`, `seen` ...)."""
    groups: tuple[Scored, ...] = ()
    """The sampled completions."""
    answers: tuple[Scored, ...] = ()
    """The greedy completions, one to a group."""

    def metrics(self) -> dict[str, float]:
        """Flat names, as the log keeps them under `eval/`."""
        named = {"greedy": self.greedy, "sampled": self.sampled, f"pass@{self.k}": self.pass_at_k, "reward": self.reward}
        flat = {name: estimate.mean for name, estimate in named.items()}
        flat |= {f"{name}/half_width": estimate.half for name, estimate in named.items()}
        flat |= {f"rewards/{name}": estimate.mean for name, estimate in self.by_function.items()}
        flat |= {"completions/mean_length": self.length, "completions/clipped_ratio": self.truncated}
        for column, shares in self.by_column.items():
            flat |= {f"greedy/{column}={value}": share for value, share in shares.items()}
        return flat

    def summary(self) -> dict[str, str]:
        """Label -> text, for tables.  Where the first reward is a score and not a verdict of 0 or 1, nothing is called right."""
        firsts = np.concatenate([group.rewards[:, 0] for group in self.groups]) if self.groups else np.zeros(0)
        verdict = bool(np.isin(firsts[~np.isnan(firsts)], (0.0, 1.0)).all())
        right = {"greedy accuracy": self.greedy, "sampled accuracy": self.sampled, f"pass@{self.k}": self.pass_at_k}
        shown = {label: str(estimate) for label, estimate in right.items()} if verdict else {}
        several = {name: str(estimate) for name, estimate in self.by_function.items()} if len(self.by_function) > 1 else {}
        return shown | {"mean reward": str(self.reward)} | several | {"tokens": f"{self.length:.1f}"}


def pass_at(right: int, count: int, k: int) -> float:
    """Unbiased estimate of pass@k from `count` samples of which `right` are right (2107.03374, equation 1).

    >>> pass_at(1, 4, 2)
    0.5
    """
    if count - right < k:
        return 1.0
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def evaluate(
    engine: Engine,
    rewards: Judge,
    prompts: Sequence[Prompt],
    *,
    k: int,
    sampling: Sampling,
    samples: int | None = None,
    seed: int = 0,
    columns: Sequence[str] = ("operator", "seen"),
) -> Evaluation:
    """Greedy and sampled completions of held-out prompts, scored.

    sampling: of the sampled completions; the greedy ones use its length limit and stop strings.
    samples: completions per prompt from which pass@k is estimated, at least k; default k.
    columns: data columns whose values get their own greedy accuracy, where the rows have them.
    """
    count = samples or k
    greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    answers = _complete(engine, rewards, prompts, 1, greedy, seed)
    groups = _complete(engine, rewards, prompts, count, sampling, seed)
    right = [int((group.rewards[:, 0] >= RIGHT).sum()) for group in groups]
    lengths = [int(rollout.trained.sum()) for group in groups for rollout in group.rollouts]
    first = [float(answer.rewards[0, 0] >= RIGHT) for answer in answers]
    return Evaluation(
        prompts=len(prompts),
        k=k,
        greedy=proportion(sum(first), len(first)),
        sampled=mean([share / count for share in right]),
        pass_at_k=mean([pass_at(share, count, k) for share in right]),
        reward=mean([_mean(group.reward) for group in groups]),
        length=float(np.mean(lengths)) if lengths else math.nan,
        truncated=float(np.mean([rollout.truncated for group in groups for rollout in group.rollouts])) if groups else math.nan,
        by_function={name: mean([_mean(group.rewards[:, k]) for group in groups]) for k, name in enumerate(rewards.names)},
        by_column={column: _by(column, prompts, first) for column in columns if prompts and column in prompts[0].row},
        groups=tuple(groups),
        answers=tuple(answers),
    )


def _complete(engine: Engine, rewards: Judge, prompts: Sequence[Prompt], size: int, sampling: Sampling, seed: int) -> list[Scored]:
    own = comm.share(prompts)
    groups = comm.together(lambda: rewards.score(list(engine.generate(own, group_size=size, sampling=sampling, seed=seed))))
    by_prompt = {group.prompt.id: group for group in groups}
    return [by_prompt[prompt.id] for prompt in prompts]


def _mean(values: np.ndarray) -> float:
    """Mean of what is known; NaN if nothing is."""
    return float(np.nanmean(values)) if not np.isnan(values).all() else math.nan


def _by(column: str, prompts: Sequence[Prompt], right: Sequence[float]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for prompt, hit in zip(prompts, right, strict=True):
        values.setdefault(str(prompt.row[column]), []).append(hit)
    return {value: float(np.mean(hits)) for value, hits in sorted(values.items())}
