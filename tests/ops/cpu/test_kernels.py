"""Every compiled kernel against the definition in torch's operations, in float64 where rounding would hide a mistake."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_attention import definition
from torch import Tensor
from torch.nn import functional as F

from groupwise.ops.attention import StreamAttention
from groupwise.ops.linear_cross_entropy import Head, chosen_logprobs
from groupwise.ops.operations import absence
from groupwise.ops.query import Query, Reach
from groupwise.records import Layout
from groupwise.rollout.native.decode_attention import rows_by_prompt

decoding = pytest.importorskip("groupwise_cpu.decoding")
kernels = pytest.importorskip("groupwise_cpu.compiled")
pytestmark = pytest.mark.skipif(absence() is not None, reason=f"no compiled kernels: {absence()}")

TYPES = [torch.float32, torch.bfloat16]
ATTENTION = decoding.CompiledBlockedAttention()


def segments_of(layout):
    return kernels.segments(StreamAttention(layout).families)


def rows_of(entry_R, prompt_length_P):
    return ATTENTION.rows(rows_by_prompt(entry_R, len(prompt_length_P)), prompt_length_P)


def decode(query, key, value, own, prompt, rows, length_R, scale, window):
    return ATTENTION.decode(Query(0, query, key, value, scale, None, Reach(window=window)), own, prompt, rows, length_R)


@pytest.fixture
def threads():
    """Sets the number of threads, put back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """To the rounding of a type, measured on the whole tensor; where nothing but rounding is expected, of numbers around 1: where
    those of the way to it cancel out (of a query with one key), some 1e-7 of each is left."""
    exact = expected.detach().double()
    error, size = float((found.detach().double() - exact).norm()), float(exact.norm().clamp_min(1.0))
    allowed = 4e-6 * size + 4e-7 * exact.numel() ** 0.5 if dtype == torch.float32 else 1e-2 * size
    assert error < allowed, (error, allowed)


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
def test_attention_and_its_gradients_are_the_definition(
    dtype: torch.dtype, groups: list, filler: int, shared: int, group: int, width: int
) -> None:
    layout = layout_of(groups, filler)
    generator = torch.Generator().manual_seed(0)
    heads = shared * group

    def stream(count: int) -> Tensor:
        return torch.randn(layout.total, count, width, generator=generator).to(dtype)

    given_ = [stream(heads), stream(shared), stream(shared)]
    mine = [tensor.clone().requires_grad_() for tensor in given_]
    exact = [tensor.double().requires_grad_() for tensor in given_]
    assert kernels.fits(*Query(0, *mine, 1.0).heads)
    found = StreamAttention(layout)(Query(0, *mine, width**-0.5))
    expected = definition(layout, Query(0, *exact, width**-0.5))
    close(found, expected, dtype)
    grad = torch.randn(found.shape, generator=generator).to(dtype)
    found.backward(grad)
    expected.backward(grad.double())
    for one, other in zip(mine, exact, strict=True):
        close(one.grad, other.grad, dtype)


def test_attention_takes_any_steps_and_threads(threads) -> None:
    """Heads first or tokens first in memory, part of a joined projection, one thread or two: the same bits."""
    layout = layout_of([(20, [7, 31, 2]), (0, [40])], 3)
    joined = torch.randn(layout.total, 4 + 2 + 2, 32, generator=torch.Generator().manual_seed(0))
    query, key, value = (part.transpose(0, 1)[None] for part in joined.split([4, 2, 2], 1))
    segments = segments_of(layout)
    threads(1)
    out, lse = kernels.operations.attention(query, key, value, *segments, 0.2)
    grads = kernels.operations.attention_backward(out.contiguous(), query, key, value, out, lse, *segments, 0.2)
    threads(2)
    other, _ = kernels.operations.attention(query.contiguous(), key.contiguous(), value.contiguous(), *segments, 0.2)
    assert torch.equal(out, other)
    again = kernels.operations.attention_backward(out, query.contiguous(), key, value.contiguous(), out, lse, *segments, 0.2)
    assert all(torch.equal(one, two) for one, two in zip(grads, again, strict=True))


@pytest.mark.parametrize(("prompt", "width"), [(2085, 32), (70, 80), (45, 128), (33, 256)])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_over_many_keys_and_of_wide_heads(dtype: torch.dtype, prompt: int, width: int) -> None:
    """Lengths that are no whole blocks, scores larger than usual."""
    layout = layout_of([(prompt, [33, 1, 40]), (prompt // 3, [])], 0)
    generator = torch.Generator().manual_seed(0)
    given_ = [torch.randn(1, 1, layout.total, width, generator=generator).to(dtype) for _ in range(4)]
    query, key, value, grad = given_
    scale = 20 / width
    segments = segments_of(layout)
    out, lse = kernels.operations.attention(query, key, value, *segments, scale)
    exact = [tensor.double().requires_grad_() for tensor in given_[:3]]
    expected = definition(layout, Query(0, *(x[0].transpose(0, 1) for x in exact), scale)).transpose(0, 1)[None]
    close(out, expected, dtype)
    expected.backward(grad.double())
    found = kernels.operations.attention_backward(grad, query, key, value, out, lse, *segments, scale)
    for one, other in zip(found, exact, strict=True):
        close(one, other.grad, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_attention_depends_on_nothing_that_was_there_before(dtype: torch.dtype) -> None:
    """What a thread's room holds from a longer and broken stream reaches no other: the same bits."""
    layout, longer = layout_of([(20, [7, 31, 2]), (0, [40])], 0), layout_of([(90, [70, 80])], 0)
    streams = torch.randn(4, 1, 2, layout.total, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    broken = torch.full((4, 1, 2, longer.total, 80), torch.nan, dtype=dtype)

    def everything(layout: Layout, tensors: Tensor) -> tuple[Tensor, ...]:
        segments = segments_of(layout)
        query, key, value, grad = tensors.unbind()
        out, lse = kernels.operations.attention(query, key, value, *segments, 0.2)
        return out, lse, *kernels.operations.attention_backward(grad, query, key, value, out, lse, *segments, 0.2)

    before = everything(layout, streams)
    assert all(bool(torch.isnan(one).all()) for one in everything(longer, broken))
    assert all(torch.equal(one, other) for one, other in zip(before, everything(layout, streams), strict=True))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(wrong: float) -> None:
    """A broken number must reach whoever looks for it, and no other sequence."""
    layout = layout_of([(0, [9, 9])], 0)
    query, key, value = (torch.randn(1, 1, 18, 16) for _ in range(3))
    key[0, 0, 3] = wrong
    out, _ = kernels.operations.attention(query, key, value, *segments_of(layout), 0.25)
    assert not bool(torch.isfinite(out[0, 0, 3:9]).all())
    assert bool(torch.isfinite(out[0, 0, 9:]).all()) and bool(torch.isfinite(out[0, 0, :3]).all())


def slab_of(entries: list[tuple[Tensor, Tensor]], blocks: int) -> tuple[Tensor, Tensor]:
    """Keys and values (M, K, W) of each entry, and what is not a number around them."""
    _, shared, width = entries[0][0].shape
    key, value = (torch.full((len(entries), shared, blocks, decoding.BLOCK * width), torch.nan).to(entries[0][0]) for _ in range(2))
    for first, (keys, values) in enumerate(entries):
        ATTENTION.keep_entries(keys[None], values[None], (key, value), first)
    return key, value


@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize(("group", "width"), [(1, 64), (2, 32), (5, 16), (18, 96)])
@pytest.mark.parametrize("dtype", TYPES)
def test_decoding_is_the_definition(dtype: torch.dtype, group: int, width: int, window: int | None, threads) -> None:
    """Step by step over lengths at which vectors, panels and blocks begin; a row's bits do not depend on the rows beside it."""
    generator = torch.Generator().manual_seed(group)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    shared, entry_R, prompts = 2, [2, 0, 0, 1, 2] + [1] * 18, [20, 1, 33]
    rows = len(entry_R)
    begun_R = [0, 1, 14, 15, 29, 30, 31, 40, *torch.randint(0, 60, (rows - 8,), generator=generator).tolist()]
    shown = [(normal(m, shared, width), normal(m, shared, width)) for m in prompts]
    history = [(normal(n, shared, width), normal(n, shared, width)) for n in begun_R]
    prompt, own = slab_of(shown, 2), slab_of(history, 2)
    for step in range(1, 4):
        threads(1 + step % 2)
        query, key, value = normal(rows, shared * group, width), normal(rows, shared, width), normal(rows, shared, width)
        length_R = torch.tensor(begun_R) + step
        before = own[0].clone(), own[1].clone()
        belonging = rows_of(entry_R, prompts)
        out = decode(query, key, value, own, prompt, belonging, length_R, 0.3, window)
        for r in (0, 4, 7):
            alone = (query[r : r + 1], key[r : r + 1], value[r : r + 1], (before[0][r : r + 1], before[1][r : r + 1]), prompt)
            belonging = rows_of([entry_R[r]], prompts)
            one = decode(*alone, belonging, length_R[r : r + 1], 0.3, window)
            assert torch.equal(out[r], one[0])
        for r, entry in enumerate(entry_R):
            history[r] = tuple(torch.cat([old, new[r : r + 1]]) for old, new in zip(history[r], (key, value), strict=True))
            keys, values = (
                torch.cat(parts).transpose(0, 1).double().repeat_interleave(group, 0)
                for parts in zip(shown[entry], history[r], strict=True)
            )
            seen = slice(max(0, keys.shape[1] - window) if window else 0, None)
            scores = (keys[:, seen] @ query[r].double()[..., None])[..., 0] * 0.3
            close(out[r], (scores.softmax(-1)[:, None] @ values[:, seen])[:, 0], dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_values_that_are_equal_come_out_as_they_are(dtype: torch.dtype) -> None:
    """Weights that are rounded one way, all of them: what they are divided by has to be the sum of the rounded ones."""
    width, shown = 64, 200
    query = torch.zeros(1, 1, width, dtype=dtype)
    query[..., 0] = 1.0
    for logit in torch.linspace(-3.0, 0.0, 50):
        keys = torch.zeros(shown, 1, width, dtype=dtype)
        keys[..., 0] = logit
        prompt = slab_of([(keys, torch.ones_like(keys))], 7)
        own = slab_of([(keys[:0], keys[:0])], 1)
        one, rows = torch.ones(1, 1, width, dtype=dtype), rows_of([0], [shown])
        out = decode(query, 0 * one, one, own, prompt, rows, torch.tensor([1]), 1.0, None)
        torch.testing.assert_close(out, one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (50, 70), (130, 33), (512, 96)])
@pytest.mark.parametrize("dtype", TYPES)
def test_products_are_the_definition(dtype: torch.dtype, shape: tuple[int, int], turned: bool, threads) -> None:
    """Sizes that fill no panel and no tile, weights that lie either way; a row's bits do not depend on the rows beside it."""
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    weight = weight.T.contiguous().T if turned else weight
    x = torch.randn(261, inputs, generator=generator).to(dtype)
    threads(1)
    whole = decoding.PackedProduct(weight, bias, dtype)(x)
    close(whole, F.linear(x.double(), weight.to(dtype).double(), bias.double()), dtype)
    threads(2)
    product = decoding.PackedProduct(weight, bias, dtype)
    for rows in (1, 2, 3, 7, 8, 14, 15, 16, 17, 33, 48, 200, 241):
        assert torch.equal(product(x[:rows]), whole[:rows])
    close(decoding.PackedProduct(weight, None, dtype)(x), F.linear(x.double(), weight.to(dtype).double()), dtype)
    for other in (weight.bfloat16(), weight.half(), weight.double()):
        assert torch.equal(decoding.PackedProduct(other, bias, dtype)(x), decoding.PackedProduct(other.float(), bias, dtype)(x))


@pytest.mark.parametrize("out", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_norms_are_the_definition(dtype: torch.dtype, out: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(37, 48, generator=generator).to(dtype), torch.randn(48, generator=generator)
    grad = torch.randn(37, 48, generator=generator).to(out)
    exact, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = F.rms_norm(exact, (48,), exact_weight, 1e-5)
    expected.backward(grad.double())
    found, scale_T = kernels.operations.rms_norm(x, weight, 1e-5, out)
    close(found, expected, out)
    grad_x, grad_weight = kernels.operations.rms_norm_backward(grad, x, weight, scale_T)
    close(grad_x, exact.grad, dtype)
    close(grad_weight, exact_weight.grad, torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_norm_behind_a_sum(dtype: torch.dtype) -> None:
    x, add, weight = torch.randn(5, 32), torch.randn(5, 32).to(dtype), torch.randn(32)
    total = x.double() + add.double()
    found = kernels.operations.add_rms_norm(x, add, weight, 1e-6, dtype)
    close(x, total, torch.float32)
    close(found, F.rms_norm(total, (32,), weight.double(), 1e-6), dtype)
    before = x.clone()
    close(kernels.operations.add_rms_norm(x, None, weight, 1e-6, dtype), found, dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("out", TYPES)
@pytest.mark.parametrize("added", [False, True])
def test_a_sum_and_its_layer_norm_are_the_definition(added: bool, out: torch.dtype) -> None:
    x, weight, bias = 3 + torch.randn(7, 48), torch.randn(48), torch.randn(48)
    add = torch.randn(7, 48).to(out) if added else None
    total = x if add is None else x + add
    expected = F.layer_norm(total.double(), (48,), weight.double(), bias.double(), 1e-5)
    found = kernels.operations.add_layer_norm(x, add, weight, 1e-5, bias, out)
    assert torch.equal(x, total)
    close(found, expected, out)


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_of_heads_are_in_place_and_leave_what_lies_beside_them(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 4, 48).to(dtype), torch.randn(3, 48)
    before = x.clone()
    kernels.operations.head_norm(x[:, :3], weight, 1e-6)
    close(x[:, :3], F.rms_norm(before[:, :3].double(), (48,), None, 1e-6) * weight.double(), dtype)
    assert torch.equal(x[:, 3], before[:, 3])


@pytest.mark.parametrize("dtype", TYPES)
def test_turning_forward_and_back(dtype: torch.dtype) -> None:
    """Tables whose halves differ, so that an exchanged half would show: the grad is the transposed turn."""
    joined = torch.randn(9, 5, 32).to(dtype)
    cos, sin = torch.randn(9, 32), torch.randn(9, 32)
    heads = joined[:, 1:4]

    def turned(x: Tensor) -> Tensor:
        half = torch.cat([-x[..., 16:], x[..., :16]], -1)
        return x * cos.double()[:, None] + half * sin.double()[:, None]

    exact = heads.double().requires_grad_()
    expected = turned(exact)
    close(kernels.operations.rotary(heads, cos, sin), expected, dtype)
    grad = torch.randn(9, 3, 32).to(dtype)
    expected.backward(grad.double())
    close(kernels.operations.rotary(grad, cos, sin, -1.0), exact.grad, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_gates_and_their_gradients(dtype: torch.dtype) -> None:
    joined = torch.randn(11, 64).to(dtype) * 4
    gate, up = joined.chunk(2, -1)
    exact_gate, exact_up = gate.double().requires_grad_(), up.double().requires_grad_()
    expected = F.silu(exact_gate) * exact_up
    close(kernels.operations.gated(gate, up), expected, dtype)
    grad = torch.randn(11, 32).to(dtype)
    expected.backward(grad.double())
    grad = grad.clone()
    inner, grad_up = kernels.operations.gated_backward(grad, gate.contiguous(), up.contiguous())
    close(inner, expected, dtype)
    close(grad_up, exact_up.grad, dtype)
    close(grad, exact_gate.grad, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_gelu_and_its_slope(dtype: torch.dtype) -> None:
    x, grad = torch.randn(11, 32).to(dtype) * 4, torch.randn(11, 32).to(dtype)
    exact = x.double().requires_grad_()
    expected = F.gelu(exact, approximate="tanh")
    expected.backward(grad.double())
    grad = grad.clone()
    for found in (kernels.operations.gelu(x), kernels.operations.gelu_backward(grad, x)):
        close(found, expected, dtype)
    close(grad, exact.grad, dtype)


def test_the_exponential_from_end_to_end() -> None:
    """Seen through the gate, silu(x) / x = 1 / (1 + exp(-x)): exact where it is 0, 1/2 and 1, and never NaN between."""
    x = torch.from_numpy(np.linspace(-120, 120, 4096, dtype=np.float32))[None]
    found = kernels.operations.gated(x, torch.ones_like(x))
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.double(), F.silu(x.double()), rtol=1e-6, atol=1e-36)
    nan = kernels.operations.gated(torch.full((1, 16), torch.nan, dtype=torch.bfloat16), torch.ones(1, 16, dtype=torch.bfloat16))
    assert torch.isnan(nan).all()


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    x = torch.randn(64, 64) * torch.logspace(-30, 30, 64)
    assert torch.equal(kernels.operations.gated(torch.full_like(x, 1e4), x), x * 1e4)
    out = kernels.operations.add_rms_norm(torch.ones(64, 64), None, x[0], 0.0, torch.bfloat16)
    assert torch.equal(out[0], x[0].to(torch.bfloat16))


def test_what_the_kernels_do_not_take() -> None:
    good = torch.zeros(2, 16)
    assert kernels.fits(good)
    assert not kernels.fits(good.double())
    assert not kernels.fits(torch.zeros(2, 24))
    assert not kernels.fits(torch.zeros(16, 2).T)
    assert not kernels.fits(good, good.double())
    assert not kernels.fits(good.to("meta"))
    assert not kernels.fits(good, torch.zeros(2, 32))
    assert kernels.fits(good, good.bfloat16()) and not kernels.worth_attention(1, good, good.bfloat16(), good)


def test_attention_never_reads_one_type_as_another() -> None:
    """Values in another type are left to torch, which says that it does not take them."""
    query, value = torch.ones(9, 1, 32), torch.ones(9, 1, 32, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        StreamAttention(layout_of([(0, [9])], 0))(Query(0, query, query, value, 1.0))


def test_attention_never_reads_one_width_as_another() -> None:
    """Values that are narrower than keys (latent attention) are left to torch, which computes them."""
    torch.manual_seed(0)
    query = Query(0, torch.randn(9, 1, 32), torch.randn(9, 1, 32), torch.randn(9, 1, 16), 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(*query.heads, is_causal=True, scale=0.3)
    found = StreamAttention(layout_of([(0, [9])], 0))(query)
    assert found.shape == (9, 1, 16)
    torch.testing.assert_close(found.transpose(0, 1)[None], expected, rtol=1e-5, atol=1e-6)


def test_the_default_type_of_new_tensors_changes_nothing() -> None:
    """What the kernels write into is float32, whatever a program has made of torch's default."""
    x = torch.randn(5, 16)
    query = torch.randn(1, 1, 18, 16)
    segments = segments_of(layout_of([(0, [18])], 0))
    _, expected = kernels.operations.attention(query, query, query, *segments, 0.25)
    try:
        torch.set_default_dtype(torch.float64)
        _, lse = kernels.operations.attention(query, query, query, *segments, 0.25)
        _, scale_T = kernels.operations.rms_norm(x, torch.ones(16, dtype=torch.float32), 1e-5, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(lse, expected)
    close(scale_T, x.double().square().mean(-1).add(1e-5).rsqrt(), torch.float32)


def logits_and_loss(
    raw: Tensor, scale: Tensor, target: Tensor, in_logp: Tensor, in_entropy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-sum-exps, log-probs, entropies and the grad of a loss, by torch in float64."""
    exact = raw.double().requires_grad_()
    z = exact * scale.double()[:, None]
    every = torch.log_softmax(z, -1)
    logp = every.gather(1, target[:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    (in_logp * logp + in_entropy * entropy).sum().backward()
    assert exact.grad is not None
    return torch.logsumexp(z, -1).detach(), logp.detach(), entropy.detach(), exact.grad


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 5, 16, 33, 50257])
@pytest.mark.parametrize("entropy", [False, True])
def test_logits_are_read_and_turned_into_gradients(dtype: torch.dtype, width: int, entropy: bool, threads) -> None:
    torch.manual_seed(width)
    raw = (5 * torch.randn(7, width)).to(dtype)
    target, scale = torch.randint(width, (7,)), 1.0 / (0.3 + torch.rand(7))
    in_logp, in_entropy = torch.randn(7), torch.randn(7) * entropy
    expected = logits_and_loss(raw, scale, target, in_logp, in_entropy)
    lse, logp, found_entropy = torch.zeros(3, 7)
    threads(2)
    kernels.operations.read_logits(raw, scale, target, lse, logp, found_entropy if entropy else None)
    grad = raw.clone()
    kernels.operations.logits_gradient(grad, scale, target, lse, found_entropy, in_logp, in_entropy if entropy else None)
    for found, exact in zip((lse, logp), expected, strict=False):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    if entropy:
        torch.testing.assert_close(found_entropy.double(), expected[2], rtol=1e-5, atol=1e-5)
    close(grad, expected[3], dtype)
    threads(1)
    alone = raw[3:4].clone()
    kernels.operations.logits_gradient(
        alone, *(x[3:4].clone() for x in (scale, target, lse, found_entropy, in_logp)), in_entropy[3:4].clone() if entropy else None
    )
    assert torch.equal(alone[0], grad[3]), "a row's bits depend on its neighbours"


@pytest.mark.parametrize("dtype", TYPES)
def test_logits_that_are_no_numbers_are_told(dtype: torch.dtype) -> None:
    raw = torch.zeros(3, 40, dtype=dtype)
    raw[0, 20], raw[1, 39], raw[2, 3] = torch.nan, torch.inf, -torch.inf
    lse, logp, entropy = torch.zeros(3, 3)
    kernels.operations.read_logits(raw, torch.ones(3), torch.tensor([0, 0, 1]), lse, logp, entropy)
    assert not torch.isfinite(logp[:2]).any()
    torch.testing.assert_close(logp[2], -torch.tensor(39.0).log())
    torch.testing.assert_close(entropy[2], torch.tensor(39.0).log())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 5, 128, 300, 50257])
def test_tokens_are_drawn_where_the_cumulative_probability_passes(dtype: torch.dtype, size: int, threads) -> None:
    torch.manual_seed(size)
    logits, uniform = (3 * torch.randn(40, size)).to(dtype), torch.rand(40, dtype=torch.float64)
    threads(2)
    token, logp = decoding.draw_tokens(logits, uniform, 0.7)
    every = torch.log_softmax(logits.double() / 0.7, -1)
    passed = every.exp().cumsum(-1)
    after = passed.gather(1, token[:, None])[:, 0]
    assert (after > uniform - 2e-6).all()
    assert (after - every.exp().gather(1, token[:, None])[:, 0] < uniform + 2e-6).all()
    torch.testing.assert_close(logp.double(), every.gather(1, token[:, None])[:, 0], rtol=0, atol=5e-6)
    threads(1)
    alone = decoding.draw_tokens(logits[7:8], uniform[7:8], 0.7)
    likeliest, best = decoding.draw_tokens(logits, uniform, 0.0)
    assert torch.equal(likeliest, (logits == logits.amax(-1, keepdim=True)).long().argmax(-1)), "the first of several"
    torch.testing.assert_close(best, torch.log_softmax(logits.float(), -1).amax(-1), rtol=0, atol=5e-6)
    assert torch.equal(token[7:8], alone[0])
    assert torch.equal(logp[7:8], alone[1])


def test_gradients_may_be_one_number_for_all_rows() -> None:
    raw, target = torch.randn(4, 48), torch.arange(4)
    head, hidden = Head(weight_VD=torch.eye(48)), raw.clone().requires_grad_()
    logp, _ = chosen_logprobs(hidden, head, target, torch.ones(4))
    (spread,) = torch.autograd.grad(logp.sum(), hidden)  # an expanded gradient
    expected = F.one_hot(target, 48) - torch.softmax(raw, -1)
    torch.testing.assert_close(spread, expected)
