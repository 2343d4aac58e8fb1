"""Episodes of several agents: each trace is judged by its own reward, beside the traces of the same agent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from groupwise.algorithms.table import ALGORITHMS
from groupwise.records import Episode, Finish, Prompt, Rollout, RolloutGroup, Sampling, Trace, Turn
from groupwise.runs.rollout_table import groups_from_bytes, groups_to_bytes

PROMPT = Prompt(id="0/0", tokens=np.array([1]), text="?")


def rollout(index: int, traces: tuple[Trace, ...], turns: int = 4) -> Rollout:
    """Turns of two tokens each, with one of the world's behind every one."""
    trained = np.tile([True, True, False], turns)
    episode = Episode(
        turns=tuple(Turn(begin=3 * k, end=3 * k + 2, finish=Finish.EOS) for k in range(turns)), traces=traces, reward=0.0
    )
    return Rollout(
        prompt=PROMPT, index=index, tokens=np.arange(3 * turns), behavior_logp=np.full(3 * turns, -1.0), finish=Finish.DONE,
        eos_ids=(), sampling=Sampling(), text="", trained=trained, episode=episode,
    )  # fmt: skip


def scored(*rollouts: Rollout, rewards: list[float] | None = None) -> RolloutGroup:
    reward = np.array(rewards if rewards is not None else [0.0] * len(rollouts))
    return RolloutGroup(rollouts=rollouts, names=("environment",), rewards=reward[:, None], reward=reward)


def hands(*wins: float) -> RolloutGroup:
    """A game of two seats, whose turns alternate: one wins what the other loses."""
    seats = [(Trace(agent="first", turns=(0, 2), reward=win), Trace(agent="second", turns=(1, 3), reward=-win)) for win in wins]
    return scored(*(rollout(index, both) for index, both in enumerate(seats)))


def of_turns(advantage_n: np.ndarray) -> list[float]:
    """The advantage of each turn, which is that of both its tokens; the world's token has none."""
    turns = advantage_n.reshape(-1, 3)
    assert (turns[:, 0] == turns[:, 1]).all() and not turns[:, 2].any()
    return turns[:, 0].tolist()


def test_each_seat_of_a_zero_sum_game_learns_from_its_own_reward():
    group = hands(1.0, -1.0)
    assert group.equal_rewards, "the episodes' rewards are all 0"
    dr = ALGORITHMS["dr_grpo"]
    assert dr.teaches(group)
    ((one, other),) = dr.advantages([group])
    assert of_turns(one) == [1.0, -1.0, 1.0, -1.0]
    assert of_turns(other) == [-1.0, 1.0, -1.0, 1.0]
    assert not dr.teaches(hands(1.0, 1.0)), "each seat's rewards are equal"


def test_a_seat_is_compared_with_the_same_seat_and_with_nobody_else():
    """The first seat always does better: that is no difference between its traces."""
    seats = [(Trace(agent="a", turns=(0,), reward=5.0), Trace(agent="b", turns=(1,), reward=float(k))) for k in range(2)]
    ((one, other),) = ALGORITHMS["dr_grpo"].advantages([scored(*(rollout(k, both) for k, both in enumerate(seats)))])
    assert of_turns(one) == [0.0, -0.5, 0.0, 0.0]
    assert of_turns(other) == [0.0, 0.5, 0.0, 0.0]


def test_several_traces_of_one_agent_are_judged_like_completions():
    """Best of n in an episode: as a group of n completions."""
    solvers = tuple(Trace(agent="solver", turns=(k,), reward=reward) for k, reward in enumerate([1.0, 0.0, 0.0, 1.0]))
    ((found,),) = ALGORITHMS["grpo"].advantages([scored(rollout(0, solvers), rewards=[0.5])])
    plain = [replace(rollout(k, ()), index=k) for k in range(4)]
    (expected,) = ALGORITHMS["grpo"].advantages([scored(*plain, rewards=[1.0, 0.0, 0.0, 1.0])])
    assert of_turns(found) == [value[0] for value in expected]


def test_what_is_in_no_trace_and_what_has_no_reward_learns_nothing():
    seats = [
        (Trace(agent="a", turns=(0,), reward=1.0),),
        (Trace(agent="a", turns=(0,), reward=0.0),),
        (Trace(agent="a", turns=(0,), reward=None),),
        (),
    ]
    (found,) = ALGORITHMS["dr_grpo"].advantages([scored(*(rollout(k, one) for k, one in enumerate(seats)))])
    assert [of_turns(one) for one in found] == [[0.5, 0, 0, 0], [-0.5, 0, 0, 0], [0.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "gdpo", "gspo"])
def test_a_group_without_traces_and_one_of_a_single_agent_are_the_same(name):
    rewards = [1.0, 0.0, 0.5]
    alone = [rollout(k, ()) for k in range(3)]
    whole = [rollout(k, (Trace(agent="agent", turns=(0, 1, 2, 3), reward=reward),)) for k, reward in enumerate(rewards)]
    (plain,), (apart,) = (ALGORITHMS[name].advantages([scored(*each, rewards=rewards)]) for each in (alone, whole))
    for one, other in zip(plain, apart, strict=True):
        trained = alone[0].trained
        np.testing.assert_array_equal(one[trained], other[trained])


def test_a_critic_learns_what_each_seat_will_get():
    group = hands(1.0, -1.0)
    group = replace(group, signals={"value": tuple(np.zeros(12) for _ in range(2))})
    ((one, other),) = ALGORITHMS["ppo"].returns([group])
    for column, win in ((one, 1.0), (other, -1.0)):
        turns = column.reshape(-1, 3)
        assert np.isnan(turns[:, 2]).all()
        assert (np.sign(turns[:, 0]) == [win, -win, win, -win]).all()


def test_other_rewards_are_the_episodes():
    """Only the environment's is the trace's own."""
    group = hands(1.0, -1.0)
    both = np.array([[0.0, 3.0], [0.0, 5.0]])
    group = replace(group, names=("environment", "polite"), rewards=both, weights=(1.0, 0.5), reward=np.array([1.5, 2.5]))
    ((one, other),) = ALGORITHMS["dr_grpo"].advantages([group])
    assert of_turns(one) == [0.5, -1.5, 0.5, -1.5]
    assert of_turns(other) == [-0.5, 1.5, -0.5, 1.5]


def test_traces_are_recorded():
    group = hands(1.0, -1.0)
    (again,) = groups_from_bytes(groups_to_bytes([group]))
    assert [one.episode.traces for one in again.rollouts] == [one.episode.traces for one in group.rollouts]
