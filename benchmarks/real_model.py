"""What SmolLM2-135M-Instruct learns: methods against each other, stale weights, objectives.  Every figure of docs/real-model.md.

    python benchmarks/real_model.py --list            # every experiment, and which have a result
    python benchmarks/real_model.py                   # those without a result, one after the other
    python benchmarks/real_model.py sums/             # those whose name contains a text
    python benchmarks/real_model.py --table           # the results as tables

An experiment is one training on one thread, of 4 to 8 minutes.  A result is written when its experiment ends, so the script goes on
where it was stopped.  Two can run at once, with different texts.  The model has to be there: `groupwise get smollm2`.

Accuracy is measured on 64 held-out prompts: greedily, and as the mean of 8 samples.  What was forgotten is measured by the mean
log-prob of a token of ordinary English, before and after, and by the greedy accuracy on the two tasks that were not trained.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}

from _machine import describe

import groupwise as gw

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "real_model.json"
SEEDS = (0, 1, 2)
STEPS, COMPLETIONS = 30, 64
TASKS = {"sums": "same_number", "json": "same_object", "words": "same_word"}
ONCE = ("eval.every=0", "eval.at_start=false")
"""Evaluate after the last step alone."""
LORA = ("model.lora.rank=16", "optimizer.lr=2e-4")
STALE = {
    "none": ("rollout.engine.correct=null",),
    "truncated": (),
    "masked": ("rollout.engine.correct.mode=mask", "rollout.engine.correct.low=0.5"),
    "cispo": ("objective=cispo", "rollout.engine.correct=null"),
}
"""How a step whose completions were drawn from older weights is corrected."""
OBJECTIVES = ("grpo", "dr_grpo", "dapo", "cispo", "gspo", "sapo", "rloo", "reinforce_pp")
TEXT = (
    "The river rises in the hills and runs for sixty miles before it meets the sea.",
    " In spring the snow melts and the water is high; in late summer one can cross it on foot. Two towns lie on its banks. The "
    "older one has a stone bridge with five arches, built by a mason whose name nobody knows. On market days farmers sell cheese, "
    "apples and honey there, and children fish from the wall.",
)
"""Ordinary English, written for this script: what stands before, and what is scored."""


@dataclass(frozen=True)
class Experiment:
    """One training, and how it is done.   run: folder for its runs -> the folder of the trained model, and notes for the result."""

    name: str
    run: Callable[[Path], tuple[Path, dict[str, Any]]]


def recipe(task: str, *overrides: str) -> Callable[[Path], tuple[Path, dict[str, Any]]]:
    """An experiment that is a bundled recipe with overrides."""

    def run(folder: Path) -> tuple[Path, dict[str, Any]]:
        options = [*overrides, "threads=1", f"runs={folder}", "name=run"]
        path = ROOT / f"recipes/smollm2-{task}.yaml"
        subprocess.run([sys.executable, "-m", "groupwise", "train", str(path), *options], check=True)
        points = curve(folder / "run")
        last = {key: value for key, value in points[-1].items() if key != "step"}
        return folder / "run", {"curve": points, f"{task} greedy": last["greedy"], **last}

    return run


def curve(run: Path) -> list[dict[str, float]]:
    """The evaluations of a run, in the order of their steps."""
    names = {"step": "step", "eval/greedy": "greedy", "eval/sampled": "sampled", "eval/pass@8": "pass@8"}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{short: row[name] for name, short in names.items()} for row in rows if row.get("eval/greedy") is not None]


def rejection(task: str, seed: int, rounds: int) -> Callable[[Path], tuple[Path, dict[str, Any]]]:
    """Rejection sampling (2308.01825) with as many completions as GRPO draws: in each round sample, keep what is right, SFT on it.

    Each round trains STEPS / rounds steps of 64 rows, as many as GRPO's, with the same learning rate."""

    def run(folder: Path) -> tuple[Path, dict[str, Any]]:
        settings = gw.load_recipe(str(ROOT / f"recipes/smollm2-{task}.yaml"))
        judge = getattr(sys.modules["groupwise.data.tasks.chat"], TASKS[task])
        questions = task_of(task).prompts(STEPS * 8, seed)
        model, right, count = "smollm2", [], len(questions) // rounds
        for number in range(rounds):
            policy = gw.load_policy(model)
            part = questions[number * count : (number + 1) * count]
            asked = [[{"role": "user", "content": row["prompt"]}] for row in part for _ in range(8)]
            gold = [row["answer"] for row in part for _ in range(8)]
            texts = policy.generate(asked, max_new_tokens=settings.rollout.max_new_tokens, seed=seed + number)
            rows = {
                (one[0]["content"], text): {"prompt": one[0]["content"], "completion": text}
                for one, text, score in zip(asked, texts, judge(texts, gold), strict=True)
                if score == 1.0
            }
            right += rows.values()
            if not right:
                continue
            gw.train(
                objective="sft", model={"path": model}, data={"path": right, "chat": True}, steps=STEPS // rounds,
                batch_size=COMPLETIONS, optimizer={"lr": 1e-5}, seed=seed, runs=str(folder), name=f"round{number}", threads=1,
            ).run()  # fmt: skip
            model = str(folder / f"round{number}" / "final")
        return Path(model), {"kept": len(right)}

    return run


def task_of(name: str) -> Any:
    """A built-in chat task."""
    from groupwise.data.tasks.chat import ChatJson, ChatSums, ChatWords

    return {"sums": ChatSums, "json": ChatJson, "words": ChatWords}[name]()


def experiments() -> dict[str, Experiment]:
    """Every experiment by its name, those of docs/real-model.md's first table first."""
    rows: dict[str, Callable[[Path], tuple[Path, dict[str, Any]]]] = {}
    for seed in SEEDS:
        for task in TASKS:
            rows[f"{task}/grpo/{seed}"] = recipe(task, f"seed={seed}", "eval.every=10")
        rows[f"sums/grpo, LoRA/{seed}"] = recipe("sums", f"seed={seed}", "eval.every=10", *LORA)
        rows[f"sums/rejection, 1 round/{seed}"] = rejection("sums", seed, 1)
        rows[f"sums/rejection, 3 rounds/{seed}"] = rejection("sums", seed, 3)
    for seed in SEEDS:
        for ahead in (0, 1, 2, 4, 8):
            for name, overrides in STALE.items():
                if ahead > 0 or name in ("none", "cispo"):  # without staleness the corrections change nothing
                    rows[f"stale/{name}, {ahead}/{seed}"] = recipe(
                        "sums", f"seed={seed}", f"rollout.engine.ahead={ahead}", *ONCE, *overrides
                    )
    for seed in SEEDS:
        for task in ("sums", "words"):
            for objective in OBJECTIVES:
                rows[f"objective/{task}, {objective}/{seed}"] = recipe(task, f"seed={seed}", f"objective={objective}", *ONCE)
    return {name: Experiment(name, run) for name, run in rows.items()}


def judged(task: str, model: Path | str, known: dict[str, Any]) -> dict[str, Any]:
    """What is not known yet: accuracy on the model's task, greedy accuracy on the others, log-prob of ordinary English."""
    result = dict(known)
    for other, verdict in TASKS.items():
        if f"{other} greedy" in result:
            continue
        report = gw.evaluate(
            str(model), task=f"chat_{other}", chat=True, rewards=[f"groupwise.data.tasks.chat:{verdict}"], verdict=verdict, seed=0,
            limit=64, k=8 if other == task else 1, max_new_tokens=48 if other == "json" else 24,
        ).evaluation  # fmt: skip
        result[f"{other} greedy"] = report.greedy.mean
        if other == task:
            result |= {"greedy": report.greedy.mean, "sampled": report.sampled.mean, "pass@8": report.pass_at_k.mean}
    return result | {"text": float(gw.load_policy(str(model)).score(*TEXT).mean())}


def measure(experiment: Experiment) -> dict[str, Any]:
    """Train and judge: processor seconds of the training with its evaluations, and what came of it."""
    with tempfile.TemporaryDirectory(prefix="groupwise-real-") as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
        model, notes = experiment.run(Path(folder))
        after = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
        seconds = sum(new.ru_utime + new.ru_stime - old.ru_utime - old.ru_stime for new, old in zip(after, before, strict=True))
        task = next((task for task in TASKS if task in experiment.name), "sums")
        return {"seconds": round(seconds), **judged(task, model, notes)}


def stored() -> dict[str, Any]:
    """The results so far."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def store(name: str, result: dict[str, Any]) -> None:
    """Add a result to the file, which another process may have changed."""
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}
    results = stored() | {name: rounded | {"machine": describe()}}
    aside = RESULTS.with_suffix(".part")
    aside.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")
    aside.replace(RESULTS)


def table(results: dict[str, Any], prefixes: Sequence[str]) -> str:
    """Rows of a Markdown table: mean over the seeds with its 95 % interval, and how many seeds there are."""
    columns = ("", "seeds", "greedy", "sampled", "pass@8", "log-prob of ordinary text", "processor minutes")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, result in results.items():
        if name.startswith(tuple(prefixes)):
            groups.setdefault(name.rpartition("/")[0], []).append(result)
    for name, rows in groups.items():
        cells = [str(interval([row[key] for row in rows])) for key in ("greedy", "sampled", "pass@8", "text")]
        minutes = sum(row["seconds"] for row in rows) / len(rows) / 60
        lines.append(f"| {name} | {len(rows)} | " + " | ".join(cells) + f" | {minutes:.1f} |")
    return "\n".join(lines)


def interval(values: Sequence[float]) -> str:
    """Mean and half the width of Student's 95 % interval over seeds."""
    average = sum(values) / len(values)
    if len(values) < 2:
        return f"{average:.2f}"
    spread = math.sqrt(sum((value - average) ** 2 for value in values) / (len(values) - 1))
    quantile = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}[len(values)]
    return f"{average:.2f} ±{quantile * spread / math.sqrt(len(values)):.2f}"


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="", help="only experiments whose name contains it")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        results = stored()
        for prefixes in (("before", *TASKS), ("stale/",), ("objective/",)):
            print(table(results, prefixes), end="\n\n")
        return
    for name, experiment in experiments().items():
        if options.text not in name:
            continue
        if options.list:
            print(f"{name:40} {'has a result' if name in stored() else ''}")
        elif name not in stored():
            store(name, measure(experiment))
            print(name, stored()[name], flush=True)


if __name__ == "__main__":
    main()
