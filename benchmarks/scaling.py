"""How a step's cost grows with each of its sizes, beside the curve that its FLOPs predict.

    python benchmarks/scaling.py                      # all axes from shape S
    python benchmarks/scaling.py --axis group prompt --shape M

Axes: completions per prompt, prompt length, completion length, vocabulary, share of dead groups.  The update should follow
`(1 - z) B (P + G C)`: a prompt counts once, whatever the group's size, and dead groups not at all; the naive curve pays for every
prompt G times and for padding to the longest.  Memory above what is loaded should not follow the vocabulary, apart from the
gradient and the optimizer's state of the embedding.  Plots are written where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _machine import median, save, significant
from _workload import Workload, add_options, model_folder, workload
from limits import update_flops
from vs_trl import start

IMAGES = Path(__file__).parent / "images"
AXES: dict[str, tuple[float, ...]] = {
    "group": (2, 4, 8, 16),
    "prompt": (32, 128, 512),
    "completion": (32, 64, 128, 256),
    "vocab": (512, 8192, 32768),
    "dead": (0.0, 0.25, 0.5, 0.75),
}


def measure(works: list[Workload], steps: int, scratch: Path) -> list[dict[str, Any]]:
    """The workloads step in turn, so that a machine's slow minute meets them all."""
    os.environ["OMP_NUM_THREADS"] = str(works[0].threads)
    sides = []
    for number, work in enumerate(works):
        own = scratch / str(number)
        own.mkdir(parents=True)
        sides.append(start("groupwise", work, model_folder(work, own), own))
        sides[-1].ask("step")
    found = [[side.ask("step") for side in sides] for _ in range(steps)]
    for side in sides:
        side.end()
    return [point(work, list(took)) for work, took in zip(works, zip(*found, strict=True), strict=True)]


def point(work: Workload, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of processor seconds, the peak, and what FLOPs predict, up to a factor."""
    # 12 d^2 of a block: near enough for a curve that is scaled to its first point.
    gflop = sum(update_flops(work, 12 * work.layers * work.hidden**2).values())
    naive = work.prompts * work.group * (work.prompt + work.completion)
    head = work.vocab * work.hidden * 12 / 1e6
    return {
        "update": median([step["cpu"]["update"] for step in found]),
        "rollout": median([step["cpu"]["rollout"] for step in found]),
        "peak_mb": significant(max(step["peak"] for step in found) / 1e6),
        "head_state_mb": significant(head),
        "gflop": significant(gflop),
        "naive_positions": naive,
    }


def plot(axis: str, points: list[dict[str, Any]], path: Path) -> bool:
    """Update seconds, the predicted and the naive curve.  False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    at = [point["at"] for point in points]
    first = points[0]
    figure, axes = pyplot.subplots(figsize=(5, 3.4))
    axes.plot(at, [point["update"] for point in points], "o-", label="measured")
    axes.plot(at, [first["update"] * point["gflop"] / first["gflop"] for point in points], "--", label="predicted by FLOPs")
    naive = [first["update"] * point["naive_positions"] / first["naive_positions"] for point in points]
    axes.plot(at, naive, ":", label="prompt G times, padded")
    axes.set_xlabel(axis)
    axes.set_ylabel("update, processor seconds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def main() -> None:
    """Measure the axes and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--axis", nargs="+", default=list(AXES), choices=list(AXES))
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    base = workload(options)
    tables: dict[str, list[dict[str, Any]]] = {}
    drawn: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="groupwise-bench-") as scratch:
        for axis in options.axis:
            works = [replace(base, **{axis: value if axis == "dead" else int(value)}) for value in AXES[axis]]
            measured = measure(works, options.steps, Path(scratch) / axis)
            points = tables[axis] = [{"at": value, **found} for value, found in zip(AXES[axis], measured, strict=True)]
            first = points[0]
            print(f"\n{axis:>10s}  update s  predicted   rollout s   peak MB (without the head's gradient and state)")
            for seen in points:
                predicted = first["update"] * seen["gflop"] / first["gflop"]
                print(
                    f"{seen['at']:10g}  {seen['update']:8.3f}   {predicted:8.3f}    {seen['rollout']:8.3f}   "
                    f"{seen['peak_mb']:7.0f} ({seen['peak_mb'] - seen['head_state_mb']:.0f})",
                    flush=True,
                )
            # After every axis: a run that is cut short leaves what it has.
            path = save(f"scaling_{options.shape}_{base.dtype}_threads_{base.threads}", {"workload": asdict(base), "axes": tables})
            drawn.append(plot(axis, points, IMAGES / f"scaling_{options.shape}_{axis}_{path.stem}.png"))
    if not all(drawn):
        print("no plots: matplotlib is not installed (pip install matplotlib)")
    print(json.dumps({axis: [[point["at"], point["update"]] for point in points] for axis, points in tables.items()}))


if __name__ == "__main__":
    main()
