"""Two hosts: a pair of network namespaces with a cable between them, met by torchrun's c10d rendezvous."""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("cases_of_hosts", HERE / "cases.py")
assert spec is not None and spec.loader is not None
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)

PLAN: dict[str, Any] = {"objective": "grpo", "minibatches": 2, "beta": 0.1, "steps": 3}


@pytest.fixture(scope="module")
def cable() -> None:
    """Skips, with what the system says, where no namespaces can be made."""
    tried = subprocess.run([HERE / "hosts.sh", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no pair of network namespaces here: {tried.stderr.strip()}")


@pytest.mark.slow
@pytest.mark.usefixtures("cable")
def test_two_hosts_take_the_steps_of_one_process(tmp_path: Path) -> None:
    """Two processes each, which share a copy of the weights: what goes over the cable is the sums of gradients, and records."""
    request = {"case": "online", "arguments": PLAN | {"mode": {"name": "zero3", "shards": 2}}, "out": str(tmp_path / "found")}
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", "--rdzv-id=pair", "--rdzv-conf=is_host=IS_HOST"]
    launch = ["--nnodes=2", "--nproc-per-node=2", "--local-addr=ADDRESS", *meeting, "-m", "worker", json.dumps(request)]
    command = [HERE / "hosts.sh", sys.executable, HERE / "both_hosts.py", *launch]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=HERE)
    assert done.returncode == 0, done.stderr
    sent, received = (int(line.split()[0]) for line in done.stdout.strip().splitlines()[-2:])
    expected = cases.online(**PLAN)
    found = [pickle.loads((tmp_path / f"found-{rank}").read_bytes())[1] for rank in range(4)]
    for ours in found:
        assert [step["tokens"] for step in ours["steps"]] == [step["tokens"] for step in expected["steps"]]
        np.testing.assert_allclose(
            [step["loss"] for step in ours["steps"]], [step["loss"] for step in expected["steps"]], rtol=1e-6
        )
        for mine, theirs in zip(ours["gradients"], expected["gradients"], strict=True):
            assert np.linalg.norm(mine - theirs) <= 1e-6 * np.linalg.norm(theirs)
    # The gradients of 6 updates went over the cable, and not through the machine's own network.
    numbers = expected["gradients"][0].size
    assert min(sent, received) > 6 * numbers * 8 / 2
