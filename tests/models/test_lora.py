"""Adapters: trained beside weights that stay as they are, which are the reference; saved merged and in peft's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from sample_texts import TOKENIZER
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from groupwise import train
from groupwise.config.recipes import parse_stages
from groupwise.config.settings import LoraSettings, ModelSettings, OptimizerSettings
from groupwise.errors import ConfigError
from groupwise.models.attention import plain_attention
from groupwise.models.loading import load_policy, make_policy
from groupwise.models.lora import adapt, restore_adapter
from groupwise.models.policy import Policy
from groupwise.models.reward_head import Answer, add_head, score_tokens, wrap_scorer
from groupwise.models.saving import merged, save, save_to_resume
from groupwise.models.sharded import frozen_copy, gathered
from groupwise.records import Sample
from groupwise.training.offline import SFT
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import score, update
from groupwise.training.samples import sample_of

LORA = LoraSettings(rank=4, alpha=8.0)


@pytest.fixture
def base(tiny_policy: Callable[..., Policy], tmp_path: Path) -> Callable[..., Path]:
    """`base(family)`: the folder of a random checkpoint."""

    def make(family: str = "llama", **options: Any) -> Path:
        folder = tmp_path / f"base-{family}"
        save(tiny_policy(family, **options), folder)
        return folder

    return make


def disturb(policy: Any, seed: int = 0) -> None:
    """Give every trained parameter random numbers: an adapter that does something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name in policy.adapter.trained:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def logp_of(policy: Policy, samples: Sequence[Sample]) -> np.ndarray:
    return np.concatenate(score(policy, samples, max_tokens_per_microbatch=60).logp)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_the_reference_under_an_adapter_is_the_frozen_copy(
    tiny_policy: Callable[..., Policy], random_samples: Callable[..., list[Sample]], family: str
) -> None:
    """At the start policy, reference and the untouched model are the same; later only the policy has moved."""
    samples = random_samples()
    frozen = logp_of(tiny_policy(family), samples)
    policy = adapt(tiny_policy(family), LORA, base="")
    reference = frozen_copy(policy)
    start = logp_of(policy, samples)
    np.testing.assert_allclose(start, frozen, atol=1e-6)  # an adapted MLP is not computed in one piece
    np.testing.assert_array_equal(logp_of(reference, samples), start)
    disturb(policy)
    assert np.abs(logp_of(policy, samples) - frozen).max() > 0.1
    np.testing.assert_array_equal(logp_of(reference, samples), start)
    assert np.abs(logp_of(policy, samples) - frozen).max() > 0.1  # the reference puts the adapter back


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_update_moves_the_adapter_as_pefts_own_model_says(
    tiny_policy: Callable[..., Policy], random_samples: Callable[..., list[Sample]], family: str
) -> None:
    """The packed gradient of every factor, against peft's model on one sequence at a time; all other weights keep every bit."""
    policy = adapt(tiny_policy(family, dtype=torch.float64), LORA, base="")
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    disturb(policy)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2")
    theirs = get_peft_model(tiny_policy(family, dtype=torch.float64).model, config, autocast_adapter_dtype=False)
    own = dict(policy.model.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(own[name.removeprefix("base_model.model.")])
    samples = [replace(sample, temperature=1.0) for sample in random_samples()]
    total = torch.zeros((), dtype=torch.float64)
    with plain_attention(theirs.get_base_model()):
        for sample in samples:
            ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion]))
            logp = torch.log_softmax(theirs(input_ids=ids[None]).logits[0, sample.prompt.size - 1 : -1, : policy.vocabulary], -1)
            total = total - (torch.from_numpy(sample.weight) * logp.gather(1, ids[sample.prompt.size :, None])[:, 0]).sum()
    total.backward()

    class Kept:
        taken = 0

        def clear(self) -> None:
            policy.model.zero_grad()

        def step(self) -> Any:
            self.gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}

    kept = Kept()
    update(policy, SFT.loss, samples, kept, max_tokens_per_microbatch=40)  # type: ignore[arg-type]
    assert set(kept.gradients) == set(policy.adapter.trained)
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                kept.gradients[name.removeprefix("base_model.model.")], parameter.grad, rtol=1e-7, atol=1e-11
            )
    policy.model.zero_grad()
    optimizer = Optimizer(policy.model, OptimizerSettings(lr=1e-2, weight_decay=0.1), 1)
    update(policy, SFT.loss, samples, optimizer, max_tokens_per_microbatch=40)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in policy.adapter.trained), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_what_is_saved_is_a_plain_model_and_an_adapter_for_peft(
    base: Callable[..., Path], random_samples: Callable[..., list[Sample]], tmp_path: Path, family: str
) -> None:
    folder = base(family)
    lora = replace(LORA, targets=("q_proj", "o_proj")) if family == "mixtral" else LORA
    policy = adapt(load_policy(ModelSettings(path=str(folder))), lora, base=str(folder))
    disturb(policy)
    samples = random_samples()
    ours = logp_of(policy, samples)
    save(policy, tmp_path / "final")
    np.testing.assert_array_equal(logp_of(policy, samples), ours)  # merging was done in a copy
    np.testing.assert_allclose(logp_of(load_policy(ModelSettings(path=str(tmp_path / "final"))), samples), ours, atol=2e-5)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "final/adapter")).eval()
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(adapted(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final/adapter")
    assert tokenizer.get_vocab() == policy.tokenizer.get_vocab() and tokenizer.chat_template == policy.tokenizer.chat_template
    save_to_resume(policy, tmp_path / "kept")
    read = load_policy(ModelSettings(path=str(tmp_path / "kept")))  # an adapter's folder means its base with it merged
    np.testing.assert_allclose(logp_of(read, samples), ours, atol=2e-5)
    assert not (tmp_path / "kept" / "model.safetensors").exists()
    again = adapt(load_policy(ModelSettings(path=str(folder))), lora, base=str(folder), seed=7)
    restore_adapter(again, tmp_path / "kept")
    np.testing.assert_array_equal(logp_of(again, samples), ours)


def test_a_reward_model_can_be_an_adapter_with_its_head(
    tiny_policy: Callable[..., Policy], base: Callable[..., Path], tmp_path: Path
) -> None:
    causal = load_policy(ModelSettings(path=str(base())))
    scorer = wrap_scorer(add_head(causal.model, causal.tokenizer, causal.eos_ids, "last", seed=1), causal.tokenizer)
    policy = adapt(scorer, LORA, base="")
    assert "score.weight" in policy.adapter.trained
    disturb(policy)
    answers = [Answer("a", np.array([7, 8]), np.array([9, 6, 1])), Answer("a", np.array([7, 8]), np.array([12, 1]))]
    ours = [float(values[-1]) for values in score_tokens(policy, answers, max_tokens_per_microbatch=30)]
    save(policy, tmp_path / "reward")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
    for answer, value in zip(answers, ours, strict=True):
        ids = torch.from_numpy(np.concatenate([answer.prompt, answer.completion]))
        assert theirs(ids[None]).logits.item() == pytest.approx(value, abs=1e-5)


RECIPE = """
name: adapted
model: {{path: {base}, lora: {{rank: 4, alpha: 8}}}}
data: {{path: {data}, template: "{{question}}="}}
rewards: [{{function: repetition, args: {{n: 1}}}}]
runs: {runs}
save: {{every: 1}}
group: {{prompts_per_step: 3, group_size: 4, beta: 0.1}}
rollout: {{max_new_tokens: 10}}
optimizer: {{lr: 1.0e-2}}
objective: grpo
steps: 3
"""


@pytest.fixture
def recipe(base: Callable[..., Path], tmp_path: Path) -> Any:
    rows = [{"question": f"{i}+1", "completion": f"{i + 1}"} for i in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    text = RECIPE.format(base=base(), data=tmp_path / "rows.json", runs=tmp_path / "runs")
    return lambda *overrides: next(iter(parse_stages(text, "recipe", list(overrides)).values()))


@pytest.mark.slow
def test_a_run_is_measured_against_its_base_and_goes_on_from_its_adapter(recipe: Callable[..., Any], tmp_path: Path) -> None:
    """KL 0 at step 1 and then the KL to the base; an interrupted run ends in the same bits; what it exports is a plain model."""
    straight = list(train(recipe()))
    assert straight[0].metrics["kl"] == 0.0 < straight[-1].metrics["kl"]
    samples_of = [rollout for group in straight[-1].groups for rollout in group.rollouts]
    reference = logp_of(load_policy(ModelSettings(path=recipe().model.path)), [sample_of(rollout) for rollout in samples_of])
    recorded = np.concatenate([logp for group in straight[-1].groups for logp in group.signals["reference_logp"]])
    np.testing.assert_allclose(recorded, reference, atol=1e-5)
    broken = iter(train(replace(recipe(), name="broken")))
    assert next(step for step in broken if step.number == 2)
    broken.close()
    checkpoint = tmp_path / "runs/broken/checkpoints/000002/policy"
    assert sorted(path.name for path in checkpoint.glob("*.safetensors")) == ["adapter_model.safetensors"]
    assert not (tmp_path / "runs/broken/reference").exists()
    (rest,) = train(replace(recipe(), name="broken"))
    assert rest.metrics["loss"] == straight[-1].metrics["loss"] and rest.metrics["kl"] == straight[-1].metrics["kl"]
    first, second = (load_policy(ModelSettings(path=str(tmp_path / "runs" / name / "final"))) for name in ("adapted", "broken"))
    assert type(first.model).__name__ == "LlamaForCausalLM"
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_p55_a_trained_adapter_is_its_own_reference(recipe: Callable[..., Any], tmp_path: Path) -> None:
    """SFT with an adapter, then GRPO from its adapter (and from its final model): KL 0 at step 1, to it and not to its base."""
    list(train(recipe("objective=sft", "name=sft", "data.columns={}", "optimizer.lr=0.05")))
    for name, path in (("merged", "runs/sft/final"), ("adapter", "runs/sft/final/adapter")):
        settings = replace(recipe().model, path=str(tmp_path / path))
        step = next(iter(train(replace(recipe(), name=name, steps=1, model=settings))))
        assert step.metrics["kl"] == 0.0
        samples = [sample_of(rollout) for group in step.groups for rollout in group.rollouts]
        recorded = np.concatenate([logp for group in step.groups for logp in group.signals["reference_logp"]])
        start, base = (logp_of(load_policy(ModelSettings(path=place)), samples) for place in (settings.path, recipe().model.path))
        np.testing.assert_allclose(recorded, start, atol=1e-5)
        assert np.abs(recorded - base).max() > 0.1


def test_p58_a_learning_rate_for_all_weights_is_warned_about(recipe: Callable[..., Any]) -> None:
    from groupwise.runs.prepared import plan_of

    plan = dict(plan_of(recipe("optimizer.lr=1.0e-6")))
    assert "1e-06 is one for training all weights" in plan["warning"] and "that stay as they are" in plan["adapter"]
    assert "warning" not in dict(plan_of(recipe("optimizer.lr=1.0e-4")))


def test_the_plan_counts_what_is_trained(recipe: Callable[..., Any]) -> None:
    """Gradients and moments of the adapter alone, and no second copy for the reference."""
    from groupwise.runs.plan import planned_adapter
    from groupwise.runs.prepared import plan_of
    from groupwise.runs.run_models import blueprint_of

    adapted = recipe()
    model = adapt(load_policy(ModelSettings(path=adapted.model.path)), adapted.model.lora, base="").model
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert planned_adapter(adapted, blueprint_of(adapted, None)).parameters == trained
    whole = replace(adapted, model=replace(adapted.model, lora=None))
    line, full = (dict(plan_of(recipe))["memory"] for recipe in (adapted, whole))
    assert "reference" in full and "reference" not in line
    assert f"gradients {trained * 4 / 1024:.1f} KiB, optimizer {trained * 8 / 1024:.1f} KiB" in line


def test_targets_that_are_not_there_or_not_allowed(recipe: Callable[..., Any]) -> None:
    for targets, message in (
        ("[nothing]", "nothing"),
        ("[embed_tokens]", r"not on model.embed_tokens \(Embedding\)"),
        ("[lm_head, q_proj]", "reach the output head"),
    ):
        with pytest.raises(ConfigError, match=message):
            list(train(recipe(f"model.lora={{targets: {targets}}}")))


def test_experts_are_refused(tiny_policy: Callable[..., Policy]) -> None:
    with pytest.raises(ConfigError, match=r"not on model.layers.0.mlp.* name the layers"):
        adapt(tiny_policy("mixtral"), LORA, base="")


def test_experts_beside_a_shared_one_are_named(tiny_policy: Callable[..., Policy], caplog: pytest.LogCaptureFixture) -> None:
    """Linear layers of the shared expert get an adapter, the others, which lie stacked in one parameter, do not."""
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    config = Qwen2MoeConfig(
        vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, **settings,
    )  # fmt: skip
    adapted = adapt(make_policy(Qwen2MoeForCausalLM(config), TOKENIZER), LORA, base="")
    assert adapted.adapter is not None
    assert any("shared_expert" in name for name in adapted.adapter.trained)
    assert "the experts get no adapter and stay as they are (model.layers.0.mlp.experts.gate_up_proj and 1 more" in caplog.text
    caplog.clear()
    adapt(tiny_policy(), LORA, base="")
    assert "experts" not in caplog.text


def test_an_adapter_that_does_not_say_its_base(tmp_path: Path) -> None:
    for text, message in (
        ({}, "names no base_model_name_or_path"),
        ({"base_model_name_or_path": "x", "task_type": "SEQ_CLS"}, "for SEQ_CLS"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(text))
        with pytest.raises(ConfigError, match=message):
            load_policy(ModelSettings(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q_proj", "k_prj"), r"'k_prj' \(did you mean k_proj\?\); its linear layers are called q_proj, k_proj"),
        (("layers.0.self_attn.q_proj", "layers.7.self_attn.q_proj"), r"'layers.7.self_attn.q_proj' \(did you mean .*q_proj\?\)"),
        (("q_proj", "weights"), "no layer of the model is called 'weights'; its"),
    ],
)
def test_every_target_of_an_adapter_is_a_layer(targets: Any, said: str, tiny_policy: Callable[..., Policy]) -> None:
    """Also beside others that are there."""
    with pytest.raises(ConfigError, match=said):
        adapt(tiny_policy(), replace(LORA, targets=targets), base="")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_whatever_is_made_of_the_reference_is_without_the_adapter(
    family: str, tiny_policy: Callable[..., Policy], random_samples: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    samples = random_samples()
    policy = adapt(tiny_policy(family), LORA, base="")
    disturb(policy)
    reference = frozen_copy(policy)
    expected = logp_of(reference, samples)
    assert np.abs(logp_of(policy, samples) - expected).max() > 0.1
    np.testing.assert_array_equal(logp_of(frozen_copy(reference), samples), expected)
    save(reference, tmp_path / "saved")
    save_to_resume(reference, tmp_path / "kept")
    plain = make_policy(merged(reference), policy.tokenizer)
    with gathered(reference) as whole:
        found = [plain, whole, *(load_policy(ModelSettings(path=str(tmp_path / name))) for name in ("saved", "kept"))]
        for one in found:
            np.testing.assert_allclose(logp_of(one, samples), expected, atol=1e-5)


def test_the_merged_model_can_be_called(tiny_policy: Callable[..., Policy]) -> None:
    """Its rotary tables are in no state dict."""
    policy = adapt(tiny_policy(), LORA, base="")
    disturb(policy)
    ids = torch.arange(5, 15)[None]
    with torch.no_grad(), plain_attention(merged(policy)) as whole, plain_attention(policy.model) as adapted:
        torch.testing.assert_close(whole(input_ids=ids).logits, adapted(input_ids=ids).logits)
