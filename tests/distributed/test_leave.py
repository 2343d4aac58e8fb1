"""Parting: nothing of the process group works on, so nothing of it can ask for an interpreter that is being taken down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import RewardError

PAIR = """
import os, socket
from groupwise.distributed import comm, process_group

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
other = os.fork()
rank = 0 if other else 1
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

process_group.join(60, cuda=False)
"""
PARTS = (
    PAIR
    + """
def threads():
    return [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]

comm.open_aside()
assert comm.gather([rank]) == comm.gather([rank], aside=True) == [0, 1]
assert any("gloo" in name for name in threads()), threads()
process_group.leave()
left = [name for name in threads() if "gloo" in name]
assert not left, left
print("parted", flush=True)
if other:
    assert os.waitpid(other, 0)[1] == 0
"""
)
FAILS = (
    PAIR
    + """
import sys, time
from groupwise.cli.commands import main
from groupwise.cli import train
from groupwise.errors import RewardError

def fail(given):
    def work():
        if rank == 1:
            raise RewardError("the judge is tired")
        return []
    try:
        comm.together(work)
    finally:
        time.sleep(rank * 1.5)  # a busy machine, which brings the one that knows the cause to its words last

train.run = fail
code = main(["train", "any"])
print(f"rank {rank} goes", file=sys.stderr, flush=True)
if other:
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == code
os._exit(code)
"""
)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are named in /proc")
def test_no_thread_of_the_group_is_left_after_parting(forked: Any) -> None:
    """Else gloo's, letting go of the last exchange's tensors as Python ended, aborted one run in thirty on a busy machine."""
    ended = forked.run(code=PARTS)
    assert ended.returncode == 0, ended.said
    assert ended.said.count("parted") == 2


@pytest.mark.slow
def test_whoever_knows_the_cause_speaks_before_the_first_one_goes(forked: Any) -> None:
    """Else the launcher, which ends all once one has gone, could end it without a word."""
    ended = forked.run(code=FAILS)
    assert ended.returncode == RewardError.exit_code, ended.said
    said = [ended.said.index(text) for text in ("rank 1: RewardError: the judge is tired", "rank 0 goes")]
    assert said == sorted(said), ended.said


@pytest.mark.slow
def test_one_that_does_not_come_is_not_waited_for_long(forked: Any) -> None:
    begin = PAIR + "import time; comm.wait()\nif rank: time.sleep(3600)\n"
    ended = forked.run(code=begin + "process_group.last_words(0.2)\nos.kill(other, 9)\nprint('gone')")
    assert "gone" in ended.said, ended.said
