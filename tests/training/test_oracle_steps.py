"""TRL 1.16.0's optimizer steps, through a model of our own: 8 completions, 8 losses, 6 cuts into micro-batches and minibatches.

TRL's model cannot be rebuilt from the file (it names a function that is not in it), but much of a step does not depend on it:
on-policy losses are functions of rewards and lengths, except where log-probs stand in them, and gradients of different
normalisations stand in fixed proportions.  What does depend on it is compared with itself: no cut may change a gradient.
`tests/algorithms/test_oracle.py` has the same cases on the level of weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from steps import improve

from groupwise.algorithms import loss_weights, losses
from groupwise.algorithms.advantages import Standardized
from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.table import ALGORITHMS
from groupwise.config.settings import OptimizerSettings
from groupwise.models.policy import Policy
from groupwise.records import Finish, Prompt, Rollout, RolloutGroup, Sampling
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import Assessment, score
from groupwise.training.samples import sample_of, weigh

ROOT = Path(__file__).parents[2]
EOS = 1
LONGEST = 6
"""TRL's `max_completion_length` of these cases: dr_grpo's loss says so."""


def oracle() -> dict:
    folder = Path(os.environ.get("GROUPWISE_ORACLE") or ROOT / "tests" / "fixtures" / "oracle")
    return json.loads((folder / "step_cases.json").read_text())


CONTENT = oracle()
TOKENS_R = np.array([len(ids) for ids in CONTENT["completion_ids"]])
CASES = [pytest.param(case, id=case["name"]) for case in CONTENT["cases"]]


def algorithm_of(case: dict) -> Algorithm:
    """TRL's loss types change the loss alone: the credit is its default, every group is live and every completion ends."""
    row = ALGORITHMS[case["loss_type"]]
    weigh_by = loss_weights.Constant(length=LONGEST) if row.weights == loss_weights.Constant() else row.weights
    return replace(row, credit=Standardized(), weights=weigh_by, dead_groups="exact", truncated="keep")


@pytest.fixture(scope="module")
def policy(tiny_policy: Callable) -> Policy:
    return tiny_policy("qwen2", dtype=torch.float64, scale=2.0)


@pytest.fixture(scope="module")
def groups(policy: Policy) -> list[RolloutGroup]:
    """The 8 completions, sampled by this policy as far as their log-probs say."""
    found: list[RolloutGroup] = []
    ids, prompts = CONTENT["completion_ids"], CONTENT["prompt_ids"]
    for number, begin in enumerate(range(0, len(ids), 4)):
        prompt = Prompt(id=str(number), tokens=np.array(prompts[begin], dtype=np.int64), text="")
        rollouts = []
        for index in range(4):
            tokens = np.array(ids[begin + index], dtype=np.int64)
            drawn = Rollout(
                prompt=prompt, index=index, tokens=tokens, behavior_logp=np.zeros(tokens.size), finish=Finish.EOS, eos_ids=(EOS,),
                sampling=Sampling(), text="",
            )  # fmt: skip
            (logp,) = score(policy, [sample_of(drawn)], max_tokens_per_microbatch=100).logp
            rollouts.append(replace(drawn, behavior_logp=logp))
        reward = np.array(CONTENT["rewards"][begin : begin + 4])
        found.append(RolloutGroup(rollouts=tuple(rollouts), names=("r",), rewards=reward[:, None], reward=reward))
    return found


def minibatches_of(case: dict, groups: list[RolloutGroup]) -> list[tuple[int, ...]]:
    """The completions of each optimizer step.  TRL shuffles a rollout that takes several steps, with one seed for all loss types:
    the two losses of a step that are known in closed form, the sum of A and the sum of n A, tell which completions it had.
    """
    size = case["per_device"] * case["ga"]
    everything = tuple(range(len(TOKENS_R)))
    if size == len(everything):
        return [everything]
    advantage_R = np.array([a[0] for group in Standardized()(groups) for a in group])
    cut = case["name"].partition("/")[2]
    logged = {c["loss_type"]: c["logged_loss"] for c in CONTENT["cases"] if c["name"].endswith(f"/{cut}")}
    found = []
    for grpo, luspo in zip(logged["grpo"], logged["luspo"], strict=True):
        fits = [
            rows
            for rows in map(list, combinations(everything, size))
            if abs(-advantage_R[rows].mean() - grpo) < 1e-4 and abs(-(TOKENS_R * advantage_R)[rows].mean() - luspo) < 1e-4
        ]
        assert len(fits) == 1, fits
        found.append(tuple(fits[0]))
    assert sorted(sum(found, ())) == list(everything)
    return found


def rows_of(groups: list[RolloutGroup], advantages: list, rows: Sequence[int]) -> tuple[list[RolloutGroup], list]:
    """These completions of the step, as groups: TRL cuts minibatches by completions, and takes advantages before."""
    cut, credit = [], []
    for number, group in enumerate(groups):
        mine = [i for i in range(4) if number * 4 + i in rows]
        if mine:
            kept = tuple(group.rollouts[i] for i in mine)
            cut.append(replace(group, rollouts=kept, rewards=group.rewards[mine], reward=group.reward[mine]))
            credit.append([advantages[number][i] for i in mine])
    return cut, credit


def take(
    policy: Policy, algorithm: Algorithm, groups: list[RolloutGroup], rows: Sequence[int], max_tokens_per_microbatch: int
) -> tuple[Assessment, torch.Tensor]:
    """One step on these completions and its gradient; the weights are left as they were."""
    seen: list[torch.Tensor] = []

    class Recorder(Optimizer):
        def step(self) -> object:  # type: ignore[override]
            seen.append(torch.cat([p.grad.flatten().clone() for p in self.parameters]))  # type: ignore[union-attr]
            return super().step()

    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    samples = weigh(*rows_of(groups, algorithm.credit(groups), rows), algorithm)
    taken = improve(
        policy,
        algorithm,
        samples,
        Recorder(policy.model, OptimizerSettings(clip_norm=None), 1),
        max_tokens_per_microbatch=max_tokens_per_microbatch,
    )
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.copy_(before[name])
    return taken, seen[0]


def share_of_loss(case: dict, rows: Sequence[int]) -> float:
    """What a step's loss here is in TRL's units: its N is the mean over the rollout's steps, here it is the step's own."""
    if ALGORITHMS[case["loss_type"]].weights != loss_weights.TokenMean() or case["loss_type"] == "bnpo":
        return 1.0
    return float(TOKENS_R[list(rows)].sum() / (TOKENS_R.sum() / len(case["logged_loss"])))


@pytest.mark.parametrize("case", CASES)
def test_p01_p03_steps_are_trls_however_they_are_cut(case: dict, policy: Policy, groups: list[RolloutGroup]) -> None:
    algorithm = algorithm_of(case)
    everything = range(len(TOKENS_R))
    minibatches = minibatches_of(case, groups)
    assert len(minibatches) == len(case["logged_loss"])
    _, whole = take(policy, algorithm, groups, everything, 1000)
    mean = torch.zeros_like(whole)
    for rows, logged in zip(minibatches, case["logged_loss"], strict=True):
        found, gradient = take(policy, algorithm, groups, rows, max_tokens_per_microbatch=9 * case["per_device"])
        _, again = take(policy, algorithm, groups, rows, max_tokens_per_microbatch=1)
        torch.testing.assert_close(again, gradient, rtol=1e-10, atol=1e-12)
        share = share_of_loss(case, rows)
        with_logp = {losses.Cispo(), losses.Vespo()} & {getattr(algorithm.surrogate, "func", algorithm.surrogate)}
        # Differs on purpose: TRL's bnpo is the mean of its micro-batches' means.
        if not with_logp and (case["loss_type"] != "bnpo" or case["ga"] == 1):
            assert found.loss * share == pytest.approx(logged, abs=1e-5)
        share = (
            float(TOKENS_R[list(rows)].sum() / TOKENS_R.sum()) if algorithm.weights == loss_weights.TokenMean() else len(rows) / 8
        )
        mean += share * gradient
    torch.testing.assert_close(mean, whole, rtol=1e-9, atol=1e-12)


def test_gradients_stand_in_trls_proportions(policy: Policy, groups: list[RolloutGroup]) -> None:
    """On-policy gradients differ between losses by their normalisation alone, whatever the model."""
    whole = {case["loss_type"]: case["grad_norm"][0] for case in CONTENT["cases"] if case["per_device"] == len(TOKENS_R)}
    ours = {
        name: take(policy, algorithm_of({"loss_type": name}), groups, range(len(TOKENS_R)), 1000)[0].stats.grad_norm
        for name in whole
    }
    for name, other in (
        ("luspo", "dapo"),
        ("cispo", "dapo"),
        ("vespo", "dapo"),
        ("bnpo", "dapo"),
        ("dr_grpo", "dapo"),
        ("sapo", "grpo"),
    ):
        assert ours[name] / ours[other] == pytest.approx(whole[name] / whole[other], rel=1e-5), name
