"""What programs in sandboxes cost and what they leave: 10,000 programs through the reward's graders, then endless loops.

python benchmarks/sandbox.py                        # each sandbox that is installed, 10,000 programs, 64 endless loops at once
python benchmarks/sandbox.py --programs 1000 --isolation sandlock
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from _machine import describe

from groupwise.rewards.grading import Grade, Grading, LocalGrader, cores
from groupwise.rewards.program_tests import Called, Tests
from groupwise.sandbox import attacks
from groupwise.sandbox.isolation import ISOLATIONS, Isolation
from groupwise.sandbox.limits import Limits

CASES: Tests = tuple(Called("f", (n,), n * n) for n in range(4))
"""Four calls, as many as a program of a data set often has."""
LOOP = "def f(n):\n    while True:\n        pass\n"


@dataclass(frozen=True)
class Traces:
    """What this process holds: children, descriptors, threads, folders of sandboxes, megabytes."""

    children: int
    descriptors: int
    threads: int
    folders: int
    megabytes: float

    @classmethod
    def now(cls) -> Traces:
        """Look."""
        status = Path("/proc/self/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return cls(
            children=len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            folders=sum(name.startswith("groupwise-sandbox-") for name in os.listdir(tempfile.gettempdir())),
            megabytes=int(fields["VmRSS"].split()[0]) / 1024,
        )


def sandbox_megabytes() -> float:
    """Proportional memory of all processes below this one."""
    found, waiting = 0, [os.getpid()]
    while waiting:
        process = waiting.pop()
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                waiting.append(int(child))
                rollup = Path(f"/proc/{child}/smaps_rollup").read_text()
                found += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return found / 1024


def many(isolation: Isolation, count: int) -> None:
    """Grade different programs, half of them right, and print what it cost and left."""
    limits = Limits(seconds=60.0)
    before = Traces.now()
    grading = Grading([LocalGrader(isolation, limits) for _ in range(cores())], limits)
    began, passed, failed = time.monotonic(), 0, 0
    for first in range(0, count, 64):
        sources = [f"def f(n):\n    return n * n + {n % 2}  # {n}\n" for n in range(first, min(first + 64, count))]
        for grade in grading.grade([(source, CASES) for source in sources]):
            if isinstance(grade, Grade):
                passed += grade.passed == grade.cases
            else:
                failed += 1
    seconds, held = time.monotonic() - began, sandbox_megabytes()
    grading.close()
    after = Traces.now()
    print(f"{isolation.name}: {count:,} programs of {len(CASES)} calls in {seconds:.0f} s on {cores()} cores")
    print(f"  {count / seconds / cores():.0f} a second and core; right {passed:,}, sandbox failures {failed}")
    print(f"  left: children {after.children - before.children}, descriptors {after.descriptors - before.descriptors},", end=" ")
    print(f"threads {after.threads - before.threads}, folders {after.folders - before.folders},", end=" ")
    print(f"memory {after.megabytes - before.megabytes:.0f} MB; the sandboxes held {held:.0f} MB")


def loops(isolation: Isolation, count: int) -> None:
    """Grade endless loops all at once, and print how long it took and what another thread noticed."""
    limits = Limits(seconds=20.0, cpu_seconds=3.0)
    before = Traces.now()
    grading = Grading([LocalGrader(isolation, limits) for _ in range(cores())], limits)
    delays, over = [], threading.Event()

    def notice() -> None:
        while not over.is_set():
            began = time.monotonic()
            time.sleep(0.05)
            delays.append(time.monotonic() - began - 0.05)

    watch = threading.Thread(target=notice)
    watch.start()
    began = time.monotonic()
    grades = grading.grade([(f"{LOOP}# {n}", CASES) for n in range(count)])
    seconds = time.monotonic() - began
    over.set()
    watch.join()
    grading.close()
    after = Traces.now()
    paid = sum(grade.passed for grade in grades if isinstance(grade, Grade))
    unknown = sum(not isinstance(grade, Grade) for grade in grades)
    bound = count * (limits.cpu_seconds + 1.0) / cores()
    print(f"{isolation.name}: {count} endless loops in {seconds:.0f} s (bound on {cores()} quiet cores: {bound:.0f} s)")
    print(f"  cases passed {paid}, sandbox failures {unknown}; children left {after.children - before.children},", end=" ")
    print(f"folders {after.folders - before.folders}; a thread that sleeps was late by at most {max(delays):.2f} s")


def main() -> None:
    """Print both for each sandbox that starts here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--loops", type=int, default=64)
    parser.add_argument("--isolation", choices=[isolation.name for isolation in ISOLATIONS])
    options = parser.parse_args()
    machine = describe()
    print(f"{machine['cpu']}, {machine['cpus']} cores, load {machine['load_1min']}, {machine['date']}, {machine['commit']}")
    for isolation in ISOLATIONS:
        if options.isolation not in (None, isolation.name):
            continue
        verdict = attacks.prove(isolation, {})
        if verdict.why:
            print(verdict)
            continue
        many(isolation, options.programs)
        loops(isolation, options.loops)


if __name__ == "__main__":
    main()
