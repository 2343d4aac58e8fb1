"""How much a program may use."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on one run of a program."""

    seconds: float = 5.0
    """Wall-clock seconds for one case."""
    cpu_seconds: float = 3.0
    """Processor seconds for the whole program, rounded up."""
    memory: int = 512 << 20
    """Bytes of address space."""
    disk: int = 16 << 20
    """Bytes in its folder."""
    output: int = 1 << 20
    """Bytes that it may print or answer."""
    processes: int = 64
    """Processes at once, where it may make any."""

    def as_json(self) -> dict[str, Any]:
        """Return the limits for the runner."""
        return asdict(self)
