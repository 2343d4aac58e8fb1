"""A thousand random faults in worker processes: no answer is lost, none is wrong, and nothing is left behind."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise.utils import processes
from groupwise.utils.process_main import LINUX, descendants
from groupwise.utils.processes import Died, NotStarted, Pool, Raised, WorkerProcess

WAIT = 300.0
"""Seconds of a call that ends by itself."""
CALLS = """
import ctypes, os, signal, subprocess, time
seen = 0
def make():
    def call(what, number):
        global seen
        seen += 1
        if what == "hang": time.sleep(3600)
        if what == "leave": subprocess.Popen(["sleep", "3600"], start_new_session=True)
        if what == "leave and hang": subprocess.Popen(["sleep", "3600"]); time.sleep(3600)
        if what == "exit": os._exit(number % 7)
        if what == "crash": ctypes.string_at(0)
        if what == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if what == "raise": raise ValueError(number)
        if what == "large": return [number] * 20_000
        if what == "wait": time.sleep(0.02)
        return number
    return call
"""
NUMBERS = itertools.count()


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What workers serve; when the test ends, this process has the children and descriptors that it had before."""
    (tmp_path / "random_calls.py").write_text(CALLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    WorkerProcess("operator:attrgetter", "real").kill()  # what the first process ever imports or opens
    children, open_files = set(descendants(os.getpid())), len(os.listdir("/proc/self/fd"))
    connections = set(processes._connections)
    yield "random_calls:make"
    limit = time.monotonic() + 60.0
    while (left := set(descendants(os.getpid())) - children) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not left
    assert processes._connections == connections
    assert len(os.listdir("/proc/self/fd")) == open_files


def answer_to(process: WorkerProcess, what: str, seconds: float) -> str:
    """The outcome of a call; an answer is the one to this call."""
    number = next(NUMBERS)
    try:
        answer = process.call(what, number, seconds=seconds)
    except TimeoutError:
        return "late"
    except (Died, NotStarted):
        return "died"
    except Raised as error:
        return "raised" if (error.kind, error.message) == ("ValueError", str(number)) else f"wrong: {error}"
    return "answered" if answer == ([number] * 20_000 if what == "large" else number) else "wrong"


EXPECTED = {
    "echo": "answered", "large": "answered", "wait": "answered", "leave": "answered", "raise": "raised",
    "hang": "late", "leave and hang": "late", "exit": "died", "crash": "died", "kill": "died",
}  # fmt: skip
"""What becomes of each call of a process that nobody else ends."""


def outcome_of(process: WorkerProcess, what: str, rng: random.Random) -> None:
    seconds = rng.uniform(0.0, 0.05) if EXPECTED[what] == "late" else WAIT
    assert answer_to(process, what, seconds) == EXPECTED[what]
    assert process.alive() == (EXPECTED[what] in ("answered", "raised"))


def ended_by_another_thread(process: WorkerProcess, rng: random.Random) -> None:
    """Killed at some moment of a call: it is answered or it has died; afterwards it has."""
    other = threading.Timer(rng.uniform(0.0, 0.03), process.kill)
    other.start()
    assert answer_to(process, rng.choice(["wait", "large", "hang"]), WAIT) in ("answered", "died")
    other.join()
    assert answer_to(process, "echo", WAIT) == "died"


def faults_in_forks(target: str, rng: random.Random, count: int) -> None:
    """Each in a fork of its own, between calls of the process itself, which goes on counting."""
    process = WorkerProcess(target)
    for _ in range(count):
        fork = process.fork()
        if rng.random() < 0.25:
            ended_by_another_thread(fork, rng)
        else:
            for what in rng.sample([*EXPECTED], 3):
                outcome_of(fork, what, rng)
                if EXPECTED[what] in ("late", "died"):
                    break
        if rng.random() < 0.8:
            fork.kill()
        assert answer_to(process, rng.choice(["echo", "raise", "leave"]), WAIT) in ("answered", "raised")
    process.kill()


def faults_in_processes(target: str, rng: random.Random, count: int) -> None:
    """Each ends a process, with forks that live."""
    for _ in range(count):
        process = WorkerProcess(target)
        forks = [process.fork() for _ in range(rng.randrange(3))]
        assert [answer_to(fork, "echo", WAIT) for fork in forks] == ["answered"] * len(forks)
        if rng.random() < 0.3:
            ended_by_another_thread(process, rng)
        else:
            outcome_of(process, rng.choice([what for what, becomes in EXPECTED.items() if becomes in ("late", "died")]), rng)
        process.kill()
        assert all(answer_to(fork, "echo", WAIT) == "died" for fork in forks)


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="only Linux tells what processes have started")
@pytest.mark.timeout(1200)
def test_a_thousand_random_faults_leave_nothing_and_lose_nothing(calls: str) -> None:
    """Of four threads at the same time: 900 in forks, 100 in processes."""
    raised: list[BaseException] = []

    def run(work, *arguments) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(faults_in_forks, calls, random.Random(seed), 300)) for seed in range(3)]
    threads.append(threading.Thread(target=run, args=(faults_in_processes, calls, random.Random(9), 100)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="only Linux tells what processes have started")
@pytest.mark.timeout(600)
def test_a_pool_whose_processes_die_at_random_answers_every_call(calls: str) -> None:
    """Six threads share three processes, which somebody else kills as well; then the pool is closed in the middle of calls."""
    outcomes, lock = Counter[str](), threading.Lock()

    def calling(pool: Pool, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            number, what = next(NUMBERS), rng.choice(["echo", "echo", "large", "wait", "raise", "exit", "crash", "leave"])
            try:
                answer = pool.call(what, number)
            except (Died, NotStarted, TimeoutError, Raised) as error:
                wrong = isinstance(error, Raised) and error.message != str(number)
                found = "wrong" if wrong else type(error).__name__
            else:
                found = "answered" if answer == ([number] * 20_000 if what == "large" else number) else "wrong"
            with lock:
                outcomes[found] += 1

    def killing(pool: Pool, stop: threading.Event) -> None:
        rng = random.Random(99)
        while not stop.wait(0.2):
            for process in rng.sample(sorted(pool._busy, key=id), min(1, len(pool._busy))):
                process.kill()

    stop = threading.Event()
    with Pool(calls, size=3, seconds=WAIT) as pool:
        killer = threading.Thread(target=killing, args=(pool, stop))
        callers = [threading.Thread(target=calling, args=(pool, seed)) for seed in range(6)]
        for thread in (killer, *callers):
            thread.start()
        for thread in callers:
            thread.join()
        stop.set()
        killer.join()
        assert (outcomes.total(), outcomes["wrong"]) == (240, 0)
        late = [threading.Thread(target=lambda: outcomes.update([hanging(pool)])) for _ in range(3)]
        for thread in late:
            thread.start()
        while len(pool._busy) < 3:
            time.sleep(0.01)
    for thread in late:
        thread.join()
    assert outcomes["ended with the pool"] == 3


def hanging(pool: Pool) -> str:
    try:
        pool.call("hang", 0)
    except (Died, NotStarted):
        return "ended with the pool"
    return "answered"
