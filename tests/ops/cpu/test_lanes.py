"""Two lanes that every change goes through: kernels that watch every address they touch, and the library without any kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.ops.operations import absence

ROOT = Path(__file__).parents[3]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=kept | environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(absence() is not None, reason=f"no compiled kernels: {absence()}")
def test_the_kernels_touch_nothing_that_is_not_theirs() -> None:
    """AddressSanitizer and UBSan over the kernels' own tests; `make test-kernels` takes more of them."""
    files = ["tests/ops/cpu/test_kernels.py", "tests/rollout/native/test_kv_cache.py"]
    found = run(["tests/ops/cpu/sanitized.py", "--hypothesis-profile=few", *files])
    if "the sanitizers need" in found.stderr:
        pytest.skip(found.stderr.strip())
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    assert " passed" in found.stdout


WITHOUT = """
import sys, pytest
from groupwise.ops.operations import absence
assert absence() == "GROUPWISE_KERNELS=off", absence()
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_training_is_the_same_without_kernels(forked: Any) -> None:
    """Golden curves and the loop, where no kernels are installed; but for rewards without differences, which train nothing."""
    files = ["tests/golden", "tests/training/test_online.py", "-k", "not p61"]
    process = forked.start(*files, code=WITHOUT, cwd=ROOT, GROUPWISE_KERNELS="off")
    assert process.wait(590) == 0, process.said[-4000:]
    assert " passed" in process.said
