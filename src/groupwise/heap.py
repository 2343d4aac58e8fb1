"""How the C library keeps freed memory: two settings of glibc's allocator that torch's tensors live by.

Elsewhere than on Linux with glibc nothing is done, and nothing needs to be.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""mallopt's names."""
LARGEST = 32 << 20
"""The most that glibc lets lie in the heap.  Left alone it goes there with the first large tensors that are freed."""


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


@cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
