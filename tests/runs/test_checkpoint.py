"""Checkpoints: bit for bit what was saved, whole or not there, whatever happens to the process or the files."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config.settings import LoraSettings
from groupwise.errors import CheckpointError, StorageError
from groupwise.models.lora import adapt
from groupwise.runs import checkpoint
from groupwise.runs.checkpoint import damage, latest, load, policy_folder, read_tensors, save, step_of
from groupwise.utils import files


def write_policy(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)


def some_state(step: int = 1) -> dict[str, Any]:
    return {"step": step, "order": [1, [2, 3.5]], "name": "x"}


def kept(folder: Path, step: int, **keywords: Any) -> Path:
    """A checkpoint with a state and a tensor."""
    tensors = {"moment": torch.arange(100.0) + step}
    return save(folder, step, policy_writer=write_policy, state=some_state(step), tensors=tensors, **keywords)


def same(a: Any, b: Any) -> bool:
    """Equal in kind and to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return type(b) is float and np.float64(a).tobytes() == np.float64(b).tobytes()
    return type(a) is type(b) and a == b


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


NUMBERS = st.floats(allow_nan=False) | st.just(math.nan)  # JSON has one NaN
LEAVES = st.none() | st.booleans() | st.integers() | NUMBERS | st.text() | st.binary()


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))
def test_any_state_comes_back_as_it_was(value: Any) -> None:
    document = checkpoint._encode({"value": value})
    assert same(json.loads(document, object_hook=checkpoint._decoded), {"value": value})


def test_state_and_tensors_survive_the_disk(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    kinds = (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool)
    tensors = {str(kind): torch.ones(3).to(kind) for kind in kinds} | {
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
        "zero-dim": torch.tensor(3),
        "shared": base[1],
        "turned": base.t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    state = {"floats": [0.1, float("nan"), float("inf"), -0.0, 5e-324], "integers": [2**127, -1], "bytes": {"groups": b"\x00\xff"}}
    path = save(tmp_path, 7, policy_writer=write_policy, state=state, tensors=tensors)
    assert same(load(path), state)
    again = {name: torch.zeros_like(tensor.detach().contiguous()) for name, tensor in tensors.items()}
    read_tensors(path, again)
    assert same(again, {name: tensor.detach() for name, tensor in tensors.items()})


def test_what_would_be_of_another_model_is_refused(tmp_path: Path) -> None:
    path = kept(tmp_path, 1)
    for wrong in ({"moment": torch.zeros(3)}, {"other": torch.zeros(100)}):
        with pytest.raises(CheckpointError, match=r"holds no .* of shape .*: it is of another model"):
            read_tensors(path, wrong)


@pytest.mark.parametrize("value", [object(), {1, 2}, Path("x"), np.array(["a"]), torch.ones(2), torch.float32, lambda: 0])
def test_what_would_not_come_back_is_refused_by_its_kind(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"state holds a .*{type(value).__qualname__}"):
        save(tmp_path, 1, policy_writer=write_policy, state={"inner": [0, value]})
    assert latest(tmp_path) is None


def test_a_checkpoint_of_the_version_before_lends_its_weights_alone(tmp_path: Path) -> None:
    path = kept(tmp_path, 3)
    manifest = json.loads((path / "manifest.json").read_text())
    checkpoint._seal(path, 3, manifest["files"])
    text = (path / "manifest.json").read_text().replace('"format": 3', '"format": 2')
    (path / "manifest.json").write_text(text)
    (path / "COMPLETE").write_text(files.digest(path / "manifest.json") + "\n")
    assert policy_folder(tmp_path) == path / "policy"
    with pytest.raises(CheckpointError, match=r"was written by Groupwise 0\.2.* start anew from its weights, model\.path=.*policy"):
        load(path)


# ---------------------------------------------------------------- saving


def test_layout_rotation_and_latest(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for step in (2, 10, 4_000_000):
        path = save(tmp_path, step, policy_writer=write_policy, state=some_state(step), keep=2)
        assert latest(tmp_path) == path
        assert step_of(path) == step
        assert (tmp_path / "latest").read_text() == path.name + "\n"
    names = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert names == ["000010", "4000000"]
    written = {found.relative_to(path).as_posix() for found in path.rglob("*") if found.is_file()}
    trainer = {"trainer/state.json", "trainer/tensors.safetensors"}
    assert written == {"policy/config.json", "policy/model.safetensors", "manifest.json", "COMPLETE"} | trainer


def test_c13_times_of_files_do_not_say_which_is_newest(tmp_path: Path) -> None:
    old = save(tmp_path, 9, policy_writer=write_policy, state=some_state())
    new = save(tmp_path, 10, policy_writer=write_policy, state=some_state())
    os.utime(old, (2e9, 2e9))
    os.utime(new, (1, 1))
    assert latest(tmp_path) == new


def test_saving_a_step_twice(tmp_path: Path) -> None:
    first = save(tmp_path, 5, policy_writer=write_policy, state=some_state(1))
    assert save(tmp_path, 5, policy_writer=write_policy, state=some_state(2)) == first
    assert load(first)["step"] == 1  # it is whole, so it stays
    (first / "COMPLETE").unlink()
    save(tmp_path, 5, policy_writer=write_policy, state=some_state(3))
    assert load(first)["step"] == 3


def test_c5_a_full_disk_is_told_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path, 1, policy_writer=write_policy, state=some_state())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000_000))
    with pytest.raises(StorageError, match=r"disk full: the checkpoint of step 2 needs \d+ MB, .* has 10 MB") as caught:
        save(tmp_path, 2, policy_writer=write_policy, state=some_state())
    assert caught.value.exit_code == 6
    assert latest(tmp_path) == first


def test_a_full_disk_is_not_told_of_for_weights_that_an_adapter_leaves_out(
    tmp_path: Path, tiny_policy: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = adapt(tiny_policy(), LoraSettings(rank=2, alpha=4.0), base="")
    usage, whole = shutil.disk_usage(tmp_path), sum(parameter.nbytes for parameter in policy.model.parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=checkpoint.HEADROOM + whole - 1))
    job: Any = SimpleNamespace(policy=policy, tensors=dict)
    checkpoint.Saver(tmp_path, job, keep=1).save(1, some_state())
    assert latest(tmp_path) is not None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_c5_c6_a_failing_disk_leaves_nothing_half_written(tmp_path: Path, number: int) -> None:
    def failing(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    first = save(tmp_path, 1, policy_writer=write_policy, state=some_state())
    with pytest.raises(StorageError, match="disk full" if number == errno.ENOSPC else "cannot write a checkpoint"):
        save(tmp_path, 2, policy_writer=failing, state=some_state())
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == [first.name]
    assert latest(tmp_path) == first


@pytest.mark.slow
def test_c5_a_disk_that_fills_up_at_every_point_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        usage = shutil.disk_usage(disk)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 40))  # past the check beforehand
        first = save(disk, 1, policy_writer=write_policy, state=some_state())
        full = 0
        for free in range(0, 512 * 1024, 64 * 1024):
            ballast = disk / "ballast"
            ballast.write_bytes(b"")
            statvfs = os.statvfs(disk)
            ballast.write_bytes(bytes(max(0, statvfs.f_bavail * statvfs.f_frsize - free)))
            tensors = {"large": torch.zeros(50_000)}
            try:
                save(disk, 2 + free, policy_writer=write_policy, state=some_state(), tensors=tensors, keep=10**6)
            except StorageError as error:
                assert "disk full" in str(error)  # noqa: PT017
                full += 1
                assert not list((disk / "checkpoints").glob(".*"))
            else:
                shutil.rmtree(disk / "checkpoints" / f"{2 + free:06d}")
            assert latest(disk) == first
        assert full >= 3
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ---------------------------------------------------------------- damage


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


FILES = (
    "policy/config.json",
    "policy/model.safetensors",
    "trainer/state.json",
    "trainer/tensors.safetensors",
    "manifest.json",
    "COMPLETE",
)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [_truncate, _empty, _flip, Path.unlink])
def test_c3_every_kind_of_damage_is_found_named_and_passed_over(
    tmp_path: Path, file: str, harm: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = kept(tmp_path, 1), kept(tmp_path, 2)
    harm(newer / file)
    with caplog.at_level(logging.WARNING, logger="groupwise"):
        assert latest(tmp_path) == older
    (line,) = caplog.messages
    assert file.rpartition("/")[2] in line
    assert "going on from 000001" in line
    with pytest.raises(CheckpointError, match="is damaged"):
        load(newer)
    assert load(older)["step"] == 1


def test_c4_all_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step, policy_writer=write_policy, state=some_state()) / "trainer" / "state.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        latest(tmp_path)
    assert caught.value.exit_code == 5
    assert str(caught.value).count("trainer/state.json is missing") == 2


def test_files_that_do_not_belong_are_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1, policy_writer=write_policy, state=some_state())
    (path / "policy" / "pytorch_model.bin").write_bytes(b"x")
    assert damage(path) == "policy/pytorch_model.bin does not belong to it"
    (path / "policy" / "pytorch_model.bin").unlink()
    (path / "policy" / "link").symlink_to("/etc/passwd")
    assert "is not a plain file" in str(damage(path))


def test_a_run_that_fell_back_replaces_the_damaged_one(tmp_path: Path) -> None:
    save(tmp_path, 10, policy_writer=write_policy, state=some_state())
    bad = save(tmp_path, 20, policy_writer=write_policy, state=some_state())
    _flip(bad / "policy" / "model.safetensors")
    newest = save(tmp_path, 15, policy_writer=write_policy, state=some_state())
    assert not bad.exists()
    assert latest(tmp_path) == newest


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch bomb-went-off",)


@pytest.mark.parametrize("file", FILES)
def test_x1_pickle_bombs_are_not_run(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = kept(tmp_path, 1)
    (path / file).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError):
        load(path)
    with pytest.raises(CheckpointError):
        latest(tmp_path)
    assert not (tmp_path / "bomb-went-off").exists()


def test_policy_folder_understands_what_people_point_at(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    path = save(run, 3, policy_writer=write_policy, state=some_state())
    assert policy_folder(run) == path / "policy"
    assert policy_folder(path) == path / "policy"
    assert policy_folder(str(path / "policy")) == path / "policy"
    (run / "final").mkdir()
    write_policy(run / "final")
    assert policy_folder(run) == run / "final"
    with pytest.raises(CheckpointError, match="no such folder"):
        policy_folder(tmp_path / "nosuch")
    with pytest.raises(CheckpointError, match="neither a model folder, a checkpoint nor a run with one: it holds run"):
        policy_folder(tmp_path)
    for unsaved in (tmp_path / "other", tmp_path / "staged" / "sft"):
        unsaved.mkdir(parents=True)
        (unsaved / "metrics.jsonl").write_text("")
    for path in (tmp_path / "other", tmp_path / "staged"):
        with pytest.raises(CheckpointError, match=f"{path}.* is a run that has saved no model yet: .*save.every"):
            policy_folder(path)
