"""Teachers: credits and whole steps against transcriptions of their papers, sampling with a teacher's help, hints, and runs."""

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
from safetensors.torch import load_file
from steps import improve

from groupwise.algorithms import advantages
from groupwise.algorithms.table import ALGORITHMS
from groupwise.config.recipes import load_recipe
from groupwise.config.resolve import resolve
from groupwise.config.settings import CriticSettings, GroupSettings, OptimizerSettings
from groupwise.data.packing import pack
from groupwise.errors import ConfigError, EngineError
from groupwise.models.attention import plain_attention
from groupwise.models.loading import make_policy
from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.records import Demonstration, Prompt, RolloutGroup, Sample, Sampling
from groupwise.rewards.compose import unjudged
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.teacher_mixed import MixedEngine
from groupwise.runs.job import make_job
from groupwise.runs.prepared import plan_of
from groupwise.runs.run import train
from groupwise.training.critics import Critic
from groupwise.training.loss import Loss
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import BatchPass, score
from groupwise.training.samples import sample_of, weigh
from groupwise.training.signals import add_signals
from groupwise.training.teachers import Demonstrations, Teacher, with_demonstrations

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
    """`w_t [grad KL(q_t || p_t) - R_{t+1} grad log q]` with w = q / mixture, constant (eq. 6), where nothing is clipped."""
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


def test_demonstrations_weigh_what_they_are_said_to(tiny_policy: Callable, groups: list[RolloutGroup]) -> None:
    policy, other = tiny_policy(dtype=F64, scale=2.0), tiny_policy(dtype=F64, scale=2.0, seed=3)
    rows = [Demonstration(id=str(i), prompt=np.array([5, 6 + i]), completion=np.arange(7, 10 + i)) for i in range(5)]
    shown = Demonstrations(rows=rows, count=3, lm=0.5, divergence=0.25)
    drawn = [shown.of(update) for update in range(5)]
    lengths = [sample.completion.size for samples in drawn for sample in samples]
    assert all(sorted(lengths[i : i + 5]) == [3, 4, 5, 6, 7] for i in (0, 5, 10)), "each row once in a pass"
    assert [s.completion.size for s in shown.of(3)] == lengths[9:12], "by the number of the step alone"
    algorithm = resolve("distill", GroupSettings(group_size=4), 12)
    own = weigh(groups, algorithm.credit(groups), algorithm)
    samples = with_demonstrations(algorithm, own, drawn[0])
    expected = torch.zeros((), dtype=F64)
    tokens = sum(sample.completion.size for sample in drawn[0])
    for sample in samples:
        log_q, log_p = log_probs(policy, sample.prompt, sample), log_probs(other, sample.prompt, sample).detach()
        divergence = (log_q.exp() * (log_q - log_p)).sum(-1)
        if sample.index >= 0:
            expected = expected + (torch.from_numpy(sample.weight) * divergence).sum()
        else:
            logp = log_q.gather(1, torch.from_numpy(sample.completion)[:, None]).sum()
            expected = expected + (0.25 * divergence.sum() - 0.5 * logp) / tokens
    assert_same(policy, whole_loss(policy, algorithm, samples, Teacher(policy=other)), expected)
    teacher, optimizer = Teacher(policy=other, demonstrations=shown), Optimizer(policy.model, OptimizerSettings(lr=1e-3), 2)
    found = improve(policy, algorithm, own, optimizer, max_tokens_per_microbatch=100, teacher=teacher)
    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-10)
    assert sum(sample.index < 0 for sample in found.samples) == 3


def shown_alone(policy: Policy, teacher: Policy, samples: list[Sample], lm: float, divergence: float) -> float:
    """What demonstrations add to a loss, one sequence at a time."""
    tokens, total = sum(sample.completion.size for sample in samples), 0.0
    for sample in samples:
        log_q, log_p = (log_probs(one, sample.prompt, sample).detach() for one in (policy, teacher))
        chosen = log_q.gather(1, torch.from_numpy(sample.completion)[:, None])
        total += float(divergence * (log_q.exp() * (log_q - log_p)).sum() - lm * chosen.sum())
    return total / tokens


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("minillm", {}),  # its importance weights are of what was drawn
        ("distill_sampled", {}),  # no term of it reads the teacher's distributions
        ("grpo", {"divergence": {"name": "jsd"}, "entropy_bonus": 0.05}),
        ("grpo", {"divergence": {"name": "jsd"}, "entropy_bonus": 0.05, "entropy_quantile": 0.6}),
    ],
)
def test_no_part_of_an_algorithm_is_about_demonstrations(
    name: str, changes: dict, tiny_policy: Callable, scored_group: Callable
) -> None:
    policy, other = tiny_policy(dtype=F64, scale=2.0), tiny_policy(dtype=F64, scale=2.0, seed=3)
    groups = [scored_group([1.0, 0.0, 0.5, 0.2], [4, 6, 3, 8])]
    algorithm, plain = resolve(name, GroupSettings(group_size=4, **changes), 12), Teacher(policy=other)
    groups = add_signals(groups, algorithm, scorer=policy, teacher=plain, max_tokens_per_microbatch=100)
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    rows = [Demonstration(id=str(i), prompt=np.array([5, 6 + i]), completion=np.arange(7, 17 + i)) for i in range(5)]
    shown = Demonstrations(rows=rows, count=4, lm=0.5, divergence=0.25)
    losses = []
    for teacher, some in (
        (plain, samples),
        (replace(plain, demonstrations=shown), samples),
        (replace(plain, demonstrations=shown), []),
    ):
        own = replace(policy, model=copy.deepcopy(policy.model))
        optimizer = Optimizer(own.model, OptimizerSettings(lr=1e-3), 2)
        losses.append(improve(own, algorithm, some, optimizer, max_tokens_per_microbatch=100, teacher=teacher).loss)
    added = shown_alone(policy, other, shown.of(0), 0.5, 0.0 if algorithm.divergence is None else 0.25)
    assert losses[1] - losses[0] == pytest.approx(added, rel=1e-9)
    assert losses[2] == pytest.approx(added, rel=1e-9), "nothing else is left of the step"


def test_a_critic_is_not_asked_about_demonstrations(tiny_policy: Callable, scored_group: Callable) -> None:
    policy, other = tiny_policy(dtype=F64, scale=2.0), tiny_policy(dtype=F64, scale=2.0, seed=3)
    algorithm = resolve("ppo", GroupSettings(group_size=3, divergence={"name": "jsd"}), 12)
    critic = Critic.on(policy, CriticSettings(coefficient=0.5), OptimizerSettings(), 4)
    torch.nn.init.constant_(critic.head.bias, 0.7)
    groups = add_signals([scored_group([1.0, 0.0, 0.5], [4, 6, 3])], algorithm, critic=critic, max_tokens_per_microbatch=100)
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    rows = [Demonstration(id="0", prompt=np.array([5, 6]), completion=np.arange(7, 17))]
    shown = Demonstrations(rows=rows, count=1, lm=0.5, divergence=0.25).of(0)
    whole, alone = (
        torch.stack(
            [
                Loss(algorithm=algorithm, critic=critic, teacher=Teacher(policy=other), samples=some)(BatchPass(policy, batch))[0]
                for batch in pack(some, 1000, dtype=F64)
            ]
        ).sum()
        for some in (with_demonstrations(algorithm, samples, shown), samples)
    )
    assert float((whole - alone).detach()) == pytest.approx(shown_alone(policy, other, shown, 0.5, 0.25), rel=1e-9)


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


# ---- sampling with a teacher's help


def mixture(policy: Policy, teacher: Policy, mix: float, prompt: np.ndarray, sample: Sample) -> np.ndarray:
    log_q, log_p = (log_probs(one, prompt, sample).detach() for one in (policy, teacher))
    return torch.logaddexp(log_q + math.log(1 - mix), log_p + math.log(mix)).exp().numpy()


def test_completions_are_drawn_from_the_mixture_and_say_so(tiny_policy: Callable) -> None:
    policy, other = tiny_policy(dtype=F64, scale=2.0), tiny_policy("gpt2", dtype=F64, scale=3.0, seed=3)
    engine = MixedEngine(policy, other, 0.3, max_rows=7)
    prompts = [Prompt(id=f"0/{i}", tokens=np.arange(6, 9 + 3 * i), text="") for i in range(3)]
    sampling = Sampling(max_new_tokens=7, temperature=0.8)
    engine.set_version(5)
    groups = list(engine.generate(prompts, group_size=4, sampling=sampling, seed=1))
    assert [group[0].prompt.id for group in groups] == ["0/0", "0/1", "0/2"]
    for rollout in (rollout for group in groups for rollout in group):
        sample = sample_of(rollout)
        expected = mixture(policy, other, 0.3, sample.prompt, sample)[np.arange(len(rollout)), sample.completion]
        np.testing.assert_allclose(rollout.behavior_logp, np.log(expected), atol=1e-5)  # generate's logits are float32
        assert set(rollout.version) == {5}
    alone = MixedEngine(policy, other, 0.3, max_rows=1).generate(prompts[1:2], group_size=4, sampling=sampling, seed=1)
    assert [r.tokens.tolist() for r in next(alone)] == [r.tokens.tolist() for r in groups[1]], "streams are a completion's own"
    (many,) = MixedEngine(policy, other, 0.3).generate(
        prompts[:1], group_size=4000, sampling=replace(sampling, max_new_tokens=1), seed=0
    )
    counts = np.bincount([int(r.tokens[0]) for r in many], minlength=policy.vocabulary)
    p = mixture(policy, other, 0.3, prompts[0].tokens, sample_of(many[0]))[0]
    assert np.abs(counts - 4000 * p).max() < 5 * math.sqrt(4000 * (p * (1 - p)).max())
    for wrong in (Sampling(top_k=3), Sampling(temperature=0.0)):
        with pytest.raises(EngineError, match="drawn from as it is"):
            next(engine.generate(prompts, group_size=1, sampling=wrong, seed=0))


def test_a_mixture_needs_the_logits_of_the_last_position_alone(tiny_policy: Callable) -> None:
    """Not those of all prompts: their positions times the vocabulary fit into no memory."""
    policy, other = tiny_policy(), tiny_policy("gpt2", seed=3)
    shapes: list[tuple[int, ...]] = []
    for one in (policy, other):
        head = one.model.get_output_embeddings()
        head.register_forward_hook(lambda _, __, found: shapes.append(tuple(found.shape[:2])))
    prompt = Prompt(id="0/0", tokens=np.arange(6, 36), text="")
    (group,) = MixedEngine(policy, other, 0.3).generate([prompt], group_size=3, sampling=Sampling(max_new_tokens=4), seed=1)
    assert len(group) == 3 and set(shapes) == {(3, 1)}


@pytest.mark.slow
def test_importance_weights_make_the_mixture_unbiased(tiny_policy: Callable) -> None:
    """E over the mixture of `q / mixture x f` is E over q of f: the policy gradient's weight, for a single token."""
    policy, other = tiny_policy(dtype=F64, scale=3.0), tiny_policy(dtype=F64, scale=3.0, seed=3)
    prompt = Prompt(id="0/0", tokens=np.arange(6, 10), text="")
    (many,) = MixedEngine(policy, other, 0.4).generate([prompt], group_size=5000, sampling=Sampling(max_new_tokens=1), seed=0)
    scored = score(policy, [sample_of(r) for r in many], max_tokens_per_microbatch=100_000).logp
    w = np.exp([float(own[0]) - float(r.behavior_logp[0]) for own, r in zip(scored, many, strict=True)])
    assert w.max() <= 1 / 0.6 + 1e-9
    f = np.array([math.sin(int(r.tokens[0])) for r in many])
    q = log_probs(policy, prompt.tokens, sample_of(many[0]))[0].detach().exp().numpy()
    exact = float(q @ np.sin(np.arange(q.size)))
    assert abs(float((w * f).mean()) - exact) < 5 * float((w * f).std()) / math.sqrt(5000)


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


def final(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", "minillm", "hint", "ema", "sampled"])
def test_a_run_that_is_broken_off_goes_on_to_the_same_weights(
    kind: str, tmp_path: Path, write_recipe: Callable, larger: str
) -> None:
    demos = tmp_path / "demos.jsonl"
    demos.write_text("".join(json.dumps({"prompt": f"{i}+1=", "completion": str(i + 1)}) + "\n" for i in range(9)))
    changes = (
        TREE
        | {
            "checkpoint": {"teacher": {"path": larger, "demonstrations": {"path": str(demos), "rows": 2, "divergence": 0.5}}},
            "minillm": {"objective": "minillm", "teacher": {"path": larger, "demonstrations": {"path": str(demos), "lm": 0.5}}},
            "hint": {"teacher": {"hint": "{answer} "}},
            "ema": {"teacher": {"hint": "{answer} ", "ema": 0.25}},
            "sampled": {"objective": "distill_sampled", "teacher": {"path": larger}, "rewards": [{"function": "accuracy"}]},
        }[kind]
    )
    whole = list(train(load_recipe(write_recipe(tmp_path, "whole", **changes))))
    assert all(step.metrics["grad_norm"] > 0 for step in whole)
    assert ("reward" in whole[0].metrics) == (kind == "sampled")
    assert ("mismatch/max" in whole[0].metrics) == (kind != "minillm")
    assert ("teacher/kl" in whole[0].metrics) == (kind in ("minillm", "sampled"))
    path = write_recipe(tmp_path, "broken", **changes)
    for step in (steps := train(load_recipe(path))):
        if step.number == 2:
            steps.close()
            break
    rest = list(train(load_recipe(path)))
    assert [step.number for step in rest] == [3, 4]
    ours, theirs = final(tmp_path / "runs" / "broken"), final(tmp_path / "runs" / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "teacher.path is missing: the policy would learn from itself as it is"),
        (
            {"objective": "grpo", "teacher": {"hint": "{answer}"}, "rewards": [{"function": "accuracy"}]},
            "teacher is for those that",
        ),
        ({"teacher": {"path": "./nowhere"}}, "teacher.path: no such folder"),
        (
            {"teacher": {"hint": "{answer}", "demonstrations": {"path": "x.jsonl", "row": 3}}},
            "did you mean teacher.demonstrations.rows",
        ),
        ({"teacher": {"hint": "{answer}", "demonstrations": {"path": "x.jsonl"}}}, "teacher.demonstrations.path: no such file"),
        ({"objective": "minillm", "teacher": {"hint": "{answer}"}, "rollout": {"top_k": 5}}, "the teacher helps to sample"),
        ({"group": {"divergence": {"name": "jds"}}, "teacher": {"hint": "{answer}"}}, "did you mean jsd"),
        (
            {"teacher": {"ema": 0.05}, "model": {"path": None, "dtype": "bfloat16", "scratch": {"hidden": 32, "context": 96}}},
            "teacher.ema 0.05 moves the teacher by less than bfloat16 weights can hold.*set model.dtype: autocast",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict, said: str, tmp_path: Path, write_recipe: Callable) -> None:
    tree = yaml.safe_load(write_recipe(tmp_path, "run", **TREE).read_text()) | changes
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=said):
        load_recipe(path)


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
