"""What recording costs: the share of a step's processor time that goes into its columns and its file, and the bytes on the disk.

    python benchmarks/recording.py --shape M

Recording is the columns of numbers per token, the meter of work, the Parquet file, and putting 100 old files together, a hundredth
of which counts for each step.  Processor seconds, medians over the steps; the completions have the lengths of the shape's schedule.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _in_process import ours
from _machine import Meter, median, save, significant
from _workload import add_options, workload


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    work = workload(options)
    side = ours(work)

    from groupwise.models.shape import Shape
    from groupwise.runs import rollout_files
    from groupwise.runs.run_files import RunFiles
    from groupwise.training import online
    from groupwise.training.work import Meter as WorkMeter

    meter = Meter(work.device)

    def metered(run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            with meter.phase("columns"):
                return run(*arguments, **keywords)

        return timed

    online.token_columns = metered(online.token_columns)  # type: ignore[assignment]
    online.first_pass = metered(online.first_pass)  # type: ignore[assignment]
    work_meter = WorkMeter(policy=Shape.of_policy(side.policy))
    clock = "cpu" if work.device == "cpu" else "wall"
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        next(side.loop)
        for _ in range(options.steps):
            meter.read()
            with meter.phase("step"):
                step = next(side.loop)
            with meter.phase("limits"):
                step = work_meter.read(step)
            with meter.phase("write"):
                rollout_files.write(RunFiles(folder), rollout_files.ROLLOUTS, step, "benchmark")
            found.append(meter.read()[clock])
        bytes_ = (folder / rollout_files.ROLLOUTS / f"{step.number:06d}.parquet").stat().st_size
    seconds = {name: median([one[name] for one in found]) for name in found[0]}
    completions, tokens = int(work.schedule().size), int(work.schedule().sum())
    training = seconds["step"] - seconds["columns"]
    cost = sum(seconds[name] for name in ("columns", "limits", "write"))
    result = {
        "workload": asdict(work),
        "seconds": {name: significant(value) for name, value in seconds.items()},
        "share": significant(cost / training),
        "bytes_per_1000_completions": round(1000 * bytes_ / completions),
        "bytes_per_token": significant(bytes_ / tokens),
    }
    save(f"recording_{options.shape}_{work.dtype}_threads_{work.threads}", result)
    for name, value in seconds.items():
        print(f"{name:8s}{1000 * value:10.2f} ms")
    print(f"recording takes {result['share']:.2%} of a step without it")
    print(f"{completions} completions of {tokens} tokens: {bytes_} bytes, {bytes_ / tokens:.1f} a token")


if __name__ == "__main__":
    main()
