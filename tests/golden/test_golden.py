"""Ten steps of GRPO and of SFT, number by number: a refactor reproduces them, or says why it does not.

The curves stand in text files beside this one, 17 digits a number, computed in float64 on one thread from fixed seeds.  Sums may be
taken in another order on another processor, so numbers are compared to 1e-6 relative.  A change that moves them on purpose writes
them anew:

    GROUPWISE_GOLDEN=write python -m pytest tests/golden
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from rule_rewards import RuleRewards

from groupwise.config.resolve import resolve
from groupwise.config.settings import CriticSettings, GroupSettings, OptimizerSettings
from groupwise.data.encoding import Demonstration
from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.records import Prompt, Rollout, Sampling, Step
from groupwise.rollout.native.engine import NativeEngine
from groupwise.training.critics import Critic
from groupwise.training.groups import SampledRollouts
from groupwise.training.offline import SFT, train_offline
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.teachers import Teacher

STEPS = 10
SETTINGS = OptimizerSettings(lr=3e-3, schedule="cosine", warmup_steps=2, weight_decay=0.01)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def even_or_long(rollout: Rollout) -> float:
    """Half for an even sum of the ids, half for a completion of four tokens or more."""
    return 0.5 * (int(rollout.tokens.sum()) % 2 == 0) + 0.5 * (len(rollout) > 3)


def grpo_steps(policy: Policy, preset: str, **group: object) -> Iterator[Step]:
    rng = np.random.default_rng(5)
    prompts = (Prompt(id=f"0/{i}", tokens=rng.integers(6, 50, size=1 + i % 5), text="") for i in range(10_000))
    settings = GroupSettings(prompts_per_step=4, group_size=6, **group)  # type: ignore[arg-type]
    critic = CriticSettings(lr=1e-2)
    algorithm = resolve(preset, settings, 8)
    needs = algorithm.needs
    updates = STEPS * settings.updates_per_rollout * settings.minibatches
    other = frozen_copy(policy)
    if needs.teacher:
        generator = torch.Generator().manual_seed(3)
        for weight in other.model.parameters():
            weight.data += 0.05 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return train_online(
        policy,
        algorithm,
        SampledRollouts(
            algorithm=algorithm,
            engine=NativeEngine(policy, max_rows=16),
            rewards=RuleRewards(even_or_long),
            draw=lambda k: [next(prompts) for _ in range(k)],
            sampling=Sampling(temperature=0.9, max_new_tokens=8),
            steps=STEPS,
            seed=11,
            group=settings,
        ),
        Optimizer(policy.model, SETTINGS, updates),
        group=settings,
        max_tokens_per_microbatch=64,
        reference=other if needs.reference else None,
        critic=Critic.on(policy, critic, SETTINGS, updates) if needs.critic else None,
        teacher=Teacher(policy=other) if needs.teacher else None,
    )


def sft_steps(policy: Policy) -> Iterator[Step]:
    rng = np.random.default_rng(5)
    rows = (
        Demonstration(
            id=str(i),
            prompt=rng.integers(6, 50, size=1 + i % 5),
            completion=np.append(rng.integers(6, 12, size=2 + i % 7), policy.eos_ids[0]),
        )
        for i in range(10_000)
    )
    return train_offline(
        policy,
        SFT,
        draw=lambda k: [next(rows) for _ in range(k)],
        optimizer=Optimizer(policy.model, SETTINGS, STEPS),
        max_tokens_per_microbatch=64,
        batch_size=8,
        steps=STEPS,
    )


CURVES: Mapping[str, tuple[Callable[[Policy], Iterator[Step]], tuple[str, ...]]] = {
    "grpo": (lambda policy: grpo_steps(policy, "grpo"), ("progress", "grad_norm", "reward", "tokens/sampled")),
    "gspo_kl_minibatches": (
        lambda policy: grpo_steps(policy, "gspo", beta=0.05, updates_per_rollout=2, minibatches=2, entropy_bonus=0.01),
        ("loss", "grad_norm", "reward", "kl", "ratio/kl"),
    ),
    "ppo": (lambda policy: grpo_steps(policy, "ppo", beta=0.05, minibatches=2), ("loss", "grad_norm", "reward", "value/loss")),
    "distill": (lambda policy: grpo_steps(policy, "distill"), ("loss", "grad_norm", "reward")),
    "sft": (sft_steps, ("loss", "grad_norm", "tokens/trained")),
}


@pytest.mark.parametrize("name", CURVES)
def test_ten_steps_are_what_they_were(name: str, tiny_policy: Callable) -> None:
    run, columns = CURVES[name]
    policy = tiny_policy("llama", dtype=torch.float64, scale=2.0)
    found = np.array([[step.metrics[column] for column in columns] for step in run(policy)])
    path = Path(__file__).with_name(f"{name}.txt")
    if os.environ.get("GROUPWISE_GOLDEN") == "write":
        lines = [" ".join(columns), *(" ".join(f"{value:.17g}" for value in row) for row in found)]
        path.write_text("\n".join(lines) + "\n")
    header, *rows = path.read_text().splitlines()
    assert header.split() == list(columns)
    golden = np.array([[float(value) for value in row.split()] for row in rows])
    # Processors round differently.  Before and after a change on one machine nothing may: `write` on the one, `exact` on the other.
    near = {"rtol": 0.0, "atol": 0.0} if os.environ.get("GROUPWISE_GOLDEN") == "exact" else {"rtol": 1e-6, "atol": 1e-9}
    np.testing.assert_allclose(found, golden, **near)
    assert np.ptp(found[:, 1]) > 0
