"""The files of a run folder: checksums, and what a flipped bit does anywhere in it."""

from __future__ import annotations

import json
import logging
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from groupwise.cli.commands import main
from groupwise.config.recipes import load_recipe
from groupwise.errors import GroupwiseError, RunError
from groupwise.runs import checkpoint, rollout_files
from groupwise.runs.final_model import check_final, check_reference, unfinished
from groupwise.runs.folder import FINAL, choose_folder
from groupwise.runs.inputs import check_inputs
from groupwise.runs.metrics_log import METRICS, LogReader, merged
from groupwise.runs.run import train
from groupwise.runs.run_files import CHECKSUMS, RunFiles
from groupwise.viewer.pages import Pages
from groupwise.viewer.report import report
from groupwise.viewer.sources import open_sources

STEPS = 3


@pytest.fixture(scope="module")
def recipe(write_recipe: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a finished run with a reference, evaluations and checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    changes = {"rewards": [{"function": "regex", "args": {"pattern": "[0-4]"}}], "group": {"beta": 0.1}, "eval": {"every": 1}}
    path = write_recipe(folder, "run", steps=STEPS, **changes)
    for _ in train(load_recipe(path)):
        pass
    return path


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    return recipe.parent / "runs" / "run"


@contextmanager
def flipped(path: Path, place: int, bit: int) -> Iterator[None]:
    """Inside, one bit of a file is the other one."""
    data, status = path.read_bytes(), path.stat()
    path.write_bytes(data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :])
    try:
        yield
    finally:
        path.write_bytes(data)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_what_the_run_wrote_is_known(run: Path) -> None:
    files = RunFiles(run)
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    unknown = {name for name in names if not files.digests(name) and not name.startswith("checkpoints/")}
    assert unknown == set(WITHOUT_DIGEST)
    for name in names - unknown:
        if not name.startswith("checkpoints/"):
            files.verify(name)


def test_a_file_that_was_replaced_is_known_by_both_digests_until_the_run_starts_anew(tmp_path: Path) -> None:
    """A reader may come between the digest and the file."""
    files = RunFiles(tmp_path)
    files.write("a", b"old")
    files.write("a", b"new")
    assert files.read("a") == b"new"
    (tmp_path / "a").write_bytes(b"old")
    assert RunFiles(tmp_path).read("a") == b"old"
    (tmp_path / "a").write_bytes(b"other")
    with pytest.raises(RunError, match="a is not what the run wrote"):
        files.read("a")
    (tmp_path / "a").unlink()
    files.begin()
    assert not files.digests("a")


def test_nothing_is_said_of_a_run_that_is_whole(recipe: Path, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not any(complaints(recipe, run, caplog))


def test_a_small_file_takes_no_more_memory_than_it_has_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"text" * 3_000)
    tracemalloc.start()
    try:
        assert len(RunFiles(tmp_path).read("a", 1 << 32)) == 12_000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_damaged_checksum_accuses_no_file(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write("a", b"text")
    with flipped(tmp_path / CHECKSUMS, 15, 3):
        assert files.read("a") == b"text"
        assert files.doubtful == [f"{tmp_path / CHECKSUMS}:1 is damaged: what it is of is read unchecked"]
    assert files.read("a") == b"text"
    assert not files.doubtful


@pytest.mark.parametrize("name", ["fifo", "out", "device", "nothing", "loop", "folder", "in/../../outside"])
def test_only_regular_files_inside_of_the_folder_are_opened(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "folder").mkdir(parents=True)
    (folder / "in").mkdir()
    (tmp_path / "outside").write_text("secret")
    os.mkfifo(folder / "fifo")
    for link, to in {"out": tmp_path / "outside", "device": "/dev/zero", "nothing": "nowhere", "loop": "loop"}.items():
        (folder / link).symlink_to(to)
    with pytest.raises(RunError, match=str(folder / name)):
        RunFiles(folder).read(name)
    (folder / "inside").symlink_to("in/file")
    (folder / "in" / "file").write_text("text")
    assert RunFiles(folder).read("inside") == b"text"


# ---------------------------------------------------------------- flipped bits

WITHOUT_DIGEST = (CHECKSUMS, METRICS, ".lock", ".seal", "latest", f"{FINAL}/README.md")


def complaints(recipe: Path, run: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What everything that reads a run folder says of it."""
    caplog.clear()
    found: list[str] = []

    def ask(work: Callable[[], object]) -> None:
        try:
            if isinstance(said := work(), str):
                found.append(said)
        except GroupwiseError as error:
            found.append(str(error))

    ask(lambda: choose_folder(load_recipe(recipe)))
    ask(lambda: check_reference(run))
    ask(lambda: unfinished(run))
    ask(lambda: check_final(run / FINAL))
    ask(lambda: check_inputs(run, {}, accept=True))
    for path in (run / "checkpoints").iterdir():
        if wrong := checkpoint.damage(path):
            found.append(f"{path.relative_to(run)}: {wrong}")
    pages = Pages(open_sources([run]))
    pages.indexes[0].refresh()
    for name in pages.known.keys() - {"replay"}:
        for kind in ("training", "evaluation"):
            asked = {"run": "0", "kind": kind, "step": "2", "group": "0", "index": "0", "begin": "0", "key": "x"}
            ask(lambda name=name, asked=asked: json.dumps(pages.answer(name, asked), allow_nan=False) and None)
    for step in range(1, STEPS + 1):
        ask(lambda step=step: pages.sources[0].table(step, kind="evaluation") and None)
    flags = pages.answer("health", {"run": "0"})["flags"]
    return [*found, *(flag["meaning"] for flag in flags if flag["title"] == "Some files cannot be read"), caplog.text]


def content(run: Path) -> dict[str, object]:
    """What a reader gets of every part of a run folder that can be read."""
    files, found = RunFiles(run), {}
    for line in merged(LogReader(files).read()):
        found[f"line {line['step']}"] = {name: value for name, value in line.items() if value == value}
    for kind in (rollout_files.ROLLOUTS, rollout_files.EVALUATIONS):
        for step in rollout_files.steps(files, kind)[0]:
            try:
                table: pa.Table = rollout_files.table(files, step, kind=kind)
            except RunError:
                continue
            found[f"{kind} {step}"] = table
    return found


def equal(one: object, other: object) -> bool:
    return one.equals(other) if isinstance(one, pa.Table) else one == other


def check_flip(name: str, place: int, bit: int, recipe: Path, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, whole = content(run), len(LogReader(RunFiles(run)).read())
    with flipped(run / name, place, bit):
        left_out = len(LogReader(RunFiles(run)).read()) < whole
        said = complaints(recipe, run, caplog)
        after = content(run)
    shown = name if not name.startswith("checkpoints/") else name.split("/", 2)[2]
    named = name not in WITHOUT_DIGEST or name == CHECKSUMS
    if name == METRICS:  # a figure that became another one is not noticed
        named = left_out
    if named:
        assert any(shown in text for text in said), f"bit {bit} of byte {place} of {name}: {said}"
    assert "Traceback" not in "".join(said)
    lost = {part for part in before if part not in after or not equal(before[part], after[part])}
    part = {"rollouts": "rollouts", "evaluations": "evaluations", METRICS: "line"}.get(name.split("/")[0], "nothing")
    assert len(lost) <= 2 and all(one.startswith(part) for one in lost), f"{name}: lost {lost}"
    if name != METRICS:
        assert len(lost) <= 1
    if name == METRICS:
        return
    assert after.keys() <= before.keys(), "nothing is made up"


def kinds(run: Path) -> dict[str, list[str]]:
    """The files of a run folder by what they are."""
    found: dict[str, list[str]] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size):
        name = str(path.relative_to(run))
        found.setdefault(name.split("/")[0] if "checkpoints" not in name else "/".join(name.split("/")[2:3]), []).append(name)
    return found


def flips(run: Path, seed: int, each: int) -> Iterator[tuple[str, int, int]]:
    """Bits of every kind of file, with a seed."""
    chance = random.Random(seed)
    for names in kinds(run).values():
        for _ in range(each):
            name = chance.choice(names)
            yield name, chance.randrange((run / name).stat().st_size), chance.randrange(8)


OFTEN = ("metrics.jsonl", "rollouts", "reference")
SELDOM = ("config.yaml", "environment.json", "done.json", "tokens.parquet", "evaluations", "final", "policy", "trainer", CHECKSUMS)


@pytest.mark.parametrize("kind", [*OFTEN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SELDOM)])
def test_a_flipped_bit_is_named_and_nothing_else_is_lost(
    kind: str, recipe: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(1)
    name = chance.choice(kinds(run)[kind])
    place, bit = chance.randrange((run / name).stat().st_size), chance.randrange(8)
    check_flip(name, place, bit, recipe, run, caplog)
    with flipped(run / name, place, bit):
        assert "<title>run" in report(open_sources([run]))


def test_a_flipped_bit_in_the_last_byte_of_the_log_is_named(recipe: Path, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_flip("metrics.jsonl", (run / "metrics.jsonl").stat().st_size - 1, 1, recipe, run, caplog)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_300_flipped_bits_are_named_and_nothing_else_is_lost(
    seed: int, recipe: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count = 0
    for name, place, bit in flips(run, seed, 7):
        check_flip(name, place, bit, recipe, run, caplog)
        count += 1
    assert count >= 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["config.yaml", "metrics.jsonl", "reference", "rollouts", "final", "trainer", "done.json", CHECKSUMS]
)
def test_commands_on_a_run_with_a_flipped_bit_have_no_traceback(
    kind: str, recipe: Path, run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    name = next(one for one in kinds(run)[kind] if not one.endswith("README.md"))
    for arguments in (["runs", str(run.parent)], ["eval", str(run), "--limit", "1"], ["replay", str(run), "--step", "2"]):
        with flipped(run / name, (run / name).stat().st_size // 2, 1), caplog.at_level(logging.ERROR):
            code = main(arguments)
        said = capsys.readouterr()
        assert "Traceback" not in said.err + said.out
        assert code in (0, 1, 2, 5), (arguments, said)
