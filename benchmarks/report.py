"""docs/performance.md from benchmarks/results/*.json: nothing on that page is typed in.

python benchmarks/report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md"

INTRO = """\
# Performance

Made by `python benchmarks/report.py` from `benchmarks/results/`; each row was written by `benchmarks/vs_trl.py`, which runs Groupwise
and TRL 1.16's own trainer in turn (A B A B), on the same model file, prompts and completion lengths, after both gave the same
log-probs and gradients for the same completions. A ratio is TRL's median over ours: 3 means three times as fast, or a third of the
memory. `wall` is elapsed time, `cpu` processor time of all threads: on a machine that does other things at the same time the
steadier of the two. `load` is the machine's load when the run began; above the number of cores the figures are rough.
"""


def row(found: dict[str, Any]) -> str:
    """One result as a line of the table."""
    work, machine = found["workload"], found["machine"]
    wall, cpu = found["ratios"], found["cpu_ratios"]

    def pair(name: str) -> str:
        return f"{wall[name]:.2f} / {cpu[name]:.2f}" if name in wall and name in cpu else ""

    shape = f"{work['family']} {work['hidden']} x {work['layers']}, vocabulary {work['vocab']:,}"
    step = f"{work['prompts']} x {work['group']}, prompt {work['prompt']}, completion {work['completion']} ({work['lengths']})"
    cells = [
        work["objective"], shape, step, work["dtype"], f"{work['beta']:g}", f"{work['dead']:g}", str(work["threads"]),
        pair("step"), pair("rollout"), pair("update"), f"{wall['memory']:.2f}" if wall.get("memory") else "",
        f"{found['pairs']}", f"{machine['load_1min']:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def page() -> str:
    """The whole page."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("vs_trl_*.json"))]
    machines = sorted(
        {f"{m['cpu']}, {m['cpus']} cores, torch {m['torch']}, TRL {m['trl']}, {m['date']}" for m in (r["machine"] for r in results)}
    )
    head = (
        "| objective | model | a step | type | beta | dead | threads | step wall / cpu | rollout | update | memory | pairs | load |"
    )
    lines = [INTRO, *(f"Machine: {machine}." for machine in machines), "", head, "|" + "---|" * 13, *map(row, results), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(page())
