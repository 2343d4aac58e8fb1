"""Attempts to leave a sandbox, run on this machine before any program of a model is.

Each attack is a program of ours that prints BROKE where it succeeds.  What it may have done is
looked at from outside as well: the canary lives, nothing was written, nothing was received.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

from groupwise.errors import ConfigError
from groupwise.sandbox.isolation import ISOLATIONS, Isolation
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.server import Sandbox, SandboxFailed
from groupwise.sandbox.workspace import EpisodeSandbox
from groupwise.utils.terminal import logger

log = logger(__name__)

TRIES = 4
"""Times that a sandbox is asked whether it serves."""
_HELPERS = """
import ctypes, os, platform, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
def call(x86, arm, *arguments):
    return libc.syscall(x86 if X86 else arm, *arguments)
def broke(done):
    if done:
        print("BROKE", flush=True)
"""

READS: Mapping[str, str] = {
    "a file of the user": "broke(open(SECRET_FILE).read())",
    "a file by a symbolic link": "os.symlink(SECRET_FILE, 'l')\nbroke(open('l').read())",
    "a file by a hard link": "os.link(SECRET_FILE, 'h')\nbroke(open('h').read())",
    "a file below /proc/self/root": "broke(open('/proc/self/root' + SECRET_FILE).read())",
    "the password file": "broke(open('/etc/shadow').read())",
    "the home folder": "broke(os.listdir(HOME) != ['.pyenv'] and os.listdir(HOME))",
    "its own environment": "broke(SECRET in str(os.environb))",
    "the environment of process 1": "broke(SECRET in open('/proc/1/environ').read())",
    "the environment of all processes": """
for name in os.listdir('/proc'):
    try:
        broke(name.isdigit() and SECRET in open(f'/proc/{name}/environ').read())
    except OSError:
        pass
""",
    "the environment of the trainer": "broke(open(f'/proc/{TRAINER}/environ').read())",
    "the memory of its parent": "broke(open(f'/proc/{os.getppid()}/mem', 'rb'))",
    "the pipes of its parent": "broke(os.open(f'/proc/{os.getppid()}/fd/2', os.O_WRONLY))",
    "the memory of the trainer": """
class V(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]
space = ctypes.create_string_buffer(8)
here = V(ctypes.addressof(space), 8)
broke(call(310, 270, TRAINER, ctypes.byref(here), 1, ctypes.byref(here), 1, 0) >= 0)
""",
    "what the program before it was": """
for line in open('/proc/self/maps'):
    first, last = (int(place, 16) for place in line.split()[0].split('-'))
    if ' rw' not in line or last - first > 1 << 26:
        continue
    try:
        with open('/proc/self/mem', 'rb', 0) as memory:
            memory.seek(first)
            data = memory.read(last - first)
    except OSError:
        continue
    broke(NEIGHBOUR[::-1].encode() in data)
""",
}
"""Attempts to read what is not the program's."""

WRITES: Mapping[str, str] = {
    "into a folder of the user": "open(FOLDER + '/written', 'w').write('x')",
    "into the system": "open('/usr/lib/written', 'w').write('x'); broke(True)",
    "into the interpreter": "open(sys.prefix + '/lib/written', 'w').write('x'); broke(True)",
    "into the folder of the next program": "open(f'../written', 'w').write('x'); broke(True)",
    "into shared memory": "open('/dev/shm/written', 'w').write('x'); broke(True)",
    "by a symbolic link": "os.symlink(FOLDER, 'f')\nopen('f/written', 'w').write('x')",
    "to a device": "broke(os.open('/dev/kmsg', os.O_WRONLY))",
}
"""Attempts to change something outside of the program's folder."""

NETWORK: Mapping[str, str] = {
    "TCP": "socket.create_connection(('127.0.0.1', PORT), 1); broke(True)",
    "UDP": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT)); broke(True)",
    "a listening socket": "socket.create_server(('127.0.0.1', 0)); broke(True)",
    "an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + NAME); broke(True)",
    "a socket in a folder": "socket.socket(socket.AF_UNIX).connect(FOLDER + '/s'); broke(True)",
    "a raw socket": "socket.socket(type=socket.SOCK_RAW); broke(True)",
    "io_uring": "broke(call(425, 425, 1, ctypes.create_string_buffer(120)) >= 0)",
}
"""Attempts to reach a network."""

PROCESSES: Mapping[str, str] = {
    "fork": "pid = os.fork()\nif pid == 0: os._exit(0)\nbroke(True)",
    "another program": "import subprocess\nsubprocess.run(['/bin/true']); broke(True)",
    "the raw call clone": "pid = call(56, 220, signal.SIGCHLD, 0, 0, 0, 0)\nbroke(pid > 0)",
    "a signal to its parent": "os.kill(os.getppid(), 9); broke(True)",
    "a signal to the trainer": "os.kill(TRAINER, 0); broke(True)",
    "a signal to the canary": "os.kill(CANARY, 9); broke(True)",
    "a signal to all": "os.kill(-1, 9); broke(True)",
    "a signal by a file descriptor": "broke(os.pidfd_open(os.getppid()) >= 0)",
    "limits of the canary": "import resource\n"
    "resource.prlimit(CANARY, resource.RLIMIT_CORE, (0, 0)); broke(True)",
    "the priority of the canary": "os.setpriority(os.PRIO_PROCESS, CANARY, 19); broke(True)",
    "the scheduler of the canary": """
os.sched_setscheduler(CANARY, os.SCHED_IDLE, os.sched_param(0)); broke(True)
""",
    "the processors of the canary": "os.sched_setaffinity(CANARY, {0}); broke(True)",
    "tracing its parent": "broke(call(101, 117, 16, os.getppid(), 0, 0) == 0)",
    "a session of its own": "os.setsid(); broke(True)",
    "a namespace of its own": "broke(libc.unshare(0x10000000) == 0)",
    "a mount": "broke(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0)",
    "another root": "os.chroot('/usr'); broke(True)",
    "a program for the kernel": """
broke(call(321, 280, 5, ctypes.create_string_buffer(128), 128) >= 0)
""",
    "keys of the kernel": "broke(call(250, 219, 0, -3, 1) >= 0)",
    "System V memory": "broke(call(29, 194, 0, 1 << 20, 0o1600) >= 0)",
    "memory without a limit": "os.memfd_create('m'); broke(True)",
    "higher limits": "import resource\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)); broke(True)",
    "rights of root": "os.setuid(0); os.seteuid(0)\nbroke(open('/usr/written', 'w'))",
}
"""Attempts to reach other processes, or to gain rights."""

RESOURCES: Mapping[str, str] = {
    "time": "while True: pass",
    "sleep": "time.sleep(1000)",
    "memory": "held = bytearray(LIMIT_MEMORY)\nbroke(True)",
    "a large file": "open('f', 'w').write('x' * 4 * LIMIT_DISK)\nbroke(True)",
    "many files": """
for i in range(100_000):
    open(str(i), 'w').write('x' * (LIMIT_DISK // 8))
broke(True)
""",
    "files that are removed": """
import mmap
held = []
for i in range(64):
    with open('f', 'wb+') as file:
        file.write(b'x' * (LIMIT_DISK // 2))
        file.flush()
        held.append(mmap.mmap(file.fileno(), 4096))
    os.unlink('f')
broke(True)
""",
    "files without a name": """
held = [os.open('.', os.O_TMPFILE | os.O_RDWR) for i in range(8)]
for file in held:
    os.write(file, b'x' * (LIMIT_DISK // 2))
broke(True)
""",
    "many folders": """
for i in range(100_000):
    os.mkdir(str(i))
broke(True)
""",
    "nested folders": """
for i in range(100_000):
    os.mkdir('d')
    os.chdir('d')
broke(True)
""",
    "a locked folder": """
os.mkdir('d')
os.chmod('d', 0o300)
for i in range(100_000):
    open(f'd/{i}', 'w').write('x' * (LIMIT_DISK // 8))
broke(True)
""",
    "output": "while True: print('x' * 4096)",
    "threads": """
import threading
for i in range(10_000):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
broke(True)
""",
    "recursion": "sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "signals that are ignored": """
for number in (2, 15, 24):
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
""",
}
"""Attempts to use more than the limits, or not to end."""


def _named(kind: str, attacks: Mapping[str, str]) -> dict[str, str]:
    return {f"{kind} {name}": program for name, program in attacks.items()}


ATTACKS: Mapping[str, str] = (
    _named("reads", READS)
    | _named("writes", WRITES)
    | _named("network:", NETWORK)
    | _named("processes:", PROCESSES)
    | _named("limits:", RESOURCES)
)

OF_A_SHELL = (
    "reads the memory of its parent",
    "reads the pipes of its parent",
    "processes: fork",
    "processes: another program",
    "processes: the raw call clone",
    "processes: a signal to its parent",
    "processes: a signal to all",
    "processes: a session of its own",
)
"""What a shell may do: it reaches the processes of its own call."""
SHELL: Mapping[str, str] = {
    "processes: a namespace by clone": "broke(call(56, 220, 0x10000011, 0, 0, 0, 0) > 0)",
    "processes: the memory of the runner": "broke(open('/proc/2/mem', 'rb'))",
    "processes: the pipes of the runner": "broke(os.open('/proc/2/fd/1', os.O_WRONLY))",
    "processes: a signal to the runner": """
if os.path.exists('/proc/2/stat'):
    os.kill(2, 9)
    broke(True)
""",
    "processes: limits of the runner": """
import resource
if os.path.exists('/proc/2/stat'):
    broke(resource.prlimit(2, resource.RLIMIT_CORE, (0, 0)))
""",
}
"""Attempts on the process that a shell's calls come from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the attacks on one isolation came to."""

    isolation: str
    broken: tuple[str, ...]
    """The attacks that succeeded."""
    count: int
    why: str = ""
    """Why it could not be tried: not installed, or not possible here."""

    @property
    def holds(self) -> bool:
        """Return whether programs may run in it."""
        return not self.broken and not self.why

    def __str__(self) -> str:
        if self.why:
            return f"{self.isolation}: {self.why}"
        if self.broken:
            return f"{self.isolation}: does not hold: {', '.join(self.broken)}"
        return f"{self.isolation}: all {self.count} attacks held"


def prove(isolation: Isolation, attacks: Mapping[str, str] = ATTACKS) -> Verdict:
    """Run attacks on this machine, each as a program in a sandbox."""
    return _proved(isolation, attacks, _Programs)


def prove_tools(isolation: Isolation, attacks: Mapping[str, str] = ATTACKS) -> Verdict:
    """Run attacks on this machine, each as a call of Python and as one of a shell."""
    by_python = _proved(isolation, attacks, _Calls)
    if not by_python.holds:
        return by_python
    rest = {name: attack for name, attack in attacks.items() if name not in OF_A_SHELL}
    by_shell = _proved(isolation, {**rest, **SHELL}, _Shells)
    count = by_python.count + by_shell.count
    return replace(by_shell, count=count)


def _proved(isolation: Isolation, attacks: Mapping[str, str], way: type[_Way]) -> Verdict:
    name = isolation.name
    if not isolation.installed():
        return Verdict(isolation=name, broken=(), count=0, why=f"not here: {isolation.remedy}")
    limits = Limits(seconds=1.5, cpu_seconds=1.0, memory=256 << 20, disk=4 << 20, output=1 << 16)
    broken = []
    with _targets() as targets:
        server = way(isolation, limits)
        try:
            for attack, program in attacks.items():
                if not _held(server, targets, program):
                    broken.append(attack)
        except SandboxFailed as error:
            return Verdict(isolation=name, broken=(), count=0, why=str(error))
        finally:
            server.kill()
    return Verdict(isolation=name, broken=tuple(broken), count=len(attacks))


QUICK = {name: attack for name, attack in ATTACKS.items() if not name.startswith("limits: ")}
"""The attacks that are run before a run; `groupwise check` runs all."""


@cache
def proved_isolation(
    name: str = "auto", *, tools: bool = False, asks: str = "the reward 'code'"
) -> Isolation:
    """Return the isolation that programs run in, after attacks on it on this machine.

    tools: whether calls of tools run in it.   asks: who needs it, for messages.
    Raises ConfigError where none holds: programs of a model never run without one.
    """
    known = {isolation.name: isolation for isolation in ISOLATIONS}
    elsewhere = "" if tools else ", the address of a SandboxFusion service, or module:function"
    if name != "auto" and name not in known:
        raise ConfigError(
            f"{asks} has sandbox: {name!r}; it takes auto, {', '.join(known)}{elsewhere}"
        )
    tried: list[Verdict] = []
    for isolation in ISOLATIONS if name == "auto" else (known[name],):
        verdict = prove_tools(isolation, QUICK) if tools else prove(isolation, QUICK)
        if verdict.holds:
            log.info("programs run in %s", verdict)
            return isolation
        tried.append(verdict)
    remedy = "" if tools else ".  Or give sandbox: the address of a SandboxFusion service"
    raise ConfigError(
        "no sandbox holds on this machine, and programs never run without one: "
        + "; ".join(map(str, tried))
        + remedy
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Targets:
    """What an attack would like to reach."""

    variables: Mapping[str, object]
    folder: Path
    canary: subprocess.Popen[bytes]
    listening: tuple[socket.socket, ...]

    def untouched(self) -> bool:
        """Return whether nothing came of an attack, and undo what did."""
        touched = self.canary.poll() is not None
        written = self.folder / "written"
        if written.exists():
            written.unlink()
            touched = True
        for one in self.listening:
            try:
                if one.type == socket.SOCK_DGRAM:
                    one.recv(1)
                else:
                    one.accept()[0].close()
                touched = True
            except BlockingIOError:
                continue
        return not touched


@contextmanager
def _targets() -> Iterator[_Targets]:
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="groupwise-attack-")))
        secret, name = secrets.token_hex(16), f"groupwise-{secrets.token_hex(8)}"
        (folder / "secret").write_text(secret)
        canary = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        ends.callback(canary.wait)
        ends.callback(canary.kill)
        tcp, udp, abstract, path = (
            socket.create_server(("127.0.0.1", 0)),
            socket.socket(type=socket.SOCK_DGRAM),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
        )
        listening = (tcp, udp, abstract, path)
        for one in listening:
            ends.callback(one.close)
            one.setblocking(False)
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        abstract.bind(f"\0{name}")
        path.bind(str(folder / "s"))
        for one in (abstract, path):
            one.listen()
        variables = {
            "SECRET": secret,
            "SECRET_FILE": str(folder / "secret"),
            "FOLDER": str(folder),
            "HOME": str(Path.home()),
            "PORT": port,
            "NAME": name,
            "CANARY": canary.pid,
            "TRAINER": os.getpid(),
        }
        yield _Targets(variables=variables, folder=folder, canary=canary, listening=listening)


class _Way(Protocol):
    """A way to run a program."""

    limits: Limits

    def __init__(self, isolation: Isolation, limits: Limits) -> None: ...

    def printed(self, program: str) -> bytes:
        """Run a program, and return what it printed."""
        ...

    def kill(self) -> None:
        """End the sandbox."""
        ...


class _Programs(Sandbox):
    def printed(self, program: str) -> bytes:
        return self.run(program).output


class _Calls(EpisodeSandbox):
    def printed(self, program: str) -> bytes:
        return self.call("python", program).output.encode()


class _Shells(EpisodeSandbox):
    def printed(self, program: str) -> bytes:
        # exec: a shell that stays prints the command, with the word BROKE, where it was killed
        command = f"exec python3 -I -S -B - <<'END_OF_ATTACK'\n{program}\nEND_OF_ATTACK"
        return self.call("shell", command).output.encode()


def _held(server: _Way, targets: _Targets, program: str) -> bool:
    """Run one attack; return whether it came to nothing."""
    limits = server.limits
    neighbour = secrets.token_hex(16)
    variables = {
        **targets.variables,
        "LIMIT_MEMORY": limits.memory,
        "LIMIT_DISK": limits.disk,
        "NEIGHBOUR": neighbour[::-1],
    }
    if "NEIGHBOUR" in program:
        server.printed(f"neighbour = {neighbour!r}")
    given = "".join(f"{name} = {value!r}\n" for name, value in variables.items())
    printed = server.printed(given + _HELPERS + program)
    within = len(printed) <= limits.output + (1 << 16)
    return b"BROKE" not in printed and within and _serves(server) and targets.untouched()


def _serves(server: _Way) -> bool:
    """Return whether the same sandbox, or its successor, still runs programs.

    An episode may have filled its folder for good, and the machine may be busy.
    """
    for _ in range(TRIES):
        if server.printed("print(6 * 7)") == b"42\n":
            return True
        server.kill()
    return False
