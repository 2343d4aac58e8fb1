"""Workers that hang, crash, eat memory or ignore signals: the call ends on time, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from groupwise.errors import RewardError
from groupwise.rewards.returned import LARGEST
from groupwise.rewards.workers import Pool


@pytest.fixture
def hostile(tmp_path, monkeypatch) -> str:
    """A module of calls that misbehave, importable by workers."""
    (tmp_path / "hostile_calls.py").write_text(
        """
import ctypes, os, signal, sys, time, subprocess
calls = 0
def make(prefix=""):
    def call(what, *rest):
        global calls
        calls += 1
        if what == "echo": return [prefix, *rest]
        if what == "pid": return os.getpid()
        if what == "calls": return calls
        if what == "sleep": time.sleep(3600)
        if what == "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()) - {signal.SIGKILL})
            while True: pass
        if what == "burn": return 9 ** 9 ** 9
        if what == "segfault": ctypes.string_at(0)
        if what == "exit": os._exit(7)
        if what == "sys.exit": sys.exit(3)
        if what == "memory": return len(bytearray(4 << 30))
        if what == "raise": raise ValueError("no such luck")
        if what == "object": return object()
        if what == "print": print("noise " * 10000); return 1
        if what == "child": return subprocess.Popen(["sleep", "3600"]).pid, time.sleep(3600)
        if what == "tell": open(rest[0], "w").write(str(subprocess.Popen(["sleep", "3600"]).pid)); time.sleep(3600)
    return call
def broken(): raise ImportError("no module named luck")
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "hostile_calls:make"


def gone(pid: int) -> bool:
    for _ in range(3000):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True  # reaped by init in its own time
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def zombies() -> int:
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    fields = stat.read().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            count += fields[0] == "Z" and int(fields[1]) == os.getpid()
    return count


def test_values_and_setup(hostile):
    with Pool(hostile, setup=("hi",), size=2, seconds=20.0) as pool:
        outcomes = pool.map([("echo", n, "\ud800\x00") for n in range(20)])
    assert [outcome.value for outcome in outcomes] == [["hi", n, "\ud800\x00"] for n in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sleep", "deaf"])
def test_r03_r04_hangs_are_killed_on_time_and_the_worker_replaced(hostile, what):
    with Pool(hostile, size=1, seconds=60.0) as pool:
        first = pool.run("pid").value
        pool.seconds = 0.5
        outcome = pool.run(what)
        pool.seconds = 60.0
        assert outcome.failure == "timeout"
        assert "0.5 s" in outcome.message
        assert gone(first)
        assert pool.run("echo", 1).value == ["", 1]
    assert zombies() == 0


def test_processor_time_is_a_deadline_of_its_own(hostile):
    with Pool(hostile, size=1, seconds=3600.0, cpu_seconds=0.3) as pool:
        outcome = pool.run("burn")  # one C call that holds the interpreter: no Python-level alarm could end it
        assert outcome.failure == "timeout"
        assert pool.run("echo").value == [""]


@pytest.mark.parametrize(("what", "said"), [("segfault", "signal 11"), ("exit", "exit code 7")])
def test_r05_crashes_are_named(hostile, what, said):
    with Pool(hostile, size=1, seconds=20.0) as pool:
        outcome = pool.run(what)
        assert (outcome.failure, outcome.message) == ("died", f"worker died ({said})")
        assert pool.run("echo", 1).value == ["", 1]
    assert zombies() == 0


def test_exceptions_come_back_with_type_message_and_place(hostile):
    with Pool(hostile, size=1, seconds=20.0) as pool:
        outcome = pool.run("raise")
        assert (outcome.failure, outcome.kind, outcome.message) == ("error", "ValueError", "no such luck")
        assert "hostile_calls.py" in outcome.where
        assert pool.run("sys.exit").kind == "SystemExit"
        assert pool.run("object").kind == "TypeError"  # not JSON: no pickle comes back from a worker
        assert pool.run("calls").value == 4  # the worker lives on


def test_memory_is_bounded(hostile):
    with Pool(hostile, size=1, seconds=20.0, memory=1 << 30) as pool:
        outcome = pool.run("memory")
        assert (outcome.failure, outcome.kind) == ("error", "MemoryError")
        assert pool.run("calls").value == 1  # a fresh worker


def test_output_does_not_disturb_the_channel(hostile, capfd):
    with Pool(hostile, size=1, seconds=20.0) as pool:
        assert pool.run("print").value == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("noise")


@pytest.mark.slow
def test_what_a_worker_started_dies_with_it(hostile, tmp_path):
    with Pool(hostile, size=1, seconds=5.0) as pool:
        assert pool.run("tell", str(tmp_path / "pid")).failure == "timeout"
    assert gone(int((tmp_path / "pid").read_text()))


def test_workers_retire(hostile):
    with Pool(hostile, size=1, seconds=20.0, max_calls=3) as pool:
        pids = [pool.run("pid").value for _ in range(7)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]


def test_close_leaves_no_process(hostile):
    pool = Pool(hostile, size=2, seconds=20.0)
    pids = {outcome.value for outcome in pool.map([("pid",)] * 8)}
    pool.close()
    assert all(gone(pid) for pid in pids)
    assert zombies() == 0
    assert pool.run("echo").value == [""]
    pool.close()


def test_a_worker_that_died_between_calls_is_replaced(hostile):
    with Pool(hostile, size=1, seconds=20.0) as pool:
        worker = pool.run("pid").value
        os.kill(worker, 9)
        assert gone(worker)
        assert pool.run("echo", 1).value == ["", 1]


def test_any_thread_and_asyncio_may_call(hostile):
    with Pool(hostile, size=2, seconds=20.0) as pool:
        results: list[object] = []
        threads = [threading.Thread(target=lambda n=n: results.append(pool.run("echo", n).value[1])) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        async def inside() -> object:
            return pool.run("echo", 6).value[1]

        results.append(asyncio.run(inside()))
    assert sorted(results) == list(range(7))


def test_a_fork_does_not_talk_to_the_parents_workers(hostile):
    with Pool(hostile, size=1, seconds=20.0) as pool:
        before = pool.run("pid").value
        child = os.fork()
        if child == 0:
            other = pool.run("pid").value
            pool.close()
            os._exit(0 if other != before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.run("pid").value == before


def test_a_worker_that_cannot_start_says_why(hostile):
    with pytest.raises(RewardError, match="hostile_calls:broken could not start: no module named luck"):
        Pool("hostile_calls:broken", size=1, seconds=1.0).run()


def test_a_worker_of_plain_functions_imports_neither_numpy_nor_asyncio(tmp_path):
    """From its start to the values that it answers with."""
    (tmp_path / "plain.py").write_text("def f(completions): return [len(c) / 2 for c in completions]")
    code = """
import pickle, sys
from groupwise.rewards.functions import Unit, worker
answer = worker(["plain.py:f"])
(told,) = answer("describe", ("plain.py:f", "f", {}, ["answer"]))
called = {key: told[key] for key in ("single", "asynchronous", "process")}
given = pickle.dumps({"completions": ["a", "bc"]})
unit = Unit(spec="plain.py:f", name="f", arguments={}, timeout=None, labels=["0#0", "0#1"], given=given, **called)
((_, kind, (values, *_)),) = answer("call", unit)
print(kind, values, [module for module in ("numpy", "asyncio") if module in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "values [0.5, 1.0] []"


def test_the_largest_reward_is_what_single_precision_holds():
    assert float(np.finfo(np.float32).max) == LARGEST
