"""The work of a step against cases worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from groupwise.models.shape import Shape
from groupwise.records import Finish, Prompt, Rollout, RolloutGroup, Sampling, Step
from groupwise.training.work import Meter, flops, tokens_seen

SHAPE = Shape(
    parameters=1000 + 10 * 4 + 4, layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_width=3, vocabulary=10, tied=True
)
"""1000 parameters in the blocks: 2000 FLOPs a position, 4 x 2 x 6 = 48 a token that it sees, 2 x 10 x 4 = 80 for its logits."""


def group_of(
    name: str, m: int, lengths: tuple[int, ...], *, signals: tuple[str, ...] = (), written: int | None = None
) -> RolloutGroup:
    prompt = Prompt(id=name, tokens=np.arange(m) + 1, text="")
    rollouts = tuple(
        Rollout(
            prompt=prompt, index=i, tokens=np.full(n, 5), behavior_logp=np.zeros(n), finish=Finish.LENGTH, eos_ids=(1,),
            sampling=Sampling(), text="", trained=np.arange(n) < (n if written is None else written),
        )
        for i, n in enumerate(lengths)
    )  # fmt: skip
    reward = np.arange(len(lengths), dtype=np.float64)
    columns = {name: tuple(np.zeros(n) for n in lengths) for name in signals}
    return RolloutGroup(rollouts=rollouts, names=("r",), rewards=reward[:, None], reward=reward, signals=columns)


def step_of(*groups: RolloutGroup, trained: tuple[bool, ...]) -> Step:
    weights = [[np.ones(len(r)) if use else np.zeros(0) for r in g.rollouts] for g, use in zip(groups, trained, strict=True)]
    return Step(number=1, metrics={"reward": 0.0}, timings={"rollout": 2.0}, groups=groups, columns={"weight": weights})


def test_a_forward_pass_by_hand() -> None:
    assert SHAPE.parameters - SHAPE.outside == 1000
    assert flops(SHAPE, 1, 0, 0) == 2000
    assert flops(SHAPE, 0, 1, 0) == 48
    assert flops(SHAPE, 0, 0, 1) == 80
    assert tokens_seen(0, 3) == 1 + 2 + 3
    assert tokens_seen(5, 2) == 6 + 7


# Of a prompt of 3 and completions of 2 and 1.  Sampling: 3 positions that see 1 + 2 + 3, one with logits; then one position of the
# first completion, which sees 4.  A pass: 2 positions that see 1 + 2; completions of 2 (see 3 + 4) and 1 (sees 3), logits at each.
SAMPLED = (3 * 2000 + 6 * 48 + 80) + (2000 + 4 * 48 + 80)
PASS = (2 * 2000 + 3 * 48) + (2 * 2000 + 7 * 48 + 2 * 80) + (2000 + 3 * 48 + 80)
# The same of a prompt of 2 and two completions of 1.
DEAD, DEAD_PASS = 2 * 2000 + 3 * 48 + 80, (2000 + 48) + 2 * (2000 + 2 * 48 + 80)


def test_one_live_and_one_dead_group_by_hand() -> None:
    step = step_of(group_of("a", 3, (2, 1)), group_of("b", 2, (1, 1)), trained=(True, False))
    found = Meter(policy=SHAPE).read(step).metrics
    assert found["flops/per_second"] == pytest.approx((SAMPLED + DEAD + 3 * PASS) / 2.0, rel=1e-12)
    assert (found["tokens/shared"], found["tokens/dead"], found["tokens/recomputed"]) == (3 + 2, 2, 0)
    assert found["reward"] == 0.0
    assert Meter(policy=SHAPE, processes=4).read(step).metrics["flops/per_second"] == found["flops/per_second"] / 4


@pytest.mark.parametrize(
    ("options", "signals", "passes"),
    [
        ({"values": True}, ("value", "old_value", "return"), 1),
        ({}, ("reference_logp",), 1),
        ({}, ("reference_logp", "scored_logp"), 2),
        ({"critic": SHAPE}, ("value",), 1 + 3),
        ({"critic": SHAPE, "updates": 2}, ("value",), 1 + 6 + 3),
        ({"teacher": SHAPE}, ("teacher_logp",), 1),
        ({"teacher": SHAPE, "diverging": True}, (), 1),
        ({}, ("teacher_logp",), 0),  # by servers
    ],
)
def test_reference_critic_and_teacher_are_counted(options: dict, signals: tuple[str, ...], passes: int) -> None:
    step = step_of(group_of("a", 3, (2, 1), signals=signals), trained=(True,))
    found = Meter(policy=SHAPE, **options).read(step).metrics["flops/per_second"]
    assert found == pytest.approx((SAMPLED + (3 + passes) * PASS) / 2.0, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "signals", "recomputed"),
    [
        ({}, ("scored_logp",), 4),
        ({"recompute": True, "updates": 3}, (), 12),
        ({"threshold": True}, (), 4),
        ({"recompute": True, "threshold": True, "updates": 2}, ("scored_logp",), 4 + 16),
    ],
)
def test_tokens_that_are_computed_again_are_counted(options: dict, signals: tuple[str, ...], recomputed: int) -> None:
    step = step_of(group_of("a", 3, (2, 2), signals=signals), trained=(True,))
    assert Meter(policy=SHAPE, **options).read(step).metrics["tokens/recomputed"] == recomputed


def test_experts_have_no_flops_and_a_step_without_completions_no_work() -> None:
    step = step_of(group_of("a", 3, (2, 2)), trained=(True,))
    assert "flops/per_second" not in Meter(policy=SHAPE, experts=True).read(step).metrics
    empty = Step(number=1, metrics={"loss": 1.0})
    assert Meter(policy=SHAPE).read(empty) is empty
