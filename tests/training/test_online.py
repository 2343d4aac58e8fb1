"""The loop where it is most likely to break: nothing to learn, nothing finite, nothing long, and settings at their ends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rule_rewards import Rule, RuleRewards
from steps import improve

from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.losses import Terms
from groupwise.algorithms.parts import fact, options
from groupwise.algorithms.table import ALGORITHMS
from groupwise.config.resolve import resolve
from groupwise.config.settings import CriticSettings, GroupSettings, ModelSettings, OptimizerSettings
from groupwise.errors import ConfigError, Diverged, RewardError
from groupwise.models.moe import router_coefficient
from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.records import Finish, Prompt, Rollout, Sampling, Step
from groupwise.rollout.native.engine import NativeEngine
from groupwise.training.critics import Critic
from groupwise.training.groups import SampledRollouts, _is_silent
from groupwise.training.metrics import kl_metrics, reward_metrics
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import Scores, score
from groupwise.training.recorded_loss import RecordedLoss
from groupwise.training.samples import sample_of, weigh
from groupwise.training.teachers import Teacher


def even(rollout: Rollout) -> float:
    return float(rollout.tokens.sum() % 2)


@pytest.fixture
def run(tiny_policy: Callable) -> Callable[..., tuple[Policy, Iterator[Step]]]:
    """`run(preset, rule, ...)` -> the policy, and its steps."""

    def start(
        preset: str = "grpo",
        rule: Rule = even,
        *,
        steps: int = 2,
        sampling: Sampling | None = None,
        policy: Policy | None = None,
        optimizer: OptimizerSettings | None = None,
        algorithm: Algorithm | None = None,
        prompt: int = 3,
        checkpointing: bool = False,
        max_tokens_per_microbatch: int = 200,
        engine: object = None,
        **group: object,
    ) -> tuple[Policy, Iterator[Step]]:
        policy = policy or tiny_policy("llama", scale=2.0)
        settings = GroupSettings(**({"prompts_per_step": 3, "group_size": 4} | group))  # type: ignore[arg-type]
        sampling = sampling or Sampling(max_new_tokens=6)
        algorithm = algorithm or resolve(preset, settings, sampling.max_new_tokens)
        rng = np.random.default_rng(0)
        prompts = (Prompt(id=f"0/{i}", tokens=rng.integers(6, 50, size=prompt), text="") for i in range(10_000))
        return policy, train_online(
            policy,
            algorithm,
            SampledRollouts(
                algorithm=algorithm,
                engine=engine or NativeEngine(policy, max_rows=8),
                rewards=RuleRewards(rule),
                draw=lambda k: [next(prompts) for _ in range(k)],
                sampling=sampling,
                steps=steps,
                group=settings,
            ),
            Optimizer(policy.model, optimizer or OptimizerSettings(lr=1e-3), 100),
            group=settings,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            reference=frozen_copy(policy) if algorithm.needs.reference else None,
            critic=Critic.on(policy, CriticSettings(lr=1e-3), OptimizerSettings(), 100) if algorithm.needs.critic else None,
            teacher=Teacher(policy=tiny_policy("llama", scale=1.7)) if algorithm.needs.teacher else None,
            checkpointing=checkpointing,
        )

    return start


def weights_of(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().float() for parameter in policy.model.parameters()]).clone()


PRESETS = pytest.mark.parametrize("preset", ALGORITHMS)


@pytest.mark.parametrize("preset", [name for name, row in ALGORITHMS.items() if row.needs.reward and not row.needs.critic])
@pytest.mark.parametrize("value", [1.0, None, 0.1])
def test_p61_rewards_without_differences_change_nothing(preset: str, value: float | None, run: Callable) -> None:
    """All equal, or all None: every metric is finite or left out, and the weights stay as they are."""
    policy, steps = run(preset, lambda rollout: value)
    before = weights_of(policy)
    for step in steps:
        assert step.metrics["groups/dead"] == 1.0
        assert step.metrics["grad_norm"] == 0.0
        unknown = {name for name, number in step.metrics.items() if not math.isfinite(number)}
        assert unknown <= ({"reward", "rewards/rule/mean"} if value is None else set())
    assert torch.equal(weights_of(policy), before)


@pytest.mark.parametrize(
    ("beta", "message"), [(0.1, "grpo needs a reference: pass"), (0.0, "grpo has no use for a reference: leave")]
)
def test_a_loop_of_your_own_hears_which_model_is_missing_or_too_many(beta: float, message: str, tiny_policy: Callable) -> None:
    policy, settings = tiny_policy("llama"), GroupSettings(beta=beta)
    optimizer, reference = Optimizer(policy.model, OptimizerSettings(), 1), None if beta else policy
    steps = train_online(
        policy, resolve("grpo", settings, 6), [], optimizer, group=settings, max_tokens_per_microbatch=9, reference=reference
    )  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        next(steps)


def test_r08_a_run_without_any_reward_ends(run: Callable) -> None:
    said: list[float | None] = [None] * 24 + [1.0] + [None] * 100
    _, steps = run("grpo", lambda rollout: said.pop(0), steps=9)
    taken: list[int] = []
    with pytest.raises(RewardError, match=r"\(rule\) said None for every completion of 3 steps: nothing can be learnt; try"):
        taken.extend(step.number for step in steps)
    assert taken == [1, 2, 3, 4, 5], "two silent steps, one with a reward, two silent ones; the third in a row is not taken"


@pytest.mark.parametrize(("weight", "silent"), [(1.0, True), (0.0, False)])
def test_a_reward_that_is_logged_alone_may_say_none(scored_group: Callable, weight: float, silent: bool) -> None:
    """A teacher's run learns without a verdict."""
    group = scored_group([None, None])
    assert _is_silent([replace(group, weights=(weight,))]) is silent


def test_solved_and_failed_are_shares_of_the_groups_with_a_verdict(scored_group: Callable) -> None:
    rewards = [[1.0, 1.0], [1.0, None], [None, None], [0.0, None], [0.0, 1.0]]
    found = reward_metrics([replace(scored_group(row, id=f"0/{i}"), verdict="r") for i, row in enumerate(rewards)], 5)
    assert (found["groups/solved"], found["groups/failed"]) == (0.25, 0.25)


def test_kl_that_a_reward_loses_is_logged_as_it_is_taken(run: Callable) -> None:
    """k1 may be below 0; k3, which a loss takes, is not."""
    signs = set()
    for preset in ("rloo", "grpo"):
        _, steps = run(preset, steps=3, beta=0.1)
        for step in steps:
            group = [(logp, ref) for i, one in enumerate(step.groups) for logp, ref in zip(
                step.current_logp[i], one.signals["reference_logp"], strict=True) if logp.size]  # fmt: skip
            log_ratio = np.concatenate([logp - ref for logp, ref in group]).astype(float)
            taken = log_ratio if preset == "rloo" else np.exp(-log_ratio) - 1 + log_ratio
            assert step.metrics["kl"] == pytest.approx(taken.mean(), rel=1e-3, abs=1e-7)
            signs.add((preset, step.metrics["kl"] < 0))
    assert ("grpo", True) not in signs


@pytest.mark.parametrize(("kl", "expected"), [(None, -0.5), ("k1", -0.5), ("k3", math.exp(0.5) - 0.5 - 1)])
def test_kl_is_by_the_estimator_that_the_credit_takes_from_the_reward(
    kl: str | None, expected: float, scored_group: Callable
) -> None:
    algorithm = resolve("ppo", GroupSettings(beta=0.1, kl=kl), max_new_tokens=8)
    rollout = scored_group([1.0, 0.0], [3, 2]).rollouts[0]
    sample = sample_of(rollout, reference_logp=rollout.behavior_logp + 0.5)
    assert kl_metrics(RecordedLoss(algorithm, [sample], [rollout.behavior_logp]))["kl"] == pytest.approx(expected)


@pytest.mark.parametrize("quantile", [0.5, 0.8])
def test_a_high_entropy_mask_is_the_same_however_a_step_is_cut(
    quantile: float, tiny_policy: Callable, scored_group: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First tokens of a group tie, and so does all of equal completions: the mask must not hang on how they are rounded."""
    groups = [scored_group([1.0, 0.0, 0.5, 0.2], [3, 3, 3, 4], id=f"0/{i}", seed=i, prompt=5 + i) for i in range(3)]
    twins = [replace(group.rollouts[0], index=i) for i, group in ((1, groups[0]),)]
    groups[0] = replace(groups[0], rollouts=(groups[0].rollouts[0], twins[0], *groups[0].rollouts[2:]))
    algorithm = resolve("grpo", GroupSettings(group_size=4, entropy_quantile=quantile, entropy_bonus=0.01), 8)
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    gradients = []
    for max_tokens_per_microbatch in (1, 20, 33, 1000):
        for nudge in (0.0, 2e-7, -2e-7):

            def nudged(*args: Any, nudge: float = nudge, **kwargs: Any) -> Scores:
                found = score(*args, **kwargs)
                signs = np.random.default_rng(0)
                return replace(found, entropy=[one + nudge * signs.choice([-1, 1], one.shape) for one in found.entropy])

            monkeypatch.setattr("groupwise.training.loss.score", nudged)
            policy = tiny_policy("llama", scale=2.0)
            optimizer = Optimizer(policy.model, OptimizerSettings(lr=1e-3, clip_norm=None), 3)
            improve(policy, algorithm, samples, optimizer, max_tokens_per_microbatch=max_tokens_per_microbatch)
            gradients.append(weights_of(policy))
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=0, atol=2e-5)


def test_samples_without_advantage_are_computed_where_experts_are_balanced(tiny_policy: Callable, scored_group: Callable) -> None:
    """That loss is of every token: a step that leaves them out would be another."""
    groups = [scored_group([1.0, 0.0], [3, 4], id="0/0", seed=1), scored_group([1.0, 1.0], [5, 2], id="0/1", seed=2)]
    algorithm = resolve("grpo", GroupSettings(group_size=2), 8)
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    for coefficient, computed in ((0.0, 2), (0.02, 4)):
        policy = tiny_policy("mixtral")
        policy.model.config.output_router_logits = coefficient > 0
        policy.model.config.router_aux_loss_coef = coefficient
        assert router_coefficient(policy) == coefficient
        found = improve(
            policy, algorithm, samples, Optimizer(policy.model, OptimizerSettings(lr=1e-3), 3), max_tokens_per_microbatch=100
        )
        assert len(found.samples) == computed


def test_p23_a_completion_without_reward_teaches_nothing(run: Callable) -> None:
    _, steps = run("grpo", lambda rollout: None if rollout.index == 0 else even(rollout), steps=1)
    (step,) = steps
    for group, advantages in zip(step.groups, step.advantages, strict=True):
        assert np.isnan(group.reward[0])
        assert not advantages[0].any()
    assert step.metrics["rewards/rule/none"] == 0.25


@PRESETS
def test_completions_and_prompts_of_one_token(preset: str, run: Callable) -> None:
    _, steps = run(preset, sampling=Sampling(max_new_tokens=1), prompt=1, truncated="keep")
    for step in steps:
        assert step.metrics["completions/max_length"] == 1
        assert math.isfinite(step.metrics["grad_norm"])
        assert step.metrics.get("mismatch/max", 0.0) < 1e-4  # a teacher that helps to sample is another distribution


class Endless(NativeEngine):
    """Draws again until no completion of a request has ended by itself."""

    def generate(self, prompts, *, group_size, sampling, seed):
        for again in itertools.count():
            groups = list(super().generate(prompts, group_size=group_size, sampling=sampling, seed=seed + 1000 * again))
            if not any(rollout.finish is Finish.EOS for group in groups for rollout in group):
                yield from groups
                return


def test_everything_truncated_and_masked_trains_nothing(run: Callable, tiny_policy: Callable) -> None:
    policy = tiny_policy("llama", scale=2.0)
    before = weights_of(policy)
    endless = Endless(policy, max_rows=8)
    _, steps = run("grpo", policy=policy, engine=endless, sampling=Sampling(max_new_tokens=1), truncated="mask", steps=3)
    for step in (next(steps), next(steps)):
        assert all(rollout.truncated for group in step.groups for rollout in group.rollouts)
        assert step.metrics["tokens/trained"] == 0
    assert torch.equal(weights_of(policy), before)


class Mute:
    """An engine whose first completion of every group is empty (an environment may end an episode at once)."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine

    def send_weights(self, version: int) -> None:
        self.engine.send_weights(version)

    def generate(self, prompts: Sequence[Prompt], **keywords: object) -> Iterator[tuple[Rollout, ...]]:
        nothing = np.zeros(0, dtype=np.int64)
        for group in self.engine.generate(prompts, **keywords):  # type: ignore[arg-type]
            empty = {"tokens": nothing, "behavior_logp": np.zeros(0), "trained": nothing.astype(bool), "version": nothing}
            yield (replace(group[0], finish=Finish.STOP, text="", **empty), *group[1:])


@PRESETS
def test_empty_completions(preset: str, run: Callable, tiny_policy: Callable) -> None:
    policy = tiny_policy("llama", scale=2.0)
    beta = {"beta": 0.1}
    _, steps = run(preset, policy=policy, engine=Mute(NativeEngine(policy, max_rows=8)), updates_per_rollout=2, **beta)
    for step in steps:
        assert step.metrics["completions/min_length"] == 0
        assert all(math.isfinite(value) for value in step.metrics.values())


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7}, {"top_k": 1}],
)
@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_p13_truncated_sampling_is_trained_over_its_support(preset: str, sampling: dict, run: Callable) -> None:
    """Both heads (fused, and with sequence ratios): the ratio of the first update is 1, and the gradient finite."""
    _, steps = run(preset, sampling=Sampling(max_new_tokens=6, **sampling), entropy_bonus=0.01)
    for step in steps:
        assert step.metrics["mismatch/max"] < 1e-4
        assert math.isfinite(step.metrics["grad_norm"])
        assert step.metrics["ratio/max"] == pytest.approx(1.0, abs=1e-4)


def test_stop_strings_end_completions_that_are_trained(run: Callable) -> None:
    _, steps = run(sampling=Sampling(max_new_tokens=12, stop=("1", "2", "a", "b")))
    taken = list(steps)
    finishes = [rollout.finish for step in taken for group in step.groups for rollout in group.rollouts]
    assert Finish.STOP in finishes
    assert all(step.metrics["mismatch/max"] < 1e-4 and step.metrics["grad_norm"] > 0 for step in taken)


@pytest.mark.parametrize("preset", ["grpo", "rloo"])
def test_gradient_checkpointing_gives_the_same_steps(preset: str, run: Callable) -> None:
    found = [[step.metrics["grad_norm"] for step in run(preset, checkpointing=on, beta=0.1)[1]] for on in (False, True)]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "autocast"])
def test_lower_precision_trains_and_keeps_close_to_its_sampler(dtype: str, run: Callable, tiny_policy: Callable) -> None:
    weights = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    policy = tiny_policy("llama", scale=2.0, dtype=weights, settings=ModelSettings(dtype=dtype))  # type: ignore[arg-type]
    before = weights_of(policy)
    policy, steps = run(policy=policy, steps=3)
    for step in steps:
        assert math.isfinite(step.metrics["grad_norm"])
        assert step.metrics["mismatch/mean"] < 0.05
    assert not torch.equal(weights_of(policy), before)


def test_more_minibatches_than_groups_keep_the_first_pass_apart(run: Callable) -> None:
    """What `current_logp` and the KL are read from is the first pass, also if there are fewer parts than were asked for."""
    _, steps = run(minibatches=8, updates_per_rollout=2, prompts_per_step=2, steps=1, optimizer=OptimizerSettings(lr=0.05))
    (step,) = steps
    for group, logps in zip(step.groups[:1], step.current_logp[:1], strict=True):
        for rollout, logp in zip(group.rollouts, logps, strict=True):
            np.testing.assert_allclose(logp, rollout.behavior_logp, atol=1e-4)
    assert step.metrics["ratio/max"] > 1.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["ppo", "reinforce_pp", "rloo"])
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_equal_rewards_of_a_policy_that_is_its_reference_give_no_gradient(
    preset: str, beta: float, dtype: torch.dtype, run: Callable, tiny_policy: Callable
) -> None:
    """The KL in the reward is the difference of two computations of one number: rounding must not become a step."""
    _, steps = run(preset, lambda tokens: 0.0, steps=1, policy=tiny_policy("llama", scale=2.0, dtype=dtype), beta=beta)
    step = next(steps)
    assert not any(advantage.any() for row in step.advantages for advantage in row)
    assert step.metrics["grad_norm"] == 0.0


@pytest.mark.parametrize("preset", ["ppo", "reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_leaves_out_what_truncation_masks(preset: str, scored_group: Callable) -> None:
    """14 of 16 completions are masked: the mean and the deviation are those of the tokens that are trained."""
    algorithm = resolve(preset, GroupSettings(group_size=16, truncated="mask"), 8)
    group = scored_group([0.0] * 14 + [1.0, 0.5], [4] * 14 + [4, 5], truncated=tuple(range(14)))
    group = replace(group, signals={"value": tuple(np.zeros(len(r)) for r in group.rollouts)})
    (advantages,) = algorithm.advantages([group])
    samples = weigh([group], [advantages], algorithm)
    assert [sample.index for sample in samples] == [14, 15]
    trained = np.concatenate([sample.advantage for sample in samples])
    ddof = options(algorithm.credit)["ddof"]
    assert trained.mean() == pytest.approx(0.0, abs=1e-9)
    assert trained.std(ddof=ddof) == pytest.approx(1.0, rel=1e-6)
    assert {float(np.sign(one[0])) for one in advantages[14:]} == {1.0, -1.0}
    targets = algorithm.returns([group])[0] if algorithm.needs.critic else []
    assert all(np.isnan(one).all() for one in targets[:14])


def test_three_steps_of_completions_that_are_all_truncated_and_masked_end_the_run(run: Callable, tiny_policy: Callable) -> None:
    policy = tiny_policy("llama", scale=2.0)
    limit = Sampling(max_new_tokens=1)
    _, steps = run("grpo", policy=policy, engine=Endless(policy, max_rows=8), sampling=limit, truncated="mask", steps=9)
    for step in (next(steps), next(steps)):
        assert (step.metrics["groups/dead"], step.metrics["tokens/trained"], step.metrics["grad_norm"]) == (1.0, 0.0, 0.0)
    with pytest.raises(RewardError, match=r"since step 1 every completion was truncated .* raise rollout.max_new_tokens"):
        next(steps)


@pytest.mark.parametrize("longest", [1, 6])
def test_a_short_run_without_a_trained_completion_ends_with_an_error(longest: int, run: Callable, tiny_policy: Callable) -> None:
    policy = tiny_policy("llama", scale=2.0)
    algorithm = resolve("grpo", GroupSettings(group_size=4, truncated="mask"), longest)
    engine = Endless(policy, max_rows=8) if longest == 1 else None
    _, steps = run(algorithm=algorithm, policy=policy, engine=engine, sampling=Sampling(max_new_tokens=longest), steps=1)
    if longest == 1:
        with pytest.raises(RewardError, match="since step 1 every completion was truncated"):
            next(steps)
    else:
        assert [step.number for step in steps] == [1]


@pytest.mark.parametrize("mode", ["keep", "mask"])
def test_a_group_that_is_masked_as_a_whole_teaches_nothing(mode: str, scored_group: Callable) -> None:
    for preset in ("dapo", "ppo"):
        algorithm = resolve(preset, GroupSettings(group_size=3, truncated=mode), 10)  # type: ignore[arg-type]
        assert algorithm.teaches(scored_group([1.0, 0.0, 1.0], truncated=(0, 1, 2))) == (mode == "keep")
        assert algorithm.teaches(scored_group([1.0, 0.0, 1.0], truncated=(0, 1)))


def broken(terms: Terms) -> torch.Tensor:
    """A surrogate whose gradient is not finite."""
    return terms.logp_M * math.inf


def test_a_gradient_that_is_not_finite_is_not_taken_and_in_the_end_an_error(run: Callable) -> None:
    algorithm = replace(resolve("grpo", GroupSettings(group_size=4), 6), surrogate=broken)
    policy, steps = run(algorithm=algorithm, steps=10, optimizer=OptimizerSettings())
    before = weights_of(policy)
    assert [next(steps).metrics["skipped_updates"] for _ in range(4)] == [1.0] * 4
    assert torch.equal(weights_of(policy), before)
    with pytest.raises(Diverged, match="not finite 5 steps in a row"):
        next(steps)


def test_weights_that_are_not_finite_are_an_error_of_the_next_rollout(run: Callable) -> None:
    policy, steps = run(steps=3)
    next(steps)
    with torch.no_grad():
        policy.model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(Diverged, match="not finite"):
        next(steps)


@pytest.mark.parametrize(("preset", "alive"), [("grpo", False), ("dr_grpo", False), ("gdpo", True)])
def test_the_credit_decides_which_group_is_dead(preset: str, alive: bool, scored_group: Callable) -> None:
    """Two rewards trade off so that their weighted sum is 1 everywhere: nothing for GRPO, something for GDPO."""
    group = scored_group([1.0, 1.0, 1.0, 1.0])
    rewards = np.array([[0.0, 1.0], [2.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    traded = replace(group, names=("a", "b"), rewards=rewards, weights=(0.5, 1.0))
    algorithm = resolve(preset, GroupSettings(group_size=4, dead_groups="drop"), 10)
    assert traded.equal_rewards
    assert algorithm.teaches(traded) == alive
    assert bool(weigh([traded], algorithm.credit([traded]), algorithm)) == alive


def test_presets_that_need_no_siblings_are_the_ones_that_say_so() -> None:
    alone = {name for name, row in ALGORITHMS.items() if not fact(row.credit, "compares_siblings")}
    assert alone == {"reinforce_pp", "reinforce", "ppo", "distill", "distill_sampled", "minillm"}
    assert all(row.beta == 0.0 for row in ALGORITHMS.values()), "validation takes a beta that is not set for 0"


# ---------------------------------------------------------------- what the updates did, token by token


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_a_step_says_the_entropy_and_the_weight_of_every_token(run: Callable, tiny_policy: Callable, preset: str) -> None:
    """With a fused loss and without one: the entropies are those that scoring says before the step, the weights the loss's."""
    before = tiny_policy("llama", scale=2.0)
    _, steps = run(preset, steps=1)
    step = next(steps)
    rollouts = [rollout for group in step.groups for rollout in group.rollouts]
    scored = score(before, [sample_of(rollout) for rollout in rollouts], max_tokens_per_microbatch=200, entropy=True)
    entropy = [values for group in step.columns["entropy"] for values in group]
    weight = [values for group in step.columns["weight"] for values in group]
    advantage = [values for group in step.advantages for values in group]
    assert any(values.size for values in entropy)
    for found, weighed, credit, expected, rollout in zip(entropy, weight, advantage, scored.entropy, rollouts, strict=True):
        assert found.size == weighed.size == (len(rollout) if credit.any() else 0)
        if found.size:
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(weighed, 1 / len(rollouts) / len(rollout))
    assert "last_logp" not in step.columns, "one pass: it would repeat current_logp"


def test_a_step_says_which_tokens_were_clipped_as_often_as_its_metrics_do(run: Callable) -> None:
    _, steps = run("grpo", steps=1, updates_per_rollout=3, optimizer=OptimizerSettings(lr=0.05, warmup_steps=0))
    step = next(steps)
    clipped = np.concatenate([values for group in step.columns["clipped"] for values in group])
    assert 0 < clipped.mean() < 1
    np.testing.assert_allclose(clipped.mean(), step.metrics["clip/low"] + step.metrics["clip/high"], rtol=1e-5)
    last = [values for group in step.columns["last_logp"] for values in group]
    first = [values for group in step.current_logp for values in group]
    assert any(not np.allclose(a, b, atol=1e-3) for a, b in zip(last, first, strict=True) if a.size)


# ---------------------------------------------------------------- an entropy bonus that adapts


def test_the_adaptive_bonus_is_the_fixed_one_of_its_coefficient(tiny_policy: Callable, scored_group: Callable) -> None:
    """A step below the target is the step with the coefficient that the rule gives; above the target it has no bonus."""
    groups = [scored_group([1.0, 0.0, 0.5], [4, 3, 5], id="0/0")]
    drawn = np.concatenate([-rollout.behavior_logp for rollout in groups[0].rollouts])
    entropy = float(drawn.mean())

    def stepped(start: float, **settings: Any) -> tuple[dict[str, torch.Tensor], Any, Optimizer]:
        policy = tiny_policy(scale=2.0)
        algorithm = resolve("grpo", GroupSettings(group_size=3, **settings), 8)
        optimizer = Optimizer(policy.model, OptimizerSettings(lr=1e-2), 5)
        optimizer.entropy_bonus = start
        samples = weigh(groups, algorithm.credit(groups), algorithm)
        found = improve(policy, algorithm, samples, optimizer, max_tokens_per_microbatch=100)
        return policy.model.state_dict(), found, optimizer

    adaptive = {"entropy_bonus": 0.3, "entropy_step": 0.1}
    for start, target, used, kept in (
        (0.0, entropy + 0.1, 0.1, 0.1),
        (0.25, entropy + 0.1, 0.3, 0.3),
        (0.25, entropy - 0.1, 0.0, 0.15),
        (0.0, entropy - 0.1, 0.0, 0.0),
    ):
        weights, found, optimizer = stepped(start, entropy_target=target, **adaptive)
        fixed, _, _ = stepped(0.0, entropy_bonus=used)
        assert optimizer.entropy_bonus == pytest.approx(kept)
        assert found.stats.entropy_bonus == pytest.approx(kept)
        for name, value in fixed.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-7)
    plain, _, _ = stepped(0.0)
    pushed, _, _ = stepped(0.0, entropy_bonus=0.3)
    assert any(not torch.equal(plain[name], pushed[name]) for name in plain), "a bonus changes the step"
