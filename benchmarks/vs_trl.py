"""Groupwise against TRL's trainers on the same work: seconds by phase, peak memory, and first of all the same result.

Both sides load the same model file, see the same prompts and draw completions of the same scheduled lengths; each runs in a
process of its own and takes its steps in turn with the other (A B A B), so that whatever else the machine does falls on both.
Before anything is timed, our side computes log-probs and gradients for the completions that TRL drew, and they must agree.

    python benchmarks/vs_trl.py --shape M --dtype bfloat16
    python benchmarks/vs_trl.py --shape S --vocab 131072 --pairs 5
    python benchmarks/vs_trl.py --objective sft --shape M
    python benchmarks/vs_trl.py --objective distill --shape M   # a step against `DistillationTrainer`
    python benchmarks/vs_trl.py --shape P   # prompts with pictures, by a Qwen3-VL
    python benchmarks/vs_trl.py --model ~/.cache/groupwise/models/smollm2   # real weights, asked for sums
    python benchmarks/vs_trl.py --grid            # every row of benchmarks/figures.md
    python benchmarks/vs_trl.py --shape 0.5B      # on a GPU; --grid --device cuda: every row of a GPU

A ratio is TRL's median over ours: 3 means three times as fast, or a third of the memory.  `rollout` counts generation, decoding
and rewards; `update` the forward and backward passes and the optimizer.  Processor seconds (all threads) are given beside wall
seconds: on a machine that does other things at the same time they are the steadier figure.  The last line is one JSON object.
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
from _side import Side
from _workload import ROWS, SHAPES, Workload, add_options, model_folder, workload

TOLERANCE = {"float32": {"gradient_relative": 2e-5, "logp_largest": 2e-5, "loss_difference": 2e-5}}
"""Largest differences from TRL; bfloat16 rounds products to three digits on both sides, each in its own order."""
TOLERANCE["bfloat16"] = {"gradient_relative": 0.1, "logp_largest": 0.1, "loss_difference": 0.05}
REAL = 5
"""As many times that for real weights: rounding grows with activations, which are larger than those of random weights."""
PHASES = ("step", "rollout", "reference", "update")


def start(name: str, work: Workload, folder: Path, scratch: Path) -> Side:
    """Start the process of a side, and wait until it is ready."""
    side = Side(name, _serve, name, work, folder, scratch)
    assert side.receive() == "ready"
    return side


def _serve(connection: Any, name: str, work: Workload, folder: Path, scratch: Path) -> None:
    if name == "trl":
        from _trl import serve
    else:
        from _ours import serve
    serve(connection, work, folder, scratch)


def compare(work: Workload, pairs: int, scratch: Path) -> dict[str, Any]:
    """Check, warm up, then `pairs` steps of each side in turn."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(work.threads)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with several TRL's trainer would spread its batch over all
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    folder = model_folder(work, scratch)
    trl, ours = start("trl", work, folder, scratch), start("groupwise", work, folder, scratch)
    found = trl.ask("check")
    checked = ours.ask(found)
    limits = TOLERANCE["bfloat16" if work.trl_defaults else work.dtype]
    if work.model is not None:
        limits = {name: REAL * limit for name, limit in limits.items()}
    wrong = {name: value for name, value in checked.items() if not value <= limits.get(name, float("inf"))}
    if wrong:
        raise SystemExit(f"the two sides do not compute the same: {wrong} (allowed {limits})")
    trl.ask("step")
    ours.ask("step")
    runs: dict[str, list[dict[str, Any]]] = {"trl": [], "groupwise": []}
    for _ in range(pairs):
        runs["trl"].append(trl.ask("step"))
        runs["groupwise"].append(ours.ask("step"))
    trl.end()
    ours.end()
    return {"workload": asdict(work), "pairs": pairs, "check": checked, **summary(runs)}


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of each side, and ratios of medians."""
    sides: dict[str, Any] = {}
    for name, steps in runs.items():
        sides[name] = {
            clock: {phase: median([step[clock].get(phase, 0.0) for step in steps]) for phase in PHASES} for clock in ("wall", "cpu")
        }
        if "tower" in steps[0]:
            sides[name]["tower"] = median([step["tower"] for step in steps])
        sides[name]["peak_mb"] = significant(max(step["peak"] for step in steps) / 1e6)
    ratios = {
        clock: {
            phase: significant(sides["trl"][clock][phase] / sides["groupwise"][clock][phase])
            for phase in PHASES
            if sides["groupwise"][clock][phase] > 0 and sides["trl"][clock][phase] > 0
        }
        for clock in ("wall", "cpu")
    }
    memory = significant(sides["trl"]["peak_mb"] / sides["groupwise"]["peak_mb"])
    return {**sides, "ratios": ratios["wall"] | {"memory": memory}, "cpu_ratios": ratios["cpu"]}


def grid(device: str = "cpu") -> dict[str, Workload]:
    """The rows of benchmarks/figures.md, by name."""
    rows: dict[str, Workload] = {}
    for shape, base in ((name, one) for name, one in SHAPES.items() if one.device == device):
        rows[f"{shape} float32"] = replace(base, dtype="float32")
        rows[f"{shape} bfloat16"] = replace(base, dtype="bfloat16")
        rows[f"{shape} {base.dtype} half dead"] = replace(base, dead=0.5)
        rows[f"{shape} {base.dtype} checkpointing"] = replace(base, checkpointing=True)
    if device != "cpu":
        return rows
    for shape in ("S", "M"):
        # The second: every prompt once, so that there is nothing to share.
        rows[f"{shape} float32 distill"] = base = replace(SHAPES[shape], objective="distill")
        rows[f"{shape} float32 distill alone"] = replace(base, prompts=base.prompts * base.group, group=1)
    rows["S float32 vocabulary 131,072"] = replace(SHAPES["S"], vocab=131072)
    for shape in ("S", "M"):
        for dtype in ("float32", "bfloat16"):
            for objective, group in (("sft", 1), ("reward", 2)):
                base = replace(SHAPES[shape], objective=objective, dtype=dtype, prompts=ROWS, group=group)
                rows[f"{shape} {dtype} {objective}"] = base
    return rows


def name_of(work: Workload) -> str:
    """The name under which a workload's result is kept."""
    shape = next((name for name, base in grid(work.device).items() if replace(base, threads=work.threads) == work), None)
    if shape is None:
        default = Workload()
        if work.model is not None:
            work = replace(default, model=Path(work.model).name, dtype=work.dtype, objective=work.objective, threads=work.threads)
        changed = [f"{key}={value}" for key, value in asdict(work).items() if value != getattr(default, key)]
        shape = " ".join(changed)
    return f"vs_trl {shape} threads {work.threads}".replace(" ", "_").replace(",", "").replace("=", "-")


def show(title: str, result: dict[str, Any]) -> None:
    """A few lines for people."""
    print(f"\n{title}")
    print("  check    " + "  ".join(f"{name} {value:.2g}" for name, value in result["check"].items()))
    for clock in ("wall", "cpu"):
        for phase in PHASES:
            theirs, ours = result["trl"][clock][phase], result["groupwise"][clock][phase]
            if theirs > 0 and ours > 0:
                print(f"  {clock:5s}{phase:10s} TRL {theirs:8.3f} s   Groupwise {ours:8.3f} s   ratio {theirs / ours:5.2f}")
    if "tower" in result["trl"]:
        theirs, ours = result["trl"]["tower"], result["groupwise"]["tower"]
        print(f"  images through the encoder  TRL {theirs:.0f}  Groupwise {ours:.0f}")
    theirs, ours = result["trl"]["peak_mb"], result["groupwise"]["peak_mb"]
    print(f"  peak memory    TRL {theirs:8.0f} MB  Groupwise {ours:8.0f} MB  ratio {theirs / ours:5.2f}", flush=True)


def main() -> None:
    """Run one workload, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--pairs", type=int, default=5, help="steps of each side (default: 5)")
    parser.add_argument("--grid", action="store_true", help="every row of benchmarks/figures.md")
    options = parser.parse_args()
    # A step of the grid's large shapes takes TRL most of a minute: `--grid` alone is an hour's work on one thread.
    rows = grid(options.device or "cpu") if options.grid else {"": workload(options)}
    if options.grid and options.threads:
        rows = {name: replace(work, threads=options.threads) for name, work in rows.items()}
    last: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="groupwise-bench-") as scratch:
        for work in rows.values():
            result = compare(work, options.pairs, Path(scratch))
            name = name_of(work)
            save(name, result)
            show(name, result)
            last[name] = {"ratios": result["ratios"], "cpu_ratios": result["cpu_ratios"]}
    print(json.dumps(last if options.grid else next(iter(last.values()))))


if __name__ == "__main__":
    main()
