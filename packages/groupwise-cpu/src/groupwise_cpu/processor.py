"""What this machine's processor can do, as Linux calls it."""

from __future__ import annotations

from pathlib import Path


def features(cpus: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Names of its instruction sets; none where there is no such file."""
    try:
        lines = cpus.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())
