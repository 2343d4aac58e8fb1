"""Run folders from elsewhere: a bad file is named, the rest is shown, and nothing outside of the folder is read."""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from groupwise.errors import DataError
from groupwise.viewer.pages import Pages
from groupwise.viewer.report import report
from groupwise.viewer.sources import open_sources

STEP, OTHER = "rollouts/000003.parquet", "rollouts/000002.parquet"


@pytest.fixture(scope="module")
def plain(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps without checksums, as somebody would make one up."""
    folder = made.make_run(tmp_path_factory.mktemp("plain") / "run", 3)
    (folder / "checksums.txt").unlink()
    return folder


def rewritten(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    return lambda path: pq.write_table(change(pq.read_table(path)), path)


def column(name: str, values: Any) -> Callable[[Path], None]:
    """A step with another column."""

    def change(table: pa.Table) -> pa.Table:
        place = table.column_names.index(name)
        return table.set_column(place, name, values(table.column(name)) if callable(values) else values)

    return rewritten(change)


def written(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.write_text(text)

    return write


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else of the name."""

    def put(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return put


def link_to_secret(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_text('objective: SECRET\n{"step": 1, "SECRET": 1}\n')
    path.symlink_to(secret)


def unpacks_to_4_gib(path: Path) -> None:
    """One text of 4 MB that stands for a thousand rows."""
    table = pq.read_table(path)
    rows = pa.array(np.zeros(1024, np.int32))
    columns = {name: table.column(name).take(rows) for name in table.column_names if name != "completion_text"}
    texts = pa.DictionaryArray.from_arrays(rows, pa.array(["x" * (4 << 20)]))
    pq.write_table(pa.table(columns | {"completion_text": texts}), path, store_schema=False, compression="zstd")
    assert path.stat().st_size < 20_000


def a_long_list(path: Path) -> None:
    """One completion of 2^25 tokens, all of them 0."""
    table = pq.read_table(path).slice(0, 1)
    zeros = pa.ListArray.from_arrays(pa.array([0, (1 << 25) + 8], pa.int32()), pa.DictionaryArray.from_arrays(
        pa.array(np.zeros((1 << 25) + 8, np.int8)), pa.array([0], pa.int64())).dictionary_decode())  # fmt: skip
    place = table.column_names.index("completion_ids")
    pq.write_table(table.set_column(place, "completion_ids", zeros), path, compression="zstd")


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n" for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP = "[" * 100_000 + "]" * 100_000
BAD: dict[str, tuple[str, Callable[[Path], None]]] = {
    "aliases that multiply": ("config.yaml", written(ALIASES)),
    "a binary tag": ("config.yaml", written("objective: !!binary aGVsbG8=\n")),
    "a Python tag": ("config.yaml", written("objective: !!python/object/apply:os.system [id]\n")),
    "YAML 100,000 deep": ("config.yaml", written(DEEP)),
    "a config of 300 KB": ("config.yaml", written("x: " + "y" * 300_000 + "\n")),
    "a FIFO as config": ("config.yaml", instead(os.mkfifo)),
    "a device as config": ("config.yaml", instead(lambda path: path.symlink_to("/dev/zero"))),
    "a folder as config": ("config.yaml", instead(Path.mkdir)),
    "a link out of the folder as config": ("config.yaml", instead(link_to_secret)),
    "a link to itself": ("config.yaml", instead(lambda path: path.symlink_to(path))),
    "JSON 100,000 deep": ("environment.json", written(DEEP)),
    "JSON 400 deep": ("environment.json", written('{"attempts": [' + "[" * 400 + "]" * 400 + "]}")),
    "an environment without attempts": ("environment.json", written('{"attempts": 3}')),
    "a FIFO as environment": ("environment.json", instead(os.mkfifo)),
    "a FIFO as log": ("metrics.jsonl", instead(os.mkfifo)),
    "a link out of the folder as log": ("metrics.jsonl", instead(link_to_secret)),
    "lines that are none": ("metrics.jsonl", written('{"step": 1, "reward": 1}\n{"step": 1e999}\n[]\n' + DEEP + "\n")),
    "a step of 2^70": ("metrics.jsonl", written(f'{{"step": 1, "reward": 1}}\n{{"step": {1 << 70}}}\n')),
    "half a number": ("done.json", written('{"step": 4')),
    "a FIFO as vocabulary": ("tokens.parquet", instead(os.mkfifo)),
    "a vocabulary of other types": ("tokens.parquet", lambda path: pq.write_table(pa.table({"piece": [1]}), path)),
    "a FIFO as step": (STEP, instead(os.mkfifo)),
    "a device as step": (STEP, instead(lambda path: path.symlink_to("/dev/zero"))),
    "a text as step": (STEP, written("PAR1")),
    "rewards that are texts": (STEP, column("reward", lambda was: was.cast(pa.string()))),
    "tokens that are texts": (STEP, column("completion_ids", lambda was: pa.array([["x"]] * len(was)))),
    "no rows": (STEP, rewritten(lambda table: table.slice(0, 0))),
    "a group of -5": (STEP, column("group", lambda was: pa.array([-5] * len(was)))),
    "a group of 2^40": (STEP, column("group", lambda was: pa.array([1 << 40] * len(was)))),
    "groups that are not there": (STEP, column("group", lambda was: pa.nulls(len(was), pa.int64()))),
    "infinite rewards": (STEP, column("reward", lambda was: pa.array([float("inf")] * len(was)))),
    "log-probs of other lengths": (STEP, column("behavior_logp", lambda was: pa.array([[0.5]] * len(was), was.type))),
    "without a column": (STEP, rewritten(lambda table: table.drop_columns(["group"]))),
    "4 GiB of text": (STEP, unpacks_to_4_gib),
    "two columns of one name": (
        STEP,
        rewritten(lambda table: pa.table([*table.columns, table.column("group")], names=[*table.column_names, "group"])),
    ),
    "a name of 24 digits": (f"rollouts/{'9' * 24}.parquet", written("")),
    "a name of many steps": ("rollouts/000001-999999999999-1.parquet", written("")),
    "a file as rollouts": ("rollouts", instead(Path.touch)),
    "a link out of the folder as rollouts": ("rollouts", instead(lambda path: path.symlink_to("/etc"))),
    "a file as evaluations": ("evaluations", instead(Path.touch)),
    "checksums that are none": ("checksums.txt", written("nothing\n")),
    "a FIFO as checksums": ("checksums.txt", os.mkfifo),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_and_the_rest_is_shown(case: str, plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(plain, folder)
    name, spoil = BAD[case]
    spoil(folder / name)
    pages = Pages(open_sources([folder]))
    pages.indexes[0].refresh()
    (run,) = pages.answer("runs", {})["runs"]
    asked = {"run": "0", "step": "2", "group": "1", "index": "0", "begin": "2", "key": "x"}
    failed = {}
    for page in pages.known.keys() - {"replay"}:
        try:
            json.dumps(pages.answer(page, asked), allow_nan=False)
        except DataError as error:
            failed[page] = str(error)
    (flag, *_) = pages.answer("health", {"run": "0"})["flags"]
    assert flag["title"] == "Some files cannot be read"
    assert name.rpartition("/")[2][:20] in flag["meaning"]
    assert "SECRET" not in json.dumps([run, flag, pages.answer("config", {"run": "0"}), pages.answer("curves", {"run": "0"})])
    if name != "rollouts":
        assert not failed
        assert pages.answer("step", {"run": "0"})["step"] == (2 if name == STEP else 3), "the newest that can be read"
        assert len(pages.answer("group", {"run": "0", "step": "2", "group": "1"})["completions"]) == 4
    if name not in ("config.yaml",):
        assert pages.answer("config", {"run": "0"})["config"]["objective"] == "grpo"
    page = report(open_sources([folder]))
    assert "SECRET" not in page
    assert "Some files cannot be read" in page or name in ("evaluations", STEP, OTHER) or name.startswith("rollouts/")


def test_the_pages_over_http_answer_for_a_run_whose_numbers_are_none(plain: Path, viewer: Callable, tmp_path: Path) -> None:
    """NaN in a data row and in the configuration: JSON has none."""
    folder = tmp_path / "run"
    shutil.copytree(plain, folder)
    (folder / "config.yaml").write_text("objective: grpo\nsteps: .nan\nlr: .inf\nlist: [.nan, {a: .nan}]\n")
    column("row", lambda was: pa.array(['{"answer": NaN, "deep": ' + DEEP + "}"] * len(was)))(folder / STEP)
    column("row", lambda was: pa.array(['{"answer": NaN}'] * len(was)))(folder / OTHER)
    address = viewer(folder).address
    for page in ("runs", "config?run=0", "health?run=0", "step?run=0", "group?run=0&step=2&group=1", "group?run=0&step=3&group=1"):
        with urllib.request.urlopen(f"{address}api/{page}") as answer:
            json.load(answer, parse_constant=lambda word: pytest.fail(word))
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{address}api/group?run=0&step=2&group=1e300")
    assert refused.value.code == 422


@pytest.mark.slow
def test_a_completion_of_2_to_the_25_tokens_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(plain, folder)
    a_long_list(folder / STEP)
    assert (folder / STEP).stat().st_size < 1 << 20
    with pytest.raises(DataError, match="unpacks to more than"):
        open_sources([folder])[0].table(3)


@pytest.mark.parametrize("step", [1 << 63, -(1 << 63), 1e300, 1 << 53], ids=str)
def test_a_file_whose_step_is_no_step_is_refused_by_its_number(tmp_path: Path, step: float) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"prompt": "1 + 1?", "completion": "2", "reward": 1.0, "step": step}))
    with pytest.raises(DataError, match=r"a step is a whole number below 2\^53, got -?\d"):
        open_sources([path])


@pytest.mark.parametrize("place", ["metrics", "rewards/", "example_id"])
def test_half_a_character_in_a_name_is_shown_as_its_escape(tmp_path: Path, place: str) -> None:
    half = "half\ud83d"
    row: dict[str, Any] = {"prompt": "1 + 1?", "completion": "2", "reward": 1.0}
    row |= {"metrics": {"metrics": {half: 0.5}}, "rewards/": {f"rewards/{half}": 0.5}, "example_id": {"example_id": half}}[place]
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(row))
    pages = Pages(open_sources([path]))
    functions = pages.answer("step", {"run": "0"})["functions"]
    assert functions == ({} if place == "example_id" else {"half\\ud83d": 0.5})
    assert "half" not in report(open_sources([path])).split("answers")[0]


def test_half_a_character_in_the_name_of_a_logged_metric_is_shown(plain: Path, tmp_path: Path) -> None:
    run = shutil.copytree(plain, tmp_path / "run")
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 4, "half\ud83d": 0.5}) + "\n")
    pages = Pages(open_sources([run]))
    shown = json.loads(json.dumps(pages.answer("curves", {"run": "0"})))
    assert shown["values"]["half\ud83d"][-1] == 0.5
    assert pages.answer("health", {"run": "0"})["families"]
    assert report(open_sources([run])).encode()
