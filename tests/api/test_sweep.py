"""Sweeps: several runs of one recipe, as processes, interrupted and resumed; and their comparison."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas
import pytest
from finished import train_sums
from scipy import stats

import groupwise as gw
from groupwise.api.sweep import settings, tags_of
from groupwise.cli.commands import main
from groupwise.errors import ConfigError, DataError
from groupwise.runs.lock import in_use
from groupwise.runs.metrics_log import read_metrics
from groupwise.utils import statistics
from groupwise.utils.statistics import Estimate
from groupwise.viewer.comparison import PairedDifference, paired_difference, verdict
from groupwise.viewer.seeds import read_group

RECIPE = """\
objective: grpo
name: mine
threads: 1
steps: 4
model: {scratch: {hidden: 16, layers: 1, context: 64, tokenizer: bytes}}
data: {path: rows.jsonl, eval_fraction: 0.5}
rewards: ["my_rewards.py:digits"]
group: {prompts_per_step: 2, group_size: 2}
rollout: {max_new_tokens: 4}
eval: {k: 2, every: 2}
save: {every: 1}
"""
REWARDS = """\
def digits(completions, **_):
    return [sum(character.isdigit() for character in text) / 4 for text in completions]
"""

FAILING = """\
def digits(completions, threshold=0, **_):
    if threshold:
        raise ValueError("not today")
    return [0.5 for _ in completions]
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "my.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- what is run


@pytest.mark.parametrize(
    ("seeds", "sweeps", "message"),
    [
        (None, ["optimizer.lr"], "KEY=VALUE,VALUE"),
        (None, ["optimizer.lr=1e-6,"], "KEY=VALUE,VALUE"),
        (None, ["optimizer.lr=1e-6", "optimizer.lr=1e-5"], "names optimizer.lr twice"),
        (2, ["seed=1,2"], "the same thing"),
        (None, ["name=a,b"], "follow from their settings"),
        (None, ["rollout.stop=[a/b],[a:b]"], "two runs of the sweep would have the folder"),
        (None, ["data.system=" + 300 * "x"], "make a folder name of 312 characters"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(seeds: int | None, sweeps: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings("mine", 0, seeds, sweeps)


def test_keys_with_one_last_name_stand_whole_in_the_names() -> None:
    found = settings("mine", 5, None, ["optimizer.lr=1e-6", "critic.lr=1e-5", "group.group_size=2,4"])
    assert [one.name for one in found] == [
        "mine-optimizer.lr=1e-6-critic.lr=1e-5-group_size=2",
        "mine-optimizer.lr=1e-6-critic.lr=1e-5-group_size=4",
    ]


def test_an_apostrophe_inside_a_value_is_no_quote() -> None:
    found = settings("mine", 0, None, ["data.system=it's,that", "data.template='a,b'"])
    assert [one.overrides[0] for one in found] == ["data.system=it's", "data.system=that"]


def test_every_run_is_checked_before_the_first_starts(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "my.yaml", "--sweep", "group.group_size=2,1"]) == ConfigError.exit_code
    assert "group_size" in capsys.readouterr().err
    assert not (there / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "2", "--fresh"], "another name"),
        (["--seeds", "2", "--print-config"], "--print-config is about one run"),
        (["--sweep", "seed=1,2", "--dry-run", "--world", "2"], "--world is about one run"),
        (["--seeds", "2", "--dry-run", "--model-config", "c.json"], "--model-config is about one run"),
        (["--at-once", "2", "--print-config"], "add one of them"),
        (["--at-once", "2"], "add one of them"),
        (["optimizer.lr=1e-5", "--sweep", "optimizer.lr=1e-6"], "optimizer.lr is swept"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    there: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "my.yaml", *options]) == ConfigError.exit_code
    assert message in capsys.readouterr().err


def test_a_dry_run_lists_the_runs(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "my.yaml", "seed=7", "--seeds", "2", "--sweep", "optimizer.lr=1e-6,3e-6", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs/mine-lr=1e-6-seed=7: optimizer.lr=1e-6 seed=7" and len(lines) == 4


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_data_of_every_setting_are_read_before_the_first_run_starts(
    there: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["--sweep", "data.columns={prompt: prompt},{prompt: question}", "--seeds", "2", *options]
    assert main(["train", "my.yaml", *sweep]) == DataError.exit_code
    shown = capsys.readouterr()
    assert "question" in shown.err and "before any run of the sweep started" in shown.err
    assert "begun" not in shown.out and not (there / "runs").exists()


def test_tags_of_a_setting_are_one_for_each_key() -> None:
    (setting, _) = settings("mine", 0, None, ["optimizer.betas=[0.9, 0.95],[0.9, 0.99]"])
    long = settings("mine", 0, None, [f"data.system={100 * 'x'}"])[0]
    assert tags_of(setting) == "optimizer.betas=[0.9; 0.95]"
    assert len(tags_of(long)) == 64


# ---------------------------------------------------------------- processes


def started(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "groupwise", "train", "my.yaml", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def wait_for_step(folder: Path, step: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if (folder / "metrics.jsonl").exists() and any(line["step"] >= step for line in read_metrics(folder)):
            return
        time.sleep(0.1)
    raise AssertionError(f"{folder} did not reach step {step}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_ended_early_continues(there: Path, number: signal.Signals) -> None:
    """Its runs end with it, save what they have, and the same command does the rest."""
    options = ("steps=60", "eval.every=60", "--seeds", "2", "--at-once", "2")
    with started(*options) as sweep:
        for seed in (0, 1):
            wait_for_step(there / f"runs/mine-seed={seed}", 2)
        sweep.send_signal(number)
        sweep.wait(120)
    end = time.monotonic() + 60
    while any(in_use(there / f"runs/mine-seed={seed}") for seed in (0, 1)) and time.monotonic() < end:
        time.sleep(0.1)
    done = [read_metrics(there / f"runs/mine-seed={seed}")[-1]["step"] for seed in (0, 1)]
    assert max(done) < 60
    with started(*options) as sweep:
        assert sweep.wait(300) == 0
    for seed in (0, 1):
        steps = [line["step"] for line in read_metrics(there / f"runs/mine-seed={seed}") if "loss" in line]
        assert steps == list(range(1, 61)), "each step once"


@pytest.mark.slow
def test_a_sweep_whose_output_cannot_be_written_ends_its_runs_in_words(there: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A folder stands in the place of the second run's output; the first run ends behind its step."""
    log = there / "runs" / "mine-seed=1.log"
    log.mkdir(parents=True)
    with started("steps=60", "eval.every=60", "--seeds", "2", "--at-once", "2") as sweep:
        assert sweep.wait(120) != 0
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert f"cannot write the output of a run to {log.relative_to(there)}" in said
    assert "the same command resumes what is left of the sweep" in said
    assert not in_use(there / "runs/mine-seed=0")


@pytest.mark.slow
def test_a_run_that_fails_does_not_end_the_others(there: Path) -> None:
    (there / "my_rewards.py").write_text(FAILING)
    (there / "my.yaml").write_text(
        RECIPE.replace('"my_rewards.py:digits"', '{function: "my_rewards.py:digits", args: {threshold: 0}}')
    )
    with started("--sweep", "rewards.0.args.threshold=1,0") as sweep:
        out = sweep.stdout.read() if sweep.stdout else ""
        assert sweep.wait(120) == 1
    assert "not today" in out and "failed: mine-threshold=1" in out and "finished: mine-threshold=0" in out


# ---------------------------------------------------------------- comparing


@pytest.fixture(scope="module")
def four_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two settings with two seeds each."""
    runs = []
    for lr in ("1e-6", "1e-2"):
        for seed in (0, 1):
            runs.append([f"optimizer.lr={lr}", f"seed={seed}", f"name=mine-lr={lr}-seed={seed}"])
    folder = tmp_path_factory.mktemp("four")
    return train_sums(folder, recipe=RECIPE, rewards=REWARDS, column="prompt", runs=runs)


def test_groups_of_seeds_are_compared(four_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (str(four_runs / f"runs/mine-lr={lr}-*") for lr in ("1e-6", "1e-2"))
    assert main(["compare", slow, fast]) == 0
    shown = capsys.readouterr().out
    assert "2 runs" in shown and "held-out prompts" in shown and "over seeds" in shown, shown
    assert "These data show" in shown


def test_the_paired_difference_is_that_of_the_recorded_rewards(four_runs: Path) -> None:
    left, right = (read_group(str(four_runs / f"runs/mine-lr={lr}-*")) for lr in ("1e-6", "1e-2"))
    found = paired_difference(left, right)
    assert found.over_seeds is not None
    means = {}
    for side, group in (("left", left), ("right", right)):
        tables = [gw.read_rollouts(folder, [4], held_out=True) for folder in (source.path for source in group.sources)]
        means[side] = [table.groupby("prompt_text")["reward"].mean() for table in tables]
    by_prompt = sum(means["right"]) / 2 - sum(means["left"]) / 2
    assert found.over_prompts.mean == pytest.approx(by_prompt.mean())
    if by_prompt.std() > 0:
        assert found.over_prompts.half == pytest.approx(1.959964 * by_prompt.std() / np.sqrt(len(by_prompt)))
    runs = [[float(one.mean()) for one in means[side]] for side in ("left", "right")]
    assert found.over_seeds.mean == pytest.approx(np.mean(runs[1]) - np.mean(runs[0]))


def test_what_cannot_be_compared_is_refused(four_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(four_runs / "runs/mine-lr=1e-6-seed=0")
    for arguments, message in (
        ([run], "two groups"),
        ([run, str(four_runs / "runs/other-*")], "no run folder"),
        ([run, run], "compared with others"),
        ([run, str(four_runs / "runs/mine-lr=1e-2-seed=0"), "--metric", "eval/rewrd"], "did you mean eval/reward"),
    ):
        assert main(["compare", *arguments]) == ConfigError.exit_code
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("over_prompts", "over_seeds", "sentence"),
    [
        (Estimate(0.2, 0.1), Estimate(0.2, 0.1), "show that B has the higher reward"),
        (Estimate(-0.2, 0.1), Estimate(-0.2, 0.1), "show that A has the higher reward"),
        (Estimate(0.2, 0.1), Estimate(0.2, 0.3), "show no difference"),
        (Estimate(0.2, 0.3), Estimate(0.2, 0.1), "show no difference"),
        (Estimate(0.0, float("nan")), None, "show no difference"),
        (Estimate(0.2, float("nan")), None, "Of these very runs B has the higher reward."),
        (Estimate(1.0, float("nan")), Estimate(1.0, float("nan")), "show that B has the higher reward"),
        (Estimate(0.2, 0.1), None, "Of these very runs B has the higher reward."),
        (Estimate(0.2, 0.1), None, "A and B are single runs"),
    ],
)
def test_the_sentence(over_prompts: Estimate, over_seeds: Estimate | None, sentence: str) -> None:
    runs = (1, 1) if over_seeds is None else (2, 2)
    paired = PairedDifference((4, 4), 8, runs, 0.1, 0.1 + over_prompts.mean, over_prompts, over_seeds)
    assert sentence in " ".join(verdict(paired, "A", "B"))


def test_few_prompts_that_agree_by_chance_show_no_difference() -> None:
    by = Estimate(1.0, float("nan"))
    shown = [PairedDifference((4, 4), prompts, (1, 1), 0.0, 1.0, by, None).shown for prompts in (5, 6)]
    assert shown == [False, True]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["data.eval_fraction=0"], "No held-out prompts are paired: "),
        (["eval.every=3", "steps=3", "eval.at_start=false"], "have no evaluated step in common"),
    ],
)
@pytest.mark.slow
def test_runs_without_common_evaluations_are_told_apart(
    four_runs: Path,
    tmp_path: Path,
    change: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(four_runs)
    assert main(["train", "my.yaml", *change, "name=other", f"runs={tmp_path}", "--quiet"]) == 0
    assert main(["compare", "runs/mine-lr=1e-6-*", f"{tmp_path}/other", "--metric", "loss"]) == 0
    assert sentence in capsys.readouterr().out


def test_intervals_are_those_of_scipy() -> None:
    generator = np.random.default_rng(0)
    for left_size, right_size in ((2, 2), (3, 5), (4, 40), (60, 50)):
        left, right = generator.normal(0, 1, left_size), generator.normal(0.5, 2, right_size)
        interval = stats.ttest_ind(right, left, equal_var=False).confidence_interval(0.95)
        ours = statistics.difference(left.tolist(), right.tolist())
        half = (interval.high - interval.low) / 2
        assert ours.mean == pytest.approx(right.mean() - left.mean())
        assert half <= ours.half * 1.001 and ours.half < half * 1.8, "degrees of freedom are rounded down"
        one = statistics.mean_of_runs(left.tolist())
        assert one.half == pytest.approx(stats.t.ppf(0.975, left_size - 1) * stats.sem(left), rel=1e-3)


# ---------------------------------------------------------------- tables and figures


def test_a_comparison_is_a_table_a_figure_and_sentences(four_runs: Path, tmp_path: Path) -> None:
    slow, fast = (four_runs / f"runs/mine-lr={lr}-*" for lr in ("1e-6", "1e-2"))
    comparison = gw.compare(slow, fast)
    assert "These data show" in str(comparison)
    table = comparison.table()
    assert list(table["step"]) == [0, 2, 4, 0, 2, 4] and set(table["runs"]) == {2}
    last = [gw.read_metrics(four_runs / f"runs/mine-lr=1e-2-seed={seed}")["eval/reward"][4] for seed in (0, 1)]
    assert table["value"].iloc[-1] == pytest.approx(np.mean(last))
    half = stats.t.ppf(0.975, 1) * stats.sem(last)
    assert table["high"].iloc[-1] == pytest.approx(np.mean(last) + half, rel=1e-3)
    comparison.save(tmp_path / "a.csv")
    read = pandas.read_csv(tmp_path / "a.csv")
    assert read["value"].tolist() == pytest.approx(table["value"].tolist())
    comparison.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == comparison._repr_svg_()
    with pytest.raises(ConfigError, match="ends in"):
        comparison.save("a.png")


def test_the_command_writes_the_figure_and_the_table(four_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [str(four_runs / f"runs/mine-lr={lr}-*") for lr in ("1e-6", "1e-2")]
    files = ["--svg", str(tmp_path / "a.svg"), "--csv", str(tmp_path / "a.csv")]
    assert main(["compare", *groups, *files]) == 0
    assert (tmp_path / "a.svg").read_text().startswith("<svg") and (tmp_path / "a.csv").stat().st_size > 100
    with pytest.raises(SystemExit):
        main(["compare", *groups, "--svg", "a.png"])
    assert "ends in .svg" in capsys.readouterr().err


def test_metrics_and_completions_as_tables(four_runs: Path) -> None:
    run = four_runs / "runs/mine-lr=1e-6-seed=0"
    metrics = gw.read_metrics(run)
    assert list(metrics.index) == [0, 1, 2, 3, 4] and metrics["reward"].notna().sum() == 4
    rows = gw.read_rollouts(run)
    assert len(rows) == 4 * 2 * 2
    assert rows["reward"].mean() == pytest.approx(metrics["reward"].mean(), abs=1e-6)
    assert set(gw.read_rollouts(run, [2], columns=["reward"]).columns) == {"step", "reward"}
    assert set(gw.read_rollouts(run, [2], columns=["rewards/", "support"]).columns) >= {"step"}
    with pytest.raises(DataError):
        gw.read_rollouts(run, [9])
    with pytest.raises(DataError, match=r"no column 'rewrad' \(did you mean reward\?\)"):
        gw.read_rollouts(run, columns=["rewrad"])
    with pytest.raises(DataError, match=r"columns is a list, e\.g\. \['reward'\]"):
        gw.read_rollouts(run, columns="reward")


def test_a_folder_of_runs_is_no_run(four_runs: Path) -> None:
    for read in (gw.read_metrics, gw.read_rollouts):
        with pytest.raises(ConfigError, match=r"name one of them \(mine-lr=1e-2-seed=0, mine-lr=1e-2-seed=1, .*seed=1\)"):
            read(four_runs / "runs")
