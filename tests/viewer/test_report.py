"""The one-page report: whole, small, self-contained, and harmless."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import DataError
from groupwise.viewer import report as module
from groupwise.viewer.report import LARGEST, export, report
from groupwise.viewer.sources import open_sources


class Elements(html.parser.HTMLParser):
    """Every element with the names of its attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))


def test_a_report_is_one_small_file(run_folder: Path, other_folder: Path, tmp_path: Path) -> None:
    path = export([run_folder, other_folder], tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    assert 10_000 < len(text.encode()) < LARGEST
    assert [child.name for child in tmp_path.iterdir()] == ["report.html"]
    assert not [tag for tag, names in Elements(text).found if "src" in names or (tag == "link" and "href" in names)]


@pytest.mark.slow
def test_completions_change_no_element_of_the_report(run_folder: Path, hostile_folder: Path) -> None:
    """The same elements with the same attributes, whatever the completions say; and the same scripts, by their hash."""
    plain, hostile = (report(open_sources([folder])) for folder in (run_folder, hostile_folder))
    strip = lambda text: [found for found in Elements(text).found if found[0] not in ("tr", "th", "td", "li", "b")]  # noqa: E731 - rows of figures
    assert strip(hostile) == strip(plain)
    policy = re.search(r'content="(default-src[^"]+)"', hostile)
    assert policy is not None
    allowed = set(re.findall(r"sha256-([A-Za-z0-9+/=]+)", policy[1]))
    own = re.findall(r"<script>(.*?)</script>", hostile, re.DOTALL) + re.findall(r"<style>(.*?)</style>", hostile, re.DOTALL)
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in own} == allowed
    assert "unsafe" not in policy[1]


@pytest.mark.slow
def test_a_report_that_would_be_too_large_holds_fewer_groups(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.make_run(tmp_path / "large", 4, groups=8, size=8, texts=["y" * 150])
    sources = open_sources([folder])
    whole = len(report(sources).encode())
    assert whole < LARGEST
    monkeypatch.setattr(module, "LARGEST", whole - 1)
    assert len(report(sources).encode()) < whole
    monkeypatch.setattr(module, "LARGEST", 1000)
    with pytest.raises(DataError, match="one group"):
        report(sources)


def test_a_run_without_completions_and_a_file_have_reports_too(made: Any, tmp_path: Path) -> None:
    folder = made.make_run(tmp_path / "bare", 2, evaluated=False)
    for path in (folder / "rollouts").iterdir():
        path.unlink()
    assert "bare" in report(open_sources([folder]))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "completion": "a", "reward": 1}\n')
    assert "rows.jsonl" in report(open_sources([tmp_path / "rows.jsonl"]))


def test_a_folder_that_cannot_be_written_to_is_named(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot write the report .*; name another file"):
        export([run_folder], tmp_path / "nowhere" / "report.html")
