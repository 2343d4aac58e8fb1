"""Critics: GAE and the value loss against transcriptions of their papers, PPO's whole step against a padded one, and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from groupwise.algorithms import advantages as credit
from groupwise.algorithms import losses
from groupwise.algorithms.algorithm import Algorithm
from groupwise.config.recipes import load_recipe
from groupwise.config.resolve import resolve
from groupwise.config.settings import CriticSettings, GroupSettings, ModelSettings, OptimizerSettings
from groupwise.data.packing import pack
from groupwise.errors import ConfigError
from groupwise.models.attention import plain_attention
from groupwise.models.loading import read_blueprint
from groupwise.models.passes import BatchPass
from groupwise.models.policy import Policy
from groupwise.models.reward_head import make_scorer
from groupwise.models.saving import save
from groupwise.records import RolloutGroup, Step
from groupwise.runs.run import train
from groupwise.training import metrics
from groupwise.training.critics import Critic
from groupwise.training.loss import CriticLoss, Loss
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.recorded_rollouts import RecordedRollouts
from groupwise.training.samples import sample_of, weigh
from groupwise.training.signals import add_signals


def valued(group: RolloutGroup, *, seed: int = 0, reference: bool = True) -> RolloutGroup:
    """The group with made-up values and reference log-probs."""
    rng = np.random.default_rng(seed)
    signals = {"value": tuple(rng.normal(size=len(r)) for r in group.rollouts)}
    if reference:
        signals["reference_logp"] = tuple(r.behavior_logp + 0.5 * rng.normal(size=len(r)) for r in group.rollouts)
    return RolloutGroup(
        rollouts=group.rollouts, names=group.names, rewards=group.rewards, reward=group.reward, signals=signals
    )  # fmt: skip


def by_definition(rollout, reward, value, reference, *, beta, kl, gamma, lam):
    """GAE's sum as its equation 16 writes it, over the tokens that the policy wrote; 0 elsewhere."""
    places = [t for t in range(len(rollout)) if rollout.trained[t]]
    found = np.zeros(len(rollout))
    earned, deltas = [], []
    for k, t in enumerate(places):
        gap = rollout.behavior_logp[t] - reference[t]
        price = gap if kl == "k1" else np.exp(-gap) + gap - 1
        earned.append(-beta * price + (reward if k == len(places) - 1 else 0.0))
    for k, t in enumerate(places):
        after = value[places[k + 1]] if k + 1 < len(places) else 0.0
        deltas.append(earned[k] + gamma * after - value[t])
    for k, t in enumerate(places):
        found[t] = sum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[k:]))
    return found


@pytest.mark.parametrize("kl", ["k1", "k3"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (1.0, 0.0)])
def test_gae_is_the_sum_of_its_paper(gamma: float, lam: float, kl: str, scored_group: Callable) -> None:
    group = scored_group([1.0, 0.25, -0.5], [7, 1, 4])
    group.rollouts[0].trained[2:4] = False
    group = valued(group)
    (found,) = credit.Gae(beta=0.3, kl=kl, gamma=gamma, lam=lam, whiten=False)([group])
    columns = zip(group.rollouts, group.reward, group.signals["value"], group.signals["reference_logp"], found, strict=True)
    for rollout, reward, value, reference, advantage in columns:
        expected = by_definition(rollout, reward, value, reference, beta=0.3, kl=kl, gamma=gamma, lam=lam)
        np.testing.assert_allclose(advantage, expected, rtol=1e-12, atol=1e-12)


def test_whitening_is_over_the_trained_tokens_of_all_groups(scored_group: Callable) -> None:
    groups = [valued(scored_group([1.0, None, 0.0], [5, 3, 6], id=str(i), seed=i), seed=i) for i in range(2)]
    groups[0].rollouts[0].trained[1] = False
    raw = [a for group in credit.Gae(whiten=False)(groups) for a in group]
    white = [a for group in credit.Gae()(groups) for a in group]
    scored = [i for i in range(6) if i not in (1, 4)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    pool = np.concatenate([raw[i][rollouts[i].trained] for i in scored])
    for i in scored:
        expected = np.where(rollouts[i].trained, (raw[i] - pool.mean()) / (pool.std(ddof=1) + 1e-8), 0.0)
        np.testing.assert_allclose(white[i], expected, rtol=1e-12, atol=1e-14)
    assert not any(white[i].any() for i in (1, 4)), "what has no reward teaches nothing"
    equal = [valued(scored_group([1.0, 1.0], [1, 1], id="x"))]
    equal[0].signals["value"][1][:] = equal[0].signals["value"][0]
    assert not any(a.any() for a in credit.Gae()(equal)[0]), "all advantages equal: exactly 0"


def test_returns_are_values_plus_advantages_and_unknown_where_nothing_is(scored_group: Callable) -> None:
    group = scored_group([1.0, None, 0.5], [5, 3, 6])
    group.rollouts[2].trained[0] = False
    group = valued(group)
    algorithm = resolve("ppo", GroupSettings(group_size=3, credit={"lam": 0.7, "value_lam": 1.0, "gamma": 0.9}), 8)
    (found,) = credit.returns([group], algorithm.credit)
    assert np.isnan(found[1]).all()
    assert np.isnan(found[2]).tolist() == [True] + [False] * 5
    # At lambda 1 the sum telescopes: what was earned from here on, whatever the values were.
    np.testing.assert_allclose(found[0], 0.9 ** np.arange(4, -1, -1), rtol=1e-12)
    (same,) = credit.returns([group], resolve("ppo", GroupSettings(group_size=3, credit={"lam": 0.7}), 8).credit)
    (advantages,) = credit.Gae(lam=0.7, whiten=False)([group])
    np.testing.assert_allclose(same[0], group.signals["value"][0] + advantages[0], rtol=1e-12)


def test_the_value_loss_is_the_larger_error() -> None:
    generator = torch.Generator().manual_seed(0)
    value, before, target = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(3))
    value.requires_grad_()
    found = losses.clipped_value(value, before, target, clip=0.3)
    for v, old, r, loss in zip(value.tolist(), before.tolist(), target.tolist(), found.tolist(), strict=True):
        clipped = min(max(v, old - 0.3), old + 0.3)
        assert loss == pytest.approx(0.5 * max((v - r) ** 2, (clipped - r) ** 2), rel=1e-12)
    found.sum().backward()
    inside = (value - target).square() >= ((value.clamp(before - 0.3, before + 0.3)) - target).square()
    still = (value - before).abs() < 0.3
    expected = torch.where(inside | still, value - target, 0.0)
    torch.testing.assert_close(value.grad, expected.detach())
    torch.testing.assert_close(losses.clipped_value(value, before, target, clip=None), 0.5 * (value - target).square())


# ---- a whole step, against one that is padded, one by one and written out


def settled(critic: Critic) -> Critic:
    """A critic that has something to say."""
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.5, 0.4, critic.head.weight.shape[1], dtype=torch.float64)[None])
    return critic


def scorer_of(policy: Policy, tmp_path: Path) -> Policy:
    """A critic's own backbone, other than the policy's."""
    save(policy, tmp_path / "other")
    return make_scorer(read_blueprint(ModelSettings(path=str(tmp_path / "other"))), ModelSettings(), pooling="last")


@pytest.fixture
def groups(scored_group: Callable) -> list[RolloutGroup]:
    made = [
        scored_group([1.0, 0.0, 0.5, None], [1, 12, 5, 3], id="0/0", seed=1),
        scored_group([0.0, 1.0, 1.0, 0.0], [7, 0, 2, 9], id="0/1", seed=2),
        scored_group([0.3, -0.2, 0.1, 0.0], [3, 1, 1, 10], id="0/4", seed=5, prompt=1),
    ]
    made[0].rollouts[1].trained[3:6] = False
    return made


def states(policy: Policy, sample) -> tuple[torch.Tensor, torch.Tensor]:
    """By the model's own forward, one sequence: the states that predict the completion (n, D), and its log-probs (n,)."""
    ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion]))
    with plain_attention(policy.model) as model:
        out = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    rows = slice(sample.prompt.size - 1, ids.numel() - 1)
    logp = (out.logits[0, rows, : policy.vocabulary] / sample.temperature).log_softmax(-1)
    return out.hidden_states[-1][0, rows], logp.gather(1, ids[sample.prompt.size :, None])[:, 0]


def test_a_step_with_a_shared_backbone_is_the_paper_s(tiny_policy: Callable, groups: list[RolloutGroup]) -> None:
    """Value and gradient of `L_clip + c L_value`, after both policy and critic have moved, to 1e-10."""
    policy = tiny_policy(dtype=torch.float64, scale=2.0)
    algorithm = resolve("ppo", GroupSettings(group_size=4, beta=0.1), 12)
    algorithm = replace(algorithm, extra=(losses.ValueLoss(clip=0.1, coefficient=0.3),))
    critic = settled(Critic.on(policy, CriticSettings(), OptimizerSettings(), 1))
    critic.head.bias.fill_(start := -0.4)
    reference = tiny_policy(dtype=torch.float64, scale=1.9)
    scored = add_signals(groups, algorithm, reference=reference, critic=critic, max_tokens_per_microbatch=100)
    shift = float(critic.head.bias) - start
    assert shift > 0.1, "the first step moves the bias further than the loss lets a value go"
    samples = weigh(scored, algorithm.credit(scored), algorithm)
    for sample in samples:  # values are those of the model's own states
        np.testing.assert_allclose(
            sample.extra["old_value"][sample.weight != 0],
            critic.values(states(policy, sample)[0]).detach().numpy()[sample.weight != 0],
            atol=1e-10,
        )
        np.testing.assert_allclose(sample.extra["old_value"], sample.extra["value"] + shift, atol=1e-12)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.02)
        critic.head.bias.add_(0.07)
    parameters = [*policy.model.parameters(), critic.head.weight]

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, parameters))

    parts = [Loss(algorithm=algorithm, critic=critic)(BatchPass(policy, b))[0] for b in pack(samples, 60, dtype=torch.float64)]
    found = torch.stack(parts).sum()
    tokens = sum(int(rollout.trained.sum()) for group in groups for rollout in group.rollouts)
    expected = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        trained = sample.weight != 0
        hidden, logp = (column[torch.from_numpy(trained)] for column in states(policy, sample))
        columns = (sample.advantage, sample.behavior_logp, sample.extra["old_value"], sample.extra["return"])
        advantage, behavior, before, target = (torch.from_numpy(column[trained]) for column in columns)
        ratio, value = (logp - behavior).exp(), critic.values(hidden)
        expected = expected - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / tokens
        if not target.isnan().any():  # else the completion had no reward
            error = torch.maximum((value - target) ** 2, (torch.clamp(value, before - 0.1, before + 0.1) - target) ** 2)
            expected = expected + 0.3 * 0.5 * error.sum() / tokens
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def steps_on(
    policy: Policy, algorithm: Algorithm, groups: list[RolloutGroup], optimizer: Optimizer, critic: Critic, times: int = 1
) -> list[Step]:
    """A step of the loop on the groups."""
    recorded = RecordedRollouts(lambda number: (groups, len(groups)), range(1, 2))
    group = GroupSettings(group_size=4, updates_per_rollout=times)
    return list(train_online(policy, algorithm, recorded, optimizer, group=group, max_tokens_per_microbatch=100, critic=critic))


def test_a_step_takes_both_gradients(tiny_policy: Callable, groups: list[RolloutGroup]) -> None:
    """A head on the policy learns with it; a critic of its own learns from the same samples, and the policy from its part alone."""
    algorithm = resolve("ppo", GroupSettings(group_size=4), 12)
    moved = {}
    for shared in (True, False):
        policy = tiny_policy(scale=2.0)
        other = tiny_policy(scale=2.0) if not shared else policy
        critic = Critic.on(other, CriticSettings(lr=1e-2), OptimizerSettings(), 4)
        if not shared:  # the same head on another backbone, which stays as it is: only the policy's own part reaches the policy
            critic = Critic(policy=other, head=critic.head, optimizer=critic.optimizer, settings=critic.settings, shared=False)
        optimizer = Optimizer(policy.model, OptimizerSettings(lr=1e-2), 4)
        head = settled(critic).head.weight.detach().clone()
        (step,) = steps_on(policy, algorithm, groups, optimizer, critic)
        assert (optimizer.taken, critic.optimizer.taken) == (1, 1)
        assert not torch.equal(critic.head.weight, head)
        moved[shared] = step.metrics["grad_norm"]
    assert moved[True] != pytest.approx(moved[False], rel=1e-3), "the value loss reaches the backbone that is shared"


def test_what_fitted_into_memory_for_the_critic_is_remembered(
    tiny_policy: Callable, groups: list[RolloutGroup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every further update would run out of memory again before it learns."""
    policy, algorithm = tiny_policy(scale=2.0), resolve("ppo", GroupSettings(group_size=4), 12)
    critic = Critic.of(scorer_of(policy, tmp_path), CriticSettings(lr=1e-2), OptimizerSettings(), 4)
    loss, seen = CriticLoss.__call__, []

    def limited(self: CriticLoss, passed: BatchPass) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((critic.optimizer.taken, passed.batch.layout.total))
        if seen[-1][1] > 50:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss(self, passed)

    monkeypatch.setattr(CriticLoss, "__call__", limited)
    optimizer = Optimizer(policy.model, OptimizerSettings(lr=1e-2), 4)
    steps_on(policy, algorithm, groups, optimizer, critic, times=3)
    assert (optimizer.taken, critic.optimizer.taken) == (3, 3)
    assert {taken for taken, positions in seen if positions > 50} == {0}


def test_pretraining_leaves_the_policy_as_it_is(tiny_policy: Callable, groups: list[RolloutGroup]) -> None:
    policy, algorithm = tiny_policy(scale=2.0), resolve("ppo", GroupSettings(group_size=4), 12)
    critic = settled(Critic.on(policy, CriticSettings(lr=1e-2), OptimizerSettings(), 30))
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    recorded = RecordedRollouts(lambda number: (groups, len(groups)), range(1, 31))
    steps = list(
        train_online(
            policy,
            algorithm,
            recorded,
            Optimizer(policy.model, OptimizerSettings(lr=1e-2), 30),
            critic=critic,
            group=GroupSettings(group_size=4),
            pretrain=30,
            max_tokens_per_microbatch=100,
        )
    )
    for step in steps:
        assert (step.metrics["grad_norm"], step.metrics["lr"]) == (0.0, 0.0)
        rollout = groups[0].rollouts[0]
        expected = states(policy, sample_of(rollout))[1].detach().numpy()
        np.testing.assert_allclose(step.current_logp[0][0], expected, atol=1e-4)
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    assert all(p.grad is None for p in policy.model.parameters())
    assert critic.optimizer.taken == 30
    assert steps[-1].metrics["value/loss"] < 0.5 * steps[0].metrics["value/loss"]


# ---- runs


TREE = {
    "objective": "ppo",
    "steps": 4,
    "group": {"prompts_per_step": 3, "group_size": 2, "updates_per_rollout": 2, "minibatches": 2, "beta": 0.05, "kl": "k3"},
    "critic": {"lr": 1e-3, "pretrain": 1},
    "rewards": [{"function": "accuracy"}, {"function": "repetition", "args": {"n": 2, "penalty": -1.0}}],
}


@pytest.mark.slow
def test_a_critic_with_other_tokens_is_refused(tmp_path: Path, write_recipe: Callable) -> None:
    other = write_recipe(
        tmp_path, "bytes", steps=1, rewards=TREE["rewards"], model={"scratch": {"hidden": 32, "context": 96, "tokenizer": "bytes"}}
    )
    list(train(load_recipe(other)))
    path = write_recipe(tmp_path, "run", **(TREE | {"critic": {"path": str(tmp_path / "runs" / "bytes" / "final")}}))
    with pytest.raises(ConfigError, match=r"critic\.path: .* has another vocabulary than the policy \(\d+ of \d+ tokens differ: '"):
        list(train(load_recipe(path)))


def test_a_credit_of_the_table_makes_any_row_ask_a_critic() -> None:
    chosen: Algorithm = resolve("grpo", GroupSettings(credit="gae", group_size=1), 8)
    assert chosen.needs.critic
    assert not chosen.skips_dead


def test_a_new_head_soon_has_the_mean_of_the_returns(tiny_policy: Callable, groups: list[RolloutGroup]) -> None:
    policy = tiny_policy(dtype=torch.float64, scale=2.0)
    algorithm = resolve("ppo", GroupSettings(group_size=4), 12)
    critic = Critic.on(policy, CriticSettings(), OptimizerSettings(), 1)
    for _ in range(60):
        scored = add_signals(groups, algorithm, critic=critic, max_tokens_per_microbatch=100)
    found = metrics.value_metrics(scored)
    assert found["value/mean"] == pytest.approx(found["value/return"], abs=1e-3)
    assert found["value/mean"] != 0.0
