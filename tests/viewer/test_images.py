"""The images of a prompt beside its tokens: from the run's folder, small, and nothing but images."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_models import checkpoint, png
from PIL import Image

import groupwise as gw
from groupwise.runs.rollout_files import IMAGE_SIDE
from groupwise.viewer.sources import RunSource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def letters(completion_ids: Any, **_: Any) -> list[float]:
    return [float(sum(ids) % 5) for ids in completion_ids]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step on an image of 24 x 16 pixels and one of 600 x 300."""
    root = tmp_path_factory.mktemp("images")
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "<img src=x onerror=alert(1)> which?"}]
    rows = [{"prompt": [{"role": "user", "content": content}], "images": [png(i), png(i + 9, 600, 300)]} for i in range(2)]
    settings = {"group": {"prompts_per_step": 2, "group_size": 3}, "rollout": {"max_new_tokens": 4}, "eval": {"at_start": False}}
    model = {"path": str(checkpoint(root / "model"))}
    steps = gw.train(objective="grpo", name="seen", runs=str(root), model=model, data=rows, rewards=letters, steps=1, **settings)
    assert len(list(steps)) == 1
    return root / "seen"


def test_small_copies_lie_in_the_folder_once(run: Path) -> None:
    sizes = sorted(Image.open(file).size for file in (run / "images").glob("*.png"))
    assert sizes == [(16, 24), (16, 24), (IMAGE_SIDE // 2, IMAGE_SIDE), (IMAGE_SIDE // 2, IMAGE_SIDE)]


def test_the_picture_stands_beside_its_group(run: Path, viewer: Callable, tab: Callable[..., Any]) -> None:
    page = tab(viewer(run).address)
    shown = page.locator(".prompt-images img")
    assert shown.count() == 2
    sizes = shown.evaluate_all("all => all.map((one) => [one.complete, one.naturalWidth, one.naturalHeight])")
    assert sizes == [[True, 16, 24], [True, 128, 256]]
    widths = shown.evaluate_all("all => all.map((one) => one.getBoundingClientRect().width)")
    assert all(width >= 128 for width in widths)  # a small one is magnified
    assert "images" not in page.locator("dl.row dt").all_inner_texts()  # its digest says nothing beside the image
    assert page.locator(".prompt-text").inner_text().count("<img src=x") == 1


def test_a_folder_of_strangers_shows_images_alone(run: Path, tmp_path: Path) -> None:
    source = RunSource(run)
    digest = next((run / "images").glob("*.png")).stem
    assert Image.open(io.BytesIO(source.image(digest) or b"")).format == "PNG"
    assert source.image("../config") is None
    assert source.image("0" * 32) is None
    (run / "images" / f"{'1' * 32}.png").write_bytes(b"<svg onload=alert(1)>")
    assert source.image("1" * 32) is None
