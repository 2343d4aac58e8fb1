"""The viewer over 640,000 completions: time to the first view, time of every page, memory.

    python benchmarks/viewer.py [--steps 10000] [--folder DIR]

Makes the run once (60 KB a step; `--folder` keeps it), serves it in a process of its own, and asks as a browser does: first
the pages of the first view, then pages of random steps while the index is being read, then again with the whole index.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRST_VIEW = ("/", "/api/runs", "/api/step?run=0&kind=training", "/api/curves?run=0&names=reward,entropy", "/api/health?run=0")


def make(folder: Path, steps: int) -> Path:
    """The run of the tests' generator."""
    path = Path(__file__).parents[1] / "tests/viewer/synthetic.py"
    spec = importlib.util.spec_from_file_location("synthetic", path)
    assert spec is not None
    assert spec.loader is not None
    synthetic = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(synthetic)
    return folder / "large" if (folder / "large/done.json").exists() else synthetic.make_large(folder / "large", steps)


class Asker:
    """Asks a server and keeps how long it took."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.seconds: dict[str, list[float]] = {}

    def ask(self, path: str) -> bytes:
        """One page; its time is kept under its name."""
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("GET", path, headers={"Accept-Encoding": "identity"})
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (path, body[:200])
        self.seconds.setdefault(path.split("?")[0], []).append(time.perf_counter() - began)
        return body

    def table(self, title: str) -> None:
        """Median and worst of every page, milliseconds."""
        print(f"{title}\n  {'page':<16}{'median ms':>10}{'worst ms':>10}")
        for name, seconds in self.seconds.items():
            print(f"  {name:<16}{1000 * sorted(seconds)[len(seconds) // 2]:>10.0f}{1000 * max(seconds):>10.0f}")
        self.seconds.clear()


def sweep(asker: Asker, steps: int, times: int) -> None:
    """Pages of random steps."""
    chance = random.Random(0)
    for _ in range(times):
        step = chance.randint(1, steps)
        group = json.loads(asker.ask(f"/api/group?run=0&step={step}&group={step % 8}"))
        for page in (
            f"step?run=0&step={step}",
            f"visits?run=0&key={group['key']}",
            f"search?run=0&text=carry%2042&cursor={step}",
            f"search?run=0&text=nowhere&cursor={step}",
            f"lenses?run=0&first={max(1, step - 9)}&last={step}",
            "curves?run=0&names=reward,entropy",
            "pulse",
        ):
            asker.ask("/api/" + page)


def resident(pid: int) -> int:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--times", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = make(given.folder or Path(temporary), given.steps)
        command = [sys.executable, "-m", "groupwise", "view", str(run), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            asker = Asker(int(process.stdout.readline().split()[0].rsplit(":", 1)[1].strip("/")))
            began = time.perf_counter()
            for page in FIRST_VIEW:
                asker.ask(page)
            print(
                f"{given.steps * 64:,} completions: first view in {time.perf_counter() - began:.2f} s, {resident(process.pid)} MiB"
            )
            asker.seconds.clear()
            sweep(asker, given.steps, given.times)
            asker.table("while the index is read")
            while json.loads(asker.ask("/api/pulse"))["runs"][0]["read"] < given.steps:
                time.sleep(1)
            print(f"indexed after {time.perf_counter() - began:.0f} s, {resident(process.pid)} MiB")
            asker.seconds.clear()
            sweep(asker, given.steps, given.times)
            asker.table("with the whole index")
            print(f"{resident(process.pid)} MiB")
            process.terminate()


if __name__ == "__main__":
    main()
