"""Rollouts become samples: the sequences that the policy is trained on, with a weight per token (0
for tokens it did not write).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from groupwise.algorithms.advantages import Advantages, is_dead
from groupwise.algorithms.losses import forking
from groupwise.algorithms.parts import fact
from groupwise.algorithms.table import Algorithm
from groupwise.config.settings import GroupSettings
from groupwise.records import Finish, Rollout, RolloutGroup, Sample, stretches

SIGNALS = ("scored_logp", "value", "old_value", "return", "teacher_logp", "process")
"""Signals of completions that a loss may read, beside the reference's."""
WEIGHT, POLICY = "weight/", "policy"
"""Where demonstrations are mixed in, each term of the loss has a column of weights: `WEIGHT` and
its name, or `POLICY` for the surrogate."""


def weigh(
    groups: Sequence[RolloutGroup], advantages: Advantages, algorithm: Algorithm
) -> list[Sample]:
    """The samples of one optimizer step, every trained token with its final weight.

    The denominators count every completion of `groups` (of the live ones with `dead_groups: drop`),
    also empty and masked ones, which become no samples.
    """
    if algorithm.dead_groups == "drop":
        kept = [i for i, advantage in enumerate(advantages) if not is_dead(advantage)]
        groups, advantages = [groups[i] for i in kept], [advantages[i] for i in kept]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    masked = [algorithm.truncated == "mask" and rollout.truncated for rollout in rollouts]
    tokens_R = np.array(
        [0 if out else int(r.trained.sum()) for r, out in zip(rollouts, masked, strict=True)],
        dtype=np.int64,
    )
    prompt_R = np.array(
        [i for i, group in enumerate(groups) for _ in group.rollouts], dtype=np.int64
    )
    weight_R = algorithm.token_weights(tokens_R, prompt_R) if rollouts else np.zeros(0)
    credit = [advantage for group in advantages for advantage in group]
    signals = [
        {name: column[i] for name, column in group.signals.items()}
        for group in groups
        for i in range(len(group.rollouts))
    ]
    columns = zip(rollouts, weight_R, credit, signals, tokens_R, strict=True)
    read = {name for term in algorithm.extra for name in fact(term, "reads")} | {
        "scored_logp",
        "value",
        "old_value",
        "return",
    }
    return [
        sample_of(
            rollout,
            weight=float(weight),
            advantage=advantage,
            reference_logp=signal.get("reference_logp"),
            extra={name: signal[name] for name in SIGNALS if name in signal and name in read},
        )
        for rollout, weight, advantage, signal, tokens in columns
        if tokens > 0
    ]


def with_gradient(algorithm: Algorithm, samples: Sequence[Sample]) -> list[Sample]:
    """The samples that a step computes: exactly the same step for less work.

    Those whose advantages are all 0 are left out where nothing else gives them a gradient.  (A loss
    that balances experts does, and a caller that has one computes all.)  Demonstrations have
    indices below 0.
    """
    return [
        sample
        for sample in samples
        if sample.advantage.any() or not algorithm.skips_dead or sample.index < 0
    ]


def with_forking(
    algorithm: Algorithm, samples: Sequence[Sample], entropies: Sequence[np.ndarray]
) -> list[Sample]:
    """The samples of a whole step with the column `forking`: 1 for every token that a high-entropy
    mask keeps, else 0.

    entropies: per sample (n,), nats.
    """
    if not samples:
        return []
    trained = [sample.weight != 0 for sample in samples]
    entropy_N = np.concatenate(
        [values[rows] for values, rows in zip(entropies, trained, strict=True)]
    )
    forking_N = forking(torch.from_numpy(entropy_N), algorithm.entropy_quantile).numpy()
    ends = np.cumsum([np.count_nonzero(rows) for rows in trained])
    columns = [np.zeros(rows.size) for rows in trained]
    for column, rows, values in zip(columns, trained, np.split(forking_N, ends[:-1]), strict=True):
        column[rows] = values
    return [
        replace(one, extra={**one.extra, "forking": column})
        for one, column in zip(samples, columns, strict=True)
    ]


def entropy_tokens(algorithm: Algorithm, samples: Sequence[Sample]) -> float:
    """Tokens of a whole step over which an entropy bonus is a mean: the trained ones, or those that
    a high-entropy mask keeps.  1 where there are none."""
    columns = [
        sample.extra["forking"] if algorithm.needs_forking else sample.weight for sample in samples
    ]
    return float(max(sum(map(np.count_nonzero, columns)), 1))


def minibatches(groups: Sequence[RolloutGroup], group: GroupSettings) -> list[np.ndarray]:
    """The groups of each optimizer step of a pass, by place."""
    return np.array_split(np.arange(len(groups)), min(group.minibatches, len(groups)))


def sample_of(
    rollout: Rollout,
    *,
    weight: float = 1.0,
    advantage: np.ndarray | None = None,
    reference_logp: np.ndarray | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Sample:
    """A rollout as it is packed: `weight` on every token the policy wrote, 0 on the others.  extra:
    see `Sample`.
    """
    return Sample(
        group=rollout.prompt.id,
        index=rollout.index,
        branches=() if rollout.episode is None else rollout.episode.branches,
        prompt=rollout.prompt.tokens,
        completion=rollout.tokens,
        weight=np.where(rollout.trained, weight, 0.0),
        advantage=advantage,  # type: ignore[arg-type]
        # Tokens that the policy did not write have no log-prob; an engine may have noted any
        # number.
        behavior_logp=(
            rollout.behavior_logp
            if rollout.trained.all()
            else np.where(rollout.trained, rollout.behavior_logp, 0.0)
        ),
        temperature=rollout.sampling.temperature or 1.0,
        reference_logp=reference_logp,
        support=rollout.support,
        extra=extra or {},
    )


def unbranched(rollout: Rollout) -> list[Rollout]:
    """Each stretch of a rollout as a rollout whose prompt is its context.  Their `finish` has no
    meaning.
    """
    if rollout.episode is None or not rollout.episode.branches:
        return [rollout]
    return [
        replace(
            rollout,
            prompt=replace(
                rollout.prompt, id=f"{rollout.prompt.id}#{rollout.index}@{begin}", tokens=context
            ),
            tokens=rollout.tokens[begin:end],
            behavior_logp=rollout.behavior_logp[begin:end],
            trained=rollout.trained[begin:end],
            version=rollout.version[begin:end],
            support=None if rollout.support is None else rollout.support[begin:end],
            finish=(
                Finish.EOS
                if end > begin and int(rollout.tokens[end - 1]) in rollout.eos_ids
                else Finish.STOP
            ),
            episode=None,
        )
        for begin, end, context in stretches(
            len(rollout), rollout.prompt.tokens, rollout.episode.branches
        )
    ]
