"""What SmolLM2-135M-Instruct learns: methods, stale weights, objectives.  Every figure of benchmarks/real_model.md.

    python benchmarks/real_model.py --list            # every experiment, and which have a result
    python benchmarks/real_model.py                   # those without a result, one after the other
    python benchmarks/real_model.py sums/             # those whose name contains a text
    python benchmarks/real_model.py --device cuda --workers 14
    python benchmarks/real_model.py --table           # the results as tables

An experiment is one training on one thread: 4 to 8 minutes on a CPU.  Each worker is a process that trains one experiment after the
other.  A result is written when its experiment ends, so the script goes on where it was stopped.  The model has to be there:
`groupwise get smollm2`.

Accuracy is measured on 64 held-out prompts: greedily, and as the mean of 8 samples.  What was forgotten is measured by the mean
log-prob of a token of ordinary English, written as the answer to a message, and by the greedy accuracy on the two tasks that were
not trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}

import torch
from _machine import describe
from filelock import FileLock

import groupwise as gw
from groupwise.data.tasks import chat
from groupwise.errors import RewardError
from groupwise.runs.metrics_log import read_metrics

Device = Literal["cpu", "cuda"]
ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "real_model.json"
SEEDS = (0, 1, 2)
STEPS, COMPLETIONS = 30, 64
TASKS: dict[str, tuple[Any, Callable[..., list[float]], int]] = {
    "sums": (chat.ChatSums(), chat.same_number, 24),
    "json": (chat.ChatJson(), chat.same_object, 48),
    "words": (chat.ChatWords(), chat.same_word, 24),
}
"""A task's questions, its verdict, and the longest answer in tokens."""
PROMPTS, SAMPLES = 64, 8
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
"""Ordinary English, written for this script: a message, and what is scored as its answer."""


Experiment = Callable[[Path, Device], tuple[str, dict[str, Any]]]
"""One training: a folder for its runs and a device -> the trained model, and notes for the result."""


def recipe(task: str, *overrides: str, name: str | None = None) -> Experiment:
    """An experiment that is a bundled recipe with overrides.   name: of the recipe, default that of the task."""

    def run(folder: Path, device: Device) -> tuple[str, dict[str, Any]]:
        plain = (f"runs={folder}", "name=run", "threads=1", f"model.device={device}", "save.every=0", "save.rollouts_every=0")
        gw.train(gw.load_recipe(str(ROOT / f"recipes/smollm2-{name or task}.yaml"), [*plain, *overrides])).run(quiet=True)
        points = curve(folder / "run")
        last = {key: value for key, value in points[-1].items() if key != "step"}
        return str(folder / "run"), {"curve": points, f"{task} greedy": last["greedy"], **last}

    return run


def curve(run: Path) -> list[dict[str, float]]:
    """The evaluations of a run, in the order of their steps."""
    names = {"step": "step", "eval/greedy": "greedy", "eval/sampled": "sampled", "eval/pass@8": "pass@8"}
    rows = read_metrics(run)
    return [{short: row[name] for name, short in names.items()} for row in rows if row.get("eval/greedy") is not None]


def untrained(folder: Path, device: Device) -> tuple[str, dict[str, Any]]:
    """The model as it comes."""
    return "smollm2", {}


def rejection(task: str, seed: int, rounds: int) -> Experiment:
    """Rejection sampling (2308.01825) with as many completions as GRPO draws: in each round sample, keep what is right, SFT on it.

    Each round trains STEPS / rounds steps of 64 rows, as many as GRPO's, with the same learning rate."""

    def run(folder: Path, device: Device) -> tuple[str, dict[str, Any]]:
        questions, verdict, length = TASKS[task]
        rows = questions.prompts(STEPS * COMPLETIONS // SAMPLES, seed)
        model, right, count = "smollm2", [], len(rows) // rounds
        for number in range(rounds):
            policy = gw.load_policy(model, device=device)
            repeated = [row for row in rows[number * count : (number + 1) * count] for _ in range(SAMPLES)]
            texts = policy.generate(messages(repeated), max_new_tokens=length, seed=seed + number)
            scores = verdict(texts, [row["answer"] for row in repeated])
            # The same answer to the same prompt is learnt from once.
            pairs = dict.fromkeys(
                (row["prompt"], text) for row, text, score in zip(repeated, texts, scores, strict=True) if score == 1
            )
            right += [{"prompt": prompt, "completion": text} for prompt, text in pairs]
            del policy
            if not right:
                continue
            gw.train(
                objective="sft", model={"path": model, "device": device}, data={"path": right, "chat": True},
                steps=STEPS // rounds, batch_size=COMPLETIONS, optimizer={"lr": 1e-5}, seed=seed, runs=str(folder),
                name=f"round{number}", threads=1,
            ).run(quiet=True)  # fmt: skip
            model = str(folder / f"round{number}" / "final")
        return model, {"kept": len(right)}

    return run


def messages(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, str]]]:
    """Each row's prompt as a chat."""
    return [[{"role": "user", "content": row["prompt"]}] for row in rows]


def experiments() -> dict[str, Experiment]:
    """Every experiment by its name, those of the first table first."""
    rows: dict[str, Experiment] = {f"{task}/before training/0": untrained for task in TASKS}
    for seed in SEEDS:
        for task in TASKS:
            rows[f"{task}/grpo/{seed}"] = recipe(task, f"seed={seed}", "eval.every=10")
        rows[f"sums/grpo, LoRA/{seed}"] = recipe("sums", f"seed={seed}", "eval.every=10", *LORA)
        rows[f"sums/rejection, 1 round/{seed}"] = rejection("sums", seed, 1)
        rows[f"sums/rejection, 3 rounds/{seed}"] = rejection("sums", seed, 3)
    for seed in SEEDS:
        for ahead in (1, 2, 4, 8):
            for name, overrides in STALE.items():
                rows[f"stale/{name}, {ahead}/{seed}"] = recipe(
                    "sums", f"seed={seed}", f"rollout.engine.ahead={ahead}", *ONCE, *overrides
                )
    for seed in SEEDS:
        for task in ("sums", "words"):
            for objective in OBJECTIVES:
                rows[f"objective/{task}, {objective}/{seed}"] = recipe(task, f"seed={seed}", f"objective={objective}", *ONCE)
    for seed in SEEDS:
        rows[f"json/self-distillation/{seed}"] = recipe("json", f"seed={seed}", "eval.every=10", name="hints")
        rows[f"json/rejection, 3 rounds/{seed}"] = rejection("json", seed, 3)
        rows[f"words/rejection, 3 rounds/{seed}"] = rejection("words", seed, 3)
    return rows


def judged(task: str, model: str, device: Device, notes: dict[str, Any]) -> dict[str, Any]:
    """What the notes lack: accuracy on the model's task, greedy accuracy on the others, log-prob of ordinary English."""
    policy = dataclasses.replace(gw.load_policy(model, device=device), chat=True)
    result = dict(notes)

    def answers(questions: str, temperature: float, samples: int) -> list[list[float]]:
        source, verdict, length = TASKS[questions]
        rows = [row for row in source.held_out(PROMPTS) for _ in range(samples)]
        texts = policy.generate(messages(rows), max_new_tokens=length, temperature=temperature)
        right = [float(score == 1) for score in verdict(texts, [row["answer"] for row in rows])]
        return [right[place : place + samples] for place in range(0, len(right), samples)]

    for other in TASKS:
        if f"{other} greedy" not in result:
            result[f"{other} greedy"] = statistics.mean(right for (right,) in answers(other, 0.0, 1))
    if "greedy" not in result:
        sampled = answers(task, 1.0, SAMPLES)
        result["greedy"] = result[f"{task} greedy"]
        result["sampled"] = statistics.mean(map(statistics.mean, sampled))
        result["pass@8"] = statistics.mean(map(max, sampled))
    return result | {"text": float(policy.score(*TEXT).mean())}


def measure(name: str, device: Device) -> dict[str, Any]:
    """Train and judge one experiment: seconds of the training with its evaluations, and what came of it."""
    with tempfile.TemporaryDirectory(prefix="groupwise-real-") as folder:
        processor, wall = time.process_time(), time.perf_counter()
        model, notes = experiments()[name](Path(folder), device)
        seconds = {"seconds": round(time.process_time() - processor), "wall": round(time.perf_counter() - wall)}
        task = next((task for task in TASKS if task in name), "sums")
        result = {**seconds, **judged(task, model, device, notes)}
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # beside this process there are others on the same card
    return result


def stored() -> dict[str, Any]:
    """The results so far."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def store(name: str, result: dict[str, Any], machine: dict[str, Any] | None = None) -> None:
    """Add a result to the file, which other processes may change.   machine: default this one, without a GPU."""
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}
    with FileLock(RESULTS.with_suffix(".lock")):
        results = stored() | {name: rounded | {"machine": machine or describe()}}
        aside = RESULTS.with_suffix(".part")
        aside.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")
        aside.replace(RESULTS)


def place(result: dict[str, Any]) -> str:
    """The machine of a result, in words."""
    machine = result["machine"]
    card = machine.get("gpu") or f"one thread of {machine['cpu']}"
    beside = f", {machine['workers']} experiments at a time" if machine.get("workers", 1) > 1 else ""
    return f"{card}{beside}, torch {machine['torch']}, transformers {machine['transformers']}"


def tables(results: dict[str, Any]) -> str:
    """The tables of benchmarks/real_model.md: methods for each task, stale weights, objectives."""
    parts: list[str] = []
    for task in TASKS:
        others = {f"greedy on {other}": f"{other} greedy" for other in TASKS if other != task}
        columns = {
            "greedy": "greedy",
            "sampled": "sampled",
            "pass@8": "pass@8",
            **others,
            "log-prob of text": "text",
            "seconds": "wall",
        }
        methods = dict.fromkeys(name.split("/")[1] for name in results if name.startswith(f"{task}/"))
        cells = {method: {name: (f"{task}/{method}", key) for name, key in columns.items()} for method in methods}
        cells["before training"].pop("seconds")
        parts.append(table(results, task, cells))
    for key in ("sampled", "greedy"):
        # On-policy, the corrections change nothing.
        rows = {"0": dict.fromkeys(STALE, ("", key)) | {"none": ("sums/grpo", key), "cispo": ("objective/sums, cispo", key)}}
        rows |= {f"{ahead}": {name: (f"stale/{name}, {ahead}", key) for name in STALE} for ahead in (1, 2, 4, 8)}
        parts.append(table(results, f"steps ahead, {key}", rows))
    rows = {one: {} for one in OBJECTIVES}
    for one in OBJECTIVES:
        for task in ("sums", "words"):
            group = f"{task}/grpo" if one == "grpo" else f"objective/{task}, {one}"
            rows[one] |= {f"{task}, {key}": (group, key) for key in ("greedy", "sampled")}
    parts.append(table(results, "objective", rows))
    return "\n\n".join(parts)


def table(results: dict[str, Any], corner: str, rows: dict[str, dict[str, tuple[str, str]]]) -> str:
    """A Markdown table under a line that says where it was measured.

    rows: label -> column -> the experiments' name without their seed, and what of their results is shown: mean and 95 % interval.
    """
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    lines = ["| " + " | ".join([corner, "seeds", *columns]) + " |", "|---" * (len(columns) + 2) + "|"]
    places: dict[str, None] = {}
    for label, cells in rows.items():
        texts, most = [], 0
        for column in columns:
            group, key = cells.get(column, ("", ""))
            found = [result for name, result in results.items() if name.rpartition("/")[0] == group and key in result]
            texts.append(interval([one[key] for one in found]) if found else "")
            most = max(most, len(found))
            for one in found:
                places[place(one)] = None
        if most:
            lines.append("| " + " | ".join([label, str(most), *texts]) + " |")
    return "Measured on " + " and on ".join(places) + ".\n\n" + "\n".join(lines)


def interval(values: Sequence[float]) -> str:
    """Mean and half the width of Student's 95 % interval over seeds; of fewer than three the mean alone."""
    average = sum(values) / len(values)
    if average > 10:
        return f"{average:.0f}"  # seconds
    if len(values) < 3:
        return f"{average:.2f}"
    spread = math.sqrt(sum((value - average) ** 2 for value in values) / (len(values) - 1))
    quantile = {3: 4.303, 4: 3.182, 5: 2.776}[len(values)]
    return f"{average:.2f} ±{quantile * spread / math.sqrt(len(values)):.2f}"


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="", help="only experiments whose name contains it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="experiments at a time")
    parser.add_argument("--list", action="store_true", help="every experiment, and which have a result")
    parser.add_argument("--table", action="store_true", help="the results as tables")
    options = parser.parse_args()
    results = stored()
    names = [name for name in experiments() if options.text in name]
    if options.table:
        print(tables(results))
    elif options.list:
        for name in names:
            print(f"{name:40} {'has a result' if name in results else ''}")
    else:
        sys.exit(run([name for name in names if name not in results], options.device, options.workers))


def run(names: Sequence[str], device: Device, workers: int) -> int:
    """Measure and store experiments in several processes, each of which imports once.  Returns 1 if one failed."""
    machine = describe(device) | {"workers": workers}
    failed = 0
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(measure, name, device): name for name in names}
        for future in as_completed(futures):
            name = futures[future]
            try:
                result = future.result()
            except RewardError as error:  # nothing is left to learn from
                result = {"ended": str(error)}
            except Exception:
                failed = 1
                print(f"{name} failed", flush=True)
                traceback.print_exc()
                continue
            store(name, result, machine)
            print(name, result, flush=True)
    return failed


if __name__ == "__main__":
    main()
