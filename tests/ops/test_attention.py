"""Attention of packed streams against one softmax over all pairs: windows, chunks, soft caps, sinks, values of another width."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import definition, joint, layout_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.ops import attention
from groupwise.ops import operations as ops
from groupwise.ops.attention import StreamAttention, behind
from groupwise.ops.cuda import flex_attention
from groupwise.ops.cuda.flex_attention import flex_attend, flex_block_mask
from groupwise.ops.query import EVERYTHING, Query, Reach

GROUPS = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=3)
REACHES = st.one_of(
    st.just(EVERYTHING), st.integers(1, 20).map(lambda n: Reach(window=n)), st.integers(1, 20).map(lambda n: Reach(chunk=n))
)
ASKED = {"reach": REACHES, "cap": st.sampled_from([None, 2.0]), "sinks": st.booleans(), "value": st.sampled_from([8, 5, 11])}


def asked(total: int, *, reach: Reach, cap: float | None, sinks: bool, value: int, keys: int = 2, seed: int = 0) -> Query:
    torch.manual_seed(seed)
    shapes = (total, 4, 8), (total, keys, 8), (total, keys, value)
    heads = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    return Query(0, *heads, 0.3, cap, reach, torch.randn(4, dtype=torch.float64).requires_grad_() if sinks else None)


def with_gradients(compute: Callable[[Query], Tensor], query: Query, end: int) -> list[Tensor]:
    """What is computed of the first `end` tokens, and the gradients of a sum of it."""
    out = compute(query)[:end]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    wanted = [x for x in (query.query_THD, query.key_TKD, query.value_TKE, query.sinks_H) if x is not None]
    return [out.detach(), *torch.autograd.grad((out * weight.to(out.device)).sum(), wanted)]


@given(groups=GROUPS, filler=st.sampled_from([0, 3]), keys=st.sampled_from([1, 2, 4]), rows=st.sampled_from([3, 256]), **ASKED)
@settings(max_examples=150, deadline=None)
def test_a_stream_is_one_softmax_over_what_each_token_sees(
    groups: Any, filler: int, keys: int, rows: int, reach: Reach, cap: float | None, sinks: bool, value: int
) -> None:
    """Values and gradients, cut into pieces of a few rows too."""
    layout = layout_of(groups, filler)
    query = asked(layout.total, reach=reach, cap=cap, sinks=sinks, value=value, keys=keys)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ROWS", "LEAST_ROWS", "CAPPED_ROWS"):
            patch.setattr(attention, name, rows)
        found = with_gradients(StreamAttention(layout), query, layout.total - filler)
    expected = with_gradients(lambda query: definition(layout, query), query, layout.total - filler)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@given(rows=st.integers(1, 12), more=st.integers(0, 14), size=st.sampled_from([3, 256]), **ASKED)
@settings(max_examples=80, deadline=None)
def test_the_last_tokens_of_a_sequence_see_what_they_would_in_the_whole(
    rows: int, more: int, size: int, reach: Reach, cap: float | None, sinks: bool, value: int
) -> None:
    query = asked(rows + more, reach=reach, cap=cap, sinks=sinks, value=value)
    query = query._replace(query_THD=query.query_THD[more:])
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(attention, "ROWS", size)
        found = behind(query)
    key_HMD, value_HME = (x.transpose(0, 1).repeat_interleave(2, 0) for x in (query.key_TKD, query.value_TKE))
    torch.testing.assert_close(found, joint(query.query_THD.transpose(0, 1), key_HMD, value_HME, query), rtol=1e-9, atol=1e-11)


class _Made(TorchDispatchMode):
    """Counts the numbers that operations make, and the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, Tensor) and one._base is None:
                self.numbers += one.numel()
        self.operations += 1
        return out


@pytest.mark.parametrize(
    "hides",
    [{"reach": Reach(window=215)}, {"reach": Reach(chunk=215)}, {"sinks_H": torch.zeros(8)}, {"reach": Reach(window=64)}],
    ids=str,
)
def test_what_hides_a_few_keys_costs_little_more_than_what_hides_none(hides: dict[str, Any]) -> None:
    """A window a few tokens shorter than the longest sequence made a copy of all keys and values for every completion."""
    layout = layout_of([(120, [103, 60, 77, 90, 51, 102, 88, 95])] * 3)
    heads = [torch.randn(layout.total, n, 64).requires_grad_() for n in (8, 4, 4)]
    found = []
    for more in ({"sinks_H": None}, hides):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "_chosen", ops.Operations())  # torch's kernels, also where there are others
            with _Made() as made:
                StreamAttention(layout)(Query(0, *heads, 0.125)._replace(**more)).sum().backward()
        found.append((made.numbers, made.operations))
    (numbers, operations), (more_numbers, more_operations) = found
    assert more_numbers < 1.5 * numbers
    assert more_operations < 5 * operations


def test_scores_within_a_window_are_not_rounded_to_bfloat16() -> None:
    """As torch's own attention, which the model alone would use; an error of scores grows with them."""
    torch.manual_seed(0)
    layout = layout_of([(0, [64])])
    heads = [(torch.randn(64, 2, 32) * size).bfloat16() for size in (4.0, 4.0, 1.0)]

    def distance(compute: Callable[[Query], Tensor], cap: float | None) -> float:
        query = Query(0, *heads, 0.3, cap, Reach(window=16))
        wide = query._replace(**{name: getattr(query, name).double() for name in ("query_THD", "key_TKD", "value_TKE")})
        exact = definition(layout, wide)
        return float((compute(query).double() - exact).norm() / exact.norm())

    for cap in (None, 20.0):
        ours = distance(StreamAttention(layout), cap)
        rounded = distance(lambda query: definition(layout, query), cap)
        assert ours < 0.5 * rounded and ours < 5e-3


# ---------------------------------------------------------------- FlexAttention, as on a GPU


CASES = [
    (EVERYTHING, None, False),
    (Reach(window=4), None, False),
    (Reach(chunk=5), 3.0, False),
    (Reach(window=6), None, True),
    (EVERYTHING, 2.0, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("reach", "cap", "sinks"), CASES, ids=str)
def test_flex_attention_says_the_same(reach: Reach, cap: float | None, sinks: bool) -> None:
    """The way of CUDA, uncompiled on the CPU."""
    layout = layout_of([(5, [4, 1]), (0, [7]), (3, [6])], 5)
    query = asked(layout.total, reach=reach, cap=cap, sinks=sinks, value=8, keys=4)
    query = Query(*(x.detach().float() if isinstance(x, Tensor) else x for x in query))
    with torch.no_grad():
        blocks = flex_block_mask(layout, torch.device("cpu"), reach)
        found = flex_attend(*query.heads, query.scale, cap, blocks, query.sinks_H)[0].transpose(0, 1)
    end = sum(layout.length)
    torch.testing.assert_close(found[:end], definition(layout, query)[:end], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_flex_attention_is_compiled_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where scores are capped: what torch cannot trace it would run uncompiled, for all pairs of tokens."""
    whole = torch.compile(flex_attention._plain_flex(), dynamic=True, fullgraph=True, backend="eager")
    monkeypatch.setattr(flex_attention, "_plain_flex", lambda: whole)
    for cap in (None, 3.0, 2.0):
        for groups in ([(5, [4, 1]), (0, [7])], [(3, [6])]):
            layout = layout_of(groups, 0)
            query = asked(layout.total, reach=EVERYTHING, cap=cap, sinks=False, value=8)
            query = Query(*(x.detach().float() if isinstance(x, Tensor) else x for x in query))
            with torch.no_grad():
                blocks = flex_block_mask(layout, torch.device("cpu"), query.reach)
                found = flex_attend(*query.heads, query.scale, cap, blocks, None)
            torch.testing.assert_close(found[0].transpose(0, 1), definition(layout, query), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reach", [EVERYTHING, Reach(window=1), Reach(window=200), Reach(window=300), Reach(chunk=150)], ids=str)
def test_the_flex_blocks_are_those_of_the_mask_of_all_pairs(reach: Reach) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    rng = random.Random(0)
    for longest in (3, 40, 128, 300, 700) * 3:
        groups = [(rng.randint(0, longest), [rng.randint(1, longest) for _ in range(rng.randint(1, 4))]) for _ in range(3)]
        layout = layout_of(groups, rng.choice([0, 0, 1, 130, 300]))
        found = flex_block_mask(layout, torch.device("cpu"), reach)
        expected = create_block_mask(found.mask_mod, None, None, layout.total, layout.total, device="cpu")
        assert (found.seq_lengths, found.BLOCK_SIZE) == (expected.seq_lengths, expected.BLOCK_SIZE)
        for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
            for kind in (name, f"full_{name}"):
                assert torch.equal(getattr(found, kind), getattr(expected, kind)), (layout, kind)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("reach", "cap", "sinks"), CASES, ids=str)
def test_flex_attention_on_a_gpu_equals_the_definition(reach: Reach, cap: float | None, sinks: bool) -> None:
    layout = layout_of([(5, [4, 1]), (0, [7]), (3, [6])], 5)
    query = asked(layout.total, reach=reach, cap=cap, sinks=sinks, value=8)
    query = Query(*(x.detach().float().cuda().requires_grad_() if isinstance(x, Tensor) else x for x in query))
    end = sum(layout.length)
    found = with_gradients(StreamAttention(layout), query, end)
    expected = with_gradients(lambda query: definition(layout, query), query, end)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
