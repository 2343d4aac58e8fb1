"""Rollouts become samples: the sequences that the policy is trained on, with a weight per token (0 for tokens it did not write)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from groupwise.algorithms.advantages import Advantages, is_dead
from groupwise.algorithms.parts import fact
from groupwise.algorithms.table import Algorithm
from groupwise.config.settings import GroupSettings
from groupwise.records import Finish, Rollout, Sample, Scored

SIGNALS = ("scored_logp", "value", "return", "teacher_logp", "process")
"""Signals of completions that a loss may read, beside the reference's."""
WEIGHT, POLICY = "weight/", "policy"
"""Where demonstrations are mixed in, each term of the loss has a column of weights: `WEIGHT` and its name, or `POLICY` for the
surrogate."""


def weigh(groups: Sequence[Scored], advantages: Advantages, algorithm: Algorithm) -> list[Sample]:
    """The samples of one optimizer step, every trained token with its final weight; of an episode with branches several.

    The denominators count every completion of `groups` (of the live ones with `dead_groups: drop`), also empty and masked ones,
    which become no samples.
    """
    if algorithm.dead_groups == "drop":
        kept = [i for i, found in enumerate(advantages) if not is_dead(found)]
        groups, advantages = [groups[i] for i in kept], [advantages[i] for i in kept]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    masked = [algorithm.truncated == "mask" and rollout.truncated for rollout in rollouts]
    tokens_R = np.array([0 if out else int(r.trained.sum()) for r, out in zip(rollouts, masked, strict=True)], dtype=np.int64)
    prompt_R = np.array([i for i, group in enumerate(groups) for _ in group.rollouts], dtype=np.int64)
    weight_R = algorithm.weigh(tokens_R, prompt_R) if rollouts else np.zeros(0)
    credit = [advantage for group in advantages for advantage in group]
    signals = [{name: column[i] for name, column in group.signals.items()} for group in groups for i in range(len(group.rollouts))]
    columns = zip(rollouts, weight_R, credit, signals, tokens_R, strict=True)
    read = {name for term in algorithm.extra for name in fact(term, "reads")} | {"scored_logp", "value", "return"}
    return [
        sample
        for rollout, weight, advantage, found, tokens in columns
        if tokens > 0
        for sample in samples_of(
            rollout,
            weight=float(weight),
            advantage=advantage,
            reference_logp=found.get("reference_logp"),
            extra={name: found[name] for name in SIGNALS if name in found and name in read},
        )
    ]


def minibatches(groups: Sequence[Scored], group: GroupSettings) -> list[np.ndarray]:
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
    """A rollout as it is packed: `weight` on every token the policy wrote, 0 on the others.  extra: see `Sample`.

    All of it must have been drawn behind its prompt and the tokens before; see `samples_of`.
    """
    assert rollout.episode is None or not rollout.episode.branches, "an episode with branches is several samples"
    return _sample(rollout, weight, advantage, reference_logp, extra)


def samples_of(
    rollout: Rollout,
    *,
    weight: float = 1.0,
    advantage: np.ndarray | None = None,
    reference_logp: np.ndarray | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> list[Sample]:
    """`sample_of` of any rollout: an episode with branches becomes a sample for each, and one for what stands before the first.

    Where a branch's context begins with the prompt, its sample keeps the prompt, which is then shared, and the rest of the context
    stands in its completion.
    """
    whole = _sample(rollout, weight, advantage, reference_logp, extra)
    if rollout.episode is None or not rollout.episode.branches:
        return [whole]
    return [_part(whole, begin, end, context) for begin, end, context in stretches(rollout)]


def _sample(
    rollout: Rollout,
    weight: float,
    advantage: np.ndarray | None,
    reference_logp: np.ndarray | None,
    extra: Mapping[str, np.ndarray] | None,
) -> Sample:
    return Sample(
        group=rollout.prompt.id,
        index=rollout.index,
        prompt=rollout.prompt.tokens,
        completion=rollout.tokens,
        weight=np.where(rollout.trained, weight, 0.0),
        advantage=np.zeros(len(rollout)) if advantage is None else advantage,
        # What is said of tokens that the policy did not write is nobody's business.
        behavior_logp=rollout.behavior_logp if rollout.trained.all() else np.where(rollout.trained, rollout.behavior_logp, 0.0),
        temperature=rollout.sampling.temperature or 1.0,
        reference_logp=reference_logp,
        support=rollout.support,
        extra=extra or {},
    )


def stretches(rollout: Rollout) -> list[tuple[int, int, np.ndarray]]:
    """Stretches of tokens drawn behind one context: (first, one after the last, the ids before the first)."""
    branches = () if rollout.episode is None else rollout.episode.branches
    begins = [0, *(branch.begin for branch in branches), len(rollout)]
    contexts = [rollout.prompt.tokens, *(branch.context for branch in branches)]
    found = [(a, b, context) for a, b, context in zip(begins[:-1], begins[1:], contexts, strict=True) if b > a]
    return found or [(0, 0, rollout.prompt.tokens)]


def unbranched(rollout: Rollout) -> list[Rollout]:
    """Each stretch of a rollout as a rollout whose prompt is its context.  Their `finish` has no meaning."""
    if rollout.episode is None or not rollout.episode.branches:
        return [rollout]
    return [
        replace(
            rollout,
            prompt=replace(rollout.prompt, id=f"{rollout.prompt.id}#{rollout.index}@{begin}", tokens=context),
            tokens=rollout.tokens[begin:end],
            behavior_logp=rollout.behavior_logp[begin:end],
            trained=rollout.trained[begin:end],
            version=rollout.version[begin:end],
            support=None if rollout.support is None else rollout.support[begin:end],
            finish=Finish.EOS if end > begin and int(rollout.tokens[end - 1]) in rollout.eos_ids else Finish.STOP,
            episode=None,
        )
        for begin, end, context in stretches(rollout)
    ]


def _part(whole: Sample, begin: int, end: int, context: np.ndarray) -> Sample:
    """The part of a completion that was drawn behind these ids."""
    if begin == end:
        return whole
    prompt = whole.prompt
    ours = np.array_equal(context[: prompt.size], prompt)
    rest = context[prompt.size :] if ours else context[:0]

    def cut(column: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(rest.size, column.dtype), column[begin:end]])

    nothing = (np.zeros(0, np.int64),) * rest.size
    return replace(
        whole,
        part=(begin, end),
        prompt=prompt if ours else context,
        completion=np.concatenate([rest, whole.completion[begin:end]]),
        weight=cut(whole.weight),
        advantage=cut(whole.advantage),
        behavior_logp=cut(whole.behavior_logp),
        reference_logp=None if whole.reference_logp is None else cut(whole.reference_logp),
        support=None if whole.support is None else (*nothing, *whole.support[begin:end]),
        extra={name: cut(column) for name, column in whole.extra.items()},
    )


Pair = tuple[Sample, np.ndarray]
"""A sample, and a number for each token of its completion."""


def joined(parts: Iterable[Pair]) -> list[Pair]:
    """The parts of episodes put together: one sample for each completion, with the columns of all its tokens, and its numbers.

    Such a sample has the prompt of its first part; it is for reading and must not be packed.
    """
    blocks: list[list[Pair]] = []
    for sample, values in parts:
        last = blocks[-1][-1][0] if blocks else None
        goes_on = (
            last is not None
            and sample.part is not None
            and last.part is not None
            and (last.group, last.index, last.part[1]) == (sample.group, sample.index, sample.part[0])
        )
        if goes_on:
            blocks[-1].append((sample, values))
        else:
            blocks.append([(sample, values)])
    return [_whole(block) for block in blocks]


def _whole(block: Sequence[Pair]) -> Pair:
    first = block[0][0]
    if first.part is None:
        return block[0]

    def own(columns: Iterable[np.ndarray]) -> np.ndarray:
        cut = [column[column.shape[0] - size :] for column, size in zip(columns, sizes, strict=True)]
        return np.concatenate(cut)

    samples = [sample for sample, _ in block]
    sizes = [end - begin for begin, end in (sample.part for sample in samples if sample.part is not None)]
    supports = [sample.support[-size:] for sample, size in zip(samples, sizes, strict=True) if sample.support is not None]
    references = [sample.reference_logp for sample in samples if sample.reference_logp is not None]
    sample = replace(
        first,
        part=None,
        completion=own(sample.completion for sample in samples),
        weight=own(sample.weight for sample in samples),
        advantage=own(sample.advantage for sample in samples),
        behavior_logp=own(sample.behavior_logp for sample in samples),
        reference_logp=own(references) if references else None,
        support=tuple(ids for support in supports for ids in support) if supports else None,
        extra={name: own(sample.extra[name] for sample in samples) for name in first.extra},
    )
    return sample, own(values for _, values in block)


def part_of(sample: Sample, column: np.ndarray) -> np.ndarray:
    """Numbers for the tokens of a whole completion (n,) as those of the sample's, 0 where they are not of the part."""
    if sample.part is None:
        return column
    begin, end = sample.part
    return np.concatenate([np.zeros(sample.completion.size - (end - begin), column.dtype), column[begin:end]])
