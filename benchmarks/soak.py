"""A run beside servers that are killed, frozen, join and leave, and a trainer and a router that are killed: nothing may be lost.

    python benchmarks/soak.py --seconds 3600 --every 60
    python benchmarks/soak.py --seconds 600 --every 20 --router vllm-router

Every few seconds one of the disturbances happens, at random.  The servers are scripted (tests/fixtures/scripted_vllm.py): they
speak vLLM's form, fetch published versions, and give the log-probs of the weights that they hold.  At the end every recorded step
is held against the data's order: all steps are there, every prompt once, every group whole, no token older than `ahead`, and what
was sampled is what is scored.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "fixtures"))

from scripted_vllm import Process, free_port  # noqa: E402 - it lies beside the tests

REWARD = "def judge(completion_ids, **_):\n    return [-sum(ids) / 60 / len(ids) for ids in completion_ids]\n"
AHEAD = 2
PROMPTS, GROUP = 4, 4
MOST_SERVERS = 3


class RunningRouter:
    """A vllm-router, which may be killed and started anew at the same address."""

    def __init__(self, command: str, urls: list[str], log: Path) -> None:
        self.port, self.prometheus, self.urls = free_port(), free_port(), urls
        self.command, self.log = command, log
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        line = [self.command, "--worker-urls", *self.urls, "--policy", "sticky_least_loaded", "--host", "127.0.0.1"]
        line += ["--port", str(self.port), "--prometheus-port", str(self.prometheus), "--worker-startup-check-interval", "1"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(line, stdout=log, stderr=log)
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/workers", timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-2000:]
                time.sleep(0.1)

    def add(self, url: str) -> None:
        """Put a server in."""
        query = urllib.parse.urlencode({"url": url})
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/add_worker?{query}", method="POST"), timeout=30).close()

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


class Soak:
    """A run, its servers, and what happens to them."""

    def __init__(self, folder: Path, *, steps: int, router: str | None = None, seed: int = 0) -> None:
        """router: the command `vllm-router`; None: the trainer reads the servers from a file."""
        self.folder, self.steps, self.random = folder, steps, random.Random(seed)
        self.named = folder / "servers.txt"
        self.happened: Counter[str] = Counter()
        (folder / "judges.py").write_text(REWARD)
        self.describe_model()
        self.servers = [self.new_server() for _ in range(2)]
        self.router: RunningRouter | None = None
        where: object = str(self.named)
        if router is not None:
            for server in self.servers:
                server.wait()
            self.router = RunningRouter(router, [server.url for server in self.servers], folder / "router.log")
            where = {"router": self.router.url}
        self.name_servers()
        self.recipe = self.write_recipe({"name": "vllm", "servers": where, "ahead": AHEAD, "patience": 120.0})
        self.trainer = self.start_trainer()

    def write_recipe(self, engine: dict[str, object]) -> Path:
        """Write the run's recipe."""
        tree = {
            "name": "run", "runs": str(self.folder / "runs"), "seed": 3, "objective": "grpo", "steps": self.steps,
            "model": {"scratch": {"hidden": 64, "layers": 2, "heads": 2, "context": 96, "tokenizer": "arithmetic"}},
            "data": {"task": "addition", "limit": 4096, "eval_limit": 4}, "rewards": [{"function": "judges.py:judge"}],
            "rollout": {"max_new_tokens": 24, "engine": engine, "temperature": 0.8, "max_rows": 16},
            "group": {"prompts_per_step": PROMPTS, "group_size": GROUP}, "optimizer": {"lr": 1e-3},
            "eval": {"k": 2, "at_start": False, "every": 0}, "save": {"every": 1, "keep": 3},
        }  # fmt: skip
        path = self.folder / "run.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    def describe_model(self) -> None:
        """Write the configuration of the run's model for the servers."""
        from groupwise.config.recipes import load_recipe
        from groupwise.runs.job import make_job

        recipe = self.write_recipe({"name": "native"})
        with contextlib.chdir(self.folder):
            job = make_job(load_recipe(str(recipe)))
        config = job.policy.model.config
        job.close()
        config.save_pretrained(self.folder / "model")
        self.vocabulary = config.vocab_size

    def new_server(self) -> Process:
        """Start a server."""
        return Process(
            model=self.folder / "model", vocabulary=self.vocabulary, context=96, rows=16, tokens=20,
            delay=round(self.random.uniform(0.002, 0.01), 4),
        )  # fmt: skip

    def name_servers(self) -> None:
        """Write the file of servers."""
        self.named.write_text("".join(f"{server.url}\n" for server in self.servers))

    def start_trainer(self) -> subprocess.Popen[bytes]:
        """Start the run, or continue it."""
        command = [sys.executable, "-m", "groupwise", "train", str(self.recipe), "--quiet"]
        with (self.folder / "trainer.log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)

    # ---- what happens

    def kill_server(self) -> None:
        """One is killed, and started anew at its address."""
        server = self.random.choice(self.servers)
        server.kill()
        time.sleep(self.random.uniform(0.0, 5.0))
        server.start()

    def freeze_server(self) -> None:
        """One stands still, for a moment or longer than the trainer waits for it."""
        server = self.random.choice(self.servers)
        server.signal(signal.SIGSTOP)
        time.sleep(self.random.choice([1.0, 25.0]))
        server.signal(signal.SIGCONT)

    def join_or_leave(self) -> None:
        """A new one joins; where there are enough, the first one leaves."""
        if self.router is None and len(self.servers) == MOST_SERVERS:
            left = self.servers.pop(0)
            self.name_servers()
            time.sleep(5.0)
            left.close()
        elif len(self.servers) < MOST_SERVERS:
            self.servers.append(self.new_server())
            self.name_servers()
            if self.router is not None:
                self.servers[-1].wait()
                self.router.add(self.servers[-1].url)
                self.router.urls.append(self.servers[-1].url)

    def kill_trainer(self) -> None:
        """The trainer is killed, and the same command continues the run."""
        self.trainer.kill()
        self.trainer.wait()
        self.trainer = self.start_trainer()

    def kill_router(self) -> None:
        """The router is killed, and started anew."""
        if self.router is not None:
            self.router.close()
            time.sleep(self.random.uniform(0.0, 5.0))
            self.router.start()

    def disturbances(self) -> dict[str, Callable[[], None]]:
        """What may happen, by name."""
        found = {
            "a server killed": self.kill_server, "a server frozen": self.freeze_server,
            "a server joins or leaves": self.join_or_leave, "the trainer killed": self.kill_trainer,
        }  # fmt: skip
        if self.router is not None:
            found["the router killed"] = self.kill_router
        return found

    def disturb(self, name: str | None = None) -> str:
        """Let something happen: what is named, or at random."""
        name = name or self.random.choice(list(self.disturbances()))
        self.happened[name] += 1
        self.disturbances()[name]()
        return name

    # ---- what came of it

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "runs" / "run"

    def steps_done(self) -> list[dict[str, float]]:
        """Read the metrics of the steps that are done, each once."""
        from groupwise.runs.metrics_log import read_metrics

        lines = read_metrics(self.run) if self.run.exists() else []
        return [line for line in lines if "reward" in line]

    def done(self) -> int:
        """Count the steps that are done."""
        return len(self.steps_done())

    def wait_for_step(self, step: int, seconds: float = 300.0) -> None:
        """Wait until so many steps are done."""
        end = time.monotonic() + seconds
        while self.done() < step:
            self.demand_running()
            assert time.monotonic() < end, (self.folder / "trainer.log").read_text()[-3000:]
            time.sleep(0.2)

    def demand_running(self) -> None:
        """Fail if the trainer has ended by itself, unless it is done."""
        status = self.trainer.poll()
        assert status in (None, 0), (self.folder / "trainer.log").read_text()[-3000:]

    def end(self) -> None:
        """End the trainer after a whole step, and everything else."""
        self.trainer.send_signal(signal.SIGTERM)
        try:
            self.trainer.wait(120)
        finally:
            self.close()

    def close(self) -> None:
        """Kill all that still runs."""
        self.trainer.kill()
        self.trainer.wait()
        for server in self.servers:
            server.close()
        if self.router is not None:
            self.router.close()

    def verify(self) -> dict[str, object]:
        """Hold what was recorded against what has to be; return a summary."""
        from groupwise.runs.rollout_files import read_step

        lines = self.steps_done()
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "a step is lost, or there twice"
        visited: Counter[str] = Counter()
        oldest = 0
        for line in lines:
            groups = read_step(self.run, line["step"]).groups
            assert len(groups) == PROMPTS
            for group in groups:
                visited[group.prompt.id] += 1
                assert [rollout.index for rollout in group.rollouts] == list(range(GROUP)), group.prompt.id
                for rollout in group.rollouts:
                    ages = line["step"] - 1 - rollout.version
                    assert ages.min() >= 0 and ages.max() <= AHEAD, (line["step"], group.prompt.id, ages.tolist())
                    oldest = max(oldest, int(ages.max()))
        twice = [name for name, count in visited.items() if count > 1]
        assert not twice, f"prompts were trained on twice: {twice}"
        mismatch = max(line.get("mismatch/max", 0.0) for line in lines)
        assert mismatch < 1e-4, f"sampled and scored log-probs differ by {mismatch}"
        names = {name for line in lines for name in line if name.startswith("servers/version/")}
        return {
            "steps": len(lines), "disturbances": dict(self.happened), "oldest token": oldest, "mismatch": mismatch,
            "retries": sum(line["servers/retries"] for line in lines), "servers": len(names),
            "fewest alive": min(line["servers/alive"] for line in lines),
            "prefix hits": sum(line.get("servers/prefix_hits", 0.0) for line in lines) / len(lines),
        }  # fmt: skip


def main() -> None:
    """Run, disturb and verify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two disturbances")
    parser.add_argument("--router", help="command of vllm-router; without it the trainer reads a file of servers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="groupwise-soak-"))
    soak = Soak(folder, steps=1_000_000, router=options.router, seed=options.seed)
    end = time.monotonic() + options.seconds
    try:
        soak.wait_for_step(3)
        while time.monotonic() < end:
            print(f"step {soak.done()}: {soak.disturb()}", flush=True)
            before = soak.done()
            time.sleep(options.every)
            soak.wait_for_step(before + 1)
        soak.end()
        print(json.dumps(soak.verify(), indent=2))
    except BaseException:
        print(f"what there is lies in {folder}", file=sys.stderr)
        soak.close()
        raise
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
