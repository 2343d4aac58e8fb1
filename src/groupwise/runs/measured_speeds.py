"""How fast steps ran where they were measured: what a plan takes for the speed of a device.

`python benchmarks/speeds.py` prints the rows from `benchmarks/results/`.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "amx": "a core with matrix tiles (AMX)",
    "avx512": "a core with AVX-512",
    "zen4": "a core of AMD's Zen 4",
    "avx2": "a core with AVX2",
}
"""Kinds of processors."""
PEAKS = {"NVIDIA H200": 989e12}
"""FLOP/s of dense products in bfloat16, by their makers."""


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """The speed of a GRPO step with a model of one size."""

    device: str
    """The name of a GPU, or a kind of processor, of which one core was measured."""
    dtype: str
    """The type of the products."""
    blocks: float
    """Parameters of the model's blocks."""
    update: float
    """FLOP/s of an update, forward and backward."""
    rollout: float
    """FLOP/s of sampling with the native engine."""
    date: str
    commit: str
    """The source that was measured."""


MEASURED = (
    MeasuredSpeed("NVIDIA H200", "bfloat16", 3.6e08, 5.5e13, 6.8e12, "2026-11-26", "cb86c844"),
    MeasuredSpeed("amx", "bfloat16", 2.9e06, 2.6e11, 1.3e11, "2026-11-22", "0a10df2"),
    MeasuredSpeed("amx", "bfloat16", 2.0e07, 4.9e11, 1.9e11, "2026-11-22", "0a10df2"),
    MeasuredSpeed("amx", "bfloat16", 8.5e07, 3.1e11, 5.8e10, "2026-11-21", "dc73dc5"),
    MeasuredSpeed("amx", "float32", 2.9e06, 1.2e11, 6.7e10, "2026-11-22", "0a10df2"),
    MeasuredSpeed("amx", "float32", 2.0e07, 1.8e11, 6.4e10, "2026-11-22", "0a10df2"),
    MeasuredSpeed("amx", "float32", 8.5e07, 1.7e11, 3.8e10, "2026-11-21", "dc73dc5"),
    MeasuredSpeed("avx2", "float32", 2.9e06, 1.9e10, 1.9e10, "2026-11-24", "f0ac50b"),
    MeasuredSpeed("avx2", "float32", 2.0e07, 3.1e10, 2.2e10, "2026-11-24", "f0ac50b"),
    MeasuredSpeed("avx512", "bfloat16", 2.9e06, 2.0e11, 1.5e11, "2026-11-23", "c76f066"),
    MeasuredSpeed("avx512", "bfloat16", 2.0e07, 2.6e11, 2.0e11, "2026-11-23", "c76f066"),
    MeasuredSpeed("avx512", "bfloat16", 8.5e07, 2.2e11, 1.5e11, "2026-11-22", "f5675b6"),
    MeasuredSpeed("avx512", "float32", 2.9e06, 1.4e11, 1.3e11, "2026-11-23", "956584d"),
    MeasuredSpeed("avx512", "float32", 2.0e07, 1.5e11, 1.4e11, "2026-11-23", "c76f066"),
    MeasuredSpeed("avx512", "float32", 8.5e07, 1.5e11, 8.1e10, "2026-11-22", "f5675b6"),
    MeasuredSpeed("zen4", "bfloat16", 2.9e06, 1.3e11, 1.3e11, "2026-11-25", "0fedc70"),
    MeasuredSpeed("zen4", "bfloat16", 2.0e07, 1.4e11, 1.4e11, "2026-11-25", "fe6a2ec"),
    MeasuredSpeed("zen4", "bfloat16", 8.5e07, 1.5e11, 1.1e11, "2026-11-25", "c75bb4f"),
    MeasuredSpeed("zen4", "float32", 2.9e06, 7.0e10, 6.9e10, "2026-11-26", "bf478577"),
    MeasuredSpeed("zen4", "float32", 2.0e07, 8.1e10, 7.8e10, "2026-11-26", "1a669c03"),
    MeasuredSpeed("zen4", "float32", 8.5e07, 8.4e10, 6.3e10, "2026-11-25", "fe6a2ec"),
)
