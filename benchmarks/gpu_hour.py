"""What a GPU is to show, within 45 minutes of one card: every check and figure that no CPU can give, and a page of them.

    python benchmarks/gpu_hour.py --vllm-python path/to/vllm-env/bin/python
    python benchmarks/gpu_hour.py --rehearse        # the same commands on a CPU at shape S, in minutes

Parts run one after the other, the most important first; each is a process with a time limit.  What fails or runs out of time stands
in the page with the end of its output, and the others go on.  Results lie in benchmarks/results/gpu.json, the page beside it.  The
model for the learning curve has to be there before: `groupwise get smollm2`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _machine import RESULTS, describe

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """One command, the minutes that it may take, and what its output shows."""

    title: str
    command: tuple[str, ...]
    minutes: float


def parts(shape: str, device: str, vllm_python: str | None, scratch: str) -> list[Part]:
    """The parts in the order in which they matter.   shape: of `_workload.SHAPES`."""
    python = sys.executable

    def script(name: str, *options: str) -> tuple[str, ...]:
        return (python, str(ROOT / "benchmarks" / f"{name}.py"), *options)

    common = ("--shape", shape, "--device", device)
    train = (python, "-m", "groupwise", "train", str(ROOT / "recipes/smollm2-sums.yaml"), f"runs={scratch}", "name=curve")
    steps = ("steps=30",) if device == "cuda" else ("steps=1", "eval.prompts=4", "eval.k=1", "group.prompts_per_step=2")
    engines = ("--vllm-python", vllm_python) if vllm_python else ()
    return [
        Part("Tests that need a GPU", (python, "-m", "pytest", "-q", "-m", "gpu", "tests"), 6),
        Part("Proof: the model on its device, in its types", script("proof", "--only", "S" if device == "cpu" else "135M"), 4),
        Part("Update and decoding as shares of what the card can do", script("limits", *common, "--dtype", "bfloat16"), 8),
        Part("A step against TRL on the same work", script("vs_trl", *common, "--dtype", "bfloat16", "--pairs", "5"), 8),
        Part("Generated tokens a second: native, generate, vLLM", script("vs_engines", *common, *engines, "--rounds", "3"), 8),
        Part("Where a step's time goes", script("profiling", *common, "--dtype", "bfloat16"), 3),
        Part("SmolLM2 learns sums: memory plan, mismatch, curve", (*train, *steps, f"model.device={device}"), 8),
    ]


def run(part: Part) -> dict[str, object]:
    """Exit status, seconds and the last lines of a part's output."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            part.command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60 * part.minutes,
            check=False,
        )
        status, output = str(done.returncode), done.stdout
    except subprocess.TimeoutExpired as error:
        status, output = f"stopped after {part.minutes:g} minutes", (error.stdout or b"").decode(errors="replace")
    return {"status": status, "seconds": round(time.monotonic() - start), "output": output.splitlines()[-30:]}


def page(results: dict[str, dict[str, object]], machine: dict[str, object]) -> str:
    """The results as Markdown."""
    lines = [f"# One hour of {machine.get('gpu', machine['cpu'])}", "", f"{machine['date']}, commit {machine['commit']}.", ""]
    for title, result in results.items():
        output = [str(line) for line in result["output"]]  # type: ignore[attr-defined]
        lines += [f"## {title}", "", f"Status {result['status']}, {result['seconds']} s.", "", "```text", *output, "```", ""]
    return "\n".join(lines)


def main() -> None:
    """Run the parts and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU at shape S")
    parser.add_argument("--shape", default="0.5B", help="of benchmarks/_workload.py (default: 0.5B)")
    parser.add_argument("--vllm-python", help="the python of an environment with vLLM")
    options = parser.parse_args()
    device, shape = ("cpu", "S") if options.rehearse else ("cuda", options.shape)
    os.environ["HF_HUB_OFFLINE"] = "1"
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(prefix="groupwise-gpu-") as scratch:
        for part in parts(shape, device, options.vllm_python, scratch):
            print(f"{part.title} ...", flush=True)
            results[part.title] = run(part)
            print(f"  status {results[part.title]['status']}, {results[part.title]['seconds']} s", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="groupwise-rehearsal-")) if options.rehearse else RESULTS
    (folder / "gpu_hour.md").write_text(page(results, describe(device)), encoding="utf-8")
    print(f"written: {folder / 'gpu_hour.md'}")
    failed = [title for title, result in results.items() if result["status"] not in ("0", "5")]  # pytest: 5 is no test collected
    print(json.dumps({"failed": failed}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
