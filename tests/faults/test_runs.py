"""Runs that fail, are stopped, or come back to a folder that is not as it was left."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.cli.chat import chat
from groupwise.cli.commands import main
from groupwise.config.recipes import load_recipe
from groupwise.config.settings import LoraSettings, ModelSettings
from groupwise.data.sources import fingerprint
from groupwise.errors import CheckpointError, ConfigError, DataError, Ended, EngineError, RewardError, StorageError
from groupwise.models.loading import load_policy
from groupwise.models.saving import save
from groupwise.records import Step
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs import job, prepared, rollout_files
from groupwise.runs.checkpoint import Saver, latest, step_of
from groupwise.runs.final_model import unfinished
from groupwise.runs.folder import finished
from groupwise.runs.inputs import check_inputs, code_file, inputs_of, record_inputs
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.run import Run, train
from groupwise.runs.run_log import RunLog
from groupwise.training import evaluate
from groupwise.utils import files


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the final model of a run."""
    return {name: weight.clone() for name, weight in load_file(folder / "final" / "model.safetensors").items()}


def same(left: Path, right: Path) -> bool:
    """True if two runs came to the same bits."""
    ours, theirs = weights(left), weights(right)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl."""
    return read_metrics(folder)


def finish(path: Path, **keywords: Any) -> Path:
    """Train a recipe to its end."""
    for _ in train(load_recipe(path), **keywords):
        pass
    return Path("runs") / path.stem


def saved(folder: Path) -> int | None:
    found = latest(folder)
    return None if found is None else step_of(found)


# ---------------------------------------------------------------- an error keeps what was learnt


@pytest.mark.slow
@pytest.mark.fault(
    "T1c", "a reward raises at step 3, before any checkpoint", "RewardError; step 2 is saved, the run continues from it"
)
def test_t1c_an_error_of_a_reward_saves_the_last_whole_step(
    recipe: Callable, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Callable
) -> None:
    path = recipe("broken")
    for step in train(load_recipe(path)):
        if step.number == 1:
            (tmp_path / "later").touch()
            break
    shutil.rmtree("runs/broken")
    with pytest.raises(RewardError) as raised:  # noqa: PT012
        for step in train(load_recipe(path)):
            if step.number == 2:
                (tmp_path / "raise").write_text("ValueError('tired')")
    assert saved(Path("runs/broken")) == 2
    assert "000002" in "".join(raised.value.__notes__)
    record_property("exit", main(["train", str(path)]))
    assert "000002" in capsys.readouterr().err
    (tmp_path / "raise").unlink()
    assert same(finish(path), straight)
    assert [line["step"] for line in lines(Path("runs/broken"))] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.fault("T1d", "the operating system refuses something in the middle of step 3", "the error is told; step 2 is saved")
def test_an_oserror_in_a_step_saves_the_last_whole_step(recipe: Callable, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log = recipe("broken"), Path("runs/broken/metrics.jsonl")
    generate = NativeEngine.generate

    def failing(*arguments: Any, **keywords: Any) -> Iterator[Any]:
        if log.exists() and '"step": 2' in log.read_text(encoding="utf-8"):
            raise OSError(errno.EMFILE, "Too many open files")
        return generate(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "generate", failing)
        with pytest.raises(OSError, match="Too many open files"):
            finish(path)
    assert saved(Path("runs/broken")) == 2
    assert same(finish(path), straight)


@pytest.mark.slow
@pytest.mark.fault(
    "T1e", "a reward raises while the evaluation behind step 2 is scored", "RewardError; step 2 and its line are kept"
)
def test_an_error_in_an_evaluation_keeps_the_step_before_it(
    recipe: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = finish(recipe("straight", eval={"every": 2, "k": 2, "at_start": False}))
    path = recipe("broken", eval={"every": 2, "k": 2, "at_start": False})
    complete = evaluate._complete

    def failing(*arguments: Any) -> Any:
        raise RewardError("tired")

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "_complete", failing)
        with pytest.raises(RewardError, match="tired"):
            finish(path)
    assert evaluate._complete is complete
    assert saved(Path("runs/broken")) == 2
    assert same(finish(path), straight)
    compared = [{k: v for k, v in line.items() if k.startswith(("eval/", "step", "reward"))} for line in lines(Path("runs/broken"))]
    assert compared == [{k: v for k, v in line.items() if k.startswith(("eval/", "step", "reward"))} for line in lines(straight)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "zero3"])
@pytest.mark.fault(
    "T1f", "a reward raises on rank 1 of 2 at step 3, weights whole and spread", "RewardError; step 2 is saved by both"
)
def test_an_error_on_another_rank_saves_the_last_whole_step(mode: str, recipe: Callable, forked: Any, tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "def judge(completion_ids, **_):\n"
        "    log = Path('runs/two/metrics.jsonl')\n"
        "    if os.environ.get('RANK') == '1' and log.exists() and len(log.read_text().splitlines()) >= 2:\n"
        "        raise ValueError('tired')\n"
        "    return [float(sum(ids) % 5) for ids in completion_ids]\n"
    )
    both = forked.start_two("train", recipe("two", parallel=mode), "--quiet")
    assert all(process.wait() for process in both)
    said = "".join(process.said for process in both)
    assert "RewardError" in both[1].said, said
    assert saved(Path("runs/two")) == 2, said


TIRED = """
import os
from groupwise.errors import RewardError
from groupwise.training import evaluate

def failing(*_):
    raise RewardError("tired")

if os.environ["RANK"] == "1":
    evaluate._complete = failing
"""


@pytest.mark.slow
@pytest.mark.fault(
    "T1g",
    "a reward raises on rank 1 of 2 while the evaluation behind step 2 is scored",
    "RewardError; step 2 and its line are kept",
)
def test_an_error_on_another_rank_in_an_evaluation_keeps_the_step_before_it(recipe: Callable, forked: Any) -> None:
    both = forked.start_two(
        "train", recipe("two", parallel="ddp", eval={"every": 2, "k": 2, "at_start": False}), "--quiet", first=TIRED
    )
    assert all(process.wait() for process in both)
    said = "".join(process.said for process in both)
    assert "RewardError" in both[1].said, said
    assert saved(Path("runs/two")) == 2, said
    assert [line["step"] for line in lines(Path("runs/two"))] == [1, 2]


# ---------------------------------------------------------------- disks


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.fault(
    "C5b", "the disk fills up while the completions of step 3 are written", "StorageError: the path, and what was kept"
)
def test_c5b_a_disk_that_fills_up_between_saves(
    recipe: Callable, straight: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], record_property: Callable
) -> None:
    path = recipe("broken", save={"every": 2})
    write = rollout_files.write

    def break_third(run: Any, kind: str, step: Any, name: str) -> None:
        full() if step.number == 3 else write(run, kind, step, name)

    with monkeypatch.context() as patch:
        patch.setattr(rollout_files, "write", break_third)
        code = main(["train", str(path)])
    record_property("exit", code)
    told = capsys.readouterr().err
    assert code == StorageError.exit_code == 6
    assert "disk full while writing the completions of a step to runs/broken/rollouts/000003.parquet" in told
    assert "checkpoints/00000" in told
    assert "Traceback" not in told
    # The step was whole and only its completions are missing: it was kept, with its line.
    assert saved(Path("runs/broken")) == 3
    assert same(finish(path), straight)
    assert [line["step"] for line in lines(Path("runs/broken"))] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.fault("C5c", "the disk is full when the final model is written", "StorageError; the older final model is still there")
def test_a_full_disk_at_the_export_leaves_what_was_there(finished_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    path = finished_run(2)
    before = weights(Path("runs/r"))
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_tree", full)
        with pytest.raises(StorageError, match="disk full while writing the final model to runs/r/final"):
            finish(path)
    again = weights(Path("runs/r"))
    assert all(torch.equal(again[name], before[name]) for name in before)


@pytest.mark.slow
@pytest.mark.fault("C6b", "resumed in a folder that became read-only", "StorageError: the path and what the disk said")
def test_c6b_a_folder_that_became_read_only(
    begun_run: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], record_property: Callable
) -> None:
    path = begun_run(2)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files.os, "replace", refuse)
    code = main(["train", str(path)])
    record_property("exit", code)
    told = capsys.readouterr().err
    assert code == 6
    assert "runs/r" in told
    assert os.strerror(errno.EROFS) in told
    assert "Traceback" not in told


@pytest.mark.fault("C6c", "the run folder is deleted while the run continues", "StorageError at the next line of the log")
@pytest.mark.parametrize("rollouts", [0, 1])
def test_a_folder_that_vanishes_is_noticed(rollouts: int, recipe: Callable) -> None:
    steps = train(load_recipe(recipe("r", save={"rollouts_every": rollouts, "every": 0})))
    next(steps)
    shutil.rmtree("runs/r")
    with pytest.raises(StorageError, match=r"runs/r.*(No such file|it was moved)"):
        next(steps)


@pytest.mark.fault("C6d", "the run folder is moved while the run continues", "StorageError; nothing is written in the old place")
@pytest.mark.parametrize("instead", [False, True])
def test_a_folder_that_is_moved_is_noticed_and_stays_one(instead: bool, recipe: Callable) -> None:
    path = recipe("r", save={"rollouts_every": 1, "every": 1})
    steps = train(load_recipe(path))
    next(steps)
    os.rename("runs/r", "runs/moved")
    if instead:  # another folder has its name meanwhile
        shutil.copytree("runs/moved", "runs/r")
        before = sorted(str(one) for one in Path("runs/r").rglob("*"))
    with pytest.raises(StorageError, match=r"runs/r.*(No such file|it was moved)"):
        next(steps)
    if instead:
        assert sorted(str(one) for one in Path("runs/r").rglob("*") if "checkpoints" not in str(one)) == [
            one for one in before if "checkpoints" not in one
        ]
        shutil.rmtree("runs/r")
    assert not Path("runs/r").exists()
    os.rename("runs/moved", "runs/r")
    assert next(train(load_recipe(path))).number == 2


@pytest.mark.parametrize("stop", range(3))
@pytest.mark.fault("C20", "killed anywhere while a model replaces an older one", "the old one or the new one is there, whole")
def test_a_folder_is_replaced_as_a_whole(stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "final"
    final.mkdir()
    (final / "model").write_text("old")
    temporary = files.new_folder(final)
    (temporary / "model").write_text("new")
    rename, calls = os.rename, [0]

    def killed(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] > stop:
            raise KeyboardInterrupt
        rename(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "rename", killed)
        if stop < 2:
            with pytest.raises(KeyboardInterrupt):
                files.rename_into(temporary, final)
        else:
            files.rename_into(temporary, final)
    files.recover(final)
    assert (final / "model").read_text() == ("new" if stop == 2 else "old")


# ---------------------------------------------------------------- finished, and not


@pytest.mark.slow
@pytest.mark.fault("C15", "a finished run of 2 steps, again with steps=4", "it continues to step 4, as if never finished")
def test_c15_more_steps_train_on(
    finished_run: Callable, straight: Path, capsys: pytest.CaptureFixture[str], record_property: Callable
) -> None:
    path = finished_run(2)
    record_property("exit", main(["train", str(path), "steps=4", "--quiet"]))
    assert "finished at step 2; it continues to step 4" in capsys.readouterr().out
    assert finished(Path("runs/r")) == 4
    assert [line["step"] for line in lines(Path("runs/r"))] == [1, 2, 3, 4]
    assert same(Path("runs/r"), straight)


@pytest.mark.slow
@pytest.mark.fault(
    "C15b", "the same, but its checkpoints were deleted", "CheckpointError; nothing is trained anew over the final model"
)
def test_c15b_more_steps_without_a_checkpoint(finished_run: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished_run(2)
    shutil.rmtree("runs/r/checkpoints")
    assert main(["train", str(path), "steps=4"]) == CheckpointError.exit_code
    assert "--fresh" in capsys.readouterr().err
    assert unfinished(Path("runs/r")) is None


@pytest.mark.slow
@pytest.mark.fault("C17", "final/ of a finished run is deleted, emptied or altered", "it is made again from the last checkpoint")
@pytest.mark.parametrize("how", ["deleted", "cut", "flipped", "no config", "cut tokenizer"])
def test_c17_finished_is_believed_only_with_its_model(
    how: str, finished_run: Callable, capsys: pytest.CaptureFixture[str], record_property: Callable
) -> None:
    path = finished_run(2)
    expected = weights(Path("runs/r"))
    model = Path("runs/r/final/model.safetensors")
    match how:
        case "deleted":
            shutil.rmtree("runs/r/final")
        case "cut":
            model.write_bytes(model.read_bytes()[:-100])
        case "flipped":
            data = bytearray(model.read_bytes())
            data[-5] ^= 1
            model.write_bytes(data)
        case "cut tokenizer":
            tokenizer = Path("runs/r/final/tokenizer.json")
            tokenizer.write_bytes(tokenizer.read_bytes()[:10])
        case "no config":
            Path("runs/r/final/config.json").unlink()
    code = main(["train", str(path), "--quiet"])
    record_property("exit", code)
    assert code == 0
    told = capsys.readouterr().out
    assert "but final/" in told
    assert "made again" in told
    again = weights(Path("runs/r"))
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_card_that_was_edited_is_left_alone(finished_run: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished_run(1)
    card = Path("runs/r/final/README.md")
    card.write_text("# mine")
    assert main(["train", str(path)]) == 0
    assert "its model is in runs/r/final" in capsys.readouterr().out
    assert card.read_text() == "# mine"


@pytest.mark.slow
@pytest.mark.fault("C16", "killed after the evaluation before step 1, run again", "step 0 stands once in the log")
def test_c16_no_step_stands_twice(recipe: Callable) -> None:
    path = recipe("r", steps=2, eval={"k": 2, "at_start": True})
    Path("runs/r").mkdir(parents=True)
    log = RunLog(Path("runs/r"), load_recipe(path))
    log.write(Step(number=0, metrics={}, evaluation={"greedy": 0.0}))  # and then it was killed
    log.close()
    finish(path)
    assert [line["step"] for line in lines(Path("runs/r"))] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.fault("C19", "SIGTERM while the evaluation behind step 2 runs", "143; the resumed run makes the evaluation up")
@pytest.mark.parametrize("at", [2, 4])
def test_c19_an_evaluation_that_was_broken_off_is_made_up(
    at: int, recipe: Callable, monkeypatch: pytest.MonkeyPatch, record_property: Callable
) -> None:
    changes = {"eval": {"every": 2, "k": 2, "at_start": False}, "save": {"every": 0, "report_to": ["tensorboard"]}}
    straight, path = finish(recipe("straight", **changes)), recipe("broken", **changes)
    complete, calls = evaluate._complete, [0]

    def told(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == at - 1:  # two calls an evaluation: greedy and sampled
            signal.raise_signal(signal.SIGTERM)
        return complete(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "_complete", told)
        with pytest.raises(Ended) as ended:
            finish(path)
    record_property("exit", ended.value.exit_code)
    assert saved(Path("runs/broken")) == at
    finish(path)
    other = ("time/", "wall", "tokens/per_second", "flops/per_second")
    found, expected = (
        [{k: v for k, v in line.items() if not k.startswith(other)} for line in lines(run)]
        for run in (Path("runs/broken"), straight)
    )
    assert found == expected
    assert [any(key.startswith("eval/") for key in line) for line in found] == [False, True, False, True]


def test_a_process_that_is_told_during_an_evaluation_saves_without_the_others(
    recipe: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are still evaluating: what they send would be taken for an answer about the save that is due behind this step."""
    path, saves = recipe("r", eval={"every": 2, "k": 2, "at_start": False}, save={"every": 1}), []
    save = Saver.save

    def told(*_: Any) -> Any:
        raise KeyboardInterrupt

    def watched(self: Saver, step: int, state: Any, *, alone: bool = False) -> None:
        saves.append((step, alone))
        save(self, step, state, alone=alone)

    monkeypatch.setattr(Saver, "save", watched)
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "_complete", told)
        with pytest.raises(KeyboardInterrupt):
            finish(path)
    assert saves == [(1, False), (2, False), (2, True)], "the step is saved by all before it is judged, then by this one alone"
    assert saved(Path("runs/r")) == 2


# ---------------------------------------------------------------- what was started ends


def workers_of(run: int) -> list[str]:
    """Commands of the living processes below a process."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in table.splitlines()]
    return [row[3] for row in rows if int(row[1]) == run and row[2][0] != "Z" and not row[3].startswith("ps ")]


@pytest.mark.parametrize(
    ("module", "where"), [(job, "make_learner"), (job, "make_engine"), (prepared, "_check_credit"), (prepared, "environment_lines")]
)
def test_a_job_that_cannot_be_put_together_leaves_no_worker(
    module: Any, where: str, recipe: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would end them before the program's end: a notebook continues."""
    kept: list[Any] = []  # as a traceback that somebody holds on to keeps what was made
    make = prepared.build_rewards

    def watched(*arguments: Any, **keywords: Any) -> Any:
        kept.append(make(*arguments, **keywords))
        return kept[-1]

    def refused(*_: Any, **__: Any) -> Any:
        raise ConfigError("it cannot be put together")

    before = workers_of(os.getpid())
    monkeypatch.setattr(prepared, "build_rewards", watched)
    monkeypatch.setattr(module, where, refused)
    with pytest.raises(ConfigError, match="cannot be put together"):
        finish(recipe("r"))
    assert kept
    assert sorted(workers_of(os.getpid())) == sorted(before)


@pytest.mark.slow
def test_rewards_end_although_the_engine_does_not(recipe: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    before = workers_of(os.getpid())

    def failing(_: Any) -> None:
        raise EngineError("the server does not answer")

    monkeypatch.setattr(NativeEngine, "close", failing)
    run = Run(load_recipe(recipe("r", steps=1)), Path("runs/r"))
    with pytest.raises(EngineError, match="does not answer"), run:
        list(run.steps())
    assert sorted(workers_of(os.getpid())) == sorted(before)
    Run(load_recipe(recipe("r", steps=1)), Path("runs/r")).lock.release()  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_save_that_fails_beside_an_error_holds_nothing_back(recipe: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    before = workers_of(os.getpid())
    run = Run(load_recipe(recipe("r")), Path("runs/r"))

    def lost() -> None:
        raise RuntimeError("connection closed by peer")

    run.saver.wait = lost  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the error itself"), run:
        raise ValueError("the error itself")
    assert sorted(workers_of(os.getpid())) == sorted(before)
    Run(load_recipe(recipe("r")), Path("runs/r")).lock.release()  # type: ignore[union-attr]


# ---------------------------------------------------------------- folders that others have had
# ---------------------------------------------------------------- folders that others have had


@pytest.mark.slow
@pytest.mark.fault(
    "F7", "done.json is a list, a number, cut off, or nested without end", "it counts as not finished; the run continues"
)
@pytest.mark.parametrize("text", ["[1, 2]", "7", '{"step": "x"}', '{"st', "[" * 100_000, "\x00"])
def test_f7_a_foreign_done_json(text: str, finished_run: Callable) -> None:
    path = finished_run(1)
    Path("runs/r/done.json").write_text(text)
    assert finished(Path("runs/r")) is None
    assert main(["train", str(path), "--quiet"]) == 0
    assert finished(Path("runs/r")) == 1


@pytest.mark.slow
@pytest.mark.fault("F8", "config.yaml of the run is not text, or not YAML", "ConfigError: the file, and three ways out")
@pytest.mark.parametrize("content", [b"\xff\xfe\x00garbage", b"{unfinished: [", b"\x00"])
def test_f8_a_damaged_config(
    content: bytes, finished_run: Callable, capsys: pytest.CaptureFixture[str], record_property: Callable
) -> None:
    path = finished_run(1)
    Path("runs/r/config.yaml").write_bytes(content)
    code = main(["train", str(path)])
    record_property("exit", code)
    told = capsys.readouterr().err
    assert code == 2
    assert "runs/r/config.yaml is damaged" in told
    assert "delete it" in told
    assert "--fresh" in told
    Path("runs/r/config.yaml").unlink()
    assert main(["train", str(path)]) == 0


@pytest.mark.slow
@pytest.mark.fault("F11", "environment.json: attempts is a number", "it is put aside and begun anew; the run continues")
@pytest.mark.parametrize("text", ['{"attempts": 3}', "[]", "{", '"x"'])
def test_f11_a_damaged_environment(text: str, begun_run: Callable) -> None:
    path = begun_run(2)
    Path("runs/r/environment.json").write_text(text)
    finish(path)
    assert len(json.loads(Path("runs/r/environment.json").read_text())["attempts"]) == 1
    assert Path("runs/r/environment.damaged.json").read_text() == text


@pytest.mark.slow
@pytest.mark.fault("F21", "rollouts/ of a run is a file", "StorageError: what is in the way")
def test_f21_a_file_where_a_folder_belongs(
    begun_run: Callable, capsys: pytest.CaptureFixture[str], record_property: Callable
) -> None:
    path = begun_run(2)
    shutil.rmtree("runs/r/rollouts")
    Path("runs/r/rollouts").write_text("")
    code = main(["train", str(path)])
    record_property("exit", code)
    assert code == 6
    assert "File exists: runs/r/rollouts" in capsys.readouterr().err


# ---------------------------------------------------------------- inputs that changed


def pairs(count: int, sign: str = "+") -> str:
    return "".join(json.dumps({"prompt": f"{n}{sign}1=", "answer": str(n)}) + "\n" for n in range(1, count + 1))


@pytest.mark.slow
@pytest.mark.fault(
    "C9d", "the data file changed between two runs: as many rows, other prompts", "ConfigError: which; --accept-changes continues"
)
@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_c9d_data_that_changed_are_noticed(
    key: str, recipe: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Callable
) -> None:
    for name, sign in (("path", "+"), ("eval_path", "*")):
        (tmp_path / f"{name}.jsonl").write_text(pairs(8, sign))
    data = {"path": "path.jsonl", "eval_path": "eval_path.jsonl", "task": None}
    path = recipe("r", data=data, save={"every": 1}, group={"prompts_per_step": 2, "group_size": 2})
    next(iter(train(load_recipe(path))))
    (tmp_path / f"{key}.jsonl").write_text(pairs(8, "-"))
    code = main(["train", str(path)])
    record_property("exit", code)
    told = capsys.readouterr().err
    assert code == ConfigError.exit_code
    assert f"data.{key} {key}.jsonl: its content has changed" in told
    assert "--accept-changes" in told
    assert finished(Path("runs/r")) is None
    assert main(["train", str(path), "--quiet", "--accept-changes"]) == 0
    history = json.loads(Path("runs/r/inputs.json").read_text())["history"]
    assert [entry["after_step"] for entry in history] == [0, 1]
    assert history[0]["inputs"][f"data.{key}"]["xxh3_128"] != history[1]["inputs"][f"data.{key}"]["xxh3_128"]


@pytest.mark.slow
@pytest.mark.fault("C9b", "the file of a reward changed between two runs", "ConfigError: which; --accept-changes continues")
@pytest.mark.parametrize("function", ["judges.py:judge", "changing_judge:judge"])
def test_c9b_reward_code_that_changed_is_noticed(
    function: str, recipe: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"{function.partition(':')[0].removesuffix('.py')}.py"
    file.write_text("def judge(completion_ids, **_):\n    return [float(sum(ids) % 5) for ids in completion_ids]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = recipe("r", rewards=[{"function": function}], save={"every": 1})
    next(iter(train(load_recipe(path))))
    file.write_text("def judge(completion_ids, **_):\n    return [-float(sum(ids) % 5) for ids in completion_ids]\n")
    assert main(["train", str(path)]) == ConfigError.exit_code
    assert f"rewards.0.function {function}: its content has changed" in capsys.readouterr().err
    assert main(["train", str(path), "--accept-changes", "--quiet"]) == 0
    sys.modules.pop("changing_judge", None)


OWN_TASK = """
def rows(n): return [{"prompt": f"9+{i}", "answer": str(i)} for i in range(n)]
class Mine:
    def demonstrations(self, n, seed): return []
    def prompts(self, n, seed): return rows(n)
    def held_out(self, n): return rows(min(n, 4))
"""


@pytest.fixture
def own_modules(tmp_path: Path) -> Iterator[Callable[[str, str], str]]:
    """`own_modules(name, code)`: a module of the working directory, forgotten after the test."""
    made = []

    def write(name: str, code: str) -> str:
        (tmp_path / f"{name}.py").write_text(code)
        made.append(name)
        sys.modules.pop(name, None)
        return name

    yield write
    for name in made:
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.fault("C9g", "the module of an own task changed between two runs", "ConfigError: which; --accept-changes continues")
def test_c9g_an_own_task_that_changed_is_noticed(
    recipe: Callable, own_modules: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_modules("task_of_mine", OWN_TASK)
    path = recipe("r", data={"task": "task_of_mine:Mine"}, save={"every": 1})
    next(iter(train(load_recipe(path))))
    with (tmp_path / "task_of_mine.py").open("a") as file:
        file.write("SIGN = -1\n")
    assert main(["train", str(path)]) == ConfigError.exit_code
    assert "data.task task_of_mine:Mine: its content has changed" in capsys.readouterr().err
    assert main(["train", str(path), "--accept-changes", "--quiet"]) == 0


def test_every_setting_that_names_code_is_an_input(recipe: Callable, own_modules: Callable, tmp_path: Path) -> None:
    own_modules("code_of_mine", "def f(): ...\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("a")
    named = "code_of_mine:f"
    rewards = [{"function": "json.decoder:JSONDecoder"}, {"function": "model", "args": {"path": "./model"}}]
    found = load_recipe(recipe("r", rewards=rewards))
    found = replace(
        found,
        objective=named,
        data=replace(found.data, task=named),
        rollout=replace(found.rollout, engine=replace(found.rollout.engine, name=named)),
        environment=replace(found.environment, factory={"one": named}, tools=(named,), harness=named),
        group=replace(found.group, credit=named, surrogate={"name": named}),
    )
    inputs = inputs_of(found)
    assert sorted(inputs) == [
        "data.task", "environment.factory.one", "environment.harness", "environment.tools.0", "group.credit",
        "group.surrogate.name", "objective", "rewards.0.function", "rewards.1.args.path", "rollout.engine.name",
    ]  # fmt: skip
    (tmp_path / "model" / "model.safetensors").write_text("bb")
    assert [key for key, one in inputs_of(found).items() if one != inputs[key]] == ["rewards.1.args.path"]


def test_the_file_of_a_module_is_known_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_pack" / "deep").mkdir(parents=True)
    for name in ("own_alone.py", "own_pack/__init__.py", "own_pack/deep/__init__.py", "own_pack/deep/one.py"):
        (tmp_path / name).write_text("raise RuntimeError('imported')\n")
    places = {
        "own_alone:f": "own_alone.py", "own_alone.py:f": "own_alone.py", "own_pack.deep:f": "own_pack/deep/__init__.py",
        "own_pack.deep.one:f": "own_pack/deep/one.py", "own_pack:f": "own_pack/__init__.py",
    }  # fmt: skip
    assert {text: code_file(text).resolve() for text in places} == {text: tmp_path / place for text, place in places.items()}
    assert [code_file(text) for text in ("own_pack.two:f", "not_there:f", "own_alone:", "own_alone")] == [None] * 4


@pytest.mark.slow
def test_changed_inputs_are_accepted_before_the_first_checkpoint(recipe: Callable, tmp_path: Path) -> None:
    """What was taken without being saved is taken again: nothing is mixed."""
    (tmp_path / "p.jsonl").write_text(pairs(8))
    path = recipe("r", data={"path": "p.jsonl", "task": None}, group={"prompts_per_step": 2, "group_size": 2}, steps=1)
    Path("runs/r").mkdir(parents=True)
    log = RunLog(Path("runs/r"), load_recipe(path))
    log.close()
    (tmp_path / "p.jsonl").write_text(pairs(8, "-"))
    finish(path)


@pytest.mark.slow
@pytest.mark.fault("C9e", "an earlier stage was trained again with other weights", "ConfigError: which stage")
def test_a_stage_that_was_trained_again_is_noticed(recipe: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = {
        "sft": {"objective": "sft", "steps": 1, "batch_size": 4},
        "grpo": {"objective": "grpo", "steps": 2, "model": {"path": "stage:sft"}, "save": {"every": 1}},
    }
    path = recipe("two", stages=stages)
    assert main(["train", str(path), "--quiet", "stages.grpo.steps=1"]) == 0
    shutil.rmtree("runs/two/sft")
    capsys.readouterr()
    assert main(["train", str(path), "--quiet", "stages.sft.seed=9"]) == ConfigError.exit_code
    assert "model.path runs/two/sft/final: the stage has been trained again" in capsys.readouterr().err


@pytest.mark.slow
def test_a_teacher_that_was_trained_again_is_noticed(recipe: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    stages = {
        "sft": {"objective": "sft", "steps": 1, "batch_size": 4},
        "distill": {"objective": "distill", "steps": 2, "rewards": [], "teacher": {"path": "stage:sft"}, "save": {"every": 1}},
    }
    path = recipe("two", stages=stages)
    assert main(["train", str(path), "--quiet", "stages.distill.steps=1"]) == 0
    shutil.rmtree("runs/two/sft")
    capsys.readouterr()
    assert main(["train", str(path), "--quiet", "stages.sft.seed=9"]) == ConfigError.exit_code
    assert "teacher.path runs/two/sft/final: the stage has been trained again" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.fault(
    "C9x", "the weights in a teacher's folder changed between two runs", "ConfigError: which; --accept-changes continues"
)
@pytest.mark.parametrize("folder", ["plain", "stage"])
def test_a_teachers_folder_that_changed_is_noticed(
    folder: str,
    recipe: Callable,
    finished_run: Callable,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable,
) -> None:
    finished_run(1)
    place = {"plain": "elsewhere", "stage": "runs/r/final"}[folder]
    shutil.copytree("runs/r/final", "elsewhere")
    own = {"steps": 3, "save": {"every": 1}}
    path = recipe("taught", objective="distill", rewards=[], teacher={"path": place}, **own)
    next(iter(train(load_recipe(path))))
    (file,) = Path(place).glob("*.safetensors")
    shutil.copy(file, "kept")
    tensors = load_file(file)
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    code = main(["train", str(path)])
    record_property("exit", code)
    assert code == ConfigError.exit_code
    told = {"plain": "its content has changed", "stage": "the stage has been trained again, or its files were changed"}[folder]
    assert f"teacher.path {place}: {told}" in capsys.readouterr().err
    shutil.copy("kept", file)  # the same content, with other times
    assert main(["train", str(path), "--quiet", "steps=2"]) == 0
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    assert main(["train", str(path), "--quiet", "--accept-changes"]) == 0


def test_models_that_are_read_when_a_run_is_resumed_are_inputs(recipe: Callable, tmp_path: Path) -> None:
    """All weights of a policy without an adapter are in its checkpoints: its folder may go."""
    for name in ("base", "start", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    (tmp_path / "adapted").mkdir()
    (tmp_path / "adapted" / "adapter_model.safetensors").write_text("adapter")
    (tmp_path / "adapted" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))
    found = load_recipe(recipe("r"))
    found = replace(
        found,
        model=replace(found.model, path="start", scratch=None),
        critic=replace(found.critic, path="judge"),
        teacher=replace(found.teacher, path="adapted"),
    )
    first = inputs_of(found)
    assert {key for key in first if key.endswith(".path")} == {"critic.path", "teacher.path"}
    assert first["critic.path"] == {
        "source": "judge",
        "size": 5,
        "xxh3_128": files.digest(tmp_path / "judge" / "model.safetensors"),
    }
    (tmp_path / "base" / "model.safetensors").write_text("changed")
    assert [key for key, one in inputs_of(found).items() if one != first[key]] == ["teacher.path"]
    with_adapter = replace(found, model=replace(found.model, lora=LoraSettings()))
    assert inputs_of(with_adapter).keys() - first.keys() == {"model.path"}


@pytest.mark.fault("C9f", "a data set of the hub has a new revision", "ConfigError: both fingerprints")
def test_the_hubs_data_are_known_by_their_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {name: datasets.Dataset.from_list([{"prompt": name}], split="train") for name in ("old", "new")}

    def now(name: str) -> dict[str, Any]:
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: sets[name])
        return {"data.path": {"source": "owner/name", **fingerprint("owner/name")}}

    record_inputs(tmp_path, now("old"), 0)
    check_inputs(tmp_path, now("old"), accept=False)
    with pytest.raises(
        ConfigError, match=rf"data\.path owner/name: .*{sets['old']._fingerprint} then, {sets['new']._fingerprint} now"
    ):
        check_inputs(tmp_path, now("new"), accept=False)
    check_inputs(tmp_path, now("new"), accept=True)


@pytest.mark.fault("C9w", "inputs.json of a run is cut", "a warning: what has changed cannot be told; trained on")
def test_a_damaged_record_of_the_inputs_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = {"data.path": {"source": "rows.jsonl", "size": 3, "xxh3_128": "0"}}
    check_inputs(tmp_path, now, accept=False)
    record_inputs(tmp_path, now, 0)
    check_inputs(tmp_path, now, accept=False)
    assert not caplog.records
    (tmp_path / "inputs.json").write_text((tmp_path / "inputs.json").read_text()[:40])
    check_inputs(tmp_path, now, accept=False)
    assert "inputs.json is damaged: whether data, code or models have changed" in caplog.text
    record_inputs(tmp_path, now, 3)
    caplog.clear()
    check_inputs(tmp_path, now, accept=False)
    assert not caplog.records
    for inputs in (3, None, {"data.path": 7}):
        (tmp_path / "inputs.json").write_text(json.dumps({"history": [{"inputs": inputs}]}))
        check_inputs(tmp_path, now, accept=False)
        assert "inputs.json is damaged" in caplog.text
        caplog.clear()


# ---------------------------------------------------------------- things that are read


@pytest.mark.fault(
    "T31/X1a", "a pickle bomb as a model's weights (pytorch_model.bin)", "ConfigError: take .safetensors; nothing is run"
)
def test_t31_a_pickle_bomb_as_weights(tiny_policy: Callable, tmp_path: Path) -> None:
    save(tiny_policy(), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"model.embed_tokens.weight": Bomb()}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"are a pickle .* nothing of it was run.*\.safetensors"):
        load_policy(ModelSettings(path=str(tmp_path / "model")))
    assert not (tmp_path / "executed").exists()


@pytest.mark.fault("F30", "the compiled kernel library is cut in half", "it is not loaded: install it again; no crash")
def test_a_kernel_library_that_is_damaged_is_not_loaded(tmp_path: Path) -> None:
    """To load it could end the process (SIGBUS)."""
    package = pytest.importorskip("groupwise_cpu")
    folder = shutil.copytree(Path(package.__file__).parent, tmp_path / "copy")
    whole = (folder / "kernels.so").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole[:-1] + b"x"):
        (folder / "kernels.so").write_bytes(damaged)
        with pytest.raises(ImportError, match=r"groupwise-cpu is damaged .* install it again on this machine: pip install"):
            package.load(folder)


@pytest.mark.fault("F31", "bytes that are no UTF-8 on the standard input of `groupwise chat`", "DataError: the byte")
def test_bad_bytes_on_stdin(tiny_policy: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tiny_policy(), tmp_path / "model")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    with pytest.raises(DataError, match=r"standard input: not UTF-8.*0xff"):
        chat(str(tmp_path / "model"))


# ---------------------------------------------------------------- the end of the process


SPINNING = """
import threading, torch
from groupwise.cli.commands import command
from groupwise.runs.run import Run

def spin(begun):
    a = torch.ones(8, 8)
    begun.set()
    while True:
        a @ a

def spins(run, *error, leave=Run.__exit__):
    begun = threading.Event()
    threading.Thread(target=spin, args=(begun,), daemon=True).start()
    begun.wait()
    print("spins", flush=True)
    return leave(run, *error)

Run.__exit__ = spins
command()
"""


@pytest.mark.slow
@pytest.mark.fault("P9", "threads of libraries work on while the process ends", "0; the process ends without being taken down")
def test_a_thread_that_works_on_does_not_abort_the_process(recipe: Callable, forked: Any, record_property: Callable) -> None:
    """As gloo's did, once in thirty runs on two processes: a thread that asks for the interpreter while it is taken down aborts."""
    ended = forked.run("train", recipe("r", steps=1), "--quiet", code=SPINNING)
    record_property("exit", ended.returncode)
    assert ended.returncode == 0, ended.said[-2000:]
    assert "spins" in ended.said
    assert "terminate" not in ended.said
