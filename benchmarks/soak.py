"""A soak: every few seconds something is killed, frozen, joins or leaves beside a run, at random, and nothing may be lost.

    python benchmarks/soak.py --seconds 3600 --every 60
    python benchmarks/soak.py --seconds 3600 --every 60 --delay 0.03           # slow servers leave the cores to others
    python benchmarks/soak.py --seconds 600 --every 20 --router vllm-router

It prints what happened and, at the end, how many steps and completions there are, how many are lost or counted twice, and the
oldest token.  It fails unless nothing is lost or counted twice and no token is older than `ahead`.

The servers are scripted (tests/fixtures/scripted_vllm.py): they speak vLLM's form, fetch published versions, and give the log-probs
of the weights that they hold.  What is verified at the end stands in tests/fixtures/disturbed_run.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))

from disturbed_run import DisturbedRun


def main() -> None:
    """Run, disturb and verify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two disturbances")
    parser.add_argument("--router", help="command of vllm-router; without it the trainer reads a file of servers")
    parser.add_argument("--delay", type=float, default=0.006, help="seconds that a server takes for a token, on average")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="groupwise-soak-"))
    soak = DisturbedRun(folder, steps=1_000_000, router=options.router, seed=options.seed, delay=options.delay)
    try:
        soak.wait_for_step(3)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            before = soak.done()
            print(f"{time.strftime('%H:%M:%S')} step {before}: {soak.disturb()}", flush=True)
            before = soak.done()
            time.sleep(options.every)
            soak.wait_for_step(before + 1)
        soak.end()
        print(json.dumps(soak.summary(), indent=2), flush=True)
        soak.verify()
    except BaseException:
        print(f"what there is lies in {folder}", file=sys.stderr)
        soak.close()
        raise
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
