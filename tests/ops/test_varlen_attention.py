"""Attention of a packed stream by two calls of flash attention, which is here its definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flash_attention
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import layout_of
from torch import Tensor

from groupwise.ops.attention import StreamAttention
from groupwise.ops.cuda import varlen_attention as varlen
from groupwise.ops.query import Query

GROUPS = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def _by_definition() -> Iterator[None]:
    """A CPU has no kernel for CUDA's operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "_flash", flash_attention.forward)
        patch.setattr(varlen, "_flash_backward", flash_attention.backward)
        yield


def query_of(total: int, keys: int, sinks: bool, dtype: torch.dtype = torch.float64) -> Query:
    torch.manual_seed(0)
    shapes = (total, 4, 8), (total, keys, 8), (total, keys, 8)
    heads = (torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)
    return Query(0, *heads, 0.3, sinks_H=torch.randn(4, dtype=torch.float64).to(dtype).requires_grad_() if sinks else None)


def with_gradients(compute: Any, query: Query, end: int) -> list[Tensor]:
    """What is computed of the first `end` tokens, and the gradients of a sum of it."""
    out = compute(query)[:end]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    wanted = [x for x in (query.query_THD, query.key_TKD, query.value_TKE, query.sinks_H) if x is not None]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), wanted)]


@given(groups=GROUPS, filler=st.sampled_from([0, 3]), keys=st.sampled_from([1, 2, 4]), sinks=st.booleans())
@settings(max_examples=80, deadline=None)
def test_two_calls_are_one_softmax_over_what_each_token_sees(groups: Any, filler: int, keys: int, sinks: bool) -> None:
    layout = layout_of(groups, filler)
    query, end = query_of(layout.total, keys, sinks), sum(layout.length)
    found = with_gradients(lambda query: varlen.varlen_attention(query, varlen.SequenceEnds.of(layout)), query, end)
    expected = with_gradients(StreamAttention(layout), query, end)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@given(groups=GROUPS, filler=st.sampled_from([0, 3]))
def test_the_lists_of_both_calls_ascend_to_the_end_of_the_stream(groups: Any, filler: int) -> None:
    """Otherwise the kernel reads memory that is not the stream's, or leaves some of its results unwritten."""
    layout = layout_of(groups, filler)
    ends = varlen.SequenceEnds.of(layout)
    for query, key, longest_query, longest_key in (ends.causal_call, ends.prefix_call)[: 2 if ends.longest_key else 1]:
        assert query[0] == key[0] == 0 and query[-1] == key[-1] == layout.total
        assert int(query.diff().min()) >= 0 and int(key.diff().min()) >= 0
        assert int(query.diff().max()) <= longest_query and int(key.diff().max()) <= longest_key
        assert longest_query > 1


def test_no_second_call_where_nobody_shares_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[8])
        return flash_attention.forward(*args, **kwargs)

    monkeypatch.setattr(varlen, "_flash", counting)
    for groups, expected in (([(0, [7]), (5, [4])], [True]), ([(5, [4, 3])], [True, False])):
        layout = layout_of(groups)
        calls.clear()
        varlen.varlen_attention(query_of(layout.total, 2, False), varlen.SequenceEnds.of(layout))
        assert calls == expected


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"cap": 2.0}, False),
        ({"query_THD": torch.zeros(3, 4, 16)}, False),
        ({"value_TKE": torch.zeros(3, 2, 8).bfloat16()}, False),
        ({"query_THD": torch.zeros(3, 4, 12).bfloat16(), "value_TKE": torch.zeros(3, 2, 12).bfloat16()}, False),
        ({"query_THD": torch.zeros(3, 4, 264).bfloat16(), "value_TKE": torch.zeros(3, 2, 264).bfloat16()}, False),
    ],
    ids=["as it is", "capped", "float32", "values of another width", "no multiple of 8", "too wide"],
)
def test_only_what_the_kernel_knows_is_handed_to_it(changes: dict[str, Any], taken: bool) -> None:
    heads = (torch.zeros(3, n, 16).bfloat16() for n in (4, 2, 2))
    assert varlen.flash_takes(Query(0, *heads, 0.3)._replace(**changes)) is taken


@pytest.mark.parametrize(
    ("built", "capability", "width", "expected"),
    [
        (True, (9, 0), 256, True),
        (True, (7, 5), 64, False),
        (False, (9, 0), 64, False),
        (True, (8, 9), 192, True),
        (True, (8, 9), 256, False),
        (True, (12, 0), 256, False),
    ],
)
def test_gpus_that_cannot_run_the_kernel_are_not_asked_for_it(
    built: bool, capability: tuple[int, int], width: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds without it, GPUs before Ampere, and wide heads on GPUs with little shared memory."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    varlen.has_flash.cache_clear()
    assert varlen.has_flash(torch.device("cuda", 0), width) is expected
    varlen.has_flash.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "groups",
    [[(5, [4, 1]), (0, [7]), (3, [6])], [(40, [30, 20, 25]), (33, [9, 8])], [(0, [300])], [(700, [300, 20, 400]), (30, [500, 9])]],
    ids=str,
)
def test_the_kernel_computes_what_its_definition_says(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for sequences without keys or without queries, and for heads that share keys."""
    layout = layout_of(groups)
    query = query_of(layout.total, 2, False, torch.bfloat16)
    expected = with_gradients(StreamAttention(layout), query_of(layout.total, 2, False), layout.total)
    monkeypatch.setattr(varlen, "_flash", torch.ops.aten._flash_attention_forward)
    monkeypatch.setattr(varlen, "_flash_backward", torch.ops.aten._flash_attention_backward)
    there = Query(*(x.detach().cuda().requires_grad_() if isinstance(x, Tensor) else x for x in query))
    ends = varlen.SequenceEnds.of(layout).to("cuda")
    out = varlen.varlen_attention(there, ends)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(out, (there.query_THD, there.key_TKD, there.value_TKE), weight.to(out))
    for ours, theirs in zip((out, *gradients), expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu().double(), theirs, rtol=4e-2, atol=4e-2)
