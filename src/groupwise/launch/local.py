"""A recipe on one machine: vLLM servers on some of its GPUs, and trainers under torchrun on the
others.

All end together: when the trainers are done, when a server ends, and at a signal, after the
trainers have saved.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from groupwise.errors import ConfigError, Ended, PeerError
from groupwise.launch.commands import FIRST_PORT, LaunchJob, broken_lines, listed, shell
from groupwise.utils.files import expanded, storing
from groupwise.utils.process_main import end_with_parent

POLL = 0.2
"""Seconds between two looks at the processes."""
SERVER_SECONDS = 10.0
"""How long a server that was told to end may take."""
LAST_WORDS = 8
"""Lines of a failed server's log that are shown."""
MODULES = {"torchrun": "torch.distributed.run", "groupwise": "groupwise"}
"""Commands, and the modules that this Python runs in their place."""


@dataclass(frozen=True)
class LocalCommand:
    """What one process runs.   gpus: those that it sees; None: all."""

    words: tuple[str, ...]
    gpus: tuple[str, ...] | None

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that it gets beside ours."""
        if self.gpus is None:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}

    def text(self) -> str:
        """Write it as one would type it."""
        before = [f"{name}={value}" for name, value in self.variables.items()]
        return broken_lines(" ".join([*before, shell(self.words)]))


@dataclass(frozen=True)
class LocalCommands:
    """What runs on this machine.   urls: the addresses of the servers."""

    servers: tuple[LocalCommand, ...]
    urls: tuple[str, ...]
    trainers: LocalCommand

    def text(self) -> str:
        """Write the commands as a shell script."""
        lines = [f"{server.text()} &" for server in self.servers]
        return "\n".join([*lines, self.trainers.text()]) + "\n"


def commands_of(job: LaunchJob, *, ports: Sequence[int] | None = None) -> LocalCommands:
    """Share this machine out: the first GPUs train, those behind them sample.

    ports: of the servers; by default from 8000 on.   Raises ConfigError for more than one machine.
    """
    cluster = job.cluster
    trainers, samplers = cluster.trainers, cluster.samplers
    if trainers.nodes > 1 or samplers.nodes > 1:
        raise ConfigError(
            f"cluster: --on local is one machine, and the recipe has {trainers.nodes} of trainers"
            f" and {samplers.nodes} of samplers: set cluster.trainers.nodes=1"
            " cluster.samplers.nodes=1, and share its GPUs out"
        )
    count = samplers.nodes * samplers.per_node
    if ports is None:
        ports = range(FIRST_PORT, FIRST_PORT + count)
    visible = visible_gpus(trainers.gpus + samplers.nodes * samplers.gpus)
    servers, urls = [], []
    place = trainers.gpus
    for port in ports:
        words = job.serve(host="127.0.0.1", port=str(port))
        gpus = None
        if samplers.gpus:
            gpus = tuple(visible[place : place + samplers.tensor_parallel])
            place += samplers.tensor_parallel
        servers.append(LocalCommand(tuple(words), gpus))
        urls.append(f"http://127.0.0.1:{port}")
    words = job.train(meeting=["--standalone"], servers=listed(urls))
    gpus = tuple(visible[: trainers.gpus]) if trainers.gpus else None
    return LocalCommands(tuple(servers), tuple(urls), LocalCommand(tuple(words), gpus))


def visible_gpus(count: int) -> list[str]:
    """Return names of so many GPUs, as CUDA_VISIBLE_DEVICES writes them.

    They are those that this process may use, else 0, 1, 2 and so on.  Raises ConfigError if it may
    use fewer.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(number) for number in range(count)]
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if len(names) < count:
        raise ConfigError(
            f"cluster: the recipe wants {count} GPUs, and CUDA_VISIBLE_DEVICES names {len(names)}"
        )
    return names


def demand_gpus(job: LaunchJob) -> None:
    """Raise ConfigError if this machine has fewer GPUs than the recipe wants."""
    cluster = job.cluster
    wanted = cluster.trainers.gpus + cluster.samplers.nodes * cluster.samplers.gpus
    if not wanted:
        return
    import torch

    there = torch.cuda.device_count()
    if there < wanted:
        raise ConfigError(
            f"cluster: the recipe wants {wanted} GPUs, and this machine has {there}: set"
            " cluster.trainers.gpus and cluster.samplers.gpus (0: processor cores)"
        )


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nothing listens on."""
    held = []
    for _ in range(count):
        one = socket.socket()
        one.bind(("127.0.0.1", 0))
        held.append(one)
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def run_local(job: LaunchJob, commands: LocalCommands, tell: Callable[[str], None]) -> int:
    """Run the processes, and return the exit status of the trainers.

    tell: prints a line.   Raises PeerError if a server ends, Ended or KeyboardInterrupt after a
    signal, StorageError if no log can be written.
    """
    machine = _Machine(job)
    with _signals(machine):
        try:
            for number, server in enumerate(commands.servers):
                log = machine.start_server(number, server)
                tell(f"server {number}: {commands.urls[number]}, log {log}")
            machine.start_trainers(commands.trainers)
            status = machine.watch()
        finally:
            machine.close()
    if machine.heard == signal.SIGINT:
        raise KeyboardInterrupt
    if machine.heard is not None:
        raise Ended(machine.heard)
    return status


@contextmanager
def _signals(machine: _Machine) -> Iterator[None]:
    """Inside, a signal is passed on to the trainers."""
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        before[number] = signal.signal(number, lambda number, _: machine.hear(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Machine:
    """The processes of a run on this machine."""

    def __init__(self, job: LaunchJob) -> None:
        self.job = job
        self.servers: list[subprocess.Popen[bytes]] = []
        self.logs: list[Path] = []
        self.trainers: subprocess.Popen[bytes] | None = None
        self.heard: int | None = None
        """The first signal."""

    def start_server(self, number: int, command: LocalCommand) -> Path:
        """Start a server, and return the file of its output."""
        log = expanded(self.job.runs) / f"{self.job.label}-server-{number}.log"
        with storing(log, "the output of a server"):
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("wb")
        with output:
            process = _start(command, stdout=output.fileno(), stderr=subprocess.STDOUT)
        self.servers.append(process)
        self.logs.append(log)
        return log

    def start_trainers(self, command: LocalCommand) -> None:
        """Start torchrun, whose output is ours."""
        trainers = self.job.cluster.trainers
        cores = os.cpu_count() or 1
        threads = str(max(1, cores // trainers.per_node))
        defaults = {
            "OMP_NUM_THREADS": threads,  # else torchrun gives every process a single thread
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.job.save_seconds),
        }
        self.trainers = _start(command, defaults)

    def hear(self, number: int) -> None:
        """Pass a signal on to the trainers; a second one kills them."""
        if self.trainers is None:
            raise Ended(number)
        if self.heard is None:
            self.heard = number
            self.trainers.send_signal(number)
        else:
            _kill(self.trainers)

    def watch(self) -> int:
        """Wait for the trainers, and return their status.

        Raises PeerError if a server ends first.
        """
        assert self.trainers is not None
        while True:
            status = self.trainers.poll()
            if status is not None:
                return status if status >= 0 else 128 - status
            for number, server in enumerate(self.servers):
                ended = server.poll()
                if ended is not None and self.heard is None:
                    raise PeerError(self._last_words(number, ended))
            time.sleep(POLL)

    def _last_words(self, number: int, status: int) -> str:
        """Tell how a server ended."""
        how = f"with status {status}"
        if status < 0:
            how = f"by {signal.Signals(-status).name}"
        log = self.logs[number]
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_WORDS:]
        said = "\n".join(f"  {line}" for line in lines)
        return f"server {number} ended {how}, and the trainers with it; its log {log} ends:\n{said}"

    def close(self) -> None:
        """End all processes, the trainers first: they save."""
        if self.trainers is not None:
            _end(self.trainers, self.job.cluster.grace)
        for server in self.servers:
            if server.poll() is None:
                server.terminate()
        for server in self.servers:
            _end(server, SERVER_SECONDS)


def _start(
    command: LocalCommand,
    defaults: Mapping[str, str] | None = None,
    *,
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own: what the terminal sends reaches it through us.

    defaults: environment variables that are set unless ours have others.
    """
    program, *words = command.words
    parent = os.getpid()
    return subprocess.Popen(
        # The working folder may hold a random.py.
        [sys.executable, "-P", "-u", "-m", MODULES[program], *words],
        env={**(defaults or {}), **os.environ, "PYTHONSAFEPATH": "1", **command.variables},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM),
    )


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Tell a process to end, and kill it with its children when it has not after some seconds."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    _kill(process)
    process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
