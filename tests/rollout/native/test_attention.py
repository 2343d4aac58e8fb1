"""Decode attention against a joint softmax over prompt and own tokens, row by row."""

import pytest
import torch

from groupwise.models.attention import PackedAttention
from groupwise.ops.query import Query, Reach
from groupwise.records import Layout
from groupwise.rollout.native.decode_attention import Decode, LiveRows, Prefill
from groupwise.rollout.native.kv_cache import KVCache

HEADS, SHARED = 4, 2


def joint(query, keys, values, position, scale, softcap, window):
    """The definition for one row: (H, D) against keys (n, K, D), of which the last is the row's own."""
    keys, values = (x.repeat_interleave(HEADS // SHARED, 1) for x in (keys, values))
    scores = torch.einsum("hd,nhd->hn", query, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if window is not None:
        scores[:, torch.arange(len(keys)) <= position - window] = -torch.inf
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize("width", [8, 32], ids=["torch", "kernels"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 100, 6, 2])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 9, 4)])
@pytest.mark.parametrize("ages", ["equal", "ragged"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_parts_are_one_softmax(width, softcap, window, lengths, ages, dtype):
    torch.manual_seed(0)
    scale = 0.3
    entries = [0, 1, 0, 1, 1, len(lengths) - 1]
    age = [2] * 6 if ages == "equal" else [0, 4, 2, 1, 0, 3]
    prompts, own = KVCache(1, 9, most_tokens=9), KVCache(6, 2, most_tokens=16)
    prompts.reserve(len(lengths), 9)
    total = sum(lengths)
    stream = [torch.randn(total, n, width, dtype=dtype) for n in (HEADS, SHARED, SHARED)]
    how = (scale, softcap, Reach(window))
    out = Prefill(prompts, lengths)(Query(0, *stream, *how))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    layout = Layout(start=tuple(starts), length=lengths, prefix=(-1,) * len(lengths), total=total)
    torch.testing.assert_close(out, PackedAttention(layout)(Query(0, *stream, *how)))
    prompts.live = len(lengths)
    history = []
    for row in range(6):
        start = starts[entries[row]]
        history.append([x[start : start + lengths[entries[row]]] for x in stream[1:]])
    decode = Decode(prompts, own, torch.device("cpu"))
    own.live = 6
    own.reserve(6, 8)
    # Rows of different ages: those that have lived longer take steps before the others join.
    slab = own.layer(0, stream[1], prompts.layers[0].blocked)
    for row in range(6):
        keys, values = (torch.randn(age[row], SHARED, width, dtype=dtype) for _ in range(2))
        slab.write(row, keys[None], values[None])
        history[row] = [torch.cat(pair) for pair in zip(history[row], (keys, values), strict=True)]
    decode.arrange(LiveRows(lengths, entries, age))
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 5e-2}[dtype]
    for _ in range(3):
        position = decode.next()
        new = [torch.randn(6, n, width, dtype=dtype) for n in (HEADS, SHARED, SHARED)]
        out = decode(Query(0, *new, *how))
        assert out.shape == (6, HEADS, width)
        for row in range(6):
            history[row] = [torch.cat([old, x[row][None]]) for old, x in zip(history[row], new[1:], strict=True)]
            assert int(position[row]) == len(history[row][0]) - 1
            exact = joint(new[0][row].double(), *(x.double() for x in history[row]), int(position[row]), scale, softcap, window)
            torch.testing.assert_close(out[row].double(), exact, rtol=0, atol=tolerance)
