"""Reward models against a bag of words, on every pair of a file: cross-validation, and the difference pair by pair.

One held-out part of a small file cannot tell models apart: of 240 pairs at 0.92 one standard error is 0.018.  Here every pair is
judged by models that never saw its prompt, and by a bag of words trained on the same rows; what both find easy or hard cancels out
of their difference.  For each seed and each fold (by a hash of the prompt) the recipe's stage `sft` and its reward models are
trained anew, tokenizer included; those that begin with a model begin with that of `sft`, the others with random weights.

    python benchmarks/preferences.py data.path=pairs.json         # recipes/preference.yaml, 4 folds, seed 0
    python benchmarks/preferences.py data.path=pairs.json --folds 5 --seeds 0 1 2

Intervals are 95 %, over pairs; a pair's verdict is its mean over seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from _machine import save
from bag_of_words import bag_of_words, texts_of

from groupwise.config.recipes import load_stages
from groupwise.config.settings import Recipe
from groupwise.data.encoding import PAIRS
from groupwise.data.load import load_records
from groupwise.data.sources import SourceRows, read_rows
from groupwise.data.split import hash_share
from groupwise.data.templates import Wording
from groupwise.models import saving
from groupwise.runs.job import Job, make_job
from groupwise.training.passes import assess
from groupwise.training.preferences import pooled, reward_objective

RULE = "bag of words"


def halves(rows: SourceRows, recipe: Recipe, fold: int, folds: int, folder: Path) -> list[str]:
    """Write the rows of a fold and the others to files: the overrides that name them."""
    wording = Wording.of(recipe.data)
    keys = [wording.key(wording.content(row, rows.where(i))) for i, row in enumerate(rows)]
    parts: dict[str, list[Mapping]] = {"path": [], "eval_path": []}
    for key, row in zip(keys, rows, strict=True):
        parts["eval_path" if int(hash_share(key) * folds) == fold else "path"].append(row)
    for name, part in parts.items():
        (folder / f"{name}.json").write_text(json.dumps(part))
    return [
        "data.eval_fraction=0",
        "data.limit=null",
        "data.eval_limit=null",
        *(f"data.{name}={folder / name}.json" for name in parts),
    ]


def trained(recipe: Recipe, start: Path | None) -> Job:
    """The job of a stage after its last step; start: the model that it goes on from."""
    job = make_job(
        recipe if start is None else dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, path=str(start)))
    )
    for _ in job.loop(0):
        pass
    return job


def verdicts(
    path: str, overrides: Sequence[str], seed: int, fold: int, folds: int, folder: Path
) -> Iterator[tuple[str, np.ndarray]]:
    """(what judged, 1, 0.5 or 0 for every held-out pair of the fold)."""
    given = [*overrides, f"seed={seed}", "threads=1"]
    first = load_stages(path, given)["sft"]
    files = halves(read_rows(str(first.data.path), first.data.split), first, fold, folds, folder)
    stages = load_stages(path, [*given, *files])
    sft = trained(stages["sft"], None)
    saving.save(sft.policy, folder / "sft")
    context, eos_ids = sft.policy.context, sft.policy.eos_ids
    pairs = load_records(PAIRS, stages["sft"].data, sft.policy.tokenizer, context=context, eos_ids=eos_ids, seed=seed)
    yield RULE, _right(bag_of_words(texts_of(sft.policy, pairs.train), texts_of(sft.policy, pairs.held_out)))
    sft.close()
    for recipe in (recipe for recipe in stages.values() if recipe.objective == "reward"):
        objective = reward_objective(recipe.reward_model)
        job = trained(recipe, None if recipe.model.path is None else folder / "sft")
        score_S = pooled(
            assess(job.policy, objective.loss, objective.samples(pairs.held_out), max_tokens_per_microbatch=4096, whole_groups=True)
        )
        yield f"pooling {recipe.reward_model.pooling}", _right(score_S[0::2] - score_S[1::2])
        job.close()


def _right(gap_R: np.ndarray) -> np.ndarray:
    return np.where(gap_R == 0, 0.5, gap_R > 0)


def half_width(values: np.ndarray) -> float:
    """Of the mean of the values, 95 %."""
    return float(1.96 * values.std(ddof=1) / math.sqrt(values.size))


def summary(found: Mapping[str, np.ndarray]) -> list[dict[str, float | str]]:
    """Of each judge: its accuracy, and how far it is ahead of the rule.  found: (seeds, pairs) each."""
    rule_R = found[RULE].mean(axis=0)
    rows: list[dict[str, float | str]] = []
    for name, right in found.items():
        right_R = right.mean(axis=0)
        row: dict[str, float | str] = {"judge": name, "accuracy": float(right_R.mean()), "accuracy/half_width": half_width(right_R)}
        if name != RULE:
            ahead_R = right_R - rule_R
            row |= {"ahead": float(ahead_R.mean()), "ahead/half_width": half_width(ahead_R)}
            row |= {"only_it": float((ahead_R > 0).sum()), "only_the_rule": float((ahead_R < 0).sum())}
        rows.append(row)
    return rows


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=str(Path(__file__).parents[1] / "recipes" / "preference.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    if load_stages(given.recipe, given.overrides)["sft"].data.path is None:
        print("nothing measured: data.path=FILE names the pairs")
        return
    found: dict[str, list[np.ndarray]] = {}
    for seed in given.seeds:
        of_seed: dict[str, list[np.ndarray]] = {}
        for fold in range(given.folds):
            start = time.process_time()
            with tempfile.TemporaryDirectory(prefix="groupwise-preferences-") as folder:
                for name, right_R in verdicts(given.recipe, given.overrides, seed, fold, given.folds, Path(folder)):
                    of_seed.setdefault(name, []).append(right_R)
            shown = "  ".join(f"{name} {parts[-1].mean():.3f}" for name, parts in of_seed.items())
            seconds, size = time.process_time() - start, of_seed[RULE][-1].size
            print(f"seed {seed}  fold {fold}  {size} pairs  {shown}  {seconds:.0f} s", flush=True)
        for name, parts in of_seed.items():
            found.setdefault(name, []).append(np.concatenate(parts))
    rows = summary({name: np.stack(seeds) for name, seeds in found.items()})
    for row in rows:
        line = f"{row['judge']:14} {row['accuracy']:.3f} ±{row['accuracy/half_width']:.3f}"
        if "ahead" in row:
            line += f"   ahead of the {RULE} by {row['ahead']:+.3f} ±{row['ahead/half_width']:.3f}"
            line += f" (better on {row['only_it']:.0f} pairs, worse on {row['only_the_rule']:.0f})"
        print(line)
    content = {"recipe": Path(given.recipe).name, "seeds": given.seeds, "folds": given.folds, "overrides": given.overrides}
    print(save("preferences", {**content, "results": rows}))


if __name__ == "__main__":
    main()
