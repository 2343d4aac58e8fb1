"""The documentation as a site: it builds, asks no other host, fits a telephone, and axe-core finds nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install -e '.[docs]'")
ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning of mkdocs (a link that leads nowhere, a page that is not in the navigation) ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "algorithms").glob("*.md")]:
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).exists(), page.name
    assert (site / "security.html").exists()
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    assert not list(site.rglob("hooks.py"))


def test_a_page_loads_nothing_from_another_host(site: Path) -> None:
    """Links may lead away; what a browser fetches by itself may not."""
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        loads = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"' >]+)", text)
        loads += re.findall(r"<link\b[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon)\b[^>]*\bhref=[\"']?([^\"' >]+)", text)
        assert not [address for address in loads if address.startswith(("http:", "https:", "//"))], path.name


def pages() -> list[str]:
    """Pages to be looked at: one of each kind, and those with wide tables or pictures."""
    return [
        "index.html", "first-hour.html", "grpo.html", "kl.html", "batches.html", "choosing.html", "monitoring.html",
        "failures.html",
        "algorithms.html", "algorithms/ppo.html", "metrics.html", "settings.html", "models.html", "performance.html",
        "scaling.html", "from-trl.html", "architecture.html", "install.html", "api.html", "commands.html",
        "errors.html", "formats.html", "security.html",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def chromium(chromium_with: Callable[..., Any]) -> Iterator[Any]:
    with chromium_with("--allow-file-access-from-files") as browser:
        yield browser


WIDTHS = (1280, 390)
WIDTH = """async () => {
    await Promise.allSettled(document.getAnimations().map((one) => one.finished));
    return document.documentElement.scrollWidth;
}"""
"""The width of a page when what moves has come to rest: in a wider window the navigation slides into its place."""


@pytest.mark.parametrize(("turn", "width", "scheme"), [(0, 1280, "light"), (1, 1280, "dark"), (2, 390, "light"), (3, 390, "dark")])
def test_pages_are_whole_and_as_wide_as_the_window_and_axe_finds_nothing_serious(
    site: Path, chromium: Any, axe: Callable, turn: int, width: int, scheme: str
) -> None:
    """Every page once, dealt out among the four looks; the first page in each of them.  Every page in windows of both widths."""
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, asked, serious, wide, broken = context.new_page(), [], [], [], []
    page.on("request", lambda request: asked.append(request.url))
    for name in dict.fromkeys(["index.html", *pages()[turn::4]]):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto((site / name).as_uri())
        page.wait_for_selector("article h1")
        serious += [(name, *found) for found in axe(page)]
        broken += page.evaluate("[...document.images].filter((one) => one.complete && !one.naturalWidth).map((one) => one.src)")
        for other in (width, *(set(WIDTHS) - {width})):
            page.set_viewport_size({"width": other, "height": 900})
            if page.evaluate(WIDTH) > other:
                wide.append((name, other))
    context.close()
    assert not serious, serious
    assert not broken
    assert not wide
    assert not [address for address in asked if not address.startswith(("file:", "data:", "blob:"))]


def test_the_search_works_in_a_page_opened_from_a_file(site: Path, chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto((site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("leave one out")
    page.wait_for_selector(".md-search-result__item", timeout=20_000)
    page.close()


def test_the_navigation_is_in_the_order_of_a_learner() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert nav[:2] == ["index.md", "install.md"]
    assert [next(iter(part)) for part in nav[2:]] == ["Tutorials", "How to", "Explanation", "Reference"]
