"""A corpus of wrong recipes: what is said of each is known to the letter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from groupwise.config.recipes import parse_stages
from groupwise.errors import ConfigError

CORPUS = yaml.load(
    (Path(__file__).parent / "wrong_recipes.yaml").read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
)


def sections(text: str) -> dict[str, str]:
    """The lines of each top-level key."""
    return {part.partition(":")[0]: part for part in re.split(r"(?m)^(?=\S)", text) if part}


def text_of(case: dict[str, Any]) -> str:
    if "recipe" in case:
        return case["recipe"]
    base = CORPUS["bases"][case.get("base", "plain")]
    return "".join((sections(base) | sections(case["change"] + "\n")).values()) if "change" in case else base


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file lies near, hub names are taken on trust, and no packaged model was fetched."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.parametrize("case", CORPUS["wrong"], ids=range(len(CORPUS["wrong"])))
def test_every_mistake_is_said_with_its_line_and_remedy(case: dict[str, Any]) -> None:
    overrides = case.get("override", [])
    if isinstance(overrides, str):
        overrides = [overrides]
    with pytest.raises(ConfigError) as caught:
        parse_stages(text_of(case), "r.yaml", overrides)
    assert str(caught.value) == case["says"]
