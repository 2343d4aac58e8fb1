"""The specialised forward pass equals the one through the modules, and runs only where the model is exactly known."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from all_pairs import all_pairs
from kernel_calls import KernelCalls
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from groupwise.config.settings import LoraSettings, ModelSettings
from groupwise.errors import EngineError
from groupwise.models.backbone import checkpointing
from groupwise.models.lora import adapt
from groupwise.models.policy import without_adapter
from groupwise.models.sharded import frozen_copy
from groupwise.ops.operations import absence, operations
from groupwise.records import Finish, Sampling
from groupwise.rollout.native.engine import ModuleForward, NativeEngine
from groupwise.rollout.native.forward import SpecialisedForward, is_known

FAMILIES = {
    "llama": {},
    "llama, no sharing, untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, scaled positions": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "mistral, window": {"sliding_window": 6},
    "qwen2": {},
    "qwen2, window in one layer": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},
    "gpt2": {},
    "qwen3_5_text": {"head_dim": 12, "partial_rotary_factor": 0.5},
    "qwen3_5_text, wide": {},
    "llama, wide heads": {"head_dim": 32},
    "llama, biases, wide heads": {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "mistral, window, wide heads": {"sliding_window": 6, "head_dim": 32},
    "qwen3, wide heads": {"head_dim": 32},
    "gpt2, wide heads": {"n_head": 2},
}
"""Heads are 8 and 16 numbers wide unless they are wide: too few for the compiled kernels."""


def randomized(policy):
    """Every norm and bias gets numbers of its own: ones and zeros would hide a mistake."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return policy


class ModuleEngine(NativeEngine):
    """The native engine, always through the modules."""

    def prepared(self, positions, memory=None):
        return ModuleForward(self.policy)


def completions(engine, prompts, **options):
    sampling = Sampling(**({"max_new_tokens": 18} | options))
    return {g[0].prompt.id: g for g in engine.generate(prompts, group_size=3, sampling=sampling, seed=2)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_rows", [64, 4])
def test_the_specialised_forward_equals_the_modules(family, max_rows, policy_of, prompts_of):
    policy = randomized(policy_of(family.split(",")[0], dtype=torch.float32, sharpness=3.0, **FAMILIES[family]))
    engine = NativeEngine(policy, max_rows=max_rows)
    assert engine.path == "specialised"
    prompts = prompts_of(5, 9, 1, 5)
    found, expected = completions(engine, prompts), completions(ModuleEngine(policy, max_rows=max_rows), prompts)
    for name, group in expected.items():
        for a, b in zip(found[name], group, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            np.testing.assert_allclose(a.behavior_logp, b.behavior_logp, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "llama, biases, wide heads", "qwen3", "gpt2", "qwen3_5_text, wide"])
def test_an_adapter_is_merged_into_the_weights_that_decode(family, policy_of, prompts_of):
    """As it is at each call; without the adapter, the weights under it."""
    plain = randomized(policy_of(family.split(",")[0], dtype=torch.float32, sharpness=3.0, **FAMILIES[family]))
    policy = adapt(plain, LoraSettings(rank=3), base="")
    engine, prompts = NativeEngine(policy, max_rows=64), prompts_of(5, 9, 1, 5)
    answers = []
    for _ in range(2):
        with torch.no_grad():
            for name in policy.adapter.trained:
                parameter = policy.model.get_parameter(name)
                parameter.add_(0.1 * torch.randn_like(parameter))
        found, expected = completions(engine, prompts), completions(ModuleEngine(policy, max_rows=64), prompts)
        for name, group in expected.items():
            for a, b in zip(found[name], group, strict=True):
                assert a.tokens.tolist() == b.tokens.tolist()
                np.testing.assert_allclose(a.behavior_logp, b.behavior_logp, rtol=0, atol=5e-5)
        answers.append(found)
    assert engine.path == "specialised"
    below = NativeEngine(without_adapter(policy), max_rows=64)
    assert below.path == "specialised"
    answers.append(completions(below, prompts))
    first = [[r.tokens.tolist() for group in found.values() for r in group] for found in answers]
    assert first[0] != first[1] and first[0] != first[2] and first[1] != first[2]


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_a_merged_weight_has_the_policys_type(precision, policy_of, prompts_of):
    """An adapter is trained in float32 also on a base in bfloat16."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    policy = policy_of("llama", dtype=dtype, sharpness=3.0, setting=ModelSettings(device="cpu", dtype=precision))
    policy = adapt(policy, LoraSettings(rank=3), base="")
    engine = NativeEngine(policy, max_rows=64)
    assert engine.path == "specialised"
    assert all(len(group) == 3 for group in completions(engine, prompts_of(5, 9)).values())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "qwen3, wide heads", "gpt2, wide heads", "qwen3_5_text, wide"])
@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_in_low_precision_it_is_as_near_to_float32_as_the_modules(family, precision, policy_of, prompts_of, scored):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    kind, options = family.split(",")[0], FAMILIES[family]
    policy = policy_of(kind, dtype=dtype, sharpness=3.0, setting=ModelSettings(device="cpu", dtype=precision), **options)
    exact = policy_of(kind, dtype=torch.float32, sharpness=3.0, **options)
    exact.model.load_state_dict(policy.model.state_dict())
    error = {}
    for engine in (NativeEngine(policy, max_rows=64), ModuleEngine(policy, max_rows=64)):
        groups = completions(engine, prompts_of(5, 9, 1, 5)).values()
        error[type(engine)] = np.mean([np.abs(r.behavior_logp - scored(exact, r)).mean() for group in groups for r in group])
    assert error[NativeEngine] < 1.5 * error[ModuleEngine] + 1e-3


@pytest.mark.parametrize(
    ("family", "precision", "how"),
    all_pairs(
        [family for family in FAMILIES if "wide heads" in family],
        ["float32", "autocast"],
        [(1, 8, {}), (2, 64, {"temperature": 0.9}), (1, 5, {"temperature": 0.0}), (2, 8, {"stop": ("0", "1")})],
    ),
)
def test_one_call_for_many_tokens_is_the_kernels_one_by_one(family, precision, how, policy_of, prompts_of, monkeypatch):
    threads, max_rows, options = how
    policy = randomized(policy_of(family.split(",")[0], dtype=torch.float32, sharpness=3.0, **FAMILIES[family]))
    policy = replace(policy, autocast=precision == "autocast")
    if absence() is not None:
        pytest.skip("no kernels")
    found, before = [], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for kernel, missing in (("decode_tokens", None), ("decode_attention", "_decoder")):
            if missing:
                monkeypatch.setattr(SpecialisedForward, missing, lambda self: None)
            with KernelCalls() as called:
                groups = completions(NativeEngine(policy, max_rows=max_rows), prompts_of(5, 9, 1, 5), max_new_tokens=40, **options)
            found.append(
                {name: [(r.tokens.tolist(), r.behavior_logp.tolist(), r.finish) for r in group] for name, group in groups.items()}
            )
            assert {name for name in called.names if name.startswith("decode")} == {kernel}
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
    finishes = {finish for group in found[0].values() for _, _, finish in group}
    assert "stop" not in options or Finish.STOP in finishes
    assert len(finishes) > 1 or options.get("temperature") == 0.0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("inner", [16, 64, 480])
def test_layers_of_different_sizes_go_through_the_modules(family, inner, policy_of, prompts_of, scored):
    """As pruning leaves them."""
    policy = policy_of(family, dtype=torch.float32, **FAMILIES[f"{family}, wide heads"])
    assert is_known(policy)
    if family == "llama":
        mlp = policy.model.model.layers[1].mlp
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = nn.Linear(32, inner), nn.Linear(32, inner), nn.Linear(inner, 32)
    else:
        mlp = policy.model.transformer.h[1].mlp
        mlp.c_fc, mlp.c_proj = Conv1D(inner, 32), Conv1D(32, inner)
    assert not is_known(policy)
    for group in completions(NativeEngine(policy, max_rows=8), prompts_of(5, 9)).values():
        for rollout in group:
            np.testing.assert_allclose(rollout.behavior_logp, scored(policy, rollout), rtol=0, atol=2e-5)


class Doubled(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


class OtherNorm(LlamaRMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class OtherActivation(NewGELUActivation):
    def forward(self, x):
        return 2 * super().forward(x)


def shortened(model, name, count):
    """The parameter keeps its first rows; nobody tells the module."""
    module, _, kind = name.rpartition(".")
    owner = model.get_submodule(module)
    setattr(owner, kind, nn.Parameter(getattr(owner, kind).detach()[:count].clone()))


def replaced(model, name, module):
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


ALTERATIONS = {
    "llama": {
        "stale widths of an MLP": lambda m: [
            shortened(m, f"model.layers.{i}.mlp.{n}_proj.weight", 24) for i in (0, 1) for n in ("gate", "up")
        ],
        "stale heads": lambda m: [shortened(m, f"model.layers.{i}.self_attn.{n}_proj.weight", 32) for i in (0, 1) for n in "qkv"],
        "one number for a norm": lambda m: shortened(m, "model.layers.0.input_layernorm.weight", 1),
        "a bias of one": lambda m: replaced(m, "model.layers.0.self_attn.v_proj", nn.Linear(32, 64)),
        "a bias of up alone": lambda m: [replaced(m, f"model.layers.{i}.mlp.up_proj", nn.Linear(32, 64)) for i in (0, 1)],
        "a norm of another class": lambda m: replaced(m, "model.norm", OtherNorm(32)),
        "a layer norm": lambda m: replaced(m, "model.norm", nn.LayerNorm(32)),
        "no attention": lambda m: replaced(m, "model.layers.1.self_attn", nn.Identity()),
        "an embedding of another class": lambda m: m.set_input_embeddings(Doubled(*m.get_input_embeddings().weight.shape)),
        "fewer embeddings than logits": lambda m: shortened(m, "model.embed_tokens.weight", 8),
        "another eps": lambda m: setattr(m.model.norm, "variance_epsilon", 0.1),
        "another scale": lambda m: setattr(m.model.layers[1].self_attn, "scaling", 1.0),
        "a norm in bfloat16": lambda m: m.model.norm.to(torch.bfloat16),
    },
    "qwen3": {
        "another eps of keys": lambda m: setattr(m.model.layers[0].self_attn.k_norm, "variance_epsilon", 0.1),
        "one number for a head's norm": lambda m: shortened(m, "model.layers.0.self_attn.q_norm.weight", 1),
    },
    "gpt2": {
        "fewer positions": lambda m: shortened(m, "transformer.wpe.weight", 16),
        "positions in bfloat16": lambda m: m.transformer.wpe.to(torch.bfloat16),
        "another number of heads": lambda m: setattr(m.transformer.h[1].attn, "num_heads", 1),
        "a norm without bias": lambda m: replaced(m, "transformer.ln_f", nn.LayerNorm(32, bias=False)),
        "an activation of another class": lambda m: setattr(
            m.transformer.h[0].mlp, "act", type("Other", (NewGELUActivation,), {})()
        ),
    },
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, named in ALTERATIONS.items() for name in named])
def test_what_is_not_as_its_config_says_takes_the_modules(family, name, policy_of):
    policy = policy_of(family, dtype=torch.float32, tie_word_embeddings=False, **FAMILIES[f"{family}, wide heads"])
    assert is_known(policy)
    ALTERATIONS[family][name](policy.model)
    assert not is_known(policy)


def test_a_layer_may_stand_in_two_places_of_the_specialised_forward_only(policy_of, prompts_of, scored):
    """The modules keep its keys and values by its number."""
    policy = policy_of("llama", dtype=torch.float32)
    policy.model.model.layers[1] = policy.model.model.layers[0]
    assert is_known(policy)
    for group in completions(NativeEngine(policy, max_rows=8), prompts_of(5)).values():
        for rollout in group:
            np.testing.assert_allclose(rollout.behavior_logp, scored(policy, rollout), rtol=0, atol=2e-5)
    with pytest.raises(EngineError, match="two attention layers of the model have the number 0"):
        completions(ModuleEngine(policy, max_rows=8), prompts_of(5))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", "gpt2"])
def test_what_changes_no_result_leaves_a_model_known(family, policy_of):
    policy = policy_of(family, dtype=torch.float32)
    model = policy.model
    assert is_known(policy)
    for change in (
        lambda: model.config.update({"pad_token_id": 10**6}),
        lambda: model.config.update({"attention_dropout": 0.5, "attn_pdrop": 0.5}),
        lambda: [setattr(module, "p", 0.0) for module in model.modules() if isinstance(module, nn.Dropout)],
        lambda: setattr(model, "step_count", 3),
        lambda: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight.detach().clone())),
        lambda: model.config.update({"tie_word_embeddings": False}),
        lambda: deepcopy(model),
    ):
        change()
        assert is_known(policy)
    for _ in range(3):
        with checkpointing(policy, True):
            pass
        assert is_known(policy)
        assert not model.get_input_embeddings()._forward_hooks
    assert is_known(frozen_copy(policy))


def test_a_config_that_changes_is_read_again(policy_of):
    policy = policy_of("llama", dtype=torch.float32)
    assert is_known(policy)
    policy.model.config.num_hidden_layers = 1  # transformers runs that many
    assert not is_known(policy)
    policy.model.config.hidden_size = -1  # makes no model at all
    assert not is_known(policy)


def test_a_resized_vocabulary_is_known_still(policy_of, prompts_of):
    policy = policy_of("llama", dtype=torch.float32, head_dim=32)
    policy.model.resize_token_embeddings(policy.model.config.vocab_size + 7, mean_resizing=False)
    assert is_known(policy)
    found, expected = (completions(engine(policy, max_rows=8), prompts_of(5)) for engine in (NativeEngine, ModuleEngine))
    assert [r.tokens.tolist() for r in found["p0"]] == [r.tokens.tolist() for r in expected["p0"]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_norms_whose_weights_lie_apart(family, policy_of, prompts_of):
    policy = randomized(policy_of(family, dtype=torch.float32, sharpness=3.0, **FAMILIES[f"{family}, wide heads"]))
    expected = completions(NativeEngine(policy, max_rows=8), prompts_of(5, 9))
    for module in policy.model.modules():
        if "Norm" in type(module).__name__:
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(parameter.detach()[:, None].repeat(1, 2)[:, 0]))
                assert not getattr(module, name).is_contiguous()
    assert is_known(policy)
    found = completions(NativeEngine(policy, max_rows=8), prompts_of(5, 9))
    for name, group in expected.items():
        assert [r.tokens.tolist() for r in found[name]] == [r.tokens.tolist() for r in group]
        assert [r.behavior_logp.tolist() for r in found[name]] == [r.behavior_logp.tolist() for r in group]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_wide_heads_are_decoded_by_the_kernels(family, policy_of):
    found = [SpecialisedForward(policy_of(family, dtype=torch.float32, head_dim=width), 8).decoder for width in (8, 32)]
    assert [decoder is not None for decoder in found] == [False, absence() is None]


def test_p46_new_weights_are_used_at_once(policy_of, prompts_of):
    policy = policy_of("llama", dtype=torch.float32)
    engine = NativeEngine(policy, max_rows=2)
    before = completions(engine, prompts_of(4), temperature=0.0)["p0"][0].tokens.tolist()
    stream = engine.generate(prompts_of(4, 4), group_size=2, sampling=Sampling(temperature=0.0, max_new_tokens=18), seed=0)
    assert next(stream)[0].tokens.tolist() == before
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    engine.send_weights(1)
    expected = completions(ModuleEngine(policy, max_rows=2), prompts_of(4, 4), temperature=0.0)
    assert next(stream)[0].tokens.tolist() == expected["p1"][0].tokens.tolist(), "in the middle of a call, once told"
    after = completions(engine, prompts_of(4), temperature=0.0)["p0"][0].tokens.tolist()
    assert after == expected["p0"][0].tokens.tolist() != before


def test_what_is_not_exactly_known_takes_the_modules(policy_of):
    float32 = {"dtype": torch.float32}
    assert not is_known(policy_of("gemma2", **float32))
    assert not is_known(policy_of("mixtral", **float32))
    assert not is_known(policy_of("llama"))  # float64
    assert not is_known(policy_of("llama", hidden_act="gelu", **float32))
    assert not is_known(policy_of("gpt2", activation_function="relu", **float32))
    assert not is_known(policy_of("gpt2", scale_attn_by_inverse_layer_idx=True, **float32))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not is_known(policy_of("llama", rope_parameters=rope, **float32))
    hooked = policy_of("llama", **float32)
    assert is_known(hooked)
    handle = hooked.model.model.layers[1].mlp.register_forward_hook(lambda module, given, out: out + 1.0)
    assert not is_known(hooked)
    handle.remove()
    assert is_known(hooked)

    class Adapter(nn.Linear):
        pass

    hooked.model.model.layers[0].self_attn.q_proj.__class__ = Adapter
    assert not is_known(hooked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 200])
def test_prepared_products(dtype, rows):
    torch.manual_seed(0)
    for inputs, outputs in ((5, 3), (48, 100), (256, 512)):
        weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
        x = torch.randn(rows, inputs).to(dtype)
        exact = x.double() @ weight.double().T
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        scale = float(exact.abs().max())
        prepared = operations().decode_operations([weight], (), dtype=dtype)
        with torch.inference_mode():
            plain, biased = prepared.product([weight], [None]), prepared.product([weight], [bias])
            assert float((plain(x).double() - exact).abs().max()) < tolerance * scale
            assert float((biased(x).double() - exact - bias.double()).abs().max()) < tolerance * scale


def test_prepared_weights_are_a_copy(policy_of):
    policy = policy_of("llama", dtype=torch.float32)
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    engine = NativeEngine(policy, max_rows=4)
    SpecialisedForward(policy, 8)
    assert engine.path == "specialised"
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.model.named_parameters())
