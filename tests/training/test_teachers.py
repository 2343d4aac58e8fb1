"""Teachers: credits and whole steps against transcriptions of their papers, hints, and runs."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from groupwise.algorithms import advantages
from groupwise.algorithms.table import ALGORITHMS
from groupwise.config.recipes import load_recipe
from groupwise.config.resolve import resolve
from groupwise.config.settings import GroupSettings
from groupwise.data.packing import pack
from groupwise.errors import ConfigError
from groupwise.models.attention import plain_attention
from groupwise.models.loading import make_policy
from groupwise.models.passes import BatchPass
from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.records import Prompt, RolloutGroup, Sample, Sampling
from groupwise.rewards.compose import unjudged
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.job import make_job
from groupwise.runs.prepared import plan_of
from groupwise.runs.run import train
from groupwise.training.loss import Loss
from groupwise.training.samples import sample_of, weigh
from groupwise.training.signals import add_signals
from groupwise.training.teachers import Teacher

F64 = torch.float64


def log_probs(policy: Policy, prompt: np.ndarray, sample: Sample) -> torch.Tensor:
    """(n, V) of every completion token's position after a prompt, by the model's own forward, one sequence."""
    ids = torch.from_numpy(np.concatenate([prompt, sample.completion]))
    with plain_attention(policy.model) as model:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, prompt.size - 1 : -1, : policy.vocabulary]
    return (logits / sample.temperature).log_softmax(-1)


def gradients(policy: Policy, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(policy.model.parameters()), retain_graph=True))


def assert_same(policy: Policy, found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(gradients(policy, found), gradients(policy, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def whole_loss(policy: Policy, algorithm: object, samples: list[Sample], teacher: Teacher) -> torch.Tensor:
    parts = [
        Loss(algorithm=algorithm, entropy_tokens=1.0, teacher=teacher, samples=samples)(BatchPass(policy, batch))[0]  # type: ignore[arg-type]
        for batch in pack(samples, 50, dtype=F64)
    ]
    return torch.stack(parts).sum()


@pytest.fixture
def groups(scored_group: Callable) -> list[RolloutGroup]:
    made = [
        scored_group([None] * 4, [1, 12, 5, 3], id="0/0", seed=1),
        scored_group([None] * 4, [7, 0, 2, 9], id="0/1", seed=2),
        scored_group([None] * 2, [3, 10], id="0/4", seed=5, prompt=1),
    ]
    made[0].rollouts[1].trained[3:6] = False
    return made


# ---- credits


def test_the_long_part_is_the_paper_s_and_has_none_of_trl_s_defects(groups: list[RolloutGroup]) -> None:
    """MiniLLM, eq. 4 and 6: `R_{t+1} = 1 / (T - t - 1) sum_{s > t} log(p / q)_s`, and its discounted sum where not normalised.

    TRL 1.14.2 leaves gamma^-t out where it does not normalise, lets gradients through the rewards, and counts padding: here the
    sum starts at power 0 behind every token, rewards are numbers, and there is no padding to count.
    """
    rng = np.random.default_rng(0)
    signals = {"teacher_logp": tuple(rng.normal(size=len(r)) for r in groups[0].rollouts)}
    group = replace(groups[0], signals=signals)
    for gamma, normalize in ((1.0, True), (0.9, True), (0.9, False), (1.0, False)):
        (found,) = advantages.ReverseKl(gamma=gamma, own=False, normalize=normalize)([group])
        for rollout, teacher, advantage in zip(group.rollouts, signals["teacher_logp"], found, strict=True):
            places = [t for t in range(len(rollout)) if rollout.trained[t]]
            ratio = [teacher[t] - rollout.behavior_logp[t] for t in places]
            expected = np.zeros(len(rollout))
            for k, t in enumerate(places):
                later = ratio[k + 1 :]
                powers = [gamma**j for j in range(len(later))]
                total = sum(power * r for power, r in zip(powers, later, strict=True))
                expected[t] = total / sum(powers) if normalize and later else total
            np.testing.assert_allclose(advantage, expected, rtol=1e-12, atol=1e-12)
    (whole,) = advantages.ReverseKl()([group])
    assert whole[2][0] == pytest.approx(sum(signals["teacher_logp"][2] - group.rollouts[2].behavior_logp))
    (own,) = advantages.ReverseKl(gamma=0.0)([group])
    np.testing.assert_allclose(own[2], signals["teacher_logp"][2] - group.rollouts[2].behavior_logp)
    scored = replace(group, signals={**signals, "scored_logp": tuple(0 * column for column in signals["teacher_logp"])})
    np.testing.assert_allclose(advantages.ReverseKl(gamma=0.0)([scored])[0][2], signals["teacher_logp"][2])


# ---- steps


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_distillation_is_the_mean_divergence_of_trained_tokens(
    beta: float, tiny_policy: Callable, groups: list[RolloutGroup]
) -> None:
    """Value and gradient against whole matrices, one sequence at a time; two families of different width."""
    policy, other = tiny_policy(dtype=F64, scale=2.0), tiny_policy("qwen3", dtype=F64, scale=2.0, hidden=48, seed=3)
    algorithm = resolve("distill", GroupSettings(group_size=4, divergence={"name": "jsd", "beta": beta}), 12)
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    expected, tokens = torch.zeros((), dtype=F64), sum(int(r.trained.sum()) for group in groups for r in group.rollouts)
    for sample in samples:
        log_q, log_p = (log_probs(one, sample.prompt, sample) for one in (policy, other))
        q, p = log_q.exp(), log_p.detach().exp()
        if beta == 0.0:
            divergence = (p * (log_p.detach() - log_q)).sum(-1)
        elif beta == 1.0:
            divergence = (q * (log_q - log_p.detach())).sum(-1)
        else:
            m = (1 - beta) * q + beta * p
            divergence = (beta * p * (log_p.detach() - m.log()) + (1 - beta) * q * (log_q - m.log())).sum(-1)
        expected = expected + divergence[torch.from_numpy(sample.weight != 0)].sum() / tokens
    assert_same(policy, whole_loss(policy, algorithm, samples, Teacher(policy=other)), expected)


def test_minillm_is_the_paper_s_gradient(tiny_policy: Callable, groups: list[RolloutGroup]) -> None:
    """`w_t [grad KL(q_t || p_t) - R_{t+1} grad log q]` with w = q / q_old, constant (eq. 6), where nothing is clipped."""
    policy, other = tiny_policy(dtype=F64, scale=2.0), tiny_policy(dtype=F64, scale=2.0, seed=3)
    settings = GroupSettings(group_size=4, surrogate={"name": "clipped", "low": 0.999999, "high": 1e9})
    algorithm, teacher = resolve("minillm", settings, 12), Teacher(policy=other)
    groups = add_signals(groups, algorithm, scorer=policy, teacher=teacher, max_tokens_per_microbatch=100)
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    tokens = sum(int(r.trained.sum()) for group in groups for r in group.rollouts)
    loss = torch.zeros((), dtype=F64)
    for sample in samples:
        log_q, log_p = (log_probs(one, sample.prompt, sample) for one in (policy, other))
        chosen = torch.from_numpy(sample.completion)[:, None]
        mine, theirs = (log.gather(1, chosen)[:, 0] for log in (log_q, log_p.detach()))
        places = np.flatnonzero(sample.weight)
        reward = (theirs - mine).detach()[torch.from_numpy(places)]
        w = (mine.detach() - torch.from_numpy(sample.behavior_logp)).exp()
        single = (log_q.exp() * (log_q - log_p.detach())).sum(-1)
        for k, t in enumerate(places):
            later = reward[k + 1 :]
            long = float(later.mean()) if len(later) else 0.0
            loss = loss + w[t] * (single[t] - long * mine[t]) / tokens
    found = whole_loss(policy, algorithm, samples, teacher)
    for ours, theirs_ in zip(gradients(policy, found), gradients(policy, loss), strict=True):
        torch.testing.assert_close(ours, theirs_, rtol=1e-8, atol=1e-10)


def test_a_policy_that_is_its_teacher_stays_as_it_is(tiny_policy: Callable) -> None:
    policy = tiny_policy(dtype=F64, scale=2.0)
    prompts = [Prompt(id=f"0/{i}", tokens=np.arange(6, 9 + i), text="") for i in range(4)]
    drawn = NativeEngine(policy, max_rows=16).generate(prompts, group_size=3, sampling=Sampling(max_new_tokens=8), seed=0)
    groups = [unjudged(rollouts) for rollouts in drawn]
    teacher = Teacher(policy=frozen_copy(policy))
    for name in ("distill", "distill_sampled", "minillm"):
        algorithm = resolve(name, GroupSettings(group_size=3), 8)
        scored = add_signals(groups, algorithm, scorer=policy, teacher=teacher, max_tokens_per_microbatch=200)
        samples = weigh(scored, algorithm.credit(scored), algorithm)
        found = whole_loss(policy, algorithm, samples, teacher)
        assert abs(float(found.detach())) < 1e-10, name
        assert max(float(gradient.abs().max()) for gradient in gradients(policy, found)) < 1e-10, name


def test_a_hint_is_read_by_the_teacher_alone(tiny_policy: Callable, groups: list[RolloutGroup]) -> None:
    """The teacher's distributions are those after hint and prompt, put into the order of the policy's rows."""
    policy, other = tiny_policy(dtype=F64, scale=2.0), tiny_policy(dtype=F64, scale=2.0, seed=3)
    hints = {"0/0": [7, 8, 9], "0/1": [11], "0/4": [12, 13, 14, 15]}
    teacher = Teacher(policy=other, hint=lambda prompt: np.array(hints[prompt.id])).with_hints(groups)
    algorithm = resolve("distill", GroupSettings(group_size=4), 12)
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    expected = torch.zeros((), dtype=F64)
    for sample in samples:
        log_q = log_probs(policy, sample.prompt, sample)
        log_p = log_probs(other, np.concatenate([hints[sample.group], sample.prompt]), sample).detach()
        expected = expected + (torch.from_numpy(sample.weight) * (log_q.exp() * (log_q - log_p)).sum(-1)).sum()
    assert_same(policy, whole_loss(policy, algorithm, samples, teacher), expected)
    (first, *_) = add_signals(groups, ALGORITHMS["distill_sampled"], teacher=teacher, max_tokens_per_microbatch=100)
    own = sample_of(groups[0].rollouts[2])
    by_hand = log_probs(other, np.concatenate([hints["0/0"], own.prompt]), own).detach().numpy()
    np.testing.assert_allclose(first.signals["teacher_logp"][2], by_hand[np.arange(5), own.completion], atol=1e-10)
    with pytest.raises(ConfigError, match=r"teacher\.hint: with it row 0 \(epoch 0\) and its longest completion have 117 tokens"):
        Teacher(policy=other, hint=lambda prompt: np.arange(100)).with_hints(groups)


def test_a_teacher_has_the_frequencies_of_each_length(tiny_policy: Callable, groups: list[RolloutGroup]) -> None:
    """Its rotary embeddings depend on the length and the policy's do not: prompts that the policy shares, it may not."""
    policy = tiny_policy(dtype=F64, scale=2.0)
    model = tiny_policy(dtype=F64, scale=3.0, seed=3).model
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config.max_position_embeddings = 12
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    other = make_policy(model, policy.tokenizer)
    assert other.switches
    assert not policy.switches
    algorithm = resolve("distill", GroupSettings(group_size=4), 12)
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    for teacher in (Teacher(policy=other), Teacher(policy=other, hint=lambda prompt: np.array([7, 8])).with_hints(groups)):
        expected = torch.zeros((), dtype=F64)
        for sample, read in zip(samples, teacher.read(samples), strict=True):
            log_q = log_probs(policy, sample.prompt, sample)
            ids = torch.from_numpy(np.concatenate([read.prompt, read.completion[:-1]]))  # the last token is predicted alone
            with plain_attention(other.model) as plain, torch.no_grad():
                logits = plain(input_ids=ids[None], use_cache=False).logits[0, read.prompt.size - 1 :, : other.vocabulary]
            log_p = (logits / sample.temperature).log_softmax(-1)
            expected = expected + (torch.from_numpy(sample.weight) * (log_q.exp() * (log_q - log_p)).sum(-1)).sum()
        torch.testing.assert_close(whole_loss(policy, algorithm, samples, teacher), expected, rtol=1e-9, atol=1e-11)


# ---- runs


TREE = {
    "objective": "distill",
    "steps": 4,
    "rewards": [],
    "group": {"prompts_per_step": 3, "group_size": 2, "updates_per_rollout": 2},
}


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory, write_recipe: Callable) -> str:
    """A trained model of another size."""
    folder = tmp_path_factory.mktemp("larger")
    model = {"scratch": {"hidden": 48, "layers": 2, "heads": 4, "context": 128, "tokenizer": "arithmetic"}}
    list(train(load_recipe(write_recipe(folder, "larger", steps=1, model=model, rewards=[{"function": "accuracy"}]))))
    return str(folder / "runs" / "larger" / "final")


@pytest.mark.slow
def test_a_teacher_with_other_tokens_is_refused_by_name(tmp_path: Path, write_recipe: Callable) -> None:
    model = {"scratch": {"hidden": 32, "context": 96, "tokenizer": "bytes"}}
    list(train(load_recipe(write_recipe(tmp_path, "bytes", steps=1, model=model, rewards=[{"function": "accuracy"}]))))
    path = write_recipe(tmp_path, "run", **(TREE | {"teacher": {"path": str(tmp_path / "runs" / "bytes" / "final")}}))
    with pytest.raises(
        ConfigError, match=r"teacher\.path: .* has another vocabulary .* is \d+ to the policy and (\d+|unknown) to it"
    ):
        list(train(load_recipe(path)))


@pytest.mark.slow
def test_the_plan_says_whose_computation_is_proven(tmp_path: Path, write_recipe: Callable, larger: str) -> None:
    job = make_job(load_recipe(write_recipe(tmp_path, "run", **(TREE | {"teacher": {"path": larger}}))))
    job.close()
    proven = [text.partition(":")[0] for label, text in job.plan if label == "proven"]
    assert proven == ["policy LlamaForCausalLM", "teacher LlamaForCausalLM"]


@pytest.mark.slow
def test_a_teacher_with_padding_rows_is_taken(tmp_path: Path, write_recipe: Callable, larger: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(larger)
    model.resize_token_embeddings(model.config.vocab_size + 7)
    model.save_pretrained(tmp_path / "padded")
    AutoTokenizer.from_pretrained(larger).save_pretrained(tmp_path / "padded")
    found = [
        next(iter(list(train(load_recipe(write_recipe(tmp_path, name, **(TREE | {"teacher": {"path": path}}))))))).metrics["loss"]
        for name, path in (("plain", larger), ("rows", str(tmp_path / "padded")))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_hint_that_does_not_fit_the_rows_names_their_columns(tmp_path: Path, write_recipe: Callable) -> None:
    path = write_recipe(tmp_path, "run", **(TREE | {"teacher": {"hint": "{solution}"}}))
    with pytest.raises(ConfigError, match=r"teacher\.hint: '\{solution\}' does not fit the rows, whose columns are .*answer"):
        list(train(load_recipe(path)))


@pytest.mark.slow
def test_rows_of_another_task_get_no_hint_and_are_counted(tmp_path: Path, write_recipe: Callable) -> None:
    """Where a row lacks the column, or holds nothing there, the teacher reads the prompt alone: the policy itself, as it was."""
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "2+2=", "tests": "4"}, {"prompt": "3+1=", "answer": None}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"teacher": {"hint": "{answer} "}, "data": {"path": str(data)}, "steps": 1, "save": {"rollouts_every": 1}}
    path = write_recipe(tmp_path, "run", **(TREE | changes))
    tree = yaml.safe_load(path.read_text()) | {"data": {"path": str(data)}}
    path.write_text(yaml.safe_dump(tree))
    recipe = load_recipe(path)
    assert ("warning", "2 of 3 rows (first: 1) lack what teacher.hint reads: no hint there") in plan_of(recipe)
    (step,) = train(recipe)
    assert math.isfinite(step.metrics["loss"])


def test_any_row_can_take_a_divergence_beside_its_rewards(tiny_policy: Callable, scored_group: Callable) -> None:
    """The policy's loss and the teacher's, added up."""
    policy, other = tiny_policy(dtype=F64, scale=2.0), tiny_policy(dtype=F64, scale=2.0, seed=3)
    groups = [scored_group([1.0, 0.0, 0.5], [4, 6, 3])]
    both = resolve("grpo", GroupSettings(group_size=3, divergence={"name": "jsd", "beta": 0.5}), 8)
    plain = resolve("grpo", GroupSettings(group_size=3), 8)
    samples = weigh(groups, both.credit(groups), both)
    teacher = Teacher(policy=other)
    alone = replace(both, surrogate=resolve("distill", GroupSettings(group_size=3), 8).surrogate)
    parts = [whole_loss(policy, row, samples, teacher) for row in (both, plain, alone)]
    assert_same(policy, parts[0], parts[1] + parts[2])
