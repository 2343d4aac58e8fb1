"""What rows hold is read alike from a file by the command, from memory by Python, from a packed file, and as the hub serves it:
tasks with columns of their own, conversations as JSON text, variables of the chat template, marks of a template in answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
import yaml

import groupwise as gw
from groupwise.cli.commands import main
from groupwise.runs.rollout_table import groups_of

TEMPLATE = (
    "{{ 'brief ' if brief else '' }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
JUDGES = """
def by_answer(prompts, completions, answer):
    assert all(prompt == [{"role": "user", "content": prompt[0]["content"]}] for prompt in prompts), prompts
    texts = [completion[0]["content"] for completion in completions]
    return [None if gold is None else float(gold in text) for text, gold in zip(texts, answer, strict=True)]

def by_tests(completion, tests):
    return None if tests is None else float("1" in completion[0]["content"])
"""
FORMS = ["command", "python", "packed", "hub"]


def asked(text: str, *answer: str) -> str:
    """A conversation as JSON text."""
    said = [{"role": "assistant", "content": one} for one in answer]
    return json.dumps([{"role": "user", "content": text}, *said])


ROWS: list[dict[str, Any]] = [
    {"messages": asked("1+1="), "answer": "2"},
    {"messages": asked("2+2="), "tests": "4", "chat_template_kwargs": {"brief": True}},
    {"messages": asked("3+3="), "answer": "6", "chat_template_kwargs": {"brief": False}},
    {"messages": asked("4+4="), "tests": "8"},
]
TAUGHT: list[dict[str, Any]] = [
    {"messages": asked(f"{n}+{n}=", f"<think>{mark}{n}</think>{2 * n}<|end|>"), "chat_template_kwargs": {"brief": n % 2 == 0}}
    for n, mark in enumerate("abcdefgh")
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "judges.py").write_text(JUDGES)
    return tmp_path


@pytest.fixture
def start(here: Path) -> Callable[..., Path]:
    """`start(form, rows, **recipe)`: trains on rows that come in one of the forms; the run's folder."""

    def run(form: str, rows: list[dict[str, Any]], **recipe: Any) -> Path:
        tree = {
            "name": form, "runs": "runs", "threads": 1, "seed": 3,
            "model": {
                "scratch": {"hidden": 32, "layers": 1, "heads": 2, "context": 96, "tokenizer": "bytes"},
                "chat_template": TEMPLATE,
            },
        } | recipe  # fmt: skip
        if form == "python":
            list(gw.train(data=rows, **tree))
            return here / "runs" / form
        if form == "command":
            path = "rows.jsonl"
            Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            made = datasets.Dataset.from_list(widened(rows))
            path = "rows.parquet" if form == "packed" else "owner/rows"
            made.to_parquet(path) if form == "packed" else cached(made)
        Path("recipe.yaml").write_text(yaml.safe_dump(tree | {"data": {"path": path}}))
        assert main(["train", "recipe.yaml"]) == 0
        return here / "runs" / form

    return run


def widened(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Columnar sources give every row the columns of all."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def cached(made: datasets.Dataset) -> None:
    """`owner/rows` as a download from the hub lies in the caches."""
    home = Path("hub/datasets--owner--rows")
    folder = Path("cache/owner___rows/default/0.0.0/0123456789abcdef")
    for path in (home, folder):
        path.mkdir(parents=True)
    made.save_to_disk("saved")
    (arrow,) = Path("saved").glob("*.arrow")
    shutil.copy(arrow, folder / "rows-train.arrow")
    about = {"builder_name": "parquet", "dataset_name": "rows", "config_name": "default"}
    about |= {"version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0}}
    split = {"name": "train", "num_bytes": 1, "num_examples": len(made), "dataset_name": "rows"}
    about |= {"features": json.loads(Path("saved/dataset_info.json").read_text())["features"], "splits": {"train": split}}
    (folder / "dataset_info.json").write_text(json.dumps(about))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_each_row_is_asked_and_judged_by_what_it_holds(
    start: Callable[..., Path], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = [{"function": f"judges.py:{name}", "weight": 1.0, "name": name} for name in ("by_answer", "by_tests")]
    folder = start(
        form, ROWS, objective="grpo", steps=1, rewards=functions, rollout={"max_new_tokens": 4},
        group={"prompts_per_step": 4, "group_size": 2}, save={"rollouts_every": 1},
    )  # fmt: skip
    (table,) = (folder / "rollouts").glob("*.parquet")
    groups, *_ = groups_of(pq.read_table(table))
    assert len(groups) == len(ROWS)
    for group in groups:
        question = group.prompt.messages[-1]["content"]
        (row,) = (row for row in ROWS if row["messages"] == asked(question))
        assert group.prompt.messages == ({"role": "user", "content": question},)
        brief = (row.get("chat_template_kwargs") or {}).get("brief")
        assert group.prompt.text == f"{'brief ' if brief else ''}<|user|>{question}<|end|><|assistant|><think>"
        known = [name for name, column in zip(group.names, group.rewards.T, strict=True) if (column == column).all()]
        assert known == (["by_answer"] if "answer" in row else ["by_tests"])
    path = {"python": None, "command": "rows.jsonl", "packed": "rows.parquet", "hub": "owner/rows"}[form]
    if path is None:
        path = "rows.jsonl"
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        assert main(["check", "recipe.yaml"]) == 0
    capsys.readouterr()
    split = ["--split", "train"] if form == "hub" else []
    assert main(["eval", str(folder), "--data", path, *split, "--k", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(found[f"rewards/{name}"] is not None for name in ("by_answer", "by_tests")), found


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_each_answer_is_trained_with_one_mark_of_its_template(start: Callable[..., Path], form: str) -> None:
    """The template opens the thought and ends the turn; the answers bring both marks too."""
    folder = start(form, TAUGHT, objective="sft", steps=1, batch_size=8)
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    trained = sum(len(f"{mark}{n}</think>{2 * n}") + 1 for n, mark in enumerate("abcdefgh"))
    marks = sum(len(f"{mark}{n}{2 * n}") + 2 for n, mark in enumerate("abcdefgh"))  # </think> and the end are one token each
    assert trained > marks == json.loads(line)["tokens/trained"]
