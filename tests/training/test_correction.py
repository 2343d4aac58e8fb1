"""Completions that another engine has sampled: the importance weight in the loss, and what the metrics say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rule_rewards import RuleRewards
from steps import improve

from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.losses import Correction, guarded_exp
from groupwise.config.resolve import resolve
from groupwise.config.settings import EngineSettings, GroupSettings, OptimizerSettings, RolloutSettings
from groupwise.data.packing import pack
from groupwise.models.attention import plain_attention
from groupwise.models.passes import BatchPass
from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.records import Prompt, Rollout, Sample, Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.engines import sampled_elsewhere
from groupwise.training.groups import PrefetchedRollouts, SampledRollouts
from groupwise.training.loss import Loss
from groupwise.training.metrics import measure
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.recorded_loss import RecordedStep
from groupwise.training.samples import weigh
from groupwise.training.signals import add_signals


def grpo(**keywords: Any) -> Algorithm:
    return replace(resolve("grpo", GroupSettings(), 16), correction=Correction(**keywords))


def own_logp(policy: Policy, sample: Sample) -> torch.Tensor:
    """Log-probs of a completion by the model's own forward pass, differentiable."""
    ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion]))
    with plain_attention(policy.model) as model:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, sample.prompt.size - 1 : -1]
    return (logits / sample.temperature).log_softmax(-1).gather(1, ids[sample.prompt.size :, None])[:, 0]


def gradients(policy: Policy, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(policy.model.parameters())))


def whole_loss(policy: Policy, algorithm: Algorithm, samples: list[Sample]) -> torch.Tensor:
    batches = pack(samples, 60, device=policy.device, dtype=torch.float64)
    return torch.stack([Loss(algorithm=algorithm)(BatchPass(policy, batch))[0] for batch in batches]).sum()


def shifted(policy: Policy, samples: list[Sample], spread: float) -> list[Sample]:
    """The samples as if another engine had drawn them, whose log-probs differ by up to `spread` nats."""
    rng = np.random.default_rng(1)
    found = []
    for sample in samples:
        own = own_logp(policy, sample).detach().numpy()
        found.append(replace(sample, behavior_logp=own + rng.uniform(-spread, spread, own.shape), reference_logp=None))
    return found


@pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("several", [False, True])
def test_the_loss_is_the_ratio_to_the_own_log_probs_times_the_weight(
    several: bool, mode: str, level: str, tiny_policy: Callable, random_samples: Callable
) -> None:
    policy = tiny_policy(dtype=torch.float64, scale=3.0)
    samples = shifted(policy, random_samples(), 1.0)
    if several:  # from the second update on, ratios are to log-probs that were computed before the first
        samples = [replace(s, extra={"scored_logp": own_logp(policy, s).detach().numpy() - 0.1}) for s in samples]
    expected = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        logp = own_logp(policy, sample)
        before = torch.from_numpy(sample.extra["scored_logp"]) if several else logp.detach()
        gap = before - torch.from_numpy(sample.behavior_logp)
        at_level = {"token": gap, "sequence_sum": gap.sum().expand_as(gap), "sequence_mean": gap.mean().expand_as(gap)}[level]
        weight = guarded_exp(at_level)
        weight = weight.clamp(0.7, 1.5) if mode == "truncate" else torch.where((weight >= 0.7) & (weight <= 1.5), weight, 0.0)
        ratio, advantage = (logp - before).exp(), torch.from_numpy(sample.advantage)
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        expected = expected + (torch.from_numpy(sample.weight) * weight * surrogate).sum()
    found = whole_loss(policy, grpo(level=level, mode=mode, low=0.7, high=1.5), samples)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(gradients(policy, found), gradients(policy, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-10)


def test_without_a_mismatch_the_correction_changes_nothing(tiny_policy: Callable, random_samples: Callable) -> None:
    policy = tiny_policy(dtype=torch.float64, scale=3.0)
    samples = shifted(policy, random_samples(), 0.0)
    plain = gradients(policy, whole_loss(policy, resolve("grpo", GroupSettings(), 16), samples))
    for ours, theirs in zip(gradients(policy, whole_loss(policy, grpo(), samples)), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


def test_log_probs_before_the_first_update_are_scored_and_travel(tiny_policy: Callable, scored_group: Callable) -> None:
    policy = tiny_policy(dtype=torch.float64)
    algorithm, group = grpo(), scored_group([1.0, 0.0, 0.5], sampling=Sampling(temperature=0.9))
    groups = add_signals([group], algorithm, scorer=policy, max_tokens_per_microbatch=200)
    for sample in weigh(groups, algorithm.credit(groups), algorithm):
        own = own_logp(policy, sample).detach().numpy()
        np.testing.assert_allclose(sample.extra["scored_logp"], own, atol=1e-9)
        assert np.abs(sample.behavior_logp - own).max() > 0.1


def test_the_metrics_know_the_sampler_from_the_policy(tiny_policy: Callable, scored_group: Callable) -> None:
    policy, algorithm = tiny_policy(dtype=torch.float64), grpo(high=1.2)
    groups = [scored_group([1.0, 0.0], sampling=Sampling(temperature=0.9), id=str(i), seed=i) for i in range(3)]
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    update = improve(
        policy, algorithm, samples, Optimizer(policy.model, OptimizerSettings(lr=1e-3), 1), max_tokens_per_microbatch=200
    )
    metrics = measure(groups, RecordedStep(algorithm, [update], minibatches=1), drawn=3, seconds={})
    gap = np.concatenate([seen - sample.behavior_logp for seen, sample in zip(update.seen, update.samples, strict=True)])
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0
    assert metrics["mismatch/mean"] == pytest.approx(np.abs(gap).mean())
    assert metrics["mismatch/bounded"] == pytest.approx((np.exp(gap) > 1.2).mean())
    assert 0.0 < metrics["mismatch/bounded"] < 1.0


def test_only_another_engine_is_corrected() -> None:
    plain = resolve("grpo", GroupSettings(), 16)
    assert sampled_elsewhere(plain, RolloutSettings()).correction is None
    assert sampled_elsewhere(plain, RolloutSettings(engine=EngineSettings(name="vllm", correct=None))).correction is None
    by_default = sampled_elsewhere(plain, RolloutSettings(engine=EngineSettings(name="vllm")))
    assert by_default.correction == Correction() and by_default.token_level
    by_sequence = EngineSettings(name="vllm", correct=Correction(level="sequence_mean"))
    assert not sampled_elsewhere(plain, RolloutSettings(engine=by_sequence)).token_level
    older = sampled_elsewhere(plain, RolloutSettings(engine=EngineSettings(ahead=1)))
    assert older.correction is not None, "weights that are a step older sample other probabilities than the trainer computes"


def remainder(rollout: Rollout) -> float:
    """A reward that has nothing to do with how likely a completion is."""
    return float(rollout.tokens.sum() % 3)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_off_policy_mask_compares_with_the_engine_that_sampled(ahead: int, tiny_policy: Callable) -> None:
    """Through the loop, for another engine and for older weights: the gradient is the masked one, and the share is logged."""
    policy = tiny_policy(dtype=torch.float64, scale=2.0)
    sampler = policy if ahead else tiny_policy(dtype=torch.float64, scale=2.3)
    settings = GroupSettings(prompts_per_step=4, group_size=4, off_policy_delta=0.02)
    algorithm = replace(resolve("grpo", settings, 8), correction=Correction(high=3.0))
    prompts = (Prompt(id=f"0/{i}", tokens=np.arange(6, 9 + i % 4), text="") for i in range(100))
    optimizer = Optimizer(policy.model, OptimizerSettings(lr=2e-2, clip_norm=None), 2)
    seen: list[tuple[list[torch.Tensor], Policy]] = []
    take = optimizer.adamw.step

    def step() -> None:
        seen.append(([master.grad.clone() for master in optimizer.masters], frozen_copy(policy)))
        take()

    optimizer.adamw.step = step  # type: ignore[method-assign,assignment]
    steps = train_online(
        policy,
        algorithm,
        SampledRollouts(
            algorithm=algorithm,
            engine=NativeEngine(sampler, max_rows=16),
            rewards=RuleRewards(remainder),
            draw=lambda k: [next(prompts) for _ in range(k)],
            sampling=Sampling(max_new_tokens=8),
            steps=2,
            ahead=PrefetchedRollouts(ahead),
            group=settings,
        ),
        optimizer,
        group=settings,
        max_tokens_per_microbatch=100,
    )
    last = list(steps)[-1]
    found, before = seen[-1]
    before.model.requires_grad_(True)
    samples = [sample for sample in weigh(last.groups, last.advantages, algorithm) if sample.advantage.any()]
    loss, dropped, trained = torch.zeros((), dtype=torch.float64), 0, 0
    for sample in samples:
        logp, sampled = own_logp(before, sample), torch.from_numpy(sample.behavior_logp)
        drift = float((sampled - logp.detach()).mean())
        keep = not (sample.advantage[0] < 0 and drift > 0.02)
        dropped, trained = dropped + (not keep) * len(sample.completion), trained + len(sample.completion)
        weight = torch.from_numpy(sample.weight) * (logp.detach() - sampled).exp().clamp(max=3) * keep
        loss = loss - (weight * torch.from_numpy(sample.advantage) * (logp - logp.detach()).exp()).sum()
    assert 0 < dropped < trained
    for ours, theirs in zip(found, gradients(before, loss), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-10)
    assert last.metrics["off_policy/dropped"] == pytest.approx(dropped / trained)
