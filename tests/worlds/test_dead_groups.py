"""Groups that teach nothing: skipped, dropped or replaced; and completions that the limit cut off."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from groupwise.records import Rollout

HALF = 4
"""Prompts 1 .. 4 can be answered; whatever is said to the others is right."""


def easy(rollout: Rollout) -> float:
    """Rows from `HALF` on always get 1: their groups are dead."""
    return 1.0 if rollout.prompt.row["n"] >= HALF else float(rollout.tokens[-1] % 2)


@pytest.fixture
def half_dead(world: Callable) -> Callable:
    return lambda rule=easy, **options: world([f"w{i}" for i in range(1, 16)], [[i] for i in range(1, 9)], rule, 3, **options)


def test_refill_fills_the_step_with_live_groups(half_dead: Callable) -> None:
    """Of 8 rows 4 are dead whatever is sampled; 6 live groups need about 12 prompts."""
    for step in half_dead(lr=1e-4).train("dapo", 4, prompts_per_step=6, group_size=8):
        assert len(step.groups) == 6
        assert not any(group.equal_rewards for group in step.groups)
        assert 6 < step.metrics["prompts"] <= 6 * (1 + 4)
        assert step.metrics["groups/dead"] == pytest.approx(1 - 6 / step.metrics["prompts"]), (
            "the drawn prompts whose groups it kept"
        )


def test_refill_stops_at_its_bound(half_dead: Callable) -> None:
    """Nothing can ever be live: the step ends after 3 x (1 + 4) prompts and trains nothing, and the run goes on."""
    made = half_dead(lambda rollout: 1.0)
    before = {name: parameter.clone() for name, parameter in made.policy.model.named_parameters()}
    steps = list(made.train("dapo", 3, prompts_per_step=3, group_size=4))
    for step in steps:
        assert made.drawn == 3 * 15
        assert step.metrics["prompts"] == 15
        assert step.metrics["groups/dead"] == 1.0
        assert step.metrics["tokens/trained"] == 0
        assert len(step.groups) == 3
    assert all(torch.equal(parameter, before[name]) for name, parameter in made.policy.model.named_parameters())


def test_refill_trains_a_step_that_stays_short(half_dead: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of eight is live: 9 prompts hold one or two live groups, and these are trained."""
    monkeypatch.setattr("groupwise.training.groups.MAX_REFILLS", 2)
    made = half_dead(lambda rollout: float(rollout.prompt.row["n"] != 0 or rollout.tokens[-1] % 2))
    steps = list(made.train("dapo", 3, prompts_per_step=3, group_size=8))
    for step in steps:
        assert 1 <= len(step.groups) <= 2
        assert all(group.prompt.row["n"] == 0 for group in step.groups)
        assert step.metrics["prompts"] == 9


def test_exact_keeps_dead_groups_in_the_denominator_and_drop_does_not(half_dead: Callable) -> None:
    """Half of the groups are dead: GRPO's mean over completions is half as large with `exact`, and all else is equal."""
    norms = {}
    for mode in ("exact", "drop"):
        (step,) = half_dead().train("grpo", 1, prompts_per_step=8, group_size=8, dead_groups=mode)
        assert sum(group.equal_rewards for group in step.groups) == HALF
        assert step.metrics["groups/dead"] == 0.5
        live = sum(len(rollout) for group in step.groups if not group.equal_rewards for rollout in group.rollouts)
        assert step.metrics["tokens/trained"] == live, "dead groups cost no forward"
        norms[mode] = step.metrics["grad_norm"]
    assert norms["drop"] == pytest.approx(2 * norms["exact"], rel=1e-5)


@pytest.mark.parametrize("mode", ["exact", "drop"])
def test_a_step_of_dead_groups_alone_moves_as_a_gradient_of_zero_moves(mode: str, half_dead: Callable) -> None:
    """Skipping is exact: AdamW's moments go on, as they do for the same step with everything computed."""
    made = half_dead(lambda rollout: 1.0 if made.drawn > 8 else easy(rollout))
    moved, metrics = [], {}
    before = None
    for step in made.train("grpo", 2, prompts_per_step=8, group_size=8, dead_groups=mode):
        metrics = step.metrics
        weights = torch.cat([parameter.detach().flatten().clone() for parameter in made.policy.model.parameters()])
        moved.append(0.0 if before is None else float((weights - before).norm()))
        before = weights
    assert metrics["grad_norm"] == 0.0
    assert metrics["tokens/trained"] == 0
    assert moved[1] > 0.0


def test_masked_truncated_completions_leave_the_loss_and_its_count(half_dead: Callable) -> None:
    trained = {}
    for mode in ("keep", "mask"):
        (step,) = half_dead(lambda rollout: float(rollout.tokens[0] % 2)).train(
            "bnpo", 1, prompts_per_step=8, group_size=8, truncated=mode
        )
        cut = [rollout for group in step.groups for rollout in group.rollouts if rollout.truncated]
        assert 0 < len(cut) < 64
        assert step.metrics["completions/clipped_ratio"] == pytest.approx(len(cut) / 64)
        assert any(np.any(a) for g, advantages in zip(step.groups, step.advantages, strict=True) for r, a in
                   zip(g.rollouts, advantages, strict=True) if r.truncated), "they still count in their group's mean"  # fmt: skip
        trained[mode] = step.metrics["tokens/trained"]
    live = [rollout for group in step.groups if not group.equal_rewards for rollout in group.rollouts]
    assert trained["keep"] == sum(len(rollout) for rollout in live)
    assert trained["mask"] == sum(len(rollout) for rollout in live if not rollout.truncated)
