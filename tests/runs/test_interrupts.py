"""SIGTERM and Ctrl-C at every kind of place in a run: what is saved, how it ends, and that it goes on to the same bits."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from groupwise.config.recipes import load_recipe
from groupwise.distributed import comm
from groupwise.errors import Ended, PeerError
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs import interrupts
from groupwise.runs.checkpoint import latest, step_of
from groupwise.runs.interrupts import endings
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.run import train
from groupwise.runs.run_log import RunLog
from groupwise.training import evaluate
from groupwise.training.loss import Loss
from groupwise.training.optimizer import Optimizer
from groupwise.utils import files

STEPS, AT = 3, 2
"""The signal comes in step `AT`."""

JUDGE = """
import pathlib, time
def judge(completion_ids, **_):
    mark = pathlib.Path("mark")
    if mark.exists() and mark.read_text() == "hang":
        mark.write_text("hangs")
        time.sleep(3600)
    return [float(sum(ids) % 5) for ids in completion_ids]
"""


OWN = {"steps": STEPS, "data": {"limit": 32}, "group": {"minibatches": 2}, "eval": {"every": 1}, "save": {"every": 0}}
REPETITION = {"rewards": [{"function": "repetition", "args": {"n": 1}}], "seed": 5}
"""For runs that are started again and again: no process of its own, and by this seed no minibatch without a signal."""


@pytest.fixture
def recipe(write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGE)
    return lambda name, **changes: write_recipe(tmp_path, name, **(OWN | changes))


@pytest.fixture(scope="module")
def undisturbed(write_recipe: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run to its end, to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    path = write_recipe(folder, "straight", **(OWN | REPETITION))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for _ in train(load_recipe(path)):
            pass
    return path


def folder(path: Path) -> Path:
    return path.parent / "runs" / path.stem


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(folder(path) / "final" / "model.safetensors")


def metrics(path: Path) -> list[dict]:
    lines = read_metrics(folder(path))
    other = ("time/", "wall", "tokens/per_second", "flops/per_second", "eval/")
    return [{key: value for key, value in line.items() if not key.startswith(other)} for line in lines]


def each(owner: Any, name: str, do: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Does something after every call of a function."""
    function = getattr(owner, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        found = function(*arguments, **keywords)
        do()
        return found

    patch.setattr(owner, name, wrapped)


def between(owner: Any, do: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Does something after every group that an engine yields."""
    generate = owner.generate

    def wrapped(*arguments: Any, **keywords: Any) -> Iterator[Any]:
        for group in generate(*arguments, **keywords):
            do()
            yield group

    patch.setattr(owner, "generate", wrapped)


WHERE = {  # the step that is saved
    "sampling": AT - 1,
    "backward": AT - 1,
    "optimizer": AT,  # the weights are half-way: the step is finished first
    "second minibatch": AT,
    "evaluation": AT,
    "log": AT,
    "saving": AT,
    "between steps": AT - 1,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "number"),
    [
        *(pytest.param(where, signal.SIGTERM, marks=pytest.mark.slow) for where in WHERE),
        pytest.param("sampling", signal.SIGINT, marks=pytest.mark.slow),
        ("optimizer", signal.SIGINT),
    ],
)
def test_c7_c8_a_signal_anywhere_leaves_the_last_whole_step(
    where: str, number: signal.Signals, recipe: Callable, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = recipe("broken", **REPETITION, **({"save": {"every": 1}} if where == "saving" else {}))
    steps, passes, armed = [0], [0], [True]

    def now() -> None:
        if armed[0] and steps[0] == AT - 1:
            passes[0] += 1
            # A step has two minibatches of at least one micro-batch, and each is followed by an optimizer step.
            if where != "second minibatch" or passes[0] == 2:
                armed[0] = False
                signal.raise_signal(number)

    with monkeypatch.context() as patch:
        match where:
            case "sampling":
                between(NativeEngine, now, patch)
            case "backward" | "second minibatch":
                each(Loss, "__call__", now, patch)
            case "optimizer":
                each(Optimizer, "_write_weights", now, patch)
            case "evaluation":
                each(evaluate, "_complete", now, patch)
            case "log":
                each(RunLog, "write", now, patch)
            case "saving":
                each(files, "fingerprint", lambda: steps[0] == AT - 1 and now(), patch)

        def go() -> None:
            for step in train(load_recipe(broken)):
                steps[0] = step.number
                if where == "between steps":
                    now()

        with pytest.raises(Ended if number == signal.SIGTERM else KeyboardInterrupt) as told:
            go()
    assert not armed[0], "the signal was never sent"
    assert where == "between steps" or any("the last checkpoint is" in note for note in told.value.__notes__)
    assert number == signal.SIGINT or told.value.exit_code == 143
    newest = latest(folder(broken))
    assert newest is not None
    assert step_of(newest) == WHERE[where]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for _ in train(load_recipe(broken)):
        pass
    assert all(torch.equal(weights(broken)[name], weight) for name, weight in weights(undisturbed).items())
    assert metrics(broken) == metrics(undisturbed)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGXCPU])
def test_every_signal_that_ends_a_program_leaves_the_last_whole_step(number: signal.Signals, recipe: Callable) -> None:
    """A terminal's and a scheduler's, as SIGTERM."""
    path = recipe("told", **REPETITION | {"eval": {"every": 0, "k": 2, "at_start": False}})
    before = signal.signal(number, signal.SIG_DFL)  # a shell starts what is in its background with some of them ignored
    try:
        with closing(train(load_recipe(path))) as steps:
            next(steps)
            with pytest.raises(Ended) as told:
                signal.raise_signal(number)
        assert told.value.exit_code == 128 + number
        assert str(told.value) == number.name
        assert step_of(latest(folder(path)) or Path("0")) == 1
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_signal_that_the_program_or_nohup_has_decided_about_stays_theirs(handler: Any) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with endings(lambda: True) as due:
            signal.raise_signal(signal.SIGHUP)
            due()
            assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["pipe", "terminal"])
def test_an_output_that_nobody_reads_ends_the_run_with_a_word(output: str, recipe: Callable, forked: Any) -> None:
    """`train | head -1`, and a terminal whose other end is closed: the last whole step is saved, and stderr says so."""
    path = recipe("unheard", steps=400, **REPETITION | {"eval": {"every": 0, "k": 2, "at_start": False}})
    reader, writer = os.pipe() if output == "pipe" else os.openpty()
    process = forked.start("train", path, stdout=writer)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    assert process.wait() == 141, process.said
    newest = latest(folder(path))
    assert newest is not None
    assert f"nobody reads the output any more; the last checkpoint is {newest}; the same command continues" in process.said
    assert "Traceback" not in process.said


def test_a_reward_function_that_runs_in_the_main_thread_is_broken_off(recipe: Callable, tmp_path: Path) -> None:
    """In an evaluation; it would catch what is an error of its own."""
    path = recipe("judging", eval={"k": 2, "at_start": True})
    (tmp_path / "mark").write_text("hang")

    def tell() -> None:
        while (tmp_path / "mark").read_text() != "hangs":
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(Ended):
        next(train(load_recipe(path)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # dropped by a generator's end, and told again
@pytest.mark.parametrize("ahead", [0, 1])
def test_c7_ended_at_random_times_it_comes_to_the_same_bits(ahead: int, recipe: Callable) -> None:
    """Again and again at any time between start and last step; with rollouts in store and a reward in a process, or neither."""
    changes: dict[str, Any] = {"steps": 8, "rollout": {"max_new_tokens": 8, "engine": {"name": "native", "ahead": ahead}}}
    changes |= {} if ahead else REPETITION
    straight, broken = recipe("straight", **changes), recipe("broken", **changes)
    calls, told, rng, ends = 0, math.inf, np.random.default_rng(ahead), 0

    def count(*_: Any) -> None:
        """At every call of a Python function in this thread: the clock by which it is told to end."""
        nonlocal calls
        calls += 1
        if calls == told:
            signal.raise_signal(signal.SIGTERM)

    def steps(path: Path, until: float) -> None:
        """All that are left, or until so many calls after the first that it takes."""
        nonlocal calls, told
        try:
            for number, _ in enumerate(train(load_recipe(path))):
                if number == 0:
                    calls, told = 0, until
                    sys.settrace(count)
        finally:
            sys.settrace(None)

    steps(straight, math.inf)
    taken = calls

    def go() -> None:
        """Told to end some time after the first step that it takes."""
        steps(broken, int(rng.uniform(0.0, 0.15) * taken) + 1)

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # for one that comes too late
    try:
        while not (folder(broken) / "done.json").exists():
            try:
                go()
            except Ended:
                ends += 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ends >= 3
    assert all(torch.equal(weights(broken)[name], weight) for name, weight in weights(straight).items())
    assert metrics(broken) == metrics(straight)


@pytest.mark.slow
def test_an_evaluation_that_a_signal_broke_off_is_made_on_resume(recipe: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = recipe("run", eval={"k": 2, "at_start": False}), [0]
    with monkeypatch.context() as patch:
        each(evaluate, "_complete", lambda: signal.raise_signal(signal.SIGTERM), patch)
        with pytest.raises(Ended):
            for _ in train(load_recipe(path)):
                pass
    assert not (folder(path) / "done.json").exists()
    each(evaluate, "_complete", lambda: calls.__setitem__(0, calls[0] + 1), monkeypatch)
    assert list(train(load_recipe(path))) == []
    assert calls[0] == 2
    assert "greedy_reward" in json.loads((folder(path) / "done.json").read_text())


@pytest.mark.slow
def test_c7_a_reward_that_never_returns_does_not_hold_the_end(recipe: Callable, forked: Any, tmp_path: Path) -> None:
    """The command: status 143, the last whole step saved and named; again, and it goes on to the end."""
    path, mark = recipe("hanging", steps=400, eval={"k": 2, "at_start": False}), tmp_path / "mark"
    log, process = folder(path) / "metrics.jsonl", forked.start("train", path, "--quiet")
    while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < 2):
        time.sleep(0.02)
    mark.write_text("hang")
    while process.poll() is None and mark.read_text() != "hangs":
        time.sleep(0.02)
    done = len(metrics(path))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143, process.said  # the call would take an hour
    named = re.search(r"ended by SIGTERM; the last checkpoint is (\S+); the same command continues from there", process.said)
    assert named, process.said
    assert step_of(Path(named[1])) == done == step_of(latest(folder(path)) or Path("0"))
    mark.unlink()
    assert next(train(load_recipe(path))).number == done + 1


def test_c7_calls_in_worker_processes_end_too(recipe: Callable, tmp_path: Path) -> None:
    path, mark = recipe("workers", rewards=[{"function": "judges.py:judge", "timeout": 600.0}]), tmp_path / "mark"

    def tell() -> None:
        while not mark.exists() or mark.read_text() != "hangs":
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    def go() -> None:
        for step in train(load_recipe(path)):
            if step.number == 1:
                mark.write_text("hang")

    others = threading.enumerate()
    threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(Ended):
        go()
    deadline = time.monotonic() + 200  # of the ten minutes that the call has
    while left := [one for one in threading.enumerate() if one not in others and one.name.startswith(("rewards", "ThreadPool"))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_second_signal_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with endings(lambda: False):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # a launcher's, right behind the first
        clock[0] += 2.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_launchers_second_signal_does_not_disturb_the_end_and_one_that_was_dropped_is_told_again() -> None:
    with endings(lambda: True) as due:
        due()
        with pytest.raises(Ended):  # dropped, as by a `__del__`
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Ended):
            due()


def test_a_signalled_process_that_lost_its_peers_still_ends_by_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: object) -> list[int]:
        raise PeerError("gloo: connection closed")

    monkeypatch.setattr(comm, "gather", lost)

    def last_exchange(*told: int) -> None:
        with endings(lambda: False) as due:
            for number in told:  # in the middle of an update
                signal.raise_signal(number)
            due()

    with pytest.raises(Ended) as found:
        last_exchange(signal.SIGINT, signal.SIGTERM)
    assert isinstance(found.value.__cause__, PeerError)
    with pytest.raises(KeyboardInterrupt):
        last_exchange(signal.SIGINT)
    with pytest.raises(PeerError):
        last_exchange()


def test_another_thread_leaves_signals_alone() -> None:
    found = []

    def run() -> None:
        with endings(lambda: True) as due:
            due()
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]
