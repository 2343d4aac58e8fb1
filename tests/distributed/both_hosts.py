"""torchrun on both hosts of hosts.sh: `both_hosts.py ARGUMENTS`.

In the arguments ADDRESS stands for the host's own address, and IS_HOST for 1 where both meet, 0 on the other host.
Launchers and workers are forks of this process (`fork_server.py`), so that everything is imported once and not six times.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("fork_server", Path(__file__).parents[1] / "fork_server.py")
assert spec is not None and spec.loader is not None
fork_server = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fork_server)


def move_to(process: str) -> None:
    """This process, and what it starts, to the host where another one is."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts"):
        with open(f"/proc/{process}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"no way into the {kind} namespace of process {process}")


def begin(address: str, interface: str, process: str | None, arguments: list[str]) -> int:
    """The process id of a host's launcher."""
    pid = os.fork()
    if pid == 0:
        launch(address, interface, process, arguments)
    return pid


def launch(address: str, interface: str, process: str | None, arguments: list[str]) -> None:
    """Be torchrun, to its end, on a host: here, or where `process` is."""
    if process is not None:
        move_to(process)
    request = {
        "module": "torch.distributed.run",
        "arguments": [one.replace("ADDRESS", address).replace("IS_HOST", str(int(process is None))) for one in arguments],
        "code": None,
        "forks": True,
        "first": "",
        "cwd": os.getcwd(),
        "environment": os.environ | {"GLOO_SOCKET_IFNAME": interface},
    }
    fork_server.end_with(lambda: fork_server.become(request))


if __name__ == "__main__":
    fork_server.import_all()
    first = begin("10.77.0.1", "cable", None, sys.argv[1:])
    second = begin("10.77.0.2", "socket", os.environ["OTHER"], sys.argv[1:])
    statuses = [os.waitpid(pid, 0)[1] for pid in (first, second)]
    sys.exit(any(statuses))
