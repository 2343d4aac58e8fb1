"""Fused forms against transformers own modules: values, gradients, precision, and that nothing stays behind."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from head_losses import FunctionLoss, reference_logprobs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from groupwise.config.settings import ModelSettings, OptimizerSettings
from groupwise.data.packing import pack
from groupwise.models import layers
from groupwise.models.fused import _BY_CLASS, fused_modules
from groupwise.models.passes import forward
from groupwise.ops import attention, functional, linear_cross_entropy
from groupwise.ops.functional import mlp, rms_norm, rotary
from groupwise.ops.in_place_gradients import gradient_of, summed_in_place, summing
from groupwise.ops.linear_cross_entropy import FusedLoss, Head, chosen_logprobs
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import BatchPass, assess, score, update


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(weights: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(48, eps=1e-5).to(weights)
    norm.weight.data.uniform_(0.5, 2.0)
    x = (3 * torch.randn(2, 5, 48)).to(weights).requires_grad_()
    gradient = torch.randn(2, 5, 48).to(weights)
    expected = norm(x)
    expected.backward(gradient)
    reference = x.grad, norm.weight.grad
    x.grad = norm.weight.grad = None
    found = rms_norm(x, norm.weight, 1e-5, weights)
    found.backward(gradient)
    if weights == torch.bfloat16:
        assert (found != expected).float().mean() < 0.02, "rounded at the same places"
    tolerance = 1e-6 if weights == torch.float32 else 1e-2
    assert found.dtype == weights
    for ours, theirs in zip((found, x.grad, norm.weight.grad), (expected, *reference), strict=True):
        assert relative(ours, theirs) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_takes_any_type_and_a_gradient_that_is_one_number(dtype: torch.dtype) -> None:
    """`sum` hands back one number, repeated without memory; as many rows as numbers in a row, so that no shape would object."""
    x, weight = torch.randn(16, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    found = rms_norm(x, weight, 1e-5, dtype)
    exact = (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    expected = nn.functional.rms_norm(exact[0], (16,), exact[1], 1e-5)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(found.double(), expected, **tolerance)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad.double(), exact[0].grad, **tolerance)
    torch.testing.assert_close(weight.grad.double(), exact[1].grad, **tolerance)


def test_a_hook_on_a_norm_is_called_with_its_output(tiny_policy: Callable, random_samples: Callable) -> None:
    policy, heard = tiny_policy("qwen2", hidden=128), []
    (batch,) = pack(random_samples(), 10_000)
    with fused_modules(policy.model):
        expected = forward(policy, batch).hidden_PD
        listener = policy.model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *said: heard.append(said[2]))
        found = forward(policy, batch).hidden_PD
        listener.remove()
        assert len(heard) == 1
        torch.testing.assert_close(found, expected)
        listener = policy.model.model.layers[1].input_layernorm.register_full_backward_hook(lambda *said: heard.append(said[2]))
        forward(policy, batch).hidden_PD.sum().backward()
        listener.remove()
        assert len(heard) == 2
        listener = policy.model.model.layers[1].mlp.register_forward_pre_hook(lambda _, given: (given[0].mul_(0.5),))
        forward(policy, batch).hidden_PD.sum().backward()  # what is handed over may be changed
        listener.remove()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_hook_on_a_product_of_an_mlp_is_called(family: str, tiny_policy: Callable, random_samples: Callable) -> None:
    policy = tiny_policy(family)
    (batch,) = pack(random_samples(), 10_000)
    mlp = policy.model.transformer.h[0].mlp if family == "gpt2" else policy.model.model.layers[0].mlp
    last = mlp.c_proj if family == "gpt2" else mlp.down_proj
    found = []
    for inside in (nullcontext, lambda: fused_modules(policy.model)):
        for listen in (
            lambda: last.register_forward_pre_hook(lambda _, given: (0.5 * given[0],)),
            lambda: last.register_full_backward_hook(lambda module, into, out: (0.5 * into[0],)),
        ):
            listener = listen()
            policy.model.zero_grad(set_to_none=True)
            with inside():
                forward(policy, batch).hidden_PD.square().sum().backward()
            listener.remove()
            found.append(last.weight.grad), found.append(policy.model.get_input_embeddings().weight.grad)
    for ours, theirs in zip(found[4:], found[:4], strict=True):
        assert relative(ours, theirs) < 1e-4


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("change", ["activation", "bias", "hook on the activation", "every module's hook"])
def test_an_mlp_that_is_not_of_the_known_kind_computes_what_it_says(
    family: str, change: str, tiny_policy: Callable, random_samples: Callable
) -> None:
    policy = tiny_policy(family, hidden=128)
    (batch,) = pack(random_samples(), 10_000)
    mlp = policy.model.transformer.h[0].mlp if family == "gpt2" else policy.model.model.layers[0].mlp
    (activation,) = (name for name, _ in mlp.named_children() if name in ("act", "act_fn"))
    found, heard = [], []
    if change == "activation":
        setattr(mlp, activation, nn.ReLU())
    elif change == "hook on the activation":
        getattr(mlp, activation).register_forward_hook(lambda *said: 0.5 * said[2])
    elif family == "llama" and change == "bias":
        mlp.up_proj.bias = nn.Parameter(torch.linspace(-1.0, 1.0, mlp.up_proj.out_features))
    for inside in (nullcontext, lambda: fused_modules(policy.model)):
        policy.model.zero_grad(set_to_none=True)
        listener = nn.modules.module.register_module_forward_hook(lambda module, *_: heard.append(module))
        if "every" not in change:
            listener.remove()
        with inside():
            hidden_PD = forward(policy, batch).hidden_PD
            (hidden_PD.square() * torch.linspace(-1.0, 2.0, hidden_PD.shape[1])).sum().backward()
        listener.remove()
        assert (getattr(mlp, activation) in heard) == ("every" in change)
        heard.clear()
        found.append([hidden_PD, *(p.grad for p in policy.model.parameters() if p.grad is not None)])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert relative(ours, theirs) < 1e-4


@pytest.mark.parametrize("module", [functional, attention, linear_cross_entropy], ids=lambda module: module.__name__)
def test_no_operation_of_ours_has_a_second_derivative(module: Any) -> None:
    operations = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, torch.autograd.Function)]
    assert operations
    for operation in operations:
        with torch.enable_grad(), pytest.raises(RuntimeError, match="second derivative"):
            operation.backward(None)


def test_a_second_derivative_is_refused() -> None:
    """Also where what comes in is a constant, as the gradient of a sum is: what is found would be taken for a constant."""
    x, weights = torch.randn(5, 96), [nn.Parameter(torch.randn(96, 96) / 10) for _ in range(3)]
    *layers, last = ((weight, None) for weight in weights)
    (first,) = torch.autograd.grad(mlp(x, layers, last, turned=False).sum(), weights[0])
    assert first.norm() > 0.0 and not first.requires_grad
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(mlp(x, layers, last, turned=False).sum(), weights[0], create_graph=True)


def test_a_policy_made_in_inference_mode_is_scored(tiny_policy: Callable, random_samples: Callable) -> None:
    """Its weights cannot be asked whether they have changed."""
    with torch.inference_mode():
        policy = tiny_policy("llama", hidden=128)
    ours, theirs = (
        score(one, random_samples(), max_tokens_per_microbatch=10_000).logp for one in (policy, tiny_policy("llama", hidden=128))
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_loss_that_somebody_keeps_keeps_no_copies_of_weights(
    tiny_policy: Callable, random_samples: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy("llama", hidden=128, settings=ModelSettings(path="unused", dtype="autocast"))
    (batch,) = pack(random_samples(), 10_000)
    made: list[weakref.ref[Tensor]] = []
    like = functional.like

    def watched(weight: Tensor, x: Tensor, copies: Any) -> Tensor:
        found = like(weight, x, copies)
        if found is not weight:
            made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(functional, "like", watched)
    with fused_modules(policy.model):
        kept = forward(policy, batch).hidden_PD.float().square().sum()
        assert any(copy() is not None for copy in made)
    assert made and all(copy() is None for copy in made)
    kept.backward()  # makes them again, each for its product
    assert policy.model.model.layers[0].mlp.down_proj.weight.grad is not None and all(copy() is None for copy in made)


@pytest.mark.parametrize("changed", ["hidden states", "weight", "bias", "targets", "temperatures"])
def test_what_a_head_reads_again_must_not_have_changed(changed: str) -> None:
    x, weight, bias = torch.randn(5, 16), nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(32))
    target_M, temperature_M = torch.arange(5), torch.full((5,), 0.7)
    tensors = {"hidden states": x, "weight": weight, "bias": bias, "targets": target_M, "temperatures": temperature_M}
    logp_M, _ = chosen_logprobs(x, Head(weight_VD=weight, bias_V=bias), target_M, temperature_M)
    with torch.no_grad():
        tensors[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp_M.sum().backward()


def fused_sum(*given: Any) -> Tensor:
    """The sum of all log-probs as a fused loss."""
    visited = FusedLoss(*given)
    for chunk in visited:
        chunk.loss = chunk.logp_C.sum()
    return visited.total()


def test_log_probs_are_differentiated_as_often_as_asked_and_a_fused_loss_once() -> None:
    x, weight = torch.randn(5, 16, requires_grad=True), nn.Parameter(torch.randn(32, 16))
    given = (x, Head(weight_VD=weight), torch.arange(5), torch.ones(5))
    expected = torch.autograd.grad(reference_logprobs(*given)[0].sum(), (x, weight))
    logp_M, _ = chosen_logprobs(*given)
    for factor in (1.0, 2.0, 0.0, 2.0):
        for found, one in zip(torch.autograd.grad(factor * logp_M.sum(), (x, weight), retain_graph=True), expected, strict=True):
            torch.testing.assert_close(found, factor * one)
    loss = fused_sum(*given)
    for found, one in zip(torch.autograd.grad(2.0 * loss, (x, weight), retain_graph=True), expected, strict=True):
        torch.testing.assert_close(found, 2.0 * one)
    with pytest.raises(RuntimeError, match="differentiated once"):
        loss.backward()


@pytest.mark.parametrize("operation", ["log-probs", "loss"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_nothing_of_a_head_outlives_its_outputs(
    operation: str, backward: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the garbage collector: what waits for it can be as large as the head, once for every micro-batch."""
    made: list[weakref.ref[Any]] = []
    begin = linear_cross_entropy._Visits.__init__

    def watched(self: Any, *given: Any) -> None:
        begin(self, *given)
        made.extend((weakref.ref(self), weakref.ref(self.hidden_MD), weakref.ref(self.weight_VD)))

    monkeypatch.setattr(linear_cross_entropy._Visits, "__init__", watched)
    x, weight = torch.randn(5, 16, requires_grad=True), nn.Parameter(torch.randn(32, 16))
    given = (x, Head(weight_VD=weight), torch.arange(5), torch.ones(5))
    gc.disable()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if operation == "loss":
                value = fused_sum(*given)
            else:
                value = chosen_logprobs(*given, entropy=True)[0].sum()
        if backward:
            value.backward()
        del value
        assert made and all(one() is None for one in made)
    finally:
        gc.enable()


def test_a_weight_that_changes_before_its_backward_pass_is_noticed(tiny_policy: Callable, random_samples: Callable) -> None:
    policy = tiny_policy("llama")
    (batch,) = pack(random_samples(), 10_000)
    with fused_modules(policy.model):
        hidden_PD = forward(policy, batch).hidden_PD
        with torch.no_grad():
            policy.model.model.layers[1].mlp.down_proj.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="changed in place"):
            hidden_PD.sum().backward()


def test_rotary_equals_transformers_and_its_backward_turns_back() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 7, 16, requires_grad=True)
    angle = torch.randn(1, 7, 8)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    gradient = torch.randn_like(x)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    (expected_grad,) = torch.autograd.grad(expected, x, gradient)
    found = rotary(x, cos.unsqueeze(1), sin.unsqueeze(1))
    (found_grad,) = torch.autograd.grad(found, x, gradient)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_grad, expected_grad)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "gemma2", "mixtral", "qwen3_5"])
@pytest.mark.parametrize("hidden", [32, 128], ids=["narrow heads", "wide heads, as the compiled kernels take them"])
def test_a_fused_model_has_the_same_states_and_gradients(
    family: str, hidden: int, tiny_policy: Callable, random_samples: Callable
) -> None:
    policy = tiny_policy(family, scale=3.0 if hidden == 32 else 1.5, hidden=hidden)
    (batch,) = pack(random_samples(), 10_000)
    gradient: Tensor | None = None
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for fused in (False, True):
        policy.model.zero_grad()
        if fused:
            with fused_modules(policy.model):
                hidden = forward(policy, batch).hidden_PD
                gradient = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
                hidden.backward(gradient)
        else:
            hidden = forward(policy, batch).hidden_PD
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
    assert len(inside) == (2 * (2 + 4) + 3 if family == "gpt2" else 2 * (4 + 7) + 3)


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
        forward(policy, batch).hidden_PD.square().sum().backward()
    assert frozen
    assert {name for name, parameter in policy.model.named_parameters() if parameter.grad is None} == frozen


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3"])
@pytest.mark.parametrize("hidden", [32, 128], ids=["narrow heads", "wide heads"])
def test_autocast_gradients_are_as_close_to_float32_as_the_modules_own(
    family: str, hidden: int, tiny_policy: Callable, random_samples: Callable
) -> None:
    policy = tiny_policy(family, scale=3.0 if hidden == 32 else 1.5, hidden=hidden)
    lower = replace(policy, autocast=True)
    (batch,) = pack(random_samples(), 10_000)
    found: list[Tensor] = []
    for who, manager in ((policy, nullcontext()), (lower, nullcontext()), (lower, fused_modules(policy.model))):
        policy.model.zero_grad()
        with manager:
            hidden = forward(who, batch).hidden_PD
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


class Made(TorchDispatchMode):
    """Counts the tensors of a shape that are made while inside."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += isinstance(out, Tensor) and out.shape == self.shape and out._base is None and "empty" in str(func)
        return out


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_weights_get_their_lower_precision_once_and_only_while_inside(
    family: str, tiny_policy: Callable, random_samples: Callable
) -> None:
    """Two passes over the same weights, forward and backward: as many copies as weights, the same bits as made anew each time."""
    policy = replace(tiny_policy(family, hidden=128), autocast=True)
    weights = [m.weight for n, m in policy.model.named_modules() if n.endswith(("proj", "c_attn", "c_fc"))]
    matrices = [weight for weight in weights if min(weight.shape) >= functional.LEAST_SIDE]  # smaller ones are left to torch
    (batch,) = pack(random_samples(), 10_000)

    class Lowered(TorchDispatchMode):
        """Counts copies of the model's matrices in bfloat16."""

        count = 0

        def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            at = [matrix.data_ptr() for matrix in matrices]
            self.count += "_to_copy" in str(func) and args[0].data_ptr() in at
            return func(*args, **(kwargs or {}))

    def passes(keep: bool, times: int) -> tuple[list[Tensor], int]:
        policy.model.zero_grad()
        with fused_modules(policy.model, keep=keep), Lowered() as lowered:
            for _ in range(times):
                forward(policy, batch).hidden_PD.sum().backward()
        return [p.grad.clone() for p in policy.model.parameters() if p.grad is not None], lowered.count

    kept, copies = passes(keep=True, times=2)
    anew, many = passes(keep=False, times=2)
    assert copies == len(matrices) and many == 4 * len(matrices)
    assert all(torch.equal(one, other) for one, other in zip(kept, anew, strict=True))
    with torch.no_grad():
        for matrix in matrices:
            matrix.mul_(2.0)
    changed, copies = passes(keep=True, times=2)
    assert copies == len(matrices)
    assert all(torch.equal(one, other) for one, other in zip(changed, passes(keep=False, times=2)[0], strict=True))


def summed(passed: BatchPass) -> tuple[Tensor, Tensor]:
    return FunctionLoss(lambda logp_C, _entropy, _part: logp_C.sum(), separable=True)(passed)


def weighted(weight_M: Tensor, logp_C: Tensor, entropy_C: Tensor | None, part: slice) -> Tensor:
    return -(weight_M[part] * logp_C).sum()


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mixtral"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("separable", [False, True])
def test_gradients_of_the_vocabulary_are_summed_where_they_lie(
    family: str, padded: bool, separable: bool, tiny_policy: Callable, random_samples: Callable
) -> None:
    """Two micro-batches, a matrix with rows that no token has, an id without gradient: as autograd, in one matrix."""
    policy = tiny_policy(family)
    matrix = policy.model.get_output_embeddings().weight
    policy = replace(policy, vocabulary=matrix.shape[0] - 3 if padded else matrix.shape[0])
    policy.model.get_input_embeddings().padding_idx = 5
    samples = random_samples(groups=4)
    batches = pack(samples, sum(s.prompt.size + s.completion.size for s in samples) // 2)
    assert len(batches) > 1
    found = []
    for in_place in (False, True):
        policy.model.zero_grad()
        with fused_modules(policy.model), summed_in_place(in_place), Made(matrix.shape) as made:
            for batch in batches:
                weight_M = batch.weight_P[batch.trained_M]
                loss = partial(weighted, weight_M)
                FunctionLoss(loss, separable=separable)(BatchPass(policy, batch))[0].backward()
        found.append({name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        assert relative(found[1][name], expected) < 1e-5, name
    assert made.count == 1, "the gradient itself and nothing else as large"


def test_what_is_only_assessed_makes_no_gradient_of_the_vocabulary(tiny_policy: Callable, random_samples: Callable) -> None:
    policy = tiny_policy("llama")
    with Made(policy.head.weight_VD.shape) as made:
        found = assess(policy, summed, random_samples(), max_tokens_per_microbatch=10_000)
    assert made.count == 0
    assert found.loss == pytest.approx(sum(float(seen.sum()) for seen in found.seen), rel=1e-6)


@pytest.mark.parametrize("separable", [False, True])
@pytest.mark.parametrize("trained", ["both", "head", "embedding"])
def test_a_head_and_an_embedding_that_are_not_tied_have_sums_of_their_own(
    trained: str, separable: bool, tiny_policy: Callable, random_samples: Callable
) -> None:
    policy = tiny_policy("llama")
    head, embedding = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
    head.weight = nn.Parameter(1.1 * head.weight.detach())
    if trained != "both":
        policy.model.requires_grad_(False)
        (head if trained == "head" else embedding).requires_grad_(True)
    (batch,) = pack(random_samples(), 10_000)
    loss = partial(weighted, batch.weight_P[batch.trained_M])
    found = []
    for in_place in (False, True):
        policy.model.zero_grad()
        with fused_modules(policy.model), summed_in_place(in_place):
            for _ in range(2):
                FunctionLoss(loss, separable=separable)(BatchPass(policy, batch))[0].backward()
        found.append({name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() == {name for name, p in policy.model.named_parameters() if p.requires_grad}
    for name, expected in found[0].items():
        assert relative(found[1][name], expected) < 1e-5, name


def test_in_a_loop_of_ones_own_a_loss_may_be_multiplied_and_asked_for_its_gradients(
    tiny_policy: Callable, random_samples: Callable
) -> None:
    """Only `update` sums in place, as_is or not."""
    policy = tiny_policy("llama")
    (batch,) = pack(random_samples(), 10_000)
    loss = partial(weighted, batch.weight_P[batch.trained_M])
    parameters = list(policy.model.parameters())
    once = torch.autograd.grad(FunctionLoss(loss, separable=True)(BatchPass(policy, batch))[0], parameters)
    assert all(parameter.grad is None for parameter in parameters)
    (2 * FunctionLoss(loss, separable=True)(BatchPass(policy, batch))[0]).backward()
    for parameter, expected in zip(parameters, once, strict=True):
        assert parameter.grad is not None and relative(parameter.grad, 2 * expected) < 1e-5


def test_only_a_parameter_or_its_first_rows_are_summed_in_place() -> None:
    """Other views of the same shape and beginning hold other numbers."""
    parameter = nn.Parameter(torch.randn(8, 8))
    with summed_in_place():
        assert summing()
        for other in (parameter.T, parameter[::2], parameter[1:]):
            assert gradient_of(other, True)[0] is None
        assert parameter.grad is None
        first, fresh = gradient_of(parameter[:3], True)
        assert first is not None and fresh and first.shape == (3, 8)
        with summed_in_place(False):
            assert not summing()
        assert summing(), "what was opened inside ends there"
    assert not summing() and gradient_of(parameter, False)[0] is None


def test_a_hook_on_a_weight_is_called_once_with_its_gradient(tiny_policy: Callable, random_samples: Callable) -> None:
    """Summed in place, a gradient passes by nobody."""
    policy, heard = tiny_policy("llama", hidden=128), []
    (batch,) = pack(random_samples(), 10_000)
    mlp = policy.model.model.layers[0].mlp
    mlp.up_proj.weight.register_hook(lambda grad: 2.0 * grad)
    mlp.down_proj.weight.register_post_accumulate_grad_hook(lambda weight: heard.append(weight.grad.clone()))
    found = []
    for inside in (nullcontext, lambda: fused_modules(policy.model)):
        policy.model.zero_grad(set_to_none=True)
        with inside(), summed_in_place():
            hidden_PD = forward(policy, batch).hidden_PD
            (hidden_PD.square() * torch.linspace(-1.0, 2.0, hidden_PD.shape[1])).sum().backward()
        found.append((mlp.up_proj.weight.grad, *heard))
        heard.clear()
    assert len(found[0]) == len(found[1]) == 2
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert relative(ours, theirs) < 1e-4


def test_a_loss_that_is_multiplied_after_all_is_noticed(tiny_policy: Callable, random_samples: Callable) -> None:
    policy = tiny_policy("qwen2")
    (batch,) = pack(random_samples(), 10_000)
    with summed_in_place():
        value, _ = summed(BatchPass(policy, batch))
        with pytest.raises(AssertionError, match="multiplied"):
            (2 * value).backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_its_step_is_not_taken(tiny_policy: Callable, random_samples: Callable) -> None:
    policy = tiny_policy("qwen2")
    policy = replace(policy, model=policy.model.cuda())
    optimizer = Optimizer(policy.model, OptimizerSettings(), 2)

    def loss(passed: BatchPass, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        value, logp_M = summed(passed)
        return factor * value, logp_M

    for factor in (1.0, 2.0):
        taken = update(policy, partial(loss, factor=factor), random_samples(), optimizer, max_tokens_per_microbatch=10_000).stats
        assert taken.skipped == (factor != 1.0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_layer_of_an_mlp_with_a_forward_of_its_own_runs_it(family: str, tiny_policy: Callable, random_samples: Callable) -> None:
    """Also one that somebody put in after the policy was made."""
    policy = tiny_policy(family)
    (batch,) = pack(random_samples(), 10_000)
    mlp = policy.model.base_model.layers[0].mlp if family == "llama" else policy.model.base_model.h[0].mlp
    layer = mlp.up_proj if family == "llama" else mlp.c_fc
    layer.forward = lambda x: 2.0 * type(layer).forward(layer, x)
    expected = forward(policy, batch).hidden_PD
    with fused_modules(policy.model):
        torch.testing.assert_close(forward(policy, batch).hidden_PD, expected, rtol=1e-4, atol=1e-4)


def test_classes_that_are_known_by_name_are_there() -> None:
    """A name that nothing has would switch a form off without a word."""
    for name in (*layers._READERS, *layers.MODELS, *_BY_CLASS):
        module, _, kind = name.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), kind), type), name
