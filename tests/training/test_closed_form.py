"""The gradient in every log-prob, from numbers per token, is autograd's on the way through a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from groupwise.algorithms.losses import Correction, Terms
from groupwise.algorithms.table import ALGORITHMS
from groupwise.config.resolve import resolve
from groupwise.config.settings import GroupSettings
from groupwise.errors import DataError
from groupwise.inspection.closed_form import closed_form
from groupwise.models.policy import Policy
from groupwise.ops.linear_cross_entropy import WholeLoss
from groupwise.records import Branch, RolloutGroup, Sample
from groupwise.training.loss import Loss
from groupwise.training.passes import BatchPass, batches_of, score
from groupwise.training.recorded_loss import RecordedLoss
from groupwise.training.samples import entropy_tokens, sample_of, weigh, with_forking, with_gradient
from groupwise.training.signals import add_signals

SETTINGS = {
    **{name: {} for name in ALGORITHMS},
    "grpo": {"beta": 0.1, "surrogate": {"low": 0.05, "high": 0.05}},
    "rloo": {"beta": 0.1},
    "bnpo": {"entropy_quantile": 0.6},
    "cispo": {"off_policy_delta": 0.01, "truncated": "mask"},
}


@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if not (ALGORITHMS[name].needs.critic or ALGORITHMS[name].needs.teacher)]
)
def test_the_closed_form_gradient_equals_autograd(
    name: str, tiny_policy: Callable[..., Policy], scored_group: Callable[..., RolloutGroup]
) -> None:
    policy, other = tiny_policy(dtype=torch.float64, scale=3.0), tiny_policy(dtype=torch.float64, scale=3.0, seed=1)
    algorithm = resolve(name, GroupSettings(group_size=3, **SETTINGS[name]), 16)  # type: ignore[arg-type]
    groups = [
        scored_group([1.0, 0.0, 0.4], [3, 9, 5], id="0/0", truncated=(1,)),
        scored_group([0.0, 2.0, None], [2, 4, 8], id="0/1", seed=1),
        scored_group([1.0, 1.0, 1.0], [4, 4, 4], id="0/2", seed=2),
    ]
    drawn = score(
        policy, [sample_of(rollout) for group in groups for rollout in group.rollouts], max_tokens_per_microbatch=100
    ).logp
    near = iter(logp + 0.1 * np.random.default_rng(5).normal(size=logp.size) for logp in drawn)
    groups = [replace(group, rollouts=tuple(replace(r, behavior_logp=next(near)) for r in group.rollouts)) for group in groups]
    if algorithm.needs.reference:
        groups = add_signals(groups, algorithm, reference=other, max_tokens_per_microbatch=100)
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    scores = score(policy, samples, max_tokens_per_microbatch=100, entropy=True)
    samples = with_forking(algorithm, samples, scores.entropy) if algorithm.needs.forking else samples
    tokens = entropy_tokens(algorithm, samples)
    loss, through = 0.0, []
    for batch in batches_of(policy, with_gradient(algorithm, samples), 20):  # several micro-batches
        passed = BatchPass(policy, batch)
        head = passed.head(fused=False, entropy=algorithm.needs.entropy)
        logp_M = head.logp_M
        logp_M.retain_grad()
        passed.head = lambda logp_M=logp_M, head=head, **_: WholeLoss(logp_M, head.entropy_M)  # type: ignore[method-assign]
        value, _ = Loss(algorithm=algorithm, entropy_tokens=tokens)(passed)
        value.backward()
        assert logp_M.grad is not None
        loss += value.item()
        through.append(logp_M.grad)
    assert len(through) > 1
    keys = [(sample.group, sample.index) for sample in samples]
    found = closed_form(algorithm, samples, dict(zip(keys, scores.logp, strict=True)), dict(zip(keys, scores.entropy, strict=True)))
    assert found.loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    mine = np.concatenate(list(found.gradient.values()))
    theirs = torch.cat(through).numpy()
    np.testing.assert_allclose(np.sort(mine[mine != 0]), np.sort(theirs[theirs != 0]), rtol=1e-8)
    assert np.abs(mine).sum() == pytest.approx(np.abs(theirs).sum(), rel=1e-9)
    assert np.abs(mine).sum() > 0


def test_the_closed_form_includes_the_correction(scored_group: Callable[..., RolloutGroup]) -> None:
    """With one, the ratio is to the trainer's own log-prob, and the sampler's gives the weight."""
    algorithm = replace(resolve("grpo", GroupSettings(group_size=2), 8), correction=Correction(high=2.0))
    groups = [scored_group([1.0, 0.0], [2, 3])]
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    logp = {(sample.group, sample.index): sample.behavior_logp + np.log(1.5) for sample in samples}
    found = closed_form(algorithm, samples, logp)
    for sample in samples:
        key = sample.group, sample.index
        np.testing.assert_allclose(found.ratio[key], 1.0)
        np.testing.assert_allclose(found.gradient[key], -1.5 * sample.weight * sample.advantage, rtol=1e-9)


def constant(terms: Terms) -> torch.Tensor:
    return terms.advantage_M.square()


constant.reads_logp = False


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_surrogate_that_reads_no_log_probs_has_a_closed_form(beta: float, scored_group: Callable[..., RolloutGroup]) -> None:
    """Its gradient is that of the KL alone, and it cuts nothing."""
    algorithm = replace(resolve("grpo", GroupSettings(group_size=2, beta=beta, kl="k2"), 8), surrogate=constant)
    groups = [scored_group([1.0, 0.0], [2, 3])]
    samples = [
        replace(sample, reference_logp=sample.behavior_logp - 0.1) for sample in weigh(groups, algorithm.credit(groups), algorithm)
    ]
    found = closed_form(algorithm, samples, {(sample.group, sample.index): sample.behavior_logp for sample in samples})
    pairs = [(sample.weight, sample.advantage) for sample in samples]
    assert found.loss == pytest.approx(sum(float((w * (a**2 + beta * 0.1**2 / 2)).sum()) for w, a in pairs))
    for sample in samples:
        np.testing.assert_allclose(found.gradient[sample.group, sample.index], beta * 0.1 * sample.weight, atol=1e-12)
    recorded = RecordedLoss(algorithm, samples, [sample.behavior_logp for sample in samples])
    assert not algorithm.cut(recorded.terms).any()


def test_what_of_an_episode_is_not_trained_has_no_gradient_and_a_ratio_of_1() -> None:
    """Of what was drawn behind another context than the rest, nothing is packed where nothing is trained."""
    sample = Sample(
        group="0/0",
        branches=(Branch(begin=2, context=np.array([7, 8])),),
        prompt=np.array([5, 6]),
        completion=np.array([1, 2, 3, 4]),
        weight=np.array([0.0, 0.0, 0.5, 0.0]),
        advantage=np.ones(4),
        behavior_logp=np.full(4, -1.0),
    )
    found = closed_form(resolve("grpo", GroupSettings(), 8), [sample], {("0/0", 0): np.full(4, -0.9)})
    np.testing.assert_allclose(found.ratio["0/0", 0], [1.0, 1.0, np.exp(0.1), 1.0])
    np.testing.assert_allclose(found.gradient["0/0", 0], [0.0, 0.0, -0.5 * np.exp(0.1), 0.0])


def test_missing_log_probs_and_entropies_are_named(scored_group: Callable[..., RolloutGroup]) -> None:
    group = GroupSettings(group_size=2, entropy_bonus=0.1)
    groups = [scored_group([1.0, 0.0], [2, 3])]
    plain, bonus = resolve("grpo", GroupSettings(group_size=2), 8), resolve("grpo", group, 8)
    samples = weigh(groups, plain.credit(groups), plain)
    with pytest.raises(DataError, match=r"log-probs of completion 0 of row 0 \(epoch 0\) and 1 more were not"):
        closed_form(plain, samples, {})
    with pytest.raises(DataError, match="reads entropies"):
        closed_form(bonus, samples, {(s.group, s.index): s.behavior_logp for s in samples})
    masked = resolve("grpo", GroupSettings(group_size=2, entropy_quantile=0.5), 8)
    logp = {(s.group, s.index): s.behavior_logp for s in samples}
    with pytest.raises(DataError, match=r"the entropies of completion 1 of row 0 \(epoch 0\) were not"):
        closed_form(masked, samples, logp, {("0/0", 0): samples[0].behavior_logp})
    adaptive = resolve("grpo", GroupSettings(group_size=2, entropy_target=1.0, entropy_bonus=0.1), 8)
    with pytest.raises(DataError, match="adaptive entropy bonus"):
        closed_form(adaptive, samples, logp, logp)
