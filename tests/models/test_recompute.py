"""Blocks that are computed again in the backward pass: what is computed, what is kept, and that no gradient changes by a bit."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groupwise.config.settings import ModelSettings
from groupwise.data.packing import pack
from groupwise.models.backbone import checkpointing
from groupwise.models.fused import fused_modules
from groupwise.models.passes import forward
from groupwise.models.policy import Policy
from groupwise.ops import functional
from groupwise.ops.functional import FirstProducts, LastProduct
from groupwise.ops.in_place_gradients import summed_in_place
from groupwise.ops.operations import operations
from groupwise.records import Batch

LAYERS = 4


def gradients(policy: Policy, batch: Batch, *, again: bool, in_place: bool = True) -> dict[str, Tensor]:
    """Of the same sum of hidden states; nothing stays behind."""
    with checkpointing(policy, True) if again else nullcontext(), fused_modules(policy.model), summed_in_place(in_place):
        hidden_PD = forward(policy, batch).hidden_PD
        (hidden_PD.float().square() * torch.linspace(-1.0, 2.0, hidden_PD.shape[1])).sum().backward()
    found = {name: parameter.grad for name, parameter in policy.model.named_parameters() if parameter.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    return found


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often forward passes of MLPs, their last products and sums in place were computed."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*given: Any, **keywords: Any) -> Any:
            counts[name] += 1
            return function(*given, **keywords)

        return count

    for kind, name in ((FirstProducts, "mlp"), (LastProduct, "last product")):
        monkeypatch.setattr(kind, "forward", staticmethod(counted(name, kind.forward)))
    ours = operations()
    monkeypatch.setattr(ours, "add_product", counted("sum in place", ours.add_product))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "autocast"])
@pytest.mark.parametrize("hidden", [32, 128])  # heads of 8 numbers, and of 32, as the compiled kernels take them
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_products_that_backward_does_not_read_are_not_recomputed(
    family: str,
    hidden: int,
    dtype: Any,
    in_place: bool,
    tiny_policy: Callable,
    random_samples: Callable,
    computed: Counter[str],
) -> None:
    policy = tiny_policy(family, hidden=hidden, layers=LAYERS, settings=ModelSettings(path="unused", dtype=dtype))
    (batch,) = pack(random_samples(), 10_000)
    computed.clear()  # what proved the policy counts for nothing
    expected = gradients(policy, batch, again=False, in_place=in_place)
    assert (computed["mlp"], computed["last product"]) == (LAYERS, LAYERS)
    sums = computed["sum in place"]
    computed.clear()
    found = gradients(policy, batch, again=True, in_place=in_place)
    assert computed["mlp"] == LAYERS + LAYERS - 1, "all but the last are computed again"
    assert computed["last product"] == LAYERS, "whose last products nobody reads"
    assert computed["sum in place"] == sums, "gradients are summed in place, whether activations are recomputed or not"
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("again", [False, True])
def test_another_threads_backward_pass_takes_the_lower_precisions_that_were_made(
    again: bool, tiny_policy: Callable, random_samples: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy("llama", hidden=128, settings=ModelSettings(path="unused", dtype="autocast"))
    (batch,) = pack(random_samples(), 10_000)
    made = []
    like = functional.like

    def counted(weight: Tensor, x: Tensor, copies: Any) -> Tensor:
        before = None if copies is None else len(copies)
        found = like(weight, x, copies)
        if found.dtype != weight.dtype and (before is None or len(copies) != before):
            made.append(tuple(weight.shape))
        return found

    monkeypatch.setattr(functional, "like", counted)
    with checkpointing(policy, True) if again else nullcontext(), fused_modules(policy.model), summed_in_place():
        value = forward(policy, batch).hidden_PD.float().square().sum()
        first = list(made)
        assert len(first) >= 2 * 5, "matrices of two blocks, all but those that are left to torch"
        thread = threading.Thread(target=value.backward)
        thread.start()
        thread.join()
    assert made == first and policy.model.model.layers[0].mlp.down_proj.weight.grad is not None


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_last_product_that_is_read_is_computed_again(family: str, tiny_policy: Callable, computed: Counter[str]) -> None:
    """One checkpoint around two MLPs: the second reads what the first's product gave."""
    policy = tiny_policy(family, hidden=128)
    layers = policy.model.transformer.h if family == "gpt2" else policy.model.model.layers
    x_TD = torch.randn(1, 9, 128)

    def two(x: Tensor) -> Tensor:
        return layers[1].mlp(x + layers[0].mlp(x))

    found = []
    for run in (two, lambda x: checkpoint(two, x, use_reentrant=False)):
        x = x_TD.clone().requires_grad_()
        computed.clear()
        with fused_modules(policy.model):
            out = run(x)
            out.square().sum().backward()
        found.append([out.detach(), x.grad, *(layer.grad for layer in layers.parameters() if layer.grad is not None)])
        policy.model.zero_grad(set_to_none=True)
    assert computed["last product"] == 3, "the first's again, the second's not"
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_backward_pass_of_another_thread_sums_in_place_too(
    tiny_policy: Callable, random_samples: Callable, computed: Counter[str]
) -> None:
    """As on a GPU, where backward passes are run by threads of torch's."""
    policy = tiny_policy("llama", hidden=128)
    (batch,) = pack(random_samples(), 10_000)
    expected = gradients(policy, batch, again=False)
    sums = computed.pop("sum in place")
    with fused_modules(policy.model), summed_in_place():
        hidden_PD = forward(policy, batch).hidden_PD
        value = (hidden_PD.float().square() * torch.linspace(-1.0, 2.0, hidden_PD.shape[1])).sum()
        thread = threading.Thread(target=value.backward)
        thread.start()
        thread.join()
    assert computed["sum in place"] == sums
    for name, parameter in policy.model.named_parameters():
        if name in expected:
            assert torch.equal(parameter.grad, expected[name]), name


def test_frozen_weights_under_recomputation_get_no_gradient(tiny_policy: Callable, random_samples: Callable) -> None:
    policy = tiny_policy("qwen2", hidden=128, layers=LAYERS)
    (batch,) = pack(random_samples(), 10_000)
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_("norm" in name)
    expected, found = (gradients(policy, batch, again=again) for again in (False, True))
    assert expected.keys() == found.keys() and all("norm" in name for name in found)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("dtype", ["float32", "autocast"])
def test_a_graph_that_is_kept_is_computed_again_as_often_as_it_is_asked(
    dtype: Any, tiny_policy: Callable, random_samples: Callable
) -> None:
    policy = tiny_policy("llama", hidden=128, layers=LAYERS, settings=ModelSettings(path="unused", dtype=dtype))
    (batch,) = pack(random_samples(), 10_000)
    matrix = policy.model.model.layers[0].mlp.up_proj.weight
    with checkpointing(policy, True), fused_modules(policy.model):
        value = forward(policy, batch).hidden_PD.float().square().sum()
        found = [torch.autograd.grad(value, matrix, retain_graph=True)[0] for _ in range(2)]
    assert found[0].norm() > 0.0 and torch.equal(*found)


def test_recomputation_inside_recomputation_ends_where_it_began(
    tiny_policy: Callable, random_samples: Callable, computed: Counter[str]
) -> None:
    policy = tiny_policy("llama", hidden=128, layers=LAYERS)
    (batch,) = pack(random_samples(), 10_000)

    def is_recomputed() -> bool:
        computed.clear()
        with fused_modules(policy.model):
            forward(policy, batch).hidden_PD.square().sum().backward()
        assert computed["mlp"] in (LAYERS, LAYERS + LAYERS - 1)
        return computed["mlp"] > LAYERS

    with checkpointing(policy, True):
        for on in (True, False):
            with checkpointing(policy, on):
                assert is_recomputed() == on
            assert is_recomputed()
    assert not is_recomputed()
