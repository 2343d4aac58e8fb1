"""Products of large matrices: against float64, against torch's own in float32, and where one of the two ways replaces the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import KernelCalls
from torch import Tensor, nn
from torch.nn import functional as F

from groupwise.models.fused import fused_modules
from groupwise.models.passes import forward
from groupwise.ops.in_place_gradients import summed_in_place
from groupwise.ops.operations import absence

kernels = pytest.importorskip("groupwise_cpu.compiled")
add_product = pytest.importorskip("groupwise_cpu.matmul").add_product
product = pytest.importorskip("groupwise_cpu.matmul").product
right = pytest.mark.skipif(absence() is not None, reason="no kernels")


def compiled(test: Any) -> Any:
    """Ours, also where torch's are as good."""
    return right(pytest.mark.usefixtures("ours")(test))


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_gemm", lambda: True)


TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def matrix(rows: int, columns: int, turned: bool, dtype: torch.dtype = torch.float32, wide: int = 0) -> Tensor:
    """Random numbers; `turned`: a column's lie side by side; `wide`: so many that are not its own between rows (or columns)."""
    made = torch.randn(columns, rows + wide)[:, :rows].T if turned else torch.randn(rows, columns + wide)[:, :columns]
    return made.to(dtype)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact).norm() / exact.norm())


@right
@given(
    sizes=st.tuples(st.integers(1, 130), st.integers(1, 130), st.one_of(st.integers(1, 130), st.integers(500, 600), st.just(1600))),
    turned=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from(TYPES),
    wide=st.sampled_from([0, 3]),
    start=st.sampled_from(["nothing", "bias", "sum"]),
    seed=st.integers(0, 1000),
)
def test_a_product_is_the_definition_for_every_size_order_and_type(
    sizes: tuple[int, int, int],
    turned: tuple[bool, bool],
    dtype: torch.dtype,
    wide: int,
    start: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    rows, columns, depth = sizes
    a, b = matrix(rows, depth, turned[0], dtype, wide), matrix(depth, columns, turned[1], dtype, wide)
    bias, room = torch.randn(columns), torch.full((rows + 1, columns + 2), 7.0)
    out = room[:rows, :columns]
    if start == "sum":
        out.copy_(torch.randn(rows, columns))
    before = {"nothing": torch.zeros(()), "bias": bias, "sum": out}[start].double()
    exact = before + a.double() @ b.double()
    # A sum is rounded by the size of what is added, not by its own: terms that cancel leave the error that they brought.
    size = before.abs() + a.double().abs() @ b.double().abs()
    kernels.operations.gemm(a, b, out, bias=bias if start == "bias" else None, add=start == "sum")
    assert ((out.double() - exact).abs() <= 8 * 2.0**-24 * size).all()
    assert (room[rows:] == 7.0).all() and (room[:, columns:] == 7.0).all(), "it wrote beside the result"


@compiled
@pytest.mark.parametrize("depth", [100, 512, 1216, 3072])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False)], ids=["x W", "x W^T", "x^T y"])
@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e15], ids=["ones", "small", "large"])
def test_float32_is_as_exact_as_torchs_own(depth: int, turned: tuple[bool, bool], scale: float) -> None:
    """Three bfloat16 numbers hold all of a float32 number, and what is left out of a product is below its rounding."""
    torch.manual_seed(depth)
    # Rows of very different size: each has to be right for itself.
    a = matrix(200, depth, turned[0]) * scale * torch.logspace(-4, 4, 200)[:, None]
    b = matrix(depth, 300, turned[1])
    exact = a.double() @ b.double()
    found = torch.empty(200, 300)
    kernels.operations.gemm(a, b, found)
    rows = lambda x: ((x.double() - exact).norm(dim=1) / exact.norm(dim=1)).max()  # noqa: E731
    assert rows(found) <= 1.1 * rows(a @ b)
    assert rows(found) < 3.5e-7


@compiled
def test_whole_numbers_are_multiplied_without_any_error() -> None:
    """16 bits times 8, and few of them: every digit fits into float32, so every bit must be right."""
    torch.manual_seed(0)
    a, b = torch.randint(-(2**15), 2**15, (130, 100)).float(), torch.randint(-1, 2, (100, 140)).float()
    found = torch.empty(130, 140)
    kernels.operations.gemm(a, b, found)
    assert torch.equal(found.double(), a.double() @ b.double())


@compiled
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_stays_so_and_goes_nowhere_else(value: float, side: int) -> None:
    a, b = torch.randn(130, 120), torch.randn(120, 140)
    (a, b)[side][17, 33] = value
    found = torch.empty(130, 140)
    kernels.operations.gemm(a, b, found)
    bad = torch.zeros(130, 140, dtype=torch.bool)
    bad[17 if side == 0 else slice(None), slice(None) if side == 0 else 33] = True
    assert not found[bad].isfinite().any() and found[~bad].isfinite().all()


@compiled
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], ids=["of a GPU", "all ones", "of torch", "signalling"])
@pytest.mark.parametrize("side", [0, 1])
def test_no_form_of_what_is_not_a_number_is_lost(bits: int, side: int) -> None:
    pair = torch.randn(130, 120), torch.randn(120, 140)
    pair[side].view(torch.int32)[17, 33] = bits
    found = torch.empty(130, 140)
    kernels.operations.gemm(*pair, found)
    assert (found[17] if side == 0 else found[:, 33]).isnan().all()


@compiled
def test_the_largest_and_the_smallest_numbers() -> None:
    for size in (2.0**127, 2.0**-100):
        a, found = size * (0.5 + torch.rand(128, 128)), torch.empty(128, 128)
        kernels.operations.gemm(a, torch.eye(128), found)
        torch.testing.assert_close(found, a, rtol=1.2e-7, atol=0)


@compiled
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [(700, 300, 600), (100, 1500, 200)])
def test_threads_and_rows_beside_change_no_bit(
    size: tuple[int, int, int], dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    torch.manual_seed(0)
    rows, columns, depth = size
    a, b = matrix(rows, depth, False, dtype), matrix(depth, columns, True, dtype)
    found = {}
    for count in (1, 2, 5):
        threads(count)
        found[count] = torch.empty(rows, columns)
        kernels.operations.gemm(a, b, found[count])
    assert torch.equal(found[1], found[2]) and torch.equal(found[1], found[5])
    part = torch.empty(50, columns)
    kernels.operations.gemm(a[37:87], b, part)
    assert torch.equal(part, found[1][37:87])


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
@pytest.mark.parametrize("side", [20, 150], ids=["by torch", "large"])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_products_and_sums_of_products_by_either_way(dtype: torch.dtype, side: int, turned: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    a, b = matrix(side + 3, side, turned[0], dtype), matrix(side, side + 5, turned[1], dtype)
    bias = torch.randn(side + 5).to(dtype)
    exact = a.double() @ b.double()
    tolerance = 8e-3 if dtype == torch.bfloat16 else 1e-6
    assert product(a, b).dtype == dtype
    assert error(product(a, b), exact) < tolerance
    assert error(product(a, b, bias), exact + bias.double()) < tolerance
    given_room = torch.empty(side + 3, side + 5, dtype=dtype)
    assert product(a, b, out=given_room) is given_room and error(given_room, exact) < tolerance
    total = torch.full((side + 3, side + 5), float("nan"), dtype=torch.promote_types(dtype, torch.float32))
    add_product(total, a, b, fresh=True)
    assert error(total, exact) < tolerance
    add_product(total, a, b, fresh=False)
    assert error(total, 2 * exact) < tolerance


def test_results_and_biases_may_lie_in_any_steps() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(100, 120), torch.randn(120, 130)
    exact = a.double() @ b.double()
    for out in (torch.empty(130, 100).T, torch.empty(100, 260)[:, ::2]):
        assert product(a, b, out=out) is out and error(out, exact) < 1e-6
        add_product(out, a, b, fresh=False)
        assert error(out, 2 * exact) < 1e-6
    for bias in (torch.randn(260)[::2], torch.randn(1).expand(130)):
        assert error(product(a, b, bias), exact + bias.double()) < 1e-6


def test_matrices_that_do_not_fit_together_are_refused() -> None:
    """Not read beyond their end."""
    a, b = torch.randn(100, 120), torch.randn(120, 130)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        product(a, torch.randn(140, 130))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        add_product(torch.empty(100, 130), a, torch.randn(140, 130), fresh=True)
    with pytest.raises(RuntimeError):
        add_product(torch.empty(50, 130), a, b, fresh=False)
    with pytest.raises(RuntimeError):
        product(a, b, torch.randn(100))


@compiled
def test_gradients_in_float32_are_not_rounded_to_bfloat16() -> None:
    torch.manual_seed(0)
    a, b = matrix(128, 600, True, torch.bfloat16), matrix(600, 160, False, torch.bfloat16)
    total = torch.empty(128, 160)
    add_product(total, a, b, fresh=True)
    assert error(total, a.double() @ b.double()) < 1e-6
    assert error((a @ b).float(), a.double() @ b.double()) > 1e-3


@pytest.mark.parametrize("lower", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_and_its_gradients(lower: bool, in_place: bool, bias: bool) -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model = self.linear = nn.Linear(128, 160, bias=bias)

    model = Model()
    x, grad = torch.randn(2, 100, 128, requires_grad=True), torch.randn(2, 100, 160)
    expected = F.linear(x.double(), model.linear.weight.double(), model.linear.bias.double() if bias else None)
    wanted = torch.autograd.grad(expected, [x, *model.parameters()], grad.double())
    with torch.autocast("cpu", torch.bfloat16, enabled=lower), fused_modules(model), summed_in_place(in_place):  # type: ignore[arg-type]
        for _ in range(2):  # gradients are summed
            found = model.linear(x)
            found.backward(grad.to(found.dtype))
    tolerance = 1e-2 if lower else 1e-6
    assert found.shape == (2, 100, 160) and found.dtype == (torch.bfloat16 if lower else torch.float32)
    assert error(found, expected.detach()) < tolerance
    for parameter, exact in zip((x, *model.parameters()), wanted, strict=True):
        assert parameter.grad is not None and error(parameter.grad, 2 * exact.double()) < tolerance


@pytest.fixture
def layer() -> nn.Module:
    model = nn.Module()
    model.base_model = model.linear = nn.Linear(128, 160)
    return model


def test_a_frozen_linear_layer_does_not_keep_its_inputs(layer: Any) -> None:
    """Under adapters they would be the largest tensors of all."""
    layer.linear.weight.requires_grad_(False)
    x, kept = torch.randn(200, 128, requires_grad=True), []
    seen = torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor.shape), tensor)[1], lambda tensor: tensor)
    with fused_modules(layer), seen:
        found = layer.linear(x)
    assert (200, 128) not in kept
    found.sum().backward()
    torch.testing.assert_close(x.grad, layer.linear.weight.sum(0).expand(200, 128), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.linear.bias.grad, torch.full((160,), 200.0))
    assert layer.linear.weight.grad is None


@pytest.mark.parametrize("shape", [(128,), (0, 128), (2, 0, 128), (2, 3, 100, 128)])
def test_a_linear_layer_takes_every_shape_that_torchs_takes(layer: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with fused_modules(layer):
        found = layer.linear(x)
    torch.testing.assert_close(found, layer.linear(x))


def test_a_linear_layer_refuses_inputs_of_another_width(layer: Any) -> None:
    with fused_modules(layer), pytest.raises(RuntimeError, match="cannot be multiplied"):
        layer.linear(torch.randn(100, 130))


@compiled
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_a_model_of_these_products_is_the_same_model(
    family: str, tiny_policy: Callable, random_samples: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every matrix by them, however small."""
    from groupwise.data.packing import pack

    policy = tiny_policy(family, hidden=128, scale=1.5)
    (batch,) = pack(random_samples(), 10_000)
    found = []
    for least in (1 << 30, 1):
        monkeypatch.setattr(kernels, "LEAST_SIDE", least)
        policy.model.zero_grad()
        with fused_modules(policy.model), summed_in_place(), KernelCalls() as called:
            hidden = forward(policy, batch).hidden_PD
            hidden.backward(torch.linspace(-1, 1, hidden.numel()).view_as(hidden))
        assert ("gemm" in called.names) == (least == 1)
        found.append((hidden.detach(), {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}))
    (plain, plain_gradients), (quick, quick_gradients) = found
    torch.testing.assert_close(quick, plain, rtol=1e-4, atol=1e-4)
    assert quick_gradients.keys() == plain_gradients.keys()
    for name, expected in plain_gradients.items():
        assert error(quick_gradients[name], expected.double()) < 1e-4, name
