"""Reward functions that hang, die, use signals, change what they are given or what is around them: none of it reaches the run."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from process_states import gone, running
from safetensors.torch import load_file

from groupwise.config.recipes import load_recipe
from groupwise.errors import DataError, RewardError
from groupwise.inspection.score import score_file
from groupwise.rewards import calls
from groupwise.rewards.compose import LiveReward, build_rewards
from groupwise.rewards.user_functions import Completions
from groupwise.runs.run import train

Start = Callable[..., Path]
SUM = "float(sum(ids) % 5)"


@pytest.fixture
def recipe(write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`recipe(name, code, **changes)`: a run of four steps whose reward is `judge` of this code."""
    monkeypatch.chdir(tmp_path)

    def make(name: str, code: str, **changes: Any) -> Path:
        (tmp_path / f"{name}_judge.py").write_text(textwrap.dedent(code))
        return write_recipe(tmp_path, name, **({"rewards": [{"function": f"{name}_judge.py:judge"}], "eval": {"k": 1}} | changes))

    return make


def run(path: Path, stop: int | None = None) -> list[float]:
    """Train, up to a step; the mean reward of each step."""
    found = []
    for step in train(load_recipe(path)):
        if step.number == 0:  # an evaluation
            continue
        found.append(float(np.mean(np.concatenate([group.reward for group in step.groups]))))
        if step.number == stop:
            break
    return found


def folder(path: Path) -> Path:
    return path.parent / "runs" / path.stem


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(folder(path) / "final" / "model.safetensors")


def steps(path: Path) -> int:
    log = folder(path) / "metrics.jsonl"
    return max((json.loads(line)["step"] for line in log.read_text().splitlines()), default=0) if log.exists() else 0


def batch(*texts: str, **columns: list[Any]) -> Completions:
    labels = [f"0/0#{n}" for n in range(len(texts))]
    return Completions(
        labels=labels, prompts=["?"] * len(texts), prompt_texts=["?"] * len(texts), texts=texts, completions=texts, columns=columns
    )


# ---- that do not return ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fault("T2", "reward sleeps 1 h, no timeout set", "error that names it after the default; the same command continues")
def test_t2_a_reward_that_hangs_without_a_timeout_ends_the_run(
    recipe: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
        import pathlib, time
        def judge(completion_ids, **_):
            if pathlib.Path("hang").exists():
                time.sleep(3600)
            return [{SUM} for ids in completion_ids]
    """
    path = recipe("sleeps", code)
    assert len(run(path, stop=2)) == 2
    (tmp_path / "hang").write_text("")
    monkeypatch.setattr(calls, "DEFAULT_SECONDS", 3.0)
    monkeypatch.setattr(calls, "SECONDS_EACH", 0.1)
    with pytest.raises(
        RewardError, match=r"'judge' gave no result within 3 s and was stopped; on completions 0 of row .* say how long by timeout:"
    ):
        run(path)
    (tmp_path / "hang").unlink()
    monkeypatch.undo()
    os.chdir(tmp_path)
    assert len(run(path)) == 2


@pytest.mark.slow
@pytest.mark.fault("R24", "a regex that never ends (holds the interpreter), no timeout; Ctrl-C", "exit 130 at once, steps kept")
def test_r24_ctrl_c_ends_a_run_whose_reward_holds_the_interpreter(recipe: Start, forked: Any, tmp_path: Path) -> None:
    code = f"""
        import pathlib, re
        def judge(completion_ids, **_):
            if pathlib.Path("hang").exists():
                pathlib.Path("hangs").write_text("")
                re.fullmatch("(a+)+", "a" * 100 + "b")
            return [{SUM} for ids in completion_ids]
    """
    path = recipe("regex", code, steps=500, save={"every": 0})
    process = forked.start("train", path, "--quiet")
    while process.poll() is None and steps(path) < 2:
        time.sleep(0.05)
    (tmp_path / "hang").write_text("")
    while process.poll() is None and not (tmp_path / "hangs").exists():
        time.sleep(0.05)
    done = steps(path)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130, process.said
    (tmp_path / "hang").unlink()
    assert next(train(load_recipe(path))).number == done + 1


# ---- that die, or raise what is not theirs ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fault("R5c", "os._exit(7) in the reward at step 3, no timeout", "exit 1, the reward named, steps kept")
def test_r5c_a_reward_that_ends_its_process_does_not_end_the_run_with_it(recipe: Start, forked: Any) -> None:
    code = f"""
        import os, pathlib
        def judge(completion_ids, **_):
            if pathlib.Path("runs/exits/checkpoints/000002").exists():
                os._exit(7)
            return [{SUM} for ids in completion_ids]
    """
    path = recipe("exits", code)
    process = forked.run("train", path, "--quiet")
    assert process.returncode == 1, process.said
    said = " ".join(process.said.split())
    assert "RewardError: the reward function 'judge' did not return: worker died (exit code 7); on " in said
    assert "Traceback" not in said
    assert steps(path) == 2


@pytest.mark.parametrize("way", ["def", "async def"])
@pytest.mark.fault("R5e", "the reward raises KeyboardInterrupt", "an error of the reward, not a Ctrl-C")
def test_r5e_a_keyboard_interrupt_of_the_reward_is_its_error(recipe: Start, way: str) -> None:
    path = recipe("interrupts", f"{way} judge(completions, **_):\n    raise KeyboardInterrupt('mine')")
    with pytest.raises(RewardError, match=r"the reward function 'judge' raised .*KeyboardInterrupt: mine \(.*line 2"):
        run(path)


@pytest.mark.parametrize("end", ["\x1b]0;pwn\x07\x1b[31mred", "\u202e\u200b", "[/oops]"])
@pytest.mark.fault("R23/V5", "an exception whose message quotes control characters or markup", "shown as escapes")
def test_r23_v5_what_an_exception_quotes_cannot_steer_the_terminal(recipe: Start, end: str) -> None:
    path = recipe("quotes", f"def judge(completions, **_): raise ValueError('bad: ' + {end!a})")
    with pytest.raises(RewardError) as caught:
        run(path)
    said = str(caught.value)
    assert all(c.isprintable() for c in said)
    assert "raised ValueError: bad: " + (end if end.isprintable() else end.encode("unicode_escape").decode()) in said


# ---- that need the main thread ---------------------------------------------------------------------------------------------------

MATH_VERIFY = """
    from math_verify import parse, verify
    def judge(completions, **_):
        rewards = []
        for completion in completions:
            {before}rewards.append(float(verify(parse("$4$"), parse("$4$"))))
            {after}
        return rewards
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            MATH_VERIFY.format(before="try: ", after="except Exception: rewards.append(0.0)"),
            marks=pytest.mark.fault("M5", "math_verify in a try, as Open-R1 has it", "the same reward in training and in score"),
        ),
        pytest.param(
            MATH_VERIFY.format(before="", after=""),
            marks=pytest.mark.fault("M5b", "math_verify in the reward", "the same reward in training and in score"),
        ),
        pytest.param(
            """
            import signal, time
            def judge(completions, **_):
                late = []
                signal.signal(signal.SIGALRM, lambda *_: late.append(1))
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                time.sleep(0.05)
                return [float(len(late))] * len(completions)
            """,
            marks=pytest.mark.fault("R16", "signal.alarm with a handler in the reward", "it works, in training as in score"),
        ),
    ],
)
def test_m5_m5b_r16_rewards_run_on_a_main_thread_wherever_they_are_called(recipe: Start, code: str) -> None:
    path = recipe("signals", code, steps=1, eval={"k": 1, "at_start": True})
    pytest.importorskip("math_verify")
    assert run(path) == [1.0]
    report = score_file(["signals_judge.py:judge"], folder(path))
    assert report.rewards.ravel().tolist() == [1.0] * 9
    done = json.loads((folder(path) / "done.json").read_text())
    assert "greedy" in json.dumps(done)


# ---- that change what they are given, or what is around them ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fault("R13c", "the reward pops from a list column of the row, over two epochs and a resume", "equal rewards by step")
def test_r13c_what_a_reward_does_to_its_arguments_stays_there(recipe: Start, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "left": [{"n": n}, {"n": 1}]} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = """
        def judge(completion_ids, left, **_):
            rewards = [float(len(one)) for one in left]
            for one in left:
                one.pop()["n"] = 99
                one[0]["n"] = -1
            return rewards
    """
    changes = {"data": {"path": "rows.jsonl", "task": None, "limit": None, "eval_limit": 1}, "rollout": {"max_new_tokens": 4}}
    straight, broken = recipe("straight", code, **changes), recipe("broken", code, **changes)
    assert run(straight) == [2.0] * 4  # two epochs; each of a prompt's completions has its own list
    assert run(broken, stop=2) + run(broken) == [2.0] * 4
    recorded = pyarrow.parquet.read_table(folder(straight) / "rollouts" / "000004.parquet")["row"].to_pylist()
    assert {json.dumps(json.loads(row)["left"]) for row in recorded} <= {json.dumps(row["left"]) for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        pytest.param("os.chdir('/')", marks=pytest.mark.fault("R31", "the reward calls os.chdir('/')", "equal to the clean run")),
        pytest.param(
            "sys.stdout.close()", marks=pytest.mark.fault("R34", "the reward closes sys.stdout", "equal to the clean run")
        ),
        pytest.param(
            "signal.signal(signal.SIGINT, signal.SIG_IGN); random.seed(0); os.environ.clear(); sys.path.clear()",
            marks=pytest.mark.fault("R16b", "the reward changes handlers, seeds, environment", "equal to the clean run"),
        ),
    ],
)
def test_r31_r34_what_a_reward_does_to_its_process_stays_there(recipe: Start, line: str) -> None:
    code = (
        f"import os, random, signal, sys\ndef judge(completion_ids, **_):\n    {{}}\n    return [{SUM} for ids in completion_ids]\n"
    )
    clean, disturbed = recipe("clean", code.format("pass")), recipe("disturbed", code.format(line))
    here, environment, handler = os.getcwd(), dict(os.environ), signal.getsignal(signal.SIGINT)
    assert run(clean) == run(disturbed)
    print("standard output is still there")
    assert (os.getcwd(), dict(os.environ), signal.getsignal(signal.SIGINT)) == (here, environment, handler)
    assert all(torch.equal(weights(disturbed)[name], weight) for name, weight in weights(clean).items())


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.fault("H9b", "an answer that is a whole number of 5,000 digits", "the row named; as a string it is compared")
def test_h9b_a_number_of_5000_digits(tmp_path: Path, suffix: str) -> None:
    rows, digits = tmp_path / f"rows{suffix}", "7" * 5000
    row = '{"prompt": "?", "completion": "%s", "answer": %s}'
    wrap = (lambda line: f"[{line}]") if suffix == ".json" else (lambda line: line)
    rows.write_text(wrap(row % (f"#### {digits}", digits)))
    with pytest.raises(DataError, match=r"rows\.jsonl? ?.*: a whole number of 5,000 digits: write it as a string"):
        score_file(["accuracy"], rows)
    rows.write_text(wrap(row % (f"#### {digits}", f'"{digits}"')))
    assert score_file(["accuracy", "number"], rows).rewards.tolist() == [[1.0, 1.0]]


# ---- that start others -----------------------------------------------------------------------------------------------------------

CHILDREN = """
import os, pathlib, subprocess, sys, time
FAMILY = '''
import subprocess, sys, time
own = {"start_new_session": True, "stdout": subprocess.DEVNULL}
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], **own).pid, flush=True)
'''
def judge(completions, **_):
    if not pathlib.Path("pids").exists():
        waits = [sys.executable, "-c", FAMILY + "time.sleep(3600)"]
        child = subprocess.Popen(waits, start_new_session=True, stdout=subprocess.PIPE, text=True)
        orphan = subprocess.check_output([sys.executable, "-c", FAMILY])
        pids = [os.getpid(), os.getppid(), child.pid, int(child.stdout.readline()), int(orphan)]
        pathlib.Path("new").write_text(" ".join(map(str, pids)))
        pathlib.Path("new").rename("pids")
    if pathlib.Path("hang").exists():
        time.sleep(3600)
    return [1.0] * len(completions)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can adopt orphans")
@pytest.mark.parametrize("how", ["close", "timeout", "forgotten"])
@pytest.mark.fault("R35", "children in sessions of their own, grandchildren, orphans", "none is left after the rewards")
def test_r35_what_a_reward_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "family.py").write_text(CHILDREN)
    rewards = build_rewards([_settings("family.py:judge", timeout=60.0)], columns=())
    assert rewards.call(batch("4")) == [[1.0]]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(map(running, pids))
    if how == "timeout":
        (tmp_path / "hang").write_text("")
        object.__setattr__(rewards._rewards[0], "timeout", 0.5)
        assert rewards.call(batch("4")) == [[None]]
    elif how == "close":
        rewards.close()
    else:
        del rewards
    assert gone(*pids)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can adopt orphans")
@pytest.mark.fault("R36", "kill -9 of the run while a reward has children", "workers, children and grandchildren end too")
def test_r36_nothing_outlives_a_run_that_is_killed(tmp_path: Path, forked: Any) -> None:
    (tmp_path / "family.py").write_text(CHILDREN)
    (tmp_path / "hang").write_text("")
    code = """
        from groupwise.config.settings import RewardSettings
        from groupwise.rewards.compose import build_rewards
        from groupwise.rewards.user_functions import Completions
        rewards = build_rewards([RewardSettings(function="family.py:judge")], columns=())
        rewards.call(Completions(labels=["0"], prompts=["?"], prompt_texts=["?"], completions=["4"], texts=["4"]))
    """
    process = forked.start(code=textwrap.dedent(code), cwd=tmp_path)
    try:
        while process.poll() is None and not (tmp_path / "pids").exists():
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert gone(*pids)


# ---- functions that exist only in this process -----------------------------------------------------------------------------------


def _settings(function: str, **keywords: Any) -> Any:
    from groupwise.config.settings import RewardSettings

    return RewardSettings(function=function, **keywords)


@pytest.fixture
def live() -> Iterator[Callable[..., Any]]:
    """`live(function, **keywords)`: it alone as rewards."""
    made = []

    def make(function: Any, columns: tuple[str, ...] = (), **keywords: Any) -> Any:
        made.append(build_rewards([LiveReward(function=function, **keywords)], columns=columns))
        return made[-1]

    yield make
    for rewards in made:
        rewards.close()


FORKS = """
import os
calls = [0]
def judge(completions, **_):
    calls[0] += 1
    if calls[0] == 1 and os.fork() == 0:
        {child}
    return [float(calls[0])] * len(completions)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("child", ["pass", "raise ValueError('the child')", "calls[0] = 7"])
@pytest.mark.fault("R38", "a reward forks, and the child returns or raises where it should have ended", "its answer is not heard")
def test_r38_a_child_of_a_reward_does_not_answer_in_its_place(child: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forks.py").write_text(FORKS.format(child=child))
    rewards = build_rewards([_settings("forks.py:judge")], columns=())
    try:
        assert [rewards.call(batch("4")) for _ in range(4)] == [[[1.0]], [[2.0]], [[3.0]], [[4.0]]]
    finally:
        rewards.close()


@pytest.mark.slow
@pytest.mark.fault("R37", "a closure that exits, hangs, or holds the interpreter, in a fork", "as for a function of a file")
def test_r37_a_closure_runs_in_a_fork_that_can_be_killed(live: Callable, capfd: pytest.CaptureFixture) -> None:
    import re
    import threading

    seen, factor = [], 3.0

    def judge(completions, answers):
        seen.append(os.getpid())
        answers[0].append(1)
        assert threading.current_thread() is threading.main_thread()
        signal.alarm(100)
        print("said", completions[0])
        if completions[0] == "exit":
            os._exit(7)
        if completions[0] == "regex":
            re.fullmatch("(a+)+", "a" * 100 + "b")
        return [factor * len(seen)] * len(completions)

    answers = [[0]]
    rewards = live(judge, ("answers",))
    assert rewards.names == ("judge",)
    assert rewards.call(batch("4", answers=answers)) == [[3.0]]
    assert rewards.call(batch("4", answers=answers)) == [[6.0]]  # its state is kept, in the fork
    assert (seen, answers) == ([], [[0]])
    printed, ends = "", time.monotonic() + 60.0
    while printed != "said 4\nsaid 4\n":  # words take another way than answers, and may come later
        assert time.monotonic() < ends, printed
        printed += capfd.readouterr().err
    with pytest.raises(RewardError, match=r"'judge' did not return: worker died \(exit code 7\)"):
        rewards.call(batch("exit", answers=answers))
    late = live(judge, ("answers",), timeout=0.5)
    assert late.call(batch("regex", answers=answers)) == [[None]]


def test_a_live_function_may_run_here_and_then_sees_the_program(live: Callable) -> None:
    import threading

    seen = []

    async def later(completion: str) -> float:
        seen.append(threading.current_thread().name)
        return float(completion)

    def judge(completions: list[str], answers: list[list[int]]) -> list[float]:
        seen.append(threading.current_thread().name)
        answers[0].append(1)
        return [float(len(completions))] * len(completions)

    answers = [[0], [0]]
    assert live(judge, ("answers",), runs="here").call(batch("4", "5", answers=answers)) == [[2.0, 2.0]]
    assert live(later, runs="here", timeout=30.0).call(batch("4", "5")) == [[4.0, 5.0]]
    assert set(seen) == {"groupwise-rewards"}
    assert answers == [[0], [0]]
    with pytest.raises(RewardError, match=r"'judge' raised .*missing"):
        live(lambda completions: judge(completions), runs="here", name="judge").call(batch("4"))
