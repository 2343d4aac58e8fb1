"""A teacher four times as large teaches without a reward: what it knows, and how it would say it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from groupwise.config.settings import OptimizerSettings
from groupwise.data.encoding import Demonstration
from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.rollout.native.engine import NativeEngine
from groupwise.training.offline import SFT, train_offline
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import score
from groupwise.training.samples import sample_of
from groupwise.training.teachers import Teacher

SIZE = {"prompts_per_step": 4, "group_size": 16}


@pytest.fixture(scope="module")
def masters() -> list[Policy]:
    """The teacher, once it is trained."""
    return []


def size(policy: Policy) -> int:
    return sum(parameter.numel() for parameter in policy.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "steps", "lr"), [("distill", 20, 2e-2), ("minillm", 22, 2e-2), ("distill_sampled", 40, 1e-2)])
def test_the_answers_are_learnt_from_a_teacher_that_knows_them(
    preset: str, steps: int, lr: float, say: Callable, masters: list[Policy]
) -> None:
    """From 1 in 16 to nearly all."""
    if not masters:
        learner = say(prompts=4, lr=3e-3, seed=20, hidden=64)
        rows = learner.train("grpo", 28, updates_per_rollout=2, **SIZE)
        assert np.mean([step.metrics["reward"] for step in rows][-5:]) > 0.9
        masters.append(frozen_copy(learner.policy))
    made = say(prompts=4, lr=lr, seed=0)
    assert size(masters[0]) > 3.5 * size(made.policy)
    teacher = Teacher(policy=masters[0])
    rewards = [step.metrics["reward"] for step in made.train(preset, steps, teacher=teacher, **SIZE)]
    assert np.mean(rewards[-5:]) > 0.85
    assert rewards[0] < 0.125


WORDS, PROMPTS = [f"w{i}" for i in range(1, 32)], [[i, j] for i in range(1, 9) for j in range(1, 5)]


def distance(made: object, teacher: Policy) -> float:
    """KL(student || teacher) per token, nats, on completions of the student's that it was not trained on."""
    policy, prompts = made.policy, made.draw(8)  # type: ignore[attr-defined]
    drawn = NativeEngine(policy, max_rows=256).generate(prompts, group_size=32, sampling=made.sampling, seed=99)  # type: ignore[attr-defined]
    samples = [sample_of(rollout) for group in drawn for rollout in group]
    own, theirs = (np.concatenate(score(one, samples, max_tokens_per_microbatch=8192).logp) for one in (policy, teacher))
    return float(np.mean(own - theirs))


@pytest.mark.slow
def test_distillation_beats_imitation_on_as_many_tokens(world: Callable) -> None:
    """Forward and reverse KL on the student's own completions against SFT on the teacher's, with more tokens and as many steps.

    A distribution says more than one token drawn from it, and a student's own mistakes more than a teacher's text.
    """
    nobody = {"words": WORDS, "prompts": PROMPTS, "rule": lambda rollout: 0.0, "max_new_tokens": 8}
    master = world(**nobody, hidden=64, seed=20)
    with torch.no_grad():
        for parameter in master.policy.model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    found, tokens = [], 0.0
    for beta in (0.0, 1.0):
        student = world(**nobody, lr=1e-2, seed=0)
        divergence = {"name": "jsd", "beta": beta}
        teacher = Teacher(policy=frozen_copy(master.policy))
        steps = list(student.train("distill", 26, teacher=teacher, divergence=divergence, prompts_per_step=8, group_size=4))
        tokens = max(tokens, sum(step.metrics["tokens/trained"] for step in steps))
        found.append(distance(student, master.policy))
    assert size(master.policy) > 3.5 * size(student.policy)
    imitator = world(**nobody, lr=1e-2, seed=0)
    drawn = NativeEngine(master.policy, max_rows=256).generate(imitator.draw(208), group_size=5, sampling=imitator.sampling, seed=3)
    rows: Iterator[Demonstration] = (
        Demonstration(id=str(index), prompt=rollout.prompt.tokens, completion=rollout.tokens)
        for index, rollout in enumerate(rollout for group in drawn for rollout in group)
    )
    optimizer = Optimizer(imitator.policy.model, OptimizerSettings(lr=1e-2, betas=(0.9, 0.99)), 26)
    sft = train_offline(
        imitator.policy,
        SFT,
        draw=lambda k: [next(rows) for _ in range(k)],
        optimizer=optimizer,
        max_tokens_per_microbatch=4096,
        batch_size=40,
        steps=26,
    )
    assert sum(step.metrics["tokens/trained"] for step in sft) > tokens
    assert max(found) < 0.7 * distance(imitator, master.policy)
