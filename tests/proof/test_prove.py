"""The proof finds what a run would do otherwise than the model itself, where the model is; and what it does not see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
from finer import finer
from planted import built
from sample_texts import TOKENIZER
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    Gemma2Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from groupwise.config.settings import LoraSettings, ModelSettings, OptimizerSettings
from groupwise.errors import ConfigError
from groupwise.models.loading import make_policy
from groupwise.models.lora import adapt
from groupwise.models.passes import forward
from groupwise.proof import passes, texts
from groupwise.proof.prove import ModelProof, prove
from groupwise.proof.texts import NATIVE, SMALL, TRANSFORMERS
from groupwise.rollout.native.forward import is_known
from groupwise.training.optimizer import Optimizer

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 16,
}
BF16, AGAIN = torch.bfloat16, ModelSettings(gradient_checkpointing=True)
WIDE = {"max_position_embeddings": 1024}


def proven(kind: type[PreTrainedModel], config: type = LlamaConfig, to: torch.dtype = torch.float32, **options: Any) -> ModelProof:
    """Of a small model.   changes: to its configuration; settings: of its policy; others as of `prove`."""
    changes, settings = options.pop("changes", {}), options.pop("settings", None)
    settings = settings or ModelSettings(dtype="bfloat16" if to == BF16 else "float32")
    return prove(make_policy(built(kind, config, **changes).to(to), TOKENIZER, settings), **options)


# Planted faults: right in a forward pass of their own, wrong on the way of a run.

SINGLE = "set model.attention to 'single' and rollout.engine to 'transformers'"
SCORING: dict[type[PreTrainedModel], tuple[type, dict[str, Any]]] = {
    planted.IgnoresItsWindow: (MistralConfig, {"sliding_window": 48}),
    planted.ShiftsPositions: (LlamaConfig, {}),
    planted.DropsInScoring: (LlamaConfig, {}),
    planted.TiesTheWrongHead: (LlamaConfig, {}),
    planted.UsesTheLongestPosition: (LlamaConfig, {}),
    planted.MixesNeighbours: (LlamaConfig, {}),
    planted.KeepsTables: (LlamaConfig, {}),
    planted.NarrowsADeepLayer: (LlamaConfig, {"num_hidden_layers": 6}),
    planted.OwnHead: (LlamaConfig, {}),
    planted.LongPass: (LlamaConfig, WIDE),
    planted.Capacity: (LlamaConfig, WIDE),
    planted.HidesAnId: (LlamaConfig, WIDE),
}


@pytest.mark.parametrize("kind", SCORING, ids=lambda kind: kind.__name__)
def test_planted_faults_of_scoring_are_found(kind: type[PreTrainedModel]) -> None:
    config, changes = SCORING[kind]
    proven(kind.__mro__[1], config, changes=changes, longest=300)
    with pytest.raises(ConfigError, match=rf"{kind.__name__} cannot be trained like this: scoring does not equal .*; {SINGLE}$"):
        proven(kind, config, changes=changes, longest=300)


@pytest.mark.parametrize("kind", [planted.DeepWindow, planted.FarWindow, planted.FartherWindow])
def test_windows_that_a_class_puts_into_its_masks_itself_are_refused(kind: type[PreTrainedModel]) -> None:
    """However deep the layer and however far the window."""
    with pytest.raises(ConfigError, match=rf"^{kind.__name__} builds the masks of its attention itself; {SINGLE}"):
        make_policy(built(kind, LlamaConfig, num_hidden_layers=6, **WIDE), TOKENIZER)


TRAINING: dict[type[PreTrainedModel], str] = {
    planted.ForgetsAGradient: r"training does not equal .*\(model.layers.0.mlp.\w+.weight gets no gradient\); set model.attention",
    planted.LearnsWhatItDoesNotHold: r"training does not equal .*\(the gradient of scale is none of the model's own pass\)",
    planted.HalfAGradient: r"training does not equal .*\(the gradient of .* differs by 0.\d+ of its norm\)",
    planted.DropsWhenComputedAgain: r"recompute does not equal .*; set model.gradient_checkpointing to false$",
}


@pytest.mark.parametrize("kind", TRAINING, ids=lambda kind: kind.__name__)
def test_planted_faults_of_updates_are_found(kind: type[PreTrainedModel]) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__} cannot be trained like this: {TRAINING[kind]}"):
        proven(kind, changes={"num_hidden_layers": 3}, recompute=True)


SAMPLING: dict[type[PreTrainedModel], tuple[type, dict[str, Any]]] = {
    planted.SamplesWithOldKeys: (LlamaConfig, {}),
    planted.DecodesWronglyFarOn: (MistralConfig, {"sliding_window": 8}),
    planted.DecodesWronglyBehindHundred: (LlamaConfig, WIDE),
    planted.PrefillsWronglyBehindHundred: (LlamaConfig, WIDE),
    planted.DecodesManyRowsWrongly: (LlamaConfig, {}),
    planted.DecodesTheLastRowsWrongly: (LlamaConfig, {}),
    planted.TakesAnothersPrefill: (LlamaConfig, {}),
}


@pytest.mark.parametrize("to", [torch.float32, BF16])
@pytest.mark.parametrize("kind", SAMPLING, ids=lambda kind: kind.__name__)
def test_planted_faults_of_sampling_are_found(kind: type[PreTrainedModel], to: torch.dtype) -> None:
    config, changes = SAMPLING[kind]
    proven(kind, config, to, changes=changes, longest=160)
    with pytest.raises(ConfigError, match=rf"{kind.__name__} cannot .*: sampling .*; set rollout.engine to 'transformers'$"):
        proven(kind, config, to, changes=changes, longest=160, sampler=NATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("to", [torch.float32, BF16])
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 8}])
def test_a_fault_in_what_follows_an_answer_is_found_where_a_world_answers(changes: dict[str, Any], to: torch.dtype) -> None:
    family, config = (MistralForCausalLM, MistralConfig) if changes else (LlamaForCausalLM, LlamaConfig)
    talking = replace(NATIVE, conversations=True)
    assert proven(family, config, to, changes=changes, sampler=talking, train=False).paths[-2:] == ("sampling", "conversations")
    proven(planted.HearsAnswersWrongly, to=to, sampler=NATIVE, train=False)
    with pytest.raises(ConfigError, match=r"HearsAnswersWrongly cannot .*: conversations .*rollout.engine to 'transformers'"):
        proven(planted.HearsAnswersWrongly, to=to, sampler=talking, train=False)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["shared", "single"])
def test_turns_by_transformers_generate_are_proven_too(attention: Any) -> None:
    talking, settings = replace(TRANSFORMERS, conversations=True), ModelSettings(attention=attention)
    changes = {"rope_parameters": LONG, "original_max_position_embeddings": 16}
    proof = proven(Phi3ForCausalLM, Phi3Config, changes=changes, settings=settings, sampler=talking)
    assert "conversations" in proof.paths and 16 in proof.switches


@pytest.mark.parametrize("kind", [planted.LosesHalfOfAGradientInBfloat16, planted.ForgetsAGradientInBfloat16])
@pytest.mark.parametrize("dtype", ["autocast", "bfloat16"])
def test_gradients_are_compared_in_the_runs_type_too(kind: type[PreTrainedModel], dtype: Any) -> None:
    proven(kind)
    to, settings = (BF16 if dtype == "bfloat16" else torch.float32), ModelSettings(dtype=dtype)
    proven(LlamaForCausalLM, to=to, settings=settings)
    with pytest.raises(ConfigError, match=rf"{kind.__name__} cannot .*: training does not equal .*; set model.dtype to float32"):
        proven(kind, to=to, settings=settings)


def test_gradients_that_an_optimizer_sums_in_float32_are_compared_too() -> None:
    """Its hooks take them away from the parameters as they come."""
    settings = ModelSettings(dtype="bfloat16")
    policy = make_policy(built(planted.ForgetsAGradientInBfloat16, LlamaConfig).to(BF16), TOKENIZER, settings)
    optimizer = Optimizer(policy.model, OptimizerSettings(), 1)
    with pytest.raises(ConfigError, match=r"training does not equal .*; set model.dtype to float32"):
        prove(policy)
    policy.model.get_input_embeddings().weight.sum().backward()
    assert optimizer.masters[0].grad is not None, "the hooks are gone"


def test_a_class_that_fails_in_bfloat16_alone_may_be_trained_in_float32() -> None:
    proven(planted.RefusesBfloat16, sampler=NATIVE)
    with pytest.raises(ConfigError, match=r"^RefusesBfloat16 .*: it fails \(RuntimeError.*\); set model.dtype to float32$"):
        proven(planted.RefusesBfloat16, to=BF16, sampler=NATIVE)


# What it does not see: see docs/models.md.

ROUNDED = {
    planted.RotaryInBfloat16: None,
    planted.NormsInBfloat16: None,
    planted.RoundsShortTextsInBfloat16: None,
    planted.SamplesWithCoarseNorms: NATIVE,
    planted.DecodesFromRoundedAngles: NATIVE,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDED, ids=lambda kind: kind.__name__)
def test_what_only_rounds_in_bfloat16_is_found_by_the_finer_comparison_of_the_sweep(kind: type[PreTrainedModel]) -> None:
    proven(kind, to=BF16, sampler=ROUNDED[kind], longest=800, changes=WIDE)
    finer(make_policy(built(LlamaForCausalLM, LlamaConfig, **WIDE), TOKENIZER), "bfloat16", 800, ROUNDED[kind])
    with pytest.raises(ConfigError, match=r"in bfloat16 .* from float32"):
        finer(make_policy(built(kind, LlamaConfig, **WIDE), TOKENIZER), "bfloat16", 800, ROUNDED[kind])


def test_a_cap_that_scores_do_not_reach_changes_nothing() -> None:
    proven(planted.ForgetsItsCap, Gemma2Config, changes={"head_dim": 8})
    with pytest.raises(ConfigError, match=r"ForgetsItsCap .*: scoring does not equal"):
        proven(planted.ForgetsItsCap, Gemma2Config, changes={"head_dim": 8, "attn_logit_softcapping": 1.0})


class ShiftsFarPositions(planted.ShiftsPositions):
    """Those behind 200 tokens of a text."""

    first = 200


def test_what_begins_beyond_the_runs_lengths_is_not_looked_for() -> None:
    proven(ShiftsFarPositions, changes=WIDE, longest=150)
    with pytest.raises(ConfigError, match=r"ShiftsFarPositions .*: scoring"):
        proven(ShiftsFarPositions, changes=WIDE, longest=250)


# Where, and of what.


DENSE_FLEX = """
import torch
from planted import TOKENIZER, built
from stand_in_device import stand_in
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from groupwise.models.loading import make_policy
from groupwise.ops.cuda import flex_attention
from groupwise.proof.prove import prove
from groupwise.proof.texts import NATIVE, TRANSFORMERS


def dense(query, key, value, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
    assert score_mod is None and return_aux == AuxRequest(lse=True)
    place, shared = torch.arange(query.shape[2], device=query.device), query.shape[1] // key.shape[1]
    seen = block_mask.mask_mod(None, None, place[:, None], place[None])
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = (scale * query @ key.transpose(2, 3)).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value, AuxOutput(scores.logsumexp(-1))


flex_attention._compiled_flex = lambda: dense  # a kernel that a GPU alone has, by its definition
"""
ON_A_DEVICE = (
    DENSE_FLEX
    + """
with stand_in() as device:
    for model in (built(LlamaForCausalLM, LlamaConfig), built(MistralForCausalLM, MistralConfig, sliding_window=8)):
        policy, seen = make_policy(model, TOKENIZER), set()
        model.to(device)
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs: seen.add(kwargs["hidden_states"].device), with_kwargs=True
            )
        for sampler in (NATIVE, TRANSFORMERS):
            print(prove(policy, longest=40, sampler=sampler, recompute=True).line[1])
        print(*seen)
"""
)


def on_a_device(program: str) -> list[str]:
    """What a program prints that uses the stand-in, in a process of its own."""
    fixtures = str(Path(__file__).parents[1] / "fixtures")
    path = os.pathsep.join([fixtures, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    return ran.stdout.splitlines()


FLASH_ON_A_DEVICE = (
    DENSE_FLEX
    + """
from planted import FLASH_FAULTS
from groupwise.config.settings import ModelSettings
from groupwise.errors import ConfigError
from groupwise.ops.cuda import varlen_attention

right = {name: getattr(varlen_attention, name) for name in ("families_of", "merged")}
with stand_in() as device:
    for name, (place, fault) in [("nothing", ("merged", right["merged"])), *FLASH_FAULTS.items()]:
        policy = make_policy(built(LlamaForCausalLM, LlamaConfig), TOKENIZER, ModelSettings(device="cpu", dtype="autocast"))
        policy.model.to(device)
        for attribute, function in right.items():
            setattr(varlen_attention, attribute, function)
        setattr(varlen_attention, place, fault)
        try:
            print(name, prove(policy, longest=40).line[1], sep=" | ")
        except ConfigError as error:
            print(name, error, sep=" | ")
"""
)


@pytest.mark.slow
def test_planted_faults_of_flash_attention_are_found_in_the_runs_type() -> None:
    """The kernel of bfloat16 is another than that of float32, so that the comparison in float32 says nothing of it."""
    right, *wrong = (line.split(" | ") for line in on_a_device(FLASH_ON_A_DEVICE))
    assert "scoring, training equal its own pass on gpu in float32 and autocast" in right[1]
    assert [name for name, _ in wrong] == list(planted.FLASH_FAULTS)
    for name, text in wrong:
        place = "training" if name == "gradients of the first part alone" else "attention"
        assert f"cannot be trained like this: {place} does not equal" in text and text.endswith("set model.dtype to float32"), name


@pytest.mark.slow
def test_the_proof_computes_where_the_policy_is() -> None:
    """On a stand-in for a GPU all that attention sees lies there."""
    found = on_a_device(ON_A_DEVICE)
    for family, lines in (("Llama", found[:3]), ("Mistral", found[3:])):
        assert lines[2] == "gpu:0", "and nowhere else"
        for line in lines[:2]:
            assert line.startswith(
                f"{family}ForCausalLM: scoring, training, recompute, sampling equal its own pass on gpu in float32, at "
            )


def test_the_plan_says_what_was_proven_and_where() -> None:
    label, line = proven(MistralForCausalLM, MistralConfig, changes={"sliding_window": 8}, sampler=NATIVE, recompute=True).line
    assert label == "proven" and line.startswith(
        "MistralForCausalLM: scoring, training, recompute, sampling equal its own pass on cpu in float32, at "
    )
    assert re.search(r", across 8, to \de-\d\d nats$", line)
    _, line = proven(LlamaForCausalLM, to=BF16, train=False).line
    assert line.startswith("LlamaForCausalLM: scoring equals its own pass on cpu in float32 and bfloat16, at ")


def test_a_large_model_on_a_cpu_is_asked_less_and_behind_its_windows_still(monkeypatch: pytest.MonkeyPatch) -> None:
    full = proven(MistralForCausalLM, MistralConfig, changes={"sliding_window": 40}, sampler=NATIVE)
    monkeypatch.setattr(texts, "LARGE", 100)
    small = proven(MistralForCausalLM, MistralConfig, changes={"sliding_window": 40}, sampler=NATIVE, recompute=True)
    assert small.paths == ("scoring", "training", "recompute", "sampling")
    assert small.lengths[-1] == 42 < full.lengths[-1] and small.lengths[0] <= 6
    with pytest.raises(ConfigError, match=r"IgnoresItsWindow .*: scoring"):
        proven(planted.IgnoresItsWindow, MistralConfig, changes={"sliding_window": 40})
    for kind in (planted.ShiftsPositions, planted.KeepsTables, planted.MixesNeighbours, planted.UsesTheLongestPosition):
        with pytest.raises(ConfigError, match=rf"{kind.__name__} .*: scoring"):
            proven(kind)
    with pytest.raises(ConfigError, match=r"ForgetsAGradient .*: training"):
        proven(planted.ForgetsAGradient)
    with pytest.raises(ConfigError, match=r"SamplesWithOldKeys .*: sampling"):
        proven(planted.SamplesWithOldKeys, sampler=NATIVE)


def test_of_many_parameters_the_gradients_of_some_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MANY", 100)
    policy = make_policy(built(LlamaForCausalLM, LlamaConfig, num_hidden_layers=4), TOKENIZER)
    policy.model.model.layers[2].mlp.register_forward_hook(lambda module, args, out: out)  # another kind of block
    with passes.some_gradients(policy):
        asked = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    taken = [f"model.layers.{block}.mlp.up_proj.weight" in asked for block in range(4)]
    assert taken == [True, False, True, False] and "model.layers.1.input_layernorm.weight" in asked
    assert "model.embed_tokens.weight" not in asked and "lm_head.weight" not in asked
    assert all(parameter.requires_grad for parameter in policy.model.parameters())
    with pytest.raises(ConfigError, match=r"HalfAGradient .*: training"):
        proven(planted.HalfAGradient, changes={"num_hidden_layers": 4})


def test_the_first_blocks_of_a_known_family_stand_for_those_that_are_alike() -> None:
    policy = make_policy(built(LlamaForCausalLM, LlamaConfig, num_hidden_layers=6), TOKENIZER)
    stack, config = policy.model.model.layers, policy.model.config
    blocks = [*stack]
    with passes.shortened(policy):
        assert [*stack] == blocks[:2] and is_known(policy)
    assert [*stack] == blocks and config.num_hidden_layers == 6 and is_known(policy)
    blocks[3].mlp.register_forward_hook(lambda module, args, out: out)
    with passes.shortened(policy):
        assert blocks[3] in [*stack], "it is unlike the others"
    blocks[4].mlp.register_full_backward_hook(lambda module, grads, of_output: grads)
    with passes.shortened(policy):
        assert blocks[4] in [*stack], "it is unlike the others"
    assert [*stack] == blocks and config.num_hidden_layers == 6


def test_a_large_model_whose_texts_run_one_by_one_is_proven_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "LARGE", 100)
    single = ModelSettings(attention="single")
    assert proven(LlamaForCausalLM, settings=single, sampler=TRANSFORMERS, longest=4).line[1].count("at 1 length from 3 to 3") == 1
    talking = replace(TRANSFORMERS, conversations=True)
    for longest in (4, 8):
        assert "conversations" in proven(LlamaForCausalLM, settings=single, sampler=talking, longest=longest).paths
    with pytest.raises(ConfigError, match="SeesAhead lets tokens see what comes after them"):
        proven(planted.SeesAhead, settings=single)


def test_of_a_large_model_every_token_is_compared_in_a_lower_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a median is judged by the spread, and both are chance where numbers are few."""
    monkeypatch.setattr(texts, "LARGE", 100)
    compared: dict[torch.dtype, list[int]] = {torch.float32: [], BF16: []}

    def counted(policy: Any, samples: Any, **named: Any) -> passes.PassResults:
        compared[policy.dtype] += [int((sample.weight > 0).sum()) for sample in samples]
        return passes.model_pass(policy, samples, **named)

    monkeypatch.setattr("groupwise.proof.prove.model_pass", counted)
    proven(LlamaForCausalLM, to=BF16, sampler=NATIVE)
    assert compared == {torch.float32: [1, 1, 4], BF16: [4, 2, 4]}


class AroundBlock(nn.Module):
    """A block inside of a module of one's own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.block(*args, **named)


@pytest.mark.parametrize("place", [1, 3])
def test_a_large_model_with_a_block_of_ones_own_is_proven_as_a_whole(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "LARGE", 100)
    policy = make_policy(built(LlamaForCausalLM, LlamaConfig, num_hidden_layers=4), TOKENIZER)
    stack = policy.model.model.layers
    stack[place] = AroundBlock(stack[place])
    with passes.shortened(policy):
        assert len(stack) == 4
    assert prove(policy).paths == ("scoring", "training")


def test_of_a_model_that_reads_images_the_blocks_of_its_text_part_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "LARGE", 100)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    states = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
    states |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    size = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6}
    text = {**size, **heads, **states, "layer_types": ["linear_attention", "full_attention"] * 3}
    image = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=image))
    policy = make_policy(model, TOKENIZER)
    stack, encoder = policy.model.model.language_model.layers, policy.model.model.visual.blocks
    with passes.shortened(policy):
        assert (len(stack), len(encoder)) == (2, 2)
    assert len(stack) == 6
    assert prove(policy, longest=20).paths == ("scoring", "training")
    monkeypatch.setattr(passes, "MANY", 100)
    with passes.some_gradients(policy):
        asked = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {f"model.language_model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)} <= asked


@pytest.mark.parametrize("to", [torch.float32, BF16])
def test_what_was_proven_is_as_it_was(to: torch.dtype) -> None:
    policy = make_policy(
        built(LlamaForCausalLM, LlamaConfig).to(to), TOKENIZER, ModelSettings(dtype="bfloat16" if to == BF16 else "float32")
    )
    adapted = adapt(policy, LoraSettings(rank=2, targets=("q_proj",)), base="")
    before = {name: parameter.clone() for name, parameter in adapted.model.named_parameters()}
    adapted.model.train()
    prove(adapted, sampler=NATIVE, recompute=True)
    assert not adapted.model.training
    for name, parameter in adapted.model.named_parameters():
        assert parameter.dtype == to and torch.equal(parameter, before[name]) and parameter.grad is None, name


class MixedBelow(planted.MixingAttention):
    """In a model whose class is sound."""


def test_a_fault_of_one_model_alone_is_found() -> None:
    """The class is sound, and was proven; somebody has put another module into this one model, or a hook."""
    proven(LlamaForCausalLM)
    model = built(LlamaForCausalLM, LlamaConfig)
    model.model.layers[1].self_attn = MixedBelow(model.config, 1).eval()
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot .*: scoring .*differs by"):
        prove(make_policy(model, TOKENIZER))
    model = built(LlamaForCausalLM, LlamaConfig)
    model.model.norm.register_forward_hook(lambda m, args, out: out * 1.1 if planted.packed(model) else out)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot .*: scoring .*differs by"):
        prove(make_policy(model, TOKENIZER))


def test_a_model_that_sees_what_comes_after_is_no_language_model() -> None:
    with pytest.raises(ConfigError, match="SeesAhead lets tokens see what comes after them"):
        proven(planted.SeesAhead, settings=ModelSettings(attention="single"))


class Noisy(LlamaForCausalLM):
    """Drops units in every pass."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, args, out: F.dropout(out, 0.1, True))


def test_a_model_that_answers_otherwise_each_time_is_named() -> None:
    with pytest.raises(ConfigError, match="Noisy gives other log-probs each time it is asked: set the dropout"):
        proven(Noisy)


def test_a_head_that_does_more_than_it_says_is_refused_one_by_one_too() -> None:
    with pytest.raises(ConfigError, match=r"OwnHead .*: scoring .*; this family is not supported: use another model"):
        proven(planted.OwnHead, settings=ModelSettings(attention="single"))


def test_numbers_that_are_none_are_named_on_either_side() -> None:
    model = built(LlamaForCausalLM, LlamaConfig)
    model.model.norm = planted.NotANumber(model.model.norm, model)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot .*: scoring .*a log-prob is not finite"):
        prove(make_policy(model, TOKENIZER))
    model = built(LlamaForCausalLM, LlamaConfig)
    model.model.norm.register_forward_hook(lambda module, args, out: out * torch.nan)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM's own forward pass gives log-probs that are not finite.*config.json"):
        prove(make_policy(model, TOKENIZER))


class OutOfMemory(LlamaForCausalLM):
    """On any way but its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(self._hook)

    def _hook(self, *_: Any) -> None:
        if planted.packed(self):
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("to", [torch.float32, BF16])
def test_memory_that_does_not_suffice_is_no_fault_of_the_family(to: torch.dtype) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        proven(OutOfMemory, to=to, sampler=NATIVE)


def test_without_room_for_float32_the_runs_type_is_compared_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupwise.proof.prove._has_room", lambda policy: False)
    proof = proven(LlamaForCausalLM, to=BF16, sampler=NATIVE)
    assert proof.place == "on cpu in bfloat16" and proof.paths == ("scoring", "training", "sampling")
    for kind in (planted.MixesNeighbours, planted.TiesTheWrongHead, planted.ShiftsPositions, planted.ForgetsAGradient):
        with pytest.raises(ConfigError, match=f"{kind.__name__} cannot .*: (scoring|training) does not equal"):
            proven(kind, to=BF16)


@pytest.mark.parametrize(("kind", "config"), [(MixtralForCausalLM, MixtralConfig), (GptOssForCausalLM, GptOssConfig)])
def test_the_loss_that_balances_experts_is_compared(
    kind: type[PreTrainedModel], config: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5, "head_dim": 8}
    changes["num_experts_per_tok"] = 2  # with all of them the loss is a constant
    assert "router" in proven(kind, config, changes=changes).paths

    def wrong(policy: Any, batch: Any) -> Any:
        found = forward(policy, batch)
        return replace(found, router_loss=1.1 * found.router_loss)

    monkeypatch.setattr("groupwise.models.passes.forward", wrong)
    with pytest.raises(ConfigError, match=f"{kind.__name__} cannot .*: router .*; set output_router_logits to false"):
        proven(kind, config, changes=changes | {"rms_norm_eps": 1e-4})


class IgnoresItsAdapter(LlamaForCausalLM):
    """In packed streams."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.register_forward_pre_hook(self._hook)

    def _hook(self, module: nn.Module, _: Any) -> None:
        module.q_proj._disable_adapters = planted.packed(self)  # type: ignore[union-attr]


def test_an_adapter_is_proven_as_it_will_be_and_not_as_it_begins() -> None:
    """Its second factor begins at 0, where nothing that ignores it is wrong."""

    def adapted(kind: type[PreTrainedModel]) -> Any:
        return adapt(make_policy(built(kind, LlamaConfig), TOKENIZER), LoraSettings(rank=2, targets=("q_proj",)), base="")

    assert prove(adapted(LlamaForCausalLM), sampler=NATIVE).paths == ("scoring", "training", "sampling")
    with pytest.raises(ConfigError, match=r"IgnoresItsAdapter cannot .*: scoring"):
        prove(adapted(IgnoresItsAdapter))


def test_a_fault_in_experts_that_begin_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Qwen3MoeSparseMoeBlock.forward

    def forgets(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = right(self, hidden, *args, **kwargs)
        return torch.cat([out[:, :12], 0.0 * out[:, 12:]], 1)

    monkeypatch.setattr(Qwen3MoeSparseMoeBlock, "forward", forgets)
    shape = {"num_hidden_layers": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM cannot be trained like this: scoring does not equal"):
        proven(Qwen3MoeForCausalLM, Qwen3MoeConfig, changes={"decoder_sparse_step": 4} | shape)


def test_texts_lie_on_both_sides_of_what_the_run_reaches() -> None:
    policy = make_policy(built(MistralForCausalLM, MistralConfig, sliding_window=30, **WIDE), TOKENIZER)
    for longest, across in ((20, False), (60, True)):
        prompts = texts.prompts_of(policy, SMALL, longest, 0)
        sizes = [prompt.size for prompt in prompts]
        assert (max(sizes) >= 28) == across and max(sizes) < longest
        assert all(ids.dtype == np.int64 and ids.max() < policy.vocabulary for ids in prompts)
