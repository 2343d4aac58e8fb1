"""Blocks in FP8: torchao's numbers in packed passes alone, what the proof finds, what is refused, and steps of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from sample_texts import groups_of_texts
from torch import nn
from transformers import AutoConfig

from groupwise.config.recipes import load_recipe
from groupwise.config.settings import LoraSettings, ParallelSettings
from groupwise.distributed import comm
from groupwise.errors import ConfigError, EngineError
from groupwise.models import fp8_blocks
from groupwise.models.fp8_blocks import converted, emulates, in_fp8
from groupwise.models.lora import adapt
from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.proof import fp8
from groupwise.proof.fp8 import measured_drift, prove_fp8
from groupwise.proof.passes import model_pass, run_pass
from groupwise.records import Step
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.compiling import with_blocks
from groupwise.runs.engines import check_agreement
from groupwise.runs.job import make_job
from groupwise.runs.prepared import modelled, plan_of

RECIPES = ["rowwise", "rowwise_with_gw_hp"]
MISSING = "FP8 is computed by torchao, which is not installed"


@pytest.fixture
def torchao() -> None:
    pytest.importorskip("torchao.float8", reason=MISSING)


@contextmanager
def torchaos_layers(policy: Policy, recipe: str) -> Iterator[None]:
    """Inside, a model holds torchao's layers in the place of its own."""
    layers = {name: one for name, one in policy.model.named_modules() if type(one) is nn.Linear and ".layers." in name}
    for name, layer in layers.items():
        policy.model.set_submodule(name, converted(layer, recipe))
    try:
        yield
    finally:
        for name, layer in layers.items():
            policy.model.set_submodule(name, layer)


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_packed_pass_gives_what_the_model_gives_with_torchaos_layers(
    family: str, recipe: str, tiny_policy: Callable[..., Policy]
) -> None:
    """Of a text alone also the gradients, whose rounding depends on the tokens of the stream; its own pass stays as it is."""
    policy = tiny_policy(family)
    rounded = in_fp8(policy, recipe)
    plain = model_pass(policy, groups_of_texts(), gradients=False).values
    with torchaos_layers(policy, recipe):
        expected = model_pass(policy, groups_of_texts(), gradients=False).values
        alone = model_pass(policy, groups_of_texts()[:1], gradients=True)
    ours = run_pass(rounded, groups_of_texts(), gradients=False).values
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(expected), atol=2e-5)
    assert np.abs(np.concatenate(ours) - np.concatenate(plain)).max() > 1e-3, "it is rounded"
    learnt = run_pass(rounded, groups_of_texts()[:1], gradients=True).gradient
    assert learnt.keys() == alone.gradient.keys()
    for name, gradient in learnt.items():
        torch.testing.assert_close(gradient, alone.gradient[name], rtol=1e-3, atol=1e-4)
    again = model_pass(rounded, groups_of_texts(), gradients=False).values
    np.testing.assert_array_equal(np.concatenate(again), np.concatenate(plain))
    assert all("forward" not in vars(module) for module in policy.model.modules())


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_the_head_and_the_embedding_are_not_rounded_and_a_copy_is_rounded_alike(tiny_policy: Callable[..., Policy]) -> None:
    policy = in_fp8(tiny_policy("llama"), "rowwise")
    assert len(policy.blocks.names) == 14 and all(".layers." in name for name in policy.blocks.names)
    copied = run_pass(frozen_copy(policy), groups_of_texts(), gradients=False).values
    np.testing.assert_array_equal(
        np.concatenate(copied), np.concatenate(run_pass(policy, groups_of_texts(), gradients=False).values)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_proof_says_how_far_fp8_drifts(recipe: str, tiny_policy: Callable[..., Policy]) -> None:
    policy = in_fp8(tiny_policy("llama"), recipe)
    prompts = [2 + np.arange(size) % 12 for size in (3, 5, 90)]
    drift = measured_drift(policy, prompts)
    assert 0.0 < drift.mean < drift.largest and 0.9 < drift.cosine < 1.0
    again = measured_drift(policy, prompts, recompute=True)
    np.testing.assert_allclose([again.mean, again.cosine], [drift.mean, drift.cosine], rtol=1e-5)
    kept, ((label, text),) = with_blocks(policy, "off", longest=40, recompute=False, prompts=prompts)
    assert kept is policy and label == "fp8"
    assert f"{recipe}: 14 linear layers in emulated FP8" in text and f"drift by {drift.mean:.2g} nats" in text


def doubled(layer: nn.Linear, others: list[nn.Linear]) -> nn.Linear:
    """A layer whose scale is wrong by two."""
    twin = converted(layer, "rowwise")
    right = twin.forward
    twin.forward = lambda x: 2.0 * right(x)  # type: ignore[method-assign]
    return twin


def neighbours(layer: nn.Linear, others: list[nn.Linear]) -> nn.Linear:
    """A layer with the weight of another of its shape."""
    return converted(next(one for one in others if one is not layer and one.weight.shape == layer.weight.shape), "rowwise")


class LosesGradient(torch.autograd.Function):
    """Half of what reaches a layer's input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 0.5 * gradient


def halved(layer: nn.Linear, others: list[nn.Linear]) -> nn.Linear:
    """A layer whose input gets half of its gradient."""
    twin = converted(layer, "rowwise")
    right = twin.forward
    twin.forward = lambda x: right(LosesGradient.apply(x))  # type: ignore[method-assign, arg-type]
    return twin


FAULTS = [(doubled, "products"), (neighbours, "products"), (halved, "gradients of inputs")]


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize(("fault", "kind"), FAULTS)
def test_the_proof_finds_a_layer_that_is_not_torchaos(
    fault: Callable[..., nn.Linear], kind: str, tiny_policy: Callable[..., Policy]
) -> None:
    policy = in_fp8(tiny_policy("llama"), "rowwise")
    layers = policy.blocks.layers(policy)
    name = policy.blocks.names[9]
    policy.blocks._twins[layers[name]] = fault(layers[name], list(layers.values()))
    with pytest.raises(ConfigError, match=f"{kind} of {name} are not those of torchao's own layer"):
        prove_fp8(policy, longest=40)


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_a_fault_in_torchao_itself_is_a_drift(tiny_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the layers equal each other, and are wrong together."""
    monkeypatch.setattr(fp8_blocks, "converted", lambda layer, recipe: doubled(layer, []))
    monkeypatch.setattr(fp8, "converted", lambda layer, recipe: doubled(layer, []))
    policy = in_fp8(tiny_policy("llama"), "rowwise")
    with pytest.raises(ConfigError, match=r"cannot be trained in FP8; leave model\.fp8 out"):
        prove_fp8(policy, longest=40)


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize(
    ("bound", "value", "match"),
    [("DRIFT", 1e-6, "differ by .* nats on average"), ("DIRECTION", 1.0, "the cosine between the gradients")],
)
def test_a_drift_beyond_a_bound_ends_the_run(
    bound: str, value: float, match: str, tiny_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, bound, value)
    with pytest.raises(ConfigError, match=match):
        prove_fp8(in_fp8(tiny_policy("llama"), "rowwise"), longest=40)


def test_the_prompts_of_the_proof_fit_into_one_micro_batch() -> None:
    prompts = [np.zeros(size, dtype=np.int64) for size in (100, 50, 70, *range(10, 20))]
    for positions, sizes in ((10, [100]), (198, [100, 50]), (292, [100, 50, 70]), (10_000, [100, 50, 70, 10, 11, 12, 13, 14])):
        assert [ids.size for ids in fp8.first_that_fit(prompts, positions)] == sizes
    assert fp8.first_that_fit([], 10) == []


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_the_drift_is_measured_behind_a_prompt_that_nearly_fills_the_context(tiny_policy: Callable[..., Policy]) -> None:
    policy = in_fp8(tiny_policy("llama"), "rowwise")
    prompts = [np.full(size, 5, dtype=np.int64) for size in (policy.context - 1, 4)]
    lengths = [text.completion.size for text in fp8.sampled(replace(policy, blocks=None, eos_ids=()), prompts)]
    assert lengths == [1, fp8.SAMPLED]


def test_a_step_that_fp8_drifted_too_far_in_is_thrown_away(tiny_policy: Callable[..., Policy]) -> None:
    """Whatever the engine's own rounding explains: it samples without FP8."""
    engine = NativeEngine(tiny_policy("llama"), max_rows=8)
    step = Step(number=4, metrics={"mismatch/mean": 0.11})
    check_agreement(step, engine)
    with pytest.raises(EngineError, match=r"step 4: .* by 0.11 nats .* more than FP8 may drift \(0.1\).*without model.fp8"):
        check_agreement(step, engine, fp8=True)
    check_agreement(replace(step, metrics={"mismatch/mean": 0.09}), engine, fp8=True)
    exact = NativeEngine(engine.policy, max_rows=8)
    exact.tolerance = 0.01
    check_agreement(replace(step, metrics={"mismatch/mean": 0.09}), exact, fp8=True)


def recipe_of(folder: Path, **keys: Any) -> str:
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}", "answer": f"{i + 1}"} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "rule.py").write_text("def first(completion): return float(ord(completion[:1] or ' ') % 2)\n", encoding="utf-8")
    tree: dict[str, Any] = {
        "objective": "grpo",
        "name": "r",
        "runs": str(folder / "runs"),
        "steps": 2,
        "data": {"path": str(folder / "rows.jsonl")},
        "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 2, "context": 64, "tokenizer": "arithmetic"}, "fp8": "rowwise"},
    }
    if keys.get("objective", "grpo") == "grpo":
        tree |= {"rewards": [{"function": "rule.py:first"}], "rollout": {"max_new_tokens": 8}}
        tree |= {"group": {"prompts_per_step": 2, "group_size": 4, "beta": 0.1}}
    for key, value in keys.items():
        tree[key] = tree[key] | value if isinstance(value, dict) and key in tree else value
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return str(folder / "recipe.yaml")


def adapted(make: Callable[..., Policy]) -> Policy:
    return adapt(make("llama"), LoraSettings(rank=2), base="x", seed=0)


def sharded(make: Callable[..., Policy]) -> Policy:
    return replace(make("llama"), shards=object())  # type: ignore[arg-type]


def one_by_one(make: Callable[..., Policy]) -> Policy:
    return replace(make("llama"), attention="single")


def sees(make: Callable[..., Policy]) -> Policy:
    return replace(make("llama"), vision=object())


def mixture(make: Callable[..., Policy]) -> Policy:
    policy = make("llama")
    policy.model.config.num_local_experts = 4
    return policy


REFUSED = {
    "under an adapter": adapted,
    "spread over processes": sharded,
    "'single'": one_by_one,
    "reads images": sees,
    "experts are no linear layers": mixture,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_run_in_fp8_is_refused_with_the_reason(reason: str, tiny_policy: Callable[..., Policy]) -> None:
    with pytest.raises(ConfigError, match=f"model.fp8: .*{reason}.*; leave model.fp8 out"):
        in_fp8(REFUSED[reason](tiny_policy), "rowwise")


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_without_a_layer_that_fits_is_refused(family: str, tiny_policy: Callable[..., Policy]) -> None:
    """GPT-2's are no linear layers, and the sides of the other are no multiples of 16."""
    policy = tiny_policy(family, hidden=40)
    with pytest.raises(ConfigError, match="has a linear layer whose sides are multiples of 16"):
        in_fp8(policy, "rowwise")


def test_without_torchao_the_remedy_is_named_in_the_plan_too(
    tiny_policy: Callable[..., Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8_blocks.torchao.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match="pip install torchao"):
        in_fp8(tiny_policy("llama"), "rowwise")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="pip install torchao"):
        plan_of(load_recipe(recipe_of(tmp_path)))
    fp8_blocks.torchao.cache_clear()


@pytest.mark.parametrize(("capability", "emulated"), [((8, 9), True), ((9, 0), False), ((10, 0), False)])
def test_only_gpus_with_units_for_rows_multiply_in_fp8(
    capability: tuple[int, int], emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert emulates(torch.device("cuda")) == emulated
    assert emulates(torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("dtype", ["float32", "autocast", "bfloat16"])
def test_a_run_samples_without_fp8_and_corrects_for_it(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mismatch is that of rounding, the weights of tokens are bounded, and the reference is rounded as the policy is."""
    monkeypatch.chdir(tmp_path)
    norms = []
    for again in (False, True):
        job = make_job(load_recipe(recipe_of(tmp_path, model={"dtype": dtype, "gradient_checkpointing": again})))
        assert "fp8" in dict(job.plan) and job.algorithm.correction is not None  # type: ignore[attr-defined]
        step = next(job.loop(0))
        assert 1e-5 < step.metrics["mismatch/mean"] < fp8.DRIFT and "mismatch/bounded" in step.metrics
        assert step.metrics["kl"] == 0.0
        norms.append(step.metrics["grad_norm"])
        job.close()
    np.testing.assert_allclose(*norms, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_a_data_set_objective_runs_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    losses = []
    for recipe in (None, "rowwise"):
        job = make_job(load_recipe(recipe_of(tmp_path, objective="sft", model={"fp8": recipe})))
        assert ("fp8" in dict(job.plan)) == (recipe is not None)
        losses.append(next(job.loop(0)).metrics["loss"])
        job.close()
    assert losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=0.05)


TOGETHER = {
    "model.lora": {"model": {"lora": {}, "path": "x", "scratch": None}},
    "'reward' trains a scoring model": {"objective": "reward"},
    "'prm' trains a scoring model": {"objective": "prm"},
    "model.compile": {"model": {"compile": "on"}},
    "model.attention": {"model": {"attention": "single"}},
    "set parallel to ddp": {"parallel": "zero3"},
    "spread over processes": {"parallel": {"context": 2}},
}


@pytest.mark.parametrize("named", TOGETHER)
def test_what_does_not_go_with_fp8_is_refused_before_a_model_is_loaded(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"(?s)model.fp8: .*{named}"):
        load_recipe(recipe_of(tmp_path, **TOGETHER[named]))


def test_a_model_that_does_not_run_in_fp8_is_refused_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(recipe_of(tmp_path))
    with pytest.raises(ConfigError, match="experts are no linear layers"):
        plan_of(recipe, config=AutoConfig.for_model("qwen3_moe").to_dict())
    odd = {"hidden_size": 40, "intermediate_size": 40, "num_attention_heads": 4}
    for family, sizes in (("gpt2", {}), ("llama", odd)):
        config = AutoConfig.for_model(family, **sizes).to_dict()
        with pytest.raises(ConfigError, match="has a linear layer whose sides are multiples of 16"):
            plan_of(recipe, config=config)
    monkeypatch.setattr(comm, "world", lambda: comm.World(rank=0, size=2))
    with pytest.raises(ConfigError, match="spread over processes"):
        modelled(replace(recipe, parallel=ParallelSettings(name="zero3")))


def test_a_correction_is_taken_of_the_native_engine_with_fp8_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = {"rollout": {"engine": {"name": "native", "correct": {"high": 3.0}}}}
    assert load_recipe(recipe_of(tmp_path, **engine)).rollout.engine.correct.high == 3.0  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="nothing to correct"):
        load_recipe(recipe_of(tmp_path, model={"fp8": None}, **engine))
