"""Memory of tensors on a CPU: what the C library keeps of it when it is freed, and the size of its pages.

Torch's tensors live in the C library's heap, which they break into pieces.  A page of 2 MB is asked for once where small
ones are 512 times, and its numbers are read faster (15 GB/s instead of 12 from memory, on the machine of docs/performance.md).

For glibc on Linux; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""mallopt's names."""
LARGEST = 32 << 20
"""The most that glibc lets lie in the heap.  Left alone it goes there with the first large tensors that are freed."""

LEAST_GROWTH = 16 << 20
"""Less is not worth a look."""


def prefer_large_pages() -> None:
    """Let torch ask for large pages for its large tensors.  Torch reads this once, when it makes its first tensor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@contextmanager
def own_pages(size: int) -> Iterator[None]:
    """What is allocated inside, from `size` bytes on, gets pages of its own, which go back to the system when it is freed.

    For buffers that are larger than what is ever written into them: in the heap their untouched parts lie on pages that others
    have used, and whoever comes next is pushed to new ones.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    libc.mallopt(MMAP_THRESHOLD, size)
    try:
        yield
    finally:
        # Said once, the thresholds no longer move by themselves: both have to be said.
        libc.mallopt(MMAP_THRESHOLD, LARGEST)
        libc.mallopt(TRIM_THRESHOLD, 2 * LARGEST)


class Heap:
    """Gives free pages back when pieces have grown that nothing fits into.

    Pages that are given back cost 0.5 ms a megabyte when they are touched again, more than a step can spare every time.  So what a
    step leaves behind it stays for the next one, and only when the process has grown by a third of that is all of it given back.
    """

    def __init__(self) -> None:
        self.level: int | None = None
        """Resident bytes one step after pages were given back."""
        self.given = 0
        """Bytes that were given back at the last time: what a step leaves."""

    def tidy(self) -> bool:
        """To be called once in a step, at the same place.  True if pages were given back."""
        libc = _glibc()
        if libc is None:
            return False
        now = _resident()
        if self.level is None:
            self.level = now
        if now <= self.level + max(self.given // 3, LEAST_GROWTH):
            return False
        libc.malloc_trim(0)
        self.given, self.level = now - _resident(), None
        return True


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
