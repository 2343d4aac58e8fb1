"""Groupwise's inner loops for CPUs: importing this registers them with torch, as `torch.ops.groupwise.NAME`.

Where they cannot be loaded, ImportError says why and what to do.  `kernels/bindings.cpp` says what each takes and gives.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from groupwise_cpu.processor import features

if TYPE_CHECKING:
    from groupwise_cpu.operations import CpuOperations

REMEDY = "install it again on this machine: pip install --no-build-isolation --force-reinstall --no-deps ./packages/groupwise-cpu"


def load(folder: Path) -> None:
    """Load a folder's library, if it is whole and this processor has all that it needs: else it could end the process."""
    library = folder / "kernels.so"
    try:
        built = json.loads((folder / "built.json").read_text(encoding="utf-8"))
        needed, digest = set(built["features"]), built["library"]
        whole = hashlib.sha256(library.read_bytes()).hexdigest() == digest
    except (OSError, ValueError, TypeError, KeyError):  # a file is missing, or cut off
        needed, whole = set(), False
    if missing := sorted(needed - features()):
        raise ImportError(f"groupwise-cpu was compiled for a processor with {', '.join(missing)}, which this one lacks: {REMEDY}")
    if not whole:
        raise ImportError(f"groupwise-cpu is damaged ({library}): {REMEDY}")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ImportError(f"groupwise-cpu cannot be loaded ({error}): {REMEDY}") from error


def cpu_operations() -> CpuOperations:
    """Return what Groupwise computes with on a CPU (`groupwise.ops.operations`)."""
    from groupwise_cpu.operations import CpuOperations

    return CpuOperations()


load(Path(__file__).parent)
