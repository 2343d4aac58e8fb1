"""Episodes in training: each branch is a segment of its own, and observations change no bit of anything."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rule_rewards import RuleRewards
from steps import score_rollouts

from groupwise.algorithms.advantages import Process
from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.losses import Correction
from groupwise.algorithms.table import ALGORITHMS
from groupwise.config.resolve import resolve
from groupwise.config.settings import CriticSettings, GroupSettings, OptimizerSettings
from groupwise.data.packing import pack, unpack
from groupwise.inspection.check import _agreement
from groupwise.inspection.closed_form import closed_form
from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.records import Branch, Episode, Finish, Prompt, Rollout, RolloutGroup, Sampling, Step, ToolCall, Turn
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.rollout_table import groups_from_bytes, groups_of, groups_to_bytes, table_of
from groupwise.training.branches import unbranched
from groupwise.training.critics import Critic
from groupwise.training.groups import SampledRollouts, with_turn_rewards
from groupwise.training.loss import Loss, with_gradient
from groupwise.training.metrics import completion_metrics, episode_metrics, measure
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer, StepStats
from groupwise.training.passes import Assessment, BatchPass, batches_of, score
from groupwise.training.recorded_loss import RecordedStep
from groupwise.training.samples import sample_of, weigh
from groupwise.training.signals import add_signals
from groupwise.training.teachers import Teacher

PLAIN = [name for name, row in ALGORITHMS.items() if not (row.needs.critic or row.needs.teacher or row.needs.steps)]
SETTINGS: dict[str, dict[str, Any]] = {"grpo": {"beta": 0.1}, "cispo": {"off_policy_delta": 0.01}}


def episode(
    rng: np.random.Generator,
    prompt: Prompt,
    index: int,
    *,
    cut: str | None = None,
    sampling: Sampling | None = None,
    stray: float = 0.0,
) -> Rollout:
    """Two to four turns with answers between them.   cut: branches at turns, `same` (behind what stands there) or `other`.
    stray: what is said of the log-probs of answers."""
    tokens, trained, turns, branches = list[int](), list[bool](), list[Turn](), list[Branch]()
    for number in range(int(rng.integers(2, 5))):
        if number and cut and rng.random() < 0.8:
            context = np.concatenate([prompt.tokens, np.array(tokens, np.int64)])
            if cut == "other":
                context = context[rng.random(context.size) < 0.6] if rng.random() < 0.5 else context[: prompt.tokens.size + 2]
                context = context if context.size else prompt.tokens[:1]
            branches.append(Branch(begin=len(tokens), context=context))
        begin, size = len(tokens), int(rng.integers(1, 5))
        tokens += rng.integers(5, 60, size=size).tolist()
        trained += [True] * size
        turns.append(Turn(begin=begin, end=len(tokens), finish=Finish.STOP, reward=float(rng.normal())))
        size = int(rng.integers(0, 4))
        tokens += rng.integers(5, 60, size=size).tolist()
        trained += [False] * size
    mask = np.array(trained)
    return Rollout(
        prompt=prompt,
        index=index,
        tokens=np.array(tokens, np.int64),
        behavior_logp=np.where(mask, -3.0 + 0.3 * rng.normal(size=mask.size), stray),
        finish=Finish.DONE,
        eos_ids=(61,),
        sampling=sampling or Sampling(temperature=0.8),
        text="",
        trained=mask,
        episode=Episode(turns=tuple(turns), branches=tuple(branches)),
    )


def groups_with(cut: str | None, *, seed: int = 0, count: int = 3, stray: float = 0.0) -> list[RolloutGroup]:
    groups = []
    for g in range(count):
        rng = np.random.default_rng([seed, g])
        prompt = Prompt(id=f"0/{g}", tokens=rng.integers(5, 60, size=1 + 3 * g), text="")
        rollouts = tuple(episode(np.random.default_rng([seed, g, i]), prompt, i, cut=cut, stray=stray) for i in range(3))
        reward = rng.normal(size=3)
        groups.append(RolloutGroup(rollouts=rollouts, names=("r",), rewards=reward[:, None], reward=reward))
    return groups


def uncut(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """The same episodes, drawn behind the prompt and what stands there."""
    return [
        replace(group, rollouts=tuple(replace(r, episode=replace(r.episode, branches=())) for r in group.rollouts))
        for group in groups
    ]


def near(policy: Policy, groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """With behaviour log-probs near the policy's own, so that no ratio is extreme."""
    found = []
    for group in groups:
        logp = score_rollouts(policy, group.rollouts, max_tokens_per_microbatch=100)
        noise = np.random.default_rng(5)
        rollouts = tuple(
            replace(r, behavior_logp=np.where(r.trained, column + 0.1 * noise.normal(size=column.size), r.behavior_logp))
            for r, column in zip(group.rollouts, logp, strict=True)
        )
        found.append(replace(group, rollouts=rollouts))
    return found


def gradient(
    policy: Policy, algorithm: Algorithm, groups: list[RolloutGroup], max_tokens_per_microbatch: int
) -> tuple[float, torch.Tensor]:
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    tokens = float(sum(np.count_nonzero(sample.weight) for sample in samples))
    policy.model.zero_grad()
    total = 0.0
    for batch in batches_of(policy, with_gradient(algorithm, samples), max_tokens_per_microbatch):
        value, _ = Loss(algorithm=algorithm, entropy_tokens=tokens)(BatchPass(policy, batch))
        value.backward()
        total += float(value.detach())
    return total, torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters() if parameter.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["sampled here", "sampled elsewhere"])
def test_trap_14_branches_give_the_gradient_of_the_uncut_episode(name: str, elsewhere: bool, tiny_policy: Callable) -> None:
    policy, other = tiny_policy(dtype=torch.float64, scale=3.0), tiny_policy(dtype=torch.float64, scale=3.0, seed=1)
    algorithm = resolve(name, GroupSettings(group_size=3, **SETTINGS.get(name, {})), 16)
    algorithm = replace(algorithm, correction=Correction()) if elsewhere else algorithm
    if algorithm.entropy_quantile:
        algorithm = replace(algorithm, entropy_quantile=0.0)
    groups = near(policy, groups_with("same"))
    assert sum(len(r.episode.branches) for group in groups for r in group.rollouts) > 8
    if algorithm.needs.reference:
        groups = add_signals(groups, algorithm, reference=other, max_tokens_per_microbatch=100)
    if elsewhere:
        groups = add_signals(groups, algorithm, scorer=policy, max_tokens_per_microbatch=100)
    loss, expected = gradient(policy, algorithm, uncut(groups), 40)
    for max_tokens_per_microbatch in (10, 60, 10_000):  # no part is computed without the others of its episode
        found, cut = gradient(policy, algorithm, groups, max_tokens_per_microbatch)
        assert found == pytest.approx(loss, rel=1e-10, abs=1e-12)
        torch.testing.assert_close(cut, expected, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("attention", ["shared", "packed"])
def test_each_branch_is_scored_behind_its_context(family: str, attention: str, tiny_policy: Callable) -> None:
    policy = replace(
        tiny_policy(family, dtype=torch.float64 if family != "gemma2" else torch.float32, scale=3.0), attention=attention
    )
    rollouts = [rollout for group in groups_with("other") for rollout in group.rollouts]
    begins = {
        part.prompt.tokens.tolist()[: len(r.prompt.tokens)] == r.prompt.tokens.tolist() for r in rollouts for part in unbranched(r)
    }
    assert begins == {True, False}  # contexts that begin with the prompt, and others
    for rollout, found in zip(rollouts, score_rollouts(policy, rollouts, max_tokens_per_microbatch=60), strict=True):
        expected = []
        for part in unbranched(rollout):
            ids = torch.from_numpy(np.concatenate([part.prompt.tokens, part.tokens]))[None]
            with plain_attention(policy.model), torch.no_grad():
                z = policy.model(input_ids=ids, use_cache=False).logits[0, part.prompt.tokens.size - 1 : -1, : policy.vocabulary]
            z = (z / rollout.sampling.temperature).log_softmax(-1)
            expected.append(z.gather(1, torch.from_numpy(part.tokens)[:, None])[:, 0].numpy())
        tolerance = 1e-10 if family != "gemma2" else 1e-4
        np.testing.assert_allclose(found, np.where(rollout.trained, np.concatenate(expected), 0.0), rtol=0, atol=tolerance)


@given(seed=st.integers(0, 1000), cut=st.sampled_from(["same", "other", None]), max_tokens_per_microbatch=st.integers(5, 200))
def test_what_is_cut_is_put_together_again(seed: int, cut: str | None, max_tokens_per_microbatch: int) -> None:
    """Through packing and back; all segments of an episode are in one micro-batch, as one sequence."""
    rng = np.random.default_rng(seed)
    rollouts = [r for group in groups_with(cut, seed=seed) for r in group.rollouts]
    samples = [sample_of(r, advantage=(column := rng.normal(size=len(r))), extra={"x": -column}) for r in rollouts]
    columns: dict[int, np.ndarray] = {}
    sequences = 0
    for batch in pack(samples, max_tokens_per_microbatch):
        assert int((batch.weight_P != 0).sum()) == batch.trained_M.numel()
        owner_S = {s: index for s, index in enumerate(batch.samples) if index >= 0}
        numbers = {(index, n) for s, index in owner_S.items() for n in batch.sequence_P[batch.segment_P == s].tolist()}
        assert len(numbers) == len(set(owner_S.values()))
        sequences += len(numbers)
        assert torch.equal(batch.advantage_P, -batch.extra_P["x"])
        columns |= dict(unpack(batch, batch.advantage_P.double(), samples))
        for index, target_n in unpack(batch, batch.target_P, samples):
            assert (target_n == samples[index].completion)[rollouts[index].trained].all()
    assert sequences == len(samples) == len(columns)
    for i, sample in enumerate(samples):
        trained = rollouts[i].trained
        assert ((sample.weight != 0) == trained).all()
        np.testing.assert_allclose(columns[i][trained], sample.advantage[trained], rtol=1e-6)


def bits(step: dict[str, float]) -> dict[str, bytes]:
    return {name: np.float64(value).tobytes() for name, value in step.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cut"), [("grpo", None), *((name, "other") for name in PLAIN)])
def test_trap_8_what_is_said_of_observations_changes_no_bit(name: str, cut: str | None, tiny_policy: Callable) -> None:
    policy = tiny_policy(scale=3.0)
    algorithm = resolve(name, GroupSettings(group_size=3, **SETTINGS.get(name, {})), 16)
    algorithm = replace(algorithm, entropy_quantile=0.0)
    told = None
    for stray in (0.0, np.nan, -1e30, 7.0):
        groups = groups_with(cut, stray=stray)
        if algorithm.needs.reference:
            groups = add_signals(groups, algorithm, reference=policy, max_tokens_per_microbatch=100)
        samples = weigh(groups, algorithm.credit(groups), algorithm)
        loss, grad = gradient(policy, algorithm, groups, 60)
        scores = score(policy, samples, max_tokens_per_microbatch=60, entropy=True)
        seen = Assessment(
            samples=samples, seen=scores.logp, entropy=scores.entropy, loss=loss, positions=[1], max_tokens_per_microbatch=60,
            stats=StepStats(grad_norm=float(grad.norm()), lr=0.1, skipped=False),
        )  # fmt: skip
        metrics = measure(groups, RecordedStep(algorithm, [seen], minibatches=1), 3, seconds={"a": 1.0}, version=0)
        assert all(np.isfinite(value) for value in metrics.values()), metrics
        logp = {
            (r.prompt.id, r.index): c
            for g in groups
            for r, c in zip(g.rollouts, score_rollouts(policy, g.rollouts, max_tokens_per_microbatch=60), strict=True)
        }
        closed = closed_form(algorithm, samples, logp, logp if algorithm.needs.entropy else None)
        for group in groups:
            for r in group.rollouts:
                assert not closed.gradient.get((r.prompt.id, r.index), np.zeros(len(r)))[~r.trained].any()
        now = (loss, grad.numpy().tobytes(), bits(metrics), closed.loss)
        assert told is None or now == told, stray
        told = now


def test_trap_6_lengths_are_those_that_the_policy_wrote() -> None:
    groups = groups_with("other")
    rollouts = [r for group in groups for r in group.rollouts]
    found = completion_metrics(groups)
    assert found["completions/mean_length"] == np.mean([r.trained.sum() for r in rollouts])
    assert found["completions/max_length"] == max(r.trained.sum() for r in rollouts)
    episodes = episode_metrics(groups)
    assert episodes["episodes/answer_tokens"] == np.mean([(~r.trained).sum() for r in rollouts])
    assert episodes["episodes/turns"] == np.mean([len(r.episode.turns) for r in rollouts])
    assert episodes["episodes/splits"] == np.mean([len(r.episode.branches) for r in rollouts])
    calls = tuple(
        ToolCall(name="f", arguments="{}", result="", seconds=0.1, failure=kind) for kind in ("", "timeout", "unknown", "")
    )
    first = rollouts[0]
    side = replace(first.episode.turns[0], calls=calls, side=True, wishes=("web_search",))
    turns = (side, *first.episode.turns[1:])
    one = replace(first, finish=Finish.DEADLINE, episode=replace(first.episode, turns=turns))
    group = replace(groups[0], rollouts=(one, *groups[0].rollouts[1:]))
    found = episode_metrics([group])
    assert found["episodes/tool_calls"] == pytest.approx(4 / 3)
    assert found["episodes/side_calls"] == pytest.approx(1 / 3)
    assert found["episodes/wishes/web_search"] == pytest.approx(1 / 3)
    assert found["episodes/tool_failures"] == 0.5
    assert found["episodes/tool_failures/timeout"] == found["episodes/tool_failures/unknown"] == 0.25
    assert found["episodes/truncated"] == pytest.approx(1 / 3)
    plain = [replace(group, rollouts=tuple(replace(r, episode=None) for r in group.rollouts)) for group in groups]
    assert episode_metrics(plain) == {}


def same_episode(one: Rollout, other: Rollout) -> None:
    assert one.episode is not None and other.episode is not None
    assert one.episode.turns == other.episode.turns
    assert one.episode.messages == other.episode.messages
    assert (one.episode.reward, one.episode.environment) == (other.episode.reward, other.episode.environment)
    assert (one.episode.opening, one.episode.prompt_text) == (other.episode.opening, other.episode.prompt_text)
    told = [[(branch.begin, branch.context.dtype, branch.context.tolist()) for branch in r.episode.branches] for r in (one, other)]
    assert told[0] == told[1]


TEXT = st.text(max_size=8)


@pytest.mark.slow
@given(
    result=TEXT,
    arguments=TEXT,
    reward=st.none() | st.floats(),
    seconds=st.floats(0, 1e9),
    failure=st.sampled_from(["", "timeout"]),
    finish=st.sampled_from(Finish),
    seed=st.integers(0, 99),
)
def test_tables_keep_episodes(
    result: str, arguments: str, reward: float | None, seconds: float, failure: str, finish: Finish, seed: int
) -> None:
    (group,) = groups_with("other", seed=seed, count=1)
    call = ToolCall(name="f", arguments=arguments, result=result, seconds=seconds, failure=failure)
    first = group.rollouts[0]
    turn = replace(first.episode.turns[0], calls=(call, call), answer=result, seconds=seconds, truncated=True, finish=finish)
    messages = ({"role": "assistant", "content": arguments}, {"role": "tool", "content": [{"type": "text", "text": result}]})
    if reward is not None and np.isnan(reward):
        reward = None
    told = replace(first.episode, turns=(turn, *first.episode.turns[1:]), messages=messages, reward=reward, environment="maze")
    told = replace(told, opening=result, prompt_text=f"Go.{result}")
    none = replace(group.rollouts[2], episode=None)
    group = replace(group, rollouts=(replace(first, episode=told), group.rollouts[1], none))
    (back,) = groups_from_bytes(groups_to_bytes([group]))
    assert back.rollouts[2].episode is None
    for ours, theirs in zip(back.rollouts[:2], group.rollouts[:2], strict=True):
        same_episode(ours, theirs)


def test_tables_of_before_have_no_episodes(tmp_path: Any) -> None:
    plain = [replace(group, rollouts=tuple(replace(r, episode=None) for r in group.rollouts)) for group in groups_with(None)]
    table = table_of(Step(number=1, metrics={}, groups=plain)).drop_columns(["episode"])
    pq.write_table(table, tmp_path / "old.parquet")
    groups, _, _ = groups_of(pq.read_table(tmp_path / "old.parquet"))
    assert [r.tokens.tolist() for g in groups for r in g.rollouts] == [r.tokens.tolist() for g in plain for r in g.rollouts]
    assert all(r.episode is None for g in groups for r in g.rollouts)


def test_rewards_of_turns_stand_at_their_last_tokens() -> None:
    (group,) = groups_with(None, count=1)
    found = with_turn_rewards(group).signals["process"]
    for rollout, column in zip(group.rollouts, found, strict=True):
        ends = [turn.end - 1 for turn in rollout.episode.turns]
        assert np.flatnonzero(~np.isnan(column)).tolist() == ends
        assert column[ends].tolist() == [turn.reward for turn in rollout.episode.turns]
    steps = tuple(np.where(np.arange(len(r)) == 0, 10.0, np.nan) for r in group.rollouts)
    both = with_turn_rewards(replace(group, signals={"process": steps})).signals["process"]
    for rollout, one, other in zip(group.rollouts, both, found, strict=True):
        assert one[0] == pytest.approx(10.0 + np.nan_to_num(other[0]))
        assert np.array_equal(one[1:], other[1:], equal_nan=True)
        assert len(rollout) == one.size
    unrewarded = [
        replace(r, episode=replace(r.episode, turns=tuple(replace(t, reward=None) for t in r.episode.turns)))
        for r in group.rollouts
    ]
    (advantages,) = Process()([with_turn_rewards(replace(group, rollouts=tuple(unrewarded)))])
    assert not any(column.any() for column in advantages)
    plain = replace(group, rollouts=tuple(replace(r, episode=None) for r in group.rollouts))
    assert with_turn_rewards(plain) is plain


def remainder(rollout: Rollout) -> float:
    """What nothing but chance decides."""
    return float(rollout.tokens.sum() % 3)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [*ALGORITHMS, "process"])
def test_every_algorithm_trains_on_episodes(preset: str, tiny_policy: Callable, scripted_environment: Callable) -> None:
    """One column for each completion, whatever a completion became on the way; sampled = scored."""
    policy = tiny_policy("llama", dtype=torch.float64, scale=2.0)
    settings = GroupSettings(prompts_per_step=2, group_size=4, updates_per_rollout=2, minibatches=2)
    algorithm = resolve("grpo" if preset == "process" else preset, settings, 40)
    algorithm = replace(algorithm, credit=Process()) if preset == "process" else algorithm
    rng = np.random.default_rng(0)
    prompts = (Prompt(id=f"0/{i}", tokens=rng.integers(6, 50, size=3 + i % 3), text="") for i in range(100))
    environment = scripted_environment(cut=0.4, cut_to="other", delays=0)
    steps = train_online(
        policy,
        algorithm,
        SampledRollouts(
            algorithm=algorithm,
            engine=NativeEngine(policy, max_rows=5, environment=environment),
            rewards=RuleRewards(remainder),
            draw=lambda k: [next(prompts) for _ in range(k)],
            sampling=Sampling(max_new_tokens=40),
            steps=3,  # of which two are taken: a shorter run ends if all of it is cut off
            group=settings,
        ),
        Optimizer(policy.model, OptimizerSettings(lr=1e-3), 100),
        group=settings,
        max_tokens_per_microbatch=100,
        reference=frozen_copy(policy) if algorithm.needs.reference else None,
        critic=Critic.on(policy, CriticSettings(lr=1e-3), OptimizerSettings(), 100) if algorithm.needs.critic else None,
        teacher=Teacher(policy=tiny_policy("llama", dtype=torch.float64, scale=1.7)) if algorithm.needs.teacher else None,
    )
    splits = 0
    for step in itertools.islice(steps, 2):
        rollouts = [r for group in step.groups for r in group.rollouts]
        splits += sum(len(unbranched(r)) > 1 for r in rollouts)
        assert step.metrics["episodes/turns"] > 1
        assert all(("process" in group.signals) == (preset == "process") for group in step.groups)
        assert step.metrics["tokens/sampled"] == sum(r.trained.sum() for r in rollouts)
        assert all(np.isfinite(value) for value in step.metrics.values()), step.metrics
        for name, column in {"advantages": step.advantages, "logp": step.current_logp, **step.columns}.items():
            for group, values in zip(step.groups, column, strict=True):
                for rollout, numbers in zip(group.rollouts, values, strict=True):
                    assert numbers.shape in ((len(rollout),), (0,)), name
        firsts = step.current_logp[: len(step.groups) // 2]  # later minibatches see a policy that has moved
        for group, values in zip(step.groups, firsts, strict=False):
            for rollout, numbers in zip(group.rollouts, values, strict=True):
                if numbers.size:
                    gap = np.abs(numbers - rollout.behavior_logp)[rollout.trained]
                    assert gap.max(initial=0.0) < 1e-10
        for ours, theirs in zip(groups_from_bytes(groups_to_bytes(step.groups)), step.groups, strict=True):
            for one, other in zip(ours.rollouts, theirs.rollouts, strict=True):
                same_episode(one, other)
    assert splits > 3


def test_a_difference_is_found_in_episodes_too(tiny_policy: Callable, scripted_environment: Callable) -> None:
    policy = tiny_policy("llama", scale=2.0)
    environment = scripted_environment(cut=0.4, cut_to="other")
    prompts = [Prompt(id=str(i), tokens=np.arange(6, 10 + i), text="") for i in range(3)]
    engine = NativeEngine(policy, max_rows=5, environment=environment)
    sampling = Sampling(max_new_tokens=40, temperature=0.5)
    rollouts = [r for group in engine.generate(prompts, group_size=3, sampling=sampling, seed=1) for r in group]
    wrong = score_rollouts(
        policy, [replace(r, sampling=replace(sampling, temperature=1.0)) for r in rollouts], max_tokens_per_microbatch=200
    )
    right = score_rollouts(policy, rollouts, max_tokens_per_microbatch=200)
    assert _agreement(policy, rollouts, right).good
    found = _agreement(policy, rollouts, wrong)
    assert found.good is False
    engine_gap, scorer_gap = (float(gap) for gap in re.findall(r"by up to (\S+?)(?: nats,|$)", found.text))
    assert engine_gap < 1e-5 < 0.1 < scorer_gap
