"""Episodes with branches as rollouts that have none: for what compares sequences one by one."""

from __future__ import annotations

from dataclasses import replace

from groupwise.records import Finish, Rollout, context_spans


def unbranched(rollout: Rollout) -> list[Rollout]:
    """Return each segment of a rollout as a rollout whose prompt is its context.

    The `finish` of these has no meaning.
    """
    if rollout.episode is None or not rollout.episode.branches:
        return [rollout]
    parts = []
    spans = context_spans(len(rollout), rollout.prompt.tokens, rollout.episode.branches)
    for begin, end, context in spans:
        name = f"{rollout.prompt.id}#{rollout.index}@{begin}"
        ends = end > begin and int(rollout.tokens[end - 1]) in rollout.eos_ids
        parts.append(
            replace(
                rollout,
                prompt=replace(rollout.prompt, id=name, tokens=context),
                tokens=rollout.tokens[begin:end],
                behavior_logp=rollout.behavior_logp[begin:end],
                trained=rollout.trained[begin:end],
                version=rollout.version[begin:end],
                support=None if rollout.support is None else rollout.support[begin:end],
                finish=Finish.EOS if ends else Finish.STOP,
                episode=None,
            )
        )
    return parts
