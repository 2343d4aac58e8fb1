"""Peak memory of a step beside what `--dry-run` predicts for it, above what is resident once the model is loaded.

    python benchmarks/memory.py                 # small shapes
    python benchmarks/memory.py --rows M L      # those whose names begin so

All completions are as long as they may be, which is what a plan assumes.  Every row has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _machine import save, significant
from _workload import SHAPES, Workload, model_folder
from vs_trl import start


def rows() -> dict[str, Workload]:
    """Workloads by name."""
    small, medium, large = (replace(SHAPES[name], lengths="full") for name in "SML")
    return {
        "S": small,
        "S bfloat16": replace(small, dtype="bfloat16"),
        "S beta": replace(small, beta=0.04),
        "S group 16": replace(small, group=16),
        "S group 32": replace(small, group=32),
        "S vocabulary 32,768": replace(small, vocab=32768),
        "S checkpointing": replace(small, checkpointing=True),
        "M": medium,
        "M bfloat16": replace(medium, dtype="bfloat16"),
        "M checkpointing": replace(medium, checkpointing=True),
        "L": large,
    }


def measure(work: Workload, steps: int, scratch: Path) -> dict[str, Any]:
    """Predicted and measured bytes."""
    os.environ["OMP_NUM_THREADS"] = str(work.threads)
    side = start("groupwise", work, model_folder(work, scratch), scratch)
    planned = side.ask("planned")
    peak = max(side.ask("step")["peak"] for _ in range(steps))
    side.end()
    return {
        "workload": asdict(work),
        "predicted_mb": significant(planned / 1e6),
        "peak_mb": significant(peak / 1e6),
        "ratio": significant(planned / peak),
    }


def main() -> None:
    """Measure the rows and keep what was measured before of others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["S"], help="rows whose names begin with one of these (default: S)")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="groupwise-bench-") as scratch:
        for name, work in rows().items():
            if name.startswith(tuple(options.rows)):
                found = measure(work, options.steps, Path(scratch))
                save(f"memory_{name.replace(' ', '_').replace(',', '')}", {"name": name, **found})
                print(name, json.dumps({key: found[key] for key in ("predicted_mb", "peak_mb", "ratio")}), flush=True)


if __name__ == "__main__":
    main()
