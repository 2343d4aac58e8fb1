"""Every compiled kernel against the definition in torch's operations, in float64 where rounding would hide a mistake."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from groupwise.kernels import cpu
from groupwise.kernels.library import absence
from groupwise.models.attention import PackedAttention, explicit_attention
from groupwise.records import Layout

pytestmark = pytest.mark.skipif(absence() is not None, reason=f"no compiled kernels: {absence()}")

TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def threads():
    """Sets the number of threads, put back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """To the rounding of a type, measured on the whole tensor; where nothing but rounding is expected, of numbers around 1."""
    exact = expected.detach().double()
    error = float((found.detach().double() - exact).norm() / exact.norm().clamp_min(1.0))
    assert error < (4e-6 if dtype == torch.float32 else 1e-2), error


def layout_of(groups: list[tuple[int, list[int]]], filler: int) -> Layout:
    """Prompts, each with its completions behind it; a prompt of 0 tokens: completions that stand alone."""
    start, length, prefix, at = [], [], [], 0
    for prompt, completions in groups:
        owner = -1
        if prompt:
            owner = len(start)
            start.append(at), length.append(prompt), prefix.append(-1)
            at += prompt
        for size in completions:
            start.append(at), length.append(size), prefix.append(owner)
            at += size
    return Layout(start=tuple(start), length=tuple(length), prefix=tuple(prefix), total=at + filler)


groups = st.lists(st.tuples(st.integers(0, 70), st.lists(st.integers(1, 50), min_size=1, max_size=4)), min_size=1, max_size=4)


@given(
    groups=groups,
    filler=st.integers(0, 5),
    shared=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2, 3]),
    width=st.sampled_from([16, 48, 64]),
)
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_and_its_slopes_are_the_definition(
    dtype: torch.dtype, groups: list, filler: int, shared: int, group: int, width: int
) -> None:
    layout = layout_of(groups, filler)
    generator = torch.Generator().manual_seed(0)
    heads = shared * group

    def stream(count: int) -> Tensor:
        return torch.randn(1, layout.total, count, width, generator=generator).to(dtype).transpose(1, 2)

    given_ = [stream(heads), stream(shared), stream(shared)]
    mine = [tensor.clone().requires_grad_() for tensor in given_]
    exact = [tensor.double().requires_grad_() for tensor in given_]
    attend = PackedAttention(layout)
    assert cpu.fits(*mine)
    found = attend(0, *mine, width**-0.5, None, None)
    expected = explicit_attention(layout, *exact, width**-0.5, None, None)
    close(found, expected, dtype)
    slope = torch.randn(found.shape, generator=generator).to(dtype)
    found.backward(slope)
    expected.backward(slope.double())
    for one, other in zip(mine, exact, strict=True):
        close(one.grad, other.grad, dtype)


def test_attention_takes_any_steps_and_threads(threads) -> None:
    """Heads first or tokens first in memory, part of a joined projection, one thread or two: the same bits."""
    layout = layout_of([(20, [7, 31, 2]), (0, [40])], 3)
    joined = torch.randn(layout.total, 4 + 2 + 2, 32, generator=torch.Generator().manual_seed(0))
    query, key, value = (part.transpose(0, 1)[None] for part in joined.split([4, 2, 2], 1))
    stretches = PackedAttention(layout).stretches
    threads(1)
    out, lse = cpu.attention(query, key, value, stretches, 0.2)
    grads = cpu.attention_backward(out.contiguous(), query, key, value, out, lse, stretches, 0.2)
    threads(2)
    other, _ = cpu.attention(query.contiguous(), key.contiguous(), value.contiguous(), stretches, 0.2)
    assert torch.equal(out, other)
    again = cpu.attention_backward(out, query.contiguous(), key, value.contiguous(), out, lse, stretches, 0.2)
    assert all(torch.equal(one, two) for one, two in zip(grads, again, strict=True))


@pytest.mark.parametrize(("prompt", "width"), [(2085, 32), (70, 80), (45, 128), (33, 256)])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_over_many_keys_and_of_wide_heads(dtype: torch.dtype, prompt: int, width: int) -> None:
    """Lengths that are no whole blocks, scores larger than usual."""
    layout = layout_of([(prompt, [33, 1, 40]), (prompt // 3, [])], 0)
    generator = torch.Generator().manual_seed(0)
    given_ = [torch.randn(1, 1, layout.total, width, generator=generator).to(dtype) for _ in range(4)]
    query, key, value, slope = given_
    scale = 20 / width
    stretches = PackedAttention(layout).stretches
    out, lse = cpu.attention(query, key, value, stretches, scale)
    exact = [tensor.double().requires_grad_() for tensor in given_[:3]]
    expected = explicit_attention(layout, *exact, scale, None, None).transpose(1, 2)
    close(out, expected, dtype)
    expected.backward(slope.double())
    found = cpu.attention_backward(slope, query, key, value, out, lse, stretches, scale)
    for one, other in zip(found, exact, strict=True):
        close(one, other.grad, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_attention_depends_on_nothing_that_was_there_before(dtype: torch.dtype) -> None:
    """What a thread's room holds from a longer and broken stream reaches no other: the same bits."""
    layout, longer = layout_of([(20, [7, 31, 2]), (0, [40])], 0), layout_of([(90, [70, 80])], 0)
    streams = torch.randn(4, 1, 2, layout.total, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    broken = torch.full((4, 1, 2, longer.total, 80), torch.nan, dtype=dtype)

    def everything(layout: Layout, tensors: Tensor) -> tuple[Tensor, ...]:
        stretches = PackedAttention(layout).stretches
        query, key, value, slope = tensors.unbind()
        out, lse = cpu.attention(query, key, value, stretches, 0.2)
        return out, lse, *cpu.attention_backward(slope, query, key, value, out, lse, stretches, 0.2)

    before = everything(layout, streams)
    assert all(bool(torch.isnan(one).all()) for one in everything(longer, broken))
    assert all(torch.equal(one, other) for one, other in zip(before, everything(layout, streams), strict=True))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(wrong: float) -> None:
    """A broken number must reach whoever looks for it, and no other sequence."""
    layout = layout_of([(0, [9, 9])], 0)
    query, key, value = (torch.randn(1, 1, 18, 16) for _ in range(3))
    key[0, 0, 3] = wrong
    out, _ = cpu.attention(query, key, value, PackedAttention(layout).stretches, 0.25)
    assert not bool(torch.isfinite(out[0, 0, 3:9]).all())
    assert bool(torch.isfinite(out[0, 0, 9:]).all()) and bool(torch.isfinite(out[0, 0, :3]).all())


@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("dtype", TYPES)
def test_decoding_is_the_definition(dtype: torch.dtype, group: int, window: int | None, threads) -> None:
    generator = torch.Generator().manual_seed(group)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    shared, width, room = 2, 32, 40
    entry_R, prompts = [2, 0, 0, 1, 2] + [1] * 18, [20, 1, 33]
    length_R = torch.randint(1, room, (len(entry_R),), generator=generator)
    rows = len(entry_R)
    query, key, value = normal(rows, shared * group, width), normal(rows, shared, width), normal(rows, shared, width)
    own = normal(rows, shared, room, width), normal(rows, shared, room, width)
    prompt = normal(3, shared, 35, width), normal(3, shared, 35, width)
    before = [slab.clone() for slab in own]
    for count in (1, 2):
        threads(count)
        out = cpu.decode_attention(query, key, value, own, prompt, cpu.Rows(entry_R, prompts), length_R, 0.3, window)
        for r, (entry, n) in enumerate(zip(entry_R, length_R.tolist(), strict=True)):
            for slab, old, new in zip(own, before, (key, value), strict=True):
                assert torch.equal(slab[r, :, n - 1], new[r]) and torch.equal(slab[r, :, : n - 1], old[r, :, : n - 1])
            keys, values = (
                torch.cat([part[entry, :, : prompts[entry]], slab[r, :, :n]], 1).double().repeat_interleave(group, 0)
                for part, slab in zip(prompt, own, strict=True)
            )
            seen = slice(max(0, prompts[entry] + n - window) if window else 0, None)
            scores = (keys[:, seen] @ query[r].double()[..., None])[..., 0] * 0.3
            close(out[r], (scores.softmax(-1)[:, None] @ values[:, seen])[:, 0], dtype)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (50, 70), (130, 33), (512, 96)])
@pytest.mark.parametrize("dtype", TYPES)
def test_products_are_the_definition(dtype: torch.dtype, shape: tuple[int, int], turned: bool, threads) -> None:
    """Sizes that fill no panel and no tile, weights that lie either way; a row's bits do not depend on the rows beside it."""
    if not cpu.multiplies(dtype):
        pytest.skip("no matrix tiles on this processor")
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    weight = weight.T.contiguous().T if turned else weight
    x = torch.randn(261, inputs, generator=generator).to(dtype)
    threads(1)
    whole = cpu.Product(weight, bias, dtype)(x)
    close(whole, F.linear(x.double(), weight.to(dtype).double(), bias.double()), dtype)
    threads(2)
    product = cpu.Product(weight, bias, dtype)
    for rows in (1, 2, 3, 7, 8, 14, 15, 16, 17, 33, 48, 200, 241):
        assert torch.equal(product(x[:rows]), whole[:rows])
    close(cpu.Product(weight, None, dtype)(x), F.linear(x.double(), weight.to(dtype).double()), dtype)


@pytest.mark.parametrize("out", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_norms_are_the_definition(dtype: torch.dtype, out: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(37, 48, generator=generator).to(dtype), torch.randn(48, generator=generator)
    slope = torch.randn(37, 48, generator=generator).to(out)
    exact, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = F.rms_norm(exact, (48,), exact_weight, 1e-5)
    expected.backward(slope.double())
    found, scale_T = cpu.rms_norm(x, weight, 1e-5, out)
    close(found, expected, out)
    grad_x, grad_weight = cpu.rms_norm_backward(slope, x, weight, scale_T)
    close(grad_x, exact.grad, dtype)
    close(grad_weight, exact_weight.grad, torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_norm_behind_a_sum(dtype: torch.dtype) -> None:
    x, add, weight = torch.randn(5, 32), torch.randn(5, 32).to(dtype), torch.randn(32)
    total = x.double() + add.double()
    found = cpu.add_rms_norm(x, add, weight, 1e-6, dtype)
    close(x, total, torch.float32)
    close(found, F.rms_norm(total, (32,), weight.double(), 1e-6), dtype)
    before = x.clone()
    close(cpu.add_rms_norm(x, None, weight, 1e-6, dtype), found, dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", TYPES)
def test_turning_forward_and_back(dtype: torch.dtype) -> None:
    """Tables whose halves differ, so that an exchanged half would show: the slope is the transposed turn."""
    joined = torch.randn(9, 5, 32).to(dtype)
    cos, sin = torch.randn(9, 32), torch.randn(9, 32)
    heads = joined[:, 1:4]

    def turned(x: Tensor) -> Tensor:
        half = torch.cat([-x[..., 16:], x[..., :16]], -1)
        return x * cos.double()[:, None] + half * sin.double()[:, None]

    exact = heads.double().requires_grad_()
    expected = turned(exact)
    close(cpu.rotate(heads, cos, sin), expected, dtype)
    slope = torch.randn(9, 3, 32).to(dtype)
    expected.backward(slope.double())
    close(cpu.rotate(slope, cos, sin, -1.0), exact.grad, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_gates_and_their_slopes(dtype: torch.dtype) -> None:
    joined = torch.randn(11, 64).to(dtype) * 4
    gate, up = joined.chunk(2, -1)
    exact_gate, exact_up = gate.double().requires_grad_(), up.double().requires_grad_()
    expected = F.silu(exact_gate) * exact_up
    close(cpu.gated(gate, up), expected, dtype)
    slope = torch.randn(11, 32).to(dtype)
    expected.backward(slope.double())
    grad = slope.clone()
    inner, grad_up = cpu.gated_backward(grad, gate.contiguous(), up.contiguous())
    close(inner, expected, dtype)
    close(grad_up, exact_up.grad, dtype)
    close(grad, exact_gate.grad, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_gelu_and_its_slope(dtype: torch.dtype) -> None:
    x, slope = torch.randn(11, 32).to(dtype) * 4, torch.randn(11, 32).to(dtype)
    exact = x.double().requires_grad_()
    expected = F.gelu(exact, approximate="tanh")
    expected.backward(slope.double())
    grad = slope.clone()
    for found in (cpu.gelu(x), cpu.gelu_backward(grad, x)):
        close(found, expected, dtype)
    close(grad, exact.grad, dtype)


def test_the_exponential_from_end_to_end() -> None:
    """Seen through the gate, silu(x) / x = 1 / (1 + exp(-x)): exact where it is 0, 1/2 and 1, and never NaN between."""
    x = torch.from_numpy(np.linspace(-120, 120, 4096, dtype=np.float32))[None]
    found = cpu.gated(x, torch.ones_like(x))
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.double(), F.silu(x.double()), rtol=1e-6, atol=1e-36)
    nan = cpu.gated(torch.full((1, 16), torch.nan, dtype=torch.bfloat16), torch.ones(1, 16, dtype=torch.bfloat16))
    assert torch.isnan(nan).all()


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    x = torch.randn(64, 64) * torch.logspace(-30, 30, 64)
    assert torch.equal(cpu.gated(torch.full_like(x, 1e4), x), x * 1e4)
    out = cpu.add_rms_norm(torch.ones(64, 64), None, x[0], 0.0, torch.bfloat16)
    assert torch.equal(out[0], x[0].to(torch.bfloat16))


def test_what_the_kernels_do_not_take() -> None:
    good = torch.zeros(2, 16)
    assert cpu.fits(good)
    assert not cpu.fits(good.double())
    assert not cpu.fits(torch.zeros(2, 24))
    assert not cpu.fits(torch.zeros(16, 2).T)
    assert not cpu.fits(good, good.double())
    assert not cpu.fits(good.to("meta"))
    assert not cpu.fits(good, torch.zeros(2, 32))
    assert cpu.fits(good, good.bfloat16()) and not cpu.fit_as_one(good, good.bfloat16())


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 32), (torch.float32, 16)])
def test_attention_never_reads_one_type_or_width_as_another(dtype: torch.dtype, width: int) -> None:
    """Values in another type, or narrower than keys, are left to torch, which computes them or says that it does not."""
    query, value = torch.ones(1, 1, 9, 32), torch.ones(1, 1, 9, width, dtype=dtype)
    with pytest.raises(RuntimeError):
        PackedAttention(layout_of([(0, [9])], 0))(0, query, query, value, 1.0, None, None)


def test_the_default_type_of_new_tensors_changes_nothing() -> None:
    """What the kernels write into is float32, whatever a program has made of torch's default."""
    x = torch.randn(5, 16)
    query = torch.randn(1, 1, 18, 16)
    stretches = PackedAttention(layout_of([(0, [18])], 0)).stretches
    _, expected = cpu.attention(query, query, query, stretches, 0.25)
    try:
        torch.set_default_dtype(torch.float64)
        _, lse = cpu.attention(query, query, query, stretches, 0.25)
        _, scale_T = cpu.rms_norm(x, torch.ones(16, dtype=torch.float32), 1e-5, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(lse, expected)
    close(scale_T, x.double().square().mean(-1).add(1e-5).rsqrt(), torch.float32)
