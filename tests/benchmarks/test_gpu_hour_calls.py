"""A call on a lent GPU goes on behind what fails, and keeps what it has."""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_hour(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("gpu_hour")
    for name in [name for name, module in sys.modules.items() if str(BENCHMARKS) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no such kernel")


def test_a_model_that_cannot_be_made_fails_by_name_and_the_others_go_on(
    gpu_hour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = gpu_hour.Call("host", tmp_path, "cpu", tiny=True, minutes=8.0)
    _gpu_calls = importlib.import_module("_gpu_calls")
    monkeypatch.setattr(_gpu_calls, "random_policy", fails)
    monkeypatch.setattr(_gpu_calls, "probes", lambda device: {"a probe": lambda: 1.0})
    gpu_hour.host(call)
    results = json.loads((tmp_path / "host.json").read_text(encoding="utf-8"))["results"]
    assert results["a probe"] == 1.0
    failed = {
        title for title, result in results.items() if title != "a probe" and result["failed"] == "RuntimeError: no such kernel"
    }
    assert failed == {"memory after loading", "tiny step, update", "tiny step, rollout", "tiny step, first tokens"}
    assert "in fails" in "\n".join(results["memory after loading"]["where"])
    call.name = "decode"
    gpu_hour.decode(call)
    assert len(call.results) == 5 + 7


def test_an_error_that_takes_the_gpu_lets_the_call_begin_anew_behind_it(
    gpu_hour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[list[str]] = []

    class Anew(BaseException):
        pass

    def execv(path: str, command: list[str]) -> None:
        began.append(command)
        raise Anew

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(gpu_hour, "lost", lambda: True)
    monkeypatch.setattr(gpu_hour, "describe", lambda device: {})
    monkeypatch.setattr(gpu_hour.Call, "spent", 120.0)
    call = gpu_hour.Call("decode", tmp_path, "cuda", tiny=False, minutes=8.0)
    call.measure("first", lambda: 1.0)
    assert not began
    with pytest.raises(Anew):
        call.measure("second", fails)
    assert began[0][1:] == [gpu_hour.__file__, "decode", "--out", str(tmp_path), "--minutes", "6.00", "--resume"]
    again = gpu_hour.Call("decode", tmp_path, "cuda", tiny=False, minutes=8.0)
    again.read()
    for title in ("first", "second"):
        again.measure(title, lambda: pytest.fail("was measured"))
    again.minutes = 0.0
    again.measure("third", lambda: pytest.fail("was measured"))
    assert list(again.results) == ["first", "second", "third"]
    again.read()
    assert list(again.results) == ["first", "second"], "what was left out is measured next"


def test_a_comparison_that_takes_too_long_ends_with_the_processes_that_it_has_started(gpu_hour: Any) -> None:
    """A pipe ends when the last who holds it has gone."""
    reader, writer = os.pipe()
    child = "import time; time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with os.fdopen(writer, "w") as printed:
        status = gpu_hour.ended([sys.executable, "-c", parent], 2 / 60, printed)
    assert status == "stopped after 0.0 minutes"
    assert select.select([reader], [], [], 60)[0] and os.read(reader, 1) == b""
    os.close(reader)


def test_what_a_comparison_prints_is_kept(gpu_hour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = gpu_hour.Call("compare", tmp_path, "cpu", tiny=True, minutes=8.0)
    says = [sys.executable, "-c", "print('\\n'.join(map(str, range(100)))); raise SystemExit(3)"]
    monkeypatch.setattr(gpu_hour, "commands", lambda call: [("one", says, 1.0), ("two", says, 0.0)])
    gpu_hour.compare(call)
    assert call.results["one"]["failed"] == "3" and call.results["one"]["output"] == list(map(str, range(70, 100)))
    assert call.results["two"].keys() == {"left out"}
    assert (tmp_path / "compare.txt").read_text(encoding="utf-8").splitlines() == list(map(str, range(100)))


def test_every_file_with_a_test_that_needs_a_gpu_is_run(gpu_hour: Any) -> None:
    names = {file.name for file in gpu_hour.tests_that_need_a_gpu(tiny=False)}
    assert {"test_kernels.py", "test_on_gpus.py", "test_varlen_attention.py"} <= names
