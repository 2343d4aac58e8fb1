"""The worked example: its numbers by hand, every preset, and the command."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import groupwise as gw
from groupwise.algorithms.table import ALGORITHMS
from groupwise.cli import commands
from groupwise.config.settings import GroupSettings
from groupwise.errors import ConfigError
from groupwise.inspection.explain import render, work, work_of_run
from groupwise.runs.plan import algorithm_line

SHOWN = [name for name, row in ALGORITHMS.items() if row.divergence is None]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def test_terms_of_ones_own_are_named_as_left_out() -> None:
    def near(terms: object) -> object:
        return terms

    example = work()
    text = render(replace(example, algorithm=replace(example.algorithm, extra=(near,))))
    assert "left out: near, which the run adds to this loss" in text
    assert "left out" not in render(work(preset="ppo"))


def test_a_row_made_of_another_does_not_show_that_one_s_equation() -> None:
    example = work()
    head = render(replace(example, algorithm=replace(example.algorithm, name="mine", weights=lambda tokens, prompts: tokens)))
    assert head.startswith("mine: grpo with other parts\n") and "loss = -1/R sum_i" not in head
    named = replace(example.algorithm, name="mine", weights=lambda tokens, prompts: tokens, equation="of mine")
    assert "loss = of mine" in render(replace(example, algorithm=named))


def test_the_plan_names_terms_of_ones_own() -> None:
    def near(terms: object) -> object:
        return terms

    assert "; plus near;" in algorithm_line(replace(ALGORITHMS["grpo"], extra=(near,)))
    assert "plus" not in algorithm_line(ALGORITHMS["ppo"])


def test_the_default_example_by_hand() -> None:
    example = work()
    assert [a[0] for a in example.advantages] == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001, 0.0])
    assert example.column("weight") == pytest.approx([1 / 6] * 2 + [1 / 9] * 3 + [1 / 12] * 4)
    first, second = example.passes
    assert first.ratio == pytest.approx(np.ones(9))
    assert first.total == pytest.approx(0.0, abs=1e-12)
    assert not first.clipped.any()
    expected = []
    for p, weight, advantage in [(0.5, 1 / 6, 1), (0.8, 1 / 6, 1), (0.6, 1 / 9, -1), (0.9, 1 / 9, -1), (0.3, 1 / 9, -1)]:
        moved = sigmoid(math.log(p / (1 - p)) + 5 * weight * advantage / 1.0002 * (1 - p))
        expected.append(moved / p)
    assert second.ratio[:5] == pytest.approx(expected, rel=1e-12)
    assert expected[0] > 1.2
    assert expected[4] < 0.8
    assert second.clipped.tolist() == [True, False, False, False, True, *[False] * 4]
    a = 1 / 1.0002
    loss = [-1.2 * a, -expected[1] * a, expected[2] * a, expected[3] * a, 0.8 * a]
    assert second.loss[:5] == pytest.approx(loss, rel=1e-12)
    assert second.total == pytest.approx(sum(loss[:2]) / 6 + sum(loss[2:]) / 9, rel=1e-12)
    assert second.gradient == pytest.approx([0, -a * expected[1] / 6, a * expected[2] / 9, a * expected[3] / 9, 0, 0, 0, 0, 0])


def test_gradients_are_those_of_the_loss() -> None:
    """The first pass's ratios are 1, so moving every log-prob by its gradient lowers the loss at first order."""
    for preset in SHOWN:
        example = work([1, 0, 0.25, 0.5], preset=preset, beta=0.1, lr=1e-4)
        first, second = example.passes
        change = float(first.gradient @ (second.logp - first.logp))
        assert change < 0, preset
        if preset != "cispo" and preset != "vespo":  # their weight is held constant: the loss is no potential of its gradient
            assert second.total - first.total == pytest.approx(change, rel=1e-2), preset


def test_kl_is_k3_of_the_tables() -> None:
    example = work(beta=0.04, mu=1)
    assert example.passes[0].kl is not None
    gap = math.log(0.55) - math.log(0.5)
    assert example.passes[0].kl[0] == pytest.approx(math.exp(gap) - gap - 1)
    assert work(mu=1).passes[0].kl is None


@pytest.mark.parametrize("preset", SHOWN)
def test_every_preset_can_be_explained(preset: str) -> None:
    for rewards in ([1, 0, 0.5], [1, None, 0.5, 0.5], [0, 0]):
        for beta in (None, 0.1):
            text = render(work(rewards, preset=preset, beta=beta, mu=3))
            assert text.startswith(f"{preset}: ")
            assert "nan" not in text
            assert len(text.splitlines()) > 20


def test_a_dead_group_moves_nothing() -> None:
    example = work([1, 1, 1], mu=3)
    assert all((seen.gradient == 0).all() and np.allclose(seen.ratio, 1, rtol=0, atol=1e-12) for seen in example.passes)


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    for wrong, said in [
        ({"rewards": [1.0]}, "group_size must be at least 2"),
        ({"lengths": [1, 2]}, "3 rewards need as many lengths"),
        ({"lengths": [1, 2, 0]}, "each 1 to 8"),
        ({"preset": "grop"}, "did you mean grpo"),
        ({"preset": "minillm"}, "learns from whole distributions"),
        ({"group": GroupSettings(entropy_quantile=0.8)}, "entropy_quantile asks for the entropies of a whole step"),
        ({"mu": 0}, "mu must be at least 1"),
        ({"mu": 10**20}, "at most 100"),
        ({"lr": math.nan}, "lr must be a finite number greater than 0, got nan"),
        ({"lr": math.inf}, "lr must be a finite number"),
        ({"beta": -1.0}, "beta must be at least 0"),
        ({"rewards": [1.0, math.inf]}, "finite number"),
    ]:
        with pytest.raises(ConfigError, match=said):
            work(**wrong)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["explain"]) == 0
    text = capsys.readouterr().out
    assert text == render(work()) + "\n"
    assert "+0.9998   -0.9998         0" in text
    assert "+1.2247   -1.2247         0" in text
    assert text.count("  clipped\n") == 2
    given = ["--rewards", "-1,none,0.5,0", "--lengths", "1,1,2,3", "--preset", "dapo", "--mu", "1", "--beta", "0.1", "--lr", "2"]
    assert commands.main(["explain", *given]) == 0
    assert "None" in capsys.readouterr().out
    assert commands.main(["explain", "--preset", "dpo"]) == 2
    assert "'dpo' learns from a data set" in capsys.readouterr().err
    assert commands.main(["explain", "--preset", "ppo2"]) == 2
    capsys.readouterr()
    assert commands.main(["explain", "--lengths", "-1,2,3"]) == 2
    assert "each 1 to 8, got -1, 2, 3" in capsys.readouterr().err
    for wrong in (["--rewards", "1,x"], ["--lengths", "1,2.5"]):
        with pytest.raises(SystemExit) as end:
            commands.main(["explain", *wrong])
        assert end.value.code == 2


SMALL = {
    "name": "run", "steps": 1, "data": {"task": "addition", "limit": 8}, "eval": {"at_start": False},
    "model": {"scratch": {"hidden": 16, "layers": 1, "heads": 2, "tokenizer": "arithmetic"}},
    "rewards": [{"function": "regex", "args": {"pattern": "[0-4]"}}], "rollout": {"max_new_tokens": 12},
    "optimizer": {"lr": 0.05}, "group": {"prompts_per_step": 4, "group_size": 4, "minibatches": 2, "updates_per_rollout": 2},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["ppo", "grpo", "dapo", "gspo"])
def test_a_recorded_group_is_explained_by_its_own_numbers(preset: str, tmp_path: Path) -> None:
    """Lengths, log-probs, ratios, advantages, weights and gradients are those that the run recorded, of every token."""
    training = gw.train(**SMALL, objective=preset, runs=str(tmp_path))
    (step,) = [step for step in training if step.number]
    about, example = work_of_run(str(training.folder))
    place = next(i for i, group in enumerate(step.groups) if f", the group of {group.prompt.place} in step 1" in about)
    group = step.groups[place]
    assert [len(one) for one in example.group.rollouts] == [len(one) for one in group.rollouts]
    kept = [sample.index for sample in example.samples]
    assert kept
    of_group = lambda columns: np.concatenate([columns[place][i] for i in kept])  # noqa: E731
    drawn = np.concatenate([group.rollouts[i].behavior_logp for i in kept])
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    close(example.column("behavior_logp"), drawn)
    close(example.column("advantage"), of_group(step.advantages))
    close(example.column("weight"), of_group(step.columns["weight"]))
    first, last = example.passes
    close(first.logp, of_group(step.current_logp))
    close(last.logp, of_group(step.columns["last_logp"]))
    if preset != "gspo":
        close(last.ratio, np.exp(of_group(step.columns["last_logp"]) - drawn))
    assert not np.allclose(last.ratio, 1.0)
    said = render(example)
    assert group.rollouts[0].prompt_text in said
    assert "The step's last update, as recorded" in said
    tokens = f"  {group.rollouts[kept[0]].index + 1:>10}     1"
    assert sum(line.startswith(tokens) for line in said.splitlines()) == 2, "the first token in both tables"


@pytest.mark.slow
def test_another_algorithm_is_taken_to_the_recorded_completions(tmp_path: Path) -> None:
    training = gw.train(**SMALL, objective="grpo", runs=str(tmp_path))
    assert [step.number for step in training if step.number] == [1]
    folder = str(training.folder)
    own, other = (work_of_run(folder, preset=preset)[1] for preset in (None, "rloo"))
    assert other.algorithm.name == "rloo"
    np.testing.assert_array_equal(own.passes[0].logp, other.passes[0].logp)
    reward = other.group.reward
    expected = [r - (reward.sum() - r) / (reward.size - 1) for r in reward]
    assert [advantage[0] for advantage in other.advantages] == pytest.approx(expected)
    with pytest.raises(ConfigError, match="reads log-probs of the reference, which the run did not record"):
        work_of_run(folder, beta=0.1)
    for made_up in ({"lengths": [2, 3, 4, 5]}, {"mu": 3}, {"lr": 1.0}):
        about, example = work_of_run(folder, **made_up)
        assert about.endswith("\nMade up: lengths, log-probs")
        assert np.array_equal(example.group.reward, reward)
    assert work_of_run(folder, rewards=[1.0, 0.0])[1].group.reward.tolist() == [1.0, 0.0]


class Twice:
    """Asks again, once."""

    def reset(self, row: dict) -> str:
        """Nothing to say."""
        return ""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Every answer is worth its length."""
        return "and?", float(len(text)), False


@pytest.mark.slow
def test_of_an_episode_the_tokens_of_the_policy_are_explained(tmp_path: Path) -> None:
    training = gw.train(
        objective="grpo", name="run", runs=str(tmp_path), steps=1, data={"task": "addition", "limit": 8, "chat": True},
        model={"scratch": {"hidden": 16, "layers": 1, "heads": 2, "tokenizer": "arithmetic"}}, eval={"at_start": False},
        rollout={"max_new_tokens": 60}, group={"prompts_per_step": 2, "group_size": 4},
        environment={"factory": Twice, "max_turns": 2},
    )  # fmt: skip
    assert [step.number for step in training if step.number] == [1]
    _, example = work_of_run(str(training.folder))
    trained = sum(int(rollout.trained.sum()) for rollout in example.group.rollouts)
    assert example.passes[0].logp.size == trained < sum(map(len, example.group.rollouts))
    assert "The step's first update, as recorded" in render(example)


@pytest.mark.parametrize("preset", ["dpo", "sft", "reward", "prm"])
def test_an_objective_that_learns_from_data_is_told_from_a_misspelt_one(preset: str) -> None:
    with pytest.raises(ConfigError, match=f"'{preset}' learns from a data set"):
        work(preset=preset)
