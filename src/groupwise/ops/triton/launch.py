"""What every launch decides: which tensors there are kernels for, block sizes and warps."""

from __future__ import annotations

import torch
from torch import Tensor

TYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMBERS_OF_A_WARP = 256
"""Numbers of a block that one warp holds: 8 for each of its 32 threads."""
MOST_WARPS = 8


def fits(device: str, *tensors: Tensor) -> bool:
    """Return True if there are kernels for such tensors: on the device, with whole rows."""
    for tensor in tensors:
        if tensor.device.type != device or tensor.dtype not in TYPES or tensor.stride(-1) != 1:
            return False
    return True


def power_of_two(count: int) -> int:
    """Return the least power of two that is at least `count`.

    >>> [power_of_two(count) for count in (1, 5, 64, 896)]
    [1, 8, 64, 1024]
    """
    return 1 << (count - 1).bit_length()


def warps_of(block: int) -> int:
    """Return the warps of a program that holds `block` numbers, a power of two.

    >>> [warps_of(block) for block in (64, 1024, 8192)]
    [1, 4, 8]
    """
    return max(1, min(MOST_WARPS, block // NUMBERS_OF_A_WARP))


def quotient(numbers: int, size: int) -> int:
    """Return how many blocks of `size` hold so many numbers.

    >>> quotient(10, 4)
    3
    """
    return -(-numbers // size)
