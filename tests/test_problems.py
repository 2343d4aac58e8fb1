"""What goes wrong for users of other trainers, as acceptance cases; the numbers are the project's list of such problems.

Most cases stand beside the code they are about (`grep -rn "def test_p" tests`); these are about several parts at once.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from head_losses import FunctionLoss
from rule_rewards import RuleRewards
from transformers import AutoModelForCausalLM, GPT2Config

from groupwise.config.recipes import load_recipe
from groupwise.config.resolve import resolve
from groupwise.config.settings import GroupSettings, OptimizerSettings
from groupwise.data.packing import pack, unpack
from groupwise.data.tokenizers import make_tokenizer
from groupwise.errors import ConfigError, MemoryExceeded
from groupwise.models.loading import make_policy
from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.records import Prompt, Rollout, Sample, Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.prepared import plan_of
from groupwise.runs.run import train
from groupwise.training.groups import SampledRollouts
from groupwise.training.loss import Loss
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import Assessment, BatchPass, update
from groupwise.training.samples import weigh


def prompts_of(*sizes: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(id=f"0/{i}", tokens=rng.integers(6, 50, size=size), text="", row={"n": i}) for i, size in enumerate(sizes)]


def odd(rollout: Rollout) -> float:
    """1 for an odd sum of ids."""
    return float(rollout.tokens.sum() % 2)


def test_p03_minibatches_of_a_rollout_add_up_to_its_one_step(tiny_policy: Callable, scored_group: Callable) -> None:
    """DAPO's divisor is the tokens of the optimizer step, not those of the rollout: weighted by them the parts give the whole."""
    policy = tiny_policy(dtype=torch.float64, scale=2.0)
    groups = [scored_group([1.0, 0.0, 0.5], id=f"0/{i}", seed=i) for i in range(4)]
    algorithm = resolve("dapo", GroupSettings(group_size=3, dead_groups="exact"), 16)
    advantages = algorithm.credit(groups)

    def gradient(part: slice) -> tuple[torch.Tensor, int]:
        policy.model.zero_grad()
        samples = weigh(groups[part], advantages[part], algorithm)
        for batch in pack(samples, 1000, dtype=torch.float64):
            Loss(algorithm=algorithm)(BatchPass(policy, batch))[0].backward()
        gradients = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
        return torch.cat(gradients).clone(), sum(sample.completion.size for sample in samples)

    whole, total = gradient(slice(0, 4))
    parts = [gradient(slice(i, i + 1)) for i in range(4)]
    torch.testing.assert_close(sum(part * tokens / total for part, tokens in parts), whole, rtol=1e-9, atol=1e-12)


def test_p09_gpt2_as_it_is_configured_starts_at_its_reference() -> None:
    """transformers' default GPT-2 drops a tenth of everything in training mode, where `train()` here leaves it."""
    tokenizer = make_tokenizer("arithmetic")
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=tokenizer.eos_token_id
    )
    assert config.resid_pdrop == config.attn_pdrop == 0.1
    policy = make_policy(AutoModelForCausalLM.from_config(config).train(), tokenizer)
    settings = GroupSettings(prompts_per_step=3, group_size=4, beta=0.1)
    loop = train_online(
        policy,
        resolve("grpo", settings, 8),
        SampledRollouts(
            algorithm=resolve("grpo", settings, 8),
            engine=NativeEngine(policy, max_rows=8),
            rewards=RuleRewards(odd),
            draw=lambda k: prompts_of(1, 5, 9)[:k],
            sampling=Sampling(max_new_tokens=8),
            steps=1,
            group=settings,
        ),
        Optimizer(policy.model, OptimizerSettings(lr=1e-4), 2),
        group=settings,
        max_tokens_per_microbatch=100,
        reference=frozen_copy(policy),
    )
    metrics = next(loop).metrics
    assert abs(metrics["kl"]) < 1e-6
    assert metrics["kl/max"] < 1e-6
    assert metrics["ratio/min"] == pytest.approx(1.0, abs=1e-4)


def test_p22_the_ids_that_were_sampled_are_the_ids_that_are_trained(tiny_policy: Callable) -> None:
    """Bit for bit, with a tokenizer that would not encode its own text the same way again."""
    tokenizer = make_tokenizer("bytes")
    policy = tiny_policy(tokenizer=tokenizer, scale=2.0)
    groups = RuleRewards(odd).score(
        list(
            NativeEngine(policy, max_rows=8).generate(prompts_of(2, 7), group_size=6, sampling=Sampling(max_new_tokens=20), seed=3)
        )
    )
    texts = [r for group in groups for r in group.rollouts]
    assert any(tokenizer(r.text, add_special_tokens=False)["input_ids"] != r.tokens.tolist() for r in texts)
    algorithm = resolve("grpo", GroupSettings(group_size=6), 20)
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    assert [sample.completion.tolist() for sample in samples] == [rollout.tokens.tolist() for rollout in texts]
    for batch in pack(samples, 60):
        for index, targets in unpack(batch, batch.target_P, samples):
            assert targets.tolist() == samples[index].completion.tolist()


def lognormal_samples(count: int = 400) -> list[Sample]:
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(5.0, 1.0, count), 1, 4000).astype(int)
    samples = []
    for i, n in enumerate(lengths):
        ones = np.ones(n)
        samples.append(
            Sample(group=str(i // 8), prompt=np.arange(20 + i // 8), completion=np.zeros(n, np.int64), weight=ones, advantage=ones,
                   behavior_logp=-ones)
        )  # fmt: skip
    return samples


@pytest.mark.parametrize("fill", [False, True])
def test_p32_log_normal_lengths_waste_less_than_a_twentieth(fill: bool) -> None:
    batches = pack(lognormal_samples(), 8192, fill=fill)
    filler = sum(int((batch.segment_P == -1).sum()) for batch in batches)
    total = sum(batch.layout.total for batch in batches)
    assert filler / total < 0.05 if fill else filler == 0


def test_p34_micro_batches_are_cut_by_tokens_and_filled() -> None:
    """None is larger than the budget, and they are hardly more than the least number that could hold everything."""
    batches = pack(lognormal_samples(), 8192)
    sizes = [batch.layout.total for batch in batches]
    assert max(sizes) <= 8192
    assert len(sizes) <= math.ceil(1.1 * sum(sizes) / 8192)


class Backwards:
    """An engine that gives groups back in the opposite order."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine

    def generate(self, prompts: Sequence[Prompt], **keywords: object) -> Iterator[tuple[Rollout, ...]]:
        yield from reversed(list(self.engine.generate(prompts, **keywords)))  # type: ignore[arg-type]


def test_p39_completions_keep_their_prompt_whatever_order_they_come_in(tiny_policy: Callable) -> None:
    engine = NativeEngine(tiny_policy(scale=2.0), max_rows=4)
    group = GroupSettings(prompts_per_step=5, group_size=3)
    algorithm, sampling = resolve("grpo", group, 6), Sampling(max_new_tokens=6)
    found = []
    for which in (engine, Backwards(engine)):
        prompts = prompts_of(3, 8, 1, 5, 2)
        options = {"rewards": RuleRewards(odd), "algorithm": algorithm, "group": group, "sampling": sampling}
        groups, _ = SampledRollouts(engine=which, draw=lambda k, given=prompts: given[:k], steps=1, **options).collect()  # type: ignore[arg-type]
        assert [scored.prompt.id for scored in groups] == [prompt.id for prompt in prompts]
        assert all(r.prompt is scored.prompt for scored in groups for r in scored.rollouts)
        found.append([r.tokens.tolist() for scored in groups for r in scored.rollouts])
    assert found[0] == found[1]


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    def make(**changes: dict) -> Path:
        tree: dict = {
            "objective": "grpo",
            "steps": 6,
            "runs": str(tmp_path / "runs"),
            "model": {"scratch": {"hidden": 32, "layers": 1, "heads": 4, "context": 64}},
            "data": {"task": "addition", "limit": 32, "eval_limit": 4},
            "rewards": [{"function": "accuracy"}],
            "rollout": {"max_new_tokens": 12},
            "group": {"prompts_per_step": 4, "group_size": 3, "updates_per_rollout": 2, "minibatches": 2},
        }
        for key, value in changes.items():
            tree[key] = tree.get(key, {}) | value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return make


def test_p40_p41_the_plan_says_what_a_recipe_comes_to(recipe: Callable) -> None:
    """Batch sizes are said in prompts and completions per prompt; everything else is derived, and printed before the first step."""
    plan = dict(plan_of(load_recipe(recipe())))
    assert "4 prompts x 3 completions = 12 completions" in plan["a step"]
    assert "at most 12 tokens" in plan["a step"]
    assert plan["updates"].startswith("4 per rollout")
    assert "24 in all" in plan["updates"]
    assert "6 steps, 72 completions" in plan["in all"]
    assert "epochs" in plan["in all"]


def test_p42_data_too_few_for_one_step_are_refused_before_weights_are_loaded(
    recipe: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object, **__: object) -> Policy:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("groupwise.training.objectives.make_policy", loaded)
    with pytest.raises(ConfigError, match=r"prompts_per_step is 4, but the data has only 2 prompts"):
        list(train(load_recipe(recipe(data={"limit": 2}))))


def test_p59_prompts_that_do_not_fit_are_counted_in_the_plan(recipe: Callable, tmp_path: Path) -> None:
    """With room for every completion; the engine is never asked for what the context cannot hold."""
    rows = [{"prompt": "1" * size, "answer": "1"} for size in (3, 5, 8, 13, 51, 52, 53, 90)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = dict(plan_of(load_recipe(recipe(data={"path": str(path), "task": None, "limit": None, "eval_limit": None}))))
    kept = sum(len(row["prompt"]) <= 64 - 12 for row in rows)
    assert f"{kept} of 8 rows" in plan["read"]
    assert f"{8 - kept} longer than 52 tokens" in plan["read"]


def test_p63_rewards_are_computed_while_others_are_still_sampled(tiny_policy: Callable) -> None:
    """The engine below holds its last group back until the reward of its first has been asked for."""
    asked = threading.Event()

    def rule(rollout: Rollout) -> float:
        asked.set()
        return odd(rollout)

    class Waiting:
        def generate(self, prompts: Sequence[Prompt], **keywords: object) -> Iterator[tuple[Rollout, ...]]:
            for number, group in enumerate(NativeEngine(tiny_policy(scale=2.0), max_rows=4).generate(prompts, **keywords)):  # type: ignore[arg-type]
                assert number == 0 or asked.wait(20), "the first group's reward waits for the last group"
                yield group

    group = GroupSettings(prompts_per_step=3, group_size=2)
    options = {"group": group, "algorithm": resolve("grpo", group, 6), "sampling": Sampling(max_new_tokens=6)}
    source = SampledRollouts(
        engine=Waiting(), rewards=RuleRewards(rule), draw=lambda k: prompts_of(3, 4, 5)[:k], steps=1, **options
    )  # type: ignore[arg-type]
    groups, drawn = source.collect()
    assert len(groups) == drawn == 3


@pytest.mark.parametrize("cuda", [False, True])
def test_p64_a_step_out_of_memory_is_computed_in_smaller_parts_to_the_same_result(
    tiny_policy: Callable, random_samples: Callable, caplog: pytest.LogCaptureFixture, cuda: bool
) -> None:
    """The loss below has memory for 40 packed positions; it fails in its second micro-batch, when there are gradients already."""
    samples = random_samples(4, 3, seed=1)
    message = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."

    def step(limit: int) -> tuple[Assessment, dict[str, torch.Tensor]]:
        policy = tiny_policy()
        calls = []

        def loss(passed: BatchPass) -> tuple[torch.Tensor, torch.Tensor]:
            batch = passed.batch
            calls.append(sum(batch.layout.length))
            if calls[-1] > limit and len(calls) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.") if cuda else RuntimeError(message)
            weight_M = batch.weight_P[batch.trained_M]
            return FunctionLoss(lambda logp_M, _, rows: -(weight_M[rows] * logp_M).sum(), separable=True)(passed)

        optimizer = Optimizer(
            policy.model, OptimizerSettings(lr=1.0, warmup_steps=0, eps=1.0), 1
        )  # eps: the step follows the gradient
        taken = update(policy, loss, samples, optimizer, max_tokens_per_microbatch=60)
        return taken, {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}

    expected, weights = step(10**9)
    found, same = step(40)
    assert (expected.max_tokens_per_microbatch, found.max_tokens_per_microbatch) == (60, 30)
    assert found.stats.grad_norm == pytest.approx(expected.stats.grad_norm, rel=1e-6)
    assert all(torch.allclose(same[name], weights[name], atol=1e-6) for name in weights)
    assert "60 packed positions at a time do not fit into memory: going on with 30, to the same result" in caplog.text
    with pytest.raises(MemoryExceeded, match=r"do not fit into memory \(.*\); lower optimizer.tokens_per_microbatch"):
        step(1)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_an_update_that_was_interrupted_leaves_nothing_to_the_next(
    tiny_policy: Callable, random_samples: Callable, micro_batch: int
) -> None:
    """A user stops a cell and runs it again: neither whole gradients nor begun ones are still there."""
    samples = random_samples(4, 3, seed=1)

    def norm(stopped: int | None) -> float:
        policy, calls = tiny_policy(), []
        optimizer = Optimizer(policy.model, OptimizerSettings(), 2)

        def loss(passed: BatchPass) -> tuple[torch.Tensor, torch.Tensor]:
            batch = passed.batch
            calls.append(1)
            weight_M = batch.weight_P[batch.trained_M]

            def token(logp_M: torch.Tensor, _: torch.Tensor | None, rows: slice) -> torch.Tensor:
                if len(calls) == stopped:
                    raise KeyboardInterrupt
                return -(weight_M[rows] * logp_M).sum()

            return FunctionLoss(token, separable=True)(passed)

        if stopped:
            with pytest.raises(KeyboardInterrupt):
                update(policy, loss, samples, optimizer, max_tokens_per_microbatch=60)
        return update(policy, loss, samples, optimizer, max_tokens_per_microbatch=60).stats.grad_norm

    assert norm(micro_batch) == pytest.approx(norm(None), rel=1e-6)


def test_p64_an_optimizer_step_out_of_memory_is_not_tried_again(tiny_policy: Callable, random_samples: Callable) -> None:
    """It may have changed some weights already: a second try would change them twice."""
    policy, tries = tiny_policy(), []

    class Full(Optimizer):
        def step(self) -> Any:
            tries.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def loss(passed: BatchPass) -> tuple[torch.Tensor, torch.Tensor]:
        batch = passed.batch
        weight_M = batch.weight_P[batch.trained_M]
        return FunctionLoss(lambda logp_M, _, rows: -(weight_M[rows] * logp_M).sum(), separable=True)(passed)

    with pytest.raises(torch.OutOfMemoryError):
        update(policy, loss, random_samples(4, 3, seed=1), Full(policy.model, OptimizerSettings(), 1), max_tokens_per_microbatch=60)
    assert len(tries) == 1
