"""Our side of a comparison in the process that asks for it: for benchmarks that look at one side alone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from _workload import Workload, model_folder

if TYPE_CHECKING:
    from _ours import Ours


def ours(work: Workload) -> Ours:
    """Our side of a workload.  Call it before torch is imported: it says with how many threads."""
    os.environ["OMP_NUM_THREADS"] = str(work.threads)
    import torch
    from _ours import Ours

    torch.set_num_threads(work.threads)
    with tempfile.TemporaryDirectory(prefix="groupwise-bench-") as scratch:
        return Ours(work, model_folder(work, Path(scratch)))
