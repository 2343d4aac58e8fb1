"""Bases in few bits under an adapter: the numbers of bitsandbytes, the same in every pass, saved and continued to the bit."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_models import block_checkpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from groupwise import train
from groupwise.config.recipes import parse_stages
from groupwise.config.settings import LoraSettings, ModelSettings, RolloutSettings
from groupwise.errors import ConfigError
from groupwise.inspection.replay import RecordedRun
from groupwise.models import quantized
from groupwise.models.loading import live_model, load_policy, read_blueprint
from groupwise.models.lora import adapt, restore_adapter
from groupwise.models.policy import Policy, without_adapter
from groupwise.models.quantized import FORMATS, QuantizedLinear, count_numbers, quantized_layers, quantized_size
from groupwise.models.saving import save, save_to_resume
from groupwise.models.sharded import frozen_copy
from groupwise.proof.prove import prove
from groupwise.records import Sample
from groupwise.rollout.vllm.weight_ranges import own_ranges
from groupwise.runs.engines import make_engine, sampler_of
from groupwise.runs.inputs import resolved
from groupwise.runs.prepared import plan_of
from groupwise.runs.run_models import weightless
from groupwise.training.objectives import language_model
from groupwise.training.passes import score

LORA = LoraSettings(rank=4, alpha=8.0)
NF4 = torch.tensor(
    [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
)  # fmt: skip
"""The 16 numbers of appendix E of 2305.14314."""


@pytest.fixture(params=["nf4", "int8"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes", reason="NF4 is computed by bitsandbytes, which is not installed")
    return request.param


@pytest.fixture
def base(tmp_path: Path) -> Callable[..., Path]:
    """`base(family)`: the folder of a random checkpoint whose rows are blocks of 64."""

    def make(family: str = "llama", hidden: int = 192) -> Path:
        folder = tmp_path / f"base-{family}-{hidden}"
        return folder if folder.exists() else block_checkpoint(folder, family, hidden)

    return make


def adapted(folder: Path, kind: str | None, *, seed: int = 0, **options: Any) -> Policy:
    """A policy whose adapter does something."""
    policy = adapt(load_policy(ModelSettings(path=str(folder), quantize=kind, **options)), LORA, base=str(folder))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name in policy.adapter.trained:  # type: ignore[union-attr]
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def logp_of(policy: Policy, samples: Sequence[Sample]) -> np.ndarray:
    return np.concatenate(score(policy, samples, max_tokens_per_microbatch=60).logp)


def matrix(rows: int = 5, columns: int = 192) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def test_nf4_is_the_nearest_of_the_papers_16_numbers() -> None:
    pytest.importorskip("bitsandbytes", reason="NF4 is computed by bitsandbytes, which is not installed")
    weight = matrix()
    codes, scale = FORMATS["nf4"].quantize(weight)
    blocks = weight.view(5, 3, 64)
    largest = blocks.abs().amax(-1, keepdim=True)
    nearest = ((blocks / largest)[..., None] - NF4).abs().argmin(-1)
    expected = (NF4[nearest] * largest).view(5, 192)
    torch.testing.assert_close(FORMATS["nf4"].dequantize(codes, scale, torch.float32), expected, rtol=0, atol=1e-6)
    assert (codes.shape, scale.shape) == ((5, 96), (5, 3))


def test_int8_is_the_nearest_of_255_numbers_of_a_row_and_a_row_of_zeros_is_one() -> None:
    weight = matrix()
    weight[2] = 0.0
    codes, scale = FORMATS["int8"].quantize(weight)
    got = FORMATS["int8"].dequantize(codes, scale, torch.float32)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((got - weight).abs() <= 0.5001 * step).all() and (got[2] == 0).all()
    assert (codes.shape, scale.shape) == ((5, 192), (5, 1))


def test_quantising_again_changes_nothing(kind: str) -> None:
    """A base that was quantised and merged elsewhere keeps its numbers."""
    codes, scale = FORMATS[kind].quantize(matrix())
    once = FORMATS[kind].dequantize(codes, scale, torch.float32)
    again = FORMATS[kind].dequantize(*FORMATS[kind].quantize(once), torch.float32)
    torch.testing.assert_close(again, once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_product_and_its_gradient_are_those_of_the_plain_layer(kind: str, autocast: bool) -> None:
    layer = nn.Linear(192, 5)
    few = QuantizedLinear(layer, matrix(), FORMATS[kind])
    plain = nn.Linear(192, 5)
    plain.weight.data, plain.bias.data = few.weight, layer.bias.data
    x = torch.randn(2, 7, 192, requires_grad=True)
    gradients = []
    outputs = []
    for module in (few, plain):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs.append(module(x))
        (gradient,) = torch.autograd.grad(outputs[-1].float().square().sum(), x)
        gradients.append(gradient)
    tolerance = 3e-2 if autocast else 1e-5
    assert outputs[0].dtype == outputs[1].dtype == (torch.bfloat16 if autocast else torch.float32)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=tolerance, atol=tolerance * float(gradients[1].abs().max()))


def test_nothing_of_a_matrixs_size_is_kept_for_the_backward_pass(kind: str) -> None:
    few = QuantizedLinear(nn.Linear(192, 128, bias=False), matrix(128), FORMATS[kind])
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        few(torch.randn(3, 192, requires_grad=True))
    assert max((tensor.numel() for tensor in kept), default=0) < 192 * 128


@pytest.mark.parametrize("streamed", [True, False])
def test_the_layers_of_the_language_model_are_quantised_and_no_others(
    kind: str, streamed: bool, base: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read matrix by matrix or quantised when all of it is there: the same model."""
    blueprint = read_blueprint(ModelSettings(path=str(base()), quantize=kind))  # type: ignore[arg-type]
    if not streamed:
        monkeypatch.setattr(type(blueprint.source.source), "reader", lambda self: None)  # type: ignore[attr-defined]
    model = blueprint.load()
    plain = AutoModelForCausalLM.from_pretrained(base(), dtype=torch.float32)
    layers = quantized_layers(model)
    linear = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
    assert layers.keys() == linear - {"lm_head"}
    for name, parameter in plain.named_parameters():
        place, _, key = name.rpartition(".")
        if place in layers and key == "weight":
            expected = FORMATS[kind].dequantize(*FORMATS[kind].quantize(parameter), torch.float32)
            assert torch.equal(layers[place].weight, expected), name
        else:
            assert torch.equal(model.get_parameter(name), parameter), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert count_numbers(model) == sum(parameter.numel() for parameter in plain.parameters())
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_run_computes_the_models_own_pass_and_samples_by_it(
    kind: str, dtype: str, family: str, base: Callable[..., Path]
) -> None:
    policy = adapted(base(family), kind, dtype=dtype)
    settings = RolloutSettings(max_new_tokens=20)
    proof = prove(policy, longest=60, sampler=sampler_of(settings), recompute=True)
    assert {"scoring", "recompute", "sampling"} <= set(proof.paths)
    assert make_engine(policy, settings).path == "specialised"  # type: ignore[attr-defined]


def test_a_wrong_matrix_in_a_rollout_is_found_at_load(base: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = adapted(base(), "int8")
    original = type(policy.adapter).added_weights

    def added(self: Any, model: Any) -> Any:
        functions = original(self, model)
        name = next(name for name in functions if "down_proj" in name)
        return functions | {name: lambda: 1.03 * functions[name]()}

    monkeypatch.setattr(type(policy.adapter), "added_weights", added)
    with pytest.raises(ConfigError, match="sampling does not equal the model's own forward pass"):
        prove(policy, longest=60, sampler=sampler_of(RolloutSettings(max_new_tokens=20)))


def test_the_reference_is_the_base_as_it_is_quantised(
    kind: str, base: Callable[..., Path], random_samples: Callable[..., list[Sample]]
) -> None:
    samples, policy = random_samples(), adapted(base(), kind)
    untouched = load_policy(ModelSettings(path=str(base()), quantize=kind))  # type: ignore[arg-type]
    np.testing.assert_allclose(logp_of(frozen_copy(policy), samples), logp_of(untouched, samples), atol=1e-6)
    exact = load_policy(ModelSettings(path=str(base())))
    assert np.abs(logp_of(untouched, samples) - logp_of(exact, samples)).max() > 1e-3


def test_peft_and_bitsandbytes_load_the_adapter_to_the_same_log_probs(
    base: Callable[..., Path], random_samples: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    """The adapter on the base that transformers quantises by bitsandbytes.

    In evaluation mode bitsandbytes rounds products to bfloat16 on processors that have them."""
    pytest.importorskip("bitsandbytes", reason="NF4 is computed by bitsandbytes, which is not installed")
    from peft import PeftModel
    from transformers import BitsAndBytesConfig

    policy = adapted(base(), "nf4")
    save(policy, tmp_path / "final")
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(base(), quantization_config=options, device_map={"": "cpu"}, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(theirs, str(tmp_path / "final/adapter")).train()
    for sample in random_samples():
        sample = replace(sample, temperature=1.0)
        ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion]))
        with torch.no_grad():
            logits = theirs(input_ids=ids[None]).logits[0, sample.prompt.size - 1 : -1, : policy.vocabulary]
        logp = F.log_softmax(logits, -1).gather(1, ids[sample.prompt.size :, None])[:, 0]
        np.testing.assert_allclose(logp_of(policy, [sample]), logp.numpy(), atol=1e-5)


def test_what_is_saved_is_merged_into_the_dequantised_base(
    kind: str, base: Callable[..., Path], random_samples: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    """The exported model, and the adapter's folder or a checkpoint read again, give what was trained."""
    samples, policy = random_samples(), adapted(base(), kind)
    ours = logp_of(policy, samples)
    save(policy, tmp_path / "final")
    save_to_resume(policy, tmp_path / "kept")
    assert not list((tmp_path / "kept").glob("model*.safetensors"))
    assert json.loads((tmp_path / "kept/adapter_config.json").read_text())["base_model_name_or_path"] == str(base())
    for folder in ("final", "final/adapter", "kept"):
        read = load_policy(ModelSettings(path=str(tmp_path / folder)))
        np.testing.assert_allclose(logp_of(read, samples), ours, atol=2e-5, err_msg=folder)
    again = adapt(load_policy(ModelSettings(path=str(base()), quantize=kind)), LORA, base=str(base()), seed=7)  # type: ignore[arg-type]
    restore_adapter(again, tmp_path / "kept")
    np.testing.assert_array_equal(logp_of(again, samples), ours)


def test_merged_weights_are_not_rounded_again(kind: str, base: Callable[..., Path], tmp_path: Path) -> None:
    """That would undo what the adapter learnt; however the merged model is named, and by no other format."""
    policy = adapted(base(), kind)
    save(policy, tmp_path / "final")
    save_to_resume(policy, tmp_path / "kept")
    loaded = live_model(AutoModelForCausalLM.from_pretrained(tmp_path / "final"), policy.tokenizer)
    for path, start in (
        (str(tmp_path / "final"), "final/adapter"),
        (str(tmp_path / "final/adapter"), "final/adapter"),
        (str(tmp_path / "kept"), "kept"),
        (loaded, "final/adapter"),
    ):
        remedy = rf"model\.path={base()} model\.lora\.start={tmp_path / start}, or"
        with pytest.raises(ConfigError, match=remedy):
            read_blueprint(ModelSettings(path=path, quantize=kind))  # type: ignore[arg-type]
    other = "int8" if kind == "nf4" else "nf4"
    read_blueprint(ModelSettings(path=str(tmp_path / "final"), quantize=other))
    save(adapted(base(), None), tmp_path / "plain")
    read_blueprint(ModelSettings(path=str(tmp_path / "plain"), quantize=kind))  # type: ignore[arg-type]


def test_modules_without_an_adapter_are_exported_too(
    base: Callable[..., Path], random_samples: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    lora = replace(LORA, targets=("q_proj",))
    policy = adapt(load_policy(ModelSettings(path=str(base()), quantize="int8")), lora, base=str(base()))
    samples = random_samples()
    save(policy, tmp_path / "final")
    np.testing.assert_allclose(
        logp_of(load_policy(ModelSettings(path=str(tmp_path / "final"))), samples), logp_of(policy, samples), atol=2e-5
    )


def test_servers_get_the_numbers_that_are_trained(kind: str, base: Callable[..., Path]) -> None:
    """The dequantised base for servers that take adapters alone; with the adapter merged for others."""
    policy = adapted(base(), kind)
    layer = policy.model.get_submodule("model.layers.1.mlp.up_proj")
    expected = layer.base_layer.weight
    for served, weight in ((without_adapter(policy), expected), (policy, expected + layer.get_delta_weight("default"))):  # type: ignore[operator]
        with own_ranges(served) as ranges:
            parts = [one for one in ranges if one.name == "model.layers.1.mlp.up_proj.weight"]
        assert torch.equal(torch.cat([one.numbers for one in parts]), weight.flatten())


def test_bytes_are_those_of_the_plan(kind: str, base: Callable[..., Path]) -> None:
    blueprint = read_blueprint(ModelSettings(path=str(base()), quantize=kind))  # type: ignore[arg-type]
    size = quantized_size(weightless(blueprint), kind)
    layers = quantized_layers(blueprint.load()).values()
    assert size.bytes == sum(layer.codes.nbytes + layer.scale.nbytes for layer in layers)
    assert size.numbers == sum(layer.weight.numel() for layer in layers)
    assert size.widest == 512 * 192


HOLES = """
import ctypes, torch
from groupwise.models.quantized import give_memory_back

names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
Facts = type("Facts", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names.split()]})
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Facts
give_memory_back(torch.device("cpu"))

def held():
    facts = libc.mallinfo2()
    return facts.arena + facts.hblkhd

before, kept = held(), []
for layer in range(40):
    inner = [torch.ones(900_000, dtype=torch.uint8) for _ in range(3)]
    kept.append(torch.ones(700_000, dtype=torch.uint8))
    del inner
print((held() - before) / sum(one.nbytes for one in kept))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc since 2.33 says what it holds")
def test_what_a_forward_pass_frees_is_not_held_between_what_it_keeps() -> None:
    """Blocks of the sizes that short texts have; a process of its own, whose heap nobody has used."""
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) < 1.2


def test_the_plan_has_rows_for_the_base_and_for_what_stays(recipe: Callable[..., Any]) -> None:
    lines = dict(plan_of(recipe("int8")))
    assert lines["quantized"].startswith("int8: 884,736 parameters of the base in 8.1 bits, ")
    assert re.search(r"quantized base 879\.5 KiB", lines["memory"])
    assert "quantized" not in dict(plan_of(recipe("null")))


RECIPE = """
name: quantised
model: {{path: {base}, quantize: {kind}, lora: {{rank: 4, alpha: 8}}}}
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

    def make(kind: str, *overrides: str) -> Any:
        text = RECIPE.format(base=base(), kind=kind, data=tmp_path / "rows.json", runs=tmp_path / "runs")
        return next(iter(parse_stages(text, "recipe", list(overrides)).values()))

    return make


@pytest.mark.slow
def test_a_run_on_a_quantised_base_goes_on_to_the_bit(kind: str, recipe: Callable[..., Any], tmp_path: Path) -> None:
    straight = list(train(recipe(kind)))
    broken = iter(train(recipe(kind, "name=broken")))
    assert next(step for step in broken if step.number == 2)
    broken.close()
    checkpoint = tmp_path / "runs/broken/checkpoints/000002/policy"
    assert sorted(path.name for path in checkpoint.glob("*.safetensors")) == ["adapter_model.safetensors"]
    (rest,) = train(recipe(kind, "name=broken"))
    for key in ("loss", "kl", "grad_norm"):
        assert rest.metrics[key] == straight[-1].metrics[key], key
    first, second = (load_policy(ModelSettings(path=str(tmp_path / "runs" / name / "final"))) for name in ("quantised", "broken"))
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_a_quantised_base_cannot_do_is_refused_by_name(
    base: Callable[..., Path], recipe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_policy(ModelSettings(path=str(base()), quantize="int8"))
    with pytest.raises(ConfigError, match=r"modules_to_save: 'q_proj': model\.quantize has frozen it"):
        adapt(whole, replace(LORA, modules_to_save=("q_proj",)), base="")
    for override, says in (
        ("model.lora=null", r"set model\.lora=\{\}"),
        ("model.path=some/model.gguf", "rounded to few bits already"),
        ("parallel={tensor: 2}", "an adapter's factors are not split"),
    ):
        with pytest.raises(ConfigError, match=says):
            recipe("int8", override)
    with pytest.raises(ConfigError, match=r"no linear layers to quantise \(GPT-2's"):
        load_policy(ModelSettings(path=str(base("gpt2")), quantize="int8"))
    with pytest.raises(ConfigError, match=r"down_proj have 352: set model\.quantize to int8"):
        load_policy(ModelSettings(path=str(base("llama", 128)), quantize="nf4"))
    quantized.bitsandbytes.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.functional", None)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        load_policy(ModelSettings(path=str(base()), quantize="nf4"))
    quantized.bitsandbytes.cache_clear()


STAGES = """
name: chained
model: {{path: {base}, quantize: {quantize}, lora: {{rank: 4, alpha: 8}}}}
data: {{path: {data}, template: "{{question}}="}}
runs: {runs}
save: {{every: 1}}
optimizer: {{lr: 1.0e-2}}
stages:
  sft: {{objective: sft, steps: 2, batch_size: 4}}
  grpo:
    objective: grpo
    steps: 1
    model: {model}
    rewards: [{{function: repetition, args: {{n: 1}}}}]
    group: {{prompts_per_step: 2, group_size: 2}}
    rollout: {{max_new_tokens: 6}}
"""


@pytest.fixture
def chained(base: Callable[..., Path], tmp_path: Path) -> Any:
    """Trains the first of two stages; returns a function that gives the recipe of the second."""
    (tmp_path / "rows.json").write_text(json.dumps([{"question": f"{i}+1", "completion": f"{i + 1}"} for i in range(8)]))

    def stages(quantize: str, model: str) -> Any:
        text = STAGES.format(base=base(), quantize=quantize, data=tmp_path / "rows.json", runs=tmp_path / "runs", model=model)
        return parse_stages(text, "recipe", [])

    def make(quantize: str) -> Callable[..., Any]:
        list(train(stages(quantize, "{}")["sft"]))
        return lambda model, then=quantize: stages(then, model)["grpo"]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "null"])
def test_a_stage_goes_on_with_the_adapter_of_an_earlier_one(quantize: str, chained: Any, tmp_path: Path) -> None:
    recipe = chained(quantize)("{lora: {start: 'stage:sft'}}")
    run = tmp_path / "runs/chained"
    policy = language_model(resolved(recipe), read_blueprint(recipe.model))
    assert recipe.model.lora is not None
    for start in ("sft/final", "sft/final/adapter"):
        by_path = replace(recipe.model, lora=replace(recipe.model.lora, start=str(run / start)))
        assert resolved(replace(recipe, model=by_path)) == resolved(recipe)
    saved = load_file(run / "sft/final/adapter/adapter_model.safetensors")
    trained = [policy.model.get_parameter(name).detach() for name in policy.adapter.trained]  # type: ignore[union-attr]
    assert sum(float(tensor.double().square().sum()) for tensor in trained) == pytest.approx(
        sum(float(tensor.double().square().sum()) for tensor in saved.values())
    )
    sample = [Sample(group="", prompt=np.arange(3, 9), completion=np.arange(9, 14), weight=np.ones(5))]
    merged = load_policy(ModelSettings(path=str(run / "sft/final")))
    np.testing.assert_allclose(logp_of(policy, sample), logp_of(merged, sample), rtol=0, atol=1e-4)
    (step,) = train(recipe)
    assert np.isfinite(step.metrics["loss"])
    assert RecordedRun.of(run / "grpo").learner(0).policy.adapter is not None
    adapter = run / "sft/final/adapter/adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-4] + bytes(4))
    with pytest.raises(ConfigError, match=r"model\.lora\.start .*: its content has changed"):
        list(train(recipe))


@pytest.mark.slow
def test_the_file_of_an_adapter_may_be_an_older_pefts_and_names_its_base(
    chained: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = resolved(chained("int8")("{lora: {start: 'stage:sft'}}"))
    file = tmp_path / "runs/chained/sft/final/adapter/adapter_config.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    for key in ("use_rslora", "rank_pattern", "alpha_pattern"):
        del saved[key]
    file.write_text(json.dumps(saved), encoding="utf-8")
    language_model(recipe, read_blueprint(recipe.model))
    assert "was trained on" not in caplog.text
    file.write_text(json.dumps(saved | {"base_model_name_or_path": "another"}), encoding="utf-8")
    language_model(recipe, read_blueprint(recipe.model))
    assert "was trained on another, and goes on here on" in caplog.text


@pytest.mark.slow
def test_an_adapter_that_a_stage_cannot_go_on_with_is_refused_by_name(chained: Any, tmp_path: Path) -> None:
    """Also the merged model of a quantised base: to round it again undoes what the adapter learnt."""
    make = chained("int8")
    for model, quantize, says in (
        ("{path: 'stage:sft'}", "int8", r"on its base, model\.path=.* model\.lora\.start=.*sft/final/adapter"),
        ("{lora: {start: 'stage:sft', rank: 3}}", "int8", "r is 4 there and 3 here.*Give model.lora the settings"),
        ("{lora: {start: 'stage:sft', alpha: 3}}", "int8", "lora_alpha is 8 there and 3 here"),
        ("{lora: {start: 'stage:sft', targets: [q_proj]}}", "int8", r"down_proj.lora_A.weight is there alone"),
        ("{lora: {start: 'stage:sft'}}", "null", r"quantised as int8, here it is None: set model\.quantize to int8"),
        ("{lora: {start: 'stage:other'}}", "int8", "no stage 'other' runs before this one"),
    ):
        with pytest.raises(ConfigError, match=says):
            list(train(make(model, quantize)))
    final = tmp_path / "runs/chained/sft/final"
    (final / "adapter/adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"or a stage that trains one \(model\.lora\)"):
        list(train(make("{lora: {start: 'stage:sft'}}", "int8")))
    (final / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.lora\.start: the stage 'sft' has not finished"):
        resolved(make("{lora: {start: 'stage:sft'}}", "int8"))
