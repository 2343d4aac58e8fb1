"""Every Triton kernel against the library's operation in torch: values and gradients over shapes and types.

`test_kernels.py` runs this file in a process of its own: on a GPU, or in Triton's interpreter, whose switch is read when Triton is
imported."""

from __future__ import annotations

import os
from typing import Any

import joined_kernels
import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from groupwise.ops import linear_cross_entropy as head_module
from groupwise.ops import operations as operations_module
from groupwise.ops.cuda.varlen_attention import merged
from groupwise.ops.decoding import TorchNorm
from groupwise.ops.linear_cross_entropy import Head, chosen_logprobs
from groupwise.ops.operations import Operations
from groupwise.ops.query import EVERYTHING, Query, Reach
from groupwise.ops.triton import draw, gate, heads, merge, norm, rotary
from groupwise.ops.triton.operations import TritonOperations
from groupwise.rollout.native.decode_attention import Decode, DecodeSize, LiveRows
from groupwise.rollout.native.kv_cache import KVCache
from groupwise.rollout.sampling import _inverse_cdf

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
BF16, F32 = torch.bfloat16, torch.float32
BOUND = {F32: 2e-6, BF16: 8e-3}
"""Relative errors: rounding of a sum, and of one number (the interpreter cuts bfloat16 off instead)."""


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers from a seed.  The interpreter keeps bfloat16 as its bits, and `dot` would multiply those."""
    torch.manual_seed(0)
    if DEVICE == "cpu":
        from triton.runtime import interpreter

        dot = interpreter.InterpreterBuilder.create_dot

        def widened(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
            return dot(builder, wide(a), wide(b), *rest)

        def wide(x: Any) -> Any:
            if x.dtype != tl.bfloat16:
                return x
            return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widened)


def normal(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def relative(ours: Tensor, expected: Tensor) -> float:
    difference = (ours.double() - expected.double()).norm()
    return float(difference.detach() / expected.detach().double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("weight_type", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (7, 96), (520, 33)])
def test_rms_norm_and_its_gradients(rows: int, width: int, dtype: torch.dtype, weight_type: torch.dtype) -> None:
    x, grad = normal(1, rows, width, dtype=dtype), normal(1, rows, width, dtype=dtype)
    weight = (normal(width).abs() + 0.5).to(weight_type)
    wide, wide_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * wide_weight
    expected_grads = torch.autograd.grad(expected, (wide, wide_weight), grad.double())
    out, scale = norm.rms_norm(x, weight, 1e-6, dtype)
    assert out.dtype == dtype and relative(out, expected) < BOUND[dtype]
    for needs_weight in (True, False):
        grad_x, grad_weight = norm.rms_norm_backward(grad, x, weight, scale, needs_weight)
        assert grad_x.dtype == dtype and relative(grad_x, expected_grads[0]) < BOUND[dtype]
        assert (grad_weight is not None) == needs_weight
        if grad_weight is not None:
            assert relative(grad_weight, expected_grads[1]) < BOUND[max(dtype, weight_type, key=lambda kind: BOUND[kind])]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_decoding_norms_add_the_residual_and_norm_heads_in_place(dtype: torch.dtype) -> None:
    x, add, weight = normal(5, 48), normal(5, 48, dtype=dtype), normal(48)
    ours_x, torch_x = x.clone(), x.clone()
    ours = norm.TritonNorm(weight, 1e-6, dtype=dtype)(ours_x, add)
    expected = TorchNorm(weight, 1e-6, None, dtype=dtype)(torch_x, add)
    assert ours.dtype == dtype and relative(ours, expected) < BOUND[dtype]
    assert torch.equal(ours_x, torch_x), "the residual stream has the sum"
    heads, head_weight = normal(5, 7, 24, dtype=dtype), normal(4, 24)
    expected = TorchNorm(head_weight, 1e-6, None, dtype=dtype)(heads[:, 1:5].clone())
    untouched = heads[:, 5:].clone()
    normed = norm.TritonNorm(head_weight, 1e-6, dtype=dtype)(heads[:, 1:5])
    assert relative(normed, expected) < BOUND[dtype] and torch.equal(heads[:, 5:], untouched)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("heads", "width"), [(1, 8), (5, 24), (6, 64)])
def test_rotary(heads: int, width: int, dtype: torch.dtype) -> None:
    angle = torch.rand(9, width // 2, device=DEVICE) * 6.0
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    inner = normal(9, heads + 2, width, dtype=dtype)
    x = inner[:, :heads]
    for sign in (1.0, -1.0):
        first, second = x.double().chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        expected = x.double() * cos[:, None].double() + sign * turned * sin[:, None].double()
        assert relative(rotary.rotary(x, cos, sin, sign), expected) < BOUND[dtype]
    position = torch.tensor([3, 0, 8, 8, 1, 2, 5, 4, 7], device=DEVICE)
    expected = rotary.rotary(x, cos[position], sin[position], 1.0)
    rotated = rotary.TritonRotary(cos, sin).at(position)(x)
    assert torch.equal(rotated, expected) and rotated.data_ptr() == inner.data_ptr()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 1100)])
def test_activations_and_their_gradients(rows: int, width: int, dtype: torch.dtype) -> None:
    inner, grad = normal(rows, 2 * width, dtype=dtype), normal(rows, width, dtype=dtype)
    apart_gate, apart_up = inner.chunk(2, -1)
    wide_gate, wide_up = (x.double().requires_grad_() for x in (apart_gate, apart_up))
    expected = F.silu(wide_gate) * wide_up
    expected_gate, expected_up = torch.autograd.grad(expected, (wide_gate, wide_up), grad.double())
    assert relative(gate.gated(apart_gate, apart_up), expected) < BOUND[dtype]
    grad_gate = grad.clone()
    # Rows of gate and up lie apart, and not alike.
    opened, grad_up = gate.gated_backward(grad_gate, apart_gate, apart_up.contiguous())
    for ours, exact in ((opened, expected), (grad_up, expected_up), (grad_gate, expected_gate)):
        assert relative(ours, exact) < BOUND[dtype]
    expected = F.gelu(wide_gate, approximate="tanh")
    (expected_x,) = torch.autograd.grad(expected, wide_gate, grad.double())
    grad_x = grad.clone()
    for ours in (gate.gelu(apart_gate), gate.gelu_backward(grad_x, apart_gate)):
        assert relative(ours, expected) < BOUND[dtype]
    assert relative(grad_x, expected_x) < BOUND[dtype]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 1100)])
def test_gradients_of_gate_beside_up(rows: int, width: int, dtype: torch.dtype) -> None:
    inner, grad = normal(rows, 2 * width, dtype=dtype), normal(rows, width, dtype=dtype)
    opened, grads = gate.joined_gate_backward(grad, inner)
    expected = joined_kernels.JoinedKernels().joined_gate_backward(grad.double(), inner.double())
    for ours, exact in zip((opened, grads), expected, strict=True):
        assert ours.dtype == dtype and relative(ours, exact) < BOUND[dtype]


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "queries", "keys", "width"), [(1, 1, 1, 8), (7, 5, 2, 24), (3, 9, 4, 256), (520, 3, 3, 4)])
def test_heads_of_a_layer_and_their_gradients(
    rows: int, queries: int, keys: int, width: int, dtype: torch.dtype, norms: bool
) -> None:
    angle = normal(rows, width // 2).repeat(1, 2)
    tables = {"cos_TW": angle.cos(), "sin_TW": angle.sin()}
    gains = (normal(width) + 2.0, normal(width) + 2.0) if norms else None
    counts = {"queries": queries, "keys": keys, "eps": 1e-6}
    ours = heads.Heads(gains=gains, **counts, **tables)
    wide_gains = None if gains is None else (gains[0].double(), gains[1].double())
    wide_tables = {name: table.double() for name, table in tables.items()}
    definition = joined_kernels.Heads(gains=wide_gains, **counts, **wide_tables)
    x = normal(rows, (queries + 2 * keys) * width, dtype=dtype)
    grads = [normal(count, rows, width, dtype=dtype).transpose(0, 1) for count in (queries, keys, keys)]
    expected = [*definition.forward(x.double()), *definition.backward([grad.double() for grad in grads], x.double())]
    grad_x, grad_gain = ours.backward(grads, x if norms else None)
    results = [*ours.forward(x.clone()), grad_x, grad_gain]
    assert (grad_gain is not None) == norms
    for one, exact in zip(results, expected, strict=True):
        assert one is None or relative(one, exact) < BOUND[one.dtype if one is not grad_gain else dtype]


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "count", "width"), [(1, 1, 8), (9, 5, 24)])
def test_parts_of_an_attention_are_merged(rows: int, count: int, width: int, dtype: torch.dtype, by_head: bool) -> None:
    """Some tokens have no keys in the second part: the kernel of attention says +inf there.  Its outputs lie as its queries do."""
    out, add = normal(rows, count, width, dtype=dtype), normal(rows, count, width, dtype=dtype)
    if by_head:
        out, add = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (out, add))
    lse, add_lse = normal(count, rows), 3.0 * normal(count, rows)
    add_lse[:, ::2] = torch.inf
    expected = merged(out, lse, add, add_lse)
    for ours, exact in zip(merge.merge_parts(out.clone(), lse.clone(), add, add_lse), expected, strict=True):
        assert ours.dtype == exact.dtype and relative(ours, exact) < BOUND[ours.dtype]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("vocabulary", [40, 4097])
def test_head(vocabulary: int, dtype: torch.dtype, entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width = 5, 16
    weight = (normal(vocabulary, width) / 4).to(dtype)
    hidden, temperature = normal(rows, width, dtype=dtype), torch.rand(rows, device=DEVICE) + 0.5
    target = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    grad_logp, grad_entropy = normal(rows), normal(rows)
    results = []
    for chosen in (Operations(), TritonOperations(Operations(), DEVICE)):
        monkeypatch.setattr(operations_module, "_chosen", chosen)
        leaf, head = hidden.clone().requires_grad_(), Head(weight_VD=weight.clone().requires_grad_())
        logp, spread = chosen_logprobs(leaf, head, target, temperature, entropy=entropy)
        loss = (logp * grad_logp).sum()
        if spread is not None:
            loss = loss + (spread * grad_entropy).sum()
        loss.backward()
        values = [logp.detach(), leaf.grad, head.weight_VD.grad]
        if spread is not None:
            values.append(spread.detach())
        results.append(values)
    for ours, expected in zip(*results, strict=True):
        assert relative(ours, expected) < max(BOUND[dtype], 1e-5)


def test_a_chunk_of_the_head_has_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations_module, "_chosen", TritonOperations(Operations(), DEVICE))
    target = torch.zeros(2049, dtype=torch.int64, device=DEVICE)
    visits = head_module._Visits(
        normal(2049, 4), Head(weight_VD=normal(50, 4)), target, torch.ones(2049, device=DEVICE), None, False, 1
    )
    assert visits.chunks == [slice(0, 2048), slice(2048, 2049)]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("vocabulary", [7, 8300])
def test_draw(vocabulary: int, dtype: torch.dtype) -> None:
    """Tokens are those of torch's way, where no uniform number lies within rounding of a boundary."""
    rows = 12
    logits = (4.0 * normal(rows, vocabulary)).to(dtype)
    logits[:, 1::3] = -torch.inf
    logits[5, :] = -torch.inf
    logits[5, vocabulary - 1] = 3.0
    uniform = torch.rand(rows, dtype=torch.float64, device=DEVICE)
    uniform[0], uniform[1] = 0.0, 1.0 - 2.0**-53
    for temperature in (1.0, 0.7):
        p = torch.softmax(logits.float() / temperature, -1)
        expected = _inverse_cdf(p, uniform)
        token, logp = draw.draw_tokens(logits, uniform, temperature)
        assert token.dtype == torch.int64 and bool((p.gather(1, token[:, None]) > 0.0).all())
        cumulative = p.double().cumsum(-1)
        edge = (cumulative - uniform[:, None]).abs().min(-1).values < 1e-6
        assert bool(((token == expected) | edge).all()) and int(edge.sum()) <= 3
        torch.testing.assert_close(logp, p.gather(1, token[:, None])[:, 0].log(), rtol=1e-5, atol=1e-5)
    token, logp = draw.draw_tokens(logits, uniform, 0.0)
    assert torch.equal(token, logits.float().argmax(-1))
    torch.testing.assert_close(logp, torch.log_softmax(logits.float(), -1).max(-1).values, rtol=1e-5, atol=1e-5)


def test_a_draw_takes_the_first_of_equals_and_nothing_of_probability_zero() -> None:
    logits = torch.full((2, 5000), -200.0, device=DEVICE)
    logits[:, [4100, 4300]] = 2.0
    uniform = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64, device=DEVICE)
    assert draw.draw_tokens(logits, uniform, 0.0)[0].tolist() == [4100, 4100]
    assert draw.draw_tokens(logits, uniform, 1.0)[0].tolist() == [4100, 4300]


def test_a_draw_from_numbers_that_are_none_stays_in_the_vocabulary() -> None:
    for vocabulary in (5, 1000, 5000):
        logits = torch.zeros(2, vocabulary, device=DEVICE)
        logits[0, 2] = torch.nan
        logits[1] = torch.nan
        uniform = torch.tensor([0.3, 0.9], dtype=torch.float64, device=DEVICE)
        for temperature in (0.0, 1.0):
            token, logp = draw.draw_tokens(logits, uniform, temperature)
            assert bool((token < vocabulary).all()) and bool(logp.isnan().all())


class Setting:
    """An arrangement of rows: prompts, who is behind which, own tokens."""

    prompt_length = (70, 1, 133)
    entry = (0, 2, 0, 0, 2, 1)
    kept = (0, 3, 150, 129, 1, 64)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("shared", "queries", "width", "value_width", "reach", "cap", "sinks"),
    [
        (1, 1, 16, 16, EVERYTHING, None, False),
        (2, 7, 24, 24, EVERYTHING, None, False),
        (3, 2, 16, 8, Reach(window=20), None, True),
        (1, 20, 40, 40, Reach(chunk=64), 5.0, False),
    ],
)
def test_decode_attention(
    shared: int,
    queries: int,
    width: int,
    value_width: int,
    reach: Reach,
    cap: float | None,
    sinks: bool,
    dtype: torch.dtype,
    fixed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tokens in a row, so that the second attends to the first: outputs and caches are those of torch's operations."""
    device, heads, rows = torch.device(DEVICE), shared * queries, len(Setting.entry)
    drawn_R = 8 if fixed else rows
    keys, values = normal(8, shared, 256, width, dtype=dtype), normal(8, shared, 256, value_width, dtype=dtype)
    prompt_keys, prompt_values = normal(4, shared, 136, width, dtype=dtype), normal(4, shared, 136, value_width, dtype=dtype)
    steps = [
        [normal(drawn_R, n, w, dtype=dtype) for n, w in ((heads, width), (shared, width), (shared, value_width))] for _ in range(2)
    ]
    sink = normal(heads) if sinks else None
    results = []
    for chosen in (Operations(), TritonOperations(Operations(), DEVICE)):
        monkeypatch.setattr(operations_module, "_chosen", chosen)
        prompts, own = KVCache(4, 136, most_tokens=136), KVCache(8, 256, most_tokens=256)
        for cache, key, value in ((prompts, prompt_keys, prompt_values), (own, keys, values)):
            slab = cache.layer(0, key[0, :, :1].transpose(0, 1), None, value[0, :, :1].transpose(0, 1))
            slab.key_EKTD.copy_(key)
            slab.value_EKTD.copy_(value)
        attend = Decode(prompts, own, device, DecodeSize(8, 4, 4, 136, 256) if fixed else None)
        attend.arrange(LiveRows(Setting.prompt_length, Setting.entry, Setting.kept))
        outputs = []
        for query, key, value in steps:
            attend.next()
            out = attend(Query(0, query, key, value, 0.3, cap, reach, sink))
            outputs.append(out[:rows].reshape(rows, -1))
        kept = [own.layers[0].slab[part][row, :, : Setting.kept[row] + 2] for part in (0, 1) for row in range(rows)]
        results.append((outputs, kept))
    for ours, expected in zip(results[1][0], results[0][0], strict=True):
        assert ours.dtype == dtype and relative(ours, expected) < max(1e-5, BOUND[dtype] if dtype == BF16 else 0.0)
    for ours, expected in zip(results[1][1], results[0][1], strict=True):
        assert torch.equal(ours, expected), "the new keys and values are kept"


def test_what_is_not_on_the_device_is_left_to_others() -> None:
    """Doubles, other devices and columns of a matrix have no kernel."""
    chosen = TritonOperations(Operations(), DEVICE)
    for other in (normal(4, 16).double(), torch.empty(4, 16, device="meta"), normal(16, 4).T):
        assert chosen.logits_reader(other) is None and chosen.token_sampler(other) is None and chosen.block_kernels(other) is None
    assert chosen.block_kernels(normal(4, 16)) is not None
