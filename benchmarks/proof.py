"""What the proof costs: processor seconds of a load with it.

    python benchmarks/proof.py                # shapes S, M, L and a Llama of 135 million parameters
    python benchmarks/proof.py --only 135M

Each load runs in a process of its own on one thread, imports and all, and collects garbage as
rarely as the command does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from _machine import median, save, significant
from _workload import SHAPES, model_folder

LLAMA = replace(SHAPES["S"], hidden=576, layers=30, heads=9, kv_heads=3, inner=1536, vocab=49152)
MODELS = {name: SHAPES[name] for name in ("S", "M", "L")} | {"135M": LLAMA}
LOAD = """
import gc, sys, time
gc.set_threshold(20_000)
import torch
torch.set_num_threads(1)
from groupwise.config.settings import ModelSettings
from groupwise.models.loading import load_policy
from groupwise.proof.prove import prove
from groupwise.proof.texts import NATIVE
policy = load_policy(ModelSettings(path=sys.argv[1]))
begin = time.process_time()
prove(policy, longest=384, sampler=NATIVE)
print(time.process_time(), time.process_time() - begin)
"""


def load(folder: Path) -> tuple[float, float]:
    """Processor seconds of a load, and of the proof in it."""
    where = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD, str(folder)]
    seconds = subprocess.run(command, env=os.environ | where, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds[-2]), float(seconds[-1])


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="how often each is timed (default: 3)")
    parser.add_argument("--only", choices=list(MODELS), help="one of them")
    options = parser.parse_args()
    result = {}
    with tempfile.TemporaryDirectory(prefix="groupwise-bench-") as scratch:
        for name in [options.only] if options.only else MODELS:
            folder = model_folder(MODELS[name], Path(scratch))
            load(folder)  # reads the files that the others find in memory
            columns = [load(folder) for _ in range(options.times)]
            whole, proof = (median(list(column)) for column in zip(*columns, strict=True))
            result[name] = {"load": significant(whole), "proof": significant(proof)}
            print(f"{name:5s} {whole:.2f} s, {proof:.2f} s ({proof / whole:.0%}) of it the proof")
    save("proof", {"seconds": result})


if __name__ == "__main__":
    main()
