"""`eval.best` and `eval.stop_after`: the exported model is that of the best evaluation, and a run without a better one ends."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from finished import final_weights, untimed_metrics
from rich.console import Console
from safetensors.torch import load_file

from groupwise.api.stages import train_recipe
from groupwise.config.recipes import load_recipe
from groupwise.runs.best import BestEvaluation
from groupwise.runs.run import train

SFT: dict[str, Any] = {
    "objective": "sft", "steps": 12, "batch_size": 4, "rewards": [], "optimizer": {"lr": 1e-2},
    "data": {"task": None, "limit": None, "eval_limit": None, "path": "FOLDER/train.json", "eval_path": "FOLDER/other.json"},
    "eval": {"every": 1, "k": 1, "best": "loss", "stop_after": 3}, "save": {"every": 50},
}  # fmt: skip
"""It learns other completions than those that are held out, whose loss rises."""
GRPO: dict[str, Any] = {
    "objective": "grpo", "steps": 12, "optimizer": {"lr": 1e-2}, "group": {"prompts_per_step": 4, "group_size": 4},
    "rewards": [{"function": "judges.py:brief"}, {"function": "judges.py:lengthy", "weight": 0.0}],
    "eval": {"every": 2, "prompts": 2, "best": "rewards/lengthy", "stop_after": 2}, "save": {"every": 50},
}  # fmt: skip
"""It learns short completions, and the best evaluation is that of long ones."""
JUDGES = """
def brief(completion): return -float(len(completion))
def lengthy(completion): return float(len(completion))
"""


def ending(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "done.json").read_text())


def best_step(folder: Path, figure: str, better: Callable) -> int:
    """The step of the first best evaluation behind step 0, by the log."""
    lines = [line for line in untimed_metrics(folder) if line["step"] and f"eval/{figure}" in line]
    best = better(line[f"eval/{figure}"] for line in lines)
    return next(line["step"] for line in lines if line[f"eval/{figure}"] == best)


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "better"), [(SFT, min), (GRPO, max)])
def test_best_of_a_run(
    changes: dict[str, Any], better: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_recipe: Callable
) -> None:
    figure, patience = changes["eval"]["best"], changes["eval"]["stop_after"]
    (tmp_path / "judges.py").write_text(JUDGES)
    for name, one, completion in (("train", 1, "1"), ("other", 2, "2+2")):
        rows = [{"prompt": f"{n}+{one}=", "completion": completion} for n in range(12)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    monkeypatch.chdir(tmp_path)
    changes = json.loads(json.dumps(changes).replace("FOLDER", str(tmp_path)))
    path = write_recipe(tmp_path, "straight", **changes)
    output = io.StringIO()
    assert train_recipe(path, console=Console(file=output, width=200)) == 0
    folder = tmp_path / "runs" / "straight"
    best, end = best_step(folder, figure, better), ending(folder)

    assert end["step"] == best + patience * changes["eval"]["every"] < changes["steps"]
    assert end["stopped"].startswith(f"no better {figure} in {patience} evaluations")
    assert f"the model of step {best}, the best by held-out {figure}" in end["exported"]
    assert end["exported"] in output.getvalue()
    assert f"the model of step {best}, the best" in (folder / "final" / "README.md").read_text()
    kept = load_file(folder / "checkpoints" / f"{best:06d}" / "policy" / "model.safetensors")
    final = final_weights(folder)
    assert all(torch.equal(final[name], kept[name]) for name in kept)
    last = load_file(folder / "checkpoints" / f"{end['step']:06d}" / "policy" / "model.safetensors")
    assert not all(torch.equal(final[name], last[name]) for name in kept)

    # finished: the same command trains nothing, and makes a final model again that is gone
    assert train_recipe(path, console=Console(file=io.StringIO())) == 0
    shutil.rmtree(folder / "final")
    assert train_recipe(path, console=Console(file=io.StringIO())) == 0
    assert all(torch.equal(final_weights(folder)[name], kept[name]) for name in kept)
    assert ending(folder)["step"] == end["step"]

    # broken off behind every step, also behind the one that ends it
    broken = write_recipe(tmp_path, "broken", **changes)
    for stop in range(1, end["step"] + 1):
        for step in train(load_recipe(broken)):
            if step.number == stop:
                break
    list(train(load_recipe(broken)))
    other = tmp_path / "runs" / "broken"
    assert untimed_metrics(other) == untimed_metrics(folder)
    assert all(torch.equal(final_weights(other)[name], kept[name]) for name in kept)
    assert {**ending(other), "time": 0} == {**ending(folder), "time": 0}


@pytest.mark.parametrize(
    ("figure", "values", "step", "stops_at"),
    [
        ("reward", [0.1, 0.3, 0.3, 0.2], 2, 4),
        ("loss", [3.0, 2.0, 2.5, 1.0], 4, None),
        ("calibration/error", [0.2, 0.1, None, None], 2, 4),
        ("pass@8", [None, None, 0.5], 3, 2),
        ("loss", [math.nan, 2.0, math.nan, 3.0], 2, 4),
        ("reward", [math.nan, -math.inf, 0.5], 3, None),
    ],
)
def test_comparison(figure: str, values: list[float | None], step: int, stops_at: int | None) -> None:
    best, stops = BestEvaluation(figure=figure, patience=2), []
    for number, value in enumerate(values, 1):
        best.add(number, value)
        if best.stops:
            stops.append(number)
    assert best.step == step
    assert (stops[0] if stops else None) == stops_at


def test_state_is_read_from_the_log() -> None:
    lines = {0: {"eval/reward": 9.0}, 2: {"eval/reward": 0.5}, 3: {"reward": 1.0}, 4: {"eval/reward": 0.4}, 6: {"eval/greedy": 1.0}}
    best = BestEvaluation(figure="reward", patience=2).read(lines)
    assert (best.step, best.value, best.worse, best.stops) == (2, 0.5, 2, True)
