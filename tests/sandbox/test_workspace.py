"""Python and shells in the sandbox of an episode: what stays between calls, what they print, and what they cannot do."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from groupwise.errors import EnvironmentFailure
from groupwise.sandbox import attacks, server
from groupwise.sandbox.isolation import ISOLATIONS, Isolation
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.tools import SandboxTools, result_text
from groupwise.sandbox.workspace import EpisodeSandbox, Shown

LIMITS = Limits(seconds=20.0, cpu_seconds=10.0, memory=256 << 20, disk=4 << 20, output=2000)


@pytest.fixture(params=ISOLATIONS, ids=lambda isolation: isolation.name)
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """Each isolation that starts on this machine."""
    verdict = attacks.prove(request.param, {})
    if verdict.why:
        pytest.skip(str(verdict))
    return request.param


@pytest.fixture
def opened(isolation: Isolation) -> Iterator[Callable[..., EpisodeSandbox]]:
    """Makes workspaces with limits of a test's own."""
    made: list[EpisodeSandbox] = []

    def make(limits: Limits = LIMITS) -> EpisodeSandbox:
        made.append(EpisodeSandbox(isolation, limits))
        return made[-1]

    yield make
    for one in made:
        one.kill()


@pytest.mark.slow
def test_all_attacks_are_held_in_calls_of_tools(isolation: Isolation) -> None:
    verdict = attacks.prove_tools(isolation)
    assert verdict.holds, str(verdict)
    assert verdict.count >= 2 * len(attacks.ATTACKS) - len(attacks.OF_A_SHELL)


def test_files_stay_for_both_tools(opened: Callable[..., EpisodeSandbox]) -> None:
    workspace = opened()
    assert workspace.call("python", "open('note', 'w').write('hello')").output == "5\n"
    assert workspace.call("shell", "cat note && echo more >> note").output == "hello"
    assert workspace.call("python", "print(open('note').read())").output == "hellomore\n\n"
    assert workspace.call("shell", "printf 'def two():\\n    return 2\\n' > two.py").ended == "0"
    assert workspace.call("python", "from two import two\ntwo()").output == "2\n"


def test_variables_do_not_stay(opened: Callable[..., EpisodeSandbox]) -> None:
    workspace = opened()
    assert workspace.call("python", "x = 1").ended == "0"
    assert "NameError: name 'x' is not defined" in workspace.call("python", "x").output
    assert workspace.call("shell", "X=1; cd /; export X").ended == "0"
    assert workspace.call("shell", 'echo "[$X]"; touch here; ls').output == "[]\nhere\n"


TRACEBACK = """Traceback (most recent call last):
  File "python", line 1, in <module>
ZeroDivisionError: division by zero
"""
SHOWN = {
    "the last expression, as in a notebook": ("python", "x = 6\nx * 7", "42\n", "0"),
    "no value where the last line has none": ("python", "print('a')\nNone", "a\n", "0"),
    "output and errors in their order": ("shell", "echo a; echo b >&2; echo c", "a\nb\nc\n", "0"),
    "an exit code": ("shell", "exit 3", "", "3"),
    "the exit code of a script": ("python", "raise SystemExit(4)", "", "4"),
    "an error without lines of ours": ("python", "1 / 0", TRACEBACK, "1"),
    "no input": ("shell", "cat", "", "0"),
    "no program at all": ("python", "", "", "0"),
    "no environment": ("python", "import os\nsorted(set(os.environ) - {'LC_CTYPE', 'PWD'})", "[]\n", "0"),
    "bytes that are no text": ("shell", "printf '\\377'", "\N{REPLACEMENT CHARACTER}", "0"),
    "a signal": ("shell", "kill -SEGV $$", "", "SIGSEGV"),
}  # fmt: skip


@pytest.mark.parametrize("case", SHOWN)
def test_what_is_printed_is_shown(opened: Callable[..., EpisodeSandbox], case: str) -> None:
    tool, source, output, ended = SHOWN[case]
    assert opened().call(tool, source) == Shown(output, 0, ended)


def test_a_call_cannot_be_too_long_for_a_shell(opened: Callable[..., EpisodeSandbox]) -> None:
    workspace = opened()
    assert "Argument list too long" in workspace.call("shell", "#" * (1 << 18)).output
    assert workspace.call("python", "#" * (1 << 18) + "\n7").output == "7\n"


def test_a_call_has_no_variables_of_ours(opened: Callable[..., EpisodeSandbox], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEY", "hidden")
    words = opened().call("shell", "env").output.splitlines()
    assert {word.partition("=")[0] for word in words} <= {"PATH", "HOME", "LANG", "PWD", "SHLVL", "_"}


LEAVES = {
    "in the background": "sleep 1000 & echo begun",
    "in a session of its own": "(setsid sleep 1000 &) ; echo begun",
    "as an orphan that ignores signals": "(trap '' TERM HUP INT; (while :; do sleep 1; done) & ) ; echo begun",
    "with the pipe in its hands": "exec 3>&1; (sleep 1000 >&3 &) ; echo begun",
}


@pytest.mark.parametrize("case", LEAVES)
def test_no_process_outlives_its_call(opened: Callable[..., EpisodeSandbox], case: str) -> None:
    """The next call finds none that it could signal; else `kill -9 -1` would find one."""
    workspace = opened()
    assert workspace.call("shell", LEAVES[case]) == Shown("begun\n", 0, "0")
    lines = (
        "import os",
        "for pid in range(3, 1000):",
        "    try: os.kill(pid, 0)",
        "    except OSError: pass",
        "    else: print(pid)",
    )
    count = "\n".join(lines)
    alone = workspace.call("shell", f'exec python3 -S -c "{count}"').output.split()
    assert len(alone) <= 1, alone  # itself


def test_a_call_cannot_end_the_runner(opened: Callable[..., EpisodeSandbox]) -> None:
    workspace = opened()
    workspace.call("shell", "echo here > file")
    workspace.call("shell", "trap '' TERM; for p in 1 2 $PPID; do kill -9 $p; done; kill -9 -1")
    assert workspace.call("shell", "cat file").output == "here\n"


ENDED = {
    "sleep": ("sleep 1000", {"seconds": 0.5}, "out of time"),
    "a child that sleeps": ("sleep 1000 & wait", {"seconds": 0.5}, "out of time"),
    "stopped by itself": ("kill -STOP $$", {"seconds": 0.5}, "out of time"),
    "a busy child": ("while :; do :; done & wait", {"cpu_seconds": 0.5, "seconds": 60.0}, ("out of processor time", "0")),
    "output": ("yes", {"output": 100}, "too much output"),
}


@pytest.mark.parametrize("case", ENDED)
def test_a_limit_ends_a_call_and_its_files_stay(opened: Callable[..., EpisodeSandbox], case: str) -> None:
    command, changed, ended = ENDED[case]
    workspace = opened()
    workspace.call("shell", "echo here > file")
    workspace.limits = Limits(**(LIMITS.as_json() | changed))
    assert workspace.call("shell", command).ended in ended
    workspace.limits = LIMITS
    assert workspace.call("shell", "cat file").output == "here\n"


@pytest.mark.slow
def test_processes_share_their_limits(opened: Callable[..., EpisodeSandbox]) -> None:
    fields = LIMITS.as_json() | {"processes": 16, "memory": 300 << 20}
    workspace = opened(Limits(**fields))
    each = "python3 -S -c 'import time; held = bytearray(200 << 20); time.sleep(3); print(\"BROKE\")'"
    said = workspace.call("shell", " & ".join([each] * 4) + " & wait").output
    assert said.splitlines().count("BROKE") < 3, said
    many = "import subprocess\nfor i in range(100): subprocess.Popen(['sleep', '99'])\nprint('BROKE')"
    said = workspace.call("shell", f'exec python3 -S -c "{many}"').output
    assert "BROKE" not in said and "Resource temporarily unavailable" in said
    assert "Resource temporarily unavailable" in workspace.call("shell", "f() { f | f & }; f; sleep 5; echo over").output
    assert workspace.call("shell", "echo still").output == "still\n"


def test_output_is_cut_and_the_call_goes_on(opened: Callable[..., EpisodeSandbox]) -> None:
    workspace = opened()
    printed = workspace.call("shell", "head -c 5000 /dev/zero | tr '\\0' x; echo end > file")
    assert (printed.output, printed.left_out, printed.ended) == ("x" * 2000, 3000, "0")
    assert workspace.call("shell", "cat file").output == "end\n"


def test_a_full_folder_can_still_be_read(opened: Callable[..., EpisodeSandbox]) -> None:
    workspace = opened()
    workspace.call("shell", "echo here > file; for i in 1 2 3; do head -c 3000000 /dev/zero > big$i; done")
    assert workspace.call("shell", "cat file").output == "here\n"


def test_episodes_do_not_see_each_other(opened: Callable[..., EpisodeSandbox]) -> None:
    one, other = opened(), opened()
    place = one.call("shell", "echo secret > note; pwd").output.strip()
    find = f"ls -d {place}/note; cat {place}/note; cat {Path(place).parent}/*/note; find / -name note 2>/dev/null"
    assert "secret" not in other.call("shell", find).output
    assert "secret" in one.call("shell", find).output


def test_the_folder_ends_with_the_episode(isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests have sandboxes, too
    tools = SandboxTools(isolation, LIMITS)
    assert tools.shell("ln -s /etc/passwd l; mkdir -p a/b; chmod 0 a; echo x > f; ls") == "a\nf\nl"
    assert bool(list(tmp_path.glob(f"{server.PREFIX}*"))) == isolation.needs_folder  # bubblewrap has a disk of its own
    tools.close()
    assert tools.shell("ls") == "[no output]"
    tools.close()
    assert not list(tmp_path.glob(f"{server.PREFIX}*"))


HELD = """
import sys, time
from groupwise.sandbox.isolation import ISOLATIONS
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.workspace import EpisodeSandbox
(isolation,) = [one for one in ISOLATIONS if one.name == sys.argv[1]]
workspace = EpisodeSandbox(isolation, Limits(seconds=600.0))
print(workspace.call("shell", "touch here; pwd").output.strip(), flush=True)
workspace.call("shell", "sleep 4321.5")
"""


@pytest.mark.slow
def test_the_folder_ends_with_a_killed_process(isolation: Isolation) -> None:
    command = [sys.executable, "-c", HELD, isolation.name]
    path = os.pathsep.join(filter(None, sys.path))
    held = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    assert held.stdout is not None
    folder = Path(held.stdout.readline().strip())
    held.send_signal(signal.SIGKILL)
    held.wait()
    deadline = time.monotonic() + 60.0
    while b"4321.5" in subprocess.run(["ps", "-eo", "args"], capture_output=True).stdout:
        assert time.monotonic() < deadline, "the call outlives the process"
        time.sleep(0.05)
    while isolation.needs_folder and folder.exists():
        assert time.monotonic() < deadline, "the folder outlives the process"
        time.sleep(0.05)


def test_files_are_there_before_the_first_call_and_are_read_after_the_last(isolation: Isolation) -> None:
    texts = {"a.txt": "one\r\n", "in/b.py": "x = '\N{SNOWMAN}'\n", "gone": "!", "l": "", "long": "y" * 100_000, "none": None}
    tools = SandboxTools(isolation, LIMITS)
    tools.place(texts)
    untouched = {name: text for name, text in texts.items() if text is not None}
    assert tools.files() == untouched
    spoilt = "json.py, os.py, codecs.py"  # modules that the reading must not take from the folder
    assert tools.shell("ls -p; cat in/b.py") == "a.txt\ngone\nin/\nl\nlong\nx = '\N{SNOWMAN}'"
    tools.shell("".join(f"echo 'raise SystemExit' > {name}; " for name in spoilt.split(", ")))
    tools.python("import os\nopen('a.txt', 'a').write('two')\nopen('l', 'wb').write(bytes([255]))")
    if isolation.needs_folder:
        untouched["gone"] = "!"
    else:
        tools.shell("rm gone")
        del untouched["gone"]
    found = tools.files()
    assert found == {**untouched, "a.txt": "one\r\ntwo", "l": "\N{REPLACEMENT CHARACTER}", "long": "y" * 65536}
    tools.close()


def test_a_link_shows_no_file_of_this_machine(isolation: Isolation, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    tools = SandboxTools(isolation, LIMITS)
    tools.place({"a.txt": ""})
    tools.shell(f"ln -sf {tmp_path}/secret b; cat b > a.txt; python3 -c \"import os; os.symlink('{tmp_path}/secret', 'c')\"")
    tools.shell("mv -f c a.txt; cp -P c a.txt")
    assert "secret" not in tools.files().get("a.txt", "")
    tools.close()


ALL = ("a.txt", "b.txt", "in/c.txt", "in/d.txt")
LEFT = {
    "a pipe": "import os; os.mkfifo('p'); os.replace('p', 'a.txt')",
    "a link to a device": "import os; os.symlink('/dev/zero', 'p'); os.replace('p', 'a.txt')",
    "a link to a pipe of the reader": "import os; os.symlink('/proc/self/fd/1', 'p'); os.replace('p', 'a.txt')",
    "a link to itself": "import os; os.symlink('a.txt', 'p'); os.replace('p', 'a.txt')",
    "bytes that grow in JSON": f"for name in {ALL}: open(name, 'wb').write(bytes(70_000))",
    "bytes that are no text": f"for name in {ALL}: open(name, 'wb').write(bytes([255]) * 70_000)",
    "a name that is no text": "open(bytes([255, 254]), 'w')",
    "a locked folder": "import os; os.chmod('in', 0)",
    "a folder that can be listed and not entered": "import os; os.chmod('in', 0o444)",
    "its own folder locked": "import os; os.chmod('.', 0)",
    "too many files": "for i in range(3000): open(str(i), 'w')",
    "folders in folders": "import os\nfor i in range(300): os.mkdir('deep'); os.chdir('deep')",
}


@pytest.mark.parametrize("case", LEFT)
def test_no_call_can_keep_its_files_from_being_read(isolation: Isolation, case: str) -> None:
    """Else a policy could have its worst episodes counted as failures of the machine, and not trained."""
    tools = SandboxTools(isolation, Limits(**(LIMITS.as_json() | {"seconds": 30.0})))
    try:
        tools.place(dict.fromkeys(ALL, "text"))
        tools.python(LEFT[case])
        tools.shell("echo next")
        assert set(tools.files()) <= set(ALL)
        assert case != "a pipe" or "a.txt" not in tools.files() or isolation.needs_folder
        assert case != "bytes that grow in JSON" or tools.files() == dict.fromkeys(ALL, "\0" * 65536)
    finally:
        tools.close()


def test_files_that_others_are_sending_stop_no_shell(opened: Callable[..., EpisodeSandbox]) -> None:
    """Linux counts the files that a user's processes are sending, against the limit on files of the sender."""
    workspace = opened()
    here, there = socket.socketpair()
    with here, there, open(os.devnull) as file:
        socket.send_fds(here, [b"x"], [file.fileno()] * 250)
        assert workspace.call("shell", "echo here") == Shown("here\n", 0, "0")


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../up", "", "a\0b"])
def test_files_outside_of_the_folder_are_refused(isolation: Isolation, path: str) -> None:
    with pytest.raises(EnvironmentFailure, match="is not in its folder"):
        SandboxTools(isolation, LIMITS).place({path: "x"})


def test_folders_that_nobody_holds_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    names = ("old", "held", "young")
    folders = {name: tmp_path / f"{server.PREFIX}{name}" for name in names}
    for folder in folders.values():
        (folder / "inside").mkdir(parents=True)
    (tmp_path / f"{server.PREFIX}link").symlink_to(tmp_path)
    for name in ("old", "held"):
        os.utime(folders[name], (0, 0))
    lock = os.open(folders["held"], os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    server.remove_abandoned()
    os.close(lock)
    assert [name for name in names if folders[name].exists()] == ["held", "young"]


TEXTS = {
    "output alone": (Shown("a\nb\n", 0, "0"), "a\nb"),
    "nothing": (Shown("", 0, "0"), "[no output]"),
    "an exit code": (Shown("a\n", 0, "2"), "a\n[exit code 2]"),
    "cut": (Shown("aaa", 1234, "0"), "aaa\n[1,234 bytes of output left out]"),
    "out of time": (Shown("a", 0, "out of time"), "a\n[stopped after 20 seconds]"),
    "another limit": (Shown("", 0, "out of memory"), "[stopped: out of memory]"),
    "a signal": (Shown("", 0, "SIGSEGV"), "[stopped: SIGSEGV]"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_what_a_model_reads(case: str) -> None:
    printed, text = TEXTS[case]
    assert result_text(printed, LIMITS) == text
