"""Random runs (`fuzz_cases.py`): each works, or ends with an error of Groupwise's, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import io
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from groupwise.cli.check import check_recipe
from groupwise.config.recipes import load_recipe
from groupwise.config.settings import ScratchSettings
from groupwise.data.tokenizers import make_tokenizer
from groupwise.errors import GroupwiseError
from groupwise.models.scratch import scratch_model
from groupwise.runs.prepared import plan_of
from groupwise.runs.run import train

found = importlib.util.spec_from_file_location("fuzz_cases", Path(__file__).with_name("fuzz_cases.py"))
assert found is not None and found.loader is not None
cases = sys.modules["fuzz_cases"] = importlib.util.module_from_spec(found)
found.loader.exec_module(cases)

TRAINED, CHECKED = 5, 7
"""Of so many runs whose plan stands, one is trained and one is checked: every seed by its number."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a chat template."""
    tokenizer = make_tokenizer("bytes")
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    scratch_model(
        ScratchSettings(hidden=16, layers=1, heads=2, context=128),
        vocabulary=len(tokenizer),
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of the test's own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    tempfile.tempdir = None


def outcome(seed: int, folder: Path, model: Path) -> str:
    """What became of a random run."""
    reached = "loaded"
    try:
        path = cases.Case(seed).write(folder, model)
        recipe = load_recipe(path)
        plan_of(recipe)
        reached = "planned"
        if seed % TRAINED == 0:
            for _ in train(recipe):
                pass
            reached = "trained"
        elif seed % CHECKED == 0:
            check_recipe(str(path), console=Console(file=io.StringIO()))
            reached = "checked"
    except GroupwiseError as error:
        said = str(error)
        assert said.strip() and "\x1b" not in said, said
        return type(error).__name__
    except Exception as error:
        error.add_note(f"seed {seed}: the files are in {folder}")
        raise
    return reached


def test_random_recipes_are_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcomes: Counter[str] = Counter()
    for seed in range(1000, 1060):
        try:
            load_recipe(cases.Case(seed).write(tmp_path, tmp_path))
            outcomes["read"] += 1
        except GroupwiseError as error:
            outcomes[type(error).__name__] += 1
    assert outcomes["read"] > 10 and outcomes["ConfigError"] > 10 and outcomes.total() == 60


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_random_runs_work_or_end_with_an_error_of_ours(
    first: int, temporary: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + 50):
        folder = tmp_path / str(seed)
        folder.mkdir()
        monkeypatch.chdir(folder)
        outcomes[outcome(seed, folder, model)] += 1
        assert list(temporary.iterdir()) == [], f"seed {seed}"
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(folder)
    assert outcomes["planned"] + outcomes["trained"] + outcomes["checked"] > 2, outcomes
