"""The user's cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.utils.cache import cache_folder


def test_nothing_is_read_from_a_folder_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "groupwise" and (tmp_path / "groupwise").stat().st_mode & 0o777 == 0o700
    (tmp_path / "groupwise").chmod(0o777)
    assert cache_folder().parent != tmp_path


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run under a number that no list of users knows."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert cache_folder().is_dir()
