"""Paths that users write, and folders for temporary files."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from groupwise.config.recipes import run_folder
from groupwise.config.settings import ModelSettings, Recipe
from groupwise.data.tokenizers import arithmetic_tokenizer, make_tokenizer, with_chat_template
from groupwise.errors import ConfigError, StorageError
from groupwise.models.loading import read_blueprint
from groupwise.models.saving import save
from groupwise.utils import files
from groupwise.utils.files import expanded, storing, trouble


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_home_folder_is_found_by_its_sign(home: Path) -> None:
    assert expanded("~/a") == home / "a"
    for path in ("~5.0 points", "~nobody-at-all/x", "a/~", "~\0"):
        assert expanded(path) == Path(path)


def test_every_path_of_a_recipe_may_lie_in_the_home_folder(home: Path, tiny_policy) -> None:  # type: ignore[no-untyped-def]
    assert run_folder(Recipe(name="a/b", objective="grpo", runs="~/r")) == home / "r" / "a" / "b"
    save(tiny_policy(), home / "m")
    assert (
        read_blueprint(ModelSettings(path="~/m")).config["model_type"]
        == read_blueprint(ModelSettings(path=str(home / "m"))).config["model_type"]
    )
    with pytest.raises(ConfigError, match="no such folder: '~nobody-at-all/m'"):
        read_blueprint(ModelSettings(path="~nobody-at-all/m"))
    assert make_tokenizer("~/m", ()).get_vocab() == make_tokenizer(str(home / "m"), ()).get_vocab()
    (home / "t.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert with_chat_template(arithmetic_tokenizer(), "~/t.jinja").chat_template == "{{ messages }}"


def test_folders_that_killed_processes_have_left_go_and_those_of_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import sys, time, tempfile; tempfile.tempdir = sys.argv[1]; from groupwise.utils.files import temporary_folder; " \
        "print(temporary_folder('kind'), flush=True); time.sleep(3600)"  # fmt: skip
    others = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = [Path(one.stdout.readline().strip()) for one in others]  # type: ignore[union-attr]
    (folders[0] / "file").write_text("x")
    others[0].kill()
    others[0].wait()
    (tmp_path / "groupwise-other-x").mkdir()
    (tmp_path / "groupwise-kind-file").write_text("a user's")
    own = files.temporary_folder("kind")
    assert {path.name for path in tmp_path.iterdir()} == {
        own.name, folders[1].name, "groupwise-other-x", "groupwise-kind-file",
    }  # fmt: skip
    assert files.temporary_folder("kind") != own and own.is_dir()
    others[1].kill()
    others[1].wait()


def test_a_temporary_directory_that_is_not_there_is_passed_over_and_none_at_all_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = files.temporary_folder("kind")
    assert folder.is_dir() and not (tmp_path / "missing").exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StorageError, match=r"cannot write temporary files to .*missing: .*"):
        files.temporary_folder("kind")


@pytest.mark.parametrize(("of_folder", "of_file"), [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600)])
def test_who_may_read_a_folder_may_read_its_files(tmp_path: Path, of_folder: int, of_file: int) -> None:
    final = tmp_path / "final"
    final.mkdir()
    weights = final / "model.safetensors"
    weights.write_bytes(b"")
    weights.chmod(0o600)
    final.chmod(of_folder)
    files.sync_tree(final)
    assert weights.stat().st_mode & 0o777 == of_file


def test_a_folder_whose_modes_cannot_be_set_is_brought_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "config.json").chmod(0o644)
    monkeypatch.setattr(Path, "chmod", lambda *_: pytest.fail("the mode needs no change"))
    files.sync_tree(tmp_path)


@pytest.mark.parametrize(
    ("number", "named", "said"),
    [
        (errno.ENOSPC, None, r"disk full while writing the run to .*/run \(\d+ MB free\): make room there"),
        (errno.EDQUOT, None, r"disk full while writing the run to .*/run \(\d+ MB free\): make room there"),
        (errno.EROFS, None, "cannot write the run to .*/run: Read-only file system"),
        (errno.ESTALE, None, "cannot write the run to .*/run: Stale file handle"),
        (errno.EIO, None, "cannot write the run to .*/run: Input/output error"),
        (errno.EACCES, "run", "cannot write the run to .*/run: Permission denied"),
        (errno.EEXIST, "run/rollouts", "cannot write the run to .*/run: File exists: .*/run/rollouts"),
    ],
)
def test_a_disk_that_takes_no_file_says_so_in_its_own_words(number: int, named: str | None, said: str, tmp_path: Path) -> None:
    place = None if named is None else str(tmp_path / named)
    assert re.fullmatch(said, trouble(OSError(number, os.strerror(number), place), tmp_path / "run", "the run"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_tokenizer_that_meets_a_full_disk_says_so(tmp_path: Path) -> None:
    """It is written in Rust, and raises no OSError."""
    whole = r"disk full while writing the final model to .*/final \(\d+ MB free\): make room there"
    with pytest.raises(StorageError, match=whole), storing(tmp_path / "final", "the final model"):
        Tokenizer(WordLevel({"a": 0}, unk_token="a")).save("/dev/full")


def test_what_is_no_matter_of_the_disk_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="WordLevel error"), storing(tmp_path / "final", "the final model"):
        Tokenizer(WordLevel({"a": 0}, unk_token="b")).encode("c")
