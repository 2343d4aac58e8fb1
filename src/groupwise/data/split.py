"""Which rows are held out: decided by a hash of the prompt, so the same rows whatever the seed, the
order or the machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from groupwise.errors import ConfigError


def hash_share(key: str) -> float:
    """A number in [0, 1) that depends on `key` only: the first 8 bytes of its MD5, read as a
    fraction.

    The first byte is below 26 exactly when the share is below 26 / 256.

    >>> round(hash_share("2+2"), 4)
    0.9778
    """
    digest = hashlib.md5(key.encode(), usedforsecurity=False).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (
        1 << 53
    )  # 53 bits: exact in a float, so never rounded up to 1


def part_of(key: str, fractions: Mapping[str, float], rest: str = "train") -> str:
    """The named part that `key` belongs to; keys that fall into none belong to `rest`.

    Parts are consecutive stretches of [0, 1): enlarging the last one moves no key between the
    others.
    Raises ConfigError if the fractions are negative or sum to 1 or more.

    >>> [part_of(str(i), {"test": 0.2, "validation": 0.1}) for i in (6, 9, 11)]
    ['test', 'validation', 'train']
    """
    if any(share < 0 for share in fractions.values()) or sum(fractions.values()) >= 1:
        raise ConfigError(
            f"held-out fractions must be positive and sum to less than 1, got {dict(fractions)}"
        )
    place = hash_share(key)
    for name, share in fractions.items():
        if place < share:
            return name
        place -= share
    return rest
