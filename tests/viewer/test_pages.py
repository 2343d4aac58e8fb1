"""What the pages say, against what was written."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from groupwise.errors import DataError
from groupwise.records import Step
from groupwise.runs import rollout_files
from groupwise.runs.metrics_log import METRICS, read_metrics
from groupwise.runs.run_files import RunFiles
from groupwise.utils import files
from groupwise.viewer import health, questions, replays
from groupwise.viewer.comparison import pair
from groupwise.viewer.groups import prompt_of, token_columns
from groupwise.viewer.metric_columns import Metrics
from groupwise.viewer.pages import Pages
from groupwise.viewer.sources import open_source, open_sources


def pages_of(*paths: Path) -> Pages:
    pages = Pages(open_sources(paths))
    for index in pages.indexes:
        index.refresh()
    return pages


@pytest.fixture(scope="module")
def pages(run_folder: Path) -> Pages:
    return pages_of(run_folder)


def test_a_flag_that_waits_for_many_steps_is_raised_too() -> None:
    """A critic gets 20 steps before it is said to explain nothing; flags are means over the last ten."""
    metrics = Metrics(None)
    for step in range(1, 25):
        metrics.add({"step": step, "value/explained": 0.0})
    assert [flag["title"] for flag in health.flags(metrics.history())] == ["The critic explains nothing"]


def test_the_newest_step_opens_on_its_most_informative_group(pages: Pages, made: Any) -> None:
    step = pages.answer("step", {"run": "0"})
    assert step["step"] == 40
    spreads = {g: float(np.std(group.reward)) for g, group in enumerate(made.make_step(40).groups)}
    assert [group["spread"] for group in step["groups"]] == sorted(spreads.values(), reverse=True)
    assert step["groups"][0]["group"] == max(spreads, key=lambda g: spreads[g])
    assert step["groups"][-1]["spread"] == 0.0


def test_a_group_holds_every_token_with_its_numbers(pages: Pages, made: Any) -> None:
    written = made.make_step(7)
    shown = pages.answer("group", {"run": "0", "step": "7", "group": "1"})
    group = written.groups[1]
    assert shown["prompt"] == [group.prompt.text, "", ""]
    assert shown["row"] == dict(group.prompt.row)
    for i, completion in enumerate(shown["completions"]):
        rollout = group.rollouts[i]
        assert "".join(completion["tokens"][:-1]) == rollout.text
        assert completion["tokens"][-1] == "<|end|>"
        assert completion["special"] == [len(rollout) - 1]
        columns = completion["columns"]
        ratio = np.exp(written.columns["last_logp"][1][i] - rollout.behavior_logp)
        np.testing.assert_allclose(columns["push"], written.advantages[1][i] * ratio, rtol=2e-3)
        np.testing.assert_allclose(
            columns["kl"], written.current_logp[1][i] - group.signals["reference_logp"][i], rtol=2e-2, atol=1e-4
        )
        np.testing.assert_allclose(columns["mismatch"], 1e-4, atol=1e-6)
        np.testing.assert_allclose(columns["entropy"], written.columns["entropy"][1][i], rtol=1e-3)
        assert columns["version"] == [7] * len(rollout)
    assert set(shown["quantities"]) == {"push", "logp", "entropy", "kl", "mismatch", "gradient", "version"}


def test_shares_of_the_gradient_sum_to_one_and_are_0_where_clipped(pages: Pages) -> None:
    shown = pages.answer("group", {"run": "0", "step": "7", "group": "1"})
    parts = [completion["columns"] for completion in shown["completions"]]
    assert sum(sum(columns["gradient"]) for columns in parts) == pytest.approx(1.0, rel=1e-2)
    cut = [(share, clipped) for columns in parts for share, clipped in zip(columns["gradient"], columns["clipped"], strict=True)]
    assert any(clipped for _, clipped in cut)
    assert all(share == 0.0 for share, clipped in cut if clipped == 1.0)


def test_quantities_that_were_not_recorded_have_no_column() -> None:
    row = {"completion_ids": [1, 2], "behavior_logp": [-1.0, -2.0], "trained": [True, True], "version": [0, 0]}
    assert set(token_columns(row)) == {"logp", "behavior", "version"}


def test_long_completions_come_in_parts_that_fit_together(made: Any, tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) for i in range(5000))
    opened = pages_of(made.make_run(tmp_path / "long", 1, texts=[text]))
    first = opened.answer("group", {"run": "0", "step": "1", "group": "1"})["completions"][0]
    said, ids = list(first["tokens"]), list(first["ids"])
    assert len(said) < 5000
    while len(said) < first["length"]:
        more = opened.answer("more", {"run": "0", "step": "1", "group": "1", "index": "0", "begin": str(len(said))})
        said += more["tokens"]
        ids += more["ids"]
    assert "".join(said) == text + "<|end|>"
    assert ids[-1] == 256


def test_curves_are_the_metrics_and_long_runs_are_thinned(run_folder: Path) -> None:
    lines = read_metrics(run_folder)
    shown = Pages(open_sources([run_folder])).answer("curves", {"run": "0"})
    assert shown["steps"] == [line["step"] for line in lines]
    np.testing.assert_allclose(shown["values"]["reward"], [line["reward"] for line in lines], rtol=1e-5)
    assert shown["values"]["kl"][0] is None
    assert shown["tokens"][-1] == 4000
    assert shown["seconds"][:2] == [0.0, 10.0]
    few = Pages(open_sources([run_folder]), points=10).answer("curves", {"run": "0", "names": "reward"})
    assert list(few["values"]) == ["reward"]
    assert few["steps"] == list(range(4, 41, 4))
    np.testing.assert_allclose(few["values"]["reward"][0], np.mean([line["reward"] for line in lines[:4]]), rtol=1e-5)


def test_metrics_follow_a_file_that_grows_and_one_that_is_replaced(made: Any, tmp_path: Path) -> None:
    folder = made.make_run(tmp_path / "growing", 2)
    metrics = open_source(folder).metrics()
    made.add_step(folder, 3)
    with open(folder / METRICS, "a") as file:
        file.write('{"step": 4, "rew')  # half a line: the run is writing it
    assert list(metrics.refresh().steps) == [1, 2, 3]
    with open(folder / METRICS, "a") as file:
        file.write('ard": 0.5}\nnot json\n')
    assert list(metrics.refresh().steps) == [1, 2, 3, 4]
    assert math.isnan(metrics.values["entropy"][3])
    whole = (folder / METRICS).read_text().splitlines()[0]
    files.write(folder / METRICS, (whole + "\n").encode())
    assert list(metrics.refresh().steps) == [1]


def test_a_resumed_run_takes_steps_away(made: Any, tmp_path: Path) -> None:
    folder = made.make_run(tmp_path / "resumed", 6)
    opened = pages_of(folder)
    rollout_files.cut(RunFiles(folder), rollout_files.ROLLOUTS, 3)
    opened.indexes[0].refresh()
    assert opened.indexes[0].read == 3
    assert opened.answer("step", {"run": "0"})["step"] == 3


def test_a_prompt_through_training_is_every_visit_in_order(pages: Pages, made: Any) -> None:
    group = pages.answer("group", {"run": "0", "step": "7", "group": "1"})
    visits = pages.answer("visits", {"run": "0", "key": group["key"]})["visits"]
    expected = [n for n in range(1, 41) if any(g.prompt.text == group["prompt"][0] for g in made.make_step(n).groups)]
    assert [visit["step"] for visit in visits] == expected
    there = next(visit for visit in visits if visit["step"] == 7)
    assert there["rewards"] == pytest.approx([completion["reward"] for completion in group["completions"]])


def search(pages: Pages, **asked: Any) -> list[dict[str, Any]]:
    matches: list[dict[str, Any]] = []
    cursor: Any = ""
    while cursor is not None:
        answer = pages.answer("search", {"run": "0", "cursor": str(cursor), **{key: str(value) for key, value in asked.items()}})
        matches += answer["matches"]
        cursor = answer["next"]
    return matches


@pytest.mark.slow
def test_search_finds_all_of_it_and_nothing_else(pages: Pages, made: Any) -> None:
    every = [
        (n, g, i, r, group.reward[i])
        for n in range(1, 41)
        for g, group in enumerate(made.make_step(n).groups)
        for i, r in enumerate(group.rollouts)
    ]
    place = lambda rows: sorted((row["step"], row["group"], row["index"]) for row in rows)  # noqa: E731
    assert place(search(pages)) == sorted(row[:3] for row in every)
    assert place(search(pages, text="THEREFORE 777")) == sorted(row[:3] for row in every if "therefore 777" in row[3].text)
    assert place(search(pages, low=0.5, high=1.0)) == sorted(row[:3] for row in every if 0.5 <= row[4] <= 1.0)
    assert place(search(pages, prompt="3 + 3", first=5, last=9)) == sorted(
        row[:3] for row in every if "3 + 3" in row[3].prompt.text and 5 <= row[0] <= 9
    )
    assert search(pages, finish="length") == []
    assert search(pages, text=".*") == [], "a text, not a pattern"
    assert all(row["value"] == 1.0 for row in search(pages, function="format", low=1, first=30))
    assert all(row["prompt"] for row in search(pages, first=40))


def test_a_search_answers_in_time_and_says_where_to_go_on(pages: Pages, made: Any) -> None:
    source, index = pages.sources[0], pages.indexes[0]
    first = questions.search(source, index, questions.SearchQuery(text="nowhere to be found"), seconds=0.0)
    assert first == {"matches": [], "next": 39, "seen": 1, "left": 39}
    second = questions.search(source, index, questions.SearchQuery(text="nowhere to be found"), cursor=39, seconds=0.0)
    assert second["next"] == 38


def test_search_shows_the_answer_of_the_row() -> None:
    assert [questions._gold(row) for row in ('{"answer": 4, "x": 1}', '{"solution": "5"}', '{"x": 1}', "[1]", None)] == [
        "4",
        "5",
        "",
        "",
        "",
    ]


def test_metrics_come_by_subject_and_the_first_ones_first(pages: Pages) -> None:
    run = pages.answer("runs", {"run": "0"})["runs"][0]
    families = pages.answer("health", {"run": "0"})["families"]
    assert set(run["first"]) <= set(run["metrics"])
    assert families[0]["title"] == "The run"
    assert set(families[0]["names"]) <= set(run["first"])
    names = [name for family in families for name in family["names"]]
    assert sorted(names) == sorted(name for name in run["metrics"] if not name.endswith("/half_width"))


def test_the_keys_that_a_recipe_sets_are_told_apart(trained: Path) -> None:
    shown = pages_of(trained).answer("config", {"run": "0"})
    assert {"objective", "name", "group.group_size", "optimizer.lr", "eval.at_start"} <= set(shown["set"])
    assert not {"group.beta", "rollout.temperature", "save.keep", "eval.prompts"} & set(shown["set"])
    assert {"rewards.0.function", "rewards.0.timeout"} & shown["config"].keys() & set(shown["set"]) == {"rewards.0.function"}


def test_lenses_show_conflicts_and_duplicates(pages: Pages) -> None:
    shown = pages.answer("lenses", {"run": "0", "first": "1", "last": "10"})
    points = shown["points"]
    source = pages.sources[0]
    for conflict in shown["conflicts"]:
        for step, group, index in conflict["places"]:
            rows = source.table(step).to_pylist()
            row = next(row for row in rows if (row["group"], row["index"]) == (group, index))
            assert row[f"rewards/{conflict['high']}"] == 1.0
            assert row[f"rewards/{conflict['low']}"] == 0.0
    assert shown["conflicts"]
    assert len(points["reward"]) == len(points["length"]) == 120


def test_compare_pairs_groups_by_their_prompt(run_folder: Path, other_folder: Path) -> None:
    pages = pages_of(run_folder, other_folder)
    shown = pages.answer("compare", {"run": "0", "other": "1", "step": "5", "with": "5"})
    assert len(shown["pairs"]) == 3, "the same prompts at the same step"
    moved = [abs(pair["right"]["mean"] - pair["left"]["mean"]) for pair in shown["pairs"]]
    assert moved == sorted(moved, reverse=True)
    assert "Mean reward on the 3 prompts that both answered at step 5" in shown["difference"][0]
    within = pages.answer("compare", {"run": "0", "with": "40"})
    assert within["difference"] and "single run" not in within["difference"][-1], "there is one run"
    assert within["near"]
    assert within["step"] == within["near"][0][0]
    assert within["pairs"]


def test_compare_takes_held_out_prompts_where_no_prompt_was_visited_twice(made: Any, tmp_path: Path) -> None:
    folder = made.make_run(tmp_path / "once", 4, prompts=1000)
    earlier = Step(number=0, metrics={}, groups=made.make_step(4).groups)
    rollout_files.write(RunFiles(folder), rollout_files.EVALUATIONS, earlier, folder.name)
    shown = pages_of(folder).answer("compare", {"run": "0"})
    assert shown["kind"] == "evaluation"
    assert len(shown["pairs"]) == shown["left"] == shown["right"] > 0


def evaluated_at(folder: Path, made: Any, steps: dict[int, float]) -> Path:
    """A run with evaluations of the same 3 prompts, all of whose rewards are one number."""
    made.make_run(folder, 4, evaluated=False, groups=3, prompts=1000)
    for step, reward in steps.items():
        groups = [replace(group, reward=np.full(4, reward)) for group in made.make_step(4, groups=3).groups]
        evaluation = Step(number=step, metrics={}, groups=groups)
        rollout_files.write(RunFiles(folder), rollout_files.EVALUATIONS, evaluation, folder.name)
    return folder


@pytest.mark.parametrize(
    ("left", "right", "compared"),
    [
        ({0: 0.1, 3: 0.4}, {0: 0.1, 3: 0.9}, ("evaluation", 3, 3)),
        ({0: 0.1, 2: 0.3, 4: 0.5}, {0: 0.1, 2: 0.8}, ("evaluation", 2, 2)),
        ({1: 0.4}, {2: 0.9}, ("evaluation", 1, 2)),
        ({}, {4: 0.9}, ("training", 4, 4)),
    ],
    ids=["both at the end", "one went on", "at other steps", "one without evaluations"],
)
def test_two_runs_are_compared_as_far_trained_as_each_other(
    made: Any, tmp_path: Path, left: dict[int, float], right: dict[int, float], compared: tuple[str, int, int]
) -> None:
    pages = pages_of(evaluated_at(tmp_path / "one", made, left), evaluated_at(tmp_path / "two", made, right))
    shown = pages.answer("compare", {"run": "0", "other": "1"})
    assert (shown["kind"], shown["step"], shown["with"]) == compared


def test_a_comparison_of_prompts_is_paired() -> None:
    """Prompts differ far more than the runs do: the mean of the differences knows, a difference of means would not."""
    lefts = [{"a": 0.0, "b": 0.5, "c": 0.9, "d": 0.3}]
    found = pair(lefts, [{"a": 0.1, "b": 0.6, "c": 0.94, "e": 0.3}], (4, 4))
    gains = np.array([0.1, 0.1, 0.04])
    assert found is not None and found.prompts == 3
    assert (found.left, found.right, found.over_prompts.mean) == pytest.approx((1.4 / 3, 1.64 / 3, 0.08))
    assert found.over_prompts.half == pytest.approx(1.959964 * gains.std(ddof=1) / math.sqrt(3))
    assert pair(lefts, [{"e": 0.3}], (4, 4)) is None
    one = pair(lefts, [{"a": 0.3}], (4, 4))
    assert one is not None and math.isnan(one.over_prompts.half), "one prompt has no interval"


def test_flags_say_what_was_measured() -> None:
    raised = health.flags([{"completions/clipped_ratio": 0.9, "reward": math.nan}])
    assert raised[1]["meaning"].startswith("90%")
    assert [flag["metric"] for flag in raised] == ["reward", "completions/clipped_ratio"]
    assert health.flags([{"entropy": 1.0}]) == []


def test_every_answer_is_json(pages: Pages) -> None:
    for name in pages.known.keys() - {"replay"}:  # the steps of a made-up run cannot be computed again
        asked = {"run": "0", "step": "7", "group": "1", "index": "0", "begin": "2", "key": "x"}
        json.dumps(pages.answer(name, asked), allow_nan=False)


# ---------------------------------------------------------------- other people's files


def test_verifiers_traces_become_groups_of_conversations(tmp_path: Path) -> None:
    said = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "2"},
    ]
    rows = [
        {
            "example_id": n % 2,
            "prompt": [{"role": "user", "content": f"q{n % 2}"}],
            "completion": said,
            "reward": n / 4,
            "metrics": {"exact": n / 4, "length": 3.0},
            "is_truncated": n == 3,
        }
        for n in range(4)
    ]
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    pages = pages_of(path)
    step = pages.answer("step", {"run": "0"})
    assert [len(group["rewards"]) for group in step["groups"]] == [2, 2]
    group = pages.answer("group", {"run": "0", "step": "0", "group": "1"})
    assert group["prompt"] == ["q1", "", ""]
    assert [completion["reward"] for completion in group["completions"]] == [0.25, 0.75]
    assert group["completions"][1]["finish"] == "length"
    assert group["completions"][0]["messages"] == said
    assert group["functions"] == ["exact", "length"]


def test_any_parquet_of_completions_is_shown(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"global_step": [1, 1, 2], "input": ["p", "p", "q"], "output": ["a", "b", "c"], "score": [0.0, 1.0, 0.5]}),
        tmp_path / "verl.parquet",
    )
    pages = pages_of(tmp_path / "verl.parquet")
    assert pages.answer("runs", {})["runs"][0]["newest"] == 2
    step = pages.answer("step", {"run": "0", "step": "1"})
    assert step["groups"][0]["rewards"] == [0.0, 1.0]
    assert pages.answer("group", {"run": "0", "step": "1", "group": "0"})["completions"][1]["text"] == "b"
    assert search(pages, text="c")[0]["step"] == 2


def test_the_reward_of_a_file_is_its_own_or_the_sum_of_its_functions(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "completion": "a", "rewards/exact": 1.0, "rewards/short": 0.25},
        {"prompt": "p", "completion": "b", "rewards/exact": 1.0, "reward": 0.5},
        {"prompt": "p", "completion": "c", "reward": {"exact": 0.0, "short": None}},
        {"prompt": "p", "completion": "d"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    step = pages_of(tmp_path / "rows.jsonl").answer("step", {"run": "0"})
    assert step["groups"][0]["rewards"] == [1.25, 0.5, 0.0, None]
    assert step["functions"] == {"exact": pytest.approx(2 / 3), "short": 0.25}


@pytest.mark.parametrize("name", ["rows.ndjson", "ROWS.JSONL", "rows.JSON"])
def test_endings_are_read_as_training_reads_them(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"prompt": "p", "completion": "a"}\n')
    assert pages_of(tmp_path / name).answer("step", {"run": "0"})["completions"] == 1


def test_a_step_of_a_run_is_a_file_of_completions_too(run_folder: Path) -> None:
    pages = pages_of(run_folder / "rollouts/000007.parquet")
    assert pages.answer("step", {"run": "0"})["completions"] == 12


def test_half_a_last_line_is_left_out_and_a_bad_one_before_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "completion": "a", "reward": 1}\n{"prompt": "p", "compl')
    assert pages_of(path).answer("step", {"run": "0"})["completions"] == 1
    path.write_text('{"prompt"\n{"prompt": "p", "completion": "a"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no JSON"):
        open_source(path)


def test_rows_without_a_completion_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever else is wrong with a file of completions, as much of it as can be is shown."""
    path = tmp_path / "rows.jsonl"
    odd = '{"prompt": "p", "completion": "half \\ud83d"}\r\n{"foo": 1}\n[1, 2]\n'
    path.write_bytes(b"\xef\xbb\xbf" + odd.encode() + b'{"completion": "\xff"}\n')
    assert pages_of(path).answer("step", {"run": "0"})["completions"] == 2
    assert "2 of 4 rows hold no completion, and are left out" in caplog.text
    for text, has in (('{"foo": 1}', "it has foo"), ("[1, 2]", "its rows are no JSON objects")):
        path.write_text(text + "\n")
        with pytest.raises(DataError, match=f"no column that could be a completion [^;]*; {has}"):
            open_source(path)


def test_what_is_no_run_is_refused_with_a_remedy(tmp_path: Path, run_folder: Path) -> None:
    with pytest.raises(DataError, match="no run folder"):
        open_source(tmp_path)
    with pytest.raises(DataError, match="there are runs in it: alpha"):
        open_source(run_folder.parent)
    with pytest.raises(DataError, match=r"there is no .*nothing"):
        open_source(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("plain")
    with pytest.raises(DataError, match="neither a run folder nor a file that ends in"):
        open_source(tmp_path / "notes.txt")
    (tmp_path / "numbers.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="could be a completion"):
        open_source(tmp_path / "numbers.jsonl")


def test_a_folder_of_stages_is_its_stages(run_folder: Path) -> None:
    assert [source.name for source in open_sources([run_folder.parent])] == ["alpha"]


# ---------------------------------------------------------------- where the work goes


def test_the_table_of_work_is_the_mean_of_the_last_steps(pages: Pages) -> None:
    rows = {row["metric"]: row for row in pages.answer("health", {"run": "0"})["work"]}
    assert rows["flops/per_second"]["value"] == 2.5e6
    assert rows["time/update"]["share"] == 0.75
    assert health.work([{"time/waiting/rank0": 1.0, "time/rollout": 1.0}])[0]["share"] == 1.0, "waiting is a part of the phases"
    assert health.work([{"loss": 1.0}]) == []


# ---------------------------------------------------------------- replays


def test_what_the_viewer_offers_to_change_may_be_changed() -> None:
    offered = replays.offered()
    changes = [f"group.{kind}.name={name}" for kind, names in offered["parts"].items() for name in names]
    changes += [f"objective={name}" for name in offered["objectives"]] + ["group.beta=0.04", "group.surrogate.high=-1e-3"]
    assert replays.checked("; ".join(changes)) == changes


@pytest.mark.parametrize(
    "change",
    [
        "objective=os:system",
        "objective=my_code:row",
        "group.surrogate=evil:loss",
        "group.surrogate={name: 'a:b'}",
        "rewards.0.function=evil.py:f",
        "model.path=/etc",
        "group.weights=a:b",
        "optimizer.lr=1",
        "group.surrogate.high=__import__('os')",
        "runs=/tmp",
        "--reach",
        "group.beta=$(id)",
    ],
)
def test_a_replay_changes_nothing_but_what_is_listed(pages: Pages, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays.subprocess, "run", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(DataError, match="a replay in the viewer changes objectives and parts"):
        pages.answer("replay", {"run": "0", "step": "7", "group": "1", "set": change})


@pytest.mark.parametrize("config", ["objective: mine:row\n", "objective: grpo\ngroup: {surrogate: {name: 'mine:loss'}}\n"])
def test_a_recipe_with_code_of_its_own_is_not_replayed(
    made: Any, tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = pages_of(made.make_run(tmp_path / "own", 2, config=config))
    monkeypatch.setattr(replays.subprocess, "run", lambda *_, **__: pytest.fail("something was started"))
    assert opened.answer("runs", {})["runs"][0]["replay"] is None
    with pytest.raises(DataError, match="names code of the run's own"):
        opened.answer("replay", {"run": "0", "step": "2", "group": "1"})


@pytest.fixture
def started_at_once(forked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays without an interpreter's start; tests/viewer/test_browser.py has one with it."""
    monkeypatch.setattr(replays, "COMMAND", shlex.split(forked.command))


@pytest.mark.slow
@pytest.mark.usefixtures("started_at_once")
def test_a_replayed_group_holds_the_closed_form_of_the_recorded_and_the_changed(trained: Path) -> None:
    from groupwise.inspection.replay import replay

    opened = pages_of(trained)
    place = opened.answer("step", {"run": "0", "step": "2"})["groups"][0]["group"]
    asked = {"run": "0", "step": "2", "group": str(place)}
    plain = opened.answer("replay", asked)
    changed = opened.answer("replay", {**asked, "set": "objective=dr_grpo;group.surrogate.high=0.3"})
    expected = replay(trained, 2, ["objective=dr_grpo", "group.surrogate.high=0.3"], model=False)
    assert expected.changed is not None
    for answer, outcome in ((plain, expected.again), (changed, expected.changed)):
        columns = [-column for column in outcome.column("gradient")[place]]
        total = sum(np.abs(column).sum() for column in columns)
        assert total > 0
        for completion, column in zip(answer["completions"], columns, strict=True):
            np.testing.assert_allclose(completion["replay"], column / total, rtol=2e-3, atol=1e-9)
    assert plain["loss"][0] == pytest.approx(expected.again.loss, rel=1e-9)
    assert changed["loss"] == pytest.approx([expected.again.loss, expected.changed.loss], rel=1e-9)
    assert changed["algorithm"].startswith("dr_grpo: ")
    one = changed["completions"][0]
    np.testing.assert_allclose(one["change"], np.array(one["replay"]) - np.array(one["recorded"]), atol=2e-4)
    assert plain["completions"][0]["change"] is None
    # What the page shows without a replay is the size of the same, which the run recorded.
    shown = opened.answer("group", asked)
    for completion, own in zip(plain["completions"], shown["completions"], strict=True):
        np.testing.assert_allclose(np.abs(completion["replay"]), own["columns"]["gradient"], atol=2e-4)
    before = replays.computed.cache_info().misses
    opened.answer("replay", asked)
    assert replays.computed.cache_info().misses == before, "from memory"


@pytest.mark.slow
@pytest.mark.usefixtures("started_at_once")
def test_what_the_recipe_refuses_is_said(trained: Path) -> None:
    with pytest.raises(DataError, match=r"high"):
        pages_of(trained).answer("replay", {"run": "0", "step": "2", "group": "0", "set": "group.surrogate.high=-3"})
    with pytest.raises(DataError, match="no group 99"):
        pages_of(trained).answer("replay", {"run": "0", "step": "2", "group": "99"})


# ---------------------------------------------------------------- episodes


def test_an_episode_is_shown_turn_by_turn(made: Any, tmp_path: Path) -> None:
    opened = pages_of(made.make_episodes(tmp_path / "episodes"))
    one, other = opened.answer("group", {"run": "0", "step": "1", "group": "0"})["completions"]
    turns = one["episode"]["turns"]
    texts = ["".join(one["tokens"][turn["begin"] : turn["end"]]) for turn in turns]
    assert texts == ["call add and divide", "the answer is 4"]
    assert "".join(one["tokens"][turns[0]["end"] : turns[1]["begin"]]) == "[4]"
    assert one["untrained"] == list(range(turns[0]["end"], turns[1]["begin"]))
    assert [(call["name"], call["seconds"], call["failure"]) for call in turns[0]["calls"]] == [
        ("add", 0.25, ""),
        ("divide", 0.5, "exception"),
    ]
    assert (turns[0]["truncated"], turns[0]["seconds"], turns[1]["reward"]) == (True, 1.0, 1.0)
    (branch,) = other["episode"]["branches"]
    assert (branch["begin"], branch["context"]) == (other["episode"]["turns"][1]["begin"], 11)
    assert other["finish"] == other["episode"]["turns"][1]["finish"] == "deadline"


def test_an_episode_of_an_agent_says_what_is_trained_and_what_it_left(made: Any, tmp_path: Path) -> None:
    opened = pages_of(made.make_agents(tmp_path / "agents"))
    one, other = opened.answer("group", {"run": "0", "step": "1", "group": "0"})["completions"]
    turns = one["episode"]["turns"]
    assert [(turn["side"], turn["agent"], turn["wishes"]) for turn in turns] == [
        (True, 0, []),
        (False, 0, ["web_search"]),
        (False, 1, []),
    ]
    assert "".join(one["tokens"][place] for place in one["untrained"]) == "A title[x = 1]"
    contexts = [(branch["begin"], branch["text"]) for branch in one["episode"]["branches"]]
    assert contexts == [(0, "Name it."), (turns[1]["begin"], "Repair it.")]
    assert one["episode"]["left"] == {
        "files": [["gone.py", None], ["new.py", "z = 3\n"], ["solution.py", "x = 2\n"]],
        "output": "all checks pass",
    }
    assert other["episode"]["left"] == {"files": [], "output": ""}


def test_long_texts_of_an_episode_are_cut(made: Any, tmp_path: Path) -> None:
    opened = pages_of(made.make_episodes(tmp_path / "long", texts=["x" * 50_000]))
    turn = opened.answer("group", {"run": "0", "step": "1", "group": "0"})["completions"][0]["episode"]["turns"][0]
    assert len(turn["answer"]) == len(turn["calls"][0]["result"]) == 6000
    opened = pages_of(made.make_agents(tmp_path / "agents", texts=["a" * 9000 + "b" * 3000]))
    left = opened.answer("group", {"run": "0", "step": "1", "group": "0"})["completions"][0]["episode"]["left"]
    assert left["output"] == "a" * 1000 + "b" * 3000


EASY, HARD = " The number is between 1 and 8.", " The number is between 1 and 9."


def test_a_prompt_is_shown_as_the_policy_saw_it(made: Any, tmp_path: Path) -> None:
    """What an environment's `reset` added is a part of the prompt in the group, the list, the search and for comparisons."""
    opened = pages_of(made.make_game(tmp_path / "game", "<Guess.{}>", [EASY, HARD]))
    group = opened.answer("group", {"run": "0", "step": "1", "group": "0"})
    assert group["prompt"] == ["<Guess.", EASY, ">"]
    assert [one["episode"]["branches"] for one in group["completions"]] == [[], []], "nothing was split"
    listed = opened.answer("step", {"run": "0", "step": "1"})["groups"]
    assert sorted(one["prompt"] for one in listed) == [f"<Guess.{EASY}>", f"<Guess.{HARD}>"]
    assert len({one["key"] for one in listed}) == 2, "two games are two prompts"
    matches = opened.answer("search", {"run": "0", "prompt": "and 9"})["matches"]
    assert {(one["group"], one["prompt"]) for one in matches} == {(1, f"<Guess.{HARD}>")}
    assert opened.answer("search", {"run": "0", "prompt": "and 7"})["matches"] == []
    visits = opened.answer("visits", {"run": "0", "key": group["key"]})["visits"]
    assert [(visit["step"], visit["group"]) for visit in visits] == [(1, 0)]


def test_an_opening_of_one_completion_alone_stands_with_it(made: Any, tmp_path: Path) -> None:
    opened = pages_of(made.make_game(tmp_path / "game", "<Guess.{}>", [(EASY, HARD)]))
    one, other = opened.answer("group", {"run": "0", "step": "1", "group": "0"})["completions"]
    assert ("opening" in one, other["opening"]) == (False, HARD)


@pytest.mark.parametrize(
    ("episode", "parts"),
    [
        ({"opening": " Go.\n", "prompt_text": "<Play. Go.>"}, ("<Play. ", "Go.", ">")),
        ({"opening": "", "prompt_text": "<Another.>"}, ("<Another.>", "", "")),
        ({"opening": "", "prompt_text": ""}, ("<Play.>", "", "")),
        ({"opening": "Go.", "prompt_text": "<Go. Go.>"}, ("<Go. ", "Go.", ">")),
        ({}, ("<Play.>", "", "")),
        ({"opening": 3, "prompt_text": [1]}, ("<Play.>", "", "")),
    ],
    ids=["blanks taken away", "of a harness", "without reset", "said before", "of an older run", "made up"],
)
def test_the_parts_of_a_prompt(episode: dict[str, Any], parts: tuple[str, str, str]) -> None:
    found = prompt_of({"prompt_text": "<Play.>", "episode": json.dumps(episode)})
    assert (found.before, found.added, found.behind) == parts


@pytest.mark.slow
def test_the_large_run_of_the_benchmark_is_a_run(made: Any, tmp_path: Path) -> None:
    """`benchmarks/viewer.py` makes one of 640,000 completions; its files have the columns that a run writes today."""
    pages = pages_of(made.make_large(tmp_path / "large", 201, groups=2, size=3, tokens=5))
    shown = pages.answer("group", {"run": "0", "step": "150", "group": "1"})
    assert len(shown["completions"]) == 3


def test_many_runs_are_opened_and_only_the_one_that_is_looked_at_is_read(made: Any, tmp_path: Path) -> None:
    """200 runs and 1,024 descriptors: no file stays open, no thread waits, no log is read to its end."""
    first = made.make_run(tmp_path / "run000", 3)
    for number in range(1, 32):
        shutil.copytree(first, tmp_path / f"run{number:03d}")
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    pages = Pages(open_sources(sorted(tmp_path.glob("run*"))))
    pages.start()
    try:
        runs = pages.answer("runs", {"run": "7"})["runs"]
        assert [run["run"] for run in runs if not run.get("brief")] == [0, 7]
        assert runs[30]["brief"]
        assert (runs[30]["state"], runs[30]["last"]) == ("finished", 3)
        assert "reward" in runs[30]["metrics"]
        assert not pages.sources[30]._metrics.steps
        assert threading.active_count() <= before[0] + 2
        assert pages.answer("step", {"run": "30"})["step"] == 3
        assert not pages.answer("pulse", {})["runs"][30].get("brief"), "once looked at"
        assert len(os.listdir("/proc/self/fd")) <= before[1] + 2
    finally:
        pages.stop()
