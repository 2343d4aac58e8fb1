"""Entries keep their tokens through growth and moves."""

import torch

from groupwise.rollout.kvcache import Slab, Store


def test_slab_growth_and_moves_keep_what_was_written():
    slab = Slab(2, 3, torch.empty(1, 2, 4))
    prompts = torch.randn(2, 3, 2, 4)
    slab.write(0, prompts, -prompts)
    slab.grow(4, 8)
    more = torch.randn(2, 5, 2, 4)
    slab.write(2, more, -more)
    token = torch.randn(4, 2, 4)
    slab.append(torch.tensor([3, 3, 5, 5]), token, -token)
    slab.move(torch.tensor([3]), torch.tensor([0]), 6)
    key, value = slab.view(2, 6)
    torch.testing.assert_close(key[0], torch.cat([more[1], token[3:4]]).transpose(0, 1))
    torch.testing.assert_close(key[1, :, :4], torch.cat([prompts[1], token[1:2]]).transpose(0, 1))
    torch.testing.assert_close(value, -key)


def test_store_drops_entries_and_moves_the_last_into_the_gaps():
    store = Store(2, 2, most_tokens=5)
    store.reserve(5, 3)
    assert store.room[0] >= 5
    assert store.room[1] == 4
    store.live = 5
    rows = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 3, 1, 1)
    store.layer(0, rows).write(0, rows, rows)
    assert store.drop([0, 3], 3) == [4, 1, 2]
    assert store.live == 3
    assert store.slabs[0].view(3, 3)[0].flatten(1)[:, 0].tolist() == [4.0, 1.0, 2.0]
    store.reserve(3, 5)
    assert store.room[1] == 5, "never more than the longest allowed"
