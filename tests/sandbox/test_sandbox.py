"""Programs in sandboxes: what they can do, what they cannot, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from groupwise.sandbox import attacks
from groupwise.sandbox.isolation import ISOLATIONS, Isolation
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.runner import ALIKE, Opaque, decode, encode, remove
from groupwise.sandbox.server import LIMITS, ProgramEnded, Sandbox, SandboxFailed

ONE = {"reads a file of the user": attacks.ATTACKS["reads a file of the user"]}


@pytest.fixture(params=ISOLATIONS, ids=lambda isolation: isolation.name)
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """Each isolation that starts on this machine."""
    verdict = attacks.prove(request.param, {})
    if verdict.why:
        pytest.skip(str(verdict))
    return request.param


@pytest.fixture
def server(isolation: Isolation):
    made = Sandbox(isolation, Limits(seconds=30.0, cpu_seconds=1.0, memory=256 << 20, disk=4 << 20, output=1 << 16))
    yield made
    made.kill()


@pytest.mark.slow
def test_all_attacks_are_held(isolation: Isolation) -> None:
    verdict = attacks.prove(isolation)
    assert verdict.holds, str(verdict)
    assert verdict.count >= 50


SAFE = [
    "reads a file of the user",
    "reads a file by a symbolic link",
    "reads a file by a hard link",
    "reads a file below /proc/self/root",
    "writes into a folder of the user",
    "writes by a symbolic link",
    "network: TCP",
    "network: UDP",
    "network: a listening socket",
    "network: an abstract socket",
    "network: a socket in a folder",
    "processes: fork",
    "processes: another program",
    "processes: the raw call clone",
    "processes: a signal to the trainer",
    "processes: limits of the canary",
    "processes: the priority of the canary",
    "processes: the scheduler of the canary",
    "processes: the processors of the canary",
    "processes: System V memory",
    "processes: memory without a limit",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAFE)
def test_an_attack_succeeds_where_nothing_isolates(name: str, tmp_path: Path) -> None:
    """Else it would be held everywhere."""
    with attacks._targets() as targets:
        given = "".join(f"{key} = {value!r}\n" for key, value in targets.variables.items())
        program = given + attacks._HELPERS + attacks.ATTACKS[name]
        ran = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, timeout=60)
        assert b"BROKE" in ran.stdout or not targets.untouched(), ran.stderr.decode()


SITUATIONS = {
    "without CAP_SYS_ADMIN": ["capsh", "--drop=cap_sys_admin", "--", "-c", 'exec "$0" "$@"'],
    "without user namespaces": [
        "unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"',
    ],
    "as nobody": ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"],
}  # fmt: skip
PROVE = """
from groupwise.sandbox.attacks import ATTACKS, ISOLATIONS, prove
quick = {name: attack for name, attack in ATTACKS.items() if not name.startswith("limits: ")}
verdicts = [prove(isolation, quick) for isolation in ISOLATIONS]
print(*verdicts, sep="\\n")
assert not any(verdict.broken for verdict in verdicts)
assert any(verdict.holds for verdict in verdicts)
"""


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
def test_attacks_are_held_in_poorer_situations(situation: str) -> None:
    """Some isolation starts, and none that starts is broken."""
    if os.geteuid() != 0 or not shutil.which(SITUATIONS[situation][0]):
        pytest.skip("only root can try it, with the tools of util-linux and libcap")
    source = str(Path(attacks.__file__).parents[2])
    packages = [path for path in sys.path if path.endswith("site-packages")]
    python = "/usr/bin/python3" if situation == "as nobody" else sys.executable
    seen = [*SITUATIONS[situation], python, "-c", "import sys; assert sys.version_info >= (3, 11)"]
    if subprocess.run(seen, capture_output=True).returncode != 0:
        pytest.skip("this situation cannot be made here, or has no Python that it can read")
    command = [*SITUATIONS[situation], python, "-c", PROVE]
    path = os.pathsep.join([source, *packages])
    ran = subprocess.run(command, env={"PATH": os.environ["PATH"], "PYTHONPATH": path}, capture_output=True, text=True)
    if "Permission denied" in ran.stderr or "No module named 'groupwise'" in ran.stderr:
        pytest.skip("nobody cannot read the source")
    if "does not start here" in ran.stdout and "attacks held" not in ran.stdout:
        pytest.skip(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_an_attack_that_succeeds_is_named(isolation: Isolation) -> None:
    verdict = attacks.prove(isolation, {"prints": "broke(True)", **ONE})
    assert verdict.broken == ("prints",) and not verdict.holds
    assert "does not hold: prints" in str(verdict)


def test_a_script_gets_its_input_and_its_output_comes_back(server: Sandbox) -> None:
    for number in range(3):
        ran = server.run("import sys\nprint(int(input()) + 1)\nprint(sys.stdin.read(), end='')", f"{number}\nrest\n")
        assert ran.output == f"{number + 1}\nrest\n".encode()
        assert ran.ended == "0"


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("while True: pass", LIMITS["SIGXCPU"]),
        ("while True: print('x' * 5000)", LIMITS["output"]),
        ("import sys; sys.exit(3)", "3"),
        ("import os; os._exit(0)", "0"),
        ("import os; os.abort()", "SIGABRT"),
        ("1 / 0", "1"),
        ("x = bytearray(1 << 30)", "1"),
        ("def f(:", "1"),
        ("for i in range(2000): open(str(i), 'w').close()\nimport time\ntime.sleep(1000)", LIMITS["disk"]),
    ],
)
def test_a_program_that_ends_badly_says_how(server: Sandbox, program: str, ended: str) -> None:
    assert server.run(program).ended == ended
    assert server.run("print(1)").output == b"1\n", "the next program runs"


def test_a_program_that_sleeps_is_out_of_time(isolation: Isolation) -> None:
    server = Sandbox(isolation, Limits(seconds=0.5))
    try:
        assert server.run("import time; time.sleep(1000)").ended == LIMITS["seconds"]
    finally:
        server.kill()


def test_programs_leave_nothing_to_those_behind_them(server: Sandbox) -> None:
    server.run("open('left', 'w').write('x')\nimport math; math.pi = 3")
    ran = server.run("import os, math\nprint(os.listdir('.'), math.pi > 3, dict(os.environ).get('PYTHONPATH'))")
    assert ran.output == b"[] True None\n"


def test_calls_are_answered_one_by_one(server: Sandbox) -> None:
    server.open({"do": "serve", "source": "seen = []\ndef f(x, y=0):\n    seen.append(x)\n    return len(seen), x + y"})
    assert server.ask() == {"loaded": True}
    for count, (args, kwargs, value) in enumerate([([1], {}, 1), ([1], {"y": 2}, 3), ([0.5], {}, 0.5)], start=1):
        answer = server.ask({"name": "f", "args": encode(args), "kwargs": encode(kwargs)})
        assert decode(answer["value"]) == (count, value)
    answer = server.ask({"name": "g", "args": [], "kwargs": encode({})})
    assert answer["error"] == "NameError"
    server.finish()
    assert server.run("print(1)").output == b"1\n"


def test_a_program_that_answers_with_something_else_has_ended(server: Sandbox) -> None:
    """It may write what it likes on the pipe of its answers, and it can read the numbers of its pipes."""
    program = """
import os
def f():
    for pipe in range(3, 20):
        try:
            os.write(pipe, b"\\0\\0\\0\\5{{{{{")
        except OSError:
            pass
"""
    server.open({"do": "serve", "source": program})
    server.ask()
    with pytest.raises(ProgramEnded):
        server.ask({"name": "f", "args": [], "kwargs": encode({})})
    assert server.run("print(1)").output == b"1\n"


VALUES = [
    None, True, 0, -(1 << 70), 1.5, float("inf"), "ä\ud800", b"\x00", [1, [2]], (1, (2,)), {1, 2}, frozenset({3}),
    {"a": (1,), (1, 2): [None]}, 1 + 2j, [],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_cross_as_they_are(value: object) -> None:
    crossed = decode(encode(value))
    assert crossed == value and type(crossed) is type(value)


def test_what_is_no_plain_value_equals_nothing() -> None:
    class Everything:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None

    crossed = decode(encode(Everything()))
    assert isinstance(crossed, Opaque)
    assert crossed != 4 and crossed != crossed
    nested: list = []
    for _ in range(1000):
        nested = [nested]
    encode(nested)  # does not recurse without end


SAME_HASH = [{"int": hex(n * ((1 << 61) - 1))} for n in range(1, ALIKE + 2)]
NESTED: list = []
for _ in range(900):
    NESTED = [NESTED]
NO_VALUES = {
    "no number": {"int": "x"},
    "a part too large": {"complex": [{"int": hex(10**400)}, 0]},
    "a float too large": {"float": 10**400},
    "an unknown kind": {"code": "1"},
    "two kinds": {"int": "1", "float": "1"},
    "no pair": {"dict": [1]},
    "a member without a hash": {"set": [[1]]},
    "members of one hash": {"set": SAME_HASH},
    "keys of one hash": {"dict": [[key, 0] for key in SAME_HASH]},
    "nested too deep": NESTED,
}


@pytest.mark.parametrize("data", NO_VALUES.values(), ids=NO_VALUES)
def test_what_is_no_value_is_one_kind_of_error(data: object) -> None:
    """A program sends what it likes: nothing else may reach whoever reads it."""
    with pytest.raises(ValueError):
        decode(data)


REACHES_BACK = {
    "takes a part of the last message": """
import os, threading, time
def take():
    os.read(PIPE, 2)
    os._exit(0)
def f():
    threading.Thread(target=take).start()
    time.sleep(0.2)
""",
    "writes messages of its own": """
import json, os, struct
def f():
    pipe = os.open(f"/proc/self/fd/{PIPE}", os.O_WRONLY)
    for message in [{"memory": 1}, {"do": "run", "source": "print(2)", "stdin": ""}]:
        data = json.dumps(message).encode()
        os.write(pipe, struct.pack(">I", len(data)) + data)
    os._exit(0)
""",
}
FIND_PIPE = """
import os
for PIPE in range(3, 20):
    try:
        os.fstat(PIPE)
        break
    except OSError:
        pass
"""


@pytest.mark.parametrize("name", REACHES_BACK)
def test_a_program_does_not_reach_the_messages_to_the_next(name: str, server: Sandbox) -> None:
    server.open({"do": "serve", "source": FIND_PIPE + REACHES_BACK[name]})
    server.ask()
    with contextlib.suppress(ProgramEnded):
        server.ask({"name": "f", "args": [], "kwargs": encode({})})
    server.finish()
    assert server.run("print(1)").output == b"1\n"


def test_a_sandbox_that_ends_says_nothing_of_its_program(server: Sandbox) -> None:
    server.open({"do": "serve", "source": "import time\ndef f(): time.sleep(1000)"})
    server.ask()
    process = server._process
    assert process is not None
    threading.Timer(0.2, process.kill).start()
    with pytest.raises(SandboxFailed, match="sandbox ended"):
        server.ask({"name": "f", "args": [], "kwargs": encode({})})
    assert server.run("print(1)").output == b"1\n", "a new one is started"
    process = server._process
    threading.Timer(0.2, process.kill).start()
    with pytest.raises(SandboxFailed, match="sandbox ended"):
        server.run("import time; time.sleep(1000)")


def test_a_sandbox_that_is_stopped_lets_go_whoever_waits(isolation: Isolation) -> None:
    server = Sandbox(isolation, Limits(seconds=600.0))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.run, "import time; time.sleep(1000)")
        while server._process is None:
            time.sleep(0.01)
        server.stop()
        with pytest.raises(SandboxFailed):
            waiting.result()
    with pytest.raises(SandboxFailed, match="was closed"):
        server.run("print(1)")
    assert server._process is None


def test_ctrl_c_does_not_reach_a_sandbox(server: Sandbox) -> None:
    server.run("print(1)")
    assert server._process is not None
    assert os.getpgid(server._process.pid) != os.getpgrp()


def test_a_fork_of_the_trainer_does_not_hold_a_sandbox(server: Sandbox) -> None:
    """It would not end with the trainer."""
    server.run("print(1)")
    pipes = server._ends()
    child = os.fork()
    if child == 0:
        open_here = 0
        for pipe in pipes:
            with contextlib.suppress(OSError):
                os.fstat(pipe)
                open_here += 1
        os._exit(open_here)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert server.run("print(1)").output == b"1\n"


def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    folder, here = tmp_path / "folder", os.getcwd()
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    (tmp_path / "stays").touch()
    try:
        os.chdir(folder)
        for _ in range(3000):
            os.mkdir("d")
            Path("f").touch()
            os.mkdir("locked", 0o000)
            os.chdir("d")
    finally:
        os.chdir(here)
    remove(str(folder))
    assert os.listdir(tmp_path) == ["stays"]


def test_an_isolation_that_is_not_there_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    for isolation in ISOLATIONS:
        monkeypatch.setattr(type(isolation), "installed", lambda self: False)
    verdicts = [attacks.prove(isolation) for isolation in ISOLATIONS]
    assert not any(verdict.holds for verdict in verdicts)
    assert all(isolation.remedy in verdict.why for isolation, verdict in zip(ISOLATIONS, verdicts, strict=True))


def test_a_sandbox_that_does_not_start_says_why(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        type(isolation), "command", lambda self, argv, folder, limits, memory: ["/bin/sh", "-c", "echo no room >&2"]
    )
    with pytest.raises(SandboxFailed, match="does not start here: no room"):
        Sandbox(isolation, Limits()).run("print(1)")


def _megabytes() -> float:
    """Memory of this process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024


def _traces() -> tuple[set[str], int, int]:
    """Folders, descriptors and child processes."""
    folders = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("groupwise-sandbox-")}
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return folders, len(os.listdir("/proc/self/fd")), len(children)


@pytest.mark.slow
def test_a_thousand_programs_leave_nothing(isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests have sandboxes, too
    before, held = _traces(), _megabytes()
    server = Sandbox(isolation, Limits())
    for number in range(1000):
        assert server.run(f"open('f', 'w').write('x')\nprint({number})").output == f"{number}\n".encode()
    server.kill()
    after = _traces()
    assert after[0] <= before[0]
    assert after[1:] == before[1:]
    assert _megabytes() - held < 50.0


@pytest.mark.slow
def test_nothing_outlives_a_program_that_is_killed(isolation: Isolation, tmp_path: Path) -> None:
    """kill -9 of the process that runs programs, in the middle of one that never ends."""
    script = f"""
import os, threading, time
from groupwise.sandbox.isolation import ISOLATIONS
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.server import Sandbox
(isolation,) = (one for one in ISOLATIONS if one.name == {isolation.name!r})
server = Sandbox(isolation, Limits(seconds=600.0))
threading.Thread(target=server.run, args=("import time; time.sleep(1000)",), daemon=True).start()
while server._process is None or server._lines is None:
    time.sleep(0.01)
time.sleep(1.0)
print(server._process.pid, server._folder, flush=True)
os.kill(os.getpid(), 9)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    pid, folder = ran.stdout.split()
    ends = time.monotonic() + 60.0
    while Path(f"/proc/{pid}").exists() or Path(folder).exists():
        assert time.monotonic() < ends, (pid, folder)
        time.sleep(0.05)
