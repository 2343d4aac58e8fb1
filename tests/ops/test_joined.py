"""What a GPU makes of linear layers, joined and with adapters, against each layer alone: values, gradients, where gradients lie."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from typing import Any

import pytest
import torch
from joined_kernels import Heads, JoinedOperations
from torch import Tensor, nn
from torch.nn import functional as F

from groupwise.config.settings import LoraSettings, ModelSettings
from groupwise.data.packing import pack
from groupwise.models import lora
from groupwise.models.fused import fused_modules
from groupwise.models.passes import forward
from groupwise.models.policy import without_adapter
from groupwise.ops import functional, joined
from groupwise.ops import operations as operations_module
from groupwise.ops.adapted import AdaptedLinear, adapted_linear
from groupwise.ops.functional import copies_of_weights
from groupwise.ops.in_place_gradients import summed_in_place

T, D, W, INNER = 11, 16, 8, 24


@pytest.fixture(autouse=True)
def _joined(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(operations_module, "_chosen", JoinedOperations())


def layer(rows: int, columns: int, bias: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
    """A linear layer in float32, whose copy in the type of products is float64."""
    return nn.Parameter(torch.randn(rows, columns)), nn.Parameter(torch.randn(rows)) if bias else None


def linear(x: Tensor, layer: tuple[Tensor, Tensor | None]) -> Tensor:
    weight, bias = layer
    return F.linear(x, weight.double(), None if bias is None else bias.double())


def attention_case(bias: bool, keys: int, norms: bool) -> tuple[Callable, Callable, list[nn.Parameter]]:
    """Joined, apart, and the parameters."""
    layers = [layer(count * W, D, bias) for count in (4, keys, keys)]
    gains = tuple(nn.Parameter(torch.rand(W) + 0.5) for _ in range(2)) if norms else None
    angle = torch.randn(T, W // 2).repeat(1, 2)
    tables = angle.cos(), angle.sin()

    def together(x: Tensor) -> tuple[Tensor, ...]:
        return joined.attention_heads(x, layers, (4, keys), tables, gains, 1e-6)

    def apart(x: Tensor) -> tuple[Tensor, ...]:
        made = Heads(queries=4, keys=keys, cos_TW=tables[0], sin_TW=tables[1], gains=gains, eps=1e-6)
        return made.forward(torch.cat([linear(x, one) for one in layers], -1))

    return together, apart, [p for p in chain(*layers, gains or ()) if p is not None]


def mlp_case(bias: bool) -> tuple[Callable, Callable, list[nn.Parameter]]:
    """Joined, apart, and the parameters."""
    first, last = [layer(INNER, D, bias) for _ in range(2)], layer(D, INNER, bias)

    def together(x: Tensor) -> tuple[Tensor, ...]:
        return (joined.gated_mlp(x, first, last),)

    def apart(x: Tensor) -> tuple[Tensor, ...]:
        gate, up = (linear(x, one) for one in first)
        return (linear(F.silu(gate) * up, last),)

    return together, apart, [p for p in chain(*first, last) if p is not None]


CASES = {
    "attention": (attention_case, False, 4, False),
    "biases and grouped heads": (attention_case, True, 2, False),
    "norms of heads": (attention_case, False, 1, True),
    "mlp": (mlp_case, False),
    "mlp with biases": (mlp_case, True),
}


def gradients(compute: Callable, parameters: list[nn.Parameter], micro_batches: int = 1) -> list[Tensor]:
    """Outputs, the gradient of the input, and those of the parameters over some micro-batches."""
    found = []
    for number in range(micro_batches):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(T, D, dtype=torch.float64, generator=generator).requires_grad_()
        out = torch.cat([one.flatten(1) for one in compute(x)], -1)
        (out * torch.randn(out.shape, dtype=torch.float64, generator=generator)).sum().backward()
        found += [out.detach(), x.grad]
    found += [p.grad.clone() for p in parameters if p.grad is not None]
    for parameter in parameters:
        parameter.grad = None
    return found


def compare(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert len(ours) == len(expected)
    for one, exact in zip(ours, expected, strict=True):
        tolerance = 1e-12 if one.dtype == torch.float64 else 1e-5  # gradients of weights are rounded to float32
        torch.testing.assert_close(one.double(), exact.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_joined_products_are_those_of_the_layers(case: str, in_place: bool) -> None:
    make, *given = CASES[case]
    together, apart, parameters = make(*given)
    expected = gradients(apart, parameters, 2)
    with copies_of_weights(True), summed_in_place(in_place):
        compare(gradients(together, parameters, 2), expected)


@pytest.mark.parametrize("frozen", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_that_is_frozen_gets_no_gradient(case: str, frozen: int) -> None:
    make, *given = CASES[case]
    together, apart, parameters = make(*given)
    for parameter in parameters[::frozen]:
        parameter.requires_grad_(False)
    expected = gradients(apart, parameters)
    with copies_of_weights(True), summed_in_place():
        compare(gradients(together, parameters), expected)


def test_gradients_are_parts_of_one_matrix_and_others_are_added_to() -> None:
    together, apart, parameters = attention_case(True, 2, False)
    weights = parameters[::2]
    with copies_of_weights(True), summed_in_place():
        torch.cat([x.flatten(1) for x in together(torch.randn(T, D, dtype=torch.float64))], -1).sum().backward()
        first = [weight.grad for weight in weights]
        assert first[0]._base is first[1]._base is first[2]._base is not None
        assert first[0].data_ptr() + first[0].nbytes == first[1].data_ptr()
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # as somebody may set them
        compare(gradients(together, parameters), gradients(apart, parameters))


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of fused blocks run in float64, of copies of float32 weights, however small these are."""
    monkeypatch.setattr(functional, "LEAST_SIDE", 1)
    monkeypatch.setattr("groupwise.models.fused._lower", lambda _: torch.float64)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_model_with_joined_products_is_the_model(
    family: str, tiny_policy: Callable, random_samples: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters keep their names and their memory."""
    policy = tiny_policy(family, hidden=128, settings=ModelSettings(path="unused", dtype="float32"))
    (batch,) = pack(random_samples(), 10_000)
    places = {name: parameter.data_ptr() for name, parameter in policy.model.named_parameters()}
    counts = []
    attention_heads = joined._JoinedHeads.forward

    def counted(*given: object) -> object:
        counts.append(1)
        return attention_heads(*given)

    monkeypatch.setattr(joined._JoinedHeads, "forward", staticmethod(counted))

    def trained(on: bool) -> list[Tensor]:
        monkeypatch.setattr("groupwise.models.fused.joins", joined.joins if on else lambda *_: False)
        with fused_modules(policy.model), summed_in_place():
            hidden_PD = forward(policy, batch).hidden_PD
            (hidden_PD.square() * torch.linspace(-1.0, 2.0, hidden_PD.shape[1])).sum().backward()
        found = [hidden_PD.detach(), *(p.grad for p in policy.model.parameters() if p.grad is not None)]
        policy.model.zero_grad(set_to_none=True)
        return found

    expected = trained(False)
    assert not counts
    compare(trained(True), expected)
    assert len(counts) == 2
    assert {name: parameter.data_ptr() for name, parameter in policy.model.named_parameters()} == places


def test_copies_of_a_model_are_made_at_once_and_a_closed_one_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    copy = torch._foreach_copy_

    def counted(targets: list[Tensor], sources: list[Tensor]) -> None:
        calls.append(len(targets))
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    groups = [(nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(1, 2))), (nn.Parameter(torch.randn(4)),)]
    with copies_of_weights(True, groups), torch.no_grad():
        copies = functional.open_copies()
        assert copies is not None
        both = copies.joined(groups[0], torch.float64)
        assert torch.equal(both, torch.cat(groups[0]).double())
        assert copies.joined(groups[1], torch.float64) is copies.joined(groups[1], torch.float64)
    assert calls == [3] and copies.closed and not copies


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_with_an_adapter_is_their_sum(bias: bool, scale: float) -> None:
    base, (a, _), (b, _) = layer(INNER, D, bias), layer(3, D, False), layer(INNER, 3, False)
    base[0].requires_grad_(False)
    parameters = [p for p in (*base, a, b) if p is not None]

    def together(x: Tensor) -> tuple[Tensor, ...]:
        return (adapted_linear(x, base, (a, b), scale),)

    def apart(x: Tensor) -> tuple[Tensor, ...]:
        return (linear(x, base) + scale * (x @ a.double().T @ b.double().T),)

    expected = gradients(apart, parameters, 2)
    for in_place in (False, True):
        with copies_of_weights(True), summed_in_place(in_place):
            compare(gradients(together, parameters, 2), expected)


def test_the_last_layer_of_an_mlp_keeps_its_gate_alone() -> None:
    """What an adapter reads there is made again, as is what lies between its factors where no GPU is."""
    base, (a, _), (b, _) = layer(INNER, D, False), layer(3, INNER, False), layer(D, 3, False)
    frozen = base[0].detach().T.contiguous()
    gate, up = (torch.randn(7, INNER, requires_grad=True) for _ in range(2))
    expected_TI = torch.nn.functional.silu(gate) * up
    expected = expected_TI @ frozen.T + 0.3 * (expected_TI @ a.T @ b.T)
    leaves = (gate, up, a, b)
    expected_gradients = torch.autograd.grad(expected.square().sum(), leaves)
    for weight in (frozen, frozen.to):
        saved: list[int] = []

        def keep(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.data_ptr())
            return tensor

        opened_TI = functional.gated(gate, up)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = adapted_linear(opened_TI, (weight, None), (a, b), 0.3, (gate, up))
        if out.device.type == "cpu" and functional.operations().gpu_kernels(out) is None:
            assert saved == [gate.data_ptr(), up.data_ptr()]
        torch.testing.assert_close(out, expected)
        gradients_found = torch.autograd.grad(out.square().sum(), leaves)
        for found, right in zip(gradients_found, expected_gradients, strict=True):
            torch.testing.assert_close(found, right)


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
@pytest.mark.parametrize("dtype", ["float32", "autocast"])
def test_a_model_with_an_adapter_is_the_model(
    dtype: Any, targets: Any, on: bool, tiny_policy: Callable, random_samples: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the adapter on, off, and on some layers alone."""
    policy = tiny_policy("qwen2", hidden=128, settings=ModelSettings(path="unused", dtype=dtype))
    policy = lora.adapt(policy, LoraSettings(rank=4, targets=targets), base="x", seed=0)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    if not on:
        policy = without_adapter(policy)
    (batch,) = pack(random_samples(), 10_000)
    counts = []
    adapted = AdaptedLinear.forward

    def counted(*given: object) -> object:
        counts.append(1)
        return adapted(*given)

    monkeypatch.setattr(AdaptedLinear, "forward", staticmethod(counted))
    found = []
    for inside in (nullcontext(), fused_modules(policy.model)):
        with inside:
            hidden_PD = forward(policy, batch).hidden_PD
            if on:
                (hidden_PD.float().square() * torch.linspace(-1.0, 2.0, hidden_PD.shape[1])).sum().backward()
        trained = [p.grad for p in policy.model.parameters() if p.grad is not None]
        found.append([hidden_PD.detach(), *trained])
        policy.model.zero_grad(set_to_none=True)
    layers = 7 if targets == "all-linear" else 2
    assert len(counts) == (2 * layers if on else 0)
    assert len(found[0]) == len(found[1]) == (1 + 4 * layers if on else 1)
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).norm() < (1e-5 if dtype == "float32" else 3e-2) * expected.norm()
