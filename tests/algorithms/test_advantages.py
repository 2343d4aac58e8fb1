"""Credits against loops transcribed from the formulas, the worked examples, and their invariances."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.algorithms import advantages as credit
from groupwise.algorithms.parts import fact, parameters, with_options
from groupwise.algorithms.table import PARTS
from groupwise.errors import ConfigError

REWARDS = st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=2, max_size=9)


def firsts(advantages):
    """One number per completion, where it is the same at every token."""
    assert all((completion == completion[0]).all() for group in advantages for completion in group)
    return [[float(completion[0]) for completion in group] for group in advantages]


def test_worked_example_of_standardized(scored):
    group = scored([1.0, 0.0, 0.5])
    assert firsts(credit.Standardized()([group]))[0] == pytest.approx([0.99980004, -0.99980004, 0.0], abs=1e-8)
    population = firsts(credit.Standardized(ddof=0, eps=0.0)([group]))[0]
    assert population == pytest.approx([math.sqrt(1.5), -math.sqrt(1.5), 0.0])
    assert firsts(credit.Centered()([group]))[0] == [0.5, -0.5, 0.0]
    assert firsts(credit.LeaveOneOut()([group]))[0] == pytest.approx([0.75, -0.75, 0.0])


@pytest.mark.slow
@given(REWARDS, st.floats(-100, 100), st.floats(0.1, 100))
def test_standardized_ignores_shift_and_scale(scored, rewards, shift, scale):
    moved = [round(r, 3) * scale + shift for r in rewards]
    if max(rewards) - min(rewards) < 0.01:
        return
    before = firsts(credit.Standardized(eps=0.0)([scored(rewards)]))[0]
    assert firsts(credit.Standardized(eps=0.0)([scored(moved)]))[0] == pytest.approx(before, abs=1e-8)


@pytest.mark.parametrize("name", ["standardized", "centered", "leave_one_out", "decoupled", "whitened"])
@given(rewards=REWARDS, data=st.data())
def test_permuting_completions_permutes_advantages(scored, name, rewards, data):
    order = data.draw(st.permutations(range(len(rewards))))
    function = PARTS["credit"][name]()
    before = firsts(function([scored(rewards)]))[0]
    after = firsts(function([scored([rewards[i] for i in order])]))[0]
    assert after == pytest.approx([before[i] for i in order], abs=1e-9)


@pytest.mark.parametrize("name", ["standardized", "centered", "leave_one_out", "decoupled", "whitened"])
@pytest.mark.parametrize("keywords", [{}, {"eps": 0.0, "ddof": 0}])
def test_equal_rewards_give_exactly_zero(scored, name, keywords):
    """The float std of eight times 0.1 is 1.4e-17, not 0: (r - mean) / std would be noise of size 1."""
    function = PARTS["credit"][name](**({} if name == "centered" else keywords))
    group = scored([0.1] * 8)
    advantages = function([group])[0]
    assert credit.is_dead(advantages)
    assert all((a == 0.0).all() and a.dtype == np.float64 for a in advantages)


WEIGHTED = [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
"""With the weights .1, .2, .3 every sum is .3 but for rounding: .1 + .2 is not .3."""


@pytest.mark.parametrize("name", ["standardized", "centered", "leave_one_out", "maxrl", "batch_centered", "whitened"])
@pytest.mark.parametrize("keywords", [{}, {"eps": 0.0}, {"eps": 0.0, "scale": "batch"}, {"eps": 0.0, "baseline": True}])
def test_differences_below_rounding_are_no_differences(scored, name, keywords):
    function = PARTS["credit"][name]()
    group = scored(WEIGHTED, weights=(0.1, 0.2, 0.3))
    assert len(set(group.reward)) == 2
    assert group.equal_rewards
    function = with_options(function, {key: value for key, value in keywords.items() if key in parameters(function)})
    assert credit.is_dead(function([group])[0])
    cancelled = scored([[3.0, 1.0], [0.0, 0.0]], weights=(0.1, -0.3))  # 5.6e-17 and 0
    assert cancelled.equal_rewards
    assert credit.is_dead(function([cancelled])[0])
    single = scored((np.float32([0.1, 0.2, 0.3]) @ np.float32(WEIGHTED).T).astype(float))
    assert credit.is_dead(function([single])[0])


def test_small_differences_are_differences(scored):
    for rewards in ([1e-9, 2e-9], [1000.0, 1000.01], [-1e6, -1e6 + 1.0]):
        assert not credit.is_dead(credit.Centered()([scored(rewards)])[0])


@pytest.mark.parametrize("name", ["standardized", "centered", "leave_one_out", "decoupled"])
def test_p23_an_unscorable_completion_counts_as_absent(scored, name):
    function = PARTS["credit"][name]()
    with_hole = firsts(function([scored([1.0, None, 0.0, 0.25])]))[0]
    without = firsts(function([scored([1.0, 0.0, 0.25])]))[0]
    assert with_hole[1] == 0.0
    assert [with_hole[0], *with_hole[2:]] == pytest.approx(without)


def test_groups_with_one_or_no_scorable_completion_are_silent(scored):
    groups = [scored([None, None]), scored([None, 3.0])]
    for function in (credit.Standardized(), credit.Centered(), credit.LeaveOneOut(), credit.Decoupled()):
        assert firsts(function(groups)) == [[0.0, 0.0], [0.0, 0.0]]
    assert all(map(credit.is_dead, credit.Standardized(scale="batch")(groups)))
    assert credit.Whitened()([scored([None, None])])[0][0].tolist() == [0.0, 0.0]


def test_leave_one_out_takes_the_kl_from_the_reward(scored):
    """r - beta sum(b - ref) over trained tokens; here 1 - 0.5 (0.3 - 0.1) and 0 - 0.5 (-0.4), the tool's token left out."""
    group = scored(
        [1.0, 0.0],
        behavior=[[-1.0, -2.0], [-0.9, -5.0]],
        reference=[[-1.3, -1.9], [-0.5, 5.0]],
        trained=[[True, True], [True, False]],
    )
    adjusted = [1.0 - 0.5 * (0.3 - 0.1), 0.0 - 0.5 * -0.4]
    assert firsts(credit.LeaveOneOut(beta=0.5)([group]))[0] == pytest.approx([adjusted[0] - adjusted[1], adjusted[1] - adjusted[0]])
    with pytest.raises(ConfigError, match="reference_logp"):
        credit.LeaveOneOut(beta=0.5)([scored([1.0, 0.0])])


def test_decoupled_against_a_loop(scored):
    rewards = [[[1.0, 0.2], [0.0, 0.4], [0.5, None]], [[2.0, None], [2.0, None], [0.0, None]]]
    weights = (0.7, 0.3)
    sums = []
    for group in rewards:
        columns = []
        for k in range(2):
            known = [row[k] for row in group if row[k] is not None]
            if len(known) < 2:
                columns.append([0.0] * len(group))
                continue
            mean, std = statistics.fmean(known), statistics.stdev(known)
            columns.append([0.0 if row[k] is None else (row[k] - mean) / (std + 1e-4) for row in group])
        sums.append([sum(w * column[i] for w, column in zip(weights, columns, strict=True)) for i in range(len(group))])
    pooled = [x for group in sums for x in group]
    mean, std = statistics.fmean(pooled), statistics.stdev(pooled)
    expected = [[(x - mean) / (std + 1e-4) for x in group] for group in sums]
    found = firsts(credit.Decoupled()([scored(group, weights=weights) for group in rewards]))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9)


def test_decoupled_normalises_each_reward_before_the_sum(scored):
    """(1, 0) and (0, 1) have the same sum; a function that is rarely right counts more."""
    group = scored([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    assert credit.is_dead(credit.Standardized()([group])[0])
    assert not credit.is_dead(credit.Decoupled()([scored([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])])[0])
    found = firsts(credit.Decoupled()([scored([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 1.0]])]))[0]
    assert found[3] > found[1] > found[0]


@pytest.mark.parametrize("baseline", [False, True])
def test_whitened_against_a_loop(scored, baseline):
    beta = 0.1
    rewards = [[1.0, 0.0], [0.5, None]]
    behavior = [[[-1.0, -2.0, -0.5], [-0.1]], [[-0.7, -0.6], [-1.0, -1.0]]]
    reference = [[[-1.1, -1.0, -0.9], [-0.3]], [[-0.2, -0.9], [0.0, 0.0]]]
    trained = [[[True, False, True], [True]], [[True, True], [True, True]]]
    values = []
    for g in range(2):
        known = [r for r in rewards[g] if r is not None]
        for i in range(2):
            for t in range(len(behavior[g][i])):
                if rewards[g][i] is None:
                    values.append((g, i, t, None))
                    continue
                start = rewards[g][i] - (statistics.fmean(known) if baseline else 0.0)
                future = sum(behavior[g][i][s] - reference[g][i][s] for s in range(t, len(behavior[g][i])) if trained[g][i][s])
                values.append((g, i, t, start - beta * future))
    pool = [v for g, i, t, v in values if v is not None and trained[g][i][t]]
    mean, std = statistics.fmean(pool), statistics.pstdev(pool)
    groups = [scored(rewards[g], behavior=behavior[g], reference=reference[g], trained=trained[g], name=str(g)) for g in range(2)]
    found = credit.Whitened(beta=beta, baseline=baseline)(groups)
    for g, i, t, value in values:
        expected = 0.0 if value is None else (value - mean) / (std + 1e-8)
        assert found[g][i][t] == pytest.approx(expected, abs=1e-9)


def test_whitened_with_a_baseline_leaves_a_constant_group_at_zero(scored):
    groups = [scored([1.0, 0.0], lengths=[1, 5]), scored([0.3, 0.3, None])]
    assert credit.is_dead(credit.Whitened(baseline=True)(groups)[1])
    assert not credit.is_dead(credit.Whitened()(groups)[1])


def test_whitened_works_with_one_completion_per_prompt(scored):
    found = firsts(credit.Whitened()([scored([1.0]), scored([0.0])]))
    assert found == [[pytest.approx(1.0)], [pytest.approx(-1.0)]]


BELOW_ROUNDING = np.random.default_rng(0).normal(scale=1e-7, size=(4, 6))


@pytest.mark.parametrize(("name", "reward"), [("whitened", 0.0), ("whitened", 1.0), ("leave_one_out", 0.0), ("gae", 0.0)])
def test_a_kl_below_rounding_is_no_kl(scored, name, reward):
    """Policy and reference are the same, and two computations of one log-prob differ by 1e-7: whitening makes no step of it."""
    behavior = -np.ones((4, 6))
    group = scored([reward] * 4, behavior=behavior.tolist(), reference=behavior + BELOW_ROUNDING)
    group.signals["value"] = tuple(np.zeros(6) for _ in range(4))
    assert credit.is_dead(PARTS["credit"][name](beta=0.05)([group])[0])


@pytest.mark.parametrize("name", ["whitened", "leave_one_out", "gae"])
def test_the_kl_is_taken_from_one_computation_where_there_is_one(scored, name):
    """In bfloat16, and with another engine, the sampler's log-probs are off by 1e-2; what the trainer scored is the reference's."""
    behavior = -np.ones((4, 6))
    scored_logp = behavior + 1e5 * BELOW_ROUNDING
    group = scored([0.0] * 4, behavior=behavior.tolist(), reference=scored_logp)
    group.signals["value"] = tuple(np.zeros(6) for _ in range(4))
    function = PARTS["credit"][name](beta=0.05)
    assert not credit.is_dead(function([group])[0])
    group.signals["scored_logp"] = tuple(scored_logp)
    assert credit.is_dead(function([group])[0])


def test_a_critic_that_knows_the_reward_but_for_rounding_leaves_nothing_to_whiten(scored):
    group = scored([0.5] * 4, lengths=[6] * 4)
    group.signals["value"] = tuple(np.full(6, 0.5, np.float32) + BELOW_ROUNDING.astype(np.float32) / 4)
    assert credit.is_dead(credit.Gae()([group])[0])
    group.signals["value"] = tuple(np.linspace(0.4, 0.6, 6) for _ in range(4))
    assert not credit.is_dead(credit.Gae()([group])[0])


NAN = float("nan")


def test_worked_example_of_process(scored):
    """Steps {(1, 1.0), (3, 0.0)} of 4 tokens and {(2, 0.5)} of 3: mean .5, std .5."""
    group = scored([0.0, 0.0], process=[[NAN, 1.0, NAN, 0.0], [NAN, NAN, 0.5]])
    first, second = credit.Process(eps=0.0)([group])[0]
    assert first.tolist() == [0.0, 0.0, -1.0, -1.0]
    assert second.tolist() == [0.0, 0.0, 0.0]


def test_process_counts_every_step_that_ends_at_or_after_a_token(scored):
    group = scored([0.0, 0.0], process=[[2.0, 1.0, NAN], [NAN, 0.0]])
    mean, std = 1.0, 1.0 + 1e-4
    z = [(r - mean) / std for r in (2.0, 1.0, 0.0)]
    first, second = credit.Process()([group])[0]
    assert first.tolist() == pytest.approx([z[0] + z[1], z[1], 0.0])
    assert second.tolist() == pytest.approx([z[2], z[2]])


@given(REWARDS)
def test_one_step_per_completion_is_outcome_supervision(scored, rewards):
    group = scored(rewards, process=[[NAN, NAN, r] for r in rewards])
    found = firsts(credit.Process()([group]))[0]
    assert found == pytest.approx(firsts(credit.Standardized()([group]))[0], abs=1e-9)


def test_process_of_equal_steps_is_zero_and_needs_its_signal(scored):
    assert credit.is_dead(credit.Process()([scored([0.0, 1.0], process=[[0.1, 0.1], [NAN, 0.1]])])[0])
    with pytest.raises(ConfigError, match="process"):
        credit.Process()([scored([0.0, 1.0])])


def test_lengths_may_differ_and_be_zero(scored):
    found = credit.Standardized()([scored([1.0, 0.0, 0.5], lengths=[3, 0, 1])])[0]
    assert [a.shape for a in found] == [(3,), (0,), (1,)]


def test_rewards_in_float32_do_not_lower_the_precision(scored):
    """p. ex. a spread of 1e-6 around 0.5: float32 statistics would be 3 % off."""
    found = firsts(credit.Standardized()([scored(np.array([0.5, 0.5 + 1e-6]))]))[0]
    std = 1e-6 / math.sqrt(2)
    assert found == pytest.approx([-5e-7 / (std + 1e-4), 5e-7 / (std + 1e-4)], rel=1e-6)


@given(
    st.lists(
        st.lists(st.one_of(st.just(NAN), st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0])), min_size=1, max_size=7),
        min_size=2,
        max_size=5,
    )
)
def test_process_is_what_the_paper_writes(scored, steps):
    """DeepSeekMath 4.1.3, sentence by sentence: normalise every step's reward with mean(R) and std(R), sum what follows a token."""
    pool = [r for completion in steps for r in completion if r == r]
    found = credit.Process()([scored([0.0] * len(steps), process=steps)])[0]
    mean = sum(pool) / len(pool) if pool else 0.0
    std = (sum((r - mean) ** 2 for r in pool) / (len(pool) - 1)) ** 0.5 if len(pool) > 1 else 0.0
    for i, completion in enumerate(steps):
        for t in range(len(completion)):
            expected = 0.0
            for index_j, r in enumerate(completion):
                if r == r and index_j >= t and len(set(pool)) > 1:
                    expected += (r - mean) / (std + 1e-4)
            assert found[i][t] == pytest.approx(expected, abs=1e-9)


def test_maxrl_divides_by_what_the_group_reached(scored):
    (found,) = credit.Maxrl()([scored([1, 0, 0, 0])])
    assert [a[0] for a in found] == pytest.approx([3.0, -1.0, -1.0, -1.0])
    (found,) = credit.Maxrl()([scored([1, 1, 0, None])])
    assert [a[0] for a in found] == pytest.approx([0.5, 0.5, -1.0, 0.0])
    for dead in ([0, 0, 0], [1, 1, 1], [None, None], [0.1] * 8):
        assert not any(a.any() for a in credit.Maxrl()([scored(dead)])[0])
    assert fact(credit.Maxrl(), "compares_siblings")


def test_maxrl_is_the_gradient_of_the_mean_over_successes(scored):
    """2602.02710: the mean of the successes' scores, less the mean of all scores, which is 0 on average."""
    rng = np.random.default_rng(0)
    reward, gradients = np.array([1.0, 0.0, 1.0, 0.0, 0.0]), rng.normal(size=5)
    (found,) = credit.Maxrl()([scored(reward.tolist())])
    estimate = np.mean([a[0] * gradient for a, gradient in zip(found, gradients, strict=True)])
    assert estimate == pytest.approx(gradients[reward == 1].mean() - gradients.mean())


def test_the_batch_s_mean_is_a_baseline_without_siblings(scored):
    groups = [scored([1.0], name="a"), scored([0.0], name="b"), scored([None], name="c"), scored([0.5], name="d")]
    found = [group[0][0] for group in credit.BatchCentered()(groups)]
    assert found == pytest.approx([0.5, -0.5, 0.0, 0.0])
    assert not any(group[0].any() for group in credit.BatchCentered()([scored([0.1], name=str(i)) for i in range(8)]))
