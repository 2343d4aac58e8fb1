"""What a GPU is to show, in calls of less than ten minutes each: every check and figure that no CPU can give.

    python benchmarks/gpu_hour.py host --out results        # host or device? probes, phases of a step, memory
    python benchmarks/gpu_hour.py update --out results      # 0.5B, 1.7B, 4B; full and LoRA; 4k to 16k positions; MFU
    python benchmarks/gpu_hour.py decode --out results      # milliseconds a token by rows
    python benchmarks/gpu_hour.py compare --out results     # tests, ceilings, TRL, other engines
    python benchmarks/gpu_hour.py all --tiny --out results  # the same on a CPU with a tiny model, in a minute

Each call writes CALL.json and CALL.md into the folder after every measurement, so that a call that is ended keeps what it has.
Measurements stand in the order in which they matter; those that no time is left for are left out by name.  Predictions stand beside
what they predict.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from _machine import describe

ROOT = Path(__file__).parents[1]
PREDICTED: dict[str, str] = {
    "0.5B step, update": "kernels 0.17 to 0.22 s before the changes; wall 0.20 s with one micro-batch and flash attention",
    "0.5B step, rollout": "954 kernels a token at 4 us each: 3.9 ms a token where decoding is torch's own kernels",
    "0.5B full, 16384 positions": "232 ms of kernels, MFU 20 %; 115 ms and 40 % with fused kernels",
    "0.5B full, 4096 positions, model.compile on": "host 30 to 40 ms a pass, where fused blocks take 90; compiling 30 to 60 s",
    "1.7B full, 16384 positions": "561 ms of kernels, MFU 29 %; 338 ms and 49 % with fused kernels",
    "4B full, 16384 positions": "1139 ms of kernels, MFU 34 %; 783 ms and 50 % with fused kernels",
    "4B LoRA, 16384 positions": "850 ms of kernels, MFU 31 %; 540 ms and 48 % with fused kernels",
    "0.5B, 64 rows": "3.9 ms a token; floor by bytes 0.28 ms; at most 1.8 ms are 75 % of vLLM (arithmetic)",
    "4B LoRA, 64 rows": "65 ms a token where the adapter is not merged; 6.4 ms merged and recorded",
}
"""Arithmetic for an H200, made before anything was measured."""
PUBLISHED = "prime-rl's own baseline of 0.6B: 11 % of the matrix peak"


@dataclass
class Call:
    """The results of one call, which are written whenever one comes."""

    name: str
    out: Path
    device: str
    tiny: bool
    minutes: float
    vllm_python: str | None = None
    results: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    def measure(self, title: str, run: Callable[[], Any]) -> None:
        """Run one measurement, unless no time is left.  What fails stands in its place, and the others go on."""
        spent = time.monotonic() - self.begin
        if spent > 60 * self.minutes:
            self.results[title] = {"left out": f"{spent:.0f} s are spent"}
        else:
            try:
                self.results[title] = run()
            except Exception as error:  # whatever a card refuses is a result
                self.results[title] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        print(f"{title}: {json.dumps(_short(self.results[title]))}", flush=True)
        if title in PREDICTED:
            print(f"  predicted: {PREDICTED[title]}", flush=True)
        self.write()

    def write(self) -> None:
        """Write the results and a page of them."""
        self.out.mkdir(parents=True, exist_ok=True)
        content = {"machine": describe(self.device), "tiny": self.tiny, "results": self.results}
        (self.out / f"{self.name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        lines = [f"# {self.name}", ""]
        for title, result in self.results.items():
            lines += [f"## {title}", "", "```json", json.dumps(_short(result), indent=1), "```", ""]
            if title in PREDICTED:
                lines += [f"Predicted: {PREDICTED[title]}.", ""]
        (self.out / f"{self.name}.md").write_text("\n".join(lines), encoding="utf-8")


def _short(result: Any) -> Any:
    """The same with numbers of four digits, without the lists of kernels."""
    if isinstance(result, dict):
        return {name: _short(value) for name, value in result.items() if name != "longest"}
    return float(f"{result:.4g}") if isinstance(result, float) else result


def host(call: Call) -> None:
    """Host or device: probes, then the phases of one step, with launches, waits, allocations and memory."""
    import _gpu_calls as gpu

    for name, probe in gpu.probes(call.device).items():
        call.measure(name, probe)
    shape, positions, rows = (gpu.TINY, 256, 8) if call.tiny else (gpu.SHAPES["0.5B"], 10_462, 64)
    prompt, tokens = (16, 8) if call.tiny else (256, 256)
    memory: dict[str, Any] = {}
    with gpu.peak(call.device, memory):
        policy = gpu.random_policy(shape, call.device)
        updates = gpu.Updates(shape, policy, positions, prompt=prompt, budget=16_384, recompute=False)
    call.measure("memory after loading", lambda: memory)
    engine = gpu.NativeEngine(policy, max_rows=rows)
    engine.send_weights(0)

    def phase(run: Callable[[], Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with gpu.peak(call.device, found):
            found |= gpu.watched(call.device, run)
        return found

    name = "tiny step" if call.tiny else "0.5B step"
    call.measure(f"{name}, update", lambda: phase(updates) | {"flops": updates.flops()})
    call.measure(f"{name}, rollout", lambda: phase(lambda: gpu.generate(policy, engine, rows, prompt, tokens)))
    call.measure(f"{name}, first tokens", lambda: phase(lambda: gpu.generate(policy, engine, rows, prompt, 1)))


def update(call: Call) -> None:
    """Updates: seconds, MFU and memory by shape, positions and what is trained."""
    import _gpu_calls as gpu

    shapes = {"tiny": gpu.TINY} if call.tiny else gpu.SHAPES
    sizes = (128, 256) if call.tiny else (16_384, 10_240, 8192, 4096)
    print(PUBLISHED)

    def measured(shape: Any, positions: int, adapter: bool, compiled: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {}
        large = shape.body > 3e9
        with gpu.peak(call.device, found):
            policy = gpu.random_policy(shape, call.device, rank=16 if adapter else 0, dtype="bfloat16" if adapter else "autocast")
            if compiled:
                policy = gpu.with_compiled_blocks(policy)
            updates = gpu.Updates(
                shape, policy, positions, prompt=16 if call.tiny else 256, budget=16_384, recompute=large and not adapter
            )
            seconds = median(gpu.walls(call.device, updates, 1 if call.tiny else 5))
        return found | {"seconds": seconds, "mfu": updates.flops() / seconds / gpu.PEAK, "published": PUBLISHED}

    smallest = next(iter(shapes))
    for compile_ in ("off", "on"):  # small models wait for the host: here compiled blocks could pay

        def lane(compiled: bool = compile_ == "on") -> dict[str, Any]:
            return measured(shapes[smallest], sizes[-1], False, compiled)

        call.measure(f"{smallest} full, {sizes[-1]} positions, model.compile {compile_}", lane)
    for positions in sizes:
        for name, shape in shapes.items():
            for kind in ("full", "LoRA"):

                def run(shape: Any = shape, positions: int = positions, adapter: bool = kind == "LoRA") -> dict[str, Any]:
                    return measured(shape, positions, adapter)

                call.measure(f"{name} {kind}, {positions} positions", run)


def decode(call: Call) -> None:
    """Milliseconds a token by rows, with and without an adapter."""
    import _gpu_calls as gpu

    shapes = {"tiny": gpu.TINY} if call.tiny else gpu.SHAPES
    tokens, prompt = (4, 8) if call.tiny else (128, 256)
    for name, shape in shapes.items():
        for rank in (0, 16):
            policy = gpu.random_policy(shape, call.device, rank=rank, dtype="bfloat16")
            label = f"{name} LoRA" if rank else name
            lengths = (
                [(8, tokens), (16, tokens)] if call.tiny else [(64, tokens), (1, tokens), (8, tokens), (256, tokens), (64, 2000)]
            )
            for rows, own in lengths:

                def run(policy: Any = policy, rows: int = rows, own: int = own) -> dict[str, Any]:
                    found: dict[str, Any] = {}
                    with gpu.peak(call.device, found):
                        found |= gpu.decoded(call.device, policy, rows, prompt=prompt, tokens=own)
                    return found

                call.measure(f"{label}, {rows} rows" + (", 2000 tokens" if own == 2000 else ""), run)


def commands(call: Call) -> Iterator[tuple[str, list[str], float]]:
    """The commands of `compare` with their minutes: their sum is less than ten."""
    shape, dtype = ("S", "float32") if call.tiny else ("0.5B", "bfloat16")
    common = ["--shape", shape, "--device", call.device, "--dtype", dtype]

    def script(name: str, *options: str) -> list[str]:
        return [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options]

    tests = ["tests/ops/test_varlen_attention.py"] if call.tiny else ["tests"]
    yield "tests that need a GPU", [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *tests], 3.0
    if call.tiny:
        return
    engines = ["--vllm-python", call.vllm_python] if call.vllm_python else []
    yield "a step against TRL", script("vs_trl", *common, "--completion", "256", "--pairs", "3"), 3.0
    yield "generated tokens a second", script("vs_engines", *common, "--completion", "256", "--rounds", "2", *engines), 3.0


def compare(call: Call) -> None:
    """Run the tests and the comparisons, each in a process with a limit of time."""

    def run(command: list[str], minutes: float) -> dict[str, Any]:
        begin = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60 * minutes, check=False
            )
            status, output = str(done.returncode), done.stdout
        except subprocess.TimeoutExpired as error:
            status, output = f"stopped after {minutes:g} minutes", (error.stdout or b"").decode(errors="replace")
        return {"status": status, "seconds": round(time.monotonic() - begin), "output": output.splitlines()[-30:]}

    for title, command, minutes in commands(call):
        call.measure(title, lambda command=command, minutes=minutes: run(command, minutes))


CALLS: dict[str, Callable[[Call], None]] = {"host": host, "update": update, "decode": decode, "compare": compare}


def main() -> None:
    """Make one call, or all of them one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=[*CALLS, "all"])
    parser.add_argument("--out", type=Path, required=True, help="the folder that results are written to")
    parser.add_argument("--tiny", action="store_true", help="on a CPU with a tiny model, to try the calls")
    parser.add_argument("--minutes", type=float, default=8.0, help="no measurement of a call begins later (default: 8)")
    parser.add_argument("--vllm-python", help="the python of an environment with vLLM")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    device = "cpu" if options.tiny else "cuda"
    failed = []
    for name in CALLS if options.call == "all" else [options.call]:
        call = Call(name, options.out, device, options.tiny, options.minutes, options.vllm_python)
        CALLS[name](call)
        failed += [f"{name}: {title}" for title, result in call.results.items() if isinstance(result, dict) and "failed" in result]
    print(json.dumps({"failed": failed}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
