"""Evaluation: rates over what the verdict judged, rewards where nothing says what is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from groupwise.config.settings import RewardSettings, verdict_of
from groupwise.records import Prompt, Rollout, RolloutGroup, Sampling, Step
from groupwise.rewards.compose import build_rewards
from groupwise.rollout.native.engine import NativeEngine
from groupwise.training.evaluate import Evaluation, evaluate
from groupwise.training.metrics import solved_metrics


class Judge:
    """Rewards by a rule of prompt and completion."""

    def __init__(self, verdict: str | None, *rules: Callable[[Rollout], float | None]) -> None:
        self.verdict, self.rules = verdict, rules
        self.names = tuple("abc"[: len(rules)])

    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[RolloutGroup]:
        found = []
        for group in groups:
            rows = [[np.nan if (value := rule(rollout)) is None else value for rule in self.rules] for rollout in group]
            reward = np.array([np.nan if np.isnan(row).all() else np.nansum(row) for row in rows])
            found.append(
                RolloutGroup(rollouts=tuple(group), names=self.names, rewards=np.array(rows), reward=reward, verdict=self.verdict)
            )
        return found


@pytest.fixture
def evaluated(tiny_policy: Callable) -> Callable[..., Evaluation]:
    def run(verdict: str | None, *rules: Callable[[Rollout], float | None], k: int = 2, **keywords: object) -> Evaluation:
        rng = np.random.default_rng(0)
        prompts = [Prompt(id=str(i), tokens=rng.integers(6, 50, size=3), text="", row={"seen": i % 3}) for i in range(4)]
        engine = NativeEngine(tiny_policy("llama"), max_rows=8)
        return evaluate(engine, Judge(verdict, *rules), prompts, k=k, sampling=Sampling(max_new_tokens=3), **keywords)

    return run


def half(rollout: Rollout) -> float | None:
    """1 for two of four prompts, None for the others."""
    return 1.0 if int(rollout.prompt.id) < 2 else None


def test_rates_are_over_what_the_verdict_judged_and_the_rest_is_counted(evaluated: Callable[..., Evaluation]) -> None:
    found = evaluated("a", half)
    metrics = found.metrics()
    assert [metrics[name] for name in ("greedy", "sampled", "pass@2", "reward")] == [1.0, 1.0, 1.0, 1.0]
    assert metrics["rewards/a/none"] == 0.5
    assert found.summary()["a: None"] == "50.0% of the samples"


def test_a_prompt_with_fewer_judged_samples_than_k_is_left_out_of_pass_at_k(evaluated: Callable[..., Evaluation]) -> None:
    found = evaluated("a", lambda rollout: None if rollout.index else 0.0)
    assert found.sampled.mean == 0.0
    assert math.isnan(found.pass_at_k.mean)
    assert "pass@2" not in found.metrics()


def test_nothing_that_could_be_judged_has_no_rates(evaluated: Callable[..., Evaluation]) -> None:
    metrics = evaluated("a", lambda rollout: None).metrics()
    assert not {"greedy", "sampled", "pass@2", "reward"} & metrics.keys()
    assert metrics["rewards/a/none"] == 1.0


def test_a_score_is_no_accuracy(evaluated: Callable[..., Evaluation]) -> None:
    found = evaluated(None, lambda rollout: 0.1)
    assert found.summary() == {"greedy reward": "0.100", "mean reward": "0.100", "tokens": found.summary()["tokens"]}
    assert {"greedy_reward", "reward"} <= found.metrics().keys()
    assert not {"greedy", "sampled", "pass@2"} & found.metrics().keys()


def test_a_reward_that_happens_to_be_1_everywhere_has_no_interval_of_a_share(evaluated: Callable[..., Evaluation]) -> None:
    found = evaluated("b", lambda rollout: 1.0, lambda rollout: 0.0)
    assert math.isnan(found.reward.half) and math.isnan(found.by_function["a"].half)
    assert found.sampled.half == found.by_function["b"].half > 0.0


@pytest.mark.parametrize("value", [-1.0, 2.0])
def test_a_verdict_may_be_another_number_everywhere(evaluated: Callable[..., Evaluation], value: float) -> None:
    found = evaluated("a", lambda rollout: value)
    assert (found.sampled.mean, found.by_function["a"].mean) == (float(value >= 1), value)
    assert found.sampled.half > 0.0
    assert math.isnan(found.by_function["a"].half)


def test_the_verdict_need_not_be_the_first_reward(evaluated: Callable[..., Evaluation]) -> None:
    found = evaluated("b", lambda rollout: 0.0, lambda rollout: 1.0)
    assert (found.greedy.mean, found.by_function["a"].mean) == (1.0, 0.0)


def test_a_column_of_the_data_is_no_breakdown_unless_it_is_named(evaluated: Callable[..., Evaluation]) -> None:
    assert not [name for name in evaluated("a", half).metrics() if "seen=" in name]
    assert evaluated("a", half, columns=["seen"]).metrics()["greedy/seen=0"] == 1.0


def test_no_verdict_is_guessed_from_values_that_happen_to_be_0_and_1(scored_group: Callable[..., RolloutGroup]) -> None:
    """A length penalty of 0 everywhere beside answers that are all right: nothing has failed."""
    rewards = np.array([[0.0, 1.0]] * 4)
    group = RolloutGroup(
        rollouts=scored_group([1.0] * 4).rollouts, names=("soft_overlong", "accuracy"), rewards=rewards, reward=rewards.sum(1),
        verdict="accuracy",
    )  # fmt: skip
    assert solved_metrics([group]) == {"groups/solved": 1.0, "groups/failed": 0.0}
    no_verdict = RolloutGroup(rollouts=group.rollouts, names=group.names, rewards=rewards, reward=rewards.sum(1))
    assert solved_metrics([no_verdict]) == {}


def test_the_verdict_is_the_named_reward_else_the_first_built_in_one() -> None:
    rows = [RewardSettings(function="soft_overlong"), RewardSettings(function="my.py:accuracy"), RewardSettings(function="number")]
    assert verdict_of(rows, None) == "number"
    assert verdict_of(rows, "accuracy") == "accuracy"
    assert verdict_of(rows[:2], None) is None
    settings = [RewardSettings(function="think_format"), RewardSettings(function="exact", name="word")]
    with build_rewards(settings, columns=["answer"]) as rewards:
        assert rewards.verdict == "word"
    with build_rewards(settings, columns=["answer"], verdict="think_format") as rewards:
        assert rewards.verdict == "think_format"


@pytest.mark.parametrize("prefix", ["", "eval/"], ids=["of a loop", "read from a run folder"])
def test_a_step_prints_its_training_reward_and_the_held_out_one_apart(prefix: str) -> None:
    held_out = {"greedy": 0.01, "greedy/half_width": 0.02, "reward": 0.108}
    step = Step(
        number=2,
        metrics={"reward": 0.055, "loss": 0.5, "grad_norm": 1.0},
        evaluation={prefix + name: value for name, value in held_out.items()},
    )
    assert repr(step) == "Step(2, reward 0.055, loss 0.5, held out: greedy 0.01, reward 0.108, 0 groups, 3 metrics)"


@pytest.mark.parametrize(
    ("step", "printed"),
    [
        (Step(number=0, metrics={}, evaluation={"reward": 0.5}), "Step(0, held out: reward 0.5, 0 groups, 0 metrics)"),
        (Step(number=3, metrics={"loss": 0.5, "entropy": 1.0}), "Step(3, loss 0.5, 0 groups, 2 metrics)"),
    ],
    ids=["before training", "without an evaluation"],
)
def test_a_step_prints_only_what_was_measured(step: Step, printed: str) -> None:
    assert repr(step) == printed
