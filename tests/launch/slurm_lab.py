"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd of Debian's packages, in a folder of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=requeue_delay=1
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=10
GresTypes=gpu
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores} Gres=gpu:2 State=UNKNOWN
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def absence() -> str | None:
    """Why no Slurm can be started here, or None."""
    lacking = [name for name in PROGRAMS if _program(name) is None]
    if lacking:
        return f"no {', '.join(lacking)} here: apt install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "slurmd is started as root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Slurm:
    """The daemons; `close` ends them and the jobs that they run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: list[subprocess.Popen[bytes]] = []
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        cores = os.cpu_count() or 1
        text = CONFIGURATION.format(folder=folder, ports=_free_ports(3), cores=cores)
        (folder / "slurm.conf").write_text(text)
        # Devices that every machine has, in the place of GPUs.
        gpus = [f"NodeName=n1,n2 Name=gpu File={device}\n" for device in ("/dev/null", "/dev/zero")]
        (folder / "gres.conf").write_text("".join(gpus))
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        try:
            self._begin(key)
        except BaseException:  # nobody has the object that could be closed
            self.close()
            raise

    def _begin(self, key: Path) -> None:
        folder = self.folder
        places = [f"--socket={folder}/munge.sock", f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed"]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", f"--log-file={folder}/munge.log", *places)
        _until(lambda: (folder / "munge.sock").exists(), "the start of munged")
        self._start("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-N", node)
        _until(lambda: self.run("sinfo", "--noheader", "--format=%D %t").split() == ["2", "idle"], "the start of the nodes")

    def _start(self, name: str, *arguments: str) -> None:
        program = _program(name)
        assert program is not None
        log = (self.folder / f"{name}.out").open("ab")
        with log:
            self.daemons.append(subprocess.Popen([program, *arguments], env=self.environment, stdout=log, stderr=log))

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=600)
        return done.stdout.strip()

    def close(self) -> None:
        try:
            # The processes of a job outlive its slurmd.
            self.run("scancel", "--me")
            _until(lambda: not self.run("squeue", "--noheader"), "the end of the jobs", 120.0)
        finally:
            self._end_daemons()

    def _end_daemons(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def _until(reached, awaited: str, seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"{awaited}: not within {seconds:.0f} s"
        time.sleep(0.2)
