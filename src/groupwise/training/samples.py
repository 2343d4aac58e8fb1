"""Rollouts become samples: the sequences that the policy is trained on, with a weight per token (0
for tokens it did not write).

R completions of the optimizer step   N their trained tokens   n tokens of a completion
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from groupwise.algorithms.advantages import Advantages, is_dead
from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.losses import forking
from groupwise.algorithms.parts import fact
from groupwise.config.settings import GroupSettings
from groupwise.records import Rollout, RolloutGroup, Sample

SIGNALS = ("scored_logp", "value", "old_value", "return", "teacher_logp", "process")
"""Signals of completions that a loss may read, beside the reference's."""


def weigh(
    groups: Sequence[RolloutGroup], advantages: Advantages, algorithm: Algorithm
) -> list[Sample]:
    """Return the samples of one optimizer step, every trained token with its final weight.

    The denominators count every completion of `groups` (of the live ones with `dead_groups: drop`),
    also empty and masked ones, which become no samples.
    """
    if algorithm.dead_groups == "drop":
        live = [i for i, advantage in enumerate(advantages) if not is_dead(advantage)]
        groups, advantages = [groups[i] for i in live], [advantages[i] for i in live]
    weights = iter(_token_weights(groups, algorithm))
    read = _signals_read(algorithm)
    samples = []
    for group, of_group in zip(groups, advantages, strict=True):
        for i, (rollout, advantage_n) in enumerate(zip(group.rollouts, of_group, strict=True)):
            weight = next(weights)
            if _trained_tokens(rollout, algorithm) == 0:
                continue
            signals = {name: column[i] for name, column in group.signals.items()}
            extra = {name: signals[name] for name in read & signals.keys()}
            samples.append(
                sample_of(
                    rollout,
                    weight=weight,
                    advantage=advantage_n,
                    reference_logp=signals.get("reference_logp"),
                    extra=extra,
                )
            )
    return samples


def _trained_tokens(rollout: Rollout, algorithm: Algorithm) -> int:
    """Return how many tokens of a rollout are trained: none of one that is masked."""
    if algorithm.masks(rollout):
        return 0
    return int(rollout.trained.sum())


def _token_weights(groups: Sequence[RolloutGroup], algorithm: Algorithm) -> list[float]:
    """Return the weight of a trained token of each completion, in the order of the groups."""
    tokens, prompts = [], []
    for place, group in enumerate(groups):
        for rollout in group.rollouts:
            tokens.append(_trained_tokens(rollout, algorithm))
            prompts.append(place)
    if not tokens:
        return []
    tokens_R, prompt_R = np.array(tokens, np.int64), np.array(prompts, np.int64)
    return [float(weight) for weight in algorithm.token_weights(tokens_R, prompt_R)]


def _signals_read(algorithm: Algorithm) -> set[str]:
    """Return the signals that the loss reads."""
    names = {"scored_logp", "value", "old_value", "return"}
    for term in algorithm.extra:
        names.update(fact(term, "reads"))
    return names & set(SIGNALS)


def with_gradient(algorithm: Algorithm, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that a step computes: exactly the same step for less work.

    A sample whose advantages are all 0 is left out where nothing else gives it a gradient.  (A loss
    that balances experts does, and a caller that has one computes all.)
    """
    if not algorithm.skips_dead:
        return list(samples)
    return [sample for sample in samples if sample.advantage.any()]


def with_forking(
    algorithm: Algorithm, samples: Sequence[Sample], entropies: Sequence[np.ndarray]
) -> list[Sample]:
    """Return the samples of a whole step with the column `forking`: 1 for every token that a
    high-entropy mask keeps, else 0.

    entropies: per sample (n,), nats.
    """
    if not samples:
        return []
    trained = [sample.weight != 0 for sample in samples]
    pairs = zip(entropies, trained, strict=True)
    entropy_N = np.concatenate([entropy_n[trained_n] for entropy_n, trained_n in pairs])
    forking_N = forking(torch.from_numpy(entropy_N), algorithm.entropy_quantile).numpy()
    marked, begin = [], 0
    for sample, trained_n in zip(samples, trained, strict=True):
        end = begin + np.count_nonzero(trained_n)
        column_n = np.zeros(trained_n.size)
        column_n[trained_n] = forking_N[begin:end]
        marked.append(replace(sample, extra={**sample.extra, "forking": column_n}))
        begin = end
    return marked


def entropy_tokens(algorithm: Algorithm, samples: Sequence[Sample]) -> float:
    """Return the tokens of a whole step over which an entropy bonus is a mean: the trained ones, or
    those that a high-entropy mask keeps; 1 where there are none.
    """
    tokens = 0
    for sample in samples:
        column = sample.extra["forking"] if algorithm.needs.forking else sample.weight
        tokens += int(np.count_nonzero(column))
    return float(max(tokens, 1))


def minibatches(groups: Sequence[RolloutGroup], group: GroupSettings) -> list[np.ndarray]:
    """Return the groups of each optimizer step of a pass, by place."""
    return np.array_split(np.arange(len(groups)), min(group.minibatches, len(groups)))


def sample_of(
    rollout: Rollout,
    *,
    weight: float = 1.0,
    advantage: np.ndarray | None = None,
    reference_logp: np.ndarray | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Sample:
    """Return a rollout as it is packed: `weight` on every token the policy wrote, 0 on the others.

    extra: see `Sample`.
    """
    behavior_logp = rollout.behavior_logp
    if not rollout.trained.all():
        # Tokens that the policy did not write have no log-prob; an engine may have noted any.
        behavior_logp = np.where(rollout.trained, behavior_logp, 0.0)
    return Sample(
        group=rollout.prompt.id,
        index=rollout.index,
        branches=() if rollout.episode is None else rollout.episode.branches,
        images=rollout.prompt.images,
        prompt=rollout.prompt.tokens,
        completion=rollout.tokens,
        weight=np.where(rollout.trained, weight, 0.0),
        advantage=advantage,  # type: ignore[arg-type]
        behavior_logp=behavior_logp,
        temperature=rollout.sampling.temperature or 1.0,
        reference_logp=reference_logp,
        support=rollout.support,
        extra=extra or {},
    )
