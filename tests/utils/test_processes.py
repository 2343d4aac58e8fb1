"""Processes that hang, crash, eat memory or ignore signals: the call ends on time, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
from process_states import gone, running

from groupwise.utils.process_main import LINUX, SENT_TO_ALL, descendants
from groupwise.utils.processes import Died, NotStarted, Pool, Raised, WorkerProcess

WAIT = 60.0


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
        if what == "exit -1": os._exit(-1)
        if what == "exit 137": os._exit(137)
        if what == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if what == "count": return (number for number in range(rest[0]))
        if what == "sys.exit": sys.exit(3)
        if what == "memory": return len(bytearray(4 << 30))
        if what == "raise": raise ValueError("no such luck")
        if what == "raise megabytes": raise ValueError("x" * 1_000_000)
        if what == "write": return [os.write(2, bytes([byte])) for byte in rest[0]]
        if what == "object": return object()
        if what == "collect":
            import gc
            return gc.collect()
        if what == "print": print("noise " * 10000); return 1
        if what == "print megabytes": print("noise " * 833_333 + "."); return 1
        if what == "start":
            how, path = rest
            if how == "daemon":
                child = os.fork()
                if child:
                    os.waitpid(child, 0)
                    return None
                os.setsid()
                open(path, "w").write(str(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid))
                os._exit(0)
            open(path, "w").write(str(subprocess.Popen(["sleep", "3600"], start_new_session=how == "session").pid))
            return None
        if what == "child": return subprocess.Popen(["sleep", "3600"]).pid, time.sleep(3600)
        if what == "tell": open(rest[0], "w").write(str(subprocess.Popen(["sleep", "3600"]).pid)); time.sleep(3600)
    return call
def broken(): raise ImportError("no module named luck")
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "hostile_calls:make"


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
    with Pool(hostile, "hi", size=2, seconds=20.0) as pool:
        found = pool.map([("echo", n, "\ud800\x00") for n in range(20)])
    assert found == [["hi", n, "\ud800\x00"] for n in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sleep", "deaf"])
def test_r03_r04_hangs_are_killed_on_time_and_the_worker_replaced(hostile, what):
    with Pool(hostile, size=1, seconds=60.0) as pool:
        first = pool.call("pid")
        pool.seconds = 0.5
        with pytest.raises(TimeoutError):
            pool.call(what)
        pool.seconds = 60.0
        assert gone(first)
        assert pool.call("echo", 1) == ["", 1]
    assert zombies() == 0


def test_processor_time_is_a_deadline_of_its_own(hostile):
    with Pool(hostile, size=1, seconds=3600.0, cpu_seconds=0.3) as pool:
        with pytest.raises(Died, match="processor time") as died:
            pool.call("burn")  # one C call that holds the interpreter: no Python-level alarm could end it
        assert died.value.cpu
        assert pool.call("echo") == [""]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("segfault", "signal 11"),
        ("exit", "exit code 7"),
        ("exit -1", "exit code 255"),
        ("exit 137", "exit code 137"),
        ("kill", "signal 9"),
    ],
)
def test_r05_crashes_are_named(hostile, what, said):
    with Pool(hostile, size=1, seconds=20.0) as pool:
        with pytest.raises(Died) as died:
            pool.call(what)
        assert (str(died.value), died.value.cpu) == (f"worker died ({said})", False)
        assert pool.call("echo", 1) == ["", 1]
    assert zombies() == 0


@pytest.fixture
def worker_of(hostile):
    """`worker_of(kind)`: a worker of one of `KINDS`; all end with the test."""
    made = []

    def start(kind: str, **options) -> WorkerProcess:
        target = importlib.import_module("hostile_calls").make if kind == "fork of the program" else hostile
        made.append(WorkerProcess(target, **options))
        if kind == "fork of a worker":
            made.append(made[-1].fork())
        return made[-1]

    yield start
    for process in made:
        process.kill()


KINDS = ("interpreter", "fork of the program", "fork of a worker")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("what", "said"), [("exit", "exit code 7"), ("segfault", "signal 11"), ("burn", "processor time")])
def test_a_worker_of_any_kind_says_how_it_ended(worker_of, kind, what, said):
    process = worker_of(kind, cpu_seconds=0.2)
    with pytest.raises(Died, match=said) as died:
        process.call(what, seconds=WAIT)
    assert died.value.cpu == (what == "burn")
    assert not process.alive() and zombies() == 0


class Waits:
    """An object of a cycle, whose destructor waits for a thread of the process that made it."""

    def __init__(self) -> None:
        self.itself, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            time.sleep(3600)


def test_a_fork_takes_apart_nothing_that_came_along(worker_of):
    """As a process group of gloo's would, whose destructor waits for its threads."""
    gc.collect()
    gc.disable()
    try:
        Waits()
        process = worker_of("fork of the program")
        assert process.call("collect", seconds=WAIT) >= 0
    finally:
        gc.enable()
        gc.collect()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_what_a_quiet_worker_prints_is_dropped(worker_of, capfd, kind):
    process = worker_of(kind, quiet=True)
    assert process.call("print", seconds=WAIT) == 1
    process.kill()
    assert capfd.readouterr() == ("", "")


def test_exceptions_come_back_with_type_message_and_place(hostile):
    with Pool(hostile, size=1, seconds=20.0) as pool:
        errors = pool.map([("raise",), ("sys.exit",), ("object",)])  # the last is not JSON: no pickle comes back
        assert [error.kind for error in errors] == ["ValueError", "SystemExit", "TypeError"]
        assert errors[0].message == "no such luck" and "hostile_calls.py" in errors[0].where
        assert "no such luck" in str(errors[0].__cause__)
        assert pool.call("calls") == 4  # the process lives on


def test_memory_is_bounded(hostile):
    with Pool(hostile, size=1, seconds=20.0, memory=1 << 30) as pool:
        with pytest.raises(Raised, match="MemoryError"):
            pool.call("memory")
        assert pool.call("calls") == 1  # a fresh process


def test_output_does_not_disturb_the_channel(hostile, capfd):
    with Pool(hostile, size=1, seconds=20.0) as pool:
        assert pool.call("print") == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("noise")


@pytest.mark.slow
def test_what_a_worker_started_dies_with_it(hostile, tmp_path):
    with Pool(hostile, size=1, seconds=5.0) as pool, pytest.raises(TimeoutError):
        pool.call("tell", str(tmp_path / "pid"))
    assert gone(int((tmp_path / "pid").read_text()))


def test_workers_retire(hostile):
    with Pool(hostile, size=1, seconds=20.0, max_calls=3) as pool:
        pids = [pool.call("pid") for _ in range(7)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]


def test_close_leaves_no_process(hostile):
    pool = Pool(hostile, size=2, seconds=20.0)
    pids = set(pool.map([("pid",)] * 8))
    pool.close()
    assert gone(*pids)
    assert zombies() == 0
    assert pool.call("echo") == [""]
    pool.close()


def test_a_worker_that_died_between_calls_is_replaced(hostile):
    with Pool(hostile, size=1, seconds=20.0) as pool:
        worker = pool.call("pid")
        os.kill(worker, 9)
        assert gone(worker)
        assert pool.call("echo", 1) == ["", 1]


def test_the_answer_to_a_call_that_was_interrupted_is_not_the_next_ones(hostile, monkeypatch):
    def interrupted(process: WorkerProcess, deadline: float) -> None:
        raise KeyboardInterrupt

    with Pool(hostile, size=1, seconds=20.0) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(WorkerProcess, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.call("echo", 1)
        assert pool.call("echo", 2) == ["", 2]


def test_any_thread_and_asyncio_may_call(hostile):
    with Pool(hostile, size=2, seconds=20.0) as pool:
        results: list[object] = []
        threads = [threading.Thread(target=lambda n=n: results.append(pool.call("echo", n)[1])) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        async def inside() -> object:
            return pool.call("echo", 6)[1]

        results.append(asyncio.run(inside()))
    assert sorted(results) == list(range(7))


def test_a_fork_does_not_talk_to_the_parents_workers(hostile):
    with Pool(hostile, size=1, seconds=20.0) as pool:
        before = pool.call("pid")
        child = os.fork()
        if child == 0:
            other = pool.call("pid")
            pool.close()
            os._exit(0 if other != before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.call("pid") == before


def test_a_worker_that_cannot_start_says_why(hostile):
    with pytest.raises(NotStarted, match="no module named luck"):
        Pool("hostile_calls:broken", size=1, seconds=1.0).call()
    with pytest.raises(NotStarted, match="exit code 7"):
        WorkerProcess("os:_exit", 7).ready()


# ---------------------------------------------------------------- forks


@pytest.fixture
def process(hostile):
    made = WorkerProcess(hostile)
    yield made
    made.kill()


def test_a_fork_is_a_copy_that_is_killed_alone(process):
    assert process.call("calls", seconds=WAIT) == 1
    one, other = process.fork(), process.fork()
    assert [one.call("calls", seconds=WAIT) for _ in range(2)] == [2, 3]
    assert other.call("calls", seconds=WAIT) == 2
    pids = [each.call("pid", seconds=WAIT) for each in (process, one, other)]
    assert len(set(pids)) == 3
    one.kill()
    assert gone(pids[1])
    assert other.alive() and other.call("echo", 1, seconds=WAIT) == ["", 1]
    with pytest.raises(TimeoutError):
        other.call("sleep", seconds=0.2)
    assert gone(pids[2])
    assert process.call("calls", seconds=WAIT) == 3


def test_a_fork_that_waits_for_an_answer_holds_up_no_other_start(process, hostile):
    process.ready()
    threads = []
    for work in (lambda: process.call("sleep", seconds=WAIT), process.fork):
        threads.append(threading.Thread(target=_until_it_has_died, args=(work,)))
        threads[-1].start()
        time.sleep(0.1)
    other = WorkerProcess(hostile)
    assert other.call("echo", seconds=WAIT) == [""]
    assert all(thread.is_alive() for thread in threads)
    for one in (process, other):
        one.kill()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


def _until_it_has_died(work):
    with contextlib.suppress(Died):
        work()


def test_answers_that_nobody_took_are_not_those_of_the_next_request(hostile):
    process = WorkerProcess(hostile)
    try:
        assert list(process.ask("count", 3, seconds=WAIT, answers=3)) == [0, 1, 2]
        assert process.call("calls", seconds=WAIT) == 2
        with contextlib.closing(process.ask("count", 3, seconds=WAIT, answers=3)) as answers:
            assert next(answers) == 0
        with pytest.raises(Died):
            process.call("calls", seconds=WAIT)
    finally:
        process.kill()


@pytest.mark.skipif(not LINUX, reason="open files are counted in /proc")
def test_a_process_that_cannot_be_made_leaves_no_socket(hostile, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError):
            WorkerProcess(hostile, folder=str(tmp_path / "missing"))
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.skipif(not LINUX, reason="open files are counted in /proc")
def test_a_fork_that_cannot_be_made_leaves_no_socket(process):
    process.ready()
    before = len(os.listdir("/proc/self/fd"))
    os.kill(process._connection.child.pid, signal.SIGKILL)
    while process.alive():
        time.sleep(0.01)
    with pytest.raises(Died):
        process.fork()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def few_files():
    """`few_files(n)`: this process may open n more files, until the test ends."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(count: int) -> None:
        free = [number for number in range(1000) if not os.path.exists(f"/proc/self/fd/{number}")]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], limits[1]))

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.skipif(not LINUX, reason="open files are counted in /proc")
@pytest.mark.parametrize("left", [0, 1, 3, 5])
def test_no_further_open_file_is_a_limit_that_is_named(hostile, process, few_files, left):
    process.ready()
    kept = []
    few_files(left)
    with pytest.raises(NotStarted, match=r"Too many open files.*ulimit -n"):
        kept += [WorkerProcess(hostile) for _ in range(left + 4)]
    with pytest.raises(NotStarted, match=r"Too many open files.*ulimit -n"):
        kept += [process.fork() for _ in range(left + 4)]
    assert process.call("echo", 1, seconds=WAIT) == ["", 1]


@pytest.mark.parametrize("how", ["child", "session", "daemon"])
def test_what_a_fork_started_dies_with_it(process, tmp_path, how):
    """Also in a session of its own, and where its parent has ended."""
    fork, path = process.fork(), tmp_path / "pid"
    assert fork.call("start", how, str(path), seconds=WAIT) is None
    started = int(path.read_text())
    assert running(started)
    fork.kill()
    assert gone(started)
    assert process.alive()


@pytest.mark.parametrize("forked", [False, True])
def test_a_program_that_ignores_the_end_of_children_ends_its_processes_at_once(hostile, forked):
    """`SIGCHLD` ignored, as some launchers leave it to what they start."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = WorkerProcess((lambda: lambda: os.getpid()) if forked else "os:getcwd")
        if forked:
            pid = process.call(seconds=WAIT)
        else:
            with pytest.raises(Raised):  # a text is no function; but the process answers
                process.call(seconds=WAIT)
            (pid,) = descendants(process._connection.child.pid)
        began = time.monotonic()
        process.kill()
        assert time.monotonic() - began < 8.0 and gone(pid)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_fork_that_ends_by_itself_leaves_nothing(process, tmp_path):
    fork = process.fork()
    fork.call("start", "daemon", str(tmp_path / "pid"), seconds=WAIT)
    with pytest.raises(Died, match=r"worker died \(exit code 7\)"):
        fork.call("exit", seconds=WAIT)
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(not LINUX, reason="only Linux tells a process that its parent has ended")
@pytest.mark.parametrize("who", ["supervisor", "process"])
def test_forks_end_with_what_they_were_forked_from(process, who):
    forks = [process.fork() for _ in range(3)]
    pids = [fork.call("pid", seconds=WAIT) for fork in forks]
    below = descendants(process._connection.child.pid)
    os.kill(process._connection.child.pid if who == "supervisor" else process.call("pid", seconds=WAIT), signal.SIGKILL)
    assert set(pids) < set(below)
    assert gone(*below)
    assert not any(fork.alive() for fork in forks)


def test_a_hundred_forks_and_no_folder(process, tmp_path, monkeypatch):
    forks = [process.fork() for _ in range(100)]
    assert len({fork.call("pid", seconds=WAIT) for fork in forks}) == 100
    below = descendants(process._connection.child.pid)
    process.kill()
    assert gone(*below)


@pytest.mark.skipif(not LINUX, reason="only Linux adopts orphans")
@pytest.mark.slow
def test_a_killed_program_leaves_no_process(hostile, tmp_path):
    """With forks, with what these started, and with a call that hangs."""
    code = """
import sys
from groupwise.utils.processes import WorkerProcess
process = WorkerProcess("hostile_calls:make")
forks = {how: process.fork() for how in ("child", "session", "daemon", "sleep")}
for how in ("child", "session", "daemon"):
    forks[how].call("start", how, sys.argv[1] + how, seconds=60.0)
print(process._connection.child.pid, flush=True)
forks["sleep"].call("sleep", seconds=600.0)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "pid")], stdout=subprocess.PIPE, env=environment)
    assert program.stdout is not None
    supervisor = int(program.stdout.readline())
    left = {supervisor, *descendants(supervisor), *(int(path.read_text()) for path in tmp_path.glob("pid*"))}
    assert len(left) >= 12
    program.kill()
    program.wait()
    assert gone(*left)


def test_all_that_is_printed_arrives(hostile, capfd):
    with Pool(hostile, size=1, seconds=WAIT) as pool:
        assert pool.call("print megabytes") == 1
    assert capfd.readouterr().err == "noise " * 833_333 + ".\n"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\u202eb\u2028c \u00e9\U0001f600\n".encode(), "a\\u202eb\\u2028c \u00e9\U0001f600\n"),
        (b"10%\r20%\r\nlast\ttab", "10%\n20%\nlast\ttab"),
        (b"\xff\xc3", r"\xff\xc3"),
    ],
)
def test_what_is_printed_steers_no_terminal(hostile, capfd, printed, shown):
    with Pool(hostile, size=1, seconds=WAIT) as pool:
        pool.call("write", list(printed))
    assert capfd.readouterr().err == shown


def test_a_message_without_end_is_shortened(hostile):
    with Pool(hostile, size=1, seconds=WAIT) as pool, pytest.raises(Raised) as raised:
        pool.call("raise megabytes")
    assert len(str(raised.value)) < 12_000
    assert "990,000 characters left out" in str(raised.value)


def test_who_does_not_read_what_is_printed_holds_nobody_up(hostile):
    """A terminal that stands still: here a pipe that is full."""
    code = (
        "import sys; from groupwise.utils.processes import Pool; pool = Pool('hostile_calls:make', size=1, seconds=60.0); "
        "print(pool.call('print megabytes'), pool.call('echo', 1), flush=True); pool.close()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert program.stdout is not None
    assert program.stdout.readline() == b"1 ['', 1]\n"
    assert program.wait(WAIT) == 0
    program.communicate()


@pytest.mark.parametrize("number", SENT_TO_ALL, ids=lambda number: number.name)
def test_signals_that_go_to_all_processes_of_a_run_end_no_worker(number: signal.Signals, hostile: str) -> None:
    """A scheduler's USR1 says that time is short: the parent ends behind its step, which needs its workers until then."""
    process = WorkerProcess(hostile, "mine")
    process.ready()
    supervisor = process._connection.child.pid
    for one in (supervisor, *descendants(supervisor)):
        os.kill(one, number)
    assert process.call("echo", 1, seconds=WAIT) == ["mine", 1]
    process.kill()
