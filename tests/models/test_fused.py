"""Fused forms against transformers own modules: values, gradients, precision, and that nothing stays behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from groupwise.models.fused import RMSNorm, Rotary, fused_modules
from groupwise.packing import pack


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(weights: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(48, eps=1e-5).to(weights)
    norm.weight.data.uniform_(0.5, 2.0)
    x = (3 * torch.randn(2, 5, 48)).to(weights).requires_grad_()
    slope = torch.randn(2, 5, 48).to(weights)
    expected = norm(x)
    expected.backward(slope)
    reference = x.grad, norm.weight.grad
    x.grad = norm.weight.grad = None
    found = RMSNorm.apply(x, norm.weight, 1e-5, weights)
    found.backward(slope)
    if weights == torch.bfloat16:
        assert (found != expected).float().mean() < 0.02, "rounded at the same places"
    tolerance = 1e-6 if weights == torch.float32 else 1e-2
    assert found.dtype == weights
    for ours, theirs in zip((found, x.grad, norm.weight.grad), (expected, *reference), strict=True):
        assert relative(ours, theirs) < tolerance


def test_rotary_equals_transformers_and_its_backward_turns_back() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 7, 16, requires_grad=True)
    angle = torch.randn(1, 7, 8)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    slope = torch.randn_like(x)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    (expected_grad,) = torch.autograd.grad(expected, x, slope)
    found = Rotary.apply(x, cos.unsqueeze(1), sin.unsqueeze(1))
    (found_grad,) = torch.autograd.grad(found, x, slope)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_grad, expected_grad)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "gemma2", "mixtral"])
def test_a_fused_model_has_the_same_states_and_gradients(family: str, tiny_policy: Callable, random_samples: Callable) -> None:
    policy = tiny_policy(family, scale=3.0)
    (batch,) = pack(random_samples(), 10_000)
    slope: Tensor | None = None
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for fused in (False, True):
        policy.model.zero_grad()
        if fused:
            with fused_modules(policy.model):
                hidden = policy.forward(batch).hidden_PD
                slope = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
                hidden.backward(slope)
        else:
            hidden = policy.forward(batch).hidden_PD
            hidden.backward(torch.linspace(-1, 1, hidden.numel()).view_as(hidden))
        found.append((hidden.detach(), {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}))
    (plain, plain_gradients), (quick, quick_gradients) = found
    torch.testing.assert_close(quick, plain, rtol=1e-4, atol=1e-4)
    assert quick_gradients.keys() == plain_gradients.keys()
    for name, expected in plain_gradients.items():
        assert relative(quick_gradients[name], expected) < 1e-4, name


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_known_modules_are_changed_inside_and_only_there(family: str, tiny_policy: Callable) -> None:
    policy = tiny_policy(family)
    names = lambda: {n for n, m in policy.model.named_modules() if "forward" in vars(m)}  # noqa: E731
    with fused_modules(policy.model):
        inside = names()
        with fused_modules(policy.model):  # what is changed already is left alone
            assert names() == inside
        assert names() == inside
    assert names() == set()
    assert len(inside) == (2 * 2 + 2 if family == "gpt2" else 2 * 4 + 2)


def test_modules_of_other_classes_keep_their_forward(tiny_policy: Callable) -> None:
    class Other(LlamaRMSNorm):
        pass

    model = copy.deepcopy(tiny_policy("llama").model)
    model.model.layers[0].input_layernorm = Other(32)
    with fused_modules(model):
        assert "forward" not in vars(model.model.layers[0].input_layernorm)
        assert "forward" in vars(model.model.layers[1].input_layernorm)


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_what_is_frozen_gets_no_gradient(family: str, tiny_policy: Callable, random_samples: Callable) -> None:
    policy = tiny_policy(family)
    frozen = {name for name, _ in policy.model.named_parameters() if "mlp" in name and ("up" in name or "c_fc.weight" in name)}
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    (batch,) = pack(random_samples(), 10_000)
    with fused_modules(policy.model):
        policy.forward(batch).hidden_PD.square().sum().backward()
    assert frozen
    assert {name for name, parameter in policy.model.named_parameters() if parameter.grad is None} == frozen


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_autocast_gradients_are_as_close_to_float32_as_the_modules_own(
    family: str, tiny_policy: Callable, random_samples: Callable
) -> None:
    policy = tiny_policy(family, scale=3.0)
    lower = replace(policy, autocast=True)
    (batch,) = pack(random_samples(), 10_000)
    found: list[Tensor] = []
    for who, manager in ((policy, nullcontext()), (lower, nullcontext()), (lower, fused_modules(policy.model))):
        policy.model.zero_grad()
        with manager:
            hidden = who.forward(batch).hidden_PD
            hidden.backward(torch.linspace(-1, 1, hidden.numel()).view_as(hidden).to(hidden.dtype))
        found.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
    exact, modules, fused = found
    assert relative(fused, exact) < 1.2 * relative(modules, exact) + 1e-3


def test_under_autocast_norms_hand_on_what_products_take_but_the_last_does_not_round(tiny_policy: Callable) -> None:
    model = tiny_policy("llama").model
    x = torch.randn(1, 4, 32)
    norms: list[nn.Module] = [model.model.layers[0].input_layernorm, model.model.norm]
    with fused_modules(model), torch.autocast("cpu", torch.bfloat16):
        assert [norm(x).dtype for norm in norms] == [torch.bfloat16, torch.float32]
