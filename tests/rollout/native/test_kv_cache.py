"""Entries keep their tokens through growth and moves."""

import pytest
import torch

from groupwise.ops.operations import absence, operations
from groupwise.rollout.native.kv_cache import KVCache, LayerCache


def test_slab_growth_and_moves_keep_what_was_written():
    slab = LayerCache(2, 3, torch.empty(1, 2, 4))
    prompts = torch.randn(2, 3, 2, 4)
    slab.write(0, prompts, -prompts)
    slab.grow(4, 8)
    more = torch.randn(2, 5, 2, 4)
    slab.write(2, more, -more)
    token = torch.randn(4, 2, 4)
    slab.append(torch.tensor([3, 3, 5, 5]), token, -token)
    slab.move([(3, 0)], 6)
    key, value = slab.view(2, 6)
    torch.testing.assert_close(key[0], torch.cat([more[1], token[3:4]]).transpose(0, 1))
    torch.testing.assert_close(key[1, :, :4], torch.cat([prompts[1], token[1:2]]).transpose(0, 1))
    torch.testing.assert_close(value, -key)


@pytest.mark.skipif(absence() is not None, reason=f"no compiled kernels: {absence()}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_the_kernels_keep_what_was_written(dtype):
    like = torch.empty(1, 2, 16, dtype=dtype)
    blocked = operations().blocked_attention(like)
    slab, direct = LayerCache(2, 33, like, blocked), LayerCache(4, 70, like, blocked)
    short, long = torch.randn(2, 2, 33, 2, 16).to(dtype), torch.randn(2, 2, 65, 2, 16).to(dtype)
    slab.write(0, short[0], short[1])
    slab.grow(4, 70)
    slab.write(2, long[0], long[1])
    slab.move([(3, 0)], 65)
    for entry, (key, value) in enumerate(((long[0, 1], long[1, 1]), (short[0, 1], short[1, 1]), *long.transpose(0, 1))):
        direct.write(entry, key[None], value[None])
    assert torch.equal(slab.key_EKTD, direct.key_EKTD) and torch.equal(slab.value_EKTD, direct.value_EKTD)
    # Number 5 of token 37: its word lies among those of 16 tokens, or of one or two.
    deep = 4 // dtype.itemsize
    block = slab.key_EKTD[2, 1, 1].view(2, 16 // deep, 16, deep), slab.value_EKTD[2, 1, 1].view(32 // deep, 16, deep)
    assert block[0][0, 5 // deep, 5, 5 % deep] == long[0, 0, 37, 1, 5]
    assert block[1][5 // deep, 5, 5 % deep] == long[1, 0, 37, 1, 5]


def test_store_drops_entries_and_moves_the_last_into_the_gaps():
    store = KVCache(2, 2, most_tokens=5)
    store.reserve(5, 3)
    assert store.capacity[0] >= 5
    assert store.capacity[1] == 4
    store.live = 5
    rows = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 3, 1, 1)
    store.layer(0, rows).write(0, rows, rows)
    assert store.drop([0, 3], 3) == [4, 1, 2]
    assert store.live == 3
    assert store.layers[0].view(3, 3)[0].flatten(1)[:, 0].tolist() == [4.0, 1.0, 2.0]
    store.reserve(3, 5)
    assert store.capacity[1] == 5, "never more than the longest allowed"
