"""Convolutions and the gated rule over packed streams against the recurrence itself, one sequence and one position at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupwise.ops import recurrence
from groupwise.ops.recurrence import Recurrence, Segments, convolve, fla_kernel, gated_rule
from groupwise.records import Layout

H, K, V, D, W = 3, 4, 5, 6, 4
CHUNK = recurrence.CHUNK["cpu"]
F64 = torch.float64
GROUPS: dict[str, list[tuple[int, list[int]]]] = {
    "alone": [(0, [1]), (0, [70]), (0, [3])],
    "around the convolution": [(1, [1, 2]), (2, [3, 4]), (3, [1]), (4, [5, 2]), (5, [4])],
    "around a chunk": [(CHUNK - 1, [1, CHUNK]), (CHUNK, [CHUNK + 1, 2]), (CHUNK + 1, [CHUNK - 1]), (130, [129])],
    "mixed": [(5, [3, 1, 70]), (0, [2]), (130, [1, 64, 65, 7]), (1, [2, 2]), (16, [16])],
}


def layout_of(groups: Sequence[tuple[int, Sequence[int]]], filler: int = 3) -> Layout:
    """Prompts, without their last token, and their completions; a prompt of 0 tokens is none."""
    start, length, prefix = list[int](), list[int](), list[int]()

    def add(count: int, parent: int) -> None:
        start.append(sum(length))
        length.append(count)
        prefix.append(parent)

    for prompt, completions in groups:
        parent = len(start) if prompt else -1
        for count, before in [*([(prompt, -1)] if prompt else []), *((n, parent) for n in completions)]:
            add(count, before)
    return Layout(start=tuple(start), length=tuple(length), prefix=tuple(prefix), total=sum(length) + filler)


def columns_of(total: int, beta: bool, dtype: torch.dtype = F64) -> list[Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(total, H, width, dtype=F64) for width in (K, K, V))
    made = [query, key / 2, value, -torch.rand(total, H, dtype=F64), torch.rand(total, H, dtype=F64)]
    made = [x.to(dtype).requires_grad_(True) for x in made]
    return made if beta else made[:4]


def stream(layout: Layout) -> Recurrence:
    return Recurrence(Segments.of(layout))


def plain_rule(columns: Sequence[Tensor], state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, position by position."""
    query, key, value, decay, *beta = columns
    outputs = []
    for t in range(query.shape[0]):
        state_HKV = decay[t].exp()[:, None, None] * state_HKV
        added = value[t]
        if beta:
            added = beta[0][t][:, None] * (added - torch.einsum("hk,hkv->hv", key[t], state_HKV))
        state_HKV = state_HKV + torch.einsum("hk,hv->hkv", key[t], added)
        outputs.append(torch.einsum("hk,hkv->hv", query[t], state_HKV))
    return torch.stack(outputs), state_HKV


def plain_convolution(x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor, state_UD: Tensor) -> tuple[Tensor, Tensor]:
    padded = torch.cat([state_UD, x_TD])
    outputs = [(padded[t : t + W] * weight_DW.T).sum(0) + bias_D for t in range(x_TD.shape[0])]
    return torch.stack(outputs), padded[padded.shape[0] - W + 1 :]


def one_by_one(layout: Layout, zero: Tensor, run: Callable[[slice, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Every segment behind its prefix, which is computed again for each."""
    outputs = []
    for start, length, prefix in zip(layout.start, layout.length, layout.prefix, strict=True):
        state = zero
        if prefix >= 0:
            _, state = run(slice(layout.start[prefix], layout.start[prefix] + layout.length[prefix]), zero)
        outputs.append(run(slice(start, start + length), state)[0])
    filler = outputs[0].new_zeros(layout.total - sum(layout.length), *outputs[0].shape[1:])
    return torch.cat([*outputs, filler])


def same(ours: Tensor, theirs: Tensor, inputs: Sequence[Tensor], bound: float = 1e-11) -> None:
    """Values, and the gradients of a random sum of them."""
    assert (ours - theirs).abs().max() <= bound
    weight = torch.randn(ours.shape, dtype=ours.dtype)
    gradients = (torch.autograd.grad((out * weight).sum(), inputs) for out in (ours, theirs))
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() <= bound * 10


@pytest.mark.parametrize("beta", [True, False], ids=["delta", "mamba"])
@pytest.mark.parametrize("name", GROUPS)
def test_the_rule_of_a_stream_is_the_recurrence_of_each_sequence(name: str, beta: bool) -> None:
    layout = layout_of(GROUPS[name])
    columns = columns_of(layout.total, beta)
    zero = torch.zeros(H, K, V, dtype=F64)
    expected = one_by_one(layout, zero, lambda at, state: plain_rule([x[at] for x in columns], state))
    same(stream(layout).rule((0, 1), *columns), expected, columns)


@pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])
@pytest.mark.parametrize("name", GROUPS)
def test_a_convolution_sees_its_segment_and_its_prefix_alone(name: str, silu: bool) -> None:
    layout = layout_of(GROUPS[name])
    torch.manual_seed(1)
    inputs = [torch.randn(*shape, dtype=F64, requires_grad=True) for shape in ((layout.total, D), (D, W), (D,))]
    x, weight, bias = inputs
    zero = torch.zeros(W - 1, D, dtype=F64)
    expected = one_by_one(layout, zero, lambda at, state: plain_convolution(x[at], weight, bias, state))
    expected = torch.nn.functional.silu(expected) if silu else expected
    ours = stream(layout).convolve((0, 1), x, weight, bias, silu=silu)
    filled = slice(0, sum(layout.length))
    same(ours[filled], expected[filled], inputs)


@pytest.mark.parametrize("beta", [True, False], ids=["delta", "mamba"])
def test_states_go_on_where_they_were_left(beta: bool) -> None:
    """In two passes, and one position at a time, as in one pass."""
    lengths = (CHUNK + 7, 5, 1)
    columns = columns_of(sum(lengths), beta)
    starts = list(itertools.accumulate(lengths, initial=0))[:-1]
    whole, last = gated_rule(columns, Segments(starts, lengths, sum(lengths)))
    cuts = [(start, min(2, length), length) for start, length in zip(starts, lengths, strict=True)]
    _, state = gated_rule(columns, Segments([a for a, _, _ in cuts], [n for _, n, _ in cuts], sum(lengths)))
    for run, (start, first, length) in enumerate(cuts):
        one = state[run : run + 1]
        for t in range(start + first, start + length):
            out, one = gated_rule([x[t : t + 1] for x in columns], Segments([0], [1], 1), one)
            assert torch.allclose(out[0], whole[t], atol=1e-12)
        assert torch.allclose(one[0], last[run], atol=1e-12)


def test_a_convolution_goes_on_where_it_was_left() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, D, dtype=F64), torch.randn(D, W, dtype=F64)
    whole, last = convolve(x, weight, None, Segments([0], [9], 9))
    out, state = convolve(x, weight, None, Segments([0], [2], 9))
    outputs = [out[:2]]
    for t in range(2, 9):
        out, state = convolve(x[t : t + 1], weight, None, Segments([0], [1], 1), state)
        outputs.append(out)
    assert torch.allclose(torch.cat(outputs), whole, atol=1e-13) and torch.equal(state, last)


def test_states_of_bfloat16_are_in_float32() -> None:
    columns = columns_of(80, True, torch.bfloat16)
    out, state = gated_rule(columns, Segments([0], [80], 80))
    assert out.dtype == state.dtype == torch.float32


def test_autocast_does_not_touch_the_rule() -> None:
    columns = columns_of(80, True, torch.float32)
    runs = Segments([0], [80], 80)
    expected, _ = gated_rule(columns, runs)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = gated_rule(columns, runs)
    assert torch.equal(out, expected)


def test_a_stream_of_filler_alone_computes() -> None:
    layout = Layout(start=(), length=(), prefix=(), total=1)
    assert stream(layout).rule((0, 1), *columns_of(1, True)).shape == (1, H, V)


class Computed(TorchDispatchMode):
    """Counts the numbers that operations give."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.count += sum(one.numel() for one in tree_leaves(results) if isinstance(one, Tensor))
        return results


def test_the_work_of_a_long_segment_is_linear_in_its_length() -> None:
    counts = []
    for chunks in (16, 32):
        layout = layout_of([(0, [chunks * CHUNK])], 0)
        columns = columns_of(layout.total, True)
        with Computed() as computed:
            stream(layout).rule((0, 1), *columns).sum().backward()
        counts.append(computed.count)
    assert counts[1] < 2.2 * counts[0]


def test_steady_decay_over_many_chunks_stays_finite() -> None:
    """Differences of logarithms are taken before their exponentials."""
    columns = columns_of(4 * CHUNK, True, torch.float32)
    columns[3] = torch.full((4 * CHUNK, H), -20.0, requires_grad=True)
    out = stream(layout_of([(0, [4 * CHUNK])], 0)).rule((0, 1), *columns)
    gradients = torch.autograd.grad(out.sum(), columns)
    assert out.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


def stand_in(query: Any, key: Any, value: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """fla's signature: runs one behind the other, between boundaries."""
    bounds = named["cu_seqlens"].tolist()
    runs = Segments(bounds[:-1], np.diff(bounds).tolist(), bounds[-1])
    columns = [x[0] for x in (query, key, value, named["g"], named["beta"])]
    out, state = gated_rule(columns, runs, named["initial_state"])
    assert named["output_final_state"] and named["scale"] == 1.0
    return out[None].to(value.dtype), state


def test_flas_kernel_is_given_the_boundaries_and_states_of_the_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(GROUPS["mixed"])
    columns = columns_of(layout.total, True)
    expected = stream(layout).rule((0, 1), *columns)
    monkeypatch.setattr(recurrence, "fla_kernel", lambda: stand_in)
    ours, _ = recurrence._by_fla(columns, Segments.of(layout), None)
    same(ours, expected, columns, bound=1e-5)  # the kernel's decays and states are in float32


def test_states_that_are_given_have_gradients() -> None:
    columns = columns_of(CHUNK + 20, True)
    state = torch.randn(2, H, K, V, dtype=F64, requires_grad=True)
    segments = Segments([0, CHUNK + 3], [CHUNK + 3, 17], CHUNK + 20)
    for part, inputs in enumerate(([*columns, state], [*columns[1:], state])):  # no query is in a last state
        ours = gated_rule(columns, segments, state)[part]
        each = [plain_rule([x[at] for x in columns], state[n]) for n, at in enumerate((slice(CHUNK + 3), slice(CHUNK + 3, None)))]
        same(ours, torch.cat([each[0][0], each[1][0]]) if part == 0 else torch.stack([each[0][1], each[1][1]]), inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or fla_kernel() is None, reason="no GPU with fla")
def test_flas_kernel_gives_the_rule_on_a_gpu() -> None:
    layout = layout_of(GROUPS["mixed"])
    columns = [x.detach().to("cuda", torch.bfloat16) for x in columns_of(layout.total, True)]
    ours = stream(layout).rule((0, 1), *columns)
    expected = stream(layout).rule((0, 1), *(x.float() for x in columns))
    assert (ours.float() - expected).abs().max() <= 0.05 * expected.abs().max()
