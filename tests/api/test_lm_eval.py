"""lm-eval reads `final/` of a run and gives the greedy accuracy that `groupwise eval` gives."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import groupwise as gw
from groupwise.cli.commands import main

PAGE = Path(__file__).parents[2] / "docs/evaluating.md"
RECIPE = """\
objective: sft
name: mine
steps: 60
batch_size: 4
threads: 1
model: {scratch: {hidden: 32, layers: 1, context: 64, tokenizer: bytes}}
data: {path: train.jsonl, eval_fraction: 0.0}
optimizer: {lr: 1.0e-2}
"""


@pytest.mark.slow
def test_the_task_of_the_page_gives_the_greedy_accuracy_of_our_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    files = dict(re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL))
    for name, content in files.items():
        Path(name).write_text(content)
    rows = [json.loads(line) for line in files["test.jsonl"].splitlines()]
    # Two of the four are taught, two of them wrongly: an accuracy of 0 or 1 would show less.
    taught = [{"prompt": row["prompt"], "completion": row["answer"] if place < 2 else "0"} for place, row in enumerate(rows)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in taught))
    Path("mine.yaml").write_text(RECIPE)
    assert main(["train", "mine.yaml", "--quiet"]) == 0
    ours = gw.evaluate("runs/mine", data="test.jsonl", rewards="number", k=1, max_new_tokens=16)
    (line,) = re.findall(r"^lm_eval run .* --tasks sums .*$", text, flags=re.MULTILINE)
    command = [sys.executable, "-m", "lm_eval", *shlex.split(line)[1:]]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = Path("results").rglob("results_*.json")
    theirs = json.loads(results.read_text())["results"]["sums"]["exact_match,last-number"]
    assert theirs == ours.evaluation.greedy.mean == 0.5
