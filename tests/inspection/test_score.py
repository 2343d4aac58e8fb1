"""`groupwise score`: reward functions over files of completions."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from groupwise.config.settings import RewardSettings
from groupwise.errors import ConfigError, DataError
from groupwise.inspection.score import score_file, visible
from groupwise.rewards.math_checker import Checker, shared_checker
from groupwise.utils.processes import WorkerProcess

ROWS = [
    {"prompt": "2+2=", "completion": r"\boxed{4}", "answer": "4", "completion_ids": [1, 2, 3]},
    {"prompt": "2+2=", "completion": "\x1b[31mfive\x07", "answer": "4", "completion_ids": [1, 1, 1, 1]},
    {
        "prompt": [{"role": "user", "content": "3+3="}],
        "completion": [{"role": "assistant", "content": "6"}],
        "answer": "",
        "completion_ids": [5],
    },
]


def write(path, rows):
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_values_of_every_row(tmp_path, suffix):
    rows = ROWS if suffix != ".parquet" else ROWS[:2]  # a column of one type
    repetition = RewardSettings(function="repetition", args={"n": 1}, weight=0.5)
    report = score_file(["accuracy", repetition], write(tmp_path / f"rows{suffix}", rows))
    assert report.names == ("accuracy", "repetition")
    expected = np.array([[1.0, 0.0], [0.0, -0.75], [np.nan, 0.0]])[: len(rows)]
    np.testing.assert_array_equal(report.rewards, expected)
    np.testing.assert_array_equal(report.reward, [1.0, -0.375, 0.0][: len(rows)])
    assert report.rows[1].endswith("line 3" if suffix == ".jsonl" else "row 2")


def test_render_shows_the_numbers_and_no_control_characters(tmp_path):
    text = score_file(["accuracy"], write(tmp_path / "rows.jsonl", ROWS)).render()
    assert "3 completions" in text
    assert "accuracy: mean 0.5, std 0.5, min 0, max 1, None 33.3%" in text
    assert "\\x1b[31mfive\\x07" in text
    assert all(c == "\n" or c.isprintable() for c in text)
    assert "None" in [line for line in text.splitlines() if line and not line.startswith("slow: ")][-1]  # on a busy machine


def test_render_shows_prompts_golds_and_how_many_prompts_have_different_rewards(tmp_path):
    rows = [{"prompt": "2+2=", "completion": text, "answer": "4"} for text in ("4", "5")]
    rows += [{"prompt": "3+3=", "completion": "6", "answer": "6"}] * 2 + [{"prompt": "4+4=", "completion": "8", "answer": "8"}]
    text = score_file(["accuracy", "tags"], write(tmp_path / "rows.jsonl", rows)).render()
    assert "1 of 2 prompts with several completions have different rewards; the others teach nothing" in text
    assert "tags: 0 for every completion, None 0.0%: it teaches nothing here" in text
    assert "reward (weighted sum)" in text
    heads, first = (line.split() for line in text.splitlines() if line.startswith(("row  ", "1    ")))
    assert heads == ["row", "accuracy", "tags", "prompt", "gold", "completion"]
    assert first == ["1", "1", "0", "2+2=", "4", "4"]


def test_one_function_is_not_summed_and_lone_completions_cannot_differ(tmp_path):
    rows = [{"prompt": prompt, "completion": "<think>", "answer": "4"} for prompt in "ab"]
    text = score_file(["think_format"], write(tmp_path / "rows.jsonl", rows)).render()
    assert "weighted sum" not in text and "one completion for each prompt" in text and " gold " not in text


def test_histogram_of_many_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide_reward.py").write_text("def f(completion): return float(completion)")
    path = write(tmp_path / "rows.jsonl", [{"prompt": str(n), "completion": str(n)} for n in range(100)])
    lines = score_file(["wide_reward.py:f"], path).render(rows=0).splitlines()
    assert [line.split()[3:] for line in lines[3:13]] == [["10", "####"]] * 10


def test_neighbours_with_one_prompt_are_one_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "size_reward.py").write_text("def f(completions): return [len(completions)] * len(completions)")
    rows = [{"prompt": prompt, "completion": "x"} for prompt in "aabccca"]
    assert score_file(["size_reward.py:f"], write(tmp_path / "rows.jsonl", rows)).reward.tolist() == [2, 2, 1, 3, 3, 3, 1]


@pytest.mark.slow
def test_a_slow_call_is_named_and_a_workers_start_is_none(tmp_path, monkeypatch):
    """By a clock that stands still but for what the two stand-ins below say they took."""
    monkeypatch.chdir(tmp_path)
    passed = [0.0]
    real = time.monotonic
    monkeypatch.setattr("groupwise.utils.processes.time", SimpleNamespace(monotonic=lambda: real() + passed[0]))
    monkeypatch.setattr("groupwise.rewards.compose.time", SimpleNamespace(monotonic=lambda: real() + passed[0]))
    shared_checker.cache_clear()
    ready, compare = WorkerProcess.ready, Checker.compare

    def start(process):
        passed[0] += 0.0 if process._begun is None else 10_000.0
        ready(process)

    def computed(checker, pairs):
        passed[0] += 3_000.0
        return compare(checker, pairs)

    monkeypatch.setattr(WorkerProcess, "ready", start)
    monkeypatch.setattr(Checker, "compare", computed)
    rows = [{"prompt": "x", "completion": rf"\boxed{{x+{n}}}", "answer": r"\frac{x}{1}+2"} for n in (1, 2)]
    (tmp_path / "own_reward.py").write_text("def f(completions): return [1.0] * len(completions)")
    report = score_file(["accuracy", "own_reward.py:f"], write(tmp_path / "rows.jsonl", rows))
    shared_checker().pool.close()
    assert report.rewards.tolist() == [[0.0, 1.0], [1.0, 1.0]]
    assert passed[0] >= 13_000.0
    (slowest, other) = sorted(report.calls, key=lambda call: -call.seconds)
    assert slowest[:3] == ("accuracy", 0, 2) and 3_000.0 <= slowest.seconds < 10_000.0
    assert other[:3] == ("f", 0, 2) and other.seconds < 3_000.0
    (line,) = (line for line in report.render().splitlines() if line.startswith("slow: accuracy"))
    assert line.startswith("slow: accuracy took 3") and line.endswith(r"line 1 and 1 more of its prompt: \boxed{x+1}")


def test_columns_are_renamed_and_rows_limited(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": "1", "output": "#### 1", "solution": "1"}] * 5)
    report = score_file(["accuracy"], path, columns={"prompt": "question", "completion": "output"}, limit=2)
    assert report.reward.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"prompt": "a", "completion": "b"}\n{"prompt": ', "line 2"),
        ("a.jsonl", "[1]", "line 1"),
        ("a.jsonl", '{"prompt": "a", "text": "b"}', "line 1: no 'completion'; columns: 'prompt', 'text'"),
        ("a.jsonl", '{"prompt": "a", "completion": 5}', "'completion' is 5, expected a string or messages"),
        ("a.txt", "x", "is none of .jsonl"),
    ],
)
def test_bad_files(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=said):
        score_file(["think_format"], tmp_path / name)


def test_missing_columns_and_files(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        score_file(["exact"], tmp_path / "no.jsonl")
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(ConfigError, match="compares with the column 'answer' or 'solution'"):
        score_file(["accuracy"], path)
    with pytest.raises(Exception, match="'repetition' asks for 'completion_ids', which these completions do not come with"):
        score_file(["repetition"], path)


def test_visible_escapes_and_cuts():
    assert visible("a" * 100, 10) == "aaaaaaa..."
    assert visible("\u202ex\u200b", 40) == "\\u202ex\\u200b"
