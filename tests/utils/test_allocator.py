"""What the C library keeps: pages of their own, and when pages go back."""

from __future__ import annotations

import sys

import pytest
import torch

from groupwise.ops.onednn_shapes import filled
from groupwise.utils import allocator
from groupwise.utils.allocator import Heap, own_pages

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library is glibc")


def test_a_buffer_that_is_not_filled_takes_no_memory_and_goes_back() -> None:
    for _ in range(2):  # the first time the libraries' own beginnings are in between
        noise = [torch.ones(3 << 18) for _ in range(8)]  # 3 MB each, which the heap then has in pieces
        del noise
        with own_pages(1 << 20):
            before = allocator._resident()
            buffer = torch.empty(64 << 18)
            buffer[: 1 << 18] = 1.0
            held = allocator._resident() - before
            del buffer
            left = allocator._resident() - before
    assert held < 8 << 20, "64 MB asked for, 1 MB written"
    assert left < 1 << 20


def test_pages_go_back_when_the_process_has_grown_by_a_third_of_what_a_step_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100, 400, 250, 300, 330, 352, 240, 260])
    monkeypatch.setattr(allocator, "_resident", lambda: next(sizes) << 20)
    tidy = Heap()
    assert not tidy.tidy(), "the first step has nothing to compare with"
    assert tidy.tidy(), "100 -> 400 MB: the first step's pieces, 150 MB of them, go back"
    assert not tidy.tidy(), "300 is the level of a step with its pieces"
    assert not tidy.tidy(), "330: less than 50 more"
    assert tidy.tidy(), "352"
    assert not tidy.tidy()


def test_few_sizes_cover_all_lengths() -> None:
    sizes = [filled(n) for n in range(1, 4097)]
    assert all(n <= size < max(n + 16, 1.07 * n) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 90
