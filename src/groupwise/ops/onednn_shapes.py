"""Numbers of rows that products in oneDNN's tiles are given.

oneDNN builds machine code for every shape that it meets, for each matrix anew (0.5 to 2 ms, 0.4 to
0.6 MB), and keeps a thousand of them.  Micro-batches and prompts have new lengths in every step, so
that memory and time would grow for hundreds of steps; filled with rows of zeros up to one of a few
sizes they do not.
"""

from __future__ import annotations

from functools import cache

import torch

TILE = 16
"""Rows of a tile."""


def tiled(dtype: torch.dtype) -> bool:
    """True if products in this type run in oneDNN's tiles on a CPU like this one."""
    return dtype == torch.bfloat16 and _has_tiles()


@cache
def _has_tiles() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def filled(count: int) -> int:
    """`count` rounded up to whole tiles and to at most 16 sizes between a power of two and the
    next: less than 7 % more.

    >>> [filled(n) for n in (0, 1, 17, 255, 257, 1000, 1025)]
    [0, 16, 32, 256, 272, 1024, 1088]
    """
    step = max(TILE, 1 << max(count - 1, 1).bit_length() >> 5)
    return -(-count // step) * step
