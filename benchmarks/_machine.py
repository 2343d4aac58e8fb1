"""The machine under a benchmark: its description, clocks, peak memory, and where results go."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16")


def describe(device: str = "cpu") -> dict[str, Any]:
    """Processor, memory, load and versions; the GPU, if that is the device."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "cpu": platform.processor() or platform.machine(),
        "load_1min": round(os.getloadavg()[0], 2),
    }
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in lines.items()}
        found["cpu"] = fields.get("model name", found["cpu"])
        found["family"] = f"{fields.get('vendor_id')} {fields.get('cpu family')}"
        flags = fields.get("flags", "").split()
        found["features"] = [flag for flag in FEATURES if flag in flags]
    if hasattr(os, "sysconf"):
        found["memory_gb"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    if device != "cpu":
        import torch

        found["gpu"] = torch.cuda.get_device_name()
    for package in ("torch", "transformers", "trl", "vllm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {"commit": _commit()}


def _commit() -> str | None:
    """The commit that is checked out; None where only its files are, or no git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def kind_of(machine: dict[str, Any], device: str) -> str:
    """The kind of a machine: with and without matrix tiles, or long vectors, results say little about each other."""
    if device != "cpu":
        return "gpu"
    features = machine.get("features", ())
    if "avx512f" in features and machine.get("family") == "AuthenticAMD 25":
        return "zen4"  # which computes vectors of 512 bits in halves
    return "amx" if "amx_bf16" in features else "avx512" if "avx512f" in features else "avx2" if "avx2" in features else "other"


def save(name: str, content: dict[str, Any], *, results: Path = RESULTS) -> Path:
    """Write a result with the machine's description into the file of its kind, over an older one of that name."""
    device = content.get("workload", {}).get("device", "cpu")
    machine = describe(device)
    path = results / f"{kind_of(machine, device)}.json"
    held = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    held[name] = {"machine": machine, **content}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(held.items())), indent=1) + "\n", encoding="utf-8")
    return path


class Meter:
    """Adds up wall and processor seconds by phase.  Processor seconds count all threads of the process.

    Phases on a GPU end when it has done what it was given; there the processor's seconds say nothing.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        synchronize(self.device)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            synchronize(self.device)
            self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - wall
            self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - cpu

    def read(self) -> dict[str, dict[str, float]]:
        """What was counted since the last call, and start again."""
        found = {"wall": self.wall, "cpu": self.cpu}
        self.wall, self.cpu = {}, {}
        return found


def synchronize(device: str) -> None:
    """Wait until a GPU has finished what it was given; nothing on a CPU."""
    if device != "cpu":
        import torch  # not before `_in_process.ours` has said with how many threads

        torch.cuda.synchronize()


class Peak:
    """Peak of resident memory above what was resident at the start, in bytes (Linux); of a GPU's, what is allocated there."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        if device != "cpu":
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
            return
        # Sets the high-water mark back to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        self.base = _status("VmRSS")

    def above(self) -> int:
        """Bytes."""
        if self.device != "cpu":
            import torch

            return torch.cuda.max_memory_allocated() - self.base
        return _status("VmHWM") - self.base


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def median(values: Sequence[float]) -> float:
    """Median, rounded to four significant digits."""
    return significant(statistics.median(values))


def significant(value: float) -> float:
    """Four significant digits.

    >>> significant(3.14159)
    3.142
    """
    return float(f"{value:.4g}")
