"""The run folder: what is written is read back, survives a kill, and is cut back to where a run resumes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from groupwise.config.recipes import parse_stages
from groupwise.config.settings import Recipe, SaveSettings
from groupwise.errors import ConfigError, DataError, RunError, StorageError
from groupwise.records import Finish, Prompt, Rollout, RolloutGroup, Sampling, Step
from groupwise.runs.folder import anew, choose_folder, finished, list_runs
from groupwise.runs.lock import Lock, in_use
from groupwise.runs.metrics_log import LogReader, last_metrics, merged, read_metrics
from groupwise.runs.origin import run_of
from groupwise.runs.rollout_files import list_rollouts, read_step
from groupwise.runs.run_files import RunFiles
from groupwise.runs.run_log import RunLog
from groupwise.runs.starts import attempts_of, environment, moment_of
from groupwise.viewer.metric_columns import Metrics


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.chdir(tmp_path)
    text = "{objective: grpo, name: a, steps: 9, model: {scratch: {}}, data: {task: addition}, rewards: [{function: accuracy}]}"
    return parse_stages(text, "r.yaml")["grpo"]


def make_step(number: int, *, sampling: Sampling | None = None, kind: type = np.float32, groups: int = 2) -> Step:
    """A step of two groups of three completions with every column in use; lengths 0, 1, 2 ..."""
    chance = np.random.default_rng(number)
    sampling = sampling or Sampling(temperature=0.7, stop=("END",))
    scored = []
    for g in range(groups):
        row = {"answer": "4", "n": g, "list": [1.5, None]}
        prompt = Prompt(id=f"{number}/{g}", tokens=np.array([7, 8 + g]), text="2+2=\u202e\x1b[31m", row=row)
        rollouts = []
        for i in range(3):
            tokens = np.concatenate([chance.integers(5, 9, size=i), [1]]) if i else np.zeros(0, np.int64)
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    index=i,
                    tokens=tokens.astype(np.int64),
                    behavior_logp=chance.normal(size=tokens.size).astype(kind),
                    finish=Finish.EOS if i else Finish.LENGTH,
                    eos_ids=(1, 2),
                    sampling=sampling,
                    text="é" * i,
                    trained=np.arange(tokens.size) % 2 == 0,
                    version=np.full(tokens.size, number),
                    support=tuple(np.arange(n + 1) for n in range(tokens.size)) if sampling.restricts else None,
                )
            )
        rewards = chance.normal(size=(3, 2))
        rewards[0, 1] = math.nan
        signals = {"reference_logp": tuple(chance.normal(size=len(rollout)).astype(kind) for rollout in rollouts)}
        scored.append(
            RolloutGroup(
                rollouts=tuple(rollouts),
                names=("accuracy", "my/length"),
                rewards=rewards,
                reward=np.nansum(rewards, axis=1),
                weights=(1.0, 0.5),
                signals=signals if g == 0 else {},
            )
        )
    lengths = [[len(rollout) for rollout in group.rollouts] for group in scored]
    return Step(
        number=number,
        metrics={"reward": 0.1 * number, "kl": math.nan, "ratio/max": math.inf},
        timings={"rollout": 1.5},
        groups=scored,
        advantages=[[chance.normal(size=n) for n in row] for row in lengths],
        current_logp=[[chance.normal(size=n).astype(kind) for n in row] for row in lengths],
        evaluation={"eval/greedy": 0.5} if number % 2 else None,
    )


def written(folder: Path, recipe: Recipe, numbers: range, done: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)  # as the lock does
    with RunLog(folder, recipe, done=done) as log:
        for number in numbers:
            log.write(make_step(number))


# ---------------------------------------------------------------- metrics


def test_metrics_are_read_back(recipe: Recipe, tmp_path: Path) -> None:
    written(tmp_path, recipe, range(1, 4))
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["reward"] == 0.1
    assert lines[0]["time/rollout"] == 1.5
    assert lines[0]["eval/greedy"] == 0.5
    assert "eval/greedy" not in lines[1]
    assert math.isnan(lines[0]["kl"])
    assert lines[0]["ratio/max"] == math.inf
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_v7_a_half_written_last_line_is_left_out(recipe: Recipe, tmp_path: Path) -> None:
    written(tmp_path, recipe, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    starts = [0, *(place + 1 for place, byte in enumerate(whole) if byte == ord("\n"))]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert len(read_metrics(tmp_path)) == sum(start <= cut for start in starts[1:])


def test_a_broken_line_in_the_middle_is_named_and_the_others_are_read(
    recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, recipe, range(1, 4))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for broken in ("{nonsense", "[]", '{"step": 1e999}', "[" * 100_000, '{"step": -1}', lines[1][:-1]):
        caplog.clear()
        (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], broken, lines[2]]) + "\n")
        assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]
        assert "metrics.jsonl:2: not a line of metrics" in caplog.text
    before = (tmp_path / "metrics.jsonl").read_bytes()
    written(tmp_path, recipe, range(4, 5), done=3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3, 4], "the run goes on without it"
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before), "nothing that was written is written again"


def test_what_a_log_begins_with_is_never_written_again(recipe: Recipe, tmp_path: Path) -> None:
    """An evaluation and a resumed run are further lines, which a reader merges by step."""
    log, states = tmp_path / "metrics.jsonl", []
    with RunLog(tmp_path, recipe) as run:
        for number in range(1, 4):
            run.write(Step(number=number, metrics={"reward": number / 10}, evaluation={"greedy": 0.1} if number == 1 else None))
            states.append(log.read_bytes())
        run.amend(3, {"greedy": 0.5})
        assert run.evaluated(3) and not run.evaluated(2)
        states.append(log.read_bytes())
    with RunLog(tmp_path, recipe, done=2) as run:
        assert not run.evaluated(3), "step 3 is taken again"
        states.append(log.read_bytes())
        run.amend(2, {"greedy": 0.7})
        run.write(Step(number=3, metrics={"reward": 0.9}))
        states.append(log.read_bytes())
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(states))
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["reward"] for line in lines] == [0.1, 0.2, 0.9]
    assert [line.get("eval/greedy") for line in lines] == [0.1, 0.7, None], "what was taken back is not merged"
    assert last_metrics(RunFiles(tmp_path)) == lines[-1]
    assert b"metrics.jsonl" not in (tmp_path / "checksums.txt").read_bytes()


def test_a_reader_that_reads_on_sees_what_the_whole_log_says(recipe: Recipe, tmp_path: Path) -> None:
    reader, metrics, entries = LogReader(RunFiles(tmp_path)), Metrics(RunFiles(tmp_path)), []

    def check() -> None:
        nonlocal entries
        fresh = reader.read()
        entries = fresh if reader.restarted else [*entries, *fresh]
        assert merged(entries) == read_metrics(tmp_path)
        metrics.refresh()
        assert list(metrics.steps) == [line["step"] for line in merged(entries)]
        for name in ("reward", "eval/greedy"):
            expected = [line.get(name, math.nan) for line in merged(entries)]
            np.testing.assert_array_equal(metrics.values.get(name, [math.nan] * len(expected)), expected)

    for done in (0, 3, 0):
        with RunLog(tmp_path, recipe, done=done) as run:
            for number in range(done + 1, 6):
                run.write(Step(number=number, metrics={"reward": number / 10}))
                check()
                if number % 2:
                    run.amend(number, {"greedy": number / 20})
                    check()


@pytest.mark.parametrize(("last", "steps"), [('{"step": 3, "rew', [1, 2]), ('{"step": 3}', [1, 2, 3]), ('{"step": 2}', [1, 2])])
def test_half_a_line_at_the_end_is_cut_off_and_a_whole_one_is_ended(
    last: str, steps: list[int], recipe: Recipe, tmp_path: Path
) -> None:
    written(tmp_path, recipe, range(1, 3))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(last)
    written(tmp_path, recipe, range(4, 5), done=3)
    reader = LogReader(RunFiles(tmp_path))
    assert [line["step"] for line in merged(reader.read())] == [*steps, 4]
    assert not reader.problems


def test_a_folder_of_version_0_3_is_read(recipe: Recipe, tmp_path: Path) -> None:
    """Its checksums hold digests of single lines of the log, and some that were taken back."""
    written(tmp_path, recipe, range(1, 4))
    files = RunFiles(tmp_path)
    files.note([("metrics.jsonl", "0" * 32), ("- metrics.jsonl", "1" * 32)])
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    assert files.read("metrics.jsonl") and not files.digests("metrics.jsonl") and not files.known("- ")
    files.verify("config.yaml")


def test_resuming_takes_away_what_will_be_done_again(recipe: Recipe, tmp_path: Path) -> None:
    written(tmp_path, recipe, range(1, 6))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rew')
    written(tmp_path, recipe, range(4, 6), done=3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert list_rollouts(tmp_path) == [1, 2, 3, 4, 5]
    written(tmp_path, recipe, range(0), done=2)
    assert list_rollouts(tmp_path) == [1, 2]
    attempts = json.loads((tmp_path / "environment.json").read_text())["attempts"]
    assert [attempt["after_step"] for attempt in attempts] == [0, 3, 2]


@pytest.mark.slow
def test_a_killed_run_leaves_whole_lines(recipe: Recipe, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import itertools, pickle;"
        "from groupwise.runs.run_log import RunLog; from groupwise.records import Step;"
        "from groupwise.config.recipes import load_recipe;"
        "log = RunLog(Path(sys.argv[1]), load_recipe(sys.argv[1] + '/r.yaml'));"
        "[log.write(Step(number=n, metrics={'reward': 1.0 * n})) or print(n, flush=True) for n in itertools.count(1)]"
    )
    from groupwise.config.recipes import dump

    (tmp_path / "r.yaml").write_text(dump(recipe))
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    said = process.stdout.read().splitlines()
    process.wait()
    steps = [line["step"] for line in read_metrics(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= int(said[-2] if len(said) > 1 else 1)


# ---------------------------------------------------------------- completions


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5, top_k=3, top_p=0.9, stop=("a", "b"))])
def test_a_step_is_read_back_to_the_bit(recipe: Recipe, tmp_path: Path, kind: type, sampling: Sampling) -> None:
    step = make_step(3, kind=kind, sampling=sampling)
    with RunLog(tmp_path, recipe) as log:
        log.write(step)
    again = read_step(tmp_path, 3)
    assert again.number == 3
    assert repr(dict(again.metrics)) == repr(dict(step.metrics))
    assert (again.timings, again.evaluation) == (step.timings, step.evaluation)
    assert len(again.groups) == 2
    for old, new in zip(step.groups, again.groups, strict=True):
        assert (old.names, old.weights) == (new.names, new.weights)
        equal(old.rewards, new.rewards)
        equal(old.reward, new.reward)
        assert old.signals.keys() == new.signals.keys()
        for name in old.signals:
            for a, b in zip(old.signals[name], new.signals[name], strict=True):
                equal(a, b)
        assert (old.prompt.id, old.prompt.text, old.prompt.row) == (new.prompt.id, new.prompt.text, new.prompt.row)
        equal(old.prompt.tokens, new.prompt.tokens)
        for a, b in zip(old.rollouts, new.rollouts, strict=True):
            for field in ("tokens", "behavior_logp", "trained", "version"):
                equal(getattr(a, field), getattr(b, field))
            for field in ("index", "finish", "eos_ids", "sampling", "text"):
                assert getattr(a, field) == getattr(b, field)
            assert (a.support is None) == (b.support is None)
            for ids, more in zip(a.support or (), b.support or (), strict=True):
                equal(ids, more)
    for old_rows, new_rows in ((step.advantages, again.advantages), (step.current_logp, again.current_logp)):
        for old_row, new_row in zip(old_rows, new_rows, strict=True):
            for a, b in zip(old_row, new_row, strict=True):
                equal(a, b)


def equal(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def test_completions_are_rows_with_plain_columns(recipe: Recipe, tmp_path: Path) -> None:
    with RunLog(tmp_path, recipe) as log:
        log.write(make_step(1))
    rows = pq.read_table(tmp_path / "rollouts" / "000001.parquet")
    assert len(rows) == 6
    names = rows.column_names
    assert {"rewards/accuracy", "rewards/my/length", "signals/reference_logp", "finish", "version", "current_logp"} <= set(names)


def test_how_often_completions_are_written(recipe: Recipe, tmp_path: Path) -> None:
    for every, steps in ((3, [3, 6]), (0, [])):
        folder = tmp_path / str(every)
        folder.mkdir()
        written(folder, dataclasses.replace(recipe, save=SaveSettings(rollouts_every=every)), range(1, 8))
        assert list_rollouts(folder) == steps


def test_steps_without_groups_and_without_log_probs(recipe: Recipe, tmp_path: Path) -> None:
    with RunLog(tmp_path, recipe) as log:
        log.write(Step(number=1, metrics={"loss": 1.0}))
        log.write(dataclasses.replace(make_step(2), current_logp=(), advantages=()))
    assert list_rollouts(tmp_path) == [2]
    again = read_step(tmp_path, 2)
    assert (again.current_logp, again.advantages) == ((), ())
    assert len(again.groups[0].rollouts) == 3


def test_missing_and_damaged_completions_are_named(recipe: Recipe, tmp_path: Path) -> None:
    written(tmp_path, recipe, range(1, 3))
    with pytest.raises(DataError, match=r"the completions of step 9 are not in .* holds steps 1 to 2"):
        read_step(tmp_path, 9)
    path = tmp_path / "rollouts" / "000002.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RunError, match=r"000002.parquet is not what the run wrote \(its checksum differs\)"):
        read_step(tmp_path, 2)
    (tmp_path / "checksums.txt").unlink()
    with pytest.raises(RunError, match=r"000002.parquet is damaged"):
        read_step(tmp_path, 2)


def test_a_file_in_the_place_of_the_rollouts_is_named(recipe: Recipe, tmp_path: Path) -> None:
    """Put there while the run writes, or before it starts."""
    with RunLog(tmp_path, recipe) as log:
        (tmp_path / "rollouts").rmdir()
        (tmp_path / "rollouts").touch()
        with pytest.raises(StorageError, match=r"File exists: .*/rollouts"):
            log.write(make_step(1))
        assert [line["step"] for line in read_metrics(tmp_path)] == [1], "the step was taken"
    with pytest.raises(StorageError, match=r"File exists: .*/rollouts"):
        RunLog(tmp_path, recipe, done=1)


def test_a_limit_of_a_files_size_is_named(recipe: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`ulimit -f`: the limit is the cause, not the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunLog(tmp_path, recipe) as log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            with pytest.raises(StorageError, match=r"rollouts/000001.parquet: File too large"):
                log.write(make_step(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---------------------------------------------------------------- the folder


def test_same_recipe_same_folder_other_recipe_refused(recipe: Recipe, tmp_path: Path) -> None:
    folder = choose_folder(recipe)
    assert folder == Path("runs/a")
    written(folder, recipe, range(1, 2))
    assert choose_folder(recipe) == folder
    other = dataclasses.replace(recipe, seed=5)
    with pytest.raises(ConfigError, match=r"another configuration(.|\n)*seed: 0 -> 5"):
        choose_folder(other)
    assert anew({"grpo": other})["grpo"].name == "a-2"
    written(Path("runs/a-2"), other, range(0))
    assert anew({"grpo": other})["grpo"].name == "a-3"
    assert list_runs(Path("runs")) == [Path("runs/a"), Path("runs/a-2")]


def test_stages_start_anew_together(recipe: Recipe, tmp_path: Path) -> None:
    stages = {stage: dataclasses.replace(recipe, name=f"a/{stage}") for stage in ("sft", "grpo")}
    assert anew(stages) == stages
    written(Path("runs/a/sft"), stages["sft"], range(0))
    assert [one.name for one in anew(stages).values()] == ["a-2/sft", "a-2/grpo"]


def test_finished(recipe: Recipe, tmp_path: Path) -> None:
    with RunLog(tmp_path, recipe) as log:
        assert finished(tmp_path) is None
        log.finish(9, {"reward": np.float64(0.5), "nan": math.nan})
    assert finished(tmp_path) == 9
    assert json.loads((tmp_path / "done.json").read_text())["reward"] == 0.5
    written(tmp_path, recipe, range(0), done=9)
    assert finished(tmp_path) is None


def test_x6_x7_no_secret_and_no_environment_variable_is_kept(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "from-the-environment")
    monkeypatch.setattr(
        sys,
        "argv",
        ["groupwise", "train", "r.yaml", "rewards.0.args.api_key=on-the-command-line"],
    )
    args = {"api_key": "in-the-recipe"}
    reward = dataclasses.replace(recipe.rewards[0], args=args)
    written(tmp_path, dataclasses.replace(recipe, rewards=(reward,)), range(1, 2))
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (b"from-the-environment", b"on-the-command-line", b"in-the-recipe"):
        assert secret not in everything
    assert b"api_key" in everything


def test_environment_says_what_ran() -> None:
    found = environment()
    assert found["versions"]["python"].startswith("3.")
    assert found["versions"]["torch"]
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 1 << 28


# ---------------------------------------------------------------- the lock

HOLDER = (
    "import sys, time; from groupwise.runs.lock import Lock; lock = Lock(sys.argv[1]); print('held', flush=True); time.sleep(60)"
)


def test_c11_a_live_process_is_refused_a_dead_one_taken_over(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert in_use(tmp_path)
    with pytest.raises(ConfigError, match=f"is in use by process {process.pid} on"):
        Lock(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not in_use(tmp_path)
    with Lock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError, match="in use by this process already"):
            Lock(tmp_path)
    with Lock(tmp_path):
        pass


def test_a_process_that_looks_at_its_own_run_keeps_the_lock(tmp_path: Path) -> None:
    """As a viewer in the process that trains: POSIX gives a lock up when any descriptor of its file is closed."""
    attempt = [sys.executable, "-c", "import sys; from groupwise.runs.lock import Lock; Lock(sys.argv[1])", str(tmp_path)]
    (tmp_path / "link").symlink_to(tmp_path)
    with Lock(tmp_path):
        assert in_use(tmp_path)
        assert in_use(tmp_path / "link")
        done = subprocess.run(attempt, capture_output=True, text=True, check=False)
        assert f"is in use by process {os.getpid()}" in done.stderr
    assert not in_use(tmp_path)
    assert subprocess.run(attempt, check=False).returncode == 0


def test_a_folder_that_was_moved_away_is_let_go_of(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    lock = Lock(folder)
    folder.rename(tmp_path / "elsewhere")
    lock.release(undo=True)
    with Lock(folder):
        pass


@pytest.mark.parametrize("attempt", [{}, {"time": "now"}, {"time": None}, {"time": 1e300}, {"time": -1.0}, {"time": "nan"}, []])
def test_starts_without_a_time_are_damaged(attempt: object, tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(json.dumps({"attempts": [attempt]}))
    with pytest.raises(RunError, match="holds no attempts"):
        attempts_of(RunFiles(tmp_path))
    assert moment_of(tmp_path, 7.0) == 7.0


def test_a_log_that_lost_steps_before_a_resume_is_told_of(recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is left of it is kept, and each step stands there once."""
    written(tmp_path, recipe, range(1, 6))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for kept, told in ((lines[:2], "lacks 3 steps, from step 3 to 5"), ([], "lacks 5 steps, from step 1 to 5"), (lines, None)):
        caplog.clear()
        path.write_bytes(b"".join(kept))
        with RunLog(tmp_path, recipe, done=5) as log:
            assert sorted(log.lines) == list(range(1, len(kept) + 1))
        assert (told is None) == (not caplog.records)
        assert told is None or told in caplog.text
        assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, len(kept) + 1))


def test_a_lock_that_says_nothing_readable_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("\x00 not json")
    with Lock(tmp_path) as lock:
        lock.release()
        lock.release()


def test_importing_the_log_does_not_import_torch() -> None:
    code = "import sys, groupwise.runs.folder, groupwise.api.progress; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_that_is_not_there_is_no_folder_without_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match=r"no such folder '.*/mina' \(did you mean .*/mine\?\); say another"):
        run_of(tmp_path / "mina", "; say another")
    with pytest.raises(ConfigError, match=r"mine is no run folder: it has no config\.yaml"):
        run_of(tmp_path / "mine")
