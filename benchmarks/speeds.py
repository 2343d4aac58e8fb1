"""Print the rows of `runs/measured_speeds.py`, by the newest comparisons with TRL on each kind of device.

    python benchmarks/speeds.py

FLOPs are those that the plan of a run counts, of the lengths that were sampled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _machine
from _workload import Workload

from groupwise.models.shape import Shape
from groupwise.runs.measured_speeds import MeasuredSpeed
from groupwise.training.work import forward_flops, sampling_flops

FAMILIES = ("qwen2", "gpt2")


def shape_of(work: Workload) -> Shape:
    """The sizes of a workload's model."""
    inner = work.inner or (4 * work.hidden if work.family == "gpt2" else 8 * work.hidden // 3)
    width = work.hidden // work.heads
    kv = (work.kv_heads or work.heads) * width
    matrices = 2 if work.family == "gpt2" else 3
    block = 2 * work.hidden**2 + 2 * work.hidden * kv + matrices * work.hidden * inner
    outside = work.vocab * work.hidden + work.hidden
    return Shape(
        parameters=work.layers * block + outside,
        layers=work.layers,
        hidden=work.hidden,
        intermediate=inner,
        heads=work.heads,
        kv_heads=work.kv_heads or work.heads,
        head_width=width,
        vocabulary=work.vocab,
        tied=True,
    )


def row_of(kind: str, result: dict[str, Any]) -> MeasuredSpeed:
    """The speeds of one comparison."""
    work, machine, seconds = Workload(**result["workload"]), result["machine"], result["groupwise"]["wall"]
    shape = shape_of(work)
    rows = []
    for prompt, lengths in enumerate(work.schedule().tolist()):
        for length in lengths:
            rows.append((str(prompt), work.prompt, length, length))
    return MeasuredSpeed(
        device=machine["gpu"] if kind == "gpu" else kind,
        dtype=work.dtype,
        blocks=_rounded(shape.parameters - shape.outside),
        update=_rounded(3 * forward_flops(shape, rows) / seconds["update"]),
        rollout=_rounded(sampling_flops(shape, rows) / seconds["rollout"]),
        date=machine["date"],
        commit=machine["commit"],
    )


def _rounded(number: float) -> float:
    return float(f"{number:.2g}")


def measured(results: Path = _machine.RESULTS) -> list[MeasuredSpeed]:
    """The newest row of every device, type and size."""
    newest: dict[tuple[str, str, float], MeasuredSpeed] = {}
    for file in sorted(results.glob("*.json")):
        for name, result in json.loads(file.read_text(encoding="utf-8")).items():
            work = result.get("workload", {})
            plain = work.get("model") is None and work.get("family") in FAMILIES
            usual = work.get("dead") == 0.0 and work.get("threads") == 1 and work.get("microbatch") is None
            if not name.startswith("vs_trl") or work.get("objective") != "grpo" or not plain or not usual:
                continue
            row = row_of(file.stem, result)
            key = (row.device, row.dtype, row.blocks)
            if key not in newest or (newest[key].date, newest[key].update) < (row.date, row.update):
                newest[key] = row
    return sorted(newest.values(), key=lambda row: (row.device, row.dtype, row.blocks))


if __name__ == "__main__":
    for one in measured():
        texts, numbers = (one.device, one.dtype), (one.blocks, one.update, one.rollout)
        words = [json.dumps(text) for text in texts] + [f"{number:.1e}".replace("e+", "e") for number in numbers]
        print(f'    MeasuredSpeed({", ".join(words)}, "{one.date}", "{one.commit}"),')
