"""Episodes of several agents that are rewarded apart: each trace is judged like a completion,
beside those of the same agent.

An episode of two players whose rewards are 1 and -1 has the reward 0: nothing could be learnt from
it.  So a credit is not given the group of such episodes, but a group for each agent, whose
completions are that agent's traces; the advantages of a trace go to the tokens of its turns, and
what belongs to no trace gets nothing.

n tokens of a completion
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from groupwise.records import Rollout, RolloutGroup, Trace

ENVIRONMENT = "environment"
"""The reward function whose reward a trace has of its own."""
Owner = tuple[int, np.ndarray]
"""A completion's place in its group, and bool (n,): the tokens of a trace."""


def by_trace(
    judge: Callable[[list[RolloutGroup]], list[list[np.ndarray]]],
    groups: Sequence[RolloutGroup],
    nothing: float,
) -> list[list[np.ndarray]]:
    """What `judge` gives for every token, float64 (n,) of each completion, where traces are judged
    apart.

    nothing: for tokens that belong to no trace.
    """
    parts = [of_agents(group) for group in groups]
    judged = iter(judge([scored for part in parts for scored, _ in part]))
    judgements = []
    for group, part in zip(groups, parts, strict=True):
        whole = [np.full(len(rollout), nothing) for rollout in group.rollouts]
        for _, owners in part:
            for (i, mine_n), value_n in zip(owners, next(judged), strict=True):
                whole[i] = np.where(mine_n, value_n, whole[i])
        judgements.append(whole)
    return judgements


def of_agents(group: RolloutGroup) -> list[tuple[RolloutGroup, list[Owner]]]:
    """The group as it is judged: of each agent a group of its traces, or the group itself where no
    agent is rewarded apart.
    """
    traces = [(i, trace) for i, rollout in enumerate(group.rollouts) for trace in _traces(rollout)]
    if not traces or ENVIRONMENT not in group.names:
        return [
            (group, [(i, np.ones(len(rollout), bool)) for i, rollout in enumerate(group.rollouts)])
        ]
    agents = dict.fromkeys(trace.agent for _, trace in traces)
    return [
        _of_agent(group, [(i, trace) for i, trace in traces if trace.agent == agent])
        for agent in agents
    ]


def _traces(rollout: Rollout) -> tuple[Trace, ...]:
    return () if rollout.episode is None else rollout.episode.traces


def _of_agent(
    group: RolloutGroup, traces: Sequence[tuple[int, Trace]]
) -> tuple[RolloutGroup, list[Owner]]:
    column, owners, rollouts, rewards, sums = (
        group.names.index(ENVIRONMENT),
        list[Owner](),
        [],
        [],
        [],
    )
    for place, (i, trace) in enumerate(traces):
        rollout, reward_K = group.rollouts[i], group.rewards[i].copy()
        assert rollout.episode is not None
        mine_n = np.zeros(len(rollout), bool)
        for number in trace.turns:
            turn = rollout.episode.turns[number]
            mine_n[turn.begin : turn.end] = True
        reward_K[column] = np.nan if trace.reward is None else trace.reward
        known_K = ~np.isnan(reward_K)
        scorable = known_K.any() and not np.isnan(group.reward[i])
        owners.append((i, mine_n))
        rollouts.append(replace(rollout, index=place, trained=rollout.trained & mine_n))
        rewards.append(reward_K)
        sums.append(
            float((reward_K * np.array(group.weights))[known_K].sum()) if scorable else np.nan
        )
    signals = {
        name: tuple(columns[i] for i, _ in owners) for name, columns in group.signals.items()
    }
    if "process" in signals:  # the rewards of others' steps are not its own
        signals["process"] = tuple(
            np.where(mine_n, step_n, np.nan)
            for (_, mine_n), step_n in zip(owners, signals["process"], strict=True)
        )
    scored = replace(
        group,
        rollouts=tuple(rollouts),
        rewards=np.array(rewards),
        reward=np.array(sums),
        signals=signals,
        extra={},
    )
    return scored, owners
