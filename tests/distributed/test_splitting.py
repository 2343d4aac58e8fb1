"""What cannot be split is refused before weights are read; the plan counts what each process holds of a split model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hybrids import HYBRIDS, hybrid
from transformers import AutoConfig, AutoModelForCausalLM

from groupwise.config.recipes import load_recipe
from groupwise.config.settings import ParallelSettings
from groupwise.distributed.layout import decided
from groupwise.errors import ConfigError
from groupwise.models.shape import Shape
from groupwise.models.sharded import in_context
from groupwise.models.splitting import demand_followed, demand_split
from groupwise.runs.plan import Load, process_lines, process_memory
from groupwise.runs.prepared import modelled

LLAMA = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2, "intermediate_size": 96}
MODELS: dict[str, tuple[dict[str, Any], int, str]] = {
    "gpt2": ({}, 2, "transformers has no plan to split the attention of a 'gpt2' model"),
    "llama": (LLAMA, 2, r"2 processes cannot share 3 key-value heads evenly: take a divisor of 3"),
    "qwen2": (LLAMA, 4, r"4 processes cannot share 6 attention heads evenly: take a divisor of 6"),
}


@pytest.mark.parametrize("family", MODELS)
def test_models_that_cannot_be_split_are_refused(family: str) -> None:
    fields, count, said = MODELS[family]
    config = AutoConfig.for_model(family, **fields).to_dict()
    with pytest.raises(ConfigError, match=rf"parallel.tensor: {said}.* \(parallel: zero3 shards any model\)"):
        demand_split(config, ParallelSettings(tensor=count))
    demand_split(config, ParallelSettings())


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3", "transformers has no plan to divide experts of a 'qwen3' model"),
        ("mixtral", "3 processes cannot divide 8 experts evenly: take a divisor of 8"),
        ("aria_text", "3 processes cannot divide 8 experts evenly: take a divisor of 8"),
        ("ernie4_5_moe", "3 processes cannot divide 64 experts evenly: take a divisor of 64"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(family: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"parallel.expert: {said}.*leave parallel.expert out"):
        demand_split(AutoConfig.for_model(family).to_dict(), ParallelSettings(expert=3))


MAMBA = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("family", "fields", "layer"),
    [
        ("jamba", MAMBA | {"num_experts": 1}, "JambaMambaMixer"),
        ("falcon_mamba", MAMBA, "FalconMambaMixer"),
        ("recurrent_gemma", MAMBA | {"lru_width": 32}, "RecurrentGemmaRecurrentBlock"),
        ("kimi_linear", MAMBA, "KimiLinearDeltaAttention"),
    ],
)
def test_recurrent_layers_whose_states_nobody_follows_are_refused_by_name(family: str, fields: dict[str, Any], layer: str) -> None:
    config = AutoConfig.for_model(family, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=rf"parallel.context: {layer} of a '{family}' model passes a state.*leave context out"):
        demand_followed(model)


@pytest.mark.parametrize("family", HYBRIDS)
def test_recurrent_layers_that_follow_segments_are_split(family: str) -> None:
    demand_followed(hybrid(family))


def test_a_model_whose_states_nobody_follows_is_refused_before_its_weights_are_read(write_recipe: Callable, tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, "run", parallel={"context": 2}, rewards=[{"function": "repetition"}]))
    config = AutoConfig.for_model("jamba", **MAMBA, num_experts=1).to_dict()
    with pytest.raises(ConfigError, match=r"parallel.context: JambaMambaMixer of a 'jamba' model passes a state"):
        modelled(recipe, shared=False, config=config)


def test_a_model_that_packs_no_streams_is_not_split(tiny_policy: Callable) -> None:
    policy = replace(tiny_policy(), attention="single")
    with pytest.raises(ConfigError, match="LlamaForCausalLM runs a forward pass per sequence and packs no streams"):
        in_context(policy, ParallelSettings(context=2), policy.device)


def test_an_older_transformers_is_refused_with_the_version_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.17.1")
    with pytest.raises(ConfigError, match=r"need transformers 5.23 or newer, and 5.17.1 is installed: pip install"):
        demand_split(AutoConfig.for_model("llama", **LLAMA).to_dict(), ParallelSettings(tensor=3))


def test_the_processes_must_divide() -> None:
    with pytest.raises(ConfigError, match=r"parallel.tensor: 4 processes hold a model together, and the run has 6"):
        decided(ParallelSettings(tensor=4), 10, 6)
    assert decided(ParallelSettings(name="zero3", tensor=2), 10, 2).name == "ddp"
    assert decided(ParallelSettings(tensor=2), 3_000_000_000, 8) == ParallelSettings(name="zero3", shards=4, tensor=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": {"tensor": 2, "name": "zero3", "offload": True}}, "shards and offload are not for models that are split"),
        ({"parallel": {"tensor": 2}, "model": {"attention": "single"}}, "model.attention 'single' runs each model as it is"),
        ({"parallel": {"tensor": 2, "context": 2}}, "tensor, expert and context are not combined"),
        ({"parallel": {"expert": 2, "context": 2}}, "tensor, expert and context are not combined"),
        ({"parallel": {"expert": 2, "tensor": 4}}, r"parallel.expert \(2\) must be a multiple of parallel.tensor \(4\)"),
        ({"parallel": {"expert": 2}, "model": {"path": "x/y", "scratch": None, "lora": {}}}, "an adapter's factors are not split"),
        ({"parallel": {"context": 2}, "model": {"attention": "single"}}, "'single' packs no streams"),
        (
            {"parallel": {"context": 2}, "model": {"path": "x/y", "scratch": None, "lora": {"dropout": 0.1}}},
            "model.lora.dropout: its masks",
        ),
        ({"parallel": {"tensor": 2}, "model": {"path": "x/y", "scratch": None, "lora": {}}}, "an adapter's factors are not split"),
    ],
)
def test_settings_that_a_split_model_does_not_know_are_refused(
    changes: dict[str, Any], said: str, write_recipe: Callable, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe(write_recipe(tmp_path, "run", **changes))


def test_the_plan_of_a_split_model_counts_its_parts() -> None:
    """A model of 8 billion parameters on eight processes: two workers of four, sharded too."""
    shape = Shape(
        parameters=8_000_000_000, layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_width=128,
        vocabulary=128_256, bytes_per_weight=2, bytes_per_product=2,
    )  # fmt: skip
    load = Load(prompts=8, group=8, prompt_tokens=256, completion_tokens=512, max_tokens_per_microbatch=8192)
    alone = process_memory(shape, load, prompts=8)
    split = process_memory(shape, load, decided(ParallelSettings(tensor=4), 10, 4), prompts=2, world=4)
    both = process_memory(shape, load, decided(ParallelSettings(name="zero3", tensor=4), 10, 8), prompts=1, world=8)
    assert split.weights == alone.weights // 4
    assert split.optimizer == alone.optimizer // 4
    assert alone.activations / 4 < split.activations < alone.activations * 0.6
    assert split.whole == alone.weights
    assert both.weights == alone.weights // 8
    lines = dict(process_lines(shape, load, decided(ParallelSettings(tensor=4), 10, 4), 4))
    assert "each matrix of them split over 4 (tensor)" in lines["processes"]


def test_the_plan_of_split_streams_counts_their_activations_once() -> None:
    shape = Shape(
        parameters=8_000_000_000, layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_width=128,
        vocabulary=128_256, bytes_per_weight=2, bytes_per_product=2,
    )  # fmt: skip
    load = Load(prompts=4, group=1, prompt_tokens=30_000, completion_tokens=2_000, max_tokens_per_microbatch=32_000)
    alone = process_memory(shape, load, decided(ParallelSettings(name="zero3"), 10, 4), prompts=1, world=4)
    split = process_memory(shape, load, decided(ParallelSettings(name="zero3", context=4), 10, 4), prompts=1, world=4)
    assert split.weights == alone.weights
    assert alone.activations / 4 <= split.activations < alone.activations / 3
    lines = dict(process_lines(shape, load, decided(ParallelSettings(context=4), 10, 4), 4))
    assert "4 split the positions of a micro-batch (context)" in lines["processes"]


@pytest.mark.parametrize(("name", "size", "share"), [("ddp", 2, 0.1 + 0.9 / 2), ("zero3", 4, 1 / 4)])
def test_the_plan_of_divided_experts_counts_them_apart(name: Any, size: int, share: float) -> None:
    shape = Shape(
        parameters=1_000_000_000, experts=900_000_000, layers=8, hidden=1024, intermediate=4096, heads=16, kv_heads=4,
        head_width=64, vocabulary=32_000,
    )  # fmt: skip
    load = Load(prompts=8, group=8, prompt_tokens=256, completion_tokens=512, max_tokens_per_microbatch=8192)
    parallel = decided(ParallelSettings(name=name, expert=2), 10, size)
    need = process_memory(shape, load, parallel, prompts=2, world=size)
    assert need.weights == pytest.approx(4e9 * share, rel=1e-6)
    assert need.whole == 4_000_000_000
    assert "experts divided over 2 (expert)" in dict(process_lines(shape, load, parallel, size))["processes"]
