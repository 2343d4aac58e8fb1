"""SIGKILL, again and again: `python tests/faults/kill_runs.py --kills 200`.

Runs of every kind are killed at random moments, half of the time inside a save, and started again until they finish.  Each must
come to the same bits as one that was never killed, without a step twice in its log, and never lose more than one save interval.

Every run is forked from a process that has imported everything, so that a start costs a fraction of a second; of a run on two
processes both are killed, one a little after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import yaml

from groupwise.api.stages import train_recipe
from groupwise.runs.checkpoint import damage, latest, step_of
from groupwise.runs.final_model import unfinished
from groupwise.runs.folder import finished
from groupwise.runs.metrics_log import read_metrics
from groupwise.utils.files import NEW, digest

EVERY = 2
"""Steps between two checkpoints."""
STEPS = 16
"""Of every run, unless `--steps` says otherwise."""
PATIENCE = 300.0
"""Seconds after which a run that neither ends nor can be killed has hung."""
TINY: dict[str, Any] = {
    "runs": "runs",
    "seed": 3,
    "steps": STEPS,
    "model": {"scratch": {"hidden": 64, "layers": 2, "heads": 4, "context": 96, "tokenizer": "arithmetic"}},
    "data": {"task": "addition", "limit": 64, "eval_limit": 4},
    "optimizer": {"lr": 1e-3},
    "eval": {"k": 2, "at_start": False},
    "save": {"every": EVERY},
}
GRPO: dict[str, Any] = TINY | {
    "objective": "grpo",
    "rewards": [{"function": "accuracy"}, {"function": "think_format"}],
    "rollout": {"max_new_tokens": 8},
    "group": {"prompts_per_step": 3, "group_size": 3, "minibatches": 2, "beta": 0.05},
}
PROGRAMS: dict[str, Any] = TINY | {
    "objective": "grpo",
    "model": {"path": "runs/writer/final"},
    "data": {"path": "programs.jsonl"},
    "rewards": [{"function": "code"}],
    "rollout": {"max_new_tokens": 24},
    "group": {"prompts_per_step": 2, "group_size": 4},
    "optimizer": {"lr": 3e-5},
}
"""Programs of a model that has learnt to write some, run in a sandbox."""
JUDGED: dict[str, Any] = GRPO | {
    "rewards": [{"function": "judge", "args": {"url": "", "model": "scripted", "mode": "rank"}}],
    "group": {"prompts_per_step": 2, "group_size": 4},
}
"""Completions that a judge scores over HTTP; `write_inputs` starts it, and it outlives the runs."""
PAIRS: dict[str, Any] = TINY | {"data": {"path": "pairs.jsonl", "eval_fraction": 0.1}, "batch_size": 4}


@dataclass(frozen=True)
class Kind:
    """What is killed."""

    recipe: dict[str, Any]
    ranks: int = 1

    @property
    def most_lost(self) -> int:
        """Steps that a kill may cost: those since the last save, and of a sharded run, which saves beside its steps until the next
        save, those since the one before."""
        return EVERY * (2 if self.recipe.get("parallel") == "zero3" else 1)


KINDS = {
    "grpo": Kind(GRPO),
    "sft": Kind(TINY | {"objective": "sft", "batch_size": 4}),
    "reward": Kind(PAIRS | {"objective": "reward"}),
    "dpo": Kind(PAIRS | {"objective": "dpo"}),
    "lora": Kind(GRPO | {"model": {"path": "runs/base/final", "lora": {"rank": 4}}}),
    "programs": Kind(PROGRAMS),
    "judge": Kind(JUDGED),
    "ranks": Kind(GRPO | {"parallel": "ddp"}, ranks=2),
    "sharded": Kind(GRPO | {"parallel": "zero3"}, ranks=2),
}


def write_inputs(kinds: Collection[str]) -> None:
    """Pairs for those who learn from them, the base of an adapter, and a model that writes programs."""
    chance = random.Random(0)
    sums = [(chance.randrange(90), chance.randrange(9)) for _ in range(80)]
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in sums]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if "programs" in kinds:
        rows = []
        for a in range(10):
            tests = [{"call": "f", "args": [n], "expected": n * a} for n in range(1, 4)]
            rows.append({"prompt": f"{a}: ", "completion": f"f=lambda x:x*{a}", "tests": json.dumps(tests)})
        Path("programs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        scratch = TINY["model"]["scratch"] | {"tokenizer": "bytes"}
        writer = TINY | {"objective": "sft", "batch_size": 10, "steps": 60, "name": "writer", "model": {"scratch": scratch}}
        run_to_end(writer | {"data": {"path": "programs.jsonl"}, "optimizer": {"lr": 1e-2}, "eval": {}, "save": {"every": 60}}, 1)
    if "judge" in kinds:
        if "__file__" in globals():  # else a test has put the folder into the path
            sys.path.append(str(Path(__file__).parents[1] / "fixtures"))
        from scripted_judge import Server, by_digest

        JUDGED["rewards"][0]["args"]["url"] = Server(by_digest).url
    if "lora" in kinds:
        run_to_end(TINY | {"objective": "sft", "batch_size": 4, "steps": 1, "name": "base"}, 1)


def begin(path: Path, ranks: int) -> list[int]:
    """The process ids of a run that has been begun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [_fork(path, rank, ranks, port) for rank in range(ranks)]


def _fork(path: Path, rank: int, ranks: int, port: int) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        log = os.open(f"{path.stem}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if ranks > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
            )
        status = train_recipe(path, quiet=True, timeout=60)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def run_to_end(recipe: dict[str, Any], ranks: int) -> Path:
    """Train without being killed."""
    path = Path(f"{recipe['name']}.yaml")
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    statuses = [os.waitpid(pid, 0)[1] for pid in begin(path, ranks)]
    folder = Path(recipe["runs"], recipe["name"])
    if any(statuses) or finished(folder) is None:
        raise SystemExit(f"{path.stem} ended with {statuses}; see {Path.cwd()}/{path.stem}-0.log")
    return folder


def final_of(folder: Path) -> str:
    """The bits of a final model."""
    return " ".join(digest(file) for file in sorted((folder / "final").glob("*.safetensors")))


def saving(folder: Path) -> bool:
    """True while a checkpoint, or the final model, has not got its name."""
    try:
        names = [*os.listdir(folder), *os.listdir(folder / "checkpoints")]
    except FileNotFoundError:
        return False
    return any(name.startswith(NEW) for name in names)


def kill_once(path: Path, folder: Path, ranks: int, chance: random.Random, inside: bool) -> str:
    """Begin a run and kill it: `inside` a save, else at any time after its first new step.  What came of it."""
    pids = begin(path, ranks)
    began, before = time.monotonic(), _last(folder)
    wait = chance.uniform(0.0, 0.3)
    ready: float | None = None
    ended: dict[int, int] = {}
    try:
        while len(ended) < len(pids):
            for pid in pids:
                if pid not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    ended[pid] = found[1]
            if time.monotonic() - began > PATIENCE:
                raise SystemExit(f"{path.stem} hangs; see {Path.cwd()}/{path.stem}-0.log")
            if ready is None and (saving(folder) if inside else _last(folder) > before):
                ready = time.monotonic() + (chance.uniform(0.0, 0.008) if inside else wait)
            if ready is not None and time.monotonic() >= ready:
                break
            time.sleep(0.0003 if inside else 0.003)
    finally:
        for pid in (pid for pid in pids if pid not in ended):
            os.kill(pid, signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.003))
        for pid in (pid for pid in pids if pid not in ended):
            ended[pid] = os.waitpid(pid, 0)[1]
    if all(os.WIFEXITED(status) and not os.WEXITSTATUS(status) for status in ended.values()):
        return "finished"
    failed = [status for status in ended.values() if os.WIFEXITED(status) and os.WEXITSTATUS(status)]
    if len(failed) == len(ended):
        raise SystemExit(f"{path.stem} ended by itself with {failed}; see {Path.cwd()}/{path.stem}-0.log")
    return "killed inside a save" if saving(folder) else "killed"


def _last(folder: Path) -> int:
    """The last step whose whole line stands in the log."""
    try:
        lines = read_metrics(folder)
    except OSError:
        return 0
    return lines[-1]["step"] if lines else 0


def hunt(name: str, kills: int, length: int, seed: int, say: Callable[[str], None]) -> Counter[str]:
    """Kill runs of a kind until so many have been killed, half of them inside a save.  Raises SystemExit on the first fault.

    length: steps of a run.
    """
    kind, chance, found = KINDS[name], random.Random(seed), Counter[str]()
    every = {"steps": length, "eval": TINY["eval"] | {"every": length // 2 + 1}}
    straight = run_to_end(kind.recipe | every | {"name": f"{name}-straight"}, kind.ranks)
    expected, steps = final_of(straight), [line["step"] for line in read_metrics(straight)]
    recipe = kind.recipe | every | {"name": f"{name}-killed"}
    path, folder = Path(f"{name}-killed.yaml"), Path("runs", f"{name}-killed")
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    while found["kills"] < kills or found["inside"] < kills // 2 or finished(folder) is None:
        enough = found["kills"] >= kills and found["inside"] >= kills // 2
        if enough:
            run_to_end(recipe, kind.ranks)
            outcome = "finished"
        else:
            outcome = kill_once(
                path, folder, kind.ranks, chance, inside=found["kills"] % 2 == 0 or found["inside"] < found["kills"] // 2
            )
        if outcome == "finished":
            found["finished"] += 1
            if final_of(folder) != expected:
                raise SystemExit(f"{name}: after {found['kills']} kills the final model differs from that of a run without any")
            if [line["step"] for line in read_metrics(folder)] != steps or unfinished(folder) is not None:
                raise SystemExit(f"{name}: the log, or the list of the final model's files, is not what it should be")
            if not enough:
                shutil.rmtree(folder)
            continue
        found["kills"] += 1
        found["inside"] += outcome == "killed inside a save"
        newest = latest(folder)
        kept = step_of(newest) if newest is not None else 0
        if newest is not None and (wrong := damage(newest)):
            raise SystemExit(f"{name}: {newest} is damaged: {wrong}")
        lost = _last(folder) - kept
        found["most lost"] = max(found["most lost"], lost)
        if lost > kind.most_lost:
            raise SystemExit(f"{name}: {lost} steps were lost, and a save is due every {EVERY}")
    say(
        f"{name:8} {found['kills']:4} kills, {found['inside']:4} inside a save; {found['finished']} runs finished, all with the "
        f"bits of the run without kills; at most {found['most lost']} steps lost (a save every {EVERY})"
    )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if every run came back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="over all kinds (default %(default)s)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS, help="of every run (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: a temporary one)")
    given = parser.parse_args(arguments)
    kinds = given.kinds.split(",")
    folder = given.folder or Path(tempfile.mkdtemp(prefix="killed-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    write_inputs(kinds)
    total: Counter[str] = Counter()
    for place, name in enumerate(kinds):
        share = given.kills // len(kinds) + (place < given.kills % len(kinds))
        total += hunt(name, share, given.steps, given.seed + place, lambda text: print(text, flush=True))
    print(f"all      {total['kills']:4} kills, {total['inside']:4} inside a save: every run came to the same bits", flush=True)
    if given.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
