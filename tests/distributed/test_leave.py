"""Parting: nothing of the process group works on, so nothing of it can ask for an interpreter that is being taken down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PAIR = """
import os, socket
from groupwise.distributed import comm

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
other = os.fork()
rank = 0 if other else 1
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

def threads():
    return [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]

comm.join(60, cuda=False)
comm.open_aside()
assert comm.gather([rank]) == comm.gather([rank], aside=True) == [0, 1]
assert any("gloo" in name for name in threads()), threads()
comm.leave()
left = [name for name in threads() if "gloo" in name]
assert not left, left
print("parted", flush=True)
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are named in /proc")
def test_no_thread_of_the_group_is_left_after_parting(forked: Any) -> None:
    """Else gloo's, letting go of the last exchange's tensors as Python ended, aborted one run in thirty on a busy machine."""
    ended = forked.run(code=PAIR)
    assert ended.returncode == 0, ended.said
    assert ended.said.count("parted") == 2
