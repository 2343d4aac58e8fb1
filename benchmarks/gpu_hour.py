"""What a GPU is to show, in calls of less than ten minutes each: every check and figure that no CPU can give.

    python benchmarks/gpu_hour.py host --out results        # host or device? probes, phases of a step, memory
    python benchmarks/gpu_hour.py update --out results      # 0.5B, 1.7B, 4B; full and LoRA; 4k to 16k positions; MFU
    python benchmarks/gpu_hour.py decode --out results      # milliseconds a token by rows
    python benchmarks/gpu_hour.py compare --out results     # tests, ceilings, TRL, other engines
    python benchmarks/gpu_hour.py all --tiny --out results  # the same on a CPU with a tiny model, in a minute

Each call writes CALL.json and CALL.md into the folder after every measurement, so that a call that is ended keeps what it has; with
`--resume` it measures only what is missing there.  Measurements stand in the order in which they matter; those that no time is left
for are left out by name.  One that fails says where, and the others go on: an error that leaves the process without its GPU lets it
begin anew behind what has failed.  Predictions stand beside what they predict.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
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

    @property
    def spent(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.begin

    def read(self) -> None:
        """Take what an earlier call has measured."""
        path = self.out / f"{self.name}.json"
        if path.is_file():
            earlier = json.loads(path.read_text(encoding="utf-8"))["results"]
            self.results = {title: result for title, result in earlier.items() if not _has(result, "left out")}

    def measure(self, title: str, run: Callable[[], Any]) -> None:
        """Run one measurement, unless it is there or no time is left.  What fails stands in its place, and the others go on."""
        if title in self.results:
            return
        if self.spent > 60 * self.minutes:
            self.results[title] = {"left out": f"{self.spent:.0f} s are spent"}
        else:
            try:
                self.results[title] = run()
            except Exception as error:  # whatever a card refuses is a result
                where = traceback.format_exc()[-2000:].splitlines()
                self.results[title] = {"failed": f"{type(error).__name__}: {error}"[:2000], "where": where}
        print(f"{title}: {json.dumps(_short(self.results[title]))}", flush=True)
        if title in PREDICTED:
            print(f"  predicted: {PREDICTED[title]}", flush=True)
        self.write()
        if _has(self.results[title], "failed") and self.device == "cuda" and lost():
            print("the GPU is lost to this process: the call begins anew", flush=True)
            begin_anew(self)

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


def lost() -> bool:
    """True if an error has taken the GPU from this process: whatever it is asked next fails too."""
    import torch

    try:
        torch.ones(1, device="cuda").item()
    except RuntimeError as error:
        return not isinstance(error, torch.OutOfMemoryError)
    return False


def begin_anew(call: Call) -> None:
    """Go on as a new process, in the time that is left, with what has not been measured."""
    left = max(0.0, call.minutes - call.spent / 60)
    command = [sys.executable, __file__, call.name, "--out", str(call.out), "--minutes", f"{left:.2f}", "--resume"]
    if call.vllm_python is not None:
        command += ["--vllm-python", call.vllm_python]
    os.execv(command[0], command)


def _has(result: Any, key: str) -> bool:
    return isinstance(result, dict) and key in result


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

    @cache
    def loaded() -> tuple[gpu.Updates, gpu.NativeEngine, dict[str, Any]]:
        memory: dict[str, Any] = {}
        with gpu.peak(call.device, memory):
            policy = gpu.random_policy(shape, call.device)
            updates = gpu.Updates(shape, policy, positions, prompt=prompt, budget=16_384, recompute=False)
        engine = gpu.NativeEngine(policy, max_rows=rows)
        engine.send_weights(0)
        return updates, engine, memory

    def phase(run: Callable[[], Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with gpu.peak(call.device, found):
            found |= gpu.watched(call.device, run)
        return found

    def step_update() -> dict[str, Any]:
        updates, _, _ = loaded()
        return phase(updates) | {"flops": updates.flops()}

    def step_rollout(count: int) -> dict[str, Any]:
        _, engine, _ = loaded()
        return phase(lambda: gpu.generate(engine.policy, engine, rows, prompt, count))

    name = "tiny step" if call.tiny else "0.5B step"
    call.measure("memory after loading", lambda: loaded()[2])
    call.measure(f"{name}, update", step_update)
    call.measure(f"{name}, rollout", lambda: step_rollout(tokens))
    call.measure(f"{name}, first tokens", lambda: step_rollout(1))


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

    def every_shape(positions: int) -> None:
        for name, shape in shapes.items():
            for kind in ("full", "LoRA"):

                def run(shape: Any = shape, adapter: bool = kind == "LoRA") -> dict[str, Any]:
                    return measured(shape, positions, adapter)

                call.measure(f"{name} {kind}, {positions} positions", run)

    smallest = next(iter(shapes))
    every_shape(sizes[0])
    for compile_ in ("off", "on"):  # small models wait for the host: here compiled blocks could pay

        def lane(compiled: bool = compile_ == "on") -> dict[str, Any]:
            return measured(shapes[smallest], sizes[-1], False, compiled)

        call.measure(f"{smallest} full, {sizes[-1]} positions, model.compile {compile_}", lane)
    for positions in sizes[1:]:
        every_shape(positions)


def decode(call: Call) -> None:
    """Milliseconds a token by rows, with and without an adapter."""
    import _gpu_calls as gpu

    shapes = {"tiny": gpu.TINY} if call.tiny else gpu.SHAPES
    prompt = 8 if call.tiny else 256
    few, many = (4, 6) if call.tiny else (128, 2000)

    def measured(shape: Any, rank: int, tokens: int, several: Sequence[int], top_k: int = 0) -> None:
        """Measure one model with several numbers of rows."""
        name = next(name for name, one in shapes.items() if one is shape)
        label = f"{name} LoRA" if rank else name

        @cache
        def policy() -> Any:
            return gpu.random_policy(shape, call.device, rank=rank, dtype="bfloat16")

        for rows in several:

            def run(rows: int = rows) -> dict[str, Any]:
                found: dict[str, Any] = {}
                with gpu.peak(call.device, found):
                    found |= gpu.decoded(call.device, policy(), rows, prompt=prompt, tokens=tokens, top_k=top_k)
                return found

            title = f"{label}, {rows} rows"
            title += f", {many} tokens" if tokens == many else ""
            title += f", top_k {top_k}" if top_k else ""
            call.measure(title, run)

    for tokens, several in ((few, (8, 16) if call.tiny else (64, 1, 8, 256)), (many, (8,) if call.tiny else (64,))):
        for shape in shapes.values():
            for rank in (0, 16):
                measured(shape, rank, tokens, several)
    smallest = next(iter(shapes.values()))
    measured(smallest, 0, few, (8,) if call.tiny else (64,), top_k=50)


TESTS = 3.0
"""Minutes of `compare` in which tests run."""


def tests_that_need_a_gpu(tiny: bool) -> list[Path]:
    """The files of these tests: each runs in a process of its own, which an error that takes the GPU ends alone."""
    if tiny:
        return [ROOT / "tests/ops/test_varlen_attention.py"]
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


def commands(call: Call) -> Iterator[tuple[str, list[str], float]]:
    """The commands of `compare` with their minutes: their sum is less than ten."""
    shape, dtype = ("S", "float32") if call.tiny else ("0.5B", "bfloat16")
    common = ["--shape", shape, "--device", call.device, "--dtype", dtype]

    def script(name: str, *options: str) -> list[str]:
        return [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options]

    for file in tests_that_need_a_gpu(call.tiny):
        left = TESTS - call.spent / 60
        yield f"tests of {file.stem}", [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(file)], left
    if call.tiny:
        return
    engines = ["--vllm-python", call.vllm_python] if call.vllm_python else []
    yield "a step against TRL", script("vs_trl", *common, "--completion", "256", "--pairs", "3"), 3.0
    yield "generated tokens a second", script("vs_engines", *common, "--completion", "256", "--rounds", "2", *engines), 3.0


def compare(call: Call) -> None:
    """Run the tests and the comparisons, each in a process with a limit of time; all that they print is in `compare.txt`."""
    call.out.mkdir(parents=True, exist_ok=True)

    def run(command: list[str], minutes: float) -> dict[str, Any]:
        if minutes <= 0:
            return {"left out": f"tests have {TESTS:g} minutes"}
        begin = time.monotonic()
        with (call.out / "compare.txt").open("a+", encoding="utf-8", errors="replace") as printed:
            before = printed.tell()
            status = ended(command, minutes, printed)
            printed.seek(before)
            lines = printed.read().splitlines()
        found: dict[str, Any] = {"seconds": round(time.monotonic() - begin), "output": lines[-30:]}
        return found if status == "0" else {"failed": status, **found}

    for title, command, minutes in commands(call):
        call.measure(title, lambda command=command, minutes=minutes: run(command, minutes))


def ended(command: Sequence[str], minutes: float, printed: Any) -> str:
    """Run a command to its end -> its exit status.  After so many minutes it is killed, with the processes that it has started."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT, process_group=0)
    try:
        return str(process.wait(60 * minutes))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"stopped after {minutes:.1f} minutes"


CALLS: dict[str, Callable[[Call], None]] = {"host": host, "update": update, "decode": decode, "compare": compare}


def main() -> None:
    """Make one call, or all of them one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=[*CALLS, "all"])
    parser.add_argument("--out", type=Path, required=True, help="the folder that results are written to")
    parser.add_argument("--tiny", action="store_true", help="on a CPU with a tiny model, to try the calls")
    parser.add_argument("--minutes", type=float, default=8.0, help="no measurement of a call begins later (default: 8)")
    parser.add_argument("--resume", action="store_true", help="measure only what is missing in the folder")
    parser.add_argument("--vllm-python", help="the python of an environment with vLLM")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    device = "cpu" if options.tiny else "cuda"
    failed = []
    for name in CALLS if options.call == "all" else [options.call]:
        call = Call(name, options.out, device, options.tiny, options.minutes, options.vllm_python)
        if options.resume:
            call.read()
        CALLS[name](call)
        failed += [f"{name}: {title}" for title, result in call.results.items() if _has(result, "failed")]
    print(json.dumps({"failed": failed}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
